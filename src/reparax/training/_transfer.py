"""Converts raw trees, and optimizer states, from one chain to another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from reparax._axes.boxes import gather_boxes, spread_boxes
from reparax._axes.seen import ANY
from reparax._core.algebra import Chain, Parametrization
from reparax._core.calls import require_chains
from reparax._core.keys import Keys
from reparax._core.plan import decide, open_all, walk
from reparax._core.sights import by_place, takes_data
from reparax._core.verbs import followed
from reparax._numerics.usage import shows_usage
from reparax._stage.mean import Mean
from reparax._stage.nodes import Node, find_nodes
from reparax._tree.differences import abstract
from reparax._tree.flat import Flat, flatten, nest
from reparax._tree.paths import Names, PyTree, is_array, items, named, path_text
from reparax._tree.raw import FIXED, kind_of, outer_markers
from reparax.training._held import open_state
from reparax.training._partition import are_free


@shows_usage
def transfer(old: Parametrization, new: Parametrization, raw: PyTree, like: PyTree = None) -> PyTree:
    """Converts a raw tree of ``old``, or an optimizer's state for it, to the chain ``new``; the model does not change.

    A raw value is kept if the same stage made it at the same path (its ``where`` may differ), and all stages around it
    are the same. So is an array that stages only change in place, such as the float32 weight under :class:`Cast`, if
    the same stages change it; and so are the codes of :class:`Stored`, if a new adapter leaves their array as its base,
    but not under ``jit``, where it is not known whether it does: there they are rounded anew. All other values are
    computed by ``init`` from the current weights; random starts draw by ``jax.random.key(0)``, so for another key call
    ``new.init(old.fold(raw), key)``, and for a stage that starts from data ``new.init(old.fold(raw), seen=seen)``. In
    an optimizer's state, the moments of kept values are kept, other moments start at zero, and counters are kept.

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
    state, stored = open_state(raw)
    return stored(_of_state(state, old, new, like))


@dataclass(frozen=True)
class _Carried:
    """A new raw tree, and the paths of its nodes that were kept from the old one."""

    tree: PyTree
    nodes: frozenset[Names]

    def keeps(self, path: Names) -> bool:
        """Whether all nodes on the path to an array of the new tree were kept."""
        return _within(self.nodes, path)


def _carried(raw: PyTree, old: Parametrization, new: Parametrization) -> _Carried:
    read, keys, kept = _Read(old, raw), Keys(jax.random.key(0)), set[Names]()
    tree = read.effective
    for stage in reversed(tuple(Chain((new,)))):
        before, tree = tree, open_all([stage], tree, keys, by_place("transfer", tree, ANY))
        known = find_nodes(before, stage.kind)
        for place, node in find_nodes(tree, stage.kind).items():
            if place in known:
                continue
            around = _within(kept, place)
            values = read.values(stage, node) if around else read.of_base(stage, node, before.arrays.get(place))
            if values is None and takes_data(stage):  # it starts without data, or says that it cannot
                started = _started(stage, before, keys).arrays
                tree = replace(tree, arrays={**tree.arrays, **{at: started[at] for at in node.inside}})
            if values is not None:
                kept.update([plain(place)] if around else [])
                tree = replace(tree, arrays={**tree.arrays, **values})
        tree = replace(tree, arrays={**tree.arrays, **read.unchanged(stage, before, tree)})
    boxed = spread_boxes(functools.partial(followed, tuple(Chain((new,)))), nest(read.effective), nest(tree))
    return _Carried(boxed, frozenset(kept))


def _started(stage: Parametrization, before: Flat, keys: Keys) -> Flat:
    """What a stage that takes data makes without them."""
    try:
        return open_all([stage], before, keys, {})
    except ValueError as error:
        raise ValueError(
            f"transfer has no data for a new stage: {error} In place of `transfer`, call `new.init(old.fold(raw), "
            f"seen=seen)`."
        ) from error


class _Read:
    """What a chain makes of a raw tree, and all that lies between.

    Attributes:
      effective: The effective tree.
      nodes: For the place of each array that a stage computed, the stage, and the node that it read.
    """

    def __init__(self, p: Parametrization, raw: PyTree) -> None:
        self.effective = flatten(gather_boxes(raw))
        self.nodes: dict[Names, tuple[Parametrization, dict[Names, Any]]] = {}
        self._in_place: list[tuple[Parametrization, Names, Any, Any]] = []
        for layer, before, after in walk("apply", tuple(Chain((p.deterministic,))), self.effective):
            self.effective, stage = after, layer.stage
            for spot in (spot for site in layer.sites for spot in site.spots.values()):
                if spot.mark:
                    node = (*spot.place, spot.mark)
                    values = {at[len(node) :]: before.arrays[at] for at in spot.values.values()}
                    self.nodes[plain(spot.place)] = stage, values
                elif after.arrays[spot.place] is not before.arrays[spot.place]:
                    pair = before.arrays[spot.place], after.arrays[spot.place]
                    self._in_place.append((stage, plain(spot.place), *pair))

    def values(self, stage: Parametrization, node: Node) -> dict[Names, Any] | None:
        """The old values for a new node, if the same stage made both."""
        return self._held(stage, node, plain(node.place))

    def of_base(self, stage: Parametrization, node: Node, array: Any) -> dict[Names, Any] | None:
        """The old values for a new node of an adapter's base, if that is the array that the same stage made of them."""
        old = node.place[: next(i for i, name in enumerate(node.place) if name.startswith("@"))]
        same = FIXED in node.place and _equal_numbers(array, self.effective.arrays.get(old))
        return self._held(stage, node, plain(old)) if same else None

    def _held(self, stage: Parametrization, node: Node, place: Names) -> dict[Names, Any] | None:
        maker, held = self.nodes.get(place, (None, {}))
        names = {_end(node, at): at for at in node.values.values()}
        same = maker is not None and _same(stage, maker) and held.keys() == names.keys()
        return {names[end]: x for end, x in held.items()} if same and _fit(node, held) else None

    def unchanged(self, stage: Parametrization, before: Flat, after: Flat) -> dict[Names, Any]:
        """The arrays of which ``stage`` made those of ``before`` in place, at their places in ``after``."""
        found: dict[Names, Any] = {}
        for other, place, old, new in self._in_place:
            for at in (at for at, x in before.arrays.items() if x is new and plain(at) == place):
                if at in after.arrays and after.arrays[at].shape == old.shape and _same(stage, other):
                    found[at] = old
        return found


def makers(p: Parametrization, raw: PyTree) -> dict[Names, Parametrization]:
    """The stage that made each marker dict of a raw tree, by the :func:`plain` path of that dict."""
    layers = decide("apply", tuple(Chain((p.deterministic,))), flatten(gather_boxes(raw)).types)
    spots = [(spot, layer.stage) for layer in layers for site in layer.sites for spot in site.spots.values()]
    return {plain(spot.place): stage for spot, stage in spots if spot.mark}


def plain(path: Names) -> Names:
    """A path without the numbers of markers, which follow from how they are nested."""
    return tuple(f"@{kind_of(name)}" if name.startswith("@") else name for name in path)


def _within(nodes: AbstractSet[Names], path: Names) -> bool:
    """Whether all nodes on a path are among these."""
    marks = [i for i, name in enumerate(path) if name.startswith("@") and name != FIXED]
    return all(plain(path[:i]) in nodes for i in marks)


def _same(stage: Parametrization, other: Parametrization) -> bool:
    """Whether two stages, or those of which they are the mean, act in the same way on an array that both select."""
    a, b = (each.stage if isinstance(each, Mean) else each for each in (stage, other))
    names = [field.name for field in dataclasses.fields(a) if field.name != "where"]
    return type(a) is type(b) and all(_equal(getattr(a, name), getattr(b, name)) for name in names)


def _equal(x: Any, y: Any) -> bool:
    return not any(map(is_array, jax.tree.leaves((x, y)))) and x == y


def _equal_numbers(x: Any, y: Any) -> bool:
    """Whether two arrays are known to be equal."""
    if x is y or not is_array(x) or not is_array(y) or isinstance(x, Tracer) or isinstance(y, Tracer):
        return x is y
    return (x.shape, x.dtype) == (y.shape, y.dtype) and bool(jnp.array_equal(x, y))


def _end(node: Node, place: Names) -> Names:
    """The names of a value below its marker."""
    return place[len(node.place) + 1 :]


def _fit(node: Node, held: Mapping[Names, Any]) -> bool:
    """Whether values have the shapes of those of a node."""
    shapes = {_end(node, at): shape for at, shape in node.shapes.items()}
    return {end: jnp.shape(x) for end, x in held.items()} == shapes


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
