"""Planners decide where stages act, one class for each kind of stages; a stage itself is formulas and numbers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reparax.core.axes.misfit import Misfit
from reparax.core.axes.origin import Origins, probe_origins
from reparax.core.axes.roles import Role
from reparax.core.chains.calls import call_name
from reparax.core.chains.layers import Layer, Site
from reparax.core.tree.flat import Flat
from reparax.core.tree.paths import Names, PyTree, types_of_result


@dataclass(frozen=True)
class Planner(ABC):
    """What decides where ``stage`` acts. It reads types and computes nothing."""

    stage: Any

    def who(self, method: str) -> str:
        """The name of a call in errors."""
        return call_name(self.stage, method)

    def layer(self, method: str, sites: Sequence[Site]) -> Layer:
        """The sites for a method."""
        return Layer(self.stage, self.who(method), sites)

    @abstractmethod
    def plan_init(self, tree: Flat) -> Layer:
        """Where ``init`` replaces arrays of ``tree``, which may hold markers of later stages."""

    @abstractmethod
    def plan(self, method: str, tree: Flat) -> Layer:
        """Where ``apply`` and the other verbs find raw values of the stage in ``tree``, which is of types."""

    def require_own(self, tree: Flat, path: str) -> None:
        """Raises an error for values at ``path`` that ``apply`` has left, as the stage could not have made them."""
        del tree, path

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        """The types of ``init(tree)``, and for each of their axes the axis of ``tree`` that it follows."""
        return types_of_result(init, tree), probe_origins(init, tree)

    def on(self, tree: Flat, roles: Mapping[Names, Role]) -> Any:
        """The stage with axes as numbers, for a tree of types whose arrays have these roles in a network."""
        del tree, roles
        return self.stage

    def misfits(self, tree: Flat, roles: Mapping[Names, Role]) -> Iterable[Misfit]:
        """Where axes of the stage are not those that it means in that network."""
        del tree, roles
        return ()

    def does(self, verb: str) -> bool:
        """Whether the stage does anything in ``update``, ``rebase`` or ``log_det``."""
        del verb
        return False

    @property
    def update_reads(self) -> tuple[str, ...]:
        """What ``update`` takes besides the values: ``"grad"``, with respect to the stage's output, and ``"key"``."""
        return ()

    @property
    def asks_functions(self) -> bool:
        """Whether the sites depend on functions, whose answers may change."""
        return False


def planner_of(stage: Any) -> Planner:
    """The planner of a stage."""
    return stage._planner(stage)


def rewrites(cls: type, method: str) -> bool:
    """Whether a class of stages writes a method that its base has too."""
    return sum(method in vars(base) for base in cls.__mro__) > 1
