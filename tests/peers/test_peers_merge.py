"""Merged models against PEFT's functions for task vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx

torch = pytest.importorskip("torch")
merge_utils = pytest.importorskip("peft.utils.merge_utils")

WEIGHTS, PART = (0.7, 1.0, -0.4), 0.3
BASE, *MODELS = ({"w": jnp.asarray(np.random.default_rng(i).standard_normal((13, 7)), jnp.float32)} for i in range(4))
TASKS = [torch.tensor(np.array(model["w"] - BASE["w"])) for model in MODELS]


@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize("how", ["task_arithmetic", "magnitude_prune", "ties"])
def test_a_merged_task_vector_is_that_of_peft(how, sign):
    more = {} if how == "task_arithmetic" else {"density": PART}
    signs = {"majority_sign_method": sign} if how == "ties" else {}
    got = rpx.merge(MODELS, how, weights=WEIGHTS, base=BASE, **more, **signs)["w"] - BASE["w"]
    want = getattr(merge_utils, how)(TASKS, torch.tensor(WEIGHTS), **more, **signs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("how", ["dare_linear", "dare_ties"])
def test_what_is_kept_by_chance_is_merged_as_by_peft(how, monkeypatch):
    key = jax.random.key(0)

    def kept(i):
        """The entries of one model that stay: all that its task vector adds when the others have no weight."""
        weights = np.eye(3)[i]
        alone = rpx.merge(MODELS, "dare_linear", weights=weights, base=BASE, density=PART, key=key)["w"]
        return torch.tensor(np.array(alone != BASE["w"], np.float32))

    masks = [kept(i) for i in range(3)]
    draws = iter(masks)
    monkeypatch.setattr(torch, "bernoulli", lambda x: next(draws))
    got = rpx.merge(MODELS, how, weights=WEIGHTS, base=BASE, density=PART, key=key)["w"] - BASE["w"]
    want = getattr(merge_utils, how)(TASKS, torch.tensor(WEIGHTS), PART)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-6)
    assert 0.15 < float(torch.stack(masks).mean()) < 0.45
