"""Files of torch and PEFT by what a network does with its weights: square arrays, whose shapes and names tell nothing.

Skipped where torch is missing; `pip install torch==2.13.0` (the extra `peers`) brings it.
"""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import reparax as rpx

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS, IMAGES = np.arange(6).reshape(2, 3), np.random.default_rng(0).standard_normal((2, 5, 5, 8)).astype(np.float32)


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.image, self.channels = torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, tokens, images):
        h = self.table(tokens)
        h = self.attention(h, h, h, need_weights=False)[0]
        h = self.second(torch.tanh(self.first(h))).mean(1)
        return h + self.channels(torch.tanh(self.image(images))).mean((2, 3))


def convolved(x, w, order):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", order, "NHWC"))


def network(params, tokens, images):
    """The same network: ``second``, ``mix`` and ``channels`` have the axes of torch, and all others those of flax."""
    h, attention = params["table"]["w"][tokens], params["attention"]
    parts = jnp.split(h @ attention["all"]["w"] + attention["all"]["b"], 3, -1)
    q, k, v = (part.reshape(2, 3, 2, 4) for part in parts)
    scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 2)
    h = jnp.einsum("bnts,bsnh->btnh", scores, v).reshape(2, 3, 8) @ attention["mix"]["w"].T + attention["mix"]["b"]
    h = jnp.tanh(h @ params["first"]["w"] + params["first"]["b"]) @ params["second"]["w"].T + params["second"]["b"]
    c = jnp.tanh(convolved(images, params["image"]["w"], "HWIO") + params["image"]["b"])
    c = convolved(c, params["channels"]["w"], "OIHW") + params["channels"]["b"]
    return h.mean(1) + c.mean((1, 2))


LIKE = {
    "table": {"w": np.zeros((8, 8), np.float32)},
    "attention": {
        "all": {"w": np.zeros((8, 24), np.float32), "b": np.zeros(24, np.float32)},
        "mix": {"w": np.zeros((8, 8), np.float32), "b": np.zeros(8, np.float32)},
    },
    "first": {"w": np.zeros((8, 8), np.float32), "b": np.zeros(8, np.float32)},
    "second": {"w": np.zeros((8, 8), np.float32), "b": np.zeros(8, np.float32)},
    "image": {"w": np.zeros((3, 3, 8, 8), np.float32), "b": np.zeros(8, np.float32)},
    "channels": {"w": np.zeros((8, 8, 3, 3), np.float32), "b": np.zeros(8, np.float32)},
}
NAMES = {
    "attention/all/w": "attention.in_proj_weight",
    "attention/all/b": "attention.in_proj_bias",
    "attention/mix/w": "attention.out_proj.weight",
    "attention/mix/b": "attention.out_proj.bias",
    "(.*)/w": r"\1.weight",
    "(.*)/b": r"\1.bias",
}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def roles():
    return rpx.roles(network, LIKE, TOKENS, IMAGES)


def torch_net():
    torch.manual_seed(0)
    return TorchNet()


def outputs(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS), torch.from_numpy(IMAGES).permute(0, 3, 1, 2)).numpy()


def test_a_state_dict_of_torch_is_read_and_loads_strictly_again(roles):
    net, p = torch_net(), rpx.WeightNorm(where="first/w|channels/w").with_axes(roles)
    raw = p.init(rpx.io.from_torch(rpx.Chain(), net.state_dict(), LIKE, names=NAMES, roles=roles))
    np.testing.assert_allclose(network(p.apply(raw), TOKENS, IMAGES), outputs(net), rtol=1e-4, atol=1e-5)
    moved = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), raw)
    written = rpx.io.to_torch(p, moved, names=NAMES, roles=roles)
    for name in ("first", "channels"):
        torch.nn.utils.parametrizations.weight_norm(getattr(net, name))
    net.load_state_dict({name: torch.tensor(np.asarray(x)) for name, x in written.items()}, strict=True)
    np.testing.assert_allclose(outputs(net), network(p.fold(moved), TOKENS, IMAGES), rtol=1e-4, atol=1e-5)


def test_an_adapter_of_peft_is_read_and_written_back_with_equal_bytes(roles, tmp_path):
    parts = ["table", "first", "second", "image", "channels"]
    model = peft.get_peft_model(torch_net(), peft.LoraConfig(r=2, lora_alpha=6, target_modules=parts))
    with torch.no_grad():
        for x in model.parameters():
            if x.requires_grad:
                x.add_(0.3 * torch.randn(x.shape))
    model.save_pretrained(str(tmp_path / "theirs"))
    tensors = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    base = rpx.io.from_torch(rpx.Chain(), torch_net().state_dict(), LIKE, names=NAMES, roles=roles)
    p, raw = rpx.io.from_peft(tensors, config, base, names=NAMES, roles=roles)
    np.testing.assert_allclose(network(p.fold(raw), TOKENS, IMAGES), outputs(model), rtol=1e-4, atol=1e-5)
    again, written = rpx.io.to_peft(p, raw, names=NAMES, roles=roles)
    assert again.keys() == tensors.keys()
    for name, x in tensors.items():
        assert (again[name].shape, again[name].tobytes()) == (x.shape, x.tobytes()), name
    (tmp_path / "ours").mkdir()
    save_file(again, tmp_path / "ours" / "adapter_model.safetensors", {"format": "pt"})
    (tmp_path / "ours" / "adapter_config.json").write_text(json.dumps(written))
    loaded = peft.PeftModel.from_pretrained(torch_net(), str(tmp_path / "ours"))
    np.testing.assert_allclose(outputs(loaded), outputs(model), rtol=1e-5, atol=1e-6)
