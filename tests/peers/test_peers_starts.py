"""Starts of LoRA from data against PEFT's, for the same data."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax._data.seen import Read, Seen

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")
    lora = pytest.importorskip("peft.tuners.lora")
    corda = pytest.importorskip("peft.tuners.lora.corda")
    eva = pytest.importorskip("peft.tuners.lora.eva")

pytestmark = pytest.mark.filterwarnings("ignore")

RANK, ALPHA = 3, 6
DRAW = np.random.default_rng(0)
MIX = DRAW.standard_normal((12, 12)) * np.geomspace(1, 30, 12)
X = (DRAW.standard_normal((128, 12)) @ MIX + 20).astype(np.float32)  # PEFT takes the mean away for EVA
TARGET = DRAW.standard_normal((128, 8)).astype(np.float32)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return self.layer(x)


def kernel():
    return jnp.asarray(Net().layer.weight.detach().numpy().T)


def read_of(x):
    sums = jnp.asarray(np.sum(x, axis=0))[None], jnp.asarray(np.sum(np.abs(x), axis=0))[None]
    return Read((12, 8), (0, 1), (), (0,), jnp.full(1, len(x), jnp.float32), *sums, jnp.asarray(x.T @ x)[None])


def start_of(start, gradient=None):
    """Our factors and base, as a kernel's."""
    read = read_of(X)
    seen = {"w": Seen((read,), None if gradient is None else jnp.asarray(gradient))}
    raw = rpx.LoRA(RANK, ALPHA, start=start).init({"w": kernel()}, seen=seen)
    held = raw["w"]["@lora"]
    return np.asarray(held["a"]), np.asarray(held["b"]), np.asarray(held["@fixed"]["w"])


def start_of_peft(model):
    """PEFT's factors and base, in the same layout."""
    layer = model.base_model.model.layer
    parts = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.base_layer.weight
    return [part.detach().numpy().T for part in parts]


def up_to_sign(got, want, axis, **tolerance):
    sign = np.sign(np.sum(got * want, axis, keepdims=True))
    np.testing.assert_allclose(got, sign * want, **tolerance)


def test_eva_is_that_of_peft():
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["layer"],
        init_lora_weights="eva",
        eva_config=peft.EvaConfig(rho=1.0),
    )
    model = peft.get_peft_model(Net(), config)
    loader = [{"x": torch.from_numpy(X)}]
    eva.initialize_lora_eva_weights(
        model, loader, prepare_model_inputs_fn=None, prepare_layer_inputs_fn=None, show_progress_bar=False
    )
    a, b, w = start_of("eva")
    theirs = start_of_peft(model)
    up_to_sign(a, theirs[0], 0, atol=2e-3)
    assert not b.any()
    assert not theirs[1].any()
    np.testing.assert_array_equal(w, theirs[2])


@pytest.mark.parametrize("steps", [1, 3])
def test_loftq_is_the_loop_of_peft_with_our_rounding(steps):
    split = pytest.importorskip("peft.utils.loftq_utils")._low_rank_decomposition
    w, stored = kernel(), rpx.Stored("nf4", block=4)
    residual = w
    for _ in range(steps):
        base = stored.fold(stored.init({"w": residual}))["w"]
        found = split(torch.from_numpy(np.array(w - base).T), reduced_rank=RANK)
        residual = w - jnp.asarray((found["L"] @ found["R"]).numpy().T)
    raw = rpx.adapters.loftq(stored >> rpx.LoRA(RANK), {"w": w}, steps=steps)["w"]["@lora"]
    up_to_sign(raw["a"], found["R"].numpy().T, 0, atol=1e-4)
    up_to_sign(raw["b"], found["L"].numpy().T, 1, atol=1e-4)


class Two(torch.nn.Module):
    """Layers with inputs of their own, of which few directions are large and many."""

    def __init__(self):
        super().__init__()
        self.few, self.many, self.some = (torch.nn.Linear(12, 8) for _ in range(3))

    def forward(self, few, many, some):
        return self.few(few) + self.many(many) + self.some(some)


@pytest.mark.parametrize("rho", [1.0, 1.5, 2.0])
def test_ranks_are_those_that_eva_gives_in_peft(rho):
    sizes = {"few": np.geomspace(1, 1e-3, 12), "many": np.linspace(1, 0.8, 12), "some": np.linspace(1, 0.1, 12) ** 2}
    drawn = {
        name: np.random.default_rng(i).standard_normal((64, 12)) * size for i, (name, size) in enumerate(sizes.items())
    }
    data = {name: (x + 2).astype(np.float32) for name, x in drawn.items()}
    config = peft.LoraConfig(
        r=RANK, target_modules=[*data], init_lora_weights="eva", eva_config=peft.EvaConfig(rho=rho)
    )
    loader = [{name: torch.from_numpy(x) for name, x in data.items()}]
    model = peft.get_peft_model(Two(), config)
    found = eva.get_eva_state_dict(
        model, loader, prepare_model_inputs_fn=None, prepare_layer_inputs_fn=None, show_progress_bar=False
    )
    theirs = {name.rpartition(".")[2]: len(a) for name, a in found.items()}
    seen = {name: Seen((read_of(x),)) for name, x in data.items()}
    assert rpx.adapters.eva_ranks(seen, RANK, rho) == theirs
    assert (len(set(theirs.values())) > 1) == (rho > 1)


@pytest.mark.parametrize("mode", ["ipm", "kpm"])
def test_corda_is_that_of_peft(mode, tmp_path):
    file = str(tmp_path / "moments.pt")
    torch.save({"layer": torch.from_numpy(X.T @ X / 128)}, file)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["layer"],
        init_lora_weights="corda",
        corda_config=lora.config.CordaConfig(corda_method=mode, covariance_file=file),
    )
    net = Net()
    corda.preprocess_corda(net, config)
    theirs = start_of_peft(peft.get_peft_model(net, config))
    ours = start_of("corda" if mode == "ipm" else "corda_kpm")
    sign = np.sign(np.sum(ours[0] * theirs[0], 0))
    np.testing.assert_allclose(ours[0], sign * theirs[0], rtol=2e-3, atol=2e-3 * np.abs(theirs[0]).max())
    np.testing.assert_allclose(ours[1], sign[:, None] * theirs[1], rtol=2e-3, atol=2e-3 * np.abs(theirs[1]).max())
    np.testing.assert_allclose(ours[2], theirs[2], atol=1e-4)


def test_lora_ga_takes_the_directions_of_peft_at_the_scale_of_the_paper():
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["layer"],
        init_lora_weights="lora_ga",
        lora_ga_config=lora.LoraGAConfig(),
    )
    net = Net()

    def step():
        ((net(torch.from_numpy(X)) - torch.from_numpy(TARGET)) ** 2).mean().backward()

    lora.preprocess_loraga(net, config, step)
    gradient = net.layer._peft_loraga_grad.numpy().T.copy()
    theirs = start_of_peft(peft.get_peft_model(net, config))
    a, b, w = start_of("lora_ga", gradient)
    size, singular = 8**0.25 / 4, np.linalg.svd(gradient)[1]
    up_to_sign(a, size * theirs[0], 0, atol=1e-3)
    up_to_sign(b, theirs[1] / singular[RANK : 2 * RANK, None], 1, atol=1e-3)
    np.testing.assert_allclose(w + 2 * a @ b, kernel(), atol=1e-5)
