"""Checks the arguments of an optimizer's step: gradients, a state or parameters of another tree raise a clear error.

A transformation fails on these in its own words, or silently broadcasts them. They are checked only after it has
failed, or if a shape has changed, so a correct step costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import jax

from reparax.core.checks import by_parameter
from reparax.core.paths import PyTree
from reparax.numerics.arithmetic import is_array
from reparax.training._partition import partition

Shapes = dict[str, tuple[int, ...]]
Update = Callable[..., tuple[PyTree, PyTree]]
CALL = "Call `tx.update(grads, state, raw)`."


def explain_errors(init: Callable[[PyTree], PyTree], update: Update) -> Update:
    """``update`` of an optimizer, with errors that name what is wrong with its arguments."""

    def update_or_explain(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        try:
            new_updates, new = update(updates, state, params, **extra)
        except Exception as error:  # any type: a transformation may fail in any way on another tree
            if (why := _explain_arguments(init, updates, state, params)) is None:
                raise
            raise ValueError(f"optimizer.update takes {why}") from error
        if (_has_other_shapes(state, new) or _has_other_shapes(params, new_updates)) and (
            why := _explain_arguments(init, updates, state, params)
        ) is not None:
            raise ValueError(f"optimizer.update takes {why}")
        return new_updates, new

    return update_or_explain


def _has_other_shapes(old: PyTree, new: PyTree) -> bool:
    """Whether arrays of two trees of one structure have other shapes."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        return False
    return [_shape_of(x) for x in jax.tree.leaves(old)] != [_shape_of(x) for x in jax.tree.leaves(new)]


def _shape_of(x: Any) -> Any:
    """The shape of an array; None for any other leaf."""
    return x.shape if is_array(x) else None


def _explain_arguments(init: Callable[[PyTree], PyTree], updates: PyTree, state: PyTree, params: PyTree) -> str | None:
    """What is wrong with the arguments of a step, and what to do; None if they fit each other."""
    if params is not None and not hasattr(params, "_fields"):  # lookahead has two trees of parameters
        if type(updates) is tuple and type(params) is not tuple:
            return (
                f"gradients first, but got a tuple. {CALL} `jax.value_and_grad` returns the value too: "
                f"`value, grads = ...`."
            )
        if type(params) is tuple and type(updates) is not tuple:
            return f"the raw tree last, but got a tuple. {CALL}"
        if (difference := first_difference(partition(updates)[0], partition(params)[0])) is not None:
            return _explain_gradients(difference)
    raw = updates if params is None else params
    return _explain_state(init, state, raw)


def _explain_gradients(difference: Difference) -> str:
    """What is wrong with gradients that differ from the raw tree, and what to do."""
    match difference.of:
        case TreeOf.THE_MODEL:
            return (
                f"gradients of the raw tree, but got those of the model's own parameters: {difference}. Differentiate "
                f"with respect to the raw tree: `jax.grad(lambda raw: loss(p.apply(raw)))(raw)`."
            )
        case TreeOf.A_RAW_TREE:
            return f"the raw tree as params, but got the model's own parameters: {difference.swapped}. {CALL}"
        case TreeOf.OTHER_SHAPES:
            return (
                f"gradients of the raw tree, but got those of other shapes: {difference}. Differentiate one number, "
                f"such as the mean of the loss over a batch."
            )
        case of:
            return (
                f"gradients of the raw tree, but got those of {of}: {difference}. Differentiate with respect to `raw`."
            )


def _explain_state(init: Callable[[PyTree], PyTree], state: PyTree, raw: PyTree) -> str | None:
    """What is wrong with a state, and what to do; None if it fits the raw tree, or nobody can know."""
    try:
        expected = jax.eval_shape(init, raw)
    except Exception:  # then it is not the state that is wrong
        return None
    if (difference := first_difference(state, expected)) is None:
        return None
    if first_difference(state, raw) is None or first_difference(state, partition(raw)[0]) is None:
        return f"a state second, but got a raw tree. {CALL}"
    match difference.of:
        case TreeOf.THE_MODEL:
            whose, advice = "that of the model's own parameters", "Make it from the raw tree, `tx.init(raw)`."
        case TreeOf.A_RAW_TREE:
            return (
                f"gradients and parameters of the raw tree that its state belongs to, but got those of the model: "
                f"{difference.swapped}. Differentiate with respect to `raw`, and call `tx.update(grads, state, raw)`."
            )
        case TreeOf.ANOTHER_CHAIN:
            whose = "that of another chain"
            advice = "Make a new one, `tx.init(raw)`, or convert it, `rpx.transfer(old, new, state, like=old_raw)`."
        case TreeOf.ANOTHER_MODEL if "@fixed" in difference.path and difference.wanted == "nothing":
            whose, advice = "one with values for what is fixed", "Make it with the same `tx`, `tx.init(raw)`."
        case TreeOf.ANOTHER_MODEL:
            whose, advice = "that of another optimizer or model", "Make it with the same `tx`, `tx.init(raw)`."
        case of:
            whose, advice = f"one of {of}", "Make it with the same `tx`, `tx.init(raw)`."
    return f"the state of the raw tree, but got {whose}: {difference}. {advice}"


class TreeOf(StrEnum):
    """What a tree belongs to that is not the wanted one, in the words of errors."""

    THE_MODEL = "the model"
    """It has arrays where a raw tree has markers."""
    A_RAW_TREE = "a raw tree"
    """It has markers where the model has arrays."""
    ANOTHER_CHAIN = "another chain"
    ANOTHER_MODEL = "another model"
    OTHER_SHAPES = "other shapes"


@dataclass(frozen=True)
class Difference:
    """Where a tree differs from the one that is wanted.

    Attributes:
      path: The path.
      wanted: What should be there, in words.
      got: What is there, in words.
      of: What the tree belongs to instead.
    """

    path: str
    wanted: str
    got: str
    of: TreeOf

    @property
    def swapped(self) -> Difference:
        """The same, if it is the other tree that is wrong."""
        return replace(self, wanted=self.got, got=self.wanted)

    def __str__(self) -> str:
        return f"expected {self.wanted} at {self.path!r}, got {self.got}"


def first_difference(actual: PyTree, like: PyTree) -> Difference | None:
    """The first difference between the arrays of two trees; another stage comes before all others."""
    shapes, expected_shapes = (by_parameter(tree, lambda x: tuple(x.shape), empty=False) for tree in (actual, like))
    for path in expected_shapes:
        if path in shapes and (difference := _stage_difference(path, shapes[path], expected_shapes[path])) is not None:
            return difference
    pairs = [
        (path, shapes.get(path, {}), expected_shapes.get(path, {}))
        for path in dict.fromkeys([*expected_shapes, *shapes])
    ]
    return next((difference for pair in pairs if (difference := _value_difference(*pair)) is not None), None)


def _stage_difference(path: str, shapes: Shapes, expected_shapes: Shapes) -> Difference | None:
    """The difference between the outermost markers of a parameter, or None."""
    mark, wanted_mark = (next(iter(values)).split("/")[0] for values in (shapes, expected_shapes))
    if mark == wanted_mark:
        return None
    of = TreeOf.ANOTHER_CHAIN if mark and wanted_mark else TreeOf.THE_MODEL if wanted_mark else TreeOf.A_RAW_TREE
    return Difference(path, repr(wanted_mark) if wanted_mark else "an array", repr(mark) if mark else "an array", of)


def _value_difference(path: str, shapes: Shapes, expected_shapes: Shapes) -> Difference | None:
    """The first difference between the shapes of a parameter's values, or None."""
    for path_below in dict.fromkeys([*expected_shapes, *shapes]):
        if shapes.get(path_below) != expected_shapes.get(path_below):
            in_both = path_below in shapes and path_below in expected_shapes
            words = [
                f"shape {x[path_below]}" if in_both else "an array" if path_below in x else "nothing"
                for x in (expected_shapes, shapes)
            ]
            of = TreeOf.OTHER_SHAPES if in_both else TreeOf.ANOTHER_MODEL
            return Difference(f"{path}/{path_below}".strip("/"), words[0], words[1], of)
    return None
