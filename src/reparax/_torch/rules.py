"""Torch names and layouts of parameters, by your rules."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reparax._stage.where import matches, nothing
from reparax._torch.axis_order import LAYOUTS

Rules = Mapping[str, str] | None

_RENAMED = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def name_tensors(paths: Sequence[str], names: Rules) -> dict[str, str]:
    """The torch name of each parameter."""
    tensors = {path: _default(path) for path in paths} | {
        path: _expanded(match, name) for path, (match, name) in _ruled(paths, names or {}, "names").items()
    }
    owners: dict[str, str] = {}
    for path, tensor in tensors.items():
        if owners.setdefault(tensor, path) != path:
            raise ValueError(f"{owners[tensor]!r} and {path!r} are both called {tensor!r}. Give different `names`.")
    return tensors


def _default(path: str) -> str:
    *modules, name = path.split("/")
    return ".".join([*modules, _RENAMED.get(name, name)])


def _expanded(match: re.Match[str], name: str) -> str:
    try:
        return match.expand(name).replace("/", ".")  # a group may contain several parts of the path
    except (re.error, IndexError) as error:
        raise ValueError(f"cannot make a name of {name!r} for {match[0]!r}: {error}.") from error


def choose_layouts(paths: Sequence[str], layouts: Rules) -> dict[str, str]:
    """The layout of each parameter."""
    ruled = _ruled(paths, layouts or {}, "layouts")
    for _, layout in ruled.values():
        if layout not in LAYOUTS:
            known = ", ".join(map(repr, LAYOUTS))
            raise ValueError(f"got {layout!r} as a layout, but takes one of {known}.")
    chosen = {path: "kernel" if path.split("/")[-1] == "kernel" else "same" for path in paths}
    return chosen | {path: layout for path, (_, layout) in ruled.items()}


def _checked(paths: Sequence[str], rules: Any, what: str) -> Mapping[str, str]:
    """``rules``, if they are regular expressions, or paths, and a text for each."""
    if not isinstance(rules, Mapping) or not all(isinstance(text, str) for rule in rules.items() for text in rule):
        raise ValueError(f"`{what}` takes a dict of regular expressions and, for each, a text, but got {rules!r}.")
    for pattern in set(rules) - set(paths):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`{what}` has {pattern!r}, which is not a regular expression: {error}.") from error
    return rules


def _ruled(paths: Sequence[str], rules: Mapping[str, str], what: str) -> dict[str, tuple[re.Match[str], str]]:
    """For each path that a rule matches, the match and the value of the first such rule."""
    found: dict[str, tuple[re.Match[str], str]] = {}
    for pattern, value in _checked(paths, rules, what).items():
        matched = matches(pattern, paths)
        if not matched:
            raise ValueError(f"`{what}` matches nothing: {nothing(pattern, paths)}")
        found = {match[0]: (match, value) for match in matched} | found
    return found
