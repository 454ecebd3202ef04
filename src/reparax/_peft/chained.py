"""Methods of PEFT as rows of a table: a chain of stages, and where each tensor lies among its raw values."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax._axes.numbers import list_axes
from reparax._core.algebra import Chain, Parametrization
from reparax._core.calls import with_any_key
from reparax._peft.method import (
    Adapted,
    Method,
    StageNode,
    Tensors,
    Values,
    Written,
    known_number,
    one_of_all,
    require,
    stage_on_paths,
)
from reparax._peft.settings import ANY, Setting, one_of
from reparax._peft.target import Target
from reparax._tree.paths import items, path_text
from reparax._tree.raw import FIXED
from reparax._tree.values import value_of
from reparax.quantized import Stored
from reparax.sparse import Freeze

Stages = tuple[Parametrization, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A tensor of PEFT as a raw value.

    Attributes:
      place: The raw value's path below the array.
      read: The raw value for the tensor.
      write: The tensor for the raw value.
    """

    place: str
    read: Callable[[Target, Any], Array] = lambda target, x: jnp.asarray(x)
    write: Callable[[Target, Array], Array] = lambda target, x: x


def inputs(place: str) -> Part:
    """A factor (rank, in)."""
    return Part(place, Target.read_inputs, Target.write_inputs)


def transposed_part(place: str) -> Part:
    """A transposed matrix."""
    return Part(place, lambda target, x: jnp.asarray(x).T, lambda target, x: x.T)


def swapped_part(place: str) -> Part:
    """A tensor whose first two axes are in the other order."""
    return Part(place, lambda target, x: jnp.asarray(x).swapaxes(0, 1), lambda target, x: x.swapaxes(0, 1))


def column(place: str) -> Part:
    """A vector of shape (n, 1)."""
    return Part(place, lambda target, x: jnp.asarray(x).reshape(-1), lambda target, x: x.reshape(-1, 1))


@dataclass(frozen=True)
class Chained(Method):
    """A method that is a chain on a matrix.

    Attributes:
      parts: For the name of each tensor the raw value that it is.
      stages: The chain, from the array, the shapes of the tensors and the configuration.
      config: The settings that tell the chain, from the array and its stages by their kinds.
      constants: The raw values that no tensor holds, by their places, from the array, their type and the configuration.
      silent: The names of settings that the tensors tell too, or that matter in training alone.
      of_stage: What the outermost stage must have, where the places alone do not tell the method.
    """

    name: str
    parts: Mapping[str, Part]
    stages: Callable[[Target, Mapping[str, Shape], Mapping[str, Any]], Stages]
    config: Callable[[Target, Mapping[str, Any]], Mapping[str, Any]]
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    silent: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    constants: Mapping[str, Callable[[Target, Any, Mapping[str, Any]], Array]] = field(default_factory=dict[str, Any])
    of_stage: Mapping[str, Any] = field(default_factory=dict[str, Any])
    banks: tuple[str, ...] = ()
    whole_numbers: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ("kernel", "same")

    def __post_init__(self) -> None:
        suffixes = tuple(name for name in self.parts if name not in self.banks)
        object.__setattr__(self, "suffixes", suffixes)
        bias = one_of(("none", "all", f"{suffixes[0].split('_')[0]}_only"))  # their tensors tell which biases train
        silent = dict.fromkeys(("r", "init_weights", *self.silent.split()), ANY)
        object.__setattr__(self, "settings", {"bias": bias, **silent, **self.settings})

    def matches(self, node: StageNode) -> bool:
        """Whether a raw tree has the values of this method."""
        values, _ = _values_and_stages(node)
        fits = all(getattr(node.stage, name, None) == value for name, value in self.of_stage.items())
        return fits and values.keys() >= {*self.constants, *(part.place for part in self.parts.values())}

    def read(self, target: Target, tensors: Tensors, config: Mapping[str, Any], alpha: float, rank: int) -> Adapted:
        if len(target.shape) != 2:
            raise ValueError(f"{self.name} is read for matrices, but the array has shape {target.shape}")
        if missing := [name for name in self.parts if name not in tensors]:
            raise ValueError(f"{missing[0]} is missing")
        stages = self.stages(target, {name: x.shape for name, x in tensors.items()}, config)
        like = _types(stages, target.shape)
        shapes = {
            name: jax.eval_shape(lambda x, part=part: part.write(target, x), like[part.place][1]).shape
            for name, part in self.parts.items()
        }
        tensors = {**tensors, **{name: _part_of_bank(tensors[name], shapes[name]) for name in self.banks}}
        require(tensors, shapes)
        values = {place: make(target, like[place][1], config) for place, make in self.constants.items()}
        values |= {part.place: part.read(target, tensors[name]) for name, part in self.parts.items()}
        return Adapted(stages, {like[place][0]: x for place, x in values.items()})

    def write(self, target: Target, node: StageNode) -> Written:
        values, stages = _values_and_stages(node)
        tensors = {name: part.write(target, values[part.place]) for name, part in self.parts.items()}
        settings = self.config(target, {type(stage).kind: stage for stage in stages})
        config = {**self.defaults, **settings}
        peft_stages = self.stages(target, {name: x.shape for name, x in tensors.items()}, config)
        our_settings, peft_settings = _settings_of_stages(stages), _settings_of_stages(peft_stages)
        if our_settings.keys() != peft_settings.keys() or not all(
            np.allclose(our_settings[item], peft_settings[item], rtol=1e-6) for item in peft_settings
        ):
            chains = (" >> ".join(map(repr, item)) for item in (stages, peft_stages))
            raise ValueError(f"PEFT has no equivalent of {next(chains)}, only of {next(chains)}")
        for place, make in self.constants.items():
            if not jnp.array_equal(values[place], make(target, values[place], config)):
                raise ValueError(f"PEFT has no equivalent of the numbers at {place}, which it stores nowhere")
        return Written(tensors, flags=settings)

    def configure(self, modules: Mapping[str, Written]) -> dict[str, Any]:
        return {name: one_of_all(modules, name) for name in next(iter(modules.values())).flags}


def _part_of_bank(bank: np.ndarray, shape: Shape) -> np.ndarray:
    """The part of a shared tensor for one module, if it has as many axes."""
    return bank[tuple(map(slice, shape))] if bank.ndim == len(shape) else bank


def _values_and_stages(node: StageNode, prefix: str = "") -> tuple[Values, list[Any]]:
    """The raw values below an array by their paths, which begin with ``prefix``, without its base; and their stages."""
    values: Values = {}
    stages: list[Any] = []
    stage: Any = node.stage
    for name, x in node.values.items():
        path = f"{prefix}@{stage.kind}/{name}"
        if isinstance(x, StageNode) and not value_of(stage.raw_values, name).base:
            inner_values, inner_stages = _values_and_stages(x, f"{path}/")
            values |= inner_values
            stages += inner_stages
        elif not isinstance(x, StageNode):
            values[path] = x
    return values, [*stages, stage]


def _types(stages: Stages, shape: Shape) -> dict[str, tuple[str, jax.ShapeDtypeStruct]]:
    """The paths and types of a chain's raw values on an array of this shape, by their places."""
    p = Chain(tuple(stage_on_paths(stage, ["w"], ["w"]) for stage in stages))
    raw = jax.eval_shape(with_any_key(p.init), {"w": jax.ShapeDtypeStruct(shape, jnp.float32)})
    types = ((names[1:], x) for names, x in items(raw))
    return {path_text(tuple(x for x in names if x != FIXED)): (path_text(names), type_) for names, type_ in types}


def _settings_of_stages(stages: Iterable[Any]) -> dict[str, list[float]]:
    """The stages, without those on the base, and the numbers of each."""
    return dict(_settings_and_numbers(stage) for stage in stages if not isinstance(stage, Freeze | Stored))


def _settings_and_numbers(stage: Any) -> tuple[str, list[float]]:
    """The kind and the settings of a stage, as text by which equal stages are equal, and its numbers."""
    # PEFT stores no penalties.
    names_without_effect = ("where", "outside", "strength")
    settings = {
        field.name: getattr(stage, field.name) for field in fields(stage) if field.name not in names_without_effect
    }
    if "rows" in settings:
        axes_of_sides = {
            name: tuple(axis % 2 for axis in list_axes(settings.pop(name) or ())) for name in ("rows", "columns")
        }
        settings["rows"] = axes_of_sides["rows"] or tuple(1 - axis for axis in axes_of_sides["columns"]) or (0,)
    if isinstance(settings.get("axis"), int):
        settings["axis"] %= 2
    if "alpha" in settings and settings["alpha"] is None:
        settings["alpha"] = settings["rank"]
    numbers = [known_number(settings.pop(name)) for name in ("alpha", "factor", "scale") if name in settings]
    return f"{stage.kind} {settings}", numbers
