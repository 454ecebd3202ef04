"""The formulas of a stage on one array, run over stacked arrays, and their types.

What depends on types alone is remembered for equal arrangements.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax import Array

from reparax.core.axes.origin import FollowedAxes, probe_origins
from reparax.core.stages.arrangement import Arrangement
from reparax.core.stages.remembered import call_once_per_type, call_remembered
from reparax.core.tree.markers import Types, require_named_arrays, require_type, types_under
from reparax.core.tree.paths import has_symbols
from reparax.numerics.terms import record_terms


def open_values(at: Arrangement, w: Array, key: Array | None) -> dict[str, Array]:
    """The raw values of an array, after a check that the formulas fit each other."""
    values = call_once_per_type(_init_values, at, w, key)
    start = "draw_leaf" if at.stage._draws else "init_leaf"
    formula = "mean_leaf" if at.stage.stochastic else "apply_leaf"
    require_named_arrays(start, values, at.stage.raw_values)
    try:
        effective = call_remembered(_closed_type, at, types_under(values))
    except KeyError as error:
        names = ", ".join(map(repr, values))
        raise ValueError(f"{formula} reads a value {error}, but {start} returns only {names}.") from error
    if not at.stage.changes_type:
        require_type(formula, effective, w)
    return values


def close_array(at: Arrangement, values: Mapping[str, Array]) -> Array:
    """The effective array of raw values; its mean, if it is random."""
    stage = at.stage
    return at.over(stage.mean_leaf if stage.stochastic else partial(apply_formula, stage))(dict(values))


def close_at_random(at: Arrangement, values: Mapping[str, Array], key: Array) -> Array:
    """The random array of raw values."""
    like = call_remembered(_closed_type, at, types_under(values))
    effective = at.over(partial(apply_formula, at.stage))(dict(values), at.keys(key, like))
    require_type("apply_leaf", effective, like)
    return effective


def type_in_place(at: Arrangement, w: Any) -> Any:
    """The type of an array that a stage changes in place."""
    return call_remembered(_trace_in_place, at, types_under({"w": w})) if at.stage.changes_type else w


def facts_of(at: Arrangement, types: Types) -> tuple[Any, dict[str, tuple[int, ...]] | None]:
    """The type of the effective array of values of these types, and the shapes that ``init`` gives for such an array.

    No shapes if they need numbers, or if the effective array has another type than the model's.
    """
    effective = _effective_type(at, types)
    if has_symbols(dict(types).values()) or at.stage.changes_type:
        return effective, None
    try:
        values = jax.eval_shape(lambda w: _init_values(at, w, None), effective)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return effective, None
    return effective, {name: value.shape for name, value in values.items()}


def followed_axes(at: Arrangement, types: Types) -> dict[str, FollowedAxes]:
    """For each raw value of an array of that type, which axes of the array its axes follow."""
    origins = probe_origins(lambda tree: {"w": _init_values(at, tree["w"], None)}, dict(types))
    return {path[-1]: places for path, (_, places) in origins.items()}


def apply_formula(stage: Any, *args: Any) -> Array:
    """``apply_leaf``, which tells its terms if the class declares them."""
    declares_terms = stage._declares_terms
    return record_terms(stage.apply_leaf, stage.terms_leaf, *args) if declares_terms else stage.apply_leaf(*args)


def _init_values(at: Arrangement, w: Array, key: Array | None) -> dict[str, Array]:
    """The raw values of an array."""
    if not at.stage._draws:
        return at.over(at.stage.init_leaf)(w)
    return at.over(at.stage.draw_leaf)(w, at.keys(jax.random.key(0) if key is None else key, w))


def _closed_type(at: Arrangement, types: Types) -> Any:
    """Shape and dtype of the effective array of raw values of these types."""
    return jax.eval_shape(lambda values: close_array(at, values), dict(types))


def _trace_in_place(at: Arrangement, types: Types) -> Any:
    """Shape and dtype of what ``apply_leaf`` makes of an array of this type in place."""

    def perturb(w: Array) -> Array:
        key = at.keys(jax.random.key(0), w) if at.stage.stochastic else None
        return at.over(at.stage.apply_leaf)(w, key)

    return jax.eval_shape(perturb, dict(types)["w"])


def _effective_type(at: Arrangement, types: Types) -> Any:
    """Shape and dtype of the effective array of values of these types: those of an aligned main value, if any."""
    type_of_value = dict(types)
    main_types = [
        type_of_value[name]
        for name, declaration in at.stage.raw_values.items()
        if declaration.main and declaration.aligned and name in type_of_value
    ]
    return main_types[0] if main_types else _closed_type(at, types)
