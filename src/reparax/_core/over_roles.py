"""Chains on the roles that a network gives its arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from reparax._axes.origin import Origins, compose_origins, keep_origins
from reparax._axes.roles import Role
from reparax._core.planner import Planner, planner_of
from reparax._core.verbs import follow_axes
from reparax._tree.flat import Flat, flatten
from reparax._tree.paths import Names, PyTree, is_array, items, path_text


def visit_with_roles(
    who: str, stages: Sequence[Any], roles: PyTree, visit: Callable[[Planner, Flat, Mapping[Names, Role]], Any]
) -> list[Any]:
    """The stages that ``visit`` returns for each, one or a chain of several, the last one first.

    It gets the planner of a stage, the types of the arrays that ``init`` of the stage takes, and their roles.
    """
    tree, known = _types_and_roles(who, roles)
    origins, found, new = keep_origins(tree), list[Any](), list[Any]()
    for stage in reversed(stages):
        tree, own = follow_axes(new, tree)
        origins = compose_origins(own, origins)
        new = list(visit(planner_of(stage), flatten(tree), _inherit_roles(known, tree, origins)))
        found[:0] = new
    return found


def raw_roles(who: str, stages: Sequence[Any], roles: PyTree) -> tuple[PyTree, dict[Names, Role]]:
    """The types of the raw tree of a chain, and the role of each array in it that follows an array of the network."""
    params, known = _types_and_roles(who, roles)
    tree, origins = follow_axes(stages, params)
    return tree, _inherit_roles(known, tree, origins)


def _inherit_roles(known: Mapping[Names, Role], tree: PyTree, origins: Origins) -> dict[Names, Role]:
    """The role of each array of ``tree`` that follows a parameter, from those of the parameters."""
    found = dict[Names, Role]()
    for place, x in items(tree):
        if is_array(x) and (origin := origins[place])[0] in known:
            source, places = origin
            found[place] = known[source].of_value(places, x.shape, x.dtype)
    return found


def roles_of(who: str, roles: PyTree) -> dict[Names, Role]:
    """The role of each parameter; a model's functions, among its leaves, have none."""
    leaves = list(items(roles))
    found = {path: role for path, role in leaves if isinstance(role, Role)}
    for path, other in leaves:
        if path not in found and (is_array(other) or not found):
            raise TypeError(
                f"{who} takes what `rpx.roles(loss)(params, batch)` returns, but got a tree with "
                f"{type(other).__name__} at {path_text(path)!r}."
            )
    return found


def _types_and_roles(who: str, roles: PyTree) -> tuple[PyTree, dict[Names, Role]]:
    """The types of the parameters, and their roles."""
    known = roles_of(who, roles)

    def type_of(role: Any) -> Any:
        return jax.ShapeDtypeStruct(role.shape, role.dtype) if isinstance(role, Role) else role

    return jax.tree.map(type_of, roles), known
