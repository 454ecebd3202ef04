"""The adapter of one array: its tensors as stages and raw values, and these as tensors.

There are four: LoRA, with DoRA's lengths; the difference of a bias beside it; tokens; and the gains of IA3. What each
holds is a dict of parts, by which it is read and written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.axes import last_to_number, list_axes
from reparax.core.chain import Parametrization
from reparax.core.paths import Names
from reparax.core.plan import Plan
from reparax.core.roles import one_or_tuple
from reparax.io._parameters import require_known, unstack_stage
from reparax.io._peft_config import BIAS, DELTA, METHODS, TOKENS, by_pattern, is_fed_forward, token_indices
from reparax.io._peft_target import Target
from reparax.stages.adapters import Delta, Gain, LoRA, TrainableSlices
from reparax.stages.norms import WeightNorm
from reparax.stages.numbers import Scale

_NO_DORA = "PEFT has no DoRA of experts"


class Part(NamedTuple):
    """A tensor of PEFT as a raw value.

    Attributes:
      place: Where the raw value is below the parameter: ``@lora/a``.
      shape: The shape of the tensor.
      read: Makes the raw value of the tensor.
      write: Makes the tensor of the raw value, but for its shape.
    """

    place: str
    shape: tuple[int, ...]
    read: Callable[[Array], Array] = jnp.asarray
    write: Callable[[Array], Array] = jnp.asarray


class Adapted(NamedTuple):
    """The stages on one array, in the order of a chain, and the raw values that PEFT stores, by their places below."""

    stages: tuple[Parametrization, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """What a file says of one adapted array.

    Attributes:
      target: The array.
      tensors: The tensors of its module, by the ends of their names.
      config: The configuration.
    """

    target: Target
    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, Any]

    def values(self, parts: Mapping[str, Part]) -> dict[str, Array]:
        """The raw values of the tensors; raises an error if one is missing, unexpected or of another shape."""
        require_shapes(self.tensors, {name: part.shape for name, part in parts.items()})
        return {part.place: part.read(jnp.asarray(self.tensors[name])) for name, part in parts.items()}


@dataclass(frozen=True)
class Made:
    """An array, or a value of another one, and the stage of a chain that makes it.

    Attributes:
      plan: What the chain does.
      place: The key path of the array.
      target: The parameter, which may be one of a stack, whereas raw values are those of the whole stack.
    """

    plan: Plan
    place: Names
    target: Target

    @property
    def maker(self) -> Any:
        """The stage that makes it; None if it is an array of the raw tree."""
        return self.plan.producers.get(self.place, (None,))[0]

    @property
    def stage(self) -> Any:
        """The stage that makes it, as it acts on one array of a stack; refuses one that acts on a stack of its own."""
        stage = unstack_stage(self.maker, len(self.target.index))
        stacked = list_axes(getattr(stage, "stacked", ()))
        if self.target.n_experts and stacked != (0,):
            raise ValueError(
                f"PEFT has one adapter for each expert, but {self.maker!r} acts on all together. Give it `stacked`, "
                f"with the axis of experts"
            )
        if stacked and not self.target.n_experts:
            raise ValueError(
                f"PEFT has one adapter for each layer, but {self.maker!r} acts on a stack. Give the layers names with "
                f"{{i}} by `names`, such as 'layers.{{i}}.weight'"
            )
        return unstack_stage(stage, len(stacked))

    def value(self, name: str) -> "Made":
        """A value of the stage."""
        return replace(self, place=self.plan.producers[self.place][1][name])

    def other_stages(self, name: str) -> ValueError:
        """The error for a value that other stages make than those of an adapter."""
        return ValueError(f"an adapter is written without other stages on the {name!r} of {self.maker!r}")

    def array(self, place: str) -> Array:
        """The array of the raw tree at a place such as ``@gain/g``."""
        _, name, *below = place.split("/", 2)
        value = self.value(name)
        if (value.maker and f"@{value.maker.kind}") != (below[0].partition("/")[0] if below else None):
            raise self.other_stages(name)
        return value.array(below[0]) if below else self.target.part(self.plan.raw.arrays[value.place])

    def write(self, parts: Mapping[str, Part]) -> dict[str, Array]:
        """The tensors of the raw values."""
        return {name: part.write(self.array(part.place)).reshape(part.shape) for name, part in parts.items()}


@dataclass(frozen=True)
class Written:
    """The PEFT form of one array.

    Attributes:
      tensors: The tensors of the module.
      settings: What the configuration says of it: those of LoRA must be equal for all modules.
      rank: The rank, if the method has one.
      factor: The factor of the difference, if the method has one.
    """

    tensors: Mapping[str, Array]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rank: int = 1
    factor: float = 1.0


def read_adapter(stored: Stored) -> Adapted:
    """The stages and raw values of an array, from its tensors."""
    method = stored.config["peft_type"]
    _require_layout(method, stored.target)
    if method == "IA3":
        return _read_gains(stored)
    if method == "TRAINABLE_TOKENS":
        return _read_tokens(stored, DELTA, stored.config.get("token_indices", ()))
    if TOKENS in stored.tensors:
        return _read_tokens(stored, TOKENS, token_indices(stored.config, stored.target.module))
    return _read_bias(stored) if BIAS in stored.tensors else _read_lora(stored)


def write_adapter(made: Made) -> tuple[str, Written]:
    """The method that adapts an array, and what PEFT stores of it."""
    match made.stage:
        case LoRA():
            method, write = "LORA", _write_lora
        case WeightNorm(detach=True) if isinstance(made.value("v").maker, LoRA):
            method, write = "LORA", _write_lora
        case Delta() if len(made.target.shape) == 1 and isinstance(made.value("x").maker, Scale):
            method, write = "LORA", _write_bias
        case TrainableSlices():
            method, write = "TRAINABLE_TOKENS", _write_tokens
        case Gain():
            method, write = "IA3", _write_gains
        case stage:
            raise ValueError(f"LoRA, DoRA, IA3 and tokens are written, but not {stage!r}")
    _require_layout(method, made.target)
    return method, write(made)


def _require_layout(method: str, target: Target) -> None:
    """Refuses a weight whose layout is not known, or of which no adapters of the method are read and written."""
    require_known([target])
    layouts = METHODS[method].layouts
    if target.layout not in layouts:
        *most, last = map(repr, layouts)
        raise ValueError(
            f"{method} is read and written for weights of the layouts {', '.join(most)} and {last}, but this has "
            f"{target.layout!r}"
        )
    if target.heads and method != "LORA":
        raise ValueError(f"LoRA and DoRA are read and written for kernels of attention, but not {method}")
    if target.n_experts == 1 and target.expert().layout == "conv1d":
        raise ValueError("PEFT 0.21 transposes the update of a stack (experts, in, out) of one expert")


def _lora_parts(target: Target, rank: int, *, is_dora: bool = False) -> dict[str, Part]:
    """The factors, and the lengths of DoRA; those of experts lie one after another in A, and alternate in B."""
    outputs, ones = target.expert().outputs, target.ones
    if count := target.n_experts:
        inputs = math.prod(target.shape[1:]) // max(outputs, 1)
        a, b = (count, rank, inputs), (outputs, rank, count)
        return {
            "lora_A.weight": Part("@lora/a", (count * rank, inputs), lambda x: x.reshape(a).mT, jnp.matrix_transpose),
            "lora_B.weight": Part("@lora/b", (outputs, rank * count), lambda x: x.reshape(b).T, jnp.transpose),
        }
    place, as_matrix = "@weight_norm/v/@lora" if is_dora else "@lora", (outputs, rank)
    a, b = ("lora_embedding_A", "lora_embedding_B") if target.is_table else ("lora_A.weight", "lora_B.weight")
    parts = {
        a: Part(f"{place}/a", target.inputs_shape(rank), target.read_inputs, target.write_inputs),
        b: Part(f"{place}/b", (*as_matrix, *ones), lambda x: x.reshape(as_matrix).T, lambda x: x.reshape(rank, -1).T),
    }
    if is_dora:
        lengths = [outputs if axis == target.output_axis else 1 for axis in range(len(target.shape))]
        shape = (1, outputs, *ones) if ones else (outputs,)
        parts["lora_magnitude_vector"] = Part("@weight_norm/g", shape, lambda g: g.reshape(lengths))
    return parts


def _read_lora(stored: Stored) -> Adapted:
    """LoRA, with the lengths of DoRA."""
    target, (rank, alpha) = stored.target, _rank_and_alpha(stored)
    is_dora = bool(stored.config.get("use_dora"))
    if is_dora and target.n_experts:
        raise ValueError(_NO_DORA)
    stacked = 0 if target.n_experts else ()
    how: dict[str, Any] = target.expert().sides | {"use_rslora": bool(stored.config.get("use_rslora"))}
    lora = LoRA(rank, alpha, stacked=stacked, **how)
    try:
        values = stored.values(_lora_parts(target, rank, is_dora=is_dora))
    except ValueError as error:
        if not target.n_experts:
            raise
        raise ValueError(
            f"{error}. Correct its layout, or the order of `names` if they are another parameter's"
        ) from error
    _, outputs = target.sides_of_array
    is_last = outputs == (len(target.heads or target.shape) - 1,)
    axis = -1 if is_last else one_or_tuple(outputs)
    return Adapted((lora, WeightNorm(axis=axis, detach=True)) if is_dora else (lora,), values)


def _rank_and_alpha(stored: Stored) -> tuple[int, float]:
    """The rank and the alpha of LoRA for a module."""
    config, owner = stored.config, stored.target.owner
    return by_pattern(config, "rank_pattern", owner, "r"), float(
        by_pattern(config, "alpha_pattern", owner, "lora_alpha")
    )


def _write_lora(made: Made) -> Written:
    """The factors, with the lengths of DoRA."""
    target, is_dora = made.target, isinstance(made.maker, WeightNorm)
    lora = (made.value("v") if is_dora else made).stage
    target.expert().require_rows(lora)
    if lora.init_weights in ("pissa", "olora"):
        raise ValueError(f"PEFT adds the factors to the base of its model, from which {lora!r} has taken them away")
    if is_dora:
        _require_dora(made.stage, target)
    tensors = made.write(_lora_parts(target, lora.rank, is_dora=is_dora))
    dtype = next(iter(tensors.values())).dtype
    divisor = math.sqrt(lora.rank) if lora.use_rslora else lora.rank
    factor = 1.0 if lora.alpha is None else known_number(lora.alpha) / divisor
    settings = {"use_rslora": lora.use_rslora and lora.alpha is not None, "use_dora": is_dora, "lora_bias": False}
    return Written({name: x.astype(dtype) for name, x in tensors.items()}, settings, lora.rank, factor)


def _require_dora(stage: WeightNorm, target: Target) -> None:
    """Refuses lengths that PEFT's DoRA does not have: those of experts, or along another axis than the outputs."""
    if target.n_experts:
        raise ValueError(_NO_DORA)
    axis, (_, outputs) = last_to_number(stage.axis), target.sides_of_array
    axes = list_axes(axis) if isinstance(axis, int | tuple) else ()
    if tuple(axis % len(target.heads or target.shape) for axis in axes) != outputs:
        raise ValueError(
            f"PEFT has lengths of outputs, along axis {one_or_tuple(outputs)}, but no equivalent of {stage!r}"
        )


def _read_bias(stored: Stored) -> Adapted:
    """The difference of a bias, which has the factor of its weight."""
    if not stored.config.get("lora_bias"):
        raise ValueError(f"{BIAS} is unexpected without lora_bias")
    values = stored.values({BIAS: Part("@delta/x/@scale/x", stored.target.shape)})
    rank, alpha = _rank_and_alpha(stored)
    divisor = math.sqrt(rank) if stored.config.get("use_rslora") else rank
    return Adapted((Scale(alpha / divisor), Delta()), values)


def _write_bias(made: Made) -> Written:
    """The difference of a bias."""
    factor = known_number(made.value("x").stage.factor)
    return Written({BIAS: made.array("@delta/x/@scale/x")}, factor=factor)


def _token_parts(target: Target, name: str, count: int) -> dict[str, Part]:
    """The rows of tokens, which are slices along an axis."""
    axis = _token_axis(target)
    as_rows = jnp.asarray if axis == 0 else jnp.transpose
    return {name: Part("@trainable_slices/x", (count, target.shape[1 - axis]), as_rows, as_rows)}


def _token_axis(target: Target) -> int:
    """The axis of tokens: the inputs of a table, and the outputs of a head."""
    if len(target.shape) != 2:
        raise ValueError(f"tokens are read and written for matrices, but the array has shape {target.shape}")
    return target.input_axes[0] if target.is_table else target.output_axis


def _read_tokens(stored: Stored, name: str, indices: Sequence[int]) -> Adapted:
    """Trained slices of a table, or of a head."""
    axis = _token_axis(stored.target)
    values = stored.values(_token_parts(stored.target, name, len(indices)))
    if max(indices, default=0) >= stored.target.shape[axis]:
        raise ValueError(f"expected tokens below {stored.target.shape[axis]}, got {max(indices)}")
    return Adapted((TrainableSlices(tuple(indices), axis=axis),), values)


def _write_tokens(made: Made) -> Written:
    """The rows of trained slices."""
    target, stage, axis = made.target, made.stage, _token_axis(made.target)
    if not isinstance(stage.axis, int) or stage.axis % len(target.shape) != axis:
        raise ValueError(f"PEFT has tokens along axis {axis}, but no equivalent of {stage!r}")
    tensors = made.write(_token_parts(target, DELTA, len(stage.indices)))
    return Written(tensors, {"token_indices": stage.indices})


def _gain_parts(target: Target, axis: int, *, inputs: bool) -> dict[str, Part]:
    """The factors along an axis: columns of numbers for outputs, rows for inputs and for all of a convolution."""
    size = target.shape[axis]
    return {"ia3_l": Part("@gain/g", (1, size, *target.ones) if inputs or target.ones else (size, 1), jnp.ravel)}


def _read_gains(stored: Stored) -> Adapted:
    """Factors on outputs, including the bias, or on inputs."""
    inputs = is_fed_forward(stored.config, stored.target.module)
    axis = stored.target.channel_axis if inputs else stored.target.output_axis
    return Adapted((Gain(axis=axis),), stored.values(_gain_parts(stored.target, axis, inputs=inputs)))


def _write_gains(made: Made) -> Written:
    """The factors."""
    target, gain = made.target, made.stage
    axis = gain.axis % len(target.shape) if isinstance(gain.axis, int) else None
    if axis not in (target.channel_axis, target.output_axis):
        raise ValueError(f"PEFT has factors on inputs or on outputs, but no equivalent of {gain!r}")
    inputs = axis != target.output_axis
    return Written(made.write(_gain_parts(target, axis, inputs=inputs)), {"inputs": inputs})


def require_shapes(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses tensors that are missing, unexpected, or of another shape."""
    lines = [f"{name} is missing, expected shape {shape}" for name, shape in shapes.items() if name not in tensors]
    lines += [f"{name} is unexpected" for name in tensors if name not in shapes]
    lines += [
        f"expected {name} of shape {shape}, got {tensors[name].shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if lines:
        raise ValueError("; ".join(lines))


def known_number(x: Any) -> float:
    """A hyperparameter, which must be known to be written."""
    if isinstance(x, Tracer):
        raise ValueError("its number is traced, but only known numbers can be written")
    return float(x)
