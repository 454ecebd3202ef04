"""Provides identity functions that control when and how often compilers compute a value.

``tie`` delays a computation. XLA chooses its own order, merges equal values, and drops optimization barriers on CPUs,
but it cannot drop a data dependence. So on CPUs, ``tie(x, barrier)`` adds a zero to the bits of ``x``. The zero is
computed from ``barrier`` in a way that the compiler cannot see through. Compilers for accelerators find a good order
without help, so ``tie`` does nothing there.

``read_in_step`` is for TPUs, which multiply in bfloat16. Before a loop over layers, their compiler converts the weights
of all layers and stores the result as another array. The compiler does not move integer operations out of the loop, so
on TPUs ``read_in_step`` adds a zero to the bits of each entry.

``compute_once`` is for CPUs. There, XLA duplicates a cheap operation for each reader of its result, and keeps the
operands until all readers have run. XLA does not duplicate a division, so on CPUs ``compute_once`` divides by ones, and
``pull_back_once`` divides cotangents by ones.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh


def tie(x: Array, barrier: Array) -> Array:
    """Returns ``x``, but makes CPU compilers compute it after ``barrier`` and never merge it with an equal value."""
    # On an explicit mesh, a single entry of a sharded array has no sharding, so a sharded array cannot be tied. Arrays
    # on two different meshes cannot be tied either: no operation can read both arrays if one mesh has axes that are
    # automatic in the other.
    cannot_tie = _is_sharded(x) or _is_sharded(barrier) or _mesh_of(x) != _mesh_of(barrier)
    return x if cannot_tie else _tie.bind(x, barrier)


def _mesh_of(x: Array) -> AbstractMesh:
    """Returns the mesh of an array's sharding."""
    return jax.typeof(x).sharding.mesh


def _is_sharded(x: Array) -> bool:
    """Returns whether an array is sharded over an explicit mesh."""
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def store_whole(x: Array) -> Array:
    """Returns ``x``, but makes compilers for accelerators store it as an array instead of fusing it into readers."""
    return _whole.bind(x)


def compute_once(x: Array) -> Array:
    """Returns ``x``, but makes compilers compute it only once for all its readers, including the backward pass."""
    return _once.bind(x)


def pull_back_once(x: Array) -> Array:
    """Returns ``x``, but makes compilers compute its cotangent only once for all readers of the cotangent."""
    return _once_back.bind(x)


def read_in_step(x: Array) -> Array:
    """Returns ``x``, a float32 weight of one loop step, but makes the TPU compiler convert it only in that step."""
    return _read.bind(x)


def has_bits(x: Any) -> bool:
    """Returns whether ``tie`` can make a value depend on ``x``: whether ``x`` has entries with bits to read."""
    return (
        all(isinstance(n, int) and n > 0 for n in x.shape)
        and x.dtype != jax.dtypes.float0
        and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )


class _Identity(Primitive):
    """A JAX primitive that returns its first operand."""

    def bind(self, *args: Any, **params: Any) -> Any:
        """Binds the primitive under the mesh of its first operand, so that JAX lowers the primitive under this mesh."""
        if has_series(args):
            return args[0]
        mesh = _mesh_of(args[0])
        with contextlib.nullcontext() if mesh.empty else jax.sharding.use_abstract_mesh(mesh):
            return super().bind(*args, **params)


def _tie_on_cpu(x: Array, barrier: Array) -> Array:
    """Implements ``tie`` on CPUs: adds a zero, computed from the first entry of ``barrier``, to the bits of ``x``."""
    entry = lax.reshape(lax.slice(barrier, (0,) * barrier.ndim, (1,) * barrier.ndim), ())
    if jnp.iscomplexobj(entry):
        entry = lax.real(entry)
    if jnp.issubdtype(entry.dtype, jnp.floating):
        entry = lax.bitcast_convert_type(lax.convert_element_type(entry, jnp.float32), jnp.uint32)
    return _add_to_bits(x, _zero_from_bits(lax.convert_element_type(entry, jnp.uint32)))


def _zero_from_bits(bits: Array) -> Array:
    """Computes zeros that no compiler recognizes: the number of set bits, which is below 64, shifted right by 6."""
    return lax.shift_right_logical(lax.population_count(bits), jnp.full_like(bits, 6))


def by_integers(x: Array) -> Array:
    """Returns a float32 array unchanged, after integer operations that compilers do not swap with a cast."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(lax.add(bits, _zero_from_bits(bits)), x.dtype)


def _add_to_bits(x: Array, zero: Array) -> Array:
    """Adds a uint32 zero to the bits of ``x``: for PRNG keys, to the key data; for complex numbers, to both parts."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.random.wrap_key_data(_add_to_bits(jax.random.key_data(x), zero), impl=jax.random.key_impl(x))
    if jnp.iscomplexobj(x):
        return lax.complex(_add_to_bits(lax.real(x), zero), _add_to_bits(lax.imag(x), zero))
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
        return lax.bitcast_convert_type(_add_to_bits(lax.bitcast_convert_type(x, bits), zero), x.dtype)
    if x.dtype == bool:
        return lax.bitwise_xor(x, lax.broadcast(lax.ne(zero, jnp.uint32(0)), x.shape))
    return lax.add(x, lax.broadcast(lax.convert_element_type(zero, x.dtype), x.shape))


def _divide_by_ones(x: Array) -> Array:
    """Divides ``x`` by ones that compilers do not recognize, because XLA does not duplicate a division on CPUs."""
    wide = lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float32), jnp.uint32)
    return lax.div(x, lax.add(lax.convert_element_type(_zero_from_bits(wide), x.dtype), jnp.ones_like(x)))


def _batch_tie(args: Any, dims: Any) -> Any:
    """Batches ``tie``: ties to the first ``barrier`` of a batch only, and not at all if that batch is sharded."""
    (x, barrier), (place, batch) = args, dims
    if batch is not None:
        if _is_sharded(barrier):
            return x, place
        barrier = lax.index_in_dim(barrier, 0, batch, keepdims=False)
    return _tie.bind(x, barrier), place


def _partly_evaluate_tie(trace: Any, x: Any, barrier: Any) -> Any:
    """Partially evaluates ``tie``: a known ``x`` stays known even if ``barrier`` is unknown.

    Without this rule, a known weight would become unknown, and JAX could not transpose the function that reads the
    weight.
    """
    return x if x.is_known() and not barrier.is_known() else trace.default_process_primitive(_tie, (x, barrier), {})


def _identity(name: str, lowering: Callable[..., Any], **on_platform: Callable[..., Any]) -> _Identity:
    """Makes an identity primitive. ``on_platform`` maps platforms to functions that replace ``lowering`` there."""
    primitive = _Identity(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    ad.deflinear2(primitive, lambda ct, x: [ct])
    batching.primitive_batchers[primitive] = lambda args, dims: (primitive.bind(*args), *dims)
    mlir.register_lowering(primitive, mlir.lower_fun(lowering, multiple_results=False))
    for platform, formula in on_platform.items():
        mlir.register_lowering(primitive, mlir.lower_fun(formula, multiple_results=False), platform=platform)
    return primitive


def _same(x: Array) -> Array:
    """Returns its operand."""
    return x


_whole = _identity("reparax_whole", lax.optimization_barrier, cpu=_same)
_read = _identity("reparax_read", _same, tpu=by_integers)
_once = _identity("reparax_once", lax.optimization_barrier, cpu=_divide_by_ones)
_once_back = _identity("reparax_once_back", _same)
ad.deflinear2(_once_back, lambda ct, x: [_once.bind(ct)])

_tie = _Identity("reparax_tie")
_tie.def_impl(lambda x, after: x)
_tie.def_abstract_eval(lambda x, after: x)
ad.primitive_jvps[_tie] = lambda primals, tangents: (_tie.bind(*primals), tangents[0])
ad.primitive_transposes[_tie] = lambda ct, x, after: [ct, None]
partial_eval.custom_partial_eval_rules[_tie] = _partly_evaluate_tie
batching.primitive_batchers[_tie] = _batch_tie
mlir.register_lowering(_tie, lambda ctx, x, after: [x])
mlir.register_lowering(_tie, mlir.lower_fun(_tie_on_cpu, multiple_results=False), platform="cpu")


def has_series(args: Iterable[Any]) -> bool:
    """Returns whether ``jax.experimental.jet`` traces any of ``args``; ``jet`` does not support our primitives."""
    return any(type(x).__name__ == "JetTracer" for x in args)
