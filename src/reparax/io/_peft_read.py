"""Reads PEFT adapters: a chain and a raw tree from tensors and a configuration.

The tensors are those of a file, or of a model in memory, whose ``state_dict()`` holds the base too, and the name of
each adapter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.calls import with_any_key
from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import locate_errors
from reparax.core.paths import PyTree, flatten_with_names, items, path_text
from reparax.core.where import all_but
from reparax.io._files import is_finite, read_tensors, shown
from reparax.io._parameters import Index, Rules, require_known, restack_stage, stack_parts
from reparax.io._peft_lora import BIAS
from reparax.io._peft_method import MERGE, Adapted, Method, check_settings, in_a_name, require
from reparax.io._peft_methods import METHODS, selects_module
from reparax.io._peft_target import ATTENTION, WRAPPED, Target, names_by_parameter, targets_of
from reparax.numerics.arithmetic import is_array
from reparax.stages.adapters import Gain
from reparax.stages.shared import Tie
from reparax.stages.sparse import Freeze

_ANY_NAME = "[^/]+"


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
    r"""Reads an adapter that PEFT has saved, or one of a model's ``state_dict()``, as a chain and its raw tree.

    ``p.fold(raw)`` merges the adapter. Neither torch nor PEFT is needed. The chain begins with ``Freeze()``, so the
    same values train as in PEFT. OFT without a series is an exception: its rotations hold two numbers for each one of
    PEFT, in square matrices whose diagonals have no effect; Adam takes the same steps, and plain gradient descent steps
    half as long. Dropout, of activations, ranks or modules, is ignored: it does not change the saved tensors.

    LoRA, rsLoRA, DoRA and IA3 are read for every weight that PEFT adapts, except grouped convolutions and
    ``nn.MultiheadAttention``, where PEFT adds an update twice; LoHa too, except convolution kernels with
    ``use_effective_conv2d``; LoKr, OFT, VeRA and trainable tokens for matrices. LoRA is also read for stacks of experts
    that are one parameter of torch (``target_parameters``), with ``stacked`` axes. Patterns of ranks and alphas are
    read, and so are biases, tokens and whole modules that train beside the adapters. OFT with ``coft`` is read as PEFT
    uses it, but no longer kept in its ball. All other types are refused by name.

    Args:
      state_dict: The tensors of ``adapter_model.safetensors``, as arrays or torch tensors; or ``model.state_dict()`` of
        a model in memory, of which the base is left out.
      config: The contents of ``adapter_config.json``, or ``model.peft_config[adapter].to_dict()``. An unknown setting
        must have a neutral value, such as None, False or 0.
      like: The model's parameters; they become the base.
      adapter: The name of the adapter in a ``state_dict()`` that holds several.
      names: As for :func:`from_torch`: the torch name of a parameter of the base model. PEFT does not write which of
        several stacks of experts in one module is which, so each needs its own rule, in the order of the module: in
        transformers, ``gate_up_proj`` before ``down_proj``.
      layouts: As for :func:`from_torch`: ``"conv1d"`` for the weights of ``Conv1D`` in transformers, which have the
        shape ``(in, out)`` in torch too; for a matrix named ``kernel``, ``"same"`` means that. ``fan_in_fan_out`` in
        the file does not identify them, as PEFT finds them by their class. A factor with all axes of a ``kernel``
        identifies a convolution, but LoHa's tensors are matrices even for convolutions, whose kernels need a layout.
        ``"experts:..."`` for ``target_parameters``, as for :func:`from_torch`; its inputs are those along which
        ``lora_A`` lies.
      roles: As for :func:`from_torch`: they decide the layouts that you leave out.

    Returns:
      The chain, and its raw tree.

    Raises:
      ValueError: If a tensor is unexpected, missing or has another shape, or holds anything but finite floating
        numbers, or if no stage supports a setting of the configuration; the error names each of them.

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
    method = _find_method(config)
    config = {**method.defaults, **check_settings(method.name, config, method.settings)}
    arrays = read_tensors("from_peft", state_dict, "dict", "Read the file with `safetensors.numpy.load_file`.")
    _require_no_attention(arrays)
    arrays = {
        name: x
        for name, x in of_adapter(arrays, method, config, adapter).items()
        if ".original_module." not in name  # PEFT's unused original of a module whose copy trains
    }
    with locate_errors("from_peft"):
        targets = targets_of(like, names, layouts, roles)
        plain = names_by_parameter(arrays, method.suffixes, config, targets)
    tensors_by_kind = _SortedTensors.of(method, targets, {plain[name]: x for name, x in arrays.items()})
    adapters: dict[str, dict[Index, Adapted]] = {}
    for tensor, adapter_tensors in tensors_by_kind.adapter_tensors.items():
        target = targets[tensor]
        try:
            adapters.setdefault(target.path, {})[target.index] = _read_layer(
                method, target, adapter_tensors | tensors_by_kind.banks, config
            )
        except ValueError as error:
            tensors_by_kind.lines.append(f"{target.path}: {error}")
    tensors_by_kind.lines.extend(_tied_tables(adapters, like))
    counts = Counter(target.path for target in targets.values())
    tensors_by_kind.lines.extend(
        [] if tensors_by_kind.lines else _incomplete_stacks(counts, {**adapters, **tensors_by_kind.whole_modules})
    )
    layers = {} if tensors_by_kind.lines else {path: _stack_stages(path, parts) for path, parts in adapters.items()}
    whole_arrays = (
        {}
        if tensors_by_kind.lines
        else {path: stack_parts(parts) for path, parts in tensors_by_kind.whole_modules.items()}
    )
    if tensors_by_kind.lines or not layers:
        lines = "\n  ".join(tensors_by_kind.lines or ["it contains no tensor of an adapter"])
        raise ValueError(
            f"from_peft: the adapter does not fit this model:\n  {lines}\nCorrect `like`, `names` or `layouts`."
        )
    ties, gains = _gains_of_biases(method, targets, layers, config)
    frozen = Freeze(where=all_but(pattern_of(whole_arrays, counts))) if whole_arrays else Freeze()
    p = Chain((frozen, *ties, *_join_stages(layers, counts), *gains))
    values = {f"{path}/{place}": x for path, layer in layers.items() for place, x in layer.values.items()}
    return p, _place_values(with_any_key(p.init)(like), values | whole_arrays)


def _find_method(config: Any) -> Method:
    """The method that a configuration names; raises an error for one that is not known here."""
    if not isinstance(config, Mapping) or "peft_type" not in config:
        raise ValueError(
            "from_peft takes the contents of adapter_config.json as config, but got a value without 'peft_type'. Read "
            "the file with `json.load`."
        )
    kind = config["peft_type"]
    name = str(getattr(kind, "value", kind))
    if name not in METHODS:
        raise ValueError(
            f"from_peft reads {', '.join(sorted(METHODS))}, but got an adapter of {name}. If it changes weights, merge "
            f"it in PEFT with `merge_and_unload`, and read the weights with `from_torch`."
        )
    return METHODS[name]


def _require_no_attention(arrays: Collection[str]) -> None:
    """Refuses adapters of torch's attention."""
    for name in arrays:
        if ".base_layer.out_proj.lora_" in name:
            raise ValueError(f"from_peft does not read {name!r}: {ATTENTION}. {MERGE}")


@dataclass(frozen=True)
class _SortedTensors:
    """The tensors of an adapter.

    Attributes:
      adapter_tensors: The tensors of each adapted parameter, by the suffixes of their names.
      banks: The tensors that all adapted modules share.
      whole_modules: The parameters that are saved as a whole, by path and index.
      lines: The errors for all other tensors.
    """

    adapter_tensors: dict[str, dict[str, np.ndarray]] = field(default_factory=dict[str, dict[str, np.ndarray]])
    banks: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    whole_modules: dict[str, dict[Index, Array]] = field(default_factory=dict[str, dict[Index, Array]])
    lines: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, method: Method, targets: Mapping[str, Target], arrays: Mapping[str, np.ndarray]) -> _SortedTensors:
        """The tensors, sorted by their names."""
        tensors = cls()
        for name, x in arrays.items():
            end = next((end for end in method.suffixes if name.endswith(f".{end}")), None)
            module = name if end is None else name.removesuffix(f".{end}")
            tensor = f"{module}.{'bias' if end == BIAS else 'weight'}"
            tensor = module if module in targets and targets[module].n_experts else tensor
            if wrong := _explain_numbers(x):
                tensors.lines.append(f"{name}: {wrong}")
            elif name.removeprefix("base_model.") in method.banks:
                tensors.banks[name.removeprefix("base_model.")] = x
            elif end is not None and tensor in targets:
                tensors.adapter_tensors.setdefault(tensor, {})[end] = x
            elif end is not None or name not in targets:
                tensors.lines.append(f"{name}: the model has no {module if end is None else tensor}")
            else:
                tensors.add_whole(targets[name].like([x]), x)
        return tensors

    def add_whole(self, target: Target, x: np.ndarray) -> None:
        """Adds a parameter that is saved as a whole."""
        try:
            require_known([target])
            require({target.tensor: x}, {target.tensor: target.whole_shape})
            self.whole_modules.setdefault(target.path, {})[target.index] = target.read_whole(x)
        except ValueError as error:
            self.lines.append(f"{target.path}: {error}")


def _explain_numbers(x: np.ndarray) -> str | None:
    """What is wrong with the numbers of a tensor, or None."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"expected floating numbers, got {x.dtype}"
    return None if is_finite(x) else "expected finite numbers, got infinite ones or NaN"


def _tied_tables(layers_of_path: Mapping[str, Mapping[Index, Adapted]], like: PyTree) -> list[str]:
    """An error for each table with trained tokens that another array repeats: PEFT moves both if they are tied."""
    arrays = {path_text(keys): x for keys, x in items(like) if is_array(x) and not isinstance(x, Tracer)}
    tables = [
        path
        for path, layers in layers_of_path.items()
        if any("@trainable_slices/x" in x.values for x in layers.values())
    ]
    return [
        f"{path}: {other!r} holds the same numbers, and if they are tied in torch, PEFT moves the tokens of both. Give "
        f"the model one array for both, or merge the adapter in PEFT"
        for path in tables
        for other, x in arrays.items()
        if path in arrays and path != other and any(np.array_equal(x, w) for w in (arrays[path], arrays[path].T))
    ]


def _incomplete_stacks(counts: Mapping[str, int], layers_of_path: Mapping[str, Mapping[Index, Any]]) -> list[str]:
    """An error for each stack of which some layers are missing."""
    return [
        f"{path}: expected tensors for each of its {counts[path]} layers, got them for {len(parts)}. Do not stack these"
        for path, parts in layers_of_path.items()
        if len(parts) < counts[path]
    ]


def _stack_stages(path: str, layers: Mapping[Index, Adapted]) -> Adapted:
    """The stages on a stack, from those on its layers."""
    if () in layers:
        return layers[()]
    (first_index, first_layer), *others_left = layers.items()
    for index, other_layer in others_left:
        if other_layer.stages != first_layer.stages:
            chains = " and ".join(" >> ".join(map(repr, layer.stages)) for layer in (first_layer, other_layer))
            raise ValueError(
                f"from_peft: {path!r} is a stack, on which all layers have one rank and one alpha, but layers "
                f"{first_index} and {index} have {chains}. Do not stack these."
            )
    values = {
        name: stack_parts({index: jnp.asarray(x.values[name]) for index, x in layers.items()})
        for name in first_layer.values
    }
    return Adapted(tuple(restack_stage(stage, len(first_index)) for stage in first_layer.stages), values)


def _read_layer(
    method: Method, target: Target, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> Adapted:
    """The adapter of one parameter, from its tensors."""
    target = target.by_axes(tensors.values())  # PEFT has no adapters of transposed convolutions
    method.require_layout(target)
    rank = _number_by_pattern(config, "r", "rank_pattern", target.owner)
    alpha = _number_by_pattern(config, method.alpha, "alpha_pattern", target.owner)
    return method.read(target, tensors, config, float(alpha or 0), rank or 1)


def _number_by_pattern(config: Mapping[str, Any], name: str | None, patterns: str, module: str) -> Any:
    """The number for a module: that of the first matching pattern, or the common one."""
    for pattern, number in (config.get(patterns) or {}).items():
        if re.fullmatch(in_a_name(pattern), module):
            return number
    return None if name is None else config.get(name)


def _join_stages(layers: Mapping[str, Adapted], known_paths: Collection[str]) -> list[Parametrization]:
    """The stages of all arrays; equal stages are joined into one."""
    groups: dict[tuple[Parametrization, ...], list[str]] = {}
    for path, layer in layers.items():
        groups.setdefault(layer.stages, []).append(path)
    return [_stage_on_paths(stage, paths, known_paths) for stages, paths in groups.items() for stage in stages]


def _stage_on_paths(stage: Any, paths: list[str], known_paths: Collection[str]) -> Parametrization:
    """A stage that acts on these arrays, or on a value below them, whose places are longer than all that is known."""
    if stage.where is None:
        return replace(stage, where=pattern_of(paths, known_paths))
    return replace(stage, where=f"({'|'.join(map(re.escape, sorted(paths)))}){stage.where}")


def pattern_of(paths: Iterable[str], known_paths: Collection[str]) -> str:
    """An expression for ``where`` that selects exactly these paths of those that are known."""
    by_length: dict[int, list[str]] = {}
    for path in sorted(paths):
        by_length.setdefault(path.count("/"), []).append(path)
    return "|".join(_of_one_length(paths_of_length, known_paths) for paths_of_length in by_length.values())


def _of_one_length(paths: list[str], known_paths: Collection[str]) -> str:
    """The expression for paths of the same number of names: any name, if that selects no other path."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(path.split("/") for path in paths), strict=True)]
    names = [_any_of(column) for column in columns]

    def exact(pattern: str) -> bool:
        return {path for path in known_paths if re.fullmatch(pattern, path)} == set(paths)

    if not exact("/".join(names)):
        return "|".join(map(re.escape, paths))
    for i, column in enumerate(columns):
        wider = [*names[:i], _ANY_NAME, *names[i + 1 :]]
        names = wider if len(column) > 1 and exact("/".join(wider)) else names
    plain = "/".join(names)
    short = re.sub(rf"{re.escape(_ANY_NAME)}(/{re.escape(_ANY_NAME)})*", ".*", plain)
    return short if exact(short) else plain


def _any_of(names: list[str]) -> str:
    """An expression for any of these names, and nothing else."""
    return re.escape(names[0]) if len(names) == 1 else f"({'|'.join(map(re.escape, names))})"


def _gains_of_biases(
    method: Method, targets: Mapping[str, Target], layers: Mapping[str, Adapted], config: Mapping[str, Any]
) -> tuple[list[Parametrization], list[Parametrization]]:
    """The gains of biases in IA3, and their ties to the gains of the outputs."""
    inputs = config.get("feedforward_modules") or []
    ties: dict[str, str] = {}
    stacks: dict[int, set[str]] = {}
    for target in targets.values() if method.name == "IA3" else ():
        bias = targets.get(f"{target.module}.bias")
        if bias is not None and target.path in layers and not selects_module(target.module, inputs):
            ties[f"{bias.path}/g"] = f"{target.path}/g"
            stacks.setdefault(len(bias.index), set()).add(bias.path)
    known_paths = {target.path for target in targets.values()}
    gains = [
        Gain(axis=-1, stacked=tuple(range(n)), where=pattern_of(paths, known_paths))
        for n, paths in sorted(stacks.items())
    ]
    return ([Tie(ties)], [*gains]) if ties else ([], [])


def _place_values(raw: PyTree, values: Mapping[str, Array]) -> PyTree:
    """``raw`` with these values at their paths, cast to its dtypes."""
    paths, leaves, treedef = flatten_with_names(raw)
    texts = list(map(path_text, paths))
    new = [values[text].astype(x.dtype) if text in values else x for text, x in zip(texts, leaves, strict=True)]
    return treedef.unflatten(new)


_NAME = r"(?!(?:weight|bias)$)([^.]+)"
_WHOLE = r"(.*\.modules_to_save)\.([^.]+)(\..+)"


def of_adapter(
    arrays: Mapping[str, np.ndarray], method: Method, config: Mapping[str, Any], adapter: str | None
) -> dict[str, np.ndarray]:
    """The tensors of one adapter, by the names that its file has; those of a file as they are."""
    patterns = [re.compile(pattern) for pattern in _name_patterns(method)]
    match_of_name = {name: match for name in arrays if (match := _first_match(patterns, name))}
    names = sorted({match[2] for match in match_of_name.values()})
    if not names and adapter is None:
        return dict(arrays)
    names_text = ", ".join(map(repr, names))
    if adapter is None and len(names) > 1:
        raise ValueError(
            f"from_peft takes one adapter, but the tensors hold {names_text}. Give its name, `adapter=...`."
        )
    if adapter is not None and adapter not in names:
        has = f"adapters named {names_text}" if names else "no adapter's name, as in a file"
        raise ValueError(f"from_peft got adapter={shown(adapter)}, but the tensors hold {has}. Correct `adapter`.")
    adapter_name = adapter or names[0]
    if bare := next((name for name in arrays if name not in match_of_name and _ends_like_method(name, method)), None):
        raise ValueError(
            f"from_peft takes the tensors of one adapter, but {bare!r} is that of a file, and "
            f"{next(iter(match_of_name))!r} of a model in memory. Read them one by one."
        )
    adapter_tensors = {
        match[1] + match[3]: arrays[name] for name, match in match_of_name.items() if match[2] == adapter_name
    }
    modules = {
        name.removesuffix(f".{end}") for name in adapter_tensors for end in method.suffixes if name.endswith(f".{end}")
    }
    beside = {
        name: file_name
        for name in arrays
        if name not in match_of_name and (file_name := _name_beside(name, adapter_name, modules, config))
    }
    return adapter_tensors | {file_name: arrays[name] for name, file_name in beside.items()}


def _name_patterns(method: Method) -> Iterator[str]:
    """What the names of adapters' tensors are, in three parts, of which the second is the adapter's name."""
    for end in method.suffixes:
        head, dot, last_name = end.rpartition(".")
        head, ending = (head, dot + last_name) if last_name in ("weight", "bias") else (end, "")
        yield rf"(.*\.{re.escape(head)})\.{_NAME}({re.escape(ending)})" + ("" if ending else r"(?:\.weight)?")
    for bank in method.banks:
        yield rf"(base_model\.{bank})\.([^.]+)()"


def _first_match(patterns: list[re.Pattern[str]], name: str) -> re.Match[str] | None:
    """The match of the first expression that fits a whole name, or None."""
    return next((match for pattern in patterns if (match := pattern.fullmatch(name))), None)


def _ends_like_method(name: str, method: Method) -> bool:
    """Whether a name ends as the tensors of a method do."""
    return any(name.endswith(f".{end}") for end in method.suffixes)


def _name_beside(name: str, adapter: str, modules: set[str], config: Mapping[str, Any]) -> str | None:
    """The name in a file of a tensor that trains beside the adapter: of a whole module, or a bias; or None."""
    if match := re.fullmatch(_WHOLE, name):
        return match[1] + match[3] if match[2] == adapter else None
    if not name.endswith(".bias"):
        return None
    which = config.get("bias", "none")
    is_adapted = name.removesuffix(f"{WRAPPED}.bias") in modules
    return name if which == "all" or (which != "none" and is_adapted) else None
