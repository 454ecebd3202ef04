"""What trains: raw trees of every library in two, where functions, counters, keys and statistics stand among arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import table
from flax import linen as nn
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

import reparax as rpx
from reparax.training._partition import is_placeholder

X = np.ones((4, 3), np.float32)


def paths(tree: Any) -> set[str]:
    """The paths of the leaves, without the ``value`` of variables."""
    named = (keystr(path, simple=True, separator="/") for path, _ in tree_leaves_with_path(tree))
    return {name.removesuffix("/value") for name in named}


def assert_parted(raw: Any, free: set[str]) -> None:
    """``free`` trains and nothing else, ``combine`` is the inverse, and labels say the same."""
    parts = rpx.partition(raw)
    assert paths(parts[0]) == free
    assert paths(parts[1]) == paths(raw) - free
    whole = rpx.combine(*parts)
    assert jax.tree.structure(whole) == jax.tree.structure(raw)
    assert all(x is y for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(raw), strict=True))
    named = zip(tree_leaves_with_path(raw), jax.tree.leaves(rpx.training.param_labels(raw)), strict=True)
    labelled = {keystr(path, simple=True, separator="/") for (path, _), label in named if label == "free"}
    assert {name.removesuffix("/value") for name in labelled} == free


def test_a_tree_with_markers_is_parametrized() -> None:
    params = {"w": X, "tied": X}
    for p in (rpx.WeightNorm(axis=-1), rpx.Tie({"tied": "w"}), rpx.VarNoise(0.1) >> rpx.Freeze()):
        raw = p.init(params)
        assert rpx.is_parametrized(raw)
        assert rpx.is_parametrized(jax.eval_shape(p.init, params))
        assert not rpx.is_parametrized(p.fold(raw))
    assert not rpx.is_parametrized(rpx.VarNoise(0.1).init(params))
    with pytest.raises(TypeError, match="is_parametrized takes"):
        rpx.is_parametrized(rpx.VarNoise(0.1))


def test_only_floating_arrays_of_a_plain_tree_train() -> None:
    raw = {
        "array": jnp.ones(2),
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "bool": jnp.array([True]),
        "complex": jnp.ones(2, jnp.complex64),
        "float of Python": 0.5,
        "function": jnp.tanh,
        "int": jnp.arange(2),
        "key": jax.random.key(0),
        "number": 3,
        "numpy": np.ones(2),
        "old key": jax.random.PRNGKey(0),
        "sentence": "relu",
        "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
        "words": np.array(["a"]),
    }
    assert_parted(raw, {"array", "bfloat16", "complex", "numpy", "shape"})


def test_none_stays_none_in_both_parts() -> None:
    free, fixed = rpx.partition({"w": jnp.ones(2), "bias": None})
    assert (free["bias"], fixed) == (None, {"w": None, "bias": None})
    assert rpx.combine(free, fixed)["bias"] is None


class Normed(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


NORMED = {"linear/bias", "linear/kernel/@weight_norm/g", "linear/kernel/@weight_norm/v", "norm/bias", "norm/scale"}


def test_rng_state_and_statistics_of_nnx_do_not_train() -> None:
    raw = rpx.WeightNorm().init(nnx.state(Normed()))
    assert_parted(raw, NORMED)
    assert paths(rpx.partition(raw)[1]) == {"norm/mean", "norm/var", "dropout/rngs/count", "dropout/rngs/key"}


def test_a_module_of_nnx_is_parted_as_its_state_is() -> None:
    free, fixed = rpx.partition(rpx.WeightNorm().init(Normed()))
    assert {name for name in paths(free) if "_pytree" not in name} == NORMED
    slope = jax.grad(lambda free: jnp.sum(rpx.combine(free, fixed).linear.bias[...] ** 2))(free)
    assert jax.tree.structure(slope) == jax.tree.structure(free)


def test_statistics_of_linen_do_not_train_wherever_they_stand() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))

    variables = rpx.WeightNorm().init(Net().init(jax.random.key(0), X))
    kernel = {f"params/Dense_0/kernel/@weight_norm/{name}" for name in "gv"}
    others = {"params/Dense_0/bias", "params/BatchNorm_0/bias", "params/BatchNorm_0/scale"}
    assert_parted(variables, kernel | others)
    assert paths(rpx.partition(variables)[1]) == {"batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var"}


def test_an_array_beside_params_is_a_parameter_and_a_collection_beside_them_is_state() -> None:
    tree = {"params": {"w": jnp.ones(2)}, "log_scale": jnp.ones(()), "cache": {"w": jnp.ones(2)}}
    assert_parted(tree, {"params/w", "log_scale"})
    positive = rpx.Positive(where="log_scale").init(tree)
    assert_parted(positive, {"params/w", "log_scale/@positive/x"})


@pytest.mark.parametrize("fixed", ["no", False])
def test_labels_of_the_caller_stand_for_all_that_does_not_train(fixed: Any) -> None:
    raw = rpx.WeightNorm(where="w").init({"w": jnp.ones((2, 2)), "steps": jnp.int32(1), "f": jnp.tanh})
    labels = rpx.training.param_labels(raw, main="main", aux="aux", fixed=fixed)
    assert labels == {"w": {"@weight_norm": {"g": "aux", "v": "main"}}, "steps": fixed, "f": fixed}


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())


def test_none_and_named_tuples_without_fields_stand_for_values_that_are_missing():
    found = [is_placeholder(x) for x in (None, optax.MaskedNode(), optax.EmptyState(), (), [], {}, (None,))]
    assert found == [True, True, True, False, False, False, False]
