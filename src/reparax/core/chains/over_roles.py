"""Chains on the roles that a network gives its arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from reparax.core.axes.origin import Origins, compose_origins, keep_origins
from reparax.core.axes.roles import Role
from reparax.core.chains.planner import Planner, planner_of
from reparax.core.chains.verbs import follow_axes
from reparax.core.tree.flat import Flat, flatten
from reparax.core.tree.paths import Names, PyTree, is_array, items, path_text


def visit_with_roles(
    who: str, stages: Sequence[Any], roles: PyTree, visit: Callable[[Planner, Flat, Mapping[Names, Role]], Any]
) -> list[Any]:
    """The stages that ``visit`` returns for each, one or a chain of several, the last one first.

    It gets the planner of a stage, the types of the arrays that ``init`` of the stage takes, and their roles.
    """
    roles_of_params = roles_of(who, roles)

    def type_of(role: Any) -> Any:
        return jax.ShapeDtypeStruct(role.shape, role.dtype) if isinstance(role, Role) else role

    tree = jax.tree.map(type_of, roles)
    origins, new_stages, new = keep_origins(tree), list[Any](), list[Any]()
    for stage in reversed(stages):
        tree, origins_of_stage = follow_axes(new, tree)
        origins = compose_origins(origins_of_stage, origins)
        new = list(visit(planner_of(stage), flatten(tree), _inherit_roles(roles_of_params, tree, origins)))
        new_stages[:0] = new
    return new_stages


def _inherit_roles(roles_of_params: Mapping[Names, Role], tree: PyTree, origins: Origins) -> dict[Names, Role]:
    """The role of each array of ``tree`` that follows a parameter, from those of the parameters."""
    roles = dict[Names, Role]()
    for place, x in items(tree):
        if is_array(x) and (origin := origins[place])[0] in roles_of_params:
            source, places = origin
            roles[place] = roles_of_params[source].of_value(places, x.shape, x.dtype)
    return roles


def roles_of(who: str, roles: PyTree) -> dict[Names, Role]:
    """The role of each parameter; a model's functions, among its leaves, have none."""
    leaves = list(items(roles))
    roles_by_place = {path: role for path, role in leaves if isinstance(role, Role)}
    for path, leaf in leaves:
        if path not in roles_by_place and (is_array(leaf) or not roles_by_place):
            raise TypeError(
                f"{who} takes what `rpx.roles(loss, params, batch)` returns, but got a tree with "
                f"{type(leaf).__name__} at {path_text(path)!r}."
            )
    return roles_by_place
