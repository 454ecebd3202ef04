"""Products are multiplied to the array of numpy's einsum, in the order that costs least."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import PRODUCTS, array_of, product, shape_of, sum_of, whole

from reparax.programs import multiply
from reparax.programs.multiply import ENTRY, FactorType, Numerics
from reparax.programs.sums import Circulant, Label, Segments

SIZES, SIZES_OF_EACH = np.array([2, 0, 1], np.int32), np.array([[2, 0, 1], [1, 3, 0]], np.int32)
ROWS, ROWS_OF_EACH = Segments(SIZES, 4, np.float32), Segments(SIZES_OF_EACH, 4, np.float32)
X, W, XS, HEADS = whole(4, 2), whole(3, 2, 5, seed=1), whole(2, 4, 2), whole(3, 2, 4, 2)
CHAIN = [("ij", whole(4, 2)), ("jk", whole(2, 5)), ("kl", whole(5, 3)), ("lm", whole(3, 4)), ("m", whole(4))]
MORE = {
    "turned": product("o i", ("ir", whole(6, 2)), ("ro", whole(2, 4, seed=1))),
    "outer": product("i j k", ("ij", whole(4, 2)), ("k", whole(3))),
    "a batch": product("b i o", ("bir", whole(2, 4, 3)), ("bro", whole(2, 3, 5))),
    "a batch with one factor": product("i b", ("bi", whole(2, 4)), ("b", whole(2))),
    "one factor before a batch": product("b i", ("b", whole(2)), ("bi", whole(2, 4))),
    "summed alone": product("i o", ("irs", whole(4, 2, 3)), ("ro", whole(2, 5))),
    "an axis of one summed alone": product("i o", ("iru", whole(4, 2, 1)), ("ro", whole(2, 5))),
    "axes of one and of three summed alone": product("i o", ("irsu", whole(4, 2, 3, 1)), ("ro", whole(2, 5))),
    "nothing": product("i", ("i", whole(4)), ("r", whole(3))),
    "one factor, summed and turned": product("k i j", ("ijkl", whole(2, 3, 4, 2))),
    "six factors": product("i", *CHAIN, ("j", whole(2))),
    "numbers": product("i o", ("", whole()), ("io", whole(2, 3)), ("", whole() - 1)),
    "rotated rows": product("n j", ("ij", Circulant(whole(4))), ("ni", whole(3, 4))),
    "rotated columns": product("n i", ("ij", Circulant(whole(4))), ("nj", whole(3, 4))),
    "a batch rotated": product("b i n", ("bij", Circulant(whole(2, 5))), ("bnj", whole(2, 3, 5))),
    "rotated for each": product("n b i", ("bij", Circulant(whole(2, 5))), ("nj", whole(3, 5))),
    "rotated, and another axis summed": product("n i", ("ij", Circulant(whole(4))), ("njs", whole(3, 4, 2))),
    "rotated entry by entry": product("i j", ("ij", Circulant(whole(4))), ("j", whole(4))),
    "rotated and summed": product("n", ("ij", Circulant(whole(4))), ("nj", whole(3, 4))),
    "twice rotated": product("i k", ("ij", Circulant(whole(4))), ("jk", Circulant(whole(4, seed=1)))),
    "a matrix for each row": product("n o", ("nk", ROWS), ("ni", X), ("kio", W)),
    "in two factors": product("n o", ("nk", ROWS), ("ni", X), ("kir", W), ("kro", whole(3, 5, 2))),
    "a number for each row": product("n o", ("nk", ROWS), ("no", X), ("k", whole(3))),
    "rows of several entries": product("n h o", ("nk", ROWS), ("nhi", whole(4, 3, 2)), ("kio", W)),
    "rows along the second axis": product("h n o", ("nk", ROWS), ("hni", HEADS[:, 0]), ("kio", W)),
    "groups along the second axis": product("n i o", ("nk", ROWS), ("n", X[:, 0]), ("iko", whole(2, 3, 5))),
    "a row of each": product("n i o", ("nk", ROWS), ("n", X[:, 0]), ("kio", W)),
    "a sum for each group": product("k i o", ("nk", ROWS), ("ni", X), ("no", whole(4, 5))),
    "a sum for each group, scaled": product("k i o", ("nk", ROWS), ("ni", X), ("no", whole(4, 5)), ("ko", whole(3, 5))),
    "sums alone for each group": product("k i o", ("nk", ROWS), ("nis", whole(4, 2, 3)), ("nto", whole(4, 3, 5))),
    "a sum of one for each group": product("k i", ("nk", ROWS), ("ni", X), ("k", whole(3))),
    "rows of another": product("k i o", ("nk", ROWS), ("ni", X), ("o", whole(5))),
    "rows of another, turned": product("k o i", ("nk", ROWS), ("ni", X), ("o", whole(5))),
    "sums of each over two axes": product("k i o", ("nk", ROWS), ("nij", whole(4, 2, 3)), ("jno", whole(3, 4, 5))),
    "sums for each group and head": product("k h i o", ("nk", ROWS), ("hni", HEADS[:, 0]), ("nho", whole(4, 3, 5))),
    "groups alone": product("n", ("nk", ROWS), ("n", X[:, 0])),
    "groups alone, of each batch": product("b n", ("bnk", ROWS_OF_EACH), ("bn", XS[..., 0])),
    "rows and groups": product("n k o", ("nk", ROWS), ("ni", X), ("kio", W)),
    "neither rows nor groups": product("o", ("nk", ROWS), ("ni", X), ("kio", W)),
    "no rows": product("n o", ("nk", ROWS), ("ko", W[:, 0])),
    "groups of each batch": product("b n o", ("bnk", ROWS_OF_EACH), ("bni", XS), ("kio", W)),
    "matrices of each batch": product("b n o", ("bnk", ROWS_OF_EACH), ("bni", XS), ("bkio", whole(2, 3, 2, 5))),
    "rows that all batches share": product("b n o", ("bnk", ROWS_OF_EACH), ("ni", X), ("kio", W)),
    "rows also without a batch": product("b n o", ("bnk", ROWS_OF_EACH), ("bni", XS), ("n", X[:, 0]), ("kio", W)),
    "rows that all batches share, summed": product("b k i o", ("bnk", ROWS_OF_EACH), ("ni", X), ("no", whole(4, 5))),
    "summed over the batch": product("n o", ("bnk", ROWS_OF_EACH), ("bni", XS), ("b", whole(2)), ("kio", W)),
    "no sum": product("b n o", ("bnk", ROWS_OF_EACH), ("bn", XS[..., 0]), ("ko", W[:, 0])),
    "groups of each head": product("h b n o", ("bnk", ROWS_OF_EACH), ("hbni", HEADS), ("hkio", whole(3, 3, 2, 5))),
    "summed in each batch": product("b k i o", ("bnk", ROWS_OF_EACH), ("bni", XS), ("bno", whole(2, 4, 5))),
}  # fmt: skip
ALL, F32 = PRODUCTS | MORE, Numerics(np.float32, np.float32, None)


@pytest.fixture(scope="module")
def arrays():
    """All at once, as one program."""
    sums = [sum_of(p) for p in ALL.values()]
    return dict(zip(ALL, jax.jit(lambda sums: list(map(multiply.array_of_sum, sums)))(sums), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_a_product_is_multiplied_to_its_array(name, arrays):
    np.testing.assert_allclose(arrays[name], array_of(ALL[name]), atol=1e-4)


FORMS = {  # which operations multiply these, and which do not
    ("turned", "a batch", "outer"): ({" dot_general"}, {" transpose", " mul "}),
    ("a batch with one factor", "one factor before a batch", "numbers"): ({" mul "}, {" dot_general"}),
    ("an axis of one summed alone",): ({" reshape", " dot_general"}, {" reduce_sum"}),
    ("rotated rows", "rotated columns", "a batch rotated", "rotated for each", "twice rotated"): (
        {" fft"},
        {" dot_general"},
    ),
    ("rotated and summed",): ({" dot_general"}, {" fft"}),
    ("a matrix for each row", "in two factors"): ({" ragged_dot_general"}, {" eq ", " transpose"}),
    ("a sum for each group", "groups of each batch", "groups of each head"): ({" ragged_dot_general"}, {" eq "}),
    ("a number for each row",): ({" gather"}, {"dot_general", " eq "}),
    ("groups alone",): ({" lt "}, {" eq "}),
    ("summed in each batch", "rows and groups", "no sum", "rows also without a batch"): (
        {" dot_general", " eq "},
        {" ragged_dot_general"},
    ),
}


@pytest.mark.parametrize("names", FORMS, ids=" and ".join)
def test_the_operations_that_multiply(names):
    used, unused = FORMS[names]
    for name in names:
        text = str(jax.make_jaxpr(multiply.array_of_sum)(sum_of(ALL[name])))
        assert {word for word in used | unused if word in text} == used, name


def test_rows_are_summed_before_another_factor_is_multiplied():
    for name in ("rows of another", "rows of another, turned"):
        jaxpr = jax.make_jaxpr(multiply.array_of_product, static_argnums=(1, 2))(
            ALL[name], shape_of(ALL[name]), F32
        ).jaxpr
        assert max(v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars) == 3 * 2 * 5


def test_sums_are_added_and_given_their_shape_and_dtype():
    x = replace(sum_of(PRODUCTS["low-rank"], PRODUCTS["merged"], dtype=jnp.bfloat16), shape=(3, 8))
    got = multiply.array_of_sum(x)
    assert (got.shape, got.dtype) == ((3, 8), jnp.bfloat16)
    want = array_of(PRODUCTS["low-rank"]) + array_of(PRODUCTS["merged"])
    np.testing.assert_allclose(np.asarray(got, np.float32), want.reshape(3, 8), rtol=1e-2)


def test_operands_and_results_have_the_dtypes_and_the_precision_that_are_given():
    numerics = Numerics(jnp.bfloat16, np.float32, jax.lax.Precision.HIGHEST)
    for name, primitive in (("low-rank", "dot_general"), ("a matrix for each row", "ragged_dot_general")):
        x = sum_of(ALL[name])
        jaxpr = jax.make_jaxpr(lambda x: multiply.array_of_products(x.products, [*x.shape], numerics))(x).jaxpr
        (dot,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == primitive]
        assert [v.aval.dtype for v in (*dot.invars[:2], *dot.outvars)] == [jnp.bfloat16, jnp.bfloat16, np.float32]
        assert set(dot.params["precision"]) == {jax.lax.Precision.HIGHEST}
    for name, n in (("a batch with one factor", 2), ("rotated rows", 2), ("numbers", 3)):
        x = sum_of(ALL[name])
        jaxpr = jax.make_jaxpr(lambda x: multiply.array_of_products(x.products, x.shape, numerics))(x).jaxpr
        casts = [eqn for eqn in jaxpr.eqns if eqn.params.get("new_dtype") == jnp.bfloat16]
        assert (len(casts), jaxpr.outvars[0].aval.dtype) == (n, np.float32), name


def test_the_array_of_a_sum_has_its_dtype_and_is_multiplied_in_its_precision():
    x = replace(sum_of(ALL["low-rank"]), precision=jax.lax.Precision.HIGHEST)
    assert "Precision.HIGHEST" in str(jax.make_jaxpr(multiply.array_of_sum)(x))
    integers = sum_of(product("i", ("i", np.ones(3, np.int8))))
    assert jax.eval_shape(multiply.array_of_sum, integers).dtype == np.float32


def test_a_product_of_two_factors_has_the_labels_that_its_cost_was_estimated_for_and_is_fixed_if_both_are():
    for p in ALL.values():
        out = frozenset(p.labels_of_axes)
        factors, segments, link = multiply.split_off_segments(p.factors, out)
        in_groups = (replace(segments, fixed=True), link) if link else ()
        function = multiply.multiply_in_groups if link else multiply.multiply_pair
        for (i, j), *fixed in itertools.product(itertools.combinations(range(len(factors)), 2), *[[False, True]] * 2):
            a, b = replace(factors[i], fixed=fixed[0]), replace(factors[j], fixed=fixed[1])
            keep = out.union(*(factor.labels for k, factor in enumerate(factors) if k not in (i, j)))
            _, (planned,) = multiply._multiply_types((FactorType.of(a), FactorType.of(b)), (0, 1), keep, link)
            result = jax.eval_shape(partial(function, a, b, keep, F32, *in_groups))
            assert (set(result.labels), result.fixed) == (planned.labels, all(fixed))


def test_equal_structures_share_one_trace():
    first, second = (multiply.with_numbers(product("i o", ("ir", X), ("ro", W[0]))) for _ in range(2))
    assert first.axes == second.axes
    assert [f.labels for f in first.factors] == [f.labels for f in second.factors]
    other = multiply.with_numbers(product("o i", ("ir", X), ("ro", W[0])))
    assert [f.labels for f in other.factors] != [f.labels for f in first.factors]
    assert first.axes[0][0] is not first.factors[0].labels[1]


# ---- costs


INPUT, RANK, OUTPUT, ROW = map(Label, (6, 2, 4, 8))


def type_of(*labels, fixed=False):
    return FactorType(frozenset(labels), frozenset(), fixed)


COSTS = {  # twice the loop for each of the result and gradients, and what is written
    "matrices": (("i o", ("ir", whole(6, 2)), ("ro", whole(2, 4))), (), 3 * 2 * 48 + ENTRY * (24 + 12 + 8)),
    "a fixed one": (("i o", ("ir", whole(6, 2)), ("ro", whole(2, 4))), (0,), 2 * 2 * 48 + ENTRY * (24 + 8)),
    "both fixed": (("i o", ("ir", whole(6, 2)), ("ro", whole(2, 4))), (0, 1), 2 * 48 + ENTRY * 24),
    "entries": (("i", ("i", whole(6)), ("i", whole(6))), (), ENTRY * 18),
    "a sum of one alone": (("i", ("i", whole(6)), ("ij", whole(6, 4))), (), 2 * 24 + ENTRY * (6 + 6 + 24)),
    "a row of all": (("i o", ("io", whole(6, 4)), ("o", whole(4))), (), 2 * 24 + ENTRY * (24 + 24 + 4)),
    "a row of all, fixed": (("i o", ("io", whole(6, 4)), ("o", whole(4))), (1,), ENTRY * (24 + 24)),
    "a matrix and a vector": (("i", ("io", whole(6, 4)), ("o", whole(4))), (), 3 * 2 * 24 + ENTRY * (6 + 24 + 4)),
    "rotated": (("n i", ("ij", Circulant(whole(8))), ("nj", whole(5, 8))), (), 3 * (2 * 5 * 60 + ENTRY * 40)),
    "rotated, from the right": (("n i", ("nj", whole(5, 8)), ("ij", Circulant(whole(8)))), (), 3 * (600 + ENTRY * 40)),
    "several, rotated": (
        ("n b i", ("bij", Circulant(whole(2, 8))), ("nj", whole(5, 8))),
        (),
        3 * (2 * 10 * 60 + ENTRY * 80),
    ),
    "rotated, fixed": (("n i", ("ij", Circulant(whole(8))), ("nj", whole(5, 8))), (0,), 2 * (2 * 5 * 60 + ENTRY * 40)),
    "rotated, summed": (("n", ("ij", Circulant(whole(8))), ("nj", whole(5, 8))), (0, 1), 2 * 320 + ENTRY * 5),
    "one": (("i", ("i", whole(6))), (), 0),
    "rows in groups": (("n o", ("nk", ROWS), ("ni", X), ("kio", W)), (0,), 3 * 2 * 40 + ENTRY * (20 + 8 + 30)),
    "groups alone": (("n", ("nk", ROWS), ("n", X[:, 0])), (0,), ENTRY * (4 + 4)),
    "a sum for each": (("k i o", ("nk", ROWS), ("ni", X), ("no", X)), (0,), 3 * 2 * 16 * 1 + ENTRY * (12 + 8 + 8)),
}


@pytest.mark.parametrize("name", COSTS)
def test_the_cost_of_a_product(name):
    factors, fixed, cost = COSTS[name]
    assert multiply.cost(product(*factors, fixed=fixed)) == cost


def test_the_cheapest_order_comes_first():
    w, a, b, x = type_of(INPUT, OUTPUT), type_of(INPUT, RANK), type_of(RANK, OUTPUT), type_of(ROW, INPUT, fixed=True)
    out = frozenset([ROW, OUTPUT])
    cost, order = multiply.cheapest_order((x, a, b), out, None)
    assert order == ((0, 1), (0, 1))  # which leaves b and x a
    assert cost == 2 * 2 * 96 + ENTRY * (16 + 12) + 3 * 2 * 64 + ENTRY * (32 + 8 + 16)
    assert multiply.cheapest_order((a, x, b), out, None)[0] == cost
    many = Label(500)
    x = type_of(many, INPUT, fixed=True)
    assert multiply.cheapest_order((x, a, b), frozenset([many, OUTPUT]), None)[1] == ((1, 2), (0, 1))
    assert multiply.cheapest_order((w,), out, None) == (0.0, ())


def test_of_five_factors_all_orders_are_compared():
    sizes = [Label(n) for n in (10, 5, 2, 5, 10, 8)]
    chain = tuple(type_of(*pair, fixed=True) for pair in itertools.pairwise(sizes))
    products = [(10, 5, 2), (2, 5, 10), (2, 10, 8), (10, 2, 8)]  # from both ends to the axis of two
    cost, _ = multiply.cheapest_order(chain, frozenset([sizes[0], sizes[-1]]), None)
    assert cost == sum(2 * n * k * m + ENTRY * n * m for n, k, m in products)


def test_of_many_factors_the_cheapest_pair_comes_first():
    rows = [type_of(INPUT, Label(n)) for n in (7, 5, 9, 8, 6, 10)]
    out = frozenset(label for row in rows for label in row.labels)
    _, order = multiply.cheapest_order(tuple(rows), out, None)
    assert order[0] == (1, 4)
    assert len(order) == 5


LOOPS = {  # the labels of two factors, those of others and of the output, whether it has rows; the loop and the result
    "a matrix for each row": ("nkio", "no", True, "nio", "no"),
    "matrices of each group": ("kiro", "nio", True, "kiro", "kio"),
    "matrices that only one group has": ("iro", "nio", True, "iro", "io"),
    "rows alone": ("nir", "nir", True, "nir", "nir"),
    "a sum for each group": ("nio", "kio", False, "nio", "kio"),
    "a sum for each group of which a factor is left": ("nio", "o", False, "nio", "o"),
    "rows that another factor has too": ("nio", "nkio", False, "nio", "nio"),
    "factors without rows": ("kio", "nko", False, "kio", "ko"),
    "factors that are left after the sum": ("kio", "kio", False, "kio", "kio"),
    "factors without rows, of an output without groups": ("kio", "no", False, "kio", "ko"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_product_with_groups_loops_over_the_groups_of_each_row(name):
    factors, keep, keeps_rows, loop, result = LOOPS[name]
    label = {letter: Label(2) for letter in "nkior"}
    labels, keep, *want = (frozenset(map(label.get, letters)) for letters in (factors, keep, loop, result))
    link = multiply.Link(label["n"], label["k"], keeps_rows=keeps_rows)
    assert link.loop_and_result_labels(labels, keep) == tuple(want)
    assert link.sums_rows(labels, keep) == ("a sum for each" in name)


@pytest.mark.parametrize(
    ("matrices", "other", "keep", "summed"),
    [
        ("ij", "j", "i", "j"),
        ("ij", "nj", "ni", "j"),
        ("ij", "ni", "nj", "i"),
        ("bij", "nj", "bni", "j"),
        ("ij", "nj", "nij", None),
        ("ij", "nj", "n", None),
        ("ij", "nij", "n", None),
        ("ij", "n", "nij", None),
        ("bij", "bnj", "ni", None),
    ],
)
def test_a_circulant_matrix_is_multiplied_by_fourier_transforms_where_vectors_meet_it(matrices, other, keep, summed):
    label = {letter: Label(4) for letter in "bijn"}
    labels, circulant, others, kept = (frozenset(map(label.get, x)) for x in (matrices, matrices[-2:], other, keep))
    circulant = FactorType(labels, circulant, fixed=False)
    other = FactorType(others, frozenset(), fixed=False)
    assert multiply.fourier_label(circulant, other, kept) is label.get(summed)
    assert multiply.fourier_label(other, circulant, kept) is None
