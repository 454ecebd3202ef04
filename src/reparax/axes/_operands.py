"""The operands of one equation, and what equations do to axes."""

from collections.abc import Iterable, Sequence

from reparax.axes._labels import Labels
from reparax.axes._values import Axis, Labelled, origins
from reparax.programs.equations import Axes as Pairs
from reparax.programs.equations import View

Axes = tuple[Axis, ...]


class Operands:
    """The values that an equation reads; labels are joined, divided and frozen on the way."""

    def __init__(self, labels: Labels, view: View, values: Sequence[Labelled], line: str) -> None:
        """Takes the values of an equation.

        Args:
          labels: The labels of all axes.
          view: The equation.
          values: What it reads.
          line: The equation and its source line, as the reason why axes have an order.
        """
        self.labels, self.line = labels, line
        self.axes = [value.axes for value in values]
        self.shapes: list[Sequence[int]] = [v.aval.shape for v in view.operands]

    def new(self, of: Iterable[Axis] = ()) -> Axis:
        """An axis with a label of its own."""
        return Axis(self.labels.new(), origins(of), in_place=False)

    def ordered(self, *axes: Axis) -> Axis:
        """An axis whose order counts, made of axes whose order counts."""
        for axis in axes:
            self.labels.freeze(axis.label, self.line)
        return Axis(self.labels.new(self.line), origins(axes), in_place=False)

    def joined(self, axes: Sequence[Axis]) -> Axis:
        """The axis that axes of several values are."""
        for axis in axes[1:]:
            self.labels.same(axes[0].label, axis.label)
        return Axis.joined(axes)

    def join_in_product(self, sides: tuple[Axes, Axes], contracting: Pairs, batch: Pairs) -> Axes:
        """The axes of a product of matrices, those of the batch first; what it sums over or shares becomes one axis."""
        a, b = sides
        for i, j in zip(*contracting, strict=True):
            self.joined((a[i], b[j]))
        shared = (self.joined((a[i], b[j])) for i, j in zip(*batch, strict=True))
        kept = [
            axis for k, axes in enumerate(sides) for i, axis in enumerate(axes) if i not in (*contracting[k], *batch[k])
        ]
        return (*shared, *kept)

    def divided(self, axis: Axis, sizes: Sequence[int]) -> Sequence[int]:
        """The labels of an axis that is read as several; an axis of size one has a label that no other has."""
        long = [n for n in sizes if n != 1]
        parts = iter(self.labels.divided(axis.label, long) if len(long) > 1 else [axis.label])
        return [self.labels.new() if n == 1 else next(parts) for n in sizes]

    def part(self, axis: Axis, n: int, start: int, stop: int, stride: int = 1) -> Axis:
        """Some of the ``n`` indices of an axis: one of several equal blocks has the order that the others have."""
        size = stop - start
        if len(range(start, stop, stride)) == n:
            return axis
        if stride != 1 or size < 2 or n % size or start % size:
            return self.ordered(axis)
        blocks, inside = self.labels.divided(axis.label, (n // size, size))
        self.labels.freeze(blocks, self.line)
        return Axis(inside, axis.of, in_place=False)

    def partly(self, kept: Iterable[bool]) -> Axes:
        """The first operand's axes; those that are not kept lose indices, or get others."""
        return tuple(a if keep else self.ordered(a) for a, keep in zip(self.axes[0], kept, strict=True))
