"""A stage bound to leaves of a raw tree, and what a chain does: loops over its stages and their bindings.

``init`` wrote markers, and every other method follows them: a stage is *bound* to the values that it made, or to the
arrays that it selects. A binding holds all that is decided: numbers and axes, the key paths of the raw values, and the
path by which it draws. Then each method is one loop: read the values, call the formula, and put its result in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.boxes import gather_boxes
from reparax.core.calls import CallName, require_no_references
from reparax.core.checks import locate_errors
from reparax.core.keys import Keys, draw_for_bounds, keys_of_stack
from reparax.core.origins import Origins, compose_origins, keep_origins
from reparax.core.paths import Names, PyTree, flatten_with_names, items, path_text, type_of, types_of_result
from reparax.core.raw import (
    FIXED,
    OTHER_CHAIN,
    Flat,
    Leaf,
    Swap,
    flatten,
    graft,
    kind_of,
    nest,
    next_number,
    outer_markers,
    parameter_path,
)
from reparax.core.values import value_of
from reparax.numerics.arithmetic import add_up, inexact_places, is_array, is_inexact

RawValues = Mapping[str, Mapping[str, Any]]
"""For each array of a binding, by the name that the formulas use, its raw values by their names."""
Stages = Sequence[Any]
UPTO = "For what stage k of a longer chain reads, call its `apply(raw, key, upto=k)`."
CONVERT = f"Convert it with `rpx.transfer(old, new, raw)`. {UPTO}"


@dataclass(frozen=True, eq=False)
class Bound:
    """A stage bound to one array, or to several that it joins.

    Attributes:
      stage: The formulas, with the numbers and axes of these arrays.
      who: How errors name it.
      arrays: The key path of each effective array, by the name that the formulas use.
      values: For each array the key path of each raw value; of the array itself, if the stage changes it in place.
      nodes: For each array the key path of its marker dict; none, if the stage has no markers.
      draw_path: The path that is hashed into the key, counted also where nothing is drawn; None if it is not.
      reads: The key paths of arrays that the formulas read and leave where they are.
      copies: For the path of each array without a value of its own, the path at which its value is.
      mean: Whether the effective array is the mean over all draws.
      formula: What the stage does here, if it is not the same at all arrays.
      call: How the formulas are called, if arrays of one type share what is traced.
    """

    stage: Any
    who: CallName
    arrays: Mapping[str, Names]
    values: Mapping[str, Mapping[str, Names]]
    nodes: Mapping[str, Names] = field(default_factory=dict[str, Names])
    draw_path: str | None = None
    reads: Mapping[str, Names] = field(default_factory=dict[str, Names])
    copies: Mapping[str, str] = field(default_factory=dict[str, str])
    mean: bool = False
    formula: Any = None
    call: Any = None

    @cached_property
    def is_random(self) -> bool:
        """Whether the effective array is drawn."""
        return self.stage.stochastic and not self.mean

    @cached_property
    def is_noise(self) -> bool:
        """Whether its draw depends on the array's type alone, so that several can be drawn together."""
        return self.is_random and self.stage.draws_by_type

    @cached_property
    def value_places(self) -> list[Names]:
        """The key paths of all raw values."""
        return [place for places in self.values.values() for place in places.values()]

    @property
    def places_read(self) -> list[Names]:
        """The key paths of all that the formulas read."""
        return [*self.value_places, *self.reads.values()]

    def read(self, arrays: Mapping[Names, Any]) -> dict[str, dict[str, Any]]:
        """The raw values, and the arrays that the formulas read; fixed values pass no gradient."""
        raw_values = {
            name: {value: _read_value(arrays, place) for value, place in places.items()}
            for name, places in self.values.items()
        }
        return raw_values | {name: {"": _read_value(arrays, place)} for name, place in self.reads.items()}

    @property
    def free_values(self) -> dict[str, Names]:
        """The key path of each raw value that is not fixed, by its name."""
        pairs = [pair for places in self.values.values() for pair in places.items()]
        return {name: place for name, place in pairs if not value_of(self.stage.raw_values, name).fixed}

    def swaps(self, effective: Mapping[str, Any]) -> list[Swap]:
        """The effective arrays in place of the raw values; a marker without values has a place of its own."""
        return [
            (list(self.values[name].values()) or [self.nodes[name]], {place: effective[name]})
            for name, place in self.arrays.items()
        ]

    def raw_values(self, name: str, values: Mapping[str, Any]) -> dict[Names, Any]:
        """The raw values of an array, each at its key path, free ones first and fixed ones in their declared order."""
        node = self.nodes[name]
        order = {**self.stage.raw_values, **values}
        fixed = [value for value in order if value in values and value_of(self.stage.raw_values, value).fixed]
        placed = {(*node, value): x for value, x in values.items() if value not in fixed}
        return (placed | {(*node, FIXED, value): values[value] for value in fixed}) or {node: {}}


Waiting = dict[Names, tuple[Bound, Array]]
"""For the place of each array whose noise is not added yet, the binding of that noise, and its draw."""


def _read_value(arrays: Mapping[Names, Any], place: Names) -> Any:
    """The array at a key path; a fixed value passes no gradient."""
    x = jnp.asarray(arrays[place])
    return jax.lax.stop_gradient(x) if FIXED in place[-2:-1] else x


def bound_to(stage: Any, who: CallName, leaves: Mapping[str, Leaf], **details: Any) -> Bound:
    """A stage bound to arrays, or to the marker dicts that stand for them."""
    places = {name: leaf.place for name, leaf in leaves.items()}
    values = {name: leaf.values for name, leaf in leaves.items()}
    nodes = {name: leaf.node_of(stage.kind) for name, leaf in leaves.items()}
    return Bound(stage, who, places, values, nodes, **details)


def init_all(stages: Stages, params: PyTree, key: Array | None = None) -> PyTree:
    """The raw tree after ``init`` of each stage, the last one first, without the boxes of new arrays."""
    tree, keys = flatten(params), Keys(key)
    for i, stage in reversed(list(enumerate(stages))):
        tree = init_bound(stage.bind("init", tree.before(stages[i + 1 :])), tree, keys)
    return nest(tree)


def init_bound(bounds: Sequence[Bound], tree: Flat, keys: Keys) -> Flat:
    """The tree with raw values of one stage instead of arrays."""
    swaps = list[Swap]()
    with_markers = [bound for bound in bounds if bound.nodes]
    key_of_start = _start_keys(with_markers, keys)
    for i, bound in enumerate(with_markers):
        if any(isinstance(tree.arrays[place], jax.ShapeDtypeStruct) for place in bound.arrays.values()):
            raise TypeError(
                f"{bound.who}: expected an array, got its type. For types, call `jax.eval_shape(p.init, params)`."
            )
        arrays = {name: jnp.asarray(tree.arrays[place]) for name, place in bound.arrays.items()}
        with locate_errors(bound.who):
            values = bound.stage._init_at(bound, arrays, key_of_start.get(i))
        swaps += [([place], bound.raw_values(name, values[name])) for name, place in bound.arrays.items()]
    return tree.swap(swaps)


def _start_keys(bounds: Sequence[Bound], keys: Keys) -> dict[int, Array | None]:
    """For the index of each binding of a stage with a random start its key, or None without one."""
    drawing = {i: bound for i, bound in enumerate(bounds) if bound.stage._init_draws}
    if not drawing:
        return {}
    sites = [(next_number(b.arrays["w"], b.stage.kind), str(b.draw_path)) for b in drawing.values()]
    return dict(zip(drawing, keys.of_sites(bounds[0].stage.kind, sites), strict=True))


def apply_all(stages: Stages, tree: Flat, keys: Keys, bindings: list[tuple[Any, list[Bound]]] | None = None) -> Flat:
    """The tree after ``apply`` of each stage; ``bindings`` gets each stage with what it was bound to.

    Noise waits until another stage touches its array, so that neighbouring noises draw once.
    """
    waiting = Waiting()
    for i, stage in enumerate(stages):
        bounds = stage.bind("apply", tree.before(stages[i + 1 :]))
        acting = list[Bound]()
        merged_paths = list[str]()
        for bound in bounds:
            if bound.is_noise and _merge_noise(bound, waiting):
                merged_paths.append(str(bound.draw_path))
            else:
                acting.append(bound)
        if waiting:
            tree = _add_noise(tree, waiting, [place for b in acting for place in b.places_read])
        tree = _apply_bound(stage.kind, acting, tree, keys, waiting, merged_paths)
        if bindings is not None:
            bindings.append((stage, bounds))
    return _add_noise(tree, waiting, list(waiting)) if waiting else tree


def _apply_bound(
    kind: str,
    bounds: Sequence[Bound],
    tree: Flat,
    keys: Keys,
    waiting: Waiting,
    merged_paths: Sequence[str] = (),
) -> Flat:
    """The tree after one stage, whose noise waits; an earlier stage draws the noise at ``merged_paths``."""
    arrays = dict(tree.arrays)
    swaps = list[Swap]()
    draws = draw_for_bounds(kind, bounds, arrays, keys, merged_paths)
    for i, bound in enumerate(bounds):
        if bound.is_noise:
            waiting[bound.value_places[0]] = bound, draws[i]
            continue
        with locate_errors(bound.who):
            effective = bound.stage._apply_at(bound, bound.read(arrays), draws.get(i))
        arrays |= {place: effective[name] for name, place in bound.arrays.items()}
        swaps += bound.swaps(effective)
    return tree.swap(swaps)


def _add_noise(tree: Flat, waiting: Waiting, places: Sequence[Names]) -> Flat:
    """The tree with the noise that waits at these places."""
    arrays = dict(tree.arrays)
    for place in places:
        if place in waiting:
            bound, drawn = waiting.pop(place)
            with locate_errors(bound.who):
                arrays[place] = bound.stage._add_noise(_read_value(arrays, place), drawn)
    return tree.with_arrays(arrays)


def _merge_noise(bound: Bound, waiting: Waiting) -> bool:
    """Whether the noise that waits at an array is now that of ``bound`` too; if not, each needs a draw of its own.

    A class must define ``merged_with`` itself: a subclass may have another formula, so it does not inherit the method.
    """
    place, cls = bound.value_places[0], type(bound.stage)
    if place not in waiting or type(waiting[place][0].stage) is not cls or "merged_with" not in vars(cls):
        return False
    earlier, drawn = waiting[place]
    merged_stage = earlier.stage.merged_with(bound.stage)
    if merged_stage is not None:
        waiting[place] = replace(earlier, stage=merged_stage), drawn
    return merged_stage is not None


def mean_stages(stages: Stages) -> list[Any]:
    """The stages without randomness."""
    return [part for stage in stages for part in stage.deterministic._parts]


def types_of(bound: Bound, tree: Flat) -> Mapping[str, Any]:
    """The types of the effective arrays, without randomness; an error if the formula does not take the raw values."""
    arrays = {place: type_of(tree.arrays[place]) for place in bound.places_read}
    mean = replace(bound, mean=True)
    with locate_errors(bound.who):
        return jax.eval_shape(lambda arrays: bound.stage._apply_at(mean, mean.read(arrays), None), arrays)


class Step(NamedTuple):
    """A stage without randomness, what it is bound to, and the trees before and after it."""

    stage: Any
    bounds: list[Bound]
    before: Flat
    after: Flat


def _walk(method: str, stages: Stages, tree: Flat) -> Iterator[Step]:
    """The step of each stage through the tree, without randomness."""
    stages = mean_stages(stages)
    for i, stage in enumerate(stages):
        bounds = stage.bind(method, tree.before(stages[i + 1 :]))
        after = _apply_bound(stage.kind, bounds, tree, Keys(None), {})
        yield Step(stage, bounds, before=tree, after=after)
        tree = after


def require_made_by(p: Any, method: str, raw: PyTree) -> None:
    """Requires that a chain made a raw tree, for a method that reads only some of it."""

    def effective(raw: PyTree) -> PyTree:
        tree = flatten(raw)
        for step in _walk(method, tuple(p), tree):
            tree = step.after
        require_no_markers(p, tree)
        return nest(tree)

    types_of_result(effective, raw)


def update_all(who: object, stages: Stages, tree: Flat, keys: Keys, grads: PyTree) -> Flat:
    """The raw tree after one training step, of which the fixed values know."""

    def values_of_stage(i: int, bounds: Sequence[Bound], effective: Flat) -> Iterator[RawValues]:
        """The new values of each binding; none if the stage takes a gradient or a key that is not given."""
        takes_grad, takes_key = (name in stages[i].update_reads for name in ("grad", "key"))
        if (takes_grad and grads is None) or (takes_key and not keys.has_key):
            return
        slopes = _grads_after_first(who, stages[i:], effective, grads).arrays if takes_grad else {}
        keys_of_bounds = _update_keys(stages[i].kind, bounds, effective, keys) if takes_key else repeat(None)
        for bound, key in zip(bounds, keys_of_bounds, strict=False):
            slopes_of_arrays = {name: slopes[place] for name, place in bound.arrays.items()} if slopes else {}
            with locate_errors(bound.who):
                values = bound.stage._update_at(bound, bound.read(effective.arrays), slopes_of_arrays, key)
            yield values

    return _change_values("update", stages, tree, values_of_stage)


def _update_keys(kind: str, bounds: Sequence[Bound], effective: Flat, keys: Keys) -> Iterator[Any]:
    """The key with which ``update`` of each binding draws, or the keys of its stacked arrays."""
    draw_paths = [str(bound.draw_path) for bound in bounds]
    sites = list(zip(keys.numbers(kind, draw_paths), draw_paths, strict=True))
    # Under the key of `init`, the numbers that chose the first mask must not choose the next one too.
    for bound, key in zip(bounds, keys.of_sites(f"{kind}.update", sites), strict=True):
        yield keys_of_stack(key, types_of(bound, effective)["w"], bound.stage.stacked_axes)


def update_all_bases(stages: Stages, tree: Flat) -> Flat:
    """The raw tree with each base at the current point."""

    def values_of_stage(_: int, bounds: Sequence[Bound], effective: Flat) -> Iterator[RawValues]:
        for bound in bounds:
            with locate_errors(bound.who):
                values = bound.stage._update_base_at(bound, bound.read(effective.arrays))
            yield values

    return _change_values("update_base", stages, tree, values_of_stage)


def _change_values(
    method: str,
    stages: Stages,
    tree: Flat,
    values_of_stage: Callable[[int, Sequence[Bound], Flat], Iterator[RawValues]],
) -> Flat:
    """The raw tree with new values of each stage that does something in a method.

    ``values_of_stage`` gives those of each binding of a stage, by its number, its bindings and the tree that it reads.
    """
    for i, stage in enumerate(stages):
        if not stage._unwrapped._defines(method):
            continue
        effective = apply_all(mean_stages(stages[:i]), tree, Keys(None))
        bounds = stage.bind(method, effective.before(stages[i + 1 :]))
        arrays = dict(effective.arrays)
        for bound in bounds:
            types_of(bound, effective)  # an error if the formula does not take the raw values
        for bound, values in zip(bounds, values_of_stage(i, bounds, effective), strict=False):
            for name, values_of_one in values.items():
                arrays |= {bound.values[name][value]: x for value, x in values_of_one.items()}
        free = method == "update_base" or stage.moves_weights
        tree = graft(method, tree, effective, effective.with_arrays(arrays), free=free)
    return tree


def _grads_after_first(who: object, stages: Stages, effective: Flat, grads: PyTree) -> Flat:
    """The gradient with respect to the output of the first stage, from that of the effective tree; else zeros."""
    tree = apply_all(mean_stages(stages[:1]), effective, Keys(None))
    later_stages = mean_stages(stages[1:])
    moving = {place: x for place, x in tree.arrays.items() if is_array(x) and is_inexact(x)}

    def apply_later(arrays: dict[Names, Any]) -> tuple[list[Any], list[str]]:
        later = nest(apply_all(later_stages, tree.with_arrays({**tree.arrays, **arrays}), Keys(None)))
        paths, leaves, _ = flatten_with_names(later)
        places = inexact_places(leaves)
        return [leaves[i] for i in places], [path_text(paths[i]) for i in places]

    effective_leaves, pullback, paths = jax.vjp(apply_later, moving, has_aux=True)
    grads_of_moving = pullback(_match_grads(who, paths, effective_leaves, grads))[0]
    return tree.with_arrays({place: grads_of_moving.get(place, 0.0) for place in tree.arrays})


def _match_grads(who: object, paths: list[str], effective_leaves: list[Any], grads: PyTree) -> list[Any]:
    """The gradients of the effective arrays at ``paths``, in their order and dtypes."""
    if marks := outer_markers(grads):
        path, mark = next(iter(marks.items()))
        raise ValueError(
            f"{who} takes gradients of the effective tree, but got those of a raw tree: they hold {mark!r} at "
            f"{path!r}. Pass `jax.grad(loss)(p.fold(raw))`, where `loss` takes the model's own parameters."
        )
    grad_of_path = {path_text(path): grad for path, grad in items(grads)}
    pairs = zip(paths, effective_leaves, strict=True)
    return [_match_grad(who, path, w, grad_of_path.get(path)) for path, w in pairs]


def _match_grad(who: object, path: str, w: Any, grad: Any) -> Array:
    """The gradient of an effective array, in its dtype; an error if it has another shape, or is complex alone."""
    if not is_array(grad) or grad.shape != w.shape:
        text = f"one of shape {grad.shape}" if is_array(grad) else repr(grad)
        found = "none" if grad is None else text
        raise ValueError(
            f"{who} expected a gradient of shape {w.shape} at {path!r}, but got {found}. Pass the whole tree of "
            f"`jax.grad(loss)(p.fold(raw))`."
        )
    if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(w):
        raise ValueError(
            f"{who} expected a real gradient at {path!r}, got one of dtype {grad.dtype}. Take its real part."
        )
    return jnp.asarray(grad).astype(w.dtype)


def total_penalty(stages: Stages, tree: Flat) -> Array:
    """The sum of the penalties."""
    return add_up([_total("penalty", step.bounds, step.before) for step in _walk("penalty", stages, tree)])


def _total(formula: str, bounds: Sequence[Bound], tree: Flat) -> Array:
    """The sum of a formula over the bindings."""
    totals: list[Array] = []
    for bound in bounds:
        with locate_errors(bound.who):
            totals.append(jnp.sum(bound.stage._number_at(bound, formula, bound.read(tree.arrays))))
    return add_up(totals)


def total_log_det(stages: Stages, tree: Flat) -> Array:
    """The sum of the log-determinants over the values that train."""
    log_dets = list[Array]()
    producers = dict[Names, Any]()  # the stage of each place with entries that follow from others
    trained = [place for place, x in tree.arrays.items() if is_array(x) and FIXED not in place]
    free_places = {place[:n] for place in trained for n in range(len(place) + 1)}
    for step in _walk("log_det", stages, tree):
        _require_bijection(step.stage)
        free_bounds = [bound for bound in step.bounds if not free_places.isdisjoint(bound.arrays.values())]
        for bound in free_bounds:
            with locate_errors(bound.who):
                _require_free(bound.free_values, free_places, producers)
            n_values = _count_numbers(step.before, bound.free_values.values())
            if bound.stage.overcomplete or n_values < _count_numbers(step.after, bound.arrays.values()):
                producers |= dict.fromkeys(bound.arrays.values(), step.stage)
        log_dets.append(_total("log_det", free_bounds, step.before))
    return add_up(log_dets)


def _require_bijection(stage: Any) -> None:
    """Requires a stage that defines its log-determinant."""
    if not stage._unwrapped._defines("log_det"):
        raise ValueError(
            f"{stage!r}.log_det: the stage is not a bijection, so its Jacobian has no determinant. "
            f"Use a chain of bijections, such as Positive, Bounded, Scale, Simplex, PositiveDefinite or "
            f"Triangular; a stage of your own needs log_det_leaf(values)."
        )


def _require_free(values: Mapping[str, Names], free_places: set[Names], producers: Mapping[Names, Any]) -> None:
    """Requires that the Jacobian is the one of the formula: no value is frozen, or follows from others."""
    for name, place in values.items():
        if place not in free_places:
            raise ValueError(
                f"expected that all values of an array train, or none, but {name!r} is frozen, and the log-determinant "
                f"counts all. Freeze the others too, or train {name!r}."
            )
        if place in producers:
            raise ValueError(
                f"expected entries that are all free, but some of those that {producers[place]!r} gives follow from "
                f"others, and the log-determinant would count them too. Put the stage before {producers[place]!r} in "
                f"the chain, or write one stage for both with a log_det_leaf."
            )


def _count_numbers(tree: Flat, places: Iterable[Names]) -> int:
    """The number of real numbers in the arrays at these places."""
    arrays = [tree.arrays[place] for place in places]
    return sum(math.prod(x.shape) * (2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1) for x in arrays)


def follow_axes(stages: Stages, params: PyTree) -> tuple[PyTree, Origins]:
    """The shapes of the raw tree, and for each of their axes the axis of ``params`` that it follows."""
    tree, origins = params, keep_origins(params)
    for stage in reversed(stages):
        tree, origins_of_stage = stage._unwrapped._follow_axes(tree, lambda tree, stage=stage: init_all((stage,), tree))
        origins = compose_origins(origins_of_stage, origins)
    return tree, origins


@dataclass(frozen=True, eq=False)
class Provenance:
    """What a chain does with a raw tree.

    Attributes:
      raw: The raw tree, laid flat.
      bindings: Each stage, and what it is bound to.
      effective: The types of the effective tree, in its own structure.
    """

    raw: Flat
    bindings: Sequence[tuple[Any, Sequence[Bound]]]
    effective: PyTree

    @cached_property
    def producers(self) -> dict[Names, tuple[Any, Mapping[str, Names]]]:
        """For each array that a stage computes of raw values the stage, and the key paths of these values."""
        with_markers = [bound for _, bounds in self.bindings for bound in bounds if bound.nodes]
        return {place: (b.stage, b.values[name]) for b in with_markers for name, place in b.arrays.items()}

    @cached_property
    def places(self) -> dict[str, Names]:
        """The key path of each array of the effective tree, by its path."""
        return {path_text(place): place for place, _ in items(self.effective)}

    def has_values(self, place: Names) -> bool:
        """Whether the raw tree holds any value of the array at a place; a tied one has none of its own."""
        return place not in self.producers or any(map(self.has_values, self.producers[place][1].values()))


def provenance_of(p: Any, raw: PyTree, otherwise: str = CONVERT) -> Provenance:
    """The provenance of a raw tree, concrete or of types; ``otherwise`` says what to do if ``p`` did not make it."""
    require_no_references(p, "apply", raw)
    raw = gather_boxes(raw)
    bindings = list[tuple[Any, list[Bound]]]()

    def effective(raw: PyTree) -> PyTree:
        tree = apply_all(tuple(p), flatten(raw), Keys(jax.random.key(0)), bindings)
        require_no_markers(p, tree, otherwise)
        return nest(tree)

    return Provenance(flatten(raw), bindings, types_of_result(effective, raw))


def require_no_markers(p: Any, tree: Flat, otherwise: str = CONVERT, later: Stages = ()) -> None:
    """Requires that no marker is left after all stages of ``p`` but the ``later`` ones: ``p`` made the raw tree."""
    for place in tree.arrays:
        mark = next((name for name in place if name.startswith("@")), None)
        if mark is not None and kind_of(mark) not in {stage.kind for stage in later}:
            raise _left_marker_error(p, tree, parameter_path(place), mark, otherwise)


def _left_marker_error(p: Any, tree: Flat, path: str, mark: str, otherwise: str) -> ValueError:
    """The error for a marker that is left after all stages; that of its stage, if its values do not fit this."""
    who, makers = CallName(p, "apply"), [stage for stage in p if stage.kind == kind_of(mark)]
    if not makers:
        return ValueError(f"{who} does not know {mark!r} at {path!r}: {OTHER_CHAIN} {UPTO}")
    for stage in makers:
        stage._unwrapped._check_values_at(tree, path)
    return ValueError(
        f"{who} does not select {path!r}, where the raw tree holds {mark!r}: another chain or an older version of "
        f"reparax made it. {otherwise}"
    )
