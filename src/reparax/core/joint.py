"""Defines the base class of stages whose formula takes several arrays at once, such as the kernel and bias of a layer.

The arrays that one call of the formula takes form a group. If ``Joint.arrays`` holds regular expressions, arrays whose
paths capture the same text form a group, such as one group per layer. Otherwise, all selected arrays form one group.
Each group is one :class:`Site`, where the formula knows the arrays by their names in ``arrays`` or by path.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core import checks
from reparax.core.axes import find_axes, has_words, map_stacked, stacked_axes_error, stacked_sizes
from reparax.core.calls import CallName
from reparax.core.config import code
from reparax.core.leafwise import Leafwise, reader
from reparax.core.paths import Names, path_text
from reparax.core.raw import Flat, Leaf, Node
from reparax.core.roles import Misfit
from reparax.core.site import Site, site_of
from reparax.core.values import RawValues
from reparax.core.where import check_where, why_none_selected


class Joint(Leafwise):
    """Base class for stages whose formula takes several arrays at once and returns several.

    A subclass defines ``init_leaves({name: w}) -> {name: {value: array}}`` and ``apply_leaves(values) -> {name: w}``
    for the names in ``arrays``, and optionally ``update_leaves`` and ``penalty_leaves``. Raw values are stored at the
    path of their array, under a key such as ``"@output_gain"``, where other stages, labels and weight decay find them.
    An array without raw values leaves an empty dict there. Declare ``raw_values`` as for :class:`Reparametrization`.
    The stage cannot draw noise.

    Args:
      arrays: Maps each name in the formula to a regular expression that the whole path of the array must match. Arrays
        whose expressions capture the same text in parentheses form a group, and the formula is applied to each group,
        for example once per layer: ``{"w": "(.*)/kernel", "b": "(.*)/bias"}``. Default: all arrays that ``where``
        selects form one group, and their names are their paths in the raw tree. A formula that ranks all weights
        together, for example, needs such a group.
      where: Which arrays to act on, as for :class:`Perturbation`. Do not pass both ``where`` and ``arrays``.
      stacked: Axes along which layers are stacked in one array, as under a scan; see :class:`Perturbation`. All arrays
        of a group must have the same stacked axes. The formula is applied to each index separately. Without
        ``stacked``, it takes all layers together, so a gain would be one number for all of them.

    Raises:
      TypeError: If ``arrays`` is not a dict from names to regular expressions, or if a subclass sets ``stochastic``.
      ValueError: If both ``arrays`` and ``where`` are given, or ``stacked`` without ``arrays``.

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
      >>> class UnitTogether(rpx.stage.Joint):  # all arrays together have norm one
      ...     def init_leaves(self, arrays):
      ...         return {path: {"x": w} for path, w in arrays.items()}
      ...     def apply_leaves(self, values):
      ...         length = jnp.sqrt(sum(jnp.sum(held["x"] ** 2) for held in values.values()))
      ...         return {path: held["x"] / length for path, held in values.items()}
      >>> p = UnitTogether()
      >>> p.apply(p.init({"a": jnp.ones((1, 1)), "b": jnp.ones((1, 3))}))
      {'a': Array([[0.5]], dtype=float32), 'b': Array([[0.5, 0.5, 0.5]], dtype=float32)}
    """

    arrays: Any = field(default=None, metadata={"positional": True})

    elementwise: ClassVar[Any] = True
    """Joint stages count as elementwise, because a formula may take all layers together. So they need not name a
    network's stacked axes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises a TypeError if the class is random or defines a formula for one array, such as ``apply_leaf``."""
        super().__init_subclass__(**kwargs)
        # `refuse_leaf` checks each selected array separately, so a Joint may define it.
        wrong_names = [name for name in vars(cls) if name.endswith("_leaf") and name != "refuse_leaf"]
        if cls.stochastic:
            wrong_names.append("stochastic")
        if wrong_names:
            raise TypeError(
                f"{cls.__name__} defines {wrong_names[0]}, but the formula of a Joint takes "
                f"several arrays at once and draws no noise. Write init_leaves, apply_leaves, update_leaves or "
                f"penalty_leaves, or derive from Reparametrization."
            )

    def __post_init__(self) -> None:
        """Checks that ``arrays`` is valid and fits the other arguments, and stores it as a tuple, which is hashable."""
        super().__post_init__()
        if self.arrays is None and self.stacked != ():
            raise ValueError(
                f"{type(self).__name__} got stacked={self.stacked!r} without `arrays`, so its formula takes all arrays "
                f"together. Leave `stacked` out."
            )
        if self.arrays is not None and self.where is not None:
            raise ValueError(
                f"{type(self).__name__} got where={code(self.where)} as well as `arrays`, whose expressions already "
                f"select the arrays. Leave out one of the two."
            )
        if self.arrays is not None:
            object.__setattr__(self, "arrays", _hashable_items(self.arrays, type(self).__name__))

    @abstractmethod
    def init_leaves(self, arrays: dict[str, Array]) -> RawValues:
        """Returns the initial raw values for each name: ``{"w": {"v": ..., "log_gain": ...}, "b": {"v": ...}}``.

        From these values, ``apply_leaves`` must compute ``arrays``, or the nearest arrays that the formula can return.
        """

    @abstractmethod
    def apply_leaves(self, values: RawValues) -> dict[str, Array]:
        """Returns the effective array for each name, given the raw values of all arrays, including fixed values."""

    def update_leaves(self, values: RawValues) -> RawValues:
        """Returns the fixed values that change in one training step, by array and value name: ``{"w": {"mask": ...}}``.

        The result must contain the name of every array, with an empty dict if no value of that array changes. The
        values must keep their shapes and dtypes.
        """
        return {}

    def penalty_leaves(self, values: RawValues) -> Array:
        """Returns the scalar penalty for one group of arrays, which is added to the loss."""
        return jnp.zeros(())

    def _defines(self, verb: str) -> bool:
        """Returns whether ``verb`` is ``"update"`` and the class overrides ``update_leaves``."""
        return verb == "update" and type(self).update_leaves is not Joint.update_leaves

    def sites(self, method: str, tree: Flat) -> list[Site]:
        """Returns one :class:`Site` per group of arrays; without ``arrays``, all selected arrays form a single group.

        In ``init``, the leaves of ``tree`` are arrays. Later, they are the marker dicts that hold the raw values of
        arrays.
        """
        who = CallName(self, method)
        if self.arrays:  # The expressions match paths, so the selection does not read marker dicts.
            leaves = tree.leaves() if method == "init" else self._marker_dicts(who, self._leaves_with_nodes(who, tree))
            return [self._site_of_group(who, group) for group in self._groups(who, leaves)]
        if method == "init":
            leaves = [leaf for leaf, _ in self._arrays_and_stages(method, tree)]
        else:
            leaves = self._selected_nodes(who, self._leaves_with_nodes(who, tree), reader(self, who))
            for leaf in leaves:  # Check each array separately, so that an error names only the faulty array.
                with checks.locate_errors(who.at(leaf.path)):
                    self._require_all(leaf.content.arrays())
        return [site_of(self, who, {path_text(leaf.place): leaf for leaf in leaves})]

    def _marker_dicts(self, who: CallName, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns the leaves whose arrays ``init`` of this stage has replaced with marker dicts, which hold raw values.

        Plain arrays are left out. An error is raised if a dict such as ``{"@pack": {"x": array}}`` holds anything else.
        """
        marker_dicts = [leaf for leaf in leaves if isinstance(leaf.content, Node)]
        for leaf in marker_dicts:
            with checks.locate_errors(who.at(leaf.path)):
                leaf.content.arrays()  # called only to raise an error for a damaged marker dict
        return marker_dicts

    def _site_of_group(self, who: CallName, group: Mapping[str, Leaf]) -> Site:
        """Returns the :class:`Site` of one group of arrays, with a stage whose ``stacked`` holds axis indices."""
        who = who.at(*(leaf.path for leaf in group.values()))
        with checks.locate_errors(who):
            axes = {name: find_axes(self.stacked, leaf) for name, leaf in group.items()}
            stacked = _same_stacked(axes, f" for stacked={self.stacked!r}")
            if who.method == "init":  # Later calls compare the shapes of raw values in `_check_values`.
                _require_equal_stacks({name: leaf.content for name, leaf in group.items()}, stacked)
        return site_of(replace(self, stacked=stacked), who, group)

    def _check_values_at(self, who: CallName, tree: Flat, path: str) -> None:
        """Checks the raw values at ``path`` unless ``arrays`` is set: those of a group make sense only together."""
        if not self.arrays:
            super()._check_values_at(who, tree, path)

    def _array_for_type(self, values: Mapping[str, Array]) -> Array:
        """Returns the raw value aligned with the array, or else the effective array, computed as a group of one."""
        aligned = self._aligned_value(values)
        return self.apply_leaves({"w": dict(values)})["w"] if aligned is None else aligned

    def _init_at(self, site: Site, arrays: Mapping[str, Array], key: Array | None) -> RawValues:
        """Returns the initial raw values of one group of arrays; ``key`` is unused, because they are not random."""
        return map_stacked(self.stacked_axes, self.init_leaves)(dict(arrays))

    def _check_init(self, values: RawValues, arrays: Mapping[str, Array]) -> None:
        """Raises an error unless ``apply_leaves`` turns initial raw values into arrays with the types of ``arrays``."""
        formulas = ("init_leaves", "apply_leaves")
        apply = map_stacked(self.stacked_axes, self.apply_leaves)
        checks.require_valid_init(self, apply, formulas, _as_dicts(values), arrays, is_shared=self.arrays is not None)

    def _apply_at(self, site: Site, values: RawValues, key: Array | None) -> Mapping[str, Any]:
        """Returns the effective arrays of one group by name; ``key`` is unused, because the arrays are not random."""
        return map_stacked(self.stacked_axes, self.apply_leaves)(_as_dicts(values))

    def _check_values(self, values: RawValues, effective: Mapping[str, Any]) -> None:
        """Raises an error unless the raw values have the names and shapes that ``init_leaves(effective)`` returns.

        Nothing is checked if ``init_leaves`` cannot be traced, or if the stage may change the shape or dtype of arrays.
        """
        if self.changes_type:
            return
        with suppress(jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # `init_leaves` may not be traceable.
            expected = jax.eval_shape(map_stacked(self.stacked_axes, self.init_leaves), dict(effective))
            for name, values_of_one in values.items():
                checks.require_fit(values_of_one, expected[name])

    def _update_at(self, site: Site, values: RawValues, grads: Mapping[str, Any], key: Array | None) -> RawValues:
        """Returns the new fixed values that ``update_leaves`` computes for one group of arrays.

        ``update_leaves`` takes neither gradients nor a key, so ``grads`` and ``key`` are unused. A stage on one array,
        in contrast, passes them to its ``update_leaf``.
        """

        def checked_update(values: RawValues) -> RawValues:
            new_values = self.update_leaves(_as_dicts(values))
            checks.require_names("update_leaves", "the new values of", new_values, values)
            for name, new_values_of_one in new_values.items():
                checks.require_update("update_leaves", self, values[name], new_values_of_one)
            return new_values

        return map_stacked(self.stacked_axes, checked_update)(values)

    def _number_at(self, site: Site, formula: str, values: RawValues) -> Array:
        """Returns the scalar result of ``penalty_leaves`` for one group of arrays; ``formula`` is ``"penalty"``."""
        return self._checked_number(f"{formula}_leaves", values)

    def _with_axes(self, tree: Flat) -> list[Any]:
        """Returns a list of this stage, where indices from the roles in ``tree`` replace the word ``"stacked"``.

        All groups must have the same stacked axes. The formula itself handles all other axes, so other fields are kept.
        """
        if self.arrays is None or not has_words(self.stacked):
            return [self]
        groups = self._groups(CallName(self, "with_axes"), tree.leaves())
        roles = {leaf.path: leaf.network_role for group in groups for leaf in group.values()}
        stacked = {path: () if role is None else role.stacked for path, role in roles.items()}
        with checks.locate_errors(CallName(self, "with_axes")):
            return [replace(self, stacked=_same_stacked(stacked, ""))]

    def _misfits(self, tree: Flat) -> Sequence[Misfit]:
        """Returns no misfits, because no field says which axes a joint formula treats as inputs or outputs."""
        return ()

    def _groups(self, who: CallName, leaves: Sequence[Leaf]) -> list[dict[str, Leaf]]:
        """Groups the leaves whose paths capture the same text, and returns each group as a dict from name to leaf.

        ``{"w": "(.*)/kernel", "b": "(.*)/bias"}`` gives ``[{"w": <0/kernel>, "b": <0/bias>}, {"w": <1/kernel>, ...}]``.

        Raises:
          ValueError: If an expression matches no array, an array matches two expressions, two arrays of one group have
            the same name, or a group has no array for one of the names.
        """
        leaves = [leaf for leaf in leaves if leaf.visible and leaf.is_there]
        groups = dict[Any, dict[str, Leaf]]()  # The keys are the texts that the expressions capture.
        name_of_place = dict[Names, str]()  # Each array may have only one name, in one group.
        for name, expression in self.arrays:
            for leaf, captured in _matches(who, name, expression, leaves):
                group = groups.setdefault(captured, {})
                if name in group:
                    raise _second_array_error(who, leaf, name, f"{group[name].path!r} already has this name")
                if leaf.place in name_of_place:
                    raise _second_array_error(who, leaf, name, f"this array is already {name_of_place[leaf.place]!r}")
                group[name], name_of_place[leaf.place] = leaf, name
        for group in groups.values():
            _require_complete(who, group, [name for name, _ in self.arrays])
        return list(groups.values())


def _as_dicts(values: RawValues) -> RawValues:
    """Returns a copy of each dict of raw values, because a user-defined formula may modify its arguments."""
    return {name: dict(values_of_one) for name, values_of_one in values.items()}


def _matches(who: object, name: str, expression: str, leaves: Sequence[Leaf]) -> list[tuple[Leaf, tuple[Any, ...]]]:
    """Returns each leaf whose path matches a regular expression, with the texts that the expression captures.

    ``"(.*)/kernel"`` captures ``("0",)`` in ``0/kernel``. An expression without parentheses captures ``()``, so all
    arrays are in one group. ``name`` is the key of the expression in ``arrays``, which errors show.

    Raises:
      ValueError: If the expression matches no path.
    """
    matches = [(leaf, re.fullmatch(expression, leaf.path)) for leaf in leaves]
    captures = [(leaf, match.groups()) for leaf, match in matches if match]
    if not captures:
        why = why_none_selected(expression, [leaf.path for leaf in leaves])
        raise ValueError(f"{who} found no array for {name!r}: {why}")
    return captures


def _second_array_error(who: object, leaf: Leaf, name: str, conflict: str) -> ValueError:
    """Returns the error for an array whose name is already taken in its group, or that already has another name.

    ``conflict`` is the clause of the error that names the other array or the other name.
    """
    return ValueError(
        f"{who} found {leaf.path!r} for {name!r}, but {conflict}. Capture in parentheses the part of the path that "
        f"differs between layers, as in '(.*)/kernel', and put this stage after stages that split an array."
    )


def _require_complete(who: object, group: Mapping[str, Leaf], names: Sequence[str]) -> None:
    """Raises a ValueError unless a group has an array for each of the ``names`` that the formula uses."""
    if lacking := [name for name in names if name not in group]:
        name, leaf = next(iter(group.items()))
        raise ValueError(
            f"{who} found {leaf.path!r} for {name!r}, but no array for {lacking[0]!r} whose path captures the "
            f"same text. Narrow the expressions to layers that have an array for each of {names}."
        )


def _same_stacked(stacked_by_name: Mapping[str, tuple[int, ...]], source: str) -> tuple[int, ...]:
    """Returns the stacked axes that all arrays share; raises a ValueError if the arrays differ in them.

    ``source`` ends the first sentence of the error, such as " for stacked='layers'", or is empty.
    """
    if len(set(stacked_by_name.values())) > 1:
        raise ValueError(
            f"expected the same stacked axes in all arrays, got {stacked_by_name}{source}. Stack the arrays along "
            f"the same axes, or narrow the expressions to layers with equal stacked axes."
        )
    return next(iter(stacked_by_name.values()))


def _require_equal_stacks(arrays: Mapping[str, Any], stacked: tuple[int, ...]) -> None:
    """Raises a ValueError unless each array has the axes ``stacked``, with the same sizes in all arrays."""
    sizes = {name: None if stacked_axes_error(w, stacked) else stacked_sizes(w, stacked) for name, w in arrays.items()}
    if None in sizes.values() or len(set(sizes.values())) > 1:
        shapes = {name: w.shape for name, w in arrays.items()}
        raise ValueError(
            f"expected the same number of layers along stacked={stacked} in each array, got shapes {shapes}. Set "
            f"`stacked` to axes that have the same size in all of these arrays."
        )


def _hashable_items(arrays: Any, who: str) -> tuple[tuple[str, str], ...]:
    """Returns a dict from names to regular expressions as a hashable tuple of its items.

    ``{"w": "(.*)/kernel"}`` becomes ``(("w", "(.*)/kernel"),)``. Such a tuple is returned unchanged, so that a stage
    can be rebuilt from its own fields. Errors show ``who``, the class of the stage.

    Raises:
      TypeError: If ``arrays`` is neither such a dict nor such a tuple, or is empty.
      ValueError: If an expression is not a valid regular expression.
    """
    items = tuple(arrays.items()) if isinstance(arrays, Mapping) else arrays
    if not isinstance(items, tuple) or not items or not all(map(_is_named_expression, items)):
        raise TypeError(
            f"{who} takes a dict from names to regular expressions as `arrays`, such as {{'w': '(.*)/kernel'}}, but "
            f"got {arrays!r}."
        )
    for _, expression in items:
        check_where(expression, who)
    return items


def _is_named_expression(item: Any) -> bool:
    """Returns whether ``item`` is a tuple of two strings: a name and an expression."""
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(part, str) for part in item)
