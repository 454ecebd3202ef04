"""Ranks that differ between arrays, by the number of directions of their inputs."""

from __future__ import annotations

import numpy as np

from reparax._data.seen import Seen
from reparax._numerics.arguments import check_known_number, check_positive_whole
from reparax._tree.markers import locate_errors
from reparax._tree.paths import PyTree, flatten_with_names, path_text


def eva_ranks(seen: PyTree, rank: int, rho: float = 2.0) -> dict[str, int]:
    r"""Ranks for ``LoRA(..., start="eva")``: higher for arrays whose inputs vary in more directions.

    For each array, direction i of its inputs explains the share :math:`\lambda_i / \sum_j \lambda_j` of their
    covariance. Of the directions of all arrays, those with the largest shares are taken: ``rank`` times the number of
    arrays in total, and at most ``rho`` times ``rank`` for one array. An array without any is not adapted. An array
    that holds all layers can have only one rank, and is left out.

    Args:
      seen: The result of :func:`inputs` with full moments, for the arrays that you adapt: select them with its
        ``where``. Arrays that no product reads as one matrix are left out.
      rank: The mean rank.
      rho: The largest rank of an array, in units of ``rank``; at least 1.

    Returns:
      A rank for each path, 0 to :math:`\rho \, \text{rank}`.

    Raises:
      ValueError: If no array has full moments, or ``rho`` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> params = {"a": jnp.ones((8, 2)), "b": jnp.ones((8, 2))}
      >>> many = jax.random.normal(jax.random.key(0), (9, 8))
      >>> one = many[:, :1] * jnp.ones((9, 8))
      >>> seen = rpx.inputs(lambda p, x: jnp.sum(x[0] @ p["a"] + x[1] @ p["b"]))(params, (one, many))
      >>> ranks = rpx.adapters.eva_ranks(seen, 2)
      >>> ranks
      {'a': 1, 'b': 3}
      >>> p = rpx.Chain(tuple(rpx.LoRA(rank, start="eva", where=path) for path, rank in ranks.items()))
      >>> p.init(params, seen=seen)["b"]["@lora"]["a"].shape
      (8, 3)

    References:
      Paischer, Hauzenberger, Schmied, Alkin, Deisenroth and Hochreiter, *Explained Variance Adaptation* (EVA), 2024.
    """
    check_positive_whole(rank, "eva_ranks", "rank")
    if check_known_number(rho, "eva_ranks", "rho") < 1:
        raise ValueError(f"eva_ranks got rho={rho}, but takes at least 1.")
    paths, nodes, _ = flatten_with_names(seen, lambda x: isinstance(x, Seen))
    parts: dict[str, np.ndarray] = {}
    for path, x in zip(map(path_text, paths), nodes, strict=True):
        with locate_errors(f"eva_ranks at {path!r}"):
            share_of_path = _explained_variance(x)
        if share_of_path is not None:
            parts[path] = share_of_path
    if not parts:
        raise ValueError(
            "eva_ranks found no array that products read as one matrix, with full moments. Pass the result of "
            "`rpx.inputs(loss)(params, batch)`."
        )
    most = round(rank * rho)
    shares = sorted(
        ((part, path) for path, share_of_path in parts.items() for part in share_of_path[:most]), key=lambda x: -x[0]
    )
    paths_taken = [path for _, path in shares[: rank * len(parts)]]
    return {path: paths_taken.count(path) for path in parts}


def _explained_variance(seen: Seen) -> np.ndarray | None:
    """The part of the covariance in each direction, the largest first; None if the array is not read as one matrix."""
    if len(seen.reads) != 1:
        return None
    (read,) = seen.reads
    if read.second is None or read.second.ndim < 3 or len(read.second) != 1:
        return None
    seen.require_all("data of this array")
    count, sums, products = (np.asarray(x[0], np.float64) for x in (read.count, read.first, read.second))
    values = np.linalg.eigvalsh(products - np.outer(sums, sums) / max(count, 1))[::-1]
    values[values < np.finfo(np.float32).eps * len(values) * np.trace(products)] = 0  # what rounding leaves of a mean
    return values / max(values.sum(), np.finfo(np.float64).tiny)
