"""Which arrays a stage acts on, with which numbers and axes, and where it finds the raw values that it made."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import jax

from reparax.core.axes import (
    EACH,
    LAST,
    ONE_AXIS,
    Axis,
    AxisNames,
    AxisNumbers,
    are_words,
    each_stacked,
    find_axes,
    names_of_places,
    one_stacked,
    require_axes,
    require_names_fit,
    stacked_axes_error,
    words_to_numbers,
)
from reparax.core.chain import compose
from reparax.core.checks import locate_errors, require_fit, types_under
from reparax.core.fields import ByArray, ByPath, by_path_or_one, without_unmatched
from reparax.core.formulas import Arrangement, arrange, call_remembered, facts_of, followed_axes, type_in_place
from reparax.core.origins import FollowedAxes, Origins, keep_origins
from reparax.core.paths import Names, PyTree, types_of_result
from reparax.core.plan import Layer, Planner, Spot, opened_spot, rewrites
from reparax.core.raw import FIXED, Flat, Slot, flatten, nest, next_number
from reparax.core.roles import INPUTS, STACKED, Misfit, Role, axes_by_word
from reparax.core.sites import Bare, FromValues, InPlace, Node, own_nodes
from reparax.core.where import (
    AllBut,
    Candidate,
    Selected,
    by_path,
    choose,
    chose_nothing_error,
    is_bias_or_scale,
    is_table,
    require_known,
)
from reparax.numerics.arithmetic import is_array


class Selection(Planner):
    """What the planners of stages on one array share."""

    @property
    def asks_functions(self) -> bool:
        stage = self.stage
        asks = callable(stage.where) and not isinstance(stage.where, Selected | AllBut)
        return asks or any(isinstance(getattr(stage, field.name), ByArray) for field in fields(stage))

    def present(self, method: str, tree: Flat) -> list[Candidate]:
        """The arrays of ``tree`` that the stage acts on."""
        names, arrays = self.axis_names(tree), tree.arrays
        slots = tree.slots(bases=self.stage._takes_base).items()
        places = [Candidate(at, slot, names[at], is_array(arrays[at]), partial(arrays.get, at)) for at, slot in slots]
        return self.select(method, tree, places)

    def select(self, method: str, tree: Flat, places: Sequence[Candidate]) -> list[Candidate]:
        """Those of the places of ``tree`` on which the stage acts."""
        who, where, slots = self.who(method), self.stage.where, [candidate.slot for candidate in places]

        def by_default(candidate: Candidate) -> bool:
            return tree.root(candidate.place) not in tree.frame.state and self._by_default(who, candidate)

        require_known(who, where, slots, nest(tree))
        flags = choose(who, where, places, by_default)
        if not any(flags) and not self.may_choose_nothing(places):
            raise chose_nothing_error(who, where, places, self.stage.stacked)
        flags = without_unmatched(who, self.stage._varied | self._by_path, flags, [slot.path for slot in slots])
        candidates = [
            candidate for candidate, flag in zip(places, flags, strict=True) if flag and not self.is_done(candidate)
        ]
        # In the body of a scan over the layers, no array has their axis any more.
        if method == "init" and "stacked" not in self._by_path:
            require_axes(who, "stacked", self.stage.stacked, [candidate.names for candidate in candidates])
        return candidates

    def may_choose_nothing(self, candidates: Sequence[Candidate]) -> bool:
        """Whether it is no error that the stage acts on none of these places."""
        del candidates
        return False

    def is_done(self, candidate: Candidate) -> bool:
        """Whether the stage has nothing to do at a place that it acts on."""
        del candidate
        return False

    def axis_names(self, tree: Flat) -> dict[Names, AxisNames | None]:
        """The axis names of each array, if this stage needs any."""
        return names_of_places(tree) if self.stage._asks_names else dict.fromkeys(tree.arrays)

    def _by_default(self, who: str, candidate: Candidate) -> bool:
        """Whether the stage takes an array by its name and type; of one that it has taken, the type is not known."""
        slot, w = candidate.slot, None if candidate.is_taken else candidate.array()
        if (self.stage.min_ndim >= 2 and is_bias_or_scale(slot)) or (not self.stage.tables and is_table(slot)):
            return False
        if w is None:
            return True
        if (stage := self.stage.at_path(slot.path) if self._by_path else self.stage) is None:
            return False
        with locate_errors(f"{who} at {slot.path!r}"):
            stacked = self.stacked_at(stage, candidate)
        return stacked_axes_error(w, stacked) is None and self.stage.default(one_stacked(w, stacked))

    def stacked_at(self, stage: Any, candidate: Candidate) -> AxisNumbers:
        """The stacked axes of an array, for the stage there."""
        return find_axes(stage.stacked, candidate.names)

    def group_key(self, path: str, names: AxisNames | None) -> object:
        """What arrays share whose axes have the same meaning for this stage."""
        return (path, names) if self._by_path else names

    def typical(self, path: str, names: AxisNames | None) -> Arrangement:
        """The stage at an array with these axis names, if its own numbers do not count."""
        group = self.group_key(path, names)
        if group not in self._typical:
            self._typical[group] = arrange(self._at_path(path), names)
        return self._typical[group]

    def arrangement_at(self, path: str, w: Any, names: AxisNames | None) -> Arrangement:
        """The stage at one array."""
        if not self.stage._varied:
            return self.typical(path, names)
        return arrange(self._at_path(path).for_array(path, w), names)

    def _at_path(self, path: str) -> Any:
        """The stage with the axes for one array."""
        if not self._by_path:
            return self.stage
        if (stage := self.stage.at_path(path)) is None:
            name, value = next((name, x) for name, x in self._by_path.items() if not x.matching(path))
            raise ValueError(f"expected {name} for {path!r}, got {name}={value!r}. Add an expression that matches it.")
        return stage

    @cached_property
    def _by_path(self) -> dict[str, ByPath]:
        """The fields of axes that differ from array to array."""
        return self.stage._by_path

    @cached_property
    def _typical(self) -> dict[object, Arrangement]:
        """The arrangements that are known so far, by what they depend on."""
        return {}

    def checked_arrangement(self, who: str, candidate: Candidate) -> Arrangement:
        """The stage at one array; raises an error if it cannot take the array."""
        w, where = candidate.array(), f"{who} at {candidate.slot.path!r}"
        with locate_errors(where):
            at = self.arrangement_at(candidate.slot.path, w, candidate.names)
            if candidate.names is not None:  # the stage asks for names
                require_names_fit(candidate.names, w)
            reason, stage_for_one = at.stage._dtype_error(w) or stacked_axes_error(w, at.stacked), at.stage_for_one
            for one_array in each_stacked(w, at.stacked) if reason is None else ():
                if why := stage_for_one._why_refused(one_array):
                    reason = f"{why} The array is one of those along stacked={at.stage.stacked}." if at.stacked else why
                    break
        if reason is not None:
            raise ValueError(f"{where}: {reason}")
        return at


Roles = Mapping[Names, Role]


@dataclass(frozen=True)
class OnRoles(Selection):
    """A planner that knows the axes of its stage where a network says what they are.

    Attributes:
      stacks: The stacked axes at each place, as the network or the stage says; None for those of the stage.
    """

    stacks: Mapping[Names, Any] | None = None

    def stacked_at(self, stage: Any, candidate: Candidate) -> AxisNumbers:
        if self.stacks is None:
            return super().stacked_at(stage, candidate)
        return find_axes(self.stacks[candidate.place], candidate.names)

    def on(self, tree: Flat, roles: Roles) -> Any:
        stage, slots = self.stage, tree.slots(bases=self.stage._takes_base)
        paths = [slot.path for slot in slots.values()]
        stacks = {place: _stacked_axes(stage, slot, roles.get(place)) for place, slot in slots.items()}
        candidates = type(self)(stage, stacks).present("on", tree)
        axes_of_slots = [
            (candidate.slot, _axes_at(self, candidate, roles.get(candidate.place))) for candidate in candidates
        ]
        if parts := _split_by_axes(stage, axes_of_slots):
            return compose(tuple(type(self)(part).on(tree, roles) for part in parts))
        answers: dict[str, dict[str, Any]] = {}
        for slot, axes_of_field in axes_of_slots:
            for name, axes in axes_of_field.items():
                answers.setdefault(name, {})[slot.path] = axes
        for name, axes_of_field in answers.items():
            for slot, _ in axes_of_slots:
                axes_of_field.setdefault(slot.path, getattr(stage.at_path(slot.path), name))
        new = _with_axes(stage, answers, paths, several=False)
        if [candidate.place for candidate in type(self)(new).present("on", tree)] != [
            candidate.place for candidate in candidates
        ]:
            new = _with_axes(stage, answers, paths, several=True)
        return new

    def misfits(self, tree: Flat, roles: Roles) -> Iterator[Misfit]:
        who = self.who("on")
        for candidate in self.present("on", tree):
            role, path, w = roles.get(candidate.place), candidate.slot.path, candidate.array()
            if role is None or role.why or role.ambiguous:
                continue
            at = self.checked_arrangement(who, candidate)
            if set(at.stacked) != set(role.stacked) and not self.stage.entrywise:
                yield Misfit(repr(self.stage), path, "stacked", at.stacked, role.stacked, role)
                continue
            numbers, one_array = axes_by_word(role, at.stacked), one_stacked(w, at.stacked)
            for field, (axes, word) in at.stage_for_one.axes_in_use(one_array).items():
                axes_from_end = tuple(axis - one_array.ndim for axis in axes)
                if axes_from_end != numbers[word] and not (self.stage.transposes and axes_from_end == numbers[INPUTS]):
                    yield Misfit(repr(self.stage), path, field, axes_from_end, numbers[word], role)


def _split_by_axes(stage: Any, axes_of_slots: Iterable[tuple[Slot, Mapping[str, Any]]]) -> list[Any]:
    """A stage for each set of places in the raw tree, if two values of one array differ in axes; else none.

    Axes by path are those of arrays, and both factors of one, for example, have its path.
    """
    axes_of_path, parts = dict[str, list[Mapping[str, Any]]](), dict[int, list[Slot]]()
    for slot, axes in axes_of_slots:
        known_axes = axes_of_path.setdefault(slot.path, [])
        if axes not in known_axes:
            known_axes.append(axes)
        parts.setdefault(known_axes.index(axes), []).append(slot)
    return [_stage_at(stage, slots) for slots in parts.values()] if len(parts) > 1 else []


def _stage_at(stage: Any, slots: Sequence[Slot]) -> Any:
    """The stage for these places alone."""
    paths, fields_by_path = [slot.path for slot in slots], (stage._varied | stage._by_path).items()
    numbers = {name: value.of(paths) for name, value in fields_by_path if isinstance(value, ByPath)}
    return replace(stage, where="|".join(re.escape(slot.raw_path) for slot in slots), **numbers)


def _with_axes(stage: Any, answers: Mapping[str, Mapping[str, Any]], paths: Sequence[str], *, several: bool) -> Any:
    """The stage with these axes in its fields; by path where they differ, or in any case if ``several``."""
    return replace(
        stage, **{name: by_path_or_one(axes_of_path, paths, several=several) for name, axes_of_path in answers.items()}
    )


def _fields_in_words(stage: Any) -> dict[str, Any]:
    """The fields of axes that are given in words, or that nobody set, with their words."""
    axes_of_field = {name: getattr(stage, name) for name in stage._axis_fields}
    defaults = {field.name: field.default for field in fields(stage)}
    unset = {name: word for name, word in stage.by_roles.items() if axes_of_field[name] == defaults[name]}
    return unset | {name: axes for name, axes in axes_of_field.items() if are_words(axes)}


def _asks_stacked(stage: Any) -> bool:
    """Whether the stacked axes are given in words, or are for the network to say."""
    if are_words(stage.stacked):
        return True
    words = _fields_in_words(stage)
    other_axes = (getattr(stage, name) for name in stage._axis_fields if name not in words)
    # Axes by number count all axes of the array, as nobody set ``stacked``.
    by_number = any(axes not in (None, EACH, LAST, ()) for axes in other_axes)
    counts_all = by_number or any(are_words(axes, (STACKED,)) for axes in words.values())
    return stage.stacked == () and not counts_all and (bool(words) or not stage.entrywise)


def _stacked_axes(stage: Any, slot: Slot, role: Role | None) -> Any:
    """The stacked axes of an array, as the network or the stage says; none if it has none, or is not to be seen."""
    stage_at_path = stage.at_path(slot.path)
    if stage_at_path is None or not slot.visible or role is None or not _asks_stacked(stage_at_path):
        return () if stage_at_path is None else stage_at_path.stacked
    return _one_or_tuple(role.stacked)


def _axes_at(planner: Selection, candidate: Candidate, role: Role | None) -> dict[str, Any]:
    """The axes at one array of each field that asks for them."""
    path = candidate.slot.path
    axes_of_field, stage = dict[str, Any](), planner.stage.at_path(path)
    known_role = Role(why="its axes follow none of the network's") if role is None else role
    if _asks_stacked(stage):
        axes_of_field["stacked"] = _one_or_tuple(known_role.stacked)
    if not (words := _fields_in_words(stage)):
        return axes_of_field
    stacked = known_role.stacked if "stacked" in axes_of_field else find_axes(stage.stacked, candidate.names)
    if why := _why_unusable(known_role, stacked):
        raise ValueError(f"{planner.who('on')} at {path!r}: {why}, or leave it out with `where`.")
    numbers = axes_by_word(known_role, stacked)
    for name, axes in words.items():
        axes_of_field[name] = _one_or_tuple(words_to_numbers(axes, numbers))
        if isinstance(axes_of_field[name], tuple) and stage._checks[name].check in ONE_AXIS:
            raise ValueError(
                f"{planner.who('on')} at {path!r}: {name} is one axis, but the network has {len(axes_of_field[name])} "
                f"for it, {axes_of_field[name]} of shape {known_role.shape}. Give one by number, or leave the array "
                f"out with `where`."
            )
    return axes_of_field


def _why_unusable(role: Role, stacked: Collection[int]) -> str:
    """Why words mean nothing for one of the arrays along these axes, and what to do; empty if they mean something."""
    if role.why:
        return f"the network does not multiply it with data ({role.why}). Give its axes by number"
    if role.ambiguous:
        return f"the network uses it in several ways ({role.ambiguous}). Give its axes by number"
    if unknown := tuple(axis for axis in role.unknown() if axis not in stacked):
        return f"the network gives no role to axes {unknown} of shape {role.shape}. Give the axes by number"
    return ""


def _one_or_tuple(axes: Sequence[Axis]) -> Any:
    """A single axis as a number, several in a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


class OnArraysInPlace(OnRoles):
    """The planner of a stage that changes arrays in place."""

    site: ClassVar[type[InPlace]] = InPlace

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        return tree, keep_origins(tree)

    def plan_init(self, tree: Flat) -> Layer:
        return self.plan("init", tree)

    def plan(self, method: str, tree: Flat) -> Layer:
        who, sites = self.who(method), list[InPlace]()
        for candidate in self.present(method, tree):
            arrangement, slot, w = self.checked_arrangement(who, candidate), candidate.slot, candidate.array()
            spot = Spot(candidate.place, {"w": candidate.place}, None, type_in_place(arrangement, w))
            sites.append(
                self.site(arrangement.stage, f"{slot.path!r}", {"w": spot}, slot.seed, stacked=arrangement.stacked)
            )
        return self.layer(method, sites)


class OnArrays(OnRoles):
    """The planner of a stage that replaces arrays by raw values."""

    def does(self, verb: str) -> bool:
        return rewrites(type(self.stage), f"{verb}_leaf")

    @property
    def update_reads(self) -> tuple[str, ...]:
        return self.stage._update_reads

    def plan_init(self, tree: Flat) -> Layer:
        return self.at_arrays("init", tree)

    def at_arrays(self, method: str, tree: Flat) -> Layer:
        """Where the stage finds arrays as the model has them."""
        who, sites = self.who(method), list[FromValues]()
        for candidate in self.present(method, tree):
            place = candidate.place
            slot = candidate.slot
            w = candidate.array()
            number = next_number(candidate.place, self.stage.kind)
            if isinstance(w, jax.ShapeDtypeStruct) and not self.stage._bare:
                raise TypeError(
                    f"{who} at {slot.path!r}: expected an array, got its type. For types, call "
                    f"`jax.eval_shape(p.init, params)`."
                )
            arrangement = self.checked_arrangement(who, candidate)
            spot, site = opened_spot(self.stage.kind, place, w), FromValues
            if self.stage._bare:
                spot, site = Spot(place, dict.fromkeys(self.stage.raw_values, place), None, w), Bare
            sites.append(
                site(arrangement.stage, f"{slot.path!r}", {"w": spot}, slot.seed, number, stacked=arrangement.stacked)
            )
        return self.layer(method, sites)

    def plan(self, method: str, tree: Flat) -> Layer:
        """Where the stage made the values.

        Another stage of the same kind may have made some of them, on arrays that this one does not select. If ``where``
        looks at shapes or dtypes, this stage takes only those that it could have made.
        """
        if self.stage._bare:
            return self.at_arrays(method, tree)
        who = self.who(method)
        nodes, tree, places = self._find_nodes(who, tree)
        for candidate in places:
            if candidate.place in nodes:
                with locate_errors(f"{who} at {candidate.slot.path!r}"):
                    nodes[candidate.place].require_values()
        if not by_path(self.stage.where):
            fitting = {candidate.place for candidate in places if candidate.place in nodes and _has_type(candidate)}
            foreign = nodes.keys() - fitting if fitting else ()
            places = [
                replace(candidate, present=False) if candidate.place in foreign else candidate for candidate in places
            ]
        selection = self.select(method, tree, places)
        if plain := [candidate.slot.path for candidate in selection if candidate.place not in nodes]:
            raise ValueError(
                f"{who} selects {plain[0]!r}, which never went through init. Call `raw = p.init(params)` once, with "
                f"the whole chain, and pass `raw`."
            )
        sites = list[FromValues]()
        for candidate in selection:
            slot, w = candidate.slot, candidate.array()
            with locate_errors(f"{who} at {slot.path!r}"):
                arrangement = self.arrangement_at(slot.path, w, candidate.names)
            spots = {"w": nodes[candidate.place].spot(w)}
            sites.append(FromValues(arrangement.stage, f"{slot.path!r}", spots, slot.seed, stacked=arrangement.stacked))
        return self.layer(method, sites)

    def require_own(self, tree: Flat, path: str) -> None:
        for candidate in self._find_nodes(self.who("apply"), tree)[2]:
            if candidate.slot.path == path:
                candidate.array()

    def _find_nodes(self, who: str, tree: Flat) -> tuple[Mapping[Names, Node], Flat, list[Candidate]]:
        """The nodes of the stage's kind in a tree of types, the tree with each at one place, and its places."""
        nodes, tree = own_nodes(who, self.stage.kind, tree)
        names, places = self.axis_names(tree), list[Candidate]()
        for place, slot in tree.slots(bases=self.stage._takes_base).items():
            has_node, axis_names, array = place in nodes, names[place], partial(tree.arrays.get, place)
            if has_node:
                array = cache(partial(self._own_type, who, nodes[place], slot.path, axis_names))
            # After a stage that changes types, the effective array does not show the type of the model's.
            is_taken = has_node and self.stage.changes_type
            places.append(Candidate(place, slot, axis_names, has_node or is_array(tree.arrays[place]), array, is_taken))
        return nodes, tree, places

    def _own_type(self, who: str, node: Node, path: str, names: AxisNames | None) -> Any:
        """The type of the effective array of a node; raises an error for values that the stage could not have made.

        To know which it could, formulas are traced on types.
        """
        group = self.group_key(path, names), node.types
        with locate_errors(f"{who} at {path!r}"):
            if group not in self._known:
                self._known[group] = call_remembered(facts_of, self.typical(path, names), node.types)
            effective, expected = self._known[group]
            require_fit(node.types, expected)
        return effective

    @cached_property
    def _known(self) -> dict[object, tuple[Any, Mapping[str, tuple[int, ...]] | None]]:
        """What ``facts_of`` has said so far: a traced hyperparameter has no other cache."""
        return {}

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        raw_types, flat = types_of_result(init, tree), flatten(tree)
        names, slots = self.axis_names(flat), flat.slots(bases=self.stage._takes_base)

        def of(path: Names) -> tuple[Names, FollowedAxes]:
            source = path[: -3 if path[-2] == FIXED else -2]
            w, at = flat.arrays[source], self.typical(slots[source].path, names[source])
            return source, call_remembered(followed_axes, at, types_under({"w": w}))[path[-1]]

        origins = keep_origins(raw_types)
        return raw_types, {path: origin if path in flat.arrays else of(path) for path, origin in origins.items()}


def _has_type(candidate: Candidate) -> bool:
    """Whether a stage could have made the values at a place."""
    with suppress(Exception):  # a formula may fail in any way on the values of another stage
        return candidate.array() is not None
    return False
