"""Stages defined by a formula on one array: the base classes map it over trees."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax._axes.names import AxisNames, names_of_leaves, require_names_fit
from reparax._axes.numbers import Axes, check_front_axes, find_axes, has_names, number_axes, out_of_bounds, require_axes
from reparax._axes.origin import Origins, Places, keep_origins, probe
from reparax._axes.stacked import each_stacked, lacks_axes, map_stacked, one_stacked, stacked_sizes
from reparax._core.algebra import Chain, Parametrization, call
from reparax._core.keys import Keys, split_key
from reparax._core.pending import draw_all, settle, without_noise
from reparax._core.value import argument
from reparax._numerics.arithmetic import add_up, is_inexact, widened
from reparax._numerics.terms import Term, summed, told
from reparax._stage.mean import Mean
from reparax._stage.varied import TYPICAL, ByArray, ByPath, without_unmatched
from reparax._stage.where import Place, Where, by_path, check_where, choose, is_bias_or_scale, is_state, require_known
from reparax._tree.differences import abstract as abstract_of
from reparax._tree.markers import (
    Types,
    abstract,
    has_symbols,
    locate_errors,
    no_own_node,
    node_of,
    require_fit,
    require_named_arrays,
    require_type,
    require_values,
    types_under,
    values_under,
)
from reparax._tree.paths import IsLeaf, Names, PyTree, is_array, items, named
from reparax._tree.raw import FIXED, Slot, flatten_slots, marker, next_number, node_predicate, own_mark

Known = dict[tuple[AxisNames | None, Types], dict[str, tuple[int, ...]] | None]
"""The shapes that raw values must have, by the array's axis names and the types of the values."""


class _Leafwise(Parametrization):
    where: Where = argument(check_where, default=None, kw_only=True)
    stacked: Axes = argument(check_front_axes, default=(), kw_only=True)

    draws_late: ClassVar[bool] = True
    min_ndim: ClassVar[int] = 0
    """The fewest dimensions of arrays that the stage acts on by default. If this is two or more, the default also
    excludes biases and scales by name, whatever their dimensions."""
    dtypes: ClassVar[Any] = jnp.inexact
    """The dtypes that the stage takes."""
    takes_base: ClassVar[bool] = False
    """Whether the stage acts on the base of an adapter instead of on the adapter."""
    axis_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold axes. Users may give these by name; in a formula they are numbers."""

    def default(self, w: Array) -> bool:
        """Whether the stage acts on ``w``, by its shape and dtype, if no ``where`` is given."""
        return jnp.issubdtype(w.dtype, self.dtypes) and w.ndim >= self.min_ndim

    def refuse_leaf(self, w: Array) -> str | None:
        """Why the formula cannot take ``w`` (expected, got; what to do), or None if it can."""
        del w
        return None

    def refuse(self, w: Array) -> str | None:
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
        checked = [name for name in self.axis_fields if name in self._checks]
        reasons = (out_of_bounds(getattr(self, name), w, name) for name in checked)
        return next(filter(None, reasons), None)

    def _by_default(self, who: str, w: Any, slot: Slot, names: AxisNames | None) -> bool:
        """Whether the stage takes an array of the type of ``w``; if that is None, it has taken the array already."""
        if self.min_ndim >= 2 and is_bias_or_scale(slot):
            return False
        if w is None:
            return True
        with locate_errors(f"{who} at {slot.path!r}"):
            stacked = self._places(names)
        return lacks_axes(w, stacked) is None and self.default(one_stacked(w, stacked))

    def _selection(self, method: str, tree: PyTree) -> tuple[list[tuple[Any, Slot, Self | None]], Any]:
        """Each leaf with its slot and the stage that acts on it, if any, with axes by number."""
        leaves, slots, treedef = flatten_slots(tree, bases=self.takes_base)
        who = call(self, method)
        names = self._axis_names(tree, len(leaves))
        arrays = list(map(without_noise, leaves))

        def place(i: int) -> Place:
            return Place(
                slots[i],
                is_array(arrays[i]),
                lambda: arrays[i],
                lambda: self._by_default(who, arrays[i], slots[i], names[i]),
            )

        require_known(who, self.where, slots, tree)
        chosen = choose(who, self.where, list(map(place, range(len(leaves)))), is_state(tree))
        chosen = without_unmatched(who, self._varied, chosen, [slot.path for slot in slots])
        require_axes(who, "stacked", self.stacked, [name for name, flag in zip(names, chosen, strict=True) if flag])
        return [
            (w, slot, self._taking(f"{who} at {slot.path!r}", slot.path, arrays[i], names[i]) if chosen[i] else None)
            for i, (w, slot) in enumerate(zip(leaves, slots, strict=True))
        ], treedef

    def _at_arrays(self, method: str, tree: PyTree, keys: Keys, change: Callable[[str, Self, Array], Array]) -> PyTree:
        """``tree`` with each array that the stage acts on replaced by ``change(who, stage, array)``."""
        found, treedef = self._selection(method, tree)
        leaves, who = [w for w, _, _ in found], call(self, method)
        acting = {i: (slot, stage) for i, (_, slot, stage) in enumerate(found) if stage is not None}
        ready = draw_all([leaves[i] for i in acting], keys)
        for (i, (slot, stage)), w in zip(acting.items(), ready, strict=True):
            leaves[i] = change(f"{who} at {slot.path!r}", stage, jnp.asarray(w))
        return treedef.unflatten(leaves)

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
                reason = reason or stage._unstacked.refuse(one)
        if reason is not None:
            raise ValueError(f"{who}: {reason}")
        return stage

    def _axis_names(self, tree: PyTree, count: int, is_leaf: IsLeaf | None = None) -> list[AxisNames | None]:
        """The axis names of each leaf, if this stage needs any."""
        asks = self._named_axes or has_names(self.stacked)
        return names_of_leaves(tree, is_leaf) if asks else [None] * count

    @property
    def _named_axes(self) -> dict[str, Any]:
        """The fields that give axes by name."""
        axes = {name: getattr(self, name) for name in self.axis_fields}
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


class Perturbation(_Leafwise):
    """A stage that changes arrays in place and leaves the raw tree alone.

    A subclass defines ``apply_leaf(w, key) -> w``, and ``mean_leaf(w) -> w`` if the mean over all keys is not ``w``
    itself. It may set ``stochastic = False`` if it needs no key, ``min_ndim = 2`` to exclude vectors, biases and scales
    by default, ``axis_fields = ("axis",)`` so that users may give the field ``axis`` by name, and
    ``straight_through = True`` if its gradient is not that of its formula. A chain with perturbations and the same
    chain without them have the same raw structure, so they can share optimizer states and checkpoints.

    Args:
      where: Which arrays to act on: a regular expression that the whole path must match, or a predicate
        ``(path, array) -> bool``, which may look at the array's shape and dtype, or :func:`all_but`. An expression with
        an ``@``, such as ``.*/@kronecker/b``, must match the whole path in the raw tree instead. Default: every
        floating or complex array that is a parameter and has at least ``min_ndim`` dimensions, which is 0 unless the
        stage sets another number. With two or more, arrays with the usual names of biases and scales are excluded:
        ``bias`` (also as a part, as in ``bias_n``), ``b``, ``scale``, ``offset``, ``gamma``, ``beta``.
      stacked: Axes of independent arrays, such as the layers under a scan: the stage acts on each index separately,
        with separate noise. By number, counted from the front, or by name; several as a tuple. Other arguments do not
        count these axes: with ``stacked=0``, kernels of shape ``(layers, in, out)`` count as matrices whose ``axis=0``
        is ``in``. Default: none.

    If a stage takes a strength, such as a std, a rate, a factor, an alpha or a sparsity, you can give one for each
    array: a dict of regular expressions that must match the whole path, ``VarNoise({"decoder/.*": 0.075})``, where the
    stage does not act on arrays that no expression matches; or a function ``(path, array) -> number``, which may look
    at the array's shape and dtype.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class SignFlip(rpx.Perturbation):
      ...     rate: float
      ...     def apply_leaf(self, w, key):
      ...         return jnp.where(jax.random.bernoulli(key, self.rate, w.shape), -w, w)
      ...     def mean_leaf(self, w):
      ...         return (1 - 2 * self.rate) * w
      >>> SignFlip(0.5).apply({"w": jnp.ones(4)}, jax.random.key(0))["w"]
      Array([ 1.,  1., -1.,  1.], dtype=float32)
      >>> SignFlip(0.25).fold({"w": jnp.ones(4)})["w"]
      Array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """

    stochastic: ClassVar[bool] = True

    @abstractmethod
    def apply_leaf(self, w: Array, key: Array) -> Array:
        """The effective array of ``w``, of the same shape and dtype."""

    def mean_leaf(self, w: Array) -> Array:
        """The mean of ``apply_leaf(w, key)`` over all keys, which ``p.deterministic`` uses instead."""
        return w

    @property
    def deterministic(self) -> Parametrization:
        if not self.stochastic:
            return self
        return Chain() if type(self).mean_leaf is Perturbation.mean_leaf else Mean(self)

    def init_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        del keys
        self._selection("init", tree)
        return tree

    def _follow(self, tree: PyTree) -> tuple[PyTree, Origins]:
        return tree, keep_origins(tree)

    def apply_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        found, treedef = self._selection("apply", tree)
        leaves = [w for w, _, _ in found]
        acting = {i: (slot, stage) for i, (_, slot, stage) in enumerate(found) if stage is not None}
        ready = draw_all([leaves[i] for i in acting], keys)
        paths = [slot.draw for slot, _ in acting.values()]
        numbers = keys.numbers(self.kind, paths)
        own = _leaf_keys(keys, self.kind, numbers, paths) if self.stochastic else [None] * len(paths)
        who = call(self, "apply")
        for (i, (slot, stage)), w, key in zip(acting.items(), ready, own, strict=True):
            w = jnp.asarray(w)
            each_key = None if key is None else stage._each_key(key, w)
            leaves[i] = stage._changed(f"{who} at {slot.path!r}", "apply_leaf", w, each_key)
        return treedef.unflatten(leaves)

    def mean_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        """The tree with the mean of each array that the stage acts on."""
        return self._at_arrays("fold", tree, keys, lambda who, stage, w: stage._changed(who, "mean_leaf", w))

    def _changed(self, who: str, method: str, before: Array, *keys: Array | None) -> Array:
        """The result of ``apply_leaf`` or ``mean_leaf`` on an array."""
        with locate_errors(who):
            after = map_stacked(self._places(None), getattr(self, method))(before, *keys)
            if not self.changes_type:
                require_type(method, after, before)
        return after


@dataclass(frozen=True)
class _Node:
    """A marker dict of the kind of a stage.

    Attributes:
      who: How errors name it.
      path: The path on which its noise depends.
      place: The path in the raw tree.
      stage: The stage, with axes by number once it is known to act here.
      mark: The marker.
      held: The content of the marker dict.
    """

    who: str
    path: str
    place: str
    stage: Any
    mark: str
    held: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Array]:
        """The values under the marker."""
        return values_under(self.held)


class Reparametrization(_Leafwise):
    """A stage that replaces each selected array by named raw values, under the marker ``@kind``.

    It is what torch calls a parametrization: ``parametrize.register_parametrization`` of a module with
    ``right_inverse`` as ``init_leaf`` and ``forward`` as ``apply_leaf``.

    A subclass defines ``init_leaf(w) -> {name: value}`` and ``apply_leaf(values) -> w``, with
    ``apply_leaf(init_leaf(w)) == w``. Instead of ``apply_leaf`` it may define ``terms_leaf(values)``, a list of
    :class:`Term` whose sum is the array. It may also set:

    - ``main``: the values on which earlier stages act, under the parameter's own path (default: every free value);
    - ``fixed``: the values that do not train;
    - ``parts = True``: each main value is a part of the array and has its own path;
    - ``aligned = True``: the axes of the main values are those of the array;
    - ``axis_fields``: as for :class:`Perturbation`.

    With ``stochastic = True`` the effective array is random: the formula is ``apply_leaf(values, key)``, and
    ``mean_leaf(values)`` is its mean over all keys, which ``p.deterministic`` uses instead; ``init`` inverts the
    mean. The stage adds ``penalty_leaf(values)`` to ``p.penalty(raw)``.

    Args:
      where: As for :class:`Perturbation`, with the same default.
      stacked: As for :class:`Perturbation`. The stacked axes of each raw value are at the same positions as in the
        array; if the raw value has too few axes, as near to these as possible.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class LogScale(rpx.Reparametrization):
      ...     def init_leaf(self, w):
      ...         return {"log": jnp.log(w)}
      ...     def apply_leaf(self, values):
      ...         return jnp.exp(values["log"])
      >>> LogScale().init({"w": jnp.ones(2)})
      {'w': {'@log_scale': {'log': Array([0., 0.], dtype=float32)}}}
      >>> layers = {"kernel": jnp.ones((12, 8, 4)), "bias": jnp.zeros((12, 4))}
      >>> jax.tree.map(jnp.shape, rpx.WeightNorm(stacked=0).init(layers))
      {'bias': (12, 4), 'kernel': {'@weight_norm': {'g': (12, 1, 4), 'v': (12, 8, 4)}}}
    """

    update_reads: ClassVar[tuple[str, ...]] = ()
    """Further arguments of ``update_leaf``, after the values: ``"grad"``, ``"key"``, or both."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "terms_leaf" in vars(cls) and cls.apply_leaf is Reparametrization.apply_leaf:
            cls.apply_leaf = _sum_of_terms
        read: Any = cls.update_reads
        if not isinstance(read, tuple) or not set(read) <= {"grad", "key"}:
            raise TypeError(f"{cls.__name__} got update_reads={read!r}, but takes a tuple of 'grad' and 'key'.")
        cls._require_well_formed()

    @classmethod
    def _require_well_formed(cls) -> None:
        """Raises an error for likely mistakes in a class's attributes or formulas."""
        for name in ("main", "fixed", "base_values"):
            if isinstance(getattr(cls, name), str):
                given = getattr(cls, name)
                raise TypeError(f"{cls.__name__} got {name}={given!r}, but takes a tuple of names: ({given!r},).")
        formula: Any = cls.__dict__.get("init_leaf")
        if inspect.isfunction(formula) and len(_required(formula)) > 2:
            raise TypeError(
                f"{cls.__name__}.init_leaf takes {', '.join(_required(formula))}, but is called with (self, w). If the "
                f"start is random, define draw_leaf(self, w, key) instead."
            )

    def init_leaf(self, w: Array) -> dict[str, Array]:
        """The raw values whose effective array is ``w``, or the nearest one to it."""
        raise TypeError(f"{type(self).__name__} defines neither init_leaf(w) nor draw_leaf(w, key). Define one.")

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        """``init_leaf`` for a stage with a random start: it defines this instead, and ``init`` needs a key."""
        del key
        return self.init_leaf(w)

    @abstractmethod
    def apply_leaf(self, *args: Any, **kwargs: Any) -> Array:
        """The effective array of the raw values, including fixed ones; a stochastic stage takes a key after them.

        If a stage defines only ``terms_leaf``, this is the sum of the terms.
        """

    def terms_leaf(self, *args: Any, **kwargs: Any) -> Sequence[Term]:
        """The effective array as a sum of terms, which :func:`factored` does not form.

        You do not need this if ``apply_leaf`` only multiplies and adds matrices, vectors and numbers: then reparax
        finds the terms itself.
        """
        raise TypeError(f"{type(self).__name__} defines no terms_leaf(values).")

    def mean_leaf(self, values: dict[str, Array]) -> Array:
        """The mean of ``apply_leaf(values, key)`` over all keys, if the stage is stochastic."""
        del values
        raise TypeError(f"{type(self).__name__} is stochastic, but defines no mean_leaf(values). Define it.")

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        """The penalty for the raw values of one array, such as a KL divergence from a prior, to add to the loss."""
        del values
        return jnp.zeros(())

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        """The logarithm of the absolute determinant of the derivative of ``apply_leaf``, if that is a bijection."""
        del values
        return jnp.zeros(())

    def update_leaf(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """The new fixed values after one training step, from the current values, as computed by earlier stages.

        It must not return free values, unless the class sets ``moves_weights = True``.

        The formula is ``update_leaf(values)``. With ``update_reads = ("grad", "key")`` it is ``update_leaf(values,
        grad, key)``, with the gradient of the loss with respect to the effective array, and a key. It is only called if
        the caller passes these to ``update``.
        """
        del args, kwargs
        return {}

    def rebase_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        """Raw values of the same effective array, with the base, if there is one, at the current point."""
        return values

    @property
    def deterministic(self) -> Parametrization:
        return Mean(self) if self.stochastic else self

    @property
    def bare(self) -> bool:
        """Whether the only raw value is the array itself, stored at its own path without a marker."""
        return False

    @property
    def advances(self) -> bool:
        return type(self).update_leaf is not Reparametrization.update_leaf

    @property
    def has_base(self) -> bool:
        return type(self).rebase_leaf is not Reparametrization.rebase_leaf

    @property
    def _draws(self) -> bool:
        """Whether the start may be random."""
        return type(self).draw_leaf is not Reparametrization.draw_leaf

    @property
    def random_start(self) -> bool:
        return self._draws

    def init_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        found, treedef = self._selection("init", tree)
        if self.bare:
            return tree
        names, leaves, _ = named(tree)
        acting = {i: (slot, stage) for i, (_, slot, stage) in enumerate(found) if stage is not None}
        numbers = [next_number(names[i], self.kind) for i in acting]
        paths = [slot.draw for slot, _ in acting.values()]
        own = _leaf_keys(keys, self.kind, numbers, paths) if self._draws else [None] * len(paths)
        who = call(self, "init")
        for (i, (slot, stage)), number, key in zip(acting.items(), numbers, own, strict=True):
            leaves[i] = {marker(self.kind, number): stage._opened(f"{who} at {slot.path!r}", leaves[i], key)}
        return treedef.unflatten(leaves)

    def _follow(self, tree: PyTree) -> tuple[PyTree, Origins]:
        made, found = abstract_of(partial(self.init_tree, keys=Keys(None)), tree), dict(items(tree))
        known = dict(zip(found, self._axis_names(tree, len(found)), strict=True))

        def of(path: Names) -> tuple[Names, Places]:
            source = path[: -3 if path[-2] == FIXED else -2]
            w = found[source]
            stage, types = self._typical._numbered(known[source]), (("w", tuple(w.shape), w.dtype),)
            followed = _remembered(Reparametrization._followed, stage, types)
            return source, followed[path[-1]]

        return made, {path: origin if path in known else of(path) for path, origin in keep_origins(made).items()}

    def _followed(self, types: Types) -> dict[str, Places]:
        """For each raw value of an array of that type, which axes of the array its axes follow."""
        w = abstract(types)
        origins = probe(lambda tree: {"w": self._values(tree["w"], None)}, w)
        return {path[-1]: places for path, (_, places) in origins.items()}

    def apply_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        if self.bare:
            return self._in_place(tree, keys)
        leaves, treedef, own = self._own_nodes("apply", tree, keys)
        drawn = self._node_keys(keys, own) if self.stochastic else {}
        for i, node in own.items():
            with locate_errors(node.who):
                leaves[i] = _together(Reparametrization._closed, node.stage, node.values, drawn.get(i))
        return treedef.unflatten(leaves)

    def _node_keys(self, keys: Keys, own: Mapping[int, _Node]) -> dict[int, Array | None]:
        """The key of each node."""
        paths = [node.path for node in own.values()]
        return dict(zip(own, _leaf_keys(keys, self.kind, keys.numbers(self.kind, paths), paths), strict=True))

    def mean_tree(self, tree: PyTree, keys: Keys) -> PyTree:
        return self._at_nodes(
            "fold", tree, keys, lambda node: _together(Reparametrization._closed, node.stage, node.values)
        )

    def penalty_tree(self, tree: PyTree) -> Array:
        if type(self).penalty_leaf is Reparametrization.penalty_leaf:
            return super().penalty_tree(tree)
        return self._total("penalty", tree, lambda stage: stage.penalty_leaf)

    def log_det_tree(self, tree: PyTree, is_free: Callable[[str], bool]) -> Array:
        if type(self).log_det_leaf is Reparametrization.log_det_leaf:
            return super().log_det_tree(tree, is_free)
        return self._total("log_det", tree, lambda stage: stage.log_det_leaf, is_free)

    def _total(
        self,
        method: str,
        tree: PyTree,
        formula: Callable[[Self], Callable[..., Array]],
        counts: Callable[[str], bool] = lambda _: True,
    ) -> Array:
        """The sum of one number per array, computed in at least float32."""

        def number(node: _Node) -> Array:
            with locate_errors(node.who):
                values = {name: widened(x) if is_inexact(x) else x for name, x in node.values.items()}
                return jnp.sum(node.stage._over(formula(node.stage))(values))

        _, _, own = self._own_nodes(method, tree, Keys(None))
        return add_up([number(node) for node in own.values() if counts(node.place)])

    def _in_place(self, tree: PyTree, keys: Keys) -> PyTree:
        """``tree`` with each selected array, which is its own raw value, replaced by the effective array."""

        def closed(who: str, stage: Self, w: Array) -> Array:
            with locate_errors(who):
                return stage._closed(dict.fromkeys(self.main or (), w))

        return self._at_arrays("apply", tree, keys, closed)

    @property
    def reads_grads(self) -> bool:
        return "grad" in self.update_reads

    def update_tree(self, tree: PyTree, keys: Keys, grads: PyTree = None) -> PyTree:
        reads_key = "key" in self.update_reads
        if (self.reads_grads and grads is None) or (reads_key and not keys.given):
            return tree
        leaves, treedef, own = self._own_nodes("update", tree, keys)
        given: dict[str, Mapping[int, Any]] = {}
        if reads_key:
            drawn = self._node_keys(keys, own)
            given["key"] = {i: node.stage._each_key(drawn[i], node.stage._like(node.values)) for i, node in own.items()}
        if self.reads_grads:
            # Matched by path: ``tree`` may still hold the marker of an earlier stage of this kind, but ``grads`` does
            # not.
            paths, slopes = named(tree, node_predicate(self.kind))[0], dict(items(grads))
            given["grad"] = {i: slopes[paths[i]] for i in own}
        for i, node in own.items():
            with locate_errors(node.who):
                read = [given[name][i] for name in self.update_reads]
                anew = node.stage._over(node.stage.update_leaf)(node.values, *read)
                self._require_may_move(anew)
            leaves[i] = {node.mark: node_of({**node.values, **anew}, self.fixed)}
        return treedef.unflatten(leaves)

    def _require_may_move(self, anew: Mapping[str, Array]) -> None:
        """Raises an error for values that ``update`` may not change."""
        if moved := [name for name in anew if name not in self.fixed and not self.moves_weights]:
            raise ValueError(
                f"update_leaf gives {moved[0]!r}, which is not one of the fixed values {list(self.fixed)}. Leave it to "
                f"the optimizer, or set `moves_weights = True`."
            )

    def rebase_tree(self, tree: PyTree) -> PyTree:
        def rebased(node: _Node) -> dict[str, Any]:
            return {node.mark: node_of(node.stage._over(node.stage.rebase_leaf)(node.values), self.fixed)}

        return self._at_nodes("rebase", tree, Keys(None), rebased)

    def _over(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """The formula, mapped over the stacked axes."""
        return map_stacked(self._places(None), formula)

    def _values(self, w: Array, key: Array | None) -> dict[str, Array]:
        """The raw values of an array."""
        if not self._draws:
            return self._over(self.init_leaf)(w)
        return self._over(self.draw_leaf)(w, self._each_key(jax.random.key(0) if key is None else key, w))

    def _closed(self, values: Mapping[str, Array], key: Array | None = None) -> Array:
        """The effective array of raw values; for a stochastic stage without a key, its mean."""
        if not self.stochastic:
            return self._over(self._formula)(dict(values))
        if key is None:
            return self._over(self.mean_leaf)(dict(values))
        like = self._like(values)
        drawn = self._over(self._formula)(dict(values), self._each_key(key, like))
        require_type("apply_leaf", drawn, like)
        return drawn

    def _formula(self, *args: Any) -> Array:
        """The effective array, with its terms if the class declares them."""
        formula, terms = (_written_in(type(self), name) for name in ("apply_leaf", "terms_leaf"))
        # If a subclass redefines apply_leaf only, the inherited terms do not fit it.
        fit = terms is not Reparametrization and issubclass(terms, formula) and formula.apply_leaf is not _sum_of_terms
        return told(self.apply_leaf, self.terms_leaf, *args) if fit else self.apply_leaf(*args)

    def _like(self, values: Mapping[str, Array]) -> Any:
        """Shape and dtype of the effective array."""
        return _remembered(Reparametrization._like_types, self, types_under(values))

    def _like_types(self, types: Types) -> Any:
        """Shape and dtype of the effective array of raw values of these types."""
        return jax.eval_shape(self._closed, abstract(types))

    def _opened(self, who: str, w: Any, key: Array | None) -> dict[str, Any]:
        array = jnp.asarray(w)
        with locate_errors(who):
            values = _together(Reparametrization._values, self, array, key)
            require_named_arrays(self._start, values, self.main, self.fixed)
            effective = self._abstract(values)
            if not self.changes_type:
                require_type("apply_leaf", effective, array)
        return node_of(values, self.fixed)

    @property
    def _start(self) -> str:
        """The name of the method that makes the first raw values."""
        return "init_leaf" if type(self).draw_leaf is Reparametrization.draw_leaf else "draw_leaf"

    def _abstract(self, values: Mapping[str, Array]) -> Any:
        """Shape and dtype of the effective array, traced in ``init`` so that a wrong formula fails early."""
        try:
            return self._like(values)
        except KeyError as error:
            given = ", ".join(map(repr, values))
            raise ValueError(f"apply_leaf reads a value {error}, but init_leaf returns only {given}.") from error

    def _at_nodes(self, method: str, tree: PyTree, keys: Keys, change: Callable[[_Node], Any]) -> PyTree:
        """``tree`` with ``change`` applied to each marker dict of the stage."""
        leaves, treedef, own = self._own_nodes(method, tree, keys)
        for i, node in own.items():
            with locate_errors(node.who):
                leaves[i] = change(node)
        return treedef.unflatten(leaves)

    def _own_nodes(self, method: str, tree: PyTree, keys: Keys) -> tuple[list[Any], Any, dict[int, _Node]]:
        """The leaves of ``tree``, counting marker dicts of the kind as leaves, and those that belong to this stage.

        Another stage of the same kind may have made some of them, on arrays that this one does not select. If ``where``
        looks at shapes or dtypes, this stage takes only the dicts that it could have made.
        """
        is_node, who = node_predicate(self.kind), call(self, method)
        leaves, slots, treedef = flatten_slots(tree, is_node, bases=self.takes_base)
        names = self._axis_names(tree, len(leaves), is_node)
        nodes = {i: self._node(who, slots[i], x) for i, x in enumerate(leaves) if is_node(x)}
        if not nodes:
            raise no_own_node(who, self.kind, tree)
        known: Known = {}
        fitting = {} if by_path(self.where) else self._all_fitting(nodes, names, known)

        def place(i: int) -> Place:
            array = partial(self._type, nodes[i], names[i]) if i in nodes else partial(without_noise, leaves[i])
            present = is_array(leaves[i]) or i in (fitting or nodes)
            hidden = self.changes_type and i in nodes  # the effective array does not show the type of the model's
            like: Callable[[], Any] = (lambda: None) if hidden else array
            return Place(slots[i], present, array, lambda: self._by_default(who, like(), slots[i], names[i]))

        places = list(map(place, range(len(leaves))))
        chosen = choose(who, self.where, places, is_state(tree, is_node))
        chosen = without_unmatched(who, self._varied, chosen, [slot.path for slot in slots])
        if plain := [slots[i].path for i, flag in enumerate(chosen) if flag and i not in nodes]:
            raise ValueError(
                f"{who} selects {plain[0]!r}, which never went through init. Call `raw = p.init(params)` once, with "
                f"the whole chain, and pass `raw`."
            )
        own = {i: fitting.get(i) or self._fitting(node, names[i], known) for i, node in nodes.items() if chosen[i]}
        own = {i: self._varied_node(node, slots[i].path, names[i]) for i, node in own.items()} if self._varied else own
        ready = settle([node.held for node in own.values()], keys)
        return leaves, treedef, {i: replace(own[i], held=held) for i, held in zip(own, ready, strict=True)}

    def _node(self, method: str, slot: Slot, x: Mapping[str, Any]) -> _Node:
        who = f"{method} at {slot.path!r}"
        mark = str(own_mark(x, self.kind))
        with locate_errors(who):
            require_values(x, mark)
        return _Node(who, slot.draw, slot.place, self, mark, x[mark])

    def _varied_node(self, node: _Node, path: str, names: AxisNames | None) -> _Node:
        """``node`` with the stage that has the numbers for this array."""
        with locate_errors(node.who):
            return replace(node, stage=self.for_array(path, self._type(node, names))._numbered(names))

    def _all_fitting(
        self, nodes: Mapping[int, _Node], names: Sequence[AxisNames | None], known: Known
    ) -> dict[int, _Node]:
        """The nodes that the stage could have made."""
        found: dict[int, _Node] = {}
        for i, node in nodes.items():
            with suppress(Exception):  # a formula may fail in any way on the values of another stage
                found[i] = self._fitting(node, names[i], known)
        return found

    def _fitting(self, node: _Node, names: AxisNames | None, known: Known) -> _Node:
        """``node``, after a check that its values fit the stage; each type is traced only once."""
        with locate_errors(node.who):
            stage, types = self._typical._numbered(names), types_under(node.held)
            if (names, types) not in known:
                known[names, types] = _remembered(Reparametrization._expected, stage, types)
            require_fit(node.held, known[names, types])
        return replace(node, stage=stage)

    def _type(self, node: _Node, names: AxisNames | None) -> Any:
        """Shape and dtype of the effective array of a node."""
        types = types_under(node.held)
        known = self._type_of_main(types)
        if known is not None:
            return known
        with locate_errors(node.who):
            return _remembered(Reparametrization._effective, self._typical._numbered(names), types)

    def _type_of_main(self, types: Types) -> Any:
        """Shape and dtype of the main value if it is aligned with the effective array, else None."""
        values = abstract(types)
        return next((values[name] for name in self.main or () if self.aligned and name in values), None)

    def _effective(self, types: Types) -> Any:
        """Shape and dtype of the effective array of values of these types."""
        known = self._type_of_main(types)
        return jax.eval_shape(self._closed, abstract(types)) if known is None else known

    def _expected(self, types: Types) -> dict[str, tuple[int, ...]] | None:
        """The shapes that ``init`` gives for the effective array of values of these types.

        None if it needs numbers, or if the effective array has another type than the model's.
        """
        if has_symbols(types) or self.changes_type:
            return None
        effective = self._effective(types)
        try:
            values = jax.eval_shape(lambda w: self._values(w, None), effective)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            return None
        return {name: value.shape for name, value in values.items()}


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the required arguments of a function."""
    given = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in given if each.kind in positional and each.default is inspect.Parameter.empty]


def _written_in(cls: type[Any], method: str) -> type[Any]:
    """The class from which ``cls`` inherits a method."""
    return next(each for each in cls.__mro__ if method in vars(each))


def _sum_of_terms(self: Reparametrization, *args: Any, **kwargs: Any) -> Array:
    return summed(self.terms_leaf(*args, **kwargs))


def _together(method: Callable[..., Any], stage: Any, *args: Any) -> Any:
    """``method(stage, *args)``; under tracing, one jitted function for all arrays of the same type."""
    held = {each.name: getattr(stage, each.name) for each in fields(stage)}
    # A function may read values that change between calls.
    impure = any(callable(value) for name, value in held.items() if name != "where")
    if impure or not any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        return method(stage, *args)
    try:
        hash(stage)
    except TypeError:  # a traced hyperparameter is not hashable
        return method(stage, *args)
    return _traced_once(method, stage, repr(held), *args)  # the repr tells 1 from True, and 0.0 from -0.0


@partial(jax.jit, static_argnums=(0, 1, 2))
def _traced_once(method: Callable[..., Any], stage: Any, shown: str, *args: Any) -> Any:
    del shown
    return method(stage, *args)


def _remembered(method: Callable[[Any, Types], Any], stage: Any, types: Types) -> Any:
    """``method(stage, types)``, cached for equal stages."""
    try:
        hash(stage)
    except TypeError:  # a traced hyperparameter is not hashable
        return method(stage, types)
    return _once(method, stage, types)


@lru_cache(maxsize=4096)
def _once(method: Callable[[Any, Types], Any], stage: Any, types: Types) -> Any:
    return method(stage, types)


def _leaf_keys(keys: Keys, kind: str, numbers: Sequence[int], paths: Sequence[str]) -> list[Array | None]:
    """A key for each path, or None for each if no key is given."""
    found: list[Array | None] = [None for _ in paths]
    for number in set(numbers):
        places = [i for i, own in enumerate(numbers) if own == number]
        batch = keys.of_arrays(kind, number, [paths[i] for i in places])
        for i, key in zip(places, [None] * len(places) if batch is None else batch, strict=True):
            found[i] = key
    return found
