"""Ties: what is shared at which place of a chain, who owns it, and what sharing costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, table
from grids import mostly_thorough

import reparax as rpx


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layers(n, *names):
    """``n`` layers whose arrays are all equal."""
    return {"layers": [dict.fromkeys(names, normal(3, 2)) for _ in range(n)]}


def places(raw):
    """The paths that hold no value of their own."""
    leaves = jax.tree_util.tree_leaves_with_path(raw, is_leaf=lambda x: isinstance(x, dict) and "@tie" in x)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, x in leaves if isinstance(x, dict)]


def translation(seed=0):
    """Embeddings of source and target, and an output layer that is their transposed."""
    table = normal(5, 3, seed=seed)
    return {
        "source_embed": {"embedding": table},
        "target_embed": {"embedding": table},
        "output": {"kernel": table.T, "bias": normal(5, seed=1)},
    }


TRANSLATION = rpx.Tie(
    {"target_embed/embedding": "source_embed/embedding", "output/kernel": ("target_embed/embedding", jnp.transpose)}
)


# ---- Regular expressions.

PATTERNS = {
    "each from its own layer": ({r"layers/(\d+)/k": r"layers/\1/q"}, ["layers/0/k", "layers/1/k", "layers/2/k"]),
    "every one from the first": ({r"layers/\d+/q": "layers/0/q"}, ["layers/1/q", "layers/2/q"]),
    "named groups": ({r"layers/(?P<i>[12])/k": r"layers/\g<i>/q"}, ["layers/1/k", "layers/2/k"]),
    "plain": ({"layers/2/k": "layers/0/q"}, ["layers/2/k"]),
    "the first decides": ({r"layers/[01]/k": "layers/0/k", r"layers/\d/k": "layers/2/q"}, ["layers/1/k", "layers/2/k"]),
}


@pytest.mark.parametrize(("ties", "tied"), PATTERNS.values(), ids=PATTERNS)
def test_a_target_may_be_a_regular_expression_whose_groups_its_source_names(ties, tied):
    params, p = layers(3, "q", "k"), rpx.Tie(ties)
    raw = p.init(params)
    assert places(raw) == tied
    assert {path for path, owner in p.raw_paths(params).items() if path != owner} == set(tied)
    assert jax.tree.structure(p.apply(raw)) == jax.tree.structure(params)
    p.check(raw, like=params)


EQUAL = {
    "integers": (np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), True),
    "other integers": (np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32)[::-1].copy(), False),
    "large integers": (np.array([1, 10**9]), np.array([1, 10**9 + 1]), False),
    "booleans": (np.array([True, False]), np.array([True, False]), True),
    "keys": (jax.random.key(0), jax.random.key(0), True),
    "other keys": (jax.random.key(0), jax.random.key(1), False),
    "rounded": (np.float32([1, 1]), np.float32([1, 1 + 2**-22]), True),
    "by more than rounding": (np.float32([1, 1]), np.float32([1, 1 + 2**-20]), False),
    "not a number": (np.float32([np.nan, 1]), np.float32([np.nan, 1]), True),
    "complex": (np.complex64([1j]), np.complex64([-1j]), False),
    "half precision": (jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16) * 2, False),
}


@pytest.mark.parametrize(("x", "y", "equal"), EQUAL.values(), ids=EQUAL)
def test_arrays_are_tied_where_they_are_equal_to_rounding(x, y, equal):
    p = rpx.Tie({"a": "b"})
    if equal:
        assert places(p.init({"a": x, "b": y})) == ["a"]
    else:
        with pytest.raises(ValueError, match="'a' does not equal what its source 'b' gives"):
            p.init({"a": x, "b": y})


# ---- What is shared.


def test_a_tied_chain_of_three_draws_its_noise_once_and_transposes_it():
    params = translation()
    p = rpx.VarNoise(0.5) >> TRANSLATION
    effective = p.apply(p.init(params), jax.random.key(0))
    table = np.asarray(effective["source_embed"]["embedding"])
    noise = table - params["source_embed"]["embedding"]
    np.testing.assert_array_equal(effective["target_embed"]["embedding"], table)
    np.testing.assert_array_equal(effective["output"]["kernel"], table.T)
    assert 0.3 < noise.std() < 0.8  # of fifteen numbers of standard deviation 0.5, had it been added once


def test_noise_behind_a_tie_is_drawn_for_each_use():
    params = translation()
    p = TRANSLATION >> rpx.VarNoise(0.5)
    noise = jax.tree.map(np.subtract, p.apply(p.init(params), jax.random.key(0)), params)
    source, target = noise["source_embed"]["embedding"], noise["target_embed"]["embedding"]
    assert (source != target).all()
    assert (noise["output"]["kernel"] != source.T).all()


@pytest.mark.parametrize(
    "stage", mostly_thorough([rpx.LowRank(1), rpx.WeightNorm(axis=-1)], rpx.WeightNorm(axis=-1)), ids=repr
)
def test_a_tie_shares_what_exists_only_as_the_result_of_a_stage(stage):
    w = normal(4, 1) * normal(1, 3, seed=1)
    p = stage >> rpx.Tie({"out": ("in", jnp.transpose)})
    raw = p.init({"in": w, "out": w.T})
    moved = jax.tree.map(lambda x: np.asarray(x) * np.float32(1.5) + np.float32(0.1), raw)
    effective = p.apply(moved)
    np.testing.assert_array_equal(effective["out"], np.asarray(effective["in"]).T)
    assert raw["out"] == {"@tie": {}}


def test_a_linear_layer_reuses_a_slice_of_the_projections_of_self_attention():
    """The case of RETURNN's ``ReuseParams``; what the map does not name owns itself."""
    qkv = normal(4, 12)
    params = {"self_att": {"QKV": qkv}, "linear": {"W": qkv[:, :4], "b": normal(4, seed=1)}}
    p = rpx.Tie({"linear/W": ("self_att/QKV", lambda w: w[:, :4])})
    raw = p.init(params)
    assert jax.tree.map(jnp.shape, raw) == {"linear": {"W": {"@tie": {}}, "b": (4,)}, "self_att": {"QKV": (4, 12)}}
    x = normal(5, 4, seed=2)

    def loss(raw):
        effective = p.apply(raw)
        return jnp.sum(x @ effective["linear"]["W"]) + jnp.sum(effective["self_att"]["QKV"])

    grad = jax.jit(jax.grad(loss))(raw)
    expected = np.ones((4, 12), np.float32)
    expected[:, :4] += x.sum(0)[:, None]
    np.testing.assert_allclose(grad["self_att"]["QKV"], expected, rtol=1e-6)


def test_gradients_of_all_uses_add_up_at_the_owner_and_the_optimizer_has_no_copy():
    params = translation()
    raw = TRANSLATION.init(params)
    weights = {name: normal(5, 3, seed=i) for i, name in enumerate(("source", "target", "output"))}

    def loss(raw):
        effective = TRANSLATION.apply(raw)
        uses = effective["source_embed"]["embedding"], effective["target_embed"]["embedding"]
        uses = (*uses, effective["output"]["kernel"].T)
        return sum(jnp.sum(w * use) for w, use in zip(weights.values(), uses, strict=True))

    grad = jax.jit(jax.grad(loss))(raw)
    total = sum(weights.values())
    np.testing.assert_allclose(grad["source_embed"]["embedding"], total, rtol=1e-5)
    assert len(jax.tree.leaves(raw)) == 2
    assert len(jax.tree.leaves(optax.adam(0.1).init(raw))) == 5  # two moments of each, and a count


def test_ties_reach_the_raw_blocks_of_cells():
    cell = {"wi": normal(3, 8), "wh": normal(2, 8, seed=1)}
    params = {"encoder": cell, "decoder": cell}
    split = rpx.shared.Split({"w": rpx.shared.Concat(("wi: 3 8", "wh: 2 8"))}, where="encoder|decoder")
    p = rpx.Tie({"decoder/wi/w": "encoder/wi/w"}) >> split
    raw = p.init(params)
    assert len(jax.tree.leaves(raw)) == 1
    assert p.raw_paths(params) == {
        f"{name}/{part}": "encoder/wi/w" for name in ("decoder", "encoder") for part in ("wh", "wi")
    }
    doubled = p.apply(jax.tree.map(lambda x: 2 * x, raw))
    np.testing.assert_array_equal(doubled["decoder"]["wh"], 2 * cell["wh"])


def test_init_overwrites_where_it_is_told_to():
    params = {"a": normal(3), "b": normal(3, seed=1), "c": normal(3, seed=2)}
    p = rpx.Tie({"b": "a", "c": ("b", jnp.negative)}, unequal="overwrite")
    effective = p.apply(p.init(params))
    np.testing.assert_array_equal(effective["b"], params["a"])
    np.testing.assert_array_equal(effective["c"], -params["a"])
    assert repr(p) == "Tie({'b': 'a', 'c': ('b', jnp.negative)}, unequal='overwrite')"
    assert rpx.from_json(p.to_json()) == p


def test_known_arrays_are_compared_inside_of_jit_too():
    params = {"a": jnp.asarray(normal(3)), "b": jnp.abs(normal(3))}
    jax.jit(lambda: rpx.Tie({"b": ("a", jnp.abs)}).init(params))()
    with pytest.raises(ValueError, match="'b' does not equal what its source 'a' gives"):
        jax.jit(lambda: rpx.Tie({"b": "a"}).init(params))()


# ---- Several sources, and values of later stages.


def side_by_side(*parts):
    return jnp.concatenate(parts, 1)


def test_an_array_of_several_sources_gives_each_its_gradient():
    """The case of RETURNN's ``reuse_params`` with a function of its own."""
    parts = {name: normal(3, size, seed=size) for name, size in {"q": 2, "k": 1, "v": 4}.items()}
    params = {"att": parts, "qkv": np.concatenate(list(parts.values()), 1), "out": normal(3, 7, seed=9)}
    p = rpx.Tie({"qkv": (("att/q", "att/k", "att/v"), side_by_side)}) >> rpx.Tie({"out": "qkv"}, unequal="overwrite")
    raw = p.init(params)
    assert raw["qkv"] == raw["out"] == {"@tie": {}}
    uses = normal(3, 7, seed=5)
    grads = jax.jit(jax.grad(lambda raw: sum(jnp.sum(uses * p.apply(raw)[name]) for name in ("qkv", "out"))))(raw)
    got = np.concatenate([grads["att"][name] for name in parts], 1)
    np.testing.assert_allclose(got, 2 * uses, rtol=1e-6)
    owners = ("att/q", "att/k", "att/v")
    assert p.raw_paths(params) == {**dict.fromkeys(("qkv", "out"), owners), **{path: path for path in owners}}
    added = rpx.Tie({"s": (("a", "b"), jnp.add)})
    assert rpx.from_json(added.to_json()) == added == eval(repr(added), {"Tie": rpx.Tie, "jax": jax, "jnp": jnp})


def test_two_adapters_share_a_factor():
    p = rpx.Tie({r"(\d)/k/@lora/a": r"\1/q/@lora/a"}, unequal="overwrite") >> rpx.LoRA(2, columns=-1)
    params = {layer: {name: normal(4, 3, seed=i) for i, name in enumerate("qk")} for layer in "01"}
    raw = p.init(params, jax.random.key(0))
    assert places(raw) == ["0/k/@lora/a", "1/k/@lora/a"]
    moved = jax.tree.map(lambda x: x + 0.5, raw)
    for layer in "01":
        q, k = (moved[layer][name]["@lora"] for name in "qk")
        want = k["@fixed"]["w"] + np.asarray(q["a"], np.float64) @ np.asarray(k["b"])
        np.testing.assert_allclose(p.fold(moved)[layer]["k"], want, rtol=1e-5)
    assert set(p.raw_paths(params).values()) == {"0/q", "0/k", "1/q", "1/k"}  # each has a base of its own


def test_each_raw_value_of_a_tied_array_is_that_of_its_source():
    p = rpx.Tie({"q": "k"}, unequal="overwrite") >> rpx.LowRank(2, where="[kq]")
    params = {name: normal(4, 3, seed=i) for i, name in enumerate("kq")}
    raw = p.init(params)
    assert places(raw) == ["q/@low_rank/u", "q/@low_rank/v"]
    effective = p.fold(raw)
    np.testing.assert_array_equal(effective["q"], effective["k"])
    assert p.raw_paths(params) == {"k": "k", "q": "k"}


def test_a_tie_may_be_named_before_that_of_its_source():
    w = normal(3)
    p = rpx.Tie({"d": (("b", "c"), jnp.add), "c": "b", "b": ("a", jnp.negative)}, unequal="overwrite")
    effective = p.apply(p.init(dict.fromkeys("abcd", w)))
    np.testing.assert_array_equal([effective[name] for name in "abcd"], [w, -w, -w, -2 * w])


def test_a_tie_of_a_pair_with_none_and_ties_in_a_list_are_those_of_a_dict():
    pair = rpx.Tie({"a": ("b", None)})
    assert pair == rpx.Tie({"a": "b"}) == rpx.Tie((("a", "b", None),)) == rpx.Tie([("a", "b")])


# ---- Owners.


def test_every_parametrization_says_who_owns_what():
    params = translation()
    itself = {
        path: path for path in ("output/bias", "output/kernel", "source_embed/embedding", "target_embed/embedding")
    }
    owner = "source_embed/embedding"
    tied = itself | {"target_embed/embedding": owner, "output/kernel": owner}
    assert rpx.Chain().raw_paths(params) == itself
    assert (rpx.WeightNorm() >> rpx.VarNoise(0.1)).raw_paths(params) == itself
    assert TRANSLATION.raw_paths(params) == tied
    assert (rpx.LowRank(2) >> TRANSLATION >> rpx.WeightDropout(0.1)).raw_paths(params) == tied
    apart = rpx.Tie({"target_embed/embedding": owner}) >> rpx.Tie(
        {"output/kernel": ("target_embed/embedding", jnp.transpose)}
    )
    assert apart.raw_paths(params) == tied
    assert TRANSLATION.raw_paths(jax.eval_shape(lambda: params)) == tied
    others = {"act": jax.nn.relu, "n": 3, "none": None, "flag": np.ones((), bool), "b": np.ones(2)}
    assert rpx.Freeze(where="b").raw_paths(others) == {"b": "b", "flag": "flag"}
    with raises(
        ValueError, "Tie({'x': 'in'}).init found no array at 'x'; the nearest paths are 'b', 'a'. Use existing paths."
    ):
        rpx.Tie({"x": "in"}).raw_paths({"a": np.ones(2), "b": np.ones(2)})


# ---- Costs and errors.


MATRICES = {"0": {name: normal(3, 2, seed=i) for i, name in enumerate("qk")}}
TWO = {layer: {name: np.ones(2, np.float32) for name in "qk"} for layer in "01"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("size", [1.0, 2.0**-40])
def test_a_target_may_differ_by_four_units_in_the_last_place_and_no_more(dtype, size):
    with jax.enable_x64():
        eps = float(jnp.finfo(dtype).eps)
        source, within, beyond, near_zero = (
            (size * np.array(numbers)).astype(jnp.dtype(dtype))
            for numbers in ([1, 0], [1 + 4 * eps, 0], [1 + 5 * eps, 0], [1, eps])
        )
        assert rpx.Tie({"b": "a"}).init({"a": source, "b": within})["b"] == {"@tie": {}}
        for unequal in (beyond, near_zero):
            with pytest.raises(ValueError, match="'b' does not equal what its source 'a' gives"):
                rpx.Tie({"b": "a"}).init({"a": source, "b": unequal})


@table(__file__)
def test_expressions_that_cannot_hold_are_refused(case):
    case.check(globals())
