"""The recipe that gives Muon the axes of matrices: those of raw values that are matrices."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_array import normal
from optax.contrib import MuonDimensionNumbers, muon

import reparax as rpx
from reparax.core.paths import items, path_text

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
RECIPE = {"jax": jax, "rpx": rpx, "MuonDimensionNumbers": MuonDimensionNumbers}
exec(re.findall(r"^def muon_axes.*?(?=\n\n\n)", PAGE, re.DOTALL | re.MULTILINE)[0], RECIPE)
muon_axes = RECIPE["muon_axes"]
X = np.arange(7, dtype=np.int32)
PARAMS = {
    "embed": normal(10, 4, seed=1),
    "layers": {
        "query": normal(2, 4, 3, 2, seed=2),
        "key": normal(2, 4, 3, 2, seed=3),
        "heads": normal(2, 3, 2, 4, seed=4),
        "bias": normal(2, 4, seed=5),
    },
    "out": normal(5, 4, seed=6),
    "one": normal(4, 1, seed=7),
}


def network(params, tokens):
    """Attention of three heads in scanned layers; the output layer has the shape (out, in)."""

    def layer(x, w):
        q, k = jnp.einsum("td,dnh->tnh", x, w["query"]), jnp.einsum("td,dnh->tnh", x, w["key"])
        y = jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.einsum("tnh,snh->nts", q, k)), k)
        return x + jnp.einsum("tnh,nhd->td", y, w["heads"]) + w["bias"][None], None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return x @ params["out"].T + x @ params["one"]


def found_by_path(axes):
    """The axes of the raw values that Muon takes."""
    pairs = items(axes, lambda x: isinstance(x, MuonDimensionNumbers))
    return {path_text(path): tuple(x) for path, x in pairs}


ALONE = {
    "layers/query": ((1,), (2, 3)),
    "layers/key": ((1,), (2, 3)),
    "layers/heads": ((1, 2), (3,)),
    "out": ((1,), (0,)),
    "one": ((0,), (1,)),
}


def but(*paths):
    """The axes of all arrays but these."""
    return {path: each for path, each in ALONE.items() if path not in paths}


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (rpx.Chain(), ALONE),
        (rpx.WeightNorm(axis=-1), {f"{path}/@weight_norm/v": each for path, each in ALONE.items()}),
        (
            rpx.LoRA(2, where="layers/query", columns=(-2, -1), stacked=0)
            >> rpx.LoRA(2, where="layers/heads", rows=(-3, -2), stacked=0),
            {
                "layers/query/@lora/a": ((1,), (2,)),
                "layers/query/@lora/b": ((1,), (2, 3)),
                "layers/heads/@lora/a": ((1, 2), (3,)),
                "layers/heads/@lora/b": ((1,), (2,)),
                **but("layers/query", "layers/heads"),
            },
        ),
        (rpx.Freeze(where="layers/.*"), {path: ALONE[path] for path in ("out", "one")}),
        (rpx.Gaussian(where="out"), {"out/@gaussian/mean": ((1,), (0,)), **but("out")}),
        (rpx.norms.Sphere(along=-1, where="out"), but("out")),
    ],
    ids=str,
)
def test_main_values_that_are_matrices_have_their_axes_and_all_else_has_none(p, expected):
    raw = jax.eval_shape(p.init, PARAMS, jax.random.key(0))
    axes = muon_axes(lambda raw, x: network(p.fold(raw), x), raw, X)
    assert found_by_path(axes) == expected
    leaves = jax.tree.structure(axes, is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers))
    assert leaves == jax.tree.structure(raw)


def test_arrays_that_are_used_in_several_ways_or_in_part_go_to_adam():
    params = {"tied": normal(10, 4, seed=1), "summed": normal(3, 4, 4, seed=2), "plain": normal(4, 4, seed=3)}

    def forward(params, tokens):
        x = jnp.tanh(params["tied"][tokens] @ params["summed"].sum(0))  # nothing says what the first axis is
        return x @ params["plain"] @ params["tied"].T

    roles = rpx.roles(forward, params, X)
    assert (roles["tied"].inputs, roles["tied"].outputs) == ((0, 1), (0, 1))
    assert (roles["summed"].inputs, roles["summed"].outputs) == ((1,), (2,))
    assert found_by_path(muon_axes(forward, params, X)) == {"plain": ((0,), (1,))}


def test_a_step_is_that_of_each_layer_as_a_matrix_and_of_what_has_no_axes_by_adam():
    p = rpx.WeightNorm(axis=-1, where="layers/heads", stacked=0)
    raw = p.init(PARAMS)
    grads = jax.tree.map(jnp.cos, raw)
    axes = muon_axes(lambda raw, x: network(p.fold(raw), x), raw, X) | {"out": None}
    tx = rpx.optimizer(muon(0.1, muon_weight_dimension_numbers=axes))
    alone, adam = muon(0.1), optax.nadamw(0.1, weight_decay=0)  # all arrays of two axes
    one = grads["layers"]["heads"]["@weight_norm"]
    matrices = [np.asarray(one["v"][i]).reshape(6, 4) for i in range(2)]

    @jax.jit
    def steps():
        expected = alone.update(matrices, alone.init(matrices), matrices)[0]
        others = {"g": one["g"], "out": grads["out"]}
        return tx.update(grads, tx.init(raw), raw)[0], expected, adam.update(others, adam.init(others), others)[0]

    with jax.numpy_dtype_promotion("standard"):
        updates, expected, others = steps()
    new = updates["layers"]["heads"]["@weight_norm"]
    np.testing.assert_allclose(new["v"].reshape(2, 6, 4), np.stack(expected), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new["g"], others["g"], rtol=1e-4)
    np.testing.assert_allclose(updates["out"], others["out"], rtol=1e-4)
