"""Derives all random keys and draws all random arrays of the library.

A draw is a random array, or the key from which a formula draws a random array. Five things determine a draw: the user's
key, the path of the array, the kind of the stage, its position among the stages of that kind on the array, and whether
``update`` draws. The number of arrays and the other stages do not affect a draw. Noise for small arrays of the same
shape and dtype is drawn in one loop.

A random array has the sharding of the weight that it is combined with. For the same key, the numbers agree with those
of ``jax.random``. Random words and uniform numbers are equal bit for bit. Normal numbers are more accurate (see
``threefry``), and may differ in the last bits between compilers. A batch of keys gives the same arrays as each key
alone: a loop, whose body is compiled once, draws the arrays. In a jaxpr, normal numbers are the output of a call named
:data:`DRAW`, by which :func:`local_reparametrization` finds them.
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
"""The name, in a jaxpr, of the calls that draw standard normal numbers."""


def keys_of_arrays(key: jax.Array, kind: str, number: int, paths: Sequence[str]) -> jax.Array:
    """Returns a batch of keys, one for each array path, for the ``number``-th stage of a kind, such as ``"lora"``.

    The key for an array does not depend on the paths of other arrays. If the hashed texts, such as ``"var_noise@1"``,
    changed, the same user key would give other random numbers.
    """
    return _fold_texts(_fold_texts(key, [f"{kind}@{number}"])[0], paths)


def keys_of_draws(key: jax.Array | None, kind: str, draws: Sequence[tuple[int, str]]) -> list[jax.Array | None]:
    """Returns a list of keys, one for each pair of a stage's number and an array's path; all None if ``key`` is None.

    ``keys_of_draws(key, "lora", [(1, "a/kernel"), (2, "a/kernel")])`` returns two keys, for the first and the second
    ``LoRA`` stage on one array. Equal pairs get the same key.
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
    """Returns whether ``key`` is one typed PRNG key, as from ``jax.random.key``; False for a legacy key or a batch."""
    return isinstance(key, jax.Array) and key.ndim == 0 and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def check_key(key: Any, who: object, in_batches: str) -> jax.Array:
    """Returns ``key`` as a single typed PRNG key; a legacy key is converted. Raises an error for anything else.

    Args:
      key: The value that the user passed as a key.
      who: The call that errors name.
      in_batches: Code for a user who passes a batch of keys, as a ``jax.vmap`` of the call; the error shows it.
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
    """Converts a legacy PRNG key, or a batch of legacy keys, to typed keys; returns anything else unchanged.

    A legacy key is a uint32 array whose last axis holds the words of the key: two words for threefry.
    """
    is_legacy = isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim > 0
    if not is_legacy or key.shape[-1] != jax.random.key_data(jax.random.key(0)).shape[-1]:
        return key
    return jax.random.wrap_key_data(jnp.asarray(key))


def split_key(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Splits a PRNG key into an array of keys of the given shape. Their random numbers are independent."""
    return jax.random.split(key, shape)


def keys_of_stack(key: Any, w: Any, stacked: Sequence[int]) -> Any:
    """Splits a PRNG key into one key for each of the arrays that ``w`` stacks along the axes ``stacked``.

    For ``w`` of shape (8, 6, 4), stacked along axis 0, the result has 8 keys. If ``stacked`` is empty, or ``key`` is
    None, ``key`` itself is returned.
    """
    return split_key(key, tuple(w.shape[axis] for axis in stacked)) if key is not None and stacked else key


def key_of_use(key: jax.Array, number: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns the PRNG key for one use of a random weight, so that each use in a network gets its own noise.

    :func:`local_reparametrization` needs such keys. The result is derived from ``key``, with which the weight was drawn
    (or the first key, if it is a batch), and from ``number``, which counts the uses. The result also differs between
    the shards along the mesh axes ``axes``, so this function must be called in a ``shard_map`` over these axes.
    """
    for word in (number, *map(jax.lax.axis_index, axes)):
        key = jax.random.fold_in(key.ravel()[0] if key.ndim else key, word)
    return key


def _fold_texts(key: jax.Array, texts: Sequence[str]) -> jax.Array:
    """Returns a batch of keys, one for each text. Each key depends only on ``key`` and on a 64-bit hash of the text.

    Each hash is folded in as two 32-bit words, because ``jax.random.fold_in`` takes one such word.
    """
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    words = np.frombuffer(b"".join(digests), dtype="<u4").reshape(-1, 2)
    if isinstance(key, Tracer):  # If the hashed words were arrays, JAX would store them for the backward pass.
        return _fold_literals(key, tuple(map(tuple, words.tolist())))
    return _fold_words(key, *(np.ascontiguousarray(column) for column in words.T))


@functools.partial(inlined, static_argnums=1)
def _fold_literals(key: jax.Array, words: tuple[tuple[int, int], ...]) -> jax.Array:
    """Returns a key for each pair of 32-bit words, like :func:`_fold_words`, but with the words as jaxpr literals.

    A constant array would instead become an input of the jaxpr, and JAX would store it for the backward pass. Calls
    with equal words share one trace.
    """
    columns = ([jax.lax.full((1,), word, jnp.uint32) for word in column] for column in zip(*words, strict=True))
    return _fold_words(key, *(jax.lax.concatenate(column, 0) for column in columns))


@inlined
def _fold_words(key: jax.Array, high: Any, low: Any) -> jax.Array:
    """Returns a batch of keys, one for each pair of 32-bit words: ``fold_in(fold_in(key, high), low)``.

    ``high`` and ``low`` are uint32 arrays that hold the first and the second word of each pair.
    """

    def fold_pair(high: Any, low: Any) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, high), low)

    if str(jax.random.key_impl(key)) != "threefry2x32":
        # Under vmap, a key of the implementation unsafe_rbg would depend on the other keys of the batch.
        return jnp.stack([fold_pair(*pair) for pair in zip(high, low, strict=True)])
    return jax.vmap(fold_pair)(high, low)


LOOPED = 2**14
"""The largest number of entries in an array whose noise is drawn in one loop with that of other arrays. On a CPU, each
array drawn outside of a loop adds a tenth of a second to compilation, but a loop uses only one core in every step."""


def draw_at_sites(
    step: Any, acting: Sequence[int], arrays: Mapping[Names, Any], key: Array, *, is_traced: bool
) -> dict[int, Array]:
    """Returns a PRNG key for each acting :class:`Site` of a step, by index; for a noise step, returns the noise itself.

    Sites are grouped twice: sites with the same ``draw_number`` (see :class:`Site`) get their keys in one batch, and
    within these groups, the noise for small arrays of one type is drawn in one loop. Grouping does not change the
    random numbers.

    Args:
      step: A :class:`Step` of a plan, with ``draws`` true: a random stage, and one site for each of its arrays.
      acting: The indices of the sites that draw.
      arrays: The arrays that the step reads, by key path.
      key: The PRNG key that the user passed.
      is_traced: Whether JAX is tracing the call. If not, each operation is compiled and run separately, which is slow
        for an operation with many results.
    """
    sites, groups_of_number = step.sites, dict[int, dict[Any, list[int]]]()
    for i in acting:
        # A site without a group key forms a group by itself, under its own index.
        group = _group_key(sites[i], arrays) if step.draws_noise else None
        groups = groups_of_number.setdefault(sites[i].draw_number, {})
        groups.setdefault(i if group is None else group, []).append(i)
    draws = dict[int, Array]()
    for number in sorted(groups_of_number):
        groups = groups_of_number[number].values()
        batch = keys_of_arrays(key, step.stage.kind, number, [sites[i].draw_path for group in groups for i in group])
        # The zip is not strict, because `accumulate` yields the start of each group, and then also the total.
        for start, group in zip(accumulate(map(len, groups), initial=0), groups, strict=False):
            keys, first = _slice_batch(batch, start, len(group), is_traced=is_traced), sites[group[0]]
            if step.draws_noise:
                drawn = _draw_group(first.stage, arrays[first.arrays["w"]], keys, is_traced=is_traced)
                draws |= zip(group, drawn, strict=True)
            else:  # If no noise is drawn here, each group is a single site.
                draws[group[0]] = keys[0]
    return draws


def _draw_group(stage: Any, array: Any, keys: Array, *, is_traced: bool) -> list[Array]:
    """Returns a list of noise arrays, one for each key of a batch, all of which ``stage`` draws in one loop.

    Each noise array is drawn for an array with the shape and dtype of ``array``. The entries of ``array`` are not read.
    """
    array = jnp.asarray(array)
    if len(keys) == 1:
        return [stage.draw(array, keys[0])]
    draws = stage.draw(array, keys)
    if not is_traced:
        return [jax.lax.squeeze(_slice_batch(draws, i, 1, is_traced=False), [0]) for i in range(len(keys))]
    return [jax.lax.squeeze(part, [0]) for part in jax.lax.split(draws, [1] * len(keys))]


def _group_key(site: Any, arrays: Mapping[Names, Any]) -> Any:
    """Returns a hashable key, equal for arrays whose noise is drawn in one loop; None for an array drawn by itself.

    Noise for small arrays of equal type and sharding is drawn together if their stages have the same shared axes.
    """
    array = jnp.asarray(arrays[site.arrays["w"]])
    sharding = jax.typeof(array).sharding
    is_large = any(map(export.is_symbolic_dim, array.shape)) or array.size > LOOPED
    # On a mesh with Auto axes, arrays of equal type may be sharded differently, and only the compiler knows how.
    if is_large or AxisType.Auto in sharding.mesh.axis_types:
        return None
    return type(site.stage), site.stage.shared, array.shape, array.dtype, sharding


def _slice_batch(batch: Array, start: int, size: int, *, is_traced: bool) -> Array:
    """Returns ``batch[start : start + size]`` for a batch of keys or arrays.

    Outside of a trace, ``start`` is passed as an argument of the operation, because each literal ``start`` would
    require another compilation.
    """
    if is_traced:
        return jax.lax.slice_in_dim(batch, start, start + size)
    return jax.lax.dynamic_slice_in_dim(batch, start, size)


# The functions below draw random arrays.


def normal(key: Array, w: Array) -> Array:
    """Returns standard normal numbers in the shape and dtype of ``w``; complex numbers also have variance 1."""
    return reparax_normal(key, w.shape, w.dtype, _sharding_of_draw(w))


def uniform(key: Array, w: Array, shared_axes: tuple[int, ...]) -> Array:
    """Returns uniform float32 multiples of 2^-23 in [0, 1), in the shape of ``w``, but with size 1 along given axes."""
    shape = tuple(1 if axis in shared_axes else size for axis, size in enumerate(w.shape))
    return _draw_uniform(key, shape, jnp.dtype(jnp.float32), _sharding_of_draw(w, shared_axes))


def _sharding_of_draw(w: Array, shared_axes: tuple[int, ...] = ()) -> NamedSharding:
    """Returns the sharding of ``w``, but unsharded along ``shared_axes``, where its random array has size 1."""
    sharding = jax.typeof(w).sharding
    spec = [None if axis in shared_axes else name for axis, name in enumerate(sharding.spec)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw_uniform(key: Array, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    """Returns uniform numbers in [0, 1): random mantissa bits give a number in [1, 2), from which 1 is subtracted.

    A batch of keys gives a batch of arrays. ``dtype`` must be float32 or float64.
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
    """Returns random unsigned integers of 32 or 64 bits, the same as those of ``jax.random.bits``.

    The module ``threefry`` computes them if it supports the key and the shape, because XLA can fuse its operations.
    """
    if threefry.is_supported(key, shape):
        return threefry.bits(key, shape, width, sharding)
    return jax.random.bits(key, shape, f"uint{width}", out_sharding=sharding)


def _prevent_fusion(x: Array) -> Array:
    """Returns ``x``. If ``x`` is a vector, a barrier keeps XLA from fusing its computation into operations on ``x``.

    A bias is repeated for each row of data. On a CPU, XLA of JAX 0.11 and newer would fuse the random numbers of a bias
    into this repetition, and take minutes to compile it.
    """
    axes = [n for n in x.shape if export.is_symbolic_dim(n) or n > 1]
    return jax.lax.optimization_barrier(x) if len(axes) < 2 else x


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def reparax_normal(key: Array, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    """Returns standard normal numbers; a batch of keys gives a batch of arrays.

    Transforms find random arrays in a jaxpr by the name of this function, :data:`DRAW`. The function must therefore not
    be inlined or renamed.
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
