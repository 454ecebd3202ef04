"""Verdicts of laws on results that are made up: what each law takes, what it refuses, and where the border lies."""

from collections import OrderedDict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reparax as rpx
from reparax.core.checks import WrongType
from reparax.testing import _evidence as evidence
from reparax.testing import _laws, check_laws
from reparax.testing._evidence import Case

F32, F16 = np.float32, np.float16
KEY = jax.random.key(0)
CASE = Case("a name", rpx.Chain(), {}, KEY)


def single(*numbers):
    return np.array(numbers, F32)


W = single(1, 2)
PARAMS = {"a": W}


FLAGS = ("stochastic", "changes_type", "straight_through", "moves_weights", "starts_elsewhere")


class Made(SimpleNamespace):
    def __iter__(self):
        return iter(self.stages)

    def __len__(self):
        return len(self.stages)


def chain(**methods):
    """A chain that keeps every array, but for these methods and fields."""
    fields = {**dict.fromkeys(FLAGS, False), "deterministic": None, "stages": None}
    given = {name: lambda raw, *_: raw for name in ("init", "apply", "fold", "update")}
    found = Made(**{**fields, **given, **methods})
    found.deterministic = found.deterministic or found
    found.stages = found.stages or (found,)
    return found


def case(p, params=None, **known):
    """A case with these trees as ``raw`` and ``moved``."""
    made = Case("a law", p, PARAMS if params is None else params, KEY)
    made.__dict__.update({"raw": made.params, "moved": made.params} | known)
    return made


@pytest.fixture
def eager(monkeypatch):
    """Calls the methods of a chain where the laws call compiled programs, and replaces others by name."""

    def replace(**programs):
        plain = {
            "compiled_init": lambda p, params, key: p.init(params, key),
            "compiled_apply": lambda p, raw, key: p.apply(raw, key),
            "compiled_fold": lambda p, raw: p.fold(raw),
            "compiled_update": lambda p, raw, key: getattr(p, "compiled_update", p.update)(raw, key),
            "update_raw": lambda p, raw, key: p.update(raw, key),
            "stages_of": lambda p: p.stages,
        }
        for name, program in (plain | programs).items():
            monkeypatch.setattr(evidence, name, program)

    replace()
    return replace


def verdict(law, case, text):
    """The law holds if ``text`` is None, and otherwise is broken with this text."""
    if text is None:
        law(case)
        return
    with pytest.raises(AssertionError) as found:
        law(case)
    assert text in str(found.value)


def test_laws_are_chosen_by_name_and_others_do_not_run(monkeypatch):
    ran = []
    monkeypatch.setattr(_laws, "LAWS", dict.fromkeys(("keys", "half_precision"), ran.append))
    other = jax.random.key(1)
    check_laws(rpx.WeightNorm(), PARAMS)
    check_laws(rpx.WeightNorm(), PARAMS, other, laws="keys")
    check_laws(rpx.WeightNorm(), PARAMS, other, laws=iter(["half_precision"]))
    assert [each.law for each in ran] == ["keys", "half precision", "keys", "half precision"]
    assert [each.key is other for each in ran] == [False, False, True, True]
    assert all(each.chain == rpx.WeightNorm() and each.params is PARAMS for each in ran)
    np.testing.assert_array_equal(jax.random.key_data(ran[0].key), jax.random.key_data(KEY))
    with raises(ValueError, "check_laws got 'means' as a law. Choose from 'keys', 'half_precision'."):
        check_laws(rpx.WeightNorm(), PARAMS, laws=("keys", "means"))
    with pytest.raises(TypeError, match="check_laws expected a parametrization"):
        check_laws(PARAMS, rpx.WeightNorm(), laws=("keys",))
    assert len(ran) == 4


# ---- right inverse


def rounded(params, *_):
    return {"a": np.round(params["a"])}


SMALL = {"a": W * F32(1 + 2**-12)}  # a difference that only float16 rounds away
HALVES = {"a": W.astype(F16)}
OFF, ON = (SMALL, PARAMS), (PARAMS, PARAMS)
NEAR = {"a": single(1.2, 2)}
INVERSES = {
    "the same": (chain(), {}, None),
    "another": (chain(init=rounded), {"moved": NEAR}, "apply(init(w)) differs from w at 'a', by 1.0e-01"),
    "another start": (chain(init=rounded, starts_elsewhere=True), {"moved": NEAR}, None),
    "another start of one of two": (
        chain(init=rounded, stages=(chain(), chain(starts_elsewhere=True))),
        {"moved": NEAR, "images": [OFF, OFF]},
        None,
    ),
    "a projection with fixed values": (
        chain(init=rounded, fold=lambda raw: raw),
        {"raw": {"a": {"@mask": {"w": W, "@fixed": {"mask": W}}}}, "moved": NEAR},
        None,
    ),
    "a small difference": (chain(init=lambda params, key: SMALL), {}, "apply(init(w)) differs from w at 'a'"),
    "a small difference of half precision": (chain(init=lambda params, key: SMALL), {"raw": HALVES}, None),
    "a chain of right stages": (
        chain(init=rounded, stages=(chain(), chain())),
        {"moved": NEAR, "starts": [ON, ON]},
        "apply(init(w)) differs from w",
    ),
    "a chain that need not start there": (
        chain(init=rounded, stages=(chain(), chain())),
        {"moved": NEAR, "starts": [ON, OFF]},
        None,
    ),
    "the second of two stages": (
        chain(stages=(chain(), chain(kind="second"))),
        {"images": [OFF, ON]},
        "kind='second')",
    ),
    "stages of half precision": (
        chain(stages=(chain(), chain())),
        {"images": [(HALVES, {"a": W * F32(1 + 2**-8)}), ({"a": W * F32(1 + 2**-8)}, HALVES)]},
        None,
    ),
}


@pytest.mark.parametrize(("p", "known", "text"), INVERSES.values(), ids=INVERSES)
def test_a_weight_of_the_image_comes_back(p, known, text, eager):
    known = {"starts": [ON, ON], "images": [ON, ON]} | known
    starts, images = known.pop("starts"), known.pop("images")
    eager(without_means=lambda p: p, compiled_stages=lambda p, params, key: (starts, images))
    verdict(_laws.right_inverse, case(p, **known), text)


def test_noise_of_another_mean_is_left_out_of_the_round_trip(eager):
    p, rest = chain(fold=lambda raw: {}), chain(init=None)
    eager(without_means=lambda given: rest if given is p else None)
    verdict(_laws.right_inverse, case(p), None)


# ---- mean


def test_each_random_stage_has_its_mean(monkeypatch, eager):
    stages = tuple(chain(stochastic=stochastic) for stochastic in (False, True, False, True))
    asked = []
    monkeypatch.setattr(_laws, "_require_mean", lambda case, index, of: asked.append((index, of.chain, case.chain)))
    p = chain(stages=stages)
    _laws.mean(case(p))
    assert [(index, stage is stages[index], whole is p) for index, stage, whole in asked] == [
        (1, True, True),
        (3, True, True),
    ]


def of_mean(monkeypatch, total, squares, claimed):
    """The verdict of the law ``mean`` on sums over 1024 draws."""
    sums = {"a": np.array(total) * 1024}, {"a": np.array(squares) * 1024}

    def deviations(p, index, raw, keys):
        assert (p, index, raw, keys.shape) == ("p", 3, PARAMS, (1024,))
        return {"a": np.array(claimed, F32)}, *sums

    monkeypatch.setattr(evidence, "deviations", deviations)
    _laws._require_mean(case("p"), 3, CASE)


VARIANCE = 1.0  # of each deviation, whose mean has the standard error 1 / 32
MEANS = {
    "none": ([0, 0, 0, 0], True),
    "below six errors": ([5.9 / 32, 0, 0, 0], True),
    "above six errors": ([0, 6.1 / 32, 0, 0], False),
    "below minus six errors": ([-6.1 / 32, 0, 0, 0], False),
    "in the average": ([0, 0, 6.1 / 32, 0], False),
    "in the weighted average": ([0, 0, 0, 6.1 / 32], False),
}


@pytest.mark.parametrize(("total", "holds"), MEANS.values(), ids=MEANS)
def test_a_mean_may_deviate_by_six_standard_errors(total, holds, monkeypatch):
    squares = VARIANCE + np.square(total)
    if holds:
        of_mean(monkeypatch, total, squares, [0, 0])
    else:
        text = r"at 'a', the mean of 1024 draws .* by 1\.9e-01, with a standard error of 3\.1e-02; define"
        with pytest.raises(AssertionError, match=text):
            of_mean(monkeypatch, total, squares, [0, 0])


def test_the_worst_deviation_is_the_one_that_its_own_error_explains_least(monkeypatch):
    text = "by 2.0e-01, with a standard error of 3.1e-02"
    with pytest.raises(AssertionError, match=text):
        of_mean(monkeypatch, [0, 0, 1, 0.2], [1, 1, 65, 1.04], [0, 0])


def test_a_mean_may_deviate_by_rounding(monkeypatch):
    of_mean(monkeypatch, [1e-3, 0, 0, 0], [1e-6, 0, 0, 0], [0, -200])  # 64 eps of 200 is 1.5e-3
    with pytest.raises(AssertionError, match="law of a name"):
        of_mean(monkeypatch, [2e-3, 0, 0, 0], [4e-6, 0, 0, 0], [0, -200])


# ---- half precision

HALF = {
    "init": ("init", [300, 1], [300, 3], True),
    "init, not finite": ("init", [np.inf, 1], [300, 3], False),
    "fold by a quarter": ("fold", [300, 225], [300, 300], True),
    "fold by more": ("fold", [300, 224], [300, 300], False),
    "update by more": ("update", [300, 224], [300, 300], False),
    "update, not finite": ("update", [np.nan, 300], [300, 300], False),
    "draws by more": ("apply", [300, 0], [300, 300], True),
    "draws, not finite": ("apply", [np.inf, 0], [300, 300], False),
    "gradient by more": ("the gradient", [300, 0], [300, 300], True),
    "gradient, not finite": ("the gradient", [np.nan, 0], [300, 300], False),
    "too large for float16": ("fold", [np.inf, 0], [65504, 300], True),
    "just not too large for float16": ("fold", [np.inf, 0], [65472, 300], False),
}


@pytest.mark.parametrize(("method", "narrow", "wide", "holds"), HALF.values(), ids=HALF)
def test_half_precision_may_round_but_not_overflow(method, narrow, wide, holds, monkeypatch):
    def results(p, params, key):
        assert isinstance(params["a"], jax.core.Tracer) or params["a"].tolist() == [150, 300]
        numbers = narrow if params["a"].dtype == F16 else wide
        found = {name: {"a": single(1)} for name in ("init", "fold", "apply", "the gradient", "update")}
        return found | {method: {"a": single(*numbers)}}

    monkeypatch.setattr(evidence, "compiled_results", results)
    case = Case("half precision", rpx.Chain(), {"a": single(1, 2)}, jax.random.key(0))
    if holds:
        _laws.half_precision(case)
    else:
        with pytest.raises(AssertionError, match=rf"{method} gives .* entry of 'a', but .* in float32; compute in"):
            _laws.half_precision(case)


@pytest.mark.parametrize(
    ("error", "cause", "text"),
    [
        (ValueError("it takes no float16."), None, None),
        (TypeError("it takes no float16."), None, None),
        (WrongType("it returns float32."), None, "law of a law: it returns float32."),
        (ValueError("it is wrong."), WrongType("x"), "law of a law: it is wrong."),
        (ValueError("it is wrong."), ValueError("x"), None),
    ],
    ids=repr,
)
def test_stages_that_do_not_take_half_precision_are_left_out_and_those_that_widen_are_not(error, cause, text, eager):
    def results(p, params, key):
        raise error from cause

    eager(compiled_results=results)
    verdict(_laws.half_precision, case(chain()), text)


@pytest.mark.parametrize(("bound", "holds"), [(0.3, True), (0.2, False)])
def test_a_slope_is_compared_with_central_differences(bound, holds, monkeypatch):
    """The objective is twice the sum, whose gradient is said to be larger by a quarter of one and the slope."""
    monkeypatch.setattr(evidence, "normal", lambda tree, key: {"a": single(1, 0.5)})

    def slope(p, raw, key):
        slope_by_hand = 2 * 1.5
        too_large = slope_by_hand + 0.25 * (1 + slope_by_hand)
        return 2 * np.sum(raw["a"]), {"a": single(too_large, 0)}

    monkeypatch.setattr(evidence, "slope", slope)
    monkeypatch.setattr(Case, "moved", {"a": single(1, 2)})
    case = Case("gradients", rpx.Chain(), {}, jax.random.key(0))
    if holds:
        _laws._require_slope(case, 0.5, bound)
    else:
        text = "finite differences give the slope 3, but the gradient gives 4; if that is intended, set"
        with pytest.raises(AssertionError, match=text):
            _laws._require_slope(case, 0.5, bound)


def test_a_slope_is_that_of_all_free_values_and_complex_ones_count_by_their_real_part(monkeypatch):
    raw = {"n": np.array([3], np.int32), "x": single(1), "z": np.array([1j], np.complex64)}
    monkeypatch.setattr(evidence, "normal", lambda tree, key: {"n": None, "x": single(2), "z": np.array([1 + 1j])})
    seen = []

    def slope(p, raw, key):
        seen.append(key is KEY)
        value = int(raw["n"][0]) * float(raw["x"][0]) + np.real((2 + 1j) * complex(raw["z"][0]))
        return value, {"n": None, "x": single(3), "z": np.array([2 + 1j], np.complex64)}

    monkeypatch.setattr(evidence, "slope", slope)
    _laws._require_slope(case(chain(), moved=raw), 0.5, 1e-6)
    assert seen == [True] * 3


def cast(x):
    return x.astype(jnp.float32)


ADVICE = {
    "a cast": (lambda raw, key: cast(raw["a"]), {"a": np.ones(1), "b": single(1)}, "the formula casts float64"),
    "no cast": (lambda raw, key: raw["a"], {"a": np.ones(1)}, "if that is intended"),
    "singles": (lambda raw, key: cast(raw["a"].astype(np.float64)), {"a": single(1)}, "if that is intended"),
    "fixed doubles": (
        lambda raw, key: cast(raw["a"]["@freeze"]["@fixed"]["w"]),
        {"a": {"@freeze": {"@fixed": {"w": np.ones(1)}}}, "b": single(1)},
        "if that is intended",
    ),
}


@pytest.mark.parametrize(("apply", "moved", "text"), ADVICE.values(), ids=ADVICE)
def test_a_cast_of_double_precision_explains_a_wrong_slope(apply, moved, text):
    with jax.enable_x64():
        assert _laws._advice_on_slope(case(chain(apply=apply), moved=moved)).startswith(text)


# ---- types and shardings

TYPES = {
    "the same": ({}, None),
    "another path in fold": ({"fold": lambda raw: {"b": W}}, "the effective tree has the paths ['b'], not ['a']"),
    "another path in apply": ({"apply": lambda raw, key: {"b": W}}, "the effective tree has the paths ['b']"),
    "another shape": ({"apply": lambda raw, key: {"a": W[:1]}}, "'a' is float32(1,), but must be float32(2,)"),
    "another dtype": ({"fold": lambda raw: {"a": W.astype(F16)}}, "'a' is float16(2,), but must be float32(2,)"),
    "a stage that casts": ({"apply": lambda raw, key: {"a": W.astype(F16)}, "changes_type": True}, None),
    "no key for a chain without noise": ({"apply": lambda raw, key: raw if key is None else {}}, None),
    "a key for noise": ({"apply": lambda raw, key: raw if key is not None else {}, "stochastic": True}, None),
}


@pytest.mark.parametrize(("methods", "text"), TYPES.values(), ids=TYPES)
def test_effective_arrays_keep_paths_and_types(methods, text, monkeypatch, eager):
    keys, p = [], chain(**methods)
    monkeypatch.setattr(_laws, "_require_shardings", lambda case, key: keys.append(key))
    verdict(_laws.types, case(p), text)
    assert keys == ([] if text else [KEY if p.stochastic else None])


def placed(w, *names):
    return jax.device_put(w, NamedSharding(Mesh(np.array(jax.devices()[:2]), ("devices",)), PartitionSpec(*names)))


SHARDINGS = {
    "kept": (lambda raw: raw, lambda raw: raw, None),
    "lost": (lambda raw: raw, lambda raw: {**raw, "a": placed(W)}, "'a' has the sharding"),
    "lost where the raw value has lost it": (
        lambda raw: {**raw, "a": placed(W)},
        lambda raw: {**raw, "a": placed(W)},
        None,
    ),
    "of a raw value of another shape": (
        lambda raw: {**raw, "a": placed(single(1, 2, 3, 4), "devices")},
        lambda raw: {**raw, "a": placed(W)},
        None,
    ),
    "split where it was whole": (
        lambda raw: raw,
        lambda raw: {**raw, "odd": placed(single(1, 2), "devices")},
        "'odd' has the sharding",
    ),
}


@pytest.mark.parametrize(("init", "apply", "text"), SHARDINGS.values(), ids=SHARDINGS)
def test_an_array_is_split_as_its_raw_value_is(init, apply, text, eager):
    params = {"a": W, "odd": single(1, 2, 3), "scalar": np.array(1, F32), "none": np.zeros((0, 2), F32), "twin": W}
    seen = []

    def first(params, key):
        seen.append({name: x.sharding.spec for name, x in params.items()})
        return init(params)

    p = chain(init=first, apply=lambda raw, key: apply(raw) if key == "a key" else {})
    verdict(lambda case: _laws._require_shardings(case, "a key"), case(p, params), text)
    split, whole = PartitionSpec("devices"), PartitionSpec()
    assert seen == [{"a": split, "odd": whole, "scalar": whole, "none": whole, "twin": split}]


# ---- value semantics


class Single(rpx.Perturbation):
    stochastic = False

    def apply_leaf(self, w, key):
        return w


class ById(Single):
    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return 1


class ByIdButOneCopy(ById):
    def __deepcopy__(self, memo):
        return self


def local_stage():
    class Local(Single):
        pass

    return Local()


COPIES = {
    "equal": (Single(), True, None),
    "leaves": ((1,), True, "it has pytree leaves"),
    "not equal": (ById(), True, "a copy of it is not equal to it"),
    "not equal from a file": (ByIdButOneCopy(), True, "a copy of it is not equal to it"),
    "traced anew": (Single(), False, "3 equal copies were traced 3 times, not once"),
    "traced anew, never pickled": (local_stage(), False, "2 equal copies were traced 2 times, not once"),
}


@pytest.mark.parametrize(("p", "jit", "text"), COPIES.values(), ids=COPIES)
def test_copies_are_equal_and_share_a_trace(p, jit, text, monkeypatch):
    if not jit:
        monkeypatch.setattr(jax, "jit", lambda function, static_argnums: function)
    monkeypatch.setattr(evidence, "picklable", lambda p: p is not COPIES["traced anew, never pickled"][0])
    verdict(_laws.value_semantics, case(p), text)


# ---- transformations

WAYS = ["jit", "jit of init", "jit of update", "vmap of init", "scan of vmap of checkpoint", "shard_map"]


@pytest.mark.parametrize("wrong", [None, *WAYS])
def test_each_transformation_is_compared_with_eager_evaluation(wrong, eager):
    """Raw trees, means, updated trees and the draws of both keys are told apart by their numbers."""
    other = jax.random.fold_in(KEY, 1)

    def number(key):
        return {"a": single(10 if np.array_equal(jax.random.key_data(key), jax.random.key_data(KEY)) else 20)}

    p = chain(
        init=lambda params, key: {"a": jnp.asarray(single(1))},
        fold=lambda raw: {"a": raw["a"] + single(1)},
        apply=lambda raw, key: number(key),
    )

    def off(way, x):
        return {"a": x + single(1) if way == wrong else x}

    def transformed(p, params, raws, batch, keys):
        assert (params["a"].shape, batch["a"].shape, keys.shape) == ((2, 2), (2, 1), (2,))
        return {
            "vmap of init": off("vmap of init", single(2, 2)[:, None]),
            "scan of vmap of checkpoint": off("scan of vmap of checkpoint", single(10, 20, 20, 20).reshape(2, 2, 1)),
            "shard_map": off("shard_map", single(10)),
        }

    def update(p, raw, key):
        return {"a": raw["a"] + single(100)}

    eager(
        update_raw=update,
        compiled_update=update,
        transformed=transformed,
        compiled_apply=lambda p, raw, key: off("jit", number(key)["a"]) if key is KEY else number(key),
        compiled_fold=lambda p, raw: off("jit of init" if raw["a"][0] == 1 else "jit of update", raw["a"] + single(1)),
    )
    text = f"{wrong} differs from eager evaluation at 'a'" if wrong else None
    verdict(_laws.transformations, case(p, raw={"a": single(1)}), text)
    assert not np.array_equal(jax.random.key_data(other), jax.random.key_data(KEY))


@pytest.mark.parametrize(
    ("dtype", "eager_draw", "compiled_draw", "text"),
    [
        (F32, PARAMS, SMALL, "jit differs from eager evaluation"),
        (F16, PARAMS, SMALL, None),
        (F32, HALVES, {"a": single(1, 2 + 2**-9)}, None),
    ],
)
def test_draws_may_round_as_raw_values_and_weights_do(dtype, eager_draw, compiled_draw, text, eager):
    eager(transformed=lambda *_: {}, compiled_apply=lambda *_: compiled_draw)
    p = chain(init=lambda params, key: {"a": params["a"].astype(dtype)}, apply=lambda raw, key: eager_draw)
    verdict(_laws.transformations, case(p), text)


def test_types_under_tracing_are_those_of_init(eager):
    def init(params, key):
        is_traced = isinstance(params["a"], jax.core.Tracer)
        return {"a": params["a"].astype(F16 if is_traced else F32)}

    draws = dict.fromkeys(WAYS[3:], PARAMS)
    draws |= {"vmap of init": {"a": np.stack([W, W])}, "scan of vmap of checkpoint": {"a": np.array([[W, W], [W, W]])}}
    eager(transformed=lambda *_: draws)
    verdict(_laws.transformations, case(chain(init=init)), "eval_shape of init gives [('a', (2,), dtype('float16'))]")


# ---- keys

NOISE = chain(fold=lambda raw: raw)
DRAWN = {"a": single(5, 6)}


def by_key(raw, key):
    return DRAWN if key is not None and np.any(jax.random.key_data(key) != jax.random.key_data(KEY)) else raw


def need_key(raw, key=None):
    if key is None:
        raise ValueError
    return by_key(raw, key)


counter = iter(range(1000))
KEYS = {
    "no noise": (chain(), None),
    "noise": (chain(stochastic=True, apply=need_key, deterministic=NOISE), None),
    "a mean that draws": (
        chain(stochastic=True, apply=need_key, deterministic=chain(stochastic=True)),
        "`p.deterministic` gives other values with a key than without, or needs a key",
    ),
    "a mean that reads the key": (
        chain(stochastic=True, apply=need_key, deterministic=chain(apply=lambda raw, key: DRAWN)),
        "`p.deterministic` gives other values with a key than without, or needs a key",
    ),
    "other numbers each time": (
        chain(stochastic=True, apply=lambda raw, key: {"a": single(next(counter))}, deterministic=NOISE),
        "equal keys give different values",
    ),
    "one draw for all keys": (
        chain(stochastic=True, deterministic=NOISE),
        "`stochastic` is True, but another key gives the same values",
    ),
    "noise that is not told": (chain(apply=by_key), "`stochastic` is False, but another key gives other values"),
    "noise without a key": (
        chain(stochastic=True, apply=lambda raw, key=None: by_key(raw, key), deterministic=NOISE),
        "`apply` draws random numbers although it gets no key",
    ),
}


@pytest.mark.parametrize(("p", "text"), KEYS.values(), ids=KEYS)
def test_keys_decide_all_draws_and_no_others(p, text, monkeypatch, eager):
    asked = []
    monkeypatch.setattr(_laws, "_require_independent", asked.append)
    monkeypatch.setattr(_laws, "_require_draws_beside_new_parameter", lambda case, params: asked.append(params))
    given = case(p)
    verdict(_laws.keys, given, text)
    assert asked == ([given, PARAMS] if text is None and p.stochastic else [])
    if asked:
        asked.clear()
        other = case(p, (W,))
        _laws.keys(other)
        assert asked == [other]  # nothing can be added to a tuple


def of_new(fold, draws):
    """A chain whose means and draws are these where there is a new parameter."""
    known = {"a": W, "same": W}
    return chain(
        init=lambda params, key: params,
        fold=lambda raw: {**known, **fold} if "a new parameter" in raw else known,
        apply=lambda raw, key: {**known, **draws} if "a new parameter" in raw else known,
    )


BESIDE = {
    "the same": (of_new({"a": W, "a new parameter": W}, {"a": W, "a new parameter": W}), None),
    "other draws": (of_new({"a": W}, {"a": 2 * W}), "the draws of the parameters change if a new parameter is added"),
    "other means": (of_new({"a": 2 * W}, {"a": 3 * W}), None),
}


@pytest.mark.parametrize(("p", "text"), BESIDE.values(), ids=BESIDE)
def test_draws_do_not_depend_on_new_parameters(p, text):
    params = {**PARAMS, "same": W}
    verdict(lambda case: _laws._require_draws_beside_new_parameter(case, params), case(p), text)


def drawn(share, beside=1.0, *, tied=False):
    """Draws of an array, of another that has a share in it, and of one of another shape that is a part of it."""

    def apply(raw, key):
        x, y = (jax.random.normal(jax.random.fold_in(key, i), (3,)) for i in range(2))
        return {"a": x, "b": F32(share) * x + F32(beside) * y, "c": jnp.zeros(3), "part": x[:2]}

    return case(chain(apply=apply), raw={"a": W, "b": {"@tie": {}} if tied else W, "c": W, "part": W})


INDEPENDENT = {
    "independent": (drawn(0.0), None),
    "a half": (drawn(0.5), "the noise of 'a' and of 'b' has correlation 0.4"),
    "the opposite": (drawn(-1.0, 0.0), "the noise of 'a' and of 'b' has correlation 1.00"),
    "tied": (drawn(1.0, 0.0, tied=True), None),
}


@pytest.mark.parametrize(("given", "text"), INDEPENDENT.values(), ids=INDEPENDENT)
def test_noise_of_equal_shape_is_uncorrelated(given, text):
    verdict(_laws._require_independent, given, text)


NUMBERS = np.random.default_rng(0).normal(size=(4, 128, 3))
TURNED = NUMBERS[0] + 1j * NUMBERS[1]
DRAWS = {
    "complex": ({"a": TURNED, "b": NUMBERS[2] + 1j * NUMBERS[3]}, None),
    "complex, turned": ({"a": TURNED, "b": 1j * TURNED}, "of 'a' and of 'b' has correlation 1.00"),
    "the last two": ({"a": NUMBERS[0], "b": NUMBERS[1], "c": 2 * NUMBERS[1]}, "of 'b' and of 'c' has correlation 1.00"),
    "around means": ({"a": NUMBERS[0] + 5, "b": NUMBERS[1] + 5}, None),
    "noise in the last entry": (
        {"a": NUMBERS[0] * [0, 0, 1], "b": NUMBERS[0] * [0, 0, 1]},
        "of 'a' and of 'b' has correlation 1.00",
    ),
    "of matrices": ({"a": NUMBERS[0, :, :, None], "b": NUMBERS[0, :, None]}, "correlation 1.00"),
}


@pytest.mark.parametrize(("draws", "text"), DRAWS.values(), ids=DRAWS)
def test_the_correlation_of_noise_is_that_of_deviations_from_the_mean(draws, text, monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda function: function)
    monkeypatch.setattr(jax, "vmap", lambda function, in_axes: function)
    p = chain(apply=lambda raw, keys: draws if keys.shape == (128,) else {})
    verdict(_laws._require_independent, case(p), text)


# ---- purity, updates, bases and transfers


def in_place(method):
    def call(tree, *_):
        tree["a"] *= 2
        return tree

    return chain(**{method: call})


@pytest.mark.parametrize("method", ["init", "apply", "update"])
def test_no_method_changes_its_input(method, eager):
    text = "`init`, `apply` or `update` changes the arrays that it gets"
    verdict(_laws.purity, case(in_place(method), {"a": single(1, 2)}), text)
    verdict(_laws.purity, case(chain()), None)
    other = chain(deterministic=chain(init=lambda params, key: DRAWN))
    verdict(_laws.purity, case(other), "`p.init` returns another raw tree than `p.deterministic.init`")


FIXED = {"a": {"@mask": {"w": W, "@fixed": {"mask": W}}}}


def updates(*trees):
    """An ``update`` that returns these trees one after another."""
    rest = iter(trees)
    return lambda raw, key: next(rest)


SHORT, FREE = {"a": W[:1]}, {"a": 2 * W}
UPDATES = {
    "nothing": (chain(), None),
    "other results": (chain(update=updates(PARAMS, FREE)), "equal raw trees and keys give"),
    "types": (chain(update=lambda raw, key: SHORT), "update returns 'a' as float32[1]"),
    "types under jit": (chain(compiled_update=lambda raw, key: SHORT), "update under jit returns 'a' as float32[1]"),
    "types of a second": (
        chain(moves_weights=True, compiled_update=lambda raw, key: SHORT if raw is FREE else FREE),
        "a second update returns 'a' as float32[1]",
    ),
    "free values": (chain(update=lambda raw, key: FREE), "update changes the free value 'a'"),
    "free values under jit": (
        chain(compiled_update=lambda raw, key: FREE),
        "update under jit changes the free value 'a'",
    ),
    "free values that may move": (chain(moves_weights=True, update=lambda raw, key: FREE), None),
    "free values that one of two stages moves": (
        chain(update=lambda raw, key: FREE, stages=(chain(), chain(moves_weights=True))),
        None,
    ),
}


@pytest.mark.parametrize(("p", "text"), UPDATES.values(), ids=UPDATES)
def test_updates_keep_types_and_free_values(p, text, eager):
    verdict(_laws.update, case(p), text)


def test_updates_may_change_fixed_values(eager):
    after = {"a": {"@mask": {"w": W, "@fixed": {"mask": 2 * W}}}}
    verdict(_laws.update, case(chain(update=lambda raw, key: after), moved=FIXED), None)


BASES = {
    "the same": (PARAMS, None),
    "rounded": ({"a": W * F32(1 + 2**-22)}, None),
    "other weights": (FREE, "it changes the effective tree at 'a'"),
    "other types": (SHORT, "update_base returns 'a' as float32[1]"),
}


@pytest.mark.parametrize(("rebased", "text"), BASES.values(), ids=BASES)
def test_a_new_base_keeps_weights_and_types(rebased, text, eager):
    eager(compiled_update_base=lambda p, raw: rebased)
    verdict(_laws.update_base, case(chain()), text)


def test_a_new_base_may_round_as_raw_values_do(eager):
    rebased = {"a": W.astype(F16)}
    eager(compiled_update_base=lambda p, raw: rebased)
    p = chain(fold=lambda raw: SMALL if raw is rebased else PARAMS)
    verdict(_laws.update_base, case(p, moved=HALVES), None)


TRANSFERS = {
    "the same": (PARAMS, None),
    "rounded": ({"a": W * F32(1 + 2**-22)}, "`transfer(p, p, raw)` changes 'a'"),
    "other paths": ({"b": W}, "`transfer(p, p, raw)` returns other paths than `raw` has"),
}


@pytest.mark.parametrize(("actual", "text"), TRANSFERS.values(), ids=TRANSFERS)
def test_a_transfer_to_the_same_chain_keeps_every_bit(actual, text, eager):
    eager(compiled_transfer=lambda p, raw: actual)
    verdict(_laws.transfer, case(chain()), text)


BESIDE_ANOTHER = {
    "the same": ({"behind": (PARAMS, PARAMS), "before": (PARAMS, PARAMS)}, None),
    "rounded": ({"behind": ({"a": W * F32(1 + 2**-22)}, PARAMS)}, None),
    "other numbers": ({"behind": (PARAMS, PARAMS), "before": (FREE, PARAMS)}, "before another stage, it gives another"),
    "other paths": ({"behind": ({"b": W}, PARAMS)}, "behind another stage, its effective tree has other paths"),
}


@pytest.mark.parametrize(("results", "text"), BESIDE_ANOTHER.values(), ids=BESIDE_ANOTHER)
def test_a_chain_gives_the_same_beside_another_stage(results, text, eager):
    eager(beside_another=lambda p, params, key: results)
    verdict(_laws.chains, case(chain()), text)


# ---- gradients

FINITE, ZERO, NAN = {"a": W}, {"a": 0 * W}, {"a": W * np.nan}
SLOPES = {
    "finite": ([FINITE] * 4, None),
    "zero at special points": ([ZERO, ZERO, ZERO, FINITE], None),
    "zero": ([FINITE, FINITE, FINITE, ZERO], "the gradient of 'a' is zero, so no optimizer can train it"),
    "empty": ([{"a": W[:0]}] * 4, None),
    "not finite at first": ([NAN, FINITE, FINITE, FINITE], "'a' is not finite at its initial values"),
    "not finite at a row": ([FINITE, NAN, FINITE, FINITE], "'a' is not finite at parameters with a zero row"),
    "not finite at zero": ([FINITE, FINITE, NAN, FINITE], "'a' is not finite at zero parameters"),
}


@pytest.mark.parametrize(("slopes", "text"), SLOPES.values(), ids=SLOPES)
def test_gradients_are_finite_at_special_points_and_nonzero_elsewhere(slopes, text, monkeypatch, eager):
    points, compared, rest = [], [], iter(slopes)

    def slope(p, point, key):
        points.append(point["a"].tolist())
        return None, next(rest)

    eager(slope=slope, keeps_precision=lambda p, params, key, bits: True)
    monkeypatch.setattr(_laws, "_require_slope", lambda case, **bounds: compared.append((case.params, bounds)))
    verdict(_laws.gradients, case(chain(), moved={"a": single(7, 7)}), text)
    if text is None:
        assert points == [[1, 2], [0, 2], [0, 0], [7, 7]]
        ((params, bounds),) = compared
        assert (str(params["a"].dtype), bounds) == ("float64", {"step": 1e-6, "bound": 1e-6})


@pytest.mark.parametrize(
    ("straight_through", "takes", "bounds"),
    [
        (True, (64, 32), []),
        (False, (32,), [{"step": 1e-2, "bound": 1e-2}]),
        (False, (), []),
    ],
)
def test_slopes_are_compared_in_the_precision_that_a_chain_takes(straight_through, takes, bounds, monkeypatch, eager):
    compared = []

    def keeps(p, params, key, bits):
        assert params["a"].dtype == f"float{bits}"
        return bits in takes

    eager(slope=lambda p, point, key: (None, FINITE), keeps_precision=keeps)
    monkeypatch.setattr(_laws, "_require_slope", lambda case, **bounds: compared.append((case.params, bounds)))
    _laws.gradients(case(chain(straight_through=straight_through)))
    assert compared == [(PARAMS, each) for each in bounds]


# ---- selection and plain trees


@pytest.mark.parametrize("taken", ["'no such path'", "<function", "selected({'no", "all_but('no", None])
def test_every_form_of_where_that_selects_nothing_is_refused(taken, monkeypatch):
    plain = rpx.WeightNorm.init

    def init(self, params, key=None):
        is_taken = taken and repr(self.where).startswith(taken) and key is KEY
        return params if is_taken else plain(self, params, key)

    monkeypatch.setattr(rpx.WeightNorm, "init", init)
    text = "init accepts where=" if taken else None
    p = rpx.VarNoise(0.1) >> rpx.WeightNorm() >> rpx.VarNoise(0.2)
    verdict(_laws.selection, case(p, {"a": np.ones((2, 2), F32)}), text)


# ---- checkpoints


def refuse(*args, **kwargs):
    raise ValueError


OTHER_PATHS = {"raw": {"a": {"@mask": {"w": W}}}}
KEPT = {"apply": lambda raw, *_: raw}
FILED = {
    "all right": ({}, OTHER_PATHS, {}, None),
    "the second format": ({}, {}, {"second": lambda raw: FREE}, "differs after it was written and read with second"),
    "the configuration": ({"to_json": lambda: "other"}, {}, {}, "from_json(p.to_json()) is not equal to p"),
    "a function": ({"to_json": lambda: "other", "where": min}, {}, {}, None),
    "wrong leaves": ({"wrong": 2}, {}, {}, "check accepts a raw tree with a wrong leaf"),
    "parameters": (KEPT, OTHER_PATHS, {}, "apply accepts a tree that never went through init"),
    "a raw tree": ({"init": lambda raw, *_: raw}, OTHER_PATHS, {}, "init accepts a raw tree"),
    "a raw tree without markers": ({}, {"raw": {"b": W}}, {}, "a chain without stages accepts its raw tree"),
    "a raw tree like the parameters": (KEPT | {"init": lambda raw, *_: raw}, {}, {}, None),
}


@pytest.mark.parametrize(("methods", "known", "formats", "text"), FILED.values(), ids=FILED)
def test_files_hold_what_they_are_given_and_wrong_trees_are_refused(methods, known, formats, text, monkeypatch, eager):
    checked = []

    def check(raw, like):
        checked.append((raw, like))
        if raw in (1, 2) and raw != methods.get("wrong"):
            raise ValueError

    given = chain(**{"apply": refuse, "init": refuse, "to_json": lambda: "equal", **methods, "check": check})
    formats = {"first": lambda raw: raw, "second": lambda raw: raw, **formats}
    eager(
        installed_formats=lambda raw: formats,
        has_functions=lambda p: hasattr(p, "where"),
        wrong_trees=lambda raw: iter([1, 2]),
    )
    monkeypatch.setattr(_laws, "from_json", lambda text: given if text == "equal" else None)
    made = case(given, **known)
    verdict(_laws.checkpoints, made, text)
    if text is None:
        assert [raw for raw, _ in checked] == [made.raw, made.raw, 1, 2]
        assert all(like is PARAMS for _, like in checked)


PLAIN = {
    "arrays": (PARAMS, None),
    "another structure": (OrderedDict(PARAMS), "fold returns the structure PyTreeDef(CustomNode(OrderedDict"),
    "a number": ({"a": 1.0}, "fold returns 'a' as float, which is not an array"),
}


@pytest.mark.parametrize(("effective", "text"), PLAIN.values(), ids=PLAIN)
def test_an_effective_tree_is_plain(effective, text):
    verdict(_laws.plain_trees, case(chain(fold=lambda raw: effective)), text)
