"""Defines the report of a transform: a table of what happens to each weight."""

from __future__ import annotations

from dataclasses import dataclass

from reparax.core.reports import fold_lines


@dataclass(frozen=True)
class Weight:
    """Describes what a transform does with one weight, as one line of a report.

    Attributes:
      path: The path of the parameter from which the weight is computed, or the common path of several parameters.
      type: The dtype and shape of the weight.
      is_transformed: Whether all products with the weight are transformed, so that they multiply by its factors or draw
        noise for each row.
      reason: Why the weight is transformed or not, and where.
    """

    path: str
    type: str
    is_transformed: bool
    reason: str


@dataclass(frozen=True, repr=False)
class Explained:
    """A report of what a transform does with each weight. The repr is a table.

    Attributes:
      weights: The weights with factors, or the weights with Gaussian noise.
      head: The first line, in which ``{}`` stands for the number of transformed weights, such as "1 of 2".
      titles: The title above the transformed weights, and the title above the others.
    """

    weights: tuple[Weight, ...]
    head: str
    titles: tuple[str, str]

    def __repr__(self) -> str:
        """Returns a table: the head, then the weights under each title. Equal weights of numbered layers are folded."""
        n = sum(weight.is_transformed for weight in self.weights)
        lines = [self.head.format(f"{n} of {len(self.weights)}")]
        for title, flag in zip(self.titles, (True, False), strict=True):
            weights = [weight for weight in self.weights if weight.is_transformed is flag]
            section = fold_lines((weight.path, (weight.type, weight.reason)) for weight in weights)
            lines += [f"  {title}:"] if section else []
            width = max((len(line.path) for line in section), default=0)
            lines += [f"    {line.path:<{width}}  {line.times}{'  '.join(line.value)}".rstrip() for line in section]
        return "\n".join(lines)
