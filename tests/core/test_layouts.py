"""How the axes of an array, and of raw values, are merged to those of a matrix and split again."""

import jax
import numpy as np
import pytest

import reparax as rpx
from reparax.core.matrices import ARRAY, Layout, MatrixAxes, RowsAndColumns, merge_axes

MAIN, FIXED = rpx.stage.main, rpx.stage.fixed


def numbered(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


class Merged(RowsAndColumns):
    """Values of all axes, and one that is the array."""

    raw_values = {
        "u": MAIN(axes=("rows", "rank")),
        "v": MAIN(axes=("rank", "columns")),
        "s": MAIN(axes=("rank",)),
        "t": MAIN(axes=("columns", "rows")),
        "base": FIXED(base=True),
    }

    def apply_leaf(self, values):
        return values["u"] @ values["v"]


class Factors(RowsAndColumns):
    raw_values = {"u": MAIN(axes=("rows", "rank")), "v": MAIN(axes=("rank", "columns"))}

    def apply_leaf(self, values):
        return values["u"] @ values["v"]


class Square(RowsAndColumns):
    square = True
    raw_values = {"x": MAIN(axes=("rows", "rank")), "scale": MAIN()}

    def apply_leaf(self, values):
        return values["x"] @ values["x"].T


class Unnamed(RowsAndColumns):
    raw_values = {"x": MAIN()}

    def apply_leaf(self, values):
        return values["x"]


class PerRow(Unnamed):
    raw_values = {"x": MAIN(axes=("rows", "rank"))}


class PerBoth(Unnamed):
    raw_values = {"x": MAIN(axes=("rows", "columns"))}


class OfArray(Unnamed):
    raw_values = {"x": FIXED(base=True)}


class PerColumn(Unnamed):
    square = True
    raw_values = {"x": MAIN(axes=("rank", "columns"))}


# The array is (columns, rows, columns).
LAYOUT = Layout((1,), (0, 2), {"rows": (3,), "columns": (2, 5), "rank": (4,)})


@pytest.mark.parametrize(
    ("rows", "columns", "shape", "order"),
    [
        ((0,), (1,), (3, 4), (0, 1)),
        ((1,), (0,), (3, 4), (1, 0)),
        ((1,), (0, 2), (2, 3, 5), (1, 0, 2)),
        ((2, 0), (1,), (2, 3, 5), (2, 0, 1)),
        ((0, 1), (2, 3), (2, 3, 4, 5), (0, 1, 2, 3)),
        ((3, 1), (2, 0), (2, 3, 4, 5), (3, 1, 2, 0)),
    ],
)
def test_rows_come_first_and_are_split_into_the_axes_from_which_they_were_merged(rows, columns, shape, order):
    w = numbered(*shape)
    sizes = {name: tuple(shape[i] for i in axes) for name, axes in (("rows", rows), ("columns", columns))}
    merged = w.transpose(order).reshape(np.prod(sizes["rows"]), np.prod(sizes["columns"]))
    assert merge_axes(jax.ShapeDtypeStruct(shape, np.float16), rows, columns) == jax.ShapeDtypeStruct(
        merged.shape, np.float16
    )
    np.testing.assert_array_equal(merge_axes(w, rows, columns), merged)
    layout = Layout(rows, columns, sizes)
    np.testing.assert_array_equal(layout.merge(None, w), merged)
    np.testing.assert_array_equal(layout.split_array(merged), w)
    assert layout.merges_alike(None, ("rows", "columns")) is (order == tuple(sorted(order)))
    assert layout.merges_alike(("rows", "columns"), None) is (order == tuple(sorted(order)))
    assert (merge_axes(w, rows, columns) is w) is (order == (0, 1))


@pytest.mark.parametrize(
    ("axes", "shape", "merged"),
    [
        ((), (2, 3), (2, 3)),
        (("rows", "rank"), (3, 4), (3, 4)),
        (("rank", "columns"), (4, 2, 5), (4, 10)),
        (("columns",), (2, 5), (10,)),
        (("columns", "rows", "rank"), (2, 5, 3, 4), (10, 3, 4)),
    ],
)
def test_values_are_merged_and_split_by_the_axes_that_they_declare(axes, shape, merged):
    x = numbered(*shape)
    found = LAYOUT.merge(axes, x)
    np.testing.assert_array_equal(found, x.reshape(merged))
    np.testing.assert_array_equal(LAYOUT.split_value(axes, found), x)


def test_what_is_no_matrix_is_not_split_and_ranks_have_the_size_that_they_have():
    for x in (numbered(30), numbered(3, 10, 1), np.float32(2)):
        assert LAYOUT.split_array(x) is x
    assert LAYOUT.split_value(("rank", "columns"), numbered(7, 10)).shape == (7, 2, 5)
    assert LAYOUT.split_value((), x) is x
    square = Layout((0, 1), (3, 2), {"rows": (2, 3)})
    assert square.split_array(numbered(6, 6)).shape == (2, 3, 3, 2)
    np.testing.assert_array_equal(square.split_array(numbered(6, 6)), numbered(2, 3, 2, 3).transpose(0, 1, 3, 2))


@pytest.mark.parametrize(
    ("axes", "other", "alike"),
    [
        (("rows", "rank"), ("rows", "rank"), True),
        (None, None, True),
        (("rows", "columns"), ("columns", "rows"), False),
        (None, ("rows", "rank"), False),
        (None, (), False),
        (("rows", "columns"), ("rows",), False),
    ],
)
def test_values_of_equal_axes_merge_alike(axes, other, alike):
    assert Layout((0,), (1,), {}).merges_alike(axes, other) is alike


def test_sizes_of_values_are_kept_and_must_agree():
    layout = Layout((1,), (0, 2), {"columns": (2, 5)})
    assert [layout.count(axis) for axis in ("rows", "columns", "rank")] == [1, 2, 1]
    assert layout.sizes_of(("rank", "columns", "rows"), numbered(4, 2, 5, 3)) == [(4,), (2, 5), (3,)]
    assert layout.with_sizes_of("v", ("rank", "columns"), numbered(4, 2, 5)).sizes == {"columns": (2, 5), "rank": (4,)}
    for x, said in ((numbered(4, 5, 2), r"columns of sizes \(2, 5\), got \(5, 2\)"), (numbered(4, 10), "with 3 axes")):
        with pytest.raises(ValueError, match=said):
            layout.with_sizes_of("v", ("rank", "columns"), x)
    assert layout.sizes == {"columns": (2, 5)}


@pytest.mark.parametrize(
    ("stage", "values", "expected"),
    [
        (Merged(rows=1), {ARRAY: numbered(2, 3, 5)}, ((1,), (0, 2), {"rows": (3,), "columns": (2, 5)})),
        (
            Merged(rows=1),
            {"s": numbered(4), "base": numbered(2, 3, 5)},
            ((1,), (0, 2), {"rows": (3,), "columns": (2, 5), "rank": (4,)}),
        ),
        (
            Factors(),
            {"u": numbered(3, 4), "v": numbered(4, 5)},
            ((0,), (1,), {"rows": (3,), "rank": (4,), "columns": (5,)}),
        ),
        (
            Factors(rows=1),
            {"u": numbered(3, 4), "v": numbered(4, 2, 5)},
            ((1,), (0, 2), {"rows": (3,), "rank": (4,), "columns": (2, 5)}),
        ),
        (
            Factors(columns=-1),
            {"u": numbered(2, 3, 4), "v": numbered(4, 5)},
            ((0, 1), (2,), {"rows": (2, 3), "rank": (4,), "columns": (5,)}),
        ),
        (
            Factors(rows=(1, 0), columns=(3, 2)),
            {"u": numbered(2, 3, 4), "v": numbered(4, 5, 6)},
            ((1, 0), (3, 2), {"rows": (2, 3), "rank": (4,), "columns": (5, 6)}),
        ),
        (
            Square(columns=(1, 3)),
            {"x": numbered(2, 3, 4), "scale": numbered(9)},
            ((0, 2), (1, 3), {"rows": (2, 3), "rank": (4,)}),
        ),
        (Square(rows=(2, 3)), {"x": numbered(2, 3, 4)}, ((2, 3), (0, 1), {"rows": (2, 3), "rank": (4,)})),
        (PerBoth(rows=(2, 0)), {"x": numbered(4, 2, 3, 5)}, ((2, 0), (1, 3), {"rows": (4, 2), "columns": (3, 5)})),
        (Square(), {"x": numbered(6, 4)}, ((0,), (1,), {"rows": (6,), "rank": (4,)})),
    ],
    ids=str,
)
def test_the_layout_is_that_of_the_array_or_of_its_values(stage, values, expected):
    layout = stage._layout(values)
    assert (layout.rows, layout.columns, layout.sizes) == expected


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        ({}, (3, 4), ((0,), (1,))),
        ({"columns": 0}, (3, 4), ((1,), (0,))),
        ({"rows": -1}, (3, 4, 5), ((2,), (0, 1))),
        ({"columns": (-1, 0)}, (3, 4, 5), ((1,), (2, 0))),
        ({"rows": (2, 0), "columns": 1}, (3, 4, 5), ((2, 0), (1,))),
        ({}, (3, 4, 5), "expected a matrix"),
        ({}, (3,), "expected an array of two or more dimensions"),
        ({"rows": 0}, (), "expected an array of two or more dimensions"),
        ({"rows": (0, 1)}, (3, 4), "expected each axis"),
        ({"columns": (0, 1, 2)}, (3, 4, 5), "expected each axis"),
        ({"rows": 0, "columns": 0}, (3, 4), "expected each axis"),
        ({"rows": 0, "columns": -2}, (3, 4), "expected each axis"),
        ({"rows": 0, "columns": 1}, (3, 4, 5), "expected each axis"),
        ({"rows": 0, "columns": 2}, (3, 4), "expected each axis"),
        ({"rows": ()}, (3, 4), "expected each axis"),
        ({"rows": (0, 1), "columns": ()}, (3, 4), "expected each axis"),
        ({"columns": -3}, (3, 4), "expected each axis"),
    ],
    ids=str,
)
def test_each_axis_is_a_row_or_a_column(axes, shape, expected):
    stage = Factors(**axes)
    found = MatrixAxes._matrix_error(stage, numbered(*shape))
    if isinstance(expected, str):
        assert expected in found
    else:
        assert found is None
        assert stage.axes_of(len(shape)) == expected
        assert stage.axes_in_use(numbered(*shape)) == {"columns": (tuple(sorted(expected[1])), "outputs")}


@pytest.mark.parametrize(
    ("stage", "is_taken"),
    [
        (Unnamed(columns=0), (True, False)),
        (Factors(columns=0), (True, True)),
        (Merged(columns=0), (True, True)),
        (Square(columns=0), (True, True)),
        (OfArray(columns=0), (True, True)),
        (PerBoth(columns=0), (True, True)),
        (PerRow(columns=0), (True, False)),
        (PerColumn(columns=0), (True, False)),
    ],
    ids=str,
)
def test_axes_are_merged_only_if_values_tell_their_sizes(stage, is_taken):
    for w, taken in zip((numbered(3, 4), numbered(3, 4, 5)), is_taken, strict=True):
        assert (stage._matrix_error(w) is None) is taken


def test_columns_are_the_outputs_of_a_network_unless_rows_are_given():
    assert Factors().by_roles == {"columns": "outputs"}
    assert Factors(rows=0).by_roles == {}
    stage = Factors(where="w")
    assert stage._for_merged is stage
    assert Factors(rows=0, where="w")._for_merged == Factors(columns=1, where="w")._for_merged == stage


def test_a_formula_gets_matrices_and_gives_back_what_it_got_as_the_same_object():
    stage, w = Merged(rows=1), numbered(2, 3, 5)
    raw = {"u": numbered(3, 4), "v": numbered(4, 2, 5), "base": w}
    seen = []

    def formula(values, *more):
        seen.extend([jax.tree.map(np.shape, values), more])
        return dict(values) if isinstance(values, dict) else {"base": values, "v": values[:1], "t": values.T}

    again = stage._on_merged(formula)(raw, 1, 2)
    assert all(again[name] is x for name, x in raw.items())
    assert seen[:2] == [{"u": (3, 4), "v": (4, 10), "base": (3, 10)}, (1, 2)]
    start = stage._on_merged(formula)(w)
    assert start["base"] is w
    assert {name: x.shape for name, x in start.items()} == {"base": (2, 3, 5), "v": (1, 2, 5), "t": (2, 5, 3)}
    assert seen[2:] == [(3, 10), ()]
    assert stage._on_merged(lambda values: 1.5)(raw) == 1.5
    number = np.float32(2)
    assert stage._on_merged(lambda values: number)(raw) is number
    np.testing.assert_array_equal(stage._on_merged(lambda values: 2 * values["base"])(raw), 2 * w)
    for wrong in (numbered(3), numbered(3, 10, 1)):
        with pytest.raises(ValueError, match="expected raw values of a matrix"):
            stage._on_merged(lambda values, wrong=wrong: wrong)(raw)
    assert stage._on_merged(lambda w: numbered(3))(w).shape == (3,)
