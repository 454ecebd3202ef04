"""Stages for positive and bounded numbers, for other elementwise maps, and for probabilities along an axis."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import LAST, Axis, check_one_along, position
from reparax.core.constraint import Constraint, is_known
from reparax.core.fields import Number, by_array, field, number_field
from reparax.core.leaf import Reparametrization
from reparax.core.roles import VECTORS
from reparax.core.values import Values, main
from reparax.numerics.arguments import check_function, number_that, one_of
from reparax.numerics.arithmetic import inlined, scalar, softplus_inverse, widened

Function = Callable[[Array], Array]


class _ElementwiseMap(Constraint):
    """The base class of stages that apply an elementwise function to the raw value ``x``.

    To draw a sample, the stage applies this function to standard normal numbers.
    """

    raw_values: ClassVar[Values] = {"x": main(aligned=True, decays=False)}
    elementwise: ClassVar[Any] = True

    @abstractmethod
    def _forward(self, x: Array) -> Array:
        """Maps the raw value ``x`` to weights."""

    @abstractmethod
    def _inverse(self, w: Array) -> Array:
        """Maps weights ``w`` to the raw value ``x``."""

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        if jnp.iscomplexobj(values["x"]):
            raise ValueError(f"log_det takes real arrays, but got {values['x'].dtype}. Exclude the array with `where`.")
        _, slope = jax.jvp(self._forward, (values["x"],), (jnp.ones_like(values["x"]),))
        return jnp.sum(self._log_slope(values["x"], slope))

    def _log_slope(self, x: Array, slope: Array) -> Array:
        """Returns the logarithm of the magnitude of ``slope``, the derivative of the map at ``x``."""
        del x
        return jnp.log(jnp.abs(slope))

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": self._inverse(widened(w)).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return self._forward(widened(values["x"])).astype(values["x"].dtype)

    def sample_leaf(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.apply_leaf({"x": jax.random.normal(key, shape, dtype)})


_POSITIVE: dict[str, tuple[Function, Function]] = {
    "softplus": (jax.nn.softplus, softplus_inverse),
    "exp": (jnp.exp, jnp.log),
    "square": (jnp.square, jnp.sqrt),
}
"""Maps each value of ``map`` to two functions: from raw values to positive numbers, and the inverse."""


PositiveMap = Literal["softplus", "exp", "square"]


class Positive(_ElementwiseMap):
    r"""Makes numbers positive: :math:`w = \log(1 + e^x)` (softplus), :math:`w = e^x` or :math:`w = x^2`.

    In place of ``w``, the raw tree stores ``x`` (main), of the same shape and dtype. ``init`` gives
    :math:`x = w + \log(1 - e^{-w})`, :math:`\log w` or :math:`\sqrt w`. ``init`` is exact for positive ``w``, up to the
    rounding of ``x``. Zero and negative numbers raise an error, because they would start next to zero, where each map
    is flat, and never train. With ``outside="unchecked"``, such numbers start at the smallest number that the
    arithmetic of the dtype distinguishes from zero. For half-precision arrays, the computation runs in float32.

    Args:
      map: The map from ``x`` to ``w``: ``"softplus"``, ``"exp"`` or ``"square"``. Only ``"square"`` can give
        weights of exactly zero.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: every floating parameter.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Raises:
      ValueError: If ``map`` is not one of the allowed strings.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Positive(where=".*scale")
      >>> raw = p.init({"scale": jnp.array([1.0, 20.0])})
      >>> raw
      {'scale': {'@positive': {'x': Array([ 0.54132485, 20.        ], dtype=float32)}}}
      >>> p.apply(raw)
      {'scale': Array([ 1., 20.], dtype=float32)}

    References:
      Dugas, Bengio, Bélisle, Nadeau and Garcia, *Incorporating Second-Order Functional Knowledge*, 2001.
    """

    map: PositiveMap = field(one_of(PositiveMap), default="softplus")

    dtypes: ClassVar[Any] = jnp.floating

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": self._inverse(jnp.maximum(widened(w), _least_number(w))).astype(w.dtype)}

    def flat_leaf(self, w: Array) -> Array:
        return widened(w) < _least_number(w)

    def contains_leaf(self, w: Array, tolerance: float | None = None) -> Array:
        """Returns whether all numbers are positive. If ``map="square"``, zeros are allowed as well.

        Args:
          w: An array.
          tolerance: If given, numbers down to ``-tolerance`` times the largest magnitude are allowed.
        """
        x = widened(jnp.asarray(w))
        if tolerance is None:
            return jnp.all(x >= 0 if self.map == "square" else x > 0)
        return jnp.all(x >= -tolerance * jnp.max(jnp.abs(x), initial=0.0))

    def _forward(self, x: Array) -> Array:
        return _POSITIVE[self.map][0](x)

    def _log_slope(self, x: Array, slope: Array) -> Array:
        # For softplus and exp, use closed forms, because the slope itself may underflow.
        return {"softplus": jax.nn.log_sigmoid(x), "exp": x, "square": jnp.log(jnp.abs(slope))}[self.map]

    def _inverse(self, w: Array) -> Array:
        return _POSITIVE[self.map][1](w)


def _least_number(w: Array) -> float:
    """Returns the smallest positive number that arithmetic on ``w`` distinguishes from zero."""
    return 2 * max(float(jnp.finfo(w.dtype).smallest_subnormal), float(jnp.finfo(widened(w).dtype).tiny))


class Bounded(_ElementwiseMap):
    r"""Keeps numbers between two bounds: :math:`w = a + (b - a) / (1 + e^{-x})`.

    In place of ``w``, the raw tree stores ``x`` (main), of the same shape and dtype. ``init`` gives the logit
    :math:`x = \log((w - a) / (b - w))`, which is exact between the bounds, up to the rounding of :math:`b - a`. Numbers
    at a bound or beyond raise an error, because the map is flat there and they would never train. With
    ``outside="unchecked"``, such numbers start next to the bound instead. For half-precision arrays, the computation
    runs in float32.

    Args:
      low: The lower bound :math:`a`, a number or a traced scalar.
      high: The upper bound :math:`b`, a number greater than ``low`` or a traced scalar.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: every floating parameter.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Raises:
      TypeError: If ``low`` or ``high`` has the wrong type.
      ValueError: If ``low`` or ``high`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.numbers.Bounded(-1, 3)
      >>> raw = p.init({"w": jnp.array([1.0, 2.0])})
      >>> raw
      {'w': {'@bounded': {'x': Array([0.       , 1.0986123], dtype=float32)}}}
      >>> p.apply(raw)["w"].round(3)
      Array([1., 2.], dtype=float32)

    References:
      Stan Development Team, *Stan Reference Manual*, constraint transforms, lower and upper bounded scalar.
    """

    low: Number = number_field(per_array=False)
    high: Number = number_field(per_array=False)

    dtypes: ClassVar[Any] = jnp.floating

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.low, self.high
        if isinstance(low, float) and isinstance(high, float) and not -math.inf < low < high < math.inf:
            raise ValueError(f"Bounded got low={low} and high={high}, but takes finite bounds with low < high.")

    def contains_leaf(self, w: Array, tolerance: float | None = None) -> Array:
        """Returns whether all numbers lie between the bounds, up to rounding.

        Args:
          w: An array.
          tolerance: How far outside the bounds a number may be, in units of ``high - low``. Default: ten times the
            machine epsilon.
        """
        w = jnp.asarray(w)
        t = self._relative_position(widened(w))
        units = 10 * float(jnp.finfo(w.dtype).eps) if tolerance is None else tolerance
        return jnp.all((t >= -units) & (t <= 1 + units))

    def flat_leaf(self, w: Array) -> Array:
        t = self._relative_position(widened(w))
        return (t <= 0) | (t >= 1)

    def _forward(self, x: Array) -> Array:
        low, high = scalar(self.low, x), scalar(self.high, x)
        return low + (high - low) * jax.nn.sigmoid(x)

    def _log_slope(self, x: Array, slope: Array) -> Array:
        width = scalar(self.high, x) - scalar(self.low, x)
        return jnp.log(width) + jax.nn.log_sigmoid(x) + jax.nn.log_sigmoid(-x)

    def _inverse(self, w: Array) -> Array:
        limits = jnp.finfo(w.dtype)
        t = jnp.clip(self._relative_position(w), float(limits.tiny), 1 - float(limits.epsneg))
        return jnp.log(t) - jnp.log1p(-t)

    def _relative_position(self, w: Array) -> Array:
        """Rescales numbers linearly, so that ``low`` becomes 0 and ``high`` becomes 1."""
        low, high = scalar(self.low, w), scalar(self.high, w)
        return (w - low) / (high - low)


class Elementwise(_ElementwiseMap):
    r"""Computes weights by an elementwise function of your own: :math:`w = f(x)`.

    In place of ``w``, the raw tree stores ``x`` (main), of the same shape and dtype. ``init`` gives
    :math:`x = f^{-1}(w)`, and is exact if ``inverse`` is a right inverse of ``forward``. A number would never train if
    ``inverse`` maps it to infinity, or to a point where the derivative of ``forward`` is 0. Such numbers raise an error
    unless ``outside="unchecked"``. Half-precision arrays are passed to both functions as float32.

    Args:
      forward: The elementwise function :math:`f`. Define the function once, outside the training step, because
        functions compare by identity: a new ``lambda`` in each step would compile the step again. ``to_json`` can write
        only functions of JAX.
      inverse: A right inverse of ``forward``.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: every floating or complex parameter.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Raises:
      TypeError: If ``forward`` or ``inverse`` has the wrong type.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.numbers.Elementwise(jnp.tanh, jnp.arctanh)
      >>> p
      Elementwise(jnp.tanh, jnp.arctanh)
      >>> p.init({"w": jnp.array([0.0, 0.5])})
      {'w': {'@elementwise': {'x': Array([0.        , 0.54930615], dtype=float32)}}}
    """

    forward: Function = field(check_function)
    inverse: Function = field(check_function)

    def _why_refused(self, w: Array) -> str | None:
        why = super()._why_refused(w)  # Check `w` first, so that NaN in `w` itself is reported as such.
        if why is not None or not is_known(w):
            return why
        with jax.ensure_compile_time_eval():
            if not jnp.any(jnp.isnan(self.inverse(widened(jnp.asarray(w))))):
                return None
        return "`inverse` maps some entries to NaN. Pass an array in its domain, or exclude it with `where`."

    def flat_leaf(self, w: Array) -> Array:
        x = self.inverse(widened(w))
        y, pull = jax.vjp(self.forward, x)
        (slope,) = pull(jnp.ones_like(y))
        return (slope == 0) | jnp.isinf(x)

    def _forward(self, x: Array) -> Array:
        return self.forward(x)

    def _inverse(self, w: Array) -> Array:
        return self.inverse(w)


_FACTOR = number_that(lambda factor: 0 < abs(factor) < math.inf, "takes a finite number other than 0.")


class Scale(Reparametrization):
    r"""Multiplies weights by a constant factor, such as a multiplier of muP: :math:`w = c \, x`.

    In place of ``w``, the raw tree stores ``x`` (main), of the same shape and dtype. ``init`` gives ``x = w / c``, and
    is exact up to rounding. For half-precision arrays, the computation runs in float32.

    Args:
      factor: The factor :math:`c`, a number other than 0 or a traced scalar.
      where: Which arrays to act on. Default: every floating or complex parameter.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Raises:
      TypeError: If ``factor`` has the wrong type.
      ValueError: If ``factor`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.numbers.Scale(0.5).init({"w": jnp.ones(2)})
      {'w': {'@scale': {'x': Array([2., 2.], dtype=float32)}}}

    References:
      Yang, Hu, Babuschkin, Sidor, Liu, Farhi, Ryder, Pachocki, Chen and Gao, *Tensor Programs V*, 2022.
    """

    factor: Number = field(by_array(_FACTOR))

    raw_values: ClassVar[Values] = {"x": main(aligned=True)}
    elementwise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x = widened(w)
        return {"x": (x / scalar(self.factor, x)).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = widened(values["x"])
        return (scalar(self.factor, x) * x).astype(values["x"].dtype)

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        parts = 2 if jnp.iscomplexobj(x) else 1
        return parts * x.size * jnp.log(jnp.abs(scalar(self.factor, x.real)))


class Simplex(Constraint):
    r"""Constrains numbers along an axis to probabilities: :math:`w = e^x / \sum e^x` (softmax).

    In place of ``w``, the raw tree stores ``x`` (main), of the same shape and dtype. ``init`` gives :math:`x = \log w`,
    and is exact if ``w`` is positive and sums to 1. Any other vector starts at the nearest point of the simplex. Zeros
    in the nearest point raise an error, because the map is flat there and they would never train. With
    ``outside="unchecked"``, zeros start next to zero. Samples are uniform on the simplex. For half-precision arrays,
    the computation runs in float32.

    The weights do not depend on :math:`r = \log \sum e^x`, so data cannot constrain r when raw values are sampled.
    ``log_det`` therefore gives r a standard normal distribution. For each distribution in the array, ``log_det`` adds

    - the log-determinant of the bijection from ``x`` to the point of the simplex and r,
    - the log-density of r under the standard normal distribution.

    As a result, ``log_prior(p.fold(raw)) + p.log_det(raw)`` is a log-density of raw values under which the points of
    the simplex have the given prior.

    Args:
      along: The axis along which the numbers sum to 1, such as ``-1`` for mixture weights and for the rows of a
        transition matrix. Default: the only axis of a one-dimensional array; in a network, the input axes of a kernel
        or the feature axis of an embedding table, if these are known from the class of a layer or from ``rpx.roles``.
        The name of an array is not enough, because a matrix named ``w`` may hold distributions instead of a kernel.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of one or more dimensions.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``along`` does not count these axes.

    Raises:
      TypeError: If ``along`` has the wrong type.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.numbers.Simplex()
      >>> p.init({"w": jnp.array([0.75, 0.25])})["w"]["@simplex"]["x"].round(2)
      Array([-0.29, -1.39], dtype=float32)
      >>> p.project(jnp.array([1.0, 1.0, -2.0]))
      Array([0.5, 0.5, 0. ], dtype=float32)

    References:
      Duchi, Shalev-Shwartz, Singer and Chandra, *Efficient Projections onto the l1-Ball for Learning in High
      Dimensions*, 2008.
    """

    along: Axis = field(check_one_along, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(aligned=True, decays=False)}
    overcomplete: ClassVar[bool] = True
    min_ndim: ClassVar[int] = 1
    by_roles: ClassVar[Any] = {"along": VECTORS}
    outside_networks: ClassVar[str] = "distributions along its last axis"
    dtypes: ClassVar[Any] = jnp.floating

    def init_leaf(self, w: Array) -> dict[str, Array]:
        nearest = self._project_along(w)
        return {"x": jnp.log(jnp.maximum(nearest, float(jnp.finfo(nearest.dtype).tiny))).astype(w.dtype)}

    def flat_leaf(self, w: Array) -> Array:
        return self._project_along(w) <= 0

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        return jax.nn.softmax(widened(x), axis=position(self.along, x)).astype(x.dtype)

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        x, axis = values["x"], position(self.along, values["x"])
        log_sum = jax.nn.logsumexp(x, axis=axis)
        return jnp.sum(jax.nn.log_softmax(x, axis=axis)) + jnp.sum(jax.scipy.stats.norm.logpdf(log_sum))

    def sample_leaf(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        # Exponential random numbers divided by their sum are uniform on the simplex. The logarithm of an exponential
        # random number is a negated Gumbel number.
        return self.apply_leaf({"x": -jax.random.gumbel(key, shape, dtype)})

    def _project_along(self, w: Array) -> Array:
        """Projects each vector along the axis ``along`` to the nearest point of the simplex."""
        axis = position(self.along, w)
        nearest = _project_last_axis(jnp.moveaxis(widened(w), axis, -1), 4 * float(jnp.finfo(w.dtype).eps))
        return jnp.moveaxis(nearest, -1, axis)


@functools.partial(inlined, static_argnums=1)
def _project_last_axis(w: Array, rounding: float) -> Array:
    """Projects each vector along the last axis to the nearest point of the simplex.

    The projection subtracts one shift from all numbers of a vector and replaces negative results by zero. The shift is
    chosen such that the results sum to 1.
    """
    if w.size == 0:
        return w
    descending = -jnp.sort(-w, axis=-1)
    counts = jnp.arange(1, w.shape[-1] + 1, dtype=w.dtype).reshape((1,) * (w.ndim - 1) + (-1,))
    shifts = (jnp.cumsum(descending, axis=-1) - 1) / counts
    support = jnp.sum(descending > shifts, axis=-1, keepdims=True)
    shift = jnp.take_along_axis(shifts, support - 1, axis=-1)
    # Skip a shift of up to `rounding`, because a tiny shift would change small probabilities a lot. Softmax makes
    # the sum 1 anyway.
    return jnp.maximum(w - jnp.where(jnp.abs(shift) <= rounding, jnp.zeros_like(shift), shift), 0)
