"""Kernels in a few bits, and pruned ones, by what they are multiplied with in a few windows of text."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx
from examples.smollm import model, texts
from examples.smollm.model import Config, Params

LENGTH, LEARNED, HELD_OUT, KERNELS = 257, 16, 8, "layers/.*/kernel"
DRAWS = ("prose", "docstrings", "later docstrings")
"""The texts that windows to learn from are drawn from; the manual alone has too few for three draws."""
FROM_DATA = ("AWQ", "GPTQ", "GPTQ by size", "Wanda", "SparseGPT")
"""The ways that learn from windows."""
BITS = [(bits, block) for bits in (4, 3) for block in (128, 64)]
FITS: dict[str, dict[str, Any]] = {
    "rounding": {},
    "HQQ": {"fit": "hqq", "round_zero": False},
    "HQQ from whole zeros": {"fit": "hqq", "round_zero": True},
    "AWQ": {"fit": "awq"},
    "GPTQ": {"fit": "gptq"},
    "GPTQ by size": {"fit": "gptq", "act_order": True},
}
MASKS = {"magnitude": "magnitude", "Wanda": "wanda", "SparseGPT": "sparsegpt"}

STAGES: dict[str, rpx.Parametrization] = {
    "as downloaded": rpx.Chain(),
    **{
        f"{bits} bits, blocks of {block}, {name}": rpx.Stored(f"uint{bits}", block=block, stacked=0, **fit)
        for bits, block in BITS
        for name, fit in FITS.items()
    },
    **{f"50 %, {name}": rpx.MagnitudePrune(0.5, fit=fit, stacked=0) for name, fit in MASKS.items()},
    **{f"2:4, {name}": rpx.sparse.NofM(2, 4, along=0, fit=fit, stacked=0) for name, fit in MASKS.items()},
    "50 % and int4, in one pass": rpx.Stored("int4", block=64, fit="gptq", sparsity=0.5, stacked=0),
    "50 % and int4, SparseGPT then rounding": rpx.Stored("int4", block=64, stacked=0)
    >> rpx.MagnitudePrune(0.5, fit="sparsegpt", stacked=0),
}
"""All numbers have zeros, as in the papers. Kernels of all layers are one array, so stages say ``stacked=0``."""


def windows(tokenizer: Any, draw: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Windows from all over a text: a draw of those that stages learn from, and others of the prose."""
    prose = texts.windows("prose", tokenizer, LENGTH)
    learned, others = texts.windows(DRAWS[draw], tokenizer, LENGTH)[::2], prose[1::2]
    return learned[:: len(learned) // LEARNED][:LEARNED], others[:: len(others) // HELD_OUT][:HELD_OUT]


def seen_in(params: Params, rows: np.ndarray, config: Config) -> Any:
    """What each kernel is multiplied with, two windows at a time."""
    inputs = jax.jit(rpx.inputs(functools.partial(model.loss, config=config), where=KERNELS))
    each = (inputs(params, jnp.asarray(some)) for some in np.split(rows, max(1, len(rows) // 2)))
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), each)


def compressed(p: rpx.Parametrization, params: Params, seen: Any) -> tuple[Params, dict[str, float]]:
    """The weights that went through ``p``, and what its start costs, as XLA plans its memory."""
    start = jax.jit(p.init).lower(params, seen=seen).compile()
    memory: Any = start.memory_analysis()
    begin = time.process_time()
    raw = jax.block_until_ready(start(params, seen=seen))
    seconds = time.process_time() - begin
    return jax.jit(p.fold)(raw), {"seconds": seconds, "bytes": float(memory.temp_size_in_bytes)}
