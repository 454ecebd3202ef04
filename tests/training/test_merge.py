"""Models merged into one, against the papers' formulas written with numpy."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import fold, init
from errors import raises
from flax import nnx

import reparax as rpx
from reparax._data.seen import Read, Seen

PART = 0.4


def tree(seed, dtype=np.float32):
    draw = np.random.default_rng(seed).standard_normal
    return {"dense": {"kernel": draw((6, 5)).astype(dtype), "bias": draw(7).astype(dtype)}}


BASE, MODELS = tree(0), [tree(1), tree(2), tree(3)]
WEIGHTS = (0.5, 1.0, -0.25)


def trim(task, part):
    """TIES, step 1: the largest entries of each task vector."""
    order = np.argsort(-np.abs(task), axis=None, kind="stable")[: int(part * task.size)]
    kept = np.zeros(task.size)
    kept[order] = 1
    return task * kept.reshape(task.shape)


def elect(tasks, weights, vote):
    """TIES, steps 2 and 3: a sign for each entry, and the mean of those that have it."""
    sign = np.where(vote >= 0, 1, -1)
    out = np.zeros(tasks.shape[1:])
    for place in np.ndindex(out.shape):
        chosen = [w * t[place] for w, t in zip(weights, tasks, strict=True) if np.sign(t[place]) == sign[place]]
        out[place] = sum(chosen) / max(len(chosen), 1)
    return out


def weighted(tasks, weights):
    return sum(w * t for w, t in zip(weights, tasks, strict=True))


def trimmed(tasks):
    return np.stack([trim(task, PART) for task in tasks])


BY_HAND = {
    ("task_arithmetic", ()): weighted,
    ("magnitude_prune", ("density",)): lambda tasks, weights: weighted(trimmed(tasks), weights),
    ("ties", ("density",)): lambda tasks, weights: elect(trimmed(tasks), weights, trimmed(tasks).sum(0)),
    ("ties", ("density", "frequency")): lambda tasks, weights: elect(
        trimmed(tasks), weights, np.sign(trimmed(tasks)).sum(0)
    ),
}


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_a_way_is_the_formula_of_its_paper(case):
    how, given = case
    more = {"density": PART} if "density" in given else {}
    more |= {"majority_sign_method": "frequency"} if "frequency" in given else {}
    got = rpx.merge(MODELS, how, weights=WEIGHTS, base=BASE, **more)

    def want(base, *models):
        base, *models = (np.asarray(x, np.float64) for x in (base, *models))
        return base + BY_HAND[case](np.stack(models) - base, WEIGHTS)

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, jax.tree.map(want, BASE, *MODELS)
    )


def test_a_mean_weighs_models_and_keeps_what_they_share_bit_for_bit():
    models = [model | {"shared": jnp.float32([0.1, 0.7])} for model in MODELS]
    got = rpx.merge(models, weights=(1, 2, 4))
    want = np.average([m["dense"]["kernel"] for m in models], axis=0, weights=(1, 2, 4))
    np.testing.assert_allclose(got["dense"]["kernel"], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["shared"], models[0]["shared"])
    plain = rpx.merge(models)["dense"]["bias"]
    np.testing.assert_allclose(plain, np.mean([m["dense"]["bias"] for m in models], 0), rtol=1e-5, atol=1e-6)


def test_one_model_and_a_negative_weight_forget_what_was_learned():
    got = rpx.merge(MODELS[:1], "task_arithmetic", weights=-1, base=BASE)
    want = jax.tree.map(lambda base, model: 2 * base - model, BASE, MODELS[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)


def test_dare_keeps_a_part_by_chance_and_the_task_vector_in_the_mean():
    base = {name: np.zeros(20_000, np.float32) for name in "ab"}
    models = [jax.tree.map(lambda x: x + 1, base), jax.tree.map(lambda x: x + 2, base)]

    def merged(models, base, key):
        return rpx.merge(models, "dare_linear", base=base, density=0.25, key=key)

    got = jax.tree.map(np.asarray, merged(models, base, jax.random.key(0)))
    found, counts = np.unique(got["a"], return_counts=True)
    np.testing.assert_array_equal(found, [0, 4, 8, 12])  # each model's entry is 0 or 4 times what it was
    want = 20_000 * np.array([0.75**2, 0.25 * 0.75, 0.75 * 0.25, 0.25**2])
    assert (np.abs(counts - want) < 5 * np.sqrt(want)).all()  # the models draw independently of each other
    assert not np.array_equal(got["a"], got["b"])
    again = merged([{"a": m["a"]} for m in models], {"a": base["a"]}, jax.random.key(0))
    np.testing.assert_array_equal(again["a"], got["a"])  # a draw depends on the path, not on the other arrays
    other = merged(models, base, jax.random.key(1))
    assert not np.array_equal(other["a"], got["a"])


def test_dare_ties_merges_the_same_entries_by_their_signs():
    first, second, base = ({"w": np.full(1000, x, np.float32)} for x in (1, -2, 0))

    def merged(how, weights, key):
        return rpx.merge([first, second], how, base=base, density=0.5, key=key, weights=weights)["w"]

    key = jax.random.key(3)
    one, other = (np.asarray(merged("dare_linear", weights, key)) for weights in ((1, 0), (0, 1)))
    np.testing.assert_allclose(merged("dare_ties", 0.3, key), 0.3 * np.where(other != 0, other, one), rtol=1e-6)


def test_half_precision_is_merged_in_float32():
    models = [{"w": jnp.asarray([256.0, 1.0], jnp.bfloat16)}, {"w": jnp.asarray([258.0, 3.0], jnp.bfloat16)}]
    models += [{"w": jnp.asarray([260.0, 5.0], jnp.bfloat16)}]
    got = rpx.merge(models)["w"]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), [258, 3])  # a sum in bfloat16 would be 776 / 3


def test_nan_of_one_model_stays_nan_under_jit_too():
    broken = jax.tree.map(np.copy, MODELS[0])
    broken["dense"]["bias"][0] = broken["dense"]["kernel"][0] = np.nan

    def merged(models):
        ways = (("ties", {}), ("magnitude_prune", {}), ("dare_ties", {"key": jax.random.key(0)}))
        return {how: rpx.merge(models, how, base=BASE, density=PART, **more)["dense"]["bias"] for how, more in ways}

    models = [broken, *MODELS[1:]]
    for run in (merged, jax.jit(merged)):
        for how, bias in run(models).items():
            np.testing.assert_array_equal(np.isnan(bias), np.arange(len(bias)) == 0, err_msg=f"{how} {run}")


def test_weights_may_be_learned():
    def loss(weights):
        return jnp.sum(rpx.merge(MODELS, "task_arithmetic", weights=weights, base=BASE)["dense"]["kernel"])

    want = [np.sum(m["dense"]["kernel"] - BASE["dense"]["kernel"]) for m in MODELS]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(np.ones(3, np.float32)), want, rtol=1e-4, atol=1e-4)


def test_what_is_no_weight_is_that_of_all():
    models = [
        model | {"steps": jnp.int32(3), "key": jax.random.key(0), "f": jnp.tanh, "name": "net"} for model in MODELS
    ]
    got = rpx.merge(models)
    assert (got["steps"], got["f"], got["name"]) == (3, jnp.tanh, "net")
    assert got["key"] == jax.random.key(0)


def test_adapters_on_one_base_are_merged_by_their_effective_trees():
    p, params = rpx.Freeze() >> rpx.LoRA(2), {"dense": {"kernel": tree(5)["dense"]["kernel"]}}
    raws = [init(p, params, jax.random.key(i)) for i in range(2)]
    for i, raw in enumerate(raws):
        raw["dense"]["kernel"]["@lora"]["b"] = np.full((2, 5), 0.5 + i, np.float32)
    got = rpx.merge([fold(p, raw) for raw in raws], "task_arithmetic", base=params)["dense"]["kernel"]
    held = [jax.tree.map(np.asarray, raw["dense"]["kernel"]["@lora"]) for raw in raws]
    want = params["dense"]["kernel"] + sum(node["a"] @ node["b"] for node in held)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def nnx_models():
    return [nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(i)), nnx.Param) for i in range(2)]


def equinox_models():
    return [eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(i)) for i in range(2)]


def haiku_models():
    net = hk.transform(lambda x: hk.Linear(2)(x))
    return [net.init(jax.random.key(i), jnp.ones((1, 3))) for i in range(2)]


@pytest.mark.thorough
@pytest.mark.parametrize("make", [nnx_models, equinox_models, haiku_models])
def test_trees_of_libraries(make):
    first, second = make()
    got = rpx.merge([first, second])
    assert jax.tree.structure(got) == jax.tree.structure(first)
    for x, y, z in zip(*map(jax.tree.leaves, (got, first, second)), strict=True):
        if isinstance(x, jax.Array):
            np.testing.assert_allclose(x, (y + z) / 2, rtol=1e-5, atol=1e-6)


# By the data of each model. ----------------------------------------------------------------------------------------

DATA = [np.random.default_rng(10 + i).standard_normal((20 + 10 * i, 6)).astype(np.float32) for i in range(3)]
KERNELS = [{"w": model["dense"]["kernel"], "b": model["dense"]["bias"]} for model in MODELS]


def seen_of(x, shape=(6, 5), batch=(), axes=(0,), *, squares=False):
    """What a weight of this shape is multiplied with, for inputs ``(batch, examples, inputs)``."""
    x = np.asarray(x, np.float32) if batch else np.asarray(x, np.float32)[None]
    second = np.square(x).sum(1) if squares else np.einsum("bni,bnj->bij", x, x)
    count = np.full(len(x), x.shape[1], np.float32)
    read = Read(shape, tuple(range(len(shape))), batch, axes, jnp.asarray(count), second=jnp.asarray(second))
    return {"w": Seen((read,))}


@functools.partial(jax.jit, static_argnames=("weights", "off_diagonal"))
def regmean(models, seen, weights=None, off_diagonal=0.9):
    return rpx.merge(models, "regmean", weights=weights, seen=seen, off_diagonal=off_diagonal)


def numpy_of(models):
    return [np.asarray(model["w"], np.float64) for model in models]


def test_regmean_is_least_squares_on_the_outputs_of_each_model():
    got = regmean(KERNELS, list(map(seen_of, DATA)), weights=(1, 2, 0.5), off_diagonal=1)
    rows = [np.sqrt(w) * x for w, x in zip((1, 2, 0.5), DATA, strict=True)]
    outputs = [x @ w for x, w in zip(rows, numpy_of(KERNELS), strict=True)]
    want = np.linalg.lstsq(np.concatenate(rows), np.concatenate(outputs))[0]
    np.testing.assert_allclose(got["w"], want, atol=1e-4)
    np.testing.assert_allclose(got["b"], np.average([m["b"] for m in KERNELS], 0, (1, 2, 0.5)), atol=1e-5)


def test_regmean_takes_less_of_the_moments_of_two_inputs():
    got = regmean(KERNELS, list(map(seen_of, DATA)))["w"]
    grams = [0.9 * x.T @ x + 0.1 * np.diag(np.diag(x.T @ x)) for x in map(np.float64, DATA)]
    want = np.linalg.solve(sum(grams), sum(g @ w for g, w in zip(grams, numpy_of(KERNELS), strict=True)))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_regmean_of_diagonal_moments_weighs_each_row():
    seen = [seen_of(x, squares=True) for x in DATA]
    got = regmean(KERNELS, seen)["w"]
    squares = [np.square(x).sum(0)[:, None] for x in DATA]
    want = sum(s * w for s, w in zip(squares, numpy_of(KERNELS), strict=True)) / sum(squares)
    np.testing.assert_allclose(got, want, atol=1e-5)
    nearly = regmean(KERNELS, list(map(seen_of, DATA)), off_diagonal=1e-9)["w"]
    np.testing.assert_allclose(nearly, want, atol=1e-5)


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_inputs_that_no_model_saw_get_the_mean(size, squares):
    data = [size * x * np.array([1, 0, 1, 1, 0, 1e-3]) for x in DATA]
    got = np.asarray(regmean(KERNELS, [seen_of(x, squares=squares) for x in data])["w"])
    mean = np.mean(numpy_of(KERNELS), 0)
    np.testing.assert_allclose(got[[1, 4]], mean[[1, 4]], atol=1e-5)
    assert np.abs(got - mean)[[0, 2, 3, 5]].min(1).all()


def test_of_data_that_span_less_regmean_keeps_the_outputs():
    data = [x[:, :2] @ np.ones((2, 6)) for x in DATA]
    got = regmean(KERNELS, list(map(seen_of, data)), off_diagonal=1)["w"]
    total = sum(float(np.square(x[:, :2].sum(1)).sum()) for x in DATA)
    want = sum(np.square(x[:, :2].sum(1)).sum() * w.sum(0) for x, w in zip(DATA, numpy_of(KERNELS), strict=True))
    np.testing.assert_allclose(np.asarray(got).sum(0), want / total, atol=1e-3)


@pytest.mark.thorough
def test_regmean_of_stacked_and_turned_kernels_is_that_of_each():
    models = [{"w": jnp.stack([KERNELS[i]["w"].T, KERNELS[i + 1]["w"].T])} for i in range(2)]
    seen = [seen_of(np.stack([DATA[i][:20], DATA[i + 1][:20]]), (2, 5, 6), (0,), (2,)) for i in range(2)]
    got = rpx.merge(models, "regmean", seen=seen)["w"]
    want = [
        rpx.merge(KERNELS[i : i + 2], "regmean", seen=[seen_of(x[:20]) for x in DATA[i : i + 2]])["w"] for i in range(2)
    ]
    for layer, each in zip(got, want, strict=True):
        np.testing.assert_allclose(layer.T, each, atol=1e-4)


@pytest.mark.thorough
def test_regmean_of_networks_reads_what_each_of_them_computes():
    def outputs(params, x):
        return jnp.tanh(x @ params["in"] + params["bias"][None]) @ params["out"]

    draw = np.random.default_rng(20).standard_normal
    models = [{"in": draw((6, 5)), "bias": draw(5), "out": draw((5, 3))} for _ in range(2)]
    models = jax.tree.map(jnp.float32, models)
    seen = [rpx.inputs(outputs)(model, x) for model, x in zip(models, DATA, strict=False)]
    got = rpx.merge(models, "regmean", seen=seen, off_diagonal=1)
    hidden = [np.tanh(x @ model["in"] + model["bias"][None]) for model, x in zip(models, DATA, strict=False)]
    for name, data in {"in": DATA[:2], "out": hidden}.items():
        wanted = np.concatenate([x @ model[name] for x, model in zip(data, models, strict=True)])
        np.testing.assert_allclose(got[name], np.linalg.lstsq(np.concatenate(data), wanted)[0], atol=1e-3)
    np.testing.assert_allclose(got["bias"], (models[0]["bias"] + models[1]["bias"]) / 2, atol=1e-6)


def test_an_array_that_is_read_in_two_ways_gets_the_mean():
    models = [model | {"tied": model["w"]} for model in KERNELS]
    both = [seen_of(x) | {"tied": Seen(seen_of(x)["w"].reads * 2)} for x in DATA]
    got = regmean(models, both)
    np.testing.assert_allclose(got["tied"], np.mean(numpy_of(KERNELS), 0), atol=1e-5)
    assert not np.allclose(got["w"], got["tied"], atol=1e-2)


# Errors. -----------------------------------------------------------------------------------------------------------

LARGEST = Seen((Read((6, 5), (0, 1), (), (0,), jnp.ones(1), largest=jnp.ones((1, 6))),))
TIES = {"how": "ties", "base": BASE, "density": 0.5}
ERRORS = {
    "one": (
        lambda: rpx.merge(MODELS[:1]),
        ValueError,
        "merge takes a list of two or more models, or of one and a base, but got a list of 1. Call "
        "`merge([first, second])`.",
    ),
    "a tree": (
        lambda: rpx.merge(MODELS[0]),
        ValueError,
        "merge takes a list of two or more models, or of one and a base, but got one tree. Call "
        "`merge([first, second])`.",
    ),
    "how": (
        lambda: rpx.merge(MODELS, "dare"),
        ValueError,
        "merge takes how='mean', 'regmean', 'task_arithmetic', 'magnitude_prune', 'ties', 'dare_linear' or "
        "'dare_ties', but got 'dare'.",
    ),
    "sign": (
        lambda: rpx.merge(MODELS, **TIES, majority_sign_method="most"),
        ValueError,
        "merge takes majority_sign_method='total' or 'frequency', but got 'most'.",
    ),
    "no base": (
        lambda: rpx.merge(MODELS, "ties", density=0.5),
        ValueError,
        "merge(how='ties') needs the model from which all of them were trained, `base=params`.",
    ),
    "no density": (
        lambda: rpx.merge(MODELS, "ties", base=BASE),
        ValueError,
        "merge(how='ties') needs the part of each difference that stays, such as `density=0.2`.",
    ),
    "no key": (
        lambda: rpx.merge(MODELS, "dare_ties", base=BASE, density=0.5),
        ValueError,
        "merge(how='dare_ties') needs a key to draw what stays, `key=jax.random.key(0)`.",
    ),
    "no data": (
        lambda: rpx.merge(KERNELS, "regmean"),
        ValueError,
        "merge(how='regmean') needs the data of each model, `seen=[rpx.inputs(loss)(model, batch), ...]`.",
    ),
    "data of one": (
        lambda: rpx.merge(KERNELS, "regmean", seen=seen_of(DATA[0])),
        ValueError,
        "merge takes a tree for each of 3 models as seen, but got a dict.",
    ),
    "data of nothing": (
        lambda: rpx.merge(KERNELS, "regmean", seen=[{"w": Seen()}] * 3),
        ValueError,
        "merge(how='regmean') found no array that products read in all models. Pass the result of `rpx.inputs` for "
        "the effective tree of each model.",
    ),
    "data of others": (
        lambda: rpx.merge(KERNELS, "regmean", seen=[{"v": Seen()}] * 3),
        ValueError,
        "merge: seen[0] got seen for 'v', which is not an array of the parameters: these have 'b', 'w'. Pass the "
        "result of `rpx.inputs` for the same parameters.",
    ),
    "moments": (
        lambda: rpx.merge(KERNELS, "regmean", seen=[{"w": LARGEST}] * 3),
        ValueError,
        "merge at 'w': expected data with moments='diagonal', but got other moments. Pass moments='diagonal' to "
        "`rpx.inputs`.",
    ),
    "negative weights": (
        lambda: rpx.merge(KERNELS, "regmean", weights=(1, 1, -1), seen=list(map(seen_of, DATA))),
        ValueError,
        "merge(how='regmean') takes weights of which none is negative and some are not zero.",
    ),
    "off diagonal": (
        lambda: rpx.merge(KERNELS, "regmean", seen=list(map(seen_of, DATA)), off_diagonal=0),
        ValueError,
        "merge got off_diagonal=0.0, but takes a number greater than 0 and at most 1.",
    ),
    "needless": (
        lambda: rpx.merge(MODELS, density=0.5),
        ValueError,
        "merge(how='mean') takes no density; 'magnitude_prune', 'ties', 'dare_linear', 'dare_ties' do. Leave it out, "
        "or change `how`.",
    ),
    "density": (
        lambda: rpx.merge(MODELS, "ties", base=BASE, density=1.5),
        ValueError,
        "merge got density=1.5, but takes a number greater than 0 and at most 1.",
    ),
    "weights": (
        lambda: rpx.merge(MODELS, weights=(1.0, 2.0)),
        ValueError,
        "merge takes one weight, or one for each of 3 models, but got weights of shape (2,).",
    ),
    "weights of sum zero": (
        lambda: rpx.merge(MODELS[:2], weights=(1.0, -1.0)),
        ValueError,
        "merge(how='mean') got weights whose sum is zero, which have no mean. Use how='task_arithmetic', with a base.",
    ),
    "structure": (
        lambda: rpx.merge([MODELS[0], {"dense": {"kernel": jnp.ones((6, 5))}}]),
        ValueError,
        "merge takes trees of one structure, but got models[0] and models[1], which differ at 'dense/bias'. Merge "
        "effective trees: `[p.fold(raw) for raw in raws]`.",
    ),
    "structure of the base": (
        lambda: rpx.merge(MODELS, "task_arithmetic", base={"dense": {"kernel": jnp.ones((6, 5))}}),
        ValueError,
        "merge takes trees of one structure, but got models[0] and base, which differ at 'dense/bias'. Merge "
        "effective trees: `[p.fold(raw) for raw in raws]`.",
    ),
    "shape": (
        lambda: rpx.merge([{"w": jnp.ones((2, 3))}, {"w": jnp.ones((3, 2))}]),
        ValueError,
        "merge got float32[2, 3] at 'w' in models[0], but float32[3, 2] in models[1]. Merge models of one shape and "
        "dtype.",
    ),
    "codes": (
        lambda: rpx.merge([{"w": jnp.int8([1, 2])}, {"w": jnp.int8([1, 3])}]),
        ValueError,
        "merge got different values of int8[2] at 'w', which have no mean. Merge effective trees, `[p.fold(raw) for "
        "raw in raws]`, or give each model the same.",
    ),
    "complex": (
        lambda: rpx.merge(
            [{"w": jnp.ones(2, "complex64")}] * 2, "ties", base={"w": jnp.zeros(2, "complex64")}, density=0.5
        ),
        ValueError,
        "merge(how='ties') takes real arrays, whose signs agree or not, but got complex64[2] at 'w'.",
    ),
    "key": (
        lambda: rpx.merge(MODELS, "dare_linear", base=BASE, density=0.5, key=3),
        TypeError,
        "merge needs a PRNG key, but got 3 of type int. Make one with `jax.random.key(seed)`.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, error, text = ERRORS[case]
    with raises(error, text):
        call()


def test_what_jax_traces_may_differ():
    def traced(models):
        with raises(
            ValueError,
            "merge cannot check under tracing whether int8[2] at 'w' is equal in all models. Merge "
            "`rpx.partition(model)[0]` of each, or outside of `jax.jit`.",
        ):
            rpx.merge(models)

    jax.make_jaxpr(traced)([{"w": jnp.int8([1, 2])}, {"w": jnp.int8([1, 2])}])
