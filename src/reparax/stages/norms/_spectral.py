"""The stage ``SpectralNorm``, for matrices and for convolutions.

Power iteration alternates between a linear map and its adjoint. The map multiplies a vector by a matrix, or applies a
``Convolution`` to an image. ``_times_matrix`` and ``_times_adjoint`` handle both cases.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from reparax.core.axes import list_axes
from reparax.core.constraint import Constraint
from reparax.core.fields import field
from reparax.core.matrices import MatrixAxes, merge_axes
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_positive_integer, is_integer, optional
from reparax.numerics.arithmetic import widened
from reparax.numerics.linalg import inverse, unit

Padding = str | int | tuple[tuple[int, int], ...]
Sizes = int | tuple[int, ...]

_PADDINGS = ("SAME", "VALID", "CIRCULAR")


def check_input_shape(value: Any, who: str, name: str) -> tuple[int, ...]:
    """Returns the shape of an image as a tuple. Raises an error if a size is not a positive integer."""
    sizes = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not sizes or not all(is_integer(size) and size > 0 for size in sizes):
        raise TypeError(f"{who} takes {name} as a tuple of positive sizes, such as (32, 32), but got {value!r}.")
    return tuple(map(int, sizes))


def check_sizes(value: Any, who: str, name: str) -> Sizes:
    """Checks that a value is a positive integer or a tuple of positive integers, one per image axis, and returns it."""
    if is_integer(value) and value > 0:
        return int(value)
    if isinstance(value, tuple | list) and value and all(is_integer(size) and size > 0 for size in value):
        return tuple(map(int, value))
    raise TypeError(f"{who} takes {name} as a positive integer or a tuple of them, but got {value!r}.")


def check_padding(value: Any, who: str, name: str) -> Padding:
    """Checks that a value describes the padding of a convolution, and returns it.

    A padding is ``"SAME"``, ``"VALID"``, ``"CIRCULAR"``, a number of zeros for every side, or a pair ``(low, high)``
    for each axis.
    """
    if type(value) is str and value in _PADDINGS:
        return value
    if is_integer(value) and int(value) >= 0:
        return int(value)
    if isinstance(value, tuple | list) and value and all(map(_is_pair, value)):
        return tuple((int(low), int(high)) for low, high in value)
    raise TypeError(
        f"{who} takes {name}='SAME', 'VALID' or 'CIRCULAR', a number of zeros, or a pair (low, high) for each axis, "
        f"but got {value!r}."
    )


def _is_pair(value: Any) -> bool:
    """Returns whether a value is a pair of non-negative integers."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(is_integer(n) and n >= 0 for n in value)


@dataclass(frozen=True)
class Convolution:
    """The settings of a convolution with a kernel ``(..., in, out)`` on images of shape ``input_shape``."""

    input_shape: tuple[int, ...]
    strides: Sizes
    padding: Padding
    kernel_dilation: Sizes
    feature_group_count: int

    def why_refused(self, kernel: Any) -> str | None:
        """Returns an error text if the kernel does not fit the settings of the convolution, and None otherwise."""
        ndim = len(self.input_shape)
        if kernel.ndim != ndim + 2:
            return (
                f"expected a kernel of {ndim + 2} dimensions for input_shape={self.input_shape}, but got shape "
                f"{kernel.shape}. Exclude it with `where`."
            )
        for name in ("strides", "kernel_dilation", "padding"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != ndim:
                return (
                    f"`{name}` must have {ndim} entries, one for each axis of input_shape={self.input_shape}, but got "
                    f"{value}. Pass a tuple of length {ndim}."
                )
        if not kernel.size:
            return f"expected a nonempty kernel, but got shape {kernel.shape}. Exclude it with `where`."
        if kernel.shape[-1] % self.feature_group_count:
            return (
                f"feature_group_count={self.feature_group_count} must divide the number of output channels, but got "
                f"shape {kernel.shape}. Pass a divisor of {kernel.shape[-1]}."
            )
        image = jax.eval_shape(self, kernel, self.input_type(kernel))
        if not math.prod(image.shape):
            return (
                f"expected images at least as large as the kernel, but got input_shape={self.input_shape} for a kernel "
                f"of shape {kernel.shape}. Pass a larger `input_shape`."
            )
        return None

    def input_type(self, kernel: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape ``(*input_shape, in)`` and the dtype of the images that a kernel takes as input."""
        return jax.ShapeDtypeStruct((*self.input_shape, kernel.shape[-2] * self.feature_group_count), kernel.dtype)

    def __call__(self, kernel: Array, image: Array) -> Array:
        """Convolves an image of shape ``(*input_shape, in)`` with the kernel to an image of shape ``(..., out)``."""
        ndim = len(self.input_shape)
        strides, dilation = (self._per_axis(sizes) for sizes in (self.strides, self.kernel_dilation))
        padding: Any = self.padding
        if isinstance(padding, int):
            padding = [(padding, padding)] * ndim
        if padding == "CIRCULAR":
            sizes = [(size - 1) * step + 1 for size, step in zip(kernel.shape[:ndim], dilation, strict=True)]
            image = jnp.pad(image, [*(((size - 1) // 2, size // 2) for size in sizes), (0, 0)], mode="wrap")
            padding = "VALID"
        front = tuple(range(1, ndim + 1))
        return lax.conv_general_dilated(
            image[None],
            kernel,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=lax.ConvDimensionNumbers(
                lhs_spec=(0, ndim + 1, *front), rhs_spec=(ndim + 1, ndim, *range(ndim)), out_spec=(0, ndim + 1, *front)
            ),
            feature_group_count=self.feature_group_count,
            precision="highest",
        )[0]

    def _per_axis(self, sizes: Sizes) -> tuple[int, ...]:
        """Repeats a single integer for each axis of the image. A tuple is returned unchanged."""
        return (sizes,) * len(self.input_shape) if isinstance(sizes, int) else sizes

    def adjoint(self, kernel: Array, image: Array) -> Array:
        """Applies the adjoint of the convolution to an image of shape ``(..., out)``."""
        transpose = jax.linear_transpose(lambda image: self(kernel, image), self.input_type(kernel))
        return transpose(image.conj())[0].conj()


_DEFAULTS = {"strides": 1, "padding": "SAME", "kernel_dilation": 1, "feature_group_count": 1}

_STEPS_TO_PROJECT = 500
"""The number of power iterations in ``project`` for a convolution. The exact norm would need a huge matrix."""


class SpectralNorm(MatrixAxes, Constraint):
    r"""Divides a matrix by its largest singular value: :math:`w = W / \sigma(W)` with :math:`\sigma = u^H W v`.

    The raw tree stores ``w`` (main), the matrix W; ``u`` (fixed), a vector with one entry per column; and ``v``
    (fixed), a vector with one entry per row. Power iteration makes ``u`` and ``v`` estimates of the leading singular
    vectors, in float32 for half-precision weights. No gradient passes through them.

    ``init`` keeps ``w`` and runs 15 power iterations from a random start, as torch does. ``update`` runs ``n_steps``
    power iterations; call it once per training step. ``apply`` and ``fold`` never iterate, so all calls in a training
    step give the same weights. If :math:`\sigma(w) = 1`, ``apply(init(w))`` is ``w``; otherwise, ``w`` is divided by
    the estimate of :math:`\sigma`. A zero matrix stays zero.

    The estimate is at most :math:`\sigma`, so the norm of the effective matrix is at least 1. With one iteration per
    training step, the estimate lags behind the changing weights, and the norm exceeds 1. The norm reached 1.09 in our
    tests at usual learning rates, and more with large steps. If the bound matters, raise ``n_steps`` to 5 or 15, or use
    ``project``, which divides by the singular value from the SVD.

    A matrix has the same norm as its transpose. For an array of more than two dimensions, name the output axes:
    ``columns=(1, 2)`` for an attention kernel ``(in, heads, dim)``, ``columns=-1`` for the output projection
    ``(heads, dim, out)``. If the rows of an attention kernel were ``(in, heads)``, its linear map could have a norm as
    large as the square root of the number of heads.

    A convolution is a linear map of images, and its norm depends on strides and padding. That norm can exceed the norm
    of the kernel reshaped to a matrix by a factor of up to the square root of the kernel's area. ``columns=-1`` and
    other libraries use the norm of that matrix. With ``input_shape``, the shape of the input images, :math:`\sigma` is
    the norm of the convolution. Then ``v`` has the shape ``(*input_shape, in)``, ``u`` has the shape of the output
    image, and ``project`` runs 500 power iterations in place of the SVD. Use more steps for convolutions, such as
    ``n_steps=5``, because the largest singular values are close to each other.

    Args:
      n_steps: The number of power iterations in each ``update``, at least 1. Torch calls it ``n_power_iterations``.
      rows: The row axes; see :class:`LowRank`.
      columns: The column axes; see :class:`LowRank`. A single axis corresponds to ``dim`` in torch: 0, or 1 for
        transposed convolutions. With ``input_shape``, pass the output axis, which must be the first or the last axis;
        the input axis is its neighbor (1 or -2). A transposed convolution has the same norm as its adjoint, which is a
        convolution. For a transposed convolution of torch, pass ``columns=0``, and the shape of the output images as
        ``input_shape``.
      input_shape: The shape of a convolution's input images without channels, such as ``(32, 32)``. Default: None, for
        plain matrices.
      strides: The strides of the convolution: one integer, or a tuple with an integer for each axis of the image.
      padding: ``"SAME"`` or ``"VALID"`` as in flax, ``"CIRCULAR"``, a number of zeros on each side, or a pair
        ``(low, high)`` for each axis.
      kernel_dilation: The dilation of the kernel: one integer, or a tuple with an integer for each axis of the image.
      feature_group_count: The number of channel groups.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases,
        scales and, unless axes are given, embedding tables; with ``input_shape``, only arrays with two more dimensions
        than ``input_shape``.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Raises:
      TypeError: If ``n_steps``, ``input_shape``, ``strides``, ``padding``, ``kernel_dilation`` or
        ``feature_group_count`` has the wrong type.
      ValueError: If ``n_steps``, ``strides``, ``padding``, ``kernel_dilation`` or ``feature_group_count`` is out of
        range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.SpectralNorm()
      >>> raw = p.init({"w": jnp.diag(jnp.array([4.0, 2.0]))})
      >>> p.apply(raw)["w"].round(3)
      Array([[1. , 0. ],
             [0. , 0.5]], dtype=float32)
      >>> raw = p.update(raw)
      >>> q = rpx.SpectralNorm(columns=-1, input_shape=(8, 8), padding="CIRCULAR")
      >>> q.fold(q.init({"w": jnp.full((3, 3, 1, 1), 9.0)}))["w"].sum().round(3)  # this kernel sums nine pixels
      Array(1., dtype=float32)

    References:
      Miyato, Kataoka, Koyama and Yoshida, *Spectral Normalization for Generative Adversarial Networks*, 2018; for
      convolutions Gouk, Frank, Pfahringer and Cree, *Regularisation of Neural Networks by Enforcing Lipschitz
      Continuity*, 2021.
    """

    n_steps: int = field(check_positive_integer, default=1)
    input_shape: tuple[int, ...] | None = field(optional(check_input_shape), default=None, kw_only=True)
    strides: Sizes = field(check_sizes, default=1, kw_only=True)
    padding: Padding = field(check_padding, default="SAME", kw_only=True)
    kernel_dilation: Sizes = field(check_sizes, default=1, kw_only=True)
    feature_group_count: int = field(check_positive_integer, default=1, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "u": fixed(), "v": fixed()}
    transposes: ClassVar[bool] = True
    needs_update: ClassVar[bool] = True
    random_init: ClassVar[Any] = False  # The key is optional, because any start converges to the same vectors.
    acts_on_embeddings: ClassVar[Any] = property(lambda self: not (self.rows is None and self.columns is None))

    def __post_init__(self) -> None:
        super().__post_init__()
        names_given = [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]
        if self.input_shape is None and names_given:
            raise ValueError(
                f"SpectralNorm got {names_given[0]}={getattr(self, names_given[0])!r} without `input_shape`. Pass the "
                "shape of the convolution's input images, such as input_shape=(32, 32)."
            )
        if self.input_shape is not None and self.rows is not None:
            raise ValueError(
                f"SpectralNorm got rows={self.rows!r} with `input_shape`, but a convolution's input axis is always the "
                "neighbor of its output axis. Leave `rows` out, and pass the output axis, such as columns=-1."
            )

    def axes_in_use(self, w: Array) -> dict[str, tuple[tuple[int, ...], str]]:
        return super().axes_in_use(w) if self.input_shape is None else {}

    def default(self, w: Array) -> bool:
        return super().default(w) and (self.input_shape is None or w.ndim == len(self.input_shape) + 2)

    def _matrix_error(self, w: Array) -> str | None:
        return super()._matrix_error(w) if self.input_shape is None else None

    def refuse_leaf(self, w: Array) -> str | None:
        if self._convolution is None:
            return None
        if not self._outputs(w):
            return (
                f"`columns` must be the first or the last axis of a convolution's kernel, but got "
                f"columns={self.columns} for shape {w.shape}. Pass columns=0 or columns=-1."
            )
        return self._convolution.why_refused(jax.eval_shape(self._matrix, w))

    def init_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        matrix = self._matrix(w)
        shape = matrix.shape[:1] if self._convolution is None else self._convolution.input_type(matrix).shape
        u, v = _iterate(matrix, _as_unit(jax.random.normal(key, shape, matrix.dtype)), 15, self._convolution)
        return {"w": w, "u": u, "v": v}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, u, v = values["w"], values["u"], values["v"]
        x = widened(w)
        sigma = jnp.vdot(_times_adjoint(self._matrix(x), u, self._convolution), v, precision="highest").real
        return (x * inverse(sigma).astype(x.dtype)).astype(w.dtype)

    def project_leaf(self, w: Array) -> Array:
        x = widened(jnp.asarray(w))
        sigma = self._largest_singular_value(self._matrix(x))
        divisor = jnp.where(sigma == 0, jnp.ones_like(sigma), sigma).astype(x.dtype)
        return (x / divisor).astype(w.dtype)

    def _largest_singular_value(self, matrix: Array) -> Array:
        """Computes the largest singular value: from the SVD for a matrix, by power iteration for a convolution."""
        if self._convolution is None:
            return jnp.linalg.norm(matrix, 2)
        start = jax.random.normal(jax.random.key(0), self._convolution.input_type(matrix).shape, matrix.dtype)
        u, v = _iterate(matrix, _as_unit(start), _STEPS_TO_PROJECT, self._convolution)
        return jnp.vdot(u, _times_matrix(matrix, v, self._convolution), precision="highest").real

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        u, v = _iterate(self._matrix(values["w"]), values["v"], self.n_steps, self._convolution)
        return {"u": u, "v": v}

    @property
    def _convolution(self) -> Convolution | None:
        """The convolution with the settings of this stage, or None if the stage acts on plain matrices."""
        if self.input_shape is None:
            return None
        return Convolution(self.input_shape, self.strides, self.padding, self.kernel_dilation, self.feature_group_count)

    def _matrix(self, w: Array) -> Array:
        """Reshapes ``w`` to a matrix or, for a convolution, moves its axes to the order ``(..., in, out)``."""
        if why := self._axes_error(w):
            raise ValueError(why)
        if self.input_shape is not None:
            axis = self._outputs(w)[0]
            return jnp.moveaxis(widened(w), (axis - 1 if axis else 1, axis), (-2, -1))
        rows, columns = (tuple(sorted(axes)) for axes in self.axes_of(w.ndim))
        return merge_axes(widened(w), rows, columns)

    def _outputs(self, w: Array) -> list[int]:
        """Returns a list with the output axis of a kernel, empty if that axis is neither the first nor the last."""
        axes = [axis % w.ndim for axis in list_axes(-1 if self.columns is None else self.columns)]
        return axes if len(axes) == 1 and axes[0] in (0, w.ndim - 1) else []


def _times_matrix(matrix: Array, v: Array, convolution: Convolution | None) -> Array:
    """Multiplies the vector ``v`` by the matrix, or convolves the image ``v`` with the kernel ``matrix``."""
    return jnp.matmul(v, matrix, precision="highest") if convolution is None else convolution(matrix, v)


def _times_adjoint(matrix: Array, u: Array, convolution: Convolution | None) -> Array:
    """Applies the adjoint of the linear map in ``_times_matrix`` to ``u``."""
    if convolution is None:
        return jnp.matmul(matrix.conj(), u, precision="highest")
    return convolution.adjoint(matrix, u)


def _as_unit(x: Array) -> Array:
    """Divides ``x`` by its Euclidean norm over all axes."""
    return unit(x, tuple(range(x.ndim)))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _iterate(matrix: Array, v: Array, n_steps: int, convolution: Convolution | None) -> tuple[Array, Array]:
    """Runs ``n_steps`` power iterations from ``v``, and returns the estimated singular vectors ``u`` and ``v``.

    The function is jitted, so that eager calls compile the loop only once.
    """

    def step(v: Array) -> tuple[Array, Array]:
        u = _as_unit(_times_matrix(matrix, v, convolution))
        image = _as_unit(_times_adjoint(matrix, u, convolution))
        return u, jnp.where(jnp.all(image == 0), v, image)  # Keep `v` nonzero, so that a zero matrix can train.

    return jax.lax.fori_loop(1, n_steps, lambda _, uv: step(uv[1]), step(v))
