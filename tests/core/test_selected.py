"""Selections in the words of a model: the paths of the parts that a function returns."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from flax import nnx

import reparax as rpx

PARAMS = {
    "layers": [{"weight": np.ones((3, 2), np.float32), "bias": np.zeros(2, np.float32)} for _ in range(2)],
    "name": "mlp",
}


def paths(choose, model):
    return rpx.stage.selected(choose, model).paths


@pytest.mark.parametrize(
    ("choose", "found"),
    [
        (lambda m: m["layers"][1]["weight"], ("layers/1/weight",)),
        (lambda m: m["layers"][0], ("layers/0/bias", "layers/0/weight")),
        (lambda m: [each["bias"] for each in m["layers"]], ("layers/0/bias", "layers/1/bias")),
        (lambda m: (m["layers"][0]["bias"], m["layers"][0]["bias"], m["name"]), ("layers/0/bias",)),
    ],
    ids=["an array", "a folder", "several", "twice, and a text"],
)
def test_the_parts_that_a_function_returns_are_known_by_their_paths(choose, found):
    assert paths(choose, PARAMS) == found


def test_it_is_the_selection_of_a_tree_of_booleans_and_lies_beside_a_checkpoint():
    by_part = rpx.stage.selected(
        lambda m: m["layers"][0]["weight"], jax.eval_shape(lambda: {"layers": PARAMS["layers"]})
    )
    p = rpx.WeightNorm(axis=-1, where=by_part)
    assert by_part == rpx.stage.selected({"layers": [{"weight": True, "bias": False}, False]})
    assert rpx.from_json(p.to_json()) == p
    raw = p.init({"layers": PARAMS["layers"]})
    assert jax.tree.map(jnp.shape, raw["layers"][0]["weight"]) == {"@weight_norm": {"g": (1, 2), "v": (3, 2)}}
    assert jnp.shape(raw["layers"][1]["weight"]) == (3, 2)


def test_parts_of_modules():
    mlp = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
    assert paths(lambda m: m.layers[0].weight, mlp) == ("layers/0/weight",)
    assert paths(lambda m: m.layers[1], mlp) == ("layers/1/weight", "layers/1/bias")
    params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    assert paths(lambda m: m["kernel"], params) == ("kernel",)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
