"""The raw tree: plain data whose key paths describe its arrays, and the same tree as a flat dict.

A stage replaces each array by a marker dict that holds its raw values, ``{"@weight_norm": {"g": ..., "v": ...}}``.
Fixed values are under ``"@fixed"``. For a chain, marker dicts are nested: the marker dicts of the first stage are
inside the marker dicts of the last stage. So the key path of a raw value determines everything about the value: the
parameter that it belongs to, whether it is main or auxiliary, free or fixed, and the path under which a stage can
select it.

Terms of this module:

- A *place* is a key path, a tuple of names: ``("dense", "kernel", "@weight_norm", "g")``. A *path* is the text by which
  users select an array: ``"dense/kernel"``.
- A *marker* is a name such as ``"@weight_norm"``. Its *kind* is ``weight_norm``, the name of a class of stages.
- A :class:`Flat` is a tree as a dict from places to arrays. A :class:`Frame` is the model's own tree around the arrays.
  :func:`flatten` separates arrays and frame, and :func:`nest` puts them together again.
- A :class:`Leaf` describes one array of a ``Flat``, or a marker dict that replaces an array. A :class:`Node` holds the
  contents of such a marker dict.
- A *box* is a flax object around an array, such as an nnx variable. A box may hold the names of the array's axes.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from reparax.core.boxes import box_of_parameter, is_box_of_one, value_in, with_value
from reparax.core.known_axes import KnownAxes, known_by_class, known_by_name
from reparax.core.names import import_stage
from reparax.core.paths import (
    Elsewhere,
    Names,
    PyTree,
    axis_names,
    describe,
    flatten_with_names,
    is_box,
    is_empty,
    is_end,
    is_flax_instance,
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

_ROLE_OF_OTHERS = Role(why="its axes follow none of the network's")
"""The role of an array whose axes do not correspond to the axes of any parameter of the network."""


STAGES: dict[str, Any] = {}
"""Maps each kind to its stage class. If two classes have the same kind, the class that was defined later counts."""


def registered_kind(kind: str) -> Any:
    """Returns the stage class of a kind, after importing its module if necessary, or None if it is not defined."""
    if kind not in STAGES:
        import_stage(kind)
    return STAGES.get(kind)


@dataclass(eq=False)
class Leaf:
    """One array of a raw tree, or a marker dict that replaces an array.

    Attributes:
      place: The key path of the array in the raw tree.
      path: The path under which stages select the array. For a main value, it is the parameter's own path. For an
        auxiliary value, or a value that is declared as a part of the array, the value's name is appended.
      draw_path: A path that no other array of the tree shares. Random numbers for the array depend on ``draw_path``.
      main: Whether the array is a plain array, or a main value of each stage whose marker is in its key path.
      visible: Whether an earlier stage may select the array. Fixed values that are not main are hidden.
      added: Whether an adapter adds this value to a base, and the base represents the array. Only an expression for its
        place in the raw tree selects such a value.
      decays: Whether smaller numbers here make the effective array smaller, as each stage whose marker is in the key
        path declares.
      content: The array, its type, or a :class:`Node`.
      reading: For a marker dict that has been read, the array that its values represent; see ``core/leafwise.py``.
      tree: The tree that contains the array, or None if only its place is known.
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
        """The array or its type, or for a marker dict that has been read, the type of the array that it represents."""
        return self.content if self.reading is None else self.reading.effective

    @cached_property
    def axes(self) -> KnownAxes:
        """What is known about the axes from the layer, name and box of the parameter; without a tree, nothing."""
        return KnownAxes() if self.tree is None else self.tree.axes_at(self.place)

    @property
    def network_role(self) -> Role | None:
        """The role of the array in a network whose program was analyzed, or None if the tree has no such roles.

        If the tree has roles, but no role for this array, the result is an empty role, whose ``why`` says so.
        """
        roles = None if self.tree is None else self.tree.roles
        return None if roles is None else roles.get(self.place, _ROLE_OF_OTHERS)

    @property
    def is_state(self) -> bool:
        """Whether the array is model state instead of a parameter."""
        return self.tree is not None and self.tree.parameter_of(self.place) in self.tree.frame.state

    @property
    def values(self) -> dict[str, Names]:
        """The key path of each value in the marker dict by name, or an empty dict for an array."""
        return self.content.values if isinstance(self.content, Node) else {}

    def node_of(self, kind: str) -> Names:
        """Returns the key path of the marker dict, or for an array, of the dict that a stage of ``kind`` would add.

        For an array at ``("w",)`` and the kind ``scale``, the result is ``("w", "@scale")``.
        """
        if isinstance(self.content, Node):
            return (*self.place, self.content.mark)
        return (*self.place, marker(kind, next_number(self.place, kind)))

    @property
    def raw_path(self) -> str:
        """The key path as text, with markers. Unlike ``path``, it distinguishes the main values of one array."""
        return path_text(self.place)

    @property
    def parameter(self) -> str:
        """The path of the parameter that the array belongs to."""
        return parameter_path(self.place)

    @property
    def fixed(self) -> bool:
        """Whether the array is a fixed value, or a raw value of one, so that optimizers must leave it alone."""
        return FIXED in self.place

    @property
    def is_there(self) -> bool:
        """Whether the content is an array, or a marker dict that replaces an array."""
        return is_array(self.content) or isinstance(self.content, Node)


@dataclass(frozen=True, eq=False)
class Node:
    """A marker dict in which no other marker is nested.

    Attributes:
      place: The key path of the array that it replaces.
      mark: The marker.
      below: Everything below this place, by key path and in the order of the tree. In a damaged tree, this may include
        entries that are not under the marker.
    """

    place: Names
    mark: str
    below: dict[Names, Any]

    @cached_property
    def inside(self) -> list[Names]:
        """The key paths of everything under the marker, or the marker's own key path if the marker dict is empty."""
        return [place for place in self.below if place[len(self.place)] == self.mark]

    @property
    def values(self) -> dict[str, Names]:
        """The key path of each value by name; empty for an empty marker dict, which is itself a leaf of the tree."""
        return {place[-1]: place for place in self.inside if place[-1] != self.mark}

    def arrays(self, *, may_be_none: bool = False) -> dict[str, Any]:
        """Returns the values by name: ``{"@scale": {"@fixed": {"n": n}, "x": x}}`` gives ``{"n": n, "x": x}``.

        The marker dict of an array without its own values, such as a tied array, is empty, and so is the result.
        With ``may_be_none``, None counts as an empty marker dict too, because some formats store an empty dict as None.

        Raises:
          ValueError: If a value is not an array, such as a dict or None, or if the marker has siblings.
        """
        depth = len(self.place)
        is_alone = len(self.below) == len(self.inside)  # The marker has no siblings.
        if self.inside == [(*self.place, self.mark)]:  # The marker is itself a leaf: an empty dict, None or an object.
            content = self.below[self.inside[0]]
            if (is_empty(content) and is_alone) or (content is None and may_be_none):
                return {}

        def is_value(place: Names) -> bool:
            """Returns whether ``place`` has an array directly under the marker, or directly under its ``"@fixed"``."""
            n_markers = 2 if FIXED in place[depth:] else 1
            return len(place) == depth + n_markers + 1 and place[-1] != FIXED and is_array(self.below[place])

        arrays = {place[-1]: self.below[place] for place in self.inside if is_value(place)}
        if not is_alone or len(arrays) < len(self.inside):
            raise ValueError(self._describe_damage())
        return arrays

    def _describe_damage(self) -> str:
        """Returns the error text for a damaged marker dict, which names a sibling of the marker or a wrong value."""
        nested = dict[Any, Any]()
        for place, x in self.below.items():
            _insert(nested, place[len(self.place) :], x)
        if others := [name for name in nested if name != self.mark]:
            return f"found {others[0]!r} next to {self.mark!r}: {OTHER_CHAIN}"
        return _describe_wrong_values(self.mark, nested[self.mark])


def is_mark(name: object) -> bool:
    """Returns whether a name is a marker, such as ``"@weight_norm"``."""
    return isinstance(name, str) and name.startswith("@") and name != FIXED


def holds_markers(x: object) -> bool:
    """Returns whether ``x`` is a dict in which any name begins with ``@``, and so a marker dict, possibly damaged."""
    return isinstance(x, Mapping) and any(str(name).startswith("@") for name in x)


def is_fixed_value(place: Names) -> bool:
    """Returns whether the innermost stage in a key path declares the value there as fixed.

    If an earlier stage replaces a fixed value by raw values, the result is False for those raw values, although
    optimizers must leave them alone too.
    """
    return place[-2:-1] == (FIXED,)


def kind_of(mark: str) -> str:
    """Returns the kind that a marker names: ``scale`` for ``@scale`` and for ``@scale@2``."""
    return mark.split("@")[1]


def parameter_place(place: Names) -> Names:
    """Returns the names before the first marker: ``("a", "w", "@scale", "x") -> ("a", "w")``, the parameter's place."""
    return next((place[:i] for i, name in enumerate(place) if name.startswith("@")), place)


def parameter_path(place: Names) -> str:
    """Returns the path of the parameter as text: ``"a/w"`` for ``("a", "w", "@scale", "x")``."""
    return path_text(parameter_place(place))


def next_number(place: Names, kind: str) -> int:
    """Returns the number in the marker that another stage of ``kind`` would add at an array with this key path.

    In a key path, markers of the same kind are numbered from 1, starting with the outermost marker.
    """
    return 1 + sum(is_mark(name) and kind_of(name) == kind for name in place)


def marker(kind: str, n: int) -> str:
    """Returns the marker of the ``n``-th stage of a kind on an array: ``@kind``, ``@kind@2``."""
    return f"@{kind}" if n == 1 else f"@{kind}@{n}"


def _class_of_marker(mark: str, place: Names) -> Any:
    """Returns the stage class of a marker in ``place``, and raises an error if no stage of that kind is defined."""
    if (stage_class := registered_kind(kind_of(mark))) is None:
        raise ValueError(
            f"The raw tree holds {mark!r} at {parameter_path(place)!r}, but no stage of that kind is defined. Import "
            f"the module that defines it. If it is a parameter, rename it: names that begin with '@' are for stages."
        )
    return stage_class


class MarkedValue(NamedTuple):
    """A raw value of one stage, as it appears in a key path under the marker of that stage.

    Attributes:
      node: The key path up to and including the marker.
      name: The name of the value.
      declared: What the stage declares about the value. ``declared.fixed`` says whether the value is under ``"@fixed"``
        in the key path.
      has_base: Whether a base counts as the main value of the array, instead of the values that an adapter adds to it.
    """

    node: Names
    name: str
    declared: Value
    has_base: bool


def _marked_values(place: Names, *, bases: bool = False) -> Iterator[MarkedValue]:
    """Yields the raw value under each marker of a key path, from the outermost marker to the innermost.

    For ``("w", "@weight_norm", "v", "@scale", "x")``, the values are named ``v`` and ``x``. For the key path of a plain
    array, nothing is yielded. With ``bases``, a base counts as the main value of its array, in place of the values that
    an adapter adds to the base.

    Raises:
      ValueError: If no class of stages has the kind of a marker, or nothing is under the marker.
    """
    for i, mark in enumerate(place):
        if not is_mark(mark):
            continue
        values_of_stage = _class_of_marker(mark, place).raw_values
        is_fixed = place[i + 1 : i + 2] == (FIXED,)
        names_below = place[i + 2 :] if is_fixed else place[i + 1 :]  # The first of these names is the value's name.
        if not names_below:
            raise ValueError(f"The raw tree holds no values under {mark!r} at {parameter_path(place)!r}: {OTHER_CHAIN}")
        declared = replace(value_of(values_of_stage, names_below[0]), fixed=is_fixed)
        has_base = bases and any(value.base for value in values_of_stage.values())
        if has_base:
            declared = replace(declared, main=declared.base)
        yield MarkedValue(place[: i + 1], names_below[0], declared, has_base)


def is_aligned(place: Names) -> bool:
    """Returns whether the value at a place has the axes of its parameter, as each stage in the key path declares.

    The result is True for a plain array, for ``v`` of a ``WeightNorm`` and for the base of a ``LoRA``. The result is
    False for the factors of the ``LoRA``.
    """
    return all(_has_axes_of_array(value.declared) for value in _marked_values(place))


def _has_axes_of_array(declared: Value) -> bool:
    """Returns whether a value has the axes of its array, because the value is the base or an aligned main value."""
    return declared.base or (declared.main and declared.aligned)


def describe_places(places: Sequence[Names], *, bases: bool = False) -> list[Leaf]:
    """Returns a :class:`Leaf` for each place of a raw (or plain) tree, in the same order and without content.

    ``places`` must be all places of the tree, because paths depend on the number of main values of each array. With
    ``bases``, the base of an adapter represents the array, and the values that the adapter adds to it do not.

    Raises:
      ValueError: If two places have the same path, as keys 0 and "0" do.
    """
    values_of_place = {place: list(_marked_values(place, bases=bases)) for place in places}
    main_names = _names_of_main_values(itertools.chain(*values_of_place.values()))
    leaves = dict[str, Leaf]()
    for place in places:
        leaf = _leaf_at(place, values_of_place[place], main_names)
        if leaf.draw_path in leaves:
            raise same_path_error(leaf.draw_path)
        leaves[leaf.draw_path] = leaf
    return list(leaves.values())


def _leaf_at(place: Names, values: Sequence[MarkedValue], main_names: Mapping[Names, set[str]]) -> Leaf:
    """Returns the leaf at a place, without content.

    ``values`` comes from :func:`_marked_values`, and ``main_names`` comes from :func:`_names_of_main_values`. Below a
    kernel ``w``, the path of ``v`` of a ``WeightNorm`` is ``w``, because ``v`` represents the array. The path of ``g``
    is ``w/g``. If an array has several main values, such as two factors, all have the path ``w``, but different draw
    paths.
    """
    path = draw_path = parameter_path(place)
    for value in values:
        if value.declared.part or not value.declared.main:
            # Stages of two kinds may have values of the same name, so the draw path includes the marker too.
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


def _names_of_main_values(values: Iterable[MarkedValue]) -> dict[Names, set[str]]:
    """Maps the key path of each marker dict to the names of its main values: ``{("w", "@weight_norm"): {"v"}}``.

    ``values`` must contain the raw values in all key paths of a tree.
    """
    names = dict[Names, set[str]]()
    for value in values:
        if value.declared.main:
            names.setdefault(value.node, set()).add(value.name)
    return names


def same_path_error(path: str) -> ValueError:
    """Returns the error for a tree in which two leaves have the same path, so that no stage can tell them apart."""
    return ValueError(
        f"Two leaves of the tree have the path {path!r}. "
        f"Rename one of them. The usual cause is a key that contains '/', or a pair of keys such as 0 and '0'."
    )


def flatten_leaves(tree: PyTree) -> tuple[list[Any], list[Leaf], Any]:
    """Returns the leaves of a raw (or plain) tree, a :class:`Leaf` for each of these leaves, and the treedef."""
    paths, contents, treedef = flatten_with_names(tree)
    return contents, describe_places(paths), treedef


def places_of(tree: PyTree) -> list[Names]:
    """Returns the place of each leaf and each empty node; an empty node represents an array without its own values."""
    return flatten_with_names(tree, is_empty)[0]


def first_marker(places: Iterable[Names]) -> tuple[str, str] | None:
    """Returns the path and the outermost marker of the first parameter with a marker dict: ``("a/w", "@scale")``.

    The result is None for a plain tree, so this function also tells raw trees from plain trees.
    """
    marked = ((place, len(parameter_place(place))) for place in places)
    return next(((path_text(place[:n]), place[n]) for place, n in marked if n < len(place)), None)


def require_no_raw(who: object, params: PyTree, advice: str) -> None:
    """Raises an error if ``params`` is a raw tree; ``advice`` ends the error text and says what to do.

    Raises:
      ValueError: If ``params`` is a raw tree.
    """
    if found := first_marker(places_of(params)):
        path, mark = found
        _class_of_marker(mark, (path,))  # If no stage of that kind is defined, this call raises a clearer error.
        raise ValueError(
            f"{who} takes the model's own parameters, but got a raw tree: it holds {mark!r} at {path!r}. {advice}"
        )


def state_flags(tree: PyTree) -> list[bool]:
    """Returns for each leaf of a tree, in order, whether it is model state, such as a running mean.

    Model state is recognized by linen's collections and by the types of nnx variables. See :func:`_are_state`.
    """
    return _flags_of_leaves(tree, lambda node: len(jax.tree.leaves(node)))


def _flags_of_leaves(tree: PyTree, count: Callable[[Any], int]) -> list[bool]:
    """Returns for each leaf whether it is model state; the leaves of an nnx variable get the same answer.

    ``count`` takes a variable, or a leaf outside of variables, and returns its number of leaves. The result has one
    flag for each of these leaves.
    """
    paths, nodes, _ = flatten_with_names(tree, lambda x: is_flax_instance(x, "Variable"))
    pairs = zip(_are_state(paths, nodes), nodes, strict=True)
    return [flag for flag, node in pairs for _ in range(count(node))]


def _are_state(paths: Sequence[Names], boxes: Sequence[Any]) -> list[bool]:
    """Returns for each place whether it holds model state, judged by nnx variables and by linen's collections.

    The collections of linen are ``{"params": ..., "batch_stats": ..., ...}``. Everything in ``batch_stats`` is state,
    wherever in the tree ``batch_stats`` is. Other names count as collections only if ``params`` is next to them. An
    array directly next to ``params``, such as a temperature, is a parameter.
    """
    has_params = any(path[:1] == ("params",) for path in paths)

    def is_state(path: Names, box: Any) -> bool:
        """Returns whether one place holds model state; ``box`` is the content there, which may be an nnx variable."""
        # A variable of the class `rpx.nnx.Fixed` holds a raw value of a parameter, so it is not state.
        is_parameter = is_flax_instance(box, "Param") or getattr(type(box), "holds_parameter", False)
        if is_flax_instance(box, "Variable") and not is_parameter:
            return True
        # The path of a parameter in a collection has two or more names, separated by "/".
        return "batch_stats" in path or (has_params and path[0] != "params" and "/" in parameter_path(path))

    return list(map(is_state, paths, boxes))


Swap = tuple[Sequence[Names], Mapping[Names, Any]]
"""The places to remove, in the order of the tree, and the new arrays by place. The new arrays go where the first of the
removed places was."""


@dataclass(frozen=True)
class Frame:
    """The model's own tree without its arrays: the structure, the places of the parameters, and their boxes.

    Attributes:
      treedef: The structure.
      places: The place of each parameter, in the order of the tree.
      boxes: The flax box around each parameter that has one; see ``core/boxes.py``.
      first_places: If a model holds a parameter at several places, this maps each further place to the first place.
    """

    treedef: Any
    places: tuple[Names, ...]
    boxes: Mapping[Names, Any]
    first_places: Mapping[Names, Names]

    @cached_property
    def parameters(self) -> frozenset[Names]:
        """The places of the parameters as a set, for fast look-up."""
        return frozenset(self.places)

    @cached_property
    def state(self) -> frozenset[Names]:
        """The places that hold model state instead of a parameter."""
        variables = {place: box for place, box in self.boxes.items() if is_flax_instance(box, "Variable")}
        # Restore the model's own tree with its variables, because their types matter. Put 0 in place of all other
        # arrays.
        around = self.treedef.unflatten([variables.get(place, 0) for place in self.places])
        # Each of the restored variables is at a single place, so it gets one flag. A variable that is part of the
        # structure gets one flag for each of its leaves.
        ids = set(map(id, variables.values()))
        flags = _flags_of_leaves(around, lambda node: 1 if id(node) in ids else len(jax.tree.leaves(node)))
        return frozenset(place for place, flag in zip(self.places, flags, strict=True) if flag)

    @cached_property
    def axes(self) -> Mapping[Names, KnownAxes]:
        """What is known about the axes of each parameter, from its module or else its name, and from its box.

        Only the class of a module matters, and the structure contains this class. If a model holds a parameter at
        several places, the modules at all of these places must agree on its axes. Otherwise, the axes at the first
        place are unknown.
        """
        boxes = {i: self.boxes[place] for i, place in enumerate(self.places) if place in self.boxes}
        numbers = {place: i for i, place in enumerate(self.places)}
        first_numbers = [numbers[self.first_places.get(place, place)] for place in self.places]
        by_class = known_by_class(self.treedef, boxes, first_numbers)
        known = [by_class.get(i) or known_by_name(place[-1] if place else "") for i, place in enumerate(self.places)]
        for i, box in boxes.items():
            if (names := axis_names(box)) is not None:
                known[i] = replace(known[i], names=names)
        return dict(zip(self.places, known, strict=True))


@dataclass(frozen=True, eq=False)
class Flat:
    """A raw tree, or a plain one, as a dict from places to arrays.

    Attributes:
      frame: The model's own tree around the arrays.
      arrays: The array at each place, or its type. Leaves that are not arrays, and empty nodes, are kept as they are.
      boxes: The flax box around each raw value that has one.
      later: The later stages of the chain, while a stage looks for its sites in this tree.
      roles: The role of each array in a network whose program was analyzed, or None if no program was analyzed.
    """

    frame: Frame
    arrays: Mapping[Names, Any]
    boxes: Mapping[Names, Any] = field(default_factory=dict[Names, Any])
    later: Sequence[Any] = ()
    roles: Mapping[Names, Role] | None = None

    def parameter_of(self, place: Names) -> Names:
        """Returns the place of the parameter to which ``place`` belongs: ``("a", "w", "@scale", "x") -> ("a", "w")``.

        Raises:
          KeyError: If ``place`` does not belong to any parameter.
        """
        for n in range(len(place), -1, -1):  # If the model is a single array, the place of the parameter is empty.
            if place[:n] in self.frame.parameters:
                return place[:n]
        raise KeyError(place)

    def with_arrays(self, arrays: Mapping[Names, Any]) -> "Flat":
        """Returns the same tree with other arrays."""
        return replace(self, arrays=arrays)

    def types(self) -> "Flat":
        """Returns the same tree with types in place of arrays, and without boxes of raw values."""
        types = {place: type_of(x) if is_array(x) else x for place, x in self.arrays.items()}
        return replace(self, arrays=types, boxes={})

    def before(self, later: Sequence[Any]) -> "Flat":
        """Returns the same tree for a stage that comes before the stages ``later`` in the chain."""
        return replace(self, later=later)

    def axes_at(self, place: Names) -> KnownAxes:
        """Derives what is known about the axes of the array at a place from the axes of its parameter.

        An aligned value has the axes of the parameter. A factor with the axes ``("rows", "rank")``, such as ``u`` of a
        ``LowRank``, has the inputs of the parameter, and the rank as its output. For other values, the axes are
        unknown.
        """
        axes = self.frame.axes[self.parameter_of(place)]
        for value in _marked_values(place):
            if _has_axes_of_array(value.declared):
                continue
            mark, declared = value.node[-1], value.declared.axes
            # One of the later stages of this kind created the marker dict.
            makers = [stage._unwrapped for stage in self.later if stage.kind == kind_of(mark)]
            # If the user gave `rows` or `columns`, the rows need not be the inputs.
            if not declared or any(maker.rows is not None or maker.columns is not None for maker in makers):
                return KnownAxes(why=f"it is a raw value of {makers[0] if makers else mark!r}, with axes of its own")
            fields = vars(makers[0]) if len(makers) == 1 else {}  # The field ``rank``, for example, is an axis size.
            axes = axes.of_factor(declared, {axis: n for axis, n in fields.items() if isinstance(n, int)})
        return axes

    def leaves(self, *, bases: bool = False) -> list[Leaf]:
        """Returns a :class:`Leaf` with content for each array, without empty marker dicts.

        ``bases`` has the same meaning as in :func:`describe_places`.
        """
        places = [place for place, x in self.arrays.items() if not (is_empty(x) and place and is_mark(place[-1]))]
        leaves = describe_places(places, bases=bases)
        for leaf in leaves:
            leaf.content, leaf.tree = self.arrays[leaf.place], self
        return leaves

    def nodes(self, kind: str) -> dict[Names, Node]:
        """Returns the marker dicts of a kind in which no other marker is nested, by the place of the array.

        ``apply`` of a stage replaces these marker dicts first. Only then can the marker dicts around them be replaced.
        """
        marks = {place[:-1]: place[-1] for place in self._places_of_innermost_markers() if kind_of(place[-1]) == kind}
        nodes = {place: Node(place, mark, below={}) for place, mark in marks.items()}
        for place, x in self.arrays.items():
            for n in range(len(place)):
                if place[:n] in nodes:
                    nodes[place[:n]].below[place] = x
        return nodes

    def own_nodes(self, who: object, kind: str) -> dict[Names, Node]:
        """Returns the result of :meth:`nodes` for a stage of this kind, and raises an error if it is empty.

        Raises:
          ValueError: If the tree has no such marker dicts. The error begins with ``who``, the stage and its method.
        """
        if nodes := self.nodes(kind):
            return nodes
        if found := first_marker(self.arrays):
            path, mark = found
            if kind_of(mark) == kind:  # The marker has the right kind, but other markers are nested in it.
                raise ValueError(f"{who} does not know the values under {mark!r} at {path!r}: {OTHER_CHAIN}")
            raise ValueError(
                f"{who} found no {marker(kind, 1)!r} in a raw tree that holds {mark!r} at {path!r}: {OTHER_CHAIN}"
            )
        raise ValueError(
            f"{who} got a tree that never went through init: it holds no {marker(kind, 1)!r}. Call `raw = "
            f"p.init(params)` once, with the whole chain, and pass `raw`."
        )

    def _places_of_innermost_markers(self) -> list[Names]:
        """Returns the key path up to each marker in which no other marker is nested, such as ``("w", "@scale")``."""
        innermost = dict[Names, None]()  # The keys are in the order of the tree.
        outer = set[Names]()
        for place in self.arrays:
            markers = [place[: i + 1] for i, name in enumerate(place) if name[:1] == "@" and name != FIXED]
            innermost |= dict.fromkeys(markers[-1:])
            outer.update(markers[:-1])
        # If one value is plain and another is replaced, a marker is the last in one key path, but not in the other.
        return [place for place in innermost if place not in outer]

    def with_nodes(self, nodes: Mapping[Names, Node]) -> "Flat":
        """Returns the tree where each of these marker dicts is one leaf, a :class:`Node` at the place of the array."""
        return self.swap([(node.inside, {place: node}) for place, node in nodes.items()])

    def swap(self, swaps: Sequence[Swap]) -> "Flat":
        """Returns the tree with some arrays replaced by others, and all other arrays in the same order as before.

        ``[([("w", "@scale", "x")], {("w",): array})]`` puts the array ``w`` in place of its raw value. Each swap must
        remove at least one place, because the new arrays go where the first removed place was. ``self`` is not changed.
        """
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
    """Separates the arrays of a raw (or plain) tree from its structure and its boxes. Inverse: :func:`nest`.

    ``{"w": {"@scale": {"x": x}}, "b": b}`` has the places ``("b",)`` and ``("w", "@scale", "x")`` in ``arrays``, and a
    frame with the parameters ``b`` and ``w``. A box may be around a marker dict, or around a single value inside the
    marker dict.

    Raises:
      ValueError: If two leaves have the same place, or one box is at two places.
    """
    paths, nodes, treedef = flatten_with_names(tree, lambda x: is_box_of_one(x) or holds_markers(x))
    arrays, boxes, boxes_of_values = dict[Names, Any](), dict[Names, Any](), dict[Names, Any]()
    # If a model holds a parameter at several places, each place but the first holds an `Elsewhere`.
    first_places = {path: node.place for path, node in zip(paths, nodes, strict=True) if isinstance(node, Elsewhere)}
    for path, node in zip(paths, nodes, strict=True):
        content = node
        if is_box(node):
            boxes[path], content = node, value_in(node)
        # The entries of a marker dict are all its contents, with their key paths inside it. An array of the model is a
        # single entry with an empty key path.
        entries = items(content, lambda x: is_end(x) or is_box(x)) if holds_markers(content) else [((), content)]
        for below, x in entries:
            place = (*path, *below)
            if place in arrays:
                raise same_path_error(path_text(place))
            arrays[place] = x
            if below and is_box(x):  # The box belongs to a raw value or to an empty marker dict.
                boxes_of_values[place], value = x, value_in(x)
                arrays[place] = {} if is_empty(value) else value
    require_one_place({**boxes, **boxes_of_values})
    boxes |= _boxes_of_parameters(boxes_of_values)
    return Flat(Frame(treedef, tuple(paths), boxes, first_places), arrays, boxes_of_values)


def _boxes_of_parameters(boxes_of_values: Mapping[Names, Any]) -> dict[Names, Any]:
    """Creates a box for each parameter whose raw values have boxes; parameters that get no box are left out."""
    boxes_by_parameter = dict[Names, list[Any]]()
    for place, box in boxes_of_values.items():
        boxes_by_parameter.setdefault(parameter_place(place), []).append(box)
    boxes = {place: box_of_parameter(boxes) for place, boxes in boxes_by_parameter.items()}
    return {place: box for place, box in boxes.items() if box is not None}


def nest(tree: Flat) -> PyTree:
    """Restores the model's own structure and the boxes. Inverse: :func:`flatten`.

    A raw value keeps its own box if it has one. In that case, the box of the parameter is left out, because that box
    was created from the boxes of the raw values.
    """
    nested: dict[Any, Any] = {}  # The outer keys are the whole places of parameters, the inner keys single names.
    for place, x in tree.arrays.items():
        parameter = tree.parameter_of(place)
        box = tree.boxes.get(place)
        value = x if box is None else with_value(box, () if is_empty(x) else x)
        _insert(nested, [parameter, *place[len(parameter) :]], value)

    with_boxed_values = {tree.parameter_of(place) for place in tree.boxes}
    outer_boxes = {place: box for place, box in tree.frame.boxes.items() if place not in with_boxed_values}
    parameters = [(nested[place], outer_boxes.get(place)) for place in tree.frame.places]
    return tree.frame.treedef.unflatten([x if box is None else with_value(box, x) for x, box in parameters])


def _insert(nested: dict[Any, Any], keys: Sequence[Any], x: Any) -> None:
    """Stores ``x`` in ``nested`` under a sequence of keys, and adds missing dicts in between.

    For the keys ``["a", "b"]``, an empty ``nested`` becomes ``{"a": {"b": x}}``.
    """
    for key in keys[:-1]:
        nested = nested.setdefault(key, {})
    nested[keys[-1]] = x


def _describe_wrong_values(mark: str, content: Any) -> str:
    """Returns the error text for the first fault in the ``content`` of a marker that is not a dict of arrays."""
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
    """Returns the end of an error text that says where a value that is not an array may come from, and what to do."""
    if value is None:
        return "this is one half of `rpx.partition`. Join both halves with `rpx.combine` first."
    if isinstance(value, Mapping) and set(value) == {"value"}:
        return (
            "this is an nnx state that was restored without its structure. Restore it with a template, or save "
            "`nnx.to_pure_dict(raw)`."
        )
    return OTHER_CHAIN
