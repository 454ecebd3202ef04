"""What a method of PEFT is here: the settings that are understood, and how it reads and writes one array."""

import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.axes import list_axes
from reparax.core.chain import Parametrization
from reparax.io._files import is_number, shown
from reparax.io._parameters import require_known, unstack_stage
from reparax.io._peft_target import Target
from reparax.stages.adapters import Rotated
from reparax.stages.numbers import Scale
from reparax.stages.quantized import Quantized
from reparax.stages.shared import Tie
from reparax.stages.sparse import Freeze

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


Tensors = Mapping[str, np.ndarray]
Values = dict[str, Any]
"""Raw values by their path below the parameter: ``@lora/a``."""


@dataclass(frozen=True)
class Adapted:
    """The stages on one array, and their raw values.

    Attributes:
      stages: The stages, in the order of a chain. Their ``where`` is None for the array itself, or selects the value
        below the array on which they act.
      values: The raw values that PEFT stores.
    """

    stages: tuple[Parametrization, ...]
    values: Values


@dataclass(frozen=True)
class StageNode:
    """A stage of the chain on one array, with its raw values.

    Attributes:
      stage: The stage.
      values: The stage's values by name: arrays, or the nodes of other stages that make them.
    """

    stage: Parametrization
    values: Mapping[str, Any]

    def of(self, target: Target, *, inside: bool = False) -> "StageNode":
        """The node for one array of a stack; ``inside`` another stage, it may act on that stage's blocks."""
        if isinstance(self.stage, Freeze | Quantized | Tie):  # of which most methods store nothing
            return self
        stage = unstack_stage(self.stage, len(target.index))
        if target.n_experts and not inside:
            if list_axes(getattr(stage, "stacked", ())) != (0,):
                raise ValueError(
                    f"PEFT has one adapter for each expert, but {self.stage!r} acts on all "
                    f"together. Give it `stacked`, with the axis of experts"
                )
            stage = unstack_stage(stage, 1)
        if getattr(stage, "stacked", ()) != () and not inside:
            raise ValueError(
                f"PEFT has one adapter for each layer, but {self.stage!r} acts on a stack. Give the layers names with "
                f"{{i}} by `names`, such as 'layers.{{i}}.weight'"
            )
        blocks = isinstance(stage, Rotated)
        values = {
            name: x.of(target, inside=blocks) if isinstance(x, StageNode) else target.part(x)
            for name, x in self.values.items()
        }
        return StageNode(stage, values)

    def require_stage_on(self, name: str, stage_type: type) -> "StageNode":
        """The node of the stage on a value; raises an error if there is none, or not one of this type."""
        value = self.values[name]
        if not isinstance(value, StageNode) or not isinstance(value.stage, stage_type):
            raise ValueError(f"PEFT has no equivalent of {self.stage!r} with other stages on its {name!r}")
        return value

    def require_array(self, name: str) -> Any:
        """A value; raises an error if another stage makes it."""
        if isinstance(value := self.values[name], StageNode):
            raise ValueError(f"PEFT has no equivalent of {self.stage!r} with other stages on its {name!r}")
        return value


@dataclass(frozen=True)
class Written:
    """The PEFT form of one array.

    Attributes:
      tensors: The tensors of the module.
      factor: The factor of the difference, if the method has one.
      rank: The rank, if the method has one.
      flags: Settings of the configuration that must be equal for all modules.
    """

    tensors: Mapping[str, Array]
    factor: float | None = None
    rank: int | None = None
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Method:
    """A PEFT method.

    Attributes:
      name: Its ``peft_type``.
      alpha: The name of alpha in its configuration, if it has one.
      suffixes: The names of its tensors below their module.
      banks: The names of tensors that all modules share, of which each takes its part.
      own_biases: PEFT's word for the biases of adapted modules, if it trains biases beside this method.
      settings: The settings of its configuration that are understood, besides those of all methods.
      defaults: PEFT's values of settings that a configuration leaves out.
      layouts: The layouts of the weights that it adapts.
    """

    name: str
    alpha: str | None = None
    suffixes: tuple[str, ...]
    banks: tuple[str, ...] = ()
    own_biases: str | None = None
    settings: Mapping[str, Setting]
    defaults: Mapping[str, Any] = {}
    layouts: tuple[str, ...] = ("kernel", "same")

    def require_layout(self, target: Target) -> None:
        """Refuses a weight of which PEFT has no adapters by this method."""
        require_known([target])
        if target.layout not in self.layouts:
            raise ValueError(f"PEFT has no {self.name} for weights of the layout {target.layout!r}")

    @abstractmethod
    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        """The stages and raw values for the tensors of a module."""

    @abstractmethod
    def write(self, target: Target, node: StageNode) -> Written:
        """The PEFT form of raw values."""

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        """The configuration for these modules: all flags, and ranks and alphas if the method has them."""
        flags = {name: one_of_all(modules, name) for name in next(iter(modules.values())).flags}
        return flags | (ranks_and_alphas(self, modules) if self.alpha else {})


def require_matrix(method: Method, target: Target) -> None:
    """Refuses an array that is no matrix."""
    if len(target.shape) != 2:
        raise ValueError(f"{method.name} is read for matrices, but the array has shape {target.shape}")


def require(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses tensors that are missing, unexpected, or of another shape."""
    lines = [f"{name} is missing, expected shape {shape}" for name, shape in shapes.items() if name not in tensors]
    lines += [f"{name} is unexpected" for name in tensors if name not in shapes]
    lines += [
        f"expected {name} of shape {shape}, got {tensors[name].shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if lines:
        raise ValueError("; ".join(lines))


def known_number(x: Any) -> float:
    """A hyperparameter, which must be known to be written."""
    if isinstance(x, Tracer):
        raise ValueError("its number is traced, but only known numbers can be written")
    return float(x)


def split_scale(node: StageNode) -> tuple[StageNode, float]:
    """The node of the difference without its scale, and the scale."""
    value = node.values["x"]
    if isinstance(value, StageNode) and isinstance(value.stage, Scale):
        return value.require_stage_on("x", Parametrization), known_number(value.stage.factor)
    return node.require_stage_on("x", Parametrization), 1.0


def one_of_all(modules: Mapping[str, Written], flag: str) -> Any:
    """The value of a flag, which must be equal for all modules."""
    values = {written.flags[flag] for written in modules.values()}
    if len(values) > 1:
        text = ", ".join(f"{written.flags[flag]} at {module!r}" for module, written in modules.items())
        raise ValueError(f"PEFT has one {flag} for all modules, but got {text}")
    return values.pop()


def ranks_and_alphas(method: Method, modules: Mapping[str, Written], *, by_root: bool = False) -> dict[str, Any]:
    """The ranks and alphas of a configuration; an alpha is the factor times the rank, or times its square root."""
    ranks = {module: written.rank or 1 for module, written in modules.items()}
    shares = {module: math.sqrt(rank) if by_root else rank for module, rank in ranks.items()}
    alphas = {module: (written.factor or 0.0) * shares[module] for module, written in modules.items()}
    return _most_common("r", "rank_pattern", ranks) | _most_common(str(method.alpha), "alpha_pattern", alphas)


def _most_common(name: str, patterns: str, numbers: Mapping[str, float]) -> dict[str, Any]:
    """The most common number, and by name the numbers of the other modules."""
    number_of_module = {module: _as_whole(x) for module, x in numbers.items()}
    common = Counter(number_of_module.values()).most_common(1)[0][0]
    exceptions = {_module_pattern(module, list(numbers)): x for module, x in number_of_module.items() if x != common}
    return {name: common, patterns: dict(sorted(exceptions.items()))}


def _as_whole(x: float) -> int | float:
    """A number as an int if it is one but for rounding."""
    near = round(x, 9)
    return int(near) if float(near).is_integer() else near


def _module_pattern(module: str, modules: list[str]) -> str:
    """A pattern for one module only; PEFT would match a plain name with suffixes too."""
    return f"^{module}" if any(other_module.endswith(f".{module}") for other_module in modules) else module
