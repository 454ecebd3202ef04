"""The recipe that gives Muon the axes of matrices: those of raw values, and those that MaxText writes by hand."""

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
X = jnp.arange(7)
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
        (rpx.WeightNorm(), {f"{path}/@weight_norm/v": each for path, each in ALONE.items()}),
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
        (rpx.norms.Sphere(where="out"), but("out")),
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
    p = rpx.WeightNorm(where="layers/heads", stacked=0)
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


# The rules that MaxText writes by hand --------------------------------------------------------------------------------

EMBED, HEADS, SIZE, RANK, INNER, EXPERTS, LAYERS = 8, 3, 4, 5, 12, 6, 2


def normed(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attended(q, k, v, out):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v), out)


def gated(x, w):
    return (jax.nn.silu(x @ w["wi_0"]) * (x @ w["wi_1"])) @ w["wo"]


def multi_head(x, w):
    heads = {name: jnp.einsum("btd,dnh->btnh", x, w[name]) for name in ("query", "key", "value")}
    q, k = normed(heads["query"], w["query_norm"]), normed(heads["key"], w["key_norm"])
    return attended(q, k, heads["value"], w["out"])


def latent(x, w):
    """DeepSeek's attention: keys and values from few numbers, part of which all heads share."""
    q = jnp.einsum("btr,rnh->btnh", normed(x @ w["wq_a"], w["q_norm"]), w["wq_b"])
    low, shared = jnp.split(x @ w["wkv_a"], [RANK], axis=-1)
    k, v = jnp.split(jnp.einsum("btr,rnh->btnh", normed(low, w["kv_norm"]), w["wkv_b"]), [2], axis=-1)
    k = jnp.concatenate([k, jnp.broadcast_to(shared[:, :, None], (*k.shape[:-1], SIZE - 2))], axis=-1)
    return attended(q, k, v, w["out"])


def experts(x, w):
    """Each token in a place of each expert that it chose, as in MaxText's dense product of experts."""
    gates = jax.nn.sigmoid(x @ w["gate"]["kernel"]) + w["gate"]["bias"]
    best, chosen = jax.lax.top_k(gates, 2)
    taken = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)  # b t k e
    places = jax.nn.one_hot(jnp.cumsum(jnp.sum(taken, axis=2), axis=1) - 1, 4)  # b t e c
    mask = jnp.sum(taken, axis=2)[..., None] * places
    x = jnp.einsum("btd,btec->ebcd", x, mask)
    hidden = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", x, w["wi_0"])) * jnp.einsum("ebcd,edf->ebcf", x, w["wi_1"])
    y = jnp.einsum("ebcf,efd->ebcd", hidden, w["wo"])
    return jnp.einsum("ebcd,btec->btd", y, mask * jnp.sum(taken * best[..., None], axis=2)[..., None])


def maxtext(attention, dense):
    def forward(params, tokens):
        def layer(x, w):
            x = x + attention(normed(x, w["first"]), w["self_attention"])
            return x + dense(normed(x, w["second"]), w["mlp"]), None

        # MaxText stacks layers along the second axis.
        layers = jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), params["layers"])
        x, _ = jax.lax.scan(layer, params["embedding"][tokens], layers)
        return normed(x, params["norm"]) @ params["logits_dense"]

    return forward


def stacked(n, *shape):
    return jax.ShapeDtypeStruct((n, LAYERS, *shape), jnp.float32)


MLP = {"wi_0": stacked(EMBED, INNER), "wi_1": stacked(EMBED, INNER), "wo": stacked(INNER, EMBED)}
MOE = {
    "wi_0": stacked(EXPERTS, EMBED, INNER),
    "wi_1": stacked(EXPERTS, EMBED, INNER),
    "wo": stacked(EXPERTS, INNER, EMBED),
    "gate": {"kernel": stacked(EMBED, EXPERTS), "bias": stacked(EXPERTS)},
    "shared": MLP,
}
MULTI_HEAD = {
    **{name: stacked(EMBED, HEADS, SIZE) for name in ("query", "key", "value")},
    "out": stacked(HEADS, SIZE, EMBED),
    "query_norm": stacked(SIZE),
    "key_norm": stacked(SIZE),
}
LATENT = {
    "wq_a": stacked(EMBED, RANK),
    "q_norm": stacked(RANK),
    "wq_b": stacked(RANK, HEADS, SIZE),
    "wkv_a": stacked(EMBED, RANK + SIZE - 2),
    "kv_norm": stacked(RANK),
    "wkv_b": stacked(RANK, HEADS, 2 + SIZE),
    "out": stacked(HEADS, SIZE, EMBED),
}
TABLE = {
    "self_attention/(query|key|value|wq_b|wkv_b)": ((0,), (-2, -1)),
    "self_attention/out": ((0, -2), (-1,)),
    "self_attention/(wq_a|wkv_a)": ((0,), (-1,)),
    "mlp/gate/kernel": ((0,), (-1,)),
    "mlp/(shared/)?(wi_.|wo)": ((0,), (-1,)),
}
"""The numbers that MaxText's tests of ``muon_utils.py`` have for DeepSeek, Gemma 3, Llama and Qwen 3."""
OF_EXPERTS = {"mlp/(wi_.|wo)": ((-2,), (-1,))}


@pytest.mark.parametrize(
    ("attention", "dense", "params", "own"),
    [
        (multi_head, gated, {"self_attention": MULTI_HEAD, "mlp": MLP}, {}),
        (
            latent,
            lambda x, w: experts(x, w) + gated(x, w["shared"]),
            {"self_attention": LATENT, "mlp": MOE},
            OF_EXPERTS,
        ),
    ],
    ids=["multi-head", "latent attention, experts"],
)
def test_roles_give_the_numbers_of_maxtext(attention, dense, params, own):
    word = jax.ShapeDtypeStruct((20, EMBED), jnp.float32)
    layers = {**params, "first": stacked(EMBED), "second": stacked(EMBED)}
    rest = {"embedding": word, "norm": word.update(shape=(EMBED,)), "logits_dense": word.update(shape=(EMBED, 20))}
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        axes = muon_axes(maxtext(attention, dense), {"layers": layers, **rest}, tokens)
    found = found_by_path({"layers": axes["layers"]})
    types = {path_text(path).removeprefix("layers/"): x for path, x in items({"layers": layers})}
    expected = {}
    for pattern, sides in {**TABLE, **own}.items():
        for path, x in types.items():
            if re.fullmatch(pattern, path):
                expected[f"layers/{path}"] = tuple(tuple(axis % x.ndim for axis in axes) for axes in sides)
    assert found == expected
