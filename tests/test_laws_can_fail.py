"""Each law is broken by a stage that keeps all the others: a law that cannot fail proves nothing."""

from collections import OrderedDict
from dataclasses import field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.testing import (
    LAWS,
    check_laws,
    checkpoints,
    gradients,
    keys,
    plain_trees,
    purity,
    right_inverse,
    transformations,
    types_kept,
    value_semantics,
)


class Start(rpx.Reparametrization):
    """Keeps every law; the broken stages differ from it in one line."""

    def init_leaf(self, w):
        return {"x": w / 2}

    def apply_leaf(self, values):
        return values["x"] * 2


class TwiceAsLarge(Start):
    def apply_leaf(self, values):
        return values["x"] * 4


class InverseScale(rpx.Reparametrization):
    """The right inverse of a shipped library: the scale starts at one over the length."""

    def init_leaf(self, w):
        return {"g": 1 / jnp.linalg.norm(w), "v": w}

    def apply_leaf(self, values):
        return values["g"] * values["v"] / jnp.linalg.norm(values["v"])


class Identity(rpx.Parametrization):
    """A stage on whole trees that keeps every law."""

    def init(self, params, key=None):
        return params

    def apply(self, raw, key=None):
        return raw


class QuietCast(Identity):
    def apply(self, raw, key=None):
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), raw)


class HashedByIdentity(Start):
    def __hash__(self):
        return id(self)


class UnlikeUnderTracing(Identity):
    def apply(self, raw, key=None):
        return jax.tree.map(lambda w: w if isinstance(w, jax.core.Tracer) else 1.1 * w, raw)


class OneDraw(Identity):
    """Every leaf gets the same numbers, as where the key is not split."""

    stochastic: ClassVar[bool] = True

    @property
    def deterministic(self):
        return rpx.Chain()

    def apply(self, raw, key=None):
        rpx.VarNoise(1.0).apply(raw, key)
        return jax.tree.map(lambda w: w + jax.random.normal(key, w.shape, w.dtype), raw)


class SplitByCount(OneDraw):
    """The keys depend on how many leaves there are."""

    def apply(self, raw, key=None):
        rpx.VarNoise(1.0).apply(raw, key)
        leaves, treedef = jax.tree.flatten(raw)
        keys = jax.random.split(key, len(leaves))[::-1]
        return treedef.unflatten(
            [w + jax.random.normal(k, w.shape, w.dtype) for w, k in zip(leaves, keys, strict=True)]
        )


class HiddenDraw(Identity):
    """Draws although it says that it is deterministic."""

    def apply(self, raw, key=None):
        return jax.tree.map(lambda w: w if key is None else w + jax.random.normal(key, w.shape, w.dtype), raw)


class Keyless(OneDraw):
    """Draws the same numbers for want of a key, instead of asking for one."""

    def apply(self, raw, key=None):
        return rpx.VarNoise(1.0).apply(raw, jax.random.key(0) if key is None else key)


class InPlace(Identity):
    def apply(self, raw, key=None):
        if isinstance(raw["a"], np.ndarray):
            raw["a"] *= 2
        return raw


class NaiveNorm(rpx.Reparametrization):
    """Weight norm as a textbook writes it: not a number at zero."""

    min_ndim: ClassVar[int] = 2

    def init_leaf(self, w):
        return {"g": jnp.sqrt(jnp.sum(w * w, axis=0, keepdims=True)), "v": w}

    def apply_leaf(self, values):
        v = values["v"]
        return values["g"] * v / jnp.sqrt(jnp.sum(v * v, axis=0, keepdims=True))


class HalfStopped(Start):
    def apply_leaf(self, values):
        return values["x"] + jax.lax.stop_gradient(values["x"])


class DeadValue(Start):
    def init_leaf(self, w):
        return {"x": w / 2, "unused": w}


class Forgetful(Start):
    """A hyperparameter that its configuration leaves out."""

    rate: float = field(default=0.0, repr=False)


class OtherContainer(Identity):
    def apply(self, raw, key=None):
        return OrderedDict(raw)


def params():
    k = jax.random.split(jax.random.key(3), 2)
    return {"a": jax.random.normal(k[0], (8, 4)), "b": jax.random.normal(k[1], (8, 4))}


BROKEN = {
    "twice as large": (TwiceAsLarge(), right_inverse),
    "quiet cast": (QuietCast(), types_kept),
    "hashed by identity": (HashedByIdentity(), value_semantics),
    "unlike under tracing": (UnlikeUnderTracing(), transformations),
    "one draw": (OneDraw(), keys),
    "split by count": (SplitByCount(), keys),
    "hidden draw": (HiddenDraw(), keys),
    "keyless": (Keyless(), keys),
    "in place": (InPlace(), purity),
    "naive norm": (NaiveNorm(), gradients),
    "half stopped": (HalfStopped(), gradients),
    "dead value": (DeadValue(), gradients),
    "forgetful": (Forgetful(0.5), checkpoints),
    "other container": (OtherContainer(), plain_trees),
}


@pytest.mark.parametrize(("p", "broken"), BROKEN.values(), ids=BROKEN.keys())
def test_a_stage_breaks_just_that_law(p, broken, key):
    others = [law for law in LAWS if law is not broken]
    with pytest.raises(AssertionError, match=r"breaks the law of"):
        broken(p, params(), key)
    check_laws(p, params(), key, laws=others)


@pytest.mark.parametrize("p", [Start(), Identity()], ids=repr)
def test_the_stages_that_were_broken_keep_every_law(p, key):
    check_laws(p, params(), key)


def test_the_laws_catch_the_scale_that_starts_at_one_over_the_length(key):
    text = r"^InverseScale\(\) breaks the law of right inverse: apply\(init\(w\)\) is not w at 'a', by .* entry\.$"
    with pytest.raises(AssertionError, match=text):
        right_inverse(InverseScale(), params(), key)
