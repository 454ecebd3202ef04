"""Where the values of a program come from, for reports: source lines of equations, and paths of parameters."""

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

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_CELL = re.compile(r"\S*ipykernel_\d+/\d+\.py")


def lines_by_origin(program: Jaxpr, outside: str = "") -> dict[int, str]:
    """The user's source line of each equation of a program and of those inside it, by ``jaxprs.origin``.

    An equation without one has the line of the equation around it, because inside of that, JAX cuts tracebacks off.
    """
    line_of_origin: dict[int, str] = {}
    for eqn in program.eqns:
        line = line_of(eqn) or outside
        line_of_origin[jaxprs.origin(eqn)] = line
        for inner_program in jaxprs.inner_programs(eqn):
            line_of_origin |= lines_by_origin(inner_program, line)
    return line_of_origin


def line_of(eqn: JaxprEqn) -> str:
    """The innermost source line of an equation outside reparax, or an empty text; in a notebook, that of its cell."""
    line = next((line for line in jaxprs.lines(eqn) if not line.startswith(_PACKAGE)), "")
    return _CELL.sub("<cell>", line)


def describe_read(eqn: JaxprEqn | None, does: str, lines: Mapping[int, str]) -> str:
    """The words of a report for a read of a weight, such as "tanh needs the array", and its line; None is an output."""
    if eqn is None:
        return "it is returned, or carried"
    line, view = line_of_output(eqn, 0, lines), view_of(eqn)
    prefix = "a grouped " if isinstance(view, Conv) and view.feature_group_count > 1 else ""
    return f"{prefix}{eqn.primitive.name} {does}" + (f": {line}" if line else "")


def line_of_output(eqn: JaxprEqn, i: int, lines: Mapping[int, str]) -> str:
    """The line that computed the ``i``-th output of an equation; for a ``jit``, the line inside it, if known."""
    line = _line_inside(eqn, i, lines) if jaxprs.is_jit(eqn) else ""
    return line or line_of(eqn) or lines.get(jaxprs.origin(eqn), "")


def _line_inside(call: JaxprEqn, i: int, lines: Mapping[int, str]) -> str:
    """The line inside a call that computed its ``i``-th output; an empty text if it is not known."""
    (program,) = jaxprs.inner_programs(call)
    v: Any = program.outvars[i]
    eqn = next((eqn for eqn in program.eqns if v in eqn.outvars), None)
    return "" if eqn is None else line_of_output(eqn, eqn.outvars.index(v), lines)


def paths_of(arguments: Arguments, call: Traced) -> dict[int, str]:
    """The path of each input of a program that is an argument other than a key, by the position of the input."""
    paths = dict(enumerate(arguments.paths, start=len(call.inputs) - len(arguments.paths)))
    types = [jaxprs.type_of(v).dtype for v in call.program.invars]
    return {i: path for i, path in paths.items() if not jnp.issubdtype(types[i], jax.dtypes.prng_key)}


def common_path(origins: Iterable[int], paths: Mapping[int, str]) -> str:
    """The common beginning of the paths of a weight's arguments, before any values of stages, such as ``@lora``."""
    split_paths = [paths[i].split("/") for i in sorted(origins) if i in paths]
    if len({names[0] for names in split_paths}) > 1:  # several arguments hold parts of one tree
        split_paths = [names[1:] for names in split_paths]
    common: list[str] = []
    for names in zip(*split_paths, strict=False):
        if len(set(names)) > 1 or names[0].startswith("@"):
            break
        common.append(names[0])
    return "/".join(common) or ("of several parameters" if split_paths else "closed over")
