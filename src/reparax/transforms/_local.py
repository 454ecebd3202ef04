"""Draws separate noise for each example, by adding noise to the results of products instead of to the weights.

How it works. While a program is interpreted, a noisy weight is represented by a :class:`reparax.programs.sums.Sum` in
which some factors are draws, which are arrays of independent normal samples. ``Drawing`` holds the rules by which the
interpreter follows these weights to their products with data. At a product, ``NoisyWeight`` separates the mean of the
weight from its standard deviations, and ``mean_and_noise`` computes the mean of the product and the noise for each row.

If an equation needs the array of a weight, all rows of all products with this weight must share one draw. Only the
whole program shows which draws must be shared, so it is rewritten until ``_draws_to_share`` finds no more.
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
from reparax.programs.dependence import AllFacts, Facts, contains_apply, facts_of_inputs, has_tangent
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
class NoisyWeight:
    r"""A weight :math:`m + \sum_k s_k \varepsilon_k` with independent draws :math:`\varepsilon_k`.

    For ``w + 0.1 * noise``, the mean is ``w``, and the standard deviation is ``0.1`` for each entry.

    Attributes:
      mean: The mean :math:`m`. A mean of zero has no products.
      std: The standard deviations, with one product :math:`s_k` for each draw.
      key: The random key, or keys, of the first draw.
      entries_may_repeat: Whether several entries may have the same noise.
    """

    mean: Sum
    std: Sum
    key: Any
    entries_may_repeat: bool

    @classmethod
    def of(cls, x: Sum) -> NoisyWeight | None:
        """Separates a sum into mean and standard deviations; returns None if its entries have no independent noise.

        Each product with a draw becomes a standard deviation, without the draw. All other products form the mean.
        """
        if not has_independent_noise(x):
            return None
        draws, dtype = list(_draws_in(x)), _dtype_to_compute_in(x.dtype)
        noisy_products = {id(product) for product, *_ in draws}
        mean = replace(x, products=tuple(product for product in x.products if id(product) not in noisy_products))
        deviations = tuple(_deviation_of_draw(product, factor, dtype) for product, factor, _ in draws)
        std = replace(x, products=deviations, dtype=dtype)
        # Along an axis that the draw lacks, for example after a broadcast, all entries read the same samples.
        may_repeat = any(not _long_labels(y.labels_of_axes) <= set(factor.labels) for y, factor, _ in draws)
        _, _, first_draw = draws[0]
        return cls(mean, std, first_draw.key, may_repeat)


def _draws_in(x: Sum) -> Iterator[tuple[Product, Factor, Draw]]:
    """Yields the product, the factor and its ``Draw`` for each factor of a noisy weight that holds random samples."""
    triples = ((product, factor, factor.draw) for product in x.products for factor in product.factors)
    return ((product, factor, draw) for product, factor, draw in triples if draw is not None)


def has_independent_noise(x: Sum) -> bool:
    """Returns whether a weight, given as a sum of products, has noise that is independent between distinct entries.

    All draws in the sum must differ, as in ``m + s * e1 + t * e2``, so that their variances add up. Variances do not
    add up if a draw occurs twice, as in ``s * e + t * e``, or if a product has two draws, as in ``e1 * e2``. Returns
    False for a sum without noise.
    """
    draws = list(_draws_in(x))
    n_sources, n_products = len({draw.source for *_, draw in draws}), len({id(product) for product, *_ in draws})
    are_entrywise = all(_is_entrywise(product, factor) for product, factor, _ in draws)
    return 0 < len(draws) == n_sources == n_products and are_entrywise


def _is_entrywise(product: Product, draw: Factor) -> bool:
    """Returns whether different entries of a product read different samples of a draw, apart from repeated entries.

    An entry may be a sum over several samples of the draw, as in ``sum(noise, 0)``, because the variances of the
    samples add up. An entry may not be a sum over a label that the draw lacks, because ``_square_factors`` would then
    give a sum of squares instead of the square of a sum. Two axes may not have the same label, as on a diagonal.
    """
    labels = product.labels_of_axes
    return len(set(labels)) == len(labels) and _long_labels(product.labels) <= {*labels, *draw.labels}


def _long_labels(labels: Iterable[Label]) -> set[Label]:
    """Returns the labels (named axes) of size above 1; labels of size 1 have no effect on repeats and sums."""
    return {label for label in labels if label.size != 1}


def _deviation_of_draw(product: Product, draw: Factor, dtype: Any) -> Product:
    """Returns the standard deviation by which a product scales its draw: the product of the other factors.

    If an entry is a sum of n samples of the draw, its variance is n times as large. Therefore, a factor of ones
    replaces the draw if the product sums over labels that no other factor has. The standard deviation of a draw alone
    is 1.
    """
    others = [replace(factor, array=factor.array.astype(dtype)) for factor in product.factors if factor is not draw]
    remaining = {*product.labels_of_axes}.union(*(factor.labels for factor in others))
    summed = tuple(label for label in draw.labels if label not in remaining and label.size != 1)
    ones = Factor(jnp.ones([label.size for label in summed], dtype), summed, fixed=True)
    return replace(product, factors=tuple(others if others and not summed else [*others, ones]))


# ---- the mean and the noise of a product

Noise = Callable[[Any, Array], Array]
"""A function that takes a random key and the mean of an array, and returns the mean plus noise."""


def mean_and_noise(operation: Operation, weight_operand: int, weight: NoisyWeight) -> tuple[Array, Noise] | None:
    """Returns the mean of a product of data with a noisy weight, and a function that adds noise to each row.

    ``weight_operand`` is the index of the weight among the operands. For ``x @ w``, the mean is ``x @ m``, in float32
    or wider, and the variance of the noise is ``x**2 @ s**2``. Returns None if the equation is not linear in the
    weight, or if the noise of the entries in a row would not be independent.
    """
    view, operands = operation.view, list(operation.args)
    is_sum = isinstance(view, equations.Add | equations.Subtract)  # The noise of a sum does not depend on data.
    data = () if is_sum else (*operands[:weight_operand], *operands[weight_operand + 1 :])
    if not jnp.issubdtype(view.type.dtype, jnp.floating) or not _is_linear(view, weight_operand, data, weight):
        return None
    operands[weight_operand] = array_of(weight.mean)
    add_noise = partial(_add_noise, view, weight_operand, data, _number_labels(weight.std))
    return widened(view.bind(*operands)), add_noise


def _number_labels(std: Sum) -> Sum:
    """Replaces axis labels by numbers, so that weights of equal structure compare equal and JAX traces them once."""
    return replace(std, products=tuple(map(with_numbers, std.products)), maker=None)


def array_of(x: Sum) -> Array:
    """Computes the array of a sum in float32 or wider, and rounds it once; a sum without products gives zeros."""
    wide = _dtype_to_compute_in(x.dtype)
    if not x.products:
        return jnp.zeros(x.shape, wide).astype(x.dtype)
    return array_of_products(x.products, x.shape, Numerics(wide, wide, x.precision)).astype(x.dtype)


def _dtype_to_compute_in(dtype: Any) -> Any:
    """Returns the dtype for computing arrays of a floating-point dtype: float32, or the dtype itself if wider."""
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _square_factors(x: Sum) -> Sum:
    """Squares all factors of a sum, which turns standard deviations into variances.

    The result is the sum of the squared products, not the square of the sum, because variances of independent draws add
    up.
    """
    return map_factors(x, lambda factor: replace(factor, array=jnp.square(factor.dense)))


@partial(jax.jit, static_argnums=(0, 1))
def _add_noise(
    view: equations.View | None, weight_operand: int, data: Sequence[Any], std: Sum, key: Any, mean: Array
) -> Any:
    """Adds normal noise with the variance of an equation's output to the mean of this output.

    ``view`` is the equation, ``weight_operand`` is the index of the weight among the operands, ``std`` holds the
    standard deviations of the weight, and ``data`` holds the other operands. If ``view`` is None, the output is the
    weight itself. The backward pass recomputes the noise from ``data``, ``std`` and ``key``. JAX traces this function
    only once for equal equations and types.
    """

    def noise(data: Sequence[Any], std: Sum, key: Any) -> Array:
        """Draws the noise of the output, which the backward pass recomputes."""
        variance = _variance(view, weight_operand, data, _square_factors(std))
        # The cotangent of the variance contains the draw. Unless the standard deviations are scalars, their gradients
        # and the gradients of the data both read this cotangent.
        variance = pull_back_once(variance) if any(product.labels for product in std.products) else variance
        return _scale_noise(variance.astype(mean.dtype), random.normal(key, mean))

    # Use ``remat``: on CPUs, XLA would merge the values that ``jax.checkpoint`` recomputes with values of the forward
    # pass.
    return compute_once(mean + remat(noise, argnums=(0, 1, 2))(data, std, key))


@jax.custom_jvp
def _scale_noise(variance: Array, noise: Array) -> Array:
    """Scales standard normal noise to the given variance. Where the variance is zero, the derivative is zero."""
    return jnp.sqrt(variance) * noise


@_scale_noise.defjvp
def _scale_noise_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Computes the derivative of ``_scale_noise``, which is zero where the variance is zero."""
    (variance, noise), (variance_dot, _) = primals, tangents  # Noise from a key has no tangent.
    slope = jnp.where(variance > 0, noise / 2 * jax.lax.rsqrt(variance), 0)
    return _scale_noise(variance, noise), slope * variance_dot


def _precision(view: equations.Dot | equations.RaggedDot | equations.Conv) -> Any:
    """Returns the precision for squared operands; None for a ``DotAlgorithm``, as squares may have other dtypes."""
    return view.precision if isinstance(view.precision, lax.Precision | tuple) else None


def _square(x: Any) -> Array:
    """Returns the squares of an array's entries, in float32 or wider."""
    return jnp.square(widened(x))


def _is_linear(view: equations.View, weight_operand: int, data: Sequence[Any], weight: NoisyWeight) -> bool:
    """Returns whether an equation is linear in a weight, and the noise of the entries in an output row is independent.

    ``weight_operand`` is the index of the weight among the operands, and ``data`` holds the other operands.
    ``_variance`` has a formula for each equation for which this function returns True.
    """
    match view:
        case equations.Add() | equations.Subtract() | equations.Multiply():
            return True
        case equations.Divide():  # The weight must be the numerator: w / x, not x / w.
            return weight_operand == 0
        case _ if weight.entries_may_repeat:  # Variances of repeated entries do not add up in a product.
            return False
        case equations.Gather():  # The weight is the table, because indices are integers.
            return True
        case equations.Conv():  # The second operand is the kernel.
            return weight_operand == 1 and view.batch_group_count == 1
        case equations.RaggedDot() if not view.is_whole:
            return False
        case equations.Dot() | equations.RaggedDot():
            return contract_with_data(view, weight_operand, data, weight.std.products) is not None
        case _:
            return False


def _variance(view: equations.View | None, weight_operand: int, data: Sequence[Any], squares: Sum) -> Any:
    """Returns the variance of an equation's output, given data and the squared standard deviations of a weight.

    The function applies the equation to squared operands: for ``x @ w``, the variance is ``x**2 @ s**2``. Data that is
    only added does not change the variance. If ``view`` is None, the output is the weight itself.
    """
    match view:
        case equations.Dot() | equations.RaggedDot():
            data = (_square(data[0]), *data[1:])
            numerics = Numerics(squares.dtype, squares.dtype, _precision(view))
            products = contract_with_data(view, weight_operand, data, squares.products)
            assert products is not None  # `_is_linear` has checked that it exists.
            return array_of_products(products, view.type.shape, numerics)
        case equations.Conv():
            return _variance_of_convolution(view, data[0], squares)
        case equations.Gather():  # Out-of-bounds rows have no noise.
            new_params = {"fill_value": 0} if view.mode == lax.GatherScatterMode.FILL_OR_DROP else {}
            return view.bind(array_of(squares), data[0], **new_params)
        case equations.Multiply():
            return _square(data[0]) * array_of(squares)
        case equations.Divide():
            return array_of(squares) / _square(data[0])
        case _:  # The output is a sum with data, or the weight itself.
            return array_of(squares)


def _variance_of_convolution(view: equations.Conv, x: Any, squares: Sum) -> Any:
    """Returns the variance of a convolution of ``x``, given the squared standard deviations of the kernel.

    If all output channels of a group have the same standard deviation, as with ``VarNoise``, they also have the same
    variance. The variance is then computed for only one channel of each group, and is repeated.
    """
    kernel_axis, output_axis = view.dimension_numbers.rhs_spec[0], view.dimension_numbers.out_spec[1]
    are_channels_equal = all(product.labels.isdisjoint(product.axes[kernel_axis]) for product in squares.products)
    n_channels = squares.shape[kernel_axis]
    n_different = view.feature_group_count if are_channels_equal else n_channels  # One per group, or all channels.
    kernel = lax.slice_in_dim(array_of(squares), 0, n_different, axis=kernel_axis)
    variance = view.bind(_square(x), kernel, precision=_precision(view), preferred_element_type=squares.dtype)
    return jnp.repeat(variance, n_channels // n_different, output_axis)


# ---- records of weights and of their reads


@dataclass(frozen=True)
class WeightRecord:
    """Holds facts about a noisy weight. The record serves as the ``maker`` of the ``Sum`` that represents the weight.

    Attributes:
      facts: The facts about the output of the equation that computed the weight.
      type: The type of the weight for reports, which is the type before the weight was moved or contracted.
      steps: The depths of the enclosing scans in which data changes the weight in each step, but not its noise.
    """

    facts: Facts
    type: jax.ShapeDtypeStruct
    steps: frozenset[int] = frozenset()


Sides = tuple[frozenset[int], frozenset[int]]
"""The axes of a draw that a product sums over, and the axes that it keeps, counted from the last axis, which is 1.

For ``x @ w`` with a draw of shape (in, out), like ``w``, the sides are {2} and {1}."""


@dataclass(frozen=True)
class NoisyRead:
    """Records that an equation reads a noisy weight.

    Attributes:
      eqn: The equation that reads the weight; None if a program, or the body of an equation, returns the weight.
      weight: The record of the weight.
      sides: For each draw of the weight, the axes that the equation sums over and the axes that it keeps.
      rows: The number of rows of the result that get their own draw; None if all rows share one draw.
    """

    eqn: JaxprEqn | None
    weight: WeightRecord
    sides: Mapping[Hashable, Sides]
    rows: Any = None


Shared = dict[Hashable, list[tuple[JaxprEqn | None, str]]]
"""Maps each draw that all rows share to the reasons: pairs of an equation and of what it does with the draw.

A key is the ``source`` of a draw. The second entry of a pair is text for the report, such as "takes one draw for
all"."""


DRAW_ORIGIN = -1
"""Marks values that depend on a draw, as an origin beside the indices of the arguments on which they depend."""


class _FactsOfDraws(AllFacts):
    """Finds the facts of ``AllFacts`` about values, whether they depend on draws, and formulas of keys and integers.

    A formula is an index that stands for how a value is computed, so values with the same formula are equal. Therefore,
    draws of the same type are equal if their keys have the same formula.

    Attributes:
      multiplies_data: Whether data is multiplied, perhaps in a loop, by a value that depends on a draw but not on data.
    """

    def __init__(self) -> None:
        """Creates an analysis that has not found any formulas yet."""
        super().__init__()
        self._formulas = dict[Hashable, int]()
        self.multiplies_data = False

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> Facts:
        """Returns the facts about an equation's outputs, as in ``AllFacts``, with a formula and the mark of a draw.

        The mark of a draw is ``DRAW_ORIGIN``. If the equation multiplies data by noise, ``multiplies_data`` becomes
        True.
        """
        facts = replace(super().of_equation(eqn, operands), formula=self._formula(eqn, operands))
        # The body of a loop is not analyzed here, so a loop counts if it reads both a draw and data.
        if isinstance(equations.view_of(eqn), CONTRACTIONS) or has_body(eqn):
            reads_draw = any(each.known and DRAW_ORIGIN in each.origins for each in operands)
            self.multiplies_data |= reads_draw and not all(each.known for each in operands)
        return replace(facts, origins=facts.origins | {DRAW_ORIGIN}) if is_draw(eqn) else facts

    def _formula(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> int | None:
        """Returns the index of the formula that computes an equation's output; equal formulas have the same index.

        For example, two calls of ``jax.random.fold_in(key, 3)`` have the same index. Returns None if the equation reads
        or computes anything other than keys and integers, or has several outputs.
        """
        numbers = [facts.formula for facts in operands]
        pairs = zip(eqn.invars, numbers, strict=True)
        if any(number is None and not isinstance(v, Literal) for v, number in pairs) or len(eqn.outvars) != 1:
            return None
        # A floating-point output gets no formula. With effects, two runs of an equation may give different values.
        if has_tangent(eqn.outvars[0]) or jaxprs.has_effects(eqn):
            return None
        try:
            return self._formulas.setdefault(jaxprs.key_of(eqn, numbers), len(self._formulas))
        except TypeError:  # Some parameter of the equation cannot be hashed.
            return None

    def enters(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> bool:
        """Returns whether to analyze the body of an equation, as in ``AllFacts``, but never one that draws samples."""
        return super().enters(eqn, operands) and not is_draw(eqn)


# ---- the rules


class Drawing:
    """Defines the interpreter's rules that follow noisy weights to products with data, which draw for each row.

    Attributes:
      shared: The draws that all rows share. Shared draws stay as ``fun`` computes them.
      reads: The reads of weights that have been found so far, indexed by their position in the program.
      takes_gradients: Whether the program recomputes values for a gradient, as under ``jax.checkpoint``.
      analysis: The analysis that finds the facts about values.
    """

    counts_steps = True

    def __init__(self, shared: Shared, analysis: _FactsOfDraws) -> None:
        """Creates rules without recorded reads, given the draws that all rows share and an analysis of all programs."""
        self.shared, self.analysis = shared, analysis
        self.reads = dict[Hashable, NoisyRead]()
        self.takes_gradients = False

    def may_introduce_sum(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Returns whether an equation draws normal samples, itself or in its body, and thus creates a noisy weight."""
        del facts, out_facts  # The interpreter passes both to all rules.
        return is_draw(eqn) or (has_body(eqn) and _has_draw_inside(eqn))

    def outputs(self, operation: Operation) -> Outs:
        """Returns an equation's outputs as noisy weights, or as arrays with noise in each row; None if it needs arrays.

        The order of the rules matters. Draws come first, because a draw is also a call with a body. Casts come before
        other moves, which would cast each factor. Products with data come last. An output without rows of data is still
        a weight. If the result is None, the interpreter calls ``materialize`` for each operand that is a weight, and
        evaluates the equation on arrays.
        """
        eqn, args = operation.eqn, operation.args
        if is_draw(eqn):
            return [_drawn_sum(operation)]
        if has_body(eqn):  # In a derivative, JAX sets the flag `differentiated` of `jax.checkpoint`.
            self.takes_gradients |= isinstance(operation.view, equations.Checkpoint) and operation.view.differentiated
            return interpret_bodies(operation)
        moved_sums = _rounded_sum(operation) or _split_batch_of_draws(operation) or move_sum(eqn, args)
        if moved_sums is not None:
            return [replace(x, maker=_record_of_output(operation, args[0].maker.type)) for x in moved_sums]
        if not isinstance(operation.view, LINEAR):
            return None
        rows = _row_sizes(operation)
        if rows:
            return self._draw_rows(operation, rows)
        x = _combined_sum(operation)
        return None if x is None else [x]

    def _draw_rows(self, operation: Operation, rows: Sequence[Any]) -> Outs:
        """Multiplies data by a noisy weight, and draws separate noise for each row.

        ``rows`` holds the sizes of the axes of rows, such as [8] for ``x @ w`` with data of shape (8, 3). Returns None
        if several operands are weights, if no operand is data, or if the noise of different rows would depend on each
        other.
        """
        (operand, weight), *others = [(i, x) for i, x in enumerate(operation.args) if isinstance(x, Sum)]
        if others or all(facts.known for facts in _facts_of_arrays(operation)):
            return None
        noisy = self._noisy_unless_shared(weight)
        parts = None if noisy is None else mean_and_noise(operation, operand, noisy)
        if noisy is None or parts is None:
            return None
        interpreter, record = operation.interpreter, _record_of_output(operation, weight.maker.type)
        # Shards of the data hold different rows, and so do steps of a scan in which data changes the weight.
        mesh_axes_of_data = record.facts.mesh_axes - weight.maker.facts.mesh_axes
        shards = [operation.view.type.sharding.mesh.shape[axis] for axis in mesh_axes_of_data]
        n_rows = math.prod([*rows, *shards, *(interpreter.steps[i].length for i in record.steps)])
        read = NoisyRead(operation.eqn, weight.maker, _sides(operation.view, operand, weight), n_rows)
        result = self._with_noise(interpreter, read, noisy, operation.out_facts, *parts)
        return None if result is None else [result.astype(operation.view.type.dtype)]

    def _noisy_unless_shared(self, x: Sum) -> NoisyWeight | None:
        """Splits ``x`` into mean and deviations; None if a draw is shared, or if the noise is not independent."""
        return NoisyWeight.of(x) if all(draw.source not in self.shared for *_, draw in _draws_in(x)) else None

    def _with_noise(
        self, interpreter: Interpreter, read: NoisyRead, noisy: NoisyWeight, facts: Facts, mean: Array, add_noise: Noise
    ) -> Array | None:
        """Draws the noise for a read, adds the noise to the mean, and records the read.

        The key is derived from the key of the weight's first draw and the index of the read, so that two uses of a
        weight draw independently. Mesh axes over which the result differs and steps of scans also change the key, so
        that shards and steps draw independently. Returns None in a ``shard_map`` whose types do not say over which mesh
        axes the result varies.
        """
        number = self._record_read(interpreter, read)
        key = key_of_use(noisy.key, jnp.uint32(number), sorted(facts.mesh_axes))
        key = functools.reduce(jax.random.fold_in, [step.index for step in interpreter.steps], key)
        result = add_noise(key, mean)
        return result if jaxprs.has_known_varying_axes(jax.typeof(result)) else None

    def _record_read(self, interpreter: Interpreter, read: NoisyRead) -> int:
        """Records a read of a weight and returns its index, from which the key of its noise is derived.

        JAX traces the body of a scan several times, so the index must be the same whenever the same equation reads the
        same draws. A read is identified by three things: the enclosing equations (``interpreter.path``), because a
        program may occur twice; the equation; and the draws of the weight (``read.sides``), because an equation may
        read two weights.
        """
        place = (*interpreter.path, id(read.eqn), *read.sides)
        self.reads[place] = read
        return list(self.reads).index(place)

    def materialize(self, interpreter: Interpreter, x: Sum, eqn: JaxprEqn | None) -> Any:
        """Returns the array of a weight, shared by all rows, for an equation that needs it, and records the read.

        ``eqn`` is None if a program, or the body of an equation, returns the weight. Data may change the weight in each
        step of a scan although its noise was drawn before the scan, as with a mask that is computed from data. The
        steps then count as rows, and each step draws its own array.
        """
        record: WeightRecord = x.maker
        read = NoisyRead(eqn, record, _sides(None, 0, x))
        noisy = self._noisy_unless_shared(x) if record.steps else None
        if noisy is not None:
            mean, add_noise = widened(array_of(noisy.mean)), partial(_add_noise, None, 0, (), _number_labels(noisy.std))
            read_of_rows = replace(read, rows=math.prod([interpreter.steps[i].length for i in record.steps]))
            result = self._with_noise(interpreter, read_of_rows, noisy, record.facts, mean, add_noise)
            if result is not None:  # Otherwise, record the read again, without rows.
                return result.astype(x.dtype)
        self._record_read(interpreter, read)
        return array_of(x)

    def on_shard(self, x: Sum, facts: Facts) -> Sum:
        """Returns a shard of a noisy weight, whose record says over which mesh axes its shards differ."""
        return replace(x, maker=replace(x.maker, facts=facts))


CONTRACTIONS = equations.Dot, equations.RaggedDot, equations.Conv
"""The equations that multiply data by a weight and sum over entries."""

LINEAR = (
    *(equations.Add, equations.Subtract, equations.Multiply, equations.Divide, equations.Select),
    *(*CONTRACTIONS, equations.Gather),
)
"""The equations whose outputs may be noisy weights, or arrays with noise in each row."""


def _row_sizes(operation: Operation) -> list[Any]:
    """Returns the sizes of the output axes that index rows, which are the axes along which no weight has noise.

    For ``x @ w`` with data of shape (8, 3), the result is [8], because the noise of ``w`` differs along outputs but not
    along examples. If the weight was looked up by data, the number of look-ups is one of the sizes.
    """
    view, weights = operation.view, [(i, x) for i, x in enumerate(operation.args) if isinstance(x, Sum)]
    contraction = contraction_of(view)

    def is_row(axis: int) -> bool:
        """Returns whether an output axis indexes rows, that is, no weight has separate noise along this axis."""
        # In an elementwise equation, all operands except scalars have the same axes as the output.
        sources = contraction.sources(axis) if contraction else [axis for _ in operation.args]
        pairs = [(x, sources[i]) for i, x in weights]
        return not any(source is not None and x.ndim and _has_noise_along(x, source) for x, source in pairs)

    # Several draws in a weight were looked up together, so their rows count once.
    looked_up = dict.fromkeys(draw.rows for _, x in weights for *_, draw in _draws_in(x))
    sizes = [*(n for i, n in enumerate(view.type.shape) if n != 1 and is_row(i)), *looked_up]
    return [n for n in sizes if n != 1]  # A draw that was not looked up has one row.


def _has_noise_along(x: Sum, axis: int) -> bool:
    """Returns whether any draw of a weight has different samples along an axis; an axis of size 1 gives False."""
    axes = ((product.axes[axis], factor.labels) for product, factor, _ in _draws_in(x))
    return any(labels and set(labels) <= set(labels_of_draw) for labels, labels_of_draw in axes)


def _record_of_output(operation: Operation, type: Any) -> WeightRecord:
    """Returns the record of the noisy weight that an equation computes; reports show the given type.

    The ``steps`` of the record are the depths of the scans in which data changes the weight, for example by a mask,
    although the noise is drawn before the scan.
    """
    pairs = list(zip(operation.args, operation.facts, strict=True))
    steps_of_data = frozenset[int]().union(*(facts.steps for _, facts in pairs if not facts.known))
    # If a weight differs between steps of a scan although no data changes it there, the scan itself draws the noise.
    steps_of_noise = frozenset[int]().union(*(facts.steps - x.maker.steps for x, facts in pairs if isinstance(x, Sum)))
    return WeightRecord(operation.out_facts, type, steps_of_data - steps_of_noise)


def _drawn_sum(operation: Operation) -> Sum:
    """Draws the normal samples of an equation, and returns them as a sum of one product with one factor.

    If no equation reads the samples as an array later, the samples are dead code and are not computed.
    """
    (array,) = operation.view.bind(*operation.args)
    product = Product.of(array, fixed=True)
    (factor,) = product.factors
    # Draws are equal if they have the same shape and their keys have the same formula, so they get the same source. A
    # key without a formula is assumed to differ in each equation.
    formula = operation.facts[0].formula
    source = operation.maker if formula is None else (formula, array.shape, array.dtype)
    product = replace(product, factors=(replace(factor, draw=Draw(source, operation.args[0])),))
    return Sum((product,), array.shape, array.dtype, None, WeightRecord(operation.out_facts, type_of(array)))


def _split_batch_of_draws(operation: Operation) -> list[Sum] | None:
    """Returns separate noise arrays if an equation splits a batch of noise arrays, or None for any other equation.

    The noise for arrays of equal shapes is drawn in one batch, with one key for each array. For example, 3 keys give a
    batch of shape (3, 8, 4), which is split into 3 draws of shape (1, 8, 4). The draws are independent, so each draw
    gets its own source.
    """
    view, (x, *_) = operation.view, operation.args
    if not isinstance(view, equations.SplitAxis) or set(view.sizes) != {1}:
        return None
    draws = [draw for *_, draw in _draws_in(x)]
    # Only a plain draw is split here, and only along an axis of keys. All other splits are left to ``move_sum``.
    if len(x.products) > 1 or len(x.products[0].factors) > 1 or view.axis >= draws[0].key.ndim:
        return None

    def with_own_source(factor: Factor, i: int) -> Factor:
        """Returns ``factor`` with a source of its own, so that the ``i``-th output counts as a separate draw."""
        return replace(factor, draw=factor.draw and replace(factor.draw, source=(factor.draw.source, i)))

    parts = move_sum(operation.eqn, [x]) or []
    return [map_factors(part, partial(with_own_source, i=i)) for i, part in enumerate(parts)]


def _rounded_sum(operation: Operation) -> list[Sum] | None:
    """Returns a weight in a new dtype if an equation casts it to fewer digits, or None for any other equation.

    The factors keep their dtype, because the weight is rounded only once, when it is multiplied.
    """
    view = operation.view
    if not isinstance(view, equations.ConvertType):
        return None
    (x,) = operation.args
    return [replace(x, dtype=view.new_dtype)] if is_narrowing_cast(x.dtype, view.new_dtype) else None


def _combined_sum(operation: Operation) -> Sum | None:
    """Returns the weight that an equation computes from weights and arrays, such as ``w * mask`` or ``w[0]``.

    Returns None if the result is not a sum of products, or if its noise would not be independent. The
    interpreter then forms the array of each weight that the equation reads, and all rows share one draw.
    """
    # An array that depends on a draw, such as the norm of a noisy weight, is not independent of the noise.
    if any(DRAW_ORIGIN in facts.origins for facts in _facts_of_arrays(operation)):
        return None
    view, args = operation.view, operation.args
    weight = next(x for x in args if isinstance(x, Sum))  # Reports show the type of the first weight.
    match view:
        case equations.Select():
            x = select_sum(args)
        case equations.Gather():  # The weight is the table, because indices are integers.
            x = look_up(view, weight, args[1:])
        case _:
            x = make_sum(operation.eqn, args, operation.facts)
    # Reports show the type of a weight before it was contracted or looked up.
    type = weight.maker.type if isinstance(view, equations.Dot | equations.Gather) else type_of(view.type)
    return None if x is None or not has_independent_noise(x) else replace(x, maker=_record_of_output(operation, type))


def _sides(view: equations.View | None, operand: int, weight: Sum) -> dict[Hashable, Sides]:
    """Maps the source of each draw of a weight to the axes that an equation sums over, and the axes that it keeps.

    ``operand`` is the index of the weight among the operands. If ``view`` is None, only the array of the weight is
    formed, which keeps all axes. For a matrix, with axes counted from the back, ``x @ w`` sums over axis 2 and keeps
    axis 1. The gradient with respect to the data, ``g @ w.T``, sums over axis 1 and keeps axis 2. A gain is multiplied
    elementwise in both passes, so its axes are on both sides. For sums and look-ups, both sides are empty, because the
    gradients do not read the weight.
    """
    if isinstance(view, equations.Add | equations.Subtract | equations.Gather):
        return {draw.source: (frozenset(), frozenset()) for *_, draw in _draws_in(weight)}
    contraction = view and contraction_of(view)
    axes_kept = contraction.kept(operand) if contraction else range(weight.ndim)
    axes_of_batch = contraction.batch(operand) if contraction else ()

    def sides(product: Product, draw: Factor) -> Sides:
        """Returns the axes of a draw that the equation sums over, and those that it keeps, both without batch axes."""
        kept_labels = {label for axis in axes_kept for label in product.axes[axis]}
        batch_labels = {label for axis in axes_of_batch for label in product.axes[axis]}
        axes = {label: len(draw.labels) - i for i, label in enumerate(draw.labels) if label.size != 1}
        kept = frozenset(axis for label, axis in axes.items() if label in kept_labels)
        if isinstance(view, equations.Multiply | equations.Divide):
            return kept, kept
        return frozenset(axis for label, axis in axes.items() if label not in kept_labels | batch_labels), kept

    return {draw.source: sides(product, factor) for product, factor, draw in _draws_in(weight)}


def _facts_of_arrays(operation: Operation) -> list[Facts]:
    """Returns the facts about those operands of an equation that are not noisy weights."""
    return [facts for x, facts in zip(operation.args, operation.facts, strict=True) if not isinstance(x, Sum)]


def is_draw(eqn: JaxprEqn) -> bool:
    """Returns whether an equation draws independent normal samples, by the name of the function that it calls."""
    view = equations.view_of(eqn)
    has_name = isinstance(view, equations.Jit) and view.name == random.DRAW
    return has_name and jnp.issubdtype(jaxprs.type_of(eqn.outvars[0]).dtype, jnp.floating)


def _has_draw_inside(eqn: JaxprEqn) -> bool:
    """Returns whether an equation draws normal samples in its body, at any depth."""
    return any(is_draw(x) or _has_draw_inside(x) for program in jaxprs.inner_programs(eqn) for x in program.eqns)


# ---- draws that all rows share


def _draws_to_share(rules: Drawing) -> Shared:
    """Returns a dict with the draws that all rows must share but do not share yet, and the reasons for each.

    All rows must share a draw in two cases. First, an equation needs the array of the weight. Second, the loss itself
    takes a gradient, which must see the same weights as the value. There are two signs of such a gradient: one product
    sums over an axis that another product keeps, as in ``x @ w`` and ``g @ w.T``, or the program recomputes values for
    a gradient. Because the gradient may read other weights too, all rows then share each draw that is read more than
    once.
    """
    reads_of = dict[Hashable, list[NoisyRead]]()
    for read in rules.reads.values():
        for draw in read.sides.keys() - rules.shared.keys():
            reads_of.setdefault(draw, []).append(read)
    shared: Shared = {
        draw: [(read.eqn, "takes one draw for all") for read in reads if read.rows is None]
        for draw, reads in reads_of.items()
    }
    conflicting = {draw: list(_conflicting_reads(draw, reads)) for draw, reads in reads_of.items()}
    if any(conflicting.values()) or rules.takes_gradients:
        for draw, reads in reads_of.items():
            how = "along the other side, as a gradient does" if conflicting[draw] else "again, beside a gradient"
            # A single read is not enough to share the draw: a draw that is read only once stays separate for each row.
            shared[draw] += [(read.eqn, f"reads it {how}") for read in conflicting[draw] or reads[1:]]
    return {draw: reasons for draw, reasons in shared.items() if reasons}


def _conflicting_reads(draw: Hashable, reads: Sequence[NoisyRead]) -> Iterator[NoisyRead]:
    """Yields reads that sum over axes of a draw that an earlier read keeps, or vice versa: ``g @ w.T`` after ``x @ w``.

    ``reads`` holds all reads of the draw, in the order of the program. Reads for which all rows share one draw are
    skipped.
    """
    summed_before, kept_before = set[int](), set[int]()
    for summed, kept, read in ((*read.sides[draw], read) for read in reads if read.rows is not None):
        if summed & kept_before or kept & summed_before:
            yield read
        summed_before |= summed
        kept_before |= kept


# ---- the transform


def local_reparametrization(fun: Callable[P, R], argnums: Argnums = None) -> Callable[P, R]:
    r"""Returns ``fun`` with separate noise for each row of data, without a copy of the weights for each row.

    A weight with independent Gaussian entries, :math:`w = m + s \varepsilon`, is drawn once for all examples of a
    batch, so the errors of their gradients are correlated. In a product :math:`x w`, each row of the result is a
    Gaussian vector with mean :math:`x m`, whose entries are independent with variance :math:`x^2 s^2`. The returned
    function draws this vector instead of the weight, and draws a new vector for each row. The network's code does not
    change.

    The function finds the noise of :class:`VarNoise`, :class:`Gaussian` and :class:`VariationalDropout`, and follows
    the noise through all operations that leave the entries independent:

    - sums, multiples, selections and contractions with other arrays, such as the masks of :class:`Mask`, or a scale
      that is computed from data;
    - transposes, reshapes, slices, sums along axes, single rows of a table, and casts to fewer digits;
    - ``jit``, ``scan``, ``cond``, ``shard_map``, ``jax.checkpoint`` and ``vmap``.

    A result of these operations without rows of data is still a noisy weight. Each row of data gets its own draw in

    - products of matrices (``@``, ``einsum``, and ``jax.lax.ragged_dot`` of experts, each with its own mean and
      variance), convolutions, and sums and multiples with data, such as biases;
    - rows of tables.

    A row is anything that the noise does not index: an example, a position in a sentence or an image, a look-up in a
    table, or a step of a loop. The rows of ``A`` in ``A @ w`` are rows too, because ``A`` looks like a batch. Two rows
    of the same example get different draws, whereas a weight drawn for the example would be the same in both rows. The
    mean and the variance of each entry of the result are still the same as with such a weight. Each use of a weight
    draws independently, such as both uses of a tied table, and each step of a loop over time. Therefore, the mean of
    the gradient stays the same for a loss that is linear in the products of each weight, or is a sum of functions of
    one product each. The variance of the gradient falls with the number of examples.

    In all other cases, all rows share one draw, which is the draw that ``fun`` itself computes from the key. These
    cases are

    - factorized noise, :class:`WeightDropout`, :class:`HardConcrete`, complex weights, and weights in float16;
    - weights whose entries a formula mixes after the noise, as in ``VarNoise(0.1) >> WeightNorm()``;
    - products with arrays that depend only on the arguments in ``argnums``;
    - any other read, such as the square of a weight;
    - a ``shard_map`` with ``check_vma=False``.

    If one read of a weight requires a shared draw, all reads of this weight use the shared draw. Under
    ``WeightDropout(0.1) >> VarNoise(0.1)``, all rows share the mask, but not the Gaussian noise, and ``rpx.explain``
    counts only the Gaussian noise.

    If ``fun`` itself takes a gradient, as for forces, gradient penalties and meta-learning, the gradient sees the same
    weights as the value. Such a gradient is recognized if one product sums over an axis of a weight that another
    product keeps, as in ``x @ w`` and ``g @ w.T``, or if values are recomputed for a gradient. All weights that are
    read more than once then take one draw for all rows. ``jax.jvp`` alone is not recognized, nor is a gradient that
    does not multiply by a noisy weight. In these cases, value and derivative draw independently.
    ``rpx.explain(rpx.transforms.local_reparametrization(loss), *args)`` shows which weights draw for how many rows, and
    where and why other weights share one draw.

    Means are computed as in ``fun``, and variances are computed in float32 or wider. Gradients pass through both means
    and variances. The backward pass recomputes variances and noise. Apply ``jax.grad``, ``jax.jit``, :func:`remat` and
    :func:`factored` outside of this function. With a single key, ``jax.vmap`` outside of this function gives every
    example the same draws. To avoid this, apply ``jax.vmap`` inside, or map over keys too. The noise of
    ``VarNoise(-s)`` is no longer the negative of that of ``VarNoise(s)``.

    Args:
      fun: A loss, or any pure function of arrays.
      argnums: The positions of the arguments from which weights are computed, as in :func:`factored`. Default: the
        first, and keys. All other arguments are data. Closed-over arrays do not count as data, so pass data as an
        argument.

    Raises:
      TypeError: If ``fun`` is not a function, or ``argnums`` is not a position or names an argument that does not
        exist.
      ValueError: If no row gets its own draw, because the data is closed over or in an argument for weights, or because
        ``fun`` does not call ``apply``.
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
        arguments = Arguments.of(who, fun, argnums, args, kwargs)
        call = arguments.trace()
        rules, program, consts = _rewrite(arguments, call)
        if all(read.rows is None for read in rules.reads.values()):
            _require_data(who, rules, arguments, call)
        # Draws that no equation reads are dead code, and are removed.
        return call.restore(jaxprs.evaluate(jaxprs.without_dead_code(program), [*consts, *call.inputs]))

    def report(args: Sequence[Any], kwargs: Any) -> Explained:
        """Returns the report of ``explain`` for arguments of ``fun``, or for their shapes and dtypes.

        If a weight has one draw for all rows only because the array that multiplies the weight does not count as data,
        the reason says so.
        """
        check_this_jax()
        arguments = Arguments.of(who, fun, argnums, args, kwargs)
        call = arguments.trace()
        weights = list(_noisy_weights(_rewrite(arguments, call)[0], arguments, call))
        lacking_data = {weight.path for weight in _weights_if_all_is_data(arguments, call)}
        for i, weight in enumerate(weights):
            if weight.path in lacking_data and not weight.is_transformed:
                weights[i] = replace(weight, reason=f"{weight.reason}; {_IS_CLOSED_OVER}")
        return Explained(tuple(weights), "{} noisy weights draw for each row", ("for each row", "one draw for all"))

    setattr(function, REPORTED, report)
    return function


_IS_CLOSED_OVER = "its other input is closed over, or in an argument for weights: pass it as an argument of its own"
"""The reason in a report for a weight that has one draw for all rows only because its other operand is not data."""


def _require_data(who: str, rules: Drawing, arguments: Arguments, call: Traced) -> None:
    """Raises an error if all rows share their draws because no array counts as data or ``fun`` calls no ``apply``.

    The caller has checked that no row gets its own draw. There is no error if ``fun`` calls ``apply`` but draws no
    noise, as with a deterministic chain, or if noise multiplies data but all rows must share the noise.
    """
    if not rules.reads and not contains_apply(call.program):
        raise ValueError(
            f"{who} found no noise, because the function does not call `apply`, or calls it only under `rpx.remat`. "
            "Call `apply` in the function, as in `lambda raw, key, x: model(p.apply(raw, key), x)`, and apply "
            "`rpx.remat` to the result."
        )
    if rules.reads and not rules.analysis.multiplies_data:
        for weight in _weights_if_all_is_data(arguments, call):  # The error names the first weight, if any.
            raise ValueError(
                f"{who} has no effect: all rows share the noise of a weight ({weight.path}), because the array that "
                "multiplies it is closed over, or in an argument for weights (argnums, by default the first). Pass the "
                "data as an argument of its own: `loss(raw, key, x)`."
            )


def _weights_if_all_is_data(arguments: Arguments, call: Traced) -> list[Weight]:
    """Returns the weights that would be drawn for each row if all inputs that no ``apply`` reads were data.

    If all rows share the draw of such a weight, the program itself does not require this. The caller has passed data as
    closed-over arrays or in an argument for weights.
    """
    rules, *_ = _rewrite(arguments, call, all_is_data=True)
    return [weight for weight in _noisy_weights(rules, arguments, call) if weight.is_transformed]


def _noisy_weights(rules: Drawing, arguments: Arguments, call: Traced) -> Iterator[Weight]:
    """Yields the entries of the report of ``explain``, one for each parameter path, even if it is read several times.

    A weight counts as transformed, so that each row gets its own draw, if none of its draws is shared. The reason says
    how many rows get a draw, and which reads of the weight require a shared draw (``rules.shared``).
    """
    paths, lines = paths_of(arguments, call), lines_by_origin(call.program)
    reads_of_path = dict[str, list[NoisyRead]]()
    for read in rules.reads.values():
        reads_of_path.setdefault(common_path(read.weight.facts.origins, paths), []).append(read)
    for path, reads in reads_of_path.items():
        draws = dict.fromkeys(draw for read in reads for draw in read.sides)
        reasons = [reason for draw in draws for reason in rules.shared.get(draw, ())]
        notes = [*_notes_on_rows(reads), *dict.fromkeys(describe_read(*reason, lines) for reason in reasons)]
        yield Weight(path, describe(reads[0].weight.type), is_transformed=not reasons, reason="; ".join(notes))


def _notes_on_rows(reads: Sequence[NoisyRead]) -> list[str]:
    """Returns how many rows get a draw in how many uses, such as ``["2 uses, 3 and 8 rows"]``; empty if no rows do."""
    rows = [read.rows for read in reads if read.rows is not None]
    sizes = " and ".join(dict.fromkeys(map(str, rows)))
    return [f"{len(rows)} use{'s' if len(rows) > 1 else ''}, {sizes} rows"] if rows else []


def _rewrite(arguments: Arguments, call: Traced, *, all_is_data: bool = False) -> tuple[Drawing, Jaxpr, list[Any]]:
    """Rewrites the program of a call so that each row of data gets its own noise.

    With ``all_is_data``, arguments for weights and closed-over arrays count as data too, unless an ``apply`` reads
    them.

    Returns three values: the rules of the last rewriting, which hold all reads and shared draws; the new program; and
    the constants of the new program, which are its first inputs. ``call.program`` is not changed.
    """
    program = jaxprs.without_dead_code(call.program)  # Dead equations must not count as reads.
    n_closed_over = len(call.inputs) - len(arguments.arrays)  # Closed-over arrays come first, then the data.
    flags = [(i < n_closed_over or flag) and not all_is_data for i, flag in enumerate(call.is_chosen)]
    # Formulas of inputs have negative indices, and formulas of equations have indices from 0 on.
    facts = [
        replace(each, formula=-1 - i, origins=frozenset([i]) if call.is_chosen[i] else each.origins)
        for i, each in enumerate(facts_of_inputs(program, flags))
    ]
    analysis = _FactsOfDraws()
    analysis.closed_over = replace(analysis.constant, known=not all_is_data)

    def rewrite(shared: Shared) -> tuple[Drawing, Any]:
        """Rewrites the program so that all rows share these draws; repeats this until no more draws must be shared."""
        rules = Drawing(shared, analysis)
        rewritten = jax.make_jaxpr(lambda *inputs: Interpreter(rules).arrays(program, inputs, facts))(*call.inputs)
        more_shared = _draws_to_share(rules)
        return rewrite(shared | more_shared) if more_shared else (rules, rewritten)

    rules, rewritten = rewrite({})
    return rules, *jaxprs.consts_first(rewritten)
