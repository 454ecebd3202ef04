"""Sums that a stage declares in ``terms_leaf``."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from reparax.numerics.terms import specs_of
from reparax.programs import jaxprs
from reparax.programs.equations.bodies import Jit
from reparax.programs.equations.kinds import view_of
from reparax.programs.weights.circles import Circle
from reparax.programs.weights.dtypes import cast_factor, holds_factors
from reparax.programs.weights.facts import Facts, facts_in
from reparax.programs.weights.sums import Factor, Label, Product, Sum


def declares(eqn: JaxprEqn) -> bool:
    """Whether an equation declares the terms of its first output; the other outputs are the arrays of the terms."""
    view = view_of(eqn)
    return isinstance(view, Jit) and specs_of(view.name) is not None


def recorded_sum(reader: Any, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Sum | None:
    """The sum; None if a derivative added outputs, or several nested batches, which cannot be told apart."""
    specs = specs_of(Jit(eqn).name) or []
    n_arrays = sum(len(spec.letters) for spec in specs)
    if len(eqn.outvars) != n_arrays + 2 or not _is_sentinel(eqn.outvars[-1]):
        return None
    jaxpr, consts = jaxprs.body(eqn)
    program, is_read = jaxprs.keep_used(jaxpr, [False, *(True for _ in range(n_arrays)), False])
    inputs = [
        (x, input_facts)
        for x, input_facts, flag in zip([*consts, *args], facts_in(consts, facts), is_read, strict=True)
        if flag
    ]
    outs, input_facts = reader.inside(eqn).run(program, [x for x, _ in inputs], [fact for _, fact in inputs])
    output = jaxprs.type_of(eqn.outvars[0])
    if not holds_factors(output.dtype, list(map(jaxprs.type_of, eqn.outvars[1:-1]))):
        return None
    factor_arrays = iter([(reader.array(x, eqn), fact.still) for x, fact in zip(outs, input_facts, strict=True)])
    products: list[Product] = []
    for spec in specs:
        batch = tuple(map(Label, output.shape[: output.ndim - len(spec.axes)]))
        label_of: dict[str, Label] = {}
        factors: list[Factor] = []
        for letters, circle in zip(spec.letters, spec.circles, strict=True):
            array, still = next(factor_arrays)
            array = cast_factor(array, output.dtype)
            array = Circle(array) if circle else array
            n = len(array.shape) - len(letters)
            if n not in (0, len(batch)):
                return None
            sizes = zip(letters, array.shape[n:], strict=True)
            labels = [label_of.setdefault(letter, Label(size)) for letter, size in sizes]
            factors.append(Factor(array, (*(batch if n else ()), *labels), still))
        groups = [*((label,) for label in batch), *(tuple(label_of[letter] for letter in axis) for axis in spec.axes)]
        products.append(Product(tuple(factors), tuple(tuple(x for x in group if x.size != 1) for group in groups)))
    return Sum(tuple(products), output.shape, output.dtype, "highest", None)


def _is_sentinel(v: Any) -> bool:
    """Whether it is the output that no derivative has."""
    output = jaxprs.type_of(v)
    return output.shape == () and jnp.issubdtype(output.dtype, jnp.integer)
