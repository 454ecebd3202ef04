"""The site of a stage on one array."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax import Array

from reparax.core.chains.layers import Site, SiteValues
from reparax.core.stages.arrangement import Arrangement
from reparax.core.stages.formulas import close_array, close_at_random, open_values
from reparax.core.stages.remembered import call_once_per_type, inlined_per_type
from reparax.core.stages.several import require_kept, require_number, require_update
from reparax.core.tree.markers import require_type
from reparax.numerics.arithmetic import is_inexact, widened


@dataclass(frozen=True, eq=False)
class OneArray(Site):
    """A site of one array.

    Attributes:
      stacked: The axes along which independent arrays are stacked in it.
    """

    stacked: tuple[int, ...] = ()

    @property
    def arrangement(self) -> Arrangement:
        """The stage as its formulas meet the array."""
        return Arrangement(self.stage, self.stacked)

    @cached_property
    def is_random(self) -> bool:
        return self.stage.stochastic and not self.mean


@dataclass(frozen=True, eq=False)
class InPlace(OneArray):
    """A stage that changes an array in place."""

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        at, w, method = self.arrangement, values["w"]["w"], "mean_leaf" if self.mean else "apply_leaf"
        key = None if key_or_draw is None else at.keys(key_or_draw, w)
        effective = at.over(getattr(self.stage, method))(w, *(() if self.mean else (key,)))
        if not self.stage.changes_type:
            require_type(method, effective, w)
        return {"w": effective}


@dataclass(frozen=True, eq=False)
class Noise(InPlace):
    """Noise whose draw depends on the array's type only."""

    @cached_property
    def is_noise(self) -> bool:
        return not self.mean

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        if self.mean:
            return super().close(values, key_or_draw)
        return {"w": inlined_per_type(type(self.stage).perturb, self.stage, values["w"]["w"], key_or_draw)}


@dataclass(frozen=True, eq=False)
class FromValues(OneArray):
    """A stage that computes an array from raw values."""

    @property
    def starts_random(self) -> bool:
        return self.stage._draws

    def open(self, arrays: Mapping[str, Array], key: Array | None) -> SiteValues:
        return {"w": open_values(self.arrangement, arrays["w"], key)}

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        if key_or_draw is None:
            return {"w": call_once_per_type(close_array, self.arrangement, values["w"])}
        return {"w": call_once_per_type(close_at_random, self.arrangement, values["w"], key_or_draw)}

    def update(self, values: SiteValues, grads: Mapping[str, Any], key: Array | None) -> SiteValues:
        stage, at = self.stage, self.arrangement
        arguments = {"grad": grads.get("w"), "key": None if key is None else at.keys(key, self.spots["w"].type)}
        names = stage._update_reads

        def update_one(values_of_one: dict[str, Array], *read_values: Any) -> dict[str, Array]:
            new_values = stage.update_leaf(dict(values_of_one), **dict(zip(names, read_values, strict=True)))
            require_update("update_leaf", stage, values_of_one, new_values)
            return new_values

        return {"w": at.over(update_one)(values["w"], *(arguments[name] for name in names))}

    def rebase(self, values: SiteValues) -> SiteValues:
        def rebase_one(values_of_one: dict[str, Array]) -> dict[str, Array]:
            new_values = self.stage.rebase_leaf(dict(values_of_one))
            require_kept("rebase_leaf", self.stage, values_of_one, new_values)
            return new_values

        return {"w": self.arrangement.over(rebase_one)(values["w"])}

    def number_of(self, formula: str, values: SiteValues) -> Array:
        wide = {name: widened(x) if is_inexact(x) else x for name, x in values["w"].items()}

        def number_of_one(values_of_one: dict[str, Array]) -> Array:
            number = getattr(self.stage, f"{formula}_leaf")(values_of_one)
            require_number(f"{formula}_leaf", number)
            return number

        return self.arrangement.over(number_of_one)(wide)


@dataclass(frozen=True, eq=False)
class Bare(FromValues):
    """A stage whose only raw value is the array itself, at its own place."""

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        del key_or_draw
        return {"w": close_array(self.arrangement, values["w"])}
