"""The methods of PEFT that are chains of stages, a row each."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax._numerics.linalg import identity
from reparax._peft.chained import Chained, Part, column, inputs, swapped_part, transposed_part
from reparax._peft.method import Written, known_number
from reparax._peft.settings import INDICES, NUMBER, RANK, SEED, one_of
from reparax._peft.target import Target
from reparax.adapters import Coefficients, Delta, Gain, LoRA, Reflected, Rotated, Slices
from reparax.matrices import Blocks, Circulant, Kronecker, LowRank, Orthogonal
from reparax.norms import Sphere
from reparax.numbers import Scale
from reparax.sparse import Freeze

_TINY = 1e-5
"""What PEFT adds to the rank, by which it divides."""


def _inputs_and_outputs(target: Target) -> tuple[int, int]:
    """The numbers of inputs and outputs."""
    return target.shape[target.ins[0]], target.shape[target.out]


def _size_of_axis(shape: tuple[int, ...], axis: int) -> int:
    """The size of a tensor's axis."""
    if len(shape) <= axis or shape[axis] == 0:
        raise ValueError(f"expected a tensor of {axis + 1} or more axes that is not empty, got shape {shape}")
    return shape[axis]


ADALORA = Chained(
    "ADALORA",
    {"lora_A": inputs("@lora/a/@gain/w"), "lora_E": column("@lora/a/@gain/g"), "lora_B": transposed_part("@lora/b")},
    lambda target, shapes, config: (
        Gain(axis=-1, where="/.*@lora/a"),
        LoRA(r := _size_of_axis(shapes["lora_A"], 0), _alpha(config, r) * r / (r + _TINY), **target.sides),
    ),
    lambda target, made: {
        "init_r": (r := made["lora"].rank),
        "lora_alpha": round(known_number(made["lora"].alpha or r) / r * (r + _TINY), 9),
        "total_step": 1,
    },
    {"lora_alpha": NUMBER, "lora_dropout": NUMBER},
    silent="init_r target_r rank_pattern tinit tfinal deltaT beta1 beta2 total_step orth_reg_weight init_lora_weights "
    "loftq_config megatron_core qalora_group_size",
    defaults={"lora_alpha": 8},
)


def _alpha(config: Mapping[str, Any], rank: int) -> float:
    """The alpha of a configuration; the rank, if that is not positive."""
    return config["lora_alpha"] if config["lora_alpha"] > 0 else rank


BOFT = Chained(
    "BOFT",
    {
        "boft_R": Part("@gain/w/@rotated/r/@orthogonal/x", lambda _, x: -jnp.asarray(x)[0], lambda _, x: -x[None]),
        "boft_s": column("@gain/g"),
    },
    lambda target, shapes, config: (
        Orthogonal(stacked=0),
        Rotated(_size_of_axis(shapes["boft_R"], 1), **target.sides),
        Gain(axis=target.out),
    ),
    lambda target, made: {
        "boft_block_num": 0,
        "boft_block_size": _inputs_and_outputs(target)[0] // made["rotated"].blocks,
    },
    # With more factors, PEFT needs a kernel of its own for GPUs; without it, it reads one.
    {"boft_dropout": NUMBER, "boft_n_butterfly_factor": one_of((1,))},
    silent="boft_block_size boft_block_num",
    constants={"@gain/w/@rotated/r/@orthogonal/base": lambda _, x, config: identity(x)},
)

C3A = Chained(
    "C3A",
    {"c3a_kernel": swapped_part("@delta/x/@scale/x/@blocks/x/@circulant/x")},
    lambda target, shapes, config: (
        Circulant(stacked=(0, 1)),
        Blocks((_size_of_axis(shapes["c3a_kernel"], 1), _size_of_axis(shapes["c3a_kernel"], 0)), **target.sides),
        Scale(1 / _inputs_and_outputs(target)[0]),
        Delta(),
    ),
    lambda target, made: {"block_size": _inputs_and_outputs(target)[0] // made["blocks"].shape[0]},
    silent="block_size block_size_pattern",
)


def _of_directions(part: Part, axis: int) -> Part:
    """A factor of which only the directions of its vectors count, which PEFT divides by 1e-4 if they are shorter."""

    def read(target: Target, x: Any) -> Array:
        lengths = np.linalg.norm(x, axis=axis)
        if short := [length for length in lengths if 0 < length < 1e-4]:
            raise ValueError(f"expected vectors of zeros or of length at least 1e-4, got one of length {short[0]:.3g}")
        return part.read(target, x)

    return Part(part.place, read, part.write)


_U, _V = (f"@delta/x/@scale/x/@low_rank/{name}/@gain" for name in "uv")

DELORA = Chained(
    "DELORA",
    {
        "delora_A": _of_directions(inputs(f"{_U}/w/@sphere/v"), 1),
        "delora_B": _of_directions(transposed_part(f"{_V}/w/@sphere/v"), 0),
        "delora_lambda": Part(f"{_V}/g", lambda _, x: jnp.asarray(x).reshape(()), lambda _, x: x.reshape(1)),
        "delora_w_norm": Part(f"{_U}/g/@freeze/w"),
    },
    lambda target, shapes, config: (
        Freeze(where="/.*@low_rank/u/@gain/g"),
        Sphere(along=0, where="/.*@low_rank/u/@gain/w"),
        Sphere(along=1, where="/.*@low_rank/v/@gain/w"),
        Gain(axis=0, where="/.*@low_rank/u"),
        Gain(where="/.*@low_rank/v"),
        _low_rank_stage(target, r := _size_of_axis(shapes["delora_A"], 0)),
        Scale(1 / r),
        Delta(),
    ),
    lambda target, made: {"r": made["low_rank"].rank},
    {"module_dropout": NUMBER},
    silent="delora_lambda rank_pattern lambda_pattern",
)


def _first_of_shuffle(target: Target, like: Any, config: Mapping[str, Any]) -> Array:
    """The rows and columns that ``torch.randperm`` gives first: the start of a shuffle by the Mersenne twister."""
    (rows, columns), count = _inputs_and_outputs(target), like.shape[0]
    if rows * columns >= 2**32 // 20:
        raise ValueError(f"torch shuffles more than {2**32 // 20} numbers differently, got {rows * columns}")
    words = np.random.RandomState(config["random_loc_seed"]).randint(0, 2**32, count, np.uint32)
    entry_at: dict[int, int] = {}
    for i, word in enumerate(map(int, words)):
        j = i + word % (rows * columns - i)
        entry_at[i], entry_at[j] = entry_at.get(j, j), entry_at.get(i, i)
    outputs, of = np.divmod([entry_at[i] for i in range(count)], rows)
    return jnp.asarray(np.stack([of, outputs], axis=-1), jnp.int32)


FOURIERFT = Chained(
    "FOURIERFT",
    {"fourierft_spectrum": Part("@coefficients/x")},
    lambda target, shapes, config: (
        Coefficients(
            _size_of_axis(shapes["fourierft_spectrum"], 0), "fourier", scale=config["scaling"], **target.sides
        ),
    ),
    lambda target, made: {
        "n_frequency": made["coefficients"].count,
        "scaling": known_number(made["coefficients"].scale),
    },
    {"scaling": NUMBER, "random_loc_seed": SEED, "bias": one_of(("none", "all", "fourier_only"))},
    silent="n_frequency n_frequency_pattern",
    defaults={"scaling": 150.0, "random_loc_seed": 777},
    constants={"@coefficients/index": _first_of_shuffle},
    of_stage={"basis": "fourier"},
)

GRALORA = Chained(
    "GRALORA",
    {
        "gralora_A": Part(
            "@delta/x/@scale/x/@blocks/x/@low_rank/u",
            lambda _, x: jnp.asarray(x).reshape(*x.shape[:2], x.shape[0], -1).swapaxes(1, 2),
            lambda _, x: x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1),
        ),
        "gralora_B": Part(
            "@delta/x/@scale/x/@blocks/x/@low_rank/v",
            lambda _, x: jnp.asarray(x).reshape(x.shape[0], x.shape[0], -1, x.shape[2]).swapaxes(0, 1),
            lambda _, x: x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]),
        ),
    },
    lambda target, shapes, config: (
        LowRank(max(config["r"] // config["gralora_k"], 1), stacked=(0, 1)),
        Blocks((config["gralora_k"], config["gralora_k"]), **target.sides),
        Scale(config["alpha"] / config["r"]),
        Delta(),
    ),
    lambda target, made: {
        "gralora_k": (blocks := made["blocks"].shape[0]),
        "r": (r := made["low_rank"].rank * blocks),
        "alpha": round(known_number(made["scale"].factor) * r, 9),
    },
    {"r": RANK, "alpha": NUMBER, "gralora_k": RANK, "gralora_dropout": NUMBER},
    defaults={"r": 32, "alpha": 64, "gralora_k": 2},
)


def _low_rank_stage(target: Target, rank: int) -> LowRank:
    """The stage for a product of factors of this rank, with the rows and columns of the parameter."""
    return LowRank(rank, outside=target.outside(rank), **target.sides)


HIRA = Chained(
    "HIRA",
    {"hira_A": inputs("@delta/x/@low_rank/u"), "hira_B": transposed_part("@delta/x/@low_rank/v")},
    lambda target, shapes, config: (_low_rank_stage(target, _size_of_axis(shapes["hira_A"], 0)), Delta(relative=True)),
    lambda target, made: {"r": made["low_rank"].rank},
    {"hira_dropout": NUMBER},
    silent="rank_pattern",
    of_stage={"relative": True},
)

HRA = Chained(
    "HRA",
    {"hra_u": Part("@reflected/u")},
    lambda target, shapes, config: (Reflected(_size_of_axis(shapes["hra_u"], 1), **target.sides),),
    lambda target, made: {"r": made["reflected"].count},
)


def _count_repeats(target: Target, block: tuple[int, ...]) -> tuple[int, int]:
    """How often a block is repeated for inputs and for outputs."""
    sizes = _inputs_and_outputs(target)
    if len(block) != 2 or any(not part or size % part for size, part in zip(sizes, block, strict=True)):
        raise ValueError(f"Kronecker takes equal blocks, but PEFT has one of shape {block} for a matrix of {sizes}")
    return sizes[0] // block[0], sizes[1] // block[1]


MISS = Chained(
    "MISS",
    {"miss_block": Part("@delta/x/@kronecker/b")},
    lambda target, shapes, config: (
        Freeze(where="/.*@kronecker/a"),
        Kronecker(_count_repeats(target, shapes["miss_block"]), **target.sides),
        Delta(),
    ),
    lambda target, made: {
        "r": _inputs_and_outputs(target)[0] // made["kronecker"].shape[0],
        "mini_r": _inputs_and_outputs(target)[1] // columns if (columns := made["kronecker"].shape[1]) > 1 else 1,
        "init_weights": "mini" if columns > 1 else True,
    },
    {"miss_dropout": NUMBER, "init_weights": one_of((True, False, "mini"))},
    silent="mini_r",
    constants={"@delta/x/@kronecker/a/@freeze/w": lambda _, x, config: jnp.ones(x.shape, x.dtype)},
)


def _to_matrix_entries(target: Target, x: Any) -> Array:
    """Rows and columns of a weight (out, in) as those of its matrix (in, out)."""
    if ((x < 0) | (x >= np.array(_inputs_and_outputs(target)[::-1])[:, None])).any():
        raise ValueError(
            f"expected indices of a matrix of shape {_inputs_and_outputs(target)[::-1]} in shira_indices, got others"
        )
    return jnp.asarray(x, jnp.int32).T[:, ::-1]


SHIRA = Chained(
    "SHIRA",
    {
        "shira_weight": Part("@coefficients/x"),
        "shira_indices": Part("@coefficients/index", _to_matrix_entries, lambda _, x: x[:, ::-1].T),
    },
    lambda target, shapes, config: (Coefficients(_size_of_axis(shapes["shira_weight"], 0), **target.sides),),
    lambda target, made: {"r": made["coefficients"].count // sum(target.shape)},
    silent="mask_type random_seed",
    whole_numbers=("shira_indices",),
    of_stage={"basis": "entries"},
)


def _split_flat_entries(target: Target, x: Any) -> Array:
    """Places in a flat weight (out, in) as rows and columns of its matrix (in, out)."""
    ins, outs = _inputs_and_outputs(target)
    if ((x < 0) | (x >= ins * outs)).any():
        wrong_index = int(x.min() if (x < 0).any() else x.max())
        raise ValueError(f"expected indices from 0 to {ins * outs - 1} in supertuning_indices, got {wrong_index}")
    return jnp.asarray(np.stack([x % ins, x // ins], axis=-1), jnp.int32)


class _Supertuning(Chained):
    """The largest or the smallest entries of each matrix, a share of them that is one for all."""

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        counts = {module: written.flags["entries"] for module, written in modules.items()}
        least = max(count / size for count, size in counts.values())
        most = min((count + 1) / size for count, size in counts.values())
        if least >= most:
            text = ", ".join(f"{count} of {size} at {module!r}" for module, (count, size) in counts.items())
            raise ValueError(f"PEFT has one share of entries for all modules, but got {text}")
        return {"sparsity": 1 - (least + min(most, 1.0)) / 2, "save_precomputed_indices": True}


SUPERTUNING = _Supertuning(
    "SUPERTUNING",
    {
        "supertuning_values": Part("@coefficients/x"),
        "supertuning_indices": Part(
            "@coefficients/index",
            _split_flat_entries,
            lambda target, x: x[:, 1] * _inputs_and_outputs(target)[0] + x[:, 0],
        ),
    },
    lambda target, shapes, config: (Coefficients(_size_of_axis(shapes["supertuning_values"], 0), **target.sides),),
    lambda target, made: {"entries": (made["coefficients"].count, math.prod(target.shape))},
    {"r": one_of(())},  # which adds LoRA
    silent="sparsity select_top lora_alpha lora_dropout save_precomputed_indices",
    whole_numbers=("supertuning_indices",),
    of_stage={"basis": "entries"},
)


def of_entries(target: Target, stage: Any) -> Chained:
    """PEFT's method for so many entries: SHiRA if they are those of a rank."""
    return SUPERTUNING if stage.count % sum(target.shape) else SHIRA


def _token_axis(target: Target) -> int:
    """The axis of tokens: the inputs of a table, and the outputs of a head."""
    return target.ins[0] if target.table else target.out


def _swap_token_axis(target: Target, x: Any) -> Array:
    """Rows for tokens as slices of ours, or back."""
    return jnp.asarray(x) if _token_axis(target) == 0 else jnp.asarray(x).T


TOKENS = Chained(
    "TRAINABLE_TOKENS",
    {"trainable_tokens_delta": Part("@slices/x", _swap_token_axis, _swap_token_axis)},
    lambda target, shapes, config: (Slices(tuple(config["token_indices"]), axis=_token_axis(target)),),
    lambda target, made: {"token_indices": made["slices"].index},
    {"token_indices": INDICES},
    defaults={"token_indices": ()},
    layouts=("kernel", "same", "embedding"),
)

VERA = Chained(
    "VERA",
    {
        "vera_lambda_d": Part("@lora/a/@gain/g"),
        "vera_lambda_b": Part("@lora/b/@gain/g"),
        "vera_A": inputs("@lora/a/@gain/w/@freeze/w"),
        "vera_B": transposed_part("@lora/b/@gain/w/@freeze/w"),
    },
    lambda target, shapes, config: (
        Freeze(where="/@lora/[ab]/@gain/w"),
        Gain(axis=-1, where="/@lora/[ab]"),
        LoRA(_size_of_axis(shapes["vera_lambda_d"], 0), **target.sides),
    ),
    lambda target, made: {"r": made["lora"].rank, "save_projection": True, "projection_prng_key": 0},
    # Without the projection, the file lacks the factors.
    {"vera_dropout": NUMBER, "save_projection": one_of((True,))},
    silent="d_initial projection_prng_key",
    banks=("vera_A", "vera_B"),
)

ROWS = (ADALORA, BOFT, C3A, DELORA, FOURIERFT, GRALORA, HIRA, HRA, MISS, SHIRA, SUPERTUNING, TOKENS, VERA)
