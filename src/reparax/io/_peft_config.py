"""Interprets ``adapter_config.json``: which methods and settings are supported, and which modules they name.

Each method is an entry of ``METHODS``, which groups the method's settings by kind, such as "flag" or "names". Each kind
is an entry of ``_KINDS``, which says how to check the value of a setting. The functions below :func:`read_config` apply
the settings to a module or a tensor, following PEFT's own rules. Most of these rules compare names in the configuration
with the ends of module names.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reparax.io._files import is_number, is_positive_integer, short_repr

MERGE = "Merge the adapter in PEFT with `merge_and_unload`, and read the weights with `from_torch`."
BIAS = "lora_B.bias"
DELTA = "trainable_tokens_delta"
TOKENS = f"token_adapter.{DELTA}"


@dataclass(frozen=True)
class Method:
    """A method of PEFT.

    Attributes:
      suffixes: The suffixes of the method's tensor names, which follow the name of the module. They include those for
        biases and tokens that train beside the adapter.
      layouts: The layouts of the weights for which the method is supported.
      settings: The supported settings, in addition to those that all methods share. Maps each kind of setting to the
        names of its settings, separated by spaces.
    """

    suffixes: tuple[str, ...]
    layouts: tuple[str, ...]
    settings: Mapping[str, str]

    def suffix_of(self, name: str) -> str | None:
        """Returns the method's suffix that a tensor's name ends with, or None."""
        return next((suffix for suffix in self.suffixes if name.endswith(f".{suffix}")), None)


METHODS: Mapping[str, Method] = {
    "LORA": Method(
        suffixes=(
            *("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
            *(BIAS, TOKENS),
        ),
        layouts=("kernel", "same", "conv1d", "embedding", "experts:kernel", "experts:same", "experts:conv1d"),
        settings={
            "rank": "r",
            "number": "lora_alpha lora_dropout",
            "ranks by pattern": "rank_pattern",
            "numbers by pattern": "alpha_pattern",
            "flag": "use_rslora use_dora fan_in_fan_out lora_bias",
            "biases": "bias",
            "names": "target_parameters",
            "indices by name": "trainable_token_indices",
            # These settings have no effect by themselves: they only configure features that other settings turn on.
            "any": "loftq_config eva_config corda_config lora_ga_config megatron_core qalora_group_size runtime_config",
        },
    ),
    "IA3": Method(
        suffixes=("ia3_l",),
        layouts=("kernel", "same", "conv1d"),
        settings={"flag": "fan_in_fan_out", "names or pattern": "feedforward_modules", "any": "init_ia3_weights"},
    ),
    "TRAINABLE_TOKENS": Method(
        suffixes=(DELTA,),
        layouts=("kernel", "same", "embedding"),
        settings={"indices": "token_indices", "any": "init_weights"},
    ),
}
"""The supported methods, keyed by ``peft_type``."""

_COMMON = {
    "any": "auto_mapping base_model_name_or_path inference_mode peft_type peft_version revision task_type",
    "modules": "target_modules",
    "names or pattern": "exclude_modules",
    "names": "modules_to_save",
    "layers": "layers_to_transform",
    "patterns": "layers_pattern",
}
"""The settings that all methods share, keyed by kind."""

_DEFAULTS = {"r": 8, "lora_alpha": 8, "bias": "none"}
"""PEFT's defaults of the settings without which there is no LoRA, so PEFT does not accept None for them."""

_INITIALIZATIONS = ("true", "false", "'gaussian'", "'orthogonal'", "'eva'")
"""The ``repr`` of each supported initialization of LoRA. Other ones also change the base weight, or fix a factor."""


def at_end_of_name(pattern: str) -> str:
    """Returns the regular expression that PEFT uses to find a pattern at the end of a module's name."""
    return rf"(.*\.)?({pattern})"


def _before_layer_number(pattern: str) -> str:
    """Returns PEFT's regular expression for a layer number that follows ``pattern`` in the name of a module."""
    return rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\."


def _is_pattern(text: Any, placed: Callable[[str], str] = str) -> bool:
    """Returns whether a value is a valid regular expression, both alone and in ``placed(value)``, as PEFT uses it."""
    try:
        return isinstance(text, str) and all(map(re.compile, (text, placed(text))))
    except (re.error, RecursionError, OverflowError):
        return False


def _are_names(value: Any) -> bool:
    """Returns whether a value is a list of names."""
    return isinstance(value, list | tuple | set) and all(isinstance(x, str) for x in value)


def _are_indices(value: Any) -> bool:
    """Returns whether a value is a list of integers from 0 to 2^31 - 1."""
    return isinstance(value, list | tuple) and all(type(x) is int and 0 <= x < 2**31 for x in value)


def _are_names_or_pattern(value: Any) -> bool:
    """Returns whether a value is a list of names or a regular expression."""
    return _are_names(value) or _is_pattern(value)


def _as_list(value: Any) -> Sequence[Any]:
    """Returns a list unchanged, and wraps any other value in a list."""
    return value if isinstance(value, list | tuple) else [value]


def _is_dict_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a function that checks whether a value is a dict from regular expressions to values that fit."""
    return lambda x: isinstance(x, Mapping) and all(_is_pattern(key, at_end_of_name) and fits(x[key]) for key in x)


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "any": (lambda value: True, ""),
    "flag": (lambda value: isinstance(value, bool), "True or False"),
    "number": (is_number, "a finite number"),
    "rank": (is_positive_integer, "an integer of at least 1"),
    "biases": (lambda value: value in ("none", "all", "lora_only"), "'none', 'all' or 'lora_only'"),
    "names": (_are_names, "a list of names"),
    "names or pattern": (_are_names_or_pattern, "a list of names or a regular expression"),
    # PEFT replaces the shorthand 'all-linear' by names when it saves a file. reparax cannot do so, because only PEFT
    # knows the class of each layer, and which layer is the output layer.
    "modules": (
        lambda value: _are_names_or_pattern(value) and str(value).lower() != "all-linear",
        "a list of names or a regular expression, and not 'all-linear'",
    ),
    "layers": (lambda value: _are_indices(_as_list(value)), "an integer or a list of integers"),
    "patterns": (
        lambda value: all(_is_pattern(x, _before_layer_number) for x in _as_list(value)),
        "a regular expression or a list of them",
    ),
    "indices": (_are_indices, "a list of integers"),
    "indices by name": (
        lambda value: _are_indices(value) or (isinstance(value, Mapping) and all(map(_are_indices, value.values()))),
        "a list of integers or a dict from names to such lists",
    ),
    "ranks by pattern": (
        _is_dict_of(is_positive_integer),
        "a dict from regular expressions to integers of at least 1",
    ),
    "numbers by pattern": (_is_dict_of(is_number), "a dict from regular expressions to finite numbers"),
}
"""Maps each kind of setting to a function that checks a value, and to a description of the values that PEFT accepts."""


def read_config(config: Any) -> dict[str, Any]:
    """Checks a PEFT configuration and returns its settings that are not None, with some of PEFT's defaults filled in.

    Raises:
      ValueError: If the method is not supported, if PEFT does not accept the value of a setting, or if an unsupported
        setting is not neutral (None, False, 0 or empty).
    """
    if not isinstance(config, Mapping) or "peft_type" not in config:
        raise ValueError(
            "from_peft takes the contents of adapter_config.json as `config`, but got a value without 'peft_type'. "
            "Read the file with `json.load`."
        )
    name = str(getattr(config["peft_type"], "value", config["peft_type"]))
    if name not in METHODS:
        raise ValueError(
            f"from_peft reads adapters of the types {', '.join(sorted(METHODS))}, but got the type {name}. If it "
            f"changes weights, merge it in PEFT with `merge_and_unload`, and read the weights with `from_torch`."
        )
    values = {key: value for key, value in config.items() if value is not None or key in _DEFAULTS}
    known = [*METHODS[name].settings.items(), *_COMMON.items()]
    kinds = {key: kind for kind, keys in known for key in keys.split()}
    wrong = [f"{key}={short_repr(x)}" for key, x in values.items() if not _is_supported(name, key, x, kinds)]
    if wrong:
        raise ValueError(f"from_peft does not support {name} with {', '.join(wrong)}. {MERGE}")
    return {**_DEFAULTS, **values, "peft_type": name}


def _is_supported(method: str, key: str, value: Any, kinds: Mapping[str, str]) -> bool:
    """Returns whether a setting is supported or neutral. Raises an error for a value that PEFT does not accept."""
    if (method, key) == ("LORA", "init_lora_weights"):
        return short_repr(value).lower() in _INITIALIZATIONS  # PEFT ignores case in this setting.
    if key not in kinds:
        return not value
    fits, expected = _KINDS[kinds[key]]
    if not fits(value):
        got = short_repr(value)
        raise ValueError(
            f"from_peft: {key} of {method} must be {expected}, but got {got}. Pass the `config` that PEFT saved with "
            f"the adapter."
        )
    return True


def number_for(module: str, config: Mapping[str, Any], patterns: str, common: str) -> Any:
    """Returns a module's rank or alpha: the value of the first pattern that matches its name, or the common value."""
    numbers = config.get(patterns) or {}
    return next((x for pattern, x in numbers.items() if re.fullmatch(at_end_of_name(pattern), module)), config[common])


def token_indices(config: Mapping[str, Any], module: str) -> Sequence[int]:
    """Returns the indices of the tokens of an embedding table that train beside LoRA.

    The setting ``trainable_token_indices`` is either one list or a dict with a list for each table.
    """
    indices = config.get("trainable_token_indices") or {}
    by_table = indices if isinstance(indices, Mapping) else {module: indices}
    return next((by_table[table] for table in by_table if matches_names([table], module)), [])


def expected_suffixes(config: Mapping[str, Any], tensor: str) -> dict[str, tuple[str, ...]]:
    """Maps each setting that selects a parameter to the suffixes of the tensors that may hold the trained values.

    For each setting, a file must have a tensor of the parameter with at least one of the suffixes. The suffix ``""``
    means that the parameter itself is saved.
    """
    module, _, name = tensor.rpartition(".")
    if is_saved(config, module):
        return {"modules_to_save": ("",)}
    adapted, tables, biases = is_adapted(config, module), config.get("trainable_token_indices"), config["bias"]
    of_adapter = tuple(suffix for suffix in METHODS[config["peft_type"]].suffixes if suffix != TOKENS)
    rows = {
        "weight": (
            ("target_modules", adapted, of_adapter),
            ("trainable_token_indices", isinstance(tables, Mapping) and token_indices(config, module), (TOKENS,)),
        ),
        "bias": (
            ("lora_bias", adapted and config.get("lora_bias"), (BIAS,)),
            ("bias", biases == "all" or (adapted and biases == "lora_only"), ("",)),
        ),
    }
    of_itself = ("target_parameters", matches_names(config.get("target_parameters", ()), tensor), of_adapter)
    return {setting: suffixes for setting, is_named, suffixes in (*rows.get(name, ()), of_itself) if is_named}


def is_adapted(config: Mapping[str, Any], module: str) -> bool:
    """Returns whether PEFT adapts a module: ``target_modules`` names it, and no other setting excludes it."""
    names = config.get("target_modules") or ()
    excluded = config.get("exclude_modules") or ()
    if matches_names(excluded, module) or is_saved(config, module) or not matches_names(names, module):
        return False
    return isinstance(names, str) or module in names or _is_in_layers(config, module)


def matches_names(names: Any, module: str) -> bool:
    """Returns whether a module's name matches the regular expression ``names``, or ends with one of the ``names``."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return f".{module}".endswith(tuple(f".{name}" for name in names))


def _is_in_layers(config: Mapping[str, Any], module: str) -> bool:
    """Returns whether ``layers_to_transform`` is absent or lists the layer number in a module's name."""
    layers = _as_list(config.get("layers_to_transform", []))
    patterns = _as_list(config.get("layers_pattern") or r"[^.]+\.[^.]*")
    found = (re.match(_before_layer_number(pattern), module) for pattern in patterns)
    return not layers or next((int(match["number"]) for match in found if match), None) in layers


def is_saved(config: Mapping[str, Any], module: str) -> bool:
    """Returns whether PEFT saves a module whole because ``modules_to_save`` names it or one of its ancestors."""
    parts, names = module.split("."), tuple(config.get("modules_to_save") or ())
    return any(".".join(parts[: i + 1]).endswith(names) for i in range(len(parts)))


def is_feedforward(config: Mapping[str, Any], module: str) -> bool:
    """Returns whether IA3 multiplies a module's inputs, not its outputs, because ``feedforward_modules`` names it."""
    names = config.get("feedforward_modules") or []
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module.endswith(name) for name in names)
