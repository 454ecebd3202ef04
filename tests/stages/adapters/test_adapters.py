"""Adapters against their formulas, the papers' starts, and each other."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
from compiled import effective, fold, init, pulled
from errors import table
from grids import mostly_thorough

import reparax as rpx
from reparax.stages.adapters import _adapters

SHAPES = (5, 3), (3, 4)


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype), dtype)


def model():
    return {"dense": {"kernel": normal(8, 6), "bias": normal(6, seed=1)}, "out": {"kernel": normal(6, 4, seed=2)}}


def values(raw, mark="@lora", path=("dense", "kernel")):
    node = raw
    for name in path:
        node = node[name]
    return node[mark]


def trains(p, raw, key=None):
    """The paths of what one step of SGD moves."""

    @jax.jit
    def step(raw):
        opt = rpx.optimizer(optax.sgd(0.1))
        moved = jax.tree.map(lambda x: x + 0.1 if jnp.issubdtype(x.dtype, jnp.floating) else x, rpx.partition(raw)[0])
        start = rpx.combine(moved, rpx.partition(raw)[1])

        def loss(raw):
            return sum(jnp.sum(w**2) for w in jax.tree.leaves(p.apply(raw, key)))

        updates, _ = opt.update(jax.grad(loss, allow_int=True)(start), opt.init(start), start)
        return start, optax.apply_updates(start, updates)

    before, after = map(jax.tree_util.tree_leaves_with_path, step(raw))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, x), (_, y) in zip(before, after, strict=True)
        if not np.array_equal(x, y)
    }


# LoRA. -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "factor"),
    [
        (rpx.LoRA(2), 1.0),
        (rpx.LoRA(2, 6.0), 3.0),
        (rpx.LoRA(4, 6, use_rslora=True), 3.0),
        (rpx.LoRA(2, use_rslora=True), 1.0),
    ],
)
def test_lora_is_the_base_and_a_scaled_product(p, factor):
    raw = init(p, model(), jax.random.key(0))
    held = values(raw)
    held["b"] = normal(*held["b"].shape, seed=5)
    a, b, w = (np.asarray(x, np.float64) for x in (held["a"], held["b"], held["@fixed"]["w"]))
    np.testing.assert_allclose(effective(p, raw)["dense"]["kernel"], w + factor * a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    mostly_thorough(
        itertools.product(["kaiming", "gaussian"], ["float32", "bfloat16", "float16"]),
        ("kaiming", "float32"),
        ("gaussian", "bfloat16"),
    ),
    ids=" ".join,
)
def test_a_zero_factor_keeps_the_model_bit_for_bit(case):
    start, dtype = case
    params = jax.tree.map(lambda w: np.asarray(w).astype(dtype), model())
    p = rpx.LoRA(2, 16.0, init_weights=start)
    raw = init(p, params, jax.random.key(3))
    got = effective(p, raw)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b) and a.dtype == b.dtype, got, params))
    assert {x.dtype for x in values(raw).values() if not isinstance(x, dict)} == {jnp.dtype(dtype)}


def test_starts_are_those_of_peft():
    def drawn(p, seed):
        return np.asarray(init(p, {"kernel": normal(4096, 8)}, jax.random.key(seed))["kernel"]["@lora"]["a"])

    uniform, bound = drawn(rpx.LoRA(8), 0), 1 / 64
    assert np.max(np.abs(uniform)) <= bound
    # The standard error of the variance of n uniform numbers is sqrt(4 / 5 / n) of it.
    assert abs(np.var(uniform) / (bound**2 / 3) - 1) < 5 * np.sqrt(0.8 / uniform.size)
    gaussian = drawn(rpx.LoRA(8, init_weights="gaussian"), 0)
    assert abs(np.std(gaussian) * 8 - 1) < 5 / np.sqrt(2 * gaussian.size)
    assert not np.array_equal(uniform, drawn(rpx.LoRA(8), 1))


def test_pissa_moves_the_principal_part_out_of_the_base():
    params, p = model(), rpx.LoRA(3, 6.0, init_weights="pissa")
    raw = init(p, params)
    held = jax.tree.map(np.asarray, values(raw))
    left, singular, right = np.linalg.svd(np.asarray(params["dense"]["kernel"], np.float64))
    principal = (left[:, :3] * singular[:3]) @ right[:3]
    np.testing.assert_allclose(2.0 * held["a"] @ held["b"], principal, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(held["a"], axis=0), np.sqrt(singular[:3] / 2.0), rtol=1e-5)
    np.testing.assert_allclose(held["@fixed"]["w"], params["dense"]["kernel"] - principal, atol=1e-5)
    np.testing.assert_allclose(effective(p, raw)["dense"]["kernel"], params["dense"]["kernel"], atol=1e-5)


def test_olora_starts_with_an_orthogonal_factor():
    params, p = model(), rpx.LoRA(3, init_weights="olora")
    held = jax.tree.map(np.asarray, values(init(p, params)))
    q, r = np.linalg.qr(np.asarray(params["dense"]["kernel"], np.float64).T)
    np.testing.assert_allclose(held["a"] @ held["b"], (q[:, :3] @ r[:3]).T, atol=1e-5)
    np.testing.assert_allclose(held["b"] @ held["b"].T, np.eye(3), atol=1e-5)


def test_alpha_may_be_traced_and_zero_is_the_base():
    params = model()
    raw = init(rpx.LoRA(2, 1.0), params, jax.random.key(0))
    values(raw)["b"] = normal(2, 6, seed=4)
    weight = jax.jit(lambda alpha: rpx.LoRA(2, alpha).apply(raw)["dense"]["kernel"])
    np.testing.assert_array_equal(weight(0.0), params["dense"]["kernel"])
    np.testing.assert_allclose(weight(3.0), effective(rpx.LoRA(2, 3.0), raw)["dense"]["kernel"], rtol=1e-6)
    assert weight._cache_size() == 1


def test_the_gradient_of_a_is_zero_at_the_start_and_the_base_has_none():
    p = rpx.LoRA(2)
    raw = init(p, model(), jax.random.key(0))
    grads = values(jax.jit(jax.grad(lambda raw: jnp.sum(p.apply(raw)["dense"]["kernel"] ** 3)))(raw))
    grads = jax.tree.map(np.asarray, grads)
    assert not grads["a"].any()
    assert grads["b"].any()
    assert not grads["@fixed"]["w"].any()


def test_several_rows_and_columns_are_those_of_the_reshaped_matrix():
    w = normal(5, 4, 3)
    key = jax.random.key(0)
    for rows, columns, order in ((0, (1, 2), (0, 1, 2)), ((1, 2), 0, (1, 2, 0)), (1, None, (1, 0, 2))):
        p = rpx.LoRA(2, 4.0, rows=rows, columns=columns)
        raw = init(p, {"kernel": w}, key)
        held = raw["kernel"]["@lora"]
        assert np.array_equal(held["@fixed"]["w"], w)
        held["b"] = normal(*held["b"].shape, seed=3)
        count = 1 if isinstance(rows, int) else 2
        n = int(np.prod([w.shape[i] for i in order[:count]]))
        turned = np.asarray(w).transpose(order)
        product = np.asarray(held["a"]).reshape(n, 2) @ np.asarray(held["b"]).reshape(2, -1)
        want = (turned.reshape(n, -1) + 2.0 * product).reshape(turned.shape).transpose(np.argsort(order))
        np.testing.assert_allclose(effective(p, raw)["kernel"], want, rtol=1e-5, atol=1e-5)
        assert held["a"].shape[-1] == held["b"].shape[0] == 2


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_factors_of_a_smaller_rank_are_the_nearest_and_balanced(dtype):
    real, imaginary = ([np.asarray(normal(*shape, seed=seed)) for shape in SHAPES] for seed in (1, 2))
    a, b = ((x + 1j * y if dtype == "complex64" else x).astype(dtype) for x, y in zip(real, imaginary, strict=True))
    found = jax.jit(_adapters._nearest_factors, static_argnums=2)(a, b, 2)
    left, singular, right = np.linalg.svd(a.astype(complex) @ b)
    got_a, got_b = map(np.asarray, found)
    assert got_a.dtype == got_b.dtype == dtype
    np.testing.assert_allclose(got_a @ got_b, left[:, :2] * singular[:2] @ right[:2], rtol=1e-4, atol=1e-5)
    for gram in (got_a.conj().T @ got_a, got_b @ got_b.conj().T):
        np.testing.assert_allclose(gram, np.diag(singular[:2]), rtol=1e-4, atol=1e-4)


def test_a_larger_rank_appends_what_is_fresh_and_zeros():
    old, new = rpx.LoRA(2, alpha=2.0), rpx.LoRA(3, alpha=6.0)
    a, b, w, fresh = (np.asarray(normal(*shape, seed=i)) for i, shape in enumerate([(5, 2), (2, 4), (5, 4), (5, 3)]))
    got = jax.jit(lambda values, fresh: new._convert(old, values, fresh))({"a": a, "b": b, "w": w}, {"a": fresh})
    np.testing.assert_array_equal(got["a"], np.concatenate([a, fresh[:, 2:]], axis=1))
    np.testing.assert_allclose(got["b"], np.concatenate([b / 2, np.zeros((1, 4), np.float32)]), rtol=1e-6)
    np.testing.assert_array_equal(got["w"], w)
    assert new._grown_values(old) == ("a",)
    assert rpx.LoRA(3, alpha=3.0)._grown_values(old) == ("a", "b")
    assert old._grown_values(new) == ()


# What trains, and what stages to the left see. ---------------------------------------------------------------------


def lora_of(path):
    return {f"{path}/@lora/a", f"{path}/@lora/b"}


def test_freeze_leaves_the_adapters_alone():
    p = rpx.Freeze() >> rpx.LoRA(2)
    assert trains(p, init(p, model(), jax.random.key(0))) == lora_of("dense/kernel") | lora_of("out/kernel")
    some = rpx.Freeze() >> rpx.LoRA(2, where="out/.*")
    assert trains(some, init(some, model(), jax.random.key(0))) == lora_of("out/kernel")
    dora = rpx.Freeze() >> rpx.LoRA(2, where="out/kernel") >> rpx.WeightNorm(where="out/.*", detach=True)
    assert trains(dora, init(dora, model(), jax.random.key(0))) == {
        "out/kernel/@weight_norm/g",
        "out/kernel/@weight_norm/v/@lora/a",
        "out/kernel/@weight_norm/v/@lora/b",
    }


def test_other_stages_see_the_factors():
    params, key = model(), jax.random.key(0)
    p = rpx.VarNoise(0.5, where="dense/kernel") >> rpx.LoRA(2)
    raw = init(p, params, jax.random.key(0))
    quiet = np.asarray(fold(p, raw)["dense"]["kernel"])
    shift = np.asarray(effective(p, raw, key)["dense"]["kernel"]) - quiet
    assert np.linalg.matrix_rank(shift, tol=1e-5) == 2  # of the noisy product; noise on the base would have full rank


def test_what_stores_takes_the_base_by_the_path_of_the_array():
    p = rpx.Quantized("int8", where="dense/kernel") >> rpx.LoRA(2)
    raw = init(p, model(), jax.random.key(0))
    held = values(raw)
    assert set(held["@fixed"]["w"]) == {"@quantized"}
    assert held["a"].dtype == jnp.float32
    stored = rpx.Quantized("int8", where="dense/kernel")
    want = effective(stored, init(stored, model()))
    np.testing.assert_array_equal(effective(p, raw)["dense"]["kernel"], want["dense"]["kernel"])


def test_a_stage_that_takes_bases_cannot_select_what_is_added():
    p = rpx.Quantized("int8", where="dense/kernel/a") >> rpx.LoRA(2)
    with pytest.raises(ValueError, match="no whole path matches 'dense/kernel/a'"):
        init(p, model(), jax.random.key(0))


# Differences, products, gains and vectors. -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "shape", "spread"),
    [(None, (), ()), (-1, (6,), (1, 6)), (0, (8,), (8, 1)), ((0, 1), (8, 6), (8, 6)), ("each", (8, 6), (8, 6))],
)
def test_gain_multiplies_along_its_axes(axis, shape, spread):
    p = rpx.adapters.Gain(axis=axis, where="dense/kernel")
    raw = init(p, model())
    assert values(raw, "@gain")["g"].shape == shape
    g = normal(*shape, seed=3)
    values(raw, "@gain")["g"] = g
    want = np.asarray(g).reshape(spread) * np.asarray(model()["dense"]["kernel"])
    np.testing.assert_allclose(effective(p, raw)["dense"]["kernel"], want, rtol=1e-6)


def test_vera_draws_factors_from_its_seed_and_stores_vectors_alone():
    p = rpx.Freeze() >> rpx.adapters.VeRA(5, 0.1, seed=7, columns=-1)
    params = {"x": normal(8, 6), "y": normal(8, 6, seed=1), "z": normal(4, 6, seed=2)}
    factors = jax.jit(lambda w: (*rpx.adapters.VeRA(5, seed=7).factors(w), rpx.adapters.VeRA(5, seed=8).factors(w)[0]))
    raw = init(p, params)
    free, _ = rpx.partition(raw)
    assert sum(x.size for x in jax.tree.leaves(free)) == 3 * (5 + 6)
    assert jax.tree.all(jax.tree.map(np.array_equal, effective(p, raw), params))
    for node in raw.values():
        node["@vera"] |= {"d": normal(5, seed=3), "b": normal(6, seed=4)}
    shift = jax.tree.map(lambda w, start: np.asarray(w) - np.asarray(start), effective(p, raw), params)
    np.testing.assert_allclose(shift["x"], shift["y"], atol=1e-5)
    left, right, other = map(np.asarray, factors(params["x"]))
    d, b = np.asarray(normal(5, seed=3), np.float64), np.asarray(normal(6, seed=4), np.float64)
    np.testing.assert_allclose(shift["x"], left @ np.diag(d) @ right @ np.diag(b), atol=1e-4)
    assert np.max(np.abs(left)) <= np.sqrt(6 / 8)
    assert np.max(np.abs(right)) <= np.sqrt(6 / 5)
    assert not np.array_equal(left, other)


# DoRA. -------------------------------------------------------------------------------------------------------------


def test_a_detached_norm_gives_the_same_weight_and_the_gradient_of_a_constant_length():
    w, upstream = normal(8, 6), normal(8, 6, seed=1)
    detached, whole = rpx.WeightNorm(detach=True), rpx.WeightNorm()
    raw = init(whole, {"w": w})
    raw["w"]["@weight_norm"]["g"] = np.full((1, 6), 2.0, np.float32)
    np.testing.assert_array_equal(effective(detached, raw)["w"], effective(whole, raw)["w"])
    grads = pulled(detached, raw, upstream)["@weight_norm"]
    length = np.linalg.norm(np.asarray(w, np.float64), axis=0, keepdims=True)
    np.testing.assert_allclose(grads["v"], 2.0 / length * np.asarray(upstream), rtol=1e-5)
    np.testing.assert_allclose(
        grads["g"], np.sum(np.asarray(w) / length * np.asarray(upstream), 0, keepdims=True), rtol=1e-5
    )


def test_a_column_of_zeros_under_a_detached_norm_stays_the_base_and_trains():
    p, w = rpx.WeightNorm(detach=True), np.float32([[0, 3], [0, 4]])
    raw = init(p, {"w": w})
    assert np.array_equal(raw["w"]["@weight_norm"]["v"], w)
    first = effective(p, raw)["w"]
    for _ in range(2):  # first the direction moves, then the length
        grads = pulled(p, raw, np.float32([[-3, 0], [-4, 0]]))
        raw = {"w": jax.tree.map(lambda x, slope: x - slope, raw["w"], grads)}
    np.testing.assert_array_equal(first, w)
    np.testing.assert_allclose(effective(p, raw)["w"], [[3, 3], [4, 4]], rtol=1e-6)


# What an attack found. ---------------------------------------------------------------------------------------------


def test_an_own_field_called_base_and_a_stage_without_main_values_are_no_adapters():
    class LogScaled(rpx.Reparametrization):
        base: float = 2.0

        def init_leaf(self, w):
            return {"x": w}

        def apply_leaf(self, values):
            return values["x"]

    class Hidden(rpx.Reparametrization):
        raw_values = {"x": rpx.stage.aux()}

        def init_leaf(self, w):
            return {"x": w}

        def apply_leaf(self, values):
            return values["x"]

    (rpx.Freeze() >> LogScaled()).init({"w": normal(2, 2)})
    raw = (rpx.Freeze(where="w/x") >> Hidden()).init({"w": normal(2, 2)})
    assert not jax.tree.leaves(rpx.partition(raw)[0])


def test_pissa_of_zeros_trains_and_takes_a_negative_alpha():
    p = rpx.LoRA(2, init_weights="pissa")
    raw = init(p, {"w": np.zeros((4, 6), np.float32)})
    grads = pulled(p, raw, normal(4, 6))["@lora"]
    assert np.asarray(grads["a"]).any()
    negative, w = rpx.LoRA(2, -1.0, init_weights="pissa"), normal(4, 6)
    np.testing.assert_allclose(effective(negative, init(negative, {"w": w}))["w"], w, atol=1e-5)


def test_factors_of_vera_depend_on_no_setting():
    w = np.asarray(normal(8, 6))

    def factors(w):
        return jax.jit(lambda w: rpx.adapters.VeRA(4).factors(w))(w)  # traced anew under each setting

    want = factors(w)
    with jax.threefry_partitionable(new_val=False):
        np.testing.assert_array_equal(factors(w)[0], want[0])
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(factors(w)[1], want[1])
    np.testing.assert_array_equal(factors(w.astype(jnp.bfloat16))[0], want[0])


def test_a_rank_may_exceed_the_sizes_of_the_matrix():
    w, p = np.asarray(normal(20, 2)), rpx.LoRA(8, alpha=8.0)
    raw = init(p, {"w": w}, jax.random.key(0))
    a, b = np.asarray(normal(20, 8, seed=1)), np.asarray(normal(8, 2, seed=2))
    assert np.array_equal(fold(p, raw)["w"], w)
    raw["w"]["@lora"] |= {"a": a, "b": b}
    np.testing.assert_allclose(fold(p, raw)["w"], w + a @ b, rtol=1e-5)


# Errors. -----------------------------------------------------------------------------------------------------------


# Rotations and slices. -----------------------------------------------------------------------------------------------


def complex_normal(*shape, seed=0):
    return np.asarray(normal(*shape, seed=seed)) + 1j * np.asarray(normal(*shape, seed=seed + 1))


def numbers(*shape, seed=0):
    return np.asarray(normal(*shape, seed=seed))


W, CUBE, COMPLEX = numbers(8, 6), numbers(2, 3, 4), complex_normal(4, 6)
HALF = np.asarray(W, jnp.bfloat16)
SINGULAR = np.linalg.svd(W, compute_uv=False)


def replaced(w, axis, indices, x):
    """The array with other slices at some indices of an axis."""
    whole = np.array(w)
    whole[(slice(None),) * axis + (list(indices),)] = x
    return whole


def by_blocks(*blocks):
    return scipy.linalg.block_diag(*blocks) @ W


# Of each adapter its weights, other raw values of it, and the weights that these give.
FORMULAS = {
    "delta": (rpx.adapters.Delta(), W, {"x": numbers(8, 6, seed=1)}, W + numbers(8, 6, seed=1)),
    "delta of single to half precision": (
        rpx.adapters.Delta(),
        HALF,
        {"x": numbers(8, 6, seed=1)},
        (HALF.astype(np.float32) + numbers(8, 6, seed=1)).astype(HALF.dtype),
    ),
    "hadamard": (rpx.adapters.Hadamard(), W, {"y": numbers(8, 6, seed=1)}, W * numbers(8, 6, seed=1)),
    "gain of two axes of three": (
        rpx.adapters.Gain(axis=(-1, 0)),
        CUBE,
        {"g": numbers(2, 4, seed=1)},
        CUBE * numbers(2, 4, seed=1)[:, None],
    ),
    "gain of complex numbers": (rpx.adapters.Gain(axis=0), COMPLEX, {"g": numbers(4)}, COMPLEX * numbers(4)[:, None]),
    "slices": (
        rpx.adapters.TrainableSlices([3, np.int64(0)], axis=2, where="w"),
        CUBE,
        {"x": numbers(2, 3, 2, seed=1)},
        replaced(CUBE, 2, (3, 0), numbers(2, 3, 2, seed=1)),
    ),
    "slices of single in half precision": (
        rpx.adapters.TrainableSlices((7, 1)),
        HALF,
        {"x": numbers(2, 6, seed=1)},
        replaced(HALF, 0, (7, 1), numbers(2, 6, seed=1).astype(HALF.dtype)),
    ),
    "blocks": (rpx.adapters.Rotated(4), W, {"r": numbers(4, 2, 2)}, by_blocks(*numbers(4, 2, 2))),
    "a block of all parts": (
        rpx.adapters.Rotated(2, block_share=True),
        W,
        {"r": numbers(1, 4, 4)},
        by_blocks(*[numbers(4, 4)] * 2),
    ),
    "lora of single and half precision": (
        rpx.LoRA(2, 4.0),
        HALF,
        {"a": numbers(8, 2), "b": numbers(2, 6)},
        (HALF.astype(np.float32) + 2 * numbers(8, 2) @ numbers(2, 6)).astype(HALF.dtype),
    ),
    "lora of complex numbers": (
        rpx.LoRA(2, 4.0, init_weights="pissa"),
        COMPLEX,
        {"a": complex_normal(4, 2), "b": complex_normal(2, 6), "w": COMPLEX},
        COMPLEX + 2 * complex_normal(4, 2) @ complex_normal(2, 6),
    ),
    "vera": (rpx.adapters.VeRA(3), COMPLEX, {"d": np.zeros(3, np.complex64)}, COMPLEX),
}


@functools.cache
def started_and_changed():
    """For each formula the raw values, the weights of them, and those of the other raw values, by one program."""

    @jax.jit
    def each(ws, others):
        found = {}
        for name, (p, *_) in FORMULAS.items():
            raw = p.init({"w": ws[name]}, jax.random.key(0))
            ((mark, node),) = raw["w"].items()
            fixed = {"@fixed": {**node.get("@fixed", {}), "w": others[name].pop("w")}} if "w" in others[name] else {}
            changed = {"w": {mark: node | fixed | others[name]}}
            found[name] = node, p.apply(raw)["w"], p.apply(changed)["w"]
        return found

    ws = {name: w for name, (_, w, *_) in FORMULAS.items()}
    return jax.tree.map(np.asarray, each(ws, {name: dict(row[2]) for name, row in FORMULAS.items()}))


@pytest.mark.parametrize("name", FORMULAS)
def test_an_adapter_starts_at_the_weights_and_its_values_change_them(name):
    (_, w, _, want), (_, start, changed) = FORMULAS[name], started_and_changed()[name]
    tolerance = 1e-2 if w.dtype == HALF.dtype else 1e-5
    assert start.dtype == changed.dtype == w.dtype
    wide = np.result_type(np.float32, complex if np.iscomplexobj(w) else float)
    np.testing.assert_allclose(start.astype(wide), w.astype(wide), rtol=1e-5, atol=1e-5 if "complex" in name else 0)
    np.testing.assert_allclose(changed.astype(wide), want.astype(wide), rtol=tolerance, atol=1e-5)


def test_an_adapter_starts_with_the_values_of_its_docstring():
    held = {name: node for name, (node, *_) in started_and_changed().items()}
    assert not held["delta"]["x"].any()
    np.testing.assert_array_equal(held["hadamard"]["x"], W)
    np.testing.assert_array_equal(held["gain of two axes of three"]["g"], np.ones((2, 4)))
    np.testing.assert_array_equal(held["slices"]["x"], CUBE[..., [3, 0]])
    np.testing.assert_array_equal(held["blocks"]["r"], [np.eye(2)] * 4)
    np.testing.assert_array_equal(held["vera"]["d"], np.full(3, np.float32(0.1)))
    singular = np.linalg.svd(COMPLEX, compute_uv=False)
    base = held["lora of complex numbers"]["@fixed"]["w"]
    np.testing.assert_allclose(np.linalg.svd(base, compute_uv=False), [*singular[2:], 0, 0], atol=1e-5)


def test_slices_train_and_the_others_stay():
    stage = rpx.adapters.TrainableSlices((1, 3), where="w")
    assert trains(stage, init(stage, {"w": W})) == {"w/@trainable_slices/x"}


def test_olora_moves_the_scaled_product_out_of_the_base():
    held = jax.tree.map(np.asarray, init(rpx.LoRA(3, 6.0, init_weights="olora"), {"w": W})["w"]["@lora"])
    q, r = np.linalg.qr(W.astype(np.float64).T)
    first = (q[:, :3] @ r[:3]).T
    np.testing.assert_allclose(held["a"] @ held["b"], first, atol=1e-5)
    np.testing.assert_allclose(held["@fixed"]["w"], W - 2 * first, atol=1e-5)


def test_factors_of_vera_fill_their_bounds_and_are_apart():
    left, right = map(np.asarray, jax.jit(lambda w: rpx.adapters.VeRA(32).factors(w))(np.zeros((16, 48), np.float32)))
    for factor, inputs in ((left, 16), (right, 32)):
        scaled = factor / np.sqrt(6 / inputs)
        assert -1 <= scaled.min() < -0.98
        assert 0.98 < scaled.max() <= 1
        assert abs(scaled.mean()) < 5 / np.sqrt(3 * scaled.size)
    some = right.ravel()[: left.size]
    assert abs(np.corrcoef(left.ravel(), some)[0, 1]) < 5 / np.sqrt(left.size)


def test_vera_takes_matrices_without_rows():
    p, w = rpx.adapters.VeRA(2), jax.ShapeDtypeStruct((0, 3), np.float32)
    assert jax.eval_shape(lambda w: p.fold(p.init({"w": w}))["w"], w) == w


# Ranks and factors of another LoRA. --------------------------------------------------------------------------------


def cut(w, rank):
    """The nearest matrix of that rank."""
    left, singular, right = np.linalg.svd(w)
    return (left[:, :rank] * singular[:rank]) @ right[:rank]


A, B = numbers(5, 3, seed=1), numbers(3, 4, seed=2)
CONVERTED = {
    "a larger rank": (rpx.LoRA(5), rpx.LoRA(3), A @ B, ("a", "b")),
    "a smaller rank": (rpx.LoRA(1), rpx.LoRA(3), cut(A @ B, 1), ()),
    "a smaller rank and another factor": (rpx.LoRA(2, 4.0), rpx.LoRA(3), cut(A @ B, 2) / 2, ()),
    "another alpha": (rpx.LoRA(3, 6.0), rpx.LoRA(3, 9.0), 1.5 * A @ B, ("a",)),
    "the same factor of another alpha": (rpx.LoRA(6, 6.0), rpx.LoRA(3, 3.0), A @ B, ("a", "b")),
    "the same factor without alpha": (rpx.LoRA(4, 4.0), rpx.LoRA(3), A @ B, ("a", "b")),
    "the root of the rank": (rpx.LoRA(4, 6.0, use_rslora=True), rpx.LoRA(3, 4.5), A @ B * (1.5 / 3), ("a",)),
    "the same alpha of another rank": (rpx.LoRA(6, 6.0), rpx.LoRA(3, 6.0), 2 * A @ B, ("a",)),
    "no factor": (rpx.LoRA(3, 0.0), rpx.LoRA(3, 6.0), 2 * A @ B, ("a",)),
}


@functools.cache
def converted():
    @jax.jit
    def each(a, b):
        found = {}
        for name, (new, old, *_) in CONVERTED.items():
            fresh = {"a": jnp.full((5, new.rank), 7.0), "b": jnp.full((new.rank, 4), 8.0), "w": jnp.zeros((5, 4))}
            found[name] = new._convert(old, {"a": a, "b": b, "w": jnp.ones((5, 4))}, fresh)
        return found

    return jax.tree.map(np.asarray, each(A, B))


@pytest.mark.parametrize("name", CONVERTED)
def test_factors_of_another_lora_keep_the_difference_or_what_is_nearest(name):
    (new, old, product, grown), held = CONVERTED[name], converted()[name]
    assert (held["a"].shape, held["b"].shape) == ((5, new.rank), (new.rank, 4))
    np.testing.assert_allclose(held["a"] @ held["b"], product, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(held["w"], np.ones((5, 4)))
    assert tuple(new._grown_values(old)) == grown
    if new.rank > 3:  # the first columns stay, and the others are new in A and zeros in B
        np.testing.assert_array_equal(held["a"], np.concatenate([A, np.full((5, new.rank - 3), 7)], 1))
        assert not held["b"][3:].any()
        assert np.array_equal(held["b"][:3], B) is (grown == ("a", "b"))


def test_a_smaller_rank_splits_singular_values_evenly():
    held = converted()["a smaller rank"]
    root = np.sqrt(np.linalg.svd(A @ B, compute_uv=False)[0])
    np.testing.assert_allclose([np.linalg.norm(held["a"]), np.linalg.norm(held["b"])], [root, root], rtol=1e-5)


def test_what_another_lora_takes_over_is_trained_already():
    old = rpx.LoRA(2)
    news = [rpx.LoRA(3), rpx.LoRA(2, 4.0), rpx.LoRA(2, 2.0, use_rslora=True), rpx.LoRA(2, init_weights="gaussian")]

    @jax.jit
    def each(w):
        raw = old.init({"w": w}, jax.random.key(1))
        taken = [rpx.transfer(old, new, raw, nearest=True)["w"]["@lora"]["a"] for new in news]
        return raw["w"]["@lora"]["a"], taken

    before, after = each(W)
    for a in after:
        np.testing.assert_array_equal(a[:, :2], before)


def test_a_traced_factor_is_never_known_to_be_the_same():
    def grown(alpha):
        return rpx.LoRA(4, alpha)._grown_values(rpx.LoRA(4, alpha)), rpx.LoRA(4)._grown_values(rpx.LoRA(4, alpha))

    found = []
    jax.eval_shape(lambda alpha: found.append(grown(alpha)), 1.0)
    assert found == [(("a",), ("a",))]


def test_converted_factors_of_stacked_and_half_precision_layers_have_their_shapes():
    new, old = rpx.LoRA(2, 4.0, stacked=0), rpx.LoRA(3, stacked=0)
    values = {"a": (6, 5, 3), "b": (6, 3, 4), "w": (6, 5, 4)}
    old_values = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in values.items()}
    got = jax.eval_shape(lambda old_values: new._convert(old, old_values, old_values), old_values)
    shapes = {"a": (6, 5, 2), "b": (6, 2, 4), "w": (6, 5, 4)}
    assert got == {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
