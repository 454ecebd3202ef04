"""The nodes of a raw tree that a stage closes next: its innermost markers, with their values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reparax.core.chains.layers import Spot
from reparax.core.tree.flat import Flat, nest, nest_below
from reparax.core.tree.markers import Types, no_own_node_error, require_values, types_under
from reparax.core.tree.paths import Names
from reparax.core.tree.raw import is_mark, kind_of


@dataclass(frozen=True, eq=False)
class Node:
    """A marker dict.

    Attributes:
      place: The place of the array that it stands for.
      mark: The marker.
      inside: All places in the dict, in the order of the tree.
      content: The dict, with the types of its values.
    """

    place: Names
    mark: str
    inside: Sequence[Names]
    content: Mapping[str, Any]

    def spot(self, effective: Any) -> Spot:
        """The spot of the array, of this type."""
        return Spot(self.place, self.values, self.mark, effective)

    def require_values(self) -> None:
        """Requires named arrays, and nothing beside them."""
        require_values(self.content, self.mark)

    @property
    def content_below(self) -> Any:
        """What stands under the marker: a dict, unless the tree is damaged."""
        return self.content[self.mark]

    @cached_property
    def types(self) -> Types:
        """The types of the values."""
        return types_under(self.content_below)

    @property
    def values(self) -> dict[str, Names]:
        """The place of each value."""
        return {place[-1]: place for place in self.inside if place[-1] != self.mark}


def own_nodes(who: str, kind: str, tree: Flat) -> tuple[dict[Names, Node], Flat]:
    """The nodes of a kind, by the place of their array, and the tree with each of them at that place.

    Raises:
      ValueError: If there is none.
    """
    nodes = find_nodes(tree, kind)
    if not nodes:
        raise no_own_node_error(who, kind, nest(tree))
    return nodes, tree.swap([(node.inside, {place: node}) for place, node in nodes.items()])


def find_nodes(tree: Flat, kind: str) -> dict[Names, Node]:
    """The nodes of a kind that hold no other marker, by the place of their array."""
    places_in_node: dict[Names, list[Names]] = {}
    nested_marks: set[Names] = set()
    for place in tree.arrays:
        marks = [i for i, name in enumerate(place) if is_mark(name)]
        nested_marks.update(place[: i + 1] for i in marks[:-1])
        if marks and kind_of(place[marks[-1]]) == kind:
            places_in_node.setdefault(place[: marks[-1] + 1], []).append(place)
    parents, beside = {node[:-1]: node for node in places_in_node}, dict[Names, list[Names]]()
    for place in tree.arrays:
        for n in range(len(place)):
            if place[:n] in parents and place[: n + 1] != parents[place[:n]]:
                beside.setdefault(parents[place[:n]], []).append(place)
    nodes: dict[Names, Node] = {}
    for node, inside in places_in_node.items():
        if node not in nested_marks:
            everything = [*inside, *beside.get(node, ())]
            content = nest_below({place: tree.arrays[place] for place in everything}, node[:-1])
            nodes[node[:-1]] = Node(node[:-1], node[-1], inside, content)
    return nodes
