"""Each law is broken by a stage that keeps all the others: a law that cannot fail proves nothing."""

import itertools
import re
from collections import OrderedDict
from dataclasses import field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.testing import check_laws
from reparax.testing._laws import LAWS


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


class Identity(rpx.Perturbation):
    """A stage that keeps every law; those below differ in a method of the whole chain, which no class may write."""

    stochastic = False

    def apply_leaf(self, w, key):
        return w


def on_whole_trees(cls):
    """Gives a class such methods once it is there: ``whole_apply`` becomes ``apply``, and folds too."""
    for name in [name for name in vars(cls) if name.startswith("whole_")]:
        setattr(cls, name.removeprefix("whole_"), vars(cls)[name])
    cls.fold = lambda self, raw: self.deterministic.apply(raw)
    return cls


@on_whole_trees
class QuietCast(Identity):
    def whole_apply(self, raw, key=None):
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), raw)


class HashedByIdentity(Start):
    def __hash__(self):
        return id(self)


@on_whole_trees
class UnlikeUnderTracing(Identity):
    def whole_apply(self, raw, key=None):
        return jax.tree.map(lambda w: w if isinstance(w, jax.core.Tracer) else 1.1 * w, raw)


class AtRandom(Identity):
    stochastic: ClassVar[bool] = True

    @property
    def deterministic(self):
        return rpx.Chain()


@on_whole_trees
class OneDraw(AtRandom):
    """Every leaf gets the same numbers, as where the key is not split."""

    def whole_apply(self, raw, key=None):
        rpx.VarNoise(1.0).apply(raw, key)
        return jax.tree.map(lambda w: w + jax.random.normal(key, w.shape, w.dtype), raw)


@on_whole_trees
class SplitByCount(AtRandom):
    """The keys depend on how many leaves there are."""

    def whole_apply(self, raw, key=None):
        rpx.VarNoise(1.0).apply(raw, key)
        leaves, treedef = jax.tree.flatten(raw)
        keys = jax.random.split(key, len(leaves))[::-1]
        return treedef.unflatten(
            [w + jax.random.normal(k, w.shape, w.dtype) for w, k in zip(leaves, keys, strict=True)]
        )


@on_whole_trees
class HiddenDraw(Identity):
    """Draws although it says that it is deterministic."""

    def whole_apply(self, raw, key=None):
        return jax.tree.map(lambda w: w if key is None else w + jax.random.normal(key, w.shape, w.dtype), raw)


@on_whole_trees
class Keyless(AtRandom):
    """Draws the same numbers for want of a key, instead of asking for one."""

    def whole_apply(self, raw, key=None):
        return rpx.VarNoise(1.0).apply(raw, jax.random.key(0) if key is None else key)


@on_whole_trees
class InPlace(Identity):
    def whole_apply(self, raw, key=None):
        if isinstance(raw["a"], np.ndarray):
            raw["a"] *= 2
        return raw


class NaiveNorm(rpx.Reparametrization):
    """Weight norm as a textbook writes it: not a number at zero."""

    min_ndim: ClassVar[int] = 2

    def init_leaf(self, w):
        return {"g": self.length(w), "v": w}

    def apply_leaf(self, values):
        return values["g"] * (values["v"] / self.length(values["v"]))

    def length(self, w):
        wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
        return jnp.sqrt(jnp.sum(wide * wide, axis=0, keepdims=True)).astype(w.dtype)


class OverflowingNorm(rpx.Reparametrization):
    """A norm that float16 cannot square."""

    def init_leaf(self, w):
        return {"g": self.length(w), "v": w}

    def apply_leaf(self, values):
        return values["g"] * values["v"] / self.length(values["v"])

    def length(self, w):
        squares = jnp.sum(w * w, axis=0, keepdims=True)
        return jnp.sqrt(jnp.where(squares == 0, jnp.ones_like(squares), squares))


class HalfStopped(Start):
    def apply_leaf(self, values):
        return values["x"] + jax.lax.stop_gradient(values["x"])


class LengthOfZero(rpx.Reparametrization):
    """Not a number at its start, where the step is zero."""

    raw_values = {"base": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"step": jnp.zeros_like(w), "base": w}

    def apply_leaf(self, values):
        return values["base"] + values["step"] * jnp.linalg.norm(values["step"])


class CastToSingle(rpx.Reparametrization):
    """Computes in single precision also where the array is in double."""

    def init_leaf(self, w):
        return {"x": jnp.arcsinh(w.astype(jnp.float32)).astype(w.dtype)}

    def apply_leaf(self, values):
        return jnp.sinh(values["x"].astype(jnp.float32)).astype(values["x"].dtype)


class RoundedAway(rpx.Perturbation):
    """It has no gradient, whatever it says."""

    stochastic: ClassVar[bool] = False
    straight_through: ClassVar[bool] = True

    def apply_leaf(self, w, key):
        return jnp.round(4 * w) / 4


class SlightDrift(rpx.Perturbation):
    """No entry tells it from noise, their average does."""

    def apply_leaf(self, w, key):
        return w + 0.1 + jax.random.normal(key, w.shape, w.dtype)


class RareFlips(rpx.Perturbation):
    def apply_leaf(self, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.02, w.shape), -w, w)


class DriftAlone(rpx.Perturbation):
    """One entry of many drifts."""

    def apply_leaf(self, w, key):
        return (w + 0.1 * jax.random.normal(key, w.shape, w.dtype)).at[3, 2].add(0.05)


class Counted(rpx.Reparametrization):
    """Keeps every law; the broken updates differ from it in one line."""

    raw_values = {"x": rpx.stage.main(), "count": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"x": w, "count": jnp.zeros((2,), jnp.float32)}

    def apply_leaf(self, values):
        return values["x"]

    def update_leaf(self, values):
        return {"count": values["count"] + 1}

    def update_base_leaf(self, values):
        return values


class WeakUpdate(Counted):
    """A program that takes the updated tree is compiled anew."""

    def init_leaf(self, w):
        return {"x": w, "count": jnp.zeros((), jnp.float32)}

    def update_leaf(self, values):
        return {"count": jnp.asarray(1.0)}


class ChangingUpdate(Counted):
    numbers: ClassVar = itertools.count()

    def update_leaf(self, values):
        return {"count": values["count"] + float(next(self.numbers))}


@on_whole_trees
class MovingUpdate(Identity):
    """The update trains."""

    def whole_update(self, raw, key=None):
        return jax.tree.map(lambda w: 0.9 * w, raw)


class Jumping(Counted):
    def update_base_leaf(self, values):
        return {**values, "x": 2 * values["x"]}


class Forgetful(Start):
    """A hyperparameter that its configuration leaves out."""

    rate: float = field(default=0.0, repr=False)


@on_whole_trees
class OtherContainer(Identity):
    def whole_apply(self, raw, key=None):
        return OrderedDict(raw)


class Redundant(rpx.Reparametrization):
    """Many raw values have one array, and no two such stages are the same, so values never stay."""

    unlike_itself: float = field(default=float("nan"), compare=False, repr=False)

    def init_leaf(self, w):
        return {"x": w, "shift": jnp.zeros_like(w)}

    def apply_leaf(self, values):
        return values["x"] + values["shift"]


class AllAux(Start):
    """No earlier stage finds its array."""

    raw_values = {"x": rpx.stage.aux()}


@on_whole_trees
class Deaf(Identity):
    """It takes everything, whatever is selected."""

    def whole_init(self, params, key=None):
        return params


MEAN = (
    "mean: at 'a', the mean of 1024 draws differs from `p.deterministic` by #, with a standard error of #; "
    "define `mean_leaf` or `deterministic`."
)


def params():
    k = jax.random.split(jax.random.key(3), 2)
    return {"a": jax.random.normal(k[0], (8, 4)), "b": jax.random.normal(k[1], (8, 4))}


BROKEN = [  # the first of each law is quick; in the texts, # is a number
    (
        TwiceAsLarge(),
        "right inverse: for a w that `apply` can return, apply(init(w)) differs from w at 'a', by # of the largest "
        "entry.",
    ),
    (QuietCast(), "types: 'a' is bfloat16(8, 4), but must be float32(8, 4)."),
    (
        OverflowingNorm(),
        "half precision: init gives inf as the largest entry of 'a/@overflowing_norm/g', but # in float32; compute "
        "in float32, and cast the result back.",
    ),
    (HashedByIdentity(), "value semantics: a copy of it is not equal to it, or has another hash."),
    (
        UnlikeUnderTracing(),
        "transformations: jit differs from eager evaluation at 'a', by # of the largest entry.",
    ),
    (OneDraw(), "keys: the noise of 'a' and of 'b' has correlation 1.00."),
    (SplitByCount(), "keys: the draws of the parameters change if a new parameter is added."),
    (HiddenDraw(), "keys: `p.deterministic` gives other values with a key than without, or needs a key."),
    (Keyless(), "keys: `apply` draws random numbers although it gets no key."),
    (SlightDrift(), MEAN),
    (DriftAlone(), MEAN),
    (RareFlips(), MEAN),
    (InPlace(), "purity: `init`, `apply` or `update` changes the arrays that it gets."),
    (RoundedAway(), "gradients: the gradient of 'a' is zero, so no optimizer can train it."),
    (NaiveNorm(), "gradients: the gradient of 'a/@naive_norm/g' is not finite at zero parameters."),
    (LengthOfZero(), "gradients: the gradient of 'a/@length_of_zero/step' is not finite at its initial values."),
    (
        HalfStopped(),
        "gradients: finite differences give the slope #, but the gradient gives #; if that is intended, set "
        "`straight_through = True`.",
    ),
    (
        CastToSingle(),
        "gradients: finite differences give the slope #, but the gradient gives #; the formula casts float64 to "
        "float32; cast to `jnp.promote_types(w.dtype, jnp.float32)` instead.",
    ),
    (MovingUpdate(), "update: update changes the free value 'a'."),
    (
        WeakUpdate(),
        "update: update returns 'a/@weak_update/@fixed/count' as weakly typed float32[], but its input was float32[].",
    ),
    (ChangingUpdate(), "update: equal raw trees and keys give different results."),
    (Jumping(), "update base: it changes the effective tree at 'a', by # of the largest entry."),
    (Redundant(), "transfer: `transfer(p, p, raw)` changes 'a/@redundant/shift'."),
    (
        AllAux(),
        "chains: in a chain with another stage, it raises ValueError: Doubled().init selects nothing: its default "
        "selects none of the 2 arrays ('a/x', 'b/x'). Select some with `where`.",
    ),
    (Deaf(), "selection: init accepts where='no such path', which matches no array."),
    (Forgetful(0.5), "checkpoints: from_json(p.to_json()) is not equal to p."),
    (
        OtherContainer(),
        "plain trees: fold returns the structure PyTreeDef(CustomNode(OrderedDict[('a', 'b')], [*, *])), but the "
        "parameters have PyTreeDef({'a': *, 'b': *}).",
    ),
]


def law_of(text):
    return text.partition(":")[0].replace(" ", "_")


QUICK = {law_of(text): p for p, text in reversed(BROKEN)}


@pytest.mark.parametrize(
    ("p", "text"),
    [pytest.param(*each, marks=() if each[0] in QUICK.values() else pytest.mark.thorough) for each in BROKEN],
    ids=lambda x: type(x).__name__,
)
def test_a_stage_breaks_that_law(p, text, key):
    whole = re.escape(f"{p!r} breaks the law of {text}").replace(r"\#", r"[-+.e\d]+")
    with pytest.raises(AssertionError, match=f"^{whole}$"):
        check_laws(p, params(), key, laws=(law_of(text),))


def test_a_chain_that_breaks_none_passes_all(key):
    check_laws(Start() >> rpx.VarNoise(0.1), params(), key)


def test_every_law_is_broken_by_one():
    assert QUICK.keys() == set(LAWS)


@pytest.mark.parametrize(
    "p", [InverseScale() >> rpx.WeightNorm(axis=-1), rpx.WeightNorm(axis=-1) >> InverseScale()], ids=repr
)
def test_a_stage_of_a_chain_that_is_wrong_on_its_own_image_breaks_the_law_wherever_it_stands(p, key):
    text = r"^InverseScale\(\) breaks the law of right inverse: .* differs from w at 'a.*', by .* entry\.$"
    with pytest.raises(AssertionError, match=text):
        check_laws(p, params(), key, laws=("right_inverse",))


def test_a_chain_need_not_start_where_a_start_is_in_no_image_of_the_stages_before_it(key):
    square = {"a": params()["a"][:4]}
    check_laws(rpx.matrices.Symmetric() >> rpx.WeightNorm(axis=-1), square, key, laws=("right_inverse",))
