"""How the formulas of a stage meet one array: with which numbers, along which axes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from reparax.core.axes.names import AxisNames
from reparax.core.axes.numbers import find_axes, has_names, number_axes
from reparax.core.axes.stacked import map_stacked, stacked_sizes
from reparax.core.chains.keys import split_key
from reparax.core.stages.varied import TYPICAL


@dataclass(frozen=True)
class Arrangement:
    """A stage at one array, and the axes along which independent arrays are stacked there.

    Attributes:
      stage: The formulas: each field that varies is a number, and each axis.
      stacked: The stacked axes, counted from the front; the axes of the stage do not count them.
    """

    stage: Any
    stacked: tuple[int, ...] = ()

    @property
    def stage_for_one(self) -> Any:
        """The stage for one of the stacked arrays."""
        return replace(self.stage, stacked=()) if self.stacked else self.stage

    def over(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula on one array, applied to each of the stacked arrays."""
        return map_stacked(self.stacked, self.stage._on_one(formula))

    def keys(self, key: Array, w: Any) -> Array:
        """A key for each of the arrays stacked in ``w``."""
        return split_key(key, stacked_sizes(w, self.stacked)) if self.stacked else key


def arrange(stage: Any, names: AxisNames | None = None) -> Arrangement:
    """The stage at an array with these axis names; names of stacked axes that it does not have are ignored.

    A number that varies is one that every stage accepts: shapes and dtypes do not depend on it. For the numbers of the
    array itself pass ``stage.for_array(path, w)``.
    """
    stacked, named_axes, varying_fields = find_axes(stage.stacked, names), stage._named_axes, stage._varied
    new: dict[str, Any] = dict.fromkeys(varying_fields, TYPICAL)
    if named_axes or has_names(stage.stacked):
        other_names = None if names is None else tuple(name for i, name in enumerate(names) if i not in stacked)
        new |= {name: number_axes(axes, other_names) for name, axes in named_axes.items()} | {"stacked": stacked}
    return Arrangement(replace(stage, **new) if new else stage, stacked)
