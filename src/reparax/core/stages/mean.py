"""The mean of a random stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from reparax.core.axes.misfit import Misfit
from reparax.core.axes.origin import Origins
from reparax.core.axes.roles import Role
from reparax.core.chains.algebra import Parametrization
from reparax.core.chains.layers import Layer
from reparax.core.chains.planner import Planner, planner_of
from reparax.core.tree.flat import Flat
from reparax.core.tree.paths import Names, PyTree


class _OfMean(Planner):
    """The planner of the stage, which decides for its mean too."""

    @property
    def _planner_of_stage(self) -> Planner:
        """The planner of the stage."""
        return planner_of(self.stage.stage)

    update_reads: ClassVar[Any] = property(lambda self: self._planner_of_stage.update_reads)
    asks_functions: ClassVar[Any] = property(lambda self: self._planner_of_stage.asks_functions)

    def plan_init(self, tree: Flat) -> Layer:
        return self._planner_of_stage.plan_init(tree)

    def plan(self, method: str, tree: Flat) -> Layer:
        return self._planner_of_stage.plan("fold" if method == "apply" else method, tree).at_mean

    def require_own(self, tree: Flat, path: str) -> None:
        self._planner_of_stage.require_own(tree, path)

    def on(self, tree: Flat, roles: Mapping[Names, Role]) -> Any:
        return self._planner_of_stage.on(tree, roles).deterministic

    def misfits(self, tree: Flat, roles: Mapping[Names, Role]) -> Iterable[Misfit]:
        return self._planner_of_stage.misfits(tree, roles)

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        return self._planner_of_stage.follow(tree, init)

    def does(self, verb: str) -> bool:
        return self._planner_of_stage.does(verb)


def _ask_stage(name: str) -> Any:
    """A property that is the one of that name of ``stage``."""
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

    changes_type: ClassVar[Any] = _ask_stage("changes_type")
    straight_through: ClassVar[Any] = _ask_stage("straight_through")
    moves_weights: ClassVar[Any] = _ask_stage("moves_weights")
    random_start: ClassVar[Any] = _ask_stage("random_start")
    _planner: ClassVar[type[Planner]] = _OfMean

    def __post_init__(self) -> None:
        stage: Any = self.stage
        is_stochastic = isinstance(stage, Parametrization) and stage.stochastic
        if not is_stochastic:
            raise TypeError(
                f"Mean takes a stage that draws random numbers and defines their mean, but got {stage!r}. Leave it out."
            )

        object.__setattr__(self, "kind", stage.kind)  # its markers are those of the stage
