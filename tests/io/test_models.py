"""Every array of models of several libraries, to torch and to PEFT: right, or refused, and counted.

What is right is written by hand: how the axes of an array stand in torch, by the documentation of its library.
"""

import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import numpy as np
import pytest
from flax import nnx
from grids import mostly_thorough

import reparax as rpx
from reparax.core.paths import items, path_text
from reparax.numerics.arithmetic import is_array

RNG = np.random.default_rng(0)
N = 6  # the size of all axes: no shape tells one from another


def numbers(tree):
    """The tree with random numbers, drawn by numpy."""
    return jax.tree.map(lambda x: RNG.standard_normal(x.shape).astype(np.float32), tree)


def square(*shape):
    return np.zeros(shape or (N, N), np.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        h = nn.LayerNorm(name="norm")(nn.Dense(N, name="dense")(nn.Embed(N, N, name="embed")(tokens)))
        h = nn.Conv(N, (3,), name="conv")(h) + nn.ConvTranspose(N, (3,), name="up")(h)
        return (
            nn.MultiHeadDotProductAttention(2, name="attention")(h, h)
            + self.param("query", nn.initializers.ones, (N, N))[None]
        )


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=N)
        return layer(name="layers")(x, None)[0]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(N, name="dense")(nn.LayerNorm(name="norm")(x)), None


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(N, N, rngs=rngs)
        self.embed = nnx.Embed(N, N, rngs=rngs)
        self.conv = nnx.Conv(N, N, (3,), rngs=rngs)
        self.up = nnx.ConvTranspose(N, N, (3,), rngs=rngs)
        self.turn = nnx.Einsum("oi,bi->bo", (N, N), rngs=rngs)
        self.norm = nnx.LayerNorm(N, rngs=rngs)


class Haiku(hk.Module):
    def __call__(self, tokens):
        h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Linear(N)(hk.Embed(N, N)(tokens)))
        return hk.nets.MLP([N])(hk.Conv1D(N, 3)(h) + hk.Conv1DTranspose(N, 3)(h))


class Cells(eqx.Module):
    linear: eqx.nn.Linear
    embed: eqx.nn.Embedding
    conv: eqx.nn.Conv1d
    up: eqx.nn.ConvTranspose1d
    cell: eqx.nn.GRUCell
    norm: eqx.nn.LayerNorm

    def __init__(self):
        key = jax.random.key(0)
        self.linear, self.embed = eqx.nn.Linear(N, N, key=key), eqx.nn.Embedding(N, N, key=key)
        self.conv = eqx.nn.Conv1d(N, N, 3, key=key)
        self.up = eqx.nn.ConvTranspose1d(N, N, 3, key=key)
        self.cell, self.norm = eqx.nn.GRUCell(N, N, key=key), eqx.nn.LayerNorm(N)


class Linear(eqx.Module):
    """As in Levanter: a class of the same name, whose weight has named axes in either order."""

    weight: dict
    bias: dict


def linen(module, *args):
    return numbers(jax.eval_shape(lambda: module.init(jax.random.key(0), *args)["params"]))


def haiku(make, *args):
    return numbers(jax.eval_shape(hk.transform(make).init, jax.random.key(0), *args))


def filled(make):
    shapes = eqx.filter_eval_shape(make)
    return jax.tree.map(lambda x: RNG.standard_normal(x.shape).astype(np.float32) if hasattr(x, "shape") else x, shapes)


TOKENS = np.zeros((N, N), np.int32)
KERNEL, ALIKE, TABLE = "io->oi", "oi->oi", "table"
VECTOR = "a->a"
CONV, UP = "kio->oik", "kio->iok flipped"
COLUMN = "oi->o"

# For each model its arrays: what they are in torch, or None where it must be refused.
MODELS = {
    "linen": (
        lambda: linen(Linen(), TOKENS),
        {
            "embed/embedding": TABLE,
            "dense/kernel": KERNEL,
            "(dense|norm|conv|up)/(bias|scale)": VECTOR,
            "attention/out/bias": VECTOR,
            "(conv|up)/kernel|query|attention/.*": None,
        },
    ),
    "linen under scan": (lambda: linen(Scanned(), square()), {".*": None}),
    "nnx": (
        lambda: Nnx(nnx.Rngs(0)),
        {
            "embed/embedding": TABLE,
            "dense/kernel": KERNEL,
            "conv/kernel": CONV,
            "up/kernel": UP,
            "turn/kernel": None,
            ".*(bias|scale)": VECTOR,
        },
    ),
    "haiku": (
        lambda: haiku(lambda x: Haiku()(x), TOKENS),
        {
            "haiku/embed/embeddings": TABLE,
            "haiku/(linear|mlp/~/linear_0)/w": KERNEL,
            "haiku/conv1_d.*/w": None,
            ".*/(b|scale|offset)": VECTOR,
        },
    ),
    "haiku of one level": (lambda: haiku(lambda x: hk.Linear(N)(x), square()), {"linear/w": None, "linear/b": VECTOR}),
    "equinox": (
        lambda: filled(Cells),
        {
            "linear/weight": ALIKE,
            "cell/weight_.h": ALIKE,
            "embed/weight": TABLE,
            "conv/weight": "oik->oik",
            "up/weight": "oik->iok flipped",
            "(conv|up)/bias": COLUMN,
            "(linear|cell|norm)/(bias.*|weight)": VECTOR,
        },
    ),
    "equinox, stacked": (
        lambda: jax.tree.map(
            lambda x: np.broadcast_to(x, (N, *x.shape)).copy(), eqx.nn.Linear(N, N, key=jax.random.key(0))
        ),
        {".*": None},
    ),
    "plain": (
        lambda: numbers(
            {"layers": [{"q": square(), "o": square(), "g": square(N)} for _ in range(2)], "head": square()}
        ),
        {"layers/./g": VECTOR, ".*": None},
    ),
    "plain w": (
        lambda: numbers({"linear": {"w": square(), "b": square(N)}, "out": {"inner": {"w": square()}}}),
        {"linear/b": VECTOR, ".*": None},
    ),
    "torch's names": (
        lambda: numbers(
            {"lstm": {"weight_ih": square(), "weight_hh": square(), "bias_ih": square(N)}, "weight": square()}
        ),
        {"lstm/weight_.h": ALIKE, "lstm/bias_ih": VECTOR, "weight": None},
    ),
    "as in Levanter": (
        lambda: {"q": Linear({"array": numbers(square())}, {"array": numbers(square(N))})},
        {"q/bias/array": VECTOR, "q/weight/array": None},
    ),
    "as in MaxText": (
        lambda: numbers(
            {
                "token_embedder": {"embedding": square()},
                "decoder": {
                    "layers": {"mlp": {"wi": {"kernel": square(N, N, N)}}, "norm": {"scale": square()}},
                    "decoder_norm": {"scale": square(N)},
                    "logits_dense": {"kernel": square()},
                },
            }
        ),
        {
            "token_embedder/embedding": TABLE,
            "decoder/decoder_norm/scale": VECTOR,
            "decoder/logits_dense/kernel": KERNEL,
            "decoder/layers/.*": None,
        },
    ),
}
COUNTS = {
    "linen": (8, 10),
    "linen under scan": (0, 4),
    "nnx": (9, 1),
    "haiku": (9, 2),
    "haiku of one level": (1, 1),
    "equinox": (13, 0),
    "equinox, stacked": (0, 2),
    "plain": (2, 5),
    "plain w": (1, 2),
    "torch's names": (3, 1),
    "as in Levanter": (1, 1),
    "as in MaxText": (3, 2),
}
EACH = pytest.mark.parametrize("name", mostly_thorough(MODELS, "linen", "equinox", "plain"))


def in_torch(x, how):
    """An array as it stands in torch, by numpy."""
    if how in (VECTOR, TABLE):
        return x
    if how == COLUMN:
        return x.reshape(-1)
    turned = np.einsum(how.removesuffix(" flipped"), x)
    return turned[..., ::-1] if how.endswith("flipped") else turned


def arrays_of(name):
    """The model, and for the path of each array its numbers and what it is in torch."""
    make, kinds = MODELS[name]
    tree = make()
    arrays = {path_text(keys): np.asarray(x) for keys, x in items(tree) if is_array(x)}
    how = {path: next(kinds[each] for each in kinds if re.fullmatch(each, path)) for path in arrays}
    return tree, {path: (x, how[path]) for path, x in arrays.items()}


@EACH
def test_every_array_is_right_in_torch_or_refused(name):
    tree, arrays = arrays_of(name)
    text = ""
    try:
        rpx.io.to_torch(rpx.Chain(), tree)
    except ValueError as error:
        text = str(error)
    refused = {path for path in arrays if repr(path) in text}
    assert refused == {path for path, (_, how) in arrays.items() if how is None}
    names = {path: f"{i}.weight" for i, path in enumerate(arrays)}
    state = rpx.io.to_torch(rpx.Chain(), tree, names=names, layouts=dict.fromkeys(refused, "same"))
    for path in arrays.keys() - refused:
        np.testing.assert_array_equal(state[names[path]], in_torch(*arrays[path]), err_msg=path)
    assert (len(arrays) - len(refused), len(refused)) == COUNTS[name]


def transposed(x, kernel, *dimensions, **how):
    return jax.lax.dot_general(x, kernel.T, *dimensions, **how)


class Turned(nnx.Linear):
    """A layer that multiplies with the transposed kernel."""

    def __call__(self, x):
        return x @ self.kernel[...].T


class Own(nnx.Module):
    """A module of which nothing but a name is known."""

    def __init__(self):
        self.kernel = nnx.Param(square())


class TurnedEquinox(eqx.nn.Linear):
    def __call__(self, x, key=None):
        return self.weight.T @ x


class Transposed(eqx.Module):
    w: jax.Array

    def __jax_array__(self):
        return self.w.T


def with_transposed_weight():
    return eqx.tree_at(lambda layer: layer.weight, eqx.nn.Linear(N, N, key=jax.random.key(0)), Transposed(square()))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: nnx.Linear(N, N, dot_general=transposed, rngs=nnx.Rngs(0)), "kernel"),
        (lambda: Turned(N, N, rngs=nnx.Rngs(0)), "kernel"),
        (Own, "kernel"),
        (lambda: TurnedEquinox(N, N, key=jax.random.key(0)), "weight"),
        (with_transposed_weight, "weight/w"),
    ],
    ids=["another function", "a subclass", "an own class", "a subclass of equinox", "a module in place of an array"],
)
def test_a_layer_that_may_compute_otherwise_than_its_class_has_no_layout(make, path):
    with pytest.raises(ValueError, match=f"^to_torch: neither a name nor a class determines the axes of '{path}'"):
        rpx.io.to_torch(rpx.Chain(), make())
    layouts = {path: "kernel"}
    state = rpx.io.to_torch(rpx.Chain(), numbers(make()), names={path: "w"}, layouts=layouts)
    like = jax.eval_shape(make)
    back = rpx.io.from_torch(rpx.Chain(), state, like, names={path: "w"}, layouts=layouts)
    found = next(x for keys, x in items(back) if path_text(keys) == path)
    np.testing.assert_array_equal(state["w"], np.asarray(found).T)


def test_an_adapter_of_a_module_of_ones_own_is_read_by_its_layout():
    like = {"dense": Own()}
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, N), (N, 2)))
    tensors, config = {"dense.lora_A.weight": a, "dense.lora_B.weight": b}, {"peft_type": "LORA", "r": 2}
    p, raw = rpx.io.from_peft(tensors, config, like, layouts={"dense/kernel": "kernel"})
    np.testing.assert_allclose(p.fold(raw)["dense"].kernel[...], 4 * (b @ a).T, rtol=1e-5, atol=1e-6)


@EACH
def test_every_matrix_is_right_in_peft_or_refused(name):
    tree, arrays = arrays_of(name)
    matrices = {path: how for path, (x, how) in arrays.items() if x.ndim == 2 and how != COLUMN}
    for path, how in matrices.items():
        rows = 1 if how == ALIKE else 0
        p = rpx.Freeze() >> rpx.LoRA(2, 6.0, rows=rows, columns=1 - rows, where=re.escape(path))
        raw = numbers(jax.eval_shape(p.init, tree, jax.random.key(0)))
        held = {keys[-1]: np.asarray(x) for keys, x in items(raw) if "@lora" in keys}
        difference = 3.0 * held["a"] @ held["b"]
        difference = difference.T if rows else difference
        if how not in (KERNEL, ALIKE, TABLE):
            with pytest.raises(
                ValueError, match=f"{re.escape(path)}: neither a name nor a class determines the axes of "
            ):
                rpx.io.to_peft(p, raw, names={path: "m.weight"})
            continue
        tensors, config = rpx.io.to_peft(p, raw, names={path: "m.weight"})
        a, b, turned = (f"base_model.model.m.lora_{end}" for end in ("A.weight", "B.weight", "embedding_A"))
        assert (config["lora_alpha"], config["r"], turned in tensors) == (6, 2, how == TABLE)
        if how == TABLE:  # PEFT adds the transposed product to a table
            a, b = turned, turned.replace("_A", "_B")
        product = 3.0 * tensors[b] @ tensors[a]
        want = difference if how == TABLE else in_torch(difference, how)
        np.testing.assert_allclose(product.T if how == TABLE else product, want, rtol=1e-5, atol=1e-5)
