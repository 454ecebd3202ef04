"""The formulas of a stage on one array, run over stacked arrays, and what they say about types.

The stage has the numbers and axes of its array. What depends on types alone is remembered for equal stages.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax import Array

from reparax._axes.origin import Places, probe
from reparax._data.seen import ANY, Seen, require_data
from reparax._numerics.terms import told
from reparax._stage.remembered import remembered, together
from reparax._tree.markers import (
    Types,
    abstract,
    has_symbols,
    require_named_arrays,
    require_type,
    types_under,
)


def opened_values(stage: Any, w: Array, key: Array | None, seen: Seen | None) -> dict[str, Array]:
    """The raw values of an array, after a check that the formulas fit each other."""
    known = seen if stage._sees else None
    if known is not None:
        require_data(known)
    values = together(_values, stage, w, key, known)
    require_named_arrays("draw_leaf" if stage._draws else "init_leaf", values, stage.raw_values)
    try:
        effective = remembered(_closed_type, stage, types_under(values))
    except KeyError as error:
        given = ", ".join(map(repr, values))
        raise ValueError(f"apply_leaf reads a value {error}, but init_leaf returns only {given}.") from error
    if not stage.changes_type:
        require_type("apply_leaf", effective, w)
    return values


def closed_array(stage: Any, values: Mapping[str, Array]) -> Array:
    """The effective array of raw values; its mean, if it is random."""
    return stage._over(stage.mean_leaf if stage.stochastic else partial(apply_formula, stage))(dict(values))


def closed_at_random(stage: Any, values: Mapping[str, Array], key: Array) -> Array:
    """The random array of raw values."""
    like = remembered(_closed_type, stage, types_under(values))
    drawn = stage._over(partial(apply_formula, stage))(dict(values), stage._each_key(key, like))
    require_type("apply_leaf", drawn, like)
    return drawn


def changed_type(stage: Any, w: Any) -> Any:
    """The type of an array that a stage changes in place."""
    return remembered(_changed_type, stage, type_of_one(w)) if stage.changes_type else w


def type_of_one(w: Any) -> Types:
    """The type of an array, as of values of which it is the only one."""
    return (("w", tuple(w.shape), w.dtype),)


def facts_of(stage: Any, types: Types) -> tuple[Any, dict[str, tuple[int, ...]] | None]:
    """The type of the effective array of values of these types, and the shapes that ``init`` gives for such an array.

    No shapes if they need numbers, or if the effective array has another type than the model's.
    """
    effective = _effective(stage, types)
    if has_symbols(types) or stage.changes_type:
        return effective, None
    try:
        values = jax.eval_shape(lambda w: _values(stage, w, None, ANY), effective)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return effective, None
    return effective, {name: value.shape for name, value in values.items()}


def followed_axes(stage: Any, types: Types) -> dict[str, Places]:
    """For each raw value of an array of that type, which axes of the array its axes follow."""
    origins = probe(lambda tree: {"w": _values(stage, tree["w"], None, ANY)}, abstract(types))
    return {path[-1]: places for path, (_, places) in origins.items()}


def apply_formula(stage: Any, *args: Any) -> Array:
    """``apply_leaf``, which tells its terms if the class declares them."""
    return told(stage.apply_leaf, stage.terms_leaf, *args) if stage._tells else stage.apply_leaf(*args)


def _values(stage: Any, w: Array, key: Array | None, seen: Seen | None) -> dict[str, Array]:
    """The raw values of an array."""
    keys = (stage._each_key(jax.random.key(0) if key is None else key, w),) if stage._draws else ()
    formula = stage.draw_leaf if stage._draws else stage.init_leaf
    if not stage._sees:
        return stage._over(formula)(w, *keys)
    return stage._over(lambda w, seen, *keys: formula(w, *keys, seen=seen))(w, seen, *keys)


def _closed_type(stage: Any, types: Types) -> Any:
    """Shape and dtype of the effective array of raw values of these types."""
    return jax.eval_shape(lambda values: closed_array(stage, values), abstract(types))


def _changed_type(stage: Any, types: Types) -> Any:
    def changed(w: Array) -> Array:
        key = stage._each_key(jax.random.key(0), w) if stage.stochastic else None
        return stage._over(stage.apply_leaf)(w, key)

    return jax.eval_shape(changed, abstract(types)["w"])


def _effective(stage: Any, types: Types) -> Any:
    """Shape and dtype of the effective array of values of these types: those of an aligned main value, if any."""
    held = abstract(types)
    known = [held[name] for name, said in stage.raw_values.items() if said.main and said.aligned and name in held]
    return known[0] if known else _closed_type(stage, types)
