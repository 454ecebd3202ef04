"""A report of the noisy weights that draw for each example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reparax.core.paths import describe
from reparax.core.reports import write_sections
from reparax.programs.sources import describe_read
from reparax.programs.weights.paths import common_path
from reparax.transforms.draws._drawing import NoisyRead


@dataclass(frozen=True)
class NoisyWeight:
    """One noisy weight.

    Attributes:
      path: The path of the parameter from which it is computed, or the common path of several.
      type: Its dtype and shape.
      is_own: Whether every read of it draws for each example.
      reason: How many products draw for each example, and where one draw serves all.
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
        n_own = sum(weight.is_own for weight in self.weights)
        head = f"{n_own} of {len(self.weights)} noisy weights draw for each example"
        rows = [(weight.is_own, (weight.path, (weight.type, weight.reason))) for weight in self.weights]
        return write_sections(head, ("for each example", "one draw for all"), rows)


def explained(reads: Sequence[NoisyRead], paths: Mapping[int, str], lines: Mapping[int, str]) -> ExplainedDraws:
    """The report of all reads of noisy weights, with the paths of arguments and the user's lines."""
    return ExplainedDraws(tuple(_noisy_weights(reads, paths, lines)))


def _noisy_weights(
    reads: Sequence[NoisyRead], paths: Mapping[int, str], lines: Mapping[int, str]
) -> Iterator[NoisyWeight]:
    """For each path, its noisy weight, and how many products draw for each row, or why not."""
    of_path: dict[str, list[NoisyRead]] = {}
    for read in reads:
        of_path.setdefault(common_path(read.origin.origins, paths), []).append(read)
    for path, all_reads in of_path.items():
        of_one_draw = [read for read in all_reads if not read.is_own]
        n = len(all_reads) - len(of_one_draw)
        reasons = [f"{n} product{'s' if n > 1 else ''}"] if n else []
        reasons += dict.fromkeys(describe_read(read.eqn, "takes one draw for all", lines) for read in of_one_draw)
        yield NoisyWeight(path, describe(all_reads[0].origin.type), not of_one_draw, "; ".join(reasons))
