"""Finds the source lines of jaxpr equations and the paths of parameters, for reports such as that of ``explain``."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from reparax.programs import jaxprs
from reparax.programs.call import Arguments, Traced
from reparax.programs.equations import Conv, view_of

# Reports skip source lines of this package. They also replace the generated file names of notebook cells, which mean
# nothing to users.
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_CELL = re.compile(r"\S*ipykernel_\d+/\d+\.py")


def lines_by_origin(program: Jaxpr, outside: str = "") -> dict[int, str]:
    """Maps the origin (``jaxprs.origin``) of each equation, including those of inner jaxprs, to its source line.

    The source line is in the user's code, as in :func:`line_of`. Because JAX cuts off tracebacks inside some equations,
    an equation without a source line gets the line of the equation that contains it. An outermost equation without a
    source line gets ``outside``.
    """
    line_of_origin: dict[int, str] = {}
    for eqn in program.eqns:
        line = line_of(eqn) or outside
        line_of_origin[jaxprs.origin(eqn)] = line
        for inner_program in jaxprs.inner_programs(eqn):
            line_of_origin |= lines_by_origin(inner_program, line)
    return line_of_origin


def line_of(eqn: JaxprEqn) -> str:
    """Returns the innermost source line of an equation that is not in reparax, such as "model.py:12:4 (loss)".

    The file of a notebook cell is written as ``<cell>``. The result is an empty string if no such line is known.
    """
    line = next((line for line in jaxprs.lines(eqn) if not line.startswith(_PACKAGE)), "")
    return _CELL.sub("<cell>", line)


def describe_read(eqn: JaxprEqn | None, does: str, lines: Mapping[int, str]) -> str:
    """Describes in a report how an equation reads a weight, as in "tanh needs the array: model.py:12".

    ``does`` says what the equation does with the weight, such as "needs the array". ``lines`` is a result of
    :func:`lines_by_origin`. ``eqn`` is None if the jaxpr returns the weight.
    """
    if eqn is None:
        return "it is returned, or carried"
    line, view = line_of_output(eqn, 0, lines), view_of(eqn)
    prefix = "a grouped " if isinstance(view, Conv) and view.feature_group_count > 1 else ""
    return f"{prefix}{eqn.primitive.name} {does}" + (f": {line}" if line else "")


def line_of_output(eqn: JaxprEqn, i: int, lines: Mapping[int, str]) -> str:
    """Returns the source line that computed the ``i``-th output of an equation, or an empty string if it is unknown.

    For a ``jit``, the result is the line inside the call, if known. ``lines`` is a result of :func:`lines_by_origin`.
    """
    line = _line_inside(eqn, i, lines) if jaxprs.is_jit(eqn) else ""
    return line or line_of(eqn) or lines.get(jaxprs.origin(eqn), "")


def _line_inside(call: JaxprEqn, i: int, lines: Mapping[int, str]) -> str:
    """Returns the source line inside a call, such as a ``jit``, that computed the ``i``-th output of the call.

    The result is an empty string if the line is unknown, or if the output is an operand or a literal, which no equation
    inside the call computed.
    """
    (program,) = jaxprs.inner_programs(call)
    v: Any = program.outvars[i]
    eqn = next((eqn for eqn in program.eqns if v in eqn.outvars), None)
    return "" if eqn is None else line_of_output(eqn, eqn.outvars.index(v), lines)


def paths_of(arguments: Arguments, call: Traced) -> dict[int, str]:
    """Maps the position of each input of a traced call to its path in the arguments, such as ``raw/layer/kernel``.

    Two kinds of inputs are left out: constants of the jaxpr, which come first, and typed PRNG keys.
    """
    paths = dict(enumerate(arguments.paths, start=len(call.inputs) - len(arguments.paths)))
    types = [jaxprs.type_of(v).dtype for v in call.program.invars]
    return {i: path for i, path in paths.items() if not jnp.issubdtype(types[i], jax.dtypes.prng_key)}


def common_path(origins: Iterable[int], paths: Mapping[int, str]) -> str:
    """Returns the path of a weight: the common prefix of the paths of the inputs on which the weight depends.

    ``origins`` holds the positions of the inputs on which the weight depends, and ``paths`` is a result of
    :func:`paths_of`. The path ends before a name that starts with ``@``: "raw/w/@lora/a" and "raw/w/@lora/b" give
    "raw/w". If there is no common prefix, the result is "of several parameters", or "closed over" if the inputs have no
    paths.
    """
    split_paths = [paths[i].split("/") for i in origins if i in paths]
    if len({names[0] for names in split_paths}) > 1:  # Different arguments hold parts of a tree.
        split_paths = [names[1:] for names in split_paths]
    common: list[str] = []
    for names in zip(*split_paths, strict=False):
        if len(set(names)) > 1 or names[0].startswith("@"):
            break
        common.append(names[0])
    return "/".join(common) or ("of several parameters" if split_paths else "closed over")
