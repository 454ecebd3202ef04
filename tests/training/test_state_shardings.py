"""Shardings of optimizer states: each array lies with its raw array."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from compiled import init
from errors import table
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from one_array import normal

import reparax as rpx

MESH = AbstractMesh((2, 4), ("data", "model"))
BOTH = P("data", "model")
CHAIN = rpx.Freeze(where="b") >> rpx.WeightNorm() >> rpx.VarNoise(0.1)
LIKE = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32), "b": jax.ShapeDtypeStruct((16,), jnp.float32)}
RAW = jax.eval_shape(CHAIN.init, LIKE)
SHARDINGS = CHAIN.shardings({"w": BOTH, "b": P("model")}, MESH, like=LIKE)
PARTITIONED = optax.partition({"free": optax.adam(1e-3), "fixed": optax.set_to_zero()}, rpx.training.param_labels)


def specs(tree):
    return jax.tree.map(lambda sharding: sharding.spec, tree)


def state_specs(tx):
    state = jax.eval_shape(tx.init, RAW)
    shardings = rpx.training.state_shardings(state, RAW, SHARDINGS)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    return specs(shardings)


def test_moments_lie_with_their_raw_arrays_and_counters_everywhere():
    state = state_specs(optax.adam(1e-3))[0]
    assert state.mu == state.nu == specs(SHARDINGS)
    assert state.count == P()


def test_the_state_of_a_partition_lies_with_what_it_moves():
    moments = state_specs(PARTITIONED).inner_states["free"].inner_state[0].mu
    assert moments["w"] == specs(SHARDINGS)["w"]
    assert jax.tree.leaves(moments["b"]) == []


def test_accumulated_gradients_lie_with_their_raw_arrays():
    state = state_specs(optax.MultiSteps(PARTITIONED, every_k_schedule=2))
    assert state.acc_grads == specs(SHARDINGS)
    assert state.inner_opt_state.inner_states["free"].inner_state[0].nu["w"] == specs(SHARDINGS)["w"]
    assert (state.mini_step, state.gradient_step) == (P(), P())


def test_a_state_of_another_shape_than_its_raw_array_lies_everywhere():
    state = state_specs(optax.scale_by_factored_rms(min_dim_size_to_factor=8))
    assert jax.tree.leaves((state.v_row, state.v_col)) == [P()] * 6


def test_a_parameter_with_the_name_of_a_moment_lies_where_it_should():
    raw = {name: jnp.zeros((8, 16)) for name in ("w", "x")} | {"mu": {"w": jnp.zeros((8, 16))}}
    split = {"w": NamedSharding(MESH, P("data")), "mu": {"w": NamedSharding(MESH, P("model"))}}
    shardings = split | {"x": NamedSharding(MESH, BOTH)}
    state = {"mu": raw, "nu": raw, "f": jnp.tanh}
    found = rpx.training.state_shardings(state, raw, shardings)
    assert found == {"mu": shardings, "nu": shardings, "f": None}


def test_a_whole_training_state_is_one_of_these_trees():
    state = {"params": RAW, "opt": jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, RAW), "step": jnp.zeros(())}
    shardings = rpx.training.state_shardings(state, RAW, SHARDINGS)
    assert (shardings["params"], shardings["opt"][0].trace, shardings["step"].spec) == (SHARDINGS, SHARDINGS, P())


def test_a_training_step_keeps_all_shardings_and_computes_what_one_device_computes(key):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = {"w": normal(8, 16), "b": np.ones(16, np.float32)}
    raw = init(CHAIN, params)
    tx = optax.partition(
        {"free": optax.sgd(0.1, momentum=0.9), "fixed": optax.set_to_zero()}, rpx.training.param_labels
    )
    state = jax.jit(tx.init)(raw)
    raws = CHAIN.shardings({"w": BOTH, "b": P("model")}, mesh, like=params)
    states = rpx.training.state_shardings(state, raw, raws)
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)

    def step(raw, state, x, key):
        def loss(raw):
            effective = CHAIN.apply(raw, key)
            return jnp.mean(jnp.square(x @ effective["w"] + effective["b"][None]))

        updates, state = tx.update(jax.grad(loss)(raw), state, raw)
        return optax.apply_updates(raw, updates), state

    expected = jax.jit(step)(raw, state, x, key)
    placed = jax.device_put((raw, state, x), (raws, states, NamedSharding(mesh, P("data"))))
    sharded = jax.jit(step, out_shardings=(raws, states), donate_argnums=(0, 1))(*placed, key)
    got = jax.tree.map(lambda a, sharding: a.sharding.is_equivalent_to(sharding, a.ndim), sharded, (raws, states))
    assert all(jax.tree.leaves(got))
    chex.assert_trees_all_close(sharded, expected, rtol=1e-5, atol=1e-6)


def refused_state(raw, shardings):
    state = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, RAW)
    rpx.training.state_shardings(state, raw, shardings)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
