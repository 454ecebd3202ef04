"""Programs and chains at random: whoever draws, each row sees the distribution of whole weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samples import ERRORS

import reparax as rpx
from reparax.transforms import local_reparametrization

N = 3000
NOISES = [
    lambda: rpx.VarNoise(0.4),
    lambda: rpx.VarNoise(-0.4),
    lambda: rpx.VarNoise(0.4, relative="std", axis=-1),
    lambda: rpx.Gaussian(0.4),
    lambda: rpx.Gaussian(0.4, axis=-1),
    lambda: rpx.noise.VariationalDropout(0.4),
    lambda: rpx.WeightDropout(0.3),
]
OTHERS = [
    rpx.Chain,
    rpx.WeightNorm,
    lambda: rpx.numbers.Scale(2.0),
    lambda: rpx.MagnitudePruning(0.3),
    lambda: rpx.quantized.Cast("bfloat16"),
    lambda: rpx.VarNoise(0.3),
    lambda: rpx.LoRA(1),
]
MOVES = {
    "as it is": lambda w, c: w,
    "transposed": lambda w, c: w.T,
    "turned over": lambda w, c: w[::-1],
    "scaled": lambda w, c: w * c,
    "divided": lambda w, c: w / (1 + c * c),
    "moved": lambda w, c: c - w,
    "reshaped": lambda w, c: w.reshape(2, 8)[::-1].reshape(4, 4),
    "rolled": lambda w, c: jnp.roll(w, 1, axis=0),
    "padded": lambda w, c: jnp.pad(w[1:], ((1, 0), (0, 0))),
    "symmetric": lambda w, c: w + w.T,
    "folded": lambda w, c: w + w[::-1],
    "repeated": lambda w, c: jnp.broadcast_to(w[:1], w.shape) * c,
    "repeated and added": lambda w, c: c + jnp.broadcast_to(w[:, :1], w.shape),
    "squared": lambda w, c: jnp.square(w),
    "mixed": lambda w, c: c @ w,
    "chosen": lambda w, c: jnp.where(c > 0, w, -w),
    "chosen or moved": lambda w, c: jnp.where(c > 0, w, w.T),
    "normed": lambda w, c: w / (1 + jnp.sum(jnp.abs(w))),
    "stopped": lambda w, c: jax.lax.stop_gradient(w),
    "looped": lambda w, c: jax.lax.scan(lambda a, row: (a, row * 2), 0, w)[1],
    "checkpointed": lambda w, c: jax.checkpoint(lambda w: w * c)(w),
    "diagonal": lambda w, c: w * jnp.eye(4),
    "a slice": lambda w, c: jax.lax.dynamic_slice(w, (1, 0), (2, 4)).repeat(2, 0),
}
KEPT = ["as it is", "transposed", "turned over", "scaled", "divided", "moved", "reshaped", "chosen", "checkpointed"]
"""After these, entries are independent."""
USES = {
    "right": lambda w, x: x @ w,
    "left": lambda w, x: (w @ x.T).T,
    "heads": lambda w, x: jnp.einsum("nd,dhk->nhk", x, w.reshape(4, 2, 2)).reshape(len(x), 4),
    "rows": lambda w, x: jnp.einsum("ngd,gde->nge", x.reshape(-1, 2, 2), w.reshape(2, 2, 4)).reshape(len(x), 8),
    "times": lambda w, x: x[:, :, None] * w[None],
    "bias": lambda w, x: x + w[:1],
    "vmapped": lambda w, x: jax.vmap(lambda x: w.T @ x)(x),
    "table": lambda w, x: w[(x[:, 0] > 0).astype(int) + 1],
    "convolved": lambda w, x: jax.lax.conv_general_dilated(
        x.reshape(-1, 2, 2), w.reshape(2, 2, 4), (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    ),
}


def program(seed):
    """A chain and a network, each made at random."""
    draw = np.random.default_rng(seed)
    keeps = draw.random() < 0.5
    others, known = (OTHERS[:1], KEPT) if keeps else (OTHERS, list(MOVES))
    before, after = (others[draw.integers(len(others))]() for _ in range(2))
    p = before >> NOISES[draw.integers(len(NOISES))]() >> after
    moves = [known[i] for i in draw.integers(len(known), size=draw.integers(1, 4))]
    use = list(USES)[draw.integers(len(USES))]
    constants = jnp.asarray(draw.standard_normal((len(moves), 4, 4)), jnp.float32)

    def network(weights, x):
        w = weights["w"].astype(jnp.float32)
        for move, c in zip(moves, constants, strict=True):
            w = MOVES[move](w, c)
        return USES[use](w, x).reshape(len(x), -1)

    return p, network, f"{p}: {', '.join(moves)}; {use}"


def check(seed):
    """Compares the first of two rows with a row of whole weights, over ``N`` keys; returns whether rows draw apart."""
    p, network, told = program(seed)
    draw = np.random.default_rng(seed + 1)
    raw = p.init({"w": jnp.asarray(draw.standard_normal((4, 4)), jnp.float32)}, jax.random.key(seed))
    x = jnp.asarray(draw.standard_normal((1, 4)), jnp.float32)

    def loss(raw, key, x):
        return network(p.apply(raw, key), x)

    def both(keys, others):
        own = jax.vmap(lambda key: local_reparametrization(loss)(raw, key, jnp.concatenate([x, x])))(keys)
        return own, jax.vmap(lambda key: loss(raw, key, x))(others)

    made = jax.jit(both)(*jax.random.split(jax.random.key(seed), (2, N)))
    pair, whole = (np.asarray(each, np.float64) for each in made)
    got, want = pair[:, 0], whole[:, 0]
    assert np.all(np.isfinite(got)), told
    size = 1e-5 * (1 + np.abs(want).max())
    assert np.all(np.abs(got.mean(0) - want.mean(0)) <= ERRORS * np.sqrt((got.var(0) + want.var(0)) / N) + size), told
    products = [(y - y.mean(0))[:, :, None] * (y - y.mean(0))[:, None, :] for y in (got, want)]
    error = np.sqrt(sum(each.var(0) for each in products) / N)
    gap = np.abs(products[0].mean(0) - products[1].mean(0))
    apart = not np.allclose(pair[:, 0], pair[:, 1], atol=size)
    rows = np.eye(gap.shape[0], dtype=bool) if apart and told.endswith(("times", "convolved", "rows")) else True
    assert np.all((gap <= ERRORS * error + size) | ~np.asarray(rows)), told
    return apart


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(0, 600, 20))
def test_each_row_sees_the_distribution_of_whole_weights(seed):
    check(seed)
