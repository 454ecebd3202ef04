"""Length and direction of weights, and the largest singular value."""

import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.numbers import Axes, Axis, check_axis, check_optional_axes, others, position
from reparax._core.value import argument
from reparax._numerics.arguments import check_flag, check_whole
from reparax._numerics.arithmetic import widened
from reparax._numerics.lengths import centred, is_zero, norm, scale, stretched, stretched_detached, unit
from reparax._stage.constraint import Constraint
from reparax._stage.leaf import Reparametrization


class WeightNorm(Reparametrization):
    r"""Length and direction apart: :math:`w = g \, v / \lVert v \rVert`.

    Raw values: ``v`` (main), like ``w``; ``g`` (auxiliary), real, 1 along the normed axes, in float32 for
    half-precision weights and in the precision of ``w`` else. ``init`` gives ``v = w`` and
    :math:`g = \lVert w \rVert`; it is exact for every ``w`` whose length is a finite number. Where float32 could not
    square ``w``, at lengths below 1e-28 or above 1e28, ``v`` is ``w`` times a power of two. A slice of zeros gets
    ``g = 0`` and ``v = 1``: it is reproduced exactly, and still trains.

    The same ``axis`` by the names of other libraries:

    ======================================  =============
    flax ``feature_axes=-1`` (its default)  ``axis=-1``
    flax ``feature_axes=None``              ``axis=None``
    torch ``dim=0`` (its default)           ``axis=0``
    torch ``dim=1``                         ``axis=1``
    torch ``dim=None``, and ``dim=-1`` too  ``axis=None``
    ======================================  =============

    Where parameters carry names of their axes, as flax's do that are made with ``nn.with_partitioning`` or
    ``nnx.with_partitioning``, every stage takes names for axes: ``axis="mlp"`` is the last axis of a kernel of
    ``("embed", "mlp")`` and the first of one of ``("mlp", "embed")``. A parameter without that name is an error.

    Args:
      axis: The feature axes, each index of which keeps a length of its own: ``-1`` for a dense kernel of shape
        ``(in, out)`` and for a convolution's ``(height, width, in, out)``. A tuple for several, None for one length
        of the whole array. By number or by name.
      detach: Whether :math:`\lVert v \rVert` counts as a constant in gradients, as in DoRA, which is
        ``LoRA(8) >> WeightNorm(detach=True)``: the effective weight is the same, and its gradient is cheaper.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, but biases and
        scales.
      stacked: As for :class:`Reparametrization`; ``axis`` counts the other axes.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm()
      >>> raw = p.init({"w": jnp.array([[3.0, 0.0], [4.0, 0.0]])})
      >>> raw["w"]["@weight_norm"]["g"]
      Array([[5., 0.]], dtype=float32)
      >>> p.apply(raw)["w"]
      Array([[3., 0.],
             [4., 0.]], dtype=float32)

    References:
      Salimans and Kingma, *Weight Normalization*, 2016; Liu, Wang, Yin, Molchanov, Wang, Cheng and Chen, *DoRA:
      Weight-Decomposed Low-Rank Adaptation*, 2024.
    """

    axis: Axes | None = argument(check_optional_axes, default=-1)
    detach: bool = argument(check_flag, default=False, kw_only=True)

    main: ClassVar[tuple[str, ...] | None] = ("v",)
    min_ndim: ClassVar[int] = 2
    axis_fields: ClassVar[tuple[str, ...]] = ("axis",)
    aligned: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "straight_through", self.detach)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axes = others(self.axis, w)
        length = norm(widened(w), axes)
        return {"g": length, "v": jnp.where(is_zero(w, axes), jnp.ones_like(w), centred(w, length))}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        g, v = values["g"], values["v"]
        axes = others(self.axis, v)
        x, length = widened(v), g.astype(widened(v).real.dtype)
        return (stretched_detached if self.detach else stretched)(x, length, axes).astype(v.dtype)


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

    Args:
      n_steps: Power iterations in each ``update``, at least 1; torch's ``n_power_iterations``.
      axis: The feature axis: ``-1`` for flax's kernels; torch's ``dim``, which is 0 and for transposed convolutions 1.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, but biases and
        scales.
      stacked: As for :class:`Reparametrization`; ``axis`` counts the other axes.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.SpectralNorm()
      >>> raw = p.init({"w": jnp.diag(jnp.array([4.0, 2.0]))})
      >>> p.apply(raw)["w"].round(3)
      Array([[1. , 0. ],
             [0. , 0.5]], dtype=float32)
      >>> raw = p.update(raw)

    References:
      Miyato, Kataoka, Koyama and Yoshida, *Spectral Normalization for Generative Adversarial Networks*, 2018.
    """

    n_steps: int = argument(check_whole, default=1)
    axis: Axis = argument(check_axis, default=-1)

    main: ClassVar[tuple[str, ...] | None] = ("w",)
    fixed: ClassVar[tuple[str, ...]] = ("u", "v")
    min_ndim: ClassVar[int] = 2
    axis_fields: ClassVar[tuple[str, ...]] = ("axis",)
    aligned: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_steps < 1:
            raise ValueError(f"SpectralNorm got n_steps={self.n_steps}, but iterates at least once in each update.")

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        matrix = self._matrix(w)
        start = jax.random.normal(key, matrix.shape[:1], matrix.dtype)
        u, v = _iterated(matrix, unit(start, (0,)), 15)
        return {"w": w, "u": u, "v": v}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, u, v = values["w"], values["u"], values["v"]
        size = scale(widened(w), tuple(range(w.ndim)))
        x = widened(w) / size.astype(u.dtype)  # the gradient squares sigma, which must not overflow
        image = jnp.matmul(self._matrix(x).conj(), u, precision="highest")
        sigma = jnp.vdot(image, v, precision="highest").real
        return (x / jnp.where(sigma == 0, 1 / size.reshape(()), sigma).astype(x.dtype)).astype(w.dtype)

    def project(self, w: Array) -> Array:
        x = widened(jnp.asarray(w))
        sigma = jnp.linalg.norm(self._matrix(x), 2)
        return (x / jnp.where(sigma == 0, jnp.ones_like(sigma), sigma).astype(x.dtype)).astype(w.dtype)

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        u, v = _iterated(self._matrix(values["w"]), values["v"], self.n_steps)
        return {"u": u, "v": v}

    def _matrix(self, w: Array) -> Array:
        """``w`` as the transposed matrix, the rest against features, as kernels lie in memory."""
        axis = position(self.axis, w)
        rest = math.prod(w.shape[:axis] + w.shape[axis + 1 :])
        return jnp.moveaxis(widened(w), axis, -1).reshape(rest, w.shape[axis])


@functools.partial(jax.jit, static_argnums=2)
def _iterated(matrix: Array, v: Array, n_steps: int) -> tuple[Array, Array]:
    """Both singular vectors after ``n_steps`` iterations from ``v``; a program of its own, compiled once."""

    def step(v: Array) -> tuple[Array, Array]:
        u = unit(jnp.matmul(v, matrix, precision="highest"), (0,))
        image = unit(jnp.matmul(matrix.conj(), u, precision="highest"), (0,))
        return u, jnp.where(jnp.all(image == 0), v, image)  # a zero matrix must not end the iteration for good

    return jax.lax.fori_loop(1, n_steps, lambda _, uv: step(uv[1]), step(v))
