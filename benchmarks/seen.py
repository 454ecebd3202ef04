"""What does it cost to see what weights are multiplied with?

``inputs`` against the forward pass alone, on the networks of the other benchmarks and on layers of a scan: the step,
and the memory that the compiler plans for it besides arguments and results. All run in one process, shuffled.

Run: python benchmarks/seen.py [repeats]
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import networks
from common.timing import Rows, exact, heading, rows, show, shuffled

import reparax as rpx

NETWORKS: dict[str, networks.Network] = {
    "6 layers of 1024, batch 512": networks.mlp(1024, 6, 512),
    "convolutions": networks.convnet(),
    "transformer": networks.transformer(),
}


def scanned(width: int = 512, layers: int = 8, batch: int = 512) -> networks.Network:
    """The layers of a perceptron under a scan."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, w)[0]))

    return networks.Network(networks.drawn((layers, width, width)), networks.data(batch, width), loss)


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    found: dict[str, Rows] = {}
    for name, network in {**NETWORKS, "8 scanned layers of 512, batch 512": scanned()}.items():
        ways: dict[str, Callable[..., Any]] = {"forward": network.loss}
        ways |= {moments: rpx.inputs(network.loss, moments=moments) for moments in ("largest", "diagonal", "full")}
        compiled = {way: jax.jit(fun).lower(network.params, network.data).compile() for way, fun in ways.items()}
        calls = {
            way: lambda run=run, network=network: jax.block_until_ready(run(network.params, network.data))
            for way, run in compiled.items()
        }
        found[f"{name}: ms"] = rows(shuffled(calls, repeats), "forward")
        plans = {way: run.memory_analysis() for way, run in compiled.items()}
        found[f"{name}: temporary MiB"] = exact({way: plan.temp_size_in_bytes / 2**20 for way, plan in plans.items()})
        results = {way: plan.output_size_in_bytes / 2**20 for way, plan in plans.items()}
        found[f"{name}: MiB of results"] = exact(results)
    return found


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    heading(given[0] if given else 10)
    show(measure(given[0] if given else 10))
