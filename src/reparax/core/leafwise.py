"""Defines the base class of stages that select arrays, and finds the numbers and axes of a stage for each array.

A user writes one stage for a whole model, but the fields of the stage may vary between arrays. Numbers can be given by
path or by a function of the array. Axes can be given by path or by name, or they follow from the role of the array in
the network. ``Leafwise._for_leaf`` resolves all fields: it returns a stage for one array, with plain numbers and axis
indices.

``init`` and stages that act in place see the arrays themselves. Other calls see a raw tree, in which each parametrized
array is replaced by a marker dict that holds its raw values. The function from :func:`reader` infers the shape and
dtype of that array from the types of the raw values, and returns a :class:`Reading`. A :class:`Leaf` describes an array
or a marker dict. The content of a leaf for a marker dict is a :class:`Node`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property, partial
from itertools import combinations
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import (
    EACH,
    LAST,
    Axes,
    AxesCheck,
    check_front_axes,
    count_from_front,
    each_stacked,
    fields_to_numbers,
    find_axes,
    has_names,
    has_words,
    map_stacked,
    one_stacked,
    require_axes,
    require_names_fit,
    stacked_axes_error,
    why_axes_do_not_fit,
)
from reparax.core.axes_at import axes_at, misfits, stacked_at, with_axes
from reparax.core.calls import CallName
from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors, require_number
from reparax.core.config import is_of_package
from reparax.core.fields import TYPICAL, AxesByPath, ByArray, ByPath, field, without_unmatched
from reparax.core.raw import Flat, Leaf, Node
from reparax.core.roles import STACKED, Misfit, Numbers
from reparax.core.site import Site
from reparax.core.values import OTHERS
from reparax.core.where import (
    Where,
    check_where,
    is_bias_or_scale,
    is_table,
    none_selected_error,
    reads_paths_only,
    select_leaves,
)
from reparax.numerics.arithmetic import is_array, is_inexact, widened

T = TypeVar("T")


class Leafwise(Parametrization):
    """Base class for stages that select arrays by path, shape and dtype, and by default treat each array on its own."""

    where: Where = field(check_where, default=None, kw_only=True)
    stacked: Axes = field(AxesByPath(check_front_axes), default=(), kw_only=True)

    min_ndim: ClassVar[int] = 0
    """The smallest number of dimensions that an array needs to be selected by default. If ``min_ndim`` is two or more,
    the default also excludes biases and scales of any shape, which are recognized by their layer or name."""
    acts_on_embeddings: ClassVar[Any] = True
    """Whether the stage selects embedding tables (recognized by their layer or name) by default."""
    dtypes: ClassVar[Any] = jnp.inexact
    """The abstract dtype of all arrays that the stage accepts, such as ``jnp.inexact``."""
    _takes_base: ClassVar[bool] = False
    """Whether the stage acts on the base of an adapter, the model's own array, instead of on the adapter."""
    _may_select_nothing: ClassVar[bool] = False
    """Whether the default selection may be empty. For all other stages, an empty selection is an error."""

    _axis_fields: ClassVar[tuple[str, ...]] = ()
    """The names of the fields that hold axes, other than ``stacked``. Users may give these axes by name or by path.
    When a formula runs, the fields hold axis indices."""
    by_roles: ClassVar[Any] = {}
    """Maps the name of a field to what its axes mean in a network: ``{"axis": "outputs"}``. If the user does not set
    such a field, its axes come from the role of the array."""
    needs_axes: ClassVar[bool] = True
    """Whether the stage refuses an array if the axes of a field in ``by_roles`` are neither set nor known from the
    array's role in the network."""
    outside_networks: ClassVar[str] = ""
    """What the last axis holds in an array outside of a network, if the stage is often used on such arrays; otherwise
    empty. A name cannot determine the axes of such an array, because names determine axes only for matrix products."""
    any_matrix: ClassVar[bool] = False
    """Whether the stage accepts a matrix without knowing which axis holds the inputs, because the formula does not
    distinguish inputs from outputs."""
    transposes: ClassVar[bool] = False
    """Whether the stage treats a matrix and its transpose in the same way."""
    elementwise: ClassVar[Any] = False
    """Whether each entry of an array depends only on its own raw values, so that stacked axes do not matter."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets each field that holds axes also take a dict from paths to axes, and lists these in ``_axis_fields``.

        ``_checks`` maps the name of each field to the function that checks its value. The check of an inherited field
        with axes is already an ``AxesByPath``.
        """
        super().__init_subclass__(**kwargs)
        checks = cls._checks.items()
        cls._checks = {name: AxesByPath(check) if isinstance(check, AxesCheck) else check for name, check in checks}
        fields_with_axes = [name for name, check in cls._checks.items() if isinstance(check, AxesByPath)]
        cls._axis_fields = tuple(name for name in fields_with_axes if name != "stacked")

    def default(self, w: Array) -> bool:
        """Returns whether the stage acts on ``w`` by default, judged by the shape and dtype of ``w``.

        The default applies if the user gives no ``where``. If arrays are stacked, ``w`` is one of the stacked arrays.
        Biases, scales and embedding tables are excluded by their layer or name before this method is called.
        """
        return jnp.issubdtype(w.dtype, self.dtypes) and w.ndim >= self.min_ndim

    def refuse_leaf(self, w: Array) -> str | None:
        """Returns why the formula cannot take ``w``, or None if it can.

        The text says what the formula expects, what it got, and what to do.
        """
        return None

    def _why_refused(self, w: Array) -> str | None:
        """Returns why the stage cannot act on ``w``, whose dtype is already known to fit, or None if it can.

        Overrides add conditions to those of ``super()``. If arrays are stacked, this method is called for each of the
        stacked arrays.
        """
        return self._axes_error(w) or self._call_on(w, self.refuse_leaf)

    def _call_on(self, w: Any, method: Callable[[Any], T]) -> T:
        """Returns ``method(w)``, where ``method`` is ``default`` or ``refuse_leaf``, and ``w`` is an array or its type.

        A third-party method may compute with the array. If ``w`` is a type, such a method therefore gets a traced
        array. The methods of this package read only the shape and dtype, so they get ``w`` itself.
        """
        if is_of_package(type(self)) or not isinstance(w, jax.ShapeDtypeStruct):
            return method(w)
        results = list[T]()  # A traced function cannot return a Python bool or string.
        jax.eval_shape(lambda w: results.append(method(w)), w)
        return results[0]

    def _dtype_error(self, w: Array) -> str | None:
        """Returns an error text if the stage does not accept the dtype of ``w``, or None if it does."""
        if jnp.issubdtype(w.dtype, self.dtypes):
            return None
        # The names of JAX's abstract dtypes, such as `floating`, are clear to users, except for `inexact`.
        expected = "floating or complex" if self.dtypes is jnp.inexact else self.dtypes.__name__
        return f"expected a {expected} array, got {w.dtype}. Leave it out with `where`."

    def _axes_error(self, w: Array) -> str | None:
        """Returns an error text if the axes in the stage's fields do not fit ``w``, or None if they fit."""
        reasons = (why_axes_do_not_fit(getattr(self, name), w, name) for name in self._axis_fields)
        return next(filter(None, reasons), None)

    def axes_in_use(self, w: Array) -> dict[str, tuple[tuple[int, ...], str]]:
        """Maps each field in ``by_roles`` to its axes in ``w``, counted from the front, and their meaning in a network.

        For a kernel of two axes and ``axis=-1``, the result is ``{"axis": ((1,), "outputs")}``. Fields whose value is
        None or ``"each"`` are left out, because these values fit any role. :func:`check_axes` compares the axes in the
        result with the axes of the network.
        """
        axes_of_field = {name: getattr(self, name) for name in self.by_roles}
        given = {name: axes for name, axes in axes_of_field.items() if axes not in (None, EACH)}
        return {name: (count_from_front(axes, w), self.by_roles[name]) for name, axes in given.items()}

    def _on_merged(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a version of ``formula`` for arrays of any shape.

        By default, this is ``formula`` itself. A stage on matrices overrides this method: it merges the axes of the
        arguments into two axes, and splits the axes of the results again.
        """
        return formula

    def _map_stacked(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a version of ``formula`` that is applied separately to each of the arrays along the stacked axes.

        ``self`` must hold the numbers and axes for that array. The formula gets arrays without stacked axes. If the
        stage acts on matrices, these arrays are merged into matrices.
        """
        return map_stacked(self.stacked_axes, self._on_merged(formula))

    @property
    def _for_merged(self) -> Self:
        """The stage for the array whose axes ``_on_merged`` has merged, with axes of the merged array in its fields."""
        return self

    @cached_property
    def _varying_fields(self) -> dict[str, ByPath | ByArray]:
        """The fields that vary between arrays: numbers or axes given by path, and numbers given by a function."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, ByPath | ByArray)}

    @cached_property
    def _given_axes(self) -> dict[str, Any]:
        """Maps each field that holds axes, including ``stacked``, to the value from the user, or to its default."""
        return {name: getattr(self, name) for name in (*self._axis_fields, "stacked")}

    @cached_property
    def _axes_by_path(self) -> dict[str, ByPath]:
        """Maps each field whose axes are given by path, such as ``axis`` in ``WeightNorm(axis={"a": 0, "b": 1})``."""
        return {name: axes for name, axes in self._given_axes.items() if isinstance(axes, ByPath)}

    @cached_property
    def _uses_axis_names(self) -> bool:
        """Whether any axis, in any field and for any path, is given by name or by a word such as ``"outputs"``."""
        axes_of_fields = [x.numbers if isinstance(x, ByPath) else (x,) for x in self._given_axes.values()]
        return any(has_names(axes) for axes_of_field in axes_of_fields for axes in axes_of_field)

    @cached_property
    def unset_axes(self) -> dict[str, str]:
        """Maps each field in ``by_roles`` that is at its default to the role of its axes: ``{"axis": "outputs"}``."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: word for name, word in self.by_roles.items() if getattr(self, name) == defaults[name]}

    @cached_property
    def axes_from_role(self) -> dict[str, Any]:
        """Maps each field whose axes follow from the array's role to words for these axes, such as ``"outputs"``.

        These are the fields in ``by_roles`` that are unset, and the fields for which the user gave words. ``stacked``
        is left out, because it has rules of its own; see :meth:`takes_stacked_from_role`.
        """
        given = {name: axes for name, axes in self._given_axes.items() if has_words(axes) and name != "stacked"}
        return self.unset_axes | given

    @cached_property
    def takes_stacked_from_role(self) -> bool:
        """Whether the stacked axes come from the array's role in the network, if the role is known.

        The value is True, for example, in these cases:

        - ``stacked="stacked"``;
        - ``stacked`` and all other axes are unset, as in ``WeightNorm()``.

        The value is False, for example, in these cases:

        - ``stacked=0``;
        - ``WeightNorm(axis=-1)``, because its ``-1`` counts all axes of the array, and could mean another axis if
          stacked axes were not counted;
        - an elementwise stage, because stacked axes make no difference to it.
        """
        if self.stacked != ():
            return has_words(self.stacked)
        if self.elementwise and not self.axes_from_role:
            return False
        # While `stacked` is unset, axes that are given by index or as "stacked" refer to all axes of the array.
        other_axes = [axes for name, axes in self._given_axes.items() if name not in self.axes_from_role]
        counts_all = any(has_words(axes, (STACKED,)) for axes in self.axes_from_role.values())
        return not counts_all and all(axes in (None, EACH, LAST, ()) for axes in other_axes)

    @property
    def lacks_axes(self) -> bool:
        """Whether the stage needs axes that the user left unset, so that they have to come from the array's role."""
        return self.needs_axes and bool(self.unset_axes)

    @cached_property
    def stacked_axes(self) -> Numbers:
        """The indices of the stacked axes, in a stage for one array. Raises an error if an axis is still a name."""
        return find_axes(self.stacked, None)

    @cached_property
    def _with_placeholders(self) -> Self:
        """A copy of the stage that can be traced for any array, to infer shapes and dtypes only.

        Numbers that vary between arrays are replaced by a constant that every stage accepts. Axes that are given by
        path are kept, because shapes depend on axes.
        """
        numbers = self._varying_fields.keys() - self._axes_by_path.keys()
        return replace(self, **dict.fromkeys(numbers, TYPICAL)) if numbers else self

    def for_array(self, path: str, w: Any) -> Self:
        """Returns this stage with its numbers and axes for the array ``w`` at ``path``.

        ``VarNoise({"out/.*": 0.05, ".*": 0.1})`` becomes ``VarNoise(0.05)`` at ``out/kernel``. Axes that are given by
        name stay names. A function that returns a number for each array gets only the shape and dtype of ``w``. If no
        field holds a function, ``w`` may be None.
        """
        if not self._varying_fields:
            return self
        like = None if w is None else jax.ShapeDtypeStruct(w.shape, w.dtype)
        return replace(self, **{name: value.at(name, path, like) for name, value in self._varying_fields.items()})

    def _for_leaf(self, leaf: Leaf, w: Any, stacked: Numbers = ()) -> Self:
        """Returns this stage with its numbers and axes for one array, which has the shape and dtype of ``w``.

        In the result, no field is given by path, and no axis is a name or a word for its role. Names of stacked axes
        that the array does not have are ignored. If ``w`` is one of :func:`candidate_types` for the array, ``stacked``
        holds the stacked axes of ``w``. Otherwise, leave ``stacked`` out, because the stacked axes follow from ``w``.
        """
        stage = self.for_array(leaf.path, w)
        axes = axes_at(stage, leaf, w, stacked)
        if self._uses_axis_names:
            axes = fields_to_numbers(stage._given_axes | axes, leaf)
        is_same = all(getattr(stage, name) == value for name, value in axes.items())
        return stage if is_same else replace(stage, **axes)

    def _axes_key(self, leaf: Leaf) -> tuple[Any, ...]:
        """Returns a hashable key for everything besides the array's type that determines the axes of this stage.

        Arrays with equal keys and types share one :class:`Reading`. The key consists of the path and the known axes of
        the array. If the axes of the stage do not depend on one of them, it is replaced by None, so that more arrays
        share a reading.
        """
        path = leaf.path if self._axes_by_path else None
        return path, leaf.axes if self.lacks_axes or self._uses_axis_names else None

    # The methods below select the leaves that the stage acts on.

    @abstractmethod
    def sites(self, method: str, tree: Flat) -> list[Site]:
        """Returns one :class:`Site`, a stage at its arrays, for each formula call in ``method``, such as ``"apply"``.

        In ``init``, ``tree`` holds the arrays themselves. In later calls, it holds the marker dicts that replace them.
        """

    def _arrays_and_stages(self, method: str, tree: Flat) -> list[tuple[Leaf, Self]]:
        """Returns each selected array with the stage for it. Used in ``init`` and for stages without marker dicts."""
        leaves = self._selected(method, tree.leaves(bases=self._takes_base))
        return [(leaf, self._checked_for(method, leaf)) for leaf in leaves]

    def _nodes_and_stages(self, who: CallName, tree: Flat) -> list[tuple[Leaf, Self]]:
        """Returns each selected marker dict, which holds raw values, with the stage for the array that it represents.

        Methods other than ``init`` use this. In each returned leaf, ``array`` is the type of the represented array.
        """
        read = reader(self, who)
        leaves = self._selected_nodes(who, self._leaves_with_nodes(who, tree), read)
        return [(leaf, self._stage_for_node(who, leaf, leaf.reading or read(leaf))) for leaf in leaves]

    def _leaves_with_nodes(self, who: CallName, tree: Flat) -> list[Leaf]:
        """Returns the leaves of a tree, where each dict of this stage's raw values counts as one leaf."""
        return tree.with_nodes(tree.own_nodes(who, self.kind)).leaves(bases=self._takes_base)

    def _selected_nodes(self, who: CallName, leaves: Sequence[Leaf], read: Read) -> list[Leaf]:
        """Returns the leaves that the stage selects; raises an error if the array of such a leaf has no raw values.

        Some marker dicts may come from another stage of the same class, whose arrays this stage does not select. If the
        selection depends on more than paths, the type of each represented array is inferred first. A leaf for which
        this fails loses its content, so it is not selected.
        """
        if not reads_paths_only(self.where):
            _read_nodes(leaves, read)
        chosen = self._selected(who.method, leaves)
        for leaf in chosen:
            if not isinstance(leaf.content, Node):
                raise ValueError(
                    f"{who} selects {leaf.path!r}, which never went through init. Call `raw = p.init(params)` once, "
                    f"with the whole chain, and pass `raw`."
                )
        return chosen

    def _stage_for_node(self, who: CallName, leaf: Leaf, reading: Reading) -> Self:
        """Returns the stage for the array that a marker dict represents. Raises the error in ``reading``, if any."""
        with locate_errors(who.at(leaf.path)):
            if reading.error is not None:
                raise reading.error
            # Several arrays may share `reading`, so its stage has placeholders for numbers that vary between arrays.
            return self._for_leaf(leaf, reading.effective) if self._varying_fields else reading.stage

    def _check_values_at(self, who: CallName, tree: Flat, path: str) -> None:
        """Raises an error if the raw values at ``path`` do not have the names and shapes that ``init`` would give."""
        read = reader(self, who)
        for leaf in self._leaves_with_nodes(who, tree):
            if leaf.path == path and isinstance(leaf.content, Node):
                self._stage_for_node(who, leaf, read(leaf))

    def _checked_for(self, method: str, leaf: Leaf) -> Self:
        """Returns this stage with its numbers and axes for an array; raises an error if it cannot take the array.

        The array is the content of ``leaf``. Errors name ``method``, the method of the chain.
        """
        w = leaf.content
        with locate_errors(CallName(self, method, (leaf.path,))):
            if why := self._dtype_error(w):
                raise ValueError(why)
            stage = self._for_leaf(leaf, w)
            if self._uses_axis_names and leaf.axes.names is not None:
                require_names_fit(leaf.axes.names, w)
            stage._require_taken(w)
        return stage

    def _require_taken(self, w: Any) -> None:
        """Raises a ValueError unless this stage, which holds the numbers and axes for ``w``, can take ``w``.

        If ``w`` has stacked axes, the stage must be able to take each of the stacked arrays. If their entries are
        known, the stacked arrays are checked one by one, because a stage may refuse certain entries.
        """
        stacked = self.stacked_axes
        if why := stacked_axes_error(w, stacked):
            raise ValueError(why)
        stage_for_one = replace(self, stacked=()) if stacked else self
        for one_array in each_stacked(w, stacked):
            if why := stage_for_one._why_refused(one_array):
                where = f" This applies to one of the arrays stacked along stacked={self.stacked}." if stacked else ""
                raise ValueError(f"{why}{where}")

    def _aligned_value(self, values: Mapping[str, Any]) -> Any:
        """Returns the raw value declared as main and aligned, or None if ``values`` holds no such value.

        Such a value, for example ``v`` of :class:`WeightNorm`, has the axes and the shape of the array itself, so the
        shape is known without tracing. The dtypes of the value and the array may differ. ``values`` may hold types
        instead of arrays.
        """
        names = [name for name, declared in self.raw_values.items() if declared.main and declared.aligned]
        return next((values[name] for name in names if name in values), None)

    def _require_all(self, values: Mapping[str, Any]) -> None:
        """Raises an error if the raw values of one array lack a value that the class declares and that is not optional.

        Raises:
          KeyError: If a value is missing. The error names the first missing value, as if a formula had looked it up.
        """
        required = [name for name, declared in self.raw_values.items() if not declared.optional and name != OTHERS]
        if missing := sorted(set(required) - values.keys()):
            raise KeyError(missing[0])

    def _require_initial_types(self, types: Mapping[str, Any], effective: Any) -> None:
        """Raises an error unless ``init`` of an array of the type ``effective`` may return raw values of these types.

        This method checks only the names of the values. ``Reparametrization`` overrides it to compare shapes too.
        """
        self._require_all(types)

    def _array_for_type(self, values: Mapping[str, Array]) -> Array:
        """Returns any array with the shape and dtype of the effective array that the raw values represent."""
        raise NotImplementedError

    def _selected(self, method: str, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns the leaves, arrays or marker dicts, that the stage acts on.

        ``where`` selects these leaves; without ``where``, the default selection applies. A field that is given by path
        also limits the selection to paths for which it has a value: ``VarNoise({"out/.*": 0.1})`` acts only on arrays
        below ``out``. ``method`` is the method of the chain, such as ``"init"``.

        Raises:
          ValueError: If no leaf is selected. If the class sets ``_may_select_nothing``, an empty default selection is
            allowed, but not in a tree without any array.
        """
        who = CallName(self, method)
        chosen = select_leaves(who, self.where, leaves, partial(self._acts_by_default, who))
        if not chosen and self._may_select_nothing and self.where is None and any(leaf.is_there for leaf in leaves):
            return []
        if not chosen:
            raise none_selected_error(who, self.where, leaves, self.stacked)
        chosen = without_unmatched(who, self._varying_fields, chosen)
        # Only `init` requires these axes, because later calls may run inside a scan over the layers, whose body gets
        # arrays without the layer axis.
        if method == "init" and not isinstance(self.stacked, ByPath):
            require_axes(who, "stacked", self.stacked, chosen)
        return chosen

    def _acts_by_default(self, who: CallName, leaf: Leaf) -> bool:
        """Returns whether the stage acts on a plain array or main value, ``leaf``, if the user gives no ``where``.

        The default selection excludes:

        - model state;
        - biases, scales and tables, if the class excludes these;
        - arrays whose path no expression matches in a field that gives axes by path;
        - arrays for which :meth:`default` returns False.
        """
        excludes_vectors, excludes_tables = self.min_ndim >= 2, not self.acts_on_embeddings
        if leaf.is_state or (excludes_vectors and is_bias_or_scale(leaf)) or (excludes_tables and is_table(leaf)):
            return False
        if self.changes_type and not is_array(leaf.content):
            return True  # Only the type of the effective array is known, and `default` needs that of the model's array.
        if not all(axes.matches(leaf.path) for axes in self._axes_by_path.values()):
            return False
        w = leaf.array  # A marker dict has been read by now, so `w` is the type of the array that it represents.
        with locate_errors(who.at(leaf.path)):
            stacked = stacked_at(self._with_placeholders.for_array(leaf.path, None), leaf, w)
        return stacked_axes_error(w, stacked) is None and self._call_on(one_stacked(w, stacked), self.default)

    def _checked_number(self, method: str, values: Mapping[str, Any]) -> Array:
        """Returns the scalar that a formula such as ``penalty_leaf`` computes from raw values, in float32 or wider.

        ``method`` is the name of the formula. An error is raised unless the formula returns a real scalar. If arrays
        are stacked, the formula is called for each of them, and the result has one number for each.
        """
        wide_values = jax.tree.map(lambda x: widened(x) if is_inexact(x) else x, dict(values))

        def number_of_one(values_of_one: dict[str, Any]) -> Array:
            number = getattr(self, method)(values_of_one)
            require_number(method, number)
            return jnp.asarray(number)

        return self._map_stacked(number_of_one)(wide_values)

    def _with_axes(self, tree: Flat) -> list[Any]:
        """Returns the stages, usually one, that replace this stage, with axis indices from the roles in ``tree``."""
        return with_axes(self, tree)

    def _misfits(self, tree: Flat) -> Iterable[Misfit]:
        """Returns a :class:`Misfit` for each axis of this stage that contradicts the roles of arrays in ``tree``."""
        return misfits(self, tree)


class Reading(NamedTuple):
    """The properties of the represented array, such as shape and dtype, inferred from the types of its raw values.

    Attributes:
      stage: The stage with the axes for that array. Numbers that vary between arrays are replaced by placeholders.
      effective: The shape and dtype of the effective array.
      error: The error to raise if ``init`` would not give such raw values for such an array, and otherwise None.
    """

    stage: Any
    effective: Any
    error: Exception | None = None


Read = Callable[[Leaf], Reading]
"""A function that infers the array that a leaf's marker dict represents. Any error of the formula is raised."""


def reader(stage: Any, who: CallName) -> Read:
    """Returns a function that infers the array that a marker dict represents, and stores this reading in its leaf.

    Marker dicts share one reading if their raw values have the same types and the stage has the same axes for them. So
    a model with a hundred equal layers traces the formula only once.
    """
    readings = dict[Any, Reading]()

    def read(leaf: Leaf) -> Reading:
        """Returns the :class:`Reading` of the marker dict of one leaf. Errors name the path of the leaf."""
        with locate_errors(who.at(leaf.path)):
            types = leaf.content.arrays()
            key = (*stage._axes_key(leaf), *types.items())
            if key not in readings:
                readings[key] = _check_reading(read_values(stage, leaf, types), types)
        leaf.reading = readings[key]
        return leaf.reading

    return read


def _read_nodes(leaves: Sequence[Leaf], read: Read) -> None:
    """Infers the array that each marker dict (dict of raw values) represents, and stores the result in its leaf.

    If this fails, the marker dict belongs to another stage of the same class. The ``content`` of its leaf is then set
    to None, so that the leaf is never selected. If it fails for every marker dict, the first error is raised.
    """
    leaves_with_nodes, errors = [leaf for leaf in leaves if isinstance(leaf.content, Node)], list[Exception]()
    for leaf in leaves_with_nodes:
        try:
            read(leaf)
        except Exception as error:  # A formula may raise any error on another stage's values.
            leaf.content = None
            errors.append(error)
    if len(errors) == len(leaves_with_nodes):
        raise errors[0]


def read_values(stage: Any, leaf: Leaf, types: Mapping[str, Any]) -> Reading:
    """Returns the type of the array that raw values of these types represent, and the stage for it, as a Reading.

    If the stage declares an aligned main value, this value has the shape of the array. Otherwise, the formula is traced
    on the raw values, for which the stage needs its axes. If the axes come from the layer of the array, and the stacked
    axes are unknown, each of :func:`candidate_types` is tried. The right candidate leads to an effective array whose
    only possible stacked axes are those of the candidate.

    Raises:
      ValueError: If raw values of these types fit several arrays that are stacked along different axes.
      Exception: Whatever the formula raises for raw values that it cannot take. If the stage declares an aligned main
        value, no formula is traced, so no such error occurs.
    """
    aligned = stage._aligned_value(types)
    if aligned is not None:
        return Reading(stage._with_placeholders._for_leaf(leaf, aligned), aligned)
    candidates, found = candidate_types(stage, leaf), dict[Any, Reading]()
    for w, stacked in candidates if len(candidates) > 1 else ():
        # Candidates with fewer stacked axes come first. The raw values determine the number of stacked axes, so once a
        # candidate fits, only candidates with the same number of stacked axes are tried.
        if found and len(stacked) > len(next(iter(found.values())).stage.stacked_axes):
            break
        with suppress(Exception):  # A formula may raise any error with wrong stacked axes.
            reading = _read_as(stage, leaf, w, stacked, types)
            if leaf.axes.possible_stacks(reading.effective.shape) == [stacked]:
                found.setdefault(reading.effective.shape, reading)
    if len(found) > 1:
        codes = " or ".join(repr(replace(stage, stacked=reading.stage.stacked)) for reading in found.values())
        raise ValueError(
            f"expected raw values that determine the stacked axes, but these fit arrays of shapes "
            f"{' and '.join(map(str, found))}. Write {codes} to set the stacked axes."
        )
    # A single candidate needs no comparison. If no candidate fits, the candidate without stacked axes raises the error.
    return next(iter(found.values()), None) or _read_as(stage, leaf, *candidates[0], types)


def candidate_types(stage: Any, leaf: Leaf) -> list[tuple[Any, Numbers]]:
    """Returns the types that an array may have if only its raw values are known, each with its stacked axes.

    The types are used only to find the axes of the stage, so each unknown size is set to 2. For a layer of shape
    ``(3, 4)``, the first type has the shape ``(3, 4)``. The types with one stacked axis follow, ``(2, 3, 4)``,
    ``(3, 2, 4)`` and ``(3, 4, 2)``, and then the types with two and three stacked axes. If the axes of the stage do not
    depend on the array, the only type is None.
    """
    if not stage.lacks_axes:
        return [(None, ())]
    given = find_axes(stage.stacked, leaf)
    sizes = [2 if size is None else size for size in leaf.axes.sizes] or [2, 2]  # If nothing is known, assume a matrix.
    counts = range(4) if leaf.axes.are_of_layer and not given else ()  # No model stacks along more than three axes.
    stacks = [stack for count in counts for stack in combinations(range(len(sizes) + count), count)] or [given]
    types = list[tuple[Any, Numbers]]()
    for stacked in stacks:
        shape = list(sizes)
        for axis in stacked:
            shape.insert(axis, 2)
        types.append((jax.ShapeDtypeStruct(tuple(shape), jnp.float32), stacked))
    return types


def _check_reading(reading: Reading, types: Mapping[str, Any]) -> Reading:
    """Returns the reading with an ``error`` if raw values of these types are wrong, and otherwise with the right dtype.

    A raw value that is aligned with the array has its shape, but may have another dtype. In this case, the formula is
    traced to find the dtype of the array.
    """
    stage, effective = reading.stage, reading.effective
    try:
        stage._require_initial_types(types, effective)  # A formula on wrong values would give less helpful errors.
        if effective is stage._aligned_value(types):
            effective = jax.ShapeDtypeStruct(effective.shape, _effective_type(stage, types).dtype)
    except Exception as error:
        return reading._replace(error=error)
    return reading._replace(effective=effective)


def _read_as(stage: Any, leaf: Leaf, w: Any, stacked: Numbers, types: Mapping[str, Any]) -> Reading:
    """Returns the :class:`Reading` of raw values of these types for an array that has the axes of ``w``."""
    stage_here = stage._with_placeholders._for_leaf(leaf, w, stacked)
    return Reading(stage_here, _effective_type(stage_here, types))


def _effective_type(stage: Any, types: Mapping[str, Any]) -> Any:
    """Returns the type of the effective array that a stage computes from raw values of these types."""
    return jax.eval_shape(lambda values: stage._array_for_type(values), dict(types))
