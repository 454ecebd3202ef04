"""Axes as users write them, in normal form, and counted in one of several stacked arrays."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reparax.core import axes

NONE, BOTH = None, ("each", "last")
# What each check takes of None and of words; all take one axis.
CHECKS = {
    axes.check_axes: (),
    axes.check_optional_axes: (NONE,),
    axes.check_axis: (),
    axes.check_slices: ("each",),
    axes.check_features: (NONE, "each"),
    axes.check_along: (NONE, "last"),
    axes.check_one_along: ("last",),
    axes.check_channels: (NONE, *BOTH),
}
ONE = {axes.check_axis, axes.check_one_along}
NORMAL = [
    (1, 1),
    (np.int64(-2), -2),
    ("mlp", "mlp"),
    ((-1,), -1),
    (["mlp"], "mlp"),
    ([0, -1], (0, -1)),
    ((0, "mlp"), (0, "mlp")),
    ((), ()),
]


def refused(check, value):
    with pytest.raises((TypeError, ValueError)) as error:
        check(value, "P", "axis")
    return type(error.value)


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_a_check_takes_axes_and_its_words_and_gives_them_a_normal_form(check):
    for given, normal in NORMAL:
        if check in ONE and isinstance(given, tuple | list):
            assert refused(check, given) is TypeError
            continue
        found = check(given, "P", "axis")
        assert (found, type(found)) == (normal, type(normal))
    for word in (NONE, *BOTH):
        if word in CHECKS[check]:
            assert check(word, "P", "axis") is word
        else:
            of_entries = word is NONE and check is axes.check_slices
            assert refused(check, word) is (ValueError if of_entries else TypeError)
    for wrong in (1.0, True, (0, None), (0, "each"), np.zeros(2)):
        assert refused(check, wrong) is TypeError
    if check not in ONE:
        assert refused(check, (0, 1, 0)) is ValueError


def leaf(*names):
    return SimpleNamespace(axes=SimpleNamespace(names=names or None))


@pytest.mark.parametrize(
    ("given", "of", "expected"),
    [
        (2, None, (2,)),
        ((), None, ()),
        ((2, 0), leaf(), (0, 2)),
        ("layers", leaf("layers", "in"), (0,)),
        ("in", leaf("layers", "in"), (1,)),
        ("experts", leaf("layers", "in"), ()),
        (("in", "experts", "layers"), leaf("layers", None, "in"), (0, 2)),
        (("in", 0), leaf("layers", None, "in"), (0, 2)),
        (("experts", 1), leaf("layers", "in"), (1,)),
    ],
)
def test_stacked_axes_are_found_by_name_and_names_of_other_arrays_are_ignored(given, of, expected):
    assert axes.find_axes(given, of) == expected


@pytest.mark.parametrize(
    ("given", "of"),
    [
        ("layers", leaf()),
        ("layers", None),
        ("a", leaf("a", "a")),
        ("stacked", leaf("a", "b")),
        ((0, "inputs"), leaf("a")),
    ],
)
def test_a_name_that_cannot_be_found_and_a_word_are_refused(given, of):
    with pytest.raises(ValueError, match=r"cannot determine which axes|expected an array with one axis named"):
        axes.find_axes(given, of)


@pytest.mark.parametrize(
    ("given", "leaves", "is_refused"),
    [
        ("b", [leaf("a"), leaf("b")], False),
        ("b", [leaf("a"), leaf("c")], True),
        (("a", "b"), [leaf("a")], True),
        (("b", "a"), [leaf("a")], True),
        (("a", 0), [leaf("a")], False),
        ("b", [leaf(), leaf()], False),
        ("b", [leaf(), leaf("a")], True),
        ("b", [leaf(None)], True),
        (0, [leaf("a")], False),
        ("b", [], False),
    ],
)
def test_a_name_that_no_array_has_is_refused_if_any_has_names(given, leaves, is_refused):
    if is_refused:
        with pytest.raises(ValueError, match="no array that it selects has an axis named 'b'"):
            axes.require_axes("P()", "stacked", given, leaves)
    else:
        axes.require_axes("P()", "stacked", given, leaves)


@pytest.mark.parametrize(
    ("given", "names", "words"),
    [
        (None, False, False),
        ("each", False, False),
        ("last", False, False),
        (1, False, False),
        ((0, 1), False, False),
        ((), False, False),
        ("mlp", True, False),
        ((0, "mlp"), True, False),
        ("outputs", True, True),
        ((0, "outputs"), True, True),
        (("mlp", "stacked"), True, True),
        ((0, None), False, False),
    ],
)
def test_names_and_words_are_told_from_integers(given, names, words):
    assert axes.has_names(given) is names
    assert axes.has_words(given) is words
    assert axes.has_words(given, ("outputs",)) is ("outputs" in (given if isinstance(given, tuple) else (given,)))
    assert not axes.has_words(given, ("else",))


def test_names_become_indices_from_the_back_of_one_array():
    named = leaf("layers", "in", None, "experts", "out")
    given = {"stacked": ("experts", "layers"), "axis": ("out", 0), "along": "in", "rows": None, "columns": "each"}
    assert axes.fields_to_numbers(given, named) == {
        "stacked": (0, 3),
        "axis": (-1, 0),
        "along": -3,
        "rows": None,
        "columns": "each",
    }
    assert axes.fields_to_numbers({"stacked": (1, 0), "axis": -1}, leaf()) == {"stacked": (0, 1), "axis": -1}
    with pytest.raises(ValueError, match=r"whose axes are named \('in', None, 'out'\)"):
        axes.fields_to_numbers({"stacked": ("layers", "experts"), "axis": "layers"}, named)


W = np.zeros((2, 3, 4))


@pytest.mark.parametrize(
    ("given", "w", "said"),
    [
        (None, W, None),
        ("each", W, None),
        ("last", W[0, 0], None),
        ("last", W[0, 0, 0], "out of bounds"),
        ("last", W[0], "expected a vector"),
        (2, W, None),
        (3, W, "out of bounds"),
        (-3, W, None),
        (-4, W, "out of bounds"),
        ((0, 3), W, "out of bounds"),
        ((-4, 0), W, "out of bounds"),
        ((0, 1), W, None),
        ((0, 1, -3), W, "names an axis twice"),
        ((), W, None),
    ],
)
def test_axes_fit_an_array_that_has_each_of_them_once(given, w, said):
    found = axes.why_axes_do_not_fit(given, w, "axis")
    assert (found is None) if said is None else said in found


@pytest.mark.parametrize(
    ("given", "from_front", "others"),
    [
        (None, (0, 1, 2), (0, 1, 2)),
        ("each", (0, 1, 2), ()),
        ("last", (2,), (0, 1)),
        (-2, (1,), (0, 2)),
        (-3, (0,), (1, 2)),
        (0, (0,), (1, 2)),
        ((-1, 0), (0, 2), (1,)),
        ((), (), (0, 1, 2)),
    ],
)
def test_axes_from_the_front_and_all_others(given, from_front, others):
    assert axes.count_from_front(given, W) == from_front
    assert axes.other_axes(given, W) == others
    assert axes.last_to_number(given) == (-1 if given == "last" else given)


def test_axes_that_skip_stacked_ones_are_found_among_all():
    found = [axes.axes_in_stack(given, W, stacked) for given, stacked in ((-1, 0), (1, 0), ((-1, 0), 1), (0, (0, 2)))]
    assert found == [(2,), (2,), (0, 2), (1,)]
    assert axes.list_axes((2, np.int64(0))) == (2, 0)
    assert (axes.position(-1, W), axes.position(0, W)) == (2, 0)
    for word in ("inputs", "mlp"):
        with pytest.raises(ValueError, match=f"{word!r}"):
            axes.list_axes((0, word))


@pytest.mark.parametrize(
    ("stacked", "ndim", "positions"),
    [
        ((), 2, ()),
        ((0,), 1, (0,)),
        ((2,), 2, (1,)),
        ((0, 3), 3, (0, 2)),
        ((1, 2), 2, (0, 1)),
        ((0, 1, 5), 5, (0, 1, 4)),
    ],
)
def test_values_of_fewer_axes_have_their_stacked_axes_as_near_as_they_can(stacked, ndim, positions):
    assert axes._stacked_positions(stacked, ndim) == positions


def test_one_of_stacked_arrays_has_the_other_axes():
    assert axes.one_stacked(W, ()) is W
    one = axes.one_stacked(W.astype(np.float16), (0, 2))
    assert (one.shape, one.dtype) == ((3,), np.float16)
    assert (axes.stacked_sizes(W, (2, 0)), axes.stacked_sizes(W, (0, 2))) == ((4, 2), (2, 4))
    assert [axes.stacked_axes_error(W, stacked) is None for stacked in ((), (0, 2), (0, 3), (3, 0))] == [
        *(True, True, False, False)
    ]


def test_each_of_stacked_arrays_is_given_or_else_the_type_of_one():
    w = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    assert next(axes.each_stacked(w, ())) is w
    found = np.stack(jax.jit(lambda: list(axes.each_stacked(w, (0, 2))))())
    np.testing.assert_array_equal(found, w.transpose(0, 2, 1).reshape(8, 3))
    empty, known = np.zeros((2, 0, 3), np.float32), jax.ShapeDtypeStruct((2, 3), jnp.float32)
    for x, stacked, shape in ((empty, (0, 1), (3,)), (empty, (0,), (0, 3)), (empty, (2,), (2, 0)), (known, (0,), (3,))):
        assert list(axes.each_stacked(x, stacked)) == [jax.ShapeDtypeStruct(shape, jnp.float32)]


def test_a_formula_is_mapped_over_arguments_whose_stacked_sizes_agree():
    def shape(*shapes):
        arrays = [jax.ShapeDtypeStruct(each, jnp.float32) for each in shapes]
        mapped = axes.map_stacked((0, 2), lambda x, y: {"sum": jnp.sum(x), "y": y, "row": x[0]})
        return jax.tree.map(jnp.shape, jax.eval_shape(mapped, *arrays))

    assert shape((2, 5, 3, 4), (2, 3)) == {"sum": (2, 3), "y": (2, 3), "row": (2, 4, 3)}
    with pytest.raises(ValueError, match=r"got sizes \(2, 3\) and \(2, 4\)"):
        shape((2, 5, 3, 4), (2, 4))


def test_a_box_names_each_axis():
    axes.require_names_fit(("a", None, "b"), W)
    for names in (("a", "b"), ("a",) * 4):
        with pytest.raises(ValueError, match="Give the box 3 names"):
            axes.require_names_fit(names, W)
