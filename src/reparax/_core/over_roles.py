"""Chains on the roles that a network gives its arrays."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    state, found = _start(who, roles), list[Any]()
    for stage in reversed(stages):
        if found:
            state = state.opened(found[0])
        found.insert(0, visit(planner(stage), flatten(state.tree), state.known()))
    return found


def raw_roles(who: str, stages: Sequence[Any], roles: PyTree) -> tuple[PyTree, dict[Names, Role]]:
    """The types of the raw tree of a chain, and the role of each array in it that follows an array of the network."""
    state = _start(who, roles)
    for stage in reversed(stages):
        state = state.opened(stage)
    return state.tree, state.known()


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
        tree, new = planner(stage).follow(self.tree, functools.partial(opened, (stage,)))
        return _Opened(tree, compose_origins(new, self.origins), self.first)

    def known(self) -> dict[Names, Role]:
        """The role of each raw array, from that of its parameter."""
        known = dict[Names, Role]()
        for place, x in items(self.tree):
            source, places = self.origins[place]
            if source in self.first and is_array(x):
                known[place] = self.first[source].of_value(places, x.shape, x.dtype)
        return known


def require_roles(who: str, roles: PyTree) -> PyTree:
    """The tree itself, if it is one of roles."""
    for path, role in items(roles):
        if not isinstance(role, Role):
            raise TypeError(
                f"{who} takes what `rpx.roles(loss)(params, batch)` returns, but got a tree with "
                f"{type(role).__name__} at {path_text(path)!r}."
            )
    return roles


def _start(who: str, roles: PyTree) -> _Opened:
    """The types of the parameters."""
    require_roles(who, roles)
    tree = jax.tree.map(lambda role: jax.ShapeDtypeStruct(role.shape, role.dtype), roles)
    return _Opened(tree, keep_origins(tree), dict(items(roles)))
