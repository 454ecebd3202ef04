"""The way of ``local``: weights start where normal numbers are drawn, and products with data draw for each row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from reparax.core import random
from reparax.core.keys import key_of_use
from reparax.programs import jaxprs
from reparax.programs.equations.bodies import Jit
from reparax.programs.equations.elementwise import ConvertType, Select
from reparax.programs.equations.kinds import kind_of, view_of
from reparax.programs.weights import bodies, makers
from reparax.programs.weights.dtypes import narrows
from reparax.programs.weights.facts import Facts
from reparax.programs.weights.reader import Outs, Reader
from reparax.programs.weights.sums import Product, Sum
from reparax.transforms.draws._noisy import Noisy, array_of, mean_and_noise


@dataclass(frozen=True)
class NoiseOrigin:
    """What made a weight: the arguments on which it depends, and its type before it was moved."""

    origins: frozenset[int]
    type: Any


@dataclass(frozen=True)
class NoisyRead:
    """One read of a noisy weight.

    Attributes:
      eqn: The equation that reads; None for the result of a program or of a body.
      origin: What made the weight.
      is_own: Whether each row of the result has a draw of its own.
    """

    eqn: JaxprEqn | None
    origin: NoiseOrigin
    is_own: bool


A_DRAW = -1
"""Stands among the arguments on which a value depends, if it depends on a draw."""


class Drawing:
    """Follows noisy weights.

    Attributes:
      reads: What reads them.
      state: How many products have drawn so far. So each step of a loop draws anew.
    """

    def __init__(self) -> None:
        self.reads, self.state = list[NoisyRead](), list[Any]([jnp.uint32(0)])

    def may_start(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        return is_draw(eqn) or (bodies.rule(eqn) is not None and _holds_draw(eqn))

    def take_instead(
        self,
        reader: Reader,
        eqn: JaxprEqn,
        args: Sequence[Any],
        facts: Sequence[Facts],
        out_facts: Facts,
        *,
        only_first_read: bool,
    ) -> Outs | None:
        view = view_of(eqn)
        if isinstance(view, ConvertType) and isinstance(args[0], Sum) and narrows(args[0].dtype, view.new_dtype):
            # The factors stay as they are, because the whole is rounded, and not each of them.
            return [replace(args[0], dtype=view.new_dtype)], [out_facts]
        if not is_draw(eqn):
            return None
        out_facts = replace(out_facts, origins=out_facts.origins | {A_DRAW})
        (array,) = view.bind(*args)
        product = Product.of(array, still=True)
        (factor,) = product.factors
        product = replace(product, factors=(replace(factor, draw=object(), key=args[0]),))
        return [Sum((product,), array.shape, array.dtype, None, _noise_origin(eqn, out_facts))], [out_facts]

    def start(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Outs | None:
        array_facts = _facts_of_arrays(args, facts)
        # What depends on a draw, such as the norm of a noisy weight, is no constant beside the draw.
        if len(array_facts) == len(args) or not out_facts.known or any(A_DRAW in fact.origins for fact in array_facts):
            return None
        noisy_sum = makers.select_sum(args) if kind_of(eqn) is Select else makers.make_sum(eqn, args, facts)
        return None if noisy_sum is None else ([replace(noisy_sum, root=_noise_origin(eqn, out_facts))], [out_facts])

    def multiply(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Any:
        array_facts = _facts_of_arrays(args, facts)
        if len(array_facts) != len(args) - 1 or all(fact.known for fact in array_facts):
            return None
        (i,) = (i for i, x in enumerate(args) if isinstance(x, Sum))
        weight = Noisy.of(args[i])
        mean_with_noise = weight and mean_and_noise(eqn, args, i, weight)
        if weight is None or mean_with_noise is None:
            return None
        (number,), (mean, noise) = self.state, mean_with_noise
        result = noise(key_of_use(weight.key, number, sorted(out_facts.differs)), mean)
        if not jaxprs.tells_shards(jax.typeof(result)):
            return None
        self.state = [number + jnp.uint32(1)]
        self.reads.append(NoisyRead(eqn, args[i].root, is_own=True))
        return result.astype(jaxprs.type_of(eqn.outvars[0]).dtype)

    def form(self, reader: Reader, x: Sum, eqn: JaxprEqn | None) -> Any:
        self.reads.append(NoisyRead(eqn, x.root, is_own=False))
        return array_of(x)


def is_draw(eqn: JaxprEqn) -> bool:
    """Whether the output of an equation is an array of independent normal numbers."""
    view = view_of(eqn)
    has_name = isinstance(view, Jit) and view.name == random.DRAW
    return has_name and jnp.issubdtype(jaxprs.type_of(eqn.outvars[0]).dtype, jnp.floating)


def _facts_of_arrays(args: Sequence[Any], facts: Sequence[Facts]) -> list[Facts]:
    """The facts of the operands that are arrays."""
    return [fact for x, fact in zip(args, facts, strict=True) if not isinstance(x, Sum)]


def _holds_draw(eqn: JaxprEqn) -> bool:
    """Whether a body of an equation draws."""
    return any(is_draw(inner_eqn) or _holds_draw(inner_eqn) for jaxpr in jaxprs.inner(eqn) for inner_eqn in jaxpr.eqns)


def _noise_origin(eqn: JaxprEqn, facts: Facts) -> NoiseOrigin:
    """What a sum that an equation makes knows of its draw."""
    output = jaxprs.type_of(eqn.outvars[0])
    return NoiseOrigin(facts.origins, jax.ShapeDtypeStruct(output.shape, output.dtype))
