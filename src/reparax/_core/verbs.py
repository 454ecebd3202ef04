"""What the methods of a chain do once their arguments are checked: loops over its stages, on trees laid flat."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from reparax._axes.origin import Origins, compose_origins, keep_origins
from reparax._core.keys import Keys
from reparax._core.plan import close_all, open_params, walk
from reparax._core.planner import planner_of
from reparax._numerics.arithmetic import add_up
from reparax._tree.flat import Flat, graft
from reparax._tree.paths import Names, PyTree, is_array
from reparax._tree.raw import FIXED

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
    log_dets = list[jax.Array]()
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
        log_dets.append(layer.log_det(effective, is_free))
    return add_up(log_dets)


def mean_stages(stages: Stages) -> list[Any]:
    """The stages without randomness."""
    return [part for stage in stages for part in stage.deterministic._parts]
