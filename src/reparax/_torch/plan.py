"""Matches the values of a raw tree with the tensors of a state dict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.algebra import Chain, Parametrization
from reparax._stage.leaf import Perturbation
from reparax._torch.axis_order import write_layout
from reparax._torch.names import Held, Naming, Twin, is_marked
from reparax._torch.rules import Rules, choose_layouts, name_tensors
from reparax._torch.values import Form, read_values, write_values
from reparax._tree.differences import abstract
from reparax._tree.markers import locate_errors
from reparax._tree.paths import Names, PyTree, is_array, items, named, path_text
from reparax.training import _transfer


@dataclass(frozen=True)
class Plan:
    """The plan for one raw tree.

    Attributes:
      weights: The chain without perturbations; its effective weights are those of torch.
      held: The values, grouped by stage.
      tied: The torch names of parameters without a value of their own, by path.
      forms: The layout, shape and dtype of each parameter, by path.
    """

    weights: Parametrization
    held: tuple[Held, ...]
    tied: Mapping[str, str]
    forms: Mapping[str, Form]

    def written(self, raw: PyTree) -> dict[str, Array]:
        """The state dict of a raw tree, concrete or abstract."""
        arrays, state = dict(items(raw)), dict[str, Array]()
        for held in self.held:
            values = {value: jnp.asarray(arrays[keys]) for value, keys in held.keys.items()}
            with locate_errors(repr(held.parameter)):
                found = write_values(held.stage, values, self.forms[held.parameter])
            state |= {held.names[value]: x for value, x in found.items()}
        return state | self.shared(raw)

    def shared(self, raw: PyTree) -> dict[str, Array]:
        """The tied weights, which torch has under both names."""
        effective = _by_path(self.weights.fold(raw)) if self.tied else {}
        return {name: write_layout(effective[path], self.forms[path].layout) for path, name in self.tied.items()}

    def read(self, state: Mapping[str, Array], like: PyTree) -> PyTree:
        """The raw tree of a state dict, with the structure of ``like``."""
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
    """The plan for ``raw``, concrete or abstract, which ``p`` made."""
    weights = Chain(tuple(stage for stage in Chain((p,)).stages if not isinstance(stage, Perturbation)))
    effective = {path: x for path, x in _by_path(abstract(weights.fold, raw)).items() if is_array(x)}
    tensors, chosen = name_tensors(list(effective), names), choose_layouts(list(effective), layouts)
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
