"""What does a gradient keep of effective weights, and does making them again save memory?

First, residual bytes: what JAX keeps between the forward and the backward pass, by its own account, of all that
parameters and key alone make: noise, masks, effective weights, and the casts and transposes that networks make of them.
The chain is weight norm, noise and dropout: written by hand, by ``apply``, and by ``apply`` under ``remat``; without a
chain, a network keeps casts and transposes. Second, the temporary memory of one compiled step of training. On a GPU,
also the peak of a process that runs this step alone.

Run: python benchmarks/memory.py [repeats]
"""

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else each process would hold most of a GPU

import jax
import jax.numpy as jnp
from common import by_hand
from common.networks import Network, convnet, drawn, lstm, mlp, transformer, transformer_layer, transformer_shapes
from common.timing import Rows, exact, heading, of_programs, peak_of, show

import reparax as rpx

P = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.075) >> rpx.WeightDropout(0.1)
Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]
"""Of a raw tree, a key and data."""
KIB, MIB = 2**10, 2**20


def chain_by_hand(raw: Any, key: jax.Array) -> Any:
    """The chain by ``jax.random``."""
    first, second = jax.random.split(key)
    return by_hand.dropout(by_hand.noise(by_hand.weight_norm(raw), first, 0.075), second, 0.1)


APPLIED: dict[str, tuple[Callable[[Any], Any], Callable[[Any, jax.Array], Any]]] = {
    "by hand": (by_hand.with_lengths, chain_by_hand),
    "by hand, jax.checkpoint": (by_hand.with_lengths, jax.checkpoint(chain_by_hand)),
    "apply": (P.init, P.apply),
}
"""For each way the start of its raw values, and what makes effective weights of them."""


# ---- residuals


def in_bfloat16(network: Network) -> Network:
    """The network computed in half precision, of parameters in single precision."""

    def loss(params: Any, data: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), (params, data))
        return network.loss(*narrow).astype(jnp.float32)

    return replace(network, loss=loss)


def tied(words: int = 128, width: int = 64, batch: int = 32) -> Network:
    """An embedding that is the output layer too."""

    def loss(params: Any, words: jax.Array) -> jax.Array:
        return -jnp.mean(jax.nn.log_softmax(jnp.tanh(params["embed"][words]) @ params["embed"].T)[:, 0])

    return Network(drawn({"embed": (words, width)}), jax.random.randint(jax.random.key(1), (batch,), 0, words), loss)


def conditional(network: Network) -> Network:
    """The network in one branch of ``lax.cond``."""

    def loss(params: Any, data: jax.Array) -> jax.Array:
        return jax.lax.cond(jnp.sum(data) < 1e9, network.loss, lambda params, data: jnp.sum(data), params, data)

    return replace(network, loss=loss)


def stacked(network: Network, layers: int = 4, width: int = 32) -> Network:
    """Layers of the transformer under ``lax.scan``, their parameters stacked."""

    def loss(params: Any, words: jax.Array) -> jax.Array:
        x = params["embed"][words]
        x, _ = jax.lax.scan(lambda x, layer: (transformer_layer(layer, x), None), x, params["layers"])
        return jnp.mean(jnp.square(x))

    shapes = jax.tree.map(lambda x: (layers, *x), transformer_shapes(width), is_leaf=lambda x: isinstance(x, tuple))
    return replace(network, params=drawn({"layers": shapes, "embed": (256, width)}), loss=loss)


CONTEXTS = {
    "MLP": mlp(64, 3, 16),
    "MLP under jit": replace(mlp(64, 3, 16), loss=jax.jit(mlp(64, 3, 16).loss)),
    "MLP in bfloat16": in_bfloat16(mlp(64, 3, 16)),
    "convolution net": convnet(8, 16, 3, 4),
    "tied embedding": tied(),
    "LSTM": lstm(32, 8, 4),
    "LSTM in bfloat16": in_bfloat16(lstm(32, 8, 4)),
    "transformer": transformer(32, 2, 8, 2),
    "scan over layers": stacked(transformer(32, 2, 8, 2)),
    "cond": conditional(mlp(64, 2, 16)),
}


def residuals(network: Network) -> Rows:
    """KiB that are kept of what parameters and key alone make."""

    def with_chain(apply: Callable[[Any, jax.Array], Any]) -> Loss:
        return lambda raw, key, data: network.loss(apply(raw, key), data)

    losses = {name: (start(network.params), with_chain(apply)) for name, (start, apply) in APPLIED.items()}
    raw, loss = losses["apply"]
    losses["remat"] = raw, rpx.remat(loss)
    losses["no chain"] = network.params, with_chain(lambda params, key: params)
    key = jax.random.key(0)
    return exact(
        {
            name: rpx.transforms.saved_residuals(f, raw, key, network.data).bytes("weights") / KIB
            for name, (raw, f) in losses.items()
        }
    )


# ---- compiled steps


def layers_of(apply: Callable[[Any, jax.Array], Any], data: jax.Array, count: int, *, remat: bool) -> Any:
    """The loss of layers under scan, each of which makes its own weights."""

    def body(x: jax.Array, layer: Any, key: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ apply(layer, key)["kernel"])

    made = rpx.remat(body, argnums=(1, 2)) if remat else body

    def loss(raw: Any, key: jax.Array) -> jax.Array:
        def step(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
            return made(x, *given), None

        return jnp.mean(jnp.square(jax.lax.scan(step, data, (raw, jax.random.split(key, count)))[0]))

    return loss


def scanned(name: str, width: int, count: int, batch: int) -> tuple[Any, Any]:
    """A compiled gradient of layers under scan, and its arguments."""
    start, apply = APPLIED["apply" if name == "remat" else name]
    raw = jax.vmap(start)({"kernel": drawn({"kernel": (count, width, width)})["kernel"]})
    loss = layers_of(apply, jnp.ones((batch, width)), count, remat=name == "remat")
    given = raw, jax.random.key(0)
    return jax.jit(jax.grad(loss)).lower(*given).compile(), given


WAYS = (*APPLIED, "remat")
SIZES = {"cpu": (512, 8, 128), "gpu": (4096, 16, 1024)}
"""Units, layers and examples of the scanned layers."""


def size() -> tuple[int, int, int]:
    """The sizes for this device."""
    return SIZES.get(jax.default_backend(), SIZES["gpu"])


def temporary() -> Rows:
    """MiB of temporary memory of a step."""
    sizes = {name: scanned(name, *size())[0].memory_analysis().temp_size_in_bytes / MIB for name in WAYS}
    return exact(sizes)


def peak(name: str) -> float:
    """MiB that this process has held at most when it has run a step; NaN where the device does not say."""
    return peak_of(*scanned(name, *size()))


def peaks() -> Rows:
    """MiB at the peak of a process of its own for each way."""
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned, max_tasks_per_child=1) as pool:
        return exact({name: pool.submit(peak, name).result() for name in WAYS})


def times(repeats: int) -> Rows:
    """Milliseconds of a step."""
    return of_programs({name: scanned(name, *size()) for name in WAYS}, repeats)


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    found = {f"kept of weights, KiB: {name}": residuals(network) for name, network in CONTEXTS.items()}
    width, count, batch = size()
    layers = f"{count} layers of {width} under scan, {batch} examples"
    found[f"temporary memory, MiB: {layers}"] = temporary()
    found[f"step: {layers}"] = times(repeats)
    if jax.default_backend() == "gpu":
        found[f"peak of a process, MiB: {layers}"] = peaks()
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    heading(given)
    show(measure(given))
