"""Plain trees of arrays, and leaves that are none."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import reparax as rpx


def test_a_field_called_value_keeps_its_name() -> None:
    class Attention(NamedTuple):
        query: Array
        key: Array
        value: Array

    w = jnp.ones((2, 2))
    raw = rpx.WeightNorm(axis=-1, where="0/value").init([Attention(w, w, w)])
    assert jax.tree.map(jnp.shape, raw[0].value) == {"@weight_norm": {"g": (1, 2), "v": (2, 2)}}


def test_a_key_called_value_keeps_its_name(key: Array) -> None:
    effective = rpx.VarNoise(0.1, where="a/value").apply({"a": {"value": jnp.ones(3), "key": jnp.ones(3)}}, key)
    assert bool(jnp.all(effective["a"]["value"] != 1))
    np.testing.assert_array_equal(effective["a"]["key"], np.ones(3, np.float32))


def test_leaves_that_are_no_floating_arrays_pass_through_as_the_same_objects(key: Array) -> None:
    others = {
        "int": jnp.arange(6).reshape(2, 3),
        "bool": jnp.ones((2, 3), bool),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(7), 6).reshape(2, 3),
        "legacy": jnp.zeros((2, 2), jnp.uint32),
        "none": None,
        "float": 1.5,
        "count": 3,
        "flag": True,
        "text": "relu",
        "function": jnp.tanh,
        "object": object(),
    }
    chain = rpx.SpectralNorm() >> rpx.WeightDropout(0.1) >> rpx.quantized.Cast("bfloat16") >> rpx.VarNoise(0.1)
    raw = chain.init({"w": jnp.eye(4), **others})
    for tree in [raw, chain.update(raw), chain.apply(raw, key), chain.fold(raw)]:
        assert all(tree[name] is others[name] for name in others)
