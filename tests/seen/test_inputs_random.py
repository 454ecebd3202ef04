"""Random programs between a weight and its product: the data give the squares of the outputs, and no more."""

import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import reparax as rpx


def _transpose(rng, shape):
    order = [int(i) for i in rng.permutation(len(shape))]
    return lambda w, i: w.transpose(order), [shape[i] for i in order]


def _split(rng, shape):
    places = [(axis, n) for axis, size in enumerate(shape) for n in (2, 3) if size % n == 0 and size > n]
    if not places:
        return None
    axis, n = places[rng.integers(len(places))]
    new = [*shape[:axis], n, shape[axis] // n, *shape[axis + 1 :]]
    return lambda w, i: w.reshape(new), new


def _merge(rng, shape):
    if len(shape) < 2:
        return None
    axis = int(rng.integers(len(shape) - 1))
    new = [*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]]
    return lambda w, i: w.reshape(new), new


def _slice(rng, shape):
    axis = int(rng.integers(len(shape)))
    start = int(rng.integers(0, 1 + shape[axis] // 2))
    stop, step = (
        int(rng.integers(start + 1, shape[axis] + 1)) if start < shape[axis] else start,
        int(rng.integers(1, 3)),
    )
    n = len(range(start, stop, step))
    if not n:
        return None
    return lambda w, i: lax.slice_in_dim(w, start, stop, step, axis), [*shape[:axis], n, *shape[axis + 1 :]]


def _dynamic(rng, shape):
    axis = int(rng.integers(len(shape)))
    if shape[axis] < 3:
        return None
    n = shape[axis] - 1
    return lambda w, i: lax.dynamic_slice_in_dim(w, i, n, axis), [*shape[:axis], n, *shape[axis + 1 :]]


def _index(rng, shape):
    if len(shape) < 2:
        return None
    axis = int(rng.integers(len(shape)))
    at = int(rng.integers(shape[axis]))
    return lambda w, i: lax.index_in_dim(w, at, axis, keepdims=False), [*shape[:axis], *shape[axis + 1 :]]


def _flip(rng, shape):
    axis = int(rng.integers(len(shape)))
    return lambda w, i: jnp.flip(w, axis), shape


def _repeat(rng, shape):
    if len(shape) > 4:
        return None
    axis, n = int(rng.integers(len(shape) + 1)), int(rng.integers(1, 3))
    new = [*shape[:axis], n, *shape[axis:]]
    return lambda w, i: jnp.broadcast_to(jnp.expand_dims(w, axis), new), new


def _scale(rng, shape):
    number = float(rng.choice([-1.0, 1.5]))
    return lambda w, i: -w if number < 0 else w * number, shape


MOVES = [_transpose, _split, _merge, _slice, _dynamic, _index, _flip, _repeat, _scale]


def program(rng):
    """A weight, data, and a function of both and an index that moves the weight and multiplies it."""
    shape = [int(n) for n in rng.choice([2, 3, 4, 6], size=rng.integers(2, 4))]
    moves, moved = [], shape
    for _ in range(rng.integers(0, 6)):
        made = MOVES[rng.integers(len(MOVES))](rng, moved)
        if made is not None:
            moves.append(made[0])
            moved = made[1]
    letters = string.ascii_lowercase[: len(moved)]
    kinds = rng.choice(["summed", "shared", "free"], p=[0.5, 0.2, 0.3], size=len(moved))
    kinds[0] = kinds[0] if "summed" in kinds else "summed"
    sizes = dict(zip(letters, moved, strict=True)) | {"y": 3}
    data = "".join(rng.permutation([x for x, kind in zip(letters, kinds, strict=True) if kind != "free"] + ["y"]))
    out = "".join(rng.permutation([x for x, kind in zip(letters, kinds, strict=True) if kind != "summed"] + ["y"]))
    first = rng.random() < 0.5
    spec = f"{letters},{data}->{out}" if first else f"{data},{letters}->{out}"
    w, x = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (shape, [sizes[each] for each in data]))

    def function(w, x, i):
        for move in moves:
            w = move(w, i)
        return jnp.einsum(spec, *((w, x) if first else (x, w)))

    return w, x, function


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_the_data_of_a_random_program_give_the_squares_of_its_outputs(seed):
    rng = np.random.default_rng(seed)
    w, x, function = program(rng)

    def half_squares(w, x, i):
        return jnp.sum(function(w, x, i) ** 2) / 2

    found = jax.jit(rpx.inputs(half_squares, gradients=True))(w, x, 1)
    slope = jax.jit(jax.grad(half_squares))(w, x, 1)
    np.testing.assert_allclose(found.gradient, slope, rtol=1e-3, atol=1e-3)
    if not found.reads:
        assert found.why
        return
    squares = jnp.sum(function(w, x, 1) ** 2)
    weights = jax.random.normal(jax.random.key(seed), function(w, x, 1).shape)
    read = jnp.where(jax.grad(lambda w: jnp.sum(function(w, x, 1) * weights))(w) != 0, w, 0)  # what no product reads
    total = sum(jnp.einsum("bkn,bkl,bln->", m, each.second, m) for each in found.reads for m in [each.matrices(read)])
    np.testing.assert_allclose(total, squares, rtol=1e-3, atol=1e-3)
    # The gradient with respect to an output is that output.
    traces = sum(jnp.sum(jnp.trace(each.slopes, axis1=1, axis2=2)) for each in found.reads)
    np.testing.assert_allclose(traces, squares, rtol=1e-3, atol=1e-3)
