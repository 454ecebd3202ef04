"""A report of the collected data of each array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from reparax._data.seen import Seen
from reparax._reports.sections import write_sections
from reparax._reports.sizes import readable_size, size_in_bytes
from reparax._tree.paths import PyTree, flatten_with_names, path_text


@dataclass(frozen=True, repr=False)
class ExplainedInputs:
    """Which arrays have data, and why others have none; its repr is a table.

    Attributes:
      seen: The statistics of each array, by its path, as shapes.
    """

    seen: Mapping[str, Seen]

    def __repr__(self) -> str:
        n_read = sum(bool(entry.reads) for entry in self.seen.values())
        size = sum(size_in_bytes(x) for x in jax.tree.leaves(list(self.seen.values())))
        head = f"{n_read} of {len(self.seen)} arrays have data, {readable_size(size)} in all"
        rows = [(bool(entry.reads), (path, entry.columns)) for path, entry in self.seen.items()]
        return write_sections(head, ("with data", "without"), rows)


def report_of(seen: PyTree) -> ExplainedInputs:
    """The report of a tree of entries, or of their types."""
    paths, entries, _ = flatten_with_names(seen, lambda x: isinstance(x, Seen))
    return ExplainedInputs(dict(zip(map(path_text, paths), entries, strict=True)))
