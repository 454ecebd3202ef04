"""Losses in which each example has noise of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from reparax.core import random
from reparax.programs import jaxprs
from reparax.programs.call import Argnums, Arguments, Traced, check_call
from reparax.programs.sources import lines_by_origin
from reparax.programs.weights.facts import facts_of_inputs
from reparax.programs.weights.paths import paths_of
from reparax.programs.weights.reader import Reader
from reparax.programs.weights.rehearsal import network
from reparax.transforms.draws._drawing import Drawing
from reparax.transforms.draws._explained import ExplainedDraws, explained


class Local:
    """A function whose products with noisy weights draw for each example; :func:`explain` reports it."""

    def __init__(self, fun: Callable[..., Any], argnums: Argnums) -> None:
        self.who, self.fun, self.argnums = check_call("local", fun, argnums), fun, argnums
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_this_jax()
        call, program, consts = self.rewritten(Drawing(), args, kwargs)
        # A draw that nothing reads is not drawn.
        return call.restore(jaxprs.evaluate(jaxprs.without_dead_code(program), [*consts, *call.inputs]))

    def explained(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExplainedDraws:
        """Which noisy weights draw for each example with these arguments, or with their types."""
        check_this_jax()
        way, arguments = Drawing(), Arguments.of(self.who, self.fun, self.argnums, args, kwargs)
        call, *_ = self.rewritten(way, args, kwargs)
        return explained(way.reads, paths_of(arguments, call), lines_by_origin(call.program))

    def rewritten(self, way: Drawing, args: Sequence[Any], kwargs: Any) -> tuple[Traced, Jaxpr, list[Any]]:
        """The program, the one in which products draw for each row, and the constants that are its first inputs."""
        arguments = Arguments.of(self.who, self.fun, self.argnums, args, kwargs)
        call = arguments.trace()
        closed_over = len(call.inputs) - len(arguments.arrays)
        facts = facts_of_inputs(call.program, [i < closed_over or flag for i, flag in enumerate(call.is_chosen)])
        closed_jaxpr = jax.make_jaxpr(lambda *inputs: Reader(way).arrays(call.program, inputs, facts))(*call.inputs)
        return call, *jaxprs.consts_first(closed_jaxpr)


def local(fun: Callable[..., Any], argnums: Argnums = None) -> Local:
    r"""``fun`` with separate noise for each example, without a copy of the weights for each.

    A weight with independent Gaussian entries, :math:`w = m + s \varepsilon`, is drawn once for all examples of a
    batch, so their gradients err together. In a product :math:`x w`, each row of x sees a Gaussian vector with the mean
    :math:`x m` and independent entries of the variance :math:`x^2 s^2`. ``local`` draws this instead: numbers for the
    result, not for the weight, and new ones for each row. The mean of the gradient stays the same, and its variance
    falls with the number of examples. The network's code does not change.

    It finds the noise of :class:`VarNoise`, :class:`Gaussian` and :class:`VariationalDropout`, and follows it through
    operations that keep entries independent: sums, multiples and choices of known arrays, such as those of
    :class:`Mask`; transposes, reshapes, slices, and casts to fewer digits; ``jit``, ``scan``, ``cond``, ``shard_map``,
    ``jax.checkpoint`` and ``vmap``. Each example gets its own draw in

    - products of matrices (``@``, ``einsum``, and ``jax.lax.ragged_dot`` of experts, each with its own mean and
      variance), convolutions, and sums and multiples with data, such as biases;
    - rows of tables.

    A row is whatever the weight does not index: an example, a position in a sentence or an image, or a look-up in a
    table. Two rows of one example get different draws, while a weight drawn for the example would be the same in both;
    the mean and the variance of each entry of the result are those of such weights. Each use of a weight draws
    independently: both uses of a tied table, and each step of a loop over time.

    Everything else reads one draw for all examples, the one that ``fun`` itself makes from the key: factorized noise,
    :class:`WeightDropout`, :class:`HardConcrete`, complex weights and those in float16; weights whose entries a formula
    mixes after the noise, as in ``VarNoise(0.1) >> WeightNorm()``; products with arrays that depend only on named
    arguments; and any other read, such as the square of a weight. So does a ``shard_map`` with ``check_vma=False``.
    ``rpx.explain(rpx.local(loss), *args)`` shows which, where and why.

    Means are computed as in ``fun``, variances in float32 or wider. Gradients pass both; the backward pass computes
    variances and noise again. Apply ``jax.grad``, ``jax.jit``, :func:`remat` and :func:`factored` outside of it.
    ``jax.vmap`` outside of it with a single key gives every example the same draws: map inside, or over keys too.
    ``VarNoise(-s)`` no longer mirrors ``VarNoise(s)``.

    Args:
      fun: A loss, or any pure function of arrays.
      argnums: The positions of the arguments from which weights are computed, as in :func:`factored`. Default: the
        first, and keys. All others are data; closed-over arrays are not.

    Raises:
      TypeError: If ``fun`` is not a function, or ``argnums`` is not a position or names an argument that does not
        exist.
      RuntimeError: If JAX is newer than the tested versions, and its jaxprs differ in a way that is not supported.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.VarNoise(0.1)
      >>> def network(weights, key, x):
      ...     return x @ p.apply(weights, key)["w"]
      >>> args = {"w": jnp.ones((4, 2))}, jax.random.key(0), jnp.ones((3, 4))
      >>> network(*args).std(0)
      Array([0., 0.], dtype=float32)
      >>> rpx.local(network)(*args).std(0)
      Array([0.03846868, 0.08746041], dtype=float32)
      >>> rpx.explain(rpx.local(network), *args)
      1 of 1 noisy weights draw for each example
        for each example:
          weights/w  float32[4, 2]  1 product

    References:
      Kingma, Salimans and Welling, *Variational Dropout and the Local Reparameterization Trick*, 2015.
    """
    return Local(fun, argnums)


@functools.cache
def check_this_jax() -> None:
    """Raises an error if this JAX writes jaxprs in an unknown way."""
    jaxprs.check_this_jax(lambda: _draws_of_a_network() == [True, True, True])


def _draws_of_a_network() -> list[bool]:
    """For each product of a small network whether it draws for itself."""
    w, way = jax.ShapeDtypeStruct((2, 2), jnp.float32), Drawing()
    noisy = Local(lambda w, key, x: network(w + random.normal(key, w), x), None)
    noisy.rewritten(way, (w, jax.random.key(0), w), {})
    return [read.is_own for read in way.reads]
