"""Reports what a loss stores between its forward and its backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Jaxpr, Var

from reparax.core.paths import describe
from reparax.core.reports import count_lines, fold_lines, readable_size, size_in_bytes
from reparax.core.unchanged import recompute
from reparax.programs import dependence, jaxprs
from reparax.programs.call import Argnums, Arguments, check_call, given_options
from reparax.programs.sources import line_of_output, lines_by_origin
from reparax.transforms._remat_derivative import recomputing_function

PARAMETERS, WEIGHTS, ACTIVATIONS = "parameters", "weights", "activations"
# Maps each kind to its title in the report, in the order of the report.
_TITLES = {PARAMETERS: "raw parameters and keys", WEIGHTS: "made from these alone", ACTIVATIONS: "activations and data"}


@dataclass(frozen=True)
class Kept:
    """Describes one array that is stored for the backward pass.

    Attributes:
      kind: ``"parameters"`` for an array of the arguments in ``argnums``, ``"weights"`` for an array computed only from
        such arrays, and ``"activations"`` for all other arrays.
      type: The dtype and shape of the array.
      bytes: The size of the array in bytes.
      origin: The path of the argument, or the source line that computed it.
    """

    kind: str
    type: str
    bytes: int
    origin: str


@dataclass(frozen=True, repr=False)
class SavedResiduals:
    """A report of what is stored between the forward and the backward pass. The repr is a table, largest arrays first.

    In the table, equal lines are shown once, with their count. Arguments whose paths differ only in a number also share
    a line.

    Attributes:
      kept: The stored arrays.
    """

    kept: tuple[Kept, ...]

    def bytes(self, kind: str | None = None) -> int:
        """Returns the size in bytes of all arrays, or of one kind: ``"parameters"``, ``"weights"``, ``"activations"``.

        Raises:
          ValueError: If ``kind`` is neither None nor one of these kinds.
        """
        if kind is not None and kind not in _TITLES:
            raise ValueError(
                f"saved_residuals(...).bytes takes 'parameters', 'weights', 'activations' or None, but got {kind!r}."
            )
        return sum(array.bytes for array in self.kept if kind in (None, array.kind))

    def __repr__(self) -> str:
        """Returns a table: the total size, then the size and the arrays of each kind."""
        lines = [f"kept for the backward pass: {readable_size(self.bytes())}"]
        for kind, title in _TITLES.items():
            lines += [f"  {title}: {readable_size(self.bytes(kind))}", *self._lines(kind)]
        return "\n".join(lines)

    def _lines(self, kind: str) -> list[str]:
        """Returns the lines for the arrays of a kind, the largest first; similar arrays share a line.

        Each line holds a size, a type, and a path or source line, such as ``2.0 KiB  float32[8, 64]  x``.
        """
        arrays = [(array.origin, (array.type, array.bytes)) for array in self.kept if array.kind == kind]
        # Only parameters have paths. Paths that differ only in an index can be folded into one line.
        folded = fold_lines(arrays) if kind == PARAMETERS else count_lines(arrays)
        largest_first = sorted(folded, key=lambda line: -line.count * line.value[1])
        types = [f"{line.times}{line.value[0]}" for line in largest_first]
        width = max([20, *map(len, types)])  # The minimum width aligns the columns of most kinds.
        sizes = [readable_size(line.count * line.value[1]) for line in largest_first]
        rows = zip(sizes, types, largest_first, strict=True)
        return [f"    {size:>10}  {type:<{width}} {line.path}" for size, type, line in rows]


def saved_residuals(
    fun: Callable[..., Any], /, *args: Any, argnums: Argnums = None, has_aux: bool = False, **kwargs: Any
) -> SavedResiduals:
    """Reports what JAX stores between the forward and the backward pass of ``jax.grad(fun)(*args, **kwargs)``.

    ``saved_residuals`` traces ``fun`` and computes no arrays. The report lists raw parameters, values computed only
    from parameters and keys (which :func:`remat` would recompute), and activations. Keys that ``fun`` closes over count
    as keys too.

    Args:
      fun: The loss.
      args: The arguments of ``fun``, or their shapes and dtypes.
      argnums: The positions of the arguments that hold parameters and keys, as in :func:`remat`. Gradients are taken
        with respect to their floating-point arrays.
      has_aux: Whether ``fun`` returns a pair of the loss and auxiliary values that are not differentiated.
      kwargs: The keyword arguments of ``fun``.

    Returns:
      A report whose repr is a table. ``report.kept`` holds the arrays, each with its ``kind``, ``type``, ``bytes`` and
      ``origin``. ``report.bytes()`` is the total size, and ``report.bytes("parameters")`` is the size of one kind; the
      other kinds are ``"weights"`` and ``"activations"``.

    Raises:
      TypeError: If no argument in ``argnums`` holds a floating-point array, or ``argnums`` is not valid for
        :func:`remat`.
      RuntimeError: If JAX is newer than the tested versions, and its jaxprs differ in a way that is not supported.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.VarNoise(0.1)
      >>> def loss(raw, key, x):
      ...     w = p.apply(raw, key)["w"]
      ...     return jnp.sum(x @ w @ w)
      >>> example = {"w": jnp.ones((64, 64))}, jax.random.key(0), jnp.ones((8, 64))
      >>> rpx.transforms.saved_residuals(loss, *example)  # doctest: +ELLIPSIS
      kept for the backward pass: 20.0 KiB
        raw parameters and keys: 0 B
        made from these alone: 16.0 KiB
            16.0 KiB  float32[64, 64]      ...:2:8 (loss)
        activations and data: 4.0 KiB
             2.0 KiB  float32[8, 64]       x
             2.0 KiB  float32[8, 64]       ...:3:19 (loss)
      >>> rpx.transforms.saved_residuals(rpx.remat(loss), *example).bytes("weights")
      0
    """
    options = given_options(argnums=argnums, has_aux=has_aux)
    who = check_call("saved_residuals", fun, argnums, own_options=options)
    check_this_jax()
    return _report(who, fun, argnums, args, kwargs)


def _report(who: str, fun: Callable[..., Any], argnums: Argnums, args: Sequence[Any], kwargs: Any) -> SavedResiduals:
    """Returns the report for a function, without checking the installed JAX first.

    ``check_this_jax`` also calls this function. The residuals of the gradient are the outputs of a traced program (see
    ``_residuals``). A residual counts as a parameter, a weight or an activation, depending on the inputs of the program
    from which it is computed. Error texts begin with ``who``.
    """
    arguments = Arguments.of(who, fun, argnums, args, kwargs)
    is_floating = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in arguments.arrays]
    operands = [i for i, flags in enumerate(zip(is_floating, arguments.is_chosen, strict=True)) if all(flags)]
    if not operands:
        raise TypeError(
            f"{who} found no floating-point array in the arguments for parameters, so there is no gradient to take. "
            f"Pass the parameters as the first argument, or pass their position as argnums."
        )
    traced_loss = jax.make_jaxpr(lambda *arrays: jax.tree.leaves(arguments.call(arrays)))(*arguments.arrays)
    loss, constants = jaxprs.consts_first(traced_loss)
    residuals = functools.partial(_residuals, loss, constants, operands)
    program, consts = jaxprs.consts_first(jax.make_jaxpr(residuals)(*arguments.arrays))
    # The inputs of the program are the constants that the function closes over, followed by its arguments.
    origins = dict(zip(program.invars, ["closed over" for _ in consts] + arguments.paths, strict=True))
    known_inputs = [jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) for x in consts] + arguments.is_chosen
    is_known = dependence.known_variables(program, known_inputs)
    eqn_of = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    lines = lines_by_origin(loss)

    def kept(v: Var) -> Kept:
        """Returns the report entry for a residual, which is an input of the program or the output of an equation."""
        kind_if_known = PARAMETERS if v in origins else WEIGHTS
        origin = origins[v] if v in origins else line_of_output(eqn_of[v], eqn_of[v].outvars.index(v), lines)
        kind = kind_if_known if is_known[v] else ACTIVATIONS
        return Kept(kind, describe(v.aval), size_in_bytes(v.aval), origin)

    return SavedResiduals(tuple(map(kept, jaxprs.variables(program.outvars))))


def _residuals(loss: Jaxpr, constants: Sequence[Any], operands: Sequence[int], *arrays: Any) -> list[Any]:
    """Returns the values stored for the gradient of the first output of ``loss`` with respect to the ``operands``.

    ``arrays`` holds the inputs of ``loss`` after its ``constants``, and ``operands`` holds indices into ``arrays``. The
    first output is the value of the loss. With ``has_aux``, the other outputs are auxiliary.
    """

    def first_output(*values: Any) -> Any:
        """Computes the first output of ``loss``, with ``values`` in place of the operands."""
        inputs = dict(enumerate(arrays)) | dict(zip(operands, values, strict=True))
        return jaxprs.evaluate(loss, [*constants, *inputs.values()])[0]

    return jaxprs.residuals(jax.linearize(first_output, *[arrays[i] for i in operands])[1])[0]


# ---- the installed JAX


@functools.cache
def check_this_jax() -> None:
    """Raises an error if the installed JAX produces jaxprs in which ``remat`` would find nothing to recompute."""
    jaxprs.check_this_jax(_is_compatible)


def _is_compatible() -> bool:
    """Returns whether the analysis finds weights, and what is stored, in small test programs.

    The analysis must tell weights from data through each kind of call. A small network must store weights without
    ``remat``, but none with ``remat``, and must store the same number of activations in both cases.
    """
    args = (jax.ShapeDtypeStruct((2, 2), jnp.float32),) * 2
    program, consts = jaxprs.consts_first(jax.make_jaxpr(_weight_and_data)(*args))
    is_known = dependence.known_variables(program, [*(True for _ in consts), True, False])

    def recomputed(w: Array, x: Array) -> Array:
        """Runs the network with recomputation, like ``remat``, but without the checks of ``remat``."""
        network, consts = jaxprs.consts_first(jax.make_jaxpr(_network)(w, x))
        # No input is declared as known, so only the ``apply`` in the program shows which values are weights.
        return recomputing_function(network, [False for _ in network.invars])(*consts, w, x)[0]

    kinds, new_kinds = ([array.kind for array in _report("", f, None, args, {}).kept] for f in (_network, recomputed))
    finds_weights = dependence.are_known(is_known, program.outvars) == [True, False]
    recomputes = WEIGHTS in kinds and WEIGHTS not in new_kinds
    return finds_weights and recomputes and kinds.count(ACTIVATIONS) == new_kinds.count(ACTIVATIONS)


def _weight_and_data(w: Array, x: Array) -> tuple[Array, Array]:
    """Passes two values through each kind of call: the first depends only on ``w``, the second also on ``x``.

    The function is only traced, never computed, to check that the analysis tells the two values apart.
    """

    def pair(w: Array, x: Array) -> tuple[Array, Array]:
        """Returns the two values for the next call: the first from ``w`` alone, the second from ``w`` and ``x``."""
        return jnp.sin(w), x @ w

    by_hand = jax.custom_jvp(pair)
    by_hand.defjvp(lambda primals, tangents: jax.jvp(pair, primals, tangents))
    for call in (jax.jit(pair), jax.checkpoint(pair), by_hand):
        w, x = call(w, x)
    w, x = jax.lax.scan(lambda pair, _: ((pair[0] * 2, pair[1] @ w), None), (w, x), length=2)[0]
    return jax.lax.cond(jnp.sum(x) > 0, lambda: (w * 2, x), lambda: (w, x * 2))


def _network(w: Array, x: Array) -> Array:
    """Runs a small network whose weight is computed in the same way as by ``apply``."""
    return jaxprs.small_network(recompute(lambda w, _: jnp.sin(w), w, None), x)
