"""The temporary memory of a whole compiled step: one layer's weights are alive at a time, in both passes."""

import re

import jax
import jax.numpy as jnp
import pytest
from grids import mostly_thorough
from jax.sharding import PartitionSpec as Spec

import reparax as rpx

P = rpx.WeightNorm() >> rpx.VarNoise(0.075)
WIDTH, BATCH = 256, 64  # beyond the size at which arrays of one type draw in one loop, all at once
LAYER = 4 * WIDTH**2
KEY = jax.eval_shape(lambda: jax.random.key(0))
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def temporary(loss, values):
    step = jax.jit(jax.value_and_grad(loss))
    return step.lower(values, KEY, X).compile().memory_analysis().temp_size_in_bytes


def unrolled(n):
    """A plain loss of ``n`` dense layers, and its parameters."""

    def loss(w, x):
        for i in range(n):
            x = jnp.tanh(x @ w[f"layer{i}"]["kernel"])
        return jnp.mean(x**2)

    return loss, {f"layer{i}": {"kernel": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)} for i in range(n)}


@pytest.mark.parametrize("n", mostly_thorough([12, 24], 12))
def test_remat_holds_the_weights_of_one_layer_at_a_time(n):
    loss, params = unrolled(n)
    plain = temporary(lambda w, key, x: loss(w, x), params)
    remat = temporary(rpx.remat(lambda raw, key, x: loss(P.apply(raw, key), x)), jax.eval_shape(P.init, params))
    # A weight, its direction, and what XLA makes beside them, whatever the number of layers: with all weights at once
    # it would be as many as there are layers. XLA of JAX 0.8 stores squares before it adds them up, and does so early.
    lengths = jax.jit(lambda w: jnp.sum(w * w, axis=0)).lower(params["layer0"]["kernel"]).compile()
    assert remat <= plain + 3 * LAYER + n * lengths.memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
def test_under_scan_it_holds_those_of_one_step():
    n = 12
    shape = {"kernel": jax.ShapeDtypeStruct((n, WIDTH, WIDTH), jnp.float32)}

    def over(made):
        def loss(raw, key, x):
            def step(x, inputs):
                return jnp.tanh(x @ made(*inputs)["kernel"]), None

            return jnp.mean(jax.lax.scan(step, x, (raw, jax.random.split(key, n)))[0] ** 2)

        return loss

    plain = temporary(over(lambda w, key: w), shape)
    raw = jax.eval_shape(jax.vmap(P.init), shape)
    # A few arrays of one layer's size, where all layers at once were eleven: XLA of JAX 0.8 makes one more than others.
    assert temporary(rpx.remat(over(P.apply)), raw) <= plain + 4 * LAYER
    assert temporary(over(P.apply), raw) >= plain + (n - 1) * LAYER


N = 12
STACK = {"kernel": jax.ShapeDtypeStruct((N, WIDTH, WIDTH), jnp.float32)}


def scanned(w, x):
    """A plain loss of dense layers under a scan, whose weights are stacked."""
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["kernel"]), None), x, w)[0] ** 2)


STAGES = {
    "noise": rpx.VarNoise(0.075),
    "weight norm": rpx.WeightNorm(stacked=0),
    "LoRA": rpx.LoRA(4, stacked=0, where=".*"),
    "dropout": rpx.WeightDropout(0.1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_thorough(STAGES, "noise", "weight norm"))
def test_weights_made_before_a_scan_are_made_in_its_steps(name):
    p = STAGES[name]
    raw = jax.eval_shape(p.init, STACK, KEY)

    def loss(raw, key, x):
        return scanned(p.apply(raw, key), x)

    plain = temporary(lambda w, key, x: scanned(w, x), STACK)
    assert temporary(rpx.remat(loss), raw) <= plain + 3 * LAYER
    assert temporary(loss, raw) >= plain + (N - 1) * LAYER


@pytest.mark.thorough
def test_it_takes_no_more_where_there_is_nothing_to_recompute():
    tied = {"embed": jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32), "layers": STACK}

    def loss(w, key, x):
        x = x + w["embed"][jnp.arange(BATCH)]
        return scanned(w["layers"], x) + jnp.mean(jnp.tanh(x @ w["embed"].T))

    assert temporary(rpx.remat(loss), tied) <= temporary(loss, tied)


@pytest.mark.thorough
def test_factors_in_the_steps_of_a_scan_do_not_copy_frozen_weights():
    p = rpx.Freeze(where=".*") >> rpx.LoRA(4, where=".*")
    raw = jax.eval_shape(lambda w, key: jax.vmap(p.init)(w, jax.random.split(key, N)), STACK, KEY)

    def loss(raw, key, x):
        return jnp.mean(jax.lax.scan(lambda x, raw: (jnp.tanh(x @ p.apply(raw)["kernel"]), None), x, raw)[0] ** 2)

    free, fixed = rpx.partition(raw)

    def of_free(free, fixed, x):
        return loss(rpx.combine(free, fixed), None, x)

    def taken(loss):
        step = jax.jit(jax.value_and_grad(loss))
        return step.lower(free, fixed, X).compile().memory_analysis().temp_size_in_bytes

    assert taken(rpx.factored(of_free)) <= temporary(lambda w, key, x: scanned(w, x), STACK) + LAYER
    assert taken(rpx.remat(rpx.factored(of_free))) <= taken(rpx.factored(of_free))


def test_accelerators_find_each_given_value_behind_a_barrier_of_its_own():
    loss, params = unrolled(3)
    raw = jax.eval_shape(P.init, params)
    found = barriers(lambda raw, key, x: loss(P.apply(raw, key), x), raw)
    assert len(found) >= 7  # three directions, three lengths, a key; and what is made of them
    assert all(line.count("%") == 2 for line in found)  # one value goes in, one comes out


def test_accelerators_read_in_place_what_is_not_recomputed():
    loss, params = unrolled(3)
    assert not barriers(lambda w, key, x: loss(w, x) + jnp.sum(x @ w["layer0"]["kernel"].T), params)


def test_accelerators_store_drawn_weights_and_not_what_is_computed_with_a_few_operations():
    def stored(p):
        """The types of the arrays of a layer's size that are behind a barrier."""
        raw = jax.eval_shape(p.init, STACK)
        found = barriers(lambda raw, key, x: scanned(p.apply(raw, key), x), raw)
        return [kind for line in found for kind in re.findall(rf"tensor<(?:1x)?{WIDTH}x{WIDTH}x(\w+)>", line)]

    assert stored(rpx.VarNoise(0.075)) == 3 * ["f32"]  # noise in both passes, and the parameter
    assert stored(rpx.WeightNorm(stacked=0)) == ["f32"]  # the parameter, from which lengths are computed again


def test_on_tpus_each_step_of_a_scan_converts_its_own_weight():
    # Else their compiler converts all layers' weights to bfloat16 before the loop.
    p = rpx.Freeze() >> rpx.LoRA(4, stacked=0, where=".*")

    def kept(loss, params, platform):
        return program_for(platform, rpx.remat(loss), params).count("popcnt")

    def plain(w, key, x):
        return scanned(w, x)

    def of_factors(raw, key, x):
        return rpx.factored(lambda raw, x: scanned(p.apply(raw), x))(raw, x)

    def over_devices(w, key, x):
        shards = jax.shard_map(
            lambda w, x: jax.lax.pmean(scanned(w, x), "data"),
            mesh=MESH,
            in_specs=(Spec(), Spec("data")),
            out_specs=Spec(),
        )
        return shards(w, x)

    raw = jax.eval_shape(p.init, STACK, KEY)
    assert kept(over_devices, STACK, "tpu") == 2
    assert kept(plain, STACK, "tpu") == kept(of_factors, raw, "tpu") == 2  # forward and backward
    assert kept(plain, STACK, "cpu") == kept(of_factors, raw, "cpu") == 0  # a CPU reads it in place
    halves = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), STACK)
    assert kept(lambda w, key, x: scanned(w, x.astype(jnp.bfloat16)), halves, "tpu") == 0


def program_for(platform, loss, params):
    """The text of its gradient's program."""
    return jax.jit(jax.grad(loss)).trace(params, KEY, X).lower(lowering_platforms=(platform,)).as_text()


def barriers(loss, params):
    """The lines of its gradient's program for an accelerator that are barriers."""
    text = program_for("tpu", rpx.remat(loss), params)
    assert "popcnt" not in text  # no tie, which is for CPUs, and for what steps of a scan read as it is
    return [line for line in text.splitlines() if "optimization_barrier" in line]
