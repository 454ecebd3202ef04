"""IA3."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from reparax._peft.method import (
    Adapted,
    Method,
    StageNode,
    Tensors,
    Written,
    require,
)
from reparax._peft.settings import ANY, FLAG, NAMES, Setting
from reparax._peft.target import Target
from reparax.adapters import Gain


class IA3Method(Method):
    """Factors on outputs, including the bias, or on inputs."""

    name = "IA3"
    suffixes = ("ia3_l",)
    settings: Mapping[str, Setting] = {
        "fan_in_fan_out": FLAG,
        "feedforward_modules": NAMES,
        "init_ia3_weights": ANY,
    }

    layouts: tuple[str, ...] = ("kernel", "same", "conv1d")

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        feedforward = selects_module(target.module, config.get("feedforward_modules") or [])
        axis = self._axis(target, feedforward=feedforward)
        size, ones = target.shape[axis], target.ones
        inputs = feedforward or bool(ones)
        require(tensors, {"ia3_l": (1, size, *ones) if inputs else (size, 1)})
        return Adapted((Gain(axis=axis),), {"@gain/g": jnp.asarray(tensors["ia3_l"]).reshape(size)})

    def write(self, target: Target, node: StageNode) -> Written:
        g, gain = node.values["g"], node.stage
        axis = gain.axis % len(target.shape) if isinstance(gain, Gain) and isinstance(gain.axis, int) else None
        if axis not in (self._axis(target, feedforward=True), target.out):
            raise ValueError(f"PEFT has factors on inputs or on outputs, but no equivalent of {gain!r}")
        ones, inputs = target.ones, axis != target.out
        return Written({"ia3_l": g.reshape((1, -1, *ones) if ones or inputs else (-1, 1))}, flags={"inputs": inputs})

    @staticmethod
    def _axis(target: Target, *, feedforward: bool) -> int:
        """The axis of outputs, or that of inputs, which is torch's second axis."""
        if not feedforward:
            return target.out
        return target.ins[-1] if target.out == len(target.shape) - 1 else target.ins[0]

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        inputs = sorted(module for module, written in modules.items() if written.flags["inputs"])
        clear = all(written.flags["inputs"] == selects_module(module, inputs) for module, written in modules.items())
        # PEFT matches list entries with suffixes of names; if suffixes are ambiguous, use a regular expression.
        return {"feedforward_modules": inputs if clear else "|".join(map(re.escape, inputs))}


def selects_module(module: str, names: Any) -> bool:
    """Whether a list of names, or a regular expression, selects a module by PEFT's rules."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module.endswith(name) for name in names)
