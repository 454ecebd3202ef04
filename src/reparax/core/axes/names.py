"""Axis names that a library stores with an array."""

from typing import Any

import jax

from reparax.core.tree.flat import Flat
from reparax.core.tree.paths import Names, has_ancestor, is_box
from reparax.core.tree.raw import is_aligned

AxisNames = tuple[str | None, ...]


def stated_axes(box: Any) -> Any:
    """What a box of linen or nnx states about the axes of its array, in its own form; None if nothing."""
    if not has_ancestor(box, "Variable"):
        return getattr(box, "names", None)
    return box.get_metadata().get(name_keywords(box)[0])


def name_keywords(variable: Any) -> list[str]:
    """The metadata keys of the axis names of an nnx variable: those of older flax, of newer, or the same under both."""
    keywords = [name for name in ("sharding_names", "out_sharding") if name in variable.get_metadata()]
    return keywords or ["out_sharding"]


def axis_names(box: Any) -> AxisNames | None:
    """The axis names in a box; None if there are none.

    The name of an axis is None if it has no name, or if it is sharded over several mesh axes.
    """
    names = getattr(stated_axes(box), "spec", stated_axes(box))  # of a NamedSharding
    return None if names is None else tuple(name if isinstance(name, str) else None for name in names)


def names_of_places(tree: Flat) -> dict[Names, AxisNames | None]:
    """For each place, the axis names of its parameter's box, if it has the axes of the parameter."""
    nodes = jax.tree.leaves(tree.frame.skeleton, is_leaf=is_box)
    names_of_leaves = [axis_names(node) if is_box(node) else None for node in nodes for _ in jax.tree.leaves(node)]
    names_at = dict(zip(tree.frame.places, names_of_leaves, strict=True))
    return {place: names_at[tree.root(place)] if is_aligned(place) else None for place in tree.arrays}


def require_names_fit(names: AxisNames, w: Any) -> None:
    """Requires one name for each axis; under ``jax.vmap`` an axis is missing."""
    if len(names) != w.ndim:
        raise ValueError(
            f"expected a name for each axis of shape {w.shape}, got {names}. Correct the names of its box."
        )
