"""Raw trees that other roads made, in wrapped models and back: a stored one, and that of the road of functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import numpy as np
import pytest
from errors import raises
from flax import nnx
from grids import mostly_thorough

import reparax as rpx

X = np.float32(np.linspace(-1, 1, 32).reshape(8, 4) ** 3)
W = np.float32(np.outer(np.arange(1.0, 5), np.arange(-1.0, 2)) / 9 + 0.1)
STORED = rpx.Quantized("int8")  # integers, scales, and nothing that trains


class Road(NamedTuple):
    """The road of functions for one layer, and how its raw tree goes into the wrapped model and comes back."""

    params: Any
    call: Callable[[Any, Any], Any]
    wrapped: Callable[[Any, Any], tuple[Callable[[Any], Any], Any]]
    """From a chain and a raw tree: the wrapped model with it, and the raw tree of that model."""


def of_nnx() -> Road:
    plain = nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(0))
    plain.kernel[...] = W

    def wrapped(p: Any, raw: Any) -> Any:
        model = rpx.nnx.Parametrized(nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(1)), p, raw=raw)
        assert not p.random_init or len(jax.tree.leaves(nnx.state(model, rpx.nnx.Fixed))) == 1
        return model, model.raw

    return Road(plain, lambda plain, x: plain(x), wrapped)


def of_linen() -> Road:
    layer = nn.Dense(3, use_bias=False)

    def wrapped(p: Any, raw: Any) -> Any:
        module = rpx.linen.parametrized(layer, p)
        variables = module.replace({**layer.init(jax.random.key(1), X), "other": {"count": 1}}, raw)
        assert variables["other"] == {"count": 1}
        return lambda x: module.apply(variables, x), module.raw(variables)

    return Road({"kernel": W}, lambda params, x: layer.apply({"params": params}, x), wrapped)


def of_equinox() -> Road:
    plain = eqx.nn.Linear(4, 3, use_bias=False, key=jax.random.key(0))
    plain = eqx.tree_at(lambda plain: plain.weight, plain, W.T)

    def wrapped(p: Any, raw: Any) -> Any:
        other = eqx.nn.Linear(4, 3, use_bias=False, key=jax.random.key(1))
        model = rpx.equinox.Parametrized(other, p, raw=raw)
        return jax.vmap(model), model.raw

    return Road(plain, lambda plain, x: jax.vmap(plain)(x), wrapped)


def of_haiku() -> Road:
    layer = hk.transform(lambda x: hk.Linear(3, with_bias=False, name="l")(x))

    def wrapped(p: Any, raw: Any) -> Any:
        network = rpx.haiku.parametrized(layer, p)
        params = network.replace(layer.init(jax.random.key(1), X), raw)
        return lambda x: network.apply(params, None, x), network.raw(params)

    return Road({"l": {"w": W}}, lambda params, x: layer.apply(params, None, x), wrapped)


def of_haiku_with_state() -> Road:
    layer = hk.transform_with_state(lambda x: hk.Linear(3, with_bias=False, name="l")(x))

    def wrapped(p: Any, raw: Any) -> Any:
        network = rpx.haiku.parametrized(layer, p)
        params, state = layer.init(jax.random.key(1), X)
        both = network.replace(params, {**state, "other": {"count": 1}}, raw)
        assert both[1]["other"] == {"count": 1}
        return lambda x: network.apply(*both, None, x)[0], network.raw(*both)

    return Road({"l": {"w": W}}, lambda params, x: layer.apply(params, {}, None, x)[0], wrapped)


EACH = mostly_thorough([of_nnx, of_linen, of_equinox, of_haiku, of_haiku_with_state], of_linen)


@pytest.mark.parametrize("library", EACH)
@pytest.mark.parametrize("p", [STORED, rpx.Freeze() >> rpx.LoRA(2)], ids=["stored", "lora"])
def test_a_raw_tree_goes_into_a_wrapped_model_and_back(p: Any, library: Any) -> None:
    road = library()
    raw = p.init(road.params, jax.random.key(0))
    moved = jax.tree.map(lambda x: x + x.dtype.type(0.1) if x.dtype == np.float32 else x, raw)  # else a factor is zero
    model, back = road.wrapped(p, moved)
    np.testing.assert_allclose(model(X), road.call(p.apply(moved), X), rtol=1e-5, atol=1e-6)
    given = jax.tree.leaves(moved)
    assert len(given) > 1
    for got, want in zip(jax.tree.leaves(back), given, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_values_of_a_split_model_go_into_a_wrapped_nnx_model_and_modules_of_other_classes_are_refused() -> None:
    plain, p = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rpx.Freeze() >> rpx.LoRA(2)
    raw = p.init(nnx.state(plain), jax.random.key(0))
    with raises(
        TypeError,
        "rpx.nnx.Parametrized takes a raw tree that is a Linear, as `p.init(model)` gives it, but got State. To "
        "replace only values, use `nnx.update(model.raw, nnx.to_pure_dict(raw))`.",
    ):
        rpx.nnx.Parametrized(plain, p, raw=raw)
    for variable, values in ((nnx.LoRAParam, nnx.to_pure_dict(raw)), (nnx.Param, raw)):
        model = rpx.nnx.Parametrized(plain, p, rngs=nnx.Rngs(1), variable=variable)
        nnx.update(model.raw, values)
        jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model.raw)), nnx.to_pure_dict(raw))
        np.testing.assert_allclose(model(X), plain(X), rtol=1e-5, atol=1e-6)
        assert type(model.fold().kernel) is nnx.Param


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.layer(x))


def test_what_is_no_parameter_is_that_of_the_nnx_model_beside_a_raw_tree_too():
    model, p = Normed(nnx.Rngs(0)), rpx.WeightNorm()
    raw = p.init(model)
    model(X)
    model.eval()
    wrapped = rpx.nnx.Parametrized(model, p, raw=raw)
    np.testing.assert_allclose(wrapped(X), model(X), atol=1e-6)
    assert not raw.norm.use_running_average
    again = rpx.nnx.Parametrized(Normed(nnx.Rngs(1)), p, raw=wrapped.raw)
    assert again.norm.mean.sum() == 0  # of its own model
    np.testing.assert_allclose(again.layer(X), model.layer(X), atol=1e-6)


def test_what_is_no_parameter_is_that_of_the_equinox_model_beside_a_raw_tree_too():
    model, p = eqx.nn.Sequential([eqx.nn.Linear(4, 3, key=jax.random.key(0)), eqx.nn.Dropout(0.9)]), rpx.WeightNorm()
    still = eqx.nn.inference_mode(model)
    wrapped = rpx.equinox.Parametrized(still, p, raw=p.init(model))
    np.testing.assert_allclose(wrapped(X[0]), still(X[0]), atol=1e-6)
    with raises(
        ValueError,
        "rpx.equinox.Parametrized takes a raw tree of this model, but got one of another model, or with other static "
        "fields. Pass a tree that `p.init(model)` returned.",
    ):
        rpx.equinox.Parametrized(model, p, raw=p.init(eqx.nn.MLP(4, 3, 2, 1, key=jax.random.key(1))))


@pytest.mark.parametrize("library", ["nnx", "linen", "equinox", "haiku", "haiku with state"])
def test_a_raw_tree_of_another_chain_is_refused_at_once(library):
    p, other = rpx.WeightNorm(), rpx.LowRank(2)
    linear = nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(0))
    of_haiku = hk.transform(lambda x: hk.Linear(3)(x)), {"linear": {"w": W}}
    with_state = hk.transform_with_state(lambda x: hk.Linear(3)(x)), {"linear": {"w": W}}
    layer = eqx.nn.Linear(4, 3, use_bias=False, key=jax.random.key(0))
    given = {
        "nnx": lambda: rpx.nnx.Parametrized(linear, p, raw=other.init(linear)),
        "linen": lambda: rpx.linen.parametrized(nn.Dense(3), p).replace({}, other.init({"kernel": W})),
        "equinox": lambda: rpx.equinox.Parametrized(layer, p, raw=other.init(layer)),
        "haiku": lambda: rpx.haiku.parametrized(of_haiku[0], p).replace({}, other.init(of_haiku[1])),
        "haiku with state": lambda: rpx.haiku.parametrized(with_state[0], p).replace({}, {}, other.init(with_state[1])),
    }[library]
    with pytest.raises(ValueError, match=r"WeightNorm\(\)\.apply found no '@weight_norm' in a raw tree that holds"):
        given()


def test_where_no_values_are_fixed_the_error_is_that_of_the_chain():
    module = rpx.linen.parametrized(nn.Dense(3), rpx.WeightNorm())
    with pytest.raises(ValueError, match="never went through init"):
        module.effective({"params": {"kernel": W}})
    network = rpx.haiku.parametrized(hk.transform_with_state(lambda x: hk.Linear(3)(x)), rpx.WeightNorm())
    with pytest.raises(ValueError, match="never went through init"):
        network.effective({"linear": {"w": W}}, {})


def test_functions_of_raw_trees_take_that_of_a_wrapped_nnx_model_whose_variables_say_what_trains():
    p = rpx.Freeze() >> rpx.LoRA(2)
    plain = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    model = rpx.nnx.Parametrized(plain, p, rngs=nnx.Rngs(1))
    raw = p.init(plain, nnx.Rngs(1).params())
    p.check(model.raw, plain)
    jax.tree.map(np.testing.assert_array_equal, rpx.io.to_peft(p, model.raw)[0], rpx.io.to_peft(p, raw)[0])
    for found in (p.fold(model.raw), p.fold(nnx.state(model.raw))):
        jax.tree.map(np.testing.assert_array_equal, leaves_of(found), leaves_of(model.fold()))


def leaves_of(tree: Any) -> Any:
    return jax.tree.leaves(nnx.state(tree))
