"""Layouts that the program of a network tells, beside those that are given by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import fold
from errors import table
from one_array import normal

import reparax as rpx

PARAMS = {
    "words": normal(10, 4, seed=1),
    "tied": normal(4, 4, seed=2),
    "layers": normal(2, 4, 4, seed=3),
    "turned": normal(2, 4, 4, seed=4),
    "image": normal(3, 3, 4, 4, seed=5),
    "channels": normal(4, 4, 3, 3, seed=6),
    "experts": normal(3, 4, 4, seed=7),
    "bias": normal(4, seed=8),
}
TOKENS = np.arange(5, dtype=np.int32) % 4


def network(params, tokens):
    """Square weights, whose shapes tell nothing."""

    def layer(x, w):
        kernel, turned = w
        return jnp.tanh(x @ kernel) @ turned.T, None

    x = params["words"][tokens] + params["tied"][tokens] + params["bias"][None]
    x, _ = jax.lax.scan(layer, x, (params["layers"], params["turned"]))
    pixels = jnp.broadcast_to(x[:, None, None], (5, 6, 6, 4))
    pixels = jax.lax.conv_general_dilated(
        pixels, params["image"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    pixels = jax.lax.conv_general_dilated(
        pixels, params["channels"], (1, 1), "SAME", dimension_numbers=("NHWC", "OIHW", "NHWC")
    )
    x = pixels.mean((1, 2))
    return jnp.einsum("bd,edf->bef", x, params["experts"]).sum(1) @ params["tied"].T


ROLES = rpx.roles(network, PARAMS, TOKENS)
NAMES = {"(layers|turned)": r"\1.{i}.weight"}
BY_HAND = {
    "words|tied": "embedding",
    "layers": "kernel",
    "turned": "same",
    "image": "kernel",
    "channels": "same",
    "experts": "experts:kernel",
}
REST = {"experts": BY_HAND["experts"]}


@pytest.mark.parametrize("p", [rpx.Chain(), rpx.WeightNorm(axis=-1, where="words")], ids=repr)
def test_files_are_those_of_layouts_by_hand(p):
    raw = p.init(PARAMS)
    state = rpx.io.to_torch(p, raw, names=NAMES, layouts=REST, roles=ROLES)
    by_hand = rpx.io.to_torch(p, raw, names=NAMES, layouts=BY_HAND)
    assert state.keys() == by_hand.keys()
    for name, x in by_hand.items():
        np.testing.assert_array_equal(state[name], x)
    again = rpx.io.from_torch(p, state, PARAMS, names=NAMES, layouts=REST, roles=ROLES)
    jax.tree.map(np.testing.assert_array_equal, again, raw)


def test_torch_has_outputs_first_and_tables_as_they_are():
    state = rpx.io.to_torch(rpx.Chain(), PARAMS, names=NAMES, layouts=REST, roles=ROLES)
    np.testing.assert_array_equal(state["layers.1.weight"], PARAMS["layers"][1].T)
    np.testing.assert_array_equal(state["turned.1.weight"], PARAMS["turned"][1])
    np.testing.assert_array_equal(state["tied"], PARAMS["tied"])
    np.testing.assert_array_equal(state["image"], PARAMS["image"].transpose(3, 2, 0, 1))
    np.testing.assert_array_equal(state["channels"], PARAMS["channels"])


def test_adapters_are_those_of_layouts_by_hand():
    p = (rpx.Freeze() >> rpx.LoRA(2, where="layers|turned|words")).with_axes(ROLES)
    free, fixed = rpx.partition(jax.jit(p.init)(PARAMS, jax.random.key(0)))
    raw = rpx.combine(jax.tree.map(lambda x: np.asarray(x) + np.float32(0.5), free), fixed)
    names = {"words": "words.weight", **NAMES}
    tensors, config = rpx.io.to_peft(p, raw, names=names, layouts=REST, roles=ROLES)
    by_hand, same = rpx.io.to_peft(p, raw, names=names, layouts=BY_HAND)
    assert config == same
    assert tensors.keys() == by_hand.keys()
    for name, x in by_hand.items():
        np.testing.assert_array_equal(tensors[name], x)
    q, back = rpx.io.from_peft(tensors, config, PARAMS, names=names, layouts=REST, roles=ROLES)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), fold(q, back), fold(p, raw))


# ---- Heads of attention.

ATTENTION = {
    "query": {"kernel": normal(8, 2, 4, seed=1), "bias": normal(2, 4, seed=2)},
    "out": {"kernel": normal(2, 4, 6, seed=3), "bias": normal(6, seed=4)},
}


def attend(params, x):
    heads = jnp.einsum("bd,dnh->bnh", x, params["query"]["kernel"]) + params["query"]["bias"][None]
    return jnp.einsum("bnh,nho->bo", jnp.tanh(heads), params["out"]["kernel"]) + params["out"]["bias"][None]


HEADS = rpx.roles(attend, ATTENTION, normal(5, 8))
OF_HEADS = {"roles": {"roles": HEADS}, "layouts": {"layouts": {"query/kernel": "to_heads", "out/kernel": "from_heads"}}}


@pytest.mark.parametrize("told_by", OF_HEADS)
def test_torch_and_peft_merge_heads(told_by):
    said = OF_HEADS[told_by]
    state = rpx.io.to_torch(rpx.Freeze(), rpx.Freeze().init(ATTENTION), **said)
    np.testing.assert_array_equal(state["query.weight"], ATTENTION["query"]["kernel"].reshape(8, 8).T)
    np.testing.assert_array_equal(state["query.bias"], ATTENTION["query"]["bias"].reshape(8))
    np.testing.assert_array_equal(state["out.weight"], ATTENTION["out"]["kernel"].reshape(8, 6).T)
    jax.tree.map(np.testing.assert_array_equal, rpx.io.from_torch(rpx.Chain(), state, ATTENTION, **said), ATTENTION)
    lora = rpx.LoRA(3, alpha=6.0, where=".*/kernel", columns={"query.*": (1, 2), ".*": -1})
    for chain in (lora, lora >> rpx.WeightNorm(detach=True, axis={"query.*": (1, 2), ".*": -1}, where=".*/kernel")):
        p = rpx.Freeze() >> chain
        raw = jax.jit(p.init)(ATTENTION, jax.random.key(0))
        free, fixed = rpx.partition(raw)
        raw = rpx.combine(
            jax.tree.map(lambda x: np.asarray(x) + np.sin(np.arange(x.size)).reshape(x.shape), free), fixed
        )
        tensors, config = rpx.io.to_peft(p, raw, **said)
        a, b = (tensors[f"base_model.model.out.lora_{name}.weight"] for name in "AB")
        assert (a.shape, b.shape) == ((3, 8), (6, 3))
        got = tensors["base_model.model.query.lora_B.weight"] @ tensors["base_model.model.query.lora_A.weight"]
        inner = raw["query"]["kernel"].get("@weight_norm", {"v": raw["query"]["kernel"]})["v"]["@lora"]
        np.testing.assert_allclose(got, np.einsum("ir,rnh->nhi", inner["a"], inner["b"]).reshape(8, 8), rtol=1e-4)
        q, back = rpx.io.from_peft(tensors, config, ATTENTION, **said)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), fold(q, back), fold(p, raw))


def test_two_axes_of_outputs_are_heads_without_a_word():
    p = rpx.Freeze() >> rpx.LoRA(3, columns=(1, 2), where="query/kernel")
    tensors, _ = rpx.io.to_peft(p, p.init(ATTENTION, jax.random.key(0)))
    assert {x.shape for x in tensors.values()} == {(3, 8), (8, 3)}


def test_biases_of_heads_train_beside_the_adapter():
    p = rpx.Freeze(where=".*/kernel") >> rpx.LoRA(3, columns={"query.*": (1, 2), ".*": -1}, where=".*/kernel")
    raw = jax.jit(p.init)(ATTENTION, jax.random.key(0))
    tensors, config = rpx.io.to_peft(p, raw, roles=HEADS)
    np.testing.assert_array_equal(tensors["base_model.model.query.base_layer.bias"], ATTENTION["query"]["bias"].ravel())
    zeros = jax.tree.map(np.zeros_like, ATTENTION)
    q, back = rpx.io.from_peft(tensors, config, zeros, roles=HEADS)
    np.testing.assert_array_equal(q.fold(back)["query"]["bias"], ATTENTION["query"]["bias"])


def told(fun, *shapes):
    """Whether roles are enough to write the parameter of a network."""
    params, *args = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    roles = rpx.roles(lambda params, *args: fun(params["w"], *args), {"w": params}, *args)
    rpx.io.to_torch(rpx.Chain(), {"w": jnp.zeros(params.shape)}, roles=roles)


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], ((2, 4, 4), (5, 4))),  # layers without names
        (lambda w, x: x * w, ((5, 4), (5, 4))),  # multiplied with nothing
        (
            lambda w, x: jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
            ((3, 3, 4, 4), (5, 6, 6, 4)),
        ),
        (
            lambda w, x: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "IHWO", "NHWC")),
            ((4, 3, 3, 4), (5, 6, 6, 4)),  # an order that torch has not
        ),
    ],
    ids=["layers", "elementwise", "transposed", "order"],
)
def test_what_roles_do_not_tell_is_asked_for(fun, shapes):
    with pytest.raises(ValueError, match=r"to_torch: .*'w'.*layouts="):
        told(fun, *shapes)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
