"""Orders a program so that values that depend only on known inputs are computed just before their first use.

As a result, only one layer's weights are in memory at a time, both in the forward and in the backward pass. ``reorder``
delays the equations that compute the weights. Compilers choose their own order, so ``_evaluate_after`` also makes
delayed equations depend on data that their reader needs. ``barrier_inputs`` finds the smallest values to which this
dependence must be added.
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
    """Runs a program without constants, and computes values that depend on known inputs alone just before their use.

    ``known_inputs`` says which inputs are known, that is, parameters and keys. ``rule`` may change how an equation is
    run. A batch of delayed equations is not computed before the data that the reader of its values needs.
    """
    is_known = dependence.known_variables(jaxpr, known_inputs)

    def run_batch(batch: Batch, program: Jaxpr, env: Env) -> Sequence[Any]:
        """Runs the program of a batch, given ``env``, which holds all values computed so far."""
        inputs = values(env, program.invars)
        data = [env[v] for v in variables(batch.reads_beside) if not is_known[v] and has_bits(env[v])]
        # One array suffices as a barrier. A batch whose reader needs no data runs at once, without a barrier.
        barrier = max(data, key=lambda x: x.ndim, default=None)
        return jaxprs.evaluate(program, inputs) if barrier is None else _evaluate_after(barrier, program, inputs)

    return dependence.run_batches(jaxpr, args, reorder(jaxpr, is_known, rule), run_batch)


def reorder(jaxpr: Jaxpr, is_known: Known, rule: EquationRule) -> list[Batch]:
    """Splits the equations of a program into batches, and delays equations whose values are not needed yet.

    An equation can be delayed if it has no effects and all of its operands are known (computed from known inputs
    alone). For the program ``w1 = f(k1); w2 = f(k2); y = x @ w1; z = y @ w2``, the new order is ``w1``, ``y``, ``w2``,
    ``z``. In a batch of delayed equations, ``reads_beside`` holds the operands of the equation that reads its values.
    Delayed equations whose outputs are never read are dropped.
    """
    can_wait = [all(dependence.are_known(is_known, eqn.invars)) and not jaxprs.has_effects(eqn) for eqn in jaxpr.eqns]
    # Maps each value that is still delayed to the index of the equation that computes the value.
    delayed = {v: i for i, eqn in enumerate(jaxpr.eqns) if can_wait[i] for v in eqn.outvars}
    batches = list[Batch]()

    def add_delayed(needed: Sequence[Any], reads_beside: Sequence[Any]) -> None:
        """Adds a batch with all delayed equations that are needed for these values, directly or indirectly, if any.

        The equations of the new batch are then no longer delayed.
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
    """Runs a program such that compilers cannot compute its large values before the value ``barrier``.

    Some inputs and intermediate values of the program are made to depend on ``barrier``, without changing their
    entries.
    """
    waiting = barrier_inputs(program)

    def wait(v: Var, x: Any) -> Any:
        """Returns the value ``x`` of a variable, made to depend on the barrier if the variable must wait."""
        return tie(x, barrier) if v in waiting else x

    outs = dependence.run(program, list(map(wait, program.invars, args)), change_outputs(program, waiting, wait))
    # If costly outputs were not stored, accelerators would fuse the noise into each product that reads it, draw the
    # noise once per tile, and compile slowly.
    costly = costly_outputs(program)
    pairs = zip(program.outvars, outs, strict=True)
    return [store_whole(x) if dependence.has_tangent(v) and v in costly else x for v, x in pairs]


def change_outputs(jaxpr: Jaxpr, changed: set[Var], change: Callable[[Var, Any], Any]) -> EquationRule:
    """Returns a rule that applies ``change`` to the outputs of each equation that has an output in ``changed``.

    ``change`` takes a variable and its value, and returns the new value. Because ``change`` is called for all outputs
    of such an equation, it must return the values of variables outside ``changed`` unchanged.
    """

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        """Returns a function that runs an equation and changes its outputs, or None if no output is changed."""
        if changed.isdisjoint(eqn.outvars):
            return None
        program = jaxprs.part(jaxpr, [eqn], eqn.outvars)
        positions = [eqn.invars.index(v) for v in program.invars]  # `program.invars` has no literals and no repeats.
        return lambda *args: list(map(change, eqn.outvars, jaxprs.evaluate(program, [args[i] for i in positions])))

    return rule


# ---- what must wait
#
# A program cannot run early if all of its large or costly values depend on values that wait. A value waits if a zero
# that is computed from the barrier is added to it. This addition copies the value, so only the smallest sufficient
# values are made to wait: noise waits if its key waits, and a normalized weight waits if its lengths wait. A transposed
# parameter need not wait, because compilers read the transpose in the memory of the parameter.

SMALL = 4
"""A value counts as small if it is at least this many times smaller than the value with which it is compared."""
FEW = 32
"""The number of cheap operations per entry that cost no more than storing the entry and reading it again."""

_IN_PLACE: set[type[View]] = {
    *(equations.Transpose, equations.Reshape, equations.Squeeze, equations.Copy, equations.StopGradient),
    *(equations.Vary, equations.ReadInStep),
}
"""Equations whose output needs no memory of its own, because compilers read it in the memory of the operand."""

_CHEAP: set[type[View]] = {
    *_IN_PLACE,
    *(equations.Add, equations.Subtract, equations.Multiply, equations.Divide, equations.Negate, equations.Arithmetic),
    *(equations.Select, equations.ConvertType, equations.Bitcast, equations.Broadcast, equations.Iota, equations.Slice),
}
"""Equations that compilers compute again for each reader instead of storing the output."""

_PRODUCTS: set[type[View]] = {equations.Dot, equations.RaggedDot, equations.Conv}
"""Equations whose operands compilers always store as arrays, even if an operand is cheap to compute."""


def barrier_inputs(program: Jaxpr) -> set[Var]:
    """Returns the smallest values of a program that must wait for a barrier so that all large or costly values wait.

    All small inputs are part of the result. For ``w = v / norm(v)``, the result holds the lengths ``norm(v)``, because
    ``w`` waits if the lengths wait. The result is empty if the program computes only views of its inputs.
    """
    views = _views(program)
    operands_of_products = [v for eqn in program.eqns if view_class_of(eqn) in _PRODUCTS for v in eqn.invars]
    # Values that are stored as arrays must always wait.
    targets = [v for v in jaxprs.variables([*program.outvars, *operands_of_products]) if v not in views]
    if not targets:
        return set()
    size = max(map(_bytes_of, targets)) / SMALL  # Values above this size count as large.
    smallest = _smallest_sources(program)
    barriers = {v for v in program.invars if _bytes_of(v) <= size}
    waiting = set(barriers)

    def add_barrier(v: Var) -> None:
        """Makes a value wait, by a barrier on the smallest value on a path to it, unless it depends on no input."""
        if v not in waiting and v in smallest:
            barriers.add(smallest[v])
            waiting.update((v, smallest[v]))

    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        for v in eqn.outvars:
            if not waiting.isdisjoint(operands):  # A value computed from a waiting one waits too.
                waiting.add(v)
            elif _bytes_of(v) > size and not _is_of(_CHEAP, eqn):
                add_barrier(v)
    for v in targets:
        add_barrier(v)
    return barriers


def _smallest_sources(program: Jaxpr) -> dict[Var, Var]:
    """Maps each value that depends on an input to the smallest value on a path from the inputs to that value.

    The smallest value may be the value itself. Values that are computed only from constants are left out.
    """
    smallest = {v: v for v in program.invars}
    for eqn in program.eqns:
        candidates = [smallest[v] for v in jaxprs.variables(eqn.invars) if v in smallest]
        for v in eqn.outvars if candidates else []:
            smallest[v] = min([*candidates, v], key=_bytes_of)  # A tie goes to a value nearer to the inputs.
    return smallest


def read_as_more_than_views(program: Jaxpr, known_inputs: Flags) -> set[Var]:
    """Returns the known inputs from which a program computes known values other than views, such as ``sin(w)``.

    A view, such as a transpose, is read in the memory of the input. An input is left out if the program computes only
    views from it.
    """
    is_known = dependence.known_variables(program, known_inputs)
    views = _views(program)
    needed = set[Var]()
    for eqn in reversed(program.eqns):
        if all(dependence.are_known(is_known, eqn.invars)) and any(v not in views or v in needed for v in eqn.outvars):
            needed.update(jaxprs.variables(eqn.invars))
    return needed.intersection(program.invars)


def costly_outputs(program: Jaxpr) -> set[Var]:
    """Returns the outputs that take more than ``FEW`` cheap operations per entry, or at least one costly operation.

    For example, drawing random numbers is costly, and scaling a weight is not.
    """
    eqn_of = {v: eqn for eqn in program.eqns for v in eqn.outvars}

    def cost(output: Var) -> int:
        """Counts the operations per entry of an output; a costly operation counts as ``FEW + 1``."""
        stack, counted, total = [output], set[int](), 0  # Each equation is counted once.
        while stack:
            eqn = eqn_of.get(stack.pop())
            if eqn is not None and id(eqn) not in counted:
                counted.add(id(eqn))
                total += _count_equations(eqn) if _is_of(_CHEAP, eqn) else FEW + 1
                # Skip much smaller operands, such as lengths, because they cost little per entry of the output.
                stack += [v for v in jaxprs.variables(eqn.invars) if _bytes_of(v) * SMALL > _bytes_of(output)]
        return total

    return {v for v in jaxprs.variables(program.outvars) if cost(v) > FEW}


def _views(program: Jaxpr) -> set[Var]:
    """Returns the values of a program that are read in the memory of its inputs, or computed only from constants."""
    views = set(program.invars)
    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        if not operands or (views.issuperset(operands) and _is_view(eqn)):
            views.update(eqn.outvars)
    return views


def _is_view(eqn: JaxprEqn) -> bool:
    """Returns whether compilers read the output of an equation in the memory of its operand."""
    if view_class_of(eqn) is equations.Broadcast:  # A broadcast that keeps the size only adds axes of size 1.
        return _bytes_of(eqn.outvars[0]) == _bytes_of(eqn.invars[0])
    return _is_of(_IN_PLACE, eqn)


def _count_equations(eqn: JaxprEqn) -> int:
    """Counts the equations inside a call; any other equation counts as one."""
    return sum(map(_count_equations, _inside(eqn))) if jaxprs.is_call(eqn) else 1


def _is_of(kinds: set[type[View]], eqn: JaxprEqn) -> bool:
    """Returns whether an equation is of one of these kinds, or is a call that contains only such equations."""
    return view_class_of(eqn) in kinds or (jaxprs.is_call(eqn) and all(_is_of(kinds, each) for each in _inside(eqn)))


def _inside(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Returns the equations of all programs inside an equation."""
    return [inner for program in jaxprs.inner_programs(eqn) for inner in program.eqns]


def _bytes_of(v: Any) -> int:
    """Returns the size of a variable in bytes."""
    return size_in_bytes(v.aval)
