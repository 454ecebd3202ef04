"""The interpreter of programs: weights stay sums of products wherever the equations that read them are linear.

``Interpreter.run`` goes through the equations of a program. An equation that reads a sum, or may introduce one, is
passed to the ``Rules``, which keep the sum in factors or say that the equation needs its array. All other equations are
deferred, to be evaluated together. Equations with bodies (calls, loops, conds and ``shard_map``) are interpreted too,
and sums enter their bodies in factors.
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
"""The outputs of an equation, arrays or sums; None if the equation must be evaluated as it is, on arrays."""

# This operation can be traced, because its type is known, but not run.
_stand_in = Primitive("reparax_stand_in")
_stand_in.def_abstract_eval(lambda *, type: type)


def stand_in(v: Any) -> Any:
    """Returns a placeholder with the type of a variable, for a program that is traced and never run."""
    return _stand_in.bind(type=type_of(v))


@dataclass(frozen=True)
class Operation:
    """An equation that is about to be evaluated.

    Attributes:
      interpreter: The interpreter that evaluates it.
      eqn: The equation.
      args: The value of each operand, an array or a sum.
      facts: The facts about each operand, such as whether it gets a gradient.
      out_facts: The facts about its first output.
      only_first_read: Whether no other output than the first is read.
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
        """Identifies a sum made by this equation: the equation, and all equations whose bodies contain it."""
        return (*self.interpreter.path, id(self.eqn))


class Rules(Protocol):
    """Decides what happens to weights: which equations introduce them as sums, and what other equations do with sums.

    Attributes:
      counts_steps: Whether the rules need the index of the current step of each scan.
    """

    counts_steps: bool

    @property
    def analysis(self) -> Analysis[Facts]:
        """The analysis that finds the facts about values."""
        ...

    def may_introduce_sum(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Returns whether an equation that reads no sum may introduce one, itself or in its bodies."""
        ...

    def outputs(self, operation: Operation) -> Outs:
        """Computes the outputs of an equation that reads sums or may introduce one; returns None if it needs arrays."""
        ...

    def materialize(self, interpreter: "Interpreter", x: Sum, eqn: JaxprEqn | None) -> Any:
        """Forms the array of a sum because ``eqn`` needs it as an operand.

        ``eqn`` is None if the program returns the sum.
        """
        ...


class LoopStep(NamedTuple):
    """The current step of a scan: its index, or None if the rules do not need it, and the number of steps."""

    index: Any
    length: Any


@dataclass(frozen=True)
class Interpreter:
    """Evaluates a program by given rules, and records where the program is in the whole program.

    Attributes:
      rules: The rules that decide what happens to weights.
      times: How often the program runs: the product of the lengths of the scans around it.
      steps: The current step of each scan around the program, beginning with the outermost scan.
      path: Identifies the program by the equations that contain it: for each, its ``id`` and the number of the body.
      in_formula: Whether the program is part of the ``apply`` of a parametrization.
      computes: Whether equations that read no sum are evaluated. If not, placeholders stand for their outputs.
    """

    rules: Rules
    times: int = 1
    steps: tuple[LoopStep, ...] = ()
    path: tuple[int, ...] = ()
    in_formula: bool = False
    computes: bool = True

    def run(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """Evaluates a program, given the values of its inputs and facts about them; outputs may be arrays or sums."""
        return _Evaluation(self, jaxpr, args, facts).outs()

    def arrays(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """Evaluates a program as :meth:`run` does, but returns all outputs as arrays."""
        return [self.array(x, None) for x in self.run(jaxpr, args, facts)]

    def array(self, x: Any, eqn: JaxprEqn | None) -> Any:
        """Converts ``x`` to an array for an equation that needs it: a sum is formed, and an array is returned as it is.

        ``eqn`` is None if the program returns ``x``.
        """
        return self.rules.materialize(self, x, eqn) if isinstance(x, Sum) else x

    def inside(self, eqn: JaxprEqn, branch: int = 0, step: LoopStep | None = None) -> "Interpreter":
        """Returns the interpreter for a body of an equation.

        ``branch`` is the number of the body, for a cond. ``step`` is the current step, for a scan only.
        """
        steps = self.steps if step is None else (*self.steps, step)
        times = self.times if step is None else self.times * count_entries([step.length])
        in_formula = self.in_formula or is_apply(eqn)
        return replace(self, times=times, steps=steps, path=(*self.path, id(eqn), branch), in_formula=in_formula)


class _Evaluation:
    """One evaluation of a program: the values computed so far, and the equations that wait to be evaluated together."""

    def __init__(self, interpreter: Interpreter, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> None:
        """Stores the values of the inputs, arrays or sums, and finds all facts. Nothing is evaluated yet."""
        self._interpreter, self._jaxpr = interpreter, jaxpr
        # ``_env`` has the array or sum of each variable, and ``_formed`` has the arrays of the sums formed so far.
        self._env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        self._formed: dict[Any, Any] = {}
        self._facts: Mapping[Any, Facts] = dependence.analyze(jaxpr, facts, interpreter.rules.analysis)
        # ``_reads`` counts the equations that will still read each variable. Values that none will read are not kept.
        self._reads = jaxprs.count_reads(jaxpr)
        # Deferred equations keep no sum in factors. They are evaluated together, before the rules need any values.
        self._deferred: list[JaxprEqn] = []

    def outs(self) -> list[Any]:
        """Evaluates the program, once, and returns its outputs, arrays or sums."""
        for eqn in self._jaxpr.eqns:
            self._evaluate_or_defer(eqn)
        self._evaluate_deferred()
        return list(map(self._value_of, self._jaxpr.outvars))

    def _value_of(self, v: Any) -> Any:
        """Returns the array or sum of a variable or literal.

        If equations that read no sum are not evaluated, a variable may have no value yet; then it gets a placeholder.
        """
        if isinstance(v, Literal):
            return jnp.asarray(v.val)
        if v not in self._env:
            self._env[v] = stand_in(v)
        return self._env[v]

    def _evaluate_or_defer(self, eqn: JaxprEqn) -> None:
        """Adds the outputs of an equation to ``_env``, or the equation to ``_deferred`` if it needs no rules."""
        facts = [FACTS_OF_CONSTANT if isinstance(v, Literal) else self._facts[v] for v in eqn.invars]
        outs = self._keep_factors(eqn, facts)
        if outs is None:
            self._deferred.append(eqn)
            return
        self._reads.subtract(jaxprs.variables(eqn.invars))
        self._env.update(zip(eqn.outvars, outs, strict=True))

    def _keep_factors(self, eqn: JaxprEqn, facts: Sequence[Facts]) -> Outs:
        """Computes the outputs of an equation that keeps sums in factors or returns its operands unchanged.

        The result is None for any other equation, which must be deferred.
        """
        outs = self._outputs_by_rules(eqn, facts)
        unchanged_operands = _unchanged_operands(eqn, facts) if outs is None else None
        if unchanged_operands is None:
            return outs
        self._evaluate_deferred()
        return list(map(self._value_of, unchanged_operands))

    def _outputs_by_rules(self, eqn: JaxprEqn, facts: Sequence[Facts]) -> Outs:
        """Computes the outputs of an equation that reads sums or may introduce one, by the rules.

        The result is None for any other equation, or if the rules need the arrays of its sums. The deferred equations
        are evaluated first, because the rules may need their values.
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

        The sums that they read are formed. Only this is done if equations that read no sum are not evaluated.
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
        else:  # The rules must be told of each sum that would be formed.
            for v in jaxprs.variables_read(eqns):
                if v in self._env:
                    self._array_of(v, eqns)

    def _array_of(self, v: Any, eqns: Sequence[JaxprEqn]) -> Any:
        """Returns the value of a variable as an array.

        A sum is formed only once, for the first of ``eqns`` that reads it.
        """
        x = self._env[v]
        if not isinstance(x, Sum):
            return x
        if v not in self._formed:
            self._formed[v] = self._interpreter.array(x, next(e for e in eqns if v in jaxprs.variables(e.invars)))
        return self._formed[v]


def _unchanged_operands(eqn: JaxprEqn, facts: Sequence[Facts]) -> list[Any] | None:
    """Returns, for each output of an equation, the operand that it equals; None if the equation computes anything.

    An equation that computes nothing is a ``jit`` without equations inside, or a ``stop_gradient`` of a value that gets
    no gradient.
    """
    kind = view_class_of(eqn)
    if kind is StopGradient and facts[0].fixed:
        return eqn.invars
    # A ``jit`` that specifies shardings may move its operands, so it counts as computing something.
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

    The result is None if the equation must be evaluated as it is, on arrays. :func:`has_body` must be true for it.
    """
    return _INTERPRET[view_class_of(operation.eqn)](operation)


def _interpreted_body(
    operation: Operation, facts: Sequence[Facts], branch: int = 0, *, in_arrays: bool = True
) -> Callable[..., list[Any]]:
    """Returns a function that interprets a body of an equation: it maps the values of its inputs to a list of outputs.

    Args:
      operation: The equation.
      facts: The facts about the inputs, without the constants of the body, which are added here.
      branch: The number of the body, for a cond.
      in_arrays: Whether sums among the outputs become arrays.
    """
    jaxpr, consts = jaxprs.bodies(operation.eqn)[branch]
    facts_of_inputs = [*(operation.interpreter.rules.analysis.closed_over for _ in consts), *facts]
    interpreter = operation.interpreter.inside(operation.eqn, branch)
    run = interpreter.arrays if in_arrays else interpreter.run
    return lambda *args: run(jaxpr, [*consts, *args], facts_of_inputs)


def _interpret_jit(operation: Operation) -> Outs:
    """Interprets a call inline, or under ``jit`` again if it specifies shardings.

    The result is None if it specifies shardings and an operand is a sum, because the factors do not have the axes for
    which the shardings are specified.
    """
    if not jaxprs.has_sharding(operation.eqn):
        return _interpreted_body(operation, operation.facts, in_arrays=False)(*operation.args)
    if any(isinstance(x, Sum) for x in operation.args):
        return None
    return _run_with_body(operation, _interpreted_body(operation, operation.facts), operation.args)


def _interpret_checkpoint(operation: Operation) -> list[Any]:
    """Interprets a body under ``jax.checkpoint`` again, or inline if equations that read no sum are not evaluated."""
    body = _interpreted_body(operation, operation.facts, in_arrays=False)
    view = Checkpoint(operation.eqn)
    if not operation.interpreter.computes:
        return body(*operation.args)
    return jax.checkpoint(body, policy=view.policy, prevent_cse=view.prevent_cse)(*operation.args)


@dataclass(frozen=True)
class _Slices:
    """A sum that a scan slices along its first axis, split into the arrays that are sliced and all that stays the same.

    For stacked weights ``a @ b`` of shape (layers, i, o), in which only ``a`` varies with the layer, ``arrays`` is [a],
    of shape (layers, i, r). ``rest`` has the shape (i, o), and its factors are b and a factor without an array for a.

    Attributes:
      arrays: The arrays of the factors that vary along the sliced axis, which is the first axis of each.
      rest: The sum of one step, with None in place of each of these arrays, in the same order.
    """

    arrays: list[Any]
    rest: Sum

    @classmethod
    def of(cls, x: Sum) -> "_Slices | None":
        """Splits a sum for slicing; returns None if its first axis is merged or on a diagonal.

        No axis of a factor corresponds to such an axis.
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
    """Moves the axis of a scan to the front of a factor's array; returns None if the factor does not vary along it.

    ``axis`` has the label of this axis of the product. It has no label if the scan has only one step; then every factor
    gets a first axis of size 1.
    """
    if not axis:
        return factor.dense[None]
    (label,) = axis
    return jnp.moveaxis(factor.dense, factor.labels.index(label), 0) if label in factor.labels else None


def _interpret_scan(operation: Operation) -> Outs:
    """Interprets a scan: constant and sliced sums stay in factors, and carried ones become arrays."""
    eqn, interpreter = operation.eqn, operation.interpreter
    (jaxpr, consts), length = jaxprs.body(eqn), Scan(eqn).length
    inputs, facts = _inputs_of_scan(operation)
    body_facts = [*(interpreter.rules.analysis.closed_over for _ in consts), *facts]
    step_indices = [jnp.arange(length)] if interpreter.rules.counts_steps else []

    def body(*values: Any) -> list[Any]:
        """Computes one step from the values of its inputs, followed by the index of the step if the rules need it."""
        index = values[len(inputs)] if step_indices else None
        pairs = zip(inputs, values, strict=False)  # The index of the step has no input and is left out.
        args = [x.at_step(value) if isinstance(x, _Slices) else value for x, value in pairs]
        return interpreter.inside(eqn, step=LoopStep(index, length)).arrays(jaxpr, [*consts, *args], body_facts)

    operands = [x.arrays if isinstance(x, _Slices) else x for x in inputs]
    return _run_with_body(operation, body, [*operands, *step_indices])


def _inputs_of_scan(operation: Operation) -> tuple[list[Any], list[Facts]]:
    """Returns the operands of a scan in the form in which it is run, and the facts about each that hold at every step.

    The operands are constants, carried values and sliced values, in this order. Constants stay as they are, even if
    they are sums. Carried sums become arrays. Sliced sums become ``_Slices`` if they can be sliced in factors, and
    arrays otherwise.
    """
    eqn, interpreter = operation.eqn, operation.interpreter
    (n_consts, n_carry), (jaxpr, consts) = jaxprs.scan_counts(eqn), jaxprs.body(eqn)
    inputs, facts = list(operation.args), dependence.steady_inputs(eqn, operation.facts, interpreter.rules.analysis)
    for i in range(n_consts, len(inputs)):
        # The value may differ between the steps of this scan, and so from values outside that have the same formula.
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

    If so, the gradient of a sliced input can be stopped before the scan, which takes less memory. The derivative of the
    scan reads the slices again, whereas everything that the body computes from them, even by ``stop_gradient``, is
    stored for each step.
    """
    reads = [(eqn, i) for eqn in jaxpr.eqns for i, operand in enumerate(eqn.invars) if operand is v]
    return v not in jaxpr.outvars and bool(reads) and all(_stops_gradient(eqn, i) for eqn, i in reads)


def _stops_gradient(eqn: JaxprEqn, i: int) -> bool:
    """Returns whether an equation stops the gradient of its ``i``-th operand, itself or at every read inside a call."""
    kind = view_class_of(eqn)
    if kind not in (Jit, Checkpoint):
        return kind is StopGradient
    jaxpr, consts = jaxprs.body(eqn)
    return _gradient_stops(jaxpr, jaxpr.invars[len(consts) + i])


def _run_with_body(operation: Operation, body: Callable[..., Any], operands: Sequence[Any]) -> Outs:
    """Runs an equation with another body on the given operands; returns None if its kind cannot run another body."""
    run = jaxprs.runner_of(operation.eqn)
    return run and list(run(body, *operands))


def _interpret_cond(operation: Operation) -> list[Any]:
    """Interprets each branch of a cond. Sums among its operands stay in factors, and its outputs are arrays."""
    index, *operands = operation.args
    _, *facts = operation.facts  # The first facts are those about the index.
    branches = [_interpreted_body(operation, facts, i) for i in range(len(jaxprs.inner_programs(operation.eqn)))]
    return list(jaxprs.run_cond(operation.eqn, index, branches, operands))


def _interpret_shard_map(operation: Operation) -> list[Any]:
    """Interprets the body of a ``shard_map``. A sum stays in factors if the mesh can split these as it splits the sum.

    A shard is the part of an operand on one device. The indices of the steps of scans become operands of the
    ``shard_map`` too, because its body must not close over arrays on an explicit mesh.
    """
    eqn, steps = operation.eqn, operation.interpreter.steps
    in_specs = ShardMap(eqn).in_specs
    facts = [_facts_on_shard(facts, spec) for facts, spec in zip(operation.facts, in_specs, strict=True)]
    operands, specs = zip(*map(partial(_shard_input, operation), operation.args, in_specs), strict=True)

    def body_on_shard(shards: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
        """Computes the body on one shard of its operands, given the step index of each scan around it."""
        steps_on_shard = tuple(step._replace(index=index) for step, index in zip(steps, indices, strict=True))
        on_shard = replace(operation, interpreter=replace(operation.interpreter, steps=steps_on_shard))
        return _interpreted_body(on_shard, facts)(*(_sum_on_shard(x) if isinstance(x, Sum) else x for x in shards))

    indices = [step.index for step in steps]
    step_specs = [None if index is None else PartitionSpec() for index in indices]
    return list(jaxprs.run_sharded(eqn, body_on_shard, (specs, step_specs), (operands, indices)))


def _facts_on_shard(facts: Facts, spec: Any) -> Facts:
    """Returns the facts about one shard of a value, which a partition spec splits over mesh axes.

    Shards differ along these axes, so values with the same formula may differ on a shard.
    """
    axes = frozenset(_mesh_axes(spec))
    return replace(facts, mesh_axes=axes, formula=None if axes else facts.formula)


def _mesh_axes(spec: Any) -> list[str]:
    """Returns the mesh axes in a partition spec: data, x and y for ``("data", None, ("x", "y"))``."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return [name for entry in entries for name in entry]


def _shard_input(operation: Operation, x: Any, spec: Any) -> tuple[Any, Any]:
    """Returns an operand for a ``shard_map`` whose body is interpreted, and the partition spec of this operand.

    For a sum whose factors can be split, the spec is the same sum with a spec in place of each array, because
    ``shard_map`` expects specs in the structure of the operand. Any other sum becomes an array. For ``w = a @ b`` with
    the spec ("x", None), the specs are ("x", None) for ``a`` and (None, None) for ``b``.
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
    """Adapts the labels of a sum to one shard: its factors hold shards, but its labels have the sizes of whole arrays.

    Labels whose size differs from that of the arrays are replaced, and the shape is computed from the new labels.
    """

    def with_sizes_of_shards(product: Product) -> Product:
        """Replaces the labels of a product by labels of the sizes of its arrays.

        Axes that now have size 1 lose their label.
        """
        pairs = (pair for factor in product.factors for pair in zip(factor.labels, factor.array.shape, strict=True))
        renamed = product.rename_labels({label: Label(n) for label, n in dict(pairs).items() if n != label.size})
        return replace(renamed, axes=tuple(tuple(x for x in group if x.size != 1) for group in renamed.axes))

    products = tuple(map(with_sizes_of_shards, x.products))
    return replace(
        x, products=products, shape=tuple(count_entries(x.size for x in group) for group in products[0].axes)
    )


def _entries_of_labels(product: Product, spec: Any, mesh: Mapping[str, int]) -> dict[Label, Any] | None:
    """Maps each label of a product that a partition spec splits to its entry in the spec.

    For the axes ((i,), (o,)) and the spec ("x", None), the result is {i: "x"}. An axis that merges several labels is
    split along its first label. The result is None if an axis cannot be split, because it has no label or because its
    first label has a size that is not a multiple of the number of shards, is on two axes, or is on no factor.
    """
    labels = product.labels_of_axes
    # A spec may have fewer entries than there are axes. The last axes are then not split.
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
