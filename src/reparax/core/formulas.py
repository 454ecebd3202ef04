"""How the formulas of a stage meet one array: with which numbers, along which axes, and traced once for each type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core.axes import AxisNames, find_axes, has_names, map_stacked, number_axes, stacked_sizes
from reparax.core.checks import Types, require_named_arrays, require_type, types_under
from reparax.core.fields import TYPICAL, exact_text
from reparax.core.keys import split_key
from reparax.core.origins import FollowedAxes, probe_origins
from reparax.core.paths import describe, has_symbols
from reparax.core.values import value_of
from reparax.numerics.arithmetic import is_array
from reparax.numerics.inlined import inlined
from reparax.numerics.terms import record_terms


@dataclass(frozen=True)
class Arrangement:
    """A stage at one array, and the axes along which independent arrays are stacked there.

    Attributes:
      stage: The formulas: each field that varies is a number, and each axis.
      stacked: The stacked axes, counted from the front; the axes of the stage do not count them.
    """

    stage: Any
    stacked: tuple[int, ...] = ()

    @property
    def stage_for_one(self) -> Any:
        """The stage for one of the stacked arrays."""
        return replace(self.stage, stacked=()) if self.stacked else self.stage

    def over(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula on one array, applied to each of the stacked arrays."""
        return map_stacked(self.stacked, self.stage._on_one(formula))

    def keys(self, key: Array, w: Any) -> Array:
        """A key for each of the arrays stacked in ``w``."""
        return split_key(key, stacked_sizes(w, self.stacked)) if self.stacked else key


def arrange(stage: Any, names: AxisNames | None = None) -> Arrangement:
    """The stage at an array with these axis names; names of stacked axes that it does not have are ignored.

    A number that varies is one that every stage accepts: shapes and dtypes do not depend on it. For the numbers of the
    array itself pass ``stage.for_array(path, w)``.
    """
    stacked, named_axes, varying_fields = find_axes(stage.stacked, names), stage._named_axes, stage._varied
    new: dict[str, Any] = dict.fromkeys(varying_fields, TYPICAL)
    if named_axes or has_names(stage.stacked):
        other_names = None if names is None else tuple(name for i, name in enumerate(names) if i not in stacked)
        new |= {name: number_axes(axes, other_names) for name, axes in named_axes.items()} | {"stacked": stacked}
    return Arrangement(replace(stage, **new) if new else stage, stacked)


def call_once_per_type(method: Callable[..., Any], at: Arrangement, *args: Any) -> Any:
    """``method(at, *args)``; under tracing, one jitted function for all arrays of the same type.

    So it is for stacked arrays too, as each ``jax.vmap`` traces: what is jitted in it would be compiled in each call.
    """
    return _call_traced(_in_a_call, method, at, at.stage, args, traces=at.stacked != ())


def inlined_per_type(method: Callable[..., Any], stage: Any, *args: Any) -> Any:
    """``method(stage, *args)``, the same for a few operations, which stand in the program by themselves."""
    return _call_traced(_by_themselves, method, stage, stage, args, traces=False)


def _call_traced(
    jitted: Callable[..., Any], method: Callable[..., Any], of: Any, stage: Any, args: Any, *, traces: bool
) -> Any:
    """``method(of, *args)`` by ``jitted``, where ``of`` is the stage, or holds it."""
    field_values = {field.name: getattr(stage, field.name) for field in fields(stage)}
    # A function may read values that change between calls.
    impure = any(callable(value) for name, value in field_values.items() if name != "where")
    tracing = traces or any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
    if impure or not tracing or not _is_hashable(stage):
        return method(of, *args)
    return jitted(method, of, exact_text(stage), *args)  # the formula may tell apart what equality does not


def _call_of_equal(method: Callable[..., Any], of: Any, text: str, *args: Any) -> Any:
    """``method(of, *args)``, to be traced once for equal arguments, among them ``text``."""
    del text
    return method(of, *args)


_in_a_call = jax.jit(_call_of_equal, static_argnums=(0, 1, 2))
_by_themselves = inlined(_call_of_equal, static_argnums=(0, 1, 2))


def call_remembered(method: Callable[[Arrangement, Types], Any], at: Arrangement, types: Types) -> Any:
    """``method(at, types)``, cached for equal arrangements."""
    return _call_cached(method, at, types) if _is_hashable(at) else method(at, types)


@lru_cache(maxsize=4096)
def _call_cached(method: Callable[[Arrangement, Types], Any], at: Arrangement, types: Types) -> Any:
    """``method(at, types)``, computed once for equal arguments."""
    return method(at, types)


def _is_hashable(x: Any) -> bool:
    """Whether ``x`` has a hash; a stage with a traced hyperparameter has none."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


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
