"""A site: a stage at one array, or at a group of arrays that it computes together.

A *place* is the key path of an array, a tuple of names. The formulas of a stage call its arrays by names of their own,
such as ``"w"``, and so they do the raw values, such as ``"g"`` and ``"v"``; a site says at which places these are. In a
raw tree, the raw values of an array are in a marker dict, at the key path ``(*place, "@kind")``.
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
"""Arrays, or their types, by their key paths."""


@dataclass(frozen=True, eq=False)
class Site:
    """A stage at one array, or at a group of arrays that it computes together.

    Attributes:
      stage: The stage, with its numbers and axes for these arrays.
      who: The call in which the stage acts here, for errors.
      arrays: The place of each effective array, by the name that the formulas use.
      values: For each array, the place of each of its raw values. If the stage changes an array in place, this is the
        place of the array itself.
      nodes: For each array, the key path of its marker dict; empty if the stage has no markers.
      draw_path: The path that is hashed into the random key; None for stages that join arrays, which draw nothing.
      draw_number: The number of the stage among those of its kind that act on the array. A plan counts from 1.
      reads: The places of other arrays that the formulas only read.
      copies: For the path of each array without raw values of its own, such as a tied one, the paths at which the
        values are.
      formula: What the stage does here, if it differs between its sites.
      types: The types of the effective arrays, if known.
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
        """The places of all arrays that the formulas read."""
        return [*(place for places in self.values.values() for place in places.values()), *self.reads.values()]

    def read(self, arrays: Arrays) -> RawValues:
        """The raw values and the other arrays that the formulas read. Fixed values pass no gradient."""
        raw_values = {
            name: {value: read_value(arrays, place) for value, place in places.items()}
            for name, places in self.values.items()
        }
        return raw_values | {name: {"": read_value(arrays, place)} for name, place in self.reads.items()}

    @property
    def free_values(self) -> dict[str, Names]:
        """The place of each raw value that is not fixed, by the name of the value."""
        pairs = [pair for places in self.values.values() for pair in places.items()]
        return {name: place for name, place in pairs if not value_of(self.stage.raw_values, name).fixed}

    def swaps(self, effective: Mapping[str, Any]) -> list[Swap]:
        """The swaps that replace raw values, or a marker dict without values, by the effective arrays."""
        return [
            (list(self.values[name].values()) or [self.nodes[name]], {place: effective[name]})
            for name, place in self.arrays.items()
        ]

    def raw_values(self, name: str, values: Mapping[str, Any]) -> dict[Names, Any]:
        """The raw values of an array by their places: first the free ones, then the fixed ones in declared order."""
        node = self.nodes[name]
        order = {**self.stage.raw_values, **values}
        fixed = [value for value in order if value in values and value_of(self.stage.raw_values, value).fixed]
        placed = {(*node, value): x for value, x in values.items() if value not in fixed}
        return (placed | {(*node, FIXED, value): values[value] for value in fixed}) or {node: {}}


def read_value(arrays: Mapping[Names, Any], place: Names) -> Any:
    """The array at a place. A fixed value passes no gradient."""
    x = jnp.asarray(arrays[place])
    return jax.lax.stop_gradient(x) if is_fixed_value(place) else x


def site_of(stage: Any, who: CallName, leaves: Mapping[str, Leaf], **details: Any) -> Site:
    """The site of a stage at some leaves, which are arrays before ``init`` and marker dicts after it."""
    places = {name: leaf.place for name, leaf in leaves.items()}
    values = {name: leaf.values for name, leaf in leaves.items()}
    nodes = {name: leaf.node_of(stage.kind) for name, leaf in leaves.items()}
    return Site(stage, who, places, values, nodes, **details)


def stage_key(stage: Any) -> Any:
    """A hashable key; if two stages have equal keys, their formulas compute the same."""
    return id(stage) if stage._exact_text is None else (stage, stage._exact_text)
