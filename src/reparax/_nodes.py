"""What stands under a marker, and what is said where it should not."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax import _paths, _raw
from reparax._paths import PyTree
from reparax._raw import FIXED


def last_mark(who: str, kind: str, tree: PyTree) -> str:
    """The marker of the last stage of ``kind`` that the tree went through."""
    number = _raw.count(tree, kind)
    if number:
        return _raw.marker(kind, number)
    mark = _raw.marker(kind, 1)
    for path, other in _raw.markers(tree).items():
        raise ValueError(f"{who} found no {mark!r} in a raw tree that holds {other!r} at {path!r}: {_raw.OTHER_CHAIN}")
    raise ValueError(
        f"{who} got a tree that never went through init: it holds no {mark!r}. Call `raw = p.init(params)` once, with "
        f"the whole chain, and pass `raw`."
    )


def require_values(node: Any, mark: str) -> None:
    """Refuses what is not named arrays under a marker."""
    for name, held in ((mark, node), (FIXED, node.get(FIXED, {}) if isinstance(node, Mapping) else {})):
        if not isinstance(held, Mapping):
            raise ValueError(f"{name!r} holds no values but {_paths.described(held)}: {_raw.OTHER_CHAIN}")
    for name, value in {**node, **node.get(FIXED, {})}.items():
        if name != FIXED and not _paths.is_array(value):
            raise ValueError(f"the value {name!r} is no array but {type(value).__name__}: {_raw.OTHER_CHAIN}")


def values_under(node: Mapping[str, Any]) -> dict[str, Array]:
    """The values under a marker, of which the fixed ones pass no gradient."""
    free = {name: value for name, value in node.items() if name != FIXED}
    fixed = node.get(FIXED, {})
    return {name: jnp.asarray(value) for name, value in free.items()} | {
        name: jax.lax.stop_gradient(jnp.asarray(value)) for name, value in fixed.items()
    }


def node_of(values: Mapping[str, Array], fixed: tuple[str, ...]) -> dict[str, Any]:
    """What stands under a marker: the values, of which the fixed ones stand apart."""
    free = {name: value for name, value in values.items() if name not in fixed}
    held = {name: values[name] for name in fixed if name in values}
    return {**free, FIXED: held} if held else free


@contextmanager
def located(who: str) -> Generator[None]:
    """Adds who and where to what a formula on one array raises, which knows neither."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{who}: no value {error} under the marker. Restore the whole raw tree.") from error
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    except Exception as error:
        error.add_note(f"This happened in {who}.")
        raise


def require_named_arrays(method: str, values: Any, main: tuple[str, ...] | None, fixed: tuple[str, ...]) -> None:
    """Refuses what ``init_leaf``, or another ``method``, must not give."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{method} must give a dict of named arrays, but gives {_paths.described(values)}.")
    for name, value in values.items():
        if not _paths.is_array(value):
            raise ValueError(
                f"{method} must give a dict of named arrays, but gives {type(value).__name__} for {name!r}."
            )
    lacking = [name for name in fixed if name not in values]
    odd = [name for name in values if not name or set(name) & set("@./")]
    if not values or lacking or odd:
        raise ValueError(
            f"{method} must give at least one value, each fixed one {fixed} and names without '@', '.' and "
            f"'/', but gives {tuple(values)}. Rename or add values in {method}."
        )
    if any(name not in values for name in main or ()):
        raise ValueError(
            f"{method} must give each main value {main}, but gives {tuple(values)}. Rename or add values in {method}."
        )


def require_type(method: str, got: Any, expected: Array) -> None:
    if _paths.described(got) != _paths.described(expected):
        raise ValueError(
            f"{method} must give {_paths.described(expected)}, as the model has it, but gives "
            f"{_paths.described(got)}. Cast or reshape in {method}, or let the stage say `changes_type = True`."
        )
