"""Which equations of a program read the same array, however it was moved, and which inputs the scans around them slice.

Values have a name each: what is moved, reshaped or cast keeps its name, and all else gets a new one.
"""

from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax._programs import jaxprs
from reparax._programs.equations.bodies import Scan
from reparax._programs.equations.elementwise import ConvertType, Copy, ReducePrecision, StopGradient
from reparax._programs.equations.kinds import kind_of
from reparax._programs.equations.moves import Broadcast, Named, Reshape, Squeeze, Transpose, Vary
from reparax._programs.equations.view import View

Path = tuple[int, ...]
"""The equations whose bodies hold an equation, and that equation."""

_MOVES: set[type[View]] = {
    *(Transpose, Reshape, Squeeze, Broadcast),
    *(ConvertType, ReducePrecision, StopGradient, Copy, Named, Vary),
}


class Alike:
    """The names of the values that the equations of a program read.

    Attributes:
      read: For each equation the names of its operands; inputs of the program are named by their number.
      sliced: For each scan, the names of what its steps take slices of, and whether the last is taken first.
    """

    def __init__(self, program: Jaxpr) -> None:
        self.read: dict[Path, Sequence[Hashable]] = {}
        self.sliced: dict[int, tuple[frozenset[Hashable], bool]] = {}
        self._new = count(len(program.invars))
        self._name_outputs(program, range(len(program.invars)), ())

    def _name_outputs(self, jaxpr: Jaxpr, inputs: Sequence[Hashable], path: Path) -> list[Hashable]:
        """The names of a program's outputs, from those of its inputs; writes into ``read`` and ``sliced``."""
        env: dict[Any, Hashable] = dict(zip(jaxpr.invars, inputs, strict=True))

        def name(v: Any) -> Hashable:
            return next(self._new) if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            operand_names = [name(v) for v in eqn.invars]
            self.read[*path, id(eqn)] = operand_names
            env.update(zip(eqn.outvars, self._name_outputs_of(eqn, operand_names, (*path, id(eqn))), strict=True))
        return [name(v) for v in jaxpr.outvars]

    def _name_outputs_of(self, eqn: JaxprEqn, operand_names: list[Hashable], path: Path) -> Sequence[Hashable]:
        """The names of what an equation returns, from those of its operands; programs inside it are followed."""
        if kind_of(eqn) in _MOVES:
            return operand_names[:1]
        if jaxprs.is_cond(eqn):
            for place, (jaxpr, consts) in enumerate(jaxprs.bodies(eqn)):
                self._name_outputs(jaxpr, [*self._new_names(consts), *operand_names[1:]], (*path, place))
        elif jaxprs.is_scan(eqn):
            n_consts, n_carry = jaxprs.scan_counts(eqn)
            jaxpr, consts = jaxprs.body(eqn)
            self.sliced[id(eqn)] = frozenset(operand_names[n_consts + n_carry :]), Scan(eqn).reverse
            self._name_outputs(
                jaxpr,
                [*self._new_names(consts), *operand_names[:n_consts], *self._new_names(operand_names[n_consts:])],
                path,
            )
        elif jaxprs.is_call(eqn):
            jaxpr, consts = jaxprs.body(eqn)
            return self._name_outputs(jaxpr, [*self._new_names(consts), *operand_names], path)
        return self._new_names(eqn.outvars)

    def _new_names(self, values: Sequence[Any]) -> list[Hashable]:
        """As many new names."""
        return [next(self._new) for _ in values]
