"""What ``remat`` finds in small programs: an order, what must wait, what is costly, masks, and what is stored."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.experimental.jet import jet
from one_array import normal

import reparax as rpx
from reparax.core.unchanged import recompute
from reparax.programs import dependence, jaxprs
from reparax.transforms import (
    _factored,
    _local,
    _remat,
    _remat_derivative,
    _remat_order,
    _remat_rewrites,
    _saved_residuals,
)
from reparax.transforms._explained import Explained, Weight

KEY = jax.eval_shape(lambda: jax.random.key(0))


def traced(fun, *shapes):
    """The program of a function of arrays of these shapes, or types."""
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) if isinstance(shape, tuple) else shape for shape in shapes]
    program, consts = jaxprs.consts_first(jax.make_jaxpr(fun)(*types))
    assert not consts
    return program


def names_of(program, found):
    """What values are: inputs by their letters, and others by the primitives that compute them."""
    names = {v: "abcd"[i] for i, v in enumerate(program.invars)}
    names |= {v: eqn.primitive.name for eqn in program.eqns for v in eqn.outvars}
    return sorted(names[v] for v in found)


# ---- the order


def printing(x):
    jax.debug.callback(lambda x: None, x)
    return x


def far_apart(v, w, x):
    """The second weight is computed by the equations 1 and 8."""
    u, w = jnp.sin(v), jnp.cos(w)
    for _ in range(6):
        u = jnp.exp(u)
    return (x @ jnp.log(w)) @ u


# A function, which of its inputs are known, and the names of the equations of each batch; delayed ones in brackets.
ORDERS = {
    "two weights": (
        lambda v, w, x: (x @ jnp.sin(v)) @ jnp.cos(w),
        [True, True, False],
        ["[sin]", "dot_general", "[cos]", "dot_general"],
    ),
    "equations that are far apart": (
        far_apart,
        [True, True, False],
        ["[cos log]", "dot_general", "[sin exp exp exp exp exp exp]", "dot_general"],
    ),
    "a weight that is read twice": (
        lambda w, x: jnp.exp((lambda v: x @ v @ v)(jnp.sin(w))),
        [True, False],
        ["[sin]", "dot_general dot_general exp"],
    ),
    "a weight of a weight": (
        lambda w, x: (lambda v: (x @ jnp.cos(v)) + v)(jnp.sin(w)),
        [True, False],
        ["[sin cos]", "dot_general add"],
    ),
    "a weight that is returned": (lambda w, x: (jnp.exp(x), jnp.sin(w)), [True, False], ["exp", "sin"]),
    "a weight that nobody reads": (lambda w, x: (jnp.sin(w), jnp.exp(x))[1], [True, False], ["exp"]),
    "no weight": (lambda w, x: jnp.exp(w @ x), [False, False], ["dot_general exp"]),
    "an effect": (lambda w, x: x @ jnp.sin(printing(w)), [True, False], ["debug_callback", "[sin]", "dot_general"]),
    "an effect that reads a weight": (
        lambda w, x: x @ printing(jnp.sin(w)),
        [True, False],
        ["[sin]", "debug_callback dot_general"],
    ),
    "an equation that is replaced": (
        lambda w, x: jnp.exp(jnp.tanh(x @ w) @ jnp.sin(w)),
        [True, False],
        ["dot_general", "tanh", "[sin]", "dot_general exp"],
    ),
}


def replaced(eqn):
    """A function in place of what computes a tanh."""
    return (lambda x: [x]) if eqn.primitive.name == "tanh" else None


@pytest.mark.parametrize("name", ORDERS)
def test_weights_are_computed_just_before_they_are_read(name):
    fun, known, want = ORDERS[name]
    program = traced(fun, *((3, 3) for _ in known))
    is_known = dependence.known_variables(program, known)
    batches = _remat_order.reorder(program, is_known, replaced)
    found = [(" ".join(eqn.primitive.name for eqn in batch.eqns), bool(batch.reads_beside)) for batch in batches]
    assert [f"[{text}]" if delayed else text for text, delayed in found] == want


def identities(fun, *shapes, known):
    """The ties to data and the arrays that are stored whole, if a function runs in delayed order: what they read."""
    program = traced(fun, *shapes)
    types = [v.aval for v in program.invars]
    found = traced(lambda *args: _remat_order.run_delayed(program, args, known), *types)
    names = {v: "abcd"[i] for i, v in enumerate(found.invars)} | {
        v: eqn.primitive.name for eqn in found.eqns for v in eqn.outvars
    }
    ties = [[names[v] for v in eqn.invars] for eqn in found.eqns if eqn.primitive.name == "reparax_tie"]
    return ties, [names[eqn.invars[0]] for eqn in found.eqns if eqn.primitive.name == "reparax_whole"]


FLAG, PLACES = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((3,), jnp.int32)


def largest(x):
    return lax.argmax(x, 0, jnp.int32)


@pytest.mark.parametrize(
    ("fun", "shapes", "known", "ties", "stored"),
    [
        (lambda w, x: x @ jnp.sin(w), [(3, 3), (2, 3)], [True, False], [["a", "b"]], ["sin"]),
        (lambda w, x: x @ (w * 2), [(3, 3), (2, 3)], [True, False], [["a", "b"]], []),
        (lambda w, x: x @ w.T, [(3, 3), (2, 3)], [True, False], [], []),
        (lambda w, x: (jnp.exp(x), jnp.sin(w)), [(3, 3), (2, 3)], [True, False], [], []),
        (lambda w, x: x[largest(w)], [(3, 3), (3,)], [True, False], [["argmax", "b"]], []),
        (
            lambda w, i, x, v: lax.select_n(i, jnp.sin(w), x) + v,
            [(3, 3), FLAG, (3, 3), (3, 3)],
            [True, False, False, True],
            [["a", "c"]],
            ["sin"],
        ),
        (
            lambda w, i, x, v: lax.select_n(i, jnp.sin(w), v) + x,
            [(3, 3), FLAG, (3, 3), (3, 3)],
            [True, False, False, True],
            [["a", "b"]],
            ["sin"],
        ),
        (
            lambda w, k: jax.jit(lambda w, k: w * jax.random.uniform(k))(jnp.sin(w), k),
            [(3, 3), KEY],
            [True, False],
            [],
            [],
        ),
    ],
)
def test_weights_wait_for_the_array_of_most_axes_that_their_reader_needs(fun, shapes, known, ties, stored):
    assert identities(fun, *shapes, known=known) == (ties, stored)


# ---- what must wait


WAITING = {
    "views": (lambda a: (a.T, a.reshape(8, 1, 8), lax.stop_gradient(a)), [(8, 8)], ""),
    "a constant": (lambda a: (a.T, jnp.zeros(3)), [(8, 8)], ""),
    "what is computed of constants": (lambda a: (a.T, jnp.sin(lax.iota(jnp.float32, 8))), [(8, 8)], ""),
    "what is computed": (lambda a: jnp.sin(a), [(8, 8)], "a"),
    "what is larger": (lambda a: jnp.broadcast_to(jnp.sin(a), (8, 8)), [(8,)], "a"),
    "lengths of a normed weight": (lambda a: a / jnp.sqrt(jnp.sum(a * a, 0)), [(8, 8)], "reduce_sum"),
    "a small input": (lambda a, b: a * jnp.tile(b, (2, 2)), [(8, 8), (4, 4)], "b"),
    "a small input that is moved": (
        lambda a, b, c: (jnp.sin(a), b.T, jnp.sin(c)),
        [(8, 8), (4, 4), (2, 2)],
        "a b c",
    ),
    "an input that is not small": (lambda a, b: a * jnp.tile(b, 8), [(64,), (8,)], "b"),
    "the smaller half": (lambda a, b: jnp.sin(a) * b[:, None], [(8, 8), (8,)], "a b"),
    "operands of a product": (lambda a, b: jnp.square(a) @ jnp.square(b), [(2, 8), (8, 8)], "a b"),
    "a kernel": (lambda a, b: lax.conv(a * 2, b * 2, (1, 1), "SAME"), [(1, 2, 8, 8), (2, 2, 3, 3)], "a b"),
    "an operand that is read in place": (lambda a, b: jnp.square(a) @ b.T, [(2, 8), (8, 8)], "a"),
    "what waits is a second output": (
        lambda a, b: a * lax.top_k(b, 1)[1].astype(jnp.float32),
        [(8, 8), (4,)],
        "b",
    ),
    "new axes": (lambda a: lax.broadcast_in_dim(a, (1, 8, 8), (1, 2)), [(8, 8)], ""),
    "repeated entries": (lambda a: lax.broadcast_in_dim(a, (4, 8, 8), (1, 2)), [(8, 8)], "a"),
    "a large value, computed with costly operations": (lambda a: jnp.sum(jnp.sin(a) * jnp.cos(a), 0), [(8, 8)], "a"),
    "a fourth of the largest, computed with costly operations": (
        lambda a: a * jnp.tile(jnp.sin(a[:2]), (4, 1)) * a[:1, :1],
        [(8, 8)],
        "slice",
    ),
    "cheap values that are summed": (lambda a: jnp.sum(a * 2 + 1, 0), [(8, 8)], "reduce_sum"),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_smallest_values_wait_that_suffice(name):
    fun, shapes, want = WAITING[name]
    with jax.numpy_rank_promotion("allow"):
        program = traced(fun, *shapes)
    assert names_of(program, _remat_order.barrier_inputs(program)) == want.split()


@pytest.mark.parametrize(
    ("fun", "want"),
    [
        (lambda a, b: a.T, ""),
        (lambda a, b: jnp.sin(a), "a"),
        (lambda a, b: jnp.sin(a.T), "a"),
        (lambda a, b: (jnp.sin(a), b.T), "a"),
        (lambda a, b: a + b, "ab"),
        (lambda a, b, x: (a @ x, jnp.sin(b)), "b"),
        (lambda a, b, x: jnp.sin(a.T @ x), ""),
    ],
)
def test_inputs_from_which_more_than_views_are_known(fun, want):
    program = traced(fun, *3 * [(3, 3)]) if fun.__code__.co_argcount == 3 else traced(fun, (3, 3), (3, 3))
    known = [True, True, False][: len(program.invars)]
    assert names_of(program, _remat_order.read_as_more_than_views(program, known)) == list(want)


def cheap(n):
    def fun(a):
        for _ in range(n):
            a = a + 1
        return a

    return fun


@pytest.mark.parametrize(
    ("fun", "costly"),
    [
        (cheap(32), False),
        (cheap(33), True),
        (jax.jit(cheap(33)), True),
        (jax.jit(cheap(32)), False),
        (lambda a: jnp.sin(a), True),
        (jax.jit(jnp.sin), True),
        (lambda a: a / jnp.sqrt(jnp.sum(a * a)), False),
        (lambda a: cheap(20)(a) * cheap(20)(a), True),
        (lambda a: (lambda b: b * b)(cheap(30)(a)), False),
        (lambda a: a * jnp.broadcast_to(jnp.sin(a[:2]), (4, 2, 8)).reshape(8, 8), False),
        (lambda a: a * jnp.broadcast_to(jnp.sin(a[:4]), (2, 4, 8)).reshape(8, 8), True),
        (lambda a: (a + 1).T.astype(jnp.bfloat16), False),
    ],
)
def test_values_of_many_operations_for_each_entry_are_costly(fun, costly):
    assert bool(_remat_order.costly_outputs(traced(fun, (8, 8)))) == costly


# ---- rewrites


def applied(f, *args):
    """As ``apply`` computes an array."""
    return recompute(lambda *args: f(*args[:-1]), *args, None)


INLINED = {
    "apply": (lambda w, x: x @ applied(jnp.sin, w), "sin dot_general"),
    "in a call": (lambda w, x: jax.jit(lambda w, x: x @ applied(jnp.sin, w))(w, x), "sin dot_general"),
    "in calls that are equal": (
        lambda w, x: (lambda f: f(w, f(w, x)))(jax.jit(lambda w, x: x @ applied(jnp.sin, w))),
        "sin dot_general sin dot_general",
    ),
    "not in a loop": (lambda w, x: lax.fori_loop(0, 2, lambda _, x: x @ applied(jnp.sin, w), x), "scan"),
    "nor a call without one": (lambda w, x: jax.jit(lambda x: x @ w)(applied(jnp.sin, w)), "sin jit"),
}


@pytest.mark.parametrize("name", INLINED)
def test_apply_and_calls_that_contain_it_are_inlined(name, monkeypatch):
    fun, want = INLINED[name]
    program, traced_again = traced(fun, (3, 3), (3, 3)), []
    rewrite = dependence.rewrite
    monkeypatch.setattr(dependence, "rewrite", lambda *args: traced_again.append(name) or rewrite(*args))
    found, consts = _remat_rewrites.with_apply_inlined(program, [v.aval for v in program.invars])
    assert [eqn.primitive.name for eqn in found.eqns] == want.split()
    assert len(found.invars) == len(consts) + 2
    assert bool(traced_again) == ("equal" in name)


# An equation with a body of a weight and data, and which inputs of its body are known; None if the body stays as it is.
BODIES = {
    "weights of each step": (
        lambda w, x: lax.scan(lambda x, w: (x @ jnp.sin(w), None), x, w)[0],
        [(2, 3, 3), (3, 3)],
        [False, True],
    ),
    "a weight that each step reads": (
        lambda w, x: lax.scan(lambda x, _: (x @ jnp.sin(w), None), x, length=2)[0],
        [(3, 3), (3, 3)],
        [True, False],
    ),
    "a call": (lambda w, x: jax.jit(lambda w, x: x @ jnp.sin(w))(w, x), [(3, 3), (3, 3)], [True, False]),
    "a call in a loop": (
        lambda w, x: lax.scan(lambda x, w: (jax.jit(lambda w, x: x @ w)(w, x), None), x, w)[0],
        [(2, 3, 3), (3, 3)],
        [False, True],
    ),
    "a weight as it is": (lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, w)[0], [(2, 3, 3), (3, 3)], None),
    "a carry that data reaches": (
        lambda w, x: lax.scan(lambda c, x: (x @ jnp.sin(c), None), w, x)[0],
        [(3, 3), (2, 3, 3)],
        None,
    ),
    "a loop without an end": (
        lambda w, x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ jnp.sin(w), x),
        [(3, 3), (3, 3)],
        None,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_recompute_that_mix_weights_and_data(name):
    fun, shapes, want = BODIES[name]
    program, found = traced(fun, *shapes), []

    def function_of_body(body, known):
        found.append(known)
        return lambda *args: args

    for known in ([True, True], [False, False], [True, False]):
        rule = _remat_rewrites.rule_for_bodies(program, known, function_of_body)
        assert (rule(program.eqns[-1]) is None) == (want is None or known != [True, False])
    assert found == ([] if want is None else [want])


LIMIT = 128  # A matrix of this size is no large one.


@pytest.mark.parametrize(
    ("fun", "types", "known", "count"),
    [
        (lambda x, w: x @ w, [(2, LIMIT + 1), (LIMIT + 1, LIMIT)], [False, True], 1),
        (lambda x, w: x @ w, [(2, LIMIT), (LIMIT, LIMIT)], [False, True], 0),
        (lambda x, w: x @ w, [(2, LIMIT + 1), (LIMIT + 1, LIMIT)], [False, False], 0),
        (lambda x, w: x @ jnp.sin(w), [(2, LIMIT + 1), (LIMIT + 1, LIMIT)], [False, True], 0),
        (lambda x, w: x.T @ w, [(LIMIT + 1, LIMIT), (LIMIT + 1, LIMIT)], [True, False], 0),
        (
            lambda x, w: x @ w.astype(jnp.float32),
            [(2, 2 * LIMIT), jax.ShapeDtypeStruct((2 * LIMIT, 2 * LIMIT), jnp.bfloat16)],
            [False, True],
            0,
        ),
    ],
)
def test_large_weights_of_a_step_are_marked_that_it_reads_in_place(fun, types, known, count):
    program = traced(fun, *types)
    found, consts = _remat_rewrites._mark_reads_in_step(program, known, 1)
    assert (found is program) == (count == 0)
    assert str(found).count("reparax_read") == count
    assert len(found.invars) == len(consts) + 2


def test_what_a_loop_carries_is_no_slice_of_a_step():
    def looped(h, k, m, w):
        return lax.scan(lambda c, w: ((c[0] @ c[1] @ w, c[2], c[1]), None), (h, k, m), w)[0]

    n = LIMIT + 1
    (scan,) = traced(looped, (2, n), (n, n), (n, n), (3, n, n)).eqns
    body, consts, known = _remat_rewrites._body_with_known_inputs(scan, [False, True, True, True])
    assert str(body).count("reparax_read") == 1
    assert known == [True] * len(consts) + [False, True, True, True]


STACK = (12, 64, 64)  # three times as large as what is worth to be moved


def scan_of(make):
    def fun(*args):
        *made, x = args
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, make(*made))[0]

    return fun


MOVED = {
    "a normed weight": (scan_of(lambda g, v: g * jnp.sin(v)), [(12, 1, 64), STACK], 1),
    "a matrix for all layers": (scan_of(lambda u, v: u[None] * jnp.sin(v)), [(64, 64), STACK], 1),
    "lengths of another layout": (scan_of(lambda g, v: jnp.swapaxes(g, 0, 1) * jnp.sin(v)), [(1, 12, 64), STACK], 1),
    "lengths of a turned layout": (scan_of(lambda g, v: g.transpose(2, 0, 1) * jnp.sin(v)), [(1, 64, 12), STACK], 1),
    "a weight that each step also reads whole": (
        lambda v, x: (lambda w: lax.scan(lambda x, own: (jnp.tanh(x @ own @ w[0]), None), x, w)[0])(jnp.sin(v)),
        [STACK],
        1,
    ),
    "numbers of layers": (scan_of(lambda v: jnp.sin(v) * lax.broadcasted_iota(jnp.float32, STACK, 0)), [STACK], 1),
    "a bias of all steps": (
        lambda b, v, x: lax.scan(lambda x, w: (jnp.tanh(x @ w) + b, None), x, jnp.sin(v))[0],
        [(8, 64), STACK],
        1,
    ),
    "an input": (scan_of(lambda v: v), [STACK], 0),
    "a small weight": (scan_of(jnp.sin), [(4, 64, 64)], 0),
    "a weight of data": (scan_of(jnp.sin), [STACK], 0),
    "a weight for each of n layers": (scan_of(jnp.sin), [(*jax.export.symbolic_shape("n"), 64, 64)], 0),
    "a weight of all layers": (scan_of(lambda v: jnp.cumsum(v, 0)), [STACK], 0),
    "a weight and one that stays": (
        lambda v, w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w[0] @ w[1]), None), x, (w, jnp.sin(v)))[0],
        [STACK, STACK],
        1,
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_stacked_weights_are_computed_in_the_steps_of_a_scan(name):
    fun, shapes, count = MOVED[name]
    program = traced(fun, *shapes, (8, 64))
    known = [*(name != "a weight of data" for _ in shapes), False]
    found, consts = _remat_rewrites.move_into_scans(program, [v.aval for v in program.invars], known)
    assert (found is program) == (count == 0)
    (scan,) = (eqn for eqn in found.eqns if eqn.primitive.name == "scan")
    inside = [eqn.primitive.name for eqn in scan.params["jaxpr"].jaxpr.eqns]
    assert inside.count("sin") == count
    if count:
        assert any(eqn.primitive.name == "sin" for eqn in found.eqns) == ("whole" in name)
        args = [normal(*v.aval.shape, seed=i, scale=0.1) for i, v in enumerate(program.invars)]
        got, want = jax.jit(lambda *args: (jaxprs.evaluate(found, [*consts, *args]), jaxprs.evaluate(program, args)))(
            *args
        )
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)


def halves(c, n):
    """Of the size of a stack, made of sums ``c`` over all layers, of which ``n`` columns are used twice."""
    sums = jnp.cumsum(c, 0)
    return jnp.concatenate([sums, sums[:, :, :n]], 2)


WORTH = {
    "a weight": (jnp.sin, [STACK], True),
    "just large": (jnp.sin, [(12, 64, 22)], True),
    "just small": (jnp.sin, [(16, 64, 16)], False),
    "sums over layers": (lambda a: jnp.cumsum(a, 0), [STACK], False),
    "half of it is stored": (lambda a, c: jnp.sin(a) + halves(c, 32), [STACK, (12, 64, 32)], True),
    "more than half of it is stored": (lambda a, c: jnp.sin(a) + halves(c, 30), [STACK, (12, 64, 34)], False),
    "a transpose": (lambda a: jnp.swapaxes(a, 0, 1), [(64, 12, 64)], False),
    "a large input is summed": (lambda a: jnp.sum(jnp.sin(a), 1), [STACK], True),
    "a large matrix for all": (lambda a, b: a @ b, [(12, 64), (64, 512)], False),
    "an input": (lambda a: a, [STACK], False),
}


@pytest.mark.parametrize("name", WORTH)
def test_stacked_weights_are_moved_if_little_is_stored_in_their_place(name):
    fun, shapes, want = WORTH[name]
    program = traced(fun, *shapes)
    assert _remat_rewrites._is_worth_moving(program, program.outvars[0]) == want


def uniform(key, shape=(16, 64)):
    return jax.random.uniform(key, shape)


MASKS = {
    "a mask": (lambda w, k: jnp.where(uniform(k) < 0.5, w, 0), 1),
    "a mask and its opposite": (lambda w, k: (lambda m: jnp.where(m, w, 0) * jnp.where(~m, w, 1))(uniform(k) < 0.5), 1),
    "two masks of the same numbers": (lambda w, k: (lambda u: jnp.where((u < 0.5) | (u > 0.7), w, 0))(uniform(k)), 2),
    "a mask of a mask and of numbers": (
        lambda w, k: jnp.where(jax.jit(lambda m, n: m & (n > 0))(uniform(k) < 0.5, jnp.ones((16, 64))), w, 0),
        2,
    ),
    "a mask that is read, and a mask of it and of numbers": (
        lambda w, k: (
            lambda m: jnp.where(m, w, 0) * jnp.where(jax.jit(lambda m, n: m & (n > 0))(m, jnp.ones((16, 64))), w, 1)
        )(uniform(k) < 0.5),
        2,
    ),
    "numbers that are read too": (lambda w, k: (lambda u: jnp.where(u < 0.5, w, u))(uniform(k)), 0),
    "numbers of another mask that are read": (
        lambda w, k: (lambda u, v: jnp.where(u < v, w, 0) * jnp.where(v < 0.5, v, 0))(
            uniform(k), uniform(jax.random.fold_in(k, 1))
        ),
        0,
    ),
    "a mask of data": (lambda w, k: jnp.where(w < 0.5, w, 0), 0),
    "a small mask": (lambda w, k: jnp.where(uniform(k, (16, 62)) < 0.5, w[:, :62], 0), 0),
    "a mask without a multiple of 8": (lambda w, k: jnp.where(uniform(k, (15, 71)) < 0.5, 1.0, 0), 0),
    "a mask of fewer numbers": (lambda w, k: jnp.where(jnp.zeros((16, 64)) < uniform(k, (64,))[None], w, 0), 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_stored_whose_numbers_nothing_else_reads(name):
    fun, count = MASKS[name]
    program = traced(fun, (16, 64), KEY)
    for known, want in (([True, True], count), ([False, True], count), ([True, False], 0)):
        assert len(_remat_rewrites._masks_to_store(program, known)) == want
    found, consts = _remat_rewrites.store_masks_in_bits(program, [v.aval for v in program.invars], [False, True])
    assert (found is program) == (count == 0)
    assert len(found.invars) == len(consts) + 2
    stored = [eqn.outvars[0].aval for eqn in found.eqns if eqn.primitive.name == "name"]
    assert [(x.shape, x.dtype) for x in stored] == [((2, 64), jnp.uint8)] * count


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 16, 64), 1), ((1024,), 0), ((1016,), None), ((33, 33), None), ((129, 8), 1), ((8, 129), 0)]
)
def test_masks_are_packed_along_the_first_axis_of_whole_bytes(shape, axis):
    assert _remat_rewrites._packed_axis(jax.typeof(np.zeros(shape, bool))) == axis


def test_masks_are_packed_along_no_axis_that_is_sharded():
    of_shards = SimpleNamespace(shape=(16, 24, 64), sharding=SimpleNamespace(spec=("d", None, None)))
    assert _remat_rewrites._packed_axis(of_shards) == 1


def test_masks_are_what_they_were_when_they_are_unpacked():
    masks = [np.random.default_rng(i).random(shape) < 0.5 for i, shape in enumerate([(3, 16, 64), (8, 129)])]
    for got, mask in zip(
        jax.jit(lambda masks: [*map(_remat_rewrites._read_from_bits, masks)])(masks), masks, strict=True
    ):
        np.testing.assert_array_equal(got, mask)


# ---- what is stored


def test_residuals_are_read_again_recomputed_or_stored():
    def fun(w, x):
        s = jnp.sin(w)
        t = jnp.tanh(x @ s)
        return t, jnp.cos(s), w, x, jnp.exp(t)

    program = traced(fun, (3, 3), (2, 3))
    is_known = dependence.known_variables(program, [True, False])
    found = _remat_derivative._Residuals.of(program, program.outvars, is_known)
    assert names_of(program, found.read) == ["a", "b"]
    assert names_of(program, found.stored) == ["exp", "tanh"]
    assert [eqn.primitive.name for eqn in found.recompute.eqns] == ["sin", "cos"]
    forward = found.forward_call(program, 1, is_known)
    assert [eqn.primitive.name for eqn in forward.program.eqns] == ["sin", "dot_general", "tanh", "exp"]
    assert len(forward.program.outvars) == 1 + 2
    assert list(forward.known_inputs) == [True, False]


# ---- calls that hold a program


def call_in(fun, *types):
    """The one call of ``remat`` in a function, and the equation of this call."""
    eqns = [eqn for eqn in jax.make_jaxpr(fun)(*types).jaxpr.eqns if eqn.primitive.name.startswith("reparax_")]
    (eqn,) = eqns
    return _remat_derivative.call_of(eqn.params), eqn


def both(w, x):
    """A weight and data in one call, which keeps masks."""
    program = traced(lambda w, x: (x @ jnp.sin(w), jnp.exp(x)), w.shape, x.shape)
    return _remat_derivative.recomputing_function(program, [True, False], keeps_masks=True)(w, x)


W, X = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 3), (2, 3)))


CONSTANT = jnp.asarray(np.float32(2))


def test_constants_of_calls_and_of_rewrites_are_known(monkeypatch):
    def with_a_constant(rewrite, program, args, known):
        seen.append((rewrite, known))
        return jaxprs.consts_first(jax.make_jaxpr(lambda *args: [*jaxprs.evaluate(program, args), CONSTANT + 1])(*args))

    scaled = jax.jit(lambda w, x: x @ applied(lambda w: w * CONSTANT, w))
    program, consts = jaxprs.consts_first(jax.make_jaxpr(scaled)(W, X))  # Some versions keep the constant in the call.
    known, seen = [*(True for _ in consts), True, False], []

    def call_of(**settings):
        run = _remat_derivative.recomputing_function(program, known, **settings)
        return call_in(lambda *args: run(*consts, *args), W, X)[0]

    assert call_of().known_inputs == [True, True, False]
    for rewrite in ("move_into_scans", "store_masks_in_bits"):
        monkeypatch.setattr(_remat_derivative, rewrite, partial(with_a_constant, rewrite))
    assert call_of(keeps_masks=True).known_inputs == [True] * 4 + [False]
    assert seen == [
        ("move_into_scans", [True, True, False]),
        ("store_masks_in_bits", [True, True, True, False]),
    ]


def checked(w, x):
    def after_a_check(w, x):
        checkify.check(jnp.sum(x) < 9, "large")
        return both(w, x)

    return checkify.checkify(after_a_check, errors=checkify.nan_checks | checkify.user_checks)(w, x)[1]


def test_a_call_keeps_its_flags_under_transformations():
    for fun, x in ((both, X), (jax.vmap(both, (None, 0)), jax.ShapeDtypeStruct((5, 2, 3), jnp.float32)), (checked, X)):
        call, eqn = call_in(fun, W, x)
        assert call.known_inputs == [False] * (len(eqn.invars) - 2) + [True, False]
        assert (call.keeps_masks, call.n_tangents) == (True, 0)
        assert call.n_fixed == len(eqn.invars)


@pytest.mark.parametrize(
    ("fun", "used", "read", "n_tangents"),
    [
        (lambda w, x, y: (x @ w, y * 2), [True, True], [True, True, True], 2),
        (lambda w, x, y: (x @ w, y * 2), [True, False], [True, True, False], 1),
        (lambda w, x, y: (x @ w, y * 2), [False, True], [False, False, True], 1),
        (lambda w, x, y: (x @ w, y * 2), [False, False], None, 0),
        (lambda w, x, y: (x @ printing(w), y * 2), [False, False], [True, False, False], 0),
    ],
)
def test_a_call_loses_outputs_that_nobody_reads_and_what_they_alone_need(fun, used, read, n_tangents):
    program = traced(fun, *3 * [(3, 3)])
    call = _remat_derivative.RematCall(program, [True, False, False], n_tangents=2, keeps_masks=True)
    whole = traced(lambda *args: _remat_derivative.linear(call, args), *3 * [(3, 3)])
    found, are_read = jaxprs.keep_used(whole, used)
    if read is None:
        assert not found.eqns
        return
    (eqn,) = found.eqns
    of_loss = traced(lambda *args: _remat_derivative.recomputed_call(replace(call, n_tangents=0), args), *3 * [(3, 3)])
    assert _remat_derivative.call_of(jaxprs.keep_used(of_loss, used)[0].eqns[0].params).n_tangents == 0
    assert are_read == read
    assert len(eqn.outvars) == sum(used)
    known = [flag for flag, is_read in zip(call.known_inputs, read, strict=True) if is_read]
    pruned = _remat_derivative.call_of(eqn.params)
    assert (pruned.known_inputs, pruned.n_tangents, pruned.keeps_masks) == (known, n_tangents, True)
    assert len(pruned.program.outvars) == sum(used)


@pytest.mark.parametrize(
    ("fun", "want"),
    [
        (lambda w, x: jnp.sum(jnp.tanh(x @ jnp.sin(w))), "a"),
        (lambda w, x: jnp.sum(jnp.tanh(x @ w.T)), ""),
        (lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x) @ w)), ""),
    ],
)
def test_the_backward_pass_recomputes_from_what_is_behind_a_barrier(fun, want):
    program = traced(jax.grad(rpx.remat(fun), (0, 1)), W.shape, X.shape)
    read = [v for eqn in program.eqns if eqn.primitive.name == "optimization_barrier" for v in eqn.invars]
    assert names_of(program, read) == list(want)


def test_under_a_taylor_series_a_call_is_its_program():
    def along(w, change, x):
        return jet(lambda w: _remat_derivative.recomputed_call(call, [w, x]), (w,), ((change, jnp.zeros_like(w)),))

    call = _remat_derivative.RematCall(traced(lambda w, x: x @ jnp.sin(w), (3, 3), (2, 3)), [True, False])
    w, change, x = normal(3, 3), normal(3, 3, seed=1), normal(2, 3, seed=2)
    [value], [(first, second)] = jax.jit(along)(w, change, x)
    np.testing.assert_allclose(value, x @ np.sin(w), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(first, x @ (np.cos(w) * change), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, x @ (-np.sin(w) * change**2), rtol=1e-5, atol=1e-6)


def plain(w, x):
    return jnp.sum(jnp.tanh(x @ recompute(lambda w, _: jnp.sin(w), w, None)))


def test_a_jax_in_whose_programs_nothing_is_found_is_refused(monkeypatch):
    assert _factored._is_compatible()
    assert _saved_residuals._is_compatible()
    with monkeypatch.context() as patched:
        patched.setattr(_factored, "weight_use", lambda *args: None)
        assert not _factored._is_compatible()
    with monkeypatch.context() as patched:  # Nothing is recomputed.
        patched.setattr(_saved_residuals, "recomputing_function", lambda f, _: lambda *args: jaxprs.evaluate(f, args))
        assert not _saved_residuals._is_compatible()
    with monkeypatch.context() as patched:  # Values of weights and of data are not told apart.
        patched.setattr(_saved_residuals, "_weight_and_data", lambda w, x: (w @ x, w @ x))
        assert not _saved_residuals._is_compatible()
    with monkeypatch.context() as patched:  # Activations are stored twice.

        def with_one_more(program, known):
            function = _remat_derivative.recomputing_function(program, known)
            return lambda *args: [y * jnp.tanh(jnp.sum(args[-2]) * jnp.sum(args[-1])) for y in function(*args)]

        patched.setattr(_saved_residuals, "recomputing_function", with_one_more)
        assert not _saved_residuals._is_compatible()


MINE = rpx.transforms.local_reparametrization(plain)
CALLS = {
    _factored: (rpx.factored(plain), lambda w, x: rpx.explain(plain, w, x)),
    _local: (MINE, lambda w, x: rpx.explain(MINE, w, x)),
    _remat: (rpx.remat(plain),),
    _saved_residuals: (lambda w, x: rpx.transforms.saved_residuals(plain, w, x),),
}


def test_each_transform_asks_whether_its_jax_is_known(monkeypatch):
    seen = []
    with monkeypatch.context() as patched:
        patched.setattr(jaxprs, "check_this_jax", seen.append)
        for module in (_factored, _saved_residuals):
            module.check_this_jax.__wrapped__()
    assert seen == [_factored._is_compatible, _saved_residuals._is_compatible]

    def refuse():
        raise RuntimeError("refused")

    for module, calls in CALLS.items():
        with monkeypatch.context() as patched:
            patched.setattr(module, "check_this_jax", refuse)
            for call in calls:
                with pytest.raises(RuntimeError, match="refused"):
                    call(W, X)


# ---- reports


def test_a_report_is_a_table_of_two_parts():
    rows = [("a", True), ("layer0", False), ("layer1", False), ("longer", True)]
    report = Explained(tuple(Weight(path, "f32[2]", flag, "why") for path, flag in rows), "{} are so", ("so", "not so"))
    assert repr(report).splitlines() == [
        "2 of 4 are so",
        "  so:",
        "    a       f32[2]  why",
        "    longer  f32[2]  why",
        "  not so:",
        "    layer0..1  2 x f32[2]  why",
    ]
    assert repr(Explained(report.weights[:1], "{} are so", ("so", "not so"))).count("\n") == 2
