"""Matches the values of a raw tree with the tensors of a state dict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from reparax._core.algebra import Chain, Parametrization
from reparax._core.lineage import lineage_of
from reparax._stage.leaf import Perturbation
from reparax._torch.axis_order import write_layout
from reparax._torch.entries import Entry, Index, list_entries, stack_parts
from reparax._torch.names import Naming, StageValues, Twin
from reparax._torch.rules import Rules
from reparax._torch.values import read_values, write_values
from reparax._tree.markers import locate_errors
from reparax._tree.paths import Names, PyTree, flatten_with_names, items, path_text


@dataclass(frozen=True)
class TorchPlan:
    """The plan for one raw tree.

    Attributes:
      weights: The chain without perturbations; its effective weights are those of torch.
      held: The values, grouped by stage.
      tied: The tensors of parameters without a value of their own.
    """

    weights: Parametrization
    held: tuple[StageValues, ...]
    tied: tuple[Entry, ...]

    @property
    def names(self) -> dict[Entry, list[str]]:
        """The names in torch of all values of each parameter."""
        found = {entry: [entry.tensor] for entry in self.tied}
        for held in self.held:
            found.setdefault(held.entry, []).extend(held.names.values())
        return found

    def like(self, state: Mapping[str, Any]) -> "TorchPlan":
        """This plan, in which a parameter's layout is also known if its tensors in ``state`` tell it."""
        names = self.names.items()
        entries = {entry: entry.like(state[name] for name in own if name in state) for entry, own in names}
        held = tuple(replace(each, entry=entries[each.entry]) for each in self.held)
        return replace(self, held=held, tied=tuple(entries[each] for each in self.tied))

    def written(self, raw: PyTree, *, based: bool = True) -> dict[str, Array]:
        """The state dict of a raw tree, concrete or abstract; ``based`` if orthogonal matrices have a base there."""
        arrays, state = dict(items(raw)), dict[str, Array]()
        for held in self.held:
            with locate_errors(repr(held.entry.path)):
                values = {value: held.entry.part(arrays[keys]) for value, keys in held.keys.items()}
                found = write_values(held.stage, values, held.entry, based=based)
            state |= {held.names[value]: x for value, x in found.items()}
        return state | self.shared(raw)

    def shared(self, raw: PyTree) -> dict[str, Array]:
        """The tied weights, which torch has under both names."""
        effective = _leaves_by_path(self.weights.fold(raw)) if self.tied else {}
        return {each.tensor: write_layout(each.part(effective[each.path]), each.layout) for each in self.tied}

    def read(self, state: Mapping[str, Array], like: PyTree) -> PyTree:
        """The raw tree of a state dict, with the structure of ``like``."""
        paths, leaves, treedef = flatten_with_names(like)
        expected, parts = dict(zip(paths, leaves, strict=True)), dict[Names, dict[Index, Array]]()
        for held in self.held:
            values = {value: state[name] for value, name in held.names.items() if name in state}
            wanted = {value: held.entry.part(expected[keys]) for value, keys in held.keys.items()}
            with locate_errors(repr(held.entry.path)):
                values = read_values(held.stage, values, held.entry, wanted)
            for value, x in values.items():
                parts.setdefault(held.keys[value], {})[held.entry.index] = x
        return treedef.unflatten([stack_parts(parts[path]) for path in paths])


def make_plan(
    p: Parametrization, raw: PyTree, names: Rules, layouts: Rules, roles: PyTree, by_hook: Callable[[str, Twin], bool]
) -> TorchPlan:
    """The plan for ``raw``, concrete or abstract, which ``p`` made."""
    weights = Chain(tuple(stage for stage in Chain((p,)).stages if not isinstance(stage, Perturbation)))
    lineage = lineage_of(weights.deterministic, raw)
    naming, held, tied = Naming(lineage.makers, by_hook), list[StageValues](), list[Entry]()
    for entry in list_entries(lineage.effective, names, layouts, roles):
        place = lineage.places[entry.path]
        if lineage.has_values(place):
            held += naming.held(place, entry)
        else:
            tied.append(entry)
    return TorchPlan(weights, tuple(held), tuple(tied))


def _leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    return {path_text(names): x for names, x in items(tree)}
