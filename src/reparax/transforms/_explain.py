"""Reports: which weights a loss never forms, and which noisy weights draw for each example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from reparax.core.paths import describe
from reparax.core.reports import write_sections
from reparax.programs.call import REPORTED, Argnums, check_call
from reparax.programs.sources import common_path, describe_read
from reparax.transforms._factored import SumPlan, SumRead, planned
from reparax.transforms._local import NoisyRead


@dataclass(frozen=True)
class Weight:
    """One weight.

    Attributes:
      path: The path of the parameter from which it is computed, or the common path of several.
      type: Its dtype and shape.
      is_transformed: Whether all products with it are: they multiply by its factors, or draw for each example.
      reason: Why, and where.
    """

    path: str
    type: str
    is_transformed: bool
    reason: str


@dataclass(frozen=True, repr=False)
class Explained:
    """What a transform does to each weight; its repr is a table.

    Attributes:
      weights: The weights that have factors, or those with Gaussian noise.
      head: What happens to transformed weights, after their number.
      titles: What is said of transformed weights, and of others.
    """

    weights: tuple[Weight, ...]
    head: str
    titles: tuple[str, str]

    def __repr__(self) -> str:
        n = sum(weight.is_transformed for weight in self.weights)
        rows = [(weight.is_transformed, (weight.path, (weight.type, weight.reason))) for weight in self.weights]
        return write_sections(self.head.format(f"{n} of {len(self.weights)}"), self.titles, rows)


def explain(fun: Callable[..., Any], *args: Any, argnums: Argnums = None, **kwargs: Any) -> Explained:
    """Which weights :func:`factored` keeps in factors in ``fun(*args, **kwargs)``, and where and why it forms others.

    For ``rpx.transforms.local_reparametrization(loss)`` it says which noisy weights draw for each example, and where
    and why one draw is for all.

    It traces ``fun`` and computes nothing. Weights without factors, such as plain arrays, are not listed.

    Args:
      fun: The result of :func:`factored` or :func:`local_reparametrization`, also under ``jax.jit``; or a loss, of
        which the report says what :func:`factored` would do.
      args: Its arguments, or their shapes and dtypes.
      argnums: For a loss, as for :func:`factored`.
      kwargs: Its keyword arguments.

    Returns:
      A report, which prints as a table. Its ``weights`` each have a ``path``; a ``type``, with the shape; whether
      products with it are transformed, ``is_transformed``; and the ``reason``.

    Raises:
      TypeError: If ``fun`` is not a function, and as :func:`factored`.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.LoRA(2, columns=-1)
      >>> raw = p.init({"up": jnp.ones((64, 64)), "down": jnp.ones((64, 64))}, jax.random.key(0))
      >>> def loss(raw, x):
      ...     w = p.apply(raw)
      ...     return jnp.mean((x @ w["up"]) ** 2) + jnp.mean(jnp.abs(w["down"]))
      >>> rpx.explain(rpx.factored(loss), raw, jnp.ones((256, 64)))  # doctest: +ELLIPSIS
      1 of 2 weights with factors are never formed for a product
        in factors:
          raw/up  float32[64, 64]  1 product, 0.78 of the operations
        formed:
          raw/down  float32[64, 64]  abs needs the array: ...:3:51 (loss)
    """
    candidates = [fun, getattr(fun, "__wrapped__", None)]  # the second is what `jax.jit` wraps
    of_transform = [getattr(function, REPORTED) for function in candidates if hasattr(function, REPORTED)]
    if of_transform:
        reported = of_transform[0]
    else:
        reported = partial(planned, check_call("explain", fun, argnums, follows_weights=True), fun, argnums)
    found, *names = reported(args, kwargs)
    if isinstance(found, SumPlan):
        who = "" if of_transform else "with rpx.factored, "
        head, titles = who + "{} weights with factors are never formed for a product", ("in factors", "formed")
        return Explained(tuple(_weights_with_factors(found, *names)), head, titles)
    head, titles = "{} noisy weights draw for each example", ("for each example", "one draw for all")
    return Explained(tuple(_noisy_weights(found, *names)), head, titles)


def _noisy_weights(reads: Sequence[NoisyRead], paths: Mapping[int, str], lines: Mapping[int, str]) -> Iterator[Weight]:
    """For each path, its noisy weight: how many products draw for each row, and what takes one draw for all rows."""
    reads_by_path: dict[str, list[NoisyRead]] = {}
    for read in reads:
        reads_by_path.setdefault(common_path(read.origin.origins, paths), []).append(read)
    for path, reads_of_weight in reads_by_path.items():
        shared = [read for read in reads_of_weight if not read.draws_per_row]
        notes = [_count(n, "product")] if (n := len(reads_of_weight) - len(shared)) else []
        notes += dict.fromkeys(describe_read(read.eqn, "takes one draw for all", lines) for read in shared)
        type = describe(reads_of_weight[0].origin.type)
        yield Weight(path, type, is_transformed=not shared, reason="; ".join(notes))


def _count(n: int, noun: str) -> str:
    """A number with its noun, as "2 products"."""
    return f"{n} {noun}{'s' if n > 1 else ''}"


def _weights_with_factors(plan: SumPlan, paths: Mapping[int, str], lines: Mapping[int, str]) -> Iterator[Weight]:
    """Each weight with factors that the network reads, not only other formulas, with the reason."""
    for root, record in plan.records.items():
        reads = [read for read in record.reads if not read.in_formula]
        if reads:
            type = describe(jax.ShapeDtypeStruct(record.shape, record.dtype))
            reason = _reason_text(plan.costs(root), reads, lines, in_factors=not record.is_formed)
            path = common_path(record.origins, paths)
            yield Weight(path, type, is_transformed=not record.is_formed, reason=reason)


def _reason_text(
    costs: tuple[float, float], reads: Sequence[SumRead], lines: Mapping[int, str], *, in_factors: bool
) -> str:
    """Why a weight stays in factors or is formed: the share of the operations, and what needs the array."""
    products = [read for read in reads if read.cost_in_factors is not None]
    reasons = dict.fromkeys(
        describe_read(read.eqn, "needs the array", lines) for read in reads if read.cost_in_factors is None
    )
    if products:
        factored, formed = costs
        ratio = factored / formed if formed else 1.0
        counted = _count(len(products), "product")
        reasons = {f"{counted}, {'' if in_factors else 'in factors, '}{ratio:.2f} of the operations": None} | reasons
    return "; ".join(reasons)
