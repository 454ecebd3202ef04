"""One adapter of a model in memory: torch's ``state_dict()`` holds the base too, and the name of each adapter."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from reparax._peft.method import Method
from reparax._peft.targets import WRAPPED
from reparax._torch.shown import shown

_NAME = r"(?!(?:weight|bias)$)([^.]+)"
_WHOLE = r"(.*\.(?:modules_to_save|ln_tuning_layers))\.([^.]+)(\..+)"


def of_adapter(
    arrays: Mapping[str, np.ndarray], method: Method, config: Mapping[str, Any], adapter: str | None
) -> dict[str, np.ndarray]:
    """The tensors of one adapter, by the names that its file has; those of a file as they are."""
    patterns = [re.compile(pattern) for pattern in _name_patterns(method)]
    found = {name: match for name in arrays if (match := _first_match(patterns, name))}
    names = sorted({match[2] for match in found.values()})
    if not names and adapter is None:
        return dict(arrays)
    listed = ", ".join(map(repr, names))
    if adapter is None and len(names) > 1:
        raise ValueError(f"from_peft takes one adapter, but the tensors hold {listed}. Give its name, `adapter=...`.")
    if adapter is not None and adapter not in names:
        has = f"adapters named {listed}" if names else "no adapter's name, as in a file"
        raise ValueError(f"from_peft got adapter={shown(adapter)}, but the tensors hold {has}. Correct `adapter`.")
    chosen = adapter or names[0]
    if bare := next((name for name in arrays if name not in found and _ends_like_method(name, method)), None):
        raise ValueError(
            f"from_peft takes the tensors of one adapter, but {bare!r} is that of a file, and {next(iter(found))!r} of "
            f"a model in memory. Read them one by one."
        )
    own = {match[1] + match[3]: arrays[name] for name, match in found.items() if match[2] == chosen}
    modules = {name.removesuffix(f".{end}") for name in own for end in method.suffixes if name.endswith(f".{end}")}
    beside = {
        name: whole for name in arrays if name not in found and (whole := _name_beside(name, chosen, modules, config))
    }
    return own | {whole: arrays[name] for name, whole in beside.items()}


def _name_patterns(method: Method) -> Iterator[str]:
    """What the names of adapters' tensors are, in three parts, of which the second is the adapter's name."""
    for end in method.suffixes:
        head, dot, last = end.rpartition(".")
        head, rest = (head, dot + last) if last in ("weight", "bias") else (end, "")
        yield rf"(.*\.{re.escape(head)})\.{_NAME}({re.escape(rest)})" + ("" if rest else r"(?:\.weight)?")
    for bank in method.banks:
        yield rf"(base_model\.{bank})\.([^.]+)()"
    if not method.suffixes:
        yield r"(.*\.ln_tuning_layers)\.([^.]+)(\.(?:weight|bias))"


def _first_match(patterns: list[re.Pattern[str]], name: str) -> re.Match[str] | None:
    """The match of the first expression that fits a whole name, or None."""
    return next((match for pattern in patterns if (match := pattern.fullmatch(name))), None)


def _ends_like_method(name: str, method: Method) -> bool:
    """Whether a name ends as the tensors of a method do."""
    return any(name.endswith(f".{end}") for end in method.suffixes)


def _name_beside(name: str, adapter: str, modules: set[str], config: Mapping[str, Any]) -> str | None:
    """The name in a file of a tensor that trains beside the adapter: of a whole module, or a bias; or None."""
    if whole := re.fullmatch(_WHOLE, name):
        return whole[1] + whole[3] if whole[2] == adapter else None
    if not name.endswith(".bias"):
        return None
    which = config.get("bias", "none")
    of_adapted = name.removesuffix(f"{WRAPPED}.bias") in modules
    return name if which == "all" or (which != "none" and of_adapted) else None
