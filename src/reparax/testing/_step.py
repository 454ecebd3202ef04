"""Checks that a training step moved fixed values as the chain's ``update`` does."""

from typing import Any

import jax
import jax.numpy as jnp

from reparax.core.calls import CallName, require_chains
from reparax.core.chain import Parametrization
from reparax.core.paths import PyTree, items, path_text
from reparax.numerics.arithmetic import is_inexact
from reparax.testing import _evidence as evidence
from reparax.training import combine, partition


def check_step(p: Parametrization, before: PyTree, after: PyTree) -> None:
    """Checks that one training step moved fixed values as ``p.update`` does, and in no other way; use it in a test.

    This catches an optimizer that changes frozen weights (for example, through weight decay) and a training step that
    calls ``p.update`` zero times or twice. Pass two raw trees from your own training that are one step apart, before
    training has converged.

    Values that need a key or gradients in ``update``, such as the masks of :class:`SET` and :class:`RigL`, are not
    checked.

    Args:
      p: The chain to which both raw trees belong.
      before: The raw tree before the step.
      after: The raw tree after the step.

    Raises:
      AssertionError: If a fixed value differs from the result of ``p.update`` for the old fixed values and the new
        trainable values.
      ValueError: If the step moved a fixed value that ``p.update`` does not change, or if the trees do not belong to
        the chain.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> from reparax.testing import check_step
      >>> p = rpx.MagnitudePruning(0.5)
      >>> before = p.init({"w": jnp.array([[1.0, 2.0]])})
      >>> after = jax.tree.map(lambda x: jnp.where(x == 2, 0.5, x), before)  # a step, without `p.update`
      >>> check_step(p, before, p.update(after))
      >>> check_step(p, before, after)
      Traceback (most recent call last):
        ...
      AssertionError: MagnitudePruning(sparsity=0.5).update gives other fixed values than this step:
        w/@magnitude_pruning/@fixed/mask: the step did not change it
      Let the optimizer update them, `rpx.optimizer(tx, p)`, or call `raw = p.update(raw)` once after each step.
    """
    require_chains("testing.check_step(p, before, after)", p)
    p.check(after, since=before)
    old_values, new_values = partition(before)[1], partition(after)[1]
    expected_values = partition(p.update(combine(partition(after)[0], old_values)))[1]
    rows = zip(items(new_values), jax.tree.leaves(old_values), jax.tree.leaves(expected_values), strict=True)
    # If `update` does not change a value, it returns the same object.
    changed = [(path_text(path), new, old, expected) for (path, new), old, expected in rows if expected is not old]
    if lines := [f"\n  {path}: {what}" for path, *values in changed if (what := _what_is_wrong(*values))]:
        raise AssertionError(
            f"{CallName(p, 'update')} gives other fixed values than this step:{''.join(lines)}\nLet the optimizer "
            f"update them, `rpx.optimizer(tx, p)`, or call `raw = p.update(raw)` once after each step."
        )


def _what_is_wrong(new: Any, old: Any, expected: Any) -> str:
    """Returns how a value differs from the expected value, as text; empty if the difference is only rounding."""
    rounding = 0.0  # for integers
    if is_inexact(expected):
        rounding = max(4 * float(jnp.finfo(expected.dtype).eps), 64 * float(jnp.finfo(jnp.float32).eps))
    ((_, difference),) = evidence.errors(new, expected)
    if difference <= rounding:
        return ""
    if evidence.equal(new, old):
        return "the step did not change it"
    return f"it differs by {difference:.1e} of the largest entry"
