"""Evaluates a program; weights stay sums of products wherever the equations that read them are linear."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.sharding import PartitionSpec

from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import (
    NUMBER,
    Facts,
    combined_facts,
    facts_in,
    facts_of_equation,
    facts_of_outputs,
    is_apply,
)
from reparax.programs.equations import Checkpoint, Cond, Jit, Scan, ShardMap, StopGradient, View, kind_of
from reparax.programs.jaxprs import type_of
from reparax.programs.rules import map_factors, move_sum
from reparax.programs.sums import Factor, Label, Product, Sum, count_entries

_stand_in = Primitive("reparax_stand_in")
_stand_in.def_abstract_eval(lambda *, type: type)


def stand_in(v: Any) -> Any:
    """A value of the type of a variable, in a program that is traced and never run."""
    return _stand_in.bind(type=type_of(v))


Outs = tuple[list[Any], list[Facts]]
BodyRule = Callable[[Any, JaxprEqn, Sequence[Any], Sequence[Facts]], "Outs | None"]


def body_rule(eqn: JaxprEqn) -> BodyRule | None:
    """The function that evaluates an equation with bodies, from a reader, the equation, its operands and their facts.

    The function returns None if the equation must be evaluated unchanged.
    """
    return _BODIES.get(kind_of(eqn))


def _enter_jit(reader: Any, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Outs | None:
    """Reads the body in place. With shardings, under ``jit`` again; None if a sum would enter it."""
    jaxpr, consts = jaxprs.body(eqn)
    inner_reader = reader.inside(eqn)
    if not jaxprs.has_sharding(eqn):
        return inner_reader.run(jaxpr, [*consts, *args], facts_in(consts, facts))
    if any(isinstance(x, Sum) for x in args):
        return None
    return _run_with_body(
        reader, eqn, lambda *args: inner_reader.arrays(jaxpr, [*consts, *args], facts_in(consts, facts)), args, facts
    )


def _enter_checkpoint(reader: Any, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Outs:
    """Reads the body under ``jax.checkpoint`` again; if nothing is computed, in place."""
    jaxpr, consts = jaxprs.body(eqn)
    inner_reader, body_facts = reader.inside(eqn), facts_in(consts, facts)
    if not reader.computes:
        return inner_reader.run(jaxpr, [*consts, *args], body_facts)
    facts_of_runs: list[Sequence[Facts]] = []

    def body(*args: Any) -> list[Any]:
        outs, out_facts = inner_reader.run(jaxpr, [*consts, *args], body_facts)
        facts_of_runs.append(out_facts)
        return outs

    view = Checkpoint(eqn)

    def run_checkpoint(body: Callable[..., Any], state: Any) -> Any:
        return jax.checkpoint(body, policy=view.policy, prevent_cse=view.prevent_cse)(state, *args)

    outs = reader.threaded(run_checkpoint, body)
    return outs, list(facts_of_runs[-1])


def _enter_scan(reader: Any, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Outs | None:
    """Reads the body of a scan, which sums enter: constant ones as they are, others in slices, or formed."""
    n_consts, n_carry = jaxprs.scan_counts(eqn)
    jaxpr, consts = jaxprs.body(eqn)
    steady = dependence.steady_inputs(eqn, [fact.known for fact in facts])
    body_facts = [replace(fact, known=flag) for fact, flag in zip(facts, steady, strict=True)]
    for i, v in enumerate(jaxpr.invars[len(consts) :][: n_consts + n_carry]):
        if i >= n_consts:  # a later step may carry what differs
            body_facts[i] = replace(body_facts[i], differs=jaxprs.varying_axes([v.aval]))
    inner_reader = reader.inside(eqn, times=count_entries([Scan(eqn).length]))
    operands, shells = list(args), list[Any](args)
    for i, (x, v) in enumerate(zip(args, jaxpr.invars[len(consts) :], strict=True)):
        if not isinstance(x, Sum) and i >= n_consts + n_carry and _gradient_stops(jaxpr, v):
            operands[i], body_facts[i] = jax.lax.stop_gradient(x), replace(body_facts[i], still=True)
        if isinstance(x, Sum) and i >= n_consts:
            parts = _unstack(x) if i >= n_consts + n_carry else None
            operands[i], shells[i] = (reader.array(x, eqn), None) if parts is None else parts

    def body(*values: Any) -> list[Any]:
        pairs = zip(shells, values, strict=True)
        inputs = [_fill_factors(shell, x) if isinstance(x, list) else x for shell, x in pairs]
        return inner_reader.arrays(jaxpr, [*consts, *inputs], facts_in(consts, body_facts))

    return _run_with_body(reader, eqn, body, operands, facts)


def _gradient_stops(jaxpr: Jaxpr, v: Any) -> bool:
    """Whether gradients stop at every read of an input.

    Then they may stop before a scan that slices it. The derivative of the scan reads the slices again, while what the
    body computes from them, even by stopping gradients, is stored for each step.
    """
    reads = [(eqn, i) for eqn in jaxpr.eqns for i, operand in enumerate(eqn.invars) if operand is v]
    return v not in jaxpr.outvars and bool(reads) and all(_stops_gradient(eqn, i) for eqn, i in reads)


def _stops_gradient(eqn: JaxprEqn, i: int) -> bool:
    """Whether gradients stop at an operand of an equation, or wherever its body reads that."""
    kind = kind_of(eqn)
    if kind not in (Jit, Checkpoint):
        return kind is StopGradient
    jaxpr, consts = jaxprs.body(eqn)
    return _gradient_stops(jaxpr, jaxpr.invars[len(consts) + i])


def operands_passed_on(eqn: JaxprEqn, facts: Sequence[Facts]) -> dict[Any, Any] | None:
    """For each output of an equation the operand that it passes on unchanged; None if it does more."""
    kind = kind_of(eqn)
    if kind is StopGradient and facts[0].still:
        return {eqn.outvars[0]: eqn.invars[0]}
    if kind is not Jit or jaxprs.has_sharding(eqn):
        return None
    jaxpr, consts = jaxprs.body(eqn)
    if jaxpr.eqns or consts:
        return None
    outside: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    return {v: outside.get(inside, inside) for v, inside in zip(eqn.outvars, jaxpr.outvars, strict=True)}


def _run_with_body(
    reader: Any, eqn: JaxprEqn, body: Callable[..., Any], operands: Sequence[Any], facts: Sequence[Facts]
) -> Outs | None:
    """The outputs of the equation with another body, and facts about them."""
    run = jaxprs.runner_with_state(eqn)
    if run is None:
        return None
    outs = list(reader.threaded(lambda body, state: run(body, state, operands), body))
    return outs, [combined_facts(facts) for _ in outs]


def _arrays_of_factors(x: Sum) -> list[Any]:
    """The arrays of all factors."""
    return [factor.dense for product in x.products for factor in product.factors]


def _fill_factors(shell: Sum, arrays: Sequence[Any]) -> Sum:
    """The sum with these arrays in the factors that have none."""
    arrays_left = iter(arrays)

    def fill(factor: Factor) -> Factor:
        return replace(factor, array=next(arrays_left)) if factor.array is None else factor

    return map_factors(shell, fill)


def _unstack(x: Sum) -> tuple[list[Any], Sum] | None:
    """The arrays that vary along the first axis of a sum, with this axis first, and the sum without them and the axis.

    None if the first axis is merged or belongs to a diagonal.
    """
    arrays: list[Any] = []
    products: list[Product] = []
    for product in x.products:
        (group, *other_axes), factors = product.axes, list(product.factors)
        if not group:  # an axis of one index has no label
            arrays += [factor.dense[None] for factor in factors]
            products.append(Product(tuple(replace(factor, array=None) for factor in factors), tuple(other_axes)))
            continue
        if len(group) != 1 or any(group[0] in label_left for label_left in other_axes):
            return None
        (label,) = group
        for i, factor in enumerate(factors):
            if label in factor.labels:
                arrays.append(jnp.moveaxis(factor.dense, factor.labels.index(label), 0))
                labels = tuple(label_left for label_left in factor.labels if label_left is not label)
                factors[i] = replace(factor, array=None, labels=labels)
        products.append(Product(tuple(factors), tuple(other_axes)))
    return arrays, replace(x, products=tuple(products), shape=x.shape[1:])


def _enter_cond(reader: Any, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Outs:
    """Reads each branch of a cond, which sums enter as they are."""
    index, *operands = args

    def branch(place: int, jaxpr: Jaxpr, consts: Sequence[Any]) -> Callable[..., list[Any]]:
        inner_reader = reader.inside(eqn, place)
        return lambda *operands: inner_reader.arrays(jaxpr, [*consts, *operands], facts_in(consts, facts[1:]))

    branches = [branch(place, *body) for place, body in enumerate(jaxprs.bodies(eqn))]

    def run_cond(*bodies: Any, state: Any) -> Any:
        return jaxprs.run_cond(eqn, index, bodies, [state, *operands])

    outs = list(reader.threaded(run_cond, *branches))
    return outs, [combined_facts(facts) for _ in outs]


def _enter_shard_map(reader: Any, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Outs:
    """Reads the body on each shard, which sums enter as parts of their factors, or formed."""
    jaxpr, consts = jaxprs.body(eqn)
    view = ShardMap(eqn)
    operands, specs = list(args), list(view.in_specs)
    local = [replace(fact, differs=frozenset(_mesh_axes(spec))) for fact, spec in zip(facts, specs, strict=True)]
    for i, x in enumerate(args):
        if isinstance(x, Sum):
            factor_specs = _specs_of_factors(x, specs[i], view.mesh_shape)
            operands[i], specs[i] = (
                (reader.array(x, eqn), specs[i]) if factor_specs is None else (_arrays_of_factors(x), factor_specs)
            )

    def body(*values: Any) -> list[Any]:
        inputs = [_sum_on_shard(args[i], x, specs[i]) if isinstance(x, list) else x for i, x in enumerate(values)]
        return reader.inside(eqn).arrays(jaxpr, [*consts, *inputs], facts_in(consts, local))

    outs = list(reader.threaded(lambda body, state: jaxprs.run_sharded(eqn, body, specs, state, operands), body))
    return outs, [combined_facts(facts) for _ in outs]


def _mesh_axes(spec: Any) -> list[str]:
    """The mesh axes of a partition spec."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return [name for entry in entries for name in entry]


def _specs_of_factors(x: Sum, spec: Any, mesh: Mapping[str, int]) -> list[Any] | None:
    """The partition spec of each factor's array, for a sum with ``spec``; None if there is none."""
    specs: list[Any] = []
    for product in x.products:
        places: dict[Label, Any] = {}
        labels = [label for group in product.axes for label in group]
        for group, entry in zip(product.axes, spec, strict=False):
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            n = math.prod(mesh[name] for name in names)
            if not names:
                continue
            if not group or group[0].size % n or labels.count(group[0]) > 1 or group[0] not in product.labels:
                return None
            places[group[0]] = entry
        specs += [PartitionSpec(*(places.get(label) for label in factor.labels)) for factor in product.factors]
    return specs


def _sum_on_shard(x: Sum, arrays: Sequence[Any], specs: Sequence[Any]) -> Sum:
    """The sum on one shard, from the factors' parts on this shard."""
    parts = iter(zip(arrays, specs, strict=True))
    products: list[Product] = []
    for product in x.products:
        shard_labels: dict[Label, Label] = {}
        factors: list[Factor] = []
        for factor in product.factors:
            array, spec = next(parts)
            for label, n, names in zip(factor.labels, array.shape, spec, strict=True):
                shard_labels.setdefault(label, label if names is None else Label(n))
            labels = [shard_labels[label] for label in factor.labels]
            factors.append(replace(factor, array=array, labels=tuple(labels)))
        groups = [[shard_labels.get(label, label) for label in group] for group in product.axes]
        axes = tuple(tuple(label for label in group if label.size != 1) for group in groups)
        products.append(Product(tuple(factors), axes))
    shape = tuple(math.prod(label.size for label in group) for group in products[0].axes)
    return replace(x, products=tuple(products), shape=shape)


_BODIES: dict[type[View], BodyRule] = {
    Jit: _enter_jit,
    Checkpoint: _enter_checkpoint,
    Scan: _enter_scan,
    Cond: _enter_cond,
    ShardMap: _enter_shard_map,
}


# Equations of other kinds pass nothing on unchanged, and what is known of one output holds for all.
_ASKED = {Jit, Checkpoint, StopGradient}


class Answer(enum.Enum):
    """What a way says of an equation in place of outputs; None says that the equation is not its own."""

    UNCHANGED = "its own, and evaluated unchanged"


class Way(Protocol):
    """What a reader does with weights: where they start, and what happens where they are read.

    For each equation, with what is known of its outputs, the reader asks ``take_instead``; then, if it holds no program
    and moves no weight, ``start`` and ``multiply``; and ``form`` for each weight that is needed as an array.

    Attributes:
      state: Arrays that go through the program, into the bodies of loops too, and change on the way.
    """

    state: list[Any]

    def may_start(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Whether weights may start in an equation that reads none."""
        ...

    def take_instead(
        self,
        reader: "Reader",
        eqn: JaxprEqn,
        args: Sequence[Any],
        facts: Sequence[Facts],
        out_facts: Facts,
        *,
        only_first_read: bool,
    ) -> Outs | Answer | None:
        """The outputs of an equation that this way takes before its bodies are opened or its weights moved.

        ``only_first_read`` says whether only the first output is read.
        """
        ...

    def start(
        self, reader: "Reader", eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Outs | Answer | None:
        """The outputs of an equation that makes a weight."""
        ...

    def multiply(
        self, reader: "Reader", eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Any:
        """The array of a product with a weight; None if the equation is no such product."""
        ...

    def form(self, reader: "Reader", x: Sum, eqn: JaxprEqn | None) -> Any:
        """The array of a weight, for an equation that needs it; None for the result of a program."""
        ...


@dataclass(frozen=True)
class Reader:
    """How programs are evaluated.

    Attributes:
      way: What happens to weights.
      times: How often the program runs.
      path: The equations whose bodies contain the program.
      in_formula: Whether one of these is the ``apply`` of a parametrization.
      computes: Whether it computes what reads no weight; where only the way is asked, types will do.
    """

    way: Way
    times: int = 1
    path: tuple[int, ...] = ()
    in_formula: bool = False
    computes: bool = True

    def run(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> Outs:
        """The outputs, arrays or sums, and facts about them."""
        return _Run(self, jaxpr, args, facts).outs()

    def arrays(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """The outputs as arrays."""
        return [self.array(x, None) for x in self.run(jaxpr, args, facts)[0]]

    def array(self, x: Any, eqn: JaxprEqn | None) -> Any:
        """``x`` as an array."""
        return self.way.form(self, x, eqn) if isinstance(x, Sum) else x

    def inside(self, eqn: JaxprEqn, *place: int, times: int = 1) -> "Reader":
        """The reader for a body of an equation, which runs several times."""
        in_formula = self.in_formula or is_apply(eqn)
        return replace(self, times=self.times * times, path=(*self.path, id(eqn), *place), in_formula=in_formula)

    def threaded(self, run: Callable[..., Any], *bodies: Callable[..., Any]) -> Any:
        """What ``run`` makes of bodies that take the state too, and return it after their outputs."""
        way = self.way

        def with_state(body: Callable[..., Any]) -> Callable[..., Any]:
            def body_with_state(state: list[Any], *args: Any) -> tuple[Any, list[Any]]:
                way.state = list(state)
                outs = body(*args)
                return outs, way.state

            return body_with_state

        outs, way.state = run(*map(with_state, bodies), state=way.state)
        return outs


class _Run:
    """One evaluation: the values computed so far, and how often each will still be read."""

    def __init__(self, reader: Reader, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> None:
        self._reader, self._jaxpr = reader, jaxpr
        self._env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        self._facts: dict[Any, Facts] = dict(zip(jaxpr.invars, facts, strict=True))
        self._reads = jaxprs.reads(jaxpr)
        self._waiting: list[JaxprEqn] = []
        self._formed: dict[Any, Any] = {}

    def outs(self) -> Outs:
        for eqn in self._jaxpr.eqns:
            self._read_equation(eqn)
        self._evaluate_waiting()
        return [self._value_of(v) for v in self._jaxpr.outvars], [self._facts_of(v) for v in self._jaxpr.outvars]

    def _facts_of(self, v: Any) -> Facts:
        """What is known of a variable; a literal is known, and gets no gradient."""
        return NUMBER if isinstance(v, Literal) else self._facts[v]

    def _value_of(self, v: Any) -> Any:
        """The array or sum of a variable; in its place a stand-in if nothing computed it."""
        if isinstance(v, Literal):
            return jnp.asarray(v.val)
        if v not in self._env:
            self._env[v] = stand_in(v)
        return self._env[v]

    def _read_equation(self, eqn: JaxprEqn) -> None:
        """Keeps sums of an equation in factors, or puts it with those that wait to be evaluated together."""
        facts = [self._facts_of(v) for v in eqn.invars]
        out_facts = facts_of_equation(eqn, facts)
        if self._reads_sum(eqn) or self._reader.way.may_start(eqn, facts, out_facts):
            self._evaluate_waiting()
            outs = self._keep_factors(eqn, [self._value_of(v) for v in eqn.invars], facts, out_facts)
            if outs is not None:
                self._reads.subtract(jaxprs.variables(eqn.invars))
                self._env.update(zip(eqn.outvars, outs[0], strict=True))
                self._facts.update(zip(eqn.outvars, outs[1], strict=True))
                return
        if kind_of(eqn) not in _ASKED:
            self._facts.update(dict.fromkeys(eqn.outvars, out_facts))
            self._waiting.append(eqn)
            return
        self._facts.update(zip(eqn.outvars, facts_of_outputs(eqn, facts, out_facts), strict=True))
        operand_of = operands_passed_on(eqn, facts)
        if operand_of is None:
            self._waiting.append(eqn)
            return
        self._evaluate_waiting()
        self._env |= {v: self._value_of(operand_of[v]) for v in eqn.outvars}
        self._reads.subtract(jaxprs.variables(eqn.invars))

    def _reads_sum(self, eqn: JaxprEqn) -> bool:
        """Whether an equation reads a sum."""
        return any(isinstance(self._env.get(v), Sum) for v in eqn.invars if not isinstance(v, Literal))

    def _keep_factors(
        self, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Outs | None:
        """The outputs of an equation that keeps sums in factors, and facts about them; None for other equations."""
        reader = self._reader
        only_first_read = not any(self._reads[v] for v in eqn.outvars[1:])
        answer = reader.way.take_instead(reader, eqn, args, facts, out_facts, only_first_read=only_first_read)
        if answer is not None:
            return _outs_of(answer)
        body = body_rule(eqn)
        if body is not None:
            return body(reader, eqn, args, facts)
        moved_sums = move_sum(eqn, args)
        if moved_sums is not None:
            return moved_sums, [out_facts for _ in moved_sums]
        new_weight = reader.way.start(reader, eqn, args, facts, out_facts)
        if new_weight is not None:
            return _outs_of(new_weight)
        array = reader.way.multiply(reader, eqn, args, facts, out_facts)
        return None if array is None else ([array], [out_facts])

    def _evaluate_waiting(self) -> None:
        """Evaluates the equations that wait as one program; sums that they read are formed."""
        eqns, self._waiting = self._waiting, []
        if not eqns:
            return
        for eqn in eqns:
            self._reads.subtract(jaxprs.variables(eqn.invars))
        if not self._reader.computes:
            for v in jaxprs.read_by(eqns):
                if v in self._env:
                    self._array_of(v, eqns)
            return
        outvars = [v for eqn in eqns for v in eqn.outvars if self._reads[v] > 0]
        program = jaxprs.part(self._jaxpr, eqns, outvars)
        args = [self._array_of(v, eqns) for v in program.invars]
        self._env.update(zip(outvars, jaxprs.evaluate(program, args), strict=True))

    def _array_of(self, v: Any, eqns: Sequence[JaxprEqn]) -> Any:
        """The value of a variable as an array, formed once, for the first of ``eqns`` that reads it."""
        x = self._env[v]
        if not isinstance(x, Sum):
            return x
        if v not in self._formed:
            self._formed[v] = self._reader.array(x, next(eqn for eqn in eqns if v in jaxprs.variables(eqn.invars)))
        return self._formed[v]


def _outs_of(answer: Outs | Answer) -> Outs | None:
    """The outputs that a way answers; None for an equation that is evaluated unchanged."""
    return None if isinstance(answer, Answer) else answer
