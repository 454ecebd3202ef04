"""What the roles of a network's axes tell of the layouts of its arrays in torch."""

from reparax.core.paths import PyTree, path_text
from reparax.core.plan import roles_of
from reparax.core.roles import CONVOLUTION, LOOKUP, PRODUCT, Numbers, Role

_LAYOUTS: dict[tuple[str, Numbers, Numbers], str] = {
    (PRODUCT, (0,), (1,)): "kernel",
    (PRODUCT, (1,), (0,)): "same",
    (LOOKUP, (0,), (1,)): "embedding",
}
"""The layout of a matrix that the network uses in this way, with these inputs and outputs."""


def roles_by_path(roles: PyTree) -> dict[str, Role]:
    """The role of each parameter, by its path; none without roles."""
    return {} if roles is None else {path_text(path): role for path, role in roles_of("roles", roles).items()}


def layout_of(role: Role, count: int) -> str | None:
    """The layout of an array without its first ``count`` axes, along which layers are stacked; None if it is not told.

    A table that is looked up and is the output layer too is an embedding. Nothing tells whether other stacked arrays
    are layers without names or experts in one tensor, nor how torch merges the heads of attention.
    """
    uses = [use for use in role.uses if use.how == LOOKUP] or list(role.uses)
    if len(uses) != 1 or uses[0].stacked != tuple(range(count)):
        return None
    (use,), ndim = uses, len(role.shape) - count
    inputs, outputs, windows = (tuple(axis - count for axis in axes) for axes in (use.inputs, use.outputs, use.windows))
    if use.how != CONVOLUTION:
        return _LAYOUTS.get((use.how, inputs, outputs))
    orders: dict[tuple[Numbers, Numbers, Numbers], str] = {
        (tuple(range(ndim - 1)), (ndim - 1,), tuple(range(ndim - 2))): "kernel",
        (tuple(range(1, ndim)), (0,), tuple(range(2, ndim))): "same",
    }
    return orders.get((inputs, outputs, windows))
