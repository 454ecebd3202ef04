"""Provides linear algebra on matrices or batches of them, lengths of vectors, and error texts for wrong shapes.

The computed lengths do not overflow, and their gradients at zero are finite. A naive formula for weight norm, such as
``w = g * v / jnp.sqrt(jnp.sum(v * v))``, has two problems. In float32, squares of numbers above 2e19 are infinite, and
squares of numbers below 1e-23 are zero. The gradient of a square root at zero is NaN, even if ``jnp.where`` then
selects another value. Therefore, numbers are scaled to about 1 before they are squared, and a sum of zero is replaced
before its square root is taken.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from reparax.numerics.arithmetic import inlined


def product(*factors: Array) -> Array:
    """Multiplies matrices from left to right, in the full precision of their dtype on any device."""
    return functools.reduce(lambda a, b: jnp.matmul(a, b, precision="highest"), factors)


def adjoint(w: Array) -> Array:
    """Returns the conjugate transpose of a matrix, or of each matrix in a batch."""
    return w.mT.conj()


def identity(like: Array) -> Array:
    """Returns an identity matrix, or a batch of them, with the shape and dtype of ``like``."""
    return jnp.broadcast_to(jnp.eye(*like.shape[-2:], dtype=like.dtype), like.shape)


def polar(w: Array) -> Array:
    """Computes the matrix with orthonormal columns or rows that is nearest to ``w``."""
    u, _, v = jnp.linalg.svd(w, full_matrices=False)
    return product(u, v)


def without_reflection(left: Array, right: Array) -> Array:
    """Returns ``left``, with its last column negated if ``left @ right`` has determinant -1."""
    return left.at[..., -1].multiply(jnp.sign(jnp.linalg.det(product(left, right)))[..., None])


def resolution(w: Array, largest: Array) -> Array:
    """Returns the threshold below which a singular value of ``w`` may be due to rounding errors.

    ``largest`` is the largest singular value of ``w``. The threshold equals that of ``numpy.linalg.matrix_rank``. For a
    zero matrix, the threshold is that of a matrix whose largest singular value is 1.
    """
    unit = max(w.shape[-2:]) * float(jnp.finfo(w.dtype).eps)
    return unit * jnp.where(largest == 0, jnp.ones_like(largest), largest)


def as_blocks(w: Array, rows: int, columns: int) -> Array:
    """Splits ``w`` into ``rows`` by ``columns`` blocks: reshapes it to ``(..., rows, height, columns, width)``."""
    return w.reshape(*w.shape[:-2], rows, w.shape[-2] // rows, columns, w.shape[-1] // columns)


def not_square_error(w: Array) -> str | None:
    """Returns the text of an error if ``w`` is not a square matrix, or None if it is."""
    if w.shape[-1] == w.shape[-2] > 0:
        return None
    return f"expected a square matrix, but got shape {w.shape}. Exclude this array with `where`."


def rank_error(rank: int, w: Array) -> str | None:
    """Returns the text of an error if the matrix ``w`` cannot have the given ``rank``, or None if it can."""
    if 1 <= rank <= min(w.shape):
        return None
    return (
        f"expected 1 <= rank <= min{tuple(w.shape)} = {min(w.shape)}, but got rank {rank}. "
        f"Choose a rank in this range, or exclude this array with `where`."
    )


def not_divisible_error(blocks: tuple[int, int], w: Array) -> str | None:
    """Returns the text of an error if ``w`` cannot be split into ``(rows, columns)`` equal blocks, or else None."""
    if all(size and size % number == 0 for size, number in zip(w.shape, blocks, strict=True)):
        return None
    return (
        f"expected a matrix that splits into {blocks[0]} by {blocks[1]} equal blocks, but got shape {w.shape}. "
        f"Exclude this array with `where`, or change the number of blocks."
    )


Indices = tuple[int, ...]


@functools.partial(inlined, static_argnums=1)
def max_abs(x: Array, axes: Indices) -> Array:
    """Computes the largest magnitude along ``axes``, or 1 if all entries are zero.

    After ``x`` is divided by the result, squares of its entries do not overflow. No gradient passes through the result.
    """
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
    return jax.lax.stop_gradient(jnp.where(largest == 0, 1, largest))


@functools.partial(inlined, static_argnums=1)
def is_zero(x: Array, axes: Indices) -> Array:
    """Returns whether all entries along ``axes`` are zero, and keeps these axes with size 1."""
    return jnp.all(x == 0, axis=axes, keepdims=True)


def _nonzero_length(u: Array, axes: Indices) -> Array:
    """Computes the Euclidean length along ``axes``, or 1 if the length is zero. The gradient is finite everywhere."""
    total = _sum_of_squares(u, axes)
    return jnp.sqrt(jnp.where(total == 0, 1, total))


def _sum_of_squares(u: Array, axes: Indices) -> Array:
    """Sums squared magnitudes along ``axes``, and keeps these axes with size 1."""
    squares = jnp.square(u.real) + jnp.square(u.imag) if jnp.iscomplexobj(u) else jnp.square(u)
    return jnp.sum(squares, axis=axes, keepdims=True)


@functools.partial(inlined, static_argnums=1)
def unit(x: Array, axes: Indices) -> Array:
    """Divides ``x`` by its length along ``axes``; a zero vector stays zero."""
    u = x / max_abs(x, axes).astype(x.dtype)
    return u / _nonzero_length(u, axes).astype(x.dtype)


@inlined
def scale_near_one(x: Array, length: Array) -> Array:
    """Multiplies ``x`` by a power of two if its ``length`` is too far from 1 for ``with_length`` to square entries."""
    far = 2.0 ** (3 * jnp.finfo(length.dtype).maxexp // 4)
    ones = jnp.ones_like(length)
    power = jnp.where(length > far, ones / far, jnp.where(length < 1 / far, ones * far, ones))
    return x * power.astype(x.dtype)


def with_length(x: Array, length: Array, axes: Indices) -> Array:
    """Scales ``x`` to the given length along ``axes``; a zero vector stays zero.

    The forward pass sums two arrays along ``axes`` in a single pass, and the backward pass sums one more array. If
    ``axes`` are sharded, the devices exchange only these sums. The backward pass reads ``x`` itself, so no normalized
    copy of ``x`` is stored.
    """
    return x * _stretch(x, length, axes).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _stretch(x: Array, length: Array, axes: Indices) -> Array:
    """Computes the factor by which to multiply ``x`` so that it gets the given length along ``axes``."""
    return length / _length(x, axes)


@_stretch.defjvp
def _stretch_jvp(axes: Indices, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the factor ``l / n`` and its tangent ``(dl - l dn / n) / n``, which squares neither length, l or n."""
    (x, length), (dx, dlength) = primals, tangents
    n = _length(x, axes)
    return length / n, (dlength - length * (_part_along(x, n, dx, axes) / n)) / n


def with_length_detached(x: Array, length: Array, axes: Indices) -> Array:
    """Scales ``x`` to the given length like :func:`with_length`, but gradients treat the length of ``x`` as a constant.

    A zero vector stays zero, and gradients pass through it unchanged.
    """
    own = _length_or_zero(jax.lax.stop_gradient(x), axes)
    return x * jnp.where(own == 0, jnp.ones_like(own), length / jnp.where(own == 0, 1, own)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _length(x: Array, axes: Indices) -> Array:
    """Computes the Euclidean length along ``axes``, or 1 if it is zero."""
    length = _length_or_zero(x, axes)
    return jnp.where(length == 0, 1, length)


def _length_or_zero(x: Array, axes: Indices) -> Array:
    """Computes the Euclidean length along ``axes``, which is 0 for a zero vector.

    Two sums are computed: one of the squares of ``x`` scaled up, and one of the squares of ``x`` scaled down. If the
    first sum overflows, the second is used. No extra pass over ``x`` is needed to find the largest magnitude. In
    float32, the result is accurate for lengths from 4e-34 to 5e33.
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
    """Returns the length of ``x`` and its tangent: the component of the tangent ``dx`` in the direction of ``x``."""
    length = _length(*primals, axes)
    return length, _part_along(*primals, length, *tangents, axes)


def _part_along(x: Array, length: Array, dx: Array, axes: Indices) -> Array:
    """Computes the component of ``dx`` in the direction of ``x``, which has the given ``length``, along ``axes``."""
    return jnp.sum(((x / length.astype(x.dtype)).conj() * dx).real, axis=axes, keepdims=True)


@jax.custom_jvp
def inverse(length: Array) -> Array:
    """Computes the reciprocal of a length, or 1 if the length is zero.

    The derivative of this function does not square the length, because the square may overflow.
    """
    return 1 / jnp.where(length == 0, 1, length)


@inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Returns ``1 / l`` and its tangent ``-(1 / l) ((1 / l) dl)``, which is zero where the length l is zero."""
    (length,), (dlength,) = primals, tangents
    result = inverse(length)
    slope = jnp.where(length == 0, 0, result)
    return result, -slope * (slope * dlength)


@functools.partial(inlined, static_argnums=1)
def norm(x: Array, axes: Indices) -> Array:
    """Computes the Euclidean length along ``axes``; the gradient at a zero vector is defined as zero.

    The result is accurate for any finite length, because an extra pass over ``x`` finds the largest magnitude.
    """
    size = max_abs(x, axes)
    length = size * _nonzero_length(x / size.astype(x.dtype), axes)
    return jnp.where(is_zero(x, axes), 0, length)
