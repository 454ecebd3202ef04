"""Where low-rank adapters start: for each word of ``start``, a formula for the two factors.

A formula takes the matrix, the rank, the scaling of the product of the factors, and a key or statistics of the data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._data.seen import Read, Seen, require_seen
from reparax._numerics.linalg import identity, product, rank_error

Factors = tuple[Array, Array]

GAMMA = 16
"""The number of the paper on LoRA-GA by which a step of the adapter is as stable as one of the matrix."""


# What is given. ----------------------------------------------------------------------------------------------------


def _give_nothing(w: Array, key: Array, seen: Seen | None) -> None:
    """What a start needs that depends on the rank and the matrix alone."""
    del w, key, seen


def _give_key(w: Array, key: Array, seen: Seen | None) -> Array:
    """The key, for a random start."""
    del w, seen
    return key


def _give_moments(w: Array, key: Array, seen: Seen | None) -> Array:
    """The mean of the products of the rows' inputs."""
    del key
    return _data_of_rows(w, seen).moments[0].astype(w.dtype)


def _give_covariance(w: Array, key: Array, seen: Seen | None) -> Array:
    """The same for inputs without their mean."""
    del key
    return _data_of_rows(w, seen).covariance[0].astype(w.dtype)


def _data_of_rows(w: Array, seen: Seen | None) -> Read:
    """The data of one matrix whose inputs are the rows."""
    read = require_seen(seen, "full").read("full", w, axes=(0,))
    matrices, inputs, _ = read.sizes()
    if matrices != 1 or inputs != w.shape[0]:
        raise ValueError(
            f"expected one input for each of {w.shape[0]} rows, but products read this array as {matrices} matrices of "
            f"{inputs} inputs. Give the axes of these matrices as `stacked`, or leave it out with `where`."
        )
    return read


def _give_gradient(w: Array, key: Array, seen: Seen | None) -> Array:
    """The gradient of the loss with respect to the matrix."""
    del key
    return require_seen(seen, "gradients").slope(w).astype(w.dtype)


# Formulas. ---------------------------------------------------------------------------------------------------------


def _start_kaiming(w: Array, rank: int, scaling: Array, key: Array) -> Factors:
    """Uniform numbers with the bound of PEFT, and zero."""
    del scaling
    bound = w.shape[0] ** -0.5
    a = jax.random.uniform(key, (w.shape[0], rank), w.real.dtype, -bound, bound)
    return a.astype(w.dtype), _zero_outputs(w, rank)


def _start_gaussian(w: Array, rank: int, scaling: Array, key: Array) -> Factors:
    """Normal numbers, and zero."""
    del scaling
    return jax.random.normal(key, (w.shape[0], rank), w.dtype) / rank, _zero_outputs(w, rank)


def _start_pissa(w: Array, rank: int, scaling: Array, unused: None = None) -> Factors:
    """The factors of the largest singular values."""
    del unused
    u, singular, vh = _singular_directions(w, slice(rank))
    return _balance(u, singular, vh, scaling)


def _start_olora(w: Array, rank: int, scaling: Array, unused: None) -> Factors:
    """The first rows and columns of the QR decomposition of the transposed matrix."""
    del scaling, unused
    q, r = jnp.linalg.qr(w.T)
    return r[:rank].T, q[:, :rank].T


def _start_eva(w: Array, rank: int, scaling: Array, covariance: Array) -> Factors:
    """The directions in which the inputs vary most, and zero."""
    del scaling
    _, directions = jnp.linalg.eigh(covariance)
    return directions[:, ::-1][:, :rank], _zero_outputs(w, rank)


def _start_corda(w: Array, rank: int, scaling: Array, moments: Array) -> Factors:
    """The factors of the largest singular values of C w, with the moments C taken away from them again."""
    regular, inverse = _regularize(moments)
    a, b = _start_pissa(product(regular, w), rank, scaling)
    return product(inverse, a), b


def _start_corda_kpm(w: Array, rank: int, scaling: Array, moments: Array) -> Factors:
    """The same with the smallest singular values."""
    regular, inverse = _regularize(moments)
    u, singular, vh = _singular_directions(product(regular, w), slice(-rank, None))
    a, b = _balance(u, singular, vh, scaling)
    return product(inverse, a), b


def _start_lora_ga(w: Array, rank: int, scaling: Array, gradient: Array) -> Factors:
    """The first directions of the gradient on the side of the rows, and the next ones on that of the columns."""
    del scaling
    u, _, vh = _singular_directions(gradient, slice(2 * rank))
    size = w.shape[1] ** 0.25 / GAMMA**0.5
    return size * u[:, :rank], size * vh[rank:]


def _zero_outputs(w: Array, rank: int) -> Array:
    """The second factor, of zeros, so that the product is zero."""
    return jnp.zeros((rank, w.shape[1]), w.dtype)


def _singular_directions(x: Array, which: slice) -> tuple[Array, Array, Array]:
    """Some of the singular vectors, as columns and as rows, and their singular values."""
    u, singular, vh = jnp.linalg.svd(x, full_matrices=False)
    return u[:, which], singular[which], vh[which]


def _balance(u: Array, singular: Array, vh: Array, scaling: Array) -> Factors:
    """Factors of equal norms whose product, times ``scaling``, has these singular values."""
    root = jnp.sqrt(singular / jnp.abs(scaling))
    nonzero_root = jnp.where(root == 0, 1, root)  # keeps one factor nonzero, so that a zero matrix trains
    a = u * (jnp.sign(scaling) * root).astype(u.dtype)[None]
    return a, nonzero_root.astype(vh.dtype)[:, None] * vh


def _regularize(moments: Array) -> tuple[Array, Array]:
    """The moments, with as much of the identity that their inverse is accurate, and the inverse."""
    eye = identity(moments)
    mean = jnp.trace(moments) / moments.shape[0]
    mean = jnp.where(mean == 0, 1, mean)

    def invert(share: Array) -> tuple[Array, Array, Array]:
        regular = moments + share * mean * eye
        return share, regular, jnp.linalg.inv(regular)

    def inaccurate(state: tuple[Array, Array, Array]) -> Array:
        _, regular, inverse = state
        return jnp.linalg.norm(product(regular, inverse) - eye) >= 0.05

    start = invert(jnp.asarray(0.01, moments.dtype))
    _, regular, inverse = jax.lax.while_loop(inaccurate, lambda state: invert(2 * state[0]), start)
    return regular, inverse


# Which ranks fit. --------------------------------------------------------------------------------------------------


def _lora_ga_rank_error(rank: int, w: Array) -> str | None:
    """What is wrong with a rank of which each factor takes its own directions, or None."""
    if 2 * rank <= min(w.shape):
        return None
    return (
        f"expected 1 <= rank <= min{tuple(w.shape)} / 2 = {min(w.shape) // 2}, as each factor has directions of its "
        f"own, got rank {rank}. Narrow the stage with `where`, or change `rank`."
    )


def _eva_rank_error(rank: int, w: Array) -> str | None:
    """What is wrong with a rank of directions of the inputs, or None."""
    if rank <= w.shape[0]:
        return None
    return (
        f"expected 1 <= rank <= {w.shape[0]}, the number of inputs, got rank {rank}. Narrow the stage with `where`, or "
        f"change `rank`."
    )


def _empty_matrix_error(rank: int, w: Array) -> str | None:
    """What is wrong with a rank for a matrix without entries, or None; all others take any."""
    return rank_error(rank, w) if 0 in w.shape else None


# The table. --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A formula for the factors, and what it needs."""

    factors: Callable[[Array, int, Array, Any], Factors]
    source: Callable[[Array, Array, Seen | None], Any] = _give_nothing
    moves: bool = False
    """Whether a part of the base moves into the factors; if not, one of them starts at zero."""
    refuses: Callable[[int, Array], str | None] = _empty_matrix_error
    """Why a rank does not fit a matrix, or None."""

    @property
    def random(self) -> bool:
        """Whether the formula takes a key."""
        return self.source is _give_key

    @property
    def collects(self) -> tuple[str, ...]:
        """The data that it needs."""
        if self.source is _give_gradient:
            return ("gradients",)
        return ("full",) if self.source in (_give_moments, _give_covariance) else ()


STARTS = {
    "kaiming": Start(_start_kaiming, _give_key),
    "gaussian": Start(_start_gaussian, _give_key),
    "pissa": Start(_start_pissa, moves=True, refuses=rank_error),
    "olora": Start(_start_olora, moves=True, refuses=rank_error),
    "eva": Start(_start_eva, _give_covariance, refuses=_eva_rank_error),
    "corda": Start(_start_corda, _give_moments, moves=True, refuses=rank_error),
    "corda_kpm": Start(_start_corda_kpm, _give_moments, moves=True, refuses=rank_error),
    "lora_ga": Start(_start_lora_ga, _give_gradient, moves=True, refuses=_lora_ga_rank_error),
}
