"""The plan of a chain: which stage acts where, decided from the types of a tree alone, and remembered."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import jax.numpy as jnp
from jax import Array, export

from reparax._core.draws import merge_noise
from reparax._core.keys import Keys
from reparax._core.layers import Layer, Sights, Site
from reparax._core.value import exactly
from reparax._tree.flat import Flat, Frame, flatten, nest
from reparax._tree.paths import Names, PyTree, is_array, is_empty

ON_TREES = tuple(f"{verb}_tree" for verb in ("init", "apply", "mean", "update", "rebase", "penalty", "log_det"))
"""The methods that a stage on the whole tree may write. They pass on the markers of other stages."""


@dataclass(frozen=True, eq=False)
class TreeLayer(Layer):
    """The layer of a stage that takes the whole tree at once.

    Attributes:
      public: The public methods that its class writes itself. They do where there is none on the tree.
      mean: Whether ``close`` gives the mean over all draws.
    """

    who: str = ""
    sites: Sequence[Site] = ()
    public: Collection[str] = ()
    mean: bool = False

    @property
    def at_mean(self) -> Layer:
        return replace(self, mean=True)

    def open(self, tree: Flat, keys: Keys, seen: Sights) -> Flat:
        del seen
        return self._called("init", tree, keys)

    def close(self, tree: Flat, keys: Keys) -> Flat:
        return self._called("mean" if self.mean else "apply", tree, keys)

    def update(self, tree: Flat, keys: Keys, grads: Flat | None) -> Flat:
        read = {"grads": None if grads is None else nest(grads)} if self.stage._reads_grads else {}
        return self._called("update", tree, keys, **read)

    def rebase(self, tree: Flat) -> Flat:
        return self._called("rebase", tree)

    def penalty(self, tree: Flat) -> Array:
        own = getattr(self.stage, "penalty_tree", None)
        return jnp.zeros((), jnp.float32) if own is None else own(nest(tree))

    def log_det(self, tree: Flat, is_free: Any) -> Array:
        return self.stage.log_det_tree(nest(tree), is_free)

    def _called(self, verb: str, tree: Flat, keys: Keys | None = None, **grads: PyTree) -> Flat:
        """The tree that the stage's method gives: ``apply_tree``, or ``apply``, of which no checks run then."""
        stage, keyed = self.stage, () if keys is None else (keys,)
        if (own := getattr(stage, f"{verb}_tree", None)) is not None:
            return flatten(own(nest(tree), *keyed, **grads))
        if verb not in self.public:
            raise TypeError(f"{type(stage).__name__} defines neither {verb}_tree nor {verb}. Define one.")
        return flatten(getattr(stage, verb)(nest(tree), *(each.of_stage(stage.kind) for each in keyed)))


def decide(method: str, stages: Sequence[Any], tree: Flat) -> list[Layer]:
    """The layers of stages with sites, in their order; ``tree`` is of types. All errors of structure come from here."""
    layers: list[Layer] = []
    for stage in stages:
        layers.append(stage._closing(method, tree))
        tree = tree.swapped(layers[-1].closed_types)
    return layers


def run(stages: Sequence[Any], tree: Flat, keys: Keys) -> Flat:
    """The tree after ``apply`` of each stage."""
    for whole, group in groupby(stages, lambda stage: stage._sees_tree):
        own = tuple(group)
        for layer in [stage._closing("apply", tree) for stage in own] if whole else _remembered(own, tree.types):
            tree = layer.close(tree, keys)
    return tree


def open_all(stages: Sequence[Any], tree: Flat, keys: Keys, seen: Sights) -> Flat:
    """The tree after ``init`` of each stage, the last one first."""
    for stage in reversed(stages):
        layer = stage._opening(tree)
        before, tree = tree, layer.open(tree, keys, seen)
        seen = layer.opened_sights(seen, before, tree)
    return tree


def walk(
    method: str, stages: Sequence[Any], tree: Flat, keys: Keys | None = None
) -> Iterator[tuple[Layer, Flat, Flat]]:
    """The layer of each stage, with the tree before it and the tree after it."""
    for stage in stages:
        layer, before = stage._closing(method, tree.types), tree
        tree = layer.close(before, keys or Keys(None))
        yield layer, before, tree


def _remembered(stages: tuple[Any, ...], tree: Flat) -> list[Layer]:
    """The layers for ``apply``, with noise that draws once; decided once for equal stages and types."""
    # Other leaves, such as functions, are not kept: what they hold would live as long as the plan.
    leaves = tuple(() if is_empty(x) else x if is_array(x) else None for x in tree.arrays.values())
    unsure = any(stage._asks_functions for stage in stages) or any(map(_has_symbols, leaves))
    try:
        hash((stages, tree.frame, leaves))
    except TypeError:  # a traced hyperparameter is not hashable, and some boxes are not
        unsure = True
    if unsure:
        return merge_noise(decide("apply", stages, tree))
    try:
        return _decided_once(stages, tuple(map(exactly, stages)), tree.frame, tuple(tree.arrays), leaves)
    except Exception:  # the error shows the leaves that are there
        return merge_noise(decide("apply", stages, tree))


@lru_cache(maxsize=256)
def _decided_once(stages: Any, shown: Any, frame: Frame, places: tuple[Names, ...], leaves: Any) -> list[Layer]:
    del shown  # the layers hold the stages, so equal ones do not do
    arrays = {place: {} if x == () else x for place, x in zip(places, leaves, strict=True)}
    return merge_noise(decide("apply", stages, Flat(frame, arrays)))


def _has_symbols(x: Any) -> bool:
    return is_array(x) and any(map(export.is_symbolic_dim, x.shape))
