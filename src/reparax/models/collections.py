"""Raw trees in two trees of dicts: one that trains, and one that does not."""

from collections.abc import Mapping
from typing import Any

import jax

from reparax.core.paths import PyTree
from reparax.training import partition

Dicts = dict[str, Any]


def split_collections(raw: PyTree) -> tuple[Dicts, Dicts]:
    """The free and the fixed values of a raw tree of dicts, each without the places of the other."""
    free, fixed = partition(raw)
    return _prune(free, also_empty=True) or {}, _prune(fixed, also_empty=False) or {}


def join_collections(free: Mapping[str, Any], fixed: Mapping[str, Any]) -> Dicts:
    """The raw tree that :func:`split_collections` made two of."""
    both = {name: join_collections(free[name], fixed[name]) for name in free if name in fixed}
    return {**free, **fixed, **both}


def _prune(tree: PyTree, *, also_empty: bool) -> Any:
    """``tree`` without what holds no value; ``also_empty`` keeps places that hold none of their own."""
    if not isinstance(tree, Mapping):
        return tree if jax.tree.leaves(tree) else None
    kept = {name: _prune(x, also_empty=also_empty) for name, x in tree.items()}
    kept = {name: x for name, x in kept.items() if x is not None}
    return kept if kept or (also_empty and not tree) else None
