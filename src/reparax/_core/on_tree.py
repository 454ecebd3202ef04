"""Stages on the whole tree: they take it at once, and pass on the markers of other stages."""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._core.keys import Keys
from reparax._core.layers import Layer, Sights, Site
from reparax._core.planner import Planner, rewrites
from reparax._tree.flat import Flat, flatten, nest
from reparax._tree.paths import PyTree


@dataclass(frozen=True, eq=False)
class TreeLayer(Layer):
    """The layer of a stage that takes the whole tree at once.

    Attributes:
      public: The public methods that its class writes itself. They do where there is none on the tree.
      reads_grads: Whether ``update`` takes gradients.
      mean: Whether ``close`` gives the mean over all draws.
    """

    who: str = ""
    sites: Sequence[Site] = ()
    public: Collection[str] = ()
    reads_grads: bool = False
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
        read = {"grads": None if grads is None else nest(grads)} if self.reads_grads else {}
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


class OnTree(Planner):
    """The planner of a stage on the whole tree."""

    on_trees: ClassVar[Any] = True

    def plan_init(self, tree: Flat) -> Layer:
        del tree
        public = [verb for verb in ("init", "apply", "update", "rebase") if rewrites(type(self.stage), verb)]
        return TreeLayer(self.stage, public=public, reads_grads=self.reads_grads)

    def plan(self, method: str, tree: Flat) -> Layer:
        del method
        return self.plan_init(tree)

    def does(self, verb: str) -> bool:
        return hasattr(self.stage, f"{verb}_tree") or (verb != "log_det" and rewrites(type(self.stage), verb))

    @property
    def reads_grads(self) -> bool:
        update = getattr(self.stage, "update_tree", None)
        return update is not None and "grads" in inspect.signature(update).parameters
