"""LoRA, rsLoRA and DoRA."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax._axes.numbers import last_to_number
from reparax._peft import rows
from reparax._peft.method import (
    Adapted,
    Method,
    StageNode,
    Tensors,
    Written,
    known_number,
    one_of_all,
    ranks_and_alphas,
    require,
)
from reparax._peft.settings import ANY, FLAG, INDICES_BY_NAME, LISTED, NUMBER, RANK, Setting, by_pattern, one_of
from reparax._peft.target import Target
from reparax.adapters import Delta, LoRA
from reparax.norms import WeightNorm
from reparax.numbers import Scale

BIAS = "lora_B.bias"
DELTA = "trainable_tokens_delta"
TOKENS = f"token_adapter.{DELTA}"


class LoRAMethod(Method):
    """LoRA, rsLoRA and DoRA."""

    name = "LORA"
    alpha = "lora_alpha"
    suffixes = (
        *("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
        *(BIAS, TOKENS),
    )
    of_biases = (BIAS,)

    settings: Mapping[str, Setting] = {
        "r": RANK,
        "lora_alpha": NUMBER,
        "rank_pattern": by_pattern(RANK),
        "alpha_pattern": by_pattern(NUMBER),
        "use_rslora": FLAG,
        "use_dora": FLAG,
        "fan_in_fan_out": FLAG,
        "lora_bias": FLAG,
        "target_parameters": LISTED,
        "trainable_token_indices": INDICES_BY_NAME,
        "bias": one_of(("none", "all", "lora_only")),
        "lora_dropout": NUMBER,
        # The other starts change the base too, or keep a factor fixed.
        "init_lora_weights": one_of((True, False, "gaussian", "orthogonal", "eva")),
        # These have no effect by themselves: other settings use them.
        **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), ANY),
        **dict.fromkeys(("megatron_core", "qalora_group_size", "runtime_config"), ANY),
    }
    defaults: Mapping[str, Any] = {"r": 8, "lora_alpha": 8}

    layouts: tuple[str, ...] = (
        *("kernel", "same", "conv1d", "embedding"),
        *("experts:kernel", "experts:same", "experts:conv1d"),
    )

    def require_layout(self, target: Target) -> None:
        super().require_layout(target)
        if target.n_experts == 1 and target.expert().layout == "conv1d":
            raise ValueError("PEFT 0.21 transposes the update of a stack (experts, in, out) of one expert")

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        divisor = "sqrt" if config.get("use_rslora") else "rank"
        if TOKENS in tensors:
            return rows.TOKENS.read(target, {DELTA: tensors[TOKENS]}, _token_settings(target, config), alpha, rank)
        if BIAS in tensors:
            require(tensors, {BIAS: target.shape})
            scale = Scale(alpha / (rank if divisor == "rank" else math.sqrt(rank)))
            return Adapted((scale, Delta()), {"@delta/x/@scale/x": jnp.asarray(tensors[BIAS])})
        if target.n_experts:
            return _read_experts(target, tensors, config, LoRA(rank, alpha, divisor=divisor))
        names, ones = _factor_names(target), target.ones
        outputs = target.shape[target.out]
        shapes = {names[0]: target.inputs_shape(rank), names[1]: (outputs, rank, *ones)}
        magnitude = (1, outputs, *ones) if ones else (outputs,)
        dora = bool(config.get("use_dora"))
        require(tensors, shapes | ({"lora_magnitude_vector": magnitude} if dora else {}))
        lora = LoRA(rank, alpha, divisor=divisor, **target.sides)
        values = {
            "@lora/a": target.read_inputs(tensors[names[0]]),
            "@lora/b": jnp.asarray(tensors[names[1]]).reshape(outputs, rank).T,
        }
        if not dora:
            return Adapted((lora,), values)
        axis = -1 if target.out == len(target.shape) - 1 else target.out
        spread = [outputs if i == target.out else 1 for i in range(len(target.shape))]
        g = jnp.asarray(tensors["lora_magnitude_vector"]).reshape(spread)
        inside = {f"@weight_norm/v/{place}": x for place, x in values.items()}
        return Adapted((lora, WeightNorm(axis=axis, detach=True)), {"@weight_norm/g": g, **inside})

    def write(self, target: Target, node: StageNode) -> Written:
        if isinstance(node.stage, Delta):
            scale = node.require_stage_on("x", Scale)
            return Written({BIAS: scale.values["x"]}, known_number(getattr(scale.stage, "factor", None)))
        norm, lora = (node, node.require_stage_on("v", LoRA)) if isinstance(node.stage, WeightNorm) else (None, node)
        stage: Any = lora.stage
        target.expert().require_rows(stage)
        if norm is not None and target.n_experts:
            raise ValueError(_NO_DORA)
        if norm is not None:
            _require_outputs(target, norm.stage)
        a, b = lora.values["a"], lora.values["b"]
        names, ones = _factor_names(target), target.ones
        if target.n_experts:
            tensors = _write_experts(a, b)
        else:
            tensors = {names[0]: target.write_inputs(a), names[1]: b.T.reshape(-1, stage.rank, *ones)}
        if norm is not None:
            g = norm.values["g"].astype(a.dtype)
            tensors["lora_magnitude_vector"] = g.reshape((1, -1, *ones) if ones else (-1,))
        rank, alpha, root = stage.rank, stage.alpha, stage.divisor == "sqrt"
        factor = 1.0 if alpha is None else known_number(alpha) / (math.sqrt(rank) if root else rank)
        flags = {"root": root and alpha is not None, "use_dora": norm is not None, "lora_bias": False}
        return Written(tensors, factor, rank, flags)

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        root = all(written.flags["root"] for written in modules.values())
        flags = {name: one_of_all(modules, name) for name in ("use_dora", "lora_bias")} | {"use_rslora": root}
        return flags | ranks_and_alphas(self, modules, by_root=root)


_NO_DORA = "PEFT has no DoRA of experts"


def _read_experts(target: Target, tensors: Tensors, config: Mapping[str, Any], lora: LoRA) -> Adapted:
    """Factors of all experts: ``lora_A`` has those of one after another, and ``lora_B`` has them alternate."""
    if config.get("use_dora"):
        raise ValueError(_NO_DORA)
    one_expert, count, rank = target.expert(), target.n_experts, lora.rank
    ins, outputs = one_expert.shape[one_expert.ins[0]], one_expert.shape[one_expert.out]
    shapes = {"lora_A.weight": (count * rank, ins), "lora_B.weight": (outputs, rank * count)}
    try:
        require(tensors, shapes)
    except ValueError as error:
        raise ValueError(
            f"{error}. Correct its layout, or the order of `names` if they are another parameter's"
        ) from error
    values = {
        "@lora/a": jnp.asarray(tensors["lora_A.weight"]).reshape(count, rank, ins).mT,
        "@lora/b": jnp.asarray(tensors["lora_B.weight"]).reshape(outputs, rank, count).T,
    }
    return Adapted((replace(lora, stacked=0, **one_expert.sides),), values)


def _write_experts(a: Array, b: Array) -> dict[str, Array]:
    """Factors of a stack of experts as PEFT has them: the inverse of :func:`_read_experts`."""
    return {"lora_A.weight": a.mT.reshape(-1, a.shape[1]), "lora_B.weight": b.T.reshape(b.shape[-1], -1)}


def _token_settings(target: Target, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the tokens that train beside LoRA: their numbers for each table, or for the one that there is."""
    indices = config.get("trainable_token_indices") or {}
    indices_of_table = indices if isinstance(indices, Mapping) else {"": indices}
    token_indices = next(
        (x for name, x in indices_of_table.items() if f".{target.module}".endswith(f".{name}" if name else "")), []
    )
    return {"token_indices": token_indices}


def _require_outputs(target: Target, norm: Any) -> None:
    """Requires lengths of outputs, the only ones that PEFT has."""
    axis = last_to_number(norm.axis)
    if not isinstance(axis, int) or axis % len(target.shape) != target.out:
        raise ValueError(f"PEFT has lengths of outputs, along axis {target.out}, but no equivalent of {norm!r}")


def _factor_names(target: Target) -> tuple[str, str]:
    """PEFT's names of both factors."""
    return ("lora_embedding_A", "lora_embedding_B") if target.table else ("lora_A.weight", "lora_B.weight")
