"""A linear program that says by itself in which order its transpose makes what it needs.

``jax.checkpoint`` would put all that the backward pass reads behind one barrier, activations too, and make all weights
at once. Here given values alone get a barrier, and each weight is made just before it is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from reparax.memory import _jaxpr
from reparax.memory._lazily import lazily


@dataclass(frozen=True, eq=False)
class Linear:
    """A program ``(*given, *saved, *tangents) -> tangents`` that is linear in the tangents.

    Attributes:
      program: It.
      n_given: How many arguments are given: parameters and keys, from which weights are made.
      n_saved: How many are saved by the forward pass.
    """

    program: Jaxpr
    n_given: int
    n_saved: int

    def __call__(self, *args: Any) -> list[Any]:
        """The tangents."""
        return _linear.bind(*args, linear=self)

    @property
    def n_fixed(self) -> int:
        """How many arguments are no tangents."""
        return self.n_given + self.n_saved

    def evaluate(self, *args: Any) -> list[Any]:
        """The tangents, by the equations of the program."""
        return _jaxpr.evaluate(self.program, args)

    def lazily(self, program: Jaxpr, args: Sequence[Any]) -> list[Any]:
        """The outputs of a program whose first arguments are those that are given."""
        return lazily(program, args, [i < self.n_given for i in range(len(args))])


def _run(*args: Any, linear: Linear) -> list[Any]:
    return linear.lazily(linear.program, args)


def _jvp(primals: Any, tangents: Any, linear: Linear) -> tuple[list[Any], list[Any]]:
    n, pushed = linear.n_fixed, [ad.instantiate_zeros(dot) for dot in tangents[linear.n_fixed :]]
    moving = [i for i, dot in enumerate(tangents[:n]) if not isinstance(dot, ad.Zero)]
    if not moving:
        return linear(*primals), linear(*primals[:n], *pushed)

    def function(values: list[Any], dots: list[Any]) -> list[Any]:
        held = dict(zip(moving, values, strict=True))
        return linear.evaluate(*[held.get(i, x) for i, x in enumerate(primals[:n])], *dots)

    points, slopes = [primals[i] for i in moving], [tangents[i] for i in moving]
    return jax.jvp(function, (points, list(primals[n:])), (slopes, pushed))


def _transpose(cts: Any, *args: Any, linear: Linear) -> list[Any]:
    n, used = linear.n_fixed, [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]
    # Behind a barrier, nothing is known of a value that the forward pass has made of it.
    fixed = [lax.optimization_barrier(x) if i < linear.n_given else x for i, x in enumerate(args[:n])]

    def transposed(*args: Any) -> list[Any]:
        def function(*dots: Any) -> list[Any]:
            outs = linear.evaluate(*args[:n], *dots)
            return [outs[i] for i in used]

        return list(jax.linear_transpose(function, *types)(list(args[n:])))

    types, given = [x.aval for x in args[n:]], [*fixed, *(cts[i] for i in used)]
    program, consts = _jaxpr.opened(jax.make_jaxpr(transposed)(*given))
    behind = Linear(program, len(consts) + linear.n_given, linear.n_saved)
    return [None] * n + behind.lazily(_jaxpr.live(program), [*consts, *given])


def _batched(axis: Any, args: Any, dims: Any, *, linear: Linear) -> tuple[list[Any], list[int | None]]:
    # What does not depend on the batch must stay without one: JAX decides by that about the outputs of the whole.
    name = None if type(axis.name) is object else axis.name  # an axis without a name has a bare object for one
    places: list[int | None] = []

    def watched(*args: Any) -> list[Any]:
        outs = linear.evaluate(*args)
        places[:] = [0 if type(out).__name__ == "BatchTracer" else None for out in outs]
        return outs

    def mapped(function: Callable[..., list[Any]], out_axes: Any) -> Callable[..., list[Any]]:
        settings: dict[str, Any] = {"axis_name": name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
        return jax.vmap(function, in_axes=tuple(dims), out_axes=out_axes, **settings)

    jax.make_jaxpr(mapped(watched, 0))(*args)
    program, consts = _jaxpr.opened(jax.make_jaxpr(mapped(linear.evaluate, places))(*args))
    return Linear(program, len(consts) + linear.n_given, linear.n_saved)(*consts, *args), places


def _pruned(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """The equation without the outputs that nobody reads, and which inputs it still takes: others need not be kept."""
    if not any(used) and not eqn.effects:
        return [False for _ in eqn.invars], None
    linear: Linear = eqn.params["linear"]
    program, read = _jaxpr.pruned(linear.program, used)
    n_given, n_fixed = sum(read[: linear.n_given]), sum(read[: linear.n_fixed])
    invars = [v for v, flag in zip(eqn.invars, read, strict=True) if flag]
    outvars = [v for v, flag in zip(eqn.outvars, used, strict=True) if flag]
    params = {"linear": Linear(program, n_given, n_fixed - n_given)}
    return read, eqn.replace(invars=invars, outvars=outvars, params=params)


_linear = Primitive("reparax_linear")
_linear.multiple_results = True
_linear.def_impl(_run)
_linear.def_effectful_abstract_eval(lambda *args, linear: (_jaxpr.types(linear.program), linear.program.effects))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.fancy_primitive_batchers[_linear] = _batched
partial_eval.dce_rules[_linear] = lambda used, *rest: _pruned(used, rest[-1])  # since jax 0.12.0 one more between
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
