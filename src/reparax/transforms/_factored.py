"""Adapters without materializing the weight: losses whose products multiply by factors of weights.

If you form a weight such as ``W + A B``, integers times scales, or a direction times a length, each product and each
gradient costs its full size. This is not necessary. A product is linear in the weight, so it can multiply by one factor
after the other, in the cheapest order. You need not rewrite the network: the jaxpr of the loss shows which
arrays are multiplied.

>>> import jax, jax.numpy as jnp, reparax as rpx
>>> p = rpx.Freeze() >> rpx.LoRA(8)
>>> raw = p.init({"w": jnp.ones((512, 512))}, jax.random.key(0))
>>> train, rest = rpx.partition(raw)
>>> def loss(train, x):
...     return jnp.sum(jnp.tanh(x @ p.apply(rpx.combine(train, rest))["w"]))
>>> def operations(loss):
...     step = jax.jit(jax.grad(loss)).lower(train, jnp.ones((1024, 512)))
...     return step.compile().cost_analysis()["flops"]
>>> operations(rpx.factored(loss)) < 0.6 * operations(loss)
True

A weight is a sum of products of smaller arrays. It starts where arrays of named arguments are multiplied, or where a
stage declares its terms (``declared_sum``). Transposes, casts and slices of it act on its factors. Products with data
multiply by one factor after the other (``weight_use``). ``Factoring`` has the rules of the interpreter, which reads the
program twice: first by types alone, to record what reads each weight, so that ``SumPlan`` can choose the cheaper way;
then to compute.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from reparax.core.paths import describe, type_of
from reparax.numerics.terms import Spec, specs_of
from reparax.programs import jaxprs, sums
from reparax.programs.call import REPORTED, Argnums, Arguments, check_call
from reparax.programs.dependence import NUMBER, AllFacts, Analysis, Facts, facts_of_inputs, outputs_of
from reparax.programs.equations import Conv, Dot, Gather, Jit, RaggedDot, View, view_class_of, view_of
from reparax.programs.interpreter import Interpreter, Operation, Outs, has_body, interpret_bodies, stand_in
from reparax.programs.multiply import ENTRY, Numerics, array_of_products, array_of_sum, cost
from reparax.programs.rules import cost_to_form, look_up, make_if_smaller, may_make_sum, move_sum
from reparax.programs.sources import common_path, describe_read, lines_by_origin, paths_of
from reparax.programs.sums import AxisLabels, Circulant, Factor, Label, Product, Sum
from reparax.transforms._explained import Explained, Weight

P = ParamSpec("P")
R = TypeVar("R")

# ---- which weights are formed


@dataclass(frozen=True)
class SumRead:
    """One read of a sum.

    Attributes:
      eqn: The equation that reads; None for the result of a program or of a body.
      times: How often it runs.
      in_formula: Whether it is part of a parametrization, not of the network.
      cost_in_factors: The cost of a product with the factors; None if the read needs the array.
      cost_as_array: The cost of a product with the array.
    """

    eqn: JaxprEqn | None
    times: int
    in_formula: bool
    cost_in_factors: float | None = None
    cost_as_array: float = 0.0

    @property
    def needs_array(self) -> bool:
        """Whether factors are of no use to it."""
        return self.cost_in_factors is None


@dataclass
class Record:
    """What a plan records about a sum.

    Attributes:
      eqn: The equation that made it.
      type: Its shape and dtype.
      origins: The arguments on which it depends.
      parents: The sums from which it is made.
      cost_to_form: The cost to form it and its parents.
      times: How often it is made.
      reads: What reads it, except other sums made from it.
      is_formed: Whether it is formed where it is made.
      read_if_formed: How it reads its parents where it is formed; None if it needs their arrays.
    """

    eqn: JaxprEqn
    type: jax.ShapeDtypeStruct
    origins: frozenset[int]
    parents: Sequence[Hashable]
    cost_to_form: float
    times: int
    reads: list[SumRead] = field(default_factory=list)
    is_formed: bool = False
    read_if_formed: SumRead | None = None

    @property
    def costs(self) -> tuple[float, float]:
        """The cost of all reads of the sum if it stays in factors, and if it is formed."""
        # In factors, the array is formed where it is read, which may be more often than the sum is made.
        rebuilds = max((read.times / max(self.times, 1) for read in self.reads if read.needs_array), default=0.0)
        in_factors = sum(read.times * (read.cost_in_factors or 0.0) for read in self.reads)
        as_array = sum(read.times * read.cost_as_array for read in self.reads)
        return in_factors + rebuilds * self.cost_to_form, self.cost_to_form + as_array


class SumPlan:
    """Records what reads each sum in a first evaluation of a program, then decides which sums the second one forms.

    Attributes:
      records: The record of each sum, by the equation that made it.
      is_decided: Whether the decision is made. Nothing is recorded after that.
    """

    def __init__(self) -> None:
        self.records: dict[Hashable, Record] = {}
        self.is_decided = False

    def reads(self, x: Sum, read: SumRead) -> None:
        """Records a read of a sum."""
        if not self.is_decided:
            self.records[x.maker].reads.append(read)

    def forms(self, maker: Hashable) -> bool:
        """Whether a sum is formed where it is made; unrecorded sums, which only formed ones produce, are formed too."""
        return maker not in self.records or self.records[maker].is_formed

    def decide(self) -> None:
        """Decides for each sum, the last first, because a sum in factors needs its parents in factors too."""
        needed_in_factors = set[Hashable]()
        for maker, record in reversed(self.records.items()):
            record.is_formed = maker not in needed_in_factors and self._is_cheaper_formed(record)
            if record.is_formed:
                read = record.read_if_formed or SumRead(record.eqn, record.times, in_formula=True)
                for parent in record.parents:
                    self.records[parent].reads.append(read)
            elif maker in needed_in_factors or record.reads:
                needed_in_factors.update(record.parents)
        self.is_decided = True

    def _is_cheaper_formed(self, record: Record) -> bool:
        """Whether a sum costs less if it is formed, or no more and something needs the array."""
        cost_in_factors, cost_formed = record.costs
        is_array_needed = any(read.needs_array for read in record.reads)
        return cost_formed < cost_in_factors or (is_array_needed and cost_formed == cost_in_factors)

    def weights(self, paths: Mapping[int, str], lines: Mapping[int, str]) -> Iterator[Weight]:
        """Each sum that the network reads, and the last of each parameter of which formulas alone read sums.

        Each with the reason why it is formed or not.
        """
        listed = [(record, [read for read in record.reads if not read.in_formula]) for record in self.records.values()]
        listed = [(record, reads) for record, reads in listed if reads]
        listed_paths = {common_path(record.origins, paths) for record, _ in listed}
        by_path = {common_path(record.origins, paths): record for record in self.records.values() if record.reads}
        listed += [(record, record.reads) for path, record in by_path.items() if path not in listed_paths]
        for record, reads in listed:
            is_in_factors = not record.is_formed and any(not read.needs_array for read in reads)
            path, reason = common_path(record.origins, paths), "; ".join(_reasons(record, reads, lines))
            yield Weight(path, describe(record.type), is_in_factors, reason)


def _reasons(record: Record, reads: Sequence[SumRead], lines: Mapping[int, str]) -> Iterator[str]:
    """The share of the operations with factors, if some of the reads are products, and what needs the array."""
    n_products = sum(not read.needs_array for read in reads)
    if n_products:
        cost_in_factors, cost_formed = record.costs
        share = cost_in_factors / cost_formed if cost_formed else 1.0
        would = "; factors would take" if record.is_formed else ","
        yield f"{n_products} product{'s' if n_products > 1 else ''}{would} {share:.2f} of the operations"
    yield from dict.fromkeys(describe_read(read.eqn, "needs the array", lines) for read in reads if read.needs_array)


# ---- weights whose stage declares their terms


def declares_terms(eqn: JaxprEqn) -> bool:
    """Whether an equation declares the terms of its first output; the other outputs are the arrays of the terms."""
    view = view_of(eqn)
    return isinstance(view, Jit) and specs_of(view.name) is not None


def declared_sum(operation: Operation) -> Sum | None:
    """The sum whose terms an equation declares; None if it declares none, or if it depends on data.

    Also None if more than the array is read, or if a derivative added outputs, or several nested batches, which cannot
    be told apart.
    """
    if not (operation.out_facts.known and operation.only_first_read and declares_terms(operation.eqn)):
        return None
    specs = specs_of(Jit(operation.eqn).name) or []
    n_arrays = sum(len(spec.letters) for spec in specs)
    outvars = operation.eqn.outvars
    if len(outvars) != n_arrays + 2 or not _is_sentinel(outvars[-1]):
        return None
    output, *array_types = map(jaxprs.type_of, outvars[:-1])
    if not sums.holds_factors(output.dtype, array_types):
        return None
    factors = iter(_declared_factors(operation, n_arrays))
    factors_of_terms = [[next(factors) for _ in spec.letters] for spec in specs]
    products = sums.all_or_none(map(_declared_product, specs, factors_of_terms, itertools.repeat(output)))
    return None if products is None else Sum(tuple(products), output.shape, output.dtype, "highest", None)


def _declared_factors(operation: Operation, n_arrays: int) -> list[Factor]:
    """The arrays of the terms that an equation declares, as factors without labels."""
    eqn, interpreter = operation.eqn, operation.interpreter
    jaxpr, consts = jaxprs.body(eqn)
    program, is_read = jaxprs.keep_used(jaxpr, [False, *(True for _ in range(n_arrays)), False])
    inputs = list(itertools.compress([*consts, *operation.args], is_read))
    facts = list(itertools.compress([*(NUMBER for _ in consts), *operation.facts], is_read))
    outs = interpreter.inside(eqn).run(program, inputs, facts)
    out_facts = outputs_of(program, facts, interpreter.rules.analysis)
    return [Factor(interpreter.array(x, eqn), (), fact.fixed) for x, fact in zip(outs, out_facts, strict=True)]


def _declared_product(spec: Spec, factors: Sequence[Factor], output: Any) -> Product | None:
    """The product that a term declares of its factors; None if one has only some axes of a batch."""
    batch = tuple(map(Label, output.shape[: output.ndim - len(spec.axes)]))
    label_of: dict[str, Label] = {}
    arrays = [sums.cast_factor(factor.array, output.dtype) for factor in factors]
    arrays = [Circulant(x) if is_circulant else x for x, is_circulant in zip(arrays, spec.circles, strict=True)]

    def labelled(factor: Factor, array: Any, letters: str) -> Factor | None:
        n_batch = len(array.shape) - len(letters)
        if n_batch not in (0, len(batch)):
            return None
        sizes = zip(letters, array.shape[n_batch:], strict=True)
        labels = [label_of.setdefault(letter, Label(size)) for letter, size in sizes]
        return Factor(array, (*batch[:n_batch], *labels), factor.fixed)

    labelled_factors = sums.all_or_none(map(labelled, factors, arrays, spec.letters))
    if labelled_factors is None:
        return None
    axes = [*((label,) for label in batch), *([label_of[letter] for letter in axis] for axis in spec.axes)]
    axes = [tuple(label for label in axis if label.size != 1) for axis in axes]
    return Product(tuple(labelled_factors), tuple(axes))


def _is_sentinel(v: Any) -> bool:
    """Whether it is the output that no derivative has."""
    output = jaxprs.type_of(v)
    return output.shape == () and jnp.issubdtype(output.dtype, jnp.integer)


# ---- products of data and a weight


@dataclass(frozen=True)
class WeightUse:
    """A product of data and a weight.

    Attributes:
      weight: The sum.
      costs: Computes the cost with the factors, including all gradients, and that with the weight as one array.
      array: Computes the product with the factors.
    """

    weight: Sum
    costs: Callable[[], tuple[float, float]]
    array: Callable[[], Any]


def weight_use(eqn: JaxprEqn, args: Sequence[Any]) -> WeightUse | None:
    """The product of data and one sum that an equation computes, if it can use the factors; else None."""
    view = view_of(eqn)
    rule = _RULES.get(type(view))
    if rule is None or sum(isinstance(x, Sum) for x in args) != 1 or view.has_sharding:
        return None
    return rule(view, args)


def _is_fixed(x: Sum) -> bool:
    """Whether no factor of a sum gets a gradient."""
    return all(factor.fixed for product in x.products for factor in product.factors)


def _as_one_factor(x: Sum) -> Product:
    """The sum as one factor: an array of its shape and dtype."""
    return Product.of(type_of(x), fixed=_is_fixed(x))


# ---- products of matrices


def _use_in_product(view: Dot | RaggedDot, args: Sequence[Any]) -> WeightUse | None:
    """The use of a weight in a product of matrices, also of rows in groups; None if it leaves groups out."""
    x, y, *group_sizes = args
    if isinstance(view, RaggedDot) and (not view.is_whole or isinstance(group_sizes[0], Sum)):
        return None
    # JAX rounds neither operand to the dtype of the other.
    if x.dtype != y.dtype or not _multiplies_in_range(view):
        return None
    weight, operand = (x, 0) if isinstance(x, Sum) else (y, 1)
    data = (args[1 - operand], *group_sizes)
    products = sums.contract_with_data(view, operand, data, weight.products)
    products_of_array = sums.contract_with_data(view, operand, data, [_as_one_factor(weight)])
    if products is None or products_of_array is None:
        return None
    output = view.type
    numerics = Numerics(weight.dtype, sums.product_dtype(weight.dtype, output.dtype), view.precision)
    return WeightUse(
        weight,
        costs=lambda: (sum(map(cost, products)), sum(map(cost, products_of_array))),
        array=lambda: array_of_products(products, output.shape, numerics).astype(output.dtype),
    )


def _multiplies_in_range(view: Dot | RaggedDot | Conv) -> bool:
    """Whether a product is of floating numbers, and its precision keeps the range of their dtype."""
    return jnp.issubdtype(view.type.dtype, jnp.inexact) and sums.keeps_range(view.precision)


# ---- what an index chooses: matrices of experts, and rows of tables


def costs_of_lookup(weight: Sum, rows: Sum) -> tuple[float, float, float]:
    """The cost to take the factors of the chosen matrices; to form these from them; and to take the matrices."""
    factors = [factor for product in weight.products for factor in product.factors]
    row_factors = [factor for product in rows.products for factor in product.factors]
    chosen = [row for row, factor in zip(row_factors, factors, strict=True) if row.labels != factor.labels]
    cost_of_factors = sum((1 if factor.fixed else 2) * ENTRY * factor.size for factor in chosen)
    return cost_of_factors, *_costs_of_entries(weight, rows.shape, rows.products)


def _costs_of_entries(weight: Sum, shape: Sequence[int], products: Sequence[Product]) -> tuple[float, float]:
    """The cost to take entries of a weight by its factors, and from its array."""
    cost_of_writing = ENTRY * sums.count_entries(shape)
    table = 0.0 if _is_fixed(weight) else ENTRY * sums.count_entries(weight.shape)
    return cost_of_writing + sum(map(cost, products)), cost_of_writing + table


def _use_in_gather(view: Gather, args: Sequence[Any]) -> WeightUse | None:
    """The use of a weight as a table of which rows are looked up along one axis; None for other look-ups."""
    weight, places = args
    if not isinstance(weight, Sum) or isinstance(places, Sum) or view.axis is None or view.mode not in _MODES:
        return None
    places = places.astype(jnp.int32) if jnp.iinfo(places.dtype).bits < 32 else places
    rows, size = look_up(view, weight, [places], nearest=True), weight.shape[view.axis]
    if rows is None:
        return None

    def array() -> Any:
        numerics = Numerics(weight.dtype, view.type.dtype, weight.precision)
        return _treat_missing(view, array_of_products(rows.products, rows.shape, numerics), places, size)

    return WeightUse(weight, lambda: _costs_of_entries(weight, rows.shape, rows.products), array)


_MODES = [lax.GatherScatterMode[name] for name in ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")]


def _treat_missing(view: Gather, rows: Any, places: Any, size: int) -> Any:
    """The rows of a table of ``size`` rows at places, where those beyond it are filled, or get no gradient."""
    if view.mode == lax.GatherScatterMode.CLIP:
        return rows
    offset = view.dimension_numbers.offset_dims
    is_inside = ((places >= 0) & (places < size)).reshape([1 if i in offset else n for i, n in enumerate(rows.shape)])
    if view.mode != lax.GatherScatterMode.FILL_OR_DROP:
        return _stop_gradient_beyond(rows, is_inside)
    return jnp.where(is_inside, rows, math.nan if view.fill_value is None else view.fill_value)


@jax.custom_jvp
def _stop_gradient_beyond(x: Any, inside: Any) -> Any:
    """``x``, of which rows beyond the array get no gradient: JAX clips indices that it reads, and drops these."""
    del inside
    return x


@_stop_gradient_beyond.defjvp
def _stop_gradient_beyond_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The derivative: zero in rows beyond the array."""
    return _stop_gradient_beyond(*primals), jnp.where(primals[1], tangents[0], jnp.zeros_like(tangents[0]))


# ---- convolutions


class _ChannelSplit(NamedTuple):
    """A kernel of few output channels, their number, and what makes all channels from them, if they are not all."""

    kernel: Product
    n_channels: int
    mixing: Product | None = None


def _use_in_convolution(view: Conv, args: Sequence[Any]) -> WeightUse | None:
    """The use of a weight as a kernel, of which one factor may mix channels after the others; None for groups."""
    data, weight = args
    if not isinstance(weight, Sum) or not _multiplies_in_range(view):
        return None
    if view.feature_group_count != 1 or view.batch_group_count != 1:
        return None
    channel_axis = view.dimension_numbers.rhs_spec[0]
    splits = sums.all_or_none(_split_channels(product, channel_axis) for product in weight.products)
    if splits is None:
        return None
    convolution = _Convolution(view, data, weight)
    whole = _ChannelSplit(_as_one_factor(weight), weight.shape[channel_axis])
    return WeightUse(
        weight,
        costs=lambda: (sum(map(convolution.cost, splits)), convolution.cost(whole)),
        array=lambda: functools.reduce(jnp.add, map(convolution.output, splits)).astype(view.type.dtype),
    )


@dataclass(frozen=True)
class _Convolution:
    """A convolution of data with kernels from which a weight is made."""

    view: Conv
    data: Any
    weight: Sum

    def kernel_shape(self, n_channels: int) -> list[int]:
        """The shape of a kernel with so many output channels."""
        channel_axis = self.view.dimension_numbers.rhs_spec[0]
        return [n_channels if i == channel_axis else size for i, size in enumerate(self.weight.shape)]

    def cost(self, split: _ChannelSplit) -> float:
        """The cost of the convolution with a kernel, and of mixing its channels, including gradients."""
        n_passes = 2 if all(factor.fixed for factor in split.kernel.factors) else 3
        output_shape, channel_axis = self.view.type.shape, self.view.dimension_numbers.out_spec[1]
        n_places = sums.count_entries(size for i, size in enumerate(output_shape) if i != channel_axis)
        window_size = sums.count_entries(self.kernel_shape(1))
        cost_of_kernel = n_passes * 2.0 * n_places * window_size * split.n_channels + cost(split.kernel)
        if split.mixing is None:
            return cost_of_kernel
        channels = jax.ShapeDtypeStruct((n_places, split.n_channels), self.weight.dtype)
        mix = functools.partial(_mix_channels, channel_axis=1, mixing=split.mixing)
        return cost_of_kernel + cost(jax.eval_shape(mix, channels))

    def output(self, split: _ChannelSplit) -> Any:
        """The output of the convolution with a kernel whose channels are mixed."""
        view, dtype, output = self.view, self.weight.dtype, self.view.type
        result_dtype = sums.product_dtype(dtype, output.dtype)
        numerics = Numerics(dtype, dtype, self.weight.precision)
        kernel = array_of_products([split.kernel], self.kernel_shape(split.n_channels), numerics)
        channels = lax.conv_general_dilated(
            self.data,
            kernel,
            dimension_numbers=view.dimension_numbers,
            **view.window,
            precision=view.precision,
            preferred_element_type=result_dtype,
        )
        if split.mixing is None:
            return channels
        channel_axis = view.dimension_numbers.out_spec[1]
        product = _mix_channels(channels, channel_axis, split.mixing)
        shape = [*output.shape[:channel_axis], *output.shape[channel_axis + 1 :], output.shape[channel_axis]]
        mixed = array_of_products([product], shape, Numerics(dtype, result_dtype, view.precision))
        return jnp.moveaxis(mixed, -1, channel_axis)


def _mix_channels(x: Any, channel_axis: int, mixing: Product) -> Product:
    """Output channels computed from fewer channels, as the last axis."""
    few, many = mixing.axes
    other_axes: list[AxisLabels] = [(Label(n),) for i, n in enumerate(x.shape) if i != channel_axis]
    labels = tuple(label for axis in (*other_axes[:channel_axis], few, *other_axes[channel_axis:]) for label in axis)
    data = Factor(x.reshape([label.size for label in labels]), labels, fixed=False)
    axes = (tuple(label for label in axis if label.size != 1) for axis in (*other_axes, many))
    return Product((data, *mixing.factors), tuple(axes))


def _split_channels(product: Product, channel_axis: int) -> _ChannelSplit | None:
    """A kernel of few channels, and what makes the others from them, if any factors do.

    None if the channels are not separate from the rest.
    """
    channels = product.axes[channel_axis]
    window = {label for i, axis in enumerate(product.axes) if i != channel_axis for label in axis}
    if window.intersection(channels):
        return None
    mixing = tuple(x for x in product.factors if x.labels and window.isdisjoint(x.labels))
    kernel = tuple(x for x in product.factors if not x.labels or not window.isdisjoint(x.labels))
    kernel_labels = {label for factor in kernel for label in factor.labels}
    if not mixing or not kernel or kernel_labels.intersection(channels):
        return _ChannelSplit(product, math.prod(label.size for label in channels))
    between = tuple(dict.fromkeys(label for x in mixing for label in x.labels if label in kernel_labels))
    axes = tuple(between if i == channel_axis else axis for i, axis in enumerate(product.axes))
    n_channels = math.prod(label.size for label in between)
    return _ChannelSplit(Product(kernel, axes), n_channels, Product(mixing, (between, channels)))


_RULES: dict[type[View], Callable[[Any, Sequence[Any]], WeightUse | None]] = {
    Dot: _use_in_product,
    RaggedDot: _use_in_product,
    Gather: _use_in_gather,
    Conv: _use_in_convolution,
}


# ---- the rules, and the transform


class Factoring:
    """Follows weights, and forms those that the plan says.

    Attributes:
      plan: The plan. Until it is decided, it is told what reads each weight.
      analysis: What is known of values.
    """

    counts_steps = False

    def __init__(self, plan: SumPlan) -> None:
        self.plan = plan
        self.analysis: Analysis[Facts] = AllFacts()

    def may_introduce_sum(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Whether an equation of known operands, or its body, may make a sum."""
        if not any(fact.known and fact.origins for fact in facts):
            return False
        return _may_make_sum_inside(eqn) if has_body(eqn) else out_facts.known and may_make_sum(eqn)

    def outputs(self, operation: Operation) -> Outs:
        """The outputs, in factors or computed by factors; None if the equation needs arrays.

        Declarations come first, because they are calls with a body; views before new sums, because they cost nothing;
        and products last, because only those with data are left.
        """
        eqn = operation.eqn
        declared = declared_sum(operation)
        if declared is not None:
            return self._start_sum(operation, declared)
        if has_body(eqn):
            return interpret_bodies(operation)
        views = move_sum(eqn, operation.args)  # such as transposes and slices
        if views is not None:
            return self._look_up(operation, views[0]) if view_class_of(eqn) is Gather else views
        known_sum = make_if_smaller(eqn, operation.args, operation.facts) if operation.out_facts.known else None
        return self._multiply(operation) if known_sum is None else self._start_sum(operation, known_sum)

    def _multiply(self, operation: Operation) -> Outs:
        """The product of data with a weight; None if the equation is no such product."""
        eqn, interpreter = operation.eqn, operation.interpreter
        use = weight_use(eqn, _with_chosen_as_data(operation))
        if use is None:
            return None
        if self.plan.is_decided:
            return [use.array()]
        self.plan.reads(use.weight, SumRead(eqn, interpreter.times, interpreter.in_formula, *use.costs()))
        return [stand_in(eqn.outvars[0])]

    def form(self, interpreter: Interpreter, x: Sum, eqn: JaxprEqn | None) -> Any:
        """The array of a sum, which the plan is told."""
        self.plan.reads(x, SumRead(eqn, interpreter.times, interpreter.in_formula))
        return array_of_sum(x)

    def _look_up(self, operation: Operation, matrices: Sum) -> list[Any]:
        """Matrices that an index chooses from a weight, in factors, or formed from those of the chosen ones."""
        matrices = replace(matrices, maker=operation.maker)
        if not self.plan.is_decided:
            self.plan.records[matrices.maker] = self._record_of_lookup(operation, matrices)
        return [array_of_sum(matrices) if self.plan.forms(matrices.maker) else matrices]

    def _record_of_lookup(self, operation: Operation, matrices: Sum) -> Record:
        """The record of chosen matrices, which are formed from their factors or taken from the array of the weight."""
        eqn, weight, interpreter = operation.eqn, operation.args[0], operation.interpreter
        times, origins = interpreter.times, operation.facts[0].origins
        cost_of_factors, cost_from_factors, cost_from_array = costs_of_lookup(weight, matrices)
        cost_with_weight = times * cost_from_array + self.plan.records[weight.maker].cost_to_form
        cost = min(times * cost_from_factors, cost_with_weight)
        record = Record(eqn, type_of(matrices), origins, parents=[weight.maker], cost_to_form=cost, times=times)
        record.reads.append(SumRead(eqn, times, in_formula=True, cost_in_factors=cost_of_factors))
        record.read_if_formed = SumRead(eqn, times, interpreter.in_formula, cost_from_factors, cost_from_array)
        return record

    def _start_sum(self, operation: Operation, weight: Sum) -> Outs:
        """A new sum, as the first output; None if the plan forms it."""
        weight = replace(weight, maker=operation.maker)
        if not self.plan.is_decided:
            self.plan.records[weight.maker] = self._record_of_sum(operation, weight)
        return None if self.plan.forms(weight.maker) else [weight, *(None for _ in operation.eqn.outvars[1:])]

    def _record_of_sum(self, operation: Operation, weight: Sum) -> Record:
        """The record of a sum that an equation makes of others, or of arrays."""
        eqn, times = operation.eqn, operation.interpreter.times
        parents = list(dict.fromkeys(x.maker for x in operation.args if isinstance(x, Sum)))
        cost_of_parents = sum(self.plan.records[parent].cost_to_form for parent in parents)
        cost = times * cost_to_form(eqn, operation.facts) + cost_of_parents
        origins = operation.out_facts.origins
        return Record(eqn, type_of(weight), origins, parents=parents, cost_to_form=cost, times=times)


def _with_chosen_as_data(operation: Operation) -> Sequence[Any]:
    """The operands; of several weights, those that data chose are formed, because they are data."""
    args, eqn = operation.args, operation.eqn
    if sum(isinstance(x, Sum) for x in args) <= 1:
        return args
    pairs = zip(args, operation.facts, strict=True)
    return [x if fact.known else operation.interpreter.array(x, eqn) for x, fact in pairs]


def _may_make_sum_inside(eqn: JaxprEqn) -> bool:
    """Whether a body of an equation may make a sum."""
    return declares_terms(eqn) or any(map(_may_make_sum_in_program, jaxprs.inner_programs(eqn)))


def _may_make_sum_in_program(jaxpr: Jaxpr) -> bool:
    """Whether an equation of a program, or of one inside it, may make a sum."""
    return any(may_make_sum(eqn) or _may_make_sum_inside(eqn) for eqn in jaxpr.eqns)


def factored(fun: Callable[P, R], argnums: Argnums = None) -> Callable[P, R]:
    r"""``fun`` with products that multiply by the factors of weights and never form the weights.

    For :math:`W = W_0 + c A B`, it computes a product as :math:`x W_0 + c\, (x A) B`. The gradients of ``A`` and ``B``
    then need no gradient of the whole ``W``. It finds the factors in the jaxpr of ``fun``, so the network's code does
    not change: wherever arrays of parameters are multiplied, scaled or added, as in :class:`LoRA`, :class:`Delta`,
    :class:`LowRank`, :class:`FixedRank`, :class:`Kronecker`, :class:`WeightNorm`, :class:`Gain`, :class:`Quantized`,
    chains of these, or your own formulas; and if a stage defines ``terms_leaf``.

    Weights stay in factors through transposes, casts, reshapes, slices, ``jit``, ``scan``, ``cond``, ``shard_map``,
    ``jax.checkpoint``, ``vmap`` and look-ups of matrices (``w[expert]``), up to matrix products (``@``, ``einsum``, and
    ``jax.lax.ragged_dot`` of experts), convolutions and table lookups. For all other operations the array is formed
    once; also in float16 and float8 and before a cast to a dtype of less range, where factors may overflow although
    their product does not; before a cast to more digits, which keeps an earlier rounding; and if the factors cost more
    operations than the array, including all gradients. :func:`explain` says which weights are formed, where and why.
    Values and gradients are those of ``fun`` up to rounding.

    To store no factors for the backward pass either, write ``rpx.remat(rpx.factored(loss))``. Apply ``jax.grad``,
    ``jax.vmap``, ``jax.jit`` and other transformations outside of it. Gradients taken inside ``fun``, as in
    meta-learning, form the weights that they read.

    Args:
      fun: A loss, or any pure function of arrays.
      argnums: The positions of the arguments from which weights are computed, as in :func:`remat`. Default: the first,
        and keys. Pass these by position: keyword arguments count as data.

    Raises:
      TypeError: If ``fun`` is not a function, or ``argnums`` is not a position or names an argument that does not
        exist.
      RuntimeError: If JAX is newer than the tested versions, and its jaxprs differ in a way that is not supported.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.LoRA(2)
      >>> train, rest = rpx.partition(p.init({"w": jnp.ones((8, 8))}, jax.random.key(0)))
      >>> def loss(train, x):
      ...     return jnp.sum((x @ p.apply(rpx.combine(train, rest))["w"]) ** 2)
      >>> grads = jax.grad(rpx.factored(loss))(train, jnp.ones((64, 8)))
      >>> jax.tree.map(jnp.shape, grads["w"]["@lora"])["a"]
      (8, 2)

    References:
      Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang and Chen, *LoRA*, 2022.
    """
    who = check_call("factored", fun, argnums, follows_weights=True)

    @functools.wraps(fun)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        check_this_jax()
        call = Arguments.of(who, fun, argnums, args, kwargs).trace()
        plan, facts = plan_sums(call.program, call.inputs, call.is_chosen)
        return call.restore(Interpreter(Factoring(plan)).arrays(call.program, call.inputs, facts))

    setattr(function, REPORTED, functools.partial(explain_sums, who, fun, argnums))
    return function


def explain_sums(who: str, fun: Callable[..., Any], argnums: Argnums, args: Sequence[Any], kwargs: Any) -> Explained:
    """What happens to each weight for these arguments, or for their types."""
    check_this_jax()
    arguments = Arguments.of(who, fun, argnums, args, kwargs)
    call = arguments.trace()
    plan, _ = plan_sums(call.program, call.inputs, call.is_chosen)
    weights = tuple(plan.weights(paths_of(arguments, call), lines_by_origin(call.program)))
    return Explained(weights, "{} weights with factors are never formed for a product", ("in factors", "formed"))


@functools.cache
def check_this_jax() -> None:
    """Raises an error if this JAX writes jaxprs in an unknown way: no product would be found."""
    jaxprs.check_this_jax(_is_compatible)


def _is_compatible() -> bool:
    """Whether all three products of a small network with the one weight use its factors."""
    a, b, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 1), (1, 64), (64, 64)))
    program, consts = jaxprs.consts_first(jax.make_jaxpr(lambda a, b, x: jaxprs.small_network(a @ b, x))(a, b, x))
    plan, _ = plan_sums(program, [*consts, a, b, x], [*(True for _ in consts), True, True, False])
    records = [record for record in plan.records.values() if not record.is_formed]
    return [sum(not read.needs_array for read in record.reads) for record in records] == [3]


def plan_sums(program: Jaxpr, inputs: Sequence[Any], is_chosen: list[bool]) -> tuple[SumPlan, list[Facts]]:
    """Which weights of a program stay in factors, for inputs of these types, and what is known of the inputs."""
    plan, facts = SumPlan(), facts_of_inputs(program, is_chosen)
    interpreter = Interpreter(Factoring(plan), computes=False)
    jax.make_jaxpr(lambda *args: interpreter.arrays(program, args, facts))(*inputs)
    plan.decide()
    return plan, facts
