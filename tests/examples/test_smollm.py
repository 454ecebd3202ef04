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


def numpy_logits(params, tokens):
    """The network in numpy, a layer, a head and a position at a time."""
    table, stack = np.asarray(params["embed_tokens"]["embedding"]), jax.tree.map(np.asarray, params["layers"])
    size, share = TINY.width // TINY.heads, TINY.heads // TINY.groups

    def normed(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + TINY.epsilon) * scale

    def turned(x):
        pairs = x[: size // 2] + 1j * x[size // 2 :]
        return lambda t: pairs * np.exp(1j * t * TINY.base ** (-np.arange(size // 2) / (size // 2)))

    x = table[tokens]
    for layer in range(TINY.layers):
        kernels = {name: held["kernel"][layer] for part in ("self_attn", "mlp") for name, held in stack[part].items()}
        y = normed(x, stack["input_layernorm"]["scale"][layer])
        q, k, v = (y @ kernels[name] for name in ("q_proj", "k_proj", "v_proj"))
        mixed = np.zeros_like(x)
        for head in range(TINY.heads):
            mine, shared = (slice(size * i, size * (i + 1)) for i in (head, head // share))
            for t in range(len(tokens)):
                query = turned(q[t, mine])(t)
                scores = [(query * turned(k[s, shared])(s).conj()).real.sum() / size**0.5 for s in range(t + 1)]
                weights = np.exp(scores) / np.exp(scores).sum()
                mixed[t, mine] = weights @ v[: t + 1, shared]
        x = x + mixed @ kernels["o_proj"]
        y = normed(x, stack["post_attention_layernorm"]["scale"][layer])
        gate = y @ kernels["gate_proj"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ kernels["up_proj"])) @ kernels["down_proj"]
    return normed(x, np.asarray(params["norm"]["scale"])) @ table.T


def test_the_network_is_that_of_llama(params):
    got = jax.jit(model.logits, static_argnums=2)(params, jnp.asarray(ROWS[:2]), TINY)
    for each, tokens in zip(got, ROWS[:2], strict=True):
        np.testing.assert_allclose(each, numpy_logits(params, tokens), atol=2e-5)


def test_the_model_has_at_most_a_hundred_lines_and_knows_nothing_of_reparax():
    with open(model.__file__) as file:
        text = file.read()
    assert len(text.splitlines()) <= 100
    assert "import reparax" not in text


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


@pytest.mark.parametrize("chain", [tuning.lora, tuning.dora])
def test_the_chain_of_one_layer_in_the_scan_is_that_of_the_stack(chain, params):
    free, fixed = trained(chain(2), params)
    value, grads = slopes(chain(2), free, fixed)
    loss = tuning.loss_in_scan(chain(2, stacked=()), TINY)
    other, others = jax.jit(jax.value_and_grad(loss))(free, fixed, jnp.asarray(ROWS))
    np.testing.assert_allclose(value, other, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), grads, others)


def test_a_stack_goes_to_torch_and_back_bit_for_bit(params):
    state = rpx.io.to_torch(rpx.Chain(), params, names=tuning.NAMES)
    assert state["model.layers.2.self_attn.q_proj.weight"].shape == (16, 16)
    assert len(state) == 9 * TINY.layers + 2
    back = rpx.io.from_torch(rpx.Chain(), state, params, names=tuning.NAMES)
    jax.tree.map(np.testing.assert_array_equal, back, params)


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
