"""Defines ``explain``, which reports what ``factored`` or ``local_reparametrization`` does with each weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reparax.programs.call import REPORTED, Argnums, check_call, given_options
from reparax.transforms._explained import Explained
from reparax.transforms._factored import explain_sums


def explain(fun: Callable[..., Any], /, *args: Any, argnums: Argnums = None, **kwargs: Any) -> Explained:
    """Reports for which weights of ``fun(*args, **kwargs)`` :func:`factored` uses factors, and why it forms others.

    For ``rpx.transforms.local_reparametrization(loss)``, the report says which noisy weights are drawn separately for
    each row of data, and for how many rows. For the other noisy weights, it says where and why all rows share a single
    draw.

    ``explain`` traces ``fun`` and computes no arrays. Weights without factors, such as plain arrays, are not listed.

    Args:
      fun: The result of :func:`factored` or :func:`local_reparametrization`, possibly under ``jax.jit``; or a plain
        loss, for which the report says what :func:`factored` would do.
      args: The arguments of ``fun``, or their shapes and dtypes.
      argnums: If ``fun`` is a loss, the positions of the arguments from which weights are computed, as in
        :func:`factored`.
      kwargs: The keyword arguments of ``fun``.

    Returns:
      A report that prints as a table. Each entry of ``weights`` has four attributes: ``path``; ``type``, which is the
      dtype and shape; ``is_transformed``, which says whether all products with the weight are transformed; and
      ``reason``.

    Raises:
      TypeError: If ``fun`` is not a function, or for the same reasons as in :func:`factored`.

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
    who = check_call("explain", fun, argnums, follows_weights=True, own_options=given_options(argnums=argnums))
    for function in (fun, getattr(fun, "__wrapped__", None)):  # `jax.jit` keeps its function there.
        if hasattr(function, REPORTED):
            return getattr(function, REPORTED)(args, kwargs)
    report = explain_sums(who, fun, argnums, args, kwargs)
    return replace(report, head=f"with rpx.factored, {report.head}")
