"""Trees as named leaves: a parameter has the same path, whichever library made the tree."""

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
    """The dtype that JAX gives an array."""
    return x.dtype if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(x.dtype)


def type_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, and the dtype that JAX gives it."""
    return jax.ShapeDtypeStruct(x.shape, dtype_of(x))


def has_symbols(arrays: Iterable[Any]) -> bool:
    """Whether a length of one of these arrays, or types, is symbolic."""
    return any(map(export.is_symbolic_dim, (n for x in arrays for n in x.shape)))


def types_of_result(fun: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Shapes and dtypes of ``fun(tree)``; leaves that are not arrays, such as functions, are left out.

    Shardings are dropped: they do not matter here, and some stages fail on a mesh with explicit axes.
    """
    leaves, treedef = jax.tree.flatten(tree)

    def of_arrays(arrays: list[Any]) -> PyTree:
        new_leaves = [leaf if array is None else array for leaf, array in zip(leaves, arrays, strict=True)]
        return jax.tree.map(lambda x: x if is_array(x) else None, fun(treedef.unflatten(new_leaves)))

    return jax.eval_shape(of_arrays, [type_of(leaf) if is_array(leaf) else None for leaf in leaves])


def is_traceable(x: object) -> bool:
    """Whether JAX accepts ``x`` as an array, concrete or abstract."""
    if isinstance(x, np.ndarray | np.generic):
        return jnp.issubdtype(x.dtype, np.number) or x.dtype == bool
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def is_empty(x: object) -> bool:
    """Whether ``x`` is the empty node of a place without a value of its own."""
    return (isinstance(x, Mapping) or type(x) is tuple) and not x


def is_end(x: object) -> bool:
    """Whether nothing of a raw tree is below ``x``, for a node that JAX would open or leave out."""
    return x is None or is_empty(x)


def has_ancestor(x: object, *names: str) -> bool:
    """Whether ``x`` is an instance of a flax class of one of these names; does not import flax."""
    return not _names_in_flax(type(x)).isdisjoint(names)


@functools.cache
def _names_in_flax(cls: type) -> frozenset[str]:
    """The names of a class and its ancestors that are defined in flax."""
    return frozenset([c.__name__ for c in cls.__mro__ if c.__module__.partition(".")[0] == "flax"])


def is_box(x: object) -> bool:
    """Whether ``x`` is a flax node of one array and its metadata: an nnx variable or a linen box."""
    return has_ancestor(x, "Variable", "AxisMetadata")


def is_reference(x: object) -> bool:
    """Whether ``x`` is a leaf whose content changes in place: an nnx variable with hijax=True, or ``jax.new_ref``."""
    return has_ancestor(x, "HijaxVariable") or isinstance(x, jax.Ref)


@dataclass(frozen=True)
class Elsewhere:
    """In place of a parameter that stands at an earlier place of a model too."""

    place: Names


AxisNames = tuple[str | None, ...]


def stated_axes(box: Any) -> Any:
    """What a box of linen or nnx states about the axes of its array, in its own form; None if nothing."""
    if not has_ancestor(box, "Variable"):
        return getattr(box, "names", None)
    return box.get_metadata().get(name_keywords(box)[0])


def name_keywords(variable: Any) -> list[str]:
    """The metadata keys of the axis names of an nnx variable: those of older flax, of newer, or the same under both."""
    keywords = [name for name in ("sharding_names", "out_sharding") if name in variable.get_metadata()]
    return keywords or ["out_sharding"]


def axis_names(box: Any) -> AxisNames | None:
    """The axis names in a box; None if there are none.

    The name of an axis is None if it has no name, or if it is sharded over several mesh axes.
    """
    names = getattr(stated_axes(box), "spec", stated_axes(box))  # of a NamedSharding
    return None if names is None else tuple(name if isinstance(name, str) else None for name in names)


@register_pytree_with_keys_class
class _Named(dict[str, Any]):
    """Gives key names to a mapping that JAX flattens without them; unflattening returns the original class."""

    made_by: Any
    """The class, if it takes a dict and keeps nothing else; or the structure, whose children are in this order."""

    @classmethod
    def of(cls, mapping: Mapping[str, Any], with_key_names: Callable[[Any], Any]) -> "_Named":
        """The mapping with key names, also for the mappings inside it."""
        children, treedef = jax.tree.flatten(mapping, is_leaf=lambda x: x is not mapping)
        made_by = type(mapping) if _keeps_items_alone(mapping, children, treedef) else treedef
        if made_by is treedef:
            new = cls({key: with_key_names(x) for key, x in zip(_keys_of(mapping, children), children, strict=True)})
        else:
            new = cls({key: with_key_names(mapping[key]) for key in sorted(mapping)})
        new.made_by = made_by
        return new

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        return [(DictKey(key), value) for key, value in self.items()], (tuple(self), self.made_by)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        keys, made_by = aux
        is_structure = isinstance(made_by, PyTreeDef)
        return made_by.unflatten(children) if is_structure else made_by(dict(zip(keys, children, strict=True)))


def _keeps_items_alone(mapping: Mapping[str, Any], children: list[Any], treedef: Any) -> bool:
    """Whether the class of a mapping makes it again, with the same children, from a dict of its items in order."""
    maker: Any = type(mapping)
    try:
        again = maker({key: mapping[key] for key in sorted(mapping)})
    except Exception:  # another argument is required
        return False
    children_again, treedef_again = jax.tree.flatten(again, is_leaf=lambda x: x is not again)
    return treedef_again == treedef and all(x is y for x, y in zip(children, children_again, strict=True))


def _keys_of(mapping: Mapping[str, Any], children: list[Any]) -> list[str]:
    """The key of each child that JAX sees in a mapping; their numbers, if they are not its values in some order."""
    for keys in (list(mapping), sorted(mapping)):
        if len(keys) == len(children) and all(mapping[key] is x for key, x in zip(keys, children, strict=True)):
            return keys
    return [str(i) for i in range(len(children))]


def _is_unnamed(x: object) -> bool:
    """Whether ``x`` is a mapping that JAX flattens without key names, such as haiku's immutable dicts."""
    if type(x) is dict or not isinstance(x, Mapping):
        return False
    parts = tree_flatten_with_path(x, is_leaf=lambda part: part is not x)[0]
    has_index_keys = any(isinstance(key, FlattenedIndexKey) for keypath, _ in parts for key in keypath)
    return has_index_keys or (not parts and not is_empty(x))


def with_names(tree: PyTree, is_leaf: IsLeaf | None = None) -> PyTree:
    """``tree`` with key names for mappings that have none, unless ``is_leaf`` stops there."""

    def stops_at(x: object) -> bool:
        return is_leaf is not None and is_leaf(x)

    def name_keys(x: Any) -> Any:
        return _Named.of(x, name_all_keys) if _is_unnamed(x) and not stops_at(x) else x

    def name_all_keys(x: Any) -> Any:
        nodes, treedef = jax.tree.flatten(x, is_leaf=lambda x: stops_at(x) or _is_unnamed(x))
        return treedef.unflatten(map(name_keys, nodes)) if any(map(_is_unnamed, nodes)) else x

    return name_all_keys(tree)


def flatten_with_names(tree: PyTree, is_leaf: IsLeaf | None = None) -> tuple[list[Names], list[Any], Any]:
    """The names on the path to each leaf, the leaves, and the treedef.

    The ``value`` of nnx variables and flax boxes is not part of the path; a field ``value`` of any other node is. The
    children of a container that names none are numbered.
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
        if not boxes:
            return _names(keypath)
        return _names(key for i, key in enumerate(keypath) if not (key == _VALUE and keypath[:i] in boxes))

    return [names(keypath) for keypath, _ in pairs], [leaf for _, leaf in pairs], treedef


def items(tree: PyTree, is_leaf: IsLeaf | None = None) -> list[tuple[Names, Any]]:
    """Each leaf with the names on its path."""
    paths, leaves, _ = flatten_with_names(tree, is_leaf)
    return list(zip(paths, leaves, strict=True))


def _names(keys: Iterable[Any]) -> Names:
    """The names of keys of JAX."""
    return tuple(keystr((key,), simple=True) for key in keys)


def require_one_place(boxes: Mapping[Names, Any]) -> None:
    """Refuses an nnx variable that two modules share: the tree would hold two copies, which would diverge."""
    first_places = dict[int, Names]()
    for place, box in boxes.items():
        first = first_places.setdefault(id(box), place)
        if first != place and has_ancestor(box, "Variable"):
            raise ValueError(
                f"The tree holds one nnx variable at {path_text(first)!r} and at {path_text(place)!r}; the copies "
                f"would diverge. Wrap the model, `rpx.nnx.Parametrized(model, p)`, which keeps it one, or split it, "
                f"`graph, params, rest = nnx.split(model, nnx.Param, ...)`: `params` has it once, but no classes of "
                f"layers, so give the axes of its arrays, or take `p = p.with_axes(rpx.roles(loss, params, batch))`."
            )


def path_text(names: Names) -> str:
    """The path as users write it."""
    return "/".join(names)


def describe(x: Any) -> str:
    """A value in an error message: its dtype and shape, or its type, never its numbers."""
    if is_empty(x):
        return "an empty node"
    if not is_array(x):
        return type(x).__name__
    return f"{dtype_of(x)}{list(x.shape)}"
