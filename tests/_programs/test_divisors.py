"""By which inputs a program divides, read from programs whose formulas are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from reparax._programs import jaxprs
from reparax._programs.divisors import divisors

X = np.ones(4, np.float32)

PROGRAMS = {
    "a quotient": (lambda a, b: a / b, {1}),
    "Adam": (lambda a, b: (0.9 * a + b) / (jnp.sqrt(0.999 * b + a * a) + 1e-8), {1}),
    "one over a root": (lambda a, b: a * lax.rsqrt(b + 1), {1}),
    "a negative power": (lambda a, b: a * b**-2, {1}),
    "a power": (lambda a, b: a * b**-0.5, {1}),
    "a positive power": (lambda a, b: a * b**2, set()),
    "a square": (lambda a, b: a / b**2, set()),
    "a square as a call": (lambda a, b: a / jnp.square(b), set()),
    "a product with itself": (lambda a, b: a / (b * (a + b)), {0}),
    "a norm": (lambda a, b: a / jnp.sqrt(jnp.sum(jnp.abs(b))), set()),
    "the larger": (lambda a, b: 1 / jnp.maximum(a, b), {0, 1}),
    "a call": (lambda a, b: jax.jit(lambda x, y: y / x)(b, a), {1}),
    "what a call gives": (lambda a, b: a / jax.jit(lambda x: x + 1)(b), {1}),
    "a branch": (lambda a, b: lax.cond(a[0] > 0, lambda a, b: a / b, lambda a, b: b, a, b), {1}),
    "what a branch gives": (lambda a, b: 1 / lax.cond(a[0] > 0, lambda a, b: a, lambda a, b: b, a, b), {0, 1}),
    "a loop": (lambda a, b: lax.fori_loop(0, 3, lambda i, x: x + 1, b) / 2 + a / b, {1}),
    "a loop that divides": (lambda a, b: lax.scan(lambda x, y: (x / b, y), a, a)[0], {0, 1}),
    "a constant": (lambda a, b: a / X + b, set()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_tells_by_which_inputs_it_divides(name):
    function, want = PROGRAMS[name]
    program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(X, X))
    assert {i - len(consts) for i in divisors(program) if i >= len(consts)} == want
