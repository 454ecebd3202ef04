"""Writes PEFT adapters: tensors and a configuration from a raw tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.bound import Lineage, lineage_of
from reparax.core.calls import require_chains
from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import locate_errors
from reparax.core.leaf import Perturbation
from reparax.core.paths import Names, PyTree
from reparax.io._parameters import Rules, require_known
from reparax.io._peft_lora import BIAS, TOKENS
from reparax.io._peft_method import Method, StageNode, Written, known_number
from reparax.io._peft_methods import LORA, METHODS, method_of
from reparax.io._peft_target import ATTENTION, PREFIX, Target, targets_of, wrapper_names
from reparax.stages.adapters import Gain
from reparax.stages.quantized import Quantize, Stored
from reparax.stages.shared import Tie
from reparax.stages.sparse import Freeze


def to_peft(
    p: Parametrization, raw: PyTree, *, names: Rules = None, layouts: Rules = None, roles: PyTree = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Converts a raw tree of ``p`` to an adapter that PEFT can load: its tensors and its configuration.

    Save the tensors with ``safetensors.numpy.save_file(tensors, "adapter_model.safetensors", {"format": "pt"})``, and
    the configuration with ``json.dump`` as ``adapter_config.json``; add ``base_model_name_or_path`` and ``task_type``
    if you need them. Biases and whole modules that train beside the adapters are included. Perturbations and the base
    are left out.

    Args:
      p: The chain, for one of the methods that :func:`from_peft` reads.
      raw: A raw tree of it.
      names: As for :func:`from_peft`.
      layouts: As for :func:`from_peft`.
      roles: As for :func:`from_peft`.

    Returns:
      The tensors under PEFT's names, and the contents of ``adapter_config.json``.

    Raises:
      TypeError: If ``p`` is not a parametrization.
      ValueError: If PEFT has no equivalent for the stages of a parameter; the error names each such parameter.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.LoRA(1, alpha=2.0)
      >>> raw = p.init({"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}, jax.random.key(0))
      >>> tensors, config = rpx.to_peft(p, raw)
      >>> {name: x.shape for name, x in tensors.items()}
      {'base_model.model.dense.lora_A.weight': (1, 3), 'base_model.model.dense.lora_B.weight': (2, 1)}
      >>> config["peft_type"], config["r"], config["lora_alpha"], config["target_modules"]
      ('LORA', 1, 2, ['dense'])
    """
    require_chains("to_peft(p, raw)", p)
    weights = Chain(tuple(stage for stage in Chain((p,)).stages if not isinstance(stage, Perturbation | Quantize)))
    with locate_errors("to_peft"):
        lineage = lineage_of(weights.deterministic, raw)
        targets = targets_of(lineage.effective, names, layouts, roles)
        nodes, free, lines = _sort_places(lineage, targets)
    written_of: dict[str, tuple[Method, Written]] = {}
    for tensor, node in nodes.items():
        try:
            _require_no_attention(targets[tensor], targets)
            _require_bias(targets[tensor], node, targets, nodes)
            written_of |= {} if _is_bias_gain(node, targets[tensor]) else {tensor: _write_node(node, targets[tensor])}
        except ValueError as error:
            lines.append(f"{targets[tensor].path}: {error}")
    methods = {method.name for method, _ in written_of.values()}
    tokens: dict[str, Written] = {}
    if LORA.name in methods:
        methods.discard(TOKENS.name)
        tokens = {name: written for name, (method, written) in written_of.items() if method is TOKENS}
        written_of = {name: pair for name, pair in written_of.items() if name not in tokens}
    if not methods and not lines:
        raise ValueError(
            "to_peft: expected adapters of one method, got none. Write a model without adapters by "
            "`rpx.to_torch(p, raw)`."
        )
    if len(methods) != 1 and not lines:
        lines.append(f"expected adapters of one method, got {', '.join(sorted(methods))}")
    if lines:
        text = "\n  ".join(dict.fromkeys(lines))
        raise ValueError(f"to_peft: PEFT has no such adapter:\n  {text}\nMerge it with `p.fold(raw)`.")
    method = METHODS[methods.pop()]
    with locate_errors("to_peft"):
        wrappers = wrapper_names(targets[tensor] for tensor in written_of if targets[tensor].n_experts)
    try:
        modules = _with_biases({tensor: module_tensors for tensor, (_, module_tensors) in written_of.items()}, targets)
        method_config = method.configure(modules)
    except ValueError as error:
        raise ValueError(f"to_peft: {error}. Merge it with `p.fold(raw)`.") from error
    config = {"peft_type": method.name, "task_type": None, "base_model_name_or_path": None, "inference_mode": True}
    config |= {"target_modules": sorted(modules.keys() - wrappers)} | method_config
    config |= {"target_parameters": sorted(wrappers)} if wrappers else {}
    if "fan_in_fan_out" in method.settings:
        config |= {"fan_in_fan_out": any(targets[tensor].layout == "conv1d" for tensor in written_of)}
    beside, config_beside = _tensors_beside(method, free, targets, {targets[tensor].module for tensor in written_of})
    tensors = _name_all_tensors(
        method, {wrappers.get(name, name): module_tensors for name, module_tensors in modules.items()}
    )
    if tokens:
        tables = {targets[name].module: module_tensors for name, module_tensors in tokens.items()}
        tensors |= _name_all_tensors(
            method, {f"{name}.token_adapter": module_tensors for name, module_tensors in tables.items()}
        )
        config |= {
            "trainable_token_indices": {
                name: [*module_tensors.flags["token_indices"]] for name, module_tensors in tables.items()
            }
        }
    return dict(sorted((tensors | beside).items())), config | config_beside


def _with_biases(written_of: Mapping[str, Written], targets: Mapping[str, Target]) -> dict[str, Written]:
    """What is written for each module; a difference of its bias is multiplied by the factor of its weight."""
    biases = {
        targets[tensor].module: module_tensors
        for tensor, module_tensors in written_of.items()
        if BIAS in module_tensors.tensors
    }
    modules = {
        targets[tensor].owner: module_tensors
        for tensor, module_tensors in written_of.items()
        if BIAS not in module_tensors.tensors
    }
    for module, bias in biases.items():
        if module not in modules:
            raise ValueError(f"PEFT trains a difference of a bias beside that of its weight, but {module!r} has none")
        weight, x = modules[module], bias.tensors[BIAS]
        if bias.factor != weight.factor:
            x = x * (known_number(bias.factor) / known_number(weight.factor))
        tensors, flags = {**weight.tensors, BIAS: x}, {**weight.flags, "lora_bias": True}
        modules[module] = replace(weight, tensors=tensors, flags=flags)
    return modules


def _name_all_tensors(method: Method, modules: Mapping[str, Written]) -> dict[str, np.ndarray]:
    """The tensors of all modules by their names, and those that they share."""
    tensors = {
        f"{PREFIX}{m}.{end}": np.asarray(x)
        for m, module_tensors in modules.items()
        for end, x in module_tensors.tensors.items()
    }
    for bank in method.banks:
        parts = [tensors.pop(f"{PREFIX}{module}.{bank}") for module in modules]
        bank_tensor = tensors[f"base_model.{bank}"] = max(parts, key=np.size)
        if not all(np.array_equal(part, bank_tensor[tuple(map(slice, part.shape))]) for part in parts):
            raise ValueError(
                f"to_peft: PEFT has one {bank} for all modules, but got several. Merge it with `p.fold(raw)`."
            )
    return tensors


def _sort_places(
    lineage: Lineage, targets: Mapping[str, Target]
) -> tuple[dict[str, StageNode], dict[str, Array], list[str]]:
    """The adapted tensors, the other tensors that train, and the errors for stages that PEFT does not have."""
    nodes: dict[str, StageNode] = {}
    free: dict[str, Array] = {}
    lines: list[str] = []
    for tensor, target in targets.items():
        try:
            node = _node_at(lineage, lineage.places[target.path])
            if not isinstance(node, StageNode) and jnp.issubdtype(node.dtype, jnp.inexact):
                require_known([target])
                free[tensor] = target.part(node)
            elif isinstance(node, StageNode) and not isinstance(node.stage, Freeze | Stored):
                nodes[tensor] = node.of(target)
        except ValueError as error:
            lines.append(f"{target.path}: {error}")
    return nodes, free, lines


def _node_at(lineage: Lineage, place: Names) -> StageNode | Array:
    """The array of the raw tree at a place, or the stage that makes it, with its values."""
    if place not in lineage.makers:
        return lineage.raw.arrays[place]
    stage, values = lineage.makers[place]
    return StageNode(stage, {name: _node_at(lineage, at) for name, at in values.items()})


def _is_bias_gain(node: StageNode, target: Target) -> bool:
    """Whether a node is the gain of a parameter of one axis, such as a bias."""
    return isinstance(node.stage, Gain) and len(target.shape) == 1


def _require_no_attention(target: Target, targets: Mapping[str, Target]) -> None:
    """Refuses an adapter of torch's attention, which has a weight of that name."""
    owner = target.module.removesuffix("out_proj") if target.tensor.endswith("out_proj.weight") else f"{target.module}."
    if (
        target.tensor in (f"{owner}out_proj.weight", input_weight := f"{owner}in_proj_weight")
        and input_weight in targets
    ):
        raise ValueError(ATTENTION)


def _require_bias(
    target: Target, node: StageNode, targets: Mapping[str, Target], nodes: Mapping[str, StageNode]
) -> None:
    """Requires the gains of outputs and of their bias to be tied, as in IA3."""
    if not isinstance(node.stage, Gain):
        return
    gain = node.values["g"]
    if len(target.shape) == 1 and not (isinstance(gain, StageNode) and isinstance(gain.stage, Tie)):
        raise ValueError("PEFT multiplies a bias by the factors of its outputs. Tie the two gains")
    bias = f"{target.module}.bias"
    if _is_on_outputs(node, target) and bias in targets and bias not in nodes:
        raise ValueError(
            f"PEFT also multiplies {targets[bias].path!r} by the factors of its outputs. Give it a tied Gain"
        )


def _is_on_outputs(node: StageNode, target: Target) -> bool:
    """Whether a node is a gain along the outputs of a weight."""
    axis: Any = node.stage.axis if isinstance(node.stage, Gain) else None
    return len(target.shape) > 1 and isinstance(axis, int) and axis % len(target.shape) == target.out


def _write_node(node: StageNode, target: Target) -> tuple[Method, Written]:
    """The method of an adapted parameter, and what PEFT stores of it; raises an error if PEFT would not find it."""
    method = method_of(node)
    method.require_layout(target)
    module_tensors = method.write(target, node)
    module, _, name = target.tensor.rpartition(".")
    weight_or_bias = "bias" if BIAS in module_tensors.tensors else "weight"
    if not target.n_experts and (name != weight_or_bias or not module):
        raise ValueError(
            f"PEFT adapts the {weight_or_bias} of a module, such as 'dense.{weight_or_bias}', but this is "
            f"{target.tensor!r} in torch. Name it by `names`"
        )
    return method, module_tensors


def _is_bias(tensor: str) -> bool:
    """Whether PEFT takes a tensor for a bias."""
    return tensor.rpartition(".")[2] == "bias"


def _tensors_beside(
    method: Method, free: Mapping[str, Array], targets: Mapping[str, Target], adapted_modules: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors that train beside the adapters, and their configuration."""
    saved_modules = {targets[tensor].module for tensor in free if not _is_bias(tensor)}
    biases = {tensor for tensor in free if targets[tensor].module not in saved_modules}
    if clashes := sorted(saved_modules & adapted_modules):
        raise ValueError(f"to_peft: PEFT either adapts a module or saves it whole, but {clashes[0]!r} needs both.")
    for module in saved_modules:
        if also := sorted({t.module for t in targets.values() if t.module.endswith(module)} - saved_modules):
            raise ValueError(
                f"to_peft: PEFT matches the names of saved modules with suffixes, but {module!r} is also a suffix of "
                f"{also[0]!r}. Freeze {module!r}."
            )
    all_biases = {tensor for tensor, t in targets.items() if _is_bias(tensor) and t.module not in saved_modules}
    adapted_biases = {tensor for tensor in all_biases if targets[tensor].module in adapted_modules}
    paths_text = ", ".join(map(repr, sorted({targets[tensor].path for tensor in biases})))
    if biases and method.own_biases is None:
        raise ValueError(
            f"to_peft: PEFT trains no biases with {method.name}, but here train {paths_text}. Freeze them."
        )
    if biases not in (set(), all_biases, adapted_biases):
        raise ValueError(
            f"to_peft: PEFT trains all biases, or those of adapted modules, but here train {paths_text}. Freeze them, "
            f"or train the others too."
        )
    kind = "none" if not biases else "all" if biases == all_biases else method.own_biases
    tensors = {
        _name_in_wrapper(targets[name], adapted_modules): np.asarray(targets[name].write_whole(x))
        for name, x in free.items()
    }
    return tensors, ({"bias": kind} if biases or method is LORA else {}) | {
        "modules_to_save": sorted(saved_modules) or None
    }


def _name_in_wrapper(target: Target, adapted_modules: set[str]) -> str:
    """PEFT's name of a tensor, which it wraps if its module is adapted."""
    module, _, name = target.tensor.rpartition(".")
    return PREFIX + (f"{module}.base_layer.{name}" if module in adapted_modules else target.tensor)
