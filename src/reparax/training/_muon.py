"""Which axes of raw values are the rows and columns of matrices, for Muon."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

from reparax._axes.roles import Role
from reparax._core.algebra import Parametrization
from reparax._core.calls import require_chains
from reparax._core.over_roles import raw_roles
from reparax._numerics.imported import import_library
from reparax._numerics.usage import shows_usage
from reparax._stage.where import check_where, matches, nearest
from reparax._tree.paths import PyTree, path_text
from reparax._tree.raw import Slot, flatten_slots
from reparax.training._partition import are_free

WHO = "muon_dimensions"


@shows_usage
def muon_dimensions(p: Parametrization, roles: PyTree, *, where: str | None = None, per_head: bool = False) -> PyTree:
    """The dimension numbers of optax's Muon for the raw tree of a chain, from the roles of a network's axes.

    Muon makes the momentum of a matrix orthogonal, so it must know which axes are rows, which are columns, and which
    stack independent matrices. For an array that the network multiplies with data, the inputs are ``reduction_axis``
    and the outputs ``output_axis``; layers of a scan are independent matrices. The same holds for main values in its
    place: ``v`` of :class:`WeightNorm`, both factors of :class:`LoRA` and :class:`LowRank`, ``mean`` of
    :class:`Gaussian`. Everything else gets None, and thus Adam: biases, lengths and other auxiliary values, fixed
    values, arrays with a single input or output, tables that are looked up, arrays that the network uses in several
    ways or does not multiply, and values that are coordinates, such as those of :class:`Orthogonal`.

    Args:
      p: The chain.
      roles: What ``rpx.roles(loss)(params, batch)`` returns.
      where: A regular expression for whole paths of parameters; all others get Adam. Default: every parameter. Use it
        to leave out the output layer, as Muon's author advises.
      per_head: Whether each attention head is a matrix, if heads have their own axis. Default: all heads are one
        matrix.

    Returns:
      A tree with the structure of ``p.init(params)``, for ``muon_weight_dimension_numbers`` of ``optax.contrib.muon``.

    Raises:
      TypeError: If ``p`` is not a chain, ``roles`` not a tree of roles, or ``where`` not a string.
      ValueError: If ``where`` matches no parameter.
      ModuleNotFoundError: If optax is not installed.

    Example:
      >>> import jax.numpy as jnp, optax, reparax as rpx
      >>> def forward(params, x):
      ...     return x @ params["w"].T + params["b"][None]
      >>> params, p = {"w": jnp.ones((4, 3)), "b": jnp.ones(4)}, rpx.WeightNorm(axis=0)
      >>> found = rpx.training.muon_dimensions(p, rpx.roles(forward)(params, jnp.ones((5, 3))))
      >>> found["w"]["@weight_norm"]["v"]
      MuonDimensionNumbers(reduction_axis=(1,), output_axis=(0,))
      >>> found["w"]["@weight_norm"]["g"] is None, found["b"] is None
      (True, True)
      >>> tx = rpx.optimizer(optax.contrib.muon(1e-3, muon_weight_dimension_numbers=found))

    References:
      Jordan, *Muon: An optimizer for hidden layers in neural networks*, 2024.
    """
    require_chains("training.muon_dimensions(p, roles)", p)
    numbers = import_library("optax.contrib", WHO, "optax").MuonDimensionNumbers
    raw, role_at = raw_roles(WHO, tuple(p), roles)
    _, slots, treedef = flatten_slots(raw)
    by_place = {path_text(place): role for place, role in role_at.items()}
    parameters = _match_parameters(where, [slot.parameter for slot in slots])

    def sides(slot: Slot) -> Any:
        """The inputs and outputs of a main value that may be matrices."""
        role = by_place.get(slot.raw_path)
        if role is None or slot.parameter not in parameters or not (slot.main and slot.decays):
            return None
        apart = role.heads if per_head else ()
        axes_of_sides = [tuple(axis for axis in axes if axis not in apart) for axes in (role.inputs, role.outputs)]
        return numbers(*axes_of_sides) if _is_matrix(role, axes_of_sides) else None

    dimensions = [sides(slot) if free else None for slot, free in zip(slots, are_free(raw), strict=True)]
    return treedef.unflatten(dimensions)


def _is_matrix(role: Role, sides: Collection[Collection[int]]) -> bool:
    """Whether a network reads an array as matrices of several rows and columns, and in no other way."""
    several = all(prod(role.shape[axis] for axis in axes) > 1 for axes in sides)
    return several and not (role.is_table or role.ambiguous or role.unknown())


def _match_parameters(where: Any, parameters: Collection[str]) -> Collection[str]:
    """The parameters that an expression matches."""
    if where is None:
        return parameters
    if not isinstance(where, str):
        raise TypeError(
            f"{WHO} takes a regular expression for whole paths as where, but got a value of type "
            f"{type(where).__name__!r}. Pass its text."
        )
    parameters_matched = {match[0] for match in matches(check_where(where, WHO), parameters)}
    if not parameters_matched:
        raise ValueError(f"{WHO}: where={where!r} matches no parameter. Similar are {nearest(where, parameters)}.")
    return parameters_matched
