"""Adapters against PEFT itself: forward passes, gradients, merged weights, and its files read and written."""

import copy
import json
import pathlib
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from flax import nnx
from grids import mostly_thorough
from safetensors.numpy import load_file, save_file

import reparax as rpx
from reparax.io._peft_config import METHODS as METHODS_READ
from reparax.io._peft_config import is_adapted, is_saved, read_config
from reparax.io._peft_target import is_loaded

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")
    conv1d = pytest.importorskip("transformers.pytorch_utils")

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS, IMAGES = np.arange(6).reshape(2, 3), np.random.default_rng(0).standard_normal((2, 5, 5, 3)).astype(np.float32)


class TorchNet(torch.nn.Module):
    """A table of embeddings, two linear layers, a convolution and a head."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
        self.conv = torch.nn.Conv2d(3, 4, (3, 3))
        self.head = torch.nn.Linear(12, 6)

    def forward(self, tokens, images):
        h = self.embed(tokens).mean(1)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        c = torch.tanh(self.conv(images)).mean((2, 3))
        return self.head(torch.cat([h, c], -1))


class Net(nn.Module):
    """The same network."""

    @nn.compact
    def __call__(self, tokens, images):
        h = nn.Embed(10, 8, name="embed")(tokens).mean(1)
        for i in range(2):
            h = jnp.tanh(nn.Dense(8, name=f"layers_{i}")(h))
        c = jnp.tanh(nn.Conv(4, (3, 3), padding="VALID", name="conv")(images)).mean((1, 2))
        return nn.Dense(6, name="head")(jnp.concatenate([h, c], -1))


NAMES = {r"layers_(\d)/(kernel)": r"layers.\1.weight", r"layers_(\d)/bias": r"layers.\1.bias"}
TORCH = {"names": NAMES, "layouts": {"conv/kernel": "kernel"}}
ALL = ["embed", "layers.0", "layers.1", "conv", "head"]
LINEAR = ["layers.0", "layers.1", "head"]
METHODS = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL),
    "patterns": lambda: peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=ALL, rank_pattern={"layers.0": 2, "conv": 3}, alpha_pattern={"head": 20}
    ),
    "rslora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, use_rslora=True),
    "dora": lambda: peft.LoraConfig(r=3, lora_alpha=6, target_modules=ALL, use_dora=True),
    "biases": lambda: peft.LoraConfig(r=2, lora_alpha=2, target_modules=LINEAR, bias="all"),
    "biases of adapted modules": lambda: peft.LoraConfig(r=2, lora_alpha=2, target_modules=LINEAR, bias="lora_only"),
    "whole modules": lambda: peft.LoraConfig(r=2, lora_alpha=2, target_modules=["layers.0"], modules_to_save=["head"]),
    "ia3": lambda: peft.IA3Config(target_modules=[*LINEAR, "conv"], feedforward_modules=["head"]),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 4], target_modules=["embed"]),
    "tokens beside lora": lambda: peft.LoraConfig(
        r=2, lora_alpha=2, target_modules=LINEAR, trainable_token_indices={"embed": [1, 4]}
    ),
    "biases of factors": lambda: peft.LoraConfig(r=2, lora_alpha=8, target_modules=LINEAR, lora_bias=True),
}


def torch_net():
    torch.manual_seed(0)
    return TorchNet()


def base_params():
    like = jax.eval_shape(lambda: Net().init(jax.random.key(0), TOKENS, IMAGES)["params"])
    return rpx.io.from_torch(rpx.Chain(), torch_net().state_dict(), like, names=NAMES)


def adapted(name):
    """A PEFT model whose adapter is not at its start."""
    model = peft.get_peft_model(torch_net(), METHODS[name]())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(0.3 * torch.randn(x.shape, generator=generator))
    return model


def saved(model, folder):
    """What PEFT writes: tensors and configuration."""
    model.save_pretrained(str(folder))
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


def read(name, folder):
    """A PEFT model with an adapter, what PEFT writes of it, and what is read of that."""
    model = adapted(name)
    tensors, config = saved(model, folder)
    p, raw = rpx.io.from_peft(tensors, config, base_params(), names=NAMES)
    return model, tensors, config, p, raw


def outputs(model):
    with torch.no_grad():
        return of_torch(model).numpy()


def of_torch(model):
    return model(torch.from_numpy(TOKENS), torch.from_numpy(IMAGES).permute(0, 3, 1, 2))


def run(params):
    return Net().apply({"params": params}, TOKENS, IMAGES)


TARGET = np.random.default_rng(3).standard_normal((2, 6)).astype(np.float32)


def loss_of_torch(model):
    return ((of_torch(model) - torch.from_numpy(TARGET)) ** 2).sum()


def gradient(p, free, fixed):
    return jax.grad(lambda free: jnp.sum((run(p.apply(rpx.combine(free, fixed))) - TARGET) ** 2))(free)


@pytest.mark.parametrize("name", mostly_thorough(METHODS, "dora", "tokens beside lora", "whole modules"))
def test_an_adapter_of_a_model_in_memory_gives_the_same_outputs(name):
    model = adapted(name)
    config = model.peft_config["default"].to_dict()
    p, raw = rpx.io.from_peft(model.state_dict(), config, base_params(), names=NAMES)
    np.testing.assert_allclose(run(p.apply(raw)), outputs(model), rtol=1e-4, atol=1e-5)


def test_one_of_several_adapters_of_a_model_in_memory():
    model = adapted("patterns")
    model.add_adapter("other", METHODS["rslora"]())
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.add_(0.1 if ".other." in name else 0.0)
    for name in ("other", "default"):
        model.set_adapter(name)
        config = model.peft_config[name].to_dict()
        p, raw = rpx.io.from_peft(model.state_dict(), config, base_params(), adapter=name, names=NAMES)
        np.testing.assert_allclose(run(p.apply(raw)), outputs(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_an_adapter_of_peft_gives_the_same_outputs_and_merged_weights_and_as_many_values_train(name, tmp_path):
    model, _, _, p, raw = read(name, tmp_path)
    np.testing.assert_allclose(run(p.apply(raw)), outputs(model), rtol=1e-4, atol=1e-5)
    theirs = sum(x.numel() for x in model.parameters() if x.requires_grad)
    ours = sum(x.size for x in jax.tree.leaves(rpx.partition(raw)[0]))
    assert ours == theirs
    merged = rpx.io.from_torch(rpx.Chain(), model.merge_and_unload().state_dict(), base_params(), names=NAMES)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), p.fold(raw), merged)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_peft(name, tmp_path):
    model, _, _, p, raw = read(name, tmp_path)
    loss_of_torch(model).backward()
    with torch.no_grad():
        for x in model.parameters():
            if x.grad is not None:
                x.copy_(x.grad)
    theirs, _ = saved(model, tmp_path / "gradients")
    free, fixed = rpx.partition(raw)
    ours = gradient(p, free, fixed)
    got = rpx.io.to_peft(p, rpx.combine(ours, fixed), **TORCH)[0]
    assert got.keys() == theirs.keys()
    for key in got:
        np.testing.assert_allclose(got[key], theirs[key], rtol=2e-3, atol=2e-4, err_msg=key)


class Parts(torch.nn.Module):
    """Modules by name, of which a number is a linear layer."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, torch.nn.Linear(8, part) if isinstance(part, int) else part)


def named_parts():
    """Modules of several names and depths."""
    layers = [Parts(attn=Parts(q=8, v=8), experts=torch.nn.ModuleList([Parts(up=8)])) for _ in range(3)]
    inner = Parts(embed=torch.nn.Embedding(10, 8), layers=torch.nn.ModuleList(layers), blocks=Parts(q=8))
    return Parts(model=inner, q=8, head=Parts(dense=8, out=8), subhead=8)


NAMED = [
    {"target_modules": ["q"]},
    {"target_modules": ["attn.q", "out", "ead", "model.layers.1.attn.v"]},
    {"target_modules": r".*\.[02]\..*(q|up)"},
    {"target_modules": "all-linear"},
    {"target_modules": ["q", "up"], "layers_to_transform": 1},
    {"target_modules": ["q", "up", "model.layers.2.attn.v"], "layers_to_transform": [0, 2]},
    {"target_modules": ["q", "up"], "layers_to_transform": [0], "layers_pattern": "experts"},
    {"target_modules": ["q", "up"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    {"target_modules": ["q", "up"], "layers_to_transform": []},
    {"target_modules": ["q", "v"], "exclude_modules": ["model.layers.0.attn.q", "v"]},
    {"target_modules": ["q", "v"], "exclude_modules": r"model\..*q"},
    {"target_modules": ["q", "dense", "out"], "modules_to_save": ["head"]},
    {"target_modules": ["q", "embed"], "modules_to_save": ["head.out", "subhead"]},
    {"target_modules": ["head.out", "embed"], "modules_to_save": ["attn", "layers.1"]},
]


@pytest.mark.parametrize("settings", NAMED)
def test_the_modules_that_a_configuration_names_are_those_that_peft_adapts_and_saves(settings, tmp_path):
    net = named_parts()
    modules = [name for name, module in net.named_modules() if name and not [*module.children()]]
    linear = [name for name in modules if isinstance(net.get_submodule(name), torch.nn.Linear)]
    model = peft.get_peft_model(net, peft.LoraConfig(r=1, **settings))
    tensors, saved_config = saved(model, tmp_path)
    ends = r"(\.base_layer)?\.(lora_(embedding_)?[AB].*|weight|bias)$"
    held = {re.sub(ends, "", name.removeprefix("base_model.model.")) for name in tensors}
    theirs = set(model.base_model.targeted_module_names)
    assert theirs
    for config in map(read_config, (saved_config, model.peft_config["default"].to_dict())):
        assert {name for name in modules if is_adapted(config, name)} == theirs
        assert {name for name in modules if is_saved(config, name)} == held - theirs
    if {"attn", "layers.1"} <= {*settings.get("modules_to_save", ())}:
        return  # PEFT fails to load what it saves twice
    file = {f"base_model.model.{name}.{end}": (name, end) for name in linear for end in ("lora_A.weight", "weight")}
    file |= {name.replace(".weight", ".base_layer.weight"): of for name, of in file.items() if of[1] == "weight"}
    zeros = {name: torch.zeros(1 if end == "lora_A.weight" else 8, 8) for name, (_, end) in file.items()}
    whole = {name: torch.from_numpy(x) for name, x in tensors.items()}
    unexpected = peft.set_peft_model_state_dict(model, zeros | whole).unexpected_keys
    ignored = {name.replace(".default.", ".") for name in unexpected} & zeros.keys()
    ends = {"weight": "", "lora_A.weight": "lora_A.weight"}
    loaded = {x for x, (name, end) in file.items() if is_loaded(config, f"{name}.weight", ends[end], x)}
    assert loaded == zeros.keys() - ignored


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x)[0]


ATTENTION = (
    "PEFT adds the update of `out_proj` in nn.MultiheadAttention twice, even in a merge, but in any other layer once"
)


def test_attention_of_torch_is_refused_as_peft_adds_an_update_twice(tmp_path):
    torch.manual_seed(0)
    net = Attention()
    model = peft.get_peft_model(copy.deepcopy(net), peft.LoraConfig(r=2, lora_alpha=2, target_modules=["mha"]))
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.copy_(torch.randn(x.shape))
    tensors, config = saved(model, tmp_path)
    name = "base_model.model.mha.base_layer.out_proj.lora"
    update = tensors[f"{name}_B.weight"] @ tensors[f"{name}_A.weight"]
    merged = model.merge_and_unload().mha.out_proj.weight.detach().numpy() - net.mha.out_proj.weight.detach().numpy()
    np.testing.assert_allclose(merged, 2 * update, rtol=1e-4, atol=1e-5)  # when it is once, read it
    like = {"mha": {"kernel": jnp.zeros((8, 24)), "out_proj": {"kernel": jnp.zeros((8, 8))}}}
    with raises(
        ValueError,
        f"from_peft cannot read '{name}_A.weight': {ATTENTION}. Merge the adapter in PEFT with `merge_and_unload`, "
        "and read the weights with `from_torch`.",
    ):
        rpx.io.from_peft(tensors, config, like)
    p = rpx.Freeze() >> rpx.LoRA(2)
    raw = p.init(like, jax.random.key(0))
    with raises(
        ValueError,
        f"to_peft cannot write this adapter:\n  mha/kernel: {ATTENTION}\n  mha/out_proj/kernel: {ATTENTION}\n"
        "Otherwise, merge the adapter with `p.fold(raw)`.",
    ):
        rpx.io.to_peft(p, raw, names={"mha/kernel": "mha.in_proj_weight"})


class Heads(torch.nn.Module):
    """Attention of linear layers, as in transformers."""

    def __init__(self):
        super().__init__()
        for name in ("query", "key", "value", "out"):
            setattr(self, name, torch.nn.Linear(8, 8))

    def forward(self, x):
        q, k, v = (getattr(self, name)(x).unflatten(-1, (2, 4)).transpose(1, 2) for name in ("query", "key", "value"))
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def linen_attention(x):
    module = nn.MultiHeadDotProductAttention(num_heads=2)
    return module.init(jax.random.key(1), x, x)["params"], lambda params, x: module.apply({"params": params}, x, x)


def nnx_attention(x):
    module = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(1))
    graph, params = nnx.split(module)
    return params, lambda params, x: nnx.merge(graph, params)(x)


@pytest.mark.parametrize("make", [linen_attention, nnx_attention])
@pytest.mark.parametrize("is_dora", [False, True], ids=["lora", "dora"])
def test_attention_with_heads_goes_to_peft_and_comes_back(make, is_dora, tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    params, call = make(x)
    roles = rpx.roles(call, params, x)
    net = Heads()
    base = rpx.io.to_torch(rpx.Chain(), params, roles=roles)
    net.load_state_dict({name: torch.from_numpy(w) for name, w in base.items()})
    np.testing.assert_allclose(net(torch.from_numpy(x)).detach(), call(params, x), rtol=1e-4, atol=1e-5)
    lora = rpx.LoRA(3, alpha=6.0)
    p = (rpx.Freeze() >> (lora >> rpx.WeightNorm(detach=True) if is_dora else lora)).with_axes(roles)
    free, fixed = rpx.partition(p.init(params, jax.random.key(2)))
    raw = rpx.combine(jax.tree.map(lambda w: w + 0.3 * jnp.sin(jnp.arange(w.size)).reshape(w.shape), free), fixed)
    model = load_into(net, *rpx.io.to_peft(p, raw, roles=roles), tmp_path / "ours")
    want = call(p.fold(raw), x)
    assert np.max(np.abs(want - call(params, x))) > 0.01
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach(), want, rtol=1e-4, atol=1e-5)
    q, back = rpx.io.from_peft(*saved(model, tmp_path / "theirs"), params, roles=roles)
    np.testing.assert_allclose(call(q.fold(back), x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_what_peft_wrote_is_written_back_with_equal_names_and_bytes_and_peft_loads_it(name, tmp_path):
    model, tensors, config, p, raw = read(name, tmp_path)
    again, written = rpx.io.to_peft(p, raw, **TORCH)
    assert again.keys() == tensors.keys()
    for key, x in tensors.items():
        assert (again[key].dtype, again[key].shape, again[key].tobytes()) == (x.dtype, x.shape, x.tobytes()), key
    assert written["peft_type"] == config["peft_type"]
    same = ("lora_alpha", "use_rslora", "use_dora", "bias", "rank_pattern", "alpha_pattern", "modules_to_save")
    for key in set(same) & set(config) & set(written):
        assert (written[key] or None) == (config[key] or None), key
    loaded = load_into(torch_net(), again, written, tmp_path / "ours")
    np.testing.assert_allclose(outputs(loaded), outputs(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("chain", "settings"),
    [
        (rpx.LoRA(4, 8.0), {}),
        (rpx.LoRA(4, 8.0, use_rslora=True), {"use_rslora": True}),
        (rpx.LoRA(4, 8.0, init_weights="pissa"), {"init_lora_weights": "pissa"}),
        (rpx.LoRA(4, 8.0, init_weights="olora"), {"init_lora_weights": "olora"}),
    ],
)
def test_a_start_is_that_of_peft(chain, settings):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["layers.0"], **settings)
    layer = peft.get_peft_model(torch_net(), config).base_model.model.layers[0]
    kernel = base_params()["layers_0"]["kernel"]
    held = chain.init({"kernel": kernel}, jax.random.key(0))["kernel"]["@lora"]
    base = layer.base_layer.weight.detach().numpy().T
    product = (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach().numpy().T
    np.testing.assert_allclose(held["@fixed"]["w"], base, atol=1e-5)
    np.testing.assert_allclose(held["a"] @ held["b"], product, atol=1e-5)
    np.testing.assert_allclose(chain.apply({"kernel": {"@lora": held}})["kernel"], kernel, atol=1e-5)


def test_vera_is_that_of_peft_with_our_factors():
    config = peft.VeraConfig(r=5, target_modules=["layers.0"], d_initial=0.1)
    model = peft.get_peft_model(torch_net(), config)
    params, p = base_params(), rpx.Freeze() >> rpx.adapters.VeRA(5, where="layers_0/kernel")
    raw = p.init(params)
    left, right = rpx.adapters.VeRA(5).factors(params["layers_0"]["kernel"])
    layer, rng = model.base_model.model.layers[0], np.random.default_rng(0)
    d, b = rng.standard_normal(5).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    with torch.no_grad():
        model.base_model.vera_A["default"].copy_(torch.from_numpy(np.array(left).T))
        model.base_model.vera_B["default"].copy_(torch.from_numpy(np.array(right).T))
        layer.vera_lambda_d["default"].copy_(torch.from_numpy(d))
        layer.vera_lambda_b["default"].copy_(torch.from_numpy(b))
    raw["layers_0"]["kernel"]["@vera"] |= {"d": jnp.asarray(d), "b": jnp.asarray(b)}
    np.testing.assert_allclose(run(p.apply(raw)), outputs(model), rtol=1e-4, atol=1e-5)


def test_bfloat16_adapters_keep_their_bytes(tmp_path):
    model = adapted("lora").to(torch.bfloat16)
    model.save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    from safetensors.torch import load_file as load_torch

    tensors = load_torch(tmp_path / "adapter_model.safetensors")
    like = jax.tree.map(lambda w: w.astype(jnp.bfloat16), base_params())
    p, raw = rpx.io.from_peft(tensors, config, like, names=NAMES)
    again, _ = rpx.io.to_peft(p, raw, **TORCH)
    for key, x in tensors.items():
        np.testing.assert_array_equal(again[key].astype(np.float32), x.float().numpy())


# Modules of one shape and of several classes, and stacks. ----------------------------------------------------------


class Mixed(torch.nn.Module):
    """A square Conv1D beside a square Linear: PEFT saves the `fan_in_fan_out` of the last one for both."""

    def __init__(self):
        super().__init__()
        self.c, self.l = conv1d.Conv1D(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.l(torch.tanh(self.c(x)))


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"target_modules": ["c"]}, {"target_modules": ["l"]}])
def test_conv1d_beside_linear_is_read_and_loaded_by_the_class_of_each(settings, tmp_path):
    torch.manual_seed(0)
    net, x = Mixed(), torch.randn(3, 6)
    model = peft.get_peft_model(
        copy.deepcopy(net), peft.LoraConfig(**({"r": 2, "lora_alpha": 3, "target_modules": ["c", "l"]} | settings))
    )
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each.add_(0.3 * torch.randn(each.shape))
    like = jax.tree.map(jnp.zeros, {name: {"kernel": (6, 6), "bias": (6,)} for name in "cl"}, is_leaf=is_shape)
    layouts = {"c/kernel": "conv1d"}
    base = rpx.io.from_torch(rpx.Chain(), net.state_dict(), like, layouts=layouts)
    p, raw = rpx.io.from_peft(*saved(model, tmp_path / "theirs"), base, layouts=layouts)
    loaded = load_into(net, *rpx.io.to_peft(p, raw, layouts=layouts), tmp_path / "ours")
    np.testing.assert_allclose(loaded(x).detach(), model(x).detach(), rtol=1e-5, atol=1e-6)
    merged = rpx.io.to_torch(rpx.Chain(), p.fold(raw), layouts=layouts)
    for name, want in model.merge_and_unload().state_dict().items():
        np.testing.assert_allclose(merged[name], want, rtol=1e-4, atol=1e-5)


class Deep(torch.nn.Module):
    """Equal layers, which are one stack here."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(30)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(
    "adapter",
    [
        lambda: rpx.LoRA(2, alpha=4.0, stacked=0),
        lambda: rpx.LoRA(2, alpha=4.0, stacked=0) >> rpx.WeightNorm(detach=True, stacked=0),
    ],
    ids=["lora", "dora"],
)
def test_peft_loads_the_adapters_of_a_stack(adapter, tmp_path):
    torch.manual_seed(0)
    net, x = Deep(), np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    names = {r"layers/(kernel)": "layers.{i}.weight", r"layers/bias": "layers.{i}.bias"}
    like = {"layers": {"kernel": jnp.zeros((30, 8, 8)), "bias": jnp.zeros((30, 8))}}
    base = rpx.io.from_torch(rpx.Chain(), net.state_dict(), like, names=names)
    p = rpx.Freeze() >> adapter()
    free, fixed = rpx.partition(p.init(base, jax.random.key(0)))
    rng = np.random.default_rng(1)
    raw = rpx.combine(jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), free), fixed)
    loaded = load_into(net, *rpx.io.to_peft(p, raw, names=names), tmp_path)

    def forward(x, layer):
        return x + jnp.tanh(x @ layer["kernel"] + layer["bias"][None]), None

    want = jax.lax.scan(forward, x, p.fold(raw)["layers"])[0]
    np.testing.assert_allclose(loaded(torch.from_numpy(x)).detach(), want, rtol=1e-3, atol=1e-4)


def is_shape(x):
    return isinstance(x, tuple)


def load_into(net, tensors, config, folder):
    """The network of torch with an adapter that we wrote."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return peft.PeftModel.from_pretrained(copy.deepcopy(net), str(folder))


def test_each_type_that_is_read_is_one_of_peft_and_in_the_table_of_the_page():
    assert METHODS_READ.keys() <= {each.value for each in peft.PeftType}
    page = (pathlib.Path(__file__).parents[2] / "docs" / "api" / "io.md").read_text()
    rows = re.findall(r"^\| ((?:`[A-Z0-9_]+`(?:, )?)+) \|", page, flags=re.MULTILINE)
    assert {name for names in rows for name in re.findall(r"`(\w+)`", names)} == METHODS_READ.keys()
