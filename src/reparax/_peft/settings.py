"""The settings of PEFT's configurations that are understood; all others must have no effect."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reparax._peft.refused import MERGE, SETTINGS


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
    known = [repr(value).lower() for value in values]
    return Setting(lambda value: repr(value).lower() in known)


def by_pattern(each: Setting) -> Setting:
    """A setting with a value for each of some regular expressions."""
    return Setting(
        lambda value: isinstance(value, Mapping) and all(_is_pattern(x) and each.fits(value[x]) for x in value),
        f"a dict of regular expressions and, for each, {each.takes}",
    )


def _is_pattern(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(re.compile(text))
    except re.error:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_names(value: Any) -> bool:
    return _is_pattern(value) or (isinstance(value, list | tuple | set) and all(isinstance(x, str) for x in value))


ANY = Setting(lambda value: True)
FLAG = Setting(lambda value: isinstance(value, bool), "True or False")
RANK = Setting(lambda value: type(value) is int and value >= 1, "a whole number of at least 1")
NUMBER = Setting(_is_number, "a finite number")
INDICES = Setting(
    lambda value: isinstance(value, list | tuple) and all(type(x) is int and x >= 0 for x in value),
    "a list of whole numbers",
)
SEED = Setting(lambda value: type(value) is int and 0 <= value < 2**32, "a whole number from 0 to 2^32 - 1")
NAMES = Setting(_is_names, "a list of names, or a regular expression")

OF_PRODUCTS: Mapping[str, Setting] = {
    "r": RANK,
    "alpha": NUMBER,
    "rank_pattern": by_pattern(RANK),
    "alpha_pattern": by_pattern(NUMBER),
    "use_effective_conv2d": FLAG,
    "init_weights": ANY,
    "rank_dropout": NUMBER,
    "module_dropout": NUMBER,
}
"""What LoHa and LoKr, the products of low-rank factors, have in common."""

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
    given = {key: value for key, value in config.items() if value is not None}
    settings = {**COMMON, **understood}
    wrong = {key: x for key, x in given.items() if not (settings[key].fits(x) if key in settings else not x)}
    for key, value in wrong.items():
        if key in settings and (takes := settings[key].takes):
            raise ValueError(f"from_peft takes {takes} as {key} of {name}, but got {value!r}. Correct `config`.")
    if wrong:
        shown = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        why = "".join(f": {SETTINGS[key]}" for key in wrong if key in SETTINGS)
        raise ValueError(f"from_peft has no stage for {name} with {shown}{why}. {MERGE}")
    return given
