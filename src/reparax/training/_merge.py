"""Models of one structure, merged into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from reparax._core.keys import Keys, check_key
from reparax._numerics.arguments import check_known_number, one_of
from reparax._numerics.arithmetic import is_inexact, widened
from reparax._numerics.usage import shows_usage
from reparax._tree.paths import PyTree, describe, flatten_with_names, is_array, path_text
from reparax.training._regression_mean import merge_by_regression, reads_of_all
from reparax.training._task_vectors import agreeing_mean, drop, trim, weighted_mean, weighted_sum

GIVE = {
    "base": "the model from which all of them were trained, `base=params`",
    "density": "the part of each difference that stays, such as `density=0.2`",
    "key": "a key to draw what stays, `key=jax.random.key(0)`",
    "seen": "the data of each model, `seen=[rpx.inputs(loss)(model, batch), ...]`",
}
"""What to do where an argument is missing."""


@dataclass(frozen=True)
class _Way:
    """One way to merge: what it needs, what it leaves of each task vector, and how it adds them."""

    needs: tuple[str, ...]
    thin: Callable[[Array, Any, Any], Array] = lambda task, density, key: task
    join: Callable[[Array, Array, str], Array] = lambda tasks, weights, method: weighted_sum(tasks, weights)


_WAYS = {
    "mean": _Way(()),
    "regmean": _Way(("seen",)),
    "task_arithmetic": _Way(("base",)),
    "magnitude_prune": _Way(("base", "density"), lambda task, density, key: trim(task, density)),
    "ties": _Way(("base", "density"), lambda task, density, key: trim(task, density), agreeing_mean),
    "dare_linear": _Way(("base", "density", "key"), drop),
    "dare_ties": _Way(("base", "density", "key"), drop, agreeing_mean),
}


@shows_usage
def merge(
    models: Sequence[PyTree],
    how: str = "mean",
    *,
    weights: ArrayLike | Sequence[ArrayLike] | None = None,
    base: PyTree = None,
    density: float | None = None,
    majority_sign_method: str = "total",
    key: Array | None = None,
    seen: Sequence[PyTree] | None = None,
    off_diagonal: float = 0.9,
) -> PyTree:
    r"""Merges models of the same structure into one.

    For models :math:`W_i` with weights :math:`\lambda_i`, a base :math:`W_0` and differences :math:`\tau_i = W_i -
    W_0`, entry by entry:

    =======================  =========================================================================================
    ``"mean"``               :math:`\sum_i \lambda_i W_i / \sum_i \lambda_i`, a model soup
    ``"regmean"``            the W nearest in what it computes from each model's own data,
                             :math:`\min_W \sum_i \lambda_i \| X_i (W - W_i) \|^2`
    ``"task_arithmetic"``    :math:`W_0 + \sum_i \lambda_i \tau_i`; a negative weight takes away what was learned
    ``"magnitude_prune"``    the same, after the smallest entries of each array of :math:`\tau_i` became zero: a part
                             ``density`` of them stays
    ``"ties"``               of these, the mean of those :math:`\lambda_i \tau_i` whose sign is that of the majority
    ``"dare_linear"``        task arithmetic, after each entry became zero with the probability ``1 - density``; those
                             that stay are divided by ``density``
    ``"dare_ties"``          the same entries, merged by ``"ties"``
    =======================  =========================================================================================

    Merge effective trees, ``[p.fold(raw) for raw in raws]``: the mean of raw values is the mean of the weights only if
    the weights are linear in them, which is not so for an adapter's factors. An array that is equal in all models stays
    in a mean, bit for bit.

    Names and formulas are those of PEFT's ``add_weighted_adapter``, on whole weights. As there and in mergekit, the
    smallest entries are chosen in each array; the paper of TIES ranks all arrays together. Weights of 1 are the papers'
    TIES and DARE; a single number is their :math:`\lambda`. Half-precision arrays are computed in float32.

    ``"regmean"`` merges arrays that products read in one way; all others, such as biases, norms and tied tables, get
    the mean. So do the rows of inputs that were zero in all data.

    Args:
      models: Two or more trees of one structure, shape by shape and dtype by dtype; one is enough with a base. Leaves
        that are not floating or complex arrays, such as counters, keys and functions, must be equal.
      how: One of the words above.
      weights: One number, or one for each model. Default: 1. They may be traced and have gradients, except in
        ``"regmean"``.
      base: The model from which all of them were trained.
      density: The part of the entries that stays, more than 0 and at most 1.
      majority_sign_method: The sign of the majority is that of the sum of the differences, ``"total"``, or of the
        sum of their signs, ``"frequency"``.
      key: A key for ``"dare_linear"`` and ``"dare_ties"``. The dropped entries depend on it, on the path and on the
        model's position.

      seen: For ``"regmean"``, the result of :func:`inputs` for each model, with full or diagonal moments. A model with
        more data counts more.
      off_diagonal: For ``"regmean"``, a factor for the moments of two different inputs. 1 is the formula above; the
        paper takes less, as these moments are known less well.

    Returns:
      A tree like each of the models.

    Raises:
      ValueError: If there is one model and no base, the trees differ, or an argument is missing, out of range or not
        used.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> base = {"w": jnp.array([0.0, 0.0, 0.0])}
      >>> one, other = {"w": jnp.array([1.0, 4.0, 0.0])}, {"w": jnp.array([3.0, -2.0, 2.0])}
      >>> rpx.merge([one, other])["w"]
      Array([2., 1., 1.], dtype=float32)
      >>> rpx.merge([one, other], "ties", base=base, density=1.0)["w"]
      Array([2., 4., 2.], dtype=float32)

    References:
      Wortsman et al., *Model Soups*, 2022; Jin, Ren, Preotiuc-Pietro and Cheng, *Dataless Knowledge Fusion by Merging
      Weights of Language Models* (RegMean), 2023; Ilharco et al., *Editing Models with Task Arithmetic*, 2023; Yadav,
      Tam, Choshen, Raffel and Bansal, *TIES-Merging*, 2023; Yu, Yu, Yu, Huang and Li, *Language Models are Super Mario*
      (DARE), 2024.
    """
    way = _WAYS[one_of(*_WAYS)(how, "merge", "how")]
    one_of("total", "frequency")(majority_sign_method, "merge", "majority_sign_method")
    _require_arguments(how, way, {"base": base, "density": density, "key": key, "seen": seen})
    if isinstance(models, Mapping) or len(models) < (2 if base is None else 1):
        what = "one tree" if isinstance(models, Mapping) else f"a list of {len(models)}"
        raise ValueError(
            f"merge takes a list of two or more models, or of one and a base, but got {what}. Call "
            f"`merge([first, second])`."
        )
    paths, trees = _leaves_of_models([*models, *([] if base is None else [base])], len(models))
    part = 1.0 if density is None else _check_part("density", density)
    scales = _weights_of_models(how, weights, len(models))
    keys = _keys_by_path(key, paths, len(models))
    reads = {} if seen is None else reads_of_all(models, seen)
    scale = _check_part("off_diagonal", off_diagonal)

    def merge_leaf(i: int, arrays: Sequence[Any]) -> Any:
        example = arrays[0]
        if not (is_array(example) and is_inexact(example)):
            return _common_leaf(paths[i], arrays)
        if way.join is agreeing_mean and jnp.iscomplexobj(example):
            raise ValueError(
                f"merge(how={how!r}) takes real arrays, whose signs agree or not, but got {describe(example)} at "
                f"{paths[i]!r}."
            )
        wide = [widened(jnp.asarray(x)) for x in arrays]
        weights_in_dtype = scales.astype(wide[0].dtype)
        if paths[i] in reads:
            return merge_by_regression(wide, reads[paths[i]], weights_in_dtype, scale).astype(example.dtype)
        if base is None:
            return weighted_mean(jnp.stack(wide), weights_in_dtype).astype(example.dtype)
        *tuned, start = wide
        tasks = [way.thin(x - start, part, keys[number][i]) for number, x in enumerate(tuned)]
        return (start + way.join(jnp.stack(tasks), weights_in_dtype, majority_sign_method)).astype(example.dtype)

    columns = zip(*trees, strict=True)
    return jax.tree.structure(models[0]).unflatten([merge_leaf(i, arrays) for i, arrays in enumerate(columns)])


def _require_arguments(how: str, way: _Way, arguments: dict[str, Any]) -> None:
    """Refuses arguments that are missing, and those that would do nothing."""
    for name, value in arguments.items():
        if name in way.needs and value is None:
            raise ValueError(f"merge(how={how!r}) needs {GIVE[name]}.")
        if name not in way.needs and value is not None:
            takers = ", ".join(repr(word) for word, way_of_word in _WAYS.items() if name in way_of_word.needs)
            raise ValueError(f"merge(how={how!r}) takes no {name}; {takers} do. Leave it out, or change `how`.")


def _leaves_of_models(trees: Sequence[PyTree], count: int) -> tuple[list[str], list[list[Any]]]:
    """The paths of the leaves, and the leaves of each tree; the trees after the first ``count`` are bases."""
    paths, leaves_of_first, treedef = flatten_with_names(trees[0])
    texts, all_leaves = list(map(path_text, paths)), [leaves_of_first]
    for number, tree in enumerate(trees[1:], 1):
        who = f"models[{number}]" if number < count else "base"
        other_paths, leaves, other_treedef = flatten_with_names(tree)
        if other_treedef != treedef:
            lost, new = set(paths) - set(other_paths), set(other_paths) - set(paths)
            names = ", ".join(sorted(repr(path_text(path)) for path in lost | new)[:3])
            where = f"which differ at {names}" if names else f"{treedef} and {other_treedef}"
            raise ValueError(
                f"merge takes trees of one structure, but got models[0] and {who}, {where}. Merge effective trees: "
                f"`[p.fold(raw) for raw in raws]`."
            )
        for text, x, y in zip(texts, leaves_of_first, leaves, strict=True):
            if is_array(x) != is_array(y) or (is_array(x) and describe(x) != describe(y)):
                raise ValueError(
                    f"merge got {describe(x)} at {text!r} in models[0], but {describe(y)} in {who}. Merge models of "
                    f"one shape and dtype."
                )
        all_leaves.append(leaves)
    return texts, all_leaves


def _check_part(name: str, value: float) -> float:
    """A known number greater than 0 and at most 1."""
    number = check_known_number(value, "merge", name)
    if not 0 < number <= 1:
        raise ValueError(f"merge got {name}={number}, but takes a number greater than 0 and at most 1.")
    return number


def _weights_of_models(how: str, weights: Any, count: int) -> Array:
    """The weight of each model."""
    numbers = jnp.asarray(1.0 if weights is None else weights, jnp.float32)
    if numbers.shape not in ((), (count,)):
        raise ValueError(
            f"merge takes one weight, or one for each of {count} models, but got weights of shape {numbers.shape}."
        )
    scales = jnp.broadcast_to(numbers, (count,))
    if isinstance(scales, Tracer):
        return scales
    if how == "mean" and float(jnp.sum(scales)) == 0:
        raise ValueError(
            f"merge(how={how!r}) got weights whose sum is zero, which have no mean. Use how='task_arithmetic', with a "
            f"base."
        )
    if how == "regmean" and not (scales >= 0).all() & (scales > 0).any():
        raise ValueError(f"merge(how={how!r}) takes weights of which none is negative and some are not zero.")
    return scales


def _keys_by_path(key: Any, paths: Sequence[str], count: int) -> list[Any]:
    """For each model, a key for each path; None without a key."""
    if key is None:
        return [[None] * len(paths)] * count
    keys = Keys(check_key(key, "merge", "jax.vmap(lambda key: merge(models, key=key, ...))(keys)"))
    return [keys.of_arrays("merge", number, paths) for number in range(1, count + 1)]


def _common_leaf(path: str, leaves: Sequence[Any]) -> Any:
    """What all models have where nothing can be averaged."""
    leaf_of_first, *other_leaves = leaves
    if any(isinstance(x, Tracer) for x in leaves):
        raise ValueError(
            f"merge cannot check under tracing whether {describe(leaf_of_first)} at {path!r} is equal in all models. "
            f"Merge `rpx.partition(model)[0]` of each, or outside of `jax.jit`."
        )
    if any(not _equal(leaf_of_first, leaf) for leaf in other_leaves):
        raise ValueError(
            f"merge got different values of {describe(leaf_of_first)} at {path!r}, which have no mean. Merge effective "
            f"trees, `[p.fold(raw) for raw in raws]`, or give each model the same."
        )
    return leaf_of_first


def _equal(x: Any, y: Any) -> bool:
    """Whether two leaves are known to be equal."""
    if not is_array(x):
        return x is y or bool(x == y)
    return bool(jnp.all(x == y))
