"""The arguments of a function, by their paths, and its program."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

import reparax as rpx
from reparax.programs import jaxprs
from reparax.programs.call import Arguments, check_call, given_options, is_keys

KEY, RAW_KEY = jax.random.key(0), np.zeros(2, np.uint32)
RAW, X = {"w": np.ones(2, np.float32), "b": [np.float32(3)]}, np.arange(2, dtype=np.float32)


def loss(raw, key, *more, flag="a", scale=X):
    return {"loss": raw["w"] * scale + raw["b"][0], "more": more, "flag": flag, "one": np.ones(1)}


ARGUMENTS = Arguments.of("who", loss, None, (RAW, KEY, X, "text"), {"flag": "c", "scale": X})


def test_arrays_have_paths_and_the_first_argument_and_keys_are_chosen():
    assert ARGUMENTS.paths == ["raw/b/0", "raw/w", "key", "more", "argument scale"]
    assert ARGUMENTS.is_chosen == [True, True, True, False, False]
    assert [x is y for x, y in zip(ARGUMENTS.arrays, [RAW["b"][0], RAW["w"], KEY, X, X], strict=True)] == [True] * 5
    assert Arguments.of("who", max, None, (X, X), {}).paths == ["argument 0", "argument 1"]


@pytest.mark.parametrize(
    ("argnums", "chosen"),
    [(None, [1, 1, 0]), (1, [0, 1, 0]), ((0, 2), [1, 0, 1]), ([], [0, 0, 0]), ((2, 2), [0, 0, 1])],
)
def test_arguments_are_chosen_by_position(argnums, chosen):
    assert Arguments.of("who", loss, argnums, (X, RAW_KEY, X), {}).is_chosen == [*map(bool, chosen)]


def test_keyword_arguments_are_data_with_all_their_leaves():
    assert Arguments.of("who", loss, 0, (X,), {"scale": {"a": X, "b": X}}).is_chosen == [True, False, False]


def test_a_call_puts_other_arrays_in_their_places():
    arrays = [np.float32(5), 2 * X, KEY, 3 * X, 4 * X]
    found = ARGUMENTS.call(arrays)
    np.testing.assert_array_equal(found["loss"], [5, 13])
    assert (found["more"][0] is arrays[3], found["more"][1], found["flag"]) == (True, "text", "c")
    assert ARGUMENTS.call(arrays, lambda raw, *args, **kwargs: raw["b"][0]) is arrays[0]


def test_the_program_of_a_call_gives_its_traced_results_and_the_others_are_kept():
    weight = jnp.ones(2)
    call = Arguments.of("who", lambda x, y: ("text", x * weight, np.ones(3), y + 1), 1, (X, np.float32(2)), {}).trace()
    assert call.is_chosen == [False, False, True]  # the weight comes first
    assert (call.inputs[0] is weight, call.inputs[1] is X) == (True, True)
    assert not call.program.constvars
    outs = jaxprs.evaluate(call.program, call.inputs)
    text, product, ones, number = call.restore(outs)
    assert (text, ones.shape, float(number)) == ("text", (3,), 3)
    np.testing.assert_array_equal(product, X)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (KEY, True),
        (jax.random.split(KEY, 3), True),
        (RAW_KEY, True),
        (np.zeros((3, 4), np.uint32), True),
        ([KEY, RAW_KEY], True),
        ([KEY, X], False),
        ([], False),
        (np.zeros(3, np.uint32), False),
        (np.zeros((), np.uint32), False),
        (np.zeros(2, np.int32), False),
        ("text", False),
    ],
)
def test_keys_are_told_by_their_type(argument, expected):
    assert is_keys(argument) == expected


def test_options_that_were_given():
    assert given_options(a=None, b=False, c=0, d="", e=True) == ["c", "d", "e"]


class Model:
    def __call__(self, x):
        return x


@jax.tree_util.register_dataclass
@dataclass
class Held:
    x: np.ndarray


def named(x, *, local=True):
    return x


def test_a_call_is_named_by_its_function():
    assert check_call("factored", named, None, own_options=["plan"]) == "factored(named)"
    assert check_call("remat", functools.partial(named), (0, 1)) == "remat(named)"
    assert check_call("remat", rpx.remat(named), [0]).startswith("remat(")
    noted = functools.partial(named)
    noted.note = "which keeps it apart"
    assert check_call("remat", functools.partial(noted), 0) == "remat(named)"
    assert check_call("remat", Model(), 0) == "remat(Model)"
    assert check_call("remat", max, 3, own_options=["plan"]) == "remat(max)"


POSITIONS = "factored(named) expects argnums to be the position of an argument or a tuple of positions, but got "
REJECTED = [
    (TypeError, {"argnums": -1}, POSITIONS + "-1. Pass positions counted from 0, such as `argnums=(0, 2)`."),
    (
        TypeError,
        {"argnums": (0, True)},
        POSITIONS + "(0, True). Pass positions counted from 0, such as `argnums=(0, 2)`.",
    ),
    (TypeError, {"argnums": 1.0}, POSITIONS + "1.0. Pass positions counted from 0, such as `argnums=(0, 2)`."),
    (
        TypeError,
        {"fun": {"w": X, "f": len}},
        "factored takes a function, but got {'f': <built-in function len>, 'w': 'float32[2]'} of type dict. "
        "Pass a function, such as the loss.",
    ),
    (
        TypeError,
        {"fun": [Held(X)]},
        "factored takes a function, but got [Held(x=array([0., 1.], dtype=float32))] of type list. Pass a function, "
        "such as the loss.",
    ),
    (
        TypeError,
        {"fun": rpx.LowRank(2)},
        "factored takes a function, but got LowRank(2) of type LowRank. Pass a function, such as the loss.",
    ),
    (
        TypeError,
        {"own_options": ["plan", "local"]},
        "factored(named) got 'local', which is both an option of factored and a parameter of the function. To pass it "
        "to the function, bind it: `factored(lambda *args: loss(*args, local=...), ...)`.",
    ),
    (
        ValueError,
        {"fun": functools.partial(rpx.remat(named)), "follows_weights": True},
        "factored traces how a function uses its weights, but got a function returned by `rpx.remat`, which hides "
        "them. Pass the original function. To use both, apply `rpx.remat` last: `rpx.remat(rpx.factored(loss))`.",
    ),
]


@pytest.mark.parametrize(("error", "changed", "text"), REJECTED)
def test_calls_that_are_rejected(error, changed, text):
    settings = {"fun": named, "argnums": None} | changed
    with raises(error, text):
        check_call("factored", settings.pop("fun"), settings.pop("argnums"), **settings)


def test_a_position_without_an_argument_is_rejected():
    for argnums in ((0, 2), (8, 2)):
        text = f"who got argnums={argnums}, but was called with 2 positional arguments, so there is no argument 2. "
        with raises(TypeError, text + "Pass all arguments in argnums by position, not by keyword."):
            Arguments.of("who", loss, argnums, (X, KEY), {"scale": X})
