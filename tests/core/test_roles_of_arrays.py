"""Roles of the axes of arrays: those of arrays that are derived from others, and what words for axes stand for."""

import numpy as np
import pytest

from reparax.core.roles import (
    CONVOLUTION,
    LOOKUP,
    PRODUCT,
    TRANSPOSED,
    Misfit,
    Misfits,
    Role,
    Use,
    axes_by_word,
    one_or_tuple,
)

WORDS = ("inputs", "outputs", "stacked", "channels", "uncut", "vectors")


def use(inputs, outputs, how=PRODUCT, windows=(), stacked=(), line="f.py:1"):
    return Use(inputs, outputs, stacked, line, how, windows)


def role(inputs, outputs, stacked=(), uses=(), shape=(3, 4, 5, 6)):
    return Role(inputs, outputs, stacked, uses=uses, shape=shape)


@pytest.mark.parametrize(
    ("hows", "is_table"),
    [((), False), ((LOOKUP,), True), ((LOOKUP, PRODUCT), False), ((PRODUCT, LOOKUP), False), ((LOOKUP,) * 2, True)],
)
def test_a_table_is_looked_up_in_each_of_its_uses(hows, is_table):
    assert role((0,), (1,), uses=tuple(use((0,), (1,), how) for how in hows)).is_table is is_table


@pytest.mark.parametrize(
    ("groups", "is_said"),
    [
        (((0,), (1,), (2,)), False),
        (((0, 1), (1,), ()), True),
        (((0,), (1,), (0,)), True),
        (((0,), (1,), (1,)), True),
        (((), (), ()), False),
    ],
)
def test_an_axis_of_two_roles_is_ambiguous_and_each_use_is_said(groups, is_said):
    uses = use((0,), (1,), line="a"), use((1,), (0,), line="b")
    said = "inputs (0,) and outputs (1,) in a; inputs (1,) and outputs (0,) in b"
    assert role(*groups, uses=uses).ambiguous == (said if is_said else "")


@pytest.mark.parametrize(
    ("of", "followed", "stacked", "expected"),
    [
        (((0,), (1,)), [1, 0], (), ((1,), (0,), ())),
        (((0, 1), (2, 3)), [3, 1, 2, 0], (), ((1, 3), (0, 2), ())),
        (((0,), (1,)), [None, 0, 1], (0,), ((1,), (2,), (0,))),
        (((0,), (1,)), [0, None, 1, None], (1, 3), ((0,), (2,), (1, 3))),
        (((1,), (2,), (0,)), [None, 0, 1, 2], (0,), ((2,), (3,), (0, 1))),
        (((1,), (2,), (0,)), [2, 0, None, 1], (2,), ((3,), (0,), (1, 2))),
        (((0,), (1,)), [0, None], (), ((0,), (1,), ())),  # the first factor
        (((0,), (1,)), [None, 1], (), ((0,), (1,), ())),  # the second
        (((0,), (1,)), [None, None, 1], (0,), ((1,), (2,), (0,))),  # the second of each layer
        (((0,), (1,)), [1, None, None], (2,), ((1,), (0,), (2,))),
        (((0,), (1,)), [None, None], (), ((), (), ())),  # between two factors
        (((0,), (1,)), [0, 1, None], (), ((0,), (1,), ())),
        (((0,), (1, 2)), [2], (), ((), (0,), ())),
    ],
)
def test_the_axes_of_a_derived_array_have_the_roles_of_those_that_they_follow(of, followed, stacked, expected):
    shape = tuple(range(len(followed)))
    found = role(*of).follow(followed, shape, np.float16, stacked)
    assert (found.inputs, found.outputs, found.stacked) == expected
    assert (found.shape, found.dtype) == (shape, np.float16)


@pytest.mark.parametrize(
    ("of", "followed", "expected"),
    [
        (use((0,), (1,), LOOKUP), [0, None], use((0,), (), LOOKUP)),
        (use((0,), (1,), LOOKUP), [None, 1], use((), (1,), PRODUCT)),  # what multiplies rows that were looked up
        (use((0, 1), (2,), CONVOLUTION, (0,)), [2, 1, 0], use((1, 2), (0,), CONVOLUTION, (2,))),
        (use((0, 1), (2,), TRANSPOSED, (0,)), [1, None], use((0,), (), TRANSPOSED, ())),
        (use((0,), (1,), CONVOLUTION), [None, 1], use((), (1,), CONVOLUTION)),
        (use((1,), (2,), stacked=(0,)), [None, 2, 1, 0], use((2,), (1,), stacked=(0, 3))),
    ],
)
def test_each_use_of_a_derived_array_is_moved_too(of, followed, expected):
    stacked = (0,) if of.stacked else ()
    both = role((), (), uses=(of, use((), ()))).follow(followed, (), None, stacked)
    assert both.uses == (expected, use((), (), stacked=stacked))


def test_axes_without_a_role_are_unknown_unless_they_have_size_one():
    assert role((1,), (3,), (5,), shape=(2, 2, 1, 2, 0, 2, 2)).unknown() == (0, 4, 6)
    assert role((0,), (1,), shape=(2, 2)).unknown() == ()


IMAGE = use((1, 2, 3), (0,), CONVOLUTION, (2, 3))  # (out, in, height, width)
TABLE = use((0,), (1,), LOOKUP)


@pytest.mark.parametrize(
    ("of", "stacked", "expected"),
    [
        (role((0,), (1, 2), shape=(2, 3, 4)), (), ((-3,), (-2, -1), (), (-3,), (-2, -1), (-3,))),
        (role((0, 1), (2,), shape=(2, 3, 4)), (), ((-3, -2), (-1,), (), (-2,), (-3, -1), (-3, -2))),
        (role((1, 2, 3), (0,), uses=(IMAGE,)), (), ((-3, -2, -1), (-4,), (), (-3,), (-4, -2, -1), (-3, -2, -1))),
        (
            role((0, 1), (2,), uses=(use((0, 1), (2,), CONVOLUTION, (0, 1)),), shape=(2, 3, 4)),
            (),
            ((-3, -2), (-1,), (), (-2,), (-3, -1), (-3, -2)),  # as of a kernel for each channel
        ),
        (
            role((0, 1), (2,), uses=(use((0, 1), (2,)), use((0, 1), (2,), CONVOLUTION, (1,))), shape=(2, 3, 4)),
            (),
            ((-3, -2), (-1,), (), (-3,), (-2, -1), (-3, -2)),
        ),
        (role((0,), (1,), uses=(TABLE,), shape=(2, 3)), (), ((-2,), (-1,), (), (-2,), (-1,), (-1,))),
        (role((0,), (2,), (1,), shape=(2, 3, 4)), (1,), ((-2,), (-1,), (), (-2,), (-1,), (-2,))),
        (role((0,), (2,), (1,), shape=(2, 3, 4)), (), ((-3,), (-1,), (-2,), (-3,), (-1,), (-3,))),
        (role((1,), (3,), (0, 2)), (2,), ((-2,), (-1,), (-3,), (-2,), (-1,), (-2,))),
        (role((), (), shape=(3,)), (), ((),) * 6),
    ],
)
def test_words_stand_for_axes_from_the_back_that_skip_stacked_ones(of, stacked, expected):
    assert axes_by_word(of, stacked) == dict(zip(WORDS, expected, strict=True))


def test_a_misfit_tells_each_line_once_and_several_have_a_line_each():
    uses = use((0,), (1,), line="a"), use((0,), (1,), line="b"), use((0,), (1,), LOOKUP, line="a")
    misfit = Misfit("P()", "w", "axis", (-1,), (-2, -1), role((0,), (1,), (2,), uses, (2, 3, 4)))
    text = (
        "P() takes axis=-1 at 'w' of shape (2, 3, 4), which the network multiplies with inputs (0,), outputs (1,) and "
        "stacked axes (2,) (a, b). Write axis=(-2, -1), or `p.with_axes(rpx.roles(loss, params, batch))`."
    )
    assert str(misfit) == text
    assert repr(Misfits((misfit, misfit))) == f"{text}\n{text}"


def test_one_axis_is_written_as_a_number_and_several_or_none_as_a_tuple():
    assert [one_or_tuple(axes) for axes in ([3], (2, 1), ())] == [3, (2, 1), ()]
