"""Converts raw trees, and optimizer states, from one chain to another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core.bound import Bound, apply_all, follow_axes, init_bound, provenance_of
from reparax.core.boxes import spread_boxes
from reparax.core.calls import require_chains, shows_usage
from reparax.core.chain import Parametrization
from reparax.core.keys import Keys
from reparax.core.paths import Names, PyTree, flatten_with_names, items, path_text, types_of_result
from reparax.core.raw import FIXED, Flat, kind_of, nest, outer_markers, parameter_path
from reparax.numerics.arithmetic import is_array, is_inexact, is_numeric, widened
from reparax.training._partition import are_free

T = TypeVar("T")

SHOWN = 3  # arrays that an error names


@shows_usage
def transfer(old: Parametrization, new: Parametrization, raw: T, like: PyTree = None, *, nearest: bool = False) -> T:
    """Converts a raw tree of ``old``, or an optimizer's state for it, to the chain ``new``; the model does not change.

    If ``new`` cannot start at the current weights, as ``Orthogonal`` cannot at others, this is an error, unless you
    pass ``nearest=True``: then it starts where ``new.init(old.fold(raw))`` does. The weights are compared where stages
    of ``new`` compute new values. Under ``jax.jit`` and ``jax.eval_shape`` nobody can compare them, so new values are
    an error there without ``nearest=True``.

    A raw value is kept if the same stage made it at the same path (its ``where`` may differ), and all stages around it
    are the same. So is an array that stages only change in place, such as the float32 weight under :class:`Cast`, if
    the same stages change it. Codes of :class:`Quantized` are kept too if a new adapter leaves their array as its base;
    under ``jit`` this is not known, and they are rounded anew. All other values are computed by ``init`` from the
    current weights. Random starts draw from ``jax.random.key(0)``: for another key, call ``new.init(old.fold(raw),
    key)``. In an optimizer's state, counters and the moments of kept values are kept; all other moments start at zero.

    A state may have moments for only some of the values that train, as under ``optax.masked``. Then new values are an
    error, because the state does not show which of them need moments.

    ``transfer(p, p, raw)`` converts raw trees of older versions, in which markers were numbered over the whole tree.

    Args:
      old: The chain that made the raw tree.
      new: The chain to convert it to.
      raw: The raw tree, or the state of an optimizer, which contains trees like the raw tree.
      like: The raw tree of ``old``. Required if ``raw`` is a state without entries for fixed values, such as that of
        :func:`optimizer`, or has no class of optax in it; if ``old`` leaves no markers, which identify moments; or if
        the raw tree is a tuple, as a state is. What has the structure of ``like`` is a raw tree.
      nearest: Whether the weights may change, if ``new`` cannot start at them.

    Raises:
      TypeError: If ``old`` or ``new`` is not a parametrization.
      ValueError: If ``old`` did not make ``raw``, if weights would change, if a tuple may be a raw tree or a state, if
        a part of a state does not fit the raw tree, or if the state does not show which moments to start.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> old, new = rpx.WeightNorm(), rpx.Positive(where=".*/g") >> rpx.WeightNorm()
      >>> raw = old.init({"w": jnp.ones((3, 2))})
      >>> jax.tree.map(jnp.shape, rpx.transfer(old, new, raw))
      {'w': {'@weight_norm': {'g': {'@positive': {'x': (1, 2)}}, 'v': (3, 2)}}}
    """
    require_chains("transfer(old, new, raw)", old, new)
    is_raw = _is_raw(raw, old) if like is None else jax.tree.structure(raw) == jax.tree.structure(like)
    if not is_raw:
        return _convert_state(raw, old, new, like)
    moved = _carry_over(raw, old, new)
    if moved.fresh and not nearest:
        _require_same_weights(moved, new)
    return moved.raw


@dataclass(frozen=True)
class _Moved:
    """A raw tree of the new chain.

    Attributes:
      raw: The raw tree.
      kept_nodes: The paths of its nodes that were kept from the old one.
      fresh: The paths of parameters for which new stages compute values.
      effective: The weights that the old chain made.
    """

    raw: PyTree
    kept_nodes: AbstractSet[Names]
    fresh: Collection[str]
    effective: PyTree


def _require_same_weights(moved: _Moved, new: Parametrization) -> None:
    """Requires that the new chain starts at the weights that the old one made, up to rounding."""
    advice = "pass `nearest=True` to start where `new.init(old.fold(raw))` does."
    if not has_numbers((moved.raw, moved.effective)):
        raise ValueError(
            f"transfer cannot compare traced weights with those that {new!r} starts at: it computes new values of "
            f"{_listed([repr(path) for path in moved.fresh])}. Call it outside of `jax.jit`, or {advice}"
        )
    off = distances(new.fold(moved.raw), moved.effective)
    if off:
        largest_first = sorted(off, key=lambda path: -off[path])
        changes = _listed([f"{path!r} by {off[path]:.2g}" for path in largest_first])
        raise ValueError(
            f"transfer would change the model: {new!r} cannot start at the weights before. In units of the largest "
            f"entry of each array it would change {changes}. Leave these arrays out with `where`, take stages that can "
            f"represent them, or {advice}"
        )


def _listed(texts: Sequence[str]) -> str:
    """The first of some texts, and how many there are besides."""
    rest = [f"{len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join([*texts[:SHOWN], *rest])


def _carry_over(raw: PyTree, old: Parametrization, new: Parametrization) -> _Moved:
    """The raw tree with the values of the new chain."""
    old_chain = _Old(old, raw)
    keys = Keys(jax.random.key(0))
    kept_nodes = set[Names]()
    tree = old_chain.effective
    fresh = dict[str, None]()
    for i, stage in reversed(list(enumerate(new))):
        bounds = stage.bind("init", tree.before(tuple(new)[i + 1 :]))
        stay: dict[Names, Mapping[Names, Array]] = {}
        for bound, name, place in _places(bounds):
            array = tree.arrays[place]
            if not bound.nodes and _all_within(kept_nodes, place):
                before = old_chain.before(bound.stage, place, array)
                stay[place] = {place: before}
                changes = before is array and len(stage.deterministic) > 0
                fresh |= {parameter_path(place): None} if changes else {}
            elif bound.nodes and (values := old_chain.values(bound.stage, place, array, kept_nodes)) is not None:
                stay[place] = bound.raw_values(name, values)
                kept_nodes.update([_path_without_numbers(place)] if _all_within(kept_nodes, place) else [])
            else:
                fresh[parameter_path(place)] = None
        new_bounds = [bound for bound in bounds if not stay.keys() >= {*bound.arrays.values()}]
        tree = _place(init_bound(new_bounds, tree, keys), stay)
    effective = nest(old_chain.effective)
    raw = spread_boxes(functools.partial(follow_axes, tuple(new)), effective, nest(tree))
    return _Moved(raw, kept_nodes, list(fresh), effective)


def _places(bounds: Sequence[Bound]) -> list[tuple[Bound, str, Names]]:
    """Each binding with the name and the key path of each of its arrays."""
    return [(bound, name, place) for bound in bounds for name, place in bound.arrays.items()]


def _place(tree: Flat, values: Mapping[Names, Mapping[Names, Any]]) -> Flat:
    """The tree with these values in place of all that stands at, or below, each of these places."""
    inside: dict[Names, list[Names]] = {place: [] for place in values}
    for at in tree.arrays:
        for place in (at[:n] for n in range(len(at) + 1) if at[:n] in inside):
            inside[place].append(at)
    return tree.swap([(inside[place], new_arrays) for place, new_arrays in values.items()])


@dataclass(frozen=True)
class _Node:
    """An array that a stage made, and the raw values of which it made it."""

    stage: Parametrization
    array: Array
    values: Mapping[str, Array]


class _Old:
    """What a chain makes of a raw tree, and all that lies between.

    Attributes:
      effective: The effective tree.
    """

    def __init__(self, p: Parametrization, raw: PyTree) -> None:
        provenance = provenance_of(p.deterministic, raw, "Pass the chain that made it as `old`.")
        self.effective = provenance.raw
        self._nodes: dict[Names, _Node] = {}
        self._in_place: dict[Names, list[tuple[Parametrization, Array]]] = {}
        for stage, bounds in provenance.bindings:
            before, self.effective = self.effective.arrays, apply_all([stage], self.effective, Keys(None))
            for bound, name, place in _places(bounds):
                path, array = _path_without_numbers(place), self.effective.arrays[place]
                if bound.nodes:
                    values = {value: before[at] for value, at in bound.values[name].items()}
                    self._nodes[path] = _Node(bound.stage, array, values)
                else:
                    self._in_place.setdefault(path, []).append((bound.stage, before[place]))

    def values(
        self, stage: Parametrization, place: Names, array: Array, kept_nodes: AbstractSet[Names]
    ) -> Mapping[str, Array] | None:
        """The old values for an array that a new stage opens, if the same stage made both."""
        node = (
            self._nodes.get(_path_without_numbers(place))
            if _all_within(kept_nodes, place)
            else self._base_of(place, array)
        )
        fits = node is not None and _act_alike(stage, node.stage) and array.shape == node.array.shape
        return node.values if node is not None and fits else None

    def _base_of(self, place: Names, array: Array) -> _Node | None:
        """What the base of a new adapter was, if the adapter left the array unchanged."""
        root = place[: next(i for i, name in enumerate(place) if name.startswith("@"))]
        is_unchanged = FIXED in place and _equal_numbers(array, self.effective.arrays.get(root))
        return self._nodes.get(root) if is_unchanged else None

    def before(self, stage: Parametrization, place: Names, array: Array) -> Array:
        """What a stage that works in place had before, if it was the last to change ``array``; else ``array``."""
        changes = self._in_place.get(_path_without_numbers(place), [])
        return changes.pop()[1] if changes and _act_alike(stage, changes[-1][0]) else array


def _path_without_numbers(path: Names) -> Names:
    """A path without the numbers of markers, which follow from how they are nested."""
    return tuple(f"@{kind_of(name)}" if name.startswith("@") else name for name in path)


def _all_within(nodes: AbstractSet[Names], path: Names) -> bool:
    """Whether all nodes on a path are among these."""
    marks = [i for i, name in enumerate(path) if name.startswith("@") and name != FIXED]
    return all(_path_without_numbers(path[:i]) in nodes for i in marks)


def _act_alike(stage: Parametrization, other_stage: Parametrization) -> bool:
    """Whether two stages act in the same way on an array that both select; those that hold arrays do not."""
    names = [field.name for field in dataclasses.fields(stage) if field.name != "where"]
    pairs = [(getattr(stage, name), getattr(other_stage, name, None)) for name in names]
    holds_arrays = any(map(is_array, jax.tree.leaves(pairs)))
    return type(stage) is type(other_stage) and not holds_arrays and all(x == y for x, y in pairs)


def _equal_numbers(x: Any, y: Any) -> bool:
    """Whether two arrays are known to be equal."""
    if x is y or not is_array(x) or not is_array(y) or isinstance(x, Tracer) or isinstance(y, Tracer):
        return x is y
    return (x.shape, x.dtype) == (y.shape, y.dtype) and bool(jnp.array_equal(x, y))


def _convert_state(state: PyTree, old: Parametrization, new: Parametrization, like: PyTree) -> PyTree:
    """The state with each part that has the structure of the old raw tree converted."""
    if not jax.tree.leaves(state):
        return state
    part = functools.partial(_is_part, like=like) if like is not None else functools.partial(_is_raw_part, old=old)
    leaves, treedef = jax.tree.flatten(state, is_leaf=part)
    if not any(map(part, leaves)) or outer_markers(treedef.unflatten([None if part(x) else x for x in leaves])):
        raise ValueError(
            f"transfer found no raw tree of {old!r} in some part of the state. Pass the raw tree that the state "
            f"belongs to as `like`: a state of `rpx.optimizer` has no entries for fixed values, so their shapes come "
            f"from `like`."
        )
    return treedef.unflatten(
        [_convert_moments(x, x if like is None else like, old, new) if part(x) else x for x in leaves]
    )


def _convert_moments(x: PyTree, raw: PyTree, old: Parametrization, new: Parametrization) -> PyTree:
    """Converts a part of a state that has the structure of ``raw``."""
    kept_nodes: set[Names] = set()

    def of_types(raw: PyTree) -> PyTree:
        moved = _carry_over(raw, old, new)
        kept_nodes.update(moved.kept_nodes)
        return moved.raw

    types = types_of_result(of_types, raw)
    raw_arrays = _arrays_by_path(raw)
    moments = _arrays_by_path(x)
    free = _free_paths(raw)
    has_all = free <= moments.keys() and all(moments[path].shape == raw_arrays[path].shape for path in free)
    nothing = next((leaf for leaf in jax.tree.leaves(x, is_leaf=_is_nothing) if _is_nothing(leaf)), None)

    trains = _free_paths(types)
    holds_fixed = bool((raw_arrays.keys() - free) & moments.keys())

    def moment(path: Names, like: Any) -> Any:
        if path in raw_arrays and _all_within(kept_nodes, path):
            return moments.get(path, nothing)
        if not is_array(like) or (path not in trains and not holds_fixed):
            return nothing
        if not has_all:
            raise ValueError(
                f"transfer cannot start a moment for {path_text(path)!r}: the state has none for some values that "
                f"train, or moments of other shapes, so it does not show what this one needs. Make a new state with "
                f"`tx.init`."
            )
        dtype = next(iter(moments.values()), like).dtype
        return jnp.zeros(like.shape, dtype if jnp.issubdtype(like.dtype, jnp.inexact) else like.dtype)

    paths, leaves, treedef = flatten_with_names(types)
    return treedef.unflatten([moment(_path_without_numbers(path), x) for path, x in zip(paths, leaves, strict=True)])


def _arrays_by_path(tree: PyTree) -> dict[Names, Any]:
    """The arrays of a tree by their paths."""
    return {_path_without_numbers(path): x for path, x in items(tree) if is_array(x)}


def _free_paths(tree: PyTree) -> set[Names]:
    """The paths of the values that train."""
    return {
        _path_without_numbers(path)
        for path, free in zip(flatten_with_names(tree)[0], are_free(tree), strict=True)
        if free
    }


def _is_nothing(x: object) -> bool:
    """Whether ``x`` is a placeholder for a value without a moment: None, or optax's empty named tuple."""
    return x is None or (isinstance(x, tuple) and not x and type(x) is not tuple)


def _is_part(x: PyTree, like: PyTree) -> bool:
    """Whether ``x`` holds moments, or placeholders, only at paths of ``like``."""
    if type(x) is not type(like):
        return False
    paths = {path_text(path) for path in flatten_with_names(x, _is_nothing)[0]}
    return bool(paths) and paths <= {path_text(path) for path in flatten_with_names(like)[0]}


def _is_raw(x: PyTree, old: Parametrization) -> bool:
    """Whether ``x`` is a raw tree, and not the state of an optimizer; a tuple that may be both is refused."""
    if _holds_state(x) or (isinstance(x, tuple) and not (jax.tree.leaves(x) and _made(x, old))):
        return False
    if isinstance(x, tuple):
        raise ValueError(
            f"transfer cannot tell whether a {type(x).__name__} is a raw tree of {old!r} or contains several, as the "
            f"state of an optimizer does. Pass the raw tree as `like`: the {type(x).__name__} itself, or the one that "
            f"the state belongs to."
        )
    return True


def _is_raw_part(x: PyTree, old: Parametrization) -> bool:
    """Whether a part of a state is a raw tree of ``old``, by its markers."""
    return bool(outer_markers(x)) and not _holds_state(x) and _made(x, old) and _is_raw(x, old)


def _made(x: PyTree, old: Parametrization) -> bool:
    """Whether ``x`` may be a raw tree of ``old``, by its markers."""
    try:
        provenance_of(old.deterministic, x)
    except ValueError:
        return False
    return True


def _holds_state(x: PyTree) -> bool:
    """Whether a node of ``x`` is of a class of optax, of which only states are."""
    return any(map(_is_of_optax, jax.tree.leaves(x, is_leaf=_is_of_optax)))


def _is_of_optax(x: object) -> bool:
    """Whether ``x`` is a node of a state of optax; its ``LookaheadParams`` are parameters."""
    of_optax = isinstance(x, tuple) and type(x).__module__.partition(".")[0] == "optax"
    return of_optax and type(x).__name__ != "LookaheadParams"


def distances(actual: PyTree, wanted: PyTree) -> dict[str, float]:
    """The distance of each array from the wanted one at its path, where it is more than rounding.

    Arrays whose shape changes have none, and keys are left out.
    """
    got = dict(items(actual))
    pairs = {
        path_text(path): (got[path], w)
        for path, w in items(wanted)
        if got[path] is not w and is_numeric(w) and got[path].shape == w.shape
    }
    far = jax.device_get({path: _distance(*pair) for path, pair in pairs.items()})
    # Of NaN it is not known that it is near.
    return {path: float(far[path]) for path, pair in pairs.items() if not far[path] <= _rounding(*pair)}


def has_numbers(tree: PyTree) -> bool:
    """Whether the arrays of a tree are known, and not only their types."""
    return not any(isinstance(x, jax.ShapeDtypeStruct | Tracer) for x in jax.tree.leaves(tree))


@jax.jit
def _distance(x: Array, w: Array) -> Array:
    """The largest difference between two arrays, over the largest finite entry of ``w``; equal ones may be NaN."""
    x, w = (widened(y) if is_inexact(y) else y.astype(jnp.float32) for y in (x, w))
    dtype = jnp.promote_types(x.dtype, w.dtype)
    x, w = x.astype(dtype), w.astype(dtype)
    difference = jnp.where((x == w) | (jnp.isnan(x) & jnp.isnan(w)), 0, jnp.abs(x - w))
    largest = jnp.max(difference, initial=0)
    return jnp.where(largest == 0, 0, largest / jnp.max(jnp.where(jnp.isfinite(w), jnp.abs(w), 0), initial=0))


def _rounding(*arrays: Array) -> float:
    """What rounding can make of a distance: four units in the last place, and 64 of those of the computation."""
    dtypes = [x.dtype for x in arrays if is_inexact(x)]
    units = [(4 * jnp.finfo(dtype).eps, 64 * min(jnp.finfo(dtype).eps, jnp.finfo(jnp.float32).eps)) for dtype in dtypes]
    return max((float(unit) for pair in units for unit in pair), default=0.0)
