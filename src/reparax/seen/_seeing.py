"""The way of ``inputs``: arrays are followed to the products that read them, and the data there are counted.

A weight is followed as a sum of one product. Its first factor is the array; the next ones, one for each axis, hold the
index of each entry along that axis. What moves or slices the array moves and slices these too, so they say which
entries a product reads, also inside of a scan, of which each step reads one layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from reparax._data.seen import Read
from reparax._programs import jaxprs
from reparax._programs.equations.bodies import ShardMap
from reparax._programs.equations.elementwise import ConvertType, Divide, Multiply, Negate
from reparax._programs.equations.kinds import kind_of, view_of
from reparax._programs.equations.view import View
from reparax._programs.roots import holds_apply, is_apply, mark_of
from reparax._programs.sources import describe_read
from reparax._weights import moves, multiply
from reparax._weights.facts import Facts, facts_of_outputs
from reparax._weights.reader import Answer, Outs, Reader
from reparax._weights.sums import Factor, Label, Product, Sum
from reparax.seen._contractions import Contraction, Lookup, contraction, lookup
from reparax.seen._taps import Taps, tap_gradient
from reparax.seen._totals import AllRows, RowsOfGroups, Totals, second_moments

COLLECTED = {
    "full": ("count", "first", "absolute", "second"),
    "diagonal": ("count", "absolute", "second"),
    "largest": ("count", "largest"),
    "cross": ("count", "second", "cross"),
}
"""The statistics of each kind of moments."""
ONE = Label(1)
"""A further axis of indices, so that those of one entry are no mere number."""


@dataclass(frozen=True)
class Root:
    """An effective array: its leaf in the tree that an ``apply`` gives."""

    leaf: int


@dataclass(frozen=True)
class CountedRead:
    """One way in which an array is read: a :class:`Read` without data, and whether it is the rows of a table."""

    root: Any
    bare: Read
    is_table: bool

    def slopes(self, moments: str) -> Array:
        """The moments of gradients before any data."""
        batch, _, outputs = self.bare.sizes()
        return jnp.zeros((batch, outputs, outputs) if moments == "full" else (batch, outputs), jnp.float32)

    def zeros(self, moments: str) -> list[Array]:
        """The statistics before any data."""
        batch, inputs, _ = self.bare.sizes()
        square = () if moments == "diagonal" or self.is_table else ("second", "cross")
        sizes = [(), *((inputs, inputs) if name in square else (inputs,) for name in COLLECTED[moments][1:])]
        return [jnp.zeros((batch, *size), jnp.float32) for size in sizes]

    def read(self, moments: str, statistics: Sequence[Array], slopes: Any) -> Read:
        """What was found, in words of the array."""
        return replace(self.bare, slopes=slopes, **dict(zip(COLLECTED[moments], statistics, strict=True)))


@dataclass(frozen=True)
class Place:
    """Where the data of a product stand in the statistics.

    Attributes:
      slot: The way in which the array is read.
      batch: The numbers of the matrices that the product reads; None for all.
      inputs: The numbers of their rows; None for all.
      outputs: The numbers of their columns; None for all.
      shard_axes: The mesh axes over which the rows are split.
      steps: The axes of the array of which the product reads one index.
      reads_index: Whether it reads the chosen index; None if no index is chosen.
    """

    slot: CountedRead
    batch: Array | None
    inputs: Array | None
    outputs: Array | None
    shard_axes: tuple[str, ...]
    steps: tuple[int, ...] = ()
    reads_index: Array | None = None


@dataclass(frozen=True)
class Counted:
    """A product that is counted.

    Attributes:
      root: The array.
      operand: Which operand of the equation is the array.
      steps: The axes of the array of which it reads one index.
    """

    root: Any
    operand: int
    steps: tuple[int, ...]


class Seeing:
    """Follows arrays, and counts the data that they are multiplied with.

    Attributes:
      moments: What is counted; for ``"cross"``, axis 0 of each array is two networks in one program.
      lines: The user's line of each equation.
      state: The statistics of each slot.
      slots: For each slot its number. A first evaluation finds them, and counts nothing.
      taps: What is differentiated, if gradients are wanted.
      trees: What each ``apply`` says of the effective tree that it gives.
      types: The type of each array that is followed.
      cut: The slots whose outputs are split over shards, so that no shard has all products of their gradients.
      why: For each of them, what else reads it.
      counted: The products that are counted, by the equations whose bodies hold them and their own, in their order.
      only: For an array an axis and the index along it that alone is counted.
    """

    def __init__(
        self,
        moments: str,
        lines: Mapping[int, str],
        slots: Sequence[CountedRead] | None = None,
        taps: Taps | None = None,
        only: Mapping[Any, tuple[int, Array]] | None = None,
    ) -> None:
        self.moments, self.lines, self.taps, self.counts = moments, lines, taps, slots is not None
        self.only = only or {}
        self.slots = {slot: i for i, slot in enumerate(slots or ())}
        self.state = [slot.zeros(moments) for slot in self.slots]
        self.trees: list[Any] = []
        self.types: dict[Any, Any] = {}
        self.cut: set[CountedRead] = set()
        self.why: dict[Any, dict[str, None]] = {}
        self.counted: dict[tuple[int, ...], Counted] = {}

    def follow(self, root: Any, x: Any) -> Sum:
        """An array, to be followed."""
        self.types[root] = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = x if self.taps is None or root not in self.taps.arrays else x + self.taps.arrays[root]
        labels = tuple(Label(n, whole=True) for n in x.shape)
        axes = tuple((label,) if label.size != 1 else () for label in labels)
        indices = [Factor(jnp.arange(label.size)[:, None], (label, ONE), still=True) for label in labels]
        return Sum((Product((Factor(x, labels, still=False), *indices), axes),), x.shape, x.dtype, None, root)

    # ---- the way

    def may_start(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        del out_facts
        return any(fact.known for fact in facts) and (is_apply(eqn) or holds_apply(eqn))

    def take_instead(
        self,
        reader: Reader,
        eqn: JaxprEqn,
        args: Sequence[Any],
        facts: Sequence[Facts],
        out_facts: Facts,
        *,
        only_first_read: bool,
    ) -> Outs | Answer | None:
        del only_first_read
        view, facts_out = view_of(eqn), facts_of_outputs(eqn, facts, out_facts)
        if is_apply(eqn):
            return self._follow_apply(reader, eqn, args), facts_out
        if isinstance(view, ConvertType) and jnp.issubdtype(view.new_dtype, jnp.inexact):
            return [_cast_array(args[0], view.new_dtype)], facts_out
        if isinstance(view, Multiply | Divide | Negate) and all(map(_is_number, args[1:])):
            return [_scale_array(view, *args)], facts_out
        if isinstance(view, Multiply) and isinstance(args[1], Sum) and _is_number(args[0]):
            return [_scale_array(view, *args[::-1])], facts_out
        return Answer.UNCHANGED if isinstance(view, ShardMap) and not view.check_vma else None

    def start(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Outs | None:
        del reader, eqn, args, facts, out_facts
        return None

    def multiply(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Any:
        (weight,) = [x for x in args if isinstance(x, Sum)][:1]
        differs = frozenset[str]().union(*(f.differs for x, f in zip(args, facts, strict=True) if x is not weight))
        totals: Totals = AllRows()
        if product_with_data := contraction(eqn, args):
            product = product_with_data.weight
            place, totals = self._count_product(weight, product_with_data, differs)
            rows = product_with_data.rows
            batch = product_with_data.batch if product_with_data.groups is None else []
            free = product_with_data.free
        elif rows_taken := lookup(eqn, args):
            place, product = self._count_lookup(weight, rows_taken, differs), weight.products[0]
            rows, batch = rows_taken.outputs, []
            free = [i for i in range(len(product.axes)) if i != rows_taken.axis]
        else:
            return None
        if place is None:
            return None
        operand = next(i for i, x in enumerate(args) if x is weight)
        self.counted[*reader.path, id(eqn)] = Counted(weight.root, operand, place.steps)
        with jaxprs.as_written_by(eqn):
            y = view_of(eqn).bind(*(_as_array(x) for x in args))
        groups = [[label for i in axes for label in product.axes[i]] for axes in (batch, free)]
        if self.moments == "full" and any(label.shards for label in groups[1]):
            self.cut.add(place.slot)
        if self.taps is None or place.slot not in self.taps.slopes:
            return y
        return self._tap_gradient(
            y, place, totals, lambda slope: _rows_as_matrices(rows(slope), product, groups), differs
        )

    def form(self, reader: Reader, x: Sum, eqn: JaxprEqn | None) -> Any:
        del reader
        unchecked = eqn is not None and kind_of(eqn) is ShardMap
        reason = describe_read(eqn, "with check_vma=False reads it" if unchecked else "reads it", self.lines)
        self.why.setdefault(x.root, {})[reason] = None
        return _as_array(x)

    def _follow_apply(self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """The outputs of an ``apply``, each followed from here on."""
        jaxpr, consts = jaxprs.body(eqn)
        mark = mark_of(eqn)
        operands = args[len(args) - mark.size :] if mark else []
        if mark is None or len(mark.new_outputs) != len(eqn.outvars) or reader.times > 1 or not _are_whole(args):
            raise ValueError(
                "rpx.inputs found an `apply` inside a scan, or inside a shard_map that splits its weights, so it "
                "cannot match effective arrays. Call `apply` outside, or pass a loss of the effective tree: "
                "`rpx.inputs(loss_of_weights)(p.apply(raw, key), batch)`."
            )
        outs = jaxprs.evaluate(jaxpr, [*consts, *map(_as_array, args)])
        roots: dict[int, Any] = {place: operands[i] for place, i in mark.passed.items()}
        weights = [
            self.follow(Root(place), x) if _is_inexact(x) else x
            for place, x in zip(mark.new_outputs, outs, strict=True)
        ]
        roots |= dict(zip(mark.new_outputs, weights, strict=True))
        self.trees.append((mark.treedef, {place: x.root for place, x in roots.items() if isinstance(x, Sum)}))
        return weights

    # ---- counting

    def _count_lookup(self, weight: Sum, table_lookup: Lookup, differs: frozenset[str]) -> Place | None:
        """Counts how often each row of a table is looked up; None if shards hold the rows, or slices mix axes."""
        product = weight.products[0]
        rows = product.axes[table_lookup.axis]
        place = self._place_of(weight.root, product, [], rows, is_table=True)
        if place is None or place.shard_axes:  # the rows of one shard are usually masked afterwards
            return None
        n = math.prod(label.size for label in rows)
        counts = jnp.zeros(n + 1, jnp.float32).at[table_lookup.rows].add(1.0)[None, :n]
        counts = counts if place.reads_index is None else jnp.where(place.reads_index, counts, 0)
        row_counts = (counts > 0).astype(jnp.float32) if self.moments == "largest" else counts
        return self._add_to_state(
            place, differs, [jnp.sum(counts, axis=1), *(row_counts for _ in COLLECTED[self.moments][1:])]
        )

    def _count_product(
        self, weight: Sum, contraction: Contraction, differs: frozenset[str]
    ) -> tuple[Place | None, Totals]:
        """Where the data of a product stand, and how its rows are added."""
        product, x, totals = contraction.weight, lax.stop_gradient(contraction.data), _totals_of(contraction)
        array, *other_factors = product.factors
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return None, totals
        numbers = other_factors[len(self.types[weight.root].shape) :]
        for factor in numbers:
            x = x * factor.array.astype(x.dtype)
        groups = [
            [label for i in axes for label in product.axes[i]] for axes in (contraction.batch, contraction.contracting)
        ]
        batch, contracting = ([label for label in array.labels if label in group] for group in groups)
        place = self._place_of(weight.root, product, batch, contracting, is_table=False)
        if place is None:
            return None, totals
        many, *_ = place.slot.bare.sizes()
        if place.batch is not None and len(place.batch) > many:  # one of the matrices for each row
            totals, place = RowsOfGroups(place.batch, many), replace(place, batch=None)
        if place.reads_index is not None:
            x = jnp.where(place.reads_index, x, jnp.zeros_like(x))
        free = [label for i in contraction.free for label in product.axes[i]]
        copies = math.prod(label.size for label in free if label not in array.labels)
        if contraction.groups is not None:
            groups[0] = []
        if self.moments == "diagonal" and contraction.total and not numbers:
            sums = [
                _rows_as_matrices(contraction.total(function)[None], product, groups)[0]
                for function in (jnp.abs, jnp.square)
            ]
            count = jnp.full(len(sums[0]), copies * x.shape[0], jnp.float32)
            count = count if place.reads_index is None else jnp.where(place.reads_index, count, 0)
            return self._add_to_state(place, differs, [count, *(copies * function for function in sums)]), totals
        x = jnp.repeat(_rows_as_matrices(x, product, groups, add=True), copies, axis=0)
        if self.moments == "cross":
            return self._count_cross(
                place, differs, x, totals, is_shared=other_factors[0].labels[0] not in groups[0]
            ), totals
        wide, count = jnp.abs(x).astype(jnp.float32), totals.count(x)
        count = count if place.reads_index is None else jnp.where(place.reads_index, count, 0)
        if self.moments == "largest":
            return self._add_to_state(place, differs, [count, totals.largest(wide)]), totals
        absolute = totals.total(wide)
        if self.moments == "diagonal":
            return self._add_to_state(place, differs, [count, absolute, totals.total(wide * wide)]), totals
        first_moments, products = totals.total(x.astype(jnp.float32)), self._products_with_all(place, totals, x, x)
        return self._add_to_state(
            place, differs, [count, first_moments, absolute, products], _columns_on_all_shards(place)
        ), totals

    def _count_cross(
        self, place: Place, differs: frozenset[str], x: Array, totals: Totals, *, is_shared: bool
    ) -> Place:
        """Counts the data of the second network, and how far those of the first one are away."""
        if not isinstance(totals, AllRows):
            raise ValueError(
                "rpx.calibrate got error_propagation for an array whose rows of data are grouped, such as experts, "
                "because errors of the network may change the groups. Leave error_propagation out."
            )
        pairs = jnp.stack([x, x], 1) if is_shared else x.reshape(x.shape[0], 2, -1, x.shape[2])
        old, new = (pairs[:, i].astype(jnp.float32) for i in range(2))
        count = totals.count(new)
        count = count if place.reads_index is None else jnp.where(place.reads_index, count, 0)
        products = [self._products_with_all(place, totals, new, columns) for columns in (new, old - new)]
        return self._add_to_state(place, differs, [count, *products], _columns_on_all_shards(place))

    def _products_with_all(self, place: Place, totals: Totals, x: Array, y: Array) -> Array:
        """The products of the entries of rows, all columns of them where shards hold some."""
        if place.shard_axes and place.inputs is not None:
            y = lax.all_gather(y, place.shard_axes, axis=y.ndim - 1, tiled=True)
        return _products_if_chosen(totals, x, y, place.reads_index)

    def _place_of(
        self,
        root: Any,
        product: Product,
        batch_labels: Sequence[Label],
        contracting_labels: Sequence[Label],
        *,
        is_table: bool,
    ) -> Place | None:
        """Where the data of a product stand; None if slices mix axes of one kind with those of another."""
        sizes = self.types[root].shape
        shape, of, kinds, parts = list[int](), list[int](), list[str](), list[Array | None]()
        steps, reads_index = list[int](), None
        at, number = self.only.get(root, (None, None))
        dropped_axes = {at, 0} if self.moments == "cross" else {at}
        for axis, (size, index) in enumerate(zip(sizes, product.factors[1 : 1 + len(sizes)], strict=True)):
            labels = index.labels[:-1]
            if size > 1 and math.prod(label.size for label in labels) == 1:
                steps.append(axis)
            if axis == at:
                reads_index = index.array.reshape(()) == number
            if axis in dropped_axes:
                size, labels = 1, ()
            axis_kinds = [
                "summed" if x in contracting_labels else "shared" if x in batch_labels else "free" for x in labels
            ]
            is_whole = all(label.whole for label in labels) and math.prod(label.size for label in labels) == size
            if is_whole and not is_table and axis not in dropped_axes:
                shape += [label.size for label in labels]
                kinds += axis_kinds
                parts += [None for _ in labels]
            else:
                # A label of one index belongs to no kind, and so does an axis of which one index is left.
                kinds_of_axis = {
                    kind for kind, label in zip(axis_kinds, labels, strict=True) if label.size > 1 or kind != "free"
                }
                if len(kinds_of_axis) > 1:
                    return None
                shape.append(size)
                kinds.append(next(iter(kinds_of_axis), "shared" if size > 1 else "free"))
                parts.append(None if is_whole or axis in dropped_axes else index.array[..., 0])
            of += [axis] * (len(shape) - len(of))
        places = [
            tuple(i for i, kind in enumerate(kinds) if kind == axis_kinds)
            for axis_kinds in ("shared", "summed", "free")
        ]
        batch, inputs, outputs = (
            _numbers_of_entries([parts[i] for i in axes], [shape[i] for i in axes]) for axes in places
        )
        shard_axes = tuple(dict.fromkeys(name for label in contracting_labels for name in label.shards))
        bare = Read(tuple(shape), tuple(of), batch=places[0], axes=places[1])
        return Place(CountedRead(root, bare, is_table), batch, inputs, outputs, shard_axes, tuple(steps), reads_index)

    def _tap_gradient(
        self, y: Array, place: Place, totals: Totals, rows: Callable[[Array], Array], differs: frozenset[str]
    ) -> Array:
        """The output of a product, where the gradient is collected."""
        taps = self.taps
        if taps is None:
            return y
        zeros = taps.slopes[place.slot]
        full, types = zeros.ndim > 2, jaxprs.varying_axes([jax.typeof(y)])
        zeros = zeros[_index_of(*(place.batch, place.outputs, place.outputs)[: zeros.ndim])]
        numbers = [jax.typeof(x) for x in (place.batch, place.outputs) if x is not None]
        # Shards that compute the same: also those of a split contraction, whose sum has one gradient.
        replicated = types - ((differs | jaxprs.varying_axes(numbers)) - frozenset(place.shard_axes))
        times = math.prod(lax.axis_size(name) for name in replicated)
        zeros = jaxprs.as_varying(zeros, types - jaxprs.varying_axes([jax.typeof(zeros)]))
        if place.reads_index is not None:  # what is not chosen passes no gradient
            zeros = jnp.where(place.reads_index, zeros, jnp.zeros_like(zeros))
        return tap_gradient(
            y, zeros, totals, lambda slope, totals: second_moments(totals, rows(slope), full=full) / times
        )

    def _add_to_state(
        self, place: Place, differs: frozenset[str], statistics: Sequence[Array], columns: Array | None = None
    ) -> Place:
        """Adds to the statistics of a slot; ``differs`` are the mesh axes over which the data differ."""
        if not self.counts:
            self.slots.setdefault(place.slot, 0)
        if not self.counts or place.slot not in self.slots:
            return place
        number, columns = self.slots[place.slot], place.inputs if columns is None else columns
        totals = list(self.state[number])
        for i, (old, new) in enumerate(zip(self.state[number], statistics, strict=True)):
            most = i == 1 and self.moments == "largest"
            at = _index_of(*(place.batch, place.inputs, columns)[: new.ndim])
            places = [x for x in at if isinstance(x, Array)]
            names = jaxprs.varying_axes([jax.typeof(x) for x in (statistics[-1], *places)])
            if not names:
                totals[i] = old.at[at].max(new) if most else old.at[at].add(new)
                continue
            # Each shard has a part of the data, or of the array. Those with the same parts do not count twice.
            parts = differs | jaxprs.varying_axes([jax.typeof(x) for x in places])
            parts = names & (parts - frozenset(place.shard_axes if i == 0 else ()))
            into = jnp.zeros_like(old).at[at]
            total = into.max(new) if most else _collect_over(lax.psum, into.add(new), parts)
            total = _collect_over(lax.pmax, total, names if most else names - parts)
            totals[i] = jnp.maximum(old, total) if most else old + total
        self.state[number] = totals
        return place


def _rows_as_matrices(x: Array, product: Product, groups: Sequence[Sequence[Label]], *, add: bool = False) -> Array:
    """Rows of data, or of outputs, as ``(rows, batch, numbers)``, in the order of the axes of the weight.

    ``x`` has an axis of rows, and then the labels of the two groups. What the weight does not have, as it repeats
    itself there, are further rows; with ``add``, those of the second group are added first.
    """
    weight_labels, labels = product.factors[0].labels, [label for group in groups for label in group]
    x = x.reshape(x.shape[0], *(label.size for label in labels))
    repeated_labels = [label for label in groups[1] if add and label not in weight_labels]
    x = jnp.sum(x, axis=[1 + labels.index(label) for label in repeated_labels])
    labels = [label for label in labels if label not in repeated_labels]
    group_labels = [[label for label in weight_labels if label in group] for group in groups]
    rows = [label for label in labels if label not in weight_labels]
    x = x.transpose(0, *(1 + labels.index(label) for label in (*rows, *group_labels[0], *group_labels[1])))
    return x.reshape(-1, *(math.prod(label.size for label in group) for group in group_labels))


def _totals_of(contraction: Contraction) -> Totals:
    """How the rows of a product are added: where they are in groups, by the matrices of the array that these meet."""
    if contraction.groups is None:
        return AllRows()
    product, numbers_left = contraction.weight, contraction.groups
    labels, weight_labels = [label for i in contraction.batch for label in product.axes[i]], product.factors[0].labels
    many = math.prod(label.size for label in labels)
    indices: dict[Label, Array] = {}
    for label in reversed(labels):
        indices[label], numbers_left = numbers_left % label.size, numbers_left // label.size
    number, groups = jnp.zeros_like(contraction.groups), 1
    for label in (label for label in weight_labels if label in indices):
        number, groups = number * label.size + indices[label], groups * label.size
    return RowsOfGroups(jnp.where(contraction.groups < many, number, groups), groups)


def _columns_on_all_shards(place: Place) -> Array | None:
    """The numbers of the columns of products of a place, also those that other shards hold."""
    if place.shard_axes and place.inputs is not None:
        return lax.all_gather(place.inputs, place.shard_axes, axis=0, tiled=True)
    return place.inputs


def _products_if_chosen(totals: Totals, x: Array, columns: Array, mask: Array | None) -> Array:
    """The products of the entries of each row; zeros where rows are not chosen, which are zeros themselves."""

    def zeros(x: Array, columns: Array) -> Array:
        zero = jnp.sum(x) * jnp.sum(columns)  # on each shard of its own, as the products are
        like = jax.eval_shape(totals.products, x, columns)
        return jnp.full(like.shape, zero.astype(like.dtype))

    return totals.products(x, columns) if mask is None else lax.cond(mask, totals.products, zeros, x, columns)


def _collect_over(collect: Callable[..., Array], x: Array, names: frozenset[str]) -> Array:
    """``collect`` over mesh axes, of which there may be none."""
    return collect(x, tuple(sorted(names))) if names else x


def _numbers_of_entries(parts: Sequence[Array | None], sizes: Sequence[int]) -> Array | None:
    """The number of each entry of an array of these sizes, for its indices along each axis; None for all of them."""
    if all(part is None for part in parts):
        return None
    total = jnp.zeros((1,), jnp.int32)
    for part, n in zip(parts, sizes, strict=True):
        indices = jnp.arange(n) if part is None else part.reshape(-1)
        total = (total[:, None] * n + indices[None]).reshape(-1)
    return total


def _index_of(*numbers: Array | None) -> tuple[Any, ...]:
    """Where these numbers of each axis stand, for ``x.at``; without numbers, along the whole axis."""
    while numbers and numbers[-1] is None:
        numbers = numbers[:-1]
    if not numbers:
        return (...,)
    full_slices = [slice(None) for x in numbers if x is None]  # those in front
    return (*full_slices, *jnp.ix_(*(x for x in numbers if x is not None)))


def leaves_of(eqn: JaxprEqn) -> list[Root] | None:
    """What the outputs of an ``apply`` are; None for other equations."""
    mark = mark_of(eqn)
    return None if mark is None else [Root(place) for place in mark.new_outputs]


def _is_inexact(x: Any) -> bool:
    """Whether an array is floating or complex, and so may be followed."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _as_array(x: Any) -> Any:
    """``x`` as an array."""
    if not isinstance(x, Sum):
        return x
    (product,) = x.products
    indices = [factor for factor in product.factors if ONE in factor.labels]
    factors = tuple(factor for factor in product.factors if all(factor is not index for index in indices))
    return multiply.array_of_sum(replace(x, products=(replace(product, factors=factors),)))


def _cast_array(x: Sum, dtype: Any) -> Sum:
    """``x`` in another floating dtype."""
    (product,) = x.products
    factors = tuple(
        factor if ONE in factor.labels else replace(factor, array=factor.array.astype(dtype))
        for factor in product.factors
    )
    return replace(x, products=(replace(product, factors=factors),), dtype=dtype)


def _is_number(x: Any) -> bool:
    """Whether ``x`` is an array of one number."""
    return not isinstance(x, Sum) and all(n == 1 for n in x.shape)


def _scale_array(view: View, x: Sum, *numbers: Any) -> Sum:
    """``x`` times a number, or divided by it, or with another sign."""
    (number,) = numbers or (jnp.asarray(-1, x.dtype),)
    number = number.reshape(())
    factor = 1 / number if isinstance(view, Divide) else number
    return moves.scale_sum(x, factor, still=True)


def _are_whole(args: Sequence[Any]) -> bool:
    """Whether all followed arrays are as they started."""
    labels = [label for x in args if isinstance(x, Sum) for group in x.products[0].axes for label in group]
    return all(label.whole for label in labels)
