"""Infers the roles of an array's axes from the class of its layer, or from its name, without tracing a network.

In a model of nnx or equinox modules, only the class of the layer counts; the tables for these libraries are in
``models/_nnx_layers.py`` and ``models/_equinox_layers.py``. In a plain tree of arrays, only the name of the array
counts. The result is a :class:`KnownAxes`, which gives a :class:`Role` for an array of a certain shape. The role says
which axes are inputs, outputs and stacked axes. If the array has more axes than the layer declares, the additional axes
are stacked, as under ``jax.vmap``.

In the tables, each axis has a letter:

- ``i``: inputs
- ``w``: inputs along which the window of a convolution moves
- ``o``: outputs
- ``s``: stacked axes
- ``r``: the rows of a look-up table
- ``v``: the axes of a bias or a scale, which no product contracts
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
"""The axes of an array in a layer: a string with a letter for each kind of axis, and then a size for each letter. If a
letter stands for several axes, a tuple gives their sizes. A convolution kernel of shape ``(3, 3, 8, 16)``, for example,
has ``("wio", (3, 3), 8, 16)``."""
Sizes = tuple[int | None, ...]
"""The size of each axis of an array. None stands for any size."""

_NO_ROLE = Role()


@dataclass(frozen=True)
class KnownAxes:
    """The inputs, outputs and sizes of an array's axes, as far as its layer or its name determines them.

    Attributes:
      role: The inputs and outputs of one array, without stacked axes. The ``shape`` of this :class:`Role` has None
        where any size is possible, and is empty if the axes are unknown.
      why: The reason why the axes are unknown, either for all arrays, or for arrays of another shape.
      source: The class of the layer, such as ``"nnx.Linear"``, or the name of the array in a plain tree.
      is_class: Whether a module holds the array, so that only the class of the module determines its axes.
      siblings: The other arrays of the same layer: the index of each among the leaves of the model, and its sizes.
      names: The names of the axes, if a flax box (such as an nnx variable) around the array holds them.
    """

    role: Role = _NO_ROLE
    why: str = ""
    source: str = ""
    is_class: bool = False
    siblings: tuple[tuple[int, Sizes], ...] = ()
    names: AxisNames | None = None

    @property
    def sizes(self) -> Any:
        """The size of each axis of one array, without stacked axes; empty if the axes are unknown."""
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
        """Returns the known axes of a factor of this array, such as one matrix of a low-rank product.

        ``axes`` names the factor's axes, as the stage declares them: ``"rows"`` and ``"columns"`` stand for the inputs
        and the outputs of the array, and ``ranks`` holds the sizes of other axes, such as ``"rank"``. If the array is a
        kernel of shape ``(8, 4)`` and the rank is 2, a factor with ``("rows", "rank")`` has the shape ``(8, 2)``, the
        inputs ``(0,)`` and the outputs ``(1,)``.
        """
        if not self.sizes:  # The factor's axes are unknown too, and the array's axis names do not apply to the factor.
            return replace(self, role=_NO_ROLE, names=None)
        groups = {"rows": self.role.inputs, "columns": self.role.outputs}
        followed = tuple(chain(*(groups.get(axis, (axis,)) for axis in axes)))
        sizes: Any = tuple(ranks.get(axis) if isinstance(axis, str) else self.sizes[axis] for axis in followed)
        role = self.role.follow([None if isinstance(axis, str) else axis for axis in followed], sizes, None)
        return KnownAxes(role, self.why, f"a factor of {self.source}" if self.is_class else self.source, self.is_class)

    def possible_stacks(self, shape: Numbers, given: Numbers = ()) -> list[Numbers]:
        """Returns each tuple of axes of ``shape`` that may be stacked, because the other axes have the known sizes.

        If the known sizes are ``(8, 4)``, the shape ``(3, 8, 4)`` gives ``[(0,)]``, ``(8, 4)`` gives ``[()]``, and
        ``(5, 5)`` gives ``[]``, because no axes fit. If the user gave the stacked axes as ``given``, no others are
        possible. An array outside of a layer has stacked axes only if the user gave them. If the sizes are unknown, the
        result is empty.
        """
        if not self.sizes or not (self.is_class or given or len(shape) == len(self.sizes)):
            return []
        return [stack for stack in _stacks_of(shape, self.sizes) if given in ((), stack)]

    def role_of(self, w: Any, stacked: Numbers = (), tree: Any = None) -> Role:
        """Returns the role of an array like ``w``: its inputs, outputs and stacked axes, or why they are unknown.

        The role is known if exactly one choice of stacked axes is possible; otherwise, its ``why`` gives the reason.
        ``stacked`` holds the stacked axes that the user gave. If ``tree``, a :class:`Flat` tree of the model, is given,
        the other arrays of the layer must also have stacked axes of the same sizes.
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
        """Returns why a role is unknown: the shape that the layer expects, and the possible stacked axes, if any."""
        expected = f"its shape in {self.source} is {self.sizes}"
        if not stacks:
            return expected
        return f"{expected}, so the stacked axes may be {' or '.join(str(one_or_tuple(stack)) for stack in stacks)}"

    def _why_not_stacked(self, w: Any, stacked: Numbers, tree: Any) -> str:
        """Returns why the axes ``stacked`` of ``w`` cannot be stacked layers, or ``""`` if they can.

        They cannot if another array of the layer has no stacked axes of the same sizes, as for a kernel of shape
        ``(3, 8, 4)`` beside a bias of shape ``(5, 4)``. The other arrays are looked up in ``tree``; without it, the
        result is ``""``.
        """
        sizes = tuple(w.shape[axis] for axis in stacked)
        for leaf_number, sizes_in_layer in self.siblings if tree else ():
            place = tree.frame.places[leaf_number]
            shape = getattr(tree.arrays.get(place), "shape", None)  # A model may also hold objects that are not arrays.
            if shape is None:
                continue
            possible = [tuple(shape[axis] for axis in stack) for stack in _stacks_of(shape, sizes_in_layer)]
            if sizes not in possible:
                # If no choice of axes is possible, show the leading axes as a guess.
                of_sibling = possible[0] if possible else shape[: len(shape) - len(sizes_in_layer)]
                return f"{self.source} has stacked axes of sizes {sizes} here, but {of_sibling} at {place[-1]!r}"
        return ""


def _stacks_of(shape: Numbers, sizes: Sizes) -> Iterator[Numbers]:
    """Yields each tuple of axes without which the remaining axes of ``shape`` have these ``sizes``.

    For the shape ``(3, 4, 4)`` and the sizes ``(3, 4)``, the results are ``(1,)`` and then ``(2,)``: leading axes
    first.
    """
    for stacked in combinations(range(len(shape)), max(len(shape) - len(sizes), 0)):
        rest = [n for axis, n in enumerate(shape) if axis not in stacked]
        if len(rest) == len(sizes) and all(want in (None, n) for n, want in zip(rest, sizes, strict=True)):
            yield stacked


def role_by_letters(letters: str, sizes: Any, source: str = "") -> Role:
    """Returns the role of an array of these sizes, given a letter for each axis, such as ``i`` for inputs.

    ``"wio"``, for a convolution kernel, gives the inputs ``(0, 1)`` and the outputs ``(2,)``, and the window moves
    along axis 0. The role stores ``source``, the name of the layer or of the array, as the ``line`` of its
    :class:`Use`.
    """

    def axes_with(chosen: str) -> Numbers:
        """Returns the axes whose letter is in ``chosen``."""
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
    """Returns the axes that the name of an array in a plain tree implies: ``kernel`` has the axes ``(in, out)``.

    If the name does not determine the axes, the result has empty sizes, and its ``why`` gives the reason.
    """
    letters = "io" if name in _MATRICES else "ro" if name in TABLES else ""
    return KnownAxes(role_by_letters(letters, (None,) * len(letters), name), _NOT_BY_NAME, name)


def known_by_class(treedef: Any, boxes: Mapping[int, Any], first_numbers: Sequence[int]) -> dict[int, KnownAxes]:
    """Returns a dict from leaf index to the axes of that leaf, as far as the modules in a tree determine them.

    For ``{"dense": nnx.Linear(8, 4)}``, leaf 0 is the bias of size 4, and leaf 1 is the kernel of sizes ``(8, 4)``.
    Leaves outside of modules are left out. If a module does not determine the axes of its leaves, the result still
    includes these leaves, with the reason, because the names of leaves in a module do not determine their axes.

    Args:
      treedef: The structure of the tree, whose nodes have the classes of the modules.
      boxes: The flax boxes around some of the leaves, by leaf index. These boxes are not nodes of ``treedef``.
      first_numbers: For each leaf, the index of the first leaf that is the same parameter. If the modules that share a
        parameter disagree about its axes, the axes are unknown.
    """
    known = dict[int, KnownAxes]()

    def visit(node: Any, start: int, why: str) -> None:
        """Adds the leaves of a tree node to ``known``, where ``start`` is the index of the first of these leaves.

        ``why`` is the reason to give for a leaf whose axes no layer within this node determines. Outside of modules, it
        is empty.
        """
        cls = node.node_data()[0] if node.node_data() else None  # A leaf has no node data.
        if cls is None and why:  # Keep what the layer around the leaf has already determined.
            known.setdefault(start, KnownAxes(why=why, is_class=True))
        if cls is not None and (_is_module(cls) or (why and _is_own(cls))):  # The reason names the innermost class.
            why = f"it belongs to {cls.__name__}, a class that reparax does not know"
        if cls is not None and (layer := _layer_of(cls)) is not None:
            why = f"it belongs to {layer[1]}, which does not specify its axes"
            module = node.unflatten(range(start, start + node.num_leaves))  # the layer, with leaf indices as arrays
            known.update(_axes_in_layer(*layer, module, boxes))
        start_of_child = start
        for child in node.children():  # Leaf indices follow the order of the tree.
            visit(child, start_of_child, why)
            start_of_child += child.num_leaves
        if cls is not None and layers_of_library(cls.__module__) is not None and cls.__name__ == "Shared":
            # `treedef` lacks the user's function that determines which arrays another layer reads.
            for number in range(start, start_of_child):
                if number in known and not known[number].are_of_vector:
                    why = f"it belongs to {known[number].source} in eqx.nn.Shared, so another layer may read it too"
                    known[number] = KnownAxes(Role(uses=known[number].role.uses), why, is_class=True)

    visit(treedef, 0, "")
    return _without_contradictions(known, first_numbers)


def _without_contradictions(known: Mapping[int, KnownAxes], first_numbers: Sequence[int]) -> dict[int, KnownAxes]:
    """Returns a copy of ``known`` in which the axes are unknown for each parameter whose modules disagree about them.

    An embedding table that is also the last layer is such a parameter. Callers look up the axes at the first leaf of a
    shared parameter, so only that entry is changed. ``first_numbers`` holds the index of this first leaf for each leaf.
    """
    resolved = dict(known)
    for number, axes in known.items():
        first = resolved.get(first_numbers[number], axes)
        if _uses_of(first) != _uses_of(axes):
            sources = " and ".join(x.source or "a module of another class" for x in (first, axes))
            why = f"{sources} share it, but use its axes differently"
            uses = Role(uses=(*first.role.uses, *axes.role.uses))
            resolved[first_numbers[number]] = KnownAxes(uses, why, is_class=True)
    return resolved


def _uses_of(axes: KnownAxes) -> Any:
    """Returns what modules that share an array must agree on: its number of axes, stacked axes and uses."""
    return len(axes.sizes), axes.role.stacked, [replace(use, line="") for use in axes.role.uses]


@functools.cache
def _is_module(cls: type) -> bool:
    """Returns whether ``cls`` is a module class of nnx or equinox, without importing these libraries."""
    return any(c.__name__ == "Module" and layers_of_library(c.__module__) is not None for c in cls.__mro__)


def _is_own(cls: type) -> bool:
    """Returns whether a class is neither a Python container, nor a named tuple, nor part of flax or equinox."""
    is_container = cls.__module__ in ("builtins", "collections") or hasattr(cls, "_fields")
    return not is_container and layers_of_library(cls.__module__) is None


def _computes_like(cls: type, base: type) -> bool:
    """Returns whether a layer class computes its result like its base class ``base``.

    Such a class overrides neither public methods and properties of ``base`` nor the access to its attributes. It may
    override private methods and plain attributes, such as defaults.
    """
    redefined = _redefined(cls, base)
    return redefined.keys().isdisjoint(("__call__", "__getattr__", "__getattribute__")) and not any(
        not name.startswith("_") and (callable(x) or hasattr(x, "__get__")) for name, x in redefined.items()
    )


def _redefined(cls: type, base: type) -> dict[str, Any]:
    """Maps each attribute name of ``base`` that ``cls``, or a class between the two, overrides to its new value."""
    derived = cls.__mro__[: cls.__mro__.index(base)]
    return {name: x for c in derived for name, x in vars(c).items() if hasattr(base, name)}


def _layer_of(cls: type) -> tuple[type, str, Callable[[Any], Mapping[str, Spec]]] | None:
    """Returns the known layer that ``cls`` is, or that it computes like: its class, its name and its table function.

    The result is None if neither the class nor any base class is in the tables, or if the class computes something else
    than that base class. The table function maps a layer to the :data:`Spec` of each array,
    ``{"kernel": ("io", 8, 4), ...}``.
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
    """Returns a dict from leaf index to the known axes of the layer's own arrays.

    Args:
      base: The class in the tables that the layer has or derives from.
      name: The name of that class, such as ``"nnx.Linear"``.
      arrays_of: A function that returns the :data:`Spec` of each array of the layer, by attribute name.
      module: The layer, with leaf indices in place of its arrays. If an attribute holds a module or another node in
        place of an index, its axes are unknown, because the node may compute the array from others.
      boxes: The flax boxes around leaves, by leaf index. If a box has a hook, or its class is user-defined, reading the
        box may return another array than the stored one, so the axes are unknown.
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
    """Returns whether ``box`` is an nnx variable with a hook that transforms its array whenever it is read."""
    return is_flax_instance(box, "Variable") and "on_get_value" in box.get_metadata()


def _overrides_reading(box: Any) -> bool:
    """Returns whether the class of a flax box overrides how its array is read; False if ``box`` is None."""
    if box is None:
        return False
    base = next(c for c in type(box).__mro__ if layers_of_library(c.__module__) is not None)  # flax's own class
    return (
        not _redefined(type(box), base)
        .keys()
        .isdisjoint(("get_value", "__getitem__", "__jax_array__", "__getattr__", "__getattribute__"))
    )


def _custom_function(base: type, module: Any) -> str:
    """Returns the name of an attribute with a custom function, such as ``dot_general``, or ``""`` if there is none.

    Such a function may use the arrays of the layer in any way, so their axes are unknown. Types, such as the value of
    ``dtype``, do not count.
    """
    for name, default in _defaults_of(base).items():
        x = vars(module).get(name)
        is_type = isinstance(x, type) and name.endswith("type")
        # The base module of a LoRA does not count, because the LoRA only adds its own result to the base's result.
        if callable(x) and x is not default and not is_type and name != "base_module":
            return name
    return ""


@functools.cache
def _defaults_of(base: type) -> dict[str, Any]:
    """Returns the default of each argument of a layer class by name, without initializers, which a call does not use.

    If a base class and a derived class have the same argument, the default of the derived class counts.
    """
    signatures = [inspect.signature(vars(c)["__init__"]) for c in reversed(base.__mro__[:-1]) if "__init__" in vars(c)]
    arguments = {x.name: x.default for signature in signatures for x in signature.parameters.values()}
    return {name: default for name, default in arguments.items() if "init" not in name}
