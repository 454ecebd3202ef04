"""What attacks found: programs that look linear and are not, or are so in an unusual way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

import reparax as rpx
from reparax.factored._plan import Plan


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


A, B, W, X = normal(6, 1), normal(1, 6, seed=1), normal(6, 6, seed=2), normal(5, 6, seed=3)
IDS = jnp.array([[0, 5, 9], [-7, 2, 6]])


@pytest.fixture(autouse=True)
def _kept(monkeypatch):
    """Weights stay in factors wherever they can, also where that costs more."""
    decide = Plan.decide

    def keep(plan):
        decide(plan)
        for record in plan.records.values():
            record.is_formed = record.is_formed and not any(read.factored is not None for read in record.reads)

    monkeypatch.setattr(Plan, "decide", keep)


def low(r):
    return r["a"] @ r["b"] + r["w"]


def total(y):
    return jnp.sum(jnp.tanh(jnp.abs(y)))


def on_one_device(w, x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def shard(w, x):
        return x @ jax.lax.all_gather(w, "d", tiled=True)

    return jax.shard_map(shard, mesh=mesh, in_specs=(Spec("d"), Spec("d")), out_specs=Spec("d"))(w, x)


def a_row_for_each_device(w, x):
    mesh = jax.make_mesh((6,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:6])

    def shard(w, x):
        return x @ w.reshape(-1)[:, None]

    return jax.shard_map(shard, mesh=mesh, in_specs=(Spec("d"), Spec()), out_specs=Spec(None, "d"))(w, x)


def meta(r, x):
    slope = jax.grad(lambda r: jnp.sum(Told().apply(r)["w"] ** 3))({"w": {"@told": {"u": r["w"], "v": r["b"][0]}}})
    return total(x @ slope["w"]["@told"]["u"])


class Told(rpx.Reparametrization):
    def init_leaf(self, w):
        return {"u": w, "v": w[0]}

    def apply_leaf(self, values):
        return jnp.diag(jnp.diag(values["u"]) * jnp.sin(values["v"]))

    def terms_leaf(self, values):
        return [rpx.Term("i->ii", jnp.diag(values["u"]) * jnp.sin(values["v"]))]


def in_columns(r, x):
    def apply(diagonal):
        return x @ rpx.Diagonal().apply({"w": {"@diagonal": {"x": diagonal}}})["w"]

    return total(jax.vmap(apply, in_axes=1)(r["w"]))


def diagonal(r):
    return rpx.Diagonal().apply({"w": {"@diagonal": {"x": r["b"][0]}}})["w"]


def blocks(r):
    return rpx.Term("aij->(ai)(aj)", r["w"][:, :, None]).array()


LOSSES = {
    "complex data": lambda r, x: total((x + 1j * x[::-1]) @ low(r)),
    "data in float32, a weight in bfloat16": lambda r, x: total(x @ low(r).astype(jnp.bfloat16)),
    "rows that are not there": lambda r, x: total(
        jnp.where((IDS < 6)[..., None] & (IDS >= -6)[..., None], jnp.take(low(r), IDS, axis=0), 0) @ x.T
    ),
    "rows filled with a number": lambda r, x: total(low(r).at[IDS].get(mode="fill", fill_value=1.0)),
    "an overflow in float16": lambda r, x: total(
        x.astype(jnp.float16) @ (r["w"] * 3e-4 * r["b"] * 1e-4).astype("f2") * 1e3
    ),
    "products beyond float16": lambda r, x: total(
        (1e3 * x.astype(jnp.float16))
        @ (jnp.int8(100) * jnp.ones((6, 6), jnp.float16) * (r["b"] * 1e-3).astype(jnp.float16))
    ),
    "the real part of a complex product": lambda r, x: total(
        x @ jnp.real((r["a"] + 1j) @ (r["b"] - 2j)) + x @ ((r["a"] + 1j) @ (r["b"] + 1j)).imag
    ),
    "a batch in the second axis of a told stage": in_columns,
    "a gradient inside of a told stage": meta,
    "division by a sum": lambda r, x: (
        total(x @ (r["b"] / (3 + jnp.abs(low(r))))) + total(x @ (r["b"] / (r["w"] * r["a"])))
    ),
    "a diagonal times an array": lambda r, x: total(x @ (diagonal(r) * r["w"])),
    "two axes of a diagonal": lambda r, x: total(jnp.einsum("bij,ij->b", x[:, :, None] * x[:, None], diagonal(r))),
    "slices of blocks": lambda r, x: (
        total(x @ blocks(r)[:6]) + total(x[:, :3] @ blocks(r)[1:4]) + total(blocks(r)[::-1])
    ),
    "one device": lambda r, x: total(on_one_device(low(r), x)),
    "a row for each device": lambda r, x: total(a_row_for_each_device(low(r), x[:, :6])),
    "nothing at all": lambda r, x: total(x[:, :0] @ low(r)[:0]) + total(x @ (r["a"][:, :0] @ r["b"][:0] + r["w"])),
    "a loop that does not run": lambda r, x: total(
        jax.lax.scan(lambda h, _: (h @ low(r) + jnp.sum(jnp.sin(low(r))), None), x, None, length=0)[0]
    ),
    "a product with itself": lambda r, x: total(
        x @ (low(r)[2:] @ low(r)[:, 2:]).T[:, :3].T[0:3].T[:4].repeat(2, 0)[:6]
    ),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # by jax 0.8.0, of the loss itself
@pytest.mark.parametrize("name", LOSSES)
def test_what_an_attack_found(name):
    raw = {"a": A, "b": B, "w": W}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected, got = (jax.jit(jax.value_and_grad(f))(raw, X) for f in (LOSSES[name], rpx.factored(LOSSES[name])))
        rpx.explain(LOSSES[name], raw, X)
    largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(expected))
    tolerance = 2e-3 if "16" in name and "bfloat" not in name else 1e-5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


def test_terms_that_are_none():
    class Empty(rpx.Reparametrization):
        def init_leaf(self, w):
            return {"w": w}

        def terms_leaf(self, values):
            return []

    with pytest.raises(TypeError, match=r"^terms_leaf must return a list of one Term or more, but returned \[\]\."):
        Empty().init({"w": W})


def test_terms_of_another_shape():
    class Other(Told):
        def terms_leaf(self, values):
            return [rpx.Term("ij->i", values["u"])]

    text = (
        r"^Other\(\).init at 'w': terms_leaf returns terms of shape \(6,\), but apply_leaf returns an array of "
        r"shape \(6, 6\)\. The sum of the terms must equal the array\."
    )
    with pytest.raises(ValueError, match=text):
        Other().init({"w": W})
