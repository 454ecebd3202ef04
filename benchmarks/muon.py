"""Muon beside Adam on a language model of characters, with the axes of raw values from roles; five seeds each.

``python -m benchmarks.muon`` writes ``benchmarks/results/muon.json``. It took half an hour.

Each optimizer has the best of three learning rates, by the mean of the seeds. ``WeightNorm`` and no chain start from
random weights. ``LoRA(8)`` tunes the kernels of the layers of a network that Adam trained on other text, Python source.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax.contrib import muon

import reparax as rpx
from benchmarks.evidence.data import source, text

FILE = Path(__file__).parent / "results" / "muon.json"
LAYERS, WIDTH, HEADS, SIZE, INNER, TIME, BATCH = 2, 64, 4, 16, 256, 32, 16
STEPS, SEEDS = 200, 5
KERNELS = "layers/.*"
CHAINS = {"none": rpx.Chain(), "WeightNorm()": rpx.WeightNorm(where=KERNELS), "LoRA(8)": rpx.LoRA(8, where=KERNELS)}
RATES = {"Adam": (1e-3, 3e-3, 1e-2), "Muon": (3e-3, 1e-2, 3e-2), "Muon per head": (3e-3, 1e-2, 3e-2)}


def init(key: Array, words: int) -> Any:
    """Parameters: a table, the kernels of all layers, each stacked, and the output layer."""
    keys = iter(jax.random.split(key, 9))

    def kernel(*shape: int, inputs: int) -> Array:
        return jax.random.normal(next(keys), shape) * inputs**-0.5

    return {
        "embed": kernel(words, WIDTH, inputs=WIDTH),
        "place": kernel(TIME, WIDTH, inputs=WIDTH),
        "layers": {
            **{name: kernel(LAYERS, WIDTH, HEADS, SIZE, inputs=WIDTH) for name in ("query", "key", "value")},
            "heads": kernel(LAYERS, HEADS, SIZE, WIDTH, inputs=WIDTH),
            "up": kernel(LAYERS, WIDTH, INNER, inputs=WIDTH),
            "down": kernel(LAYERS, INNER, WIDTH, inputs=INNER),
        },
        "out": kernel(WIDTH, words, inputs=WIDTH),
    }


def normed(x: Array) -> Array:
    """RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def loss(params: Any, rows: Array) -> Array:
    """Nats for each character of rows of ``TIME + 1`` characters, predicted from those before it."""

    def layer(x: Array, w: Any) -> tuple[Array, None]:
        q, k, v = (jnp.einsum("btd,dnh->btnh", normed(x), w[name]) for name in ("query", "key", "value"))
        x = x + jnp.einsum("btnh,nhd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), w["heads"])
        return x + jax.nn.gelu(normed(x) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][rows[:, :-1]] + params["place"][None], params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(normed(x) @ params["out"], rows[:, 1:]).mean()


def windows(ids: Array, key: Array, batch: int) -> Array:
    """Rows from random places of a text."""
    places = jax.random.randint(key, (batch,), 0, len(ids) - TIME)
    return jax.vmap(lambda place: jax.lax.dynamic_slice(ids, (place,), (TIME + 1,)))(places)


def made(name: str, rate: Any, p: Any, roles: Any) -> Any:
    """An optimizer, with updates of one size, as the paper of Moonlight advises."""
    if name == "Adam":
        return rpx.optimizer(optax.adam(rate))
    found = rpx.training.muon_dimensions(p, roles, where=KERNELS, per_head=name.endswith("head"))
    return rpx.optimizer(muon(rate, muon_weight_dimension_numbers=found, consistent_rms=0.2))


def trained(p: Any, raw: Any, tx: Any, ids: Array, key: Array) -> Any:
    """The raw tree after all steps."""

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        raw, state = carry
        free, fixed = rpx.partition(raw)
        rows = windows(ids, key, BATCH)
        grads = jax.grad(lambda free: loss(p.apply(rpx.combine(free, fixed)), rows))(free)
        updates, state = tx.update(rpx.combine(grads, jax.tree.map(jnp.zeros_like, fixed)), state, raw)
        return (optax.apply_updates(raw, updates), state), None

    return jax.lax.scan(step, (raw, tx.init(raw)), jax.random.split(key, STEPS))[0][0]


def main() -> None:
    """Runs all, and writes the file."""
    train, other = text(), source()
    ids, held = jnp.asarray(train.ids[:-50_000]), jnp.asarray(train.ids[-50_000:])
    rows = windows(held, jax.random.key(7), 256)
    start = jax.jit(lambda key: init(key, train.size))
    roles = rpx.roles(loss)(start(jax.random.key(0)), rows)
    plain, keys = rpx.Chain(), [jax.random.split(jax.random.key(seed), 4) for seed in range(SEEDS)]
    adam = jax.jit(
        lambda params, key: trained(plain, params, made("Adam", 3e-3, plain, roles), jnp.asarray(other.ids), key)
    )
    starts = {"random": [start(key[0]) for key in keys]}
    starts["tuned"] = [adam(params, key[1]) for params, key in zip(starts["random"], keys, strict=True)]
    found: dict[str, Any] = {}
    for chain, p in CHAINS.items():
        q = p.on(roles)
        for name, rates in RATES.items():

            def run(params: Any, rate: Array, key: Array, name: str = name, q: Any = q) -> Array:
                raw = q.init(params, key[2])
                return loss(q.fold(trained(q, raw, made(name, rate, q, roles), ids, key[3])), rows)

            compiled, row = jax.jit(run), {}
            for rate in rates:
                each = zip(starts["tuned" if "LoRA" in chain else "random"], keys, strict=True)
                row[str(rate)] = [round(float(compiled(params, jnp.asarray(rate), key)), 4) for params, key in each]
            best = min(row, key=lambda rate: statistics.mean(row[rate]))
            found.setdefault(chain, {})[name] = row
            print(chain, name, best, row[best], flush=True)
    FILE.write_text(json.dumps({"steps": STEPS, "losses": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
