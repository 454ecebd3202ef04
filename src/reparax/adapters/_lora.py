"""Low-rank adapters."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._core.value import argument
from reparax._data.seen import Seen
from reparax._numerics.arguments import check_number, check_positive_whole, one_of, optional
from reparax._numerics.arithmetic import scalar, widened
from reparax._numerics.linalg import product
from reparax._stage.matrices import RowsAndColumns
from reparax._stage.varied import Number, per_array
from reparax._tree.values import Values, fixed, main
from reparax.adapters._starts import STARTS


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
    EVA, CorDA, LoRA-GA               ``Freeze() >> LoRA(8, start="eva")``, ``"corda"``, ``"lora_ga"``, from data
    DoRA                              ``Freeze() >> LoRA(8) >> WeightNorm(detach=True)``
    QLoRA                             ``Freeze() >> Stored("nf4", block=64) >> LoRA(8)``
    QDoRA                             the same, then ``>> WeightNorm(detach=True)``
    ================================  =========================================================

    ``Freeze`` also freezes the rest of the model, such as biases, norms and embeddings; ``rpx.partition(raw)[0]`` holds
    the values that train. If one array holds all layers, as under a scan, give every stage except ``Freeze``
    ``stacked=0``.

    With ``start="pissa"``, ``"olora"``, ``"corda"`` and ``"lora_ga"`` the base becomes the rest of W: save the whole
    raw tree. PEFT's EVA may give arrays different ranks: use :func:`eva_ranks`. LoRA-GA is as in its paper; PEFT leaves
    A unscaled, and scales B by the gradient's singular values as well.

    Args:
      rank: The rank of the difference, at least 1. If B starts at zero, it may exceed ``min(rows, columns)``, as PEFT's
        default of 8 does on a layer of two outputs. With ``start="eva"`` it is at most the number of rows, with
        ``"lora_ga"`` at most half of ``min(rows, columns)``.
      alpha: :math:`c = \alpha / r`, a number or a traced scalar; 0 is the base model. Default: :math:`c = 1`.
      divisor: ``"rank"``, or ``"sqrt"`` for :math:`c = \alpha / \sqrt r` (rsLoRA). Has no effect without ``alpha``.
      start: ``"kaiming"``: A is uniform with the bound :math:`1 / \sqrt{\text{rows}}`, B zero, as in PEFT.
        ``"gaussian"``: A is normal with the standard deviation :math:`1 / r`, B zero. ``"pissa"``: the ``r`` largest
        singular values move from the base into :math:`c A B`, split evenly. ``"olora"``: with :math:`W^T = Q R`,
        ``b`` is the first columns of Q and ``a`` the first rows of R, both transposed; the base is W without
        :math:`c A B`.

        The others start from data: ``init(params, seen=rpx.inputs(loss, ...)(params, batch))``. ``"eva"``: A has the
        directions of length 1 in which the inputs vary most around their mean, B is zero. ``"corda"``: with the mean C
        of :math:`x x^T` over the inputs, the ``r`` largest singular values of :math:`C W` move from the base into
        :math:`c A B`, and A is multiplied by the inverse of C; ``"corda_kpm"`` takes the smallest singular values, to
        keep what the model knows about these data. As much of the identity is added to C as its inverse needs.
        ``"lora_ga"``: of the gradient's singular vectors, A has the first ``r`` on the side of the rows, B the next
        ``r`` on that of the columns, both times :math:`\text{columns}^{1/4} / 4`; the base is W without :math:`c A B`,
        and a first step follows the matrix of rank :math:`2 r` nearest to the gradient. Directions beyond the span of
        the data are arbitrary; NaN in the data gives NaN in the factors.
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
      Factor for Fine-Tuning with LoRA*, 2023; Meng, Wang and Zhang, *PiSSA*, 2024; Büyükakyüz, *OLoRA*, 2024; Paischer,
      Hauzenberger, Schmied, Alkin, Deisenroth and Hochreiter, *Explained Variance Adaptation* (EVA), 2024; Yang, Li,
      Zhou, Song, Wu, Nie and Ghanem, *CorDA*, 2024; Wang, Yu and Li, *LoRA-GA*, 2024; Liu, Wang, Yin, Molchanov, Wang,
      Cheng and Chen, *DoRA*, 2024; Dettmers, Pagnoni, Holtzman and Zettlemoyer, *QLoRA*, 2023.
    """

    rank: int = argument(check_positive_whole)
    alpha: Number = argument(per_array(optional(check_number)), default=None)
    divisor: str = argument(one_of("rank", "sqrt"), default="rank", kw_only=True)
    start: str = argument(one_of(*STARTS), default="kaiming", kw_only=True)

    raw_values: ClassVar[Values] = {
        "a": main(axes=("rows", "rank")),
        "b": main(axes=("rank", "columns")),
        "w": fixed(base=True),
    }
    tables: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, float) and self.alpha == 0.0 and STARTS[self.start].moves:
            raise ValueError(
                f"LoRA got alpha=0.0 and start={self.start!r}, which moves a part of the base into factors that alpha "
                f"multiplies. Use another alpha, or start='kaiming'."
            )

    def refuse_leaf(self, w: Array) -> str | None:
        return STARTS[self.start].refuses(self.rank, w)

    @property
    def random_start(self) -> bool:
        return STARTS[self.start].random

    @property
    def collects(self) -> tuple[str, ...]:
        """The data that its start needs."""
        return STARTS[self.start].collects

    def draw_leaf(self, w: Array, key: Array, *, seen: Seen | None = None) -> dict[str, Array]:
        start, x = STARTS[self.start], widened(w)
        factors = start.factors(x, self.rank, self._factor(x), start.source(x, key, seen))
        a, b = (x_of_factor.astype(w.dtype) for x_of_factor in factors)
        return {"a": a, "b": b, "w": (x - self._difference(a, b)).astype(w.dtype) if start.moves else w}

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
