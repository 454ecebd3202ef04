"""What the sites of a layer draw: a key for each, or the noise itself, in one loop for small arrays of one type.

Neighbouring noises on an array draw once: :func:`merge_noise` rewrites the layers before anything runs. The draws of
one array do not depend on other arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, export
from jax.sharding import AxisType

from reparax.core.chains.keys import Keys
from reparax.core.tree.paths import Names

LOOPED = 2**14
"""The largest size of an array that draws in a loop. On a CPU, an array that draws alone adds a tenth of a second to
compilation; an array that draws in a loop uses one core only, in every step."""


def draw_for_sites(layer: Any, arrays: Mapping[Names, Any], keys: Keys) -> dict[int, Array]:
    """For the index of each random site of a layer its key; for noise its draw."""
    counting = [i for i, site in enumerate(layer.sites) if site.seed is not None]
    seeds = [layer.sites[i].seed for i in counting]
    numbers = dict(zip(counting, keys.numbers(layer.stage.kind, [*seeds, *layer.absorbed]), strict=False))
    groups: dict[Any, list[int]] = {}
    for i in counting:
        if layer.sites[i].is_random:
            groups.setdefault(_group_key(i, layer.sites[i], arrays), []).append(i)
    draw_of_site: dict[int, Array] = {}
    for number in sorted(set(numbers.values())):
        groups_of_number = [[i for i in group if numbers[i] == number] for group in groups.values()]
        batch = keys.of_arrays(
            layer.stage.kind, number, [layer.sites[i].seed for group in groups_of_number for i in group]
        )
        start = 0
        for group in filter(None, groups_of_number):
            assert batch is not None
            group_keys = jax.lax.slice_in_dim(batch, start, start + len(group))
            draw_of_site |= zip(group, _draw_group([layer.sites[i] for i in group], arrays, group_keys), strict=True)
            start += len(group)
    return draw_of_site


def _draw_group(group: Sequence[Any], arrays: Mapping[Names, Any], keys: Array) -> list[Array]:
    """The keys of sites that draw alike, or their noise: in a loop, if there are several."""
    stage, array = group[0].stage, arrays[group[0].spots["w"].place] if group[0].is_noise else None
    if array is None:
        return [keys[0]]
    if len(group) == 1:
        return [stage.draw(jnp.asarray(array), keys[0])]
    parts = jax.lax.split(stage.draw(jnp.asarray(array), keys), [1] * len(group))
    return [jax.lax.squeeze(part, [0]) for part in parts]


def _group_key(i: int, site: Any, arrays: Mapping[Names, Any]) -> Any:
    """A group key: small arrays of one type and known sharding draw together, every other array draws alone."""
    if not site.is_noise:
        return i
    array = jnp.asarray(arrays[site.spots["w"].place])
    sharding = jax.typeof(array).sharding
    # On a mesh in Auto mode, arrays may be sharded differently, and only the compiler knows how.
    if _is_large(array) or AxisType.Auto in sharding.mesh.axis_types:
        return i
    return type(site.stage), site.stage.shared, array.shape, array.dtype, sharding


def _is_large(w: Array) -> bool:
    """Whether an array draws alone: it has more than ``LOOPED`` numbers, or nobody knows how many."""
    return any(map(export.is_symbolic_dim, w.shape)) or w.size > LOOPED


def merge_noise(layers: Sequence[Any]) -> list[Any]:
    """The layers with neighbouring noises on an array joined in the first of them, where one draw does for both."""
    sites_of_layers = [list(layer.sites) for layer in layers]
    absorbed = [list(layer.absorbed) for layer in layers]
    last_noise: dict[Names, tuple[int, int]] = {}  # for the place of an array, the noise that acted on it last
    for n, layer in enumerate(layers):
        for site in layer.sites:
            site_places = [*site.reads.values(), *(x for spot in site.spots.values() for x in spot.values.values())]
            earlier = last_noise.get(site_places[0]) if site.is_noise else None
            joined = None if earlier is None else _join_noises(sites_of_layers[earlier[0]][earlier[1]], site)
            for place in site_places:
                last_noise.pop(place, None)
            if earlier is not None and joined is not None:
                sites_of_layers[earlier[0]][earlier[1]] = joined
                sites_of_layers[n].remove(site)
                absorbed[n].append(site.seed)
                last_noise[site_places[0]] = earlier
            elif site.is_noise:
                last_noise[site_places[0]] = (n, sites_of_layers[n].index(site))
    parts = zip(layers, sites_of_layers, absorbed, strict=True)
    return [replace(layer, sites=sites, absorbed=seeds) for layer, sites, seeds in parts]


def _join_noises(earlier_site: Any, later_site: Any) -> Any:
    """The first site with the noise of both, or None if each needs a draw of its own.

    A class must define ``merged_with`` itself: a subclass may have another formula, so it does not inherit the method.
    """
    noise, other_noise = earlier_site.stage, later_site.stage
    if type(noise) is not type(other_noise) or "merged_with" not in vars(type(noise)):
        return None
    joined = noise.merged_with(other_noise)
    return None if joined is None else replace(earlier_site, stage=joined)
