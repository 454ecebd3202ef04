"""Formulas that take several arrays at once: what their results must hold."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.tree.markers import require_named_arrays, require_type
from reparax.core.tree.paths import describe, is_array
from reparax.core.tree.values import value_of

Leaves = dict[str, dict[str, Array]]
"""For each array, by its name in the formula, its raw values by their names."""


def require_start(
    stage: Any,
    close: Callable[[Leaves], Any],
    formulas: tuple[str, str],
    values: Leaves,
    arrays: Mapping[str, Array],
    *,
    is_shared: bool,
) -> None:
    """Requires that raw values are those that the class declares, and give arrays of the types of ``arrays``.

    ``close`` gives the arrays; the names of the two formulas are for errors. With ``is_shared``, values of one array
    may stand with another.
    """
    start, back = formulas
    require_names(start, "the values of", values, arrays)
    all_values = {value: w for values_of_one in values.values() for value, w in values_of_one.items()}
    for values_of_one in [all_values] if is_shared else values.values():
        require_named_arrays(start, values_of_one, stage.raw_values)
    effective = jax.eval_shape(close, values)
    require_names(back, "an array for", effective, arrays)
    for name, w in arrays.items():
        if not stage.changes_type:
            require_type(back, effective[name], w)


def require_names(method: str, what: str, result: Any, names: Mapping[str, Any]) -> None:
    """Requires a dict with these names."""
    if not isinstance(result, Mapping) or set(result) != set(names):
        names_got = list(result) if isinstance(result, Mapping) else type(result).__name__
        advice = " Put a value that several arrays share with one of them." if method == "init_leaves" else ""
        raise ValueError(
            f"{method} must return a dict with {what} each of {list(names)}, but returns {names_got}.{advice}"
        )


def require_kept(method: str, stage: Any, values: Mapping[str, Array], new_values: Any) -> None:
    """Requires new values of one array under names that it has, each of the type that it had."""
    if not isinstance(new_values, Mapping):
        raise ValueError(f"{method} must return a dict of named arrays, but returns {describe(new_values)}.")
    for name, new_value in new_values.items():
        if name not in values and name in stage.raw_values:
            raise KeyError(name)  # the raw tree lacks it
        if name not in values:
            raise ValueError(
                f"{method} must return values that the array has, {sorted(values)}, but returns {name!r}. Let the "
                f"start make that value, or correct the name."
            )
        if describe(new_value) != describe(values[name]):
            raise ValueError(
                f"{method} must return {describe(values[name])} as {name!r}, like the raw value, but returns "
                f"{describe(new_value)}. Cast or reshape in {method}."
            )


def require_update(method: str, stage: Any, values: Mapping[str, Array], new_values: Any) -> None:
    """Requires that only fixed values change in a training step, unless the stage moves weights, and no types."""
    require_kept(method, stage, values, new_values)
    free_names = sorted(name for name in new_values if not value_of(stage.raw_values, name).fixed)
    if free_names and not stage.moves_weights:
        fixed_names = [name for name, declaration in stage.raw_values.items() if declaration.fixed]
        raise ValueError(
            f"{method} gives {free_names[0]!r}, which is not one of the fixed values {fixed_names}. Leave it to the "
            f"optimizer, or set `moves_weights = True`."
        )


def require_number(method: str, number: Any) -> None:
    """Requires one real number."""
    if not isinstance(number, int | float) and (not is_array(number) or number.shape != () or jnp.iscomplexobj(number)):
        raise ValueError(f"{method} must return one real number, but returns {describe(number)}. Add up its entries.")
