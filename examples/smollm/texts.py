"""Texts that are on every machine: what the model can write, and what it is to learn."""

import functools
import pydoc_data.topics
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

PROSE = re.compile(r"[A-Za-z0-9 ,.;:'()\"-]{200,}")
"""A paragraph of plain English."""


def prose() -> str:
    """Paragraphs of Python's manual, which comes with Python, without those that contain code or markup."""
    paragraphs = (" ".join(each.split()) for text in pydoc_data.topics.topics.values() for each in text.split("\n\n"))
    return "\n\n".join(dict.fromkeys(each for each in paragraphs if PROSE.fullmatch(each)))


def programs(*, held_out: bool) -> str:
    """Gradients of functions of JAX, in StableHLO, as JAX prints them; every fourth function is held out."""
    chosen = [function for i, function in enumerate(_functions()) if (i % 4 == 3) == held_out]
    return "".join(map(_program, chosen))


def _functions() -> list[Callable[[Array], Array]]:
    names = {
        jax.nn: "relu softmax silu log_softmax gelu elu softplus standardize celu log_sigmoid mish selu soft_sign",
        jnp: "cumsum var sort std tanh cumprod prod log1p max median ptp sinc diff exp trace",
        jnp.linalg: "norm cholesky inv det qr slogdet pinv svdvals",
        jax.scipy.special: "gammaln erf i0e logsumexp ndtr digamma i1e expit entr log_ndtr",
    }
    found = ((module, name) for module, several in names.items() for name in several.split())
    return [getattr(module, name) for module, name in found if hasattr(module, name)]


def _program(function: Callable[[Array], Array]) -> str:
    def loss(x: Array) -> Array:
        return sum(jnp.sum(part) for part in jax.tree.leaves(function(x @ x.T)))

    return jax.jit(jax.grad(loss)).lower(jax.ShapeDtypeStruct((8, 4), jnp.float32)).as_text()


TEXTS: dict[str, Callable[[], str]] = {
    "prose": prose,
    "new": functools.partial(programs, held_out=False),
    "new, held out": functools.partial(programs, held_out=True),
}


@functools.cache
def windows(name: str, tokenizer: Any, length: int) -> np.ndarray:
    """Windows of ``length`` tokens, one after the other, of one of the texts."""
    ids = np.array(tokenizer.encode(TEXTS[name]()).ids)
    return ids[: ids.size // length * length].reshape(-1, length)
