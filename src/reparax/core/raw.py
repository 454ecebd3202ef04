"""Converts raw trees to flat dicts and back, and reads the role of each raw value from its key path.

``init`` of a stage replaces each array with a marker dict that holds the raw values of the array, as in
``{"@weight_norm": {"g": ..., "v": ...}}``. Fixed values are under ``"@fixed"``. For a chain, marker dicts are nested:
the marker dicts of the first stage are inside those of the last stage. So the key path of a raw value determines the
parameter that it belongs to, whether it is main or auxiliary, free or fixed, and the path under which a stage can
select it.

Terms of this module:

- A *place* is a key path, a tuple of names: ``("dense", "kernel", "@weight_norm", "g")``. A *path* is the text by which
  users select an array: ``"dense/kernel"``.
- A *marker* is a name such as ``"@weight_norm"``. Its *kind* is ``weight_norm``, the name of a class of stages.
- A :class:`Flat` is a tree as a dict from key paths to arrays. A :class:`Frame` is the model's own tree without its
  arrays. :func:`flatten` separates the two, and :func:`nest` puts them together again.
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
"""Maps each kind, such as ``"weight_norm"``, to its stage class. A class replaces an earlier one of the same kind."""


def registered_kind(kind: str) -> Any:
    """Returns the stage class of a kind such as ``"weight_norm"``, imported if necessary; None if there is no class."""
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
      draw_path: A path that no other array of the tree has. Random numbers for the array depend on ``draw_path``.
      main: Whether the array is a plain array, or a main value of each stage whose marker is in its key path.
      visible: Whether an earlier stage may select the array. Fixed values that are not main are hidden.
      added: Whether an adapter adds this value to a base, and the base represents the array. Only an expression for the
        whole key path, such as ``.*/@lora/a``, selects such a value.
      decays: Whether smaller entries here give a smaller effective array. This is True if each stage whose marker is in
        the key path declares it.
      content: The array, its type, or a :class:`Node` with the contents of a marker dict.
      reading: The :class:`Reading` of a marker dict, which holds the shape and dtype that its values imply for the
        array, or None if they have not been inferred.
      tree: The tree that contains the array, or None if only the key path is known.
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
        """The array or its type; for a marker dict, the type of the array that it represents, if already inferred."""
        return self.content if self.reading is None else self.reading.effective

    @cached_property
    def axes(self) -> KnownAxes:
        """The known axis roles and names of the array, inferred from the parameter; empty if the leaf has no tree."""
        return KnownAxes() if self.tree is None else self.tree.axes_at(self.place)

    @property
    def network_role(self) -> Role | None:
        """The role of each axis of the array in a traced network; None if no network was traced.

        If the network has no roles for this array, the result is an empty role with the reason in ``why``.
        """
        roles = None if self.tree is None else self.tree.roles
        return None if roles is None else roles.get(self.place, _ROLE_OF_OTHERS)

    @property
    def is_state(self) -> bool:
        """Whether the array is model state, such as a running mean, instead of a parameter."""
        return self.tree is not None and self.tree.parameter_of(self.place) in self.tree.frame.state

    @property
    def values(self) -> dict[str, Names]:
        """Maps each value's name to its key path in the marker dict; empty for a plain array."""
        return self.content.values if isinstance(self.content, Node) else {}

    def node_of(self, kind: str) -> Names:
        """Returns the key path of the marker dict that replaces the array, or of the one that ``kind`` would add.

        For a plain array at ``("w",)`` and the kind ``"scale"``, the result is ``("w", "@scale")``.
        """
        if isinstance(self.content, Node):
            return (*self.place, self.content.mark)
        return (*self.place, marker(kind, next_number(self.place, kind)))

    @property
    def raw_path(self) -> str:
        """The key path as text, with markers such as ``"@lora"``. Unlike ``path``, it is unique to each raw value."""
        return path_text(self.place)

    @property
    def parameter(self) -> str:
        """The path of the model parameter to which the raw value belongs, such as ``"dense/kernel"``."""
        return parameter_path(self.place)

    @property
    def fixed(self) -> bool:
        """Whether optimizers must not change the array, because it is a fixed value or a raw value of a fixed value."""
        return FIXED in self.place

    @property
    def is_there(self) -> bool:
        """Whether the leaf holds an array, or a marker dict that replaces an array, and not, for example, None."""
        return is_array(self.content) or isinstance(self.content, Node)


@dataclass(frozen=True, eq=False)
class Node:
    """The contents of a marker dict, which replaces an array in a raw tree, with no other marker nested in it.

    Attributes:
      place: The key path of the array that the marker dict replaces.
      mark: The marker, such as ``"@weight_norm"``.
      below: Everything below ``place``, by key path and in the order of the tree. In a damaged tree, this may include
        entries that are not under the marker.
    """

    place: Names
    mark: str
    below: dict[Names, Any]

    @cached_property
    def inside(self) -> list[Names]:
        """The key paths of all leaves under the marker, or the marker's own key path if the marker dict is empty."""
        return [place for place in self.below if place[len(self.place)] == self.mark]

    @property
    def values(self) -> dict[str, Names]:
        """Maps each raw value's name to its key path; empty for an empty marker dict, which counts as a leaf."""
        return {place[-1]: place for place in self.inside if place[-1] != self.mark}

    def arrays(self, *, may_be_none: bool = False) -> dict[str, Any]:
        """Returns the raw values by name: ``{"@scale": {"@fixed": {"n": n}, "x": x}}`` gives ``{"n": n, "x": x}``.

        For an array without values of its own, such as a tied array, the marker dict is empty, and so is the result.
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
            """Returns whether a key path leads to an array directly under the marker or under its ``"@fixed"``."""
            n_markers = 2 if FIXED in place[depth:] else 1
            return len(place) == depth + n_markers + 1 and place[-1] != FIXED and is_array(self.below[place])

        arrays = {place[-1]: self.below[place] for place in self.inside if is_value(place)}
        if not is_alone or len(arrays) < len(self.inside):
            raise ValueError(self._describe_damage())
        return arrays

    def _describe_damage(self) -> str:
        """Returns an error text that names a sibling of the marker, or else a wrong value, in a damaged marker dict."""
        nested = dict[Any, Any]()
        for place, x in self.below.items():
            _insert(nested, place[len(self.place) :], x)
        if others := [name for name in nested if name != self.mark]:
            return f"found {others[0]!r} beside {self.mark!r}, which must be alone: {OTHER_CHAIN}"
        return _describe_wrong_values(self.mark, nested[self.mark])


def is_mark(name: object) -> bool:
    """Returns whether a name is a marker, such as ``"@weight_norm"``."""
    return isinstance(name, str) and name.startswith("@") and name != FIXED


def holds_markers(x: object) -> bool:
    """Returns whether ``x`` is a marker dict, possibly a damaged one: a dict with a key that begins with ``@``."""
    return isinstance(x, Mapping) and any(str(name).startswith("@") for name in x)


def is_fixed_value(place: Names) -> bool:
    """Returns whether the innermost stage in a key path declares the raw value there as fixed.

    If an earlier stage has replaced a fixed value with raw values, the result is False for these raw values, although
    optimizers must not change them either.
    """
    return place[-2:-1] == (FIXED,)


def kind_of(mark: str) -> str:
    """Returns the kind of stage that a marker names: ``"scale"`` for ``"@scale"`` and for ``"@scale@2"``."""
    return mark.split("@")[1]


def parameter_place(place: Names) -> Names:
    """Returns the key path of a raw value's parameter: ``("a", "w")`` for ``("a", "w", "@scale", "x")``."""
    return next((place[:i] for i, name in enumerate(place) if name.startswith("@")), place)


def parameter_path(place: Names) -> str:
    """Returns the path of a raw value's parameter as text: ``"a/w"`` for ``("a", "w", "@scale", "x")``."""
    return path_text(parameter_place(place))


def next_number(place: Names, kind: str) -> int:
    """Returns the number for the marker that another stage of a kind would add to a key path: 2 for ``"@scale@2"``.

    In a key path, markers of the same kind are numbered from 1, starting with the outermost marker.
    """
    return 1 + sum(is_mark(name) and kind_of(name) == kind for name in place)


def marker(kind: str, n: int) -> str:
    """Returns the marker of the ``n``-th stage of a kind on an array: ``"@scale"``, ``"@scale@2"``, ..."""
    return f"@{kind}" if n == 1 else f"@{kind}@{n}"


def _class_of_marker(mark: str, place: Names) -> Any:
    """Returns the stage class of a marker in the key path ``place``; raises a ValueError if there is no such class."""
    if (stage_class := registered_kind(kind_of(mark))) is None:
        raise ValueError(
            f"The raw tree holds {mark!r} at {parameter_path(place)!r}, but no stage of that kind is defined. Import "
            f"the module that defines the stage. If {mark!r} is a name in your model, rename it, because names that "
            f"begin with '@' are reserved for stages."
        )
    return stage_class


class MarkedValue(NamedTuple):
    """A raw value of one stage, whose name follows the marker of that stage in a key path.

    Attributes:
      node: The key path up to and including the marker.
      name: The name of the raw value.
      declared: The declaration of the raw value in the stage class, but with ``fixed`` as in the key path, where fixed
        values are under ``"@fixed"``.
      has_base: Whether a base counts as the main value of the array, instead of the values that an adapter adds to it.
    """

    node: Names
    name: str
    declared: Value
    has_base: bool


def _marked_values(place: Names, *, bases: bool = False) -> Iterator[MarkedValue]:
    """Yields a :class:`MarkedValue` for each marker of a key path, from the outermost marker to the innermost.

    For ``("w", "@weight_norm", "v", "@scale", "x")``, the values are named ``v`` and ``x``. For the key path of a plain
    array, nothing is yielded. With ``bases``, a base counts as the main value of its array, in place of the values that
    an adapter adds to the base.

    Raises:
      ValueError: If no stage class has the kind of a marker, or if nothing is under a marker.
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
    """Returns whether each stage in a key path declares that the value there has the axes of the parameter.

    The result is True for a plain array, for ``v`` of a ``WeightNorm`` and for the base of a ``LoRA``. It is False for
    the factors of a ``LoRA``.
    """
    return all(_has_axes_of_array(value.declared) for value in _marked_values(place))


def _has_axes_of_array(declared: Value) -> bool:
    """Returns whether a raw value is declared to have the axes of its array: as a base or as an aligned main value."""
    return declared.base or (declared.main and declared.aligned)


def describe_places(places: Sequence[Names], *, bases: bool = False) -> list[Leaf]:
    """Returns a :class:`Leaf` without content for each key path of a raw (or plain) tree, in the same order.

    ``places`` must hold all key paths of the tree, because each ``draw_path`` depends on the array's other main values.
    With ``bases``, the base of an adapter represents the array, and the values that the adapter adds to it do not.

    Raises:
      ValueError: If two leaves have the same path, as with the keys 0 and "0" in one dict.
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
    """Returns the :class:`Leaf` for a key path, without content, given the raw values named in this key path.

    ``values`` comes from :func:`_marked_values`, and ``main_names`` comes from :func:`_names_of_main_values`. For a
    ``WeightNorm`` on a kernel ``w``, the path of ``v`` is ``w``, because ``v`` represents the array, and the path of
    ``g`` is ``w/g``. If an array has several main values, such as two factors, they share the path ``w``, but have
    different draw paths.
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

    ``values`` must hold the results of :func:`_marked_values` for all key paths of a tree.
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
    """Returns the leaves of a raw (or plain) tree, a :class:`Leaf` that describes each of them, and the treedef."""
    paths, contents, treedef = flatten_with_names(tree)
    return contents, describe_places(paths), treedef


def places_of(tree: PyTree) -> list[Names]:
    """Returns the key path of each leaf, where an empty dict or tuple (an array without its own values) is a leaf."""
    return flatten_with_names(tree, is_empty)[0]


def first_marker(places: Iterable[Names]) -> tuple[str, str] | None:
    """Returns the path and the outermost marker of the first parametrized parameter: ``("a/w", "@scale")``.

    The result is None if no key path has a marker, so this function also distinguishes raw trees from plain trees.
    """
    marked = ((place, len(parameter_place(place))) for place in places)
    return next(((path_text(place[:n]), place[n]) for place, n in marked if n < len(place)), None)


def require_no_raw(who: object, params: PyTree, advice: str) -> None:
    """Raises an error if ``params`` is a raw tree instead of the model's own parameters.

    Raises:
      ValueError: If ``params`` is a raw tree. The error begins with ``who``, the call, and ends with ``advice``.
    """
    if found := first_marker(places_of(params)):
        path, mark = found
        _class_of_marker(mark, (path,))  # If no stage of that kind is defined, this call raises a clearer error.
        raise ValueError(
            f"{who} takes the model's own parameters, but got a raw tree: it holds {mark!r} at {path!r}. {advice}"
        )


def state_flags(tree: PyTree) -> list[bool]:
    """Returns a list with a flag for each leaf of a tree: whether the leaf is model state, such as a running mean.

    Model state is recognized by linen's collections and by the types of nnx variables. See :func:`_are_state`.
    """
    return _flags_of_leaves(tree, lambda node: len(jax.tree.leaves(node)))


def _flags_of_leaves(tree: PyTree, count: Callable[[Any], int]) -> list[bool]:
    """Returns a list with a flag for each leaf: whether it is model state. All leaves of an nnx variable are alike.

    ``count`` takes an nnx variable, or a leaf outside of variables, and returns how many flags the result has for it.
    """
    paths, nodes, _ = flatten_with_names(tree, lambda x: is_flax_instance(x, "Variable"))
    pairs = zip(_are_state(paths, nodes), nodes, strict=True)
    return [flag for flag, node in pairs for _ in range(count(node))]


def _are_state(paths: Sequence[Names], boxes: Sequence[Any]) -> list[bool]:
    """Returns for each key path whether it holds model state, judged by nnx variables and by linen's collections.

    The collections of linen are ``{"params": ..., "batch_stats": ..., ...}``. Everything in ``batch_stats`` is state,
    wherever in the tree ``batch_stats`` is. Other top-level names count as collections only if ``params`` is beside
    them. An array directly beside ``params``, such as a temperature, is a parameter.
    """
    has_params = any(path[:1] == ("params",) for path in paths)

    def is_state(path: Names, box: Any) -> bool:
        """Returns whether one key path holds model state; ``box`` is the node there, such as an nnx variable."""
        # A variable of the class `rpx.nnx.Fixed` holds a raw value of a parameter, so it is not state.
        is_parameter = is_flax_instance(box, "Param") or getattr(type(box), "holds_parameter", False)
        if is_flax_instance(box, "Variable") and not is_parameter:
            return True
        # The path of a parameter in a collection has two or more names, separated by "/".
        return "batch_stats" in path or (has_params and path[0] != "params" and "/" in parameter_path(path))

    return list(map(is_state, paths, boxes))


Swap = tuple[Sequence[Names], Mapping[Names, Any]]
"""A replacement of arrays in a tree: the key paths to remove, in the order of the tree, and the new arrays by key path.
The new arrays take the position of the first removed array."""


@dataclass(frozen=True)
class Frame:
    """The model's own tree without its arrays: the structure, the key paths of the parameters, and their flax boxes.

    Attributes:
      treedef: The structure, with a leaf for each parameter.
      places: The key path of each parameter, in the order of the tree.
      boxes: The flax box (such as an nnx variable) around each parameter that has one, by key path.
      first_places: Maps each repeated occurrence of a shared parameter to the key path of its first occurrence.
    """

    treedef: Any
    places: tuple[Names, ...]
    boxes: Mapping[Names, Any]
    first_places: Mapping[Names, Names]

    @cached_property
    def parameters(self) -> frozenset[Names]:
        """The key paths of the parameters as a set, for fast look-up."""
        return frozenset(self.places)

    @cached_property
    def state(self) -> frozenset[Names]:
        """The key paths that hold model state, such as running means, instead of parameters."""
        variables = {place: box for place, box in self.boxes.items() if is_flax_instance(box, "Variable")}
        # Rebuild the model's tree with its nnx variables, whose types tell state from parameters. Put 0 in place of all
        # other arrays.
        around = self.treedef.unflatten([variables.get(place, 0) for place in self.places])
        # Each of the rebuilt variables has a single key path, so it gets one flag. A variable that is part of the
        # structure gets one flag for each of its leaves.
        ids = set(map(id, variables.values()))
        flags = _flags_of_leaves(around, lambda node: 1 if id(node) in ids else len(jax.tree.leaves(node)))
        return frozenset(place for place, flag in zip(self.places, flags, strict=True) if flag)

    @cached_property
    def axes(self) -> Mapping[Names, KnownAxes]:
        """Known axis roles of each parameter, inferred from its module (or, failing that, its name) and from its box.

        Only the class of a module matters, and the tree structure contains this class. If several modules share a
        parameter, they must agree on its axes. Otherwise, the axes are unknown at its first key path.
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
    """A raw tree, or a plain one, as a dict from key paths to arrays.

    Attributes:
      frame: The model's own tree without its arrays: its structure and its flax boxes.
      arrays: The array, or its type, at each key path. Other leaves and empty nodes are kept unchanged.
      boxes: The flax box (such as an nnx variable) around each raw value that has one, by key path.
      later: The later stages of the chain, while a stage selects arrays from this tree.
      roles: The role of each array in a traced network, by key path, or None if no network was traced.
    """

    frame: Frame
    arrays: Mapping[Names, Any]
    boxes: Mapping[Names, Any] = field(default_factory=dict[Names, Any])
    later: Sequence[Any] = ()
    roles: Mapping[Names, Role] | None = None

    def parameter_of(self, place: Names) -> Names:
        """Returns the key path of the parameter that ``place`` is in: ``("a", "w", "@scale", "x") -> ("a", "w")``.

        Raises:
          KeyError: If the key path ``place`` does not belong to any parameter.
        """
        for n in range(len(place), -1, -1):  # If the model is a single array, its key path is empty.
            if place[:n] in self.frame.parameters:
                return place[:n]
        raise KeyError(place)

    def with_arrays(self, arrays: Mapping[Names, Any]) -> "Flat":
        """Returns a copy of the tree with other arrays, given by key path."""
        return replace(self, arrays=arrays)

    def types(self) -> "Flat":
        """Returns a copy of the tree with types in place of arrays, and without the boxes of raw values."""
        types = {place: type_of(x) if is_array(x) else x for place, x in self.arrays.items()}
        return replace(self, arrays=types, boxes={})

    def before(self, later: Sequence[Any]) -> "Flat":
        """Returns a copy of the tree for a stage that precedes the stages ``later`` in its chain."""
        return replace(self, later=later)

    def axes_at(self, place: Names) -> KnownAxes:
        """Returns the known axis roles of the array at a key path, derived from those of its parameter.

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
            # If the user gave `rows` or `columns`, the rows need not be the input axes.
            if not declared or any(maker.rows is not None or maker.columns is not None for maker in makers):
                return KnownAxes(why=f"it is a raw value of {makers[0] if makers else mark!r}, with axes of its own")
            fields = vars(makers[0]) if len(makers) == 1 else {}  # A field such as `rank` is the size of an axis.
            axes = axes.of_factor(declared, {axis: n for axis, n in fields.items() if isinstance(n, int)})
        return axes

    def leaves(self, *, bases: bool = False) -> list[Leaf]:
        """Returns a :class:`Leaf` with content for each leaf of the tree; empty marker dicts are left out.

        With ``bases``, the base of an adapter represents the array; see :func:`describe_places`.
        """
        places = [place for place, x in self.arrays.items() if not (is_empty(x) and place and is_mark(place[-1]))]
        leaves = describe_places(places, bases=bases)
        for leaf in leaves:
            leaf.content, leaf.tree = self.arrays[leaf.place], self
        return leaves

    def nodes(self, kind: str) -> dict[Names, Node]:
        """Returns the innermost marker dicts of a kind, such as ``"lora"``, by the key path of the replaced array.

        Innermost marker dicts have no other marker nested in them. ``apply`` computes their arrays first, and then
        those of the marker dicts around them.
        """
        marks = {place[:-1]: place[-1] for place in self._places_of_innermost_markers() if kind_of(place[-1]) == kind}
        nodes = {place: Node(place, mark, below={}) for place, mark in marks.items()}
        for place, x in self.arrays.items():
            for n in range(len(place)):
                if place[:n] in nodes:
                    nodes[place[:n]].below[place] = x
        return nodes

    def own_nodes(self, who: object, kind: str) -> dict[Names, Node]:
        """Returns the innermost marker dicts of a stage's kind, like :meth:`nodes`, but requires at least one.

        Raises:
          ValueError: If the tree has no such marker dict. The error begins with ``who``, the stage and its method.
        """
        if nodes := self.nodes(kind):
            return nodes
        if found := first_marker(self.arrays):
            path, mark = found
            if kind_of(mark) == kind:  # The marker has the right kind, but other markers are nested in it.
                raise ValueError(
                    f"{who} found raw values of another stage under {mark!r} at {path!r}, instead of arrays: "
                    f"{OTHER_CHAIN}"
                )
            raise ValueError(
                f"{who} found no {marker(kind, 1)!r} in a raw tree that holds {mark!r} at {path!r}: {OTHER_CHAIN}"
            )
        raise ValueError(
            f"{who} got a tree that never went through init: it holds no {marker(kind, 1)!r}. Call `raw = "
            f"p.init(params)` once, with the whole chain, and pass `raw`."
        )

    def _places_of_innermost_markers(self) -> list[Names]:
        """Returns the key path of each marker dict in which no other marker is nested, such as ``("w", "@scale")``."""
        innermost = dict[Names, None]()  # The keys are in the order of the tree.
        outer = set[Names]()
        for place in self.arrays:
            markers = [place[: i + 1] for i, name in enumerate(place) if name[:1] == "@" and name != FIXED]
            innermost |= dict.fromkeys(markers[-1:])
            outer.update(markers[:-1])
        # If only one of two values is replaced, their common marker is the last in one key path, but not in the other.
        return [place for place in innermost if place not in outer]

    def with_nodes(self, nodes: Mapping[Names, Node]) -> "Flat":
        """Returns a copy of the tree in which each of these marker dicts is a single leaf, at its array's key path."""
        return self.swap([(node.inside, {place: node}) for place, node in nodes.items()])

    def swap(self, swaps: Sequence[Swap]) -> "Flat":
        """Returns a copy of the tree with some arrays replaced, and all other arrays in the same order as before.

        ``[([("w", "@scale", "x")], {("w",): array})]`` puts the array ``w`` in place of its raw value. Each swap must
        remove at least one array, because the new arrays take the position of the first removed one.
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
    """Separates the arrays of a raw (or plain) tree from its structure and its flax boxes. Inverse: :func:`nest`.

    For ``{"w": {"@scale": {"x": x}}, "b": b}``, the result has the key paths ``("b",)`` and ``("w", "@scale", "x")`` in
    ``arrays``, and a frame with the parameters ``b`` and ``w``. A box may be around a marker dict, or around a single
    value inside the marker dict.

    Raises:
      ValueError: If two leaves have the same key path, or if an nnx variable occurs twice.
    """
    paths, nodes, treedef = flatten_with_names(tree, lambda x: is_box_of_one(x) or holds_markers(x))
    arrays, boxes, boxes_of_values = dict[Names, Any](), dict[Names, Any](), dict[Names, Any]()
    # If a model holds a parameter several times, each occurrence but the first is an `Elsewhere`.
    first_places = {path: node.place for path, node in zip(paths, nodes, strict=True) if isinstance(node, Elsewhere)}
    for path, node in zip(paths, nodes, strict=True):
        content = node
        if is_box(node):
            boxes[path], content = node, value_in(node)
        # The entries of a marker dict are its leaves, with key paths relative to it. A plain array is a single entry
        # with an empty key path.
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
    """Returns a dict from key path to flax box for parameters whose boxes can be rebuilt from those of raw values."""
    boxes_by_parameter = dict[Names, list[Any]]()
    for place, box in boxes_of_values.items():
        boxes_by_parameter.setdefault(parameter_place(place), []).append(box)
    boxes = {place: box_of_parameter(boxes) for place, boxes in boxes_by_parameter.items()}
    return {place: box for place, box in boxes.items() if box is not None}


def nest(tree: Flat) -> PyTree:
    """Returns a tree in the model's own structure, with its flax boxes. Inverse: :func:`flatten`.

    A raw value keeps its own box if it has one. In that case, the box of the parameter is left out, because it was
    created from the boxes of the raw values.
    """
    nested: dict[Any, Any] = {}  # The outer keys are whole key paths of parameters, and the inner keys single names.
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
    """Stores ``x`` in a nested dict under a sequence of keys, and adds missing dicts in between.

    For the keys ``["a", "b"]``, an empty ``nested`` becomes ``{"a": {"b": x}}``.
    """
    for key in keys[:-1]:
        nested = nested.setdefault(key, {})
    nested[keys[-1]] = x


def _describe_wrong_values(mark: str, content: Any) -> str:
    """Returns an error text for the first fault in ``content``, which is under a marker, but not a dict of arrays."""
    fixed_values = content.get(FIXED, {}) if isinstance(content, Mapping) else {}
    for name, values in ((mark, content), (FIXED, fixed_values)):
        if not isinstance(values, Mapping):
            return f"expected a dict of values under {name!r}, got {describe(values)}: {OTHER_CHAIN}"
    if FIXED in content and not fixed_values:
        return f"expected arrays under {FIXED!r}, got none. Pass the whole raw tree, including its fixed values."
    all_values = {**content, **fixed_values}
    name, x = next((name, x) for name, x in all_values.items() if not is_array(x) and name != FIXED)
    found = f"a tree with {', '.join(map(repr, x))}" if isinstance(x, Mapping) else type(x).__name__
    return f"expected an array as {name!r}, got {found}: {_explain_other(x)}"


def _explain_other(value: Any) -> str:
    """Returns the end of an error about a value that is not an array: where it may come from, and what to do."""
    if value is None:
        return "the tree is one half of `rpx.partition(raw)`. Join both halves with `rpx.combine` first."
    if isinstance(value, Mapping) and set(value) == {"value"}:
        return (
            "the tree is an nnx state that was restored without its structure. Restore it with a template, or save "
            "`nnx.to_pure_dict(raw)`."
        )
    return OTHER_CHAIN
