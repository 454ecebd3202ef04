"""Stages whose formula takes all selected arrays at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.chains.layers import Layer, Site, SiteValues
from reparax.core.chains.planner import Planner, rewrites
from reparax.core.stages.leaf import Reparametrization
from reparax.core.stages.on_arrays import OnArrays
from reparax.core.stages.several import Leaves, require_names, require_number, require_start, require_update
from reparax.core.tree.flat import Flat
from reparax.core.tree.paths import path_text

OWN = ("init_leaf", "apply_leaf", "refuse_leaf")
"""The methods on one array that a class may have: all others would never run."""


@dataclass(frozen=True, eq=False)
class _All(Site):
    """The stage on all of its arrays, by their places."""

    def open(self, arrays: Mapping[str, Array], key: Array | None) -> SiteValues:
        del key
        values = self.stage.init_arrays(dict(arrays))
        require_start(self.stage, self._apply, ("init_arrays", "apply_arrays"), values, arrays, is_shared=False)
        return values

    def close(self, values: SiteValues, key_or_draw: Array | None) -> Mapping[str, Any]:
        del key_or_draw
        return self._apply(values)

    def _apply(self, values: SiteValues) -> dict[str, Array]:
        """The arrays of all values."""
        return self.stage.apply_arrays({place: dict(values_of_one) for place, values_of_one in values.items()})

    def update(self, values: SiteValues, grads: Mapping[str, Any], key: Array | None) -> SiteValues:
        del grads, key
        new_values = self.stage.update_arrays({place: dict(values_of_one) for place, values_of_one in values.items()})
        require_names("update_arrays", "the new values of", new_values, values)
        for place, new_values_of_one in new_values.items():
            require_update("update_arrays", self.stage, values[place], new_values_of_one)
        return new_values

    def number_of(self, formula: str, values: SiteValues) -> Array:
        if formula != "penalty":
            return super().number_of(formula, values)
        penalty = self.stage.penalty_arrays(values)
        require_number("penalty_arrays", penalty)
        return penalty


class _OnAll(OnArrays):
    """The planner of stages on all arrays: one site instead of one for each array."""

    def does(self, verb: str) -> bool:
        return rewrites(type(self.stage), f"{verb}_arrays")

    def plan_init(self, tree: Flat) -> Layer:
        return _join_sites(super().plan_init(tree))

    def plan(self, method: str, tree: Flat) -> Layer:
        layer = super().plan(method, tree)
        for site in layer.sites:
            required_names = {name for name, declaration in self.stage.raw_values.items() if not declaration.optional}
            if lacking := required_names - set(site.spots["w"].values):
                raise ValueError(
                    f"{layer.who_at(site)}: no value {min(lacking)!r} under the marker. Restore the whole raw tree."
                )
        return _join_sites(layer)


def _join_sites(layer: Layer) -> Layer:
    """The layer with all arrays at one site."""
    spots = {path_text(site.spots["w"].place): site.spots["w"] for site in layer.sites}  # paths may be equal
    return replace(layer, sites=[_All(layer.stage, "", spots)])


class Together(Reparametrization):
    """A stage whose formula takes all selected arrays at once, such as one ranking of all weights.

    Your subclass writes ``init_arrays({place: w}) -> {place: values}`` and ``apply_arrays(values) -> {place: w}``, and
    may write ``update_arrays`` and ``penalty_arrays``. The places are those of the arrays in the tree. The formulas are
    also traced on one array, at the place ``"w"``, for its types; if they cannot take a single array, write
    ``init_leaf`` and ``apply_leaf``, of which only the types are read. Declare ``raw_values`` as for
    :class:`Reparametrization`. The raw values of each array are stored in its own place, so other stages, labels and
    weight decay find them under its path. It draws no noise.

    Args:
      where: As for :class:`Reparametrization`.
      stacked: Not available, as the formula takes all arrays.

    Raises:
      TypeError: If a class writes formulas on one array, or sets ``stochastic``.
      ValueError: If ``stacked`` is given.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class UnitTogether(rpx.stage.Together):  # all arrays together have norm one
      ...     def init_arrays(self, arrays):
      ...         return {place: {"x": w} for place, w in arrays.items()}
      ...     def apply_arrays(self, values):
      ...         length = jnp.sqrt(sum(jnp.sum(held["x"] ** 2) for held in values.values()))
      ...         return {place: held["x"] / length for place, held in values.items()}
      >>> p = UnitTogether()
      >>> p.apply(p.init({"a": jnp.ones((1, 1)), "b": jnp.ones((1, 3))}))
      {'a': Array([[0.5]], dtype=float32), 'b': Array([[0.5, 0.5, 0.5]], dtype=float32)}
    """

    entrywise: ClassVar[Any] = True
    _planner: ClassVar[type[Planner]] = _OnAll

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        leaf_formulas = [name for name in dir(Reparametrization) if name.endswith("_leaf") and name not in OWN]
        defined = [name for name in leaf_formulas if getattr(cls, name) is not getattr(Reparametrization, name)]
        if defined or cls.stochastic:
            offender = defined[0] if defined else "stochastic"
            raise TypeError(
                f"{cls.__name__} defines {offender}, but the formula of a Together takes all arrays at once and draws "
                f"no noise. Write init_arrays, apply_arrays, update_arrays or penalty_arrays, or derive from "
                f"Reparametrization."
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stacked != ():
            raise ValueError(
                f"{type(self).__name__} got stacked={self.stacked!r}, but its formula takes all arrays together. Leave "
                f"`stacked` out."
            )

    @abstractmethod
    def init_arrays(self, arrays: dict[str, Array]) -> Leaves:
        """For each place its raw values, such that ``apply_arrays`` returns ``arrays``, or the nearest it can."""

    @abstractmethod
    def apply_arrays(self, values: Leaves) -> dict[str, Array]:
        """For each place its effective array, from the raw values of all places, fixed ones included."""

    def update_arrays(self, values: Leaves) -> Leaves:
        """For each place the fixed values that change in one training step."""
        del values
        return {}

    def penalty_arrays(self, values: Leaves) -> Array:
        """The penalty: a scalar."""
        del values
        return jnp.zeros(())

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return self.init_arrays({"w": w})["w"]

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return self.apply_arrays({"w": values})["w"]
