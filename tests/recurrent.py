"""Recurrent cells of four libraries, as functions of their parameters."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

INPUTS, HIDDEN, STEPS, BATCH = 3, 2, 4, 5


def normal(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), jnp.float32)


XS, TARGET = normal(STEPS, BATCH, INPUTS, seed=0), normal(STEPS, BATCH, HIDDEN, seed=1)


def over_time(step, start):
    """The hidden states of all steps: ``step`` takes and gives a carry, and gives the hidden state."""
    return jax.lax.scan(step, start, XS)[1]


def zeros():
    return jnp.zeros((BATCH, HIDDEN))


def linen_lstm(cell, params):
    return over_time(lambda carry, x: cell(HIDDEN).apply({"params": params}, carry, x), (zeros(), zeros()))


def linen_gru(params):
    return over_time(lambda h, x: linen.GRUCell(HIDDEN).apply({"params": params}, h, x), zeros())


def nnx_cell(cell, start, params):
    graph, state = nnx.split(cell(INPUTS, HIDDEN, rngs=nnx.Rngs(0)))
    filled = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
    return over_time(lambda carry, x: nnx.merge(graph, filled)(carry, x), start)


def equinox_lstm(params):
    cell = eqx.nn.LSTMCell(INPUTS, HIDDEN, key=jax.random.key(0))
    cell = eqx.tree_at(lambda c: [c.weight_ih, c.weight_hh, c.bias], cell, [params[n] for n in EQUINOX[:3]])

    def step(carry, x):
        carry = jax.vmap(cell)(x, carry)
        return carry, carry[0]

    return over_time(step, (zeros(), zeros()))


def equinox_gru(params):
    cell = eqx.nn.GRUCell(INPUTS, HIDDEN, key=jax.random.key(0))
    cell = eqx.tree_at(lambda c: [c.weight_ih, c.weight_hh, c.bias, c.bias_n], cell, [params[n] for n in EQUINOX])

    def step(h, x):
        h = jax.vmap(cell)(x, h)
        return h, h

    return over_time(step, zeros())


EQUINOX = ("weight_ih", "weight_hh", "bias", "bias_n")


def haiku_cell(core, params):
    def unrolled(xs):
        cell = core(HIDDEN, name="cell")
        return hk.static_unroll(cell, xs, cell.initial_state(BATCH))[0]

    modules = {"cell": params} if core is hk.GRU else {"cell/linear": params["linear"]}
    return hk.without_apply_rng(hk.transform(unrolled)).apply(modules, XS)


LSTM = {
    **{f"i{g}": {"kernel": normal(INPUTS, HIDDEN, seed=i)} for i, g in enumerate("ifgo", 10)},
    **{
        f"h{g}": {"kernel": normal(HIDDEN, HIDDEN, seed=i), "bias": normal(HIDDEN, seed=i + 4)}
        for i, g in enumerate("ifgo", 20)
    },
}
GRU = {
    **{
        f"i{g}": {"kernel": normal(INPUTS, HIDDEN, seed=i), "bias": normal(HIDDEN, seed=i + 3)}
        for i, g in enumerate("rzn", 30)
    },
    **{f"h{g}": {"kernel": normal(HIDDEN, HIDDEN, seed=i)} for i, g in enumerate("rzn", 40)},
}
GRU["hn"]["bias"] = normal(HIDDEN, seed=50)
CELLS = {
    "flax.lstm": lambda params: linen_lstm(linen.LSTMCell, params),
    "flax.lstm, optimized": lambda params: linen_lstm(linen.OptimizedLSTMCell, params),
    "nnx.lstm": lambda params: nnx_cell(nnx.LSTMCell, (zeros(), zeros()), params),
    "nnx.optimized_lstm": lambda params: nnx_cell(nnx.OptimizedLSTMCell, (zeros(), zeros()), params),
    "equinox.lstm": equinox_lstm,
    "haiku.lstm": lambda params: haiku_cell(hk.LSTM, params),
    "flax.gru": linen_gru,
    "equinox.gru": equinox_gru,
}
