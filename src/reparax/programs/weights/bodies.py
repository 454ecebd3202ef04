"""Programs inside programs: sums enter calls, loops, conds and shards as their factors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from reparax.programs import dependence, jaxprs
from reparax.programs.equations.bodies import Checkpoint, Cond, Jit, Scan, ShardMap
from reparax.programs.equations.elementwise import StopGradient
from reparax.programs.equations.kinds import kind_of
from reparax.programs.equations.view import View
from reparax.programs.weights.facts import Facts, combined_facts, facts_in
from reparax.programs.weights.moves import map_factors
from reparax.programs.weights.sums import Factor, Label, Product, Sum, count_entries

Outs = tuple[list[Any], list[Facts]]
Rule = Callable[[Any, JaxprEqn, Sequence[Any], Sequence[Facts]], "Outs | None"]


def rule(eqn: JaxprEqn) -> Rule | None:
    """The function that evaluates an equation with bodies, from a reader, the equation, its operands and their facts.

    The function returns None if the equation must be evaluated unchanged.
    """
    return _RULES.get(kind_of(eqn))


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


_RULES: dict[type[View], Rule] = {
    Jit: _enter_jit,
    Checkpoint: _enter_checkpoint,
    Scan: _enter_scan,
    Cond: _enter_cond,
    ShardMap: _enter_shard_map,
}
