"""The base of stages with a formula on one array: which arrays they act on, and with which numbers and axes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.names import AxisNames, names_of_places, require_names_fit
from reparax._axes.numbers import (
    AXIS_CHECKS,
    Axes,
    check_front_axes,
    find_axes,
    has_names,
    number_axes,
    out_of_bounds,
    require_axes,
)
from reparax._axes.stacked import each_stacked, lacks_axes, map_stacked, one_stacked, stacked_sizes
from reparax._core.algebra import AtSites, call
from reparax._core.keys import split_key
from reparax._core.renamed import old_axis_fields
from reparax._core.value import argument
from reparax._stage.varied import TYPICAL, ByArray, ByPath, without_unmatched
from reparax._stage.where import (
    AllBut,
    Candidate,
    Selected,
    Where,
    check_where,
    choose,
    is_bias_or_scale,
    is_state,
    is_table,
    require_known,
)
from reparax._tree.flat import Flat, nest
from reparax._tree.markers import locate_errors
from reparax._tree.paths import Names, is_array
from reparax._tree.raw import Slot


class Leafwise(AtSites):
    """A stage that acts on arrays one by one."""

    where: Where = argument(check_where, default=None, kw_only=True)
    stacked: Axes = argument(check_front_axes, default=(), kw_only=True)

    min_ndim: ClassVar[int] = 0
    """The fewest dimensions of arrays that the stage acts on by default. If this is two or more, the default also
    excludes biases and scales by name, whatever their dimensions."""
    tables: ClassVar[bool] = True
    """Whether the default includes tables of embeddings, by name."""
    dtypes: ClassVar[Any] = jnp.inexact
    """The dtypes that the stage takes."""
    _takes_base: ClassVar[bool] = False
    """Whether the stage acts on the base of an adapter instead of on the adapter."""

    _axis_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold axes. Users may give these by name; in a formula they are numbers."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checked = tuple(name for name, check in cls._checks.items() if check in AXIS_CHECKS)
        cls._axis_fields = (*checked, *old_axis_fields(cls))

    def default(self, w: Array) -> bool:
        """Whether the stage acts on ``w``, by its shape and dtype, if no ``where`` is given."""
        return jnp.issubdtype(w.dtype, self.dtypes) and w.ndim >= self.min_ndim

    def refuse_leaf(self, w: Array) -> str | None:
        """Why the formula cannot take ``w`` (expected, got; what to do), or None if it can."""
        del w
        return None

    def _refuse(self, w: Array) -> str | None:
        """Why the stage cannot act on ``w``, or None if it can."""
        return self._wrong_dtype(w) or self._out_of_bounds(w) or self.refuse_leaf(w)

    def _wrong_dtype(self, w: Array) -> str | None:
        """What is wrong with the dtype of ``w``, or None."""
        if jnp.issubdtype(w.dtype, self.dtypes):
            return None
        wanted = "floating or complex" if self.dtypes is jnp.inexact else self.dtypes.__name__
        return f"expected a {wanted} array, got {w.dtype}. Leave it out with `where`."

    def _out_of_bounds(self, w: Array) -> str | None:
        """What is wrong with the axes of the fields for ``w``, or None."""
        reasons = (out_of_bounds(getattr(self, name), w, name) for name in self._axis_fields if name in self._checks)
        return next(filter(None, reasons), None)

    @property
    def _asks_functions(self) -> bool:
        asks = callable(self.where) and not isinstance(self.where, Selected | AllBut)
        return asks or any(isinstance(number, ByArray) for number in self._varied.values())

    def _present(self, method: str, tree: Flat) -> list[tuple[Names, Slot, AxisNames | None]]:
        """The place, the description and the axis names of each array of ``tree`` that the stage acts on."""
        slots, names = tree.slots(bases=self._takes_base), self._axis_names(tree)
        present = {place: is_array(x) for place, x in tree.arrays.items()}
        chosen = self._selected(method, tree, slots, names, present, lambda place: tree.arrays[place])
        return [(place, slots[place], names[place]) for place in chosen]

    def _selected(
        self,
        method: str,
        tree: Flat,
        slots: Mapping[Names, Slot],
        names: Mapping[Names, AxisNames | None],
        present: Mapping[Names, bool],
        array: Callable[[Names], Any],
        hidden: Collection[Names] = (),
    ) -> list[Names]:
        """The places on which the stage acts.

        ``array`` gives the array at a place, or its type; at ``hidden`` places, it is not the one that the model has.
        """
        who = call(self, method)

        def candidate(at: Names) -> Candidate:
            def by_default() -> bool:
                return self._by_default(who, None if at in hidden else array(at), slots[at], names[at])

            return Candidate(slots[at], present[at], lambda: array(at), by_default)

        require_known(who, self.where, list(slots.values()), nest(tree))
        state = dict(zip(tree.frame.places, is_state(tree.frame.skeleton), strict=True))
        chosen = choose(who, self.where, list(map(candidate, slots)), [state[tree.root(at)] for at in slots])
        chosen = without_unmatched(who, self._varied, chosen, [slot.path for slot in slots.values()])
        found = [at for at, flag in zip(slots, chosen, strict=True) if flag]
        if method == "init":  # in the body of a scan over the layers, no array has their axis any more
            require_axes(who, "stacked", self.stacked, [names[at] for at in found])
        return found

    def _axis_names(self, tree: Flat) -> dict[Names, AxisNames | None]:
        """The axis names of each array, if this stage needs any."""
        asks = self._named_axes or has_names(self.stacked)
        return names_of_places(tree) if asks else dict.fromkeys(tree.arrays)

    def _over(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula, mapped over the stacked axes."""
        return map_stacked(self._places(None), formula)

    def _by_default(self, who: str, w: Any, slot: Slot, names: AxisNames | None) -> bool:
        """Whether the stage takes an array of the type of ``w``; if that is None, it has taken the array already."""
        if (self.min_ndim >= 2 and is_bias_or_scale(slot)) or (not self.tables and is_table(slot)):
            return False
        if w is None:
            return True
        with locate_errors(f"{who} at {slot.path!r}"):
            stacked = self._places(names)
        return lacks_axes(w, stacked) is None and self.default(one_stacked(w, stacked))

    @property
    def _varied(self) -> dict[str, ByPath | ByArray]:
        """The fields whose number differs from array to array."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, ByPath | ByArray)}

    def for_array(self, path: str, w: Any) -> Self:
        """This stage with the numbers for one array; functions of the array get its shape and dtype."""
        if not (varied := self._varied):
            return self
        like = None if w is None else jax.ShapeDtypeStruct(w.shape, w.dtype)
        return replace(self, **{name: value.at(path, like) for name, value in varied.items()})

    @property
    def _typical(self) -> Self:
        """This stage with a placeholder for each number that varies, to ask it for shapes and dtypes."""
        varied = self._varied
        return replace(self, **dict.fromkeys(varied, TYPICAL)) if varied else self

    def _taking(self, who: str, path: str, w: Any, names: AxisNames | None) -> Self:
        """This stage for one array; raises an error if it cannot take the array."""
        with locate_errors(who):
            own = self.for_array(path, w)
            stage = own._numbered(names)
            if stage is not own and names is not None:
                require_names_fit(names, w)
            places = stage._places(names)
            reason = stage._wrong_dtype(w) or lacks_axes(w, places)
            for one in each_stacked(w, places) if reason is None else ():
                reason = reason or stage._unstacked._refuse(one)
        if reason is not None:
            raise ValueError(f"{who}: {reason}")
        return stage

    @property
    def _named_axes(self) -> dict[str, Any]:
        """The fields that give axes by name."""
        axes = {name: getattr(self, name) for name in self._axis_fields}
        return {name: given for name, given in axes.items() if has_names(given)}

    def _numbered(self, names: AxisNames | None) -> Self:
        """This stage for an array of these axis names."""
        if not self._named_axes and not has_names(self.stacked):
            return self
        places = self._places(names)
        rest = None if names is None else tuple(name for i, name in enumerate(names) if i not in places)
        axes = {name: number_axes(given, rest) for name, given in self._named_axes.items()}
        return replace(self, **axes, stacked=places)

    def _each_key(self, key: Array, w: Array) -> Array:
        """A key for each of the stacked arrays."""
        places = self._places(None)
        return split_key(key, stacked_sizes(w, places)) if places else key

    @property
    def _unstacked(self) -> Self:
        """This stage for one of the stacked arrays."""
        return self if self.stacked == () else replace(self, stacked=())

    def _places(self, names: AxisNames | None) -> tuple[int, ...]:
        """The stacked axes of an array of these axis names; names that it does not have are ignored."""
        return find_axes(self.stacked, names)
