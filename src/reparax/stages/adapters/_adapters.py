"""Adapters by differences, gains and rotations."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import Axes, Axis, check_axis, check_features, count_from_front, other_axes, position
from reparax.core.fields import Number, argument, per_array
from reparax.core.leaf import Reparametrization
from reparax.core.matrices import RowsAndColumns
from reparax.core.roles import INPUTS
from reparax.core.values import Values, aux, fixed, main
from reparax.numerics.arguments import check_flag, check_positive_whole, check_weight, is_whole
from reparax.numerics.arithmetic import scalar, widened
from reparax.numerics.linalg import identity, product, why_not_divisible


class Delta(Reparametrization):
    r"""A trained difference to fixed weights: :math:`w = w_0 + x`.

    Raw values: ``x`` (main), like ``w``, zeros at the start; ``w`` (fixed), the base :math:`w_0`. ``init`` is exact,
    bit for bit. Earlier stages act on the difference: ``LowRank(4) >> Delta()`` has low rank,
    ``Kronecker((4, 4)) >> Delta()`` is LoKr, and ``LowRank(4) >> Hadamard() >> Delta()`` is LoHa. Only stages that
    store or freeze act on the base: ``Quantized("int8") >> Delta()``.

    Args:
      strength: The penalty is ``strength / 2`` times the squared norm of ``x``, so that ``p.penalty(raw)`` pulls
        towards the base (L2-SP). A number that is not negative, or a traced scalar.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.

    Raises:
      TypeError: If ``strength`` has the wrong type.
      ValueError: If ``strength`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.LowRank(1) >> rpx.adapters.Delta()
      >>> raw = p.init({"w": jnp.ones((3, 2))})
      >>> jax.tree.map(jnp.shape, raw)
      {'w': {'@delta': {'@fixed': {'w': (3, 2)}, 'x': {'@low_rank': {'u': (3, 1), 'v': (1, 2)}}}}}

    References:
      Yeh, Hsieh, Gao, Yang, Oh and Gong, *Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model
      Evaluation*, 2024; Li, Grandvalet and Davoine, *Explicit Inductive Bias for Transfer Learning with Convolutional
      Networks*, 2018.
    """

    strength: Number = argument(per_array(check_weight), default=0.0, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(aligned=True), "w": fixed(base=True)}
    min_ndim: ClassVar[int] = 2
    entrywise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.zeros_like(w), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"] + values["x"]

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        squares = jnp.sum(jnp.square(jnp.abs(values["x"])))
        return scalar(self.strength, squares) / 2 * squares


class Hadamard(Reparametrization):
    r"""An elementwise product: :math:`w = x \odot y`.

    Raw values: ``x`` and ``y``, both main, like ``w``. ``init`` gives ``x = w`` and ``y = 1``; it is exact, bit for
    bit, and a ``w`` of zeros trains. Earlier stages act on both: ``LowRank(4) >> Hadamard()`` is a product of two
    matrices of rank 4. Its rank is up to 16, but it starts at rank 4. Followed by ``Delta``, which makes it start at
    zero, it is LoHa.

    Args:
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.adapters.Hadamard().init({"w": jnp.array([[3.0, 3.0]])})
      {'w': {'@hadamard': {'x': Array([[3., 3.]], dtype=float32), 'y': Array([[1., 1.]], dtype=float32)}}}

    References:
      Hyeon-Woo, Ye-Bin and Oh, *FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning*,
      2022.
    """

    raw_values: ClassVar[Values] = {"x": main(aligned=True), "y": main(aligned=True)}
    min_ndim: ClassVar[int] = 2
    entrywise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": w, "y": jnp.ones_like(w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["x"] * values["y"]


class Gain(Reparametrization):
    r"""Weights times trained factors: :math:`w = g \, x`.

    Raw values: ``w`` (main), x, like ``w``; ``g`` (auxiliary), real, with the sizes of ``axis``, or a scalar; initially
    ones, in float32 for half-precision weights. ``init`` is exact, bit for bit. ``Freeze() >> Gain(axis=-1)`` is IA3 on
    the outputs of a kernel ``(in, out)``, ``axis=0`` on its inputs; ``SpectralNorm() >> Gain()`` is the
    sigma-reparametrization.

    Args:
      axis: The axes with one factor per index, by number or by name. Default: None, one factor for the whole
        array; ``"each"`` for one factor of each weight.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``axis`` has the wrong type.
      ValueError: If ``axis`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.adapters.Gain(axis=-1)
      >>> raw = p.init({"w": jnp.ones((3, 2))})
      >>> rpx.partition(raw)[0]["w"]["@gain"]["g"]
      Array([1., 1.], dtype=float32)

    References:
      Liu, Tam, Muqeeth, Mohta, Huang, Bansal and Raffel, *Few-Shot Parameter-Efficient Fine-Tuning is Better and
      Cheaper than In-Context Learning*, 2022; Zhai, Likhomanenko, Littwin, Busbridge, Ramapuram, Zhang, Gu and
      Susskind, *Stabilizing Transformer Training by Preventing Attention Entropy Collapse*, 2023.
    """

    axis: Axes | None = argument(check_features, default=None, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "g": aux()}
    min_ndim: ClassVar[int] = 2

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axes = () if self.axis is None else dict.fromkeys(count_from_front(self.axis, w))
        return {"w": w, "g": jnp.ones([w.shape[axis] for axis in axes], widened(w).real.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, g = values["w"], values["g"]
        x = widened(w)
        return (jnp.expand_dims(g, other_axes(self.axis, w)).astype(x.dtype) * x).astype(w.dtype)


def _check_index(value: Any, who: str, name: str) -> tuple[int, ...]:
    """At least one whole number from 0 on, all different."""
    if not isinstance(value, tuple | list) or not all(is_whole(item) and item >= 0 for item in value):
        raise TypeError(f"{who} takes whole numbers from 0 on as {name}, but got {value!r}.")
    if not value or len(set(value)) < len(value):
        raise ValueError(f"{who} got {name}={value}, but takes different numbers, at least one.")
    return tuple(map(int, value))


class TrainableSlices(Reparametrization):
    r"""Fixed weights of which a few slices train, such as the rows of new tokens in a table.

    Raw values: ``x`` (main), these slices, like ``w`` with ``len(index)`` entries along ``axis``; ``w`` (fixed), the
    base, like ``w``. The effective array is the base with the slices in their places. ``init`` is exact, bit for bit.
    ``Freeze() >> TrainableSlices((5, 7), where="embed/embedding")`` trains two tokens.

    Args:
      index: The indices of the slices, from 0.
      axis: The axis along which they are counted, by number or by name.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``index`` or ``axis`` has the wrong type.
      ValueError: If ``index`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.adapters.TrainableSlices((0, 2))
      >>> raw = p.init({"table": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])})
      >>> raw["table"]["@trainable_slices"]["x"]
      Array([[1., 2.],
             [5., 6.]], dtype=float32)
    """

    index: tuple[int, ...] = argument(_check_index)
    axis: Axis = argument(check_axis, default=0, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(), "w": fixed(base=True)}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"axis": INPUTS}

    def refuse_leaf(self, w: Array) -> str | None:
        size = w.shape[position(self.axis, w)]
        if max(self.index) < size:
            return None
        return f"expected slices below {size}, the size of axis {self.axis}, got {max(self.index)}. Correct `index`."

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.take(w, jnp.array(self.index), axis=position(self.axis, w)), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, x, axis = values["w"], values["x"], position(self.axis, values["w"])
        rows = jnp.moveaxis(w, axis, 0).at[jnp.array(self.index)].set(jnp.moveaxis(x, axis, 0).astype(w.dtype))
        return jnp.moveaxis(rows, 0, axis)


class Rotated(RowsAndColumns):
    r"""Fixed weights times a trained block-diagonal matrix: :math:`W = \mathrm{diag}(R_1, \ldots, R_k) \, W_0`.

    Raw values: ``r`` (main) of shape ``(blocks, n, n)`` with n rows in each block, identities at the start; ``w``
    (fixed), the base :math:`W_0`, like ``W``. ``init`` is exact. With orthogonal blocks it is OFT, which keeps the
    angles between the columns: ``Freeze() >> Orthogonal(stacked=0) >> Rotated(4)``. Half-precision matrices are
    computed in float32.

    Args:
      blocks: The number of blocks; it must divide the number of rows.
      shared: Whether all blocks are equal; then ``r`` has the shape ``(1, n, n)``.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LoRA`: rows are the inputs of a kernel ``(in, out)``.

    Raises:
      TypeError: If ``blocks`` or ``shared`` has the wrong type.
      ValueError: If ``blocks`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Orthogonal(stacked=0) >> rpx.adapters.Rotated(2)
      >>> raw = p.init({"w": jnp.ones((6, 4))})
      >>> raw["w"]["@rotated"]["r"]["@orthogonal"]["x"].shape
      (2, 3, 3)

    References:
      Qiu, Liu, Feng, Xue, Feng, Liu, Zhang, Weller and Schölkopf, *Controlling Text-to-Image Diffusion by Orthogonal
      Finetuning*, 2023.
    """

    blocks: int = argument(check_positive_whole)
    shared: bool = argument(check_flag, default=False, kw_only=True)

    raw_values: ClassVar[Values] = {"r": main(decays=False), "w": fixed(base=True)}

    def refuse_leaf(self, w: Array) -> str | None:
        return why_not_divisible((self.blocks, 1), w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        size = w.shape[0] // self.blocks
        return {"r": jnp.tile(jnp.eye(size, dtype=w.dtype)[None], (1 if self.shared else self.blocks, 1, 1)), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, r = values["w"], widened(values["r"])
        parts = widened(w).reshape(self.blocks, -1, w.shape[1])
        return product(r, parts).reshape(w.shape).astype(w.dtype)


class CayleyNeumann(RowsAndColumns):
    r"""A base, turned by the first terms of the Cayley map: :math:`W = (I + 2 Q + \cdots + 2 Q^{d-1} + Q^d) \, W_0`.

    Raw values: ``x`` (main), a vector of n (n - 1) / 2 numbers for n rows, zeros at the start: the upper triangle of
    the skew-symmetric Q, row by row; ``base`` (fixed), :math:`W_0`, like ``W``. ``init`` is exact. The series is that
    of :math:`(I - Q)^{-1} (I + Q)`, so this is nearly a rotation for small Q, and no linear equations are solved.
    ``CayleyNeumann(stacked=0) >> Rotated(4)`` is OFT as PEFT computes it by default. Half-precision matrices
    are computed in float32.

    Args:
      degree: The highest power d.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`.

    Raises:
      TypeError: If ``degree`` has the wrong type.
      ValueError: If ``degree`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.adapters.CayleyNeumann(2)
      >>> raw = p.init({"w": jnp.eye(2)})
      >>> raw["w"]["@cayley_neumann"]["x"] = jnp.array([0.5])
      >>> p.apply(raw)["w"]
      Array([[ 0.75,  1.  ],
             [-1.  ,  0.75]], dtype=float32)

    References:
      Qiu, Liu, Feng, Weller and Schölkopf, *Orthogonal Finetuning Made Scalable*, 2025.
    """

    degree: int = argument(check_positive_whole, default=4)

    raw_values: ClassVar[Values] = {"x": main(decays=False), "base": fixed(axes=("rows", "columns"))}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        rows = w.shape[0]
        return {"x": jnp.zeros(rows * (rows - 1) // 2, w.dtype), "base": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        base, x = widened(values["base"]), widened(values["x"])
        rows = base.shape[0]
        upper = jnp.zeros((rows, rows), x.dtype).at[jnp.triu_indices(rows, 1)].set(x)
        skew = upper - upper.T
        eye = identity(skew)
        turn = eye if self.degree == 1 else 2 * eye + skew
        for _ in range(self.degree - 2):
            turn = 2 * eye + product(skew, turn)
        return product(eye + product(skew, turn), base).astype(values["base"].dtype)
