"""Leaves whose content changes in place are refused, with what to pass instead."""

import jax
import numpy as np
from errors import raises
from flax import nnx

import reparax as rpx


def test_references_are_refused():
    p = rpx.WeightNorm()
    with nnx.var_defaults(hijax=True):
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    raw = {"@weight_norm": {"g": np.ones((1, 3), np.float32), "v": np.ones((4, 3), np.float32)}}
    model_of_raw = {"bias": model.bias, "kernel": raw}
    for method, tree, path in (
        ("init", model, "bias"),
        ("apply", model_of_raw, "bias"),
        ("fold", model_of_raw, "bias"),
        ("init", {"w": jax.new_ref(np.ones((4, 3), np.float32))}, "w"),
    ):
        with raises(
            TypeError,
            f"WeightNorm().{method} takes a tree of arrays, but got a reference whose content changes in place at "
            f"'{path}'. Pass its content: `nnx.with_vars(model, hijax=False)` for nnx variables with hijax=True, or "
            f"`ref[...]`.",
        ):
            getattr(p, method)(tree)


def test_what_the_error_says_to_pass_works():
    with nnx.var_defaults(hijax=True):
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    kernel, x = np.asarray(model.kernel[...]), np.ones((2, 4), np.float32)
    model = nnx.with_vars(model, hijax=False)
    y = jax.jit(lambda model, x: rpx.WeightNorm().apply(rpx.WeightNorm().init(model))(x))(model, x)
    np.testing.assert_allclose(y, x @ kernel, rtol=1e-5, atol=1e-6)
