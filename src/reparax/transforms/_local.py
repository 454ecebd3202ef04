"""Losses in which each example has noise of its own, drawn for the results of products instead of the weights.

``Drawing`` has the rules of the interpreter, which follows noisy weights through a program to their products;
``mean_and_noise`` gives the mean and the noise of one of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn

from reparax.core import random
from reparax.core.keys import key_of_use
from reparax.core.paths import describe
from reparax.numerics.arithmetic import widened
from reparax.numerics.tie import compute_once, pull_back_once
from reparax.programs import equations, jaxprs
from reparax.programs.call import REPORTED, Argnums, Arguments, Traced, check_call
from reparax.programs.dependence import AllFacts, Analysis, Facts, facts_of_inputs
from reparax.programs.interpreter import Interpreter, Operation, Outs, enter, has_body
from reparax.programs.multiply import How, array_of_products, with_numbers
from reparax.programs.rules import make_sum, map_factors, move_sum, select_sum
from reparax.programs.sources import common_path, describe_read, lines_by_origin, paths_of
from reparax.programs.sums import Factor, Label, Product, Sum, contract_with_data, narrows
from reparax.transforms._explained import Explained, Weight
from reparax.transforms._remat import remat

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Noisy:
    r"""A weight :math:`m + \sum_k s_k \varepsilon_k` with independent draws of independent normal numbers.

    Attributes:
      mean: The mean; a sum of no products if it is zero.
      std: The standard deviations, one product for each draw.
      key: The key of the first draw, or its keys.
      entries_may_repeat: Whether several entries may be equal.
    """

    mean: Sum
    std: Sum
    key: Any
    entries_may_repeat: bool

    @classmethod
    def of(cls, x: Sum) -> Noisy | None:
        """The parts of a sum; None if its entries are not independent."""
        noisy_products = [product for product in x.products if _draws(product)]
        draws = [draw for product in noisy_products for draw in _draws(product)]
        is_one_each = len(noisy_products) == len(draws) and len({draw.draw for draw in draws}) == len(draws)
        if not draws or not is_one_each or not all(map(_is_entrywise, noisy_products)):
            return None
        dtype = _wide(x.dtype)
        pairs = list(zip(noisy_products, draws, strict=True))
        mean = replace(x, products=tuple(product for product in x.products if not _draws(product)))
        std = replace(x, products=tuple(_without_draw(*pair, dtype) for pair in pairs), dtype=dtype)
        may_repeat = any(_long_labels(draw.labels) != _long_labels(_all_labels(product)) for product, draw in pairs)
        return cls(mean, std, key=draws[0].key, entries_may_repeat=may_repeat)


def _draws(product: Product) -> list[Factor]:
    """The factors of a product that are draws."""
    return [factor for factor in product.factors if factor.draw is not None]


def _is_entrywise(product: Product) -> bool:
    """Whether each entry of a product is made of the same entries of its factors, so that it has one number of each."""
    flat = _all_labels(product)
    return _long_labels(product.labels) <= set(flat) and len(set(flat)) == len(flat)


def _all_labels(product: Product) -> list[Label]:
    """All labels of the axes of a product."""
    return [label for group in product.axes for label in group]


def _long_labels(labels: Iterable[Label]) -> set[Label]:
    """The labels of more than one index."""
    return {label for label in labels if label.size != 1}


def _without_draw(product: Product, draw: Factor, dtype: Any) -> Product:
    """A product without its draw."""
    others = [replace(factor, array=factor.array.astype(dtype)) for factor in product.factors if factor is not draw]
    return replace(product, factors=tuple(others or [Factor(jnp.ones((), dtype), (), still=True)]))


Noise = Callable[[Any, Array], Array]
"""Adds noise to the mean of a result, drawn with a key."""


def mean_and_noise(operation: Operation, weight_operand: int, weight: Noisy) -> tuple[Array, Noise] | None:
    """The mean and the noise of a product of data and a noisy weight; None if it is not linear."""
    view, operands = operation.view, list(operation.args)
    is_sum = isinstance(view, equations.Add | equations.Subtract)
    data = () if is_sum else (*operands[:weight_operand], *operands[weight_operand + 1 :])
    if not jnp.issubdtype(view.type.dtype, jnp.floating) or not _is_linear(view, weight_operand, data, weight):
        return None
    operands[weight_operand] = array_of(weight.mean)
    mean = view.bind(*operands)
    std = replace(weight.std, products=tuple(map(with_numbers, weight.std.products)), maker=None)
    return widened(mean), partial(_add_noise, view, weight_operand, data, std)


def array_of(x: Sum) -> Array:
    """The array of a sum, computed in float32 or wider, and rounded once."""
    wide = _wide(x.dtype)
    if not x.products:
        return jnp.zeros(x.shape, wide).astype(x.dtype)
    return array_of_products(x.products, x.shape, How(wide, wide, x.precision)).astype(x.dtype)


def _wide(dtype: Any) -> Any:
    """The dtype to compute in."""
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _square_factors(x: Sum) -> Sum:
    """The squares of the factors of each product."""
    return map_factors(x, lambda factor: replace(factor, array=jnp.square(factor.dense)))


@partial(jax.jit, static_argnums=(0, 1))
def _add_noise(view: equations.View, weight_operand: int, data: Sequence[Any], std: Sum, key: Any, mean: Array) -> Any:
    """The mean with noise, which the backward pass computes again, from the data, ``std`` and the key.

    JAX traces it once for equal equations and types.
    """

    def noise(data: Sequence[Any], std: Sum, key: Any) -> Array:
        squares = _variance(view, weight_operand, data, _square_factors(std))
        # Its cotangent holds the draw, and if deviations have entries, gradients of these and of the data read it.
        squares = pull_back_once(squares) if any(product.labels for product in std.products) else squares
        return _scale_noise(squares.astype(mean.dtype), random.normal(key, mean))

    # Not ``jax.checkpoint``: on a CPU, XLA finds what it computes again to be what the forward pass has computed.
    return compute_once(mean + remat(noise, argnums=(0, 1, 2))(data, std, key))


@jax.custom_jvp
def _scale_noise(variance: Array, noise: Array) -> Array:
    """Noise of this variance; the slope at zero is zero."""
    return jnp.sqrt(variance) * noise


@_scale_noise.defjvp
def _scale_noise_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """The derivative of ``_scale_noise``, which is zero where the variance is."""
    (variance, noise), (variance_dot, _) = primals, tangents  # noise is drawn from a key, so it has no tangent
    slope = jnp.where(variance > 0, noise / 2 * jax.lax.rsqrt(variance), 0)
    return _scale_noise(variance, noise), slope * variance_dot


def _precision(view: equations.Dot | equations.RaggedDot | equations.Conv) -> Any:
    """The precision of an equation; an algorithm for its dtypes is none for those of squares."""
    return view.precision if isinstance(view.precision, lax.Precision | tuple) else None


def _square(x: Any) -> Array:
    """The squares of data."""
    return jnp.square(widened(x))


def _is_linear(view: equations.View, weight_operand: int, data: Sequence[Any], weight: Noisy) -> bool:
    """Whether an equation is linear in a weight, and each entry of it meets the rows of data in its own way."""
    match view:
        case equations.Add() | equations.Subtract() | equations.Multiply():
            return True
        case equations.Divide():
            return weight_operand == 0
        case _ if weight.entries_may_repeat:
            return False
        case equations.Gather():
            return weight_operand == 0
        case equations.Conv():
            return weight_operand == 1 and view.batch_group_count == 1
        case equations.RaggedDot() if weight_operand == 2 or not view.is_whole:
            return False
        case equations.Dot() | equations.RaggedDot():
            return contract_with_data(view, weight_operand, data, weight.std.products) is not None
        case _:
            return False


def _variance(view: equations.View, weight_operand: int, data: Sequence[Any], squares: Sum) -> Any:
    """The variance of the output of an equation, from data and the squared standard deviations of a weight."""
    match view:
        case equations.Dot() | equations.RaggedDot():
            data = (_square(data[0]), *data[1:])
            how = How(squares.dtype, squares.dtype, _precision(view))
            products = contract_with_data(view, weight_operand, data, squares.products)
            return array_of_products(products or [], view.type.shape, how)
        case equations.Conv():
            return _variance_of_convolution(view, data[0], squares)
        case equations.Gather():  # where there is no row, there is no noise
            new_params = {"fill_value": 0} if view.mode == lax.GatherScatterMode.FILL_OR_DROP else {}
            return view.bind(array_of(squares), data[0], **new_params)
        case equations.Multiply():
            return _square(data[0]) * array_of(squares)
        case equations.Divide():
            return array_of(squares) / _square(data[0])
        case _:
            return array_of(squares)


def _variance_of_convolution(view: equations.Conv, x: Any, squares: Sum) -> Any:
    """The variance of a convolution, for one channel if all are alike."""
    kernel_axis, output_axis = view.dimension_numbers.rhs_spec[0], view.dimension_numbers.out_spec[1]
    is_same_for_channels = all(product.labels.isdisjoint(product.axes[kernel_axis]) for product in squares.products)
    n_channels = squares.shape[kernel_axis]
    n_different = view.feature_group_count if is_same_for_channels else n_channels
    kernel = lax.slice_in_dim(array_of(squares), 0, n_different, axis=kernel_axis)
    variance = view.bind(_square(x), kernel, precision=_precision(view), preferred_element_type=squares.dtype)
    return jnp.repeat(variance, n_channels // n_different, output_axis)


@dataclass(frozen=True)
class NoiseOrigin:
    """What made a weight: the arguments on which it depends, and its type before it was moved."""

    origins: frozenset[int]
    type: Any


@dataclass(frozen=True)
class NoisyRead:
    """One read of a noisy weight.

    Attributes:
      eqn: The equation that reads; None for the result of a program or of a body.
      origin: What made the weight.
      draws_per_row: Whether each row of the result has a draw of its own.
    """

    eqn: JaxprEqn | None
    origin: NoiseOrigin
    draws_per_row: bool


A_DRAW = -1
"""Stands among the arguments on which a value depends, if it depends on a draw."""


class _FactsOfDraws(AllFacts):
    """Facts about values, also whether they depend on a draw."""

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> Facts:
        """What is known of the outputs of an equation."""
        facts = super().of_equation(eqn, operands)
        return replace(facts, origins=facts.origins | {A_DRAW}) if is_draw(eqn) else facts

    def enters(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> bool:
        return super().enters(eqn, operands) and not is_draw(eqn)


class Drawing:
    """Follows noisy weights: they start where normal numbers are drawn, and products with data draw for each row.

    Attributes:
      reads: What reads them.
      analysis: What is known of values.
      state: How many products have drawn so far. So each step of a loop draws anew.
    """

    def __init__(self) -> None:
        self.reads = list[NoisyRead]()
        self.state = list[Any]([jnp.uint32(0)])
        self.analysis: Analysis[Facts] = _FactsOfDraws()

    def may_start(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Whether an equation draws, or its body does."""
        del facts, out_facts
        return is_draw(eqn) or (has_body(eqn) and _holds_draw(eqn))

    def outputs(self, operation: Operation) -> Outs:
        """The outputs, with noisy weights as sums, or with noise for each row; None if the equation needs arrays.

        Draws come first, because they are calls with a body; casts before other views, which would cast each factor;
        and products with data last, because what is left of constants needs arrays.
        """
        eqn, args = operation.eqn, operation.args
        if is_draw(eqn):
            return [_drawn_sum(operation)]
        if has_body(eqn):
            return enter(operation)
        moved_sums = _rounded_sum(operation) or move_sum(eqn, args)
        if moved_sums is not None:
            return moved_sums
        noisy_sum = _combined_sum(operation)
        if noisy_sum is not None:
            return [replace(noisy_sum, maker=_noise_origin(eqn, operation.out_facts))]
        return self._multiply(operation) if _reads_one_sum_and_data(operation) else None

    def _multiply(self, operation: Operation) -> Outs:
        """A product of data with a noisy weight, in which each row of the result draws; None if it is not linear."""
        operand, noisy_sum = next((i, x) for i, x in enumerate(operation.args) if isinstance(x, Sum))
        weight = Noisy.of(noisy_sum)
        mean_with_noise = None if weight is None else mean_and_noise(operation, operand, weight)
        if weight is None or mean_with_noise is None:
            return None
        mean, add_noise = mean_with_noise
        (n_draws,) = self.state
        result = add_noise(key_of_use(weight.key, n_draws, sorted(operation.out_facts.differs)), mean)
        if not jaxprs.tells_shards(jax.typeof(result)):
            return None
        self.state = [n_draws + jnp.uint32(1)]
        self.reads.append(NoisyRead(operation.eqn, noisy_sum.maker, draws_per_row=True))
        return [result.astype(operation.view.type.dtype)]

    def form(self, interpreter: Interpreter, x: Sum, eqn: JaxprEqn | None) -> Any:
        """The array of a weight, which all rows share."""
        del interpreter
        self.reads.append(NoisyRead(eqn, x.maker, draws_per_row=False))
        return array_of(x)


def _drawn_sum(operation: Operation) -> Sum:
    """Normal numbers that an equation draws, as a sum with one factor."""
    (array,) = operation.view.bind(*operation.args)
    product = Product.of(array, still=True)
    (factor,) = product.factors
    product = replace(product, factors=(replace(factor, draw=object(), key=operation.args[0]),))
    return Sum((product,), array.shape, array.dtype, None, _noise_origin(operation.eqn, operation.out_facts))


def _rounded_sum(operation: Operation) -> list[Sum] | None:
    """A weight cast to fewer digits: the whole is rounded, not each factor; None for all other equations."""
    view = operation.view
    if not isinstance(view, equations.ConvertType):
        return None
    (x,) = operation.args
    return [replace(x, dtype=view.new_dtype)] if isinstance(x, Sum) and narrows(x.dtype, view.new_dtype) else None


def _combined_sum(operation: Operation) -> Sum | None:
    """The weight that an equation makes of others and of constants; None if it reads data."""
    # What depends on a draw, such as the norm of a noisy weight, is no constant beside the draw.
    if not operation.out_facts.known or any(A_DRAW in facts.origins for facts in _facts_of_arrays(operation)):
        return None
    if isinstance(operation.view, equations.Select):
        return select_sum(operation.args)
    return make_sum(operation.eqn, operation.args, operation.facts)


def _reads_one_sum_and_data(operation: Operation) -> bool:
    """Whether one operand is a weight, and another depends on data."""
    facts_of_arrays = _facts_of_arrays(operation)
    return len(facts_of_arrays) == len(operation.args) - 1 and not all(facts.known for facts in facts_of_arrays)


def _facts_of_arrays(operation: Operation) -> list[Facts]:
    """What is known of the operands that are no weights."""
    return [facts for x, facts in zip(operation.args, operation.facts, strict=True) if not isinstance(x, Sum)]


def is_draw(eqn: JaxprEqn) -> bool:
    """Whether the output of an equation is an array of independent normal numbers."""
    view = equations.view_of(eqn)
    has_name = isinstance(view, equations.Jit) and view.name == random.DRAW
    return has_name and jnp.issubdtype(jaxprs.type_of(eqn.outvars[0]).dtype, jnp.floating)


def _holds_draw(eqn: JaxprEqn) -> bool:
    """Whether a body of an equation draws."""
    return any(is_draw(inner_eqn) or _holds_draw(inner_eqn) for jaxpr in jaxprs.inner(eqn) for inner_eqn in jaxpr.eqns)


def _noise_origin(eqn: JaxprEqn, facts: Facts) -> NoiseOrigin:
    """What a sum that an equation makes knows of its draw."""
    output = jaxprs.type_of(eqn.outvars[0])
    return NoiseOrigin(facts.origins, jax.ShapeDtypeStruct(output.shape, output.dtype))


def local_reparametrization(fun: Callable[P, R], argnums: Argnums = None) -> Callable[P, R]:
    r"""``fun`` with separate noise for each example, without a copy of the weights for each.

    A weight with independent Gaussian entries, :math:`w = m + s \varepsilon`, is drawn once for all examples of a
    batch, so their gradients err together. In a product :math:`x w`, each row of x sees a Gaussian vector with the mean
    :math:`x m` and independent entries of the variance :math:`x^2 s^2`. ``local`` draws this instead: numbers for the
    result, not for the weight, and new ones for each row. The mean of the gradient stays the same, and its variance
    falls with the number of examples. The network's code does not change.

    It finds the noise of :class:`VarNoise`, :class:`Gaussian` and :class:`VariationalDropout`, and follows it through
    operations that keep entries independent: sums, multiples and choices of known arrays, such as those of
    :class:`Mask`; transposes, reshapes, slices, and casts to fewer digits; ``jit``, ``scan``, ``cond``, ``shard_map``,
    ``jax.checkpoint`` and ``vmap``. Each example gets its own draw in

    - products of matrices (``@``, ``einsum``, and ``jax.lax.ragged_dot`` of experts, each with its own mean and
      variance), convolutions, and sums and multiples with data, such as biases;
    - rows of tables.

    A row is whatever the weight does not index: an example, a position in a sentence or an image, or a look-up in a
    table. Two rows of one example get different draws, while a weight drawn for the example would be the same in both;
    the mean and the variance of each entry of the result are those of such weights. Each use of a weight draws
    independently: both uses of a tied table, and each step of a loop over time.

    Everything else reads one draw for all examples, the one that ``fun`` itself makes from the key: factorized noise,
    :class:`WeightDropout`, :class:`HardConcrete`, complex weights and those in float16; weights whose entries a formula
    mixes after the noise, as in ``VarNoise(0.1) >> WeightNorm()``; products with arrays that depend only on named
    arguments; and any other read, such as the square of a weight. So does a ``shard_map`` with ``check_vma=False``.
    ``rpx.explain(rpx.transforms.local_reparametrization(loss), *args)`` shows which, where and why.

    Means are computed as in ``fun``, variances in float32 or wider. Gradients pass both; the backward pass computes
    variances and noise again. Apply ``jax.grad``, ``jax.jit``, :func:`remat` and :func:`factored` outside of it.
    ``jax.vmap`` outside of it with a single key gives every example the same draws: map inside, or over keys too.
    ``VarNoise(-s)`` no longer mirrors ``VarNoise(s)``.

    Args:
      fun: A loss, or any pure function of arrays.
      argnums: The positions of the arguments from which weights are computed, as in :func:`factored`. Default: the
        first, and keys. All others are data; closed-over arrays are not.

    Raises:
      TypeError: If ``fun`` is not a function, or ``argnums`` is not a position or names an argument that does not
        exist.
      RuntimeError: If JAX is newer than the tested versions, and its jaxprs differ in a way that is not supported.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.VarNoise(0.1)
      >>> def network(weights, key, x):
      ...     return x @ p.apply(weights, key)["w"]
      >>> args = {"w": jnp.ones((4, 2))}, jax.random.key(0), jnp.ones((3, 4))
      >>> network(*args).std(0)
      Array([0., 0.], dtype=float32)
      >>> rpx.transforms.local_reparametrization(network)(*args).std(0)
      Array([0.03846868, 0.08746041], dtype=float32)
      >>> rpx.explain(rpx.transforms.local_reparametrization(network), *args)
      1 of 1 noisy weights draw for each example
        for each example:
          weights/w  float32[4, 2]  1 product

    References:
      Kingma, Salimans and Welling, *Variational Dropout and the Local Reparameterization Trick*, 2015.
    """
    who = check_call("local_reparametrization", fun, argnums, follows_weights=True)

    @functools.wraps(fun)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        check_this_jax()
        call, program, consts = _rewritten(Drawing(), Arguments.of(who, fun, argnums, args, kwargs))
        # A draw that nothing reads is not drawn.
        return call.restore(jaxprs.evaluate(jaxprs.without_dead_code(program), [*consts, *call.inputs]))

    def report(args: Sequence[Any], kwargs: Any) -> Explained:
        """What happens to each noisy weight for these arguments, or for their types."""
        check_this_jax()
        rules = Drawing()
        arguments = Arguments.of(who, fun, argnums, args, kwargs)
        call, *_ = _rewritten(rules, arguments)
        weights = tuple(_noisy_weights(rules.reads, paths_of(arguments, call), lines_by_origin(call.program)))
        return Explained(weights, "{} noisy weights draw for each example", ("for each example", "one draw for all"))

    setattr(function, REPORTED, report)
    return function


def _noisy_weights(reads: Sequence[NoisyRead], paths: Mapping[int, str], lines: Mapping[int, str]) -> Iterator[Weight]:
    """For each path, its noisy weight: how many products draw for each row, and what takes one draw for all rows."""
    reads_by_path: dict[str, list[NoisyRead]] = {}
    for read in reads:
        reads_by_path.setdefault(common_path(read.origin.origins, paths), []).append(read)
    for path, reads_of_weight in reads_by_path.items():
        shared_reads = [read for read in reads_of_weight if not read.draws_per_row]
        n_products = len(reads_of_weight) - len(shared_reads)
        notes = [f"{n_products} product{'s' if n_products > 1 else ''}"] if n_products else []
        notes += dict.fromkeys(describe_read(read.eqn, "takes one draw for all", lines) for read in shared_reads)
        type = describe(reads_of_weight[0].origin.type)
        yield Weight(path, type, is_transformed=not shared_reads, reason="; ".join(notes))


def _rewritten(rules: Drawing, arguments: Arguments) -> tuple[Traced, Jaxpr, list[Any]]:
    """The program, the one in which products draw for each row, and the constants that are its first inputs."""
    call, interpreter = arguments.trace(), Interpreter(rules)
    closed_over = len(call.inputs) - len(arguments.arrays)
    facts = facts_of_inputs(call.program, [i < closed_over or flag for i, flag in enumerate(call.is_chosen)])
    rewritten = jax.make_jaxpr(lambda *inputs: interpreter.arrays(call.program, inputs, facts))(*call.inputs)
    return call, *jaxprs.consts_first(rewritten)


@functools.cache
def check_this_jax() -> None:
    """Raises an error if this JAX writes jaxprs in an unknown way."""
    jaxprs.check_this_jax(lambda: _small_network_draws_per_row() == [True, True, True])


def _small_network_draws_per_row() -> list[bool]:
    """Traces a small network with a noisy weight, and says for each of its products whether it draws for each row."""

    def noisy(w: Array, key: Array, x: Array) -> Array:
        return jaxprs.small_network(w + random.normal(key, w), x)

    w = x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    rules = Drawing()
    _rewritten(rules, Arguments.of("local_reparametrization", noisy, None, (w, jax.random.key(0), x), {}))
    return [read.draws_per_row for read in rules.reads]  # the rules keep what they have rewritten
