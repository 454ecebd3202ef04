"""``init``: the stages of a chain, the last one first, replace arrays by raw values; and whose axes these follow."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.boxes import boxes_of_values, stated_entries
from reparax.core.checks import locate_errors
from reparax.core.config import is_of_package
from reparax.core.origins import Origins, compose, keep_origins, probe_origins
from reparax.core.paths import types_of_result
from reparax.core.random import keys_of_draws
from reparax.core.raw import Flat, Swap, is_mark, kind_of, next_number
from reparax.core.site import Site, Stages, identity
from reparax.core.values import RawValues, value_of
from reparax.numerics.arithmetic import is_inexact


def start(stages: Stages, params: Flat, key: Array | None) -> Flat:
    """The raw tree of parameters, or of their types."""
    tree = params
    for i, stage in reversed(list(enumerate(stages))):
        tree = start_at(stage.sites("init", tree.before(stages[i + 1 :])), tree, key)
    return tree


def start_at(sites: Sequence[Site], tree: Flat, key: Array | None) -> Flat:
    """The tree with raw values of one stage instead of arrays."""
    with_markers = [site for site in sites if site.nodes]
    key_of_start, checked, swaps = _start_keys(with_markers, key), set[Any](), list[Swap]()
    for i, site in enumerate(with_markers):
        if any(isinstance(tree.arrays[place], jax.ShapeDtypeStruct) for place in site.arrays.values()):
            raise TypeError(
                f"{site.who}: expected an array, got its type. For types, call `jax.eval_shape(p.init, params)`."
            )
        arrays = {name: jnp.asarray(tree.arrays[place]) for name, place in site.arrays.items()}
        with locate_errors(site.who):
            values = site.stage._init_at(site, arrays, key_of_start.get(i))
            if (group := (identity(site.stage), *_types_of({"": arrays, **values}))) not in checked:
                site.stage._check_start(values, arrays)
                checked.add(group)
                if not (is_of_package(type(site.stage)) or site.stage.starts_elsewhere or site.stage.changes_type):
                    _warn_if_no_inverse(site, values, arrays, key_of_start.get(i))
        swaps += _swaps(site, values)
    return tree.swap(swaps)


def _warn_if_no_inverse(site: Site, values: RawValues, arrays: Mapping[str, Array], key: Array | None) -> None:
    """Warns if a start does not give back an array that its stage makes: at the start, and where free values moved."""
    if any(isinstance(x, Tracer) for x in arrays.values()):
        return
    stage, draw, distance = site.stage, np.random.default_rng(0), 0.0

    def made(values: RawValues) -> Mapping[str, Array]:
        return stage._apply_at(site, values, None)

    def made_again(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return made(stage._init_at(site, arrays, key))

    def moved(value: str, x: Array) -> Array:
        is_free = is_inexact(x) and not value_of(stage.raw_values, value).fixed
        tenth = jnp.asarray(0.1 * draw.standard_normal(x.shape), x.dtype)
        return x + tenth * jnp.where(x == 0, jnp.ones_like(x), x) if is_free else x

    with suppress(Exception):  # of any type: a formula of yours need not take what no training reaches
        points = [made(values)]
        if key is None:
            points.append(
                made({name: {value: moved(value, x) for value, x in values[name].items()} for name in values})
            )
            if any(declared.fixed for declared in stage.raw_values.values()):  # which belong to the start
                points[1] = made_again(points[1])
        distance = max(_distance(made_again(point)[name], w) for point in points for name, w in point.items())
    if distance > 0:
        init = "init_leaf" if hasattr(stage, "init_leaf") else "init_leaves"
        apply = "mean_leaf" if stage.stochastic else init.replace("init", "apply")
        warnings.warn(
            f"{site.who}: {init} does not invert {apply}: for an array w that {apply} has made, {apply}({init}(w)) "
            f"differs by {distance:.2g} of the largest entry, so training may not start at your weights. Mend one of "
            f"the two; if this is meant, set `starts_elsewhere = True` in the class.",
            stacklevel=2,
        )


def _distance(x: Array, w: Array) -> float:
    """The largest difference of two arrays, over the largest entry of ``w``; 0 if that is rounding, or not finite."""
    tolerance = max(1e-2, 8 * float(jnp.finfo(w.dtype).eps)) if is_inexact(w) else 1e-2
    x, w = (y.astype(jnp.promote_types(y.dtype, jnp.float32)) for y in (x, w))
    largest = float(jnp.max(jnp.abs(w), initial=0))
    difference = float(jnp.nan_to_num(jnp.max(jnp.abs(x - w), initial=0), nan=jnp.inf))
    return difference / largest if np.isfinite(largest) and difference > tolerance * largest else 0.0


def _start_keys(sites: Sequence[Site], key: Array | None) -> dict[int, Array | None]:
    """For the index of each site of a stage whose start takes a key that key, or None without one."""
    drawing = {i: site for i, site in enumerate(sites) if site.stage._init_takes_key}
    if not drawing:
        return {}
    draws = [(next_number(site.arrays["w"], site.stage.kind), str(site.draw_path)) for site in drawing.values()]
    return dict(zip(drawing, keys_of_draws(key, sites[0].stage.kind, draws), strict=True))


def _types_of(arrays: RawValues) -> list[Any]:
    """The names and types of arrays."""
    return [(name, value, x.shape, x.dtype) for name, of_one in arrays.items() for value, x in of_one.items()]


def _swaps(site: Site, values: RawValues) -> list[Swap]:
    """The raw values of a site in place of its arrays."""
    return [([place], site.raw_values(name, values[name])) for name, place in site.arrays.items()]


def follow(stages: Stages, params: Flat, origins: Origins | None = None) -> tuple[Flat, Origins]:
    """The types of the raw tree, and for each of its axes the axis of a parameter that it follows.

    ``origins`` are those of ``params``, if these follow others. Sites that are alike are asked once.
    """
    tree = params.types()
    followed = keep_origins(tree.arrays) if origins is None else dict(origins)
    for i, stage in reversed(list(enumerate(stages))):
        swaps, found = list[Swap](), dict[Any, tuple[RawValues, Origins]]()
        for site in stage.sites("init", tree.before(stages[i + 1 :])):
            if not site.nodes:
                continue
            types = {name: tree.arrays[place] for name, place in site.arrays.items()}
            group = identity(site.stage), id(site.formula), *((name, w.shape, w.dtype) for name, w in types.items())
            if group not in found:
                found[group] = _follow_at(site, types)
            values, origins_of_values = found[group]
            swaps += _swaps(site, values)
            followed |= _origins_at(site, values, origins_of_values, followed)
        tree = tree.swap(swaps)
    return tree, followed


def _follow_at(site: Site, types: Mapping[str, Any]) -> tuple[RawValues, Origins]:
    """The types of the raw values of a site, and the axes of its arrays that theirs follow."""

    def values_of(arrays: Mapping[str, Any]) -> RawValues:
        values = site.stage._init_at(site, arrays, None)
        if len(arrays) > 1:  # lengths that a joint formula needs grow together, or not at all
            site.stage._check_start(values, arrays)
        return values

    with locate_errors(site.who):
        return types_of_result(values_of, types), probe_origins(values_of, types)


def _origins_at(site: Site, values: RawValues, origins: Origins, earlier: Origins) -> Origins:
    """The origins of the raw values of a site, by their places; those of its arrays are ``earlier``."""
    found = Origins()
    for name in site.arrays:
        for place in site.raw_values(name, values[name]):
            if (name, place[-1]) in origins:
                (source,), axes = origins[name, place[-1]]
                found[place] = compose(earlier[site.arrays[source]], axes)
    return found


def with_boxes(stages: Stages, params: Flat, raw: Flat) -> Flat:
    """The raw tree of boxed parameters, with a box around each raw value."""
    boxes = params.frame.boxes
    if not boxes:
        return raw
    kinds = {kind_of(name) for place in raw.arrays for name in place if is_mark(name)}
    has_names = any(stated_entries(box) is not None for box in boxes.values())
    origins = follow([stage for stage in stages if stage.kind in kinds], params)[1] if has_names else Origins()
    return replace(raw, boxes=boxes_of_values(boxes, params.arrays, raw.arrays, origins))
