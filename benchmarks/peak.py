"""How much memory does one compiled step take at its peak, and how long does it take to trace and to compile?

A step is the loss and its gradient, under weight norm and noise: of a plain network, by hand, by ``apply``, and by
``apply`` under ``remat``. Nothing runs and no array is made: XLA says what temporary memory its program needs. That is
done for this machine, and for a TPU where libtpu is installed (``pip install "jax[tpu]"``), whose wheel holds the whole
compiler. Unrolled layers stand one after the other in the program; scanned ones are made in the body of a scan.

Run: python benchmarks/peak.py
"""

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import by_hand
from common.networks import transformer
from common.timing import Rows, exact, heading, show
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reparax as rpx

P = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.075)
MIB = 2**20
KEY = jax.eval_shape(lambda: jax.random.key(0))
Loss = Callable[[Any, Any], jax.Array]
Step = tuple[Callable[..., jax.Array], Any]


def chain_by_hand(raw: Any, key: jax.Array) -> Any:
    """The chain by ``jax.random``."""
    return by_hand.noise(by_hand.weight_norm(raw), key, 0.075)


def ways(loss: Loss, params: Any) -> dict[str, Step]:
    """For each way a loss of values, a key and data, and the shapes of its values."""
    raw, own = jax.eval_shape(P.init, params), jax.eval_shape(by_hand.with_lengths, params)
    return {
        "plain": (lambda w, key, x: loss(w, x), params),
        "by hand": (lambda raw, key, x: loss(chain_by_hand(raw, key), x), own),
        "apply": (lambda raw, key, x: loss(P.apply(raw, key), x), raw),
        "remat": (rpx.remat(lambda raw, key, x: loss(P.apply(raw, key), x)), raw),
    }


def layer(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """A dense layer in half precision."""
    return jnp.tanh(x.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(jnp.float32)


def unrolled(layers: int, width: int = 2048, batch: int = 512) -> tuple[dict[str, Step], Any]:
    """Dense layers one after the other."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for i in range(layers):
            x = layer(w[f"layer{i}"]["kernel"], x)
        return jnp.mean(x**2)

    shape = jax.ShapeDtypeStruct((width, width), jnp.float32)
    params = {f"layer{i}": {"kernel": shape} for i in range(layers)}
    return ways(loss, params), jax.ShapeDtypeStruct((batch, width), jnp.float32)


def scanned(layers: int, width: int = 2048, batch: int = 512) -> tuple[dict[str, Step], Any]:
    """Dense layers under a scan, whose weights are made in its body."""
    shape = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    raw = jax.eval_shape(jax.vmap(P.init), {"kernel": shape})
    own = jax.eval_shape(jax.vmap(by_hand.with_lengths), {"kernel": shape})

    def over(made: Callable[[Any, jax.Array], Any]) -> Callable[..., jax.Array]:
        def loss(raw: Any, key: jax.Array, x: jax.Array) -> jax.Array:
            def step(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
                return layer(made(*inputs)["kernel"], x), None

            return jnp.mean(jax.lax.scan(step, x, (raw, jax.random.split(key, layers)))[0] ** 2)

        return loss

    steps: dict[str, Step] = {
        "plain": (over(lambda w, key: w), {"kernel": shape}),
        "by hand": (over(chain_by_hand), own),
        "apply": (over(P.apply), raw),
        "remat": (rpx.remat(over(P.apply)), raw),
    }
    return steps, jax.ShapeDtypeStruct((batch, width), jnp.float32)


def gpt2(layers: int, batch: int, length: int) -> tuple[dict[str, Step], Any]:
    """A transformer of the width and the words of GPT-2, whose embedding is its output layer too."""
    losses: list[Loss] = []

    def built() -> Any:
        network = transformer(768, layers, length, batch, 50257)
        losses.append(network.loss)
        return network.params, network.data

    params, data = jax.eval_shape(built)
    return ways(losses[0], params), data


CASES: dict[str, Callable[[], tuple[dict[str, Step], Any]]] = {
    **{f"{n} dense layers of 2048": lambda n=n: unrolled(n) for n in (4, 16)},
    **{f"{n} dense layers of 2048 under scan": lambda n=n: scanned(n) for n in (4, 16, 48)},
    "GPT-2 of 4 layers, batch 1 x 64": lambda: gpt2(4, 1, 64),
    "GPT-2 of 12 layers, batch 1 x 64": lambda: gpt2(12, 1, 64),
    "GPT-2 of 12 layers, batch 8 x 512": lambda: gpt2(12, 8, 512),
}


def tpu(chips: int = 1) -> NamedSharding | None:
    """Where arrays lie that each of some TPUs has, of which the compiler alone is here; None without it."""
    found = importlib.util.find_spec("libtpu")
    if found is None or found.origin is None:
        return None
    library = Path(found.origin).parent / "libtpu.so"
    quiet = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": str(library), **quiet}
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[:chips]
    return NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())


def compiled(step: Step, data: Any, sharding: NamedSharding | None) -> tuple[float, float, float]:
    """MiB of temporary memory, and the seconds of the processor to trace and to compile."""

    def placed(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    loss, values = step
    start = time.process_time()
    traced = jax.jit(jax.value_and_grad(loss)).trace(*jax.tree.map(placed, (values, KEY, data)))
    between = time.process_time()
    memory: Any = traced.lower().compile().memory_analysis()
    return memory.temp_size_in_bytes / MIB, between - start, time.process_time() - between


def compilers() -> dict[str, NamedSharding | None]:
    """The compilers by their names: that of this machine, and that of a TPU where it is installed."""
    if (sharding := tpu()) is not None:
        return {"this machine": None, "TPU v5p": sharding}
    print("libtpu is not installed, so there are no tables of its compiler: pip install 'jax[tpu]'")
    return {"this machine": None}


def measure(repeats: int) -> dict[str, Rows]:
    """All tables."""
    del repeats  # as a compiler gives the same program each time
    heading(1)
    results: dict[str, Rows] = {}
    for where, sharding in compilers().items():
        for title, build in CASES.items():
            steps, data = build()
            found = {name: compiled(step, data, sharding) for name, step in steps.items()}
            tables = {
                f"{title}, {where}: {what}": exact({name: row[i] for name, row in found.items()})
                for i, what in enumerate(("temporary MiB", "seconds to trace", "seconds to compile"))
            }
            show(tables)
            results |= tables
    return results


if __name__ == "__main__":
    measure(1)
