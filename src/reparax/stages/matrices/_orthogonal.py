"""Stages for orthogonal matrices.

Each stage stores a fixed orthogonal matrix, the *base*, and trains a free matrix ``x`` of the same shape. The functions
``cayley``, ``exponential`` and ``householder`` compute the effective matrix from the base and ``x``; for ``x = 0`` the
effective matrix equals the base. These functions take tall or square matrices, so ``_Orthonormal`` transposes wide
matrices first.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import expm

from reparax.core.constraint import Constraint
from reparax.core.fields import field
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import one_of
from reparax.numerics.arithmetic import widened
from reparax.numerics.linalg import adjoint, identity, not_square_error, polar, product, without_reflection


def _split_by_base(base: Array, x: Array) -> tuple[Array, Array]:
    """Splits the step ``x`` into the parts within and orthogonal to the column span of the base.

    Returns a skew matrix, which rotates the base within its column span, and the component of ``x`` orthogonal to that
    span.
    """
    along = product(adjoint(base), x)
    return along - adjoint(along), x - product(base, along)


def cayley(base: Array, x: Array) -> Array:
    r"""Computes the Cayley map :math:`(I - A/2)^{-1} (I + A/2) B` for the base B, where :math:`A = X B^H - B X^H`.

    For a base of shape ``(n, k)``, block elimination reduces the linear system to size k x k.
    """
    skew, across = _split_by_base(base, x)
    schur, numerator = identity(skew) - skew / 2, 2 * base
    if base.shape[-2] != base.shape[-1]:  # `across` is zero for a square base, so its terms are skipped.
        schur = schur + product(adjoint(across), across) / 4
        numerator = numerator + across
    return jnp.linalg.solve(schur.mT, numerator.mT).mT - base


def exponential(base: Array, x: Array) -> Array:
    r"""Computes the exponential map :math:`e^A B` for the base B, where :math:`A = X B^H - B X^H`.

    For a base of shape ``(n, k)``, A acts only within a subspace of at most 2k dimensions: the column span of the base
    and of the component of ``x`` orthogonal to it. The exponential of a 2k x 2k matrix is therefore enough.
    """
    skew, across = _split_by_base(base, x)
    if base.shape[-2] == base.shape[-1]:
        return product(base, expm(skew))
    eye = identity(skew)
    restricted = jnp.block([[skew, -product(adjoint(across), across)], [eye, jnp.zeros_like(eye)]])
    return product(jnp.concatenate([base, across], axis=-1), expm(restricted)[..., : base.shape[-1]])


def householder(base: Array, x: Array) -> Array:
    r"""Computes :math:`-H_1 \cdots H_k B`: applies k reflections to the base B and negates the result.

    :math:`H_j` reflects along :math:`b_j` plus the component of :math:`x_j` orthogonal to :math:`b_1, \ldots, b_j`.
    The minus sign is needed because for ``x = 0`` the reflections negate each column of the base. The product of the
    reflections is :math:`I - V T V^H` with a triangular matrix T; the inverse of T is computed from :math:`V^H V`.
    """
    vectors = base + x - product(base, jnp.triu(product(adjoint(base), x)))
    gram = product(adjoint(vectors), vectors)
    inverse = jnp.triu(gram) - identity(gram) * gram / 2
    weights = jax.lax.linalg.triangular_solve(inverse, product(adjoint(vectors), base), left_side=True)
    return product(vectors, weights) - base


_MAPS = {"cayley": cayley, "expm": exponential, "householder": householder}


OrthogonalMap = Literal["cayley", "expm", "householder"]


class _Orthonormal(RowsAndColumns, Constraint):
    """The base class of stages that compute a matrix from a fixed orthogonal base and a trained matrix ``x``."""

    map: OrthogonalMap = field(one_of(OrthogonalMap), default="cayley")

    raw_values: ClassVar[Values] = {
        "x": main(decays=False, axes=("rows", "columns")),
        "base": fixed(axes=("rows", "columns")),
    }

    transposes: ClassVar[bool] = True

    def refuse_leaf(self, w: Array) -> str | None:
        if self.map == "householder" and jnp.iscomplexobj(w):
            return (
                f"map='householder' takes only real arrays, because reflections do not reach every unitary matrix, but "
                f"got dtype {w.dtype}. Pass map='cayley' or map='expm'."
            )
        return None

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.zeros_like(w), "base": self.nearest(widened(w))}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return self._effective_matrix(values).astype(values["x"].dtype)

    def update_base_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        return {"x": jnp.zeros_like(values["x"]), "base": self.nearest(self._effective_matrix(values))}

    def _effective_matrix(self, values: dict[str, Array]) -> Array:
        """Computes the effective matrix. Wide matrices are transposed first, because the maps do not take them."""
        base, x = widened(values["base"]), widened(values["x"])
        wide = x.shape[-2] < x.shape[-1]
        return self.move(base.mT, x.mT).mT if wide else self.move(base, x)

    def nearest(self, w: Array) -> Array:
        """Returns the matrix nearest to ``w`` among all effective matrices that the stage can represent."""
        return polar(w)

    def move(self, base: Array, x: Array) -> Array:
        """Computes the effective matrix from ``base`` and ``x``, which have at least as many rows as columns."""
        return _MAPS[self.map](base, x)


class Orthogonal(_Orthonormal):
    r"""Makes the columns of matrices orthonormal, or the rows if fewer: :math:`Q^H Q = I` or :math:`Q Q^H = I`.

    In place of ``w``, the raw tree stores ``x`` (main), of the same shape and dtype, and ``base`` (fixed), an
    orthogonal matrix B of the same shape, in float32 for half-precision weights. With :math:`A = X B^H - B X^H`, the
    maps are

    - ``"cayley"``: :math:`Q = (I - A/2)^{-1} (I + A/2) B`,
    - ``"expm"``: :math:`Q = e^A B`,
    - ``"householder"``: B multiplied by reflections, one for each column of X.

    ``init`` gives ``x = 0`` and sets the base to the polar factor of ``w``, the nearest orthogonal matrix, which is
    ``w`` itself if ``w`` is orthogonal. ``init`` is therefore exact for orthogonal matrices, and weight decay pulls
    towards the base. :meth:`update_base` moves the base to the current effective matrix.

    The determinant of a square real matrix keeps its sign during training. For tall or wide matrices, no intermediate
    array is larger than twice ``w``. Samples follow the uniform (Haar) distribution.

    Args:
      map: ``"cayley"`` is the cheapest and reaches all matrices except a set of measure zero. ``"expm"`` reaches all
        matrices with the determinant of the base. ``"householder"`` reaches the same matrices, but takes only real
        ones.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

    Raises:
      ValueError: If ``map`` is not one of the allowed strings.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Orthogonal("expm")
      >>> raw = p.init({"w": jnp.array([[0.0, -2.0], [2.0, 0.0]])})
      >>> p.apply(raw)["w"]
      Array([[ 0., -1.],
             [ 1.,  0.]], dtype=float32)

    References:
      Lezcano-Casado, *Trivializations for Gradient-Based Optimization on Manifolds*, 2019. Wen and Yin, *A feasible
      method for optimization with orthogonality constraints*, 2013 (tall matrices). Schreiber and Van Loan, *A
      storage-efficient WY representation for products of Householder transformations*, 1989.
    """


class SpecialOrthogonal(_Orthonormal):
    r"""Constrains square matrices to rotations: :math:`Q^T Q = I` and :math:`\det Q = 1`.

    The raw values and maps are the same as in :class:`Orthogonal`. ``init`` is exact for rotations; any other matrix
    starts at the nearest rotation. The nearest rotation is the polar factor of the matrix, with the direction of the
    smallest singular value reversed if the polar factor has a negative determinant.

    Args:
      map: ``"cayley"``, ``"expm"`` or ``"householder"``.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

    Raises:
      ValueError: If ``map`` is not one of the allowed strings.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.SpecialOrthogonal().project(jnp.diag(jnp.array([3.0, 2.0, -1.0])))
      Array([[1., 0., 0.],
             [0., 1., 0.],
             [0., 0., 1.]], dtype=float32)

    References:
      Lezcano-Casado and Martínez-Rubio, *Cheap Orthogonal Constraints in Neural Networks*, 2019.
    """

    dtypes: ClassVar[Any] = jnp.floating

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w)

    def nearest(self, w: Array) -> Array:
        u, _, vh = jnp.linalg.svd(w)
        return product(without_reflection(u, vh), vh)


class Stiefel(_Orthonormal):
    r"""Makes the columns of tall matrices orthonormal, :math:`Q^H Q = I`: k vectors in a space of n dimensions, n >= k.

    The raw values, the maps and ``init`` are the same as in :class:`Orthogonal`. Unlike :class:`Orthogonal`, this stage
    takes no wide matrices.

    Args:
      map: ``"cayley"``, ``"expm"`` or ``"householder"``.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

    Raises:
      ValueError: If ``map`` is not one of the allowed strings.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Stiefel().project(jnp.array([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
      Array([[1., 0.],
             [0., 1.],
             [0., 0.]], dtype=float32)

    References:
      Edelman, Arias and Smith, *The Geometry of Algorithms with Orthogonality Constraints*, 1998.
    """

    def refuse_leaf(self, w: Array) -> str | None:
        if (why := super().refuse_leaf(w)) or w.shape[-2] >= w.shape[-1]:
            return why
        return (
            f"expected matrices with at least as many rows as columns, but got shape {w.shape}. Exclude it "
            f"with `where`, or use `Orthogonal`, which also takes wide matrices."
        )


class Grassmann(_Orthonormal):
    r"""Trains subspaces of dimension k in n > k dimensions, each represented by orthonormal columns Q that span it.

    The raw values, the maps and ``init`` are the same as in :class:`Orthogonal`, but the maps use only the component of
    X orthogonal to the base B, :math:`X - B B^H X`. As a result, Q moves with its subspace and does not rotate within
    the subspace. The output of your model should depend only on the subspace, not on the choice of Q.

    Args:
      map: ``"cayley"``, ``"expm"`` or ``"householder"``.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

    Raises:
      ValueError: If ``map`` is not one of the allowed strings.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.matrices.Grassmann()
      >>> raw = p.init({"w": jnp.eye(3, 2)})
      >>> raw["w"]["@grassmann"]["x"] = jnp.array([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
      >>> p.apply(raw)["w"]  # the base, because this X lies in its subspace
      Array([[1., 0.],
             [0., 1.],
             [0., 0.]], dtype=float32)

    References:
      Edelman, Arias and Smith, *The Geometry of Algorithms with Orthogonality Constraints*, 1998.
    """

    def refuse_leaf(self, w: Array) -> str | None:
        if (why := super().refuse_leaf(w)) or w.shape[-2] > w.shape[-1]:
            return why
        return f"expected more rows than columns, but got shape {w.shape}. Exclude it with `where`."

    def move(self, base: Array, x: Array) -> Array:
        return super().move(base, x - product(base, product(adjoint(base), x)))
