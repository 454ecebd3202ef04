"""What does noise of each example's own cost, and what does it spare the gradient?

``apply`` draws once for all examples of a batch; ``rpx.transforms.local_reparametrization`` draws in each product, for
each row. The variance of the gradient is its sum over all weights, over keys, for one batch. Times and temporary
bytes are of the compiled gradient. "Plain" is the network without noise.

Run: python benchmarks/local.py [repeats]
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common.networks import Network, convnet, lstm, mlp, transformer
from common.timing import Rows, exact, heading, rows, show, shuffled

import reparax as rpx

KEY, MIB, KEYS, BATCH = jax.random.key(0), 2**20, 16, 128
NETWORKS: dict[str, Callable[[], Network]] = {
    "MLP": lambda: mlp(batch=BATCH),
    "MLP of 1024 units": lambda: mlp(width=1024, batch=BATCH),
    "convolution net": lambda: convnet(size=8, channels=16, batch=BATCH),
    "transformer of 2 layers": lambda: transformer(layers=2, length=8, batch=BATCH),
    "LSTM": lambda: lstm(hidden=64, steps=10, batch=BATCH),
}
NOISE = {"Gaussian": rpx.Gaussian(0.02), "VarNoise": rpx.VarNoise(0.02)}


def ways(network: Network, p: rpx.Parametrization) -> dict[str, Callable[..., Any]]:
    """For each way the gradient, of raw values, a key and data."""

    def loss(raw: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        return network.loss(p.apply(raw, key), x)

    def plain(raw: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        del key
        return network.loss(p.fold(raw), x)

    losses = {
        "apply": loss,
        "local": rpx.transforms.local_reparametrization(loss),
        "remat(local)": rpx.remat(rpx.transforms.local_reparametrization(loss)),
        "plain": plain,
    }
    return {name: jax.grad(each) for name, each in losses.items()}


def variance(grad: Callable[..., Any], raw: Any, x: jax.Array) -> float:
    """The variance of the gradient over keys, summed over all entries."""

    def moments(total: Any, key: jax.Array, x: jax.Array) -> Any:
        found = grad(raw, key, x)
        return jax.tree.map(lambda t, g: (t[0] + g, t[1] + jnp.sum(jnp.square(g))), total, found, is_leaf=is_pair), None

    def is_pair(x: Any) -> bool:
        return isinstance(x, tuple)

    def summed(raw: Any, x: jax.Array) -> jax.Array:
        start = jax.tree.map(lambda w: (jnp.zeros_like(w), jnp.zeros(())), raw)
        total, _ = jax.lax.scan(lambda total, key: moments(total, key, x), start, jax.random.split(KEY, KEYS))
        pairs = jax.tree.leaves(total, is_leaf=is_pair)
        return sum((square - jnp.sum(jnp.square(mean)) / KEYS for mean, square in pairs), jnp.zeros(())) / (KEYS - 1)

    return float(jax.jit(summed)(raw, x))


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    found: dict[str, Rows] = {}
    for kind, p in NOISE.items():
        for name, make in NETWORKS.items():
            network = make()
            raw, title = p.init(network.params), f"{name}, {kind}, batch {BATCH}"
            grads = ways(network, p)
            noisy = {way: variance(grad, raw, network.data) for way, grad in grads.items() if way in ("apply", "local")}
            found[f"{title}: variance of the gradient"] = exact(noisy)
            args = raw, KEY, network.data
            programs = {way: jax.jit(grad).lower(*args).compile() for way, grad in grads.items()}
            calls = {way: lambda f=f, args=args: jax.block_until_ready(f(*args)) for way, f in programs.items()}
            shuffled(calls, 1)
            planned: dict[str, Any] = {way: f.memory_analysis() for way, f in programs.items()}
            temporary = {way: each.temp_size_in_bytes / MIB for way, each in planned.items()}
            found[f"{title}: temporary MiB"] = exact(temporary)
            outputs = {way: each.output_size_in_bytes / MIB for way, each in planned.items()}
            found[f"{title}: MiB with gradients"] = exact({way: temporary[way] + outputs[way] for way in planned})
            found[f"{title}: ms"] = rows(shuffled(calls, repeats))
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    heading(given)
    show(measure(given))
