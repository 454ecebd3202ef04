"""What laws require and compare, on chains of plain Python that compile nothing, beside ``test_verdicts.py``."""

import re
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.core.checks import WrongType
from reparax.testing import _evidence as evidence
from reparax.testing import _laws as laws
from reparax.testing import _step as step

W = np.float32([[1, -2], [3, 4]])
PARAMS = {"a": W, "b": np.float32([5, 6])}
KEY = np.uint32([0, 7])
real_slope, real_deviations = evidence.slope, evidence.deviations
real_stages = evidence.compiled_stages
real_beside_another, real_transformed = evidence.beside_another, evidence.transformed


def mapped(f: Any) -> Any:
    """A method of a chain that changes each array."""
    return lambda tree, *_: jax.tree.map(f, tree)


def kept(tree: Any, *_: Any) -> Any:
    return jax.tree.map(lambda w: w, tree)


class Fake:
    """A chain of one stage that keeps every law. Its methods are plain functions, and each may be another."""

    def __init__(self, **others: Any) -> None:
        self.stochastic, self.starts_elsewhere, self.changes_type = False, False, False
        self.moves_weights, self.straight_through, self.update_reads = False, False, ()
        self.init = self.apply = self.fold = self.update = self.update_base = kept
        self.deterministic = self
        self.check = lambda raw, like: None
        vars(self).update(others)

    def __repr__(self) -> str:
        return "Fake()"

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter([self])

    def to_json(self) -> str:
        raise ValueError("no text")


@pytest.fixture(autouse=True)
def eager(monkeypatch: Any) -> Any:
    """Functions that laws compile run as they are, with the methods of a chain in whatever they are called for."""
    for name, method in (
        ("compiled_init", lambda p, *args: getattr(p, "jit_init", p.init)(*args)),
        ("compiled_apply", lambda p, *args: getattr(p, "jit_apply", p.apply)(*args)),
        ("compiled_fold", lambda p, raw: getattr(p, "jit_fold", p.fold)(raw)),
        ("compiled_update", lambda p, raw, key: getattr(p, "jit_update", p.update)(raw, key)),
        ("compiled_update_base", lambda p, raw: p.update_base(raw)),
        ("compiled_transfer", lambda p, raw: p.transfer(raw)),
        ("compiled_results", lambda p, params, key: p.results(params)),
        ("transformed", lambda p, *args: p.transformed(*args)),
        ("slope", lambda p, raw, key: p.slope(raw)),
        ("beside_another", lambda p, *_: p.beside()),
        ("deviations", lambda p, index, raw, keys: p.deviations(index, len(keys))),
    ):
        monkeypatch.setattr(evidence, name, method)
    return monkeypatch


def check(law: str, p: Any, params: Any = PARAMS, key: Any = KEY) -> None:
    laws.LAWS[law](evidence.Case(law, p, params, key))


def broken(text: str) -> Any:
    return pytest.raises(AssertionError, match=f"^Fake\\(\\) breaks the law of .*{re.escape(text)}")


# ---- which laws are checked


def test_the_laws_that_are_named_run_in_their_order_with_the_key(monkeypatch: Any) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(laws, "LAWS", dict.fromkeys(("first_law", "second", "third"), ran.append))
    p = rpx.Freeze()
    for names, want in (
        (None, ["first law", "second", "third"]),
        ("second", ["second"]),
        (iter(["third", "second"]), ["third", "second"]),
    ):
        laws.check_laws(p, PARAMS, KEY, laws=names)
        assert [case.law for case in ran] == want
        assert all((case.chain, case.params is PARAMS, case.key is KEY) == (p, True, True) for case in ran)
        ran.clear()
    laws.check_laws(p, PARAMS, laws=["second"])
    assert jnp.array_equal(jax.random.key_data(ran[0].key), jax.random.key_data(jax.random.key(0)))
    ran.clear()
    with pytest.raises(
        ValueError, match=r"^check_laws got 'fourth' as a law\. Choose from 'first_law', 'second', 'third'\."
    ):
        laws.check_laws(p, PARAMS, laws=["second", "fourth"])
    assert not ran


# ---- right inverse and types


@pytest.mark.parametrize(
    ("p", "holds"),
    [
        (Fake(), True),
        (Fake(init=mapped(lambda w: 2 * w)), False),
        (Fake(init=mapped(lambda w: 2 * w), starts_elsewhere=True), True),
        (Fake(init=mapped(lambda w: w * np.float32(1 + 2e-6))), True),
        (Fake(init=mapped(lambda w: w * np.float32(1 + 2e-5))), False),
    ],
)
def test_a_start_at_a_weight_is_the_weight_up_to_rounding(p: Any, holds: Any) -> None:
    with (
        nullcontext() if holds else broken("for a w that `apply` can return, apply(init(w)) differs from w at 'a', by")
    ):
        check("right_inverse", p)


def test_a_start_with_fixed_values_is_a_projection() -> None:
    p = Fake(
        init=lambda tree, *_: {"w": {"@grid": {"w": np.round(tree["w"]), "@fixed": {"n": np.int32(1)}}}},
        fold=lambda raw: {"w": raw["w"]["@grid"]["w"]},
    )
    check("right_inverse", p, {"w": W})  # though a point that was moved off the grid comes back as another
    free = Fake(init=lambda tree, *_: {"w": np.round(tree["w"])})
    with broken("differs from w"):
        check("right_inverse", free, {"w": W})


def test_a_key_is_given_where_something_is_drawn(eager: Any) -> None:
    keys: list[Any] = []
    eager.setattr(laws, "_require_shardings", lambda case, key: keys.append(key))
    for stochastic in (False, True):
        check("types", Fake(stochastic=stochastic, apply=lambda raw, key: keys.append(key) or raw))
    assert [key is None for key in keys] == [True, True, False, False]


# ---- half precision

METHODS = ("init", "fold", "apply", "the gradient", "update")


def results(**others: Any) -> Any:
    """Results in both precisions, of which one method has others."""

    def of(params: Any) -> Any:
        is_half = params["w"].dtype == np.float16
        rows = {name.replace("_", " "): pair[0] if is_half else pair[1] for name, pair in others.items()}
        return {name: {"w": np.float32(rows.get(name, [300, 1]))} for name in METHODS}

    return Fake(results=of)


def refuse(error: Exception, cause: Exception | None = None) -> Any:
    def results(params: Any) -> Any:
        raise error from cause

    return Fake(results=results)


@pytest.mark.parametrize(
    ("p", "holds"),
    [
        (refuse(ValueError("no float16")), True),
        (refuse(TypeError("no float16"), ValueError("inner")), True),
        (refuse(WrongType("another type.")), False),
        (refuse(ValueError("outer"), WrongType("another type.")), False),
    ],
)
def test_a_stage_may_refuse_float16_but_not_return_another_type(p: Any, holds: Any) -> None:
    with nullcontext() if holds else broken(""):
        check("half_precision", p, {"w": W})


# ---- values, transformations, keys


@dataclass(frozen=True)
class Pickled:
    """What pickle reads back as another, though a copy is the same."""

    n: int = 0

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        return Pickled, (self.n + 1,)


def test_copies_of_both_kinds_are_equal_and_hold_no_leaves(eager: Any) -> None:
    p: Any = Pickled()
    eager.setattr(evidence, "picklable", lambda p: False)
    check("value_semantics", Static(1))
    with pytest.raises(AssertionError, match="it has pytree leaves"):
        check("value_semantics", p)
    eager.setattr(evidence, "picklable", lambda p: True)
    with pytest.raises(AssertionError, match="a copy of it is not equal to it"):
        check("value_semantics", Static(Pickled()))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A chain that is no leaf."""

    n: Any


BATCH = {name: np.stack([w, w]) for name, w in PARAMS.items()}
FOUR = {name: np.array([[w, w], [w, w]]) for name, w in PARAMS.items()}


@pytest.fixture
def keyed(eager: Any) -> Any:
    """Keys without programs."""
    eager.setattr(laws, "jnp", SimpleNamespace(stack=np.stack, ones=np.ones))
    random = SimpleNamespace(
        fold_in=lambda key, n: key + np.uint32(n), split=lambda key, n: [key + np.uint32(i) for i in range(n)]
    )
    eager.setattr(
        laws, "jax", SimpleNamespace(**{**vars(jax), "random": random, "eval_shape": lambda f, *args: f(*args)})
    )
    eager.setattr(evidence, "batch_of_two", lambda tree: jax.tree.map(lambda w: np.stack([w, w]), tree))
    return eager


def noisy(raw: Any, key: Any = None, seed: Any = str.encode) -> Any:
    """Noise of its own for each array; for want of a key, an error."""
    if key is None:
        raise ValueError("no key")

    def draw(name: str) -> Any:
        rng = np.random.default_rng([*np.asarray(key).tolist(), *seed(name)])
        return lambda w: w + rng.standard_normal(w.shape).astype(w.dtype)

    return {name: jax.tree.map(draw(name), x) for name, x in raw.items()}


def chain_of(apply: Any, **others: Any) -> Any:
    return Fake(apply=apply, stochastic=True, deterministic=Fake(), **others)


SQUARES = {name: W + i for i, name in enumerate("abc")}


def stacked(trees: Any) -> Any:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *trees)


def test_the_noise_of_two_later_arrays_and_of_complex_ones_may_be_one_and_of_tied_ones_is(keyed: Any) -> None:
    keyed.setattr(laws.jax, "jit", lambda f: f)
    keyed.setattr(laws.jax, "vmap", lambda f, in_axes: lambda raw, keys: stacked([f(raw, key) for key in keys]))

    def later(raw: Any, key: Any) -> Any:
        drawn = noisy(raw, key)
        return {**drawn, "c": 2 * drawn["b"], "d": drawn["b"][:1], "e": W}

    case = evidence.Case("keys", chain_of(later), SQUARES, KEY)
    with broken("the noise of 'b' and of 'c' has correlation 1.00"):
        laws._require_independent(case)
    tied = evidence.Case("keys", chain_of(later), SQUARES, KEY)
    vars(tied)["raw"] = {**SQUARES, "c": {"@tie": {}}}
    tied.chain.apply = lambda raw, key: later(SQUARES, key)
    laws._require_independent(tied)

    def turned(raw: Any, key: Any) -> Any:
        drawn = noisy(raw, key)
        return {"a": drawn["a"].astype(np.complex64), "b": 1j * drawn["a"], "c": drawn["c"]}

    with broken("the noise of 'a' and of 'b' has correlation 1.00"):
        laws._require_independent(evidence.Case("keys", chain_of(turned), SQUARES, KEY))


# ---- means


def test_sums_of_deviations_give_a_mean_and_its_error() -> None:
    # Means of 4: 1, 2; then averages. The variances of entries are 3 and 0, so both are at least 1.5.
    total, squares = np.float64([4, 8, 4, 0]), np.float64([16, 16, 8, 4])
    mean, error = evidence.deviation(total, squares, n=4)
    np.testing.assert_allclose(mean, [1, 2, 1, 0])
    np.testing.assert_allclose(error, np.sqrt(np.array([3, 1.5, 1, 1]) / 4))
    mean, error = evidence.deviation(np.complex64([2 + 2j, 0, 0]), np.float32([8, 0, 0]), n=2)
    np.testing.assert_allclose((mean[0], error[0]), (1 + 1j, 1))
    assert [x.tolist() for x in evidence.deviation(np.zeros(2), np.zeros(2), n=2)] == [[0, 0], [0, 0]]


def test_the_average_deviation_is_plain_and_weighted_by_the_mean() -> None:
    draw, mean = np.float32([[2, 1], [3, 0]]), np.float32([[1, 0], [-2, 0]])
    found = jax.jit(evidence._deviations_of_draw)(draw, mean)
    np.testing.assert_allclose(found, [1, 1, 5, 0, 7 / 4, (1 * 0.5 - 5) / 4])


# ---- purity


def test_a_random_chain_starts_as_its_mean_does() -> None:
    p = Fake(deterministic=Fake(init=mapped(lambda w: -w)))
    with broken("`p.init` returns another raw tree than `p.deterministic.init`"):
        check("purity", p)


# ---- gradients


def sloping(value: Any, gradient: Any, **others: Any) -> Any:
    return Fake(slope=lambda raw: (value(raw["a"]), {"a": gradient(np.asarray(raw["a"]))}), **others)


def square(w: Any) -> Any:
    return np.sum(np.square(np.asarray(w, np.float64)))


def test_differences_are_taken_on_both_sides() -> None:
    case = evidence.Case("gradients", sloping(square, lambda w: 2 * w), {"a": W}, jax.random.key(0))
    laws._require_slope(case, step=0.5, bound=1e-4)  # which is exact for a square


def test_an_empty_array_needs_no_gradient(eager: Any) -> None:
    eager.setattr(evidence, "keeps_precision", lambda *_: False)
    check("gradients", sloping(square, lambda w: w), {"a": np.zeros((0, 2), np.float32)}, jax.random.key(0))


@pytest.mark.parametrize(
    ("dtype", "narrow", "text"),
    [
        (
            "float64",
            True,
            "the formula casts float64 to float32; cast to `jnp.promote_types(w.dtype, jnp.float32)` instead",
        ),
        ("float64", False, "if that is intended, set `straight_through = True`"),
        ("float16", True, "if that is intended, set `straight_through = True`"),
    ],
)
def test_the_advice_for_a_cast_is_another_cast(dtype: Any, narrow: Any, text: str) -> None:
    with jax.enable_x64():
        p = Fake(apply=mapped(lambda w: w.astype(jnp.float32) if narrow else 2 * w))
        case = evidence.Case("gradients", p, {"a": jnp.asarray(W.astype(dtype)), "n": np.int32(1)}, jax.random.key(0))
        assert laws._advice_on_slope(case) == text


def test_a_slope_is_that_of_a_random_linear_function_of_what_trains() -> None:
    rng = np.random.default_rng(0)
    directions = {name: rng.normal(size=w.shape).astype(np.float32) for name, w in PARAMS.items()}
    value, gradient = real_slope(rpx.Freeze(where="b") >> rpx.numbers.Scale(2.0, where="a"), started(), KEY)
    np.testing.assert_allclose(value, sum(np.sum(directions[name] * w) for name, w in PARAMS.items()), rtol=1e-5)
    np.testing.assert_allclose(gradient["a"]["@scale"]["x"], 2 * directions["a"], rtol=1e-6)
    assert gradient["b"] == {"@freeze": {"@fixed": {"w": None}}}


def started() -> Any:
    """Values of half of `a`, and `b` that is frozen."""
    return {"a": {"@scale": {"x": W / 2}}, "b": {"@freeze": {"@fixed": {"w": PARAMS["b"]}}}}


class Shifted(rpx.Perturbation):
    """Draws that are all one above their mean."""

    kind = "shifted_of_rules"

    def apply_leaf(self, w, key):
        return w + 1


class Raised(Shifted):
    """Draws that are a half above their mean, which is a half above the array."""

    kind = "raised_of_rules"

    def mean_leaf(self, w):
        return w + 0.5


def test_deviations_are_those_of_one_stage_behind_the_means_of_the_stages_before_it() -> None:
    p = rpx.Freeze(where="b") >> rpx.numbers.Scale(2.0, where="a") >> Raised() >> Shifted(where="a")
    keys = jax.random.split(jax.random.key(0), 3)
    mean, sums, squares = real_deviations(p, 2, started(), keys)
    of_mean = {}
    for name, w in PARAMS.items():
        np.testing.assert_array_equal(mean[name], w + 0.5)
        np.testing.assert_allclose(sums[name][: w.size + 1], [1.5] * (w.size + 1))
        np.testing.assert_allclose(squares[name][: w.size + 1], [0.75] * (w.size + 1))
        of_mean[name] = np.mean(w + 0.5) / np.abs(w + 0.5).max()
    np.testing.assert_allclose([sums[name][-1] for name in "ab"], [1.5 * of_mean[name] for name in "ab"], rtol=1e-6)
    weighted = [0.75 * of_mean[name] ** 2 for name in "ab"]
    np.testing.assert_allclose([squares[name][-1] for name in "ab"], weighted, rtol=1e-6)


class Ticking(rpx.Reparametrization):
    """A value to which each update adds one."""

    kind = "ticking_of_rules"
    raw_values = {"x": rpx.stage.main(), "n": rpx.stage.fixed()}
    moves_weights = False

    def init_leaf(self, w):
        return {"x": w, "n": jnp.zeros((), w.dtype)}

    def apply_leaf(self, values):
        return values["x"] + values["n"]

    def update_leaf(self, values):
        return {"n": values["n"] + 1}


class Moving(Ticking):
    """One that says that it moves weights, so it is not updated."""

    kind = "moving_of_rules"
    moves_weights = True


@pytest.mark.parametrize(("p", "behind", "before"), [(Ticking(), 1, 2), (Moving(), 0, 0)], ids=repr)
def test_a_chain_beside_another_acts_on_the_arrays_that_this_one_makes_or_holds(
    p: Any, behind: Any, before: Any
) -> None:
    found = real_beside_another(p, {"a": W}, KEY)
    for position, added in (("behind", behind), ("before", before)):
        for x in found[position]:
            np.testing.assert_allclose(x["a"], W + added)


class Tripled(evidence.Doubled):
    """A stage beside a chain that is not what it says."""

    kind = "tripled_of_rules"
    starts_elsewhere = True

    def apply_leaf(self, values):
        return 3 * values["x"]


def test_a_wrong_stage_beside_it_would_be_seen(monkeypatch: Any) -> None:
    monkeypatch.setattr(evidence, "Doubled", Tripled)
    found = real_beside_another.__wrapped__(Ticking(), {"a": W}, KEY)
    for got, want in zip(
        (*found["behind"], *found["before"]), (1.5 * W + 1, W + 1, 1.5 * W + 3, 1.5 * W + 3), strict=True
    ):
        np.testing.assert_allclose(got["a"], want)


def test_the_stage_beside_it_doubles_what_is_no_integer() -> None:
    doubled, whole = evidence.Doubled(), np.int8([3])
    assert doubled.init_leaf(whole)["x"] is doubled.apply_leaf({"x": whole}) is whole
    np.testing.assert_array_equal(doubled.init_leaf(W)["x"], W / 2)
    np.testing.assert_array_equal(doubled.apply_leaf({"x": W}), 2 * W)


def test_each_stage_alone_starts_from_its_input_and_from_a_point_of_its_image() -> None:
    p = Rounded() >> rpx.numbers.Scale(2.0)
    starts, images = real_stages(p, {"a": W}, KEY)
    raw = {"a": {"@scale": {"x": W / 2}}}
    for found, want in zip(starts, ({"a": W}, raw), strict=True):
        jax.tree.map(np.testing.assert_array_equal, found.tree, want)
    np.testing.assert_array_equal(starts[0].result["a"], W)
    np.testing.assert_array_equal(starts[1].result["a"]["@scale"]["x"], np.round(W / 2))
    moved, rounded = images[0].tree["a"], images[1].tree["a"]["@scale"]["x"]
    assert 0 < np.abs(moved - W).max() < 1
    np.testing.assert_array_equal(rounded, np.round(rounded))  # a start, as its fixed value is that of one point
    for image in images:
        jax.tree.map(np.testing.assert_array_equal, image.result, image.tree)


class Rounded(Ticking):
    """A grid, whose fixed value is that of one start."""

    kind = "rounded_of_rules"

    def init_leaf(self, w):
        return {"x": jnp.round(w), "n": jnp.zeros((), w.dtype)}


def test_ways_of_running_a_chain_are_those_of_its_draws_and_of_its_mean() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    found = real_transformed(Shifted(), BATCH, PARAMS, BATCH, keys)
    for name, w in PARAMS.items():
        np.testing.assert_array_equal(found["vmap of init"][name], BATCH[name])
        np.testing.assert_array_equal(found["scan of vmap of checkpoint"][name], FOUR[name] + 1)
        np.testing.assert_array_equal(found["shard_map"][name], w + 1)


# ---- updates

FIXED = {"a": {"@mask": {"w": W, "@fixed": {"mask": np.ones((2, 2), np.float32)}}}, "b": W}


def free(f: Any) -> Any:
    return lambda raw, *_: {**raw, "b": f(raw["b"])}


# ---- selections, files and structures


def refusing(*_: Any) -> Any:
    raise ValueError("refused")


VECTORS = {"w": np.float32([1, 2])}
RAW = {"w": {"@freeze": {"@fixed": {"w": np.float32([1, 2])}}}}


def stored(**others: Any) -> Any:
    """A chain whose raw tree is another than its parameters, and which refuses all that is wrong."""

    def check(raw: Any, like: Any) -> None:
        if not evidence.equal(raw, RAW):
            raise ValueError("wrong")

    def init(tree: Any, *_: Any) -> Any:
        return RAW if evidence.equal(tree, VECTORS) else refusing()

    def apply(tree: Any, *_: Any) -> Any:
        return VECTORS if evidence.equal(tree, RAW) else refusing()

    return Fake(**{"init": init, "apply": apply, "check": check, **others})


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (stored(), None),
        (stored(check=lambda raw, like: None), "check accepts a raw tree with a wrong leaf"),
        (stored(apply=kept), "apply accepts a tree that never went through init"),
        (stored(init=lambda *_: RAW), "init accepts a raw tree"),
        (stored(to_json=lambda: "text"), "from_json(p.to_json()) is not equal to p"),
    ],
)
def test_wrong_trees_and_texts_are_refused(p: Any, text: Any, eager: Any) -> None:
    eager.setattr(evidence, "installed_formats", lambda raw: {"memory": kept})
    eager.setattr(laws, "from_json", lambda text: Fake())
    with broken(text) if text else nullcontext():
        check("checkpoints", p, VECTORS)


def test_a_file_that_changes_a_raw_tree_or_makes_one_that_does_not_fit_is_found(eager: Any) -> None:
    eager.setattr(evidence, "installed_formats", lambda raw: {"first": kept, "second": mapped(np.negative)})
    with broken("the raw tree differs after it was written and read with second"):
        check("checkpoints", stored(), VECTORS)
    eager.setattr(evidence, "installed_formats", lambda raw: {"first": kept})
    with pytest.raises(ValueError, match="refused"):
        check("checkpoints", stored(check=lambda raw, like: refusing()), VECTORS)


# ---- what laws compare


def test_errors_are_relative_to_the_largest_entry_of_each_array() -> None:
    actual = {"a": np.float32([1, 4]), "b": np.complex64([3j]), "c": W, "d": np.float32([1]), "e": np.zeros((0, 2))}
    expected = {
        "a": np.float32([2, -4]),
        "b": np.complex64([3]),
        "c": W[:1],
        "d": np.float32([0]),
        "e": np.zeros((0, 2)),
    }
    found = dict(evidence.errors(actual, expected))
    assert found == pytest.approx({"a": 2, "b": np.sqrt(2), "c": np.inf, "d": 1e30, "e": 0})
    assert evidence.is_close({"a": actual["a"]}, {"a": expected["a"]}, 2.0)
    assert not evidence.is_close({"a": actual["a"]}, {"a": expected["a"]}, 1.99)
    assert not evidence.is_close({"a": W, "b": W}, {"a": W, "b": 2 * W}, 0.1)
    with pytest.raises(ValueError, match="zip"):
        list(evidence.paired({"a": W}, PARAMS))


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [
        (["float32"], 64 * 2.0**-23),
        (["float32", "float16"], 64 * 2.0**-10),
        (["float64", "float32"], 64 * 2.0**-23),
        (["bfloat16", "int8"], 64 * 2.0**-7),
        (["int32", "bool"], 0),
        ([], 0),
    ],
)
def test_rounding_is_that_of_the_coarsest_dtype(dtypes: Any, want: float) -> None:
    arrays = {str(i): np.ones(2, jnp.dtype(dtype)) for i, dtype in enumerate(dtypes)}
    assert evidence.rounding(arrays) == want
    assert evidence.rounding({}, arrays, {"x": np.ones(2, np.int8)}) == want


def test_equal_trees_have_the_same_bits_at_the_same_paths() -> None:
    nan = np.float32([np.nan, 0])
    assert evidence.equal({"a": nan}, {"a": nan.copy()})
    for other in ({"b": nan}, {"a": -nan}, {"a": nan[None]}, {"a": nan.view(np.int32)}, {"a": nan, "b": nan}, {}):
        assert not evidence.equal({"a": nan}, other)


def test_values_that_train_move_and_all_others_stay() -> None:
    raw = {**FIXED, "n": np.int32(3), "h": np.float16([1, 2]), "z": np.complex64([1, 2])}
    trains, rest = evidence.trainable(raw)
    assert [path for path, _ in evidence.named_arrays(trains)] == ["a/@mask/w", "b", "h", "z"]
    assert [path for path, _ in evidence.named_arrays(rest)] == ["a/@mask/@fixed/mask", "n"]
    moved = evidence.move_randomly(raw, jax.random.key(0))
    evidence.Case("", Fake(), {}, KEY).require_same_types(moved, jax.tree.map(jnp.asarray, raw), "")
    changed = {path for path, x, y in evidence.paired(moved, raw) if not evidence.equal(x, y)}
    assert changed == {"a/@mask/w", "b", "h", "z"}
    assert np.imag(moved["z"]).all()
    numbers = evidence.normal({"w": W, "v": W}, jax.random.key(0))
    assert not np.array_equal(numbers["w"], numbers["v"])
    assert not evidence.equal(numbers, evidence.normal({"w": W, "v": W}, jax.random.key(1)))
    big = np.float16([60000])
    np.testing.assert_array_equal(evidence.move_along(big, np.float16([40000]), -2.0), np.float16([-20000]))


@pytest.mark.parametrize("raw", [[], [W], [W, np.int8([1])], [W, W, np.int8([1]), np.int8([1]), W]], ids=len)
def test_each_leaf_is_wrong_once_in_one_of_three_ways(raw: Any) -> None:
    trees = list(evidence.wrong_trees(raw))
    assert len(trees) == (max(3, len(raw)) if raw else 0)
    for i, tree in enumerate(trees):
        at = i % len(raw)
        assert all(x is y for j, (x, y) in enumerate(zip(tree, raw, strict=True)) if j != at)
        wrong = tree[at]
        kinds = wrong is None, np.shape(wrong) == (1, *raw[at].shape), np.shape(wrong) == raw[at].shape
        assert kinds.index(True) == i % 3
        assert i % 3 != 2 or wrong.dtype != raw[at].dtype


def test_arrays_for_the_laws() -> None:
    np.testing.assert_array_equal(evidence.batch_of_two({"a": W})["a"], [W, W])
    np.testing.assert_array_equal(evidence.clear_first_row(W), [[0, 0], [3, 4]])
    assert evidence.clear_first_row(np.float32(3)) == 3
    assert evidence.clear_first_row(np.zeros((0, 2))).shape == (0, 2)
    large = evidence.large(W)
    assert (large.dtype, large.tolist()) == (np.float16, [[75, -150], [225, 300]])
    assert evidence.large(np.zeros(2, np.float32)).tolist() == [0, 0]
    for x in (np.complex64([1]), np.int8([1])):
        assert evidence.large(x) is x
    wide = [
        evidence.widened_if_inexact(np.ones(1, dtype)).dtype for dtype in ("float16", "float32", "complex64", "int8")
    ]
    assert wide == ["float32", "float32", "complex64", "int8"]
    with jax.enable_x64():
        double = [evidence.in_double_precision(np.ones(1, dtype)).dtype for dtype in ("float16", "complex64", "int8")]
    assert double == ["float64", "complex128", "int8"]


@pytest.mark.parametrize(
    ("p", "bits", "want"),
    [
        (Fake(), 32, True),
        (Fake(), 64, False),
        (Fake(init=mapped(lambda w: w.astype(np.float16)), fold=mapped(lambda w: w.astype(np.float32))), 32, False),
        (Fake(fold=mapped(lambda w: w.astype(np.float16))), 32, False),
        (Fake(init=lambda params, key: FIXED | {"n": np.int8([1])}), 32, True),
        (
            Fake(
                init=lambda params, key: {"a": {"@mask": {"w": W, "@fixed": {"mask": W.astype(np.float16)}}}},
                fold=lambda raw: {"a": W},
            ),
            32,
            True,
        ),
        (Fake(init=refusing), 32, False),
    ],
)
def test_precision_is_kept_in_raw_values_that_train_and_in_weights(p: Any, bits: int, want: Any) -> None:
    assert evidence.keeps_precision(p, {"a": W}, KEY, bits) is want


def test_gradients_are_given_to_updates_that_read_them() -> None:
    calls: list[Any] = []
    fakes = [
        Fake(update=lambda *args: calls.append(args), update_reads=reads) for reads in ((), ("key",), ("key", "grad"))
    ]
    for fake in fakes:
        evidence.update_raw(fake, PARAMS, KEY)
    assert [len(call) for call in calls] == [2, 2, 3]
    assert evidence.equal(calls[2][2], PARAMS)


def test_chains_that_files_can_hold() -> None:
    plain, own = rpx.WeightNorm() >> rpx.Freeze(), rpx.Freeze(where=lambda path, x: True)
    assert [evidence.has_functions(p) for p in (plain, own)] == [False, True]
    local = type("Local", (rpx.Freeze,), {"kind": "local_of_rules"})()
    assert [evidence.picklable(p) for p in (plain, own, local, plain >> local)] == [True, False, False, False]
    assert [len(evidence.stages_of(p)) for p in (plain, own, rpx.Chain())] == [2, 1, 0]


class Half(rpx.Perturbation):
    """Its mean is another array."""

    kind = "half_of_rules"

    def apply_leaf(self, w, key):
        return w

    def mean_leaf(self, w):
        return w / 2


def test_stages_with_another_mean_are_left_out() -> None:
    noise = rpx.VarNoise(0.1)
    p = rpx.WeightNorm() >> noise
    assert evidence.without_means(p) is p
    assert evidence.without_means(Half()) == rpx.Chain()
    assert evidence.without_means(rpx.Gaussian(0.1)) == rpx.Gaussian(0.1)
    assert evidence.without_means(rpx.WeightNorm() >> Half() >> noise) == rpx.WeightNorm() >> noise


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"a": W}, {"pickle", "flax", "orbax", "orbax without a template", "safetensors"}),
        ({"a": {"b": W}, "c": np.int8([1])}, {"pickle", "flax", "orbax", "orbax without a template", "safetensors"}),
        ({"a": [W]}, {"pickle", "flax", "orbax", "safetensors"}),
        ({"a": W, "z": np.complex64([1])}, {"pickle", "flax", "orbax", "orbax without a template"}),
        ({"a": W.astype(jnp.bfloat16)}, {"pickle", "flax", "orbax", "orbax without a template"}),
        (W, {"pickle", "flax", "orbax", "orbax without a template", "safetensors"}),
    ],
)
def test_formats_are_those_that_can_hold_a_tree(raw: Any, names: Any, monkeypatch: Any) -> None:
    formats = evidence.installed_formats(raw)
    assert formats.keys() == names
    for name in names - {"orbax", "orbax without a template", "flax"}:
        assert evidence.equal(formats[name](raw), raw)
    monkeypatch.setattr(evidence.importlib.util, "find_spec", lambda name: name == "pickle" or None)
    assert evidence.installed_formats(raw).keys() == {"pickle"}


def test_a_call_must_raise_an_error_of_value_or_type() -> None:
    case = evidence.Case("some law", Fake(), {}, KEY)

    def raising(error: Any) -> Any:
        def call() -> None:
            raise error

        return call

    for error in (ValueError(), TypeError()):
        case.require_raises(raising(error), "it passes")
    with broken("it passes, and raises KeyError('x') instead of a ValueError or TypeError."):
        case.require_raises(raising(KeyError("x")), "it passes")
    with broken("it passes."):
        case.require_raises(lambda: None, "it passes")


def test_types_are_the_same_with_their_weakness() -> None:
    case = evidence.Case("some law", Fake(), {}, KEY)
    weak, strong = (jax.ShapeDtypeStruct((), np.float32, weak_type=weak) for weak in (True, False))
    case.require_same_types({"a": strong}, {"a": strong}, "it")
    with broken("it returns 'a' as weakly typed float32[], but its input was float32[]"):
        case.require_same_types({"a": weak}, {"a": strong}, "it")


# ---- a step


@pytest.mark.parametrize(
    ("new", "old", "expected", "text"),
    [
        (W, 2 * W, W, ""),
        (W * np.float32(1 + 6e-6), W, W, ""),
        (W * np.float32(1 + 1e-5), 2 * W, W, "it differs by 1.0e-05 of the largest entry"),
        (W, W, 2 * W, "the step did not change it"),
        (3 * W, W, 2 * W, "it differs by 5.0e-01 of the largest entry"),
        (np.int8([1, 0]), np.int8([1, 1]), np.int8([1, 0]), ""),
        (np.int8([1, 0]), np.int8([1, 1]), np.int8([0, 0]), "it differs by 1.0e+30 of the largest entry"),
        (np.float16([1.002]), np.float16([2]), np.float16([1]), ""),
        (np.float16([1.005]), np.float16([2]), np.float16([1]), "it differs by 4.9e-03 of the largest entry"),
    ],
)
def test_a_fixed_value_differs_by_more_than_rounding(new: Any, old: Any, expected: Any, text: str) -> None:
    assert step._what_is_wrong(new, old, expected) == text
