"""Adapters that start at the rounding error of their base: LoftQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from reparax._core.algebra import Parametrization, compose
from reparax._numerics.arguments import check_positive_whole
from reparax._numerics.arithmetic import is_inexact, widened
from reparax._tree.flat import Flat, flatten, nest
from reparax._tree.paths import Names, PyTree, dtype_of, is_array, path_text
from reparax._tree.raw import marker, parameter_path
from reparax.adapters._lora import LoRA
from reparax.adapters._starts import STARTS

FACTORS = [("@lora", "a"), ("@lora", "b")]


def loftq(
    p: Parametrization, params: PyTree, key: jax.Array | None = None, *, steps: int = 1, seen: PyTree = None
) -> PyTree:
    r"""The raw tree of ``params`` with adapters that start at the rounding error of their base: LoftQ.

    ``p.init`` starts at the rounded model; this starts nearer to ``params``. In each step, the base becomes the stored
    form of :math:`W - c A B`, such as its nearest numbers in four bits, and :math:`c A B` the best approximation of
    that rank to the difference between W and the base, by the largest singular values, split evenly. Before the first
    step, :math:`c A B` is zero.

    Args:
      p: A chain that ends with :class:`LoRA`, or with several for different arrays, such as ``Freeze() >>
        Stored("nf4", block=64) >> LoRA(8)``. The rank is at most the smaller side of the matrix.
      params: The model's parameters.
      key: As for ``init``; it matters only for other stages, as the start of the factors is replaced.
      steps: How often both are found in turn; 1 in PEFT.
      seen: As for ``init``, if the base is rounded by data, as in ``Stored("int4", block=64, fit="gptq")``.

    Returns:
      A raw tree of ``p``, as ``p.init(params, key)`` returns it.

    Raises:
      ValueError: If the chain does not end with ``LoRA``, an earlier stage acts on its factors, or two act on an array.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> params = {"w": jax.random.normal(jax.random.key(0), (16, 8))}
      >>> p = rpx.Freeze() >> rpx.Stored("int2", block=8) >> rpx.LoRA(2)
      >>> raw = rpx.adapters.loftq(p, params, steps=5)
      >>> rounded = p.fold(p.init(params, jax.random.key(0)))
      >>> error = jnp.linalg.norm(p.fold(raw)["w"] - params["w"])
      >>> bool(error < 0.8 * jnp.linalg.norm(rounded["w"] - params["w"]))
      True

    References:
      Li, Yu, Liang, He, Karampatziakis, Chen and Zhao, *LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language
      Models*, 2024.
    """
    steps = check_positive_whole(steps, "loftq", "steps")
    adapters = _adapter_stages(p)
    key = jax.random.key(0) if key is None else key
    principal = compose(tuple(replace(stage, start="pissa") for stage in adapters))
    weights = flatten(params)

    def step(target: Flat) -> tuple[Flat, Flat]:
        """What the chain makes of the target, and what is left of the weights, as factors."""
        raw = flatten(p.init(nest(target), key, seen=seen))
        return raw, flatten(principal.init(nest(_subtract(weights, _without_factors(p, raw)))))

    raw, parts = step(weights)
    if twice := [place for place in parts.arrays if marker("lora", 2) in place]:
        raise ValueError(
            f"loftq takes one LoRA for each array, but two act on {parameter_path(twice[0])!r}. Narrow them with "
            f"`where`."
        )
    for _ in range(steps - 1):
        less = _subtract(weights, _factor_products(principal, parts))
        raw, parts = step(_cast_like(less.arrays, weights))
    factors = {place: x for place, x in parts.arrays.items() if place[-2:] in FACTORS}
    if lost := [place for place in factors if place not in raw.arrays]:
        raise ValueError(
            f"loftq found no factor at {path_text(lost[0])!r} in the raw tree of {p!r}, as another stage computes it. "
            f"End the chain with LoRA, and let only earlier stages that store or freeze act on it."
        )
    return nest(_cast_like(factors, raw))


def _factor_products(principal: Parametrization, parts: Flat) -> Mapping[Names, Any]:
    """The products of factors."""
    zeros = {place: x if place[-2:] in FACTORS else jnp.zeros_like(x) for place, x in parts.arrays.items()}
    products = flatten(principal.fold(nest(replace(parts, arrays=zeros)))).arrays
    return {root: products[root] for root in {parts.root(place) for place in zeros if place[-2:] in FACTORS}}


def _adapter_stages(p: Parametrization) -> list[LoRA]:
    """The stages whose factors are found."""
    adapters = [stage for stage in p if isinstance(stage, LoRA)]
    if not adapters or not isinstance(tuple(p)[-1], LoRA):
        raise ValueError(
            f"loftq takes a chain that ends with LoRA, such as `Freeze() >> Stored('nf4', block=64) >> LoRA(8)`, but "
            f"got {p!r}."
        )
    if moving := [stage for stage in adapters if STARTS[stage.start].moves]:
        raise ValueError(
            f"loftq got {moving[0]!r}, whose start moves a part of the weights into the factors as well. Leave start "
            f"out."
        )
    return adapters


def _without_factors(p: Parametrization, raw: Flat) -> Mapping[Names, Any]:
    """The effective arrays, where no adapter adds anything."""
    zeros = {place: jnp.zeros_like(x) for place, x in raw.arrays.items() if place[-2:] == FACTORS[1]}
    return flatten(p.fold(nest(replace(raw, arrays={**raw.arrays, **zeros})))).arrays


def _subtract(tree: Flat, subtrahends: Mapping[Names, Any]) -> Flat:
    """The tree with these arrays taken away from its own, in float32 where that is more."""
    less = {
        at: widened(tree.arrays[at]) - widened(x) for at, x in subtrahends.items() if _is_inexact_array(tree.arrays[at])
    }
    return replace(tree, arrays={**tree.arrays, **less})


def _is_inexact_array(x: Any) -> bool:
    """Whether a leaf is an array of floating or complex numbers."""
    return is_array(x) and is_inexact(x)


def _cast_like(new: Mapping[Names, Any], tree: Flat) -> Flat:
    """The tree with new arrays of its own dtypes."""
    new_arrays = {
        at: new[at].astype(dtype_of(x)) if at in new and _is_inexact_array(x) else x for at, x in tree.arrays.items()
    }
    return replace(tree, arrays=new_arrays)
