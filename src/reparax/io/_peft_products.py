"""LoHa and LoKr: differences that are products of matrices."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.chain import Parametrization
from reparax.io._peft_method import (
    ANY,
    FLAG,
    NUMBER,
    RANK,
    Adapted,
    Method,
    Setting,
    StageNode,
    Tensors,
    Values,
    Written,
    by_pattern,
    ranks_and_alphas,
    require,
    require_matrix,
    split_scale,
)
from reparax.io._peft_target import Target
from reparax.stages.adapters import Delta, Hadamard
from reparax.stages.matrices import Kronecker, LowRank
from reparax.stages.numbers import Scale

_SETTINGS: Mapping[str, Setting] = {
    "r": RANK,
    "alpha": NUMBER,
    "rank_pattern": by_pattern(RANK),
    "alpha_pattern": by_pattern(NUMBER),
    "use_effective_conv2d": FLAG,
    "init_weights": ANY,
    "rank_dropout": NUMBER,
    "module_dropout": NUMBER,
}
_DEFAULTS: Mapping[str, Any] = {"r": 8, "alpha": 8}


class LoHaMethod(Method):
    """An elementwise product of two low-rank differences."""

    name = "LOHA"
    alpha = "alpha"
    suffixes = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
    settings: Mapping[str, Setting] = _SETTINGS
    defaults = _DEFAULTS

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
            u, v = low.require_array("u"), low.require_array("v")
            ranks.append(u.shape[-1])
            tensors |= {f"hada_w{i}_a": v.T, f"hada_w{i}_b": target.write_inputs(u).reshape(u.shape[-1], -1)}
        return Written(tensors, factor, ranks[0])


class LoKrMethod(Method):
    """A Kronecker product of two factors, each a full or a low-rank matrix."""

    name = "LOKR"
    alpha = "alpha"
    suffixes = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
    settings: Mapping[str, Setting] = {
        **_SETTINGS,
        "rank_dropout_scale": FLAG,
        "decompose_both": FLAG,
        "decompose_factor": NUMBER,
    }
    defaults = _DEFAULTS

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        require_matrix(self, target)
        place = "@delta/x/@scale/x/@kronecker"
        low: list[Parametrization] = []
        values: Values = {}
        shapes: dict[str, tuple[int, int]] = {}
        for name, tensor_name in (("a", "lokr_w1"), ("b", "lokr_w2")):
            if tensor_name in tensors:
                shapes[tensor_name] = _require_matrix(tensors[tensor_name])
                values[f"{place}/{name}"] = target.flip(jnp.asarray(tensors[tensor_name]))
                continue
            ends = (f"{tensor_name}_a", f"{tensor_name}_b")
            sizes = [_require_matrix(tensors[end]) if end in tensors else (0, 0) for end in ends]
            shapes |= dict(zip(ends, ((sizes[0][0], rank), (rank, sizes[1][1])), strict=True))
            require({end: x for end, x in tensors.items() if end in ends}, {end: shapes[end] for end in ends})
            lhs, rhs = (jnp.asarray(tensors[end]) for end in (ends if target.out == 0 else reversed(ends)))
            factors = (lhs, rhs) if target.out == 0 else (lhs.T, rhs.T)
            low.append(LowRank(rank, where=f"/.*@kronecker/{name}"))
            values |= {f"{place}/{name}/@low_rank/{end}": x for end, x in zip("uv", factors, strict=True)}
        require(tensors, shapes)
        factor_shapes = [
            values[f"{place}/{x}"].shape if f"{place}/{x}" in values else _product_shape(values, place, x) for x in "ab"
        ]
        product_shape = (factor_shapes[0][0] * factor_shapes[1][0], factor_shapes[0][1] * factor_shapes[1][1])
        if product_shape != target.shape:
            raise ValueError(f"expected a Kronecker product of shape {target.shape}, got {product_shape}")
        return Adapted((*low, Kronecker(factor_shapes[0]), Scale(alpha / rank), Delta()), values)

    def write(self, target: Target, node: StageNode) -> Written:
        kronecker, factor = split_scale(node)
        tensors: dict[str, Array] = {}
        ranks: list[int] = []
        sizes: list[tuple[int, ...]] = []
        for name, tensor_name in (("a", "lokr_w1"), ("b", "lokr_w2")):
            factor_node = kronecker.values[name]
            if not isinstance(factor_node, StageNode):
                tensors[tensor_name] = target.flip(factor_node)
                sizes.append(tensors[tensor_name].shape)
                continue
            low = kronecker.require_stage_on(name, LowRank)
            u, v = low.require_array("u"), low.require_array("v")
            lhs, rhs = (u, v) if target.out == 0 else (v.T, u.T)
            tensors |= {f"{tensor_name}_a": lhs, f"{tensor_name}_b": rhs}
            sizes.append((lhs.shape[0], rhs.shape[1]))
            ranks.append(u.shape[-1])
        products = ("lokr_w1_a" in tensors, "lokr_w2_a" in tensors)
        full_rank = math.ceil(max(*sizes[0], *sizes[1]) / 2)  # from this rank on, PEFT stores full factors
        rank = ranks[0] if ranks else full_rank
        if len(set(ranks)) > 1 or any(rank >= max(size) / 2 for size, low in zip(sizes, products, strict=True) if low):
            raise ValueError(
                f"PEFT has low-rank factors of one rank, below half of the larger size, but got ranks {ranks} for "
                f"factors of shapes {sizes}"
            )
        return Written(tensors, factor, rank, {"products": products, "sizes": tuple(sizes)})

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        ranks = {module: written.rank or 1 for module, written in modules.items()}
        decomposes_both = any(written.flags["products"][0] for written in modules.values())
        for module, written in modules.items():
            first_is_low, second_is_low = (ranks[module] < max(size) / 2 for size in written.flags["sizes"])
            if (decomposes_both and first_is_low, second_is_low) != written.flags["products"]:
                raise ValueError(
                    f"PEFT has a low-rank second factor, or two low-rank factors, if the rank is below half of the "
                    f"larger size, but {module!r} differs"
                )
        flags = {"decompose_both": decomposes_both, "decompose_factor": _common_factor(modules)}
        return flags | ranks_and_alphas(self, modules)


def _output_shape(target: Target, rank: int) -> tuple[int, int]:
    """The shape of a factor of the outputs."""
    return target.shape[target.out], rank


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A shape as that of a matrix: its first axis, and all others."""
    return shape[0], math.prod(shape[1:])


def _require_matrix(x: np.ndarray) -> tuple[int, int]:
    """The shape of a factor; raises an error if it is no matrix."""
    if x.ndim != 2:
        raise ValueError(f"expected matrices as factors, got one of shape {x.shape}")
    return x.shape


def _product_shape(values: Values, place: str, name: str) -> tuple[int, int]:
    """The shape of a factor that is a product of two."""
    u, v = (values[f"{place}/{name}/@low_rank/{end}"] for end in "uv")
    return u.shape[0], v.shape[1]


def _common_factor(modules: Mapping[str, Written]) -> int:
    """The ``decompose_factor`` with which PEFT chooses these sizes of factors."""
    sizes = {module: written.flags["sizes"] for module, written in modules.items()}
    largest = max(size for pair_of_sizes in sizes.values() for size in pair_of_sizes[0])
    for factor in (-1, *range(1, largest + 1)):
        pairs = (pair for pair_of_sizes in sizes.values() for pair in zip(*pair_of_sizes, strict=True))
        if all(_split_size(rows * columns, factor) == (rows, columns) for rows, columns in pairs):
            return factor
    raise ValueError(f"PEFT chooses the sizes of factors with one decompose_factor, but got {sizes}")


def _split_size(size: int, factor: int) -> tuple[int, int]:
    """Two factors of ``size``, chosen like PEFT: the first is ``factor``, or both are as close as possible."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = size if factor == -1 else factor
    smaller = [m for m in range(1, math.isqrt(size) + 1) if size % m == 0 and m <= most]
    return max(smaller), size // max(smaller)
