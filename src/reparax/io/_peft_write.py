"""Writes PEFT adapters: tensors and a configuration from a raw tree."""

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
from reparax.io._layouts import write_layout
from reparax.io._parameters import Rules, require_known
from reparax.io._peft_adapters import Made, Written, known_number, write_adapter
from reparax.io._peft_config import BIAS, is_adapted, is_fed_forward
from reparax.io._peft_target import ATTENTION, PREFIX, Target, targets_of, wrapper_names
from reparax.stages.adapters import Gain, LoRA
from reparax.stages.norms import WeightNorm
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
        targets = targets_of(plan.effective, names, layouts, roles, _layouts_by_stage(plan))
    adapted, free, lines = _sort_arrays(plan, targets)
    written_by_method, errors = _write_adapters(adapted, targets)
    tokens = written_by_method.pop("TRAINABLE_TOKENS", {}) if "LORA" in written_by_method else {}
    method = _only_method(written_by_method, [*lines, *errors])
    written = written_by_method[method]
    with locate_errors("to_peft"):
        wrappers = wrapper_names(targets[tensor] for tensor in written if targets[tensor].n_experts)
    try:
        modules = _with_biases(written, targets)
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
    beside, config_beside = _write_beside(method, free, targets, {targets[tensor].module for tensor in written})
    return dict(sorted((tensors | beside).items())), config | config_beside


def _write_adapters(adapted: Mapping[str, Made], targets: Targets) -> tuple[dict[str, dict[str, Written]], list[str]]:
    """What PEFT stores of each adapted tensor, by the method, and an error for each that is not written."""
    lines: list[str] = []
    written_by_method: dict[str, dict[str, Written]] = {}
    for tensor, made in adapted.items():
        try:
            _require_writable(tensor, targets)
            if _is_tied_gain(made, adapted, targets):
                continue
            method, written = write_adapter(made)
            _require_found(written, made.target)
            written_by_method.setdefault(method, {})[tensor] = written
        except ValueError as error:
            lines.append(f"{made.target.path}: {error}")
    return written_by_method, lines


def _only_method(names: Collection[str], lines: Sequence[str]) -> str:
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
        raise ValueError(f"to_peft does not write this adapter:\n  {text}\n{_MERGE}")
    return next(iter(names))


def _configure(
    method: str, modules: Mapping[str, Written], wrappers: Mapping[str, str], known_modules: Collection[str]
) -> dict[str, Any]:
    """The configuration for adapted modules, some of which are stacks of experts with wrappers of their own."""
    config = {"peft_type": method, "task_type": None, "base_model_name_or_path": None, "inference_mode": True}
    config |= _chosen("target_modules", is_adapted, modules.keys() - wrappers, known_modules)
    if method == "LORA":
        config |= _configure_lora(modules)
    elif method == "IA3":
        inputs = {module for module, written in modules.items() if written.settings["inputs"]}
        config |= _chosen("feedforward_modules", is_fed_forward, inputs, modules)
    else:
        config |= {"token_indices": _one_of_all(modules, "token_indices")}
    return config | ({"target_parameters": sorted(wrappers)} if wrappers else {})


def _configure_lora(modules: Mapping[str, Written]) -> dict[str, Any]:
    """Ranks and alphas, and the flags, of which PEFT has one each; alphas have ranks or their roots as divisors."""
    by_root = all(written.settings["use_rslora"] for written in modules.values())
    ranks = {module: written.rank for module, written in modules.items()}
    divisors = {module: math.sqrt(rank) if by_root else rank for module, rank in ranks.items()}
    alphas = {module: written.factor * divisors[module] for module, written in modules.items()}
    flags = {name: _one_of_all(modules, name) for name in ("use_dora", "lora_bias")} | {"use_rslora": by_root}
    return flags | _most_common("r", "rank_pattern", ranks) | _most_common("lora_alpha", "alpha_pattern", alphas)


def _one_of_all(modules: Mapping[str, Written], name: str) -> Any:
    """The value of a setting, which must be equal for all modules."""
    values = {written.settings[name] for written in modules.values()}
    if len(values) > 1:
        text = ", ".join(f"{written.settings[name]} at {module!r}" for module, written in modules.items())
        raise ValueError(f"PEFT has one {name} for all modules, but got {text}")
    return values.pop()


def _most_common(name: str, patterns: str, numbers: Mapping[str, float]) -> dict[str, Any]:
    """The most common number, and by name the numbers of the other modules."""
    rounded = {module: round(x, 9) for module, x in numbers.items()}
    number_of_module = {module: int(x) if float(x).is_integer() else x for module, x in rounded.items()}
    common = Counter(number_of_module.values()).most_common(1)[0][0]
    # PEFT would match a plain name with suffixes too.
    exceptions = {
        f"^{module}" if any(other.endswith(f".{module}") for other in numbers) else module: x
        for module, x in number_of_module.items()
        if x != common
    }
    return {name: common, patterns: dict(sorted(exceptions.items()))}


def _chosen(
    setting: str, names: Callable[[Mapping[str, Any], str], bool], modules: Collection[str], known: Collection[str]
) -> dict[str, Any]:
    """The setting that names these modules: a list, or an expression where PEFT would find a name in others too."""
    config: dict[str, Any] = {setting: sorted(modules)}
    is_clear = {module for module in known if names(config, module)} <= set(modules)
    return config if is_clear else {setting: "|".join(map(re.escape, sorted(modules)))}


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
        settings = {**weight.settings, "lora_bias": True}
        modules[module] = replace(weight, tensors={**weight.tensors, BIAS: x}, settings=settings)
    return modules


def _name_tensors(modules: Mapping[str, Written]) -> dict[str, np.ndarray]:
    """The tensors of all modules by their names."""
    return {
        f"{PREFIX}{module}.{end}": np.asarray(x)
        for module, written in modules.items()
        for end, x in written.tensors.items()
    }


def _sort_arrays(plan: Plan, targets: Targets) -> tuple[dict[str, Made], dict[str, Array], list[str]]:
    """The adapted tensors, the other tensors that train, and an error for each whose layout is not known."""
    adapted: dict[str, Made] = {}
    free: dict[str, Array] = {}
    lines: list[str] = []
    for tensor, target in targets.items():
        made = Made(plan, plan.places[target.path], target)
        try:
            if made.maker:
                adapted |= {} if isinstance(made.maker, Freeze | Quantized) else {tensor: made}
            elif made.place in plan.raw.frame.state:
                continue  # no optimizer moves it
            elif jnp.issubdtype((x := plan.raw.arrays[made.place]).dtype, jnp.inexact):
                require_known([target])
                free[tensor] = target.part(x).reshape(target.shape)
        except ValueError as error:
            lines.append(f"{target.path}: {error}")
    return adapted, free, lines


def _layouts_by_stage(plan: Plan) -> dict[str, str]:
    """The layouts that LoRA tells: a kernel to the heads of attention has two axes of outputs, and no convolution."""
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


def _require_writable(tensor: str, targets: Targets) -> None:
    """Refuses the tensors of torch's attention."""
    module = targets[tensor].module
    attention = module.removesuffix("out_proj") if tensor.endswith("out_proj.weight") else f"{module}."
    in_proj, out_proj = f"{attention}in_proj_weight", f"{attention}out_proj.weight"
    if in_proj in targets and tensor in (in_proj, out_proj):
        raise ValueError(ATTENTION)


def _is_tied_gain(made: Made, adapted: Mapping[str, Made], targets: Targets) -> bool:
    """Whether an array is a bias whose gain is that of its outputs, of which IA3 stores nothing.

    Raises:
      ValueError: If it has a gain that is not one of IA3.
    """
    gain, target = made.maker, made.target
    if not isinstance(gain, Gain):
        return False
    base = made.value("w").maker
    if base is None:
        raise ValueError(f"PEFT does not train what {gain!r} multiplies. Put `Freeze()` before it")
    if not isinstance(base, Freeze | Quantized):
        raise made.other_stages("w")
    if len(target.shape) == 1:
        if not isinstance(made.value("g").maker, Tie):
            raise ValueError("PEFT multiplies a bias by the factors of its outputs. Tie the two gains")
        return True
    bias, axis = f"{target.module}.bias", made.stage.axis
    is_of_outputs = isinstance(axis, int) and axis % len(target.shape) == target.output_axis
    if is_of_outputs and bias in targets and bias not in adapted:
        raise ValueError(
            f"PEFT also multiplies {targets[bias].path!r} by the factors of its outputs. Give it a tied Gain"
        )
    return False


def _require_found(written: Written, target: Target) -> None:
    """Refuses an adapter of an array that PEFT would not find by its name."""
    module, _, name = target.tensor.rpartition(".")
    expected = "bias" if BIAS in written.tensors else "weight"
    if not target.n_experts and (name != expected or not module):
        raise ValueError(
            f"PEFT adapts the {expected} of a module, such as 'dense.{expected}', but this is {target.tensor!r} in "
            f"torch. Name it by `names`"
        )


def _is_bias(tensor: str) -> bool:
    """Whether PEFT takes a tensor for a bias."""
    return tensor.rpartition(".")[2] == "bias"


def _write_beside(
    method: str, free: Mapping[str, Array], targets: Targets, adapted_modules: set[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors that train beside the adapters, and their configuration."""
    saved_modules = {targets[tensor].module for tensor in free if not _is_bias(tensor)}
    _require_saved(saved_modules, adapted_modules, free, targets)
    others = {tensor: target for tensor, target in targets.items() if target.module not in saved_modules}
    tensors: dict[str, np.ndarray] = {}
    for tensor, x in free.items():
        module, _, name = tensor.rpartition(".")
        wrapped = f"{module}.base_layer.{name}" if module in adapted_modules else tensor
        tensors[PREFIX + wrapped] = np.asarray(write_layout(x, targets[tensor].layout))
    which_biases = _which_biases(method, free.keys() & others.keys(), others, adapted_modules)
    config = {"bias": which_biases} if method == "LORA" else {}
    return tensors, config | {"modules_to_save": sorted(saved_modules) or None}


def _require_saved(
    saved_modules: Collection[str], adapted_modules: Collection[str], free: Collection[str], targets: Targets
) -> None:
    """Refuses modules to save whole that PEFT would adapt, freeze in part, or find in others."""
    for tensor, target in targets.items():
        module = target.module
        if module in saved_modules and module in adapted_modules:
            raise ValueError(f"to_peft: PEFT either adapts a module or saves it whole, but {module!r} needs both.")
        if module in saved_modules and tensor not in free and jnp.issubdtype(target.dtype, jnp.inexact):
            raise ValueError(
                f"to_peft: PEFT trains each array of a module that it saves whole, such as {module!r}, but "
                f"{target.path!r} is frozen. Freeze the others too, or train it."
            )
        saved = next((saved for saved in saved_modules if module.endswith(saved)), module)
        if module not in saved_modules and saved != module:
            raise ValueError(
                f"to_peft: PEFT matches the names of saved modules with suffixes, but {saved!r} is also a suffix of "
                f"{module!r}. Freeze {saved!r}."
            )


def _which_biases(method: str, biases: set[str], targets: Targets, adapted_modules: set[str]) -> str:
    """PEFT's word for the biases that train: none of the targets, all of them, or those of adapted modules."""
    all_biases = {tensor for tensor in targets if _is_bias(tensor)}
    adapted_biases = {tensor for tensor in all_biases if targets[tensor].module in adapted_modules}
    paths_text = ", ".join(map(repr, sorted({targets[tensor].path for tensor in biases})))
    if not biases:
        return "none"
    if method != "LORA":
        raise ValueError(f"to_peft: PEFT trains no biases with {method}, but here train {paths_text}. Freeze them.")
    if biases not in (all_biases, adapted_biases):
        raise ValueError(
            f"to_peft: PEFT trains all biases, or those of adapted modules, but here train {paths_text}. Freeze them, "
            f"or train the others too."
        )
    return "all" if biases == all_biases else "lora_only"
