"""What is known of the axes of an array before any program runs: by the class of the layer that holds it, or by name.

Each axis has a letter: ``i`` for inputs, ``o`` for outputs, ``s`` for stacked ones, ``r`` for the rows of a table that
is looked up, ``v`` for those of a bias or a scale, which no product contracts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax

from reparax.core.names import layers_of_library
from reparax.core.roles import LOOKUP, PRODUCT, Numbers, Role, Use

Spec = tuple[Any, ...]
"""The letters of an array of a layer, and a size for each, or a tuple of the sizes of several axes."""


@dataclass(frozen=True)
class Convention:
    """The axes of an array as the layer that holds it has them, or as arrays of its name mostly have.

    Attributes:
      axes: A letter for each axis; empty if they are not known.
      sizes: The sizes of these axes, None where any will do; empty if none are known.
      source: The class of the layer, or the name of the array in a plain tree.
      why: Why the axes are not known; empty if they are.
      is_class: Whether a class says it: further axes in front are then stacked.
      beside: The numbers of the leaves of the same layer, with the numbers of axes that are theirs.
    """

    axes: str = ""
    sizes: tuple[int | None, ...] = ()
    source: str = ""
    why: str = ""
    is_class: bool = False
    beside: tuple[tuple[int, int], ...] = ()

    @property
    def is_of_layer(self) -> bool:
        """Whether a class says its axes."""
        return self.is_class and bool(self.axes)

    @property
    def is_vector(self) -> bool:
        """Whether no product contracts the array."""
        return bool(self.axes) and set(self.axes) <= {"v", "s"}

    @property
    def is_table(self) -> bool:
        """Whether its rows are looked up."""
        return "r" in self.axes

    def of_factor(self, axes: Sequence[str]) -> Convention:
        """What is known of a factor of the array whose axes are ``rows``, ``columns`` and others between factors."""
        letters = {"rows": self._only("ir"), "columns": self._only("o")}
        between = "o" if "rows" in axes else "i"
        return replace(self, axes="".join(letters.get(axis, between) for axis in axes), sizes=(), beside=())

    def _only(self, letters: str) -> str:
        """The letters of axes that are among ``letters``."""
        return "".join(letter for letter in self.axes if letter in letters)

    def role(self, shape: Numbers, dtype: Any, stacked: Numbers | None = None) -> Role:
        """The role of an array of that shape; ``stacked`` are axes of independent arrays that the user gave.

        Raises:
          ValueError: If the array does not fit.
        """
        n_front = len(shape) - len(self.axes) if self.is_class else 0
        front = stacked or tuple(range(n_front))
        axes = [axis for axis in range(len(shape)) if axis not in front]
        sizes = tuple(shape[axis] for axis in axes)
        if not self.axes or len(axes) != len(self.axes) or (self.sizes and not _fit(sizes, self.sizes)):
            raise ValueError(self.why or self._shape)
        return self.role_of_axes(axes, front, shape, dtype)

    def fits(self, shape: Numbers) -> bool:
        """Whether an array of that shape may be one that the layer holds."""
        return len(shape) >= len(self.axes) and _fit(shape[len(shape) - len(self.sizes) :], self.sizes)

    def role_of_axes(self, axes: Sequence[int], front: Numbers, shape: Numbers, dtype: Any) -> Role:
        """The role of an array whose ``axes`` have the letters, in ascending order, and whose others are in front."""

        def axes_with(letters: str) -> Numbers:
            return tuple(axis for axis, letter in zip(axes, self.axes, strict=True) if letter in letters)

        inputs, outputs, stacked = axes_with("ir"), axes_with("o"), tuple(sorted((*front, *axes_with("s"))))
        role = Role(inputs=inputs, outputs=outputs, stacked=stacked, shape=shape, dtype=dtype)
        if self.is_vector:
            return replace(role, why=f"it is a bias or a scale of {self.source}")
        use = Use(inputs, outputs, stacked, line=self.source, how=LOOKUP if self.is_table else PRODUCT)
        return replace(role, uses=(use,))

    @property
    def _shape(self) -> str:
        """What the layer holds there."""
        if not self.is_class:
            return f"only an array of {len(self.axes)} axes says it by the name {self.source!r}"
        return f"{self.source} has one of shape {self.sizes}" if self.sizes else f"it is a factor of {self.source}"


def _fit(sizes: Sequence[int], expected_sizes: Sequence[int | None]) -> bool:
    """Whether sizes are those that are expected."""
    return all(expected in (None, size) for size, expected in zip(sizes, expected_sizes, strict=True))


PLAIN = "by name, only those of an array of two axes called 'kernel' or 'w' are"
_MATRICES, TABLES = ("kernel", "w"), frozenset({"embedding", "embeddings", "table"})


def convention_by_name(name: str) -> Convention:
    """What a plain tree says of an array of that name."""
    axes = "io" if name in _MATRICES else "ro" if name in TABLES else ""
    return Convention(axes, source=name, why=PLAIN)


def conventions_by_class(treedef: Any) -> dict[int, Convention]:
    """What the modules in a tree say of its leaves, by their numbers; leaves outside of modules are left out."""
    conventions = dict[int, Convention]()

    def visit(node: Any, start: int, holder: type | None) -> None:
        """Adds what is known of the leaves of a node, from the number ``start`` on; ``holder`` is the module around."""
        cls = node.node_data()[0] if node.node_data() else None
        if cls is None and holder is not None:
            why = f"no class that reparax knows holds it, but {holder.__name__}"
            conventions.setdefault(start, Convention(why=why))
        if cls is not None and _is_module(cls):
            holder = cls
            conventions.update(_arrays_of_layer(cls, node.unflatten(range(start, start + node.num_leaves))))
        for child in node.children():
            visit(child, start, holder)
            start += child.num_leaves

    visit(treedef, 0, None)
    return conventions


@functools.cache
def _is_module(cls: type) -> bool:
    """Whether a class is a module of nnx or equinox; neither is imported."""
    return any(c.__name__ == "Module" and layers_of_library(c.__module__) is not None for c in cls.__mro__)


@functools.cache
def _layer_of(cls: type) -> tuple[str, Callable[[Any], Mapping[str, Spec]]] | None:
    """The known layer that a class is, and what it says; a class that computes otherwise is none."""
    for base in cls.__mro__:
        layers = layers_of_library(base.__module__)
        if layers is not None and base.__name__ in layers.LAYERS:
            same = inspect.getattr_static(cls, "__call__") is inspect.getattr_static(base, "__call__")
            return (f"{layers.NAME}.{base.__name__}", layers.LAYERS[base.__name__]) if same else None
    return None


def _arrays_of_layer(cls: type, module: Any) -> dict[int, Convention]:
    """What a layer says of its arrays, by their numbers, which stand in ``module`` in their places."""
    if (layer := _layer_of(cls)) is None:
        return {}
    name, arrays_of = layer
    conventions = dict[int, Convention]()
    for attribute, (letters, *sizes) in arrays_of(module).items():
        groups = [tuple(size) if isinstance(size, tuple | list) else (size,) for size in sizes]
        axes = "".join(letter * len(group) for letter, group in zip(letters, groups, strict=True))
        convention = Convention(axes, tuple(chain(*groups)), source=name, is_class=True)
        conventions |= dict.fromkeys(jax.tree.leaves(getattr(module, attribute, None)), convention)
    counts = [(leaf, len(convention.axes)) for leaf, convention in conventions.items()]
    return {
        leaf: replace(convention, beside=tuple(count for count in counts if count[0] != leaf))
        for leaf, convention in conventions.items()
    }
