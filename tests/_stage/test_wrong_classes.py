"""Classes of stages that cannot be meant so."""

import jax
import jax.numpy as jnp
import pytest
from errors import raises

import reparax as rpx


@pytest.mark.parametrize("name", ["main", "fixed", "base_values"])
def test_one_name_is_no_tuple_of_names(name):
    with raises(TypeError, f"OneName got {name}='base', but takes a tuple of names: ('base',)."):
        type("OneName", (rpx.Reparametrization,), {name: "base"})


def test_a_start_with_a_key_is_draw_leaf():
    with raises(
        TypeError,
        "KeyedStart.init_leaf takes self, w, key, but is called with (self, w). If the start is random, define "
        "draw_leaf(self, w, key) instead.",
    ):

        class KeyedStart(rpx.Reparametrization):
            def init_leaf(self, w, key):
                return {"x": w}


def test_the_error_names_the_method_that_gave_the_values():
    class Misnamed(rpx.Reparametrization):
        main = ("base",)

        def draw_leaf(self, w, key):
            return {"bse": w}

        def apply_leaf(self, values):
            return values["bse"]

    with raises(
        ValueError,
        "Misnamed().init at 'w': draw_leaf must return each main value ('base',), but returns ('bse',). Rename or add "
        "values in draw_leaf.",
    ):
        Misnamed().init({"w": jnp.ones(2)}, jax.random.key(0))


def test_a_formula_of_matrices_on_a_vector():
    class Outer(rpx.Reparametrization):
        def init_leaf(self, w):
            return {"x": w}

        def apply_leaf(self, values):
            return jnp.outer(values["x"], values["x"])

    with raises(
        ValueError,
        "Outer().init at 'b': apply_leaf must return float32[3], like the model's array, but returns float32[3, 3]. "
        "Cast or reshape in apply_leaf, or set `changes_type = True` in the class, or `min_ndim = 2` to leave vectors "
        "alone.",
    ):
        Outer().init({"b": jnp.ones(3)})


def test_the_name_of_a_layer_is_no_path_of_an_array():
    params = {"first": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "second": {"kernel": jnp.ones((2, 2))}}
    with raises(
        ValueError,
        "Freeze(where='first').init selects nothing: 'first' is no array, but 2 paths begin with it. Write 'first/.*' "
        "for these.",
    ):
        rpx.Freeze(where="first").init(params)


def test_an_expression_for_the_end_of_paths():
    params = {"lstm": {"hi": {"kernel": jnp.ones((2, 2))}, "ii": {"kernel": jnp.ones((2, 2))}}}
    with raises(
        ValueError,
        "Freeze(where='h[ifgo]/kernel').init selects nothing: no path matches 'h[ifgo]/kernel' as a whole, but the end "
        "of 1 does, as of 'lstm/hi/kernel'. Write '.*/h[ifgo]/kernel' for these.",
    ):
        rpx.Freeze(where="h[ifgo]/kernel").init(params)
