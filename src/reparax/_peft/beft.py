"""BEFT."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from reparax._peft.method import Adapted, Method, StageNode, Tensors, Written, require
from reparax._peft.settings import ANY, Setting
from reparax._peft.target import Target
from reparax.adapters import Delta

_BIAS = "beft_bias"


class BEFTMethod(Method):
    """A difference of each bias."""

    name = "BEFT"
    suffixes = (_BIAS,)
    of_biases = (_BIAS,)
    settings: Mapping[str, Setting] = {"init_weights": ANY}

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        require(tensors, {_BIAS: (1, *target.shape)})
        return Adapted((Delta(),), {"@delta/x": jnp.asarray(tensors[_BIAS]).reshape(target.shape)})

    def write(self, target: Target, node: StageNode) -> Written:
        return Written({_BIAS: node.values["x"][None]})

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        return {}
