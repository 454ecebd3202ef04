"""LoRA, rsLoRA and DoRA; VeRA, which is LoRA with gains; and trained tokens, which LoRA may have beside it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.axes import last_to_number
from reparax.io._peft_method import (
    ANY,
    FLAG,
    INDICES,
    INDICES_BY_NAME,
    LISTED,
    NUMBER,
    RANK,
    Adapted,
    Method,
    Setting,
    StageNode,
    Tensors,
    Written,
    by_pattern,
    known_number,
    one_of,
    one_of_all,
    ranks_and_alphas,
    require,
    require_matrix,
)
from reparax.io._peft_target import Target
from reparax.stages.adapters import Delta, Gain, LoRA, TrainableSlices
from reparax.stages.norms import WeightNorm
from reparax.stages.numbers import Scale
from reparax.stages.sparse import Freeze

BIAS = "lora_B.bias"
_DELTA = "trainable_tokens_delta"
_TOKENS = f"token_adapter.{_DELTA}"


class TokensMethod(Method):
    """Trained slices of tables, or of heads."""

    name = "TRAINABLE_TOKENS"
    suffixes = (_DELTA,)
    settings: Mapping[str, Setting] = {"token_indices": INDICES, "init_weights": ANY}
    layouts: tuple[str, ...] = ("kernel", "same", "embedding")

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        require_matrix(self, target)
        index, axis = tuple(config.get("token_indices", ())), _token_axis(target)
        require(tensors, {_DELTA: (len(index), target.shape[1 - axis])})
        if max(index, default=0) >= target.shape[axis]:
            raise ValueError(f"expected tokens below {target.shape[axis]}, got {max(index)}")
        slices = TrainableSlices(index, axis=axis)
        return Adapted((slices,), {"@trainable_slices/x": _swap_token_axis(jnp.asarray(tensors[_DELTA]), axis)})

    def write(self, target: Target, node: StageNode) -> Written:
        stage: Any = node.stage
        axis = _token_axis(target)
        if not isinstance(stage.axis, int) or stage.axis % len(target.shape) != axis:
            raise ValueError(f"PEFT has tokens along axis {axis}, but no equivalent of {stage!r}")
        return Written(
            {_DELTA: _swap_token_axis(node.require_array("x"), axis)}, flags={"token_indices": stage.indices}
        )


class VeRAMethod(Method):
    """Gains of the ranks and of the outputs of fixed factors, which all modules share."""

    name = "VERA"
    suffixes = ("vera_lambda_d", "vera_lambda_b")
    banks = ("vera_A", "vera_B")
    own_biases = "vera_only"
    settings: Mapping[str, Setting] = {
        "bias": one_of(("none", "all", own_biases)),
        "vera_dropout": NUMBER,
        "save_projection": one_of((True,)),  # without the projection, the file lacks the factors
        **dict.fromkeys(("r", "init_weights", "d_initial", "projection_prng_key"), ANY),
    }

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        require_matrix(self, target)
        rank, outputs = np.size(tensors.get("vera_lambda_d", 0)), target.shape[target.out]
        shapes = {
            "vera_lambda_d": (rank,),
            "vera_lambda_b": (outputs,),
            "vera_A": target.inputs_shape(rank),
            "vera_B": (outputs, rank),
        }
        tensors = {name: _part_of_bank(x, shapes[name]) if name in self.banks else x for name, x in tensors.items()}
        require(tensors, shapes)
        stages = (
            Freeze(where="/@lora/[ab]/@gain/w"),
            Gain(axis=-1, where="/@lora/[ab]"),
            LoRA(rank, **target.sides),
        )
        values = {
            "@lora/a/@gain/g": jnp.asarray(tensors["vera_lambda_d"]),
            "@lora/b/@gain/g": jnp.asarray(tensors["vera_lambda_b"]),
            "@lora/a/@gain/w/@freeze/@fixed/w": target.read_inputs(tensors["vera_A"]),
            "@lora/b/@gain/w/@freeze/@fixed/w": jnp.asarray(tensors["vera_B"]).T,
        }
        return Adapted(stages, values)

    def write(self, target: Target, node: StageNode) -> Written:
        stage: Any = node.stage
        target.require_rows(stage)
        gains = [node.require_stage_on(name, Gain) for name in "ab"]
        axes = [getattr(gain.stage, "axis", None) for gain in gains]
        if not all(axis in (-1, 1) for axis in axes) or not math.isclose(_factor_of(stage), 1, rel_tol=1e-6):
            raise ValueError(f"PEFT has gains of ranks and of outputs, but no equivalent of them in {stage!r}")
        a, b = (target.part(gain.require_stage_on("w", Freeze).require_array("w")) for gain in gains)
        d, c = (gain.require_array("g") for gain in gains)
        tensors = {"vera_lambda_d": d, "vera_lambda_b": c, "vera_A": target.write_inputs(a), "vera_B": b.T}
        return Written(tensors, flags={"r": stage.rank, "save_projection": True, "projection_prng_key": 0})


class LoRAMethod(Method):
    """LoRA, rsLoRA and DoRA."""

    name = "LORA"
    alpha = "lora_alpha"
    suffixes = (
        *("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
        *(BIAS, _TOKENS),
    )
    own_biases = "lora_only"
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
        "bias": one_of(("none", "all", own_biases)),
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
        use_rslora = bool(config.get("use_rslora"))
        if _TOKENS in tensors:
            return TOKENS.read(target, {_DELTA: tensors[_TOKENS]}, _token_settings(target, config), alpha, rank)
        if BIAS in tensors:
            require(tensors, {BIAS: target.shape})
            scale = Scale(alpha / (math.sqrt(rank) if use_rslora else rank))
            return Adapted((scale, Delta()), {"@delta/x/@scale/x": jnp.asarray(tensors[BIAS])})
        if target.n_experts:
            return _read_experts(target, tensors, config, LoRA(rank, alpha, use_rslora=use_rslora))
        names, ones = _factor_names(target), target.ones
        outputs = target.shape[target.out]
        shapes = {names[0]: target.inputs_shape(rank), names[1]: (outputs, rank, *ones)}
        magnitude = (1, outputs, *ones) if ones else (outputs,)
        dora = bool(config.get("use_dora"))
        require(tensors, shapes | ({"lora_magnitude_vector": magnitude} if dora else {}))
        lora = LoRA(rank, alpha, use_rslora=use_rslora, **target.sides)
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
            return Written({BIAS: scale.require_array("x")}, known_number(getattr(scale.stage, "factor", None)))
        norm, lora = (node, node.require_stage_on("v", LoRA)) if isinstance(node.stage, WeightNorm) else (None, node)
        stage: Any = lora.stage
        target.expert().require_rows(stage)
        if norm is not None and target.n_experts:
            raise ValueError(_NO_DORA)
        if norm is not None:
            _require_outputs(target, norm.stage)
        a, b = lora.require_array("a"), lora.require_array("b")
        names, ones = _factor_names(target), target.ones
        if target.n_experts:
            tensors = _write_experts(a, b)
        else:
            tensors = {names[0]: target.write_inputs(a), names[1]: b.T.reshape(-1, stage.rank, *ones)}
        if norm is not None:
            g = norm.require_array("g").astype(a.dtype)
            tensors["lora_magnitude_vector"] = g.reshape((1, -1, *ones) if ones else (-1,))
        root = stage.use_rslora and stage.alpha is not None
        flags = {"root": root, "use_dora": norm is not None, "lora_bias": False}
        return Written(tensors, _factor_of(stage), stage.rank, flags)

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        root = all(written.flags["root"] for written in modules.values())
        flags = {name: one_of_all(modules, name) for name in ("use_dora", "lora_bias")} | {"use_rslora": root}
        return flags | ranks_and_alphas(self, modules, by_root=root)


TOKENS = TokensMethod()
_NO_DORA = "PEFT has no DoRA of experts"


def _token_axis(target: Target) -> int:
    """The axis of tokens: the inputs of a table, and the outputs of a head."""
    return target.ins[0] if target.table else target.out


def _swap_token_axis(x: Array, axis: int) -> Array:
    """Rows for tokens as slices of ours, or back."""
    return x if axis == 0 else x.T


def _part_of_bank(bank: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The part of a shared tensor for one module, if it has as many axes."""
    return bank[tuple(map(slice, shape))] if bank.ndim == len(shape) else bank


def _factor_of(lora: Any) -> float:
    """The factor of the difference."""
    if lora.alpha is None:
        return 1.0
    return known_number(lora.alpha) / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


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
