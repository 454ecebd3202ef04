"""Converts raw trees, and optimizer states, from one chain to another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax._axes.boxes import spread_boxes
from reparax._core.algebra import Parametrization
from reparax._core.calls import require_chains
from reparax._core.keys import Keys
from reparax._core.lineage import lineage_of
from reparax._core.planner import planner_of
from reparax._core.verbs import follow_axes
from reparax._numerics.usage import shows_usage
from reparax._tree.flat import Flat, nest
from reparax._tree.paths import Names, PyTree, flatten_with_names, is_array, items, path_text, types_of_result
from reparax._tree.raw import FIXED, kind_of, outer_markers
from reparax.training._partition import are_free


@shows_usage
def transfer(old: Parametrization, new: Parametrization, raw: PyTree, like: PyTree = None) -> PyTree:
    """Converts a raw tree of ``old``, or an optimizer's state for it, to the chain ``new``; the model does not change.

    A raw value is kept if the same stage made it at the same path (its ``where`` may differ), and all stages around it
    are the same. So is an array that stages only change in place, such as the float32 weight under :class:`Cast`, if
    the same stages change it. Codes of :class:`Stored` are kept too if a new adapter leaves their array as its base;
    under ``jit`` this is not known, and they are rounded anew. All other values are computed by ``init`` from the
    current weights. Random starts draw from ``jax.random.key(0)``: for another key, call ``new.init(old.fold(raw),
    key)``. In an optimizer's state, counters and the moments of kept values are kept; all other moments start at zero.

    A state may have moments for only some of the values that train, as under ``optax.masked``. Then new values are an
    error, because the state does not show which of them need moments.

    ``transfer(p, p, raw)`` converts raw trees of older versions, in which markers were numbered over the whole tree.

    Args:
      old: The chain that made the raw tree.
      new: The chain to convert it to.
      raw: The raw tree, or the state of an optimizer: a tuple that contains trees like the raw tree.
      like: The raw tree of ``old``. Required if ``raw`` is a state without entries for fixed values, such as that of
        :func:`optimizer`, or is not a tuple; or if ``old`` leaves no markers, which identify moments.

    Raises:
      TypeError: If ``old`` or ``new`` is not a parametrization.
      ValueError: If ``old`` did not make ``raw``, if a part of a state does not fit the raw tree, or if the state does
        not show which moments to start.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> old, new = rpx.WeightNorm(), rpx.Positive(where=".*/g") >> rpx.WeightNorm()
      >>> raw = old.init({"w": jnp.ones((3, 2))})
      >>> jax.tree.map(jnp.shape, rpx.transfer(old, new, raw))
      {'w': {'@weight_norm': {'g': {'@positive': {'x': (1, 2)}}, 'v': (3, 2)}}}
    """
    require_chains("transfer(old, new, raw)", old, new)
    if jax.tree.structure(raw) == jax.tree.structure(like) or (like is None and not isinstance(raw, tuple)):
        return _carry_over(raw, old, new)[0]
    return _convert_state(raw, old, new, like)


def _carry_over(raw: PyTree, old: Parametrization, new: Parametrization) -> tuple[PyTree, AbstractSet[Names]]:
    """The new raw tree, and the paths of its nodes that were kept from the old one."""
    old_chain, keys, kept_nodes = _Old(old, raw), Keys(jax.random.key(0)), set[Names]()
    tree = old_chain.effective
    for stage in reversed(tuple(new)):
        layer = planner_of(stage).plan_init(tree)
        stay: dict[Names, Mapping[Names, Array]] = {}
        for site_stage, spot in layer.spots:
            array = tree.arrays[spot.place]
            if not spot.mark and _all_within(kept_nodes, spot.place):
                stay[spot.place] = {spot.place: old_chain.before(site_stage, spot.place, array)}
            elif spot.mark and (values := old_chain.values(site_stage, spot.place, array, kept_nodes)) is not None:
                stay[spot.place] = spot.place_values(values, site_stage.raw_values)
                kept_nodes.update([_path_without_numbers(spot.place)] if _all_within(kept_nodes, spot.place) else [])
        fresh = [site for site in layer.sites if not all(spot.place in stay for spot in site.spots.values())]
        tree = _place(replace(layer, sites=fresh).open(tree, keys), stay)
    return spread_boxes(functools.partial(follow_axes, tuple(new)), nest(old_chain.effective), nest(tree)), kept_nodes


def _place(tree: Flat, values: Mapping[Names, Mapping[Names, Any]]) -> Flat:
    """The tree with these values in place of all that stands at, or below, each of these places."""
    inside: dict[Names, list[Names]] = {place: [] for place in values}
    for at in tree.arrays:
        for place in (at[:n] for n in range(len(at) + 1) if at[:n] in inside):
            inside[place].append(at)
    return tree.swap([(inside[place], new_arrays) for place, new_arrays in values.items()])


@dataclass(frozen=True)
class _Node:
    """An array that a stage made, and the raw values of which it made it."""

    stage: Parametrization
    array: Array
    values: Mapping[str, Array]


class _Old:
    """What a chain makes of a raw tree, and all that lies between.

    Attributes:
      effective: The effective tree.
    """

    def __init__(self, p: Parametrization, raw: PyTree) -> None:
        lineage = lineage_of(p.deterministic, raw, "Pass the chain that made it as `old`.")
        self.effective = lineage.raw
        self._nodes: dict[Names, _Node] = {}
        self._in_place: dict[Names, list[tuple[Parametrization, Array]]] = {}
        for layer in lineage.layers:
            arrays_before, self.effective = self.effective.arrays, layer.close(self.effective, Keys(None))
            for stage, spot in layer.spots:
                if spot.mark:
                    values = {name: arrays_before[at] for name, at in spot.values.items()}
                    self._nodes[_path_without_numbers(spot.place)] = _Node(
                        stage, self.effective.arrays[spot.place], values
                    )
                else:
                    self._in_place.setdefault(_path_without_numbers(spot.place), []).append(
                        (stage, arrays_before[spot.place])
                    )

    def values(
        self, stage: Parametrization, place: Names, array: Array, kept_nodes: AbstractSet[Names]
    ) -> Mapping[str, Array] | None:
        """The old values for an array that a new stage opens, if the same stage made both."""
        node = (
            self._nodes.get(_path_without_numbers(place))
            if _all_within(kept_nodes, place)
            else self._base_of(place, array)
        )
        fits = node is not None and _act_alike(stage, node.stage) and array.shape == node.array.shape
        return node.values if node is not None and fits else None

    def _base_of(self, place: Names, array: Array) -> _Node | None:
        """What the base of a new adapter was, if the adapter left the array unchanged."""
        root = place[: next(i for i, name in enumerate(place) if name.startswith("@"))]
        is_unchanged = FIXED in place and _equal_numbers(array, self.effective.arrays.get(root))
        return self._nodes.get(root) if is_unchanged else None

    def before(self, stage: Parametrization, place: Names, array: Array) -> Array:
        """What a stage that works in place had before, if it was the last to change ``array``; else ``array``."""
        changes = self._in_place.get(_path_without_numbers(place), [])
        return changes.pop()[1] if changes and _act_alike(stage, changes[-1][0]) else array


def _path_without_numbers(path: Names) -> Names:
    """A path without the numbers of markers, which follow from how they are nested."""
    return tuple(f"@{kind_of(name)}" if name.startswith("@") else name for name in path)


def _all_within(nodes: AbstractSet[Names], path: Names) -> bool:
    """Whether all nodes on a path are among these."""
    marks = [i for i, name in enumerate(path) if name.startswith("@") and name != FIXED]
    return all(_path_without_numbers(path[:i]) in nodes for i in marks)


def _act_alike(stage: Parametrization, other_stage: Parametrization) -> bool:
    """Whether two stages act in the same way on an array that both select."""
    names = [field.name for field in dataclasses.fields(stage) if field.name != "where"]
    return type(stage) is type(other_stage) and all(
        _equal_settings(getattr(stage, name), getattr(other_stage, name)) for name in names
    )


def _equal_settings(x: Any, y: Any) -> bool:
    """Whether two settings are equal; those that hold arrays are not."""
    return not any(map(is_array, jax.tree.leaves((x, y)))) and x == y


def _equal_numbers(x: Any, y: Any) -> bool:
    """Whether two arrays are known to be equal."""
    if x is y or not is_array(x) or not is_array(y) or isinstance(x, Tracer) or isinstance(y, Tracer):
        return x is y
    return (x.shape, x.dtype) == (y.shape, y.dtype) and bool(jnp.array_equal(x, y))


def _convert_state(state: PyTree, old: Parametrization, new: Parametrization, like: PyTree) -> PyTree:
    """The state with each part that has the structure of the old raw tree converted."""
    if not jax.tree.leaves(state):
        return state
    part = functools.partial(_is_part, like=like) if like is not None else functools.partial(_is_raw, old=old)
    leaves, treedef = jax.tree.flatten(state, is_leaf=part)
    if not any(map(part, leaves)) or outer_markers(treedef.unflatten([None if part(x) else x for x in leaves])):
        raise ValueError(
            f"transfer found no raw tree of {old!r} in some part of the state. Pass the raw tree that the state "
            f"belongs to as `like`: a state of `rpx.optimizer` has no entries for fixed values, so their shapes come "
            f"from `like`."
        )
    return treedef.unflatten(
        [_convert_moments(x, x if like is None else like, old, new) if part(x) else x for x in leaves]
    )


def _convert_moments(x: PyTree, raw: PyTree, old: Parametrization, new: Parametrization) -> PyTree:
    """Converts a part of a state that has the structure of ``raw``."""
    kept_nodes: set[Names] = set()

    def of_types(raw: PyTree) -> PyTree:
        tree, nodes = _carry_over(raw, old, new)
        kept_nodes.update(nodes)
        return tree

    types = types_of_result(of_types, raw)
    raw_arrays = _arrays_by_path(raw)
    moments = _arrays_by_path(x)
    free = _free_paths(raw)
    has_all = free <= moments.keys() and all(moments[path].shape == raw_arrays[path].shape for path in free)
    nothing = next((leaf for leaf in jax.tree.leaves(x, is_leaf=_is_nothing) if _is_nothing(leaf)), None)

    trains, holds_fixed = _free_paths(types), bool((raw_arrays.keys() - free) & moments.keys())

    def moment(path: Names, like: Any) -> Any:
        if path in raw_arrays and _all_within(kept_nodes, path):
            return moments.get(path, nothing)
        if not is_array(like) or (path not in trains and not holds_fixed):
            return nothing
        if not has_all:
            raise ValueError(
                f"transfer cannot start a moment for {path_text(path)!r}: the state has none for some values that "
                f"train, or moments of other shapes, so it does not show what this one needs. Make a new state with "
                f"`tx.init`."
            )
        dtype = next(iter(moments.values()), like).dtype
        return jnp.zeros(like.shape, dtype if jnp.issubdtype(like.dtype, jnp.inexact) else like.dtype)

    paths, leaves, treedef = flatten_with_names(types)
    return treedef.unflatten(
        [moment(_path_without_numbers(path), leaf) for path, leaf in zip(paths, leaves, strict=True)]
    )


def _arrays_by_path(tree: PyTree) -> dict[Names, Any]:
    """The arrays of a tree by their paths."""
    return {_path_without_numbers(path): x for path, x in items(tree) if is_array(x)}


def _free_paths(tree: PyTree) -> set[Names]:
    """The paths of the values that train."""
    return {
        _path_without_numbers(path)
        for path, free in zip(flatten_with_names(tree)[0], are_free(tree), strict=True)
        if free
    }


def _is_nothing(x: object) -> bool:
    """Whether ``x`` is a placeholder for a value without a moment: None, or optax's empty named tuple."""
    return x is None or (isinstance(x, tuple) and not x and type(x) is not tuple)


def _is_part(x: PyTree, like: PyTree) -> bool:
    """Whether ``x`` holds moments, or placeholders, only at paths of ``like``."""
    inside = (
        {path_text(path) for path in flatten_with_names(x, _is_nothing)[0]} if type(x) is type(like) else set[str]()
    )
    return bool(inside) and inside <= {path_text(path) for path in flatten_with_names(like)[0]}


def _is_raw(x: PyTree, old: Parametrization) -> bool:
    """Whether ``x`` itself is a raw tree of ``old``, by its markers, and not a node that contains one."""
    if any(map(_is_state, jax.tree.leaves(x, is_leaf=_is_state))) or not outer_markers(x):
        return False
    try:
        lineage_of(old.deterministic, x)
    except ValueError:
        return False
    return True


def _is_state(x: object) -> bool:
    """Whether ``x`` is a part of a state that contains other parts."""
    return isinstance(x, tuple) and bool(x)
