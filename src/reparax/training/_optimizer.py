"""Makes optimizers for raw trees, which leave fixed values unchanged, and resets moments and shards optimizer states.

If gradients, a state or parameters belong to another tree, a step raises an error that says so. An optax transformation
alone would fail with a less specific error, or silently broadcast arrays. Arguments are checked only after the
transformation has failed or has changed a shape, so that a correct step costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from reparax.core.calls import (
    BY_HAND,
    CallName,
    describe_non_stage,
    is_stage,
    require_by_hand,
    require_chains,
    with_any_key,
)
from reparax.core.chain import Parametrization
from reparax.core.checks import by_parameter
from reparax.core.initialization import initialize
from reparax.core.paths import Names, PyTree, flatten_with_names, is_traceable, items, path_text, types_of_result
from reparax.core.raw import (
    FIXED,
    flatten,
    is_aligned,
    is_mark,
    kind_of,
    parameter_path,
    registered_kind,
    require_no_raw,
)
from reparax.numerics.arithmetic import is_array
from reparax.training._partition import combine, is_none, is_placeholder, partition, require_tree

T = TypeVar("T")

Update = Callable[..., tuple[PyTree, PyTree]]


class Transformation(NamedTuple):
    """A transformation with optax's interface."""

    init: Callable[[PyTree], PyTree]
    update: Update


CALL = "Call `tx.update(grads, state, raw)`."
INSTEAD = "To train a raw tree, use `rpx.optimizer` alone: the result of `apply` is already in the image."


def optimizer(tx: T, p: Parametrization | None = None, *, updates: Literal["by hand"] | None = None) -> T:
    """Makes an optimizer for a whole raw tree: ``tx`` updates trainable values, and only ``p.update`` moves fixed ones.

    If the chain ``p`` is given, ``optax.apply_updates`` gives the same values as a step of ``tx`` followed by
    ``p.update``: masks and other integers are exact, and floats are exact up to the rounding of one addition. So power
    iteration and pruning need no further code. Stages whose update needs a key or gradients are left out: for
    :class:`SET` and :class:`RigL`, also call ``p.update(raw, key, grads)``, which updates the other stages of the chain
    once more. Booleans stay as they are under ``eqx.apply_updates``, which turns them into integers. Fixed values that
    ``p.update`` changes must start at finite numbers, because adding updates turns infinity into NaN.

    ``tx`` never sees the values that :func:`partition` treats as fixed: it keeps no state for them, its weight decay
    does not change them, and its gradient norms do not include them. Fixed values that do not change get zero updates
    that keep every bit. Leaves to which nothing can be added, such as PRNG keys and functions, get the update None, as
    in equinox. On a CPU, XLA treats float32 numbers below 1.2e-38 (subnormal numbers) as zeros in every addition. If
    your tree has such leaves or fixed numbers, update only the free part::

        free, fixed = rpx.partition(raw)
        raw = rpx.combine(optax.apply_updates(free, rpx.partition(updates)[0]), fixed)

    The state is the state of ``tx`` for ``free``, so functions of optax that read it, such as
    ``schedule_free_eval_params``, also take ``free``.

    Put every transformation inside ``tx``. A transformation that you chain after the optimizer, such as weight decay,
    would also move fixed values and scale their updates. Masks and partitions around the optimizer would hide fixed
    values from it. Gradients and parameters may cover the whole raw tree or only its free part. A mask of ``tx`` may be
    a function, or a tree with the structure of ``raw``. The arguments ``grad`` and ``value_fn`` of optax's line
    searches also work.

    Args:
      tx: An optax transformation, or any named tuple of two functions ``init`` and ``update``; or an object with a
        method ``gradient_transformation``, such as ``optax.MultiSteps``.
      p: The chain that made the raw tree.
      updates: ``"by hand"``, instead of the chain, if you call ``raw = p.update(raw)`` after each step.

    Returns:
      A transformation of the same class as ``tx``. Its state is the state of ``tx`` for the free part. Its ``init``
      raises an error if the tree lacks the fixed values of ``p``. It also raises an error if neither ``p`` nor
      ``updates`` is given and the tree has a stage whose weights would be wrong without ``update``, such as
      :class:`SpectralNorm`.

    Raises:
      TypeError: If ``tx`` is not a transformation, or ``p`` is not a chain.
      ValueError: If ``updates`` is neither None nor ``"by hand"``, or if both ``p`` and ``updates`` are given.

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
      >>> p = rpx.MagnitudePruning(0.5)
      >>> raw, tx = p.init({"w": jnp.array([[1.0, 2.0]])}), rpx.optimizer(optax.sgd(1.0), p)
      >>> updates, _ = tx.update(jax.tree.map(lambda x: jnp.where(x == 2, 1.5, 0.0), raw), tx.init(raw), raw)
      >>> p.fold(optax.apply_updates(raw, updates))["w"]  # 1 is now the larger one
      Array([[1., 0.]], dtype=float32)
    """
    inner: Any = tx
    if hasattr(inner, "gradient_transformation"):
        inner = inner.gradient_transformation()
    if getattr(inner, "_fields", ()) != ("init", "update"):
        raise TypeError(
            f"optimizer takes an optax transformation, but got a value of type {type(tx).__name__!r}. "
            f"Pass one, as in `rpx.optimizer(optax.adam(1e-3))`."
        )
    if p is not None and not is_stage(p):
        raise TypeError(f"optimizer takes a chain second, but got {describe_non_stage(p)}")
    require_by_hand("optimizer", updates)
    if p is not None and updates is not None:
        raise ValueError(f"optimizer takes either a chain `p` or updates={BY_HAND!r}, but got both. Leave one out.")
    updating, by_hand = p if p is not None and p.has_update else None, updates is not None

    def init(params: PyTree) -> PyTree:
        require_tree("optimizer.init", params, "tx.init(p.init(params))")
        return inner.init(partition(params)[0])

    def checked_init(params: PyTree) -> PyTree:
        if updating is not None:
            _require_updated_values(updating, params)
        elif not by_hand:
            _require_no_update(params)
        return init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        raw = updates if params is None else params
        if updating is not None and params is None:
            raise ValueError(f"optimizer.update needs the raw tree to update fixed values, but got None. {CALL}")
        free_extra = {name: _take_free(value, *partition(raw)) for name, value in extra.items()}
        new_updates, state = inner.update(partition(updates)[0], state, partition(params)[0], **free_extra)
        new_updates = combine(new_updates, jax.tree.map(_neutral_update, partition(raw)[1]))
        return (new_updates if updating is None else _updates_of_fixed(updating, raw, new_updates)), state

    return type(inner)(checked_init, explain_errors(init, update))


def _updates_of_fixed(p: Parametrization, raw: PyTree, updates: PyTree) -> PyTree:
    """Returns the updates that, when added to ``raw``, give ``p.update(raw + updates)``."""

    def added(w: Any, u: Any) -> Any:
        return w if u is None else jnp.asarray(w + u).astype(w.dtype)

    def update_to(new: Any, moved: Any, w: Any, u: Any) -> Any:
        if new is moved:
            return u
        if jnp.issubdtype(new.dtype, jax.dtypes.extended):
            raise ValueError(
                f"optimizer.update cannot update fixed values that are PRNG keys, because no update can be added to a "
                f"key. Call `raw = p.update(raw)` after each step, and confirm this with `rpx.optimizer(tx, "
                f"updates={BY_HAND!r})`."
            )
        # Equal entries get a zero update, because infinity minus itself would be NaN.
        return new.astype(jnp.int8) - w.astype(jnp.int8) if new.dtype == bool else jnp.where(new == w, 0, new - w)

    moved = jax.tree.map(added, raw, updates)
    return jax.tree.map(update_to, _updated(p, moved), moved, raw, updates, is_leaf=is_none)


def _updated(p: Parametrization, raw: PyTree) -> PyTree:
    """Returns ``p.update(raw)``, or ``raw.update()`` if ``raw`` is a model that holds the chain."""
    if not getattr(type(raw), "holds_chain", False):
        return p.update(raw)
    if raw.p != p:
        raise ValueError(
            f"optimizer updates the fixed values of {p!r}, but got a model with the chain {raw.p!r}. Pass the same "
            f"chain to both."
        )
    return raw.update()


def _require_updated_values(p: Parametrization, raw: PyTree) -> None:
    """Raises an error unless ``raw`` is a raw tree of ``p`` with its fixed values, or a model with such a tree."""
    leaves = items(raw, is_placeholder)
    fixed = [x for path, x in leaves if FIXED in path]
    if not any(map(is_placeholder, fixed)):
        try:
            types_of_result(lambda raw: _updated(p, raw), raw)
            return
        except ValueError:
            kinds = {kind_of(name) for path, _ in leaves for name in path if is_mark(name)}
            if fixed or kinds.isdisjoint(stage.kind for stage in p):
                raise
    raise ValueError(
        f"optimizer.init needs the whole raw tree, whose fixed values {p!r} updates, but they are missing. Put masks "
        f"and partitions inside the optimizer, `rpx.optimizer(optax.masked(tx, mask), p)`. Filter a model of equinox "
        f"by `eqx.is_array`. For a model that holds its chain, pass `module.raw(variables)`, or use `tx` alone and let "
        f"the model's calls update them."
    )


def _require_no_update(raw: PyTree) -> None:
    """Raises an error if a raw tree has values that need ``p.update`` in each step, such as those of spectral norm."""
    for path, _ in items(raw, is_placeholder):
        for mark, below in pairwise(path):
            if below == FIXED and is_mark(mark) and getattr(registered_kind(kind_of(mark)), "needs_update", False):
                raise ValueError(
                    f"optimizer.init found {mark!r} at {parameter_path(path)!r}, whose fixed values must be updated in "
                    f"each step, or the weights will be wrong. Pass the chain, `rpx.optimizer(tx, p)`. Or call `raw = "
                    f"p.update(raw)` after each step, and confirm this with `rpx.optimizer(tx, updates={BY_HAND!r})`."
                )


def _take_free(value: Any, free: PyTree, fixed: PyTree) -> Any:
    """Restricts an extra argument of ``tx`` to trainable values, or a function of raw trees to a function of these."""
    if callable(value) and jax.tree_util.all_leaves([value]):
        return _function_of_free(value, free, fixed)
    if jax.tree.structure(value, is_leaf=is_none) != jax.tree.structure(free, is_leaf=is_none):
        return value
    return jax.tree.map(lambda w, x: None if w is None else x, free, value, is_leaf=is_none)


def _function_of_free(function: Callable[..., Any], free: PyTree, fixed: PyTree) -> Callable[..., Any]:
    """Returns a function of trainable values that adds the fixed ones and calls ``function`` with whole raw trees."""

    def complete(x: Any) -> Any:
        return combine(x, fixed) if jax.tree.structure(x) == jax.tree.structure(free) else x

    return lambda *args, **kwargs: function(*map(complete, args), **kwargs)


def _neutral_update(x: Any) -> Any:
    """Returns zeros that keep every bit of ``x`` when added to it, or None if nothing can be added to ``x``.

    Subnormal numbers are the exception: XLA may treat them as zeros.
    """
    if is_array(x) and x.dtype == jax.dtypes.float0:  # JAX gives integers and booleans gradients of this dtype.
        return jnp.zeros(x.shape, bool)
    if not is_traceable(x) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    return jnp.zeros_like(x) if x.dtype == bool else -jnp.zeros_like(x)  # Adding 0.0 would turn -0.0 into 0.0.


def projected(p: Parametrization) -> Transformation:
    """Makes an optax transformation that projects parameters onto the image of ``p`` after each step.

    Use it to train the model's own parameters, without a raw tree. ``optax.chain(optax.adam(1e-3), projected(p))``
    changes the updates so that parameters become ``p.fold(p.init(params + updates))``. This is the nearest point in the
    image of ``p`` (the weights that ``p`` can represent), unless its stages define another one. Put the transformation
    last in the optax chain.

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
        # Initialize the stages here, so that unsuitable parameters raise an error before the first step.
        initialize(tuple(p.deterministic), flatten(params), None)
        return ()

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        del extra
        if params is None:
            raise ValueError(
                f"{CallName(p, 'projected')} needs the parameters that it projects, but got params=None. Call "
                f"`tx.update(grads, state, params)`."
            )
        require_no_raw(CallName(p, "projected"), params, INSTEAD)
        has_one_structure = jax.tree.structure(updates) == jax.tree.structure(params)
        difference = None if has_one_structure else first_difference(updates, params)
        if difference is not None:
            raise ValueError(
                f"{CallName(p, 'projected')} takes updates with the structure of the parameters, but they differ: "
                f"{difference}. Call `tx.update(grads, state, params)`."
            )
        updated = jax.tree.map(lambda w, u: w + u.astype(w.dtype), params, updates)
        nearest = p.fold(with_any_key(p.deterministic.init)(updated))
        return jax.tree.map(lambda new, w, u: (new - w).astype(u.dtype), nearest, params, updates), state

    return Transformation(init, update)


def reset_moments(state: T, before: PyTree, after: PyTree) -> T:
    """Sets the moments of an optimizer to zero for weights that became active between two raw trees.

    While a mask hides a weight, the weight's moments are outdated, or do not come from its own gradients. This function
    sets the moments to zero wherever a mask is 0 in ``before`` and 1 in ``after``. It covers the masks of
    :class:`RigL`, :class:`SET`, :class:`MagnitudePruning`, :class:`NByM` and :class:`GlobalMagnitudePruning`.

    Use it for optimizers whose states are sums over gradients, such as SGD, Adam and Lion; both moments of Adam are
    reset, as in the reference code of RigL. Do not use it for optimizers whose states hold weights or step sizes
    (``schedule_free``, ``rprop``), because the weights or step sizes would be set to zero too.

    Args:
      state: The state of an optimizer of the raw tree, such as Adam's. Arrays under the path of a masked weight are
        reset if they have its shape; a factored moment has another shape, so it is not reset.
      before: The whole raw tree that you passed to ``update``, including the masks.
      after: The raw tree that ``update`` returned.

    Returns:
      A state with the same structure.

    Raises:
      ValueError: If the two trees have masks at different paths or of different shapes, or no masks at all.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> p, tx = rpx.sparse.RigL(0.5, drop_fraction=0.5), rpx.optimizer(optax.sgd(0.1, momentum=0.9))
      >>> before = p.init({"w": jnp.array([[3.0, 1.0, 0.0, 0.0]])}, jax.random.key(0))
      >>> _, state = tx.update(jax.tree.map(jnp.ones_like, before), tx.init(before))
      >>> after = p.update(before, grads={"w": jnp.array([[0.1, 0.2, -0.9, 0.3]])})
      >>> rpx.training.reset_moments(state, before, after)[0].trace["w"]["@rigl"]["w"]
      Array([[1., 1., 0., 1.]], dtype=float32)
    """
    activated = _activated_by_mask(before, after)
    paths, leaves, treedef = flatten_with_names(state)
    free_paths = {path for path, x in items(after) if is_array(x) and FIXED not in path}

    def reset(x: Any, raw_path: Names | None) -> Any:
        if raw_path is None or not is_array(x) or not is_aligned(raw_path):
            return x
        for node, flags in activated.items():
            if raw_path[: len(node)] == node and _covers(flags, x):
                x = jnp.where(flags, jnp.zeros_like(x), x)
        return x

    return treedef.unflatten(list(map(reset, leaves, _raw_paths(paths, free_paths))))


def _raw_paths(state_paths: Sequence[Names], raw_paths: AbstractSet[Names]) -> list[Names | None]:
    """Maps each path in an optimizer state to the raw path that it ends with: ``0/mu/w/@rigl/w`` to ``w/@rigl/w``.

    A path that ends with no raw path, such as the path of a counter, maps to None. If a path ends with several raw
    paths, the one whose prefix, here ``0/mu``, occurs in the most paths is chosen, because a raw tree begins there.
    """
    starts_of_paths = [[i for i in range(len(path) + 1) if path[i:] in raw_paths] for path in state_paths]
    counts = Counter(path[:i] for path, starts in zip(state_paths, starts_of_paths, strict=True) for i in starts)

    def raw_path(path: Names, starts: Sequence[int]) -> Names | None:
        return path[max(starts, key=lambda i: counts[path[:i]]) :] if starts else None

    return list(map(raw_path, state_paths, starts_of_paths))


def _activated_by_mask(old_raw: PyTree, new_raw: PyTree) -> dict[Names, Array]:
    """Returns, by the path of each stage's marker dict, a boolean array of where its mask changes from 0 to 1."""
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
    """Returns the masks of a raw tree, by the path of the marker dict (such as ``@rigl``) that holds the mask."""
    return {path[:-2]: jnp.asarray(x) for path, x in items(raw) if path[-2:] == (FIXED, "mask")}


def _covers(flags: Array, x: Any) -> bool:
    """Returns whether ``flags`` has as many axes as ``x`` and broadcasts to the shape of ``x``."""
    return flags.ndim == x.ndim and all(n in (1, size) for n, size in zip(flags.shape, x.shape, strict=True))


def explain_errors(init: Callable[[PyTree], PyTree], update: Update) -> Update:
    """Wraps an optimizer's ``update``, so that errors say which argument does not fit the others, and how."""

    def update_or_explain(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        def require_fitting(failure: Exception | None) -> None:
            reason = _explain_arguments(init, partial(update, **extra), updates, state, params)
            if reason is not None:
                raise ValueError(f"optimizer.update takes {reason}") from failure

        try:
            new_updates, new_state = update(updates, state, params, **extra)
        except Exception as error:  # A transformation may raise any error if a tree does not fit.
            require_fitting(error)
            raise
        if _has_other_shapes(state, new_state) or _has_other_shapes(params, new_updates):
            require_fitting(None)
        return new_updates, new_state

    return update_or_explain


def _has_other_shapes(old: PyTree, new: PyTree) -> bool:
    """Returns whether two trees have the same structure, but arrays of different shapes."""
    shapes, new_shapes = ([x.shape if is_array(x) else None for x in jax.tree.leaves(tree)] for tree in (old, new))
    return shapes != new_shapes and jax.tree.structure(old) == jax.tree.structure(new)


def _explain_arguments(
    init: Callable[[PyTree], PyTree], update: Update, updates: PyTree, state: PyTree, params: PyTree
) -> str | None:
    """Returns an error text on the arguments of ``update`` that do not fit and on what to do, or None if all fit."""
    if params is None:
        return _explain_state(init, state, updates)
    return (
        _explain_tuples(updates, params)
        or _explain_gradients(update, updates, state, params)
        or _explain_state(init, state, params)
    )


def _explain_tuples(updates: PyTree, params: PyTree) -> str | None:
    """Returns the error text for a tuple in place of gradients or a raw tree, or None if there is no such tuple."""
    if type(updates) is tuple and type(params) is not tuple:
        value_too = "`jax.value_and_grad` returns the value too: `value, grads = ...`."
        return f"gradients first, but got a tuple. {CALL} {value_too}"
    if type(params) is tuple and type(updates) is not tuple:
        return f"the raw tree last, but got a tuple. {CALL}"
    return None


# These phrases name the origin of an unexpected tree. The model's own tree has arrays where a raw tree has marker
# dicts, such as {"@lora": ...}.
THE_MODEL, A_RAW_TREE = "the model", "a raw tree"
ANOTHER_CHAIN, ANOTHER_MODEL, OTHER_SHAPES = "another chain", "another model", "other shapes"
FIXED_VALUES = "fixed values too"

_GRADIENTS = "gradients of the raw tree, but got those of"
_WRONG_GRADIENTS = {
    A_RAW_TREE: f"the raw tree as params, but got the model's own parameters: {{swapped}}. {CALL}",
    THE_MODEL: f"{_GRADIENTS} the model's own parameters: {{difference}}. Differentiate with respect to the raw tree: "
    f"`jax.grad(lambda raw: loss(p.apply(raw)))(raw)`.",
    ANOTHER_CHAIN: f"{_GRADIENTS} another chain: {{difference}}. Differentiate with respect to `raw`.",
    ANOTHER_MODEL: f"{_GRADIENTS} another model: {{difference}}. Differentiate with respect to `raw`.",
    OTHER_SHAPES: f"{_GRADIENTS} other shapes: {{difference}}. Differentiate one number, such as the mean of the loss "
    f"over a batch.",
}
_STATE = "the state of the raw tree, but got"
_REMAKE = "Make it with the same `tx`, `tx.init(raw)`."
_WRONG_STATE = {
    A_RAW_TREE: "gradients and parameters of the raw tree that its state belongs to, but got those of the model: "
    "{swapped}. Differentiate with respect to `raw`, and call `tx.update(grads, state, raw)`.",
    THE_MODEL: f"{_STATE} that of the model's own parameters: {{difference}}. Make it from the raw tree, "
    f"`tx.init(raw)`.",
    ANOTHER_CHAIN: f"{_STATE} that of another chain: {{difference}}. Make a new one, `tx.init(raw)`, or convert it, "
    f"`rpx.transfer(old, new, state, like=old_raw)`.",
    ANOTHER_MODEL: f"{_STATE} that of another optimizer or model: {{difference}}. {_REMAKE}",
    OTHER_SHAPES: f"{_STATE} one of other shapes: {{difference}}. {_REMAKE}",
    FIXED_VALUES: f"{_STATE} one with values for what is fixed: {{difference}}. {_REMAKE}",
}


def _explain_gradients(update: Update, updates: PyTree, state: PyTree, params: PyTree) -> str | None:
    """Returns an error text if gradients differ from the raw tree, or None if they fit or no advice would help."""
    difference = first_difference(partition(updates)[0], partition(params)[0])
    if difference is None:
        return None
    # Some transformations take gradients that differ from the parameters, so first try whether the advice would help.
    right = updates if difference.source == A_RAW_TREE else params
    try:
        jax.eval_shape(lambda: update(right, state, right))
    except Exception:
        return None
    return difference.explain(_WRONG_GRADIENTS)


def _explain_state(init: Callable[[PyTree], PyTree], state: PyTree, raw: PyTree) -> str | None:
    """Returns an error text if an optimizer state does not fit the raw tree, or None if it fits or ``init`` fails."""
    try:
        expected = jax.eval_shape(init, raw)
    except Exception:  # If `init` fails, the state is not the cause.
        return None
    difference = first_difference(state, expected)
    if difference is None:
        return None
    if first_difference(state, raw) is None or first_difference(state, partition(raw)[0]) is None:
        return f"a state second, but got a raw tree. {CALL}"
    if FIXED in difference.path:  # A state that `init` makes has nothing there.
        difference = difference._replace(source=FIXED_VALUES)
    return difference.explain(_WRONG_STATE)


class Difference(NamedTuple):
    """A difference between a tree and the expected one.

    Attributes:
      path: The path at which the trees differ.
      expected: What should be there, in words.
      found: What is there instead, in words.
      source: What the tree belongs to: one of the phrases ``THE_MODEL``, ``A_RAW_TREE``, ``ANOTHER_CHAIN`` and so on.
    """

    path: str
    expected: str
    found: str
    source: str

    def explain(self, texts: Mapping[str, str]) -> str:
        """Fills in the text for ``source``, where ``{swapped}`` is the difference as seen from the other tree."""
        swapped = self._replace(expected=self.found, found=self.expected)
        return texts[self.source].format(difference=self, swapped=swapped)

    def __str__(self) -> str:
        return f"expected {self.expected} at {self.path!r}, got {self.found}"


def first_difference(actual: PyTree, like: PyTree) -> Difference | None:
    """Returns the first difference between two trees, or None. Differences of stages precede differences of shapes."""
    found, expected = (by_parameter(tree, lambda x: tuple(x.shape), empty=False) for tree in (actual, like))
    paths = dict.fromkeys([*expected, *found])
    for difference_at in (_difference_of_stages, _difference_of_arrays):
        differences = (difference_at(path, found.get(path, {}), expected.get(path, {})) for path in paths)
        if (first := next(filter(None, differences), None)) is not None:
            return first
    return None


Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of the raw values of a parameter, by their paths relative to the parameter."""


def _difference_of_stages(path: str, found: Shapes, expected: Shapes) -> Difference | None:
    """Compares the outermost stages of a parameter in two trees. Returns None if they are of the same kind.

    The marker names, such as ``"@lora"``, are compared. A plain array counts as having the marker "". Returns None also
    if a tree lacks the parameter.
    """
    if not found or not expected:
        return None
    marker, expected_marker = (next(iter(shapes)).split("/")[0] for shapes in (found, expected))
    if marker == expected_marker:
        return None
    expected_text, found_text = (repr(x) if x else "an array" for x in (expected_marker, marker))
    source = ANOTHER_CHAIN if expected_marker else A_RAW_TREE
    return Difference(path, expected_text, found_text, source if marker else THE_MODEL)


def _difference_of_arrays(path: str, found: Shapes, expected: Shapes) -> Difference | None:
    """Finds the first difference between the shapes of a parameter's raw values in two trees."""
    name = next((name for name in {**expected, **found} if found.get(name) != expected.get(name)), None)
    if name is None:
        return None
    full_path = f"{path}/{name}".strip("/")
    if name in found and name in expected:
        return Difference(full_path, f"shape {expected[name]}", f"shape {found[name]}", OTHER_SHAPES)
    expected_text, found_text = ("an array" if name in shapes else "nothing" for shapes in (expected, found))
    return Difference(full_path, expected_text, found_text, ANOTHER_MODEL)


def state_shardings(state: PyTree, raw: PyTree, shardings: PyTree) -> PyTree:
    """Returns shardings for an optimizer's state or a training state: each array is sharded like its raw array.

    An array of the state belongs to a raw array if its path ends in the path of the raw array and the shapes are equal.
    This holds for moments, averages and accumulated gradients. All other arrays, such as counters, are replicated on
    every device.

    Args:
      state: The state, or its shapes and dtypes: ``jax.eval_shape(tx.init, raw)``.
      raw: The raw tree, or its shapes and dtypes.
      shardings: The result of :meth:`Parametrization.shardings` for the raw tree.

    Raises:
      ValueError: If an array of ``raw`` has no sharding, or if ``shardings`` contains a ``PartitionSpec``.

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
        raise ValueError(
            "state_shardings takes NamedShardings as `shardings`, but got a PartitionSpec. Pass the result of "
            "`p.shardings(specs, mesh, like=params)`."
        )
    if missing := sorted(shapes.keys() - sharding_of.keys()):
        raise ValueError(
            f"state_shardings needs a sharding for each raw array, but got none for {path_text(missing[0])!r}. Pass "
            f"the whole raw tree as `raw`, and the result of `p.shardings` for it as `shardings`."
        )
    replicated = NamedSharding(next(iter(sharding_of.values())).mesh, PartitionSpec())

    def sharding(x: Any, raw_path: Names | None) -> NamedSharding | None:
        if not is_array(x):
            return None
        return replicated if raw_path is None or shapes[raw_path] != x.shape else sharding_of[raw_path]

    paths, leaves, treedef = flatten_with_names(state)
    return treedef.unflatten(list(map(sharding, leaves, _raw_paths(paths, shapes.keys()))))
