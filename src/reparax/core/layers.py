"""What is known of the axes of an array before any program runs: by the class of the layer that holds it, or by name.

Each axis has a letter: ``i`` for inputs, ``w`` for those along which the window of a convolution lies, ``o`` for
outputs, ``s`` for stacked ones, ``r`` for the rows of a table that is looked up, ``v`` for those of a bias or a scale,
which no product contracts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from reparax.core.names import layers_of_library
from reparax.core.paths import has_ancestor
from reparax.core.roles import LOOKUP, PRODUCT, Numbers, Role, Use, show_axes

Spec = tuple[Any, ...]
"""The letters of an array of a layer, and a size for each, or a tuple of the sizes of several axes."""
Sizes = tuple[int | None, ...]
"""The sizes of axes; None where any will do."""


@dataclass(frozen=True)
class Convention:
    """The axes of an array as the layer that holds it has them, or as arrays of its name mostly have.

    Attributes:
      axes: A letter for each axis; empty if they are not known.
      sizes: The sizes of these axes.
      source: The class of the layer, or the name of the array in a plain tree.
      why: Why the axes are not known; empty if they are.
      is_class: Whether a module holds the array, so that only its class says the axes: further axes are then stacked.
      beside: The numbers of the other leaves of the same layer, with the sizes of their axes.
    """

    axes: str = ""
    sizes: Sizes = ()
    source: str = ""
    why: str = ""
    is_class: bool = False
    beside: tuple[tuple[int, Sizes], ...] = ()

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

    def of_factor(self, axes: Sequence[str], ranks: Mapping[str, int]) -> Convention:
        """What is known of a factor whose axes are ``rows``, ``columns`` and others between factors, of these sizes."""
        if not self.axes:
            return self
        between = "o" if "rows" in axes else "i"
        parts = {"rows": self._part("irw"), "columns": self._part("o")}
        found = [parts.get(axis, (between, (ranks.get(axis),))) for axis in axes]
        sizes = tuple(chain(*(sizes for _, sizes in found)))
        source = f"a factor of {self.source}" if self.is_class else self.source
        return replace(self, axes="".join(letters for letters, _ in found), sizes=sizes, source=source, beside=())

    def _part(self, letters: str) -> tuple[str, Sizes]:
        """The letters of axes that are among ``letters``, and their sizes."""
        chosen = [i for i, letter in enumerate(self.axes) if letter in letters]
        return "".join(self.axes[i] for i in chosen), tuple(self.sizes[i] for i in chosen)

    def stacks(self, shape: Numbers) -> list[Numbers]:
        """The axes that may be the stacked ones in an array of that shape: those without which it is of the layer."""
        if not self.is_of_layer:
            return [()] if len(shape) == len(self.axes) else []
        return list(stacks_of(shape, self.sizes))

    def role(self, shape: Numbers, dtype: Any, stacked: Numbers | None = None) -> Role:
        """The role of an array of that shape; ``stacked`` are axes of independent arrays that the user gave.

        Raises:
          ValueError: If the array does not fit, or does in several ways.
        """
        stacks = self.stacks(shape)
        if stacked:
            stacks = [stacked] if _fits_without(stacked, shape, self.sizes) else []
        if not self.axes or len(stacks) != 1:
            raise ValueError(self.why or self._expected(stacks))
        axes = [axis for axis in range(len(shape)) if axis not in stacks[0]]
        return self.role_of_axes(axes, stacks[0], shape, dtype)

    def role_of_axes(self, axes: Sequence[int], stacked: Numbers, shape: Numbers, dtype: Any) -> Role:
        """The role of an array whose ``axes`` have the letters, in ascending order, and whose others are stacked."""

        def axes_with(letters: str) -> Numbers:
            return tuple(axis for axis, letter in zip(axes, self.axes, strict=True) if letter in letters)

        inputs, outputs, stacks = axes_with("irw"), axes_with("o"), tuple(sorted((*stacked, *axes_with("s"))))
        role = Role(inputs=inputs, outputs=outputs, stacked=stacks, shape=shape, dtype=dtype)
        if self.is_vector:
            return replace(role, why=f"it is a bias or a scale of {self.source}")
        how = LOOKUP if self.is_table else PRODUCT
        use = Use(inputs, outputs, stacks, line=self.source, how=how, windows=axes_with("w"))
        return replace(role, uses=(use,))

    def _expected(self, stacks: Sequence[Numbers]) -> str:
        """What the layer holds there, and which axes may be stacked if there are several ways."""
        if not self.is_class:
            return f"only an array of {len(self.axes)} axes says it by the name {self.source!r}"
        held = f"{self.source} has one of shape {self.sizes}"
        if not stacks:
            return held
        return f"{held}, so the stacked axes may be {' or '.join(show_axes(stack) for stack in stacks)}"


def stacks_of(shape: Numbers, sizes: Sizes) -> Iterator[Numbers]:
    """The axes of an array of that shape without which it has these sizes, those in front first."""
    if len(shape) >= len(sizes):
        stacks = combinations(range(len(shape)), len(shape) - len(sizes))
        yield from (stack for stack in stacks if _fits_without(stack, shape, sizes))


def _fits_without(stacked: Numbers, shape: Numbers, sizes: Sizes) -> bool:
    """Whether an array of that shape, without its stacked axes, has the sizes that are expected."""
    rest = [n for axis, n in enumerate(shape) if axis not in stacked]
    return len(rest) == len(sizes) and all(want in (None, n) for n, want in zip(rest, sizes, strict=True))


PLAIN = "by name, only those of an array of two axes called 'kernel' or 'w' are"
_MATRICES, TABLES = ("kernel", "w"), frozenset({"embedding", "embeddings", "table"})


def convention_by_name(name: str) -> Convention:
    """What a plain tree says of an array of that name."""
    axes = "io" if name in _MATRICES else "ro" if name in TABLES else ""
    return Convention(axes, (None,) * len(axes), source=name, why=PLAIN)


def conventions_by_class(treedef: Any, boxes: Mapping[int, Any], same: Sequence[int]) -> dict[int, Convention]:
    """What the modules in a tree say of its leaves, by their numbers; leaves outside of modules are left out.

    Some leaves stand in ``boxes``, which are no nodes of the tree. ``same`` gives for each leaf the number of the first
    that is the same parameter, of which modules may say different axes.
    """
    conventions = dict[int, Convention]()

    def visit(node: Any, start: int, why: str) -> None:
        """Adds what is known of the leaves of a node, from the number ``start`` on; ``why`` is for all others."""
        cls = node.node_data()[0] if node.node_data() else None
        if cls is None and why:
            conventions.setdefault(start, Convention(why=why, is_class=True))
        if cls is not None and (_is_module(cls) or (why and _is_own(cls))):
            why = f"no class that reparax knows holds it, but {cls.__name__}"
        if cls is not None and (layer := _layer_of(cls)) is not None:
            why = f"{layer[1]} holds it, but does not say its axes"
            module = node.unflatten(range(start, start + node.num_leaves))
            conventions.update(_arrays_of_layer(*layer, module, boxes))
        for child in node.children():
            visit(child, start, why)
            start += child.num_leaves

    visit(treedef, 0, "")
    for number, convention in list(conventions.items()):
        first = conventions.get(same[number], convention)
        if first.axes != convention.axes:
            sources = " and ".join(x.source or "a module of another class" for x in (first, convention))
            conventions[same[number]] = Convention(why=f"{sources} share it, with other axes", is_class=True)
    return conventions


@functools.cache
def _is_module(cls: type) -> bool:
    """Whether a class is a module of nnx or equinox; neither is imported."""
    return any(c.__name__ == "Module" and layers_of_library(c.__module__) is not None for c in cls.__mro__)


def _is_own(cls: type) -> bool:
    """Whether a node is of a class of the user's, not a container of Python, a named tuple or a node of a library."""
    is_container = cls.__module__ in ("builtins", "collections") or hasattr(cls, "_fields")
    return not is_container and layers_of_library(cls.__module__) is None


def _computes_as(cls: type, base: type) -> bool:
    """Whether a layer computes like ``base``, from which it comes: it redefines no method and no way to read arrays."""
    redefined = _redefined(cls, base)
    return redefined.keys().isdisjoint(("__call__", "__getattr__", "__getattribute__")) and not any(
        not name.startswith("_") and (callable(x) or hasattr(x, "__get__")) for name, x in redefined.items()
    )


def _redefined(cls: type, base: type) -> dict[str, Any]:
    """What a class has in place of what ``base`` has, from which it comes."""
    derived = cls.__mro__[: cls.__mro__.index(base)]
    return {name: x for c in derived for name, x in vars(c).items() if hasattr(base, name)}


def _layer_of(cls: type) -> tuple[type, str, Callable[[Any], Mapping[str, Spec]]] | None:
    """The known layer that a class is, its name, and what it says; a class that computes otherwise is none."""
    for base in cls.__mro__:
        layers = layers_of_library(base.__module__)
        if layers is not None and base.__name__ in layers.LAYERS:
            known = base, f"{layers.NAME}.{base.__name__}", layers.LAYERS[base.__name__]
            return known if _computes_as(cls, base) else None
    return None


def _arrays_of_layer(
    base: type, name: str, arrays_of: Callable[[Any], Mapping[str, Spec]], module: Any, boxes: Mapping[int, Any]
) -> dict[int, Convention]:
    """What a layer says of its own arrays, by their numbers, which stand in ``module`` in their places.

    An attribute that is no array is a module or another node, which may compute it from others.
    """
    conventions = dict[int, Convention]()
    changed = _changed_function(base, module)
    for attribute, (letters, *sizes) in arrays_of(module).items():
        groups = [tuple(size) if isinstance(size, tuple | list) else (size,) for size in sizes]
        axes = "".join(letter * len(group) for letter, group in zip(letters, groups, strict=True))
        convention = Convention(axes, tuple(chain(*groups)), source=name, is_class=True)
        if changed:
            convention = Convention(why=f"{name} has another {changed} there", is_class=True)
        leaf = vars(module).get(attribute)
        if isinstance(leaf, int) and not _has_hook(box := boxes.get(leaf)):
            other = f"no class that reparax knows holds it, but {type(box).__name__}"
            conventions[leaf] = Convention(why=other, is_class=True) if _reads_otherwise(box) else convention
    sizes_of = [(leaf, convention.sizes) for leaf, convention in conventions.items()]
    return {
        leaf: replace(convention, beside=tuple(beside for beside in sizes_of if beside[0] != leaf))
        for leaf, convention in conventions.items()
    }


def _has_hook(box: Any) -> bool:
    """Whether a variable of nnx gives what a hook makes of its array."""
    return has_ancestor(box, "Variable") and "on_get_value" in box.get_metadata()


def _reads_otherwise(box: Any) -> bool:
    """Whether a box is of a class of the user's that gives another array than it holds."""
    if box is None:
        return False
    base = next(c for c in type(box).__mro__ if layers_of_library(c.__module__) is not None)
    return (
        not _redefined(type(box), base)
        .keys()
        .isdisjoint(("get_value", "__getitem__", "__jax_array__", "__getattr__", "__getattribute__"))
    )


def _changed_function(base: type, module: Any) -> str:
    """The name of a function, such as a product, that a layer has in place of its class's default; empty if none."""
    for name, default in _defaults_of(base).items():
        x = vars(module).get(name, default)
        is_type = isinstance(x, type) and name.endswith("type")
        if callable(x) and x is not default and not is_type and name != "base_module":  # whose result a LoRA adds
            return name
    return ""


@functools.cache
def _defaults_of(base: type) -> dict[str, Any]:
    """The defaults of the arguments of a layer, but those that only make its arrays."""
    signatures = [inspect.signature(vars(c)["__init__"]) for c in reversed(base.__mro__[:-1]) if "__init__" in vars(c)]
    arguments = {x.name: x.default for signature in signatures for x in signature.parameters.values()}
    return {name: default for name, default in arguments.items() if "init" not in name}
