"""Layers under a scan: each is parametrized as it would be alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, table
from flax.traverse_util import unflatten_dict
from jax import Array
from jax.sharding import PartitionSpec as P
from one_array import normal

import reparax as rpx
from reparax.core.paths import flatten_with_names

pytestmark = pytest.mark.thorough

LAYERS, WIDTH, OUT = 2, 5, 4
NAMES = ("lengths", "spectrum", "rotation", "product")
X = normal(2, WIDTH, seed=1)
Y = normal(2, OUT, seed=2)


def chain(stacked: Any) -> rpx.Parametrization:
    """A stage for each array of a layer; where axes have names, the head of the model, in no scan, has stages too."""
    head = "|out" if stacked == "layers" else ""
    return (
        rpx.WeightNorm(where=f"(.*/)?(lengths{head})/kernel", stacked=stacked)
        >> rpx.SpectralNorm(where="(.*/)?spectrum/kernel", stacked=stacked)
        >> rpx.Orthogonal(where="(.*/)?rotation/kernel", stacked=stacked)
        >> rpx.LowRank(2, where="(.*/)?product/kernel", stacked=stacked)
    )


ALONE = chain(())


class Scanned(NamedTuple):
    """A model of scanned layers and a head."""

    axis: int
    stacked: int | str
    params: Any
    read: Callable[[Any, Array], Array]
    """The model's output of effective parameters."""
    read_raw: Callable[[Any, Array], Array]
    """The same of raw ones, where each layer is made effective in the body of the scan, by ``ALONE``."""

    @property
    def p(self) -> rpx.Parametrization:
        return chain(self.stacked)


# Linen ------------------------------------------------------------------------------------------------------------


def dense(features: int, name: str, *, boxed: bool) -> nn.Dense:
    kernel, bias = nn.initializers.lecun_normal(), nn.initializers.normal()
    if boxed:
        kernel, bias = nn.with_partitioning(kernel, ("in", "out")), nn.with_partitioning(bias, ("out",))
    return nn.Dense(features, kernel_init=kernel, bias_init=bias, name=name)


class LinenLayer(nn.Module):
    boxed: bool

    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        for name in NAMES:
            x = nn.tanh(dense(WIDTH, name, boxed=self.boxed)(x))
        return x, None


class LinenModel(nn.Module):
    layer: Any
    axis: int
    boxed: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        names = {"metadata_params": {nn.PARTITION_NAME: "layers"}} if self.boxed else {}
        split = {"params": True}
        layers = nn.scan(self.layer, variable_axes={"params": self.axis}, split_rngs=split, length=LAYERS, **names)
        x, _ = layers(self.boxed, name="layers")(x, None)
        return dense(OUT, "out", boxed=self.boxed)(x)


def linen(axis: int, stacked: int | str) -> Scanned:
    boxed = isinstance(stacked, str)
    mapped = nn.map_variables(LinenLayer, "params", trans_in_fn=ALONE.apply)
    plain, inside = (LinenModel(layer, axis, boxed) for layer in (LinenLayer, mapped))

    def read_raw(raw: Any, x: Array) -> Array:
        return inside.apply({"params": {**raw, "out": chain(stacked).fold(raw)["out"]}}, x)

    params = jax.jit(plain.init)(jax.random.key(0), X)["params"]
    return Scanned(axis, stacked, params, lambda effective, x: plain.apply({"params": effective}, x), read_raw)


BUILDS = {
    "linen, second axis by name": lambda: linen(1, "layers"),
    "linen": lambda: linen(0, 0),
}


@pytest.fixture(scope="module", params=BUILDS)
def model(request: pytest.FixtureRequest) -> Scanned:
    return BUILDS[request.param]()


@pytest.fixture(scope="module")
def raw(model: Scanned) -> Any:
    return init(model.p, model.params)


@jax.jit
def init(p: rpx.Parametrization, params: Any) -> Any:
    return p.init(params, jax.random.key(3))


@jax.jit
def results(p: rpx.Parametrization, raw: Any) -> Any:
    """What the methods of a chain make of a raw tree."""
    return p.fold(raw), p.update(raw), p.update_base(raw)


# Three separate layers --------------------------------------------------------------------------------------------


def apart(tree: Any, axis: int) -> Any:
    """The numbers of a tree of the model as plain dicts, each layer by itself."""
    flat: dict[tuple[str, ...], Any] = {}
    for path, x in zip(*flatten_with_names(tree)[:2], strict=True):
        if path[0] == "layers":
            # A value has the stacked axis where the array has it, or as near to it as it has axes.
            layers = np.moveaxis(np.asarray(x), min(axis, x.ndim - 1), 0)
            flat |= {("layers", str(i), *path[1:]): layers[i] for i in range(LAYERS)}
        else:
            flat[path] = np.asarray(x)
    return unflatten_dict(flat)


def read_apart(effective: Any, x: Array) -> Array:
    """The output of the model of separate layers."""

    def affine(part: Any, x: Array) -> Array:
        return x @ part["kernel"] + part["bias"][None]

    for i in range(LAYERS):
        for name in NAMES:
            x = jnp.tanh(affine(effective["layers"][str(i)][name], x))
    return affine(effective["out"], x)


def alone(model: Scanned) -> rpx.Parametrization:
    """The chain for separate layers, with a stage for the head where the scanned chain has one."""
    return ALONE if model.stacked != "layers" else rpx.WeightNorm(where="out/kernel") >> ALONE


def assert_close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5, err_msg=jax.tree_util.keystr(path))


def without_drawn_start(tree: Any) -> Any:
    """A plain tree without the values that start at random."""
    flat = {path: x for path, x in zip(*flatten_with_names(tree)[:2], strict=True) if "spectrum" not in path}
    return unflatten_dict(flat)


def test_scanned_layers_start_as_separate_ones(model: Scanned, raw: Any) -> None:
    model.p.check(raw, like=model.params)
    got, want = apart(raw, model.axis), init(alone(model), apart(model.params, model.axis))
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert_close(without_drawn_start(got), without_drawn_start(want))


def test_scanned_layers_are_read_updated_and_rebased_as_separate_ones(model: Scanned, raw: Any) -> None:
    moved = jax.tree.map(lambda x: x + 0.1 * jnp.cos(7 * x), raw)
    for got, want in zip(results(model.p, moved), results(alone(model), apart(moved, model.axis)), strict=True):
        assert_close(apart(got, model.axis), want)


def test_each_scanned_layer_has_a_norm_of_its_own(model: Scanned, raw: Any) -> None:
    effective = apart(results(model.p, raw)[0], model.axis)
    for layer in effective["layers"].values():
        assert abs(np.linalg.norm(layer["spectrum"]["kernel"], 2) - 1) < 0.05
        np.testing.assert_allclose(
            layer["rotation"]["kernel"] @ layer["rotation"]["kernel"].T, np.eye(WIDTH), atol=1e-5
        )
        assert np.linalg.matrix_rank(layer["product"]["kernel"], tol=1e-5) == 2


@jax.jit
def trained_apart(p: rpx.Parametrization, raw: Any, kept: Any, added: Any) -> Any:
    """A step of training of separate layers, with what noise does to their effective arrays."""

    def loss(raw: Any) -> Array:
        effective = jax.tree.map(lambda w, m, n: w * m + n, p.fold(raw), kept, added)
        return jnp.mean(jnp.square(read_apart(effective, X) - Y))

    return stepped(loss, p.update(raw))


def stepped(loss: Callable[[Any], Array], raw: Any) -> Any:
    tx = rpx.optimizer(optax.adam(1e-2, eps=1e-3))
    value, slope = jax.value_and_grad(loss)(raw)
    with jax.numpy_dtype_promotion("standard"):  # adam raises a float to an integer power
        updates, _ = tx.update(slope, tx.init(raw), raw)
    return value, slope, optax.apply_updates(raw, updates)


def test_scanned_layers_train_as_separate_ones(model: Scanned, raw: Any) -> None:
    dropout = rpx.WeightDropout(0.5, broadcast_dims=-1, stacked=model.stacked)
    noise = rpx.VarNoise(0.1, stacked=model.stacked)
    p, key = model.p >> dropout >> noise, jax.random.key(4)

    @jax.jit
    def trained(raw: Any) -> Any:
        result = stepped(lambda raw: jnp.mean(jnp.square(model.read(p.apply(raw, key), X) - Y)), p.update(raw))
        ones, zeros = (jax.tree.map(like, model.params) for like in (jnp.ones_like, jnp.zeros_like))
        return result, dropout.apply(ones, key), noise.apply(zeros, key)

    (value, *trees), kept, added = trained(raw)
    drawn = apart(kept, model.axis), apart(added, model.axis)
    value_apart, *trees_apart = trained_apart(alone(model), apart(raw, model.axis), *drawn)
    np.testing.assert_allclose(value, value_apart, rtol=1e-5)
    for tree, tree_apart in zip(trees, trees_apart, strict=True):
        assert_close(apart(tree, model.axis), tree_apart)
    for before, after in zip(*(jax.tree.leaves(rpx.partition(tree)[0]) for tree in (raw, trees[1])), strict=True):
        assert not np.array_equal(before, after)


def test_a_chain_inside_of_the_scan_is_the_stacked_chain_outside(model: Scanned, raw: Any) -> None:
    outside, inside = jax.jit(lambda raw: (model.read(model.p.fold(raw), X), model.read_raw(raw, X)))(raw)
    np.testing.assert_allclose(inside, outside, rtol=1e-5, atol=1e-6)


def test_scanned_layers_draw_independently(model: Scanned) -> None:
    dropout = rpx.WeightDropout(0.5, broadcast_dims=-1, stacked=model.stacked)
    noise = rpx.VarNoise(1.0, stacked=model.stacked)

    @jax.jit
    @jax.vmap
    def drawn(key: Array) -> Any:
        ones, zeros = (jax.tree.map(like, model.params) for like in (jnp.ones_like, jnp.zeros_like))
        paths, leaves, _ = flatten_with_names((dropout.apply(ones, key), noise.apply(zeros, key)))
        return [x for path, x in zip(paths, leaves, strict=True) if path[-2:] == ("lengths", "kernel")]

    kept, normal = (np.moveaxis(x, model.axis + 1, 0) for x in drawn(jax.random.split(jax.random.key(5), 500)))
    assert np.array_equal(kept, np.broadcast_to(kept[..., :1], kept.shape))  # whole rows
    for draws in (kept[..., 0] - 1, normal):  # -1 and 1, and normal numbers
        flat = draws.reshape(LAYERS, -1)
        np.testing.assert_allclose(flat @ flat.T / flat.shape[1], np.eye(LAYERS), atol=6 / flat.shape[1] ** 0.5)


# Names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_one_name_serves_scanned_and_other_parts_of_a_model(axis: int) -> None:
    params = linen(axis, "layers").params
    raw = rpx.WeightNorm(stacked="layers").init(params)
    specs = nn.get_partition_spec(raw)
    assert specs["out"]["kernel"] == {"@weight_norm": {"g": P(None, "out"), "v": P("in", "out")}}
    kernel = {"g": P("layers", None, "out"), "v": P("layers", "in", "out")}
    swapped = {"g": P(None, "layers", "out"), "v": P("in", "layers", "out")}
    assert specs["layers"]["product"]["kernel"] == {"@weight_norm": swapped if axis else kernel}
    g = raw["out"]["kernel"]["@weight_norm"]["g"].value
    np.testing.assert_allclose(g[0], np.linalg.norm(params["out"]["kernel"].value, axis=0), rtol=1e-6)
    g = raw["layers"]["product"]["kernel"]["@weight_norm"]["g"].value
    lengths = np.linalg.norm(params["layers"]["product"]["kernel"].value, axis=1 - axis, keepdims=True)
    np.testing.assert_allclose(g, lengths, rtol=1e-6)


def test_an_array_without_names_is_refused_where_a_name_is_asked_for() -> None:
    kernel = nn.Partitioned(jnp.ones((LAYERS, 2, 2)), ("layers", "in", "out"))
    params = {"dense": {"kernel": kernel, "bias": jnp.ones((LAYERS, 2))}}
    error = (
        "VarNoise(0.1, stacked='layers').{} at 'dense/bias': expected one axis named 'layers', got no axis names. "
        "Give the axis by number, or leave the array out with `where`."
    )
    p = rpx.VarNoise(0.1, stacked="layers")
    with raises(ValueError, error.format("init")):
        p.init(params)
    with raises(ValueError, error.format("apply")):
        p.apply(params, jax.random.key(0))
    with raises(ValueError, error.format("init").replace("VarNoise(0.1, ", "Scale(2.0, ")):
        rpx.numbers.Scale(2.0, stacked="layers").init(params)
    assert jax.tree.map(jnp.shape, rpx.WeightNorm(stacked="layers").init(params)["dense"]["bias"]) == (LAYERS, 2)
    rest = rpx.VarNoise(0.1, where=rpx.all_but(".*bias"), stacked="layers").apply(params, jax.random.key(0))
    assert rest["dense"]["bias"] is params["dense"]["bias"]


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
