"""How a raw tree differs from the expected one, for ``p.check``."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from reparax.core.tree.paths import PyTree, describe, is_array, is_empty, items, path_text, types_of_result
from reparax.core.tree.raw import parameter_path

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
