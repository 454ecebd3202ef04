"""Gradients for which nothing is stored that parameters and key can make again."""

import functools
from collections.abc import Callable
from typing import Any

from reparax._programs import jaxprs
from reparax._programs.call import Argnums, Arguments, caller
from reparax.memory._derivative import split
from reparax.memory._rehearsal import rehearse


def remat(fun: Callable[..., Any], argnums: Argnums = None) -> Callable[..., Any]:
    """``fun``, of which the backward pass keeps nothing that parameters and key alone can make again.

    Noise, masks, effective weights, and the casts and transposes that the network makes of them, are made again from
    the raw parameters and the key when gradients are taken. Everything else, such as activations, is kept exactly as
    without ``remat``; no matmul of the network runs twice. Each weight is made just before it is used, and again just
    before it is used in the backward pass, so that one layer's weights are alive at a time. Values and gradients are
    those of ``fun``, and so is the noise. ``jax.grad``, ``jax.value_and_grad`` with ``has_aux``, ``jax.vjp``,
    ``jax.jvp``, ``jax.hessian``, ``jax.vmap``, ``jax.jit``, ``jax.shard_map`` and ``jax.checkpoint`` go through it,
    inside and outside.

    The bodies of scans that are met on the way are treated in the same manner: where a scan runs over stacked layers
    and calls ``apply`` in its body, each layer's weights are made again in its own backward step. For a layer or a
    scan body alone, name the arguments: ``rpx.remat(body, argnums=1)`` for ``body(carry, layer)``. Where gradients are
    taken inside of ``fun``, as in meta-learning, let ``remat`` be the outermost.

    Args:
      fun: A loss, or any function of arrays, pure as JAX asks: what it writes into an argument, as nnx modules write
        their statistics, is lost. Leaves of its arguments that are no arrays are constants; those of its result come
        out as they are.
      argnums: The positions of the arguments from which weights are made: raw parameters, keys, and numbers that
        change the noise. Default: the first argument, and those that hold nothing but PRNG keys (or uint32 arrays whose
        last axis has the 2 or 4 entries of a legacy key). What ``p.apply`` reads counts as named wherever ``fun`` has
        it from, and so do keys and numbers that this is computed from. An array that ``fun`` closes over is taken for
        data.

    Raises:
      TypeError: If ``fun`` is no function or uses mutable arrays, or ``argnums`` is no position or names an argument
        that is not there.
      RuntimeError: If JAX is newer than those that were tested, and writes programs in a way that is not known.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm() >> rpx.VarNoise(0.075)
      >>> params = p.init({"w": jnp.ones((3, 2))})
      >>> def loss(params, key, x):
      ...     return jnp.sum((x @ p.apply(params, key)["w"]) ** 2)
      >>> grads = jax.grad(rpx.remat(loss))(params, jax.random.key(0), jnp.ones((4, 3)))
      >>> jax.tree.map(jnp.shape, grads)
      {'w': {'@weight_norm': {'g': (1, 2), 'v': (3, 2)}}}

    References:
      Chen, Xu, Zhang and Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016.
    """
    who = caller("remat", fun, argnums)

    @functools.wraps(fun)
    def function(*args: Any, **kwargs: Any) -> Any:
        rehearse()
        traced = Arguments.of(who, fun, argnums, args, kwargs).traced()
        if jaxprs.has_refs(traced.program):
            raise TypeError(
                f"{who} met a mutable array, such as jax.new_ref makes, and what it holds cannot be made again. Take "
                f"it out of the function, and return its value beside the loss."
            )
        return traced.restored(split(traced.program, traced.given)(*traced.inputs))

    return function
