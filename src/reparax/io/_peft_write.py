"""Writes PEFT adapters: tensors and a configuration from a raw tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.calls import require_chains
from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import locate_errors
from reparax.core.leaf import Perturbation
from reparax.core.paths import Names, PyTree
from reparax.core.plan import Plan, plan_for
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
        plan = plan_for(weights, raw, mean=True)
        targets = targets_of(plan.effective, names, layouts, roles)
    nodes, free, lines = _sort_arrays(plan, targets)
    written_by_method, errors_of_nodes = _write_nodes(nodes, targets)
    lines += errors_of_nodes
    tokens = written_by_method.pop(TOKENS.name, {}) if LORA.name in written_by_method else {}
    method = _only_method(written_by_method, lines)
    written = written_by_method[method.name]
    with locate_errors("to_peft"):
        wrappers = wrapper_names(targets[tensor] for tensor in written if targets[tensor].n_experts)
    try:
        modules = _with_biases(written, targets)
        config = _configure(method, modules, wrappers)
        tensors = _name_tensors(method, {wrappers.get(name, name): x for name, x in modules.items()})
    except ValueError as error:
        raise ValueError(f"to_peft: {error}. {_MERGE}") from error
    if "fan_in_fan_out" in method.settings.get("flag", ""):
        config["fan_in_fan_out"] = any(targets[tensor].layout == "conv1d" for tensor in written)
    if tokens:
        tables = {targets[tensor].module: table for tensor, table in tokens.items()}
        tensors |= _name_tensors(TOKENS, {f"{module}.token_adapter": table for module, table in tables.items()})
        indices = {module: [*table.flags["token_indices"]] for module, table in tables.items()}
        config["trainable_token_indices"] = indices
    beside, config_beside = _write_beside(method, free, targets, {targets[tensor].module for tensor in written})
    return dict(sorted((tensors | beside).items())), config | config_beside


def _write_nodes(nodes: Mapping[str, StageNode], targets: Targets) -> tuple[dict[str, dict[str, Written]], list[str]]:
    """What PEFT stores of each adapted tensor, by the method, and an error for each that it does not have."""
    lines: list[str] = []
    written_by_method: dict[str, dict[str, Written]] = {}
    for tensor, node in nodes.items():
        try:
            method = _method_at(tensor, nodes, targets)
            if method is not None:
                written_by_method.setdefault(method.name, {})[tensor] = _write_node(method, node)
        except ValueError as error:
            lines.append(f"{targets[tensor].path}: {error}")
    return written_by_method, lines


def _only_method(names: Collection[str], lines: Sequence[str]) -> Method:
    """The method of all adapters; raises an error for the lines, or if there is none or another one too."""
    if not names and not lines:
        raise ValueError(
            "to_peft: expected adapters of one method, got none. Write a model without adapters by "
            "`rpx.io.to_torch(p, raw)`."
        )
    if len(names) > 1 and not lines:
        lines = [f"expected adapters of one method, got {', '.join(sorted(names))}"]
    if lines:
        text = "\n  ".join(dict.fromkeys(lines))
        raise ValueError(f"to_peft: PEFT has no such adapter:\n  {text}\n{_MERGE}")
    return METHODS[next(iter(names))]


def _configure(method: Method, modules: Mapping[str, Written], wrappers: Mapping[str, str]) -> dict[str, Any]:
    """The configuration for adapted modules, some of which are stacks of experts with wrappers of their own."""
    config = {"peft_type": method.name, "task_type": None, "base_model_name_or_path": None, "inference_mode": True}
    config |= {"target_modules": sorted(modules.keys() - wrappers)} | method.configure(modules)
    return config | ({"target_parameters": sorted(wrappers)} if wrappers else {})


def _with_biases(written_of: Mapping[str, Written], targets: Targets) -> dict[str, Written]:
    """What is written for each module; a difference of its bias is multiplied by the factor of its weight."""
    biases = {targets[tensor].module: x for tensor, x in written_of.items() if BIAS in x.tensors}
    modules = {targets[tensor].owner: x for tensor, x in written_of.items() if BIAS not in x.tensors}
    for module, bias in biases.items():
        if module not in modules:
            raise ValueError(f"PEFT trains a difference of a bias beside that of its weight, but {module!r} has none")
        weight, x = modules[module], bias.tensors[BIAS]
        if bias.factor != weight.factor:
            x = x * (known_number(bias.factor) / known_number(weight.factor))
        flags = {**weight.flags, "lora_bias": True}
        modules[module] = replace(weight, tensors={**weight.tensors, BIAS: x}, flags=flags)
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


def _sort_arrays(plan: Plan, targets: Targets) -> tuple[dict[str, StageNode], dict[str, Array], list[str]]:
    """The adapted tensors, the other tensors that train, and the errors for stages that PEFT does not have."""
    nodes: dict[str, StageNode] = {}
    free: dict[str, Array] = {}
    lines: list[str] = []
    for tensor, target in targets.items():
        try:
            node = _node_at(plan, plan.places[target.path], target)
            if isinstance(node, StageNode):
                nodes |= {} if isinstance(node.stage, Freeze | Quantized) else {tensor: node.of_one()}
            elif jnp.issubdtype(node.dtype, jnp.inexact):
                require_known([target])
                free[tensor] = target.part(node)
        except ValueError as error:
            lines.append(f"{target.path}: {error}")
    return nodes, free, lines


def _node_at(plan: Plan, place: Names, target: Target) -> Any:
    """The array of the raw tree at a place, or the stage that makes it, with its values."""
    if place not in plan.producers:
        return plan.raw.arrays[place]
    stage, values = plan.producers[place]
    return StageNode(stage, {name: _node_at(plan, at, target) for name, at in values.items()}, target)


def _method_at(tensor: str, nodes: Mapping[str, StageNode], targets: Targets) -> Method | None:
    """The method that adapts a tensor; None for a bias whose gain is that of its outputs, as in IA3.

    Raises:
      ValueError: If PEFT has no adapter there, or another one of its bias.
    """
    node, target = nodes[tensor], targets[tensor]
    attention = target.module.removesuffix("out_proj") if tensor.endswith("out_proj.weight") else f"{target.module}."
    in_proj, out_proj = f"{attention}in_proj_weight", f"{attention}out_proj.weight"
    if in_proj in targets and tensor in (in_proj, out_proj):
        raise ValueError(ATTENTION)
    if not isinstance(node.stage, Gain):
        return method_of(node)
    base = node.maker("w")
    if base is None:
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
    _require_separate(saved_modules, adapted_modules, {target.module for target in targets.values()})
    others = {tensor: target for tensor, target in targets.items() if target.module not in saved_modules}
    tensors: dict[str, np.ndarray] = {}
    for tensor, x in free.items():
        module, _, name = tensor.rpartition(".")
        wrapped = f"{module}.base_layer.{name}" if module in adapted_modules else tensor
        tensors[PREFIX + wrapped] = np.asarray(write_layout(x, targets[tensor].layout))
    which_biases = _which_biases(method, free.keys() & others.keys(), others, adapted_modules)
    config = {"bias": which_biases} if which_biases != "none" or method is LORA else {}
    return tensors, config | {"modules_to_save": sorted(saved_modules) or None}


def _require_separate(saved_modules: set[str], adapted_modules: set[str], modules: set[str]) -> None:
    """Refuses modules that PEFT would have to save whole and to adapt, or whose names it would find in others."""
    if clashes := sorted(saved_modules & adapted_modules):
        raise ValueError(f"to_peft: PEFT either adapts a module or saves it whole, but {clashes[0]!r} needs both.")
    for saved in saved_modules:
        if also := sorted(module for module in modules - saved_modules if module.endswith(saved)):
            raise ValueError(
                f"to_peft: PEFT matches the names of saved modules with suffixes, but {saved!r} is also a suffix of "
                f"{also[0]!r}. Freeze {saved!r}."
            )


def _which_biases(method: Method, biases: set[str], targets: Targets, adapted_modules: set[str]) -> str | None:
    """PEFT's word for the biases that train: none of the targets, all of them, or those of adapted modules."""
    all_biases = {tensor for tensor in targets if _is_bias(tensor)}
    adapted_biases = {tensor for tensor in all_biases if targets[tensor].module in adapted_modules}
    paths_text = ", ".join(map(repr, sorted({targets[tensor].path for tensor in biases})))
    if not biases:
        return "none"
    if method.biases is None:
        raise ValueError(
            f"to_peft: PEFT trains no biases with {method.name}, but here train {paths_text}. Freeze them."
        )
    if biases not in (all_biases, adapted_biases):
        raise ValueError(
            f"to_peft: PEFT trains all biases, or those of adapted modules, but here train {paths_text}. Freeze them, "
            f"or train the others too."
        )
    return "all" if biases == all_biases else method.biases
