"""How a program uses weights: which axes of parameters its products contract with data, and which they keep.

``Uses`` takes the equations of a program one by one. It returns the values of their outputs, and records what each
equation does with weights: a product with data (``DataProduct``), a product of two weights (``WeightProduct``), or
another read together with data (``OtherRead``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reparax.axes._rules import axes_of, changed_axes, in_blocks, selects_entries
from reparax.axes._values import Axes, DataProduct, Origins, Source, Value, origins, restrict_origins, size_of, union
from reparax.core.roles import CONVOLUTION, LOOKUP, PRODUCT, TRANSPOSED
from reparax.programs import equations
from reparax.programs.contractions import Contraction, contraction_of
from reparax.programs.equations import Conv, Dot, DynamicSlice, Gather, RaggedDot, View


@dataclass(frozen=True)
class WeightProduct:
    """A product of two weights, ``W1 @ W2``, in one orientation: as if data were multiplied by ``W1`` first.

    Attributes:
      middle: The contraction of the two as a product with data, ``(x @ W1) @ W2``: its outputs are the contracted axes
        of ``W1``, and its inputs those of ``W2``.
      inputs: The axes of ``W1`` that the product keeps, which are inputs in this orientation.
      outputs: The axes of ``W2`` that the product keeps, which are outputs in this orientation.
    """

    middle: DataProduct
    inputs: Origins
    outputs: Origins

    @classmethod
    def of(cls, dot: Contraction, first: Value, last: Value, line: str) -> WeightProduct:
        """The product of two weights, oriented as if data were multiplied by the left one first."""
        contracted, kept, batch = (
            (first.origins_of(axes(0)), last.origins_of(axes(1))) for axes in (dot.contracted, dot.kept, dot.batch)
        )
        stacked = union((*batch, first.stacked, last.stacked))
        return cls(DataProduct(contracted[1], contracted[0], stacked, line), *kept)

    def transposed(self) -> WeightProduct:
        """The other orientation: as if data were multiplied by ``W2`` first, in ``(x @ W2.T) @ W1.T``."""
        return WeightProduct(self.middle.transposed(), self.outputs, self.inputs)


@dataclass(frozen=True)
class OtherRead:
    """An equation that reads a parameter together with data, but is not a product of the two."""

    parameter: int
    line: str


class Uses(list[DataProduct | WeightProduct | OtherRead]):
    """The uses of weights in the equations that were read so far.

    It also finds the axes of ensembles. An ensemble consists of independent networks that read the same data, so in its
    first layer, the axis of the members looks like an output. Later products show that it is not: their weights have
    this axis as a batch axis, which keeps the members ``apart``. It is an axis of members only if nothing has ``mixed``
    entries along it before, as the softmax of a router's scores does, and if no product has ``contracted`` it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._apart, self._mixed, self._contracted = Origins(), Origins(), Origins()

    @property
    def members(self) -> Origins:
        """The axes of parameters that index the members of an ensemble."""
        return self._apart - self._mixed - self._contracted

    def read_equation(self, view: View, operands: Sequence[Value], line: str) -> list[Value]:
        """Records how an equation uses weights, and returns its outputs."""
        kind, axes = _kind_of_outputs(view, operands), axes_of(view, operands)
        if kind is Source.WEIGHT:
            return self._read_weights(view, operands, axes, line)
        n_before = len(self)
        if kind is Source.DATA:
            self._add_reads(view, operands, line)
        products = [use for use in self[n_before:] if isinstance(use, DataProduct)]
        outputs = union(product.outputs for product in products)
        data = [value for value in operands if value.kind is Source.DATA]
        outs = [Value(axes_of_out, kind, unread=outputs) for axes_of_out in axes]
        if not data or (products and contraction_of(view) is not None):
            return outs
        return [self._with_unread(view, operands, data, out) for out in outs]

    def _with_unread(self, view: View, operands: Sequence[Value], data: Sequence[Value], out: Value) -> Value:
        """The output of an equation that multiplies no weight, with the ``unread`` and ``mixed`` axes of its data."""
        unread = union(value.unread for value in data)
        kept = out.origins - operands[0].origins_of(changed_axes(view))
        mixed = unread & (union(value.origins for value in data) - kept)
        if isinstance(view, Dot) and len(data) == 2:
            self._mixed |= mixed
        return replace(out, unread=out.unread | unread, mixed=mixed | union(value.mixed for value in data))

    def _read_weights(self, view: View, operands: Sequence[Value], axes: Sequence[Axes], line: str) -> list[Value]:
        """Records an equation that computes weights from weights, and perhaps constants, and returns its outputs."""
        if type(view) is View:  # what the equation does to axes is not known
            for value in operands:
                self._add_other_read(value, line)
        weights = [value for value in operands if value.kind is Source.WEIGHT]
        dot = contraction_of(view) if isinstance(view, Dot) and len(weights) == 2 else None
        if dot is not None:
            self.append(WeightProduct.of(dot, operands[0], operands[1], line))
        if_rows = self._products_if_rows(view, operands, line)
        known, stacked = union(value.origins for value in weights), union(value.stacked for value in weights)
        outs = [Value(restrict_origins(each, known), Source.WEIGHT, stacked, if_rows=if_rows) for each in axes]
        if not _takes_one_index(view, operands):
            return outs
        return [replace(out, stacked=stacked | (operands[0].origins - out.origins)) for out in outs]

    def _products_if_rows(self, view: View, operands: Sequence[Value], line: str) -> frozenset[DataProduct]:
        """The look-ups and products up to this equation, if entries that constants chose are rows of a table.

        They are recorded only if the result is later used as data, such as positions that are added to embeddings.
        """
        earlier = union(value.if_rows for value in operands)
        multiplied = list[int]()
        if isinstance(view, Gather) and selects_entries(view, operands[1]):
            if len(view.partial_axes) > 1:  # only the indices themselves say along which of these axes they select
                self._add_other_read(operands[0], line)
            multiplied = [0] if _takes_vectors(view) else []
        elif earlier:
            multiplied = [i for i, value in enumerate(operands) if value.kind is Source.WEIGHT and not value.if_rows]
        return earlier | set(filter(None, (_product_with_data(view, operands[i], i, line) for i in multiplied)))

    def _add_reads(self, view: View, operands: Sequence[Value], line: str) -> None:
        """Records how an equation with data reads each of its weights: in a product with the data, or otherwise."""
        for i, value in enumerate(operands):
            product = _product_with_data(view, value, i, line) if value.kind is Source.WEIGHT else None
            if product is not None:
                self._add_product(product, view, operands, i)
            elif value.kind is Source.WEIGHT:
                self._add_other_read(value, line)
                long_axes = origins(axis for axis in value.axes if size_of(axis) != 1)
                # Whole rows meet data here, so they were looked up; a penalty would read a sum of their squares.
                if any(use.outputs & long_axes for use in value.if_rows):
                    self.extend(value.if_rows)

    def _add_product(self, product: DataProduct, view: View, operands: Sequence[Value], i: int) -> None:
        """Records a product of data with the operand ``i``, a weight."""
        self.append(product)
        if isinstance(view, Conv):
            self._read_convolution(view, *operands)
        elif isinstance(view, Dot | RaggedDot):
            data, contraction = operands[1 - i], contraction_of(view)
            assert contraction is not None
            batch = contraction.batch(1 - i)
            self._contracted |= data.origins_of(contraction.contracted(1 - i))
            self._add_apart(data, data.origins_of(batch) - data.origins_of({*range(len(data.axes))} - {*batch}))
        # Entries that constants chose, once multiplied by another weight, may be data (rows), or still a weight.
        if any(use.kind != LOOKUP for use in operands[i].if_rows):
            self.extend(operands[i].if_rows)

    def _read_convolution(self, view: Conv, data: Value, kernel: Value) -> None:
        """Records the features that a convolution contracts, and the blocks of features that it keeps apart.

        If each block has one feature or one output, as in a depthwise convolution, no blocks are recorded.
        """
        count, numbers = view.feature_group_count, view.dimension_numbers
        features, outputs = data.axes[numbers.lhs_spec[1]], kernel.axes[numbers.rhs_spec[0]]
        blocks, inside = in_blocks(view, features)
        self._contracted |= origins([inside])
        if count not in (1, size_of(features), size_of(outputs)):
            self._add_apart(data, origins([blocks]) - origins([inside]))
            blocks, inside = in_blocks(view, outputs)
            self._apart |= origins([blocks]) - origins([inside])

    def _add_apart(self, data: Value, axes: Origins) -> None:
        """Records outputs of earlier products that a product keeps apart; if they were mixed before, as mixed."""
        self._apart |= (axes & data.unread) - data.mixed
        self._mixed |= axes & data.unread & data.mixed

    def _add_other_read(self, value: Value, line: str) -> None:
        """Records that an equation reads a weight otherwise than in a product."""
        parameters = {parameter for parameter, _ in value.origins | value.stacked}
        self.extend(OtherRead(parameter, line) for parameter in sorted(parameters))


def _kind_of_outputs(view: View, operands: Sequence[Value]) -> Source:
    """The kind of the outputs of an equation."""
    is_of_weight = bool(operands) and operands[0].kind is Source.WEIGHT
    # Vectors that data look up are data. Whole arrays that data choose, such as those of an expert, are still weights.
    if is_of_weight and isinstance(view, Gather):
        return Source.DATA if operands[1].kind is Source.DATA and _takes_vectors(view) else Source.WEIGHT
    if is_of_weight and isinstance(view, DynamicSlice) and _takes_whole_array(view):
        return Source.WEIGHT
    if isinstance(view, equations.Multiply | equations.Divide):
        # A weight times a scalar that is computed from data is still a weight.
        operands = [value for value in operands if value.varies] or operands
    return max((value.kind for value in operands), default=Source.CONSTANT)


def _takes_whole_array(view: DynamicSlice) -> bool:
    """Whether a slice is one whole array of a stack.

    It is whole along each axis of which it has more than one index, and there are several such axes.
    """
    are_whole = [m == n for m, n in zip(view.slice_sizes, view.operands[0].aval.shape, strict=True) if m > 1]
    return len(are_whole) > 1 and all(are_whole)


def _takes_one_index(view: View, operands: Sequence[Value]) -> bool:
    """Whether an equation takes one array of a stack, so that the axes that its output lacks are stacked axes."""
    if isinstance(view, Gather):
        return not selects_entries(view, operands[1])
    return isinstance(view, equations.Slice | equations.SplitAxis | equations.Unstack | DynamicSlice)


def _takes_vectors(view: Gather) -> bool:
    """Whether each slice is a vector or a part of an axis, as from a table, and not the whole array of an expert."""
    kept = [i for i in range(len(view.slice_sizes)) if i not in view.removed_axes]
    # Under vmap, slices keep the axis that they cut, with size 1.
    long = {i for i in kept if i not in view.partial_axes or view.slice_sizes[i] != 1}
    return len(long) < 2 or bool(long.intersection(view.partial_axes))


def _product_with_data(view: View, value: Value, i: int, line: str) -> DataProduct | None:
    """The product of an operand, a weight, with data; None if the equation is not one.

    A look-up is one too: it contracts the rows of a table, as a product with one-hot vectors would.
    """
    contraction = contraction_of(view)
    if contraction is None or not _is_multiplied(view, contraction, i):
        return None
    inputs, outputs = value.origins_of(contraction.contracted(i)), value.origins_of(contraction.kept(i))
    # If slices of an axis were put together again, one of them may have been a single index, which made it stacked.
    stacked = value.origins_of(contraction.batch(i)) | (value.stacked - inputs - outputs)
    windows = value.origins_of(view.dimension_numbers.rhs_spec[2:]) if isinstance(view, Conv) else Origins()
    return DataProduct(inputs, outputs, stacked, line, _kind_of_product(view), windows)


def _kind_of_product(view: View) -> str:
    """The word for how a contraction multiplies a weight."""
    if isinstance(view, Conv):
        return CONVOLUTION if set(view.window["lhs_dilation"]) <= {1} else TRANSPOSED
    return PRODUCT if isinstance(view, Dot | RaggedDot) else LOOKUP


def _is_multiplied(view: View, contraction: Contraction, i: int) -> bool:
    """Whether a contraction multiplies an operand as a weight, unlike the data of a convolution, or indices."""
    match view:
        case Conv():
            return i == 1
        case Gather():
            return i == 0 and bool(view.partial_axes)
        case DynamicSlice():  # the one axis that it cuts holds the rows
            return i == 0 and len(contraction.contracted(0)) == 1
        case _:
            return True
