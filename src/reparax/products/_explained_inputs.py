"""A report of what is known of the data that arrays are multiplied with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from reparax._axes.seen import Seen
from reparax._programs.call import Arguments
from reparax._tree.paths import named, path_text
from reparax._tree.sizes import readable, size_in_bytes
from reparax.products._inputs import Inputs
from reparax.products._sections import sections


@dataclass(frozen=True, repr=False)
class ExplainedInputs:
    """Which arrays have data, and why others have none; its repr is a table.

    Attributes:
      seen: For the path of each array what is known, as shapes.
    """

    seen: Mapping[str, Seen]

    def __repr__(self) -> str:
        read = sum(bool(entry.reads) for entry in self.seen.values())
        size = sum(size_in_bytes(x) for x in jax.tree.leaves(list(self.seen.values())))
        rows = {
            title: [(path, each.told) for path, each in self.seen.items() if bool(each.reads) is flag]
            for title, flag in {"with data": True, "without": False}.items()
        }
        return sections(f"{read} of {len(self.seen)} arrays have data, {readable(size)} in all", rows)


def explained_inputs(fun: Inputs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExplainedInputs:
    """What ``fun(*args, **kwargs)`` collects."""
    given = Arguments.of(fun.who, fun.fun, fun.argnums, args, kwargs)
    seen = jax.eval_shape(lambda arrays: given.call(arrays, fun), given.arrays)
    paths, entries, _ = named(seen, lambda x: isinstance(x, Seen))
    return ExplainedInputs(dict(zip(map(path_text, paths), entries, strict=True)))
