"""What must wait before ``remat`` computes it again, and what is costly, in small programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from reparax.programs import jaxprs
from reparax.transforms._remat_order import barrier_inputs, costly_outputs


def traced(fun, *shapes):
    """The program of a function of arrays of these shapes."""
    return jaxprs.consts_first(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(n, jnp.float32) for n in shapes)))[0]


def names_of(program, found):
    """What values are: inputs by their letters, and others by the primitives that compute them."""
    names = {v: "abcd"[i] for i, v in enumerate(program.invars)}
    names |= {v: eqn.primitive.name for eqn in program.eqns for v in eqn.outvars}
    return sorted(names[v] for v in found)


WAITING = {
    "views": (lambda a: (a.T, a.reshape(8, 1, 8), lax.stop_gradient(a)), [(8, 8)], ""),
    "a constant": (lambda a: (a.T, jnp.zeros(3)), [(8, 8)], ""),
    "what is computed": (lambda a: jnp.sin(a), [(8, 8)], "a"),
    "what is larger": (lambda a: jnp.broadcast_to(jnp.sin(a), (8, 8)), [(8,)], "a"),
    "lengths of a normed weight": (lambda a: a / jnp.sqrt(jnp.sum(a * a, 0)), [(8, 8)], "reduce_sum"),
    "a small input": (lambda a, b: a * jnp.tile(b, (2, 2)), [(8, 8), (4, 4)], "b"),
    "an input that is not small": (lambda a, b: a * jnp.tile(b, 8), [(64,), (8,)], "b"),
    "the smaller half": (lambda a, b: jnp.sin(a) * b[:, None], [(8, 8), (8,)], "ab"),
    "operands of a product": (lambda a, b: jnp.square(a) @ jnp.square(b), [(2, 8), (8, 8)], "ab"),
    "an operand that is read in place": (lambda a, b: jnp.square(a) @ b.T, [(2, 8), (8, 8)], "a"),
    "new axes": (lambda a: lax.broadcast_in_dim(a, (1, 8, 8), (1, 2)), [(8, 8)], ""),
    "repeated entries": (lambda a: lax.broadcast_in_dim(a, (4, 8, 8), (1, 2)), [(8, 8)], "a"),
    "a large value, computed with costly operations": (lambda a: jnp.sum(jnp.sin(a) * jnp.cos(a), 0), [(8, 8)], "a"),
    "cheap values that are summed": (lambda a: jnp.sum(a * 2 + 1, 0), [(8, 8)], "reduce_sum"),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_smallest_values_wait_that_suffice(name):
    fun, shapes, want = WAITING[name]
    with jax.numpy_rank_promotion("allow"):
        program = traced(fun, *shapes)
    found = names_of(program, barrier_inputs(program))
    assert found == ([want] if "_" in want else list(want))


def cheap(n):
    def fun(a):
        for _ in range(n):
            a = a + 1
        return a

    return fun


@pytest.mark.parametrize(
    ("fun", "costly"),
    [
        (cheap(32), False),
        (cheap(33), True),
        (jax.jit(cheap(33)), True),
        (jax.jit(cheap(32)), False),
        (lambda a: jnp.sin(a), True),
        (jax.jit(jnp.sin), True),
        (lambda a: a / jnp.sqrt(jnp.sum(a * a)), False),
        (lambda a: cheap(20)(a) * cheap(20)(a), True),
        (lambda a: (lambda b: b * b)(cheap(30)(a)), False),
        (lambda a: a * jnp.broadcast_to(jnp.sin(a[:2]), (4, 2, 8)).reshape(8, 8), False),
        (lambda a: a * jnp.broadcast_to(jnp.sin(a[:4]), (2, 4, 8)).reshape(8, 8), True),
        (lambda a: (a + 1).T.astype(jnp.bfloat16), False),
    ],
)
def test_values_of_many_operations_for_each_entry_are_costly(fun, costly):
    assert bool(costly_outputs(traced(fun, (8, 8)))) == costly
