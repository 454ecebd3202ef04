"""Losses whose products never form the weight."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr

from reparax._programs import dependence, jaxprs
from reparax._programs.call import Argnums, Arguments, caller
from reparax._programs.roots import with_roots
from reparax.factored._facts import Facts
from reparax.factored._plan import Plan
from reparax.factored._reader import Reader


def factored(fun: Callable[..., Any], argnums: Argnums = None) -> Callable[..., Any]:
    r"""``fun``, whose products take weights factor by factor and never form them.

    For :math:`W = W_0 + c A B`, a product is :math:`x W_0 + c\, (x A) B`, and so are its gradients: that of ``A`` and
    ``B`` needs no gradient of the whole ``W``. The factors are found in the program of ``fun``, so the network may be
    anyone's: where arrays of parameters are multiplied, scaled or added, as in :class:`LoRA`, :class:`Delta`,
    :class:`LowRank`, :class:`FixedRank`, :class:`Kronecker`, :class:`WeightNorm`, :class:`Gain`, :class:`Stored`, noise
    of low rank, chains of these, or in formulas of your own; and where a stage says its ``terms_leaf``.

    Weights stay in factors through transposes, casts, reshapes, slices, ``jit``, ``scan``, ``cond``, ``shard_map``,
    ``jax.checkpoint`` and ``vmap``, up to products of matrices (``@``, ``einsum``), convolutions and lookups in
    tables. Everything else gets the array, formed once; so do float16 and float8, in which factors may overflow though
    their product does not. Where factors cost more operations than the array, with all gradients, the array is formed
    too. :func:`explain` tells which weights, where and why. Values and gradients are those of ``fun`` up to rounding.

    For a gradient that keeps nothing of the factors either, write ``rpx.remat(rpx.factored(loss))``. ``jax.grad``,
    ``jax.vmap``, ``jax.jit`` and all others go around it. Inside of ``fun``, take no gradients, as in meta-learning:
    what they read is formed.

    Args:
      fun: A loss, or any function of arrays, pure as JAX asks.
      argnums: The positions of the arguments from which weights are made, as in :func:`remat`. Default: the first, and
        keys. Pass these by position: what comes by keyword is data.

    Raises:
      TypeError: If ``fun`` is no function, or ``argnums`` is no position or names an argument that is not there.
      RuntimeError: If JAX is newer than those that were tested, and writes programs in a way that is not known.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.LoRA(2)
      >>> train, rest = rpx.partition(p.init({"w": jnp.ones((8, 8))}, jax.random.key(0)))
      >>> def loss(train, x):
      ...     return jnp.sum((x @ p.apply(rpx.combine(train, rest))["w"]) ** 2)
      >>> grads = jax.grad(rpx.factored(loss))(train, jnp.ones((64, 8)))
      >>> jax.tree.map(jnp.shape, grads["w"]["@lora"])["a"]
      (8, 2)

    References:
      Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang and Chen, *LoRA*, 2022.
    """
    who = caller("factored", fun, argnums)

    @functools.wraps(fun)
    def function(*args: Any, **kwargs: Any) -> Any:
        rehearse()
        traced = Arguments.of(who, fun, argnums, args, kwargs).traced()
        facts = known(traced.program, traced.given)
        plan = planned(traced.program, traced.inputs, facts)
        return traced.restored(Reader(plan).arrays(traced.program, traced.inputs, facts))

    return function


@functools.cache
def rehearse() -> None:
    """Refuses a JAX that writes programs down in a way that is not known."""
    jaxprs.rehearse(lambda: _products_of(_network) == [3])


def _products_of(network: Callable[..., Array]) -> list[int]:
    """How many products take each weight factor by factor."""
    a, b, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 1), (1, 64), (64, 64)))
    program, consts = jaxprs.opened(jax.make_jaxpr(network)(a, b, x))
    plan = planned(program, [*consts, a, b, x], known(program, [*(True for _ in consts), True, True, False]))
    apart = [record for record in plan.records.values() if not record.is_formed]
    return [sum(read.factored is not None for read in record.reads) for record in apart]


def _network(a: Array, b: Array, x: Array) -> Array:
    """Three products with a weight, in a call, in a loop and in a program that is made again."""
    w = a @ b
    x = jax.jit(lambda x: jnp.tanh(x @ w))(x)
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w.T), None), x, length=2)
    return jnp.sum(jax.checkpoint(lambda w, x: x @ w)(w, x))


def known(program: Jaxpr, given: list[bool]) -> list[Facts]:
    """What is known of the inputs of a program, of which some are named."""
    flags = with_roots(program, given)
    return [
        Facts(flag, not dependence.smooth(v), frozenset((i,) if flag else ()))
        for i, (v, flag) in enumerate(zip(program.invars, flags, strict=True))
    ]


def planned(program: Jaxpr, inputs: Sequence[Any], facts: Sequence[Facts]) -> Plan:
    """Which weights of a program stay apart, for inputs of these types."""
    plan = Plan()
    jax.make_jaxpr(lambda *args: Reader(plan).arrays(program, args, facts))(*inputs)
    plan.decide()
    return plan
