"""Programs that are interpreted give what they give, and weights stay in factors until their arrays are needed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec
from products import PRODUCTS, array_of_sum, product, sum_of, whole

from reparax.core.unchanged import recompute
from reparax.programs import dependence, interpreter, jaxprs, multiply, rules, sums
from reparax.programs.dependence import AllFacts, Facts
from reparax.programs.equations import Checkpoint, Jit, Named, SplitAxis, view_class_of, view_of
from reparax.programs.interpreter import Interpreter, LoopStep, has_body, interpret_bodies
from reparax.programs.sums import Draw, Sum

A, B, X = whole(6, 2), whole(2, 4, seed=1), whole(3, 6, seed=2)
LAYERS, ONE_LAYER = whole(3, 6, 2), whole(1, 6, 2)
KEY = np.zeros(2, np.uint32)
MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


class InFactors:
    """Keeps products of two known matrices, and notes what is asked. What is named "index" is that of the step."""

    def __init__(self, *, counts_steps=True):
        self.counts_steps, self.analysis, self.seen, self.formed = counts_steps, AllFacts(), [], []
        self.shards = []

    def may_introduce_sum(self, eqn, facts, out_facts):
        makes = out_facts.known and rules.may_make_sum(eqn)
        return makes or has_body(eqn) or view_class_of(eqn) in (Named, SplitAxis)

    def outputs(self, operation):
        eqn = operation.eqn
        self.seen.append(operation)
        if isinstance(operation.view, Named):
            return [operation.interpreter.steps[-1].index]
        if has_body(eqn):
            return interpret_bodies(operation)
        made = rules.make_if_smaller(eqn, operation.args, operation.facts) if operation.out_facts.known else None
        return rules.move_sum(eqn, operation.args) or (made and [made])

    def on_shard(self, x, facts):
        self.shards.append((x.shape, facts.mesh_axes))
        return x

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


PROGRAMS = {  # a function of a, b and data, and the equations that need the array, and how often they run
    "returned": (lambda a, b, x: a @ b, [(None, 1)]),
    "read twice": (lambda a, b, x: [f(w) for w in [a @ b] for f in (jnp.tanh, jnp.sin)], [("tanh", 1)]),
    "read again later": (
        lambda a, b, x: [y for w in [a @ b] for y in (jnp.tanh(w), (a @ b).T, jnp.sin(w))],
        [("tanh", 1), (None, 1)],
    ),
    "of data": (lambda a, b, x: jnp.tanh(x @ (x.T @ x)), []),
    "beside an equation without outputs": (
        lambda a, b, x: [jax.debug.callback(lambda _: None, x), a @ b][1],
        [(None, 1)],
    ),
    "a call": (lambda a, b, x: x @ jax.jit(lambda a, b: (a @ b) * 2)(a, b), [("dot_general", 1)]),
    "a call with a constant": (
        lambda a, b, x: x @ jax.jit(lambda a, b: (a @ b) * whole(6, 1))(a, b),
        [("dot_general", 1)],
    ),
    "a call that does nothing": (
        lambda a, b, x: x @ jax.jit(lambda w, x: (2.0, w))(a @ b, x)[1].T.T,
        [("dot_general", 1)],
    ),
    "a checkpoint": (lambda a, b, x: x @ jax.checkpoint(lambda a, b: (a @ b).T)(a, b).T, [("dot_general", 1)]),
    "a choice": (lambda a, b, x: lax.switch(1, [lambda w: x @ w, lambda w: x @ -w], a @ b), [("dot_general", 1)] * 2),
    "a constant of a loop": (lambda a, b, x: with_constant(a @ b, x), [("dot_general", 3)]),
    "carried": (lambda a, b, x: lax.scan(lambda w, x: (w * 2, x @ w), a @ b, x), [("scan", 1)]),
    "layers": (lambda a, b, x: scanned((LAYERS @ b, x), lambda wx: wx[1] @ wx[0]), [("dot_general", 3)]),
    "layers of both factors and of another": (
        lambda a, b, x: scanned((LAYERS[..., :1] * a.reshape(3, 1, 4) + whole(3, 6, 4), x), lambda wx: wx[1] @ wx[0]),
        [("dot_general", 3)],
    ),
    "layers along the second axis": (
        lambda a, b, x: scanned((jnp.swapaxes(whole(6, 3, 2) @ b, 0, 1), x), lambda wx: wx[1] @ wx[0]),
        [("dot_general", 3)],
    ),
    "layers backwards": (
        lambda a, b, x: scanned((-(LAYERS @ b), x), lambda wx: wx[1] @ wx[0], reverse=True),
        [("dot_general", 3)],
    ),
    "one layer": (lambda a, b, x: scanned((ONE_LAYER @ b, x[:1]), lambda wx: wx[1] @ wx[0]), [("dot_general", 1)]),
    "rows of several axes": (lambda a, b, x: scanned((LAYERS @ b).reshape(18, 4), jnp.sin), [("scan", 1)]),
    "rows of several axes and of one": (
        lambda a, b, x: scanned(whole(18, 4) + (LAYERS @ b).reshape(18, 4) + whole(18, 4), jnp.sin),
        [("scan", 1)],
    ),
    "loops in a loop": (
        lambda a, b, x: scanned(x, lambda x: scanned(b.T, lambda b: (x @ a) @ b + x @ (a @ B))),
        [("dot_general", 12)],
    ),
    "whole on shards": (
        lambda a, b, x: shards(lambda w, a: a @ w.T, Spec(), Spec("data"), out=Spec("data"))(a @ b, whole(2, 4)),
        [("dot_general", 1)],
    ),
    "rows on shards": (
        lambda a, b, x: shards(lambda w: jnp.sin(w * 2), Spec("data"), out=Spec("data"))(a @ b),
        [("sin", 1)],
    ),
    "columns on shards": (
        lambda a, b, x: shards(jnp.sin, Spec(None, ("data",)), out=Spec(None, "data"))(a @ b),
        [("sin", 1)],
    ),
    "one row on each shard": (
        lambda a, b, x: shards(jnp.sin, Spec("data"), out=Spec("data"))((a @ b)[:2]),
        [("sin", 1)],
    ),
    "merged on shards": (
        lambda a, b, x: shards(jnp.sin, Spec("data"), out=Spec("data"))((whole(2, 6, 2) @ b).reshape(12, 4)),
        [("sin", 1)],
    ),
    "merged of three on shards": (
        lambda a, b, x: shards(jnp.sin, Spec("data"), out=Spec("data"))((LAYERS @ b).reshape(18, 4)),
        [("shard_map", 1)],
    ),
    "rows of two on shards": (
        lambda a, b, x: shards(jnp.sin, Spec("data"), out=Spec("data"))(a @ b + whole(6, 4)),
        [("sin", 1)],
    ),
    "repeated on shards": (
        lambda a, b, x: shards(jnp.sin, Spec("data"), out=Spec("data"))(lax.broadcast_in_dim(b[0], (6, 4), (1,))),
        [("shard_map", 1)],
    ),
    "a sum placed": (
        lambda a, b, x: jax.jit(lambda w: w * 2, out_shardings=NamedSharding(MESH, Spec("data")))(a @ b),
        [("jit", 1)],
    ),
    "placed": (
        lambda a, b, x: jax.jit(lambda a, b: a @ b, out_shardings=NamedSharding(MESH, Spec("data")))(a, b),
        [(None, 1)],
    ),
}


def interpret(function, *args, computes=True, **settings):
    """The outputs of a program of which these arguments are known, and the rules that interpreted it."""
    jaxpr, consts = jaxprs.consts_first(jax.make_jaxpr(function)(*args))
    facts = [Facts(known=i < 2, fixed=False, origins=frozenset([i][: i < 2]), formula=i) for i in range(3)]
    facts, found = [*(dependence.FACTS_OF_CONSTANT for _ in consts), *facts], InFactors(**settings)
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
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "shards" not in name and "placed" not in name])
def test_the_same_equations_need_arrays_where_nothing_is_computed(name):
    function, formed = PROGRAMS[name]
    rules_seen = []
    jax.make_jaxpr(lambda *args: rules_seen.append(interpret(function, *args, computes=False)[1]))(A, B, X)
    assert rules_seen[0].formed == formed


def test_rules_are_told_the_step():
    outs, found = interpret(lambda a, b, x: scanned(x, lambda x: scanned(a, index)), A, B, X)
    np.testing.assert_array_equal(outs[0], np.tile(np.arange(6), (3, 1)))
    (seen,) = [each for each in found.seen if view_class_of(each.eqn) is Named]
    assert [step.length for step in seen.interpreter.steps] == [3, 6]
    outs, _ = interpret(lambda a, b, x: scanned(x, lambda x: shards(index, Spec(), out=Spec())(x)), A, B, X)
    np.testing.assert_array_equal(outs[0], np.arange(3))
    _, found = interpret(lambda a, b, x: scanned(x, lambda x: x @ (a @ b)), A, B, X, counts_steps=False)
    assert found.seen[-1].interpreter.steps == (LoopStep(None, 3),)
    (n,) = jax.export.symbolic_shape("n")
    unknown = Interpreter(found, times=3).inside(found.seen[-1].eqn, step=LoopStep(None, n))
    assert unknown.times == 3 * sums.UNKNOWN


def seen_at(primitive, function, **settings):
    """What rules are asked about the equations of this name."""
    found = interpret(function, A, B, X, **settings)[1].seen
    return [each for each in found if each.eqn.primitive.name == primitive]


def test_the_operands_of_a_loop_are_still_those_that_the_program_gave():
    (loop,) = seen_at("scan", PROGRAMS["layers"][0])
    assert [isinstance(x, Sum) for x in loop.args].count(True) == 1


def test_a_checkpoint_is_kept_with_its_settings_where_something_is_computed():
    settings = {"policy": jax.checkpoint_policies.dots_saveable, "prevent_cse": False}

    def kept(*, computes):
        def function(*args):
            return interpret(lambda a, b, x: jax.checkpoint(jnp.sin, **settings)(x), *args, computes=computes)[0]

        views = map(view_of, jax.make_jaxpr(function)(A, B, X).jaxpr.eqns)
        return [{"policy": v.policy, "prevent_cse": v.prevent_cse} for v in views if isinstance(v, Checkpoint)]

    assert kept(computes=True) == [settings]
    assert kept(computes=False) == []


def test_rules_are_told_where_an_equation_is():
    def both(a, b, x):
        w = recompute(lambda a, b: jax.jit(jnp.matmul)(a, b), a, b)
        return lax.cond(x[0, 0] > 0, lambda: a @ b, lambda: w + a @ b)

    in_apply, *in_branches = seen_at("dot_general", both)
    assert [each.interpreter.in_formula for each in (in_apply, *in_branches)] == [True, False, False]
    cond = in_branches[0].interpreter.path[0]
    assert [each.interpreter.path for each in in_branches] == [(cond, 0), (cond, 1)]
    assert in_branches[1].maker == (cond, 1, id(in_branches[1].eqn))
    assert len(in_apply.maker) == 5


def test_rules_are_told_whether_only_the_first_output_is_read():
    def parts(*read):
        return lambda a, b, x: [jnp.sin(lax.split(a, (1, 2, 3))[i]) for i in read]

    assert [seen_at("split", parts(i))[0].only_first_read for i in range(3)] == [True, False, False]


def test_equations_that_are_evaluated_together_return_what_is_read_later(monkeypatch):
    evaluated, evaluate = [], jaxprs.evaluate
    monkeypatch.setattr(jaxprs, "evaluate", lambda program, args: evaluated.append(program) or evaluate(program, args))
    jax.eval_shape(lambda *args: interpret(lambda a, b, x: (x @ jnp.cos(jnp.sin(a)), a @ b), *args)[0], A, B, X)
    assert [len(program.outvars) for program in evaluated] == [1]


def test_a_step_of_a_scan_has_the_entries_of_each_factor_at_its_index():
    x = sum_of(product("l i o", ("l", whole(3)), ("lir", whole(3, 6, 2)), ("ro", whole(2, 4, seed=1))))
    slices = interpreter._Slices.of(x)
    steps = [array_of_sum(slices.at_step([array[i] for array in slices.arrays])) for i in range(3)]
    np.testing.assert_array_equal(steps, array_of_sum(x))


def test_rules_are_told_facts():
    def looped(a, b, x):
        return lax.scan(lambda c, ax: (c * 2, (ax[1] @ (c @ b), ax[0] @ b)), a, (a[None], x[:1]))

    def both(a, b):
        return lambda slices: (a @ slices[1], slices[0] @ b)

    def facts(seen):
        return [(fact.origins, fact.steps, fact.mesh_axes, fact.formula) for fact in seen.facts]

    none, of_b = frozenset(), ({1}, frozenset(), frozenset(), 1)
    of_carry, _, of_slice = seen_at("dot_general", looped)
    assert facts(of_carry) == facts(of_slice) == [({0}, {0}, none, None), of_b]
    (seen,) = seen_at("dot_general", lambda a, b, x: jax.jit(lambda a, b: (a * LAYERS[0]) @ b)(a, b))
    assert [fact.origins for fact in seen.facts] == [{0}, {1}]
    (call,) = seen_at("jit", lambda a, b, x: jax.jit(lambda a, x: (a * 2, x * 2))(a, x))
    assert (call.out_facts.known, call.out_facts.origins) == (True, {0})
    inside = seen_at("dot_general", lambda a, b, x: scanned(a[None], lambda a: scanned((a[None], b[None]), both(a, b))))
    assert [[fact.steps for fact in seen.facts] for seen in inside] == [[{0}, {1}], [{0, 1}, set()]]
    on_shards = shards(lambda a, b: a @ b, Spec(("data",)), Spec(), out=Spec("data"))
    (seen,) = seen_at("dot_general", lambda a, b, x: on_shards(a, b))
    assert facts(seen) == [({0}, none, {"data"}, None), of_b]
    of_weights = shards(lambda w, v: (jnp.sin(w), jnp.sin(v)), Spec(("data",)), Spec(), out=(Spec("data"), Spec()))
    assert interpret(lambda a, b, x: of_weights(a @ b, a @ b), A, B, X)[1].shards == [
        ((3, 4), {"data"}),
        ((6, 4), none),
    ]


def test_the_gradient_of_slices_stops_before_a_loop_that_stops_it():
    def stopping(of_slice, next_carry=lambda c, x: c):
        def step(c, x):
            y = jax.jit(lambda x: lax.stop_gradient(x) * 2)(x)
            return next_carry(c, x), (y, of_slice(x))

        return lambda a, b, x: lax.scan(step, jnp.zeros(2), a)

    def stopping_second(c, x):
        return jax.jit(lambda c, x: c + lax.stop_gradient(x) * A[0])(c, x)

    cases = [
        (stopping(lambda x: 2.0), True),
        (stopping(jax.checkpoint(lambda x: 2 * lax.stop_gradient(x))), True),
        (stopping(jnp.sin), False),
        (lambda a, b, x: lax.scan(lambda c, x: (stopping_second(c, x), 2.0), jnp.zeros(2), a), True),
        (stopping(lambda x: 2.0, lambda c, x: x), False),
        (lambda a, b, x: lax.scan(lambda c, _: (c, 2.0), 0.0, a), False),
    ]
    for function, stops in cases:
        text = str(jax.make_jaxpr(lambda *args, f=function: interpret(f, *args)[0])(A, B, X))
        assert ("stop_gradient" in text.split("scan[")[0]) == stops
        seen = interpret(function, A, B, X)[1].seen
        assert {each.facts[0].fixed for each in seen if view_class_of(each.eqn) is Jit} <= {stops}


def test_an_equation_that_computes_nothing_gives_its_operands():
    """Some transforms of JAX leave calls without equations."""
    call = jax.make_jaxpr(jax.jit(lambda x, y: (x * 2, y + 1)))(A, A).jaxpr
    (body,) = jaxprs.inner_programs(call.eqns[0])
    literal = next(v for v in body.eqns[0].invars if hasattr(v, "val"))
    empty = call.eqns[0].replace(params=jaxprs._call_of(body.replace(eqns=[], outvars=[body.invars[1], literal])))
    in_arrays, facts = InFactors(), [Facts(known=False, fixed=False)] * 2
    in_arrays.may_introduce_sum = lambda *_: False
    b, two = Interpreter(in_arrays, computes=False).run(call.replace(eqns=[empty]), [A, X], facts)
    assert b is X
    assert two == 2
    stop = jax.make_jaxpr(lambda x: lax.stop_gradient(x))(A).jaxpr
    for fixed in (True, False):
        (stopped,) = Interpreter(InFactors()).run(stop, [A], [Facts(known=True, fixed=fixed)])
        assert (stopped is A) == fixed
    later = jax.make_jaxpr(lambda x: lax.stop_gradient(x + x))(A).jaxpr
    (doubled,) = Interpreter(InFactors()).run(later, [A], [Facts(known=False, fixed=True)])
    np.testing.assert_array_equal(doubled, 2 * A)


def test_a_call_that_places_its_operands_or_returns_constants_is_run():
    placed = NamedSharding(MESH, Spec("data"))
    for call in (jax.jit(lambda x: x, out_shardings=placed), jax.jit(lambda x: (x, LAYERS))):
        jaxpr, consts = jaxprs.consts_first(jax.make_jaxpr(call)(A))
        in_arrays = InFactors()
        in_arrays.may_introduce_sum = lambda *_: False
        facts = [Facts(known=False, fixed=False) for _ in jaxpr.invars]
        found, *constants = Interpreter(in_arrays).run(jaxpr, [*consts, A], facts)
        assert constants or found.sharding == placed
        np.testing.assert_array_equal(constants, [LAYERS][: len(constants)])


SPLITS = {  # the specs that can be given to factors: the label of the first axis or of the second goes by the spec
    "low-rank": {("x",): 0, (("x", "y"),): 0, (None, "x"): 1, (None, "y"): None, (None, ("x", "y")): None},
    "diagonal": {("x",): None, (None, "x"): None, (): ()},
    "merged": {("x",): 0, ("y",): None},
    "row": {("x",): None, (None, "x"): 1},
    "number": {("x",): None},
}


@pytest.mark.parametrize("name", SPLITS)
def test_the_first_label_of_an_axis_is_split_if_it_can_be(name):
    axes, mesh = PRODUCTS[name].axes, {"x": 2, "y": 3}
    for entries, axis in SPLITS[name].items():
        want = axis if axis is None else {axes[axis][0]: entries[axis]} if entries else {}
        assert interpreter._entries_of_labels(PRODUCTS[name], Spec(*entries), mesh) == want


def test_the_factors_of_a_sum_are_split_with_the_key_of_their_draw():
    (operation,) = seen_at("shard_map", PROGRAMS["rows on shards"][0])
    drawn = rules.map_factors(operation.args[0], lambda factor: replace(factor, draw=Draw("w", KEY)))
    _, specs = interpreter._shard_input(operation, drawn, Spec("data"))
    factors = specs.products[0].factors
    assert [factor.array for factor in factors] == [Spec("data", None), Spec(None, None)]
    assert [factor.draw for factor in factors] == [Draw("w", Spec())] * 2
    whole_matrix, _ = interpreter._shard_input(operation, sum_of(PRODUCTS["rotated"]), Spec("data"))
    assert [x.shape for x in jax.tree.leaves(whole_matrix)] == [(4, 4), (4,)]


def test_the_program_returns_a_sum_as_it_is():
    jaxpr = jax.make_jaxpr(lambda a, b: (a @ b).T)(A, B).jaxpr
    (found,) = Interpreter(InFactors()).run(jaxpr, [A, B], [Facts(known=True, fixed=True)] * 2)
    assert isinstance(found, Sum)
    assert [factor.fixed for factor in found.products[0].factors] == [True, True]
