"""rpx.equinox: a model that is its chain, in loops that own the loss."""

import copy
import functools
import io
import pickle
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
import pytest
from errors import Case, table
from jax import Array

import reparax as rpx

X, Y = mlp.data()
P = rpx.WeightNorm(axis=0)  # a weight is (out, in) here
NOISY, FROZEN = P >> rpx.VarNoise(0.1), rpx.Freeze(where="l1/.*") >> P


class MLP(eqx.Module):
    l1: eqx.nn.Linear
    l2: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    width: int = eqx.field(static=True)
    layers: ClassVar[int] = 2

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
    arrays = [jnp.asarray(np.float32(w.T), np.float32) for w in (mlp.W1, mlp.B1, mlp.W2, mlp.B2)]
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
    wrapped, tx = rpx.equinox.Parametrized(start, p, updates="by hand"), optax.adamw(0.1, weight_decay=0.5)
    trains = eqx.filter(wrapped, eqx.is_inexact_array)
    assert sorted(x.shape for x in jax.tree.leaves(trains)) == [(2,), (2, 4)]

    @eqx.filter_jit
    def step(wrapped: Any, trains: Any) -> Any:
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, trains), tx.init(trains), trains)
        moved = eqx.apply_updates(wrapped, updates)
        return moved, moved.update(), moved.fold()

    with jax.numpy_dtype_promotion("standard"):  # for Adam's counter
        moved, advanced, folded = step(wrapped, trains)
    for got, want in zip(values(folded)[:2], values(start)[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32))
    node = moved.raw.l2.weight["@spectral_norm"]
    assert not np.array_equal(node["w"], start.l2.weight)
    advanced = advanced.raw.l2.weight["@spectral_norm"]["@fixed"]
    u = np.asarray(node["w"]) @ np.asarray(node["@fixed"]["v"])
    np.testing.assert_allclose(advanced["u"], u / np.linalg.norm(u), rtol=1e-4)


def test_tree_at_finds_raw_values_that_train() -> None:
    wrapped = rpx.equinox.Parametrized(model(), FROZEN)
    v = jnp.asarray(mlp.W2.T * 2, jnp.float32)
    changed = eqx.tree_at(lambda m: m.raw.l2.weight["@weight_norm"]["v"], wrapped, v)
    np.testing.assert_array_equal(changed.raw.l2.weight["@weight_norm"]["v"], v)
    np.testing.assert_array_equal(changed.fold().l1.bias, np.float32(mlp.B1))
    with pytest.raises(ValueError, match="must not depend on the leaves"):
        eqx.tree_at(lambda m: m.raw.l1.bias["@freeze"]["@fixed"]["w"], wrapped, jnp.zeros(4))


def test_copies_and_pickles_hold_the_same_values() -> None:
    wrapped = rpx.equinox.Parametrized(model(), FROZEN)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert bool(eqx.tree_equal(other, wrapped))


def test_attributes_are_those_of_the_model() -> None:
    wrapped = rpx.equinox.Parametrized(model(), P)
    assert (wrapped.width, wrapped.layers) == (4, 2)
    assert rpx.equinox.Parametrized(model(), NOISY).doubled(2) == 4  # reads no weights, so it needs no key
    np.testing.assert_allclose(wrapped.l1.weight, mlp.W1.T, rtol=1e-6)
    assert eqx.nn.inference_mode(wrapped, value=False).values.dropout.inference is False


def test_a_wrapped_part_is_part_of_a_plain_model_and_of_a_file(key: Array) -> None:
    @eqx.filter_jit
    def made(key: Array) -> Any:
        first, second = eqx.nn.Linear(3, 3, key=key), eqx.nn.Linear(3, 2, key=key)
        encoder = rpx.equinox.Parametrized(first, rpx.Freeze(where="bias") >> P)
        whole, plain = eqx.nn.Sequential([encoder, second]), eqx.nn.Sequential([first, second])
        return encoder, whole, jax.vmap(whole)(X), jax.vmap(plain)(X)

    encoder, whole, got, want = made(key)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, whole)
    file.seek(0)
    other, like, *_ = made(jax.random.key(9))
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
    np.testing.assert_allclose(still(X[0], key=key), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(still.deterministic(X[0]), plain.layer(X[0]), rtol=1e-5, atol=1e-6)


def test_fixed_values_of_each_type_come_back() -> None:
    arrays = {
        "complex": np.array([1 + 2j, -3j], np.complex64),
        "half": np.array([1.5, -0.0], jnp.bfloat16),
        "small": np.array([0.5, 2.0], jnp.float8_e4m3fn),
        "whole": np.array([1, 2], np.int32),
    }

    @eqx.filter_jit
    def run(arrays: Any) -> Any:
        wrapped = rpx.equinox.Parametrized(arrays, rpx.Freeze(where="complex|half|small"))
        assert jax.tree.leaves(eqx.filter(wrapped, eqx.is_inexact_array)) == []
        return wrapped.effective()

    back = run(arrays)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, arrays)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), back, arrays)


class Keyed(eqx.Module):
    """The signature of equinox's BERT, which takes its key by position."""

    l1: eqx.nn.Linear

    def __call__(self, x: Array, rate: float = 0.0, key: Array | None = None) -> Array:
        return self.l1(x) + (0.0 if key is None else jax.random.normal(key, (4,)))


def test_noise_comes_from_the_key_and_one_key_is_one_draw_for_all_examples(key: Array) -> None:
    few = X[:2]

    @eqx.filter_jit
    def run(plain: Any, keyed: Any, keys: Array) -> Any:
        wrapped = rpx.equinox.Parametrized(plain, NOISY)
        noisy, rate = NOISY.apply(NOISY.init(plain), key), jnp.float32(0.5)
        by_position = jax.vmap(rpx.equinox.Parametrized(keyed, NOISY), in_axes=(0, None, 0))(few, rate, keys)
        each = [NOISY.apply(NOISY.init(keyed), k)(x, rate, k) for x, k in zip(few, keys, strict=True)]
        return {
            "one draw": (jax.vmap(functools.partial(wrapped, key=key))(few), jax.vmap(noisy)(few)),
            "a method": (wrapped.hidden(few[0], key=key), noisy.hidden(few[0])),
            "none": (jax.vmap(wrapped.deterministic)(few), jax.vmap(plain)(few)),
            "by position": (by_position, jnp.stack(each)),
        }

    for got, want in run(model(), Keyed(model().l1), jax.random.split(key, len(few))).values():
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_an_ensemble_is_a_vmap_of_the_constructor() -> None:
    @eqx.filter_jit
    def run(keys: Array) -> Any:
        models = eqx.filter_vmap(lambda key: rpx.equinox.Parametrized(MLP(key), FROZEN))(keys)
        plain = jnp.stack([jax.vmap(MLP(key))(X) for key in keys])
        return eqx.filter_vmap(lambda model: jax.vmap(model)(X))(models), plain

    np.testing.assert_allclose(*run(jax.random.split(jax.random.key(0), 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
def test_each_bias_of_a_cell_is_known_by_its_size_as_a_vector(cell):
    many = eqx.filter_eval_shape(
        eqx.filter_vmap(lambda key: cell(4, 5, key=key)), jax.random.split(jax.random.key(0), 3)
    )
    p = rpx.WeightNorm(axis=None, where="bias.*")
    assert repr(p.with_axes(many)) == "WeightNorm(axis=None, where='bias.*', stacked=0)"
    for name in ("bias", "bias_n") if cell is eqx.nn.GRUCell else ("bias",):
        with pytest.raises(ValueError, match=rf"at '{name}': .*it is a bias or a scale of eqx\.nn\.{cell.__name__}"):
            rpx.WeightNorm(where=name).with_axes(many)


def changed(f: Any) -> Any:
    """A wrapped model after ``f`` of all its arrays."""
    wrapped = rpx.equinox.Parametrized(model(), FROZEN)
    with jax.numpy_dtype_promotion("standard"):
        return eqx.combine(jax.tree.map(f, eqx.filter(wrapped, eqx.is_array)), wrapped)


class Folded(eqx.Module):
    def fold(self) -> int:
        return 0


class Shared(eqx.Module):
    """A table that is the matrix of another layer too."""

    pair: eqx.nn.Shared

    def __init__(self) -> None:
        key = jax.random.key(0)
        pair = eqx.nn.Embedding(4, 4, key=key), eqx.nn.Linear(4, 4, key=key)
        self.pair = eqx.nn.Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)

    def __call__(self, i: Any) -> jax.Array:
        table, out = self.pair()
        return out(table(i))


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case: Case) -> None:
    case.check(globals())
