"""Which outputs of products index the members of an ensemble: independent networks that read the same data."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from reparax.axes._labels import Labels
from reparax.axes._values import Axis, Labelled, Origin, Origins, Source
from reparax.programs.equations import Conv, Dot, RaggedDot, View


class Members:
    """What becomes of the outputs of each product until the next one reads them.

    The first layer of an ensemble has an output for each member. That these are members shows in the next products,
    whose weights keep the axis apart, and in that nothing before mixes entries along it, as the softmax of a router's
    scores does.
    """

    def __init__(self, labels: Labels) -> None:
        """Nothing was read yet."""
        self._labels, self._of = labels, dict[Origin, int]()
        self._apart, self._mixed = set[Origin](), set[Origin]()

    @property
    def found(self) -> Origins:
        """The outputs that index members."""
        return frozenset(self._apart - self._mixed)

    def add_parameter(self, axes: Mapping[Origin, int]) -> None:
        """Adds the labels of a parameter's axes."""
        self._of |= axes

    def read_product(self, view: View, weights: Labelled, data: Labelled, i: int) -> None:
        """Adds what a product of weights with its operand ``i``, which is data, keeps apart."""
        apart = [data.axes[k] for k in view.batch[i]] if isinstance(view, Dot | RaggedDot) else list[Axis]()
        own = self._inside(data.made, self._atoms(apart))
        if isinstance(view, Conv):
            blocks = self._blocks(view, data)
            own = self._inside(data.made, blocks)
            self._apart |= self._inside(weights.axes[view.dimension_numbers.rhs_spec[0]].of, blocks)
        self._apart |= own - data.mixed
        self._mixed |= own & data.mixed

    def follow(self, view: View, operands: Iterable[Labelled], out: Labelled) -> Labelled:
        """An output of any other equation, with what it is made of."""
        made, mixed = Origins(), Origins()
        data, kept = [value for value in operands if value.kind is Source.DATA], self._atoms(out.axes)
        for value in data:
            lost = [axis for axis in value.axes if not self._labels.atoms(axis.label) <= kept]
            own = self._along(value.made, lost)
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

    def _inside(self, each: Origins, atoms: frozenset[int]) -> Origins:
        """Those axes of parameters whose labels are among these."""
        return frozenset(one for one in each if self._labels.atoms(self._of[one]) <= atoms)

    def _along(self, made: Origins, axes: Iterable[Axis]) -> Origins:
        """Those outputs that lie along some axes."""
        atoms = self._atoms(axes)
        return frozenset(each for each in made if self._labels.atoms(self._of[each]) & atoms)

    def _atoms(self, axes: Iterable[Axis]) -> frozenset[int]:
        """The labels of which those of axes consist."""
        return frozenset[int]().union(*(self._labels.atoms(axis.label) for axis in axes))
