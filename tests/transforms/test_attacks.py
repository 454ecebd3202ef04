"""What attacks found: programs that look linear and are not, or are so in an unusual way."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec
from kept import in_factors

import reparax as rpx


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


A, B, W, X = normal(6, 1), normal(1, 6, seed=1), normal(6, 6, seed=2), normal(5, 6, seed=3)
IDS = np.array([[0, 5, 9], [-7, 2, 6]], np.int32)


@pytest.fixture(autouse=True)
def _kept():
    with in_factors():
        yield


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
        return [rpx.stage.Term("i->ii", jnp.diag(values["u"]) * jnp.sin(values["v"]))]


def in_columns(r, x):
    def apply(diagonal):
        return x @ rpx.matrices.Diagonal().apply({"w": {"@diagonal": {"x": diagonal}}})["w"]

    return total(jax.vmap(apply, in_axes=1)(r["w"]))


def diagonal(r):
    return rpx.matrices.Diagonal().apply({"w": {"@diagonal": {"x": r["b"][0]}}})["w"]


def tall(r):
    """258 rows, of which a byte does not count all."""
    return jnp.tile(r["a"], (43, 1)) @ r["b"]


def beyond(r, places, **settings):
    return total(low(r).at[jnp.array(places)].get(**settings))


def mutable(r, x):
    """A mutable array that is written with products and read for products, also in the body of a loop."""
    ref = jax.new_ref(x)
    before = ref[...] @ low(r)
    ref[...] = jnp.tanh(before)

    def step(h, _):
        ref[...] = ref[...] + h @ low(r)
        return jnp.tanh(h + ref[...]), None

    after = jax.lax.scan(step, x, length=2)[0]
    return total(before + after + ref[...] @ low(r).T)


def blocks(r):
    return rpx.stage.Term("aij->(ai)(aj)", r["w"][:, :, None]).array()


LOSSES = {
    "complex data": lambda r, x: total((x + 1j * x[::-1]) @ low(r)),
    "data in float32, a weight in bfloat16": lambda r, x: total(x @ low(r).astype(jnp.bfloat16)),
    "rows that are not there": lambda r, x: total(
        jnp.where((IDS < 6)[..., None] & (IDS >= -6)[..., None], jnp.take(low(r), IDS, axis=0), 0) @ x.T
    ),
    "rows filled with a number": lambda r, x: total(low(r).at[IDS].get(mode="fill", fill_value=1.0)),
    "a slice from before the first row": lambda r, x: total(x @ jax.lax.dynamic_slice(tall(r), (-301, 0), (6, 6))),
    "rows beyond the array": lambda r, x: beyond(r, [1, 100, -9]),
    "rows beyond, clipped": lambda r, x: beyond(r, [1, 100, -9], mode="clip"),
    "rows beyond, of a batch": lambda r, x: total(jax.vmap(lambda i: low(r)[i])(jnp.array([[1, 100], [-9, 3]]))),
    "columns beyond the array": lambda r, x: total(low(r)[:, jnp.array([[1, 2], [3, 100]])]),
    "a result in float16": lambda r, x: total(
        jnp.matmul(10 * x, (2e4 * r["a"]) @ (1e-6 * r["b"]), preferred_element_type=jnp.float16)
    ),
    "a product of other types in float16": lambda r, x: total(
        x @ jnp.matmul(1e5 * r["a"], 1e-5 * r["b"], preferred_element_type=jnp.float16).astype(jnp.float32)
    ),
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
    "a mutable array": mutable,
    "nothing at all": lambda r, x: total(x[:, :0] @ low(r)[:0]) + total(x @ (r["a"][:, :0] @ r["b"][:0] + r["w"])),
    "a loop that does not run": lambda r, x: total(
        jax.lax.scan(lambda h, _: (h @ low(r) + jnp.sum(jnp.sin(low(r))), None), x, None, length=0)[0]
    ),
    "a product with itself": lambda r, x: total(
        x @ (low(r)[2:] @ low(r)[:, 2:]).T[:, :3].T[0:3].T[:4].repeat(2, 0)[:6]
    ),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # by jax 0.8.0, of the loss itself
@pytest.mark.parametrize("name", LOSSES)
def test_what_an_attack_found(name):
    raw = {"a": A, "b": B, "w": W}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        fs = LOSSES[name], rpx.factored(LOSSES[name])
        expected, got = jax.jit(lambda *args: [jax.value_and_grad(f)(*args) for f in fs])(raw, X)
        rpx.explain(LOSSES[name], raw, X)
    largest = max(np.max(np.abs(x)) for x in jax.tree.leaves(expected))
    tolerance = 2e-3 if "16" in name and "bfloat" not in name else 1e-5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_what_attacks_found_in_one_program():
    """Values alone, of those that need no other devices."""
    names = [name for name in LOSSES if "device" not in name and name != "a mutable array"]

    def values(transform, *args):
        return {name: transform(LOSSES[name])(*args) for name in names}

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        both = jax.jit(lambda *args: (values(rpx.factored, *args), values(lambda f: f, *args)))
        got, expected = both({"a": A, "b": B, "w": W}, X)
    for name in names:
        np.testing.assert_allclose(got[name], expected[name], rtol=2e-3 if "16" in name else 1e-5, err_msg=name)


class InTwo(rpx.Reparametrization):
    def init_leaf(self, w):
        return {"u": w[:, :2], "v": w[:2]}

    def apply_leaf(self, values):
        return values["u"] @ values["v"]

    def terms_leaf(self, values):
        return [rpx.stage.Term("ik,kj->ij", values["u"], values["v"])]


def of_members(u, v):
    return X @ InTwo().apply({"w": {"@in_two": {"u": u, "v": v}}})["w"]


def test_members_may_share_a_factor_that_a_stage_tells():
    us, vs = normal(3, 6, 2), normal(4, 2, 6, seed=1)
    one_for_all, each_with_each = jax.jit(
        lambda us, vs: (
            rpx.factored(jax.vmap(of_members, (0, None)), (0, 1))(us, vs[0]),
            rpx.factored(jax.vmap(jax.vmap(of_members, (None, 0)), (0, None)), (0, 1))(us, vs),
        )
    )(us, vs)
    want = np.einsum("bi,mik,nkj->mnbj", X, us, vs)
    np.testing.assert_allclose(one_for_all, want[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(each_with_each, want, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "places"), [("uint8", [1, 250, 255]), ("int8", [1, 127, 5])])
def test_rows_by_integers_that_do_not_count_them(dtype, places):
    def loss(r, places):
        return total(jnp.take(r["a"] @ r["b"], places, axis=0, fill_value=3.0))

    raw = {"a": normal(258, 1), "b": B}
    # XLA without fusion emitters, as in tests, adds nothing to rows by a byte: so int32, and no gradient of the rows.
    expected, slope = jax.jit(jax.value_and_grad(loss))(raw, np.array(places, np.int32))
    got, own = jax.jit(jax.value_and_grad(rpx.factored(loss)))(raw, np.array(places, dtype))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own["b"], slope["b"], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_convolution_with_a_result_in_float16():
    def convolved(r, x):
        kernel = ((2e4 * r["a"]) @ (1e-6 * r["b"])).astype(jnp.bfloat16)
        settings = {"dimension_numbers": ("NWC", "WIO", "NWC"), "preferred_element_type": jnp.float16}
        return jax.lax.conv_general_dilated(10 * x.astype(jnp.bfloat16)[None], kernel[None], (1,), "SAME", **settings)

    raw = {"a": A, "b": B}
    assert [each.is_transformed for each in rpx.explain(convolved, raw, X).weights] == [True]
    expected = 10 * np.asarray(X) @ (2e-2 * np.asarray(A) @ np.asarray(B))
    got = jax.jit(rpx.factored(convolved))(raw, X)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(got[0], expected, rtol=0, atol=0.01 * np.max(np.abs(expected)))


def test_a_cast_of_a_weight_that_fits_where_its_factors_do_not():
    def cast(r, x):
        return x @ (r["a"] @ r["b"]).astype(x.dtype)

    with jax.enable_x64():
        raw = {"a": jnp.full((6, 1), 1e200, "f8"), "b": jnp.full((1, 6), 1e-200, "f8")}
        got = rpx.factored(cast)(raw, X)
    np.testing.assert_allclose(got, np.asarray(X) @ np.ones((6, 6)), rtol=1e-4, atol=1e-5)


def test_integers_that_a_cast_rounds_stay_rounded():
    def loss(r, x):
        return x @ (r["q"].astype(jnp.bfloat16) * r["s"]).astype(jnp.float32)

    raw = {"q": jnp.full((6, 6), 257, jnp.int16), "s": jnp.ones((1, 6), jnp.bfloat16)}
    np.testing.assert_allclose(rpx.factored(loss)(raw, X), np.asarray(X) @ np.full((6, 6), 256.0), rtol=1e-4, atol=1e-3)


def test_an_algorithm_in_float16_keeps_its_operands():
    def made(r, x):
        return x @ jax.lax.dot(r["a"], r["b"], precision="F16_F16_F32")

    def used(r, x):
        return jax.lax.dot(x, r["a"] @ r["b"], precision="F16_F16_F32")

    raw = {"a": A, "b": B}
    assert rpx.explain(made, raw, X).weights == ()
    assert [each.is_transformed for each in rpx.explain(used, raw, X).weights] == [False]


@pytest.mark.thorough
def test_a_rounding_in_bfloat16_stays():
    def loss(r, x):
        return x @ (r["a"] @ r["b"]).astype(jnp.bfloat16).astype(jnp.float32)

    a, b = (jnp.full(shape, 1 + 2**-7) for shape in ((6, 1), (1, 6)))  # their product has 14 digits
    got = rpx.factored(loss)({"a": a, "b": b}, X)
    np.testing.assert_allclose(got, np.asarray(X) @ np.full((6, 6), 1 + 2**-6), rtol=1e-5, atol=1e-6)


def test_terms_in_float16_are_formed():
    raw = {"w": {"@told": {"u": (1e3 * jnp.eye(6)).astype("f2"), "v": jnp.ones(6, "f2")}}}
    assert rpx.explain(lambda raw, x: x @ Told().apply(raw)["w"], raw, X.astype("f2")).weights == ()


@pytest.mark.thorough
@pytest.mark.parametrize("batch", ["b", "2*b"])
def test_a_batch_whose_size_is_not_known_when_the_loss_is_exported(batch):
    def loss(r, x, ids):
        y = jnp.tanh(jnp.einsum("...i,io->...o", x, low(r)))
        return jnp.sum(y) + jnp.sum(low(r)[ids] ** 2), jax.lax.map(lambda x: x @ low(r), x)

    raw, x, ids = {"a": A, "b": B, "w": W}, np.tile(X[None, :4], (2, 3, 1)), np.array([1, 5], "i4")
    (size,) = jax.export.symbolic_shape(batch)
    types = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), jax.ShapeDtypeStruct((size,), ids.dtype)
    got = jax.export.export(jax.jit(rpx.factored(loss)))(raw, *types).call(raw, x, ids)
    for a, b in zip(got, jax.jit(loss)(raw, x, ids), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_the_branches_of_other_platforms_are_not_compiled():
    def on_a_cpu(r, x):
        branches = {"tpu": lambda w: jnp.cos(x @ w), "cuda": lambda w: jnp.cos(x @ w)}
        return jax.lax.platform_dependent(low(r), default=lambda w: jnp.sin(x @ w), **branches)

    raw = {"a": A, "b": B, "w": W}
    step = jax.jit(rpx.factored(on_a_cpu)).lower(raw, X)
    assert "cosine" not in step.as_text()
    np.testing.assert_allclose(step.compile()(raw, X), np.sin(X @ low(raw)), rtol=1e-4, atol=1e-5)


def test_terms_that_are_none():
    class Empty(rpx.Reparametrization):
        def init_leaf(self, w):
            return {"w": w}

        def terms_leaf(self, values):
            return []

    text = "terms_leaf must return a nonempty list, such as [Term(spec, array)], but returned []."
    with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
        Empty().init({"w": W})


def test_terms_of_another_shape():
    class Other(Told):
        def terms_leaf(self, values):
            return [rpx.stage.Term("ij->i", values["u"])]

    text = (
        r"^Other\(\).init at 'w': terms_leaf returns terms of shape \(6,\), but apply_leaf returns an array of "
        r"shape \(6, 6\)\. Return terms whose sum equals this array\."
    )
    with pytest.raises(ValueError, match=text):
        Other().init({"w": W})


@pytest.mark.thorough
def test_what_a_loop_carries_gets_the_gradients_that_it_has_at_a_later_step():
    """A loop carries zero first, then a parameter's sum, at which gradients stop."""
    raw, x = {"a": jnp.full((32, 2), 0.1), "b": jnp.ones((2, 32))}, jnp.ones((4, 32))

    def loss(raw):
        def step(carry, _):
            scale = jax.lax.stop_gradient(carry)
            return carry + jnp.sum(raw["a"]), scale * jnp.sum(x @ (raw["a"] @ raw["b"]))

        return jnp.sum(jax.lax.scan(step, jnp.float32(0), None, length=3)[1])

    got, expected = jax.jit(lambda raw: (jax.grad(rpx.factored(loss))(raw), jax.grad(loss)(raw)))(raw)
    np.testing.assert_allclose(got["a"], expected["a"], rtol=1e-5)
