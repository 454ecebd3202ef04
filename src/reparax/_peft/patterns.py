"""Short expressions for many paths."""

import re
from collections.abc import Collection, Iterable

_ANY = "[^/]+"


def pattern_of(paths: Iterable[str], known_paths: Collection[str]) -> str:
    """An expression for ``where`` that selects exactly these paths of those that are known."""
    by_length: dict[int, list[str]] = {}
    for path in sorted(paths):
        by_length.setdefault(path.count("/"), []).append(path)
    return "|".join(_of_one_length(paths_of_length, known_paths) for paths_of_length in by_length.values())


def _of_one_length(paths: list[str], known_paths: Collection[str]) -> str:
    """The expression for paths of the same number of names: any name, if that selects no other path."""
    columns = [list(dict.fromkeys(column)) for column in zip(*(path.split("/") for path in paths), strict=True)]
    names = [_any_of(column) for column in columns]

    def exact(pattern: str) -> bool:
        return {path for path in known_paths if re.fullmatch(pattern, path)} == set(paths)

    if not exact("/".join(names)):
        return "|".join(map(re.escape, paths))
    for i, column in enumerate(columns):
        wider = [*names[:i], _ANY, *names[i + 1 :]]
        names = wider if len(column) > 1 and exact("/".join(wider)) else names
    plain = "/".join(names)
    short = re.sub(rf"{re.escape(_ANY)}(/{re.escape(_ANY)})*", ".*", plain)
    return short if exact(short) else plain


def _any_of(names: list[str]) -> str:
    """An expression for any of these names, and nothing else."""
    return re.escape(names[0]) if len(names) == 1 else f"({'|'.join(map(re.escape, names))})"
