"""Adapters of low rank."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from reparax.core.fields import Number, argument, per_array
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import (
    check_known_number,
    check_number,
    check_positive_whole,
    check_whole,
    one_of,
    optional,
)
from reparax.numerics.arithmetic import scalar, widened
from reparax.numerics.linalg import product, rank_error
from reparax.numerics.threefry import bits


def _draw_kaiming(w: Array, rank: int, key: Array) -> Array:
    """Uniform numbers with the bound of PEFT."""
    bound = w.shape[0] ** -0.5
    return jax.random.uniform(key, (w.shape[0], rank), w.real.dtype, -bound, bound)


def _draw_gaussian(w: Array, rank: int, key: Array) -> Array:
    """Normal numbers."""
    return jax.random.normal(key, (w.shape[0], rank), w.dtype) / rank


def _split_pissa(w: Array, rank: int, scaling: Array) -> tuple[Array, Array]:
    """The factors of the largest singular values, of equal norms."""
    u, singular, vh = jnp.linalg.svd(w, full_matrices=False)
    root = jnp.sqrt(singular[:rank] / jnp.abs(scaling))
    nonzero_root = jnp.where(root == 0, 1, root)  # keeps one factor nonzero, so that a zero matrix trains
    a = u[:, :rank] * (jnp.sign(scaling) * root).astype(u.dtype)[None]
    return a, nonzero_root.astype(vh.dtype)[:, None] * vh[:rank]


def _split_olora(w: Array, rank: int, scaling: Array) -> tuple[Array, Array]:
    """The first rows and columns of the QR decomposition of the transposed matrix."""
    del scaling
    q, r = jnp.linalg.qr(w.T)
    return r[:rank].T, q[:, :rank].T


DRAWN = {"kaiming": _draw_kaiming, "gaussian": _draw_gaussian}
"""Starts that draw A, where B is zero."""
SPLIT = {"pissa": _split_pissa, "olora": _split_olora}
"""Starts that move a part of the base into both factors."""


class LoRA(RowsAndColumns):
    r"""A low-rank difference to fixed weights: :math:`W = W_0 + c \, A B`.

    Raw values: ``a`` of shape ``(rows, rank)`` and ``b`` of shape ``(rank, columns)``, both main; ``w`` (fixed), the
    base :math:`W_0`, like ``W``. ``init`` does not change the model; if B starts at zero, it is exact, bit for bit, and
    the gradient of A is zero in the first step, as usual for LoRA. ``fold`` merges the adapter into the weights.
    Earlier stages act on ``a`` and ``b``; only those that store or freeze act on the base. Half-precision matrices are
    computed in float32.

    ================================  =========================================================
    LoRA                              ``Freeze() >> LoRA(8, alpha=16)``
    rsLoRA                            ``Freeze() >> LoRA(8, alpha=16, divisor="sqrt")``
    PiSSA, OLoRA                      ``Freeze() >> LoRA(8, start="pissa")``, ``start="olora"``
    DoRA                              ``Freeze() >> LoRA(8) >> WeightNorm(detach=True)``
    QLoRA                             ``Freeze() >> Quantized("nf4", block=64) >> LoRA(8)``
    QDoRA                             the same, then ``>> WeightNorm(detach=True)``
    ================================  =========================================================

    ``Freeze`` also freezes the rest of the model, such as biases, norms and embeddings; ``rpx.partition(raw)[0]`` holds
    the values that train. If one array holds all layers, as under a scan, give every stage except ``Freeze``
    ``stacked=0``.

    With ``start="pissa"`` and ``"olora"`` the base becomes the rest of W: save the whole raw tree.

    Args:
      rank: The rank of the difference, at least 1. If B starts at zero, it may exceed ``min(rows, columns)``, as PEFT's
        default of 8 does on a layer of two outputs.
      alpha: :math:`c = \alpha / r`, a number or a traced scalar; 0 is the base model. Default: :math:`c = 1`.
      divisor: ``"rank"``, or ``"sqrt"`` for :math:`c = \alpha / \sqrt r` (rsLoRA). Has no effect without ``alpha``.
      start: ``"kaiming"``: A is uniform with the bound :math:`1 / \sqrt{\text{rows}}`, B zero, as in PEFT.
        ``"gaussian"``: A is normal with the standard deviation :math:`1 / r`, B zero. ``"pissa"``: the ``r`` largest
        singular values move from the base into :math:`c A B`, split evenly. ``"olora"``: with :math:`W^T = Q R`,
        ``b`` is the first columns of Q and ``a`` the first rows of R, both transposed; the base is W without
        :math:`c A B`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases,
        scales, and tables, which are named ``embedding`` or ``embeddings``.
      stacked: As for :class:`Reparametrization`: axes along which independent matrices are stacked, such as experts.
      rows: The row axes, by number or by name, not counting ``stacked`` ones. Default: all axes not in ``columns``; the
        first axis of a matrix. Rows are the inputs of a kernel ``(in, out)``; for a weight ``(out, in)``, as in torch
        and equinox, pass ``rows=1``.
      columns: The column axes. Default: all axes not in ``rows``; the last axis of a matrix.

    Raises:
      TypeError: If ``rank`` or ``alpha`` has the wrong type.
      ValueError: If ``rank`` is out of range, or if ``divisor`` or ``start`` is not one of the words above.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.LoRA(2, alpha=4.0)
      >>> raw = p.init({"kernel": jnp.ones((8, 3)), "bias": jnp.zeros(3)}, jax.random.key(0))
      >>> jax.tree.map(jnp.shape, rpx.partition(raw)[0]["kernel"]["@lora"])["a"]
      (8, 2)
      >>> p.fold(raw)["kernel"].shape
      (8, 3)

    References:
      Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang and Chen, *LoRA*, 2022; Kalajdzievski, *A Rank Stabilization Scaling
      Factor for Fine-Tuning with LoRA*, 2023; Meng, Wang and Zhang, *PiSSA*, 2024; Büyükakyüz, *OLoRA*, 2024; Liu,
      Wang, Yin, Molchanov, Wang, Cheng and Chen, *DoRA*, 2024; Dettmers, Pagnoni, Holtzman and Zettlemoyer, *QLoRA*,
      2023.
    """

    rank: int = argument(check_positive_whole)
    alpha: Number = argument(per_array(optional(check_number)), default=None)
    divisor: str = argument(one_of("rank", "sqrt"), default="rank", kw_only=True)
    start: str = argument(one_of(*DRAWN, *SPLIT), default="kaiming", kw_only=True)

    raw_values: ClassVar[Values] = {
        "a": main(axes=("rows", "rank")),
        "b": main(axes=("rank", "columns")),
        "w": fixed(base=True),
    }
    tables: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, float) and self.alpha == 0.0 and self.start in SPLIT:
            raise ValueError(
                f"LoRA got alpha=0.0 and start={self.start!r}, which moves a part of the base into factors that alpha "
                f"multiplies. Use another alpha, or start='kaiming'."
            )

    def refuse_leaf(self, w: Array) -> str | None:
        return rank_error(self.rank, w) if self.start in SPLIT or 0 in w.shape else None

    @property
    def random_start(self) -> bool:
        return self.start in DRAWN

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        x = widened(w)
        if self.start in DRAWN:
            a = DRAWN[self.start](x, self.rank, key).astype(w.dtype)
            return {"a": a, "b": jnp.zeros((self.rank, w.shape[1]), w.dtype), "w": w}
        a, b = (factor.astype(w.dtype) for factor in SPLIT[self.start](x, self.rank, self._factor(x)))
        return {"a": a, "b": b, "w": (x - self._difference(a, b)).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = widened(values["w"])
        return (x + self._difference(values["a"], values["b"]).astype(x.dtype)).astype(values["w"].dtype)

    def _factor(self, like: Array) -> Array:
        """The number c."""
        if self.alpha is None:
            return jnp.ones((), like.real.dtype)
        return scalar(self.alpha, like.real) / (self.rank if self.divisor == "rank" else self.rank**0.5)

    def _difference(self, a: Array, b: Array) -> Array:
        """The scaled product of the factors."""
        a, b = widened(a), widened(b)
        return self._factor(a).astype(a.dtype) * product(a, b)


class VeRA(RowsAndColumns):
    r"""Trained vectors and fixed random factors that are never stored: :math:`W = W_0 + A \, D(d) \, B \, D(b)`.

    :math:`D(d)` is the diagonal matrix of a vector d.

    Raw values: ``d`` of shape ``(rank,)`` and ``b`` of shape ``(columns,)``, both main; ``w`` (fixed), the base
    :math:`W_0`, like ``W``. A of shape ``(rows, rank)`` and B of ``(rank, columns)`` depend only on ``seed`` and their
    shapes, so all arrays of one shape share them. They are uniform with the bounds :math:`\sqrt{6 / \text{rows}}` and
    :math:`\sqrt{6 / r}`, as in PEFT. ``d`` starts at ``start`` and ``b`` at zero, so ``init`` is exact, bit for bit.
    Half-precision matrices are computed in float32.

    Args:
      rank: The rank of the difference, at least 1. It may exceed the size of the matrix, as A and B use no memory.
      start: The initial value of ``d``.
      seed: The seed of A and B. Keep it with the raw values, as ``to_json`` does.
      where: As for :class:`LoRA`, with the same default.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LoRA`.

    Raises:
      TypeError: If ``rank``, ``start`` or ``seed`` has the wrong type.
      ValueError: If ``rank`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = (rpx.Freeze() >> rpx.adapters.VeRA(256)).init({"kernel": jnp.ones((8, 3)), "bias": jnp.zeros(3)})
      >>> jax.tree.map(jnp.size, rpx.partition(raw)[0]["kernel"]["@vera"])["d"]
      256

    References:
      Kopiczko, Blankevoort and Asano, *VeRA: Vector-based Random Matrix Adaptation*, 2024.
    """

    rank: int = argument(check_positive_whole)
    start: float = argument(check_known_number, default=0.1)
    seed: int = argument(check_whole, default=0, kw_only=True)

    kind: ClassVar[str] = "vera"
    raw_values: ClassVar[Values] = {"d": main(), "b": main(axes=("columns",)), "w": fixed(base=True)}
    tables: ClassVar[bool] = False

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"d": jnp.full(self.rank, self.start, w.dtype), "b": jnp.zeros(w.shape[1], w.dtype), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, d, b = values["w"], widened(values["d"]), widened(values["b"])
        a_random, b_random = self.factors(w)
        return (widened(w) + product(a_random * d[None], b_random) * b[None]).astype(w.dtype)

    def factors(self, w: Array) -> tuple[Array, Array]:
        """The random factors A and B for a matrix like ``w``."""
        key, dtype = jax.random.key(self.seed, impl="threefry2x32"), widened(w).real.dtype
        a_random = _draw_uniform(jax.random.fold_in(key, 0), (w.shape[0], self.rank), w.shape[0], w)
        b_random = _draw_uniform(jax.random.fold_in(key, 1), (self.rank, w.shape[1]), self.rank, w)
        return a_random.astype(dtype), b_random.astype(dtype)


def _draw_uniform(key: Array, shape: tuple[int, int], inputs: int, w: Array) -> Array:
    """Uniform numbers that do not depend on JAX's settings or on the dtype and mesh of ``w``."""
    words = bits(key, shape, 32, NamedSharding(jax.typeof(w).sharding.mesh, PartitionSpec(None, None)))
    bound = math.sqrt(6 / max(inputs, 1))
    return (words >> 8).astype(jnp.float32) * (2 * bound / 2**24) - bound
