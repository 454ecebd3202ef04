"""Linear algebra on one matrix or a batch of matrices, lengths of vectors, and the errors for wrong shapes.

The lengths do not overflow, and their gradients are finite at zero. Why this is needed: weight norm in one line is
``w = g * v / jnp.sqrt(jnp.sum(v * v))``. In float32, squares of numbers above 2e19 are infinite and squares of numbers
below 1e-23 are zero. The gradient of a square root at zero is NaN, even if ``jnp.where`` chooses another branch
afterwards. So numbers are scaled to about 1 before they are squared, and a length of zero is replaced before its square
root is taken.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from reparax.numerics.arithmetic import inlined


def product(*factors: Array) -> Array:
    """The matrix product, in the full precision of the dtype on every device."""
    return functools.reduce(lambda a, b: jnp.matmul(a, b, precision="highest"), factors)


def adjoint(w: Array) -> Array:
    """The conjugate transpose."""
    return w.mT.conj()


def identity(like: Array) -> Array:
    """Identity matrices of the shape and dtype of ``like``."""
    return jnp.broadcast_to(jnp.eye(*like.shape[-2:], dtype=like.dtype), like.shape)


def polar(w: Array) -> Array:
    """The nearest matrix with orthonormal columns or rows."""
    u, _, v = jnp.linalg.svd(w, full_matrices=False)
    return product(u, v)


def without_reflection(left: Array, right: Array) -> Array:
    """``left``, with its last column negated if the product with ``right`` has determinant -1."""
    return left.at[..., -1].multiply(jnp.sign(jnp.linalg.det(product(left, right)))[..., None])


def resolution(w: Array, largest: Array) -> Array:
    """The threshold below which singular values of ``w`` may be rounding errors; ``largest`` is its largest one.

    It is the threshold of numpy's ``matrix_rank``; for a zero matrix, that of a matrix with norm 1.
    """
    unit = max(w.shape[-2:]) * float(jnp.finfo(w.dtype).eps)
    return unit * jnp.where(largest == 0, jnp.ones_like(largest), largest)


def as_blocks(w: Array, rows: int, columns: int) -> Array:
    """``w`` as ``rows`` times ``columns`` blocks, of shape ``(..., rows, height, columns, width)``."""
    return w.reshape(*w.shape[:-2], rows, w.shape[-2] // rows, columns, w.shape[-1] // columns)


def not_square_error(w: Array) -> str | None:
    """The error for a matrix that is not square, or None."""
    if w.shape[-1] == w.shape[-2] > 0:
        return None
    return f"expected square matrices, got shape {w.shape}. Leave it out with `where`."


def rank_error(rank: int, w: Array) -> str | None:
    """The error for a ``rank`` that the matrix ``w`` cannot have, or None."""
    if 1 <= rank <= min(w.shape):
        return None
    return (
        f"expected 1 <= rank <= min{tuple(w.shape)} = {min(w.shape)}, got rank {rank}. "
        f"Narrow the stage with `where`, or change `rank`."
    )


def not_divisible_error(blocks: tuple[int, int], w: Array) -> str | None:
    """The error for a matrix ``w`` that cannot be divided into ``blocks`` rows and columns of equal blocks, or None."""
    if all(size and size % number == 0 for size, number in zip(w.shape, blocks, strict=True)):
        return None
    return (
        f"expected matrices of {blocks[0]} times {blocks[1]} equal blocks, got shape {w.shape}. "
        f"Leave it out with `where`."
    )


Indices = tuple[int, ...]


@functools.partial(inlined, static_argnums=1)
def max_abs(x: Array, axes: Indices) -> Array:
    """The largest magnitude along ``axes``, or 1 if it is zero. Numbers divided by it do not overflow when squared."""
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
    return jax.lax.stop_gradient(jnp.where(largest == 0, 1, largest))


@functools.partial(inlined, static_argnums=1)
def is_zero(x: Array, axes: Indices) -> Array:
    """Whether all numbers along ``axes`` are zero."""
    return jnp.all(x == 0, axis=axes, keepdims=True)


def _nonzero_length(u: Array, axes: Indices) -> Array:
    """The Euclidean length along ``axes``, or 1 if it is zero. Its gradients are finite everywhere."""
    total = _sum_of_squares(u, axes)
    return jnp.sqrt(jnp.where(total == 0, 1, total))


def _sum_of_squares(u: Array, axes: Indices) -> Array:
    """The sum of the squared magnitudes along ``axes``, which are kept with size 1."""
    squares = jnp.square(u.real) + jnp.square(u.imag) if jnp.iscomplexobj(u) else jnp.square(u)
    return jnp.sum(squares, axis=axes, keepdims=True)


@functools.partial(inlined, static_argnums=1)
def unit(x: Array, axes: Indices) -> Array:
    """``x`` divided by its length along ``axes``; zero stays zero."""
    u = x / max_abs(x, axes).astype(x.dtype)
    return u / _nonzero_length(u, axes).astype(x.dtype)


@inlined
def scale_near_one(x: Array, length: Array) -> Array:
    """``x``, multiplied by a power of two if its ``length`` is too far from 1 for ``with_length`` to square it."""
    far = 2.0 ** (3 * jnp.finfo(length.dtype).maxexp // 4)
    ones = jnp.ones_like(length)
    power = jnp.where(length > far, ones / far, jnp.where(length < 1 / far, ones * far, ones))
    return x * power.astype(x.dtype)


def with_length(x: Array, length: Array, axes: Indices) -> Array:
    """``x`` with the given length along ``axes``; zero stays zero.

    The formula sums two arrays along ``axes``, in one pass, and another one for the gradients. If ``axes`` are sharded,
    devices exchange only these sums. The sum for the gradients reads ``x`` itself, so no normalized copy of ``x`` is
    stored.
    """
    return x * _stretch(x, length, axes).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _stretch(x: Array, length: Array, axes: Indices) -> Array:
    """The factor that gives ``x`` the given length."""
    return length / _length(x, axes)


@_stretch.defjvp
def _stretch_jvp(axes: Indices, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """The factor ``l / n``, and its derivative ``(dl - l dn / n) / n``, in which no length is squared."""
    (x, length), (dx, dlength) = primals, tangents
    n = _length(x, axes)
    return length / n, (dlength - length * (_part_along(x, n, dx, axes) / n)) / n


def with_length_detached(x: Array, length: Array, axes: Indices) -> Array:
    """Like :func:`with_length`, but gradients treat the length of ``x`` as a constant. Zeros have a gradient too."""
    own = _length_or_zero(jax.lax.stop_gradient(x), axes)
    return x * jnp.where(own == 0, jnp.ones_like(own), length / jnp.where(own == 0, 1, own)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _length(x: Array, axes: Indices) -> Array:
    """The Euclidean length along ``axes``, or 1 if it is zero."""
    length = _length_or_zero(x, axes)
    return jnp.where(length == 0, 1, length)


def _length_or_zero(x: Array, axes: Indices) -> Array:
    """The Euclidean length along ``axes``.

    It sums the squares of ``x`` scaled up and of ``x`` scaled down, and uses the second sum if the first overflows.
    This saves a pass to find the largest magnitude. In float32 it is accurate for lengths from 4e-34 to 5e33.
    """
    upscale = 2.0 ** (3 * jnp.finfo(x.dtype).maxexp // 8)
    sum_of_scaled_squares = _sum_of_squares(x * upscale, axes)
    return jnp.where(
        jnp.isfinite(sum_of_scaled_squares),
        jnp.sqrt(sum_of_scaled_squares) / upscale,
        jnp.sqrt(_sum_of_squares(x / upscale, axes)) * upscale,
    )


@_length.defjvp
def _length_jvp(axes: Indices, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The length, and its derivative: the component of ``dx`` in the direction of ``x``."""
    length = _length(*primals, axes)
    return length, _part_along(*primals, length, *tangents, axes)


def _part_along(x: Array, length: Array, dx: Array, axes: Indices) -> Array:
    """The component of ``dx`` in the direction of ``x``, whose length is given."""
    return jnp.sum(((x / length.astype(x.dtype)).conj() * dx).real, axis=axes, keepdims=True)


@jax.custom_jvp
def inverse(length: Array) -> Array:
    """1 over a length, or 1 if it is zero. The derivative does not square the length, as that may overflow."""
    return 1 / jnp.where(length == 0, 1, length)


@inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """``1 / l``, and its derivative ``-(1 / l) ((1 / l) dl)``, which is zero where the length is zero."""
    (length,), (dlength,) = primals, tangents
    result = inverse(length)
    slope = jnp.where(length == 0, 0, result)
    return result, -slope * (slope * dlength)


@functools.partial(inlined, static_argnums=1)
def norm(x: Array, axes: Indices) -> Array:
    """The Euclidean length along ``axes``, real; its gradient at zero is defined as zero.

    It is accurate for any finite length, at the price of a pass for the largest magnitude.
    """
    size = max_abs(x, axes)
    length = size * _nonzero_length(x / size.astype(x.dtype), axes)
    return jnp.where(is_zero(x, axes), 0, length)
