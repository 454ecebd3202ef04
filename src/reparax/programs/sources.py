"""Finds the source lines of equations and the paths of parameters, for reports."""

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

# Reports skip source lines of this package, and replace file names of notebook cells because they mean nothing to
# users.
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_CELL = re.compile(r"\S*ipykernel_\d+/\d+\.py")


def lines_by_origin(program: Jaxpr, outside: str = "") -> dict[int, str]:
    """Maps the origin (``jaxprs.origin``) of each equation, also of those in inner programs, to its source line.

    The source line is in the user's code, as in :func:`line_of`. Because JAX cuts off tracebacks inside some equations,
    an equation without a source line gets the line of the equation around it. An outermost equation without a source
    line gets ``outside``.
    """
    line_of_origin: dict[int, str] = {}
    for eqn in program.eqns:
        line = line_of(eqn) or outside
        line_of_origin[jaxprs.origin(eqn)] = line
        for inner_program in jaxprs.inner_programs(eqn):
            line_of_origin |= lines_by_origin(inner_program, line)
    return line_of_origin


def line_of(eqn: JaxprEqn) -> str:
    """Returns the innermost source line of an equation outside of reparax, such as "model.py:12:4 (loss)".

    The file of a notebook cell is written as ``<cell>``. The result is an empty string if there is no such line.
    """
    line = next((line for line in jaxprs.lines(eqn) if not line.startswith(_PACKAGE)), "")
    return _CELL.sub("<cell>", line)


def describe_read(eqn: JaxprEqn | None, does: str, lines: Mapping[int, str]) -> str:
    """Describes how an equation reads a weight, for a report, as in "tanh needs the array: model.py:12".

    ``does`` says what the equation does with the weight, and ``lines`` comes from :func:`lines_by_origin`. ``eqn`` is
    None if the program returns the weight.
    """
    if eqn is None:
        return "it is returned, or carried"
    line, view = line_of_output(eqn, 0, lines), view_of(eqn)
    prefix = "a grouped " if isinstance(view, Conv) and view.feature_group_count > 1 else ""
    return f"{prefix}{eqn.primitive.name} {does}" + (f": {line}" if line else "")


def line_of_output(eqn: JaxprEqn, i: int, lines: Mapping[int, str]) -> str:
    """Returns the source line that computed the ``i``-th output of an equation, or an empty string if it is unknown.

    For a ``jit``, the line inside the call is returned if it is known. ``lines`` comes from :func:`lines_by_origin`.
    """
    line = _line_inside(eqn, i, lines) if jaxprs.is_jit(eqn) else ""
    return line or line_of(eqn) or lines.get(jaxprs.origin(eqn), "")


def _line_inside(call: JaxprEqn, i: int, lines: Mapping[int, str]) -> str:
    """Returns the line inside a call that computed the ``i``-th output of the call.

    The result is an empty string if the line is unknown, or if the output is an operand or a literal, which no equation
    inside the call computed.
    """
    (program,) = jaxprs.inner_programs(call)
    v: Any = program.outvars[i]
    eqn = next((eqn for eqn in program.eqns if v in eqn.outvars), None)
    return "" if eqn is None else line_of_output(eqn, eqn.outvars.index(v), lines)


def paths_of(arguments: Arguments, call: Traced) -> dict[int, str]:
    """Maps the position of each input of a program to its path among the arguments, such as ``raw/layer/kernel``.

    Constants of the program, which come first, and typed keys have no path.
    """
    paths = dict(enumerate(arguments.paths, start=len(call.inputs) - len(arguments.paths)))
    types = [jaxprs.type_of(v).dtype for v in call.program.invars]
    return {i: path for i, path in paths.items() if not jnp.issubdtype(types[i], jax.dtypes.prng_key)}


def common_path(origins: Iterable[int], paths: Mapping[int, str]) -> str:
    """Returns the path of a weight, which is the common prefix of the paths of the inputs that the weight depends on.

    ``origins`` holds the positions of these inputs, and ``paths`` comes from :func:`paths_of`. The path ends before a
    name that starts with ``@``: "raw/w/@lora/a" and "raw/w/@lora/b" give "raw/w". If there is no common prefix, the
    result is "of several parameters" or "closed over".
    """
    split_paths = [paths[i].split("/") for i in sorted(origins) if i in paths]
    if len({names[0] for names in split_paths}) > 1:  # Several arguments hold parts of one tree, so skip names.
        split_paths = [names[1:] for names in split_paths]
    common: list[str] = []
    for names in zip(*split_paths, strict=False):
        if len(set(names)) > 1 or names[0].startswith("@"):
            break
        common.append(names[0])
    return "/".join(common) or ("of several parameters" if split_paths else "closed over")
