"""Selection: which arrays of a tree a stage acts on."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.tree_util import register_static

from reparax import _manifest
from reparax._paths import PyTree, described, has_ancestor, is_array, named, text
from reparax._raw import Slot, parameter

Where = str | Callable[[str, Any], bool] | None


@register_static
@dataclass(frozen=True, repr=False)
class Selected:
    """The predicate that :func:`selected` makes: true at, and everywhere below, the given paths."""

    paths: tuple[str, ...]

    def __repr__(self) -> str:
        return f"selected({dict.fromkeys(self.paths, True)})"

    def __call__(self, path: str, array: object) -> bool:
        del array
        return any(chosen in ("", path) or path.startswith(f"{chosen}/") for chosen in self.paths)


_manifest.register(Selected)


def selected(mask: PyTree) -> Selected:
    """A predicate for ``where`` from a tree of booleans, as optax's masks are.

    Args:
      mask: Booleans in the structure of the parameters, or of a part of it from the root (a prefix).

    Example:
      >>> import reparax as rpx
      >>> rpx.VarNoise(0.1, where=rpx.selected({"dense": {"kernel": True, "bias": False}, "norm": False}))
      VarNoise(0.1, where=selected({'dense/kernel': True}))
    """
    paths, flags, _ = named(mask)
    for path, flag in zip(paths, flags, strict=True):
        if not isinstance(flag, bool):
            got = described(flag) if is_array(flag) else repr(flag)
            raise TypeError(f"selected takes a tree of booleans, but got {got} at {text(path)!r}. Write True or False.")
    return Selected(tuple(text(path) for path, flag in zip(paths, flags, strict=True) if flag))


def nearest(path: str, paths: Iterable[str]) -> str:
    """The paths that a misspelt one may have meant, for an error."""
    return ", ".join(map(repr, difflib.get_close_matches(path, list(paths), n=3, cutoff=0.0)))


def matches(pattern: str, paths: Iterable[str]) -> list[re.Match[str]]:
    """The paths that a regular expression matches as a whole; a pattern that is a path itself means that one."""
    known = list(dict.fromkeys(paths))
    try:
        found = [re.fullmatch(re.escape(pattern) if pattern in known else pattern, path) for path in known]
    except re.error:
        return []
    return [match for match in found if match]


def checked(where: Where, owner: str) -> None:
    """Refuses what cannot select, when the stage is built."""
    if isinstance(where, str):
        try:
            re.compile(where)
        except re.error as error:
            raise ValueError(f"{owner} got where={where!r}, which is not a regular expression: {error}.") from error
    elif where is not None and not callable(where):
        got = "where" if any(map(is_array, jax.tree.leaves(where))) else f"where={where!r}"
        raise TypeError(
            f"{owner} got {got} of type {type(where).__name__}, but takes a regular expression for the whole "
            f"path or a predicate (path, array) -> bool. Wrap a tree of booleans in `rpx.selected`."
        )


def is_state(tree: PyTree) -> list[bool]:
    """For each leaf, whether it is model state: an nnx variable but ``Param``, a linen collection but ``params``.

    A collection holds arrays by name: an array beside ``params``, such as a temperature, is a parameter.
    """
    paths, nodes, _ = named(tree, lambda x: has_ancestor(x, "Variable"))
    collections = {path[0] for path in paths if path}
    flags: list[bool] = []
    for path, node in zip(paths, nodes, strict=True):
        other_variable = has_ancestor(node, "Variable") and not has_ancestor(node, "Param")
        beside_params = "params" in collections and path[0] != "params" and "/" in parameter(path)
        other_collection = "batch_stats" in path or beside_params
        flags += [other_variable or other_collection] * len(jax.tree.leaves(node))
    return flags


class Selective(Protocol):
    """What a selection asks of a stage."""

    @property
    def where(self) -> Where: ...
    def default(self, w: Any) -> bool: ...


def choose(who: str, stage: Selective, tree: PyTree, leaves: Sequence[Any], slots: Sequence[Slot]) -> list[bool]:
    """Whether each leaf is selected.

    Raises:
      ValueError: If nothing is selected.
    """
    visible = [slot.visible and is_array(w) for slot, w in zip(slots, leaves, strict=True)]
    if (where := stage.where) is None:
        state = is_state(tree)
        eligible = [visible[i] and slot.main and not state[i] for i, slot in enumerate(slots)]
        flags = [eligible[i] and stage.default(w) for i, w in enumerate(leaves)]
    else:
        flags = [visible[i] and _matches(where, slots[i], w) for i, w in enumerate(leaves)]
    if not any(flags):
        paths = [slot.path for slot, seen in zip(slots, visible, strict=True) if seen]
        raise ValueError(f"{who} selects nothing: {nothing(where, paths)}")
    return flags


def _matches(where: str | Callable[[str, Any], bool], slot: Slot, w: Any) -> bool:
    if isinstance(where, str):
        return re.fullmatch(where, slot.path) is not None
    if isinstance(where, Selected) and not slot.main:
        return slot.path in where.paths  # a tree of booleans says nothing of what stages have put below its leaves
    return bool(where(slot.path, w))


def nothing(where: Where, paths: Sequence[str]) -> str:
    unique = list(dict.fromkeys(paths))
    if not unique:
        return "the tree holds no array. Pass the model's parameters."
    if isinstance(where, str):
        return (
            f"no path matches {where!r} as a whole. The nearest of {len(unique)} paths are "
            f"{nearest(where, unique)}. Correct the expression; `.*` stands for any text."
        )
    shown = ", ".join(map(repr, unique[:3])) + (", ..." if len(unique) > 3 else "")
    if where is None:
        return f"its default takes none of the {len(unique)} arrays ({shown}). Name some with `where`."
    return f"the predicate is false for all {len(unique)} paths ({shown}). Print the paths it is called with."
