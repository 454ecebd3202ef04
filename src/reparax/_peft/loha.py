"""LoHa."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax._peft.method import (
    Adapted,
    Method,
    StageNode,
    Tensors,
    Written,
    ranks_and_alphas,
    require,
    split_scale,
)
from reparax._peft.settings import OF_PRODUCTS, Setting
from reparax._peft.target import Target
from reparax.adapters import Delta, Hadamard
from reparax.matrices import LowRank
from reparax.numbers import Scale


class LoHaMethod(Method):
    """An elementwise product of two low-rank differences."""

    name = "LOHA"
    alpha = "alpha"
    suffixes = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
    settings: Mapping[str, Setting] = OF_PRODUCTS
    defaults: Mapping[str, Any] = {"r": 8, "alpha": 8}

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        ins = target.inputs_shape(rank)
        shapes = {
            f"hada_w{i}_{end}": s
            for i in (1, 2)
            for end, s in (("a", _output_shape(target, rank)), ("b", _matrix_shape(ins)))
        }
        require(tensors, shapes)
        stages = (LowRank(rank, outside=target.outside(rank), **target.sides), Hadamard(), Scale(alpha / rank), Delta())
        values = {
            f"@delta/x/@scale/x/@hadamard/{name}/@low_rank/{factor}": x
            for name, i in (("x", 1), ("y", 2))
            for factor, x in (
                ("u", target.read_inputs(tensors[f"hada_w{i}_b"].reshape(ins))),
                ("v", jnp.asarray(tensors[f"hada_w{i}_a"]).T),
            )
        }
        return Adapted(stages, values)

    def write(self, target: Target, node: StageNode) -> Written:
        difference, factor = split_scale(node)
        tensors: dict[str, Array] = {}
        ranks: list[int] = []
        for name, i in (("x", 1), ("y", 2)):
            low = difference.require_stage_on(name, LowRank)
            target.require_rows(low.stage)
            u, v = low.values["u"], low.values["v"]
            ranks.append(u.shape[-1])
            tensors |= {f"hada_w{i}_a": v.T, f"hada_w{i}_b": target.write_inputs(u).reshape(u.shape[-1], -1)}
        return Written(tensors, factor, ranks[0])

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        return ranks_and_alphas(self, modules)


def _output_shape(target: Target, rank: int) -> tuple[int, int]:
    """The shape of a factor of the outputs."""
    return target.shape[target.out], rank


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A shape as that of a matrix: its first axis, and all others."""
    return shape[0], math.prod(shape[1:])
