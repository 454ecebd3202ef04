"""The settings of PEFT's configurations that are understood; all others must have no effect."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reparax.io.torch.shown import shown
from reparax.io.torch.tensors import is_number

MERGE = "Merge the adapter in PEFT with `merge_and_unload`, and read the weights with `from_torch`."


@dataclass(frozen=True)
class Setting:
    """The values of a setting that are understood.

    Attributes:
      fits: Whether a value is one of them.
      takes: All values that PEFT takes, in words; None if there are others, which no stage supports.
    """

    fits: Callable[[Any], bool]
    takes: str | None = None


def one_of(values: Sequence[Any]) -> Setting:
    """A setting of which a few values are understood; PEFT does not distinguish the cases of words."""
    texts = [repr(value).lower() for value in values]
    return Setting(lambda value: shown(value).lower() in texts)


def by_pattern(setting: Setting) -> Setting:
    """A setting with a value for each of some regular expressions."""
    return Setting(
        lambda value: (
            isinstance(value, Mapping)
            and all(_is_pattern(x) and _is_pattern(in_a_name(x)) and setting.fits(value[x]) for x in value)
        ),
        f"a dict of regular expressions and, for each, {setting.takes}",
    )


def whole_number(least: int, most: int) -> Setting:
    """A setting that is a whole number."""
    return Setting(
        lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"
    )


def in_a_name(pattern: str) -> str:
    """The expression by which PEFT looks for a pattern at the end of a module's name."""
    return rf"(.*\.)?({pattern})"


def _is_pattern(text: object) -> bool:
    """Whether a value is a regular expression that Python compiles."""
    try:
        return isinstance(text, str) and bool(re.compile(text))
    except (re.error, RecursionError, OverflowError):
        return False


def _is_names(value: Any) -> bool:
    """Whether a value is an expression, or a list of names."""
    return _is_pattern(value) or (isinstance(value, list | tuple | set) and all(isinstance(x, str) for x in value))


def _is_indices(value: Any) -> bool:
    """Whether a value is a list of whole numbers from 0 to 2^31 - 1."""
    return isinstance(value, list | tuple) and all(type(x) is int and 0 <= x < 2**31 for x in value)


ANY = Setting(lambda value: True)
FLAG = Setting(lambda value: isinstance(value, bool), "True or False")

RANK = Setting(lambda value: type(value) is int and value >= 1, "a whole number of at least 1")
NUMBER = Setting(is_number, "a finite number")
INDICES = Setting(_is_indices, "a list of whole numbers")
INDICES_BY_NAME = Setting(
    lambda value: _is_indices(value) or (isinstance(value, Mapping) and all(map(_is_indices, value.values()))),
    "a list of whole numbers, or a dict of names and, for each, such a list",
)
LISTED = Setting(
    lambda value: isinstance(value, list | tuple | set) and all(isinstance(x, str) for x in value), "a list of names"
)
NAMES = Setting(_is_names, "a list of names, or a regular expression")

COMMON: Mapping[str, Setting] = dict.fromkeys(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "revision",
        "target_modules",
        "task_type",
    ),
    ANY,
)
"""What each method has, and what the names of the tensors tell."""


def check_settings(name: str, config: Mapping[str, Any], understood: Mapping[str, Setting]) -> dict[str, Any]:
    """The settings that have a value.

    Raises:
      ValueError: If a setting is not understood and has a value other than a neutral one, which means "none", or if its
        value is not one of those that are understood.
    """
    set_values = {key: value for key, value in config.items() if value is not None}
    settings = {**COMMON, **understood}
    wrong = {key: x for key, x in set_values.items() if not (settings[key].fits(x) if key in settings else not x)}
    for key, value in wrong.items():
        if key in settings and (takes := settings[key].takes):
            raise ValueError(f"from_peft takes {takes} as {key} of {name}, but got {shown(value)}. Correct `config`.")
    if wrong:
        wrong_text = ", ".join(f"{key}={shown(value)}" for key, value in wrong.items())
        raise ValueError(f"from_peft has no stage for {name} with {wrong_text}. {MERGE}")
    return set_values
