"""Programs of nnx on a wrapped model: they do what they do on the plain one, or are refused, and nothing is lost."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from grids import mostly_thorough
from jax import Array

import reparax as rpx

X = jnp.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), np.float32)
ZEROS = jnp.asarray(np.zeros((3, 3), np.float32), np.float32)
SAME = rpx.numbers.Elementwise(lambda x: x, lambda w: w, where=".*kernel")  # trains as the plain model does
Program = Callable[[Any], Any]


class Block(nnx.Module):
    """A layer that counts its calls, and remembers what it computed."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.calls = 0
        self.memory = nnx.data(None)

    def __call__(self, x: Array) -> Array:
        self.calls += 1
        y = self.linear(x) if self.memory is None else self.linear(x) + self.memory[...]
        self.memory = nnx.data(nnx.Cache(y))
        return y

    def decay(self) -> None:
        self.linear.kernel[...] *= jnp.float32(0.5)

    def grow(self) -> None:
        self.extra = nnx.Param(jnp.ones(3))

    def restore(self) -> None:
        nnx.update(self.linear, {"kernel": ZEROS})

    def restore_by_state(self) -> None:
        nnx.update(self, jax.tree.map(jnp.zeros_like, nnx.state(self.linear)))

    def restore_in_jit(self) -> None:
        nnx.jit(lambda linear: nnx.update(linear, nnx.state(linear)))(self.linear)

    def replace(self) -> None:
        self.linear.kernel.set_raw_value(ZEROS)

    def learn(self) -> None:
        optimizer = nnx.Optimizer(self.linear, optax.sgd(0.1), wrt=nnx.Param)
        optimizer.update(self.linear, nnx.grad(lambda linear: linear(X).sum())(self.linear))

    def transformed(self, x: Array) -> Array:
        """The layer in transforms that return what they took, and with other values that it does not hold."""
        y = nnx.jit(lambda linear, x: nnx.remat(lambda linear, x: linear(x))(linear, x))(self.linear, x)
        y = nnx.scan(lambda linear, x: (linear, linear(x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
            self.linear, y[None]
        )[1][0]
        graph, state = nnx.split(self.linear)
        grads = nnx.grad(lambda linear: (linear(x) ** 2).sum())(self.linear)
        return y + nnx.merge(graph, jax.tree.map(lambda w, g: w - g / 8, state, grads))(x)

    def swap(self) -> None:
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(1))


class Net(nnx.Module):
    """A module at two places, statistics, a counter, a list, a dict, a flag, and what a call records."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = Block(rngs)
        self.again = self.first
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.heads = nnx.data({"one": nnx.Linear(3, 2, rngs=rngs)})
        self.count = nnx.Variable(jnp.zeros(()))
        self.flag = "on"

    def __call__(self, x: Array) -> Array:
        self.count[...] += 1
        y = self.norm(self.again(self.first(x)))
        for layer in self.layers:
            y = nnx.tanh(layer(y))
        self.seen = nnx.Intermediate(y)
        return self.heads["one"](y) * self.first.calls if self.flag == "on" else y

    @property
    def kernel(self) -> Array:
        return self.first.linear.kernel[...]

    @property
    def encoder(self) -> Block:
        return self.again

    def halve(self) -> None:
        self.first.decay()


class Layer(nnx.Module):
    """A layer with statistics, and a flag that a call may set."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Array) -> Array:
        self.count[...] += 1
        return nnx.tanh(self.linear(x)) + self.count[...]


def then_call(change: Program) -> Program:
    """The output after a change."""

    def program(model: Any) -> Any:
        change(model)
        return model(X)

    return program


def over_list(model: Any) -> Array:
    y = X
    for layer in model.layers:
        y = layer(y)
    return y


def step(model: Any, part: Callable[[Any], Any] = lambda model: model) -> Any:
    """Two steps of an optimizer, and the loss of each."""
    optimizer = nnx.Optimizer(part(model), optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def train(model: Any, optimizer: Any) -> Array:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(X) ** 2))(model)
        optimizer.update(part(model), grads)
        return loss

    return [train(model, optimizer) for _ in range(2)]


def in_scan(model: Any) -> Array:
    model(X)  # makes the memories

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(model: Any, x: Array) -> tuple[Any, Array]:
        return model, model(x)

    model.flag = "off"
    model.first.calls = 0
    return run(model, jnp.stack([X, 2 * X]))[1]


def in_vmap(model: Any) -> Array:
    model.eval()
    model.first.memory = nnx.data(None)
    state_axes = nnx.StateAxes({...: None})
    return nnx.vmap(lambda model, x: model.heads["one"](x), in_axes=(state_axes, 0))(model, X)


def in_loop(model: Any) -> Array:
    return nnx.fori_loop(0, 3, lambda _, both: (both[0], both[1] + both[0].layers[0](X)), (model, X))[1]


def in_cond(model: Any) -> Array:
    return nnx.cond(jnp.array(1) > 0, lambda model: model.layers[0](X), lambda model: model.layers[1](X), model)


def after_split(model: Any) -> Array:
    graph, state = nnx.split(model)

    @jax.jit
    def run(state: Any) -> Any:
        merged = nnx.merge(graph, state)
        return merged(X), nnx.state(merged, nnx.BatchStat)

    out, statistics = run(state)
    nnx.update(model, statistics)
    return out


def popped(model: Any) -> Any:
    model(X)
    return jax.tree.leaves(nnx.pop(model, nnx.Intermediate))


def remembered(model: Any) -> Any:
    """The cache after two jitted calls of a part inside of the whole."""
    jitted = nnx.jit(lambda model, x: model.first(x))
    first = jitted(model, X)
    return first, jitted(model, X), model.first.memory[...]


def other() -> Net:
    return Net(nnx.Rngs(9))


AS_PLAIN: dict[str, Program] = {
    "a call": lambda model: model(X),
    "two calls": lambda model: (model(X), model(X), model.first.calls, model.again.calls),
    "a part": lambda model: (model.first(X), model.again(X), model.first.calls),
    "a part of a part": lambda model: model.first.linear(X),
    "an item of a list": lambda model: model.layers[1](X),
    "the last item": lambda model: model.layers[-1](X),
    "a loop over a list": over_list,
    "the length of a list": lambda model: (len(model.layers), model.layers[0].out_features),
    "an item of a dict": lambda model: model.heads["one"](X),
    "a property that is an array": lambda model: model.kernel,
    "a property that is a part": lambda model: (model.encoder(X), model.encoder(X), model.first.calls),
    "a weight": lambda model: (model.first.linear.kernel[...], model.layers[0].bias.get_value()),
    "a jitted part by its method": lambda model: jax.jit(model.layers[0])(X),
    "a counter": then_call(lambda model: setattr(model.first, "calls", 7)),
    "a counter by the other name": then_call(lambda model: setattr(model.again, "calls", 7)),
    "a flag": then_call(lambda model: setattr(model, "flag", "off")),
    "a new flag": then_call(lambda model: setattr(model.first, "speed", 3)),
    "a memory": then_call(lambda model: setattr(model.first, "memory", nnx.data(nnx.Cache(X)))),
    "a flag of a layer with parameters": then_call(lambda model: setattr(model.norm, "use_running_average", True)),
    "statistics": then_call(lambda model: model.norm.mean.set_value(jnp.ones(3))),
    "a variable": then_call(lambda model: model.count.set_value(jnp.array(5.0))),
    "eval": then_call(lambda model: model.eval()),
    "eval of a part": then_call(lambda model: model.norm.eval()),
    "set_attributes of a part": then_call(lambda model: model.first.set_attributes(calls=3, raise_if_not_found=False)),
    "what a call records": popped,
    "transforms in a call": lambda model: model.first.transformed(X),
    "transforms in a jitted call": lambda model: nnx.jit(lambda model: model.first.transformed(X))(model),
    "transforms in a gradient": lambda model: nnx.value_and_grad(lambda model: model.first.transformed(X).sum())(model)[
        0
    ],
    "a jitted call": lambda model: [nnx.jit(lambda model: model(X))(model) for _ in range(2)],
    "a jitted part and its cache": remembered,
    "jit that sets a counter": then_call(nnx.jit(lambda model: setattr(model.first, "calls", 4))),
    "jit that sets statistics": then_call(nnx.jit(lambda model: model.norm.mean.set_value(jnp.ones(3)))),
    "training": step,
    "remat": lambda model: nnx.remat(lambda model, x: model(x))(model, X),
    "scan": in_scan,
    "vmap": in_vmap,
    "fori_loop": in_loop,
    "cond": in_cond,
    "split and merge": after_split,
    "a clone": lambda model: (nnx.clone(model)(X), model.first.calls),
    "a view": lambda model: nnx.view(model, use_running_average=True)(X),
    "a state that is put back": then_call(lambda model: nnx.update(model, nnx.state(model))),
}

REFUSED: dict[str, Program] = {
    "update": lambda model: nnx.update(model.first, nnx.state(other().first)),
    "update by a dict": lambda model: nnx.update(model.first, {"linear": {"kernel": ZEROS}}),
    "update by its own state": lambda model: nnx.update(model.norm, nnx.state(model.norm)),
    "update of a weight": lambda model: nnx.update(model.first.linear.kernel, nnx.Param(ZEROS)),
    "copy_from": lambda model: model.first.linear.kernel.copy_from(nnx.Param(ZEROS)),
    "update_from_state": lambda model: model.first.linear.kernel.update_from_state(nnx.Param(ZEROS)),
    "set_value": lambda model: model.first.linear.kernel.set_value(ZEROS),
    "an item of a weight": lambda model: model.layers[0].kernel.__setitem__(0, 1.0),
    "a weight of a weight that no stage replaces": lambda model: model.norm.scale.set_value(jnp.zeros(3)),
    "another weight": lambda model: setattr(model.first.linear, "kernel", nnx.Param(ZEROS)),
    "another layer": lambda model: setattr(model.first, "linear", nnx.Linear(3, 3, rngs=nnx.Rngs(1))),
    "no layer": lambda model: setattr(model.first, "linear", None),
    "a new weight": lambda model: setattr(model.first, "extra", nnx.Param(ZEROS)),
    "a new weight of the whole": lambda model: setattr(model, "extra", nnx.Param(ZEROS)),
    "a new layer in a list": lambda model: model.layers.append(nnx.Linear(3, 3, rngs=nnx.Rngs(1))),
    "another layer in a list": lambda model: model.layers.__setitem__(0, nnx.Linear(3, 3, rngs=nnx.Rngs(1))),
    "a part in another part": lambda model: setattr(model.first, "friend", model.layers[0]),
    "a part in another model": lambda model: nnx.Sequential(model.first, nnx.relu),
    "a call that sets a weight": lambda model: model.halve(),
    "a call of a part that sets a weight": lambda model: model.first.decay(),
    "a call that updates a part": lambda model: model.first.restore(),
    "a call that updates itself by a state": lambda model: model.first.restore_by_state(),
    "a call that updates in jit": lambda model: model.first.restore_in_jit(),
    "a jitted call that updates a part": lambda model: nnx.jit(lambda model: model.first.restore())(model),
    "a call that sets a raw value": lambda model: model.first.replace(),
    "a call that trains": lambda model: model.first.learn(),
    "a call that makes a weight": lambda model: model.first.grow(),
    "a call that makes a layer": lambda model: model.first.swap(),
    "a jitted call that sets a weight": lambda model: nnx.jit(lambda model: model.halve())(model),
    "jit of a part": lambda model: nnx.jit(lambda part: part(X))(model.first),
    "grad of a part": lambda model: nnx.grad(lambda part: part(X).sum())(model.first),
    "scan of a part": lambda model: nnx.scan(lambda part, x: (part, x), in_axes=(nnx.Carry, 0))(model.first, X),
    "vmap of a part": lambda model: nnx.vmap(lambda part, x: part(x), in_axes=(None, 0))(model.first, X),
    "an optimizer of a part": lambda model: step(model, lambda model: model.layers[0]),
    "the state of a part": lambda model: nnx.state(model.first),
    "the split of a part": lambda model: nnx.split(model.first),
    "a clone of a part": lambda model: nnx.clone(model.first),
    "pop from a part": lambda model: nnx.pop(model.first, nnx.Intermediate),
    "a tree of a part": lambda model: jax.tree.map(jnp.zeros_like, model.first),
}


def wrapped(p: Any = SAME) -> Any:
    return rpx.nnx.Parametrized(Net(nnx.Rngs(0)), p)


def left(model: Any) -> Any:
    """What the model holds: values of its variables, and attributes, where it folds to the plain one."""
    graph, state = nnx.split(model.fold() if isinstance(model, rpx.nnx.Parametrized) else model)
    return nnx.to_pure_dict(state), [type(node) for _, node in nnx.iter_graph(nnx.merge(graph, state))]


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(y, type | str):
            assert x == y
        else:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


OFTEN = ("two calls", "a part", "a memory", "training", "the length of a list", "a loop over a list", "eval of a part")
OFTEN += ("a flag of a layer with parameters", "transforms in a call", "a property that is a part")
QUICK = mostly_thorough(list(AS_PLAIN), *OFTEN)


@pytest.mark.parametrize("name", QUICK)
def test_a_program_does_what_it_does_with_the_plain_model(name: str) -> None:
    plain, ours = Net(nnx.Rngs(0)), wrapped()
    assert_same(AS_PLAIN[name](ours), AS_PLAIN[name](plain))
    assert_same(left(ours), left(plain))


@pytest.mark.parametrize("name", mostly_thorough(list(REFUSED), "update", "copy_from", "a call that makes a weight"))
def test_what_would_be_lost_is_refused_and_changes_nothing(name: str) -> None:
    ours = wrapped()
    before = left(ours)
    with pytest.raises((TypeError, ValueError), match=re.escape("rpx.nnx.Parametrized")):
        REFUSED[name](ours)
    after = left(ours)
    assert_same(after, before)
