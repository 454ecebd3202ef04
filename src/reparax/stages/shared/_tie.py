"""The stage ``Tie``: one parameter that the model reads in several places.

A *target* is the path of a tied array. A *transform* computes this array from its *sources*, the arrays at one or
several other paths. The array that the raw tree stores is the *owner* of the parameter. A *place* is a key path in the
raw tree, including marker keys such as ``@lora``. A path may have several places, because a later stage may replace its
array by several raw values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.calls import CallName
from reparax.core.chain import Parametrization
from reparax.core.checks import locate_errors
from reparax.core.config import code
from reparax.core.fields import field
from reparax.core.paths import Names, describe
from reparax.core.raw import Flat, Leaf, Node
from reparax.core.site import Site, site_of
from reparax.core.values import RawValues
from reparax.core.where import match_paths, nearest, why_never_applies
from reparax.numerics.arguments import one_of

Transform = Callable[..., Array]
Source = str | tuple[str, ...]
Tied = tuple[str, Source, Transform | None]


Unequal = Literal["raise", "overwrite"]


class Tie(Parametrization):
    r"""Shares a parameter between several paths: each target is its source, or a pure function of one or more sources.

    The raw tree holds each shared parameter once, at the path of its owner. An empty node, ``{"@tie": {}}``, replaces
    each tied array, so optimizer states and checkpoints hold no copies, and gradients are summed at the owner. A source
    may itself be tied. The position of ``Tie`` in the chain decides what is shared::

        VarNoise(s) >> Tie(...)      one noise, drawn at the owner and shared
        Tie(...) >> VarNoise(s)      separate noise for each use
        WeightNorm() >> Tie(...)     the normalized weight is shared, with its length
        Tie(...) >> WeightNorm()     the direction is shared, each use has its own length

    ``init`` checks that each target equals its transformed source, so it is exact. Under ``jax.jit``, it can check only
    shapes and dtypes. ``p.raw_paths(params)`` shows the owner of each parameter.

    Args:
      ties: A dict that maps each target to its source, to a pair of a source and a transform (any pure function of one
        array), or to a pair of a tuple of sources and a function that takes them in this order. A target is a path, or
        a regular expression that matches whole paths; if several expressions match a path, the first of them applies.
        The source may refer to groups of the expression. If the source of a target resolves to the target itself, the
        target owns the parameter. A path with an ``@`` names a value in the raw tree of later stages: for example,
        ``Tie({"b/@lora/a": "a/@lora/a"}, unequal="overwrite") >> LoRA(4)`` shares one factor of two adapters that would
        otherwise start at different random numbers.
      unequal: What ``init`` does if a target differs from its transformed source: ``"raise"`` raises an error;
        ``"overwrite"`` ties it anyway, which changes the model.

    Raises:
      TypeError: If a tie is neither a path nor a pair of one or more paths and a function.
      ValueError: If there are no ties, if a target has two sources, if ties form a loop, or if ``unequal`` is not one
        of the words above.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Tie({"output/kernel": ("embed/table", jnp.transpose)})
      >>> raw = p.init({"embed": {"table": jnp.ones((3, 2))}, "output": {"kernel": jnp.ones((2, 3))}})
      >>> jax.tree.map(jnp.shape, raw)
      {'embed': {'table': (3, 2)}, 'output': {'kernel': {'@tie': {}}}}
      >>> jax.tree.map(jnp.shape, p.apply(raw))
      {'embed': {'table': (3, 2)}, 'output': {'kernel': (2, 3)}}
      >>> qkv = rpx.Tie({"qkv": (("q", "k", "v"), lambda *parts: jnp.concatenate(parts, 1))})
      >>> parts = {"q": jnp.ones((3, 2)), "k": jnp.ones((3, 1)), "v": jnp.ones((3, 1))}
      >>> qkv.raw_paths({**parts, "qkv": jnp.ones((3, 4))})["qkv"]
      ('q', 'k', 'v')
      >>> rpx.Tie({r"layers/(\d+)/k": r"layers/\1/q", r"layers/\d+/norm": "layers/0/norm"})
      Tie({'layers/(\\d+)/k': 'layers/\\1/q', 'layers/\\d+/norm': 'layers/0/norm'})
    """

    ties: Any
    unequal: Unequal = field(one_of(Unequal), default="raise", kw_only=True)

    _is_layout: ClassVar[Any] = property(lambda self: self.unequal == "raise")

    def __post_init__(self) -> None:
        ties = _parse_ties(self.ties)
        _require_no_loop("Tie", {target: _as_tuple(source) for target, source, _ in ties})
        object.__setattr__(self, "ties", ties)
        super().__post_init__()

    def __repr__(self) -> str:
        def value(source: Source, transform: Transform | None) -> str:
            return repr(source) if transform is None else f"({source!r}, {code(transform)})"

        ties = ", ".join(f"{target!r}: {value(source, f)}" for target, source, f in self.ties)
        return f"Tie({{{ties}}}{'' if self.unequal == 'raise' else f', unequal={self.unequal!r}'})"

    def sites(self, method: str, tree: Flat) -> list[Site]:
        """Returns one site (a use of the stage) for each tied array, in an order in which sources precede targets.

        Raises an error if a tied array does not equal its transformed sources in ``init``, or if it is not an empty
        node in other methods.
        """
        who = CallName(self, method)
        nodes = {place: node for place, node in tree.nodes(self.kind).items() if not node.values}
        leaves = {leaf.place: leaf for leaf in tree.with_nodes(nodes).leaves() if leaf.is_there}
        places = _by_path(leaves.values())
        if method != "init":
            self._require_targets(who, places)
        links = self._links(who, places)
        for target, link in links.items():
            if method == "init":
                self._require_equal(leaves[target], [leaves[place] for place in link.places], link.transform)
            else:
                _require_empty_node(who, leaves[target])
        sites: list[Site] = []
        for target in _sources_first({target: link.places for target, link in links.items()}):
            leaf, link = leaves[target], links[target]
            reads = {str(i): place for i, place in enumerate(link.places)}
            details = {"formula": link.transform, "reads": reads, "copies": link.copies}
            sites.append(site_of(self, who.at(leaf.path), {"w": leaf}, **details))
        return sites

    def _require_targets(self, who: CallName, places: PlacesOfPath) -> None:
        """Raises an error if a target matches no path of the raw tree, which are the keys of ``places``."""
        for target, _, _ in self.ties:
            if not match_paths(target, _paths_of_same_kind(target, places)):
                raise ValueError(
                    f"{who} found nothing at {target!r}, where `init` leaves {{'@tie': {{}}}}. Flattened formats "
                    f"lose empty nodes, so restore into the structure of `jax.eval_shape(p.init, params)`."
                )

    def _init_at(self, site: Site, arrays: Mapping[str, Array], key: Array | None) -> RawValues:
        del site, key
        return {name: {} for name in arrays}

    def _apply_at(self, site: Site, values: RawValues, key: Array | None) -> dict[str, Array]:
        del key
        return {"w": site.formula(*(values[name][""] for name in site.reads))}

    def _require_equal(self, target: Leaf, sources: Sequence[Leaf], transform: Transform) -> None:
        """Checks that a target has the shape, dtype and entries that the transform of its sources gives.

        With ``unequal="overwrite"``, the entries may differ.
        """
        who = CallName(self, "init")
        if tied := [leaf for leaf in (target, *sources) if isinstance(leaf.content, Node)]:
            raise ValueError(
                f"{who} names {tied[0].draw_path!r}, which a later Tie in the chain already ties. Use each path as a "
                f"target only once, and use the owner of a tied array as the source."
            )
        target_type = jax.eval_shape(jnp.asarray, target.content)
        contents = [source.content for source in sources]
        with locate_errors(who.at(target.path)):
            given_type = jax.eval_shape(lambda *arrays: transform(*arrays), *contents)
        names = ", ".join(repr(source.draw_path) for source in sources)
        origin = f"its source {names} gives" if len(sources) == 1 else f"its sources {names} give"
        if (target_type.shape, target_type.dtype) != (given_type.shape, given_type.dtype):
            raise ValueError(
                f"{who}: {target.draw_path!r} is {describe(target_type)}, but {origin} {describe(given_type)}. Add a "
                f"transform to the shape and dtype of the target."
            )
        if self.unequal == "raise" and _is_known_to_differ(target.content, contents, transform):
            raise ValueError(
                f"{who}: {target.draw_path!r} does not equal what {origin}, so tying would change the model. Set the "
                f"target to that value first, remove the tie, or pass `unequal='overwrite'`."
            )

    def _links(self, who: CallName, places: PlacesOfPath) -> dict[Names, _Link]:
        """Maps the key path of each tied array to a ``_Link`` that says how the array is computed."""
        links: dict[Names, _Link] = {}
        for target, sources, transform in self._resolve_ties(who, places):
            for draw_path, place in places[target].items():
                source_places = tuple(_place_of_source(who, target, draw_path, source, places) for source in sources)
                links[place] = _Link(source_places, transform or _identity, {} if "@" in target else {target: sources})
        return links

    def _resolve_ties(self, who: CallName, places: PlacesOfPath) -> list[tuple[str, tuple[str, ...], Transform | None]]:
        """Resolves all regular expressions to paths, and returns each tie as target, sources and transform."""
        resolved_ties: list[tuple[str, tuple[str, ...], Transform | None]] = []
        expression_of = dict[str, str]()  # Maps each path to the first expression that matches the path.
        for target, source, transform in self.ties:
            matched = match_paths(target, _paths_of_same_kind(target, places))
            new_matches = [match for match in matched if expression_of.setdefault(match[0], target) == target]
            if matched and not new_matches:
                path = matched[0][0]
                raise ValueError(f"{who} got a source for {why_never_applies(target, path, expression_of[path])}")
            ties = [
                (match[0], tuple(_expand_source(who, match, path, places) for path in _as_tuple(source)))
                for match in new_matches
            ]
            missing = [path for _, sources in ties for path in sources if path not in places] if ties else [target]
            if missing:
                raise ValueError(
                    f"{who} found no array at {missing[0]!r}; the nearest paths are "
                    f"{nearest(missing[0], _paths_of_same_kind(missing[0], places))}. Use existing paths."
                )
            resolved_ties += [(path, sources, transform) for path, sources in ties if sources != (path,)]
        _require_no_loop(who, {target: sources for target, sources, _ in resolved_ties})
        return resolved_ties


class _Link(NamedTuple):
    """Describes how a tied array is computed from its sources.

    Attributes:
      places: The key paths of the sources in the raw tree.
      transform: The function that is applied to the sources.
      copies: Maps the path of the tied array to the paths of its sources. Empty if the target is a raw value, whose
        path contains a marker.
    """

    places: tuple[Names, ...]
    transform: Transform
    copies: Mapping[str, tuple[str, ...]]


PlacesOfPath = Mapping[str, Mapping[str, Names]]
"""Maps each path, with and without markers, to the key paths of its arrays by their draw paths (see ``Leaf``)."""


def _by_path(leaves: Iterable[Leaf]) -> PlacesOfPath:
    """Maps each path, with and without markers such as ``@lora``, to the key paths of the given arrays."""
    places: dict[str, dict[str, Names]] = {}
    for leaf in leaves:
        for path in dict.fromkeys((leaf.path, leaf.raw_path)):
            places.setdefault(path, {})[leaf.draw_path] = leaf.place
    return places


def _paths_of_same_kind(path: str, paths: Iterable[str]) -> list[str]:
    """Selects the paths with markers if ``path`` contains a marker, and the paths without markers otherwise."""
    return [other for other in paths if ("@" in other) == ("@" in path)]


def _place_of_source(who: CallName, target: str, draw_path: str, source: str, places: PlacesOfPath) -> Names:
    """Returns the key path of the source array for the array of ``target`` with the given draw path.

    If the target or the source has several raw values, they are matched by draw path.
    """
    targets, sources = places[target], places[source]
    if len(targets) == len(sources) == 1:
        return next(iter(sources.values()))
    source_draw_path = source + draw_path.removeprefix(target)
    if source_draw_path not in sources:
        raise ValueError(
            f"{who}: {target!r} and {source!r} hold different raw values; {draw_path!r} has no counterpart "
            f"{source_draw_path!r}. To share effective arrays, put the tie last in the chain."
        )
    return sources[source_draw_path]


def _require_empty_node(who: CallName, target: Leaf) -> None:
    """Raises an error if a raw tree holds anything but an empty node for a tied array."""
    if not isinstance(target.content, Node):
        raise ValueError(
            f"{who} got a tree that never went through init: {target.draw_path!r} holds a value of its "
            f"own. Call `raw = p.init(params)` once, with the whole chain, and pass `raw`."
        )
    with locate_errors(who.at(target.path)):
        target.content.arrays(may_be_none=True)


def _sources_first(sources: Mapping[Names, Sequence[Names]]) -> list[Names]:
    """Sorts the key paths of tied arrays so that each comes after the key paths of its sources."""
    ordered: dict[Names, None] = {}

    def visit(place: Names) -> None:
        if place in sources and place not in ordered:
            for source in sources[place]:
                visit(source)
            ordered[place] = None

    for place in sources:
        visit(place)
    return list(ordered)


def _expand_source(who: object, match: re.Match[str], source: str, paths: Collection[str]) -> str:
    """Returns the path of the source for a target that matched an expression, filling in the groups of the match."""
    if source in paths:
        return source
    try:
        return match.expand(source)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"{who} cannot fill in {source!r} for {match[0]!r}: {error}. Refer only to groups of the target."
        ) from error


def _parse_ties(ties: Any) -> tuple[Tied, ...]:
    """Parses ties into targets, sources and transforms, and raises an error if there are none or one is malformed."""
    if isinstance(ties, Mapping):
        pairs = list(ties.items())
    elif isinstance(ties, tuple | list) and all(isinstance(tie, tuple | list) and len(tie) > 1 for tie in ties):
        pairs = [(tie[0], tie[1] if len(tie) == 2 else tie[1:]) for tie in ties]
    else:
        raise TypeError(
            f"Tie takes a dict of target paths and their sources, but got {ties!r} of type {type(ties).__name__}. "
            f"Write `rpx.Tie({{target: source}})`."
        )
    parsed = tuple(_parse_tie(target, value) for target, value in pairs)
    if not parsed:
        raise ValueError("Tie got no ties. Name at least one target and its source.")
    _require_one_source(parsed)
    return parsed


def _require_one_source(ties: Iterable[Tied]) -> None:
    """Raises an error if two ties have the same target."""
    sources: dict[str, Source] = {}
    for target, source, _ in ties:
        if target in sources:
            raise ValueError(
                f"Tie got two sources for {target!r}: {sources[target]!r} and {source!r}. Leave one of them out."
            )
        sources[target] = source


def _require_no_loop(who: object, sources: Mapping[str, Sequence[str]]) -> None:
    """Raises an error if following the sources of a target leads back to the target."""
    seen = set[str]()

    def follow(path: str, walk: Sequence[str]) -> None:
        if path in walk:
            cycle = " -> ".join([*walk[walk.index(path) :], path])
            raise ValueError(f"{who} got ties that form a loop: {cycle}. Leave one of the paths untied, as the owner.")
        if path not in seen:
            for source in sources.get(path, ()):
                follow(source, [*walk, path])
            seen.add(path)

    for target in sources:
        follow(target, [])


def _as_tuple(source: Source) -> tuple[str, ...]:
    """Returns one or several sources as a tuple."""
    return (source,) if isinstance(source, str) else source


def _parse_tie(target: Any, value: Any) -> Tied:
    """Parses one tie into target, source and transform. The transform is None if the tie has no transform."""
    match target, value:
        case str(), str():
            return target, value, None
        case str(), [str() as source] | [str() as source, None]:
            return target, source, None
        case str(), [str(), transform] if callable(transform):
            return target, *value
        case str(), [[*sources], transform] if callable(transform) and sources and _are_paths(sources):
            return target, tuple(sources), value[1]
        case _:
            raise TypeError(
                f"Tie maps each target path to a source path, or to a pair of one or more source paths and a function, "
                f"but got {target!r}: {value!r}."
            )


def _are_paths(sources: Sequence[Any]) -> bool:
    """Returns whether all sources are strings."""
    return all(isinstance(source, str) for source in sources)


def _identity(x: Array) -> Array:
    """Returns ``x`` unchanged. A tie without a transform uses this function instead."""
    return x


def _as_numpy(x: Array) -> np.ndarray:
    """Converts an array to numpy; PRNG keys are converted to their integer data."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _is_known_to_differ(target: Any, sources: Sequence[Any], transform: Transform) -> bool:
    """Returns whether a target differs from its transformed sources beyond rounding; False if an array is traced."""
    if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in (target, *sources)):
        return False
    with jax.ensure_compile_time_eval():  # Compare known arrays even if `init` runs under `jax.jit`.
        found, expected = _as_numpy(jnp.asarray(target)), _as_numpy(transform(*map(jnp.asarray, sources)))
    eps = float(jnp.finfo(found.dtype).eps) if jnp.issubdtype(found.dtype, jnp.inexact) else 0.0
    wide = np.result_type(np.float64, found.dtype) if found.dtype.kind != "V" else np.float64
    return not np.allclose(found.astype(wide), expected.astype(wide), rtol=4 * eps, atol=0, equal_nan=True)
