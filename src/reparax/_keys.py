"""Keys: one for each random stage, one for each array; the only file that splits them.

A draw depends on the key, the stage's kind (and its number among the random stages of that kind) and the
array's path, and on nothing else: not on how many arrays there are, nor on the other stages.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checked(key: Any, who: str) -> jax.Array:
    """``key`` as a typed scalar key, or an error that says what was passed instead."""
    if not isinstance(key, jax.Array | np.ndarray):
        raise TypeError(
            f"{who} needs a PRNG key, but got {key!r} of type {type(key).__name__}. "
            f"Make one with `jax.random.key(seed)`."
        )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != jnp.uint32 or key.ndim == 0:
            raise TypeError(
                f"{who} needs a PRNG key, but got an array of dtype {key.dtype} and shape {key.shape}. "
                f"Make one with `jax.random.key(seed)`."
            )
        return checked(jax.random.wrap_key_data(jnp.asarray(key)), who)
    if key.ndim > 0:
        raise ValueError(
            f"{who} takes one key, but got a batch of keys of shape {key.shape}. "
            f"Map over them: `jax.vmap(p.apply, in_axes=(None, 0))(raw, keys)`."
        )
    return jnp.asarray(key)


def _fold(key: jax.Array, texts: Sequence[str]) -> list[jax.Array]:
    """One key a text, a function of ``key`` and that text alone: 64 bits of its hash are folded in."""
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    words = np.frombuffer(b"".join(digests), dtype="<u4").reshape(-1, 2)
    keys = jax.vmap(lambda pair: jax.random.fold_in(jax.random.fold_in(key, pair[0]), pair[1]))(words)
    return [keys[i] for i in range(len(texts))]


def per_stage(key: jax.Array | None, kinds: Sequence[str]) -> list[jax.Array | None]:
    """A key for each stage, by its kind and its number among the stages of that kind."""
    if key is None or not kinds:
        return [None for _ in kinds]
    seen: Counter[str] = Counter()
    texts: list[str] = []
    for kind in kinds:
        seen[kind] += 1
        texts.append(f"{kind}@{seen[kind]}")
    return list(_fold(key, texts))


def per_leaf(key: jax.Array, paths: Sequence[str]) -> list[jax.Array]:
    """A key for each array, by its path."""
    return _fold(key, paths)
