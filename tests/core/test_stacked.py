"""Stacked arrays, such as layers under a scan, and arrays of several rows and columns."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PATTERNS
from compiled import contained, effective, fold, init
from errors import table
from one_array import normal

import reparax as rpx
from reparax.core.matrices import Layout, MatrixAxes, RowsAndColumns, merge_axes

COUNT = 3


def slices(shape=(4, 4)):
    return normal(COUNT, *shape, seed=5)


STAGES = [
    rpx.WeightNorm(),
    rpx.WeightNorm(axis=0),
    rpx.WeightNorm(axis=None),
    rpx.norms.WeightStandardization(),
    rpx.norms.MaxNorm(1.0),
    rpx.norms.Sphere(),
    rpx.norms.PoincareBall(),
    rpx.numbers.Simplex(along=-1, outside="unchecked"),
    rpx.sparse.NByM(2, 4),
    rpx.MagnitudePruning(0.5),
    rpx.MagnitudePruning(0.5, axis=-1),
    rpx.Mask(),
    rpx.LowRank(2),
    rpx.matrices.Kronecker((2, 1)),
    rpx.matrices.BlockDiagonal(2),
    rpx.matrices.FixedRank(2),
    rpx.matrices.Invertible(),
    rpx.matrices.SpecialLinear(),
    rpx.matrices.AlmostOrthogonal(),
    rpx.Orthogonal(),
    rpx.Orthogonal("householder"),
    rpx.matrices.SpecialOrthogonal(),
    *PATTERNS,
    rpx.matrices.PositiveDefinite(),
    rpx.matrices.PositiveSemidefinite(2),
    rpx.numbers.Scale(2.0),
    rpx.Freeze(),
]

DRAWN = [rpx.SpectralNorm(), rpx.sparse.RandomPruning(0.5), rpx.sparse.RandomPruning(0.5, axis=-1)]


def stacked(stage, axes):
    return dataclasses.replace(stage, stacked=axes)


def restacked(trees, axis):
    """Values of several trees, stacked along an axis or the last one that they can have."""
    return jax.tree.map(lambda *xs: jnp.stack(xs, min(axis, xs[0].ndim)), *trees)


def assert_close(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "axis"), [*zip(STAGES, itertools.cycle([2, 1]))], ids=repr)
def test_a_stack_of_three_is_three_arrays(stage, axis):
    one, many = rpx.Chain((stage,)), rpx.Chain((stacked(stage, axis),))

    def ways(ws):
        raws, raw = [one.init({"w": w}) for w in ws], many.init({"w": jnp.moveaxis(ws, 0, axis)})
        yield raw, raws
        yield many.fold(raw), [one.fold(x) for x in raws]
        moved = jax.tree.map(lambda x: x + 0.01 * jnp.cos(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, raws)
        again = restacked(moved, axis)
        for method in ("fold", "update", "update_base"):
            yield getattr(many, method)(again), [getattr(one, method)(x) for x in moved]

    for got, each in jax.jit(lambda ws: list(ways(ws)))(slices()):
        assert_close(got, restacked(each, axis))


class Rows(rpx.Reparametrization):
    """A matrix as the sums of its rows, and what they leave: values of two numbers of axes."""

    raw_values = {"sum": rpx.stage.main(), "rest": rpx.stage.main()}

    def init_leaf(self, w):
        return {"sum": w.sum(-1), "rest": w - w.mean(-1, keepdims=True)}

    def apply_leaf(self, values):
        return values["rest"] + values["sum"][:, None] / values["rest"].shape[-1]


@pytest.mark.parametrize(("axes", "shape"), [((2, 3), (4, 2, 3)), ((0, 3), (2, 4, 3)), ((1, 2), (4, 2, 3))])
def test_a_value_of_fewer_axes_has_its_stacked_axes_as_near_as_it_can(axes, shape):
    w = np.moveaxis(normal(2, 3, 4, 5), (0, 1), axes)
    raw = Rows(stacked=axes).init({"w": w})
    assert raw["w"]["@rows"]["sum"].shape == shape
    np.testing.assert_allclose(Rows(stacked=axes).fold(raw)["w"], w, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", DRAWN, ids=repr)
def test_the_start_of_each_stacked_array_is_drawn_by_itself(stage):
    many = stacked(stage, 0)
    w = np.broadcast_to(slices((64, 48))[0], (COUNT, 64, 48))
    raw = init(many, {"w": w}, jax.random.key(3))
    assert jax.tree.map(lambda x: x.shape[0], raw) == jax.tree.map(lambda x: COUNT, raw)
    if stage == rpx.SpectralNorm():
        for matrix in np.asarray(jax.jit(lambda raw: many.fold(many.update(raw)))(raw)["w"]):
            np.testing.assert_allclose(np.linalg.norm(matrix, 2), 1.0, rtol=0.05)
    else:
        masks = np.asarray(jax.tree.leaves(raw["w"][f"@{stage.kind}"]["@fixed"])[0]).reshape(COUNT, -1)
        assert len({mask.tobytes() for mask in masks}) == COUNT
        assert {mask.sum() for mask in masks} == {masks.shape[1] / 2}


def test_power_iteration_of_stacked_matrices_is_that_of_each():
    stage, ws = rpx.SpectralNorm(n_steps=3), slices((5, 4))
    raw = jax.tree.map(np.asarray, init(stacked(stage, 0), {"w": ws}))
    each = [jax.jit(stage.update)(jax.tree.map(lambda x, i=i: x[i], raw)) for i in range(COUNT)]
    assert_close(jax.jit(stacked(stage, 0).update)(raw), jax.tree.map(lambda *xs: np.stack(xs), *each))


@pytest.mark.parametrize("broadcast", [(), 0, -1], ids=repr)
def test_masks_of_stacked_arrays_are_independent(broadcast):
    p = rpx.WeightDropout(0.5, broadcast_dims=broadcast, stacked=1)
    w = effective(p, {"w": np.ones((40, COUNT, 50), np.float32)}, jax.random.key(1))["w"]
    kept = np.moveaxis(np.asarray(w) != 0, 1, 0)
    if broadcast != ():
        assert (kept == np.take(kept, [0], axis=broadcast if broadcast < 0 else broadcast + 1)).all()
        kept = np.take(kept, 0, axis=broadcast if broadcast < 0 else broadcast + 1)
    assert len({mask.tobytes() for mask in kept}) == COUNT
    assert abs(kept.mean() - 0.5) < 5 * np.sqrt(0.25 / kept.size)


@pytest.mark.thorough
def test_neighbours_with_the_same_stacked_axes_draw_once_and_with_others_twice():
    w, key = {"w": np.ones((COUNT, 40, 50), np.float32)}, jax.random.key(1)
    one, other = (rpx.WeightDropout(0.5, broadcast_dims=-1, stacked=axes) for axes in (0, ()))
    alike = rpx.WeightDropout(0.75, broadcast_dims=-1, stacked=0)
    np.testing.assert_allclose(effective(one >> one, w, key)["w"], effective(alike, w, key)["w"], rtol=1e-5, atol=1e-6)
    kept = np.asarray(effective(one >> other, w, key)["w"]) != 0
    assert len(np.unique(kept.mean(-1))) == 2  # whole rows
    assert abs(kept.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / (COUNT * 40))


class Rowwise(rpx.Perturbation):
    """One number for all of an array, drawn by a third party."""

    def apply_leaf(self, w, key):
        return w + jax.random.normal(key, (), w.dtype)


def test_a_third_partys_noise_gets_a_key_for_each_stacked_array():
    w = effective(Rowwise(stacked=0), {"w": np.zeros((COUNT, 2, 2), np.float32)}, jax.random.key(0))["w"]
    assert len(np.unique(w)) == COUNT
    assert all(len(np.unique(x)) == 1 for x in np.asarray(w))


class Repeated(rpx.Reparametrization):
    """Every second row, twice, with one number for all of an array."""

    stochastic = True

    def init_leaf(self, w):
        return {"more": jnp.zeros(()), "x": w[::2]}

    def mean_leaf(self, values):
        return jnp.repeat(values["x"], 2, 0) + values["more"]

    def apply_leaf(self, values, key):
        return self.mean_leaf(values) + jax.random.uniform(key)


class Centred(rpx.Perturbation):
    """The mean of all of an array is taken away from it, with a key or without."""

    def apply_leaf(self, w, key):
        return self.mean_leaf(w)

    def mean_leaf(self, w):
        return w - w.mean()


class CentredWithoutDraws(Centred):
    stochastic = False

    def apply_leaf(self, w, key):
        return Centred.mean_leaf(self, w)

    def mean_leaf(self, w):
        raise AssertionError


def test_means_and_draws_of_stacked_arrays_are_those_of_each(key):
    w = np.arange(8, dtype=np.float32).reshape(4, 2)
    raw = {"w": {f"@{Repeated.kind}": {"more": np.zeros(3, np.float32), "x": np.zeros((2, 3), np.float32)}}}

    @jax.jit
    def of_each(key):
        stages = Centred(stacked=1), CentredWithoutDraws(stacked=1)
        trees = [tree for p in stages for tree in (p.apply({"w": w}, key), p.fold({"w": w}))]
        return [tree["w"] for tree in trees], Repeated(stacked=1).apply(raw, key)["w"]

    centred, drawn = of_each(key)
    for each in centred:
        np.testing.assert_array_equal(each, w - w.mean(0))
    assert len(np.unique(drawn)) == 3
    assert np.all(np.equal(drawn, drawn[:1]))


def test_several_stacked_axes():
    ws = normal(2, 4, 3, 5, seed=1)  # (stack, in, stack, out)
    raw = init(rpx.WeightNorm(stacked=(0, 2)), {"w": ws})
    np.testing.assert_allclose(raw["w"]["@weight_norm"]["g"], np.linalg.norm(ws, axis=1, keepdims=True), rtol=1e-6)
    u = jax.eval_shape(rpx.LowRank(2, stacked=(0, 2)).init, {"w": ws})["w"]["@low_rank"]
    assert jax.tree.map(jnp.shape, u) == {"u": (2, 4, 3, 2), "v": (2, 2, 3, 5)}


def test_defaults_count_the_axes_of_one_array():
    params = {"layers": {"kernel": slices((4, 5)), "shift": slices((5,))}}
    raw = jax.eval_shape(rpx.WeightNorm(stacked=0).init, params)
    assert jax.tree.map(jnp.shape, raw["layers"]["shift"]) == (3, 5)
    assert jax.tree.map(jnp.shape, raw["layers"]["kernel"]) == {"@weight_norm": {"g": (3, 1, 5), "v": (3, 4, 5)}}


def test_gradients_and_jit_of_stacked_arrays():
    p, ws = rpx.WeightNorm(stacked=0), slices()
    raw = init(p, {"w": ws})

    def loss(raw):
        return jnp.sum(jnp.sin(p.apply(raw)["w"]))

    one = rpx.WeightNorm()
    got = jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(raw))
    slope_of_one = jax.jit(lambda w: jax.grad(lambda raw: jnp.sum(jnp.sin(one.apply(raw)["w"])))(one.init({"w": w})))
    for i in range(COUNT):
        assert_close({"w": jax.tree.map(lambda x, i=i: x[i], got["w"])}, slope_of_one(ws[i]))


# ---- rows and columns

KERNEL = normal(6, 2, 3, seed=9)  # (embed, heads, dim)


@pytest.mark.parametrize(
    ("stage", "shapes"),
    [
        pytest.param(rpx.LowRank(2, rows=0, columns=(1, 2)), {"u": (6, 2), "v": (2, 2, 3)}, marks=pytest.mark.thorough),
        pytest.param(rpx.LowRank(2, rows=0), {"u": (6, 2), "v": (2, 2, 3)}, marks=pytest.mark.thorough),
        pytest.param(rpx.LowRank(2, columns=(1, 2)), {"u": (6, 2), "v": (2, 2, 3)}, marks=pytest.mark.thorough),
        (rpx.LowRank(2, rows=(-2, -1)), {"u": (2, 3, 2), "v": (2, 6)}),
        pytest.param(
            rpx.Orthogonal(rows=0), {"x": (6, 2, 3), "@fixed": {"base": (6, 2, 3)}}, marks=pytest.mark.thorough
        ),
        (rpx.Orthogonal(columns=0), {"x": (2, 3, 6), "@fixed": {"base": (2, 3, 6)}}),
        (
            rpx.matrices.FixedRank(2, rows=0),
            {"u": (6, 2), "v": (2, 3, 2), "s": (2,), "@fixed": {"base_u": (6, 2), "base_v": (2, 3, 2)}},
        ),
    ],
    ids=repr,
)
def test_rows_and_columns_of_a_kernel_are_those_of_the_matrix(stage, shapes):
    plain = dataclasses.replace(stage, rows=None, columns=None)

    @jax.jit
    def of_kernel_and_matrix(kernel, matrix):
        raw = stage.init({"w": kernel})
        return raw, stage.fold(raw)["w"], stage.project(kernel), plain.fold(plain.init({"w": matrix}))["w"]

    rows_last = stage.columns == 0 or stage.rows == (-2, -1)
    raw, *got, want = of_kernel_and_matrix(KERNEL, KERNEL.reshape(6, 6).T if rows_last else KERNEL.reshape(6, 6))
    assert jax.tree.map(jnp.shape, raw["w"][f"@{stage.kind}"]) == shapes
    want = (np.asarray(want).T if rows_last else np.asarray(want)).reshape(6, 2, 3)
    for each in got:
        np.testing.assert_allclose(each, want, rtol=1e-4, atol=1e-5)
    assert bool(jax.jit(functools.partial(stage.contains, tolerance=1e-4))(want))
    assert jax.eval_shape(lambda key: stage.sample(key, (6, 2, 3)), jax.random.key(0)).shape == (6, 2, 3)


def test_rows_and_columns_of_stacked_kernels():
    kernels = np.stack([KERNEL, 2 * KERNEL], 1)  # (embed, layers, heads, dim)
    p = rpx.LowRank(2, rows=0, columns=(1, 2), stacked=1)
    one = rpx.LowRank(2, rows=0, columns=(1, 2))
    want = np.stack([fold(one, init(one, {"w": w}))["w"] for w in (KERNEL, 2 * KERNEL)], 1)
    np.testing.assert_allclose(fold(p, init(p, {"w": kernels}))["w"], want, rtol=1e-4, atol=1e-5)


def test_a_square_matrix_may_have_several_rows_and_columns():
    w = normal(2, 3, 2, 3, seed=2)
    p = rpx.matrices.PositiveSemidefinite(rows=(0, 1), columns=(2, 3))
    raw = init(p, {"w": w})
    assert raw["w"]["@positive_semidefinite"]["x"].shape == (2, 3, 6)
    assert np.linalg.eigvalsh(np.asarray(fold(p, raw)["w"]).reshape(6, 6)).min() > -1e-5


def test_columns_before_rows():
    w = np.tril(normal(4, 4, seed=1))
    assert bool(contained(rpx.matrices.Triangular(), w))
    assert bool(contained(rpx.matrices.Triangular(rows=1, columns=0), w.T))
    assert not bool(contained(rpx.matrices.Triangular(rows=1, columns=0), w))


def test_axes_are_merged_and_split_as_a_layout_says():
    layout = Layout((0,), (1, 2), {"rows": (8,), "columns": (3, 4)})
    w, v = np.arange(96).reshape(8, 3, 4), np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(layout.merge(None, w), w.reshape(8, 12))
    np.testing.assert_array_equal(layout.split_array(w.reshape(8, 12)), w)
    np.testing.assert_array_equal(layout.merge(("rank", "columns"), v), v.reshape(2, 12))
    np.testing.assert_array_equal(layout.split_value(("rank", "columns"), v.reshape(2, 12)), v)
    assert layout.merge((), v) is v
    for unsplit in (w[0, 0, 0], v[0, 0], w[:, 0], v):
        assert layout.split_value((), unsplit) is unsplit
        assert unsplit.ndim == 2 or layout.split_array(unsplit) is unsplit
    assert layout.split_value(("rank", "columns"), np.zeros(2)).shape == (2,)
    of_rank = layout.with_sizes_of("v", ("rank", "columns"), v)
    assert (of_rank.sizes, list(layout.sizes)) == ({**layout.sizes, "rank": (2,)}, ["rows", "columns"])
    assert of_rank.split_value(("rank", "rows"), np.zeros((5, 8))).shape == (5, 8)
    assert layout.sizes_of(("rank", "columns"), v) == [(2,), (3, 4)]
    turned = Layout((2,), (0, 1), {"rows": (4,), "columns": (8, 3)})
    np.testing.assert_array_equal(turned.merge(None, w), np.moveaxis(w, 2, 0).reshape(4, 24))
    np.testing.assert_array_equal(turned.split_array(turned.merge(None, w)), w)
    assert turned.sizes_of(("columns", "rank", "rows"), np.zeros((8, 3, 5, 4))) == [(8, 3), (5,), (4,)]
    assert [turned.count(axis) for axis in ("rows", "columns", "rank")] == [1, 2, 1]
    transposed = Layout((1,), (0,), {"rows": (4,), "columns": (3,)})
    np.testing.assert_array_equal(transposed.merge(None, v[0]), v[0].T)
    np.testing.assert_array_equal(transposed.split_array(v[0].T), v[0])
    assert merge_axes(jax.ShapeDtypeStruct((8, 3, 4), jnp.int8), (0, 2), (1,)) == jax.ShapeDtypeStruct(
        (32, 3), jnp.int8
    )
    square = Layout((0, 1), (2, 3), {"rows": (2, 3)})
    assert square.split_array(np.zeros((6, 6))).shape == (2, 3, 2, 3)
    both = ("rows", "columns")
    alike = [x.merges_alike(*axes) for x in (layout, turned) for axes in ((None, both), (both, None), (both, both))]
    assert alike == [True, True, True, False, False, True]
    assert not layout.merges_alike(None, ("rows", "rank"))


class OfRows(RowsAndColumns):
    """A value that has rows alone."""

    raw_values = {"x": rpx.stage.main(axes=("rows",))}
    starts_elsewhere = True

    def init_leaf(self, w):
        return {"x": w[:, 0]}

    def apply_leaf(self, values):
        return values["x"][:, None] + jnp.zeros((1, self.width))

    width = 6


class OfColumns(OfRows):
    """A value that has columns alone."""

    raw_values = {"x": rpx.stage.main(axes=("columns",))}


class OfEntries(OfRows):
    """A value that has both."""

    raw_values = {"m": rpx.stage.main(axes=("rows", "columns"))}


class OfBoth(OfRows):
    """A value that has rows alone, beside the array itself."""

    raw_values = {"x": rpx.stage.main(axes=("rows",)), "base": rpx.stage.fixed(base=True)}

    def init_leaf(self, w):
        return {"x": w[:, 0], "base": w}

    def apply_leaf(self, values):
        return values["x"][:, None] + 0 * values["base"]


@pytest.mark.parametrize(
    ("rows", "columns", "ndim", "covered", "axes"),
    [
        (None, None, 2, True, ((0,), (1,))),
        (0, None, 3, True, ((0,), (1, 2))),
        (None, (2, -3), 3, True, ((1,), (2, 0))),
        ((-1, 0), None, 3, True, ((2, 0), (1,))),
        ((2, 0), -2, 3, True, ((2, 0), (1,))),
        ((2, 0), 1, 4, False, None),
        ((0, 1, 2), None, 3, False, None),
        (None, (-3, -2, -1), 3, False, None),
        ((), None, 3, False, None),
        ((0, 1), (2, -3), 3, False, None),
        (0, 3, 2, False, None),
        (-3, 0, 2, False, None),
    ],
)
def test_rows_and_columns_stand_for_all_axes_in_their_order(rows, columns, ndim, covered, axes):
    p = OfRows(rows=rows, columns=columns)
    assert (p._covers_axes(ndim), p._for_merged) == (covered, OfRows())
    assert (MatrixAxes._matrix_error(p, np.ones((2,) * ndim)) is None) == covered
    if axes is not None:
        assert p.axes_of(ndim) == axes
        assert p.axes_in_use(np.ones((2,) * ndim)) == {"columns": (tuple(sorted(axes[1])), "outputs")}


ARRAY, LOW_RANK = {"": np.ones((2, 3, 4))}, {"u": np.ones((4, 2, 5)), "v": np.ones((5, 3))}
SEMIDEFINITE = rpx.matrices.PositiveSemidefinite


@pytest.mark.parametrize(
    ("p", "values", "layout"),
    [
        (rpx.LowRank(5, rows=(2, 0)), ARRAY, ((2, 0), (1,), {"rows": (4, 2), "columns": (3,)})),
        (rpx.LowRank(5, rows=(2, 0)), LOW_RANK, ((2, 0), (1,), {"rows": (4, 2), "rank": (5,), "columns": (3,)})),
        (rpx.LowRank(5, columns=1), LOW_RANK, ((0, 2), (1,), {"rows": (4, 2), "rank": (5,), "columns": (3,)})),
        (
            rpx.LowRank(5, columns=-2, rows=(0, -1)),
            {"v": LOW_RANK["v"]},
            ((0, 2), (1,), {"rank": (5,), "columns": (3,)}),
        ),
        (rpx.LowRank(5), {"v": LOW_RANK["v"]}, ((0,), (1,), {"rank": (5,), "columns": (3,)})),
        (
            rpx.LowRank(5, columns=(2, 0)),
            {"v": np.ones((5, 4, 2))},
            ((1, 3), (2, 0), {"rank": (5,), "columns": (4, 2)}),
        ),
        (SEMIDEFINITE(4, columns=(3, 0)), {"x": np.ones((2, 3, 4))}, ((1, 2), (3, 0), {"rows": (2, 3), "rank": (4,)})),
        (SEMIDEFINITE(4, rows=(3, 0)), {"x": np.ones((2, 3, 4))}, ((3, 0), (1, 2), {"rows": (2, 3), "rank": (4,)})),
        (OfEntries(rows=(2, 0)), {"m": np.ones((2, 3, 4))}, ((2, 0), (1,), {"rows": (2, 3), "columns": (4,)})),
        (OfEntries(rows=1), {"m": np.ones((2, 3, 4))}, ((1,), (0, 2), {"rows": (2,), "columns": (3, 4)})),
        (OfEntries(columns=1), {"m": np.ones((2, 3, 4))}, ((0, 2), (1,), {"rows": (2, 3), "columns": (4,)})),
    ],
    ids=repr,
)
def test_axes_of_an_array_are_counted_in_its_values(p, values, layout):
    assert p._layout(values) == Layout(*layout)


def test_what_is_no_matrix_needs_to_be_told_its_columns():
    texts = [OfRows(**axes)._axes_error(KERNEL) for axes in ({}, {"rows": 0, "columns": 1}, {"columns": 3})]
    starts = "expected a matrix, got", "expected each axis of shape", "columns=3 is out of bounds"
    assert all(map(str.startswith, texts, starts)), texts
    assert OfRows()._axes_error(KERNEL[0]) is None


def test_a_formula_takes_merged_axes_and_gives_those_of_the_array():
    p, w = OfEntries(rows=(2, 0)), np.arange(24).reshape(2, 3, 4)
    m = w.transpose(2, 0, 1)
    merged = m.reshape(8, 3)
    np.testing.assert_array_equal(p._on_merged(lambda x: {"m": x + 1})(w)["m"], m + 1)
    np.testing.assert_array_equal(p._on_merged(lambda x, more, last: x + more - last)(w, 3, 1), w + 2)
    np.testing.assert_array_equal(p._on_merged(lambda values, more: values["m"] + more)({"m": m}, 3), w + 3)
    np.testing.assert_array_equal(p._on_merged(lambda x: x.sum(1))(w), merged.sum(1))
    assert p._on_merged(lambda values: {"m": values["m"]})({"m": m})["m"] is m
    assert p._on_merged(lambda x: x)(w) is w
    numbers = [p._on_merged(formula)({"m": m}) for formula in (lambda values: 1.5, lambda values: values["m"].sum())]
    assert numbers == [1.5, w.sum()]


def test_the_sizes_of_several_columns_come_from_a_value_that_has_them():
    raw = OfBoth(rows=0).init({"w": KERNEL})
    np.testing.assert_array_equal(OfBoth(rows=0).apply(raw)["w"], np.broadcast_to(KERNEL[:, :1, :1], KERNEL.shape))
    matrix = {"w": KERNEL.reshape(6, 6)}
    np.testing.assert_array_equal(OfRows().apply(OfRows().init(matrix))["w"], np.repeat(matrix["w"][:, :1], 6, 1))


class Doubled(RowsAndColumns):
    """A square matrix whose value does not tell how many axes are rows."""

    raw_values = {"x": rpx.stage.main(axes=("rows", "rows"))}
    square = True

    def init_leaf(self, w):
        return {"x": 0.5 * w}

    def apply_leaf(self, values):
        return 2 * values["x"]


@pytest.mark.parametrize("axes", [{"columns": (2, 3)}, {"rows": (0, 1)}], ids=repr)
def test_a_square_matrix_has_as_many_rows_as_columns(axes):
    w, p = normal(2, 3, 2, 3), Doubled(**axes)
    np.testing.assert_allclose(p.apply(p.init({"w": w}))["w"], w, rtol=1e-6)


# ---- errors


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
