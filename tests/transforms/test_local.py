"""Each example has noise of its own: means, variances and covariances against whole weights drawn for each example."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import effective, init
from errors import table
from grids import mostly_thorough
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from samples import ERRORS, N, assert_alike

import reparax as rpx
from reparax.core import random
from reparax.core.random import DRAW
from reparax.programs import jaxprs
from reparax.transforms import _local, local_reparametrization

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.float32)


NOISE = rpx.VarNoise(0.3)


@dataclass(frozen=True)
class Case:
    """A network, its weights, one example, and the noise.

    Attributes:
      network: Of weights and of a batch of examples, which is the first axis.
      weights: The weights.
      x: One example.
      p: The noise.
      whole: The network of weights that are drawn for each use, which its last argument draws; None for one draw.
    """

    network: Callable[..., Any]
    weights: Any
    x: Any
    p: rpx.Parametrization = NOISE
    whole: Callable[..., Any] | None = None


def dense(w, x):
    return x @ w["w"] + w["b"][None]


DENSE = {"w": normal(5, 3), "b": normal(3, seed=1)}


def two_layers(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def scanned(w, x):
    return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w["w"])[0]


def heads(w, x):
    q, k = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qk")
    return jnp.einsum("bthk,bshk->bhts", q, k)


def out_of_heads(w, x):
    return jnp.einsum("bthk,hkd->btd", x, w["w"])


def convolution(**settings):
    def network(w, x):
        y = jax.lax.conv_general_dilated(x, w["w"], dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)
        return y + w["b"][None, None, None]

    return network


def kernel(*shape):
    return {"w": normal(*shape), "b": normal(shape[-1], seed=1)}


IMAGE = normal(5, 5, 4, seed=2)


def embedded(w, ids):
    return w["table"][ids] + w["place"][None]


TABLE = {"table": normal(6, 3), "place": normal(2, 3, seed=1)}


def in_time(w, xs, draw):
    """A loop in time by hand, in which each step draws."""
    h = jnp.zeros((xs.shape[0], 3))
    for i in range(xs.shape[1]):
        h = jnp.tanh(h @ draw(i)["w"] + xs[:, i])
    return h


def recurrent(w, xs):
    h = jnp.zeros((xs.shape[0], 3))
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w["w"] + x), None), h, xs.swapaxes(0, 1))[0]


def tied(w, ids):
    return jnp.tanh(w["table"][ids]) @ w["table"].T


EACH = rpx.Gaussian(0.3)
CASES = {
    "dense": Case(dense, DENSE, normal(5, seed=2)),
    "dense, a spread for each": Case(dense, DENSE, normal(5, seed=2), EACH),
    "dense, a spread for each column": Case(dense, DENSE, normal(5, seed=2), rpx.Gaussian(0.3, axis=-1)),
    "dense, pruned": Case(dense, DENSE, normal(5, seed=2), rpx.noise.VariationalDropout(0.3)),
    "dense, relative": Case(dense, DENSE, normal(5, seed=2), rpx.VarNoise(0.3, relative="std", axis=-1)),
    "two noises": Case(dense, DENSE, normal(5, seed=2), EACH >> rpx.VarNoise(0.2)),
    "pruned later": Case(dense, DENSE, normal(5, seed=2), NOISE >> rpx.MagnitudePruning(0.3)),
    "two layers": Case(two_layers, {"a": normal(4, 3), "b": normal(3, 2, seed=1)}, normal(4, seed=2), EACH),
    "scan over layers": Case(scanned, {"w": normal(3, 4, 4)}, normal(4, seed=2), EACH),
    "heads": Case(heads, {"q": normal(3, 2, 4), "k": normal(3, 2, 4, seed=1)}, normal(2, 3, seed=2), EACH),
    "out of heads": Case(out_of_heads, {"w": normal(2, 3, 4)}, normal(2, 2, 3, seed=2)),
    "convolution": Case(convolution(window_strides=(1, 1), padding="SAME"), kernel(3, 3, 4, 2), IMAGE, EACH),
    "stride": Case(convolution(window_strides=(2, 1), padding="VALID"), kernel(3, 2, 4, 2), IMAGE),
    "groups": Case(
        convolution(window_strides=(1, 1), padding="VALID", feature_group_count=2), kernel(3, 3, 2, 4), IMAGE
    ),
    "groups, a spread for each": Case(
        convolution(window_strides=(1, 1), padding="VALID", feature_group_count=2), kernel(3, 3, 2, 4), IMAGE, EACH
    ),
    "dilation": Case(
        convolution(window_strides=(1, 1), padding="SAME", rhs_dilation=(2, 1)), kernel(2, 3, 4, 2), IMAGE, EACH
    ),
    "embedding": Case(embedded, TABLE, np.int32([4, 1]), EACH),
    "embedding, one spread": Case(embedded, TABLE, np.int32([4, 1])),
    "tied": Case(
        tied,
        {"table": normal(6, 3)},
        np.array(4, np.int32),
        EACH,
        lambda w, ids, draw: jnp.tanh(draw(0)["table"][ids]) @ draw(1)["table"].T,
    ),
    "scan over time": Case(recurrent, {"w": normal(3, 3)}, normal(4, 3, seed=2), EACH, in_time),
    "square": Case(lambda w, x: x @ w["w"], {"w": normal(8, 8)}, normal(8, seed=2), EACH),
}
TRANSFORMED = {
    "remat": lambda f: jax.jit(rpx.remat(f)),
    "factored": lambda f: jax.jit(rpx.factored(f)),
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
}


def noisy(case):
    """The network of raw values, a key and a batch."""
    return lambda raw, key, x: case.network(case.p.apply(raw, key), x)


def wide(name):
    """A case with its raw values and a batch."""
    case = CASES[name]
    return case, init(case.p, case.weights), np.broadcast_to(case.x, (N, *case.x.shape))


def flat(y):
    return np.asarray(y, np.float64).reshape(len(y), -1)


@functools.cache
def whole_draws(name):
    """The results of one example with weights drawn for it, ``N`` times."""
    case, raw, _ = wide(name)

    def one(key):
        if case.whole is None:
            return noisy(case)(raw, key, case.x[None])[0]
        keys = jax.random.split(key, 8)
        return case.whole(None, case.x[None], lambda i: case.p.apply(raw, keys[i]))[0]

    return flat(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), N)))


@functools.cache
def own_draws(name, transform=jax.jit):
    """The results of ``N`` equal examples."""
    case, raw, x = wide(name)
    return flat(transform(local_reparametrization(noisy(case)))(raw, KEY, x))


@pytest.mark.parametrize("name", mostly_thorough(CASES, "two noises", "scan over layers", "embedding"))
def test_each_example_has_noise_of_its_own(name):
    assert_alike(own_draws(name), whole_draws(name))


# How many rows of seven examples draw for each weight, in the order of the program.
DRAWING = {
    "dense": ["7", "7"],
    "scan over layers": ["7"],
    "heads": ["14", "14"],
    "convolution": ["175", "175"],
    "groups": ["63", "63"],
    "embedding": ["14", "7"],
    "scan over time": ["28"],
}


@pytest.mark.parametrize("name", DRAWING)
def test_the_report_counts_the_rows_that_draw(name):
    case = CASES[name]
    raw, x = jax.eval_shape(case.p.init, case.weights), np.broadcast_to(case.x, (7, *case.x.shape))
    report = rpx.explain(local_reparametrization(noisy(case)), raw, KEY, x)
    assert [each.reason for each in report.weights] == [f"1 use, {n} rows" for n in DRAWING[name]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", mostly_thorough(["dense", "dense, a spread for each", "two layers", "scan over layers"], "two layers")
)
def test_entries_of_one_row_covary_as_with_whole_weights(name):
    got, want = own_draws(name), whole_draws(name)
    products = [(x - x.mean(0))[:, :, None] * (x - x.mean(0))[:, None, :] for x in (got, want)]
    error = np.sqrt(sum(each.var(0) for each in products) / N)
    assert np.all(np.abs(products[0].mean(0) - products[1].mean(0)) <= ERRORS * error)


@pytest.mark.parametrize("name", ["dense", "dense, a spread for each"])
def test_moments_are_those_of_the_closed_form(name):
    case, got = CASES[name], own_draws(name)
    x, w, b = (np.asarray(each, np.float64) for each in (case.x, case.weights["w"], case.weights["b"]))
    variance = 0.09 * (np.sum(x**2) + 1)
    assert np.all(np.abs(got.mean(0) - (x @ w + b)) <= ERRORS * np.sqrt(variance / N))
    assert np.all(np.abs(got.var(0) - variance) <= ERRORS * variance * np.sqrt(2 / N))


OF_EACH_KIND = ("dense", "two noises", "scan over layers", "heads", "groups", "embedding", "tied", "scan over time")


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "transform"), [*zip(OF_EACH_KIND, itertools.cycle(TRANSFORMED))])
def test_under_transformations(name, transform):
    assert_alike(own_draws(name, TRANSFORMED[transform]), whole_draws(name))


# ---- numbers


NUMBERS = {
    "1 + w": (lambda w, _: 1 + w, 1, 1),
    "w + 1": (lambda w, _: w + 1, 1, 1),
    "1 - w": (lambda w, _: 1 - w, -1, 1),
    "w - 0.5": (lambda w, _: w - 0.5, 1, -0.5),
    "w / 2": (lambda w, _: w / 2, 0.5, 0),
    "2 * w": (lambda w, _: 2 * w, 2, 0),
    "a number of the tree": (lambda w, n: w * n + n, 3, 3),
    "a number of fewer digits": (lambda w, n: w + n.astype(jnp.bfloat16).astype(jnp.float32), 1, 3),
    "an array of one number": (lambda w, n: n[None, None] + w, 1, 3),
    "a row of ones": (lambda w, _: w + jnp.ones((1, w.shape[1])), 1, 1),
    "a column of ones": (lambda w, _: jnp.ones((w.shape[0], 1)) - w, -1, 1),
    "a choice by one flag": (lambda w, n: jnp.where(n > 0, w, 0.0), 1, 0),
    "a choice of a number": (lambda w, n: jnp.where(jnp.arange(w.shape[0])[:, None] >= 0, w, n), 1, 0),
    "in a call": (lambda w, n: jax.jit(lambda w, n: n - w)(w, n), -1, 3),
}
"""What is made of a noisy weight with a number, which gives ``a w + b``."""


@pytest.mark.thorough
def test_numbers_leave_each_example_its_own_noise():
    x, w = normal(4, seed=2), normal(4, 3)
    weights = {"w": [[w for _ in NUMBERS] for _ in range(2)], "n": jnp.float32(3)}

    def network(weights, key, x):
        (gains, products), n = NOISE.apply(weights["w"], key), weights["n"]
        changes = [(name, change) for name, (change, *_) in NUMBERS.items()]
        return (
            {name: x * change(w, n)[:, 0][None] for w, (name, change) in zip(gains, changes, strict=True)},
            {name: x @ change(w, n) for w, (name, change) in zip(products, changes, strict=True)},
        )

    gains, products = jax.jit(local_reparametrization(network))(weights, KEY, np.broadcast_to(x, (N, 4)))
    two = np.broadcast_to(x, (2, 4))
    x, w = (np.asarray(each, np.float64) for each in (x, w))
    for name, (_, a, b) in NUMBERS.items():
        for got, mean, variance in (
            (gains[name], x * (a * w + b)[:, 0], (0.3 * a * x) ** 2),
            (products[name], x @ (a * w + b), np.sum((0.3 * a * x) ** 2)),
        ):
            assert np.all(np.abs(flat(got).mean(0) - mean) <= ERRORS * np.sqrt(variance / N)), name
            assert np.all(np.abs(flat(got).var(0) - variance) <= ERRORS * variance * np.sqrt(2 / N)), name
    report = rpx.explain(local_reparametrization(network), weights, KEY, two)
    assert all(each.is_transformed for each in report.weights)


# ---- weights that data change


ONE, MASK, MIX = (np.asarray(each) for each in (normal(4, seed=2), normal(4, 3, seed=3), normal(4, seed=4)))
DATA = {"scale": np.float32(2.0), "mask": MASK, "mix": MIX, "place": np.int32(1)}


def columns(a):
    """The slope of each column's sum of the entries of a weight, times ``a``."""
    return np.asarray(a, np.float64)[None] * np.eye(a.shape[1])[:, None]


def of_row(i, a):
    """The slope of ``a`` times each entry of a row."""
    return columns(np.eye(4)[i][:, None] * np.full(3, a))


def stacked(slope):
    """The slope of the second of two weights."""
    return np.stack([np.zeros_like(slope), slope], 1)


def rounded(w, x, d):
    """A product of whole numbers, as with weights of few bits."""
    scale = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    return (jnp.round(x / scale) @ (w / d["scale"])) * (scale * d["scale"])


X0, EACH_X, LARGEST = ONE[0], ONE[:, None], np.max(np.abs(ONE))
MADE = {
    "scaled": (lambda w, x, d: x @ (w * d["scale"]), columns(EACH_X * 2 * np.ones(3))),
    "masked": (lambda w, x, d: x @ (w * d["mask"]), columns(EACH_X * MASK)),
    "scaled along one axis": (lambda w, x, d: x @ (w * d["mask"][:, :1]), columns(EACH_X * MASK[:, :1] * np.ones(3))),
    "rounded": (rounded, columns(np.rint(EACH_X / LARGEST) * LARGEST * np.ones(3))),
    "chosen": (lambda w, x, d: x @ jnp.where(d["mask"] > 0, w, 0), columns(EACH_X * (MASK > 0))),
    "normed": (
        lambda w, x, d: x @ (w / jnp.sqrt(jnp.mean(x**2))),
        columns(EACH_X * np.full(3, np.mean(np.square(ONE)) ** -0.5)),
    ),
    "moved": (lambda w, x, d: x @ (w + d["mask"]) - x @ d["mask"], columns(EACH_X * np.ones(3))),
    "summed": (lambda w, x, d: jnp.einsum("bi,io->b", x, w)[:, None], (EACH_X * np.ones(3))[None]),
    "one row": (lambda w, x, d: x[:, :1] * w[d["place"]][None], of_row(1, X0)),
    "one row, taken": (lambda w, x, d: x[:, :1] * jnp.take(w, d["place"], axis=0)[None], of_row(1, X0)),
    "one of two": (lambda w, x, d: x @ w[d["place"]], stacked(columns(EACH_X * np.ones(3)))),
    "the same one of two": (
        lambda w, x, d: jnp.einsum("bi,bio->bo", x, w[jnp.full(len(x), d["place"])]),
        stacked(columns(EACH_X * np.ones(3))),
    ),
    "mixed": (lambda w, x, d: x[:, :1] * (d["mix"] @ w)[None], columns(X0 * MIX[:, None] * np.ones(3))),
    "mixed by constants": (lambda w, x, d: x[:, :1] * (ONE @ w)[None], columns(X0 * EACH_X * np.ones(3))),
    "mixed and scaled": (
        lambda w, x, d: x[:, :1] * ((d["mix"] @ w) * d["scale"])[None],
        columns(2 * X0 * MIX[:, None] * np.ones(3)),
    ),
    "in a loop over examples": (
        lambda w, x, d: jax.lax.map(lambda x: x * w[:, 0], x),
        np.eye(4)[:, :, None] * np.stack([ONE, np.zeros(4), np.zeros(4)], 1),
    ),
}
"""What is made of a weight with data, and the slope of each entry of its result for one example, by closed form."""


def test_what_has_no_row_is_still_a_weight():
    weights = {name: normal(*slope.shape[1:], seed=i) for i, (name, (_, slope)) in enumerate(MADE.items())}

    def network(weights, key, x, data):
        w = NOISE.apply(weights, key)
        return {name: network(w[name], x, data) for name, (network, _) in MADE.items()}

    args = weights, KEY, np.broadcast_to(ONE, (N, 4)), DATA
    found = jax.jit(local_reparametrization(network))(*args)
    for name, (_, slope) in MADE.items():
        got, variance = flat(found[name]), np.sum(np.square(0.3 * slope), axis=tuple(range(1, slope.ndim)))
        mean = np.tensordot(slope, np.asarray(weights[name], np.float64), slope.ndim - 1)
        assert np.all(np.abs(got.mean(0) - mean) <= ERRORS * np.sqrt(variance / N) + 1e-5), name
        assert np.all(np.abs(got.var(0) - variance) <= ERRORS * variance * np.sqrt(2 / N)), name
        centred = (got - got.mean(0)) / got.std(0)
        assert np.all(np.abs(np.mean(centred[1:] * centred[:-1], 0)) <= ERRORS / np.sqrt(N)), name
    report = rpx.explain(local_reparametrization(network), *args)
    assert {each.reason for each in report.weights if each.is_transformed} == {f"1 use, {N} rows"}
    assert len(report.weights) == len(MADE)


def test_a_batch_may_be_a_weights_other_side():
    """No type tells the rows of a matrix that multiplies a weight from examples, so the report says how many."""

    def network(weights, key, a, x):
        return x @ (a @ NOISE.apply(weights, key)["w"])

    (weight,) = rpx.explain(local_reparametrization(network), {"w": SQUARE}, KEY, normal(2, 3), normal(7, 2)).weights
    assert weight.reason == "1 use, 2 rows"


# ---- gradients that the loss takes


def homogeneous(weights, x):
    """Of degree 2 in x."""
    return (x @ weights["w"]) ** 2 @ weights["v"]


def network_with_biases(weights, x):
    return jnp.tanh(jnp.tanh(x @ weights["w"] + weights["b"][None]) @ weights["u"] + weights["c"][None]) @ weights["v"]


def identity_of_euler(draw, weights, x):
    """Zero for any weights, if both see the same."""
    gradient = jax.grad(lambda x: jnp.sum(homogeneous(draw(weights), x)))(x)
    return jnp.sum(x * gradient, 1) - 2 * homogeneous(draw(weights), x)


def identity_of_gains(draw, weights, x):
    value, pull = jax.vjp(lambda x: jnp.sum((x * draw(weights)["v"][None]) ** 2, 1), x)
    return jnp.sum(x * pull(jnp.ones_like(value))[0], 1) - 2 * value


def identity_of_images(draw, weights, x):
    def value(x):
        images, kernel = x[:, :, None], draw(weights)["w"][:, None]
        return jax.lax.conv_general_dilated(images, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2

    found, pull = jax.vjp(value, x)
    return jnp.sum(x * pull(jnp.ones_like(found))[0]) - 2 * jnp.sum(found)


def penalty(draw, weights, x):
    gradient = jax.grad(lambda x: jnp.sum(network_with_biases(draw(weights), x)))(x)
    return network_with_biases(draw(weights), x) + (jnp.sqrt(jnp.sum(gradient**2, 1)) - 1) ** 2


def energy_and_forces(draw, weights, x):
    network = jax.checkpoint(lambda x: network_with_biases(draw(weights), x))
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(network(x)))(x)
    return value + gradient


def biases_alone(draw, weights, x):
    value, pull = jax.vjp(jax.checkpoint(lambda x: jnp.tanh(x + draw(weights)["v"][None])), x)
    return value + pull(jnp.ones_like(value))[0]


def meta_learning(draw, weights, x):
    def loss(weights, x):
        return jnp.mean(network_with_biases(draw(weights), x) ** 2)

    inner = jax.grad(loss)(weights, x[:2])
    return loss(jax.tree.map(lambda w, g: w - 0.1 * g, weights, inner), x[2:])


INSIDE = {
    "forces": (energy_and_forces, "dot_general reads it along the other side, as a gradient does"),
    "a penalty": (penalty, "dot_general reads it along the other side, as a gradient does"),
    "meta-learning": (meta_learning, "add takes one draw for all"),
    "biases alone": (biases_alone, "add reads it again, beside a gradient"),
    "Euler": (identity_of_euler, "dot_general reads it along the other side, as a gradient does"),
    "Euler, gains": (identity_of_gains, "mul reads it along the other side, as a gradient does"),
    "Euler, images": (identity_of_images, "conv_general_dilated reads it along the other side, as a gradient does"),
}


@pytest.mark.parametrize("name", mostly_thorough(INSIDE, "Euler", "forces", "meta-learning"))
def test_a_gradient_in_the_loss_sees_the_weights_of_the_value(name):
    loss, reason = INSIDE[name]
    weights = {"w": normal(4, 4), "u": normal(4, 4, seed=1)} | {k: normal(4, seed=i) for i, k in enumerate("vbc", 2)}

    def drawn(weights, key, x):
        return loss(lambda weights: NOISE.apply(weights, key), weights, x)

    args = weights, KEY, normal(5, 4, seed=9)
    got, want = jax.jit(lambda *args: (local_reparametrization(drawn)(*args), drawn(*args)))(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    if name.startswith("Euler"):
        np.testing.assert_allclose(got, np.zeros_like(got), atol=1e-4)
    report = rpx.explain(local_reparametrization(drawn), *args)
    assert any(each.reason.startswith(reason) for each in report.weights)
    assert not any(each.is_transformed for each in report.weights)


def test_reads_conflict_where_one_keeps_what_another_sums():
    first, same, keeps, sums, whole = (
        _local.NoisyRead(None, None, {"e": (frozenset(summed), frozenset(kept))}, rows)
        for summed, kept, rows in [((2,), (1,), 5), ((2,), (1,), 7), ((), (2,), 5), ((1,), (), 5), ((1,), (2,), None)]
    )
    assert list(_local._conflicting_reads("e", [first, same, keeps, sums, whole])) == [keeps, sums]


# ---- contexts


@pytest.mark.thorough
def test_copies_under_vmap_with_a_key_for_each():
    name = "dense, a spread for each"
    case, raw, x = wide(name)

    def copies(raw, key, x):
        return jax.vmap(lambda key: noisy(case)(raw, key, x), out_axes=1)(jax.random.split(key, 3))

    got, want = flat(jax.jit(local_reparametrization(copies))(raw, KEY, x)), whole_draws(name)
    assert_alike(got, np.tile(want, 3))
    assert np.all(np.abs(np.corrcoef(got.T) - np.eye(9)) <= ERRORS / np.sqrt(N))


def test_examples_under_vmap_inside():
    name = "dense, a spread for each"
    case, raw, x = wide(name)

    def each(raw, key, x):
        w = case.p.apply(raw, key)
        return jax.vmap(lambda x: case.network(w, x[None])[0])(x)

    assert_alike(flat(jax.jit(local_reparametrization(each))(raw, KEY, x)), whole_draws(name))


@pytest.mark.thorough
def test_noise_that_each_step_of_a_scan_draws():
    p, weights, x = rpx.Gaussian(0.3), normal(3, 4, 4), normal(4, seed=2)
    raw = init(p, {"w": weights})

    def steps(raw, key, x):
        def step(h, layer):
            values, key = layer
            return jnp.tanh(h @ p.apply(values, key)["w"]), None

        return jax.lax.scan(step, x, (raw, jax.random.split(key, 3)))[0]

    got = jax.jit(local_reparametrization(steps))(raw, KEY, np.broadcast_to(x, (N, 4)))
    whole = jax.jit(jax.vmap(lambda key: steps(raw, key, x[None])[0]))(jax.random.split(jax.random.key(1), N))
    assert_alike(flat(got), flat(whole))


@pytest.mark.thorough
def test_branches_draw_too():
    name = "dense, a spread for each"
    case, raw, x = wide(name)

    def either(raw, key, x):
        w = case.p.apply(raw, key)
        return jax.lax.cond(x[0, 0] > 0, lambda w, x: case.network(w, x), lambda w, x: -case.network(w, x), w, x)

    sign = np.sign(float(case.x[0]))
    assert_alike(sign * flat(jax.jit(local_reparametrization(either))(raw, KEY, x)), whole_draws(name))


def sharded(case, spec, out, *, check):
    """The network on 8 devices, with a batch, weights and results that are sharded as these say."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def network(raw, key, x):
        w = case.p.apply(raw, key)

        def on_shard(w, x):
            return jax.lax.psum(x @ w, "d") if out == P() else x @ w

        specs = {"mesh": mesh, "in_specs": spec, "out_specs": out, "check_vma": check}
        return jax.shard_map(on_shard, **specs)(w["w"], x)

    return network


SHARDS = {
    "examples": ((P(), P("d")), P("d")),
    "columns": ((P(None, "d"), P()), P(None, "d")),
    "summed": ((P("d"), P(None, "d")), P()),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", mostly_thorough(SHARDS, "columns", "summed"))
def test_shards(name):
    case, raw, x = wide("square")
    network = sharded(case, *SHARDS[name], check=True)
    got = flat(jax.jit(local_reparametrization(network))(raw, KEY, x))
    assert_alike(got, whole_draws("square"))
    covariance = np.corrcoef(got.T) - np.eye(8)
    assert np.all(np.abs(covariance) <= ERRORS / np.sqrt(N))
    shards = got.reshape(8, -1)
    assert np.all(np.abs(np.corrcoef(shards - shards.mean(1, keepdims=True)) - np.eye(8))[0, 1:] < 0.9)


def test_shards_of_which_jax_does_not_tell_share_one_draw():
    case, raw, x = wide("square")
    network = sharded(case, *SHARDS["examples"], check=False)
    got, want = jax.jit(lambda *args: (local_reparametrization(network)(*args), network(*args)))(raw, KEY, x[:16])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_half_precision_is_right_to_rounding():
    w, x = (np.asarray(each).astype(jnp.bfloat16) for each in (normal(64, 3), normal(64, seed=2)))
    p = rpx.Gaussian(0.3)
    raw = p.init({"w": w})
    y = jax.jit(local_reparametrization(lambda raw, key, x: x @ p.apply(raw, key)["w"]))(
        raw, KEY, np.broadcast_to(x, (N, 64))
    )
    assert y.dtype == jnp.bfloat16
    exact, mean = (np.asarray(each, np.float64) for each in (x, w))
    variance, got = 0.09 * np.sum(exact**2), flat(y)
    assert np.all(np.abs(got.mean(0) - exact @ mean) <= ERRORS * np.sqrt(variance / N) + 2**-8 * np.abs(exact @ mean))
    assert np.all(np.abs(got.var(0) / variance - 1) <= ERRORS * np.sqrt(2 / N) + 2**-7)


# ---- what reads one draw for all


def pairs(w, x):
    return x @ jnp.concatenate([w["w"], w["w"]], 1)


def carried(w, x):
    return jax.lax.scan(lambda w, x: (-w, x @ w), w["w"], x[:, None])[1][:, 0]


SQUARE = normal(3, 3)
SHARED = {
    "a formula mixes entries": (lambda w, x: x @ w["w"], NOISE >> rpx.WeightNorm(), "custom_jvp_call"),
    "factorized": (lambda w, x: x @ w["w"], rpx.Gaussian(0.3, noise="factorized"), "sign"),
    "turned over": (lambda w, x: x @ (w["w"] + w["w"][::-1]), NOISE, "add"),
    "symmetric": (lambda w, x: x @ (w["w"] + w["w"].T), NOISE, "add"),
    "repeated": (lambda w, x: x @ jnp.broadcast_to(w["w"][:, :1], (3, 3)), NOISE, "dot_general"),
    "side by side": (pairs, NOISE, "concatenate"),
    "a square": (lambda w, x: x @ jnp.square(w["w"]), NOISE, "square"),
    "rows without data": (lambda w, x: x @ (jnp.ones((3, 3)) @ w["w"]), NOISE, "dot_general"),
    "a sum of one draw": (lambda w, x: x @ (jnp.repeat(w["w"][..., None], 2, 2) @ jnp.ones(2)), NOISE, "dot_general"),
    "both sides": (lambda w, x: x @ (w["w"] @ w["w"]), NOISE, "dot_general"),
    "carried": (carried, NOISE, "scan"),
    "float16": (lambda w, x: x.astype(jnp.float16) @ w["w"].astype(jnp.float16), NOISE, "convert_element_type"),
    "more digits": (lambda w, x: x @ w["w"].astype(jnp.bfloat16).astype(jnp.float32), NOISE, "convert_element_type"),
}


@pytest.mark.parametrize(
    "name",
    mostly_thorough(SHARED, "factorized", "carried", "repeated", "a sum of one draw", "more digits", "a square"),
)
def test_one_draw_for_all(name):
    network, p, reader = SHARED[name]
    raw, x = p.init({"w": SQUARE}), normal(5, 3, seed=2)

    def loss(raw, key, x):
        return network(p.apply(raw, key), x)

    got, want = (jax.jit(local_reparametrization(loss))(raw, KEY, x), jax.jit(network)(effective(p, raw, KEY), x))
    np.testing.assert_allclose(got, want, rtol=1e-2 if got.dtype == jnp.float16 else 1e-5, atol=1e-5)
    report = rpx.explain(local_reparametrization(loss), raw, KEY, x)
    assert not any(each.is_transformed for each in report.weights)
    assert any(each.reason.startswith(reader) for each in report.weights)


@pytest.mark.parametrize(
    "name",
    [
        *("a formula mixes entries", "turned over", "symmetric", "side by side", "rows without data", "both sides"),
        *("float16", "a penalty", "biases alone", "Euler, gains", "Euler, images"),
    ],
)
def test_the_report_says_why_all_rows_share_one_draw(name):
    weights = {k: SQUARE if k in "wu" else SQUARE[0] for k in "wuvbc"} if name in INSIDE else {"w": SQUARE}
    network, p, reader = SHARED[name] if name in SHARED else (INSIDE[name][0], NOISE, INSIDE[name][1])

    def loss(raw, key, x):
        return network(p.apply(raw, key), x) if name in SHARED else network(lambda w: p.apply(w, key), raw, x)

    report = rpx.explain(local_reparametrization(loss), p.init(weights), KEY, normal(5, 3))
    assert not any(each.is_transformed for each in report.weights)
    assert any(each.reason.startswith(reader) for each in report.weights)


@pytest.mark.parametrize("p", [rpx.WeightDropout(0.3), rpx.noise.HardConcrete(0.3)])
def test_what_is_not_gaussian_is_as_it_was(p):
    raw, x = p.init({"w": SQUARE}), normal(5, 3, seed=2)

    def loss(raw, key, x):
        return x @ p.apply(raw, key)["w"]

    np.testing.assert_array_equal(local_reparametrization(loss)(raw, KEY, x), loss(raw, KEY, x))
    assert rpx.explain(local_reparametrization(loss), raw, KEY, x).weights == ()


def test_complex_weights_share_one_draw():
    raw, x = {"w": np.asarray(SQUARE, np.complex64)}, np.asarray(normal(5, 3, seed=2), np.complex64)

    def loss(raw, key, x):
        return x @ NOISE.apply(raw, key)["w"]

    np.testing.assert_allclose(local_reparametrization(loss)(raw, KEY, x), loss(raw, KEY, x), rtol=1e-5, atol=1e-6)
    assert "complex takes one draw for all" in repr(rpx.explain(local_reparametrization(loss), raw, KEY, x))


# ---- data that is not an argument


BATCH, ROWS, WEIGHTS = normal(5, 3, seed=2), np.int32([0, 2, 1, 0, 2]), {"w": SQUARE}


def product(raw, key, x=BATCH, p=NOISE):
    return jnp.tanh(x @ p.apply(raw, key)["w"])


def error(raw, key, labels):
    return optax.softmax_cross_entropy_with_integer_labels(product(raw, key), labels)


def in_a_step(raw, key, x):
    return local_reparametrization(lambda raw, key: product(raw, key, x))(raw, key)


def data_first(x, raw, key):
    return product(raw, key, x)


def plain(w, x):
    return x @ w["w"]


CLOSED = {
    "a batch": (product, KEY),
    "in a call": (jax.jit(product), KEY),
    "computed again": (jax.checkpoint(product), KEY),
    "in a loop over examples": (lambda raw, key: jax.lax.map(lambda x: product(raw, key, x), BATCH), KEY),
    "rows of a table": (lambda raw, key: jnp.tanh(NOISE.apply(raw, key)["w"][ROWS]), KEY),
    "all but the labels": (error, KEY, ROWS),
    "the key too": (lambda raw: product(raw, KEY),),
}
"""Functions that close over data, and their arguments after the raw tree."""


@pytest.mark.parametrize("name", CLOSED)
def test_data_that_is_closed_over_is_refused(name):
    loss, *args = CLOSED[name]
    for call in (local_reparametrization(loss), jax.jit(local_reparametrization(loss))):
        with pytest.raises(ValueError, match=r"has no effect: all rows share the noise of a weight \(raw/w\)"):
            call(WEIGHTS, *args)
    (weight,) = rpx.explain(local_reparametrization(loss), WEIGHTS, *args).weights
    assert weight.reason.endswith(
        "; its other input is closed over, or in an argument for weights: pass it as an argument of its own"
    )


def in_loop(w, xs):
    return jax.lax.map(lambda x: x @ w, xs)


def turned_over(w):
    return w + w[::-1]


NOT_CLOSED = {
    "no noise": lambda raw, key, x: product(raw, key, p=NOISE.deterministic),
    "dropout": lambda raw, key, x: product(raw, key, p=rpx.WeightDropout(0.3)),
    "entries that depend on each other": lambda raw, key, x: BATCH @ turned_over(NOISE.apply(raw, key)["w"]),
    "a matrix between data and weight": lambda raw, key, x: x @ product(raw, key, jnp.eye(3) + np.ones((3, 3))),
    "the same, read by a loop": lambda raw, key, x: in_loop(product(raw, key, np.ones((3, 3))), x),
    "one example, and a table": lambda raw, key, x: x[:1] @ NOISE.apply(raw, key)["w"] + BATCH,
    "no product": lambda raw, key, x: jnp.square(NOISE.apply(raw, key)["w"]),
}


@pytest.mark.parametrize("name", NOT_CLOSED)
def test_one_draw_for_all_for_another_reason_is_not_refused(name):
    loss = NOT_CLOSED[name]
    got, want = jax.jit(lambda *args: (local_reparametrization(loss)(*args), loss(*args)))(WEIGHTS, KEY, BATCH)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ---- gradients, memory, reports


def test_gradients_are_those_of_the_mean_and_the_spread():
    p, x, slope = rpx.Gaussian(0.3), normal(5, 3, seed=2).at[0].set(0.0), normal(5, 3, seed=3)
    rest = slice(1, None)  # without the zero row, whose variance is zero

    def network(raw, x):
        return local_reparametrization(lambda raw, key, x: x @ p.apply(raw, key)["w"])(raw, KEY, x)

    def by_hand(raw, x, noise):
        held = raw["w"]["@gaussian"]
        variance = jnp.square(x) @ jnp.square(jax.nn.softplus(held["rho"]))
        return x @ held["mean"] + jnp.sqrt(variance) * noise

    @jax.jit
    def both(raw, x):
        spread = jnp.sqrt(0.09 * jnp.sum(jnp.square(x), 1))[rest, None]
        noise = (network(raw, x) - by_hand(raw, x, 0.0))[rest] / spread
        got = jax.grad(lambda raw, x: jnp.sum(slope * network(raw, x)), (0, 1))(raw, x)
        return got, jax.grad(lambda raw, x: jnp.sum(slope[rest] * by_hand(raw, x[rest], noise)), (0, 1))(raw, x)

    got, want = both(init(p, {"w": SQUARE}), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got[0], want[0])
    np.testing.assert_allclose(got[1][rest], want[1][rest], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1][0], np.asarray(slope[0]) @ np.asarray(SQUARE).T, rtol=1e-5, atol=1e-6)


def test_each_use_and_each_step_of_a_loop_draws():
    def network(raw, key, x):
        w = NOISE.apply(raw, key)["w"]
        steps = jax.lax.scan(lambda _, x: (None, x @ w), None, jnp.stack([x, x]))[1]
        return x @ w - x @ w, steps[0] - steps[1]

    for differences in jax.jit(local_reparametrization(network))(WEIGHTS, KEY, normal(5, 3)):
        assert np.all(np.abs(differences) > 1e-4)


def shapes_drawn(jaxpr):
    """The shapes of all draws in a program."""
    for eqn in jaxpr.eqns:
        if jaxprs.is_jit(eqn) and eqn.params["name"] == DRAW:
            yield jaxprs.type_of(eqn.outvars[0]).shape
        for inside in jaxprs.inner_programs(eqn):
            yield from shapes_drawn(inside)


def test_nothing_of_the_size_of_the_weight_is_drawn():
    p = rpx.Gaussian(0.1)
    raw = p.init({"a": normal(64, 32), "b": normal(4, 32, 32, seed=1)})

    def loss(raw, key, x):
        w = p.apply(raw, key)
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ w["a"], w["b"])[0])

    program = jax.make_jaxpr(jax.grad(local_reparametrization(loss)))(raw, KEY, normal(8, 64))
    assert set(shapes_drawn(program.jaxpr)) == {(8, 32)}


def test_one_key_gives_one_result_with_jit_and_without():
    case, raw, x = wide("dense")
    f = local_reparametrization(noisy(case))
    got, other = (np.asarray(f(raw, key, x[:8])) for key in (KEY, jax.random.key(1)))
    np.testing.assert_allclose(jax.jit(f)(raw, KEY, x[:8]), got, rtol=1e-5, atol=1e-6)
    assert np.all(np.abs(got - other) > 1e-6)


def test_the_report():
    p = rpx.VarNoise(0.1)
    raw = {"a": {"w": normal(4, 4)}, "b": {"w": normal(4, 4), "scale": normal(4)}}

    def loss(raw, key, x):
        w = p.apply(raw, key)
        y = jnp.tanh(x @ w["a"]["w"]) @ w["b"]["w"] + x @ w["b"]["w"]
        return jnp.sum(y) + jnp.sum(jnp.abs(w["b"]["scale"])) + jnp.sum(jnp.square(w["a"]["w"]))

    text = repr(rpx.explain(local_reparametrization(loss), raw, KEY, normal(2, 4))).splitlines()
    line = f"{__file__}:{loss.__code__.co_firstlineno + 3}"
    assert text[:3] == [
        "1 of 3 noisy weights draw for each row",
        "  for each row:",
        "    raw/b/w  float32[4, 4]  2 uses, 2 rows",
    ]
    assert text[3] == "  one draw for all:"
    assert text[4].startswith(f"    raw/a/w      float32[4, 4]  square takes one draw for all: {line}:")
    assert text[5].startswith(f"    raw/b/scale  float32[4]  abs takes one draw for all: {line}:")


def test_the_backward_pass_draws_again_what_it_reads():
    """No array of the size of the result is stored for the backward pass of a product: no variance, and no noise."""
    raw = rpx.Gaussian(0.1).init({"w": jnp.ones((4, 3))})

    def loss(raw, key, x):
        return jnp.sum(x @ rpx.Gaussian(0.1).apply(raw, key)["w"])

    def stored(fun):
        program = jax.make_jaxpr(lambda *args: jax.vjp(lambda raw: fun(raw, *args[1:]), args[0])[1])
        return [v.shape for v in program(raw, jax.random.key(0), jnp.ones((5, 4))).out_avals]

    assert (5, 3) not in stored(local_reparametrization(loss))
    assert stored(local_reparametrization(loss)).count((4, 3)) <= 2  # rho, and the deviations that are made of it


def kept(jaxpr):
    """The shapes of what a program computes once, in its order."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "reparax_once":
            yield jaxprs.type_of(eqn.outvars[0]).shape
        for inside in jaxprs.inner_programs(eqn):
            yield from kept(inside)


@pytest.mark.parametrize(("p", "times"), [(rpx.Gaussian(0.1), 2), (rpx.VarNoise(0.1), 1)])
def test_the_backward_pass_draws_once_for_both_of_its_products(p, times):
    """Gradients of data and of deviations read the draw, one of them transposed; one reads it if all are alike."""
    raw = p.init({"w": jnp.ones((4, 3))})

    def loss(raw, key, x):
        return jnp.sum(x @ p.apply(raw, key)["w"])

    program = jax.make_jaxpr(jax.grad(local_reparametrization(loss), (0, 2)))(raw, jax.random.key(0), jnp.ones((5, 4)))
    assert list(kept(program.jaxpr)) == [(5, 3)] * times


PRODUCTS = {
    "matrices": (lambda w, x: x @ w, (7, 5), normal(3, 7)),
    "groups of rows": (lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([2, 1])), (2, 7, 6), normal(3, 7)),
    "images": (
        lambda w, x: jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        (3, 7, 5),
        normal(2, 4, 7),
    ),
    "a table": (lambda w, x: w[x], (7, 11), np.int32([1, 4, 2])),
    "multiples": (lambda w, x: x * w[None], (7,), normal(13, 7)),
}


@pytest.mark.parametrize("name", mostly_thorough(PRODUCTS, "images", "a table"))
def test_equal_products_are_traced_once(name, monkeypatch):
    product, shape, x = PRODUCTS[name]
    raw, traced = {"a": jnp.ones(shape), "b": jnp.ones(shape)}, []

    def counted(key, mean):
        traced.append(mean.shape)
        return random.normal(key, mean)

    def network(raw, key, x):
        w = NOISE.apply(raw, key)
        return product(w["a"], x), product(w["b"], x)

    monkeypatch.setattr(_local, "random", SimpleNamespace(normal=counted, DRAW=random.DRAW))
    jax.make_jaxpr(local_reparametrization(network))(raw, KEY, x)
    assert len(traced) == 1


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
