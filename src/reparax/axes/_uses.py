"""How a program uses weights: which of their axes its products contract with data, and which stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reparax.axes._rules import axes_of, changed_axes, in_blocks, selects
from reparax.axes._values import (
    Axes,
    DataProduct,
    Origins,
    Source,
    Value,
    origins,
    restricted,
    size_of,
    union,
)
from reparax.core.roles import CONVOLUTION, LOOKUP, PRODUCT, TRANSPOSED
from reparax.programs import equations
from reparax.programs.contractions import Contraction, contraction_of
from reparax.programs.equations import Conv, Dot, DynamicSlice, Gather, RaggedDot, View


@dataclass(frozen=True)
class Between:
    """A product of two weights as one with data, which meet the weight with the axes ``start`` first, then the other.

    The outputs of the product are the axes that it contracts of the first weight; the other keeps the axes ``end``.
    """

    product: DataProduct
    start: Origins
    end: Origins

    @classmethod
    def of(cls, dot: Contraction, first: Value, last: Value, line: str) -> Between:
        """The product of two weights, of which data meet the left one first."""
        contracted, kept, batch = (
            (first.origins_of(axes(0)), last.origins_of(axes(1))) for axes in (dot.contracted, dot.kept, dot.batch)
        )
        stacked = union((*batch, first.stacked, last.stacked))
        return cls(DataProduct(contracted[1], contracted[0], stacked, line), *kept)

    def turned(self) -> Between:
        """The same, if data meet the other weight first."""
        return Between(self.product.turned(), self.end, self.start)


@dataclass(frozen=True)
class OtherRead:
    """Another equation that reads a parameter and data."""

    parameter: int
    line: str


class Uses(list[DataProduct | Between | OtherRead]):
    """The uses that were seen so far, and what became of the outputs of products.

    The first layer of an ensemble, independent networks that read the same data, has an output for each member. That
    these are members shows in the next products, whose weights keep the axis ``apart``. Nothing before may have
    ``mixed`` entries along it, as the softmax of a router's scores does, and no product may have ``contracted`` it.
    """

    def __init__(self) -> None:
        """Nothing was seen yet."""
        super().__init__()
        self._apart, self._mixed, self._contracted = Origins(), Origins(), Origins()

    @property
    def members(self) -> Origins:
        """The outputs of products that index the members of an ensemble."""
        return self._apart - self._mixed - self._contracted

    def outputs(self, view: View, operands: Sequence[Value], line: str) -> list[Value]:
        """The outputs of an equation; how it uses weights is added."""
        kind, axes = _kind_of_outputs(view, operands), axes_of(view, operands)
        if kind is Source.WEIGHT:
            return self._weights(view, operands, axes, line)
        n_before = len(self)
        if kind is Source.DATA:
            self._add_reads(view, operands, line)
        products = [use for use in self[n_before:] if isinstance(use, DataProduct)]
        outputs = union(product.outputs for product in products)
        data = [value for value in operands if value.kind is Source.DATA]
        outs = [Value(axes_of_out, kind, unread=outputs) for axes_of_out in axes]
        if not data or (products and contraction_of(view) is not None):
            return outs
        return [self._follow(view, operands, data, out) for out in outs]

    def _follow(self, view: View, operands: Sequence[Value], data: Sequence[Value], out: Value) -> Value:
        """An output of an equation that is no product with weights, with what became of the outputs of products."""
        unread = union(value.unread for value in data)
        kept = out.origins - operands[0].origins_of(changed_axes(view))
        mixed = unread & (union(value.origins for value in data) - kept)
        if isinstance(view, Dot) and len(data) == 2:
            self._mixed |= mixed
        return replace(out, unread=out.unread | unread, mixed=mixed | union(value.mixed for value in data))

    def _weights(self, view: View, operands: Sequence[Value], axes: Sequence[Axes], line: str) -> list[Value]:
        """The outputs of an equation that makes weights of weights, and perhaps of constants."""
        if type(view) is View:  # what it does to axes is not known
            for value in operands:
                self._add_other_read(value, line)
        weights = [value for value in operands if value.kind is Source.WEIGHT]
        dot = contraction_of(view) if isinstance(view, Dot) and len(weights) == 2 else None
        if dot is not None:
            self.append(Between.of(dot, operands[0], operands[1], line))
        if_rows = self._if_rows(view, operands, line)
        known, stacked = union(value.origins for value in weights), union(value.stacked for value in weights)
        outs = [Value(restricted(axes_of_out, known), Source.WEIGHT, stacked, if_rows=if_rows) for axes_of_out in axes]
        if not _takes_one_index(view, operands):
            return outs
        return [replace(out, stacked=stacked | (operands[0].origins - out.origins)) for out in outs]

    def _if_rows(self, view: View, operands: Sequence[Value], line: str) -> frozenset[DataProduct]:
        """What look-ups and products were until here, if the entries of weights that constants chose are rows."""
        earlier = union(value.if_rows for value in operands)
        lookups = list[int]()
        if isinstance(view, Gather) and selects(view, operands[1]):
            if len(view.partial_axes) > 1:  # which axis of the places is which of these, only their values say
                self._add_other_read(operands[0], line)
            lookups = [0] if _gives_vectors(view) else []
        elif earlier:
            lookups = [i for i, value in enumerate(operands) if value.kind is Source.WEIGHT and not value.if_rows]
        return earlier | set(filter(None, (_product(view, operands[i], i, line) for i in lookups)))

    def _add_reads(self, view: View, operands: Sequence[Value], line: str) -> None:
        """Adds what an equation with data does to each weight that it reads: a product, or another read."""
        for i, value in enumerate(operands):
            product = _product(view, value, i, line) if value.kind is Source.WEIGHT else None
            if product is not None:
                self._add_product(product, view, operands, i)
            elif value.kind is Source.WEIGHT:
                self._add_other_read(value, line)
                long_axes = origins(axis for axis in value.axes if size_of(axis) != 1)
                if any(use.outputs & long_axes for use in value.if_rows):  # rows, not a sum of their squares
                    self.extend(value.if_rows)

    def _add_product(self, product: DataProduct, view: View, operands: Sequence[Value], i: int) -> None:
        """Adds a product of the weight ``i`` with data."""
        self.append(product)
        if isinstance(view, Conv):
            self._read_convolution(view, *operands)
        elif isinstance(view, Dot | RaggedDot):
            data, contraction = operands[1 - i], contraction_of(view)
            assert contraction is not None
            batch = contraction.batch(1 - i)
            self._contracted |= data.origins_of(contraction.contracted(1 - i))
            self._keep_apart(data, data.origins_of(batch) - data.origins_of({*range(len(data.axes))} - {*batch}))
        # What other weights made of entries that constants chose may be data, or a weight.
        if any(use.kind != LOOKUP for use in operands[i].if_rows):
            self.extend(operands[i].if_rows)

    def _read_convolution(self, view: Conv, data: Value, kernel: Value) -> None:
        """Adds that a convolution contracts features, and keeps blocks of them apart; not if a block has one output."""
        count, numbers = view.feature_group_count, view.dimension_numbers
        features, outputs = data.axes[numbers.lhs_spec[1]], kernel.axes[numbers.rhs_spec[0]]
        blocks, inside = in_blocks(view, features)
        self._contracted |= origins([inside])
        if count not in (1, size_of(features), size_of(outputs)):
            self._keep_apart(data, origins([blocks]) - origins([inside]))
            blocks, inside = in_blocks(view, outputs)
            self._apart |= origins([blocks]) - origins([inside])

    def _keep_apart(self, data: Value, axes: Origins) -> None:
        """Adds outputs of products that a product of their values with weights keeps apart."""
        self._apart |= (axes & data.unread) - data.mixed
        self._mixed |= axes & data.unread & data.mixed

    def _add_other_read(self, value: Value, line: str) -> None:
        """Adds that an equation, which is no product, reads a weight."""
        parameters = {parameter for parameter, _ in value.origins | value.stacked}
        self.extend(OtherRead(parameter, line) for parameter in sorted(parameters))


def _kind_of_outputs(view: View, operands: Sequence[Value]) -> Source:
    """What the outputs of an equation are computed from."""
    is_of_weight = bool(operands) and operands[0].kind is Source.WEIGHT
    if is_of_weight and isinstance(view, Gather):  # data choose vectors, or whole arrays: of a layer, or an expert
        return Source.DATA if operands[1].kind is Source.DATA and _gives_vectors(view) else Source.WEIGHT
    if is_of_weight and isinstance(view, DynamicSlice) and _gives_whole_arrays(view):
        return Source.WEIGHT
    if isinstance(view, equations.Multiply | equations.Divide):
        # A multiple of weights by a number that is data is one of weights.
        operands = [value for value in operands if value.varies] or operands
    return max((value.kind for value in operands), default=Source.CONSTANT)


def _gives_whole_arrays(view: DynamicSlice) -> bool:
    """Whether a slice is whole along all axes of which it has more than one index, and these are several."""
    are_whole = [m == n for m, n in zip(view.slice_sizes, view.operands[0].aval.shape, strict=True) if m > 1]
    return len(are_whole) > 1 and all(are_whole)


def _takes_one_index(view: View, operands: Sequence[Value]) -> bool:
    """Whether axes that its output has lost are those of stacked arrays; places that choose as slices do keep them."""
    if isinstance(view, Gather):
        return not selects(view, operands[1])
    return isinstance(view, equations.Slice | equations.SplitAxis | equations.Unstack | DynamicSlice)


def _gives_vectors(view: Gather) -> bool:
    """Whether each slice is a vector, or a part of an axis, as of a table; those of layers and experts are arrays."""
    kept = [i for i in range(len(view.slice_sizes)) if i not in view.removed_axes]
    # Under vmap, slices keep an axis of size 1.
    long = {i for i in kept if i not in view.partial_axes or view.slice_sizes[i] != 1}
    return len(long) < 2 or bool(long.intersection(view.partial_axes))


def _product(view: View, value: Value, i: int, line: str) -> DataProduct | None:
    """The product of an operand with data, if the equation is one: of a table that it looks up, the rows go."""
    contraction = contraction_of(view)
    if contraction is None or not _multiplies(view, contraction, i):
        return None
    inputs, outputs = value.origins_of(contraction.contracted(i)), value.origins_of(contraction.kept(i))
    # Of an axis whose parts are put together again, one part may be a single index.
    stacked = value.origins_of(contraction.batch(i)) | (value.stacked - inputs - outputs)
    windows = value.origins_of(view.dimension_numbers.rhs_spec[2:]) if isinstance(view, Conv) else Origins()
    return DataProduct(inputs, outputs, stacked, line, _kind_of_product(view), windows)


def _kind_of_product(view: View) -> str:
    """The word for what a contraction does with a weight."""
    if isinstance(view, Conv):
        return CONVOLUTION if set(view.window["lhs_dilation"]) <= {1} else TRANSPOSED
    return PRODUCT if isinstance(view, Dot) else LOOKUP


def _multiplies(view: View, contraction: Contraction, i: int) -> bool:
    """Whether an operand of a contraction is multiplied: not the data of a convolution, nor where a look-up looks."""
    match view:
        case Conv():
            return i == 1
        case Gather():
            return i == 0 and bool(view.partial_axes)
        case DynamicSlice():  # with the one axis that is cut as that of rows
            return i == 0 and len(contraction.contracted(0)) == 1
        case _:
            return True
