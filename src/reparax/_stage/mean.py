"""The mean of a random stage."""

from collections.abc import Callable
from typing import Any

from jax import Array

from reparax._axes.origin import Origins
from reparax._core.algebra import AtSites, Parametrization, overrides
from reparax._core.keys import Keys
from reparax._core.layers import Layer
from reparax._tree.flat import Flat
from reparax._tree.paths import PyTree


class Mean(Parametrization):
    """The mean of a random stage, which replaces the stage in ``p.deterministic``.

    It replaces a :class:`Perturbation` that defines ``mean_leaf``, and a random :class:`Reparametrization`; you do not
    write it yourself. It acts on the same arrays as the stage, and has the same raw values.

    Args:
      stage: A stage that draws random numbers.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class Jump(rpx.Perturbation):
      ...     rate: float
      ...     def apply_leaf(self, w, key):
      ...         return w + jax.random.bernoulli(key, self.rate, w.shape)
      ...     def mean_leaf(self, w):
      ...         return w + self.rate
      >>> p = Jump(0.25) >> rpx.VarNoise(0.1)
      >>> p.deterministic
      Mean(Jump(0.25))
      >>> p.fold({"w": jnp.ones(2)})["w"]
      Array([1.25, 1.25], dtype=float32)
    """

    stage: Parametrization

    def __post_init__(self) -> None:
        got: Any = self.stage
        known = (
            isinstance(got, Parametrization)
            and got.stochastic
            and (isinstance(got, AtSites) or overrides(got, "mean_tree"))
        )
        if not known:
            raise TypeError(
                f"Mean takes a stage that draws random numbers and defines their mean, but got {got!r}. Leave it out."
            )
        for said in ("kind", "raw_values", "changes_type", "straight_through", "moves_weights", "sees_tree"):
            object.__setattr__(self, said, getattr(got, said))

    def init_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        return self.stage.init_tree(tree, keys)

    def apply_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        return self.stage.mean_tree(tree, keys)

    def sites_of_arrays(self, method: str, tree: Flat) -> Layer:
        stage: Any = self.stage
        return stage.sites_of_arrays(method, tree)

    def sites_of_values(self, method: str, tree: Flat) -> Layer:
        stage: Any = self.stage
        return stage.sites_of_values("fold" if method == "apply" else method, tree).at_mean

    def _follow(self, tree: PyTree) -> tuple[PyTree, Origins]:
        return self.stage._follow(tree)

    @property
    def asks_functions(self) -> bool:
        return self.stage.asks_functions

    @property
    def advances(self) -> bool:
        return self.stage.advances

    @property
    def random_start(self) -> bool:
        return self.stage.random_start

    @property
    def has_base(self) -> bool:
        return self.stage.has_base

    @property
    def reads_grads(self) -> bool:
        return self.stage.reads_grads

    @property
    def has_determinant(self) -> bool:
        return self.stage.has_determinant

    def rebase_tree(self, tree: PyTree) -> PyTree:
        return self.stage.rebase_tree(tree)

    def update_tree(self, tree: PyTree, keys: Keys, grads: PyTree = None) -> PyTree:
        return self.stage.update_tree(tree, keys, *((grads,) if self.reads_grads else ()))

    def log_det_tree(self, tree: PyTree, is_free: Callable[[str], bool]) -> Array:
        return self.stage.log_det_tree(tree, is_free)

    def penalty_tree(self, tree: PyTree) -> Array:
        return self.stage.penalty_tree(tree)
