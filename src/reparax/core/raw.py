"""The raw tree: plain data whose key paths describe its arrays, and the same tree laid flat.

A parametrized array is replaced by a marker dict, ``{"@weight_norm": {"g": ..., "v": ...}}``, nested for chains, with
fixed values under ``"@fixed"``. The key path of a raw array contains everything about it: its parameter, whether it is
main or auxiliary, free or fixed, and under which path a stage can select it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from reparax.core.boxes import box_of_parameter, is_box_of_one, value_in, with_value
from reparax.core.layers import KnownAxes, known_by_class, known_by_name
from reparax.core.names import import_stage
from reparax.core.paths import (
    Elsewhere,
    Names,
    PyTree,
    axis_names,
    describe,
    flatten_with_names,
    has_ancestor,
    is_box,
    is_empty,
    is_end,
    items,
    path_text,
    require_one_place,
    type_of,
)
from reparax.core.roles import Role
from reparax.core.values import Value, value_of
from reparax.numerics.arithmetic import is_array

FIXED = "@fixed"
OTHER_CHAIN = (
    "another chain made this raw tree. "
    "Apply the chain that made it; `p.check(raw, like=params)` lists every difference."
)

_NO_ROLE = Role(why="its axes follow none of the network's")


STAGES: dict[str, Any] = {}
"""The class of stages whose marker is a kind; a later definition replaces an earlier one."""


def registered_kind(kind: str) -> Any:
    """The class registered last for ``kind``, or None; a family of this package is imported for its kinds."""
    if kind not in STAGES:
        import_stage(kind)
    return STAGES.get(kind)


@dataclass(eq=False)
class Leaf:
    """One array of a raw tree, or a marker dict that stands for one.

    Attributes:
      place: Its key path in the raw tree.
      path: The path under which stages select it: the parameter's own path for a main value, the parameter's path and
        the value's name for an auxiliary value or a part.
      draw_path: A path that no other array of the tree shares; random draws depend on it.
      main: Whether it is a main value of each stage on its path, or no stage has replaced it.
      visible: Whether an earlier stage may select it.
      added: Whether it is added to a base that represents the array; only its place selects it.
      decays: Whether a smaller value makes a smaller array, in each stage on its path.
      content: What stands there.
      reading: What the values in a marker dict say of the array for which it stands, if they are read.
      tree: The tree that it is from, if anything but its path is known.
    """

    place: Names
    path: str
    draw_path: str
    main: bool
    visible: bool
    added: bool
    decays: bool
    content: Any = None
    reading: Any = None
    tree: "Flat | None" = None

    @property
    def array(self) -> Any:
        """The array, or its type; of a marker dict the type of the array for which it stands."""
        return self.content if self.reading is None else self.reading.effective

    @cached_property
    def axes(self) -> KnownAxes:
        """What is known of its axes before any program runs."""
        return KnownAxes() if self.tree is None else self.tree.axes_at(self.place)

    @property
    def told(self) -> Role | None:
        """Its role in the program of a network, if the tree has roles."""
        roles = None if self.tree is None else self.tree.roles
        return None if roles is None else roles.get(self.place, _NO_ROLE)

    @property
    def is_state(self) -> bool:
        """Whether it is model state, which is no parameter."""
        return self.tree is not None and self.tree.parameter_of(self.place) in self.tree.frame.state

    @property
    def values(self) -> dict[str, Names]:
        """The key path of each value in the marker dict; none for an array."""
        return self.content.values if isinstance(self.content, Node) else {}

    def node_of(self, kind: str) -> Names:
        """The key path of the marker dict that stands for the array, or that a stage of this kind is to put there."""
        if isinstance(self.content, Node):
            return (*self.place, self.content.mark)
        return (*self.place, marker(kind, next_number(self.place, kind)))

    @property
    def raw_path(self) -> str:
        """The path in the raw tree, markers included; it differs between the main values of one array."""
        return path_text(self.place)

    @property
    def parameter(self) -> str:
        """The path of the parameter that it belongs to."""
        return parameter_path(self.place)

    @property
    def fixed(self) -> bool:
        """Whether optimizers must leave it alone."""
        return FIXED in self.place

    @property
    def is_there(self) -> bool:
        """Whether there is an array, or a marker dict that stands for one."""
        return is_array(self.content) or isinstance(self.content, Node)


@dataclass(frozen=True, eq=False)
class Node:
    """A marker dict that holds no other marker.

    Attributes:
      place: The key path of the array that it stands for.
      mark: The marker.
      below: All that is below this place, by its key path, in the order of the tree.
    """

    place: Names
    mark: str
    below: dict[Names, Any]

    @cached_property
    def inside(self) -> list[Names]:
        """The key paths of all that is in the dict."""
        return [place for place in self.below if place[len(self.place)] == self.mark]

    @property
    def values(self) -> dict[str, Names]:
        """The key path of each value."""
        return {place[-1]: place for place in self.inside if place[-1] != self.mark}

    def arrays(self, *, may_be_none: bool = False) -> dict[str, Any]:
        """The values by their names; an error for anything else in the dict or beside the marker.

        Some formats store an empty dict as None.
        """
        depth = len(self.place)
        is_alone = len(self.below) == len(self.inside)
        if self.inside == [(*self.place, self.mark)]:
            content = self.below[self.inside[0]]
            if (is_empty(content) and is_alone) or (content is None and may_be_none):
                return {}

        def is_value(place: Names) -> bool:
            n_markers = 2 if FIXED in place[depth:] else 1
            return len(place) == depth + n_markers + 1 and place[-1] != FIXED and is_array(self.below[place])

        arrays = {place[-1]: self.below[place] for place in self.inside if is_value(place)}
        if not is_alone or len(arrays) < len(self.inside):
            raise ValueError(self._describe_damage())
        return arrays

    def _describe_damage(self) -> str:
        """What is wrong with a marker dict that no stage left so: a name beside the marker, or what is under it."""
        nested = dict[Any, Any]()
        for place, x in self.below.items():
            _put(nested, place[len(self.place) :], x)
        if others := [name for name in nested if name != self.mark]:
            return f"found {others[0]!r} beside {self.mark!r}: {OTHER_CHAIN}"
        return _describe_wrong_values(self.mark, nested[self.mark])


def is_mark(name: object) -> bool:
    """Whether a name is that of a marker."""
    return isinstance(name, str) and name.startswith("@") and name != FIXED


def holds_markers(x: object) -> bool:
    """Whether ``x`` is a marker dict."""
    return isinstance(x, Mapping) and any(str(name).startswith("@") for name in x)


def is_fixed_value(place: Names) -> bool:
    """Whether the value at a key path is fixed by the stage that made it; all that is inside of it is fixed with it."""
    return place[-2:-1] == (FIXED,)


def kind_of(mark: str) -> str:
    """The kind in a marker: ``kind`` of ``@kind`` and of ``@kind@2``."""
    return mark.split("@")[1]


def parameter_place(place: Names) -> Names:
    """The key path of the parameter: all names before the first marker."""
    return next((place[:i] for i, name in enumerate(place) if name.startswith("@")), place)


def parameter_path(place: Names) -> str:
    """The path of the parameter."""
    return path_text(parameter_place(place))


def next_number(place: Names, kind: str) -> int:
    """The number of the next stage of ``kind`` on the array at ``place``; the outermost has number 1."""
    return 1 + sum(is_mark(name) and kind_of(name) == kind for name in place)


def marker(kind: str, n: int) -> str:
    """The marker of the ``n``-th stage of a kind on an array: ``@kind``, ``@kind@2``."""
    return f"@{kind}" if n == 1 else f"@{kind}@{n}"


def _stage_class(place: Names, i: int) -> Any:
    """The class of the marker at ``place[i]``; raises an error if no stage of that kind is defined."""
    if (stage := registered_kind(kind_of(place[i]))) is None:
        raise ValueError(
            f"The raw tree holds {place[i]!r} at {parameter_path(place)!r}, but no stage of that kind is defined. "
            f"Import the module that defines it. A parameter of this name needs another: '@' begins those of stages."
        )
    return stage


class MarkedValue(NamedTuple):
    """The value that a key path names under one of its markers.

    Attributes:
      node: The names up to the marker, which is the last of them.
      name: The name of the value.
      declared: What the stage declares of it, and whether it is under ``"@fixed"``.
      has_base: Whether the array has a base that counts as its main value: the value is this base, or added to it.
    """

    node: Names
    name: str
    declared: Value
    has_base: bool


def _marked_values(place: Names, *, bases: bool = False) -> Iterator[MarkedValue]:
    """The value under each marker of a key path, the outermost first: of ``(..., "@weight_norm", "v")``, ``v``.

    With ``bases``, a base counts as the main value of its array.
    """
    for i, mark in enumerate(place):
        if not is_mark(mark):
            continue
        values_of_stage = _stage_class(place, i).raw_values
        is_fixed = place[i + 1 : i + 2] == (FIXED,)
        names_below = place[i + 2 :] if is_fixed else place[i + 1 :]
        if not names_below:
            raise ValueError(f"The raw tree holds no values under {mark!r} at {parameter_path(place)!r}: {OTHER_CHAIN}")
        declared = replace(value_of(values_of_stage, names_below[0]), fixed=is_fixed)
        has_base = bases and any(value.base for value in values_of_stage.values())
        if has_base:
            declared = replace(declared, main=declared.base)
        yield MarkedValue(place[: i + 1], names_below[0], declared, has_base)


def is_aligned(place: Names) -> bool:
    """Whether a value has the axes of its parameter: it is a base, or the main value of aligned stages."""
    return all(_has_axes_of_array(value.declared) for value in _marked_values(place))


def _has_axes_of_array(declared: Value) -> bool:
    """Whether a value has the axes of its array: it is the base, or an aligned main value."""
    return declared.base or (declared.main and declared.aligned)


def describe_places(places: Sequence[Names], *, bases: bool = False) -> list[Leaf]:
    """A :class:`Leaf` for each place of a raw (or plain) tree, without its content.

    With ``bases``, the base of an array represents it, and values added to the base are hidden.
    """
    values_of_place = {place: list(_marked_values(place, bases=bases)) for place in places}
    main_names = _main_names(itertools.chain(*values_of_place.values()))
    leaves = dict[str, Leaf]()
    for place in places:
        leaf = _leaf_at(place, values_of_place[place], main_names)
        if leaf.draw_path in leaves:
            raise same_path_error(leaf.draw_path)
        leaves[leaf.draw_path] = leaf
    return list(leaves.values())


def _leaf_at(place: Names, values: Sequence[MarkedValue], main_names: Mapping[Names, set[str]]) -> Leaf:
    """The leaf at a place, which names these values; ``main_names`` are those of the main values of each marker."""
    path = draw_path = parameter_path(place)
    for value in values:
        if value.declared.part or not value.declared.main:
            path, draw_path = f"{path}/{value.name}", f"{draw_path}/{value.node[-1]}/{value.name}"
        elif len(main_names[value.node]) > 1:
            draw_path = f"{draw_path}/{value.name}"
    return Leaf(
        place=place,
        path=path,
        draw_path=draw_path,
        main=all(value.declared.main for value in values),
        visible=all(value.declared.main or not value.declared.fixed for value in values),
        added=any(value.has_base and not value.declared.main for value in values),
        decays=all(value.declared.decays for value in values),
    )


def _main_names(values: Iterable[MarkedValue]) -> dict[Names, set[str]]:
    """The names of the main values under each marker."""
    names = dict[Names, set[str]]()
    for value in values:
        if value.declared.main:
            names.setdefault(value.node, set()).add(value.name)
    return names


def same_path_error(path: str) -> ValueError:
    """The error for a tree in which two leaves have one path."""
    return ValueError(
        f"Two leaves of the tree have the path {path!r}. "
        f"Rename one of them; the usual cause is a key with '/' in it, or a number and the same number as text."
    )


def flatten_leaves(tree: PyTree) -> tuple[list[Any], list[Leaf], Any]:
    """The leaves of a raw (or plain) tree, a :class:`Leaf` for each, and the treedef."""
    paths, contents, treedef = flatten_with_names(tree)
    return contents, describe_places(paths), treedef


def places_of(tree: PyTree) -> list[Names]:
    """The place of each leaf, and of each empty node, which is a place without a value of its own."""
    return flatten_with_names(tree, is_empty)[0]


def first_marker(places: Iterable[Names]) -> tuple[str, str] | None:
    """The path of the first parameter that holds markers, and its outermost marker; None in a plain tree."""
    marked = ((place, len(parameter_place(place))) for place in places)
    return next(((path_text(place[:n]), place[n]) for place, n in marked if n < len(place)), None)


def require_no_raw(who: object, params: PyTree, advice: str) -> None:
    """Requires a plain tree; ``advice`` says what to do otherwise.

    Raises:
      ValueError: If it is a raw tree.
    """
    if found := first_marker(places_of(params)):
        path, mark = found
        _stage_class((path, mark), 1)
        raise ValueError(
            f"{who} takes the model's own parameters, but got a raw tree: it holds {mark!r} at {path!r}. {advice}"
        )


def state_flags(tree: PyTree) -> list[bool]:
    """For each leaf, whether it is model state, as the collections of linen and variables of nnx say."""
    return _flags_of_leaves(tree, lambda node: len(jax.tree.leaves(node)))


def _flags_of_leaves(tree: PyTree, count: Callable[[Any], int]) -> list[bool]:
    """Whether the leaves of a tree are model state; ``count`` gives how many leaves a variable of nnx is."""
    paths, nodes, _ = flatten_with_names(tree, lambda x: has_ancestor(x, "Variable"))
    pairs = zip(_are_state(paths, nodes), nodes, strict=True)
    return [flag for flag, node in pairs for _ in range(count(node))]


def _are_state(paths: Sequence[Names], boxes: Sequence[Any]) -> list[bool]:
    """For each place, whether it holds model state: an nnx variable other than ``Param``, or a linen collection.

    The collection ``params`` is not state. An array directly beside ``params``, such as a temperature, is a parameter.
    """
    has_params = any(path[:1] == ("params",) for path in paths)

    def is_state(path: Names, box: Any) -> bool:
        # The class `rpx.nnx.Fixed` holds a raw value of a parameter.
        is_parameter = has_ancestor(box, "Param") or getattr(type(box), "holds_parameter", False)
        if has_ancestor(box, "Variable") and not is_parameter:
            return True
        return "batch_stats" in path or (has_params and path[0] != "params" and "/" in parameter_path(path))

    return list(map(is_state, paths, boxes))


Swap = tuple[Sequence[Names], Mapping[Names, Any]]
"""The places to take out, in the order of the tree, and what stands there instead."""


@dataclass(frozen=True)
class Frame:
    """The model's own tree: its structure, the names on the path to each parameter, and the boxes of parameters.

    Attributes:
      treedef: The structure.
      places: The names.
      boxes: The boxes.
      first_places: For the later places of a parameter that has several, the first.
    """

    treedef: Any
    places: tuple[Names, ...]
    boxes: Mapping[Names, Any]
    first_places: Mapping[Names, Names]

    @cached_property
    def parameters(self) -> frozenset[Names]:
        """The places, to look them up."""
        return frozenset(self.places)

    @cached_property
    def state(self) -> frozenset[Names]:
        """The places of model state, which is no parameter."""
        variables = {place: box for place, box in self.boxes.items() if has_ancestor(box, "Variable")}
        around = self.treedef.unflatten([variables.get(place, 0) for place in self.places])
        of_one = set(map(id, variables.values()))
        flags = _flags_of_leaves(around, lambda node: 1 if id(node) in of_one else len(jax.tree.leaves(node)))
        return frozenset(place for place, flag in zip(self.places, flags, strict=True) if flag)

    @cached_property
    def axes(self) -> Mapping[Names, KnownAxes]:
        """What is known of the axes of each parameter: by its module or its name, and by its box."""
        boxes = {i: self.boxes[place] for i, place in enumerate(self.places) if place in self.boxes}
        numbers = {place: i for i, place in enumerate(self.places)}
        same = [numbers[self.first_places.get(place, place)] for place in self.places]
        by_class = known_by_class(self.treedef, boxes, same)
        known = [by_class.get(i) or known_by_name(place[-1] if place else "") for i, place in enumerate(self.places)]
        for i, box in boxes.items():
            if (names := axis_names(box)) is not None:
                known[i] = replace(known[i], names=names)
        return dict(zip(self.places, known, strict=True))


@dataclass(frozen=True, eq=False)
class Flat:
    """A raw tree: for each place the array, or its type; an empty node has a place of its own.

    Attributes:
      frame: The model's own tree.
      arrays: The arrays.
      boxes: The box of each raw value that has one.
      later: The stages of the chain after the one that is asked for its sites.
      roles: The roles of arrays in the program of a network, if it told them.
    """

    frame: Frame
    arrays: Mapping[Names, Any]
    boxes: Mapping[Names, Any] = field(default_factory=dict[Names, Any])
    later: Sequence[Any] = ()
    roles: Mapping[Names, Role] | None = None

    def parameter_of(self, place: Names) -> Names:
        """The place of the parameter to which ``place`` belongs."""
        for n in range(len(place), -1, -1):
            if place[:n] in self.frame.parameters:
                return place[:n]
        raise KeyError(place)

    def with_arrays(self, arrays: Mapping[Names, Any]) -> "Flat":
        """The tree with other arrays."""
        return replace(self, arrays=arrays)

    def types(self) -> "Flat":
        """The tree with types in place of arrays, and without boxes of raw values."""
        types = {place: type_of(x) if is_array(x) else x for place, x in self.arrays.items()}
        return replace(self, arrays=types, boxes={})

    def before(self, later: Sequence[Any]) -> "Flat":
        """The tree for a stage that stands before these."""
        return replace(self, later=later)

    def axes_at(self, place: Names) -> KnownAxes:
        """What is known of the axes of the value at a place."""
        axes = self.frame.axes[self.parameter_of(place)]
        for value in _marked_values(place):
            if _has_axes_of_array(value.declared):
                continue
            mark, declared = value.node[-1], value.declared.axes
            makers = [stage._unwrapped for stage in self.later if stage.kind == kind_of(mark)]
            if not declared or any(maker.rows is not None or maker.columns is not None for maker in makers):
                return KnownAxes(why=f"{makers[0] if makers else mark!r} makes it, whose axes are its own")
            ranks = vars(makers[0]) if len(makers) == 1 else {}
            axes = axes.of_factor(declared, {axis: n for axis, n in ranks.items() if isinstance(n, int)})
        return axes

    def leaves(self, *, bases: bool = False) -> list[Leaf]:
        """A description of each place; an empty node has none."""
        places = [place for place, x in self.arrays.items() if not (is_empty(x) and place and is_mark(place[-1]))]
        leaves = describe_places(places, bases=bases)
        for leaf in leaves:
            leaf.content, leaf.tree = self.arrays[leaf.place], self
        return leaves

    def nodes(self, kind: str) -> dict[Names, Node]:
        """The marker dicts of a kind that hold no other marker, by the place of their array."""
        marks = {node[:-1]: node[-1] for node in self._innermost_nodes() if kind_of(node[-1]) == kind}
        nodes = {place: Node(place, mark, below={}) for place, mark in marks.items()}
        for place, x in self.arrays.items():
            for n in range(len(place)):
                if place[:n] in nodes:
                    nodes[place[:n]].below[place] = x
        return nodes

    def own_nodes(self, who: object, kind: str) -> dict[Names, Node]:
        """The marker dicts of a stage's kind; an error if there are none."""
        if nodes := self.nodes(kind):
            return nodes
        if found := first_marker(self.arrays):
            path, mark = found
            if kind_of(mark) == kind:
                raise ValueError(f"{who} does not know the values under {mark!r} at {path!r}: {OTHER_CHAIN}")
            raise ValueError(
                f"{who} found no {marker(kind, 1)!r} in a raw tree that holds {mark!r} at {path!r}: {OTHER_CHAIN}"
            )
        raise ValueError(
            f"{who} got a tree that never went through init: it holds no {marker(kind, 1)!r}. Call `raw = "
            f"p.init(params)` once, with the whole chain, and pass `raw`."
        )

    def _innermost_nodes(self) -> list[Names]:
        """The key path of each marker dict that holds no other marker."""
        innermost = dict[Names, None]()
        outer = set[Names]()
        for place in self.arrays:
            nodes = [place[: i + 1] for i, name in enumerate(place) if name[:1] == "@" and name != FIXED]
            innermost |= dict.fromkeys(nodes[-1:])
            outer.update(nodes[:-1])
        return [node for node in innermost if node not in outer]

    def with_nodes(self, nodes: Mapping[Names, Node]) -> "Flat":
        """The tree with marker dicts in place of what is inside them."""
        return self.swap([(node.inside, {place: node}) for place, node in nodes.items()])

    def swap(self, swaps: Sequence[Swap]) -> "Flat":
        """The tree after each of the swaps, in the same order."""
        if not swaps:
            return self
        new_arrays_at = {old_places[0]: new_arrays for old_places, new_arrays in swaps}
        all_old_places = {place for old_places, _ in swaps for place in old_places}
        arrays: dict[Names, Any] = {}
        for place, x in self.arrays.items():
            if place in new_arrays_at:
                arrays |= new_arrays_at[place]
            elif place not in all_old_places:
                arrays[place] = x
        return replace(self, arrays=arrays)


def flatten(tree: PyTree) -> Flat:
    """A raw tree, or a plain one, laid flat, without its boxes."""
    paths, nodes, treedef = flatten_with_names(tree, lambda x: is_box_of_one(x) or holds_markers(x))
    arrays, boxes, boxes_of_values = dict[Names, Any](), dict[Names, Any](), dict[Names, Any]()
    first_places = {path: node.place for path, node in zip(paths, nodes, strict=True) if isinstance(node, Elsewhere)}
    for path, node in zip(paths, nodes, strict=True):
        content = node
        if is_box(node):
            boxes[path], content = node, value_in(node)
        parts = items(content, lambda x: is_end(x) or is_box(x)) if holds_markers(content) else [((), content)]
        for below, x in parts:
            place = (*path, *below)
            if place in arrays:
                raise same_path_error(path_text(place))
            arrays[place] = x
            if below and is_box(x):
                boxes_of_values[place], value = x, value_in(x)
                arrays[place] = {} if is_empty(value) else value
    require_one_place({**boxes, **boxes_of_values})
    boxes |= _boxes_of_parameters(boxes_of_values)
    return Flat(Frame(treedef, tuple(paths), boxes, first_places), arrays, boxes_of_values)


def _boxes_of_parameters(boxes_of_values: Mapping[Names, Any]) -> dict[Names, Any]:
    """The box of each parameter of whose raw values some have boxes."""
    parts = dict[Names, list[Any]]()
    for place, box in boxes_of_values.items():
        parts.setdefault(parameter_place(place), []).append(box)
    boxes = {place: box_of_parameter(boxes) for place, boxes in parts.items()}
    return {place: box for place, box in boxes.items() if box is not None}


def nest(tree: Flat) -> PyTree:
    """The tree in its own structure, with its boxes."""
    nested: dict[Any, Any] = {}
    for place, x in tree.arrays.items():
        parameter = tree.parameter_of(place)
        box = tree.boxes.get(place)
        value = x if box is None else with_value(box, () if is_empty(x) else x)
        _put(nested, [parameter, *place[len(parameter) :]], value)

    with_boxed_values = {tree.parameter_of(place) for place in tree.boxes}
    outer_boxes = {place: box for place, box in tree.frame.boxes.items() if place not in with_boxed_values}
    parameters = [(nested[place], outer_boxes.get(place)) for place in tree.frame.places]
    return tree.frame.treedef.unflatten([x if box is None else with_value(box, x) for x, box in parameters])


def _put(nested: dict[Any, Any], keys: Sequence[Any], x: Any) -> None:
    """Puts ``x`` at the end of ``keys`` in nested dicts."""
    for key in keys[:-1]:
        nested = nested.setdefault(key, {})
    nested[keys[-1]] = x


def _describe_wrong_values(mark: str, content: Any) -> str:
    """What is wrong with the ``content`` of a marker, which is not a dict of arrays."""
    fixed_values = content.get(FIXED, {}) if isinstance(content, Mapping) else {}
    for name, values in ((mark, content), (FIXED, fixed_values)):
        if not isinstance(values, Mapping):
            return f"expected a dict of values under {name!r}, got {describe(values)}: {OTHER_CHAIN}"
    if FIXED in content and not fixed_values:
        return f"found no values under {FIXED!r}. Restore the whole raw tree."
    all_values = {**content, **fixed_values}
    name, x = next((name, x) for name, x in all_values.items() if not is_array(x) and name != FIXED)
    found = f"a tree with {', '.join(map(repr, x))}" if isinstance(x, Mapping) else type(x).__name__
    return f"expected an array as {name!r}, got {found}: {_explain_other(x)}"


def _explain_other(value: Any) -> str:
    """Where a value that is not an array may come from, and what to do."""
    if value is None:
        return "this is one half of `rpx.partition`. Join both halves with `rpx.combine` first."
    if isinstance(value, Mapping) and set(value) == {"value"}:
        return (
            "a state of nnx that was restored without its structure. Restore it with a template, or save "
            "`nnx.to_pure_dict(raw)`."
        )
    return OTHER_CHAIN
