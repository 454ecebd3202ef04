"""Losses whose products multiply by factors of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr

from reparax.programs import jaxprs
from reparax.programs.call import Argnums, Arguments, check_call
from reparax.programs.weights.facts import Facts, facts_of_inputs
from reparax.programs.weights.reader import Reader
from reparax.programs.weights.rehearsal import network
from reparax.transforms.products._factoring import Factoring
from reparax.transforms.products._plan import SumPlan


def factored(fun: Callable[..., Any], argnums: Argnums = None) -> Callable[..., Any]:
    r"""``fun`` with products that multiply by the factors of weights and never form the weights.

    For :math:`W = W_0 + c A B`, it computes a product as :math:`x W_0 + c\, (x A) B`. The gradients of ``A`` and ``B``
    then need no gradient of the whole ``W``. It finds the factors in the jaxpr of ``fun``, so the network's code does
    not change: wherever arrays of parameters are multiplied, scaled or added, as in :class:`LoRA`, :class:`Delta`,
    :class:`LowRank`, :class:`FixedRank`, :class:`Kronecker`, :class:`WeightNorm`, :class:`Gain`, :class:`Quantized`,
    chains of these, or your own formulas; and if a stage defines ``terms_leaf``.

    Weights stay in factors through transposes, casts, reshapes, slices, ``jit``, ``scan``, ``cond``, ``shard_map``,
    ``jax.checkpoint``, ``vmap`` and look-ups of matrices (``w[expert]``), up to matrix products (``@``, ``einsum``, and
    ``jax.lax.ragged_dot`` of experts), convolutions and table lookups. For all other operations the array is formed
    once; also in float16 and float8 and before a cast to a dtype of less range, where factors may overflow although
    their product does not; before a cast to more digits, which keeps an earlier rounding; and if the factors cost more
    operations than the array, including all gradients. :func:`explain` says which weights are formed, where and why.
    Values and gradients are those of ``fun`` up to rounding.

    To store no factors for the backward pass either, write ``rpx.remat(rpx.factored(loss))``. Apply ``jax.grad``,
    ``jax.vmap``, ``jax.jit`` and other transformations outside of it. Gradients taken inside ``fun``, as in
    meta-learning, form the weights that they read.

    Args:
      fun: A loss, or any pure function of arrays.
      argnums: The positions of the arguments from which weights are computed, as in :func:`remat`. Default: the first,
        and keys. Pass these by position: keyword arguments count as data.

    Raises:
      TypeError: If ``fun`` is not a function, or ``argnums`` is not a position or names an argument that does not
        exist.
      RuntimeError: If JAX is newer than the tested versions, and its jaxprs differ in a way that is not supported.

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
    who = check_call("factored", fun, argnums)

    @functools.wraps(fun)
    def function(*args: Any, **kwargs: Any) -> Any:
        check_this_jax()
        call = Arguments.of(who, fun, argnums, args, kwargs).trace()
        facts = facts_of_inputs(call.program, call.is_chosen)
        plan = plan_sums(call.program, call.inputs, facts)
        return call.restore(Reader(Factoring(plan)).arrays(call.program, call.inputs, facts))

    return function


@functools.cache
def check_this_jax() -> None:
    """Raises an error if this JAX writes jaxprs in an unknown way."""
    jaxprs.check_this_jax(lambda: _products_of(lambda a, b, x: network(a @ b, x)) == [3])


def _products_of(function: Callable[..., Array]) -> list[int]:
    """For each weight that is not formed, how many products use its factors."""
    a, b, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 1), (1, 64), (64, 64)))
    program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(a, b, x))
    plan = plan_sums(
        program, [*consts, a, b, x], facts_of_inputs(program, [*(True for _ in consts), True, True, False])
    )
    apart = [record for record in plan.records.values() if not record.is_formed]
    return [sum(read.cost_in_factors is not None for read in record.reads) for record in apart]


def plan_sums(program: Jaxpr, inputs: Sequence[Any], facts: Sequence[Facts]) -> SumPlan:
    """Which weights of a program stay in factors, for inputs of these types."""
    plan = SumPlan()
    reader = Reader(Factoring(plan), computes=False)
    jax.make_jaxpr(lambda *args: reader.arrays(program, args, facts))(*inputs)
    plan.decide()
    return plan
