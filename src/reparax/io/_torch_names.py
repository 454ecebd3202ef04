"""Torch's names for the raw values of stages in a state dict."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors
from reparax.core.paths import Names
from reparax.core.raw import parameter_path
from reparax.io._parameters import Entry, unstack_stage
from reparax.stages.matrices import Orthogonal
from reparax.stages.norms import SpectralNorm, WeightNorm
from reparax.stages.sparse import Freeze, GlobalMagnitudePruning, MagnitudePruning, Mask, NByM, RandomPruning

EXCHANGE_PLAIN = (
    "Exchange plain weights: `p.init(from_torch(Chain(), state_dict, like))`, `to_torch(Chain(), p.fold(raw))`."
)


@dataclass(frozen=True)
class Twin:
    """Torch's names for the values of a stage.

    Attributes:
      listed: The names for a parametrization, below ``parametrizations.weight``; values that are not originals are
        under the number of the parametrization.
      hooked: The suffixes for a hook, after ``weight``.
      fields: The fields of the stage that torch has too, or that have no effect on what its module computes; all others
        must have their defaults. None: all of them, as the values alone tell what the stage does.
    """

    listed: Mapping[str, str]
    hooked: Mapping[str, str]
    fields: tuple[str, ...] | None = None


_PRUNED = Twin({}, {"w": "_orig", "mask": "_mask"})

TWINS: dict[type[Parametrization], Twin] = {
    WeightNorm: Twin({"g": "original0", "v": "original1"}, {"g": "_g", "v": "_v"}, ("where", "outside", "axis")),
    SpectralNorm: Twin(
        {"w": "original", "u": "_u", "v": "_v"},
        {"w": "_orig", "u": "_u", "v": "_v"},
        ("where", "outside", "rows", "columns", "n_steps"),
    ),
    Orthogonal: Twin({"x": "original", "base": "base"}, {}),
    Freeze: Twin({}, {"w": ""}),
    Mask: _PRUNED,
    NByM: _PRUNED,
    MagnitudePruning: _PRUNED,
    RandomPruning: _PRUNED,
    GlobalMagnitudePruning: _PRUNED,
}


@dataclass(frozen=True)
class StageValues:
    """The raw values of one stage for a parameter.

    Attributes:
      stage: The stage; None for an array that no stage replaced.
      entry: The tensor of torch.
      keys: The path of each value in the raw tree.
      names: The torch name of each value.
    """

    stage: Parametrization | None
    entry: Entry
    keys: Mapping[str, Names]
    names: Mapping[str, str]


_Part = tuple[Parametrization | None, Mapping[str, Names], Mapping[str, str]]
"""A stage, the path of each of its values, and the torch name of each."""


def _require_fields(stage: Any, twin: Twin) -> None:
    """Refuses a stage with a field that torch does not have."""
    for field in fields(stage):
        is_foreign = twin.fields is not None and field.name not in twin.fields
        if is_foreign and getattr(stage, field.name) != field.default:
            how = "Name each layer of a stack, with {i}, by `names`. " if field.name == "stacked" else ""
            raise ValueError(f"torch has no equivalent of {field.name} in {stage!r}. {how}{EXCHANGE_PLAIN}")


@dataclass(frozen=True)
class Naming:
    """Torch's names for the values of a chain.

    Attributes:
      makers: How each array is made that stages compute, by its place.
      by_hook: Whether torch uses a hook for a tensor, for stages that exist as a hook and as a parametrization.
    """

    makers: Mapping[Names, tuple[Any, Mapping[str, Names]]]
    by_hook: Callable[[str, Twin], bool]

    def raw_values_of(self, place: Names, entry: Entry) -> Iterator[StageValues]:
        """The raw values for a tensor of torch."""
        for stage, places, names in self._within(place, entry.tensor):
            yield StageValues(self._of_one(stage, entry), entry, places, names)

    def _of_one(self, stage: Parametrization | None, entry: Entry) -> Parametrization | None:
        """The stage on one of the stacked arrays."""
        if stage is None or not TWINS[type(stage)].listed:
            return stage
        with locate_errors(repr(entry.path)):
            stage_on_one = unstack_stage(stage, len(entry.index))
            _require_fields(stage_on_one, TWINS[type(stage)])
        return stage_on_one

    def _within(self, place: Names, tensor: str, within: str | None = None) -> Iterator[_Part]:
        """The stages of ``tensor``, which may be the original of the list of parametrizations ``within``."""
        if place not in self.makers:
            yield None, {"": place}, {"": tensor}
            return
        stage, twin = self._known(place)
        is_listed = self._is_listed(twin, tensor, within)
        base = (within or _parametrization_list(tensor)) if is_listed else tensor
        names = self._names(twin, base, place) if is_listed else {x: base + end for x, end in twin.hooked.items()}
        places_of_stage = dict(self.makers[place][1])
        for x in [x for x, at in places_of_stage.items() if at in self.makers]:
            is_original = is_listed and twin.listed[x] == "original"
            yield from self._within(places_of_stage.pop(x), names[x], base if is_original else None)
        yield stage, places_of_stage, {x: names[x] for x in places_of_stage}

    def _known(self, place: Names) -> tuple[Parametrization, Twin]:
        """The stage that makes the array at ``place``, and its names."""
        stage = self.makers[place][0]
        if type(stage) not in TWINS:
            raise ValueError(f"{parameter_path(place)!r}: torch has no equivalent of {stage!r}. {EXCHANGE_PLAIN}")
        return stage, TWINS[type(stage)]

    def _is_listed(self, twin: Twin, tensor: str, within: str | None) -> bool:
        """Whether torch has the values in a list of parametrizations, and not under names of hooks."""
        return bool(twin.listed) and (within is not None or not twin.hooked or not self.by_hook(tensor, twin))

    def _names(self, twin: Twin, base: str, place: Names) -> dict[str, str]:
        """The names in a list of parametrizations; the first stage of the chain has the number 0."""
        number = self._inside(place)
        return {
            value: f"{base}.{name}" if name.startswith("original") else f"{base}.{number}.{name}"
            for value, name in twin.listed.items()
        }

    def _inside(self, place: Names) -> int:
        """The number of parametrizations of the same list that make the original of one."""
        name_of_value, values = self._known(place)[1].listed, self.makers[place][1]
        originals = [values[value] for value, name in name_of_value.items() if name == "original" and value in values]
        makers_inside = [place for place in originals if place in self.makers and self._known(place)[1].listed]
        return sum(1 + self._inside(place) for place in makers_inside)


def _parametrization_list(tensor: str) -> str:
    """The torch name of the list of parametrizations of a tensor."""
    module, dot, name = tensor.rpartition(".")
    return f"{module}{dot}parametrizations.{name}"
