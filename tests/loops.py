"""Layers of experts in all ways of writing them, and what each is: a loop over experts, one matrix at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

E, K, N, T = 4, 6, 5, 11


class Layer(NamedTuple):
    """A layer: the shape of its weight, those of its data, how it is written, and the same as a loop."""

    weight: tuple[int, ...]
    data: tuple[int, ...]
    sizes: list[Any]
    written: Callable[..., Any]
    loop: Callable[..., Any]


def general(contracting, batch, ragged, group):
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), [ragged], group)
    return lambda a, b, sizes: lax.ragged_dot_general(a, b, sizes, numbers)


def inside(sizes, n):
    """For each expert its rows, as zeros and ones."""
    start, found = 0, []
    for size in sizes:
        rows = jnp.arange(n, dtype=jnp.int32)
        found.append(jnp.where((rows >= start) & (rows < start + size), 1.0, 0.0)[:, None])
        start = start + size
    return found


def loop(w, x, sizes):
    return sum((rows * x) @ w[e] for e, rows in enumerate(inside(sizes, len(x))))


def loop_of_sums(w, x, sizes):
    return jnp.stack([(rows * w).T @ x for rows in inside(sizes, len(x))])


SIZES = [[3, 0, 6, 2], [0, 0, 11, 0], [1, 2, 3, 1], [0, 0, 0, 0]]
"""All rows in groups; one expert has them all; some rows beyond all groups; all of them."""

LAYERS = {
    "plain": Layer((E, K, N), (T, K), SIZES, lambda w, x, s: lax.ragged_dot(x, w, s), loop),
    "outputs first": Layer(
        (E, N, K),
        (T, K),
        SIZES,
        lambda w, x, s: general(((1,), (2,)), ((), ()), 0, [0])(x, w, s),
        lambda w, x, s: loop(w.transpose(0, 2, 1), x, s),
    ),
    "experts last": Layer(
        (K, N, E),
        (T, K),
        SIZES,
        lambda w, x, s: general(((1,), (0,)), ((), ()), 0, [2])(x, w, s),
        lambda w, x, s: loop(w.transpose(2, 0, 1), x, s),
    ),
    "moved": Layer(
        (E, N, K),
        (T, K),
        SIZES,
        lambda w, x, s: lax.ragged_dot(x, w.transpose(0, 2, 1) * 2, s),
        lambda w, x, s: loop(2 * w.transpose(0, 2, 1), x, s),
    ),
    "one expert": Layer((1, K, N), (T, K), [[T], [4], [0]], lambda w, x, s: lax.ragged_dot(x, w, s), loop),
    "one row": Layer((E, K, N), (1, K), [[0, 1, 0, 0], [0, 0, 0, 0]], lambda w, x, s: lax.ragged_dot(x, w, s), loop),
    "shared": Layer(
        (K, N),
        (T, K),
        SIZES,
        lambda w, x, s: lax.ragged_dot(x, jnp.broadcast_to(w, (E, K, N)), s),
        lambda w, x, s: loop(jnp.broadcast_to(w, (E, K, N)), x, s),
    ),
    "the weight in groups": Layer(
        (T, K), (E, K, N), SIZES, lambda w, x, s: lax.ragged_dot(w, x, s), lambda w, x, s: loop(x, w, s)
    ),
    "repeated rows": Layer(
        (2, K),
        (E, K, N),
        SIZES,
        lambda w, x, s: lax.ragged_dot(jnp.broadcast_to(w[1:], (T, K)), x, s),
        lambda w, x, s: loop(x, jnp.broadcast_to(w[1:], (T, K)), s),
    ),
    "sums": Layer((T, K), (T, N), SIZES, lambda w, x, s: general(((0,), (0,)), ((), ()), 0, [])(w, x, s), loop_of_sums),
    "sums of the second": Layer(
        (T, N),
        (T, K),
        SIZES,
        lambda w, x, s: general(((0,), (0,)), ((), ()), 0, [])(x, w, s),
        lambda w, x, s: loop_of_sums(x, w, s),
    ),
    "mapped": Layer(
        (2, E, K, N),
        (2, T, K),
        [[SIZES[0], SIZES[2]], [SIZES[3], SIZES[1]]],
        lambda w, x, s: jax.vmap(lambda w, x, s: lax.ragged_dot(x, w, s))(w, x, s),
        lambda w, x, s: jnp.stack([loop(w[i], x[i], s[i]) for i in range(2)]),
    ),
    "two axes of rows": Layer(
        (E, K, N),
        (2, T, K),
        [[SIZES[0], SIZES[2]], [SIZES[3], SIZES[1]]],
        lambda w, x, s: general(((2,), (1,)), ((), ()), 1, [0])(x, w, s),
        lambda w, x, s: jnp.stack([loop(w, x[i], s[i]) for i in range(2)]),
    ),
    "scanned": Layer(
        (2, E, K, K),
        (T, K),
        SIZES,
        lambda w, x, s: lax.scan(lambda x, w: (jnp.tanh(lax.ragged_dot(x, w, s)), None), x, w)[0],
        lambda w, x, s: jnp.tanh(loop(w[1], jnp.tanh(loop(w[0], x, s)), s)),
    ),
    "two layers": Layer(
        (2, E, K, K),
        (T, K),
        SIZES,
        jax.jit(
            lambda w, x, s: jax.checkpoint(lambda x: lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, w[0], s)), w[1], s))(x)
        ),
        lambda w, x, s: loop(w[1], jnp.tanh(loop(w[0], x, s)), s),
    ),
}
