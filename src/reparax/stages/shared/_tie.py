"""One parameter in several places."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors
from reparax.core.config import code
from reparax.core.paths import Names, describe
from reparax.core.plan import Layer, Planner, Site, SiteValues, opened_spot
from reparax.core.raw import Flat, Slot
from reparax.core.sites import Node, find_nodes
from reparax.core.where import matches, nearest
from reparax.numerics.arithmetic import is_array

Transform = Callable[[Array], Array]
Tied = tuple[str, str, Transform | None]


@dataclass(frozen=True, eq=False)
class _Tied(Site):
    """A tied array, and the function of its source that it is."""

    transform: Transform = field(kw_only=True)

    def open(self, arrays: Mapping[str, Array], key: Array | None) -> SiteValues:
        del key
        return {name: {} for name in arrays}

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        del key_or_draw
        return {"w": self.transform(values["source"][""])}


class _Ties(Planner):
    """The planner of a tie."""

    def plan_init(self, tree: Flat) -> Layer:
        who, (slots, tied) = self.who("init"), _find_tied(tree, self.stage.kind)
        places = self._places("init", slots)
        for target, (source, transform) in places.items():
            if tied_twice := [place for place in (target, source) if place in tied]:
                raise ValueError(
                    f"{who} names {slots[tied_twice[0]].seed!r}, which a later Tie of the chain has tied already. Use "
                    f"each path as a target once, and the owner of a tied array as the source."
                )
            target_array, source_array = tree.arrays[target], tree.arrays[source]
            self._require_equal(slots[target].seed, target_array, slots[source].seed, source_array, transform)
        return self.layer("init", self._sites(slots, places, tree.arrays))

    def _require_equal(
        self, target: str, target_array: Any, source: str, source_array: Any, transform: Transform
    ) -> None:
        """Requires the type that the source gives; its numbers too, unless ``unequal`` allows others."""
        shape = jax.eval_shape(jnp.asarray, target_array)
        given_type = jax.eval_shape(lambda x: transform(x), source_array)
        if (shape.shape, shape.dtype) != (given_type.shape, given_type.dtype):
            raise ValueError(
                f"{self.who('init')}: {target!r} is {describe(shape)}, but its source {source!r} gives "
                f"{describe(given_type)}. Add a transform from the source to the target."
            )
        if self.stage.unequal == "raise" and _differ(target_array, source_array, transform):
            raise ValueError(
                f"{self.who('init')}: {target!r} does not equal what its source {source!r} gives, so tying would "
                f"change the model. Set the target to that first, drop the tie, or pass `unequal='overwrite'`."
            )

    def plan(self, method: str, tree: Flat) -> Layer:
        who, (slots, tied) = self.who(method), _find_tied(tree, self.stage.kind)
        for target, _, _ in self.stage.ties:
            if not matches(target, [slot.path for slot in slots.values()]):
                raise ValueError(
                    f"{who} found nothing at {target!r}, where `init` leaves an empty node. Flattened "
                    f"formats lose empty nodes: restore into the structure of `jax.eval_shape(p.init, params)`."
                )
        places = self._places(method, slots)
        for target in places:
            if target not in tied:
                raise ValueError(
                    f"{who} got a tree that never went through init: {slots[target].seed!r} holds a value of its "
                    f"own. Call `raw = p.init(params)` once, with the whole chain, and pass `raw`."
                )
            with locate_errors(f"{who} at {slots[target].path!r}"):
                if tied[target].content_below is not None:  # some formats store an empty node so
                    tied[target].require_values()
        return self.layer(method, self._sites(slots, places, tree.arrays))

    def _sites(
        self, slots: Mapping[Names, Slot], places: Mapping[Names, tuple[Names, Transform]], arrays: Mapping[Names, Any]
    ) -> list[_Tied]:
        """A site for each tied array, after that of its source."""
        site_at: dict[Names, _Tied] = {}

        def add(target: Names) -> Any:
            """The type of an array."""
            if target not in places:
                return arrays[target]
            if target not in site_at:
                source, transform = places[target]
                type_ = jax.eval_shape(lambda x: transform(x), add(source))
                spot = opened_spot(self.stage.kind, target, type_)
                path, reads = slots[target].path, {"source": source}
                copies = {path: slots[source].path}
                site_at[target] = _Tied(
                    self.stage, repr(path), {"w": spot}, reads=reads, copies=copies, transform=transform
                )
            return site_at[target].spots["w"].type

        for target in places:
            add(target)
        return list(site_at.values())

    def _places(self, method: str, slots: Mapping[Names, Slot]) -> dict[Names, tuple[Names, Transform]]:
        """For each tied array, by its place: its source array and the transform."""
        places: dict[Names, tuple[Names, Transform]] = {}
        places_of_path: dict[str, dict[str, Names]] = {}
        for place, slot in slots.items():
            places_of_path.setdefault(slot.path, {})[slot.seed] = place
        for target, source, transform in self._resolved(method, list(places_of_path)):
            for draw, place in places_of_path[target].items():
                is_single = len(places_of_path[target]) == len(places_of_path[source]) == 1
                image = next(iter(places_of_path[source])) if is_single else source + draw.removeprefix(target)
                if image not in places_of_path[source]:
                    raise ValueError(
                        f"{self.who(method)}: {target!r} and {source!r} hold different raw values; {draw!r} has no "
                        f"counterpart {image!r}. To share effective arrays, put the tie last in the chain."
                    )
                places[place] = (places_of_path[source][image], transform or _identity)
        return places

    def _resolved(self, method: str, paths: Sequence[str]) -> list[Tied]:
        """The ties for the arrays of a tree, with regular expressions resolved to paths."""
        who = self.who(method)
        resolved_ties: list[Tied] = []
        for target, source, transform in self.stage.ties:
            pairs = [(match[0], _expand_source(who, match, source, paths)) for match in matches(target, paths)]
            missing = [path for _, path in pairs if path not in paths] if pairs else [target]
            if missing:
                near = nearest(missing[0], paths)
                raise ValueError(f"{who} found no array at {missing[0]!r}; the nearest paths are {near}.")
            resolved_ties += [(target_path, owner, transform) for target_path, owner in pairs if target_path != owner]
        _require_one_source(who, resolved_ties)
        _require_no_loop(who, {target: source for target, source, _ in resolved_ties})
        return resolved_ties


class Tie(Parametrization):
    r"""One parameter in several places: each target is its source, or a pure function of it.

    The raw tree holds each parameter once, at its owner. A tied place holds the empty node ``{"@tie": {}}``, so
    optimizer states and checkpoints have no copy, and gradients are summed at the owner. A source may be tied itself.
    The place in the chain decides what is shared::

        VarNoise(s) >> Tie(...)      one noise, drawn at the owner and shared
        Tie(...) >> VarNoise(s)      separate noise for each use
        WeightNorm() >> Tie(...)     the normalized weight is shared, with its length
        Tie(...) >> WeightNorm()     the direction is shared, each use has its own length

    ``init`` is exact: it checks that each target equals its transformed source. Under ``jax.jit`` it can check only
    shapes and dtypes. ``p.owners(params)`` shows the owner of each parameter.

    Args:
      ties: For each target its source, or a pair of source and transform, which is any pure function of one array. A
        target is a path, or a regular expression for whole paths; its source may refer to groups of the expression. A
        target that resolves to itself owns the parameter.
      unequal: What ``init`` does with a target that differs from its transformed source: ``"raise"``: an error;
        ``"overwrite"``: it ties it anyway, which changes the model.

    Raises:
      TypeError: If a tie is not a path, or a pair of path and function, for each target path.
      ValueError: If there are no ties, if a target has two sources, if ties form a loop, or if ``unequal`` is another
        word.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Tie({"output/kernel": ("embed/table", jnp.transpose)})
      >>> raw = p.init({"embed": {"table": jnp.ones((3, 2))}, "output": {"kernel": jnp.ones((2, 3))}})
      >>> jax.tree.map(jnp.shape, raw)
      {'embed': {'table': (3, 2)}, 'output': {'kernel': {'@tie': {}}}}
      >>> jax.tree.map(jnp.shape, p.apply(raw))
      {'embed': {'table': (3, 2)}, 'output': {'kernel': (2, 3)}}
      >>> rpx.Tie({r"layers/(\d+)/k": r"layers/\1/q", r"layers/\d+/norm": "layers/0/norm"})
      Tie({'layers/(\\d+)/k': 'layers/\\1/q', 'layers/\\d+/norm': 'layers/0/norm'})
    """

    ties: Any
    unequal: str = field(default="raise", kw_only=True)

    _planner: ClassVar[type[Planner]] = _Ties

    def __post_init__(self) -> None:
        ties = _parse_ties(self.ties)
        _require_no_loop("Tie", {target: source for target, source, _ in ties})
        object.__setattr__(self, "ties", ties)
        if self.unequal not in ("raise", "overwrite"):
            raise ValueError(f"Tie takes 'raise' or 'overwrite' as unequal, but got {self.unequal!r}.")

    def __repr__(self) -> str:
        def value(source: str, transform: Transform | None) -> str:
            return repr(source) if transform is None else f"({source!r}, {code(transform)})"

        ties = ", ".join(f"{target!r}: {value(source, f)}" for target, source, f in self.ties)
        return f"Tie({{{ties}}}{'' if self.unequal == 'raise' else f', unequal={self.unequal!r}'})"


def _find_tied(tree: Flat, kind: str) -> tuple[dict[Names, Slot], dict[Names, Node]]:
    """The description of each array and of each place that a tie of this kind has taken; and the nodes there."""
    nodes = {place: node for place, node in find_nodes(tree, kind).items() if not node.values}
    model_tree = tree.swap([(node.inside, {place: node}) for place, node in nodes.items()])
    slots = {at: slot for at, slot in model_tree.slots().items() if at in nodes or is_array(model_tree.arrays[at])}
    return slots, nodes


def _expand_source(who: str, match: re.Match[str], source: str, paths: Sequence[str]) -> str:
    """The source of a matched target, with the groups filled in."""
    if source in paths:
        return source
    try:
        return match.expand(source)
    except (re.error, IndexError) as error:
        raise ValueError(f"{who} cannot make a path of {source!r} for {match[0]!r}: {error}.") from error


def _parse_ties(ties: Any) -> tuple[Tied, ...]:
    """The ties as target, source and transform; raises an error for other forms, and for none."""
    pairs = isinstance(ties, tuple | list) and all(isinstance(tie, tuple | list) and len(tie) > 1 for tie in ties)
    if not isinstance(ties, Mapping) and not pairs:
        raise TypeError(
            f"Tie takes a dict of target paths and their sources, but got {ties!r} of type {type(ties).__name__}. "
            f"Write `rpx.Tie({{target: source}})`."
        )
    items = ties.items() if isinstance(ties, Mapping) else [(t[0], t[1] if len(t) == 2 else t[1:]) for t in ties]
    entries = tuple(_parse_tie(target, value) for target, value in items)
    if not entries:
        raise ValueError("Tie got no ties. Name at least one target and its source.")
    _require_one_source("Tie", entries)
    return entries


def _require_one_source(who: str, ties: Iterable[Tied]) -> None:
    """Raises an error if a target has two sources."""
    sources: dict[str, str] = {}
    for target, source, _ in ties:
        if target in sources:
            raise ValueError(
                f"{who} got two sources for {target!r}: {sources[target]!r} and {source!r}. Leave one of them out."
            )
        sources[target] = source


def _require_no_loop(who: str, sources: Mapping[str, str]) -> None:
    """Raises an error if the sources of a target lead back to it."""
    for target in sources:
        loop = [target]
        while (source := sources.get(loop[-1])) is not None:
            if source in loop:
                circle = " -> ".join([*loop[loop.index(source) :], source])
                raise ValueError(f"{who} got a loop: {circle}. Leave one of them untied, as the owner.")
            loop.append(source)


def _parse_tie(target: Any, value: Any) -> Tied:
    """One tie as target, source and transform, which is None if there is none."""
    match target, value:
        case str(), str():
            return target, value, None
        case str(), [str() as source] | [str() as source, None]:
            return target, source, None
        case str(), [str(), transform] if callable(transform):
            return target, *value
        case _:
            raise TypeError(
                f"Tie takes a path, or a pair of path and function, for each target path, "
                f"but got {target!r}: {value!r}."
            )


def _identity(x: Array) -> Array:
    """The transform of a tie that has none."""
    return x


def _as_numpy(x: Array) -> np.ndarray:
    """An array in numpy; of PRNG keys their words."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _differ(target: Any, source: Any, transform: Transform) -> bool:
    """Whether values are known and differ by more than rounding."""
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in (target, source)):
        return False
    with jax.ensure_compile_time_eval():  # known arrays are compared also if `init` is called under `jax.jit`
        target_numbers, source_numbers = (_as_numpy(x) for x in (jnp.asarray(target), transform(jnp.asarray(source))))
    eps = float(jnp.finfo(target_numbers.dtype).eps) if jnp.issubdtype(target_numbers.dtype, jnp.inexact) else 0.0
    wide = np.result_type(np.float64, target_numbers.dtype) if target_numbers.dtype.kind != "V" else np.float64
    return not np.allclose(
        target_numbers.astype(wide), source_numbers.astype(wide), rtol=4 * eps, atol=0, equal_nan=True
    )
