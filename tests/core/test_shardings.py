"""Shardings of raw trees and of optimizer states, against specs written by hand and those that JAX itself finds."""

import math
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, OF_EACH_CLASS, OF_OTHER_CASES
from compiled import effective, init
from errors import table
from grids import mostly_thorough
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from one_array import normal

import reparax as rpx
from reparax.core.shardings import _count_parts

MESH = AbstractMesh((2, 4), ("data", "model"))


def shapes(**arrays):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in arrays.items()}


def specs(tree):
    return jax.tree.map(lambda sharding: sharding.spec, tree)


def found(p, spec, shape, **others):
    """The specs of the raw values of ``w``, beside parameters that lie whole on every device."""
    given = {"w": spec, **dict.fromkeys(others, P())}
    return specs(p.shardings(given, MESH, like=shapes(w=shape, **others)))["w"]


# By hand. ---------------------------------------------------------------------------------------------------------

BOTH, ROWS = P("data", "model"), P(("data", "model"))
SPEC = repr(P()).removesuffix("()")  # P, and PartitionSpec in older versions of JAX


@pytest.mark.parametrize(
    ("p", "spec", "shape", "expected"),
    [
        (rpx.VarNoise(0.1), BOTH, (8, 16), BOTH),
        (rpx.VarNoise(0.1), P("data"), (8, 16), P("data", None)),
        (rpx.WeightNorm(), BOTH, (8, 16), {"@weight_norm": {"g": P(None, "model"), "v": BOTH}}),
        (rpx.WeightNorm(axis=0), BOTH, (8, 8), {"@weight_norm": {"g": P("data", None), "v": BOTH}}),
        (rpx.WeightNorm(), ROWS, (8, 8), {"@weight_norm": {"g": P(None, None), "v": P(("data", "model"), None)}}),
        (rpx.LowRank(4), BOTH, (8, 16), {"@low_rank": {"u": P("data", None), "v": P(None, "model")}}),
        (rpx.LowRank(8), BOTH, (8, 8), {"@low_rank": {"u": P("data", None), "v": P(None, "model")}}),
        (
            rpx.SpectralNorm(),
            BOTH,
            (8, 8),
            {"@spectral_norm": {"@fixed": {"u": P("model"), "v": P("data")}, "w": BOTH}},
        ),
        (
            rpx.SpectralNorm(columns=-1),
            P(None, "data", "model"),
            (3, 8, 16),
            {"@spectral_norm": {"@fixed": {"u": P("model"), "v": P(None)}, "w": P(None, "data", "model")}},
        ),
        (
            rpx.matrices.SpecialOrthogonal(),
            BOTH,
            (8, 8),
            {"@special_orthogonal": {"@fixed": {"base": BOTH}, "x": BOTH}},
        ),
        (rpx.matrices.Symmetric(), BOTH, (8, 8), {"@symmetric": {"x": P(None)}}),
        (rpx.matrices.BlockDiagonal(4), BOTH, (8, 16), {"@block_diagonal": {"x": P(None, "data", "model")}}),
        (rpx.matrices.BlockDiagonal(4), P("model", "data"), (8, 16), {"@block_diagonal": {"x": P(None, None, "data")}}),
        (
            rpx.matrices.Fibration(jnp.transpose, jnp.transpose),
            BOTH,
            (8, 16),
            {"@fibration": {"x": P("model", "data")}},
        ),
        (
            rpx.WeightNorm() >> rpx.LowRank(2),
            BOTH,
            (8, 16),
            {
                "@low_rank": {
                    "u": {"@weight_norm": {"g": P(None, None), "v": P("data", None)}},
                    "v": {"@weight_norm": {"g": P(None, "model"), "v": P(None, "model")}},
                }
            },
        ),
        (
            rpx.shared.Pack({"w": rpx.shared.Concat(("l: n h", "r: n h"), axis=1)}),
            BOTH,
            (8, 16),
            {"@pack": {"l": BOTH, "r": BOTH}},
        ),
    ],
    ids=str,
)
def test_an_axis_is_cut_as_the_one_that_it_follows(p, spec, shape, expected):
    assert found(p, spec, shape) == expected


def test_equal_lengths_of_other_arrays_do_not_matter():
    p = rpx.Orthogonal(where="q") >> rpx.SpectralNorm(where="w")
    expected = {"@spectral_norm": {"@fixed": {"u": P("model"), "v": P("data")}, "w": BOTH}}
    assert found(p, BOTH, (8, 16), q=(16, 16), b=(8,), s=()) == expected


def test_lengths_that_only_change_together_do_not_make_a_rank_follow_an_axis():
    p = rpx.matrices.SpecialOrthogonal(where="q") >> rpx.LowRank(8, where="w")
    assert found(p, BOTH, (8, 8), q=(8, 8)) == {"@low_rank": {"u": P("data", None), "v": P(None, "model")}}


def test_the_smaller_of_two_lengths_stays_the_smaller():
    values = found(rpx.matrices.AlmostOrthogonal(), BOTH, (8, 12))["@almost_orthogonal"]
    assert {name: values[name] for name in "usv"} == {"u": P("data", None), "s": P("data"), "v": P("model", "data")}


def test_a_tied_place_has_no_sharding_and_its_source_keeps_its_own():
    p = rpx.Tie({"out": ("embed", jnp.transpose)})
    raw = p.shardings({"embed": P("model"), "out": P(None, "model")}, MESH, like=shapes(embed=(16, 8), out=(8, 16)))
    assert specs(raw) == {"embed": P("model", None), "out": {"@tie": {}}}


def test_lengths_that_a_stage_is_told_are_known_by_their_numbers():
    p = rpx.shared.Split({"block": rpx.shared.Concat(("wi: 4 16", "wh: 7 16", "b: 16 -> 1 16"))})
    like = shapes(wi=(4, 16), wh=(7, 16), b=(16,))
    raw = p.shardings({"wi": BOTH, "wh": P(None, "model"), "b": P("model")}, MESH, like=like)
    assert specs(raw)["wi"] == {"@split": {"block": P(None, "model")}}


def test_a_stage_may_refuse_other_lengths_in_its_own_way():
    class Four(rpx.Reparametrization):
        def init_leaf(self, w):
            assert w.shape[0] == 4
            return {"x": w}

        def apply_leaf(self, values):
            return values["x"]

    assert specs(Four().shardings({"w": BOTH}, MESH, like=shapes(w=(4, 16)))) == {"w": {"@four": {"x": BOTH}}}


def test_lengths_that_depend_on_each_other_are_found_across_one_that_does_not():
    class TwiceAsLong(rpx.Reparametrization):
        """Its first axis is twice as long as its last."""

        raw_values = {"turned": rpx.stage.main()}

        def init_leaf(self, w):
            assert w.shape[0] == 2 * w.shape[2]
            return {"turned": w.T, "thrice": jnp.concatenate([w, w, w], 2)}

        def apply_leaf(self, values):
            return values["turned"].T

    expected = {"@twice_as_long": {"turned": P("model", None, "data"), "thrice": P("data", None, "model")}}
    assert found(TwiceAsLong(), P("data", None, "model"), (8, 6, 4)) == expected


def test_arrays_that_lie_on_a_mesh_say_their_specs():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, BOTH)
    expected = {"w": {"@weight_norm": {"g": NamedSharding(mesh, P(None, "model")), "v": sharding}}}
    assert rpx.WeightNorm().shardings({"w": jax.device_put(jnp.ones((8, 16)), sharding)}, mesh) == expected
    abstract = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)}
    assert rpx.WeightNorm().shardings(abstract, mesh) == expected
    assert rpx.WeightNorm().shardings({"w": sharding}, mesh, like=shapes(w=(8, 16))) == expected


def test_an_explicit_mesh_is_no_hindrance_to_stages_that_do_not_pass_there():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    params = {"w": jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, BOTH))}
    values = specs(rpx.LowRank(2).shardings(params, mesh))["w"]["@low_rank"]
    assert values == {"u": P("data", None), "v": P(None, "model")}


def test_what_is_no_array_has_no_sharding():
    raw = rpx.WeightNorm().shardings({"w": BOTH, "f": None}, MESH, like={"w": jnp.ones((8, 16)), "f": jnp.tanh})
    assert (raw["f"], specs(raw["w"])) == (None, {"@weight_norm": {"g": P(None, "model"), "v": BOTH}})


def test_fixed_values_may_lie_in_another_memory():
    raw = rpx.SpectralNorm().shardings({"w": BOTH, "b": P()}, MESH, shapes(w=(8, 8), b=(8,)), memory_kind="pinned_host")
    held = raw["w"]["@spectral_norm"]
    kinds = [x.memory_kind for x in (held["@fixed"]["u"], held["@fixed"]["v"], held["w"], raw["b"])]
    assert kinds == ["pinned_host", "pinned_host", None, None]


def test_a_tree_may_be_a_single_array_or_hold_none():
    one = rpx.VarNoise(0.1).shardings(P("data"), MESH, like=jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert one.spec == P("data", None)
    assert rpx.Chain().shardings({"f": None}, MESH, like={"f": jnp.tanh}) == {"f": None}


@pytest.mark.parametrize(
    ("entry", "parts"), [(None, 1), ("data", 2), ("model", 4), (("data", "model"), 8), (("model",), 4), ((), 1)]
)
def test_an_entry_cuts_an_axis_into_as_many_parts_as_its_mesh_axes_have(entry, parts):
    assert _count_parts(entry, MESH) == parts


# Against JAX. -----------------------------------------------------------------------------------------------------

# Each of these stages passes with explicit axes, where JAX itself carries shardings from operation to operation.
ON_EXPLICIT_MESHES = [
    "weight norm",
    "weight norm of other axes",
    "positive",
    "spheres and balls",
    "freeze >> weight norm",
    "weight norm twice",
    "weight norm >> tie",
]


@pytest.mark.parametrize("name", ON_EXPLICIT_MESHES)
def test_shardings_are_those_that_jax_finds_on_an_explicit_mesh(name):
    p, params = CASES[name][0], jax.eval_shape(CASES[name][1])
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    given = jax.tree.map(lambda w: NamedSharding(mesh, P(*("a", "b", None, None)[: w.ndim])), params)
    on_mesh = jax.tree.map(lambda w, s: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=s), params, given)
    wanted = jax.tree.map(lambda x: x.sharding.spec, jax.eval_shape(p.init, on_mesh, jax.random.key(0)))
    assert specs(p.shardings(given, mesh, like=params)) == wanted


def placed(types, shardings):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), types, shardings)


def on_mesh(name, axes=AxisType.Explicit):
    """A chain and its parameters, the mesh on which they are cut as far as it goes, and shardings of both."""
    p, params = CASES[name][0], jax.eval_shape(CASES[name][1])
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axes,) * 2)

    def cut(w):
        left, entries = dict(mesh.shape), list[str | None]()
        for n in w.shape:
            entries.append(next((axis for axis, parts in left.items() if n % parts == 0), None))
            left.pop(entries[-1], None)
        return NamedSharding(mesh, P(*entries))

    given = jax.tree.map(cut, params)
    return p, params, mesh, given, p.shardings(given, mesh, like=params)


def slope(f, raw, key):
    """The gradient of the sum of what ``f`` gives, by the trainable values."""
    free, fixed = rpx.partition(raw)

    def total(free):
        effective = jax.tree.leaves(f(rpx.combine(free, fixed), key))
        return sum(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in effective)

    return jax.grad(total)(free)


def types_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


# The stages whose formulas JAX refuses where axes are explicit, such as a product over an axis that is split.
ASK_FOR_AUTOMATIC_AXES = {
    "init": {
        *("low rank", "spectral norm", "maps of numbers", "joint norm", "rows and columns", "orthogonal", "definite"),
        *("spectra and patterns", "singular values", "linear spaces", "adapters", "differences", "slices", "split"),
    },
    "apply": {
        *("spectral norm", "joint norm", "rows and columns", "orthogonal", "singular values", "linear spaces"),
        *("definite", "rotated", "rotated alike", "slices", "pack"),
    },
    "update": {"spectral norm"},
}
OF_ONE_CASE = [name for name in CASES if name not in OF_OTHER_CASES]
# Those that select among weights, masks and numbers of their own.
SELECTING = ["masks", "prunings", "regrown masks", "standardization with a gain"]


@pytest.mark.parametrize("name", mostly_thorough(OF_ONE_CASE, *SELECTING, "spectral norm"))
def test_every_stage_runs_on_an_explicit_mesh_or_says_how(name):
    p, params, mesh, given, shardings = on_mesh(name)
    types, key = jax.eval_shape(p.init, params, jax.random.key(0)), jax.random.key(0)
    raw, weights = placed(types, shardings), placed(params, given)
    calls = {
        "init": (p.init, (weights, key), shardings, types),
        "apply": (p.apply, (raw, key), given, jax.eval_shape(p.apply, types, key)),
        "update": (p.update, (raw, key, weights), shardings, types),
    }
    with jax.set_mesh(mesh):
        for verb, (f, args, out, wanted) in calls.items():
            if name in ASK_FOR_AUTOMATIC_AXES[verb]:
                with pytest.raises(ValueError, match="auto_axes"):
                    jax.eval_shape(f, *args)
                f = jax.sharding.auto_axes(f, out_sharding=out)
            assert types_of(jax.eval_shape(f, *args)) == types_of(wanted)
            if verb == "apply":
                assert types_of(jax.eval_shape(partial(slope, f), raw, key)) == types_of(rpx.partition(types)[0])


# Where axes are automatic, XLA says where numbers lie; these draw, choose, update or move numbers to other places.
AUTOMATIC = ("noise", "dropout of rows and of blocks", "regrown masks", "spectral norm", "orthogonal", "stored", "pack")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "axes"),
    [(name, AxisType.Explicit) for name in OF_EACH_CLASS] + [(name, AxisType.Auto) for name in AUTOMATIC],
)
def test_values_on_a_mesh_are_those_of_one_device(name, axes):
    p, _, mesh, given, shardings = on_mesh(name, axes)
    params, key = jax.jit(CASES[name][1])(), jax.random.key(0)

    def values(init, apply, update, params, put=lambda raw: raw):
        raw = put(init(params, key))
        return raw, apply(raw, key), update(raw, jax.random.key(1), params), slope(apply, raw, key)

    def on_axes(verb, out):
        """The verb as its error says to run it on this mesh."""
        needs_auto = axes is AxisType.Explicit and name in ASK_FOR_AUTOMATIC_AXES[verb]
        return jax.sharding.auto_axes(getattr(p, verb), out_sharding=out) if needs_auto else getattr(p, verb)

    wanted = jax.jit(partial(values, p.init, p.apply, p.update))(params)
    with jax.set_mesh(mesh):
        verbs = on_axes("init", shardings), on_axes("apply", given), on_axes("update", shardings)
        outs = shardings, given, shardings, rpx.partition(shardings)[0]
        placed = {"put": lambda raw: jax.tree.map(jax.sharding.reshard, raw, shardings)}
        on_devices = partial(values, *verbs, **placed if axes is AxisType.Explicit else {})
        got = jax.jit(on_devices, out_shardings=outs)(jax.device_put(params, given))
    chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-5)


# Errors. ----------------------------------------------------------------------------------------------------------


def refused(specs, like):
    """What is said of specs for the parameters of a norm."""
    rpx.WeightNorm().shardings(specs, MESH, like=like)


def on_explicit_axes(p):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    w = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, BOTH))
    jax.eval_shape(p.init, {"w": w})


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case._replace(said=case.said.replace(": P(", f": {SPEC}(")).check(globals())


# What travels between devices, and between a host and its devices. -------------------------------------------------

WIDTH, LAYERS = 128, 3
ONES = np.ones((64, WIDTH), np.float32)


def base():
    return {f"layer_{i}": {"kernel": normal(WIDTH, WIDTH, seed=i, scale=1 / 12)} for i in range(LAYERS)}


def error(w, x):
    for layer in w.values():
        x = jnp.tanh(x @ layer["kernel"])
    return jnp.mean(x**2)


def gathered(text):
    """The bytes of all all-gathers in a compiled program, for each weight."""
    size = {"f32": 4, "bf16": 2, "s8": 1, "u8": 1}
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text)
    assert len(found) == text.count(" all-gather(")
    return sum(size[kind] * math.prod(map(int, shape.split(","))) for kind, shape in found) / (LAYERS * WIDTH**2)


def stored_on(mesh, p):
    """A raw tree whose weights are cut into eight parts, and how a step moves it to where products read it."""
    cut, whole = (jax.tree.map(lambda w, spec=spec: spec, base()) for spec in (P("data", None), P()))
    raw = jax.device_put(init(p, base(), jax.random.key(0)), p.shardings(cut, mesh, like=base()))
    here, used = (p.shardings(specs, mesh, like=base()) for specs in (cut, whole))
    return raw, lambda raw: jax.lax.with_sharding_constraint(jax.device_put(raw, here), used)


def step_of(p, moved):
    """The gradient of what trains; the raw tree moves as it is stored."""

    @jax.jit
    def step(free, fixed, x):
        def loss(free):
            return rpx.factored(lambda raw: error(p.apply(raw), x))(moved(rpx.combine(free, fixed)))

        return jax.value_and_grad(loss)(free)

    return step


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("format", "bits"),
    [("nf4", 4), *(pytest.param(*each, marks=pytest.mark.thorough) for each in (("int8", 8), ("int3", 3)))],
)
def test_codes_are_gathered_and_not_the_numbers_that_they_stand_for(format, bits):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    p = rpx.Quantized(format, axis=-1) >> rpx.LoRA(1)
    raw, moved = stored_on(mesh, p)
    x = jax.device_put(ONES, NamedSharding(mesh, P("data")))
    compiled = step_of(p, moved).lower(*rpx.partition(raw), x).compile()
    factors = 4 / WIDTH  # of LoRA, whose columns are whole on each device
    assert gathered(compiled.as_text()) == bits / 8 + factors
    plain = jax.jit(lambda raw, x: error(p.apply(raw), x)).lower(raw, x).compile()
    assert gathered(plain.as_text()) >= 4  # what a network gathers by itself
    want = jax.jit(error)(effective(p, init(p, base(), jax.random.key(0))), ONES)
    np.testing.assert_allclose(compiled(*rpx.partition(raw), x)[0], want, rtol=1e-5)
