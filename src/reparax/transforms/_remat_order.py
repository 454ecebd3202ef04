"""The order of a program: values that depend on known inputs only are computed just before their first use.

So only one layer's weights are in memory at a time, in the forward pass and in the backward pass. The equations that
compute them are delayed (``reorder``). As compilers choose an order of their own, delayed equations are also made to
depend on data that their reader needs too (``_evaluate_after``). Only the smallest values that are enough for this are
changed (``barrier_inputs``).
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
    """The outputs of a program without constants, as ``dependence.run`` computes them, but known values come late.

    ``known_inputs`` says which inputs are parameters and keys, and ``rule`` may run an equation in another way. A batch
    of equations that were delayed until a reader needs them is not computed before the data of this reader either.
    """
    is_known = dependence.known_variables(jaxpr, known_inputs)

    def run_batch(batch: Batch, program: Jaxpr, env: Env) -> Sequence[Any]:
        """The outputs of a batch, from its program and all values computed so far."""
        inputs = values(env, program.invars)
        data = [env[v] for v in variables(batch.reads_beside) if not is_known[v] and has_bits(env[v])]
        # One array is enough. A batch without data beside it, such as that of the outputs, is computed at once.
        barrier = max(data, key=lambda x: x.ndim, default=None)
        return jaxprs.evaluate(program, inputs) if barrier is None else _evaluate_after(barrier, program, inputs)

    return dependence.run_batches(jaxpr, args, reorder(jaxpr, is_known, rule), run_batch)


def reorder(jaxpr: Jaxpr, is_known: Known, rule: EquationRule) -> list[Batch]:
    """The equations of a program in batches, with those that can wait just before the equation that first needs them.

    An equation can wait if all of its operands are known and it has no effects. In ``w1 = f(k1); w2 = f(k2);
    y = x @ w1; z = y @ w2``, the order becomes ``w1``, ``y``, ``w2``, ``z``. A batch of delayed equations has the
    operands of this reader in ``reads_beside``. Delayed equations that nothing needs are left out.
    """
    can_wait = [all(dependence.are_known(is_known, eqn.invars)) and not jaxprs.has_effects(eqn) for eqn in jaxpr.eqns]
    # The number of the equation that computes each value that is still delayed.
    delayed = {v: i for i, eqn in enumerate(jaxpr.eqns) if can_wait[i] for v in eqn.outvars}
    batches = list[Batch]()

    def add_delayed(needed: Sequence[Any], reads_beside: Sequence[Any]) -> None:
        """Adds a batch of the delayed equations that compute these values, directly or indirectly, if there are any.

        These are no longer delayed.
        """
        stack, numbers = variables(needed), set[int]()
        while stack:
            number = delayed.get(stack.pop())
            if number is not None and number not in numbers:
                numbers.add(number)
                stack += variables(jaxpr.eqns[number].invars)
        for v in (v for number in numbers for v in jaxpr.eqns[number].outvars):
            del delayed[v]
        if numbers:
            batches.append(Batch([jaxpr.eqns[i] for i in sorted(numbers)], reads_beside=reads_beside))

    for eqn, waits in zip(jaxpr.eqns, can_wait, strict=True):
        if waits:
            continue
        add_delayed(eqn.invars, eqn.invars)
        dependence.add_to_batches(batches, eqn, rule)
    add_delayed(jaxpr.outvars, ())
    return batches


def _evaluate_after(barrier: Any, program: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program, computed so that compilers cannot move it before the value ``barrier``.

    Some of its inputs and values are made to depend on ``barrier``, without a change of their numbers.
    """
    waiting = barrier_inputs(program)

    def wait(v: Var, x: Any) -> Any:
        """The value ``x`` of a variable, which depends on the barrier if the variable must wait."""
        return tie(x, barrier) if v in waiting else x

    outs = dependence.run(program, list(map(wait, program.invars, args)), change_outputs(program, waiting, wait))
    # Accelerators would fuse the noise into each product that reads it, draw it once per tile, and compile slowly.
    costly = costly_outputs(program)
    pairs = zip(program.outvars, outs, strict=True)
    return [store_whole(x) if dependence.has_tangent(v) and v in costly else x for v, x in pairs]


def change_outputs(jaxpr: Jaxpr, changed: set[Var], change: Callable[[Var, Any], Any]) -> EquationRule:
    """A rule that runs equations with an output in ``changed`` as they are, then applies ``change`` to each output.

    ``change`` takes the variable of the output and its value. It must return the outputs that are not in ``changed`` as
    they are.
    """

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        """The function that computes an equation and changes its outputs; None if none of them is changed."""
        if changed.isdisjoint(eqn.outvars):
            return None
        program = jaxprs.part(jaxpr, [eqn], eqn.outvars)
        positions = [eqn.invars.index(v) for v in program.invars]  # without literals, and each variable once
        return lambda *args: list(map(change, eqn.outvars, jaxprs.evaluate(program, [args[i] for i in positions])))

    return rule


# ---- what must wait
#
# A program cannot run early if all its large or costly values depend on values that wait. A value waits if a zero that
# is computed from the barrier is added to it, which copies it. So only the smallest values wait that are enough: noise
# waits if its key does, and a normalized weight waits if its lengths do. A transposed parameter need not wait, because
# compilers read it in place.

SMALL = 4
"""A value is small if it is this many times smaller than the largest value that the program computes."""
FEW = 32
"""This many cheap operations per entry cost no more than to store the entry and read it again."""

_IN_PLACE: set[type[View]] = {
    *(equations.Transpose, equations.Reshape, equations.Squeeze, equations.Copy, equations.StopGradient),
    *(equations.Vary, equations.ReadInStep),
}
"""Equations whose output compilers read in the memory of the operand."""

_CHEAP: set[type[View]] = {
    *_IN_PLACE,
    *(equations.Add, equations.Subtract, equations.Multiply, equations.Divide, equations.Negate, equations.Arithmetic),
    *(equations.Select, equations.ConvertType, equations.Bitcast, equations.Broadcast, equations.Iota, equations.Slice),
}
"""Equations that compilers compute again for each reader, instead of storing their output."""

_PRODUCTS: set[type[View]] = {equations.Dot, equations.RaggedDot, equations.Conv}
"""Equations whose operands compilers store as arrays, however cheap these are."""


def barrier_inputs(program: Jaxpr) -> set[Var]:
    """The inputs and values of a program that must wait, as small as possible, so that its large or costly values wait.

    Small inputs always wait. For ``w = v / norm(v)``, the lengths ``norm(v)`` wait, and ``w`` with them. Empty if the
    program computes nothing but views of its inputs.
    """
    views = _views(program)
    operands_of_products = [v for eqn in program.eqns if view_class_of(eqn) in _PRODUCTS for v in eqn.invars]
    # The values that must wait in any case: those that are stored as arrays.
    targets = [v for v in jaxprs.variables([*program.outvars, *operands_of_products]) if v not in views]
    if not targets:
        return set()
    size = max(map(_bytes_of, targets)) / SMALL  # larger values are large
    smallest = _smallest_sources(program)
    barriers = {v for v in program.invars if _bytes_of(v) <= size}
    waiting = set(barriers)

    def add_barrier(v: Var) -> None:
        """Makes a value wait by the smallest value on a path to it. A value of constants alone cannot wait."""
        if v not in waiting and v in smallest:
            barriers.add(smallest[v])
            waiting.update((v, smallest[v]))

    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        for v in eqn.outvars:
            if not waiting.isdisjoint(operands):  # what is computed from a waiting value waits without a barrier
                waiting.add(v)
            elif _bytes_of(v) > size and not _is_of(_CHEAP, eqn):
                add_barrier(v)
    for v in targets:
        add_barrier(v)
    return barriers


def _smallest_sources(program: Jaxpr) -> dict[Var, Var]:
    """For each value that depends on an input, the smallest value on a path from the inputs to it, perhaps itself.

    Values that are computed from constants alone are left out.
    """
    smallest = {v: v for v in program.invars}
    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        candidates = [smallest[v] for v in operands if v in smallest]
        for v in eqn.outvars if operands else []:
            smallest[v] = min([*candidates, v], key=_bytes_of)  # of equal sizes, one nearer to the inputs
    return smallest


def read_as_more_than_views(program: Jaxpr, known_inputs: Flags) -> set[Var]:
    """The known inputs from which a program computes other known values than views of them, such as ``sin(w)``.

    A view is read in the memory of the input, as a transpose is. An input that the program only reads, or reads by
    views alone, is left out.
    """
    is_known = dependence.known_variables(program, known_inputs)
    views = _views(program)
    needed = set[Var]()
    for eqn in reversed(program.eqns):
        if all(dependence.are_known(is_known, eqn.invars)) and any(v not in views or v in needed for v in eqn.outvars):
            needed.update(jaxprs.variables(eqn.invars))
    return needed.intersection(program.invars)


def costly_outputs(program: Jaxpr) -> set[Var]:
    """The outputs that take more than ``FEW`` cheap operations per entry, or one that is not cheap.

    Drawing random numbers is costly, for instance, and scaling a weight is not.
    """
    eqn_of = {v: eqn for eqn in program.eqns for v in eqn.outvars}

    def cost(output: Var) -> int:
        """The number of operations per entry of an output. One that is not cheap counts as more than ``FEW``."""
        stack, counted, total = [output], set[int](), 0  # each equation counts once, by its id
        while stack:
            eqn = eqn_of.get(stack.pop())
            if eqn is not None and id(eqn) not in counted:
                counted.add(id(eqn))
                total += _count_equations(eqn) if _is_of(_CHEAP, eqn) else FEW + 1
                # Much smaller operands, such as lengths, cost little per entry of the output.
                stack += [v for v in jaxprs.variables(eqn.invars) if _bytes_of(v) * SMALL > _bytes_of(output)]
        return total

    return {v for v in jaxprs.variables(program.outvars) if cost(v) > FEW}


def _views(program: Jaxpr) -> set[Var]:
    """The values that compilers read in the memory of an input, or compute from constants alone."""
    views = set(program.invars)
    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        if not operands or (views.issuperset(operands) and _is_view(eqn)):
            views.update(eqn.outvars)
    return views


def _is_view(eqn: JaxprEqn) -> bool:
    """Whether compilers read the output of an equation in the memory of its operand."""
    if view_class_of(eqn) is equations.Broadcast:  # to as many entries, it only adds axes of size 1
        return _bytes_of(eqn.outvars[0]) == _bytes_of(eqn.invars[0])
    return _is_of(_IN_PLACE, eqn)


def _count_equations(eqn: JaxprEqn) -> int:
    """The number of equations inside a call; one for any other equation."""
    return sum(map(_count_equations, _inside(eqn))) if jaxprs.is_call(eqn) else 1


def _is_of(kinds: set[type[View]], eqn: JaxprEqn) -> bool:
    """Whether an equation is of one of these kinds of views, or a call with only such equations inside."""
    return view_class_of(eqn) in kinds or (jaxprs.is_call(eqn) and all(_is_of(kinds, each) for each in _inside(eqn)))


def _inside(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations of the programs inside an equation."""
    return [inner for program in jaxprs.inner_programs(eqn) for inner in program.eqns]


def _bytes_of(v: Any) -> int:
    """The size of a variable in bytes."""
    return size_in_bytes(v.aval)
