"""Matches parameters with torch weights, and handles PEFT's additions to the names."""

from reparax._peft.target import Target
from reparax._torch.rules import Rules, choose_layouts, name_tensors
from reparax._tree.paths import PyTree, is_array, items, path_text

PREFIX = "base_model.model."


def targets_of(params: PyTree, names: Rules, layouts: Rules) -> dict[str, Target]:
    """The parameters by their torch names."""
    arrays = {path_text(keys): x for keys, x in items(params) if is_array(x)}
    tensors, chosen = name_tensors(list(arrays), names), choose_layouts(list(arrays), layouts)
    return {tensors[path]: Target(path, tensors[path], tuple(x.shape), chosen[path]) for path, x in arrays.items()}


def plain_name(name: str) -> str:
    """The name of a tensor without PEFT's prefix and without its wrappers of modules."""
    parts = name.removeprefix(PREFIX).split(".")
    before = ["", *parts]
    return ".".join(
        part
        for part, outer in zip(parts, before, strict=False)
        if part not in ("base_layer", "modules_to_save") and (outer, part) != ("modules_to_save", "default")
    )


def is_unused(name: str) -> bool:
    """Whether this is PEFT's unused original of a module whose copy trains."""
    return ".original_module." in name
