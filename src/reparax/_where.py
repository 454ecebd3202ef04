"""Selection: which arrays of a tree a stage acts on."""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.tree_util import register_static, tree_flatten_with_path

from reparax import _raw
from reparax._raw import PyTree, Slot

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


def selected(mask: PyTree) -> Selected:
    """A predicate for ``where`` from a tree of booleans, as optax's masks are.

    Args:
      mask: Booleans in the structure of the parameters, or of a part of it from the root (a prefix).

    Example:
      >>> import reparax as rpx
      >>> rpx.VarNoise(0.1, where=rpx.selected({"dense": {"kernel": True, "bias": False}, "norm": False}))
      VarNoise(0.1, where=selected({'dense/kernel': True}))
    """
    pairs = tree_flatten_with_path(mask)[0]
    for keypath, flag in pairs:
        if not isinstance(flag, bool):
            path = "/".join(_raw.names(keypath))
            raise TypeError(f"selected takes a tree of booleans, but got {flag!r} at {path!r}. Write True or False.")
    return Selected(tuple("/".join(_raw.names(keypath)) for keypath, flag in pairs if flag))


def checked(where: Where, owner: str) -> None:
    """Refuses what cannot select, when the stage is built."""
    if isinstance(where, str):
        try:
            re.compile(where)
        except re.error as error:
            raise ValueError(f"{owner} got where={where!r}, which is not a regular expression: {error}.") from error
    elif where is not None and not callable(where):
        raise TypeError(
            f"{owner} got where={where!r} of type {type(where).__name__}, but takes a regular expression for the whole "
            f"path or a predicate (path, array) -> bool. Wrap a tree of booleans in `rpx.selected`."
        )


def is_state(tree: PyTree) -> list[bool]:
    """For each leaf, whether it is model state and no parameter: batch statistics, or an nnx variable but Param."""

    def is_variable(x: object) -> bool:
        return any(c.__name__ == "Variable" and c.__module__.startswith("flax.nnx") for c in type(x).__mro__)

    flags: list[bool] = []
    for keypath, node in tree_flatten_with_path(tree, is_leaf=is_variable)[0]:
        other = is_variable(node) and all(c.__name__ != "Param" for c in type(node).__mro__)
        flags += [other or "batch_stats" in _raw.names(keypath)] * len(jax.tree.leaves(node))
    return flags


class Selective(Protocol):
    """What a selection asks of a stage."""

    @property
    def where(self) -> Where: ...
    def default(self, w: Any) -> bool: ...
    def refuse(self, w: Any) -> str | None: ...


def choose(who: str, stage: Selective, tree: PyTree, leaves: Sequence[Any], slots: Sequence[Slot]) -> list[bool]:
    """Whether each leaf is selected.

    Raises:
      ValueError: If nothing is selected, or an array that the stage cannot take.
    """
    visible = [slot.visible and _raw.is_array(w) for slot, w in zip(slots, leaves, strict=True)]
    if (where := stage.where) is None:
        state = is_state(tree)
        eligible = [visible[i] and slot.main and not state[i] for i, slot in enumerate(slots)]
        flags = [eligible[i] and stage.default(w) for i, w in enumerate(leaves)]
    else:
        flags = [visible[i] and _matches(where, slots[i].path, w) for i, w in enumerate(leaves)]
    if not any(flags):
        paths = [slot.path for slot, seen in zip(slots, visible, strict=True) if seen]
        raise ValueError(f"{who} selects nothing: {_nothing(where, paths)}")
    for i, w in enumerate(leaves):
        if flags[i] and (reason := stage.refuse(w)) is not None:
            raise ValueError(f"{who} at {slots[i].path!r}: {reason}")
    return flags


def _matches(where: str | Callable[[str, Any], bool], path: str, w: Any) -> bool:
    return re.fullmatch(where, path) is not None if isinstance(where, str) else bool(where(path, w))


def _nothing(where: Where, paths: Sequence[str]) -> str:
    unique = list(dict.fromkeys(paths))
    if not unique:
        return "the tree holds no array. Pass the model's parameters."
    if isinstance(where, str):
        near = difflib.get_close_matches(where, unique, n=3, cutoff=0.0)
        return (
            f"no path matches {where!r} as a whole. The nearest of {len(unique)} paths are "
            f"{', '.join(map(repr, near))}. Correct the expression; `.*` stands for any text."
        )
    shown = ", ".join(map(repr, unique[:3])) + (", ..." if len(unique) > 3 else "")
    if where is None:
        return f"its default takes none of the {len(unique)} arrays ({shown}). Name some with `where`."
    return f"the predicate is false for all {len(unique)} paths ({shown}). Print the paths it is called with."
