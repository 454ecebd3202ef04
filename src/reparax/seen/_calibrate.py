"""``rpx.calibrate``: initializes a chain layer by layer from calibration data.

Each layer starts after the ones before it are compressed, as in GPTQ.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reparax._axes.boxes import gather_boxes, spread_boxes
from reparax._core.algebra import Parametrization, compose
from reparax._core.calls import require_chains
from reparax._core.keys import key_of_step
from reparax._core.layers import Site
from reparax._core.lineage import Lineage, lineage_of
from reparax._core.verbs import follow_axes
from reparax._data.compensation import make_up_for_inputs
from reparax._data.seen import ANY, Seen
from reparax._data.sights import takes_data
from reparax._numerics.arguments import check_flag, check_known_number
from reparax._numerics.arithmetic import widened
from reparax._numerics.usage import shows_usage
from reparax._programs.alike import Alike
from reparax._programs.call import Arguments, check_call
from reparax._tree.flat import Flat, flatten, nest
from reparax._tree.markers import locate_errors
from reparax._tree.paths import Names, PyTree, flatten_with_names, is_array, is_box, path_text, types_of_result
from reparax.seen._inputs import check_this_jax, collect, first_look
from reparax.seen._kept import Folder, checksum, describe_units
from reparax.seen._order import Chosen, First, Turn, Unit, first_reads, turns, units

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


@shows_usage
def calibrate(
    p: Parametrization,
    loss: Callable[..., Any],
    params: PyTree,
    batches: Batches,
    key: jax.Array | None = None,
    where: Chosen | Sequence[Chosen] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    error_propagation: float = 0.0,
    donate: bool = False,
) -> PyTree:
    r"""The raw tree of ``params``, as ``p.init`` makes it from data, but one group of arrays after the other.

    Each group starts from the statistics that :func:`inputs` finds in a network whose earlier groups are already
    compressed, so later groups correct the errors of earlier ones. In contrast, ``p.init(params, key,
    seen=rpx.inputs(loss)(params, batch))`` starts all arrays at once, from the original network.

    Groups follow the order of the loss. Arrays that multiply the same value, such as queries, keys and values, are one
    group. If a scan slices an array, as for stacked layers, each step is a group: only one layer is in memory, and the
    scan is not unrolled. Arrays that one stage joins are one group. An array that is read several times belongs to its
    first read. Arrays that no product reads come last.

    Each group, and each layer of a scan, takes one pass over the batches, and holds only its own moments. Batches whose
    arrays are sharded over devices stay so: the sums are over all devices. ``loss`` is compiled once for each group. If
    rich is installed, a terminal or a notebook shows a progress bar.

    Args:
      p: The chain. On arrays that a scan slices, stages that learn from data need ``stacked=0``.
      loss: The loss of the effective tree, ``loss(params, *batch)``, or ``loss(params, batch)`` if a batch is not a
        tuple; or any function that reads the weights in the same way.
      params: The model's parameters.
      batches: The same batches at each pass: a list, a data set, or a function that returns an iterator. One batch is
        in memory at a time.
      key: As for ``init``, but each layer of a scan draws from its own key.
      where: Groups of your own, which come first: a list with a regular expression for whole paths, or a predicate
        ``(path, array) -> bool``, for each. A single one needs no list: with ``".*"``, layers of a scan start one by
        one, and all other arrays at once.
      folder: A folder for finished groups. If the call is stopped, the same call continues from there.
      error_propagation: The share, from 0 to 1, of the errors of earlier groups that a group that learns from second
        moments corrects before it is compressed (QEP): :math:`W + c \, H^{-1} C W`, with the sum H of :math:`x x^\top`
        over the data and C of :math:`x (x_0 - x)^\top`, where :math:`x_0` are the data of ``params``. The paper takes
        0.5. Both networks run at once, and their weights are in memory twice.
      donate: Whether arrays of ``params`` that a scan slices are overwritten, and cannot be used afterwards; otherwise
        they are copied.

    Raises:
      ValueError: If an iterator of batches is used up, or a stage joins all layers of a scan.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> def loss(params, x):
      ...     return jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"])
      >>> params = {"up": jax.random.normal(jax.random.key(0), (8, 16)), "down": jnp.ones((16, 8))}
      >>> batches = [jax.random.normal(jax.random.key(i), (32, 8)) for i in range(4)]
      >>> p = rpx.Stored("int4", block=8, fit="gptq")
      >>> raw = rpx.calibrate(p, loss, params, batches)
      >>> p.apply(raw)["down"].shape
      (16, 8)

    References:
      Frantar, Ashkboos, Hoefler and Alistarh, *GPTQ*, 2023, which starts each layer from the outputs of those before;
      Arai and Ichikawa, *Quantization Error Propagation: Revisiting Layer-Wise Post-Training Quantization*, 2025.
    """
    require_chains("calibrate(p, loss, params, batches)", p)
    check_this_jax()
    who = check_call("calibrate", loss, 0)
    share = check_known_number(error_propagation, who, "error_propagation")
    if not 0 <= share <= 1:
        raise ValueError(f"{who} got error_propagation={share}, but takes a share from 0 to 1.")
    if check_flag(donate, who, "donate") and share:
        raise ValueError(
            f"{who} got donate=True with error_propagation={share}, which compares with the network of the original "
            f"params. Leave one of them out."
        )
    model, data = _Model.of(params), _Batches(who, batches)
    return _Calibration(who, p, loss, model, data, key, share, donate=donate).run(where, folder)


@dataclass(frozen=True)
class _Model:
    """The model's parameters, by their paths."""

    names: Sequence[Names]
    arrays: Mapping[str, Any]
    treedef: Any

    @classmethod
    def of(cls, params: PyTree) -> _Model:
        names, leaves, treedef = flatten_with_names(params)
        return cls(names, dict(zip(map(path_text, names), leaves, strict=True)), treedef)

    def tree(self, leaves: Mapping[str, Any]) -> PyTree:
        """The parameters with these leaves and no others; a box without an array is left out too."""
        tree = self.treedef.unflatten(map(leaves.get, self.arrays))
        return jax.tree.map(lambda x: x if jax.tree.leaves(x) else None, tree, is_leaf=is_box)


class _Batches:
    """Batches, passed over several times."""

    def __init__(self, who: str, batches: Batches) -> None:
        self._who, self._batches, self._count, self._iterator = who, batches, 0, None

    @property
    def first(self) -> Any:
        """The first batch."""
        return next(iter(self))

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self._new_iterator():
            count += 1
            yield batch
        if count == 0:
            raise ValueError(f"{self._who} got no batch in a pass over the batches. Pass at least one.")
        if self._count and count != self._count:
            raise ValueError(
                f"{self._who} got {count} batches in a pass, and {self._count} before. Pass the same ones each time."
            )
        self._count = count

    def _new_iterator(self) -> Iterator[Any]:
        """A new iterator."""
        new = iter(self._batches() if callable(self._batches) else self._batches)
        if new is self._iterator:
            raise ValueError(
                f"{self._who} passes over the batches several times, but got the same iterator for two passes, of type "
                f"{type(new).__name__}. Pass a list, or a function that returns a new iterator: `lambda: ...`."
            )
        self._iterator = new
        return new


class _Calibration:
    """One call of :func:`calibrate`: what acts where, the loop, the data, errors of earlier groups."""

    def __init__(
        self,
        who: str,
        p: Parametrization,
        loss: Callable[..., Any],
        model: _Model,
        batches: _Batches,
        key: Any,
        share: float,
        *,
        donate: bool,
    ) -> None:
        self.who, self.p, self.loss, self.model, self.batches, self.key = who, p, loss, model, batches, key
        self.share, self.donate = share, donate
        self._counting: dict[tuple[str, ...], Any] = {}

    # ---- what acts where

    @cached_property
    def plan(self) -> Lineage:
        """What the chain does, by types. All errors of structure come from here."""
        init = functools.partial(self.p.init, key=self.key, seen=ANY)
        return lineage_of(self.p, types_of_result(init, self.model.tree(self.model.arrays)))

    def paths_of(self, site: Site) -> set[str]:
        """The paths of the arrays of a site."""
        roots = {path_text(self.plan.raw.root(spot.place)) for spot in site.spots.values()}
        return {*roots, *site.copies, *site.copies.values()}

    @cached_property
    def acting(self) -> dict[str, list[tuple[int, Site]]]:
        """For each array the sites on it, with the index of their stage in the chain."""
        sites_on: dict[str, list[tuple[int, Site]]] = {}
        for index, layer in enumerate(self.plan.layers):
            for site in layer.sites:
                for path in self.paths_of(site):
                    sites_on.setdefault(path, []).append((index, site))
        return sites_on

    def learns(self, path: str) -> bool:
        """Whether an array starts from data."""
        return any(map(_learns, self.stages_on([path])))

    def stages_on(self, paths: Iterable[str]) -> list[Parametrization]:
        """The stages that act on some of these arrays, in the order of the chain."""
        return [self.p[index] for index in sorted({index for path in paths for index, _ in self.acting[path]})]

    def chain_of(self, turn: Turn) -> Parametrization:
        """The part of the chain that acts in a turn."""
        return compose(tuple(self.stages_on(turn.paths)))

    def turns(self, where: Any) -> list[Turn]:
        """What is compressed at once, in the order of the program."""
        reads: dict[str, First] = {}
        if any(map(self.learns, self.acting)):
            arguments = self._arguments(self.model.arrays, self.batches.first)
            call = arguments.trace()
            look, offset = first_look(call, "diagonal"), len(call.inputs) - len(arguments.places)
            if look.trees:
                raise ValueError(
                    f"{self.who} takes a loss of the effective tree, but this one calls `apply`. Pass a loss that "
                    f"reads its weights as they are: `loss(p.apply(raw), batch)` is for training."
                )
            path_of = dict(enumerate(_paths_of_arrays(arguments), offset))
            first_of = first_reads(look.counted, Alike(call.program))
            reads = {path_of[root]: first_read for root, first_read in first_of.items()}
        site_paths = [self.paths_of(site) for layer in self.plan.layers for site in layer.sites]
        arrays = {path: x for path, x in self.model.arrays.items() if path in self.acting}
        all_turns = turns(self.who, reads, arrays, [paths for paths in site_paths if len(paths) > 1], where)
        for turn in all_turns:
            self._require_steps(turn)
        return all_turns

    def _require_steps(self, turn: Turn) -> None:
        """Requires of stages that learn that they take each step of a scan by itself."""
        for path, axis in turn.axes.items():
            for index, site in self.acting[path] if axis is not None else ():
                if _learns(self.p[index]) and axis not in getattr(site, "stacked", ()):
                    raise ValueError(
                        f"{self.who}: {self.p[index]!r} starts all indices of axis {axis} of {path!r} together, but a "
                        f"scan reads one after the other, and each should correct the errors of those before. Write "
                        f"`stacked={axis}` in that stage."
                    )

    # ---- the loop

    def run(self, where: Any, folder: Any) -> PyTree:
        """The raw tree."""
        todo = list(units(self.turns(where)))
        paths_in_steps = {path for turn, index in todo if index is not None for path in turn.paths}
        effective = {path: self._writable(x) if path in paths_in_steps else x for path, x in self.model.arrays.items()}
        saved_units, raw_values = Folder(self.who, folder, self._settings(todo) if folder else {}), dict[Names, Any]()
        with _progress_bar(len(todo)) as advance:
            for number, unit in enumerate(todo):
                unit_raw = saved_units.read(number)
                if unit_raw is None:
                    unit_raw = self._start_unit(unit, effective)
                    saved_units.write(number, unit_raw)
                self._store_unit(unit, unit_raw, raw_values, effective)
                advance()
        return self._raw_tree(raw_values)

    def _writable(self, x: Any) -> Any:
        """What is written to in place instead of an array of the user; one that has several paths is copied anyway."""
        is_unshared = sum(array is x for array in self.model.arrays.values()) == 1
        return x if self.donate and is_unshared and isinstance(x, jax.Array) else jnp.copy(x)

    def _settings(self, todo: Sequence[Unit]) -> dict[str, Any]:
        """What must be the same where a calibration goes on."""
        arrays = [x for x in self.model.arrays.values() if is_array(x)]
        key = None if self.key is None else np.asarray(_words_of_key(self.key)).tolist()
        about = {"chain": self.p.to_json(), "key": key, "params": checksum(arrays), "groups": describe_units(todo)}
        return about | {"error_propagation": self.share}

    def _start_unit(self, unit: Unit, effective: Mapping[str, Any]) -> dict[Names, Any]:
        """The raw values of a unit."""
        turn, index = unit
        seen = self._seen_by_unit(unit, effective)
        key = self.key if self.key is None or index is None else key_of_step(self.key, index)
        parts = self._arrays_of_unit(unit, effective)
        parts = self._make_up_for_errors(unit, effective, parts) if self.share else parts
        raw = self.chain_of(turn).init(self.model.tree(parts), key, seen=seen)
        return dict(flatten(gather_boxes(raw)).arrays)

    def _arrays_of_unit(self, unit: Unit, effective: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a turn that are not compressed yet."""
        turn, index = unit
        return {path: _slice_of_step(effective[path], axis, index) for path, axis in turn.axes.items()}

    def _store_unit(
        self, unit: Unit, unit_raw: Mapping[Names, Any], raw_values: dict[Names, Any], effective: dict[str, Any]
    ) -> None:
        """Writes the raw values of a unit into ``raw_values``, and the folded weights into ``effective``; changes both.

        Later units read ``effective``.
        """
        turn, index = unit
        frame = flatten(self.model.tree(self._arrays_of_unit(unit, effective))).frame
        raw_types = self.plan.raw
        leaves_without_arrays = {
            place: x
            for place, x in raw_types.arrays.items()
            if not is_array(x) and raw_types.root(place) in frame.roots
        }
        folded_tree = self.chain_of(turn).fold(nest(Flat(frame, {**unit_raw, **leaves_without_arrays})))
        folded_arrays = _Model.of(folded_tree).arrays
        for path, axis in turn.axes.items():
            effective[path] = (
                folded_arrays[path]
                if index is None
                else _write_step_donated(effective[path], folded_arrays[path], axis, index)
            )
        for place, x in unit_raw.items():
            raw_type = raw_types.arrays[place]
            if index is None or not is_array(x):
                raw_values[place] = x
                continue
            # Scans of one step have no index (see ``seen/_order.py``), so sizes always differ along the sliced axis.
            step_axes = [
                i
                for i, (unit_size, full_size) in enumerate(zip(x.shape, raw_type.shape, strict=True))
                if unit_size != full_size
            ]
            if len(step_axes) != 1:
                raise ValueError(
                    f"{self.who}: {path_text(place)!r} has shape {raw_type.shape} for all steps of a scan and "
                    f"{x.shape} for one, so steps cannot start one after the other. Write the axis that the scan "
                    f"slices as `stacked` in the stage that makes it."
                )
            full_array = raw_values[place] if place in raw_values else jnp.zeros(raw_type.shape, raw_type.dtype)
            raw_values[place] = _write_step_donated(full_array, x, step_axes[0], index)

    def _raw_tree(self, raw_values: Mapping[Names, Any]) -> PyTree:
        """The raw tree with the values that were found, and all other leaves as they are."""
        params = self.model.tree(self.model.arrays)
        flat, types, leaves = flatten(params), self.plan.raw, dict[Names, Any]()
        inside: dict[Names, list[Names]] = {}
        for place in types.arrays:
            inside.setdefault(types.root(place), []).append(place)
        for root, leaf in flat.arrays.items():
            for place in inside.get(root, [root]):
                leaves[place] = raw_values.get(place, leaf if place == root else types.arrays.get(place))
        return spread_boxes(functools.partial(follow_axes, tuple(self.p)), params, nest(Flat(flat.frame, leaves)))

    # ---- the data

    def _arguments(self, arrays: Mapping[str, Any], batch: Any) -> Arguments:
        """The arguments of the loss at these weights and a batch; the weights are argument 0."""
        args = batch if type(batch) is tuple else (batch,)
        return Arguments.of(self.who, self.loss, 0, (self.model.tree(arrays), *args), {})

    def _seen_by_unit(self, unit: Unit, effective: Mapping[str, Any]) -> Any:
        """What the arrays of a turn are multiplied with in the network as it is now; None if none starts from data."""
        turn, index = unit
        learning_paths = [path for path in turn.paths if self.learns(path)]
        if not learning_paths:
            return None
        arrays = {path: x for path, x in effective.items() if is_array(x)}
        other_leaves = {path: x for path, x in effective.items() if path not in arrays}
        if turn.paths not in self._counting:
            self._counting[turn.paths] = self._seen_counter(turn, learning_paths, other_leaves)
        count, total = self._counting[turn.paths], None
        step = None if index is None else np.int32(index)
        for batch in self.batches:
            total = count(arrays, batch, step, total)
        # Whether the numbers are finite is asked where they are known.
        trees = [self.model.tree(entries) for entries in total or []]
        return trees[0] if len(trees) == 1 else tuple(trees)

    def _seen_counter(self, turn: Turn, learning_paths: Sequence[str], other_leaves: Mapping[str, Any]) -> Any:
        """A function that adds what a batch tells of a turn."""
        kinds = {kind for stage in self.stages_on(learning_paths) if _learns(stage) for kind in stage.collects}
        ways = [("full" if "full" in kinds else "diagonal", "gradients" in kinds)] if kinds - {"largest"} else []
        ways += [("largest", False)] if "largest" in kinds else []

        def count_one_way(arrays: Mapping[str, Any], batch: Any, index: Any, moments: str, *, gradients: bool) -> Any:
            arguments = self._arguments(
                {path: arrays.get(path, other_leaves.get(path)) for path in self.model.arrays}, batch
            )
            axes = {path: axis for path, axis in turn.axes.items() if index is not None and axis is not None}
            entries = self._entries_of(arguments, learning_paths, moments, axes, index, gradients=gradients)
            return {path: _seen_in_step(entry, axes.get(path), index) for path, entry in entries.items()}

        def count_batch(arrays: Mapping[str, Any], batch: Any, index: Any) -> list[Any]:
            return [count_one_way(arrays, batch, index, moments, gradients=gradients) for moments, gradients in ways]

        return _accumulator(count_batch, [moments for moments, _ in ways])

    def _entries_of(
        self,
        arguments: Arguments,
        paths: Sequence[str],
        moments: str,
        axes: Mapping[str, int],
        index: Any,
        *,
        gradients: bool = False,
    ) -> dict[str, Seen]:
        """What one call tells of arrays; of those with an axis, of one index."""
        call = arguments.trace()
        roots = {
            path: i for i, path in enumerate(_paths_of_arrays(arguments), len(call.inputs) - len(arguments.places))
        }
        look = first_look(call, moments, {roots[path]: (axis, index) for path, axis in axes.items()})
        collected = collect(self.who, call, look, {roots[path] for path in paths}, gradients=gradients)
        return {path: collected.entry(roots[path]) for path in paths}

    # ---- errors of what is compressed already

    def _make_up_for_errors(self, unit: Unit, effective: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a turn, where they make up for a share of the errors in their data."""
        turn, index = unit
        learning_paths = [path for path in turn.paths if any(map(_reads_moments, self.stages_on([path])))]
        if not learning_paths:
            return dict(parts)
        arrays = {path: x for path, x in effective.items() if is_array(x)}
        originals = {path: self.model.arrays[path] for path in arrays if path in self.acting}
        if (*turn.paths, "cross") not in self._counting:
            other_leaves = {path: x for path, x in effective.items() if path not in arrays}
            self._counting[*turn.paths, "cross"] = self._cross_counter(turn, learning_paths, other_leaves)
        count: Callable[..., list[Any]] = self._counting[*turn.paths, "cross"]
        total: list[Any] | None = None
        for batch in self.batches:
            total = count((originals, arrays), batch, None if index is None else np.int32(index), total)
        (entries,) = total or [{}]
        return {**parts, **{path: self._make_up_in_array(path, parts[path], seen) for path, seen in entries.items()}}

    def _make_up_in_array(self, path: str, w: Any, seen: Seen) -> Any:
        """An array that makes up for a share of the errors in its data."""
        with locate_errors(f"{self.who} at {path!r}"):
            moments = seen.read("cross", w[None])
        if moments.cross.ndim == 2:  # rows that are looked up have no errors
            return w
        x = moments.matrices(widened(w)[None])
        corrected = jax.vmap(functools.partial(make_up_for_inputs, share=self.share))(x, moments.second, moments.cross)
        return moments.array(corrected, w[None])[0].astype(w.dtype)

    def _cross_counter(self, turn: Turn, learning_paths: Sequence[str], other_leaves: Mapping[str, Any]) -> Any:
        """A function that adds what a batch tells of the errors in the data of a turn."""

        def count_batch(networks: tuple[Mapping[str, Any], Mapping[str, Any]], batch: Any, index: Any) -> list[Any]:
            originals, arrays = networks
            pairs = {path: jnp.stack([originals[path], arrays[path]]) for path in originals}
            other_arrays = {**other_leaves, **arrays}

            def pair(pairs_of_arrays: PyTree, *args: Any) -> Any:
                def loss_of_one(own: PyTree) -> Any:
                    return self.loss(self.model.tree({**other_arrays, **_Model.of(own).arrays}), *args)

                return jax.vmap(loss_of_one)(pairs_of_arrays)

            args = batch if type(batch) is tuple else (batch,)
            arguments = Arguments.of(self.who, pair, 0, (self.model.tree(pairs), *args), {})
            axes = {path: 1 + axis for path, axis in turn.axes.items() if index is not None and axis is not None}
            return [self._entries_of(arguments, learning_paths, "cross", axes, index)]

        return _accumulator(count_batch, ["cross"])


def _accumulator(count_batch: Callable[..., list[Any]], kinds: Sequence[str]) -> Any:
    """A function that adds what ``count_batch`` finds of kinds of moments to a total, which is None before."""

    @functools.partial(jax.jit, donate_argnums=3)
    def add_batch(arrays: Any, batch: Any, index: Any, total: list[Any]) -> list[Any]:
        pairs = zip(kinds, total, count_batch(arrays, batch, index), strict=True)
        return [jax.tree.map(jnp.maximum if kind == "largest" else jnp.add, a, b) for kind, a, b in pairs]

    def start(arrays: Any, batch: Any, index: Any, total: list[Any] | None) -> list[Any]:
        if total is None:
            like = jax.eval_shape(count_batch, arrays, batch, index)
            total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return add_batch(arrays, batch, index, total)

    return start


def _reads_moments(stage: Parametrization) -> bool:
    """Whether a stage starts from second moments of data."""
    return _learns(stage) and not {"full", "diagonal"}.isdisjoint(stage.collects)


def _learns(stage: Parametrization) -> bool:
    """Whether a stage starts from data."""
    return takes_data(stage) and bool(stage.collects)


def _paths_of_arrays(arguments: Arguments) -> list[str]:
    """The path of each array of the arguments, without the name of its argument."""
    flags = zip(arguments.paths, arguments.is_chosen, strict=True)
    return [path.partition("/")[2] if is_chosen else f"{i}: {path}" for i, (path, is_chosen) in enumerate(flags)]


def _slice_of_step(x: Any, axis: int | None, index: int | None) -> Any:
    """The slice of an array that one step reads; the array itself where no scan slices it."""
    return x if axis is None or index is None else jax.lax.dynamic_slice_in_dim(x, index, 1, axis)


def _seen_in_step(seen: Seen, axis: int | None, index: Any) -> Seen:
    """What is known of one step, whose gradient is a part of that of all."""
    if axis is None or seen.gradient is None:
        return seen
    return replace(seen, gradient=jax.lax.dynamic_slice_in_dim(seen.gradient, index, 1, axis))


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _write_step_donated(array: Any, part: Any, axis: int, index: Any) -> Any:
    """An array with a part at an index of an axis. The array is donated, so this writes into it."""
    return jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), index, axis)


def _words_of_key(key: Any) -> Any:
    """The words of a key, typed or legacy."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


@contextmanager
def _progress_bar(total: int) -> Generator[Callable[[], None], None, None]:
    """What tells a bar that one more is done."""
    if importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from reparax.seen._bar import bar

    with bar(total) as progress:
        yield lambda: progress.advance(progress.task_ids[0])
