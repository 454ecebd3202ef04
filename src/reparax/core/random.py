"""Derives all random keys and draws all random arrays of the library.

A draw is a random array, or the key from which a formula draws a random array. Five things determine a draw: the user's
key, the path of the array, the kind of the stage, its number among the stages of that kind on the array, and whether
``update`` draws. The number of arrays and the other stages do not affect a draw. The noise of small arrays of one type
is drawn in one loop.

A random array has the sharding of the weight that it is combined with. The numbers agree with those of ``jax.random``
for the same key. Words and uniform numbers are equal bit for bit. Normal numbers are more accurate (see ``threefry``),
and may differ in the last bits between compilers. A batch of keys gives the same arrays as each key alone; a loop draws
them, and its body is compiled once. In a jaxpr, normal numbers are the output of a call named :data:`DRAW`, by which
:func:`local_reparametrization` finds them.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from reparax.core.paths import Names, describe
from reparax.numerics import threefry
from reparax.numerics.arithmetic import inlined

DRAW = "reparax_normal"
"""The name of the calls whose outputs are independent standard normal numbers."""


def keys_of_arrays(key: jax.Array, kind: str, number: int, paths: Sequence[str]) -> jax.Array:
    """Derives a batch of keys, one for each array path, for the ``number``-th stage of a kind.

    The key of an array does not depend on the paths of other arrays. The hashed texts, such as ``"var_noise@1"``, must
    not change, because the same user key would then give other random numbers.
    """
    return _fold_texts(_fold_texts(key, [f"{kind}@{number}"])[0], paths)


def keys_of_draws(key: jax.Array | None, kind: str, draws: Sequence[tuple[int, str]]) -> list[jax.Array | None]:
    """Derives a key for each pair of a stage's number and an array's path, in order; all None if ``key`` is None.

    ``keys_of_draws(key, "lora", [(1, "a/kernel"), (2, "a/kernel")])`` returns two keys, for two ``LoRA`` stages on one
    array. Equal pairs get the same key.
    """
    if key is None:
        return [None] * len(draws)
    key_of_draw = dict[tuple[int, str], jax.Array]()
    for number in {number for number, _ in draws}:
        paths = [path for number_of_draw, path in draws if number_of_draw == number]
        batch = keys_of_arrays(key, kind, number, paths)
        # If nothing is traced, take the keys one at a time, because a call with many results is slow to compile.
        keys_of_paths = batch if isinstance(batch, Tracer) else (batch[i] for i in range(len(batch)))
        key_of_draw |= {(number, path): key for path, key in zip(paths, keys_of_paths, strict=True)}
    return [key_of_draw[draw] for draw in draws]


def is_one_key(key: Any) -> bool:
    """Returns whether ``key`` is a typed scalar key, as from ``jax.random.key``; False for a legacy key or a batch."""
    return isinstance(key, jax.Array) and key.ndim == 0 and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def check_key(key: Any, who: object, in_batches: str) -> jax.Array:
    """Returns ``key`` as a typed scalar key; a legacy key is converted. Raises an error for anything else.

    Args:
      key: What the user passed.
      who: The call, for errors.
      in_batches: The code that a user with a batch of keys should write instead; the error shows it.
    """
    typed_key = _as_typed(key)
    if not isinstance(typed_key, jax.Array) or not jnp.issubdtype(typed_key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{who} needs a PRNG key, but got {describe(key)}. Make one with `jax.random.key(seed)`.")
    if typed_key.ndim > 0:
        raise ValueError(
            f"{who} takes one key, but got a batch of keys of shape {typed_key.shape}. Map over them: `{in_batches}`."
        )
    return typed_key


def _as_typed(key: Any) -> Any:
    """Converts a legacy key, or a batch of them, to typed keys; returns anything else unchanged.

    A legacy key is an array of uint32. The size of its last axis is the number of words in a key: two for threefry.
    """
    is_legacy = isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim > 0
    if not is_legacy or key.shape[-1] != jax.random.key_data(jax.random.key(0)).shape[-1]:
        return key
    return jax.random.wrap_key_data(jnp.asarray(key))


def split_key(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Splits a key into an array of keys of the given shape, which give independent random numbers."""
    return jax.random.split(key, shape)


def keys_of_stack(key: Any, w: Any, stacked: Sequence[int]) -> Any:
    """Splits a key into one key for each of the arrays that ``w`` stacks along the axes ``stacked``.

    For ``w`` of shape (8, 6, 4), stacked along axis 0, the result has 8 keys. If there are no such axes, or ``key`` is
    None, ``key`` itself is returned.
    """
    return split_key(key, tuple(w.shape[axis] for axis in stacked)) if key is not None and stacked else key


def key_of_use(key: jax.Array, number: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Derives the key for one use of a random array.

    :func:`local_reparametrization` gives each use of a weight noise a key of its own. The key is derived from ``key``,
    with which the array was drawn (the first of a batch of keys), and from the ``number`` of the use. The key also
    differs between the shards along the mesh axes ``axes``, so this function must be called in a ``shard_map`` over
    these axes.
    """
    for word in (number, *map(jax.lax.axis_index, axes)):
        key = jax.random.fold_in(key.ravel()[0] if key.ndim else key, word)
    return key


def _fold_texts(key: jax.Array, texts: Sequence[str]) -> jax.Array:
    """Derives a batch of keys, one for each text. Each key depends only on ``key`` and on a 64-bit hash of the text.

    Each hash is folded in as two words of 32 bits, because ``jax.random.fold_in`` takes one such word.
    """
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    words = np.frombuffer(b"".join(digests), dtype="<u4").reshape(-1, 2)
    if isinstance(key, Tracer):  # If the words were arrays, they would be stored for the backward pass.
        return _fold_literals(key, tuple(map(tuple, words.tolist())))
    return _fold_words(key, *(np.ascontiguousarray(column) for column in words.T))


@functools.partial(inlined, static_argnums=1)
def _fold_literals(key: jax.Array, words: tuple[tuple[int, int], ...]) -> jax.Array:
    """Calls :func:`_fold_words` with words that are literals in the jaxpr. Calls with equal words share one trace.

    A constant array would instead become an input of the jaxpr, and would be stored for the backward pass.
    """
    columns = ([jax.lax.full((1,), word, jnp.uint32) for word in column] for column in zip(*words, strict=True))
    return _fold_words(key, *(jax.lax.concatenate(column, 0) for column in columns))


@inlined
def _fold_words(key: jax.Array, high: Any, low: Any) -> jax.Array:
    """Derives a batch of keys, one for each pair of words: ``fold_in(fold_in(key, high), low)``.

    ``high`` and ``low`` are arrays of uint32 that hold the first and second words of the pairs.
    """

    def fold_pair(high: Any, low: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, high), low)

    if str(jax.random.key_impl(key)) != "threefry2x32":
        # Under vmap, a key of unsafe_rbg would depend on the other keys of the batch.
        return jnp.stack([fold_pair(*pair) for pair in zip(high, low, strict=True)])
    return jax.vmap(fold_pair)(high, low)


LOOPED = 2**14
"""The largest size of an array whose noise is drawn in one loop with the noise of other arrays. On a CPU, an array
drawn by itself adds a tenth of a second to compilation, but an array drawn in a loop uses only one core in every step.
"""


def draw_at_sites(
    step: Any, acting: Sequence[int], arrays: Mapping[Names, Any], key: Array, *, is_traced: bool
) -> dict[int, Array]:
    """Returns the key of each acting site of a step, by its index; if the step draws noise, returns the noise instead.

    Sites are grouped twice: sites with the same number (see :class:`Site`) get their keys in one batch, and within
    these groups, the small arrays of one type are drawn in one loop. Grouping does not change the random numbers.

    Args:
      step: A step of a plan, with ``draws`` true.
      acting: The indices of the sites that draw.
      arrays: The arrays that the step reads.
      key: The key of the whole call.
      is_traced: Whether the call is being traced. If not, each operation is compiled and run separately, which is slow
        for an operation with many results.
    """
    sites, groups_of_number = step.sites, dict[int, dict[Any, list[int]]]()
    for i in acting:
        # Without a group key, a site is a group of its own, whose key is its index.
        group = _group_key(sites[i], arrays) if step.draws_noise else None
        groups = groups_of_number.setdefault(sites[i].draw_number, {})
        groups.setdefault(i if group is None else group, []).append(i)
    draws = dict[int, Array]()
    for number in sorted(groups_of_number):
        groups = groups_of_number[number].values()
        batch = keys_of_arrays(key, step.stage.kind, number, [sites[i].draw_path for group in groups for i in group])
        # The zip is not strict, because there is one more start than groups: `accumulate` also yields the total.
        for start, group in zip(accumulate(map(len, groups), initial=0), groups, strict=False):
            keys, first = _slice_batch(batch, start, len(group), is_traced=is_traced), sites[group[0]]
            if step.draws_noise:
                drawn = _draw_group(first.stage, arrays[first.arrays["w"]], keys, is_traced=is_traced)
                draws |= zip(group, drawn, strict=True)
            else:  # Without noise, each group is a single site.
                draws[group[0]] = keys[0]
    return draws


def _draw_group(stage: Any, array: Any, keys: Array, *, is_traced: bool) -> list[Array]:
    """Draws one noise array for each key, in one loop. The arrays have the same type, and their stages are equal.

    ``array`` represents all of these arrays: only its type is read. ``keys`` is a batch, and each result has the shape
    of a single array.
    """
    array = jnp.asarray(array)
    if len(keys) == 1:
        return [stage.draw(array, keys[0])]
    draws = stage.draw(array, keys)
    if not is_traced:
        return [jax.lax.squeeze(_slice_batch(draws, i, 1, is_traced=False), [0]) for i in range(len(keys))]
    return [jax.lax.squeeze(part, [0]) for part in jax.lax.split(draws, [1] * len(keys))]


def _group_key(site: Any, arrays: Mapping[Names, Any]) -> Any:
    """Returns a hashable key that is equal for arrays whose noise is drawn together; None for an array drawn by itself.

    Small arrays of equal type and sharding are drawn together if their stages share axes in the same way.
    """
    array = jnp.asarray(arrays[site.arrays["w"]])
    sharding = jax.typeof(array).sharding
    is_large = any(map(export.is_symbolic_dim, array.shape)) or array.size > LOOPED
    # On a mesh in Auto mode, arrays may be sharded differently, and only the compiler knows how.
    if is_large or AxisType.Auto in sharding.mesh.axis_types:
        return None
    return type(site.stage), site.stage.shared, array.shape, array.dtype, sharding


def _slice_batch(batch: Array, start: int, size: int, *, is_traced: bool) -> Array:
    """Returns ``batch[start : start + size]`` of a batch of keys or arrays.

    If nothing is traced, ``start`` is passed as an argument of the operation, because each literal ``start`` would
    require another compilation.
    """
    if is_traced:
        return jax.lax.slice_in_dim(batch, start, start + size)
    return jax.lax.dynamic_slice_in_dim(batch, start, size)


# The functions below draw random arrays.


def normal(key: Array, w: Array) -> Array:
    """Draws standard normal numbers of the shape and dtype of ``w``; complex numbers also have variance 1."""
    return reparax_normal(key, w.shape, w.dtype, _sharding_of_draw(w))


def uniform(key: Array, w: Array, shared_axes: tuple[int, ...]) -> Array:
    """Draws uniform numbers in [0, 1), multiples of 2^-23, in the shape of ``w`` with size 1 along ``shared_axes``."""
    shape = tuple(1 if axis in shared_axes else size for axis, size in enumerate(w.shape))
    return _draw_uniform(key, shape, jnp.dtype(jnp.float32), _sharding_of_draw(w, shared_axes))


def _sharding_of_draw(w: Array, shared_axes: tuple[int, ...] = ()) -> NamedSharding:
    """Returns the sharding of ``w``, but without sharding along ``shared_axes``, where the random array has size 1."""
    sharding = jax.typeof(w).sharding
    spec = [None if axis in shared_axes else name for axis, name in enumerate(sharding.spec)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw_uniform(key: Array, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    """Draws uniform numbers in [0, 1): random mantissa bits give a number in [1, 2), from which 1 is subtracted.

    A batch of keys gives a batch of arrays. ``dtype`` is a float of 32 or 64 bits.
    """
    if key.ndim:
        return jax.lax.map(lambda one_key: _draw_uniform(one_key, shape, dtype, sharding), key)
    digits = jnp.finfo(dtype)
    words = _draw_words(key, shape, digits.bits, sharding)
    one_bits = np.ones((), dtype).view(words.dtype)  # The sign and exponent of a number in [1, 2).
    # Keep the highest bits of each word: as many as the mantissa has.
    mantissa = words >> words.dtype.type(digits.bits - digits.nmant)
    return _prevent_fusion(jax.lax.bitcast_convert_type(mantissa | one_bits, dtype) - dtype.type(1))


def _draw_words(key: Array, shape: tuple[int, ...], width: int, sharding: NamedSharding) -> Array:
    """Draws words of 32 or 64 bits, equal to those of ``jax.random.bits``.

    If the module ``threefry`` supports the key and the shape, it computes the words, because XLA can fuse its
    operations.
    """
    if threefry.is_supported(key, shape):
        return threefry.bits(key, shape, width, sharding)
    return jax.random.bits(key, shape, f"uint{width}", out_sharding=sharding)


def _prevent_fusion(x: Array) -> Array:
    """Returns ``x``. If ``x`` is a vector, XLA cannot fuse its computation into the operations that read ``x``.

    A bias is repeated for each row of data. On a CPU, XLA of JAX 0.11 and newer would fuse the random numbers into this
    repetition, and take minutes to compile it.
    """
    axes = [n for n in x.shape if export.is_symbolic_dim(n) or n > 1]
    return jax.lax.optimization_barrier(x) if len(axes) < 2 else x


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def reparax_normal(key: Array, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    """Draws standard normal numbers; a batch of keys gives a batch of arrays.

    A jaxpr shows a call with this function's name, :data:`DRAW`, by which transforms find random arrays. The call must
    therefore not be inlined or renamed.
    """
    if key.ndim:
        return jax.lax.map(lambda one_key: reparax_normal(one_key, shape, dtype, sharding), key)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        real, imaginary = (reparax_normal(one_key, shape, part, sharding) for one_key in split_key(key, (2,)))
        return jax.lax.complex(real, imaginary) / dtype.type(math.sqrt(2))
    if dtype == jnp.float32:
        return _prevent_fusion(threefry.normal(_draw_words(key, shape, 32, sharding)))
    # Scale to the open interval (-1, 1), since `erf_inv` is infinite at both ends.
    below_one = np.nextafter(dtype.type(1), dtype.type(0))
    uniform = _draw_uniform(key, shape, dtype, sharding) * dtype.type(2) - below_one
    return dtype.type(math.sqrt(2)) * jax.lax.erf_inv(uniform)
