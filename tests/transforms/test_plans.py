"""What a plan decides and tells about weights, and how products use them: costs and values that are written by hand."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from one_array import normal

from reparax.programs.equations import view_of
from reparax.programs.sums import Factor, Label, Product, Sum
from reparax.transforms import _local
from reparax.transforms._factored import (
    Factoring,
    Record,
    SumPlan,
    SumRead,
    _split_kernel,
    costs_of_lookup,
    plan_sums,
    weight_use,
)

# ---- which weights are formed


def read(times=1, in_factors=None, as_array=0.0, *, formula=False):
    """A read, which needs the array if ``in_factors`` is left out."""
    return SumRead(None, times, formula, in_factors, as_array)


def record(cost, *reads, times=1, parents=(), origins=(0,), if_formed=None):
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    return Record(None, shape, frozenset(origins), parents, cost, times, list(reads), read_if_formed=if_formed)


COSTS = {
    "a product": (record(10, read(2, 3, 5)), (6, 20), False),
    "two products": (record(1, read(1, 3, 1), read(1, 4, 1)), (7, 3), True),
    "a product for the same": (record(2, read(1, 3, 1)), (3, 3), False),
    "the array": (record(10, read()), (10, 10), True),
    "the array, and a product": (record(10, read(1, 3, 5), read()), (13, 15), False),
    "the array in four steps, of a weight of two": (record(10, read(4), read(2), times=2), (20, 10), True),
    "the array in four steps, of a weight of none": (record(10, read(4), times=0), (40, 10), True),
    "nothing": (record(10), (0, 10), False),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_weight_is_formed_where_that_costs_less(name):
    found, costs, is_cheaper_formed = COSTS[name]
    assert found.costs == costs
    assert found.is_cheaper_formed == is_cheaper_formed


CHEAP, DEAR = read(1, 1, 5), read(1, 9, 1)
PLANS = {
    "each for itself": ({"w": record(1, CHEAP), "v": record(1, DEAR)}, "v"),
    "a parent of factors stays in factors": ({"w": record(1, DEAR), "v": record(9, CHEAP, parents=["w"])}, ""),
    "and so does the parent of a parent": (
        {"u": record(1, DEAR), "w": record(1, parents=["u"]), "v": record(9, CHEAP, parents=["w"])},
        "",
    ),
    "a parent of what nobody reads": ({"w": record(1, DEAR), "v": record(1, parents=["w"])}, "w"),
    "what is formed reads the array of its parent": ({"w": record(1), "v": record(1, DEAR, parents=["w"])}, "vw"),
    "or its factors": ({"w": record(9), "v": record(1, DEAR, parents=["w"], if_formed=read(1, 2, 5))}, "v"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_decides_from_the_last_weight_to_the_first(name):
    records, formed = PLANS[name]
    plan = SumPlan()
    plan.records = {
        maker: record(x.cost_to_form, *x.reads, parents=x.parents, if_formed=x.read_if_formed)
        for maker, x in records.items()
    }
    weight = Sum((), (), None, None, "w")
    plan.record_read(weight, read(1, 0, 0))
    before = len(plan.records["w"].reads)
    plan.decide()
    plan.record_read(weight, read())
    assert plan.is_decided
    assert len(plan.records["w"].reads) <= before + 1
    assert "".join(sorted(maker for maker in records if plan.forms(maker))) == formed
    assert plan.forms("another")


def test_a_plan_tells_of_each_weight_that_the_network_reads_or_of_the_last_that_formulas_read():
    plan = SumPlan()
    plan.records = {
        "two products": record(2, read(1, 1, 8), read(1, 4, 2), read(formula=True), origins=[0]),
        "formed": record(1, read(1, 6, 1), read(1, 6, 2), origins=[1]),
        "returned": record(2, read(), origins=[2]),
        "formula": record(2, read(1, 3, 4, formula=True), origins=[0]),
        "first formula": record(2, read(1, 3, 4, formula=True), origins=[3]),
        "last formula": record(4, read(1, 3, 8, formula=True), origins=[3]),
        "empty": record(0, read(1, 0, 0), origins=[4]),
        "not read": record(4, origins=[5]),
    }
    plan.decide()
    told = [(each.path, each.is_transformed, each.reason) for each in plan.weights(dict(enumerate("abcdef")), {})]
    assert told == [
        ("a", True, "2 products, 0.58 of the operations"),
        ("b", False, "2 products; factors would take 3.00 of the operations"),
        ("c", False, "it is returned, or carried"),
        ("e", True, "1 product, 1.00 of the operations"),
        ("d", True, "1 product, 0.25 of the operations"),
    ]


# ---- products with weights in factors


def pair(loop, out, *gradients):
    """What a product costs that sums: two operations for each of the loop, and 16 for each number that is written.

    The gradient of a factor, of which there is the size here, is a product that runs over the same loop.
    """
    return 2 * loop + 16 * out + sum(2 * loop + 16 * size for size in gradients)


LABELS = {letter: Label(size) for letter, size in zip("iorsekcw", (6, 5, 2, 3, 4, 3, 4, 1), strict=True)}


def labels(letters):
    return tuple(LABELS[letter] for letter in letters)


def weight(spec, *, fixed=False, dtype=np.float32):
    """A sum of products of normal factors: "ir,ro->io" has two factors and two axes; and its array."""
    terms, axes = [term.split(",") for term in spec.split("->")[0].split("+")], spec.split("->")[1]
    arrays = [
        [normal(*(LABELS[k].size for k in each), seed=i, dtype=dtype) for i, each in enumerate(term)] for term in terms
    ]
    products = tuple(
        Product(
            tuple(Factor(x, labels(k), fixed) for x, k in zip(xs, term, strict=True)), tuple((LABELS[k],) for k in axes)
        )
        for xs, term in zip(arrays, terms, strict=True)
    )
    dense = sum(np.einsum(",".join(term) + "->" + axes, *xs) for xs, term in zip(arrays, terms, strict=True))
    return Sum(products, dense.shape, np.dtype(dtype), None, None), dense


LOW = "ir,ro->io"
X, IDS, GROUPS = (
    normal(8, 6, seed=9),
    np.array([[0, 5, 9], [-7, 2, 5]], np.int32)[..., None],
    np.array([3, 5], np.int32),
)
IMAGES, TURNED = normal(2, 9, 4, seed=8), normal(4, 2, 9, seed=8)


def look_up(mode, fill_value=None, axis=0):
    numbers = lax.GatherDimensionNumbers((2,), (axis,), (axis,))
    return lambda w, ids: lax.gather(
        w, ids, numbers, [1 if i == axis else n for i, n in enumerate(w.shape)], mode=mode, fill_value=fill_value
    )


def convolved(layouts=("NHC", "HIO", "NHC"), **settings):
    settings = {"window_strides": (1,), "padding": "VALID", "dimension_numbers": layouts} | settings
    return lambda w, x: lax.conv_general_dilated(x, w, **settings)


def use_of(fun, *operands):
    """How the one equation of a function uses its operand that is a sum."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    program = jax.make_jaxpr(fun)(*types).jaxpr
    (eqn,) = program.eqns
    of = dict(zip(program.invars, operands, strict=True))
    return weight_use(eqn, [of[v] for v in eqn.invars])


def rows_of(w, ids, *, outside):
    """Rows, of which two are not there, and ``outside`` in their place: the nearest row if it is None."""
    ids = ids[..., 0]
    rows, is_inside = w[np.clip(ids, 0, len(w) - 1)], (ids >= 0) & (ids < len(w))
    return rows if outside is None else np.where(is_inside[..., None], rows, outside)


# A function of a weight and data, the weight, the data, its result, and what it costs with factors and with the array.
USES = {
    "a product": (
        lambda w, x: lax.dot(x, w),
        weight(LOW),
        X,
        lambda w, x: x @ w,
        (
            pair(8 * 6 * 2, 8 * 2, 8 * 6, 6 * 2) + pair(8 * 2 * 5, 8 * 5, 8 * 2, 2 * 5),
            pair(8 * 6 * 5, 8 * 5, 8 * 6, 6 * 5),
        ),
    ),
    "a fixed weight": (
        lambda w, x: lax.dot(x, w),
        weight(LOW, fixed=True),
        X,
        lambda w, x: x @ w,
        (pair(8 * 6 * 2, 8 * 2, 8 * 6) + pair(8 * 2 * 5, 8 * 5, 8 * 2), pair(8 * 6 * 5, 8 * 5, 8 * 6)),
    ),
    "a weight on the left, of two terms": (
        lambda w, x: lax.dot_general(w, x, (((0,), (1,)), ((), ()))),
        weight("ir,ro+is,so->io"),
        X,
        lambda w, x: w.T @ x.T,
        (
            pair(8 * 6 * 2, 8 * 2, 8 * 6, 6 * 2)
            + pair(8 * 2 * 5, 8 * 5, 8 * 2, 2 * 5)
            + pair(8 * 6 * 3, 8 * 3, 8 * 6, 6 * 3)
            + pair(8 * 3 * 5, 8 * 5, 8 * 3, 3 * 5),
            pair(8 * 6 * 5, 8 * 5, 8 * 6, 6 * 5),
        ),
    ),
    "rows, the nearest": (
        look_up("clip"),
        weight(LOW),
        IDS,
        partial(rows_of, outside=None),
        (16 * 30 + pair(6 * 2 * 5, 6 * 5, 6 * 2, 2 * 5), 16 * 30 + 16 * 30),
    ),
    "rows of a fixed weight, or NaN": (
        look_up("fill"),
        weight(LOW, fixed=True),
        IDS,
        partial(rows_of, outside=np.nan),
        (16 * 30 + pair(6 * 2 * 5, 6 * 5), 16 * 30),
    ),
    "rows, or a number": (look_up("fill", 7.0), weight(LOW), IDS, partial(rows_of, outside=7.0)),
    "rows, promised": (look_up("promise_in_bounds"), weight(LOW), IDS, partial(rows_of, outside=None)),
    "columns": (look_up("fill", 7.0, axis=1), weight("or,ri->oi"), IDS, lambda w, ids: rows_of(w.T, ids, outside=7.0)),
    "a convolution": (
        convolved(),
        weight("kcr,ro->kco"),
        IMAGES,
        lambda w, x: sum(x[:, i : i + 7] @ w[i] for i in range(3)),
        (6 * 14 * 12 * 2 + pair(14 * 2 * 5, 14 * 5, 14 * 2, 2 * 5), 6 * 14 * 12 * 5),
    ),
    "a convolution with a fixed kernel": (
        convolved(),
        weight("kcr,ro->kco", fixed=True),
        IMAGES,
        lambda w, x: sum(x[:, i : i + 7] @ w[i] for i in range(3)),
        (4 * 14 * 12 * 2 + pair(14 * 2 * 5, 14 * 5, 14 * 2), 4 * 14 * 12 * 5),
    ),
    "a convolution whose kernel is not split": (
        convolved(),
        weight("kr,rco->kco"),
        IMAGES,
        lambda w, x: sum(x[:, i : i + 7] @ w[i] for i in range(3)),
        (6 * 14 * 12 * 5 + pair(3 * 2 * 20, 3 * 20, 3 * 2, 2 * 20), 6 * 14 * 12 * 5),
    ),
    "a convolution of other layouts and strides": (
        convolved(("CNH", "IOH", "NCH"), window_strides=(2,), padding=[(1, 0)], rhs_dilation=(2,)),
        weight("crk,ro->cok"),
        TURNED,
        lambda w, x: np.stack(
            [
                sum(np.pad(x, [(0, 0), (0, 0), (1, 0)])[:, :, i + 2 * j].T @ w[:, :, j] for j in range(3))
                for i in range(0, 6, 2)
            ],
            2,
        ),
    ),
}


@pytest.mark.parametrize("name", [name for name, row in USES.items() if len(row) == 5])
def test_the_costs_of_a_use_are_those_by_hand(name):
    fun, (of, _), data, _, costs = USES[name]
    found = []
    jax.eval_shape(lambda data: found.append(use_of(fun, of, data).costs()), data)
    assert found == [costs]


def test_values_of_uses_are_those_of_the_array():
    found = jax.jit(lambda: {name: use_of(fun, of, x).compute() for name, (fun, (of, _), x, *_) in USES.items()})()
    for name, (_, (_, w), x, by_hand, *_) in USES.items():
        np.testing.assert_allclose(found[name], by_hand(w, x), rtol=1e-5, atol=1e-5, err_msg=name)


def test_rows_that_are_not_there_have_no_gradients():
    (of, _), out = weight(LOW), {"clip": [0, 5, 5, 0, 2, 5], "promise_in_bounds": [0, 5, 2, 5], "fill": [0, 5, 2, 5]}

    def slopes(mode):
        def total(factors):
            found = [
                Factor(x, factor.labels, fixed=False) for x, factor in zip(factors, of.products[0].factors, strict=True)
            ]
            changed = Sum((Product(tuple(found), of.products[0].axes),), of.shape, of.dtype, None, None)
            return jnp.sum(use_of(look_up(mode, 0.0), changed, IDS).compute())

        return jax.grad(total)([factor.array for factor in of.products[0].factors])

    a, b = (factor.array for factor in of.products[0].factors)
    found = jax.jit(lambda: {mode: slopes(mode) for mode in out})()
    for mode, (slope_a, slope_b) in found.items():
        counts = np.bincount(out[mode], minlength=6)
        np.testing.assert_allclose(slope_a, counts[:, None] * b.sum(1), rtol=1e-5, atol=1e-5, err_msg=mode)
        np.testing.assert_allclose(slope_b, np.repeat((counts @ a)[:, None], 5, 1), rtol=1e-5, atol=1e-5, err_msg=mode)


SMALL_IDS = IDS.astype(np.int8)
NEEDING_THE_ARRAY = {
    "no product": (lambda w, x: lax.add(w, x), weight(LOW)[0], normal(6, 5)),
    "two weights": (lambda w, x: lax.dot(x, w), weight(LOW)[0], weight("or,ri->oi")[0]),
    "another dtype": (
        lambda w, x: lax.dot(x, w, preferred_element_type=np.float32),
        weight(LOW)[0],
        X.astype(jnp.bfloat16),
    ),
    "few bits": (lambda w, x: lax.dot(x, w, precision="F16_F16_F32"), weight(LOW)[0], X),
    "few bits in a convolution": (
        convolved(preferred_element_type=np.int32),
        weight("kcr,ro->kco", dtype=np.int8)[0],
        IMAGES.astype(np.int8),
    ),
    "whole numbers": (lambda w, x: lax.dot(x, w), weight(LOW, dtype=np.int32)[0], X.astype(np.int32)),
    "sizes of groups": (
        lambda w, x, y: lax.ragged_dot(x, y, w),
        Sum((Product.of(GROUPS, fixed=True),), (2,), GROUPS.dtype, None, None),
        X,
        normal(2, 6, 5),
    ),
    "places": (look_up("fill"), normal(6, 5), Sum((Product.of(IDS, fixed=True),), IDS.shape, IDS.dtype, None, None)),
    "data of a convolution": (convolved(), normal(3, 4, 5), weight("ekr,rc->ekc")[0]),
    "groups of features": (convolved(feature_group_count=2), weight("wcr,re->wce")[0], normal(2, 9, 8)),
    "groups of examples": (convolved(batch_group_count=5), weight("kcr,ro->kco")[0], normal(5, 9, 4)),
    "two axes": (
        lambda w, ids: lax.gather(w, ids, lax.GatherDimensionNumbers((), (0, 1), (0, 1)), (1, 1)),
        weight(LOW)[0],
        np.zeros((3, 2), np.int32),
    ),
    "another mode": (look_up("one_hot"), weight(LOW)[0], IDS),
}


@pytest.mark.parametrize("name", NEEDING_THE_ARRAY)
def test_other_equations_need_the_array(name):
    assert use_of(*NEEDING_THE_ARRAY[name]) is None


def test_a_kernel_is_split_where_some_factors_only_mix_its_channels():
    k, c, r, o = labels("kcro")
    window, mixing = Factor(normal(3, 4, 2), (k, c, r), fixed=False), Factor(normal(2, 5), (r, o), fixed=False)
    number, scale = Factor(np.float32(2), (), fixed=True), Factor(normal(5), (o,), fixed=True)

    def split(axis, *factors, axes=((k,), (c,), (o,))):
        found = _split_kernel(Product(factors, axes), axis)
        mixing = found and found.mixing and found.mixing.factors
        return found and [found.n_channels, *(id(x) for x in found.kernel.factors), None, *map(id, mixing or ())]

    def parts(channels, kernel, *mixing):
        return [channels, *map(id, kernel), None, *map(id, mixing)]

    assert split(2, window, mixing) == parts(2, [window], mixing)
    assert split(2, window, number, mixing, scale) == parts(2, [window, number], mixing, scale)
    assert split(0, window, mixing, axes=((o,), (k,), (c,))) == parts(2, [window], mixing)
    whole = Factor(normal(3, 4, 5), (k, c, o), fixed=False)
    assert split(2, whole, scale) == parts(5, [whole, scale])  # a factor of the window has the channels too
    assert split(2, scale) == parts(5, [scale])
    assert split(2, window) == parts(5, [window])
    assert split(2, mixing, axes=((r,), (), (r,))) is None


def test_the_costs_of_looking_up_matrices_of_experts():
    """Of four matrices (6, 5), three are looked up; a factor that all share is not."""
    (of, _), (each, _) = weight("eir,ro->eio"), weight("sir,ro->sio")
    shared = of.products[0].factors[1]
    rows = Sum(
        (Product((each.products[0].factors[0], shared), each.products[0].axes),), each.shape, each.dtype, None, None
    )
    from_factors = 16 * 90 + pair(3 * 6 * 2 * 5, 90, 3 * 6 * 2, 2 * 5)
    assert costs_of_lookup(of, rows) == (2 * 16 * 36, from_factors, 16 * 90 + 16 * 120)


def test_looked_up_matrices_are_formed_in_the_cheaper_way():
    (of, _), (rows, _) = weight("eir,ro->eio"), weight("sir,ro->sio")
    plan = SumPlan()
    plan.records["w"] = record(50)
    operation = SimpleNamespace(
        eqn=None,
        args=[replace(of, maker="w")],
        facts=[SimpleNamespace(origins=frozenset([3]))],
        interpreter=SimpleNamespace(times=2, in_formula=False),
    )
    cost, from_factors, from_array = costs_of_lookup(of, rows)
    found = Factoring(plan)._record_of_lookup(operation, rows)
    assert found.cost_to_form == min(2 * from_factors, 2 * from_array + 50)
    assert (found.times, found.parents, found.origins) == (2, ["w"], {3})
    assert found.reads == [SumRead(None, 2, True, cost)]
    assert found.read_if_formed == SumRead(None, 2, False, from_factors, from_array)
    plan.records["w"] = record(1e9)
    assert Factoring(plan)._record_of_lookup(operation, rows).cost_to_form == 2 * from_factors


def test_a_plan_records_what_makes_sums_and_what_reads_them():
    def loss(a, b, x):
        w = a @ b
        y = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ (2 * w)), x)
        return y @ (w + w), jnp.abs(w), jnp.ones((64, 1)) @ jnp.ones((1, 64)) @ jnp.ones((64, 1))

    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in [(64, 2), (2, 64), (8, 64)]]
    program = jax.make_jaxpr(loss)(*args).jaxpr
    records = [*plan_sums(program, args, [True, True, False])[0].records.values()]
    of, twice, doubled = records
    product = pair(64 * 64 * 2, 64 * 64, 64 * 2, 64 * 2)
    assert [record.times for record in records] == [1, 3, 1]
    assert of.cost_to_form == product
    # Writing the result and the gradient of each array, in each step.
    assert twice.cost_to_form == product + 3 * 2 * 16 * 64 * 64
    assert doubled.cost_to_form == product + 3 * 16 * 64 * 64
    assert [len(record.parents) for record in records] == [0, 1, 1]
    assert [record.origins for record in records] == [{0, 1}] * 3
    reads = [[(read.times, read.in_formula, read.needs_array) for read in record.reads] for record in records]
    assert reads == [[(1, False, True)], [(3, False, False)], [(1, False, False)]]


# ---- noise of products


def repeated_over_channels(n):
    """Deviations that differ along a window alone, for kernels of 2 input and ``n`` output channels."""
    k = Label(3)
    product = Product((Factor(normal(3), (k,), fixed=False),), ((k,), (Label(2),), (Label(n),)))
    return Sum((product,), (3, 2, n), np.dtype("f4"), None, None), np.broadcast_to(normal(3)[:, None, None], (3, 2, n))


def by_windows(x, kernel, groups=1):
    """A convolution, as a sum over the window."""
    xs, ws = (np.split(each, groups, -1) for each in (x, kernel))
    return np.concatenate([sum(x[:, i : i + 7] @ w[i] for i in range(3)) for x, w in zip(xs, ws, strict=True)], -1)


# An equation, the deviations of its weight, the place of the weight, the data, and the variance.
VARIANCES = {
    "a product": (lambda w, x: lax.dot(x, w), weight("io,o->io"), 1, X, lambda v, x: x**2 @ v),
    "a convolution": (convolved(), weight("kco->kco"), 1, IMAGES, lambda v, x: by_windows(x**2, v)),
    "with one deviation": (
        convolved(),
        repeated_over_channels(5),
        1,
        IMAGES[..., :2],
        lambda v, x: by_windows(x**2, v),
    ),
    "in groups": (
        convolved(feature_group_count=2),
        repeated_over_channels(6),
        1,
        IMAGES,
        lambda v, x: by_windows(x**2, v, 2),
    ),
    "rows": (look_up("clip"), weight("io->io"), 0, IDS, partial(rows_of, outside=None)),
    "rows that are not there": (look_up("fill"), weight("io->io"), 0, IDS, partial(rows_of, outside=0.0)),
    "a multiple": (lambda w, x: lax.mul(w, x), weight("io->io"), 0, normal(6, 5), lambda v, x: v * x**2),
    "a fraction": (lambda w, x: lax.div(w, x), weight("io->io"), 0, normal(6, 5), lambda v, x: v / x**2),
    "a sum": (lambda w, x: lax.add(x, w), weight("io->io"), 1, normal(6, 5), lambda v, x: v),
}
NOT_LINEAR = {
    "a fraction": (lambda w, x: lax.div(x, w), weight("io->io")[0], 1, normal(6, 5)),
    "places": (look_up("clip"), weight("io->io")[0], 1, IDS),
    "data of a convolution": (convolved(), weight("kco->kco")[0], 0, IMAGES),
    "groups of examples": (convolved(batch_group_count=5), weight("kco->kco")[0], 1, normal(5, 9, 4)),
    "another equation": (lambda w, x: lax.max(w, x), weight("io->io")[0], 0, normal(6, 5)),
}


def view_for(fun, of, x):
    (eqn,) = jax.make_jaxpr(fun)(jax.ShapeDtypeStruct(of.shape, of.dtype), x).jaxpr.eqns
    return view_of(eqn)


def test_variances_are_those_of_squared_operands():
    def variance(fun, found, operand, x, _):
        return _local._variance(view_for(fun, found[0], x), operand, (x,), _local._square_factors(found[0]))

    found = jax.jit(lambda: {name: variance(*row) for name, row in VARIANCES.items()})()
    for name, (_, (_, dense), _, x, by_hand) in VARIANCES.items():
        np.testing.assert_allclose(found[name], by_hand(np.square(dense), x), rtol=1e-5, atol=1e-6, err_msg=name)


def test_rows_draw_where_an_equation_is_linear_in_a_weight_whose_entries_differ():
    def is_linear(fun, of, operand, x, *, repeat=False):
        return _local._is_linear(
            view_for(fun, of, x), operand, (x,), SimpleNamespace(std=of, entries_may_repeat=repeat)
        )

    for name, (fun, (of, _), operand, x, _) in VARIANCES.items():
        assert is_linear(fun, of, operand, x), name
        is_elementwise = name in ("a multiple", "a fraction", "a sum")
        assert is_linear(fun, of, operand, x, repeat=True) == is_elementwise, name
    for name, row in NOT_LINEAR.items():
        assert not is_linear(*row), name
