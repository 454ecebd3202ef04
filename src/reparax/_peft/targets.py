"""Matches parameters with torch weights, and handles PEFT's additions to the names."""

from reparax._peft.target import Target
from reparax._torch.entries import list_entries
from reparax._torch.rules import Rules
from reparax._tree.paths import PyTree

PREFIX = "base_model.model."
WRAPPED = ".base_layer"
"""What PEFT adds to the name of a module that it has wrapped."""

_WRAPPERS = ("base_layer", "modules_to_save", "ln_tuning_layers")


def targets_of(params: PyTree, names: Rules, layouts: Rules, roles: PyTree) -> dict[str, Target]:
    """The parameters by their torch names."""
    return {entry.tensor: Target(**vars(entry)) for entry in list_entries(params, names, layouts, roles)}


def plain_name(name: str) -> str:
    """The name of a tensor without PEFT's prefix and without its wrappers of modules."""
    parts = name.removeprefix(PREFIX).split(".")
    parents = ["", *parts]
    return ".".join(
        part
        for part, parent in zip(parts, parents, strict=False)
        if part not in _WRAPPERS and (parent, part) != ("modules_to_save", "default")
    )


def is_unused(name: str) -> bool:
    """Whether this is PEFT's unused original of a module whose copy trains."""
    return ".original_module." in name
