"""Is it worth it to pack the gates of an LSTM into one block, once in each step of training?

The gradients of one LSTM layer over a sequence, in six ways: gates that ``Pack`` joins before the loop over time, the
block itself as the parameter, gates that are joined anew in each step of the loop, a product of its own for each gate,
the same on views of one raw block (``Split``), and torch's LSTM where torch is installed; on a GPU cuDNN's kernel too,
on the vector that ``CudnnLSTM`` makes. All run in one process and in turn, so that ratios are of one machine and hour.

Run: python benchmarks/rnn_blocks.py [repeats]
"""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common.timing import Rows, heading, rows, show, shuffled

import reparax as rpx

SIZES = [(16, 32, 64), (16, 64, 256), (64, 32, 512)]  # batch, time steps, inputs = hidden units
GATES = "ifgo"


def cell(gates: list[jax.Array], c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The new hidden state and memory."""
    i, f, g, o = gates
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def unrolled(gates: Callable[[jax.Array, jax.Array], list[jax.Array]], xs: jax.Array, hidden: int) -> jax.Array:
    """The hidden states of an LSTM of which ``gates`` computes the gates from input and hidden state."""

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        carry = cell(gates(x, carry[0]), carry[1])
        return carry, carry[0]

    zeros = jnp.zeros((xs.shape[1], hidden))
    return jax.lax.scan(step, (zeros, zeros), xs)[1]


def fused(params: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
    """One product for the gates of all inputs, and one for those of the hidden state."""
    hidden = params["W_re"].shape[0]
    return unrolled(lambda x, h: jnp.split(x @ params["W"] + h @ params["W_re"] + params["b"], 4, -1), xs, hidden)


def in_the_loop(params: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
    """The same on parts that are joined in each step."""

    def gates(x: jax.Array, h: jax.Array) -> list[jax.Array]:
        w, u, b = (jnp.concatenate([params[f"{s}_{g}"] for g in GATES], -1) for s in ("input", "hidden", "bias"))
        return jnp.split(x @ w + h @ u + b, 4, -1)

    return unrolled(gates, xs, params["bias_i"].shape[0])


def separate(params: dict[str, jax.Array], xs: jax.Array) -> jax.Array:
    """A product for each gate."""

    def gates(x: jax.Array, h: jax.Array) -> list[jax.Array]:
        return [x @ params[f"input_{g}"] + h @ params[f"hidden_{g}"] + params[f"bias_{g}"] for g in GATES]

    return unrolled(gates, xs, params["bias_i"].shape[0])


LAYOUT = {
    "W": rpx.shared.gates("input", GATES),
    "W_re": rpx.shared.gates("hidden", GATES),
    "b": rpx.shared.gates("bias", GATES),
}
PARTS = {f"{source}_{gate}": rpx.shared.gates(source, gate) for source in ("input", "hidden", "bias") for gate in GATES}


def waited(run: Callable[[Any, jax.Array], jax.Array], params: Any, xs: jax.Array) -> Callable[[], Any]:
    """A call that computes the gradient of a loss and waits for it."""
    gradient = jax.jit(jax.grad(lambda params: jnp.mean(jnp.square(run(params, xs)))))
    return lambda: jax.block_until_ready(gradient(params))


def in_jax(parts: dict[str, jax.Array], xs: jax.Array) -> dict[str, Callable[[], Any]]:
    """A call for each way in jax."""
    block = rpx.shared.convert(parts, PARTS, LAYOUT)
    pack, split = rpx.shared.Pack(LAYOUT), rpx.shared.Split(LAYOUT)
    ways = {
        "packed once (Pack)": waited(lambda raw, xs: fused(pack.apply(raw), xs), pack.init(block), xs),
        "the block is the parameter": waited(fused, block, xs),
        "joined in the loop": waited(in_the_loop, parts, xs),
        "separate gates": waited(separate, parts, xs),
        "separate gates of one block (Split)": waited(
            lambda raw, xs: separate(split.apply(raw), xs), split.init(parts), xs
        ),
    }
    return ways | on_gpu(parts, xs) if jax.default_backend() == "gpu" else ways


def on_gpu(parts: dict[str, jax.Array], xs: jax.Array) -> dict[str, Callable[[], Any]]:
    """The kernel of cuDNN."""
    from jax.experimental import rnn

    steps, batch, hidden = xs.shape
    p = rpx.shared.CudnnLSTM(hidden, hidden, biases=1)
    raw = {"w": {"@cudnn_lstm": {f"{name}_l0": part for name, part in parts.items()}}}
    zeros, lengths = jnp.zeros((1, batch, hidden)), jnp.full(batch, steps, jnp.int32)

    def run(raw: Any, xs: jax.Array) -> jax.Array:
        weights = p.apply(raw)["w"]
        return rnn.lstm(xs.swapaxes(0, 1), zeros, zeros, weights, lengths, hidden, hidden, 1, 0.0, bidirectional=False)[
            0
        ]

    return {"cuDNN (CudnnLSTM)": waited(run, raw, xs)}


def in_torch(xs: jax.Array) -> dict[str, Callable[[], Any]]:
    """The same layer in torch; its weights are others, its sizes the same."""
    import torch

    hidden = xs.shape[-1]
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    module = torch.nn.LSTM(hidden, hidden).to(device)
    inputs = torch.tensor(np.asarray(xs)).to(device)

    def gradient() -> None:
        module.zero_grad()
        torch.mean(torch.square(module(inputs)[0])).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return {f"torch {torch.__version__}": gradient}


def measure(repeats: int) -> dict[str, Rows]:
    """A table for each size."""
    found: dict[str, Rows] = {}
    for batch, steps, hidden in SIZES:
        keys = jax.random.split(jax.random.key(0), len(PARTS) + 1)
        shapes = {"input": (hidden, hidden), "hidden": (hidden, hidden), "bias": (hidden,)}
        parts = {
            name: jax.random.normal(key, shapes[name.partition("_")[0]]) / hidden**0.5
            for name, key in zip(PARTS, keys, strict=False)
        }
        xs = jax.random.normal(keys[-1], (steps, batch, hidden))
        peers = in_torch(xs) if importlib.util.find_spec("torch") else {}
        calls = in_jax(parts, xs) | peers
        for call in calls.values():
            call()  # compiles
        title = f"batch {batch}, {steps} time steps, {hidden} inputs and hidden units"
        found[title] = rows(shuffled(calls, repeats))
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    heading(given)
    show(measure(given))
