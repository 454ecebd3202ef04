"""rpx.nnx: a model that is its chain, in loops that own the loss."""

import copy
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
import pytest
from errors import Case, table
from flax import nnx
from jax import Array

import reparax as rpx

X, Y = mlp.data()
NOISY = rpx.WeightNorm() >> rpx.VarNoise(0.1)
OTHER = nnx.Rngs(dropout=0)  # has neither `params`, nor `noise`, nor a default


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.l1 = nnx.Linear(3, 4, rngs=rngs)
        self.l2 = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.l2(nnx.tanh(self.l1(x)))


def model() -> MLP:
    made = MLP(nnx.Rngs(0))
    variables: Any = (made.l1.kernel, made.l1.bias, made.l2.kernel, made.l2.bias)
    for variable, w in zip(variables, mlp.arrays(), strict=True):
        variable[...] = w
    return made


def weights(plain: Any) -> list[Any]:
    return [np.array(w[...]) for layer in (plain.l1, plain.l2) for w in (layer.kernel, layer.bias)]


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: Any, optimizer: Any) -> Array:
    """The step of flax's guides, which knows of no chain."""
    TRACED.append(None)
    loss, grads = nnx.value_and_grad(lambda model: mlp.mean_square(model(X), Y))(model)
    optimizer.update(model, grads)
    return loss


TRACED: list[None] = []


def test_a_loop_that_owns_the_loss_trains_raw_values_and_compiles_once() -> None:
    wrapped = rpx.nnx.Parametrized(model(), mlp.P)
    optimizer = nnx.Optimizer(wrapped, optax.sgd(mlp.RATE), wrt=nnx.Param)
    before = len(TRACED)
    losses = [train_step(wrapped, optimizer) for _ in range(mlp.STEPS)]
    assert len(TRACED) == before + 1
    folded = wrapped.fold()
    assert type(folded) is MLP
    assert type(folded.l1.kernel) is nnx.Param
    mlp.assert_trained(losses, weights(folded))
    mlp.P.check(nnx.state(wrapped.raw), like=model())
    assert {type(x) for x in jax.tree.leaves(wrapped, is_leaf=lambda x: isinstance(x, nnx.Variable))} == {nnx.Param}


@pytest.mark.parametrize(("variable", "wrt"), [(nnx.Param, nnx.Param), (nnx.LoRAParam, nnx.LoRAParam)])
def test_a_bare_adamw_moves_what_trains_and_no_bit_of_the_rest(variable: Any, wrt: Any) -> None:
    p = rpx.Freeze() >> rpx.LoRA(2, where="l1/kernel")
    wrapped = rpx.nnx.Parametrized(model(), p, rngs=nnx.Rngs(0), variable=variable)
    fixed = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(wrapped, rpx.nnx.Fixed)))
    free = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(wrapped, variable)))
    optimizer = nnx.Optimizer(wrapped, optax.adamw(0.1, weight_decay=0.5), wrt=wrt)
    with jax.numpy_dtype_promotion("standard"):  # for Adam's counter
        for _ in range(2):  # the first factor has a gradient once the second has moved
            train_step(wrapped, optimizer)
    assert len(jax.tree.leaves(fixed)) == 4
    assert list(free["raw"]["l1"]["kernel"]["@lora"]) == ["a", "b"]
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(wrapped, rpx.nnx.Fixed)), fixed)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), free, nnx.to_pure_dict(nnx.state(wrapped, variable)))
    assert all(jax.tree.leaves(moved))
    assert rpx.nnx.Fixed not in {type(x) for _, x in nnx.iter_graph(wrapped.effective())}


def test_an_adapter_trains_as_the_one_of_flax_does() -> None:
    """The step of flax's LoRA guide, on its own layer and on a chain from the same factors."""
    base = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    by_hand = nnx.LoRA(3, 2, 2, base_module=nnx.clone(base), rngs=nnx.Rngs(1))
    p = rpx.Freeze() >> rpx.LoRA(2, alpha=2.0, where="kernel")
    wrapped = rpx.nnx.Parametrized(base, p, rngs=nnx.Rngs(2), variable=nnx.LoRAParam)
    factors = wrapped.raw.kernel["@lora"]
    for ours, theirs in ((factors["a"], by_hand.lora_a), (factors["b"], by_hand.lora_b)):
        ours[...] = theirs[...] if ours.shape == theirs.shape else theirs[...].T
    losses: dict[str, list[float]] = {}
    for name, model in (("hand", by_hand), ("chain", wrapped)):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)

        @nnx.jit
        def step(model: Any, optimizer: Any) -> Array:
            def loss(model: Any) -> Array:
                return mlp.mean_square(model(X), Y)

            value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
            optimizer.update(model, grads)
            return value

        losses[name] = [float(step(model, optimizer)) for _ in range(4)]
    np.testing.assert_allclose(losses["chain"], losses["hand"], rtol=1e-5)
    assert losses["hand"][3] < losses["hand"][0]


def test_each_call_draws_once_from_a_stream_as_the_functional_road_does() -> None:
    class Twice(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self) -> tuple[Array, Array]:
            return self.w[...], self.w[...]

    p = rpx.VarNoise(0.1)
    wrapped = rpx.nnx.Parametrized(Twice(), p, rngs=nnx.Rngs(params=0, noise=1))
    first, again = wrapped()
    second, _ = wrapped()
    stream = nnx.Rngs(noise=1).noise.fork()
    np.testing.assert_array_equal(first, again)
    for drawn in (first, second):
        np.testing.assert_array_equal(drawn, p.apply({"w": jnp.ones(3)}, stream())["w"])
    kept = wrapped.effective()
    np.testing.assert_array_equal(kept()[0], kept()[1])
    assert np.abs(np.asarray(kept()[0]) - np.asarray(first)).max() > 1e-3


def test_a_stream_alone_is_enough() -> None:
    wrapped = rpx.nnx.Parametrized(model(), NOISY, rngs=nnx.Rngs(noise=1).noise)
    want = NOISY.apply(NOISY.init(model()), nnx.Rngs(noise=1).noise.fork()())(X)
    np.testing.assert_allclose(wrapped(X), want, rtol=1e-5, atol=1e-6)


def test_noise_has_the_switch_of_dropout() -> None:
    wrapped = rpx.nnx.Parametrized(model(), NOISY, rngs=nnx.Rngs(0))
    plain = np.asarray(model()(X))
    assert np.abs(np.asarray(wrapped(X)) - plain).max() > 1e-2
    wrapped.eval()
    np.testing.assert_allclose(wrapped(X), plain, rtol=1e-5, atol=1e-6)
    wrapped.train()
    assert np.abs(np.asarray(wrapped(X)) - plain).max() > 1e-2
    wrapped.deterministic = True
    np.testing.assert_allclose(wrapped(X), plain, rtol=1e-5, atol=1e-6)
    assert wrapped.set_view(deterministic=False, rate=1) == {"rate": 1}
    assert not wrapped.deterministic


def test_a_part_without_parameters_is_that_of_the_raw_model() -> None:
    plain = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
    wrapped = rpx.nnx.Parametrized(plain, rpx.WeightNorm())
    wrapped.layers[1].rate = 0.0
    assert wrapped.raw.layers[1] is wrapped.layers[1] is not plain.layers[1]
    np.testing.assert_allclose(wrapped(X), plain.layers[0](X), rtol=1e-5, atol=1e-6)


def test_one_parameter_at_two_paths_is_stored_once() -> None:
    plain: Any = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(2)))
    plain.layers[1].bias = plain.layers[0].bias
    wrapped = rpx.nnx.Parametrized(plain, rpx.WeightNorm())
    raw = nnx.to_pure_dict(nnx.state(wrapped))["raw"]["layers"]
    assert [list(raw[i]) for i in range(2)] == [["bias", "kernel"], ["kernel"]]
    effective = wrapped.effective()
    assert effective.layers[0].bias is effective.layers[1].bias


class WithNames(nnx.Module):
    """A model with attributes of the names of ours, and with what a call makes: a cache, a flag, a list."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))
        self.rngs = nnx.Rngs(dropout=0)
        self.deterministic = False
        self.cache = nnx.data(None)
        self.calls = 0
        self.held = nnx.data({"count": nnx.Variable(jnp.zeros(()))})

    def __call__(self) -> Array:
        self.calls += 1
        self.cache = nnx.Cache(self.w[...] * self.calls)
        self.held["count"][...] += 1
        return self.rngs.dropout() if not self.deterministic else self.w[...]


def test_what_a_call_sets_stays_and_names_of_ours_are_not_those_of_the_model() -> None:
    wrapped = rpx.nnx.Parametrized(WithNames(), rpx.Freeze())
    kept = wrapped.raw.held["count"]
    wrapped()
    wrapped()
    assert wrapped.raw.rngs.dropout.count[...] == 2
    assert wrapped.rngs is None
    assert (wrapped.raw.calls, wrapped.calls) == (2, 2)
    assert type(wrapped.raw.cache) is nnx.Cache
    np.testing.assert_array_equal(wrapped.raw.cache[...], 2 * np.ones(3))
    assert wrapped.raw.held["count"] is kept
    assert float(kept[...]) == 2
    assert list(nnx.state(wrapped.raw, rpx.nnx.Fixed)) == ["w"]
    wrapped.eval()
    np.testing.assert_array_equal(wrapped(), np.ones(3))


def test_a_cache_of_attention_is_that_of_the_model() -> None:
    plain = nnx.MultiHeadAttention(num_heads=1, in_features=3, qkv_features=4, decode=True, rngs=nnx.Rngs(0))
    wrapped = rpx.nnx.Parametrized(nnx.clone(plain), rpx.WeightNorm(where=".*kernel"))
    for each in (plain, wrapped):
        each.init_cache((2, 5, 3))
    step = nnx.jit(lambda plain, wrapped, x: (wrapped(x), plain(x)))
    for x in np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 2, 1, 3):
        np.testing.assert_allclose(*step(plain, wrapped, x), rtol=1e-4, atol=1e-6)
    assert wrapped.raw.cache_index[...] == 3


def test_copies_and_pickles_are_models_of_their_own() -> None:
    wrapped = rpx.nnx.Parametrized(model(), mlp.P)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), nnx.clone(wrapped)):
        np.testing.assert_array_equal(other(X), wrapped(X))
        other.raw.l1.bias[...] += 1
        np.testing.assert_allclose(wrapped.raw.l1.bias[...], mlp.B1, rtol=1e-6)


class Around(nnx.Module):
    """A plain model with a wrapped part, which it calls twice."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = rpx.nnx.Parametrized(nnx.Linear(3, 3, rngs=rngs), NOISY, rngs=rngs)
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.head(self.encoder(self.encoder(x)))


def test_a_wrapped_part_trains_in_a_plain_model_and_under_remat() -> None:
    around = Around(nnx.Rngs(0))
    around.eval()
    plain = around.encoder.fold()
    kernel, bias, head = (np.array(w[...]) for w in (plain.kernel, plain.bias, around.head.kernel))
    want = ((np.asarray(X) @ kernel + bias) @ kernel + bias) @ head
    np.testing.assert_allclose(nnx.jit(lambda around: around(X))(around), want, rtol=1e-4, atol=1e-6)
    around.train()
    grads = nnx.jit(nnx.grad(lambda around: jnp.sum(nnx.remat(lambda around: around(X))(around))))(around)
    assert len(jax.tree.leaves(grads)) == 5
    assert around.encoder.rngs.count[...] == 2


@nnx.vmap(in_axes=0)
def stack(key: Array) -> Any:
    streams = nnx.Rngs(params=key, noise=key)
    return rpx.nnx.Parametrized(nnx.Linear(3, 3, rngs=streams), NOISY, rngs=streams)


def test_wrapped_layers_are_made_by_vmap_and_run_by_scan() -> None:
    layers = stack(jax.random.split(jax.random.key(0), 5))
    layers.eval()

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer: Any, x: Array) -> Array:
        return layer(x)

    want = np.asarray(X)
    for w in np.asarray(layers.raw.kernel["@weight_norm"]["v"][...]):
        want = want @ w
    np.testing.assert_allclose(run(layers, X), want, rtol=1e-3, atol=1e-5)
    layers.train()
    assert np.abs(np.asarray(run(layers, X)) - want).max() > 1e-3


def test_named_axes_are_those_of_the_raw_values() -> None:
    linear = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
    linear.kernel.set_metadata(out_sharding=("in", "out"))
    wrapped = rpx.nnx.Parametrized(linear, rpx.WeightNorm(axis="out"))
    specs = nnx.get_partition_spec(nnx.state(wrapped))["raw"]["kernel"]["@weight_norm"]
    assert [tuple(jax.tree.leaves(specs[name], is_leaf=lambda x: isinstance(x, tuple))[0]) for name in "gv"] == [
        (None, "out"),
        ("in", "out"),
    ]


def test_checkpoints_are_raw_trees_and_go_both_ways() -> None:
    wrapped = rpx.nnx.Parametrized(model(), mlp.P)
    stored = nnx.to_pure_dict(nnx.state(wrapped.raw))
    functional = nnx.to_pure_dict(nnx.state(mlp.P.init(model())))
    jax.tree.map(np.testing.assert_array_equal, stored, functional)
    other = rpx.nnx.Parametrized(MLP(nnx.Rngs(1)), mlp.P)
    nnx.update(other.raw, functional)
    np.testing.assert_array_equal(other(X), wrapped(X))
    assert isinstance(other.raw.l1.kernel["@weight_norm"]["g"], nnx.Param)


class Graph(nnx.Module, pytree=False):
    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


class Whole(nnx.Module):
    def __init__(self) -> None:
        self.encoder = Graph()
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(0))


class Updated(nnx.Module):
    def update(self) -> int:
        return 0


class Effective(nnx.Module):
    @property
    def effective(self) -> int:
        return 0


class Tied(nnx.Module):
    """A matrix whose rows a product contracts, and a table of as many rows and columns."""

    def __init__(self, second: type[Any] = nnx.Embed) -> None:
        self.out = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
        self.second = second(4, 4, rngs=nnx.Rngs(0))
        setattr(self.second, "embedding" if second is nnx.Embed else "kernel", self.out.kernel)

    def __call__(self, x: Array) -> Array:
        return self.out(self.second(x))


@pytest.mark.parametrize(("p", "second"), [(rpx.WeightNorm(), nnx.Linear), (rpx.WeightNorm(axis=0), nnx.Embed)])
def test_a_parameter_of_two_layers_has_their_axes_or_those_that_are_given(p: Any, second: Any) -> None:
    raw = rpx.nnx.Parametrized(Tied(second), p).raw
    assert raw.out.kernel["@weight_norm"]["g"].shape == ((1, 4) if second is nnx.Linear else (4, 1))


def wrapped(p: Any = NOISY, **options: Any) -> Any:
    return rpx.nnx.Parametrized(model(), p, **options)


def without_bias() -> Any:
    """A raw model without a parameter that the model has."""
    raw: Any = mlp.P.init(model())
    del raw.l1.bias
    return raw


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case: Case) -> None:
    case.check(globals(), nn=nn)
