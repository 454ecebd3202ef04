"""Starts of all pairs of stages: a pair starts at the weights, or ``summary`` says so and ``transfer`` refuses it."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from compiled import fold, init
from one_array import normal

import reparax as rpx

STAGES = {
    "weight_norm": rpx.WeightNorm(axis=-1),
    "standardization": rpx.norms.WeightStandardization(axis=-1),
    "sphere": rpx.norms.Sphere(along=-1),
    "ball": rpx.norms.MaxNorm(1.0, axis=-1),
    "orthogonal": rpx.Orthogonal(),
    "low_rank": rpx.LowRank(2),
    "symmetric": rpx.matrices.Symmetric(),
    "circulant": rpx.matrices.Circulant(),
    "semidefinite": rpx.matrices.PositiveSemidefinite(outside="unchecked"),
    "positive": rpx.Positive(outside="unchecked"),
    "bounded": rpx.numbers.Bounded(-1, 1, outside="unchecked"),
    "gain": rpx.adapters.Gain(axis=0),
    "scaled": rpx.numbers.Scale(0.5),
    "delta": rpx.adapters.Delta(),
    "freeze": rpx.Freeze(),
    "prune": rpx.MagnitudePruning(0.3),
    "quantize": rpx.FakeQuantized("int8"),
    "noise": rpx.VarNoise(0.1),
}
W = normal(4, 4, seed=1)
WITHIN, BEYOND = 1e-6, 1e-3  # nothing lies between, so no bound is near


def starts(p, params):
    """Whether ``init`` takes the parameters."""
    try:
        jax.eval_shape(p.init, params)
    except ValueError:
        return False
    return True


def pair(first, second):
    """A chain of two stages, which act on an array of the second one's name alone."""
    return replace(STAGES[first], where=second) >> replace(STAGES[second], where=second)


def distance(start, w):
    """How far a start is from the weight, in units of the largest entry."""
    return np.max(np.abs(np.asarray(start, np.float64) - w)) / np.max(np.abs(w))


@pytest.mark.thorough
@pytest.mark.parametrize("first", STAGES)
def test_no_pair_of_stages_moves_weights_in_silence(first):
    seconds = [second for second in STAGES if starts(pair(first, second), {second: W})]
    assert len(seconds) > len(STAGES) // 2
    params = dict.fromkeys(seconds, W)
    p = rpx.Chain(tuple(pair(first, second) for second in seconds))
    expected = {second: distance(start, W) for second, start in fold(p, init(p, params)).items()}
    off = {second for second in seconds if expected[second] > BEYOND}
    assert all(expected[second] < WITHIN for second in {*seconds} - off)

    for row in rpx.summary(p, params).rows:
        assert row.off == pytest.approx(expected[row.path] if row.path in off else 0, rel=1e-3), row.path

    if at_weights := rpx.Chain(tuple(pair(first, second) for second in seconds if second not in off)):
        rpx.transfer(rpx.Chain(), at_weights, params)
    moved = rpx.transfer(rpx.Chain(), p, params, nearest=True)
    assert jax.tree.structure(moved) == jax.tree.structure(init(p, params))
    with pytest.raises(ValueError, match="transfer would change the model") as error:
        rpx.transfer(rpx.Chain(), p, params)
    named = re.findall(r"'(\w+)' by ([\d.]+)", str(error.value))
    assert [float(far) for _, far in named] == pytest.approx(sorted(map(expected.get, off))[::-1][:3], rel=0.05)
    assert f"{len(off) - len(named)} more. Leave" in str(error.value)


def test_the_summary_says_how_far_each_start_is_and_the_largest_distance():
    # The nearest orthogonal matrix of a multiple of the identity is the identity.
    layers = [{"kernel": np.float32(scale) * np.eye(2, dtype=np.float32)} for scale in (2, 1, 10, 4)]
    report = rpx.summary(rpx.Orthogonal(where="layers/[^2]/kernel"), {"layers": layers, "bias": np.ones(3, np.float32)})
    assert [row.off for row in report.rows] == pytest.approx([0, 0.5, 0.5, 0, 0, 0, 0.75, 0.75])
    assert str(report).splitlines() == [
        "Orthogonal(where='layers/[^2]/kernel')",
        "path                raw value                type               free  fixed  bytes   off  stages      axes",
        "bias                                         float32[3]            3      0   12 B     -",
        "layers/0..1/kernel  @orthogonal/@fixed/base  2 x float32[2, 2]     0      8   32 B   0.5  Orthogonal"
        "  rows=0, columns=1 (a matrix)",
        "                    @orthogonal/x            2 x float32[2, 2]     8      0   32 B",
        "layers/2/kernel                              float32[2, 2]         4      0   16 B     -",
        "layers/3/kernel     @orthogonal/@fixed/base  float32[2, 2]         0      4   16 B  0.75  Orthogonal"
        "  rows=0, columns=1 (a matrix)",
        "                    @orthogonal/x            float32[2, 2]         4      0   16 B",
        "total                                                             19     12  124 B  0.75",
    ]


def test_what_is_traced_or_has_shapes_alone_has_no_start():
    p, params = rpx.Orthogonal(), {"w": W}
    of_shapes = rpx.summary(p, jax.eval_shape(lambda: params))
    assert {row.off for row in of_shapes.rows} == {None}
    assert of_shapes.total.off is None
    assert " off " not in str(of_shapes)
    reports = []
    jax.eval_shape(lambda params: reports.append(rpx.summary(p, params)), params)
    assert reports == [of_shapes]
    assert rpx.summary(p, params) != of_shapes
