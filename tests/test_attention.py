"""Which arrays of attention layers each stage takes by default, in three libraries: kernels, and never a bias."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from flax import nnx

import reparax as rpx

X = jnp.ones((1, 3, 6))


def of_linen():
    layer = nn.MultiHeadDotProductAttention(2, bias_init=nn.initializers.normal(), normalize_qk=True)
    return layer.init(jax.random.key(0), X)["params"]


def of_nnx():
    layer = nnx.MultiHeadAttention(
        2, 6, bias_init=nnx.initializers.normal(), normalize_qk=True, decode=False, rngs=nnx.Rngs(0)
    )
    return nnx.state(layer, nnx.Param)


def of_equinox():
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    return eqx.nn.MultiheadAttention(2, 6, key=jax.random.key(0), **biases)


PARTS = ("query", "key", "value")
KERNELS = {f"{name}/kernel" for name in (*PARTS, "out")}
BIASES = {f"{name}/bias" for name in (*PARTS, "out")}
SCALES = {"query_ln/scale", "key_ln/scale"}
WEIGHTS = {f"{name}_proj/weight" for name in (*PARTS, "output")}

LIBRARIES = {
    "linen": (of_linen, KERNELS, KERNELS | BIASES | SCALES),
    "nnx": (of_nnx, KERNELS, KERNELS | BIASES | SCALES),
    "equinox": (of_equinox, WEIGHTS, WEIGHTS | {path.replace("weight", "bias") for path in WEIGHTS}),
}

every_library = pytest.mark.parametrize("library", LIBRARIES)


def arrays(tree):
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): w for path, w in pairs if hasattr(w, "shape")}
    return {path.removesuffix("/value"): np.asarray(w) for path, w in found.items()}


def changed(before, after):
    return {path for path, w in before.items() if not np.array_equal(w, after[path])}


@every_library
@pytest.mark.parametrize("stage", [rpx.WeightNorm(), rpx.MagnitudePrune(0.5), rpx.Sphere(), rpx.Scale(2.0)], ids=repr)
def test_stages_of_arrays_of_several_dimensions_take_kernels_alone(library, stage):
    make, kernels, every = LIBRARIES[library]
    raw = jax.tree_util.tree_leaves_with_path(stage.init(make()))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in raw]
    taken = {path.partition("/@")[0] for path in paths if "/@" in path}
    assert taken == (every if isinstance(stage, rpx.Scale) else kernels)


@every_library
def test_dropout_takes_kernels_and_noise_takes_all(library, key):
    make, kernels, every = LIBRARIES[library]
    before = arrays(make())
    assert changed(before, arrays(rpx.WeightDropout(0.9).apply(make(), key))) == kernels
    assert changed(before, arrays(rpx.VarNoise(0.1).apply(make(), key))) == every


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_stages_of_matrices_ask_which_axes_are_rows(library):
    text = (
        "Orthogonal().init at 'key/kernel': expected a matrix, got shape (6, 2, 3). Say which axes are rows and "
        "columns (rows=0, columns=(1, 2)) or which hold matrices of their own (stacked=0), or leave it out with "
        "`where`."
    )
    with raises(ValueError, text):
        rpx.Orthogonal().init(LIBRARIES[library][0]())


def test_stages_of_matrices_take_the_weights_of_equinox():
    before = arrays(of_equinox())
    p = rpx.Orthogonal()
    assert changed(before, arrays(p.fold(p.init(of_equinox())))) == WEIGHTS
