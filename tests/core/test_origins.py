"""The axes that the axes of raw values follow, of starts whose shapes alone are traced."""

import jax
import jax.numpy as jnp
import pytest

import reparax as rpx
from reparax.core.initialization import follow_axes
from reparax.core.origins import follow_origin, keep_origins, probe_origins
from reparax.core.raw import flatten


def shapes(**arrays):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in arrays.items()}


def of_one(start):
    """A start of one array, by the raw values that it gives."""
    return lambda arrays: {"w": start(arrays["w"])}


def only_if(holds, start):
    """A start that refuses some shapes, in its own way."""

    def init(w):
        if not holds(*w.shape):
            raise ZeroDivisionError
        return start(w)

    return of_one(init)


def kept(w):
    return {"x": w}


@pytest.mark.parametrize(
    ("init", "shape", "expected"),
    [
        (of_one(lambda w: {"x": w.T, "s": jnp.sum(w), "r": w[:1]}), (4, 3), {"x": (1, 0), "s": (), "r": (None, 1)}),
        (of_one(lambda w: {"x": w[None], "y": w[..., None]}), (3, 3), {"x": (None, 0, 1), "y": (0, 1, None)}),
        (of_one(lambda w: {"x": w[:, None] * w[None]}), (4,), {"x": (0, None)}),  # no axis twice
        (of_one(lambda w: {"x": jnp.tile(w, (2, 3))}), (4, 3), {"x": (0, 1)}),
        (of_one(lambda w: {"x": w.reshape(-1)}), (4, 3), {"x": (None,)}),  # grows with both
        (of_one(lambda w: {"x": jnp.zeros((3, 4))}), (4, 3), {"x": (None, None)}),  # as long by chance
        (of_one(lambda w: {"x": w[:2]}), (4, 1), {"x": (None, 1)}),
        (of_one(lambda w: {"x": w}), (1, 4), {"x": (0, 1)}),
        (only_if(lambda n, m: n == 1, kept), (1, 4), {"x": (None, 1)}),
        (only_if(lambda n, m: n == 4, lambda w: {"x": w.T}), (4, 3), {"x": (1, 0)}),
        (
            only_if(lambda n, m: n == 4, lambda w: {"x": w[:, :, None], "r": w[:3]}),
            (4, 3),
            {
                "x": (0, 1, None),
                "r": (None, 1),
            },
        ),
        (
            only_if(lambda n, m: n == m, lambda w: {"x": w, "d": w[0], "t": w.T}),
            (3, 3),
            {
                "x": (0, 1),
                "d": (None,),
                "t": (0, 1),
            },
        ),
        (
            only_if(lambda n, m: m == 2 * n, lambda w: {"x": w, "y": w[:, :1], "d": w[0]}),
            (3, 6),
            {
                "x": (0, 1),
                "y": (0, None),
                "d": (1,),
            },
        ),
        (
            only_if(lambda n, k, m: n == m, lambda w: {"x": w[0], "y": w[..., 0]}),
            (3, 2, 3),
            {
                "x": (1, None),
                "y": (None, 1),
            },
        ),
        (
            of_one(lambda w: {"x": w, "y": w[:1]} if w.shape[0] < 6 else {"x": w}),
            (4, 3),
            {
                "x": (0, 1),
                "y": (None, 1),
            },
        ),
        (of_one(lambda w: {"x": w} if w.shape[0] < 6 else {"x": w[0]}), (4, 3), {"x": (0, 1)}),
        (of_one(lambda w: {"s": jnp.zeros(min(w.shape))}), (4, 3), {"s": (1,)}),
        (only_if(lambda n, m: n <= 2 * m, lambda w: {"x": jnp.tile(w, (2, 1))}), (4, 3), {"x": (0, 1)}),
        (only_if(lambda n, k, m: n == 2 * m, lambda w: {"x": jnp.tile(w, 3)}), (8, 6, 4), {"x": (0, 1, 2)}),
        (of_one(lambda w: {}), (4, 3), {}),
        (of_one(lambda w: {"x": w, "name": "relu"}), (4, 3), {"x": (0, 1)}),
    ],
)
def test_an_axis_follows_the_one_with_which_it_grows(init, shape, expected):
    found = probe_origins(init, shapes(w=shape))
    assert found == {("w", name): (("w",), axes) for name, axes in expected.items()}


def test_equal_lengths_of_several_arrays_grow_together_and_each_value_follows_the_array_at_which_it_stands():
    def init(arrays):
        u, w = arrays["u"], arrays["w"]
        return {"u": {"x": u @ w, "y": jnp.ones(u.shape[0])}, "w": {"x": (u @ w).T, "rank": jnp.ones(5)}}

    found = probe_origins(init, shapes(u=(2, 3), w=(3, 4)))
    assert found == {
        ("u", "x"): (("u",), (0, None)),
        ("u", "y"): (("u",), (0,)),
        ("w", "rank"): (("w",), (None,)),
        ("w", "x"): (("w",), (1, None)),
    }


def test_arrays_that_no_stage_replaced_follow_themselves_and_later_values_what_these_follow():
    origins = keep_origins({("a", "w"): jax.ShapeDtypeStruct((2, 3), jnp.float32), ("f",): "relu"})
    assert origins == {("a", "w"): (("a", "w"), (0, 1))}
    assert follow_origin((("w",), (None, 2, 0)), (2, None, 1, 0)) == (("w",), (0, None, 2, None))


def test_each_array_follows_by_the_stage_for_it_and_through_what_the_parameters_follow():
    p = rpx.WeightNorm(axis={"a": 0, "v": 1})
    tree, origins = follow_axes(p._parts, flatten(shapes(a=(4, 5), v=(4, 5), c=(3,))))
    of_a, of_v = (origins[name, "@weight_norm", "g"] for name in "av")
    assert (of_a, of_v) == ((("a",), (0, None)), (("v",), (None, 1)))
    assert origins["a", "@weight_norm", "v"] == (("a",), (0, 1))
    assert origins["c",] == (("c",), (0,))
    assert tree.arrays["v", "@weight_norm", "g"].shape == (1, 5)
    earlier = {("a",): (("k",), (2, 0)), ("v",): (("l",), (None, 3)), ("c",): (("k",), (1,))}
    _, origins = follow_axes(p._parts, flatten(shapes(a=(4, 5), v=(4, 5), c=(3,))), earlier)
    found = [origins[place] for place in (("a", "@weight_norm", "g"), ("v", "@weight_norm", "g"), ("c",))]
    assert found == [(("k",), (2, None)), (("l",), (None, 3)), (("k",), (1,))]


def test_axes_are_followed_through_all_stages_from_the_last_one():
    p = rpx.WeightNorm(axis=0) >> rpx.LowRank(2, columns=-1)
    _, origins = follow_axes(p._parts, flatten(shapes(w=(4, 5))))
    u, v = (("w", "@low_rank", name, "@weight_norm", "g") for name in "uv")
    assert (origins[u], origins[v]) == ((("w",), (0, None)), (("w",), (None, None)))
