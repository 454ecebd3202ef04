"""What do stages add to the communication of a large model that is spread over many devices?

A step of training of a transformer of 7 billion parameters, with Adam, is compiled for 8 and for 64 simulated devices,
a mesh of data times model; no array is made. Each layer's weights are made in a scan over the layers, and again in the
backward pass. Two layouts: weights cut along the model axis alone (tensor parallel), and along the data axis too
(fully sharded). Counted are the collectives of the compiled program by kind and their bytes on one device, where what
stands in the loop over the layers counts once, and the temporary memory of one device.

Run: python benchmarks/scale.py
"""

import math
import os
import re
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

import jax
import jax.numpy as jnp
import optax
from common.timing import Rows, exact, machine, show
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reparax as rpx

jax.config.update("jax_num_cpu_devices", 64)

LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 32, 4096, 32, 11008, 32000
BATCH, LENGTH = 64, 512
TX = optax.adam(1e-4)

# The axis of each weight along which heads, inner units or words lie, which the model axis cuts.
CUT = {"query": 1, "key": 1, "value": 1, "out": 0, "gate": 1, "up": 1, "down": 0}
SHAPES = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH)) | {
    "gate": (WIDTH, INNER),
    "up": (WIDTH, INNER),
    "down": (INNER, WIDTH),
}
MESHES = {8: (2, 4), 64: (8, 8)}
LAYOUTS = {"tensor parallel": None, "fully sharded": "data"}
CHAINS = {
    "plain": rpx.Chain(),
    "noise and dropout": rpx.VarNoise(0.075) >> rpx.WeightDropout(0.1),
    "weight norm": rpx.WeightNorm(axis=-1),
    "weight norm, noise, dropout": rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.075) >> rpx.WeightDropout(0.1),
}


def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Attention and a gated block, both on normalized inputs."""

    def heads(name: str) -> jax.Array:
        return (normalized(x) @ w[name]).reshape(*x.shape[:2], HEADS, -1)

    mixed = jax.nn.dot_product_attention(heads("query"), heads("key"), heads("value"), is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["out"]
    return x + (jax.nn.silu(normalized(x) @ w["gate"]) * (normalized(x) @ w["up"])) @ w["down"]


def normalized(x: jax.Array) -> jax.Array:
    """Root mean square 1."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def loss(p: rpx.Parametrization, raw: Any, key: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean log-probability of each token after those before it, negated."""

    @jax.checkpoint
    def step(x: jax.Array, inputs: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        return layer(p.apply(*inputs), x), None

    table = p.apply(raw["ends"], key)
    x = table["embed"][tokens[:, :-1]]
    x, _ = jax.lax.scan(step, x, (raw["layers"], jax.random.split(key, LAYERS)))
    scores = jax.nn.log_softmax(normalized(x) @ table["unembed"])
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def abstract(p: rpx.Parametrization, mesh: Mesh, rows: str | None) -> tuple[Any, Any]:
    """The shapes of the raw tree, and its shardings: the model axis cuts one axis of a weight, ``rows`` the other."""
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    ends = {
        "embed": jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32),
        "unembed": jax.ShapeDtypeStruct((WIDTH, VOCABULARY), jnp.float32),
    }
    specs = {name: P(rows, "model") if axis else P("model", rows) for name, axis in CUT.items()}
    of_layer = p.shardings(specs, mesh, like=arrays)
    shardings = {
        "ends": p.shardings({"embed": P("model", rows), "unembed": P(rows, "model")}, mesh, like=ends),
        "layers": jax.tree.map(lambda sharding: NamedSharding(mesh, P(None, *sharding.spec)), of_layer),
    }
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((LAYERS, *x.shape), x.dtype), arrays)
    raw = {"ends": jax.eval_shape(p.init, ends), "layers": jax.eval_shape(jax.vmap(p.init), stacked)}
    return raw, shardings


def compiled(p: rpx.Parametrization, mesh: Mesh, rows: str | None) -> Any:
    """The program of one step, for all devices of ``mesh``."""
    raw, raws = abstract(p, mesh, rows)
    state = jax.eval_shape(TX.init, raw)
    states = rpx.training.state_shardings(state, raw, raws)

    def step(raw: Any, state: Any, key: jax.Array, tokens: jax.Array) -> tuple[Any, Any]:
        gradients = jax.grad(lambda raw: loss(p, raw, key, tokens))(raw)
        updates, state = TX.update(gradients, state, raw)
        return optax.apply_updates(raw, updates), state

    everywhere, batches = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    placed = jax.jit(
        step,
        in_shardings=(raws, states, everywhere, batches),
        out_shardings=(raws, states),
        donate_argnums=(0, 1),
    )
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return placed.lower(raw, state, jax.eval_shape(lambda: jax.random.key(0)), tokens).compile()


def collectives(text: str) -> dict[str, list[int]]:
    """For each kind of collective in a compiled program, the bytes of each array that it makes on one device."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found: dict[str, list[int]] = {}
    for types, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        for bits, lengths in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", types):
            found.setdefault(kind, []).append(int(bits) // 8 * math.prod(int(n) for n in lengths.split(",") if n))
    return found


def measure(repeats: int = 1) -> dict[str, Rows]:
    """All tables, by title; nothing is timed, so that ``repeats`` changes nothing."""
    del repeats
    found: dict[str, Rows] = {}
    for devices, shape in MESHES.items():
        mesh = jax.make_mesh(shape, ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:devices])
        for layout, rows in LAYOUTS.items():
            programs = {name: compiled(p, mesh, rows) for name, p in CHAINS.items()}
            made = {name: collectives(program.as_text()) for name, program in programs.items()}
            title = f"{devices} devices, {layout}"
            for kind in sorted(set().union(*made.values())):
                found[f"{title}: arrays made by {kind}"] = exact({n: len(by.get(kind, [])) for n, by in made.items()})
            sent = {name: sum(map(sum, by.values())) / 2**20 for name, by in made.items()}
            found[f"{title}: MiB made by collectives on one device"] = exact(sent)
            held = {name: program.memory_analysis().temp_size_in_bytes / 2**30 for name, program in programs.items()}
            found[f"{title}: GiB of temporary memory on one device"] = exact(held)
    return found


if __name__ == "__main__":
    print(machine())
    show(measure())
