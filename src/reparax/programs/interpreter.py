"""Interprets programs, and keeps weights as sums of products wherever the equations that read them are linear.

``Interpreter.run`` evaluates the equations of a program. If an equation reads a sum or may introduce one, the ``Rules``
either keep the sum in factors or report that the equation needs its array. All other equations are deferred and
evaluated together. The bodies of calls, scans, conds and ``shard_map`` are interpreted too, and sums enter these bodies
in factors.
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
"""The outputs of an equation, as arrays or sums; None if the equation must be evaluated unchanged, on arrays."""

# This operation can be traced because its output type is known, but it cannot run.
_stand_in = Primitive("reparax_stand_in")
_stand_in.def_abstract_eval(lambda *, type: type)


def stand_in(v: Any) -> Any:
    """Returns a placeholder with the type of a variable, for a program that is traced and never run."""
    return _stand_in.bind(type=type_of(v))


@dataclass(frozen=True)
class Operation:
    """An equation that is about to be evaluated.

    Attributes:
      interpreter: The interpreter that evaluates the equation.
      eqn: The equation.
      args: The value of each operand: an array or a sum.
      facts: The facts about each operand, such as whether it gets a gradient.
      out_facts: The facts about the first output.
      only_first_read: Whether no output except the first is read.
    """

    interpreter: "Interpreter"
    eqn: JaxprEqn
    args: Sequence[Any]
    facts: Sequence[Facts]
    out_facts: Facts
    only_first_read: bool

    @property
    def view(self) -> View:
        """The view of the equation."""
        return view_of(self.eqn)

    @property
    def maker(self) -> tuple[Hashable, ...]:
        """The identity of a sum made by this equation: the ids of the equation and of all equations around it."""
        return (*self.interpreter.path, id(self.eqn))


class Rules(Protocol):
    """Decides which equations introduce weights as sums, and what other equations do with these sums.

    Attributes:
      counts_steps: Whether the rules need the index of the current step of each scan.
    """

    counts_steps: bool

    @property
    def analysis(self) -> Analysis[Facts]:
        """The analysis that finds the facts about values."""
        ...

    def may_introduce_sum(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Returns whether an equation that reads no sum may introduce a sum, itself or in its bodies."""
        ...

    def outputs(self, operation: Operation) -> Outs:
        """Computes the outputs of an equation that reads or may introduce a sum; returns None if it needs arrays."""
        ...

    def materialize(self, interpreter: "Interpreter", x: Sum, eqn: JaxprEqn | None) -> Any:
        """Forms the array of a sum because ``eqn`` needs the array as an operand.

        ``eqn`` is None if the program returns the sum.
        """
        ...


class LoopStep(NamedTuple):
    """The index of the current step of a scan, or None if the rules do not need the index, and the number of steps."""

    index: Any
    length: Any


@dataclass(frozen=True)
class Interpreter:
    """Evaluates a program by the given rules, and records where this program occurs in the whole program.

    Attributes:
      rules: The rules that decide what happens to weights.
      times: The number of times the program runs, which is the product of the lengths of the scans around it.
      steps: The current step of each scan around the program, beginning with the outermost scan.
      path: The ``id`` of each equation that contains the program, and the number of the body. These identify the
        program.
      in_formula: Whether the program is part of the ``apply`` of a parametrization.
      computes: Whether equations that read no sum are evaluated. If false, placeholders stand for their outputs.
    """

    rules: Rules
    times: int = 1
    steps: tuple[LoopStep, ...] = ()
    path: tuple[int, ...] = ()
    in_formula: bool = False
    computes: bool = True

    def run(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """Evaluates a program, given the values of its inputs and facts about them. Outputs may be arrays or sums."""
        return _Evaluation(self, jaxpr, args, facts).outs()

    def arrays(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """Evaluates a program as :meth:`run` does, but returns all outputs as arrays."""
        return [self.array(x, None) for x in self.run(jaxpr, args, facts)]

    def array(self, x: Any, eqn: JaxprEqn | None) -> Any:
        """Converts ``x``, an array or a sum, to an array for an equation that needs an array.

        ``eqn`` is None if the program returns ``x``.
        """
        return self.rules.materialize(self, x, eqn) if isinstance(x, Sum) else x

    def inside(self, eqn: JaxprEqn, branch: int = 0, step: LoopStep | None = None) -> "Interpreter":
        """Returns the interpreter for a body of an equation.

        For a cond, ``branch`` is the number of the body. For a scan, ``step`` is the current step; otherwise, it is
        None.
        """
        steps = self.steps if step is None else (*self.steps, step)
        times = self.times if step is None else self.times * count_entries([step.length])
        in_formula = self.in_formula or is_apply(eqn)
        return replace(self, times=times, steps=steps, path=(*self.path, id(eqn), branch), in_formula=in_formula)


class _Evaluation:
    """The state of one evaluation: the values computed so far, and the deferred equations."""

    def __init__(self, interpreter: Interpreter, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> None:
        """Stores the values of the inputs, and derives the facts about all values. No equation is evaluated yet."""
        self._interpreter, self._jaxpr = interpreter, jaxpr
        # ``_env`` holds the array or sum of each variable. ``_formed`` holds the arrays of the sums that were formed so
        # far.
        self._env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        self._formed: dict[Any, Any] = {}
        self._facts: Mapping[Any, Facts] = dependence.analyze(jaxpr, facts, interpreter.rules.analysis)
        # ``_reads`` counts the remaining equations that read each variable. The outputs of deferred equations are kept
        # only if they will be read.
        self._reads = jaxprs.count_reads(jaxpr)
        # Deferred equations keep no sum in factors. They are evaluated together, before the rules need any values.
        self._deferred: list[JaxprEqn] = []

    def outs(self) -> list[Any]:
        """Evaluates the program and returns its outputs, as arrays or sums. Must be called only once."""
        for eqn in self._jaxpr.eqns:
            self._evaluate_or_defer(eqn)
        self._evaluate_deferred()
        return list(map(self._value_of, self._jaxpr.outvars))

    def _value_of(self, v: Any) -> Any:
        """Returns the array or sum of a variable or literal.

        If equations that read no sum are not evaluated, a variable without a value gets a placeholder.
        """
        if isinstance(v, Literal):
            return jnp.asarray(v.val)
        if v not in self._env:
            self._env[v] = stand_in(v)
        return self._env[v]

    def _evaluate_or_defer(self, eqn: JaxprEqn) -> None:
        """Adds the outputs of an equation to ``_env``, or defers the equation if :meth:`_keep_factors` returns None."""
        facts = [FACTS_OF_CONSTANT if isinstance(v, Literal) else self._facts[v] for v in eqn.invars]
        outs = self._keep_factors(eqn, facts)
        if outs is None:
            self._deferred.append(eqn)
            return
        self._reads.subtract(jaxprs.variables(eqn.invars))
        self._env.update(zip(eqn.outvars, outs, strict=True))

    def _keep_factors(self, eqn: JaxprEqn, facts: Sequence[Facts]) -> Outs:
        """Computes the outputs of an equation that keeps sums in factors or returns its operands unchanged.

        The result is None for all other equations, which must be deferred.
        """
        outs = self._outputs_by_rules(eqn, facts)
        unchanged_operands = _unchanged_operands(eqn, facts) if outs is None else None
        if unchanged_operands is None:
            return outs
        self._evaluate_deferred()
        return list(map(self._value_of, unchanged_operands))

    def _outputs_by_rules(self, eqn: JaxprEqn, facts: Sequence[Facts]) -> Outs:
        """Applies the rules to an equation that reads sums or may introduce one, and returns its outputs.

        The result is None for all other equations, and if the rules need the arrays of the sums. Deferred equations are
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
        """Evaluates the deferred equations as one program, and adds their outputs to ``_env``.

        The arrays of all sums that these equations read are formed. If equations that read no sum are not evaluated,
        only the arrays of the sums are formed.
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
        else:  # Form the sums, because the rules must see each of them.
            for v in jaxprs.variables_read(eqns):
                if v in self._env:
                    self._array_of(v, eqns)

    def _array_of(self, v: Any, eqns: Sequence[JaxprEqn]) -> Any:
        """Returns the value of a variable as an array.

        The array of a sum is formed only once, for the first equation in ``eqns`` that reads the sum.
        """
        x = self._env[v]
        if not isinstance(x, Sum):
            return x
        if v not in self._formed:
            self._formed[v] = self._interpreter.array(x, next(e for e in eqns if v in jaxprs.variables(e.invars)))
        return self._formed[v]


def _unchanged_operands(eqn: JaxprEqn, facts: Sequence[Facts]) -> list[Any] | None:
    """Returns the operand that each output of an equation equals; None if the equation computes anything.

    Two kinds of equations compute nothing: a ``jit`` whose body has no equations and no constants, and a
    ``stop_gradient`` of a value that gets no gradient.
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
    """Returns whether :func:`interpret_bodies` can interpret the bodies of an equation, as for a scan or cond."""
    return view_class_of(eqn) in _INTERPRET


def interpret_bodies(operation: Operation) -> Outs:
    """Computes the outputs of an equation by interpreting its bodies.

    :func:`has_body` must be true for the equation. The result is None if the equation must be evaluated unchanged, on
    arrays.
    """
    return _INTERPRET[view_class_of(operation.eqn)](operation)


def _interpreted_body(
    operation: Operation, facts: Sequence[Facts], branch: int = 0, *, in_arrays: bool = True
) -> Callable[..., list[Any]]:
    """Returns a function that interprets a body of an equation, and maps input values to a list of outputs.

    Args:
      operation: The equation.
      facts: The facts about the inputs of the body, except its constants.
      branch: The number of the body, for a cond.
      in_arrays: Whether sums among the outputs become arrays.
    """
    jaxpr, consts = jaxprs.bodies(operation.eqn)[branch]
    facts_of_inputs = [*(operation.interpreter.rules.analysis.closed_over for _ in consts), *facts]
    interpreter = operation.interpreter.inside(operation.eqn, branch)
    run = interpreter.arrays if in_arrays else interpreter.run
    return lambda *args: run(jaxpr, [*consts, *args], facts_of_inputs)


def _interpret_jit(operation: Operation) -> Outs:
    """Interprets a call inline, or in a new ``jit`` if the call specifies shardings.

    The result is None if the call specifies shardings and an operand is a sum, because the factors lack the axes for
    which the shardings are specified.
    """
    if not jaxprs.has_sharding(operation.eqn):
        return _interpreted_body(operation, operation.facts, in_arrays=False)(*operation.args)
    if any(isinstance(x, Sum) for x in operation.args):
        return None
    return _run_with_body(operation, _interpreted_body(operation, operation.facts), operation.args)


def _interpret_checkpoint(operation: Operation) -> list[Any]:
    """Interprets a body in a new ``jax.checkpoint``, or inline if equations that read no sum are not evaluated."""
    body = _interpreted_body(operation, operation.facts, in_arrays=False)
    view = Checkpoint(operation.eqn)
    if not operation.interpreter.computes:
        return body(*operation.args)
    return jax.checkpoint(body, policy=view.policy, prevent_cse=view.prevent_cse)(*operation.args)


@dataclass(frozen=True)
class _Slices:
    """A sum that a scan slices along its first axis, split into the arrays to slice and the rest of the sum.

    For example, let only ``a`` vary with the layer in stacked weights ``a @ b`` of shape (layers, i, o). Then
    ``arrays`` holds ``a``, of shape (layers, i, r). ``rest`` has the shape (i, o), and its factors are ``b`` and a
    factor whose array is None in place of ``a``.

    Attributes:
      arrays: The arrays of the factors that vary along the sliced axis. The sliced axis comes first in each array.
      rest: The sum of one step, with None in place of each array in ``arrays``, in the same order.
    """

    arrays: list[Any]
    rest: Sum

    @classmethod
    def of(cls, x: Sum) -> "_Slices | None":
        """Splits a sum for slicing; returns None if its first axis is merged or on a diagonal.

        No single axis of a factor corresponds to a merged axis or an axis on a diagonal.
        """
        if not all(product.is_plain(0) for product in x.products):
            return None
        arrays = list[Any]()

        def without_axis(factor: Factor, axis: AxisLabels) -> Factor:
            """Removes the sliced axis from a factor. If the factor varies along it, its array moves to ``arrays``."""
            array = _with_axis_first(factor, axis)
            if array is None:
                return factor
            arrays.append(array)
            return replace(factor, array=None, labels=tuple(label for label in factor.labels if label not in axis))

        def of_one_step(product: Product) -> Product:
            """Returns the product of one step, which lacks the first axis."""
            first_axis, *other_axes = product.axes
            return Product(tuple(without_axis(factor, first_axis) for factor in product.factors), tuple(other_axes))

        rest = replace(x, products=tuple(map(of_one_step, x.products)), shape=x.shape[1:])
        return cls(arrays, rest)

    def at_step(self, arrays: Sequence[Any]) -> Sum:
        """Returns the sum of one step, given the slices of ``self.arrays`` at this step."""
        slices = iter(arrays)
        return map_factors(self.rest, lambda x: replace(x, array=next(slices)) if x.array is None else x)


def _with_axis_first(factor: Factor, axis: AxisLabels) -> Any:
    """Moves the sliced axis to the front of a factor's array; returns None if the factor does not vary along the axis.

    ``axis`` holds the label of the sliced axis. If the scan has only one step, the axis has no label, and every factor
    gets a first axis of size 1.
    """
    if not axis:
        return factor.dense[None]
    (label,) = axis
    return jnp.moveaxis(factor.dense, factor.labels.index(label), 0) if label in factor.labels else None


def _interpret_scan(operation: Operation) -> Outs:
    """Interprets a scan. Constant sums and sliced sums stay in factors, and carried sums become arrays."""
    eqn, interpreter = operation.eqn, operation.interpreter
    (jaxpr, consts), length = jaxprs.body(eqn), Scan(eqn).length
    inputs, facts = _inputs_of_scan(operation)
    body_facts = [*(interpreter.rules.analysis.closed_over for _ in consts), *facts]
    step_indices = [jnp.arange(length)] if interpreter.rules.counts_steps else []

    def body(*values: Any) -> list[Any]:
        """Computes one step, given the values of its inputs, and the index of the step if the rules need the index."""
        index = values[len(inputs)] if step_indices else None
        pairs = zip(inputs, values, strict=False)  # This leaves out the index of the step.
        args = [x.at_step(value) if isinstance(x, _Slices) else value for x, value in pairs]
        return interpreter.inside(eqn, step=LoopStep(index, length)).arrays(jaxpr, [*consts, *args], body_facts)

    operands = [x.arrays if isinstance(x, _Slices) else x for x in inputs]
    return _run_with_body(operation, body, [*operands, *step_indices])


def _inputs_of_scan(operation: Operation) -> tuple[list[Any], list[Facts]]:
    """Returns the operands with which a scan is run, and the facts about each operand that hold at every step.

    The operands are constants, carried values and sliced values, in this order. Constants are not changed, even if they
    are sums. Carried sums become arrays. Sliced sums become ``_Slices`` if their factors can be sliced, and arrays
    otherwise.
    """
    eqn, interpreter = operation.eqn, operation.interpreter
    (n_consts, n_carry), (jaxpr, consts) = jaxprs.scan_counts(eqn), jaxprs.body(eqn)
    inputs, facts = list(operation.args), dependence.steady_inputs(eqn, operation.facts, interpreter.rules.analysis)
    for i in range(n_consts, len(inputs)):
        # The value may differ between steps of this scan, so it may differ from outer values with the same formula.
        facts[i] = replace(facts[i], steps=facts[i].steps | {len(interpreter.steps)}, formula=None)
        if i < n_consts + n_carry:
            inputs[i] = interpreter.array(inputs[i], eqn)
        elif isinstance(inputs[i], Sum):
            inputs[i] = _Slices.of(inputs[i]) or interpreter.array(inputs[i], eqn)
        elif _gradient_stops(jaxpr, jaxpr.invars[len(consts) + i]):
            inputs[i], facts[i] = jax.lax.stop_gradient(inputs[i]), replace(facts[i], fixed=True)
    return inputs, facts


def _gradient_stops(jaxpr: Jaxpr, v: Any) -> bool:
    """Returns whether the body of a scan reads its input ``v``, and stops its gradient at every read.

    If so, the gradient of a sliced input can be stopped before the scan to save memory. The derivative of the scan then
    reads the slices again. It would instead store for each step what the body computes from the slices, even by
    ``stop_gradient``.
    """
    reads = [(eqn, i) for eqn in jaxpr.eqns for i, operand in enumerate(eqn.invars) if operand is v]
    return v not in jaxpr.outvars and bool(reads) and all(_stops_gradient(eqn, i) for eqn, i in reads)


def _stops_gradient(eqn: JaxprEqn, i: int) -> bool:
    """Returns whether an equation, or every read inside a call, stops the gradient of the ``i``-th operand."""
    kind = view_class_of(eqn)
    if kind not in (Jit, Checkpoint):
        return kind is StopGradient
    jaxpr, consts = jaxprs.body(eqn)
    return _gradient_stops(jaxpr, jaxpr.invars[len(consts) + i])


def _run_with_body(operation: Operation, body: Callable[..., Any], operands: Sequence[Any]) -> Outs:
    """Runs an equation with another body on the given operands; returns None if the equation does not support it."""
    run = jaxprs.runner_of(operation.eqn)
    return run and list(run(body, *operands))


def _interpret_cond(operation: Operation) -> list[Any]:
    """Interprets each branch of a cond. Sums among its operands stay in factors, and its outputs are arrays."""
    index, *operands = operation.args
    _, *facts = operation.facts  # The first operand is the index.
    branches = [_interpreted_body(operation, facts, i) for i in range(len(jaxprs.inner_programs(operation.eqn)))]
    return list(jaxprs.run_cond(operation.eqn, index, branches, operands))


def _interpret_shard_map(operation: Operation) -> list[Any]:
    """Interprets the body of a ``shard_map``. A sum stays in factors if the factors can be split like the sum.

    A shard is the part of an operand on one device. The step indices of enclosing scans become operands of the
    ``shard_map``, because on an explicit mesh its body must not close over arrays.
    """
    eqn, steps = operation.eqn, operation.interpreter.steps
    in_specs = ShardMap(eqn).in_specs
    facts = [_facts_on_shard(facts, spec) for facts, spec in zip(operation.facts, in_specs, strict=True)]
    operands, specs = zip(*map(partial(_shard_input, operation), operation.args, in_specs), strict=True)

    def body_on_shard(shards: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
        """Computes the body on one shard of each operand, given the step index of each enclosing scan."""
        steps_on_shard = tuple(step._replace(index=index) for step, index in zip(steps, indices, strict=True))
        on_shard = replace(operation, interpreter=replace(operation.interpreter, steps=steps_on_shard))
        return _interpreted_body(on_shard, facts)(*(_sum_on_shard(x) if isinstance(x, Sum) else x for x in shards))

    indices = [step.index for step in steps]
    step_specs = [None if index is None else PartitionSpec() for index in indices]
    return list(jaxprs.run_sharded(eqn, body_on_shard, (specs, step_specs), (operands, indices)))


def _facts_on_shard(facts: Facts, spec: Any) -> Facts:
    """Returns the facts about one shard of a value that a partition spec splits over mesh axes.

    The shard of a split value has no formula, because values with the same formula may be split differently.
    """
    axes = frozenset(_mesh_axes(spec))
    return replace(facts, mesh_axes=axes, formula=None if axes else facts.formula)


def _mesh_axes(spec: Any) -> list[str]:
    """Returns the mesh axes in a partition spec: data, x and y for ``("data", None, ("x", "y"))``."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return [name for entry in entries for name in entry]


def _shard_input(operation: Operation, x: Any, spec: Any) -> tuple[Any, Any]:
    """Returns an operand for a ``shard_map`` whose body is interpreted, and the partition spec of this operand.

    If the factors of a sum can be split, the spec is the same sum with a spec in place of each array, because
    ``shard_map`` expects specs with the tree structure of the operand. Any other sum becomes an array. For
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
        """Replaces the array of a factor, and the key of its draw, by partition specs. The key is not split."""
        draw = factor.draw and replace(factor.draw, key=PartitionSpec())
        return replace(factor, array=PartitionSpec(*map(entry_of_label.get, factor.labels)), draw=draw)

    return map_factors(x, lambda factor: replace(factor, array=factor.dense)), map_factors(x, spec_of)


def _sum_on_shard(x: Sum) -> Sum:
    """Replaces the labels of a sum, which have the sizes of whole arrays, by labels with the sizes of one shard.

    A label is replaced if its size differs from the size of the array's axis. The shape is computed from the new
    labels.
    """

    def with_sizes_of_shards(product: Product) -> Product:
        """Replaces the labels of a product by labels with the sizes of its arrays.

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
    """Maps each label of a product that a partition spec splits to the entry of the spec that splits it.

    For the axes ((i,), (o,)) and the spec ("x", None), the result is {i: "x"}. A merged axis is split along its first
    label. The result is None if an axis cannot be split. This is the case if the axis has no label, or if its first
    label is on another axis, is on no factor, or has a size that is not a multiple of the number of shards.
    """
    labels = product.labels_of_axes
    # A spec may have fewer entries than there are axes. The remaining axes are then not split.
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
