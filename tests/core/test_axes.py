"""What axes mean before a stage sees an array: checks, numbers, and the roles that layers and names give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

from reparax.core import axes
from reparax.core.known_axes import KnownAxes, known_by_name, role_by_letters
from reparax.core.raw import describe_places
from reparax.core.roles import LOOKUP, PRODUCT, Role, Use, axes_by_word
from reparax.core.where import is_bias_or_scale, is_table, selected

CUBE = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
MATRIX, VECTOR = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)
T, V = TypeError, ValueError


@pytest.mark.parametrize(
    ("check", "none", "each", "last", "two"),
    [
        (axes.check_axes, T, T, T, (0, 1)),
        (axes.check_optional_axes, None, T, T, (0, 1)),
        (axes.check_axis, T, T, T, T),
        (axes.check_slices, V, "each", T, (0, 1)),
        (axes.check_features, None, "each", T, (0, 1)),
        (axes.check_along, None, T, "last", (0, 1)),
        (axes.check_one_along, T, T, "last", T),
        (axes.check_channels, None, "each", "last", (0, 1)),
    ],
)
def test_what_a_field_of_axes_takes(check, none, each, last, two):
    for given, expected in (
        (None, none),
        ("each", each),
        ("last", last),
        ([0, np.int64(1)], two),
        ("in", "in"),
        (-1, -1),
    ):
        if isinstance(expected, type):
            with pytest.raises(expected, match=r"^Stage .*name"):
                check(given, "Stage", "name")
        else:
            found = check(given, "Stage", "name")
            assert (found, type(found)) == (expected, type(expected))
    for wrong, error in (((0, 0), T if check.single else V), (0.5, T), (True, T), ((), () if not check.single else T)):
        if error == ():
            assert check(wrong, "Stage", "name") == ()
        else:
            with pytest.raises(error):
                check(wrong, "Stage", "name")


def test_stacked_axes_are_counted_from_the_front():
    assert axes.check_front_axes([0, "layers"], "Stage", "stacked") == (0, "layers")
    for given in (-1, (0, -1)):
        with raises(ValueError, f"Stage takes axes counted from the front (0, 1, ...) as stacked, but got {given}."):
            axes.check_front_axes(given, "Stage", "stacked")


def test_axes_beside_stacked_ones():
    assert [axes.axes_in_stack(axis, CUBE, 0) for axis in (0, 1, -1, -2)] == [(1,), (2,), (2,), (1,)]
    assert axes.one_stacked(CUBE, (0, 2)) == VECTOR
    assert axes.stacked_axes_error(CUBE, (3,)).startswith(
        "stacked=(3,) is out of bounds for an array of shape (2, 3, 4)"
    )


@pytest.mark.parametrize(
    ("given", "w", "said"),
    [
        (None, CUBE, None),
        ("each", CUBE, None),
        ("last", VECTOR, None),
        ("last", MATRIX, "expected a vector, because axis is not given, but got an array of shape (2, 3)."),
        (-2, MATRIX, None),
        (1, MATRIX, None),
        (-3, MATRIX, "axis=-3 is out of bounds for an array of shape (2, 3)."),
        ((0, 2), MATRIX, "axis=(0, 2) is out of bounds for an array of shape (2, 3)."),
        ((0, -2), MATRIX, "axis=(0, -2) names an axis twice for an array of shape (2, 3). Name each axis once."),
    ],
)
def test_axes_that_do_not_fit(given, w, said):
    found = axes.why_axes_do_not_fit(given, w, "axis")
    assert found is None if said is None else found.startswith(said)


def test_a_formula_is_mapped_over_stacked_axes_as_near_as_each_value_has_them():
    w = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)

    def formula(values):
        return {"sum": values["w"].sum(keepdims=True) + values["g"], "w": values["w"], "g": values["g"]}

    values = {"w": jnp.asarray(w), "g": jnp.asarray(np.float32([[1, 2, 3, 4], [5, 6, 7, 8]]))}
    got = axes.map_stacked((0, 2), formula)(values)
    np.testing.assert_array_equal(got["sum"], w.sum(1, keepdims=True) + np.asarray(values["g"])[:, None])
    assert got["w"] is values["w"]
    assert axes.map_stacked((), formula) is formula
    with raises(
        ValueError,
        "expected values with stacked axes of equal sizes, but got sizes (2,) and (5,): another chain made this raw "
        "tree. Apply the chain that made it; `p.check(raw, like=params)` lists every difference.",
    ):
        axes.map_stacked((0,), formula)({"w": values["w"], "g": jnp.ones((5, 3))})
    with pytest.raises(ValueError, match=r"expected a value with the 2 stacked axes \(0, 2\), but got a value with 1"):
        axes.map_stacked((0, 2), formula)({"w": values["w"], "g": jnp.ones(2)})


def test_each_of_the_stacked_arrays_where_their_numbers_are_known():
    w = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(list(axes.each_stacked(w, (1,))), w.swapaxes(0, 1))
    assert list(axes.each_stacked(CUBE, (0, 2))) == [VECTOR]
    assert list(axes.each_stacked(np.zeros((0, 3), np.float32), (0,))) == [VECTOR]
    assert list(axes.each_stacked(CUBE, ())) == [CUBE]


# Roles ----------------------------------------------------------------------------------------------------------------

KERNEL = role_by_letters("wio", (3, 8, 16), "conv")
TABLE = role_by_letters("ro", (9, 4), "table")


def test_roles_by_letters():
    assert (KERNEL.inputs, KERNEL.outputs, KERNEL.stacked, KERNEL.shape) == ((0, 1), (2,), (), (3, 8, 16))
    assert KERNEL.uses == (Use((0, 1), (2,), (), "conv", PRODUCT, (0,)),)
    assert TABLE.uses == (Use((0,), (1,), (), "table", LOOKUP, ()),)
    assert role_by_letters("sv", (2, 3), "norm") == Role(
        stacked=(0,), why="it is a bias or a scale of norm", shape=(2, 3)
    )
    assert (TABLE.is_table, KERNEL.is_table, Role().is_table) == (True, False, False)


def test_words_stand_for_axes_from_the_back_without_stacked_ones():
    expected = {
        "inputs": (-3, -2),
        "outputs": (-1,),
        "stacked": (),
        "channels": (-2,),
        "uncut": (-3, -1),
        "vectors": (-3, -2),
    }
    assert axes_by_word(KERNEL, ()) == expected
    stack = KERNEL.follow([0, None, 1, 2], (3, 5, 8, 16), None, (1,))
    assert axes_by_word(stack, (1,)) == expected
    assert axes_by_word(stack, ())["stacked"] == (-3,)
    assert axes_by_word(TABLE, ())["vectors"] == (-1,)
    only_windows = role_by_letters("wwo", (3, 3, 4))
    assert axes_by_word(only_windows, ())["channels"] == (-2,)


@pytest.mark.parametrize(
    ("followed", "stacked", "expected"),
    [
        ([2, 1, 0], (), ((1, 2), (0,), ())),
        ([None, 0, 1, 2], (0,), ((1, 2), (3,), (0,))),
        ([0, 1, None], (), ((0, 1), (2,), ())),
        ([None, 2], (), ((0,), (1,), ())),
        ([None, None], (), ((), (), ())),
        ([None, 2], (0,), ((), (1,), (0,))),
    ],
)
def test_a_derived_array_has_the_roles_of_the_axes_that_it_follows(followed, stacked, expected):
    role = KERNEL.follow(followed, (2,) * len(followed), None, stacked)
    assert (role.inputs, role.outputs, role.stacked) == expected


def test_the_factor_of_a_table_without_its_rows_is_multiplied():
    assert [use.how for use in TABLE.follow([None, 1], (2, 4), None).uses] == [PRODUCT]
    assert [use.how for use in TABLE.follow([0, None], (9, 2), None).uses] == [LOOKUP]
    assert [use.windows for use in KERNEL.follow([1, 0, 2], (8, 3, 16), None).uses] == [(1,)]


def test_roles_that_contradict_each_other_or_are_unknown():
    tied = Role((0, 1), (0, 1), uses=(Use((0,), (1,), (), "here"), Use((1,), (0,), (), "there")), shape=(2, 3))
    assert tied.ambiguous == "inputs (0,) and outputs (1,) in here; inputs (1,) and outputs (0,) in there"
    assert KERNEL.ambiguous == ""
    assert Role(inputs=(1,), shape=(2, 3, 1, 5)).unknown() == (0, 3)


KNOWN = KnownAxes(role_by_letters("io", (8, 4), "dense"), "no reason", "dense", is_class=True)


def test_stacks_are_where_the_other_sizes_fit():
    shapes = (3, 8, 4), (8, 4), (5, 5), (8, 8, 4), (4,), (2, 3, 8, 4)
    found = [KNOWN.possible_stacks(shape) for shape in shapes]
    assert found == [[(0,)], [()], [], [(0,), (1,)], [], [(0, 1)]]
    assert KNOWN.possible_stacks((8, 8, 4), (1,)) == [(1,)]
    by_name = known_by_name("kernel")
    assert [by_name.possible_stacks(*given) for given in (((3, 8),), ((3, 8, 4),), ((3, 8, 4), (0,)))] == [
        [()],
        [],
        [(0,)],
    ]
    assert known_by_name("other").possible_stacks((3,)) == []
    assert KNOWN.role_of(CUBE).why == "no reason"
    bare = KnownAxes(KNOWN.role, source="dense", is_class=True)
    assert bare.role_of(jnp.zeros((8, 8, 4))).why == "its shape in dense is (8, 4), so the stacked axes may be 0 or 1"
    assert bare.role_of(CUBE).why == "its shape in dense is (8, 4)"
    role = bare.role_of(jnp.zeros((8, 3, 4)))
    assert (role.inputs, role.outputs, role.stacked) == ((0,), (2,), (1,))


def test_factors_have_the_inputs_or_the_outputs_and_a_rank():
    u, v = KNOWN.of_factor(("rows", "rank"), {"rank": 2}), KNOWN.of_factor(("rank", "columns"), {})
    assert (u.sizes, u.role.inputs, u.role.outputs, u.source, u.why, u.is_class) == (
        (8, 2),
        (0,),
        (1,),
        "a factor of dense",
        "no reason",
        True,
    )
    assert (v.sizes, v.role.inputs, v.role.outputs) == ((None, 4), (0,), (1,))
    unknown = KnownAxes(why="unknown", names=("a", "b")).of_factor(("rows", "rank"), {})
    assert unknown == KnownAxes(why="unknown")
    assert known_by_name("w").of_factor(("rows", "rank"), {}).source == "w"


@pytest.mark.parametrize(
    ("name", "vector", "table"),
    [
        ("bias", True, False),
        ("b", True, False),
        ("b1", True, False),
        ("b_1", True, False),
        ("bias_n", True, False),
        ("scale_2", True, False),
        ("ln_1", True, False),
        ("kernel", False, False),
        ("blob", False, False),
        ("biased", False, False),
        ("table", False, True),
        ("embedding", False, True),
    ],
)
def test_names_of_vectors_and_tables(name, vector, table):
    (leaf,) = describe_places([("b", name)])
    assert (is_bias_or_scale(leaf), is_table(leaf)) == (vector, table)


def test_values_of_vectors_are_vectors_too():
    g, v = describe_places([("b", "@weight_norm", "g"), ("b", "@weight_norm", "v")])
    assert is_bias_or_scale(g)
    assert is_bias_or_scale(v)
    (scale,) = describe_places([("w", "@quantized", "@fixed", "scale")])
    assert is_bias_or_scale(scale)


def test_a_selection_holds_for_all_below_its_paths_and_the_empty_one_for_all():
    chosen = selected({"a": True, "b": {"c": True, "d": False}})
    assert [chosen(path, None) for path in ("a", "a/x", "ab", "b/c", "b/d", "b")] == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    everything = selected(mask=True)
    assert everything("any/path", None)
