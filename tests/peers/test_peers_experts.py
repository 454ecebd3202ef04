"""Adapters of experts against PEFT and transformers, in tiny models made from their configurations."""

import copy
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough
from safetensors.numpy import load_file, save_file

import reparax as rpx

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.arange(12).reshape(2, 6)
LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 4, 16, 24
SIZES = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}


def mixtral():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS)
    return transformers.MixtralForCausalLM(config)


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=HIDDEN)
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=HIDDEN)
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss():
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, num_local_experts=EXPERTS))


# For each model the layout of its experts: with inputs last in torch, or with inputs first as here.
MODELS = {
    "mixtral": (mixtral, "experts:kernel"),
    "qwen2_moe": (qwen2_moe, "experts:kernel"),
    "qwen3_moe": (qwen3_moe, "experts:kernel"),
    "gpt_oss": (gpt_oss, "experts:conv1d"),
}
GATE_UP, DOWN, QUERY = (
    f"model.layers.{{i}}.{name}"
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight")
)
NAMES = {"experts/gate_up": GATE_UP, "experts/down": DOWN, "query/kernel": QUERY}
SHAPES = {
    "experts": {"gate_up": (LAYERS, EXPERTS, WIDTH, 2 * HIDDEN), "down": (LAYERS, EXPERTS, HIDDEN, WIDTH)},
    "query": {"kernel": (LAYERS, WIDTH, WIDTH)},
}
LIKE = jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def torch_model(name):
    torch.manual_seed(0)
    net = MODELS[name][0]().eval()
    with torch.no_grad():
        for x in net.parameters():
            x.copy_(0.3 * torch.randn(x.shape) + (x.ndim == 1))
    return net


def torch_of(name):
    return {"names": NAMES, "layouts": {"experts/.*": MODELS[name][1]}}


def ours(net, name):
    """The weights of experts and of queries, as stacks of layers."""
    own = {name.replace("{i}", str(i)) for name in NAMES.values() for i in range(LAYERS)}
    state = {name: x for name, x in net.state_dict().items() if name in own}
    return rpx.io.from_torch(rpx.Chain(), state, LIKE, **torch_of(name))


def with_weights(net, params, name):
    """The network of torch with these weights."""
    net = copy.deepcopy(net)
    state = {key: torch.from_numpy(x) for key, x in rpx.io.to_torch(rpx.Chain(), params, **torch_of(name)).items()}
    assert not net.load_state_dict(state, strict=False).unexpected_keys
    return net


def outputs(net):
    with torch.no_grad():
        return net(TOKENS).logits.numpy()


def saved(model, folder):
    model.save_pretrained(str(folder))
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


def adapted(net, **settings):
    given = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}
    config = peft.LoraConfig(**given | {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} | settings)
    model = peft.get_peft_model(copy.deepcopy(net), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(0.2 * torch.randn(x.shape, generator=generator))
    return model


SETTINGS = {
    "one rank": {},
    "by name": {"rank_pattern": {"experts.gate_up_proj": 2}, "alpha_pattern": {"down_proj": 5}, "use_rslora": True},
}


@pytest.mark.parametrize("settings", mostly_thorough(SETTINGS, "by name"))
@pytest.mark.parametrize("name", mostly_thorough(MODELS, "mixtral", "gpt_oss"))
def test_experts_of_peft_give_the_same_outputs_and_come_back_with_equal_bytes(name, settings, tmp_path):
    net = torch_model(name)
    model = adapted(net, **SETTINGS[settings])
    tensors, config = saved(model, tmp_path)
    p, raw = rpx.io.from_peft(tensors, config, ours(net, name), **torch_of(name))
    np.testing.assert_allclose(outputs(with_weights(net, p.fold(raw), name)), outputs(model), atol=1e-5)
    again, written = rpx.io.to_peft(p, raw, **torch_of(name))
    assert again.keys() == tensors.keys()
    for key, x in tensors.items():
        assert (again[key].shape, again[key].tobytes()) == (x.shape, x.tobytes()), key
    where = [f"model.layers.{i}.mlp.experts.{end}_proj" for i in range(LAYERS) for end in ("down", "gate_up")]
    assert written["target_parameters"] == where
    assert written["target_modules"] == [f"model.layers.{i}.self_attn.q_proj" for i in range(LAYERS)]


@pytest.mark.parametrize("chosen", mostly_thorough(["gate_up|down", "down"], "gate_up|down"))
@pytest.mark.parametrize("name", mostly_thorough(MODELS, "qwen3_moe", "gpt_oss"))
def test_peft_loads_experts_that_are_written(name, chosen, tmp_path):
    net = torch_model(name)
    p = rpx.Freeze() >> rpx.LoRA(2, alpha=4.0, columns=-1, stacked=(0, 1), where=f"experts/({chosen})")
    free, fixed = rpx.partition(p.init(ours(net, name), jax.random.key(0)))
    rng = np.random.default_rng(1)
    raw = rpx.combine(jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape, np.float32), free), fixed)
    tensors, config = rpx.io.to_peft(p, raw, **torch_of(name))
    save_file(tensors, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(net), str(tmp_path))
    want = outputs(with_weights(net, p.fold(raw), name))
    assert np.abs(want - outputs(net)).max() > 0.1
    np.testing.assert_allclose(outputs(loaded), want, atol=1e-5)


MODULES = {
    f"{name}/kernel": f"model.layers.{{i}}.block_sparse_moe.experts.{{j}}.{name}.weight" for name in ("w1", "w2", "w3")
}


def test_files_of_experts_that_are_modules_of_their_own_are_read_by_transformers(tmp_path):
    net = torch_model("mixtral")
    fused = ours(net, "mixtral")["experts"]
    gate, up = jnp.split(fused["gate_up"], 2, axis=-1)
    params = {name: {"kernel": x} for name, x in {"w1": gate, "w3": up, "w2": fused["down"]}.items()}
    experts = rpx.io.to_torch(rpx.Chain(), params, names=MODULES)
    rest = {
        name.replace(".mlp.gate.", ".block_sparse_moe.gate."): x.numpy()
        for name, x in net.state_dict().items()
        if ".mlp.experts." not in name
    }
    save_file({**rest, **experts}, tmp_path / "model.safetensors", {"format": "pt"})
    net.config.save_pretrained(str(tmp_path))
    loaded = transformers.MixtralForCausalLM.from_pretrained(str(tmp_path)).eval()
    np.testing.assert_allclose(outputs(loaded), outputs(net), atol=1e-6)
    back = rpx.io.from_torch(rpx.Chain(), experts, params, names=MODULES)
    jax.tree.map(np.testing.assert_array_equal, back, params)
