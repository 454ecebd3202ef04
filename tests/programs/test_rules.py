"""What equations do to weights in factors, against the same of the array."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kept import in_factors
from one_array import normal

import reparax as rpx

X, W = normal(5, 4, seed=1), {"w": np.diag(normal(4))}
RESIZED = {
    "rows": lambda w, x: x[:, :2] @ w[:2],
    "columns": lambda w, x: x @ w[:, 1:],
    "both": lambda w, x: x[:, :2] @ w[:2, 1:3],
    "rows from a place that data say": lambda w, x: x[:, :2] @ jax.lax.dynamic_slice_in_dim(w, jnp.argmax(x[0]) % 3, 2),
    "turned": lambda w, x: x @ w[::-1],
}


@pytest.mark.parametrize("p", [rpx.matrices.Diagonal(), rpx.LowRank(2)], ids=repr)
def test_a_weight_that_is_resized_gives_what_the_array_gives(p):
    raw = p.init(W)

    def losses(transform):
        each = [transform(lambda raw, x, f=f: jnp.sum(f(p.apply(raw)["w"], x) ** 2)) for f in RESIZED.values()]
        return jax.jit(lambda raw, x: [jax.value_and_grad(loss)(raw, x) for loss in each])(raw, X)

    with in_factors():
        found = losses(rpx.factored)
    for name, got, want in zip(RESIZED, found, losses(lambda f: f), strict=True):
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-4, custom_message=name)


def test_a_diagonal_times_a_table_whose_columns_were_merged_gives_the_array():
    p, params = rpx.matrices.Diagonal(where="w"), W | {"s": normal(4, seed=2), "t": normal(2, 2, seed=3)}

    def loss(raw, x):
        w = p.apply(raw)
        return jnp.sum((x @ (w["w"] * (w["s"][:, None, None] * w["t"][None]).reshape(4, 4))) ** 2)

    with in_factors():
        found = jax.jit(jax.value_and_grad(rpx.factored(loss)))(p.init(params), X)
    # Rows and columns of the diagonal have one index, so what splits the columns splits the rows too.
    chex.assert_trees_all_close(found, jax.value_and_grad(loss)(p.init(params), X), rtol=1e-5, atol=1e-5)


def test_columns_of_matrices_that_places_choose_are_those_of_the_array():
    """One of these matrices is not there, so it is zero."""
    p, places, columns = rpx.LowRank(2, rows=(0, 1), columns=2), np.array([1, 9, 0, 2, 1]), np.array([2, 0])
    raw = p.init({"w": normal(3, 4, 4)})

    def loss(raw, x):
        chosen = p.apply(raw)["w"].at[places].get(mode="fill", fill_value=0)[:, :, columns]
        return jnp.sum(jnp.einsum("tk,tkn->tn", x, chosen) ** 2)

    with in_factors():
        found = jax.jit(jax.value_and_grad(rpx.factored(loss)))(raw, X)
    chex.assert_trees_all_close(found, jax.value_and_grad(loss)(raw, X), rtol=1e-4, atol=1e-4)


def test_repeated_rows_beside_other_rows_are_those_of_the_array():
    """The repeated rows have no factor with an axis for rows."""
    p, params = rpx.LowRank(2, where="w"), {"w": W["w"], "row": normal(4, seed=2)}

    def loss(raw, x):
        w = p.apply(raw)
        return jnp.sum((x @ jnp.concatenate([jnp.broadcast_to(w["row"], (2, 4)), w["w"]])) ** 2)

    raw, x = p.init(params), normal(5, 6, seed=3)
    with in_factors():
        found = jax.jit(jax.value_and_grad(rpx.factored(loss)))(raw, x)
    chex.assert_trees_all_close(found, jax.value_and_grad(loss)(raw, x), rtol=1e-4, atol=1e-4)
