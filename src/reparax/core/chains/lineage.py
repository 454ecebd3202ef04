"""Where the arrays of a tree come from: which stage makes each, of which raw values, read from the plan of a chain."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reparax.core.axes.boxes import gather_boxes
from reparax.core.chains.calls import call_name, require_no_references
from reparax.core.chains.layers import Layer
from reparax.core.chains.plan import decide
from reparax.core.chains.planner import planner_of
from reparax.core.tree.flat import Flat, flatten, nest
from reparax.core.tree.paths import Names, PyTree, items, path_text
from reparax.core.tree.raw import OTHER_CHAIN, kind_of, outer_markers

CONVERT = "Convert it with `rpx.transfer(old, new, raw)`."


@dataclass(frozen=True)
class Maker:
    """How an array is made.

    Attributes:
      stage: The stage, with the numbers and axes of this array.
      values: The place of each of its raw values, by their names.
    """

    stage: Any
    values: Mapping[str, Names]


@dataclass(frozen=True, eq=False)
class Lineage:
    """What a chain does with a raw tree.

    Attributes:
      raw: The raw tree, laid flat.
      layers: Where each stage acts.
      effective: The types of the effective tree, in its own structure.
    """

    raw: Flat
    layers: Sequence[Layer]
    effective: PyTree

    @cached_property
    def makers(self) -> dict[Names, Maker]:
        """How each array is made that stages compute of raw values, by its place."""
        spots = [pair for layer in self.layers for pair in layer.spots]
        return {spot.place: Maker(stage, spot.values) for stage, spot in spots if spot.mark}

    @cached_property
    def places(self) -> dict[str, Names]:
        """The place of each array of the effective tree, by its path."""
        return {path_text(place): place for place, _ in items(self.effective)}

    def has_values(self, place: Names) -> bool:
        """Whether the raw tree holds any value of the array at a place; a tied one has none of its own."""
        return place not in self.makers or any(map(self.has_values, self.makers[place].values.values()))


def lineage_of(p: Iterable[Any], raw: PyTree, otherwise: str = CONVERT) -> Lineage:
    """The lineage of a raw tree, concrete or of types; ``otherwise`` says what to do if ``p`` did not make it."""
    require_no_references(p, "apply", raw)
    tree = flatten(gather_boxes(raw))
    layers, types = decide("apply", tuple(p), tree.types)
    effective = nest(types)
    require_no_marks(p, effective, otherwise)
    return Lineage(tree, layers, effective)


def require_no_marks(p: Iterable[Any], effective: PyTree, otherwise: str = CONVERT) -> None:
    """Requires that no stage's values are left after all stages of ``p``.

    Raises:
      ValueError: If some are: ``p`` did not make the raw tree.
    """
    if marks := outer_markers(effective):
        path, mark = next(iter(marks.items()))
        if makers := [stage for stage in p if stage.kind == kind_of(mark)]:
            for stage in makers:
                planner_of(stage).require_own(flatten(effective).types, path)
            raise ValueError(
                f"{call_name(p, 'apply')} does not select {path!r}, where the raw tree holds {mark!r}: another chain "
                f"or an older version of reparax made it. {otherwise}"
            )
        raise ValueError(f"{call_name(p, 'apply')} does not know {mark!r} at {path!r}: {OTHER_CHAIN}")
