"""Chains on the roles that a network gives its arrays."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from reparax._axes.origin import Origins, compose_origins, keep_origins
from reparax._axes.roles import Role
from reparax._core.planner import Planner, planner
from reparax._core.verbs import opened
from reparax._tree.flat import Flat, flatten
from reparax._tree.paths import Names, PyTree, is_array, items, path_text


def over_roles(
    who: str, stages: Sequence[Any], roles: PyTree, visit: Callable[[Planner, Flat, Mapping[Names, Role]], Any]
) -> list[Any]:
    """The stages that ``visit`` returns for each, the last one first.

    It gets the planner of a stage, the types of the arrays that ``init`` of the stage takes, and their roles.
    """
    tree, first = _types(who, roles), {place: role for place, role in items(roles) if isinstance(role, Role)}
    origins, known, found = keep_origins(tree), first, list[Any]()
    for stage in reversed(stages):
        if found:
            tree, new = planner(found[0]).follow(tree, functools.partial(opened, found[:1]))
            origins = compose_origins(new, origins)
            known = _followed(tree, origins, first)
        found.insert(0, visit(planner(stage), flatten(tree), known))
    return found


def _types(who: str, roles: PyTree) -> PyTree:
    """The types of the parameters."""
    for path, role in items(roles):
        if not isinstance(role, Role):
            raise TypeError(
                f"{who} takes what `rpx.roles(loss)(params, batch)` returns, but got a tree with "
                f"{type(role).__name__} at {path_text(path)!r}."
            )
    return jax.tree.map(lambda role: jax.ShapeDtypeStruct(role.shape, role.dtype), roles)


def _followed(tree: PyTree, origins: Origins, first: dict[Names, Role]) -> dict[Names, Role]:
    """The role of each raw array, from that of its parameter."""
    known = dict[Names, Role]()
    for place, x in items(tree):
        source, places = origins[place]
        if source in first and is_array(x):
            known[place] = first[source].of_value(places, x.shape, x.dtype)
    return known
