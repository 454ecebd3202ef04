"""What the methods of a chain do once their arguments are checked: loops over its stages, on trees laid flat."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from reparax.core.axes.origin import Origins, compose_origins, keep_origins
from reparax.core.chains.keys import Keys
from reparax.core.chains.layers import Site
from reparax.core.chains.plan import close_all, open_params, walk
from reparax.core.chains.planner import planner_of
from reparax.core.tree.flat import Flat, graft
from reparax.core.tree.markers import locate_errors
from reparax.core.tree.paths import Names, PyTree, is_array
from reparax.core.tree.raw import FIXED
from reparax.core.tree.values import value_of
from reparax.numerics.arithmetic import add_up

Stages = Sequence[Any]


def follow_axes(stages: Stages, params: PyTree) -> tuple[PyTree, Origins]:
    """The shapes of the raw tree, and for each of their axes the axis of ``params`` that it follows."""
    tree, origins = params, keep_origins(params)
    for stage in reversed(stages):
        tree, origins_of_stage = planner_of(stage).follow(tree, functools.partial(open_params, (stage,)))
        origins = compose_origins(origins_of_stage, origins)
    return tree, origins


def rebase_raw(stages: Stages, tree: Flat) -> Flat:
    """The raw tree with each base at the current point."""
    for i, stage in enumerate(stages):
        if planner_of(stage).does("rebase"):
            effective = close_all(mean_stages(stages[:i]), tree, Keys(None))
            rebased = planner_of(stage).plan("rebase", effective.types).rebase(effective)
            tree = graft("rebase", tree, effective, rebased, free=True)
    return tree


def total_penalty(stages: Stages, tree: Flat) -> jax.Array:
    """The sum of the penalties."""
    return add_up([layer.penalty(effective) for layer, effective in walk("penalty", mean_stages(stages), tree)])


def total_log_det(stages: Stages, tree: Flat) -> jax.Array:
    """The sum of the log-determinants over the values that train."""
    log_dets, makers = list[jax.Array](), dict[Names, Any]()
    places = [place for place, x in tree.arrays.items() if is_array(x) and FIXED not in place]

    def is_free(place: Names) -> bool:
        return any(other_place[: len(place)] == place for other_place in places)

    for layer, effective in walk("log_det", mean_stages(stages), tree):
        if not planner_of(layer.stage).does("log_det"):
            raise ValueError(
                f"{layer.stage!r}.log_det: the stage is not a bijection, so its Jacobian has no determinant. "
                f"Use a chain of bijections, such as Positive, Bounded, Scale, Simplex, PositiveDefinite or "
                f"Triangular; a stage of your own needs log_det_leaf(values)."
            )
        sites = [site for site in layer.sites if any(is_free(spot.place) for spot in site.spots.values())]
        for site in sites:
            with locate_errors(layer.who_at(site)):
                _require_free_values(site, is_free, makers)
            values = [effective.arrays[place] for place in _free_values(site).values()]
            entries = [spot.type for spot in site.spots.values()]
            if site.stage.overcomplete or sum(map(_real_size, values)) < sum(map(_real_size, entries)):
                makers |= {spot.place: layer.stage for spot in site.spots.values()}
        log_dets.append(replace(layer, sites=sites).log_det(effective))
    return add_up(log_dets)


def _require_free_values(site: Site, is_free: Callable[[Names], bool], makers: Mapping[Names, Any]) -> None:
    """Requires that the Jacobian of a site is the one of its formula: no value is frozen, or follows from others.

    ``makers`` gives the stage of each place with entries that follow from others.
    """
    for name, place in _free_values(site).items():
        if not is_free(place):
            raise ValueError(
                f"expected that all values of an array train, or none, but {name!r} is frozen, and the log-determinant "
                f"counts all. Freeze the others too, or train {name!r}."
            )
        if place in makers:
            raise ValueError(
                f"expected entries that are all free, but some of those that {makers[place]!r} gives follow from "
                f"others, and the log-determinant would count them too. Put the stage before {makers[place]!r} in the "
                f"chain, or write one stage for both with a log_det_leaf."
            )


def _free_values(site: Site) -> dict[str, Names]:
    """The places of the values that the stage declares free."""
    values = [item for spot in site.spots.values() for item in spot.values.items()]
    return {name: place for name, place in values if not value_of(site.stage.raw_values, name).fixed}


def _real_size(x: Any) -> int:
    """The number of real numbers in an array."""
    return math.prod(x.shape) * (2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1)


def mean_stages(stages: Stages) -> list[Any]:
    """The stages without randomness."""
    return [part for stage in stages for part in stage.deterministic._parts]
