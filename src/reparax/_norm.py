"""Norms of weights, in arithmetic that neither overflows nor dies at zero."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes import Axes, checked, out_of_bounds, positive, whole
from reparax._leafwise import Reparametrization
from reparax._precision import widened


def _scale(x: Array, axes: tuple[int, ...]) -> Array:
    """The largest magnitude along ``axes``, 1 where all are zero: dividing by it makes squares safe."""
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
    return jax.lax.stop_gradient(jnp.where(largest == 0, jnp.ones_like(largest), largest))


def _length(u: Array, axes: tuple[int, ...]) -> Array:
    """The Euclidean length along ``axes``, 1 where it is zero, with finite gradients everywhere."""
    squares = jnp.square(u.real) + jnp.square(u.imag) if jnp.iscomplexobj(u) else jnp.square(u)
    total = jnp.sum(squares, axis=axes, keepdims=True)
    return jnp.sqrt(jnp.where(total == 0, jnp.ones_like(total), total))


def _unit(x: Array, axes: tuple[int, ...]) -> Array:
    """``x`` divided by its length along ``axes``; zero stays zero."""
    u = x / _scale(x, axes).astype(x.dtype)
    return u / _length(u, axes).astype(x.dtype)


class WeightNorm(Reparametrization):
    r"""Length and direction apart: :math:`w = g \, v / \lVert v \rVert`.

    Raw values: ``v`` (main), like ``w``; ``g`` (auxiliary), real, 1 along the normed axes, in float32 for
    half-precision weights and in the precision of ``w`` else. ``init`` gives ``v = w`` and
    :math:`g = \lVert w \rVert`; it is exact for every ``w`` whose length is a finite number, from 1e-25 to 1e30 in
    float32. A slice of zeros gets ``g = 0`` and ``v = 1``: it is reproduced exactly, and still trains.

    Args:
      axis: The feature axes, each index of which keeps a length of its own: ``-1`` for a dense kernel of shape
        ``(in, out)``, as flax's ``feature_axes``; torch's ``dim=0`` for its ``(out, in)`` is ``0`` here. A tuple for
        several, None for one length of the whole array.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions.

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
      Salimans and Kingma, *Weight Normalization*, 2016.
    """

    axis: Axes | None = -1

    main: ClassVar[tuple[str, ...] | None] = ("v",)
    min_ndim: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axis is not None:
            object.__setattr__(self, "axis", checked(self.axis, "WeightNorm", "axis"))

    def refuse_leaf(self, w: Array) -> str | None:
        return None if self.axis is None else out_of_bounds(self.axis, w, "axis")

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x, axes = widened(w), self._normed(w)
        scale = _scale(x, axes)
        zero = jnp.all(x == 0, axis=axes, keepdims=True)
        length = scale * _length(x / scale.astype(x.dtype), axes)
        return {"g": jnp.where(zero, jnp.zeros_like(length), length), "v": jnp.where(zero, jnp.ones_like(w), w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        g, v = values["g"], values["v"]
        axes = self._normed(v)
        expected = tuple(1 if axis in axes else size for axis, size in enumerate(v.shape))
        if g.shape != expected:
            raise ValueError(
                f"expected g of shape {expected} beside v of shape {v.shape}, got {g.shape}. "
                f"Apply the chain that made this raw tree; its `axis` was another."
            )
        x = widened(v)
        return (g.astype(x.dtype) * _unit(x, axes)).astype(v.dtype)

    def _normed(self, w: Array) -> tuple[int, ...]:
        features = () if self.axis is None else positive(self.axis, w)
        return tuple(axis for axis in range(w.ndim) if axis not in features)


class SpectralNorm(Reparametrization):
    r"""A matrix of largest singular value 1: :math:`w = W / \sigma(W)` with :math:`\sigma = u^H W v`.

    Raw values: ``w`` (main), the matrix itself; ``u`` of shape ``(features,)`` and ``v`` of shape ``(rest,)``
    (fixed), the singular vectors as far as power iteration has brought them, in float32 for half-precision weights.
    ``init`` keeps ``w`` and iterates 15 times from a random start, as torch does; ``update`` iterates ``n_steps``
    times on the current matrix, and is to be called once a training step; ``apply`` never iterates, and no gradient
    passes through ``u`` and ``v``. Arrays of more than two dimensions are matrices of ``axis`` against all others. A
    zero matrix stays zero. ``apply(init(w))`` is ``w`` where :math:`\sigma(w) = 1`, else ``w`` scaled to that.

    Args:
      n_steps: Power iterations in each ``update``, at least 1.
      axis: The feature axis.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions.

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

    n_steps: int = 1
    axis: int = -1

    main: ClassVar[tuple[str, ...] | None] = ("w",)
    fixed: ClassVar[tuple[str, ...]] = ("u", "v")
    min_ndim: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "axis", whole(self.axis, "SpectralNorm", "axis"))
        object.__setattr__(self, "n_steps", whole(self.n_steps, "SpectralNorm", "n_steps"))
        if self.n_steps < 1:
            raise ValueError(f"SpectralNorm got n_steps={self.n_steps}, but iterates at least once in each update.")

    def refuse_leaf(self, w: Array) -> str | None:
        return out_of_bounds(self.axis, w, "axis")

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        matrix = self._matrix(w)
        start = jax.random.normal(key, matrix.shape[1:], matrix.dtype)
        u, v = self._iterated(matrix, _unit(start, (0,)), 15)
        return {"w": w, "u": u, "v": v}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, u, v = values["w"], values["u"], values["v"]
        scale = _scale(widened(w), tuple(range(w.ndim)))
        x = widened(w) / scale.astype(u.dtype)  # the gradient squares sigma, which must not overflow
        sigma = jnp.vdot(u, jnp.matmul(self._matrix(x), v, precision="highest"), precision="highest").real
        return (x / jnp.where(sigma == 0, 1 / scale.reshape(()), sigma).astype(x.dtype)).astype(w.dtype)

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        u, v = self._iterated(self._matrix(values["w"]), values["v"], self.n_steps)
        return {"u": u, "v": v}

    def _matrix(self, w: Array) -> Array:
        """``w`` as a matrix of features against the rest."""
        rest = math.prod(w.shape[: self.axis % w.ndim] + w.shape[self.axis % w.ndim + 1 :])
        return jnp.moveaxis(widened(w), self.axis, 0).reshape(w.shape[self.axis], rest)

    def _iterated(self, matrix: Array, v: Array, n_steps: int) -> tuple[Array, Array]:
        def step(v: Array) -> tuple[Array, Array]:
            u = _unit(jnp.matmul(matrix, v, precision="highest"), (0,))
            image = _unit(jnp.matmul(matrix.conj().T, u, precision="highest"), (0,))
            return u, jnp.where(jnp.all(image == 0), v, image)  # a zero matrix must not end the iteration for good

        return jax.lax.fori_loop(1, n_steps, lambda _, uv: step(uv[1]), step(v))
