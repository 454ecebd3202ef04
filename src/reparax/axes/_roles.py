"""Finds the roles of the axes of parameters (``roles``), and checks the axes of a chain (``check_axes``).

``Reading`` finds the products of weights with data in a program, and describes each product by the parameter axes that
take part in it. From these, this module derives the inputs and outputs of products of two weights. It then marks the
axes that index members of ensembles as stacked, and turns the products of each parameter into its :class:`Role`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from reparax.axes._reading import Reading, is_floating
from reparax.axes._uses import OtherRead, WeightProduct
from reparax.axes._values import DataProduct, Origins, union
from reparax.core.axes_at import visit_with_roles
from reparax.core.calls import require_chains
from reparax.core.chain import Parametrization
from reparax.core.paths import PyTree
from reparax.core.raw import Flat
from reparax.core.roles import WORDS, Misfit, Misfits, Numbers, Role, Use
from reparax.programs.call import Arguments, check_call, given_options

NO_WEIGHT = Role(why="it is not an array of floating numbers")
"""The role of an argument that is not a floating-point array, such as an integer array: none of its axes has a role."""


def roles(fun: Callable[..., Any], /, *args: Any, argnums: int | None = None, **kwargs: Any) -> PyTree:
    """Returns the role (input, output or stacked) of each axis of each parameter in ``fun(*args, **kwargs)``.

    The result has the tree structure of the parameters, with a :class:`Role` in place of each array. The roles are read
    from the jaxpr of ``fun``, so parameter names and neural network libraries do not matter. No array is computed, and
    arguments may be ``jax.ShapeDtypeStruct``. Weights are followed through transposes, reshapes, slices, casts, scales,
    norms and products with other weights, and through ``jit``, ``scan``, ``cond``, ``while``, ``shard_map``,
    ``jax.checkpoint`` and ``vmap``, up to the matrix products, convolutions and table lookups that read them. Indexing
    with constants counts as a slice, or as a lookup if the result is added to data, as position embeddings are. If the
    program does not determine a role, the role is either ambiguous or unknown. An unknown role states the reason.

    Args:
      fun: A loss, or any pure function of arrays, such as a forward pass.
      args: The arguments of ``fun``, or their shapes and dtypes. Sizes of data may be symbolic, as in ``jax.export``.
      argnums: The position of the argument that holds the parameters. Default: the first.
      kwargs: The keyword arguments of ``fun``.

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
            f"{who} takes a single position as argnums, but got {argnums!r}. Put all parameters into one argument of "
            f"the function, such as a tuple of trees."
        )
    if not args:
        raise TypeError(
            f"{who} needs the arguments of the function, but got none. Pass them after the function: "
            f"`roles(loss, params, batch)`."
        )
    arguments = Arguments.of(who, fun, argnums or 0, args, kwargs)
    uses = Reading(arguments).uses
    products = [use for use in uses if isinstance(use, DataProduct)]
    products += _orient_weight_products(products, [use for use in uses if isinstance(use, WeightProduct)])
    products_by_parameter = _by_parameter(_stack_ensembles(products, uses.members))
    reads = [use for use in uses if isinstance(use, OtherRead)]

    def role(i: int, x: Any) -> Role:
        """Returns the ``Role`` of the ``i``-th argument array, which includes the array's shape and dtype."""
        known_role = _role_of(i, products_by_parameter.get(i, ()), reads) if is_floating(x) else NO_WEIGHT
        return replace(known_role, shape=jnp.shape(x), dtype=jnp.result_type(x))

    roles_of_arguments = [role(i, x) for i, x in enumerate(arguments.arrays)]
    # Replace each array of the arguments by its role, and return the argument that holds the parameters.
    return arguments.call(roles_of_arguments, lambda *args, **_: args[argnums or 0])


def _by_parameter(products: Iterable[DataProduct]) -> dict[int, list[DataProduct]]:
    """Returns a dict from each parameter's index among the argument arrays to the products that use the parameter.

    A product whose weight depends on several parameters, as in ``x @ (w * g)``, is listed for each of these parameters.
    """
    products_by_parameter = dict[int, list[DataProduct]]()
    for product in products:
        for parameter in {parameter for parameter, _ in product.inputs | product.outputs | product.stacked}:
            products_by_parameter.setdefault(parameter, []).append(product)
    return products_by_parameter


def _stack_ensembles(products: Sequence[DataProduct], members: Origins) -> list[DataProduct]:
    """Returns products in which ``members``, the axes that index an ensemble's networks, are stacked axes, not outputs.

    For example, weights of shape (5, 3, 4) belong to five members that read the same data. The product with the data
    has the outputs (0, 2). If axis 0 is among the ``members``, only axis 2 remains an output.
    """
    members -= union(product.inputs for product in products)  # An axis that a product contracts cannot index members.
    return [
        replace(product, outputs=product.outputs - members, stacked=product.stacked | (product.outputs & members))
        for product in products
    ]


def _role_of(parameter: int, products: Iterable[DataProduct], reads: Iterable[OtherRead]) -> Role:
    """Returns the role of a parameter, given the products with data that it takes part in, and all other reads.

    If there are no products, the role is unknown and states which equations read the parameter. If an axis is an input
    in one product and an output in another, the role is ambiguous.
    """
    uses = list[Use]()
    for product in products:
        uses = _with_use(uses, _use_of(product, parameter))
    if not uses:
        lines = dict.fromkeys(read.line for read in reads if read.parameter == parameter)
        return Role(why="; ".join(lines) or "no equation reads it together with data")
    inputs, outputs, stacked = (_sorted_axes(axis for use in uses for axis in getattr(use, word)) for word in WORDS)
    return Role(inputs, outputs, stacked, uses=tuple(uses))


def _use_of(product: DataProduct, parameter: int) -> Use:
    """Returns how a product uses one parameter, with the parameter's axes as tuples of indices such as ``(0, 1)``."""

    def axes_in(origins: Origins) -> Numbers:
        """Returns the indices of those axes in ``origins`` that belong to the parameter, in ascending order."""
        return _sorted_axes(axis for owner, axis in origins if owner == parameter)

    words = {word: axes_in(getattr(product, word)) for word in (*WORDS, "windows")}
    return Use(**words, line=product.line, how=product.how)


def _with_use(uses: list[Use], new: Use) -> list[Use]:
    """Returns the list of a parameter's uses with a new use added, or merged into an earlier use if possible.

    A use without axes is dropped, and so is a use that differs from an earlier use only in its source line. If no axis
    of the new use is an input or output of an earlier use, both describe a single use and are merged. For example, in
    ``x @ (W1 @ W2)``, the product with data gives the input of ``W1``, and the product of the two weights gives the
    output of ``W1``.
    """
    axes = {*new.inputs, *new.outputs, *new.stacked}
    for i, use in enumerate(uses):
        if replace(use, line=new.line) == new:
            return uses
        if axes.isdisjoint((*use.inputs, *use.outputs)):
            words = {word: _sorted_axes(getattr(use, word) + getattr(new, word)) for word in WORDS}
            return [*uses[:i], replace(use, **words), *uses[i + 1 :]]
    return [*uses, new] if axes else uses


def _sorted_axes(axes: Iterable[int]) -> Numbers:
    """Sorts axis indices in ascending order and removes duplicates: ``[1, 0, 1]`` gives ``(0, 1)``."""
    return tuple(sorted(set(axes)))


def _orient_weight_products(
    data_products: Sequence[DataProduct], weight_products: Sequence[WeightProduct]
) -> list[DataProduct]:
    """Finds which axes are inputs and outputs in products of two weights, and returns them as products with data.

    In ``x @ (W1 @ W2)``, the product with data shows that axis 0 of ``W1`` is an input and axis 1 of ``W2`` is an
    output. The same result could be computed as ``(x @ W1) @ W2``, where axis 1 of ``W1`` is an output and axis 0 of
    ``W2`` is an input.

    In the other orientation, data are multiplied by ``W2.T`` first. If neither agrees with the products with data, as
    in a penalty, the product of weights is left out. If both agree, as for queries and keys, both are returned.
    """
    inputs = union(product.inputs for product in data_products)
    outputs = union(product.outputs for product in data_products)
    pairs = [(product, product.transposed()) for product in weight_products]
    # Rule out an orientation in which an axis is an output although data are contracted with this axis, or vice versa.
    candidates = [[x for x in pair if not (x.middle.outputs & inputs or x.middle.inputs & outputs)] for pair in pairs]
    oriented = _orient_by_known_axes(candidates, inputs, outputs)
    inputs = inputs.union(*(product.middle.inputs for product in oriented))
    outputs = outputs.union(*(product.middle.outputs for product in oriented))
    # The other orientation agrees too if an input of this orientation is an output elsewhere, or vice versa.
    conflicting = [product for product in oriented if product.inputs & outputs or product.outputs & inputs]
    return [product.middle for product in (*oriented, *(product.transposed() for product in conflicting))]


def _orient_by_known_axes(
    candidates: Sequence[Sequence[WeightProduct]], inputs: Origins, outputs: Origins
) -> list[WeightProduct]:
    """Returns, for each product of two weights, the first possible orientation that agrees with the known axes.

    ``candidates`` holds the possible orientations of each product of two weights, and ``inputs`` and ``outputs`` are
    the known axes. An orientation agrees if it shares an input or an output with the known axes. The axes of an
    oriented product become known and may orient other products, as in ``x @ (W1 @ W2 @ W3)``. The search therefore
    repeats until no more products are oriented. Products that cannot be oriented are left out.
    """
    oriented = dict[int, WeightProduct]()  # The keys are indices into ``candidates``.
    n_before = -1  # Less than 0, so that the loop runs at least once.
    while len(oriented) > n_before:
        n_before = len(oriented)
        for i, orientations in enumerate(candidates):
            matching = [each for each in orientations if each.inputs & inputs or each.outputs & outputs]
            if matching and i not in oriented:
                oriented[i] = matching[0]
                inputs, outputs = inputs | matching[0].middle.inputs, outputs | matching[0].middle.outputs
    return list(oriented.values())


# ---- whether a chain fits


def check_axes(
    p: Parametrization, fun: Callable[..., Any], /, *args: Any, argnums: int | None = None, **kwargs: Any
) -> Misfits:
    """Returns the axis settings of a chain ``p`` that contradict how ``fun(*args, **kwargs)`` multiplies its weights.

    A chain whose axes do not fit the network still runs, but its stages do not have the intended effect. Examples are a
    single norm for all attention heads, quantization blocks along outputs, an adapter that treats all layers of a scan
    as one matrix, or norms of inputs instead of outputs in a library whose weights have the shape ``(out, in)``. Each
    line of the result shows what to write instead.

    No array is computed, and arguments may be ``jax.ShapeDtypeStruct``. Arrays that no product reads are skipped.
    Arrays that the network uses in several ways, such as tied tables, are also skipped, because no axes fit all of
    their uses.

    Args:
      p: The chain of stages to check.
      fun: A loss, or any pure function of arrays, such as a forward pass.
      args: The arguments of ``fun``, or their shapes and dtypes.
      argnums: The position of the argument that holds the parameters. Default: the first.
      kwargs: The keyword arguments of ``fun``.

    Returns:
      A tuple with an entry for each setting that does not fit. An entry has the code of the ``stage``, the ``path`` of
      the array, the ``field`` (such as ``"axis"``), the axes ``got`` and ``expected``, and the array's ``role``. Axes
      are counted from the back, as if the array had no stacked axes; only axes of the field ``stacked`` are counted
      from the front.

    Raises:
      TypeError: If ``p`` is not a chain, ``fun`` is not a function, or ``argnums`` is not the position of one of the
        arguments.
      ValueError: If ``init`` of the chain rejects the parameters.

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
        """Records which axis settings of a stage do not fit the arrays in ``tree``, and returns the stage."""
        misfits_by_stage.append(stage._unwrapped._misfits(tree))
        return [stage]

    visit_with_roles("check_axes", tuple(p), roles(fun, *args, argnums=argnums, **kwargs), visit)
    # ``visit_with_roles`` visits the last stage first, so reverse the order.
    return Misfits(misfit for misfits in reversed(misfits_by_stage) for misfit in misfits)
