r"""Converts between the coordinates of orthogonal matrices in torch and in reparax.

Torch stores a tall matrix as :math:`B f(L)` with a square base B and a lower triangular L, of which only the first
columns count. With the first columns of B as the base, ours is the same f of :math:`X = B L`. For reflections, torch
stores signs in the diagonal of L. They start at -1; ours are always -1.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax.io.torch.entries import Entry
from reparax.io.torch.rules import ORTHOGONAL_MAPS
from reparax.numerics.arithmetic import widened
from reparax.numerics.linalg import adjoint, product
from reparax.stages.matrices._orthogonal import Orthogonal

Values = dict[str, Array]


def in_torch(stage: Orthogonal, entry: Entry) -> Orthogonal:
    """The stage with the map that torch has for a weight, if the user says nothing else."""
    by_default = (
        "expm"
        if entry.shape[-2] == entry.shape[-1] or jnp.issubdtype(entry.dtype, jnp.complexfloating)
        else "householder"
    )
    return replace(stage, map=ORTHOGONAL_MAPS.get(entry.orthogonal_map or "", by_default))


def require_map(stage: Orthogonal, original: Array, entry: Entry) -> None:
    """Refuses coordinates of which it is not known by which map they make a matrix; all maps agree at the base."""
    torch_map = in_torch(stage, entry).map
    if entry.orthogonal_map is None and torch_map != stage.map and jnp.any(jnp.tril(_as_tall(original), -1)):
        words = {ours: theirs for theirs, ours in ORTHOGONAL_MAPS.items()}
        raise ValueError(
            f"torch's file does not say which map makes this matrix: {stage!r} has map={stage.map!r}, but torch takes "
            f"{words[torch_map]!r} for the shape {entry.shape[-2:]} by default. Pass orthogonal_map='default' if "
            f"torch's `orthogonal` was called without a map, or orthogonal_map={words[stage.map]!r} if with that one."
        )


def at_weight(w: Array) -> Values:
    """The values of a weight that is its own base, which no map moves."""
    w = widened(w)
    return {"x": jnp.zeros_like(w), "base": w}


def write_orthogonal(stage: Orthogonal, values: Values) -> Values:
    """Converts our values to torch's original and square base, for the same weight."""
    x, base = _as_tall(widened(values["x"])), _as_tall(widened(values["base"]))
    square = jnp.concatenate([base, jnp.linalg.qr(base, mode="complete")[0][..., base.shape[-1] :]], axis=-1)
    original = _as_lower(stage, product(adjoint(square), x)) - _identity_of_shape(x.shape, x.dtype)
    return {"x": _turn_like(original, values["x"]), "base": square}


def has_identity(values: Values) -> bool:
    """Whether the base is the identity, as without torch's trivialization."""
    base = _as_tall(values["base"])
    return bool(jnp.array_equal(base, _identity_of_shape(base.shape, base.dtype)))


def write_reflections(w: Array) -> Array:
    """Torch's original of reflections without a base, for this weight: the factors of LAPACK, as in torch."""
    reflections, taus = jnp.linalg.qr(_as_tall(w), mode="raw")
    factors = reflections.mT
    signs = jnp.sign(jnp.diagonal(factors, axis1=-2, axis2=-1)) * jnp.where(taus == 0, -1, 1)
    diagonal = _identity_of_shape(factors.shape, factors.dtype) * jnp.expand_dims(signs, -2)
    return _turn_like(jnp.tril(factors, -1) + diagonal, w)


def read_orthogonal(stage: Orthogonal, values: Values) -> Values:
    """Converts torch's values to our matrix and base, for the same weight; a missing base is the identity."""
    original = _as_tall(widened(values["x"]))
    rows, columns = original.shape[-2:]
    identity = _identity_of_shape((*original.shape[:-2], rows, rows), original.dtype)
    square = widened(values["base"]) if "base" in values else identity
    base, x = square[..., :columns], product(square, jnp.tril(original, -1))
    diagonal = jnp.expand_dims(jnp.diagonal(original, axis1=-2, axis2=-1), -2)
    if stage.map == "householder":
        signs = _signs_in_torch(diagonal)
        base, x = -base * signs, -x * signs
    elif jnp.iscomplexobj(x):
        x = x + base * (diagonal - diagonal.conj()) / 2
    return {"x": _turn_like(x, values["x"]), "base": _turn_like(base, values["x"])}


def _signs_in_torch(diagonal: Array) -> Array:
    """The signs of reflections as torch reads them: the integer part of the numbers."""
    signs = jnp.trunc(diagonal)
    if not jnp.all(jnp.abs(signs) == 1):
        raise ValueError(
            "expected signs of reflections on the diagonal, got numbers that torch reads as zeros, as after weight "
            "decay. Set them to -1 or 1."
        )
    return signs


def _as_lower(stage: Orthogonal, x: Array) -> Array:
    """The lower triangular matrix that gives the same rotation as ``x``, with the identity as the base."""
    if stage.map == "householder":
        return jnp.tril(x, -1)
    columns = x.shape[-1]
    top = x[..., :columns, :]
    lower = jnp.tril(x.at[..., :columns, :].add(-adjoint(top)), -1)
    if jnp.iscomplexobj(x):
        phases = jnp.expand_dims(jnp.diagonal(top - adjoint(top), axis1=-2, axis2=-1), -2) / 2
        lower = lower + _identity_of_shape(x.shape, x.dtype) * phases
    return lower


def _identity_of_shape(shape: tuple[int, ...], dtype: Any) -> Array:
    """The identity, in the last two axes of a shape."""
    return jnp.broadcast_to(jnp.eye(*shape[-2:], dtype=dtype), shape)


def _as_tall(x: Array) -> Array:
    """``x``, transposed if it is wide."""
    return x.mT if x.shape[-2] < x.shape[-1] else x


def _turn_like(x: Array, like: Array) -> Array:
    """``x``, transposed if ``like`` is wide."""
    return x.mT if like.shape[-2] < like.shape[-1] else x
