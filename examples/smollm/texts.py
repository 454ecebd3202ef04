"""Texts that are on every machine: what the model can write, and what it is to learn."""

import ast
import functools
import pydoc_data.topics
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
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


def docstrings(*, later: bool) -> str:
    """Paragraphs of plain English in docstrings of Python's library, of one half of its modules."""
    names = sorted(sys.stdlib_module_names)
    half = names[len(names) // 2 :] if later else names[: len(names) // 2]
    files = [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in half]
    trees = [ast.parse(file.read_text()) for file in files if file.exists()]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(node) or "" for tree in trees for node in ast.walk(tree) if isinstance(node, documented))
    paragraphs = (" ".join(each.split()) for text in found for each in text.split("\n\n"))
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
    "docstrings": functools.partial(docstrings, later=False),
    "later docstrings": functools.partial(docstrings, later=True),
    "new": functools.partial(programs, held_out=False),
    "new, held out": functools.partial(programs, held_out=True),
}


@functools.cache
def windows(name: str, tokenizer: Any, length: int) -> np.ndarray:
    """Windows of ``length`` tokens, one after the other, of one of the texts."""
    ids = np.array(tokenizer.encode(TEXTS[name]()).ids)
    return ids[: ids.size // length * length].reshape(-1, length)
