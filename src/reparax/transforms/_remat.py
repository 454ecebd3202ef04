"""Computes gradients that recompute noise, masks and effective weights instead of storing them.

The policies of ``jax.checkpoint`` choose what to recompute by operation or by name. But the same operation, such as
``add``, computes a weight in one place and an activation in another, and you cannot add names to the code of a library.
``remat`` looks at inputs instead. A value that is computed only from parameters and keys can be recomputed, because
parameters and keys are in memory anyway. So ``remat`` splits the loss into two programs:

>>> import jax, jax.numpy as jnp, reparax as rpx
>>> def early(w, key):  # computed from parameters and key alone
...     noisy = w + 0.1 * jax.random.normal(key, w.shape)
...     return noisy, noisy.T
>>> def late(weights, x):  # the rest
...     return jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])
>>> def loss(w, key, x):  # what you write; remat finds both halves in it
...     return late(early(w, key), x)
>>> args = jnp.ones((64, 2)), jax.random.key(0), jnp.ones((8, 64))
>>> [rpx.transforms.saved_residuals(f, *args).bytes("weights") for f in (loss, rpx.remat(loss))]
[512, 0]

The loss is linearized. Residuals that depend on ``x`` are stored, as without ``remat``. In this example, they are ``x``
and the residual of ``tanh``. The other residuals are values of the early half, such as ``noisy.T``. These values are
not stored, because the backward pass runs the early half again. No product of ``late`` runs twice.

The early half computes values from parameters and keys alone. In both passes, each of its outputs is computed just
before its first use in the late half.

``_remat_rewrites`` rewrites the program before it is differentiated. ``_remat_derivative`` defines the derivative, and
the primitives that hold a program. ``_remat_order`` orders the equations, and decides which values must wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

from reparax.programs import jaxprs
from reparax.programs.call import Argnums, Arguments, check_call
from reparax.transforms._remat_derivative import recomputing_function
from reparax.transforms._saved_residuals import check_this_jax

P = ParamSpec("P")
R = TypeVar("R")


def remat(fun: Callable[P, R], argnums: Argnums = None, *, keep: Literal["masks"] | None = None) -> Callable[P, R]:
    """Returns ``fun`` with a backward pass that recomputes noise, masks and effective weights instead of storing them.

    Everything that the network computes from weights alone, such as casts and transposes, is also recomputed from the
    raw parameters and the key. Everything else, such as activations, is stored exactly as without ``remat``, and no
    matmul of the network runs twice. In both passes, each weight is computed just before it is used, so only one
    layer's weights are in memory at a time. Values, gradients and noise are the same as without ``remat``. Inside and
    outside of ``remat``, you can use ``jax.grad``, ``jax.value_and_grad`` with ``has_aux``, ``jax.vjp``, ``jax.jvp``,
    ``jax.hessian``, ``jax.linear_transpose``, ``jax.vmap``, ``jax.jit``, ``jax.shard_map``, ``jax.checkpoint`` and
    ``checkify``. Outside, you can also use ``jax.experimental.jet`` if ``jet`` supports the operations of ``fun``.
    ``jet`` has no rules for ``scan``, ``jax.checkpoint`` and ``jax.custom_jvp``, so it supports neither ``apply``
    without ``remat`` nor most norms.

    ``remat`` also handles the bodies of scans: if a scan over stacked layers calls ``apply`` in its body, each layer's
    weights are recomputed in its own backward step. To wrap only a layer or a scan body, name the arguments:
    ``rpx.remat(body, argnums=1)`` for ``body(carry, layer)``. If ``fun`` itself takes gradients, as in meta-learning,
    apply ``remat`` outermost.

    Args:
      fun: A loss, or any pure function of arrays. Writes to an argument, such as updates of the statistics of nnx
        modules, are lost. Argument leaves that are not arrays are treated as constants. Result leaves that are not
        arrays are returned unchanged.
      argnums: The positions of the arguments from which weights are computed: raw parameters, keys, and numbers that
        change the noise. Default: the first argument, and every argument that holds only PRNG keys (or uint32 arrays
        whose last axis has size 2 or 4, like a legacy key). The inputs of ``p.apply``, and the keys and numbers from
        which these inputs are computed, always count as named in ``argnums``, even if ``fun`` closes over them. Other
        arrays that ``fun`` closes over count as data.
      keep: ``"masks"`` stores the random masks of dropout for the backward pass instead of drawing the masks again. A
        mask takes one bit per entry, 1/32 of a weight in float32. Random numbers that only a mask reads are then drawn
        only once. A mask is any boolean array that is computed from a key, has at least 1024 entries, and has an axis
        whose size is a multiple of 8 and that is not sharded in the array's type. Noise is still drawn again, because
        noise cannot be stored in bits.

    Raises:
      TypeError: If ``fun`` is not a function or uses mutable arrays, or ``argnums`` is not a position or names an
        argument that does not exist.
      ValueError: If ``keep`` is neither ``"masks"`` nor None.
      RuntimeError: If JAX is newer than the tested versions, and its jaxprs differ in a way that is not supported.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm() >> rpx.VarNoise(0.075)
      >>> raw = p.init({"w": jnp.ones((3, 2))})
      >>> def loss(raw, key, x):
      ...     return jnp.sum((x @ p.apply(raw, key)["w"]) ** 2)
      >>> grads = jax.grad(rpx.remat(loss))(raw, jax.random.key(0), jnp.ones((4, 3)))
      >>> jax.tree.map(jnp.shape, grads)
      {'w': {'@weight_norm': {'g': (1, 2), 'v': (3, 2)}}}

    References:
      Chen, Xu, Zhang and Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016.
    """
    who = check_call("remat", fun, argnums)
    if keep not in ("masks", None):
        raise ValueError(f"{who} takes keep='masks', to store masks, or keep=None, but got {keep!r}.")

    @functools.wraps(fun)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        check_this_jax()
        call = Arguments.of(who, fun, argnums, args, kwargs).trace()
        if jaxprs.has_refs(call.program):
            raise TypeError(
                f"{who} found a mutable array (jax.new_ref) in the function, but cannot recompute its content. Return "
                f"the new content together with the loss, and write it to the array outside of the function."
            )
        recomputing = recomputing_function(call.program, call.is_chosen, keeps_masks=keep == "masks")
        return call.restore(recomputing(*call.inputs))

    vars(function)["hides_weights"] = True  # Transforms that follow weights, such as `factored`, reject this function.
    return function
