"""What tells the axes of an array: a rule, the class of its module, or its name.

Two matrices of the same shape, one (in, out) and one (out, in), cannot be told apart, and a square one loads into torch
either way. So what nothing tells stays unknown, and whoever writes or reads such an array refuses it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from reparax.core.paths import Names, PyTree, items, path_text
from reparax.io.torch.axis_order import EXPERTS

Layout = tuple[str | None, int]
"""The layout of an array, None if it may be any, and the number of axes up to which that holds."""

_NAMES: Mapping[str, Layout] = {
    "kernel": ("kernel", 2),
    "embedding": ("embedding", 2),
    "weight_ih": ("same", 2),  # torch's own names, which equinox has too
    "weight_hh": ("same", 2),
}


def find_layout(name: str, shape: tuple[int, ...], by_rule: str | None, of_module: Layout | None) -> tuple[str, bool]:
    """The layout of an array, by a rule, by its module, or by its name, and whether that is sure."""
    if by_rule in ("conv1d", "embedding") and len(shape) != 2:
        axes = {"conv1d": "(in, out)", "embedding": "(num, features)"}[by_rule]
        raise ValueError(f"the layout {by_rule!r} is for matrices {axes}, but {name!r} has shape {shape}.")
    if by_rule == "vector" and max(shape[1:], default=1) > 1:
        raise ValueError(f"the layout 'vector' is for arrays (out, 1, ..., 1), but {name!r} has shape {shape}.")
    if by_rule is not None and by_rule.startswith(EXPERTS) and len(shape) != 3:
        raise ValueError(
            f"the layout {by_rule!r} is for stacks of matrices with three axes, but {name!r} has shape {shape}."
        )
    if by_rule is not None:  # a kernel that is the same in torch has its inputs first there too
        return "conv1d" if (by_rule, name, len(shape)) == ("same", "kernel", 2) else by_rule, True
    layout, axes = of_module or _NAMES.get(name, (None, 0))
    if len(shape) < 2 or layout is None:
        return "same", len(shape) < 2
    return layout, len(shape) <= axes


_Weights = Callable[[Any], dict[str, Layout]]


def _flax_convolution(layout: Callable[[Any], str]) -> _Weights:
    """What a convolution of flax tells: the layout and the number of axes of its kernel."""
    return lambda module: {"kernel": (layout(module), np.size(module.kernel_size) + 2)}


def _equinox_convolution(layout: str) -> _Weights:
    """What a convolution of equinox tells: the layout and the number of axes of its weight and bias."""
    return lambda module: {
        "weight": (layout, module.num_spatial_dims + 2),
        "bias": ("vector", module.num_spatial_dims + 1),
    }


# For the class of a module, its arrays.
_CLASSES: dict[tuple[str, str], _Weights] = {
    ("flax", "Conv"): _flax_convolution(lambda module: "kernel"),
    ("flax", "ConvTranspose"): _flax_convolution(lambda m: "kernel" if m.transpose_kernel else "conv_transpose"),
    ("flax", "Einsum"): lambda module: {"kernel": (None, 0)},  # the order of its axes is an argument
    ("equinox", "Conv"): _equinox_convolution("same"),
    ("equinox", "ConvTranspose"): _equinox_convolution("swapped"),
    ("equinox", "Linear"): lambda module: {"weight": ("same", 2)},
    ("equinox", "Embedding"): lambda module: {"weight": ("embedding", 2)},
}


def layouts_by_module(tree: PyTree) -> dict[str, Layout]:
    """The layout of each array that the class of its module tells, or else Haiku's names, by path."""
    layouts = _layouts_by_haiku([names for names, _ in items(tree)])
    for keys, node in items(tree, lambda x: _known_class(x) is not None):
        if which := _known_class(node):
            layouts |= {path_text((*keys, name)): layout for name, layout in _CLASSES[which](node).items()}
    return layouts


def _known_class(node: object) -> tuple[str, str] | None:
    """The first class of a node that is listed here, by package and name; None if there is none."""
    class_names = ((class_name.__module__.partition(".")[0], class_name.__name__) for class_name in type(node).__mro__)
    return next((class_name for class_name in class_names if class_name in _CLASSES), None)


def _layouts_by_haiku(paths: list[Names]) -> dict[str, Layout]:
    """What Haiku's names tell: its trees have two levels, and the names of modules inside of others have a slash.

    A `w` of another tree may have either order. Kernels of convolutions may be transposed.
    """
    if any(len(names) != 2 for names in paths) or not any("/" in names[0] for names in paths):
        return {}
    layouts: dict[str, Layout] = {"w": ("kernel", 2), "embeddings": ("embedding", 2)}
    return {path_text(names): layouts[names[1]] for names in paths if names[1] in layouts}
