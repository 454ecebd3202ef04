"""One step's part of a value is a slice of the whole value, which numpy takes here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.dtypes import float0
from jax.experimental import io_callback
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from reparax.programs import jaxprs, steps

W = jnp.asarray(np.arange(24, dtype=np.float32).reshape(3, 2, 4) - 7, np.float32)
TABLE = jnp.asarray(np.array([0.5, 7, -2], np.float32), np.float32)
SIGNS = jnp.asarray(np.where(np.arange(24).reshape(3, 2, 4) % 5, 1, -1), np.float32)
B = jnp.asarray(np.arange(3, dtype=np.float32).reshape(3, 1, 1) + 2, np.float32)


def with_derivative(function, derivative):
    """A function of one array with this rule for its value and its tangent."""
    function = jax.custom_jvp(function)
    function.defjvp(lambda x, dx: derivative(*x, *dx))
    return function


doubled = with_derivative(lambda x: x * 2, lambda x, dx: (doubled(x), dx * 5))
mixed = with_derivative(lambda x: jnp.cumsum(x, axis=0), lambda x, dx: (x, dx))
mixed_in_its_derivative = with_derivative(lambda x: x * 2, lambda x, dx: (x * 2, jnp.cumsum(dx, axis=0)))
whole_in_its_derivative = with_derivative(lambda x: x * 2, lambda x, dx: (jnp.zeros_like(x) + jnp.max(x), dx))
whole_tangent = with_derivative(lambda x: x * 2, lambda x, dx: (x * 2, jnp.zeros_like(dx) + jnp.sum(dx)))
rounded = with_derivative(lambda x: x.astype(int), lambda x, dx: (x.astype(int), np.zeros(x.shape, float0)))
of_another = with_derivative(lambda x: mixed_in_its_derivative(x), lambda x, dx: (x * 2, dx * 2))


two = with_derivative(lambda x: (x * 2, x * 3), lambda x, dx: (two(x), (dx * 2, dx * 7)))
with_signs = with_derivative(
    lambda x: (x > 0, x * 3), lambda x, dx: (with_signs(x), (np.zeros(x.shape, float0), dx * 7))
)


@jax.custom_jvp
def of_two(x, y):
    return x * y.astype(x.dtype)


of_two.defjvp(lambda x, dx: (of_two(*x), dx[0] * x[1].astype(x[0].dtype)))


def printed(x):
    jax.debug.print("here")
    return x * 2


FUNCTIONS = {
    "entries": lambda w, b: jnp.tanh(w) * 2 + jnp.where(w > 0, w, 1),
    "broadcast": lambda w, b: w * b,
    "moved": lambda w, b: jnp.swapaxes(w, 0, 1).reshape(2, 3, 2, 2).transpose(1, 0, 3, 2),
    "sums": lambda w, b: w / jnp.sum(jnp.abs(w), axis=1, keepdims=True) + jnp.max(w, axis=2, keepdims=True),
    "products": lambda w, b: jnp.einsum("lij,lkj->lik", w, w),
    "counted": lambda w, b: (
        w * lax.broadcasted_iota(jnp.float32, w.shape, 0) + lax.broadcasted_iota(jnp.float32, w.shape, 2)
    ),
    "cut and joined": lambda w, b: jnp.concatenate([w[:, :1], w], axis=1)[:, :, 1:],
    "split": lambda w, b: jnp.split(w, 2, axis=2)[1],
    "a whole number": lambda w, b: jnp.where(w > 0, jnp.full((2, 4), 0.5), w),
    "stacked": lambda w, b: jnp.stack([w, -w], axis=2),
    "looked up": lambda w, b: TABLE[jnp.abs(w).astype(jnp.int32) % 3],
    "an axis less": lambda w, b: lax.squeeze(b * 2, (2,)) + jnp.max(w, axis=2),
    "a whole value in a call": lambda w, b: jax.jit(lambda w, b: w * jnp.max(b))(w, b),
    "called": lambda w, b: jax.jit(lambda w, b: (w, doubled(w) * jnp.exp(-b)))(w, b)[1],
    "a function with another derivative": lambda w, b: of_another(w),
    "a table that counts": lambda w, b: w @ lax.broadcasted_iota(jnp.float32, (4, 5), 0),
    "a table in a call": lambda w, b: jax.jit(lambda b, w: w @ np.arange(20, dtype=np.float32).reshape(4, 5))(b, w),
    "small in a call": lambda w, b: jax.jit(lambda w, b: w[:, :, 0] @ (jnp.ones((2, 1 << 13)) * b[0, 0, 0]))(w, b),
}


def planned(function, axis=0):
    program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(W, B))
    return steps.plan(program, [(program.outvars[0], axis)]), dict(zip(program.invars, [*consts, W, B], strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_part_is_computed_from_parts_of_inputs(name):
    plan, inputs = planned(FUNCTIONS[name])
    assert {v for v, _ in plan.parts} <= inputs.keys()

    @jax.jit
    def part_and_whole(i, read, w, b):
        pairs = zip(read, plan.parts, strict=True)
        parts = [x if axis is None else lax.dynamic_slice_in_dim(x, i, 1, axis) for x, (_, axis) in pairs]
        return plan.run(i, parts)[0], FUNCTIONS[name](w, b)

    for i in range(3):
        part, whole = part_and_whole(jnp.int32(i), [inputs[v] for v, _ in plan.parts], W, B)
        np.testing.assert_allclose(part, np.asarray(whole)[i : i + 1], rtol=1e-6)


def test_a_part_along_another_axis():
    def function(w, b):
        w = w * lax.broadcast_in_dim(b, w.shape, (0, 1, 2)) + lax.broadcasted_iota(np.float32, w.shape, 2)
        return w[1:].reshape(2, 2, 1, 4)

    plan, inputs = planned(function, 3)
    assert [(inputs[v] is W, axis) for v, axis in plan.parts] == [(True, 2), (False, None)]
    part, whole = jax.jit(lambda i, w, b: (plan.run(i, [w[:, :, 2:3], b])[0], function(w, b)))(np.int32(2), W, B)
    np.testing.assert_array_equal(part, whole[..., 2:3])
    counted, _ = planned(lambda w, b: lax.broadcasted_iota(np.float32, (3, 2, 4), 2), 2)
    assert jax.eval_shape(lambda i: counted.run(i, [])[0], np.int32(2)).shape == (3, 2, 1)


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
    "large in a call": lambda w, b: jax.jit(lambda w, b: w[:, :, 0] @ (jnp.ones((2, 1 + 8192)) * b[0, 0, 0]))(w, b),
    "printed in a call": lambda w, b: jax.jit(printed)(w),
    "whole in its derivative": lambda w, b: whole_in_its_derivative(w),
    "a whole tangent": lambda w, b: whole_tangent(w),
    "in its values": lambda w, b: mixed(w),
    "in a derivative in a call": lambda w, b: jax.jit(mixed_in_its_derivative)(w),
    "in its derivative": lambda w, b: mixed_in_its_derivative(w),
    "one value read twice": lambda w, b: of_two(w, w),
    "a number read": lambda w, b: of_two(w, np.float32(2)),
    "an operand without a tangent": lambda w, b: of_two(w, w.astype(jnp.int32)),
    "an output without a tangent": lambda w, b: rounded(w),
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

    def part(w):
        return plan.run(jnp.int32(0), [w])[0]

    @jax.jit
    def slopes(w):
        ones = jnp.ones_like(w)
        by_rule = jax.jvp(lambda w: jax.jvp(part, (w,), (ones,))[0], (w,), (ones,))[1]
        return jax.grad(lambda w: jnp.sum(part(w)))(w), by_rule

    np.testing.assert_array_equal(slopes(np.asarray(W)[:1]), np.full((2, 1, 2, 4), 5.0))


@pytest.mark.parametrize("function", [two, with_signs])
def test_the_part_of_a_second_output_has_its_value_and_derivative(function):
    plan, inputs = planned(lambda w, b: function(w)[1])
    assert [(inputs[v] is W, axis) for v, axis in plan.parts] == [(True, 0)]
    part, slope = jax.jit(lambda w: jax.jvp(lambda w: plan.run(0, [w])[0], (w,), (jnp.ones_like(w),)))(W[:1])
    np.testing.assert_array_equal(part, 3 * np.asarray(W)[:1])
    np.testing.assert_array_equal(slope, np.full((1, 2, 4), 7))


def outputs_and_parts(function, axis, *shapes):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)).jaxpr
    plan = steps.plan(jaxpr, [(jaxpr.outvars[0], axis)])
    return jaxpr, plan, [(jaxpr.invars.index(v) if v in jaxpr.invars else "other", axis) for v, axis in plan.parts]


def dot(contracting, batch):
    return lambda x, y: lax.dot_general(x, y, (contracting, batch))


PLACES = np.array([[1], [0]], np.int32)
READ = [  # what is computed, the shapes of the operands, and for each axis what is read
    (lax.mul, [(3, 4), (1, 4)], [[(0, 0), (1, None)], [(0, 1), (1, 1)]]),
    (lambda x: lax.select_n(x > 0, x, x), [(3, 4)], [[(0, 0)], [(0, 1)]]),
    (
        lambda x: lax.broadcast_in_dim(x, (5, 4, 3), (2, 1)),
        [(1, 4)],
        [[(0, None)], [(0, 1)], [(0, None)]],
    ),
    (lambda x: lax.squeeze(x, (1,)), [(3, 1, 4)], [[(0, 0)], [(0, 2)]]),
    (lambda x: jnp.max(x, 0), [(3, 2, 4)], [[(0, 1)], [(0, 2)]]),
    (lambda x: jnp.sum(x, (0, 2)), [(3, 2, 4, 5)], [[(0, 1)], [(0, 3)]]),
    (lambda x: lax.transpose(x, (2, 0, 1)), [(3, 2, 4)], [[(0, 2)], [(0, 0)], [(0, 1)]]),
    (lambda x: x[:, 1:], [(3, 2)], [[(0, 0)], [("other", 1)]]),
    (lambda x, y: lax.concatenate([x, y], 1), [(3, 2), (3, 4)], [[(0, 0), (1, 0)], [("other", 1)]]),
    (lambda x: lax.split(x, (1, 2), axis=1)[0], [(4, 3)], [[(0, 0)], [("other", 1)]]),
    (lambda x, y: jnp.stack([x, y], 1), [(3, 4)] * 2, [[(0, 0), (1, 0)], [("other", 1)], [(0, 1), (1, 1)]]),
    (lambda x: x.reshape(6, 4), [(3, 2, 4)], [[("other", 0)], [(0, 2)]]),
    (lambda x: x.reshape(2, 3, 4), [(3, 2, 4)], [[("other", 0)], [("other", 1)], [(0, 2)]]),
    (lambda x: x.reshape(3, 2, 2, 2), [(3, 2, 4)], [[(0, 0)], [(0, 1)], [("other", 2)], [("other", 3)]]),
    (lambda x: lax.reshape(x, (3, 4), dimensions=(1, 0)), [(4, 3)], [[("other", 0)], [("other", 1)]]),
    (
        lambda x: lax.gather(x, PLACES, lax.GatherDimensionNumbers((0, 2), (1,), (1,)), (3, 1, 4)),
        [(3, 2, 4)],
        [[("other", 0)], [(0, None), ("other", 0)], [("other", 2)]],
    ),
    (
        lambda x: lax.gather(x, PLACES, lax.GatherDimensionNumbers((1,), (1,), (1,), (0,), (0,)), (1, 1, 4)),
        [(2, 3, 4)],
        [[("other", 0)], [("other", 1)]],
    ),
    (dot(((1,), (0,)), ((), ())), [(3, 2), (2, 4)], [[(0, 0), (1, None)], [(0, None), (1, 1)]]),
    (dot(((1,), (1,)), ((2,), (0,))), [(3, 2, 5), (5, 2)], [[(0, 2), (1, 0)], [(0, 0), (1, None)]]),
]


@pytest.mark.parametrize(("function", "shapes", "expected"), READ)
def test_the_axes_along_which_operands_are_read(function, shapes, expected):
    for axis, parts in enumerate(expected):
        assert outputs_and_parts(function, axis, *shapes)[2] == parts


def test_each_part_is_read_and_computed_once_and_keeps_its_line():
    def twice(x):
        y = jnp.tanh(x)
        return y * jnp.sin(y) + x

    jaxpr, plan, parts = outputs_and_parts(twice, 0, (3, 4))
    assert parts == [(0, 0)]
    assert [each.eqn for each in plan.computations] == jaxpr.eqns
    found = jax.make_jaxpr(lambda x: plan.run(0, [x]))(np.ones((1, 4), np.float32))
    assert [jaxprs.lines(eqn)[0] for eqn in found.eqns] == [jaxprs.lines(eqn)[0] for eqn in jaxpr.eqns]


def test_what_is_laid_over_devices_is_read_whole():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(np.ones((3, 4), np.float32), jax.sharding.NamedSharding(mesh, PartitionSpec(None, "a")))
    jaxpr = jax.make_jaxpr(jnp.sin)(x).jaxpr
    assert steps.plan(jaxpr, [(jaxpr.outvars[0], 0)]).parts == [(jaxpr.outvars[0], 0)]


def test_a_literal_is_no_part():
    jaxpr = jax.make_jaxpr(jnp.sin)(W).jaxpr
    literal = Literal(W, jaxpr.invars[0].aval)
    assert steps._parts_in_body(jaxpr, [(literal, 0)], 0, differentiable=True) is None
