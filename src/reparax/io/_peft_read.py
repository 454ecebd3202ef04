"""Reads PEFT adapters: converts tensors and a configuration to a chain and a raw tree.

The tensors come from a file or from the ``state_dict()`` of a model in memory. Such a state dict also holds the base
weights, and its tensor names contain the name of the adapter. The tensors are grouped by :class:`Target`: an array of
the model, or one layer of a stacked array. The adapter of each target is read separately (``_peft_adapters.py``). Then
the stages of a stack's layers are joined into one stage, and so are equal stages on different arrays. A single error
reports all targets that fail.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.axes import list_axes
from reparax.core.calls import with_any_key
from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import locate_errors
from reparax.core.paths import PyTree, flatten_with_names, items, path_text
from reparax.core.where import all_but
from reparax.io._files import is_finite, read_tensors, short_repr
from reparax.io._layouts import from_layout, torch_shape
from reparax.io._parameters import Index, Rules, group_keys, pattern_of, require_layouts, stack_parts
from reparax.io._peft_adapters import Adapter, StoredAdapter, read_adapter, require_shapes
from reparax.io._peft_config import BIAS, MERGE, METHODS, TOKENS, Method, expected_suffixes, is_feedforward, read_config
from reparax.io._peft_target import ATTENTION, WRAPPED, Target, is_loaded, plain_names_of, targets_by_name
from reparax.numerics.arithmetic import is_array
from reparax.stages.adapters import Gain
from reparax.stages.shared import Tie
from reparax.stages.sparse import Freeze

Tensors = dict[str, np.ndarray]


def from_peft(
    state_dict: Mapping[str, Any],
    config: Mapping[str, Any],
    like: PyTree,
    *,
    adapter: str | None = None,
    names: Rules = None,
    layouts: Rules = None,
    roles: PyTree = None,
) -> tuple[Parametrization, PyTree]:
    r"""Converts an adapter from a PEFT file, or from a model's ``state_dict()``, to a chain and its raw tree.

    ``p.fold(raw)`` merges the adapter. Neither torch nor PEFT is needed. The chain begins with ``Freeze()``, so the
    same values train as in PEFT. Dropout is ignored, because it does not change the saved tensors.

    LoRA, rsLoRA, DoRA and IA3 are supported for every weight that PEFT adapts, except those of grouped convolutions and
    of ``nn.MultiheadAttention``. In the latter, PEFT adds an update twice. Trainable tokens are supported for matrices.
    LoRA is also supported for stacks of experts that are one parameter in torch (``target_parameters``), and becomes a
    stage with ``stacked`` axes. ``rank_pattern`` and ``alpha_pattern`` are supported, and so are biases, tokens and
    whole modules that train beside the adapters. For an adapter of any other type, an error names the type.

    Args:
      state_dict: The tensors of ``adapter_model.safetensors``, as arrays or torch tensors, or the ``state_dict()`` of a
        model in memory, whose base weights are ignored.
      config: The contents of ``adapter_config.json``, or ``model.peft_config[adapter].to_dict()``. An unknown setting
        must have a neutral value, such as None, False or 0.
      like: The model's parameters, which become the base weights.
      adapter: The name of the adapter to read if ``state_dict`` holds several.
      names: As for :func:`from_torch`; the names are those of the base model in torch. If a module has several stacks
        of experts, give each its own rule, in the module's order, because PEFT does not record which stack is which:
        in transformers, ``gate_up_proj`` comes before ``down_proj``.
      layouts: As for :func:`from_torch`. Use ``"conv1d"`` for the weights of ``Conv1D`` in transformers, which have the
        shape ``(in, out)`` in torch too; for a matrix named ``kernel``, ``"same"`` is equivalent. ``fan_in_fan_out`` in
        the file does not identify these weights, because PEFT finds them by their class. A convolution needs no layout
        if one of its factors has as many axes as its ``kernel``. Use ``"experts:..."`` for ``target_parameters``; the
        input axis is the one along which ``lora_A`` lies.
      roles: As for :func:`from_torch`. The roles determine the layouts that you leave out.

    Returns:
      The chain and its raw tree.

    Raises:
      ValueError: If a tensor is unexpected, is missing, has another shape or holds anything but finite floating-point
        numbers; if the configuration names a module, tokens or biases for which the file has no tensor; or if a setting
        is not supported. The error lists all of these.

    Example:
      >>> import numpy as np, jax.numpy as jnp, reparax as rpx
      >>> tensors = {
      ...     "base_model.model.dense.lora_A.weight": np.ones((1, 3), np.float32),
      ...     "base_model.model.dense.lora_B.weight": np.ones((2, 1), np.float32),
      ... }
      >>> config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
      >>> p, raw = rpx.io.from_peft(tensors, config, {"dense": {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}})
      >>> p
      Freeze() >> LoRA(1, alpha=2.0, where='dense/kernel')
      >>> p.fold(raw)["dense"]["kernel"]
      Array([[2., 2.],
             [2., 2.],
             [2., 2.]], dtype=float32)
    """
    config = read_config(config)
    arrays = read_tensors("from_peft", state_dict, "dict", "Read the file with `safetensors.numpy.load_file`.")
    if attention := next((name for name in arrays if ".base_layer.out_proj.lora_" in name), None):
        raise ValueError(f"from_peft cannot read {attention!r}: {ATTENTION}. {MERGE}")
    arrays = _tensors_of_adapter(arrays, config, adapter)
    with locate_errors("from_peft"):
        targets = targets_by_name(like, names, layouts, roles)
        plain_names = plain_names_of(arrays, METHODS[config["peft_type"]].suffixes, config, targets)
    _require_unique(plain_names)
    tensors_of, whole, lines = _sort_tensors(config, targets, arrays, plain_names)
    wholes, errors_of_wholes = _read_by_path(_read_whole, targets, whole)
    adapters, errors_of_adapters = _read_by_path(functools.partial(_read_adapter, config), targets, tensors_of)
    counts = Counter(target.path for target in targets.values())
    lines += _missing_tensor_errors(config, targets, tensors_of, whole)
    lines = [*lines, *errors_of_wholes, *errors_of_adapters] or [
        *_tied_table_errors(adapters, like),
        *_missing_layer_errors(counts, adapters),
        *_missing_layer_errors(counts, wholes),
    ]
    if lines or not adapters:
        text = "\n  ".join(lines or ["it contains no tensor of an adapter"])
        raise ValueError(
            f"from_peft: the adapter does not fit this model:\n  {text}\nPass the `config` of this adapter, and "
            f"`like`, `names` and `layouts` of its model, or merge the adapter in PEFT with `merge_and_unload`, and "
            f"read the weights with `from_torch`."
        )
    layers = {path: _stack_stages(path, parts) for path, parts in adapters.items()}
    whole_arrays = {path: stack_parts(parts) for path, parts in wholes.items()}
    free = whole_arrays.keys() - layers.keys()  # An array with an adapter stays frozen, because it is the base.
    frozen = Freeze(where=all_but(pattern_of(free, counts))) if free else Freeze()
    ties, gains = _bias_ties_and_gains(targets, layers, config) if config["peft_type"] == "IA3" else ([], [])
    p = Chain((frozen, *ties, *_join_stages(layers, counts), *gains))
    values = {f"{path}/{place}": x for path, layer in layers.items() for place, x in layer.values.items()}
    return p, _replace_values(with_any_key(p.init)(_replace_values(like, whole_arrays)), values)


def _tensors_of_adapter(arrays: Tensors, config: Mapping[str, Any], adapter: str | None) -> Tensors:
    """Returns the tensors of one adapter under their names in a file. Tensors from a file are not renamed."""
    # PEFT trains a copy of each module that it saves whole, so the original is unused.
    arrays = {name: x for name, x in arrays.items() if ".original_module." not in name}
    method = METHODS[config["peft_type"]]
    pattern = _live_name_pattern(method)
    match_of_name = {name: match for name in arrays if (match := re.fullmatch(pattern, name))}
    names = sorted({match[2] for match in match_of_name.values()})
    if not names and adapter is None:
        return arrays
    adapter = _choose_adapter(names, adapter)
    others = {name: x for name, x in arrays.items() if name not in match_of_name}
    if bare := next((name for name in others if method.suffix_of(name)), None):
        raise ValueError(
            f"from_peft takes the tensors of one adapter, but {bare!r} is named as in a file, and "
            f"{next(iter(match_of_name))!r} as in a model in memory. Read them in separate calls."
        )
    of_adapter = {name: match for name, match in match_of_name.items() if match[2] == adapter}
    # In memory, the name of DoRA's lengths ends in `.weight`. In a file, the name lacks this suffix.
    whole_names = {name: match[1] + (match[3] or "") for name, match in of_adapter.items()}
    file_names = {name: x if method.suffix_of(x) else of_adapter[name][1] for name, x in whole_names.items()}
    modules = {name.removesuffix(f".{method.suffix_of(name)}") for name in file_names.values()}
    file_names |= _names_of_other_trained(others, adapter, config["bias"], modules)
    _require_unique(file_names)
    return {file_name: arrays[name] for name, file_name in file_names.items()}


def _require_unique(names: Mapping[str, str]) -> None:
    """Raises an error if two tensors get the same new name. ``names`` maps each tensor's name to its new name."""
    owners: dict[str, str] = {}
    for name, plain in names.items():
        if (other := owners.setdefault(plain, name)) != name:
            raise ValueError(
                f"from_peft takes one tensor for each parameter, but {other!r} and {name!r} both stand for {plain!r}. "
                f"Leave one of them out of `state_dict`."
            )


def _choose_adapter(names: Sequence[str], adapter: str | None) -> str:
    """Returns the name of the adapter to read: ``adapter`` if given, or else the only name in ``names``."""
    names_text = ", ".join(map(repr, names))
    if adapter is None and len(names) > 1:
        raise ValueError(
            f"from_peft reads one adapter, but the tensors hold {names_text}. Pass one of these names as `adapter`."
        )
    if adapter is not None and adapter not in names:
        has = f"adapters named {names_text}. Pass one of these" if names else "no adapter names. Leave out `adapter`"
        raise ValueError(f"from_peft got adapter={short_repr(adapter)}, but the tensors hold {has}.")
    return adapter or names[0]


def _names_of_other_trained(
    names: Collection[str], adapter: str, biases: str, adapted_modules: Collection[str]
) -> dict[str, str]:
    """Maps the names of tensors that train beside an adapter, in a model in memory, to their names in a file.

    These tensors are biases, or belong to modules that PEFT saves whole.
    """
    file_names: dict[str, str] = {}
    for name in names:
        is_adapted = name.removesuffix(f"{WRAPPED}.bias") in adapted_modules
        saved = re.fullmatch(r"(.*\.modules_to_save)\.([^.]+)(\..+)", name)
        if saved and saved[2] == adapter:
            file_names[name] = saved[1] + saved[3]
        elif not saved and name.endswith(".bias") and (biases == "all" or (biases != "none" and is_adapted)):
            file_names[name] = name
        elif re.search(rf"\.(lora|ia3|trainable_tokens)_\w+\.{re.escape(adapter)}(\.|$)", name):
            file_names[name] = name  # Keep an unsupported adapter, so that reading it raises an error.
    return file_names


def _live_name_pattern(method: Method) -> str:
    """Returns a regular expression that matches the names of adapter tensors in an in-memory model.

    The groups are the part before the adapter's name, the adapter's name, and the suffix after the adapter's name.
    """
    heads = "|".join(sorted({re.escape(re.sub(r"\.(weight|bias)$", "", suffix)) for suffix in method.suffixes}))
    return rf"(.*\.(?:{heads}))\.(?!(?:weight|bias)$)([^.]+)(\.weight|\.bias)?"


def _sort_tensors(
    config: Mapping[str, Any], targets: Mapping[str, Target], arrays: Tensors, plain_names: Mapping[str, str]
) -> tuple[dict[str, Tensors], Tensors, list[str]]:
    """Sorts the tensors of a file into tensors of adapters and parameters that are saved whole.

    Returns:
      The tensors of each adapted parameter, keyed by suffix; the parameters that are saved whole; and an error text for
      each other tensor.
    """
    tensors_of: dict[str, Tensors] = {}
    whole = Tensors()
    lines = list[str]()
    for file_name, x in arrays.items():
        name = plain_names[file_name]
        suffix = METHODS[config["peft_type"]].suffix_of(name)
        parameter = name if suffix is None else _adapted_parameter(name, suffix, targets)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            lines.append(f"{name}: expected floating-point numbers, got {x.dtype}")
        elif not is_finite(x):
            lines.append(f"{name}: expected finite numbers, got infinity or NaN")
        elif parameter not in targets:
            lines.append(f"{name}: {_why_unread(config['peft_type'], parameter, targets)}")
        elif not is_loaded(config, parameter, suffix or "", file_name):
            lines.append(f"{file_name}: with this `config`, PEFT's model has no such tensor and ignores it")
        elif suffix is None:
            whole[name] = x
        else:
            tensors_of.setdefault(parameter, {})[suffix] = x
    return tensors_of, whole, lines


def _adapted_parameter(name: str, suffix: str, targets: Mapping[str, Target]) -> str:
    """Returns the torch name of the parameter that a tensor adapts: a stack of experts, a weight or a bias."""
    owner = name.removesuffix(f".{suffix}")
    if owner in targets and targets[owner].n_experts:
        return owner
    return f"{owner}.{'bias' if suffix == BIAS else 'weight'}"


def _why_unread(method: str, parameter: str, targets: Mapping[str, Target]) -> str:
    """Returns why a tensor is not read: the model lacks its parameter, or the method has no tensor of this name."""
    owners = (target.module for target in targets.values() if parameter.startswith(f"{target.module}."))
    module = next(owners, None)
    if module is None or parameter.removeprefix(f"{module}.") in ("weight", "bias"):
        return f"the model has no {parameter}"
    suffixes = ", ".join(METHODS[method].suffixes)
    return f"expected a parameter of {module!r}, or for {method} one of {suffixes}"


def _missing_tensor_errors(
    config: Mapping[str, Any], targets: Collection[str], tensors_of: Mapping[str, Tensors], whole: Tensors
) -> list[str]:
    """Returns an error text for each setting that names parameters for which the file has no tensor."""
    missing: dict[str, list[str]] = {}
    for tensor in targets:
        suffixes = {*tensors_of.get(tensor, {}), *([""] if tensor in whole else [])}
        for setting, expected in expected_suffixes(config, tensor).items():
            if suffixes.isdisjoint(expected):
                missing.setdefault(setting, []).append(tensor)
    tokens = config.get("trainable_token_indices")
    if tokens and not isinstance(tokens, Mapping) and not any(TOKENS in found for found in tensors_of.values()):
        missing["trainable_token_indices"] = ["tokens of a table"]
    return [
        f"{setting} names {', '.join(names[:8])}{f' and {len(names) - 8} more' if names[8:] else ''}, but the file has "
        f"no tensor for {'them' if names[1:] else 'it'}"
        for setting, names in missing.items()
    ]


def _read_by_path(
    read: Callable[[Target, Any], Any], targets: Mapping[str, Target], stored: Mapping[str, Any]
) -> tuple[dict[str, dict[Index, Any]], list[str]]:
    """Calls ``read`` with each target and its tensors.

    Returns:
      The results, keyed by path and then by index in the stack, and an error text for each target that failed.
    """
    values: dict[str, dict[Index, Any]] = {}
    lines: list[str] = []
    for name, tensors in stored.items():
        target = targets[name]
        try:
            values.setdefault(target.path, {})[target.index] = read(target, tensors)
        except ValueError as error:
            lines.append(f"{target.path}: {error}")
    return values, lines


def _read_whole(target: Target, x: np.ndarray) -> Array:
    """Converts a parameter that PEFT has saved whole from its layout in torch to its shape in JAX."""
    target = target.confirm_unambiguous_kernel([x])
    require_layouts([target])
    require_shapes({target.tensor: x}, {target.tensor: torch_shape(target.shape, target.layout)})
    return from_layout(jnp.asarray(x), target.layout).reshape(target.shape)


def _tied_table_errors(layers_of_path: Mapping[str, Mapping[Index, Adapter]], like: PyTree) -> list[str]:
    """Returns an error text for each embedding table with trained tokens that equals another array of the model.

    The two arrays may be tied in torch, and then PEFT would train the tokens of both.
    """
    arrays = {path_text(keys): x for keys, x in items(like) if is_array(x) and not isinstance(x, Tracer)}
    tables = [
        path
        for path, layers in layers_of_path.items()
        if any("@trainable_slices/x" in x.values for x in layers.values())
    ]
    return [
        f"{path}: {other!r} holds the same numbers. If both are tied in torch, PEFT trains the tokens of both. Use one "
        f"array for both in the model, or merge the adapter in PEFT"
        for path in tables
        for other, x in arrays.items()
        if path in arrays and path != other and any(np.array_equal(x, w) for w in (arrays[path], arrays[path].T))
    ]


def _missing_layer_errors(counts: Mapping[str, int], layers_of_path: Mapping[str, Mapping[Index, Any]]) -> list[str]:
    """Returns an error text for each stacked array that has fewer layers in the file than in the model."""
    return [
        f"{path}: expected tensors for each of the {counts[path]} layers, got them for {len(parts)}. Pass a `like` "
        f"with a separate array for each layer"
        for path, parts in layers_of_path.items()
        if len(parts) < counts[path]
    ]


def _stack_stages(path: str, layers: Mapping[Index, Adapter]) -> Adapter:
    """Combines the adapters of a stack's layers into one adapter. Raises an error if their stages differ."""
    if () in layers:
        return layers[()]
    (first_index, first_layer), *other_layers = layers.items()
    for index, other_layer in other_layers:
        if other_layer.stages != first_layer.stages:
            chains = " and ".join(" >> ".join(map(repr, layer.stages)) for layer in (first_layer, other_layer))
            raise ValueError(
                f"from_peft: the layers of the stack {path!r} must have the same rank and alpha, but layers "
                f"{first_index} and {index} have {chains}. Pass a `like` with a separate array for each layer."
            )
    values = {
        name: stack_parts({index: jnp.asarray(layer.values[name]) for index, layer in layers.items()})
        for name in first_layer.values
    }
    count, stages = len(first_index), list[Any](first_layer.stages)
    stacked_axes = [(*range(count), *(axis + count for axis in list_axes(stage.stacked))) for stage in stages]
    stacked_stages = (replace(stage, stacked=axes) for stage, axes in zip(stages, stacked_axes, strict=True))
    return Adapter(tuple(stacked_stages), values)


def _read_adapter(config: Mapping[str, Any], target: Target, tensors: Tensors) -> Adapter:
    """Converts the tensors of the adapter of one array to stages and raw values."""
    target = target.confirm_kernel(tensors.values())  # PEFT does not adapt transposed convolutions.
    return read_adapter(StoredAdapter(target, tensors, config))


def _join_stages(layers: Mapping[str, Adapter], known_paths: Collection[str]) -> list[Parametrization]:
    """Lists the stages of all adapters. Arrays with equal stages share one stage, whose ``where`` selects them all."""
    joined: list[Parametrization] = []
    stages_of = {path: tuple[Any, ...](layer.stages) for path, layer in layers.items()}
    for stages, paths in group_keys(stages_of).items():
        arrays = pattern_of(paths, known_paths)
        # `known_paths` lacks the paths of raw values, so a pattern for these must list the array paths literally.
        literal = f"({'|'.join(map(re.escape, sorted(paths)))})"
        joined += [replace(x, where=arrays if x.where is None else literal + x.where) for x in stages]
    return joined


def _bias_ties_and_gains(
    targets: Mapping[str, Target], layers: Mapping[str, Adapter], config: Mapping[str, Any]
) -> tuple[list[Parametrization], list[Parametrization]]:
    """Returns the stages that IA3 needs for biases: a tie of the bias gains to the output gains, and the bias gains.

    The first list holds the tie, or is empty if no bias has a gain. The second list holds one gain stage for each
    number of stacked axes.
    """
    ties: dict[str, str] = {}
    stacks: dict[int, set[str]] = {}
    for target in targets.values():
        bias = targets.get(f"{target.module}.bias")
        if bias is not None and target.path in layers and not is_feedforward(config, target.module):
            ties[f"{bias.path}/g"] = f"{target.path}/g"
            stacks.setdefault(len(bias.index), set()).add(bias.path)
    known_paths = {target.path for target in targets.values()}
    gains = [
        Gain(axis=-1, stacked=tuple(range(count)), where=pattern_of(paths, known_paths))
        for count, paths in sorted(stacks.items())
    ]
    return [Tie(ties)] if ties else [], [*gains]


def _replace_values(tree: PyTree, values: Mapping[str, Array]) -> PyTree:
    """Replaces the arrays at the paths in ``values``. The new arrays get the shapes and dtypes of the old ones.

    The reshape also splits attention heads, which torch merges.
    """
    paths, leaves, treedef = flatten_with_names(tree)
    places = zip(map(path_text, paths), leaves, strict=True)
    return treedef.unflatten(
        [values[path].astype(x.dtype).reshape(x.shape) if path in values else x for path, x in places]
    )
