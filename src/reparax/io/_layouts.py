"""The axes of weights in torch and in JAX: the layouts there are, and what tells the layout of an array.

A rule, the class of its module, its name or the roles of its axes tell it. Two matrices of the same shape, one (in,
out) and one (out, in), cannot be told apart, and a square one loads into torch either way. So what nothing tells stays
unknown, and whoever writes or reads such an array refuses it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.paths import Names, PyTree, items, path_text
from reparax.core.raw import flatten
from reparax.core.roles import CONVOLUTION, LOOKUP, PRODUCT, Numbers, Role

# For each layout, our axes of torch's first two, and whether the spatial axes are reversed: torch's transposed
# convolution, a gradient of a convolution, uses a flipped kernel.
_CHANNELS: dict[str, tuple[tuple[int, int] | None, bool]] = {
    "same": (None, False),
    "kernel": ((-1, -2), False),
    "conv_transpose": ((-2, -1), True),
    "swapped": ((1, 0), True),
    "conv1d": (None, False),
    "embedding": (None, False),
    "vector": (None, False),
}
HEADS = {"to_heads": 1, "from_heads": 2}
"""For kernels of attention, ``(in, heads, dim)`` and ``(heads, dim, out)``, how many axes are inputs."""
EXPERTS = "experts:"
"""Begins the layout of a stack of matrices that is one tensor in torch too: what follows is the layout of each."""
LAYOUTS = (*_CHANNELS, *HEADS, *(f"{EXPERTS}{each}" for each in ("kernel", "same", "conv1d")))


def layout_of_matrix(layout: str) -> str:
    """The layout of each matrix."""
    return layout.removeprefix(EXPERTS)


def axis_order(layout: str, ndim: int) -> tuple[int, ...]:
    """Our axes in torch's order: a ``kernel`` is ``(*spatial, in, out)`` here and ``(out, in, *spatial)`` there."""
    if layout.startswith(EXPERTS):
        return (0, *(1 + axis for axis in axis_order(layout_of_matrix(layout), ndim - 1)))
    channels, _ = _CHANNELS[layout]
    if channels is None or ndim < 2:
        return tuple(range(ndim))
    channel_axes = [axis % ndim for axis in channels]
    return (*channel_axes, *(axis for axis in range(ndim) if axis not in channel_axes))


def permute(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """The shape in torch, where vectors and heads are merged."""
    if layout == "vector":
        return (math.prod(shape),)
    if layout in HEADS:
        return merged_shape(shape, layout)[::-1]
    return tuple(shape[axis] for axis in axis_order(layout, len(shape)))


def merged_shape(shape: Sequence[int], layout: str) -> tuple[int, int]:
    """The inputs and the outputs of a kernel of attention."""
    return math.prod(shape[: HEADS[layout]]), math.prod(shape[HEADS[layout] :])


def write_layout(x: Array, layout: str) -> Array:
    """Converts our array to torch's layout."""
    if layout == "vector":  # (out, 1, ..., 1) here, or (heads, dim)
        return x.reshape(-1)
    if layout in HEADS:
        return x.reshape(merged_shape(x.shape, layout)).T
    return _flip_kernel(x.transpose(axis_order(layout, x.ndim)), layout)


def read_layout(x: Array, layout: str) -> Array:
    """Converts torch's array to our layout; what is merged in torch still is."""
    if layout in HEADS:
        return x.T
    return _flip_kernel(x, layout).transpose(tuple(np.argsort(axis_order(layout, x.ndim)).tolist()))


def _flip_kernel(x: Array, layout: str) -> Array:
    """``x`` with its spatial axes in reverse, if its layout has them so in torch."""
    return jnp.flip(x, tuple(range(2, x.ndim))) if _CHANNELS[layout_of_matrix(layout)][1] else x


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
    if by_rule == "vector" and max(shape[1:], default=1) > 1 and not (len(shape) == 2 and name.endswith("bias")):
        raise ValueError(
            f"the layout 'vector' is for arrays (out, 1, ..., 1) and biases (heads, dim), but {name!r} has shape "
            f"{shape}."
        )
    if by_rule is not None and (by_rule in HEADS or by_rule.startswith(EXPERTS)) and len(shape) != 3:
        what = "kernels of attention" if by_rule in HEADS else "stacks of matrices"
        raise ValueError(f"the layout {by_rule!r} is for {what} with three axes, but {name!r} has shape {shape}.")
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
    """The layout of each array that the class of its module tells, or else Haiku's names, by path.

    It is None for an array in a module of which it is not known how it computes, whatever the array's name.
    """
    layouts = _layouts_by_haiku([names for names, _ in items(tree)])
    for keys, node in items(tree, lambda x: _known_class(x) is not None):
        if which := _known_class(node):
            layouts |= {path_text((*keys, name)): layout for name, layout in _CLASSES[which](node).items()}
    known = flatten(tree).frame.axes.items()
    return layouts | {path_text(place): (None, 0) for place, axes in known if axes.is_class and not axes.sizes}


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


_LAYOUTS: dict[tuple[str, Numbers, Numbers], str] = {
    (PRODUCT, (0,), (1,)): "kernel",
    (PRODUCT, (1,), (0,)): "same",
    (LOOKUP, (0,), (1,)): "embedding",
    (PRODUCT, (0,), (1, 2)): "to_heads",
    (PRODUCT, (0, 1), (2,)): "from_heads",
}
"""The layout of an array that the network uses in this way, with these inputs and outputs."""


def layout_of(role: Role, count: int) -> str | None:
    """The layout of an array without its first ``count`` axes, along which layers are stacked; None if it is not told.

    A table that is looked up and is the output layer too is an embedding. Nothing tells whether other stacked arrays
    are layers without names or experts in one tensor.
    """
    uses = [use for use in role.uses if use.how == LOOKUP] or list(role.uses)
    if len(uses) != 1 or uses[0].stacked != tuple(range(count)):
        return None
    (use,) = uses
    ndim = len(role.shape) - count
    inputs, outputs, windows = (tuple(axis - count for axis in axes) for axes in (use.inputs, use.outputs, use.windows))
    if use.how != CONVOLUTION:
        return _LAYOUTS.get((use.how, inputs, outputs))
    orders: dict[tuple[Numbers, Numbers, Numbers], str] = {
        (tuple(range(ndim - 1)), (ndim - 1,), tuple(range(ndim - 2))): "kernel",
        (tuple(range(1, ndim)), (0,), tuple(range(2, ndim))): "same",
    }
    return orders.get((inputs, outputs, windows))
