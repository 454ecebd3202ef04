"""``remat(keep="masks")``: masks of dropout are drawn once and stored in bits; all else is as without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from grids import mostly_thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec
from one_array import normal
from residuals import draws, kept

import reparax as rpx

N, WIDTH, ROWS = 3, 32, 2
KEY = jax.random.key(7)
X = normal(ROWS, WIDTH)
STACK = {"w": normal(N, WIDTH, WIDTH, seed=1)}
LAYERS = {f"w{i}": w for i, w in enumerate(STACK["w"])}
DROPOUT = rpx.WeightDropout(0.3)
MASKS = N * WIDTH * WIDTH // 8  # bytes


def unrolled(p):
    def loss(raw, key, x):
        for w in p.apply(raw, key).values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss, LAYERS


def before_the_scan(p):
    def loss(raw, key, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p.apply(raw, key)["w"])[0] ** 2)

    return loss, STACK


def in_its_body(p):
    def loss(raw, key, x):
        def step(x, own):
            return jnp.tanh(x @ p.apply({"w": own[0]}, own[1])["w"]), None

        return jnp.mean(jax.lax.scan(step, x, (raw["w"], jax.random.split(key, N)))[0] ** 2)

    return loss, STACK


LOSSES = {each.__name__: each for each in (unrolled, before_the_scan, in_its_body)}


WAYS = [(name, batched) for name in LOSSES for batched in ("alone", "under vmap")]


@pytest.mark.parametrize(
    "way", mostly_thorough(WAYS, ("before_the_scan", "under vmap"), ("in_its_body", "alone")), ids=" ".join
)
def test_values_and_gradients_are_those_without_it(way):
    name, batched = way[0], way[1] == "under vmap"
    loss, raw = LOSSES[name](DROPOUT)
    f = jax.vmap(loss, (None, 0, None)) if batched else loss
    given = raw, jax.random.split(KEY, 2) if batched else KEY, X

    def total(raw, *rest):
        return jnp.sum(f(raw, *rest))

    value, slopes = jax.jit(jax.value_and_grad(rpx.remat(total, keep="masks")))(*given)
    expected, others = jax.jit(jax.value_and_grad(total))(*given)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(slopes), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
        assert np.any(np.asarray(y) == 0)


@pytest.mark.parametrize("name", LOSSES)
def test_a_bit_for_each_entry_is_stored(name):
    loss, raw = LOSSES[name](DROPOUT)
    without = kept(rpx.remat(loss), raw, KEY, X)
    stored = kept(rpx.remat(loss, keep="masks"), raw, KEY, X)
    assert sum(stored.values()) == sum(without.values()) + MASKS


def test_each_mask_is_drawn_once_and_noise_twice():
    def count(p, keep):
        loss, raw = unrolled(p)
        return draws(jax.grad(rpx.remat(loss, keep=keep)), raw, KEY, X)[0]

    # The masks of equal arrays are drawn together.
    assert (count(DROPOUT, None), count(DROPOUT, "masks")) == (2, 1)
    both = DROPOUT >> rpx.VarNoise(0.1)
    assert (count(both, None), count(both, "masks")) == (4, 3)
    assert count(rpx.VarNoise(0.1), "masks") == 2


@pytest.mark.parametrize("shape", [(7, 217), (8, 8)])
def test_a_mask_without_whole_bytes_and_a_small_one_are_drawn_again(shape):
    def loss(raw, key):
        return jnp.sum(jnp.tanh(DROPOUT.apply(raw, key)["w"]))

    of_remat = rpx.remat(loss, keep="masks")
    assert draws(jax.grad(of_remat), {"w": jnp.ones(shape)}, KEY)[0] == 2


def test_numbers_that_are_read_otherwise_too_are_drawn_again():
    def loss(w, key):
        numbers = jax.random.uniform(key, w.shape)
        return jnp.sum(jnp.sin(jnp.where(numbers < 0.5, w, 0)) * jnp.cos(numbers * w))

    assert kept(rpx.remat(loss, keep="masks"), STACK["w"], KEY) == {"weights": 0, "others": 0}


@pytest.mark.thorough
@pytest.mark.parametrize("spec", mostly_thorough([Spec("x", None), Spec(None, "x"), Spec("x", "y")], Spec("x", "y")))
def test_masks_of_sharded_weights(spec):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    w = jax.device_put(STACK["w"][0], NamedSharding(mesh, spec))

    def loss(w, key):
        return jnp.sum(jnp.tanh(DROPOUT.apply({"w": w}, key)["w"]) ** 2)

    with jax.set_mesh(mesh):
        slope = jax.jit(jax.grad(rpx.remat(loss, keep="masks")))(w, KEY)
        assert slope.sharding.spec == w.sharding.spec
        np.testing.assert_allclose(slope, jax.jit(jax.grad(loss))(w, KEY), rtol=1e-6, atol=1e-6)
        stored = kept(rpx.remat(loss, keep="masks"), w, KEY)
    assert sum(stored.values()) == (0 if spec == Spec("x", "y") else WIDTH * WIDTH // 8)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
