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
from reparax.core.paths import AxisNames, is_flax_instance
from reparax.core.roles import LOOKUP, PRODUCT, Numbers, Role, Use, one_or_tuple

Spec = tuple[Any, ...]
"""The letters of an array of a layer, and a size for each, or a tuple of the sizes of several axes."""
Sizes = tuple[int | None, ...]
"""The sizes of axes; None where any will do."""

_NO_ROLE = Role()


@dataclass(frozen=True)
class KnownAxes:
    """The axes of an array as the layer that holds it has them, or as arrays of its name mostly have.

    Attributes:
      role: The roles of the axes of one array, whose ``shape`` is None where any size will do; of no shape if they are
        not known.
      why: Why they are not known, or not of an array of another shape.
      source: The class of the layer, or the name of the array in a plain tree.
      is_class: Whether a module holds the array, so that only its class says the axes: further axes are then stacked.
      beside: The numbers of the other leaves of the same layer, with the sizes of their axes.
      names: The names of the axes, in the box of the array.
    """

    role: Role = _NO_ROLE
    why: str = ""
    source: str = ""
    is_class: bool = False
    beside: tuple[tuple[int, Sizes], ...] = ()
    names: AxisNames | None = None

    @property
    def sizes(self) -> Any:
        """The size of each axis of one array; empty if they are not known."""
        return self.role.shape

    @property
    def are_of_layer(self) -> bool:
        """Whether a class says them."""
        return self.is_class and bool(self.sizes)

    @property
    def are_of_vector(self) -> bool:
        """Whether no product contracts the array."""
        return bool(self.sizes) and not (self.role.inputs or self.role.outputs)

    def of_factor(self, axes: Sequence[str], ranks: Mapping[str, int]) -> KnownAxes:
        """Those of a factor whose axes are ``rows``, ``columns`` and others between factors, of these sizes."""
        if not self.sizes:
            return replace(self, names=None)
        groups = {"rows": self.role.inputs, "columns": self.role.outputs}
        followed = tuple(chain(*(groups.get(axis, (axis,)) for axis in axes)))
        sizes: Any = tuple(ranks.get(axis) if isinstance(axis, str) else self.sizes[axis] for axis in followed)
        role = self.role.follow([None if isinstance(axis, str) else axis for axis in followed], sizes, None)
        return KnownAxes(role, self.why, f"a factor of {self.source}" if self.is_class else self.source, self.is_class)

    def stacks(self, shape: Numbers, given: Numbers = ()) -> list[Numbers]:
        """The axes that may be the stacked ones in an array of that shape: those without which it is of the layer.

        Only ``given`` axes, if the user gave any, may be those of an array that no layer holds.
        """
        if not self.sizes or not (self.is_class or given or len(shape) == len(self.sizes)):
            return []
        return [stack for stack in _stacks_of(shape, self.sizes) if given in ((), stack)]

    def role_of(self, w: Any, stacked: Numbers = (), tree: Any = None) -> Role:
        """The role of an array like ``w``, or one that says why the layer, or others in ``tree``, do not give it.

        ``stacked`` are axes of independent arrays that the user gave.
        """
        stacks = self.stacks(w.shape, stacked)
        is_known = len(stacks) == 1
        why = self._why_not_stacked(w, stacks[0], tree) if is_known else self.why or self._expected(stacks)
        if why:
            return Role(why=why, shape=w.shape, dtype=w.dtype)
        (stack,), places = stacks, iter(range(len(self.sizes)))
        followed = [None if axis in stack else next(places) for axis in range(w.ndim)]
        return self.role.follow(followed, w.shape, w.dtype, stack)

    def _expected(self, stacks: Sequence[Numbers]) -> str:
        """What the layer holds there, and which axes may be stacked if there are several ways."""
        held = f"{self.source} has one of shape {self.sizes}"
        if not stacks:
            return held
        return f"{held}, so the stacked axes may be {' or '.join(str(one_or_tuple(stack)) for stack in stacks)}"

    def _why_not_stacked(self, w: Any, stacked: Numbers, tree: Any) -> str:
        """Why these axes are not those of a stack of layers: another array of the layer has others in ``tree``."""
        sizes = tuple(w.shape[axis] for axis in stacked)
        for number, sizes_of_one in self.beside if tree else ():
            place = tree.frame.places[number]
            shape = getattr(tree.arrays.get(place), "shape", None)  # of an array: a model may hold other objects
            if shape is None:
                continue
            found = [tuple(shape[axis] for axis in stack) for stack in _stacks_of(shape, sizes_of_one)]
            if sizes not in found:
                there = found[0] if found else shape[: len(shape) - len(sizes_of_one)]
                return f"{self.source} has stacked axes of sizes {sizes} there, but {there} at {place[-1]!r}"
        return ""


def _stacks_of(shape: Numbers, sizes: Sizes) -> Iterator[Numbers]:
    """The axes of an array of that shape without which it has these sizes, those in front first."""
    for stacked in combinations(range(len(shape)), max(len(shape) - len(sizes), 0)):
        rest = [n for axis, n in enumerate(shape) if axis not in stacked]
        if len(rest) == len(sizes) and all(want in (None, n) for n, want in zip(rest, sizes, strict=True)):
            yield stacked


def role_by_letters(letters: str, sizes: Any, source: str = "") -> Role:
    """The role of an array whose axes have these letters and sizes."""

    def axes_with(chosen: str) -> Numbers:
        return tuple(axis for axis, letter in enumerate(letters) if letter in chosen)

    inputs, outputs, stacked = axes_with("irw"), axes_with("o"), axes_with("s")
    if not inputs and not outputs:
        return Role(stacked=stacked, why=f"it is a bias or a scale of {source}", shape=sizes)
    how = LOOKUP if "r" in letters else PRODUCT
    use = Use(inputs, outputs, stacked, line=source, how=how, windows=axes_with("w"))
    return Role(inputs, outputs, stacked, uses=(use,), shape=sizes)


PLAIN = "by name, only those of an array of two axes called 'kernel' or 'w' are"
_MATRICES, TABLES = ("kernel", "w"), frozenset({"embedding", "embeddings", "table"})


@functools.cache
def known_by_name(name: str) -> KnownAxes:
    """What a plain tree says of an array of that name."""
    letters = "io" if name in _MATRICES else "ro" if name in TABLES else ""
    return KnownAxes(role_by_letters(letters, (None,) * len(letters), name), PLAIN, name)


def known_by_class(treedef: Any, boxes: Mapping[int, Any], same: Sequence[int]) -> dict[int, KnownAxes]:
    """What the modules in a tree say of its leaves, by their numbers; leaves outside of modules are left out.

    Some leaves stand in ``boxes``, which are no nodes of the tree. ``same`` gives for each leaf the number of the first
    that is the same parameter, of which modules may say different axes.
    """
    known = dict[int, KnownAxes]()

    def visit(node: Any, start: int, why: str) -> None:
        """Adds what is known of the leaves of a node, from the number ``start`` on; ``why`` is for all others."""
        cls = node.node_data()[0] if node.node_data() else None
        if cls is None and why:
            known.setdefault(start, KnownAxes(why=why, is_class=True))
        if cls is not None and (_is_module(cls) or (why and _is_own(cls))):
            why = f"no class that reparax knows holds it, but {cls.__name__}"
        if cls is not None and (layer := _layer_of(cls)) is not None:
            why = f"{layer[1]} holds it, but does not say its axes"
            module = node.unflatten(range(start, start + node.num_leaves))
            known.update(_arrays_of_layer(*layer, module, boxes))
        first = start
        for child in node.children():
            visit(child, start, why)
            start += child.num_leaves
        if cls is not None and layers_of_library(cls.__module__) is not None and cls.__name__ == "Shared":
            for number in range(first, start):  # a function of the user's, which is no part of `treedef`, says what
                if number in known and not known[number].are_of_vector:
                    why = f"eqx.nn.Shared holds that of {known[number].source}, and another layer may read it too"
                    known[number] = KnownAxes(why=why, is_class=True)

    visit(treedef, 0, "")
    for number, axes in list(known.items()):
        first = known.get(same[number], axes)
        if _uses_of(first) != _uses_of(axes):
            sources = " and ".join(x.source or "a module of another class" for x in (first, axes))
            known[same[number]] = KnownAxes(why=f"{sources} share it, with other axes", is_class=True)
    return known


def _uses_of(axes: KnownAxes) -> Any:
    """What a class says of the axes of an array, beside their sizes and its own name."""
    return len(axes.sizes), axes.role.stacked, [replace(use, line="") for use in axes.role.uses]


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
) -> dict[int, KnownAxes]:
    """What a layer says of its own arrays, by their numbers, which stand in ``module`` in their places.

    An attribute that is no array is a module or another node, which may compute it from others.
    """
    known = dict[int, KnownAxes]()
    changed = _changed_function(base, module)
    for attribute, (letters, *sizes) in arrays_of(module).items():
        leaf = vars(module).get(attribute)
        if not isinstance(leaf, int) or _has_hook(box := boxes.get(leaf)):
            continue
        groups = [tuple(size) if isinstance(size, tuple | list) else (size,) for size in sizes]
        axes = "".join(letter * len(group) for letter, group in zip(letters, groups, strict=True))
        known[leaf] = KnownAxes(role_by_letters(axes, tuple(chain(*groups)), name), source=name, is_class=True)
        if changed:
            known[leaf] = KnownAxes(why=f"{name} has another {changed} there", is_class=True)
        if _reads_otherwise(box):
            why = f"no class that reparax knows holds it, but {type(box).__name__}"
            known[leaf] = KnownAxes(why=why, is_class=True)
    return {
        leaf: replace(axes, beside=tuple((other, of_other.sizes) for other, of_other in known.items() if other != leaf))
        for leaf, axes in known.items()
    }


def _has_hook(box: Any) -> bool:
    """Whether a variable of nnx gives what a hook makes of its array."""
    return is_flax_instance(box, "Variable") and "on_get_value" in box.get_metadata()


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
