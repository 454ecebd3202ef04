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
from cases import PACK, SPLIT, JointNorm, cell, matrices
from grids import mostly_thorough

import reparax as rpx
from reparax.core import random
from reparax.core.keys import Keys

MATRICES = matrices()
SQUARE, TALL, WIDE, BATCH = (MATRICES[name] for name in ("square", "tall", "wide", "batch"))


def compiled(f, *args, **options):
    """What ``f`` gives, and how often each operation stands in its optimized program, those in fusions too."""
    program = jax.jit(f, **options).lower(*args).compile()
    operations = re.findall(r"^ +(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", program.as_text(), flags=re.MULTILINE)
    return program(*args), Counter(operations)


def assert_same(ours, by_hand, *args):
    (got, operations), (expected, wanted) = compiled(ours, *args), compiled(by_hand, *args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, expected)
    assert operations == wanted


# ---- stages: formulas of the values under a marker, the fixed ones first, then by name


def unit(x, axis):
    u = x / jax.lax.stop_gradient(largest(x, axis))
    total = jnp.sum(jnp.square(u), axis, keepdims=True)
    return u / jnp.sqrt(jnp.where(total == 0, 1, total))


def largest(x, axis):
    top = jnp.max(jnp.abs(x), axis, keepdims=True, initial=0.0)
    return jnp.where(top == 0, 1, top)


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


def spectral_norm(u, v, w):
    sigma = (w @ u) @ v
    return w * (1 / jnp.where(sigma == 0, 1, sigma))


def standardization(v):
    x = v / largest(v, 0)
    return len(v) ** 0.5 * unit(x - jnp.mean(x, 0, keepdims=True), 0)


def masked(mask, w):
    return jnp.where(mask != 0, w, 0)


def split(base, x):
    along = base.mT @ x
    return along - along.mT, x - base @ along


def cayley(base, x):
    skew, across = split(base, x)
    schur = jnp.eye(skew.shape[-1]) - skew / 2 + across.mT @ across / 4
    return jnp.linalg.solve(schur.mT, (2 * base + across).mT).mT - base


def entries(places, n):
    """A matrix whose entry (i, j) is that of ``x`` at ``places(i, j)``, and 0 at -1."""

    def formula(x):
        return jnp.append(x, 0)[places(*jnp.indices((n, n)))]

    return formula


def lower(i, j):
    return jnp.where(i >= j, i * (i + 1) // 2 + j, -1)


def symmetric(i, j):
    return lower(jnp.maximum(i, j), jnp.minimum(i, j))


STAGES = {
    "weight norm": (rpx.WeightNorm(axis=-1), TALL, weight_norm),
    "spectral norm": (rpx.SpectralNorm(), TALL, spectral_norm),
    "low rank": (rpx.LowRank(2), TALL, jnp.matmul),
    "simplex": (rpx.numbers.Simplex(along=-1), TALL, jax.nn.softmax),
    "sphere": (rpx.norms.Sphere(radius=2.0, along=-1), TALL, lambda v: 2 * unit(v, -1)),
    "weight standardization": (rpx.norms.WeightStandardization(axis=-1), TALL, standardization),
    "mask": (rpx.Mask(), TALL, masked),
    "cayley": (rpx.Orthogonal(), TALL, cayley),
    "symmetric": (rpx.matrices.Symmetric(), SQUARE, entries(symmetric, 3)),
    "triangular": (rpx.matrices.Triangular(), SQUARE, entries(lower, 3)),
    "cast": (rpx.quantized.Cast("bfloat16"), TALL, lambda w: w.astype(jnp.bfloat16)),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "w", "formula"), STAGES.values(), ids=STAGES)
def test_a_stage_compiles_to_its_formula(stage, w, formula):
    raw = jax.jit(stage.init)({"w": w}, jax.random.key(0))
    with jax.numpy_rank_promotion("allow"):
        assert_same(stage.apply, lambda raw: {"w": formula(*jax.tree.leaves(raw))}, raw)


# ---- stages that see a tree, and chains: formulas of the raw tree and a key


def keys(key, kind, names):
    """The key of each array in the only stage ``kind`` of a chain."""
    return Keys(key).of_arrays(kind, 1, names)


def noisy(w, key):
    return w + 0.075 * random.normal(key, w)


def dropped(w, key):
    return jnp.where(random.uniform(key, w, ()) < jnp.float32(0.8), w / 0.8, 0)


def noise(raw, key):
    a, c = keys(key, "var_noise", ["a", "c"])
    return {"a": noisy(raw["a"], a), "c": noisy(raw["c"], c)}


def dropout(raw, key):
    a, c = keys(key, "weight_dropout", ["a", "c"])
    return {"a": dropped(raw["a"], a), "c": dropped(raw["c"], c)}


def tie(raw, key):
    return {"a": raw["a"], "b": raw["a"].T}


def cuts(raw, key):
    block = raw["cell"]["wi"]["@split"]["block"]
    return {"cell": {"wi": block[:3], "wh": block[3:5], "b": block[5]}, "qkv": raw["qkv"]}


def joined(raw, key):
    parts = raw["qkv"]["weight"]["@pack"]
    heads = jnp.concatenate([parts["query"], parts["key"], parts["value"]], axis=2)
    return {"cell": raw["cell"], "qkv": {"weight": heads.reshape(3, 12)}}


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


def noise_of_factors(raw, key):
    u, v = jax.tree.leaves(raw)
    noise_u, noise_v = keys(key, "var_noise", ["a/u", "a/v"])
    return {"a": noisy(u, noise_u) @ noisy(v, noise_v)}


def norm_of_product(raw, key):
    g, u, v = jax.tree.leaves(raw)
    return {"a": weight_norm(g, u @ v)}


def gain(raw, key):
    g, v = jax.tree.leaves(raw)
    return {"a": weight_norm(g, standardization(v))}


def positive_length_tied(raw, key):
    x, v = jax.tree.leaves(raw)
    w = weight_norm(jax.nn.softplus(x), v)
    return {"a": w, "b": w.T}


ONE, TWO, TIED = {"a": TALL}, {"a": TALL, "c": WIDE}, {"a": TALL, "b": np.asarray(TALL).T}
VECTOR = {"w": TALL, "b": np.asarray(TALL)[0]}
TIE = rpx.Tie({"b": ("a", jnp.transpose)}, unequal="overwrite")
CHAIN = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.075) >> rpx.WeightDropout(0.2) >> rpx.quantized.Cast("bfloat16")

CHAINS = {
    "noise": (rpx.VarNoise(0.075), TWO, noise),
    "dropout": (rpx.WeightDropout(0.2), TWO, dropout),
    "tie": (TIE, TIED, tie),
    "split": (SPLIT, cell(), cuts),
    "pack": (PACK, cell(), joined),
    "joint norm": (JointNorm({"w": "w", "b": "b"}), VECTOR, joint_norm),
    "weight norm >> noise": (rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.075), ONE, norm_noise),
    "weight norm >> noise >> dropout >> cast": (CHAIN, TWO, norm_noise_dropout_cast),
    "noise >> low rank": (rpx.VarNoise(0.075) >> rpx.LowRank(2), ONE, noise_of_factors),
    "low rank >> weight norm": (rpx.LowRank(2) >> rpx.WeightNorm(axis=-1), ONE, norm_of_product),
    "standardization >> weight norm": (rpx.norms.WeightStandardization(axis=-1) >> rpx.WeightNorm(axis=-1), ONE, gain),
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
