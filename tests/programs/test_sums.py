"""Sums of products hold the numbers of the same operation on their arrays."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from products import PRODUCTS, array_of, product, whole

from reparax.programs import sums
from reparax.programs.equations import view_of
from reparax.programs.sums import Circulant, Factor, Label, Product, Segments

LOW_RANK, DIAGONAL, REPEATED, MERGED, ROW, NUMBER, ROTATED, IN_GROUPS = PRODUCTS.values()
OUTER = product("i j", ("i", whole(4)), ("j", whole(4, seed=1)))
EQUAL = {
    "an outer product": OUTER,
    "merged": product("ij k", ("ij", whole(2, 3)), ("k", whole(6))),
    "a diagonal": DIAGONAL,
    "one array": product("i j", ("ij", whole(4, 4))),
    "other labels": product("ij kl", ("ij", whole(2, 3)), ("kl", whole(3, 2))),
    "one label twice": product("ij ji", ("i", whole(2)), ("j", whole(2))),
}


@pytest.mark.parametrize("name", EQUAL)
def test_entries_of_equal_indices_are_on_a_diagonal(name):
    found = EQUAL[name].where_equal([(0, 1)])
    if name in ("one array", "other labels", "one label twice"):
        assert found is None
    else:
        np.testing.assert_array_equal(array_of(found), np.diag(np.diag(array_of(EQUAL[name]))))


def test_entries_on_a_diagonal_are_multiplied_by_those_of_merged_rows():
    diagonal = product("i i", ("i", whole(6)))
    found = sums.multiply_entries(diagonal, EQUAL["merged"])
    np.testing.assert_array_equal(array_of(found), array_of(diagonal) * array_of(EQUAL["merged"]))


def test_sizes_that_are_not_known_are_not_split():
    n, m = jax.export.symbolic_shape("n, m")
    p = Product.of(jax.ShapeDtypeStruct((n, m, 4), np.float32), fixed=True)
    assert [axes[0].size for axes in p.reshape((n, m, 4)).axes] == [n, m, 4]
    assert p.reshape((n, m, 2, 2)) is None
    assert p.reshape((m, n, 4)) is None
    assert sums.count_entries([n, 3]) == 3 * sums.UNKNOWN
    assert p.factors[0].size == 4 * sums.UNKNOWN**2


def test_a_sum_multiplies_by_ones_only_along_axes_that_no_factor_has():
    for p, axis, n_factors in [(LOW_RANK, 0, 2), (REPEATED, 0, 1), (REPEATED, 1, 2), (DIAGONAL, 0, 2)]:
        found = p.sum([axis])
        np.testing.assert_array_equal(array_of(found), array_of(p).sum(axis))
        assert [factor.fixed for factor in found.factors] == [i >= len(p.factors) for i in range(n_factors)]
    integers = product("i o", ("i", whole(6).astype(np.int8))).sum([1])
    assert [factor.array.dtype for factor in integers.factors] == [np.int8] * 2


def test_sizes_of_zero_are_not_split():
    empty = Product.of(np.zeros((0, 3), np.float32), fixed=True)
    assert [empty.reshape(shape) for shape in [(0, 3), (3, 0), (0, 1, 3)]] == [None] * 3


def test_products_are_not_contracted_along_an_axis_that_no_factor_has():
    numbers = (((1,), (1,)), ((), ()))
    (eqn,) = jax.make_jaxpr(lambda a: lax.dot_general(a, a, numbers))(whole(6, 5)).eqns
    assert sums.contract(view_of(eqn), REPEATED, REPEATED) is None
    of_data = sums.contract(view_of(eqn), REPEATED, Product.of(whole(6, 5), fixed=False))
    np.testing.assert_array_equal(array_of(of_data), array_of(REPEATED) @ whole(6, 5).T)
    (eqn,) = jax.make_jaxpr(lambda a: lax.dot_general(a, a, (((0,), (0,)), ((), ()))))(whole(6, 5)).eqns
    squares = sums.contract(view_of(eqn), REPEATED, REPEATED)  # whose axes are not one
    np.testing.assert_array_equal(array_of(squares), array_of(REPEATED).T @ array_of(REPEATED))


@pytest.mark.parametrize("operand", [0, 1])
def test_data_meet_each_of_several_weights(operand):
    x = whole(6, 3, seed=4)
    operands, numbers = [x, array_of(LOW_RANK)][:: 2 * operand - 1], (((0,), (0,)), ((), ()))
    (eqn,) = jax.make_jaxpr(lambda a, b: lax.dot_general(a, b, numbers))(*operands).eqns
    found = sums.contract_with_data(view_of(eqn), operand, [x], [LOW_RANK, MERGED])
    for got, w in zip(found, (LOW_RANK, MERGED), strict=True):
        np.testing.assert_array_equal(array_of(got), x.T @ array_of(w) if operand else array_of(w).T @ x)
    assert not found[0].factors[operand - 1].fixed
    both = (((0, 1), (0, 1)), ((), ()))
    (eqn,) = jax.make_jaxpr(lambda a: lax.dot_general(a, a, both))(whole(4, 4)).eqns
    found = [sums.contract_with_data(view_of(eqn), operand, [whole(4, 4)], w) for w in ([OUTER], [OUTER, DIAGONAL])]
    assert [each is None for each in found] == [False, True]  # as data have no diagonal


GROUPS = {  # shapes and sizes, dimension numbers, and the product of a row with the matrix of its group
    "a matrix for each row": ("ni,kio->no", (4, 2), (3, 2, 5), [2, 0, 1], ([1], [1]), ([], []), 0, [0]),
    "matrices along the second axis": ("ni,iko->no", (4, 2), (2, 3, 5), [2, 0, 1], ([1], [0]), ([], []), 0, [1]),
    "a sum for each group": ("ni,no->kio", (4, 2), (4, 5), [2, 0, 1], ([0], [0]), ([], []), 0, []),
    "sizes of each batch": ("bni,kio->bno", (2, 4, 2), (3, 2, 5), [[2, 0, 1], [1, 3, 0]], ([2], [1]), ([], []), 1, [0]),
    "a batch, summed": ("bni,bno->kbio", (2, 4, 2), (2, 4, 5), [[2, 0, 1], [1, 3, 0]], ([1], [1]), ([0], [0]), 1, []),
}


@pytest.mark.parametrize("name", GROUPS)
def test_rows_in_groups_meet_the_matrix_of_their_group(name):
    subscripts, lhs, rhs, sizes, contracting, batch, ragged, group = GROUPS[name]
    x, w, sizes = whole(*lhs), whole(*rhs, seed=1), np.array(sizes, np.int32)
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), [ragged], group)
    (eqn,) = jax.make_jaxpr(lambda *args: lax.ragged_dot_general(*args, numbers))(x, w, sizes).eqns
    found = sums.contract(view_of(eqn), Product.of(x, fixed=False), Product.of(w, fixed=False), sizes)
    inputs, output = subscripts.split("->")
    in_group = np.stack([[*np.repeat(np.eye(3), n, 0), *np.zeros((4 - sum(n), 3))] for n in np.atleast_2d(sizes)])
    indices = "bnk" if sizes.ndim == 2 else "nk"
    want = np.einsum(f"{inputs},{indices}->{output}", x, w, in_group.reshape(*sizes.shape[:-1], 4, 3))
    np.testing.assert_array_equal(array_of(found), want)
    assert [factor.fixed for factor in found.factors if isinstance(factor.array, Segments)] == [True]
    (of_data,) = sums.contract_with_data(view_of(eqn), 1, [x, sizes], [Product.of(w, fixed=False)])
    np.testing.assert_array_equal(array_of(of_data), want)
    halves = Product.of(x.reshape([n for m in x.shape for n in ((2, 2) if m == 4 else (m,))]), fixed=False)
    merged = sums.contract(view_of(eqn), halves.reshape(x.shape), Product.of(w, fixed=False), sizes)
    np.testing.assert_array_equal(array_of(merged), want)


def test_rows_on_a_diagonal_with_their_batch_are_in_no_groups():
    numbers, sizes = lax.RaggedDotDimensionNumbers((([2], [1]), ([], [])), [1], [0]), np.ones((4, 3), np.int32)
    x, w = whole(4, 4, 2), whole(3, 2, 5)
    (eqn,) = jax.make_jaxpr(lambda *args: lax.ragged_dot_general(*args, numbers))(x, w, sizes).eqns
    diagonal = product("b b i", ("b", whole(4)), ("i", whole(2)))
    assert sums.contract(view_of(eqn), diagonal, Product.of(w, fixed=False), sizes) is None


def test_an_axis_that_can_be_changed_alone_has_one_label():
    axes = {"low-rank": [True, True], "diagonal": [False, False], "merged": [False, True], "row": [True, True]}
    assert {name: [PRODUCTS[name].is_plain(i) for i in (0, 1)] for name in axes} == axes


def test_one_factor_may_be_as_large_as_the_array():
    w, a, b = whole(4, 4), whole(4, 1), whole(1, 4)
    cases = [product("i o", *f) for f in ([("ir", a), ("ro", b)], [("io", w), ("o", b[0])], [("io", w), ("io", w)])]
    found = [p.is_smaller_in_factors for p in [*cases, ROTATED, DIAGONAL]]
    assert found == [True, True, False, True, True]


def test_a_sum_is_a_tree_of_arrays_and_keys():
    x = sums.Sum((LOW_RANK,), (6, 4), np.float32, None, 1)
    draw = sums.Draw("weight", jnp.uint32(7))
    drawn = Factor(np.ones(2), (Label(2),), fixed=True, draw=draw)
    assert len(jax.tree.leaves(x)) == 2
    assert jax.tree.leaves(drawn)[1] == 7
    np.testing.assert_array_equal(array_of(jax.tree.map(lambda leaf: 2 * leaf, x).products[0]), 4 * array_of(LOW_RANK))
    assert x.map_products(lambda p: None, ()) is None
    assert (x.map_products(lambda p: p.squeeze([0]), (4,)).shape, x.ndim) == ((4,), 2)


# ---- factors that are stored in fewer numbers


@pytest.mark.parametrize(
    "numbers", [whole(5), whole(2, 4), whole(4) + 1j * whole(4, seed=1)], ids=["5", "2 of 4", "complex"]
)
def test_a_circulant_matrix_is_its_first_column_rotated(numbers):
    matrix, n = Circulant(numbers), numbers.shape[-1]
    want = np.stack([np.roll(numbers, i, -1) for i in range(n)], -1)
    np.testing.assert_array_equal(matrix.todense(), want)
    assert (matrix.shape, matrix.dtype, matrix.size) == (want.shape, want.dtype, numbers.size)
    vector = whole(n, seed=2).astype(numbers.dtype)
    for transposed, dense in ((False, want), (True, np.swapaxes(want, -1, -2))):
        frequencies = np.multiply(matrix.spectrum(transposed=transposed), sums.fourier_transform(vector))
        np.testing.assert_allclose(
            sums.inverse_fourier(jnp.array(frequencies), n, numbers.dtype), dense @ vector, atol=1e-5
        )
    assert matrix.spectrum(transposed=False).shape[-1] == (n if np.iscomplexobj(numbers) else n // 2 + 1)
    assert matrix.astype(jnp.complex64).dtype == jnp.complex64
    assert Circulant(jnp.ones(3, jnp.bfloat16)).spectrum(transposed=False).dtype == jnp.complex64


def test_fourier_transforms_are_in_a_wide_dtype_and_their_inverse_in_that_of_the_result():
    frequencies = jax.eval_shape(sums.fourier_transform, jax.ShapeDtypeStruct((3,), jnp.bfloat16))
    assert (frequencies.shape, frequencies.dtype) == ((2,), np.complex64)
    found = jax.eval_shape(lambda x: sums.inverse_fourier(x, 3, jnp.bfloat16), frequencies)
    assert (found.shape, found.dtype) == ((3,), jnp.bfloat16)


def test_factors_in_compressed_form_are_expanded_where_they_are_split():
    np.testing.assert_array_equal(array_of(ROTATED.reshape((2, 2, 4))), array_of(ROTATED).reshape(2, 2, 4))


def test_rows_are_in_groups_one_after_another():
    segments = Segments(np.array([[2, 0, 1], [1, 3, 0]], np.int8), 4, np.float32)
    np.testing.assert_array_equal(segments.group_of_row(), [[0, 0, 2, 3], [0, 1, 1, 1]])
    np.testing.assert_array_equal(segments.row_mask(), [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(segments.todense(), np.eye(4)[np.array([[0, 0, 2, 3], [0, 1, 1, 1]])][..., :3])
    assert (segments.shape, segments.size, segments.astype(np.int32).todense().dtype) == ((2, 4, 3), 6, np.int32)
    assert Factor(segments, (), fixed=True).size == 6


# ---- which dtypes may hold factors

F32, BF16, F16, C64, E8M0 = np.float32, jnp.bfloat16, np.float16, np.complex64, ml_dtypes.float8_e8m0fnu
E5M2, E4M3, B11 = ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3b11fnuz
I8, I16, I32, U8, BOOL = map(np.dtype, (np.int8, np.int16, np.int32, np.uint8, bool))
I4, U4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)
DTYPES = {
    sums.has_range: ([(F32,), (BF16,), (C64,)], [(F16,), (I32,), (E8M0,)]),
    sums.covers: (
        [(F32, F32), (BF16, F16), (F16, E5M2), (C64, F32), (C64, C64), (F32, I16), (BF16, U8)],
        [(F16, BF16), (F16, F32), (F32, C64), (E8M0, E8M0), (E4M3, B11), (B11, E4M3), (F32, I32), (BF16, I16)],
    ),
    sums.holds_exactly: (
        [(F32, I16), (F32, F32), (F32, BF16), (BF16, I8), (BF16, U8), (F16, BOOL), (C64, F32), (F16, I8)]
        + [(E5M2, x) for x in (I4, BOOL)],
        [(F32, I32), (BF16, F16), (BF16, I16), (BF16, F32), (F16, I16), (F32, C64), (F16, BF16)]
        + [(E5M2, x) for x in (E4M3, U4)],
    ),
    sums.is_narrowing_cast: (
        [(F32, F32), (F32, BF16), (C64, C64), (F16, BF16)],
        [(BF16, F32), (F32, F16), (F32, I8), (F32, I32), (BF16, F16), (C64, F32), (F16, F32)],
    ),
    sums.keeps_range: (
        [(None,), ((lax.Precision.HIGHEST, lax.Precision.DEFAULT),)]
        + [(lax.DotAlgorithmPreset[x],) for x in ("DEFAULT", "F32_F32_F32", "BF16_BF16_F32", "BF16_BF16_F32_X3")],
        [(lax.DotAlgorithmPreset[x],) for x in ("F16_F16_F32", "F16_F16_F16", "ANY_F8_ANY_F8_F32")]
        + [(lax.DotAlgorithm(F32, F32, F32, allow_imprecise_accumulation=False),)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("predicate", DTYPES, ids=lambda f: f.__name__)
def test_dtypes_that_hold_numbers_of_others(predicate):
    held, others = DTYPES[predicate]
    assert [args for args in held if not predicate(*args)] == []
    assert [args for args in others if predicate(*args)] == []


def test_factors_of_a_weight_are_held_in_its_range():
    f32, f16, i32 = (np.ones(1, dtype) for dtype in (F32, F16, I32))
    cases = [(F32, [f32, f16]), (BF16, [f32]), (F16, [f16]), (F32, [f32, i32])]
    assert [sums.holds_factors(*each) for each in cases] == [True, True, False, False]


def test_the_dtype_of_a_product_holds_operands_and_result():
    cases = {(BF16, BF16): BF16, (BF16, F16): F32, (F16, F32): F32, (F32, BF16): F32, (C64, F32): C64, (F32, C64): C64}
    assert {pair: sums.product_dtype(*pair) for pair in cases} == cases


def test_integers_that_the_dtype_holds_stay_integers():
    cases = [(I8, F32, I8), (BOOL, BF16, BOOL), (I32, F32, F32), (F32, BF16, BF16), (I16, BF16, BF16)]
    assert [sums.cast_factor(np.ones(2, x), y).dtype for x, y, _ in cases] == [dtype for *_, dtype in cases]


def test_the_cost_of_a_fourier_transform_of_eight_numbers():
    assert (sums.fourier_cost(8), sums.fourier_cost(1)) == (60, 2.5)
