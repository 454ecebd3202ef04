"""From a formula on one array to a map of trees: the two kinds of stage that need no tree code."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from reparax import _axes, _axis_names, _keys, _paths, _raw, _where
from reparax._axis_names import AxisNames
from reparax._core import Chain, Parametrization, call
from reparax._nodes import last_mark, located, node_of, require_named_arrays, require_type, require_values, values_under
from reparax._paths import PyTree
from reparax._raw import FIXED
from reparax._stage import Stage


class _Leafwise(Stage):
    where: _where.Where = field(default=None, kw_only=True)

    min_ndim: ClassVar[int] = 0
    """The fewest dimensions of an array that the stage takes by default."""
    dtypes: ClassVar[Any] = jnp.inexact
    """The dtypes that the stage takes."""
    axis_fields: ClassVar[tuple[str, ...]] = ()
    """The fields that hold axes. Users may give these by name; where a formula runs, they are numbers."""

    def __post_init__(self) -> None:
        _where.checked(self.where, type(self).__name__)

    def default(self, w: Array) -> bool:
        """Whether the stage acts on ``w`` where no ``where`` is given."""
        return jnp.issubdtype(w.dtype, self.dtypes) and w.ndim >= self.min_ndim

    def refuse_leaf(self, w: Array) -> str | None:
        """Why the formula cannot take ``w`` (expected, got; what to do), or None where it can."""
        del w
        return None

    def refuse(self, w: Array) -> str | None:
        """Why the stage cannot act on ``w``, or None where it can."""
        if jnp.issubdtype(w.dtype, self.dtypes):
            return self.refuse_leaf(w)
        wanted = "floating or complex" if self.dtypes is jnp.inexact else self.dtypes.__name__
        return f"expected a {wanted} array, got {w.dtype}. Leave it out with `where`."

    def _selection(self, method: str, tree: PyTree) -> tuple[list[tuple[Any, _raw.Slot, Self | None]], Any]:
        """Each leaf with what is known of it and the stage that acts on it, if any, its axes by number."""
        leaves, slots, treedef = _raw.flatten(tree)
        who = call(self, method)
        chosen = _where.choose(who, self, tree, leaves, slots)
        names = self._axis_names(tree, len(leaves))
        return [
            (w, slot, self._taking(f"{who} at {slot.path!r}", w, names[i]) if chosen[i] else None)
            for i, (w, slot) in enumerate(zip(leaves, slots, strict=True))
        ], treedef

    def _taking(self, who: str, w: Any, names: AxisNames | None) -> Self:
        """This stage for an array that it can take."""
        with located(who):
            stage = self._numbered(names)
            if stage is not self and names is not None:
                _axis_names.require_fit(names, w)
        if (reason := stage.refuse(w)) is not None:
            raise ValueError(f"{who}: {reason}")
        return stage

    def _axis_names(self, tree: PyTree, count: int, is_leaf: _paths.IsLeaf | None = None) -> list[AxisNames | None]:
        """The axis names of each leaf, where this stage asks for any."""
        return _axis_names.of_leaves(tree, is_leaf) if self._named_axes else [None] * count

    @property
    def _named_axes(self) -> dict[str, Any]:
        """The fields that give axes by name."""
        axes = {name: getattr(self, name) for name in self.axis_fields}
        return {name: given for name, given in axes.items() if _axes.has_names(given)}

    def _numbered(self, names: AxisNames | None) -> Self:
        """This stage for an array of these axis names."""
        axes = {name: _axes.numbered(given, names) for name, given in self._named_axes.items()}
        return replace(self, **axes) if axes else self


class Perturbation(_Leafwise):
    """A stage that changes arrays in place and leaves the raw tree alone.

    A subclass writes ``apply_leaf(w, key) -> w``; ``stochastic = False`` says that it needs no key, ``min_ndim = 2``
    that it leaves vectors alone where ``where`` does not name them, ``axis_fields = ("axis",)`` that users may give the
    field ``axis`` by name. A chain with perturbations and the chain without share one raw structure, one optimizer
    state and one checkpoint.

    Args:
      where: Which arrays to act on: a regular expression that the whole path must match, or a predicate
        ``(path, array) -> bool``. Default: every floating or complex array that is a parameter and has at least
        ``min_ndim`` dimensions, which is 0 unless the stage says otherwise.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class SignFlip(rpx.Perturbation):
      ...     rate: float
      ...     def apply_leaf(self, w, key):
      ...         return jnp.where(jax.random.bernoulli(key, self.rate, w.shape), -w, w)
      >>> SignFlip(0.5).apply({"w": jnp.ones(4)}, jax.random.key(0))["w"]
      Array([ 1.,  1., -1.,  1.], dtype=float32)
    """

    stochastic: ClassVar[bool] = True

    @abstractmethod
    def apply_leaf(self, w: Array, key: Array | None) -> Array:
        """The effective array of ``w``, of the same shape and dtype."""

    @property
    def deterministic(self) -> Parametrization:
        return Chain() if self.stochastic else self

    def _init(self, tree: PyTree, key: Array | None) -> PyTree:
        del key
        self._selection("init", tree)
        return tree

    def _apply(self, tree: PyTree, key: Array | None) -> PyTree:
        found, treedef = self._selection("apply", tree)
        acting = [(stage, jnp.asarray(w)) for w, _, stage in found if stage is not None]
        paths = [slot.draw for _, slot, stage in found if stage is not None]
        changes = iter(zip(acting, self._draws(acting, paths, key), strict=True))
        who = call(self, "apply")

        def changed(slot: _raw.Slot) -> Array:
            (stage, before), drawn = next(changes)
            return stage._changed(f"{who} at {slot.path!r}", before, drawn)

        return treedef.unflatten([changed(slot) if stage is not None else w for w, slot, stage in found])

    def _changed(self, who: str, before: Array, drawn: Any) -> Array:
        with located(who):
            after = self._change(before, drawn)
            if not self.changes_type:
                require_type("apply_leaf", after, before)
        return after

    # What a stage of which the draw and the change are two steps makes anew: see ``Drawn``.
    def _draws(self, acting: Sequence[tuple[Any, Array]], paths: Sequence[str], key: Array | None) -> Sequence[Any]:
        """What the change of each array is given besides the array: its key."""
        del acting
        return _leaf_keys(key if self.stochastic else None, paths)

    def _change(self, w: Array, drawn: Any) -> Array:
        return self.apply_leaf(w, drawn)


class Reparametrization(_Leafwise):
    """A stage that replaces each selected array by named raw values, under the marker ``@kind``.

    A subclass writes ``init_leaf(w) -> {name: value}`` and ``apply_leaf(values) -> w``, with
    ``apply_leaf(init_leaf(w)) == w``. It may declare ``main``, the values that stages nearer to the raw tree see
    under the parameter's own path (default: every free one), ``fixed``, the values that do not train,
    ``parts = True``, that the main values are parts of the array, each seen under a path of its own,
    ``aligned = True``, that their axes are those of the array, and ``axis_fields``, as for :class:`Perturbation`.

    Args:
      where: As for :class:`Perturbation`, with the same default.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> class LogScale(rpx.Reparametrization):
      ...     def init_leaf(self, w):
      ...         return {"log": jnp.log(w)}
      ...     def apply_leaf(self, values):
      ...         return jnp.exp(values["log"])
      >>> LogScale().init({"w": jnp.ones(2)})
      {'w': {'@log_scale': {'log': Array([0., 0.], dtype=float32)}}}
    """

    def init_leaf(self, w: Array) -> dict[str, Array]:
        """The raw values whose effective array is ``w``, or the nearest one to it."""
        raise TypeError(f"{type(self).__name__} defines neither init_leaf(w) nor draw_leaf(w, key). Define one.")

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        """``init_leaf`` for a stage whose start is drawn: such a stage defines this instead."""
        del key
        return self.init_leaf(w)

    @abstractmethod
    def apply_leaf(self, values: dict[str, Array]) -> Array:
        """The effective array of the raw values, fixed ones included."""

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        """The fixed values that one training step changes, from the values as the earlier stages give them now."""
        del values
        return {}

    def rebase_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        """All raw values of the same effective array, with the base at the current point, where there is a base."""
        return values

    @property
    def advances(self) -> bool:
        return type(self).update_leaf is not Reparametrization.update_leaf

    def _init(self, tree: PyTree, key: Array | None) -> PyTree:
        found, treedef = self._selection("init", tree)
        draws = type(self).draw_leaf is not Reparametrization.draw_leaf
        paths = [slot.draw for _, slot, stage in found if stage is not None]
        keys = iter(_leaf_keys((jax.random.key(0) if key is None else key) if draws else None, paths))
        mark, who = _raw.marker(self.kind, _raw.count(tree, self.kind) + 1), call(self, "init")
        return treedef.unflatten(
            [
                {mark: stage._opened(f"{who} at {slot.path!r}", w, next(keys))} if stage is not None else w
                for w, slot, stage in found
            ]
        )

    def _apply(self, tree: PyTree, key: Array | None) -> PyTree:
        del key
        return self._at_nodes("apply", tree, lambda stage, node: stage.apply_leaf(values_under(node)))

    def _update(self, tree: PyTree, key: Array | None) -> PyTree:
        del key

        def advanced(stage: Self, node: Mapping[str, Any]) -> dict[str, Any]:
            return {**node, FIXED: {**node[FIXED], **stage.update_leaf(values_under(node))}}

        mark = _raw.marker(self.kind, _raw.count(tree, self.kind))
        return self._at_nodes("update", tree, lambda stage, node: {mark: advanced(stage, node)})

    def _rebase(self, tree: PyTree) -> PyTree:
        if type(self).rebase_leaf is Reparametrization.rebase_leaf:
            return tree
        mark = _raw.marker(self.kind, _raw.count(tree, self.kind))
        return self._at_nodes(
            "rebase", tree, lambda stage, node: {mark: node_of(stage.rebase_leaf(values_under(node)), self.fixed)}
        )

    def _opened(self, who: str, w: Any, key: Array | None) -> dict[str, Any]:
        array = jnp.asarray(w)
        with located(who):
            values = self.init_leaf(array) if key is None else self.draw_leaf(array, key)
            require_named_arrays("init_leaf", values, self.main, self.fixed)
            effective = self._abstract(values)
            if not self.changes_type:
                require_type("apply_leaf", effective, array)
        return node_of(values, self.fixed)

    def _abstract(self, values: Mapping[str, Array]) -> Any:
        """Shape and dtype of the effective array; a formula that fails should do so in ``init``."""
        try:
            return jax.eval_shape(self.apply_leaf, dict(values))
        except KeyError as error:
            given = ", ".join(map(repr, values))
            raise ValueError(f"apply_leaf reads a value {error}, but init_leaf gives only {given}.") from error

    def _at_nodes(self, method: str, tree: PyTree, change: Callable[[Self, Mapping[str, Any]], Any]) -> PyTree:
        who = call(self, method)
        mark = last_mark(who, self.kind, tree)
        is_node = _raw.is_node(mark)
        paths, leaves, treedef = _paths.named(tree, is_node)
        names = self._axis_names(tree, len(leaves), is_node)

        def at(i: int) -> Any:
            with located(f"{who} at {_raw.parameter(paths[i])!r}"):
                require_values(leaves[i][mark], mark)
                return change(self._numbered(names[i]), leaves[i][mark])

        return treedef.unflatten([at(i) if is_node(x) else x for i, x in enumerate(leaves)])


def _leaf_keys(key: Array | None, paths: Sequence[str]) -> list[Array | None]:
    """A key for each path; None for each where there is no key."""
    if key is None or not paths:
        return [None for _ in paths]
    keys = _keys.per_leaf(key, paths)
    return [keys[i] for i in range(len(paths))]
