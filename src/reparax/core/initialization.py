"""Implements ``init``: each stage, from the last to the first, replaces arrays with their initial raw values.

In ``WeightNorm() >> VarNoise(0.1)``, the noise stage has no raw values, so it leaves the array ``w`` as it is.
``WeightNorm`` then replaces ``{"w": w}`` with ``{"w": {"@weight_norm": {"g": ..., "v": ...}}}``. A :data:`Swap`
describes such a replacement.

:func:`initialize` initializes all stages of a chain, and :func:`initialize_sites` initializes one stage.
:func:`follow_axes` initializes them with shapes and dtypes only, to find the parameter axis that each axis of a raw
value follows. For example, the last axis of a raw value ``g`` of shape (1, 4) follows the last axis of a kernel of
shape (8, 4). Shardings, axis names in flax boxes (such as nnx variables) and the roles of axes are passed on to raw
values in this way.
"""

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

from reparax.core.boxes import axis_entries, boxes_of_values
from reparax.core.checks import locate_errors
from reparax.core.config import is_of_package
from reparax.core.origins import Origins, follow_origin, keep_origins, probe_origins
from reparax.core.paths import types_of_result
from reparax.core.random import keys_of_draws
from reparax.core.raw import Flat, Swap, is_mark, kind_of, next_number
from reparax.core.site import Site, Stages, stage_key
from reparax.core.values import RawValues, value_of
from reparax.numerics.arithmetic import is_inexact, widened


def initialize(stages: Stages, params: Flat, key: Array | None) -> Flat:
    """Returns the raw tree of a model's parameters. Stages with random initial values draw from ``key``.

    The last stage of a chain computes the model's own arrays, so it is initialized first. Each earlier stage then acts
    on the raw values that the later stages created.
    """
    tree = params
    for i, stage in reversed(list(enumerate(stages))):
        tree = initialize_sites(stage.sites("init", tree.before(stages[i + 1 :])), tree, key)
    return tree


def initialize_sites(sites: Sequence[Site], tree: Flat, key: Array | None) -> Flat:
    """Returns the tree in which the raw values of one stage, such as ``{"g": ..., "v": ...}``, replace its arrays.

    The result of ``init`` is checked only once for all arrays that have equal stage settings and types. If the ``init``
    of a user-defined stage does not invert its ``apply``, a warning is issued.

    Raises:
      TypeError: If the tree holds ``jax.ShapeDtypeStruct`` objects instead of arrays.
      ValueError: If ``init`` raises one, or if its raw values do not give arrays of the original shapes and dtypes. The
        error names the stage and the array.
    """
    with_markers = [site for site in sites if site.nodes]  # Only marker dicts hold raw values.
    init_keys, checked, swaps = _init_keys(with_markers, key), set[Any](), list[Swap]()
    for i, site in enumerate(with_markers):
        for w in (tree.arrays[place] for place in site.arrays.values()):
            if isinstance(w, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{site.who}: expected an array, got {w}. For shapes and dtypes only, call "
                    f"`jax.eval_shape(p.init, params)`."
                )
        arrays = {name: jnp.asarray(tree.arrays[place]) for name, place in site.arrays.items()}
        with locate_errors(site.who):
            values = site.stage._init_at(site, arrays, init_keys.get(i))
            if (group := (stage_key(site.stage), *_types_of({"": arrays, **values}))) not in checked:
                site.stage._check_init(values, arrays)
                checked.add(group)
                if not (is_of_package(type(site.stage)) or site.stage.starts_elsewhere or site.stage.changes_type):
                    _warn_if_no_inverse(site, values, arrays, init_keys.get(i))
        swaps += _swaps(site, values)
    return tree.swap(swaps)


def _warn_if_no_inverse(site: Site, values: RawValues, arrays: Mapping[str, Array], key: Array | None) -> None:
    """Warns if ``init`` followed by ``apply`` changes an array that the stage itself has computed.

    Args:
      site: A user-defined stage and its arrays.
      values: The initial raw values that the stage's ``init`` returned for ``arrays``.
      arrays: The arrays that ``init`` received. If any of them is traced, nothing is checked, because it has no
        concrete values to compare.
      key: The key that was passed to ``init``; None if ``init`` takes no key.
    """
    if any(isinstance(x, Tracer) for x in arrays.values()):
        return
    stage, error = site.stage, 0.0
    with suppress(Exception):  # A user's formula may raise any error on values that training never reaches.
        error = _inverse_error(site, values, key)
    if error > 0:
        init = "init_leaf" if hasattr(stage, "init_leaf") else "init_leaves"
        method = "mean_leaf" if stage.stochastic else init.replace("init", "apply")
        warnings.warn(
            f"{site.who}: {init} does not invert {method}: for an array w that {method} has computed, "
            f"{method}({init}(w)) differs from w by {error:.2g} times its largest entry, so training may not start at "
            f"your weights. Correct {init} or {method}, or set `starts_elsewhere = True` in the class if this is "
            f"intended.",
            stacklevel=2,
        )


def _inverse_error(site: Site, values: RawValues, key: Array | None) -> float:
    """Returns the largest relative error of ``apply(init(w))`` over arrays ``w`` from ``apply``; 0 if within rounding.

    One ``w`` is computed from the initial raw ``values`` of the site. Unless ``init`` takes a key, a second one is
    computed from slightly perturbed values.
    """
    stage, rng = site.stage, np.random.default_rng(0)

    def apply(values: RawValues) -> Mapping[str, Array]:
        return stage._apply_at(site, values, None)

    def apply_after_init(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return apply(stage._init_at(site, arrays, key))

    def perturb(value_name: str, x: Array) -> Array:
        """Adds noise of about 10 % to each entry of a trained raw value, or about 0.1 to zeros; keeps fixed values."""
        is_free = is_inexact(x) and not value_of(stage.raw_values, value_name).fixed
        tenth = jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype)
        return x + tenth * jnp.where(x == 0, jnp.ones_like(x), x) if is_free else x

    candidates = [apply(values)]  # Each candidate is a dict of effective arrays by name.
    if key is None:
        perturbed = {name: {value: perturb(value, x) for value, x in values[name].items()} for name in values}
        candidates.append(apply(perturbed))
        # A fixed value, such as a mask, fits only the initial free values, so `init` recomputes it for the new arrays.
        if any(declared.fixed for declared in stage.raw_values.values()):
            candidates[1] = apply_after_init(candidates[1])
    pairs = [(w, apply_after_init(candidate)[name]) for candidate in candidates for name, w in candidate.items()]
    return max(_relative_error(x, w) for w, x in pairs)


def _relative_error(x: Array, w: Array) -> float:
    """Returns the largest absolute difference between ``x`` and ``w``, divided by the largest magnitude in ``w``.

    A ratio that may be due to rounding, at most 1 % or eight times the dtype's machine epsilon, gives 0. So does an
    infinite or NaN entry of ``w``, because no formula can invert it. If only ``x`` has a NaN, the result is infinite.
    """
    tolerance = max(1e-2, 8 * float(jnp.finfo(w.dtype).eps)) if is_inexact(w) else 1e-2
    x, w = (widened(y) if is_inexact(y) else y.astype(jnp.float32) for y in (x, w))
    largest = float(jnp.max(jnp.abs(w), initial=0))
    difference = float(jnp.nan_to_num(jnp.max(jnp.abs(x - w), initial=0), nan=jnp.inf, posinf=jnp.inf))
    return difference / largest if difference > tolerance * largest else 0.0  # A largest entry of NaN gives False.


def _init_keys(sites: Sequence[Site], key: Array | None) -> dict[int, Array | None]:
    """Returns a dict of random keys for the sites of a stage whose ``init`` is random, by index in ``sites``.

    If ``key`` is None, as when only types are needed, all values of the dict are None.
    """
    drawing = {i: site for i, site in enumerate(sites) if site.stage._init_takes_key}
    if not drawing:
        return {}
    draws = [(next_number(site.arrays["w"], site.stage.kind), str(site.draw_path)) for site in drawing.values()]
    return dict(zip(drawing, keys_of_draws(key, sites[0].stage.kind, draws), strict=True))


def _types_of(arrays: RawValues) -> list[Any]:
    """Returns the names, shape and dtype of each raw value as a hashable tuple: ``("w", "g", (1, 4), float32)``."""
    return [(array, value, x.shape, x.dtype) for array, of_one in arrays.items() for value, x in of_one.items()]


def _swaps(site: Site, values: RawValues) -> list[Swap]:
    """Returns a swap for each array of a site: the key path of the array, and the raw values that replace it there."""
    return [([place], site.place_values(name, values[name])) for name, place in site.arrays.items()]


def follow_axes(stages: Stages, params: Flat, origins: Origins | None = None) -> tuple[Flat, Origins]:
    """Returns the raw tree with types instead of arrays, and the parameter axis that each axis of a raw value follows.

    For ``WeightNorm`` on a kernel of shape (8, 4) at the key path ``("w",)``, the second result maps the key path of
    the raw value ``g``, whose shape is (1, 4), to ``(("w",), (None, 1))``: its last axis follows axis 1 of the kernel.
    Arrays that a stage replaced keep their entries. If the axes of ``params`` themselves follow those of other arrays,
    ``origins`` maps each parameter to these axes.
    """
    tree = params.types()
    followed = keep_origins(tree.arrays) if origins is None else dict(origins)
    for i, stage in reversed(list(enumerate(stages))):
        # Arrays for which the stage has equal settings, formulas and types are traced only once.
        swaps, traced = list[Swap](), dict[Any, tuple[RawValues, Origins]]()
        for site in stage.sites("init", tree.before(stages[i + 1 :])):
            if not site.nodes:  # The stage changes the array in place, so the array keeps its axes.
                continue
            types = {name: tree.arrays[place] for name, place in site.arrays.items()}
            group = stage_key(site.stage), id(site.formula), *((name, w.shape, w.dtype) for name, w in types.items())
            if group not in traced:
                traced[group] = _follow_axes_at(site, types)
            values, origins_of_values = traced[group]
            swaps += _swaps(site, values)
            followed |= _origins_at(site, values, origins_of_values, followed)
        tree = tree.swap(swaps)
    return tree, followed


def _follow_axes_at(site: Site, types: Mapping[str, Any]) -> tuple[RawValues, Origins]:
    """Returns the types of the raw values at one site, and the array axis that each axis of a raw value follows.

    For ``WeightNorm`` on ``w`` of shape (8, 4), the second result is ``{("w", "g"): (("w",), (None, 1)), ...}``: axis 1
    of ``g`` follows axis 1 of ``w``.
    """

    def init(arrays: Mapping[str, Any]) -> RawValues:
        """Computes the initial raw values without a key, because only their types matter."""
        values = site.stage._init_at(site, arrays, None)
        # `probe_origins` doubles the lengths of axes. If a stage combines several arrays, some of their lengths may
        # have to be equal. This check then raises an error if only one of these lengths is doubled.
        if len(arrays) > 1:
            site.stage._check_init(values, arrays)
        return values

    with locate_errors(site.who):
        return types_of_result(init, types), probe_origins(init, types)


def _origins_at(site: Site, values: RawValues, origins: Origins, earlier: Origins) -> Origins:
    """Maps the key path of each raw value of a site to a parameter and the parameter axes that its own axes follow.

    Args:
      site: A stage and the arrays on which it acts together.
      values: The types of the site's raw values, by the name of the array and the name of the value.
      origins: Maps the names of an array and of its raw value, such as ``("w", "g")``, to the name of the array that it
        follows and the axes of that array. An array without raw values has no entry.
      earlier: Maps the key path of each array of the site to the key path of a parameter and its axes.
    """
    found = Origins()
    for array_name in site.arrays:
        for place in site.place_values(array_name, values[array_name]):
            if (array_name, place[-1]) in origins:
                (source_name,), axes = origins[array_name, place[-1]]
                found[place] = follow_origin(earlier[site.arrays[source_name]], axes)
    return found


def with_boxes(stages: Stages, params: Flat, raw: Flat) -> Flat:
    """Returns the raw tree with a flax box (such as an nnx variable) around each raw value of a boxed parameter.

    If no parameter is boxed, the result is ``raw`` itself. The parameter axes that raw values follow are computed only
    if some box has axis names to pass on, and only for stages whose markers occur in the raw tree.
    """
    boxes = params.frame.boxes
    if not boxes:
        return raw
    kinds = {kind_of(name) for place in raw.arrays for name in place if is_mark(name)}
    has_names = any(axis_entries(box) is not None for box in boxes.values())
    origins = follow_axes([stage for stage in stages if stage.kind in kinds], params)[1] if has_names else Origins()
    return replace(raw, boxes=boxes_of_values(boxes, params.arrays, raw.arrays, origins))
