"""The raw tree: plain data whose key paths describe its arrays.

A parametrized array is replaced by a marker dict, ``{"@weight_norm": {"g": ..., "v": ...}}``, nested for chains, with
fixed values under ``"@fixed"``. The key path of a raw array contains everything about it: its parameter, whether it is
main or auxiliary, free or fixed, and under which path a stage can select it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from reparax.core.names import import_stage
from reparax.core.tree.paths import Names, PyTree, flatten_with_names, is_empty, items, path_text
from reparax.core.tree.values import Values, value_of

FIXED = "@fixed"
OTHER_CHAIN = (
    "another chain made this raw tree. "
    "Apply the chain that made it; `p.check(raw, like=params)` lists every difference."
)


class Kind(Protocol):
    """The fact about a stage that raw trees need: what its values are."""

    raw_values: Values


_kinds: dict[str, Kind] = {}


def register_kind(kind: str, stage: Kind) -> None:
    """Registers the stage whose marker is ``kind``; a later definition replaces an earlier one."""
    _kinds[kind] = stage


def registered_kind(kind: str) -> Any:
    """The class registered last for ``kind``, or None; a family of this package is imported for its kinds."""
    if kind not in _kinds:
        import_stage(kind)
    return _kinds.get(kind)


@dataclass(frozen=True)
class Slot:
    """One array of a raw tree.

    Attributes:
      path: The path under which stages select it: the parameter's own path for a main value, the parameter's path and
        the value's name for an auxiliary value or a part.
      raw_path: The path in the raw tree, markers included; it differs between the main values of one array.
      seed: A path that no other array of the tree shares; random draws depend on it.
      parameter: The path of the parameter that it belongs to.
      main: Whether it is a main value of each stage on its path, or no stage has replaced it.
      fixed: Whether optimizers must leave it alone.
      visible: Whether an earlier stage may select it.
      added: Whether it is added to a base that represents the array; only its place selects it.
      decays: Whether a smaller value makes a smaller array, in each stage on its path.
    """

    path: str
    raw_path: str
    seed: str
    parameter: str
    main: bool
    fixed: bool
    visible: bool
    added: bool
    decays: bool


def is_mark(name: object) -> bool:
    """Whether a name is that of a marker."""
    return isinstance(name, str) and name.startswith("@") and name != FIXED


def holds_markers(x: object) -> bool:
    """Whether ``x`` is a marker dict."""
    return isinstance(x, Mapping) and any(str(name).startswith("@") for name in x)


def kind_of(mark: str) -> str:
    """The kind in a marker: ``kind`` of ``@kind`` and of ``@kind@2``."""
    return mark.split("@")[1]


def parameter_path(place: Names) -> str:
    """The path of the parameter: all names before the first marker."""
    for i, name in enumerate(place):
        if name.startswith("@"):
            return path_text(place[:i])
    return path_text(place)


def next_number(place: Names, kind: str) -> int:
    """The number of the next stage of ``kind`` on the array at ``place``; the outermost has number 1."""
    return 1 + sum(is_mark(name) and kind_of(name) == kind for name in place)


def marker(kind: str, n: int) -> str:
    """The marker of the ``n``-th stage of a kind on an array: ``@kind``, ``@kind@2``."""
    return f"@{kind}" if n == 1 else f"@{kind}@{n}"


def _stage_class(place: Names, i: int) -> Kind:
    """The class of the marker at ``place[i]``; raises an error if no stage of that kind is defined."""
    stage = registered_kind(kind_of(place[i]))
    if stage is None:
        raise ValueError(
            f"The raw tree holds {place[i]!r} at {parameter_path(place)!r}, but no stage of that kind is defined. "
            f"Import the module that defines it."
        )
    return stage


class _Value(NamedTuple):
    """A value under a marker.

    Attributes:
      node: The names up to the marker, inclusive.
      name: The name of the value.
      main: Whether it is a main value.
      fixed: Whether it does not train.
      in_path: Whether its name is part of the path under which stages select it.
      added: Whether it is added to a base that represents the array.
      aligned: Whether its axes are those of the array.
      decays: Whether a smaller value makes a smaller array.
    """

    node: Names
    name: str
    main: bool
    fixed: bool
    in_path: bool
    added: bool
    aligned: bool
    decays: bool


def _values_along(place: Names, *, bases: bool = False) -> Iterator[_Value]:
    """The value under each marker along ``place``; with ``bases``, a base counts as the main value."""
    for i, name in enumerate(place):
        if is_mark(name):
            is_fixed = FIXED in place[i + 1 : i + 2]
            if len(place) <= i + 1 + is_fixed:
                raise ValueError(
                    f"The raw tree holds no values under {name!r} at {parameter_path(place)!r}: {OTHER_CHAIN}"
                )
            values, value = _stage_class(place, i).raw_values, place[i + 2] if is_fixed else place[i + 1]
            declaration = value_of(values, value)
            of_base = bases and any(declared.base for declared in values.values())
            main = declaration.base if of_base else declaration.main
            in_path, added = declaration.part or not main, of_base and not main
            axes = declaration.base or (declaration.main and declaration.aligned)
            yield _Value(place[: i + 1], value, main, is_fixed, in_path, added, axes, declaration.decays)


def is_aligned(place: Names) -> bool:
    """Whether a value has the axes of its parameter: it is a base, or the main value of aligned stages."""
    return all(value.aligned for value in _values_along(place))


def describe_places(places: Sequence[Names], *, bases: bool = False) -> list[Slot]:
    """A :class:`Slot` for each place of a raw (or plain) tree.

    With ``bases``, the base of an array represents it, and values added to the base are hidden.
    """
    mains: dict[Names, set[str]] = {}
    for place in places:
        for value in _values_along(place, bases=bases):
            mains.setdefault(value.node, set()).update([value.name] if value.main else [])

    def slot(place: Names) -> Slot:
        path = seed = parameter = parameter_path(place)
        all_main, visible, added, decays = True, True, False, True
        for value in _values_along(place, bases=bases):
            if value.in_path:
                path, seed = f"{path}/{value.name}", f"{seed}/{value.node[-1]}/{value.name}"
            elif len(mains[value.node]) > 1:
                seed = f"{seed}/{value.name}"
            all_main = all_main and value.main
            visible = visible and (value.main or not value.fixed)
            added = added or value.added
            decays = decays and value.decays
        return Slot(path, path_text(place), seed, parameter, all_main, FIXED in place, visible, added, decays)

    slots = [slot(place) for place in places]
    seeds: set[str] = set()
    for slot_here in slots:
        if slot_here.seed in seeds:
            raise same_path_error(slot_here.seed)
        seeds.add(slot_here.seed)
    return slots


def same_path_error(path: str) -> ValueError:
    """The error for a tree in which two leaves have one path."""
    return ValueError(
        f"Two leaves of the tree have the path {path!r}. "
        f"Rename one of them; the usual cause is a key with '/' in it, or a number and the same number as text."
    )


def flatten_slots(tree: PyTree) -> tuple[list[Any], list[Slot], Any]:
    """The leaves of a raw (or plain) tree, a :class:`Slot` for each, and the treedef."""
    paths, leaves, treedef = flatten_with_names(tree)
    return leaves, describe_places(paths), treedef


def resolve_owners(owners: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, str]:
    """``owners`` with each owner that copies a source replaced by the final source."""
    final_owners = dict(owners)
    for path in final_owners:
        while final_owners[path] in sources:
            final_owners[path] = sources[final_owners[path]]
    return final_owners


def empty_nodes(tree: PyTree) -> list[Names]:
    """The path of each empty node: the places without a value of their own."""
    return [path for path, leaf in items(tree, is_empty) if is_empty(leaf)]


def outer_markers(tree: PyTree) -> dict[str, str]:
    """Each parameter that holds markers, with its outermost marker; a plain tree has none."""
    markers: dict[str, str] = {}
    for path in flatten_with_names(tree, is_empty)[0]:
        mark = next((name for name in path if name.startswith("@")), None)
        if mark is not None:
            markers.setdefault(parameter_path(path), mark)
    return markers


def require_no_raw(who: str, params: PyTree, advice: str) -> None:
    """Requires a plain tree; ``advice`` says what to do otherwise.

    Raises:
      ValueError: If it is a raw tree.
    """
    if marks := outer_markers(params):
        path, mark = next(iter(marks.items()))
        raise ValueError(
            f"{who} takes the model's own parameters, but got a raw tree: it holds {mark!r} at {path!r}. {advice}"
        )
