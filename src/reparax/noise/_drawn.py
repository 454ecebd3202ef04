"""Perturbations whose draw depends only on an array's type, so that consecutive ones on an array can draw once."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from jax import Array

from reparax._core.planner import Planner
from reparax._stage.leaf import Perturbation
from reparax._stage.leaf_sites import InPlace, Noise
from reparax._stage.on_arrays import OnArraysInPlace


class _OfNoise(OnArraysInPlace):
    """The planner of noise."""

    site: ClassVar[type[InPlace]] = Noise


class Drawn(Perturbation):
    """A perturbation in two steps: a draw, which reads only the array's type, and its effect on the array."""

    _planner: ClassVar[type[Planner]] = _OfNoise

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

    def merged_with(self, later: Any) -> Any:
        """A single stage with the same distribution as this one followed by ``later``, or None if there is none.

        Only the class that defines this method merges its noises; subclasses do not inherit it.
        """
        del later
        return None

    def apply_leaf(self, w: Array, key: Array) -> Array:
        return self.perturb(w, self.draw(w, key))
