"""The mean of a random stage."""

from typing import Any, ClassVar

from reparax._axes.origin import Origins
from reparax._core.algebra import AtSites, Parametrization
from reparax._core.layers import Layer
from reparax._tree.flat import Flat
from reparax._tree.paths import PyTree


def _of_stage(name: str) -> Any:
    """What the stage says."""
    return property(lambda self: getattr(self.stage, name))


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

    changes_type: ClassVar[Any] = _of_stage("changes_type")
    straight_through: ClassVar[Any] = _of_stage("straight_through")
    moves_weights: ClassVar[Any] = _of_stage("moves_weights")
    random_start: ClassVar[Any] = _of_stage("random_start")
    _sees_tree: ClassVar[Any] = _of_stage("_sees_tree")
    _asks_functions: ClassVar[Any] = _of_stage("_asks_functions")
    _reads_grads: ClassVar[Any] = _of_stage("_reads_grads")

    def __post_init__(self) -> None:
        got: Any = self.stage
        known = (
            isinstance(got, Parametrization)
            and got.stochastic
            and (isinstance(got, AtSites) or hasattr(got, "mean_tree"))
        )
        if not known:
            raise TypeError(
                f"Mean takes a stage that draws random numbers and defines their mean, but got {got!r}. Leave it out."
            )

        object.__setattr__(self, "kind", got.kind)  # its markers are those of the stage

    def _has(self, verb: str) -> bool:
        return self.stage._has(verb)

    def _opening(self, tree: Flat) -> Layer:
        return self.stage._opening(tree)

    def _closing(self, method: str, tree: Flat) -> Layer:
        return self.stage._closing("fold" if method == "apply" else method, tree).at_mean

    def _follow(self, tree: PyTree) -> tuple[PyTree, Origins]:
        return self.stage._follow(tree)
