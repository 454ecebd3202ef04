"""Follows axes through a program, and through the programs inside it."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax.axes._rules import AxisSum, Operands, Zeros, all_of, axes_of
from reparax.axes._uses import Members, Uses
from reparax.axes._values import NEVER, Axis, Labelled, Labels, Origin, Origins, Source
from reparax.programs import jaxprs
from reparax.programs.call import Arguments, check_call, is_keys
from reparax.programs.equations import Cond, Scan, ShardMap, While, view_of
from reparax.programs.sources import describe_read, lines_by_origin


@dataclass(frozen=True)
class LabelledArray:
    """An array that the user named: its path, its shape, and the labels of its axes."""

    path: str
    shape: tuple[int, ...]
    labels: tuple[int, ...]


def arguments_of(method: str, fun: Callable[..., Any], argnums: Any, args: Sequence[Any], kwargs: Any) -> Arguments:
    """The arguments of a call, of which one holds the parameters."""
    who = check_call(method, fun, argnums)
    if isinstance(argnums, tuple | list):
        raise TypeError(
            f"{who} takes the position of one argument as argnums, but got {argnums!r}. Put all parameters into one "
            f"argument, such as a tuple of trees."
        )
    if not args:
        raise TypeError(f"{who} takes the arguments of the function too, the parameters first.")
    return Arguments.of(who, fun, argnums or 0, args, kwargs)


class Reading:
    """A program, read from its inputs to its outputs.

    Attributes:
      labels: The labels of all axes.
      members: Which outputs of products index the members of an ensemble.
      uses: How weights are used.
      sums: Which equations sum along an axis.
      parameters: The arrays that the user named, by their number among all arrays.
      steps: Axes of parameters that a scan slices.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Reads the program of a call."""
        traced = arguments.trace()
        self.labels = Labels()
        self.sums = list[AxisSum]()
        self.members = Members(self.labels)
        self.uses = Uses(self.members)
        self.parameters: dict[int, LabelledArray] = {}
        self.steps = frozenset[Origin]()
        self._mixed: dict[Origin, list[Labelled]] = {}
        self._across: list[tuple[list[Origins], list[Labelled]]] = []
        self._lines = lines_by_origin(traced.program)
        n_constants = len(traced.inputs) - len(arguments.places)
        triples = list(zip(arguments.arrays, arguments.paths, arguments.is_chosen, strict=True))
        # Without any data but keys among the arguments, they are closed over.
        no_data = all(is_keys(x) for x, _, is_parameter in triples if not is_parameter)
        kind = Source.DATA if no_data else Source.CONSTANT
        constants = [self._fixed_value(x.shape, "an axis of a constant", kind) for x in traced.inputs[:n_constants]]
        values = [self._argument(i, x, path, is_parameter=chosen) for i, (x, path, chosen) in enumerate(triples)]
        for value in self._read_program(traced.program, constants + values):
            for axis in value.axes:
                self.labels.freeze(axis.label, "an axis of the result")
        self._share_axes_of_steps()

    def _argument(self, number: int, x: Any, path: str, *, is_parameter: bool) -> Labelled:
        """The value of an argument; the axes of a parameter get labels of their own."""
        name = path.partition("/")[2]
        if not is_parameter:  # noise on weights is no data
            kind = Source.CONSTANT if is_keys(x) else Source.DATA
            return self._fixed_value(x.shape, f"an axis of {path!r}, which is data", kind)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            why = f"an axis of {name!r}, which has no floating numbers"
            return self._fixed_value(x.shape, why, Source.CONSTANT)
        labels = tuple(self.labels.new() for _ in x.shape)
        self.parameters[number] = LabelledArray(name, x.shape, labels)
        self.members.add_parameter({(number, k): label for k, label in enumerate(labels)})
        axes = tuple(Axis(label, frozenset([(number, k)])) for k, label in enumerate(labels))
        return Labelled(axes, Source.WEIGHT, vanishing=tuple(frozenset([axis.of]) for axis in axes))

    def _share_axes_of_steps(self) -> None:
        """Gives one order to arrays of several steps that meet, or change their places, outside of the scan."""
        for origin in self.steps:
            for value in self._mixed.get(origin, ()):
                self._share_axes(value)
        for places, values in self._across:
            if _are_several(self.steps & of for of in places):
                for value in values:
                    self._share_axes(value)

    def _fixed_value(self, shape: Sequence[int], why: str, kind: Source) -> Labelled:
        """A value of which no axis can be permuted, and why."""
        return Labelled(tuple(Axis(self.labels.new(why)) for _ in shape), kind)

    def _read_program(self, program: Jaxpr, inputs: Sequence[Labelled]) -> list[Labelled]:
        """The outputs of a program for these inputs, equation by equation."""
        env: dict[Any, Labelled] = dict(zip(program.invars, inputs, strict=True))

        def value(v: Any) -> Labelled:
            if not isinstance(v, Literal):
                return env[v]
            fixed = self._fixed_value(jaxprs.type_of(v).shape, "an axis of a constant", Source.CONSTANT)
            return replace(fixed, is_zero=bool(v.val == 0))

        for eqn in program.eqns:
            env |= zip(eqn.outvars, self._read_equation(eqn, list(map(value, eqn.invars))), strict=True)
        return list(map(value, program.outvars))

    def _read_equation(self, eqn: JaxprEqn, operands: list[Labelled]) -> Sequence[Labelled]:
        """The outputs of an equation; what it says of uses and sums is added."""
        view = view_of(eqn)
        if isinstance(view, Scan):
            return self._read_scan(eqn, operands)
        if isinstance(view, While):
            return self._read_while(view, operands)
        if isinstance(view, Cond):
            branches = [self._read_body(each, operands[1:]) for each in jaxprs.bodies(eqn)]
            return [self._join(outs, operands[0].kind) for outs in zip(*branches, strict=True)]
        if isinstance(view, ShardMap):
            return self._read_shard_map(view, operands)
        if jaxprs.is_call(eqn):
            return self._read_body(jaxprs.body(eqn), operands)
        line = describe_read(eqn, "reads it", self._lines)
        axes = axes_of(view, Operands(self.labels, view, operands, line))
        zeros = Zeros(self.labels, view, operands)
        outs = list(map(zeros.with_zeros, itertools.count(), self.uses.outputs(view, operands, axes, line)))
        self.sums += zeros.sums(outs, line)
        for out in outs if len(operands) > 1 else ():
            places = [axis.of for axis in out.axes if axis.in_place and axis.of]
            if len(places) > 1:
                self._across.append((places, [*operands, out]))
        kept = _axes_in_place(outs)
        for value in operands:
            for origin in _axes_in_place([value]) - kept:
                self._mixed.setdefault(origin, []).append(value)
        return outs

    def _share_axes(self, value: Labelled) -> None:
        """Says that the axes of a value are the same in all steps of a scan."""
        for axis in value.axes:
            self.labels.share(axis.label)

    def _read_body(self, body: tuple[Jaxpr, list[Any]], operands: Sequence[Labelled]) -> list[Labelled]:
        """Reads the program of an equation. ``_read_loop`` may do so again, and takes back ``uses`` and ``sums``."""
        program, consts = body
        fixed = [self._fixed_value(x.shape, "an axis of a constant", Source.CONSTANT) for x in consts]
        return self._read_program(program, [*fixed, *operands])

    def _read_shard_map(self, view: ShardMap, operands: Sequence[Labelled]) -> Sequence[Labelled]:
        """What a body for each shard gives: an axis of which a shard has a part has the order of the shards."""
        eqn = view.eqn
        program, consts = jaxprs.body(eqn)
        why = describe_read(eqn, "lays it over devices", self._lines)

        ordered = Operands(self.labels, view, operands, why).ordered

        def parts(values: Sequence[Labelled], old: Sequence[Any], new: Sequence[Any]) -> list[Labelled]:
            found = list[Labelled]()
            for value, v, x in zip(values, old, new, strict=True):
                sizes = zip(value.axes, jaxprs.type_of(v).shape, jaxprs.type_of(x).shape, strict=True)
                found.append(replace(value, axes=tuple(a if n == m else ordered(a) for a, n, m in sizes)))
            return found

        inputs = parts(operands, eqn.invars, program.invars[len(consts) :])
        return parts(self._read_body((program, consts), inputs), program.outvars, eqn.outvars)

    def _join(self, values: Sequence[Labelled], kind: Source = Source.CONSTANT) -> Labelled:
        """The value that is one of several; ``kind`` is that of what chooses."""
        worst = max(kind, *(value.kind for value in values))
        axes = list[Axis]()
        for axis_group in zip(*(value.axes for value in values), strict=True):
            for axis in axis_group[1:]:
                self.labels.same(axis_group[0].label, axis.label)
            axes.append(Axis.joined(axis_group) if worst is Source.WEIGHT else Axis(axis_group[0].label))
        zero = tuple(all_of(value.vanishes(i) for value in values) for i in range(len(axes)))
        made = Origins().union(*(value.made for value in values))
        mixed = Origins().union(*(value.mixed for value in values))
        stacked = Origins().union(*(value.stacked for value in values))
        joined = Labelled(tuple(axes), worst, vanishing=zero, made=made, mixed=mixed)
        if worst is not Source.WEIGHT:
            return joined
        return replace(joined, stacked=stacked, if_rows=frozenset().union(*(value.if_rows for value in values)))

    def _read_loop(
        self,
        body: tuple[Jaxpr, list[Any]],
        consts: Sequence[Labelled],
        carry: Sequence[Labelled],
        steps: Sequence[Labelled],
    ) -> tuple[list[Labelled], list[Labelled]]:
        """What is carried and what else comes out of a body, for the kind of values that it carries in the end."""
        n_uses, n_sums = len(self.uses), len(self.sums)
        carry = [replace(value, vanishing=(), is_zero=False, equal=()) for value in carry]
        while True:
            outs = self._read_body(body, [*consts, *carry, *steps])
            new = [self._join(pair) for pair in zip(carry, outs, strict=False)]
            if list(map(_known_of, new)) == list(map(_known_of, carry)):
                return new, outs[len(carry) :]
            carry = new
            del self.uses[n_uses:]
            del self.sums[n_sums:]

    def _read_scan(self, eqn: JaxprEqn, operands: Sequence[Labelled]) -> list[Labelled]:
        """What a scan carries in the end, and the stacks of what its body gives at each step."""
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        why = describe_read(eqn, "takes it in steps", self._lines)
        steps = list[Labelled]()
        for value in operands[n_consts + n_carry :]:
            along, *axes = value.axes
            self.labels.freeze(along.label, why)
            self.labels.same(operands[n_consts + n_carry].axes[0].label, along.label)
            self.steps |= along.of
            zero = tuple(value.vanishes(i + 1) for i in range(len(axes)))
            step = replace(value, axes=tuple(axes), stacked=value.stacked | along.of, vanishing=zero, is_zero=False)
            steps.append(replace(step, equal=value.equal[1:]))
        carry, stacks = self._read_loop(jaxprs.body(eqn), consts, carry, steps)
        for value in (*consts, *carry, *stacks):
            self._share_axes(value)

        def stack(value: Labelled) -> Labelled:
            zero = (NEVER, *(value.vanishes(i) for i in range(len(value.axes))))
            equal = (False, *value.equal) if value.equal else ()
            return replace(value, axes=(Axis(self.labels.new(why)), *value.axes), vanishing=zero, equal=equal)

        return [*carry, *map(stack, stacks)]

    def _read_while(self, view: While, operands: Sequence[Labelled]) -> list[Labelled]:
        """What a loop carries in the end; its condition is read for what it says of axes."""
        of_condition, of_body = view.counts
        condition, body = jaxprs.bodies(view.eqn)
        consts = operands[of_condition : of_condition + of_body]
        carry = operands[of_condition + of_body :]
        carry, _ = self._read_loop(body, consts, carry, [])
        self._read_body(condition, [*operands[:of_condition], *carry])
        return carry


def _axes_in_place(values: Sequence[Labelled]) -> frozenset[Origin]:
    """The axes of parameters of which values have all indices in their places."""
    axes = (axis for value in values for axis in value.axes if axis.in_place)
    return frozenset[Origin]().union(*(axis.of for axis in axes))


def _are_several(places: Iterable[Origins]) -> bool:
    """Whether entries of a value are of several steps: those of arrays in one step are along the same axes."""
    steps = [of for of in places if of]
    owners = {frozenset(owner for owner, _ in of) for of in steps}
    return len(owners) > 1 or sum(map(len, steps)) > len(frozenset().union(*steps))


def _known_of(value: Labelled) -> tuple[object, ...]:
    """What is known of a value beside the labels of its axes."""
    axes = [(axis.of, axis.in_place) for axis in value.axes]
    return value.kind, value.stacked, value.made, value.mixed, value.if_rows, axes
