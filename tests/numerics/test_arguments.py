"""Checks of arguments: what each takes, what it stores, and which types of error it raises."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reparax.numerics import arguments

INFINITE, NAN = float("inf"), float("nan")
below_one = arguments.number_that(lambda x: x < 1, "takes less than 1.")
known_below_one = arguments.number_that(lambda x: x < 1, "takes less than 1.", known=True)
word = arguments.one_of(Literal["one", "two", "three"])

TAKEN = {
    arguments.check_number: [
        (2, 2.0),
        (np.int8(2), 2.0),
        (np.int32(2**24 + 3), 2.0**24 + 3),
        (np.float32(0.1), 0.1),
        (np.array(0.1, np.float32), 0.1),
        (NAN, NAN),
    ],
    arguments.check_known_number: [(2, 2.0), (np.array(0.1, np.float32), 0.1)],
    arguments.check_positive_number: [(1e-9, 1e-9)],
    below_one: [(-1, -1.0)],
    arguments.check_flag: [(True, True), (np.bool_(0), False)],
    arguments.check_function: [(abs, abs)],
    arguments.optional(arguments.check_integer): [(None, None), (3, 3)],
    word: [("three", "three"), ("one", "one")],
    arguments.check_integer: [(-3, -3), (np.int8(3), 3)],
    arguments.check_positive_integer: [(1, 1), (np.int8(2), 2)],
    arguments.check_two: [([2, 3], (2, 3)), ((1, 1), (1, 1)), ((np.int8(3), 2), (3, 2))],
}
REFUSED = {
    arguments.check_number: {TypeError: ["1", None, True, 1j, np.ones(2), np.array(1j), abs]},
    arguments.check_known_number: {TypeError: ["1"]},
    arguments.check_positive_number: {ValueError: [0, -1, INFINITE, NAN]},
    arguments.check_known_positive_number: {ValueError: [0, INFINITE]},
    below_one: {ValueError: [1, 2], TypeError: ["1"]},
    known_below_one: {ValueError: [1]},
    arguments.check_flag: {TypeError: [1, None, "True"]},
    arguments.check_function: {TypeError: [1, None]},
    arguments.optional(arguments.check_integer): {TypeError: ["3"]},
    word: {ValueError: ["four", 1, None, np.zeros(2)]},
    arguments.check_integer: {TypeError: [True, 1.0, None]},
    arguments.check_positive_integer: {ValueError: [0, -1], TypeError: [1.0]},
    arguments.check_two: {TypeError: [1, (1, 2, 3), "12"], ValueError: [(1, 0)]},
}


@pytest.mark.parametrize(("check", "value", "stored"), [(f, *row) for f, rows in TAKEN.items() for row in rows])
def test_what_is_taken(check, value, stored):
    got = check(value, "Stage", "name")
    np.testing.assert_equal(got, stored)
    assert type(got) is type(stored)


@pytest.mark.parametrize(
    ("check", "error", "value"),
    [(f, error, value) for f, errors in REFUSED.items() for error, values in errors.items() for value in values],
)
def test_what_is_refused(check, error, value):
    with pytest.raises(error, match=r"^Stage .*\bname\b"):
        check(value, "Stage", "name")


def test_a_traced_number_is_taken_as_it_is_unless_it_must_be_known():
    def stored(check):
        return jax.eval_shape(lambda x: check(x, "Stage", "name"), jnp.float32(2))

    assert stored(arguments.check_number).dtype == stored(below_one).dtype == jnp.float32
    for check in arguments.check_known_number, arguments.check_known_positive_number, known_below_one:
        with pytest.raises(TypeError, match="traced"):
            stored(check)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jnp.zeros((2, 3)), "an array of dtype float32 and shape (2, 3)"),
        ({"a": jnp.zeros(2)}, "a dict of arrays"),
        ([1, jnp.zeros(2)], "a list of arrays"),
        ([1, "a"], "[1, 'a']"),
    ],
)
def test_how_a_value_is_described(value, text):
    assert arguments.describe_argument(value) == text


@pytest.mark.parametrize("number", [0.1, 1 / 3, 2.0**-149, 3.4028235e38, 16777216.0, NAN, -0.0])
def test_the_shortest_decimal_number(number):
    """It is the same number of float32, and numpy prints it with as many digits."""
    single = np.float32(number)
    np.testing.assert_equal(np.float32(arguments.shortest(single)), single)
    assert len(repr(arguments.shortest(single))) <= len(repr(float(np.format_float_scientific(single))))


def test_wider_numbers_are_kept_exactly():
    assert arguments.shortest(np.float64(1 / 3)) == 1 / 3
    assert arguments.shortest(np.float16(0.1)) == 0.099975586
    assert arguments.shortest_parts(np.complex64(0.1 - 0.3j)) == 0.1 - 0.3j
