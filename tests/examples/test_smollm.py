"""The example's network at a tiny size, with random weights: nothing is downloaded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from examples.smollm import by_hand, many, model, report, tuning

TINY = model.Config(layers=3, width=16, heads=4, groups=2, inner=24, words=32, base=100.0)
ROWS = np.random.default_rng(0).integers(0, 4, (8, 9)) * 5


@pytest.fixture(autouse=True)
def promotion():
    """The network is written as models are: scales of shape (width,) multiply arrays of more axes. So is optax."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def params():
    drawn = np.random.default_rng(1)
    shapes, treedef = jax.tree.flatten(model.shapes(TINY), is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten([jnp.asarray(drawn.normal(size=shape) * 0.3, jnp.float32) for shape in shapes])


SMALL_BLOCKS = rpx.Freeze() >> rpx.Quantized("nf4", block_size=8, stacked=0) >> rpx.LoRA(2, stacked=0)


@pytest.mark.parametrize("p", [tuning.FULL, SMALL_BLOCKS], ids=["full", "QLoRA"])
def test_a_few_steps_lower_the_loss_and_only_what_trains_moves(p, params):
    raw = jax.jit(p.init)(params, jax.random.key(0))
    *_, (_, _, end) = tuning.fit(p, raw, ROWS, TINY, steps=12, rate=0.03, seed=0)
    fold = jax.jit(p.fold)
    before, after = (tuning.held_out(fold(each), ROWS, TINY, count=8) for each in (raw, end))
    assert after < before - 0.2
    moved = jax.tree.map(lambda x, y: not np.array_equal(x, y), rpx.partition(raw), rpx.partition(end))
    free, fixed = map(jax.tree.leaves, moved)
    assert all(free)
    assert not any(fixed)


@pytest.mark.parametrize("p", [tuning.lora(2), tuning.dora(2), tuning.qlora(2), tuning.gains()], ids=repr)
def test_of_the_language_model_only_adapters_of_kernels_train(p, params):
    wide = model.Config(layers=2, width=64, heads=4, groups=2, inner=64, words=128)
    shapes = model.shapes(wide)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    raw = jax.eval_shape(p.init, like, jax.random.key(0))
    free, fixed = (
        {
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(part)
        }
        for part in rpx.partition(raw)
    )
    kernels = {path.partition("/@")[0] for path in free}
    assert kernels == {f"layers/{part}/{name}/kernel" for part in ("self_attn", "mlp") for name in like["layers"][part]}
    assert {path for path in fixed if "embed" in path} == {"embed_tokens/embedding/@freeze/@fixed/w"}


@functools.partial(jax.jit, static_argnums=0)
def slopes(p, free, fixed):
    return jax.value_and_grad(tuning.loss_of(p, TINY))(free, fixed, jnp.asarray(ROWS))


def trained(p, params):
    """Raw values of which none that trains is zero, and those that stay."""
    free, fixed = rpx.partition(jax.jit(p.init)(params, jax.random.key(0)))
    return jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1), free), fixed


def test_lora_is_that_by_hand(params):
    p = tuning.lora(2)
    free, fixed = trained(p, params)
    ours = slopes(p, free, fixed)

    def loss(factors):
        return model.loss(by_hand.adapted(params, factors), jnp.asarray(ROWS), TINY)

    theirs = jax.jit(jax.value_and_grad(loss))(by_hand.factors(free))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), by_hand.factors(ours[1]), theirs[1])


def test_a_batch_of_adapters_of_several_ranks_is_as_many_runs(params):
    adapters = []
    for i, p in enumerate([tuning.lora(1), rpx.Freeze() >> rpx.LoRA(3, 6.0, stacked=0)]):
        free, fixed = rpx.partition(jax.jit(p.init)(params, jax.random.key(i)))
        adapters.append((p, rpx.combine(jax.tree.map(lambda x, i=i: x + 0.05 * (i + 1), free), fixed)))
    p, bank = many.bank_of(adapters)
    fixed = rpx.partition(jax.jit(p.init)(params, jax.random.key(0)))[1]
    ids, tokens = [1, 0, 1], jnp.asarray(ROWS[:3])
    got = jax.jit(many.mixed(p, TINY))(bank, fixed, jnp.array(ids), tokens)
    for i, row, each in zip(ids, tokens, got, strict=True):
        own, raw = adapters[i]
        np.testing.assert_allclose(each, model.logits(own.apply(raw), row[None], TINY)[0], atol=1e-5)


def test_a_batch_of_adapters_multiplies_by_the_base_once():
    config = model.Config(layers=2, width=64, heads=4, groups=2, inner=96, words=64)
    like = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), model.shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )
    p, rank, tokens = tuning.lora(2), 2, jax.ShapeDtypeStruct((4, 16), jnp.int32)
    free, fixed = rpx.partition(jax.eval_shape(p.init, like, jax.random.key(0)))
    bank = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), free)
    mixed = jax.jit(many.mixed(p, config)).lower(bank, fixed, jax.ShapeDtypeStruct((4,), jnp.int32), tokens)
    base = jax.jit(lambda params, rows: model.logits(params, rows, config)).lower(like, tokens)
    kernels = [x.shape for x in jax.tree.leaves(like["layers"]) if len(x.shape) == 3]
    # For each token, two products with factors in each kernel, of two operations a number; XLA counts a layer once.
    adapters = tokens.size * sum(2 * rank * (rows + columns) for _, rows, columns in kernels)
    got, once = (program.compile().cost_analysis()["flops"] for program in (mixed, base))
    assert once + 0.9 * adapters < got < once + 1.5 * adapters


def test_the_rate_is_chosen_without_the_windows_that_are_reported():
    def cell(training, new):
        return {"curve": np.array([[9.0] * 3 + [training] * 5]), "new": np.array([new])}

    cells = {"LoRA 8, rate 0.01, seed 0": cell(1.0, 2.0), "LoRA 8, rate 0.03, seed 0": cell(1.5, 1.0)}
    assert report.best_rates({"untuned": {"new": np.array([3.0])}, **cells}) == {"LoRA 8": 0.01}
