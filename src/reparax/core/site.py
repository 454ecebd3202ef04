"""Defines sites. A site is one stage together with one array, or with a group of arrays that it computes together.

A *place* is the key path of an array, a tuple of names such as ``("dense", "kernel")``. The formulas of a stage do not
see key paths: they use a name such as ``"w"`` for each array, and a name such as ``"g"`` or ``"v"`` for each raw value.
A site maps these names to key paths. In a raw tree, the raw values of an array are in a marker dict, at the key path
``(*place, "@kind")``. :class:`WeightNorm` at ``("dense", "kernel")``, for example, has the site

    arrays = {"w": ("dense", "kernel")}
    values = {"w": {"g": ("dense", "kernel", "@weight_norm", "g"), "v": ("dense", "kernel", "@weight_norm", "v")}}
    nodes = {"w": ("dense", "kernel", "@weight_norm")}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from reparax.core.calls import CallName
from reparax.core.paths import Names
from reparax.core.raw import FIXED, Leaf, Swap, is_fixed_value
from reparax.core.values import RawValues, value_of

Stages = Sequence[Any]
Arrays = Mapping[Names, Any]
"""A dict from key paths to arrays or their types."""


@dataclass(frozen=True, eq=False)
class Site:
    """One stage together with one array, or with a group of arrays that the stage computes together.

    Attributes:
      stage: The stage, with its numbers and axes for these arrays.
      who: The call that errors name.
      arrays: Maps the name of each effective array in the formulas, such as ``"w"``, to its key path.
      values: Maps the name of each array to a dict from the names of its raw values to their key paths. If the stage
        has no raw values, the only value is the array itself.
      nodes: Maps the name of each array to the key path of its marker dict; empty if the stage has no markers.
      draw_path: The path that is hashed into the random key; None for stages that join arrays, which draw nothing.
      draw_number: The position of the stage among the stages of its kind that act on the array. A plan counts from 1.
      reads: Maps names to key paths of other arrays, which the formulas read but do not change.
      copies: Maps the path of each array without raw values of its own, such as a tied one, to the paths at which its
        values are stored.
      formula: The formula of the stage at this site, if the sites of the stage have different formulas.
      types: The types of the effective arrays by name, if they are known without tracing the formula.
      call: A function that calls the formulas, so that sites with arrays of equal types are traced once.
    """

    stage: Any
    who: CallName
    arrays: Mapping[str, Names]
    values: Mapping[str, Mapping[str, Names]]
    nodes: Mapping[str, Names] = field(default_factory=dict[str, Names])
    draw_path: str | None = None
    draw_number: int = 0
    reads: Mapping[str, Names] = field(default_factory=dict[str, Names])
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    formula: Any = None
    types: Mapping[str, Any] | None = None
    call: Any = None

    @property
    def places_read(self) -> list[Names]:
        """The key paths of all arrays that the formulas read."""
        return [*(place for places in self.values.values() for place in places.values()), *self.reads.values()]

    def read(self, arrays: Arrays) -> RawValues:
        """Returns the inputs of the formulas, by array and raw value: ``{"w": {"g": ..., "v": ...}, "b": {"": ...}}``.

        An array that the formulas read but do not change, as ``"b"`` here, has no raw values. The array itself is then
        stored under the name ``""``. No gradient flows through fixed values.
        """
        raw_values = {
            name: {value: read_value(arrays, place) for value, place in places.items()}
            for name, places in self.values.items()
        }
        return raw_values | {name: {"": read_value(arrays, place)} for name, place in self.reads.items()}

    @property
    def free_values(self) -> dict[str, Names]:
        """Maps the name of each raw value that the stage does not declare as fixed to its key path.

        If several arrays of the group have a value of the same name, the dict has only that of the last array.
        """
        pairs = [pair for places in self.values.values() for pair in places.items()]
        return {name: place for name, place in pairs if not value_of(self.stage.raw_values, name).fixed}

    def swaps(self, effective: Mapping[str, Any]) -> list[Swap]:
        """Returns a :data:`Swap` for each array, which replaces its raw values in a tree with its effective array.

        ``effective`` holds the effective arrays by name. For an array without raw values of its own, such as a tied
        one, the empty marker dict is replaced.
        """
        return [
            (list(self.values[name].values()) or [self.nodes[name]], {place: effective[name]})
            for name, place in self.arrays.items()
        ]

    def place_values(self, array_name: str, values: Mapping[str, Any]) -> dict[Names, Any]:
        """Returns a dict from key path to raw value, for the raw values of one array, given by name.

        ``{"mask": m, "w": x}`` becomes ``{(*node, "w"): x, (*node, "@fixed", "mask"): m}``. Free values come first, and
        then fixed values in the order of their declarations. An array without values gets an empty marker dict.
        """
        node, declarations = self.nodes[array_name], self.stage.raw_values
        in_declared_order = {value_name: values[value_name] for value_name in declarations if value_name in values}
        fixed = {name: x for name, x in {**in_declared_order, **values}.items() if value_of(declarations, name).fixed}
        placed = {(*node, name): x for name, x in values.items() if name not in fixed}
        return (placed | {(*node, FIXED, name): x for name, x in fixed.items()}) or {node: {}}


def read_value(arrays: Mapping[Names, Any], place: Names) -> Any:
    """Returns the array at a key path as a JAX array, through which no gradient flows if it is a fixed value."""
    x = jnp.asarray(arrays[place])
    return jax.lax.stop_gradient(x) if is_fixed_value(place) else x


def site_of(stage: Any, who: CallName, leaves: Mapping[str, Leaf], **details: Any) -> Site:
    """Returns the :class:`Site` of a stage for the given leaves: arrays in ``init``, or marker dicts in later calls.

    Args:
      stage: The stage, with its numbers and axes for these arrays.
      who: The call that errors name.
      leaves: The :class:`Leaf` of each array, by the name that the formulas use, such as ``"w"``.
      details: The other fields of :class:`Site`.
    """
    places = {name: leaf.place for name, leaf in leaves.items()}
    values = {name: leaf.values for name, leaf in leaves.items()}
    nodes = {name: leaf.node_of(stage.kind) for name, leaf in leaves.items()}
    return Site(stage, who, places, values, nodes, **details)


def stage_key(stage: Any) -> Any:
    """Returns a hashable key for a stage. Stages with equal keys compute the same results, so they share one trace.

    A stage whose fields have no exact text, such as one with a traced number, has a key equal only to itself. The stage
    is part of the key because its text alone does not distinguish classes.
    """
    return id(stage) if stage._exact_text is None else (stage, stage._exact_text)
