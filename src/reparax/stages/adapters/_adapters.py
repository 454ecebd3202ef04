"""Adapters: trained changes to fixed weights, such as low-rank differences, factors, slices and rotations.

Most of these stages store the model's own array as the *base*, a fixed raw value named ``w``. The stages train other
raw values, which initially leave the base unchanged. In a chain with an adapter, earlier stages that store or freeze
weights act on the base. All other earlier stages act on the trained raw values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from reparax.core.axes import Axes, Axis, check_axis, check_features, count_from_front, other_axes, position
from reparax.core.fields import FieldOf, Number, OneNumber, by_array, field
from reparax.core.leaf import Reparametrization
from reparax.core.matrices import RowsAndColumns
from reparax.core.roles import INPUTS
from reparax.core.values import Values, aux, fixed, main
from reparax.numerics.arguments import (
    check_flag,
    check_integer,
    check_known_number,
    check_number,
    check_positive_integer,
    is_integer,
    number_that,
    one_of,
    optional,
)
from reparax.numerics.arithmetic import scalar, widened
from reparax.numerics.linalg import adjoint, not_divisible_error, product, rank_error
from reparax.numerics.threefry import bits

_STRENGTH = number_that(lambda strength: 0 <= strength < math.inf, "takes a finite number that is not negative.")


class Delta(Reparametrization):
    r"""Adds a trained, full-size difference to fixed weights: :math:`w = w_0 + x`.

    The raw tree stores ``x`` (main), which starts as zeros of the shape and dtype of the weights, and ``w`` (fixed),
    the base :math:`w_0`. ``init`` reproduces the weights bit for bit.

    Earlier stages in a chain act on the difference: ``LowRank(4) >> Delta()`` trains a low-rank difference,
    ``Kronecker((4, 4)) >> Delta()`` is LoKr, and ``LowRank(4) >> Hadamard() >> Delta()`` is LoHa. Stages that store or
    freeze weights act on the base instead, as in ``Quantized("int8") >> Delta()``.

    Args:
      strength: A non-negative number or a traced scalar. The penalty ``p.penalty(raw)`` is ``strength / 2`` times the
        squared norm of ``x``, which pulls the weights towards the base (L2-SP).
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

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

    strength: Number = field(by_array(_STRENGTH), default=0.0, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(aligned=True), "w": fixed(base=True)}
    _converts: ClassVar[tuple[str, ...]] = ("strength",)
    min_ndim: ClassVar[int] = 2
    elementwise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.zeros_like(w), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        base = widened(values["w"])
        return (base + values["x"].astype(base.dtype)).astype(values["w"].dtype)

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        squares = jnp.sum(jnp.square(jnp.abs(values["x"])))
        return scalar(self.strength, squares) / 2 * squares


class Hadamard(Reparametrization):
    r"""Multiplies two trained arrays elementwise (LoHa): :math:`w = x \odot y`.

    In place of ``w``, the raw tree stores ``x`` and ``y`` (both main), of the same shape and dtype. ``init`` gives
    ``x = w`` and ``y = 1``, and reproduces ``w`` bit for bit. Even an array of zeros can train, because ``y`` is
    nonzero.

    Earlier stages in a chain act on both raw values: ``LowRank(4) >> Hadamard()`` is the elementwise product of two
    matrices of rank 4. This product starts at rank 4 and can reach rank 16. ``LowRank(4) >> Hadamard() >> Delta()`` is
    LoHa, in which the product starts at zero.

    Args:
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

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
    elementwise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": w, "y": jnp.ones_like(w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["x"] * values["y"]


class Gain(Reparametrization):
    r"""Multiplies weights by trained factors (IA3): :math:`w = g \, x`.

    The raw tree stores ``w`` (main), the array :math:`x`, with the shape of the weights, and ``g`` (auxiliary), a real
    array with the sizes of the axes in ``axis``, or a scalar. ``g`` starts at ones; for half-precision weights, its
    dtype is float32. ``init`` reproduces the weights bit for bit.

    For a kernel of shape ``(in, out)``, ``Freeze() >> Gain(axis=-1)`` is IA3 on the outputs, and
    ``Freeze() >> Gain(axis=0)`` is IA3 on the inputs. ``SpectralNorm() >> Gain()`` is the sigma-reparametrization.

    Args:
      axis: The axes with one factor per index, by number or by name. ``"each"`` gives every weight its own factor.
        Default: None, for a single factor that multiplies the whole array.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

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

    axis: Axes | None = field(check_features, default=None, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "g": aux()}
    min_ndim: ClassVar[int] = 2

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axes = () if self.axis is None else count_from_front(self.axis, w)
        return {"w": w, "g": jnp.ones([w.shape[axis] for axis in axes], widened(w).real.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, g = values["w"], values["g"]
        x = widened(w)
        return (jnp.expand_dims(g, other_axes(self.axis, w)).astype(x.dtype) * x).astype(w.dtype)


def _check_indices(value: Any, who: str, name: str) -> tuple[int, ...]:
    """Returns the indices as a tuple. Raises an error if the tuple is empty, or if an index is negative or repeated."""
    if not isinstance(value, tuple | list) or not all(is_integer(item) and item >= 0 for item in value):
        raise TypeError(f"{who} takes {name} as a tuple of non-negative integers, such as (0, 2), but got {value!r}.")
    if not value or len(set(value)) < len(value):
        raise ValueError(f"{who} got {name}={value}, but takes at least one index, and each index only once.")
    return tuple(map(int, value))


class TrainableSlices(Reparametrization):
    r"""Trains a few slices of otherwise fixed weights, such as the rows of new tokens in an embedding table.

    The raw tree stores ``x`` (main), the trainable slices, with ``len(indices)`` entries along ``axis``, and ``w``
    (fixed), the base, which is the whole array. The effective array is the base with its slices at ``indices`` replaced
    by ``x``. ``init`` reproduces the weights bit for bit.
    ``Freeze() >> TrainableSlices((5, 7), where="embed/embedding")`` trains only the rows of tokens 5 and 7.

    Args:
      indices: The indices of the trainable slices, counted from 0.
      axis: The axis that ``indices`` refers to, by number or by name.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

    Raises:
      TypeError: If ``indices`` or ``axis`` has the wrong type.
      ValueError: If ``indices`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.adapters.TrainableSlices((0, 2))
      >>> raw = p.init({"table": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])})
      >>> raw["table"]["@trainable_slices"]["x"]
      Array([[1., 2.],
             [5., 6.]], dtype=float32)
    """

    indices: tuple[int, ...] = field(_check_indices)
    axis: Axis = field(check_axis, default=0, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(), "w": fixed(base=True)}
    min_ndim: ClassVar[int] = 2
    needs_axes: ClassVar[bool] = False
    by_roles: ClassVar[Any] = {"axis": INPUTS}

    def refuse_leaf(self, w: Array) -> str | None:
        size = w.shape[position(self.axis, w)]
        if max(self.indices) < size:
            return None
        return (
            f"`indices` must be below {size}, the size of axis {self.axis}, but got {max(self.indices)}. Pass only "
            f"indices of existing slices."
        )

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.take(w, jnp.array(self.indices), axis=position(self.axis, w)), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, x = values["w"], values["x"]
        axis = position(self.axis, w)
        slices = jnp.moveaxis(w, axis, 0).at[jnp.array(self.indices)].set(jnp.moveaxis(x, axis, 0).astype(w.dtype))
        return jnp.moveaxis(slices, 0, axis)


class Rotated(RowsAndColumns):
    r"""Multiplies fixed weights by trained diagonal blocks (OFT): :math:`W = \mathrm{diag}(R_1, \ldots, R_k) \, W_0`.

    The raw tree stores ``r`` (main) of shape ``(num_blocks, n, n)``, the blocks, which start as identity matrices, and
    ``w`` (fixed), the base :math:`W_0`. ``init`` reproduces the weights exactly. For half-precision matrices, the
    computation runs in float32.

    ``Freeze() >> Orthogonal(stacked=0) >> Rotated(4)`` is OFT (orthogonal fine-tuning). Its blocks are orthogonal, so
    the angles between the columns of W stay the same.

    Args:
      num_blocks: The number of blocks, which must divide the number of rows.
      block_share: Whether all blocks are the same matrix, so that ``r`` has the shape ``(1, n, n)``.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes, as for :class:`LoRA`: the rows are the inputs of a kernel
        ``(in, out)``.

    Raises:
      TypeError: If ``num_blocks`` or ``block_share`` has the wrong type.
      ValueError: If ``num_blocks`` is out of range.

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

    num_blocks: int = field(check_positive_integer)
    block_share: bool = field(check_flag, default=False, kw_only=True)

    raw_values: ClassVar[Values] = {"r": main(decays=False), "w": fixed(base=True)}
    any_matrix: ClassVar[bool] = False

    def refuse_leaf(self, w: Array) -> str | None:
        return not_divisible_error((self.num_blocks, 1), w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        eye = jnp.eye(w.shape[0] // self.num_blocks, dtype=w.dtype)
        return {"r": jnp.tile(eye[None], (1 if self.block_share else self.num_blocks, 1, 1)), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, r = values["w"], widened(values["r"])
        blocks = widened(w).reshape(self.num_blocks, -1, w.shape[1])
        return product(r, blocks).reshape(w.shape).astype(w.dtype)


def _draw_kaiming(w: Array, rank: int, key: Array) -> Array:
    """Draws LoRA's factor A uniformly between ``-1 / sqrt(rows)`` and ``1 / sqrt(rows)``, as PEFT does."""
    bound = w.shape[0] ** -0.5
    return jax.random.uniform(key, (w.shape[0], rank), w.real.dtype, -bound, bound)


def _draw_gaussian(w: Array, rank: int, key: Array) -> Array:
    """Draws LoRA's factor A from the normal distribution with standard deviation ``1 / rank``."""
    return jax.random.normal(key, (w.shape[0], rank), w.dtype) / rank


def _split_pissa(w: Array, rank: int, scaling: Array) -> tuple[Array, Array]:
    """Returns balanced factors whose product, times ``scaling``, is the best rank-``rank`` approximation of ``w``."""
    u, singular, vh = jnp.linalg.svd(w, full_matrices=False)
    root = jnp.sqrt(singular[:rank] / jnp.abs(scaling))
    nonzero_root = jnp.where(root == 0, 1, root)  # The second factor is nonzero, so that a zero matrix can train.
    a = u[:, :rank] * (jnp.sign(scaling) * root).astype(u.dtype)[None]
    return a, nonzero_root.astype(vh.dtype)[:, None] * vh[:rank]


def _split_olora(w: Array, rank: int, scaling: Array) -> tuple[Array, Array]:
    """Returns the first ``rank`` rows of R and columns of Q, both transposed, of the QR decomposition of ``w.T``."""
    del scaling
    q, r = jnp.linalg.qr(w.T)
    return r[:rank].T, q[:, :rank].T


def _nearest_factors(a: Array, b: Array, rank: int) -> tuple[Array, Array]:
    """Returns balanced factors whose product is the matrix of rank ``rank`` that is nearest to ``a @ b``."""
    (q, r), (q_of_rows, r_of_rows) = jnp.linalg.qr(widened(a)), jnp.linalg.qr(adjoint(widened(b)))
    u, singular, vh = jnp.linalg.svd(product(r, adjoint(r_of_rows)), full_matrices=False)
    root = jnp.sqrt(singular[:rank]).astype(u.dtype)
    nearest_a, nearest_b = product(q, u[:, :rank]) * root[None], root[:, None] * product(vh[:rank], adjoint(q_of_rows))
    return nearest_a.astype(a.dtype), nearest_b.astype(b.dtype)


RANDOM_A = {"kaiming": _draw_kaiming, "gaussian": _draw_gaussian}
"""Maps each value of ``init_weights`` for which A is random and B is zero to the function that draws A."""
FROM_BASE = {"pissa": _split_pissa, "olora": _split_olora}
"""Maps each value of ``init_weights`` for which A and B come from the base to the function that computes both."""
InitWeights = Literal["kaiming", "gaussian", "pissa", "olora"]


class LoRA(RowsAndColumns):
    r"""Adds a trained low-rank difference to fixed weights: :math:`W = W_0 + c \, A B`.

    The raw tree stores ``a`` of shape ``(rows, rank)`` and ``b`` of shape ``(rank, columns)``, both main, and ``w``
    (fixed), the base :math:`W_0`. If W has several row axes, ``a`` keeps them all; if W has several column axes, ``b``
    keeps them all, as in ``(rank, heads, dim)``. Earlier stages in a chain act on ``a`` and ``b``, except for stages
    that store or freeze weights, which act on the base.

    ``init`` does not change the model. If B starts at zero, the weights stay the same bit for bit, and the gradient of
    A is zero in the first step, as usual for LoRA. ``fold`` merges the adapter into the weights.

    For half-precision matrices, the computation runs in float32, but both factors start in the dtype of W. In
    bfloat16, small steps of an optimizer can be lost to rounding. To keep them, cast the free values of
    ``rpx.partition(raw)`` to float32, which ``apply`` accepts.

    ================================  =========================================================
    LoRA                              ``Freeze() >> LoRA(8, alpha=16)``
    rsLoRA                            ``Freeze() >> LoRA(8, alpha=16, use_rslora=True)``
    PiSSA, OLoRA                      ``Freeze() >> LoRA(8, init_weights="pissa")``, ``init_weights="olora"``
    DoRA                              ``Freeze() >> LoRA(8) >> WeightNorm(detach=True)``
    QLoRA                             ``Freeze() >> Quantized("nf4", block_size=64) >> LoRA(8)``
    QDoRA                             the same, then ``>> WeightNorm(detach=True)``
    ================================  =========================================================

    ``Freeze`` also freezes the rest of the model, such as biases, norms and embeddings; ``rpx.partition(raw)[0]`` holds
    the trainable values. If one array stacks the weights of all layers, as for a scan over layers, pass ``stacked=0``
    to every stage except ``Freeze``.

    With ``init_weights="pissa"`` or ``"olora"``, save the whole raw tree, because the base is W minus the initial
    difference and not the original W.

    Args:
      rank: The rank r of the difference, at least 1. If B starts at zero, the rank may exceed ``min(rows, columns)``,
        as PEFT's default of 8 does on a layer with two outputs.
      alpha: A number or a traced scalar that sets the factor :math:`c = \alpha / r`. With ``alpha=0``, the effective
        weights equal the base. Default: None, for :math:`c = 1`.
      use_rslora: Whether to use the factor :math:`c = \alpha / \sqrt r` instead (rsLoRA). Without ``alpha``, this
        argument has no effect.
      init_weights: The initial values of A and B. ``"kaiming"``, as in PEFT: A is uniform with the bound
        :math:`1 / \sqrt{\text{rows}}`, and B is zero. ``"gaussian"``: A is normal with the standard deviation
        :math:`1 / r`, and B is zero. ``"pissa"``: the r largest singular values move from the base into :math:`c A B`,
        split evenly between A and B. ``"olora"``: for the decomposition :math:`W^T = Q R`, ``a`` is the transpose of
        the first r rows of R, ``b`` is the transpose of the first r columns of Q, and the base is W minus
        :math:`c A B`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases,
        scales, and embedding tables, which are named ``embedding`` or ``embeddings``.
      stacked: Axes that stack independent matrices, such as those of experts; see :class:`Reparametrization`.
      rows: The row axes, by number or by name, not counting ``stacked`` axes. Default: all axes not in ``columns``; for
        a matrix, its first axis. Rows are the inputs of a kernel ``(in, out)``; for a weight ``(out, in)``, as in torch
        and equinox, pass ``rows=1``.
      columns: The column axes. Default: all axes not in ``rows``; without ``rows``, the outputs, as for
        :class:`WeightNorm`.

    Raises:
      TypeError: If ``rank``, ``alpha`` or ``use_rslora`` has the wrong type.
      ValueError: If ``rank`` is out of range, or if ``init_weights`` is not one of the allowed strings.

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

    rank: int = field(check_positive_integer)
    alpha: FieldOf[OneNumber | None] = field(by_array(optional(check_number)), default=None)
    use_rslora: bool = field(check_flag, default=False, kw_only=True)
    init_weights: InitWeights = field(one_of(InitWeights), default="kaiming", kw_only=True)

    raw_values: ClassVar[Values] = {
        "a": main(axes=("rows", "rank")),
        "b": main(axes=("rank", "columns")),
        "w": fixed(base=True),
    }
    _converts: ClassVar[tuple[str, ...]] = ("rank", "alpha", "use_rslora", "init_weights")
    acts_on_embeddings: ClassVar[bool] = False
    any_matrix: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, float) and self.alpha == 0.0 and self.init_weights in FROM_BASE:
            raise ValueError(
                f"LoRA got alpha=0.0 with init_weights={self.init_weights!r}, which moves a part of the base into the "
                "factors A and B, but alpha=0.0 multiplies them by zero. Pass another alpha, or init_weights='kaiming'."
            )

    def refuse_leaf(self, w: Array) -> str | None:
        return rank_error(self.rank, w) if self.init_weights in FROM_BASE or 0 in w.shape else None

    @property
    def random_init(self) -> bool:
        return self.init_weights in RANDOM_A

    def init_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        x = widened(w)
        if self.init_weights in RANDOM_A:
            a = RANDOM_A[self.init_weights](x, self.rank, key).astype(w.dtype)
            return {"a": a, "b": jnp.zeros((self.rank, w.shape[1]), w.dtype), "w": w}
        a, b = (factor.astype(w.dtype) for factor in FROM_BASE[self.init_weights](x, self.rank, self._factor(x)))
        return {"a": a, "b": b, "w": (x - self._difference(a, b)).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = widened(values["w"])
        return (x + self._difference(values["a"], values["b"]).astype(x.dtype)).astype(values["w"].dtype)

    def _factor(self, like: Array) -> Array:
        """Returns the factor c of the difference as a real scalar, with the precision of ``like``."""
        if self.alpha is None:
            return jnp.ones((), like.real.dtype)
        return scalar(self.alpha, like.real) / self._divisor

    @property
    def _divisor(self) -> float:
        """The divisor of ``alpha`` in the factor c: the rank, or its square root for rsLoRA."""
        return self.rank**0.5 if self.use_rslora else self.rank

    def _difference(self, a: Array, b: Array) -> Array:
        """Computes the difference :math:`c A B` that is added to the base."""
        a, b = widened(a), widened(b)
        return self._factor(a).astype(a.dtype) * product(a, b)

    def _has_same_factor(self, other: LoRA) -> bool:
        """Returns whether both stages have the same factor c. The result is False if either ``alpha`` is an array."""
        factors = [1.0 if stage.alpha is None else stage.alpha / stage._divisor for stage in (self, other)]
        return all(isinstance(factor, float) for factor in factors) and factors[0] == factors[1]

    def _convert(self, old: LoRA, values: Mapping[str, Array], fresh: Mapping[str, Array]) -> Mapping[str, Array]:
        """Converts raw values of ``old``, a stage with other arguments, to raw values of this stage.

        The difference from the base stays the same. If the rank decreases, the nearest matrix of the smaller rank
        replaces it.
        """

        def convert_matrix(values: dict[str, Array], fresh: dict[str, Array]) -> dict[str, Array]:
            a, b = values["a"], values["b"]
            if self.rank < old.rank:
                a, b = _nearest_factors(a, b, self.rank)
            if missing := self.rank - a.shape[1]:
                new_columns = fresh["a"].reshape(a.shape[0], self.rank)[:, -missing:]
                a = jnp.concatenate((a, new_columns.astype(a.dtype)), 1)
                b = jnp.concatenate((b, jnp.zeros((missing, b.shape[1]), b.dtype)))
            if not self._has_same_factor(old):
                old_factor, factor = old._factor(widened(b)), self._factor(widened(b))
                b = (widened(b) * (old_factor / jnp.where(factor == 0, 1, factor))).astype(b.dtype)
            return {"a": a, "b": b, "w": values["w"]}

        return self._map_stacked(convert_matrix)(dict(values), dict(fresh))

    def _grown_values(self, old: LoRA) -> Sequence[str]:
        if self.rank < old.rank:
            return ()
        return ("a", "b") if self._has_same_factor(old) else ("a",)


class VeRA(RowsAndColumns):
    r"""Trains two vectors between fixed random factors: :math:`W = W_0 + A \, D(d) \, B \, D(b)`.

    :math:`D(d)` is the diagonal matrix of a vector d.

    The raw tree stores ``d`` of shape ``(rank,)`` and ``b`` of shape ``(columns,)``, both main, and ``w`` (fixed), the
    base :math:`W_0`. ``d`` starts at ``d_initial`` and ``b`` at zero, so ``init`` reproduces the weights bit for bit.

    The random factors A of shape ``(rows, rank)`` and B of shape ``(rank, columns)`` are never stored. They depend only
    on ``seed`` and on their shapes, so all arrays of one shape share the same factors. The entries are uniform with the
    bounds :math:`\sqrt{6 / \text{rows}}` for A and :math:`\sqrt{6 / r}` for B, as in PEFT. For half-precision matrices,
    the computation runs in float32.

    Args:
      rank: The rank r of the factors, at least 1. The rank may exceed ``min(rows, columns)``, because A and B are
        never stored.
      d_initial: The initial value of ``d``.
      seed: The seed of A and B. Save it with the raw values; ``to_json`` includes it.
      where: Which arrays to act on, with the same default as for :class:`LoRA`.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LoRA`.

    Raises:
      TypeError: If ``rank``, ``d_initial`` or ``seed`` has the wrong type.
      ValueError: If ``rank`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = (rpx.Freeze() >> rpx.adapters.VeRA(256)).init({"kernel": jnp.ones((8, 3)), "bias": jnp.zeros(3)})
      >>> jax.tree.map(jnp.size, rpx.partition(raw)[0]["kernel"]["@vera"])["d"]
      256

    References:
      Kopiczko, Blankevoort and Asano, *VeRA: Vector-based Random Matrix Adaptation*, 2024.
    """

    rank: int = field(check_positive_integer)
    d_initial: float = field(check_known_number, default=0.1)
    seed: int = field(check_integer, default=0, kw_only=True)

    kind: ClassVar[str] = "vera"
    raw_values: ClassVar[Values] = {"d": main(), "b": main(axes=("columns",)), "w": fixed(base=True)}
    acts_on_embeddings: ClassVar[bool] = False
    any_matrix: ClassVar[bool] = False

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"d": jnp.full(self.rank, self.d_initial, w.dtype), "b": jnp.zeros(w.shape[1], w.dtype), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = widened(values["w"])
        factors = (values["d"], values["b"], *self.factors(x))
        d, b, a_random, b_random = (factor.astype(x.dtype) for factor in factors)
        return (x + product(a_random * d[None], b_random) * b[None]).astype(values["w"].dtype)

    def factors(self, w: Array) -> tuple[Array, Array]:
        """Draws the random factors A and B from ``seed``, in the shapes that fit the matrix ``w``."""
        key = jax.random.key(self.seed, impl="threefry2x32")
        dtype = widened(w).real.dtype
        a_random = _draw_uniform(jax.random.fold_in(key, 0), (w.shape[0], self.rank), w.shape[0], w)
        b_random = _draw_uniform(jax.random.fold_in(key, 1), (self.rank, w.shape[1]), self.rank, w)
        return a_random.astype(dtype), b_random.astype(dtype)


def _draw_uniform(key: Array, shape: tuple[int, int], inputs: int, w: Array) -> Array:
    """Draws uniform random numbers between ``-sqrt(6 / inputs)`` and ``sqrt(6 / inputs)``.

    The numbers do not depend on JAX's settings, on the dtype of ``w`` or on the mesh of ``w``.
    """
    words = bits(key, shape, 32, NamedSharding(jax.typeof(w).sharding.mesh, PartitionSpec(None, None)))
    bound = math.sqrt(6 / max(inputs, 1))
    return (words >> 8).astype(jnp.float32) * (2 * bound / 2**24) - bound
