"""What stages with a formula on one array share: which arrays they act on, and with which numbers and axes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import (
    EACH,
    LAST,
    Axes,
    AxesCheck,
    are_words,
    check_front_axes,
    count_from_front,
    each_stacked,
    find_axes,
    has_names,
    map_stacked,
    numbered_fields,
    one_stacked,
    require_axes,
    require_names_fit,
    stacked_axes_error,
    why_axes_do_not_fit,
)
from reparax.core.axes_at import axes_at, misfits, stacked_at, types_to_try, with_axes
from reparax.core.calls import CallName
from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors
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
from reparax.numerics.arithmetic import is_array

T = TypeVar("T")


class Leafwise(Parametrization):
    """A stage that acts on arrays one by one."""

    where: Where = field(check_where, default=None, kw_only=True)
    stacked: Axes = field(AxesByPath(check_front_axes), default=(), kw_only=True)

    min_ndim: ClassVar[int] = 0
    """The fewest dimensions of arrays that the stage acts on by default. If this is two or more, the default also
    excludes biases and scales by name, whatever their dimensions."""
    acts_on_embeddings: ClassVar[Any] = True
    """Whether the default includes tables of embeddings, by name."""
    dtypes: ClassVar[Any] = jnp.inexact
    """The dtypes that the stage takes."""
    _takes_base: ClassVar[bool] = False
    """Whether the stage acts on the base of an adapter instead of on the adapter."""
    _may_select_nothing: ClassVar[bool] = False
    """Whether it is no error that its default takes none of the arrays of a tree."""

    _axis_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold axes. Users may give these by name or by path; in a formula they are numbers."""
    by_roles: ClassVar[Any] = {}
    """For fields of axes that nobody set, which axes of the network they are: ``{"axis": "outputs"}``."""
    needs_axes: ClassVar[bool] = True
    """Whether an array is refused if nobody knows these axes of it."""
    outside_networks: ClassVar[str] = ""
    """What lies along the last axis of arrays outside of networks, if the stage is as often for these: then the name of
    an array, which says the axes of a product, does not say its axes."""
    any_matrix: ClassVar[bool] = False
    """Whether it takes matrices as they lie, as its formula does not tell inputs from outputs."""
    transposes: ClassVar[bool] = False
    """Whether a matrix and its transposed one mean the same for the stage."""
    elementwise: ClassVar[Any] = False
    """Whether each entry of an array is computed of its own raw values, so that stacked axes do not matter."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets fields of axes take axes by path too, and remembers which fields these are."""
        super().__init_subclass__(**kwargs)
        checks_of_axes = {
            name: AxesByPath(check) for name, check in cls._checks.items() if isinstance(check, AxesCheck)
        }
        cls._checks = {**cls._checks, **checks_of_axes}
        has_axes = {name: isinstance(check, AxesByPath) for name, check in cls._checks.items()}
        cls._axis_fields = tuple(name for name, flag in has_axes.items() if flag and name != "stacked")

    def default(self, w: Array) -> bool:
        """Whether the stage acts on ``w``, by its shape and dtype, if no ``where`` is given."""
        return jnp.issubdtype(w.dtype, self.dtypes) and w.ndim >= self.min_ndim

    def refuse_leaf(self, w: Array) -> str | None:
        """Why the formula cannot take ``w`` (expected, got; what to do), or None if it can."""
        return None

    def _why_refused(self, w: Array) -> str | None:
        """Why the stage cannot act on ``w``, whose dtype it takes, or None if it can."""
        return self._axes_error(w) or self._ask(self.refuse_leaf, w)

    def _ask(self, question: Callable[[Any], T], w: Any) -> T:
        """What a method of this stage says of an array; if only its type is known, of a traced one.

        A method of yours may compute with the array. Those of this package read its shape and dtype.
        """
        if is_of_package(type(self)) or not isinstance(w, jax.ShapeDtypeStruct):
            return question(w)
        answers = list[T]()
        jax.eval_shape(lambda w: answers.append(question(w)), w)
        return answers[0]

    def _dtype_error(self, w: Array) -> str | None:
        """What is wrong with the dtype of ``w``, or None."""
        if jnp.issubdtype(w.dtype, self.dtypes):
            return None
        expected = "floating or complex" if self.dtypes is jnp.inexact else self.dtypes.__name__
        return f"expected a {expected} array, got {w.dtype}. Leave it out with `where`."

    def _axes_error(self, w: Array) -> str | None:
        """What is wrong with the axes of the fields for ``w``, or None."""
        reasons = (why_axes_do_not_fit(getattr(self, name), w, name) for name in self._axis_fields)
        return next(filter(None, reasons), None)

    def axes_in_use(self, w: Array) -> dict[str, tuple[tuple[int, ...], str]]:
        """For each field of axes with a meaning in networks, its axes of ``w``, from the front, and that meaning."""
        axes_of_field = {name: getattr(self, name) for name in self.by_roles}
        given = {name: axes for name, axes in axes_of_field.items() if axes not in (None, EACH)}
        return {name: (count_from_front(axes, w), self.by_roles[name]) for name, axes in given.items()}

    def _on_merged(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula on one array, whose axes a stage on matrices merges to two."""
        return formula

    def _map_stacked(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula on one array, applied to each of the stacked arrays."""
        return map_stacked(self.stacked_axes, self._on_merged(formula))

    @property
    def _for_merged(self) -> Self:
        """This stage as it acts on the merged array of ``_on_merged``."""
        return self

    @cached_property
    def _varying_fields(self) -> dict[str, ByPath | ByArray]:
        """The fields whose value depends on the array: numbers, and axes by path."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, ByPath | ByArray)}

    @cached_property
    def _given_axes(self) -> dict[str, Any]:
        """The axes of each field, as they are given."""
        return {name: getattr(self, name) for name in (*self._axis_fields, "stacked")}

    @cached_property
    def _axes_by_path(self) -> dict[str, ByPath]:
        """The fields of axes that are given by path."""
        return {name: axes for name, axes in self._given_axes.items() if isinstance(axes, ByPath)}

    @cached_property
    def _uses_axis_names(self) -> bool:
        """Whether any axis is given by name."""
        axes_of_fields = [x.numbers if isinstance(x, ByPath) else (x,) for x in self._given_axes.values()]
        return any(has_names(axes) for axes_of_field in axes_of_fields for axes in axes_of_field)

    @cached_property
    def unset_axes(self) -> dict[str, str]:
        """The fields of axes with a meaning in networks that nobody set, with that meaning."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: word for name, word in self.by_roles.items() if getattr(self, name) == defaults[name]}

    @cached_property
    def axes_asked(self) -> dict[str, Any]:
        """The fields of axes that are for the array's role to say, with words for them: these are given, or unset."""
        given = {name: axes for name, axes in self._given_axes.items() if are_words(axes) and name != "stacked"}
        return self.unset_axes | given

    @cached_property
    def asks_stacked(self) -> bool:
        """Whether the stacked axes are for the array's role to say."""
        if self.stacked != ():
            return are_words(self.stacked)
        if self.elementwise and not self.axes_asked:
            return False
        # Axes by number, and those that are called stacked, count all axes of the array, as nobody set ``stacked``.
        others = [axes for name, axes in self._given_axes.items() if name not in self.axes_asked]
        counts_all = any(are_words(axes, (STACKED,)) for axes in self.axes_asked.values())
        return not counts_all and all(axes in (None, EACH, LAST, ()) for axes in others)

    @property
    def lacks_axes(self) -> bool:
        """Whether nobody set axes without which the stage cannot act on an array."""
        return self.needs_axes and bool(self.unset_axes)

    @cached_property
    def stacked_axes(self) -> Numbers:
        """The stacked axes of an array, for the stage as it acts on one."""
        return find_axes(self.stacked, None)

    @cached_property
    def _typical(self) -> Self:
        """This stage with typical numbers, which do for shapes and dtypes, where they differ between arrays."""
        numbers = self._varying_fields.keys() - self._axes_by_path.keys()
        return replace(self, **dict.fromkeys(numbers, TYPICAL)) if numbers else self

    def for_array(self, path: str, w: Any) -> Self:
        """This stage with the numbers and axes for one array; functions of the array get its shape and dtype."""
        if not self._varying_fields:
            return self
        like = None if w is None else jax.ShapeDtypeStruct(w.shape, w.dtype)
        return replace(self, **{name: value.at(name, path, like) for name, value in self._varying_fields.items()})

    def _for_leaf(self, leaf: Leaf, w: Any, stacked: Numbers = ()) -> Self:
        """This stage with the numbers and axes for one array like ``w``.

        Names of stacked axes that the array does not have are ignored. ``stacked`` are axes of a type that stands for
        the array.
        """
        stage = self.for_array(leaf.path, w)
        axes = axes_at(stage, leaf, w, stacked)
        if self._uses_axis_names:
            axes = numbered_fields(stage._given_axes | axes, leaf)
        is_same = all(getattr(stage, name) == value for name, value in axes.items())
        return stage if is_same else replace(stage, **axes)

    def _what_sets_axes(self, leaf: Leaf) -> tuple[Any, ...]:
        """What the axes of this stage at an array depend on beside the array's type."""
        path = leaf.path if self._axes_by_path else None
        return path, leaf.axes if self.lacks_axes or self._uses_axis_names else None

    # Which leaves the stage acts on.

    @abstractmethod
    def sites(self, method: str, tree: Flat) -> list[Site]: ...

    def _arrays_and_stages(self, method: str, tree: Flat) -> list[tuple[Leaf, Self]]:
        """The arrays that the stage takes, each with the stage as it acts on it."""
        leaves = self._selected(method, tree.leaves(bases=self._takes_base))
        return [(leaf, self._checked_for(method, leaf)) for leaf in leaves]

    def _nodes_and_stages(self, who: CallName, tree: Flat) -> list[tuple[Leaf, Self]]:
        """The marker dicts that the stage takes, each with the stage as it acts on the array for which it stands."""
        read = reader(self, who)
        leaves = self._selected_nodes(who, self._leaves_with_nodes(who, tree), read)
        return [(leaf, self._as_read(who, leaf, leaf.reading or read(leaf))) for leaf in leaves]

    def _leaves_with_nodes(self, who: CallName, tree: Flat) -> list[Leaf]:
        """The leaves of a tree, with the marker dicts of the stage's kind in place of what is inside them."""
        return tree.with_nodes(tree.own_nodes(who, self.kind)).leaves(bases=self._takes_base)

    def _selected_nodes(self, who: CallName, leaves: Sequence[Leaf], read: Read) -> list[Leaf]:
        """The leaves that the stage selects, which must be marker dicts; if it looks at their arrays, these are read.

        Another stage of the same kind may have made some of them, on arrays that this one does not select.
        """
        if not reads_paths_only(self.where):
            _read_all(leaves, read)
        chosen = self._selected(who.method, leaves)
        for leaf in chosen:
            if not isinstance(leaf.content, Node):
                raise ValueError(
                    f"{who} selects {leaf.path!r}, which never went through init. Call `raw = p.init(params)` once, "
                    f"with the whole chain, and pass `raw`."
                )
        return chosen

    def _as_read(self, who: CallName, leaf: Leaf, reading: Reading) -> Self:
        """The stage as it acts on an array that is read, with the numbers for that array."""
        with locate_errors(who.at(leaf.path)):
            if reading.error is not None:
                raise reading.error
            return self._for_leaf(leaf, reading.effective) if self._varying_fields else reading.stage

    def _check_values_at(self, who: CallName, tree: Flat, path: str) -> None:
        read = reader(self, who)
        for leaf in self._leaves_with_nodes(who, tree):
            if leaf.path == path and isinstance(leaf.content, Node):
                self._as_read(who, leaf, read(leaf))

    def _checked_for(self, method: str, leaf: Leaf) -> Self:
        """This stage as it acts on one array; an error if it cannot take the array."""
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
        """Requires an array that this stage can take, or stacked arrays of which it can take each."""
        stacked = self.stacked_axes
        if why := stacked_axes_error(w, stacked):
            raise ValueError(why)
        stage_for_one = replace(self, stacked=()) if stacked else self
        for one_array in each_stacked(w, stacked):
            if why := stage_for_one._why_refused(one_array):
                where = f" The array is one of those along stacked={self.stacked}." if stacked else ""
                raise ValueError(f"{why}{where}")

    def _aligned(self, values: Mapping[str, Any]) -> Any:
        """The aligned main value, which has the shape of the array, or its type; None if there is none."""
        names = [name for name, declared in self.raw_values.items() if declared.main and declared.aligned]
        return next((values[name] for name in names if name in values), None)

    def _require_all(self, values: Mapping[str, Any]) -> None:
        """Requires each declared value of one array."""
        required = [name for name, declared in self.raw_values.items() if not declared.optional and name != OTHERS]
        if lacking := sorted(set(required) - values.keys()):
            raise KeyError(lacking[0])

    def _require_start(self, types: Mapping[str, Any], effective: Any) -> None:
        """Requires values of types that ``init`` would give for an array."""
        self._require_all(types)

    def _effective(self, values: Mapping[str, Array]) -> Array:
        """The array of raw values, without randomness."""
        raise NotImplementedError

    def _selected(self, method: str, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The leaves of a tree on which the stage acts."""
        who = CallName(self, method)
        chosen = select_leaves(who, self.where, leaves, partial(self._acts_by_default, who))
        if not chosen and self._may_select_nothing and self.where is None and any(leaf.is_there for leaf in leaves):
            return []
        if not chosen:
            raise none_selected_error(who, self.where, leaves, self.stacked)
        chosen = without_unmatched(who, self._varying_fields, chosen)
        # In the body of a scan over the layers, no array has their axis any more.
        if method == "init" and not isinstance(self.stacked, ByPath):
            require_axes(who, "stacked", self.stacked, chosen)
        return chosen

    def _acts_by_default(self, who: CallName, leaf: Leaf) -> bool:
        """Whether the stage acts on a main value if ``where`` is not given."""
        excludes_vectors, excludes_tables = self.min_ndim >= 2, not self.acts_on_embeddings
        if leaf.is_state or (excludes_vectors and is_bias_or_scale(leaf)) or (excludes_tables and is_table(leaf)):
            return False
        if self.changes_type and not is_array(leaf.content):
            return True  # the effective array does not show the type of the model's
        if not all(axes.matches(leaf.path) for axes in self._axes_by_path.values()):
            return False
        w = leaf.array
        with locate_errors(who.at(leaf.path)):
            stacked = stacked_at(self._typical.for_array(leaf.path, None), leaf, w)
        return stacked_axes_error(w, stacked) is None and self._ask(self.default, one_stacked(w, stacked))

    def _with_axes(self, tree: Flat) -> list[Any]:
        return with_axes(self, tree)

    def _misfits(self, tree: Flat) -> Iterable[Misfit]:
        return misfits(self, tree)


class Reading(NamedTuple):
    """What raw values say of their array.

    Attributes:
      stage: The stage there, with typical numbers.
      effective: The type of the array.
      error: What is wrong with the values, if ``init`` would not give such values for such an array.
    """

    stage: Any
    effective: Any
    error: Exception | None = None


Read = Callable[[Leaf], Reading]
"""What the values in a marker dict say; an error of any kind if the formula does not take them."""


def reader(stage: Any, who: CallName) -> Read:
    """Reads marker dicts of a stage's kind, those whose values say the same once."""
    readings = dict[Any, Reading]()

    def read(leaf: Leaf) -> Reading:
        with locate_errors(who.at(leaf.path)):
            types = leaf.content.arrays()
            group = (*stage._what_sets_axes(leaf), *types.items())
            if group not in readings:
                readings[group] = _checked(read_values(stage, leaf, types), types)
        leaf.reading = readings[group]
        return leaf.reading

    return read


def _read_all(leaves: Sequence[Leaf], read: Read) -> None:
    """Reads all marker dicts; one that alone cannot be read is of another stage of the kind, so nothing is there."""
    own, errors = [leaf for leaf in leaves if isinstance(leaf.content, Node)], list[Exception]()
    for leaf in own:
        try:
            read(leaf)
        except Exception as error:  # a formula may fail in any way on the values of another stage
            leaf.content = None
            errors.append(error)
    if len(errors) == len(own):
        raise errors[0]


def read_values(stage: Any, leaf: Leaf, types: Mapping[str, Any]) -> Reading:
    """What raw values of these types say of their array.

    If the array's layer says its axes, it says how many there are but for stacked ones: as many as fit the values.

    Raises:
      ValueError: If values of arrays that are stacked along different axes are of these types.
      Exception: Whatever the formula raises on values that it does not take, if no aligned one has the type.
    """
    aligned = stage._aligned(types)
    if aligned is not None:
        return Reading(stage._typical._for_leaf(leaf, aligned), aligned)
    candidates, found = types_to_try(stage, leaf), dict[Any, Reading]()
    for w, stacked in candidates if len(candidates) > 1 else ():
        if found and len(stacked) > len(next(iter(found.values())).stage.stacked_axes):
            break  # values of one number of axes are those of one number of stacks
        with suppress(Exception):
            reading = _read_as(stage, leaf, w, stacked, types)
            if leaf.axes.stacks(reading.effective.shape) == [stacked]:
                found.setdefault(reading.effective.shape, reading)
    if len(found) > 1:
        codes = " or ".join(repr(replace(stage, stacked=reading.stage.stacked)) for reading in found.values())
        raise ValueError(
            f"expected raw values that say along which axes layers are stacked, but they fit arrays of shapes "
            f"{' and '.join(map(str, found))}. Write {codes}."
        )
    return next(iter(found.values()), None) or _read_as(stage, leaf, *candidates[0], types)


def _checked(reading: Reading, types: Mapping[str, Any]) -> Reading:
    """The reading of values of these types, with what is wrong with them, and with the dtype that the formula gives."""
    stage, effective = reading.stage, reading.effective
    try:
        stage._require_start(types, effective)  # which says more than a formula that fails on wrong values
        if effective is stage._aligned(types):
            effective = jax.ShapeDtypeStruct(effective.shape, _type_made(stage, types).dtype)
    except Exception as error:
        return reading._replace(error=error)
    return reading._replace(effective=effective)


def _read_as(stage: Any, leaf: Leaf, w: Any, stacked: Numbers, types: Mapping[str, Any]) -> Reading:
    """What raw values of these types say, if the stage has the axes that it has for an array like ``w``."""
    stage_here = stage._typical._for_leaf(leaf, w, stacked)
    return Reading(stage_here, _type_made(stage_here, types))


def _type_made(stage: Any, types: Mapping[str, Any]) -> Any:
    """The type of the array that a stage makes of raw values."""
    return jax.eval_shape(lambda values: stage._effective(values), dict(types))
