"""Damaged raw trees are refused by all that read them, also where nothing reads what is damaged."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, OF_EACH_CLASS
from grids import thorough

import reparax as rpx

KEY = jax.random.key(0)
SAID = r"\)\.(apply|update|fold|check)[ :]|^The raw tree holds |^Two leaves of the tree have the path "
NUMBERS = jax.ShapeDtypeStruct((2,), jnp.float32)


def replaced(tree, place, change):
    """The tree with another node at a place."""
    if not place:
        return change(tree)
    name, *rest = place
    new = replaced(tree[name], rest, change)
    return {key: new if key == name else node for key, node in tree.items()}


def markers(tree, place=()):
    """The places of the nodes that hold a marker, and its name."""
    for name, node in tree.items() if isinstance(tree, dict) else ():
        if name.startswith("@") and name != "@fixed":
            yield place, name
        yield from markers(node, (*place, name))


def damages(p, raw):
    """A raw tree for each way to damage a marker; that of an array without a value of its own holds nothing."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(p.apply, raw, KEY))
    effective = {tuple(key.key for key in path): leaf for path, leaf in leaves}
    for place, name in markers(raw):
        at = (*place, name)
        if place in effective:
            yield replaced(raw, place, lambda _, place=place: effective[place])
        yield replaced(raw, at, lambda _: NUMBERS)
        yield replaced(raw, place, lambda node: {**node, "more": NUMBERS})
        yield replaced(raw, place, lambda node, name=name: {"@unheard_of": node[name]})
        if functools.reduce(dict.__getitem__, at, raw):
            yield replaced(raw, at, lambda _: {})
            yield replaced(raw, at, lambda node: {**node, "more": NUMBERS})


@pytest.mark.parametrize("name", ["weight norm >> tie", *map(thorough, (*OF_EACH_CLASS, "low rank twice"))])
def test_damaged_markers_are_refused(name):
    p, params = rpx.Chain(tuple(CASES[name][0])), jax.eval_shape(CASES[name][1])
    raw = jax.eval_shape(p.init, params, KEY)
    for damaged in damages(p, raw):
        for call in (
            lambda raw: jax.eval_shape(p.apply, raw, KEY),
            lambda raw: jax.eval_shape(p.update, raw, KEY),
            lambda raw: p.check(raw, like=params),
        ):
            with pytest.raises(ValueError, match=SAID):
                call(damaged)
