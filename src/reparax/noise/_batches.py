"""Perturbations whose draw depends only on an array's type, so that consecutive ones on an array can draw once."""

from abc import abstractmethod
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax._core.keys import Keys
from reparax._core.pending import Pending, draw_all, join_noise
from reparax._stage.leaf import Perturbation
from reparax._tree.paths import PyTree


class Drawn(Perturbation):
    """A perturbation in two steps: a draw, which reads only the array's type, and its effect on the array."""

    @abstractmethod
    def draw(self, like: Array, key: Array) -> Array:
        """A draw for an array of the type of ``like``; a batch of draws for a batch of keys."""

    @abstractmethod
    def perturb(self, w: Array, drawn: Array) -> Array:
        """The effective array, of the shape and dtype of ``w``."""

    @property
    def shared(self) -> Any:
        """The settings that the draw depends on, besides the type of the array."""
        return ()

    def merged(self, later: Any) -> Any:
        """A single stage with the same distribution as this one followed by ``later``, or None if there is none.

        Only the class that defines this method merges its noises; subclasses do not inherit it.
        """
        del later
        return None

    def apply_leaf(self, w: Array, key: Array) -> Array:
        return self.perturb(w, self.draw(w, key))

    def apply_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        found, treedef = self._selection("apply", tree)
        leaves = [w for w, _, _ in found]
        acting = {i: (slot.draw, stage) for i, (_, slot, stage) in enumerate(found) if stage is not None}
        numbers = keys.numbers(self.kind, [path for path, _ in acting.values()])
        both = {i: join_noise(leaves[i], stage) for i, (_, stage) in acting.items()}
        alone = [i for i, noise in both.items() if noise is None]
        ready = dict(zip(alone, draw_all([leaves[i] for i in alone], keys), strict=True))
        for (i, (path, stage)), number in zip(acting.items(), numbers, strict=True):
            leaves[i] = both[i] or Pending(jnp.asarray(ready[i]), stage, path, number)
        return treedef.unflatten(leaves)
