"""``check_step``: the verdict on steps as users write them, right and wrong ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises

import reparax as rpx
from reparax.testing import _step, check_step

W = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
P = rpx.Freeze(where="base") >> rpx.SpectralNorm(where="norm") >> rpx.MagnitudePruning(0.5, where="sparse")


@jax.jit
def stepped(raw):
    """Numbers that train move so far that another half of them is the larger one."""
    tx = rpx.optimizer(optax.sgd(1.0), updates="by hand")
    grads = jax.tree.map(lambda x: jnp.where(jnp.abs(x) > 0.5, 0.9 * x, -x), raw)
    return optax.apply_updates(raw, tx.update(grads, tx.init(raw), raw)[0])


BEFORE = stepped(jax.jit(P.init)({"base": W, "norm": W, "sparse": W}))  # whose vectors the power iteration still moves
FREE = stepped(BEFORE)


def test_a_step_with_one_update_is_right():
    check_step(P, BEFORE, P.update(FREE))
    check_step(P, BEFORE, jax.jit(P.update)(FREE))
    check_step(rpx.sparse.SET(0.5), *(rpx.sparse.SET(0.5).init({"w": w}, jax.random.key(0)) for w in (W, W + 1)))


def test_a_forgotten_update_is_found():
    with raises(
        AssertionError,
        f"({P!r}).update gives other fixed values than this step:\n"
        "  norm/@spectral_norm/@fixed/u: the step did not change it\n"
        "  norm/@spectral_norm/@fixed/v: the step did not change it\n"
        "  sparse/@magnitude_pruning/@fixed/mask: the step did not change it\n"
        "Let the optimizer update them, `rpx.optimizer(tx, p)`, or call `raw = p.update(raw)` once after each step.",
    ):
        check_step(P, BEFORE, FREE)


def test_an_update_before_the_step_or_twice_is_found():
    for after in (stepped(P.update(BEFORE)), P.update(P.update(FREE))):
        with pytest.raises(AssertionError, match="norm/@spectral_norm/@fixed/u: it differs by"):
            check_step(P, BEFORE, after)


def test_a_frozen_base_that_moved_is_found():
    tx = optax.sgd(1.0)
    after = optax.apply_updates(BEFORE, tx.update(jax.tree.map(jnp.ones_like, BEFORE), tx.init(BEFORE), BEFORE)[0])
    with pytest.raises(ValueError, match="base/@freeze/@fixed/w: 12 of 12 numbers differ"):
        check_step(P, BEFORE, P.update(after))


F32, F16 = np.float32, np.float16
WRONG = {
    "rounded": (np.array([0, 1 + 63 * 2**-23], F32), [1, 0], np.array([0, 1], F32), ""),
    "more than rounded": (np.array([0, 1 + 66 * 2**-23], F32), [1, 0], np.array([0, 1], F32), "it differs by 7.9e-06"),
    "rounded in half precision": (np.array([4 + 2**-6], F16), [1], np.array([4], F16), ""),
    "more than that": (np.array([4 + 2**-5], F16), [1], np.array([4], F16), "it differs by 7.8e-03"),
    "an integer": (np.array([2**20], np.int32), [1], np.array([2**20 + 1], np.int32), "it differs by 9.5e-07"),
    "as it was": (np.array([1, 1], F32), [1, 1], np.array([1, 2], F32), "the step did not change it"),
}


@pytest.mark.parametrize(("new", "old", "expected", "text"), WRONG.values(), ids=WRONG)
def test_only_floats_may_differ_and_by_rounding_alone(new, old, expected, text):
    found = _step._what_is_wrong(new, np.array(old, new.dtype), expected)
    assert found == (f"{text} of the largest entry" if "differs" in text else text)


def test_numbers_that_are_none_may_stay():
    frozen = rpx.Freeze().init({"w": np.array([np.nan, np.inf], F32)})
    check_step(rpx.Freeze(), frozen, frozen)


def test_the_chain_comes_first():
    with pytest.raises(TypeError, match=r"^check_step expected a parametrization, but got a value of type dict"):
        check_step(BEFORE, P, FREE)
