"""``rpx.optimizer(tx, p)``: one step of it is one of ``tx`` and then ``p.update``, whatever is around it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises
from flax.training.train_state import TrainState

import reparax as rpx

P = (
    rpx.Freeze(where="frozen")
    >> rpx.MagnitudePruning(0.5, where="pruned")
    >> rpx.SpectralNorm(where="spectral")
    >> rpx.sparse.RigL(0.5, where="grown")
    >> rpx.VarNoise(0.01)
)
NAMES = ("frozen", "grown", "pruned", "spectral")
W = {name: np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) for i, name in enumerate(NAMES)}
STEPS = 6


@pytest.fixture(autouse=True)
def promotion():
    """Adam raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@jax.jit
def started():
    return P.init(W, jax.random.key(0))


@jax.jit
def gradient(raw: Any, i: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(1), i)
    return jax.grad(lambda raw: sum(jnp.sum((w - 0.5) ** 2) for w in P.apply(raw, key).values()))(raw)


def adamw() -> Any:
    return optax.adamw(0.1, weight_decay=0.1)


def as_transformation(tx: Any) -> Any:
    return tx.gradient_transformation() if hasattr(tx, "gradient_transformation") else tx


def by_hand(around: Any, inside: Any, every: int) -> Any:
    """A loop that calls ``p.update`` itself, in a program of its own."""
    tx = as_transformation(around(rpx.optimizer(inside(), updates="by hand")))
    raw, step, update = started(), jax.jit(tx.update), jax.jit(P.update)
    state = tx.init(raw)
    for i in range(STEPS):
        updates, state = step(gradient(raw, i), state, raw)
        raw = optax.apply_updates(raw, updates)
        raw = update(raw) if i % every == every - 1 else raw
    return raw


def in_a_scan(around: Any, inside: Any) -> Any:
    tx = as_transformation(around(rpx.optimizer(inside(), P)))

    def step(carry: Any, i: Any) -> Any:
        raw, state = carry
        updates, state = tx.update(gradient(raw, i), state, raw)
        return (optax.apply_updates(raw, updates), state), None

    return jax.jit(lambda raw: jax.lax.scan(step, (raw, tx.init(raw)), jnp.arange(STEPS))[0][0])(started())


def of_a_train_state(around: Any, inside: Any) -> Any:
    state = TrainState.create(apply_fn=None, params=started(), tx=around(rpx.optimizer(inside(), P)))
    step = jax.jit(lambda state: state.apply_gradients(grads=gradient(state.params, state.step)), donate_argnums=0)
    for _ in range(STEPS):
        state = step(state)
    return state.params


def as_it_is(tx: Any) -> Any:
    return tx


def in_turns(tx: Any) -> Any:
    return optax.MultiSteps(tx, 2)


def after_clipping(tx: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), tx)


WAYS = {
    "scan": (in_a_scan, as_it_is, adamw, 1),
    "TrainState, donated": (of_a_train_state, as_it_is, adamw, 1),
    "MultiSteps around": (in_a_scan, in_turns, adamw, 2),
    "MultiSteps inside": (in_a_scan, as_it_is, lambda: in_turns(adamw()), 1),
    "clipped before": (in_a_scan, after_clipping, adamw, 1),
    "mask inside": (in_a_scan, as_it_is, lambda: optax.masked(adamw(), rpx.decay_mask), 1),
    "partition inside": (in_a_scan, as_it_is, lambda: optax.partition({"free": adamw()}, rpx.training.param_labels), 1),
}
QUICK = ("TrainState, donated", "MultiSteps around")


@pytest.mark.parametrize("way", [pytest.param(w, marks=() if w in QUICK else pytest.mark.thorough) for w in WAYS])
def test_a_step_is_one_of_the_transformation_and_one_update(way: str) -> None:
    train, around, inside, every = WAYS[way]
    got, want = train(around, inside), by_hand(around, inside, every)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))
        assert x.dtype == y.dtype
    of_pruned = got["pruned"]["@magnitude_pruning"]
    assert not np.array_equal(of_pruned["@fixed"]["mask"], started()["pruned"]["@magnitude_pruning"]["@fixed"]["mask"])
    np.testing.assert_array_equal(got["frozen"]["@freeze"]["@fixed"]["w"], W["frozen"])


def test_the_largest_singular_value_stays_one_while_weights_grow() -> None:
    p = rpx.SpectralNorm()
    target = np.outer([1, 2, 3, 4], [1, -1, 1, -1]).astype(np.float32)

    def trained(tx: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            raw, state = carry
            grads = jax.grad(lambda raw: -jnp.sum(p.apply(raw)["w"] * target))(raw)
            updates, state = tx.update(grads, state, raw)
            return (optax.apply_updates(raw, updates), state), None

        raw = p.init({"w": W["spectral"]})
        return jax.jit(lambda raw: jax.lax.scan(step, (raw, tx.init(raw)), length=60)[0][0])(raw)

    ours, forgotten = (
        trained(rpx.optimizer(optax.adam(0.1), *chain, **more))
        for chain, more in (((p,), {}), ((), {"updates": "by hand"}))
    )
    largest = [np.linalg.norm(np.asarray(p.fold(raw)["w"], np.float64), 2) for raw in (ours, forgotten)]
    assert abs(largest[0] - 1) < 0.02
    assert largest[1] > 1.5


def test_a_module_of_equinox_holds_functions_and_a_wrapped_one_the_bits_of_fixed_values() -> None:
    p = rpx.SpectralNorm()
    plain = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), jnp.float32)
    tx = rpx.optimizer(adamw(), p)

    def train(model: Any, call: Any) -> Any:
        @eqx.filter_jit
        def make_step(model: Any, state: Any) -> Any:
            grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(call(model))(x) ** 2))(model)
            updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), state

        state = tx.init(eqx.filter(model, eqx.is_array))
        for _ in range(STEPS):
            model, state = make_step(model, state)
        return model

    raw = train(p.init(plain), p.apply)
    wrapped = train(rpx.equinox.Parametrized(plain, p, updates="by hand"), as_it_is)
    u = raw.layers[0].weight["@spectral_norm"]["@fixed"]["u"]
    assert not np.array_equal(u, p.init(plain).layers[0].weight["@spectral_norm"]["@fixed"]["u"])
    for got, want in zip(*(jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (wrapped.raw, raw)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    with raises(
        ValueError,
        "optimizer updates the fixed values of SpectralNorm(n_steps=2), but got a model with the chain "
        "SpectralNorm(). Pass the same chain to both.",
    ):
        rpx.optimizer(adamw(), rpx.SpectralNorm(2)).init(eqx.filter(wrapped, eqx.is_array))


def test_leaves_that_are_no_numbers_get_no_update() -> None:
    p = rpx.MagnitudePruning(0.5, where="w")
    raw = p.init({"w": W["pruned"]}) | {"key": jax.random.key(0), "f": jnp.tanh}
    tx = rpx.optimizer(optax.sgd(0.1), p)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, rpx.partition(raw)[0]), tx.init(raw), raw)
    assert (updates["key"], updates["f"]) == (None, None)
    np.testing.assert_allclose(updates["w"]["@magnitude_pruning"]["w"], np.full((4, 4), -0.1), rtol=1e-6)


class Ticking(rpx.Reparametrization):
    """A weight that counts its steps from 255 on, and knows whether their number is odd; or that holds a key."""

    keyed: bool = False

    raw_values = {"w": rpx.stage.main(), "n": rpx.stage.fixed(), "odd": rpx.stage.fixed()}

    def init_leaf(self, w):
        n = jax.random.key(0) if self.keyed else jnp.full((), 255, jnp.uint8)
        return {"w": w, "n": n, "odd": jnp.zeros((), bool)}

    def apply_leaf(self, values):
        return values["w"]

    def update_leaf(self, values):
        n = jax.random.fold_in(values["n"], 1) if self.keyed else values["n"] + 1
        return {"n": n, "odd": ~values["odd"]}


def test_integers_and_booleans_are_updated_to_the_bit() -> None:
    raw, tx = Ticking().init({"w": W["frozen"]}), rpx.optimizer(optax.sgd(0.1), Ticking())
    for n, odd in ((0, True), (1, False)):
        raw = optax.apply_updates(raw, tx.update(jax.tree.map(jnp.zeros_like, raw), tx.init(raw), raw)[0])
        fixed = raw["w"]["@ticking"]["@fixed"]
        assert (fixed["n"], fixed["n"].dtype, fixed["odd"], fixed["odd"].dtype) == (n, np.uint8, odd, bool)


def test_a_key_cannot_be_updated_by_an_addition() -> None:
    raw, tx = Ticking(keyed=True).init({"w": W["frozen"]}), rpx.optimizer(optax.sgd(0.1), Ticking(keyed=True))
    with raises(
        ValueError,
        "optimizer.update cannot update fixed values that are PRNG keys, because no update can be added to a key. "
        "Call `raw = p.update(raw)` after each step, and confirm this with `rpx.optimizer(tx, updates='by hand')`.",
    ):
        tx.update(jax.tree.map(lambda x: x, raw), tx.init(raw), raw)


class Last(rpx.Reparametrization):
    """The weight of the last step."""

    raw_values = {"w": rpx.stage.main(), "last": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"w": w, "last": w}

    def apply_leaf(self, values):
        return values["w"]

    def update_leaf(self, values):
        return {"last": values["w"]}


def test_weights_are_updated_as_they_are_rounded() -> None:
    """An update of a tenth of the step between two numbers of half precision changes none."""
    raw = Last().init({"w": np.ones(2, jnp.bfloat16)})
    tx = rpx.optimizer(optax.GradientTransformation(lambda _: (), lambda updates, state, _: (updates, state)), Last())
    updates, _ = jax.jit(tx.update)(jax.tree.map(lambda x: np.full(x.shape, 1e-3, np.float32), raw), (), raw)
    last = updates["w"]["@last"]["@fixed"]["last"]
    np.testing.assert_array_equal(last.astype(np.float32), np.zeros(2))


class Limited(rpx.Reparametrization):
    """A limit that is infinite, and computed again in each step."""

    raw_values = {"w": rpx.stage.main(), "limit": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"w": w, "limit": jnp.full((), jnp.inf, w.dtype)}

    def apply_leaf(self, values):
        return jnp.minimum(values["w"], values["limit"])

    def update_leaf(self, values):
        return {"limit": jnp.maximum(values["limit"], 1.0)}


def test_a_value_that_is_computed_again_may_stay_infinite() -> None:
    raw, tx = Limited().init({"w": W["frozen"]}), rpx.optimizer(optax.sgd(0.1), Limited())
    zeros = jax.tree.map(jnp.zeros_like, raw)
    for update in (tx.update, jax.jit(tx.update)):
        new = optax.apply_updates(raw, update(zeros, tx.init(raw), raw)[0])
        assert new["w"]["@limited"]["@fixed"]["limit"] == np.inf
