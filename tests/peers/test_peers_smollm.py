"""The example's language model against transformers and PEFT: logits, files of adapters, and the file of weights.

What needs the model itself runs where ``make example`` has downloaded it; all else has random weights.
"""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import reparax as rpx
from examples.smollm import many, model, tuning

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
files = pytest.importorskip("examples.smollm.files")

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = model.Config(layers=3, width=64, heads=4, groups=2, inner=96, words=40, base=1000.0)
TOKENS = np.random.default_rng(0).integers(0, TINY.words, (2, 12))


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def drawn(config):
    numbers = np.random.default_rng(1)
    shapes, treedef = jax.tree.flatten(model.shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten([jnp.asarray(numbers.normal(size=shape) * 0.2, jnp.float32) for shape in shapes])


def llama(params, config):
    """The network of transformers, with our weights."""
    own = transformers.LlamaConfig(
        vocab_size=config.words,
        hidden_size=config.width,
        intermediate_size=config.inner,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.groups,
        rms_norm_eps=config.epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.base},
        tie_word_embeddings=True,
    )
    network = transformers.LlamaForCausalLM(own)
    state = rpx.io.to_torch(rpx.Chain(), params, names=tuning.NAMES)
    missing, unexpected = network.load_state_dict(
        {name: torch.from_numpy(x) for name, x in state.items()}, strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])
    network.tie_weights()
    return network.eval()


def theirs(network, tokens):
    with torch.no_grad():
        return network(torch.from_numpy(np.asarray(tokens))).logits.numpy()


def ours(params, tokens, config):
    return np.asarray(jax.jit(model.logits, static_argnums=2)(params, jnp.asarray(tokens), config))


def test_logits_are_those_of_transformers():
    params = drawn(TINY)
    np.testing.assert_allclose(ours(params, TOKENS, TINY), theirs(llama(params, TINY), TOKENS), atol=1e-4)


@pytest.mark.parametrize("p", [tuning.lora(4), tuning.dora(4), tuning.qlora(4)], ids=["LoRA", "DoRA", "QLoRA"])
def test_peft_loads_the_adapter_of_the_scanned_model(p, tmp_path):
    config = model.Config(layers=2, width=64, heads=4, groups=2, inner=64, words=40)
    params = drawn(config)
    raw = p.init(params, jax.random.key(0))
    base = p.fold(raw)  # rounded, if it is stored
    free, fixed = rpx.partition(raw)
    raw = rpx.combine(jax.tree.map(lambda x: x * 1.2 + 0.02, free), fixed)
    written(tmp_path, *rpx.io.to_peft(p, raw, names=tuning.NAMES))
    adapted = peft.PeftModel.from_pretrained(llama(base, config), tmp_path).eval()
    np.testing.assert_allclose(ours(p.fold(raw), TOKENS, config), theirs(adapted, TOKENS), atol=1e-4)


def test_a_batch_of_several_adapters_is_that_of_peft(tmp_path):
    params, adapters, network = drawn(TINY), [], None
    for i, p in enumerate([tuning.lora(2), rpx.Freeze() >> rpx.LoRA(5, 10.0, stacked=0)]):
        free, fixed = rpx.partition(p.init(params, jax.random.key(i)))
        raw = rpx.combine(jax.tree.map(lambda x, i=i: x + 0.02 * (i + 1), free), fixed)
        adapters.append((p, raw))
        folder = tmp_path / f"{i}"
        folder.mkdir()
        written(folder, *rpx.io.to_peft(p, raw, names=tuning.NAMES))
        if network is None:
            network = peft.PeftModel.from_pretrained(llama(params, TINY), folder, adapter_name="0")
        else:
            network.load_adapter(folder, adapter_name="1")
    tokens = np.random.default_rng(3).integers(0, TINY.words, (4, 9))
    with torch.no_grad():
        wanted = network.eval()(torch.from_numpy(tokens), adapter_names=["1", "0", "0", "1"]).logits.numpy()
    p, bank = many.bank_of(adapters)
    fixed = rpx.partition(p.init(params, jax.random.key(0)))[1]
    got = jax.jit(many.mixed(p, TINY))(bank, fixed, jnp.array([1, 0, 0, 1]), jnp.asarray(tokens))
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert abs(got[0] - got[1]).max() > 0.1


def written(folder, tensors, settings):
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"task_type": "CAUSAL_LM"}))


def test_a_file_of_llama_cpp_is_read_in_the_order_of_transformers(tmp_path):
    params = drawn(TINY)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(TINY.layers)
    writer.add_embedding_length(TINY.width)
    writer.add_feed_forward_length(TINY.inner)
    writer.add_head_count(TINY.heads)
    writer.add_head_count_kv(TINY.groups)
    writer.add_vocab_size(TINY.words)
    writer.add_rope_freq_base(TINY.base)
    writer.add_layer_norm_rms_eps(TINY.epsilon)
    rows = {"attn_q": TINY.heads, "attn_k": TINY.groups}
    for name, x in rpx.io.to_torch(rpx.Chain(), params, names=tuning.NAMES).items():
        their = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, TINY.layers).get_name(name, (".weight",))
        if heads := rows.get(their.split(".")[-2]):  # as llama.cpp's converter permutes them
            x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(their, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = files.Reader(tmp_path / "tiny.gguf")
    assert reader.config == model.Config(**{**vars(TINY), "epsilon": float(np.float32(TINY.epsilon))})
    jax.tree.map(np.testing.assert_array_equal, reader.params(), params)
