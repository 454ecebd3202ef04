"""Boxes of flax in raw trees: each value has the names of its own axes, and the model gets back the boxes it had."""

import pickle

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import effective, fold, init
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reparax as rpx
from reparax.core import boxes
from reparax.core.raw import state_flags

KERNEL = jnp.asarray(np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4), np.float32)
ONES = jnp.asarray(np.ones(4, np.float32), np.float32)
CHAIN = rpx.WeightNorm() >> rpx.VarNoise(0.1)


def partitioned(w=KERNEL, names=("embed", "mlp")):
    return {"kernel": nn.Partitioned(w, names), "bias": nn.Partitioned(ONES, ("mlp",)), "scale": ONES}


def logical(w=KERNEL, names=("embed", "mlp")):
    rules = (("embed", "data"), ("mlp", "model"))
    return {"kernel": nn.LogicallyPartitioned(w, names, rules=rules)}


def named_of(p, params=None):
    """The specs that flax reads from the raw values of the kernel."""
    return nn.get_partition_spec(jax.eval_shape(p.init, partitioned() if params is None else params))["kernel"]


# Linen. -----------------------------------------------------------------------------------------------------------


def test_boxes_that_someone_made_anew_hold_values_too_and_the_model_gets_plain_arrays(key):
    raw = init(CHAIN, partitioned())
    is_box = nn.meta.AxisMetadata
    anew = jax.tree.map(
        lambda x: nn.Partitioned(x.value, tuple(x.names)) if isinstance(x, is_box) else x,
        raw,
        is_leaf=lambda x: isinstance(x, is_box),
    )
    got = CHAIN.apply(anew, key)  # without jit, for which boxes with equal names are the same
    np.testing.assert_allclose(got["kernel"], CHAIN.apply(raw, key)["kernel"].value, rtol=1e-5, atol=1e-6)
    assert got["bias"].names == ("mlp",)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (rpx.VarNoise(0.1), P("embed", "mlp")),
        (rpx.WeightNorm(), {"@weight_norm": {"g": P(None, "mlp"), "v": P("embed", "mlp")}}),
        (rpx.WeightNorm(axis=0), {"@weight_norm": {"g": P("embed", None), "v": P("embed", "mlp")}}),
        (
            rpx.WeightNorm() >> rpx.LowRank(2),
            {
                "@low_rank": {
                    "u": {"@weight_norm": {"g": P(None, None), "v": P("embed", None)}},
                    "v": {"@weight_norm": {"g": P(None, "mlp"), "v": P(None, "mlp")}},
                }
            },
        ),
        (rpx.SpectralNorm(), {"@spectral_norm": {"@fixed": {"u": P("mlp"), "v": P("embed")}, "w": P("embed", "mlp")}}),
    ],
    ids=repr,
)
def test_linen_reads_the_names_of_each_value(p, expected):
    assert named_of(p) == expected


def test_names_are_also_several_axes_of_a_mesh_and_trailing_ones_may_be_left_out():
    assert named_of(rpx.LowRank(2), partitioned(names=(("data", "model"),))) == {
        "@low_rank": {"u": P(("data", "model"), None), "v": P(None, None)}
    }


@pytest.mark.parametrize("params", [partitioned, logical])
def test_the_model_gets_the_boxes_it_had(params, key):
    square = jnp.asarray(np.eye(4, dtype=np.float32) + np.float32(0.5))
    p = rpx.matrices.Symmetric() >> rpx.VarNoise(0.1)  # of the free numbers no axis follows any
    raw = init(p, params(square))
    assert raw["kernel"]["@symmetric"]["x"].names == (None,)
    got = effective(p, raw, key)
    assert jax.tree.structure(got) == jax.tree.structure(params(square))
    plain = effective(p, init(p, {"kernel": square}), key)
    np.testing.assert_array_equal(got["kernel"].value, plain["kernel"])


def test_values_and_draws_are_those_without_boxes(key):
    boxed, plain = init(CHAIN, partitioned()), init(CHAIN, nn.unbox(partitioned()))
    got = nn.unbox((boxed, effective(CHAIN, boxed, key)))
    chex.assert_trees_all_equal(got, (plain, effective(CHAIN, plain, key)))


def test_update_and_rebase_keep_the_boxes():
    p = rpx.SpectralNorm(where="kernel") >> rpx.Orthogonal(where="other")
    params = {**partitioned(), "other": nn.Partitioned(np.eye(3, dtype=np.float32), ("x", "y"))}
    raw, update = init(p, params), jax.jit(p.update)
    for after in (update(raw), jax.jit(p.update_base)(raw)):
        assert jax.tree.structure(after) == jax.tree.structure(raw)
    u = update(raw)["kernel"]["@spectral_norm"]["@fixed"]["u"]
    np.testing.assert_array_equal(u.value, update(nn.unbox(raw))["kernel"]["@spectral_norm"]["@fixed"]["u"])


def test_a_tied_place_keeps_its_box():
    params = {"in": nn.Partitioned(KERNEL, ("vocab", "embed")), "out": nn.Partitioned(KERNEL.T, ("embed", "vocab"))}
    p = rpx.WeightNorm(axis=-1) >> rpx.Tie({"out": ("in", jnp.transpose)})
    raw = p.init(params)
    assert nn.get_partition_spec(raw["in"]) == {"@weight_norm": {"g": P(None, "embed"), "v": P("vocab", "embed")}}
    assert jax.tree.structure(jax.eval_shape(p.apply, raw)) == jax.tree.structure(params)


def test_boxes_survive_transforms_optimizers_and_pickle():
    raw = init(CHAIN, partitioned())
    tx = optax.adam(1e-3)
    for tree in (raw, pickle.loads(pickle.dumps(raw)), jax.tree.map(jnp.negative, raw), tx.init(raw)[0].mu):
        assert jax.tree.structure(tree) == jax.tree.structure(CHAIN.init(partitioned()))
        assert nn.get_partition_spec(tree)["kernel"] == {"@weight_norm": {"g": P(None, "mlp"), "v": P("embed", "mlp")}}
    CHAIN.check(raw, like=partitioned())


def test_boxes_of_two_models_are_told_apart_by_what_the_parameter_names():
    p, square = rpx.matrices.Symmetric(where="kernel"), np.eye(4, dtype=np.float32)
    for names in (("a", "b"), ("c", "d")):  # the free numbers have no names in either
        assert fold(p, init(p, partitioned(square, names)))["kernel"].names == names


def test_under_vmap_where_names_are_too_many_no_axis_has_a_wrong_one():
    stacked = partitioned(jnp.stack([KERNEL, KERNEL]), ("layers", "embed", "mlp"))["kernel"]
    p = rpx.WeightNorm(axis=-1)
    raw = jax.vmap(p.init)(stacked)
    assert nn.get_partition_spec(raw) == {"@weight_norm": {"g": P(None, None), "v": P(None, None)}}
    assert jax.tree.structure(jax.vmap(p.fold)(raw)) == jax.tree.structure(stacked)


def test_a_raw_tree_without_its_boxes_gives_plain_arrays():
    raw = nn.unbox(CHAIN.init(partitioned()))
    assert jax.tree.structure(CHAIN.fold(raw)) == jax.tree.structure(nn.unbox(partitioned()))


def test_specs_of_boxes_give_shardings_in_the_structure_of_the_raw_tree():
    mesh = AbstractMesh((2, 4), ("embed", "mlp"))
    specs = nn.get_partition_spec(partitioned())
    shardings = CHAIN.shardings(specs, mesh, like=partitioned())
    assert jax.tree.structure(shardings) == jax.tree.structure(CHAIN.init(partitioned()))
    assert nn.unbox(shardings)["kernel"]["@weight_norm"]["g"] == NamedSharding(mesh, P(None, "mlp"))


# Nnx. -------------------------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        self.linear = nnx.Linear(8, 4, rngs=rngs, kernel_init=init)

    def __call__(self, x):
        return self.linear(x)


@pytest.fixture(scope="module")
def layer():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        return Layer(nnx.Rngs(0)), mesh


def test_nnx_reads_the_names_of_each_value(layer):
    graph, params = nnx.split(layer[0])
    raw = init(CHAIN, params)
    values = nnx.get_partition_spec(raw)["linear"]["kernel"]["@weight_norm"]
    specs = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, P))
    assert specs == [P(None, "model"), P("data", "model")]  # of g and v
    shardings = nnx.get_named_sharding(raw, layer[1])
    assert jax.tree.structure(jax.device_put(raw, shardings)) == jax.tree.structure(raw)
    folded = fold(CHAIN, raw)
    assert jax.tree.structure(folded) == jax.tree.structure(params)
    x = np.ones((2, 8), np.float32)
    np.testing.assert_allclose(nnx.merge(graph, folded)(x), layer[0](x), rtol=1e-5, atol=1e-6)


def test_a_variable_that_occurs_twice_is_refused():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^The tree holds the same nnx variable at '0/kernel' and '1', and the two "):
        rpx.WeightNorm().init([model, model.kernel])
    box = nn.Partitioned(KERNEL, ("a", "b"))
    assert jax.tree.structure(rpx.VarNoise(0.0).apply([box, box], jax.random.key(0))) == jax.tree.structure([box, box])


class Held(nnx.Variable):
    """A variable that says that it holds a value of a parameter, as those of wrapped models do."""

    holds_parameter = True


def test_each_array_in_a_variable_of_several_is_its_state():
    tree = {"all": nnx.Param({"a": ONES}), "seen": nnx.BatchStat({"a": ONES, "b": ONES}), "w": ONES, "x": Held(ONES)}
    assert state_flags(tree) == [False, True, True, False, False]


# Functions. -------------------------------------------------------------------------------------------------------


def raw_names(names, of_parameter):
    found = boxes.RawAxisNames(names)
    found.of_parameter = of_parameter
    return found


def test_names_of_raw_values_are_equal_if_those_of_the_parameter_are_too():
    one = raw_names((None,), ("a", "b"))
    assert one == raw_names((None,), ("a", "b"))
    assert one != raw_names((None,), ("a", "c"))
    assert one != raw_names(("a",), ("a", "b"))
    assert one == (None,) != ("a",)
    assert hash(one) == hash((None,))


@pytest.mark.parametrize(
    ("x", "is_of_one"),
    [
        (nnx.Param(ONES), True),
        (nn.Partitioned(ONES, ("a",)), True),
        (nnx.Param({"@weight_norm": {"g": ONES, "v": ONES}}), True),
        (nnx.Param({"a": ONES, "@b": ONES}), True),
        (nnx.Param({"a": ONES}), False),
        (nnx.Param((ONES, ONES)), False),
        (nnx.Param(()), False),
        (ONES, False),
        ({"@weight_norm": ONES}, False),
    ],
)
def test_a_box_of_one_array_is_told_from_a_box_of_a_tree(x, is_of_one):
    assert boxes.is_box_of_one(x) is is_of_one


def test_boxes_with_names_and_variables_without_move_to_the_values():
    named, unnamed = nn.Partitioned(ONES, ("a",)), nn.Partitioned(ONES, None)
    flags = [boxes.is_moved_to_values(x) for x in (named, unnamed, nnx.Param(ONES), ONES)]
    assert flags == [True, False, True, False]
    assert [boxes.is_unnamed_variable(x) for x in (named, nnx.Param(ONES))] == [False, True]
    assert boxes.axis_entries(named) == ("a",)
    assert boxes.axis_entries(unnamed) is None


def test_a_box_gets_a_value_and_names_of_its_own_kind():
    named, variable = nn.Partitioned(ONES, ("a",)), nnx.Param(ONES)
    other = boxes.with_value(named, KERNEL, ("b", "c"))
    assert (type(other), other.value is KERNEL, other.names) == (nn.Partitioned, True, ("b", "c"))
    assert boxes.with_value(named, KERNEL).names == ("a",)
    turned = boxes.with_value(variable, KERNEL, ("b", "c"))
    assert (type(turned), turned.get_metadata()["out_sharding"]) == (nnx.Param, ("b", "c"))
    assert "out_sharding" not in boxes.with_value(variable, KERNEL).get_metadata()


def test_the_box_of_a_parameter_is_that_of_the_first_value_that_tells_it():
    def raw_box(names, of_parameter):
        return nn.Partitioned(ONES, raw_names(names, of_parameter))

    anew, first, second = nn.Partitioned(ONES, ("mlp",)), raw_box((None,), ("a", "b")), raw_box((None,), ("c", "d"))
    assert boxes.box_of_parameter([nn.Partitioned(ONES, None), anew, first, second]).names == ("a", "b")
    variable = nnx.Param(ONES)
    assert boxes.box_of_parameter([anew, variable, first]) is variable
    assert boxes.box_of_parameter([anew]) is None
    empty = boxes.with_value(nnx.Param(ONES), (), ("x", "y"))
    assert boxes.box_of_parameter([anew, empty, first]) is empty


def test_each_value_has_the_names_of_the_axes_that_it_follows():
    w, plain = nn.Partitioned(KERNEL, ("a", "b")), nnx.Param(KERNEL)
    tied = boxes.with_value(nnx.Param(KERNEL), KERNEL, ("x", "y"))
    of_params = {("w",): w, ("n",): plain, ("t",): tied, ("u",): nn.Partitioned(KERNEL, None), ("k",): w, ("l",): w}
    arrays = {**dict.fromkeys(of_params, KERNEL), ("p",): KERNEL}
    raw = {
        ("w", "@x", "v"): KERNEL.T,
        ("w", "@x", "g"): ONES,
        ("n", "@x", "v"): KERNEL,
        ("t", "@tie"): {},
        ("l", "@tie"): {},
        ("u", "@x", "v"): KERNEL,
        ("k",): KERNEL,
        ("p", "@x", "v"): KERNEL,
    }
    origins = {("w", "@x", "v"): (("w",), (1, 0)), ("w", "@x", "g"): (("w",), (None,))}
    found = boxes.boxes_of_values(of_params, arrays, raw, origins)
    assert found.keys() == {("w", "@x", "v"), ("w", "@x", "g"), ("n", "@x", "v"), ("t", "@tie")}
    assert found["n", "@x", "v"] is plain
    assert found["t", "@tie"] is tied
    for name, names in (("v", ("b", "a")), ("g", (None,))):
        box = found["w", "@x", name]
        assert (box.value is raw["w", "@x", name], tuple(box.names), box.names.of_parameter) == (
            True,
            names,
            ("a", "b"),
        )


@pytest.mark.parametrize(
    ("names", "ndim", "axes", "found"),
    [
        (("a", "b"), 2, (1, None, 0), ["b", None, "a"]),
        (("a",), 2, (0, 1), ["a", None]),
        (("a", "b", "c"), 2, (0, 1), [None, None]),
        (None, 2, (0, 1), [None, None]),
    ],
)
def test_axes_without_a_name_stay_so(names, ndim, axes, found):
    assert list(boxes._names_of_axes(nn.Partitioned(KERNEL, names), ndim, axes)) == found
    assert list(boxes._names_of_axes(None, ndim, axes)) == [None] * len(axes)
