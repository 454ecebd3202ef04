"""Which value of a raw tree is which tensor of a state dict."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.algebra import Chain, Parametrization
from reparax._stage.leaf import Perturbation
from reparax._stage.where import matches, nothing
from reparax._torch.axis_order import LAYOUTS, write_layout
from reparax._torch.names import Held, Naming, Twin, is_marked
from reparax._torch.values import Form, read_values, write_values
from reparax._tree.differences import abstract
from reparax._tree.markers import locate_errors
from reparax._tree.paths import Names, PyTree, is_array, items, named, path_text
from reparax.training import _transfer

Rules = Mapping[str, str] | None

_RENAMED = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


@dataclass(frozen=True)
class Plan:
    """The exchange of one raw tree.

    Attributes:
      weights: The chain without perturbations: its effective weights are those of torch.
      held: The values, each stage's together.
      tied: What torch calls the parameters that hold no value of their own, by their paths.
      forms: The layout, shape and dtype of each parameter, by its path.
    """

    weights: Parametrization
    held: tuple[Held, ...]
    tied: Mapping[str, str]
    forms: Mapping[str, Form]

    def written(self, raw: PyTree) -> dict[str, Array]:
        """The state dict of a raw tree, real or abstract."""
        arrays, state = dict(items(raw)), dict[str, Array]()
        for held in self.held:
            values = {value: jnp.asarray(arrays[keys]) for value, keys in held.keys.items()}
            with locate_errors(repr(held.parameter)):
                found = write_values(held.stage, values, self.forms[held.parameter])
            state |= {held.names[value]: x for value, x in found.items()}
        return state | self.shared(raw)

    def shared(self, raw: PyTree) -> dict[str, Array]:
        """The weights that are tied to others, which torch has under both names."""
        effective = _by_path(self.weights.fold(raw)) if self.tied else {}
        return {name: write_layout(effective[path], self.forms[path].layout) for path, name in self.tied.items()}

    def read(self, state: Mapping[str, Array], like: PyTree) -> PyTree:
        """The raw tree of a state dict, in the structure of ``like``."""
        paths, leaves, treedef = named(like)
        expected, found = dict(zip(paths, leaves, strict=True)), dict[Names, Array]()
        for held in self.held:
            values = {value: state[name] for value, name in held.names.items() if name in state}
            wanted = {value: expected[keys] for value, keys in held.keys.items()}
            with locate_errors(repr(held.parameter)):
                values = read_values(held.stage, values, self.forms[held.parameter], wanted)
            found |= {held.keys[value]: x for value, x in values.items()}
        return treedef.unflatten([found[path] for path in paths])


def make_plan(
    p: Parametrization, raw: PyTree, names: Rules, layouts: Rules, by_hook: Callable[[str, Twin], bool]
) -> Plan:
    """The exchange of ``raw``, real or abstract, that ``p`` made."""
    weights = Chain(tuple(stage for stage in Chain((p,)).stages if not isinstance(stage, Perturbation)))
    effective = {path: x for path, x in _by_path(abstract(weights.fold, raw)).items() if is_array(x)}
    tensors, chosen = _tensors(list(effective), names or {}), _chosen(list(effective), layouts or {})
    naming, held, tied = Naming(_transfer.makers(weights, raw), by_hook), list[Held](), dict[str, str]()
    for keys, node in items(raw, is_marked):
        path = path_text(keys)
        if path in effective and jax.tree.leaves(node):
            held += naming.held(node, keys, tensors[path])
        elif path in effective:
            tied[path] = tensors[path]
    forms = {path: Form(chosen[path], x.shape, x.dtype) for path, x in effective.items()}
    return Plan(weights, tuple(held), tied, forms)


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {path_text(names): x for names, x in items(tree)}


def _tensors(paths: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """What torch calls each parameter."""
    tensors = {path: _default(path) for path in paths} | {
        path: _expanded(match, name) for path, (match, name) in _ruled(paths, names, "names").items()
    }
    owners: dict[str, str] = {}
    for path, tensor in tensors.items():
        if owners.setdefault(tensor, path) != path:
            raise ValueError(f"{owners[tensor]!r} and {path!r} are both called {tensor!r}. Tell them apart by `names`.")
    return tensors


def _default(path: str) -> str:
    *modules, name = path.split("/")
    return ".".join([*modules, _RENAMED.get(name, name)])


def _expanded(match: re.Match[str], name: str) -> str:
    try:
        return match.expand(name).replace("/", ".")  # a group may be several parts of the path
    except (re.error, IndexError) as error:
        raise ValueError(f"cannot make a name of {name!r} for {match[0]!r}: {error}.") from error


def _chosen(paths: Sequence[str], layouts: Mapping[str, str]) -> dict[str, str]:
    """The layout of each parameter."""
    for layout in layouts.values():
        if layout not in LAYOUTS:
            known = ", ".join(map(repr, LAYOUTS))
            raise ValueError(f"got {layout!r} as a layout, but takes one of {known}.")
    chosen = {path: "kernel" if path.split("/")[-1] == "kernel" else "same" for path in paths}
    return chosen | {path: layout for path, (_, layout) in _ruled(paths, layouts, "layouts").items()}


def _ruled(paths: Sequence[str], rules: Mapping[str, str], what: str) -> dict[str, tuple[re.Match[str], str]]:
    """For each path that a rule matches, the match and what the first such rule says."""
    found: dict[str, tuple[re.Match[str], str]] = {}
    for pattern, value in rules.items():
        matched = matches(pattern, paths)
        if not matched:
            raise ValueError(f"`{what}` names nothing: {nothing(pattern, paths)}")
        found = {match[0]: (match, value) for match in matched} | found
    return found
