"""Stages on several arrays together."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.algebra import Parametrization, call
from reparax._core.keys import Keys
from reparax._core.pending import settle
from reparax._stage.where import check_where, nothing
from reparax._tree.markers import (
    locate_errors,
    no_own_node,
    node_of,
    require_named_arrays,
    require_type,
    require_values,
    values_under,
)
from reparax._tree.paths import PyTree, is_array, named
from reparax._tree.raw import Slot, flatten_slots, marker, next_number, node_predicate, own_mark

Leaves = dict[str, dict[str, Array]]


class Joint(Parametrization):
    """A stage whose formula takes several arrays and returns several.

    Your subclass writes ``init_leaves({name: w}) -> {name: {value: array}}`` and ``apply_leaves(values) -> {name: w}``
    for the names in ``arrays``. The raw values of each array are stored in its own place, under the marker ``@kind``,
    so other stages, labels and weight decay find them under its path. An array without raw values leaves an empty node.
    Declare ``main`` and ``fixed`` as for :class:`Reparametrization`.

    Args:
      arrays: For each name of the formula a regular expression that the array's whole path must match. Arrays whose
        expressions capture the same text in parentheses form a group, and the formula is applied to each group, for
        example once per layer: ``{"w": "(.*)/kernel", "b": "(.*)/bias"}``.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class OutputNorm(rpx.Joint):  # weight norm of the weights of an output together with its bias
      ...     main = ("v",)
      ...     def init_leaves(self, arrays):
      ...         w, b = arrays["w"], arrays["b"]
      ...         return {"w": {"g": jnp.sqrt((w**2).sum(0) + b**2), "v": w}, "b": {"v": b}}
      ...     def apply_leaves(self, values):
      ...         v, c = values["w"]["v"], values["b"]["v"]
      ...         ratio = values["w"]["g"] / jnp.sqrt((v**2).sum(0) + c**2)
      ...         return {"w": ratio[None] * v, "b": ratio * c}
      >>> p = OutputNorm({"w": "(.*)/kernel", "b": "(.*)/bias"})
      >>> raw = p.init({"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}})
      >>> jax.tree.map(jnp.shape, raw["dense"])
      {'bias': {'@output_norm': {'v': (2,)}}, 'kernel': {'@output_norm': {'g': (2,), 'v': (3, 2)}}}
    """

    arrays: Any

    main: ClassVar[tuple[str, ...] | None] = None
    draws_late: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", _entries(self.arrays, type(self).__name__))

    @abstractmethod
    def init_leaves(self, arrays: dict[str, Array]) -> Leaves:
        """For each name its raw values, such that ``apply_leaves`` returns ``arrays``, or the nearest it can."""

    @abstractmethod
    def apply_leaves(self, values: Leaves) -> dict[str, Array]:
        """For each name its effective array, from the raw values of all names, fixed ones included."""

    def init_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        del keys
        leaves, slots, treedef = flatten_slots(tree)
        marks = [marker(self.kind, next_number(path, self.kind)) for path in named(tree)[0]]
        seen = [slot.visible and is_array(w) for w, slot in zip(leaves, slots, strict=True)]
        for group in self._groups("init", slots, seen):
            with locate_errors(_at(call(self, "init"), slots, group)):
                nodes = self._opened({name: jnp.asarray(leaves[i]) for name, i in group.items()})
            for name, i in group.items():
                leaves[i] = {marks[i]: nodes[name]}
        return treedef.unflatten(leaves)

    def apply_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        is_node = node_predicate(self.kind)
        leaves, slots, treedef = flatten_slots(tree, is_node)
        marks = {i: str(own_mark(x, self.kind)) for i, x in enumerate(leaves) if is_node(x)}
        if not marks:
            raise no_own_node(call(self, "apply"), self.kind, tree)
        groups = self._groups("apply", slots, list(map(is_node, leaves)))
        own = [i for group in groups for i in group.values()]
        for i, node in zip(own, settle([leaves[i] for i in own], keys), strict=True):
            leaves[i] = node
        for group in groups:
            with locate_errors(_at(call(self, "apply"), slots, group)):
                for i in group.values():
                    require_values(leaves[i], marks[i])
                effective = self.apply_leaves({name: values_under(leaves[i][marks[i]]) for name, i in group.items()})
            for name, i in group.items():
                leaves[i] = effective[name]
        return treedef.unflatten(leaves)

    def _opened(self, arrays: dict[str, Array]) -> dict[str, dict[str, Any]]:
        """The content of the marker for each name, after checking that it reproduces the types of the arrays."""
        try:
            values = self.init_leaves(arrays)
            _require_names("init_leaves", "the values of", values, arrays)
            flat = {value: w for named in values.values() for value, w in named.items()}
            require_named_arrays("init_leaves", flat, self.main, self.fixed)
            effective = jax.eval_shape(self.apply_leaves, values)
        except KeyError as error:
            raise ValueError(
                f"the formula reads {error}, but it is neither in `arrays` nor from init_leaves. Correct the name."
            ) from error
        _require_names("apply_leaves", "an array for", effective, arrays)
        for name, w in arrays.items():
            if not self.changes_type:
                require_type("apply_leaves", effective[name], w)
        return {name: node_of(named, self.fixed) for name, named in values.items()}

    def _groups(self, method: str, slots: Sequence[Slot], seen: Sequence[bool]) -> list[dict[str, int]]:
        """For each group of captured texts, the index of the array of each name."""
        who = call(self, method)
        groups: dict[tuple[Any, ...], dict[str, int]] = {}
        taken: dict[int, str] = {}
        for name, expression in self.arrays:
            matches = {i: re.fullmatch(expression, slot.path) for i, slot in enumerate(slots) if seen[i]}
            found = {i: match.groups() for i, match in matches.items() if match}
            if not found:
                paths = [slots[i].path for i in matches]
                raise ValueError(f"{who} found no array for {name!r}: {nothing(expression, paths)}")
            for i, captured in found.items():
                group = groups.setdefault(captured, {})
                if name in group or i in taken:
                    others = f"{name!r} at {slots[group[name]].path!r}" if name in group else f"it for {taken[i]!r}"
                    raise ValueError(
                        f"{who} found {slots[i].path!r} for {name!r}, but has {others} already. Capture in parentheses "
                        f"what differs between layers, and put the stage after those that split an array."
                    )
                group[name], taken[i] = i, name
        for group in groups.values():
            self._require_whole(who, slots, group)
        return list(groups.values())

    def _require_whole(self, who: str, slots: Sequence[Slot], group: dict[str, int]) -> None:
        lacking = [name for name, _ in self.arrays if name not in group]
        if lacking:
            name, i = next(iter(group.items()))
            raise ValueError(
                f"{who} found {slots[i].path!r} for {name!r}, but nothing for {lacking[0]!r} that captures the same "
                f"text. Narrow the expressions to the layers that have all of {[name for name, _ in self.arrays]}."
            )


def _at(who: str, slots: Sequence[Slot], group: Mapping[str, int]) -> str:
    return f"{who} at {', '.join(repr(slots[i].path) for i in group.values())}"


def _require_names(method: str, what: str, got: Any, names: Mapping[str, Any]) -> None:
    if not isinstance(got, Mapping) or set(got) != set(names):
        given = list(got) if isinstance(got, Mapping) else type(got).__name__
        raise ValueError(f"{method} must return a dict with {what} each of {list(names)}, but returns {given}.")


def _entries(arrays: Any, who: str) -> tuple[tuple[str, str], ...]:
    """A dict as a tuple of its items, which is hashable."""
    items = tuple(arrays.items() if isinstance(arrays, Mapping) else arrays if isinstance(arrays, tuple) else ())
    for item in items or (None,):
        match item:
            case (str(), str() as expression):
                check_where(expression, who)
            case _:
                raise TypeError(f"{who} takes a dict of names and regular expressions as arrays, but got {arrays!r}.")
    return items
