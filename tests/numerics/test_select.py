"""Selection against numpy's stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from reparax.numerics.select import mask_largest, mask_largest_of_all


def by_sorting(scores, count):
    """True at the ``count`` largest scores, by numpy: NaN comes last, and equal scores in the order of indices."""
    flat = -np.asarray(scores).reshape(-1).astype(np.float64)
    kept = np.zeros(flat.size, bool)
    kept[np.argsort(flat, kind="stable")[: max(0, count)]] = True
    return kept.reshape(scores.shape)


def scores(dtype, size=200):
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size)
    holes = normal.copy()
    for value, share in ((0.0, 0.3), (-0.0, 0.2), (np.inf, 0.1), (-np.inf, 0.1), (np.nan, 0.2)):
        holes[rng.random(size) < share] = value
    limits = np.array([1.0, -1.0])[rng.integers(0, 2, size)] * float(jnp.finfo(dtype).max)
    every = [normal, abs(normal), np.round(normal), np.zeros(size), np.full(size, np.nan), holes, limits]
    return np.stack(every).astype(dtype)


counts = jax.jit(jax.vmap(jax.vmap(mask_largest, (None, 0)), (0, None)))


@pytest.mark.parametrize("dtype", mostly_thorough(["float16", "bfloat16", "float32", "float64"], "float16", "float32"))
@pytest.mark.parametrize("size", [1, 200])
def test_the_largest_stay_and_of_equal_ones_the_first(dtype, size):
    wanted = np.array([-1, 0, 1, size // 4, size // 2, size - 1, size, size + 3], np.int32)
    with jax.enable_x64():
        w = scores(dtype, size)
        got = np.asarray(counts(w, wanted))
    for row, masks in zip(w, got, strict=True):
        for count, mask in zip(wanted, masks, strict=True):
            np.testing.assert_array_equal(mask, by_sorting(row, count), err_msg=f"{count} of {row}")


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)], ids=str)
def test_arrays_of_any_shape(shape):
    w = np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32)
    np.testing.assert_array_equal(mask_largest(w, 1), by_sorting(w, 1))


@pytest.mark.parametrize("count", [0, 7, 20, 31])
def test_several_arrays_are_ranked_together(count):
    w = np.random.default_rng(0).integers(-2, 3, 30).astype(np.float32)
    got = mask_largest_of_all([w[:11], w[11:12].reshape(()), w[12:].reshape(3, 6)], count)
    assert [x.shape for x in got] == [(11,), (), (3, 6)]
    np.testing.assert_array_equal(np.concatenate([np.ravel(x) for x in got]), by_sorting(w, count))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_an_array_on_a_mesh_stays_where_it_is(kind):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    w = np.round(4 * np.random.default_rng(0).standard_normal((8, 16))).astype(np.float32)
    placed = jax.device_put(w, NamedSharding(mesh, P("a", "b")))
    program = mask_largest.lower(placed, 40).compile().as_text()
    assert "all-gather" not in program
    assert "sort(" not in program
    got = mask_largest(placed, 40)
    assert got.sharding.is_equivalent_to(placed.sharding, 2)
    np.testing.assert_array_equal(got, by_sorting(w, 40))


def test_each_device_selects_alone_under_shard_map():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    w = np.random.default_rng(0).integers(-2, 3, (8, 20)).astype(np.float32)
    got = jax.shard_map(lambda x: mask_largest(x, 7), mesh=mesh, in_specs=P("a"), out_specs=P("a"))(w)
    np.testing.assert_array_equal(got, np.stack([by_sorting(row, 7) for row in w]))
