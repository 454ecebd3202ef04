"""Which weights grow as a network gets wider: the roles of weights in muP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from reparax._axes.roles import Role
from reparax._numerics.usage import shows_usage
from reparax._tree.paths import items, path_text
from reparax.geometry._groups import axis_groups
from reparax.geometry._roles import roles


@dataclass(frozen=True)
class Width:
    """What an array is as its network gets wider.

    Attributes:
      kind: ``"hidden"`` for weights from units to units, ``"input"`` for those from data to units, ``"output"`` for
        those from units to results, ``"tied"`` for a table that is both, ``"vector"`` for biases, scales and all
        that no product with data contracts, and ``"finite"`` for weights between data and results.
      inputs: How many inputs each output sums over; 1 for arrays without any.
    """

    kind: str
    inputs: int


@shows_usage
def widths(fun: Callable[..., Any], argnums: int | None = None) -> Callable[..., dict[str, Width]]:
    """A function of the same arguments as ``fun`` that returns, by path, the role of each parameter in muP.

    An axis is a width if it is in a group of :func:`axis_groups`; otherwise it is data, a result, or has an order. In
    μP, Adam's learning rate for hidden weights is proportional to one over their number of inputs, and outputs are
    divided by theirs. As a stage, this is ``Scale({path: n / width.inputs ...})`` for both kinds, where n is the number
    of inputs at which you tune.

    Args:
      fun: As for :func:`axis_groups`.
      argnums: As for :func:`axis_groups`.

    Raises:
      TypeError: If ``fun`` is not a function, or ``argnums`` is not the position of one argument.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"] + params["c"][None]) @ params["d"]
      >>> params = {"a": jnp.ones((3, 8)), "b": jnp.ones((8, 8)), "c": jnp.ones(8), "d": jnp.ones((8, 2))}
      >>> found = rpx.geometry.widths(forward)(params, jnp.ones((5, 3)))
      >>> {path: width.kind for path, width in found.items()}
      {'a': 'input', 'b': 'hidden', 'c': 'vector', 'd': 'output'}
      >>> rpx.Scale({path: 4 / w.inputs for path, w in found.items() if w.kind in ("hidden", "output")})
      Scale({'b': 0.5, 'd': 0.5})

    References:
      Yang et al., *Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer*, 2022, table
      8; its package needs a network of another width to find these axes.
    """
    find_roles, find_groups = roles(fun, argnums), axis_groups(fun, argnums)

    def found(*args: Any, **kwargs: Any) -> dict[str, Width]:
        wide = {tuple(member) for group in find_groups(*args, **kwargs) for member in group.members}
        each = items(find_roles(*args, **kwargs), lambda x: isinstance(x, Role))
        return {path_text(path): _width_of(path_text(path), role, wide) for path, role in each}

    return found


def _width_of(path: str, role: Role, wide: set[tuple[Any, ...]]) -> Width:
    """What an array is, by its role and by the axes that are widths, pairs of path and axis."""
    inputs = prod(role.shape[axis] for axis in role.inputs)
    if not role.inputs:
        return Width("vector", 1)
    if role.ambiguous:
        return Width("tied", inputs)
    into, out = (any((path, axis) in wide for axis in axes) for axes in (role.inputs, role.outputs))
    kinds = {(True, True): "hidden", (False, True): "input", (True, False): "output", (False, False): "finite"}
    return Width(kinds[into, out], inputs)
