"""Optimizers of raw trees, which leave fixed values unchanged; projection; moments under a mask; shardings of states.

A step with gradients, a state or parameters of another tree raises a clear error. A transformation fails on these in
its own words, or silently broadcasts them, so they are checked only after it has failed, or if a shape has changed: a
correct step costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from reparax.core.bound import init_all
from reparax.core.calls import CallName, require_chains, shows_usage, with_any_key
from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import by_parameter
from reparax.core.paths import Names, PyTree, Transformation, flatten_with_names, is_traceable, items, path_text
from reparax.core.raw import FIXED, is_aligned, require_no_raw
from reparax.numerics.arithmetic import is_array
from reparax.training._partition import combine, is_none, partition, require_tree

T = TypeVar("T")

Update = Callable[..., tuple[PyTree, PyTree]]
CALL = "Call `tx.update(grads, state, raw)`."
INSTEAD = "To train a raw tree, use `rpx.optimizer` alone: the result of `apply` is already in the image."


@shows_usage
def optimizer(tx: T) -> T:
    """An optimizer for a whole raw tree: applies ``tx`` to the values that train, and leaves fixed values unchanged.

    ``tx`` never sees what :func:`partition` calls fixed: it keeps no state for it, its weight decay does not reach it,
    and its norms do not count it. Fixed values get zero updates that keep every bit. Leaves that cannot be added, such
    as PRNG keys and functions, get None, as in equinox. On a CPU, XLA treats numbers below 1.2e-38 in float32
    (subnormal ones) as zeros in every addition. If your tree has such leaves or fixed numbers, update only the free
    part::

        free, fixed = rpx.partition(raw)
        raw = rpx.combine(optax.apply_updates(free, rpx.partition(updates)[0]), fixed)

    The state is that of ``free``: functions of optax that read it, such as ``schedule_free_eval_params``, also take
    ``free``.

    Put every transformation inside: one that you chain after it, such as weight decay, also moves fixed values.
    Gradients and parameters may be those of the whole raw tree or of its free part. A mask of ``tx`` may be a function
    or a tree with the structure of ``raw``. The arguments ``grad`` and ``value_fn`` of optax's line searches also work.

    Args:
      tx: An optax transformation, or any named tuple of two functions ``init`` and ``update``; or an object with a
        method ``gradient_transformation``, such as ``optax.MultiSteps``.

    Returns:
      A transformation of the class of ``tx``, whose state is that of ``tx`` for the free part.

    Raises:
      TypeError: If ``tx`` is not a transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> raw = rpx.Freeze(where="b").init({"w": jnp.ones(2), "b": jnp.ones(2)})
      >>> tx = rpx.optimizer(optax.sgd(0.1, momentum=0.9))
      >>> state = tx.init(raw)
      >>> state[0].trace
      {'b': {'@freeze': {'@fixed': {'w': None}}}, 'w': Array([0., 0.], dtype=float32)}
      >>> updates, state = tx.update(jax.tree.map(jnp.ones_like, raw), state, raw)
      >>> optax.apply_updates(raw, updates)
      {'b': {'@freeze': {'@fixed': {'w': Array([1., 1.], dtype=float32)}}}, 'w': Array([0.9, 0.9], dtype=float32)}
    """
    inner: Any = tx
    if hasattr(inner, "gradient_transformation"):
        inner = inner.gradient_transformation()
    if getattr(inner, "_fields", ()) != ("init", "update"):
        raise TypeError(
            f"optimizer takes an optax transformation, but got a value of type {type(tx).__name__!r}. "
            f"Pass one, as in `rpx.optimizer(optax.adam(1e-3))`."
        )

    def init(params: PyTree) -> PyTree:
        require_tree("optimizer.init", params, "tx.init(p.init(params))")
        return inner.init(partition(params)[0])

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        raw = updates if params is None else params
        extra_of_free = {name: _take_free(value, *partition(raw)) for name, value in extra.items()}
        new_updates, state = inner.update(partition(updates)[0], state, partition(params)[0], **extra_of_free)
        return combine(new_updates, jax.tree.map(_neutral_update, partition(raw)[1])), state

    return type(inner)(init, explain_errors(init, update))


def _take_free(value: Any, free: PyTree, fixed: PyTree) -> Any:
    """An extra argument for ``tx``: without fixed values; a function of raw trees becomes one of the free part."""
    if callable(value) and jax.tree_util.all_leaves([value]):

        def of_free(*args: Any, **kwargs: Any) -> Any:
            raw_args = (combine(x, fixed) if jax.tree.structure(x) == jax.tree.structure(free) else x for x in args)
            return value(*raw_args, **kwargs)

        return of_free
    is_tree = jax.tree.structure(value, is_leaf=is_none) == jax.tree.structure(free, is_leaf=is_none)
    return jax.tree.map(lambda w, x: None if w is None else x, free, value, is_leaf=is_none) if is_tree else value


def _neutral_update(x: Any) -> Any:
    """A zero that keeps every bit of ``x`` when added to it, subnormal numbers apart; None if nothing can be added."""
    if is_array(x) and x.dtype == jax.dtypes.float0:  # the gradient of an integer or a boolean
        return jnp.zeros(x.shape, bool)
    if not is_traceable(x) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    return jnp.zeros_like(x) if x.dtype == bool else -jnp.zeros_like(x)  # adding 0.0 would turn -0.0 into 0.0


@shows_usage
def projected(p: Parametrization) -> Transformation:
    """An optax transformation that projects parameters onto the image of ``p`` after each step.

    Use it to train the model's own parameters, without a raw tree. ``optax.chain(optax.adam(1e-3), projected(p))``
    changes the updates so that parameters become ``p.fold(p.init(params + updates))``: the nearest point in the image
    of ``p``, unless its stages define another one. Put it last in the optax chain.

    Args:
      p: A chain of stages whose ``init`` projects, such as ``Orthogonal()``, ``MaxNorm(1.0)`` or ``LowRank(4)``.

    Raises:
      ValueError: If ``update`` is called without parameters.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> tx = optax.chain(optax.sgd(1.0), rpx.training.projected(rpx.norms.MaxNorm(1.0, axis=None)))
      >>> params = {"w": jnp.array([[0.6, 0.8]])}
      >>> updates, _ = tx.update({"w": jnp.array([[-0.6, -0.8]])}, tx.init(params), params)
      >>> optax.apply_updates(params, updates)["w"].round(3)
      Array([[0.6, 0.8]], dtype=float32)

    References:
      Absil, Mahony and Sepulchre, *Optimization Algorithms on Matrix Manifolds*, 2008.
    """
    require_chains("training.projected(p)", p)

    def init(params: PyTree) -> PyTree:
        require_no_raw(CallName(p, "projected"), params, INSTEAD)
        init_all(tuple(Chain((p.deterministic,))), params)  # so that wrong parameters fail before the first step
        return ()

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        del extra
        if params is None:
            raise ValueError(
                f"{CallName(p, 'projected')} needs the parameters that it projects, but got none. Pass them: "
                f"`tx.update(grads, state, params)`."
            )
        require_no_raw(CallName(p, "projected"), params, INSTEAD)
        if jax.tree.structure(updates) != jax.tree.structure(params) and (
            difference := first_difference(updates, params)
        ):
            raise ValueError(
                f"{CallName(p, 'projected')} takes updates and parameters of one structure: {difference}. Call "
                f"`tx.update(grads, state, params)`."
            )
        updated = jax.tree.map(lambda w, u: w + u.astype(w.dtype), params, updates)
        back = p.fold(with_any_key(p.deterministic.init)(updated))
        return jax.tree.map(lambda b, w, u: (b - w).astype(u.dtype), back, params, updates), state

    return Transformation(init, update)


@shows_usage
def reset_moments(state: T, before: PyTree, after: PyTree) -> T:
    """Sets the moments of an optimizer to zero for weights that became active between two raw trees.

    While a mask hides a weight, its moments do not belong to its own gradients, or are old. This sets them to zero
    wherever a mask is 0 in ``before`` and 1 in ``after``: the masks of :class:`RigL`, :class:`SET`,
    :class:`MagnitudePruning`, :class:`NByM` and :class:`GlobalMagnitudePruning`.

    Use it for optimizers whose states are sums over gradients, such as SGD, Adam and Lion; both moments of Adam are
    reset, as in the reference code of RigL. Optimizers that hold weights or step sizes in their states
    (``schedule_free``, ``rprop``) would lose them.

    Args:
      state: The state of an optimizer of the raw tree, such as Adam's. Arrays under the path of a masked weight that
        have its shape are reset; a factored moment, of another shape, is not.
      before: The whole raw tree that you passed to ``update``, including the masks.
      after: The raw tree that ``update`` returned.

    Returns:
      A state with the same structure.

    Raises:
      ValueError: If the two trees hold different masks, or none.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> p, tx = rpx.sparse.RigL(0.5, drop_fraction=0.5), rpx.optimizer(optax.sgd(0.1, momentum=0.9))
      >>> before = p.init({"w": jnp.array([[3.0, 1.0, 0.0, 0.0]])}, jax.random.key(0))
      >>> _, state = tx.update(jax.tree.map(jnp.ones_like, before), tx.init(before))
      >>> after = p.update(before, grads={"w": jnp.array([[0.1, 0.2, -0.9, 0.3]])})
      >>> rpx.training.reset_moments(state, before, after)[0].trace["w"]["@rigl"]["w"]
      Array([[1., 1., 0., 1.]], dtype=float32)
    """
    grown = _activated_by_mask(before, after)
    free = {path for path, x in items(after) if is_array(x) and FIXED not in path}
    paths, leaves, treedef = flatten_with_names(state)
    # A name in a state may be a field or a parameter: a raw tree begins where the most raw paths fit.
    fits = Counter(path[:i] for path in paths for i in range(len(path) + 1) if path[i:] in free)

    def reset(path: Names, x: Any) -> Any:
        starts = [i for i in range(len(path) + 1) if path[i:] in free]
        raw_path = path[max(starts, key=lambda i: fits[path[:i]]) :] if starts else ()
        for node, flags in grown.items():
            below = raw_path[: len(node)] == node and is_aligned(raw_path)
            if starts and below and is_array(x) and _covers(flags, x):
                x = jnp.where(flags, jnp.zeros_like(x), x)
        return x

    return treedef.unflatten([reset(path, x) for x, path in zip(leaves, paths, strict=True)])


def _activated_by_mask(old_raw: PyTree, new_raw: PyTree) -> dict[Names, Array]:
    """For the path of each node with a mask, where the mask changes from 0 to 1."""
    old, new = _masks_by_node(old_raw), _masks_by_node(new_raw)
    if not new:
        raise ValueError(
            "reset_moments found no mask in the raw trees. Pass whole raw trees of a chain with masks, not only their "
            "free part."
        )
    if old.keys() != new.keys() or any(old[node].shape != mask.shape for node, mask in new.items()):
        raise ValueError(
            "reset_moments takes the raw trees before and after an update of one chain, but got two with masks at "
            "different paths or of different shapes. Call `reset_moments(state, raw, p.update(raw, ...))`."
        )
    return {node: (old[node] == 0) & (mask != 0) for node, mask in new.items()}


def _masks_by_node(raw: PyTree) -> dict[Names, Array]:
    """The mask of each node that has one."""
    return {path[:-2]: jnp.asarray(x) for path, x in items(raw) if path[-2:] == (FIXED, "mask")}


def _covers(flags: Array, x: Any) -> bool:
    """Whether there is a flag for each entry of ``x``, or for each slice."""
    return flags.ndim == x.ndim and all(n in (1, size) for n, size in zip(flags.shape, x.shape, strict=True))


def explain_errors(init: Callable[[PyTree], PyTree], update: Update) -> Update:
    """``update`` of an optimizer, with errors that name what is wrong with its arguments."""

    def update_or_explain(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        result, failure = (None, None), None
        try:
            result = update(updates, state, params, **extra)
        except Exception as error:  # any type: a transformation may fail in any way on another tree
            failure = error
        if failure is not None or _has_other_shapes(state, result[1]) or _has_other_shapes(params, result[0]):
            why = _explain_arguments(init, partial(update, **extra), updates, state, params)
            if why is not None:
                raise ValueError(f"optimizer.update takes {why}") from failure
        if failure is not None:
            raise failure
        return result

    return update_or_explain


def _has_other_shapes(old: PyTree, new: PyTree) -> bool:
    """Whether arrays of two trees of one structure have other shapes."""
    same_structure = jax.tree.structure(old) == jax.tree.structure(new)
    shapes, new_shapes = ([x.shape if is_array(x) else None for x in jax.tree.leaves(tree)] for tree in (old, new))
    return same_structure and shapes != new_shapes


def _explain_arguments(
    init: Callable[[PyTree], PyTree], update: Update, updates: PyTree, state: PyTree, params: PyTree
) -> str | None:
    """What is wrong with the arguments of a step, and what to do; None if they fit each other."""
    if params is None:
        return _explain_state(init, state, updates)
    if type(updates) is tuple and type(params) is not tuple:
        value_too = "`jax.value_and_grad` returns the value too: `value, grads = ...`."
        return f"gradients first, but got a tuple. {CALL} {value_too}"
    if type(params) is tuple and type(updates) is not tuple:
        return f"the raw tree last, but got a tuple. {CALL}"
    if (difference := first_difference(partition(updates)[0], partition(params)[0])) is not None:
        # Some transformations take gradients unlike their parameters: the step must succeed with what is advised.
        right = updates if difference.of == A_RAW_TREE else params
        try:
            jax.eval_shape(lambda: update(right, state, right))
        except Exception:
            pass
        else:
            return _explain_gradients(difference)
    return _explain_state(init, state, params)


def _explain_gradients(difference: Difference) -> str:
    """What is wrong with gradients that differ from the raw tree, and what to do."""
    if difference.of == A_RAW_TREE:
        return f"the raw tree as params, but got the model's own parameters: {difference.swapped}. {CALL}"
    whose, advice = {
        THE_MODEL: (
            "the model's own parameters",
            "Differentiate with respect to the raw tree: `jax.grad(lambda raw: loss(p.apply(raw)))(raw)`.",
        ),
        OTHER_SHAPES: ("other shapes", "Differentiate one number, such as the mean of the loss over a batch."),
    }.get(difference.of, (difference.of, "Differentiate with respect to `raw`."))
    return f"gradients of the raw tree, but got those of {whose}: {difference}. {advice}"


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
    if difference.of == A_RAW_TREE:
        return (
            f"gradients and parameters of the raw tree that its state belongs to, but got those of the model: "
            f"{difference.swapped}. Differentiate with respect to `raw`, and call `tx.update(grads, state, raw)`."
        )
    of_fixed = "@fixed" in difference.path and difference.wanted == "nothing"
    whose, advice = {
        THE_MODEL: ("that of the model's own parameters", "Make it from the raw tree, `tx.init(raw)`."),
        ANOTHER_CHAIN: (
            "that of another chain",
            "Make a new one, `tx.init(raw)`, or convert it, `rpx.transfer(old, new, state, like=old_raw)`.",
        ),
        ANOTHER_MODEL: (
            "one with values for what is fixed" if of_fixed else "that of another optimizer or model",
            "Make it with the same `tx`, `tx.init(raw)`.",
        ),
    }.get(difference.of, (f"one of {difference.of}", "Make it with the same `tx`, `tx.init(raw)`."))
    return f"the state of the raw tree, but got {whose}: {difference}. {advice}"


THE_MODEL = "the model"
"""It has arrays where a raw tree has markers."""
A_RAW_TREE = "a raw tree"
"""It has markers where the model has arrays."""
ANOTHER_CHAIN, ANOTHER_MODEL, OTHER_SHAPES = "another chain", "another model", "other shapes"


class Difference(NamedTuple):
    """Where a tree differs from the one that is wanted: the path, what should be there and what is, in words.

    ``of`` says what the tree belongs to instead.
    """

    path: str
    wanted: str
    got: str
    of: str

    @property
    def swapped(self) -> Difference:
        """The same, if it is the other tree that is wrong."""
        return self._replace(wanted=self.got, got=self.wanted)

    def __str__(self) -> str:
        return f"expected {self.wanted} at {self.path!r}, got {self.got}"


def first_difference(actual: PyTree, like: PyTree) -> Difference | None:
    """The first difference between the arrays of two trees; another stage comes before all others."""
    shapes, expected_shapes = (by_parameter(tree, lambda x: tuple(x.shape), empty=False) for tree in (actual, like))
    for path in [path for path in expected_shapes if path in shapes]:
        mark, wanted = (next(iter(values[path])).split("/")[0] for values in (shapes, expected_shapes))
        if mark != wanted:
            of = ANOTHER_CHAIN if mark and wanted else THE_MODEL if wanted else A_RAW_TREE
            return Difference(path, repr(wanted) if wanted else "an array", repr(mark) if mark else "an array", of)
    for path in dict.fromkeys([*expected_shapes, *shapes]):
        found, expected = shapes.get(path, {}), expected_shapes.get(path, {})
        for below in dict.fromkeys([*expected, *found]):
            if found.get(below) != expected.get(below):
                in_both = below in found and below in expected
                wanted, got = (
                    f"shape {x[below]}" if in_both else "an array" if below in x else "nothing"
                    for x in (expected, found)
                )
                of = OTHER_SHAPES if in_both else ANOTHER_MODEL
                return Difference(f"{path}/{below}".strip("/"), wanted, got, of)
    return None


def state_shardings(state: PyTree, raw: PyTree, shardings: PyTree) -> PyTree:
    """The shardings of an optimizer's state, or of a whole training state: each array is sharded like its raw array.

    An array of the state belongs to a raw array if its path ends in the path of the raw array and the shapes are equal:
    moments, averages and accumulated gradients. All other arrays, such as counters, are replicated on every device.

    Args:
      state: The state, or its shapes and dtypes: ``jax.eval_shape(tx.init, raw)``.
      raw: The raw tree, or its shapes and dtypes.
      shardings: The result of :meth:`Parametrization.shardings` for it.

    Raises:
      ValueError: If a raw array has no sharding; the error names it.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> from jax.sharding import AbstractMesh, PartitionSpec
      >>> mesh = AbstractMesh((2, 4), ("data", "model"))
      >>> params, p = {"w": jnp.ones((8, 16))}, rpx.WeightNorm()
      >>> shardings = p.shardings({"w": PartitionSpec("data", "model")}, mesh, like=params)
      >>> raw = jax.eval_shape(p.init, params)
      >>> state = rpx.training.state_shardings(jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, raw), raw, shardings)
      >>> state[0].trace["w"]["@weight_norm"]["g"].spec
      P(None, 'model')
    """
    shapes = {path: x.shape for path, x in items(raw) if is_array(x)}
    sharding_of = {path: x for path, x in items(shardings) if isinstance(x, NamedSharding)}
    if any(isinstance(x, PartitionSpec) for _, x in items(shardings)):
        raise ValueError("state_shardings takes the result of `p.shardings`, but got a tree with a PartitionSpec.")
    if lacking := sorted(shapes.keys() - sharding_of.keys()):
        raise ValueError(
            f"state_shardings: there is no sharding for {path_text(lacking[0])!r} of the raw tree. Pass the raw tree, "
            f"and the result of `p.shardings` for it."
        )
    replicated = NamedSharding(next(iter(sharding_of.values())).mesh, PartitionSpec())

    def of(path: Names, x: Any) -> NamedSharding | None:
        if not is_array(x):
            return None
        ends = (path[i:] for i in range(len(path) + 1))
        raw_path = next((end for end in ends if end in shapes), None)
        return replicated if raw_path is None or shapes[raw_path] != x.shape else sharding_of[raw_path]

    paths, leaves, treedef = flatten_with_names(state)
    return treedef.unflatten([of(path, x) for path, x in zip(paths, leaves, strict=True)])
