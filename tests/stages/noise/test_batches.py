"""Small arrays of one type draw in one loop: the same numbers, in a program that does not grow with their number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough
from jax import export
from jax.sharding import AxisType

import reparax as rpx
from reparax.core import random
from reparax.core.random import LOOPED

KEY = jax.random.key(11)
KEYS = jax.random.wrap_key_data(np.arange(6, dtype=np.uint32).reshape(3, 2))
EPS = 2.0**-23
"""A unit in the last place of 1, of which a normal number may differ by four between programs."""
STAGES = [rpx.VarNoise(1.0), rpx.WeightDropout(0.4), rpx.WeightDropout(0.4, broadcast_dims=-1)]

every_stage = pytest.mark.parametrize("p", STAGES, ids=repr)


def tree_of(count, shape=(16, 8)):
    return {f"w{i}": np.full(shape, i + 1.0, np.float32) for i in range(count)}


def loops(p, tree, key=KEY):
    """How many loops draw: those of the jaxpr, where JAX has not yet made loops of its own generator."""
    return str(jax.make_jaxpr(p.apply)(tree, key)).count("scan[")


@pytest.mark.thorough
@pytest.mark.parametrize("impl", mostly_thorough(["threefry2x32", "rbg", "unsafe_rbg"], "threefry2x32", "rbg"))
def test_a_batch_of_keys_draws_what_each_key_draws_alone(impl):
    keys = [jax.random.key(seed, impl=impl) for seed in range(3)]
    w = jnp.zeros((5, 3))

    @jax.jit
    def drawn(key):
        return random.normal(key, w), random.normal(key, w.astype(complex)), random.uniform(key, w, (1,))

    batch = jax.tree.map(np.asarray, drawn(jnp.stack(keys)))
    for i, key in enumerate(keys):
        for one, alone in zip(batch, drawn(key), strict=True):
            np.testing.assert_allclose(one[i], alone, rtol=1e-6)


@every_stage
def test_an_array_draws_the_same_alone_and_with_others_of_its_type(p):
    together, alone = p.apply(tree_of(3), KEY), {}
    for name, w in tree_of(3).items():
        alone |= p.apply({name: w}, KEY)
    for name, w in alone.items():
        np.testing.assert_allclose(together[name], w, rtol=1e-6)


@every_stage
def test_no_two_arrays_of_one_type_share_a_draw(p):
    drawn = p.apply(dict.fromkeys("abc", np.ones((16, 8), np.float32)), KEY)
    assert len({np.asarray(w).tobytes() for w in drawn.values()}) == 3


@every_stage
@pytest.mark.parametrize(("count", "looped"), [(1, 0), (2, 1), (100, 1)])
def test_arrays_of_one_type_draw_in_one_loop(p, count, looped):
    assert loops(p, tree_of(count)) == looped


def test_large_arrays_draw_alone():
    large = tree_of(3, (2**7, 2**7 + 1))
    assert large["w0"].size > LOOPED >= 2**14
    assert loops(rpx.VarNoise(1.0), large) == 0


def test_arrays_of_symbolic_shapes_draw_alone():
    p, (size,) = rpx.VarNoise(1.0), export.symbolic_shape("n")
    types = {name: jax.ShapeDtypeStruct((size, 3), jnp.float32) for name in "ab"}
    exported = export.export(jax.jit(p.apply))(types, jax.eval_shape(lambda: KEY))
    tree = {name: np.ones((5, 3), np.float32) for name in "ab"}
    want = p.apply(tree, KEY)
    for name, w in exported.call(tree, KEY).items():
        np.testing.assert_allclose(w, want[name], rtol=1e-6, atol=4 * EPS)


def test_arrays_under_vmap_have_the_gradients_of_each_alone():
    p, tree = rpx.WeightDropout(0.5), tree_of(3)

    def loss(tree, key):
        return sum(jnp.sum(w**2) for w in p.apply(tree, key).values())

    gradients = jax.tree.map(np.asarray, jax.jit(jax.vmap(jax.grad(rpx.remat(loss)), (None, 0)))(tree, KEYS))
    for i, one in enumerate(KEYS):
        for name, w in p.apply(tree, one).items():  # of (w m / keep)^2: twice the effective weight times m / keep
            np.testing.assert_allclose(gradients[name][i], 4 * np.asarray(w), rtol=1e-6)


# ---- on eight devices

MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
SPECS = [jax.P("a", None), jax.P(None, "a"), jax.P("a", None), jax.P()]


def sharded(mesh):
    return {
        f"w{i}": jax.device_put(np.ones((16, 8), np.float32), jax.NamedSharding(mesh, s)) for i, s in enumerate(SPECS)
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "looped"), [(MESH, 0), (EXPLICIT, 1)], ids=["auto", "explicit"])
def test_arrays_of_one_shape_and_different_shardings_need_no_communication(mesh, looped):
    p, tree = rpx.VarNoise(1.0), sharded(mesh)
    with jax.set_mesh(mesh):
        compiled = jax.jit(p.apply).lower(tree, KEY).compile()
        assert loops(p, tree) == looped
        got = compiled(tree, KEY)
    for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert word not in compiled.as_text()
    want = p.apply(dict.fromkeys(tree, np.ones((16, 8), np.float32)), KEY)
    for name, w in got.items():
        assert w.sharding.is_equivalent_to(tree[name].sharding, 2)
        np.testing.assert_allclose(w, want[name], rtol=1e-6, atol=4 * EPS)


@pytest.mark.thorough
def test_inside_shard_map_arrays_of_one_type_draw_in_a_loop(key):
    p, tree = rpx.VarNoise(1.0), dict.fromkeys("ab", np.ones((16, 8), np.float32))
    local = jax.jit(jax.shard_map(p.apply, mesh=MESH, in_specs=(jax.P("a"), jax.P()), out_specs=jax.P("a")))
    assert str(local.trace(tree, key).jaxpr).count("scan[") == 1
    want = p.apply(dict.fromkeys(tree, np.ones((4, 8), np.float32)), key)
    for name, w in local(tree, key).items():
        np.testing.assert_allclose(w, np.tile(want[name], (4, 1)), rtol=1e-6)
