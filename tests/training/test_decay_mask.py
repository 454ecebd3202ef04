"""What weight decay shrinks: weights, and no lengths, biases, coordinates or fixed values."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from compiled import init
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

import reparax as rpx

PARAMS = {
    "up": {"kernel": np.ones((3, 4), np.float32), "bias": np.ones((2, 4), np.float32)},
    "square": {"kernel": np.eye(4, dtype=np.float32)},
    "norm": {"scale": np.ones((2, 4), np.float32), "tau": np.ones(4, np.float32)},
}


def decaying(tree):
    return {keystr(path, simple=True, separator="/") for path, flag in tree_leaves_with_path(tree) if flag}


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (rpx.Chain(), {"up/kernel", "square/kernel"}),
        (rpx.WeightNorm(), {"up/kernel/@weight_norm/v", "square/kernel/@weight_norm/v"}),
        (rpx.Freeze(where="up/.*"), {"square/kernel"}),
        (rpx.Orthogonal(where="square/kernel"), {"up/kernel"}),
        (rpx.WeightNorm(where="square/kernel") >> rpx.Orthogonal(where="square/kernel"), {"up/kernel"}),
        (rpx.Positive(where="up/kernel"), {"square/kernel"}),
        (rpx.numbers.Simplex(along=0, where="up/kernel"), {"square/kernel"}),
        (rpx.norms.Sphere(where="up/kernel"), {"square/kernel"}),
        (rpx.adapters.Rotated(2, where="square/kernel"), {"up/kernel"}),
        (rpx.matrices.PositiveDefinite(where="square/kernel"), {"up/kernel"}),
        (rpx.matrices.Invertible(where="square/kernel"), {"up/kernel"}),
        (rpx.Freeze() >> rpx.LoRA(2, where="up/kernel"), {"up/kernel/@lora/a", "up/kernel/@lora/b"}),
        (rpx.LowRank(2, where="up/kernel"), {"up/kernel/@low_rank/u", "up/kernel/@low_rank/v", "square/kernel"}),
        (rpx.MagnitudePruning(0.5, where="up/kernel"), {"up/kernel/@magnitude_pruning/w", "square/kernel"}),
    ],
    ids=lambda value: repr(value) if isinstance(value, rpx.Parametrization) else "",
)
def test_weights_decay_and_nothing_else(p, expected):
    assert decaying(rpx.decay_mask(jax.eval_shape(p.init, PARAMS, jax.random.key(0)))) == expected


@pytest.mark.parametrize("name", ["bias_n", "bias_ih_l0", "in_proj_bias", "relative_position_bias_table"])
def test_a_name_with_the_word_bias_in_it_is_that_of_a_bias(name):
    vectors, matrices = np.ones((3, 4), np.float32), np.ones((3, 4, 4), np.float32)
    params = {"cell": {name: vectors, "weight_hh": matrices, "unbiased": vectors}}
    assert rpx.decay_mask(params) == {"cell": {name: False, "weight_hh": True, "unbiased": True}}
    assert jax.eval_shape(rpx.WeightNorm(axis=-1).init, params)["cell"][name].shape == (3, 4)


def test_biases_of_attention_have_two_axes_and_do_not_decay():
    model = nnx.eval_shape(lambda: nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0)))
    p = rpx.WeightNorm(axis=(-2, -1), where="(query|key|value)/kernel")
    mask = rpx.decay_mask(jax.eval_shape(p.init, nnx.state(model, nnx.Param)))
    found = {path.removesuffix("/value") for path in decaying(mask)}
    assert found == {"out/kernel", *(f"{name}/kernel/@weight_norm/v" for name in ("query", "key", "value"))}


def test_a_step_without_gradients_shrinks_these_alone_by_rate_times_decay():
    p = rpx.Orthogonal(where="square/kernel") >> rpx.WeightNorm(where="up/kernel")
    raw = jax.tree.map(np.asarray, init(p, PARAMS))
    tx = rpx.optimizer(optax.chain(optax.add_decayed_weights(0.5, rpx.decay_mask), optax.scale(-0.1)))
    updates, _ = tx.update(jax.tree.map(np.zeros_like, raw), tx.init(raw), raw)
    after = jax.tree.map(np.add, raw, updates)
    np.testing.assert_allclose(after["up"]["kernel"]["@weight_norm"]["v"], 0.95, rtol=1e-6)
    after["up"]["kernel"]["@weight_norm"]["v"] = raw["up"]["kernel"]["@weight_norm"]["v"]
    assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(raw)))


def test_a_module_with_functions_and_shapes_alone():
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    assert decaying(rpx.decay_mask(model)) == {"layers/0/weight", "layers/1/weight"}
    assert decaying(rpx.decay_mask(jax.eval_shape(rpx.WeightNorm().init, PARAMS["up"]))) == {"kernel/@weight_norm/v"}
