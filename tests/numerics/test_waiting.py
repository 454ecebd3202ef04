"""A value that waits is the very value, on every platform, for every type and under every transformation."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from reparax.numerics.tie import by_integers, compute_once, has_bits, pull_back_once, read_in_step, store_whole, tie

ODD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.5, -7.25])
FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn]
VALUES = {
    **{jnp.dtype(dtype).name: ODD.astype(dtype) for dtype in FLOATS},
    "int32": np.array([0, -1, 2**31 - 1], np.int32),
    "uint8": np.array([0, 255], np.uint8),
    "int4": np.array([-8, 7], ml_dtypes.int4),
    "bool": np.array([True, False]),
    "complex64": (ODD[:4, None] + 1j * ODD[None, 4:]).astype(np.complex64),
}
AFTER = {
    "a number": np.float32(3.0),
    "NaN": np.full((2, 3), np.nan, np.float32),
    "half": np.ones(4, jnp.bfloat16),
    "whole numbers": np.array([[-1]], np.int32),
    "truth": np.array([True]),
    "complex": np.array([1.0 + 2.0j], np.complex64),
}


def bits(x):
    return np.asarray(x).tobytes()


@jax.jit
def tied_to_each(x, afters):
    return {name: tie(x, after) for name, after in afters.items()}


@pytest.mark.parametrize("name", VALUES)
def test_every_bit_stays(name):
    x = jnp.asarray(VALUES[name])
    for after, got in tied_to_each(x, AFTER).items():
        assert got.dtype == x.dtype, after
        assert bits(got) == bits(x), after
    assert bits(tie(x, AFTER["NaN"])) == bits(x)


def test_every_bit_of_what_a_step_reads_stays_on_tpus_too():
    x = jnp.asarray(VALUES["float32"])
    assert bits(jax.jit(by_integers)(x)) == bits(x)
    program = jax.jit(read_in_step).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "popcnt" in program
    value, slope = jax.jvp(jax.vmap(read_in_step), (x,), (x,))
    assert bits(value) == bits(slope) == bits(x)


def test_keys_stay():
    for key in (jax.random.key(3), jax.random.split(jax.random.key(3), (2, 3))):
        got = jax.jit(tie)(key, jnp.ones(2))
        np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(key))


def test_derivatives_are_those_of_the_value():
    x, after = jnp.arange(3.0), jnp.ones(2)
    out, dot = jax.jvp(tie, (x, after), (x + 1, after))
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(dot, x + 1)
    assert ties(lambda x, after: jax.jvp(tie, (x, after), (x, after)), x, after) == 1
    grads = jax.jit(jax.grad(lambda x, after: jnp.sum(tie(x, after) ** 2), (0, 1)))(x, after)
    np.testing.assert_array_equal(grads[0], 2 * x)
    np.testing.assert_array_equal(grads[1], 0 * after)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 1), (None, 1)], ids=str)
def test_batches(axes):
    x, after = np.arange(6, dtype=np.float32).reshape((2, 3) if axes[0] == 1 else (3, 2)), np.ones((3, 3), np.float32)
    got = jax.jit(jax.vmap(tie, axes))(x, after)
    expected = np.stack(3 * [x]) if axes[0] is None else np.moveaxis(x, axes[0], 0)
    np.testing.assert_array_equal(got, expected)


def ties(f, *args):
    """How many values wait in a program."""
    return sum(eqn.primitive.name == "reparax_tie" for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns)


def placed(where):
    """An array on an explicit mesh of one axis, of which its name and a spec are given, or on none."""
    if where is None:
        return jnp.ones((2, 4))
    mesh = jax.make_mesh((2,), where[:1], axis_types=(AxisType.Explicit,))
    return jax.device_put(np.ones((2, 4), np.float32), NamedSharding(mesh, where[1]))


@pytest.mark.parametrize(
    ("x", "after", "expected"),
    [
        (("a", P()), ("a", P()), 1),
        (("a", P("a")), ("a", P()), 0),
        (("a", P()), ("a", P(None, "a")), 0),
        (("a", P()), ("b", P()), 0),
        (("a", P()), None, 0),
        (None, ("a", P()), 0),
        (None, None, 1),
    ],
)
def test_on_explicit_meshes_nothing_waits_that_is_sharded_or_on_another_mesh(x, after, expected):
    assert ties(tie, placed(x), placed(after)) == expected
    assert "popcnt" in jax.jit(tie).lower(placed(x), placed(after)).as_text() or not expected


@pytest.mark.parametrize(
    ("axes", "spec", "after", "expected"),
    [((0, 0), P(), P(), 1), ((0, 0), P("a"), P("a"), 0), ((None, 0), P(), P("a"), 0), ((0, None), P("a"), P(), 1)],
)
def test_nothing_waits_for_a_batch_that_is_sharded(axes, spec, after, expected):
    assert ties(jax.vmap(tie, axes), placed(("a", spec)), placed(("a", after))) == expected


def test_under_jet_and_where_a_function_is_transposed_what_is_known_stays_known():
    x, slope = jnp.arange(3.0), jnp.ones(3)
    for wait in compute_once, lambda x: tie(x, x), lambda x: x + tie(np.zeros(3, np.float32), x):
        value, (first,) = jet.jet(lambda x, wait=wait: wait(x) * x, (x,), ((slope,),))
        np.testing.assert_array_equal((value, first), (x**2, 2 * x))

    def transposed(x, after):
        return jax.linear_transpose(lambda y: tie(x, after) * y + tie(y, x), slope)(slope)[0]

    np.testing.assert_array_equal(transposed(x, x), x + 1)
    assert ties(transposed, x, x) == 1
    np.testing.assert_array_equal(jax.linear_transpose(lambda y: tie(x, y) * y, slope)(slope)[0], x)


def test_cpus_see_data_and_others_see_nothing():
    lowered = {
        platform: jax.jit(lambda x, after: tie(x, after) + 1)
        .trace(jnp.ones(3), jnp.ones(2))
        .lower(lowering_platforms=(platform,))
        .as_text()
        for platform in ("cpu", "tpu", "cuda")
    }
    assert [("popcnt" in text) for text in lowered.values()] == [True, False, False]


def test_no_compiler_for_cpus_knows_that_it_is_zero():
    text = jax.jit(tie).lower(jnp.ones(3), jnp.ones(2)).compile().as_text()
    assert "popcnt" in text or "popcount" in text


def test_what_has_bits():
    assert has_bits(jnp.ones((1, 2)))
    assert has_bits(np.float32(1))
    assert not has_bits(jnp.ones((0, 2)))
    assert not has_bits(jnp.ones((2, 0)))
    assert not has_bits(jax.ShapeDtypeStruct(jax.export.symbolic_shape("2, n"), jnp.float32))
    assert not has_bits(jax.random.key(0))
    assert not has_bits(np.zeros((1,), jax.dtypes.float0))


def test_a_whole_array_is_itself_behind_a_barrier_where_that_helps():
    x = jnp.asarray(VALUES["float32"])
    assert bits(jax.jit(store_whole)(x)) == bits(x) == bits(store_whole(x))
    np.testing.assert_array_equal(
        jax.jit(jax.grad(lambda x: jnp.sum(store_whole(x) ** 2)))(jnp.arange(3.0)), [0.0, 2.0, 4.0]
    )
    np.testing.assert_array_equal(jax.jvp(store_whole, (x,), (x,))[1], x)
    np.testing.assert_array_equal(jax.vmap(store_whole, 1)(jnp.ones((2, 3))), jnp.ones((3, 2)))
    assert "reparax_whole" in str(jax.make_jaxpr(jax.vmap(store_whole))(x))
    for platform, expected in {"cpu": False, "tpu": True, "cuda": True}.items():
        text = jax.jit(store_whole).trace(x).lower(lowering_platforms=(platform,)).as_text()
        assert ("optimization_barrier" in text) is expected


def test_what_is_computed_once_is_itself_behind_what_each_compiler_keeps():
    x = jnp.asarray([0.0, -0.0, jnp.inf, jnp.nan, 1e-30, -3.7], jnp.float32)
    half = x.astype(jnp.bfloat16)
    assert bits(jax.jit(compute_once)(x)) == bits(x) == bits(compute_once(x))
    assert bits(jax.jit(compute_once)(half)) == bits(half)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(compute_once(x)))(x), jnp.ones(6))
    assert jax.vmap(compute_once)(x[:, None]).shape == (6, 1)
    for platform, kept in {"cpu": "divide", "tpu": "optimization_barrier", "cuda": "optimization_barrier"}.items():
        text = jax.jit(compute_once).trace(x).lower(lowering_platforms=(platform,)).as_text()
        assert f"stablehlo.{kept}" in text


def test_what_is_pulled_back_once_is_itself_and_its_cotangent_is_kept():
    x = jnp.asarray([0.0, jnp.inf, -3.7], jnp.float32)
    assert bits(jax.jit(pull_back_once)(x)) == bits(x) == bits(pull_back_once(x))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(pull_back_once(x)))(x), jnp.ones(3))
    assert jax.vmap(pull_back_once)(x[:, None]).shape == (3, 1)
    assert "divide" not in jax.jit(pull_back_once).lower(x).as_text()
    _, back = jax.vjp(pull_back_once, x)
    assert "stablehlo.divide" in jax.jit(back).trace(x).lower(lowering_platforms=("cpu",)).as_text()
