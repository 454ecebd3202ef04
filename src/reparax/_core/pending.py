"""Noise that is not drawn yet: neighbouring noises on an array draw once, and small equal arrays draw in one loop.

A noise stage replaces an array by a :class:`Pending`. The next stage on that array either adds its own noise to it, or
has the noise drawn first. So the draws of one array do not depend on the stages of other arrays. All draws of one loop
are in memory at once, until each is applied to its array.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import jax
from jax import Array, export
from jax.sharding import AxisType

from reparax._core.keys import Keys
from reparax._tree.paths import PyTree

LOOPED = 2**14
"""The largest size of an array that draws in a loop. On a CPU, an array that draws alone adds a tenth of a second to
compilation; an array that draws in a loop uses one core only, in every step."""


class Noise(Protocol):
    """The noise on one array: ``draw`` reads only the array's shape and dtype, ``perturb`` applies the draw."""

    kind: ClassVar[str]

    @property
    def shared(self) -> Any: ...
    def draw(self, like: Array, key: Array) -> Array: ...
    def perturb(self, w: Array, drawn: Array) -> Array: ...
    def merged(self, later: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class Pending:
    """An array, the noise to draw on it, and the path and stage number that the key depends on."""

    array: Array
    noise: Noise
    path: str
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype


def without_noise(x: Any) -> Any:
    """The array under pending noise, which has the same shape and dtype as the result; any other leaf itself."""
    return x.array if isinstance(x, Pending) else x


def join_noise(x: Any, noise: Noise) -> Pending | None:
    """The pending ``x`` with more noise on it; None if the new noise needs a draw of its own.

    A class must define ``merged`` itself: a subclass may have another formula, so it does not inherit the method.
    """
    if not isinstance(x, Pending) or type(x.noise) is not type(noise) or "merged" not in vars(type(noise)):
        return None
    both = x.noise.merged(noise)
    return None if both is None else replace(x, noise=both)


def settle(tree: PyTree, keys: Keys) -> PyTree:
    """``tree`` with all noise drawn."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(draw_all(leaves, keys))


def draw_all(leaves: Sequence[Any], keys: Keys) -> list[Any]:
    """The leaves with all noise drawn."""
    made = list(leaves)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Pending):
            groups.setdefault(_together(i, x), []).append(i)
    batches: dict[tuple[str, int], list[list[int]]] = {}
    for group in groups.values():
        first = leaves[group[0]]
        batches.setdefault((first.noise.kind, first.number), []).append(group)
    for (kind, number), members in batches.items():
        batch = keys.of_arrays(kind, number, [leaves[i].path for group in members for i in group])
        assert batch is not None
        start = 0
        for group in members:
            own, start = jax.lax.slice_in_dim(batch, start, start + len(group)), start + len(group)
            for i, draw in zip(group, _draws([leaves[i] for i in group], own), strict=True):
                made[i] = leaves[i].noise.perturb(leaves[i].array, draw)
    return made


def _draws(group: Sequence[Pending], keys: Array) -> list[Array]:
    """The draws for arrays of one type, in a loop if there are several."""
    first = group[0]
    if len(group) == 1:
        return [first.noise.draw(first.array, keys[0])]
    parts = jax.lax.split(first.noise.draw(first.array, keys), [1] * len(group))
    return [jax.lax.squeeze(part, [0]) for part in parts]


def _together(i: int, x: Pending) -> Any:
    """A group key: small arrays of one type and known sharding draw together, every other array draws alone."""
    sharding = jax.typeof(x.array).sharding
    # On a mesh in Auto mode, arrays may be sharded differently, and only the compiler knows how.
    alone = _is_large(x.array) or AxisType.Auto in sharding.mesh.axis_types
    return i if alone else (type(x.noise), x.noise.shared, x.number, x.shape, x.dtype, sharding)


def _is_large(w: Array) -> bool:
    return any(map(export.is_symbolic_dim, w.shape)) or w.size > LOOPED
