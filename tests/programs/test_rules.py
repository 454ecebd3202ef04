"""What equations do to weights in factors, against the same of the array."""

import math
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType, PartitionSpec
from kept import in_factors
from one_array import normal
from products import PRODUCTS, array_of_sum, product, sum_of, whole

import reparax as rpx
from reparax.programs import jaxprs, rules
from reparax.programs.dependence import Facts
from reparax.programs.equations import Gather, view_of
from reparax.programs.sums import Draw, Factor, Product, Sum

X, W = normal(5, 4, seed=1), {"w": np.diag(normal(4))}
RESIZED = {
    "rows": lambda w, x: x[:, :2] @ w[:2],
    "columns": lambda w, x: x @ w[:, 1:],
    "both": lambda w, x: x[:, :2] @ w[:2, 1:3],
    "rows from a place that data say": lambda w, x: x[:, :2] @ jax.lax.dynamic_slice_in_dim(w, jnp.argmax(x[0]) % 3, 2),
    "turned": lambda w, x: x @ w[::-1],
}


@pytest.mark.parametrize("p", [rpx.matrices.Diagonal(), rpx.LowRank(2)], ids=repr)
def test_a_weight_that_is_resized_gives_what_the_array_gives(p):
    raw = p.init(W)

    def losses(transform):
        each = [transform(lambda raw, x, f=f: jnp.sum(f(p.apply(raw)["w"], x) ** 2)) for f in RESIZED.values()]
        return jax.jit(lambda raw, x: [jax.value_and_grad(loss)(raw, x) for loss in each])(raw, X)

    with in_factors():
        found = losses(rpx.factored)
    for name, got, want in zip(RESIZED, found, losses(lambda f: f), strict=True):
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4, custom_message=name)


def test_a_diagonal_times_a_table_whose_columns_were_merged_gives_the_array():
    p, params = rpx.matrices.Diagonal(where="w"), W | {"s": normal(4, seed=2), "t": normal(2, 2, seed=3)}

    def loss(raw, x):
        w = p.apply(raw)
        return jnp.sum((x @ (w["w"] * (w["s"][:, None, None] * w["t"][None]).reshape(4, 4))) ** 2)

    with in_factors():
        found = jax.jit(jax.value_and_grad(rpx.factored(loss)))(p.init(params), X)
    # Rows and columns of the diagonal have one index, so what splits the columns splits the rows too.
    chex.assert_trees_all_close(found, jax.value_and_grad(loss)(p.init(params), X), rtol=1e-5, atol=1e-5)


def test_columns_of_matrices_that_places_choose_are_those_of_the_array():
    """One of these matrices is not there, so it is zero."""
    p, places, columns = rpx.LowRank(2, rows=(0, 1), columns=2), np.array([1, 9, 0, 2, 1]), np.array([2, 0])
    raw = p.init({"w": normal(3, 4, 4)})

    def loss(raw, x):
        chosen = p.apply(raw)["w"].at[places].get(mode="fill", fill_value=0)[:, :, columns]
        return jnp.sum(jnp.einsum("tk,tkn->tn", x, chosen) ** 2)

    with in_factors():
        found = jax.jit(jax.value_and_grad(rpx.factored(loss)))(raw, X)
    chex.assert_trees_all_close(found, jax.value_and_grad(loss)(raw, X), rtol=1e-4, atol=1e-4)


def test_repeated_rows_beside_other_rows_are_those_of_the_array():
    """The repeated rows have no factor with an axis for rows."""
    p, params = rpx.LowRank(2, where="w"), {"w": W["w"], "row": normal(4, seed=2)}

    def loss(raw, x):
        w = p.apply(raw)
        return jnp.sum((x @ jnp.concatenate([jnp.broadcast_to(w["row"], (2, 4)), w["w"]])) ** 2)

    raw, x = p.init(params), normal(5, 6, seed=3)
    with in_factors():
        found = jax.jit(jax.value_and_grad(rpx.factored(loss)))(raw, x)
    chex.assert_trees_all_close(found, jax.value_and_grad(loss)(raw, x), rtol=1e-4, atol=1e-4)


# ---- one equation after another

FREE, FIXED = (Facts(known=True, fixed=fixed) for fixed in (False, True))
PLACES = np.array([[2], [9], [0], [-1]], np.int32)
PAIRS = np.array([[1, 2], [0, 5], [2, 9]], np.int32)
SUMS = {name: sum_of(p) for name, p in PRODUCTS.items()} | {
    "two": sum_of(PRODUCTS["low-rank"], product("i o", ("io", whole(6, 4, seed=5)))),
    "matrices": sum_of(product("b i o", ("bir", whole(3, 6, 2)), ("bro", whole(3, 2, 4)))),
    "one-sided": sum_of(product("b i o", ("ir", whole(6, 2)), ("bro", whole(3, 2, 4)))),
    "repeated-matrices": sum_of(product("b i o", ("io", whole(6, 4)), ("bo", np.ones((3, 4), np.int8)))),
    "one-matrix": sum_of(product("b i o", ("bir", whole(1, 6, 2)), ("ro", whole(2, 4)))),
    "merged-matrices": sum_of(product("ab i o", ("ai", whole(2, 6)), ("bo", whole(2, 4)))),
    "a": sum_of(product("i o", ("io", whole(6, 2)))),
    "b": sum_of(product("i o", ("io", whole(2, 4, seed=1)))),
    "vector": sum_of(product("o", ("o", whole(4) + 4))),
    "integers": sum_of(product("o", ("o", np.array([1, -2, 4, 5], np.int8)))),
    "scalar": sum_of(product("", ("", whole() + 5))),
}

(ENTRIES,) = SUMS["a"].products
SUMS["draw"] = sum_of(replace(ENTRIES, factors=(replace(ENTRIES.factors[0], draw=Draw("noise", 0)),)))


def taken(axis, mode, sizes, **settings):
    """The look-up at ``PLACES`` along an axis."""
    offset = tuple(range(len(sizes) - 1)) if axis else tuple(range(1, len(sizes)))
    numbers = lax.GatherDimensionNumbers(offset, (axis,), (axis,))
    return lambda w: lax.gather(w, PLACES, numbers, sizes, mode=mode, **settings)


def turned(w, start):
    """A slice whose start is known only when it runs; one past the end is moved back."""
    return lax.dynamic_slice(w, (start, np.int32(1)), (3, 4), allow_negative_indices=False)


ROWS = {  # of a table: the sums, and what is done with them
    "transposed": ("low-rank", lambda w: w.T),
    "matrices transposed": ("matrices", lambda w: lax.transpose(w, (2, 0, 1))),
    "summed": ("low-rank", lambda w: jnp.sum(w, 0)),
    "summed where repeated": ("repeated", lambda w: jnp.sum(w, 1)),
    "all summed": ("repeated", jnp.sum),
    "a diagonal summed": ("diagonal", lambda w: jnp.sum(w, 1)),
    "without an axis of one": ("row", lambda w: lax.squeeze(w, (0,))),
    "broadcast": ("row", lambda w: lax.broadcast_in_dim(w, (2, 3, 4), (1, 2))),
    "with axes of one": ("low-rank", lambda w: w.reshape(1, 6, 1, 4)),
    "split and merged": ("two", lambda w: w.reshape(2, 12)),
    "split": ("low-rank", lambda w: w.reshape(3, 2, 2, 2)),
    "merged anew": ("merged", lambda w: w.reshape(2, 12)),
    "narrowed": ("two", lambda w: w.astype(jnp.bfloat16)),
    "no gradient": ("two", lax.stop_gradient),
    "negative": ("two", lambda w: -w),
    "twice negative": ("two", lambda w: lax.neg(-w)),
    "copied": ("two", lambda w: lax.copy_p.bind(w)),
    "cut": ("two", lambda w: lax.slice(w, (1, 1), (6, 4), (2, 1))),
    "cut from a place": ("low-rank", lambda w: turned(w, np.int32(5))),
    "cut from a place before the first": ("low-rank", lambda w: turned(w, -jnp.max(lax.iota(np.int32, 3)))),
    "columns of merged rows cut": ("merged", lambda w: w[:, 1:3]),
    "columns of merged rows cut from a place": ("merged", lambda w: lax.dynamic_slice_in_dim(w, np.int32(1), 2, 1)),
    "rows of a rotated one": ("rotated", lambda w: w[1:3]),
    "rotated, narrowed": ("rotated", lambda w: w.astype(jnp.bfloat16)),
    "rotated, joined": ("rotated", lambda w: jnp.concatenate([w, w[:1]])),
    "every second row": ("two", lambda w: w[::2]),
    "one row, times": ("two low-rank", lambda w, v: w[2:3] * v),
    "reversed": ("low-rank", lambda w: lax.rev(w, (0, 1))),
    "in parts": ("two", lambda w: lax.split(w, (1, 2, 3), axis=0)[2]),
    "columns in parts": ("two", lambda w: lax.split(w, (1, 2, 1), axis=1)[1]),
    "a repeated axis cut": ("repeated", lambda w: w[:, 1:3]),
    "an axis of one taken whole": ("row", lambda w: lax.slice(w, (0, 1), (1, 3))),
    "looked up": ("matrices", taken(0, "clip", (1, 6, 4))),
    "looked up, or not a number": ("matrices", taken(0, "fill", (1, 6, 4))),
    "looked up on one side": ("one-sided", taken(0, "fill", (1, 6, 4), fill_value=0)),
    "looked up, or said to be no number": ("matrices", taken(0, "fill", (1, 6, 4), fill_value=np.nan)),
    "looked up, with no need to fill": ("matrices", taken(0, "clip", (1, 6, 4), fill_value=7)),
    "looked up in a table of places": (
        "matrices",
        lambda w: lax.gather(w, PLACES.reshape(2, 2, 1), lax.GatherDimensionNumbers((1, 3), (0,), (0,)), (1, 6, 4)),
    ),
    "looked up by the second number": (
        "matrices",
        lambda w: lax.gather(w, PAIRS, lax.GatherDimensionNumbers((0, 1, 2), (), (0, 1)), (3, 1, 4), mode="clip"),
    ),
    "looked up by an integer, or said to be no number": (
        "repeated-matrices",
        taken(0, "fill", (1, 6, 4), fill_value=np.nan),
    ),
    "looked up by an integer": ("repeated-matrices", taken(0, "fill", (1, 6, 4))),
    "one looked up, times": (
        "matrices",
        lambda w: lax.gather(w, PLACES[2:3], lax.GatherDimensionNumbers((1, 2), (0,), (0,)), (1, 6, 4)) * w,
    ),
    "columns looked up": ("matrices", taken(2, "clip", (3, 6, 1))),
    "kept when looked up": (
        "matrices",
        lambda w: lax.gather(w, PLACES, lax.GatherDimensionNumbers((1, 2, 3), (), (0,)), (1, 6, 4), mode="clip"),
    ),
    "the one looked up": ("one-matrix", taken(0, "clip", (1, 6, 4))),
    "product of arrays": ("a b", lambda a, b: a @ b),
    "and of a sum": ("low-rank b", lambda w, b: lax.dot_general(w, b, (((1,), (1,)), ((), ())))),
    "of two sums": ("two two", lambda w, v: w.T @ v),
    "in a batch": ("two merged", lambda w, v: lax.dot_general(w, v, (((0,), (0,)), ((1,), (1,))))),
    "added": ("two vector", lambda w, row: w + lax.broadcast_in_dim(row, (6, 4), (1,))),
    "a number added": ("a scalar", lambda w, number: number + w),
    "subtracted": ("two low-rank", lambda w, v: w - v),
    "multiplied": ("two low-rank", lambda w, v: w * v),
    "a number times": ("two scalar", lambda w, number: number * w),
    "an axis of one times": ("two row", lambda w, row: row * w),
    "merged times": ("merged two", lambda w, v: w * v),
    "two diagonals": ("diagonal diagonal", lambda w, v: w * v),
    "divided": ("two vector", lambda w, row: w / lax.broadcast_in_dim(row, (6, 4), (1,))),
    "divided by integers": ("two integers", lambda w, row: w / lax.broadcast_in_dim(row, (6, 4), (1,))),
    "a vector divided by a number": ("vector scalar", lambda row, number: row / number),
    "divided by a number": ("two scalar", lambda w, number: w / number),
    "joined": ("two low-rank", lambda w, v: jnp.concatenate([w, v])),
    "joined in turn": ("low-rank two", lambda w, v: lax.concatenate([w, v], 1)),
    "joined to repeated": ("repeated low-rank", lambda w, v: lax.concatenate([w, v], 1)),
    "joined to a row": ("row two row", lambda row, w, last: jnp.concatenate([row, w, last])),
    "joined to multiples": ("two low-rank scalar", lambda w, v, number: jnp.concatenate([w * number, v])),
    "joined to twice another": ("a a", lambda a, b: jnp.concatenate([b, a + a])),
    "integers joined to numbers": (
        "integers vector",
        lambda *rows: lax.concatenate([lax.broadcast_in_dim(row, (6, 4), (1,)) for row in rows], 1),
    ),
    "stacked": ("two two", lambda w, v: lax.concatenate([w[:, None], v[:, None]], 1)),
    "an axis of one reversed": ("row", lambda w: lax.rev(w, (0,))),
    "in products": ("low-rank a", lambda w, a: (w @ w.T) @ a),
}
REFUSED = {
    "split otherwise than its labels": ("low-rank", lambda w: w.reshape(8, 3)),
    "a diagonal reshaped": ("diagonal", lambda w: w.reshape(2, 8)),
    "in another order": ("low-rank", lambda w: lax.reshape(w, (24,), (1, 0))),
    "widened": ("low-rank", lambda w: w.astype(jnp.float16)),
    "to integers": ("low-rank", lambda w: w.astype(np.int32)),
    "a diagonal cut": ("diagonal", lambda w: w[1:]),
    "merged rows and columns cut": ("merged", lambda w: w[1:, 1:]),
    "merged rows in parts": ("merged", lambda w: lax.split(w, (2, 4), axis=0)[0]),
    "rows of a matrix": ("low-rank", taken(0, "clip", (1, 4))),
    "merged rows cut": ("merged", lambda w: w[1:]),
    "a diagonal reversed": ("diagonal", lambda w: lax.rev(w, (0,))),
    "an axis of one repeated": (
        "row",
        lambda w: lax.gather(w, PLACES, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 4)),
    ),
    "merged matrices looked up": ("merged-matrices", taken(0, "clip", (1, 6, 4))),
    "the one looked up, or not a number": ("one-matrix", taken(0, "fill", (1, 6, 4))),
    "looked up, or seven": ("matrices", taken(0, "fill", (1, 6, 4), fill_value=7)),
    "places for each": ("matrices", lambda w: jax.vmap(lambda w, i: w[i])(w, PLACES[:3])),
    "divided by a sum": ("low-rank two", lambda v, w: v / w),
    "nothing of an axis of one": ("row", lambda w: w[:0]),
    "divided by a draw": ("a draw", lambda w, draw: w / draw),
    "divided by a product": ("low-rank low-rank", lambda v, w: v / w),
    "an array times a diagonal": ("diagonal rotated", lambda w, v: w * v),
    "contracted where repeated": ("repeated repeated", lambda w, v: w @ v.T),
    "in a small range": ("a b", lambda a, b: lax.dot(a, b, precision=lax.DotAlgorithmPreset.F16_F16_F32)),
    "of a small dtype": ("a b", lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float16)),
    "a diagonal joined": ("diagonal low-rank", lambda w, v: jnp.concatenate([w, v])),
    "power": ("low-rank", lambda w: w**2),
    "largest": ("low-rank", lambda w: jnp.max(w, 0)),
}


def in_sums(function, *args):
    """What rules make of sums, equation by equation; None where one needs arrays."""
    jaxpr, consts = jaxprs.consts_first(
        jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))
    )
    env = dict(zip(jaxpr.invars, [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        operands = jaxprs.values(env, eqn.invars)
        if not any(isinstance(x, Sum) for x in operands):
            outs = [view_of(eqn).bind(*operands)]
        else:
            made = rules.make_sum(eqn, operands, [FREE for _ in operands])
            outs = rules.move_sum(eqn, operands) or (None if made is None else [made])
        if outs is None:
            return None
        env.update(zip(eqn.outvars, outs, strict=True))
    return env[jaxpr.outvars[0]]


@pytest.fixture(scope="module")
def made():
    """All of both tables at once, as one program, with what the arrays give."""

    arrays = {name: array_of_sum(x).astype(x.dtype) for name, x in SUMS.items()}

    def all_rows(values):
        rows = [(name, names.split(), f) for name, (names, f) in ROWS.items()]
        return {name: (in_sums(f, *map(SUMS.get, names)), f(*map(values.get, names))) for name, names, f in rows}

    return jax.jit(all_rows)(arrays)


@pytest.mark.parametrize("name", ROWS)
def test_sums_are_those_of_the_arrays(name, made):
    got, want = made[name]
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(array_of_sum(got), np.asarray(want, np.float32), rtol=1e-2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_needs_arrays(name):
    names, function = REFUSED[name]
    assert in_sums(function, *(SUMS[x] for x in names.split())) is None


def one(function, *args):
    """The one equation of a function."""
    (eqn,) = jax.make_jaxpr(function)(*args).eqns
    return eqn


W64, A62, B24, ROW, I64 = whole(6, 4), whole(6, 2), whole(2, 4), whole(4), whole(6, 4).astype(np.int8)
MAY = {
    "a product": (lambda: one(lax.dot, A62, B24), True),
    "one that is no larger": (lambda: one(lax.dot, W64, B24.T), False),
    "one as large as an operand": (lambda: one(lax.dot, W64, W64[:4]), False),
    "a multiple": (lambda: one(lambda w, row: w * row, W64, W64[:1]), True),
    "a quotient": (lambda: one(lambda w, row: w / row, W64, W64[:1]), True),
    "entries": (lambda: one(lax.mul, W64, W64), False),
    "a number times": (lambda: one(lambda w, x: x * w, W64, np.float32(2)), True),
    "twice": (lambda: one(lambda w: 2 * w, W64), False),
    "repeated": (lambda: one(lambda row: lax.broadcast_in_dim(row, (6, 4), (1,)), ROW), True),
    "of one axis": (lambda: one(lambda x: lax.broadcast_in_dim(x, (4,), ()), np.float32(2)), False),
    "of a small range": (lambda: one(lax.dot, A62.astype(np.float16), B24.astype(np.float16)), False),
    "cast integers": (lambda: one(lambda w: lax.convert_element_type(w, np.float32), I64), True),
    "cast": (lambda: one(lambda w: lax.convert_element_type(w, jnp.bfloat16), W64), False),
    "a sum": (lambda: one(lambda w, x: w + x, W64, np.float32(2)), False),
    "a sine": (lambda: one(lax.sin, W64), False),
}


@pytest.mark.parametrize("name", MAY)
def test_an_equation_that_may_make_a_sum(name):
    eqn, expected = MAY[name]
    assert rules.may_make_sum(eqn()) == expected


def test_a_sum_is_made_where_its_factors_are_smaller():
    small, as_large = one(lax.dot, A62, B24), one(lax.mul, W64, W64)
    found = rules.make_if_smaller(small, [A62, B24], [FIXED, FREE])
    assert [f.fixed for f in found.products[0].factors] == [True, False]
    assert (found.shape, found.dtype, found.maker) == ((6, 4), np.float32, None)
    assert rules.make_if_smaller(as_large, [W64, W64], [FREE, FREE]) is None
    assert rules.make_sum(as_large, [W64, W64], [FREE, FREE]) is not None
    cast = rules.make_sum(one(lambda w: lax.convert_element_type(w, np.float32), I64), [I64], [FREE])
    assert (cast.products[0].factors[0].array is I64, cast.dtype) == (True, np.float32)
    assert rules.make_sum(one(lambda w: lax.convert_element_type(w, jnp.bfloat16), W64), [W64], [FREE]) is None
    assert rules.make_sum(one(lax.sin, W64), [W64], [FREE]) is None
    halved = one(lambda a, b: lax.dot(a, b, preferred_element_type=jnp.bfloat16), A62, B24)
    assert rules.make_sum(halved, [SUMS["a"], replace(SUMS["b"], dtype=np.int32)], [FREE, FREE]) is None
    assert rules.make_if_smaller(as_large, [W64, SUMS["low-rank"]], [FREE, FREE]) is not None
    assert rules.make_if_smaller(as_large, [W64, SUMS["two"]], [FREE, FREE]) is None
    assert rules.move_sum(one(lax.sin, W64), [W64]) is None
    repeated = one(lambda row: lax.broadcast_in_dim(row, (6, 4), (1,)), ROW)
    assert rules.move_sum(repeated, [SUMS["vector"], 6]) is None  # as a size is known only when it runs
    assert rules.move_sum(one(lambda: lax.iota(np.int32, 3)), []) is None


def test_the_precision_of_a_product_is_that_of_its_operands_or_its_own():
    highest, high = lax.Precision.HIGHEST, lax.Precision.HIGH
    eqn = one(lambda a, b: lax.dot(a, b, precision=high), A62, B24)
    for of_a, of_b, want in ((None, None, (high, high)), (highest, None, highest), (None, highest, highest)):
        a, b = replace(SUMS["a"], precision=of_a), replace(SUMS["b"], precision=of_b)
        assert rules.make_sum(eqn, [a, b], [FREE, FREE]).precision == want
    for f in (lax.add, lax.mul, lambda a, b: lax.concatenate([a, b], 0)):
        pair = [SUMS["two"], replace(SUMS["two"], precision=high)]
        for each in (pair, pair[::-1]):
            assert rules.make_sum(one(f, W64, W64), each, [FREE, FREE]).precision == high


def test_what_divides_a_weight_has_its_dtype():
    eqn = one(lax.div, *2 * [whole(6, 4).astype(jnp.bfloat16)])
    x, y = (
        sum_of(product("i o", ("io", (W64 + 4).astype(dtype))), dtype=jnp.bfloat16) for dtype in (jnp.bfloat16, np.int8)
    )
    assert [f.array.dtype for f in rules.make_sum(eqn, [x, y], [FREE, FREE]).products[0].factors] == [jnp.bfloat16] * 2


def test_factors_are_cast_stopped_and_marked_themselves():
    x = sum_of(product("i o", ("ir", whole(6, 2)), ("ro", whole(2, 4).astype(np.int8))))
    (cast,) = rules.move_sum(one(lambda w: lax.convert_element_type(w, jnp.bfloat16), W64), [x])
    assert [f.array.dtype for f in cast.products[0].factors] == [jnp.bfloat16, np.int8]
    (stopped,) = rules.move_sum(one(lax.stop_gradient, W64), [x])
    assert [f.fixed for f in stopped.products[0].factors] == [True, True]

    def stopped_array(w):
        return rules.move_sum(one(lax.stop_gradient, W64), [sum_of(product("i o", ("io", w)))])

    assert [eqn.primitive.name for eqn in jax.make_jaxpr(stopped_array)(W64).eqns] == ["stop_gradient"]

    def on_shard(y):
        (varying,) = rules.move_sum(one(lambda y: jaxprs.as_varying(y, ["a"]), y), [SUMS["rotated"]])
        leaves = jax.tree.leaves([f.array for f in varying.products[0].factors])
        assert [jaxprs.varying_axes([jax.typeof(leaf)]) for leaf in leaves] == [{"a"}, {"a"}]
        return y

    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    jax.eval_shape(jax.shard_map(on_shard, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()), W64)


def test_the_cost_of_an_output_as_an_array():
    product, entries = one(lax.dot, A62, B24), one(lax.mul, W64, W64)
    assert rules.cost_to_form(product, [FREE, FIXED]) == 2 * 2 * 48 + 16 * (24 + 12)
    assert rules.cost_to_form(entries, [FREE, FIXED]) == 16 * 24 * 2
    assert rules.cost_to_form(entries, [FREE, FREE]) == 16 * 24 * 3
    assert rules.cost_to_form(one(lax.dot, A62[:, :0], B24[:0]), [FREE, FREE]) == math.inf


def test_numbers_of_negations_are_multiplied_into_one():
    x = rules.make_sum(one(lambda w, x: w * x, W64, np.float32(2)), [W64, np.float32(2)], [FREE, FIXED])
    draw = Factor(np.float32(3), (), fixed=True, draw=Draw("noise", 0))
    x = replace(x, products=(Product((*x.products[0].factors, draw), x.products[0].axes),))
    for n in (1, 2):
        x = rules.negate_sum(x)
        drawn, (w, *numbers) = x.products[0].factors[1], [f for f in x.products[0].factors if f.draw is None]
        assert (drawn.draw, w.array is W64) == (draw.draw, True)
        assert [(float(f.array), f.fixed) for f in numbers] == [((-1) ** n * 2, True)]
    factors = [Factor(dtype(2), (), fixed) for dtype, fixed in ((np.int8, True), (jnp.bfloat16, False))]
    (found,) = rules.negate_sum(sum_of(Product(tuple(factors), ()), dtype=jnp.bfloat16)).products
    assert [(f.array, f.array.dtype, f.fixed) for f in found.factors] == [(-4, jnp.bfloat16, False)]


def test_parts_of_one_structure_are_joined_into_one_product():
    a, b = SUMS["two"], replace(SUMS["two"], products=SUMS["two"].products[::-1])
    eqn = one(lambda v, w: lax.concatenate([v, w], 0), W64, W64)
    stacked = one(lambda v, w: lax.concatenate([v, w], 0), W64[None], W64[None])
    as_stacked = [rules.broadcast_sum(x, (1, 6, 4), (1, 2)) for x in (a, a)]
    scaled = rules.make_sum(one(lambda w, x: w * x, W64, np.float32(2)), [a, SUMS["scalar"]], [FREE, FREE])
    pairs = ([a, a], [a, b], [scaled, scaled])
    counts = [len(rules.make_sum(eqn, pair, [FREE, FREE]).products) for pair in pairs]
    assert counts == [3, 4, 3]  # as the low ranks have factors without rows, which differ
    along_columns = one(lambda v, w: lax.concatenate([v, w], 1), *2 * [whole(6, 5)])
    for p in rules.make_sum(along_columns, [SUMS["repeated"]] * 2, [FREE, FREE]).products:
        assert [f.fixed for f in p.factors] == [False, True]  # the second are ones
    found = rules.make_sum(stacked, as_stacked, [FREE, FREE])
    assert [[f.array.shape[0] for f in p.factors] for p in found.products] == [[2, 2], [2]]
    fixed = replace(
        a, products=tuple(Product(tuple(replace(f, fixed=True) for f in p.factors), p.axes) for p in a.products)
    )
    assert [f.fixed for f in rules.make_sum(eqn, [fixed, a], [FREE] * 2).products[1].factors] == [False]
    assert [f.fixed for f in rules.make_sum(eqn, [fixed, fixed], [FREE] * 2).products[1].factors] == [True]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_stack_joins_along_a_new_axis(axis):
    """As newer versions of JAX write it."""
    eqn = one(lambda v, w: lax.concatenate([v, w], axis), *2 * [np.expand_dims(W64, axis)])
    stacked = eqn.replace(primitive=Primitive("stack"), params={"axis": axis})
    v, w = SUMS["two"], SUMS["low-rank"]
    want = np.stack([array_of_sum(v), array_of_sum(w)], axis)
    np.testing.assert_array_equal(array_of_sum(rules.make_sum(stacked, [v, w], [FREE, FREE])), want)


def test_a_choice_adds_both_cases_where_they_are_chosen():
    which, v = W64 > 0, SUMS["two"]
    found = rules.select_sum([which, v, W64])
    np.testing.assert_array_equal(array_of_sum(found), np.where(which, W64, array_of_sum(v)))
    assert (found.shape, found.dtype) == ((6, 4), np.float32)
    arrays = rules.select_sum([which, W64, W64]).products
    assert [[factor.fixed for factor in p.factors] for p in arrays] == [[False, True]] * 2
    narrow = rules.select_sum([which, *2 * [W64.astype(jnp.bfloat16)]])
    assert {narrow.dtype, *(f.array.dtype for p in narrow.products for f in p.factors)} == {np.dtype(jnp.bfloat16)}
    number = rules.select_sum([np.array(1), v, v])
    assert rules.select_sum([np.int32(1), v, v, v]) is None
    assert rules.select_sum([v, v, v]) is None
    assert rules.select_sum([W64[:4] > 0, SUMS["diagonal"], W64[:4]]) is None
    np.testing.assert_array_equal(array_of_sum(number), array_of_sum(v))


def test_only_factors_that_need_the_axis_of_a_look_up_are_repeated():
    eqn = one(taken(0, "fill", (1, 6, 4)), whole(3, 6, 4))

    def shapes(x, **settings):
        found = rules.look_up(view_of(eqn), x, [PLACES], **settings)
        return found and [f.array.shape for f in found.products[0].factors]

    x = SUMS["one-sided"]
    a, b = x.products[0].factors
    fixed = replace(x, products=(Product((replace(a, fixed=True), b), x.products[0].axes),))
    assert shapes(x) == [(4, 6, 2), (4, 2, 4)]
    assert shapes(fixed) == shapes(x, nearest=True) == [(6, 2), (4, 2, 4)]
    promised = view_of(one(taken(0, "promise_in_bounds", (1, 6, 4)), whole(3, 6, 4)))
    found = rules.look_up(promised, x, [PLACES]).products[0].factors
    assert [f.array.shape for f in found] == [(4, 6, 2), (4, 2, 4)]
    drawn = replace(b, draw=Draw("noise", 0, rows=2), fixed=True)
    drawn_sum = replace(x, products=(Product((replace(a, fixed=True), drawn), x.products[0].axes),))
    assert shapes(drawn_sum) == [(4, 6, 2), (4, 2, 4)]
    table = one(ROWS["looked up in a table of places"][1], whole(3, 6, 4))
    for each, places in ((eqn, PLACES), (table, PLACES.reshape(2, 2, 1))):
        assert rules.look_up(view_of(each), drawn_sum, [places]).products[0].factors[1].draw.rows == 8
    alone = replace(x, products=(Product((drawn,), x.products[0].axes),))
    assert shapes(alone) is None
    assert rules.look_up(view_of(eqn), x, [x]) is None
    assert shapes(sum_of(product("b i o", ("bi", np.ones((3, 6), np.int8)), ("o", np.ones(4, np.int8))))) is None
    fixed = sum_of(product("b i o", ("bi", np.ones((3, 6), np.int8)), ("o", whole(4)), fixed=(0, 1)))
    assert shapes(fixed) == [(4, 6), (4, 4)]
    filled = one(taken(0, "fill", (1, 6, 4), fill_value=7), whole(3, 6, 4))
    nearest = rules.look_up(view_of(filled), x, [PLACES], nearest=True)
    np.testing.assert_array_equal(array_of_sum(nearest), array_of_sum(x)[[2, 2, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "nearest", "expected"),
    [
        ("fill", False, "fill"),
        ("clip", False, "clip"),
        ("promise_in_bounds", False, "promise_in_bounds"),
        ("fill", True, "clip"),
        ("clip", True, "clip"),
        ("promise_in_bounds", True, "promise_in_bounds"),
    ],
)
def test_factors_are_looked_up_in_the_mode_of_the_weight(mode, nearest, expected):
    view, x = view_of(one(taken(0, mode, (1, 6, 4)), whole(3, 6, 4))), SUMS["one-sided"]

    def factors(places):
        return [factor.array for factor in rules.look_up(view, x, [places], nearest=nearest).products[0].factors]

    kinds = [view_of(eqn) for eqn in jax.make_jaxpr(factors)(PLACES).eqns]
    modes = {view.mode for view in kinds if isinstance(view, Gather)}
    assert modes == {lax.GatherScatterMode.from_any(expected)}


PLACED = {
    "summed": lambda w: jnp.sum(w, 0),
    "reshaped": lambda w: lax.reshape(w, (2, 12)),
    "broadcast": lambda w: lax.broadcast_in_dim(w, (3, 6, 4), (1, 2)),
    "narrowed": lambda w: lax.convert_element_type(w, jnp.bfloat16),
    "contracted": lambda w: lax.dot_general(w, w, (((0,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("name", PLACED)
def test_an_equation_that_places_its_output_needs_arrays(name):
    eqn = one(PLACED[name], W64)
    for param, is_kept in (({}, True), ({"sharding": "there"}, False), ({"out_sharding": "there"}, False)):
        placed, operands = eqn.replace(params=eqn.params | param), [SUMS["two"]] * len(eqn.invars)
        kept = rules.move_sum(placed, operands) or rules.make_sum(placed, operands, [FREE] * 2)
        assert (kept is not None) == is_kept
