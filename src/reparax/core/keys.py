"""Random keys: one for each random stage and each array. Only this file splits keys.

A draw depends only on the key, the array's path, the stage's kind, the stage's number among the stages of that kind on
the array, and whether ``update`` draws it. It does not depend on how many arrays there are, or on what other stages do.
Noise of small arrays of one type is drawn in one loop; neighbouring noises on an array draw once.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.core import Tracer
from jax.sharding import AxisType

from reparax.core.paths import Names
from reparax.numerics.arithmetic import inlined


class Keys:
    """The keys of one call of a chain; counts which stages have acted on each array so far.

    Args:
      key: The key of the call.
      is_traced: Whether a program may be made of the call. Else each operation runs as a program of its own, and one
        of many results is slow to compile.
    """

    def __init__(self, key: jax.Array | None, *, is_traced: bool = True) -> None:
        self._key, self.is_traced = key, is_traced
        self._arrays: Counter[tuple[str, str]] = Counter()

    @property
    def has_key(self) -> bool:
        """Whether there is a key to draw with."""
        return self._key is not None

    def numbers(self, kind: str, paths: Sequence[str]) -> list[int]:
        """For each array at ``paths``, the number of the stage of ``kind`` that acts on it now."""
        self._arrays.update((kind, path) for path in paths)
        return [self._arrays[kind, path] for path in paths]

    def of_arrays(self, kind: str, number: int, paths: Sequence[str]) -> jax.Array | None:
        """A batch of keys, one for each array, for a stage of this kind and number; None without a key."""
        if self._key is None or not paths:
            return None
        return _fold_texts(_fold_texts(self._key, [f"{kind}@{number}"])[0], paths)

    def of_draws(self, kind: str, draws: Sequence[tuple[int, str]]) -> list[jax.Array | None]:
        """A key for each pair of number and path; None for each without a key."""
        key_of_draw: dict[tuple[int, str], jax.Array] = {}
        for number in {number for number, _ in draws}:
            paths = [path for number_of_draw, path in draws if number_of_draw == number]
            batch = self.of_arrays(kind, number, paths)
            if batch is not None:
                # Where nothing is traced, one at a time: a program of many results is slow to compile.
                keys_of_paths = batch if isinstance(batch, Tracer) else (batch[i] for i in range(len(batch)))
                key_of_draw |= {(number, path): key for path, key in zip(paths, keys_of_paths, strict=True)}
        return [key_of_draw.get(draw) for draw in draws]


def is_one_key(key: Any) -> bool:
    """Whether ``key`` is a typed scalar key."""
    return isinstance(key, jax.Array) and key.ndim == 0 and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def check_key(key: Any, who: object, in_batches: str) -> jax.Array:
    """``key`` as a typed scalar key; otherwise an error that shows what was passed and how to map over several keys."""
    typed_key = _as_typed(key)
    if not isinstance(typed_key, jax.Array) or not jnp.issubdtype(typed_key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{who} needs a PRNG key, but got {_describe_key(key)}. Make one with `jax.random.key(seed)`.")
    if typed_key.ndim > 0:
        raise ValueError(
            f"{who} takes one key, but got a batch of keys of shape {typed_key.shape}. Map over them: `{in_batches}`."
        )
    return typed_key


def _as_typed(key: Any) -> Any:
    """A legacy key, or a batch of them, as typed keys; all else as it is."""
    is_legacy = isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim > 0
    if not is_legacy or key.shape[-1] != jax.random.key_data(jax.random.key(0)).shape[-1]:
        return key
    return jax.random.wrap_key_data(jnp.asarray(key))


def split_key(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An array of keys of this shape, whose draws are independent."""
    return jax.random.split(key, shape)


def keys_of_stack(key: Any, w: Any, stacked: Sequence[int]) -> Any:
    """A key for each of the arrays stacked in ``w`` along these axes; if none are, the key itself, or None."""
    return split_key(key, tuple(w.shape[axis] for axis in stacked)) if key is not None and stacked else key


def key_of_use(key: jax.Array, number: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The key for one use of a draw, from the key of the draw, or the first of its keys, and the number of the use.

    It differs between shards along the mesh axes ``axes``.
    """
    for word in (number, *map(jax.lax.axis_index, axes)):
        key = jax.random.fold_in(key.ravel()[0] if key.ndim else key, word)
    return key


def _describe_key(value: Any) -> str:
    """What came in place of a key: the dtype and shape of an array, else the type, and a plain value."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    number = isinstance(value, int | float | str | np.generic)
    return f"{value!r} of type {type(value).__name__}" if number else f"a value of type {type(value).__name__}"


def _fold_texts(key: jax.Array, texts: Sequence[str]) -> jax.Array:
    """A batch of keys, one for each text; each depends only on ``key`` and on 64 bits of the hash of its text."""
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    words = np.frombuffer(b"".join(digests), dtype="<u4").reshape(-1, 2)
    if isinstance(key, Tracer):
        return _fold_literals(key, tuple(map(tuple, words.tolist())))
    return _fold_words(key, *(np.ascontiguousarray(column) for column in words.T))


@functools.partial(inlined, static_argnums=1)
def _fold_literals(key: jax.Array, words: tuple[tuple[int, int], ...]) -> jax.Array:
    """The keys of pairs of words, traced once for the same pairs.

    The words are literals in the program: a constant array would become an input, and gradients would keep it.
    """
    columns = ([jax.lax.full((1,), word, jnp.uint32) for word in column] for column in zip(*words, strict=True))
    return _fold_words(key, *(jax.lax.concatenate(column, 0) for column in columns))


@inlined
def _fold_words(key: jax.Array, high: Any, low: Any) -> jax.Array:
    """A key for each pair of words: ``fold_in(fold_in(key, high), low)``."""

    def fold_pair(high: Any, low: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, high), low)

    if str(jax.random.key_impl(key)) != "threefry2x32":
        # Under vmap, a key of unsafe_rbg would depend on its neighbours.
        return jnp.stack([fold_pair(*pair) for pair in zip(high, low, strict=True)])
    return jax.vmap(fold_pair)(high, low)


LOOPED = 2**14
"""The largest size of an array that draws in a loop. On a CPU, an array that draws alone adds a tenth of a second to
compilation; an array that draws in a loop uses one core only, in every step."""


def draw_at_sites(
    step: Any, sites: Sequence[Any], arrays: Mapping[Names, Any], keys: Keys, merged_paths: Sequence[str]
) -> dict[int, Array]:
    """For the index of each site of a step that draws its key; for noise its draw.

    An earlier step draws the noise at ``merged_paths``; these count nevertheless, as do sites that draw nothing.
    """
    counted = [i for i, site in enumerate(sites) if site.draw_path is not None]
    numbers = keys.numbers(step.stage.kind, [*(sites[i].draw_path for i in counted), *merged_paths])
    if not step.draws:
        return {}
    groups_of_number = dict[int, dict[Any, list[int]]]()
    for i, number in zip(counted, numbers, strict=False):
        group = _group_key(sites[i], arrays) if step.draws_noise else i
        groups_of_number.setdefault(number, {}).setdefault(i if group is None else group, []).append(i)
    draws = dict[int, Array]()
    for number in sorted(groups_of_number):
        groups = list(groups_of_number[number].values())
        batch = keys.of_arrays(step.stage.kind, number, [sites[i].draw_path for group in groups for i in group])
        assert batch is not None
        starts = accumulate(map(len, groups), initial=0)
        for start, group in zip(starts, groups, strict=False):
            drawn = _part(batch, start, len(group), is_traced=keys.is_traced)
            if step.draws_noise:
                array = jnp.asarray(arrays[sites[group[0]].arrays["w"]])
                draws |= zip(
                    group, _draw_group(sites[group[0]].stage, array, drawn, is_traced=keys.is_traced), strict=True
                )
            else:
                draws[group[0]] = drawn[0]
    return draws


def _draw_group(stage: Any, array: Any, keys: Array, *, is_traced: bool) -> list[Array]:
    """The noise of arrays that draw alike, for each of their keys: in a loop, if there are several."""
    array = jnp.asarray(array)
    if len(keys) == 1:
        return [stage.draw(array, keys[0])]
    draws = stage.draw(array, keys)
    if not is_traced:
        return [jax.lax.squeeze(_part(draws, i, 1, is_traced=False), [0]) for i in range(len(keys))]
    return [jax.lax.squeeze(part, [0]) for part in jax.lax.split(draws, [1] * len(keys))]


def _group_key(site: Any, arrays: Mapping[Names, Any]) -> Any:
    """What small arrays of one type and known sharding share, which draw together; None for one that draws alone."""
    array = jnp.asarray(arrays[site.arrays["w"]])
    sharding = jax.typeof(array).sharding
    is_large = any(map(export.is_symbolic_dim, array.shape)) or array.size > LOOPED
    # On a mesh in Auto mode, arrays may be sharded differently, and only the compiler knows how.
    if is_large or AxisType.Auto in sharding.mesh.axis_types:
        return None
    return type(site.stage), site.stage.shared, array.shape, array.dtype, sharding


def _part(batch: Array, start: int, size: int, *, is_traced: bool) -> Array:
    """Some of a batch. A program has its start as a literal; where each operation is one, each literal is another."""
    if is_traced:
        return jax.lax.slice_in_dim(batch, start, start + size)
    return jax.lax.dynamic_slice_in_dim(batch, start, size)
