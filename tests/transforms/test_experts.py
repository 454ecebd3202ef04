"""Factored experts: each factor is multiplied for the rows of its expert, however the layer is written."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough
from jax import lax
from kept import in_factors
from loops import LAYERS

import reparax as rpx

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def stages(ndim):
    stacked = {"stacked": tuple(range(ndim - 2))} if ndim > 2 else {}
    return {
        "LoRA": rpx.LoRA(2, **stacked),
        "LowRank": rpx.LowRank(2, **stacked),
        "WeightNorm": rpx.WeightNorm(**stacked),
    }


def derivatives(p, layer, wrap, *, twice):
    """The loss, its gradient, and the gradient's derivative in a direction; JAX has no gradient of sums in groups."""

    def loss(raw, x, sizes):
        y = layer(p.apply(raw)["w"], x, sizes)
        return jnp.mean(jnp.sin(y) * jnp.arange(1.0, y.size + 1).reshape(y.shape))

    def all_of_them(raw, x, sizes, raw_dot, x_dot):
        f = wrap(loss)
        value, slope = jax.jvp(lambda raw, x: f(raw, x, sizes), (raw, x), (raw_dot, x_dot))
        if not twice:
            return value, slope
        grad = jax.grad(f, (0, 1))
        return value, slope, *jax.jvp(lambda raw, x: grad(raw, x, sizes), (raw, x), (raw_dot, x_dot))

    return jax.jit(all_of_them)


@pytest.fixture
def _kept():
    with in_factors():
        yield


ROWS = [*zip(LAYERS, itertools.cycle(stages(3)))]


@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("row", mostly_thorough(ROWS, ("plain", "LoRA"), ("sums of the second", "LowRank")))
def test_values_and_derivatives_are_those_of_a_loop_over_experts(row):
    name, stage = row
    with jax.enable_x64():
        layer = LAYERS[name]
        p = stages(len(layer.weight))[stage]
        raw, x = p.init({"w": jnp.asarray(normal(*layer.weight))}, KEY), normal(*layer.data, seed=1)
        leaves, treedef = jax.tree.flatten(raw)
        raw, raw_dot = (
            treedef.unflatten([normal(*leaf.shape, seed=n + i) for i, leaf in enumerate(leaves)]) for n in (2, 9)
        )
        twice = not name.startswith("sums")
        mine, its = (
            derivatives(p, written, wrap, twice=twice)
            for written, wrap in ((layer.written, rpx.factored), (layer.loop, lambda f: f))
        )
        for sizes in layer.sizes:
            args = raw, x, np.asarray(sizes, np.int32), raw_dot, normal(*layer.data, seed=3)
            for a, b in zip(jax.tree.leaves(mine(*args)), jax.tree.leaves(its(*args)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


E_, D, F, T = 8, 64, 96, 64
LORA = rpx.Freeze() >> rpx.LoRA(2, stacked=0)
SIZES = np.array([5, 0, 9, 20, 10, 1, 9, 6], np.int32)
WEIGHTS = {"w": normal(E_, D, F).astype(np.float32)}
DATA = normal(T, D, seed=1).astype(np.float32) / 8


def squares(y):
    return jnp.mean(jnp.tanh(y).astype(jnp.float32) ** 2)


def split(p):
    raw = p.init(WEIGHTS, KEY)
    raw["w"]["@lora"]["b"] = jnp.asarray(normal(*raw["w"]["@lora"]["b"].shape, seed=5), jnp.float32)
    return rpx.partition(raw)


def by_hand(free, fixed, x, sizes):
    values = rpx.combine(free, fixed)["w"]["@lora"]
    low = lax.ragged_dot(lax.ragged_dot(x, values["a"], sizes), values["b"], sizes)
    return squares(lax.ragged_dot(x, values["@fixed"]["w"]["@freeze"]["@fixed"]["w"], sizes) + low)


def loss(free, fixed, x, sizes):
    return squares(lax.ragged_dot(x, LORA.apply(rpx.combine(free, fixed))["w"], sizes))


def compiled(f):
    return jax.jit(jax.grad(f)).lower(*split(LORA), DATA, SIZES).compile()


@pytest.mark.thorough
def test_experts_cost_what_they_cost_by_hand_in_factors_and_nothing_is_formed():
    mine, its = (compiled(f) for f in (rpx.factored(loss, (0, 1)), by_hand))
    assert mine.cost_analysis()["flops"] <= 1.1 * its.cost_analysis()["flops"]
    assert mine.memory_analysis().temp_size_in_bytes <= 1.1 * its.memory_analysis().temp_size_in_bytes
    (weight,) = rpx.explain(loss, *split(LORA), DATA, SIZES, argnums=(0, 1)).weights
    assert weight.is_transformed
    assert weight.reason.startswith("1 product, 0.")


@pytest.mark.thorough
def test_factors_in_half_precision_give_results_in_the_preferred_type():
    def half(free, fixed, x, sizes):
        w = LORA.apply(rpx.combine(free, fixed))["w"].astype(jnp.bfloat16)
        return squares(lax.ragged_dot(x.astype(jnp.bfloat16), w, sizes, preferred_element_type=jnp.float32))

    args = *split(LORA), DATA, SIZES
    (weight,) = rpx.explain(half, *args, argnums=(0, 1)).weights
    assert weight.is_transformed
    got, want = (jax.jit(jax.value_and_grad(f))(*args) for f in (rpx.factored(half, (0, 1)), by_hand))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-2 * np.max(np.abs(b))), got[1], want[1])


@pytest.mark.thorough
def test_a_gradient_inside_of_the_loss_forms_what_it_reads():
    """A product for each expert, such as the gradient of its matrix, is one of data: it needs no weight."""

    def meta(free, fixed, x, sizes):
        slope = jax.grad(lambda x: loss(free, fixed, x, sizes))(x)
        return squares(slope * 100)

    args = *split(LORA), DATA, SIZES
    got, want = (jax.jit(f)(*args) for f in (rpx.factored(meta, (0, 1)), meta))
    np.testing.assert_allclose(got, want, rtol=1e-4)


EXPERTS = np.random.default_rng(6).integers(E_, size=len(DATA))
"""The expert of each row."""


def promised(w, e):
    """As JAX 0.8 writes a ``jax.vmap`` of ``w[i]``: a place has a number for each axis, also for one that is whole."""
    places = jnp.stack([jnp.asarray(e), *(w.ndim - 1) * [jnp.zeros_like(e)]], 1)
    numbers = lax.GatherDimensionNumbers(tuple(range(1, w.ndim)), (0,), tuple(range(w.ndim)))
    return lax.gather(w, places, numbers, (1, *w.shape[1:]), mode="promise_in_bounds")


LOOKUPS = {
    "index": lambda w, e: w[e],
    "take": lambda w, e: jnp.take(w, e, axis=0),
    "fill": lambda w, e: w.at[e].get(mode="fill", fill_value=0),
    "clip": lambda w, e: w.at[e].get(mode="clip"),
    "two axes": lambda w, e: w[e.reshape(2, -1)].reshape(len(e), *w.shape[1:]),
    "map": lambda w, e: jax.vmap(lambda i: w[i])(e),
    "promised": promised,
}


def of_lookup(name, x, e, p=LORA):
    def found(free, fixed):
        w = p.apply(rpx.combine(free, fixed))["w"]
        return squares(jnp.nan_to_num(jnp.einsum("tk,tkn->tn", x, LOOKUPS[name](w, e))))

    return found


@pytest.mark.parametrize("name", LOOKUPS)
def test_matrices_of_experts_that_are_looked_up_stay_in_factors(name):
    (weight,) = rpx.explain(of_lookup(name, DATA, EXPERTS), *jax.eval_shape(split, LORA), argnums=(0, 1)).weights
    assert weight.is_transformed
    assert weight.reason.startswith("1 product, 0.")


def test_matrices_that_are_looked_up_are_formed_once_if_no_product_reads_them():
    def network(a, b, experts):
        matrices = jnp.einsum("eir,ro->eio", a, b)[experts]
        return jnp.abs(matrices), jnp.sin(matrices.swapaxes(1, 2))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((E_, D, 2), (2, F))]
    program = jax.make_jaxpr(rpx.factored(network, (0, 1)))(*shapes, EXPERTS)
    assert str(program).count("dot_general[") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_thorough(LOOKUPS, "index", "map", "promised"))
def test_matrices_of_experts_that_are_looked_up_cost_what_they_cost_by_hand(name):
    def hand(free, fixed):
        values = rpx.combine(free, fixed)["w"]["@lora"]
        base = values["@fixed"]["w"]["@freeze"]["@fixed"]["w"]
        low = jnp.einsum("tk,tkr->tr", DATA, LOOKUPS[name](values["a"], EXPERTS))
        low = jnp.einsum("tr,trn->tn", low, LOOKUPS[name](values["b"], EXPERTS))
        return squares(jnp.nan_to_num(jnp.einsum("tk,tkn->tn", DATA, LOOKUPS[name](base, EXPERTS)) + low))

    own, args = of_lookup(name, DATA, EXPERTS), split(LORA)
    mine, its = (jax.jit(jax.value_and_grad(f)).lower(*args).compile() for f in (rpx.factored(own, (0, 1)), hand))
    assert mine.cost_analysis()["flops"] <= 1.1 * its.cost_analysis()["flops"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), mine(*args), its(*args))
    (weight,) = rpx.explain(own, *args, argnums=(0, 1)).weights
    assert weight.is_transformed
    assert weight.reason.startswith("1 product, 0.")


@pytest.mark.thorough
@pytest.mark.usefixtures("_kept")
@pytest.mark.parametrize("stage", mostly_thorough(["one each", "one for all"], "one for all"))
@pytest.mark.parametrize("name", mostly_thorough(LOOKUPS, "index", "take", "fill"))
def test_experts_beyond_all_give_what_the_array_gives(name, stage):
    """Also no gradient, where JAX gives none."""
    p = rpx.LoRA(4, stacked=0) if stage == "one each" else rpx.LoRA(4, columns=-1)
    chosen = np.where(np.arange(len(EXPERTS)) % 5 == 0, 50, EXPERTS)
    own, args = of_lookup(name, DATA, chosen, p), split(p)
    mine, its = (jax.jit(jax.value_and_grad(f))(*args) for f in (rpx.factored(own, (0, 1)), own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), mine, its)


def test_a_fill_value_of_its_own_forms_the_array():
    def own(free, fixed):
        w = LORA.apply(rpx.combine(free, fixed))["w"]
        return squares(jnp.einsum("tk,tkn->tn", DATA, w.at[EXPERTS + 1].get(mode="fill", fill_value=7)))

    mine, its = (jax.jit(jax.value_and_grad(f))(*split(LORA)) for f in (rpx.factored(own, (0, 1)), own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), mine, its)


BOTH = rpx.Freeze() >> rpx.LoRA(2, stacked=0, where="table") >> rpx.LoRA(2, where="w")


def of_both(free, fixed, e):
    """A product of a weight with matrices that were looked up, which are data for it."""
    weights = BOTH.apply(rpx.combine(free, fixed))
    return squares(jnp.tile(weights["table"][e].reshape(len(e), 32), (1, 2)) @ weights["w"])


def with_both():
    params = {"table": normal(256, 4, 8).astype(np.float32), "w": normal(64, 64, seed=1).astype(np.float32)}
    return *rpx.partition(BOTH.init(params, KEY)), np.arange(32)


def test_matrices_that_are_looked_up_are_data_for_other_weights():
    """What reads them and a weight forms them, of the factors of those that were chosen, and not the weight."""
    table, weight, rows = rpx.explain(of_both, *jax.eval_shape(with_both), argnums=(0, 1)).weights
    assert (table.is_transformed, rows.is_transformed, weight.is_transformed) == (True, False, True)
    assert (table.type, rows.type) == ("float32[256, 4, 8]", "float32[32, 4, 8]")


@pytest.mark.thorough
def test_products_with_matrices_that_are_looked_up_are_those_of_arrays():
    mine, its = (jax.jit(jax.value_and_grad(f))(*with_both()) for f in (rpx.factored(of_both, (0, 1)), of_both))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), mine, its)
