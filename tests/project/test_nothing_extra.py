"""What ``apply`` compiles to, against the same formula written by hand: the same operations, each as often.

The formulas are those of plain JAX, safe at zero where the stage promises it. Both sides are optimized by XLA, and
what it removes from either does not count.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import JointNorm, matrices
from grids import mostly_thorough

import reparax as rpx
from reparax.core import random
from reparax.core.random import keys_of_arrays

MATRICES = matrices()
TALL, WIDE = MATRICES["tall"], MATRICES["wide"]


def compiled(f, *args, **options):
    """What ``f`` gives, and how often each operation stands in its optimized program, those in fusions too."""
    program = jax.jit(f, **options).lower(*args).compile()
    operations = re.findall(r"^ +(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", program.as_text(), flags=re.MULTILINE)
    return program(*args), Counter(operations)


def assert_same(ours, by_hand, *args):
    (got, operations), (expected, wanted) = compiled(ours, *args), compiled(by_hand, *args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, expected)
    assert operations == wanted


@jax.custom_jvp
def weight_norm(g, v):
    return v * (g / two_sums(v))


@weight_norm.defjvp
def weight_norm_jvp(primals, tangents):
    (g, v), (dg, dv) = primals, tangents
    n = two_sums(v)
    along = jnp.sum(v / n * dv, range(v.ndim - 1), keepdims=True)
    return v * (g / n), dv * (g / n) + v * ((dg - g * (along / n)) / n)


def two_sums(v):
    total, far = jnp.sum(jnp.square(v * 2.0**48), range(v.ndim - 1), keepdims=True), 2.0**48
    small = jnp.sum(jnp.square(v / far), range(v.ndim - 1), keepdims=True)
    n = jnp.where(jnp.isfinite(total), jnp.sqrt(total) / far, jnp.sqrt(small) * far)
    return jnp.where(n == 0, 1, n)


# ---- formulas of the raw tree and a key


def keys(key, kind, names):
    """The key of each array in the only stage ``kind`` of a chain."""
    return keys_of_arrays(key, kind, 1, names)


def noisy(w, key):
    return w + 0.075 * random.normal(key, w)


def dropped(w, key):
    return jnp.where(random.uniform(key, w, ()) < jnp.float32(0.8), w / 0.8, 0)


def tie(raw, key):
    return {"a": raw["a"], "b": raw["a"].T}


def joint_norm(raw, key):
    (c,), (g, v) = jax.tree.leaves(raw["b"]), jax.tree.leaves(raw["w"])
    squares = jnp.sum(jnp.square(v), 0) + jnp.square(c)
    ratio = g / jnp.sqrt(jnp.where(squares == 0, 1, squares))
    return {"w": ratio * v, "b": ratio * c}


def norm_noise(raw, key):
    (a,) = keys(key, "var_noise", ["a"])
    return {"a": noisy(weight_norm(*jax.tree.leaves(raw)), a)}


def norm_noise_dropout_cast(raw, key):
    (noise_a, noise_c), (mask_a, mask_c) = (keys(key, kind, ["a", "c"]) for kind in ("var_noise", "weight_dropout"))
    a, c = (weight_norm(*jax.tree.leaves(raw[name])) for name in ("a", "c"))
    w = {"a": dropped(noisy(a, noise_a), mask_a), "c": dropped(noisy(c, noise_c), mask_c)}
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), w)


def norm_of_product(raw, key):
    g, u, v = jax.tree.leaves(raw)
    return {"a": weight_norm(g, u @ v)}


def positive_length_tied(raw, key):
    x, v = jax.tree.leaves(raw)
    w = weight_norm(jax.nn.softplus(x), v)
    return {"a": w, "b": w.T}


ONE, TWO, TIED = {"a": TALL}, {"a": TALL, "c": WIDE}, {"a": TALL, "b": np.asarray(TALL).T}
VECTOR = {"w": TALL, "b": np.asarray(TALL)[0]}
TIE = rpx.Tie({"b": ("a", jnp.transpose)}, unequal="overwrite")
CHAIN = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.075) >> rpx.WeightDropout(0.2) >> rpx.quantized.Cast("bfloat16")

CHAINS = {
    "tie": (TIE, TIED, tie),
    "joint norm": (JointNorm({"w": "w", "b": "b"}), VECTOR, joint_norm),
    "weight norm >> noise": (rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.075), ONE, norm_noise),
    "weight norm >> noise >> dropout >> cast": (CHAIN, TWO, norm_noise_dropout_cast),
    "low rank >> weight norm": (rpx.LowRank(2) >> rpx.WeightNorm(axis=-1), ONE, norm_of_product),
    "positive >> weight norm >> tie": (
        rpx.Positive(where=".*/g") >> rpx.WeightNorm(axis=-1) >> TIE,
        TIED,
        positive_length_tied,
    ),
}


@pytest.mark.parametrize(
    "name",
    mostly_thorough(CHAINS, "tie", "joint norm", "weight norm >> noise >> dropout >> cast", "low rank >> weight norm"),
)
def test_a_chain_compiles_to_its_formula(name, key):
    p, params, formula = CHAINS[name]
    raw = jax.jit(p.init)(params, jax.random.key(0))
    with jax.numpy_rank_promotion("allow"):
        assert_same(p.apply, formula, raw, key)


DIFFERENTIATED = [
    "weight norm >> noise",
    "weight norm >> noise >> dropout >> cast",
    "positive >> weight norm >> tie",
    "low rank >> weight norm",
]


@pytest.mark.parametrize("name", mostly_thorough(DIFFERENTIATED, *DIFFERENTIATED[:1], *DIFFERENTIATED[2:]))
def test_the_gradient_compiles_to_that_of_the_formula_of_which_nothing_is_kept(name, key):
    p, params, formula = CHAINS[name]

    def gradient(apply):
        return jax.grad(lambda raw: sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(apply(raw, key))))

    raw = jax.jit(p.init)(params, jax.random.key(0))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert_same(gradient(p.apply), gradient(jax.checkpoint(formula)), raw)


IDENTITIES = {
    "empty": rpx.Chain(),
    "means of noise and dropout": (rpx.VarNoise(0.1) >> rpx.WeightDropout(0.2)).deterministic,
    "frozen": rpx.Freeze(),
    "cast to what it is": rpx.quantized.Cast("float32"),
    "all of them": rpx.Freeze()
    >> rpx.quantized.Cast("float32")
    >> rpx.numbers.Scale(1)
    >> rpx.VarNoise(0.1).deterministic,
}


@pytest.mark.parametrize("p", IDENTITIES.values(), ids=IDENTITIES)
def test_an_identity_compiles_to_nothing(p):
    raw = p.init(jax.tree.map(jnp.copy, TWO))
    _, operations = compiled(p.apply, raw, donate_argnums=0)  # else its results would be copies
    assert operations == {"parameter": 2, "tuple": 1}
