"""Reports of the weights that a loss never forms, and of noisy weights that draw for each example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from reparax.core.paths import describe
from reparax.core.reports import write_sections
from reparax.programs.call import Argnums, Arguments, check_call
from reparax.programs.dependence import facts_of_inputs
from reparax.programs.sources import common_path, describe_read, lines_by_origin, paths_of
from reparax.transforms._factored import SumPlan, SumRead, check_this_jax, plan_sums
from reparax.transforms._local import Local, NoisyRead


@dataclass(frozen=True)
class NoisyWeight:
    """One noisy weight.

    Attributes:
      path: The path of the parameter from which it is computed, or the common path of several.
      type: Its dtype and shape.
      is_own: Whether every read of it draws for each example.
      reason: How many products draw for each example, and where one draw serves all.
    """

    path: str
    type: str
    is_own: bool
    reason: str


@dataclass(frozen=True, repr=False)
class ExplainedDraws:
    """Which noisy weights draw for each example; its repr is a table.

    Attributes:
      weights: The weights with Gaussian noise.
    """

    weights: tuple[NoisyWeight, ...]

    def __repr__(self) -> str:
        n_own = sum(weight.is_own for weight in self.weights)
        head = f"{n_own} of {len(self.weights)} noisy weights draw for each example"
        rows = [(weight.is_own, (weight.path, (weight.type, weight.reason))) for weight in self.weights]
        return write_sections(head, ("for each example", "one draw for all"), rows)


def explained(reads: Sequence[NoisyRead], paths: Mapping[int, str], lines: Mapping[int, str]) -> ExplainedDraws:
    """The report of all reads of noisy weights, with the paths of arguments and the user's lines."""
    return ExplainedDraws(tuple(_noisy_weights(reads, paths, lines)))


def _noisy_weights(
    reads: Sequence[NoisyRead], paths: Mapping[int, str], lines: Mapping[int, str]
) -> Iterator[NoisyWeight]:
    """For each path, its noisy weight, and how many products draw for each row, or why not."""
    of_path: dict[str, list[NoisyRead]] = {}
    for read in reads:
        of_path.setdefault(common_path(read.origin.origins, paths), []).append(read)
    for path, all_reads in of_path.items():
        of_one_draw = [read for read in all_reads if not read.is_own]
        n = len(all_reads) - len(of_one_draw)
        reasons = [f"{n} product{'s' if n > 1 else ''}"] if n else []
        reasons += dict.fromkeys(describe_read(read.eqn, "takes one draw for all", lines) for read in of_one_draw)
        yield NoisyWeight(path, describe(all_reads[0].origin.type), not of_one_draw, "; ".join(reasons))


@dataclass(frozen=True)
class Weight:
    """One weight.

    Attributes:
      path: The path of the parameter from which it is computed, or the common path of several.
      type: Its dtype and shape.
      in_factors: Whether products multiply by its factors.
      reason: Why, and where.
    """

    path: str
    type: str
    in_factors: bool
    reason: str


@dataclass(frozen=True, repr=False)
class Explained:
    """Which weights stay in factors, and which are formed; its repr is a table.

    Attributes:
      weights: The weights that have factors.
    """

    weights: tuple[Weight, ...]

    def __repr__(self) -> str:
        apart = sum(weight.in_factors for weight in self.weights)
        head = f"{apart} of {len(self.weights)} weights with factors are never formed for a product"
        rows = [(weight.in_factors, (weight.path, (weight.type, weight.reason))) for weight in self.weights]
        return write_sections(head, ("in factors", "formed"), rows)


def explain(fun: Callable[..., Any], *args: Any, argnums: Argnums = None, **kwargs: Any) -> Any:
    """Which weights :func:`factored` keeps in factors in ``fun(*args, **kwargs)``, and where and why it forms others.

    For ``rpx.transforms.local(loss)`` it says which noisy weights draw for each example, and where and why one draw is
    for all.

    It traces ``fun`` and computes nothing. Weights without factors, such as plain arrays, are not listed.

    Args:
      fun: The loss, as you pass it to :func:`factored`; or the result of :func:`local`, also under ``jax.jit``.
      args: Its arguments, or their shapes and dtypes.
      argnums: As for :func:`factored`; the result of :func:`local` has its own.
      kwargs: Its keyword arguments.

    Raises:
      TypeError: If ``fun`` is not a function, and as :func:`factored`.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.LoRA(2)
      >>> raw = p.init({"up": jnp.ones((64, 64)), "down": jnp.ones((64, 64))}, jax.random.key(0))
      >>> def loss(raw, x):
      ...     w = p.apply(raw)
      ...     return jnp.mean((x @ w["up"]) ** 2) + jnp.mean(jnp.abs(w["down"]))
      >>> rpx.explain(loss, raw, jnp.ones((256, 64)))  # doctest: +ELLIPSIS
      1 of 2 weights with factors are never formed for a product
        in factors:
          raw/up  float32[64, 64]  1 product, 0.78 of the operations
        formed:
          raw/down  float32[64, 64]  abs needs the array: ...:3:51 (loss)
    """
    candidates: list[Any] = [fun, getattr(fun, "__wrapped__", None)]  # the second is what `jax.jit` wraps
    for function in candidates:
        if isinstance(function, Local):
            return explained(*function.noisy_reads(args, kwargs))
    check_this_jax()
    arguments = Arguments.of(check_call("explain", fun, argnums), fun, argnums, args, kwargs)
    call = arguments.trace()
    plan = plan_sums(call.program, call.inputs, facts_of_inputs(call.program, call.is_chosen))
    return Explained(tuple(_explain_weights(plan, paths_of(arguments, call), lines_by_origin(call.program))))


def _explain_weights(plan: SumPlan, paths: Mapping[int, str], lines: Mapping[int, str]) -> Iterator[Weight]:
    """Each weight with factors that the network reads, not only other formulas, with the reason."""
    for root, record in plan.records.items():
        reads = [read for read in record.reads if not read.in_formula]
        if reads:
            type = describe(jax.ShapeDtypeStruct(record.shape, record.dtype))
            reason = _reason_text(plan.costs(root), reads, lines, in_factors=not record.is_formed)
            yield Weight(common_path(record.origins, paths), type, not record.is_formed, reason)


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
        counted = f"{len(products)} product{'s' if len(products) > 1 else ''}"
        reasons = {f"{counted}, {'' if in_factors else 'in factors, '}{ratio:.2f} of the operations": None} | reasons
    return "; ".join(reasons)
