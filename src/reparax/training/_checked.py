"""Checks the arguments of an optimizer's step: gradients, a state or parameters of another tree raise a clear error.

A transformation fails on these in its own words, or silently broadcasts them. They are checked only after it has
failed, or if a shape has changed, so a correct step costs nothing.
"""

from collections.abc import Callable
from typing import Any

import jax

from reparax._tree.paths import PyTree, is_array
from reparax.training._partition import partition
from reparax.training._unlike import Difference, TreeOf, first_difference

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
