"""Names the leaves of trees, so that a parameter has the same path in the trees of all libraries.

:func:`flatten_with_names` flattens a tree like ``jax.tree.flatten``, and also returns the key path of each leaf as a
tuple of names (:data:`Names`). The package calls such a tuple a key path or a *place*. A *path* is its text, such as
``"dense/kernel"``. A *box* is a flax node that holds one array and its metadata.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    PyTreeDef,
    keystr,
    register_pytree_with_keys_class,
    tree_flatten_with_path,
)

from reparax.numerics.arithmetic import is_array

PyTree = Any
Names = tuple[str, ...]
IsLeaf = Callable[[object], bool]

_VALUE = GetAttrKey("value")


def dtype_of(x: Any) -> Any:
    """Returns the dtype that JAX gives to an array: for example, float32 for a float64 array unless x64 is enabled.

    For PRNG keys, whose dtype JAX does not convert, the dtype itself is returned.
    """
    return x.dtype if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(x.dtype)


def type_of(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of an array: its shape, and the dtype that JAX gives to it, such as float32 for float64."""
    return jax.ShapeDtypeStruct(x.shape, dtype_of(x))


def has_symbols(arrays: Iterable[Any]) -> bool:
    """Returns whether any of the arrays has a symbolic dimension in its shape, as ``jax.export`` allows."""
    return any(map(export.is_symbolic_dim, (n for x in arrays for n in x.shape)))


def types_of_result(fun: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Returns the shapes and dtypes of ``fun(tree)``, with None for leaves that are not arrays, such as functions.

    This function extends ``jax.eval_shape(fun, tree)`` to trees with any leaves: leaves that are not arrays are passed
    to ``fun`` unchanged. Shardings are dropped, because no caller needs them, and some stages fail on a mesh with
    explicit axes.
    """
    leaves, treedef = jax.tree.flatten(tree)

    def of_arrays(arrays: list[Any]) -> PyTree:
        """Returns the arrays of ``fun(tree)``, where ``arrays`` replace those of ``tree``; None keeps another leaf."""
        new_leaves = [leaf if array is None else array for leaf, array in zip(leaves, arrays, strict=True)]
        return jax.tree.map(lambda x: x if is_array(x) else None, fun(treedef.unflatten(new_leaves)))

    return jax.eval_shape(of_arrays, [type_of(leaf) if is_array(leaf) else None for leaf in leaves])


def is_traceable(x: object) -> bool:
    """Returns whether ``x`` is an array, or an array type, that ``jax.jit`` or ``jax.eval_shape`` takes as an argument.

    The result is False for a numpy array of text or objects. It is also False for a Python number, although
    ``jax.jit`` takes one, because a number that is a leaf of a model does not count as an array.
    """
    if isinstance(x, np.ndarray | np.generic):
        return jnp.issubdtype(x.dtype, np.number) or x.dtype == bool
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def is_empty(x: object) -> bool:
    """Returns whether ``x`` is an empty dict or tuple; a raw tree has one for each array without values of its own."""
    return (isinstance(x, Mapping) or type(x) is tuple) and not x


def is_end(x: object) -> bool:
    """Returns whether ``x`` is None or an empty node. These count as leaves of a raw tree, but not as leaves in JAX."""
    return x is None or is_empty(x)


def is_flax_instance(x: object, *names: str) -> bool:
    """Returns whether the class of ``x``, or any of its base classes, is a flax class with one of these names.

    The check does not import flax.
    """
    return not _names_in_flax(type(x)).isdisjoint(names)


@functools.cache
def _names_in_flax(cls: type) -> frozenset[str]:
    """Returns the names of all flax classes among ``cls`` and its base classes; the set may be empty."""
    return frozenset([c.__name__ for c in cls.__mro__ if c.__module__.partition(".")[0] == "flax"])


def is_box(x: object) -> bool:
    """Returns whether ``x`` is a flax node that holds one array and its metadata: an nnx variable or a linen box."""
    return is_flax_instance(x, "Variable", "AxisMetadata")


def is_reference(x: object) -> bool:
    """Returns whether ``x`` is a leaf whose content changes in place.

    Such a leaf is an nnx variable with hijax=True, or a reference from ``jax.new_ref``.
    """
    return is_flax_instance(x, "HijaxVariable") or isinstance(x, jax.Ref)


@dataclass(frozen=True)
class Elsewhere:
    """A placeholder leaf for a parameter that the model also holds earlier in the tree.

    Attributes:
      place: The key path of the parameter's first occurrence.
    """

    place: Names


AxisNames = tuple[str | None, ...]
"""The name of each axis of an array; None for an axis without a name."""


def axis_metadata(box: Any) -> Any:
    """Returns the axis metadata of a flax box, such as a tuple of axis names or a sharding; None if there is none.

    A linen box stores the axis metadata in the attribute ``names``. An nnx variable stores it under one of the metadata
    keys from :func:`name_keywords`.
    """
    if not is_flax_instance(box, "Variable"):
        return getattr(box, "names", None)
    return box.get_metadata().get(name_keywords(box)[0])


def name_keywords(variable: Any) -> list[str]:
    """Returns the metadata keys under which an nnx variable stores axis names. They depend on the version of flax.

    For a variable without axis names, the result is the key that newer versions use.
    """
    keywords = [name for name in ("sharding_names", "out_sharding") if name in variable.get_metadata()]
    return keywords or ["out_sharding"]


def axis_names(box: Any) -> AxisNames | None:
    """Returns the axis names in a flax box, such as an nnx variable, as a tuple; None if the box has no axis names.

    The name of an axis is None if the axis is unnamed or sharded over several mesh axes.
    """
    names = getattr(axis_metadata(box), "spec", axis_metadata(box))  # A NamedSharding has its names in `spec`.
    return None if names is None else tuple(name if isinstance(name, str) else None for name in names)


@register_pytree_with_keys_class
class _Named(dict[str, Any]):
    """A copy of a mapping whose JAX key paths contain its keys; unflattening it gives the mapping's original class."""

    original: Any
    """The mapping's class, if an equal mapping can be built by calling it with a dict, and otherwise its treedef."""

    @classmethod
    def of(cls, mapping: Mapping[str, Any], with_key_names: Callable[[Any], Any]) -> "_Named":
        """Copies a mapping so that JAX key paths contain its keys, and applies ``with_key_names`` to each value."""
        # Flatten only one level, so that the children of the mapping are the leaves.
        children, treedef = jax.tree.flatten(mapping, is_leaf=lambda x: x is not mapping)
        original = type(mapping) if _is_rebuilt_from_dict(mapping, children, treedef) else treedef
        if original is treedef:
            new = cls({key: with_key_names(x) for key, x in zip(_keys_of(mapping, children), children, strict=True)})
        else:
            new = cls({key: with_key_names(mapping[key]) for key in sorted(mapping)})
        new.original = original
        return new

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Returns the items as pairs of key and value, and the static data: all keys, and the class or treedef."""
        return [(DictKey(key), value) for key, value in self.items()], (tuple(self), self.original)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        """Returns a mapping of the original class, instead of a ``_Named``, with new items."""
        keys, original = aux
        is_treedef = isinstance(original, PyTreeDef)
        return original.unflatten(children) if is_treedef else original(dict(zip(keys, children, strict=True)))


def _is_rebuilt_from_dict(mapping: Mapping[str, Any], children: list[Any], treedef: Any) -> bool:
    """Returns whether calling the mapping's class with a dict of its items, in sorted order, gives an equal mapping.

    ``children`` and ``treedef`` come from flattening the mapping by one level. If a mapping has static data besides its
    items, its treedef contains these data, and the result is False.
    """
    cls: Any = type(mapping)
    try:
        rebuilt = cls({key: mapping[key] for key in sorted(mapping)})
    except Exception:  # The class may require other arguments.
        return False
    new_children, new_treedef = jax.tree.flatten(rebuilt, is_leaf=lambda x: x is not rebuilt)
    return new_treedef == treedef and all(x is y for x, y in zip(children, new_children, strict=True))


def _keys_of(mapping: Mapping[str, Any], children: list[Any]) -> list[str]:
    """Returns the key of each child of a mapping; if the children are not the mapping's values, their indices as text.

    JAX does not reveal which child has which key, so insertion order and sorted order are both tried.
    """
    for keys in (list(mapping), sorted(mapping)):
        if len(keys) == len(children) and all(mapping[key] is x for key, x in zip(keys, children, strict=True)):
            return keys
    return [str(i) for i in range(len(children))]


def _is_unnamed(x: object) -> bool:
    """Returns whether ``x`` is a mapping whose keys JAX does not show in key paths, such as haiku's immutable dicts.

    For such a mapping, JAX key paths contain indices. A mapping with items but no children in JAX also counts.
    """
    if type(x) is dict or not isinstance(x, Mapping):
        return False
    parts = tree_flatten_with_path(x, is_leaf=lambda part: part is not x)[0]
    has_index_keys = any(isinstance(key, FlattenedIndexKey) for keypath, _ in parts for key in keypath)
    return has_index_keys or (not parts and not is_empty(x))


def with_names(tree: PyTree, is_leaf: IsLeaf | None = None) -> PyTree:
    """Returns a copy of ``tree`` in which the JAX key paths of all mappings contain keys instead of indices.

    Each mapping whose keys JAX does not show becomes a :class:`_Named`, unless ``is_leaf`` is true for it. If there is
    no such mapping, ``tree`` itself is returned, so that callers can compare by ``is``.
    """

    def stops_at(x: object) -> bool:
        """Returns whether the caller of ``with_names`` treats ``x`` as a leaf."""
        return is_leaf is not None and is_leaf(x)

    def name_keys(x: Any) -> Any:
        """Replaces ``x``, and mappings in it, with mappings that have key names, if ``x`` is a mapping without them."""
        return _Named.of(x, name_all_keys) if _is_unnamed(x) and not stops_at(x) else x

    def name_all_keys(x: Any) -> Any:
        """Returns ``x`` with each mapping whose keys JAX does not show replaced by one with key names."""
        nodes, treedef = jax.tree.flatten(x, is_leaf=lambda x: stops_at(x) or _is_unnamed(x))
        return treedef.unflatten(map(name_keys, nodes)) if any(map(_is_unnamed, nodes)) else x

    return name_all_keys(tree)


def flatten_with_names(tree: PyTree, is_leaf: IsLeaf | None = None) -> tuple[list[Names], list[Any], Any]:
    """Returns a list of the leaves' key paths as tuples of names, a list of the leaves, and the treedef.

    ``{"dense": {"kernel": w}}`` gives the names ``("dense", "kernel")``. The ``value`` attribute of nnx variables and
    linen boxes is left out of the names, but an attribute ``value`` of any other node is included. For a container
    without key names, the names are indices. Raises a ValueError if an nnx variable occurs twice in the tree.
    """
    pairs, treedef = tree_flatten_with_path(tree, is_leaf=is_leaf)
    keys = {key for keypath, _ in pairs for key in keypath}
    if FlattenedIndexKey in map(type, keys) and (named := with_names(tree, is_leaf)) is not tree:
        return flatten_with_names(named, is_leaf)
    boxes: set[Any] = set()
    if _VALUE in keys:
        nodes = {keypath: x for keypath, x in tree_flatten_with_path(tree, is_leaf=is_box)[0] if is_box(x)}
        require_one_place({_names(keypath): x for keypath, x in nodes.items()})
        boxes = set(nodes)

    def names(keypath: tuple[Any, ...]) -> Names:
        """Returns the names on a JAX key path, without the ``value`` attribute of nnx variables and linen boxes."""
        if not boxes:
            return _names(keypath)
        return _names(key for i, key in enumerate(keypath) if not (key == _VALUE and keypath[:i] in boxes))

    return [names(keypath) for keypath, _ in pairs], [leaf for _, leaf in pairs], treedef


def items(tree: PyTree, is_leaf: IsLeaf | None = None) -> list[tuple[Names, Any]]:
    """Returns a list of pairs, one for each leaf of a tree: its key path as a tuple of names, and the leaf."""
    paths, leaves, _ = flatten_with_names(tree, is_leaf)
    return list(zip(paths, leaves, strict=True))


def _names(keys: Iterable[Any]) -> Names:
    """Converts a JAX key path to a tuple of names: ``("layers", "0", "weight")`` for ``.layers[0].weight``."""
    return tuple(keystr((key,), simple=True) for key in keys)


def require_one_place(boxes: Mapping[Names, Any]) -> None:
    """Raises a ValueError if an nnx variable occurs twice in a tree, because its two copies would diverge in training.

    ``boxes`` maps key paths to the flax boxes of the tree. A linen box may occur several times, because it is
    immutable.
    """
    first_places = dict[int, Names]()
    for place, box in boxes.items():
        first = first_places.setdefault(id(box), place)
        if first != place and is_flax_instance(box, "Variable"):
            raise ValueError(
                f"The tree holds the same nnx variable at {path_text(first)!r} and {path_text(place)!r}, and the two "
                f"copies would diverge. Wrap the model with `rpx.nnx.Parametrized(model, p)`, which keeps one copy, or "
                f"use `graph, params, rest = nnx.split(model, nnx.Param, ...)`. Then `params` holds the variable once, "
                f"but no layers, so set the axes of stages, or use `p = p.with_axes(rpx.roles(loss, params, batch))`."
            )


def path_text(names: Names) -> str:
    """Returns a key path as text, with slashes between its names, as users write it: ``"dense/kernel"``."""
    return "/".join(names)


def describe(x: Any) -> str:
    """Describes a value for an error: an array by dtype and shape, ``float32[2, 3]``; anything else by its class."""
    if is_empty(x):
        return "an empty node"
    if not is_array(x):
        return type(x).__name__
    return f"{dtype_of(x)}{list(x.shape)}"
