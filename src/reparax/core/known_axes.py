"""What is known about the axes of an array without its network: from the class of the layer that holds it, or its name.

In a model of nnx or equinox modules, only the class of the layer counts; the tables for these libraries are in
``models/_nnx_layers.py`` and ``models/_equinox_layers.py``. In a plain tree, only the name of the array counts. Both
give a :class:`KnownAxes`, and for an array of a certain shape a :class:`Role`, which says what each axis is in a
network. If the array has more axes than the layer gives it, the further axes are stacked, as under ``jax.vmap``.

In the tables, each axis has a letter: ``i`` for inputs, ``w`` for axes along which the window of a convolution moves,
``o`` for outputs, ``s`` for stacked axes, ``r`` for the rows of a table that is looked up, and ``v`` for the axes of a
bias or a scale, which no product contracts.
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
"""The letters for the axes of an array of a layer, then a size for each letter, or a tuple of sizes if a letter stands
for several axes: ``("wio", (3, 3), 8, 16)`` for a kernel of shape ``(3, 3, 8, 16)``."""
Sizes = tuple[int | None, ...]
"""The sizes of axes. None stands for any size."""

_NO_ROLE = Role()


@dataclass(frozen=True)
class KnownAxes:
    """What is known about the axes of an array.

    Attributes:
      role: The role of one array, without stacked axes. Its ``shape`` has None where any size is possible, and is empty
        if nothing is known.
      why: Why the axes are unknown, at all or for an array of another shape.
      source: The class of the layer, or the name of the array in a plain tree.
      is_class: Whether a module holds the array, so that only the class of the module determines its axes.
      siblings: The other arrays of the same layer: the number of each among the leaves of the model, and its sizes.
      names: The names of the axes, if the array is in a flax box that has them.
    """

    role: Role = _NO_ROLE
    why: str = ""
    source: str = ""
    is_class: bool = False
    siblings: tuple[tuple[int, Sizes], ...] = ()
    names: AxisNames | None = None

    @property
    def sizes(self) -> Any:
        """The size of each axis of one array, without stacked axes. Empty if they are unknown."""
        return self.role.shape

    @property
    def are_of_layer(self) -> bool:
        """Whether the axes are known from the class of a layer."""
        return self.is_class and bool(self.sizes)

    @property
    def are_of_vector(self) -> bool:
        """Whether the array is known to be a bias or a scale, which no product contracts."""
        return bool(self.sizes) and not (self.role.inputs or self.role.outputs)

    def of_factor(self, axes: Sequence[str], ranks: Mapping[str, int]) -> KnownAxes:
        """What is known about the axes of a factor of the array, such as one of the two matrices of a low-rank product.

        ``axes`` are those that the stage declares for it: ``"rows"`` and ``"columns"`` stand for the inputs and the
        outputs of the array, and others, such as ``"rank"``, have sizes in ``ranks``. For a kernel of shape ``(8, 4)``,
        ``("rows", "rank")`` and the rank 2 give the shape ``(8, 2)``, with inputs ``(0,)`` and outputs ``(1,)``.
        """
        if not self.sizes:  # unknown, as are those of the factor, which also has other axis names
            return replace(self, names=None)
        groups = {"rows": self.role.inputs, "columns": self.role.outputs}
        followed = tuple(chain(*(groups.get(axis, (axis,)) for axis in axes)))
        sizes: Any = tuple(ranks.get(axis) if isinstance(axis, str) else self.sizes[axis] for axis in followed)
        role = self.role.follow([None if isinstance(axis, str) else axis for axis in followed], sizes, None)
        return KnownAxes(role, self.why, f"a factor of {self.source}" if self.is_class else self.source, self.is_class)

    def possible_stacks(self, shape: Numbers, given: Numbers = ()) -> list[Numbers]:
        """The possible choices of stacked axes in an array of that shape: without them, it has the known sizes.

        For the sizes ``(8, 4)``, the shape ``(3, 8, 4)`` has ``[(0,)]``, ``(8, 4)`` has ``[()]``, and ``(5, 5)`` has
        none, ``[]``. If the user gave stacked axes, ``given``, they are the only choice. An array that no layer holds
        has stacked axes only if they are given. Empty also if nothing is known about the axes.
        """
        if not self.sizes or not (self.is_class or given or len(shape) == len(self.sizes)):
            return []
        return [stack for stack in _stacks_of(shape, self.sizes) if given in ((), stack)]

    def role_of(self, w: Any, stacked: Numbers = (), tree: Any = None) -> Role:
        """The role of an array with the shape of ``w``. If it is unknown, it has no axes, and its ``why`` says why.

        It is known if there is one choice of stacked axes. ``stacked`` are those that the user gave. With ``tree``, a
        :class:`Flat`, the other arrays of the layer must have stacked axes of the same sizes.
        """
        stacks = self.possible_stacks(w.shape, stacked)
        is_known = len(stacks) == 1
        why = self._why_not_stacked(w, stacks[0], tree) if is_known else self.why or self._expected(stacks)
        if why:
            return Role(why=why, shape=w.shape, dtype=w.dtype)
        (stack,) = stacks
        axes_of_layer = iter(range(len(self.sizes)))
        followed = [None if axis in stack else next(axes_of_layer) for axis in range(w.ndim)]
        return self.role.follow(followed, w.shape, w.dtype, stack)

    def _expected(self, stacks: Sequence[Numbers]) -> str:
        """Why the role is unknown: the shape in the layer, and the choices of stacked axes, if there are any."""
        expected = f"its shape in {self.source} is {self.sizes}"
        if not stacks:
            return expected
        return f"{expected}, so the stacked axes may be {' or '.join(str(one_or_tuple(stack)) for stack in stacks)}"

    def _why_not_stacked(self, w: Any, stacked: Numbers, tree: Any) -> str:
        """Why these axes cannot be stacked layers: another array of the same layer has none of the same sizes.

        A kernel of shape ``(3, 8, 4)`` beside a bias of shape ``(5, 4)`` is such a case. Empty if they can, or without
        ``tree``, in which the others are looked up.
        """
        sizes = tuple(w.shape[axis] for axis in stacked)
        for number, sizes_of_one in self.siblings if tree else ():
            place = tree.frame.places[number]
            shape = getattr(tree.arrays.get(place), "shape", None)  # of an array: a model may hold other objects
            if shape is None:
                continue
            found = [tuple(shape[axis] for axis in stack) for stack in _stacks_of(shape, sizes_of_one)]
            if sizes not in found:
                there = found[0] if found else shape[: len(shape) - len(sizes_of_one)]  # a guess, for the error
                return f"{self.source} has stacked axes of sizes {sizes} here, but {there} at {place[-1]!r}"
        return ""


def _stacks_of(shape: Numbers, sizes: Sizes) -> Iterator[Numbers]:
    """The choices of axes without which an array of that shape has these sizes, beginning with the axes in front.

    For the shape ``(3, 4, 4)`` and the sizes ``(3, 4)``, these are ``(1,)`` and ``(2,)``.
    """
    for stacked in combinations(range(len(shape)), max(len(shape) - len(sizes), 0)):
        rest = [n for axis, n in enumerate(shape) if axis not in stacked]
        if len(rest) == len(sizes) and all(want in (None, n) for n, want in zip(rest, sizes, strict=True)):
            yield stacked


def role_by_letters(letters: str, sizes: Any, source: str = "") -> Role:
    """The role of an array whose axes have these letters (see the module's docstring) and these sizes.

    ``"wio"`` gives inputs ``(0, 1)``, outputs ``(2,)``, and a product whose window moves along axis 0. ``source``, the
    layer or the name, is the ``line`` of that product.
    """

    def axes_with(chosen: str) -> Numbers:
        """The axes whose letter is one of those in ``chosen``."""
        return tuple(axis for axis, letter in enumerate(letters) if letter in chosen)

    inputs, outputs, stacked = axes_with("irw"), axes_with("o"), axes_with("s")
    if not inputs and not outputs:
        return Role(stacked=stacked, why=f"it is a bias or a scale of {source}", shape=sizes)
    how = LOOKUP if "r" in letters else PRODUCT
    use = Use(inputs, outputs, stacked, line=source, how=how, windows=axes_with("w"))
    return Role(inputs, outputs, stacked, uses=(use,), shape=sizes)


_NOT_BY_NAME = "a name determines the axes only of an array of two axes called 'kernel' or 'w'"
_MATRICES, TABLES = ("kernel", "w"), frozenset({"embedding", "embeddings", "table"})


@functools.cache
def known_by_name(name: str) -> KnownAxes:
    """What the name of an array in a plain tree tells about its axes: ``kernel`` is ``(in, out)``.

    A name that tells nothing gives empty sizes and the reason.
    """
    letters = "io" if name in _MATRICES else "ro" if name in TABLES else ""
    return KnownAxes(role_by_letters(letters, (None,) * len(letters), name), _NOT_BY_NAME, name)


def known_by_class(treedef: Any, boxes: Mapping[int, Any], first_numbers: Sequence[int]) -> dict[int, KnownAxes]:
    """What the modules in a tree tell about its leaves, by the numbers of the leaves in ``treedef``.

    For ``{"dense": nnx.Linear(8, 4)}``, the bias has the number 0 and the size 4, and the kernel 1 and the sizes
    ``(8, 4)``. Leaves outside of modules are left out. Those of a module that tells nothing are there, with the reason,
    because their names do not count either.

    Args:
      treedef: The structure of the tree, whose nodes have the classes of the modules.
      boxes: The flax boxes around some of the leaves, by number; they are not nodes of the tree.
      first_numbers: For each leaf, the number of the first leaf that is the same parameter. If the modules that share
        a parameter disagree about its axes, they are unknown.
    """
    known = dict[int, KnownAxes]()

    def visit(node: Any, start: int, why: str) -> None:
        """Adds the leaves of a node to ``known``. The first one has the number ``start``.

        ``why`` says why the axes of a leaf are unknown if no layer below determines them; it is empty outside modules.
        """
        cls = node.node_data()[0] if node.node_data() else None  # a leaf has none
        if cls is None and why:  # a leaf, unless the layer around it has said what its axes are
            known.setdefault(start, KnownAxes(why=why, is_class=True))
        if cls is not None and (_is_module(cls) or (why and _is_own(cls))):  # the innermost class is named
            why = f"it belongs to {cls.__name__}, a class that reparax does not know"
        if cls is not None and (layer := _layer_of(cls)) is not None:
            why = f"it belongs to {layer[1]}, which does not specify its axes"
            module = node.unflatten(range(start, start + node.num_leaves))  # the layer, with numbers for its arrays
            known.update(_axes_in_layer(*layer, module, boxes))
        start_of_child = start
        for child in node.children():  # leaves are numbered in the order of the tree
            visit(child, start_of_child, why)
            start_of_child += child.num_leaves
        if cls is not None and layers_of_library(cls.__module__) is not None and cls.__name__ == "Shared":
            # A function of the user's, which is not part of `treedef`, says which arrays another layer reads.
            for number in range(start, start_of_child):
                if number in known and not known[number].are_of_vector:
                    why = f"it belongs to {known[number].source} in eqx.nn.Shared, so another layer may read it too"
                    known[number] = KnownAxes(why=why, is_class=True)

    visit(treedef, 0, "")
    return _without_contradictions(known, first_numbers)


def _without_contradictions(known: Mapping[int, KnownAxes], first_numbers: Sequence[int]) -> dict[int, KnownAxes]:
    """What is known about leaves, where a parameter whose modules disagree about its axes has unknown ones.

    An embedding that is also the last layer is such a parameter. It is unknown at its first place, which
    ``first_numbers`` gives for each leaf, and at which others look it up.
    """
    resolved = dict(known)
    for number, axes in known.items():
        first = resolved.get(first_numbers[number], axes)
        if _uses_of(first) != _uses_of(axes):
            sources = " and ".join(x.source or "a module of another class" for x in (first, axes))
            why = f"{sources} share it, but use its axes differently"
            resolved[first_numbers[number]] = KnownAxes(why=why, is_class=True)
    return resolved


def _uses_of(axes: KnownAxes) -> Any:
    """What two modules that share an array must agree on: its uses, but not its sizes and the name of the layer."""
    return len(axes.sizes), axes.role.stacked, [replace(use, line="") for use in axes.role.uses]


@functools.cache
def _is_module(cls: type) -> bool:
    """Whether a class is a module of nnx or equinox. Imports neither."""
    return any(c.__name__ == "Module" and layers_of_library(c.__module__) is not None for c in cls.__mro__)


def _is_own(cls: type) -> bool:
    """Whether a node has a class of the user's: not a Python container, a named tuple or a class of a known library."""
    is_container = cls.__module__ in ("builtins", "collections") or hasattr(cls, "_fields")
    return not is_container and layers_of_library(cls.__module__) is None


def _computes_like(cls: type, base: type) -> bool:
    """Whether a layer computes like its base class: it overrides neither public methods nor the access to arrays.

    Private methods and plain attributes, such as other defaults, are allowed.
    """
    redefined = _redefined(cls, base)
    return redefined.keys().isdisjoint(("__call__", "__getattr__", "__getattribute__")) and not any(
        not name.startswith("_") and (callable(x) or hasattr(x, "__get__")) for name, x in redefined.items()
    )


def _redefined(cls: type, base: type) -> dict[str, Any]:
    """The attributes of ``base`` that a subclass of it, or a class in between, overrides, with their new values."""
    derived = cls.__mro__[: cls.__mro__.index(base)]
    return {name: x for c in derived for name, x in vars(c).items() if hasattr(base, name)}


def _layer_of(cls: type) -> tuple[type, str, Callable[[Any], Mapping[str, Spec]]] | None:
    """The known layer that a class is or computes like: its class, its name, and its function in the table.

    None if it is no layer of the tables, or is derived from one that it changes. The function returns the :data:`Spec`
    of each array of such a layer: ``{"kernel": ("io", 8, 4), ...}``.
    """
    for base in cls.__mro__:
        layers = layers_of_library(base.__module__)
        if layers is not None and base.__name__ in layers.LAYERS:
            known = base, f"{layers.NAME}.{base.__name__}", layers.LAYERS[base.__name__]
            return known if _computes_like(cls, base) else None
    return None


def _axes_in_layer(
    base: type, name: str, arrays_of: Callable[[Any], Mapping[str, Spec]], module: Any, boxes: Mapping[int, Any]
) -> dict[int, KnownAxes]:
    """What a layer tells about its own arrays, by the numbers of the leaves.

    Args:
      base: The class of the layer in the table.
      name: The name of that layer, such as ``"nnx.Linear"``.
      arrays_of: Returns the :data:`Spec` of each array, by the name of the attribute.
      module: The layer, with the numbers of the leaves in place of its arrays. An attribute that is not a number is a
        module or another node, which may compute the array from others, so nothing is known about it.
      boxes: The flax boxes around leaves, by number. If a box has a hook or a class of the user's, another array than
        the one in it may be read.
    """
    known = dict[int, KnownAxes]()
    custom = _custom_function(base, module)
    for attribute, (letters, *sizes) in arrays_of(module).items():
        leaf = vars(module).get(attribute)
        box = boxes.get(leaf) if isinstance(leaf, int) else None
        if not isinstance(leaf, int) or _has_hook(box):
            continue
        groups = [tuple(size) if isinstance(size, tuple | list) else (size,) for size in sizes]
        axes = "".join(letter * len(group) for letter, group in zip(letters, groups, strict=True))
        why = f"this {name} has a {custom} of its own" if custom else ""
        if _overrides_reading(box):
            why = f"it belongs to {type(box).__name__}, a class that reparax does not know"
        role = role_by_letters(axes, tuple(chain(*groups)), name)
        known[leaf] = KnownAxes(why=why, is_class=True) if why else KnownAxes(role, source=name, is_class=True)
    return {
        leaf: replace(axes, siblings=tuple((other, x.sizes) for other, x in known.items() if other != leaf))
        for leaf, axes in known.items()
    }


def _has_hook(box: Any) -> bool:
    """Whether an nnx variable has a hook that transforms its array whenever it is read."""
    return is_flax_instance(box, "Variable") and "on_get_value" in box.get_metadata()


def _overrides_reading(box: Any) -> bool:
    """Whether the class of a box is the user's own, and may return another array than the box holds. False for None."""
    if box is None:
        return False
    base = next(c for c in type(box).__mro__ if layers_of_library(c.__module__) is not None)  # flax's own class
    return (
        not _redefined(type(box), base)
        .keys()
        .isdisjoint(("get_value", "__getitem__", "__jax_array__", "__getattr__", "__getattribute__"))
    )


def _custom_function(base: type, module: Any) -> str:
    """The name of an attribute with a function, such as ``dot_general``, that is not the layer's default; or empty.

    Such a function may use the arrays in any way. Types, such as ``dtype``, may not.
    """
    for name, default in _defaults_of(base).items():
        x = vars(module).get(name, default)
        is_type = isinstance(x, type) and name.endswith("type")
        if callable(x) and x is not default and not is_type and name != "base_module":  # a LoRA only adds its result
            return name
    return ""


@functools.cache
def _defaults_of(base: type) -> dict[str, Any]:
    """The defaults of the arguments of a layer, by name, except for initializers, which do not run in a call.

    An argument that a class repeats has the default of the derived class.
    """
    signatures = [inspect.signature(vars(c)["__init__"]) for c in reversed(base.__mro__[:-1]) if "__init__" in vars(c)]
    arguments = {x.name: x.default for signature in signatures for x in signature.parameters.values()}
    return {name: default for name, default in arguments.items() if "init" not in name}
