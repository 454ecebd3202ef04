"""What must wait before a weight is computed again: operands of products too, which compilers store."""

import jax
import jax.numpy as jnp

from reparax.transforms._remat_order import barrier_inputs


def test_cheap_operands_of_a_product_wait():
    """Else the larger one, which the product alone reads, is stored from the forward pass to the backward pass."""
    rows, weight = jnp.ones((2, 8)), jnp.ones((8, 8))
    program = jax.make_jaxpr(lambda x, w: jnp.square(x) @ jnp.square(w))(rows, weight).jaxpr
    assert barrier_inputs(program) == set(program.invars)


def test_operands_that_are_read_in_place_do_not_wait():
    rows, weight = jnp.ones((2, 8)), jnp.ones((8, 8))
    program = jax.make_jaxpr(lambda x, w: jnp.square(x) @ w.T)(rows, weight).jaxpr
    assert barrier_inputs(program) == {program.invars[0]}
