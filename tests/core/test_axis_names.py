"""Axes by the names that flax's boxes give them: one definition for layers of every layout."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective, fold, init
from errors import raises, table
from flax import nnx
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reparax as rpx
from reparax.core.paths import axis_names, flatten_with_names, path_text

UP = np.array([[3.0, 1.0, 0.5, -2.0], [4.0, -1.0, 2.0, 1.0], [12.0, 2.0, -1.0, 2.0]], np.float32)
DOWN = np.array([[1.0, 2.0], [-2.0, 1.0], [2.0, -0.5], [0.5, 4.0]], np.float32)
HEADS = np.arange(1, 25, dtype=np.float32).reshape(3, 4, 2)


def boxed() -> dict[str, Any]:
    """Two kernels in which the hidden units are the last axis and the first."""
    return {
        "up": {"kernel": nn.Partitioned(jnp.asarray(UP), ("embed", "mlp")), "bias": np.ones(4, np.float32)},
        "down": {"kernel": nn.LogicallyPartitioned(jnp.asarray(DOWN), ("mlp", "out"))},
    }


def lengths(w: np.ndarray, axis: int) -> np.ndarray:
    return np.sqrt(np.sum(np.square(w), axis=axis, keepdims=True))


def arrays(tree: Any) -> dict[str, Array]:
    """Each array by its path, in which boxes do not show."""
    paths, leaves, _ = flatten_with_names(tree)
    return {path_text(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


# Where names come from. -------------------------------------------------------------------------------------------


def test_one_definition_norms_both_layouts() -> None:
    p = rpx.WeightNorm(axis="mlp")
    raw = init(p, boxed())
    np.testing.assert_allclose(arrays(raw)["up/kernel/@weight_norm/g"], lengths(UP, 0), rtol=1e-6)
    np.testing.assert_allclose(arrays(raw)["down/kernel/@weight_norm/g"], lengths(DOWN, 1), rtol=1e-6)
    doubled = jax.tree.map(lambda x: 2 * np.asarray(x), raw)  # v keeps its direction
    got = effective(p, doubled)
    assert got["down"]["kernel"].names == ("mlp", "out")
    np.testing.assert_allclose(got["up"]["kernel"].value, 2 * UP, rtol=1e-6)
    np.testing.assert_allclose(got["down"]["kernel"].value, 2 * DOWN, rtol=1e-6)


def nnx_model() -> nnx.Module:
    """The same kernels as nnx variables, whose metadata names the axes."""

    def layer(w: np.ndarray, names: tuple[str, ...]) -> nnx.Linear:
        def kernel_init(*_: Any) -> Array:
            return jnp.asarray(w)

        named = nnx.with_partitioning(kernel_init, names, eager_sharding=False)
        return nnx.Linear(*w.shape, kernel_init=named, use_bias=False, rngs=nnx.Rngs(0))

    return nnx.Sequential(layer(UP, ("embed", "mlp")), layer(DOWN, ("mlp", "out")))


@pytest.mark.parametrize("whole", [lambda model: model, nnx.state], ids=["module", "state"])
def test_names_of_nnx_variables_are_read(whole: Any) -> None:
    raw = init(rpx.WeightNorm(axis="mlp"), whole(nnx_model()))
    shapes = [x.shape for x in jax.tree.leaves(raw)]
    assert sorted(shapes) == sorted([(1, 4), (3, 4), (4, 1), (4, 2)])
    plain = jax.tree.leaves(fold(rpx.WeightNorm(axis="mlp"), raw))
    np.testing.assert_allclose(plain[0], UP, rtol=1e-6)
    np.testing.assert_allclose(plain[1], DOWN, rtol=1e-6)


def test_what_a_box_says_of_its_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    w = jnp.ones((4, 4))

    def variable(spec: Any) -> nnx.Param[Array]:
        return nnx.Param(w, out_sharding=spec, eager_sharding=False)

    assert axis_names(variable(P("data", None))) == ("data", None)
    assert axis_names(variable(NamedSharding(mesh, P("data", "model")))) == ("data", "model")
    assert axis_names(variable((("data", "model"), "mlp"))) == (None, "mlp")
    assert axis_names(nn.Partitioned(w, ("embed", None))) == ("embed", None)
    assert axis_names(nnx.Param(w)) is None
    assert axis_names(w) is None


# What takes names. ------------------------------------------------------------------------------------------------

BY_NAME = [
    lambda axis, **where: rpx.SpectralNorm(3, columns=axis, **where),
    lambda axis, **where: rpx.norms.WeightStandardization(axis=axis, **where),
    lambda axis, **where: rpx.norms.MaxNorm(2.0, axis=axis, **where),
    lambda axis, **where: rpx.norms.Sphere(along=axis, **where),
    lambda axis, **where: rpx.norms.PoincareBall(0.01, along=axis, **where),
    lambda axis, **where: rpx.numbers.Simplex(along=axis, **where),
    lambda axis, **where: rpx.sparse.NByM(1, 1, along=axis, **where),
    lambda axis, **where: rpx.MagnitudePruning(0.5, axis=axis, **where),
    lambda axis, **where: rpx.sparse.RandomPruning(0.5, axis=axis, **where),
    lambda axis, **where: rpx.WeightDropout(0.5, broadcast_dims=axis, **where),
]


@pytest.mark.parametrize("build", BY_NAME)
def test_a_name_is_the_number_of_its_axis_in_every_stage(build: Callable[..., rpx.Parametrization]) -> None:
    def program(p: rpx.Parametrization) -> str:
        def applied(params: Any, key: Array) -> Any:
            return p.apply(p.update(p.init(params, key)), key)

        return str(jax.make_jaxpr(applied)(boxed(), jax.random.key(0)))

    by_name, first, second = (program(build(axis, where="down/kernel")) for axis in ("mlp", 0, 1))
    assert by_name == first
    assert by_name != second


def test_names_may_differ_by_path() -> None:
    p = rpx.WeightNorm(axis={"up/.*": "embed", "down/.*": "mlp"})
    raw = arrays(init(p, boxed()))
    np.testing.assert_allclose(raw["up/kernel/@weight_norm/g"], lengths(UP, 1), rtol=1e-6)
    np.testing.assert_allclose(raw["down/kernel/@weight_norm/g"], lengths(DOWN, 1), rtol=1e-6)


def test_several_names_and_numbers_may_stand_together() -> None:
    params = {"out": nn.Partitioned(jnp.asarray(HEADS), ("heads", "kv", "embed"))}
    want = np.sqrt(np.sum(np.square(HEADS), axis=1, keepdims=True))
    for axis in [("heads", "embed"), ("embed", 0), ["heads", -1]]:
        g = arrays(init(rpx.WeightNorm(axis=axis), params))["out/@weight_norm/g"]
        np.testing.assert_allclose(g, want, rtol=1e-6)


def test_names_hold_for_values_of_stages_that_keep_the_axes() -> None:
    p = (
        rpx.WeightDropout(0.5, broadcast_dims="mlp")
        >> rpx.WeightNorm(axis="mlp")
        >> rpx.Mask()
        >> rpx.numbers.Scale(2.0)
    )
    raw = init(p, boxed())
    g = arrays(raw)["down/kernel/@scale/x/@mask/w/@weight_norm/g"]
    np.testing.assert_allclose(g, lengths(DOWN, 1) / 2, rtol=1e-6)
    np.testing.assert_allclose(fold(p, raw)["down"]["kernel"].value, DOWN, rtol=1e-6)
    kept = np.asarray(effective(p, raw, jax.random.key(3))["down"]["kernel"].value) != 0
    assert sorted(kept.sum(axis=0).tolist()) == [0, 4]  # of the two outputs, one is dropped with all its units


def test_a_stage_of_ones_own_takes_names(key: Array) -> None:
    class Reversed(rpx.Perturbation):
        axis: Any = rpx.stage.axes_field(default=-1)

        stochastic = False
        min_ndim = 2

        def apply_leaf(self, w: Array, key: Array | None) -> Array:
            return jnp.flip(w, self.axis)

    got = Reversed("mlp").apply(boxed())
    np.testing.assert_array_equal(got["up"]["kernel"].value, UP[:, ::-1])
    np.testing.assert_array_equal(got["down"]["kernel"].value, DOWN[::-1])
    with pytest.raises(ValueError, match=r"axis=2 is out of bounds for an array of shape \(2, 3\)\. Leave the array"):
        Reversed(2).apply({"w": jnp.ones((2, 3))})
    with pytest.raises(TypeError, match=r"takes an integer, a name, or a tuple of these as axis, but got 1\.5\.$"):
        Reversed(1.5)


def test_a_mapped_first_axis_leaves_names_right() -> None:
    stacked = {"kernel": nn.Partitioned(jnp.asarray(np.stack([UP, 2 * UP])), ("layers", "embed", "mlp"))}
    p = rpx.WeightNorm(axis=("layers", "mlp"))
    raw = init(p, stacked)
    np.testing.assert_allclose(np.asarray(arrays(raw)["kernel/@weight_norm/g"])[1], 2 * lengths(UP, 0), rtol=1e-6)
    np.testing.assert_allclose(fold(p, raw)["kernel"].value, stacked["kernel"].value, rtol=1e-6)
    sphere = rpx.norms.Sphere(along="embed")
    mapped = jax.jit(lambda params: jax.vmap(sphere.apply)(sphere.init(params)))(stacked)["kernel"].value
    np.testing.assert_allclose(np.asarray(mapped)[1], UP / lengths(UP, 0), rtol=1e-6)


# Errors. ----------------------------------------------------------------------------------------------------------


UNNAMED = {"w": nn.Partitioned(np.ones((2, 2), np.float32), (None, None))}
OUT_OR_MLP = rpx.VarNoise(0.1, where="up/kernel", stacked=("out", "mlp"))  # only the other kernel has an axis `out`


def test_a_name_that_no_selected_array_has_is_misspelt_in_init_and_passes_in_apply(key: Array) -> None:
    effective(OUT_OR_MLP, boxed(), key)  # as in the body of a scan over `out`, where no array has that axis any more


def test_an_array_without_names_is_refused_where_a_name_is_asked_for() -> None:
    kernel = nn.Partitioned(jnp.ones((3, 2, 2)), ("layers", "in", "out"))
    params = {"dense": {"kernel": kernel, "bias": jnp.ones((3, 2))}}
    error = (
        "VarNoise(0.1, stacked='layers').{} at 'dense/bias': expected an array with one axis named 'layers', but got "
        "an array without axis names. Give the axis as an integer, or leave the array out with `where`."
    )
    p = rpx.VarNoise(0.1, stacked="layers")
    with raises(ValueError, error.format("init")):
        p.init(params)
    with raises(ValueError, error.format("apply")):
        p.apply(params, jax.random.key(0))
    with raises(ValueError, error.format("init").replace("VarNoise(0.1, ", "Scale(2.0, ")):
        rpx.numbers.Scale(2.0, stacked="layers").init(params)
    dense = rpx.WeightNorm(stacked="layers").init(params)["dense"]
    assert (dense["bias"].shape, arrays(dense)["kernel/@weight_norm/g"].shape) == ((3, 2), (3, 1, 2))
    rest = rpx.VarNoise(0.1, where=rpx.all_but(".*bias"), stacked="layers").apply(params, jax.random.key(0))
    assert rest["dense"]["bias"] is params["dense"]["bias"]


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
