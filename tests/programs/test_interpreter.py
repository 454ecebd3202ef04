"""Programs that are interpreted give what they give, and weights stay in factors until their arrays are needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from reparax.core.unchanged import recompute
from reparax.programs import jaxprs, multiply, rules
from reparax.programs.dependence import FACTS_OF_CONSTANT, AllFacts, Facts
from reparax.programs.equations import Named, SplitAxis, view_class_of
from reparax.programs.interpreter import Interpreter, LoopStep, has_body, interpret_bodies
from reparax.programs.sums import Sum


def whole(*shape, seed=0):
    """Small integers, so that products are exact."""
    return np.random.RandomState(seed).randint(-3, 4, shape).astype(np.float32)


A, B, X, ROW = whole(6, 2), whole(2, 4, seed=1), whole(3, 6, seed=2), np.arange(1, 5, dtype=np.float32)
LAYERS, ONE_LAYER, PLACES = whole(3, 6, 2), whole(1, 6, 2), np.array([[2], [9], [0]], np.int32)
MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
DATA = Spec("data")
PLACED = {"out_shardings": NamedSharding(MESH, DATA)}


class InFactors:
    """Keeps products of two known matrices, and notes what is asked. What is named "index" is that of the step."""

    def __init__(self, *, counts_steps=True):
        self.counts_steps, self.analysis, self.seen, self.formed = counts_steps, AllFacts(), [], []

    def may_introduce_sum(self, eqn, facts, out_facts):
        makes = out_facts.known and rules.may_make_sum(eqn)
        return makes or has_body(eqn) or view_class_of(eqn) in (Named, SplitAxis)

    def outputs(self, operation):
        self.seen.append(operation)
        if isinstance(operation.view, Named):
            return [operation.interpreter.steps[-1].index]
        if has_body(operation.eqn):
            return interpret_bodies(operation)
        x = rules.make_if_smaller(operation.eqn, operation.args, operation.facts) if operation.out_facts.known else None
        return rules.move_sum(operation.eqn, operation.args) or (x and [x])

    def materialize(self, interpreter, x, eqn):
        self.formed.append((eqn and eqn.primitive.name, interpreter.times))
        return multiply.array_of_sum(x)


def scanned(x, step, **settings):
    return lax.scan(lambda carry, x: (carry, step(x)), 0, x, **settings)[1]


def with_constant(w, x):
    return scanned(x, lambda x: x @ w)


def shards(f, *specs, out):
    return jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=out)


def index(_):
    return checkpoint_name(np.int32(-1) * jnp.ones((), np.int32), "index")


def taken(w, axis, mode="clip", **settings):
    """The look-up of several places along an axis."""
    numbers = lax.GatherDimensionNumbers(tuple(range(w.ndim))[axis == 0 :][: w.ndim - 1], (axis,), (axis,))
    return lax.gather(w, PLACES, numbers, np.where(np.arange(w.ndim) == axis, 1, w.shape), mode=mode, **settings)


def repeated(row, shape=(6, 4), axes=(1,)):
    return lax.broadcast_in_dim(row, shape, axes)


RETURNED, SINE = [(None, 1)], [("sin", 1)]
READ, LOOPED, READ_OFTEN = ([("dot_general", n)] for n in (1, 3, 12))
IN_FACTORS = {  # equations that keep factors, so that only what is returned is an array
    "a product": lambda a, b, x: a @ b,
    "moved": lambda a, b, x: lax.transpose(LAYERS @ b, (2, 0, 1)),
    "summed": lambda a, b, x: jnp.sum(LAYERS @ b, 1),
    "summed where repeated": lambda a, b, x: jnp.sum(repeated(a @ b, (6, 3, 4), (0, 2)), 1),
    "without an axis of one": lambda a, b, x: lax.squeeze(ONE_LAYER @ b, (0,)),
    "split and merged": lambda a, b, x: (a @ b).reshape(2, 1, 12),
    "merged anew": lambda a, b, x: (LAYERS @ b).reshape(9, 2, 4).reshape(3, 24),
    "broadcast": lambda a, b, x: repeated(ONE_LAYER @ b, (2, 3, 6, 4), (1, 2, 3)),
    "narrowed": lambda a, b, x: (a @ b).astype(jnp.bfloat16),
    "no gradient": lambda a, b, x: lax.stop_gradient(a @ b),
    "negative": lambda a, b, x: lax.neg(-(a @ b) * 2),
    "copied": lambda a, b, x: lax.copy_p.bind(a @ b),
    "cut": lambda a, b, x: lax.slice(a @ b, (1, 1), (6, 4), (2, 1)),
    "cut before the start": lambda a, b, x: lax.dynamic_slice_in_dim(a @ b, x[0, 0].astype(np.int32) * 0 - 7, 3),
    "reversed": lambda a, b, x: lax.rev(ONE_LAYER @ b, (0, 2)),
    "split": lambda a, b, x: lax.split(a @ b, (1, 2, 3), axis=0)[2],
    "looked up": lambda a, b, x: taken(LAYERS @ b, 0),
    "looked up, or not a number": lambda a, b, x: taken(LAYERS @ b, 0, "fill"),
    "looked up, or zero": lambda a, b, x: taken(jnp.tensordot(a, LAYERS[:, :2], (1, 1)), 1, "fill", fill_value=0),
    "looked up in one": lambda a, b, x: taken(ONE_LAYER @ b, 0),
    "columns looked up": lambda a, b, x: taken(LAYERS @ b, 2),
    "of two products": lambda a, b, x: (a @ b) @ (b.T @ a.T),
    "a batch": lambda a, b, x: [w @ w.transpose(0, 2, 1) for w in [LAYERS + a[None]]],
    "added": lambda a, b, x: 2 + (a @ b + repeated(ROW)),
    "subtracted": lambda a, b, x: repeated(ROW) - a @ b,
    "multiplied": lambda a, b, x: (a @ b) * (a[::-1] @ b) * ROW[None],
    "merged and multiplied": lambda a, b, x: (LAYERS @ b).reshape(18, 4) * repeated(ROW, (18, 4)),
    "divided": lambda a, b, x: a @ b / repeated(ROW),
    "integers": lambda a, b, x: repeated(ROW.astype(np.int8)).astype(np.float32),
    "joined": lambda a, b, x: lax.concatenate([a @ b, 2 * (a @ b), repeated(ROW)], 0),
    "joined in turn": lambda a, b, x: lax.concatenate([a @ b + repeated(ROW), repeated(ROW, (6, 4))], 1),
    "stacked": lambda a, b, x: lax.concatenate([(a @ b)[None], (2 * a @ b)[None]], 0),
    "a call": lambda a, b, x: jax.jit(lambda a, b: (a @ b) * 2)(a, b),
    "a call that is placed": lambda a, b, x: jax.jit(lambda a, b: a @ b, **PLACED)(a, b),
}
NEEDED = {  # what reads a weight, and the equations that need its array, and how often they run
    "a function": (lambda a, b, x: [f(w) for w in [a @ b] for f in (jnp.tanh, jnp.sin)], [("tanh", 1)]),
    "no weight": (lambda a, b, x: jnp.tanh(x @ (x.T @ x)), []),
    "other sizes": (lambda a, b, x: (a @ b).reshape(8, 3), [("reshape", 1)]),
    "another order": (lambda a, b, x: lax.reshape(a @ b, (24,), (1, 0)), [("reshape", 1)]),
    "a smaller range": (lambda a, b, x: (a @ b).astype(np.float16), [("convert_element_type", 1)]),
    "nothing of one": (lambda a, b, x: (ONE_LAYER @ b)[:0], [("slice", 1)]),
    "merged rows": (lambda a, b, x: (LAYERS @ b).reshape(18, 4)[1:], [("slice", 1)]),
    "merged rows looked up": (lambda a, b, x: taken((LAYERS @ b).reshape(9, 2, 4), 0), [("gather", 1)]),
    "one looked up": (lambda a, b, x: taken(ONE_LAYER @ b, 0, "fill"), [("gather", 1)]),
    "or seven": (lambda a, b, x: taken(LAYERS @ b, 0, "fill", fill_value=7), [("gather", 1)]),
    "rows": (lambda a, b, x: taken(a @ b, 0), [("gather", 1)]),
    "a quotient": (lambda a, b, x: 1 / (a @ b + 20), [("div", 1)]),
    "a power": (lambda a, b, x: (a @ b) ** 2, [("integer_pow", 1)]),
    "a placed call": (lambda a, b, x: jax.jit(lambda w: w * 2, **PLACED)(a @ b), [("jit", 1)]),
    "a checkpoint": (lambda a, b, x: x @ jax.checkpoint(lambda a, b: (a @ b).T)(a, b).T, READ),
    "a choice": (lambda a, b, x: lax.switch(1, [lambda w: x @ w, lambda w: x @ -w], a @ b), READ * 2),
    "a constant of a loop": (lambda a, b, x: with_constant(a @ b, x), LOOPED),
    "a carry": (lambda a, b, x: lax.scan(lambda w, x: (w * 2, x @ w), a @ b, x), [("scan", 1)]),
    "layers": (lambda a, b, x: scanned((-(LAYERS @ b), x), lambda wx: wx[1] @ wx[0], reverse=True), LOOPED),
    "one layer": (lambda a, b, x: scanned((ONE_LAYER @ b, x[:1]), lambda wx: wx[1] @ wx[0]), READ),
    "merged layers": (lambda a, b, x: scanned((LAYERS @ b).reshape(18, 4), jnp.sin), [("scan", 1)]),
    "two loops": (lambda a, b, x: scanned(x, lambda x: scanned(b.T, lambda b: (x @ a) @ b + x @ (a @ B))), READ_OFTEN),
    "whole on shards": (lambda a, b, x: shards(lambda w, y: y @ w, Spec(), DATA, out=DATA)(a @ b, whole(2, 6)), READ),
    "rows on shards": (lambda a, b, x: shards(lambda w: jnp.sin(w * 2), DATA, out=DATA)(a @ b), SINE),
    "columns": (lambda a, b, x: shards(jnp.sin, Spec(None, ("data",)), out=Spec(None, "data"))(a @ b), SINE),
    "a row on each": (lambda a, b, x: shards(jnp.sin, DATA, out=DATA)((a @ b)[:2]), SINE),
    "merged on shards": (lambda a, b, x: shards(jnp.sin, DATA, out=DATA)((LAYERS[:2] @ b).reshape(12, 4)), SINE),
    "three merged": (lambda a, b, x: shards(jnp.sin, DATA, out=DATA)((LAYERS @ b).reshape(18, 4)), [("shard_map", 1)]),
    "repeated": (lambda a, b, x: shards(jnp.sin, DATA, out=DATA)(repeated(b[0])), [("shard_map", 1)]),
}
PROGRAMS = {name: (f, RETURNED) for name, f in IN_FACTORS.items()} | NEEDED


def interpret(function, *args, computes=True, **settings):
    """The outputs of a program of which the first two arguments are known, and the rules that interpreted it."""
    jaxpr, consts = jaxprs.consts_first(jax.make_jaxpr(function)(*args))
    facts = [Facts(known=i < 2, fixed=False, origins=frozenset([i][: i < 2]), formula=i) for i in range(3)]
    facts, found = [*(FACTS_OF_CONSTANT for _ in consts), *facts], InFactors(**settings)
    return Interpreter(found, computes=computes).arrays(jaxpr, [*consts, *args], facts), found


@pytest.fixture(scope="module")
def interpreted():
    """All programs at once, as one."""
    formed = {}

    def all_of_them(*args):
        found = {}
        for name, (function, _) in PROGRAMS.items():
            outs, noted = interpret(function, *args)
            found[name], formed[name] = (outs, jax.tree.leaves(function(*args))), noted.formed
        return found

    return jax.jit(all_of_them)(A, B, X), formed


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_interpreted_in_factors(name, interpreted):
    (got, want), formed = interpreted[0][name], interpreted[1][name]
    assert formed == PROGRAMS[name][1]
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-2, atol=1e-5)


def seen_at(primitive, function, **settings):
    """What rules are asked about the equations of this name."""
    found = interpret(function, A, B, X, **settings)[1].seen
    return [each for each in found if each.eqn.primitive.name == primitive]


@pytest.mark.parametrize("name", ["a call", "a checkpoint", "a choice", "layers", "two loops"])
def test_the_same_equations_need_arrays_where_nothing_is_computed(name):
    noted = []
    jax.make_jaxpr(lambda *args: noted.append(interpret(PROGRAMS[name][0], *args, computes=False)[1]))(A, B, X)
    assert noted[0].formed == PROGRAMS[name][1]


def test_rules_are_told_the_step():
    outs, found = interpret(lambda a, b, x: scanned(x, lambda x: scanned(a, index)), A, B, X)
    np.testing.assert_array_equal(outs[0], np.tile(np.arange(6), (3, 1)))
    assert [step.length for step in found.seen[-1].interpreter.steps] == [3, 6]
    outs, _ = interpret(lambda a, b, x: scanned(x, lambda x: shards(index, Spec(), out=Spec())(x)), A, B, X)
    np.testing.assert_array_equal(outs[0], np.arange(3))
    _, found = interpret(lambda a, b, x: with_constant(a @ b, x), A, B, X, counts_steps=False)
    assert found.seen[-1].interpreter.steps == (LoopStep(None, 3),)


def test_rules_are_told_where_an_equation_is_and_what_is_read():
    def both(a, b, x):
        w = recompute(lambda a, b: jax.jit(jnp.matmul)(a, b), a, b)
        return lax.cond(x[0, 0] > 0, lambda: a @ b, lambda: w + a @ b)

    in_apply, *in_branches = seen_at("dot_general", both)
    assert [each.interpreter.in_formula for each in (in_apply, *in_branches)] == [True, False, False]
    cond = in_branches[0].interpreter.path[0]
    assert [each.interpreter.path for each in in_branches] == [(cond, 0), (cond, 1)]
    assert (in_branches[1].maker, len(in_apply.maker)) == ((cond, 1, id(in_branches[1].eqn)), 5)
    for n in (1, 2):
        (seen,) = seen_at("split", lambda a, b, x, n=n: [jnp.sin(part) for part in lax.split(a, (2, 4))[:n]])
        assert seen.only_first_read == (n == 1)


def test_rules_are_told_facts():
    def looped(a, b, x):
        return lax.scan(lambda c, ax: (c * 2, (ax[1] @ (c @ b), ax[0] @ b)), a, (a[None], x[:1]))

    def facts(seen):
        return [(fact.origins, fact.steps, fact.mesh_axes, fact.formula) for fact in seen.facts]

    none, of_b = frozenset(), ({1}, frozenset(), frozenset(), 1)
    of_carry, _, of_slice = seen_at("dot_general", looped)
    assert facts(of_carry) == facts(of_slice) == [({0}, {0}, none, None), of_b]
    on_shards = shards(lambda a, b: a @ b, Spec(("data",)), Spec(), out=DATA)
    (seen,) = seen_at("dot_general", lambda a, b, x: on_shards(a, b))
    assert facts(seen) == [({0}, none, {"data"}, None), of_b]


def test_the_program_returns_a_sum_as_it_is():
    jaxpr = jax.make_jaxpr(lambda a, b: (a @ b).T)(A, B).jaxpr
    (found,) = Interpreter(InFactors()).run(jaxpr, [A, B], [Facts(known=True, fixed=i == 0) for i in range(2)])
    assert isinstance(found, Sum)
    assert ([factor.fixed for factor in found.products[0].factors], found.shape) == ([True, False], (4, 6))
