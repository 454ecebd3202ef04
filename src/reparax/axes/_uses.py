"""Finds how a program uses weights: which axes of parameters its products with data contract, and which they keep.

``Uses`` reads the equations of a program one by one. It returns a ``Value`` for each output, which describes the
output's axes, and records how each equation uses weights: a product with data (``DataProduct``), a product of two
weights (``WeightProduct``), or any other read together with data (``OtherRead``).
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

    For the shapes (3, 4) and (4, 2), the axis of size 3 is in ``inputs``, the axis of size 2 is in ``outputs``, and
    both axes of size 4 are in ``middle``.

    Attributes:
      middle: The contraction of the two weights, described as a product with data as in ``(x @ W1) @ W2``. The outputs
        are the contracted axes of ``W1``, and the inputs are the contracted axes of ``W2``.
      inputs: The axes of ``W1`` that the product keeps, which are inputs in this orientation.
      outputs: The axes of ``W2`` that the product keeps, which are outputs in this orientation.
    """

    middle: DataProduct
    inputs: Origins
    outputs: Origins

    @classmethod
    def of(cls, dot: Contraction, first: Value, last: Value, line: str) -> WeightProduct:
        """Creates the product of two weights, oriented as if data were multiplied by ``first`` first.

        ``dot`` describes which axes of the weights are contracted, kept or batch axes, and ``line`` is the source line
        to report.
        """
        contracted, kept, batch = (
            (first.origins_of(axes(0)), last.origins_of(axes(1))) for axes in (dot.contracted, dot.kept, dot.batch)
        )
        stacked = union((*batch, first.stacked, last.stacked))
        return cls(DataProduct(contracted[1], contracted[0], stacked, line), *kept)

    def transposed(self) -> WeightProduct:
        """Returns the other orientation, as if data were multiplied by ``W2`` first, in ``(x @ W2.T) @ W1.T``."""
        return WeightProduct(self.middle.transposed(), self.outputs, self.inputs)


@dataclass(frozen=True)
class OtherRead:
    """Records that an equation reads a parameter in another way than in a product with data.

    Attributes:
      parameter: The index of the parameter among the argument arrays.
      line: The equation and its source line.
    """

    parameter: int
    line: str


class Uses(list[DataProduct | WeightProduct | OtherRead]):
    """A list of all uses of weights in the equations read so far.

    This class also finds the axes that index the members of ensembles. An ensemble consists of independent networks
    that read the same data. In the first layer, the axis of members looks like an output. In later products, this axis
    is a batch axis of the weights, which keeps the members ``apart``. An axis that is kept apart indexes members only
    if no product has ``contracted`` it, and no earlier equation has ``mixed`` entries along it, as the softmax of a
    router's scores does.
    """

    def __init__(self) -> None:
        """Creates an empty list of uses, and three empty sets of parameter axes.

        The sets collect axes that a product keeps apart, axes along which entries of data were mixed before such a
        product, and axes that a product contracts.
        """
        super().__init__()
        self._apart, self._mixed, self._contracted = Origins(), Origins(), Origins()

    @property
    def members(self) -> Origins:
        """The parameter axes that index the members of an ensemble, as far as the equations read so far show."""
        return self._apart - self._mixed - self._contracted

    def read_equation(self, view: View, operands: Sequence[Value], line: str) -> list[Value]:
        """Records how an equation uses weights, and returns a ``Value`` for each output, which describes its axes.

        For ``x @ w``, which multiplies data by a weight, the product is recorded. The result counts as data, and its
        ``unread_outputs`` are the output axes of ``w``, because no product has read them yet. ``line`` is the source
        line to report.
        """
        source, axes = _source_of_outputs(view, operands), axes_of(view, operands)
        if source is Source.WEIGHT:
            return self._read_weights(view, operands, axes, line)
        products = self._add_reads(view, operands, line) if source is Source.DATA else []
        outputs = union(product.outputs for product in products)
        outs = [Value(axes_of_out, source, unread_outputs=outputs) for axes_of_out in axes]
        data = [value for value in operands if value.source is Source.DATA]
        # A product with a weight reads the outputs of earlier products. All other equations pass these outputs on.
        if not data or (products and contraction_of(view) is not None):
            return outs
        return [self._pass_on_outputs(view, operands, data, out) for out in outs]

    def _pass_on_outputs(self, view: View, operands: Sequence[Value], data: Sequence[Value], out: Value) -> Value:
        """Returns ``out``, an output of an equation, with the unread outputs that the equation's data have.

        Unread outputs are output axes of weights in earlier products. This equation does not read them, because it is
        not a product with a weight, so ``out`` gets the ``unread_outputs`` and ``mixed_outputs`` of the operands
        ``data``. If the equation sums over an axis of the data, or changes entries along the axis as a sort does, the
        unread outputs on this axis become mixed outputs.
        """
        unread = union(value.unread_outputs for value in data)
        kept = out.origins - operands[0].origins_of(changed_axes(view))
        mixed = unread & (union(value.origins for value in data) - kept)
        if isinstance(view, Dot) and len(data) == 2:  # Data are multiplied by data, such as queries by keys.
            self._mixed |= mixed
        mixed_before = union(value.mixed_outputs for value in data)
        return replace(out, unread_outputs=out.unread_outputs | unread, mixed_outputs=mixed | mixed_before)

    def _read_weights(self, view: View, operands: Sequence[Value], axes: Sequence[Axes], line: str) -> list[Value]:
        """Records an equation that computes weights from weights, and returns a ``Value`` for each output.

        Other operands may be constants. ``axes`` holds the axes of each output. An output keeps only the origins
        (source axes of parameters) that the weights have, and gets the stacked axes of the weights.
        """
        if type(view) is View:  # The outputs of an unknown equation come from no known axes.
            for value in operands:
                self._add_other_read(value, line)
        weights = [value for value in operands if value.source is Source.WEIGHT]
        dot = contraction_of(view) if isinstance(view, Dot) and len(weights) == 2 else None
        if dot is not None:
            self.append(WeightProduct.of(dot, operands[0], operands[1], line))
        products_if_rows = self._find_products_if_rows(view, operands, line)
        known, stacked = union(value.origins for value in weights), union(value.stacked for value in weights)
        axes = [restrict_origins(axes_of_out, known) for axes_of_out in axes]
        outs = [Value(each, Source.WEIGHT, stacked, products_if_rows=products_if_rows) for each in axes]
        if not _takes_one_index(view, operands):
            return outs
        # In ``w[0]``, the axes that the output no longer has become stacked axes.
        return [replace(out, stacked=stacked | (operands[0].origins - out.origins)) for out in outs]

    def _find_products_if_rows(self, view: View, operands: Sequence[Value], line: str) -> frozenset[DataProduct]:
        """Returns the look-ups and products that take place if entries selected by constants are rows of a table.

        ``table[jnp.arange(8)]`` may be a slice of a weight, or a look-up of eight position embeddings. If it is a
        look-up, ``table[jnp.arange(8)] @ w`` multiplies data by ``w``. Both the look-up and the product are returned,
        but they are recorded only if the result is later used as data, such as positions that are added to embeddings.
        The result is empty if constants selected no entries up to this equation.
        """
        earlier = union(value.products_if_rows for value in operands)
        multiplied = list[int]()  # Indices of the operands that are weights in either case.
        if isinstance(view, Gather) and selects_entries(view, operands[1]):
            if len(view.partial_axes) > 1:  # It is unknown along which axis each index selects.
                self._add_other_read(operands[0], line)
            multiplied = [0] if _takes_vectors(view) else []
        elif earlier:
            weights = [(i, value) for i, value in enumerate(operands) if value.source is Source.WEIGHT]
            multiplied = [i for i, value in weights if not value.products_if_rows]
        return earlier | set(filter(None, (_product_with_data(view, operands[i], i, line) for i in multiplied)))

    def _add_reads(self, view: View, operands: Sequence[Value], line: str) -> list[DataProduct]:
        """Records how an equation with data reads each of its weights: in a product with the data, or otherwise.

        Returns the products with data that were added to the list of uses; an equation such as ``x + b`` adds none.
        """
        n_before = len(self)
        for i, value in enumerate(operands):
            if value.source is not Source.WEIGHT:
                continue
            product = _product_with_data(view, value, i, line)
            if product is not None:
                self._add_product(product, view, operands, i)
                # Entries that constants selected from a table are rows, and thus data, if another weight has multiplied
                # them. If the entries were only looked up, this operand is a slice of a weight.
                are_rows = any(use.how != LOOKUP for use in value.products_if_rows)
            else:
                self._add_other_read(value, line)
                long_axes = origins(axis for axis in value.axes if size_of(axis) != 1)
                # If the equation combines whole rows of a table with data, the rows were looked up. A penalty would
                # read a sum of squares instead.
                are_rows = any(use.outputs & long_axes for use in value.products_if_rows)
            if are_rows:
                self.extend(value.products_if_rows)
        return [use for use in self[n_before:] if isinstance(use, DataProduct)]

    def _add_product(self, product: DataProduct, view: View, operands: Sequence[Value], i: int) -> None:
        """Records a product of data with operand ``i``, which is a weight.

        Also records which axes of earlier layers the product contracts, and which axes it keeps apart as batch axes.
        These axes show which axes index the members of an ensemble.
        """
        self.append(product)
        if isinstance(view, Conv):
            self._read_convolution(view, *operands)
        elif isinstance(view, Dot | RaggedDot):
            data, contraction = operands[1 - i], contraction_of(view)
            assert contraction is not None  # Both kinds of products have a contraction.
            batch = contraction.batch(1 - i)
            other_axes = [k for k in range(len(data.axes)) if k not in batch]
            self._contracted |= data.origins_of(contraction.contracted(1 - i))
            # A product keeps an output axis of an earlier layer apart only if the data have it on batch axes alone.
            self._add_apart(data, data.origins_of(batch) - data.origins_of(other_axes))

    def _read_convolution(self, view: Conv, data: Value, kernel: Value) -> None:
        """Records which features of the data a convolution contracts, and which blocks of features it keeps apart.

        Blocks of features are the groups of a grouped convolution, such as one for each member of an ensemble. If each
        block has a single feature or a single output, as in a depthwise convolution, no blocks are recorded.
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
        """Records the axes of data that a product keeps apart; axes along which entries were mixed count as mixed.

        Only axes that are ``unread_outputs`` of the data count, because no earlier product has read these outputs.
        """
        self._apart |= axes & data.unread_outputs
        self._mixed |= axes & data.mixed_outputs

    def _add_other_read(self, value: Value, line: str) -> None:
        """Records that an equation reads a weight other than in a product, once for each parameter of the weight."""
        parameters = {parameter for parameter, _ in value.origins | value.stacked}
        self.extend(OtherRead(parameter, line) for parameter in parameters)


def _source_of_outputs(view: View, operands: Sequence[Value]) -> Source:
    """Returns whether the outputs of an equation are data, weights or constants.

    Usually, the result is the largest source among the operands: data before weights, and weights before constants.
    However, a weight remains a weight if data only scale the weight by a number or select one whole array of a stack.
    """
    is_of_weight = bool(operands) and operands[0].source is Source.WEIGHT
    # Vectors that data look up are data. Whole arrays that data select, such as the weights of an expert, are still
    # weights.
    if is_of_weight and isinstance(view, Gather):
        return Source.DATA if operands[1].source is Source.DATA and _takes_vectors(view) else Source.WEIGHT
    if is_of_weight and isinstance(view, DynamicSlice) and _takes_whole_array(view):
        return Source.WEIGHT
    if isinstance(view, equations.Multiply | equations.Divide):
        # A weight times a scalar that depends on data is still a weight, so scalars count only if all operands are
        # scalars.
        operands = [value for value in operands if value.varies] or operands
    return max((value.source for value in operands), default=Source.CONSTANT)


def _takes_whole_array(view: DynamicSlice) -> bool:
    """Returns whether a slice is one whole array of a stack, as (1, 8, 3) is of (5, 8, 3).

    Along each axis, the slice must have size 1 or the size of the stack. At least two axes must be larger than 1.
    """
    are_whole = [m == n for m, n in zip(view.slice_sizes, view.operands[0].aval.shape, strict=True) if m > 1]
    return len(are_whole) > 1 and all(are_whole)


def _takes_one_index(view: View, operands: Sequence[Value]) -> bool:
    """Returns whether an equation may take one index of an axis, as ``w[0]`` does, which makes the axis stacked."""
    if isinstance(view, Gather):
        return not selects_entries(view, operands[1])
    return isinstance(view, equations.Slice | equations.SplitAxis | equations.Unstack | DynamicSlice)


def _takes_vectors(view: Gather) -> bool:
    """Returns whether a look-up takes vectors or parts of axes from a table, rather than whole arrays.

    For example, a look-up takes vectors (3,) from a table (8, 3), but arrays (8, 3) from the weights (5, 8, 3) of
    experts.
    """
    kept = [i for i in range(len(view.slice_sizes)) if i not in view.removed_axes]
    # Under ``vmap``, an axis that a slice cuts is kept with size 1.
    long = {i for i in kept if i not in view.partial_axes or view.slice_sizes[i] != 1}
    return len(long) < 2 or bool(long.intersection(view.partial_axes))


def _product_with_data(view: View, value: Value, i: int, line: str) -> DataProduct | None:
    """Returns the product of data with the weight ``value``, which is operand ``i``; None if there is no product.

    In ``x @ w``, axis 0 of ``w`` is an input and axis 1 is an output. A look-up also counts as a product, because it
    contracts the rows of a table, as a product with one-hot vectors would.
    """
    contraction = contraction_of(view)
    if contraction is None or not _is_multiplied(view, contraction, i):
        return None
    inputs, outputs = value.origins_of(contraction.contracted(i)), value.origins_of(contraction.kept(i))
    # An axis whose slices were joined again may be stacked, because one of the slices may have had a single index.
    stacked = value.origins_of(contraction.batch(i)) | (value.stacked - inputs - outputs)
    windows = value.origins_of(view.dimension_numbers.rhs_spec[2:]) if isinstance(view, Conv) else Origins()
    return DataProduct(inputs, outputs, stacked, line, _how_multiplied(view), windows)


def _how_multiplied(view: View) -> str:
    """Returns the kind of product, such as ``PRODUCT`` or ``LOOKUP``, in which an equation multiplies a weight."""
    if isinstance(view, Conv):  # Transposed convolutions dilate their data.
        return CONVOLUTION if set(view.window["lhs_dilation"]) <= {1} else TRANSPOSED
    return PRODUCT if isinstance(view, Dot | RaggedDot) else LOOKUP


def _is_multiplied(view: View, contraction: Contraction, i: int) -> bool:
    """Returns whether a contraction multiplies data by its operand ``i``.

    The result is False if the operand holds the data of a convolution or the indices of a look-up.
    """
    match view:
        case Conv():
            return i == 1
        case Gather():
            return i == 0 and bool(view.partial_axes)
        case DynamicSlice():  # The only axis that the slice cuts holds the rows of the table.
            return i == 0 and len(contraction.contracted(0)) == 1
        case _:
            return True
