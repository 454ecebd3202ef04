"""Whether the axes of a chain fit a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from reparax.axes._roles import roles
from reparax.core.calls import require_chains
from reparax.core.chain import Parametrization
from reparax.core.paths import Names
from reparax.core.raw import Flat
from reparax.core.roles import Misfit, Misfits, Role
from reparax.core.usage import shows_usage
from reparax.core.with_axes import visit_with_roles


@shows_usage
def check_axes(
    p: Parametrization, fun: Callable[..., Any], *args: Any, argnums: int | None = None, **kwargs: Any
) -> Misfits:
    """The axes of ``p`` that do not fit the products of ``fun(*args, **kwargs)``.

    A chain with such axes still runs, but does not do what its stages are meant for: one norm for all attention heads,
    a spectral norm across heads, blocks along outputs, an adapter on all layers of a scan as one matrix, or norms of
    inputs in a library whose weights have the shape ``(out, in)``. Each line of the result shows what to write. Nothing
    is computed, and arguments may be ``jax.ShapeDtypeStruct``. Arrays that no product reads are left out, and so are
    arrays that the network uses in several ways, such as tied tables, as no axes fit all of their uses.

    Args:
      p: The chain.
      fun: A loss, or any pure function of arrays, such as a forward pass.
      args: Its arguments, or their shapes and dtypes.
      argnums: The position of the argument that holds the parameters. Default: the first.
      kwargs: Its keyword arguments.

    Returns:
      A tuple of the axes that do not fit, each with its ``stage``, ``path``, ``field`` (such as ``"axis"``), the axes
      ``got`` and ``expected``, and the ``role`` of the array. Axes are counted from the back, without the stacked ones;
      those of ``stacked`` from the front.

    Raises:
      TypeError: If ``p`` is not a chain, ``fun`` not a function, or ``argnums`` not the position of one argument.
      ValueError: If ``init`` of the chain refuses the parameters.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):  # weights of the shape (out, in)
      ...     return x @ params["w"].T
      >>> params, x = {"w": jnp.ones((2, 3))}, jnp.ones((5, 3))
      >>> found = rpx.axes.check_axes(rpx.WeightNorm(), forward, params, x)
      >>> [(each.path, each.field, each.got, each.expected) for each in found]
      [('w', 'axis', (-1,), (-2,))]
      >>> rpx.axes.check_axes(rpx.WeightNorm(axis=0), forward, params, x)
      All axes fit.
    """
    require_chains("axes.check_axes(p, loss, params, batch)", p)
    found = list[Misfit]()

    def visit(stage: Any, tree: Flat, known: Mapping[Names, Role]) -> list[Any]:
        found[:0] = stage._own._misfits(tree, known)
        return [stage]

    visit_with_roles("check_axes", tuple(p), roles(fun, *args, argnums=argnums, **kwargs), visit)
    return Misfits(found)
