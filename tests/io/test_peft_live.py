"""Adapters of models in memory, whose tensors hold the names of adapters; tests against PEFT are in ``tests/peers``."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table

import reparax as rpx

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
DENSE = "base_model.model.dense"
SHAPES = {"dense": {"kernel": (3, 4), "bias": (4,)}, "head": {"kernel": (4, 2)}}
LIKE = {layer: {name: np.zeros(shape, np.float32) for name, shape in held.items()} for layer, held in SHAPES.items()}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def lora(seed, name=""):
    return {f"{DENSE}.lora_A{name}.weight": normal(2, 3, seed=seed), f"{DENSE}.lora_B{name}.weight": normal(4, 2)}


def live():
    """``state_dict()`` of a model with two adapters, of which one trains a bias and a whole module too."""
    base = {"base_layer.weight": normal(4, 3), "base_layer.bias": normal(4, seed=5)}
    copies = {name: normal(2, 4, seed=seed) for seed, name in enumerate(("original_module", "modules_to_save.first"))}
    tensors = {f"{DENSE}.{name}": x for name, x in base.items()} | lora(1, ".first") | lora(2, ".second")
    return tensors | {f"base_model.model.head.{name}.weight": x for name, x in copies.items()}


def folded(tensors, config=CONFIG, **how):
    p, raw = rpx.io.from_peft(tensors, config, LIKE, **how)
    return jax.tree.map(np.asarray, p.fold(raw)), p


def test_an_adapter_of_a_model_in_memory_is_that_of_its_file():
    (got, p), (want, q) = folded(live(), adapter="second"), folded(lora(2))
    assert p == q
    jax.tree.map(np.testing.assert_array_equal, got, want)
    product = (lora(2)[f"{DENSE}.lora_B.weight"] @ lora(2)[f"{DENSE}.lora_A.weight"]).T
    np.testing.assert_allclose(got["dense"]["kernel"], 2 * product, rtol=1e-5)


def test_one_adapter_needs_no_name():
    one = {name: x for name, x in live().items() if ".first." not in name}
    jax.tree.map(np.testing.assert_array_equal, folded(one)[0], folded(lora(2))[0])


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_what_trains_beside_the_adapter_is_read(bias):
    got, _ = folded(live(), {**CONFIG, "bias": bias}, adapter="first")
    np.testing.assert_array_equal(got["head"]["kernel"], normal(2, 4, seed=1).T)
    np.testing.assert_array_equal(got["dense"]["bias"], np.zeros(4) if bias == "none" else normal(4, seed=5))


def test_magnitudes_of_dora_and_tables():
    like = {"embed": {"embedding": jnp.ones((5, 4))}, "dense": {"kernel": jnp.ones((3, 4))}}
    ends = {"lora_embedding_A": normal(2, 5), "lora_embedding_B": normal(4, 2), "lora_magnitude_vector": normal(4) ** 2}
    file = {f"base_model.model.embed.{end}": x for end, x in ends.items()} | lora(1)
    file |= {f"{DENSE}.lora_magnitude_vector": normal(4, seed=3) ** 2}
    added = {"_A": "_A.x", "_B": "_B.x", "_vector": "_vector.x.weight"}
    memory = {re.sub("_A|_B|_vector", lambda match: added[match[0]], name): x for name, x in file.items()}
    p, raw = rpx.io.from_peft(file, {**CONFIG, "use_dora": True}, like)
    q, other = rpx.io.from_peft(memory, {**CONFIG, "use_dora": True}, like)
    assert p == q
    jax.tree.map(np.testing.assert_array_equal, p.fold(raw), q.fold(other))


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
