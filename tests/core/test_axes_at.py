"""The axes of a stage at one array: those that are given, those of its role, and what is said where none are known."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.core.axes_at import (
    _axes_by_role,
    _split_by_axes,
    _unknown_axes,
    _why_unusable,
    axes_at,
    axes_in_words,
    roles_of,
    stacked_at,
)
from reparax.core.known_axes import KnownAxes, known_by_name, role_by_letters
from reparax.core.roles import Role, Use

NORM, SPECTRAL, SPHERE = rpx.WeightNorm(), rpx.SpectralNorm(), rpx.norms.Sphere()
BY_NAME = known_by_name("kernel")


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def leaf(axes=BY_NAME, role=None, path="w"):
    return SimpleNamespace(axes=axes, network_role=role, tree=None, path=path, raw_path=path)


def of_layer(letters, *sizes):
    return KnownAxes(role_by_letters(letters, sizes, "Layer"), source="Layer", is_class=True)


HEADS = Role((0,), (1, 2), shape=(8, 2, 3))
LAYERS = Role((2,), (1,), (0,), shape=(5, 4, 8))


@pytest.mark.parametrize(
    ("stage", "of", "w", "expected"),
    [
        (NORM, leaf(), array(8, 4), {"axis": -1, "stacked": ()}),
        (NORM, leaf(), array(4), {}),
        (NORM, leaf(), array(), {}),
        (rpx.WeightNorm(axis=0), leaf(known_by_name("odd")), array(8, 4), {}),
        (rpx.WeightNorm(stacked=0), leaf(), array(5, 8, 4), {"axis": -1}),
        (rpx.WeightNorm(stacked=0), leaf(), array(5, 4), {}),
        (rpx.WeightNorm(stacked=3), leaf(), array(5, 8, 4), {}),
        (SPECTRAL, leaf(known_by_name("odd")), array(8, 4), {}),  # any matrix
        (SPECTRAL, leaf(of_layer("oi", 4, 8)), array(4, 8), {"columns": -2, "stacked": ()}),
        (NORM, leaf(of_layer("oi", 4, 8)), array(5, 4, 8), {"axis": -2, "stacked": 0}),
        (NORM, leaf(of_layer("ioo", 8, 2, 3)), array(8, 5, 2, 3), {"axis": (-2, -1), "stacked": 1}),
        (NORM, leaf(KnownAxes(), HEADS), array(8, 2, 3), {"axis": (-2, -1), "stacked": ()}),
        (SPHERE, leaf(KnownAxes(), HEADS), array(8, 2, 3), {"along": -3, "stacked": ()}),
        (NORM, leaf(KnownAxes(), LAYERS), array(5, 4, 8), {"axis": -2, "stacked": 0}),
        (rpx.WeightNorm(stacked=(0, 1)), leaf(KnownAxes(), LAYERS), array(5, 4, 8), {"axis": ()}),
        (rpx.VarNoise(0.1), leaf(KnownAxes(), LAYERS), array(5, 4, 8), {}),
    ],
    ids=str,
)
def test_fields_that_nobody_set_have_the_axes_of_the_role(stage, of, w, expected):
    assert axes_at(stage, of, w) == expected


@pytest.mark.parametrize(
    ("stage", "of", "w", "stacked"),
    [
        (NORM, leaf(of_layer("io", 8, 4)), array(8, 5, 4), (1,)),
        (NORM, leaf(of_layer("io", 4, 4)), array(4, 4, 4), (0,)),
        (NORM, leaf(of_layer("io", 8, 4)), array(3, 2, 9, 4), (0, 1)),  # an error of another check
        (NORM, leaf(), array(3, 8, 4), ()),
        (rpx.WeightNorm(stacked=2), leaf(of_layer("io", 8, 4)), array(8, 4, 5), (2,)),
        (rpx.WeightNorm(axis=0), leaf(of_layer("io", 8, 4)), array(8, 5, 4), ()),
        (NORM, leaf(of_layer("io", 8, 4), LAYERS), array(5, 4, 8), (0,)),
        (rpx.WeightNorm(stacked=1), leaf(KnownAxes(), LAYERS), array(5, 4, 8), (1,)),
        (rpx.VarNoise(0.1), leaf(of_layer("io", 8, 4), LAYERS), array(5, 8, 4), ()),
    ],
    ids=str,
)
def test_stacked_axes_are_those_of_the_network_of_the_user_or_of_the_layer(stage, of, w, stacked):
    assert stacked_at(stage, of, w) == stacked


@pytest.mark.parametrize(
    ("role", "stacked", "why"),
    [
        (HEADS, (), ""),
        (replace(HEADS, why="of another"), (), "no product of the array with data is known (of another)"),
        (replace(HEADS, inputs=(0, 1), uses=(Use((0,), (1,), (), "a"),)), (), "the network uses the array in several"),
        (replace(HEADS, outputs=(2,)), (), "no product shows whether axes (1,) of the array of shape (8, 2, 3) are"),
        (replace(HEADS, outputs=(2,)), (1,), ""),
        (replace(HEADS, outputs=(), shape=(8, 1, 1)), (), ""),
        (replace(HEADS, inputs=()), (2,), "no product shows whether axes (0,)"),
    ],
)
def test_a_role_is_of_use_if_each_axis_has_one(role, stacked, why):
    found = _why_unusable(role, stacked)
    assert found.startswith(why)
    assert bool(found) is bool(why)


def test_a_word_beside_an_integer_is_replaced_alone_and_one_axis_must_be_one():
    mixed = rpx.WeightNorm(axis=("inputs", -1), stacked=0)
    assert _axes_by_role(mixed, leaf(), LAYERS) == {"axis": (-1, -1)}
    both = rpx.WeightNorm(axis=("outputs", "inputs"))
    assert _axes_by_role(both, leaf(), HEADS) == {"axis": (-2, -1, -3), "stacked": ()}
    simplex = rpx.numbers.Simplex()
    assert _axes_by_role(simplex, leaf(), HEADS)["along"] == -3
    with pytest.raises(ValueError, match="along must be one axis, but the network has 2 such axes"):
        _axes_by_role(simplex, leaf(), replace(HEADS, inputs=(1, 2), outputs=(0,)))


def test_what_to_write_for_each_meaning_is_offered_once_and_no_stack_where_the_user_gave_one():
    of_three = _unknown_axes(NORM, leaf(), array(3, 4, 5), (), "why")
    of_last = "WeightNorm(axis=-1) for (width, in, out) of a convolution or (heads, dim, out) of attention"
    assert of_last in of_three
    assert "WeightNorm(axis=-1, stacked=0) for a stack of (in, out)" in of_three
    stacked = rpx.WeightNorm(stacked=1)
    text = _unknown_axes(stacked, leaf(), array(3, 2, 4, 5), (1,), "why")
    assert "stack of" not in text
    assert "WeightNorm(axis=(-2, -1), stacked=1) for (in, heads, dim) of attention" in text
    five = _unknown_axes(NORM, leaf(), array(2, 3, 4, 5, 6), (), "why")
    assert "WeightNorm(axis=-1) for (..., in, out); or WeightNorm(axis=-5) for (out, in, ...)" in five
    several = _unknown_axes(NORM, leaf(of_layer("io", 4, 4)), array(4, 4, 4), (), "why")
    assert "Write WeightNorm(stacked=0) or WeightNorm(stacked=1) or WeightNorm(stacked=2). Or" in several
    given = _unknown_axes(rpx.WeightNorm(stacked=0), leaf(of_layer("io", 4, 4)), array(4, 4, 4), (0,), "why")
    assert "cannot determine which axes" in given


@pytest.mark.parametrize(
    ("stage", "bound", "known", "text"),
    [
        (NORM, rpx.WeightNorm(axis=-1), BY_NAME, "axis=-1 ('kernel')"),
        (NORM, rpx.WeightNorm(axis=-2, stacked=0), of_layer("oi", 4, 8), "axis=-2, stacked=0 (Layer)"),
        (rpx.WeightNorm(axis=0), rpx.WeightNorm(axis=0), BY_NAME, "axis=0 (given)"),
        (rpx.WeightNorm(axis=None), rpx.WeightNorm(axis=None), BY_NAME, ""),
        (SPECTRAL, SPECTRAL, BY_NAME, "rows=0, columns=1 (a matrix)"),
        (SPECTRAL, rpx.SpectralNorm(columns=-2), of_layer("oi", 4, 8), "columns=-2 (Layer)"),
        (rpx.SpectralNorm(rows=0), rpx.SpectralNorm(rows=0), BY_NAME, "rows=0 (given)"),
        (rpx.Tie({"a": "b"}), rpx.Tie({"a": "b"}), BY_NAME, ""),
        (rpx.Freeze(), rpx.Freeze(), BY_NAME, ""),
    ],
    ids=str,
)
def test_axes_are_told_with_where_they_come_from(stage, bound, known, text):
    assert axes_in_words(stage, bound, known) == text


def test_a_stage_is_split_where_values_of_one_path_need_other_axes():
    u, v, other = leaf(path="w"), leaf(path="w"), leaf(path="x")
    u.raw_path, v.raw_path = "w/@low_rank/u", "w/@low_rank/v"
    assert _split_by_axes(NORM, [(u, {"axis": 0}), (v, {"axis": 0}), (other, {"axis": 1})]) == []
    pairs = [(u, {"axis": 0}), (v, {"axis": 1}), (other, {"axis": 2})]
    first, second = _split_by_axes(rpx.MagnitudePruning({"w": 0.5, "x": 0.1}), pairs)
    assert first == rpx.MagnitudePruning({"w": 0.5, "x": 0.1}, where="w/@low_rank/u|x")
    assert second == rpx.MagnitudePruning({"w": 0.5}, where="w/@low_rank/v")


def test_a_model_says_the_roles_of_its_layers_and_a_tree_of_roles_its_own():
    roles = {"a": {"w": HEADS}, "f": "relu", "b": LAYERS}
    found = roles_of("P()", roles)
    assert found == {("a", "w"): HEADS, ("b",): LAYERS}
    for wrong in ({"a": HEADS, "b": np.ones(2)}, {"a": np.ones(2)}, {"a": "relu"}):
        with pytest.raises(TypeError, match=r"takes the result of `rpx\.roles"):
            roles_of("P()", wrong)
