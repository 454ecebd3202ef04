"""How noise is followed to the rows that draw it: deviations, rows, sides and sources of weights, by hand."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec
from one_array import normal

import reparax as rpx
from reparax.core import random
from reparax.core.random import key_of_use
from reparax.programs import dependence
from reparax.programs.dependence import FACTS_OF_CONSTANT, Facts
from reparax.programs.interpreter import Operation
from reparax.programs.sums import Draw, Factor, Label, Product, Sum, axis_labels
from reparax.transforms import _local
from reparax.transforms._local import DRAW_ORIGIN, Drawing, NoisyRead, NoisyWeight, WeightRecord

LABELS = {letter: Label(size) for letter, size in zip("iorbw", (4, 3, 2, 5, 1), strict=True)}
KEY = jax.eval_shape(lambda: jax.random.key(0))
KNOWN, DATA = Facts(known=True, fixed=False), Facts(known=False, fixed=True)


def noisy(spec, *, dtype=np.float32, facts=KNOWN, steps=(), rows=1, keys=0):
    """A weight: "io+o,e:io->io" is a mean plus a draw e times deviations along o."""
    terms, axes = spec.split("->")
    count, products = itertools.count(), []
    for term in terms.split("+"):
        factors = []
        for *names, letters in (text.split(":") for text in term.split(",")):
            array = normal(*(LABELS[k].size for k in letters), seed=next(count), dtype=dtype)
            draw = Draw(names[0], SimpleNamespace(of=names[0], ndim=keys), rows) if names else None
            factors.append(Factor(array, tuple(map(LABELS.get, letters)), fixed=True, draw=draw))
        products.append(Product(tuple(factors), tuple(axis_labels(LABELS[k]) for k in axes)))
    shape = tuple(LABELS[k].size for k in axes)
    type_ = jax.ShapeDtypeStruct(shape, dtype)
    return Sum(tuple(products), shape, np.dtype(dtype), None, WeightRecord(facts, type_, frozenset(steps)))


def operation(fun, *operands, facts=None, out_facts=DATA, **settings):
    """The one equation of a function, applied to weights, which are known, and to data."""
    program = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)).jaxpr
    (eqn,) = program.eqns
    facts = facts or [KNOWN if isinstance(x, Sum) else DATA for x in operands]
    value_of, fact_of = (dict(zip(program.invars, each, strict=True)) for each in (operands, facts))
    # Literals are known.
    args = [value_of.get(v, v) if v in program.invars else v.val for v in eqn.invars]
    found = [fact_of[v] if v in program.invars else FACTS_OF_CONSTANT for v in eqn.invars]
    return Operation(SimpleNamespace(path=(), **settings), eqn, args, found, out_facts, only_first_read=True)


# ---- mean and deviations

# A weight, how many samples an entry adds up, and whether several entries have the same noise.
DEVIATIONS = {
    "a draw": ("e:io->io", 1, False),
    "a mean, and a deviation for each column": ("io+o,e:io->io", 1, False),
    "two draws": ("o,e:io+i,f:io->io", 1, False),
    "a draw of one entry": ("i,w,e:iw->iw", 1, False),
    "a sum over samples": ("e:ir->i", 2, False),
    "a sum over two axes": ("e:iro->i", 6, False),
    "a scaled sum": ("i,e:ir->i", 2, False),
    "a sum of scaled samples": ("r,e:ir->i", 1, False),
    "samples that several entries mix": ("e:ir,ro->io", 1, True),
    "repeated entries": ("e:o->io", 1, True),
    "one of two repeats": ("e:io+f:i->io", 1, True),
    "a number": ("o,e:w->wo", 1, True),
}
NO_DEVIATIONS = {
    "no draw": "io->io",
    "one draw twice": "e:io+o,e:io->io",
    "two draws in one product": "e:io,f:io->io",
    "one draw twice in one product": "e:io,e:io->io",
    "a sum over what the draw lacks": "r,e:i->i",
    "a diagonal": "e:i->ii",
    "one good draw, and a bad one": "e:io+f:i,r->io",
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_deviations_are_what_multiplies_the_draws(name):
    spec, n, entries_may_repeat = DEVIATIONS[name]
    x = noisy(spec)
    found = NoisyWeight.of(x)
    assert found.entries_may_repeat == entries_may_repeat
    assert found.key.of == "e"
    terms, axes = spec.split("->")
    variance = np.zeros(x.shape)
    for term, product in zip(terms.split("+"), x.products, strict=True):
        pairs = [(k, f.array) for k, f in zip(term.split(","), product.factors, strict=True) if ":" not in k]
        if len(pairs) < len(product.factors):
            inputs = ",".join([*(k for k, _ in pairs), axes])
            variance += n * np.einsum(f"{inputs}->{axes}", *(np.square(a) for _, a in pairs), np.ones(x.shape))
    np.testing.assert_allclose(_local.array_of(_local._square_factors(found.std)), variance, rtol=1e-5)
    assert found.mean.products == tuple(y for y in x.products if not any(factor.draw for factor in y.factors))


@pytest.mark.parametrize("name", NO_DEVIATIONS)
def test_noise_that_depends_on_itself_has_no_deviations(name):
    assert NoisyWeight.of(noisy(NO_DEVIATIONS[name])) is None


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32, np.float64])
def test_deviations_have_at_least_the_digits_of_float32(dtype):
    with jax.enable_x64():
        found = NoisyWeight.of(noisy("io+e:io->io", dtype=dtype))
        wide = np.promote_types(np.float32, dtype) if dtype is not jnp.bfloat16 else np.float32
        assert (found.mean.dtype, found.std.dtype) == (dtype, wide)
        assert found.std.products[0].factors[0].array.dtype == wide
        assert _local.array_of(found.mean).dtype == dtype
        assert not np.any(_local.array_of(replace(found.mean, products=())))


# ---- rows and sides


X, W, BIAS, RAGGED = normal(5, 4), noisy("e:io->io"), noisy("e:o->bo"), np.array([2, 3], np.int32)


def product(w, x):
    return x @ w


def on_the_left(w, x):
    return lax.dot_general(w, x, (((0,), (1,)), ((), ())))


def of_a_batch(w, x):
    return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))


def scaled(x, n):
    return lax.mul(x, n)


# An equation, its operands, the sizes of the rows that draw, and the axes that the equation sums over and keeps.
ROWS = {
    "a product": (product, [W, X], [5], {2}, {1}),
    "a weight on the left": (on_the_left, [W, X], [5], {2}, {1}),
    "a batch": (of_a_batch, [noisy("e:rio->rio"), normal(2, 5, 4)], [5], {2}, {1}),
    "a bias": (lax.add, [BIAS, normal(5, 3)], [5], set(), set()),
    "a difference": (lax.sub, [normal(5, 3), BIAS], [5], set(), set()),
    "a gain": (lax.mul, [BIAS, normal(5, 3)], [5], {1}, {1}),
    "a divisor": (lax.div, [BIAS, normal(5, 3)], [5], {1}, {1}),
    "one gain": (lax.mul, [noisy("e:w->wo"), normal(1, 3)], [3], set(), set()),
    "no rows": (lax.mul, [noisy("e:io->io"), normal(4, 3)], [], {1, 2}, {1, 2}),
    "one of two draws": (lax.mul, [noisy("e:o+f:i->io"), normal(4, 3)], [], {1}, {1}),
    "what was looked up": (product, [noisy("e:io->io", rows=7), X], [5, 7], {2}, {1}),
    "two draws that were looked up": (product, [noisy("e:io+o,f:io->io", rows=7), X], [5, 7], {2}, {1}),
    "two weights": (lax.mul, [noisy("e:o->bo"), noisy("f:b->bo")], [], {1}, {1}),
    "an axis of size 1": (product, [noisy("e:wo->wo"), normal(5, 1)], [5], set(), {1}),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_what_the_noise_does_not_index(name):
    fun, operands, rows, summed, kept = ROWS[name]
    found = operation(fun, *operands)
    assert _local._row_sizes(found) == rows
    place = next(i for i, x in enumerate(found.args) if isinstance(x, Sum))
    assert _local._sides(found.view, place, found.args[place])["e"] == (summed, kept)


def test_an_array_keeps_all_axes_of_each_draw():
    assert _local._sides(None, 0, noisy("e:oi+f:wi->io")) == {"e": (set(), {1, 2}), "f": (set(), {1})}


def test_noise_differs_along_axes_whose_labels_the_draw_has():
    i, o, r = (LABELS[k] for k in "ior")
    x = noisy("e:io->io")
    axes = {(): False, (i,): True, (i, o): True, (i, r): False, (r,): False}
    merged = replace(x, products=(replace(x.products[0], axes=tuple(axes)),))
    assert [_local._has_noise_along(merged, k) for k in range(len(axes))] == [*axes.values()]
    assert _local._has_noise_along(noisy("e:o+f:i->io"), 0)


# ---- digits


HALF = jnp.bfloat16


def convolved(w, x, **settings):
    return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"), **settings)


@pytest.mark.parametrize(
    ("fun", "spec", "shape"),
    [
        (product, "io->io", (5, 4)),
        (convolved, "rio->rio", (2, 5, 4)),
        (convolved, "i->rio", (2, 5, 4)),
        (lax.mul, "io->io", (4, 3)),
        (lax.div, "io->io", (4, 3)),
    ],
)
def test_variances_have_the_digits_of_float32_and_the_precision_of_the_mean(fun, spec, shape):
    half = operation(fun, noisy(spec, dtype=HALF), normal(*shape, dtype=HALF))

    def variance(x, data):
        return _local._variance(half.view, 0 if fun in (lax.mul, lax.div) else 1, (data,), x)

    program = jax.make_jaxpr(variance)(noisy(spec), normal(*shape, dtype=HALF))
    assert [v.dtype for v in program.out_avals] == [np.float32]
    assert all(v.aval.dtype != HALF for eqn in program.jaxpr.eqns for v in eqn.outvars)


@pytest.mark.parametrize(
    ("fun", "spec", "shape", "precision", "want"),
    [
        (lax.dot, "io->io", (5, 4), "highest", 1),
        (lax.dot, "io->io", (5, 4), None, 0),
        (lax.dot, "io->io", (5, 4), "BF16_BF16_F32", 0),
        (lambda x, w, **settings: convolved(w, x, **settings), "rio->rio", (2, 5, 4), "highest", 1),
    ],
)
def test_variances_have_the_precision_of_the_mean_unless_an_algorithm_gives_it(fun, spec, shape, precision, want):
    found = operation(lambda w, x: fun(x, w, precision=precision), noisy(spec), normal(*shape))
    program = jax.make_jaxpr(lambda w, x: _local._variance(found.view, 1, (x,), w))(noisy(spec), normal(*shape))
    settings = [eqn.params["precision"] for eqn in program.jaxpr.eqns if "precision" in eqn.params]
    assert [each is not None and set(each) == {lax.Precision.HIGHEST} for each in settings] == [bool(want)]


def test_the_mean_is_that_of_the_mean_of_the_weight_in_float32():
    def mean(w, x):
        found = _local.mean_and_noise(operation(lambda w, x: lax.dot(x, w), w, x), 1, NoisyWeight.of(w))
        return found and found[0]

    w, x = noisy("io+e:io->io"), normal(5, 4, seed=9)
    np.testing.assert_allclose(mean(w, x), x @ w.products[0].factors[0].array, rtol=1e-5)
    half = noisy("io+e:io->io", dtype=HALF)
    assert jax.eval_shape(lambda x: mean(half, x), x.astype(HALF)).dtype == np.float32
    assert mean(w, x.astype(np.complex64)) is None
    assert mean(noisy("io+e:o->io"), x) is None


# ---- records of weights


def in_scans(*depths, known=True):
    return Facts(known=known, fixed=True, steps=frozenset(depths))


# A weight's facts and the steps of its record, the facts of the data, and the steps in which data changes the result.
STEPS = {
    "no scan": (in_scans(), (), in_scans(known=False), set()),
    "data of each step": (in_scans(), (), in_scans(0, known=False), {0}),
    "constants of each step": (in_scans(), (), in_scans(0), set()),
    "noise of each step": (in_scans(0), (), in_scans(0, known=False), set()),
    "noise of an outer step": (in_scans(0), (), in_scans(0, 1, known=False), {1}),
    "data that changed it before": (in_scans(0, known=False), (0,), in_scans(known=False), {0}),
    "noise beside data that changed it before": (in_scans(0, 1, known=False), (0,), in_scans(1, known=False), {0}),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_count_as_rows_where_data_changes_a_weight_and_its_noise_is_older(name):
    facts, steps, others, want = STEPS[name]
    x = noisy("e:io->io", facts=facts, steps=steps)
    found = _local._record_of_output(operation(lax.mul, x, normal(4, 3), facts=[facts, others]), "a type")
    assert found == WeightRecord(DATA, "a type", frozenset(want))


THREE = "e:rio->rio"


@pytest.mark.parametrize(
    ("spec", "fun", "sources"),
    [
        (THREE, lambda x: lax.split(x, (1, 1), 0), [("e", 0), ("e", 1)]),
        (THREE, lambda x: lax.split(x, (2,), 0), None),
        (THREE, lambda x: lax.split(x, (1, 1, 1, 1), 1), None),
        (THREE, lambda x: lax.transpose(x, (0, 2, 1)), None),
        ("e:rio,w->rio", lambda x: lax.split(x, (1, 1), 0), None),
        ("e:rio+f:rio->rio", lambda x: lax.split(x, (1, 1), 0), None),
    ],
)
def test_the_arrays_of_a_batch_of_draws_are_draws_of_their_own(spec, fun, sources):
    def split(x):
        found.append(_local._split_batch_of_draws(operation(fun, x)))

    found = []
    jax.eval_shape(lambda: split(noisy(spec, keys=1)))
    (parts,) = found
    assert parts is None or [part.shape for part in parts] == [(1, 4, 3)] * 2
    assert (parts and [draw.source for part in parts for *_, draw in _local._draws_in(part)]) == sources


def test_a_batch_of_draws_whose_axes_are_merged_is_not_split():
    merged = noisy(THREE, keys=1).map_products(lambda product: product.reshape((8, 3)), (8, 3))
    assert not _local._split_batch_of_draws(operation(lambda x: lax.split(x, (1,) * 8, 0), merged))


def test_a_cast_to_fewer_digits_rounds_a_weight_and_not_its_factors():
    half, word = (noisy("i,e:io->io", dtype=dtype) for dtype in (jnp.bfloat16, np.float32))
    (found,) = _local._rounded_sum(operation(lambda w: lax.convert_element_type(w, jnp.bfloat16), word))
    assert (found.dtype, found.products) == (jnp.bfloat16, word.products)
    assert _local._rounded_sum(operation(lambda w: lax.convert_element_type(w, jnp.float32), half)) is None
    assert _local._rounded_sum(operation(lax.neg, word)) is None


def one_of_two(w, i):
    return lax.gather(w, i, lax.GatherDimensionNumbers((0, 1), (0,), (0,)), (1, 4, 3))


OF_DRAWS = replace(DATA, origins=frozenset([DRAW_ORIGIN]))
# An equation, its operands and the facts about them, and the shapes of the result and of what it is made of.
COMBINED = {
    "a mask": (lax.mul, [W, normal(4, 3)], [KNOWN, DATA], (4, 3), (4, 3)),
    "a mask of what was contracted": (
        lax.mul,
        [replace(W, maker=replace(W.maker, type=jax.ShapeDtypeStruct((9, 9), np.float32))), normal(4, 3)],
        [KNOWN, DATA],
        (4, 3),
        (4, 3),
    ),
    "a repeat": (lambda w, x: lax.mul(x, w), [noisy("e:o->wo"), normal(1, 3)], [KNOWN, DATA], (1, 3), (1, 3)),
    "a choice": (lax.select, [np.ones((4, 3), bool), W, normal(4, 3)], [DATA, KNOWN, DATA], (4, 3), (4, 3)),
    "a product": (product, [W, X], [KNOWN, DATA], (5, 3), (4, 3)),
    "a look-up": (one_of_two, [noisy("r,e:rio->rio"), np.zeros(1, np.int32)], [KNOWN, DATA], (4, 3), (2, 4, 3)),
    "noise of the noise": (lax.mul, [W, normal(4, 3)], [KNOWN, OF_DRAWS], None, None),
    "a square": (lambda w: lax.mul(w, w), [W], [KNOWN], None, None),
    "a diagonal": (on_the_left, [noisy("e:i->ii"), X], [KNOWN, DATA], (4, 5), (4, 4)),
    "groups": (lax.ragged_dot, [X, noisy("e:rio->rio"), RAGGED], [DATA, KNOWN, DATA], None, None),
}


def test_what_is_made_of_a_weight_is_told_by_its_type_before_it_was_contracted_or_looked_up():
    found = {}

    def combine():
        for name, (fun, operands, facts, *_) in COMBINED.items():
            found[name] = _local._combined_sum(operation(fun, *operands, facts=facts))

    jax.eval_shape(combine)
    for name, x in found.items():
        *_, shape, type_ = COMBINED[name]
        assert (x and x.shape, x and x.maker.type.shape) == (shape, type_), name
        assert x is None or x.maker.facts == DATA


def test_draws_are_the_same_where_keys_have_the_same_formula():
    def drawn(formula, shape=(4, 3), path=()):
        eqn = SimpleNamespace()
        view = SimpleNamespace(bind=lambda key: [jax.ShapeDtypeStruct(shape, np.float32)])
        made = SimpleNamespace(
            view=view, args=["key"], facts=[replace(KNOWN, formula=formula)], out_facts=DATA, maker=(*path, id(eqn))
        )
        found = _local._drawn_sum(made)
        assert (found.shape, found.maker.type.shape) == (shape, shape)
        ((_, factor, draw),) = _local._draws_in(found)
        assert (draw.key, draw.rows, factor.fixed) == ("key", 1, True)
        return draw.source

    assert drawn(3) == drawn(3) != drawn(4)
    assert drawn(3) != drawn(3, (3, 4))
    assert drawn(None, path=(1,)) != drawn(None, path=(2,))


# ---- formulas


def added_and_counted(n):
    return io_callback(lambda n: n, jax.ShapeDtypeStruct((), np.int32), n)


# Whether the two results have one formula; None if they have none.
FORMULAS = {
    "one sum": (lambda n, m, y: (n + m, n + m), True),
    "two sums": (lambda n, m, y: (n + m, n + n), False),
    "an order": (lambda n, m, y: (n - m, m - n), False),
    "one number": (lambda n, m, y: (n + 1, n + 1), True),
    "two numbers": (lambda n, m, y: (n + 1, n + 2), False),
    "two operations": (lambda n, m, y: (n + m, n * m), False),
    "a floating-point number that is given": (lambda n, m, y: (y.astype(int), y.astype(int)), True),
    "a floating-point number that is computed": (lambda n, m, y: (jnp.sin(y), jnp.sin(y)), None),
    "what is read from it": (lambda n, m, y: (jnp.sin(y).astype(int), jnp.sin(y).astype(int)), None),
    "two outputs": (lambda n, m, y: (lax.top_k(n[None], 1)[1], lax.top_k(n[None], 1)[1]), None),
    "an effect": (lambda n, m, y: (added_and_counted(n), added_and_counted(n)), None),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_equal_formulas_of_whole_numbers_have_one_index(name):
    fun, same = FORMULAS[name]
    program = jax.make_jaxpr(fun)(np.int32(0), np.int32(0), np.float32(0)).jaxpr
    facts = [replace(KNOWN, formula=-1 - i) for i in range(3)]
    env = dependence.analyze(program, facts, _local._FactsOfDraws())
    first, second = (env[v].formula for v in program.outvars)
    assert (None if first is second is None else first == second) == same


def test_an_operation_whose_parameters_cannot_be_compared_has_no_formula():
    found = operation(lambda n: lax.add(n, 1), np.int32(0))
    analysis, facts = _local._FactsOfDraws(), [replace(KNOWN, formula=-1), FACTS_OF_CONSTANT]
    assert analysis._formula(found.eqn, facts) == 0
    assert analysis._formula(found.eqn.replace(params={"of": [1]}), facts) is None


def drawn(key, w):
    return random.normal(key, w)


# Whether a program of a key, a weight and data multiplies data by noise, perhaps in a loop.
MULTIPLIED = {
    "noise and data": (lambda k, w, x: x @ drawn(k, w), True),
    "what is made of noise, and data": (lambda k, w, x: x @ jnp.sin(w + drawn(k, w)), True),
    "noise and a weight": (lambda k, w, x: w @ drawn(k, w), False),
    "data and a weight": (lambda k, w, x: (x @ w, drawn(k, w)), False),
    "data and what noise and data made": (lambda k, w, x: x @ (x + drawn(k, w)), False),
    "entries": (lambda k, w, x: x * drawn(k, w), False),
    "a loop": (lambda k, w, x: lax.scan(lambda c, _: (jnp.sin(c) * x, None), drawn(k, w), length=2)[0], True),
    "a loop of noise": (lambda k, w, x: lax.scan(lambda c, _: (jnp.sin(c), None), drawn(k, w), length=2)[0], False),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_the_analysis_finds_data_that_noise_multiplies(name):
    fun, want = MULTIPLIED[name]
    program = jax.make_jaxpr(fun)(KEY, *2 * [jax.ShapeDtypeStruct((3, 3), np.float32)]).jaxpr
    analysis = _local._FactsOfDraws()
    dependence.analyze(program, [KNOWN, KNOWN, DATA], analysis)
    assert analysis.multiplies_data == want


# ---- draws that all rows share


def reads(*rows):
    """Reads of draws, each of which sums over some axes and keeps others: "e21" sums over 2 and keeps 1."""
    found = {}
    for i, (text, count) in enumerate(rows):
        sides = {each[0]: tuple(frozenset(map(int, side)) for side in each[1:].split("|")) for each in text.split()}
        found[i] = NoisyRead(f"eqn{i}", None, sides, count)
    return found


ALONG, AGAIN = "reads it along the other side, as a gradient does", "reads it again, beside a gradient"
SHARING = {
    "rows of their own": ([("e2|1", 5), ("f2|1", 5)], {}),
    "two reads": ([("e2|1", 5), ("e2|1", 5)], {}),
    "an array": ([("e2|1", 5), ("e|12", None)], {"e": [("eqn1", "takes one draw for all")]}),
    "two draws in an array": (
        [("e|12 f|12", None)],
        {draw: [("eqn0", "takes one draw for all")] for draw in "ef"},
    ),
    "a gradient": ([("e2|1", 5), ("f2|1", 5), ("e1|2", 5)], {"e": [("eqn2", ALONG)]}),
    "a gradient, and another product": ([("e2|1", 5), ("e2|1", 5), ("e1|2", 5)], {"e": [("eqn2", ALONG)]}),
    "a gradient, and what is read again": (
        [("e2|1", 5), ("f2|1", 5), ("e1|2", 5), ("f2|1", 5), ("f|", 5)],
        {"e": [("eqn2", ALONG)], "f": [("eqn3", AGAIN), ("eqn4", AGAIN)]},
    ),
    "an array along the other side": ([("e2|1", 5), ("e1|2", None)], {"e": [("eqn1", "takes one draw for all")]}),
    "an array that is shared already": ([("s|12", None), ("e|12", None)], {"e": [("eqn1", "takes one draw for all")]}),
    "a gradient of what is shared already": ([("s2|1", 5), ("s1|2", 5), ("f|", 5), ("f|", 5)], {}),
}


@pytest.mark.parametrize("name", SHARING)
def test_draws_are_shared_that_an_array_or_a_gradient_reads(name):
    rows, want = SHARING[name]
    rules = SimpleNamespace(reads=reads(*rows), shared={"s": []}, takes_gradients=False)
    assert _local._draws_to_share(rules) == want


def test_beside_values_that_are_recomputed_draws_are_shared_that_are_read_again():
    rules = SimpleNamespace(reads=reads(("e2|1", 5), ("f|", 5), ("f|", 5)), shared={}, takes_gradients=True)
    assert _local._draws_to_share(rules) == {"f": [("eqn2", AGAIN)]}


# ---- reads


NOISE = rpx.VarNoise(0.1)
MESH = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
ROWS_OF_DATA, COLUMNS = Spec("d"), Spec(None, "d")


def looped(f, times=1):
    """A loop over the first axes of data."""
    return f if times == 0 else lambda w, xs: lax.map(lambda x: looped(f, times - 1)(w, x), xs)


def shards(f, *specs, out):
    return jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=out)


def of_each_half(w, x):
    return lax.scan(lambda c, w: (c, x @ w), 0, w.reshape(2, 4, 3))[1]


# A network of a weight and data, their shapes, the rows of each use, and the mesh axes over which the uses differ.
USES = {
    "a product": (product, (4, 3), (5, 4), ["5"], [()]),
    "two uses": (lambda w, x: (x @ w, x[:2] @ w), (4, 3), (5, 4), ["5", "2"], [(), ()]),
    "a product in a loop": (looped(product), (4, 3), (7, 5, 4), ["35"], [()]),
    "a product in two loops": (looped(product, 2), (4, 3), (2, 7, 5, 4), ["70"], [()]),
    "a mask of each step": (looped(lambda w, m: jnp.square(w * m)), (4, 3), (7, 4, 3), ["7"], [()]),
    "a mask of two loops": (looped(lambda w, m: jnp.square(w * m), 2), (4, 3), (2, 7, 4, 3), ["14"], [()]),
    "noise of each step": (of_each_half, (8, 3), (5, 4), ["5"], [()]),
    "a mask of each step, on shards": (
        looped(lambda w, m: shards(jnp.square, COLUMNS, out=COLUMNS)(w * m)),
        (4, 8),
        (7, 4, 8),
        ["7"],
        [("d",)],
    ),
    "shards of data": (shards(product, Spec(), ROWS_OF_DATA, out=ROWS_OF_DATA), (4, 3), (8, 4), ["8"], [("d",)]),
    "shards of a weight": (shards(product, COLUMNS, Spec(), out=COLUMNS), (4, 8), (5, 4), ["5"], [("d",)]),
    "groups of two weights": (
        lambda w, x: lax.ragged_dot(w[0], jnp.broadcast_to(w[1, :2, :, None], (2, 3, 7)), x.astype(int)[0]),
        (2, 4, 3),
        (1, 2),
        None,
        [],
    ),
}


@pytest.mark.parametrize("name", USES)
def test_each_use_draws_for_its_rows_by_a_key_of_its_own(name, monkeypatch):
    network, shape, of_data, rows, mesh_axes = USES[name]
    numbers, found = [], {}
    record_read = Drawing._record_read

    def counted(*args):
        numbers.append(record_read(*args))
        return numbers[-1]

    def key_of_row(key, number, axes):
        found.setdefault(numbers[-1], set()).add(tuple(axes))
        return key_of_use(key, number, axes)

    monkeypatch.setattr(Drawing, "_record_read", counted)
    monkeypatch.setattr(_local, "key_of_use", key_of_row)
    raw, x = {"w": jax.ShapeDtypeStruct(shape, np.float32)}, jax.ShapeDtypeStruct(of_data, np.float32)
    (weight,) = rpx.explain(
        rpx.transforms.local_reparametrization(lambda raw, key, x: network(NOISE.apply(raw, key)["w"], x)), raw, KEY, x
    ).weights
    if rows is None:
        assert "takes one draw for all" in weight.reason
        return
    assert weight.reason == f"{len(rows)} use{'s' if rows[1:] else ''}, {' and '.join(rows)} rows"
    assert found == {i: {axes} for i, axes in enumerate(mesh_axes)}
