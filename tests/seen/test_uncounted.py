"""What reads an array with data and is not counted: no stage starts from a part of the data."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax import lax

import reparax as rpx

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


PARAMS = {"w": normal(4, 6), "v": normal(6, 4, seed=1)}
X = normal(5, 4, seed=2)


def counted(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"])


def total(p, x):
    """A loop whose carry adds a penalty of each step to the data."""

    def step(carry, _):
        h, penalty = carry
        return (jnp.tanh(h @ p["w"] @ p["v"]), penalty + jnp.sum(p["w"] ** 2)), None

    (h, penalty), _ = lax.scan(step, (x, jnp.sum(x)), None, length=3)
    return jnp.sum(h) + penalty


def started(p, x):
    return jnp.sum(lax.scan(lambda h, row: (jnp.tanh(h + row @ p["w"]), None), p["w"][0], x)[0])


def looped(p, x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"] @ p["v"])), (0, x))[1].sum()


def one_call_of_two(p, x):
    times = jax.jit(lambda x, w: x @ w)
    return jnp.sum(times(x, p["w"])) + jnp.sum(times(x, jnp.cos(p["w"])))


def chosen(x, w):
    return lax.cond(x.sum() > 0, lambda: w, lambda: -w)


def part(x, w):
    return lax.dynamic_slice_in_dim(w, x[0, 0].astype(int), 2, 0)


WITHOUT_DATA = {
    "nothing else": counted,
    "a penalty": lambda p, x: counted(p, x) + 1e-3 * jnp.sum(p["w"] ** 2),
    "a penalty by the count of examples": lambda p, x: (counted(p, x) + x.sum() * jnp.sum(p["w"] ** 2)) / x.sum(),
    "a sine": lambda p, x: counted(p, x) - jnp.mean(jnp.sin(p["w"])),
    "added in a call": lambda p, x: jax.jit(lambda a, b: a + b)(counted(p, x), jnp.linalg.norm(p["w"])),
    "added to each example": lambda p, x: jax.vmap(lambda x: jnp.sum(x @ p["w"]) + jnp.sum(p["w"] ** 2))(x).mean(),
    "added in a loop": total,
    "returned": lambda p, x: (counted(p, x), 2 * p["w"]),
    "in a branch": lambda p, x: lax.cond(x.sum() > 0, lambda: counted(p, x), lambda: jnp.sum(p["w"])),
    "a multiple by data": lambda p, x: jnp.sum(jnp.tanh(x @ (jnp.mean(x, keepdims=True) * p["w"] / jnp.max(x)))),
    "a part by data": lambda p, x: jnp.sum(jnp.tanh(x[:, :2] @ part(x, p["w"]))),
}
WITH_DATA = {
    "a slice of a merged axis": ("dot_general", lambda p, x: x[:, :2] @ p["w"].reshape(-1)[1:7].reshape(2, 3)),
    "a product of its sine": ("dot_general", lambda p, x: x @ jnp.sin(p["w"])),
    "a product of weights": ("dot_general", lambda p, x: x @ (p["w"] @ p["v"])),
    "an addition": ("add", lambda p, x: x + p["w"][:, 0][None]),
    "columns by data": ("mul", lambda p, x: x @ (p["w"] * x[0][:, None])),
    "a chosen array": ("cond", lambda p, x: x @ chosen(x, p["w"])),
    "the sine of a part by data": ("sin", lambda p, x: x[:, :2] @ jnp.sin(part(x, p["w"]))),
    "the tanh of a multiple by data": ("tanh", lambda p, x: jnp.tanh(p["w"] * x[:1, :1])),
    "a gate": ("tanh", lambda p, x: p["w"][0, 0] * x),
    "a mask of its signs": ("select_n", lambda p, x: jnp.where(p["w"][:, 0][None] > 0, x, 0.0)),
    "a start of a loop": ("scan", started),
    "a loop": ("while", looped),
    "one call of two": ("dot_general", one_call_of_two),
}


def names(seen):
    return [reason.split(" reads it with data: ")[0] for reason in seen.uncounted]


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_what_reads_no_data_is_no_matter(name):
    seen = jax.eval_shape(rpx.inputs(WITHOUT_DATA[name]), PARAMS, X)["w"]
    assert (len(seen.reads), seen.uncounted) == (1, ())


@pytest.mark.parametrize("name", WITH_DATA)
def test_what_reads_data_and_is_not_counted_is_told(name):
    reader, network = WITH_DATA[name]
    seen = jax.eval_shape(rpx.inputs(lambda p, x: counted(p, x) + jnp.sum(jnp.tanh(network(p, x)))), PARAMS, X)["w"]
    assert names(seen) == [reader]
    assert f"{__file__}:" in seen.uncounted[0]
    assert len(seen.reads) >= 1


def test_a_sum_with_an_array_is_no_penalty():
    (reason,) = jax.eval_shape(rpx.inputs(lambda p, x: x @ p["w"] + p["w"][:1]), PARAMS, X)["w"].uncounted
    assert reason.startswith("add reads it with data: ")


def test_effective_arrays_of_a_chain_are_followed_too():
    p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
    raw = p.init(PARAMS)

    def loss(raw, key, x):
        w = p.apply(raw, key)
        return counted(w, x) + jnp.sum(w["w"] ** 2) + jnp.sum(x.T @ jnp.tanh(x @ jnp.sin(w["w"]))) + jnp.sum(x @ w["w"])

    seen = jax.eval_shape(rpx.inputs(loss), raw, KEY, X)
    assert names(seen["w"]) == ["dot_general"]
    assert seen["v"].uncounted == ()


def sliced(p, x):
    return counted(p, x) + jnp.sum(jnp.tanh(x[:, :2] @ p["w"].reshape(-1)[1:7].reshape(2, 3)))


LINE = f"{__file__}:{sliced.__code__.co_firstlineno + 1}:"
STAGES = {
    "gptq": (rpx.Stored("int4", block=2, axis=1, fit="gptq"), "full"),
    "awq": (rpx.Stored("int4", block=2, axis=1, fit="awq"), "full"),
    "wanda": (rpx.MagnitudePrune(0.5, fit="wanda"), "diagonal"),
    "sparsegpt": (rpx.MagnitudePrune(0.5, fit="sparsegpt"), "full"),
    "n of m": (rpx.sparse.NofM(2, 4, along=0, fit="wanda"), "diagonal"),
    "eva": (rpx.LoRA(2, start="eva"), "full"),
    "corda": (rpx.LoRA(2, start="corda"), "full"),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_that_learn_from_data_refuse_a_part_of_it(name):
    stage, moments = STAGES[name]
    types = jax.eval_shape(rpx.inputs(sliced, moments=moments), PARAMS, X)
    seen = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), {"w": types["w"]})
    with pytest.raises(
        ValueError, match="from every equation that reads it with data, but dot_general reads it with data: "
    ) as e:
        jax.eval_shape(lambda seen: stage.init({"w": PARAMS["w"]}, KEY, seen=seen), seen)
    assert LINE in str(e.value)
    allowed = {"w": replace(seen["w"], uncounted=())}
    jax.eval_shape(lambda seen: stage.init({"w": PARAMS["w"]}, KEY, seen=seen), allowed)


def test_the_whole_error():
    seen = jax.jit(rpx.inputs(sliced))(PARAMS, X)
    (reason,) = seen["w"].uncounted
    assert reason.startswith(f"dot_general reads it with data: {LINE}")
    what = (
        f"data from every equation that reads it with data, but {reason}, which `rpx.inputs` cannot "
        f"count. Leave the array out with `where`, or start from the other products alone: "
        f"`dataclasses.replace(seen, uncounted=())`."
    )
    with raises(ValueError, f"expected {what}"):
        seen["w"].read("full", PARAMS["w"])
    with raises(ValueError, f"eva_ranks at 'w': expected {what.replace('data', 'data of this array', 1)}"):
        rpx.adapters.eva_ranks(seen, 2)
    assert f"4 inputs along axis 0, 100 B  {reason}; slice reads it: " in repr(
        rpx.explain(rpx.inputs(sliced), PARAMS, X)
    )


def test_a_penalty_leaves_the_moments_of_a_compiled_program_as_they_are():
    seen = jax.jit(rpx.inputs(WITHOUT_DATA["a penalty"]))(PARAMS, X)["w"]
    np.testing.assert_allclose(seen.reads[0].second[0], X.T @ X, rtol=1e-5)
    number = jax.jit(rpx.inputs(lambda p, x: jnp.sum(jnp.tanh(x @ (jnp.full((1, 1), 2.0) * p["w"])))))(PARAMS, X)["w"]
    np.testing.assert_allclose(number.reads[0].second[0], 4 * X.T @ X, rtol=1e-5)


def test_a_stack_whose_layers_some_products_mix_has_a_part_of_the_data():
    def loss(p, x):
        return counted_layers(p, x) + jnp.sum(jnp.tanh(jnp.einsum("nl,lde->nde", x[:, :2], p["w"])))

    def counted_layers(p, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0])

    seen = jax.jit(rpx.inputs(loss))({"w": normal(2, 4, 4)}, X)
    with pytest.raises(ValueError, match="products mix the stacked axes"):
        rpx.Stored("int4", block=2, axis=-2, stacked=0, fit="gptq").init({"w": normal(2, 4, 4)}, seen=seen)
