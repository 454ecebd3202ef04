"""How a program uses weights: which of their axes its products contract with data, and which stay."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reparax.axes._values import Axes, Axis, DataProduct, Labelled, Labels, Origin, Origins, Source, origins
from reparax.core.roles import CONVOLUTION, LOOKUP, PRODUCT, TRANSPOSED
from reparax.programs import equations
from reparax.programs.contractions import Contraction, contraction_of
from reparax.programs.equations import Conv, Dot, DynamicSlice, Gather, RaggedDot, View
from reparax.programs.jaxprs import type_of


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
            self._add_read(view, operands, line)
        outs = [Labelled(tuple(Axis(axis.label) for axis in axes_of_out), kind) for axes_of_out in axes]
        products = [use for use in self[n_before:] if isinstance(use, DataProduct)]
        made = Origins().union(*(product.outputs for product in products))
        if not products or contraction_of(view) is None:
            outs = [self.members.follow(view, operands, out) for out in outs]
        return [replace(out, made=out.made | made) for out in outs]

    def _weights(self, view: View, operands: Sequence[Labelled], axes: Sequence[Axes], line: str) -> list[Labelled]:
        """The outputs of an equation that makes weights of weights, and perhaps of constants."""
        for value in operands if type(view) is View else ():  # what it does to axes is not known
            self._add_other_read(value, line)
        if isinstance(view, Dot):
            axes = [self._axes_of_weights(view, operands, axes[0], line)]
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

    def _axes_of_weights(self, view: Dot, operands: Sequence[Labelled], axes: Axes, line: str) -> Axes:
        """The axes of a product of weights with weights, which is added, or with a constant."""
        dot = contraction_of(view)
        assert dot is not None
        sides = [
            (value.of(dot.contracted(i)), value.of(dot.kept(i)), value.of(dot.batch(i)) | value.stacked)
            for i, value in enumerate(operands)
        ]
        if all(value.kind is Source.WEIGHT for value in operands):
            self.append(Between(sides[0][:2], sides[1][:2], sides[0][2] | sides[1][2], line))
            return axes
        # A constant matrix changes the basis: its other axes stand for those that it contracts.
        constant = [value.kind for value in operands].index(Source.CONSTANT)
        labels = {operands[constant].axes[k].label for k in dot.kept(constant)}
        contracted = sides[1 - constant][0]
        return tuple(Axis(axis.label, contracted, in_place=False) if axis.label in labels else axis for axis in axes)


def _kind_of_outputs(view: View, operands: Sequence[Labelled]) -> Source:
    """What the outputs of an equation are computed from."""
    if isinstance(view, Gather | DynamicSlice) and operands[0].kind is Source.WEIGHT:
        if isinstance(view, Gather):  # data choose vectors, or whole arrays: of a layer, or those of an expert
            is_table = operands[1].kind is Source.DATA and _gives_vectors(view)
            return Source.DATA if is_table else Source.WEIGHT
        long = [m == n for m, n in zip(view.slice_sizes, view.operands[0].aval.shape, strict=True) if m > 1]
        if len(long) > 1 and all(long):
            return Source.WEIGHT
    if isinstance(view, equations.Multiply | equations.Divide):
        # A multiple of weights by a number that is data is one of weights.
        operands = [value for value in operands if any(map(value.varies, range(len(value.axes))))] or operands
    return max((value.kind for value in operands), default=Source.CONSTANT)


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
    old = operands[0].axes if operands else ()
    axes = out.axes
    stacked = Origins()
    if isinstance(view, equations.Slice | DynamicSlice | equations.SplitAxis):
        shapes = zip(out.axes, view.operands[0].aval.shape, sizes, strict=True)
        axes = tuple(Axis(axis.label) if n > 1 and m == 1 else axis for axis, n, m in shapes)
        stacked = origins(out.axes) - origins(axes)
    elif isinstance(view, equations.Unstack):
        stacked = old[view.axis].of
    elif isinstance(view, Gather):
        single = _single_axes(view)
        kept = [i for i in range(len(old)) if i not in view.gone]
        offsets = dict(zip(view.dimension_numbers.offset_dims, kept, strict=True))
        selects = _selects(view, operands[1])
        keeps = (offsets[k] not in single if k in offsets else selects for k in range(len(axes)))
        axes = tuple(axis if keep else Axis(axis.label) for axis, keep in zip(axes, keeps, strict=True))
        stacked = Origins() if selects else origins(old[i] for i in (*view.gone, *single))
    return replace(out, axes=axes, stacked=out.stacked | stacked)


def _product(view: View, value: Labelled, i: int, line: str) -> DataProduct | None:
    """The product of an operand with data, if the equation is one: of a table that it looks up, the rows go."""
    contraction = contraction_of(view)
    if contraction is None or not _multiplies(view, contraction, i):
        return None
    inputs, outputs = value.of(contraction.contracted(i)), value.of(contraction.kept(i))
    # Of an axis whose parts are put together again, one part may be a single index.
    stacked = value.of(contraction.batch(i)) | (value.stacked - inputs - outputs)
    if not isinstance(view, Conv):
        return DataProduct(inputs, outputs, stacked, line, PRODUCT if isinstance(view, Dot) else LOOKUP)
    how = CONVOLUTION if set(view.window["lhs_dilation"]) <= {1} else TRANSPOSED
    return DataProduct(inputs, outputs, stacked, line, how, value.of(view.dimension_numbers.rhs_spec[2:]))


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
        self._of = dict[Origin, int]()
        self._apart, self._mixed = set[Origin](), set[Origin]()

    @property
    def found(self) -> Origins:
        """The outputs that index members."""
        return frozenset(self._apart - self._mixed)

    def add_parameter(self, axes: Mapping[Origin, int]) -> None:
        """Adds the labels of a parameter's axes."""
        self._of |= axes

    def read_product(self, view: Dot | RaggedDot | Conv, weights: Labelled, data: Labelled, i: int) -> None:
        """Adds what a product of weights with its operand ``i``, which is data, keeps apart."""
        if isinstance(view, Conv):
            blocks = self._blocks(view, data)
            own = self._inside(data.made, blocks)
            self._apart |= self._inside(weights.axes[view.dimension_numbers.rhs_spec[0]].of, blocks)
        else:
            own = self._inside(data.made, self._atoms(data.axes[k] for k in view.batch[i]))
        self._apart |= own - data.mixed
        self._mixed |= own & data.mixed

    def follow(self, view: View, operands: Iterable[Labelled], out: Labelled) -> Labelled:
        """An output of any other equation, with what it is made of."""
        made, mixed = Origins(), Origins()
        data = [value for value in operands if value.kind is Source.DATA]
        kept = self._atoms(out.axes)
        for value in data:
            lost = self._atoms(axis for axis in value.axes if not self._labels.atoms(axis.label) <= kept)
            own = frozenset(origin for origin in value.made if self._labels.atoms(self._of[origin]) & lost)
            made, mixed = made | value.made, mixed | value.mixed | own
            if isinstance(view, Dot) and len(data) == 2:
                self._mixed |= own
        return replace(out, made=made, mixed=mixed)

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
        return frozenset(axis for axis in axes if self._labels.atoms(self._of[axis]) <= atoms)

    def _atoms(self, axes: Iterable[Axis]) -> frozenset[int]:
        """The labels of which those of axes consist."""
        return frozenset[int]().union(*(self._labels.atoms(axis.label) for axis in axes))
