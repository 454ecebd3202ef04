"""Stages on several arrays together."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import (
    Axes,
    AxisNames,
    are_words,
    check_front_axes,
    find_axes,
    has_names,
    map_stacked,
    names_of_places,
    stacked_axes_error,
    stacked_sizes,
)
from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors
from reparax.core.fields import argument
from reparax.core.formulas import Leaves, require_names, require_number, require_start, require_update
from reparax.core.leaf import Reparametrization
from reparax.core.paths import Names, path_text
from reparax.core.plan import Layer, Planner, Site, SiteValues, opened_spot, rewrites
from reparax.core.planners import OnArrays
from reparax.core.raw import Flat, Slot
from reparax.core.roles import Role
from reparax.core.sites import own_nodes
from reparax.core.where import check_where, why_nothing
from reparax.numerics.arithmetic import is_array

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


@dataclass(frozen=True, eq=False)
class _Group(Site):
    """The stage on a group of arrays.

    Attributes:
      stacked: The axes along which independent arrays are stacked in all of them.
    """

    stacked: tuple[int, ...] = ()

    def open(self, arrays: Mapping[str, Array], key: Array | None) -> SiteValues:
        del key
        try:
            values = map_stacked(self.stacked, self.stage.init_leaves)(arrays)
            close_stacked, names = _apply_each(self.stage, self.stacked), ("init_leaves", "apply_leaves")
            require_start(self.stage, close_stacked, names, values, arrays, is_shared=True)
        except KeyError as error:
            raise ValueError(
                f"the formula reads {error}, but it is neither in `arrays` nor from init_leaves. Correct the name."
            ) from error
        return values

    def close(self, values: SiteValues, key_or_draw: Array | None) -> Mapping[str, Any]:
        del key_or_draw
        return _apply_each(self.stage, self.stacked)(values)


def _apply_each(stage: Any, stacked: tuple[int, ...]) -> Callable[..., Any]:
    """The formula that gives the arrays, mapped over the stacked axes."""
    return map_stacked(stacked, stage.apply_leaves)


class _OnGroups(Planner):
    """The planner of a stage on groups of arrays."""

    def plan_init(self, tree: Flat) -> Layer:
        slots, kind = tree.slots(), self.stage.kind
        visible = [place for place, w in tree.arrays.items() if slots[place].visible and is_array(w)]
        sites: list[_Group] = []
        axis_names = self._axis_names(tree)
        for group in self._groups("init", {place: slots[place].path for place in visible}):
            spots = {name: opened_spot(kind, place, tree.arrays[place]) for name, place in group.items()}
            with locate_errors(f"{self.who('init')} at {_quote_paths(slots, group)}"):
                stacked = self._stacked(group, axis_names)
                _require_stacks({name: tree.arrays[place] for name, place in group.items()}, stacked)
            sites.append(_Group(self.stage, _quote_paths(slots, group), spots, stacked=stacked))
        return self.layer("init", sites)

    def plan(self, method: str, tree: Flat) -> Layer:
        who, sites = self.who(method), list[_Group]()
        nodes, model_tree = own_nodes(who, self.stage.kind, tree)
        slots, axis_names = model_tree.slots(), self._axis_names(model_tree)
        for group in self._groups(method, {place: slots[place].path for place in nodes}):
            group_nodes = {name: nodes[place] for name, place in group.items()}
            with locate_errors(f"{who} at {_quote_paths(slots, group)}"):
                for node in group_nodes.values():
                    node.require_values()
                value_types = {name: dict(node.types) for name, node in group_nodes.items()}
                stacked = self._stacked(group, axis_names)
                types = jax.eval_shape(_apply_each(self.stage, stacked), value_types)
            spots = {name: node.spot(types[name]) for name, node in group_nodes.items()}
            sites.append(_Group(self.stage, _quote_paths(slots, group), spots, stacked=stacked))
        return self.layer(method, sites)

    def on(self, tree: Flat, roles: Mapping[Names, Role]) -> Any:
        if not are_words(self.stage.stacked):
            return self.stage
        paths = {place: slot.path for place, slot in tree.slots().items() if slot.visible}
        members = [place for group in self._groups("on", paths) for place in group.values()]
        stacked_of_path = {paths[place]: roles[place].stacked if place in roles else () for place in members}
        with locate_errors(self.who("on")):
            return replace(self.stage, stacked=_same_stacked(stacked_of_path, ""))

    def _axis_names(self, tree: Flat) -> Mapping[Names, AxisNames | None]:
        """The axis names of each array, if the stage needs any."""
        return names_of_places(tree) if has_names(self.stage.stacked) else dict.fromkeys(tree.arrays)

    def _stacked(self, group: Mapping[str, Names], axis_names: Mapping[Names, AxisNames | None]) -> tuple[int, ...]:
        """The stacked axes of a group as numbers."""
        stacked_of_name = {name: find_axes(self.stage.stacked, axis_names[place]) for name, place in group.items()}
        return _same_stacked(stacked_of_name, f" for stacked={self.stage.stacked!r}")

    def _groups(self, method: str, paths: Mapping[Names, str]) -> list[dict[str, Names]]:
        """For each group of captured texts, the place of the array of each name."""
        who = self.who(method)
        groups: dict[tuple[Any, ...], dict[str, Names]] = {}
        name_of_place: dict[Names, str] = {}
        for name, expression in self.stage.arrays:
            matches = {place: re.fullmatch(expression, path) for place, path in paths.items()}
            texts_of_place = {place: match.groups() for place, match in matches.items() if match}
            if not texts_of_place:
                raise ValueError(f"{who} found no array for {name!r}: {why_nothing(expression, list(paths.values()))}")
            for place, texts in texts_of_place.items():
                group = groups.setdefault(texts, {})
                if name in group or place in name_of_place:
                    occupant = (
                        f"{name!r} at {paths[group[name]]!r}" if name in group else f"it for {name_of_place[place]!r}"
                    )
                    raise ValueError(
                        f"{who} found {paths[place]!r} for {name!r}, but has {occupant} already. Capture in "
                        f"parentheses what differs between layers, and put the stage after those that split an array."
                    )
                group[name], name_of_place[place] = place, name
        for group in groups.values():
            if lacking := [name for name, _ in self.stage.arrays if name not in group]:
                (name, place), names = next(iter(group.items())), [name for name, _ in self.stage.arrays]
                raise ValueError(
                    f"{who} found {paths[place]!r} for {name!r}, but nothing for {lacking[0]!r} that captures the same "
                    f"text. Narrow the expressions to the layers that have all of {names}."
                )
        return list(groups.values())


class Joint(Parametrization):
    """A stage whose formula takes several arrays and returns several.

    Your subclass writes ``init_leaves({name: w}) -> {name: {value: array}}`` and ``apply_leaves(values) -> {name: w}``
    for the names in ``arrays``. The raw values of each array are stored in its own place, under the marker ``@kind``,
    so other stages, labels and weight decay find them under its path. An array without raw values leaves an empty node.
    Declare ``raw_values`` as for :class:`Reparametrization`.

    Args:
      arrays: For each name of the formula a regular expression that the array's whole path must match. Arrays whose
        expressions capture the same text in parentheses form a group, and the formula is applied to each group, for
        example once per layer: ``{"w": "(.*)/kernel", "b": "(.*)/bias"}``.
      stacked: As for :class:`Perturbation`, the same axes in all arrays of a group: the formula is applied to each
        index separately. Set it for layers that are stacked in one array, as under a scan; otherwise the formula treats
        them as one array, so a gain, for example, would be one number for all layers.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class OutputGain(rpx.stage.Joint):  # one gain for the weights of an output and its bias
      ...     raw_values = {"v": rpx.stage.main(), "log_gain": rpx.stage.aux()}
      ...     def init_leaves(self, arrays):
      ...         w, b = arrays["w"], arrays["b"]
      ...         return {"w": {"v": w, "log_gain": jnp.zeros_like(b)}, "b": {"v": b}}
      ...     def apply_leaves(self, values):
      ...         gain = jnp.exp(values["w"]["log_gain"])
      ...         return {"w": gain[None] * values["w"]["v"], "b": gain * values["b"]["v"]}
      >>> p = OutputGain({"w": "(.*)/kernel", "b": "(.*)/bias"})
      >>> raw = p.init({"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}})
      >>> jax.tree.map(jnp.shape, raw["dense"])
      {'bias': {'@output_gain': {'v': (2,)}}, 'kernel': {'@output_gain': {'log_gain': (2,), 'v': (3, 2)}}}
    """

    arrays: Any
    stacked: Axes = argument(check_front_axes, default=(), kw_only=True)

    _planner: ClassVar[type[Planner]] = _OnGroups

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "arrays", _hashable_items(self.arrays, type(self).__name__))

    @abstractmethod
    def init_leaves(self, arrays: dict[str, Array]) -> Leaves:
        """For each name its raw values, such that ``apply_leaves`` returns ``arrays``, or the nearest it can."""

    @abstractmethod
    def apply_leaves(self, values: Leaves) -> dict[str, Array]:
        """For each name its effective array, from the raw values of all names, fixed ones included."""


def _quote_paths(slots: Mapping[Names, Slot], group: Mapping[str, Names]) -> str:
    """The paths of a group, as errors show them."""
    return ", ".join(repr(slots[place].path) for place in group.values())


def _same_stacked(stacked_of: Mapping[str, tuple[int, ...]], source: str) -> tuple[int, ...]:
    """The stacked axes of several arrays, which have to be the same; ``source`` says in errors what the stage has."""
    if len(set(stacked_of.values())) > 1:
        raise ValueError(
            f"expected the same stacked axes in all arrays, got {stacked_of}{source}. Stack them along the same axes, "
            f"or leave some layers out with the expressions."
        )
    return next(iter(stacked_of.values()))


def _require_stacks(arrays: Mapping[str, Any], stacked: tuple[int, ...]) -> None:
    """Requires the stacked axes in each array, of one size in all of them."""
    sizes = {name: None if stacked_axes_error(w, stacked) else stacked_sizes(w, stacked) for name, w in arrays.items()}
    if None in sizes.values() or len(set(sizes.values())) > 1:
        shapes = {name: w.shape for name, w in arrays.items()}
        raise ValueError(
            f"expected as many layers along stacked={stacked} in each array, got shapes {shapes}. Give the axes along "
            f"which all of them are stacked."
        )


def _hashable_items(arrays: Any, who: str) -> tuple[tuple[str, str], ...]:
    """A dict as a tuple of its items, which is hashable."""
    items = tuple(arrays.items() if isinstance(arrays, Mapping) else arrays if isinstance(arrays, tuple) else ())
    for item in items or (None,):
        match item:
            case (str(), str() as expression):
                check_where(expression, who)
            case _:
                raise TypeError(f"{who} takes a dict of names and regular expressions as arrays, but got {arrays!r}.")
    return items
