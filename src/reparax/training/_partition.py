"""Splits a raw tree into free (trainable) and fixed values, and labels its arrays."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from reparax.core.fields import Static
from reparax.core.paths import PyTree, items, path_text, with_names
from reparax.core.raw import FIXED, first_marker, flatten_leaves, places_of, state_flags
from reparax.core.where import is_bias_or_scale
from reparax.numerics.arithmetic import has_gradient

T = TypeVar("T")


def partition(raw: T) -> tuple[T, T]:
    """Splits a raw tree into the trainable values (free) and all others (fixed).

    Free values are floating and complex arrays. Fixed values are all arrays under ``"@fixed"``; model state (nnx
    variables other than ``Param``, linen collections beside ``params``); and leaves without a gradient: integers,
    booleans, PRNG keys, and leaves that are not arrays, such as an activation function in an equinox module. Both
    results have the structure of ``raw``, with None where a value belongs to the other result, so you can pass ``free``
    to ``jax.grad`` and optax.

    Args:
      raw: A raw tree, its gradients or updates, or their shapes and dtypes.

    Returns:
      The pair ``(free, fixed)``; :func:`combine` is the inverse.

    Raises:
      TypeError: If ``raw`` is a chain or a string instead of a tree.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.Freeze(where="b").init({"w": jnp.ones(2), "b": jnp.zeros(2), "f": jnp.tanh})
      >>> free, fixed = rpx.partition(raw)
      >>> free
      {'b': {'@freeze': {'@fixed': {'w': None}}}, 'f': None, 'w': Array([1., 1.], dtype=float32)}
      >>> fixed["b"], fixed["f"] is jnp.tanh, fixed["w"]
      ({'@freeze': {'@fixed': {'w': Array([0., 0.], dtype=float32)}}}, True, None)
    """
    require_tree("partition", raw, "rpx.partition(p.init(params))")
    leaves, treedef = jax.tree.flatten(raw)
    flags = are_free(raw)
    free = [leaf if flag else None for flag, leaf in zip(flags, leaves, strict=True)]
    fixed = [None if flag else leaf for flag, leaf in zip(flags, leaves, strict=True)]
    return treedef.unflatten(free), treedef.unflatten(fixed)


def combine(free: T, fixed: T) -> T:
    """Joins the two halves that :func:`partition` returned, ``free`` and ``fixed``, into a raw tree.

    Raises:
      ValueError: If the two have different structures, or if both hold a value at the same path.
    """
    trees = with_names(free, is_none), with_names(fixed, is_none)
    if jax.tree.structure(trees[0], is_leaf=is_none) != jax.tree.structure(trees[1], is_leaf=is_none):
        raise ValueError(
            f"combine takes the two halves of one raw tree, but got trees of different "
            f"structures{_explain_difference(*trees)}. If `free` was saved alone, make its other half with "
            f"`rpx.partition(p.init(params))[1]`."
        )
    pairs = zip(items(trees[0], is_none), jax.tree.leaves(trees[1], is_leaf=is_none), strict=True)
    if clashes := [path_text(path) for (path, a), b in pairs if a is not None and b is not None]:
        raise ValueError(
            f"combine takes the two halves of one raw tree, but both of them hold a value at {clashes[0]!r}. Pass "
            f"`free, fixed = rpx.partition(raw)`, or updated versions of both."
        )
    return jax.tree.map(lambda a, b: b if a is None else a, *trees, is_leaf=is_none)


def _explain_difference(free: PyTree, fixed: PyTree) -> str:
    """Returns the end of an error text that says where two trees differ; empty if only the types of nodes differ."""
    a, b = ({path_text(path) for path, _ in items(tree, is_none)} for tree in (free, fixed))
    paths = sorted(a ^ b)
    return f", which differ at {', '.join(map(repr, paths[:3]))}{' and more' * (len(paths) > 3)}" if paths else ""


def is_none(x: object) -> bool:
    """Returns whether a node is None, which JAX does not treat as a leaf by default."""
    return x is None


def is_placeholder(x: object) -> bool:
    """Returns whether ``x`` is a placeholder for a missing value: None, or optax's empty named tuple."""
    return x is None or (isinstance(x, tuple) and not x and type(x) is not tuple)


def is_parametrized(tree: PyTree) -> bool:
    """Returns whether a tree has markers such as ``"@lora"``, so that the model must use ``p.apply(tree)`` instead.

    The result is False for a raw tree of a chain that has only noise, dropout and casts: these stages change arrays in
    place, so their raw tree looks like the model's parameters.

    Args:
      tree: A tree of arrays, or of their shapes and dtypes.

    Raises:
      TypeError: If ``tree`` is a chain or a string instead of a tree.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
      >>> raw = p.init({"w": jnp.ones((2, 2))})
      >>> rpx.is_parametrized(raw), rpx.is_parametrized(p.fold(raw))
      (True, False)
    """
    require_tree("is_parametrized", tree, "rpx.is_parametrized(p.init(params))")
    return first_marker(places_of(tree)) is not None


def param_labels(raw: PyTree, *, main: Any = "free", aux: Any = "free", fixed: Any = "fixed") -> PyTree:
    """Labels each value of a raw tree as main, auxiliary or fixed, for ``optax.partition``.

    Args:
      raw: A raw tree, its gradients or updates, or their shapes and dtypes.
      main: The label for free main values, such as the ``v`` of weight norm, and for free arrays that no stage
        replaces.
      aux: The label for free auxiliary values, such as the ``g`` of weight norm.
      fixed: The label for all values that :func:`partition` treats as fixed.

    Returns:
      A tree of labels with the structure of ``raw``.

    Raises:
      TypeError: If ``raw`` is a chain or a string instead of a tree.

    Example:
      >>> import jax.numpy as jnp, optax, reparax as rpx
      >>> raw = (rpx.Freeze(where="b") >> rpx.WeightNorm()).init({"w": jnp.ones((2, 2)), "b": jnp.zeros(2)})
      >>> rpx.training.param_labels(raw)
      {'b': {'@freeze': {'@fixed': {'w': 'fixed'}}}, 'w': {'@weight_norm': {'g': 'free', 'v': 'free'}}}
      >>> tx = optax.partition({"free": optax.adam(1e-3), "fixed": optax.set_to_zero()}, rpx.training.param_labels)
      >>> rpx.training.param_labels(raw, main=True, aux=False, fixed=False)  # which values are main
      {'b': {'@freeze': {'@fixed': {'w': False}}}, 'w': {'@weight_norm': {'g': False, 'v': True}}}
    """
    require_tree("param_labels", raw, "rpx.training.param_labels(p.init(params))")
    _, slots, treedef = flatten_leaves(raw)
    pairs = zip(slots, are_free(raw), strict=True)
    return treedef.unflatten([(main if slot.main else aux) if free else fixed for slot, free in pairs])


def decay_mask(raw: PyTree) -> PyTree:
    """Returns whether weight decay should shrink each value of a raw tree, for use as the ``mask`` of ``optax.adamw``.

    The mask is True for free main values (such as the ``v`` of weight norm) of two or more dimensions. These exceptions
    are False:

    * arrays of any shape whose names mark them as biases or scales: ``bias`` (alone or as a part of a name, as in
      ``bias_n``), ``b``, ``scale``, ``offset``, ``gamma``, ``beta``;
    * values of stages in which a smaller value does not mean a smaller weight, such as ``Orthogonal``, ``Positive`` and
      ``Simplex`` (stages declare this with ``decays = False``).

    The mask is also False for auxiliary values, such as the ``g`` of weight norm, and for fixed values.

    Under weight norm, decay of ``v`` does not change the effective weight, only how fast its direction learns. To
    shrink the weights themselves, decay the lengths ``g`` instead, with the mask ``rpx.training.param_labels(raw,
    main=False, aux=True, fixed=False)``.

    Args:
      raw: A raw tree, its gradients or updates, or their shapes and dtypes.

    Returns:
      A tree of booleans with the structure of ``raw``.

    Raises:
      TypeError: If ``raw`` is a chain or a string instead of a tree.

    Example:
      >>> import jax.numpy as jnp, optax, reparax as rpx
      >>> p = rpx.Orthogonal(where="q") >> rpx.WeightNorm(where="w")
      >>> raw = p.init({"w": jnp.ones((2, 2)), "q": jnp.eye(2), "bias": jnp.zeros(2)})
      >>> mask = rpx.decay_mask(raw)
      >>> mask["w"], mask["q"]["@orthogonal"]["x"], mask["bias"]
      ({'@weight_norm': {'g': False, 'v': True}}, False, False)
      >>> tx = rpx.optimizer(optax.adamw(1e-3, mask=rpx.decay_mask))

    References:
      Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, 2019.
    """
    require_tree("decay_mask", raw, "rpx.decay_mask(p.init(params))")
    leaves, slots, treedef = flatten_leaves(raw)
    return treedef.unflatten(
        [
            free and slot.main and slot.decays and leaf.ndim >= 2 and not is_bias_or_scale(slot)
            for leaf, slot, free in zip(leaves, slots, are_free(raw), strict=True)
        ]
    )


def require_tree(who: str, raw: PyTree, write: str) -> None:
    """Raises an error if ``raw`` is a string, or a chain of stages, which JAX would treat as a tree without leaves."""
    if isinstance(raw, Static | str):
        raise TypeError(f"{who} takes a raw tree, but got {raw!r}. Write `{write}`.")


def are_free(raw: PyTree) -> list[bool]:
    """Returns, for each leaf of a raw tree, whether it is trainable."""
    leaves = zip(items(raw), state_flags(raw), strict=True)
    return [not (FIXED in path or state) and has_gradient(leaf) for (path, leaf), state in leaves]
