"""Layouts: how the axes of a weight in JAX relate to its axes in torch, and how the layout of an array is found.

A layout is a word such as ``"kernel"``, which means ``(*spatial, in, out)`` in JAX and ``(out, in, *spatial)`` in
torch. The layout of an array is determined by the user's rule, by the class of the array's module, by the array's name
or by the roles of its axes. The shape is not enough, because a square matrix loads into torch even if it should have
been transposed. Arrays of unknown layout are neither read nor written.
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

# Maps each layout to the two axes of the JAX array that come first in torch (None if the order is the same), and to
# whether the kernel is flipped along its spatial axes. Transposed convolutions are flipped, because torch defines them
# as gradients of convolutions.
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
"""The number of input axes of each attention layout: one for ``(in, heads, dim)``, two for ``(heads, dim, out)``."""
EXPERTS = "experts:"
"""The prefix of the layouts of expert stacks that are one tensor in torch too, such as ``"experts:kernel"``."""
LAYOUTS = (*_CHANNELS, *HEADS, *(f"{EXPERTS}{each}" for each in ("kernel", "same", "conv1d")))


def layout_of_matrix(layout: str) -> str:
    """Returns the layout of each matrix in a stack of experts: ``experts:kernel -> kernel``. Keeps other layouts."""
    return layout.removeprefix(EXPERTS)


def axis_order(layout: str, ndim: int) -> tuple[int, ...]:
    """Returns the indices of the JAX axes in torch's order: ``(3, 2, 0, 1)`` for a ``kernel`` with two spatial axes."""
    if layout.startswith(EXPERTS):
        return (0, *(1 + axis for axis in axis_order(layout_of_matrix(layout), ndim - 1)))
    channels, _ = _CHANNELS[layout]
    if channels is None or ndim < 2:
        return tuple(range(ndim))
    channel_axes = [axis % ndim for axis in channels]
    return (*channel_axes, *(axis for axis in range(ndim) if axis not in channel_axes))


def torch_shape(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Returns the shape of a JAX array in torch, where vectors have one axis and attention heads are merged."""
    if layout == "vector":
        return (math.prod(shape),)
    if layout in HEADS:
        return merged_shape(shape, layout)[::-1]
    return tuple(shape[axis] for axis in axis_order(layout, len(shape)))


def merged_shape(shape: Sequence[int], layout: str) -> tuple[int, int]:
    """Returns an attention kernel's shape ``(in, out)`` with merged heads: ``(8, 2, 3) -> (8, 6)`` for ``to_heads``."""
    return math.prod(shape[: HEADS[layout]]), math.prod(shape[HEADS[layout] :])


def to_layout(x: Array, layout: str) -> Array:
    """Converts a JAX array to its form in torch by transposing, flipping or reshaping it."""
    if layout == "vector":  # The JAX shape is (out, 1, ..., 1) or (heads, dim).
        return x.reshape(-1)
    if layout in HEADS:
        return x.reshape(merged_shape(x.shape, layout)).T
    return _flip_kernel(x.transpose(axis_order(layout, x.ndim)), layout)


def from_layout(x: Array, layout: str) -> Array:
    """Converts an array from torch's axis order to the order in JAX. Axes that are merged in torch remain merged."""
    if layout in HEADS:
        return x.T
    return _flip_kernel(x, layout).transpose(tuple(np.argsort(axis_order(layout, x.ndim)).tolist()))


def _flip_kernel(x: Array, layout: str) -> Array:
    """Flips a kernel in torch's axis order along its spatial axes if its layout requires this; keeps other arrays."""
    return jnp.flip(x, tuple(range(2, x.ndim))) if _CHANNELS[layout_of_matrix(layout)][1] else x


Layout = tuple[str | None, int]
"""A layout (None if unknown), and the largest number of axes with which an array certainly has this layout."""

_LAYOUTS_BY_NAME: Mapping[str, Layout] = {
    "kernel": ("kernel", 2),
    "embedding": ("embedding", 2),
    "weight_ih": ("same", 2),  # These names are torch's own, and equinox uses them too.
    "weight_hh": ("same", 2),
}


def find_layout(name: str, shape: tuple[int, ...], by_rule: str | None, of_module: Layout | None) -> tuple[str, bool]:
    """Finds the layout of an array from the user's rule, or else from the array's module, or else from its name.

    Returns:
      The layout, and whether it is certain.

    Raises:
      ValueError: If the rule's layout does not suit the shape of the array.
    """
    if by_rule in ("conv1d", "embedding") and len(shape) != 2:
        axes = {"conv1d": "(in, out)", "embedding": "(num, features)"}[by_rule]
        raise ValueError(
            f"the layout {by_rule!r} requires a matrix {axes}, but {name!r} has shape {shape}. Pass another layout."
        )
    if by_rule == "vector" and max(shape[1:], default=1) > 1 and not (len(shape) == 2 and name.endswith("bias")):
        raise ValueError(
            f"the layout 'vector' requires an array (out, 1, ..., 1) or a bias (heads, dim), but {name!r} has shape "
            f"{shape}. Pass another layout."
        )
    if by_rule is not None and (by_rule in HEADS or by_rule.startswith(EXPERTS)) and len(shape) != 3:
        what = "attention kernel" if by_rule in HEADS else "stack of matrices"
        raise ValueError(
            f"the layout {by_rule!r} requires a 3-D {what}, but {name!r} has shape {shape}. Pass another layout."
        )
    if by_rule is not None:  # With 'same', a matrix named `kernel` has its inputs first in torch too, as in Conv1D.
        return "conv1d" if (by_rule, name, len(shape)) == ("same", "kernel", 2) else by_rule, True
    layout, axes = of_module or _LAYOUTS_BY_NAME.get(name, (None, 0))
    if len(shape) < 2 or layout is None:
        return "same", len(shape) < 2
    return layout, len(shape) <= axes


_LayoutsOfModule = Callable[[Any], dict[str, Layout]]
"""A function that takes a module and returns a dict from array names to layouts."""


def _flax_convolution(layout: Callable[[Any], str]) -> _LayoutsOfModule:
    """Returns a function that maps a flax convolution to the layout of its kernel, as computed by ``layout``."""
    return lambda module: {"kernel": (layout(module), np.size(module.kernel_size) + 2)}


def _equinox_convolution(layout: str) -> _LayoutsOfModule:
    """Returns a function that maps an equinox convolution to the layouts of its weight and its bias."""
    return lambda module: {
        "weight": (layout, module.num_spatial_dims + 2),
        "bias": ("vector", module.num_spatial_dims + 1),
    }


# Maps the package and name of a module's class to the layouts of the module's arrays.
_LAYOUTS_BY_CLASS: dict[tuple[str, str], _LayoutsOfModule] = {
    ("flax", "Conv"): _flax_convolution(lambda module: "kernel"),
    ("flax", "ConvTranspose"): _flax_convolution(lambda m: "kernel" if m.transpose_kernel else "conv_transpose"),
    ("flax", "Einsum"): lambda module: {"kernel": (None, 0)},  # The einsum equation sets the order of the axes.
    ("equinox", "Conv"): _equinox_convolution("same"),
    ("equinox", "ConvTranspose"): _equinox_convolution("swapped"),
    ("equinox", "Linear"): lambda module: {"weight": ("same", 2)},
    ("equinox", "Embedding"): lambda module: {"weight": ("embedding", 2)},
}


def module_layouts(tree: PyTree) -> dict[str, Layout]:
    """Maps paths of arrays to the layouts implied by the classes of their modules, or else by Haiku's parameter names.

    If it is unknown what a module computes, all of its arrays have the layout None, whatever their names.
    """
    layouts = _layouts_by_haiku([names for names, _ in items(tree)])
    for keys, node in items(tree, lambda x: _known_class(x) is not None):
        if which := _known_class(node):
            layouts |= {path_text((*keys, name)): layout for name, layout in _LAYOUTS_BY_CLASS[which](node).items()}
    known = flatten(tree).frame.axes.items()
    return layouts | {path_text(place): (None, 0) for place, axes in known if axes.is_class and not axes.sizes}


def _known_class(node: object) -> tuple[str, str] | None:
    """Returns the package and name of the first class in a node's MRO that is in ``_LAYOUTS_BY_CLASS``, or None."""
    names = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(node).__mro__)
    return next((name for name in names if name in _LAYOUTS_BY_CLASS), None)


def _layouts_by_haiku(paths: list[Names]) -> dict[str, Layout]:
    """Maps paths to the layouts implied by Haiku's parameter names. Returns an empty dict for other libraries' trees.

    Haiku's trees have two levels, and the names of nested modules contain a slash. In any other tree, a matrix ``w``
    may be ``(in, out)`` or ``(out, in)``. The layout of a ``w`` with more than two axes is uncertain, because the array
    may be the kernel of a transposed convolution.
    """
    if any(len(names) != 2 for names in paths) or not any("/" in names[0] for names in paths):
        return {}
    layouts: dict[str, Layout] = {"w": ("kernel", 2), "embeddings": ("embedding", 2)}
    return {path_text(names): layouts[names[1]] for names in paths if names[1] in layouts}


_LAYOUTS_BY_USE: dict[tuple[str, Numbers, Numbers], str] = {
    (PRODUCT, (0,), (1,)): "kernel",
    (PRODUCT, (1,), (0,)): "same",
    (LOOKUP, (0,), (1,)): "embedding",
    (PRODUCT, (0,), (1, 2)): "to_heads",
    (PRODUCT, (0, 1), (2,)): "from_heads",
}
"""Maps an operation on an array, the array's input axes and its output axes to the array's layout."""


def layout_by_role(role: Role, count: int) -> str | None:
    """Returns the layout implied by the role of each axis, for one layer of an array that stacks layers.

    The first ``count`` axes stack the layers. Returns None if the roles do not imply a layout. For example, it is
    unclear whether further stacked axes hold layers or experts. An embedding table that is also used as the output
    layer has the layout ``"embedding"``.
    """
    uses = [use for use in role.uses if use.how == LOOKUP] or list(role.uses)
    if len(uses) != 1 or uses[0].stacked != tuple(range(count)):
        return None
    (use,) = uses
    ndim = len(role.shape) - count
    inputs, outputs, windows = (tuple(axis - count for axis in axes) for axes in (use.inputs, use.outputs, use.windows))
    if use.how != CONVOLUTION:
        return _LAYOUTS_BY_USE.get((use.how, inputs, outputs))
    orders: dict[tuple[Numbers, Numbers, Numbers], str] = {
        (tuple(range(ndim - 1)), (ndim - 1,), tuple(range(ndim - 2))): "kernel",
        (tuple(range(1, ndim)), (0,), tuple(range(2, ndim))): "same",
    }
    return orders.get((inputs, outputs, windows))
