"""IA3 and OFT, which multiply weights; and all methods, by name and by the chain of an array."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.io._peft_lora import TOKENS, LoRAMethod, VeRAMethod
from reparax.io._peft_method import (
    ANY,
    FLAG,
    NAMES,
    NUMBER,
    Adapted,
    Method,
    Setting,
    StageNode,
    Tensors,
    Written,
    one_of,
    one_of_all,
    require,
    require_matrix,
    whole_number,
)
from reparax.io._peft_products import LoHaMethod, LoKrMethod
from reparax.io._peft_target import Target
from reparax.numerics.linalg import identity, product
from reparax.stages.adapters import CayleyNeumann, Delta, Gain, Hadamard, LoRA, Rotated, TrainableSlices
from reparax.stages.matrices import Kronecker, Orthogonal
from reparax.stages.norms import WeightNorm
from reparax.stages.numbers import Scale
from reparax.stages.quantized import Quantized
from reparax.stages.sparse import Freeze


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
        g, gain, base = node.require_array("g"), node.stage, node.values["w"]
        if isinstance(base, StageNode) and not isinstance(base.stage, Freeze | Quantized):
            raise ValueError(f"PEFT has no equivalent of {gain!r} with other stages on its 'w'")
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


class OFTMethod(Method):
    """Rotations of the inputs, block by block."""

    name = "OFT"
    suffixes = ("oft_R.weight",)
    own_biases = "oft_only"
    settings: Mapping[str, Setting] = {
        "bias": one_of(("none", "all", own_biases)),
        "fan_in_fan_out": FLAG,
        "module_dropout": NUMBER,
        "use_cayley_neumann": FLAG,
        # Each term is a product of matrices; PEFT has 5 of them, and float32 holds no more than these.
        "num_cayley_neumann_terms": whole_number(1, 100),
        "block_share": FLAG,
        "coft": FLAG,
        "eps": NUMBER,
        **dict.fromkeys(("r", "oft_block_size", "init_weights"), ANY),  # the shape of the tensor tells the sizes
    }
    defaults: Mapping[str, Any] = {"num_cayley_neumann_terms": 5, "eps": 6e-5}

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        require_matrix(self, target)
        rows, is_shared = target.shape[target.ins[0]], bool(config.get("block_share"))
        free = tensors["oft_R.weight"]
        if free.ndim != 2:
            raise ValueError(f"expected oft_R.weight with two axes, got shape {free.shape}")
        size = (1 + math.isqrt(1 + 8 * free.shape[-1])) // 2 if is_shared else rows // max(free.shape[0], 1)
        blocks = rows // max(size, 1)
        require(tensors, {"oft_R.weight": (1 if is_shared else blocks, size * (size - 1) // 2)})
        if config.get("coft"):
            free = _clip_to_ball(free, config["eps"])
        stage_of_rotation = Rotated(blocks, block_share=is_shared, **target.sides)
        if config.get("use_cayley_neumann"):
            terms = config["num_cayley_neumann_terms"]
            if terms < 3:
                raise ValueError(f"CayleyNeumann is read from 3 terms on, got num_cayley_neumann_terms={terms}")
            stage = CayleyNeumann(max(terms - 1, 3), stacked=0)  # PEFT has a third power for 3 terms too
            return Adapted((stage, stage_of_rotation), {"@rotated/r/@cayley_neumann/x": jnp.asarray(free)})
        upper = np.zeros((*free.shape[:1], size, size), free.dtype)
        upper[:, *np.triu_indices(size, 1)] = free
        return Adapted(
            (Orthogonal(stacked=0), stage_of_rotation), {"@rotated/r/@orthogonal/x": jnp.asarray(-2 * upper)}
        )

    def write(self, target: Target, node: StageNode) -> Written:
        target.require_rows(node.stage)
        rotation_node: Any = node.values["r"]
        stage: Any = node.stage
        series = isinstance(getattr(rotation_node, "stage", None), CayleyNeumann)
        free = (
            _matrices_of_series(rotation_node)
            if series
            else _matrices_of_rotations(node.require_stage_on("r", Orthogonal))
        )
        rows = target.shape[target.ins[0]]
        flags = {"oft_block_size": rows // stage.num_blocks, "r": stage.num_blocks, "block_share": stage.block_share}
        flags |= {
            "num_cayley_neumann_terms": rotation_node.stage.degree + 1 if series else 5,
            "use_cayley_neumann": series,
        }
        return Written({"oft_R.weight": free}, flags=flags)

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        common_names = ("block_share", "use_cayley_neumann", "num_cayley_neumann_terms")
        config = {"r": 0, "oft_block_size": 0} | {name: one_of_all(modules, name) for name in common_names}
        size = "oft_block_size" if len({written.flags["oft_block_size"] for written in modules.values()}) == 1 else "r"
        return config | {size: one_of_all(modules, size)}


def selects_module(module: str, names: Any) -> bool:
    """Whether a list of names, or a regular expression, selects a module by PEFT's rules."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module.endswith(name) for name in names)


def _clip_to_ball(free: np.ndarray, radius: float) -> np.ndarray:
    """The free numbers where PEFT moves them before each use: in a ball around zero for each block."""
    lengths = np.sqrt(2 * np.sum(np.square(free, dtype=np.float64), axis=1, keepdims=True))
    most = radius / math.sqrt(free.shape[0])
    return (free * np.where(lengths <= most, 1.0, most / np.maximum(lengths, most))).astype(free.dtype)


def _matrices_of_series(node: StageNode) -> Array:
    """The skew-symmetric matrices of series of degree 3 or more, whose base must be the identity."""
    stage: Any = node.stage
    base = node.require_array("base")
    if stage.degree < 3 or not jnp.array_equal(base, identity(base)):
        raise ValueError(f"PEFT has series of degree 3 or more around the identity, but no equivalent of {stage!r}")
    return node.require_array("x")


def _matrices_of_rotations(node: StageNode) -> Array:
    """The skew-symmetric matrices of rotations, by the inverse Cayley map."""
    stage: Any = node.stage
    x, base = node.require_array("x"), node.require_array("base")
    size = x.shape[-1]
    if stage.map != "cayley":
        raise ValueError(f"PEFT has rotations by the Cayley map, but no equivalent of {stage!r}")
    skew = (x.mT - x) / 2
    if not jnp.array_equal(base, identity(base)):
        stage_for_one, eye = replace(stage, stacked=()), jnp.eye(size, dtype=x.dtype)
        rotations = jnp.stack([stage_for_one.apply_leaf({"x": a, "base": b}) for a, b in zip(x, base, strict=True)])
        skew = product(eye[None] - rotations, jnp.linalg.inv(eye[None] + rotations))
    return skew[:, *np.triu_indices(size, 1)]


LORA, LOHA, LOKR, IA3, OFT, VERA = LoRAMethod(), LoHaMethod(), LoKrMethod(), IA3Method(), OFTMethod(), VeRAMethod()
METHODS: Mapping[str, Method] = {method.name: method for method in (LORA, LOHA, LOKR, IA3, OFT, TOKENS, VERA)}


def method_of(node: StageNode) -> Method:
    """The method whose chain made a parameter."""
    match node.stage:
        case LoRA() if isinstance(node.values["a"], StageNode) and isinstance(node.values["a"].stage, Gain):
            return VERA
        case LoRA() | WeightNorm(detach=True):
            return LORA
        case Gain():
            return IA3
        case Rotated():
            return OFT
        case TrainableSlices():
            return TOKENS
        case Delta():
            return _method_of_difference(node)
        case stage:
            raise ValueError(f"PEFT has no equivalent of {stage!r}")


def _method_of_difference(node: StageNode) -> Method:
    """The method whose chain made a difference: of a bias beside LoRA, or a product."""
    x: Any = node.values["x"]
    scaled = isinstance(x, StageNode) and isinstance(x.stage, Scale)
    x = x.values["x"] if scaled else x
    stage: Any = getattr(x, "stage", None)
    if isinstance(stage, Kronecker):
        return LOKR
    if isinstance(stage, Hadamard):
        return LOHA
    if scaled and stage is None and x.ndim == 1:
        return LORA
    raise ValueError(f"PEFT has no equivalent of {node.stage!r}")
