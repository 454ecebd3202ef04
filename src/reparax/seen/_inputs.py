"""Statistics of the inputs of each weight of a loss."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from reparax._data.seen import MOMENTS, Read, Seen
from reparax._numerics.arguments import one_of
from reparax._numerics.usage import shows_usage
from reparax._programs import jaxprs
from reparax._programs.call import Argnums, Arguments, Traced, check_call
from reparax._programs.mixing import Dependence, Mixing, Value
from reparax._programs.sources import describe_read, lines_by_origin
from reparax._tree.paths import PyTree, describe, flatten_with_names, path_text
from reparax._weights.facts import facts_of_inputs
from reparax._weights.reader import Reader
from reparax._weights.rehearsal import network
from reparax._weights.reports import Reports
from reparax.seen._explained import ExplainedInputs, report_of
from reparax.seen._seeing import Root, Seeing, leaves_of
from reparax.seen._taps import Taps


class Inputs(Reports):
    """A function that returns statistics of the inputs of weights; :func:`explain` reports it."""

    def __init__(self, fun: Callable[..., Any], argnums: Argnums, moments: str, where: Any, *, gradients: bool) -> None:
        self.who, self.fun, self.argnums = check_call("inputs", fun, argnums), fun, argnums
        self.moments, self.where, self.gradients = one_of(*MOMENTS)(moments, self.who, "moments"), where, gradients
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        check_this_jax()
        arguments = Arguments.of(self.who, self.fun, self.argnums, args, kwargs)
        call = arguments.trace()
        look = first_look(call, self.moments)
        layout = _Layout.of(look, arguments, len(call.inputs) - len(arguments.places))
        paths = layout.path_of
        roots = {root for root, like in look.types.items() if self._wants(paths.get(root), like)}
        return layout.tree(collect(self.who, call, look, roots, gradients=self.gradients).entry)

    def explained(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExplainedInputs:
        arguments = Arguments.of(self.who, self.fun, self.argnums, args, kwargs)
        return report_of(jax.eval_shape(lambda arrays: arguments.call(arrays, self), arguments.arrays))

    def _wants(self, path: str | None, like: Any) -> bool:
        """Whether ``where`` takes an array; one that is no part of the result has no path."""
        where = self.where
        if path is None:
            return False
        return where is None or bool(re.fullmatch(where, path) if isinstance(where, str) else where(path, like))


@shows_usage
def inputs(
    fun: Callable[..., Any],
    argnums: Argnums = None,
    *,
    moments: str = "full",
    gradients: bool = False,
    where: str | Callable[[str, Any], bool] | None = None,
) -> Inputs:
    r"""A function of the same arguments as ``fun`` that returns statistics of the inputs of each weight.

    Stages that start from data take the result, as in ``p.init(params, key, seen=seen)``. Add over batches with
    ``jax.tree.map(jnp.add, seen, more)``; for ``moments="largest"`` take ``jnp.maximum``. Put ``jax.jit`` around it:
    then only the statistics are computed.

    The result is a tree like the parameters with a :class:`Seen` in the place of each array: for each way in which
    products contract it, the number of examples, and the sums over them: :math:`\sum x`, :math:`\sum |x|` and
    :math:`\sum x x^\top`.

    It reads the jaxpr of ``fun``, so it works with any network. Weights are followed through transposes, reshapes,
    casts, slices and multiples, through ``jit``, ``scan``, ``cond``, ``shard_map``, ``jax.checkpoint`` and ``vmap``, to
    products of matrices, convolutions and table lookups. Statistics are in the axes of your array. Layers that a scan
    slices have one matrix each, and so have experts in ``jax.lax.ragged_dot`` or in look-ups of matrices, such as
    ``w[expert]`` for each token; stages treat an expert that got no row as if its inputs were white noise.

    Any other read, such as an addition, has no data: :attr:`Seen.why` names it and its line. If it reads the array
    together with data, as a product with a slice of a merged axis or with ``sin(w)`` does, :attr:`Seen.uncounted` names
    it, and no stage starts from the other products alone. A penalty reads no data, and may be added to the loss.
    Closed-over arrays and random numbers are data.

    Args:
      fun: A loss, or any pure function of arrays, such as a forward pass.
      argnums: The positions of the arguments that hold the parameters. Default: the first. If ``fun`` calls ``apply``
        of a parametrization on them, the result is a tree like the effective one.
      moments: ``"full"``, second moments as matrices, ``(inputs, inputs)`` for each weight in float32; ``"diagonal"``,
        their diagonal; or ``"largest"``, the largest magnitudes.
      gradients: Whether to collect also the gradient of the loss with respect to each array, and the second moments of
        the gradients of each example at the outputs of each product: with those of the inputs, the factors of K-FAC.
        ``fun`` returns the loss, a scalar, or a tuple that begins with it.
      where: Which arrays to follow, a regular expression for whole paths, or a predicate ``(path, array) -> bool``.
        Default: all.

    Raises:
      TypeError: As for :func:`factored`.
      ValueError: If ``moments`` is not one of the words above, or ``apply`` runs inside a scan.

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


def first_look(call: Traced, moments: str, only: Mapping[Any, tuple[int, Any]] | None = None) -> Seeing:
    """What a program does with the arrays that the user named, before anything is counted; ``only`` as of a way."""
    way = Seeing(moments, lines_by_origin(call.program), only=only)
    jax.make_jaxpr(lambda *inputs: _evaluate(way, call, inputs))(*call.inputs)
    return way


@dataclass(frozen=True)
class Collected:
    """What was found in one run of a program.

    Attributes:
      first: What it does with arrays.
      reads: For each array that was wanted the data.
      gradients: For each of them the gradient of the loss, if wanted.
      uncounted: For each array what else reads it with data.
    """

    first: Seeing
    reads: Mapping[Any, Sequence[Read]]
    gradients: Mapping[Any, Any]
    uncounted: Mapping[Any, Mapping[str, str]]

    def entry(self, root: Any) -> Seen:
        """What is known of one array."""
        if root not in self.first.types:
            return Seen(why=("it is not a floating array",))
        if root not in self.reads:
            return Seen(why=("`where` of `inputs` leaves it out",))
        uncounted = self.uncounted.get(root, {})
        why = [reason for reason in self.first.why.get(root, ()) if reason not in uncounted]
        return Seen(tuple(self.reads[root]), self.gradients.get(root), tuple(why), tuple(uncounted.values()))


def collect(who: str, call: Traced, look: Seeing, roots: Collection[Any], *, gradients: bool) -> Collected:
    """Runs a program and counts the data of some arrays."""
    moments = look.moments
    slots = [slot for slot in look.slots if slot.root in roots]

    def run_and_count(taps: Taps | None) -> tuple[Any, list[Any]]:
        way = Seeing(moments, look.lines, slots, taps, look.only)
        outs = _evaluate(way, call, call.inputs)
        return None if taps is None else _scalar_loss(who, call, outs), way.state

    slopes: Taps | None = None
    if gradients:
        slopes_of_slots = {slot: slot.slopes(moments) for slot in slots if slot not in look.cut}
        arrays = {root: jnp.zeros(like.shape, like.dtype) for root, like in look.types.items() if root in roots}
        slopes, state = jax.grad(run_and_count, has_aux=True)(Taps(arrays, slopes_of_slots))
    else:
        _, state = run_and_count(None)
    reads: dict[Any, list[Read]] = {root: [] for root in roots}
    for slot, statistics in zip(slots, state, strict=True):
        reads[slot.root].append(slot.read(moments, statistics, slopes and slopes.slopes.get(slot)))
    return Collected(look, reads, {} if slopes is None else slopes.arrays, _find_uncounted(look, call))


@functools.cache
def check_this_jax() -> None:
    """Raises an error if this JAX writes jaxprs in an unknown way."""
    jaxprs.check_this_jax(lambda: _axes_read() == {(0,), (1,)})


def _axes_read() -> set[tuple[int, ...]]:
    """The axes of a weight that the products of a small network contract; none if it is read otherwise."""
    w, way = jax.ShapeDtypeStruct((2, 2), jnp.float32), Seeing("full", {})
    call = Arguments.of("inputs", network, None, (w, w), {}).trace()
    jax.make_jaxpr(lambda *inputs: _evaluate(way, call, inputs))(*call.inputs)
    return set() if way.why else {slot.bare.axes for slot in way.slots}


def _scalar_loss(who: str, call: Traced, outs: list[Any]) -> Any:
    """The scalar whose gradient is wanted."""
    leaves = jax.tree.leaves(call.restore(outs))
    if not leaves or jnp.shape(leaves[0]) or not jnp.issubdtype(jnp.result_type(leaves[0]), jnp.floating):
        output = describe(leaves[0]) if leaves else "nothing"
        raise TypeError(
            f"{who} with gradients=True takes a function that returns a loss, a floating scalar, or a tuple that "
            f"begins with one, but got {output}. Return the loss first."
        )
    return leaves[0]


def _evaluate(way: Seeing, call: Traced, inputs: Any) -> list[Any]:
    """Runs the program, in which the named arrays are followed."""
    facts = facts_of_inputs(call.program, call.is_chosen)
    operands = [
        way.follow(i, x) if flag and jnp.issubdtype(x.dtype, jnp.inexact) else x
        for i, (x, flag) in enumerate(zip(inputs, call.is_chosen, strict=True))
    ]
    return Reader(way).arrays(call.program, operands, facts)


def _is_random(v: Any) -> bool:
    """Whether an input is a key, typed or legacy; what is drawn from it is data."""
    dtype = jaxprs.type_of(v).dtype
    return dtype == jnp.uint32 or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _find_uncounted(way: Seeing, call: Traced) -> dict[Any, dict[str, str]]:
    """For each array what reads it with data and is not counted: as what reads it, and with these words."""
    mixing = Mixing({path: product.operand for path, product in way.counted.items()}, leaves_of)
    inputs: list[Value] = [
        ({i: Dependence.ARRAY} if i in way.types else {}, flag and not _is_random(v))
        for i, (v, flag) in enumerate(zip(call.program.invars, call.is_chosen, strict=True))
    ]
    mixing.program(call.program, inputs)
    return {
        root: {
            describe_read(eqn, "reads it", way.lines): describe_read(eqn, "reads it with data", way.lines)
            for eqn in eqns.values()
        }
        for root, eqns in mixing.found.items()
    }


@dataclass(frozen=True)
class _Layout:
    """A tree like the parameters, or like the effective tree of an ``apply`` of them.

    Attributes:
      treedef: Its structure.
      paths: The path of each leaf.
      roots: What is followed there; None for other leaves.
    """

    treedef: Any
    paths: list[str]
    roots: list[Any]

    @classmethod
    def of(cls, way: Seeing, arguments: Arguments, offset: int) -> _Layout:
        """The layout for the arguments of a call, of which the arrays are inputs from ``offset`` on."""
        if way.trees:
            treedef, roots = way.trees[0]
            if any(other_treedef != treedef for other_treedef, _ in way.trees[1:]):
                raise ValueError(
                    "rpx.inputs found several calls of `apply` whose effective trees differ in structure, so it cannot "
                    "return one tree like them. Pass a loss of the effective trees: "
                    "`rpx.inputs(loss_of_weights)(p.apply(raw, key), batch)`."
                )
            tree = treedef.unflatten([roots.get(place) for place in range(treedef.num_leaves)])
        else:
            input_of_leaf = {leaf: offset + i for i, leaf in enumerate(arguments.places) if arguments.is_chosen[i]}
            args, _ = arguments.treedef.unflatten(map(input_of_leaf.get, range(arguments.treedef.num_leaves)))
            trees = tuple(arg for arg in args if any(root in way.types for root in jax.tree.leaves(arg)))
            tree = trees[0] if len(trees) == 1 else trees
        paths, roots, treedef = flatten_with_names(tree, lambda x: x is None or isinstance(x, Root))
        return cls(treedef, list(map(path_text, paths)), roots)

    @property
    def path_of(self) -> dict[Any, str]:
        """The path of what is followed, where it is a part of the result."""
        return dict(zip(reversed(self.roots), reversed(self.paths), strict=True))

    def tree(self, entry: Callable[[Any], Seen]) -> PyTree:
        """The tree with an entry for each leaf."""
        return self.treedef.unflatten(map(entry, self.roots))
