"""Writes PEFT adapters: tensors and a configuration from a raw tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.bound import Provenance, provenance_of
from reparax.core.calls import require_chains
from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import locate_errors
from reparax.core.leaf import Perturbation
from reparax.core.paths import Names, PyTree
from reparax.io._layouts import write_layout
from reparax.io._parameters import Rules, require_known
from reparax.io._peft_methods import BIAS, LORA, METHODS, TOKENS, method_of
from reparax.io._peft_row import Method, StageNode, Written, known_number
from reparax.io._peft_target import ATTENTION, PREFIX, Target, targets_of, wrapper_names
from reparax.stages.adapters import Gain
from reparax.stages.quantized import FakeQuantized, Quantized
from reparax.stages.shared import Tie
from reparax.stages.sparse import Freeze

_MERGE = "Merge it with `p.fold(raw)`."
Targets = Mapping[str, Target]


def to_peft(
    p: Parametrization, raw: PyTree, *, names: Rules = None, layouts: Rules = None, roles: PyTree = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Converts a raw tree of ``p`` to an adapter that PEFT can load: its tensors and its configuration.

    Save the tensors with ``safetensors.numpy.save_file(tensors, "adapter_model.safetensors", {"format": "pt"})``, and
    the configuration with ``json.dump`` as ``adapter_config.json``; add ``base_model_name_or_path`` and ``task_type``
    if you need them. Biases and whole modules that train beside the adapters are included. Perturbations, the rounding
    of :class:`FakeQuantized` and the base are left out.

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
      ValueError: If PEFT has no equivalent for the stages of a parameter; the error names each such parameter. Also for
        LoRA that began with ``init_weights="pissa"`` or ``"olora"``, as PEFT would add it to a base that it has left.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.LoRA(1, alpha=2.0)
      >>> raw = p.init({"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}, jax.random.key(0))
      >>> tensors, config = rpx.io.to_peft(p, raw)
      >>> {name: x.shape for name, x in tensors.items()}
      {'base_model.model.dense.lora_A.weight': (1, 3), 'base_model.model.dense.lora_B.weight': (2, 1)}
      >>> config["peft_type"], config["r"], config["lora_alpha"], config["target_modules"]
      ('LORA', 1, 2, ['dense'])
    """
    require_chains("to_peft(p, raw)", p)
    weights = Chain(tuple(stage for stage in Chain((p,)).stages if not isinstance(stage, Perturbation | FakeQuantized)))
    with locate_errors("to_peft"):
        provenance = provenance_of(weights.deterministic, raw)
        targets = targets_of(provenance.effective, names, layouts, roles)
    nodes, free, lines = _sort_arrays(provenance, targets)
    written_of: dict[str, dict[str, Written]] = {}
    for tensor, node in nodes.items():
        try:
            if method := _method_at(tensor, nodes, targets):
                written_of.setdefault(method.name, {})[tensor] = _write_node(method, node)
        except ValueError as error:
            lines.append(f"{targets[tensor].path}: {error}")
    tokens = written_of.pop(TOKENS.name, {}) if LORA.name in written_of else {}
    if not written_of and not lines:
        raise ValueError(
            "to_peft: expected adapters of one method, got none. Write a model without adapters by "
            "`rpx.io.to_torch(p, raw)`."
        )
    if len(written_of) != 1 and not lines:
        lines.append(f"expected adapters of one method, got {', '.join(sorted(written_of))}")
    if lines:
        text = "\n  ".join(dict.fromkeys(lines))
        raise ValueError(f"to_peft: PEFT has no such adapter:\n  {text}\n{_MERGE}")
    ((kind, written),) = written_of.items()
    method = METHODS[kind]
    with locate_errors("to_peft"):
        wrappers = wrapper_names(targets[tensor] for tensor in written if targets[tensor].n_experts)
    try:
        modules = _with_biases(written, targets)
        method_config = method.configure(modules)
        tensors = _name_tensors(method, {wrappers.get(name, name): x for name, x in modules.items()})
    except ValueError as error:
        raise ValueError(f"to_peft: {error}. {_MERGE}") from error
    config = {"peft_type": method.name, "task_type": None, "base_model_name_or_path": None, "inference_mode": True}
    config |= {"target_modules": sorted(modules.keys() - wrappers)} | method_config
    config |= {"target_parameters": sorted(wrappers)} if wrappers else {}
    if "fan_in_fan_out" in method.settings.get("flag", ""):
        config |= {"fan_in_fan_out": any(targets[tensor].layout == "conv1d" for tensor in written)}
    if tokens:
        tables = {targets[tensor].module: x for tensor, x in tokens.items()}
        tensors |= _name_tensors(TOKENS, {f"{module}.token_adapter": x for module, x in tables.items()})
        config |= {"trainable_token_indices": {module: [*x.flags["token_indices"]] for module, x in tables.items()}}
    beside, config_beside = _write_beside(method, free, targets, {targets[tensor].module for tensor in written})
    return dict(sorted((tensors | beside).items())), config | config_beside


def _with_biases(written_of: Mapping[str, Written], targets: Targets) -> dict[str, Written]:
    """What is written for each module; a difference of its bias is multiplied by the factor of its weight."""
    modules = {targets[tensor].owner: x for tensor, x in written_of.items() if BIAS not in x.tensors}
    for tensor, bias in written_of.items():
        if BIAS not in bias.tensors:
            continue
        if (module := targets[tensor].module) not in modules:
            raise ValueError(f"PEFT trains a difference of a bias beside that of its weight, but {module!r} has none")
        weight, x = modules[module], bias.tensors[BIAS]
        if bias.factor != weight.factor:
            x = x * (known_number(bias.factor) / known_number(weight.factor))
        modules[module] = replace(
            weight, tensors={**weight.tensors, BIAS: x}, flags={**weight.flags, "lora_bias": True}
        )
    return modules


def _name_tensors(method: Method, modules: Mapping[str, Written]) -> dict[str, np.ndarray]:
    """The tensors of all modules by their names, and those that they share."""
    tensors = {
        f"{PREFIX}{module}.{end}": np.asarray(x)
        for module, written in modules.items()
        for end, x in written.tensors.items()
    }
    for bank in method.banks:
        parts = [tensors.pop(f"{PREFIX}{module}.{bank}") for module in modules]
        largest = tensors[f"base_model.{bank}"] = max(parts, key=np.size)
        if not all(np.array_equal(part, largest[tuple(map(slice, part.shape))]) for part in parts):
            raise ValueError(f"PEFT has one {bank} for all modules, but got several")
    return tensors


def _sort_arrays(provenance: Provenance, targets: Targets) -> tuple[dict[str, StageNode], dict[str, Array], list[str]]:
    """The adapted tensors, the other tensors that train, and the errors for stages that PEFT does not have."""
    nodes: dict[str, StageNode] = {}
    free: dict[str, Array] = {}
    lines: list[str] = []
    for tensor, target in targets.items():
        try:
            node = _node_at(provenance, provenance.places[target.path], target)
            if not isinstance(node, StageNode) and jnp.issubdtype(node.dtype, jnp.inexact):
                require_known([target])
                free[tensor] = target.part(node)
            elif isinstance(node, StageNode) and not isinstance(node.stage, Freeze | Quantized):
                nodes[tensor] = node.of_one()
        except ValueError as error:
            lines.append(f"{target.path}: {error}")
    return nodes, free, lines


def _node_at(provenance: Provenance, place: Names, target: Target) -> Any:
    """The array of the raw tree at a place, or the stage that makes it, with its values."""
    if place not in provenance.producers:
        return provenance.raw.arrays[place]
    stage, values = provenance.producers[place]
    return StageNode(stage, {name: _node_at(provenance, at, target) for name, at in values.items()}, target)


def _method_at(tensor: str, nodes: Mapping[str, StageNode], targets: Targets) -> Method | None:
    """The method that adapts a tensor; None for a bias whose gain is that of its outputs, as in IA3.

    Raises:
      ValueError: If PEFT has no adapter there, or another one of its bias.
    """
    node, target = nodes[tensor], targets[tensor]
    attention = target.module.removesuffix("out_proj") if tensor.endswith("out_proj.weight") else f"{target.module}."
    weights_of_attention = (f"{attention}out_proj.weight", f"{attention}in_proj_weight")
    if tensor in weights_of_attention and weights_of_attention[1] in targets:
        raise ValueError(ATTENTION)
    if not isinstance(node.stage, Gain):
        return method_of(node)
    if (base := node.maker("w")) is None:
        raise ValueError(f"PEFT does not train what {node.stage!r} multiplies. Put `Freeze()` before it")
    if not isinstance(base, Freeze | Quantized):
        raise ValueError(f"PEFT has no equivalent of {node.stage!r} with other stages on its 'w'")
    if len(target.shape) == 1:
        if not isinstance(node.maker("g"), Tie):
            raise ValueError("PEFT multiplies a bias by the factors of its outputs. Tie the two gains")
        return None
    bias, axis = f"{target.module}.bias", node.stage.axis
    if (
        isinstance(axis, int)
        and axis % len(target.shape) == target.output_axis
        and bias in targets
        and bias not in nodes
    ):
        raise ValueError(
            f"PEFT also multiplies {targets[bias].path!r} by the factors of its outputs. Give it a tied Gain"
        )
    return method_of(node)


def _write_node(method: Method, node: StageNode) -> Written:
    """What PEFT stores of an adapted parameter; raises an error if PEFT would not find it."""
    target = node.target
    method.require_layout(target)
    written = method.write(node)
    module, _, name = target.tensor.rpartition(".")
    expected = "bias" if BIAS in written.tensors else "weight"
    if not target.n_experts and (name != expected or not module):
        raise ValueError(
            f"PEFT adapts the {expected} of a module, such as 'dense.{expected}', but this is {target.tensor!r} in "
            f"torch. Name it by `names`"
        )
    return written


def _is_bias(tensor: str) -> bool:
    """Whether PEFT takes a tensor for a bias."""
    return tensor.rpartition(".")[2] == "bias"


def _write_beside(
    method: Method, free: Mapping[str, Array], targets: Targets, adapted_modules: set[str]
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
    if biases and method.biases is None:
        raise ValueError(
            f"to_peft: PEFT trains no biases with {method.name}, but here train {paths_text}. Freeze them."
        )
    if biases not in (set(), all_biases, adapted_biases):
        raise ValueError(
            f"to_peft: PEFT trains all biases, or those of adapted modules, but here train {paths_text}. Freeze them, "
            f"or train the others too."
        )
    tensors: dict[str, np.ndarray] = {}
    for tensor, x in free.items():
        module, _, name = tensor.rpartition(".")
        wrapped = f"{module}.base_layer.{name}" if module in adapted_modules else tensor
        tensors[PREFIX + wrapped] = np.asarray(write_layout(x, targets[tensor].layout))
    kind = "none" if not biases else "all" if biases == all_biases else method.biases
    config = {"bias": kind} if biases or method is LORA else {}
    return tensors, config | {"modules_to_save": sorted(saved_modules) or None}
