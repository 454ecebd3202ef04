"""What a row of the table of PEFT methods is: settings that are understood, and how it reads and writes one array."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.axes import list_axes
from reparax.core.chain import Parametrization
from reparax.io._files import is_number, is_size, shown
from reparax.io._parameters import require_known, unstack_stage
from reparax.io._peft_target import Target
from reparax.stages.adapters import Rotated
from reparax.stages.quantized import Quantized
from reparax.stages.shared import Tie
from reparax.stages.sparse import Freeze

MERGE = "Merge the adapter in PEFT with `merge_and_unload`, and read the weights with `from_torch`."


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
    """Whether a value is a list of names."""
    return isinstance(value, list | tuple | set) and all(isinstance(x, str) for x in value)


def _is_indices(value: Any) -> bool:
    """Whether a value is a list of whole numbers from 0 to 2^31 - 1."""
    return isinstance(value, list | tuple) and all(type(x) is int and 0 <= x < 2**31 for x in value)


def _by_pattern(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether a value is a dict of regular expressions and, for each, a value that fits."""

    def is_one(value: Any) -> bool:
        is_dict = isinstance(value, Mapping)
        return is_dict and all(_is_pattern(x) and _is_pattern(in_a_name(x)) and fits(value[x]) for x in value)

    return is_one


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "any": (lambda value: True, ""),
    "flag": (lambda value: isinstance(value, bool), "True or False"),
    "number": (is_number, "a finite number"),
    "rank": (is_size, "a whole number of at least 1"),
    # Each term is a product of matrices; PEFT has 5 of them, and float32 holds no more than these.
    "terms": (lambda value: is_size(value) and value <= 100, "a whole number from 1 to 100"),
    "names": (_is_names, "a list of names"),
    "pattern": (lambda value: _is_pattern(value) or _is_names(value), "a list of names, or a regular expression"),
    "indices": (_is_indices, "a list of whole numbers"),
    "indices by name": (
        lambda value: _is_indices(value) or (isinstance(value, Mapping) and all(map(_is_indices, value.values()))),
        "a list of whole numbers, or a dict of names and, for each, such a list",
    ),
    "ranks by pattern": (
        _by_pattern(is_size),
        "a dict of regular expressions and, for each, a whole number of at least 1",
    ),
    "numbers by pattern": (_by_pattern(is_number), "a dict of regular expressions and, for each, a finite number"),
}
"""For each kind of setting, whether a value is one that PEFT takes, and these in words."""

_COMMON = (
    "auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern layers_to_transform "
    "modules_to_save peft_type peft_version revision target_modules task_type"
)
"""What each method has, and what the names of the tensors tell."""


class Part(NamedTuple):
    """A tensor of PEFT as a raw value.

    Attributes:
      place: Where the raw value is below the parameter: ``@lora/a``.
      shape: The shape of the tensor.
      read: Makes the raw value of the tensor.
      write: Makes the tensor of the raw value, but for its shape.
    """

    place: str
    shape: tuple[int, ...]
    read: Callable[[Array], Array] = jnp.asarray
    write: Callable[[Array], Array] = jnp.asarray


@dataclass(frozen=True)
class Adapted:
    """The stages on one array, and their raw values.

    Attributes:
      stages: The stages, in the order of a chain. Their ``where`` is None for the array itself, or selects the value
        below the array on which they act.
      values: The raw values that PEFT stores, by their places below the parameter.
    """

    stages: tuple[Parametrization, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class StoredAdapter:
    """What a file says of one adapted array.

    Attributes:
      target: The array.
      tensors: The tensors of its module, by the ends of their names.
      config: The configuration.
      rank: The rank of this module.
      alpha: Its alpha.
    """

    target: Target
    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, Any]
    rank: int
    alpha: float

    def values(self, parts: Mapping[str, Part]) -> dict[str, Array]:
        """The raw values of the tensors; raises an error if one is missing, unexpected or of another shape."""
        require_shapes(self.tensors, {name: part.shape for name, part in parts.items()})
        return {part.place: part.read(jnp.asarray(self.tensors[name])) for name, part in parts.items()}


@dataclass(frozen=True)
class StageNode:
    """A stage of the chain on one array, with its raw values.

    Attributes:
      stage: The stage.
      values: The stage's values by name: arrays, or the nodes of other stages that make them.
      target: The array, which may be one of a stack, whereas the values are those of the whole stack.
    """

    stage: Parametrization
    values: Mapping[str, Any]
    target: Target

    def maker(self, name: str) -> Any:
        """The stage that makes a value; None if that is an array of the raw tree."""
        value = self.values[name]
        return value.stage if isinstance(value, StageNode) else None

    def of_one(self, *, acts_on_blocks: bool = False) -> "StageNode":
        """The node for one array of a stack; a stage inside of another one may act on a stack of its blocks."""
        if isinstance(self.stage, Freeze | Quantized | Tie):  # of which most methods store nothing
            return self
        stage = unstack_stage(self.stage, len(self.target.index))
        stage = stage if acts_on_blocks else self._unstack_experts(stage)
        has_blocks = isinstance(stage, Rotated)
        values = {
            name: value.of_one(acts_on_blocks=has_blocks) if isinstance(value, StageNode) else value
            for name, value in self.values.items()
        }
        return StageNode(stage, values, self.target)

    def _unstack_experts(self, stage: Parametrization) -> Parametrization:
        """The stage for one expert, or for an array that has none; refuses one that acts on a stack of another kind."""
        if self.target.n_experts:
            if list_axes(getattr(stage, "stacked", ())) != (0,):
                raise ValueError(
                    f"PEFT has one adapter for each expert, but {self.stage!r} acts on all "
                    f"together. Give it `stacked`, with the axis of experts"
                )
            return unstack_stage(stage, 1)
        if getattr(stage, "stacked", ()) != ():
            raise ValueError(
                f"PEFT has one adapter for each layer, but {self.stage!r} acts on a stack. Give the layers names with "
                f"{{i}} by `names`, such as 'layers.{{i}}.weight'"
            )
        return stage

    def at(self, place: str) -> Any:
        """The array at a place such as ``@gain/g``, or the node at one such as ``@gain/w/@freeze``.

        Raises:
          ValueError: If other stages than those of the place make it.
        """
        _, name, *below = place.replace("/@fixed", "").split("/", 2)
        value = self.values[name]
        maker = self.maker(name)
        marker = below[0].partition("/")[0] if below else None
        if (maker and f"@{maker.kind}") != marker:
            raise ValueError(f"PEFT has no equivalent of {self.stage!r} with other stages on its {name!r}")
        if not below:
            return self.target.part(value)
        return value.at(below[0]) if below[0] != marker else value

    def write(self, parts: Mapping[str, Part]) -> dict[str, Array]:
        """The tensors of the raw values."""
        return {name: part.write(self.at(part.place)).reshape(part.shape) for name, part in parts.items()}


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


def _all_flags(modules: Mapping[str, Written]) -> dict[str, Any]:
    """The flags of all modules as a configuration."""
    return {name: one_of_all(modules, name) for name in next(iter(modules.values())).flags}


@dataclass(frozen=True)
class Method:
    """A method of PEFT: what its files hold, and two hooks, which read and write one array as a chain of stages.

    Attributes:
      name: Its ``peft_type``.
      suffixes: The names of its tensors below their module.
      settings: The settings of its configuration that are understood, besides those of all methods: by kind, names with
        spaces between them.
      read: The stages and raw values for the tensors of a module.
      write: The PEFT form of raw values.
      configure: The configuration for what is written of all modules.
      banks: The names of tensors that all modules share, of which each takes its part.
      biases: PEFT's word for the biases of adapted modules, if it trains biases beside this method; the others of
        ``bias`` are those for none and for all.
      alpha: The name of alpha in its configuration, if it has one.
      defaults: PEFT's values of settings that a configuration leaves out.
      layouts: The layouts of the weights that it adapts.
      matrices: Whether only matrices are read.
      words: Settings of which only these values are understood; PEFT does not distinguish the cases of words.
    """

    name: str
    suffixes: tuple[str, ...]
    settings: Mapping[str, str]
    read: Callable[[StoredAdapter], Adapted]
    write: Callable[[StageNode], Written]
    configure: Callable[[Mapping[str, Written]], dict[str, Any]] = _all_flags
    banks: tuple[str, ...] = ()
    biases: str | None = None
    alpha: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    layouts: tuple[str, ...] = ("kernel", "same")
    matrices: bool = False
    words: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])

    def require_layout(self, target: Target) -> None:
        """Refuses a weight of which PEFT has no adapters by this method."""
        require_known([target])
        if target.layout not in self.layouts:
            raise ValueError(f"PEFT has no {self.name} for weights of the layout {target.layout!r}")
        if target.n_experts == 1 and target.expert().layout == "conv1d":
            raise ValueError("PEFT 0.21 transposes the update of a stack (experts, in, out) of one expert")

    def require_matrix(self, target: Target) -> None:
        """Refuses an array that is no matrix, if only matrices are read."""
        if self.matrices and len(target.shape) != 2:
            raise ValueError(f"{self.name} is read for matrices, but the array has shape {target.shape}")

    def end_of(self, name: str) -> str | None:
        """The one of the suffixes with which a name ends, or None."""
        return next((end for end in self.suffixes if name.endswith(f".{end}")), None)

    def check_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that have a value, and the defaults of the others.

        Raises:
          ValueError: If a setting is not understood and has a value other than a neutral one, which means "none", or
            if its value is not one of those that are understood.
        """
        values = {key: value for key, value in config.items() if value is not None}
        wrong = [f"{key}={shown(value)}" for key, value in values.items() if not self._is_understood(key, value)]
        if wrong:
            raise ValueError(f"from_peft has no stage for {self.name} with {', '.join(wrong)}. {MERGE}")
        return {**self.defaults, **values}

    def _is_understood(self, key: str, value: Any) -> bool:
        """Whether a setting is known, or neutral; raises an error for a value that PEFT itself does not take."""
        words = self.words | ({"bias": ("none", "all", self.biases)} if self.biases else {})
        if key in words:
            return shown(value).lower() in [repr(word).lower() for word in words[key]]
        known = [*self.settings.items(), ("any", _COMMON)]
        kinds = {name: kind for kind, names in known for name in names.split()}
        if key not in kinds:
            return not value
        fits, expected = _KINDS[kinds[key]]
        if not fits(value):
            raise ValueError(
                f"from_peft takes {expected} as {key} of {self.name}, but got {shown(value)}. Correct `config`."
            )
        return True


def require_shapes(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
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


def one_of_all(modules: Mapping[str, Written], flag: str) -> Any:
    """The value of a flag, which must be equal for all modules."""
    values = {written.flags[flag] for written in modules.values()}
    if len(values) > 1:
        text = ", ".join(f"{written.flags[flag]} at {module!r}" for module, written in modules.items())
        raise ValueError(f"PEFT has one {flag} for all modules, but got {text}")
    return values.pop()


def ranks_and_alphas(alpha: str, modules: Mapping[str, Written], *, by_root: bool = False) -> dict[str, Any]:
    """The ranks and alphas of a configuration; an alpha is the factor times the rank, or times its square root."""
    ranks = {module: written.rank or 1 for module, written in modules.items()}
    alphas = {
        module: (written.factor or 0.0) * (math.sqrt(ranks[module]) if by_root else ranks[module])
        for module, written in modules.items()
    }
    return _most_common("r", "rank_pattern", ranks) | _most_common(alpha, "alpha_pattern", alphas)


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
