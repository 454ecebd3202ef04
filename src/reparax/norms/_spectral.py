"""The largest singular value, of matrices and of convolutions."""

import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.numbers import Axis, check_axis, position
from reparax._core.value import argument
from reparax._numerics.arguments import check_positive_whole, optional
from reparax._numerics.arithmetic import widened
from reparax._numerics.lengths import scale, unit
from reparax._stage.constraint import Constraint
from reparax.norms._convolution import Convolution, Padding, Sizes, check_padding, check_sizes, check_window

_OF_A_CONVOLUTION = {"strides": 1, "padding": "SAME", "dilation": 1, "groups": 1}


class SpectralNorm(Constraint):
    r"""A matrix of largest singular value 1: :math:`w = W / \sigma(W)` with :math:`\sigma = u^H W v`.

    Raw values: ``w`` (main), the matrix itself; ``u`` of shape ``(features,)`` and ``v`` of shape ``(rest,)``
    (fixed), the singular vectors as far as power iteration has brought them, in float32 for half-precision weights.
    ``init`` keeps ``w`` and iterates 15 times from a random start, as torch does; ``update`` iterates ``n_steps``
    times on the current matrix, and is to be called once a training step; ``apply`` never iterates, so all its calls
    in a step give one weight, and ``fold`` gives the same; no gradient passes through ``u`` and ``v``. Arrays of more
    than two dimensions are matrices of ``axis`` against all others. A zero matrix stays zero. ``apply(init(w))`` is
    ``w`` where :math:`\sigma(w) = 1`, else ``w`` scaled to that, as far as the iteration has come; ``project`` scales
    by the singular value decomposition.

    The matrix of a convolution's kernel is not the map that the convolution is, whose norm may be larger up to the
    square root of the kernel's area, and which depends on strides and padding. With ``window``, the shape of the
    images that it reads, :math:`\sigma` is the norm of that map: ``v`` has the shape ``(*window, in)`` and ``u`` that
    of the image it makes, and ``project`` iterates 500 times. Its singular values lie close, so the iteration needs
    more steps: ``n_steps=5``, say.

    Args:
      n_steps: Power iterations in each ``update``, at least 1; torch's ``n_power_iterations``.
      axis: The feature axis: ``-1`` for flax's kernels; torch's ``dim``, which is 0 and for transposed convolutions 1.
        With ``window`` the last axis or the first, and the axis beside it counts the inputs: -2, or 1. A transposed
        convolution has the norm of its adjoint: ``axis=0`` for torch's, with the images that it makes as ``window``.
      window: The shape of the images that a convolution reads, without channels, ``(32, 32)``. Default: matrices.
      strides: Of the convolution, a number or one for each axis of the image.
      padding: ``"SAME"`` and ``"VALID"`` as in flax, ``"CIRCULAR"``, a number of zeros on each side, or a pair
        ``(low, high)`` for each axis.
      dilation: Of the kernel, a number or one for each axis of the image.
      groups: Of channels, flax's ``feature_group_count``.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, but biases and
        scales; with ``window`` those of two dimensions more than the image.
      stacked: As for :class:`Reparametrization`; ``axis`` counts the other axes.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.SpectralNorm()
      >>> raw = p.init({"w": jnp.diag(jnp.array([4.0, 2.0]))})
      >>> p.apply(raw)["w"].round(3)
      Array([[1. , 0. ],
             [0. , 0.5]], dtype=float32)
      >>> raw = p.update(raw)
      >>> q = rpx.SpectralNorm(window=(8, 8), padding="CIRCULAR")
      >>> q.fold(q.init({"w": jnp.full((3, 3, 1, 1), 9.0)}))["w"].sum().round(3)  # it takes sums of nine pixels
      Array(1., dtype=float32)

    References:
      Miyato, Kataoka, Koyama and Yoshida, *Spectral Normalization for Generative Adversarial Networks*, 2018; for
      convolutions Gouk, Frank, Pfahringer and Cree, *Regularisation of Neural Networks by Enforcing Lipschitz
      Continuity*, 2021.
    """

    n_steps: int = argument(check_positive_whole, default=1)
    axis: Axis = argument(check_axis, default=-1)
    window: tuple[int, ...] | None = argument(optional(check_window), default=None, kw_only=True)
    strides: Sizes = argument(check_sizes, default=1, kw_only=True)
    padding: Padding = argument(check_padding, default="SAME", kw_only=True)
    dilation: Sizes = argument(check_sizes, default=1, kw_only=True)
    groups: int = argument(check_positive_whole, default=1, kw_only=True)

    main: ClassVar[tuple[str, ...] | None] = ("w",)
    fixed: ClassVar[tuple[str, ...]] = ("u", "v")
    min_ndim: ClassVar[int] = 2
    axis_fields: ClassVar[tuple[str, ...]] = ("axis",)
    aligned: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name, usual in _OF_A_CONVOLUTION.items() if getattr(self, name) != usual]
        if self.window is None and given:
            raise ValueError(
                f"SpectralNorm got {given[0]}={getattr(self, given[0])!r} without the window that a convolution reads. "
                f"Give `window`, such as (32, 32)."
            )

    def default(self, w: Array) -> bool:
        return super().default(w) and (self.window is None or w.ndim == len(self.window) + 2)

    def refuse_leaf(self, w: Array) -> str | None:
        if self._convolution is None:
            return None
        if 0 < position(self.axis, w) < w.ndim - 1:
            return f"expected the first or the last axis of a convolution's kernel, got axis={self.axis}. Give one."
        return self._convolution.refuse(jax.eval_shape(self._matrix, w))

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        matrix = self._matrix(w)
        start = matrix.shape[:1] if self._convolution is None else self._convolution.start(matrix).shape
        u, v = _iterated(matrix, _unit(jax.random.normal(key, start, matrix.dtype)), 15, self._convolution)
        return {"w": w, "u": u, "v": v}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, u, v = values["w"], values["u"], values["v"]
        size = scale(widened(w), tuple(range(w.ndim)))
        x = widened(w) / size.astype(u.dtype)  # the gradient squares sigma, which must not overflow
        sigma = jnp.vdot(_adjoint(self._matrix(x), u, self._convolution), v, precision="highest").real
        return (x / jnp.where(sigma == 0, 1 / size.reshape(()), sigma).astype(x.dtype)).astype(w.dtype)

    def project(self, w: Array) -> Array:
        x = widened(jnp.asarray(w))
        matrix = self._matrix(x)
        if self._convolution is None:
            sigma = jnp.linalg.norm(matrix, 2)
        else:
            start = jax.random.normal(jax.random.key(0), self._convolution.start(matrix).shape, matrix.dtype)
            u, v = _iterated(matrix, _unit(start), 500, self._convolution)
            sigma = jnp.vdot(u, _forward(matrix, v, self._convolution), precision="highest").real
        return (x / jnp.where(sigma == 0, jnp.ones_like(sigma), sigma).astype(x.dtype)).astype(w.dtype)

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        u, v = _iterated(self._matrix(values["w"]), values["v"], self.n_steps, self._convolution)
        return {"u": u, "v": v}

    @property
    def _convolution(self) -> Convolution | None:
        if self.window is None:
            return None
        return Convolution(self.window, self.strides, self.padding, self.dilation, self.groups)

    def _matrix(self, w: Array) -> Array:
        """``w`` as the transposed matrix, the rest against features, or as a kernel ``(..., in, out)``."""
        axis = position(self.axis, w)
        if self.window is not None:
            return jnp.moveaxis(widened(w), (axis - 1 if axis else 1, axis), (-2, -1))
        rest = math.prod(w.shape[:axis] + w.shape[axis + 1 :])
        return jnp.moveaxis(widened(w), axis, -1).reshape(rest, w.shape[axis])


def _forward(matrix: Array, v: Array, convolution: Convolution | None) -> Array:
    return jnp.matmul(v, matrix, precision="highest") if convolution is None else convolution(matrix, v)


def _adjoint(matrix: Array, u: Array, convolution: Convolution | None) -> Array:
    if convolution is None:
        return jnp.matmul(matrix.conj(), u, precision="highest")
    return convolution.adjoint(matrix, u)


def _unit(x: Array) -> Array:
    return unit(x, tuple(range(x.ndim)))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _iterated(matrix: Array, v: Array, n_steps: int, convolution: Convolution | None) -> tuple[Array, Array]:
    """Both singular vectors after ``n_steps`` iterations from ``v``; a program of its own, compiled once."""

    def step(v: Array) -> tuple[Array, Array]:
        u = _unit(_forward(matrix, v, convolution))
        image = _unit(_adjoint(matrix, u, convolution))
        return u, jnp.where(jnp.all(image == 0), v, image)  # a zero matrix must not end the iteration for good

    return jax.lax.fori_loop(1, n_steps, lambda _, uv: step(uv[1]), step(v))
