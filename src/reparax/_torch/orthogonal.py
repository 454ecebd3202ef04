r"""The coordinates in which torch keeps orthogonal matrices, and ours.

Torch has a tall matrix as :math:`B f(L)` with a square base B and a lower triangular L, of which the first columns
count. In the coordinates of the first columns :math:`B_1` of the base, ours is the same f of :math:`X = B L`. Of
reflections, torch keeps the signs in the diagonal of L; it starts with -1, which is what ours always have.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax._numerics.arithmetic import widened
from reparax._numerics.linalg import adjoint, product
from reparax.matrices._orthogonal import Orthogonal

Values = dict[str, Array]


def other_chart(stage: Orthogonal, shape: tuple[int, ...], *, turned: bool) -> bool:
    """Whether torch has other coordinates: products of reflections of the transposed matrix, where that is square."""
    return turned and stage.map == "householder" and shape[-2] == shape[-1]


def at_base(stage: Orthogonal, values: Values) -> Values:
    """The values of the transposed weight, which is made the base."""
    w = widened(stage.apply_leaf(values)).mT
    return {"x": jnp.zeros_like(w), "base": w}


def write_orthogonal(stage: Orthogonal, values: Values) -> Values:
    """Torch's original and its square base, of the same weight."""
    x, base = _tall(widened(values["x"])), _tall(widened(values["base"]))
    square = jnp.concatenate([base, jnp.linalg.qr(base, mode="complete")[0][..., base.shape[-1] :]], axis=-1)
    original = _lower(stage, product(adjoint(square), x)) - _identity(x.shape, x.dtype)
    return {"x": _oriented(original, values["x"]), "base": square}


def read_orthogonal(stage: Orthogonal, values: Values) -> Values:
    """Our matrix and base, of the same weight; where torch keeps no base, it is the identity."""
    original = _tall(widened(values["x"]))
    rows, columns = original.shape[-2:]
    whole = _identity((*original.shape[:-2], rows, rows), original.dtype)
    square = widened(values["base"]) if "base" in values else whole
    base, x = square[..., :columns], product(square, jnp.tril(original, -1))
    diagonal = jnp.expand_dims(jnp.diagonal(original, axis1=-2, axis2=-1), -2)
    if stage.map == "householder":
        signs = _signs(diagonal)
        base, x = -base * signs, -x * signs
    elif jnp.iscomplexobj(x):
        x = x + base * (diagonal - diagonal.conj()) / 2
    return {"x": _oriented(x, values["x"]), "base": _oriented(base, values["x"])}


def _signs(diagonal: Array) -> Array:
    """The signs of reflections as torch reads them, by the whole part of the number."""
    signs = jnp.trunc(diagonal)
    if not jnp.all(jnp.abs(signs) == 1):
        raise ValueError(
            "expected signs of reflections on the diagonal, got numbers that torch reads as zeros, which weight decay "
            "leaves. Set them to -1 or 1."
        )
    return signs


def _lower(stage: Orthogonal, x: Array) -> Array:
    """The lower triangular matrix of the same rotation as ``x``, from the identity."""
    if stage.map == "householder":
        return jnp.tril(x, -1)
    columns = x.shape[-1]
    top = x[..., :columns, :]
    lower = jnp.tril(x.at[..., :columns, :].add(-adjoint(top)), -1)
    if jnp.iscomplexobj(x):
        phases = jnp.expand_dims(jnp.diagonal(top - adjoint(top), axis1=-2, axis2=-1), -2) / 2
        lower = lower + _identity(x.shape, x.dtype) * phases
    return lower


def _identity(shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.broadcast_to(jnp.eye(*shape[-2:], dtype=dtype), shape)


def _tall(x: Array) -> Array:
    return x.mT if x.shape[-2] < x.shape[-1] else x


def _oriented(x: Array, like: Array) -> Array:
    return x.mT if like.shape[-2] < like.shape[-1] else x
