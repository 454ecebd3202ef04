"""Perturbations that draw by the type of an array alone, so that small arrays of one type draw in one loop.

The draws of one loop are held at once until they meet their arrays, as the effective arrays are.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array, export
from jax.sharding import AxisType

from reparax import _keys
from reparax._leafwise import Perturbation

LOOPED = 2**14
"""The most entries of an array that draws in a loop. Each array that draws alone costs a compiler on a CPU a tenth of a
second once, and each that draws in a loop costs a second core, which loops leave idle, in every step."""


class Drawn(Perturbation):
    """A perturbation in two steps: a draw, which reads the type of an array alone, and what it does to the array."""

    @abstractmethod
    def draw(self, like: Array, key: Array) -> Array:
        """What an array of the type of ``like`` is perturbed by; a batch of it for a batch of keys."""

    @abstractmethod
    def perturb(self, w: Array, drawn: Array) -> Array:
        """The effective array of ``w``, of the same shape and dtype."""

    def apply_leaf(self, w: Array, key: Array | None) -> Array:
        assert key is not None
        return self.perturb(w, self.draw(w, key))

    def _draws(self, acting: Sequence[tuple[Any, Array]], paths: Sequence[str], key: Array | None) -> Sequence[Any]:
        assert key is not None
        groups = _groups(acting)
        keys = _keys.per_leaf(key, [paths[i] for group in groups for i in group])
        drawn: dict[int, Array] = {}
        for group in groups:
            first, (stage, like) = len(drawn), acting[group[0]]
            if len(group) == 1:
                drawn[group[0]] = stage.draw(like, keys[first])
            else:
                batch = stage.draw(like, jax.lax.slice_in_dim(keys, first, first + len(group)))
                parts = jax.lax.split(batch, [1] * len(group))
                drawn.update(zip(group, [jax.lax.squeeze(part, [0]) for part in parts], strict=True))
        return [drawn[i] for i in range(len(acting))]

    def _change(self, w: Array, drawn: Any) -> Array:
        return self.perturb(w, drawn)


def _groups(acting: Sequence[tuple[Drawn, Array]]) -> list[list[int]]:
    """The places of the arrays that draw together: of one type, small, and of which the sharding is known."""
    groups: dict[Any, list[int]] = {}
    for i, (stage, w) in enumerate(acting):
        axes = tuple(getattr(stage, name) for name in stage.axis_fields)
        sharding = jax.typeof(w).sharding
        # What lies on a mesh in Auto mode may be sharded differently, which only the compiler learns.
        alone = _is_large(w) or AxisType.Auto in sharding.mesh.axis_types
        groups.setdefault(i if alone else (w.shape, w.dtype, sharding, axes), []).append(i)
    return list(groups.values())


def _is_large(w: Array) -> bool:
    return any(map(export.is_symbolic_dim, w.shape)) or w.size > LOOPED
