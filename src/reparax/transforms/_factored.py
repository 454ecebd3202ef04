"""Multiplies data by the factors of weights, such as those of adapters, without materializing the weights.

Many weights are sums and products of other arrays, such as ``W + A B``, integers times scales, or a direction times a
length. If the weight is formed as an array, each product and each gradient costs as much as for a dense weight. But a
product is linear in the weight, so it can multiply by one factor after the other, in the cheapest order. You need not
rewrite the network, because the jaxpr of the loss shows which arrays are multiplied.

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

How it works. While a program is interpreted, a weight is represented by a :class:`reparax.programs.sums.Sum`, which is
a sum of products of smaller arrays, called factors. A sum is created where an equation multiplies arrays from the
arguments in ``argnums``, or where a stage declares its terms (``declared_sum``). Transposes, casts and slices of the
weight act on the factors. Products with data multiply by one factor after the other (``weight_use``). Forming a sum
means computing its array.

``Factoring`` holds these rules for the interpreter, which runs the program twice. The first run evaluates only types,
and ``SumPlan`` records which equations read each sum, and what each read costs with the factors and with the array. The
plan then decides which sums are cheaper to form. The second run computes the values accordingly. The plan identifies
each sum by its ``maker``, which stands for the equation that created the sum.
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
from reparax.programs.dependence import FACTS_OF_CONSTANT, AllFacts, Analysis, Facts, facts_of_inputs, facts_of_outputs
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
    """Records that an equation reads a sum, which is a weight that is kept in factors.

    Attributes:
      eqn: The equation that reads the sum; None if a program, or the body of an equation, returns the sum.
      times: How often the equation runs.
      in_formula: Whether the equation is part of a parametrization rather than of the network.
      cost_in_factors: The estimated cost of the read with the factors; None if the equation needs the array.
      cost_as_array: The estimated cost of the read with the array. It counts as zero if the equation needs the array,
        because the plan then cannot change the cost.
    """

    eqn: JaxprEqn | None
    times: int
    in_formula: bool
    cost_in_factors: float | None = None
    cost_as_array: float = 0.0

    @property
    def needs_array(self) -> bool:
        """Whether the equation needs the array of the weight, because it cannot use the factors."""
        return self.cost_in_factors is None


@dataclass
class Record:
    """Holds all that a plan knows about one sum, which is a weight that is kept in factors.

    Attributes:
      eqn: The equation that creates the sum.
      type: The shape and dtype of the sum.
      origins: The indices of the argument arrays on which the sum depends.
      parents: The makers (identifiers) of the sums from which the sum is computed.
      cost_to_form: The cost of forming the sum and its parents.
      times: How often the sum is created.
      reads: All reads of the sum, except by equations that compute other sums from it.
      is_formed: Whether the sum is formed where it is created.
      read_if_formed: The read of the parents if the sum is formed; None if forming the sum needs the arrays of the
        parents.
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
        """The total cost if the sum stays in factors, and the total cost if the sum is formed where it is created.

        A read that needs the array costs nothing by itself in either case. But if the sum stays in factors, the array
        must be formed for this read.
        """
        # The array of a sum in factors is computed at each read that needs the array, perhaps more often than the sum
        # is created. In a loop without steps, ``times`` is 0.
        rebuilds = max((read.times / max(self.times, 1) for read in self.reads if read.needs_array), default=0.0)
        in_factors = sum(read.times * (read.cost_in_factors or 0.0) for read in self.reads)
        as_array = sum(read.times * read.cost_as_array for read in self.reads)
        return in_factors + rebuilds * self.cost_to_form, self.cost_to_form + as_array

    @property
    def is_cheaper_formed(self) -> bool:
        """Whether forming the array costs less than keeping the factors, or the same if a read needs the array."""
        cost_in_factors, cost_formed = self.costs
        is_array_needed = any(read.needs_array for read in self.reads)
        return cost_formed < cost_in_factors or (is_array_needed and cost_formed == cost_in_factors)


class SumPlan:
    """Records how a first run of a program reads weights in factors, then decides which weights the second run forms.

    Attributes:
      records: Maps the maker (identifier) of each sum, a weight in factors, to its record, in the order of the program.
      is_decided: Whether :meth:`decide` has been called. No reads are recorded after this call.
    """

    def __init__(self) -> None:
        self.records: dict[Hashable, Record] = {}
        self.is_decided = False

    def record_read(self, x: Sum, read: SumRead) -> None:
        """Adds a read to the record of a sum, unless the plan is already decided, as in the second run."""
        if not self.is_decided:
            self.records[x.maker].reads.append(read)

    def forms(self, maker: Hashable) -> bool:
        """Returns whether the plan forms a sum, that is, computes its array, where the sum is created.

        A sum without a record is also formed. Such sums occur only in the second run, and are computed from sums that
        were formed.
        """
        return maker not in self.records or self.records[maker].is_formed

    def decide(self) -> None:
        """Decides for which sums (weights in factors) to compute the array, and sets ``is_formed`` of each record.

        The method goes from the last sum to the first, for two reasons. If a sum stays in factors, its parents must
        stay in factors too. If a sum is formed, it reads its parents once more, and this read is added to the records
        of the parents. For ``w = a @ b`` and ``v = 2 * w``, ``v`` is decided before ``w``.
        """
        needed_in_factors = set[Hashable]()
        for maker, record in reversed(self.records.items()):
            record.is_formed = maker not in needed_in_factors and record.is_cheaper_formed
            if record.is_formed:
                read = record.read_if_formed or SumRead(record.eqn, record.times, in_formula=True)
                for parent in record.parents:
                    self.records[parent].reads.append(read)
            elif maker in needed_in_factors or record.reads:
                needed_in_factors.update(record.parents)
        self.is_decided = True

    def weights(self, paths: Mapping[int, str], lines: Mapping[int, str]) -> Iterator[Weight]:
        """Yields a report entry for each weight in factors that the network reads, with the reason to form it or not.

        If only formulas of the parametrization read the weights in factors of a parameter, the last of these weights is
        listed. ``paths`` maps the indices of argument arrays to paths, and ``lines`` maps equations to source lines.
        """
        listed = [(record, [read for read in record.reads if not read.in_formula]) for record in self.records.values()]
        listed = [(record, reads) for record, reads in listed if reads]
        listed_paths = {common_path(record.origins, paths) for record, _ in listed}
        # Of several records with the same path, the last one is kept.
        by_path = {common_path(record.origins, paths): record for record in self.records.values() if record.reads}
        listed += [(record, record.reads) for path, record in by_path.items() if path not in listed_paths]
        for record, reads in listed:
            is_in_factors = not record.is_formed and any(not read.needs_array for read in reads)
            path, reason = common_path(record.origins, paths), "; ".join(_reasons(record, reads, lines))
            yield Weight(path, describe(record.type), is_in_factors, reason)


def _reasons(record: Record, reads: Sequence[SumRead], lines: Mapping[int, str]) -> Iterator[str]:
    """Yields the reasons in a report entry: how many products use factors at what cost, and which reads need the array.

    For example, the reasons may be "2 products, 0.31 of the operations" and "abs needs the array: model.py:3".
    """
    n_products = sum(not read.needs_array for read in reads)
    if n_products:
        cost_in_factors, cost_formed = record.costs
        share = cost_in_factors / cost_formed if cost_formed else 1.0  # An empty array costs nothing.
        would = "; factors would take" if record.is_formed else ","
        yield f"{n_products} product{'s' if n_products > 1 else ''}{would} {share:.2f} of the operations"
    yield from dict.fromkeys(describe_read(read.eqn, "needs the array", lines) for read in reads if read.needs_array)


# ---- weights whose stage declares their terms


def declares_terms(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a call of ``record_terms``, which declares its first output to be a sum of terms.

    The name of the call holds the specs of the terms, such as ``"ir,rj->ij"``. The other outputs are the arrays of the
    terms, and an integer that serves as a sentinel. The derivative of the call has no sentinel.
    """
    view = view_of(eqn)
    return isinstance(view, Jit) and specs_of(view.name) is not None


def declared_sum(operation: Operation) -> Sum | None:
    """Returns the sum whose terms an equation declares; for the spec ``"ir,rj->ij"``, a product of two factors.

    In the following cases, the function returns None, and the caller interprets the body of the call as usual:

    - The equation declares no terms, depends on data, or is a derivative.
    - An output other than the declared array is read.
    - The factors may overflow in the dtype of the declared array.
    - An array of the terms has only some of several batch axes, because it is then unknown which axes these are.
    """
    if not (operation.out_facts.known and operation.only_first_read and declares_terms(operation.eqn)):
        return None
    specs = specs_of(Jit(operation.eqn).name) or []
    n_arrays = sum(len(spec.letters) for spec in specs)
    outvars = operation.eqn.outvars
    # The outputs are the array, the arrays of the terms, and the sentinel. The derivative of such a call has other
    # outputs.
    if len(outvars) != n_arrays + 2 or not _is_sentinel(outvars[-1]):
        return None
    output, *array_types = map(jaxprs.type_of, outvars[:-1])
    if not sums.holds_factors(output.dtype, array_types):
        return None
    factors = iter(_declared_factors(operation, n_arrays))  # Factors follow the order of the terms.
    factors_of_terms = [[next(factors) for _ in spec.letters] for spec in specs]
    products = sums.all_or_none(map(_declared_product, specs, factors_of_terms, itertools.repeat(output)))
    return None if products is None else Sum(tuple(products), output.shape, output.dtype, "highest", None)


def _declared_factors(operation: Operation, n_arrays: int) -> list[Factor]:
    """Returns the arrays of the terms that an equation declares, as factors whose axes have no labels yet.

    The arrays are outputs of the body of the call. The body is interpreted without its other outputs, so the declared
    array is not computed.
    """
    eqn, interpreter = operation.eqn, operation.interpreter
    jaxpr, consts = jaxprs.body(eqn)
    # The first output is the declared array, and the last one is the sentinel.
    program, is_read = jaxprs.keep_used(jaxpr, [False, *(True for _ in range(n_arrays)), False])
    inputs = list(itertools.compress([*consts, *operation.args], is_read))
    facts = list(itertools.compress([*(FACTS_OF_CONSTANT for _ in consts), *operation.facts], is_read))
    outs = interpreter.inside(eqn).run(program, inputs, facts)
    out_facts = facts_of_outputs(program, facts, interpreter.rules.analysis)
    return [Factor(interpreter.array(x, eqn), (), fact.fixed) for x, fact in zip(outs, out_facts, strict=True)]


def _declared_product(spec: Spec, factors: Sequence[Factor], output: Any) -> Product | None:
    """Returns the product for one declared term, given unlabeled factors and the type of the declared array.

    Each letter of the spec becomes a label. For ``"ir,rj->ij"``, factors of shapes (8, 2) and (2, 3) get labels
    (i, r) and (r, j), and the product has axes i and j. Under ``vmap``, the output has leading batch axes, and so does
    each factor that differs in the batch. For example, a factor of shape (5, 8, 2) gets labels (batch, i, r). Returns
    None if a factor has only some of several batch axes, because it is unknown which axes these are.
    """
    batch = tuple(map(Label, output.shape[: output.ndim - len(spec.axes)]))
    arrays = [sums.cast_factor(factor.array, output.dtype) for factor in factors]
    arrays = [Circulant(x) if is_circulant else x for x, is_circulant in zip(arrays, spec.circulant_flags, strict=True)]
    n_batch_axes = [len(x.shape) - len(letters) for x, letters in zip(arrays, spec.letters, strict=True)]
    if not {*n_batch_axes} <= {0, len(batch)}:
        return None
    triples = list(zip(arrays, spec.letters, n_batch_axes, strict=True))
    sizes = {letter: size for x, letters, n in triples for letter, size in zip(letters, x.shape[n:], strict=True)}
    label_of = {letter: Label(size) for letter, size in sizes.items()}
    labels = [(*batch[:n], *(label_of[letter] for letter in letters)) for _, letters, n in triples]
    fixed = [factor.fixed for factor in factors]
    axes = [*((label,) for label in batch), *([label_of[letter] for letter in axis] for axis in spec.axes)]
    # Axes of size 1 have no labels in a product.
    axes = [tuple(label for label in axis if label.size != 1) for axis in axes]
    return Product(tuple(map(Factor, arrays, labels, fixed)), tuple(axes))


def _is_sentinel(v: Any) -> bool:
    """Returns whether an output may be the sentinel of ``record_terms``, which is an integer scalar."""
    output = jaxprs.type_of(v)
    return output.shape == () and jnp.issubdtype(output.dtype, jnp.integer)


# ---- products of data and a weight


@dataclass(frozen=True)
class WeightUse:
    """A product of data with a weight that is kept in factors.

    Attributes:
      weight: The weight.
      costs: Returns the cost of the product with the factors and with the array of the weight, both including
        gradients.
      compute: Computes the product from the factors.
    """

    weight: Sum
    costs: Callable[[], tuple[float, float]]
    compute: Callable[[], Any]


def weight_use(eqn: JaxprEqn, args: Sequence[Any]) -> WeightUse | None:
    """Returns how an equation multiplies data by a weight in factors, or None if it needs the array of the weight.

    An equation needs the array if it is not a product, look-up or convolution, if several of its operands are weights
    in factors, if it specifies the sharding of its output, or if the rule for this kind of equation returns None. The
    function computes no arrays.
    """
    view = view_of(eqn)
    rule = _RULES.get(type(view))
    if rule is None or sum(isinstance(x, Sum) for x in args) != 1 or view.has_sharding:
        return None
    return rule(view, args)


def _is_fixed(x: Sum) -> bool:
    """Returns whether no factor of a weight gets a gradient."""
    return all(factor.fixed for product in x.products for factor in product.factors)


def _as_one_factor(x: Sum) -> Product:
    """Returns a product whose only factor stands for the whole array of a sum, to estimate the cost with this array."""
    return Product.of(type_of(x), fixed=_is_fixed(x))


# ---- matrix products


def _use_in_product(view: Dot | RaggedDot, args: Sequence[Any]) -> WeightUse | None:
    """Returns how a matrix product, or a product for each group of rows (``ragged_dot``), uses a weight in factors.

    For ``x @ w`` with ``w = a @ b``, the result computes ``(x @ a) @ b``. Returns None if the operands have different
    dtypes, if the product may overflow in factors, if the product leaves out some groups, or if the factors cannot be
    contracted along the axes of the product.
    """
    x, y, *group_sizes = args
    if isinstance(view, RaggedDot) and (not view.is_whole or isinstance(group_sizes[0], Sum)):
        return None
    # JAX does not round operands of different dtypes to the same dtype.
    if x.dtype != y.dtype or not _multiplies_in_range(view):
        return None
    weight, operand = (x, 0) if isinstance(x, Sum) else (y, 1)
    data = (args[1 - operand], *group_sizes)  # The other operand holds data.
    products = sums.contract_with_data(view, operand, data, weight.products)
    products_with_array = sums.contract_with_data(view, operand, data, [_as_one_factor(weight)])
    if products is None or products_with_array is None:
        return None
    output = view.type
    numerics = Numerics(weight.dtype, sums.product_dtype(weight.dtype, output.dtype), view.precision)
    return WeightUse(
        weight,
        costs=lambda: (sum(map(cost, products)), sum(map(cost, products_with_array))),
        compute=lambda: array_of_products(products, output.shape, numerics).astype(output.dtype),
    )


def _multiplies_in_range(view: Dot | RaggedDot | Conv) -> bool:
    """Returns whether an equation multiplies floating-point numbers at a precision that preserves their range."""
    return jnp.issubdtype(view.type.dtype, jnp.inexact) and sums.keeps_range(view.precision)


# ---- look-ups: matrices of experts, and rows of tables


def costs_of_lookup(weight: Sum, rows: Sum) -> tuple[float, float, float]:
    """Returns three costs of looking up matrices in a stacked weight, such as ``w[expert]`` in (experts, 8, 3).

    The first cost is that of looking up the factors. The second cost is that of forming the matrices from these
    factors. The third cost is that of looking up the matrices in the array of the weight. ``rows`` holds the matrices
    in factors, as returned by ``move_sum`` for ``weight``.
    """
    factors = [factor for product in weight.products for factor in product.factors]
    row_factors = [factor for product in rows.products for factor in product.factors]
    # A factor without the look-up axis is shared by all matrices. It keeps its labels and is not looked up.
    looked_up = [row for row, factor in zip(row_factors, factors, strict=True) if row.labels != factor.labels]
    # Entries are written in the forward pass, and again in the backward pass if the factor gets a gradient.
    cost_of_factors = sum((1 if factor.fixed else 2) * ENTRY * factor.size for factor in looked_up)
    return cost_of_factors, *_costs_of_rows(weight, rows)


def _costs_of_rows(weight: Sum, rows: Sum) -> tuple[float, float]:
    """Returns the cost of computing rows of a weight from factors, and of looking up the rows in the weight's array.

    If rows are looked up in the array, the gradient is as large as the whole weight, even for few rows.
    """
    cost_of_writing = ENTRY * sums.count_entries(rows.shape)
    cost_of_gradient = 0.0 if _is_fixed(weight) else ENTRY * sums.count_entries(weight.shape)
    return cost_of_writing + sum(map(cost, rows.products)), cost_of_writing + cost_of_gradient


def _use_in_gather(view: Gather, args: Sequence[Any]) -> WeightUse | None:
    """Returns how a look-up along one axis uses a weight in factors as its table; None for other look-ups.

    For ``w[ids]`` with ``w = a @ b``, the result computes ``a[ids] @ b``.
    """
    weight, indices = args
    if not isinstance(weight, Sum) or isinstance(indices, Sum) or view.axis is None or view.mode not in _MODES:
        return None
    # The indices are compared with the number of rows, which a narrower integer dtype may be unable to hold.
    indices = indices.astype(jnp.int32) if jnp.iinfo(indices.dtype).bits < 32 else indices
    rows, size = look_up(view, weight, [indices], nearest=True), weight.shape[view.axis]
    if rows is None:
        return None

    def product() -> Any:
        """Computes the looked-up rows from the factors of the table."""
        numerics = Numerics(weight.dtype, view.type.dtype, weight.precision)
        return _treat_out_of_bounds(view, array_of_products(rows.products, rows.shape, numerics), indices, size)

    return WeightUse(weight, lambda: _costs_of_rows(weight, rows), product)


_MODES = [lax.GatherScatterMode[name] for name in ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")]
"""The ``GatherScatterMode`` values that a look-up in a weight's factors supports."""


def _treat_out_of_bounds(view: Gather, rows: Any, indices: Any, size: int) -> Any:
    """Returns ``rows``, with out-of-bounds rows changed according to the mode of the look-up.

    ``size`` is the number of rows in the table. For an out-of-bounds index, ``rows`` holds the row of the nearest valid
    index. The mode CLIP keeps this row. FILL_OR_DROP replaces the row by the fill value, which is NaN by default.
    PROMISE_IN_BOUNDS keeps the values of the row, but stops its gradient.
    """
    if view.mode == lax.GatherScatterMode.CLIP:
        return rows
    offset = view.dimension_numbers.offset_dims  # The axes of the result within one row.
    is_inside = ((indices >= 0) & (indices < size)).reshape([1 if i in offset else n for i, n in enumerate(rows.shape)])
    if view.mode != lax.GatherScatterMode.FILL_OR_DROP:
        return _stop_gradient_outside(rows, is_inside)
    return jnp.where(is_inside, rows, math.nan if view.fill_value is None else view.fill_value)


@jax.custom_jvp
def _stop_gradient_outside(rows: Any, is_inside: Any) -> Any:
    """Returns ``rows`` unchanged, but stops the gradient of rows whose index is out of bounds.

    JAX clips out-of-bounds indices when it reads rows, but drops the updates for these indices when it adds up
    gradients.
    """
    del is_inside
    return rows


@_stop_gradient_outside.defjvp
def _stop_gradient_outside_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Implements the JVP rule, by which the tangents of rows with an out-of-bounds index are zero."""
    return _stop_gradient_outside(*primals), jnp.where(primals[1], tangents[0], jnp.zeros_like(tangents[0]))


# ---- convolutions


class _SplitKernel(NamedTuple):
    """A kernel that is split into a smaller kernel and a matrix that mixes the output channels of the smaller kernel.

    For example, a kernel of shape (3, 3, 16, 64) and rank 4 is split into a kernel of shape (3, 3, 16, 4) and a matrix
    of shape (4, 64).

    Attributes:
      kernel: The smaller kernel.
      n_channels: The number of output channels of the smaller kernel.
      mixing: The matrix that maps these channels to all output channels; None if the kernel is not split.
    """

    kernel: Product
    n_channels: int
    mixing: Product | None = None


def _use_in_convolution(view: Conv, args: Sequence[Any]) -> WeightUse | None:
    """Returns how a convolution without groups uses a weight in factors as its kernel.

    Returns None if the convolution has groups, or if the kernel's output channels form a diagonal with another axis.
    """
    data, weight = args
    if not isinstance(weight, Sum) or not _multiplies_in_range(view):
        return None
    # With groups, the matrix after the smaller kernel would mix channels of different groups.
    if view.feature_group_count != 1 or view.batch_group_count != 1:
        return None
    channel_axis = view.dimension_numbers.rhs_spec[0]
    kernels = sums.all_or_none(_split_kernel(product, channel_axis) for product in weight.products)
    if kernels is None:
        return None
    convolution = _Convolution(view, data, weight)
    whole = _SplitKernel(_as_one_factor(weight), weight.shape[channel_axis])
    return WeightUse(
        weight,
        costs=lambda: (sum(map(convolution.cost, kernels)), convolution.cost(whole)),
        compute=lambda: functools.reduce(jnp.add, map(convolution.output, kernels)).astype(view.type.dtype),
    )


@dataclass(frozen=True)
class _Convolution:
    """A convolution of data with a weight, computed as the sum of the convolutions with each product of the weight.

    Attributes:
      view: The equation, which is a convolution without groups.
      data: The array that is convolved.
      weight: The kernel, as a sum of products.
    """

    view: Conv
    data: Any
    weight: Sum

    def kernel_shape(self, n_channels: int) -> list[int]:
        """Returns the shape of the weight with its number of output channels replaced by ``n_channels``."""
        channel_axis = self.view.dimension_numbers.rhs_spec[0]
        return [n_channels if i == channel_axis else size for i, size in enumerate(self.weight.shape)]

    def cost(self, split: _SplitKernel) -> float:
        """Returns the cost of the convolution with a split kernel and of mixing its channels, including gradients.

        The cost also includes the multiplication of the factors of the kernel.
        """
        # The passes compute the output, the gradient of the data, and the gradient of a trainable kernel.
        n_passes = 2 if all(factor.fixed for factor in split.kernel.factors) else 3
        output_shape, channel_axis = self.view.type.shape, self.view.dimension_numbers.out_spec[1]
        n_places = sums.count_entries(size for i, size in enumerate(output_shape) if i != channel_axis)
        window_size = sums.count_entries(self.kernel_shape(1))  # The kernel entries read for one output.
        cost_of_kernel = n_passes * 2.0 * n_places * window_size * split.n_channels + cost(split.kernel)
        if split.mixing is None:
            return cost_of_kernel
        # For the cost, all positions of the output are merged into axis 0, and axis 1 holds the channels.
        channels = jax.ShapeDtypeStruct((n_places, split.n_channels), self.weight.dtype)
        mix = functools.partial(_mix_channels, channel_axis=1, mixing=split.mixing)
        return cost_of_kernel + cost(jax.eval_shape(mix, channels))

    def output(self, split: _SplitKernel) -> Any:
        """Computes the convolution with a split kernel, in the dtype of its sums, and mixes the channels.

        The factors of the kernel are multiplied first, because the kernel is small compared with the data.
        """
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
        product = _mix_channels(channels, channel_axis, split.mixing)  # The last axis holds the channels.
        shape = [*output.shape[:channel_axis], *output.shape[channel_axis + 1 :], output.shape[channel_axis]]
        mixed = array_of_products([product], shape, Numerics(dtype, result_dtype, view.precision))
        return jnp.moveaxis(mixed, -1, channel_axis)


def _mix_channels(x: Any, channel_axis: int, mixing: Product) -> Product:
    """Returns the product that maps the channels of ``x`` to all output channels, which become the last axis.

    For ``x`` of shape (8, 4, 32, 32), ``channel_axis`` 1 and ``mixing`` of shape (4, 64), the product has shape
    (8, 32, 32, 64).
    """
    few, many = mixing.axes
    other_axes: list[AxisLabels] = [(Label(n),) for i, n in enumerate(x.shape) if i != channel_axis]
    # Label the axes of ``x``. The channel axis may have several labels, and the mixing sums over all of them.
    labels = tuple(label for axis in (*other_axes[:channel_axis], few, *other_axes[channel_axis:]) for label in axis)
    data = Factor(x.reshape([label.size for label in labels]), labels, fixed=False)
    axes = (tuple(label for label in axis if label.size != 1) for axis in (*other_axes, many))
    return Product((data, *mixing.factors), tuple(axes))


def _split_kernel(product: Product, channel_axis: int) -> _SplitKernel | None:
    """Splits a kernel into the factors with axes of the window, and the factors that only mix channels.

    For example, a kernel with factors of shapes (3, 3, 16, 4) and (4, 64) is split into these two factors, because the
    second one has only the axes of the rank and of the output channels. If no factor only mixes channels, the kernel
    stays whole. Returns None if the output channels share a label with another axis, as on a diagonal.
    """
    channels = product.axes[channel_axis]
    # All axes except the output channels count as the window, even the axis of input features.
    window = {label for i, axis in enumerate(product.axes) if i != channel_axis for label in axis}
    if window.intersection(channels):
        return None
    mixing = tuple(x for x in product.factors if x.labels and window.isdisjoint(x.labels))
    kernel = tuple(x for x in product.factors if not x.labels or not window.isdisjoint(x.labels))
    kernel_labels = {label for factor in kernel for label in factor.labels}
    # The kernel stays whole if either half has no factors, or if a factor of the window has output channels too.
    if not mixing or not kernel or kernel_labels.intersection(channels):
        return _SplitKernel(product, math.prod(label.size for label in channels))
    rank = tuple(dict.fromkeys(label for x in mixing for label in x.labels if label in kernel_labels))
    axes = tuple(rank if i == channel_axis else axis for i, axis in enumerate(product.axes))
    n_channels = math.prod(label.size for label in rank)
    return _SplitKernel(Product(kernel, axes), n_channels, Product(mixing, (rank, channels)))


_RULES: dict[type[View], Callable[[Any, Sequence[Any]], WeightUse | None]] = {
    Dot: _use_in_product,
    RaggedDot: _use_in_product,
    Gather: _use_in_gather,
    Conv: _use_in_convolution,
}
"""Maps each kind of equation to a function that takes its view and operands, and returns how it uses a weight."""


# ---- the rules, and the transform


class Factoring:
    """Defines the interpreter's rules that keep weights in factors, except weights whose arrays a plan forms.

    Attributes:
      plan: The plan that decides which weights to form. Until then, the rules record the reads of weights in the plan.
      analysis: The analysis that finds which values depend only on the arguments in ``argnums``, and which values get
        gradients.
    """

    counts_steps = False

    def __init__(self, plan: SumPlan) -> None:
        """Takes a plan, either decided or still empty, and creates the analysis that all interpreted programs share."""
        self.plan = plan
        self.analysis: Analysis[Facts] = AllFacts()

    def may_introduce_sum(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Returns whether an equation that reads only arrays may create a weight in factors, itself or in its body."""
        if not any(fact.known and fact.origins for fact in facts):
            return False
        return _may_make_sum_inside(eqn) if has_body(eqn) else out_facts.known and may_make_sum(eqn)

    def outputs(self, operation: Operation) -> Outs:
        """Returns an equation's outputs as sums (weights in factors) or as arrays; None if the equation needs arrays.

        If the result is None, the interpreter calls ``materialize`` for each operand that is a sum, and evaluates the
        equation on arrays.

        The order of the rules matters. Declared sums come first, because a declaration is also a call with a body.
        Moves, such as transposes and slices, come before new sums, because moves cost nothing. Products come last,
        because only products with data then remain.
        """
        eqn = operation.eqn
        declared = declared_sum(operation)
        if declared is not None:
            return self._create_sum(operation, declared)
        if has_body(eqn):
            return interpret_bodies(operation)
        moved = move_sum(eqn, operation.args)
        if moved is not None:
            return self._look_up(operation, moved[0]) if view_class_of(eqn) is Gather else moved
        # Only a value that is computed from parameters and keys becomes a sum. A product with data is an activation.
        known_sum = make_if_smaller(eqn, operation.args, operation.facts) if operation.out_facts.known else None
        return self._multiply(operation) if known_sum is None else self._create_sum(operation, known_sum)

    def _multiply(self, operation: Operation) -> Outs:
        """Multiplies data by a weight in factors; returns None if the equation needs the array of the weight.

        Until the plan is decided, the product is only recorded, and a placeholder of its type is returned.
        """
        eqn, interpreter = operation.eqn, operation.interpreter
        use = weight_use(eqn, _with_data_formed(operation))
        if use is None:
            return None
        if self.plan.is_decided:
            return [use.compute()]
        self.plan.record_read(use.weight, SumRead(eqn, interpreter.times, interpreter.in_formula, *use.costs()))
        return [stand_in(eqn.outvars[0])]

    def materialize(self, interpreter: Interpreter, x: Sum, eqn: JaxprEqn | None) -> Any:
        """Computes the array of a weight in factors for an equation that needs it, and records the read in the plan.

        ``eqn`` is None if a program, or the body of an equation, returns the weight.
        """
        self.plan.record_read(x, SumRead(eqn, interpreter.times, interpreter.in_formula))
        return array_of_sum(x)

    def on_shard(self, x: Sum, facts: Facts) -> Sum:
        """Returns a shard of a weight in factors, which has the same record as the weight."""
        del facts  # The interpreter passes them to all rules.
        return x

    def _look_up(self, operation: Operation, matrices: Sum) -> list[Any]:
        """Returns matrices that are looked up in a stacked weight, in factors, or as an array if the plan forms them.

        The matrices have their own maker, which identifies them, and therefore their own record in the plan.
        """
        matrices = replace(matrices, maker=operation.maker)
        if not self.plan.is_decided:
            self.plan.records[matrices.maker] = self._record_of_lookup(operation, matrices)
        return [array_of_sum(matrices) if self.plan.forms(matrices.maker) else matrices]

    def _record_of_lookup(self, operation: Operation, matrices: Sum) -> Record:
        """Returns the record of looked-up matrices, which can be formed from factors or read from the weight's array.

        ``cost_to_form`` is the cost of the cheaper of these two ways. The first read in the record is the look-up of
        the factors. This read has a cost only if the matrices stay in factors.
        """
        eqn, weight, interpreter = operation.eqn, operation.args[0], operation.interpreter
        times, origins = interpreter.times, operation.facts[0].origins
        cost_of_factors, cost_from_factors, cost_from_array = costs_of_lookup(weight, matrices)
        cost_with_weight = times * cost_from_array + self.plan.records[weight.maker].cost_to_form
        cost = min(times * cost_from_factors, cost_with_weight)
        record = Record(eqn, type_of(matrices), origins, parents=[weight.maker], cost_to_form=cost, times=times)
        record.reads.append(SumRead(eqn, times, in_formula=True, cost_in_factors=cost_of_factors))
        record.read_if_formed = SumRead(eqn, times, interpreter.in_formula, cost_from_factors, cost_from_array)
        return record

    def _create_sum(self, operation: Operation, weight: Sum) -> Outs:
        """Returns the outputs of an equation that creates a weight in factors, or None if the plan forms its array.

        The weight is the first output. An equation that declares terms has more outputs, which are None because nothing
        reads them.
        """
        weight = replace(weight, maker=operation.maker)
        if not self.plan.is_decided:
            self.plan.records[weight.maker] = self._record_of_sum(operation, weight)
        return None if self.plan.forms(weight.maker) else [weight, *(None for _ in operation.eqn.outvars[1:])]

    def _record_of_sum(self, operation: Operation, weight: Sum) -> Record:
        """Returns the plan's record of a sum that an equation creates from arrays, or from other sums (its parents)."""
        # The total cost is the cost of the equation times the number of its runs, plus the cost of forming the parents.
        eqn, times = operation.eqn, operation.interpreter.times
        parents = list(dict.fromkeys(x.maker for x in operation.args if isinstance(x, Sum)))
        cost_of_parents = sum(self.plan.records[parent].cost_to_form for parent in parents)
        cost = times * cost_to_form(eqn, operation.facts) + cost_of_parents
        origins = operation.out_facts.origins
        return Record(eqn, type_of(weight), origins, parents=parents, cost_to_form=cost, times=times)


def _with_data_formed(operation: Operation) -> Sequence[Any]:
    """Returns an equation's operands; if several are weights in factors, forms those that depend on data.

    Looked-up matrices depend on data, for example. A product can use the factors of only one operand, so all other
    operands must be arrays.
    """
    args, eqn = operation.args, operation.eqn
    if sum(isinstance(x, Sum) for x in args) <= 1:
        return args
    pairs = zip(args, operation.facts, strict=True)
    return [x if fact.known else operation.interpreter.array(x, eqn) for x, fact in pairs]


def _may_make_sum_inside(eqn: JaxprEqn) -> bool:
    """Returns whether an equation declares an array as a sum of terms, or has a body that may create such a sum."""
    return declares_terms(eqn) or any(map(_may_make_sum_in_program, jaxprs.inner_programs(eqn)))


def _may_make_sum_in_program(jaxpr: Jaxpr) -> bool:
    """Returns whether any equation of a program, or of a program inside its equations, may create a sum."""
    return any(may_make_sum(eqn) or _may_make_sum_inside(eqn) for eqn in jaxpr.eqns)


def factored(fun: Callable[P, R], argnums: Argnums = None) -> Callable[P, R]:
    r"""Returns ``fun`` with products that multiply data by the factors of weights, without forming the weights.

    For a weight :math:`W = W_0 + c A B`, the result computes a product as :math:`x W_0 + c\, (x A) B`. The gradients of
    ``A`` and ``B`` then require no gradient of the whole ``W``. The factors are found in the jaxpr of ``fun``, so the
    network's code does not change. Factors are found wherever arrays of parameters are multiplied, scaled or added, as
    in :class:`LoRA`, :class:`Delta`, :class:`LowRank`, :class:`FixedRank`, :class:`Kronecker`, :class:`WeightNorm`,
    :class:`Gain`, :class:`Quantized`, chains of these, or your own formulas, and in stages that define ``terms_leaf``.

    Weights stay in factors through transposes, casts, reshapes, slices, ``jit``, ``scan``, ``cond``, ``shard_map``,
    ``jax.checkpoint``, ``vmap`` and look-ups of matrices (``w[expert]``), up to matrix products (``@``, ``einsum``, and
    ``jax.lax.ragged_dot`` of experts), convolutions and table lookups. For any other operation, the array of the weight
    is formed once. It is also formed in three more cases:

    - in float16 and float8, and before a cast to a dtype of smaller range, because factors may overflow even if their
      product does not;
    - before a cast to a dtype with more digits, because the result must keep the earlier rounding;
    - if the factors cost more operations than the array, including all gradients.

    :func:`explain` says which weights are formed, where and why. Values and gradients are the same as those of ``fun``,
    up to rounding.

    To store no factors for the backward pass either, write ``rpx.remat(rpx.factored(loss))``. Apply ``jax.grad``,
    ``jax.vmap``, ``jax.jit`` and other transformations to the result. If ``fun`` itself takes gradients, as in
    meta-learning, these form the weights that they read.

    Args:
      fun: A loss, or any pure function of arrays.
      argnums: The positions of the arguments from which weights are computed, as in :func:`remat`. Default: the first,
        and keys. Pass weights and keys by position, because keyword arguments count as data.

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
    """Returns the report of ``factored`` for arguments, or for their shapes and dtypes; errors begin with ``who``."""
    check_this_jax()
    arguments = Arguments.of(who, fun, argnums, args, kwargs)
    call = arguments.trace()
    plan, _ = plan_sums(call.program, call.inputs, call.is_chosen)
    weights = tuple(plan.weights(paths_of(arguments, call), lines_by_origin(call.program)))
    return Explained(weights, "{} weights with factors are never formed for a product", ("in factors", "formed"))


@functools.cache
def check_this_jax() -> None:
    """Raises an error if the jaxprs of the installed JAX differ so much that products with weights are not found."""
    jaxprs.check_this_jax(_is_compatible)


def _is_compatible() -> bool:
    """Returns whether all three products with the one weight of ``jaxprs.small_network`` use its factors."""
    # The weight is ``a @ b`` with rank 1, so the factors are cheaper for every product.
    a, b, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 1), (1, 64), (64, 64)))
    program, consts = jaxprs.consts_first(jax.make_jaxpr(lambda a, b, x: jaxprs.small_network(a @ b, x))(a, b, x))
    plan, _ = plan_sums(program, [*consts, a, b, x], [*(True for _ in consts), True, True, False])
    records = [record for record in plan.records.values() if not record.is_formed]
    return [sum(not read.needs_array for read in record.reads) for record in records] == [3]


def plan_sums(program: Jaxpr, inputs: Sequence[Any], is_chosen: list[bool]) -> tuple[SumPlan, list[Facts]]:
    """Returns the plan of which weights to form in a program, and the facts about inputs on which the plan is based.

    ``is_chosen`` says which inputs are parameters or keys. The program is interpreted once, for types only. The second
    run, which computes values, must use the same facts, so that the same weights occur in factors.
    """
    plan, facts = SumPlan(), facts_of_inputs(program, is_chosen)
    interpreter = Interpreter(Factoring(plan), computes=False)
    jax.make_jaxpr(lambda *args: interpreter.arrays(program, args, facts))(*inputs)
    plan.decide()
    return plan, facts
