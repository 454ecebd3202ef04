import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from geometry.networks import NETWORKS, normal
from grids import mostly_thorough

import reparax as rpx
from examples.smollm import model
from reparax.geometry import Group, Member, axis_groups, fold_scales, rotate

CONFIG = model.Config(layers=2, width=12, heads=3, groups=1, inner=10, words=9)
TOKENS = np.array([[1, 4, 2, 0, 5]])


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def orthogonal(n):
    return np.linalg.qr(np.random.default_rng(n).normal(size=(n, n)))[0].astype(np.float32)


def llama(*, tied=False):
    shapes = model.shapes(CONFIG) | ({} if tied else {"lm_head": model.shapes(CONFIG)["embed_tokens"]})
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    drawn = [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(leaves)]
    return treedef.unflatten(drawn)


def logits(params, tokens):
    return model.logits(params, tokens, CONFIG)


def groups_of(fun, params, *args):
    return [group for group in axis_groups(fun)(params, *args) if not group.why_not_turned]


def test_the_stream_and_the_values_of_a_llama_can_be_turned_and_its_scales_fold():
    params = llama()
    stream, values = groups_of(logits, params, TOKENS)
    assert (stream.size, values.size) == (12, 4)
    assert {scale.path: {reader.path for reader in readers} for scale, readers in stream.scales} == {
        "layers/input_layernorm/scale": {f"layers/self_attn/{name}_proj/kernel" for name in "qkv"},
        "layers/post_attention_layernorm/scale": {f"layers/mlp/{name}_proj/kernel" for name in ("gate", "up")},
        "norm/scale": {"lm_head/embedding"},
    }
    assert {m.path for m in values.members} == {f"layers/self_attn/{name}_proj/kernel" for name in "vo"}
    want = logits(params, TOKENS)
    folded = fold_scales(params, [stream])
    np.testing.assert_array_equal(folded["norm"]["scale"], np.ones(12))
    np.testing.assert_allclose(
        folded["layers"]["mlp"]["up_proj"]["kernel"],
        params["layers"]["post_attention_layernorm"]["scale"][:, :, None]
        * params["layers"]["mlp"]["up_proj"]["kernel"],
        rtol=1e-6,
    )
    turned = rotate(rotate(params, stream, orthogonal(12)), values, orthogonal(4))
    for each in (folded, turned):
        np.testing.assert_allclose(logits(each, TOKENS), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_a_tied_table_keeps_its_basis_as_only_one_of_its_uses_is_scaled():
    params = llama(tied=True)
    stream = axis_groups(logits)(params, TOKENS).groups[0]
    assert stream.why_not_turned == "'norm/scale' scales only some of the uses of 'embed_tokens/embedding'"
    text = f"cannot turn axis 1 of 'embed_tokens/embedding': {stream.why_not_turned}. Leave the group out."
    with raises(ValueError, f"rotate {text}"):
        rotate(params, stream, np.eye(12))
    with raises(ValueError, f"fold_scales {text}"):
        fold_scales(params, [stream])
    with raises(ValueError, f"Rotate {text}"):
        rpx.Rotate([stream])


def norm(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))


TURNED = {
    "products": lambda p, h: h @ p["b"],
    "a sum with a vector": lambda p, h: (h + p["s"]) @ p["b"],
    "a residual": lambda p, h: norm(h + h @ p["c"]) @ p["b"],
    "a norm": lambda p, h: norm(h) @ p["b"],
    "a norm with a scale": lambda p, h: (norm(h) * p["s"]) @ p["b"] + (norm(h) * p["s"]) @ p["d"],
    "a norm with a doubled scale": lambda p, h: (norm(h) * (2 * p["s"])) @ p["b"],
    "a product with a vector": lambda p, h: jnp.sum(h * p["s"], -1),
    "a gate for all": lambda p, h: (h * jax.nn.sigmoid(jnp.sum(h * h, -1, keepdims=True))) @ p["b"],
    "a condition": lambda p, h: jax.lax.cond(p["d"][0, 0] < 99, lambda h: 2 * h, lambda h: -h, h) @ p["b"],
    "a loop": lambda p, h: jax.lax.fori_loop(0, 2, lambda i, h: h + norm(h) @ p["c"], h) @ p["b"],
    "attention": lambda p, h: jax.nn.softmax(h @ h.T) @ h @ p["b"],
    "a cast": lambda p, h: h.astype(jnp.float32) @ p["b"],
    "a mask of rows": lambda p, h: jnp.where(jnp.arange(5)[:, None] > 2, h, 0.0) @ p["b"],
}
KEPT = {
    "a function": lambda p, h: jnp.tanh(h) @ p["b"],
    "a mean": lambda p, h: (h - h.mean(-1, keepdims=True)) @ p["b"],
    "a sum with a number": lambda p, h: (h + 1) @ p["b"],
    "a product with data": lambda p, h: (h * h) @ p["b"],
    "a cube": lambda p, h: jnp.sum(h**3, -1),
    "a largest": lambda p, h: jnp.max(h, -1),
    "a gate": lambda p, h: (h * (h @ p["c"])) @ p["b"],
    "a scale that is also added": lambda p, h: (norm(h) * p["s"] + p["s"]) @ p["b"],
    "a scale and no scale": lambda p, h: (norm(h) * p["s"]) @ p["b"] + h @ p["b"],
    "two scales": lambda p, h: (norm(h) * p["s"]) @ p["b"] + (h * p["t"]) @ p["b"],
    "a scale of what is added": lambda p, h: (h + norm(h) * p["s"]) @ p["b"],
    "one and a scale": lambda p, h: (norm(h) * (1 + p["s"])) @ p["b"],
    "rounding": lambda p, h: jnp.round(h) @ p["b"],
    "another norm": lambda p, h: (h / jnp.sum(jnp.abs(h), -1, keepdims=True)) @ p["b"],
    "a carried sum of scaled": lambda p, h: jax.lax.fori_loop(0, 2, lambda i, h: h * p["s"], h) @ p["b"],
    "a condition on entries": lambda p, h: jnp.where(h > 0, h, 2 * h) @ p["b"],
    "sorted columns": lambda p, h: jnp.sort(h, 0) @ p["b"],
}
P = {
    "a": normal(3, 4),
    "b": normal(4, 2),
    "c": normal(4, 4),
    "d": normal(4, 2),
    "s": normal(4),
    "t": normal(4, 1)[:, 0],
}
X = normal(5, 3)


def of_hidden(each):
    def fun(params, x):
        return each(params, x @ params["a"])

    (group,) = [g for g in axis_groups(fun)(P, X) if ("a", 1) in map(tuple, g.members)]
    return fun, group


@pytest.mark.parametrize("name", mostly_thorough(TURNED, "a norm with a scale"))
def test_what_can_be_turned(name):
    fun, group = of_hidden(TURNED[name])
    assert group.why_not_turned == ""
    want = fun(P, X)
    np.testing.assert_allclose(fun(rotate(P, group, orthogonal(4)), X), want, rtol=1e-3, atol=1e-4)
    other = np.asarray(orthogonal(4)) + 0.3 * np.eye(4, dtype=np.float32)
    assert not np.allclose(fun(rotate(P, group, other), X), want, rtol=1e-2, atol=1e-2), "the law can fail"


@pytest.mark.parametrize("name", mostly_thorough(KEPT, "a mean", "a scale and no scale"))
def test_what_keeps_its_basis(name):
    fun, group = of_hidden(KEPT[name])
    assert group.why_not_turned
    blind = Group(group.members, group.size, by_step=False, why_not_turned="")
    assert not np.allclose(fun(rotate(P, blind, orthogonal(4)), X), fun(P, X), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", mostly_thorough(NETWORKS, "scanned"))
def test_the_groups_of_all_networks_that_can_be_turned(name):
    fun, params, args, _ = NETWORKS[name]()
    noise = iter(range(1000))
    params = jax.tree.map(lambda w: w + 0.3 * np.random.default_rng(next(noise)).normal(size=w.shape), params)
    want = jax.tree.leaves(fun(params, *args))
    for group in groups_of(fun, params, *args):
        found = jax.tree.leaves(fun(rotate(params, group, orthogonal(group.size)), *args))
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3 * np.abs(y).max())


def test_a_matrix_turns_gates_and_heads_within_an_axis():
    w = normal(3, 12)
    group = Group((Member("w", 1, outer=2, inner=3),), 2, by_step=False, why_not_turned="")
    q = orthogonal(2)
    want = np.einsum("xoni,nk->xoki", np.asarray(w).reshape(3, 2, 2, 3), q).reshape(3, 12)
    np.testing.assert_allclose(rotate({"w": w}, group, q)["w"], want, rtol=1e-5, atol=1e-6)
    with raises(ValueError, "rotate takes a matrix of shape (2, 2) for this group, but got (3, 3)."):
        rotate({"w": w}, group, np.eye(3))


def test_other_errors():
    group = Group((Member("w", 0),), 2, by_step=False)
    with raises(
        ValueError,
        "rotate cannot turn axis 0 of 'w': it was not read from a program. Leave the group out.",
    ):
        rotate({"w": normal(2)}, group, np.eye(2))
    with raises(
        ValueError,
        "rotate takes an array 'w' of which axis 0 has 2 indices, but got one of shape (3,). Pass the tree from which "
        "the groups were read.",
    ):
        rotate({"w": normal(3)}, Group((Member("w", 0),), 2, by_step=False, why_not_turned=""), np.eye(2))
    for wrong in (3, "w", [], [3]):
        text = f"Rotate takes groups of axes, but got {tuple(wrong) if isinstance(wrong, list | str) else wrong!r}. "
        with raises(TypeError, text + "Pass some of those that `rpx.axis_groups` finds."):
            rpx.Rotate(wrong)


@pytest.mark.parametrize("start", ["hadamard", "random", "identity"])
def test_the_stage_holds_weights_in_the_basis_and_the_network_reads_its_own(start):
    params = llama()
    found = groups_of(logits, params, TOKENS)
    p = rpx.Rotate(found, start=start, seed=3)
    params = fold_scales(params, found)
    raw = p.init(params)
    table = raw["embed_tokens"]["embedding"]["@rotate"]
    q = np.asarray(table["@fixed"]["q"])
    np.testing.assert_allclose(q @ q.T, np.eye(12), atol=1e-5)
    np.testing.assert_allclose(table["v"], params["embed_tokens"]["embedding"] @ q, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), p.apply(raw), params)
    if start == "hadamard":  # blocks of four of equal magnitude along the part that is a power of two
        sizes = np.abs(q).reshape(4, 3, 4, 3)
        np.testing.assert_allclose(sizes, np.broadcast_to(sizes[:1, :, :1], sizes.shape), atol=1e-6)
    assert (start == "identity") == np.array_equal(q, np.eye(12))


def test_a_stage_before_it_acts_on_turned_weights():
    params = llama()
    found = groups_of(logits, params, TOKENS)
    rounded = rpx.Stored("int4", block=4, stacked=0, where="layers/.*/kernel")
    p, rotation = rounded >> rpx.Rotate(found), rpx.Rotate(found)
    raw = p.init(params)
    turned = rotation.init(params)["layers"]["mlp"]["up_proj"]["kernel"]["@rotate"]["v"]
    want = rounded.fold(rounded.init({"layers": {"up": {"kernel": turned}}}))["layers"]["up"]["kernel"]
    q = np.asarray(raw["embed_tokens"]["embedding"]["@rotate"]["@fixed"]["q"])
    got = p.fold(raw)["layers"]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_allclose(got, np.einsum("lkn,jk->ljn", want, q), rtol=1e-4, atol=1e-4)


def test_it_prints_and_is_json_without_what_groups_know_beside():
    (group,) = [
        g for g in axis_groups(of_hidden(TURNED["products"])[0])(P, X) if not g.why_not_turned and len(g.members) > 1
    ]
    p = rpx.Rotate([group])
    assert repr(p) == "Rotate(((4, (('a', 1, 1), ('b', 0, 1))),))"
    assert rpx.from_json(p.to_json()) == p == eval(repr(p), {"Rotate": rpx.Rotate})
    assert re.escape("a") in dict(p.arrays)
