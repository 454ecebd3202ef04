"""Chains on the roles that a network gives its arrays."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from reparax._axes.origin import Origins, compose_origins, keep_origins
from reparax._axes.roles import Role
from reparax._core.planner import planner
from reparax._core.verbs import opened
from reparax._tree.flat import Flat, flatten
from reparax._tree.paths import Names, PyTree, is_array, items, path_text


@dataclass(frozen=True)
class Placed:
    """A stage on a network whose program says what the axes of its weights are.

    Attributes:
      stage: The stage, with axes as numbers.
      tree: The types of the arrays before ``init`` of the stage.
      roles: Their roles.
    """

    stage: Any
    tree: Flat
    roles: Mapping[Names, Role]


def placed(who: str, stages: Sequence[Any], roles: PyTree, *, resolve: bool = True) -> tuple[list[Placed], PyTree]:
    """The stages on a network, and the roles of the arrays of their raw tree; ``resolve`` gives them axes by roles."""
    tree, first = _types(who, roles), {place: role for place, role in items(roles) if isinstance(role, Role)}
    origins, known, found = keep_origins(tree), first, list[Placed]()
    for stage in reversed(stages):
        flat = flatten(tree)
        own = planner(stage).on(flat, known) if resolve else stage
        found.insert(0, Placed(own, flat, known))
        tree, new = planner(own).follow(tree, functools.partial(opened, (own,)))
        origins = compose_origins(new, origins)
        known = _followed(tree, origins, first)
    return found, jax.tree.unflatten(jax.tree.structure(tree), [known.get(place, Role()) for place, _ in items(tree)])


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
