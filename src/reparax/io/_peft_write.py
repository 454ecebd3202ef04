"""Writes PEFT adapters: converts a raw tree to tensors and a configuration.

The arrays of the model are divided into arrays with an adapter (:class:`AdaptedArray`) and arrays that train whole.
Each adapter is converted separately to the tensors and settings that PEFT stores for it (:class:`PeftForm`). The
results are collected by module, and one configuration describes all modules. A single error reports all arrays that
have no equivalent in PEFT.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.axes import list_axes
from reparax.core.calls import require_chains
from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import locate_errors
from reparax.core.leaf import Perturbation
from reparax.core.paths import PyTree
from reparax.core.plan import Plan, plan_for
from reparax.io._layouts import to_layout
from reparax.io._parameters import Rules, require_layouts
from reparax.io._peft_adapters import AdaptedArray, PeftForm, concrete_number, write_adapter
from reparax.io._peft_config import BIAS, is_adapted, is_feedforward
from reparax.io._peft_target import ATTENTION, PREFIX, Target, targets_by_name, wrapper_names
from reparax.stages.adapters import Gain, LoRA
from reparax.stages.norms import WeightNorm
from reparax.stages.quantized import FakeQuantized, Quantized
from reparax.stages.shared import Tie
from reparax.stages.sparse import Freeze

_MERGE = "Otherwise, merge the adapter with `p.fold(raw)`."
Targets = Mapping[str, Target]
Forms = dict[str, PeftForm]


def to_peft(
    p: Parametrization, raw: PyTree, *, names: Rules = None, layouts: Rules = None, roles: PyTree = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Converts a raw tree of ``p`` to an adapter that PEFT can load: its tensors and its configuration.

    Save the tensors with ``safetensors.numpy.save_file(tensors, "adapter_model.safetensors", {"format": "pt"})``, and
    the configuration with ``json.dump`` as ``adapter_config.json``. Add ``base_model_name_or_path`` and ``task_type``
    to the configuration if you need these settings. Biases and whole modules that train beside the adapters are
    included. Perturbations (such as noise), the rounding of :class:`FakeQuantized` and the base weights are left out.

    Args:
      p: The chain. Its adapters must belong to one of the methods that :func:`from_peft` reads.
      raw: A raw tree of ``p``.
      names: As for :func:`from_peft`.
      layouts: As for :func:`from_peft`.
      roles: As for :func:`from_peft`.

    Returns:
      A dict of the tensors under PEFT's names, and the contents of ``adapter_config.json``.

    Raises:
      TypeError: If ``p`` is not a parametrization.
      ValueError: If PEFT has no equivalent of the stages of a parameter; the error names each such parameter. This
        includes LoRA with ``init_weights="pissa"`` or ``"olora"``, which changes the base weight, whereas PEFT adds the
        factors to the original base weight.

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
    require_chains("io.to_peft(p, raw)", p)
    weights = Chain(tuple(stage for stage in Chain((p,)).stages if not isinstance(stage, Perturbation | FakeQuantized)))
    with locate_errors("to_peft"):
        plan = plan_for(weights, raw, mean=True)
        targets = targets_by_name(plan.effective, names, layouts, roles, _layouts_by_stage(plan))
    adapted, free, lines = _sort_arrays(plan, targets)
    written_by_method, errors = _write_adapters(adapted, targets)
    tokens = written_by_method.pop("TRAINABLE_TOKENS", {}) if "LORA" in written_by_method else {}
    method = _only_method(written_by_method, [*lines, *errors])
    written = written_by_method[method]
    with locate_errors("to_peft"):
        wrappers = wrapper_names(targets[tensor] for tensor in written if targets[tensor].n_experts)
    try:
        modules = _written_by_module(written, targets)
        config = _configure(method, modules, wrappers, {target.module for target in targets.values()})
    except ValueError as error:
        raise ValueError(f"to_peft: {error}. {_MERGE}") from error
    tensors = _name_tensors({wrappers.get(name, name): x for name, x in modules.items()})
    if method != "TRAINABLE_TOKENS":
        config["fan_in_fan_out"] = any(targets[tensor].layout == "conv1d" for tensor in written)
    if tokens:
        tables = {targets[tensor].module: table for tensor, table in tokens.items()}
        tensors |= _name_tensors({f"{module}.token_adapter": table for module, table in tables.items()})
        indices = {module: [*table.settings["token_indices"]] for module, table in tables.items()}
        config["trainable_token_indices"] = indices
    beside, config_beside = _write_other_trained(method, free, targets, {targets[tensor].module for tensor in written})
    return dict(sorted((tensors | beside).items())), config | config_beside


def _write_adapters(adapted: Mapping[str, AdaptedArray], targets: Targets) -> tuple[dict[str, Forms], list[str]]:
    """Converts each adapted array to the tensors and settings that PEFT stores for it.

    Returns:
      The converted arrays, keyed by method and torch name, and an error text for each array that has no equivalent in
      PEFT.
    """
    lines: list[str] = []
    written_by_method: dict[str, Forms] = {}
    for tensor, array in adapted.items():
        try:
            _require_no_torch_attention(tensor, targets)
            if isinstance(array.producer, Gain):
                _require_ia3_gain(array, adapted, targets)
                if len(array.target.shape) == 1:
                    continue  # The gain of a bias is tied to the gain of the outputs, so IA3 does not store it.
            method, written = write_adapter(array)
            _require_findable_name(written, array.target)
            written_by_method.setdefault(method, {})[tensor] = written
        except ValueError as error:
            lines.append(f"{array.target.path}: {error}")
    return written_by_method, lines


def _only_method(names: Collection[str], lines: Sequence[str]) -> str:
    """Returns the only PEFT method in ``names``. Raises an error unless it is alone and ``lines`` is empty."""
    if not names and not lines:
        raise ValueError(
            "to_peft: the chain must have adapters of one PEFT method, but has none. Write a model without adapters "
            "with `rpx.io.to_torch(p, raw)`."
        )
    if len(names) > 1 and not lines:
        lines = [f"all adapters must be of one PEFT method, but got {', '.join(sorted(names))}"]
    if lines:
        text = "\n  ".join(dict.fromkeys(lines))
        raise ValueError(f"to_peft cannot write this adapter:\n  {text}\n{_MERGE}")
    return next(iter(names))


def _configure(
    method: str, modules: Forms, wrappers: Mapping[str, str], known_modules: Collection[str]
) -> dict[str, Any]:
    """Returns the PEFT configuration for adapted modules and stacks of experts. The latter are keys of ``wrappers``."""
    config = {"peft_type": method, "task_type": None, "base_model_name_or_path": None, "inference_mode": True}
    config |= _names_setting("target_modules", is_adapted, modules.keys() - wrappers, known_modules)
    if method == "LORA":
        config |= _configure_lora(modules)
    elif method == "IA3":
        inputs = {module for module, written in modules.items() if written.settings["inputs"]}
        config |= _names_setting("feedforward_modules", is_feedforward, inputs, modules)
    else:
        config |= {"token_indices": _equal_setting(modules, "token_indices")}
    return config | ({"target_parameters": sorted(wrappers)} if wrappers else {})


def _configure_lora(modules: Forms) -> dict[str, Any]:
    """Returns PEFT's settings for the ranks, alphas and flags of LoRA.

    PEFT divides an alpha by the rank, or by the square root of the rank with ``use_rslora``.
    """
    by_root = all(written.settings["use_rslora"] for written in modules.values())
    ranks = {module: written.rank for module, written in modules.items()}
    divisors = {module: math.sqrt(rank) if by_root else rank for module, rank in ranks.items()}
    alphas = {module: written.factor * divisors[module] for module, written in modules.items()}
    flags = {name: _equal_setting(modules, name) for name in ("use_dora", "lora_bias")} | {"use_rslora": by_root}
    return flags | _number_setting("r", "rank_pattern", ranks) | _number_setting("lora_alpha", "alpha_pattern", alphas)


def _equal_setting(modules: Forms, name: str) -> Any:
    """Returns the value of a setting that must be equal for all modules. Raises an error if modules differ."""
    values = {written.settings[name] for written in modules.values()}
    if len(values) > 1:
        text = ", ".join(f"{written.settings[name]} at {module!r}" for module, written in modules.items())
        raise ValueError(f"PEFT has one {name} for all modules, but got {text}. Use equal values")
    return values.pop()


def _number_setting(name: str, patterns: str, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Returns the settings for each module's rank or alpha: the most common number, and patterns for other modules."""
    rounded = {module: round(x, 9) for module, x in numbers.items()}
    number_of_module = {module: int(x) if float(x).is_integer() else x for module, x in rounded.items()}
    common = Counter(number_of_module.values()).most_common(1)[0][0]
    # Without `^`, the name would also match any longer module name that ends with it.
    exceptions = {
        f"^{module}" if any(other.endswith(f".{module}") for other in numbers) else module: x
        for module, x in number_of_module.items()
        if x != common
    }
    return {name: common, patterns: dict(sorted(exceptions.items()))}


def _names_setting(
    setting: str, names: Callable[[Mapping[str, Any], str], bool], modules: Collection[str], known: Collection[str]
) -> dict[str, Any]:
    """Returns the setting that names ``modules``: a list, or a regular expression if a list would match others too.

    ``names`` returns whether a configuration names a module, by PEFT's rules.
    """
    config: dict[str, Any] = {setting: sorted(modules)}
    is_clear = {module for module in known if names(config, module)} <= set(modules)
    return config if is_clear else {setting: "|".join(map(re.escape, sorted(modules)))}


def _written_by_module(written_of: Forms, targets: Targets) -> Forms:
    """Merges what PEFT stores for each module's weight and bias. Rescales the bias update to the weight's factor."""
    biases = {targets[tensor].module: x for tensor, x in written_of.items() if BIAS in x.tensors}
    modules = {targets[tensor].adapted_name: x for tensor, x in written_of.items() if BIAS not in x.tensors}
    for module, bias in biases.items():
        if module not in modules:
            raise ValueError(f"PEFT adapts a bias only with its weight. Add a LoRA for the weight of {module!r}")
        weight, x = modules[module], bias.tensors[BIAS]
        if bias.factor != weight.factor:
            x = x * (concrete_number(bias.factor) / concrete_number(weight.factor))
        settings = {**weight.settings, "lora_bias": True}
        modules[module] = replace(weight, tensors={**weight.tensors, BIAS: x}, settings=settings)
    return modules


def _name_tensors(modules: Forms) -> dict[str, np.ndarray]:
    """Collects the tensors of all modules under their full names."""
    return {
        f"{PREFIX}{module}.{suffix}": np.asarray(x)
        for module, written in modules.items()
        for suffix, x in written.tensors.items()
    }


def _sort_arrays(plan: Plan, targets: Targets) -> tuple[dict[str, AdaptedArray], dict[str, Array], list[str]]:
    """Splits the arrays of the model into arrays with an adapter and arrays that train whole.

    Returns:
      The adapted arrays, the arrays that train whole, and an error text for each array that trains whole if its layout
      is unknown.
    """
    adapted: dict[str, AdaptedArray] = {}
    free: dict[str, Array] = {}
    lines: list[str] = []
    for tensor, target in targets.items():
        array = AdaptedArray(plan, plan.places[target.path], target)
        try:
            if array.producer:
                adapted |= {} if isinstance(array.producer, Freeze | Quantized) else {tensor: array}
            elif array.place in plan.raw.frame.state:
                continue  # Model state, such as batch statistics, is not trained, so it is not written.
            elif jnp.issubdtype((x := plan.raw.arrays[array.place]).dtype, jnp.inexact):
                require_layouts([target])
                free[tensor] = target.slice_of(x).reshape(target.shape)
        except ValueError as error:
            lines.append(f"{target.path}: {error}")
    return adapted, free, lines


def _layouts_by_stage(plan: Plan) -> dict[str, str]:
    """Maps the path of each attention kernel with a LoRA to the layout implied by LoRA's axes.

    An attention kernel is recognized by its one input axis and two output axes.
    """
    layouts: dict[str, str] = {}
    for path, place in plan.places.items():
        stage, values = plan.producers.get(place, (None, {}))
        if isinstance(stage, WeightNorm) and values["v"] in plan.producers:
            stage, _ = plan.producers[values["v"]]
        if isinstance(stage, LoRA):
            ndim = len(plan.after.arrays[place].shape) - len(list_axes(stage.stacked))
            if stage.axes_of(ndim) == ((0,), (1, 2)):
                layouts[path] = "to_heads"
    return layouts


def _require_no_torch_attention(tensor: str, targets: Targets) -> None:
    """Raises an error for a tensor of torch's ``nn.MultiheadAttention``."""
    module = targets[tensor].module
    attention = module.removesuffix("out_proj") if tensor.endswith("out_proj.weight") else f"{module}."
    in_proj, out_proj = f"{attention}in_proj_weight", f"{attention}out_proj.weight"
    if in_proj in targets and tensor in (in_proj, out_proj):
        raise ValueError(ATTENTION)


def _require_ia3_gain(array: AdaptedArray, adapted: Mapping[str, AdaptedArray], targets: Targets) -> None:
    """Raises an error if PEFT's IA3 has no equivalent of the gain on an array.

    IA3 multiplies a frozen weight by a gain. A gain on the outputs also multiplies the bias.
    """
    gain, target = array.producer, array.target
    base = array.value("w").producer
    if base is None:
        raise ValueError(f"PEFT freezes {target.path!r} under a gain. Put `Freeze()` before {gain!r} in the chain")
    if not isinstance(base, Freeze | Quantized):
        raise array.error_of_other_stage("w")
    if len(target.shape) == 1:
        if not isinstance(array.value("g").producer, Tie):
            raise ValueError(
                f"PEFT multiplies {target.path!r} by the gain of the outputs. Tie the gains with `rpx.Tie`"
            )
        return
    bias, axis = f"{target.module}.bias", array.stage.axis
    is_of_outputs = isinstance(axis, int) and axis % len(target.shape) == target.output_axis
    if is_of_outputs and bias in targets and bias not in adapted:
        raise ValueError(
            f"PEFT also multiplies the bias {targets[bias].path!r} by the factors of {gain!r}. Add a `Gain` for the "
            f"bias, tied to this gain"
        )


def _require_findable_name(written: PeftForm, target: Target) -> None:
    """Raises an error if PEFT would not find the adapted array by its name in torch."""
    module, _, name = target.tensor.rpartition(".")
    expected = "bias" if BIAS in written.tensors else "weight"
    if not target.n_experts and (name != expected or not module):
        raise ValueError(
            f"PEFT adapts the {expected} of a module, such as 'dense.{expected}', but {target.path!r} is "
            f"{target.tensor!r} in torch. Rename it with `names`"
        )


def _is_bias(tensor: str) -> bool:
    """Returns whether a torch tensor is a bias for PEFT, that is, whether its own name is ``bias``."""
    return tensor.rpartition(".")[2] == "bias"


def _write_other_trained(
    method: str, free: Mapping[str, Array], targets: Targets, adapted_modules: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns the tensors that train beside the adapters, keyed by PEFT's names, and the settings for them."""
    saved_modules = {targets[tensor].module for tensor in free if not _is_bias(tensor)}
    _require_savable_modules(saved_modules, adapted_modules, free, targets)
    others = {tensor: target for tensor, target in targets.items() if target.module not in saved_modules}
    tensors: dict[str, np.ndarray] = {}
    for tensor, x in free.items():
        module, _, name = tensor.rpartition(".")
        wrapped = f"{module}.base_layer.{name}" if module in adapted_modules else tensor
        tensors[PREFIX + wrapped] = np.asarray(to_layout(x, targets[tensor].layout))
    biases = _biases_setting(method, free.keys() & others.keys(), others, adapted_modules)
    config = {"bias": biases} if method == "LORA" else {}
    return tensors, config | {"modules_to_save": sorted(saved_modules) or None}


def _require_savable_modules(
    saved_modules: Collection[str], adapted_modules: Collection[str], free: Collection[str], targets: Targets
) -> None:
    """Raises an error if a module to save whole is adapted or partly frozen, or if its name is ambiguous in PEFT."""
    for tensor, target in targets.items():
        module = target.module
        if module in saved_modules and module in adapted_modules:
            raise ValueError(f"to_peft: PEFT cannot both adapt {module!r} and save it whole. Freeze its other arrays.")
        if module in saved_modules and tensor not in free and jnp.issubdtype(target.dtype, jnp.inexact):
            raise ValueError(
                f"to_peft: PEFT trains each array of a module that it saves whole, such as {module!r}, but "
                f"{target.path!r} is frozen. Freeze all arrays of the module, or none."
            )
        saved = next((saved for saved in saved_modules if module.endswith(saved)), module)
        if module not in saved_modules and saved != module:
            raise ValueError(
                f"to_peft: PEFT saves each module whose name ends in {saved!r}, but {module!r}, which also does, is "
                f"not trained whole. Freeze {saved!r}."
            )


def _biases_setting(method: str, biases: set[str], targets: Targets, adapted_modules: set[str]) -> str:
    """Returns the setting ``bias``: "none", "all" or "lora_only". Raises an error if any other set of biases trains."""
    all_biases = {tensor for tensor in targets if _is_bias(tensor)}
    adapted_biases = {tensor for tensor in all_biases if targets[tensor].module in adapted_modules}
    paths_text = ", ".join(map(repr, sorted({targets[tensor].path for tensor in biases})))
    if not biases:
        return "none"
    if method != "LORA":
        raise ValueError(
            f"to_peft: PEFT trains no biases with {method}, but this chain does: {paths_text}. Freeze them."
        )
    if biases not in (all_biases, adapted_biases):
        raise ValueError(
            f"to_peft: PEFT trains all biases, or the biases of all adapted modules, but this chain trains only "
            f"{paths_text}. Freeze these biases, or train the others too."
        )
    return "all" if biases == all_biases else "lora_only"
