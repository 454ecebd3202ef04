"""How a program uses weights: which of their axes its products contract with data, and which stay."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from reparax.axes._members import Members
from reparax.axes._values import Axis, DataProduct, Labelled, Origins, Source, origins
from reparax.core.roles import CONVOLUTION, LOOKUP, PRODUCT, TRANSPOSED
from reparax.programs.equations import (
    Conv,
    Divide,
    Dot,
    DynamicSlice,
    Gather,
    Multiply,
    RaggedDot,
    Slice,
    SplitAxis,
    Unstack,
    View,
)
from reparax.programs.jaxprs import type_of

Ways = tuple[Iterable[int], Iterable[int], Iterable[int]]
"""The axes of an operand that are contracted, that stay, and of which each index is an operand of its own."""


@dataclass(frozen=True)
class Between:
    """A product of two weights: of each, the axes that it contracts and those that stay."""

    left: tuple[Origins, Origins]
    right: tuple[Origins, Origins]
    stacked: Origins
    line: str


@dataclass(frozen=True)
class OtherRead:
    """Another equation that reads a parameter and data."""

    parameter: int
    line: str


class Uses(list[DataProduct | Between | OtherRead]):
    """The uses that were seen so far.

    Attributes:
      members: What becomes of the outputs of products.
    """

    def __init__(self, members: Members) -> None:
        """Nothing was seen yet."""
        super().__init__()
        self.members = members

    def outputs(
        self, view: View, operands: Sequence[Labelled], axes: Sequence[Sequence[Axis]], line: str
    ) -> list[Labelled]:
        """The outputs of an equation, whose axes are known; how it uses weights is added."""
        kind = max((value.kind for value in _deciding_operands(view, operands)), default=Source.CONSTANT)
        stacked = Origins().union(*(value.stacked for value in operands))
        n_before = len(self)
        if isinstance(view, Gather) and operands[0].kind is Source.WEIGHT and _is_table(view, operands[1]):
            self._add_read(view, operands, line)
            kind = Source.DATA
        elif (
            isinstance(view, Gather | DynamicSlice) and operands[0].kind is Source.WEIGHT and _takes_whole_arrays(view)
        ):
            kind = Source.WEIGHT  # whole arrays that an index chooses: of a layer, or those of an expert
        elif kind is Source.DATA:
            self._add_read(view, operands, line)
        if kind is not Source.WEIGHT:
            outs = [Labelled(tuple(Axis(axis.label) for axis in each), kind) for each in axes]
            products = [use for use in self[n_before:] if isinstance(use, DataProduct)]
            made = Origins().union(*(product.outputs for product in products))
            if not products or type(view) not in WAYS:
                outs = [self.members.follow(view, operands, out) for out in outs]
            return [replace(out, made=out.made | made) for out in outs]
        for value in operands if type(view) is View else ():  # what it does to axes is not known
            self._add_other_read(value, line)
        if isinstance(view, Dot):
            axes = [self._axes_of_weights(view, operands, axes[0], line)]
        if_rows = self._if_rows(view, operands, line)
        shapes = (type_of(v).shape for v in view.eqn.outvars)
        return [
            _with_stacked_axes(view, operands, Labelled(tuple(each), kind, stacked, if_rows=if_rows), shape)
            for each, shape in zip(axes, shapes, strict=True)
        ]

    def _if_rows(self, view: View, operands: Sequence[Labelled], line: str) -> frozenset[DataProduct]:
        """What look-ups and products were until here, if the entries of weights that constants chose are rows."""
        found, read = frozenset[DataProduct]().union(*(value.if_rows for value in operands)), list[int]()
        if isinstance(view, Gather) and _selects(view, operands[1]):
            if len(view.cut) > 1:  # which axis of the places is which of these, only their values say
                self._add_other_read(operands[0], line)
            read = [0] if _gives_vectors(view) else []
        elif found:
            read = [i for i, value in enumerate(operands) if value.kind is Source.WEIGHT and not value.if_rows]
        products = (_product(view, operands[i], i, line) for i in read)
        return found | {product for product in products if product is not None}

    def _add_read(self, view: View, operands: Sequence[Labelled], line: str) -> None:
        """Adds what an equation with data does to each weight that it reads: a product, or another read."""
        for i, value in enumerate(operands):
            if value.kind is not Source.WEIGHT:
                continue
            if (product := _product(view, value, i, line)) is not None:
                self.append(product)
                if isinstance(view, Dot | RaggedDot | Conv):
                    self.members.read_product(view, value, operands[1 - i], 1 - i)
                # What other weights made of entries that constants chose may be data, or a weight.
                if any(use.how != LOOKUP for use in value.if_rows):
                    self.extend(value.if_rows)
            else:
                self._add_other_read(value, line)
                sizes = zip(value.axes, view.operands[i].aval.shape, strict=True)
                shown = origins(axis for axis, n in sizes if n > 1)
                if any(use.outputs & shown for use in value.if_rows):  # rows, not a sum of their squares
                    self.extend(value.if_rows)

    def _add_other_read(self, value: Labelled, line: str) -> None:
        """Adds that an equation, which is no product, reads a weight."""
        parameters = {parameter for parameter, _ in origins(value.axes) | value.stacked}
        self.extend(OtherRead(parameter, line) for parameter in sorted(parameters))

    def _axes_of_weights(
        self, view: Dot, operands: Sequence[Labelled], axes: Sequence[Axis], line: str
    ) -> Sequence[Axis]:
        """The axes of a product of weights with weights, which is added, or with a constant."""
        sides, kept = list[tuple[Origins, Origins]](), Origins()
        for i, value in enumerate(operands):
            contracted, stay, batch = _ways_of_dot(view, value, i)
            sides.append((origins(value.axes[k] for k in contracted), origins(value.axes[k] for k in stay)))
            kept |= origins(value.axes[k] for k in batch) | value.stacked
        if all(value.kind is Source.WEIGHT for value in operands):
            self.append(Between(sides[0], sides[1], kept, line))
            return axes
        # A constant matrix changes the basis: its other axes stand for those that it contracts.
        constant = [value.kind for value in operands].index(Source.CONSTANT)
        others = set(_ways_of_dot(view, operands[constant], constant)[1])
        labels = {operands[constant].axes[k].label for k in others}
        return [
            Axis(axis.label, sides[1 - constant][0], in_place=False) if axis.label in labels else axis for axis in axes
        ]


def _deciding_operands(view: View, operands: Sequence[Labelled]) -> Sequence[Labelled]:
    """The operands that say what an output is: a multiple of weights by a number that is data is one of weights."""
    if not isinstance(view, Multiply | Divide):
        return operands
    return [value for value in operands if any(map(value.varies, range(len(value.axes))))] or operands


def _is_table(view: Gather, indices: Labelled) -> bool:
    """Whether data choose vectors, or parts."""
    return indices.kind is Source.DATA and _gives_vectors(view)


def _selects(view: Gather, indices: Labelled) -> bool:
    """Whether places that are no data choose entries along axes, as slices do; the number of a layer does not."""
    return indices.kind is not Source.DATA and len(view.operands[1].aval.shape) > 1


def _gives_vectors(view: Gather) -> bool:
    """Whether each slice is a vector, or a part of an axis, as of a table; those of layers and experts are arrays."""
    long = {i for i in range(len(view.slice_sizes)) if i not in (*view.gone, *_single_axes(view))}
    return len(long) < 2 or bool(long.intersection(view.cut))


def _single_axes(view: Gather) -> list[int]:
    """The axes of which slices keep a single index, as those of an index under ``vmap``."""
    return [i for i in view.cut if view.slice_sizes[i] == 1 and i not in view.gone]


def _takes_whole_arrays(view: Gather | DynamicSlice) -> bool:
    """Whether an index chooses arrays along axes of which it takes one entry, and all others as a whole."""
    if isinstance(view, Gather):
        return True
    pairs = [(m, n) for m, n in zip(view.slice_sizes, view.operands[0].aval.shape, strict=True) if m > 1]
    return len(pairs) > 1 and all(m == n for m, n in pairs)


def _with_stacked_axes(view: View, operands: Sequence[Labelled], out: Labelled, sizes: Sequence[int]) -> Labelled:
    """An output whose axes of the weight of which it has a single index are those of stacked arrays."""
    old, axes, stacked = operands[0].axes if operands else (), out.axes, Origins()
    if isinstance(view, Slice | DynamicSlice | SplitAxis):
        shapes = zip(out.axes, view.operands[0].aval.shape, sizes, strict=True)
        axes = tuple(Axis(axis.label) if n > 1 and m == 1 else axis for axis, n, m in shapes)
        stacked = origins(out.axes) - origins(axes)
    elif isinstance(view, Unstack):
        stacked = old[view.axis].of
    elif isinstance(view, Gather):
        single, kept = _single_axes(view), [i for i in range(len(old)) if i not in view.gone]
        offsets, selects = dict(zip(view.dimension_numbers.offset_dims, kept, strict=True)), _selects(view, operands[1])
        keeps = (offsets[k] not in single if k in offsets else selects for k in range(len(axes)))
        axes = tuple(axis if keep else Axis(axis.label) for axis, keep in zip(axes, keeps, strict=True))
        stacked = Origins() if selects else origins(old[i] for i in (*view.gone, *single))
    return replace(out, axes=axes, stacked=out.stacked | stacked)


def _other_axes(value: Labelled, taken: Collection[int]) -> list[int]:
    """The axes of a value but for these."""
    return [k for k in range(len(value.axes)) if k not in taken]


def _ways_of_dot(view: Dot, value: Labelled, i: int) -> Ways:
    """The axes of an operand of a matrix product that are contracted, that stay, and those of a batch."""
    contracted, batch = view.contracting[i], view.batch[i]
    return contracted, _other_axes(value, (*contracted, *batch)), batch


def _ways_of_ragged_dot(view: RaggedDot, value: Labelled, i: int) -> Ways:
    """As of a matrix product; the axis of the matrices of all groups counts as one of a batch."""
    contracted, group = view.contracting[i], [view.group] if i == 1 and view.group is not None else []
    apart = (*view.batch[i], *group)
    return contracted, _other_axes(value, (*contracted, *apart)), apart


def _ways_of_convolution(view: Conv, value: Labelled, i: int) -> Ways | None:
    """The axes of a kernel: inputs and the window are contracted, outputs stay; None for the data."""
    del value
    out, *inputs = view.dimension_numbers.rhs_spec
    return (inputs, [out], ()) if i == 1 else None


def _ways_of_gather(view: Gather, value: Labelled, i: int) -> Ways | None:
    """The axes of a table: those of its rows are contracted; None for indices, or if no axis is cut."""
    rows, batch = view.cut, view.dimension_numbers.operand_batching_dims
    return (rows, _other_axes(value, (*rows, *batch)), batch) if i == 0 and rows else None


def _ways_of_dynamic_slice(view: DynamicSlice, value: Labelled, i: int) -> Ways | None:
    """The axes of a table: the one axis that is cut is that of its rows; None if there are several."""
    sizes = zip(view.slice_sizes, view.operands[0].aval.shape, strict=True)
    rows = [k for k, (m, n) in enumerate(sizes) if m < n]
    return (rows, _other_axes(value, rows), ()) if i == 0 and len(rows) == 1 else None


WAYS: dict[type[View], Callable[..., Ways | None]] = {
    Dot: _ways_of_dot,
    RaggedDot: _ways_of_ragged_dot,
    Conv: _ways_of_convolution,
    Gather: _ways_of_gather,
    DynamicSlice: _ways_of_dynamic_slice,
}
"""For a product of an operand with data: what its axes are; None if it is no such product."""


def _product(view: View, value: Labelled, i: int, line: str) -> DataProduct | None:
    """The product of an operand with data, if the equation is one."""
    way = WAYS.get(type(view))
    if way is None or (axes := way(view, value, i)) is None:
        return None
    inputs, outputs, stacked = (origins(value.axes[k] for k in each) for each in axes)
    # Of an axis whose parts are put together again, one part may be a single index.
    stacked |= value.stacked - inputs - outputs
    return DataProduct(inputs, outputs, stacked, line, *_name_and_window(view, value))


def _name_and_window(view: View, value: Labelled) -> tuple[str, Origins]:
    """What such a product is called, and the axes of its window."""
    if isinstance(view, Conv):
        moved = view.dimension_numbers.rhs_spec[2:]
        name = CONVOLUTION if set(view.window["lhs_dilation"]) <= {1} else TRANSPOSED
        return name, origins(value.axes[k] for k in moved)
    return PRODUCT if isinstance(view, Dot) else LOOKUP, Origins()
