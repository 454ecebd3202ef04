"""The interpreter of programs: weights stay sums of products wherever the equations that read them are linear.

Rules say what happens to weights (``Rules``); the interpreter goes through a program and the programs in it. Sums enter
calls, loops, conds and shards as their factors.
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
from reparax.programs.dependence import NUMBER, Analysis, Facts, is_apply
from reparax.programs.equations import Checkpoint, Cond, Jit, Scan, ShardMap, StopGradient, View, view_class_of, view_of
from reparax.programs.jaxprs import type_of
from reparax.programs.rules import map_factors
from reparax.programs.sums import AxisLabels, Factor, Label, Product, Sum, all_or_none, count_entries

Outs = list[Any] | None
"""The outputs of an equation, arrays or sums; None if it must be evaluated unchanged."""

_stand_in = Primitive("reparax_stand_in")
_stand_in.def_abstract_eval(lambda *, type: type)


def stand_in(v: Any) -> Any:
    """A value of the type of a variable, in a program that is traced and never run."""
    return _stand_in.bind(type=type_of(v))


@dataclass(frozen=True)
class Operation:
    """An equation that is about to be evaluated.

    Attributes:
      interpreter: What evaluates it.
      eqn: The equation.
      args: The values of its operands, arrays and sums.
      facts: What is known of them.
      out_facts: What is known of its first output.
      only_first_read: Whether only this output is read.
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
        """What identifies a sum that this equation makes."""
        return (*self.interpreter.path, id(self.eqn))


class Rules(Protocol):
    """What happens to weights: where they start, and what becomes of them where they are read.

    Attributes:
      analysis: What is known of values.
      counts_steps: Whether it reads the number of the step in a loop.
    """

    analysis: Analysis[Facts]
    counts_steps: bool

    def may_introduce_sum(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Whether weights may start in an equation that reads none, or in its bodies."""
        ...

    def outputs(self, operation: Operation) -> Outs:
        """The outputs of an equation that reads weights, or in which they may start."""
        ...

    def form(self, interpreter: "Interpreter", x: Sum, eqn: JaxprEqn | None) -> Any:
        """The array of a weight, for an equation that needs it; None for the result of a program."""
        ...


class LoopStep(NamedTuple):
    """A step of a scan: its number, if the rules read it, and the number of steps."""

    index: Any
    length: Any


@dataclass(frozen=True)
class Interpreter:
    """How programs are evaluated.

    Attributes:
      rules: What happens to weights.
      times: How often the program runs.
      steps: The step of each scan around it, the outermost first.
      path: The equations whose bodies contain the program.
      in_formula: Whether one of these is the ``apply`` of a parametrization.
      computes: Whether it computes what reads no weight; where only the rules are asked, types will do.
    """

    rules: Rules
    times: int = 1
    steps: tuple[LoopStep, ...] = ()
    path: tuple[int, ...] = ()
    in_formula: bool = False
    computes: bool = True

    def run(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """The outputs, arrays or sums."""
        return _Evaluation(self, jaxpr, args, facts).outs()

    def arrays(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """The outputs as arrays."""
        return [self.array(x, None) for x in self.run(jaxpr, args, facts)]

    def array(self, x: Any, eqn: JaxprEqn | None) -> Any:
        """``x`` as an array."""
        return self.rules.form(self, x, eqn) if isinstance(x, Sum) else x

    def inside(self, eqn: JaxprEqn, *place: int, step: LoopStep | None = None) -> "Interpreter":
        """The interpreter of a body of an equation, which is a step of a loop if it runs several times."""
        steps = self.steps if step is None else (*self.steps, step)
        times = self.times * count_entries([each.length for each in steps[len(self.steps) :]])
        in_formula = self.in_formula or is_apply(eqn)
        return replace(self, times=times, steps=steps, path=(*self.path, id(eqn), *place), in_formula=in_formula)


class _Evaluation:
    """One evaluation: the values computed so far, and how often each will still be read."""

    def __init__(self, interpreter: Interpreter, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> None:
        self._interpreter, self._jaxpr = interpreter, jaxpr
        self._env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        self._facts: Mapping[Any, Facts] = dependence.analyse(jaxpr, facts, interpreter.rules.analysis)
        self._reads = jaxprs.count_reads(jaxpr)
        self._waiting: list[JaxprEqn] = []
        self._formed: dict[Any, Any] = {}

    def outs(self) -> list[Any]:
        """The outputs, arrays or sums."""
        for eqn in self._jaxpr.eqns:
            self._read_equation(eqn)
        self._evaluate_waiting()
        return list(map(self._value_of, self._jaxpr.outvars))

    def _value_of(self, v: Any) -> Any:
        """The array or sum of a variable; in its place a stand-in if nothing computed it."""
        if isinstance(v, Literal):
            return jnp.asarray(v.val)
        if v not in self._env:
            self._env[v] = stand_in(v)
        return self._env[v]

    def _read_equation(self, eqn: JaxprEqn) -> None:
        """Keeps sums of an equation in factors, or puts it with those that wait to be evaluated together."""
        facts = [NUMBER if isinstance(v, Literal) else self._facts[v] for v in eqn.invars]
        outs = self._keep_factors(eqn, facts)
        if outs is None:
            self._waiting.append(eqn)
            return
        self._reads.subtract(jaxprs.variables(eqn.invars))
        self._env.update(zip(eqn.outvars, outs, strict=True))

    def _keep_factors(self, eqn: JaxprEqn, facts: Sequence[Facts]) -> Outs:
        """The outputs of an equation that keeps sums in factors, or passes operands on; None for other equations."""
        outs = self._outputs_by_rules(eqn, facts)
        passed_on = _operands_passed_on(eqn, facts) if outs is None else None
        if passed_on is None:
            return outs
        self._evaluate_waiting()
        return list(map(self._value_of, passed_on))

    def _outputs_by_rules(self, eqn: JaxprEqn, facts: Sequence[Facts]) -> Outs:
        """What the rules make of an equation that reads sums, or in which weights may start; None for others."""
        rules = self._interpreter.rules
        out_facts = self._facts[eqn.outvars[0]] if eqn.outvars else NUMBER
        reads_sum = any(isinstance(self._env.get(v), Sum) for v in jaxprs.variables(eqn.invars))
        if not reads_sum and not rules.may_introduce_sum(eqn, facts, out_facts):
            return None
        self._evaluate_waiting()
        args = list(map(self._value_of, eqn.invars))
        only_first_read = not any(map(self._reads.get, eqn.outvars[1:]))
        return rules.outputs(Operation(self._interpreter, eqn, args, facts, out_facts, only_first_read))

    def _evaluate_waiting(self) -> None:
        """Evaluates the equations that wait as one program; sums that they read are formed."""
        eqns, self._waiting = self._waiting, []
        if not eqns:
            return
        for eqn in eqns:
            self._reads.subtract(jaxprs.variables(eqn.invars))
        if self._interpreter.computes:
            outvars = [v for eqn in eqns for v in eqn.outvars if self._reads[v] > 0]
            program = jaxprs.part(self._jaxpr, eqns, outvars)
            args = [self._array_of(v, eqns) for v in program.invars]
            self._env.update(zip(outvars, jaxprs.evaluate(program, args), strict=True))
        else:  # the rules are asked to form the sums all the same
            for v in jaxprs.variables_read(eqns):
                if v in self._env:
                    self._array_of(v, eqns)

    def _array_of(self, v: Any, eqns: Sequence[JaxprEqn]) -> Any:
        """The value of a variable as an array, formed once, for the first of ``eqns`` that reads it."""
        x = self._env[v]
        if not isinstance(x, Sum):
            return x
        if v not in self._formed:
            self._formed[v] = self._interpreter.array(x, next(e for e in eqns if v in jaxprs.variables(e.invars)))
        return self._formed[v]


def _operands_passed_on(eqn: JaxprEqn, facts: Sequence[Facts]) -> list[Any] | None:
    """For each output of an equation the operand that it passes on unchanged; None if it does more."""
    kind = view_class_of(eqn)
    if kind is StopGradient and facts[0].fixed:
        return eqn.invars
    if kind is not Jit or jaxprs.has_sharding(eqn):
        return None
    jaxpr, consts = jaxprs.body(eqn)
    if jaxpr.eqns or consts:
        return None
    outside: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    return [v if isinstance(v, Literal) else outside[v] for v in jaxpr.outvars]


# ---- programs inside programs


def has_body(eqn: JaxprEqn) -> bool:
    """Whether :func:`interpret_bodies` evaluates an equation."""
    return view_class_of(eqn) in _BODIES


def interpret_bodies(operation: Operation) -> Outs:
    """The outputs of an equation with a body, which is interpreted."""
    return _BODIES[view_class_of(operation.eqn)](operation)


def _body(
    operation: Operation, facts: Sequence[Facts], *place: int, in_arrays: bool = True
) -> Callable[..., list[Any]]:
    """A function of the inputs of a body, of which facts are known, that interprets this body.

    ``place`` is the number of the body if there are several; ``in_arrays`` says whether it returns no sums.
    """
    jaxpr, consts = jaxprs.bodies(operation.eqn)[place[0] if place else 0]
    facts_of_inputs = [*(NUMBER for _ in consts), *facts]
    interpreter = operation.interpreter.inside(operation.eqn, *place)
    run = interpreter.arrays if in_arrays else interpreter.run
    return lambda *args: run(jaxpr, [*consts, *args], facts_of_inputs)


def _enter_jit(operation: Operation) -> Outs:
    """The outputs of a call: in place, or with shardings under ``jit`` again; None if a sum would enter that."""
    if not jaxprs.has_sharding(operation.eqn):
        return _body(operation, operation.facts, in_arrays=False)(*operation.args)
    if any(isinstance(x, Sum) for x in operation.args):
        return None
    return _run_with_body(operation, _body(operation, operation.facts), operation.args)


def _enter_checkpoint(operation: Operation) -> list[Any]:
    """The outputs of a body, under ``jax.checkpoint`` again; if nothing is computed, in place."""
    body = _body(operation, operation.facts, in_arrays=False)
    view = Checkpoint(operation.eqn)
    if not operation.interpreter.computes:
        return body(*operation.args)
    return jax.checkpoint(body, policy=view.policy, prevent_cse=view.prevent_cse)(*operation.args)


@dataclass(frozen=True)
class _Slices:
    """A sum that a scan slices along the first axis.

    Attributes:
      arrays: The arrays that vary along this axis, with it as the first.
      rest: The sum of one step, whose factors lack these arrays.
    """

    arrays: list[Any]
    rest: Sum

    @classmethod
    def of(cls, x: Sum) -> "_Slices | None":
        """The slices of a sum; None if the first axis is merged or belongs to a diagonal."""
        if not all(product.is_plain(0) for product in x.products):
            return None
        arrays = list[Any]()

        def without_axis(factor: Factor, axis: AxisLabels) -> Factor:
            array = _with_axis_first(factor, axis)
            if array is None:
                return factor
            arrays.append(array)
            return replace(factor, array=None, labels=tuple(label for label in factor.labels if label not in axis))

        def of_one_step(product: Product) -> Product:
            first_axis, *other_axes = product.axes
            return Product(tuple(without_axis(factor, first_axis) for factor in product.factors), tuple(other_axes))

        rest = replace(x, products=tuple(map(of_one_step, x.products)), shape=x.shape[1:])
        return cls(arrays, rest)

    def at_step(self, arrays: Sequence[Any]) -> Sum:
        """The sum of one step, from its slices of the arrays."""
        arrays_left = iter(arrays)
        return map_factors(self.rest, lambda x: replace(x, array=next(arrays_left)) if x.array is None else x)


def _with_axis_first(factor: Factor, axis: AxisLabels) -> Any:
    """The array of a factor with an axis of its product first; None if it does not vary along this axis."""
    if not axis:  # an axis of one index has no label
        return factor.dense[None]
    (label,) = axis
    return jnp.moveaxis(factor.dense, factor.labels.index(label), 0) if label in factor.labels else None


def _enter_scan(operation: Operation) -> Outs:
    """The outputs of a scan, which sums enter: constant ones as they are, carried ones formed, others in slices."""
    eqn, interpreter = operation.eqn, operation.interpreter
    (n_consts, n_carry), (jaxpr, consts) = jaxprs.scan_counts(eqn), jaxprs.body(eqn)
    length, depth = Scan(eqn).length, len(interpreter.steps)
    inputs, facts = list(operation.args), dependence.steady_inputs(eqn, operation.facts, interpreter.rules.analysis)
    for i in range(n_consts, len(inputs)):
        facts[i] = replace(facts[i], steps=facts[i].steps | {depth}, formula=None)
        if i < n_consts + n_carry:
            inputs[i] = interpreter.array(inputs[i], eqn)
        elif isinstance(inputs[i], Sum):
            inputs[i] = _Slices.of(inputs[i]) or interpreter.array(inputs[i], eqn)
        elif _gradient_stops(jaxpr, jaxpr.invars[len(consts) + i]):
            inputs[i], facts[i] = jax.lax.stop_gradient(inputs[i]), replace(facts[i], fixed=True)
    body_facts = [*(NUMBER for _ in consts), *facts]
    numbers = [jnp.arange(length)] if interpreter.rules.counts_steps else []

    def body(*values: Any) -> list[Any]:
        """One step: the values of the inputs, and then its number if that is read."""
        index = values[len(inputs)] if numbers else None
        pairs = zip(inputs, values, strict=False)
        args = [x.at_step(value) if isinstance(x, _Slices) else value for x, value in pairs]
        return interpreter.inside(eqn, step=LoopStep(index, length)).arrays(jaxpr, [*consts, *args], body_facts)

    operands = [x.arrays if isinstance(x, _Slices) else x for x in inputs]
    return _run_with_body(operation, body, [*operands, *numbers])


def _gradient_stops(jaxpr: Jaxpr, v: Any) -> bool:
    """Whether gradients stop at every read of an input.

    Then they may stop before a scan that slices it. The derivative of the scan reads the slices again, while what the
    body computes from them, even by stopping gradients, is stored for each step.
    """
    reads = [(eqn, i) for eqn in jaxpr.eqns for i, operand in enumerate(eqn.invars) if operand is v]
    return v not in jaxpr.outvars and bool(reads) and all(_stops_gradient(eqn, i) for eqn, i in reads)


def _stops_gradient(eqn: JaxprEqn, i: int) -> bool:
    """Whether gradients stop at an operand of an equation, or wherever its body reads that."""
    kind = view_class_of(eqn)
    if kind not in (Jit, Checkpoint):
        return kind is StopGradient
    jaxpr, consts = jaxprs.body(eqn)
    return _gradient_stops(jaxpr, jaxpr.invars[len(consts) + i])


def _run_with_body(operation: Operation, body: Callable[..., Any], operands: Sequence[Any]) -> Outs:
    """The outputs of the equation with another body."""
    run = jaxprs.runner_of(operation.eqn)
    return run and list(run(body, *operands))


def _enter_cond(operation: Operation) -> list[Any]:
    """The outputs of a cond, whose branches sums enter as they are."""
    index, *operands = operation.args
    bodies = [_body(operation, operation.facts[1:], i) for i in range(len(jaxprs.inner_programs(operation.eqn)))]
    return list(jaxprs.run_cond(operation.eqn, index, bodies, operands))


def _enter_shard_map(operation: Operation) -> list[Any]:
    """The outputs of a body on each shard: a sum enters as its factors, if their shards are known, else as an array.

    What the body reads enters as an operand, because it may close over nothing that lies on an explicit mesh.
    """
    eqn, steps = operation.eqn, operation.interpreter.steps
    in_specs = ShardMap(eqn).in_specs
    facts = [_facts_on_shard(facts, spec) for facts, spec in zip(operation.facts, in_specs, strict=True)]
    operands, specs = zip(*map(partial(_shard_input, operation), operation.args, in_specs), strict=True)

    def body_on_shard(shards: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
        """The body on what is read on this shard, in this step of the loops around it."""
        own_steps = tuple(step._replace(index=index) for step, index in zip(steps, indices, strict=True))
        own = replace(operation, interpreter=replace(operation.interpreter, steps=own_steps))
        return _body(own, facts)(*(_sum_on_shard(x) if isinstance(x, Sum) else x for x in shards))

    indices = [step.index for step in steps]
    step_specs = [None if index is None else PartitionSpec() for index in indices]
    return list(jaxprs.run_sharded(eqn, body_on_shard, (specs, step_specs), (operands, indices)))


def _facts_on_shard(facts: Facts, spec: Any) -> Facts:
    """What is known on each shard of a value with a partition spec."""
    axes = frozenset(_mesh_axes(spec))
    return replace(facts, differs=axes, formula=None if axes else facts.formula)


def _mesh_axes(spec: Any) -> list[str]:
    """The mesh axes of the entries of a partition spec."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return [name for entry in entries for name in entry]


def _shard_input(operation: Operation, x: Any, spec: Any) -> tuple[Any, Any]:
    """What enters a shard for an operand, and its partition spec; of a sum its factors, if these can be split."""
    if not isinstance(x, Sum):
        return x, spec
    mesh = ShardMap(operation.eqn).mesh_shape
    entries = all_or_none(_entries_of_labels(product, spec, mesh) for product in x.products)
    if entries is None:
        return operation.interpreter.array(x, operation.eqn), spec
    entry_of_label = {label: entry for each in entries for label, entry in each.items()}

    def spec_of(factor: Factor) -> Factor:
        draw = factor.draw and replace(factor.draw, key=PartitionSpec())
        return replace(factor, array=PartitionSpec(*map(entry_of_label.get, factor.labels)), draw=draw)

    return map_factors(x, lambda factor: replace(factor, array=factor.dense)), map_factors(x, spec_of)


def _sum_on_shard(x: Sum) -> Sum:
    """The sum of the parts of its factors on one shard, where labels that are split are shorter."""

    def shorter(product: Product) -> Product:
        pairs = (pair for factor in product.factors for pair in zip(factor.labels, factor.array.shape, strict=True))
        renamed = product.rename_labels({label: Label(n) for label, n in dict(pairs).items() if n != label.size})
        return replace(renamed, axes=tuple(tuple(x for x in group if x.size != 1) for group in renamed.axes))

    products = tuple(map(shorter, x.products))
    return replace(
        x, products=products, shape=tuple(count_entries(x.size for x in group) for group in products[0].axes)
    )


def _entries_of_labels(product: Product, spec: Any, mesh: Mapping[str, int]) -> dict[Label, Any] | None:
    """The entry of a partition spec for each label that it splits; None if it cannot split one of them."""
    labels = product.labels_of_axes
    split_axes = [(group, entry) for group, entry in zip(product.axes, spec, strict=False) if _mesh_axes([entry])]
    for group, entry in split_axes:
        n = math.prod(mesh[name] for name in _mesh_axes([entry]))
        if not group or group[0].size % n or labels.count(group[0]) > 1 or group[0] not in product.labels:
            return None
    return {group[0]: entry for group, entry in split_axes}


_BODIES: dict[type[View], Callable[[Operation], Outs]] = {
    Jit: _enter_jit,
    Checkpoint: _enter_checkpoint,
    Scan: _enter_scan,
    Cond: _enter_cond,
    ShardMap: _enter_shard_map,
}
