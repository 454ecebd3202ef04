"""Flattens the arguments of the user's function to arrays, and traces the function to a jaxpr.

With ``argnums``, the user chooses the arguments from which weights are computed, such as parameters and keys. All other
arguments are data.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Jaxpr

from reparax.core.paths import describe, flatten_with_names, is_traceable, path_text
from reparax.numerics.arithmetic import is_array
from reparax.programs import jaxprs

Argnums = int | Sequence[int] | None

REPORTED = "__reparax_reported__"
"""The name of the attribute in which a transformed function stores a function that ``explain`` calls. The stored
function takes the same arguments as the transformed function."""


@dataclass(frozen=True)
class Arguments:
    """The flattened arguments of one function call. Leaves that are not arrays, such as Python flags, never change.

    Attributes:
      fun: The function that is called.
      leaves: The leaves of the positional and keyword arguments.
      treedef: The tree structure of ``(args, kwargs)``.
      positions: The indices in ``leaves`` of the leaves that are arrays.
      is_chosen: For each array, whether the user chose its argument by ``argnums``.
    """

    fun: Callable[..., Any]
    leaves: list[Any]
    treedef: Any
    positions: list[int]
    is_chosen: list[bool]

    @classmethod
    def of(cls, who: str, fun: Callable[..., Any], argnums: Argnums, args: Sequence[Any], kwargs: Any) -> "Arguments":
        """Flattens the arguments of ``fun(*args, **kwargs)``, and marks the arguments chosen by ``argnums``.

        ``who`` names the call in error messages. Keyword arguments are never chosen, and their leaves come last.
        """
        leaves, treedef = jax.tree.flatten((args, kwargs))
        chosen_positions = _chosen_positions(who, argnums, args)
        flags = [i in chosen_positions for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        flags += [False] * (len(leaves) - len(flags))
        positions = [i for i, leaf in enumerate(leaves) if is_traceable(leaf)]
        return cls(fun, leaves, treedef, positions, [flags[i] for i in positions])

    @property
    def arrays(self) -> list[Any]:
        """The leaves of the arguments that are arrays."""
        return [self.leaves[i] for i in self.positions]

    @property
    def paths(self) -> list[str]:
        """The path of each array, which begins with the name of its argument, such as ``raw/layer/kernel``."""
        all_names = flatten_with_names(self.treedef.unflatten(self.leaves))[0]
        parameters = _parameters_of(self.fun)

        def path(names: tuple[str, ...]) -> str:
            """Converts the keys of a leaf in ``(args, kwargs)`` to its path: ("0", "0", "w") becomes ``raw/w``.

            A positional argument gets the name of the function's parameter at this position, if there is one.
            """
            group, name, *path_in_argument = names
            has_name = group == "0" and int(name) < len(parameters)
            argument = parameters[int(name)] if has_name else f"argument {name}"
            return path_text((argument, *path_in_argument))

        return [path(all_names[i]) for i in self.positions]

    def call(self, arrays: Sequence[Any], fun: Callable[..., Any] | None = None) -> Any:
        """Calls the function, or ``fun`` if it is given, with ``arrays`` in place of the arrays among the arguments."""
        leaves = list(self.leaves)
        for i, x in zip(self.positions, arrays, strict=True):
            leaves[i] = x
        args, kwargs = self.treedef.unflatten(leaves)
        return (fun or self.fun)(*args, **kwargs)

    def trace(self) -> "Traced":
        """Traces the function once, and returns its jaxpr together with the values of the jaxpr's inputs.

        The outputs of the jaxpr are the traced leaves of the function's result. ``Traced.restore`` adds all other
        leaves, such as strings or arrays that do not depend on the arguments.
        """
        # ``jax.make_jaxpr`` returns only a jaxpr, so ``traced_leaves`` appends to this list a function that rebuilds
        # the result.
        restores = list[Callable[[list[Any]], Any]]()

        def traced_leaves(*arrays: Any) -> list[Any]:
            """Calls the function on ``arrays``, and returns the traced leaves of its result."""
            outs, treedef = jax.tree.flatten(self.call(arrays))
            untraced = {i: x for i, x in enumerate(outs) if not isinstance(x, Tracer)}
            restores.append(functools.partial(_restore, treedef, untraced))
            return [x for x in outs if isinstance(x, Tracer)]

        program, consts = jaxprs.consts_first(jax.make_jaxpr(traced_leaves)(*self.arrays))
        is_chosen = [*(False for _ in consts), *self.is_chosen]  # Arrays closed over by the function are data.
        return Traced(program, [*consts, *self.arrays], is_chosen, restores[-1])


def _restore(treedef: Any, untraced: Mapping[int, Any], outputs: Sequence[Any]) -> Any:
    """Rebuilds the result of a function from its structure, its untraced leaves by position, and its traced leaves.

    For example, if ``untraced`` is {1: "a"} and ``outputs`` is [x, y], the leaves of the result are x, "a" and y.
    """
    traced_leaves = iter(outputs)
    leaves = [untraced[i] if i in untraced else next(traced_leaves) for i in range(treedef.num_leaves)]
    return treedef.unflatten(leaves)


@dataclass(frozen=True)
class Traced:
    """The jaxpr of one function call and the values of its inputs, as returned by :meth:`Arguments.trace`.

    Attributes:
      program: The jaxpr, with its constants as first inputs.
      inputs: The value of each input of the jaxpr.
      is_chosen: For each input, whether the user chose it by ``argnums``.
      restore: A function that rebuilds the result of the call from the outputs of the jaxpr.
    """

    program: Jaxpr
    inputs: list[Any]
    is_chosen: list[bool]
    restore: Callable[[list[Any]], Any]


def check_call(
    method: str, fun: Any, argnums: Any, *, follows_weights: bool = False, own_options: Sequence[str] = ()
) -> str:
    """Checks ``fun`` and ``argnums``, and returns a name of the call for later errors, such as ``factored(loss)``.

    Args:
      method: The name of the transform, such as ``"factored"``.
      fun: The function passed to the transform.
      argnums: The ``argnums`` passed to the transform.
      follows_weights: Whether the transform traces how the function uses its weights. Such a transform rejects a
        function returned by ``remat``, because ``remat`` hides the weights.
      own_options: The names of the keyword arguments that the transform used as its own options. The function must not
        have parameters with these names.
    """
    if not callable(fun) or hasattr(fun, "_parts"):
        raise TypeError(
            f"{method} takes a function, but got {_describe_arrays(fun)!r} of type {type(fun).__name__}. Pass a "
            f"function, such as the loss."
        )
    function = fun  # A ``functools.partial`` hides the attributes of its function.
    while isinstance(function, functools.partial):
        function = function.func
    if follows_weights and getattr(function, "hides_weights", False):
        raise ValueError(
            f"{method} traces how a function uses its weights, but got a function returned by `rpx.remat`, which hides "
            "them. Pass the original function. To use both, apply `rpx.remat` last: `rpx.remat(rpx.factored(loss))`."
        )
    # The repr of the function is not used as a name because it may print whole arrays.
    who = f"{method}({getattr(function, '__name__', type(function).__name__)})"
    if shared := [name for name in own_options if name in _parameters_of(fun)]:
        raise TypeError(
            f"{who} got {shared[0]!r}, which is both an option of {method} and a parameter of the function. To pass it "
            f"to the function, bind it: `{method}(lambda *args: loss(*args, {shared[0]}=...), ...)`."
        )
    _require_positions(who, argnums)
    return who


def _parameters_of(fun: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's parameters, or an empty list if its signature is unknown.

    The signatures of some builtin functions are unknown.
    """
    try:
        return list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        return []


def given_options(**options: Any) -> list[str]:
    """Returns the names of the options that the user passed. None and False count as not passed."""
    return [name for name, value in options.items() if value is not None and value is not False]


def _require_positions(who: str, argnums: Any) -> None:
    """Raises an error unless ``argnums`` is None, the position of an argument, or a tuple or list of positions.

    Negative positions are rejected because their meaning would depend on the number of arguments in the call.
    """
    positions = argnums if isinstance(argnums, tuple | list) else [0 if argnums is None else argnums]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in positions):
        raise TypeError(
            f"{who} expects argnums to be the position of an argument or a tuple of positions, but got "
            f"{_describe_arrays(argnums)!r}. Pass positions counted from 0, such as `argnums=(0, 2)`."
        )


_CONTAINERS = (dict, list, tuple)


def _describe_arrays(x: Any) -> Any:
    """Prepares ``x`` for an error message: each array is replaced by its dtype and shape.

    Only dicts, lists and tuples are searched for arrays, because error messages should show other objects, such as
    modules, unchanged.
    """
    return jax.tree.map(
        lambda leaf: describe(leaf) if is_array(leaf) else leaf, x, is_leaf=lambda y: not isinstance(y, _CONTAINERS)
    )


def _chosen_positions(who: str, argnums: Argnums, args: Sequence[Any]) -> set[int]:
    """Returns the positions of the arguments that the user chose by ``argnums``.

    If ``argnums`` is None, the first argument and all arguments that are PRNG keys are chosen. Raises an error, in
    which ``who`` names the call, if ``argnums`` contains a position at which the call has no positional argument.
    """
    if argnums is None:
        return {i for i, arg in enumerate(args) if i == 0 or is_keys(arg)}
    positions = {argnums} if isinstance(argnums, int) else set(argnums)
    if missing := [i for i in sorted(positions) if i >= len(args)]:
        raise TypeError(
            f"{who} got argnums={argnums!r}, but was called with {len(args)} positional arguments, so there is no "
            f"argument {missing[0]}. Pass all arguments in argnums by position, not by keyword."
        )
    return positions


def is_keys(arg: Any) -> bool:
    """Returns whether all leaves of an argument are PRNG keys, either typed keys or possible legacy keys."""

    def is_key(x: Any) -> bool:
        """Returns whether a leaf is an array of typed PRNG keys or may be one of legacy keys.

        A legacy key is a uint32 array whose last axis has 2 or 4 entries.
        """
        if not is_traceable(x):
            return False
        is_legacy_key = x.dtype == jnp.uint32 and x.ndim > 0 and x.shape[-1] in (2, 4)
        return is_legacy_key or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    leaves = jax.tree.leaves(arg)
    return bool(leaves) and all(map(is_key, leaves))
