"""On an untested JAX, checks with small programs that their jaxprs are read and recomputed as on tested versions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.recompute import recompute
from reparax.programs import dependence, jaxprs
from reparax.transforms.memory._derivative import recomputing_function

_TYPES = (jax.ShapeDtypeStruct((2, 2), jnp.float32),) * 2


@functools.cache
def check_this_jax() -> None:
    """Raises an error if this JAX writes jaxprs in an unknown way."""
    jaxprs.check_this_jax(lambda: all(map(_is_weight_known, _PAIRS)) and _is_recomputed(_network))


# ---- a value that depends on weights only, and one that does not


def _pair(w: Array, x: Array) -> tuple[Array, Array]:
    """A pair of which the first output alone is a weight."""
    return jnp.sin(w), x @ w


_by_hand = jax.custom_jvp(_pair)


@_by_hand.defjvp
def _pair_jvp(primals: Any, tangents: Any) -> Any:
    """The derivative of the pair."""
    return jax.jvp(_pair, primals, tangents)


def _loop(w: Array, x: Array) -> tuple[Array, Array]:
    """The pair in a loop."""
    return jax.lax.scan(lambda pair, _: ((pair[0] * 2, pair[1] @ w), None), (w, x), length=2)[0]


def _choice(w: Array, x: Array) -> tuple[Array, Array]:
    """The pair in a branch."""
    return jax.lax.cond(jnp.sum(x) > 0, lambda: (w * 2, x), lambda: (w, x * 2))


_PAIRS = (_pair, jax.jit(_pair), jax.checkpoint(_pair), _by_hand, _loop, _choice)


def _is_weight_known(pair: Any) -> bool:
    """Whether the first output is known to follow from the weight alone, and the second not."""
    program, consts = jaxprs.consts_first(jax.make_jaxpr(pair)(*_TYPES))
    is_known = dependence.known_variables(program, [*(True for _ in consts), True, False])
    return dependence.are_known(is_known, program.outvars) == [True, False]


# ---- a gradient


def _network(w: Array, x: Array) -> Array:
    """Weights from an ``apply``, which a call, the steps of a loop and a custom derivative read."""
    w = recompute(lambda w, _: jnp.sin(w), w, None)
    x = jax.jit(lambda w, x: jax.nn.relu(x @ jnp.sin(w)))(w, x)
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ jnp.sin(w)), None), x, length=2)
    return jnp.sum(jax.checkpoint(lambda w, x: x @ w)(w, x) ** 2)


def _is_recomputed(network: Any) -> bool:
    """Whether a network keeps a weight without ``remat``, and none with it."""

    def remat_network(w: Array, x: Array) -> Array:
        program, consts = jaxprs.consts_first(jax.make_jaxpr(network)(w, x))
        # No input is known: apply alone marks the weights.
        return recomputing_function(program, [False for _ in program.invars])(*consts, w, x)[0]

    with_storage, with_remat = _depends_on_weights(network), _depends_on_weights(remat_network)
    return any(with_storage) and not any(with_remat) and with_storage.count(False) == with_remat.count(False)


def _depends_on_weights(network: Any) -> list[bool]:
    """For each array that the gradient stores, except arguments, whether it depends on the weights only."""

    def residuals(w: Array, x: Array) -> list[Any]:
        return jaxprs.residuals(jax.linearize(lambda w: network(w, x), w)[1])[0]

    program, consts = jaxprs.consts_first(jax.make_jaxpr(residuals)(*_TYPES))
    is_known = dependence.known_variables(program, [*(True for _ in consts), True, False])
    return [is_known[v] for v in jaxprs.variables(program.outvars) if v not in program.invars]
