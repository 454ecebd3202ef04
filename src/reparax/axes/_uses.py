"""How a program uses weights: which of their axes its products contract with data, and which stay."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from reparax.axes._values import Axes, Axis, DataProduct, Labelled, Labels, Origin, Origins, Source, origins
from reparax.core.roles import CONVOLUTION, LOOKUP, PRODUCT, TRANSPOSED
from reparax.programs import equations
from reparax.programs.contractions import Contraction, contraction_of
from reparax.programs.equations import Conv, Dot, DynamicSlice, Gather, RaggedDot, View
from reparax.programs.jaxprs import type_of


class Side(NamedTuple):
    """The axes of one weight in a product with another: those that it contracts, and those that stay."""

    contracted: Origins
    free: Origins


@dataclass(frozen=True)
class Between:
    """A product of two weights, and the axes that it keeps apart."""

    left: Side
    right: Side
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

    def __init__(self, members: "Members") -> None:
        """Nothing was seen yet."""
        super().__init__()
        self.members = members

    def outputs(self, view: View, operands: Sequence[Labelled], axes: Sequence[Axes], line: str) -> list[Labelled]:
        """The outputs of an equation, whose axes are known; how it uses weights is added."""
        kind = _kind_of_outputs(view, operands)
        n_before = len(self)
        if kind is Source.WEIGHT:
            return self._weights(view, operands, axes, line)
        if kind is Source.DATA:
            self._add_reads(view, operands, line)
        outs = [Labelled(tuple(Axis(axis.label) for axis in axes_of_out), kind) for axes_of_out in axes]
        products = [use for use in self[n_before:] if isinstance(use, DataProduct)]
        new_outputs = Origins().union(*(product.outputs for product in products))
        if not products or contraction_of(view) is None:
            outs = [self.members.follow(view, operands, out) for out in outs]
        return [replace(out, unread_outputs=out.unread_outputs | new_outputs) for out in outs]

    def _weights(self, view: View, operands: Sequence[Labelled], axes: Sequence[Axes], line: str) -> list[Labelled]:
        """The outputs of an equation that makes weights of weights, and perhaps of constants."""
        if type(view) is View:  # what it does to axes is not known
            for value in operands:
                self._add_other_read(value, line)
        dot = contraction_of(view) if isinstance(view, Dot) else None
        if dot is not None and all(value.kind is Source.WEIGHT for value in operands):
            self.append(_between(dot, operands[0], operands[1], line))
        elif dot is not None:
            axes = [_axes_in_new_basis(dot, operands, axes[0])]
        stacked = Origins().union(*(value.stacked for value in operands))
        if_rows = self._if_rows(view, operands, line)
        outs = [Labelled(axes_of_out, Source.WEIGHT, stacked, if_rows=if_rows) for axes_of_out in axes]
        shapes = (type_of(v).shape for v in view.eqn.outvars)
        return [_with_stacked_axes(view, operands, out, shape) for out, shape in zip(outs, shapes, strict=True)]

    def _if_rows(self, view: View, operands: Sequence[Labelled], line: str) -> frozenset[DataProduct]:
        """What look-ups and products were until here, if the entries of weights that constants chose are rows."""
        earlier = frozenset[DataProduct]().union(*(value.if_rows for value in operands))
        lookups = list[int]()
        if isinstance(view, Gather) and _selects(view, operands[1]):
            if len(view.cut) > 1:  # which axis of the places is which of these, only their values say
                self._add_other_read(operands[0], line)
            lookups = [0] if _gives_vectors(view) else []
        elif earlier:
            lookups = [i for i, value in enumerate(operands) if value.kind is Source.WEIGHT and not value.if_rows]
        return earlier | set(filter(None, (_product(view, operands[i], i, line) for i in lookups)))

    def _add_reads(self, view: View, operands: Sequence[Labelled], line: str) -> None:
        """Adds what an equation with data does to each weight that it reads: a product, or another read."""
        for i, value in enumerate(operands):
            if value.kind is Source.WEIGHT:
                product = _product(view, value, i, line)
                if product is not None:
                    self._add_product(product, view, operands, i)
                else:
                    self._add_other_read(value, line)
                    sizes = zip(value.axes, view.operands[i].aval.shape, strict=True)
                    long_axes = origins(axis for axis, n in sizes if n > 1)
                    if any(use.outputs & long_axes for use in value.if_rows):  # rows, not a sum of their squares
                        self.extend(value.if_rows)

    def _add_product(self, product: DataProduct, view: View, operands: Sequence[Labelled], i: int) -> None:
        """Adds a product of the weight ``i`` with data."""
        self.append(product)
        if isinstance(view, Dot | RaggedDot | Conv):
            self.members.read_product(view, operands[i], operands[1 - i], 1 - i)
        # What other weights made of entries that constants chose may be data, or a weight.
        if any(use.kind != LOOKUP for use in operands[i].if_rows):
            self.extend(operands[i].if_rows)

    def _add_other_read(self, value: Labelled, line: str) -> None:
        """Adds that an equation, which is no product, reads a weight."""
        parameters = {parameter for parameter, _ in origins(value.axes) | value.stacked}
        self.extend(OtherRead(parameter, line) for parameter in sorted(parameters))


def _between(dot: Contraction, left: Labelled, right: Labelled, line: str) -> Between:
    """A product of two weights, with the axes of each that it contracts, keeps, and keeps apart."""
    stacked = left.origins_of(dot.batch(0)) | left.stacked | right.origins_of(dot.batch(1)) | right.stacked
    left_side, right_side = (
        Side(contracted=value.origins_of(dot.contracted(i)), free=value.origins_of(dot.kept(i)))
        for i, value in enumerate((left, right))
    )
    return Between(left_side, right_side, stacked, line)


def _axes_in_new_basis(dot: Contraction, operands: Sequence[Labelled], axes: Axes) -> Axes:
    """The axes of a product of weights with a constant matrix: its other axes stand for those that it contracts."""
    constant = [value.kind for value in operands].index(Source.CONSTANT)
    labels = {operands[constant].axes[k].label for k in dot.kept(constant)}
    contracted = operands[1 - constant].origins_of(dot.contracted(1 - constant))
    return tuple(Axis(axis.label, contracted) if axis.label in labels else axis for axis in axes)


def _kind_of_outputs(view: View, operands: Sequence[Labelled]) -> Source:
    """What the outputs of an equation are computed from."""
    is_of_weight = bool(operands) and operands[0].kind is Source.WEIGHT
    if is_of_weight and isinstance(view, Gather):  # data choose vectors, or whole arrays: of a layer, or an expert
        return Source.DATA if operands[1].kind is Source.DATA and _gives_vectors(view) else Source.WEIGHT
    if is_of_weight and isinstance(view, DynamicSlice) and _gives_whole_arrays(view):
        return Source.WEIGHT
    if isinstance(view, equations.Multiply | equations.Divide):
        # A multiple of weights by a number that is data is one of weights.
        operands = [value for value in operands if any(map(value.varies, range(len(value.axes))))] or operands
    return max((value.kind for value in operands), default=Source.CONSTANT)


def _gives_whole_arrays(view: DynamicSlice) -> bool:
    """Whether a slice is whole along all axes of which it has more than one index, and these are several."""
    are_whole = [m == n for m, n in zip(view.slice_sizes, view.operands[0].aval.shape, strict=True) if m > 1]
    return len(are_whole) > 1 and all(are_whole)


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


def _with_stacked_axes(view: View, operands: Sequence[Labelled], out: Labelled, sizes: Sequence[int]) -> Labelled:
    """An output whose axes of the weight of which it has a single index are those of stacked arrays."""
    if isinstance(view, Gather):
        return _with_stacked_axes_of_gather(view, operands, out)
    if isinstance(view, equations.Unstack):
        return replace(out, stacked=out.stacked | operands[0].axes[view.axis].origins)
    if not isinstance(view, equations.Slice | DynamicSlice | equations.SplitAxis):
        return out
    shapes = zip(out.axes, view.operands[0].aval.shape, sizes, strict=True)
    axes = tuple(Axis(axis.label) if n > 1 and m == 1 else axis for axis, n, m in shapes)
    return replace(out, axes=axes, stacked=out.stacked | (origins(out.axes) - origins(axes)))


def _with_stacked_axes_of_gather(view: Gather, operands: Sequence[Labelled], out: Labelled) -> Labelled:
    """A look-up whose axes are stacked where slices have one index, unless constants choose entries as slices do."""
    table, places = operands[0], operands[1]
    single = _single_axes(view)
    kept = [i for i in range(len(table.axes)) if i not in view.gone]
    axis_of_table = dict(zip(view.dimension_numbers.offset_dims, kept, strict=True))
    selects = _selects(view, places)
    keeps = (axis_of_table[k] not in single if k in axis_of_table else selects for k in range(len(out.axes)))
    axes = tuple(axis if keep else Axis(axis.label) for axis, keep in zip(out.axes, keeps, strict=True))
    stacked = Origins() if selects else table.origins_of((*view.gone, *single))
    return replace(out, axes=axes, stacked=out.stacked | stacked)


def _product(view: View, value: Labelled, i: int, line: str) -> DataProduct | None:
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
            return i == 0 and bool(view.cut)
        case DynamicSlice():  # with the one axis that is cut as that of rows
            return i == 0 and len(contraction.contracted(0)) == 1
        case _:
            return True


class Members:
    """Which outputs of products index the members of an ensemble: independent networks that read the same data.

    The first layer of an ensemble has an output for each member. That these are members shows in the next products,
    whose weights keep the axis apart, and in that nothing before mixes entries along it, as the softmax of a router's
    scores does.
    """

    def __init__(self, labels: Labels) -> None:
        """Nothing was read yet."""
        self._labels = labels
        self._label_of = dict[Origin, int]()
        self._apart, self._mixed = set[Origin](), set[Origin]()

    @property
    def found(self) -> Origins:
        """The outputs that index members."""
        return frozenset(self._apart - self._mixed)

    def add_parameter(self, labels: Mapping[Origin, int]) -> None:
        """Adds the labels of a parameter's axes."""
        self._label_of |= labels

    def read_product(self, view: Dot | RaggedDot | Conv, weights: Labelled, data: Labelled, i: int) -> None:
        """Adds what a product of weights with its operand ``i``, which is data, keeps apart."""
        if isinstance(view, Conv):
            atoms = self._blocks(view, data)
            self._apart |= self._inside(weights.axes[view.dimension_numbers.rhs_spec[0]].origins, atoms)
        else:
            atoms = self._atoms(data.axes[k] for k in view.batch[i])
        outputs_apart = self._inside(data.unread_outputs, atoms)
        self._apart |= outputs_apart - data.mixed_outputs
        self._mixed |= outputs_apart & data.mixed_outputs

    def follow(self, view: View, operands: Iterable[Labelled], out: Labelled) -> Labelled:
        """An output of any other equation, with what it is made of."""
        data = [value for value in operands if value.kind is Source.DATA]
        mixed_by_view = Origins().union(*(self._mixed_outputs(value, out) for value in data))
        if isinstance(view, Dot) and len(data) == 2:
            self._mixed |= mixed_by_view
        unread = Origins().union(*(value.unread_outputs for value in data))
        mixed = mixed_by_view.union(*(value.mixed_outputs for value in data))
        return replace(out, unread_outputs=unread, mixed_outputs=mixed)

    def _mixed_outputs(self, value: Labelled, out: Labelled) -> Origins:
        """The outputs of products of which a value is made, and along which an equation that makes ``out`` mixes it."""
        kept = self._atoms(out.axes)
        lost = self._atoms(axis for axis in value.axes if not self._labels.atoms(axis.label) <= kept)
        return frozenset(axis for axis in value.unread_outputs if self._labels.atoms(self._label_of[axis]) & lost)

    def _blocks(self, view: Conv, data: Labelled) -> frozenset[int]:
        """The labels of blocks of features of which a convolution keeps each apart; none if a block has one output."""
        count, numbers = view.feature_group_count, view.dimension_numbers
        data_shape, kernel_shape = (v.aval.shape for v in view.operands)
        features = data_shape[numbers.lhs_spec[1]]
        if count == 1 or count in (features, kernel_shape[numbers.rhs_spec[0]]):
            return frozenset()
        label = data.axes[numbers.lhs_spec[1]].label
        return self._labels.atoms(self._labels.divided(label, (count, features // count))[0])

    def _inside(self, axes: Origins, atoms: frozenset[int]) -> Origins:
        """Those axes of parameters whose labels are among these."""
        return frozenset(axis for axis in axes if self._labels.atoms(self._label_of[axis]) <= atoms)

    def _atoms(self, axes: Iterable[Axis]) -> frozenset[int]:
        """The labels of which those of axes consist."""
        return frozenset[int]().union(*(self._labels.atoms(axis.label) for axis in axes))
