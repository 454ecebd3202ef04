"""What RETURNN's own tests say of noise, dropout and reuse of parameters, said of ours; each names the original.

They are in test_TFNetworkLayer.py, test_rf_base.py and test_torch_util.py of https://github.com/rwth-i6/returnn.
Reuse of a slice of another parameter is in test_tie, dropout of hidden-to-hidden weights in test_blocks.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from residuals import draws

import reparax as rpx

N_IN, N_OUT = 7, 13


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear():
    return {"W": normal(N_IN, N_OUT), "b": normal(N_OUT, seed=1)}


def cross_entropy(layer):
    logits = normal(5, N_IN, seed=2) @ layer["W"] + layer["b"][None]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(5), jnp.arange(5)])


assert_close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)


# ---- test_TFNetworkLayer.py: every use of a parameter is a use of the noisy one, however memory is saved.

NOISE = rpx.VarNoise(0.075)
DROPOUT = rpx.WeightDropout(0.1, where=".*/(W|b)")


def kept(effective):
    """What dropout multiplied by: zero, or one over the share that is kept."""
    return jax.tree.map(lambda w: np.where(w == 0, 0, np.float32(1 / 0.9)), effective)


def effective_and_slopes(p, key):
    """The effective layer, the slopes in its raw values, and those of a network that knows of no noise."""

    @jax.jit
    def computed(raw, key):
        effective = p.apply(raw, key)["output"]
        slope = jax.grad(rpx.remat(lambda raw, key: cross_entropy(p.apply(raw, key)["output"])))(raw, key)
        return effective, slope["output"], jax.grad(cross_entropy)(effective)

    return jax.tree.map(np.asarray, computed({"output": linear()}, key))


def test_every_use_of_weights_and_biases_is_noisy(key):
    """test_param_variational_noise."""
    effective, slope, expected = effective_and_slopes(NOISE, key)
    assert_close(slope, expected)
    for name, w in linear().items():
        assert np.all(effective[name] != w)
        assert np.abs(effective[name] - w).max() < 5 * 0.075


def test_every_use_of_weights_and_biases_is_dropped_where_both_are_named(key):
    """test_param_weight_dropout: without ``param_dropout_min_ndim``, vectors too."""
    effective, slope, expected = effective_and_slopes(DROPOUT, key)
    assert_close(effective, jax.tree.map(np.multiply, linear(), kept(effective)))
    assert_close(slope, jax.tree.map(np.multiply, expected, kept(effective)))


@pytest.mark.thorough
def test_the_parameter_meets_the_noise_and_the_network_the_dropout(key):
    """test_param_weight_dropout_and_variational_noise."""
    effective, slope, expected = effective_and_slopes(NOISE >> DROPOUT, key)
    noisy = NOISE.apply({"output": linear()}, key)["output"]
    assert_close(effective, jax.tree.map(jnp.multiply, noisy, kept(effective)))
    assert_close(slope, jax.tree.map(jnp.multiply, expected, kept(effective)))
    assert 0 < np.mean(np.asarray(effective["W"]) == 0) < 0.3


@pytest.mark.thorough
def test_layers_that_reuse_a_parameter_drop_it_each_on_its_own_or_not_at_all(key):
    """test_param_weight_dropout_and_reuse_params: a has the parameters, b and c reuse them, c without dropout."""
    p = rpx.Tie({"(b|c)/(W|b)": r"a/\2"}) >> rpx.WeightDropout(0.1, where="(a|b)/.*")
    raw = p.init({name: linear() for name in "abc"})
    assert len(jax.tree.leaves(raw)) == 2

    def loss(raw, key):
        return sum(cross_entropy(layer) for layer in p.apply(raw, key).values())

    effective, slope = jax.jit(lambda raw, key: (p.apply(raw, key), jax.grad(rpx.remat(loss))(raw, key)))(raw, key)
    factors = {"a": kept(effective["a"]), "b": kept(effective["b"]), "c": jax.tree.map(jnp.ones_like, linear())}
    for name, factor in factors.items():
        assert_close(effective[name], jax.tree.map(jnp.multiply, linear(), factor))
    assert np.any(factors["a"]["W"] != factors["b"]["W"])
    slopes = [jax.tree.map(jnp.multiply, jax.grad(cross_entropy)(effective[name]), factors[name]) for name in "abc"]
    assert_close(slope["a"], jax.tree.map(lambda *each: sum(each), *slopes))


def test_the_output_of_a_decoder_reuses_the_embedding_that_its_own_output_feeds():
    """test_reuse_params_map_custom_dep_loop: it trains on given symbols, and searches with its own."""
    p = NOISE >> rpx.Tie({"output_prob/W": ("target_embed/W", jnp.transpose)})
    table, b, recurrent = normal(5, 4), normal(5, seed=1), normal(4, 4, seed=2)
    params = {"target_embed": {"W": table}, "output_prob": {"W": table.T, "b": b}, "s": {"W": recurrent}}
    raw = p.init(params)
    assert set(jax.tree.map(jnp.shape, raw)["output_prob"]) == {"W", "b"}
    assert raw["output_prob"]["W"] == {"@tie": {}}

    def step(weights, h, symbol):
        h = jnp.tanh(weights["target_embed"]["W"][symbol] + h @ weights["s"]["W"])
        return h, h @ weights["output_prob"]["W"] + weights["output_prob"]["b"]

    def train(weights):
        given = jnp.array([0, 3, 1, 4])
        scores = jax.lax.scan(lambda h, symbol: step(weights, h, symbol), jnp.zeros(4), given)[1]
        return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(3), given[1:]])

    def search(weights):
        def chosen(state, _):
            h, scores = step(weights, *state)
            return (h, jnp.argmax(scores)), jnp.argmax(scores)

        return jax.lax.scan(chosen, (jnp.zeros(4), jnp.int32(0)), None, 6)[1]

    def loss(raw, key):
        return train(p.apply(raw, key))

    key = jax.random.key(3)
    slope, apart = jax.jit(lambda raw, key: (jax.grad(loss)(raw, key), jax.grad(train)(p.apply(raw, key))))(raw, key)
    both = apart["target_embed"]["W"] + apart["output_prob"]["W"].T
    assert_close(slope["target_embed"]["W"], both)
    assert draws(jax.grad(loss), raw, key) == (3, 0)  # of each parameter one, and none in a step of the loop
    h, symbol, symbols = np.zeros(4), 0, []
    for _ in range(6):
        h = np.tanh(table[symbol] + h @ recurrent)
        symbol = int(np.argmax(h @ table.T + b))
        symbols.append(symbol)
    assert jax.jit(search)(p.fold(raw)).tolist() == symbols


# ---- test_rf_base.py: parametrized, in evaluation, and no longer parametrized.


def test_a_parameter_keeps_its_name_and_its_array_and_evaluation_reads_the_array_itself(key):
    """test_parametrization: also what is registered, what it is called, and what is left once it is removed."""
    p = rpx.WeightDropout(0.5, where="mod/weight")
    params = {"mod": {"weight": jnp.asarray(normal(N_IN, N_OUT)), "bias": jnp.asarray(normal(3))}}
    raw = p.init(params)
    assert [row.path for row in rpx.summary(p, params).rows if row.stages] == ["mod/weight"]
    effective = p.apply(raw, key)
    assert np.any(np.asarray(effective["mod"]["weight"]) != np.asarray(params["mod"]["weight"]))
    for tree in (raw, p.deterministic.apply(raw), p.fold(raw)):
        assert jax.tree.structure(tree) == jax.tree.structure(params)
        assert all(tree["mod"][name] is params["mod"][name] for name in params["mod"])


def test_noise_is_on_every_module_and_on_a_convolution_but_on_no_bias(key):
    """test_weight_noise, and https://github.com/rwth-i6/returnn/issues/1580."""
    params = {"conv": {"filter": normal(3, N_IN, N_OUT), "bias": normal(N_OUT)}, "linear": {"weight": normal(4, 4)}}
    effective = rpx.VarNoise(0.1, where=lambda path, _: not path.endswith("bias")).apply(params, key)
    assert effective["conv"]["bias"] is params["conv"]["bias"]
    assert np.all(np.asarray(effective["linear"]["weight"]) != params["linear"]["weight"])
    x = normal(1, 11, N_IN)
    y = jax.lax.conv_general_dilated(
        x, effective["conv"]["filter"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    padded, w = np.pad(x[0], ((1, 1), (0, 0))), np.asarray(effective["conv"]["filter"])
    expected = sum(padded[i : i + 11] @ w[i] for i in range(3))
    np.testing.assert_allclose(np.asarray(y)[0], expected, rtol=1e-4, atol=1e-5)


# ---- test_torch_util.py: noise that is not kept for the backward pass.

SHAPE = (101, 103)
SIZE = 101 * 103 * 4


def noisy_product(raw, key):
    return jnp.sum(rpx.VarNoise(1.0, where="var").apply(raw, key)["var"] * raw["input"])


def noisy_factors(raw, key):
    effective = rpx.VarNoise(1.0).apply(raw, key)
    return jnp.sum(effective["var"] * effective["input"])


def test_a_noisy_weight_is_made_again_and_the_step_is_the_same(key):
    """test_gradient_checkpoint_scope: kept are the parameters and the state of the generator."""
    raw = {"var": normal(*SHAPE), "input": normal(*SHAPE, seed=1)}
    assert rpx.transforms.saved_residuals(noisy_product, raw, key).bytes("weights") == SIZE
    again = rpx.transforms.saved_residuals(rpx.remat(noisy_product), raw, key)
    assert {each.origin: each.bytes for each in again.kept} == {"raw/var": SIZE, "raw/input": SIZE, "key": 8}
    slopes = jax.jit(lambda raw, key: [jax.grad(f)(raw, key) for f in (noisy_product, rpx.remat(noisy_product))])
    plain, recomputed = slopes(raw, key)
    assert_close(recomputed, plain)
    assert_close(recomputed["var"], raw["input"])


def test_two_noisy_factors_are_both_made_again(key):
    """test_gradient_checkpoint_scope_twice, run twice."""
    raw = {"var": normal(*SHAPE), "input": normal(*SHAPE, seed=1)}
    assert rpx.transforms.saved_residuals(noisy_factors, raw, key).bytes("weights") == 2 * SIZE
    assert rpx.transforms.saved_residuals(rpx.remat(noisy_factors), raw, key).bytes("weights") == 0
    step = jax.jit(
        lambda raw, key: jax.tree.map(lambda w, s: w - 0.1 * s, raw, jax.grad(rpx.remat(noisy_factors))(raw, key))
    )
    once = step(raw, key)
    effective, twice = jax.tree.map(np.asarray, (rpx.VarNoise(1.0).apply(once, key), step(once, key)))
    once = jax.tree.map(np.asarray, once)
    assert_close(twice["var"], once["var"] - np.float32(0.1) * effective["input"])
    assert_close(twice["input"], once["input"] - np.float32(0.1) * effective["var"])
