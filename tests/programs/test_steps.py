"""One step's part of a value is a slice of the whole value, which numpy takes here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from reparax.programs import jaxprs, steps

W = jnp.asarray(np.arange(24, dtype=np.float32).reshape(3, 2, 4) - 7, np.float32)
TABLE = jnp.asarray(np.array([0.5, 7, -2], np.float32), np.float32)
SIGNS = jnp.asarray(np.where(np.arange(24).reshape(3, 2, 4) % 5, 1, -1), np.float32)
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
    "an axis less": lambda w, b: jax.lax.squeeze(b * 2, (2,)) + jnp.max(w, axis=2),
    "a whole value in a call": lambda w, b: jax.jit(lambda w, b: w * jnp.max(b))(w, b),
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


@jax.custom_jvp
def mixed_in_its_derivative(x):
    return x * 2


mixed_in_its_derivative.defjvp(lambda x, dx: (x[0] * 2, jnp.cumsum(dx[0], axis=0)))


@jax.custom_jvp
def of_two(x, y):
    return x * y.astype(x.dtype)


of_two.defjvp(lambda x, dx: (of_two(*x), dx[0] * x[1].astype(x[0].dtype)))
MIXED = {
    "sums along it": lambda w, b: jnp.cumsum(w, axis=0),
    "sorted": lambda w, b: jnp.sort(w, axis=0),
    "reversed": lambda w, b: w[::-1],
    "joined along it": lambda w, b: jnp.concatenate([w[1:], w[:1]]),
    "rolled": lambda w, b: jnp.roll(w, 1, axis=0),
    "merged": lambda w, b: jnp.sum(w, axis=2).reshape(2, 3) * 2,
    "called outside": lambda w, b: io_callback(lambda w: w, W, w) * 2,
    "the largest": lambda w, b: jnp.argmax(w, axis=1),
    "split along it": lambda w, b: jnp.split(w, 3, axis=0)[0] * 2,
    "stacked along it": lambda w, b: jnp.stack([w, w], axis=0),
    "places for each": lambda w, b: jax.vmap(lambda w, i: w[i])(w, jnp.array([0, 1, 0])) * 2,
    "a part of a table": lambda w, b: w[:, jnp.array([1, 0])] * 2,
    "a constant in a call": lambda w, b: jax.jit(lambda w: w * SIGNS)(w),
    "a part and the whole in a call": lambda w, b: jax.jit(lambda w: w * jnp.max(w))(w),
    "in a call": lambda w, b: jax.jit(lambda w: w * jnp.cumsum(w, axis=0))(w),
    "along two axes in a call": lambda w, b: jax.jit(lambda v: v * v.T)(w[:, 0, :3]),
    "large in a call": lambda w, b: jax.jit(lambda w: w[:, :, 0] @ (jnp.ones((2, 1 << 14)) * w[0, 0, 0]))(w),
    "in its derivative": lambda w, b: mixed_in_its_derivative(w),
    "one value read twice": lambda w, b: of_two(w, w),
    "a number read": lambda w, b: of_two(w, np.float32(2)),
    "no tangent": lambda w, b: of_two(w, jnp.int32(2)),
}


@pytest.mark.parametrize("name", MIXED)
def test_where_entries_along_the_axis_mix_the_value_is_read_whole(name):
    plan, inputs = planned(MIXED[name])
    assert not {v for v, _ in plan.parts} <= inputs.keys()


def test_what_is_not_differentiated_needs_no_derivative_by_parts():
    jaxpr = jax.make_jaxpr(lambda w: mixed_in_its_derivative(w) + of_two(w, w))(W).jaxpr
    assert steps.plan(jaxpr, [(jaxpr.outvars[0], 0)], differentiable=False).parts == [(jaxpr.invars[0], 0)]


def test_a_part_has_the_derivative_of_its_own():
    plan, inputs = planned(lambda w, b: doubled(w))
    ((v, axis),) = plan.parts
    assert inputs[v] is W
    assert axis == 0
    slope = jax.jit(jax.grad(lambda w: jnp.sum(plan.run(jnp.int32(0), [w])[0])))(np.asarray(W)[:1])
    np.testing.assert_array_equal(slope, np.full((1, 2, 4), 5.0))
