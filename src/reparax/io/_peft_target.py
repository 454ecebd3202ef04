"""Targets: the arrays that PEFT can adapt, with their names in PEFT and their input and output axes.

PEFT wraps each module that it adapts. If a configuration names parameters rather than modules, such as fused experts,
PEFT wraps their module once for each parameter, in the module's order, so the wrapper of the last parameter is the
outermost. A file shows how deep a wrapper is nested, but not its parameter, so the order of ``names`` determines the
parameter.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import list_axes
from reparax.core.known_axes import known_by_name
from reparax.core.paths import PyTree
from reparax.core.roles import one_or_tuple
from reparax.io._layouts import (
    EXPERTS,
    HEADS,
    axis_order,
    from_layout,
    layout_of_matrix,
    merged_shape,
    to_layout,
    torch_shape,
)
from reparax.io._parameters import Entry, Rules, group_keys, list_entries
from reparax.io._peft_config import TOKENS, expected_suffixes, is_adapted, is_saved, matches_names

PREFIX = "base_model.model."
WRAPPED = ".base_layer"
"""The suffix that PEFT appends to the name of a module that it has wrapped."""

ATTENTION = (
    "PEFT adds the update of `out_proj` in nn.MultiheadAttention twice, even in a merge, but in any other layer once"
)
"""The reason why adapters of torch's attention are neither read nor written, as of PEFT 0.21."""


@dataclass(frozen=True)
class Target(Entry):
    """An array of the model, or a layer of a stack, in the shape that PEFT adapts: attention heads are merged."""

    heads: tuple[int, ...] = ()
    """The shape of an attention kernel before its heads are merged; empty for other arrays."""
    n_inputs: int = 1
    """The number of axes in ``heads`` that are input axes."""

    @property
    def is_table(self) -> bool:
        """Whether the array is an embedding table, whose inputs are its rows. PEFT adapts the transposed table."""
        return self.layout == "embedding"

    @property
    def module(self) -> str:
        """The torch name of the module that holds the array's tensor."""
        return self.tensor.rpartition(".")[0]

    @property
    def n_experts(self) -> int:
        """The number of matrices in a stack of experts; 0 for other arrays."""
        return self.shape[0] if self.layout.startswith(EXPERTS) else 0

    @property
    def adapted_name(self) -> str:
        """The torch name under which PEFT adapts the array: its own for a stack of experts, or else its module's."""
        return self.tensor if self.n_experts else self.module

    def one_expert(self) -> "Target":
        """Returns the target of one matrix in a stack of experts. Returns any other target unchanged."""
        return replace(self, shape=self.shape[1:], layout=layout_of_matrix(self.layout)) if self.n_experts else self

    @property
    def adapter_layout(self) -> str:
        """The layout for the adapter, where PEFT puts outputs first, even for tables and transformers' ``Conv1D``."""
        return "kernel" if self.layout in ("conv1d", "embedding") else self.layout

    @property
    def output_axis(self) -> int:
        """The index of the array's output axis, after attention heads are merged."""
        return axis_order(self.adapter_layout, len(self.shape))[0]

    @property
    def input_axes(self) -> tuple[int, ...]:
        """The indices of the array's input axes, which are all axes except the output axis."""
        return tuple(axis for axis in range(len(self.shape)) if axis != self.output_axis)

    @property
    def input_and_output_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The input axes and the output axes of the array in the model, where attention heads are not merged."""
        if not self.heads:
            return self.input_axes, (self.output_axis,)
        axes = tuple(range(len(self.heads)))
        return axes[: self.n_inputs], axes[self.n_inputs :]

    @property
    def input_channel_axis(self) -> int:
        """The index of the JAX axis of the input channels, which is the second axis in torch."""
        return self.input_axes[-1] if self.output_axis == len(self.shape) - 1 else self.input_axes[0]

    @property
    def n_outputs(self) -> int:
        """The size of the array's output axis."""
        return self.shape[self.output_axis]

    @property
    def unit_axes(self) -> tuple[int, ...]:
        """A size of 1 for each axis that PEFT adds to the vectors of a convolution; empty for a matrix."""
        return (1,) * (len(self.shape) - 2)

    @property
    def axis_arguments(self) -> dict[str, Any]:
        """The ``rows`` and ``columns`` of a stage whose rows are inputs; empty if the array's name implies them."""
        inputs, outputs = self.input_and_output_axes
        is_named = known_by_name(self.path.rpartition("/")[2]).sizes
        if is_named and not self.in_unknown_module and (inputs, outputs) == ((0,), (1,)):
            return {}
        return {"rows": one_or_tuple(inputs), "columns": one_or_tuple(outputs)}

    def require_rows_are_inputs(self, stage: Any) -> None:
        """Raises an error if the rows of a stage are not the inputs of the array."""
        ndim, (inputs, outputs) = len(self.heads or self.shape), self.input_and_output_axes
        if stage.rows is not None:
            rows = {axis % ndim for axis in list_axes(stage.rows)}
        else:
            columns = list_axes(-1 if stage.columns is None else stage.columns)
            rows = set(range(ndim)) - {axis % ndim for axis in columns}
        has_other_axes = self.heads and stage.axes_of(ndim) != (inputs, outputs)
        if rows != set(inputs) or has_other_axes:
            raise ValueError(
                f"PEFT's adapters map inputs to outputs, but {stage!r} has other axes. Pass "
                f"`rows={one_or_tuple(inputs)}, columns={one_or_tuple(outputs)}` to the stage"
            )

    def read_factor(self, factor: Array) -> Array:
        """Converts PEFT's LoRA factor ``(rank, in, *spatial)`` to JAX's axis order: the input axes, then the rank."""
        return jnp.moveaxis(from_layout(factor, self.adapter_layout), self.output_axis, -1)

    def write_factor(self, factor: Array) -> Array:
        """Converts LoRA's factor on the inputs from JAX's axis order to PEFT's shape ``(rank, in, *spatial)``."""
        factor = factor.reshape(*(self.shape[axis] for axis in self.input_axes), factor.shape[-1])
        return to_layout(jnp.moveaxis(factor, -1, self.output_axis), self.adapter_layout)

    def input_factor_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape ``(rank, in, *spatial)`` of PEFT's LoRA factor on the inputs."""
        return (rank, *torch_shape(self.shape, self.adapter_layout)[1:])


def targets_by_name(
    params: PyTree, names: Rules, layouts: Rules, roles: PyTree, by_stage: Mapping[str, str] | None = None
) -> dict[str, Target]:
    """Maps the name of each torch tensor of a model to its :class:`Target`, the array that PEFT can adapt."""
    return {entry.tensor: _target_of(entry) for entry in list_entries(params, names, layouts, roles, by_stage)}


def _target_of(entry: Entry) -> Target:
    """Converts an entry to a target. Reshapes attention kernels to matrices, and the layout ``"vector"`` to vectors."""
    target = Target(**vars(entry))
    if entry.layout in HEADS:
        shape = merged_shape(entry.shape, entry.layout)
        return replace(target, shape=shape, layout="kernel", heads=entry.shape, n_inputs=HEADS[entry.layout])
    return replace(target, shape=(math.prod(entry.shape),), layout="same") if entry.layout == "vector" else target


def plain_name(name: str) -> str:
    """Removes PEFT's prefix and the names of its wrappers from the name of a tensor."""
    parts = name.removeprefix(PREFIX).split(".")
    return ".".join(
        part
        for part, parent in zip(parts, ["", *parts], strict=False)
        if part not in ("base_layer", "modules_to_save") and (parent, part) != ("modules_to_save", "default")
    )


def wrapper_names(targets: Iterable[Target]) -> dict[str, str]:
    """Maps the torch name of each given parameter to PEFT's name for the module that wraps the parameter."""
    names: dict[str, str] = {}
    for module, siblings in group_keys({target: target.module for target in targets}).items():
        rules_given = {target.rule for target in siblings} - {None}
        if len(siblings) > 1 and len(rules_given) < len(siblings):
            rules = ", ".join(f"{target.path!r}: {target.tensor!r}" for target in siblings)
            raise ValueError(
                f"PEFT adapts several parameters of {module!r} in the module's order, without recording which is "
                f"which. Give each parameter its own rule in this order, such as names={{{rules}}}."
            )
        # PEFT wraps the module once for each parameter, and the wrapper of the last parameter is the outermost.
        outermost_first = sorted(siblings, key=lambda target: target.rule or 0, reverse=True)
        names |= {target.tensor: module + WRAPPED * depth for depth, target in enumerate(outermost_first)}
    return names


def plain_names_of(
    names: Collection[str], suffixes: tuple[str, ...], config: Mapping[str, Any], targets: Mapping[str, Target]
) -> dict[str, str]:
    """Maps each tensor name in a file to the name without PEFT's wrappers; a stack of experts keeps its own name."""
    parameters = _parameters_named_directly(config, targets)
    tensor_of_wrapper = {wrapper: tensor for tensor, wrapper in wrapper_names(parameters).items()}
    plain_names: dict[str, str] = {}
    for name in names:
        suffix = next((suffix for suffix in suffixes if name.endswith(f".{suffix}")), None)
        tensor = None if suffix is None else tensor_of_wrapper.get(_plain_wrapper(name.removesuffix(f".{suffix}")))
        plain_names[name] = f"{tensor}.{suffix}" if tensor and targets[tensor].n_experts else plain_name(name)
    return plain_names


def _plain_wrapper(wrapper: str) -> str:
    """Replaces the module name in a wrapper's name with the plain module name, and keeps the wrapper's depth."""
    module = wrapper
    while module.endswith(WRAPPED):
        module = module.removesuffix(WRAPPED)
    return plain_name(module) + wrapper.removeprefix(module)


def _parameters_named_directly(config: Mapping[str, Any], targets: Mapping[str, Target]) -> list[Target]:
    """Returns the parameters that ``target_parameters`` names.

    Raises:
      ValueError: If a parameter is neither the weight matrix of a module nor a stack of experts.
    """
    names = config.get("target_parameters", ())
    parameters = [target for target in targets.values() if matches_names(names, target.tensor)]
    for target in parameters:
        if not target.n_experts and (len(target.shape) != 2 or not target.tensor.endswith(".weight")):
            raise ValueError(
                f"PEFT adapts {target.path!r} as a parameter, so it needs a layout of experts: "
                f"layouts={{{target.path!r}: 'experts:kernel'}} for (experts, in, out) in JAX and (experts, out, in) "
                f"in torch, 'experts:conv1d' for (experts, in, out) in both, or 'experts:same' for (experts, out, in) "
                f"in both."
            )
    return parameters


def is_loaded(config: Mapping[str, Any], tensor: str, suffix: str, name: str) -> bool:
    """Returns whether PEFT's model has a tensor with this ``name``; PEFT ignores tensors of a file that it lacks.

    ``tensor`` is the torch name of the parameter. ``suffix`` identifies a tensor of the parameter's adapter, and is
    empty for the parameter itself. Tensors are assumed to be loaded if the configuration names no modules, because only
    PEFT knows which modules are adapted. Likewise, if the tokens are a list, only PEFT knows which table the list
    belongs to.
    """
    if config.get("target_modules") is None and config.get("target_parameters") is None:
        return True
    if suffix:
        is_of_unnamed_table = suffix == TOKENS and not isinstance(config.get("trainable_token_indices"), Mapping)
        return is_of_unnamed_table or any(suffix in suffixes for suffixes in expected_suffixes(config, tensor).values())
    parts, module = name.split("."), tensor.rpartition(".")[0]
    if is_saved(config, module):
        return "base_layer" not in parts
    is_wrapped = is_adapted(config, module) or (bool(config.get("target_parameters")) and "base_layer" in parts)
    return "modules_to_save" not in parts and is_wrapped == ("base_layer" in parts)
