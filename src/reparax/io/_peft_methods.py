"""The methods of PEFT: LoRA and its kin, products, gains, rotations and tokens; and all of them, by name and chain.

A new method is a row here, with the function that reads its tensors as stages and raw values, and the one that writes
these as tensors.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.axes import last_to_number
from reparax.io._peft_row import (
    Adapted,
    Method,
    Part,
    StageNode,
    StoredAdapter,
    Written,
    known_number,
    one_of_all,
    ranks_and_alphas,
    require_shapes,
)
from reparax.io._peft_target import Target
from reparax.numerics.linalg import identity, product
from reparax.stages.adapters import CayleyNeumann, Delta, Gain, Hadamard, LoRA, Rotated, TrainableSlices
from reparax.stages.matrices import Kronecker, LowRank, Orthogonal
from reparax.stages.norms import WeightNorm
from reparax.stages.numbers import Scale
from reparax.stages.sparse import Freeze

BIAS = "lora_B.bias"
_DELTA = "trainable_tokens_delta"
_TOKENS = f"token_adapter.{_DELTA}"
_NO_DORA = "PEFT has no DoRA of experts"


def _token_parts(target: Target, axis: int, count: int) -> dict[str, Part]:
    """The rows of tokens, which are slices along ``axis``."""
    as_rows = jnp.asarray if axis == 0 else jnp.transpose
    return {_DELTA: Part("@trainable_slices/x", (count, target.shape[1 - axis]), read=as_rows, write=as_rows)}


def _token_axis(target: Target) -> int:
    """The axis of tokens: the inputs of a table, and the outputs of a head."""
    return target.input_axes[0] if target.is_table else target.output_axis


def _read_tokens(stored: StoredAdapter) -> Adapted:
    """Trained slices of a table, or of a head."""
    target, index = stored.target, tuple(stored.config.get("token_indices", ()))
    axis = _token_axis(target)
    values = stored.values(_token_parts(target, axis, len(index)))
    if max(index, default=0) >= target.shape[axis]:
        raise ValueError(f"expected tokens below {target.shape[axis]}, got {max(index)}")
    return Adapted((TrainableSlices(index, axis=axis),), values)


def _write_tokens(node: StageNode) -> Written:
    """The rows of trained slices."""
    target = node.target
    stage: Any = node.stage
    axis = _token_axis(target)
    if not isinstance(stage.axis, int) or stage.axis % len(target.shape) != axis:
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


def _read_vera(stored: StoredAdapter) -> Adapted:
    """LoRA of fixed factors with gains."""
    target, tensors = stored.target, stored.tensors
    rank = np.size(tensors.get("vera_lambda_d", 0))
    parts = _vera_parts(target, rank)
    shares_of_banks = {
        name: x[tuple(map(slice, parts[name].shape))]
        for name, x in tensors.items()
        if name in VERA.banks and x.ndim == len(parts[name].shape)
    }
    values = replace(stored, tensors={**tensors, **shares_of_banks}).values(parts)
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
    words={"save_projection": (True,)},
    read=_read_vera,
    write=_write_vera,
    banks=("vera_A", "vera_B"),
    biases="vera_only",
    matrices=True,
)


def _lora_parts(target: Target, rank: int, *, is_dora: bool = False) -> dict[str, Part]:
    """The factors, and the lengths of DoRA."""
    outputs, ones = target.outputs, target.ones
    place = "@weight_norm/v/@lora" if is_dora else "@lora"
    a, b = ("lora_embedding_A", "lora_embedding_B") if target.is_table else ("lora_A.weight", "lora_B.weight")
    parts = {
        a: Part(f"{place}/a", target.inputs_shape(rank), target.read_inputs, target.write_inputs),
        b: Part(f"{place}/b", (outputs, rank, *ones), lambda x: x.reshape(outputs, rank).T, jnp.transpose),
    }
    if is_dora:
        lengths = [outputs if axis == target.output_axis else 1 for axis in range(len(target.shape))]
        shape = (1, outputs, *ones) if ones else (outputs,)
        parts["lora_magnitude_vector"] = Part("@weight_norm/g", shape, lambda g: g.reshape(lengths))
    return parts


def _expert_parts(target: Target, rank: int) -> dict[str, Part]:
    """Factors of all experts: ``lora_A`` has those of one after another, and ``lora_B`` has them alternate."""
    count, outputs = target.n_experts, target.expert().outputs
    inputs = math.prod(target.shape[1:]) // max(outputs, 1)
    a_shape, b_shape = (count * rank, inputs), (outputs, rank * count)
    return {
        "lora_A.weight": Part("@lora/a", a_shape, lambda x: x.reshape(count, rank, inputs).mT, jnp.matrix_transpose),
        "lora_B.weight": Part("@lora/b", b_shape, lambda x: x.reshape(outputs, rank, count).T, jnp.transpose),
    }


def _read_lora(stored: StoredAdapter) -> Adapted:
    """LoRA, with the lengths of DoRA; or what trains beside it: tokens, or the difference of a bias."""
    if _TOKENS in stored.tensors:
        return _read_tokens_beside(stored)
    target, config, rank = stored.target, stored.config, stored.rank
    is_dora, by_root = bool(config.get("use_dora")), bool(config.get("use_rslora"))
    if BIAS in stored.tensors:
        values = stored.values({BIAS: Part("@delta/x/@scale/x", target.shape)})
        return Adapted((Scale(stored.alpha / (math.sqrt(rank) if by_root else rank)), Delta()), values)
    lora = LoRA(rank, stored.alpha, use_rslora=by_root, **target.expert().sides)
    if target.n_experts:
        if is_dora:
            raise ValueError(_NO_DORA)
        return _read_expert_lora(stored, lora)
    values = stored.values(_lora_parts(target, rank, is_dora=is_dora))
    axis = -1 if target.output_axis == len(target.shape) - 1 else target.output_axis
    return Adapted((lora, WeightNorm(axis=axis, detach=True)) if is_dora else (lora,), values)


def _read_expert_lora(stored: StoredAdapter, lora: LoRA) -> Adapted:
    """LoRA of a stack of experts."""
    try:
        return Adapted((replace(lora, stacked=0),), stored.values(_expert_parts(stored.target, stored.rank)))
    except ValueError as error:
        raise ValueError(
            f"{error}. Correct its layout, or the order of `names` if they are another parameter's"
        ) from error


def _read_tokens_beside(stored: StoredAdapter) -> Adapted:
    """Tokens that train beside LoRA; their numbers may be given by table."""
    TOKENS.require_matrix(stored.target)
    indices = stored.config.get("trainable_token_indices") or {}
    by_table = indices if isinstance(indices, Mapping) else {"": indices}
    module = f".{stored.target.module}"
    tables = (table for table in by_table if not table or module.endswith(f".{table}"))
    config = {"token_indices": next((by_table[table] for table in tables), [])}
    return _read_tokens(replace(stored, tensors={_DELTA: stored.tensors[_TOKENS]}, config=config))


def _write_lora(node: StageNode) -> Written:
    """The factors, with the lengths of DoRA; or the difference of a bias."""
    if isinstance(node.stage, Delta):
        return Written({BIAS: node.at("@delta/x/@scale/x")}, known_number(node.at("@delta/x/@scale").stage.factor))
    target, is_dora = node.target, isinstance(node.stage, WeightNorm)
    lora: Any = node.at("@weight_norm/v/@lora").stage if is_dora else node.stage
    target.expert().require_rows(lora)
    if lora.init_weights in ("pissa", "olora"):
        raise ValueError(f"PEFT adds the factors to the base of its model, from which {lora!r} has taken them away")
    if isinstance(node.stage, WeightNorm):
        _require_dora(node.stage, target)
    parts = _expert_parts(target, lora.rank) if target.n_experts else _lora_parts(target, lora.rank, is_dora=is_dora)
    tensors = node.write(parts)
    dtype = next(iter(tensors.values())).dtype
    by_root = lora.use_rslora and lora.alpha is not None
    flags = {"by_root": by_root, "use_dora": is_dora, "lora_bias": False}
    return Written({name: x.astype(dtype) for name, x in tensors.items()}, _factor_of(lora), lora.rank, flags)


def _require_dora(stage: WeightNorm, target: Target) -> None:
    """Refuses lengths that PEFT's DoRA does not have: those of experts, or along another axis than the outputs."""
    if target.n_experts:
        raise ValueError(_NO_DORA)
    axis, output_axis = last_to_number(stage.axis), target.output_axis
    if not isinstance(axis, int) or axis % len(target.shape) != output_axis:
        raise ValueError(f"PEFT has lengths of outputs, along axis {output_axis}, but no equivalent of {stage!r}")


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
    # The other starts change the base too, or keep a factor fixed.
    words={"init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")},
    read=_read_lora,
    write=_write_lora,
    configure=_configure_lora,
    biases="lora_only",
    alpha="lora_alpha",
    defaults={"r": 8, "lora_alpha": 8},
    layouts=("kernel", "same", "conv1d", "embedding", "experts:kernel", "experts:same", "experts:conv1d"),
)


_PRODUCTS = {
    "rank": "r",
    "number": "alpha rank_dropout module_dropout",
    "ranks by pattern": "rank_pattern",
    "numbers by pattern": "alpha_pattern",
    "flag": "use_effective_conv2d",
    "any": "init_weights",
}
_SCALED = "@delta/x/@scale/x/"


def _place_and_factor(node: StageNode) -> tuple[str, float]:
    """Where the difference is below the array, without its scale, and the scale."""
    if isinstance(scale := node.maker("x"), Scale):
        return _SCALED, known_number(scale.factor)
    return "@delta/x/", 1.0


def _loha_parts(target: Target, rank: int, place: str = _SCALED) -> dict[str, Part]:
    """Two products of low rank; the factors of the inputs are matrices even for a convolution."""
    shape = target.inputs_shape(rank)
    parts: dict[str, Part] = {}
    for i, name in ((1, "x"), (2, "y")):
        factors = f"{place}@hadamard/{name}/@low_rank"
        parts[f"hada_w{i}_a"] = Part(f"{factors}/v", (target.outputs, rank), jnp.transpose, jnp.transpose)
        parts[f"hada_w{i}_b"] = Part(
            f"{factors}/u",
            (rank, math.prod(shape[1:])),
            lambda x: target.read_inputs(x.reshape(shape)),
            target.write_inputs,
        )
    return parts


def _read_loha(stored: StoredAdapter) -> Adapted:
    """An elementwise product of two low-rank differences."""
    target, rank = stored.target, stored.rank
    inputs = math.prod(target.shape) // max(target.outputs, 1)
    outside = "unchecked" if rank > min(target.outputs, inputs) else "nearest"  # PEFT's usual 8 on a narrow layer
    low = LowRank(rank, outside=outside, **target.sides)
    values = stored.values(_loha_parts(target, rank))
    return Adapted((low, Hadamard(), Scale(stored.alpha / rank), Delta()), values)


def _write_loha(node: StageNode) -> Written:
    """The four factors."""
    place, factor = _place_and_factor(node)
    stages: list[Any] = [node.at(f"{place}@hadamard/{name}/@low_rank").stage for name in "xy"]
    for stage in stages:
        node.target.require_rows(stage)
    if stages[0].rank != stages[1].rank:
        raise ValueError(f"PEFT has two products of one rank, but no equivalent of {stages[0]!r} and {stages[1]!r}")
    return Written(node.write(_loha_parts(node.target, stages[0].rank, place)), factor, stages[0].rank)


class _Factor(NamedTuple):
    """A factor of a Kronecker product: its shape in torch, and its rank if it is a product of low rank."""

    shape: tuple[int, ...]
    rank: int | None = None


_FACTORS = {"a": "lokr_w1", "b": "lokr_w2"}
"""The factors by our names, with the names of their tensors."""


def _lokr_parts(target: Target, factors: Mapping[str, _Factor], place: str = _SCALED) -> dict[str, Part]:
    """The tensors of two factors, which are given by our names."""
    parts: dict[str, Part] = {}
    for name, ((rows, columns), rank) in factors.items():
        tensor, path = _FACTORS[name], f"{place}@kronecker/{name}"
        if rank is None:
            parts[tensor] = Part(path, (rows, columns), target.flip, target.flip)
        else:
            u, v = "uv" if target.output_axis == 0 else "vu"
            parts[f"{tensor}_a"] = Part(f"{path}/@low_rank/{u}", (rows, rank), target.flip, target.flip)
            parts[f"{tensor}_b"] = Part(f"{path}/@low_rank/{v}", (rank, columns), target.flip, target.flip)
    return parts


def _read_lokr(stored: StoredAdapter) -> Adapted:
    """A Kronecker product of two factors, each a full or a low-rank matrix."""
    target, tensors = stored.target, stored.tensors
    if wrong := [x for x in tensors.values() if x.ndim != 2]:
        raise ValueError(f"expected matrices as factors, got one of shape {wrong[0].shape}")
    factors = {name: _stored_factor(stored, tensor) for name, tensor in _FACTORS.items()}
    values = stored.values(_lokr_parts(target, factors))
    first, second = (target.flip(factor.shape) for factor in factors.values())
    shape = (first[0] * second[0], first[1] * second[1])
    if shape != target.shape:
        raise ValueError(f"expected a Kronecker product of shape {target.shape}, got {shape}")
    names_of_low_rank = [name for name, factor in factors.items() if factor.rank is not None]
    low_rank = [LowRank(stored.rank, where=f"/.*@kronecker/{name}") for name in names_of_low_rank]
    return Adapted((*low_rank, Kronecker(first), Scale(stored.alpha / stored.rank), Delta()), values)


def _stored_factor(stored: StoredAdapter, tensor: str) -> _Factor:
    """The factor that a file holds as one tensor, or as two."""
    if tensor in stored.tensors:
        return _Factor(stored.tensors[tensor].shape)
    left, right = (stored.tensors.get(f"{tensor}_{end}", np.empty((0, 0))) for end in "ab")
    return _Factor((left.shape[0], right.shape[1]), stored.rank)


def _write_lokr(node: StageNode) -> Written:
    """The factors, of which the sizes and ranks tell PEFT's settings."""
    place, scale = _place_and_factor(node)
    kronecker = node.at(f"{place}@kronecker")
    factors = {name: _factor_at(kronecker, name) for name in _FACTORS}
    shapes = tuple(factor.shape for factor in factors.values())
    ranks = [factor.rank for factor in factors.values() if factor.rank is not None]
    low_rank_sizes = [max(factor.shape) for factor in factors.values() if factor.rank is not None]
    full_rank = math.ceil(max(*shapes[0], *shapes[1]) / 2)  # from this rank on, PEFT stores full factors
    rank = ranks[0] if ranks else full_rank
    if len({*ranks}) > 1 or any(rank >= size / 2 for size in low_rank_sizes):
        raise ValueError(
            f"PEFT has low-rank factors of one rank, below half of the larger size, but got ranks "
            f"{ranks} for factors of shapes {[*shapes]}"
        )
    flags = {"products": tuple(factor.rank is not None for factor in factors.values()), "sizes": shapes}
    return Written(node.write(_lokr_parts(node.target, factors, place)), scale, rank, flags)


def _factor_at(kronecker: StageNode, name: str) -> _Factor:
    """A factor of a chain, which one array holds, or the two arrays of a stage of low rank."""
    place, flip = f"@kronecker/{name}", kronecker.target.flip
    if not kronecker.maker(name):
        return _Factor(flip(kronecker.at(place).shape))
    u, v = (kronecker.at(f"{place}/@low_rank/{end}") for end in "uv")
    return _Factor(flip((u.shape[0], v.shape[1])), u.shape[1])


def _configure_lokr(modules: Mapping[str, Written]) -> dict[str, Any]:
    """Ranks and alphas, and the settings with which PEFT chooses the sizes and ranks of factors."""
    decomposes_both = any(written.flags["products"][0] for written in modules.values())
    for module, written in modules.items():
        first_may_be_low, second_is_low = ((written.rank or 1) < max(size) / 2 for size in written.flags["sizes"])
        if (decomposes_both and first_may_be_low, second_is_low) != written.flags["products"]:
            raise ValueError(
                f"PEFT has a low-rank second factor, or two low-rank factors, if the rank is below half of the "
                f"larger size, but {module!r} differs"
            )
    sizes = {module: written.flags["sizes"] for module, written in modules.items()}
    largest = max(size for first, _ in sizes.values() for size in first)
    pairs = [pair for first, second in sizes.values() for pair in zip(first, second, strict=True)]
    for factor in (-1, *range(1, largest + 1)):
        if all(_split_size(first * second, factor) == (first, second) for first, second in pairs):
            flags = {"decompose_both": decomposes_both, "decompose_factor": factor}
            return flags | ranks_and_alphas("alpha", modules)
    raise ValueError(f"PEFT chooses the sizes of factors with one decompose_factor, but got {sizes}")


def _split_size(size: int, factor: int) -> tuple[int, int]:
    """Two factors of ``size``, chosen like PEFT: the first is ``factor``, or both are as close as possible."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = size if factor == -1 else factor
    first = max(m for m in range(1, math.isqrt(size) + 1) if size % m == 0 and m <= most)
    return first, size // first


def _ia3_parts(target: Target, axis: int, *, inputs: bool) -> dict[str, Part]:
    """The factors along an axis: columns of numbers for outputs, rows for inputs and for all of a convolution."""
    size = target.shape[axis]
    return {"ia3_l": Part("@gain/g", (1, size, *target.ones) if inputs or target.ones else (size, 1), jnp.ravel)}


def _input_axis(target: Target) -> int:
    """The axis of the inputs that IA3 multiplies: torch's second axis."""
    return target.input_axes[-1] if target.output_axis == len(target.shape) - 1 else target.input_axes[0]


def _read_ia3(stored: StoredAdapter) -> Adapted:
    """Factors on outputs, including the bias, or on inputs."""
    target = stored.target
    inputs = selects_module(target.module, stored.config.get("feedforward_modules") or [])
    axis = _input_axis(target) if inputs else target.output_axis
    return Adapted((Gain(axis=axis),), stored.values(_ia3_parts(target, axis, inputs=inputs)))


def _write_ia3(node: StageNode) -> Written:
    """The factors."""
    target, gain = node.target, node.stage
    axis = gain.axis % len(target.shape) if isinstance(gain, Gain) and isinstance(gain.axis, int) else None
    if axis not in (_input_axis(target), target.output_axis):
        raise ValueError(f"PEFT has factors on inputs or on outputs, but no equivalent of {gain!r}")
    inputs = axis != target.output_axis
    return Written(node.write(_ia3_parts(target, axis, inputs=inputs)), flags={"inputs": inputs})


def _configure_ia3(modules: Mapping[str, Written]) -> dict[str, Any]:
    """The modules with factors on inputs: by names, or by an expression where suffixes of names are not clear."""
    inputs = sorted(module for module, written in modules.items() if written.flags["inputs"])
    clear = all(written.flags["inputs"] == selects_module(module, inputs) for module, written in modules.items())
    return {"feedforward_modules": inputs if clear else "|".join(map(re.escape, inputs))}


def selects_module(module: str, names: Any) -> bool:
    """Whether a list of names, or a regular expression, selects a module by PEFT's rules."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module.endswith(name) for name in names)


def _read_oft(stored: StoredAdapter) -> Adapted:
    """Rotations of the inputs, block by block."""
    target, config = stored.target, stored.config
    rows, is_shared = target.shape[target.input_axes[0]], bool(config.get("block_share"))
    free = stored.tensors["oft_R.weight"]
    if free.ndim != 2:
        raise ValueError(f"expected oft_R.weight with two axes, got shape {free.shape}")
    size = (1 + math.isqrt(1 + 8 * free.shape[-1])) // 2 if is_shared else rows // max(free.shape[0], 1)
    blocks = rows // max(size, 1)
    require_shapes(stored.tensors, {"oft_R.weight": (1 if is_shared else blocks, size * (size - 1) // 2)})
    if config.get("coft"):
        free = _shrink_into_ball(free, config["eps"] / math.sqrt(free.shape[0]))
    rotated = Rotated(blocks, block_share=is_shared, **target.sides)
    if config.get("use_cayley_neumann"):
        terms = config["num_cayley_neumann_terms"]
        if terms < 3:
            raise ValueError(f"CayleyNeumann is read from 3 terms on, got num_cayley_neumann_terms={terms}")
        series = CayleyNeumann(max(terms - 1, 3), stacked=0)  # PEFT has a third power for 3 terms too
        return Adapted((series, rotated), {"@rotated/r/@cayley_neumann/x": jnp.asarray(free)})
    upper = np.zeros((*free.shape[:1], size, size), free.dtype)
    upper[:, *np.triu_indices(size, 1)] = free
    return Adapted((Orthogonal(stacked=0), rotated), {"@rotated/r/@orthogonal/x": jnp.asarray(-2 * upper)})


def _shrink_into_ball(x: np.ndarray, radius: float) -> np.ndarray:
    """The numbers of each block, scaled into a ball around zero, as PEFT does before each use."""
    lengths = np.sqrt(2 * np.sum(np.square(x, dtype=np.float64), axis=1, keepdims=True))
    return (x * np.where(lengths <= radius, 1.0, radius / np.maximum(lengths, radius))).astype(x.dtype)


def _write_oft(node: StageNode) -> Written:
    """The free numbers of the rotations."""
    target = node.target
    rotated: Any = node.stage
    target.require_rows(rotated)
    is_series = isinstance(node.maker("r"), CayleyNeumann)
    inside = node.at(f"@rotated/r/@{'cayley_neumann' if is_series else 'orthogonal'}")
    stage = inside.stage
    x, base = (inside.at(f"@{stage.kind}/{name}") for name in ("x", "base"))
    has_identity = jnp.array_equal(base, identity(base))
    if is_series and (stage.degree < 3 or not has_identity):
        raise ValueError(f"PEFT has series of degree 3 or more around the identity, but no equivalent of {stage!r}")
    flags = {"oft_block_size": target.shape[target.input_axes[0]] // rotated.num_blocks, "r": rotated.num_blocks}
    flags |= {"block_share": rotated.block_share, "use_cayley_neumann": is_series}
    flags |= {"num_cayley_neumann_terms": stage.degree + 1 if is_series else 5}
    numbers = x if is_series else _skew_numbers(stage, x, None if has_identity else base)
    return Written({"oft_R.weight": numbers}, flags=flags)


def _skew_numbers(stage: Any, x: Array, base: Array | None) -> Array:
    """The numbers above the diagonals of skew-symmetric matrices of rotations, by the inverse Cayley map."""
    if stage.map != "cayley":
        raise ValueError(f"PEFT has rotations by the Cayley map, but no equivalent of {stage!r}")
    skew, size = (x.mT - x) / 2, x.shape[-1]
    if base is not None:
        stage_for_one = replace(stage, stacked=())
        eye = jnp.eye(size, dtype=x.dtype)
        rotations = jnp.stack([stage_for_one.apply_leaf({"x": a, "base": b}) for a, b in zip(x, base, strict=True)])
        skew = product(eye[None] - rotations, jnp.linalg.inv(eye[None] + rotations))
    return skew[:, *np.triu_indices(size, 1)]


def _configure_oft(modules: Mapping[str, Written]) -> dict[str, Any]:
    """One size of blocks for all modules, or else one number of them."""
    common_names = ("block_share", "use_cayley_neumann", "num_cayley_neumann_terms")
    config = {"r": 0, "oft_block_size": 0} | {name: one_of_all(modules, name) for name in common_names}
    size = "oft_block_size" if len({written.flags["oft_block_size"] for written in modules.values()}) == 1 else "r"
    return config | {size: one_of_all(modules, size)}


LOHA = Method(
    name="LOHA",
    suffixes=("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    settings=_PRODUCTS,
    read=_read_loha,
    write=_write_loha,
    configure=lambda modules: ranks_and_alphas("alpha", modules),
    alpha="alpha",
    defaults={"r": 8, "alpha": 8},
)
LOKR = Method(
    name="LOKR",
    suffixes=("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    settings=_PRODUCTS
    | {
        "flag": "use_effective_conv2d rank_dropout_scale decompose_both",
        "number": "alpha rank_dropout module_dropout decompose_factor",
    },
    read=_read_lokr,
    write=_write_lokr,
    configure=_configure_lokr,
    alpha="alpha",
    defaults={"r": 8, "alpha": 8},
    matrices=True,
)
IA3 = Method(
    name="IA3",
    suffixes=("ia3_l",),
    settings={"flag": "fan_in_fan_out", "pattern": "feedforward_modules", "any": "init_ia3_weights"},
    read=_read_ia3,
    write=_write_ia3,
    configure=_configure_ia3,
    layouts=("kernel", "same", "conv1d"),
)
OFT = Method(
    name="OFT",
    suffixes=("oft_R.weight",),
    settings={
        "flag": "fan_in_fan_out use_cayley_neumann block_share coft",
        "number": "module_dropout eps",
        "terms": "num_cayley_neumann_terms",
        "any": "r oft_block_size init_weights",  # the shape of the tensor tells the sizes
    },
    read=_read_oft,
    write=_write_oft,
    configure=_configure_oft,
    biases="oft_only",
    defaults={"num_cayley_neumann_terms": 5, "eps": 6e-5},
    matrices=True,
)
METHODS: Mapping[str, Method] = {method.name: method for method in (LORA, LOHA, LOKR, IA3, OFT, TOKENS, VERA)}


def method_of(node: StageNode) -> Method:
    """The method whose chain made a parameter."""
    match node.stage:
        case LoRA() if isinstance(node.maker("a"), Gain):
            return VERA
        case LoRA() | WeightNorm(detach=True):
            return LORA
        case Gain():
            return IA3
        case Rotated():
            return OFT
        case TrainableSlices():
            return TOKENS
        case Delta() if isinstance(_maker_of_difference(node), Kronecker):
            return LOKR
        case Delta() if isinstance(_maker_of_difference(node), Hadamard):
            return LOHA
        case Delta() if isinstance(_maker_of_difference(node), Scale) and len(node.target.shape) == 1:  # of a bias
            return LORA
        case _:
            raise ValueError(f"PEFT has no equivalent of {node.stage!r}")


def _maker_of_difference(node: StageNode) -> Any:
    """The stage that makes a difference before it is scaled; of one whose numbers train, its scale, or None."""
    maker = node.maker("x")
    return node.values["x"].maker("x") or maker if isinstance(maker, Scale) else maker
