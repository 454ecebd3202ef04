"""Two halves of float32 against numpy's bits, for each pair of halves, and beside all other stages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CASES, OF_OTHER_CASES
from compiled import effective, init
from grids import mostly_thorough
from ml_dtypes import bfloat16
from one_array import normal

import reparax as rpx

P = rpx.quantized.Halved()
RESTS = ("int16", "int8")
LARGEST = np.finfo(np.float32).max


def tree(top, rest):
    return {"w": {"@halved": {"w": jnp.asarray(top, top.dtype), "@fixed": {"rest": jnp.asarray(rest, rest.dtype)}}}}


def whole(p, w):
    return np.asarray(effective(p, init(p, {"w": w}))["w"])


def test_all_numbers_are_held_but_those_that_bfloat16_has_no_number_near():
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, np.uint32)
    ends = np.array([0.0, 3.4e38, LARGEST, np.inf, 1.0, 2.0**-126, 2.0**-134], np.float32)
    w = np.concatenate([bits.view(np.float32), ends, -ends])
    w = np.where(np.abs(w) < 2.0**-134, np.copysign(np.float32(0), w), w)
    got, nan = whole(P, w), np.isnan(w)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), w[~nan].view(np.uint32))
    assert np.all(np.isnan(got[nan]))
    low = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)  # NaN in the lower half alone
    assert np.all(np.isnan(whole(P, low)))
    assert not np.any(whole(P, np.array([2.0**-135, -(2.0**-140)], np.float32)))
    near = whole(rpx.quantized.Halved(rest="int8"), w)
    assert np.all(np.isfinite(near) == np.isfinite(w))
    held = np.isfinite(w) & (np.abs(w) >= 2.0**-126)
    assert np.max(np.abs(near[held] / w[held] - 1)) <= 2.0**-15


@pytest.mark.parametrize("rest", RESTS)
def test_each_top_with_each_rest_is_a_number_that_rounds_to_the_top(rest):
    rng = np.random.default_rng(1)
    top = np.concatenate([np.arange(2**16), rng.integers(0, 2**16, 2**16)]).astype(np.uint16).view(bfloat16)
    least, most = (-32767, 32767) if rest == "int16" else (-127, 127)
    ends = rng.choice([least, -1, 0, 1, most], 2**16)
    rests = np.concatenate([ends, rng.integers(least, most + 1, 2**16)]).astype(rest)
    got = np.asarray(effective(rpx.quantized.Halved(rest=rest), tree(top, rests))["w"])
    known = ~np.isnan((top.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    assert np.all(np.isnan(got) == ~known)
    np.testing.assert_array_equal(got[known].astype(bfloat16).view(np.uint16), top[known].view(np.uint16))
    assert np.all(np.isfinite(got[top.view(np.uint16) % 2**15 < 0x7F80]))
    assert not np.any(got[top.view(np.uint16) % 2**15 == 0])


def test_an_update_by_optax_is_rounded_and_nothing_more():
    w = normal(64, 8)
    raw = init(P, {"w": w})
    top = raw["w"]["@halved"]["w"]

    def moved(update):
        return np.asarray(effective(P, optax.apply_updates(raw, tree(update, np.zeros((64, 8), np.int16))))["w"])

    assert not np.any(moved(-top))
    assert np.all(moved(np.full((64, 8), np.inf, bfloat16)) > 3e38)
    far = moved(np.full((64, 8), 100, bfloat16))
    np.testing.assert_allclose(far, w + 100, rtol=2.0**-7)


def test_pruned_weights_are_zeros_and_the_others_are_whole():
    w = normal(8, 8)
    p = rpx.MagnitudePrune(0.5) >> P
    got, want = (np.asarray(effective(q, init(q, {"w": w}))["w"]) for q in (p, rpx.MagnitudePrune(0.5)))
    np.testing.assert_array_equal(got, want)
    assert np.sum(got == 0) == 32


def leaves(p, params):
    key = jax.random.key(0)
    return [np.asarray(x) for x in jax.tree.leaves(effective(p, init(p, params, key), key))]


BESIDE = [name for name in CASES if name not in {"halved", "joint norm", "moments in eight bits", *OF_OTHER_CASES}]
"""Halves of halves are refused; the joint norm of the registry and moments are of float32 alone."""


@pytest.mark.parametrize(
    "case", mostly_thorough(zip(BESIDE, itertools.cycle(RESTS)), ("prunings", "int16")), ids=", ".join
)
def test_each_stage_before_and_behind_two_halves(case):
    (p, params), rest = CASES[case[0]], case[1]
    half = rpx.quantized.Halved(rest=rest)
    want = leaves(p, params())
    for got, near in ((leaves(half >> p, params()), 2.0**-15), (leaves(p >> half, params()), 2.0**-4)):
        for x, y in zip(got, want, strict=True):
            x, y = x.astype(np.float32), y.astype(np.float32)
            np.testing.assert_allclose(x, y, rtol=near, atol=near * np.max(np.abs(y)))
