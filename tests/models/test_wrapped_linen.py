"""rpx.linen: a module that is its chain, in loops that own the loss."""

import copy
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import mlp
import numpy as np
import optax
from errors import Case, table
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax import Array

import reparax as rpx

NAMES = "kernel", "bias"
X, Y = mlp.data()
NOISY = rpx.WeightNorm() >> rpx.VarNoise(0.1)
FROZEN = rpx.Freeze(where="l1/.*") >> mlp.P


class MLP(nn.Module):
    width: int = 4

    def setup(self) -> None:
        self.l1 = nn.Dense(self.width)
        self.l2 = nn.Dense(2)

    def hidden(self, x: Array) -> Array:
        return nn.tanh(self.l1(x))

    def __call__(self, x: Array) -> Array:
        return self.l2(self.hidden(x))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, others: Any) -> Any:
    """The step of flax's guides, which knows of no chain."""
    TRACED.append(None)

    def loss(params: Any) -> Array:
        return mlp.mean_square(state.apply_fn({"params": params, **others}, X), Y)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


TRACED: list[None] = []


def test_train_state_trains_raw_values_and_compiles_once() -> None:
    module = rpx.linen.parametrized(MLP(), mlp.P)
    variables = module.start({"params": mlp.tree(*NAMES)})
    assert list(variables) == ["params"]
    state = TrainState.create(apply_fn=module.apply, params=variables["params"], tx=optax.sgd(mlp.RATE))
    losses = []
    for _ in range(mlp.STEPS):
        state, loss = train_step(state, {})
        losses.append(loss)
    assert len(TRACED) == 1
    trained = module.fold({"params": state.params})["params"]
    mlp.assert_trained(losses, mlp.values(trained, *NAMES))
    stored = serialization.from_bytes(mlp.P.init(mlp.tree(*NAMES)), serialization.to_bytes(state.params))
    mlp.P.check(stored, like=mlp.tree(*NAMES))


def test_a_bare_adamw_moves_what_trains_and_no_bit_of_the_rest() -> None:
    p = rpx.Freeze(where="l1/.*") >> rpx.SpectralNorm(where="l2/kernel")
    module = rpx.linen.parametrized(MLP(), p)
    variables = module.start({"params": mlp.tree(*NAMES)})
    assert list(variables["fixed"]) == ["l1", "l2"]
    assert jax.tree.map(np.shape, variables["params"]) == {
        "l2": {"bias": (2,), "kernel": {"@spectral_norm": {"w": (4, 2)}}}
    }
    state = TrainState.create(apply_fn=module.apply, params=variables["params"], tx=optax.adamw(0.1, weight_decay=0.5))
    with jax.numpy_dtype_promotion("standard"):  # for Adam's counter
        state, _ = train_step(state, {"fixed": variables["fixed"]})
    trained = module.fold({**variables, "params": state.params})["params"]
    np.testing.assert_array_equal(trained["l1"]["kernel"], np.float32(mlp.W1))
    moved = {**variables, "params": state.params}
    node = {**module.raw(moved)["l2"]["kernel"]["@spectral_norm"]}
    p.check(module.raw(moved), like=mlp.tree(*NAMES))
    u = np.asarray(node["w"]).T @ np.asarray(node["@fixed"]["v"])
    advanced = module.update(moved)["fixed"]["l2"]["kernel"]["@spectral_norm"]["@fixed"]["u"]
    np.testing.assert_allclose(advanced, u / np.linalg.norm(u), rtol=1e-4)


class WithState(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        self.sow("intermediates", "x", x)
        return nn.Dropout(0.5, deterministic=False)(x)


def test_init_and_apply_are_those_of_the_module_with_the_effective_tree(key: Array) -> None:
    module = rpx.linen.parametrized(WithState(), NOISY)
    rngs = {"params": key, "dropout": jax.random.key(1), "noise": jax.random.key(2)}

    @jax.jit
    def run() -> Any:
        plain, variables = WithState().init(rngs, X), module.init(rngs, X)
        raw = NOISY.init(plain["params"])
        got = module.apply(variables, X, rngs=rngs, mutable=["batch_stats", "intermediates"])
        effective = {**plain, "params": NOISY.apply(raw, rngs["noise"])}
        want = WithState().apply(effective, X, rngs=rngs, mutable=["batch_stats", "intermediates"])
        return (module.raw(variables), got), (raw, want)

    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7), *run())


def test_methods_and_fields_are_those_of_the_module() -> None:
    module = rpx.linen.parametrized(MLP(), mlp.P)
    variables = module.start({"params": mlp.tree(*NAMES)})
    w1, b1 = np.float32(mlp.W1), np.float32(mlp.B1)
    want = np.tanh(np.asarray(X) @ w1 + b1)
    assert module.width == 4
    np.testing.assert_allclose(module.apply(variables, X, method="hidden"), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.bind(variables).hidden(X), want, rtol=1e-5, atol=1e-6)


class Members(nn.Module):
    """What classes of modules have beside fields and methods."""

    width = 4

    @property
    def double(self) -> int:
        return 2 * self.width

    @staticmethod
    def constant() -> int:
        return 1

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @nn.nowrap
    def helper(self) -> int:
        return self.width + 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(2)(x)


def test_members_that_read_no_parameters_are_those_of_the_module(key: Array) -> None:
    module = rpx.linen.parametrized(Members(), mlp.P)
    assert (module.width, module.double, module.constant(), module.named(), module.helper()) == (4, 8, 1, "Members", 5)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other == module
    variables = module.init(key, X)
    out, made = module.apply(variables, X, capture_intermediates=True, mutable=["intermediates"])
    np.testing.assert_array_equal(made["intermediates"]["__call__"][0], out)


def test_a_method_may_be_given_as_a_function_of_the_class() -> None:
    module = rpx.linen.parametrized(MLP(), mlp.P)
    variables = module.start({"params": mlp.tree(*NAMES)})
    want = module.apply(variables, X, method="hidden")
    for method in (MLP.hidden, lambda module, x: module.hidden(x)):
        np.testing.assert_array_equal(module.apply(variables, X, method=method), want)
    made = module.init(jax.random.key(0), X, method=MLP.hidden)
    assert list(made["params"]) == ["l1"]


class OwnFixed(nn.Module):
    """A module with a wrapped part whose values do not train."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return nn.Dense(2)(rpx.linen.parametrized(nn.Dense(3, parent=None), rpx.Freeze())(x))


class Started(nn.Module):
    def start(self) -> int:
        return 0


def wrapped(p: rpx.Parametrization = FROZEN) -> Any:
    return rpx.linen.parametrized(MLP(), p)


def started(p: rpx.Parametrization = FROZEN) -> Any:
    return wrapped(p).start({"params": mlp.tree(*NAMES)})


def test_without_noise_a_module_computes_what_the_plain_one_does() -> None:
    plain: Any = MLP().apply({"params": mlp.tree(*NAMES)}, X)
    np.testing.assert_allclose(wrapped(NOISY).deterministic.apply(started(NOISY), X), plain, rtol=1e-5, atol=1e-6)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case: Case) -> None:
    case.check(globals(), nnx=nnx, params=mlp.tree(*NAMES))
