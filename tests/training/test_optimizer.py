"""``rpx.optimizer``: fixed values keep every bit and cost no state, whatever is wrapped in it or around it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import effective, init
from errors import table

import reparax as rpx

P = (
    rpx.Freeze(where="frozen")
    >> rpx.Orthogonal(where="turn")
    >> rpx.MagnitudePruning(0.5, where="sparse")
    >> rpx.SpectralNorm(where="spectral")
)
untouched = partial(rpx.optimizer, updates="by hand")
DECAYED = partial(rpx.training.param_labels, main=True, aux=False, fixed=False)


@pytest.fixture(autouse=True)
def promotion():
    """Adam raises a float to an integer power, schedules divide integers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), jnp.float32)


def params() -> dict[str, jax.Array]:
    turn = jnp.asarray(np.linalg.qr(np.asarray(normal(4, 4, seed=1)))[0], jnp.float32)
    return {
        "frozen": normal(3, 2),
        "idle": normal(5),
        "sparse": normal(4, 3, seed=2),
        "spectral": normal(3, 3, seed=3),
        "turn": turn,
    }


@jax.jit
def loss(raw: Any) -> jax.Array:
    """What moves all that a stage lets move, and nothing of ``idle``."""
    effective = P.apply(raw)
    return sum(jnp.sum((effective[name] - 0.1) ** 2) for name in ("frozen", "sparse", "spectral", "turn"))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def trained(tx: Any, raw: Any, steps: int) -> tuple[Any, Any]:
    """The raw tree and the optimizer's state after some compiled steps."""

    def step(carry: Any, _: None) -> tuple[Any, None]:
        raw, state = carry
        updates, state = tx.update(jax.grad(loss)(raw), state, raw)
        return (optax.apply_updates(raw, updates), state), None

    return jax.jit(lambda raw: jax.lax.scan(step, (raw, tx.init(raw)), length=steps)[0])(raw)


def adamw(rate: Any = 1e-2, mask: Any = None) -> optax.GradientTransformationExtraArgs:
    return optax.adamw(rate, weight_decay=0.1, mask=mask)


# Five hundred steps. ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_five_hundred_steps_of_adamw_leave_fixed_values_and_properties_alone() -> None:
    raw = init(P, params())
    after, state = trained(untouched(adamw()), raw, 500)
    (free, fixed), (free_after, fixed_after) = rpx.partition(raw), rpx.partition(after)
    assert len(jax.tree.leaves(fixed)) == 5  # w; base; mask; u and v
    assert bits(fixed_after) == bits(fixed)
    assert len(jax.tree.leaves(state)) == 1 + 2 * len(jax.tree.leaves(free))  # a count, and two moments of each
    turn = np.asarray(effective(P, after)["turn"])
    np.testing.assert_allclose(turn @ turn.T, np.eye(4), atol=1e-5)
    assert np.abs(turn - np.asarray(params()["turn"])).max() > 0.1
    np.testing.assert_allclose(after["idle"], np.asarray(raw["idle"]) * (1 - 1e-2 * 0.1) ** 500, rtol=1e-4)
    pairs = zip(*map(jax.tree.leaves, (free, free_after)), strict=True)
    assert all(np.any(np.asarray(x) != np.asarray(y)) for x, y in pairs)


# Wrapped in it, and around it. ------------------------------------------------------------------------------------

ALL = jax.tree.map(lambda _: True, jax.eval_shape(P.init, params()))
SOME = {name: name != "spectral" for name in params()}
INSIDE: dict[str, Callable[[], Any]] = {
    "MultiSteps": lambda: optax.MultiSteps(adamw(), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-2, weight_decay=0.1),
    "masked by a tree of the raw structure": lambda: optax.masked(adamw(), ALL),
    "masked by a tree for the model": lambda: optax.masked(adamw(), SOME),
    "masked by a function": lambda: optax.masked(adamw(), DECAYED),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), adamw()),
    "apply_if_finite": lambda: optax.apply_if_finite(adamw(), 3),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2, weight_decay=0.1),
    "partition": lambda: optax.partition({"free": adamw()}, rpx.training.param_labels),
    "centralized": lambda: optax.chain(optax.centralize(), optax.lion(1e-2, weight_decay=0.1)),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, weight_decay_rate=0.1, min_dim_size_to_factor=2),
    "ema of weights": lambda: optax.chain(adamw(), optax.ema(0.9)),
    "muon": lambda: optax.contrib.muon(1e-2, weight_decay=0.1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("wrapped", INSIDE)
def test_what_it_wraps_never_sees_fixed_values(wrapped: str) -> None:
    raw = P.init(params())
    after, state = trained(untouched(INSIDE[wrapped]()), raw, 6)
    assert bits(rpx.partition(after)[1]) == bits(rpx.partition(raw)[1])
    assert not any("@fixed" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state))
    assert (after["sparse"]["@magnitude_pruning"]["w"] != raw["sparse"]["@magnitude_pruning"]["w"]).any()


# What it gives to what it wraps. ----------------------------------------------------------------------------------


def two() -> Any:
    """Three free numbers, of which one is a length, and four fixed ones."""
    p = rpx.Freeze(where="b") >> rpx.WeightNorm(where="w")
    return jax.jit(p.init)({"b": np.full(4, 2.0, np.float32), "w": np.full((2, 1), 2.0, np.float32)})


def test_norms_do_not_count_gradients_of_fixed_values() -> None:
    raw = two()
    tx = rpx.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, _ = jax.jit(tx.update)(jax.tree.map(np.ones_like, raw), tx.init(raw), raw)
    for update in jax.tree.leaves(rpx.partition(updates)[0]):
        np.testing.assert_allclose(update, np.full(update.shape, -1 / np.sqrt(3)), rtol=1e-6)


MASKS: dict[str, Any] = {
    "a function of labels": DECAYED,
    "a tree of labels": DECAYED(jax.eval_shape(two)),
    "a function of arrays": lambda tree: jax.tree.map(lambda x: x.shape == (2, 1), tree),
    "a function with names": lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: "'v'" in str(path), tree),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_weight_decay_may_be_functions_or_trees(mask: str) -> None:
    raw = two()
    tx = rpx.optimizer(optax.adamw(0.1, weight_decay=0.5, mask=MASKS[mask]))

    @jax.jit
    def stepped(raw):
        with jax.numpy_dtype_promotion("standard"):  # adam raises a float to an integer power
            updates, _ = tx.update(jax.tree.map(jnp.zeros_like, raw), tx.init(raw), raw)
        return optax.apply_updates(raw, updates)

    after = stepped(raw)
    np.testing.assert_allclose(after["w"]["@weight_norm"]["v"], np.full((2, 1), 2 * 0.95), rtol=1e-6)
    np.testing.assert_array_equal(after["w"]["@weight_norm"]["g"], raw["w"]["@weight_norm"]["g"])
    np.testing.assert_array_equal(after["b"]["@freeze"]["@fixed"]["w"], np.full(4, 2.0))


def test_gradients_may_be_those_of_the_free_part_or_of_the_whole() -> None:
    raw, tx = init(P, params()), untouched(adamw())
    free, fixed = rpx.partition(raw)
    update = jax.jit(tx.update)
    whole = update(jax.jit(jax.grad(loss))(raw), tx.init(raw), raw)
    of_free = jax.jit(jax.grad(lambda free: loss(rpx.combine(free, fixed))))(free)
    by_free = update(of_free, tx.init(raw), raw)
    assert bits(by_free) == bits(whole)
    assert jax.tree.structure(by_free) == jax.tree.structure(whole)
    updates, _ = update(of_free, tx.init(free), free)
    assert bits(optax.apply_updates(free, updates)) == bits(rpx.partition(optax.apply_updates(raw, whole[0]))[0])
    assert jax.tree.structure(optax.apply_updates(free, updates)) == jax.tree.structure(free)


def test_parameters_are_not_needed_where_the_transformation_needs_none() -> None:
    raw, tx = init(P, params()), untouched(optax.adam(1e-2))
    updates, _ = jax.jit(tx.update)(jax.grad(loss)(raw), tx.init(raw))
    after = optax.apply_updates(raw, updates)
    assert bits(rpx.partition(after)[1]) == bits(rpx.partition(raw)[1])
    assert jax.tree.structure(after) == jax.tree.structure(raw)


def test_the_value_of_the_loss_passes_through() -> None:
    # The step of Polyak is (value - 0) / |gradient|^2 = 8 / 3 for three slopes of one, of fixed values none.
    raw, tx = two(), rpx.optimizer(optax.polyak_sgd(max_learning_rate=100.0))
    ones = jax.tree.map(jnp.ones_like, raw)
    updates, _ = tx.update(ones, tx.init(raw), raw, value=8.0)
    for update in jax.tree.leaves(rpx.partition(updates)[0]):
        np.testing.assert_allclose(update, np.full(update.shape, -8 / 3), rtol=1e-6)


def test_of_extra_arguments_functions_take_what_trains_and_trees_lose_what_does_not() -> None:
    raw, seen, module = two(), [], jax.tree_util.Partial(jnp.tanh, jnp.ones(2))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        seen.append((extra["fun"](params, 3, second=params), extra["tree"], extra["vector"], extra["number"]))
        assert extra["module"] is module
        return updates, state

    tx = rpx.optimizer(optax.GradientTransformationExtraArgs(lambda _: (), update))
    vector = jnp.ones(3)
    tx.update(
        raw, (), raw, fun=lambda *args, second: (*args, second), tree=raw, vector=vector, number=8.0, module=module
    )
    (((first, count, second), tree, same_vector, number),) = seen
    for got, want in ((first, raw), (second, rpx.partition(raw)[0]), (tree, rpx.partition(raw)[0])):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert bits(got) == bits(want)
    assert (count, same_vector is vector, number) == (3, True, 8.0)


class Counted(NamedTuple):
    """A transformation of no library."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]


def test_the_result_is_of_the_class_of_what_it_wraps() -> None:
    own = Counted(lambda _: 0, lambda updates, state, params=None: (updates, state + 1))
    for tx in (optax.scale(1.0), optax.adam(1.0), own):
        assert type(rpx.optimizer(tx)) is type(tx)
    steps = optax.MultiSteps(optax.sgd(1.0), 2)
    assert type(rpx.optimizer(steps)) is type(steps.gradient_transformation())
    assert rpx.optimizer(own).update(two(), 0)[1] == 1


# Bits. ------------------------------------------------------------------------------------------------------------

FLOATS = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["bool", "int8", "int32", "uint8", "uint32"]


@pytest.mark.parametrize("compiled", [True, False])
def test_every_bit_of_a_fixed_float_stays(compiled) -> None:
    numbers = np.array([0.0, -0.0, 1.0, -1.5, np.inf, np.nan])  # compilers change the bits of extremes of 8 bits
    w = {
        dtype: jnp.asarray((numbers[:4] if dtype.startswith("float8") else numbers).astype(jnp.dtype(dtype)))
        for dtype in FLOATS
    }
    raw = rpx.Freeze(where="w/.*").init({"w": w, "b": jnp.ones(2)})
    tx = untouched(adamw())
    updates, _ = (jax.jit(tx.update) if compiled else tx.update)(jax.tree.map(jnp.ones_like, raw), tx.init(raw), raw)
    after = (jax.jit(optax.apply_updates) if compiled else optax.apply_updates)(raw, updates)
    assert bits(after["w"]) == bits(w)
    assert sorted(str(x.dtype) for x in jax.tree.leaves(after["w"])) == sorted(FLOATS)
    assert (after["b"] != raw["b"]).all()


def test_complex_values_train_and_fixed_ones_keep_the_signs_of_their_zeros() -> None:
    w = jnp.array([complex(-0.0, -0.0), complex(-0.0, 1.0), complex(2.0, -0.0)], jnp.complex64)
    raw = rpx.Freeze(where="w").init({"w": w, "b": jnp.ones(2, jnp.complex64)})
    tx = rpx.optimizer(optax.sgd(0.5))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, raw), tx.init(raw), raw)
    after = optax.apply_updates(raw, updates)
    assert bits(after["w"]) == bits(w)
    np.testing.assert_array_equal(after["b"], np.full(2, 0.5))


@pytest.mark.parametrize("given", ["whole tree", "free part"])
@pytest.mark.parametrize("known", [True, False])
def test_integers_and_booleans_stay_frozen_or_not(given, known) -> None:
    w = {dtype: jnp.asarray(np.array([0, 1, 100, 3]).astype(dtype)) for dtype in INTEGERS}
    frozen = {dtype: {"@freeze": {"@fixed": {"w": x}}} for dtype, x in w.items()}
    raw = {"frozen": frozen, "counter": w, "b": jnp.ones(2)}

    def total(raw: Any) -> jax.Array:
        return jnp.sum(raw["b"])

    tx = rpx.optimizer(optax.sgd(0.5))
    free, fixed = rpx.partition(raw)
    if given == "whole tree":
        gradient = jax.grad(total, allow_int=True)(raw)
    else:
        gradient = jax.grad(lambda free: total(rpx.combine(free, fixed)))(free)
    if known:
        updates, _ = tx.update(gradient, tx.init(raw), raw)
        after = optax.apply_updates(raw, updates)
    else:
        updates, _ = tx.update(gradient, tx.init(raw))
        after = eqx.apply_updates(raw, updates)
    assert bits(after["frozen"]) == bits(after["counter"]) == bits(w)
    assert [str(after["counter"][dtype].dtype) for dtype in INTEGERS] == INTEGERS
    np.testing.assert_array_equal(after["b"], np.full(2, 0.5))


def test_what_cannot_be_added_gets_none() -> None:
    raw = {"w": jnp.ones(2), "key": jax.random.key(0), "f": jnp.tanh, "name": "a", "rate": 0.5, "text": np.array(["a"])}
    tx = rpx.optimizer(optax.sgd(0.5))
    free, fixed = rpx.partition(raw)
    updates, _ = tx.update(jax.grad(lambda free: jnp.sum(rpx.combine(free, fixed)["w"]))(free), tx.init(raw), raw)
    after = eqx.apply_updates(raw, updates)
    np.testing.assert_array_equal(after["w"], np.full(2, 0.5))
    assert {name: x for name, x in after.items() if name != "w"} == {n: x for n, x in raw.items() if n != "w"}


# Libraries. -------------------------------------------------------------------------------------------------------


# Errors. ----------------------------------------------------------------------------------------------------------

TYPES = jax.eval_shape(P.init, params())
SPECTRAL = rpx.SpectralNorm()
SPECTRAL_TYPES = jax.eval_shape(SPECTRAL.init, {"w": np.ones((2, 2), np.float32)})


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())


def test_gradients_unlike_the_parameters_are_no_mistake_of_a_transformation_that_takes_such() -> None:
    """The error of a step that fails for another reason stays what it is: what ours would advise fails too."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if jax.tree.structure(params) != jax.tree.structure({"fast": updates, "slow": updates}):
            raise ValueError("not a pair")
        raise ArithmeticError("of its own")

    raw = {"w": jnp.ones(2)}
    tx = rpx.optimizer(optax.GradientTransformation(lambda params: (), update))
    with pytest.raises(ArithmeticError, match="of its own"):
        tx.update(raw, (), {"fast": raw, "slow": raw})
