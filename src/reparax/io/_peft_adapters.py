"""Converts the adapter of one array from PEFT's tensors to stages with raw values, and back.

There are four kinds of adapters:

* LoRA, including DoRA, which also trains the lengths of the weight's vectors;
* the trained update of a bias whose weight has a LoRA;
* trained tokens, which are slices of an embedding table or an output layer;
* the gains of IA3, which multiply the inputs or outputs of a weight.

Each tensor of an adapter has one :class:`Conversion`, which both the reader and the writer use.

The reader converts what a file stores (:class:`StoredAdapter`) to stages and values (:class:`Adapter`). The writer
converts an array and the stage that produces it (:class:`AdaptedArray`) to tensors and settings (:class:`PeftForm`).
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
from reparax.io._parameters import per_layer_names, require_layouts, unstack_stage
from reparax.io._peft_config import BIAS, DELTA, METHODS, TOKENS, is_feedforward, number_for, token_indices
from reparax.io._peft_target import Target
from reparax.stages.adapters import Delta, Gain, LoRA, TrainableSlices
from reparax.stages.norms import WeightNorm
from reparax.stages.numbers import Scale

_NO_DORA = "PEFT does not support DoRA for a stack of experts. Use LoRA without DoRA"


class Conversion(NamedTuple):
    """The conversion of one PEFT tensor to a raw value, and back.

    Attributes:
      place: The path of the raw value, relative to the parameter, such as ``@lora/a``.
      shape: The shape of the tensor.
      read: Converts the tensor to the raw value.
      write: Converts the raw value to the tensor. The caller reshapes the result to ``shape``.
    """

    place: str
    shape: tuple[int, ...]
    read: Callable[[Array], Array] = jnp.asarray
    write: Callable[[Array], Array] = jnp.asarray


class Adapter(NamedTuple):
    """The stages on one array, in chain order, and their raw values, keyed by paths such as ``@lora/a``."""

    stages: tuple[Parametrization, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class StoredAdapter:
    """The tensors and the configuration that PEFT stores for one adapted array.

    Attributes:
      target: The adapted array.
      tensors: The tensors of the adapter, keyed by the suffixes of their names.
      config: The contents of ``adapter_config.json``, which describe all adapters.
    """

    target: Target
    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, Any]

    def values(self, conversions: Mapping[str, Conversion]) -> dict[str, Array]:
        """Returns the raw values by path. Raises an error if a tensor is missing, unexpected or of the wrong shape."""
        require_shapes(self.tensors, {name: x.shape for name, x in conversions.items()})
        return {x.place: x.read(jnp.asarray(self.tensors[name])) for name, x in conversions.items()}


@dataclass(frozen=True)
class AdaptedArray:
    """An array of the model, or a value from which a stage computes it, together with the chain's plan.

    Attributes:
      plan: The plan of the chain, which records which stage computes which array.
      place: The key path of the array or value.
      target: The parameter, which may be one layer of a stack. The raw values hold the whole stack.
    """

    plan: Plan
    place: Names
    target: Target

    @property
    def producer(self) -> Any:
        """The stage that computes the array; None if the raw tree holds the array itself."""
        return self.plan.producers.get(self.place, (None,))[0]

    @property
    def stage(self) -> Any:
        """The stage that computes the array, restricted to one layer and one expert.

        Raises:
          ValueError: If the stage acts on all experts together, or on a stack of layers that is one tensor in torch.
        """
        stage = unstack_stage(self.producer, len(self.target.index))
        stacked = list_axes(getattr(stage, "stacked", ()))
        if self.target.n_experts and stacked != (0,):
            raise ValueError(
                f"PEFT has one adapter for each expert, but {self.producer!r} acts on all experts together. Pass "
                f"`stacked={one_or_tuple(tuple(range(len(self.target.index) + 1)))}` to the stage"
            )
        if stacked and not self.target.n_experts:
            raise ValueError(
                f"PEFT has one adapter for each layer, but {self.producer!r} acts on a stack of layers. Give each "
                f"layer a torch name: {per_layer_names(self.target.path)}"
            )
        return unstack_stage(stage, len(stacked))

    def value(self, name: str) -> "AdaptedArray":
        """Returns a value from which a stage computes this array, such as the ``v`` of a WeightNorm."""
        return replace(self, place=self.plan.producers[self.place][1][name])

    def error_of_other_stage(self, name: str) -> ValueError:
        """Returns the error for a value of the adapter that is computed by a stage outside the adapter."""
        return ValueError(f"PEFT has no stages inside adapters. Remove the one on {name!r} of {self.producer!r}")

    def raw_array(self, place: str) -> Array:
        """Returns this layer's raw array at a path such as ``@gain/g``, relative to the adapted array.

        Raises:
          ValueError: If the value is computed by other stages than those in the path.
        """
        _, name, *below = place.split("/", 2)
        value = self.value(name)
        if (value.producer and f"@{value.producer.kind}") != (below[0].partition("/")[0] if below else None):
            raise self.error_of_other_stage(name)
        return value.raw_array(below[0]) if below else self.target.slice_of(self.plan.raw.arrays[value.place])

    def tensors(self, conversions: Mapping[str, Conversion]) -> dict[str, Array]:
        """Converts the raw values to the tensors that PEFT stores, keyed by the suffixes of their names."""
        return {name: x.write(self.raw_array(x.place)).reshape(x.shape) for name, x in conversions.items()}


@dataclass(frozen=True)
class PeftForm:
    """The tensors and settings that PEFT stores for one adapted array of a chain.

    Attributes:
      tensors: The tensors of the adapter, keyed by the suffixes of their names.
      settings: The settings of the configuration for this array. For LoRA, ``use_dora`` and ``lora_bias`` must be equal
        for all modules.
      rank: The rank of a LoRA; 1 for any other adapter.
      factor: The number that multiplies the adapter's update, or 1 if there is no such number.
    """

    tensors: Mapping[str, Array]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rank: int = 1
    factor: float = 1.0


def read_adapter(stored: StoredAdapter) -> Adapter:
    """Converts the stored adapter of an array to stages and raw values."""
    method = stored.config["peft_type"]
    _require_supported_layout(method, stored.target)
    if method == "IA3":
        return _read_gains(stored)
    if method == "TRAINABLE_TOKENS":
        return _read_tokens(stored, DELTA, stored.config.get("token_indices", ()))
    if TOKENS in stored.tensors:
        return _read_tokens(stored, TOKENS, token_indices(stored.config, stored.target.module))
    return _read_bias(stored) if BIAS in stored.tensors else _read_lora(stored)


def write_adapter(array: AdaptedArray) -> tuple[str, PeftForm]:
    """Returns the name of the PEFT method that adapts an array, and the tensors and settings that PEFT stores."""
    match array.stage:
        case LoRA():
            method, write = "LORA", _write_lora
        case WeightNorm(detach=True) if isinstance(array.value("v").producer, LoRA):
            method, write = "LORA", _write_lora
        case Delta() if len(array.target.shape) == 1 and isinstance(array.value("x").producer, Scale):
            method, write = "LORA", _write_bias
        case TrainableSlices():
            method, write = "TRAINABLE_TOKENS", _write_tokens
        case Gain():
            method, write = "IA3", _write_gains
        case stage:
            raise ValueError(f"PEFT has no equivalent of {stage!r}. Use LoRA, DoRA, IA3 or trained tokens")
    _require_supported_layout(method, array.target)
    return method, write(array)


def _require_supported_layout(method: str, target: Target) -> None:
    """Raises an error if the layout of an array is unknown, or if PEFT's method does not support the array."""
    require_layouts([target])
    layouts = METHODS[method].layouts
    if target.layout not in layouts:
        *most, last = map(repr, layouts)
        raise ValueError(
            f"{method} is supported for the layouts {', '.join(most)} and {last}, but {target.path!r} has the layout "
            f"{target.layout!r}. Leave it without an adapter"
        )
    if target.heads and method != "LORA":
        raise ValueError(f"attention kernels such as {target.path!r} support LoRA and DoRA, but got {method}")
    if target.n_experts == 1 and target.one_expert().layout == "conv1d":
        raise ValueError(f"PEFT 0.21 wrongly transposes updates of a single expert. Store {target.path!r} as a matrix")


def _lora_conversions(target: Target, rank: int, *, is_dora: bool = False) -> dict[str, Conversion]:
    """Returns the conversion of each LoRA tensor by its name: the factors A and B, and DoRA's lengths.

    For a stack of experts, PEFT concatenates the rows of A expert by expert, but interleaves the columns of B.
    """
    outputs, ones = target.one_expert().n_outputs, target.unit_axes
    if count := target.n_experts:
        inputs = math.prod(target.shape[1:]) // max(outputs, 1)
        a, b = (count, rank, inputs), (outputs, rank, count)
        return {
            "lora_A.weight": Conversion("@lora/a", (count * rank, inputs), lambda x: x.reshape(a).mT, lambda x: x.mT),
            "lora_B.weight": Conversion("@lora/b", (outputs, rank * count), lambda x: x.reshape(b).T, jnp.transpose),
        }
    place, b_shape = "@weight_norm/v/@lora" if is_dora else "@lora", (outputs, rank)
    a, b = ("lora_embedding_A", "lora_embedding_B") if target.is_table else ("lora_A.weight", "lora_B.weight")
    conversions = {
        a: Conversion(f"{place}/a", target.input_factor_shape(rank), target.read_factor, target.write_factor),
        b: Conversion(f"{place}/b", (*b_shape, *ones), lambda x: x.reshape(b_shape).T, lambda x: x.reshape(rank, -1).T),
    }
    if is_dora:
        lengths = [outputs if axis == target.output_axis else 1 for axis in range(len(target.shape))]
        shape = (1, outputs, *ones) if ones else (outputs,)
        conversions["lora_magnitude_vector"] = Conversion("@weight_norm/g", shape, lambda g: g.reshape(lengths))
    return conversions


def _read_lora(stored: StoredAdapter) -> Adapter:
    """Converts a LoRA or DoRA that PEFT has stored to stages and raw values."""
    target, (rank, alpha) = stored.target, _rank_and_alpha(stored)
    is_dora = bool(stored.config.get("use_dora"))
    if is_dora and target.n_experts:
        raise ValueError(_NO_DORA)
    stacked = 0 if target.n_experts else ()
    how: dict[str, Any] = target.one_expert().axis_arguments | {"use_rslora": bool(stored.config.get("use_rslora"))}
    lora = LoRA(rank, alpha, stacked=stacked, **how)
    try:
        values = stored.values(_lora_conversions(target, rank, is_dora=is_dora))
    except ValueError as error:
        if not target.n_experts:
            raise
        raise ValueError(
            f"{error}. If these tensors belong to another stack of experts, change the order of `names`. If not, "
            f"correct the layout of the stack"
        ) from error
    _, outputs = target.input_and_output_axes
    is_last = outputs == (len(target.heads or target.shape) - 1,)
    axis = -1 if is_last else one_or_tuple(outputs)
    return Adapter((lora, WeightNorm(axis=axis, detach=True)) if is_dora else (lora,), values)


def _rank_and_alpha(stored: StoredAdapter) -> tuple[int, float]:
    """Returns the rank and alpha that PEFT's configuration gives to the LoRA of one array."""
    config, name = stored.config, stored.target.adapted_name
    return number_for(name, config, "rank_pattern", "r"), float(number_for(name, config, "alpha_pattern", "lora_alpha"))


def _write_lora(array: AdaptedArray) -> PeftForm:
    """Converts the LoRA or DoRA of an array to the tensors and settings that PEFT stores."""
    target, is_dora = array.target, isinstance(array.producer, WeightNorm)
    lora = (array.value("v") if is_dora else array).stage
    target.one_expert().require_rows_are_inputs(lora)
    if lora.init_weights in ("pissa", "olora"):
        raise ValueError(f"PEFT keeps the original base weight, but {lora!r} changes it. Use another `init_weights`")
    if is_dora:
        _require_dora_axis(array.stage, target)
    tensors = array.tensors(_lora_conversions(target, lora.rank, is_dora=is_dora))
    dtype = next(iter(tensors.values())).dtype
    divisor = math.sqrt(lora.rank) if lora.use_rslora else lora.rank
    factor = 1.0 if lora.alpha is None else concrete_number(lora.alpha) / divisor
    settings = {"use_rslora": lora.use_rslora and lora.alpha is not None, "use_dora": is_dora, "lora_bias": False}
    return PeftForm({name: x.astype(dtype) for name, x in tensors.items()}, settings, lora.rank, factor)


def _require_dora_axis(stage: WeightNorm, target: Target) -> None:
    """Raises an error for DoRA on a stack of experts, or if DoRA's lengths do not lie along the output axes."""
    if target.n_experts:
        raise ValueError(_NO_DORA)
    axis, (_, outputs) = last_to_number(stage.axis), target.input_and_output_axes
    axes = list_axes(axis) if isinstance(axis, int | tuple) else ()
    if tuple(axis % len(target.heads or target.shape) for axis in axes) != outputs:
        raise ValueError(
            f"PEFT's DoRA has one length for each output, but {stage!r} has other lengths. Pass "
            f"`axis={one_or_tuple(outputs)}` to the stage"
        )


def _read_bias(stored: StoredAdapter) -> Adapter:
    """Converts the stored update of a bias to stages and raw values. It is scaled like the LoRA of the weight."""
    if not stored.config.get("lora_bias"):
        raise ValueError(f"the tensor {BIAS} requires lora_bias=True in `config`. Set it, or leave out the tensor")
    values = stored.values({BIAS: Conversion("@delta/x/@scale/x", stored.target.shape)})
    rank, alpha = _rank_and_alpha(stored)
    divisor = math.sqrt(rank) if stored.config.get("use_rslora") else rank
    return Adapter((Scale(alpha / divisor), Delta()), values)


def _write_bias(array: AdaptedArray) -> PeftForm:
    """Converts the trained update of a bias to the tensor that PEFT stores, and its scaling factor."""
    factor = concrete_number(array.value("x").stage.factor)
    return PeftForm({BIAS: array.raw_array("@delta/x/@scale/x")}, factor=factor)


def _token_conversions(target: Target, name: str, count: int) -> dict[str, Conversion]:
    """Returns the conversion of PEFT's trained tokens, which are rows, to slices along the array's token axis."""
    axis = _token_axis(target)
    as_rows = jnp.asarray if axis == 0 else jnp.transpose
    return {name: Conversion("@trainable_slices/x", (count, target.shape[1 - axis]), as_rows, as_rows)}


def _token_axis(target: Target) -> int:
    """Returns the axis that indexes tokens: the input axis of an embedding table, or an output layer's output axis."""
    if len(target.shape) != 2:
        raise ValueError(f"trained tokens require 2-D arrays, but {target.path!r} has shape {target.shape}. Exclude it")
    return target.input_axes[0] if target.is_table else target.output_axis


def _read_tokens(stored: StoredAdapter, name: str, indices: Sequence[int]) -> Adapter:
    """Converts stored tokens of an embedding table or an output layer to a stage and its raw value."""
    axis = _token_axis(stored.target)
    values = stored.values(_token_conversions(stored.target, name, len(indices)))
    if max(indices, default=0) >= stored.target.shape[axis]:
        raise ValueError(
            f"the token indices of {stored.target.path!r} must be below {stored.target.shape[axis]}, but got "
            f"{max(indices)}. Pass a model with the adapter's vocabulary as `like`"
        )
    return Adapter((TrainableSlices(tuple(indices), axis=axis),), values)


def _write_tokens(array: AdaptedArray) -> PeftForm:
    """Converts trained tokens to the tensor that PEFT stores, and the setting ``token_indices``."""
    target, stage, axis = array.target, array.stage, _token_axis(array.target)
    if not isinstance(stage.axis, int) or stage.axis % len(target.shape) != axis:
        raise ValueError(f"PEFT's tokens lie along axis {axis}, but got {stage!r}. Pass `axis={axis}` to the stage")
    tensors = array.tensors(_token_conversions(target, DELTA, len(stage.indices)))
    return PeftForm(tensors, {"token_indices": stage.indices})


def _gain_conversions(target: Target, axis: int, *, inputs: bool) -> dict[str, Conversion]:
    """Returns the conversion of IA3's factors, which multiply a weight along ``axis``.

    For a matrix, PEFT stores output factors as a column and input factors as a row. For a convolution, PEFT stores both
    with the shape ``(1, size, 1, ...)``.
    """
    size, ones = target.shape[axis], target.unit_axes
    return {"ia3_l": Conversion("@gain/g", (1, size, *ones) if inputs or ones else (size, 1), jnp.ravel)}


def _read_gains(stored: StoredAdapter) -> Adapter:
    """Converts stored factors of IA3 to a gain on the input channels or on the outputs of a weight."""
    inputs = is_feedforward(stored.config, stored.target.module)
    axis = stored.target.input_channel_axis if inputs else stored.target.output_axis
    return Adapter((Gain(axis=axis),), stored.values(_gain_conversions(stored.target, axis, inputs=inputs)))


def _write_gains(array: AdaptedArray) -> PeftForm:
    """Converts a gain to IA3's factors. The setting ``inputs`` records whether they multiply the weight's inputs."""
    target, gain = array.target, array.stage
    axis = gain.axis % len(target.shape) if isinstance(gain.axis, int) else None
    axes = target.input_channel_axis, target.output_axis
    if axis not in axes:
        raise ValueError(f"IA3 multiplies along axis {axes[0]} or {axes[1]}, but got {gain!r}. Pass one of these axes")
    inputs = axis != target.output_axis
    return PeftForm(array.tensors(_gain_conversions(target, axis, inputs=inputs)), {"inputs": inputs})


def require_shapes(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises an error that lists each tensor that is missing or unexpected, or whose shape is not the expected one."""
    lines = [f"{name} is missing, expected shape {shape}" for name, shape in shapes.items() if name not in tensors]
    lines += [f"{name} is unexpected" for name in tensors if name not in shapes]
    lines += [
        f"expected {name} of shape {shape}, got {tensors[name].shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if lines:
        raise ValueError("; ".join(lines))


def concrete_number(x: Any) -> float:
    """Converts a stage's hyperparameter, such as ``alpha``, to a float. Raises an error if it is traced."""
    if isinstance(x, Tracer):
        raise ValueError("hyperparameters must be concrete, but one is traced. Call `to_peft` outside of `jax.jit`")
    return float(x)
