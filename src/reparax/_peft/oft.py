"""OFT."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from reparax._numerics.linalg import product
from reparax._peft.method import (
    Layer,
    Method,
    Node,
    Tensors,
    Written,
    one_of_all,
    require,
)
from reparax._peft.settings import ANY, FLAG, NUMBER, Setting, one_of
from reparax._peft.target import Target
from reparax.adapters import Rotated
from reparax.matrices import Orthogonal


class OFTMethod(Method):
    """Rotations of the inputs, block by block."""

    name = "OFT"
    suffixes = ("oft_R.weight",)

    settings: ClassVar[Mapping[str, Setting]] = {
        "bias": one_of(("none", "all", "oft_only")),
        "fan_in_fan_out": FLAG,
        "module_dropout": NUMBER,
        # The shape of the tensor tells the sizes; the other three have no effect without other settings.
        **dict.fromkeys(("r", "oft_block_size", "init_weights", "eps", "num_cayley_neumann_terms"), ANY),
    }

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Layer:
        if len(target.shape) != 2:
            raise ValueError(f"Rotated takes matrices, but the array has shape {target.shape}")
        (rows,) = target.ins
        free = tensors["oft_R.weight"]
        blocks = free.shape[0]
        size = target.shape[rows] // max(blocks, 1)
        require(tensors, {"oft_R.weight": (blocks, size * (size - 1) // 2)})
        upper = np.zeros((blocks, size, size), free.dtype)
        upper[:, *np.triu_indices(size, 1)] = free
        values = {"@rotated/r/@orthogonal/x": jnp.asarray(-2 * upper)}
        return Layer((Orthogonal(stacked=0), Rotated(blocks, **target.rows_and_columns())), values)

    def write(self, target: Target, node: Node) -> Written:
        target.require_rows(node.stage)
        held = node.inner("r", Orthogonal)
        stage: Any = held.stage
        x, base = held.values["x"], held.values["base"]
        size = x.shape[-1]
        if stage.map != "cayley":
            raise ValueError(f"PEFT has rotations by the Cayley map, but no equivalent of {stage!r}")
        skew = (x.mT - x) / 2
        if not jnp.array_equal(base, jnp.broadcast_to(jnp.eye(size, dtype=base.dtype), base.shape)):
            turned, one = replace(stage, stacked=()), jnp.eye(size, dtype=x.dtype)
            rotations = jnp.stack([turned.apply_leaf({"x": a, "base": b}) for a, b in zip(x, base, strict=True)])
            skew = product(one[None] - rotations, jnp.linalg.inv(one[None] + rotations))
        return Written(
            {"oft_R.weight": skew[:, *np.triu_indices(size, 1)]}, flags={"blocks": x.shape[0], "block size": size}
        )

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        config = {"r": 0, "oft_block_size": 0, "use_cayley_neumann": False}
        if len({each.flags["block size"] for each in modules.values()}) == 1:
            return config | {"oft_block_size": one_of_all(modules, "block size")}
        return config | {"r": one_of_all(modules, "blocks")}
