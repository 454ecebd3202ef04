"""Chains on the roles that a network gives its arrays."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from reparax._axes.origin import Origins, compose_origins, keep_origins
from reparax._axes.roles import Role
from reparax._core.plan import open_params
from reparax._core.planner import Planner, planner_of
from reparax._tree.flat import Flat, flatten
from reparax._tree.paths import Names, PyTree, is_array, items, path_text


def visit_with_roles(
    who: str, stages: Sequence[Any], roles: PyTree, visit: Callable[[Planner, Flat, Mapping[Names, Role]], Any]
) -> list[Any]:
    """The stages that ``visit`` returns for each, one or a chain of several, the last one first.

    It gets the planner of a stage, the types of the arrays that ``init`` of the stage takes, and their roles.
    """
    state, found, new = _start_with_roles(who, roles), list[Any](), list[Any]()
    for stage in reversed(stages):
        for each in reversed(new):
            state = state.opened(each)
        new = list(visit(planner_of(stage), flatten(state.tree), state.roles_of_arrays()))
        found[:0] = new
    return found


def raw_roles(who: str, stages: Sequence[Any], roles: PyTree) -> tuple[PyTree, dict[Names, Role]]:
    """The types of the raw tree of a chain, and the role of each array in it that follows an array of the network."""
    state = _start_with_roles(who, roles)
    for stage in reversed(stages):
        state = state.opened(stage)
    return state.tree, state.roles_of_arrays()


@dataclass(frozen=True)
class _Opened:
    """The tree of types that some stages, the last ones of a chain, make of the parameters.

    Attributes:
      tree: The tree.
      origins: Which axes of the parameters those of its arrays follow.
      first: The roles of the parameters.
    """

    tree: PyTree
    origins: Origins
    first: Mapping[Names, Role]

    def opened(self, stage: Any) -> "_Opened":
        """The tree after ``init`` of one more stage, which is in front of the others."""
        tree, new = planner_of(stage).follow(self.tree, functools.partial(open_params, (stage,)))
        return _Opened(tree, compose_origins(new, self.origins), self.first)

    def roles_of_arrays(self) -> dict[Names, Role]:
        """The role of each raw array, from that of its parameter."""
        known = dict[Names, Role]()
        for place, x in items(self.tree):
            if is_array(x) and (origin := self.origins[place])[0] in self.first:
                source, places = origin
                known[place] = self.first[source].of_value(places, x.shape, x.dtype)
        return known


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


def _start_with_roles(who: str, roles: PyTree) -> _Opened:
    """The parameters, by their types and roles, before any stage."""
    known = roles_of(who, roles)

    def type_of(role: Any) -> Any:
        return jax.ShapeDtypeStruct(role.shape, role.dtype) if isinstance(role, Role) else role

    tree = jax.tree.map(type_of, roles)
    return _Opened(tree, keep_origins(tree), known)
