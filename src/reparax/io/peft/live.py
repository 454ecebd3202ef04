"""One adapter of a model in memory: torch's ``state_dict()`` holds the base too, and the name of each adapter."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from reparax.io.peft.method import Method
from reparax.io.peft.target import WRAPPED
from reparax.io.torch.shown import shown

_NAME = r"(?!(?:weight|bias)$)([^.]+)"
_WHOLE = r"(.*\.modules_to_save)\.([^.]+)(\..+)"


def of_adapter(
    arrays: Mapping[str, np.ndarray], method: Method, config: Mapping[str, Any], adapter: str | None
) -> dict[str, np.ndarray]:
    """The tensors of one adapter, by the names that its file has; those of a file as they are."""
    patterns = [re.compile(pattern) for pattern in _name_patterns(method)]
    match_of_name = {name: match for name in arrays if (match := _first_match(patterns, name))}
    names = sorted({match[2] for match in match_of_name.values()})
    if not names and adapter is None:
        return dict(arrays)
    names_text = ", ".join(map(repr, names))
    if adapter is None and len(names) > 1:
        raise ValueError(
            f"from_peft takes one adapter, but the tensors hold {names_text}. Give its name, `adapter=...`."
        )
    if adapter is not None and adapter not in names:
        has = f"adapters named {names_text}" if names else "no adapter's name, as in a file"
        raise ValueError(f"from_peft got adapter={shown(adapter)}, but the tensors hold {has}. Correct `adapter`.")
    adapter_name = adapter or names[0]
    if bare := next((name for name in arrays if name not in match_of_name and _ends_like_method(name, method)), None):
        raise ValueError(
            f"from_peft takes the tensors of one adapter, but {bare!r} is that of a file, and "
            f"{next(iter(match_of_name))!r} of a model in memory. Read them one by one."
        )
    adapter_tensors = {
        match[1] + match[3]: arrays[name] for name, match in match_of_name.items() if match[2] == adapter_name
    }
    modules = {
        name.removesuffix(f".{end}") for name in adapter_tensors for end in method.suffixes if name.endswith(f".{end}")
    }
    beside = {
        name: file_name
        for name in arrays
        if name not in match_of_name and (file_name := _name_beside(name, adapter_name, modules, config))
    }
    return adapter_tensors | {file_name: arrays[name] for name, file_name in beside.items()}


def _name_patterns(method: Method) -> Iterator[str]:
    """What the names of adapters' tensors are, in three parts, of which the second is the adapter's name."""
    for end in method.suffixes:
        head, dot, last_name = end.rpartition(".")
        head, ending = (head, dot + last_name) if last_name in ("weight", "bias") else (end, "")
        yield rf"(.*\.{re.escape(head)})\.{_NAME}({re.escape(ending)})" + ("" if ending else r"(?:\.weight)?")
    for bank in method.banks:
        yield rf"(base_model\.{bank})\.([^.]+)()"


def _first_match(patterns: list[re.Pattern[str]], name: str) -> re.Match[str] | None:
    """The match of the first expression that fits a whole name, or None."""
    return next((match for pattern in patterns if (match := pattern.fullmatch(name))), None)


def _ends_like_method(name: str, method: Method) -> bool:
    """Whether a name ends as the tensors of a method do."""
    return any(name.endswith(f".{end}") for end in method.suffixes)


def _name_beside(name: str, adapter: str, modules: set[str], config: Mapping[str, Any]) -> str | None:
    """The name in a file of a tensor that trains beside the adapter: of a whole module, or a bias; or None."""
    if match := re.fullmatch(_WHOLE, name):
        return match[1] + match[3] if match[2] == adapter else None
    if not name.endswith(".bias"):
        return None
    which = config.get("bias", "none")
    is_adapted = name.removesuffix(f"{WRAPPED}.bias") in modules
    return name if which == "all" or (which != "none" and is_adapted) else None
