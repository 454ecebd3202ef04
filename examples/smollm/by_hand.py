"""The same by hand, as somebody would write it without reparax: LoRA, and noise on the weights."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from examples.smollm.model import Params


@jax.tree_util.register_dataclass
@dataclass
class Adapted:
    """A kernel with an adapter, by whose factors ``x @ kernel`` multiplies; a scan takes the parts of each layer."""

    w: Any
    a: Any
    b: Any

    def __rmatmul__(self, x: Array) -> Array:
        """``x @ kernel``."""
        return x @ self.w + (x @ self.a) @ self.b


def adapted(params: Params, factors: dict[str, dict[str, Any]]) -> Params:
    """The parameters, where the kernels have adapters with the ``factors`` of their parts and names."""
    layers = dict(params["layers"])
    for part, kernels in factors.items():
        held = layers[part]
        layers[part] = {name: {"kernel": Adapted(held[name]["kernel"], *ab)} for name, ab in kernels.items()}
    return {**params, "layers": layers}


def factors(raw: Any) -> dict[str, Any]:
    """The factors of all adapters in a raw tree of ``LoRA``, by part and name of the kernel."""
    return {
        part: {name: (held["kernel"]["@lora"]["a"], held["kernel"]["@lora"]["b"]) for name, held in kernels.items()}
        for part, kernels in raw["layers"].items()
        if part in ("self_attn", "mlp")
    }


def noisy(params: Params, std: float, key: Array) -> Params:
    """The parameters with normal noise on the kernels of all layers."""
    leaves, treedef = jax.tree.flatten({part: params["layers"][part] for part in ("self_attn", "mlp")})
    keys = jax.random.split(key, len(leaves))
    noise = [std * jax.random.normal(each, w.shape) for each, w in zip(keys, leaves, strict=True)]
    made = treedef.unflatten([w + n for w, n in zip(leaves, noise, strict=True)])
    return {**params, "layers": {**params["layers"], **made}}
