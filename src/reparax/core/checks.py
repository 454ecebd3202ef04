"""Checks raw values and the results of formulas, and lists how a raw tree differs from the expected tree.

A ``require_...`` function returns None, or raises an error that says what was expected, what was found and what to do.
Formulas do not know for which array they are called, so :func:`locate_errors` adds the stage and the path to errors.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.paths import PyTree, describe, is_empty, items, path_text, types_of_result
from reparax.core.raw import OTHER_CHAIN, parameter_path
from reparax.core.values import OTHERS, RawValues, Values, value_of
from reparax.numerics.arithmetic import is_array


def require_fit(values: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises an error unless raw values have the names and shapes of ``expected``, the values that ``init`` would give.

    Dtypes may differ, for example after a cast of the raw tree. Values may be missing, because a formula that needs a
    missing value raises an error itself.
    """
    for name, x in values.items():
        if name not in expected:
            raise ValueError(f"expected raw values named {tuple(expected)}, but got {name!r}: {OTHER_CHAIN}")
        if x.shape != expected[name].shape:
            raise ValueError(f"expected {name!r} of shape {expected[name].shape}, but got {x.shape}: {OTHER_CHAIN}")


class WrongType(ValueError):
    """Raised if a formula returns an array of the wrong shape or dtype; ``locate_errors`` keeps it as the cause."""


@contextmanager
def locate_errors(who: object) -> Generator[None]:
    """Adds ``who``, the call of a stage at an array, to errors raised in the ``with`` block by formulas.

    A KeyError becomes a ValueError, because formulas look up raw values by name, so a KeyError means that a value is
    missing. Errors of other classes than ValueError keep their class, and get ``who`` as a note.
    """
    try:
        yield
    except KeyError as error:
        raise ValueError(
            f"{who}: a formula looked up {error}, which does not exist. If it is a raw value, restore the whole raw "
            f"tree; otherwise, correct the name in the formula."
        ) from error
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    except Exception as error:
        if type(error).__name__ == "ShardingTypeError":  # JAX does not export this class.
            raise ValueError(
                f"{who}: with explicit mesh axes, JAX cannot infer the sharding of the formula's result. Run `init` "
                f"and `update` as `jax.sharding.auto_axes(p.init, out_sharding=p.shardings(params, mesh))(params, "
                f"key)`, and `apply` and `fold` in the same way with the shardings of the parameters."
            ) from error
        error.add_note(f"This happened in {who}.")
        raise


def _require_dict(method: str, values: Any) -> None:
    """Raises a ValueError unless ``values``, the result of the formula ``method``, is a dict."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{method} must return a dict of arrays, such as {{'x': x}}, but returns {describe(values)}.")


def require_named_arrays(method: str, values: Any, declarations: Values) -> None:
    """Raises a ValueError unless a formula such as ``init_leaf`` returned a dict of arrays with all declared names.

    Only values that are declared as optional may be missing. Undeclared names are allowed, unless they are empty or
    contain a character that is reserved in paths and markers.
    """
    _require_dict(method, values)
    for name, value in values.items():
        if not is_array(value):
            raise ValueError(
                f"{method} must return a dict of arrays, but returns {type(value).__name__} for {name!r}. Convert it "
                f"to an array."
            )
    if not values or any(not name or name == OTHERS or set(name) & set("@./") for name in values):
        raise ValueError(
            f"{method} must return at least one value, with nonempty names other than '*' and without '@', '.' and "
            f"'/', but returns values named {tuple(values)}. Rename or add values in {method}."
        )
    # The name "*" declares values of any name, so it requires no particular value.
    required = tuple(name for name, declaration in declarations.items() if name != OTHERS and not declaration.optional)
    if not values.keys() >= set(required):
        raise ValueError(
            f"{method} must return each value that the class declares, {required}, but returns values named "
            f"{tuple(values)}. Rename or add values in {method}."
        )


def require_type(method: str, effective: Any, expected: Array) -> None:
    """Raises an error unless a formula returned ``effective`` with the shape and dtype of ``expected``."""
    if describe(effective) != describe(expected):
        is_vector = method == "apply_leaf" and expected.ndim < 2
        raise WrongType(
            f"{method} must return {describe(expected)}, like the array that it replaces, but returns "
            f"{describe(effective)}. Cast or reshape in {method}, or set `changes_type = True` in the class"
            f"{', or `min_ndim = 2` to leave vectors alone' if is_vector else ''}."
        )


T = TypeVar("T")


def by_parameter(tree: PyTree, describe: Callable[[Any], T], *, empty: bool) -> dict[str, dict[str, T]]:
    """Maps the path of each parameter to a dict with ``describe(x)`` for each of its arrays ``x`` in a raw tree.

    ``{"out": {"@weight_norm": {"g": g, "v": v}}}`` gives ``{"out": {"@weight_norm/g": ..., "@weight_norm/v": ...}}``.
    The inner key of a plain array is "". Leaves that are not arrays are left out. If ``empty`` is true, empty nodes,
    such as those of tied arrays, are described too.
    """
    descriptions = dict[str, dict[str, T]]()
    for names, leaf in items(tree, is_empty):
        if is_array(leaf) or (empty and names and is_empty(leaf)):
            parameter = parameter_path(names)
            path_below = path_text(names).removeprefix(parameter).removeprefix("/")
            descriptions.setdefault(parameter, {})[path_below] = describe(leaf)
    return descriptions


def _outermost(content: dict[str, str]) -> str | None:
    """Returns the outermost marker of a parameter, or the type of a plain array, or None if ``content`` is empty.

    ``{"@weight_norm/g": "float32[1, 4]", ...}`` gives ``"@weight_norm"``, and ``{"": "float32[2]"}`` gives
    ``"float32[2]"``. Only the first key is read, because all values of a parameter are below one marker.
    """
    path_below = next(iter(content), None)
    return None if path_below is None else path_below.split("/")[0] or content[path_below]


def describe_as_stored(x: Any) -> str:
    """Describes ``x`` like :func:`describe`, but with its dtype as stored, such as float64 where JAX reads float32."""
    return f"{x.dtype}{list(x.shape)}" if is_array(x) else describe(x)


def _list_differences(raw: PyTree, like: PyTree, init: Callable[[PyTree], PyTree]) -> list[str]:
    """Returns one line for each path at which ``raw`` differs from ``init(like)``; empty if all types are equal."""
    # `init` returns dtypes as JAX reads them. If `like` is stored in other dtypes, such as float64, `raw` may be stored
    # in them too.
    keeps_dtypes = all(describe_as_stored(x) == describe(x) for x in jax.tree.leaves(like))
    found = by_parameter(raw, describe_as_stored if keeps_dtypes else describe, empty=True)
    expected = by_parameter(types_of_result(init, like), describe, empty=True)
    paths = sorted(found.keys() | expected.keys())
    return [line for path in paths for line in _differences_of(path, found.get(path, {}), expected.get(path, {}))]


def _differences_of(parameter: str, found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Returns the error lines about one parameter: one line for the whole parameter, or one for each wrong value.

    There is a line for the whole parameter if it is missing, unexpected, or made by another stage. ``found`` and
    ``expected`` map the path of each value below the parameter to the value's type; empty if there is no parameter.
    """
    if _outermost(found) != _outermost(expected):
        return [_difference(parameter, _outermost(found), _outermost(expected))]
    paths_below = sorted(found.keys() | expected.keys())
    return [
        _difference(f"{parameter}/{path}", found.get(path), expected.get(path))
        for path in paths_below
        if found.get(path) != expected.get(path)
    ]


def _difference(path: str, found: str | None, expected: str | None) -> str:
    """Returns the error line for a path at which the type ``found`` differs from the type ``expected``.

    If ``found`` is None, the path is missing; if ``expected`` is None, the path should not exist.
    """
    if found is None:
        return f"{path}: missing, expected {expected}"
    return f"{path}: unexpected, holds {found}" if expected is None else f"{path}: expected {expected}, got {found}"


def require_no_differences(who: object, raw: PyTree, like: PyTree, init: Callable[[PyTree], PyTree]) -> None:
    """Raises a ValueError that lists each path at which the types of ``raw`` and ``init(like)`` differ, if any."""
    lines = _list_differences(raw, like, init)
    if lines:
        raise ValueError(
            f"{who} found a raw tree that differs from `init(like)`:\n  "
            + "\n  ".join(lines)
            + "\nLoad it with the chain that made it, or start again with `raw = p.init(params)`."
        )


def require_valid_init(
    stage: Any,
    apply: Callable[[RawValues], Any],
    formulas: tuple[str, str],
    values: RawValues,
    arrays: Mapping[str, Array],
    *,
    is_shared: bool,
) -> None:
    """Raises an error unless initial raw values have the names that the class declares, and ``apply`` accepts them.

    Args:
      stage: The stage.
      apply: Computes effective arrays from raw values. They must have the types of ``arrays``.
      formulas: The names of the formulas for ``init`` and ``apply``, for errors.
      values: The raw values that ``init`` returned.
      arrays: The arrays from which ``init`` computed the values.
      is_shared: Whether the arrays share the declared values, so that each value may belong to only one of the arrays.
        Otherwise, each array must have all declared values.
    """
    init_formula, apply_formula = formulas
    advice = " Return a value that several arrays share under the name of one of them." if is_shared else ""
    # Check the names first, because the checks below look up the values of each array.
    require_names(init_formula, "the values of", values, arrays, advice)
    all_values = {value: w for values_of_one in values.values() for value, w in values_of_one.items()}
    for values_of_one in [all_values] if is_shared else values.values():
        require_named_arrays(init_formula, values_of_one, stage.raw_values)
    effective = jax.eval_shape(apply, values)
    require_names(apply_formula, "an array for", effective, arrays)
    if not stage.changes_type:
        for name, w in arrays.items():
            require_type(apply_formula, effective[name], w)


def require_names(method: str, what: str, result: Any, names: Mapping[str, Any], advice: str = "") -> None:
    """Raises a ValueError unless ``result``, which a formula returned, is a dict with exactly the keys of ``names``.

    Args:
      method: The name of the formula, for the error.
      what: The content of the dict for each name, for the error: ``"an array for"``, ``"the values of"``.
      result: The object that the formula returned.
      names: A dict with the expected names.
      advice: The last part of the error; it begins with a space unless it is empty.
    """
    if not isinstance(result, Mapping) or set(result) != set(names):
        found = f"one with the keys {list(result)}" if isinstance(result, Mapping) else type(result).__name__
        raise ValueError(
            f"{method} must return a dict with {what} each of {list(names)} and no other keys, but returns "
            f"{found}.{advice}"
        )


def require_kept(method: str, stage: Any, values: Mapping[str, Array], new_values: Any) -> None:
    """Raises an error unless a formula returned new raw values with names and types as in the array's ``values``.

    ``new_values`` may omit values. A KeyError is raised for a declared value that the raw tree lacks;
    :func:`locate_errors` turns it into a ValueError.
    """
    _require_dict(method, new_values)
    for name, new_value in new_values.items():
        if name not in values and name in stage.raw_values:
            raise KeyError(name)  # The raw tree lacks this value.
        if name not in values:
            raise ValueError(
                f"{method} must return only values that the array already has, {sorted(values)}, but returns "
                f"{name!r}. Return that value from the formula for `init` too, or correct the name."
            )
        if describe(new_value) != describe(values[name]):
            raise ValueError(
                f"{method} must return {describe(values[name])} as {name!r}, like the raw value, but returns "
                f"{describe(new_value)}. Cast or reshape in {method}."
            )


def require_update(method: str, stage: Any, values: Mapping[str, Array], new_values: Any) -> None:
    """Raises an error if an update changes types, or changes trained values although ``moves_weights`` is False.

    ``method`` is the formula, ``update_leaf`` or ``update_leaves``; ``values`` and ``new_values`` belong to one array.
    """
    require_kept(method, stage, values, new_values)
    free_names = sorted(name for name in new_values if not value_of(stage.raw_values, name).fixed)
    if free_names and not stage.moves_weights:
        fixed_names = [name for name, declaration in stage.raw_values.items() if declaration.fixed]
        raise ValueError(
            f"{method} must return only the fixed values {fixed_names}, but returns the trained value "
            f"{free_names[0]!r}. Leave it to the optimizer, or set `moves_weights = True` in the class."
        )


def require_number(method: str, number: Any) -> None:
    """Raises an error unless a formula such as ``penalty_leaf`` returned a real number or a real scalar array."""
    if not isinstance(number, int | float) and (not is_array(number) or number.shape != () or jnp.iscomplexobj(number)):
        raise ValueError(f"{method} must return one real number, such as jnp.sum(x), but returns {describe(number)}.")
