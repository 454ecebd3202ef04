"""The values under a marker, the errors for wrong ones, and how a raw tree differs from the expected one."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
from jax import Array

from reparax.core.paths import PyTree, describe, is_empty, items, path_text, type_of, types_of_result
from reparax.core.raw import FIXED, OTHER_CHAIN, kind_of, marker, outer_markers, parameter_path
from reparax.core.values import OTHERS, Values
from reparax.numerics.arithmetic import is_array

Types = tuple[tuple[str, jax.ShapeDtypeStruct], ...]
"""The types of values, by their names: the items of a dict, which is not hashable."""


def no_own_node_error(who: str, kind: str, tree: PyTree) -> ValueError:
    """The error for a tree in which a stage finds no marker of its own."""
    mark = marker(kind, 1)
    if marks := outer_markers(tree):
        path, found_mark = next(iter(marks.items()))
        if kind_of(found_mark) == kind:
            return ValueError(f"{who} does not know the values under {found_mark!r} at {path!r}: {OTHER_CHAIN}")
        return ValueError(f"{who} found no {mark!r} in a raw tree that holds {found_mark!r} at {path!r}: {OTHER_CHAIN}")
    return ValueError(
        f"{who} got a tree that never went through init: it holds no {mark!r}. Call `raw = p.init(params)` once, with "
        f"the whole chain, and pass `raw`."
    )


def require_values(node: Mapping[str, Any], mark: str) -> None:
    """Requires exactly one marker, with named arrays under it."""
    for name in node:
        if name != mark:
            raise ValueError(f"found {name!r} beside {mark!r}: {OTHER_CHAIN}")
    content = node[mark]
    for name, values in ((mark, content), (FIXED, content.get(FIXED, {}) if isinstance(content, Mapping) else {})):
        if not isinstance(values, Mapping):
            raise ValueError(f"expected a dict of values under {name!r}, got {describe(values)}: {OTHER_CHAIN}")
    if is_empty(content.get(FIXED)):
        raise ValueError(f"found no values under {FIXED!r}. Restore the whole raw tree.")
    for name, value in {**content, **content.get(FIXED, {})}.items():
        if name != FIXED and not is_array(value):
            raise ValueError(f"expected an array as {name!r}, got {_describe_other(value)}: {_explain_other(value)}")


def _describe_other(value: Any) -> str:
    """What came in place of an array; what was a list has become a dict of numbers where a tree was laid flat."""
    return f"a tree with {', '.join(map(repr, value))}" if isinstance(value, Mapping) else type(value).__name__


def _explain_other(value: Any) -> str:
    """Where a value that is not an array may come from, and what to do."""
    if value is None:
        return "this is one half of `rpx.partition`. Join both halves with `rpx.combine` first."
    if isinstance(value, Mapping) and set(value) == {"value"}:
        return (
            "a state of nnx that was restored without its structure. Restore it with a template, or save "
            "`nnx.to_pure_dict(raw)`."
        )
    return OTHER_CHAIN


def require_fit(types: Types, expected: Mapping[str, tuple[int, ...]] | None) -> None:
    """Requires the names and shapes that ``init`` would give, if they are known."""
    if expected is None:
        return
    for name, x in types:
        if name not in expected:
            raise ValueError(f"expected values named {tuple(expected)}, got {name!r}: {OTHER_CHAIN}")
        if x.shape != expected[name]:
            raise ValueError(f"expected {name} of shape {expected[name]}, got {x.shape}: {OTHER_CHAIN}")


def types_under(content: Mapping[str, Any]) -> Types:
    """The type of each value under a marker."""
    values = {**{name: x for name, x in content.items() if name != FIXED}, **content.get(FIXED, {})}
    return tuple((name, type_of(x)) for name, x in sorted(values.items()))


class WrongType(ValueError):
    """A formula returns another type than that of the model's array; ``locate_errors`` keeps it as the cause."""


@contextmanager
def locate_errors(who: str) -> Generator[None]:
    """Adds the stage and the path to errors of a formula on one array, which knows neither."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{who}: no value {error} under the marker. Restore the whole raw tree.") from error
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    except Exception as error:
        if type(error).__name__ == "ShardingTypeError":  # JAX does not export it
            raise ValueError(
                f"{who}: with explicit axes, JAX cannot tell how results of the formula lie on the mesh. Run `init` "
                f"and `update` as `jax.sharding.auto_axes(p.init, out_sharding=p.shardings(params, mesh))(params, "
                f"key)`, and `apply` and `fold` so with the shardings of the parameters."
            ) from error
        error.add_note(f"This happened in {who}.")
        raise


def require_named_arrays(method: str, values: Any, declarations: Values) -> None:
    """Checks the dict that ``init_leaf``, or another ``method``, returns."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{method} must return a dict of named arrays, but returns {describe(values)}.")
    for name, value in values.items():
        if not is_array(value):
            raise ValueError(
                f"{method} must return a dict of named arrays, but returns {type(value).__name__} for {name!r}."
            )
    if not values or any(not name or name == OTHERS or set(name) & set("@./") for name in values):
        raise ValueError(
            f"{method} must return at least one value, and names without '@', '.' and '/', other than '*', but "
            f"returns {tuple(values)}. Rename or add values in {method}."
        )
    required = tuple(name for name, declaration in declarations.items() if name != OTHERS and not declaration.optional)
    if any(name not in values for name in required):
        raise ValueError(
            f"{method} must return each value that the class declares, {required}, but returns {tuple(values)}. "
            f"Rename or add values in {method}."
        )


def require_type(method: str, effective: Any, expected: Array) -> None:
    """Requires that ``method`` returned the shape and dtype of ``expected``, the array that it stands for."""
    if describe(effective) != describe(expected):
        vector = method == "apply_leaf" and expected.ndim < 2
        raise WrongType(
            f"{method} must return {describe(expected)}, like the array that it stands for, but returns "
            f"{describe(effective)}. Cast or reshape in {method}, or set `changes_type = True` in the class"
            f"{', or `min_ndim = 2` to leave vectors alone' if vector else ''}."
        )


T = TypeVar("T")


def by_parameter(tree: PyTree, describe: Callable[[Any], T], *, empty: bool) -> dict[str, dict[str, T]]:
    """For each parameter a description of the arrays under it, and of ``empty`` nodes, by the rest of their paths."""
    values_of: dict[str, dict[str, T]] = {}
    for names, leaf in items(tree, is_empty):
        if is_array(leaf) or (empty and names and is_empty(leaf)):
            base = parameter_path(names)
            path_below = path_text(names).removeprefix(base).removeprefix("/")
            values_of.setdefault(base, {})[path_below] = describe(leaf)
    return values_of


def _outer_marker(content: dict[str, str]) -> str:
    """The outermost marker of a parameter, in words if it has none."""
    path_below = next(iter(content))
    return path_below.split("/")[0] if path_below else "a plain array"


def _short_description(content: dict[str, str]) -> str:
    """A short description of a parameter: its outermost marker, or the type of the plain array."""
    return content.get("") or _outer_marker(content)


def describe_as_stored(x: Any) -> str:
    """A description that distinguishes float64 from float32, also where JAX reads both as float32."""
    return f"{x.dtype}{list(x.shape)}" if is_array(x) else describe(x)


def _list_differences(raw: PyTree, like: PyTree, init: Callable[[PyTree], PyTree]) -> list[str]:
    """A line for each path at which ``raw`` differs from ``init(like)``."""
    plain = all(describe_as_stored(x) == describe(x) for x in jax.tree.leaves(like))
    held = by_parameter(raw, describe_as_stored if plain else describe, empty=True)
    want = by_parameter(types_of_result(init, like), describe, empty=True)
    lines: list[str] = []
    for base in sorted(held.keys() | want.keys()):
        if base not in held:
            lines.append(f"{base}: missing, expected {_short_description(want[base])}")
        elif base not in want:
            lines.append(f"{base}: unexpected, holds {_short_description(held[base])}")
        elif _outer_marker(held[base]) != _outer_marker(want[base]):
            lines.append(f"{base}: expected {_outer_marker(want[base])}, got {_outer_marker(held[base])}")
        else:
            lines += _list_value_differences(base, held[base], want[base])
    return lines


def require_no_differences(who: str, raw: PyTree, like: PyTree, init: Callable[[PyTree], PyTree]) -> None:
    """Raises an error with each path at which a raw tree differs from ``init(like)``."""
    lines = _list_differences(raw, like, init)
    if lines:
        raise ValueError(
            f"{who} found a raw tree that differs from `init(like)`:\n  "
            + "\n  ".join(lines)
            + "\nLoad it with the chain that made it, or start again with `raw = p.init(params)`."
        )


def _list_value_differences(base: str, held: dict[str, str], want: dict[str, str]) -> list[str]:
    """A line for each value that one parameter lacks, has in excess, or has in another type."""

    def line(path_below: str) -> str:
        path = f"{base}/{path_below}" if path_below else base
        if path_below not in held:
            return f"{path}: missing, expected {want[path_below]}"
        if path_below not in want:
            return f"{path}: unexpected, holds {held[path_below]}"
        return f"{path}: expected {want[path_below]}, got {held[path_below]}"

    return [
        line(path_below)
        for path_below in sorted(held.keys() | want.keys())
        if held.get(path_below) != want.get(path_below)
    ]
