"""Converts raw trees, and optimizer states, from one chain to another."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from reparax._axes.boxes import gather_boxes, spread_boxes
from reparax._core.algebra import Chain, Parametrization, require_chains
from reparax._core.keys import Keys
from reparax._stage.mean import Mean
from reparax._tree.differences import abstract
from reparax._tree.paths import Names, PyTree, is_array, items, named, path_text
from reparax._tree.raw import FIXED, kind_of, node_predicate, outer_markers, own_mark
from reparax.training._partition import are_free


def transfer(old: Parametrization, new: Parametrization, raw: PyTree, like: PyTree = None) -> PyTree:
    """Converts a raw tree of ``old``, or an optimizer's state for it, to the chain ``new``; the model does not change.

    A raw value is kept if the same stage made it at the same path (its ``where`` may differ), and all stages around it
    are the same. So is an array that stages only change in place, such as the float32 weight under :class:`Cast`, if
    the same stages change it. All other values are computed by ``init`` from the current weights; random starts draw
    by ``jax.random.key(0)``, so for another key call ``new.init(old.fold(raw), key)``. In an optimizer's state, the
    moments of kept values are kept, other moments start at zero, and counters are kept.

    A state may have moments for only some of the values that train, as under ``optax.masked``. Then moments of kept
    values are kept, but new values are an error, because the state does not show which of them need moments.

    It also reads raw trees of older versions, in which markers were numbered over the whole tree:
    ``transfer(p, p, raw)`` writes them as ``p.init`` does now.

    Args:
      old: The chain that made the raw tree.
      new: The chain to convert it to.
      raw: The raw tree, or the state of an optimizer: a tuple that contains trees like the raw tree.
      like: The raw tree of ``old``. Required if ``raw`` is a state without entries for fixed values, such as that of
        :func:`optimizer`, or is not a tuple, or if ``old`` leaves no markers, by which moments are found.

    Raises:
      ValueError: If ``old`` did not make ``raw``, if a part of a state does not fit the raw tree, or if the state does
        not show which moments to start.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> old, new = rpx.WeightNorm(), rpx.Positive(where=".*/g") >> rpx.WeightNorm()
      >>> raw = old.init({"w": jnp.ones((3, 2))})
      >>> jax.tree.map(jnp.shape, rpx.transfer(old, new, raw))
      {'w': {'@weight_norm': {'g': {'@positive': {'x': (1, 2)}}, 'v': (3, 2)}}}
    """
    require_chains("transfer(old, new, raw)", old, new)
    if jax.tree.structure(raw) == jax.tree.structure(like) or (like is None and not isinstance(raw, tuple)):
        return _carried(raw, old, new).tree
    return _of_state(raw, old, new, like)


@dataclass(frozen=True)
class _Carried:
    """A new raw tree, and the paths of its nodes that were kept from the old one."""

    tree: PyTree
    nodes: frozenset[Names]

    def keeps(self, path: Names) -> bool:
        """Whether all nodes on the path to an array of the new tree were kept."""
        marks = [i for i, name in enumerate(path) if name.startswith("@") and name != FIXED]
        return all(plain(path[:i]) in self.nodes for i in marks)


def _carried(raw: PyTree, old: Parametrization, new: Parametrization) -> _Carried:
    params, read = _Reading((old,)).read(gather_boxes(raw))
    return _Writing((new,)).carried(params, read)


Nodes = dict[Names, tuple[Parametrization, Mapping[str, Any]]]


def makers(p: Parametrization, raw: PyTree) -> dict[Names, Parametrization]:
    """The stage that made each marker dict of a raw tree, by the :func:`plain` path of that dict."""
    found: Nodes = {}

    def read(raw: PyTree) -> PyTree:
        effective, read = _Reading((p,)).read(gather_boxes(raw))
        found.update(read.nodes)
        return effective

    abstract(read, raw)
    return {path: stage for path, (stage, _) in found.items()}


@dataclass(frozen=True)
class _InPlace:
    """An array that a stage changed without a marker."""

    stage: Parametrization
    path: Names
    before: Any
    after: Any


@dataclass(frozen=True)
class _Read:
    """What the stages of a chain read: each marker dict with its stage, and the arrays that they changed in place."""

    nodes: Nodes
    in_place: list[_InPlace]


class _Reading(Chain):
    kind: ClassVar[str] = "reading_a_raw_tree"

    def read(self, tree: PyTree) -> tuple[PyTree, _Read]:
        """The effective tree, and what was read."""
        found = _Read({}, [])
        for stage in Chain((self.deterministic,)):
            seen, tree = tree, stage.apply_tree(tree, Keys(None))
            after = _marked(tree, stage.kind)
            found.nodes.update(
                {path: (stage, node) for path, node in _marked(seen, stage.kind).items() if path not in after}
            )
            old = _arrays(seen)
            found.in_place.extend(
                _InPlace(stage, path, old[path], x)
                for path, x in _arrays(tree).items()
                if path in old and x is not old[path]
            )
        return tree, found


class _Writing(Chain):
    kind: ClassVar[str] = "writing_a_raw_tree"

    def carried(self, params: PyTree, read: _Read) -> _Carried:
        """The raw tree of ``params``, with what was read put back if the same stage makes it at its path."""
        tree, kept, keys = params, set[Names](), Keys(jax.random.key(0))
        for stage in reversed(self.stages):
            given, tree = tree, stage.init_tree(tree, keys)
            before = _marked(given, stage.kind)
            made = {path: node for path, node in _marked(tree, stage.kind).items() if path not in before}
            again = {
                path: node
                for path, (other, node) in read.nodes.items()
                if path in made and _same(stage, other) and _alike(node, made[path])
            }
            kept |= again.keys()
            tree = _unchanged(stage, given, _replaced(tree, stage.kind, again), read.in_place)
        return _Carried(spread_boxes(functools.partial(self.init_tree, keys=Keys(None)), params, tree), frozenset(kept))


def plain(path: Names) -> Names:
    """A path without the numbers of markers, which follow from how they are nested."""
    return tuple(f"@{kind_of(name)}" if name.startswith("@") else name for name in path)


def _marked(tree: PyTree, kind: str) -> dict[Names, Mapping[str, Any]]:
    """The values under the innermost markers of a kind, by path."""
    is_node = node_predicate(kind)
    pairs = items(tree, is_node)
    return {plain(path): x[own_mark(x, kind)] for path, x in pairs if is_node(x)}


def _replaced(tree: PyTree, kind: str, nodes: Mapping[Names, Mapping[str, Any]]) -> PyTree:
    is_node = node_predicate(kind)
    paths, leaves, treedef = named(tree, is_node)
    return treedef.unflatten(
        [
            {own_mark(x, kind): nodes[plain(path)]} if is_node(x) and plain(path) in nodes else x
            for path, x in zip(paths, leaves, strict=True)
        ]
    )


def _unchanged(stage: Parametrization, given: PyTree, made: PyTree, in_place: Sequence[_InPlace]) -> PyTree:
    """``made`` by ``stage`` from ``given``, with each array of which ``stage`` made the given one as it was before."""
    arrays, shapes = _arrays(given), {path: x.shape for path, x in _arrays(made).items()}
    found = {
        each.path: each.before
        for each in in_place
        if arrays.get(each.path) is each.after
        and shapes.get(each.path) == each.before.shape
        and _same(stage, each.stage)
    }
    paths, leaves, treedef = named(made)
    return treedef.unflatten([found.get(plain(path), x) for path, x in zip(paths, leaves, strict=True)])


def _same(stage: Parametrization, other: Parametrization) -> bool:
    """Whether two stages act in the same way on an array that both select; one that was read may be a mean."""
    a, b = stage, other.stage if isinstance(other, Mean) else other
    names = [field.name for field in dataclasses.fields(a) if field.name != "where"]
    return type(a) is type(b) and all(_equal(getattr(a, name), getattr(b, name)) for name in names)


def _equal(x: Any, y: Any) -> bool:
    return not any(map(is_array, jax.tree.leaves((x, y)))) and x == y


def _alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two nodes hold values of the same names and shapes."""
    return jax.tree.map(jnp.shape, a) == jax.tree.map(jnp.shape, b)


def _of_state(state: PyTree, old: Parametrization, new: Parametrization, like: PyTree) -> PyTree:
    if not jax.tree.leaves(state):
        return state
    part = functools.partial(_is_part, like=like) if like is not None else functools.partial(_is_raw, old=old, new=new)
    leaves, treedef = jax.tree.flatten(state, is_leaf=part)
    if not any(map(part, leaves)) or outer_markers(treedef.unflatten([None if part(x) else x for x in leaves])):
        raise ValueError(
            f"transfer found no raw tree of {old!r} in some part of the state. Pass the raw tree that the state "
            f"belongs to as `like`: a state of `rpx.optimizer` has no entries for fixed values, so their shapes come "
            f"from `like`."
        )
    return treedef.unflatten([_moments(x, x if like is None else like, old, new) if part(x) else x for x in leaves])


def _moments(x: PyTree, raw: PyTree, old: Parametrization, new: Parametrization) -> PyTree:
    """Converts a part of a state that has the structure of ``raw``."""
    kept: list[_Carried] = []

    def of_types(raw: PyTree) -> PyTree:
        kept.append(_carried(raw, old, new))
        return kept[-1].tree

    types = abstract(of_types, raw)
    known = _arrays(raw)
    held = _arrays(x)
    free = _free_paths(raw)
    has_all = free <= held.keys() and all(held[path].shape == known[path].shape for path in free)
    nothing = next((leaf for leaf in jax.tree.leaves(x, is_leaf=_is_nothing) if _is_nothing(leaf)), None)

    trains, holds_fixed = _free_paths(types), bool((known.keys() - free) & held.keys())

    def moment(path: Names, like: Any) -> Any:
        if path in known and kept[-1].keeps(path):
            return held.get(path, nothing)
        if not is_array(like) or (path not in trains and not holds_fixed):
            return nothing
        if not has_all:
            raise ValueError(
                f"transfer cannot start a moment for {path_text(path)!r}: the state has none for some values that "
                f"train, or moments of other shapes, so it does not show what this one needs. Make a new state with "
                f"`tx.init`."
            )
        dtype = next(iter(held.values()), like).dtype
        return jnp.zeros(like.shape, dtype if jnp.issubdtype(like.dtype, jnp.inexact) else like.dtype)

    paths, leaves, treedef = named(types)
    return treedef.unflatten([moment(plain(path), leaf) for path, leaf in zip(paths, leaves, strict=True)])


def _arrays(tree: PyTree) -> dict[Names, Any]:
    """The arrays of a tree by their paths."""
    return {plain(path): x for path, x in items(tree) if is_array(x)}


def _free_paths(tree: PyTree) -> set[Names]:
    """The paths of the values that train."""
    return {plain(path) for path, free in zip(named(tree)[0], are_free(tree), strict=True) if free}


def _is_nothing(x: object) -> bool:
    """Whether ``x`` is a placeholder for a value without a moment: None, or optax's empty named tuple."""
    return x is None or (isinstance(x, tuple) and not x and type(x) is not tuple)


def _is_part(x: PyTree, like: PyTree) -> bool:
    """Whether ``x`` holds moments, or placeholders, only at paths of ``like``."""
    inside = {path_text(path) for path in named(x, _is_nothing)[0]} if type(x) is type(like) else set[str]()
    return bool(inside) and inside <= {path_text(path) for path in named(like)[0]}


def _is_raw(x: PyTree, old: Parametrization, new: Parametrization) -> bool:
    """Whether ``x`` itself is a raw tree of ``old``, by its markers, and not a node that contains one."""
    if any(map(_is_state, jax.tree.leaves(x, is_leaf=_is_state))) or not outer_markers(x):
        return False
    try:
        abstract(lambda raw: _carried(raw, old, new).tree, x)
    except ValueError:
        return False
    return True


def _is_state(x: object) -> bool:
    """Whether ``x`` is a part of a state that contains other parts."""
    return isinstance(x, tuple) and bool(x)
