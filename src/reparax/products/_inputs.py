"""What each weight of a loss is multiplied with."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from reparax._axes.seen import MOMENTS, Seen
from reparax._numerics.arguments import one_of
from reparax._programs.call import Argnums, Arguments, Traced, caller
from reparax._programs.sources import calls
from reparax._tree.paths import PyTree, describe, named, path_text
from reparax.products._factored import known, rehearse
from reparax.products._reader import Reader
from reparax.products._seeing import Seeing
from reparax.products._taps import Taps


class Inputs:
    """A function that returns what weights are multiplied with; :func:`explain` reports it."""

    def __init__(self, fun: Callable[..., Any], argnums: Argnums, moments: str, where: Any, *, gradients: bool) -> None:
        self.who, self.fun, self.argnums = caller("inputs", fun, argnums), fun, argnums
        self.moments, self.where, self.gradients = one_of(*MOMENTS)(moments, self.who, "moments"), where, gradients
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        rehearse()
        arguments = Arguments.of(self.who, self.fun, self.argnums, args, kwargs)
        traced = arguments.traced()
        first = Seeing(self.moments, calls(traced.program))
        jax.make_jaxpr(lambda *inputs: _evaluated(first, traced, inputs))(*traced.inputs)
        ways: list[Seeing] = []

        def counted(taps: Taps | None) -> tuple[Any, Any]:
            ways.append(Seeing(self.moments, first.lines, first.slots, taps))
            ways[-1].state = [zero for slot in first.slots for zero in slot.zeros(self.moments)]
            outs = _evaluated(ways[-1], traced, traced.inputs)
            return _loss(self.who, traced, outs, wanted=taps is not None), ways[-1].state

        slopes = None
        if self.gradients:
            arrays = {root: jnp.zeros(like.shape, like.dtype) for root, like in first.types.items()}
            own = {slot: slot.slopes(self.moments) for slot in first.slots if slot not in first.cut}
            slopes, state = jax.grad(counted, has_aux=True)(Taps(arrays, own))
        else:
            _, state = counted(None)
        ways[-1].state = state
        return _Result(ways[-1], slopes, self.where).tree(arguments, len(traced.inputs) - len(arguments.places))


def inputs(
    fun: Callable[..., Any],
    argnums: Argnums = None,
    *,
    moments: str = "full",
    gradients: bool = False,
    where: str | Callable[[str, Any], bool] | None = None,
) -> Inputs:
    r"""A function of the same arguments as ``fun`` that returns what each weight is multiplied with.

    The result is a tree like the parameters with a :class:`Seen` in the place of each array: for each way in which
    products contract it, the number of examples, and the sums :math:`\sum |x|` and :math:`\sum x x^\top` over the data.
    Stages that start from data take it, as in ``p.init(params, key, seen=seen)``.

    It reads the jaxpr of ``fun``, so it works with any network. Weights are followed through transposes, reshapes,
    casts, slices and multiples, through ``jit``, ``scan``, ``cond``, ``shard_map``, ``jax.checkpoint`` and ``vmap``, to
    products of matrices, convolutions and table lookups. Statistics are in the axes of the weight as you hold it. For
    layers that a scan slices there is one matrix for each layer. Any other read, such as an addition, has no data;
    :attr:`Seen.why` names it and its line.

    Add over batches with ``jax.tree.map(jnp.add, seen, more)``; for ``moments="largest"`` take ``jnp.maximum``. Put
    ``jax.jit`` around it: then nothing is computed that no statistic needs.

    Args:
      fun: A loss, or any pure function of arrays, such as a forward pass.
      argnums: The positions of the arguments that hold the parameters. Default: the first. If ``fun`` calls ``apply``
        of a parametrization on them, the result is a tree like the effective one.
      moments: ``"full"``, second moments as matrices, ``(inputs, inputs)`` for each weight in float32; ``"diagonal"``,
        their diagonal; or ``"largest"``, the largest magnitudes.
      gradients: Whether to collect the gradient of the loss with respect to each array as well, and the second moments
        of that at the outputs of each product, for each example: with those of the inputs, the factors of K-FAC.
        ``fun`` returns the loss, a scalar, or a tuple that begins with it.
      where: Which arrays to follow, a regular expression for whole paths, or a predicate ``(path, array) -> bool``.
        Default: all.

    Raises:
      TypeError: As :func:`factored`.
      ValueError: If ``moments`` is none of these, or ``apply`` runs inside of a scan.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> def loss(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"].T + params["b"][None])
      >>> params = {"w": jnp.ones((3, 4)), "v": jnp.ones((2, 4)), "b": jnp.ones(2)}
      >>> seen = rpx.inputs(loss)(params, jnp.eye(3))
      >>> seen["w"].reads[0].second[0]
      Array([[1., 0., 0.],
             [0., 1., 0.],
             [0., 0., 1.]], dtype=float32)
      >>> seen["v"].reads[0].second.shape
      (1, 4, 4)

    References:
      Frantar, Ashkboos, Hoefler and Alistarh, *GPTQ*, 2023; Lin et al., *AWQ*, 2024.
    """
    return Inputs(fun, argnums, moments, where, gradients=gradients)


def _loss(who: str, traced: Traced, outs: list[Any], *, wanted: bool) -> Any:
    """The scalar whose gradient is wanted, if any."""
    if not wanted:
        return None
    found = jax.tree.leaves(traced.restored(outs))
    if not found or jnp.shape(found[0]) or not jnp.issubdtype(jnp.result_type(found[0]), jnp.floating):
        got = describe(found[0]) if found else "nothing"
        raise TypeError(
            f"{who} with gradients=True takes a function that returns a loss, a floating scalar, or a tuple that "
            f"begins with one, but got {got}. Return the loss first."
        )
    return found[0]


def _evaluated(way: Seeing, traced: Traced, inputs: Any) -> list[Any]:
    """Runs the program, in which the named arrays are followed."""
    facts = known(traced.program, traced.given)
    followed = [
        way.start(i, x) if flag and jnp.issubdtype(x.dtype, jnp.inexact) else x
        for i, (x, flag) in enumerate(zip(inputs, traced.given, strict=True))
    ]
    return Reader(way).arrays(traced.program, followed, facts)


class _Result:
    """The statistics as a tree."""

    def __init__(self, way: Seeing, slopes: Taps | None, where: Any) -> None:
        self._way, self._slopes, self._where = way, slopes, where
        self._found: dict[Any, list[Any]] = {}
        for slot, place in way.slots.items():
            held = way.state[place : place + len(slot.zeros(way.moments))]
            own = slopes and slopes.slopes.get(slot)
            self._found.setdefault(slot.root, []).append(slot.read(way.moments, held, own))

    def tree(self, arguments: Arguments, offset: int) -> PyTree:
        """A tree like the parameters, or like the effective tree of an ``apply`` of them."""
        trees = self._way.trees
        if not trees:
            roots = {leaf: offset + i for i, leaf in enumerate(arguments.places) if arguments.given[i]}
            whole = arguments.treedef.unflatten(map(roots.get, range(arguments.treedef.num_leaves)))[0]
            chosen = [arg for arg in whole if jax.tree.leaves(arg)]
            entries = [self._entries(arg, lambda root: root) for arg in chosen]
            return entries[0] if len(entries) == 1 else tuple(entries)
        treedef, roots = trees[0]
        if any(each != treedef for each, _ in trees[1:]):
            raise ValueError(
                "rpx.inputs found several `apply`, of which the effective trees differ in structure, so it cannot "
                "return one like them. Pass a loss of the effective trees: "
                "`rpx.inputs(loss_of_weights)(p.apply(raw, key), batch)`."
            )
        return self._entries(treedef.unflatten(range(treedef.num_leaves)), roots.get)

    def _entries(self, tree: PyTree, root: Callable[[int], Any]) -> PyTree:
        paths, leaves, treedef = named(tree, lambda x: x is None)
        return treedef.unflatten(
            [self._entry(path_text(path), root(leaf)) for path, leaf in zip(paths, leaves, strict=True)]
        )

    def _entry(self, path: str, root: Any) -> Seen:
        way = self._way
        if root is None or root not in way.types:
            return Seen(why=("it is no floating array",))
        if not self._wanted(path, way.types[root]):
            return Seen(why=("`where` leaves it out",))
        gradient = self._slopes and self._slopes.arrays[root]
        return Seen(tuple(self._found.get(root, ())), gradient, tuple(way.why.get(root, ())))

    def _wanted(self, path: str, like: Any) -> bool:
        where = self._where
        return where is None or bool(re.fullmatch(where, path) if isinstance(where, str) else where(path, like))
