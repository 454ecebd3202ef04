"""What holds of the parameters of every neural-network library alike, and under every transform of JAX."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from flax.traverse_util import unflatten_dict
from grids import mostly_thorough
from jax import Array
from one_array import normal

import reparax as rpx
from reparax.core.paths import flatten_with_names, path_text

X = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
NORM = rpx.WeightNorm(axis=-1)  # arrays in tuples have no names
CHAIN = NORM >> rpx.VarNoise(0.075)


# The same network, 3 -> 4 -> 2, of which each library says where its parameters are. -------------------------------


class Case(NamedTuple):
    """Parameters of a network, how they are used, and the paths that users must be able to write."""

    params: Any
    forward: Callable[[Any, Array], Array]
    paths: list[str]


class LinenMLP(nn.Module):
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.tanh(nn.Dense(4, kernel_init=self.kernel_init)(x))
        return nn.Dense(2, kernel_init=self.kernel_init)(x)


class NnxMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.l1 = nnx.Linear(3, 4, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(4, 2, rngs=rngs)])

    def __call__(self, x: Array) -> Array:
        return self.rest[0](nnx.tanh(self.l1(x)))


def _dense(x: Array, kernel: Array, bias: Array) -> Array:
    return x @ kernel + bias[None]


def linen() -> Case:
    model = LinenMLP()
    paths = ["Dense_0/bias", "Dense_0/kernel", "Dense_1/bias", "Dense_1/kernel"]
    return Case(jax.jit(model.init)(jax.random.key(0), X)["params"], lambda p, x: model.apply({"params": p}, x), paths)


def linen_frozen() -> Case:
    return linen()._replace(params=freeze(linen().params))


def linen_boxes() -> Case:
    model = LinenMLP(nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out")))
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    return linen()._replace(params=params, forward=lambda p, x: model.apply({"params": p}, x))


def nnx_state() -> Case:
    graph, params, rest = nnx.split(NnxMLP(nnx.Rngs(0)), nnx.Param, ...)
    paths = ["l1/bias", "l1/kernel", "rest/0/bias", "rest/0/kernel"]
    return Case(params, lambda p, x: nnx.merge(graph, p, rest)(x), paths)


def nnx_module() -> Case:
    return nnx_state()._replace(params=NnxMLP(nnx.Rngs(0)), forward=lambda m, x: m(x))


def haiku() -> Case:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 2], activation=jnp.tanh)(x)))
    paths = ["mlp/~/linear_0/b", "mlp/~/linear_0/w", "mlp/~/linear_1/b", "mlp/~/linear_1/w"]
    return Case(jax.jit(model.init)(jax.random.key(0), X), model.apply, paths)


def equinox() -> Case:
    model = eqx.filter_jit(eqx.nn.MLP)(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    paths = ["layers/0/bias", "layers/0/weight", "layers/1/bias", "layers/1/weight"]
    return Case(model, lambda m, x: jax.vmap(m)(x), paths)


def _weights() -> list[Array]:
    return [jnp.asarray(normal(*shape, seed=i)) for i, shape in enumerate([(3, 4), (4,), (4, 2), (2,)])]


def list_of_tuples() -> Case:
    w1, b1, w2, b2 = _weights()
    paths = ["0/0", "0/1", "1/0", "1/1"]
    return Case([(w1, b1), (w2, b2)], lambda p, x: _dense(jnp.tanh(_dense(x, *p[0])), *p[1]), paths)


def bare_array() -> Case:
    return Case(_weights()[0], lambda w, x: x @ w, [""])


# One container of each library, and the others, which differ in how JAX flattens them alone.
CASES = [linen_boxes, nnx_module, haiku, equinox, list_of_tuples]
MORE = [linen_frozen, nnx_state, bare_array]


def of_libraries(*quick: Callable[[], Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("build", mostly_thorough([*CASES, *MORE], *quick), ids=lambda build: build.__name__)


every_library = of_libraries(*CASES)
two_libraries = of_libraries(nnx_module, equinox)


def _arrays(tree: Any) -> list[Array]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def _by_path(tree: Any) -> dict[str, Array]:
    paths, leaves, _ = flatten_with_names(eqx.filter(tree, eqx.is_array))
    return {path_text(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def _assert_identical(got: Any, want: Any) -> None:
    """Same structure, and bit for bit the same arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(_arrays(got), _arrays(want), strict=True):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()


def _assert_close(got: Any, want: Any) -> None:
    """Same structure, and arrays that agree within the rounding of a few operations in float32."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(_arrays(got), _arrays(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


# What every user of every library does. ---------------------------------------------------------------------------


@eqx.filter_jit
def _there_and_back(params: Any) -> Any:
    return CHAIN.fold(CHAIN.init(params))


@every_library
def test_fold_of_init_gives_the_original_weights_back(build: Callable[[], Case]) -> None:
    params = build().params
    _assert_close(_there_and_back(params), params)


@two_libraries
def test_init_and_apply_leave_their_input_alone(build: Callable[[], Case], key: Array) -> None:
    params, again = build().params, build().params
    # Without arguments, as compiled functions get trees of their own.
    raw = eqx.filter_jit(lambda: CHAIN.init(params))()
    eqx.filter_eval_shape(lambda: CHAIN.apply(raw, key))
    _assert_identical(params, again)
    _assert_identical(raw, eqx.filter_jit(lambda: CHAIN.init(again))())


@every_library
def test_a_predicate_sees_the_same_paths_in_every_library(build: Callable[[], Case], key: Array) -> None:
    case = build()
    seen: list[str] = []

    def where(path: str, array: Array) -> bool:
        seen.append(path)
        return True

    noise = rpx.VarNoise(0.1, where=where)
    noise.init(case.params)
    assert sorted(seen) == case.paths
    seen.clear()
    jax.eval_shape(lambda: _arrays((NORM >> noise).apply(NORM.init(case.params), key)))
    assert sorted(seen) == case.paths


@two_libraries
def test_noise_is_that_of_nested_dicts_of_the_same_paths(build: Callable[[], Case], key: Array) -> None:
    params = build().params
    noisy = _by_path(rpx.VarNoise(0.1).apply(params, key))
    assert sorted(noisy) == build().paths
    nested = unflatten_dict(_by_path(params), sep="/")
    for path, want in _by_path(rpx.VarNoise(0.1).apply(nested, key)).items():
        np.testing.assert_array_equal(noisy[path], want)


# Transforms. ------------------------------------------------------------------------------------------------------

TRANSFORMED = [
    rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1),
    rpx.SpectralNorm(),
    rpx.LowRank(4) >> rpx.WeightDropout(0.3),
    rpx.Freeze() >> rpx.WeightNorm(axis=-1),
]

every_chain = pytest.mark.parametrize("p", mostly_thorough(TRANSFORMED, *TRANSFORMED[:2]), ids=repr)


@functools.cache
def _layers() -> dict[str, Array]:
    """Five kernels, stacked."""
    return {"kernel": normal(5, 4, 4, seed=3)}


def _member(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@every_chain
def test_apply_inside_a_scan_over_layers_is_the_loop_over_layers(p: rpx.Parametrization, key: Array) -> None:
    raw = jax.tree.map(np.asarray, jax.jit(jax.vmap(p.init))(_layers()))
    keys = jax.random.split(key, 5)

    def layer(x: Array, inputs: tuple[Any, Array]) -> tuple[Array, None]:
        return jnp.tanh(x @ p.apply(*inputs)["kernel"]), None

    looped = np.ones((2, 4), np.float32)
    scanned, _ = jax.lax.scan(layer, looped, (raw, keys))
    apply = jax.jit(p.apply)
    for i in range(5):
        looped = np.tanh(looped @ np.asarray(apply(_member(raw, i), keys[i])["kernel"]))
    np.testing.assert_allclose(scanned, looped, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@every_chain
def test_no_key_is_used_twice(p: rpx.Parametrization, key: Array) -> None:
    chain = p >> rpx.VarNoise(0.1, where="kernel") >> rpx.VarNoise(0.2)
    params = {"kernel": np.eye(4, dtype=np.float32), "bias": np.ones(4, np.float32)}
    with jax.debug_key_reuse(new_val=True):
        raw = jax.jit(chain.init)(params, jax.random.key(1))
        effective = jax.jit(chain.apply)(raw, key)
    assert _types(effective) == _types(params)
