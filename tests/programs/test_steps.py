"""One step's part of a value is a slice of the whole value, which numpy takes here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reparax.programs import jaxprs, steps

W = jnp.asarray(np.arange(24, dtype=np.float32).reshape(3, 2, 4) - 7, np.float32)
TABLE = jnp.asarray(np.array([0.5, 7, -2], np.float32), np.float32)
B = jnp.asarray(np.arange(3, dtype=np.float32).reshape(3, 1, 1) + 2, np.float32)


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda primals, tangents: (doubled(*primals), tangents[0] * 5))


FUNCTIONS = {
    "entries": lambda w, b: jnp.tanh(w) * 2 + jnp.where(w > 0, w, 1),
    "broadcast": lambda w, b: w * b,
    "moved": lambda w, b: jnp.swapaxes(w, 0, 1).reshape(2, 3, 2, 2).transpose(1, 0, 3, 2),
    "sums": lambda w, b: w / jnp.sum(jnp.abs(w), axis=1, keepdims=True) + jnp.max(w, axis=2, keepdims=True),
    "products": lambda w, b: jnp.einsum("lij,lkj->lik", w, w),
    "counted": lambda w, b: (
        w * jax.lax.broadcasted_iota(jnp.float32, w.shape, 0) + jax.lax.broadcasted_iota(jnp.float32, w.shape, 2)
    ),
    "cut and joined": lambda w, b: jnp.concatenate([w[:, :1], w], axis=1)[:, :, 1:],
    "split": lambda w, b: jnp.split(w, 2, axis=2)[1],
    "a whole number": lambda w, b: jnp.where(w > 0, jnp.full((2, 4), 0.5), w),
    "stacked": lambda w, b: jnp.stack([w, -w], axis=2),
    "looked up": lambda w, b: TABLE[jnp.abs(w).astype(jnp.int32) % 3],
    "called": lambda w, b: jax.jit(lambda w, b: doubled(w) * jnp.exp(-b))(w, b),
}


def planned(function):
    program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(W, B))
    return steps.plan(program, [(program.outvars[0], 0)]), dict(zip(program.invars, [*consts, W, B], strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_part_is_computed_from_parts_of_inputs(name):
    plan, inputs = planned(FUNCTIONS[name])
    assert {v for v, _ in plan.parts} <= inputs.keys()

    @jax.jit
    def part_and_whole(i, read, w, b):
        pairs = zip(read, plan.parts, strict=True)
        parts = [x if axis is None else jax.lax.dynamic_slice_in_dim(x, i, 1, axis) for x, (_, axis) in pairs]
        return plan.run(i, parts)[0], FUNCTIONS[name](w, b)

    for i in range(3):
        part, whole = part_and_whole(jnp.int32(i), [inputs[v] for v, _ in plan.parts], W, B)
        np.testing.assert_allclose(part, np.asarray(whole)[i : i + 1], rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, b: jnp.cumsum(w, axis=0),
        lambda w, b: jnp.sort(w, axis=0),
        lambda w, b: w[::-1],
        lambda w, b: jnp.concatenate([w[1:], w[:1]]),
        lambda w, b: jnp.roll(w, 1, axis=0),
    ],
    ids=["sums along it", "sorted", "reversed", "joined along it", "rolled"],
)
def test_where_entries_along_the_axis_mix_the_value_is_read_whole(function):
    plan, inputs = planned(function)
    assert not {v for v, _ in plan.parts} <= inputs.keys()


def test_a_part_has_the_derivative_of_its_own():
    plan, inputs = planned(lambda w, b: doubled(w))
    ((v, axis),) = plan.parts
    assert inputs[v] is W
    assert axis == 0
    slope = jax.jit(jax.grad(lambda w: jnp.sum(plan.run(jnp.int32(0), [w])[0])))(np.asarray(W)[:1])
    np.testing.assert_array_equal(slope, np.full((1, 2, 4), 5.0))
