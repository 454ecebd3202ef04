"""Files of PEFT by hand, and what of them is refused; tests against PEFT itself are in ``tests/peers``."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import fold, init, zeros
from errors import raises, table
from grids import mostly_thorough
from hypothesis import given
from hypothesis import strategies as st

import reparax as rpx
from reparax.io._parameters import pattern_of
from reparax.io._peft_adapters import (
    Adapter,
    StoredAdapter,
    _gain_conversions,
    _lora_conversions,
    _token_conversions,
    read_adapter,
)
from reparax.io._peft_read import _tied_table_errors
from reparax.io._peft_target import Target

PREFIX = "base_model.model."
DENSE, OUT = "dense/kernel", "out/kernel"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
ADVICE = (
    "Pass the `config` of this adapter, and `like`, `names` and `layouts` of its model, or merge the adapter in PEFT "
    "with `merge_and_unload`, and read the weights with `from_torch`."
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def target(tensor, shape, layout="kernel", **more):
    """An array of a model that PEFT adapts."""
    return Target("a/kernel", tensor, shape, np.dtype("float32"), layout, **more)


def model():
    dense = {"kernel": jnp.asarray(normal(8, 6)), "bias": jnp.asarray(normal(6, seed=1))}
    return {"dense": dense, "out": {"kernel": jnp.asarray(normal(6, 4, seed=2))}}


def read(tensors, config, like, **how):
    """What ``from_peft`` returns, with all that it computes in one program."""
    chains = []

    def raw_of(like):
        p, raw = rpx.io.from_peft(tensors, config, like, **how)
        chains.append(p)
        return raw

    raw = jax.jit(raw_of)(like)
    return chains[0], raw


KEY = jax.random.key(0)


def lora(**layers):
    """Tensors of LoRA for layers of a rank, an input and an output size."""
    tensors = {}
    for i, (name, (rank, inputs, outputs)) in enumerate(layers.items()):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = normal(rank, inputs, seed=10 + i)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = normal(outputs, rank, seed=20 + i)
    return tensors


def test_a_weight_is_the_base_and_the_scaled_product():
    tensors, params = lora(dense=(2, 8, 6)), model()
    p, raw = rpx.io.from_peft(tensors, CONFIG, params)
    assert p == rpx.Freeze() >> rpx.LoRA(2, 4.0, where="dense/kernel")
    a, b = (tensors[f"{PREFIX}dense.lora_{end}.weight"] for end in "AB")
    np.testing.assert_allclose(p.fold(raw)["dense"]["kernel"], params["dense"]["kernel"] + 2.0 * (b @ a).T, rtol=1e-5)
    assert jnp.array_equal(p.fold(raw)["out"]["kernel"], params["out"]["kernel"])
    assert [x.shape for x in jax.tree.leaves(rpx.partition(raw)[0])] == [(8, 2), (2, 6)]


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"use_rslora": True}, 4 / np.sqrt(2)),
        ({"use_rslora": False}, 4 / 2),
        ({"use_rslora": True, "alpha_pattern": {"dense": 3}}, 3 / np.sqrt(2)),
    ],
)
def test_the_divisor_of_alpha_is_the_rank_or_its_root_for_a_weight_and_for_its_bias(settings, factor):
    params, bias = model(), normal(6, seed=5)
    tensors = lora(dense=(2, 8, 6)) | {f"{PREFIX}dense.lora_B.bias": bias}
    p, raw = rpx.io.from_peft(tensors, CONFIG | {"lora_bias": True} | settings, params)
    a, b = (tensors[f"{PREFIX}dense.lora_{end}.weight"] for end in "AB")
    folded = p.fold(raw)["dense"]
    want = params["dense"]["kernel"] + factor * (b @ a).T
    np.testing.assert_allclose(folded["kernel"], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(folded["bias"], params["dense"]["bias"] + factor * bias, rtol=1e-5, atol=1e-5)


def test_the_alpha_that_a_config_leaves_out_is_that_of_peft():
    config = {name: value for name, value in CONFIG.items() if name != "lora_alpha"}
    p, _ = rpx.io.from_peft(lora(dense=(2, 8, 6)), config, model())
    assert p[1].alpha == 8


def test_a_layer_with_outputs_first_is_the_transposed_one():
    tensors = lora(dense=(2, 8, 6))
    straight = {"dense": {"kernel": model()["dense"]["kernel"]}}
    turned = {"dense": {"weight": straight["dense"]["kernel"].T}}
    p, raw = rpx.io.from_peft(tensors, CONFIG, straight)
    layouts = {"dense/weight": "same"}
    q, other = rpx.io.from_peft(tensors, CONFIG, turned, layouts=layouts)
    assert q == rpx.Freeze() >> rpx.LoRA(2, 4.0, rows=1, columns=0, where="dense/weight")
    np.testing.assert_allclose(q.fold(other)["dense"]["weight"].T, p.fold(raw)["dense"]["kernel"], rtol=1e-6)
    again, _ = rpx.io.to_peft(q, other, layouts=layouts)
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())


def test_ranks_and_alphas_by_pattern_are_stages_of_their_own_and_come_back():
    tensors = lora(dense=(1, 8, 6), out=(2, 6, 4))
    config = CONFIG | {"rank_pattern": {"dense": 1}, "alpha_pattern": {"out": 3}}
    p, raw = read(tensors, config, model())
    assert p == rpx.Freeze() >> rpx.LoRA(1, 4.0, where="dense/kernel") >> rpx.LoRA(2, 3.0, where="out/kernel")
    again, written = rpx.io.to_peft(p, raw)
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())
    ranks = {module: written["rank_pattern"].get(module, written["r"]) for module in ("dense", "out")}
    alphas = {module: written["alpha_pattern"].get(module, written["lora_alpha"]) for module in ("dense", "out")}
    assert (ranks, alphas) == ({"dense": 1, "out": 2}, {"dense": 4, "out": 3})


def test_a_name_that_ends_others_is_written_from_its_start():
    params = {"out": {"kernel": jnp.ones((4, 3))}, "block": {"out": {"kernel": jnp.ones((4, 3))}}}
    p = rpx.Freeze() >> rpx.LoRA(1, 2.0, where="block/.*") >> rpx.LoRA(2, 2.0, where="out/.*")
    _, config = rpx.io.to_peft(p, zeros(p.init, params, KEY))
    assert (config["r"], config["rank_pattern"]) == (1, {"^out": 2})


def test_a_name_that_ends_others_is_written_as_an_expression_that_reads_back():
    params = {"q": {"kernel": jnp.ones((4, 3))}, "block": {"q": {"kernel": jnp.ones((4, 3))}}}
    for p in (rpx.Freeze() >> rpx.LoRA(1, 2.0, where="q/.*"), rpx.Freeze() >> rpx.LoRA(1, 2.0)):
        raw = zeros(p.init, params, KEY)
        tensors, config = rpx.io.to_peft(p, raw)
        assert config["target_modules"] == ("q" if p[1].where else ["block.q", "q"])
        _, again = read(tensors, config, params)
        assert jax.tree.structure(again) == jax.tree.structure(raw)


def test_a_stored_base_and_noise_are_left_out():
    params = model()
    p = rpx.Quantized("int8", where="out/kernel") >> rpx.VarNoise(0.1) >> rpx.LoRA(2, 4.0, where="out/kernel")
    raw = init(p, params, jax.random.key(0))
    tensors, config = rpx.io.to_peft(p, raw)
    assert set(tensors) == {f"{PREFIX}out.lora_{end}.weight" for end in "AB"} | {
        f"{PREFIX}dense.weight",
        f"{PREFIX}dense.bias",
    }
    assert list(tensors) == sorted(tensors)
    assert config["modules_to_save"] == ["dense"]  # as it trains here


def test_an_alpha_is_written_as_it_is_with_and_without_rslora():
    for root in (False, True):
        p = rpx.Freeze() >> rpx.LoRA(4, 8.0, use_rslora=root)
        _, config = rpx.io.to_peft(p, zeros(p.init, model(), KEY))
        assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, root)


def test_an_alpha_of_none_is_a_factor_of_one():
    p = rpx.Freeze() >> rpx.LoRA(2, use_rslora=True)
    _, config = rpx.io.to_peft(p, zeros(p.init, model(), KEY))
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 2, False)


def test_weights_that_torch_keeps_with_inputs_first_say_so():
    tensors = lora(dense=(2, 6, 6))
    params = {"dense": {"kernel": jnp.asarray(normal(6, 6)), "bias": jnp.zeros(6)}}
    config = CONFIG | {"fan_in_fan_out": True}
    p, raw = rpx.io.from_peft(tensors, config, params, layouts={"dense/kernel": "same"})
    a, b = (tensors[f"{PREFIX}dense.lora_{end}.weight"] for end in "AB")
    np.testing.assert_allclose(p.fold(raw)["dense"]["kernel"], params["dense"]["kernel"] + 2.0 * (b @ a).T, rtol=1e-4)


def test_what_peft_has_put_aside_is_not_read():
    tensors = lora(dense=(2, 8, 6)) | {
        f"{PREFIX}out.modules_to_save.weight": normal(4, 6, seed=7),
        f"{PREFIX}out.original_module.weight": normal(4, 6, seed=8),
    }
    p, raw = rpx.io.from_peft(tensors, CONFIG, model())
    np.testing.assert_array_equal(p.fold(raw)["out"]["kernel"], normal(4, 6, seed=7).T)


def test_a_base_that_is_saved_with_its_adapter_is_the_base():
    params = {"embed": {"embedding": normal(5, 3)}, "dense": model()["dense"]}
    table, a, b = normal(5, 3, seed=4), normal(2, 5, seed=5), normal(3, 2, seed=6)
    name = f"{PREFIX}embed"
    tensors = {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b, f"{name}.base_layer.weight": table}
    p, raw = rpx.io.from_peft(tensors, CONFIG, params)
    assert p == rpx.Freeze() >> rpx.LoRA(2, 4.0, where="embed/embedding")
    np.testing.assert_allclose(p.fold(raw)["embed"]["embedding"], table + 2.0 * (b @ a).T, rtol=1e-5)


def test_lengths_of_half_precision_come_back_in_it():
    tensors = lora(dense=(2, 8, 6)) | {f"{PREFIX}dense.lora_magnitude_vector": normal(6, seed=3)}
    tensors = {name: x.astype(jnp.bfloat16) for name, x in tensors.items()}
    like = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model())
    p, raw = read(tensors, CONFIG | {"use_dora": True}, like)
    again, _ = rpx.io.to_peft(p, raw)
    assert {name: (x.dtype, x.tobytes()) for name, x in again.items()} == {
        name: (x.dtype, x.tobytes()) for name, x in tensors.items()
    }


@pytest.mark.parametrize("layout", ["kernel", "same"])
def test_gains_of_a_convolution_multiply_its_input_channels_or_its_outputs(layout):
    shape, channels, outputs = ((3, 2, 5, 4), 2, 3) if layout == "kernel" else ((4, 5, 3, 2), 1, 0)
    params = {"conv": {"kernel": normal(*shape)}}
    for inputs, size, axis in ((["conv"], 5, channels), ([], 4, outputs)):
        gains = normal(1, size, 1, 1, seed=2)
        config = {"peft_type": "IA3", "feedforward_modules": inputs}
        how = {"layouts": {"conv/kernel": layout}}
        p, raw = read({f"{PREFIX}conv.ia3_l": gains}, config, params, **how)
        want = params["conv"]["kernel"] * gains.reshape([size if i == axis else 1 for i in range(4)])
        np.testing.assert_allclose(fold(p, raw)["conv"]["kernel"], want, rtol=1e-6)
        again, written = rpx.io.to_peft(p, raw, **how)
        np.testing.assert_array_equal(again[f"{PREFIX}conv.ia3_l"], gains)
        assert written["feedforward_modules"] == inputs


def test_an_alpha_for_each_array_is_written_by_pattern():
    p = rpx.Freeze() >> rpx.LoRA(2, {"dense/.*": 3.0, "out/.*": 5.0})
    _, config = rpx.io.to_peft(p, zeros(p.init, model(), KEY))
    assert {config["lora_alpha"], *config["alpha_pattern"].values()} == {3, 5}


def test_a_linear_layer_of_torch_is_no_table():
    params = {"q": {"weight": jnp.ones((6, 6))}}
    p = rpx.Freeze() >> rpx.LoRA(2, columns=-1)
    with raises(
        ValueError,
        refused(
            "q/weight: PEFT's adapters map inputs to outputs, but LoRA(2, columns=-1) has other axes. Pass "
            "`rows=1, columns=0` to the stage"
        ),
    ):
        rpx.io.to_peft(p, zeros(p.init, params, KEY), layouts={"q/weight": "same"})
    tensors, _ = rpx.io.to_peft(p, zeros(p.init, params, KEY), layouts={"q/weight": "embedding"})
    assert sorted(tensors) == [f"{PREFIX}q.lora_embedding_{end}" for end in "AB"]


def test_only_a_tensor_called_bias_is_one():
    params = {"dense": {"kernel": jnp.ones((6, 6))}, "attention": {"relative_bias": jnp.ones(6)}}
    p = rpx.Freeze(where="dense/kernel") >> rpx.LoRA(2, where="dense/kernel")
    config = rpx.io.to_peft(p, zeros(p.init, params, KEY))[1]
    assert (config["bias"], config["modules_to_save"]) == ("none", ["attention"])


def test_ends_of_names_that_mean_several_modules():
    params = {name: {"kernel": jnp.ones((8, 8))} for name in ("lin", "xlin")}
    p = rpx.Freeze() >> rpx.adapters.Gain(axis=0, where="lin/kernel") >> rpx.adapters.Gain(axis=-1, where="xlin/kernel")
    assert rpx.io.to_peft(p, p.init(params))[1]["feedforward_modules"] == "lin"
    q = rpx.Freeze(where=rpx.all_but("lin/kernel")) >> rpx.LoRA(2, where="xlin/kernel")
    with raises(
        ValueError,
        "to_peft: PEFT saves each module whose name ends in 'lin', but 'xlin', which also does, is not trained whole. "
        "Freeze 'lin'.",
    ):
        rpx.io.to_peft(q, q.init(params, jax.random.key(0)))


def test_only_a_whole_part_of_a_name_is_peft_s():
    params = {"block": {"q": {"kernel": jnp.zeros((3, 2))}, "base_layernorm": {"scale": jnp.ones(2)}}}
    name, scale = f"{PREFIX}block.base_layernorm", normal(2, seed=3)
    for module in (name, f"{name}.modules_to_save", f"{name}.modules_to_save.default"):
        tensors = lora(**{"block.q": (1, 3, 2)}) | {f"{module}.weight": scale}
        p, raw = read(tensors, CONFIG | {"r": 1}, params)
        np.testing.assert_array_equal(p.fold(raw)["block"]["base_layernorm"]["scale"], scale)


def test_a_bias_of_another_factor_is_written_with_that_of_its_weight():
    p = (
        rpx.Freeze()
        >> rpx.LoRA(2, 8.0, where=DENSE)
        >> rpx.numbers.Scale(3.0, where="dense/bias")
        >> rpx.adapters.Delta(where="dense/bias")
    )
    raw = p.init(model(), jax.random.key(0))
    raw["dense"]["bias"]["@delta"]["x"]["@scale"]["x"] = jnp.asarray(normal(6, seed=4))
    tensors, config = rpx.io.to_peft(p, raw)
    assert config["lora_bias"] is True
    np.testing.assert_allclose(tensors[f"{PREFIX}dense.lora_B.bias"], 0.75 * normal(6, seed=4), rtol=1e-6)
    q, again = rpx.io.from_peft(tensors, config, model())
    np.testing.assert_allclose(q.fold(again)["dense"]["bias"], p.fold(raw)["dense"]["bias"], rtol=1e-6)


@pytest.mark.parametrize("given", [{"embed": [1, 4]}, [1, 4], {"other": [0], "model.embed": [1, 4]}])
def test_tokens_that_train_beside_lora(given):
    params = {"model": {"embed": {"embedding": jnp.zeros((5, 3))}}, "dense": model()["dense"]}
    rows = normal(2, 3, seed=5)
    tensors = lora(dense=(2, 8, 6)) | {f"{PREFIX}model.embed.token_adapter.trainable_tokens_delta": rows}
    p, raw = rpx.io.from_peft(tensors, CONFIG | {"trainable_token_indices": given}, params)
    want = np.zeros((5, 3), np.float32)
    want[[1, 4]] = rows
    np.testing.assert_array_equal(p.fold(raw)["model"]["embed"]["embedding"], want)
    again, config = rpx.io.to_peft(p, raw)
    assert config["trainable_token_indices"] == {"model.embed": [1, 4]}
    assert config["target_modules"] == ["dense"]
    assert again.keys() == tensors.keys()


@pytest.mark.parametrize(("name", "axis"), [("embedding", 0), ("kernel", -1)])
def test_tokens_that_train_alone(name, axis):
    params = {"table": {name: normal(5, 3) if axis == 0 else normal(3, 5)}}
    p = rpx.Freeze() >> rpx.adapters.TrainableSlices((1, 4), axis=axis, where=f"table/{name}")
    raw = p.init(params)
    tensors, config = rpx.io.to_peft(p, raw)
    assert (config["peft_type"], config["token_indices"]) == ("TRAINABLE_TOKENS", (1, 4))
    assert config["target_modules"] == ["table"]
    assert not {"bias", "fan_in_fan_out", "r", "feedforward_modules"} & config.keys()
    rows = params["table"][name] if axis == 0 else params["table"][name].T
    np.testing.assert_array_equal(tensors[f"{PREFIX}table.trainable_tokens_delta"], rows[[1, 4]])
    q, again = rpx.io.from_peft(tensors, config, params)
    jax.tree.map(np.testing.assert_array_equal, q.fold(again), p.fold(raw))


def test_the_usual_rank_is_read_for_a_head_of_two_outputs():
    params = {"head": {"kernel": normal(20, 2)}}
    tensors = lora(head=(8, 20, 2))
    p, raw = read(tensors, {"peft_type": "LORA"}, params)  # whose r and alpha are 8
    a, b = (tensors[f"{PREFIX}head.lora_{end}.weight"] for end in "AB")
    np.testing.assert_allclose(fold(p, raw)["head"]["kernel"], params["head"]["kernel"] + (b @ a).T, rtol=1e-4)


# ---- stacks: an adapter for each layer

COUNT, KERNEL = 30, "layers/mlp/kernel"
LAYERS = {r"layers/(\w+)/kernel": r"model.layers.{i}.\1.weight", r"layers/(\w+)/bias": r"model.layers.{i}.\1.bias"}
SINGLE = {r"(\w+)/(\w+)/kernel": r"\1.\2.weight", r"(\w+)/(\w+)/bias": r"\1.\2.bias"}
OF_LAYERS = {
    "lora": (CONFIG, {"lora_A.weight": (2, 8), "lora_B.weight": (6, 2)}),
    "rslora": (CONFIG | {"use_rslora": True}, {"lora_A.weight": (2, 8), "lora_B.weight": (6, 2)}),
    "dora": (
        CONFIG | {"use_dora": True},
        {"lora_A.weight": (2, 8), "lora_B.weight": (6, 2), "lora_magnitude_vector": (6,)},
    ),
    "ia3": ({"peft_type": "IA3"}, {"ia3_l": (6, 1)}),
    "ia3 of inputs": ({"peft_type": "IA3", "feedforward_modules": [r"mlp"]}, {"ia3_l": (1, 8)}),
    "lora with biases": (
        CONFIG | {"lora_bias": True},
        {"lora_A.weight": (2, 8), "lora_B.weight": (6, 2), "lora_B.bias": (6,)},
    ),
}


def stack(count=COUNT):
    return {"layers": {"mlp": {"kernel": jnp.asarray(normal(count, 8, 6)), "bias": jnp.asarray(normal(count, 6))}}}


@pytest.mark.parametrize("name", mostly_thorough(OF_LAYERS, "lora", "dora", "ia3"))
def test_the_adapters_of_stacked_layers_are_those_of_each_and_come_back_bit_for_bit(name):
    config, shapes = OF_LAYERS[name]
    tensors = {
        f"{PREFIX}model.layers.{i}.mlp.{end}": normal(*shape, seed=100 * i + j)
        for i in range(COUNT)
        for j, (end, shape) in enumerate(shapes.items())
    }
    p, raw = read(tensors, config, stack(), names=LAYERS)
    folded = jax.tree.map(np.asarray, fold(p, raw)["layers"]["mlp"])
    chosen = {f"layer{i}": i for i in (0, 11, COUNT - 1)}
    alone = {
        f"{PREFIX}{name}.mlp.{end}": tensors[f"{PREFIX}model.layers.{i}.mlp.{end}"]
        for name, i in chosen.items()
        for end in shapes
    }
    like = {
        name: {"mlp": jax.tree.map(lambda x, i=i: np.asarray(x)[i], stack()["layers"]["mlp"])}
        for name, i in chosen.items()
    }
    q, ones = read(alone, config, like, names=SINGLE)
    for name, one in fold(q, ones).items():
        jax.tree.map(
            lambda a, b, i=chosen[name]: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5), folded, one["mlp"]
        )
    again, written = rpx.io.to_peft(p, raw, names=LAYERS)
    assert written["target_modules"] == sorted(f"model.layers.{i}.mlp" for i in range(COUNT))
    assert again.keys() == tensors.keys()
    assert all(again[key].tobytes() == x.tobytes() for key, x in tensors.items())


def test_what_trains_beside_the_adapters_of_a_stack_is_saved_layer_by_layer():
    p = rpx.Freeze(where=rpx.all_but(".*/bias")) >> rpx.LoRA(2, 4.0, stacked=0, where=KERNEL)
    raw = init(p, stack(2), jax.random.key(0))
    tensors, config = rpx.io.to_peft(p, raw, names=LAYERS)
    biases = {f"{PREFIX}model.layers.{i}.mlp.base_layer.bias": normal(2, 6)[i] for i in range(2)}
    assert all(np.array_equal(tensors[name], x) for name, x in biases.items())
    q, back = read(tensors, config, stack(2), names=LAYERS)
    assert q == rpx.Freeze(where=rpx.all_but("layers/mlp/bias")) >> rpx.LoRA(2, 4.0, stacked=0, where=KERNEL)
    jax.tree.map(np.testing.assert_array_equal, back, raw)


def test_an_array_that_nothing_adapts_may_have_any_shape():
    params = model() | {"conv": {"kernel": jnp.ones((3, 3, 1, 2)), "bias": jnp.ones(2)}}
    p, raw = rpx.io.from_peft(lora(dense=(2, 8, 6)), CONFIG, params)
    assert set(rpx.io.to_peft(p, raw)[0]) == set(lora(dense=(2, 8, 6)))


# ---- tensors of adapters, which tell convolutions by their axes


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 2, 5, 4)])
def test_factors_with_all_axes_of_a_kernel_are_those_of_a_convolution(shape):
    *spatial, inputs, outputs = shape
    ones = [1] * len(spatial)
    a, b = normal(2, inputs, *spatial), normal(outputs, 2, *ones, seed=1)
    tensors = {f"{PREFIX}conv.lora_A.weight": a, f"{PREFIX}conv.lora_B.weight": b}
    params = {"conv": {"kernel": normal(*shape, seed=2)}}
    p, raw = read(tensors, CONFIG, params)
    product = np.einsum("ri...,or->...io", a, b.reshape(outputs, 2))
    np.testing.assert_allclose(fold(p, raw)["conv"]["kernel"], params["conv"]["kernel"] + 2.0 * product, rtol=1e-4)


def test_factors_of_a_convolution_are_told_for_each_layer_of_a_stack():
    params = {"layers": {"conv": {"kernel": np.zeros((2, 3, 5, 4), np.float32)}}}
    tensors = {
        f"{PREFIX}model.layers.{i}.conv.lora_{end}.weight": normal(*shape, seed=i)
        for i in range(2)
        for end, shape in (("A", (2, 5, 3)), ("B", (4, 2, 1)))
    }
    p, raw = read(tensors, CONFIG, params, names={"layers/conv/kernel": "model.layers.{i}.conv.weight"})
    got = np.asarray(fold(p, raw)["layers"]["conv"]["kernel"])
    for i in range(2):
        a, b = (tensors[f"{PREFIX}model.layers.{i}.conv.lora_{end}.weight"] for end in "AB")
        want = 2.0 * np.einsum("rik,or->kio", a, b[..., 0])
        np.testing.assert_allclose(got[i], want, rtol=1e-4, atol=1e-6)


def test_a_whole_kernel_with_all_axes_is_that_of_a_convolution():
    params = model() | {"conv": {"kernel": jnp.ones((3, 2, 5, 4))}}
    tensors = lora(dense=(2, 8, 6)) | {f"{PREFIX}conv.weight": normal(4, 5, 3, 2)}
    p, raw = rpx.io.from_peft(tensors, CONFIG, params)
    np.testing.assert_array_equal(p.fold(raw)["conv"]["kernel"], np.einsum("oihw->hwio", normal(4, 5, 3, 2)))


# ---- weights of Conv1D


def test_each_module_has_a_layout_of_its_own():
    tensors = lora(conv=(2, 6, 6), linear=(2, 6, 6))
    params = {name: {"kernel": jnp.asarray(normal(6, 6, seed=i))} for i, name in enumerate(("conv", "linear"))}
    for flag in (False, True):
        for layout in ("same", "conv1d"):
            config, layouts = CONFIG | {"fan_in_fan_out": flag}, {"conv/kernel": layout}
            p, raw = rpx.io.from_peft(tensors, config, params, layouts=layouts)
            for name in params:
                a, b = (tensors[f"{PREFIX}{name}.lora_{end}.weight"] for end in "AB")
                want = params[name]["kernel"] + 2.0 * (b @ a).T
                np.testing.assert_allclose(p.fold(raw)[name]["kernel"], want, rtol=1e-4, atol=1e-5)
            again, written = rpx.io.to_peft(p, raw, layouts=layouts)
            assert again.keys() == tensors.keys()
            assert all(np.array_equal(again[name], x) for name, x in tensors.items())
            assert written["fan_in_fan_out"] is True


def test_a_whole_weight_of_conv1d_is_the_same_in_torch():
    params = {"a": {"kernel": jnp.ones((6, 6))}, "b": {"kernel": jnp.ones((6, 6))}}
    tensors, layouts = lora(a=(2, 6, 6)) | {f"{PREFIX}b.weight": normal(6, 6)}, {".*": "conv1d"}
    p, raw = rpx.io.from_peft(tensors, CONFIG, params, layouts=layouts)
    np.testing.assert_array_equal(p.fold(raw)["b"]["kernel"], normal(6, 6))
    np.testing.assert_array_equal(rpx.io.to_peft(p, raw, layouts=layouts)[0][f"{PREFIX}b.weight"], normal(6, 6))


@pytest.mark.parametrize(
    "setting",
    [
        {"kasa_config": None},
        {"arrow_config": {}},
        {"lora_bias": False},
        {"lora_dropout": 0.1},
        {"qalora_group_size": 16},
    ],
)
def test_settings_without_an_effect_on_what_is_read_are_read(setting):
    assert rpx.io.from_peft(lora(dense=(2, 8, 6)), CONFIG | setting, model())[0][1] == rpx.LoRA(2, 4.0, where=DENSE)


def reading(*lines):
    text = "\n  ".join(lines)
    return f"from_peft: the adapter does not fit this model:\n  {text}\n{ADVICE}"


def changed(how):
    """The adapter of a layer, with another first tensor."""
    name, *_ = tensors = lora(dense=(2, 8, 6))
    return tensors | {name: how(tensors[name])}


def written(p, raw=None):
    return rpx.io.to_peft(p, zeros(p.init, model(), KEY) if raw is None else raw)


def refused(lines):
    return f"to_peft cannot write this adapter:\n  {lines}\nOtherwise, merge the adapter with `p.fold(raw)`."


STACKED_LORA = rpx.Freeze() >> rpx.LoRA(2, stacked=0, where=KERNEL)
WHOLE_LORA = rpx.Freeze() >> rpx.LoRA(2, rows=(0, 1), where=KERNEL)


def test_an_alpha_that_is_traced_is_refused():
    def write(alpha):
        p = rpx.Freeze() >> rpx.LoRA(2, alpha, where=OUT)
        return len(rpx.io.to_peft(p, p.init(model(), jax.random.key(0))))

    line = "hyperparameters must be concrete, but one is traced. Call `to_peft` outside of `jax.jit`"
    text = refused(f"out/kernel: {line}")
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        jax.jit(write)(2.0)


def test_only_all_biases_or_those_of_adapted_modules_are_saved():
    params = model() | {"other": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
    p = rpx.Freeze(where=rpx.all_but("other/bias")) >> rpx.LoRA(2, where=DENSE)
    with raises(
        ValueError,
        "to_peft: PEFT trains all biases, or the biases of all adapted modules, but this chain trains only "
        "'other/bias'. Freeze these biases, or train the others too.",
    ):
        rpx.io.to_peft(p, p.init(params, jax.random.key(0)))
    q = rpx.Freeze(where=rpx.all_but(".*/bias")) >> rpx.adapters.Gain(axis=0, where=DENSE)
    with raises(
        ValueError,
        "to_peft: PEFT trains no biases with IA3, but this chain does: 'dense/bias', 'other/bias'. Freeze them.",
    ):
        rpx.io.to_peft(q, q.init(params))


def test_tokens_of_a_table_that_the_head_repeats_are_refused():
    table = normal(5, 3)
    params = {"embed": {"embedding": table}, "head": {"kernel": table.T.copy()}, "dense": model()["dense"]}
    tensors = lora(dense=(2, 8, 6)) | {f"{PREFIX}embed.token_adapter.trainable_tokens_delta": normal(2, 3, seed=5)}
    config = CONFIG | {"trainable_token_indices": [1, 4]}
    text = (
        "embed/embedding: 'head/kernel' holds the same numbers. If both are tied in torch, PEFT trains the tokens "
        "of both. Use one array for both in the model, or merge the adapter in PEFT"
    )
    with raises(ValueError, reading(text)):
        rpx.io.from_peft(tensors, config, params)
    params["head"]["kernel"][0, 0] += 1
    p, raw = rpx.io.from_peft(tensors, config, params)
    np.testing.assert_array_equal(p.fold(raw)["embed"]["embedding"][jnp.array([1, 4])], normal(2, 3, seed=5))


KERNELS = [
    f"layers/{i}/{part}/{name}/kernel"
    for i in range(12)
    for part, name in (("mlp", "up"), ("attn", "q"), ("attn", "v"))
]
MODEL = ["embed/embedding", "norm/scale", *KERNELS, *(f"layers/{i}/norm/scale" for i in range(12))]


@pytest.mark.parametrize(
    ("chosen", "pattern"),
    [
        (KERNELS, "layers/.*/kernel"),
        ([path for path in KERNELS if "/q/" in path], "layers/.*/attn/q/kernel"),
        ([path for path in KERNELS if "attn" in path], "layers/.*/attn/.*/kernel"),
        ([path for path in KERNELS if "/v/" not in path], "layers/.*/(q|up)/kernel"),
        (["layers/3/attn/q/kernel"], "layers/3/attn/q/kernel"),
        (["layers/0/attn/q/kernel", "layers/1/mlp/up/kernel"], "layers/0/attn/q/kernel|layers/1/mlp/up/kernel"),
        (["norm/scale", "layers/7/norm/scale"], "layers/7/norm/scale|norm/scale"),
    ],
)
def test_many_paths_are_one_short_expression(chosen, pattern):
    assert pattern_of(chosen, MODEL) == pattern
    assert {path for path in MODEL if re.fullmatch(pattern, path)} == set(chosen)


@given(st.data())
def test_an_expression_selects_its_paths_and_no_others(data):
    names = st.lists(st.sampled_from(["a", "b.c", "1", "2", "(d"]), min_size=1, max_size=3).map("/".join)
    known = data.draw(st.lists(names, min_size=1, max_size=12, unique=True))
    chosen = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))
    pattern = pattern_of(chosen, known)
    assert {path for path in known if re.fullmatch(pattern, path)} == set(chosen)


def test_a_model_of_many_layers_is_read_as_a_short_chain():
    like = {
        "layers": [
            {"attn": {name: {"kernel": jnp.zeros((4, 3))} for name in "qv"}, "up": {"kernel": jnp.zeros((4, 3))}}
            for _ in range(3)
        ]
    }
    tensors = {
        f"base_model.model.layers.{i}.attn.{name}.lora_{factor}.weight": np.ones(shape, np.float32)
        for i in range(3)
        for name in "qv"
        for factor, shape in (("A", (2, 4)), ("B", (3, 2)))
    }
    p, raw = rpx.io.from_peft(tensors, {"peft_type": "LORA", "r": 2, "lora_alpha": 2}, like)
    assert repr(p) == "Freeze() >> LoRA(2, alpha=2.0, where='layers/.*/attn/.*/kernel')"
    np.testing.assert_array_equal(p.fold(raw)["layers"][1]["attn"]["v"]["kernel"], np.full((4, 3), 2.0))
    np.testing.assert_array_equal(p.fold(raw)["layers"][1]["up"]["kernel"], np.zeros((4, 3)))


# ---- what is written


def test_model_state_and_integers_do_not_train_so_they_are_not_written():
    params = {
        "params": {"dense": {"kernel": normal(4, 3)}, "steps": np.int32(1)},
        "batch_stats": {"norm": {"mean": normal(3)}},
    }
    p = rpx.Freeze(where="params/dense/kernel") >> rpx.LoRA(2, where="params/dense/kernel")
    tensors, config = rpx.io.to_peft(p, zeros(p.init, params, KEY))
    assert {name.partition(".lora")[0] for name in tensors} == {f"{PREFIX}params.dense"}
    assert (config["modules_to_save"], config["bias"], config["fan_in_fan_out"]) == (None, "none", False)


def test_the_rounding_of_weights_in_training_is_left_out():
    p = rpx.Freeze() >> rpx.LoRA(2, where=OUT)
    rounded = p >> rpx.FakeQuantized("int8", where=OUT)
    tensors, config = rpx.io.to_peft(rounded, zeros(rounded.init, model(), KEY))
    assert (set(tensors), config) == (set(lora(out=(2, 6, 4))), rpx.io.to_peft(p, zeros(p.init, model(), KEY))[1])


def test_tokens_alone_are_a_method_of_their_own():
    params = {"embed": {"embedding": normal(5, 3)}, "head": {"kernel": normal(3, 5)}}
    table, head = (
        rpx.adapters.TrainableSlices((0, 2), axis=axis, where=f"{name}/.*")
        for name, axis in (("embed", 0), ("head", -1))
    )
    p = rpx.Freeze() >> table >> head
    raw = p.init(params)
    raw["head"]["kernel"]["@trainable_slices"]["x"] = normal(3, 2, seed=1)
    tensors, config = rpx.io.to_peft(p, raw)
    assert list(tensors) == [f"{PREFIX}{name}.trainable_tokens_delta" for name in ("embed", "head")]
    np.testing.assert_array_equal(tensors[f"{PREFIX}head.trainable_tokens_delta"], normal(3, 2, seed=1).T)
    assert config == {
        "peft_type": "TRAINABLE_TOKENS",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "target_modules": ["embed", "head"],
        "token_indices": (0, 2),
        "modules_to_save": None,
    }
    other = replace(head, indices=(0, 1))
    with pytest.raises(ValueError, match="PEFT has one token_indices for all modules"):
        rpx.io.to_peft(rpx.Freeze() >> table >> other, zeros((rpx.Freeze() >> table >> other).init, params))


@pytest.mark.parametrize(
    ("stages", "shape", "names"),
    [
        ((rpx.LoRA(3, columns=(1, 2)), rpx.WeightNorm(detach=True, axis=(1, 2))), (8, 2, 4), None),
        ((rpx.LoRA(3, columns=(-2, -1), stacked=0),), (5, 8, 2, 4), {"q/kernel": "{i}.q.weight"}),
        (
            (rpx.LoRA(3, columns=(-2, -1), stacked=0), rpx.WeightNorm(detach=True, axis=(-2, -1), stacked=0)),
            (5, 8, 2, 4),
            {"q/kernel": "{i}.q.weight"},
        ),
    ],
    ids=["dora", "layers", "dora of layers"],
)
def test_heads_are_known_by_the_axes_of_an_adapter(stages, shape, names):
    p = rpx.Chain((rpx.Freeze(), *stages))
    tensors, config = rpx.io.to_peft(p, zeros(p.init, {"q": {"kernel": normal(*shape)}}, KEY), names=names)
    assert {x.shape for x in tensors.values()} == {(3, 8), (8, 3), *[(8,)] * (len(stages) == 2)}
    assert len(tensors) == (1 if names is None else 5) * (1 + len(stages))
    assert config["use_dora"] is (len(stages) == 2)


# ---- the conversions of an adapter


CONVERTED = {
    "kernel": (target("a.weight", (4, 6)), (2, 4), (6, 2), (6,), (1, 6), rpx.WeightNorm(axis=-1, detach=True)),
    "same": (target("a.weight", (6, 4), "same"), (2, 4), (6, 2), (6,), (6, 1), rpx.WeightNorm(axis=0, detach=True)),
    "convolution": (
        target("a.weight", (3, 5, 4, 6)),
        (2, 4, 3, 5),
        (6, 2, 1, 1),
        (1, 6, 1, 1),
        (1, 1, 1, 6),
        rpx.WeightNorm(axis=-1, detach=True),
    ),
    "convolution, outputs first": (
        target("a.weight", (6, 4, 3, 5), "same"),
        (2, 4, 3, 5),
        (6, 2, 1, 1),
        (1, 6, 1, 1),
        (6, 1, 1, 1),
        rpx.WeightNorm(axis=0, detach=True),
    ),
    "to heads": (
        target("a.weight", (4, 6), heads=(4, 2, 3), n_inputs=1),
        (2, 4),
        (6, 2),
        (6,),
        (1, 6),
        rpx.WeightNorm(axis=(1, 2), detach=True),
    ),
    "from heads": (
        target("a.weight", (4, 6), heads=(2, 2, 6), n_inputs=2),
        (2, 4),
        (6, 2),
        (6,),
        (1, 6),
        rpx.WeightNorm(axis=-1, detach=True),
    ),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_dora_has_factors_and_one_length_for_each_output(name):
    array, a, b, stored, lengths, norm = CONVERTED[name]
    found = _lora_conversions(array, 2, is_dora=True)
    assert {suffix: (x.place, x.shape) for suffix, x in found.items()} == {
        "lora_A.weight": ("@weight_norm/v/@lora/a", a),
        "lora_B.weight": ("@weight_norm/v/@lora/b", b),
        "lora_magnitude_vector": ("@weight_norm/g", stored),
    }
    length = found["lora_magnitude_vector"].read(np.arange(6.0).reshape(stored))
    np.testing.assert_array_equal(length, np.arange(6.0).reshape(lengths))
    tensors = {suffix: np.zeros(x.shape, np.float32) for suffix, x in found.items()}
    stages = []
    config = CONFIG | {"use_dora": True, "use_rslora": True}
    jax.eval_shape(lambda: stages.extend(read_adapter(StoredAdapter(array, tensors, config)).stages))
    assert stages == [rpx.LoRA(2, 4.0, use_rslora=True, **array.axis_arguments), norm]


def test_a_table_has_factors_of_other_names():
    found = _lora_conversions(target("a.weight", (9, 3), "embedding"), 2)
    assert {suffix: (x.place, x.shape) for suffix, x in found.items()} == {
        "lora_embedding_A": ("@lora/a", (2, 9)),
        "lora_embedding_B": ("@lora/b", (3, 2)),
    }


def test_tokens_are_rows_of_a_table_and_columns_of_a_head():
    rows = normal(2, 3)
    for array, want in (
        (target("a.weight", (9, 3), "embedding"), rows),
        (target("a.weight", (3, 9)), rows.T),
        (target("a.weight", (9, 3), "same"), rows),
    ):
        (found,) = _token_conversions(array, "x", 2).values()
        assert (found.place, found.shape) == ("@trainable_slices/x", (2, 3))
        np.testing.assert_array_equal(found.read(rows), want)
        np.testing.assert_array_equal(found.write(want), rows)


@pytest.mark.parametrize(
    ("shape", "layout", "axis", "inputs", "want"),
    [
        ((4, 6), "kernel", 0, True, (1, 4)),
        ((4, 6), "kernel", 1, False, (6, 1)),
        ((3, 5, 4, 6), "kernel", 2, True, (1, 4, 1, 1)),
        ((3, 5, 4, 6), "kernel", 3, False, (1, 6, 1, 1)),
        ((6, 4), "same", 0, False, (6, 1)),
    ],
)
def test_gains_of_inputs_are_a_row_and_those_of_outputs_a_column(shape, layout, axis, inputs, want):
    (found,) = _gain_conversions(target("a.weight", shape, layout), axis, inputs=inputs).values()
    assert (found.place, found.shape) == ("@gain/g", want)


def test_a_table_with_trained_tokens_that_equals_another_array_is_told():
    table, slices = normal(5, 3), Adapter((), {"@trainable_slices/x": None})
    like = {"a": {"w": table}, "b": {"w": table.T}, "c": {"w": table.copy()}, "d": {"w": table + 1}, "e": table}
    found = _tied_table_errors(
        {"a/w": {(0,): Adapter((), {}), (1,): slices}, "d/w": {(): slices}, "e": {(): Adapter((), {})}}, like
    )
    assert [line.partition(" holds")[0] for line in found] == ["a/w: 'b/w'", "a/w: 'c/w'", "a/w: 'e'"]
    seen = []
    jax.eval_shape(lambda e: seen.append(_tied_table_errors({"a/w": {(): slices}}, {"a": {"w": table}, "e": e})), table)
    assert seen == [[]]


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
