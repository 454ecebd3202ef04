"""The same training steps in torch, by its parametrizations, and in RETURNN's frontend on torch.

As in :mod:`peers_jax`, each function makes a step from weights of shape (inputs, outputs), inputs and targets.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch.nn.utils import parametrizations, parametrize

from .peers_jax import Arrays, Make, Step

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True  # as XLA multiplies by default on a GPU


class Noise(torch.nn.Module):
    """Noise on a weight."""

    strength = 0.0

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """The noisy weight."""
        return w + self.strength * torch.randn_like(w)


class Dropout(torch.nn.Module):
    """Dropout of a weight."""

    strength = 0.0

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        """The weight with zeros."""
        return torch.nn.functional.dropout(w, self.strength)


def with_noise(layer: torch.nn.Module) -> None:
    """Registers noise."""
    parametrize.register_parametrization(layer, "weight", Noise())


def with_dropout(layer: torch.nn.Module) -> None:
    """Registers dropout."""
    parametrize.register_parametrization(layer, "weight", Dropout())


def with_orthogonal(layer: torch.nn.Module) -> None:
    """Registers the Cayley map."""
    parametrizations.orthogonal(layer, orthogonal_map="cayley")


Register = Callable[[torch.nn.Module], object]
REGISTERED: dict[str, tuple[Register, ...]] = {
    "plain": (),
    "weight norm": (parametrizations.weight_norm,),
    "noise": (with_noise,),
    "weight norm and noise": (parametrizations.weight_norm, with_noise),
    "weight dropout": (with_dropout,),
    "spectral norm": (parametrizations.spectral_norm,),
    "orthogonal": (with_orthogonal,),
}


def on_device(x: Any) -> torch.Tensor:
    """A tensor of its own."""
    return torch.tensor(x, device=DEVICE)


def descent(loss: Callable[[], torch.Tensor], params: list[torch.Tensor], strengthen: Callable[[float], None]) -> Step:
    """Steps of gradient descent."""
    optimizer = torch.optim.SGD(params, lr=0.0)

    def call(strength: float, rate: float) -> float:
        strengthen(strength)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.item()

    return call


def of_torch(task: str, *, compiled: bool = False) -> Make:
    """By torch's modules, one operation after the other or compiled."""

    def make(weights: Arrays, x: Any, y: Any) -> Step:
        layers = [torch.nn.Linear(*w.shape, bias=False) for w in weights]
        for layer, w in zip(layers, weights, strict=True):
            layer.weight = torch.nn.Parameter(on_device(w.T).contiguous())  # else torch draws slowly
            for register in REGISTERED[task]:
                register(layer)
        model = torch.nn.Sequential(*[each for layer in layers for each in (layer, torch.nn.ReLU())][:-1])
        inputs, targets = on_device(x), on_device(y)
        random = [module for module in model.modules() if isinstance(module, Noise | Dropout)]

        def strengthen(strength: float) -> None:
            for module in random:
                module.strength = strength

        def loss() -> torch.Tensor:
            return torch.nn.functional.mse_loss(model(inputs), targets)

        return descent(torch.compile(loss) if compiled else loss, list(model.parameters()), strengthen)

    return make


def of_returnn(task: str) -> Make:
    """By RETURNN, whose noise and dropout stand in its gradient checkpoint scope."""
    import returnn.frontend as rf
    from returnn.frontend.parametrizations import WeightDropout, WeightNoise
    from returnn.tensor import Dim, Tensor

    def make(weights: Arrays, x: Any, y: Any) -> Step:
        rf.select_backend_torch()
        rf.init_train_step_run_ctx(train_flag=True, step=0)
        dims = [Dim(w.shape[0], name=f"layer{i}") for i, w in enumerate(weights)]
        dims.append(Dim(weights[-1].shape[1], name="out"))
        layers = [rf.Linear(*pair, with_bias=False) for pair in itertools.pairwise(dims)]
        random = [WeightNoise(0.0) if task == "noise" else WeightDropout(0.0) for _ in layers]
        params = [torch.nn.Parameter(on_device(w)) for w in weights]
        for layer, parametrization, param in zip(layers, random, params, strict=True):
            layer.weight.raw_tensor = param
            rf.register_parametrization(layer, "weight", parametrization)
        inputs = Tensor("x", [Dim(len(x), name="batch"), dims[0]], dtype="float32", raw_tensor=on_device(x))
        targets = on_device(y)

        def strengthen(strength: float) -> None:
            for each in random:
                setattr(each, "std" if task == "noise" else "drop_prob", strength)

        def loss() -> torch.Tensor:
            hidden = inputs
            for layer in layers[:-1]:
                hidden = rf.relu(layer(hidden))
            return torch.nn.functional.mse_loss(layers[-1](hidden).raw_tensor, targets)

        return descent(loss, params, strengthen)

    return make
