"""State dicts of torch without torch: names, layouts and numbers written by hand; torch itself is beside us in
`test_peers_state_dict.py`.
"""

from contextlib import nullcontext
from dataclasses import replace

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import scipy.linalg
from compiled import fold, init, zeros
from errors import table
from flax import nnx
from grids import mostly_thorough
from one_array import normal

import reparax as rpx
from reparax.io._parameters import Entry
from reparax.io._torch import _make_plan
from reparax.io._torch_stages import _require_known_map, _torch_map, _write_reflections


def numbers(*shape, dtype=np.float32, start=1):
    return (start + np.arange(np.prod(shape, dtype=int))).reshape(shape).astype(dtype)


def identical(got, want):
    """The same arrays; chex widens bfloat16 before it compares, so dtypes are compared for themselves."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_equal(got, want)


# ---- names

PATH = "parametrizations.weight."
W = numbers(3, 2)
DENSE = {"dense": {"kernel": W.T}}
U, RIGHT = numbers(3, start=20), numbers(2, start=30)
G = numbers(3, 1, start=10)
LEFT = {"u": U, "v": RIGHT}


def dense(mark, **values):
    return {f"@{mark}": values}


NORMED = dense("weight_norm", g=G.T, v=W.T)
SPECTRAL = dense("spectral_norm", w=W.T, **{"@fixed": LEFT})
OUTPUTS = np.array([[1], [0], [1]], np.float32)
MASK = np.array([[1, 0], [0, 1], [1, 1]], np.float32)

# What stands at the kernel, and what torch calls it below `dense`: as parametrizations, and as hooks.
NAMES = {
    "plain": (rpx.Chain(), W.T, {"weight": W}, {"weight": W}),
    "noise": (rpx.VarNoise(0.1) >> rpx.quantized.Cast("bfloat16"), W.T, {"weight": W}, {"weight": W}),
    "weight norm": (
        rpx.WeightNorm(),
        NORMED,
        {"parametrizations.weight.original0": G, "parametrizations.weight.original1": W},
        {"weight_g": G, "weight_v": W},
    ),
    "a cast of weight norm": (
        rpx.WeightNorm() >> rpx.quantized.Cast("bfloat16"),
        NORMED,
        {"parametrizations.weight.original0": G, "parametrizations.weight.original1": W},
        {"weight_g": G, "weight_v": W},
    ),
    "weight norm of the whole": (
        rpx.WeightNorm(axis=None),
        dense("weight_norm", g=numbers(1, 1), v=W.T),
        {"parametrizations.weight.original0": numbers(), "parametrizations.weight.original1": W},
        {"weight_g": numbers(), "weight_v": W},
    ),
    "spectral norm": (
        rpx.SpectralNorm(),
        SPECTRAL,
        {
            "parametrizations.weight.original": W,
            "parametrizations.weight.0._u": U,
            "parametrizations.weight.0._v": RIGHT,
        },
        {"weight_orig": W, "weight_u": U, "weight_v": RIGHT},
    ),
    "mask": (
        rpx.Mask(),
        dense("mask", w=W.T, **{"@fixed": {"mask": MASK.T}}),
        {"weight_orig": W, "weight_mask": MASK},
        {"weight_orig": W, "weight_mask": MASK},
    ),
    "pruned outputs": (
        rpx.MagnitudePruning(count=1, axis=-1),
        dense("magnitude_pruning", w=W.T, **{"@fixed": {"mask": OUTPUTS.T}}),
        {"weight_orig": W, "weight_mask": np.repeat(OUTPUTS, 2, 1)},
        {"weight_orig": W, "weight_mask": np.repeat(OUTPUTS, 2, 1)},
    ),
    "one of two": (
        rpx.sparse.NByM(1, 2, along=0),
        dense("n_by_m", w=W.T, **{"@fixed": {"mask": MASK.T}}),
        {"weight_orig": W, "weight_mask": MASK},
        {"weight_orig": W, "weight_mask": MASK},
    ),
    "pruned with others": (
        rpx.sparse.GlobalMagnitudePruning(count=2),
        dense("global_magnitude_pruning", w=W.T, **{"@fixed": {"mask": MASK.T}}),
        {"weight_orig": W, "weight_mask": MASK},
        {"weight_orig": W, "weight_mask": MASK},
    ),
    "fields that torch has or that only matter at the start": (
        rpx.SpectralNorm(3, rows=0, columns=1, outside="unchecked", where="dense/.*"),
        SPECTRAL,
        {
            "parametrizations.weight.original": W,
            "parametrizations.weight.0._u": U,
            "parametrizations.weight.0._v": RIGHT,
        },
        {"weight_orig": W, "weight_u": U, "weight_v": RIGHT},
    ),
    "frozen": (rpx.Freeze(), dense("freeze", **{"@fixed": {"w": W.T}}), {"weight": W}, {"weight": W}),
    "frozen weight norm": (
        rpx.WeightNorm() >> rpx.Freeze(),
        dense("freeze", **{"@fixed": {"w": NORMED}}),
        {"parametrizations.weight.original0": G, "parametrizations.weight.original1": W},
        {"weight_g": G, "weight_v": W},
    ),
    "weight norm, then spectral norm": (
        rpx.WeightNorm() >> rpx.SpectralNorm(),
        dense("spectral_norm", w=NORMED, **{"@fixed": LEFT}),
        {
            "parametrizations.weight.original0": G,
            "parametrizations.weight.original1": W,
            "parametrizations.weight.1._u": U,
            "parametrizations.weight.1._v": RIGHT,
        },
        {"weight_orig_g": G, "weight_orig_v": W, "weight_u": U, "weight_v": RIGHT},
    ),
    "spectral norm twice": (
        rpx.SpectralNorm(2) >> rpx.SpectralNorm(3),
        dense("spectral_norm", w=dense("spectral_norm@2", w=W.T, **{"@fixed": LEFT}), **{"@fixed": LEFT}),
        {
            "parametrizations.weight.original": W,
            "parametrizations.weight.0._u": U,
            "parametrizations.weight.0._v": RIGHT,
            "parametrizations.weight.1._u": U,
            "parametrizations.weight.1._v": RIGHT,
        },
        {"weight_orig_orig": W, "weight_orig_u": U, "weight_orig_v": RIGHT, "weight_u": U, "weight_v": RIGHT},
    ),
    "spectral norm of a masked weight": (
        rpx.Mask() >> rpx.SpectralNorm(),
        dense("spectral_norm", w=dense("mask", w=W.T, **{"@fixed": {"mask": MASK.T}}), **{"@fixed": LEFT}),
        {
            "parametrizations.weight.original_orig": W,
            "parametrizations.weight.original_mask": MASK,
            "parametrizations.weight.0._u": U,
            "parametrizations.weight.0._v": RIGHT,
        },
        {"weight_orig_orig": W, "weight_orig_mask": MASK, "weight_u": U, "weight_v": RIGHT},
    ),
    "spectral norm of the direction": (
        rpx.SpectralNorm() >> rpx.WeightNorm(),
        dense("weight_norm", g=G.T, v=SPECTRAL),
        {
            "parametrizations.weight.original0": G,
            "parametrizations.weight.parametrizations.original1.original": W,
            "parametrizations.weight.parametrizations.original1.0._u": U,
            "parametrizations.weight.parametrizations.original1.0._v": RIGHT,
        },
        {"weight_g": G, "weight_v_orig": W, "weight_v_u": U, "weight_v_v": RIGHT},
    ),
    "mask of the direction": (
        rpx.Mask() >> rpx.WeightNorm(),
        dense("weight_norm", g=G.T, v=dense("mask", w=W.T, **{"@fixed": {"mask": MASK.T}})),
        {
            "parametrizations.weight.original0": G,
            "parametrizations.weight.original1_orig": W,
            "parametrizations.weight.original1_mask": MASK,
        },
        {"weight_g": G, "weight_v_orig": W, "weight_v_mask": MASK},
    ),
}
STYLES = pytest.mark.parametrize(("style", "column"), [("parametrizations", 2), ("hooks", 3)])


@STYLES
@pytest.mark.parametrize("name", NAMES)
def test_each_value_has_its_name_in_torch(name, style, column):
    p, kernel, *_ = case = NAMES[name]
    tree, state = {"dense": {"kernel": kernel}}, {f"dense.{name}": x for name, x in case[column].items()}
    got = rpx.io.to_torch(p, tree, style=style)
    identical(got, state)
    assert all(type(x) is np.ndarray and x.flags.writeable for x in got.values())
    identical(rpx.io.from_torch(p, state, DENSE), jax.tree.map(jnp.asarray, tree))


def test_stages_of_one_kind_are_told_apart():
    p = rpx.WeightNorm(axis=0, where="a/kernel") >> rpx.WeightNorm(axis=None, where="b/kernel")
    state = {"a.weight_g": numbers(1, 2), "a.weight_v": W, "b.weight_g": numbers(), "b.weight_v": W}
    tree = rpx.io.from_torch(p, state, {"a": {"kernel": W.T}, "b": {"kernel": W.T}})
    np.testing.assert_allclose(p.fold(tree)["a"]["kernel"], (W / np.linalg.norm(W, axis=0) * [1, 2]).T, rtol=1e-6)
    np.testing.assert_allclose(p.fold(tree)["b"]["kernel"], (W / np.linalg.norm(W)).T, rtol=1e-6)
    identical(rpx.io.to_torch(p, tree, style="hooks"), state)


def names_in_torch(p, params, *, like=None, style=None, names=None):
    """The names that torch has for the raw values of each parameter."""
    plan = _make_plan(p, jax.eval_shape(p.init, params, jax.random.key(0)), names, None, None, None, like, style)
    return {entry.path: found for entry, found in plan.names.items()}


def test_rules_for_styles_give_each_parameter_its_own():
    p, params = (
        rpx.WeightNorm(where="[ab]/.*") >> rpx.Orthogonal(where="c/.*"),
        {name: {"kernel": W.T} for name in "abcd"},
    )
    listed, hooked = (
        ["parametrizations.weight.original0", "parametrizations.weight.original1"],
        ["weight_g", "weight_v"],
    )
    orthogonal = ["c.parametrizations.weight.original", "c.parametrizations.weight.0.base"]
    rest = {"c/kernel": orthogonal, "d/kernel": ["d.weight"]}

    def named(found, path):
        return sorted(name.removeprefix(f"{path[0]}.") for name in found[path])

    for how in (
        {"style": {"b/.*": "hooks", ".*": "parametrizations"}},
        {"style": {"[bc]/.*": "hooks"}},
        {"style": {"[bc]/.*": "hooks", "a/.*|b/kernel": "no_trivialization"}},
        {"like": ["a.parametrizations.weight.original0", "b.weight_v"]},
    ):
        found = names_in_torch(p, params, **how)
        assert [named(found, path) for path in ("a/kernel", "b/kernel")] == [listed, hooked]
        assert {path: sorted(found[path], reverse=True) for path in rest} == rest


def test_a_state_dict_tells_the_styles_of_what_is_written_and_the_names_are_sorted():
    p = rpx.WeightNorm()
    raw = {name: {"kernel": NORMED} for name in "cab"}
    like = {"c.weight_g": G, "a.parametrizations.weight.original0": G, "b.weight_v": W}
    assert list(rpx.io.to_torch(p, raw, like=like)) == [
        *(f"a.{PATH}original0", f"a.{PATH}original1"),
        *("b.weight_g", "b.weight_v", "c.weight_g", "c.weight_v"),
    ]


def test_a_tie_has_a_name_and_a_layout_of_its_own():
    tie = rpx.Tie({"b/w": "a/kernel"})
    raw = tie.init({"a": {"kernel": W.T[:, :2]}, "b": {"w": W.T[:, :2]}})
    with pytest.raises(ValueError, match=r"determines the axes of 'b/w', which"):
        rpx.io.to_torch(tie, raw)
    names = names_in_torch(tie, {"a": {"kernel": W[:2]}, "b": {"w": W[:2]}})
    assert names == {"a/kernel": ["a.weight"], "b/w": ["b.w"]}


def test_a_norm_of_a_complex_weight_is_real_in_torch():
    g, v = numbers(1, 3), (1 + 1j) * W.T.astype(np.complex64)
    state = rpx.io.to_torch(rpx.WeightNorm(), {"dense": {"kernel": dense("weight_norm", g=g, v=v)}}, style="hooks")
    identical(state, {"dense.weight_g": g.T, "dense.weight_v": v.T})


# ---- names and layouts of parameters

MODEL = {
    "embed": {"embedding": numbers(4, 2)},
    "norm": {"scale": numbers(2), "bias": numbers(2, start=5)},
    "blocks_0": {"linear": {"kernel": numbers(2, 3)}},
    "conv": {"kernel": numbers(2, 3, 4, 5)},
    "deconv": {"kernel": numbers(2, 3, 4, 5)},
    "lstm": {"weight_ih_l0": numbers(8, 3)},
}


def test_paths_and_axes_become_those_of_torch():
    got = rpx.io.to_torch(
        rpx.Chain(),
        MODEL,
        names={r"blocks_(\d)/(.*)/kernel": r"h.\1.\2.w"},
        layouts={"deconv/.*": "conv_transpose", "conv/.*": "kernel", "lstm/.*": "same"},
    )
    identical(
        got,
        {
            "embed.weight": MODEL["embed"]["embedding"],
            "norm.weight": MODEL["norm"]["scale"],
            "norm.bias": MODEL["norm"]["bias"],
            "h.0.linear.w": MODEL["blocks_0"]["linear"]["kernel"].T,
            "conv.weight": np.einsum("hwio->oihw", MODEL["conv"]["kernel"]),
            "deconv.weight": np.einsum("hwio->iohw", MODEL["deconv"]["kernel"])[..., ::-1, ::-1],
            "lstm.weight_ih_l0": MODEL["lstm"]["weight_ih_l0"],
        },
    )


def test_the_first_rule_that_matches_counts():
    names = {"a/kernel": "z.first", r"(\w)/kernel": r"second.\1"}
    got = rpx.io.to_torch(rpx.Chain(), {"a": {"kernel": W}, "b": {"kernel": W}}, names=names)
    assert list(got) == ["second.b", "z.first"]


def test_a_group_of_several_parts_of_a_path_is_written_with_dots():
    tree = {"encoder": {"layer_0": {"kernel": W}}}
    assert list(rpx.io.to_torch(rpx.Chain(), tree, names={"(.*)/kernel": r"model.\1.weight"})) == [
        "model.encoder.layer_0.weight"
    ]


@pytest.mark.parametrize(
    ("layout", "axis", "rest"), [("kernel", -1, "hwi->ihw"), ("same", 0, "iho->iho"), ("conv_transpose", 2, "hwo->ohw")]
)
def test_singular_vectors_follow_the_axes_of_the_weight(layout, axis, rest):
    w = numbers(2, 3, 4, 5)
    u, v = numbers(w.shape[axis]), numbers(w.size // w.shape[axis])
    tree = {"kernel": dense("spectral_norm", w=w, **{"@fixed": {"u": u, "v": v}})}
    p = rpx.SpectralNorm(columns=axis)
    got = rpx.io.to_torch(p, tree, layouts={"kernel": layout})
    turned = np.einsum(rest, v.reshape(np.delete(w.shape, axis)))
    turned = turned[:, ::-1, ::-1] if layout == "conv_transpose" else turned
    np.testing.assert_array_equal(got["parametrizations.weight.0._v"], turned.reshape(-1))
    np.testing.assert_array_equal(got["parametrizations.weight.0._u"], u)
    identical(rpx.io.from_torch(p, got, {"kernel": w}, layouts={"kernel": layout}), jax.tree.map(jnp.asarray, tree))


# ---- stacks: one tensor for each layer

STACK = {
    "layers": {"mlp": {"kernel": numbers(30, 2, 3)}, "norm": {"scale": numbers(30, 2, start=7)}},
    "head": {"kernel": numbers(2, 4)},
}
LAYERS = {r"layers/(.*)/(kernel|scale)": r"model.layers.{i}.\1.weight"}


def test_each_layer_of_a_stack_is_a_tensor_and_comes_back_bit_for_bit():
    state = {"head.weight": STACK["head"]["kernel"].T}
    for i in range(30):
        state[f"model.layers.{i}.mlp.weight"] = STACK["layers"]["mlp"]["kernel"][i].T
        state[f"model.layers.{i}.norm.weight"] = STACK["layers"]["norm"]["scale"][i]
    identical(rpx.io.to_torch(rpx.Chain(), STACK, names=LAYERS), state)
    identical(rpx.io.from_torch(rpx.Chain(), state, STACK, names=LAYERS), jax.tree.map(jnp.asarray, STACK))


def test_two_axes_of_a_stack_have_two_counters():
    experts, names = {"wi": {"kernel": numbers(2, 3, 4, 5)}}, {"wi/kernel": "layers.{i}.experts.{j}.weight"}
    state = {f"layers.{i}.experts.{j}.weight": experts["wi"]["kernel"][i, j].T for i in range(2) for j in range(3)}
    identical(rpx.io.to_torch(rpx.Chain(), experts, names=names), state)
    identical(rpx.io.from_torch(rpx.Chain(), state, experts, names=names), jax.tree.map(jnp.asarray, experts))


STACKED = {
    "noise": rpx.VarNoise(0.1),
    "weight norm": rpx.WeightNorm(stacked=0),
    "weight norm of the whole": rpx.WeightNorm(axis=None, stacked=0),
    "spectral norm": rpx.SpectralNorm(stacked=0),
    "both": rpx.WeightNorm(stacked=0) >> rpx.SpectralNorm(stacked=0),
    "orthogonal": rpx.Orthogonal("expm", stacked=0),
    "frozen": rpx.Freeze(),
    "pruned together": rpx.MagnitudePruning(0.5),
    "pruned one by one": rpx.MagnitudePruning(count=1, axis=-1, stacked=0),
}


@pytest.mark.thorough
@pytest.mark.parametrize("style", mostly_thorough(["parametrizations", "hooks"], "parametrizations"))
@pytest.mark.parametrize("name", mostly_thorough(STACKED, "weight norm", "orthogonal", "pruned together"))
def test_a_stage_on_a_stack_is_one_on_each_layer(name, style):
    p, w = STACKED[name], np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)
    raw = init(p, {"kernel": w})
    folded = fold(p, raw)
    state = rpx.io.to_torch(p, raw, names={"kernel": "{i}.weight"}, style=style)
    alone = rpx.Chain(tuple(replace(stage, stacked=()) for stage in rpx.Chain((p,)).stages))
    for i in range(3):
        one = {key.removeprefix(f"{i}."): x for key, x in state.items() if key.startswith(f"{i}.")}
        read = rpx.io.from_torch(alone, one, {"kernel": w[i]})
        np.testing.assert_allclose(fold(alone, read)["kernel"], np.asarray(folded["kernel"])[i], rtol=1e-5, atol=1e-6)
    back = rpx.io.from_torch(p, state, {"kernel": w}, names={"kernel": "{i}.weight"})
    equal = identical if name != "orthogonal" else lambda a, b: chex.assert_trees_all_close(a, b, atol=1e-6)
    equal(fold(p, back), folded)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, raw)


def test_a_tie_of_stacks_is_read_and_written_layer_by_layer():
    p = rpx.Tie({"out/kernel": "in/kernel"})
    params, names = {"in": {"kernel": numbers(2, 3, 3)}, "out": {"kernel": numbers(2, 3, 3)}}, {"(.*)/.*": r"\1.{i}.w"}
    state = rpx.io.to_torch(p, p.init(params), names=names)
    identical(state, {f"{name}.{i}.w": params["in"]["kernel"][i].T for name in ("in", "out") for i in range(2)})
    identical(rpx.io.from_torch(p, state, params, names=names), p.init(params))


# ---- tensors that are read, which tell convolutions by their axes

KERNELS = {
    "vector": ((4, 2, 3), "kio->oik"),
    "image": ((3, 4, 2, 5), "hwio->oihw"),
    "volume": ((3, 4, 2, 2, 5), "dhwio->oidhw"),
}


@pytest.mark.parametrize("make", [lambda w: {"conv": {"kernel": w}}, lambda w: nnx.State({"conv": {"kernel": w}})])
@pytest.mark.parametrize("name", KERNELS)
def test_a_tensor_with_all_axes_of_a_kernel_is_that_of_a_convolution(name, make):
    shape, order = KERNELS[name]
    w = numbers(*shape)
    like, state = make(nnx.Param(jnp.zeros(shape))), {"conv.weight": np.einsum(order, w)}
    got = rpx.io.from_torch(rpx.Chain(), state, like)["conv"]["kernel"][...]
    np.testing.assert_array_equal(got, w)


@STYLES
@pytest.mark.parametrize(
    "p",
    [rpx.WeightNorm(axis=-1), rpx.WeightNorm(axis=-1) >> rpx.SpectralNorm(columns=-1), rpx.Mask(), rpx.Freeze()],
    ids=repr,
)
def test_the_values_of_a_stage_tell_a_convolution(p, style, column):
    del column
    raw = init(p, {"kernel": numbers(3, 2, 4, 5)})
    state = rpx.io.to_torch(p, raw, layouts={"kernel": "kernel"}, style=style)
    identical(rpx.io.from_torch(p, state, {"kernel": numbers(3, 2, 4, 5)}), raw)


def test_the_tensor_of_each_layer_tells_a_stack_of_convolutions():
    w = numbers(2, 3, 4, 5)
    state = {f"{i}.weight": np.einsum("kio->oik", w[i]) for i in range(2)}
    got = rpx.io.from_torch(rpx.Chain(), state, {"kernel": w}, names={"kernel": "{i}.weight"})
    np.testing.assert_array_equal(got["kernel"], w)


@pytest.mark.parametrize(
    "state", [{"a.weight": numbers(2, 3, 4)}, {"a.weight": numbers(2, 3, 4), "b.weight": numbers(2, 3, 4)}]
)
def test_a_tied_convolution_is_told_where_it_stands(state):
    tie, like = rpx.Tie({"b/kernel": "a/kernel"}), {"a": {"kernel": np.ones((4, 3, 2), np.float32)}}
    got = tie.fold(rpx.io.from_torch(tie, state, like | {"b": like["a"]}))["b"]["kernel"]
    np.testing.assert_array_equal(got, np.einsum("oik->kio", state["a.weight"]))


def test_a_tensor_with_fewer_axes_than_an_array_tells_nothing():
    like, state = {"q": {"bias": numbers(8), "kernel": numbers(8, 2, 4)}}, {"q.weight": numbers(8, 8)}
    with pytest.raises(ValueError, match=r"^from_torch: the shape .* does not show .* attention kernel. For a"):
        rpx.io.from_torch(rpx.Chain(), state | {"q.bias": numbers(8)}, like)


# ---- classes of modules, which tell their layouts


MADE = {"use_bias": False, "rngs": nnx.Rngs(0), "kernel_init": lambda *_: jnp.asarray(numbers(4, 6, 6))}


def deconvolution(**options):
    module = nnx.ConvTranspose(6, 6, (4,), **MADE, **options)
    return module, np.asarray(module.kernel[...])


def test_the_classes_of_nnx_tell_transposed_convolutions():
    module, w = deconvolution()
    (x,) = rpx.io.to_torch(rpx.Chain(), module).values()
    np.testing.assert_array_equal(x, np.einsum("kio->iok", w)[..., ::-1])
    np.testing.assert_array_equal(rpx.io.from_torch(rpx.Chain(), {"weight": x}, module).kernel[...], w)
    module, w = deconvolution(transpose_kernel=True)
    (x,) = rpx.io.to_torch(rpx.Chain(), module).values()
    np.testing.assert_array_equal(x, np.einsum("kio->oik", w))
    tree = {"net": nnx.Conv(6, 6, (4,), **MADE)}
    (x,) = rpx.io.to_torch(rpx.Chain(), tree).values()
    np.testing.assert_array_equal(x, np.einsum("kio->oik", tree["net"].kernel[...]))


def test_the_classes_of_equinox_tell_transposed_convolutions():
    module = eqx.nn.ConvTranspose1d(6, 6, 4, use_bias=False, key=jax.random.key(0))
    state = rpx.io.to_torch(rpx.Chain(), module)
    np.testing.assert_array_equal(state["weight"], np.einsum("oik->iok", module.weight)[..., ::-1])
    np.testing.assert_array_equal(rpx.io.from_torch(rpx.Chain(), state, module).weight, module.weight)


@pytest.mark.parametrize("p", [rpx.Chain(), rpx.Freeze(), rpx.sparse.RandomPruning(0.5, where=".*bias")], ids=repr)
@pytest.mark.parametrize("layer", [eqx.nn.Conv2d, eqx.nn.ConvTranspose1d], ids=["conv", "transposed"])
def test_biases_of_convolutions_of_equinox_are_vectors_in_torch(p, layer):
    module = eqx.filter_eval_shape(lambda: layer(3, 4, 2, key=jax.random.key(0)))
    model = {"net": [jax.tree.map(lambda x: normal(*x.shape), module)]}
    raw = init(p, model, jax.random.key(1))
    state = rpx.io.to_torch(p, raw)
    biases = [x for name, x in state.items() if "bias" in name]
    assert {x.shape for x in biases} == {(4,)}
    read = rpx.io.from_torch(p, state, model)
    chex.assert_trees_all_equal(jax.tree.leaves(read), [x for x in jax.tree.leaves(raw) if eqx.is_array(x)])


def test_an_array_of_one_axis_and_more_of_size_one_may_be_a_vector_in_torch():
    like = {"b": jnp.arange(4.0).reshape(4, 1, 1)}
    state = rpx.io.to_torch(rpx.Chain(), like, layouts={"b": "vector"})
    assert state["b"].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(rpx.io.from_torch(rpx.Chain(), state, like, layouts={"b": "vector"})["b"], like["b"])


def test_a_rule_counts_more_than_a_class():
    module, w = deconvolution()
    (x,) = rpx.io.to_torch(rpx.Chain(), module, layouts={"kernel": "same"}).values()
    np.testing.assert_array_equal(x, w)


def test_stacked_modules_are_no_convolutions():
    make = jax.vmap(lambda key: eqx.nn.Linear(2, 3, use_bias=False, key=key))
    stack = make(jax.random.split(jax.random.key(0), 2))
    with pytest.raises(ValueError, match=r"^to_torch: the shape \(2, 3, 2\) of 'weight' does not show"):
        rpx.io.to_torch(rpx.Chain(), stack)
    got = rpx.io.to_torch(rpx.Chain(), stack, names={"weight": "{i}.weight"})
    identical(got, {f"{i}.weight": np.asarray(stack.weight[i]) for i in range(2)})


# ---- orthogonal matrices, by the formulas of torch


def rotation(*shape):
    return np.linalg.qr(np.random.default_rng(0).standard_normal(shape), mode="complete")[0]


def unitary(n):
    rng = np.random.default_rng(1)
    return np.linalg.qr(rng.standard_normal((n, n)) + 1j * rng.standard_normal((n, n)))[0]


def skew(original):
    n, k = original.shape
    x = np.concatenate([np.tril(original), np.zeros((n, n - k))], axis=1)
    return x - x.conj().T


def cayley(original):
    a, one = skew(original) / 2, np.eye(len(original))
    return np.linalg.solve(one - a, one + a)[:, : original.shape[1]]


def expm(original):
    return scipy.linalg.expm(skew(original))[:, : original.shape[1]]


def householder(original):
    n, k = original.shape
    q = np.eye(n)
    for v in (np.tril(original, -1) + np.eye(n, k)).T:
        q = q @ (np.eye(n) - 2 * np.outer(v, v) / (v @ v))
    return q[:, :k] * np.trunc(np.diag(original))


TORCH_MAPS = {"cayley": "cayley", "expm": "matrix_exp", "householder": "householder"}


def with_diagonal(x, diagonal):
    one = np.eye(*x.shape)
    return x * (1 - one) + one * diagonal


ORIGINAL = np.random.default_rng(2).standard_normal((4, 2))
SIGNS = with_diagonal(ORIGINAL, [1, -1])
SQUARE = with_diagonal(np.random.default_rng(3).standard_normal((3, 3)), -1)

ORTHOGONAL = {
    "tall": (expm, ORIGINAL, rotation(4, 4)),
    "no base": (cayley, ORIGINAL, None),
    "square": (cayley, SQUARE, rotation(3, 3)),
    "complex": (cayley, ORIGINAL + 1j * ORIGINAL[::-1], unitary(4)),
    "reflections": (householder, SIGNS, rotation(4, 4)),
    "reflections without a base": (householder, SIGNS, None),
    "turned reflections": (householder, SQUARE, rotation(3, 3)),
}
WIDE = {name: ORTHOGONAL[name] for name in ("tall", "complex")}


def assert_orthogonal_weight(map, state, w):
    """Torch's state gives the weight ``w`` of torch here, and what is moved from there gives the same weight there."""
    p, said = rpx.Orthogonal(map.__name__), {"orthogonal_map": TORCH_MAPS[map.__name__]}
    with jax.enable_x64():
        tree = rpx.io.from_torch(p, state, {"kernel": w.T}, **said)
        np.testing.assert_allclose(fold(p, tree)["kernel"], w.T, rtol=0, atol=1e-13)
        node = tree["kernel"]["@orthogonal"]
        node["x"] = jnp.asarray(node["x"] + np.random.default_rng(4).standard_normal(w.T.shape).astype(w.dtype))
        want, again = np.asarray(fold(p, tree)["kernel"]).T, rpx.io.to_torch(p, tree, **said)
    original, base = again[f"{PATH}original"], again[f"{PATH}0.base"]
    np.testing.assert_allclose(base.conj().T @ base, np.eye(len(base)), rtol=0, atol=1e-13)
    wide = original.shape[0] < original.shape[1]
    np.testing.assert_allclose((base @ map(original.T)).T if wide else base @ map(original), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "name", mostly_thorough(ORTHOGONAL, "tall", "complex", "reflections without a base", "turned reflections")
)
def test_orthogonal_matrices_are_those_of_torch(name):
    map, original, base = ORTHOGONAL[name]
    state = {f"{PATH}original": original} | ({} if base is None else {f"{PATH}0.base": base})
    w = (np.eye(len(original)) if base is None else base) @ map(original)
    assert_orthogonal_weight(map, state, w)


@pytest.mark.parametrize(("map", "original", "base"), WIDE.values(), ids=WIDE)
def test_wide_matrices_are_transposed_as_in_torch(map, original, base):
    assert_orthogonal_weight(map, {f"{PATH}original": original.T, f"{PATH}0.base": base}, (base @ map(original)).T)


@pytest.mark.parametrize("ours", ["cayley", "householder"])
def test_a_matrix_of_another_map_is_the_same_matrix(ours):
    state = {f"{PATH}original": ORIGINAL, f"{PATH}0.base": rotation(4, 4)}
    w = rotation(4, 4) @ expm(ORIGINAL)
    with jax.enable_x64():
        tree = rpx.io.from_torch(rpx.Orthogonal(ours), state, {"kernel": w.T}, orthogonal_map="matrix_exp")
        np.testing.assert_allclose(fold(rpx.Orthogonal(ours), tree)["kernel"], w.T, rtol=0, atol=1e-13)
        tree["kernel"]["@orthogonal"]["x"] = jnp.asarray(ORIGINAL[::-1].T)
        want = np.asarray(fold(rpx.Orthogonal(ours), tree)["kernel"]).T
        again = rpx.io.to_torch(rpx.Orthogonal(ours), tree, orthogonal_map="matrix_exp")
    np.testing.assert_allclose(again[f"{PATH}0.base"] @ expm(again[f"{PATH}original"]), want, rtol=0, atol=1e-13)


def test_a_base_is_written_where_torch_has_one():
    p, said = rpx.Orthogonal("expm"), {"orthogonal_map": "matrix_exp"}
    with jax.enable_x64():
        tree = rpx.io.from_torch(p, {f"{PATH}original": ORIGINAL}, {"kernel": ORIGINAL.T}, **said)
        alone = rpx.io.to_torch(p, tree, style="no_trivialization", **said)
        for like, want in (([f"{PATH}original"], {"original"}), ([f"{PATH}0.base"], {"original", "0.base"})):
            assert {name.removeprefix(PATH) for name in rpx.io.to_torch(p, tree, like=like, **said)} == want
    (original,) = alone.values()
    np.testing.assert_allclose(expm(original), expm(ORIGINAL), rtol=0, atol=1e-13)


@pytest.mark.parametrize("w", [rotation(4, 4)[:2], rotation(3, 3), -rotation(3, 3), np.eye(3)])
def test_reflections_without_a_base_are_those_of_torch(w):
    with jax.enable_x64():
        original = np.asarray(_write_reflections(jnp.asarray(w)))
    got = householder(original.T).T if len(w) < len(w.T) else householder(original)
    np.testing.assert_allclose(got, w, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("axes", "layout", "shares"),
    [
        ({}, "kernel", False),
        ({"rows": 1, "columns": 0}, "kernel", True),
        ({"rows": 0}, "same", True),
        ({"rows": 1}, "same", False),
    ],
)
def test_reflections_of_a_square_matrix_are_shared_unless_torch_has_the_transposed_one(axes, layout, shares):
    p, base = rpx.Orthogonal("householder", **axes), rotation(3, 3)
    state = {f"{PATH}original": SQUARE, f"{PATH}0.base": base}
    w = base @ householder(SQUARE)
    with jax.enable_x64():
        how = {
            "layouts": {"kernel": layout} if layout == "kernel" else {"kernel": "conv1d"},
            "orthogonal_map": "householder",
        }
        node = rpx.io.from_torch(p, state, {"kernel": w}, **how)["kernel"]["@orthogonal"]
    x, start = (base @ np.tril(SQUARE, -1), base) if shares else (np.zeros((3, 3)), w.T)
    np.testing.assert_allclose(node["x"], x, rtol=0, atol=1e-13)
    np.testing.assert_allclose(node["@fixed"]["base"], start, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "dtype", "said", "want"),
    [
        ((3, 3), "float32", None, "expm"),
        ((3, 2), "float32", None, "householder"),
        ((3, 3, 2), "float32", "default", "householder"),
        ((2, 3, 3), "float32", "default", "expm"),
        ((3, 2), "complex64", None, "expm"),
        ((3, 3), "float32", "householder", "householder"),
        ((3, 2), "float32", "matrix_exp", "expm"),
        ((3, 2), "float32", "cayley", "cayley"),
    ],
)
def test_torch_has_a_map_by_default(shape, dtype, said, want):
    assert _torch_map(Entry("w", "w", shape, np.dtype(dtype), "same", orthogonal_map=said)) == want


@pytest.mark.parametrize(
    ("map", "said", "shape", "place", "known"),
    [
        ("householder", None, (4, 2), (3, 0), True),
        ("expm", None, (4, 2), (3, 0), False),
        ("expm", "default", (4, 2), (3, 0), True),
        ("expm", None, (4, 2), (0, 1), True),  # above the diagonal, where torch reads nothing
        ("expm", None, (4, 2), (1, 1), True),
        ("expm", None, (2, 4), (0, 3), False),
        ("expm", None, (2, 4), (1, 0), True),
        ("cayley", None, (3, 3), (1, 0), False),
    ],
)
def test_a_map_must_be_known_once_a_matrix_has_left_its_base(map, said, shape, place, known):
    original = np.zeros(shape, np.float32)
    original[place] = 1
    entry = Entry("w", "w", shape, np.float32, "same", orthogonal_map=said)
    refused = pytest.raises(ValueError, match="a state dict does not record the map of torch's `orthogonal`")
    with nullcontext() if known else refused:
        _require_known_map(rpx.Orthogonal(map), jnp.asarray(original), entry)


@pytest.mark.parametrize("map", [cayley, householder])
def test_batches_of_matrices_are_those_of_torch(map):
    bases, originals = (np.stack([rotation(4, 4), -rotation(4, 4)]), np.stack([SIGNS, with_diagonal(-ORIGINAL, -1)]))
    p, state = rpx.Orthogonal(map.__name__, stacked=0), {f"{PATH}original": originals, f"{PATH}0.base": bases}
    w = np.stack([base @ map(original) for base, original in zip(bases, originals, strict=True)])
    options = {"layouts": {"weight": "same"}, "orthogonal_map": TORCH_MAPS[map.__name__]}
    with jax.enable_x64():
        tree = rpx.io.from_torch(p, state, {"weight": w}, **options)
        np.testing.assert_allclose(fold(p, tree)["weight"], w, rtol=0, atol=1e-13)
        again = rpx.io.to_torch(p, tree, **options)
    got = [again[f"{PATH}0.base"][i] @ map(again[f"{PATH}original"][i]) for i in range(2)]
    np.testing.assert_allclose(got, w, rtol=0, atol=1e-13)


# ---- files, trees and dtypes


def test_a_file_is_read_and_written_without_torch(tmp_path):
    p, model = rpx.WeightNorm() >> rpx.VarNoise(0.1), {"dense": {"kernel": W.T, "bias": numbers(3)}}
    tree = init(p, model)
    safetensors.numpy.save_file(rpx.io.to_torch(p, tree), tmp_path / "model.safetensors")
    state = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_allclose(
        state["dense.parametrizations.weight.original0"], np.linalg.norm(W, axis=1, keepdims=True), rtol=1e-6
    )
    identical(rpx.io.from_torch(p, state, model), tree)


def test_half_precision_is_that_of_torch_in_files(tmp_path):
    p, model = rpx.WeightNorm(), {"dense": {"kernel": jnp.asarray(W.T, jnp.bfloat16)}}
    safetensors.numpy.save_file(rpx.io.to_torch(p, init(p, model)), tmp_path / "model.safetensors")
    state = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert {str(x.dtype) for x in state.values()} == {"bfloat16"}
    got = rpx.io.from_torch(p, state, model)["dense"]["kernel"]["@weight_norm"]
    assert (got["g"].dtype, got["v"].dtype) == (jnp.float32, jnp.bfloat16)
    lengths = np.linalg.norm(W, axis=1)[None]
    np.testing.assert_array_equal(got["g"], lengths.astype(jnp.bfloat16).astype(np.float32))


def test_a_raw_tree_shares_no_memory_with_the_state_dict():
    buffer = np.ones(32, np.float32)
    start = -buffer.ctypes.data % 64 // 4  # arrays that begin there, JAX takes as they are
    state = {"dense.weight": buffer[start : start + 16]}
    got = rpx.io.from_torch(rpx.Chain(), state, {"dense": {"weight": np.ones(16, np.float32)}})
    buffer[:] = 0
    assert np.all(got["dense"]["weight"] == 1)


def test_modules_of_equinox_and_states_of_nnx_are_read():
    state = {"weight_g": G, "weight_v": W, "bias": numbers(3)}
    w = G * W / np.linalg.norm(W, axis=1, keepdims=True)
    model = eqx.filter_eval_shape(eqx.nn.Linear, 2, 3, key=jax.random.key(0))
    read = rpx.WeightNorm(axis=0).fold(rpx.io.from_torch(rpx.WeightNorm(axis=0), state, model))
    np.testing.assert_allclose(read(jnp.ones(2)), w.sum(1) + state["bias"], rtol=1e-6)
    params = nnx.state(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))), nnx.Param)
    got = rpx.WeightNorm().fold(rpx.io.from_torch(rpx.WeightNorm(), state, params))
    np.testing.assert_allclose(got["kernel"][...], w.T, rtol=1e-6)


def test_recurrent_cells_go_through_convert():
    like = {
        "lstm": {"weight_ih": numbers(8, 3), "weight_hh": numbers(8, 2), "bias_ih": numbers(8), "bias_hh": numbers(8)}
    }
    p = rpx.WeightNorm(axis=0, where="lstm/weight_hh")
    state = {f"lstm.{name}_l0": x for name, x in like["lstm"].items() if name != "weight_hh"}
    state |= {"lstm.weight_hh_l0_g": numbers(8, 1), "lstm.weight_hh_l0_v": numbers(8, 2)}
    effective = p.fold(rpx.io.from_torch(p, state, like, names={"lstm/(.*)": r"lstm.\1_l0"}))
    cell = rpx.shared.convert(effective["lstm"], "torch.lstm", "flax.lstm")
    v = numbers(8, 2) / np.linalg.norm(numbers(8, 2), axis=1, keepdims=True) * numbers(8, 1)
    np.testing.assert_allclose(cell["hf"]["kernel"], v[2:4].T, rtol=1e-6)


TIE = rpx.Tie({"out/kernel": ("embed/embedding", jnp.transpose)})
TIED = {"embed": {"embedding": W}, "out": {"kernel": W.T}}


def test_tied_parameters_are_written_twice_as_torch_does():
    identical(rpx.io.to_torch(TIE, TIE.init(TIED)), {"embed.weight": W, "out.weight": W})


@pytest.mark.parametrize("state", [{"embed.weight": W, "out.weight": W}, {"embed.weight": W}], ids=["twice", "once"])
def test_tied_parameters_are_read_where_they_stand_once_or_twice(state):
    identical(rpx.io.from_torch(TIE, state, TIED), TIE.init(TIED))


# ---- errors

NORM, MODEL_LIKE = rpx.WeightNorm(), {"dense": {"kernel": W.T, "bias": numbers(3)}}
STATE = {"dense.weight_g": G, "dense.weight_v": W, "dense.bias": numbers(3)}
LISTED = {f"dense.{PATH}original0": G, f"dense.{PATH}original1": W}
CONV = {"conv": {"kernel": numbers(2, 2, 3, 4)}}
UP, TRANSPOSED = {"up": {"kernel": numbers(4, 8, 6)}}, {"up/kernel": "conv_transpose"}
CONVOLVED = rpx.SpectralNorm(columns=-1, input_shape=(4, 4))
CUBE = {"w": np.ones((3, 3, 2), np.float32)}


def without(name):
    return {each: x for each, x in STATE.items() if each != name}


LOW = rpx.LowRank(1)


def lost_signs():
    state = {f"{PATH}original": 0.5 * SIGNS, f"{PATH}0.base": rotation(4, 4)}
    with jax.enable_x64():
        rpx.io.from_torch(rpx.Orthogonal("householder"), state, {"kernel": ORIGINAL.T})


@table(__file__)
def test_what_has_no_place_in_torch_is_refused(case):
    case.check(globals(), zeros=zeros)
