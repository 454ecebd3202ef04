"""LoRA, rsLoRA and DoRA; VeRA, which is LoRA with gains; and trained tokens, which LoRA may have beside it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from reparax.core.axes import last_to_number
from reparax.io._peft_row import (
    Adapted,
    Given,
    Method,
    Part,
    StageNode,
    Written,
    known_number,
    one_of_all,
    ranks_and_alphas,
)
from reparax.io._peft_target import Target
from reparax.stages.adapters import Delta, Gain, LoRA, TrainableSlices
from reparax.stages.norms import WeightNorm
from reparax.stages.numbers import Scale
from reparax.stages.sparse import Freeze

BIAS = "lora_B.bias"
_DELTA = "trainable_tokens_delta"
_TOKENS = f"token_adapter.{_DELTA}"
_NO_DORA = "PEFT has no DoRA of experts"


def _token_parts(target: Target, axis: int, count: int) -> dict[str, Part]:
    """The rows of tokens, which are slices along ``axis``."""
    turn = jnp.asarray if axis == 0 else jnp.transpose
    return {_DELTA: Part("@trainable_slices/x", (count, target.shape[1 - axis]), turn, turn)}


def _token_axis(target: Target) -> int:
    """The axis of tokens: the inputs of a table, and the outputs of a head."""
    return target.ins[0] if target.is_table else target.out


def _read_tokens(given: Given) -> Adapted:
    """Trained slices of a table, or of a head."""
    target, index = given.target, tuple(given.config.get("token_indices", ()))
    axis = _token_axis(target)
    values = given.values(_token_parts(target, axis, len(index)))
    if max(index, default=0) >= target.shape[axis]:
        raise ValueError(f"expected tokens below {target.shape[axis]}, got {max(index)}")
    return Adapted((TrainableSlices(index, axis=axis),), values)


def _write_tokens(node: StageNode) -> Written:
    """The rows of trained slices."""
    stage, target = node.stage, node.target
    axis = _token_axis(target)
    if (
        not isinstance(stage, TrainableSlices)
        or not isinstance(stage.axis, int)
        or stage.axis % len(target.shape) != axis
    ):
        raise ValueError(f"PEFT has tokens along axis {axis}, but no equivalent of {stage!r}")
    parts = _token_parts(target, axis, len(stage.indices))
    return Written(node.write(parts), flags={"token_indices": stage.indices})


TOKENS = Method(
    name="TRAINABLE_TOKENS",
    suffixes=(_DELTA,),
    settings={"indices": "token_indices", "any": "init_weights"},
    read=_read_tokens,
    write=_write_tokens,
    layouts=("kernel", "same", "embedding"),
    matrices=True,
)


def _vera_parts(target: Target, rank: int) -> dict[str, Part]:
    """The gains of the ranks and of the outputs, and the fixed factors, which all modules share."""
    frozen = "@gain/w/@freeze/@fixed/w"
    return {
        "vera_lambda_d": Part("@lora/a/@gain/g", (rank,)),
        "vera_lambda_b": Part("@lora/b/@gain/g", (target.outputs,)),
        "vera_A": Part(f"@lora/a/{frozen}", target.inputs_shape(rank), target.read_inputs, target.write_inputs),
        "vera_B": Part(f"@lora/b/{frozen}", (target.outputs, rank), jnp.transpose, jnp.transpose),
    }


def _read_vera(given: Given) -> Adapted:
    """LoRA of fixed factors with gains."""
    target, tensors = given.target, given.tensors
    rank = np.size(tensors.get("vera_lambda_d", 0))
    parts = _vera_parts(target, rank)
    own = {  # of the shared tensors, if they have as many axes
        name: x[tuple(map(slice, parts[name].shape))]
        for name, x in tensors.items()
        if name in VERA.banks and x.ndim == len(parts[name].shape)
    }
    values = replace(given, tensors={**tensors, **own}).values(parts)
    gains = Freeze(where="/@lora/[ab]/@gain/w"), Gain(axis=-1, where="/@lora/[ab]")
    return Adapted((*gains, LoRA(rank, **target.sides)), values)


def _write_vera(node: StageNode) -> Written:
    """Gains and factors."""
    stage: Any = node.stage
    node.target.require_rows(stage)
    axes = [node.at(f"@lora/{name}/@gain").stage.axis for name in "ab"]
    if not all(axis in (-1, 1) for axis in axes) or not math.isclose(_factor_of(stage), 1, rel_tol=1e-6):
        raise ValueError(f"PEFT has gains of ranks and of outputs, but no equivalent of them in {stage!r}")
    flags = {"r": stage.rank, "save_projection": True, "projection_prng_key": 0}
    return Written(node.write(_vera_parts(node.target, stage.rank)), flags=flags)


VERA = Method(
    name="VERA",
    suffixes=("vera_lambda_d", "vera_lambda_b"),
    settings={"number": "vera_dropout", "any": "r init_weights d_initial projection_prng_key"},
    # Without the projection, the file lacks the factors.
    words={"bias": ("none", "all", "vera_only"), "save_projection": (True,)},
    read=_read_vera,
    write=_write_vera,
    banks=("vera_A", "vera_B"),
    biases="vera_only",
    matrices=True,
)


def _lora_parts(target: Target, rank: int, *, dora: bool = False) -> dict[str, Part]:
    """The factors, and the lengths of DoRA."""
    outputs, ones, place = target.outputs, target.ones, "@weight_norm/v/@lora" if dora else "@lora"
    names = ("lora_embedding_A", "lora_embedding_B") if target.is_table else ("lora_A.weight", "lora_B.weight")
    parts = {
        names[0]: Part(f"{place}/a", target.inputs_shape(rank), target.read_inputs, target.write_inputs),
        names[1]: Part(
            f"{place}/b", (outputs, rank, *ones), lambda b: b.reshape(outputs, rank).T, lambda b: jnp.transpose(b)
        ),
    }
    if dora:
        lengths = [outputs if axis == target.out else 1 for axis in range(len(target.shape))]
        shape = (1, outputs, *ones) if ones else (outputs,)
        parts["lora_magnitude_vector"] = Part("@weight_norm/g", shape, lambda g: g.reshape(lengths))
    return parts


def _expert_parts(target: Target, rank: int) -> dict[str, Part]:
    """Factors of all experts: ``lora_A`` has those of one after another, and ``lora_B`` has them alternate."""
    expert, count = target.expert(), target.n_experts
    ins, outputs = expert.shape[expert.ins[0]], expert.outputs
    return {
        "lora_A.weight": Part("@lora/a", (count * rank, ins), lambda a: a.reshape(count, rank, ins).mT, lambda a: a.mT),
        "lora_B.weight": Part(
            "@lora/b", (outputs, rank * count), lambda b: b.reshape(outputs, rank, count).T, lambda b: b.T
        ),
    }


def _read_lora(given: Given) -> Adapted:
    """LoRA, with the lengths of DoRA; or what trains beside it: tokens, or the difference of a bias."""
    target, config, rank = given.target, given.config, given.rank
    dora, by_root = bool(config.get("use_dora")), bool(config.get("use_rslora"))
    if _TOKENS in given.tensors:
        TOKENS.require_matrix(target)
        tensors, indices = {_DELTA: given.tensors[_TOKENS]}, _token_indices(target, config)
        return _read_tokens(replace(given, tensors=tensors, config={"token_indices": indices}))
    if BIAS in given.tensors:
        values = given.values({BIAS: Part("@delta/x/@scale/x", target.shape)})
        return Adapted((Scale(given.alpha / (math.sqrt(rank) if by_root else rank)), Delta()), values)
    lora = LoRA(rank, given.alpha, use_rslora=by_root, **target.expert().sides)
    if not target.n_experts:
        values = given.values(_lora_parts(target, rank, dora=dora))
        axis = -1 if target.out == len(target.shape) - 1 else target.out
        return Adapted((lora, WeightNorm(axis=axis, detach=True)) if dora else (lora,), values)
    if dora:
        raise ValueError(_NO_DORA)
    try:
        return Adapted((replace(lora, stacked=0),), given.values(_expert_parts(target, rank)))
    except ValueError as error:
        raise ValueError(
            f"{error}. Correct its layout, or the order of `names` if they are another parameter's"
        ) from error


def _token_indices(target: Target, config: Mapping[str, Any]) -> list[int]:
    """The numbers of the tokens that train beside LoRA, which may be given by table."""
    indices = config.get("trainable_token_indices") or {}
    of_table = indices if isinstance(indices, Mapping) else {"": indices}
    return next((x for name, x in of_table.items() if f".{target.module}".endswith(f".{name}" if name else "")), [])


def _write_lora(node: StageNode) -> Written:
    """The factors, with the lengths of DoRA; or the difference of a bias."""
    target = node.target
    if isinstance(node.stage, Delta):
        return Written({BIAS: node.at("@delta/x/@scale/x")}, known_number(node.at("@delta/x/@scale").stage.factor))
    dora = isinstance(node.stage, WeightNorm)
    stage: Any = node.at("@weight_norm/v/@lora").stage if dora else node.stage
    target.expert().require_rows(stage)
    if stage.init_weights in ("pissa", "olora"):
        raise ValueError(f"PEFT adds the factors to the base of its model, from which {stage!r} has taken them away")
    if dora and target.n_experts:
        raise ValueError(_NO_DORA)
    axis = last_to_number(node.stage.axis) if isinstance(node.stage, WeightNorm) else target.out
    if not isinstance(axis, int) or axis % len(target.shape) != target.out:
        raise ValueError(f"PEFT has lengths of outputs, along axis {target.out}, but no equivalent of {node.stage!r}")
    parts = _expert_parts(target, stage.rank) if target.n_experts else _lora_parts(target, stage.rank, dora=dora)
    tensors = node.write(parts)
    dtype = next(iter(tensors.values())).dtype
    by_root = stage.use_rslora and stage.alpha is not None
    flags = {"by_root": by_root, "use_dora": dora, "lora_bias": False}
    return Written({name: x.astype(dtype) for name, x in tensors.items()}, _factor_of(stage), stage.rank, flags)


def _factor_of(lora: Any) -> float:
    """The factor of the difference."""
    if lora.alpha is None:
        return 1.0
    return known_number(lora.alpha) / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


def _configure_lora(modules: Mapping[str, Written]) -> dict[str, Any]:
    """The flags, of which PEFT has one each for all modules; alphas have ranks or their roots as divisors."""
    by_root = all(written.flags["by_root"] for written in modules.values())
    flags = {name: one_of_all(modules, name) for name in ("use_dora", "lora_bias")} | {"use_rslora": by_root}
    return flags | ranks_and_alphas("lora_alpha", modules, by_root=by_root)


LORA = Method(
    name="LORA",
    suffixes=(
        *("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
        *(BIAS, _TOKENS),
    ),
    settings={
        "rank": "r",
        "number": "lora_alpha lora_dropout",
        "ranks by pattern": "rank_pattern",
        "numbers by pattern": "alpha_pattern",
        "flag": "use_rslora use_dora fan_in_fan_out lora_bias",
        "names": "target_parameters",
        "indices by name": "trainable_token_indices",
        # These have no effect by themselves: other settings use them.
        "any": "loftq_config eva_config corda_config lora_ga_config megatron_core qalora_group_size runtime_config",
    },
    words={
        "bias": ("none", "all", "lora_only"),
        # The other starts change the base too, or keep a factor fixed.
        "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    },
    read=_read_lora,
    write=_write_lora,
    configure=_configure_lora,
    biases="lora_only",
    alpha="lora_alpha",
    defaults={"r": 8, "lora_alpha": 8},
    layouts=("kernel", "same", "conv1d", "embedding", "experts:kernel", "experts:same", "experts:conv1d"),
)
