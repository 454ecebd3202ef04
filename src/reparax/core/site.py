"""Where a stage acts: at one array, or at several that it joins."""

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
"""Arrays, or their types, by their key paths."""


@dataclass(frozen=True, eq=False)
class Site:
    """A stage at one array, or at several that it joins.

    Attributes:
      stage: The formulas, with the numbers and axes of these arrays.
      who: How errors name it.
      arrays: The key path of each effective array, by the name that the formulas use.
      values: For each array the key path of each raw value; of the array itself, if the stage changes it in place.
      nodes: For each array the key path of its marker dict; none, if the stage has no markers.
      draw_path: The path that is hashed into the key, counted also where nothing is drawn; None if it is not.
      draw_number: The number of the stage among those of its kind that act on the array, counted from 1 in a plan.
      reads: The key paths of arrays that the formulas read and leave where they are.
      copies: For the path of each array without a value of its own, the paths at which its values are.
      formula: What the stage does here, if it is not the same at all arrays.
      types: The types of the effective arrays, if they are known.
      call: How the formulas are called, if arrays of one type share what is traced.
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
        """The key paths of all that the formulas read."""
        return [*(place for places in self.values.values() for place in places.values()), *self.reads.values()]

    def read(self, arrays: Arrays) -> RawValues:
        """The raw values, and the arrays that the formulas read; fixed values pass no gradient."""
        raw_values = {
            name: {value: read_value(arrays, place) for value, place in places.items()}
            for name, places in self.values.items()
        }
        return raw_values | {name: {"": read_value(arrays, place)} for name, place in self.reads.items()}

    @property
    def free_values(self) -> dict[str, Names]:
        """The key path of each raw value that is not fixed, by its name."""
        pairs = [pair for places in self.values.values() for pair in places.items()]
        return {name: place for name, place in pairs if not value_of(self.stage.raw_values, name).fixed}

    def swaps(self, effective: Mapping[str, Any]) -> list[Swap]:
        """The effective arrays in place of the raw values; a marker without values has a place of its own."""
        return [
            (list(self.values[name].values()) or [self.nodes[name]], {place: effective[name]})
            for name, place in self.arrays.items()
        ]

    def raw_values(self, name: str, values: Mapping[str, Any]) -> dict[Names, Any]:
        """The raw values of an array, each at its key path, free ones first and fixed ones in their declared order."""
        node = self.nodes[name]
        order = {**self.stage.raw_values, **values}
        fixed = [value for value in order if value in values and value_of(self.stage.raw_values, value).fixed]
        placed = {(*node, value): x for value, x in values.items() if value not in fixed}
        return (placed | {(*node, FIXED, value): values[value] for value in fixed}) or {node: {}}


def read_value(arrays: Mapping[Names, Any], place: Names) -> Any:
    """The array at a key path; a fixed value passes no gradient."""
    x = jnp.asarray(arrays[place])
    return jax.lax.stop_gradient(x) if is_fixed_value(place) else x


def site_of(stage: Any, who: CallName, leaves: Mapping[str, Leaf], **details: Any) -> Site:
    """A stage at arrays, or at the marker dicts that stand for them."""
    places = {name: leaf.place for name, leaf in leaves.items()}
    values = {name: leaf.values for name, leaf in leaves.items()}
    nodes = {name: leaf.node_of(stage.kind) for name, leaf in leaves.items()}
    return Site(stage, who, places, values, nodes, **details)


def identity(stage: Any) -> Any:
    """What is equal for stages whose formulas are the same."""
    return id(stage) if stage._exact_text is None else (stage, stage._exact_text)
