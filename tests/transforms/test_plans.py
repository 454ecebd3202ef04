"""What a plan decides and tells about weights, and how products use them: costs and values that are written by hand."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from one_array import normal

from reparax.programs import jaxprs
from reparax.programs.equations import view_of
from reparax.programs.rules import cast_sum
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
    "the array, and a product for the same": (record(10, read(1, 5, 5), read()), (15, 15), True),
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
    "a parent of factors stays in factors": ({"w": record(1, DEAR), "v": record(9, CHEAP, parents=["w"])}, ""),
    "and so does the parent of a parent": (
        {"u": record(1, DEAR), "w": record(1, parents=["u"]), "v": record(9, CHEAP, parents=["w"])},
        "",
    ),
    "what is formed reads the array of its parent": ({"w": record(1), "v": record(1, DEAR, parents=["w"])}, "vw"),
    "or its factors": ({"w": record(9), "v": record(1, DEAR, parents=["w"], if_formed=read(1, 2, 5))}, "v"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_decides_from_the_last_weight_to_the_first(name):
    plan = SumPlan()
    plan.records, formed = PLANS[name]
    plan.decide()
    before = [len(each.reads) for each in plan.records.values()]
    plan.record_read(Sum((), (), None, None, "w"), read())
    assert [len(each.reads) for each in plan.records.values()] == before
    assert "".join(sorted(maker for maker in plan.records if plan.forms(maker))) == formed
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


LABELS = {letter: Label(size) for letter, size in zip("iorsekcwt", (6, 5, 2, 3, 4, 3, 4, 1, 258), strict=True)}


def weight(spec, *, fixed=False, dtype=np.float32):
    """A sum of products of normal factors: "ir,ro->io" has two factors and two axes; and its array."""
    (terms, axes), products, dense = spec.split("->"), [], 0
    for term in terms.split("+"):
        letters = term.split(",")
        arrays = [normal(*(LABELS[k].size for k in each), seed=i, dtype=dtype) for i, each in enumerate(letters)]
        factors = (Factor(x, tuple(map(LABELS.get, k)), fixed) for x, k in zip(arrays, letters, strict=True))
        products.append(Product(tuple(factors), tuple((LABELS[k],) for k in axes)))
        dense = dense + np.einsum(f"{term}->{axes}", *arrays)
    return Sum(tuple(products), dense.shape, np.dtype(dtype), None, None), dense


LOW = "ir,ro->io"
X, IDS = normal(8, 6, seed=9), np.array([[0, 5, 6], [-1, 2, 5]], np.int32)[..., None]
IMAGES, TURNED = normal(2, 9, 4, seed=8), normal(4, 2, 9, seed=8)


def product(w, x):
    return lax.dot(x, w)


def look_up(mode, fill_value=None):
    numbers = lax.GatherDimensionNumbers((2,), (0,), (0,))
    return lambda w, ids: lax.gather(w, ids, numbers, (1, w.shape[1]), mode=mode, fill_value=fill_value)


def convolved(layouts=("NHC", "HIO", "NHC"), **settings):
    settings = {"window_strides": (1,), "padding": "VALID", "dimension_numbers": layouts} | settings
    return lambda w, x: lax.conv_general_dilated(x, w, **settings)


def traced(fun, *operands):
    """The one equation of a function, and its operands."""
    program = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)).jaxpr
    (eqn,) = program.eqns
    return eqn, list(map(dict(zip(program.invars, operands, strict=True)).get, eqn.invars))


def use_of(fun, *operands):
    return weight_use(*traced(fun, *operands))


def by_windows(x, kernel, groups=1):
    """A convolution, as a sum over the window."""
    xs, ws = (np.split(each, groups, -1) for each in (x, kernel))
    return np.concatenate([sum(x[:, i : i + 7] @ w[i] for i in range(3)) for x, w in zip(xs, ws, strict=True)], -1)


def by_strides(w, x):
    """A convolution of another layout, every second step, with a wider window that begins before the first place."""
    x = np.pad(x, [(0, 0), (0, 0), (1, 0)])
    return np.stack([sum(x[:, :, i + 2 * j].T @ w[:, :, j] for j in range(3)) for i in range(0, 6, 2)], 2)


def rows_of(w, ids, *, outside):
    """Rows, of which two are not there, and ``outside`` in their place: the nearest row if it is None."""
    ids = ids[..., 0].astype(int)
    rows, is_inside = w[np.clip(ids, 0, len(w) - 1)], (ids >= 0) & (ids < len(w))
    return rows if outside is None else np.where(is_inside[..., None], rows, outside)


# What the product (8, 6) (6, 5) costs, also with rank 2.
WHOLE = pair(8 * 6 * 5, 8 * 5, 8 * 6, 6 * 5)
IN_TWO = pair(8 * 6 * 2, 8 * 2, 8 * 6, 6 * 2) + pair(8 * 2 * 5, 8 * 5, 8 * 2, 2 * 5)
IN_THREE = pair(8 * 6 * 3, 8 * 3, 8 * 6, 6 * 3) + pair(8 * 3 * 5, 8 * 5, 8 * 3, 3 * 5)
MIXED = 14 * 2 * 5, 14 * 5, 14 * 2  # channels of 14 places, 5 of 2
STRIDES = {"window_strides": (2,), "padding": [(1, 0)], "rhs_dilation": (2,)}
# A function of a weight and data, the weight, the data, its result, and what it costs with factors and with the array.
USES = {
    "a product": (product, weight(LOW), X, lambda w, x: x @ w, (IN_TWO, WHOLE)),
    "a weight on the left, of two terms": (
        lambda w, x: lax.dot_general(w, x, (((0,), (1,)), ((), ()))),
        weight("ir,ro+is,so->io"),
        X,
        lambda w, x: w.T @ x.T,
        (IN_TWO + IN_THREE, WHOLE),
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
    "rows by bytes": (
        look_up("fill", 7.0),
        weight("tr,ro->to"),
        np.array([[[1], [250], [255]]], np.uint8),
        partial(rows_of, outside=7.0),
        (16 * 15 + pair(3 * 2 * 5, 3 * 5, 3 * 2, 2 * 5), 16 * 15 + 16 * 258 * 5),
    ),
    "rows, promised": (look_up("promise_in_bounds"), weight(LOW), IDS, partial(rows_of, outside=None)),
    "a convolution": (
        convolved(),
        weight("kcr,ro->kco"),
        IMAGES,
        lambda w, x: by_windows(x, w),
        (6 * 14 * 12 * 2 + pair(*MIXED, 2 * 5), 6 * 14 * 12 * 5),
    ),
    "a convolution with a fixed kernel": (
        convolved(),
        weight("kcr,ro->kco", fixed=True),
        IMAGES,
        lambda w, x: by_windows(x, w),
        (4 * 14 * 12 * 2 + pair(*MIXED), 4 * 14 * 12 * 5),
    ),
    "a kernel of two ranks": (
        convolved(),
        weight("kcrs,rso->kco"),
        IMAGES,
        lambda w, x: by_windows(x, w),
        (6 * 14 * 12 * 6 + pair(14 * 6 * 5, 14 * 5, 14 * 6, 6 * 5), 6 * 14 * 12 * 5),
    ),
    "a scaled kernel": (
        convolved(),
        weight("kcr,,ro->kco"),
        IMAGES,
        lambda w, x: by_windows(x, w),
        (6 * 14 * 12 * 2 + 16 * 24 + 16 * 24 + 2 * 24 + 16 + pair(*MIXED, 2 * 5), 6 * 14 * 12 * 5),
    ),
    "a kernel that is not split": (
        convolved(),
        weight("kr,rco->kco"),
        IMAGES,
        lambda w, x: by_windows(x, w),
        (6 * 14 * 12 * 5 + pair(3 * 2 * 20, 3 * 20, 3 * 2, 2 * 20), 6 * 14 * 12 * 5),
    ),
    "strides": (convolved(("CNH", "IOH", "NCH"), **STRIDES), weight("crk,ro->cok"), TURNED, by_strides),
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


# A function of a weight and data, the data, the weight, and what each product multiplies.
PRECISIONS = {
    "a product": (lambda w, x: lax.dot(x, w, precision="highest"), X, LOW, ["data", "data"]),
    "a convolution": (convolved(precision="highest"), IMAGES, "kcr,ro->kco", ["data", "data"]),
    "a kernel that is multiplied": (convolved(precision="highest"), IMAGES, "kr,rco->kco", ["factors", "data"]),
    "rows": (look_up("clip"), IDS, LOW, ["factors"]),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_products_have_the_precision_of_the_equation_or_of_the_weight(name):
    fun, x, spec, want = PRECISIONS[name]

    def settings(**of_weight):
        of = replace(weight(spec)[0], **of_weight)
        program = jax.make_jaxpr(lambda x: use_of(fun, of, x).compute())(x)
        found = [eqn.params["precision"] for eqn in jaxprs_of(program.jaxpr) if "precision" in eqn.params]
        return [each is not None and set(each) == {lax.Precision.HIGHEST} for each in found]

    assert settings() == [each == "data" for each in want]
    assert settings(precision=lax.Precision.HIGHEST) == [True for _ in want]


def jaxprs_of(program):
    """All equations of a program, also inside of calls."""
    for eqn in program.eqns:
        yield eqn
        for inside in jaxprs.inner_programs(eqn):
            yield from jaxprs_of(inside)


@pytest.mark.parametrize(("dtype", "dtypes"), [("f4", {"float32"}), ("bfloat16", {"bfloat16"})])
def test_convolutions_of_few_digits_are_summed_in_the_dtype_of_the_result(dtype, dtypes):
    half = cast_sum(weight("kcr,ro->kco")[0], jnp.bfloat16)
    x = jax.ShapeDtypeStruct(IMAGES.shape, jnp.bfloat16)
    fun = convolved(preferred_element_type=jnp.dtype(dtype))
    program = jax.make_jaxpr(lambda x: use_of(fun, half, x).compute())(x)
    assert program.out_avals[0].dtype == jnp.dtype(dtype)
    products = [eqn for eqn in jaxprs_of(program.jaxpr) if "preferred_element_type" in eqn.params]
    assert {str(eqn.outvars[0].aval.dtype) for eqn in products} == dtypes
    assert len(products) == 2


def test_rows_that_are_not_there_have_no_gradients():
    of, out = weight(LOW)[0], {"clip": [0, 5, 5, 0, 2, 5], "promise_in_bounds": [0, 5, 2, 5], "fill": [0, 5, 2, 5]}
    slopes = jax.jit(
        lambda of: {
            mode: jax.grad(lambda of, mode=mode: jnp.sum(use_of(look_up(mode, 0.0), of, IDS).compute()))(of)
            for mode in out
        }
    )(of)
    a, b = jax.tree.leaves(of)
    for mode, slope in slopes.items():
        slope_a, slope_b = jax.tree.leaves(slope)
        counts = np.bincount(out[mode], minlength=6)
        np.testing.assert_allclose(slope_a, counts[:, None] * b.sum(1), rtol=1e-5, atol=1e-5, err_msg=mode)
        np.testing.assert_allclose(slope_b, np.repeat((counts @ a)[:, None], 5, 1), rtol=1e-5, atol=1e-5, err_msg=mode)


def test_rows_far_beyond_the_table_are_not_there():
    far = np.array([[[2**32 + 1], [1]]])
    with jax.enable_x64():
        found = use_of(look_up("fill", 7.0), weight(LOW)[0], far).compute()
    np.testing.assert_allclose(found, rows_of(weight(LOW)[1], far, outside=7.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "n_channels", "n_mixing"),
    [
        ("kcr,ro->kco", 2, 1),
        ("kcr,r,ro->kco", 2, 2),
        ("kcrs,rso->kco", 6, 1),
        ("kco->kco", 5, None),
        ("kco,o->kco", 5, None),
        ("kcw->kcw", 1, None),
        ("kr,rco->kco", 5, None),
    ],
)
def test_kernels_are_split_whose_channels_only_some_factors_mix(spec, n_channels, n_mixing):
    product = weight(spec)[0].products[0]
    product = replace(product, axes=tuple(tuple(label for label in axis if label.size != 1) for axis in product.axes))
    found = _split_kernel(product, 2)
    assert found.n_channels == n_channels
    assert (found.mixing and len(found.mixing.factors)) == n_mixing


def numbers(x):
    """Whole numbers that are known."""
    return Sum((Product.of(x, fixed=True),), x.shape, x.dtype, None, None)


SIZES = np.array([1, 2], np.int32)


def in_groups(*, ragged):
    """A product of a batch in groups along the rows, or along the batch."""
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [ragged], [])
    return lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, numbers)


SMALL = weight("kcr,ro->kco", dtype=np.int8)[0]
DIAGONAL = replace(SMALL, products=(Product.of(normal(3, 4), fixed=False),), shape=(3, 4, 4), dtype=np.dtype("f4"))
DIAGONAL = DIAGONAL.map_products(lambda x: replace(x, axes=(*x.axes, x.axes[1])), (3, 4, 4))
SQUARE = weight("o->o")[0].map_products(lambda x: replace(x, axes=2 * x.axes), (5, 5))
MERGED = weight("sro->sro")[0].map_products(lambda x: x.reshape((6, 5)), (6, 5))
NEEDING_THE_ARRAY = {
    "no product": (lax.add, weight(LOW)[0], normal(6, 5)),
    "two weights": (product, weight(LOW)[0], weight("or,ri->oi")[0]),
    "another dtype": (partial(lax.dot, preferred_element_type="f4"), X.astype(jnp.bfloat16), weight(LOW)[0]),
    "few bits": (partial(lax.dot, precision="F16_F16_F32"), X, weight(LOW)[0]),
    "whole numbers": (product, weight(LOW, dtype=np.int32)[0], X.astype(np.int32)),
    "whole numbers in a convolution": (convolved(preferred_element_type="i4"), SMALL, IMAGES.astype(np.int8)),
    "sizes of groups": (lax.ragged_dot, X, normal(2, 6, 5), numbers(np.array([3, 5], np.int32))),
    "groups of a batch": (in_groups(ragged=0), normal(3, 4, 6), weight("sio->sio")[0], SIZES),
    "places": (look_up("fill"), normal(6, 5), numbers(IDS)),
    "data of a convolution": (convolved(), normal(3, 4, 5), weight("ekr,rc->ekc")[0]),
    "groups of features": (convolved(feature_group_count=2), weight("wcr,re->wce")[0], normal(2, 9, 8)),
    "groups of examples": (convolved(batch_group_count=5), weight("kcr,ro->kco")[0], normal(5, 9, 4)),
    "channels on a diagonal": (convolved(), DIAGONAL, IMAGES),
    "both axes of a diagonal": (
        lambda w, x: lax.dot_general(x, w, (((1, 2), (0, 1)), ((), ()))),
        SQUARE,
        normal(2, 5, 5),
    ),
    "rows of a merged axis": (look_up("clip"), MERGED, IDS),
    "another mode": (look_up("one_hot"), weight(LOW)[0], IDS),
}


@pytest.mark.parametrize("name", NEEDING_THE_ARRAY)
def test_other_equations_need_the_array(name):
    assert use_of(*NEEDING_THE_ARRAY[name]) is None


def test_a_product_that_is_placed_on_devices_needs_the_array():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    placed = partial(lax.dot, out_sharding=NamedSharding(mesh, PartitionSpec("d")))
    with jax.set_mesh(mesh):
        assert use_of(placed, X, weight(LOW)[0]) is None
        assert use_of(lax.dot, X, weight(LOW)[0]) is not None


def test_looked_up_matrices_cost_what_the_cheaper_way_costs():
    """Of four matrices (6, 5), three are looked up; a factor that all share is not."""

    def looked_up(*, fixed):
        (of, _), (each, _) = weight("eir,ro->eio", fixed=fixed), weight("sir,ro->sio", fixed=fixed)
        factors = each.products[0].factors[0], of.products[0].factors[1]
        return of, Sum((Product(factors, each.products[0].axes),), each.shape, each.dtype, None, None)

    assert costs_of_lookup(*looked_up(fixed=True)) == (16 * 36, 16 * 90 + pair(3 * 6 * 2 * 5, 90), 16 * 90)
    of, rows = looked_up(fixed=False)
    cost, from_factors, from_array = costs_of_lookup(of, rows)
    assert cost == 2 * 16 * 36
    assert from_factors == 16 * 90 + pair(3 * 6 * 2 * 5, 90, 3 * 6 * 2, 2 * 5)
    assert from_array == 16 * 90 + 16 * 120
    for cost_of_weight, least in ((50, 2 * from_array + 50), (1e9, 2 * from_factors)):
        plan = SumPlan()
        plan.records["w"] = record(cost_of_weight)
        operation = SimpleNamespace(
            eqn=None,
            args=[replace(of, maker="w")],
            facts=[SimpleNamespace(origins=frozenset([3]))],
            interpreter=SimpleNamespace(times=2, in_formula=False),
        )
        found = Factoring(plan)._record_of_lookup(operation, rows)
        assert (found.cost_to_form, found.times, found.parents, found.origins) == (least, 2, ["w"], {3})
        assert found.reads == [read(2, cost, formula=True)]
        assert found.read_if_formed == read(2, from_factors, from_array)


def test_a_plan_records_what_makes_sums_and_what_reads_them():
    def loss(a, b, x):
        w = a @ b
        y = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ (2 * w)), x)
        return y @ (w + w), jnp.abs(w)

    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in [(64, 2), (2, 64), (8, 64)]]
    plan, _ = plan_sums(jax.make_jaxpr(loss)(*args).jaxpr, args, [True, True, False])
    costs = pair(64 * 64 * 2, 64 * 64, 64 * 2, 64 * 2) + 16 * 64 * 64 * np.array([0, 3 * 2, 3])
    records = list(plan.records.values())
    assert [(each.cost_to_form, each.times, len(each.parents), each.origins) for each in records] == [
        (cost, times, parents, {0, 1}) for cost, times, parents in zip(costs, (1, 3, 1), (0, 1, 1), strict=True)
    ]
    reads = [[(read.times, read.in_formula, read.needs_array) for read in each.reads] for each in records]
    assert reads == [[(1, False, True)], [(3, False, False)], [(1, False, False)]]


# ---- noise of products


def along_the_window(n):
    """Deviations that differ along a window alone, for kernels of 2 input and ``n`` output channels."""
    k, shape = Label(3), (3, 2, n)
    found = Product((Factor(normal(3), (k,), fixed=False),), ((k,), (Label(2),), (Label(n),)))
    return Sum((found,), shape, np.dtype("f4"), None, None), np.broadcast_to(normal(3)[:, None, None], shape)


# An equation, the deviations of its weight, the place of the weight, the data, and the variance.
GROUPED, ENTRIES, LIKE = convolved(feature_group_count=2), weight("io->io"), normal(6, 5)
VARIANCES = {
    "a product": (product, weight("io,o->io"), 1, X, lambda v, x: x**2 @ v),
    "a convolution": (convolved(), weight("kco->kco"), 1, IMAGES, lambda v, x: by_windows(x**2, v)),
    "one deviation": (convolved(), along_the_window(5), 1, IMAGES[..., :2], lambda v, x: by_windows(x**2, v)),
    "groups": (GROUPED, along_the_window(6), 1, IMAGES, lambda v, x: by_windows(x**2, v, 2)),
    "rows": (look_up("clip"), ENTRIES, 0, IDS, partial(rows_of, outside=None)),
    "rows that are not there": (look_up("fill"), ENTRIES, 0, IDS, partial(rows_of, outside=0.0)),
    "a multiple": (lax.mul, ENTRIES, 0, LIKE, lambda v, x: v * x**2),
    "a fraction": (lax.div, ENTRIES, 0, LIKE, lambda v, x: v / x**2),
    "a sum": (lax.add, ENTRIES, 0, LIKE, lambda v, x: v),
}
NOT_LINEAR = {
    "a fraction": (lambda w, x: lax.div(x, w), ENTRIES, 1, LIKE),
    "data of a convolution": (convolved(), weight("kco->kco"), 0, IMAGES),
    "groups of examples": (convolved(batch_group_count=5), weight("kco->kco"), 1, normal(5, 9, 4)),
    "another equation": (lax.max, ENTRIES, 0, LIKE),
    "groups of a batch": (lambda w, x: in_groups(ragged=0)(x, w, SIZES), weight("sio->sio"), 1, normal(3, 4, 6)),
}


def test_variances_are_those_of_squared_operands():
    def variance(fun, found, operand, x, _):
        view = view_of(traced(fun, found[0], x)[0])
        return _local._variance(view, operand, (x,), _local._square_factors(found[0]))

    found = jax.jit(lambda: {name: variance(*row) for name, row in VARIANCES.items()})()
    for name, (_, (_, dense), _, x, by_hand) in VARIANCES.items():
        np.testing.assert_allclose(found[name], by_hand(np.square(dense), x), rtol=1e-5, atol=1e-6, err_msg=name)


def test_rows_draw_where_an_equation_is_linear_in_a_weight_whose_entries_differ():
    def is_linear(fun, found, operand, x, *, repeat=False):
        noisy = SimpleNamespace(std=found[0], entries_may_repeat=repeat)
        return _local._is_linear(view_of(traced(fun, found[0], x)[0]), operand, (x,), noisy)

    for name, (*row, _) in VARIANCES.items():
        assert is_linear(*row), name
        assert is_linear(*row, repeat=True) == (name in ("a multiple", "a fraction", "a sum")), name
    for name, row in NOT_LINEAR.items():
        assert not is_linear(*row), name
