"""Training with optax and flax's TrainState: what a raw tree meets outside of this library."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import init
from errors import raises
from grids import mostly_thorough
from jax import Array

import reparax as rpx

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
Y = np.linspace(1, -1, 8, dtype=np.float32).reshape(4, 2)
NOISY = rpx.WeightNorm() >> rpx.VarNoise(0.075)


def _relaxed(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """``tx`` with the promotion of dtypes that adam's bias correction needs; all else stays strict."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


def _params() -> dict[str, Any]:
    kernel = jnp.array([[0.5, -1.0], [1.5, 0.25], [-0.75, 2.0]])
    return {"dense": {"kernel": kernel, "bias": jnp.array([0.1, -0.2])}}


def _loss(p: rpx.Parametrization, raw: Any, key: Array | None = None) -> Array:
    dense = p.apply(raw, key)["dense"]
    return jnp.mean((X @ dense["kernel"] + dense["bias"][None] - Y) ** 2)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(np.zeros_like, tree)


def _assert_identical(got: Any, want: Any) -> None:
    """Same structure, and bit for bit the same arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _assert_all_differ(got: Any, want: Any) -> None:
    """No number of one tree is that of the other, and all are finite."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.all(np.asarray(x) != np.asarray(y))
        assert np.all(np.isfinite(x))


def _trained(
    p: rpx.Parametrization, tx: optax.GradientTransformation, raw: Any, state: Any, key: Array, steps: int
) -> tuple[Any, Any]:
    """``raw`` and the optimizer's state after some jitted steps."""

    @jax.jit
    def step(raw: Any, state: Any, key: Array) -> tuple[Any, Any]:
        gradient = jax.grad(functools.partial(_loss, p))(raw, key)
        updates, state = tx.update(gradient, state, raw)
        return optax.apply_updates(raw, updates), state

    for i in range(steps):
        raw, state = step(raw, state, jax.random.fold_in(key, i))
    return raw, state


# Optimizers on a raw tree. ----------------------------------------------------------------------------------------


PARTLY_FIXED = [
    rpx.Freeze(where="dense/bias"),
    rpx.Freeze(where="dense/kernel") >> rpx.WeightNorm(),
    rpx.WeightNorm() >> rpx.Freeze(where="dense/kernel"),
    rpx.SpectralNorm(),
    rpx.SpectralNorm() >> rpx.WeightNorm() >> rpx.Freeze(where="dense/bias"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("p", mostly_thorough(PARTLY_FIXED, PARTLY_FIXED[1], PARTLY_FIXED[4]), ids=repr)
def test_optax_partition_by_labels_never_moves_a_fixed_value(p: rpx.Parametrization, key: Array) -> None:
    transforms = {"free": _relaxed(optax.adamw(0.1, weight_decay=0.5)), "fixed": optax.set_to_zero()}
    tx = optax.partition(transforms, rpx.training.param_labels)
    raw = init(p, _params())
    trained, _ = _trained(p, tx, raw, tx.init(raw), key, 3)
    _assert_identical(rpx.partition(trained)[1], rpx.partition(raw)[1])
    _assert_all_differ(rpx.partition(trained)[0], rpx.partition(raw)[0])


@pytest.mark.parametrize("p", mostly_thorough(PARTLY_FIXED, PARTLY_FIXED[1], PARTLY_FIXED[4]), ids=repr)
def test_partition_and_combine_train_the_free_part_alone(p: rpx.Parametrization) -> None:
    tx = _relaxed(optax.adamw(0.1, weight_decay=0.5))
    raw = init(p, _params())
    free, fixed = rpx.partition(raw)

    @jax.jit
    def step(free: Any, state: Any) -> tuple[Any, Any]:
        gradient = jax.grad(lambda free: _loss(p, rpx.combine(free, fixed)))(free)
        updates, state = tx.update(gradient, state, free)
        return optax.apply_updates(free, updates), state

    state = tx.init(free)
    for _ in range(3):
        free, state = step(free, state)
    trained = rpx.combine(free, fixed)
    assert jax.tree.structure(trained) == jax.tree.structure(raw)
    _assert_identical(rpx.partition(trained)[1], fixed)
    assert len(jax.tree.leaves(state[0].mu)) == len(jax.tree.leaves(free))
    _assert_all_differ(rpx.partition(raw)[0], free)


# Hyperparameters that change while training. ----------------------------------------------------------------------


def _counted(traces: Counter[Any]) -> Callable[..., Array]:
    """A jitted step whose parametrization is static, and which counts its own compilations."""

    @functools.partial(jax.jit, static_argnums=0)
    def step(p: rpx.Parametrization, raw: Any, key: Array) -> Any:
        traces[p] += 1
        return p.apply(raw, key)

    return step


# Compilation. -----------------------------------------------------------------------------------------------------


def test_a_parametrization_is_an_argument_of_jit_that_holds_no_arrays(key: Array) -> None:
    traces: Counter[Any] = Counter()

    @jax.jit
    def step(p: rpx.Parametrization, raw: Any, key: Array) -> Any:
        traces[p] += 1
        return p.apply(raw, key)

    alone = {std: _counted(Counter())(rpx.VarNoise(std), _params(), key) for std in (0.1, 0.2)}
    for std in [0.1, 0.2, 0.1, 0.2]:
        _assert_identical(step(rpx.VarNoise(std), _params(), key), alone[std])
    assert traces == {rpx.VarNoise(0.1): 1, rpx.VarNoise(0.2): 1}
    assert jax.tree.leaves(rpx.VarNoise(0.1)) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rpx.WeightNorm(axis=-1), rpx.WeightNorm(axis=0)),
        (rpx.SpectralNorm(1), rpx.SpectralNorm(2)),
        (rpx.VarNoise(0.1), rpx.VarNoise(0.1, where="dense/.*")),
        (rpx.WeightDropout(0.1), rpx.WeightDropout(0.1, broadcast_dims=-1)),
        (rpx.WeightNorm() >> rpx.Freeze(), rpx.Freeze() >> rpx.WeightNorm()),
    ],
    ids=repr,
)
def test_chains_that_differ_never_share_a_compiled_function(
    one: rpx.Parametrization, other: rpx.Parametrization
) -> None:
    traces: Counter[Any] = Counter()

    @functools.partial(jax.jit, static_argnums=0)
    def init(p: rpx.Parametrization, params: Any) -> Any:
        traces[p] += 1
        return p.init(params)

    for p in [one, other, one]:
        init(p, _params())
    assert one != other
    assert traces == {one: 1, other: 1}


def test_raw_trees_can_be_donated(key: Array) -> None:
    raw = NOISY.init(_params())
    expected = jax.tree.map(lambda w: np.asarray(w) - 1, raw)
    before = raw["dense"]["bias"]
    step = jax.jit(lambda raw: jax.tree.map(lambda w: w - 1, raw), donate_argnums=0)
    _assert_identical(step(jax.tree.map(jnp.copy, raw)), expected)
    assert not before.is_deleted()
    _assert_identical(step(raw), expected)
    assert before.is_deleted()


def test_an_optimizer_state_of_another_axis_is_refused_in_the_next_step_at_the_latest() -> None:
    tx, raw = optax.sgd(0.1, momentum=0.9), rpx.WeightNorm().init(_params())
    updates, _ = tx.update(_zeros(raw), tx.init(rpx.WeightNorm(axis=0).init(_params())), raw)
    with raises(
        ValueError,
        "WeightNorm().apply at 'dense/kernel': expected 'g' of shape (1, 2), but got (3, 2): another chain made this "
        "raw tree. Apply the chain that made it; `p.check(raw, like=params)` lists every difference.",
    ):
        rpx.WeightNorm().apply(optax.apply_updates(raw, updates))


# Fixed values that are updated. ---------------------------------------------------------------------------------------


# flax's TrainState. -----------------------------------------------------------------------------------------------
