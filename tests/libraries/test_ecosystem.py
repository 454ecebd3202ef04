"""What the tools around JAX make of a raw tree: they reach each array by its path, and give a raw tree back.

Checkpoints are in test_checkpoint, training in test_optax, transforms of JAX in test_libraries.
"""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import meta
from jax.tree_util import keystr, tree_flatten_with_path

import reparax as rpx

# Two stages nested, auxiliary and fixed values, a plain array, and a perturbation.
CHAIN = (
    rpx.SpectralNorm(where="net/dec")
    >> rpx.WeightNorm(axis=-1, where="net/enc")
    >> rpx.LowRank(2, where="net/enc")
    >> rpx.VarNoise(0.1)
)
PARAMS = {
    "net": {
        "enc": np.arange(12, dtype=np.float32).reshape(4, 3),
        "dec": np.diag(np.arange(1, 4, dtype=np.float32)),
        "bias": np.ones(3, np.float32),
    }
}
RAW = jax.jit(CHAIN.init)(PARAMS)
SHAPES = {
    "net/bias": (3,),
    "net/dec/@spectral_norm/@fixed/u": (3,),
    "net/dec/@spectral_norm/@fixed/v": (3,),
    "net/dec/@spectral_norm/w": (3, 3),
    "net/enc/@low_rank/u/@weight_norm/g": (1, 2),
    "net/enc/@low_rank/u/@weight_norm/v": (4, 2),
    "net/enc/@low_rank/v/@weight_norm/g": (1, 3),
    "net/enc/@low_rank/v/@weight_norm/v": (2, 3),
}
ENC = {path for path in SHAPES if path.startswith("net/enc/")}


def flat(tree):
    """The leaves by their paths, as safetensors and other flat formats take them."""
    return {keystr(path, simple=True, separator="/"): x for path, x in tree_flatten_with_path(tree)[0]}


def moved(tx):
    """The paths of the values that ``tx`` moves, where every gradient is one."""
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, RAW), tx.init(RAW), RAW)
    return {path for path, x in flat(updates).items() if np.all(np.asarray(x) == -1)}


# ---- Tools that name each array.


# ---- Tools that take a tree apart and put it together.


def test_unboxing_reaches_a_raw_value_inside_of_a_box():
    kernel = meta.Partitioned(jax.ShapeDtypeStruct((3, 3), jnp.float32), names=("in", "out"))
    raw = meta.unbox(jax.eval_shape(rpx.WeightNorm().init, {"kernel": kernel}))
    assert jax.tree.map(jnp.shape, raw) == {"kernel": {"@weight_norm": {"g": (1, 3), "v": (3, 3)}}}


@pytest.mark.parametrize("use", [jnp.asarray, lambda w: jnp.ones((2, 4)) @ w, lambda w: np.asarray(w, np.float32)])
def test_a_raw_value_that_is_taken_for_a_weight_is_an_error_and_never_an_array(use):
    with pytest.raises((TypeError, ValueError)):
        use(RAW["net"]["enc"])


# ---- What is written for the model's own tree is a prefix of the raw tree.


def test_a_mask_for_the_model_serves_the_raw_tree():
    mask = {"net": {"enc": True, "dec": False, "bias": False}}
    assert moved(optax.masked(optax.sgd(1.0), mask)) == ENC


@pytest.mark.parametrize("partition", [optax.multi_transform, optax.partition])
def test_labels_for_the_model_serve_the_raw_tree(partition):
    transforms = {"train": optax.sgd(1.0), "keep": optax.set_to_zero()}
    assert moved(partition(transforms, {"net": {"enc": "train", "dec": "keep", "bias": "keep"}})) == ENC


def test_axes_for_the_model_serve_the_raw_tree_under_vmap():
    biases = jnp.arange(6.0).reshape(2, 3)
    raw = {"net": {**RAW["net"], "bias": biases}}
    effective = jax.vmap(CHAIN.fold, ({"net": {"enc": None, "dec": None, "bias": 0}},))(raw)["net"]
    np.testing.assert_array_equal(effective["bias"], biases)
    np.testing.assert_allclose(effective["enc"], np.stack([PARAMS["net"]["enc"]] * 2), atol=1e-4)


# ---- What tools put in the place of arrays.

SENTINELS = {
    "axis of vmap": 0,
    "flag of a mask": True,
    "eval_shape": jax.ShapeDtypeStruct((2,), jnp.float32),
    "gradient of an integer": np.zeros((), jax.dtypes.float0),
    "label": "free",
    "nothing": None,
    "optax.MaskedNode": optax.MaskedNode(),
}


@pytest.mark.parametrize("sentinel", SENTINELS)
def test_functions_of_raw_trees_take_any_leaf(sentinel):
    filled = jax.tree.map(lambda _: SENTINELS[sentinel], RAW)
    free, fixed = rpx.partition(filled)
    assert rpx.combine(free, fixed) == filled
    roles = flat(rpx.training.param_labels(RAW)) if sentinel == "eval_shape" else dict.fromkeys(SHAPES, "fixed")
    assert flat(rpx.training.param_labels(filled)) == {path: roles[path] for path in flat(filled)}
