"""Which axes of each weight a network contracts with data, and which it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from reparax.axes._reading import Reading, arguments_of
from reparax.axes._uses import Between, OtherRead
from reparax.axes._values import DataProduct, Origins
from reparax.core.axes_by_roles import visit_with_roles
from reparax.core.calls import require_chains, shows_usage
from reparax.core.chain import Parametrization
from reparax.core.paths import Names, PyTree
from reparax.core.raw import Flat
from reparax.core.roles import Misfit, Misfits, Numbers, Role, Use

NO_WEIGHT = Role(why="it is not an array of floating numbers")


@shows_usage
def roles(fun: Callable[..., Any], *args: Any, argnums: int | None = None, **kwargs: Any) -> PyTree:
    """The role of each axis of each parameter in ``fun(*args, **kwargs)``.

    The result is a tree like the parameters with a :class:`Role` in the place of each array. It reads the jaxpr of
    ``fun``, so names and libraries do not matter. Nothing is computed, and arguments may be ``jax.ShapeDtypeStruct``.
    Weights are followed through transposes, reshapes, slices, casts, scales, norms and products with other weights,
    through ``jit``, ``scan``, ``cond``, ``while``, ``shard_map``, ``jax.checkpoint`` and ``vmap``, to products of
    matrices, convolutions and table lookups. What constant indices choose counts as a slice; where it is added to data,
    as positions are, it is a lookup. A role of which the program leaves doubts is ambiguous, or unknown with a reason.

    Args:
      fun: A loss, or any pure function of arrays, such as a forward pass.
      args: Its arguments, or their shapes and dtypes.
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
    arguments = arguments_of("roles", fun, argnums, args, kwargs)
    reading = Reading(arguments)
    products = [use for use in reading.uses if isinstance(use, DataProduct)]
    products += _products_between(products, [use for use in reading.uses if isinstance(use, Between)])
    products = _stack_ensembles(products, reading)
    reads = [use for use in reading.uses if isinstance(use, OtherRead)]
    products_of_parameter = dict[int, list[DataProduct]]()
    for product in products:
        for parameter in {parameter for parameter, _ in product.inputs | product.outputs | product.stacked}:
            products_of_parameter.setdefault(parameter, []).append(product)
    roles_of_arguments = list[Role]()
    for i, x in enumerate(arguments.arrays):
        role = _role_of(i, products_of_parameter.get(i, ()), reads) if i in reading.parameters else NO_WEIGHT
        roles_of_arguments.append(replace(role, shape=jnp.shape(x), dtype=jnp.result_type(x)))
    return arguments.call(roles_of_arguments, lambda *args, **_: args[argnums or 0])


def _stack_ensembles(products: Iterable[DataProduct], reading: Reading) -> list[DataProduct]:
    """The products with output axes that index the members of an ensemble among their stacked axes instead.

    An axis that any product contracts, by itself or as a part of a merged one, indexes no members.
    """

    def atoms_of(axes: Origins) -> frozenset[int]:
        """What axes of parameters are merged from."""
        labels = [reading.parameters[parameter].labels[axis] for parameter, axis in axes]
        return frozenset[int]().union(*map(reading.labels.atoms, labels))

    contracted = frozenset[int]().union(*(atoms_of(product.inputs) for product in products))
    member_axes = frozenset(axis for axis in reading.members.found if not atoms_of(frozenset([axis])) & contracted)
    return [
        replace(
            product,
            outputs=product.outputs - member_axes,
            stacked=product.stacked | (product.outputs & member_axes),
        )
        for product in products
    ]


def _add_use(uses: list[Use], new: Use) -> None:
    """Adds a use; one that says of further axes what they are completes one that says nothing of them."""
    axes = {*new.inputs, *new.outputs, *new.stacked}
    for i, old in enumerate(uses):
        if replace(old, line="") == replace(new, line=""):
            return
        if not axes & {*old.inputs, *old.outputs}:
            inputs, outputs = {*old.inputs, *new.inputs}, {*old.outputs, *new.outputs}
            stacked = _sorted_axes({*old.stacked, *new.stacked})
            uses[i] = replace(old, inputs=_sorted_axes(inputs), outputs=_sorted_axes(outputs), stacked=stacked)
            return
    if axes:
        uses.append(new)


def _sorted_axes(axes: Iterable[int]) -> Numbers:
    """Axes in order, each once."""
    return tuple(sorted(set(axes)))


def _role_of(parameter: int, products: Iterable[DataProduct], reads: Iterable[OtherRead]) -> Role:
    """The role of a parameter in these products."""
    uses = list[Use]()

    def own(origins: Origins) -> Numbers:
        return _sorted_axes(axis for owner, axis in origins if owner == parameter)

    for product in products:
        inputs, outputs, stacked = own(product.inputs), own(product.outputs), own(product.stacked)
        _add_use(uses, Use(inputs, outputs, stacked, product.line, product.how, own(product.windows)))
    if not uses:
        lines = dict.fromkeys(read.line for read in reads if read.parameter == parameter)
        return Role(why="; ".join(lines) or "no equation reads it together with data")
    inputs = _sorted_axes(axis for use in uses for axis in use.inputs)
    outputs = _sorted_axes(axis for use in uses for axis in use.outputs)
    return Role(inputs, outputs, _sorted_axes(axis for use in uses for axis in use.stacked), "", tuple(uses))


def _products_between(products: Iterable[DataProduct], between: list[Between]) -> list[DataProduct]:
    """Products of two weights: the axis between them is an output of the one that data meet first.

    Products with data decide: one that contradicts them, such as that of a penalty, says nothing. Those that contradict
    one another, as where weights are queries and keys, say both.
    """
    inputs = Origins().union(*(product.inputs for product in products))
    outputs = Origins().union(*(product.outputs for product in products))
    inputs_of_data, outputs_of_data = inputs, outputs
    resolved = list[_Resolved]()
    unresolved = between
    while True:
        still_unresolved = list[Between]()
        for use in unresolved:
            for weight, other in ((use.left, use.right), (use.right, use.left)):
                free_axes = weight[1]
                if not free_axes & (inputs | outputs):
                    continue
                # Data meet this weight first, and the other one reads what it makes; or the other way round.
                (first, start), (second, end) = (weight, other) if free_axes & inputs else (other, weight)
                if first & inputs_of_data or second & outputs_of_data:
                    continue  # as in a penalty: data do not meet one weight after the other
                inputs, outputs = inputs | second, outputs | first
                resolved.append(_Resolved(DataProduct(second, first, use.stacked, use.line), start, end))
                break
            else:
                still_unresolved.append(use)
        if len(still_unresolved) == len(unresolved):
            break
        unresolved = still_unresolved
    contradictory = [pair.product for pair in resolved if pair.start & outputs or pair.end & inputs]
    turned = [replace(product, inputs=product.outputs, outputs=product.inputs) for product in contradictory]
    return [*(pair.product for pair in resolved), *turned]


class _Resolved(NamedTuple):
    """A product of two weights, and the other axes of the one that data meet first, and of the second."""

    product: DataProduct
    start: Origins
    end: Origins


# ---- whether a chain fits


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
    misfits = list[Misfit]()

    def visit(stage: Any, tree: Flat, known: Mapping[Names, Role]) -> list[Any]:
        misfits[:0] = stage._unwrapped._misfits(tree, known)
        return [stage]

    visit_with_roles("check_axes", tuple(p), roles(fun, *args, argnums=argnums, **kwargs), visit)
    return Misfits(misfits)
