"""Selects the arrays that a stage acts on.

The argument ``where`` of a stage is a regular expression for whole paths, a predicate ``(path, array) -> bool``, or the
result of :func:`all_but` or :func:`selected`; None means the stage's own default. An expression with ``@`` in it must
match the whole key path in the raw tree instead, which contains markers such as ``@weight_norm``. A :class:`Leaf`
(``raw.py``) describes each array or marker dict of a tree.

In ``LoRA(4) >> WeightNorm()``, for example, LoRA selects the main value ``v`` under the path of its array,
``dense/kernel``, and the auxiliary value ``g`` only if ``where`` matches ``dense/kernel/g``. The key path of ``v`` is
``dense/kernel/@weight_norm/v``.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import register_static

from reparax.core.calls import can_take
from reparax.core.config import register_class
from reparax.core.known_axes import TABLES
from reparax.core.paths import PyTree, describe, flatten_with_names, is_empty, path_text
from reparax.core.raw import Leaf, parameter_path
from reparax.core.roles import LOOKUP
from reparax.numerics.arithmetic import is_array

BIASES_AND_SCALES = frozenset({"bias", "b", "scale", "offset", "gamma", "beta", "gain"})
"""The usual names of biases and scales, which have one entry for each feature. :func:`is_bias_or_scale` also accepts
these names with a number at the end, as in ``b1``, names that contain the word ``bias``, as in ``bias_n``, and names
that begin with ``ln_``."""


@register_static
@dataclass(frozen=True, repr=False)
class Selected:
    """The predicate that :func:`selected` returns. It is true for the given paths and for all paths below them.

    Attributes:
      paths: The paths of arrays, or of nodes that hold arrays; the empty path is the whole tree.
    """

    paths: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises a TypeError unless ``paths`` is a tuple of strings, because JSON may hold anything else."""
        paths: Any = self.paths
        if not isinstance(paths, tuple) or not all(isinstance(path, str) for path in paths):
            raise TypeError(f"Selected takes a tuple of paths, but got {paths!r}. Make it with `rpx.stage.selected`.")

    def __repr__(self) -> str:
        return f"selected({dict.fromkeys(self.paths, True)})"

    def __call__(self, path: str, array: object) -> bool:
        """Returns whether ``path`` is one of the selected paths or below one of them; ``array`` is ignored."""
        return any(part in ("", path) or path.startswith(f"{part}/") for part in self.paths)


register_class(Selected)


@register_static
@dataclass(frozen=True, repr=False)
class AllBut:
    """The selection that :func:`all_but` returns: the default selection of a stage, except for some paths.

    Attributes:
      patterns: Regular expressions; arrays whose whole path matches one of them are left out.
    """

    patterns: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises an error unless ``patterns`` is a tuple of one or more valid regular expressions."""
        patterns: Any = self.patterns
        if not isinstance(patterns, tuple):
            raise TypeError(f"AllBut takes a tuple of expressions, but got {patterns!r}. Make it with `rpx.all_but`.")
        if not patterns:
            raise TypeError("all_but takes at least one regular expression for whole paths, but got none.")
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(
                    f"all_but takes regular expressions for whole paths, but got {pattern!r}. Pass strings."
                )
            check_where(pattern, "all_but")

    def __repr__(self) -> str:
        return f"all_but({', '.join(map(repr, self.patterns))})"

    def excludes(self, path: str) -> bool:
        """Returns whether any of the regular expressions matches the whole ``path``."""
        return any(re.fullmatch(pattern, path) for pattern in self.patterns)


register_class(AllBut)


def all_but(*patterns: Any) -> AllBut:
    """Returns a selection for ``where``: the default selection of the stage, without the paths that match a pattern.

    Args:
      patterns: Regular expressions for whole paths. Each must match at least one path of the tree.

    Raises:
      TypeError: If there is no pattern, or if a pattern is not a string.
      ValueError: If a pattern is not a valid regular expression. If a pattern matches no path of the tree, the methods
        of the stage raise a ValueError.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm(where=rpx.all_but("embed/.*"))
      >>> jax.tree.map(jnp.shape, p.init({"embed": {"table": jnp.ones((3, 2))}, "out": {"kernel": jnp.ones((2, 3))}}))
      {'embed': {'table': (3, 2)}, 'out': {'kernel': {'@weight_norm': {'g': (1, 3), 'v': (2, 3)}}}}
    """
    return AllBut(patterns)


Where = str | Callable[[str, Any], bool] | AllBut | None


def selected(mask: PyTree, model: PyTree = None) -> Selected:
    """Returns a selection for ``where``, given a tree of booleans, such as an optax mask, or parts of a model.

    Args:
      mask: A tree of booleans with the structure of the parameters, or a tree prefix of it. Each path with the value
        True must exist in the tree of parameters. If ``model`` is given, ``mask`` is instead a function that takes the
        model and returns one part of it, or a list of parts.
      model: The model's parameters, or their shapes and dtypes. The selection stores only the paths of the parts.

    Raises:
      TypeError: If ``mask`` is not a tree of booleans; or, with ``model``, not a function that returns parts of the
        model.
      ValueError: If the parts of the model hold no array.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.VarNoise(0.1, where=rpx.stage.selected({"dense": {"kernel": True, "bias": False}, "norm": False}))
      VarNoise(0.1, where=selected({'dense/kernel': True}))
      >>> layers = {"layers": [{"weight": jnp.ones((2, 2))}, {"weight": jnp.ones((2, 2))}]}
      >>> rpx.VarNoise(0.1, where=rpx.stage.selected(lambda m: m["layers"][0]["weight"], layers))
      VarNoise(0.1, where=selected({'layers/0/weight': True}))
    """
    if model is not None:
        return _select_parts(mask, model)
    if inspect.isroutine(mask):
        raise TypeError(
            "selected got a function without the model whose parts it returns. Pass the model too: "
            "`rpx.stage.selected(lambda m: m.layers[0].weight, model)`."
        )
    paths, flags, _ = flatten_with_names(mask)
    for path, flag in zip(paths, flags, strict=True):
        if not isinstance(flag, bool):
            what = describe(flag) if is_array(flag) else repr(flag)
            raise TypeError(
                f"selected takes a tree of booleans, but got {what} at {path_text(path)!r}. Write True or False."
            )
    return Selected(tuple(path_text(path) for path, flag in zip(paths, flags, strict=True) if flag))


@dataclass(frozen=True)
class _Placeholder:
    """A placeholder for a leaf of a model, which shows whether a function of the model returns that leaf.

    Attributes:
      path: The path of the leaf, such as ``"layers/0/weight"``.
      is_array: Whether the leaf is an array, and not, for example, an activation function.
    """

    path: str
    is_array: bool


def _select_parts(choose: Any, model: PyTree) -> Selected:
    """Returns a selection of all arrays in those parts of ``model`` that the function ``choose`` returns.

    ``choose`` is called with a copy of the model that has a :class:`_Placeholder` for each leaf, so its result reveals
    the paths of the parts.
    """
    paths, leaves, treedef = flatten_with_names(model)
    if not callable(choose):
        raise TypeError(
            f"selected with a model takes a function of that model, but got {describe(choose)}. Pass a function, as in "
            f"`rpx.stage.selected(lambda m: m.layers[0].weight, model)`, or leave out the model."
        )
    placeholders = [_Placeholder(path_text(path), is_array(x)) for path, x in zip(paths, leaves, strict=True)]
    parts = jax.tree.leaves(choose(treedef.unflatten(placeholders)))
    for part in parts:
        if not isinstance(part, _Placeholder):
            raise TypeError(
                f"selected takes a function that returns parts of the model, but the function returned "
                f"{describe(part)}. Return parts without changing them, as in `lambda m: m.layers[0].weight`."
            )
    if not any(part.is_array for part in parts):
        raise ValueError(
            "selected takes a function that returns parts of the model, but the parts that it returned hold no array. "
            "Return arrays or nodes with arrays, as in `lambda m: m.layers[0].weight`."
        )
    return Selected(tuple(dict.fromkeys(part.path for part in parts if part.is_array)))


def nearest(path: str, paths: Iterable[str]) -> str:
    """Returns the three paths that are most similar to a misspelled ``path``, as text for an error."""
    return ", ".join(map(repr, difflib.get_close_matches(path, list(paths), n=3, cutoff=0.0)))


def match_paths(pattern: str, paths: Iterable[str]) -> list[re.Match[str]]:
    """Returns the matches of a regular expression with whole paths, one match for each distinct path that matches.

    A pattern that equals one of the paths matches only this path, even if it has special characters, as in ``a.b``. The
    list is empty if no path matches, or if the pattern is not a valid regular expression.
    """
    unique = list(dict.fromkeys(paths))
    try:
        all_matches = [re.fullmatch(re.escape(pattern) if pattern in unique else pattern, path) for path in unique]
    except re.error:
        return []
    return [match for match in all_matches if match]


def check_where(where: Any, owner: str, name: str = "where") -> Any:
    """Returns ``where`` unchanged. Raises a TypeError or a ValueError if it is not a valid selection of arrays.

    Args:
      where: The value that the user passed as a selection.
      owner: The class or function that takes the selection; errors name it.
      name: The name of the argument; errors name it.
    """
    # A class or a stage may be callable, but neither is a predicate.
    is_class_or_stage = isinstance(where, type) or hasattr(where, "_parts")
    if isinstance(where, str):
        _require_expression(where, owner, name)
    elif is_class_or_stage or not (where is None or callable(where) or isinstance(where, AllBut)):
        what = name if any(map(is_array, jax.tree.leaves(where))) else f"{name}={where!r}"
        raise TypeError(
            f"{owner} got {what} of type {type(where).__name__}, but takes a regular expression for the whole "
            f"path or a predicate (path, array) -> bool. {_suggest(where)}"
        )
    elif callable(where) and not can_take(where, 2, if_unknown=True):
        raise TypeError(
            f"{owner} got a function as {name} that does not take two arguments. It is called with the path, as text, "
            f"and the array. Write, for example, `{name}=lambda path, array: array.ndim > 1`."
        )
    return where


def _require_expression(pattern: str, owner: str, name: str) -> None:
    """Raises a ValueError unless ``pattern``, the argument ``name`` of ``owner``, is a valid regular expression.

    If it is a shell pattern, such as ``*/kernel``, the error gives the equivalent regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        regex = _shell_to_regex(pattern)
        advice = f" `.*` matches any text, so write {regex!r}." if regex else ""
        raise ValueError(
            f"{owner} got {name}={pattern!r}, which is not a regular expression: {error}.{advice}"
        ) from error


def _suggest(where: Any) -> str:
    """Returns the end of an error for a selection ``where`` of a wrong type, which says what to write instead."""
    if isinstance(where, type):
        return "Write the paths of arrays of that class, such as '.*/kernel'."
    if isinstance(where, re.Pattern):
        return f"Pass its text, {where.pattern!r}."
    if isinstance(where, list | tuple | set | frozenset) and all(isinstance(item, str) for item in where):
        return f"Join them with `|`: {'|'.join(sorted(where) if isinstance(where, set | frozenset) else where)!r}."
    return "Wrap a tree of booleans in `rpx.stage.selected`."


def _shell_to_regex(pattern: str) -> str | None:
    """Converts a shell pattern, in which ``*`` is any text, to a regular expression: ``"*/kernel"`` to ``".*/kernel"``.

    Returns None if the result equals the pattern, or is not a valid regular expression. A ``*`` after a dot, a closing
    bracket or a backslash is kept, because it already belongs to a regular expression.
    """
    regex = re.sub(r"(?<![.\])\\])\*", ".*", pattern)
    try:
        re.compile(regex)
    except re.error:
        return None
    return regex if regex != pattern else None


def reads_paths_only(where: Where) -> bool:
    """Returns whether a selection depends only on paths, so that it can be evaluated without shapes and dtypes.

    The result is False for a predicate, and for the default of a stage, which depends on the number of axes.
    """
    return isinstance(where, str | Selected)


def is_bias_or_scale(leaf: Leaf) -> bool:
    """Returns whether an array is a bias or a scale. Such arrays do not count as matrices, whatever their shape.

    If the layer of the array is known, the layer decides. Otherwise, the name decides: ``bias``, ``b1``, ``bias_n`` and
    ``ln_1`` qualify. For a raw value with a path of its own, its name and the parameter's name are both checked.
    """
    if leaf.axes.are_of_layer:
        return leaf.axes.are_of_vector
    names = {leaf.parameter.rpartition("/")[2], leaf.path.rpartition("/")[2]}
    return any(
        # The substitution removes a number at the end, as in `scale_2`.
        re.sub(r"_?\d+$", "", name) in BIASES_AND_SCALES or "bias" in name.split("_") or name.startswith("ln_")
        for name in names
    )


def is_table(leaf: Leaf) -> bool:
    """Returns whether an array is an embedding table, judged by its layers if they are known, or else by its name.

    A table that is also used as the matrix of another layer counts as a table.
    """
    if leaf.axes.is_class and leaf.axes.role.uses:
        return any(use.how == LOOKUP for use in leaf.axes.role.uses)
    return leaf.parameter.rpartition("/")[2] in TABLES


def select_leaves(who: object, where: Where, leaves: Sequence[Leaf], by_default: Callable[[Leaf], bool]) -> list[Leaf]:
    """Returns a list of the leaves that ``where`` selects, in tree order; the list may be empty.

    By default, only plain arrays and main values, which represent their arrays, are selected. An expression or a
    predicate may select auxiliary values too.

    Args:
      who: The call that errors name.
      where: The selection that the user passed to the stage, or None for its default.
      leaves: A :class:`Leaf` for each array or marker dict of a tree.
      by_default: A function that returns whether the stage selects a leaf for ``where=None`` and :func:`all_but`.

    Raises:
      ValueError: If a selection from :func:`all_but` or :func:`selected` names paths that the tree does not have.
    """

    def is_selected(leaf: Leaf) -> bool:
        """Returns whether ``where`` selects a leaf, given that the leaf is one that a selection may select."""
        if where is None:
            return leaf.main and by_default(leaf)
        if isinstance(where, AllBut):
            return leaf.main and not where.excludes(leaf.path) and by_default(leaf)
        if isinstance(where, str):
            # The key path has markers, as in `dense/kernel/@weight_norm/v`; the path has none, as in `dense/kernel`.
            return re.fullmatch(where, leaf.raw_path if _is_by_place(where) else leaf.path) is not None
        if isinstance(where, Selected):  # A selected parameter does not include the auxiliary values below it.
            return where(leaf.path, None) if leaf.main else leaf.path in where.paths
        return _ask_predicate(who, where, leaf.path, leaf.array)

    # Without leaves, a later error reports that the tree holds no arrays.
    if leaves and isinstance(where, Selected):
        _require_paths(who, where, _known_paths(leaves))
    if leaves and isinstance(where, AllBut):
        _require_matches(who, where, _known_paths(leaves))
    return [leaf for leaf in leaves if _is_seen(where, leaf) and is_selected(leaf)]


def none_selected_error(who: object, where: Where, leaves: Sequence[Leaf], stacked: object = ()) -> ValueError:
    """Returns the error for a selection that selects no array.

    Args:
      who: The call that the error names.
      where: The selection that the user passed to the stage, or None for its default.
      leaves: All leaves of the tree, including any that cannot be selected.
      stacked: The argument ``stacked`` of the stage. The default selection of the stage does not count these axes, so
        an array of shape (8, 4) with ``stacked=0`` counts as a vector.
    """
    paths = [leaf.raw_path if _is_by_place(where) else leaf.path for leaf in leaves if _is_seen(where, leaf)]
    if where is not None:
        return ValueError(f"{who} selects nothing: {why_none_selected(where, paths)}{_advise_place(where, leaves)}")
    reason = why_none_selected(where, paths)
    if paths and stacked != ():
        unique = list(dict.fromkeys(paths))
        reason = (
            f"not counting stacked={stacked!r}, its default selects none of the {len(unique)} arrays "
            f"({_list_some(unique)}). Leave axes that are not stacked out of `stacked`, or select some with `where`."
        )
    # A later stage, such as `Quantized`, may have replaced the arrays with integers, which no default selects.
    in_markers = [leaf for leaf in leaves if is_array(leaf.content) and "@" in leaf.raw_path]
    codes = [leaf.parameter for leaf in in_markers if not jnp.issubdtype(leaf.content.dtype, jnp.inexact)]
    advice = f" At {codes[0]!r}, a later stage stores only integers. Put that stage before this one." if codes else ""
    return ValueError(f"{who} selects nothing: {reason}{advice}")


def _advise_place(where: Where, leaves: Sequence[Leaf]) -> str:
    """Returns advice for an error about an expression such as ``dense/kernel/v``, which ends with a raw value's name.

    The expression selects nothing, because a main value such as ``v`` has the path of its array, ``dense/kernel``. Only
    its key path in the raw tree contains its name, so the advice is to write ``.*/@weight_norm/v``. If the expression
    does not name such a raw value, the result is empty.
    """
    for leaf in leaves:
        has_name = isinstance(where, str) and re.fullmatch(where, f"{leaf.parameter}/{leaf.place[-1]}")
        if has_name and leaf.visible and leaf.is_there and "@" in leaf.raw_path:
            below_parameter = leaf.raw_path.removeprefix(leaf.parameter)
            return f" To select {leaf.raw_path!r}, write {f'.*{below_parameter}'!r}, which matches its whole key path."
    return ""


def _is_by_place(where: Where) -> bool:
    """Returns whether a selection is an expression with ``@``, which must match key paths in the raw tree."""
    return isinstance(where, str) and "@" in where


def _is_seen(where: Where, leaf: Leaf) -> bool:
    """Returns whether the selection ``where`` may select a leaf at all.

    A hidden leaf cannot be selected, and neither can a tied array, because it has no values. Values that an adapter
    adds to a base can be selected only by an expression for key paths, such as ``.*/@lora/a``.
    """
    return leaf.visible and leaf.is_there and (not leaf.added or _is_by_place(where))


def _known_paths(leaves: Sequence[Leaf]) -> list[str]:
    """Returns all paths that a selection may name: those of the leaves, and those of arrays without their own values.

    Tied arrays, for example, have no values of their own. ``leaves`` must be one or more leaves of a single tree.
    """
    arrays = {} if leaves[0].tree is None else leaves[0].tree.arrays
    empty = [place for place, x in arrays.items() if is_empty(x)]
    return [*(leaf.path for leaf in leaves), *map(parameter_path, empty)]


def _require_matches(who: object, where: AllBut, paths: Sequence[str]) -> None:
    """Raises a ValueError if an expression of :func:`all_but` matches none of the paths, perhaps due to a typo."""
    for pattern in where.patterns:
        if not any(re.fullmatch(pattern, path) for path in paths):
            raise ValueError(f"{who} excludes nothing with {pattern!r}: {why_none_selected(pattern, paths)}")


def _require_paths(who: object, where: Selected, paths: Sequence[str]) -> None:
    """Raises a ValueError unless each selected path is the path of an array, or of a node that holds arrays.

    ``paths`` are the paths of all arrays. If one is ``dense/kernel``, ``dense`` and the empty path may be selected too.
    """
    names_of_paths = [path.split("/") for path in paths]
    inner_paths = {"/".join(names[:n]) for names in names_of_paths for n in range(len(names) + 1)}
    for selected_path in where.paths:
        if selected_path not in inner_paths:
            raise ValueError(
                f"{who} got True at {selected_path!r} in a tree of booleans, but the parameters have no such path. "
                f"The nearest are {nearest(selected_path, dict.fromkeys(paths))}. Build the booleans from the same "
                f"parameters."
            )


def _ask_predicate(who: object, where: Callable[[str, Any], Any], path: str, array: Any) -> bool:
    """Returns whether the predicate ``where`` selects an array: whether its result, such as an ``re.Match``, is true.

    Raises a TypeError if the predicate returns text or an array with axes, because their truth value would be
    accidental, or a traced array, because it has no value yet.
    """
    try:
        answer = where(path, array)
    except Exception as error:
        error.add_note(f"This happened in the function `where` of {who}, which got the path {path!r} and the array.")
        raise
    if isinstance(answer, str | Tracer) or (is_array(answer) and answer.shape != ()):
        what = describe(answer) if is_array(answer) else repr(answer)
        raise TypeError(
            f"{who} called the function `where` for {path!r}, expected True or False, got {what}. Let the function "
            f"decide by the path, shape and dtype of the array, not by its entries."
        )
    return bool(answer)


def _list_some(paths: Sequence[str]) -> str:
    """Returns the first three paths as text for an error: ``'a/kernel', 'b/kernel', 'c/kernel', ...``."""
    return ", ".join(map(repr, paths[:3])) + (", ..." if len(paths) > 3 else "")


def _why_no_match(pattern: str, paths: Sequence[str]) -> str:
    """Returns a text, for an error, that says why an expression matches none of the paths, and what to write instead.

    The usual mistakes are tried in turn: the path of a node, only the end of a path, and a shell pattern.
    """
    if inner_paths := [path for path in paths if path.startswith(f"{pattern}/")]:
        return f"{pattern!r} is not an array, but {len(inner_paths)} paths begin with it: write {f'{pattern}/.*'!r}."
    if deeper_paths := [path for path in paths if re.fullmatch(f".*/(?:{pattern})", path)]:
        return (
            f"no whole path matches {pattern!r}, but it matches the end of {len(deeper_paths)} of {len(paths)} paths, "
            f"such as {deeper_paths[0]!r}. Write {f'.*/{pattern}'!r} to match whole paths."
        )
    regex = _shell_to_regex(pattern) or pattern
    if matched_paths := [path for path in paths if re.fullmatch(regex, path)]:
        return (
            f"no whole path matches {pattern!r}, as `*` alone does not match any text. Write {regex!r}, which matches "
            f"{len(matched_paths)} of {len(paths)} paths, such as {matched_paths[0]!r}."
        )
    return (
        f"no whole path matches {pattern!r}. The nearest of {len(paths)} paths are {nearest(pattern, paths)}. "
        f"Change the expression to match whole paths; `.*` matches any text."
    )


def why_never_applies(pattern: str, path: str, earlier: str) -> str:
    """Returns a text, for an error, that says why the key ``pattern`` of a dict with regular expressions has no effect.

    The reason is that an earlier key, ``earlier``, also matches ``path``. The text is written to follow "got a number
    for".
    """
    return (
        f"{pattern!r}, but it has no effect: the first expression that matches a path applies, which is {earlier!r} "
        f"for {path!r}. Write {pattern!r} before {earlier!r}."
    )


def why_none_selected(where: Where, paths: Sequence[str]) -> str:
    """Returns a text, for an error, that says why a selection selects none of the paths, and what to write instead.

    ``paths`` are all paths that could be selected. For an expression with ``@``, they must be key paths as text.
    """
    unique = list(dict.fromkeys(paths))
    if not unique:
        return "the tree holds no array. Pass the model's parameters."
    if isinstance(where, str):
        return _why_no_match(where, unique)
    some_paths = _list_some(unique)
    if isinstance(where, AllBut):
        return f"{where!r} selects none of the {len(unique)} arrays ({some_paths}). Exclude fewer paths."
    if where is None:
        return f"its default selects none of the {len(unique)} arrays ({some_paths}). Select some with `where`."
    return f"the predicate is false for all {len(unique)} paths ({some_paths}). Print the paths that it gets."
