"""Dynamic sparse training: masks that drop weights and regrow others at constant density."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.constraint import Constraint
from reparax.core.fields import Number, argument, per_array
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_number, optional
from reparax.numerics.arithmetic import widened
from reparax.numerics.select import largest
from reparax.stages.sparse import _amount
from reparax.stages.sparse._mask import apply_mask, mask_values


def _check_drop(value: Any, who: str, name: str) -> Any:
    """A share from 0 to 1, if it is known."""
    share = check_number(value, who, name)
    if isinstance(share, float) and not 0 <= share <= 1:
        raise ValueError(f"{who} got {name}={share}, but takes a share of the weights from 0 to 1.")
    return share


class _Regrow(Constraint):
    """Weights under a mask with a given sparsity; each update drops the smallest and regrows others from zero."""

    sparsity: Number = argument(optional(per_array(_amount.check_shares)), default=None)
    drop: Number = argument(per_array(_check_drop), default=0.3)
    count: int | None = argument(optional(_amount.check_count), default=None, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "mask": fixed()}
    min_ndim: ClassVar[int] = 2
    moves_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _amount.require_one(self)

    def refuse_leaf(self, w: Array) -> str | None:
        return _amount.count_error(self, w.size)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return self._masking(w, jnp.abs(widened(w)))

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        noise = jax.random.uniform(key, w.shape, widened(w).real.dtype, minval=0.5)
        return self._masking(w, noise - (w == 0).astype(noise.dtype) / 2)  # zeros first

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return apply_mask(values)

    def _masking(self, w: Array, scores: Array) -> dict[str, Array]:
        """The raw values of ``w``; the weights with the largest scores stay."""
        mask = largest(scores, _amount.count_left(self, w.size))
        return mask_values(jnp.where(mask, w, jnp.zeros_like(w)), mask)

    def _regrow(self, values: dict[str, Array], scores: Array) -> dict[str, Array]:
        """The mask without the share ``drop`` of its smallest weights, and with as many new ones of largest scores."""
        w, active = values["w"], values["mask"] != 0
        size, hidden = jnp.abs(widened(w)), -jnp.ones_like(widened(w).real)
        # NaN must not change the counts: such weights stay, and such scores rank last.
        size = jnp.where(jnp.isnan(size), jnp.full_like(size, jnp.inf), size)
        scores = jnp.where(jnp.isnan(scores), jnp.zeros_like(scores), scores)
        scores = scores + jnp.zeros_like(size, scores.dtype)  # lies on a mesh as the weights do
        count, share = jnp.sum(active), jnp.clip(jnp.asarray(self.drop).astype(jnp.float32), 0, 1)
        n_dropped = jnp.floor(count.astype(jnp.float32) * share).astype(count.dtype)
        survivors = largest(jnp.where(active, size, hidden), count - n_dropped)
        grown = largest(jnp.where(survivors, hidden.astype(scores.dtype), scores), n_dropped)
        mask = (survivors | grown).astype(values["mask"].dtype)
        return {"w": jnp.where(grown & ~active, jnp.zeros_like(w), w), "mask": mask}


class RigL(_Regrow):
    r"""Sparse training by gradient magnitude, at constant density: :math:`w = m \, x`.

    Raw values: ``w`` (main), the :math:`x`; ``mask`` (fixed), real, zeros and ones. ``init`` draws the mask, and sets
    masked weights to zero. Zeros are pruned first, so it is exact if ``w`` is already that sparse. ``project`` gives
    the nearest such array.

    ``p.update(raw, grads=grads)`` drops the share ``drop`` of the active weights, those of smallest magnitude. It
    regrows as many, from zero, where the gradient has the largest magnitude. ``grads`` is the dense gradient with
    respect to the effective tree, so call it about once in a hundred steps, and stop after three quarters of the
    training. Without ``grads`` the mask stays. The paper decays the share:
    ``drop=optax.cosine_decay_schedule(0.3, 75_000)(step)``. Use :func:`reset_moments` to set the momentum of regrown
    weights to zero.

    ``update`` writes zeros into raw weights, so no earlier stage may compute them: put ``RigL`` before ``WeightNorm``.

    Args:
      sparsity: As for :class:`RandomPruning`.
      drop: The share of the active weights that an update replaces, from 0 to 1, a number or a traced scalar; rounded
        down to whole weights, in float32.
      count: As for :class:`RandomPruning`.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.

    Raises:
      TypeError: If ``sparsity``, ``drop`` or ``count`` has the wrong type.
      ValueError: If ``sparsity``, ``drop`` or ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.sparse.RigL(0.5, drop=0.5)
      >>> raw = p.init({"w": jnp.array([[3.0, 1.0, 0.0, 0.0]])}, jax.random.key(0))
      >>> grads = {"w": jnp.array([[0.1, 0.2, -0.9, 0.3]])}
      >>> raw = p.update(raw, grads=grads)
      >>> raw["w"]["@rigl"]["@fixed"]["mask"]
      Array([[1., 0., 1., 0.]], dtype=float32)
      >>> p.apply(raw)["w"]
      Array([[3., 0., 0., 0.]], dtype=float32)

    References:
      Evci, Gale, Menick, Castro and Elsen, *Rigging the Lottery: Making All Tickets Winners*, 2020.
    """

    kind: ClassVar[str] = "rigl"

    def update_leaf(self, values: dict[str, Array], grad: Array) -> dict[str, Array]:
        return self._regrow(values, jnp.abs(widened(grad)))


class SET(_Regrow):
    r"""Sparse training with random regrowth, at constant density: :math:`w = m \, x`.

    Like :class:`RigL`, with the same raw values, but new weights are random: ``p.update(raw, key)`` drops the share
    ``drop`` of the active weights, those of smallest magnitude, and regrows as many at random, from zero. Each update
    needs a new key; without a key the mask stays. Call it once per epoch, or about once in a hundred steps.

    Args:
      sparsity: As for :class:`RandomPruning`.
      drop: As for :class:`RigL`; the paper's :math:`\zeta`.
      count: As for :class:`RandomPruning`.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.

    Raises:
      TypeError: If ``sparsity``, ``drop`` or ``count`` has the wrong type.
      ValueError: If ``sparsity``, ``drop`` or ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.sparse.SET(0.5, drop=0.5)
      >>> raw = p.init({"w": jnp.array([[3.0, 1.0, 0.0, 0.0]])}, jax.random.key(0))
      >>> p.update(raw, jax.random.key(1))["w"]["@set"]["@fixed"]["mask"].sum()
      Array(2., dtype=float32)

    References:
      Mocanu, Mocanu, Stone, Nguyen, Gibescu and Liotta, *Scalable training of artificial neural networks with adaptive
      sparse connectivity inspired by network science*, 2018.
    """

    def update_leaf(self, values: dict[str, Array], key: Array) -> dict[str, Array]:
        return self._regrow(values, jax.random.uniform(key, values["w"].shape))
