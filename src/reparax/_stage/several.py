"""Formulas that take several arrays at once: what their results must hold."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array

from reparax._tree.markers import require_named_arrays, require_type
from reparax._tree.values import value_of

Leaves = dict[str, dict[str, Array]]
"""For each array, by its name in the formula, its raw values by their names."""


def require_start(
    stage: Any,
    closed: Callable[[Leaves], Any],
    formulas: tuple[str, str],
    values: Leaves,
    arrays: Mapping[str, Array],
    *,
    shared: bool,
) -> None:
    """Requires that raw values are those that the class declares, and give arrays of the types of ``arrays``.

    ``closed`` gives the arrays; the names of the two formulas are for errors. With ``shared``, values of one array may
    stand with another.
    """
    start, back = formulas
    require_names(start, "the values of", values, arrays)
    joined = {value: w for named in values.values() for value, w in named.items()}
    for named in [joined] if shared else values.values():
        require_named_arrays(start, named, stage.raw_values)
    effective = jax.eval_shape(closed, values)
    require_names(back, "an array for", effective, arrays)
    for name, w in arrays.items():
        if not stage.changes_type:
            require_type(back, effective[name], w)


def require_names(method: str, what: str, got: Any, names: Mapping[str, Any]) -> None:
    """Requires a dict with these names."""
    if not isinstance(got, Mapping) or set(got) != set(names):
        given = list(got) if isinstance(got, Mapping) else type(got).__name__
        shared = " Put a value that several arrays share with one of them." if method == "init_leaves" else ""
        raise ValueError(f"{method} must return a dict with {what} each of {list(names)}, but returns {given}.{shared}")


def require_fixed(method: str, stage: Any, changed: Leaves) -> None:
    """Requires that only fixed values change in a training step, unless the stage moves weights."""
    names = {name for named in changed.values() for name in named}
    moved = sorted(name for name in names if not value_of(stage.raw_values, name).fixed)
    if moved and not stage.moves_weights:
        fixed = [name for name, said in stage.raw_values.items() if said.fixed]
        raise ValueError(
            f"{method} gives {moved[0]!r}, which is not one of the fixed values {fixed}. Leave it to the optimizer, or "
            f"set `moves_weights = True`."
        )
