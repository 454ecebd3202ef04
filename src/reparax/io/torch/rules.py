"""Torch names and layouts of parameters, by your rules."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reparax.core.where import matches, why_nothing
from reparax.io.torch.axis_order import LAYOUTS

Rules = Mapping[str, str] | None

_RENAMED = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
ORTHOGONAL_MAPS = {"matrix_exp": "expm", "cayley": "cayley", "householder": "householder"}
"""The maps of torch's ``orthogonal``, in our words."""
_COUNTERS = ("i", "j")
"""What stands in a name for the index on the first axis, and on the second."""


def name_tensors(shapes: Mapping[str, tuple[int, ...]], names: Rules) -> dict[str, tuple[int, str, int | None]]:
    """For each parameter, the number of its stacked axes, its torch name with a counter for each, and its rule."""
    names_of_paths: dict[str, tuple[int, str, int | None]] = {path: (0, default_name(path), None) for path in shapes}
    places = {pattern: place for place, pattern in enumerate(names or {})}
    for path, (match, pattern, name) in _match_rules(list(shapes), names or {}, "names").items():
        names_of_paths[path] = _count_counters(path, shapes[path], name), _expand_name(match, name), places[pattern]
    return names_of_paths


def number_tensor(tensor: str, index: Sequence[int]) -> str:
    """A torch name with numbers for its counters."""
    for counter, number in zip(_COUNTERS, index, strict=False):
        tensor = tensor.replace(f"{{{counter}}}", str(number))
    return tensor


def default_name(path: str) -> str:
    """The torch name of a parameter without a rule: the names of its path, the last one in torch's word."""
    *modules, name = path.split("/")
    return ".".join([*modules, _RENAMED.get(name, name)])


def _count_counters(path: str, shape: tuple[int, ...], name: str) -> int:
    """The number of counters in a name."""
    counters = sorted(set(re.findall(r"\{(.*?)\}", name)))
    if tuple(counters) != _COUNTERS[: len(counters)]:
        raise ValueError(
            f"`names` gives {path!r} the name {name!r}, but takes {{i}} for the index on the first axis of a stack, "
            f"and {{i}} and {{j}} for those on the first two."
        )
    if len(counters) > len(shape):
        raise ValueError(f"`names` gives {path!r} the name {name!r}, but its shape {shape} has no axis for each index.")
    return len(counters)


def _expand_name(match: re.Match[str], name: str) -> str:
    """The name that a rule gives; raises an error if it asks for a group that the expression lacks."""
    try:
        return match.expand(name).replace("/", ".")  # a group may contain several parts of the path
    except (re.error, IndexError) as error:
        raise ValueError(f"cannot make a name of {name!r} for {match[0]!r}: {error}.") from error


def given_layouts(paths: Sequence[str], layouts: Rules) -> dict[str, str]:
    """The layout of each parameter for which a rule gives one."""
    rule_of_path = _match_rules(paths, layouts or {}, "layouts")
    for _, _, layout in rule_of_path.values():
        if layout not in LAYOUTS:
            layout_names = ", ".join(map(repr, LAYOUTS))
            raise ValueError(f"got {layout!r} as a layout, but takes one of {layout_names}.")
    return {path: layout for path, (_, _, layout) in rule_of_path.items()}


def given_maps(paths: Sequence[str], maps: str | Rules) -> dict[str, str]:
    """What torch's ``orthogonal`` was called with for each parameter, where a rule or one word for all says it."""
    known = ("default", *ORTHOGONAL_MAPS)
    if isinstance(maps, str):
        given = dict.fromkeys(paths, maps)
    else:
        given = {path: value for path, (_, _, value) in _match_rules(paths, maps or {}, "orthogonal_map").items()}
    if wrong := [value for value in given.values() if value not in known]:
        raise ValueError(f"got {wrong[0]!r} as a map of torch, but takes one of {', '.join(map(repr, known))}.")
    return given


def _check_rules(paths: Sequence[str], rules: Any, what: str) -> Mapping[str, str]:
    """``rules``, if they are regular expressions, or paths, and a text for each."""
    if not isinstance(rules, Mapping) or not all(isinstance(text, str) for rule in rules.items() for text in rule):
        raise ValueError(f"`{what}` takes a dict of regular expressions and, for each, a text, but got {rules!r}.")
    for pattern in set(rules) - set(paths):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`{what}` has {pattern!r}, which is not a regular expression: {error}.") from error
    return rules


def _match_rules(
    paths: Sequence[str], rules: Mapping[str, str], what: str
) -> dict[str, tuple[re.Match[str], str, str]]:
    """For each path that a rule matches, the match, and the first such rule: its expression and its value."""
    match_of_path: dict[str, tuple[re.Match[str], str, str]] = {}
    for pattern, value in _check_rules(paths, rules, what).items():
        new_matches = matches(pattern, paths)
        if not new_matches:
            raise ValueError(f"`{what}` matches nothing: {why_nothing(pattern, paths)}")
        match_of_path = {match[0]: (match, pattern, value) for match in new_matches} | match_of_path
    return match_of_path
