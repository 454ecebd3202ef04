"""A report of the noisy weights that draw for each example."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reparax._programs.call import Arguments
from reparax._programs.sources import calls, source
from reparax._tree.paths import describe
from reparax.products._drawing import Drawing, Read
from reparax.products._local import Local
from reparax.products._paths import common_path, paths_of
from reparax.products._sections import sections


@dataclass(frozen=True)
class NoisyWeight:
    """One noisy weight.

    Attributes:
      path: The path of the parameter from which it is computed, or the common path of several.
      type: Its dtype and shape.
      is_own: Whether all that reads it draws for each example.
      reason: How many products do, and what takes one draw for all, and where.
    """

    path: str
    type: str
    is_own: bool
    reason: str


@dataclass(frozen=True, repr=False)
class ExplainedDraws:
    """Which noisy weights draw for each example; its repr is a table.

    Attributes:
      weights: The weights with Gaussian noise.
    """

    weights: tuple[NoisyWeight, ...]

    def __repr__(self) -> str:
        own = sum(weight.is_own for weight in self.weights)
        rows = {
            title: [(each.path, (each.type, each.reason)) for each in self.weights if each.is_own is flag]
            for title, flag in {"for each example": True, "one draw for all": False}.items()
        }
        return sections(f"{own} of {len(self.weights)} noisy weights draw for each example", rows)


def explained_draws(fun: Local, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExplainedDraws:
    """The noisy weights of ``fun(*args, **kwargs)``."""
    given = Arguments.of(fun.who, fun.fun, fun.argnums, args, kwargs)
    way = Drawing()
    traced, *_ = fun.rewritten(way, args, kwargs)
    return ExplainedDraws(tuple(_weights(way.reads, paths_of(given, traced), calls(traced.program))))


def _weights(reads: Sequence[Read], paths: Mapping[int, str], lines: Mapping[int, str]) -> Iterator[NoisyWeight]:
    of_path: dict[str, list[Read]] = {}
    for read in reads:
        of_path.setdefault(common_path(read.made.origins, paths), []).append(read)
    for path, own in of_path.items():
        shared = [read for read in own if not read.is_own]
        n = len(own) - len(shared)
        reasons = [f"{n} product{'s' if n > 1 else ''}"] if n else []
        reasons += dict.fromkeys(_taken(read, lines) for read in shared)
        yield NoisyWeight(path, describe(own[0].made.type), not shared, "; ".join(reasons))


def _taken(read: Read, lines: Mapping[int, str]) -> str:
    if read.eqn is None:
        return "it is returned, or carried"
    return f"{read.eqn.primitive.name} takes one draw for all: {source(read.eqn, 0, lines)}"
