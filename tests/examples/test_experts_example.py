"""The example of experts: what is on file is what its page says, and its adapters by hand are those of the chain."""

import json
from pathlib import Path

import jax
import numpy as np

import reparax as rpx
from examples.experts import model, tuning

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "examples" / "experts" / "results" / "experts.json").read_text())
SMALL = model.Config(layers=1, experts=4, chosen=2, width=16, inner=16, heads=2, words=32)


def test_adapters_in_factors_cost_what_they_cost_by_hand_and_end_at_the_same_loss():
    for each in (FOUND["tuned"], FOUND["large"]):
        for what in ("GFLOP", "temporary MiB"):
            assert each["factored"][what] <= 1.1 * each["by hand"][what] < each["apply"][what]
    apply, factored, by_hand = (np.array(FOUND["tuned"][way]["curve"]) for way in ("apply", "factored", "by hand"))
    np.testing.assert_allclose(factored, apply, rtol=0.01)
    np.testing.assert_allclose(factored, by_hand, rtol=0.01)
    assert FOUND["file"]["same weights"]


def test_the_page_says_what_is_on_file():
    text = " ".join((ROOT / "docs" / "fine_tuning.md").read_text().split())
    before, after = (FOUND[when]["code"] for when in ("before", "after"))
    few = FOUND["compressed"]["four bits, rounded"]
    assert f"{before:.2f} nats on the new text before tuning, {after:.2f} after, {few:.2f} in four bits" in text


def test_the_adapters_by_hand_are_those_of_the_chain():
    p, rows = tuning.lora(2), np.arange(18, dtype=np.int32).reshape(2, 9)

    @jax.jit
    def both(start, key):
        params = model.init(SMALL, start)
        free, fixed = rpx.partition(jax.tree.map(lambda x: x + 0.1, p.init(params, key)))
        base = jax.tree.map(lambda x: x + 0.1, params)
        got = jax.grad(rpx.factored(tuning.by_apply(p, SMALL)))(free, fixed, rows)
        return got, jax.grad(tuning.by_hand(SMALL))(*tuning.hand(base, free), rows)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got, by_hand = both(jax.random.key(0), jax.random.key(1))
    for name, each in by_hand.items():
        for factor, gradient in each.items():
            np.testing.assert_allclose(got["layers"][name]["@lora"][factor], gradient, rtol=1e-4, atol=1e-6)
