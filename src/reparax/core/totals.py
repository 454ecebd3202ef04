"""The sums of penalties and of log-determinants over the sites of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax.core.checks import locate_errors
from reparax.core.paths import Names
from reparax.core.plan import Plan, Step, run_steps
from reparax.core.raw import FIXED
from reparax.core.site import Arrays, Site
from reparax.numerics.arithmetic import add_up, is_array


def total_penalty(plan: Plan) -> Array:
    """The sum of the penalties."""
    return add_up([_total("penalty", step.sites, arrays) for step, arrays in _arrays_before(plan)])


def total_log_det(plan: Plan) -> Array:
    """The sum of the log-determinants over the values that train."""
    log_dets = list[Array]()
    producers = dict[Names, Any]()  # the stage of each place with entries that follow from others
    trained = [place for place, x in plan.raw.arrays.items() if is_array(x) and FIXED not in place]
    free_places = {place[:n] for place in trained for n in range(len(place) + 1)}
    for step, arrays in _arrays_before(plan):
        _require_bijection(step.stage)
        free_sites = [site for site in step.sites if not free_places.isdisjoint(site.arrays.values())]
        for site in free_sites:
            with locate_errors(site.who):
                _require_free(site.free_values, free_places, producers)
            n_values = _count_numbers(arrays[place] for place in site.free_values.values())
            if site.stage.overcomplete or n_values < _count_numbers(step.made[place] for place in site.arrays.values()):
                producers |= dict.fromkeys(site.arrays.values(), step.stage)
        log_dets.append(_total("log_det", free_sites, arrays))
    return add_up(log_dets)


def _arrays_before(plan: Plan) -> Iterator[tuple[Step, Arrays]]:
    """Each step, with the arrays that it reads."""
    arrays: Arrays = plan.raw.arrays
    for i, step in enumerate(plan.steps):
        arrays = run_steps(plan.steps[max(i - 1, 0) : i], arrays)
        yield step, arrays


def _total(formula: str, sites: Sequence[Site], arrays: Arrays) -> Array:
    """The sum of a formula over sites."""
    totals: list[Array] = []
    for site in sites:
        with locate_errors(site.who):
            totals.append(jnp.sum(site.stage._number_at(site, formula, site.read(arrays))))
    return add_up(totals)


def _require_bijection(stage: Any) -> None:
    """Requires a stage that defines its log-determinant."""
    if not stage._defines("log_det"):
        raise ValueError(
            f"{stage!r}.log_det: the stage is not a bijection, so its Jacobian has no determinant. "
            f"Use a chain of bijections, such as Positive, Bounded, Scale, Simplex, PositiveDefinite or "
            f"Triangular; a stage of your own needs log_det_leaf(values)."
        )


def _require_free(values: Mapping[str, Names], free_places: set[Names], producers: Mapping[Names, Any]) -> None:
    """Requires that the Jacobian is the one of the formula: no value is frozen, or follows from others."""
    for name, place in values.items():
        if place not in free_places:
            raise ValueError(
                f"expected that all values of an array train, or none, but {name!r} is frozen, and the log-determinant "
                f"counts all. Freeze the others too, or train {name!r}."
            )
        if place in producers:
            raise ValueError(
                f"expected entries that are all free, but some of those that {producers[place]!r} gives follow from "
                f"others, and the log-determinant would count them too. Put the stage before {producers[place]!r} in "
                f"the chain, or write one stage for both with a log_det_leaf."
            )


def _count_numbers(arrays: Iterable[Any]) -> int:
    """The number of real numbers in arrays."""
    return sum(math.prod(x.shape) * (2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1) for x in arrays)
