"""Converts raw trees and optimizer states from one chain to another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.calls import require_chains
from reparax.core.chain import Parametrization
from reparax.core.initialization import initialize_sites, with_boxes
from reparax.core.paths import Names, PyTree, flatten_with_names, items, path_text, types_of_result
from reparax.core.plan import plan_for, run_steps
from reparax.core.raw import Flat, first_marker, kind_of, nest, parameter_path, places_of
from reparax.core.site import Site
from reparax.numerics.arithmetic import is_array, is_inexact, is_numeric, widened
from reparax.training._partition import are_free, is_placeholder

T = TypeVar("T")

SHOWN = 3  # The maximum number of arrays that an error lists.


def transfer(old: Parametrization, new: Parametrization, raw: T, like: PyTree = None, *, nearest: bool = False) -> T:
    """Converts a raw tree of ``old``, or an optimizer's state for it, to the chain ``new``, with the same weights.

    If ``new`` cannot represent the current weights, for example because ``new`` is ``Orthogonal`` and the weights are
    not, ``transfer`` raises an error. With ``nearest=True``, the new chain instead starts at the same weights as
    ``new.init(old.fold(raw))``. Weights are compared only where stages of ``new`` compute new raw values. They cannot
    be compared under ``jax.jit`` and ``jax.eval_shape``, so new raw values require ``nearest=True`` there.

    A :class:`LoRA` whose rank, ``alpha``, ``use_rslora`` or ``init_weights`` changes keeps its base and its adapter:
    ``b`` is multiplied by the ratio of the two scales, and a larger rank adds newly initialized columns to ``a`` and
    zeros to ``b``. A smaller rank truncates the adapter by singular values, so it requires ``nearest=True`` if this
    changes the weights. Merging an adapter into the base of another one always requires ``nearest=True``.

    A raw value is kept if the same stage made it at the same path (the stage's ``where`` may differ), and if all stages
    whose marker dicts enclose it in the raw tree are the same. These arrays are kept too:

    * arrays that are only changed in place, such as the float32 weight under :class:`Cast`, if the same stages change
      them;
    * the base under a new adapter, such as the codes of :class:`Quantized`;
    * a LoRA under a new ``WeightNorm(detach=True)``, which turns it into DoRA.

    ``init`` computes all other values from the current weights. Random initial values use ``jax.random.key(0)``; for
    another key, call ``new.init(old.fold(raw), key)``. In an optimizer's state, counters and the moments of kept values
    are kept. For a LoRA of another rank, the moments of ``a`` are kept, and the moments of ``b`` are kept if the scale
    is the same. All other moments start at zero.

    A state may have moments for only some of the trainable values, as under ``optax.masked``. In that case, new raw
    values raise an error, because the state does not show which of them need moments.

    ``transfer(p, p, raw)`` converts raw trees of older reparax versions, in which markers such as ``"@lora"`` were
    numbered over the whole tree.

    Args:
      old: The chain that made the raw tree.
      new: The chain to convert it to.
      raw: The raw tree, or the state of an optimizer, which contains trees like the raw tree.
      like: A raw tree of ``old``, used to recognize raw trees by their structure. It is required if ``raw`` is a state
        without entries for fixed values, such as a state of :func:`optimizer`, or a state that contains no class of
        optax; if ``old`` leaves no markers by which moments can be recognized; or if the raw tree is a tuple, because
        optimizer states are tuples too.
      nearest: Whether the weights may change if ``new`` cannot represent them, and whether an adapter may be merged
        into a base.

    Returns:
      The raw tree, or the state, for ``new``.

    Raises:
      TypeError: If ``old`` or ``new`` is not a parametrization.
      ValueError: If ``old`` did not make ``raw``; if the weights would change or an adapter would be merged without
        ``nearest=True``; if a tuple could be either a raw tree or a state; if a part of a state does not fit the raw
        tree; or if the state does not show which new values need moments.

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
    converted = _convert_raw(raw, old, new)
    if not nearest:
        if converted.merges:
            raise ValueError(f"transfer would {converted.merges[0]}, or pass `nearest=True` to merge it.")
        if converted.fresh:
            _require_same_weights(converted, new)
    return converted.raw


@dataclass(frozen=True)
class _Converted:
    """The result of converting a raw tree.

    Attributes:
      raw: The raw tree of the new chain.
      kept: Maps the path of each kept raw value in the new tree to its path in the old tree.
      grown: The same mapping for new values that extend an old value, as in a LoRA of a larger rank.
      fresh: The paths of parameters for which stages of the new chain computed values.
      merges: A part of an error text for each adapter that was merged into the base of another adapter.
      effective: The effective tree of the old chain.
    """

    raw: PyTree
    kept: Mapping[Names, Names]
    grown: Mapping[Names, Names]
    fresh: Collection[str]
    merges: Sequence[str]
    effective: PyTree


def _require_same_weights(converted: _Converted, new: Parametrization) -> None:
    """Raises an error if the new chain's weights differ from the old chain's by more than rounding errors."""
    advice = "pass `nearest=True` to start as close as possible."
    if not has_numbers((converted.raw, converted.effective)):
        raise ValueError(
            f"transfer cannot compare traced weights with the initial weights of {new!r}, which it needs to do because "
            f"it computes new values for {_listed([repr(path) for path in converted.fresh])}. Call it outside "
            f"`jax.jit`, or {advice}"
        )
    changes = distances(new.fold(converted.raw), converted.effective)
    if changes:
        largest_first = sorted(changes, key=lambda path: -changes[path])
        listed_changes = _listed([f"{path!r} by {changes[path]:.2g}" for path in largest_first])
        raise ValueError(
            f"transfer would change the model: {new!r} cannot represent its current weights. Relative to the largest "
            f"entry of each array, it would change {listed_changes}. Leave these arrays out with `where`, use stages "
            f"that can represent them, or {advice}"
        )


def _listed(texts: Sequence[str]) -> str:
    """Joins the first ``SHOWN`` texts with commas, and adds how many are left out."""
    rest = [f"{len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join([*texts[:SHOWN], *rest])


def _convert_raw(raw: PyTree, old: Parametrization, new: Parametrization) -> _Converted:
    """Converts a raw tree by running the stages of the new chain from last to first, as ``init`` does.

    Each stage of the new chain keeps the old values where the same stage made them, and computes new ones elsewhere.
    """
    old_chain, key = _OldChain(old, raw), jax.random.key(0)
    tree, fresh, merges = old_chain.effective, list[str](), list[str]()
    for i, stage in reversed(list(enumerate(new))):
        sites = stage.sites("init", tree.before(tuple(new)[i + 1 :]))
        kept = old_chain.kept_values(sites, tree)
        fresh += _fresh_parameters(stage, sites, tree, kept)
        new_sites = [site for site in sites if not kept.keys() >= {*site.arrays.values()}]
        started = initialize_sites(new_sites, tree, key)
        old_chain.follow_unchanged(new_sites, tree, started)
        for site, name, place in _places(new_sites):
            if (values := old_chain.converted_values(site, name, started)) is not None:
                kept[place] = values
            elif place not in kept and (adapter := old_chain.adapter_at(site, place)) is not None:
                merges.append(
                    f"merge the adapter of {adapter!r} at {parameter_path(place)!r} into the base of {stage!r}. "
                    f"Keep {type(adapter).__name__} for this array"
                )
        tree = _put_values(started, kept)
    kept_paths = {_path_without_numbers(place): path for place, path in old_chain.kept_paths(tree).items()}
    grown = {_path_without_numbers(place): path for place, path in old_chain.grown.items()}
    effective = nest(old_chain.effective)
    raw = nest(with_boxes(tuple(new), old_chain.effective, tree))
    return _Converted(raw, kept_paths, grown, list(dict.fromkeys(fresh)), merges, effective)


Kept = dict[Names, Mapping[Names, Array]]
"""Maps the path of each array that needs no new raw values to the old raw values that replace it, by their paths."""


def _fresh_parameters(stage: Parametrization, sites: Sequence[Site], tree: Flat, kept: Kept) -> Iterator[str]:
    """Yields the paths of parameters for which a stage computes new values, or which it newly changes in place."""
    acts = len(stage.deterministic) > 0
    for site, _, place in _places(sites):
        is_new_in_place = not site.nodes and acts and place in kept and kept[place][place] is tree.arrays[place]
        if place not in kept or is_new_in_place:
            yield parameter_path(place)


def _places(sites: Sequence[Site]) -> list[tuple[Site, str, Names]]:
    """Lists, for each array on which a stage acts, the :class:`Site`, the array's name there, and its key path."""
    return [(site, name, place) for site in sites for name, place in site.arrays.items()]


def _put_values(tree: Flat, values: Kept) -> Flat:
    """Replaces the array or marker dict at each path in ``values`` by the new arrays given for this path."""
    old_paths: dict[Names, list[Names]] = {place: [] for place in values}
    for path in tree.arrays:
        for place in (path[:n] for n in range(len(path) + 1) if path[:n] in values):
            old_paths[place].append(path)
    return tree.swap([(old_paths[place], new_arrays) for place, new_arrays in values.items()])


@dataclass(frozen=True)
class _Node:
    """An array produced by a stage, together with the raw values it was computed from and their paths.

    ``written`` is the stage as it stands in the chain, and ``stage`` is a copy with the hyperparameters and axes that
    it uses for this array.
    """

    written: Parametrization
    stage: Parametrization
    array: Array
    values: Mapping[str, Array]
    paths: Mapping[str, Names]


class _OldChain:
    """A raw tree of the old chain with all arrays that its stages compute, and how the new tree reuses these arrays.

    While the new chain is initialized from its last stage to its first, this object maps key paths of the new tree to
    arrays of the old tree.

    Attributes:
      effective: The effective tree of the old chain.
      grown: Maps the key path of each new raw value that extends an old one to the path of the old one.
    """

    def __init__(self, p: Parametrization, raw: PyTree) -> None:
        """Runs each stage of ``p``, and records the raw values that it reads, or the array that it changes in place."""
        plan = plan_for(p, raw, mean=True, advice="Pass the chain that made it as `old`.")
        self._nodes: dict[Names, _Node] = {}
        self._in_place: dict[Names, list[tuple[Parametrization, Array]]] = {}
        arrays = dict(plan.raw.arrays)
        for step in plan.steps:
            before, arrays = arrays, run_steps([step], arrays)
            for site, name, place in _places(step.sites):
                path = _path_without_numbers(place)
                if site.nodes:
                    values = {value: before[value_place] for value, value_place in site.values[name].items()}
                    paths = {value: _path_without_numbers(place) for value, place in site.values[name].items()}
                    self._nodes[path] = _Node(step.stage, site.stage, arrays[place], values, paths)
                else:
                    self._in_place.setdefault(path, []).append((site.stage, before[place]))
        self.effective = plan.effective_of(arrays)
        self.grown: dict[Names, Names] = {}
        self._paths = {place: _path_without_numbers(place) for place in self.effective.arrays}
        self._opened = set[Names]()  # Key paths where a new stage stores an array unchanged.

    def kept_paths(self, tree: Flat) -> dict[Names, Names]:
        """Maps the key path of each kept raw value in the new tree to its path in the old tree."""
        kept = {place: path for place, path in self._paths.items() if place not in self._opened}
        return {place: path for place, path in kept.items() if place in tree.arrays}

    def kept_values(self, sites: Sequence[Site], tree: Flat) -> Kept:
        """Returns the old raw values of each array on which an equal stage acted in the old chain."""
        kept = Kept()
        for site, name, place in _places(sites):
            node, array = self._node_at(place), tree.arrays[place]
            if not site.nodes and place in self._paths and place not in self._opened:
                kept[place] = {place: self._array_before(site.stage, place, array)}
            elif site.nodes and node and array.shape == node.array.shape and _act_alike(site.stage, node.stage):
                kept[place] = self._place_values(site, name, node, node.values)
        return kept

    def converted_values(self, site: Site, name: str, started: Flat) -> Mapping[Names, Array] | None:
        """Converts old raw values to raw values of the new stage, as for a LoRA of another rank.

        Returns None if the stage cannot convert them. ``started`` has the raw values with which the new stage would
        start.
        """
        node = self._node_at(site.arrays[name]) if site.nodes else None
        fields = site.stage._converts
        if node is None or not fields or not _act_alike(site.stage, node.stage, fields):
            return None
        root = site.nodes[name]
        fresh = {place[-1]: x for place, x in started.arrays.items() if place[: len(root)] == root}
        values = site.stage._convert(node.stage, node.values, fresh)
        for value in site.stage._grown_values(node.stage):
            self.grown[(*root, value)] = node.paths[value]
        return self._place_values(site, name, node, values)

    def adapter_at(self, site: Site, place: Names) -> Parametrization | None:
        """Returns the old adapter of an array that becomes the base of a new adapter, or None if it had no adapter."""
        path = self._paths.get(place)
        if path is None or not _has_base(site.stage):
            return None
        stages = (node.written for at, node in self._nodes.items() if at[: len(path)] == path)
        return next(filter(_has_base, stages), None)

    def follow_unchanged(self, sites: Sequence[Site], tree: Flat, started: Flat) -> None:
        """Records which raw values of the stages at ``sites`` are unchanged arrays of the old tree."""
        arrays = {(place, id(tree.arrays[place])) for _, _, place in _places(sites) if place in self._paths}
        for value_place, x in started.arrays.items():
            for place in (value_place[:n] for n in range(len(value_place))):
                if (place, id(x)) in arrays:
                    self._paths[value_place] = self._paths[place]
                    self._opened.add(value_place)

    def _node_at(self, place: Names) -> _Node | None:
        """Returns the record of how the old chain computed the array at a key path, or None if no stage computed it."""
        path = self._paths.get(place)
        return None if path is None else self._nodes.get(path)

    def _place_values(self, site: Site, name: str, node: _Node, values: Mapping[str, Array]) -> Mapping[Names, Array]:
        """Returns an array's raw values by their key paths, and records which of them come from the old tree."""
        placed = site.place_values(name, values)
        for value_place, x in placed.items():
            if value_place[-1] in node.paths and x is node.values[value_place[-1]]:
                self._paths[value_place] = node.paths[value_place[-1]]
                self._opened.discard(value_place)
        return placed

    def _array_before(self, stage: Parametrization, place: Names, array: Array) -> Array:
        """Returns ``array``, undoing its last in-place change if ``stage`` equals the stage that made the change."""
        changes = self._in_place.get(self._paths[place], [])
        return changes.pop()[1] if changes and _act_alike(stage, changes[-1][0]) else array


def _has_base(stage: Parametrization) -> bool:
    """Returns whether a stage is an adapter, that is, whether one of its raw values is a base."""
    return any(value.base for value in getattr(stage, "raw_values", {}).values())


def _path_without_numbers(path: Names) -> Names:
    """Removes the numbers in markers such as ``@lora@2`` from a path: they only say how stages are nested."""
    return tuple(f"@{kind_of(name)}" if name.startswith("@") else name for name in path)


def _act_alike(stage: Parametrization, other_stage: Parametrization, but: Collection[str] = ()) -> bool:
    """Returns whether two stages compute the same result from an array that both select.

    The fields named in ``but`` may differ. Stages that hold arrays count as different.
    """
    names = [field.name for field in dataclasses.fields(stage) if field.name not in ("where", *but)]
    pairs = [(getattr(stage, name), getattr(other_stage, name, None)) for name in names]
    holds_arrays = any(map(is_array, jax.tree.leaves(pairs)))
    return type(stage) is type(other_stage) and not holds_arrays and all(x == y for x, y in pairs)


def _convert_state(state: PyTree, old: Parametrization, new: Parametrization, like: PyTree) -> PyTree:
    """Converts each part of an optimizer state that has the structure of a raw tree of ``old``."""
    if not jax.tree.leaves(state):
        return state
    is_part = functools.partial(_is_part, like=like) if like is not None else functools.partial(_is_raw_part, old=old)
    leaves, treedef = jax.tree.flatten(state, is_leaf=is_part)
    flags = list(map(is_part, leaves))
    others = treedef.unflatten([None if flag else x for flag, x in zip(flags, leaves, strict=True)])
    if not any(flags) or first_marker(places_of(others)):
        raise ValueError(
            f"transfer found no raw tree of {old!r} in some part of the state. Pass the raw tree that the state "
            f"belongs to as `like`: a state of `rpx.optimizer` has no entries for fixed values, so their shapes come "
            f"from `like`."
        )

    def convert(part: PyTree) -> PyTree:
        return _convert_moments(part, part if like is None else like, old, new)

    return treedef.unflatten([convert(x) if flag else x for flag, x in zip(flags, leaves, strict=True)])


def _convert_moments(tree: PyTree, raw: PyTree, old: Parametrization, new: Parametrization) -> PyTree:
    """Converts moments with the structure of ``raw``: keeps those of kept values, and sets all others to zero."""
    kept, grown = dict[Names, Names](), dict[Names, Names]()

    def convert(raw: PyTree) -> PyTree:
        converted = _convert_raw(raw, old, new)
        kept.update(converted.kept)
        grown.update(converted.grown)
        return converted.raw

    types = types_of_result(convert, raw)
    raw_paths, free_paths, moments = _arrays_by_path(raw).keys(), _free_paths(types), _Moments(tree, raw)

    def moment(names: Names, like: Any) -> Any:
        path = _path_without_numbers(names)
        if kept.get(path) in raw_paths:
            return moments.arrays.get(kept[path], moments.placeholder)
        needs_none = path not in free_paths and not moments.holds_fixed
        if needs_none or not is_array(like):
            return moments.placeholder
        zeros = moments.zeros(path, like)
        if path not in grown:
            return zeros
        begin = moments.arrays[grown[path]]
        return zeros.at[tuple(map(slice, begin.shape))].set(begin)

    paths, leaves, treedef = flatten_with_names(types)
    return treedef.unflatten(list(map(moment, paths, leaves)))


class _Moments:
    """A part of an optimizer state that has the structure of a raw tree, such as Adam's first moments.

    Attributes:
      arrays: The moments, by their paths.
      placeholder: The node that stands for a missing moment in the state; None if the state has no such node.
      holds_fixed: Whether fixed values have moments too.
    """

    def __init__(self, tree: PyTree, raw: PyTree) -> None:
        """Reads the moments, and determines which raw values have moments."""
        moments, raw_arrays, free_paths = _arrays_by_path(tree), _arrays_by_path(raw), _free_paths(raw)
        self.arrays = moments
        self.placeholder = next(filter(is_placeholder, jax.tree.leaves(tree, is_leaf=is_placeholder)), None)
        self.holds_fixed = not moments.keys().isdisjoint(raw_arrays.keys() - free_paths)
        self._has_all = all(path in moments and moments[path].shape == raw_arrays[path].shape for path in free_paths)

    def zeros(self, path: Names, like: Any) -> Array:
        """Returns a new moment of zeros for a raw value, in the dtype of the other moments."""
        if not self._has_all:
            raise ValueError(
                f"transfer cannot create a moment for {path_text(path)!r}: some trainable values have no moment in the "
                f"state, or one of another shape, so the state does not show what this one needs. Make a new state "
                f"with `tx.init`."
            )
        dtype = next(iter(self.arrays.values()), like).dtype
        return jnp.zeros(like.shape, dtype if jnp.issubdtype(like.dtype, jnp.inexact) else like.dtype)


def _arrays_by_path(tree: PyTree) -> dict[Names, Any]:
    """Returns the arrays of a tree by their paths, where markers such as ``@lora@2`` lack their numbers."""
    return {_path_without_numbers(path): x for path, x in items(tree) if is_array(x)}


def _free_paths(tree: PyTree) -> set[Names]:
    """Returns the paths of the trainable values, where markers such as ``@lora@2`` lack their numbers."""
    return {_path_without_numbers(path) for path in compress(flatten_with_names(tree)[0], are_free(tree))}


def _is_part(x: PyTree, like: PyTree) -> bool:
    """Returns whether ``x`` holds moments, or placeholders, only at paths of ``like``."""
    if type(x) is not type(like):
        return False
    paths = {path_text(path) for path in flatten_with_names(x, is_placeholder)[0]}
    return bool(paths) and paths <= {path_text(path) for path in flatten_with_names(like)[0]}


def _is_raw(x: PyTree, old: Parametrization) -> bool:
    """Returns whether ``x`` is a raw tree and no optimizer state. Raises an error for a tuple that could be either."""
    if _holds_state(x):
        return False
    if not isinstance(x, tuple):
        return True
    if not jax.tree.leaves(x) or not _may_be_raw_of(x, old):
        return False
    raise ValueError(
        f"transfer cannot tell whether a {type(x).__name__} is a raw tree of {old!r} or contains several, as the state "
        f"of an optimizer does. Pass the raw tree as `like`: the {type(x).__name__} itself, or the one that the state "
        f"belongs to."
    )


def _is_raw_part(x: PyTree, old: Parametrization) -> bool:
    """Returns whether a part of an optimizer state has the markers of a raw tree of ``old``, such as ``@lora``."""
    return first_marker(places_of(x)) is not None and _is_raw(x, old) and _may_be_raw_of(x, old)


def _may_be_raw_of(x: PyTree, old: Parametrization) -> bool:
    """Returns whether ``x`` may be a raw tree of ``old``: it has the markers, such as ``@lora``, of its stages."""
    try:
        plan_for(old, x, mean=True)
    except ValueError:
        return False
    return True


def _holds_state(x: PyTree) -> bool:
    """Returns whether any node of ``x`` is an instance of a class of optax, which only optimizer states contain."""
    return any(map(_is_of_optax, jax.tree.leaves(x, is_leaf=_is_of_optax)))


def _is_of_optax(x: object) -> bool:
    """Returns whether ``x`` is a state of optax. ``LookaheadParams`` is not a state, because it holds parameters."""
    is_of_optax = isinstance(x, tuple) and type(x).__module__.partition(".")[0] == "optax"
    return is_of_optax and type(x).__name__ != "LookaheadParams"


def distances(actual: PyTree, expected: PyTree) -> dict[str, float]:
    """Maps the paths of arrays that differ from ``expected`` by more than rounding errors to the relative difference.

    PRNG keys, and arrays whose shape changed, are left out.
    """
    arrays = dict(items(actual))
    pairs = {
        path_text(path): (arrays[path], w)
        for path, w in items(expected)
        if arrays[path] is not w and is_numeric(w) and arrays[path].shape == w.shape
    }
    sizes = jax.device_get({path: _distance(*pair) for path, pair in pairs.items()})
    # The comparison is `not <=` instead of `>`, so that NaN counts as different.
    return {path: float(sizes[path]) for path, pair in pairs.items() if not sizes[path] <= _rounding(*pair)}


def has_numbers(tree: PyTree) -> bool:
    """Returns whether the arrays of a tree have concrete values: they are neither traced nor ``ShapeDtypeStruct``."""
    return not any(isinstance(x, jax.ShapeDtypeStruct | Tracer) for x in jax.tree.leaves(tree))


@jax.jit
def _distance(x: Array, w: Array) -> Array:
    """Computes the largest difference of two arrays relative to the largest finite entry of ``w``; NaN equals NaN."""
    x, w = (widened(y) if is_inexact(y) else y.astype(jnp.float32) for y in (x, w))
    dtype = np.promote_types(x.dtype, w.dtype)  # JAX would refuse two dtypes under strict promotion.
    x, w = x.astype(dtype), w.astype(dtype)
    difference = jnp.where((x == w) | (jnp.isnan(x) & jnp.isnan(w)), 0, jnp.abs(x - w))
    largest = jnp.max(difference, initial=0)
    return jnp.where(largest == 0, 0, largest / jnp.max(jnp.where(jnp.isfinite(w), jnp.abs(w), 0), initial=0))


def _rounding(*arrays: Array) -> float:
    """Returns the largest relative difference between arrays that rounding may cause.

    The result is 4 times the machine epsilon of the arrays' dtype, or 64 times the epsilon of the dtype in which they
    are computed, if that is larger.
    """
    dtypes = [x.dtype for x in arrays if is_inexact(x)]
    units = [(4 * jnp.finfo(dtype).eps, 64 * min(jnp.finfo(dtype).eps, jnp.finfo(jnp.float32).eps)) for dtype in dtypes]
    return max((float(unit) for pair in units for unit in pair), default=0.0)
