"""What XLA counts: factors where they cost less, the array where that costs less; and what a stage may say itself."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import init
from grids import mostly_thorough
from jax.extend.core import Primitive
from one_array import normal

import reparax as rpx

KEY = jax.random.key(0)
AXES = (0, None, 0)


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


def operations(f, *args):
    return compiled(jax.grad(f), *args).cost_analysis()["flops"]


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense(w, x):
    for name in sorted(w):
        x = jnp.tanh(x @ w[name])
    return jnp.mean(x**2)


def scanned(w, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w["w"])[0] ** 2)


def product(x, values):
    return x @ values["@fixed"]["w"] + x @ values["a"] @ values["b"]


def dense_by_hand(raw, x):
    for name in sorted(raw):
        x = jnp.tanh(product(x, raw[name]["@lora"]))
    return jnp.mean(x**2)


def scanned_by_hand(raw, x):
    return jnp.mean(jax.lax.scan(lambda h, each: (jnp.tanh(product(h, each)), None), x, raw["w"]["@lora"])[0] ** 2)


SCANNED, STACK = rpx.LoRA(4, stacked=0), {"w": floats(4, 256, 256)}
NETWORKS = {
    "unrolled": (dense, dense_by_hand, {f"w{i}": floats(256, 256) for i in range(4)}, rpx.LoRA(4, columns=-1)),
    "scanned": (scanned, scanned_by_hand, STACK, SCANNED),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_adapters_cost_what_they_cost_by_hand(name):
    network, by_hand, weights, lora = NETWORKS[name]
    x = floats(512, 256)
    raw = jax.eval_shape(lora.init, weights, KEY)
    train, rest = rpx.partition(raw)

    def loss(train, rest, x):
        return network(lora.apply(rpx.combine(train, rest)), x)

    full = operations(network, weights, x)
    least = operations(lambda train, rest, x: by_hand(rpx.combine(train, rest), x), train, rest, x)
    assert least <= 0.72 * full
    assert operations(rpx.factored(loss), train, rest, x) <= 1.01 * least
    assert operations(rpx.remat(rpx.factored(loss)), train, rest, x) <= 1.02 * least
    assert operations(loss, train, rest, x) >= 0.98 * full


def test_the_steps_of_a_loop_are_not_counted():
    def loss(raw, x):
        return scanned(SCANNED.apply(raw), x)

    text = str(jax.make_jaxpr(rpx.factored(loss))(jax.eval_shape(SCANNED.init, STACK, KEY), floats(512, 256)))
    assert "scan[" in text
    assert "iota" not in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "order", [lambda f: jax.vmap(rpx.factored(f), AXES), lambda f: rpx.factored(jax.vmap(f, AXES))]
)
def test_examples_with_adapters_of_their_own_multiply_by_the_base_at_once(order):
    layers, n, batch, time, rank = 3, 128, 5, 8, 4
    p, seeds = rpx.Freeze() >> rpx.LoRA(rank, stacked=0), itertools.count()
    train, rest = rpx.partition(jax.eval_shape(p.init, {"w": floats(layers, n, n)}, KEY))
    rest = jax.tree.map(lambda x: normal(*x.shape, seed=next(seeds), scale=n**-0.5), rest)
    bank = jax.tree.map(lambda x: normal(4, *x.shape, seed=next(seeds), scale=0.1), train)
    x, ids = normal(batch, time, n, seed=next(seeds)), np.array([3, 0, 0, 2, 3], np.int32)

    def plain(w, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    def network(train, rest, x):
        return plain(p.apply(rpx.combine(train, rest))["w"], x)

    def mixed(bank, rest, x):
        return order(network)(jax.tree.map(lambda each: each[ids], bank), rest, x)

    def counted(f, *args):
        return compiled(f, *args).cost_analysis()["flops"]

    base = counted(plain, floats(layers, n, n), x)
    layers_counted = round(base / (2 * batch * time * n * n))  # XLA of today counts the body of a scan once
    products, sums = 2 * batch * time * rank * 2 * n, batch * time * n
    assert counted(mixed, bank, rest, x) - base == pytest.approx(layers_counted * (products + sums), rel=0.01)
    one = jax.jit(network)
    apart = [one(jax.tree.map(lambda each, i=i: each[i], bank), rest, row) for i, row in zip(ids, x, strict=True)]
    assert np.allclose(jax.jit(mixed)(bank, rest, x), np.stack(apart), atol=1e-5)


def test_packed_projections_cost_what_they_cost_by_hand_but_for_a_few_zeros():
    blocks = rpx.shared.Concat(("q: 160 240", "k: 160 80", "v: 160 80"), axis=1)
    p = rpx.Freeze() >> rpx.LoRA(4, columns=-1, where=".*/(q|v)") >> rpx.shared.Pack({"kernel": blocks}, where="qkv")
    train, rest = rpx.partition(jax.eval_shape(p.init, {"qkv": {"kernel": floats(160, 400)}}, KEY))
    x = floats(64, 160)

    def loss(train, rest, x):
        return jnp.mean(jnp.sin(x @ p.apply(rpx.combine(train, rest))["qkv"]["kernel"]))

    def by_hand(train, rest, x):
        parts = rpx.combine(train, rest)["qkv"]["kernel"]["@pack"]
        q, v = (parts[name]["@lora"] for name in "qv")
        bases = [each["@freeze"]["@fixed"]["w"] for each in (q["@fixed"]["w"], parts["k"], v["@fixed"]["w"])]
        y, z = (x @ each["a"] @ each["b"] for each in (q, v))
        outs = [x @ bases[0] + y, x @ bases[1], x @ bases[2] + z]
        return jnp.mean(jnp.sin(jnp.concatenate(outs, 1)))

    full, least, found = (operations(each, train, rest, x) for each in (loss, by_hand, rpx.factored(loss)))
    assert least <= 0.55 * full
    assert found <= 1.1 * least


JOINED = {
    "columns": (lambda w, x: x @ jnp.concatenate([w["q"], w["k"], w["v"]], 1), rpx.Freeze() >> rpx.LoRA(2, columns=-1)),
    "rows": (lambda w, x: x @ jnp.concatenate([w["q"], w["k"]]).reshape(2, 96, 64)[1], rpx.LoRA(2, columns=-1)),
    "few bits": (
        lambda w, x: x @ jnp.concatenate([w["q"], w["k"]], 1),
        rpx.Quantized("int8") >> rpx.LoRA(2, columns=-1, where="q"),
    ),
    "one of factors alone": (
        lambda w, x: x @ jnp.concatenate([w["q"], w["k"]], 1),
        rpx.LowRank(2, where="q") >> rpx.LoRA(2, columns=-1, where="k"),
    ),
    "stacked": (
        lambda w, x: jnp.einsum("bi,ieo->ebo", x, jnp.stack([w["q"], w["k"]], 1)),
        rpx.Freeze() >> rpx.LoRA(2, columns=-1),
    ),
    "layers": (
        lambda w, x: jax.lax.scan(lambda c, w: (c, x @ w), 0, jnp.stack([w["q"], w["k"], w["v"]]))[1],
        rpx.Freeze() >> rpx.LoRA(2, columns=-1),
    ),
}


@pytest.mark.parametrize("name", mostly_thorough(JOINED, "columns", "layers", "one of factors alone"))
def test_arrays_that_are_joined_stay_in_factors(name):
    network, p = JOINED[name]
    weights = {key: normal(96, 64, seed=i) for i, key in enumerate("qkv")}
    raw, x = (
        jax.tree.map(lambda x: x + 0.1 if x.dtype == jnp.float32 else x, init(p, weights, KEY)),
        normal(64, 96, seed=3),
    )

    def loss(raw, x):
        return jnp.mean(jnp.sin(network(p.apply(raw), x)))

    assert any(each.is_transformed for each in rpx.explain(loss, raw, x).weights)
    got, want = jax.jit(
        lambda *args: [jax.value_and_grad(each, allow_int=True)(*args) for each in (rpx.factored(loss), loss)]
    )(raw, x)
    floating = [(a, b) for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True) if a.dtype == jnp.float32]
    for a, b in floating:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(b).max()))


def test_a_weight_that_a_formula_needs_as_an_array_is_told():
    p = rpx.Freeze() >> rpx.LoRA(1) >> rpx.quantized.Cast("float16")
    raw = jax.eval_shape(p.init, {"w": floats(64, 64)}, KEY)
    (weight,) = rpx.explain(lambda raw, x: x @ p.apply(raw)["w"], raw, jax.ShapeDtypeStruct((8, 64), "float16")).weights
    assert (weight.path, weight.is_transformed) == ("raw/w", False)
    assert weight.reason.startswith("convert_element_type needs the array")


def test_a_weight_that_a_branch_returns_is_not_in_factors():
    p = rpx.Freeze() >> rpx.LoRA(1)
    raw = jax.eval_shape(p.init, {"w": floats(64, 64)}, KEY)

    def loss(raw, x):
        return x @ jax.lax.cond(jnp.sum(x) > 0, lambda w: w, lambda w: 2 * w, p.apply(raw)["w"])

    assert not any(each.is_transformed for each in rpx.explain(loss, raw, floats(8, 64)).weights)


def test_a_large_rank_is_formed_and_a_small_one_is_not():
    def explained(rank, rows):
        low = rpx.Freeze() >> rpx.LoRA(rank)
        raw = jax.eval_shape(low.init, {"w": floats(128, 128)}, KEY)
        weights = rpx.explain(lambda raw, x: jnp.sum(jnp.tanh(x @ low.apply(raw)["w"])), raw, floats(rows, 128)).weights
        return weights[0].is_transformed, weights[0].reason

    apart, reason = explained(4, 512)
    assert apart
    assert reason.startswith("1 product, 0.")
    apart, reason = explained(60, 512)
    assert not apart
    assert reason.startswith("1 product; factors would take 1.")


@pytest.mark.parametrize("rank", mostly_thorough((16, 64), 64))
def test_factors_that_are_together_as_large_as_the_weight_are_not_formed_for_a_few_rows(rank):
    p = rpx.LowRank(rank)
    raw, x = jax.eval_shape(p.init, {"w": floats(2 * rank, 2 * rank)}), floats(8, 2 * rank)

    def by_hand(raw, x):
        values = raw["w"]["@low_rank"]
        return jnp.sum(jnp.tanh(x @ values["u"] @ values["v"]) ** 2)

    def loss(raw, x):
        return jnp.sum(jnp.tanh(x @ p.apply(raw)["w"]) ** 2)

    assert operations(rpx.factored(loss), raw, x) <= 1.01 * operations(by_hand, raw, x) < 0.6 * operations(loss, raw, x)


NUMBERS = {
    "1 + w": (lambda w: 1 + w, 1, 1),
    "1 - w": (lambda w: 1 - w, -1, 1),
    "w / 2 - 3": (lambda w: w / 2 - 3, 0.5, -3),
    "an array of one number": (lambda w: jnp.full((1, 1), 3.0) - 2 * w, -2, 3),
}


def of_factors(change):
    """A loss in which a number meets a weight of two factors."""
    return lambda factors, x: jnp.sum(jnp.tanh(x @ change(factors["a"] @ factors["b"])))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_added_leaves_a_weight_in_factors(name):
    change, scale, shift = NUMBERS[name]
    factors, x = {"a": floats(256, 4), "b": floats(4, 256)}, floats(512, 256)

    def by_hand(factors, x):
        y = scale * (x @ factors["a"] @ factors["b"]) + shift * jnp.sum(x, axis=1, keepdims=True)
        return jnp.sum(jnp.tanh(y))

    loss = of_factors(change)
    least = operations(by_hand, factors, x)
    assert operations(rpx.factored(loss), factors, x) <= 1.05 * least < 0.2 * operations(loss, factors, x)


@pytest.mark.thorough
def test_values_of_a_weight_in_factors_with_a_number_added():
    a, b, x = normal(6, 2), normal(2, 5), normal(9, 6)
    losses = [rpx.factored(of_factors(change)) for change, *_ in NUMBERS.values()]
    slopes = jax.jit(lambda *args: [jax.value_and_grad(loss)(*args) for loss in losses])({"a": a, "b": b}, x)
    a, b, x = (np.asarray(each, np.float64) for each in (a, b, x))
    for (value, slope), (_, scale, shift) in zip(slopes, NUMBERS.values(), strict=True):
        y = np.tanh(x @ (scale * a @ b + shift))
        pulled = scale * x.T @ (1 - y**2)
        np.testing.assert_allclose(value, y.sum(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(slope["a"], pulled @ b.T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(slope["b"], a.T @ pulled, rtol=1e-4, atol=1e-5)


def test_a_plan_reads_types_and_traces_nothing_that_reads_no_weight():
    traced = []

    class Probe(Primitive):
        def bind(self, *args, **params):
            traced.append(args)
            return super().bind(*args, **params)

    probe = Probe("probe")
    probe.def_abstract_eval(lambda x: x)

    def loss(values, x):
        return jnp.sum(probe.bind(probe.bind(x) @ (values["a"] @ values["b"])))

    jax.make_jaxpr(rpx.factored(loss))({"a": floats(64, 2), "b": floats(2, 64)}, floats(512, 64))
    assert len(traced) == 4  # as the loss is traced, and as its program is evaluated


def test_what_is_formed_is_formed_once_by_the_formula_of_the_loss():
    p = rpx.LoRA(4)
    raw, x = init(p, {"w": normal(16, 16)}, KEY), np.ones(2, np.float32)

    def loss(raw, x):
        w = p.apply(raw)["w"]
        return jnp.sum(jnp.abs(w)) + jnp.sum(jnp.sin(w)) + jnp.sum(x)

    program = jax.make_jaxpr(rpx.factored(loss))(raw, x)
    assert str(program).count("dot_general[") == 1
    assert jax.jit(rpx.factored(loss))(raw, x) == jax.jit(loss)(raw, x)


# ---- stages of others


class Told(rpx.Reparametrization):
    """A stage that says terms and nothing else."""

    raw_values = {"w": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"w": w, "a": jnp.ones((w.shape[0], 1)), "b": jnp.zeros((1, w.shape[1]))}

    def terms_leaf(self, values):
        return [rpx.stage.Term("ij->ij", values["w"]), rpx.stage.Term("ir,rj->ij", values["a"], values["b"])]


class Opaque(Told):
    """A stage whose formula cannot be read."""

    def apply_leaf(self, values):
        return values["w"] + jnp.exp(jnp.log1p(values["a"] @ values["b"])) - 1

    def terms_leaf(self, values):
        return super().terms_leaf(values)


@pytest.mark.parametrize("stage", [Told, Opaque])
@pytest.mark.parametrize("stacked", mostly_thorough([(), 0, (0, 1)], 0))
def test_a_stage_gets_it_by_its_terms(stage, stacked):
    p = stage(stacked=stacked)
    shape = (*(2, 3)[: len(stacked) if isinstance(stacked, tuple) else 1], 32, 32)
    raw = init(p, {"w": normal(*shape)})
    train, rest = rpx.partition(raw)
    train = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1), train)

    def loss(train, x):
        w = p.apply(rpx.combine(train, rest))["w"]
        return jnp.mean(jnp.tanh(jnp.einsum("bi,...ij->...bj", x, w)))

    x = normal(256, 32, seed=1)
    assert [each.is_transformed for each in rpx.explain(loss, train, x).weights] == [True]
    expected, got = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (loss, rpx.factored(loss))])(train, x)
    largest = max(np.max(np.abs(x)) for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest)


def test_a_class_with_another_formula_does_not_inherit_the_terms():
    class Doubled(Opaque):
        def apply_leaf(self, values):
            return 2 * super().apply_leaf(values)

    def loss(raw, x):
        return jnp.sum(x @ Doubled().apply(raw)["w"])

    raw, x = init(Doubled(), {"w": np.eye(8, dtype=np.float32)}), np.ones((64, 8), np.float32)
    (weight,) = rpx.explain(loss, raw, x).weights
    assert weight.reason.startswith("log1p needs the array")
    got, expected = jax.jit(lambda *args: (rpx.factored(loss)(*args), loss(*args)))(raw, x)
    assert np.allclose(got, expected, rtol=1e-5)


@pytest.mark.thorough
def test_the_terms_are_those_of_the_formula_under_a_derivative_inside():
    p = Opaque()
    raw = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1), init(p, {"w": normal(8, 8)}))

    def loss(raw, x):
        return jnp.sum(jax.grad(lambda raw: jnp.sum(jnp.sin(x @ p.apply(raw)["w"])))(raw)["w"]["@opaque"]["a"])

    x = np.ones((64, 8), np.float32)
    got, expected = jax.jit(lambda *args: (rpx.factored(loss)(*args), loss(*args)))(raw, x)
    assert np.allclose(got, expected, rtol=1e-5)


# ---- what users see


def test_explain_says_where_and_why():
    p = rpx.Freeze() >> rpx.LoRA(1, columns=-1)
    names = ["folded", "free", "given", "norm"]
    raw = jax.eval_shape(p.init, {name: floats(64, 64) for name in names}, KEY)

    def loss(raw, x):
        w = p.apply(raw)
        return jnp.sum(x @ w["free"]) + jnp.sum(jnp.abs(w["norm"])) + jnp.sum(x @ w["folded"] @ w["folded"].T), w[
            "given"
        ]

    lines = repr(rpx.explain(loss, raw, floats(512, 64))).splitlines()
    assert lines[0] == "with rpx.factored, 2 of 4 weights with factors are never formed for a product"
    assert [line.split()[0] for line in lines[1:]] == [
        "in",
        "raw/folded",
        "raw/free",
        "formed:",
        "raw/given",
        "raw/norm",
    ]
    assert "2 products, 0.7" in lines[2]
    assert lines[5].endswith("it is returned, or carried")
    assert "abs needs the array: " in lines[6]
    assert "test_costs.py" in lines[6]
    for wrap in (rpx.factored, lambda loss: jax.jit(rpx.factored(loss))):
        own = repr(rpx.explain(wrap(loss), raw, floats(512, 64))).splitlines()
        assert own == [lines[0].removeprefix("with rpx.factored, "), *lines[1:]]


def test_explain_says_that_a_convolution_is_grouped():
    p = rpx.LoRA(1, rows=(0, 1, 2), columns=3)
    raw = jax.eval_shape(p.init, {"k": floats(3, 3, 2, 8)}, KEY)

    def loss(raw, x):
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, p.apply(raw)["k"], (1, 1), "SAME", dimension_numbers=names, feature_group_count=4
        )

    assert "a grouped conv_general_dilated needs the array" in repr(rpx.explain(loss, raw, floats(2, 5, 5, 8)))


def test_explain_leaves_out_what_formulas_read():
    p = rpx.LowRank(1, where="w") >> rpx.Tie({"v": ("w", jnp.tanh)})
    raw = jax.eval_shape(p.init, {"w": floats(64, 64), "v": floats(64, 64)})
    text = repr(rpx.explain(lambda raw, x: sum(jnp.sum(x @ w) for w in p.apply(raw).values()), raw, floats(8, 64)))
    assert "  1 product, " in text
    assert "tanh" not in text


def test_explain_leaves_out_what_is_made_of_constants():
    def loss(raw, x):
        return x @ (jnp.ones((64, 1)) @ jnp.ones((1, 64))) + raw

    assert rpx.explain(loss, floats(8, 64), floats(8, 64)).weights == ()


def test_layers_are_told_in_one_line():
    p = rpx.LowRank(1)
    raw = jax.eval_shape(p.init, {f"layer{i}": floats(64, 64) for i in range(12)}, KEY)
    text = repr(rpx.explain(lambda raw, x: sum(jnp.sum(x @ w) for w in p.apply(raw).values()), raw, floats(8, 64)))
    assert "raw/layer0..11  12 x float32[64, 64]  1 product" in text
