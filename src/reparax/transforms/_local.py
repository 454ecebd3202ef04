"""Losses in which each example has noise of its own, drawn for the results of products instead of the weights.

A noisy weight is a sum with draws among its factors. ``Drawing`` has the rules of the interpreter, which follows it
through the program to its products. There, ``Noisy`` tells its mean from its deviations, and ``mean_and_noise`` gives
the mean and the noise of the product. Some draws must be the same for all rows, which only the whole program shows: it
is rewritten until all of these are found (``_draws_to_share``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax.core import random
from reparax.core.paths import describe, type_of
from reparax.core.random import key_of_use
from reparax.numerics.arithmetic import widened
from reparax.numerics.tie import compute_once, pull_back_once
from reparax.programs import equations, jaxprs
from reparax.programs.call import REPORTED, Argnums, Arguments, Traced, check_call
from reparax.programs.contractions import contraction_of
from reparax.programs.dependence import AllFacts, Analysis, Facts, facts_of_inputs, has_tangent
from reparax.programs.interpreter import Interpreter, Operation, Outs, has_body, interpret_bodies
from reparax.programs.multiply import Numerics, array_of_products, with_numbers
from reparax.programs.rules import look_up, make_sum, map_factors, move_sum, select_sum
from reparax.programs.sources import common_path, describe_read, lines_by_origin, paths_of
from reparax.programs.sums import Draw, Factor, Label, Product, Sum, contract_with_data, is_narrowing_cast
from reparax.transforms._explained import Explained, Weight
from reparax.transforms._factored import check_this_jax
from reparax.transforms._remat import remat

P = ParamSpec("P")
R = TypeVar("R")


# ---- weights with noise


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
        if not is_independent(x):
            return None
        noise, dtype = list(_noise_of(x)), _wide(x.dtype)
        mean = replace(x, products=tuple(each for each in x.products if not any(each is y for y, _, _ in noise)))
        std = replace(
            x, products=tuple(_without_draw(product, factor, dtype) for product, factor, _ in noise), dtype=dtype
        )
        may_repeat = any(not _long_labels(y.labels_of_axes) <= set(factor.labels) for y, factor, _ in noise)
        return cls(mean, std, key=noise[0][2].key, entries_may_repeat=may_repeat)


def _noise_of(x: Sum) -> Iterator[tuple[Product, Factor, Draw]]:
    """Each draw in a sum, with its factor and the product of this."""
    triples = ((product, factor, factor.draw) for product in x.products for factor in product.factors)
    return ((product, factor, draw) for product, factor, draw in triples if draw is not None)


def is_independent(x: Sum) -> bool:
    """Whether the noise of a sum has independent entries, but for those that are repeated."""
    noise = list(_noise_of(x))
    n_apart = min(len({draw.source for *_, draw in noise}), len({id(product) for product, *_ in noise}))
    return 0 < len(noise) == n_apart and all(_is_entrywise(product, factor) for product, factor, _ in noise)


def _is_entrywise(product: Product, draw: Factor) -> bool:
    """Whether each entry of a product reads numbers of a draw that no other does, but for entries that are repeated.

    It may be a sum of several, each with one number of every other factor.
    """
    flat = product.labels_of_axes
    return len(set(flat)) == len(flat) and _long_labels(product.labels) <= {*flat, *draw.labels}


def _long_labels(labels: Iterable[Label]) -> set[Label]:
    """The labels of more than one index."""
    return {label for label in labels if label.size != 1}


def _without_draw(product: Product, draw: Factor, dtype: Any) -> Product:
    """A product without its draw, for one number of it in place of each."""
    others = [replace(factor, array=factor.array.astype(dtype)) for factor in product.factors if factor is not draw]
    left = {*product.labels_of_axes}.union(*(factor.labels for factor in others))
    summed = tuple(label for label in draw.labels if label not in left and label.size != 1)
    ones = Factor(jnp.ones([label.size for label in summed], dtype), summed, fixed=True)
    return replace(product, factors=tuple(others if others and not summed else [*others, ones]))


# ---- the mean and the noise of a product

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
    return widened(view.bind(*operands)), partial(_add_noise, view, weight_operand, data, _numbered(weight.std))


def _numbered(std: Sum) -> Sum:
    """Deviations with labels by number, so that those of equal sizes are equal to JAX."""
    return replace(std, products=tuple(map(with_numbers, std.products)), maker=None)


def array_of(x: Sum) -> Array:
    """The array of a sum, computed in float32 or wider, and rounded once."""
    wide = _wide(x.dtype)
    if not x.products:
        return jnp.zeros(x.shape, wide).astype(x.dtype)
    return array_of_products(x.products, x.shape, Numerics(wide, wide, x.precision)).astype(x.dtype)


def _wide(dtype: Any) -> Any:
    """The dtype to compute in."""
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _square_factors(x: Sum) -> Sum:
    """The squares of the factors of each product."""
    return map_factors(x, lambda factor: replace(factor, array=jnp.square(factor.dense)))


@partial(jax.jit, static_argnums=(0, 1))
def _add_noise(
    view: equations.View | None, weight_operand: int, data: Sequence[Any], std: Sum, key: Any, mean: Array
) -> Any:
    """The mean with noise, which the backward pass computes again, from the data, ``std`` and the key.

    Without an equation the noise is that of the weight itself. JAX traces it once for equal equations and types.
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


def _variance(view: equations.View | None, weight_operand: int, data: Sequence[Any], squares: Sum) -> Any:
    """The variance of the output of an equation, from data and the squared standard deviations of a weight."""
    match view:
        case equations.Dot() | equations.RaggedDot():
            data = (_square(data[0]), *data[1:])
            numerics = Numerics(squares.dtype, squares.dtype, _precision(view))
            products = contract_with_data(view, weight_operand, data, squares.products)
            return array_of_products(products or [], view.type.shape, numerics)
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


# ---- what is known of weights and of their reads


@dataclass(frozen=True)
class Made:
    """What made a weight.

    Attributes:
      facts: What is known of it.
      type: Its type, before it was moved or summed.
      steps: The scans around it in whose steps data changes it, but not its noise.
    """

    facts: Facts
    type: jax.ShapeDtypeStruct
    steps: frozenset[int] = frozenset()


Sides = tuple[frozenset[int], frozenset[int]]
"""Which axes of a draw a product sums over, and which it keeps; the last axis is 1, the one before it 2."""


@dataclass(frozen=True)
class NoisyRead:
    """One read of a noisy weight.

    Attributes:
      eqn: The equation that reads; None for the result of a program or of a body.
      weight: What made the weight.
      sides: For each draw of the weight, what the equation does with its axes.
      rows: How many rows of the result have a draw of their own; None if all share one.
    """

    eqn: JaxprEqn | None
    weight: Made
    sides: Mapping[Hashable, Sides]
    rows: Any = None


Shared = dict[Hashable, list[tuple[JaxprEqn | None, str]]]
"""For each draw of which all rows share one, the equations that need this, and what they do."""


A_DRAW = -1
"""Stands among the arguments on which a value depends, if it depends on a draw."""


class _FactsOfDraws(AllFacts):
    """Facts about values, also whether they depend on a draw, and by which formula keys and integers are computed."""

    def __init__(self) -> None:
        super().__init__()
        self._formulas = dict[Hashable, int]()

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> Facts:
        """What is known of the outputs of an equation."""
        facts = replace(super().of_equation(eqn, operands), formula=self._formula(eqn, operands))
        return replace(facts, origins=facts.origins | {A_DRAW}) if is_draw(eqn) else facts

    def _formula(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> int | None:
        """The number of the formula of the output of an equation; None if it is not of keys and integers alone."""
        numbers = [facts.formula for facts in operands]
        pairs = zip(eqn.invars, numbers, strict=True)
        if any(number is None and not isinstance(v, Literal) for v, number in pairs) or len(eqn.outvars) != 1:
            return None
        if has_tangent(eqn.outvars[0]) or jaxprs.has_effects(eqn):
            return None
        try:
            return self._formulas.setdefault(jaxprs.key_of(eqn, numbers), len(self._formulas))
        except TypeError:  # a parameter that cannot be compared
            return None

    def enters(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> bool:
        return super().enters(eqn, operands) and not is_draw(eqn)


# ---- the rules


class Drawing:
    """Follows noisy weights: they start where normal numbers are drawn, and products with data draw for each row.

    Attributes:
      shared: The draws of which all rows share one.
      reads: What reads weights, by the place in the program.
      takes_gradients: Whether the program computes something again for a gradient.
      analysis: What is known of values.
    """

    counts_steps = True

    def __init__(self, shared: Shared, analysis: Analysis[Facts]) -> None:
        self.shared, self.analysis = shared, analysis
        self.reads = dict[Hashable, NoisyRead]()
        self.takes_gradients = False

    def may_introduce_sum(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Whether an equation draws, or its body does."""
        del facts, out_facts
        return is_draw(eqn) or (has_body(eqn) and _holds_draw(eqn))

    def outputs(self, operation: Operation) -> Outs:
        """The outputs, with noisy weights as sums, or with noise for each row; None if the equation needs arrays.

        Draws come first, because they are calls with a body; casts before other views, which would cast each factor;
        and rows last, because what has none is a weight.
        """
        eqn, args = operation.eqn, operation.args
        if is_draw(eqn):
            return [_drawn_sum(operation)]
        if has_body(eqn):
            self.takes_gradients |= isinstance(operation.view, equations.Checkpoint) and operation.view.differentiated
            return interpret_bodies(operation)
        moved_sums = _rounded_sum(operation) or _parts_of_draws(operation) or move_sum(eqn, args)
        if moved_sums is not None:
            return [replace(x, maker=_made(operation, args[0].maker.type)) for x in moved_sums]
        if not isinstance(operation.view, LINEAR):
            return None
        rows = _rows(operation)
        if rows:
            return self._draw_rows(operation, rows)
        x = _combined_sum(operation)
        return None if x is None else [x]

    def _draw_rows(self, operation: Operation, rows: Sequence[Any]) -> Outs:
        """A product of data with a noisy weight, in which each row of the result draws; None if it is not linear."""
        (operand, weight), *others = [(i, x) for i, x in enumerate(operation.args) if isinstance(x, Sum)]
        if others or all(facts.known for facts in _facts_of_arrays(operation)):
            return None
        noisy = self._noisy(weight)
        parts = None if noisy is None else mean_and_noise(operation, operand, noisy)
        if noisy is None or parts is None:
            return None
        interpreter, made = operation.interpreter, _made(operation, weight.maker.type)
        shards = [operation.view.type.sharding.mesh.shape[i] for i in made.facts.differs - weight.maker.facts.differs]
        n_rows = math.prod([*rows, *shards, *(interpreter.steps[i].length for i in made.steps)])
        read = NoisyRead(operation.eqn, weight.maker, _sides(operation.view, operand, weight), n_rows)
        result = self._with_noise(interpreter, read, noisy, operation.out_facts, *parts)
        return None if result is None else [result.astype(operation.view.type.dtype)]

    def _noisy(self, x: Sum) -> Noisy | None:
        """The parts of a weight, if rows may draw."""
        return Noisy.of(x) if all(draw.source not in self.shared for *_, draw in _noise_of(x)) else None

    def _with_noise(
        self, interpreter: Interpreter, read: NoisyRead, weight: Noisy, facts: Facts, mean: Array, add_noise: Noise
    ) -> Array | None:
        """The mean with noise that a read draws; None where types do not tell over which mesh axes it varies."""
        number = self._record(interpreter, read)
        key = key_of_use(weight.key, jnp.uint32(number), sorted(facts.differs))
        key = functools.reduce(jax.random.fold_in, [step.index for step in interpreter.steps], key)
        result = add_noise(key, mean)
        return result if jaxprs.has_known_varying_axes(jax.typeof(result)) else None

    def _record(self, interpreter: Interpreter, read: NoisyRead) -> int:
        """The number of a read, which is recorded in place of another one there."""
        place = (*interpreter.path, id(read.eqn), *read.sides)
        self.reads[place] = read
        return list(self.reads).index(place)

    def form(self, interpreter: Interpreter, x: Sum, eqn: JaxprEqn | None) -> Any:
        """The array of a weight, which all rows share; if data made it in a loop, each step is a row."""
        made: Made = x.maker
        read = NoisyRead(eqn, made, _sides(None, 0, x))
        noisy = self._noisy(x) if made.steps else None
        if noisy is not None:
            mean, add_noise = widened(array_of(noisy.mean)), partial(_add_noise, None, 0, (), _numbered(noisy.std))
            read_of_rows = replace(read, rows=math.prod([interpreter.steps[i].length for i in made.steps]))
            result = self._with_noise(interpreter, read_of_rows, noisy, made.facts, mean, add_noise)
            if result is not None:
                return result.astype(x.dtype)
        self._record(interpreter, read)
        return array_of(x)


LINEAR = (
    *(equations.Add, equations.Subtract, equations.Multiply, equations.Divide, equations.Select),
    *(equations.Dot, equations.RaggedDot, equations.Conv, equations.Gather),
)
"""The equations that may give noisy weights, or rows with noise of their own."""


def _rows(operation: Operation) -> list[Any]:
    """The sizes of the axes of an output for whose indices no weight has noise of its own, and so each may draw.

    Of ``x @ w`` with data of the shape (8, 3), it is 8: the noise of ``w`` tells inputs and outputs apart, not
    examples.
    """
    view, weights = operation.view, [(i, x) for i, x in enumerate(operation.args) if isinstance(x, Sum)]
    contraction = contraction_of(view)

    def is_row(axis: int) -> bool:
        sources = contraction.sources(axis) if contraction else [axis for _ in operation.args]
        pairs = [(x, sources[i]) for i, x in weights]
        return not any(place is not None and x.ndim and _has_noise_along(x, place) for x, place in pairs)

    chosen = {draw.source: draw.rows for _, x in weights for *_, draw in _noise_of(x)}
    sizes = [*(n for i, n in enumerate(view.type.shape) if n != 1 and is_row(i)), *chosen.values()]
    return [n for n in sizes if n != 1]


def _has_noise_along(x: Sum, axis: int) -> bool:
    """Whether a draw of a weight has numbers of its own at each index of an axis."""
    axes = ((product.axes[axis], factor.labels) for product, factor, _ in _noise_of(x))
    return any(labels and set(labels) <= set(labels_of_draw) for labels, labels_of_draw in axes)


def _made(operation: Operation, type: Any) -> Made:
    """What made the output of an equation, which belongs to a weight of this type.

    In a scan, data may change a weight in each step, as a mask does, while its noise is drawn before the scan.
    """
    pairs = list(zip(operation.args, operation.facts, strict=True))
    steps_of_data = frozenset[int]().union(*(facts.steps for _, facts in pairs if not facts.known))
    weights = [(x.maker.steps, facts.steps) for x, facts in pairs if isinstance(x, Sum)]
    # A weight differs in more steps than data account for, if its noise is drawn in them.
    steps_of_noise = frozenset[int]().union(*(steps - of_data for of_data, steps in weights))
    return Made(operation.out_facts, type, steps_of_data - steps_of_noise)


def _drawn_sum(operation: Operation) -> Sum:
    """Normal numbers that an equation draws, as a sum with one factor."""
    (array,) = operation.view.bind(*operation.args)
    product = Product.of(array, fixed=True)
    (factor,) = product.factors
    formula = operation.facts[0].formula
    source = operation.maker if formula is None else (formula, array.shape, array.dtype)
    product = replace(product, factors=(replace(factor, draw=Draw(source, operation.args[0])),))
    return Sum((product,), array.shape, array.dtype, None, Made(operation.out_facts, type_of(array)))


def _parts_of_draws(operation: Operation) -> list[Sum] | None:
    """Draws of which each has a key, and which were drawn together; None for all but the equation that splits them."""
    view, (x, *_) = operation.view, operation.args
    if not isinstance(view, equations.SplitAxis) or set(view.sizes) != {1}:
        return None
    draws = [draw for *_, draw in _noise_of(x)]
    if len(x.products) > 1 or len(x.products[0].factors) > 1 or view.axis >= draws[0].key.ndim:
        return None

    def with_number(factor: Factor, i: int) -> Factor:
        return replace(factor, draw=factor.draw and replace(factor.draw, source=(factor.draw.source, i)))

    return [map_factors(part, partial(with_number, i=i)) for i, part in enumerate(move_sum(operation.eqn, [x]) or [])]


def _rounded_sum(operation: Operation) -> list[Sum] | None:
    """A weight cast to fewer digits: the whole is rounded, not each factor; None for all other equations."""
    view = operation.view
    if not isinstance(view, equations.ConvertType):
        return None
    (x,) = operation.args
    is_kept = isinstance(x, Sum) and is_narrowing_cast(x.dtype, view.new_dtype)
    return [replace(x, dtype=view.new_dtype)] if is_kept else None


def _combined_sum(operation: Operation) -> Sum | None:
    """The weight that an equation makes of others, and of arrays; None if its entries are not independent."""
    # What depends on a draw, such as the norm of a noisy weight, is no constant beside the draw.
    if any(A_DRAW in facts.origins for facts in _facts_of_arrays(operation)):
        return None
    view, args = operation.view, operation.args
    weight = next(each for each in args if isinstance(each, Sum))
    match view:
        case equations.Select():
            x = select_sum(args)
        case equations.Gather():
            x = look_up(view, weight, args[1:]) if weight is args[0] else None
        case _:
            x = make_sum(operation.eqn, args, operation.facts)
    type = weight.maker.type if isinstance(view, equations.Dot | equations.Gather) else type_of(view.type)
    return None if x is None or not is_independent(x) else replace(x, maker=_made(operation, type))


def _sides(view: equations.View | None, operand: int, x: Sum) -> dict[Hashable, Sides]:
    """For each draw of a weight, the axes of the draw that a product sums over, and those that it keeps.

    A gradient by the data multiplies along the other side. A gain has one side only, so all of its axes are on both;
    sums and look-ups have none, as gradients do not read these weights.
    """
    if isinstance(view, equations.Add | equations.Subtract | equations.Gather):
        return {draw.source: (frozenset(), frozenset()) for *_, draw in _noise_of(x)}
    contraction = view and contraction_of(view)
    kept_axes = contraction.kept(operand) if contraction else range(x.ndim)
    batch_axes = contraction.batch(operand) if contraction else ()

    def sides(product: Product, factor: Factor) -> Sides:
        kept, batch = ({x for axis in axes for x in product.axes[axis]} for axes in (kept_axes, batch_axes))
        places = {label: len(factor.labels) - i for i, label in enumerate(factor.labels) if label.size != 1}
        summed = frozenset(i for label, i in places.items() if label not in {*kept, *batch})
        kept_places = frozenset(i for label, i in places.items() if label in kept)
        return (kept_places if isinstance(view, equations.Multiply | equations.Divide) else summed), kept_places

    return {draw.source: sides(product, factor) for product, factor, draw in _noise_of(x)}


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
    return any(is_draw(x) or _holds_draw(x) for jaxpr in jaxprs.inner_programs(eqn) for x in jaxpr.eqns)


# ---- draws that all rows share


def _draws_to_share(rules: Drawing) -> Shared:
    """The draws of which all rows must share one, beside those that do already.

    Those of which something needs the array; and if a product sums over an axis that another keeps, as a gradient does
    inside of the loss, all that are read more than once, so that value and gradient see the same weights.
    """
    reads_of = dict[Hashable, list[NoisyRead]]()
    for read in rules.reads.values():
        for draw in read.sides.keys() - rules.shared.keys():
            reads_of.setdefault(draw, []).append(read)
    found: Shared = {
        draw: [(read.eqn, "takes one draw for all") for read in reads if read.rows is None]
        for draw, reads in reads_of.items()
    }
    across = {draw: list(_reads_across(draw, reads)) for draw, reads in reads_of.items()}
    if any(across.values()) or rules.takes_gradients:
        for draw, reads in reads_of.items():
            how = "along the other side, as a gradient does" if across[draw] else "again, beside a gradient"
            found[draw] += [(read.eqn, f"reads it {how}") for read in across[draw] or reads[1:]]
    return {draw: reasons for draw, reasons in found.items() if reasons}


def _reads_across(draw: Hashable, reads: Sequence[NoisyRead]) -> Iterator[NoisyRead]:
    """The reads of rows that sum over an axis of a draw that one before them keeps, or keep one that it sums over."""
    summed_before, kept_before = set[int](), set[int]()
    for summed, kept, read in ((*read.sides[draw], read) for read in reads if read.rows is not None):
        if summed & kept_before or kept & summed_before:
            yield read
        summed_before |= summed
        kept_before |= kept


# ---- the transform


def local_reparametrization(fun: Callable[P, R], argnums: Argnums = None) -> Callable[P, R]:
    r"""``fun`` with separate noise for each row of data, without a copy of the weights for each.

    A weight with independent Gaussian entries, :math:`w = m + s \varepsilon`, is drawn once for all examples of a
    batch, so their gradients err together. In a product :math:`x w`, each row of x sees a Gaussian vector with the mean
    :math:`x m` and independent entries of the variance :math:`x^2 s^2`. This draws it instead: numbers for the result,
    not for the weight, and new ones for each row. The network's code does not change.

    It finds the noise of :class:`VarNoise`, :class:`Gaussian` and :class:`VariationalDropout`, and follows it through
    whatever leaves entries independent: sums, multiples, choices and contractions with other arrays, such as the masks
    of :class:`Mask`, or a scale that is computed from data; transposes, reshapes, slices, sums along axes, one row of a
    table, and casts to fewer digits; ``jit``, ``scan``, ``cond``, ``shard_map``, ``jax.checkpoint`` and ``vmap``. What
    has no row is still a weight. Each row gets its own draw in

    - products of matrices (``@``, ``einsum``, and ``jax.lax.ragged_dot`` of experts, each with its own mean and
      variance), convolutions, and sums and multiples with data, such as biases;
    - rows of tables.

    A row is whatever the noise does not index: an example, a position in a sentence or an image, a look-up in a table,
    or the step of a loop. So are the rows of ``A`` in ``A @ w``, as nothing tells ``A`` from a batch. Two rows of one
    example get different draws, while a weight drawn for the example would be the same in both; the mean and the
    variance of each entry of the result are those of such weights. Each use of a weight draws independently: both uses
    of a tied table, and each step of a loop over time. So the mean of the gradient stays the same for a loss that is
    linear in the products of each weight, or sums functions of one product each; its variance falls with the number of
    examples.

    Everything else reads one draw for all rows, the one that ``fun`` itself makes from the key: factorized noise,
    :class:`WeightDropout`, :class:`HardConcrete`, complex weights and those in float16; weights whose entries a formula
    mixes after the noise, as in ``VarNoise(0.1) >> WeightNorm()``; products with arrays that depend only on named
    arguments; and any other read, such as the square of a weight. So does a ``shard_map`` with ``check_vma=False``. If
    one read of a weight needs this, all of its reads take the same draw.

    A gradient that ``fun`` itself takes, as for forces, gradient penalties and meta-learning, sees the weights of the
    value: if a weight is read along both sides, as ``x @ w`` and ``g @ w.T``, or something is computed again for a
    gradient, all weights that are read more than once take one draw for all rows. ``jax.jvp`` alone is not recognized,
    nor is a gradient that multiplies by no noisy weight: there, value and derivative draw independently.
    ``rpx.explain(rpx.transforms.local_reparametrization(loss), *args)`` shows which weights draw for how many rows, and
    where and why others share one draw.

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
      1 of 1 noisy weights draw for each row
        for each row:
          weights/w  float32[4, 2]  1 use, 3 rows

    References:
      Kingma, Salimans and Welling, *Variational Dropout and the Local Reparameterization Trick*, 2015.
    """
    who = check_call("local_reparametrization", fun, argnums, follows_weights=True)

    @functools.wraps(fun)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        check_this_jax()
        _, call, program, consts = _rewritten(Arguments.of(who, fun, argnums, args, kwargs))
        # A draw that nothing reads is not drawn.
        return call.restore(jaxprs.evaluate(jaxprs.without_dead_code(program), [*consts, *call.inputs]))

    def report(args: Sequence[Any], kwargs: Any) -> Explained:
        """What happens to each noisy weight for these arguments, or for their types."""
        check_this_jax()
        arguments = Arguments.of(who, fun, argnums, args, kwargs)
        rules, call, *_ = _rewritten(arguments)
        weights = tuple(_noisy_weights(rules, paths_of(arguments, call), lines_by_origin(call.program)))
        return Explained(weights, "{} noisy weights draw for each row", ("for each row", "one draw for all"))

    setattr(function, REPORTED, report)
    return function


def _noisy_weights(rules: Drawing, paths: Mapping[int, str], lines: Mapping[int, str]) -> Iterator[Weight]:
    """For each path, its noisy weight: how many rows draw in how many uses, or why all take one draw."""
    reads_of_path = dict[str, list[NoisyRead]]()
    for read in rules.reads.values():
        reads_of_path.setdefault(common_path(read.weight.facts.origins, paths), []).append(read)
    for path, reads in reads_of_path.items():
        draws = dict.fromkeys(draw for read in reads for draw in read.sides)
        rows = [read.rows for read in reads if read.rows is not None]
        sizes = " and ".join(dict.fromkeys(map(str, rows)))
        notes = [f"{len(rows)} use{'s' if len(rows) > 1 else ''}, {sizes} rows"] if rows else []
        reasons = [reason for draw in draws for reason in rules.shared.get(draw, ())]
        notes += dict.fromkeys(describe_read(*reason, lines) for reason in reasons)
        yield Weight(path, describe(reads[0].weight.type), is_transformed=not reasons, reason="; ".join(notes))


def _rewritten(arguments: Arguments) -> tuple[Drawing, Traced, Jaxpr, list[Any]]:
    """What drew, the program, the one in which rows draw, and the constants that are the first inputs of this."""
    call = arguments.trace()
    program = jaxprs.without_dead_code(call.program)  # what nothing reads says nothing of its weights
    closed_over = len(call.inputs) - len(arguments.arrays)
    facts = facts_of_inputs(program, [i < closed_over or flag for i, flag in enumerate(call.is_chosen)])
    facts = [replace(each, formula=-1 - i) for i, each in enumerate(facts)]
    analysis = _FactsOfDraws()

    def rewrite(shared: Shared) -> tuple[Drawing, Any]:
        rules = Drawing(shared, analysis)
        rewritten = jax.make_jaxpr(lambda *inputs: Interpreter(rules).arrays(program, inputs, facts))(*call.inputs)
        more_shared = _draws_to_share(rules)
        return rewrite(shared | more_shared) if more_shared else (rules, rewritten)

    rules, rewritten = rewrite({})
    return rules, call, *jaxprs.consts_first(rewritten)
