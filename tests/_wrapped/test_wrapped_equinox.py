"""rpx.equinox: a model that is its chain, in loops that own the loss."""

import copy
import functools
import io
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
import pytest
from errors import raises
from jax import Array

import reparax as rpx

X, Y = mlp.data()
P = rpx.WeightNorm(axis=0)  # a weight is (out, in) here
NOISY = P >> rpx.VarNoise(0.1)


class MLP(eqx.Module):
    l1: eqx.nn.Linear
    l2: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    width: int = eqx.field(static=True)

    def __init__(self, key: Array) -> None:
        self.l1, self.l2 = eqx.nn.Linear(3, 4, key=key), eqx.nn.Linear(4, 2, key=key)
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.width = 4

    def hidden(self, x: Array) -> Array:
        return jnp.tanh(self.l1(x))

    @staticmethod
    def doubled(x: int) -> int:
        return 2 * x

    def __call__(self, x: Array, *, key: Array | None = None) -> Array:
        return self.l2(self.dropout(self.hidden(x), key=key))


def values(tree: Any) -> list[Any]:
    return [tree.l1.weight, tree.l1.bias, tree.l2.weight, tree.l2.bias]


def model() -> MLP:
    arrays = [jnp.asarray(w.T, jnp.float32) for w in (mlp.W1, mlp.B1, mlp.W2, mlp.B2)]
    return eqx.tree_at(values, eqx.filter_eval_shape(MLP, jax.random.key(0)), arrays)


@eqx.filter_jit(donate="all")
def train_step(model: Any, state: Any, tx: Any) -> Any:
    """The step of equinox's examples, which knows of no chain."""
    TRACED.append(None)
    loss, grads = eqx.filter_value_and_grad(lambda model: mlp.mean_square(jax.vmap(model)(X), Y))(model)
    updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


TRACED: list[None] = []


def test_a_loop_that_owns_the_loss_trains_raw_values_and_compiles_once() -> None:
    wrapped, tx = rpx.equinox.Parametrized(model(), P), optax.sgd(mlp.RATE)
    state, losses = tx.init(eqx.filter(wrapped, eqx.is_inexact_array)), []
    before = len(TRACED)
    for _ in range(mlp.STEPS):
        wrapped, state, loss = train_step(wrapped, state, tx)
        losses.append(loss)
    assert len(TRACED) == before + 1
    folded = wrapped.fold()
    assert type(folded) is MLP
    mlp.assert_trained(losses, [np.transpose(w) for w in values(folded)])
    P.check(wrapped.raw, like=model())


def test_a_bare_adamw_moves_what_trains_and_no_bit_of_the_rest() -> None:
    p = rpx.Freeze(where="l1/.*") >> rpx.SpectralNorm(columns=0, where="l2/weight")
    start = eqx.tree_at(lambda m: m.l1.bias, model(), jnp.array([jnp.nan, -0.0, 1e-40, jnp.inf]))
    wrapped, tx = rpx.equinox.Parametrized(start, p), optax.adamw(0.1, weight_decay=0.5)
    trains = eqx.filter(wrapped, eqx.is_inexact_array)
    assert sorted(x.shape for x in jax.tree.leaves(trains)) == [(2,), (2, 4)]
    with jax.numpy_dtype_promotion("standard"):  # for Adam's counter
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, trains), tx.init(trains), trains)
    moved = eqx.apply_updates(wrapped, updates)
    for got, want in zip(values(moved.fold())[:2], values(start)[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32))
    node = moved.raw.l2.weight["@spectral_norm"]
    assert not np.array_equal(node["w"], start.l2.weight)
    advanced = moved.update().raw.l2.weight["@spectral_norm"]["@fixed"]
    u = np.asarray(node["w"]) @ np.asarray(node["@fixed"]["v"])
    np.testing.assert_allclose(advanced["u"], u / np.linalg.norm(u), rtol=1e-4)


def test_fixed_values_of_each_type_come_back() -> None:
    arrays = {
        "complex": np.array([1 + 2j, -3j], np.complex64),
        "half": np.array([1.5, -0.0], jnp.bfloat16),
        "small": np.array([0.5, 2.0], jnp.float8_e4m3fn),
        "whole": np.array([1, 2], np.int32),
    }
    wrapped = rpx.equinox.Parametrized(jax.tree.map(jnp.asarray, arrays), rpx.Freeze(where="complex|half|small"))
    assert jax.tree.leaves(eqx.filter(wrapped, eqx.is_inexact_array)) == []
    back = wrapped.effective()
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, arrays)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), back, arrays)


def test_an_average_or_a_cast_of_what_does_not_train_is_refused() -> None:
    wrapped = rpx.equinox.Parametrized(model(), rpx.Freeze(where="l1/.*") >> P)
    arrays = eqx.filter(wrapped, eqx.is_array)
    with jax.numpy_dtype_promotion("standard"):
        halved = jax.tree.map(lambda x: 0.5 * x, arrays)
    for changed, got in (
        (halved, "float32"),
        (jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays), "bfloat16"),
    ):
        with raises(
            TypeError,
            "rpx.equinox.Parametrized stores values that do not train as integers of their bits, float32 as uint32, "
            f"but got {got}: a cast or an average of all arrays has changed them. Take `eqx.filter(model, "
            "eqx.is_inexact_array)`, which leaves them out.",
        ):
            eqx.combine(changed, wrapped)(X[0])


def test_noise_comes_from_the_key_and_one_key_is_one_draw_for_all_examples(key: Array) -> None:
    wrapped = rpx.equinox.Parametrized(model(), NOISY)
    got = jax.vmap(functools.partial(wrapped, key=key))(X)
    want = jax.vmap(NOISY.apply(NOISY.init(model()), key))(X)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(
        wrapped.hidden(X[0], key=key), NOISY.apply(NOISY.init(model()), key).hidden(X[0]), rtol=1e-6
    )
    with raises(
        ValueError,
        "(WeightNorm(axis=0) >> VarNoise(0.1)).apply draws random numbers in each call of the model, so it needs a "
        "stream, but got key=None. Give one, `model(x, key=key)`, or evaluate with `model.deterministic`.",
    ):
        wrapped(X[0])
    np.testing.assert_allclose(jax.vmap(wrapped.deterministic)(X), jax.vmap(model())(X), rtol=1e-5, atol=1e-6)
    with raises(
        ValueError,
        "LoRA(2).init draws random numbers, so it needs a key. Write `rpx.equinox.Parametrized(model, p, key=key)`.",
    ):
        rpx.equinox.Parametrized(model(), rpx.LoRA(2))


class Keyed(eqx.Module):
    """The signature of equinox's BERT, which takes its key by position."""

    l1: eqx.nn.Linear

    def __call__(self, x: Array, rate: float = 0.0, key: Array | None = None) -> Array:
        return self.l1(x) + (0.0 if key is None else jax.random.normal(key, (4,)))


def test_a_key_by_position_is_the_key_of_the_noise(key: Array) -> None:
    plain, keys = Keyed(model().l1), jax.random.split(key, len(X))
    got = jax.vmap(rpx.equinox.Parametrized(plain, NOISY), in_axes=(0, None, 0))(X, 0.5, keys)
    want = [NOISY.apply(NOISY.init(plain), k)(x, 0.5, k) for x, k in zip(X, keys, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_arguments_that_the_model_does_not_take_are_named_by_its_call(key: Array) -> None:
    plain = model().l1
    with pytest.raises(TypeError, match=r"Linear.__call__\(\) takes 2 positional arguments but 4 were given"):
        rpx.equinox.Parametrized(plain, P)(X[0], key, 3)
    with pytest.raises(ValueError, match=r"needs a stream, but got key=None\. Give one, `model\(x, key=key\)`"):
        rpx.equinox.Parametrized(plain, NOISY)(X[0], key)


def test_tree_at_finds_raw_values_that_train() -> None:
    wrapped = rpx.equinox.Parametrized(model(), rpx.Freeze(where="l1/.*") >> P)
    v = jnp.asarray(mlp.W2.T * 2, jnp.float32)
    changed = eqx.tree_at(lambda m: m.raw.l2.weight["@weight_norm"]["v"], wrapped, v)
    np.testing.assert_array_equal(changed.raw.l2.weight["@weight_norm"]["v"], v)
    np.testing.assert_array_equal(changed.fold().l1.bias, np.float32(mlp.B1))
    with pytest.raises(ValueError, match="must not depend on the leaves"):
        eqx.tree_at(lambda m: m.raw.l1.bias["@freeze"]["@fixed"]["w"], wrapped, jnp.zeros(4))


def test_copies_and_pickles_hold_the_same_values() -> None:
    wrapped = rpx.equinox.Parametrized(model(), rpx.Freeze(where="l1/.*") >> P)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert bool(eqx.tree_equal(other, wrapped))


def test_attributes_are_those_of_the_model() -> None:
    wrapped = rpx.equinox.Parametrized(model(), P)
    assert wrapped.width == 4
    assert rpx.equinox.Parametrized(model(), NOISY).doubled(2) == 4  # reads no weights, so it needs no key
    np.testing.assert_allclose(wrapped.l1.weight, mlp.W1.T, rtol=1e-6)
    with raises(AttributeError, "'Parametrized' object has no attribute 'depth'"):
        _ = wrapped.depth
    assert eqx.nn.inference_mode(wrapped, value=False).values.dropout.inference is False


def test_an_ensemble_is_a_vmap_of_the_constructor() -> None:
    keys = jax.random.split(jax.random.key(0), 3)

    def made(key: Array) -> Any:
        return rpx.equinox.Parametrized(MLP(key), rpx.Freeze(where="l1/.*") >> P)

    models = eqx.filter_vmap(made)(keys)
    got = eqx.filter_vmap(lambda model: jax.vmap(model)(X))(models)
    want = jnp.stack([jax.vmap(MLP(key))(X) for key in keys])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_wrapped_part_is_part_of_a_plain_model_and_of_a_file(key: Array) -> None:
    encoder = rpx.equinox.Parametrized(eqx.nn.Linear(3, 3, key=key), rpx.Freeze(where="bias") >> P)
    whole = eqx.nn.Sequential([encoder, eqx.nn.Linear(3, 2, key=key)])
    plain = eqx.nn.Sequential([eqx.nn.Linear(3, 3, key=key), eqx.nn.Linear(3, 2, key=key)])
    np.testing.assert_allclose(jax.vmap(whole)(X), jax.vmap(plain)(X), rtol=1e-5, atol=1e-6)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, whole)
    file.seek(0)
    other = rpx.equinox.Parametrized(eqx.nn.Linear(3, 3, key=jax.random.key(9)), rpx.Freeze(where="bias") >> P)
    like = eqx.nn.Sequential([other, eqx.nn.Linear(3, 2, key=jax.random.key(9))])
    assert bool(eqx.tree_equal(eqx.tree_deserialise_leaves(file, like), whole))
    assert bool(eqx.tree_equal(other.replace(encoder.raw), encoder))


def test_inference_mode_sets_the_flags_of_the_model_and_deterministic_those_of_the_noise(key: Array) -> None:
    class Dropped(eqx.Module):
        layer: eqx.nn.Linear
        dropout: eqx.nn.Dropout

        def __call__(self, x: Array, key: Array | None = None) -> Array:
            return self.dropout(self.layer(x), key=key)

    plain = Dropped(model().l1, eqx.nn.Dropout(0.5))
    still = eqx.nn.inference_mode(rpx.equinox.Parametrized(plain, NOISY))
    want = NOISY.apply(NOISY.init(plain), key).layer(X[0])
    assert np.abs(np.asarray(want - plain.layer(X[0]))).max() > 1e-2
    np.testing.assert_allclose(still(X[0], key=key), want, rtol=1e-5)
    np.testing.assert_allclose(still.deterministic(X[0]), plain.layer(X[0]), rtol=1e-5)
