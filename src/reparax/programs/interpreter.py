"""Interprets jaxprs, and keeps weights as sums of products wherever the equations that read them are linear.

``Interpreter.run`` evaluates the equations of a jaxpr. If an equation reads a ``Sum`` or may introduce one, the
``Rules`` either keep it factored or report that the equation needs its array. All other equations are deferred and
evaluated together. The bodies of calls, scans, conds and ``shard_map`` are interpreted too, and a ``Sum`` stays
factored when it enters these bodies.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.sharding import PartitionSpec

from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import FACTS_OF_CONSTANT, Analysis, Facts, is_apply
from reparax.programs.equations import Checkpoint, Cond, Jit, Scan, ShardMap, StopGradient, View, view_class_of, view_of
from reparax.programs.jaxprs import type_of
from reparax.programs.rules import map_factors
from reparax.programs.sums import AxisLabels, Factor, Label, Product, Sum, all_or_none, count_entries

Outs = list[Any] | None
"""The outputs of an equation, each an array or a ``Sum``; None if the equation must be evaluated unchanged, on
arrays."""

# This primitive can be traced because the type of its output is known, but it cannot be executed.
_stand_in = Primitive("reparax_stand_in")
_stand_in.def_abstract_eval(lambda *, type: type)


def stand_in(v: Any) -> Any:
    """Returns a placeholder with the type of a variable, for a jaxpr that is traced but never executed."""
    return _stand_in.bind(type=type_of(v))


@dataclass(frozen=True)
class Operation:
    """An equation that is about to be evaluated, with the values of its operands and facts about them.

    Attributes:
      interpreter: The interpreter that evaluates the equation.
      eqn: The equation.
      args: The value of each operand: an array or a ``Sum``.
      facts: The ``Facts`` about each operand, such as whether it gets a gradient.
      out_facts: The ``Facts`` about the first output.
      only_first_read: Whether only the first output is read by later equations.
    """

    interpreter: "Interpreter"
    eqn: JaxprEqn
    args: Sequence[Any]
    facts: Sequence[Facts]
    out_facts: Facts
    only_first_read: bool

    @property
    def view(self) -> View:
        """The typed view of the equation, such as a ``Dot``."""
        return view_of(self.eqn)

    @property
    def maker(self) -> tuple[Hashable, ...]:
        """A tuple that identifies a ``Sum`` made by the equation: the interpreter's path, and the equation's ``id``."""
        return (*self.interpreter.path, id(self.eqn))


class Rules(Protocol):
    """Decides which equations introduce weights as a ``Sum`` of products, and how other equations act on them.

    Attributes:
      counts_steps: Whether the rules need the index of the current step of each enclosing scan.
    """

    counts_steps: bool

    @property
    def analysis(self) -> Analysis[Facts]:
        """The analysis that derives the ``Facts`` about all values of a jaxpr."""
        ...

    def may_introduce_sum(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Returns whether an equation that reads no ``Sum`` may introduce one, itself or in its bodies."""
        ...

    def outputs(self, operation: Operation) -> Outs:
        """Computes the outputs of an equation that reads or may introduce a ``Sum``; None if it needs arrays."""
        ...

    def materialize(self, interpreter: "Interpreter", x: Sum, eqn: JaxprEqn | None) -> Any:
        """Forms the array of a ``Sum`` because ``eqn`` needs this array as an operand.

        ``eqn`` is None if the array is needed as an output of the jaxpr.
        """
        ...

    def on_shard(self, x: Sum, facts: Facts) -> Sum:
        """Returns the shard of a ``Sum`` in the body of a ``shard_map``, given the ``Facts`` about this shard."""
        ...


class LoopStep(NamedTuple):
    """The current step of a scan: its index, which is None if the rules do not need it, and the number of steps."""

    index: Any
    length: Any


@dataclass(frozen=True)
class Interpreter:
    """Evaluates a jaxpr by the given rules, and records where this jaxpr occurs in the outermost one.

    Attributes:
      rules: The rules that decide which weights stay factored.
      times: The number of times the jaxpr runs, which is the product of the lengths of the scans around it.
      steps: The current step of each scan around the jaxpr, beginning with the outermost scan.
      path: For each equation around the jaxpr, its ``id`` and the index of its body. Together, they identify the jaxpr.
      in_formula: Whether the jaxpr is part of the ``apply`` of a parametrization.
      computes: Whether equations that read no ``Sum`` are evaluated. If not, placeholders stand for their outputs.
    """

    rules: Rules
    times: int = 1
    steps: tuple[LoopStep, ...] = ()
    path: tuple[int, ...] = ()
    in_formula: bool = False
    computes: bool = True

    def run(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """Evaluates a jaxpr, given the value of each input and the ``Facts`` about it. An output may be a ``Sum``."""
        return _Evaluation(self, jaxpr, args, facts).outs()

    def arrays(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """Evaluates a jaxpr as :meth:`run` does, but returns every output as an array."""
        return [self.array(x, None) for x in self.run(jaxpr, args, facts)]

    def array(self, x: Any, eqn: JaxprEqn | None) -> Any:
        """Converts ``x``, an array or a ``Sum``, to an array, because ``eqn`` needs an array as an operand.

        ``eqn`` is None if ``x`` is needed as an output of the jaxpr.
        """
        return self.rules.materialize(self, x, eqn) if isinstance(x, Sum) else x

    def inside(self, eqn: JaxprEqn, branch: int = 0, step: LoopStep | None = None) -> "Interpreter":
        """Returns the interpreter for a body of an equation, such as a branch of a cond.

        ``branch`` is the index of the branch of a cond, and 0 otherwise. ``step`` is the current step of a scan, and
        None otherwise.
        """
        steps = self.steps if step is None else (*self.steps, step)
        times = self.times if step is None else self.times * count_entries([step.length])
        in_formula = self.in_formula or is_apply(eqn)
        return replace(self, times=times, steps=steps, path=(*self.path, id(eqn), branch), in_formula=in_formula)


class _Evaluation:
    """The state of one evaluation of a jaxpr: the values computed so far, and the deferred equations."""

    def __init__(self, interpreter: Interpreter, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> None:
        """Stores the values of the inputs, and derives facts about all variables. Evaluates no equation yet."""
        self._interpreter, self._jaxpr = interpreter, jaxpr
        # ``_env`` maps each variable to its array or ``Sum``. ``_formed`` maps a variable with a ``Sum`` to its array,
        # once formed.
        self._env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        self._formed: dict[Any, Any] = {}
        self._facts: Mapping[Any, Facts] = dependence.analyze(jaxpr, facts, interpreter.rules.analysis)
        # ``_reads`` counts the equations that read each variable, except deferred equations already evaluated. Outputs
        # of deferred equations are kept only if other equations read them.
        self._reads = jaxprs.count_reads(jaxpr)
        # Deferred equations run on arrays. They are evaluated together, at the latest when the rules need values.
        self._deferred: list[JaxprEqn] = []

    def outs(self) -> list[Any]:
        """Evaluates the jaxpr and returns its outputs, each an array or a ``Sum``. Must be called only once."""
        for eqn in self._jaxpr.eqns:
            self._evaluate_or_defer(eqn)
        self._evaluate_deferred()
        return list(map(self._value_of, self._jaxpr.outvars))

    def _value_of(self, v: Any) -> Any:
        """Returns the value of a variable or literal: an array or a ``Sum``.

        If the interpreter skips equations that read no ``Sum``, a variable without a value gets a placeholder.
        """
        if isinstance(v, Literal):
            return jnp.asarray(v.val)
        if v not in self._env:
            self._env[v] = stand_in(v)
        return self._env[v]

    def _evaluate_or_defer(self, eqn: JaxprEqn) -> None:
        """Adds an equation's outputs to ``_env``, or defers the equation if :meth:`_keep_factors` returns None."""
        facts = [FACTS_OF_CONSTANT if isinstance(v, Literal) else self._facts[v] for v in eqn.invars]
        outs = self._keep_factors(eqn, facts)
        if outs is None:
            self._deferred.append(eqn)
        else:
            self._env.update(zip(eqn.outvars, outs, strict=True))

    def _keep_factors(self, eqn: JaxprEqn, facts: Sequence[Facts]) -> Outs:
        """Computes the outputs of an equation that keeps a ``Sum`` factored or returns its operands unchanged.

        For any other equation, the result is None, and the caller must defer the equation.
        """
        outs = self._outputs_by_rules(eqn, facts)
        unchanged_operands = _unchanged_operands(eqn, facts) if outs is None else None
        if unchanged_operands is None:
            return outs
        self._evaluate_deferred()
        return list(map(self._value_of, unchanged_operands))

    def _outputs_by_rules(self, eqn: JaxprEqn, facts: Sequence[Facts]) -> Outs:
        """Applies the rules to an equation that reads a ``Sum`` or may introduce one, and returns its outputs.

        For any other equation, or if the equation must run on arrays, the result is None. Deferred equations are
        evaluated first because the rules may need their values.
        """
        rules = self._interpreter.rules
        out_facts = self._facts[eqn.outvars[0]] if eqn.outvars else FACTS_OF_CONSTANT
        reads_sum = any(isinstance(self._env.get(v), Sum) for v in jaxprs.variables(eqn.invars))
        if not reads_sum and not rules.may_introduce_sum(eqn, facts, out_facts):
            return None
        self._evaluate_deferred()
        args = list(map(self._value_of, eqn.invars))
        only_first_read = not any(map(self._reads.get, eqn.outvars[1:]))
        return rules.outputs(Operation(self._interpreter, eqn, args, facts, out_facts, only_first_read))

    def _evaluate_deferred(self) -> None:
        """Evaluates the deferred equations as one jaxpr, and adds their outputs to ``_env``.

        The array of each ``Sum`` that these equations read is formed first. If the interpreter's ``computes`` is false,
        these arrays are formed, but the equations are not evaluated.
        """
        eqns, self._deferred = self._deferred, []
        if not eqns:
            return
        for eqn in eqns:
            self._reads.subtract(jaxprs.variables(eqn.invars))
        if self._interpreter.computes:
            outvars = [v for eqn in eqns for v in eqn.outvars if self._reads[v] > 0]
            program = jaxprs.part(self._jaxpr, eqns, outvars)
            args = [self._array_of(v, eqns) for v in program.invars]
            self._env.update(zip(outvars, jaxprs.evaluate(program, args), strict=True))
        else:  # The rules must still see each array that would be formed.
            for v in jaxprs.variables_read(eqns):
                if v in self._env:
                    self._array_of(v, eqns)

    def _array_of(self, v: Any, eqns: Sequence[JaxprEqn]) -> Any:
        """Returns the value of a variable as an array.

        If the value is a ``Sum``, its array is formed only once, for the first equation in ``eqns``, because deferred
        equations are evaluated before another one that reads a ``Sum`` is deferred.
        """
        x = self._env[v]
        if not isinstance(x, Sum):
            return x
        if v not in self._formed:
            self._formed[v] = self._interpreter.array(x, eqns[0])
        return self._formed[v]


def _unchanged_operands(eqn: JaxprEqn, facts: Sequence[Facts]) -> list[Any] | None:
    """Returns, for each output of an equation, the operand that it equals; None if the equation computes anything.

    Two kinds of equations compute nothing: a ``jit`` whose body has no equations and no constants, and a
    ``stop_gradient`` of a value that gets no gradient anyway.
    """
    kind = view_class_of(eqn)
    if kind is StopGradient and facts[0].fixed:
        return eqn.invars
    # A ``jit`` that specifies shardings may move its operands to other devices, so it counts as computing something.
    if kind is not Jit or jaxprs.has_sharding(eqn):
        return None
    jaxpr, consts = jaxprs.body(eqn)
    if jaxpr.eqns or consts:
        return None
    outside: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    return [v if isinstance(v, Literal) else outside[v] for v in jaxpr.outvars]


# ---- equations with bodies


def has_body(eqn: JaxprEqn) -> bool:
    """Returns whether :func:`interpret_bodies` can interpret the bodies of an equation, such as a scan or cond."""
    return view_class_of(eqn) in _INTERPRET


def interpret_bodies(operation: Operation) -> Outs:
    """Computes the outputs of an equation by interpreting its bodies, such as the branches of a cond.

    :func:`has_body` must be true for the equation. The result is None if the equation must be evaluated unchanged, on
    arrays.
    """
    return _INTERPRET[view_class_of(operation.eqn)](operation)


def _interpreted_body(
    operation: Operation, facts: Sequence[Facts], branch: int = 0, *, in_arrays: bool = True
) -> Callable[..., list[Any]]:
    """Returns a function that interprets a body of an equation: from the values of its inputs to a list of outputs.

    Args:
      operation: The equation that contains the body.
      facts: The ``Facts`` about each input of the body that is not a constant.
      branch: The index of the branch, for a cond; otherwise 0.
      in_arrays: Whether each output that is a ``Sum`` is converted to an array.
    """
    jaxpr, consts = jaxprs.bodies(operation.eqn)[branch]
    facts_of_inputs = [*(operation.interpreter.rules.analysis.closed_over for _ in consts), *facts]
    interpreter = operation.interpreter.inside(operation.eqn, branch)
    run = interpreter.arrays if in_arrays else interpreter.run
    return lambda *args: run(jaxpr, [*consts, *args], facts_of_inputs)


def _interpret_jit(operation: Operation) -> Outs:
    """Interprets the body of a ``jit`` inline, or in a new ``jit`` if the equation specifies shardings.

    The result is None if the equation specifies shardings and an operand is a ``Sum``, because the factors lack the
    axes for which the shardings are specified.
    """
    if not jaxprs.has_sharding(operation.eqn):
        return _interpreted_body(operation, operation.facts, in_arrays=False)(*operation.args)
    if any(isinstance(x, Sum) for x in operation.args):
        return None
    return _run_with_body(operation, _interpreted_body(operation, operation.facts), operation.args)


def _interpret_checkpoint(operation: Operation) -> list[Any]:
    """Interprets the body of a ``jax.checkpoint`` inside a new one, or inline if the interpreter computes nothing."""
    body = _interpreted_body(operation, operation.facts, in_arrays=False)
    view = Checkpoint(operation.eqn)
    if not operation.interpreter.computes:
        return body(*operation.args)
    return jax.checkpoint(body, policy=view.policy, prevent_cse=view.prevent_cse)(*operation.args)


@dataclass(frozen=True)
class _Slices:
    """A ``Sum`` that a scan slices along its first axis, split into the arrays to slice and the rest.

    For example, let only ``a`` vary with the layer in stacked weights ``a @ b`` of shape (layers, i, o). Then
    ``arrays`` holds ``a``, of shape (layers, i, r). ``rest`` has the shape (i, o), and its factors are ``b`` and a
    factor whose array is None in place of ``a``.

    Attributes:
      arrays: The arrays of the factors that vary along the sliced axis. The sliced axis comes first in each array.
      rest: The ``Sum`` of one step, with None in place of each array in ``arrays``, in the same order.
    """

    arrays: list[Any]
    rest: Sum

    @classmethod
    def of(cls, x: Sum) -> "_Slices | None":
        """Splits a ``Sum`` for slicing along its first axis; returns None if this axis is merged or on a diagonal.

        A merged axis combines several axes of factors, and an axis on a diagonal shares its label with another axis.
        Neither corresponds to a single axis of a factor.
        """
        if not all(product.is_plain(0) for product in x.products):
            return None
        arrays = list[Any]()

        def without_axis(factor: Factor, axis: AxisLabels) -> Factor:
            """Removes the sliced axis from a factor. If the factor has the axis, its array moves to ``arrays``."""
            array = _with_axis_first(factor, axis)
            if array is None:
                return factor
            arrays.append(array)
            return replace(factor, array=None, labels=tuple(label for label in factor.labels if label not in axis))

        def of_one_step(product: Product) -> Product:
            """Returns the product of one step of the scan, which lacks the first axis."""
            first_axis, *other_axes = product.axes
            return Product(tuple(without_axis(factor, first_axis) for factor in product.factors), tuple(other_axes))

        rest = replace(x, products=tuple(map(of_one_step, x.products)), shape=x.shape[1:])
        return cls(arrays, rest)

    def at_step(self, arrays: Sequence[Any]) -> Sum:
        """Returns the ``Sum`` of one step, given the slices of ``self.arrays`` at this step."""
        slices = iter(arrays)
        return map_factors(self.rest, lambda x: replace(x, array=next(slices)) if x.array is None else x)


def _with_axis_first(factor: Factor, axis: AxisLabels) -> Any:
    """Moves the axis that a scan slices to the front of a factor's array; returns None if the factor lacks the axis.

    ``axis`` holds the label of the sliced axis. If the scan has only one step, the axis has no label, so no factor is
    sliced.
    """
    if axis_of_factor := [i for i, label in enumerate(factor.labels) if label in axis]:
        return jnp.moveaxis(factor.dense, axis_of_factor, [0])
    return None


def _interpret_scan(operation: Operation) -> Outs:
    """Interprets a scan. A constant or sliced ``Sum`` stays factored, and a carried ``Sum`` becomes an array."""
    eqn, interpreter = operation.eqn, operation.interpreter
    (jaxpr, consts), length = jaxprs.body(eqn), Scan(eqn).length
    inputs, facts = _inputs_of_scan(operation)
    body_facts = [*(interpreter.rules.analysis.closed_over for _ in consts), *facts]
    step_indices = [jnp.arange(length)] if interpreter.rules.counts_steps else []

    def body(*values: Any) -> list[Any]:
        """Computes one step, given the values of its inputs, followed by the index of the step if the rules need it."""
        index = values[len(inputs)] if step_indices else None
        pairs = zip(inputs, values, strict=False)  # ``values`` may end with the step's index.
        args = [x.at_step(value) if isinstance(x, _Slices) else value for x, value in pairs]
        return interpreter.inside(eqn, step=LoopStep(index, length)).arrays(jaxpr, [*consts, *args], body_facts)

    operands = [x.arrays if isinstance(x, _Slices) else x for x in inputs]
    return _run_with_body(operation, body, [*operands, *step_indices])


def _inputs_of_scan(operation: Operation) -> tuple[list[Any], list[Facts]]:
    """Returns the operands with which a scan is run, and the ``Facts`` about each operand that hold at every step.

    The operands are constants, carried values and sliced values, in this order. Constants are not changed. A carried
    ``Sum`` becomes an array. A sliced ``Sum`` becomes a ``_Slices`` if its factors can be sliced, and an array
    otherwise.
    """
    eqn, interpreter = operation.eqn, operation.interpreter
    (n_consts, n_carry), (jaxpr, consts) = jaxprs.scan_counts(eqn), jaxprs.body(eqn)
    inputs, facts = list(operation.args), dependence.steady_inputs(eqn, operation.facts, interpreter.rules.analysis)
    for i in range(n_consts, len(inputs)):
        # A carried or sliced value may differ between steps of this scan, so it may differ from outer values with the
        # same formula.
        facts[i] = replace(facts[i], steps=facts[i].steps | {len(interpreter.steps)}, formula=None)
        if i < n_consts + n_carry:
            inputs[i] = interpreter.array(inputs[i], eqn)
        elif isinstance(inputs[i], Sum):
            inputs[i] = _Slices.of(inputs[i]) or interpreter.array(inputs[i], eqn)
        elif _gradient_stops(jaxpr, jaxpr.invars[len(consts) + i]):
            inputs[i], facts[i] = jax.lax.stop_gradient(inputs[i]), replace(facts[i], fixed=True)
    return inputs, facts


def _gradient_stops(jaxpr: Jaxpr, v: Any) -> bool:
    """Returns whether a jaxpr, the body of a scan, reads its input ``v`` and stops its gradient at every read.

    If a sliced input gets no gradient, stopping its gradient before the scan saves memory: the derivative of the scan
    then reads the slices again. Otherwise, it would store what the body computes from the slice of each step, even the
    result of ``stop_gradient``.
    """
    reads = [(eqn, i) for eqn in jaxpr.eqns for i, operand in enumerate(eqn.invars) if operand is v]
    return v not in jaxpr.outvars and bool(reads) and all(_stops_gradient(eqn, i) for eqn, i in reads)


def _stops_gradient(eqn: JaxprEqn, i: int) -> bool:
    """Returns whether every read of an equation's ``i``-th operand, also inside its body, stops the gradient."""
    kind = view_class_of(eqn)
    if kind not in (Jit, Checkpoint):
        return kind is StopGradient
    jaxpr, consts = jaxprs.body(eqn)
    return _gradient_stops(jaxpr, jaxpr.invars[len(consts) + i])


def _run_with_body(operation: Operation, body: Callable[..., Any], operands: Sequence[Any]) -> Outs:
    """Runs an equation, such as a scan, with another body; returns None if such an equation cannot be rebuilt."""
    run = jaxprs.runner_of(operation.eqn)
    return run and list(run(body, *operands))


def _interpret_cond(operation: Operation) -> list[Any]:
    """Interprets each branch of a cond. An operand that is a ``Sum`` stays factored, and all outputs are arrays."""
    index, *operands = operation.args
    _, *facts = operation.facts  # The first operand is the index of the branch.
    branches = [_interpreted_body(operation, facts, i) for i in range(len(jaxprs.inner_programs(operation.eqn)))]
    return list(jaxprs.run_cond(operation.eqn, index, branches, operands))


def _interpret_shard_map(operation: Operation) -> list[Any]:
    """Interprets the body of a ``shard_map``. A ``Sum`` stays factored if its factors can be sharded like its array.

    The step indices of enclosing scans become operands of the ``shard_map``, because on an explicit mesh its body must
    not close over arrays.
    """
    eqn, steps = operation.eqn, operation.interpreter.steps
    in_specs = ShardMap(eqn).in_specs
    facts = [_facts_on_shard(facts, spec) for facts, spec in zip(operation.facts, in_specs, strict=True)]
    operands, specs = zip(*map(partial(_shard_input, operation), operation.args, in_specs), strict=True)

    def body_on_shard(shards: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
        """Computes the outputs on one device, from its shard of each operand and the index of each enclosing step."""
        steps_on_shard = tuple(step._replace(index=index) for step, index in zip(steps, indices, strict=True))
        on_shard = replace(operation, interpreter=replace(operation.interpreter, steps=steps_on_shard))
        pairs, rules = zip(shards, facts, strict=True), operation.interpreter.rules
        args = [rules.on_shard(_sum_on_shard(x), fact) if isinstance(x, Sum) else x for x, fact in pairs]
        return _interpreted_body(on_shard, facts)(*args)

    indices = [step.index for step in steps]
    return list(jaxprs.run_sharded(eqn, body_on_shard, (specs, PartitionSpec()), (operands, indices)))


def _facts_on_shard(facts: Facts, spec: Any) -> Facts:
    """Returns the ``Facts`` about one shard of a value that a partition spec splits over mesh axes.

    The shard of a split value has no formula, because values with the same formula may be split differently.
    """
    axes = frozenset(_mesh_axes(spec))
    return replace(facts, mesh_axes=axes, formula=None if axes else facts.formula)


def _mesh_axes(spec: Any) -> list[str]:
    """Returns the names of the mesh axes in a partition spec: data, x and y for ``("data", None, ("x", "y"))``."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return [name for entry in entries for name in entry]


def _shard_input(operation: Operation, x: Any, spec: Any) -> tuple[Any, Any]:
    """Returns an operand for a ``shard_map`` whose body is interpreted, and the partition spec of this operand.

    If the factors of a ``Sum`` can be split, its spec is the same ``Sum`` with a spec in place of each array, because
    ``shard_map`` expects specs with the tree structure of the operand. Any other ``Sum`` becomes an array. For
    ``w = a @ b`` with the spec ("x", None), the specs are ("x", None) for ``a`` and (None, None) for ``b``.
    """
    if not isinstance(x, Sum):
        return x, spec
    mesh = ShardMap(operation.eqn).mesh_shape
    entries = all_or_none(_entries_of_labels(product, spec, mesh) for product in x.products)
    if entries is None:
        return operation.interpreter.array(x, operation.eqn), spec
    entry_of_label = {label: entry for each in entries for label, entry in each.items()}

    def spec_of(factor: Factor) -> Factor:
        """Replaces a factor's array, and the PRNG key of its random draw, by partition specs. The key is not split."""
        draw = factor.draw and replace(factor.draw, key=PartitionSpec())
        return replace(factor, array=PartitionSpec(*map(entry_of_label.get, factor.labels)), draw=draw)

    return map_factors(x, lambda factor: replace(factor, array=factor.dense)), map_factors(x, spec_of)


def _sum_on_shard(x: Sum) -> Sum:
    """Replaces the labels of a ``Sum``, which have the sizes of whole arrays, by labels with the sizes of one shard.

    A label is replaced if its size differs from the size of the array along this axis. The shape of the result is
    computed from the new labels.
    """

    def with_sizes_of_shards(product: Product) -> Product:
        """Replaces the axis labels of a product by labels with the sizes of its arrays.

        Labels of size 1 are removed from the axes of the product.
        """
        pairs = (pair for factor in product.factors for pair in zip(factor.labels, factor.array.shape, strict=True))
        renamed = product.rename_labels({label: Label(n) for label, n in dict(pairs).items() if n != label.size})
        return replace(renamed, axes=tuple(tuple(x for x in group if x.size != 1) for group in renamed.axes))

    products = tuple(map(with_sizes_of_shards, x.products))
    return replace(
        x, products=products, shape=tuple(count_entries(x.size for x in group) for group in products[0].axes)
    )


def _entries_of_labels(product: Product, spec: Any, mesh: Mapping[str, int]) -> dict[Label, Any] | None:
    """Maps each axis label of a product that a partition spec splits to the entry of the spec that splits it.

    For the axes ((i,), (o,)) and the spec ("x", None), the result is {i: "x"}. An axis with several labels is split
    along its first label. The result is None if an axis cannot be split. This is the case if the axis has no label, or
    if its first label is on another axis, is on no factor, or has a size that is not a multiple of the number of
    shards.
    """
    labels = product.labels_of_axes
    # A spec may have fewer entries than the product has axes. The remaining axes are then not split.
    split_axes = [(group, entry) for group, entry in zip(product.axes, spec, strict=False) if _mesh_axes([entry])]
    for group, entry in split_axes:
        n = math.prod(mesh[name] for name in _mesh_axes([entry]))
        if not group or group[0].size % n or labels.count(group[0]) > 1 or group[0] not in product.labels:
            return None
    return {group[0]: entry for group, entry in split_axes}


_INTERPRET: dict[type[View], Callable[[Operation], Outs]] = {
    Jit: _interpret_jit,
    Checkpoint: _interpret_checkpoint,
    Scan: _interpret_scan,
    Cond: _interpret_cond,
    ShardMap: _interpret_shard_map,
}
