"""Matches the values of a raw tree with the tensors of a state dict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import locate_errors
from reparax.core.leaf import Perturbation
from reparax.core.paths import Names, PyTree, flatten_with_names, items, path_text
from reparax.core.plan import lineage_of
from reparax.io.torch.axis_order import write_layout
from reparax.io.torch.entries import Entry, Index, list_entries, stack_parts
from reparax.io.torch.names import Naming, StageValues, Twin
from reparax.io.torch.rules import Rules, given_maps
from reparax.io.torch.values import read_values, write_values


@dataclass(frozen=True)
class TorchPlan:
    """The plan for one raw tree.

    Attributes:
      weights: The chain without perturbations; its effective weights are those of torch.
      raw_values: The values, grouped by stage.
      tied: The tensors of parameters without a value of their own.
    """

    weights: Parametrization
    raw_values: tuple[StageValues, ...]
    tied: tuple[Entry, ...]

    @property
    def names(self) -> dict[Entry, list[str]]:
        """The names in torch of all values of each parameter."""
        names = {entry: [entry.tensor] for entry in self.tied}
        for stage_values in self.raw_values:
            names.setdefault(stage_values.entry, []).extend(stage_values.names.values())
        return names

    def like(self, state: Mapping[str, Any]) -> "TorchPlan":
        """This plan, in which a parameter's layout is also known if its tensors in ``state`` tell it."""
        names = self.names.items()
        entries = {
            entry: entry.like(state[name] for name in entry_names if name in state) for entry, entry_names in names
        }
        raw_values = tuple(replace(stage_values, entry=entries[stage_values.entry]) for stage_values in self.raw_values)
        return replace(self, raw_values=raw_values, tied=tuple(entries[stage_values] for stage_values in self.tied))

    def state_dict(self, raw: PyTree, *, with_base: bool = True) -> dict[str, Array]:
        """The state dict of a raw tree, concrete or not; ``with_base`` if orthogonal matrices have a base there."""
        arrays, state = dict(items(raw)), dict[str, Array]()
        for stage_values in self.raw_values:
            with locate_errors(repr(stage_values.entry.path)):
                values = {value: stage_values.entry.part(arrays[keys]) for value, keys in stage_values.keys.items()}
                tensors = write_values(stage_values.stage, values, stage_values.entry, with_base=with_base)
            state |= {stage_values.names[value]: x for value, x in tensors.items()}
        return state | self.tied_tensors(raw)

    def tied_tensors(self, raw: PyTree) -> dict[str, Array]:
        """The tied weights, which torch has under both names."""
        effective = _leaves_by_path(self.weights.fold(raw)) if self.tied else {}
        return {entry.tensor: write_layout(entry.part(effective[entry.path]), entry.layout) for entry in self.tied}

    def read(self, state: Mapping[str, Array], like: PyTree) -> PyTree:
        """The raw tree of a state dict, with the structure of ``like``."""
        paths, leaves, treedef = flatten_with_names(like)
        type_at, parts = dict(zip(paths, leaves, strict=True)), dict[Names, dict[Index, Array]]()
        for stage_values in self.raw_values:
            values = {value: state[name] for value, name in stage_values.names.items() if name in state}
            types = {value: stage_values.entry.part(type_at[keys]) for value, keys in stage_values.keys.items()}
            with locate_errors(repr(stage_values.entry.path)):
                values = read_values(stage_values.stage, values, stage_values.entry, types)
            for value, x in values.items():
                parts.setdefault(stage_values.keys[value], {})[stage_values.entry.index] = x
        return treedef.unflatten([stack_parts(parts[path]) for path in paths])


def make_plan(
    p: Parametrization,
    raw: PyTree,
    names: Rules,
    layouts: Rules,
    roles: PyTree,
    orthogonal_map: str | Rules,
    by_hook: Callable[[str, Twin], bool],
) -> TorchPlan:
    """The plan for ``raw``, concrete or abstract, which ``p`` made."""
    weights = Chain(tuple(stage for stage in Chain((p,)).stages if not isinstance(stage, Perturbation)))
    lineage = lineage_of(weights.deterministic, raw)
    naming, raw_values, tied_entries = Naming(lineage.makers, by_hook), list[StageValues](), list[Entry]()
    entries = list_entries(lineage.effective, names, layouts, roles)
    maps = given_maps([entry.path for entry in entries], orthogonal_map)
    for entry in entries:
        place, entry = lineage.places[entry.path], replace(entry, orthogonal_map=maps.get(entry.path))
        if lineage.has_values(place):
            raw_values += naming.raw_values_of(place, entry)
        else:
            tied_entries.append(entry)
    return TorchPlan(weights, tuple(raw_values), tuple(tied_entries))


def _leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    return {path_text(names): x for names, x in items(tree)}
