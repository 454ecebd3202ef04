"""The arrays that PEFT adapts: their names there, and their axes of inputs and outputs.

PEFT wraps a module once for each parameter that it adapts by itself, such as fused experts, in the order in which the
module has them, so the last one's wrapper is the outer one. A file tells how deep a wrapper lies, but not whose it is:
the order of ``names`` does.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import list_axes
from reparax.core.layers import known_by_name
from reparax.core.paths import PyTree
from reparax.core.roles import one_or_tuple
from reparax.io._layouts import (
    EXPERTS,
    HEADS,
    axis_order,
    layout_of_matrix,
    merged_shape,
    permute,
    read_layout,
    write_layout,
)
from reparax.io._parameters import Entry, Rules, group_keys, list_entries
from reparax.io._peft_config import TOKENS, ends_by_setting, is_adapted, is_saved, names_end

PREFIX = "base_model.model."
WRAPPED = ".base_layer"
"""What PEFT adds to the name of a module that it has wrapped."""

ATTENTION = (
    "PEFT adds the update of `out_proj` of nn.MultiheadAttention twice, even when it merges, and that of a Linear once"
)
"""Why adapters of torch's attention are not read or written, as in PEFT 0.21."""


@dataclass(frozen=True)
class Target(Entry):
    """One array of the model, or one of a stack."""

    heads: tuple[int, ...] = ()
    """Of a kernel of attention, the shape before its heads are merged."""
    n_inputs: int = 1
    """How many axes of that shape are inputs."""

    @property
    def is_table(self) -> bool:
        """Whether it is an embedding table, whose inputs are its rows; PEFT adapts the transposed matrix."""
        return self.layout == "embedding"

    @property
    def module(self) -> str:
        """The torch name of its module."""
        return self.tensor.rpartition(".")[0]

    @property
    def n_experts(self) -> int:
        """How many matrices it is a stack of, in torch too, or 0."""
        return self.shape[0] if self.layout.startswith(EXPERTS) else 0

    @property
    def owner(self) -> str:
        """The torch name of what PEFT adapts: its module, or a stack of experts by itself."""
        return self.tensor if self.n_experts else self.module

    def expert(self) -> "Target":
        """One matrix of a stack of experts."""
        return replace(self, shape=self.shape[1:], layout=layout_of_matrix(self.layout)) if self.n_experts else self

    @property
    def adapter_layout(self) -> str:
        """The layout of its adapter, which has the outputs first also for tables and transformers' ``Conv1D``."""
        return "kernel" if self.layout in ("conv1d", "embedding") else self.layout

    @property
    def output_axis(self) -> int:
        """The axis of the outputs, in our array."""
        return axis_order(self.adapter_layout, len(self.shape))[0]

    @property
    def input_axes(self) -> tuple[int, ...]:
        """All other axes of our array."""
        return tuple(axis for axis in range(len(self.shape)) if axis != self.output_axis)

    @property
    def sides_of_array(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of inputs and of outputs, of the array as it is in the model."""
        if not self.heads:
            return self.input_axes, (self.output_axis,)
        axes = tuple(range(len(self.heads)))
        return axes[: self.n_inputs], axes[self.n_inputs :]

    @property
    def channel_axis(self) -> int:
        """The axis of the input channels, torch's second."""
        return self.input_axes[-1] if self.output_axis == len(self.shape) - 1 else self.input_axes[0]

    @property
    def outputs(self) -> int:
        """How many outputs there are."""
        return self.shape[self.output_axis]

    @property
    def ones(self) -> tuple[int, ...]:
        """The axes of size 1 that PEFT adds to vectors of a convolution."""
        return (1,) * (len(self.shape) - 2)

    @property
    def sides(self) -> dict[str, Any]:
        """The arguments for a stage whose rows are the inputs; none for an array ``(in, out)`` whose name says it."""
        inputs, outputs = self.sides_of_array
        is_named = known_by_name(self.path.rpartition("/")[2]).sizes
        if is_named and not self.unlike_class and (inputs, outputs) == ((0,), (1,)):
            return {}
        return {"rows": one_or_tuple(inputs), "columns": one_or_tuple(outputs)}

    def require_rows(self, stage: Any) -> None:
        """Refuses a stage whose rows are not the inputs."""
        ndim, (inputs, outputs) = len(self.heads or self.shape), self.sides_of_array
        if stage.rows is not None:
            rows = tuple(axis % ndim for axis in list_axes(stage.rows))
        else:
            columns = list_axes(-1 if stage.columns is None else stage.columns)
            rows = tuple(sorted(set(range(ndim)) - {axis % ndim for axis in columns}))
        is_turned = self.heads and stage.axes_of(ndim) != (inputs, outputs)
        if set(rows) != set(inputs) or is_turned:
            raise ValueError(
                f"PEFT has adapters from inputs to outputs (rows={inputs}, columns={one_or_tuple(outputs)}), but no "
                f"equivalent of {stage!r}"
            )

    def read_inputs(self, factor: Array) -> Array:
        """Converts PEFT's factor (rank, in, *kernel) to ours: input axes in our order, the rank last."""
        return jnp.moveaxis(read_layout(factor, self.adapter_layout), self.output_axis, -1)

    def write_inputs(self, factor: Array) -> Array:
        """Converts our factor to PEFT's."""
        factor = factor.reshape(*(self.shape[axis] for axis in self.input_axes), factor.shape[-1])
        return write_layout(jnp.moveaxis(factor, -1, self.output_axis), self.adapter_layout)

    def inputs_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of PEFT's factor."""
        return (rank, *permute(self.shape, self.adapter_layout)[1:])


def targets_of(
    params: PyTree, names: Rules, layouts: Rules, roles: PyTree, by_stage: Mapping[str, str] | None = None
) -> dict[str, Target]:
    """The parameters by their torch names; what torch merges is merged."""
    return {entry.tensor: _target_of(entry) for entry in list_entries(params, names, layouts, roles, by_stage)}


def _target_of(entry: Entry) -> Target:
    """The array of an entry, as a matrix if it is a kernel of attention, and as a vector if it is one in torch."""
    target = Target(**vars(entry))
    if entry.layout in HEADS:
        shape = merged_shape(entry.shape, entry.layout)
        return replace(target, shape=shape, layout="kernel", heads=entry.shape, n_inputs=HEADS[entry.layout])
    return replace(target, shape=(math.prod(entry.shape),), layout="same") if entry.layout == "vector" else target


def plain_name(name: str) -> str:
    """The name of a tensor without PEFT's prefix and without its wrappers of modules."""
    parts = name.removeprefix(PREFIX).split(".")
    return ".".join(
        part
        for part, parent in zip(parts, ["", *parts], strict=False)
        if part not in ("base_layer", "modules_to_save") and (parent, part) != ("modules_to_save", "default")
    )


def wrapper_names(targets: Iterable[Target]) -> dict[str, str]:
    """For each parameter that is adapted by itself, PEFT's name of its wrapper."""
    names: dict[str, str] = {}
    for module, siblings in group_keys({target: target.module for target in targets}).items():
        rules_given = {target.rule for target in siblings} - {None}
        if len(siblings) > 1 and len(rules_given) < len(siblings):
            rules = ", ".join(f"{target.path!r}: {target.tensor!r}" for target in siblings)
            raise ValueError(
                f"PEFT adapts several parameters of {module!r} without recording which is which, in the order of the "
                f"module. Give each its own rule in that order, such as names={{{rules}}}."
            )
        # PEFT wraps the module once for each parameter, and the last one of them stands outside.
        outermost_first = sorted(siblings, key=lambda target: target.rule or 0, reverse=True)
        names |= {target.tensor: module + WRAPPED * depth for depth, target in enumerate(outermost_first)}
    return names


def names_by_parameter(
    names: Collection[str], ends: tuple[str, ...], config: Mapping[str, Any], targets: Mapping[str, Target]
) -> dict[str, str]:
    """For each name of a file the plain one, in which a stack of experts stands for its wrapper."""
    parameters = _adapted_parameters(config, targets)
    tensor_of_wrapper = {wrapper: tensor for tensor, wrapper in wrapper_names(parameters).items()}
    plain_names: dict[str, str] = {}
    for name in names:
        end = next((end for end in ends if name.endswith(f".{end}")), None)
        tensor = None if end is None else tensor_of_wrapper.get(_plain_wrapper(name.removesuffix(f".{end}")))
        plain_names[name] = f"{tensor}.{end}" if tensor and targets[tensor].n_experts else plain_name(name)
    return plain_names


def _plain_wrapper(wrapper: str) -> str:
    """The name of a wrapper, with that of its module without PEFT's prefix."""
    module = wrapper
    while module.endswith(WRAPPED):
        module = module.removesuffix(WRAPPED)
    return plain_name(module) + wrapper.removeprefix(module)


def _adapted_parameters(config: Mapping[str, Any], targets: Mapping[str, Target]) -> list[Target]:
    """The parameters that a configuration lists to adapt by themselves: matrices, and stacks of experts."""
    names = config.get("target_parameters", ())
    parameters = [target for target in targets.values() if names_end(names, target.tensor)]
    for target in parameters:
        if not target.n_experts and (len(target.shape) != 2 or not target.tensor.endswith(".weight")):
            raise ValueError(
                f"PEFT adapts {target.path!r} separately, which needs the layout of experts: "
                f"layouts={{{target.path!r}: 'experts:kernel'}} for (experts, in, out) here and (experts, out, in) in "
                f"torch, 'experts:conv1d' for (experts, in, out) in both, or 'experts:same' for (experts, out, in) in "
                f"both."
            )
    return parameters


def is_loaded(config: Mapping[str, Any], tensor: str, end: str, name: str) -> bool:
    """Whether PEFT's model has a file's name for a parameter, or for the end of one that an adapter has for it.

    Which modules a configuration without names means, only PEFT knows, and which table a list of tokens.
    """
    if config.get("target_modules") is None and config.get("target_parameters") is None:
        return True
    if end:
        is_of_the_table = end == TOKENS and not isinstance(config.get("trainable_token_indices"), Mapping)
        return is_of_the_table or any(end in ends for ends in ends_by_setting(config, tensor).values())
    parts, module = name.split("."), tensor.rpartition(".")[0]
    if is_saved(config, module):
        return "base_layer" not in parts
    is_wrapped = is_adapted(config, module) or (bool(config.get("target_parameters")) and "base_layer" in parts)
    return "modules_to_save" not in parts and is_wrapped == ("base_layer" in parts)
