"""What stages with a formula on one array share: which arrays they act on, and with which numbers and axes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import (
    AXIS_CHECKS,
    EACH,
    Axes,
    AxisNames,
    AxisNumbers,
    check_front_axes,
    count_from_front,
    each_stacked,
    find_axes,
    has_names,
    map_stacked,
    names_of_places,
    number_axes,
    one_stacked,
    require_axes,
    require_names_fit,
    stacked_axes_error,
    why_axes_do_not_fit,
)
from reparax.core.bound import Bound
from reparax.core.calls import CallName
from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors, no_own_node_error
from reparax.core.fields import TYPICAL, AxesByPath, ByArray, ByPath, field, without_unmatched
from reparax.core.known import asks_axes, known_stack, types_to_try, with_known_axes
from reparax.core.paths import Names, type_of
from reparax.core.raw import Flat, Leaf, Node, empty_nodes, nest
from reparax.core.roles import Misfit
from reparax.core.where import (
    AllBut,
    Selected,
    Where,
    by_path,
    check_where,
    choose,
    chose_nothing_error,
    is_bias_or_scale,
    is_table,
    require_known,
)
from reparax.core.with_axes import Roles, misfits, with_axes
from reparax.numerics.arithmetic import is_array


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

    _axis_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold axes. Users may give these by name or by path; in a formula they are numbers."""
    by_roles: ClassVar[Any] = {}
    """For fields of axes that nobody set, which axes of the network they are: ``{"axis": "outputs"}``."""
    needs_axes: ClassVar[bool] = True
    """Whether an array is refused if nobody knows these axes of it."""
    any_matrix: ClassVar[bool] = False
    """Whether it takes matrices as they lie, as its formula does not tell inputs from outputs."""
    transposes: ClassVar[bool] = False
    """Whether a matrix and its transposed one mean the same for the stage."""
    elementwise: ClassVar[Any] = False
    """Whether each entry of an array is computed of its own raw values, so that stacked axes do not matter."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._checks = {
            name: AxesByPath(check) if check in AXIS_CHECKS else check for name, check in cls._checks.items()
        }
        cls._axis_fields = tuple(
            name for name, check in cls._checks.items() if isinstance(check, AxesByPath) and name != "stacked"
        )

    def default(self, w: Array) -> bool:
        """Whether the stage acts on ``w``, by its shape and dtype, if no ``where`` is given."""
        return jnp.issubdtype(w.dtype, self.dtypes) and w.ndim >= self.min_ndim

    def refuse_leaf(self, w: Array) -> str | None:
        """Why the formula cannot take ``w`` (expected, got; what to do), or None if it can."""
        del w
        return None

    def _why_refused(self, w: Array) -> str | None:
        """Why the stage cannot act on ``w``, whose dtype it takes, or None if it can."""
        return self._axes_error(w) or self.refuse_leaf(w)

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
        axes_and_word = {name: (getattr(self, name), word) for name, word in self.by_roles.items()}
        return {
            name: (count_from_front(axes, w), word)
            for name, (axes, word) in axes_and_word.items()
            if axes not in (None, EACH)
        }

    def _on_one(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula as one on an array without stacked axes, and on its raw values."""
        return formula

    def _over(self, stacked: AxisNumbers, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula on one array, applied to each of the stacked arrays."""
        return map_stacked(stacked, self._on_one(formula))

    @property
    def _alone(self) -> Self:
        """This stage for what ``_on_one`` gives the formula."""
        return self

    @cached_property
    def _varied(self) -> dict[str, ByPath | ByArray]:
        """The fields that differ from array to array: numbers, and axes by path."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, ByPath | ByArray)}

    @cached_property
    def _by_path(self) -> dict[str, ByPath]:
        """Those of them that hold axes."""
        axes = {name: self._varied.get(name) for name in (*self._axis_fields, "stacked")}
        return {name: value for name, value in axes.items() if isinstance(value, ByPath)}

    @cached_property
    def _asks_names(self) -> bool:
        """Whether any axis is given by name."""
        axes_of_fields = [getattr(self, name) for name in (*self._axis_fields, "stacked")]
        return any(has_names(axes) for x in axes_of_fields for axes in (x.numbers if isinstance(x, ByPath) else (x,)))

    @cached_property
    def _same_at_all(self) -> tuple[Self, AxisNumbers] | None:
        """What :meth:`_arranged` returns for each array, if it is the same for all."""
        differ = self._varied or self._asks_names or asks_axes(self)
        return None if differ else (self, find_axes(self.stacked, None))

    def for_array(self, path: str, w: Any) -> Self:
        """This stage with the numbers and axes for one array; functions of the array get its shape and dtype."""
        if not self._varied:
            return self
        like = None if w is None else jax.ShapeDtypeStruct(w.shape, w.dtype)
        return replace(self, **{name: value.at(path, like) for name, value in self._varied.items()})

    def at_path(self, path: str) -> Self | None:
        """This stage with the axes for one array; None if they are given by path, but not for this one."""
        if not self._by_path:
            return self
        if not all(axes.matching(path) for axes in self._by_path.values()):
            return None
        return replace(self, **{name: axes.at(path, None) for name, axes in self._by_path.items()})

    # Which leaves the stage acts on.

    @abstractmethod
    def bind(self, method: str, tree: Flat) -> list[Bound]: ...

    def _arrays(self, method: str, tree: Flat) -> Iterator[tuple[Leaf, CallName, Self, AxisNumbers]]:
        """The arrays of the tree that the stage takes, and the stage as it acts on each; but for ``init``, by types."""
        names, leaves = self._names_of(tree), tree.leaves(bases=self._takes_base)
        for leaf in leaves if method != "init" else ():
            leaf.content = type_of(leaf.content) if is_array(leaf.content) else leaf.content
        for leaf in self._selected(method, tree, leaves):
            who = CallName(self, method, (leaf.path,))
            yield leaf, who, *self._arranged_for(who, leaf.content, leaf, names[leaf.place])

    def _effective_type(self, stacked: AxisNumbers, types: Mapping[str, Any]) -> Any:
        """The type of the array of raw values of these types: that of an aligned main value, if there is one."""
        if (aligned := self._aligned_type(types)) is not None:
            return aligned
        return jax.eval_shape(lambda values: self._effective(stacked, values), dict(types))

    def _aligned_type(self, types: Mapping[str, Any]) -> Any:
        """The type of an aligned main value; None if there is none."""
        names = [name for name, declared in self.raw_values.items() if declared.main and declared.aligned]
        return next((types[name] for name in names if name in types), None)

    def _effective(self, stacked: AxisNumbers, values: Mapping[str, Array]) -> Array:
        """The array of raw values, without randomness."""
        raise NotImplementedError

    def _selected(
        self,
        method: str,
        tree: Flat,
        leaves: Sequence[Leaf],
        look: Callable[[Leaf], Any] | None = None,
        stacks: Mapping[Names, Any] | None = None,
    ) -> list[Leaf]:
        """Those of the leaves of ``tree`` on which the stage acts.

        ``look`` gives an array or its type; ``stacks`` gives the stacked axes at each place, if a network says them.
        """
        who, where, names = CallName(self, method), self.where, self._names_of(tree)
        look = look or (lambda leaf: leaf.content)

        def by_default(leaf: Leaf) -> bool:
            if tree.root(leaf.place) in tree.frame.state:
                return False
            if (self.min_ndim >= 2 and is_bias_or_scale(leaf)) or (not self.acts_on_embeddings and is_table(leaf)):
                return False
            # After a stage that changes types, the effective array does not show the type of the model's.
            if not (is_array(leaf.content) or not self.changes_type):
                return True
            if (stage := self.at_path(leaf.path) if self._by_path else self) is None:
                return False
            w = look(leaf)
            with locate_errors(who.at(leaf.path)):
                stacked = find_axes(stage.stacked if stacks is None else stacks[leaf.place], names[leaf.place])
                stacked = stacked or (known_stack(stage, leaf, w) if stacks is None else ())
            return stacked_axes_error(w, stacked) is None and self.default(one_stacked(w, stacked))

        if isinstance(where, Selected | AllBut):
            require_known(who, where, leaves, empty_nodes(nest(tree)))
        chosen = choose(who, where, leaves, by_default, look)
        if not chosen and not self._may_choose_nothing(leaves):
            raise chose_nothing_error(who, where, leaves, self.stacked)
        chosen = without_unmatched(who, self._varied, chosen)
        # In the body of a scan over the layers, no array has their axis any more.
        if method == "init" and not isinstance(self.stacked, ByPath):
            require_axes(who, "stacked", self.stacked, [names[leaf.place] for leaf in chosen])
        return chosen

    def _may_choose_nothing(self, leaves: Sequence[Leaf]) -> bool:
        """Whether it is no error that the stage acts on none of these leaves."""
        del leaves
        return False

    def _names_of(self, tree: Flat) -> dict[Names, AxisNames | None]:
        """The axis names of each array, if this stage needs any."""
        return names_of_places(tree) if self._asks_names else dict.fromkeys(tree.arrays)

    def _arranged(
        self, leaf: Leaf, w: Any, names: AxisNames | None, *, typical: bool = False
    ) -> tuple[Self, AxisNumbers]:
        """This stage with the numbers and axes of one array like ``w``, and its stacked axes; or with typical numbers.

        Shapes and dtypes do not depend on the numbers. Names of stacked axes that an array does not have are ignored.
        """
        if self._same_at_all is not None:
            return self._same_at_all
        path = leaf.path
        if lost := [name for name, axes in self._by_path.items() if not axes.matching(path)]:
            name, value = lost[0], self._by_path[lost[0]]
            raise ValueError(f"expected {name} for {path!r}, got {name}={value!r}. Add an expression that matches it.")
        numbers = self._varied.keys() - self._by_path.keys()
        stage = (replace(self, **dict.fromkeys(numbers, TYPICAL)) if typical and numbers else self).for_array(path, w)
        stage = with_known_axes(stage, leaf, w, names, typical=typical)
        stacked = find_axes(stage.stacked, names)
        named = {name: getattr(stage, name) for name in stage._axis_fields if has_names(getattr(stage, name))}
        if named or has_names(stage.stacked):
            others = None if names is None else tuple(name for i, name in enumerate(names) if i not in stacked)
            by_number: dict[str, Any] = {name: number_axes(axes, others) for name, axes in named.items()}
            stage = replace(stage, **by_number, stacked=stacked)
        return stage, stacked

    def _arranged_for(self, who: CallName, w: Any, leaf: Leaf, names: AxisNames | None) -> tuple[Self, AxisNumbers]:
        """This stage as it acts on one array; an error if it cannot take the array."""
        with locate_errors(who):
            if reason := self._dtype_error(w):
                raise ValueError(reason)
            stage, stacked = self._arranged(leaf, w, names)
            if names is not None:  # the stage asks for names
                require_names_fit(names, w)
            stage_for_one = replace(stage, stacked=()) if stacked else stage
            reason = stacked_axes_error(w, stacked)
            for one_array in each_stacked(w, stacked) if reason is None else ():
                if why := stage_for_one._why_refused(one_array):
                    reason = f"{why} The array is one of those along stacked={stage.stacked}." if stacked else why
                    break
        if reason is not None:
            raise ValueError(f"{who}: {reason}")
        return stage, stacked

    def _with_axes(self, tree: Flat, roles: Roles) -> list[Any]:
        return with_axes(self, tree, roles)

    def _misfits(self, tree: Flat, roles: Roles) -> Iterable[Misfit]:
        return misfits(self, tree, roles)


@dataclass
class Arrangement:
    """What raw values say of their array.

    Attributes:
      stage: The stage at the array, with typical numbers.
      stacked: Its stacked axes.
      effective: The type of the array.
      is_checked: Whether ``init`` is known to give such values for such an array.
    """

    stage: Any
    stacked: AxisNumbers
    effective: Any
    is_checked: bool = False


class Found:
    """The marker dicts of a stage's kind in a raw tree, each in place of its array, and all other leaves.

    Another stage of the same kind may have made some of them, on arrays that this one does not select. If ``where``
    looks at shapes or dtypes, the stage takes only those on whose values its formula runs. A formula that takes several
    arrays ``together`` cannot be asked about one.
    """

    def __init__(self, stage: Any, method: str, tree: Flat, *, together: bool = False) -> None:
        self._stage, self.who, self._arrangements = stage, CallName(stage, method), dict[Any, Arrangement]()
        nodes = tree.nodes(stage.kind)
        if not nodes:
            raise no_own_node_error(self.who, stage.kind, nest(tree))
        self.tree = tree.swap([(node.inside, {place: node}) for place, node in nodes.items()])
        self.names, self.leaves = stage._names_of(self.tree), self.tree.leaves(bases=stage._takes_base)
        self.of_nodes = [leaf for leaf in self.leaves if isinstance(leaf.content, Node)]
        self._values = dict[Names, Any]()
        for leaf in self.of_nodes:
            with locate_errors(self.who.at(leaf.path)):
                self._values[leaf.place] = {name: type_of(x) for name, x in tree.values_of(leaf.content).items()}
        if not together and not by_path(stage.where) and len(self.of_nodes) > 1:
            foreign = [leaf for leaf in self.of_nodes if self._fails(leaf)]
            for leaf in foreign if len(foreign) < len(self.of_nodes) else ():
                leaf.content = None

    def selected(self) -> list[Leaf]:
        """The leaves that the stage selects, each with a marker dict."""
        chosen = self._stage._selected(self.who.method, self.tree, self.leaves, self.look)
        for leaf in chosen:
            if not isinstance(leaf.content, Node):
                raise ValueError(
                    f"{self.who} selects {leaf.path!r}, which never went through init. Call `raw = p.init(params)` "
                    f"once, with the whole chain, and pass `raw`."
                )
        return chosen

    def look(self, leaf: Leaf) -> Any:
        """The type of an array."""
        return self._arrangement(leaf).effective if isinstance(leaf.content, Node) else type_of(leaf.content)

    def arranged(self, leaf: Leaf) -> tuple[Any, AxisNumbers]:
        """The stage as it acts on the values at a leaf, and its stacked axes.

        Raises:
          ValueError: If ``init`` would not give such values for such an array.
        """
        arrangement = self._arrangement(leaf)
        with locate_errors(self.who.at(leaf.path)):
            if not arrangement.is_checked:
                arrangement.stage._require_start(arrangement.stacked, self._values[leaf.place], arrangement.effective)
                arrangement.is_checked = True
            if self._stage._varied:  # the stage that read the values has typical numbers
                return self._stage._arranged(leaf, arrangement.effective, self.names[leaf.place])
        return arrangement.stage, arrangement.stacked

    def _arrangement(self, leaf: Leaf) -> Arrangement:
        """What :meth:`_read` finds at a leaf, once for all leaves with equal values."""
        names, types = self.names[leaf.place], self._values[leaf.place]
        known = leaf.known if asks_axes(self._stage) else None
        group = names, known, leaf.path if self._stage._by_path else None, *types.items()
        if group not in self._arrangements:
            with locate_errors(self.who.at(leaf.path)):
                self._arrangements[group] = self._read(leaf, names, types)
        return self._arrangements[group]

    def _read(self, leaf: Leaf, names: AxisNames | None, types: Mapping[str, Any]) -> Arrangement:
        """What raw values of these types say of their array.

        If the array's layer says its axes, it says how many there are but for stacked ones: as many as fit the values.
        """
        aligned = self._stage._aligned_type(types)
        first, *others = [aligned] if aligned is not None else types_to_try(self._stage, leaf, names)
        for w in others:
            with suppress(Exception):
                stage, stacked = self._stage._arranged(leaf, w, names, typical=True)
                effective = stage._effective_type(stacked, types)
                if leaf.known.fits(effective.shape) and effective.ndim == w.ndim:
                    return Arrangement(stage, stacked, effective)
        stage, stacked = self._stage._arranged(leaf, first, names, typical=True)
        return Arrangement(stage, stacked, stage._effective_type(stacked, types))

    def _fails(self, leaf: Leaf) -> bool:
        """Whether the formula fails on the values at a leaf, as it may in any way on those of another stage."""
        with suppress(Exception):
            return self.look(leaf) is None
        return True
