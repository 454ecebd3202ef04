"""Axes of the network in another basis, as a stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax._axes.numbers import Axes
from reparax._core.value import argument
from reparax._numerics.arguments import check_whole, one_of
from reparax._stage.joint import Joint, Leaves
from reparax._tree.values import Values, fixed, main
from reparax.geometry._groups import Group
from reparax.geometry._rotate import members_to_turn, require_turnable, turn_axis

TurnedGroup = tuple[int, tuple[tuple[str, int, int], ...]]
"""The size of a group, and of each of its members the path, the axis, and the entries of each index."""


def _check_groups(groups: Any, who: str, name: str) -> tuple[TurnedGroup, ...]:
    """Groups as plain tuples, which are hashable and JSON."""
    del name
    found = tuple(groups) if isinstance(groups, Iterable) else (groups,)
    given = [group for group in found if isinstance(group, Group)]
    require_turnable(who, given)
    if len(given) == len(found) > 0:
        each = ((group.size, tuple((m.path, m.axis, m.inner) for m in members_to_turn(group))) for group in given)
        return tuple(each)
    match found:
        case ((int(), ((str(), int(), int()), *_)), *_) if not given:
            return found
        case _:
            raise TypeError(
                f"{who} takes groups of axes, but got {groups!r}. Pass some of those that `rpx.axis_groups` finds."
            )


class Rotate(Joint):
    r"""Weights stored in a rotated basis: along each axis of a group, :math:`w_k = \sum_j v_j Q_{kj}`.

    ``Stored("int4", block=64) >> Rotate(groups)`` rounds weights in a basis in which no entry is much larger than the
    others, and so loses less. All members of a group share one orthogonal matrix Q, which does not train. The effective
    arrays are those of the model; the raw ones are turned, and earlier stages act on them. If scales are folded first,
    the raw arrays are themselves a network that computes the same, the one that :func:`rotate` gives.

    Raw values: ``v`` (main) for each array, like the array; ``q`` (fixed), float32 of shape ``(size, size)``, with the
    first array of each group, for the first group, and ``q1``, ``q2`` and so on for others. ``init`` is exact up to
    rounding.

    Args:
      groups: Groups of :func:`axis_groups` whose ``basis`` is empty, from parameters after :func:`fold_scales`. Repr,
        equality and JSON use only their sizes, and the path, axis and ``inner`` of each member.
      start: ``"hadamard"``, the Kronecker product of a Hadamard matrix, of the largest power of two that divides the
        size, with a random rotation of the rest, and with random signs; ``"random"``, a uniformly random rotation; or
        ``"identity"``.
      seed: The seed of random matrices.

    Raises:
      TypeError: If ``groups`` are not groups of axes, or ``seed`` is not an integer.
      ValueError: If the axes of a group cannot be turned, or ``start`` is not one of the words above.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return x @ params["a"] @ params["b"]
      >>> params = {"a": jnp.array([[100.0, 1.0]]), "b": jnp.ones((2, 1))}
      >>> p = rpx.Rotate(rpx.axis_groups(forward)(params, jnp.ones((1, 1))))
      >>> raw = p.init(params)
      >>> jnp.abs(raw["a"]["@rotate"]["v"]).round(1)
      Array([[71.4, 70. ]], dtype=float32)
      >>> p.apply(raw)["a"].round(1)
      Array([[100.,   1.]], dtype=float32)

    References:
      Ashkboos et al., *QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs*, 2024; Tseng, Chee, Sun, Kuleshov and De
      Sa, *QuIP#*, 2024, turn each matrix by its own.
    """

    arrays: Any = field(init=False, repr=False, compare=False)
    stacked: Axes = field(init=False, repr=False, compare=False, default=())
    groups: Any = argument(_check_groups)
    start: str = argument(one_of("hadamard", "random", "identity"), default="hadamard", kw_only=True)
    seed: int = argument(check_whole, default=0, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True), "*": fixed()}

    def __post_init__(self) -> None:
        groups: Any = self.groups
        if isinstance(groups, Iterable):
            object.__setattr__(self, "groups", tuple(groups))
        paths = {
            path: re.escape(path)
            for _, members in _check_groups(self.groups, "Rotate", "groups")
            for path, *_ in members
        }
        object.__setattr__(self, "arrays", paths)
        super().__post_init__()

    def init_leaves(self, arrays: dict[str, Array]) -> Leaves:
        matrices = {name: self._start_matrix(n, i) for i, (name, n, _) in enumerate(self._named_groups())}
        values: Leaves = {path: {"v": w} for path, w in self._turn(arrays, matrices).items()}
        for name, _, members in self._named_groups():
            values[members[0][0]][name] = matrices[name]
        return values

    def apply_leaves(self, values: Leaves) -> dict[str, Array]:
        back = {name: values[members[0][0]][name].T for name, _, members in self._named_groups()}
        return self._turn({path: held["v"] for path, held in values.items()}, back)

    def _named_groups(self) -> list[tuple[str, int, tuple[tuple[str, int, int], ...]]]:
        """For each group the name of its matrix, its size and its members."""
        return [(f"q{i}" if i else "q", size, members) for i, (size, members) in enumerate(self.groups)]

    def _turn(self, arrays: Mapping[str, Array], matrices: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays, turned along the axes of each group by the matrix of its name."""
        found = dict(arrays)
        for name, _, members in self._named_groups():
            for path, axis, inner in members:
                found[path] = turn_axis(found[path], axis, inner, matrices[name])
        return found

    def _start_matrix(self, n: int, number: int) -> Array:
        """The orthogonal matrix of size ``n`` from which the group of this number starts."""
        if self.start == "identity":
            return jnp.eye(n)
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        if self.start == "random":
            return jax.random.orthogonal(key, n, dtype=jnp.float32)
        of_rest, of_signs = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        power, rest = n & -n, n // (n & -n)
        signs = jax.random.rademacher(of_signs, (n, 1), jnp.float32)
        return signs * jnp.kron(_hadamard_matrix(power), jax.random.orthogonal(of_rest, rest, dtype=jnp.float32))


def _hadamard_matrix(n: int) -> Array:
    """The orthogonal matrix of equal magnitudes whose size is a power of two."""
    found = np.ones((1, 1))
    while len(found) < n:
        found = np.kron([[1, 1], [1, -1]], found)
    return jnp.asarray(found / np.sqrt(n), jnp.float32)
