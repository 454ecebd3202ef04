"""Adapters of a few coefficients."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.value import argument
from reparax._numerics.arguments import check_number, check_positive_whole, one_of
from reparax._numerics.arithmetic import scalar, widened
from reparax._stage.matrices import RowsAndColumns
from reparax._stage.varied import Number, per_array
from reparax._tree.values import Values, fixed, main


class Coefficients(RowsAndColumns):
    r"""A difference of a few coefficients at random places: :math:`W = W_0 + c \sum_k x_k B_{i_k j_k}`.

    Raw values: ``x`` (main) of shape ``(count,)``, zeros at the start; ``index`` (fixed), int32, of shape ``(count,
    2)``, the rows and columns :math:`(i_k, j_k)`, which ``init`` draws; ``w`` (fixed), the base :math:`W_0`, like
    ``W``. ``init`` is exact, bit for bit. With the basis ``"entries"``, :math:`B_{ij}` is the matrix with 1 at row i
    and column j: this is SHiRA. With ``"fourier"`` it is the real part of the inverse discrete Fourier transform of
    that matrix in two dimensions: this is FourierFT. Half-precision matrices are computed in float32.

    Args:
      count: The number of coefficients, at most the number of entries of the matrix.
      basis: ``"entries"`` or ``"fourier"``.
      scale: :math:`c`, a number or a traced scalar; 0 is the base model.
      where: As for :class:`LoRA`, with the same default.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LoRA`.

    Raises:
      TypeError: If ``count`` or ``scale`` has the wrong type.
      ValueError: If ``count`` is out of range, or if ``basis`` is not one of the words above.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.adapters.Coefficients(10, "fourier", scale=150.0)
      >>> raw = p.init({"kernel": jnp.ones((8, 3)), "bias": jnp.zeros(3)}, jax.random.key(0))
      >>> rpx.partition(raw)[0]["kernel"]["@coefficients"]["x"].shape
      (10,)

    References:
      Bhardwaj et al., *Sparse High Rank Adapters*, 2024; Gao, Wang, Chen, Liu, Wu, Chen and Li, *Parameter-Efficient
      Fine-Tuning with Discrete Fourier Transform*, 2024.
    """

    count: int = argument(check_positive_whole)
    basis: str = argument(one_of("entries", "fourier"), default="entries")
    scale: Number = argument(per_array(check_number), default=1.0, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(), "index": fixed(), "w": fixed(base=True)}
    tables: ClassVar[bool] = False

    def refuse_leaf(self, w: Array) -> str | None:
        if self.count <= w.size:
            return None
        return f"expected at least {self.count} entries, got shape {w.shape}. Leave it out with `where`."

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        places = jax.random.choice(key, w.size, (self.count,), replace=False).astype(jnp.int32)
        index = jnp.stack([places // w.shape[1], places % w.shape[1]], axis=-1)
        return {"x": jnp.zeros(self.count, w.dtype), "index": index, "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x, (i, j), w = widened(values["x"]), values["index"].T, widened(values["w"])
        spread = jnp.zeros_like(w).at[i, j].add(scalar(self.scale, x.real).astype(x.dtype) * x)
        return (w + (_inverse_fourier(spread) if self.basis == "fourier" else spread)).astype(values["w"].dtype)


def _inverse_fourier(spectrum: Array) -> Array:
    """The inverse Fourier transform; its real part for a real spectrum."""
    wave = jnp.fft.ifft2(spectrum)
    return wave if jnp.iscomplexobj(spectrum) else wave.real
