"""The plan of a chain: which stage acts where, decided from the types of a tree alone, and remembered.

``close_all`` and ``walk`` then run it, stage after stage, on trees laid flat; ``open_params`` and ``close_raw`` take
and return trees as they are.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jax
from jax import ShapeDtypeStruct

from reparax.core.chains.draws import merge_noise
from reparax.core.chains.keys import Keys
from reparax.core.chains.layers import Layer
from reparax.core.chains.planner import planner_of
from reparax.core.chains.value import exact_text
from reparax.core.tree.flat import Flat, Frame, flatten, nest
from reparax.core.tree.paths import Names, PyTree, has_symbols, is_empty


def decide(method: str, stages: Sequence[Any], tree: Flat) -> tuple[list[Layer], Flat]:
    """The layers of stages in their order, and the effective tree, from a tree of types.

    All errors of structure come from here.
    """
    layers: list[Layer] = []
    for stage in stages:
        layers.append(planner_of(stage).plan(method, tree))
        tree = layers[-1].types_after(tree)
    return layers, tree


def close_all(stages: Sequence[Any], tree: Flat, keys: Keys) -> Flat:
    """The tree after ``apply`` of each stage."""
    for layer in _apply_layers(tuple(stages), tree.types):
        tree = layer.close(tree, keys)
    return tree


def open_params(stages: Sequence[Any], params: PyTree, key: jax.Array | None = None) -> PyTree:
    """The raw tree after ``init`` of each stage, the last one first, without the boxes of new arrays."""
    tree, keys = flatten(params), Keys(key)
    for stage in reversed(stages):
        tree = planner_of(stage).plan_init(tree).open(tree, keys)
    return nest(tree)


def close_raw(stages: Sequence[Any], raw: PyTree, key: jax.Array | None = None) -> PyTree:
    """The effective tree of a raw one."""
    return nest(close_all(stages, flatten(raw), Keys(key)))


def walk(method: str, stages: Sequence[Any], tree: Flat) -> Iterator[tuple[Layer, Flat]]:
    """The layer of each stage, none of them random, with the tree before it."""
    for stage in stages:
        layer = planner_of(stage).plan(method, tree.types)
        yield layer, tree
        tree = layer.close(tree, Keys(None))


def _apply_layers(stages: tuple[Any, ...], tree: Flat) -> list[Layer]:
    """The layers for ``apply``, with noise that draws once; decided once for equal stages and types."""
    # Other leaves, such as functions, are not kept: what they hold would live as long as the plan.
    leaves = tuple(x if isinstance(x, ShapeDtypeStruct) else () if is_empty(x) else None for x in tree.arrays.values())
    symbolic = has_symbols([x for x in leaves if isinstance(x, ShapeDtypeStruct)])
    unsure = symbolic or any(planner_of(stage).asks_functions for stage in stages)
    # A traced hyperparameter cannot be hashed, nor can some boxes; an error shows the leaves that are there.
    with suppress(Exception):
        if not unsure:
            return _decide_once(stages, tuple(map(exact_text, stages)), tree.frame, tuple(tree.arrays), leaves)
    return merge_noise(decide("apply", stages, tree)[0])


@lru_cache(maxsize=256)
def _decide_once(stages: Any, text: Any, frame: Frame, places: tuple[Names, ...], leaves: Any) -> list[Layer]:
    """The layers for ``apply``; ``text`` is part of what it remembers by, as equal stages may differ in it."""
    del text  # the layers hold the stages, so equal ones do not do
    arrays = {place: {} if x == () else x for place, x in zip(places, leaves, strict=True)}
    return merge_noise(decide("apply", stages, Flat(frame, arrays))[0])
