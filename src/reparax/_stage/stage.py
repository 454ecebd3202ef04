"""What our own stages share: a public method is that of a chain of one, with all of a chain's checks."""

from abc import abstractmethod

import jax

from reparax._core.algebra import Chain, Parametrization
from reparax._core.keys import Keys
from reparax._tree.paths import PyTree


class Stage(Parametrization):
    """A stage that a chain calls by ``_init``, ``_apply`` and so on, on trees with markers of other stages."""

    def init(self, params: PyTree, key: jax.Array | None = None) -> PyTree:
        return Chain((self,)).init(params, key)

    def apply(self, raw: PyTree, key: jax.Array | None = None) -> PyTree:
        return Chain((self,)).apply(raw, key)

    def update(self, raw: PyTree, key: jax.Array | None = None) -> PyTree:
        return Chain((self,)).update(raw, key)

    def rebase(self, raw: PyTree) -> PyTree:
        return Chain((self,)).rebase(raw)

    @property
    def advances(self) -> bool:
        return False

    def _ready(self, tree: PyTree, keys: Keys) -> PyTree:
        del keys  # noise on arrays that the stage does not act on may wait
        return tree

    def _rebase(self, tree: PyTree) -> PyTree:
        return tree

    def _averaged(self, tree: PyTree, keys: Keys) -> PyTree:
        """The tree with the mean of each array that the stage draws: what ``Mean`` calls."""
        del keys
        return tree

    @abstractmethod
    def _init(self, tree: PyTree, keys: Keys) -> PyTree: ...

    @abstractmethod
    def _apply(self, tree: PyTree, keys: Keys) -> PyTree: ...
