"""Which axes of each weight a network contracts with data, and which it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from reparax.axes._reading import Reading, is_weight
from reparax.axes._uses import Between, OtherRead
from reparax.axes._values import DataProduct, Origins, union
from reparax.core.axes_at import visit_with_roles
from reparax.core.calls import require_chains
from reparax.core.chain import Parametrization
from reparax.core.paths import PyTree
from reparax.core.raw import Flat
from reparax.core.roles import WORDS, Misfit, Misfits, Numbers, Role, Use
from reparax.programs.call import Arguments, check_call, given_options

NO_WEIGHT = Role(why="it is not an array of floating numbers")


def roles(fun: Callable[..., Any], /, *args: Any, argnums: int | None = None, **kwargs: Any) -> PyTree:
    """The role of each axis of each parameter in ``fun(*args, **kwargs)``.

    The result is a tree like the parameters with a :class:`Role` in the place of each array. It reads the jaxpr of
    ``fun``, so names and libraries do not matter. Nothing is computed, and arguments may be ``jax.ShapeDtypeStruct``.
    Weights are followed through transposes, reshapes, slices, casts, scales, norms and products with other weights,
    through ``jit``, ``scan``, ``cond``, ``while``, ``shard_map``, ``jax.checkpoint`` and ``vmap``, to products of
    matrices, convolutions and table lookups. What constant indices choose counts as a slice; where it is added to data,
    as positions are, it is a lookup. A role of which the program leaves doubts is ambiguous, or unknown with a reason.

    Args:
      fun: A loss, or any pure function of arrays, such as a forward pass.
      args: Its arguments, or their shapes and dtypes. Sizes of data may be symbols of ``jax.export``.
      argnums: The position of the argument that holds the parameters. Default: the first.
      kwargs: Its keyword arguments.

    Raises:
      TypeError: If ``fun`` is not a function, or ``argnums`` is not the position of one of the arguments.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"].T
      >>> params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "v": jnp.ones((2, 4))}
      >>> found = rpx.roles(forward, params, jnp.ones((5, 3)))
      >>> found["w"].inputs, found["w"].outputs
      ((0,), (1,))
      >>> found["v"].inputs, found["v"].outputs
      ((1,), (0,))
      >>> found["b"].inputs, found["b"].outputs
      ((), ())
    """
    who = check_call("roles", fun, argnums, own_options=given_options(argnums=argnums))
    if isinstance(argnums, tuple | list):
        raise TypeError(
            f"{who} takes the position of one argument as argnums, but got {argnums!r}. Put all parameters into one "
            f"argument, such as a tuple of trees."
        )
    if not args:
        raise TypeError(f"{who} takes the arguments of the function too, the parameters first.")
    arguments = Arguments.of(who, fun, argnums or 0, args, kwargs)
    uses = Reading(arguments).uses
    products = [use for use in uses if isinstance(use, DataProduct)]
    products += _products_between(products, [use for use in uses if isinstance(use, Between)])
    products_by_parameter = _by_parameter(_stack_ensembles(products, uses.members))
    reads = [use for use in uses if isinstance(use, OtherRead)]

    def role(i: int, x: Any) -> Role:
        known_role = _role_of(i, products_by_parameter.get(i, ()), reads) if is_weight(x) else NO_WEIGHT
        return replace(known_role, shape=jnp.shape(x), dtype=jnp.result_type(x))

    roles_of_arguments = [role(i, x) for i, x in enumerate(arguments.arrays)]
    return arguments.call(roles_of_arguments, lambda *args, **_: args[argnums or 0])


def _by_parameter(products: Iterable[DataProduct]) -> dict[int, list[DataProduct]]:
    """For each parameter the products that have any of its axes."""
    products_by_parameter = dict[int, list[DataProduct]]()
    for product in products:
        for parameter in {parameter for parameter, _ in product.inputs | product.outputs | product.stacked}:
            products_by_parameter.setdefault(parameter, []).append(product)
    return products_by_parameter


def _stack_ensembles(products: Iterable[DataProduct], members: Origins) -> list[DataProduct]:
    """The products with output axes that index the members of an ensemble among their stacked axes instead."""
    members -= union(product.inputs for product in products)
    return [
        replace(each, outputs=each.outputs - members, stacked=each.stacked | (each.outputs & members))
        for each in products
    ]


def _role_of(parameter: int, products: Iterable[DataProduct], reads: Iterable[OtherRead]) -> Role:
    """The role of a parameter in the products that have its axes; without any, one that says what else reads it."""
    uses = list[Use]()
    for product in products:
        _add_use(uses, _use_of(product, parameter))
    if not uses:
        lines = dict.fromkeys(read.line for read in reads if read.parameter == parameter)
        return Role(why="; ".join(lines) or "no equation reads it together with data")
    inputs, outputs, stacked = (_sorted_axes(axis for use in uses for axis in getattr(use, word)) for word in WORDS)
    return Role(inputs, outputs, stacked, uses=tuple(uses))


def _use_of(product: DataProduct, parameter: int) -> Use:
    """A product as a use of one of its parameters, with the axes of this parameter alone."""

    def axes_in(origins: Origins) -> Numbers:
        return _sorted_axes(axis for owner, axis in origins if owner == parameter)

    words = {word: axes_in(getattr(product, word)) for word in (*WORDS, "windows")}
    return Use(**words, line=product.line, how=product.kind)


def _add_use(uses: list[Use], new: Use) -> None:
    """Adds a use that is not among them yet; the first use that says nothing of its axes is completed instead."""
    axes = {*new.inputs, *new.outputs, *new.stacked}
    for i, use in enumerate(uses):
        if replace(use, line=new.line) == new:
            return
        if axes.isdisjoint((*use.inputs, *use.outputs)):
            words = {word: _sorted_axes(getattr(use, word) + getattr(new, word)) for word in WORDS}
            uses[i] = replace(use, **words)
            return
    if axes:
        uses.append(new)


def _sorted_axes(axes: Iterable[int]) -> Numbers:
    """Axes in order, each once."""
    return tuple(sorted(set(axes)))


def _products_between(products: Iterable[DataProduct], between: Sequence[Between]) -> list[DataProduct]:
    """Products of two weights: the axis between them is an output of the one that data meet first.

    Products with data decide: one that contradicts them, such as that of a penalty, says nothing. Those that contradict
    one another, as where weights are queries and keys, say both.
    """
    inputs = data_inputs = union(product.inputs for product in products)
    outputs = data_outputs = union(product.outputs for product in products)
    found = dict[int, Between]()
    n_before = -1
    while len(found) > n_before:  # what is known of one product may tell of others
        n_before = len(found)
        for i, use in enumerate(between):
            ways = [
                each
                for each in (use, use.turned())
                if (each.start & inputs or each.end & outputs)
                # Data do not meet one weight after the other, as in a penalty, if that contradicts products with data.
                and not (each.product.outputs & data_inputs or each.product.inputs & data_outputs)
            ]
            if ways and i not in found:
                found[i] = ways[0]
                inputs, outputs = inputs | ways[0].product.inputs, outputs | ways[0].product.outputs
    products_found = [each.product for each in found.values()]
    reverse = [each.product.turned() for each in found.values() if each.start & outputs or each.end & inputs]
    return [*products_found, *reverse]


# ---- whether a chain fits


def check_axes(
    p: Parametrization, fun: Callable[..., Any], /, *args: Any, argnums: int | None = None, **kwargs: Any
) -> Misfits:
    """The axes of ``p`` that do not fit the products of ``fun(*args, **kwargs)``.

    A chain with such axes still runs, but does not do what its stages are meant for. Examples are one norm for all
    attention heads, blocks along outputs, an adapter that takes all layers of a scan as one matrix, or norms of inputs
    in a library whose weights have the shape ``(out, in)``. Each line of the result shows what to write.

    Nothing is computed, and arguments may be ``jax.ShapeDtypeStruct``. Arrays that no product reads are left out, and
    so are arrays that the network uses in several ways, such as tied tables: no axes fit all of their uses.

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
    misfits_by_stage = list[Sequence[Misfit]]()

    def visit(stage: Any, tree: Flat) -> list[Any]:
        misfits_by_stage.append(stage._unwrapped._misfits(tree))
        return [stage]

    visit_with_roles("check_axes", tuple(p), roles(fun, *args, argnums=argnums, **kwargs), visit)
    # The last stage was visited first.
    return Misfits(misfit for misfits in reversed(misfits_by_stage) for misfit in misfits)
