"""The tensors of torch for the parameters of a model.

A parameter is one tensor, or a stack of them: then its name has a counter, ``layers.{i}.weight``, and there is a tensor
for each index. The shape of an array does not tell a stack, or a kernel of attention, from a convolution. So an array
with more axes than its name usually has is refused, unless a rule or the class of its module tells what it is. A tensor
of torch that is read tells it too: it belongs to one layer, and has as many axes as the array only for a convolution.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax._axes.numbers import list_axes
from reparax._torch.rules import Rules, default_name, given_layouts, name_tensors, number
from reparax._tree.paths import PyTree, is_array, items, path_text

Index = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of torch.

    Attributes:
      path: The path of the parameter.
      tensor: The name in torch.
      shape: The shape of the array, without stacked axes.
      dtype: Its dtype.
      layout: Its layout, which relates its axes to torch's; if it is not known, that of one module of torch.
      said: Whether a rule gave the layout.
      known: Whether anything tells the layout.
      by_class: Whether the class of the module tells it.
      index: The index in the parameter, if that is a stack.
    """

    path: str
    tensor: str
    shape: tuple[int, ...]
    dtype: Any
    layout: str
    said: bool = False
    known: bool = True
    by_class: bool = False
    index: Index = ()

    def told(self, tensors: Iterable[Any]) -> Self:
        """This entry; its layout is known if one of torch's own tensors for it has all its axes."""
        return replace(self, known=self.known or any(x.ndim == len(self.shape) for x in tensors))

    def part(self, x: Any) -> Any:
        """This tensor's part of a stack, or the type of it."""
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape[len(self.index) :], x.dtype)
        if any(place >= size for place, size in zip(self.index, x.shape, strict=False)):
            raise ValueError(
                f"expected a value for each layer, got one of shape {x.shape}. Use `stacked` in its stage."
            )
        if not self.index or isinstance(x, Tracer):
            return x[self.index] if self.index else jnp.asarray(x)
        return jnp.asarray(np.asarray(x)[self.index])  # numpy compiles nothing for each index


def join(parts: Mapping[Index, Array]) -> Array:
    """The stack of these parts; the part itself if it is whole."""
    if () in parts:
        return parts[()]
    ordered = [parts[index] for index in sorted(parts)]
    sizes = (1 + max(places) for places in zip(*parts, strict=True))
    return jnp.stack(ordered).reshape(*sizes, *ordered[0].shape)


def unstacked(stage: Any, count: int) -> Any:
    """The stage on one array of a stack with ``count`` axes."""
    if count == 0:
        return stage
    axes = tuple(sorted(list_axes(getattr(stage, "stacked", ()))))
    if axes[:count] != tuple(range(count)):
        raise ValueError(
            f"`names` gives each layer a name, but {stage!r} does not act on each layer by itself. Give it "
            f"`stacked={0 if count == 1 else tuple(range(count))}`."
        )
    return replace(stage, stacked=tuple(axis - count for axis in axes[count:]))


def restacked(stage: Any, count: int) -> Any:
    """The stage on a stack with ``count`` axes, which acts on each array as ``stage`` does."""
    inner = (axis + count for axis in list_axes(stage.stacked))
    return replace(stage, stacked=(*range(count), *inner))


def list_entries(tree: PyTree, names: Rules, layouts: Rules) -> list[Entry]:
    """The tensors for the parameters of ``tree``."""
    arrays = {path_text(keys): x for keys, x in items(tree) if is_array(x)}
    named = name_tensors({path: tuple(x.shape) for path, x in arrays.items()}, names)
    said, known = given_layouts(list(arrays), layouts), _layouts_by_class(tree)
    found: list[Entry] = []
    for path, x in arrays.items():
        count, tensor = named[path]
        shape, name = tuple(x.shape[count:]), path.split("/")[-1]
        layout, sure = _layout(name, shape, said.get(path), known.get(path))
        whole = Entry(path, tensor, shape, x.dtype, layout, path in said, sure, path in known)
        for index in product(*map(range, x.shape[:count])):
            found.append(replace(whole, tensor=number(tensor, index), index=index))
    _require_names_differ(found)
    return found


_DIMENSIONS = {"kernel": 2, "embedding": 2, "scale": 1, "bias": 1}
"""The dimensions of arrays of these names, unless a rule or a class tells more."""


def _layout(name: str, shape: tuple[int, ...], said: str | None, known: tuple[str, int] | None) -> tuple[str, bool]:
    """The layout of an array, by a rule, by the class of its module, or by its name, and whether that is sure."""
    if said == "conv1d" and len(shape) != 2:
        raise ValueError(f"the layout 'conv1d' is that of matrices (in, out), but {name!r} has shape {shape}.")
    if said == "vector" and max(shape[1:], default=1) > 1:
        raise ValueError(f"the layout 'vector' is that of arrays (out, 1, ..., 1), but {name!r} has shape {shape}.")
    if said is not None:  # a kernel that is the same in torch has its inputs first there too
        return "conv1d" if (said, name, len(shape)) == ("same", "kernel", 2) else said, True
    layout, dimensions = known or ("kernel" if name == "kernel" else "same", _DIMENSIONS.get(name, len(shape)))
    return layout, len(shape) <= dimensions


def require_known(entries: Iterable[Entry]) -> None:
    """Refuses tensors whose layout nothing tells."""
    doubtful = {entry.path: entry for entry in entries if not entry.known}
    if not doubtful:
        return
    path, shape = next((entry.path, entry.shape) for entry in doubtful.values())
    others = ", ".join(repr(each) for each in doubtful if each != path)
    more = f" (as unclear: {others})" if others else ""
    raise ValueError(
        f"the shape {shape} of {path!r} does not tell whether it is a stack of layers, a convolution or a kernel of "
        f"attention{more}. For a stack, give each layer a name: {by_layer(path)}. For a convolution, "
        f"layouts={{{path!r}: 'kernel'}}, or 'conv_transpose'; for equal axes in torch, 'same'. Reshape kernels and "
        f"biases of attention to matrices and vectors."
    )


def by_layer(path: str) -> str:
    """The argument that gives each layer of a stack a name."""
    first, *rest = default_name(path).split(".")
    return f"names={{{path!r}: {'.'.join([first, '{i}', *rest] if rest else ['{i}', first])!r}}}"


def _require_names_differ(entries: list[Entry]) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        if owners.setdefault(entry.tensor, entry.path) != entry.path:
            both = f"{owners[entry.tensor]!r} and {entry.path!r}"
            raise ValueError(f"{both} are both called {entry.tensor!r}. Give different `names`.")


# For the class of a module: the name of its weight, its layout, and the number of its spatial axes.
_CLASSES: dict[tuple[str, str], Callable[[Any], tuple[str, str, int]]] = {
    ("flax", "Conv"): lambda m: ("kernel", "kernel", np.size(m.kernel_size)),
    ("flax", "ConvTranspose"): lambda m: ("kernel", _of_transpose(m), np.size(m.kernel_size)),
    ("equinox", "Conv"): lambda m: ("weight", "same", m.num_spatial_dims),
    ("equinox", "ConvTranspose"): lambda m: ("weight", "swapped", m.num_spatial_dims),
    ("equinox", "Linear"): lambda m: ("weight", "same", 0),
    ("equinox", "Embedding"): lambda m: ("weight", "same", 0),
}


def _of_transpose(module: Any) -> str:
    return "kernel" if module.transpose_kernel else "conv_transpose"


def _class_of(node: object) -> tuple[str, str] | None:
    named = ((each.__module__.partition(".")[0], each.__name__) for each in type(node).__mro__)
    return next((each for each in named if each in _CLASSES), None)


def _layouts_by_class(tree: PyTree) -> dict[str, tuple[str, int]]:
    """The layouts of arrays and their numbers of dimensions, where the class of the module tells them, by path."""
    found: dict[str, tuple[str, int]] = {}
    for keys, node in items(tree, lambda x: _class_of(x) is not None):
        if which := _class_of(node):
            name, layout, spatial = _CLASSES[which](node)
            found[path_text((*keys, name))] = layout, spatial + 2
            if which[0] == "equinox" and spatial:
                found[path_text((*keys, "bias"))] = "vector", spatial + 1
    return found
