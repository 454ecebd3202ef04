"""A linearized program, of whose residuals some are kept and the others made again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import Jaxpr

from reparax.memory import _jaxpr, _program
from reparax.memory._jaxpr import Env
from reparax.memory._program import Known


@dataclass(frozen=True)
class Linearized:
    """A program and its linear part.

    Each residual is an input of ``program``; or kept by ``forward``, where it comes from unknown inputs too; or made
    again by ``backward``, from known ones. ``names`` leads from an input back to the original program.

    Attributes:
      program: Gives the outputs, then the residuals, which are what the linear part needs.
      n_outs: How many outputs there are.
      inputs: The value of each input of ``program``.
      names: For each input of ``program`` that is one of the original program, its variable there.
      known: Whether each value of ``program`` can be made again.
      tree: The structure that turns residuals into the linear function.
    """

    program: Jaxpr
    n_outs: int
    inputs: Env
    names: Env
    known: Known
    tree: Any

    def forward(self) -> tuple[list[Any], list[Any]]:
        """The outputs, and the values to keep."""
        outvars = [*self.program.outvars[: self.n_outs], *self._saved]
        forward = _jaxpr.live(_jaxpr.part(self.program, self.program.eqns, outvars))
        values = _program.run(forward, _jaxpr.values(self.inputs, forward.invars))
        return values[: self.n_outs], values[self.n_outs :]

    def backward(self, env: Env, saved: Sequence[Any]) -> Callable[..., list[Any]]:
        """The linear function, from the original program's inputs that ``reads`` names, and the values kept."""
        remade = self._remade
        inputs = {v: env[self.names[v]] if v in self.names else self.inputs[v] for v in self._needed}
        held = inputs | dict(zip(self._saved, saved, strict=True))
        again = _program.run(remade, _jaxpr.values(held, remade.invars))
        held |= dict(zip(remade.outvars, again, strict=True))
        return jax.tree.unflatten(self.tree, _jaxpr.values(held, self._residuals))

    @property
    def reads(self) -> list[Any]:
        """The original program's inputs that ``backward`` needs."""
        return [self.names[v] for v in self._needed if v in self.names]

    @property
    def _residuals(self) -> list[Any]:
        return self.program.outvars[self.n_outs :]

    @cached_property
    def _remade(self) -> Jaxpr:
        """The program of all residuals that are made again."""
        again = [v for v in _jaxpr.variables(self._residuals) if self.known[v] and v not in self.inputs]
        return _program.remade(self.program, again, self.known)

    @cached_property
    def _needed(self) -> list[Any]:
        atoms = _jaxpr.variables([*self._residuals, *self._remade.invars])
        return [v for v in atoms if v in self.inputs]

    @cached_property
    def _saved(self) -> list[Any]:
        remade = self._remade
        atoms = _jaxpr.variables([*self._residuals, *remade.invars])
        return [v for v in atoms if v not in self.inputs and v not in set(remade.outvars)]


def linearized(
    program: Jaxpr, function: Callable[[Env], list[Any]], env: Env, moving: Sequence[Any], known: Known
) -> Linearized:
    """The linearization of ``function``, which runs ``program``, in the inputs ``moving``, traced but not yet run."""
    trees: list[Any] = []

    def of_inputs(*args: Any) -> tuple[list[Any], list[Any]]:
        inputs = dict(zip(program.invars, args, strict=True))

        def of_moving(*values: Any) -> tuple[list[Any], list[Any]]:
            outs = function(inputs | dict(zip(moving, values, strict=True)))
            return [out for v, out in zip(program.outvars, outs, strict=True) if _program.smooth(v)], outs

        _, linear, outs = jax.linearize(of_moving, *[inputs[v] for v in moving], has_aux=True)
        residuals, tree = _jaxpr.residuals(linear)
        trees.append(tree)
        return outs, residuals

    args = _jaxpr.values(env, program.invars)
    traced, consts = _jaxpr.opened(jax.make_jaxpr(of_inputs)(*args))
    names = dict(zip(traced.invars[len(consts) :], program.invars, strict=True))
    return Linearized(
        program=traced,
        n_outs=len(program.outvars),
        inputs=dict(zip(traced.invars, [*consts, *args], strict=True)),
        names=names,
        known=_program.known(traced, [v not in names or known[names[v]] for v in traced.invars]),
        tree=trees[-1],
    )
