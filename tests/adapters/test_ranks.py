"""Ranks of adapters by how much the directions of their inputs explain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective
from errors import raises

import reparax as rpx
from reparax._data.seen import Read, Seen


def seen_of(squares, batch=1, ndim=3):
    """Inputs whose second moments have these eigenvalues."""
    n = len(squares)
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))[0]
    second = np.float32(turn * squares @ turn.T)[None].repeat(batch, 0)
    second = second if ndim == 3 else np.float32(squares)[None]
    way = ((batch, n, 4), (0, 1, 2), (0,), (1,)) if batch > 1 else ((n, 4), (0, 1), (), (0,))
    count, first = np.full(batch, 4, np.float32), np.full((batch, n), 3, np.float32)
    if ndim == 3:  # around a mean that ranks do not depend on
        second = second + np.float32(9 / 4)
    return Seen((Read(*way, jnp.asarray(count), jnp.asarray(first), second=jnp.asarray(second)),))


# Of the 9 directions of 3 arrays of rank 3, those that explain most; parts of each array in the comments.
SEEN = {
    "flat": seen_of([1, 1, 1, 1, 1, 1]),  # 1 / 6 each
    "steep": seen_of([100, 10, 1, 0.1, 0.01, 0]),  # 0.90, 0.09, 0.009, ...
    "two": seen_of([50, 40, 5, 3, 1, 1]),  # 0.5, 0.4, 0.05, ...
}


@pytest.mark.parametrize(
    ("rho", "ranks"),
    [
        (2.0, {"flat": 6, "steep": 1, "two": 2}),
        (1.0, {"flat": 3, "steep": 3, "two": 3}),
        (1.5, {"flat": 4, "steep": 2, "two": 3}),
    ],
)
def test_ranks_are_those_of_the_directions_that_explain_most(rho, ranks):
    assert rpx.adapters.eva_ranks(SEEN, 3, rho) == ranks


def test_an_array_whose_directions_explain_too_little_has_none():
    seen = {"one": seen_of([1, 0, 0, 0]), "flat": seen_of(np.ones(40))}
    assert rpx.adapters.eva_ranks(seen, 1, 3.0) == {"one": 1, "flat": 1}
    seen = {"one": seen_of([0.5, 0.5, 0, 0]), "flat": seen_of(np.ones(40))}
    assert rpx.adapters.eva_ranks(seen, 1, 3.0) == {"one": 2, "flat": 0}


def test_arrays_that_are_no_one_matrix_are_left_out():
    others = {"layers": seen_of([1, 1], batch=3), "table": seen_of([1, 1], ndim=2), "bias": Seen()}
    assert rpx.adapters.eva_ranks(others | {"w": seen_of([2, 1, 1])}, 2) == {"w": 2}


def test_nothing_seen_explains_nothing():
    assert rpx.adapters.eva_ranks({"zero": seen_of(np.zeros(4)), "w": seen_of([3, 2, 1])}, 1, 2.0) == {
        "zero": 0,
        "w": 2,
    }


ERRORS = {
    "rank": (lambda: rpx.adapters.eva_ranks(SEEN, 0), "eva_ranks got rank=0, but takes at least 1."),
    "rho": (lambda: rpx.adapters.eva_ranks(SEEN, 2, 0.5), "eva_ranks got rho=0.5, but takes at least 1."),
    "nothing": (
        lambda: rpx.adapters.eva_ranks({"b": Seen()}, 2),
        "eva_ranks found no array that products read as one matrix, with full moments. Pass the result of "
        "`rpx.inputs(loss)(params, batch)`.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, text = ERRORS[case]
    with raises(ValueError, text):
        call()


def test_the_ranks_make_a_chain():
    params = {name: jnp.asarray(np.random.default_rng(1).standard_normal((6, 4)), jnp.float32) for name in SEEN}
    p = rpx.Chain(tuple(rpx.LoRA(n, start="eva", where=path) for path, n in rpx.adapters.eva_ranks(SEEN, 3).items()))
    raw = jax.jit(p.init)(params, seen=SEEN)
    ranks = {name: node["@lora"]["a"].shape[1] for name, node in raw.items()}
    assert ranks == {"flat": 6, "steep": 1, "two": 2}
    assert jax.tree.all(jax.tree.map(np.array_equal, effective(p, raw), params))


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.3])
def test_inputs_that_do_not_vary_explain_nothing(scale):
    same = jnp.ones((9, 8)) * scale * jnp.linspace(0.3, 1.7, 8)[None]
    params = {"a": jnp.ones((8, 2)), "b": jnp.ones((8, 2))}
    data = same, jax.random.normal(jax.random.key(0), (9, 8))
    seen = rpx.inputs(lambda p, x: jnp.sum(x[0] @ p["a"] + x[1] @ p["b"]))(params, data)
    assert rpx.adapters.eva_ranks(seen, 2, 4.0) == {"a": 0, "b": 4}
