"""The order of a program: a value that depends on known inputs only is delayed until just before its first use.

So only one layer's weights are in memory at a time, in the forward pass and in the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from reparax.core.reports import size_in_bytes
from reparax.numerics.tie import has_bits, store_whole, tie
from reparax.programs import dependence, equations, jaxprs
from reparax.programs.dependence import Batch, EquationRule, Flags, Known
from reparax.programs.equations import View, view_class_of
from reparax.programs.jaxprs import Env, values, variables


def run_delayed(
    jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags, rule: EquationRule = lambda eqn: None
) -> list[Any]:
    """Evaluates a program without constants like ``dependence.run``, known values as late as possible."""
    is_known = dependence.known_variables(jaxpr, known_inputs)

    def run_batch(batch: Batch, program: Jaxpr, env: Env) -> Sequence[Any]:
        inputs = values(env, program.invars)
        data = [env[v] for v in variables(batch.reads_beside) if not is_known[v] and has_bits(env[v])]
        barrier = max(data, key=lambda x: x.ndim, default=None)
        return jaxprs.evaluate(program, inputs) if barrier is None else _evaluate_after(barrier, program, inputs)

    return dependence.run_batches(jaxpr, args, reorder(jaxpr, is_known, rule), run_batch)


def reorder(jaxpr: Jaxpr, is_known: Known, rule: EquationRule) -> list[Batch]:
    """The equations of a program, with known ones just before their first reader, if they have no effects."""
    can_wait = [all(dependence.are_known(is_known, eqn.invars)) and not jaxprs.has_effects(eqn) for eqn in jaxpr.eqns]
    makers = {v: i for i, eqn in enumerate(jaxpr.eqns) if can_wait[i] for v in eqn.outvars}
    batches = list[Batch]()

    def add_makers(atoms: Sequence[Any], reads_beside: Sequence[Any]) -> None:
        stack, numbers = variables(atoms), set[int]()
        while stack:
            number = makers.get(stack.pop())
            if number is not None and number not in numbers:
                numbers.add(number)
                stack += variables(jaxpr.eqns[number].invars)
        for v in (v for number in numbers for v in jaxpr.eqns[number].outvars):
            del makers[v]
        if numbers:
            batches.append(Batch([jaxpr.eqns[i] for i in sorted(numbers)], reads_beside=reads_beside))

    for eqn, waits in zip(jaxpr.eqns, can_wait, strict=True):
        if waits:
            continue
        add_makers(eqn.invars, eqn.invars)
        dependence.add_to_batches(batches, eqn, rule)
    add_makers(jaxpr.outvars, ())
    return batches


def _evaluate_after(barrier: Any, program: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program that compilers cannot compute before ``barrier``."""
    waiting = barrier_inputs(program)

    def wait(v: Var, x: Any) -> Any:
        return tie(x, barrier) if v in waiting else x

    outs = dependence.run(program, list(map(wait, program.invars, args)), change_outputs(program, waiting, wait))
    # Accelerators would fuse the noise into each product that reads it, draw it once per tile, and compile slowly.
    whole = costly(program)
    pairs = zip(program.outvars, outs, strict=True)
    return [store_whole(x) if dependence.has_tangent(v) and v in whole else x for v, x in pairs]


def change_outputs(jaxpr: Jaxpr, changed: set[Var], change: Callable[[Var, Any], Any]) -> EquationRule:
    """How to run equations of which some outputs are changed: as they are, and then ``change`` of each output."""

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        if changed.isdisjoint(eqn.outvars):
            return None
        program = jaxprs.part(jaxpr, [eqn], eqn.outvars)
        places = [eqn.invars.index(v) for v in program.invars]
        return lambda *args: list(map(change, eqn.outvars, jaxprs.evaluate(program, [args[i] for i in places])))

    return rule


# ---- what must wait
#
# So that a program cannot run early, the smallest values from which all that costs is made must wait. A value that
# waits is data with a zero added, and a whole weight would be a copy of it. But noise waits if its key does, and a
# normalized weight waits if its lengths do. A transposed parameter need not wait: compilers read it in place.

SMALL = 4
"""A value is small if it is this many times smaller than what the program makes."""
FEW = 32
"""So many cheap operations on each entry cost no more than to store it and to read it."""

_IN_PLACE: set[type[View]] = {
    *(equations.Transpose, equations.Reshape, equations.Squeeze, equations.Copy, equations.StopGradient),
    *(equations.Vary, equations.ReadInStep),
}
# Compilers compute these again for each reader, instead of storing them.
_CHEAP: set[type[View]] = {
    *_IN_PLACE,
    *(equations.Add, equations.Subtract, equations.Multiply, equations.Divide, equations.Negate, equations.Arithmetic),
    *(equations.Select, equations.ConvertType, equations.Bitcast, equations.Broadcast, equations.Iota, equations.Slice),
}
# They read their operands as arrays, however cheap these are.
_PRODUCTS: set[type[View]] = {equations.Dot, equations.RaggedDot, equations.Conv}


def barrier_inputs(program: Jaxpr) -> set[Var]:
    """The inputs and values of a program, as few bytes as possible, that its large and costly values depend on."""
    views = _views(program)
    operands_of_products = [v for eqn in program.eqns if view_class_of(eqn) in _PRODUCTS for v in eqn.invars]
    targets = [v for v in jaxprs.variables([*program.outvars, *operands_of_products]) if v not in views]
    if not targets:
        return set()
    size = max(map(_bytes_of, targets)) / SMALL
    smallest = _smallest_sources(program)
    barriers = {v for v in program.invars if _bytes_of(v) <= size}
    waiting = set(barriers)

    def add_barrier(v: Var) -> None:
        if v not in waiting and v in smallest:
            barriers.add(smallest[v])
            waiting.update((v, smallest[v]))

    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        for v in eqn.outvars:
            if not waiting.isdisjoint(operands):
                waiting.add(v)
            elif _bytes_of(v) > size and not _is(eqn, _CHEAP):
                add_barrier(v)
    for v in targets:
        add_barrier(v)
    return barriers


def _smallest_sources(program: Jaxpr) -> dict[Var, Var]:
    """For each value that has operands, the smallest on a way to it from the inputs, or itself."""
    smallest = {v: v for v in program.invars}
    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        candidates = [smallest[v] for v in operands if v in smallest]
        for v in eqn.outvars if operands else []:
            smallest[v] = min([*candidates, v], key=_bytes_of)
    return smallest


def read_as_more_than_views(program: Jaxpr, known_inputs: Flags) -> set[Var]:
    """The known inputs from which a program computes more than views of them."""
    is_known = dependence.known_variables(program, known_inputs)
    views = _views(program)
    copied = set[Var]()
    for eqn in reversed(program.eqns):
        if all(dependence.are_known(is_known, eqn.invars)) and any(v not in views or v in copied for v in eqn.outvars):
            copied.update(jaxprs.variables(eqn.invars))
    return copied.intersection(program.invars)


def costly(program: Jaxpr) -> set[Var]:
    """The outputs that take many operations for each entry, or one that is not cheap."""
    makers = {v: eqn for eqn in program.eqns for v in eqn.outvars}

    def cost(output: Var) -> int:
        stack = [output]
        counted = set[int]()
        total = 0
        while stack:
            eqn = makers.get(stack.pop())
            if eqn is not None and id(eqn) not in counted:
                counted.add(id(eqn))
                total += _count(eqn) if _is(eqn, _CHEAP) else FEW + 1
                stack += [v for v in jaxprs.variables(eqn.invars) if _bytes_of(v) * SMALL > _bytes_of(output)]
        return total

    return {v for v in jaxprs.variables(program.outvars) if cost(v) > FEW}


def _views(program: Jaxpr) -> set[Var]:
    """What compilers read in place, or compute from nothing."""
    views = set(program.invars)
    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        if not operands or (views.issuperset(operands) and _is_view(eqn)):
            views.update(eqn.outvars)
    return views


def _is_view(eqn: JaxprEqn) -> bool:
    """Whether compilers read an output in place of the operand. A broadcast to as many entries adds axes of size 1."""
    if view_class_of(eqn) is equations.Broadcast:
        return _bytes_of(eqn.outvars[0]) == _bytes_of(eqn.invars[0])
    return _is(eqn, _IN_PLACE)


def _count(eqn: JaxprEqn) -> int:
    """How many equations there are in an equation, or one."""
    return sum(map(_count, _inside(eqn))) if jaxprs.is_call(eqn) else 1


def _is(eqn: JaxprEqn, kinds: set[type[View]]) -> bool:
    """Whether an equation is of one of these kinds, or a call of such equations alone."""
    return view_class_of(eqn) in kinds or (jaxprs.is_call(eqn) and all(_is(inner, kinds) for inner in _inside(eqn)))


def _inside(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations of the programs in an equation."""
    return [inner for program in jaxprs.inner_programs(eqn) for inner in program.eqns]


def _bytes_of(v: Any) -> int:
    """How many bytes a variable takes."""
    return size_in_bytes(v.aval)
