"""A linear function that says by itself in which order its transpose makes what it needs.

``jax.checkpoint`` would put all that the backward pass reads behind one barrier, activations too, and make all weights
at once. Here given values alone get a barrier, and each weight is made just before it is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from reparax.memory import _jaxpr
from reparax.memory._lazily import lazily


@dataclass(frozen=True, eq=False)
class Linear:
    """A function ``(*given, *saved, *tangents) -> tangents`` that is linear in the tangents.

    Attributes:
      function: It.
      n_given: How many arguments are given: parameters and keys, from which weights are made.
      n_saved: How many are saved by the forward pass.
    """

    function: Callable[..., list[Any]]
    n_given: int
    n_saved: int

    def __call__(self, fixed: Sequence[Any], dots: Sequence[Any], types: Sequence[Any]) -> list[Any]:
        """The tangents of these types."""
        return _linear.bind(*fixed, *dots, linear=self, types=tuple(types))

    def parts(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Of all arguments those that are fixed, and the tangents."""
        n = self.n_given + self.n_saved
        return list(args[:n]), list(args[n:])

    def lazily(self, function: Callable[..., list[Any]], *args: Any) -> list[Any]:
        """``function(*args)``, whose first arguments are those that are given."""
        program, consts = _jaxpr.opened(jax.make_jaxpr(function)(*args))
        n = len(consts) + self.n_given
        program = _jaxpr.live(program)
        return lazily(program, [*consts, *args], [i < n for i in range(len(program.invars))])


def _run(*args: Any, linear: Linear, types: Any) -> list[Any]:
    del types
    return linear.lazily(linear.function, *args)


def _jvp(primals: Any, tangents: Any, linear: Linear, types: Any) -> tuple[list[Any], list[Any]]:
    fixed, dots = linear.parts(primals)
    changes, dots_changes = linear.parts(tangents)
    moving = [i for i, change in enumerate(changes) if not isinstance(change, ad.Zero)]
    pushed = list(map(ad.instantiate_zeros, dots_changes))
    if not moving:
        return linear(fixed, dots, types), linear(fixed, pushed, types)

    def function(values: list[Any], dots: list[Any]) -> list[Any]:
        held = dict(zip(moving, values, strict=True))
        return linear.function(*[held.get(i, x) for i, x in enumerate(fixed)], *dots)

    return jax.jvp(function, ([fixed[i] for i in moving], dots), ([changes[i] for i in moving], pushed))


def _transpose(cts: Any, *args: Any, linear: Linear, types: Any) -> list[Any]:
    del types
    fixed, dots = linear.parts(args)
    used = [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]
    # Behind a barrier, nothing is known of a value that the forward pass has made of it.
    again = [lax.optimization_barrier(x) if i < linear.n_given else x for i, x in enumerate(fixed)]

    def transposed(*args: Any) -> list[Any]:
        held, given = linear.parts(args)

        def function(*dots: Any) -> list[Any]:
            outs = linear.function(*held, *dots)
            return [outs[i] for i in used]

        return list(jax.linear_transpose(function, *[x.aval for x in dots])(given))

    return [None] * len(fixed) + linear.lazily(transposed, *again, *[cts[i] for i in used])


def _batched(axis: Any, args: Any, dims: Any, *, linear: Linear, types: Any) -> tuple[list[Any], list[int | None]]:
    # What does not depend on the batch must stay without one: JAX decides by that about the outputs of the whole.
    name = None if type(axis.name) is object else axis.name  # an axis without a name has a bare object for one
    flags: list[bool] = []

    def watched(*args: Any) -> list[Any]:
        outs = linear.function(*args)
        flags[:] = [type(out).__name__ == "BatchTracer" for out in outs]
        return outs

    def mapped(function: Callable[..., list[Any]], places: Any) -> Callable[..., list[Any]]:
        settings: dict[str, Any] = {"axis_name": name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
        return jax.vmap(function, in_axes=tuple(dims), out_axes=places, **settings)

    jax.make_jaxpr(mapped(watched, 0))(*args)
    places = [0 if flag else None for flag in flags]
    function = mapped(linear.function, places)
    batched = Linear(lambda *args: function(*args), linear.n_given, linear.n_saved)
    types = _jaxpr.types(jax.make_jaxpr(batched.function)(*args))
    fixed, dots = linear.parts(args)
    return batched(fixed, dots, types), places


def _pruned(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """The equation without the outputs that nobody reads, and which inputs it still takes: others need not be kept."""
    if not any(used):
        return [False for _ in eqn.invars], None
    linear: Linear = eqn.params["linear"]
    wanted = [i for i, flag in enumerate(used) if flag]

    def some(*args: Any) -> list[Any]:
        outs = linear.function(*args)
        return [outs[i] for i in wanted]

    program, consts = _jaxpr.opened(jax.make_jaxpr(some)(*[v.aval for v in eqn.invars]))
    keys = [jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.invars]
    read = [flag or key for flag, key in zip(_jaxpr.read(program)[len(consts) :], keys, strict=True)]
    kept = [i for i, flag in enumerate(read) if flag]
    types = [v.aval for v in eqn.invars]

    def function(*args: Any) -> list[Any]:
        held = dict(zip(kept, args, strict=True))  # what is not read may be any number
        return some(*[held[i] if i in held else jnp.zeros(each.shape, each.dtype) for i, each in enumerate(types)])

    n_given = sum(i < linear.n_given for i in kept)
    n_fixed = sum(i < linear.n_given + linear.n_saved for i in kept)
    pruned = Linear(function, n_given, n_fixed - n_given)
    params = {"linear": pruned, "types": tuple(eqn.params["types"][i] for i in wanted)}
    outvars = [v for v, flag in zip(eqn.outvars, used, strict=True) if flag]
    return read, eqn.replace(invars=[eqn.invars[i] for i in kept], outvars=outvars, params=params)


_linear = Primitive("reparax_linear")
_linear.multiple_results = True
_linear.def_impl(_run)
_linear.def_abstract_eval(lambda *args, linear, types: types)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.fancy_primitive_batchers[_linear] = _batched
partial_eval.dce_rules[_linear] = lambda used, *rest: _pruned(used, rest[-1])  # since jax 0.12.0 one more between
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
