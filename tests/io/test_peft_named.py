"""What a configuration names, which the file must have; the names that PEFT finds are compared in ``tests/peers``."""

from functools import partial

import jax
import numpy as np
import pytest
from errors import table

import reparax as rpx

PREFIX = "base_model.model."
KINDS = {
    "LORA": ({"r": 1}, {"lora_A.weight": (1, 3), "lora_B.weight": (3, 1)}),
    "IA3": ({}, {"ia3_l": (3, 1)}),
    "TRAINABLE_TOKENS": ({"token_indices": [1]}, {"trainable_tokens_delta": (1, 3)}),
}


def zeros(*shape):
    return np.zeros(shape, np.float32)


def layer():
    return {"kernel": zeros(3, 3), "bias": zeros(3)}


MODEL = {
    "h": {"embed": {"embedding": zeros(4, 3)}, "layers": [{name: layer() for name in "qv"} for _ in range(3)]},
    "head": {"dense": layer(), "out": {"kernel": zeros(3, 3)}},
}
Q, V = ([f"h.layers.{i}.{name}" for i in range(3)] for name in "qv")
HEAD = {"head.dense.weight": (3, 3), "head.dense.bias": (3,), "head.out.weight": (3, 3)}
OF_Q = {f"{name}.base_layer.bias": (3,) for name in Q}
BIASES = OF_Q | {f"{name}.bias": (3,) for name in [*V, "head.dense"]}
DIFFERENCES = {f"{name}.lora_B.bias": (3,) for name in Q}
INPUTS = {f"{name}.ia3_l": (1, 3) for name in Q}
TOKENS = {"h.embed.token_adapter.trainable_tokens_delta": (1, 3)}


def reads(modules, kind="LORA", more=(), model=MODEL, **config):
    """The raw tree of a file with tensors of these modules, and others of these names and shapes."""
    settings, ends = KINDS[kind]
    shapes = {f"{name}.{end}": shape for name in modules for end, shape in ends.items()} | dict(more)
    tensors = {PREFIX + name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return rpx.io.from_peft(tensors, {"peft_type": kind, **settings, **config}, model)[1]


COMPLETE = {
    "names": partial(reads, Q, target_modules=["q"]),
    "a set, as in memory": partial(reads, Q, target_modules={"q"}),
    "a whole name": partial(reads, Q[:1], target_modules=["h.layers.0.q"]),
    "an expression": partial(reads, [Q[0], Q[2]], target_modules=r".*\.[02]\.q"),
    "parts of names that are no names": partial(reads, Q, target_modules=["q", "ense", "layers.1", "out.weight"]),
    "one layer": partial(reads, Q[1:2], target_modules=["q"], layers_to_transform=1),
    "two layers": partial(reads, [Q[0], Q[2]], target_modules=["q"], layers_to_transform=[0, 2]),
    "layers of several patterns": partial(
        reads, Q[:1], target_modules=["q"], layers_to_transform=[0], layers_pattern=["blocks", "layers"]
    ),
    "layers beside a whole name": partial(
        reads, [Q[0], V[2]], target_modules=["q", "h.layers.2.v"], layers_to_transform=[0]
    ),
    "an excluded name": partial(reads, Q, target_modules=["q", "v"], exclude_modules=["v"]),
    "an excluded expression": partial(reads, Q, target_modules=["q", "v"], exclude_modules=".*v"),
    "saved whole": partial(reads, Q, target_modules=["q", "dense"], modules_to_save=["head"], more=HEAD),
    "names that the model lacks": partial(reads, Q, target_modules=["q", "k"], modules_to_save=["classifier"]),
    "biases": partial(reads, Q, target_modules=["q"], bias="lora_only", more=OF_Q),
    "all biases": partial(reads, Q, target_modules=["q"], bias="all", more=BIASES),
    "differences of biases": partial(reads, Q, target_modules=["q"], lora_bias=True, more=DIFFERENCES),
    "tokens": partial(reads, Q, target_modules=["q"], trainable_token_indices={"embed": [1]}, more=TOKENS),
    "no tokens": partial(reads, Q, target_modules=["q"], trainable_token_indices={}),
    "gains": partial(reads, Q, "IA3", target_modules=["q"], feedforward_modules=[]),
    "gains of inputs": partial(reads, [], "IA3", target_modules=["q"], feedforward_modules=["k", ".q"], more=INPUTS),
    "gains of inputs, by an expression": partial(
        reads, [], "IA3", target_modules=["q"], feedforward_modules=r"h\.layers\.\d\.q", more=INPUTS
    ),
    "gains of outputs beside an expression": partial(reads, Q, "IA3", target_modules=["q"], feedforward_modules="q|v"),
    "tokens alone": partial(reads, ["h.embed"], "TRAINABLE_TOKENS", target_modules=["embed"]),
}


@pytest.mark.parametrize("case", COMPLETE)
def test_a_file_with_all_that_its_configuration_names_is_read(case):
    raw = jax.eval_shape(lambda model: COMPLETE[case](model=model), MODEL)
    assert len(jax.tree.leaves(raw)) > len(jax.tree.leaves(MODEL))


@table(__file__)
def test_what_a_configuration_names_must_be_in_the_file(case):
    case.check(globals())
