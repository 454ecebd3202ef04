"""What layers and names say of axes, function by function: stacks, factors, siblings, and layers that share arrays."""

from dataclasses import dataclass
from types import SimpleNamespace

import equinox as eqx
import jax
import numpy as np
import pytest
from axes.networks import KEY, drawn
from flax import nnx

from reparax.core.known_axes import (
    KnownAxes,
    _computes_like,
    _custom_function,
    _defaults_of,
    _is_own,
    _layer_of,
    _overrides_reading,
    _without_contradictions,
    known_by_name,
    role_by_letters,
)
from reparax.core.raw import flatten
from reparax.core.roles import LOOKUP, PRODUCT


def known(letters, *sizes, **more):
    more = {"is_class": True, **more}
    return KnownAxes(role_by_letters(letters, sizes, "Layer"), source="Layer", **more)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, np.float16)


@pytest.mark.parametrize(
    ("letters", "expected", "how", "windows"),
    [
        ("wio", ((0, 1), (2,), ()), PRODUCT, (0,)),
        ("oiww", ((1, 2, 3), (0,), ()), PRODUCT, (2, 3)),
        ("ro", ((0,), (1,), ()), LOOKUP, ()),
        ("sio", ((1,), (2,), (0,)), PRODUCT, ()),
        ("ois", ((1,), (0,), (2,)), PRODUCT, ()),
        ("vi", ((1,), (), ()), PRODUCT, ()),
        ("o", ((), (0,), ()), PRODUCT, ()),
    ],
)
def test_each_axis_has_the_role_of_its_letter(letters, expected, how, windows):
    role = role_by_letters(letters, (None,) * len(letters), "Layer")
    assert (role.inputs, role.outputs, role.stacked, role.why) == (*expected, "")
    (use,) = role.uses
    assert (use.inputs, use.outputs, use.stacked, use.how, use.windows, use.line) == (*expected, how, windows, "Layer")
    assert role.shape == (None,) * len(letters)


def test_a_bias_has_no_role_and_its_stacked_axes():
    role = role_by_letters("vs", (4, 3), "Layer")
    assert (role.inputs, role.outputs, role.stacked, role.uses, role.shape) == ((), (), (1,), (), (4, 3))
    assert role.why == "it is a bias or a scale of Layer"


@pytest.mark.parametrize(
    ("name", "sizes", "inputs", "is_table"),
    [
        ("kernel", 2, (0,), False),
        ("w", 2, (0,), False),
        ("embedding", 2, (0,), True),
        ("embeddings", 2, (0,), True),
        ("table", 2, (0,), True),
        ("weight", 0, (), False),
        ("kernels", 0, (), False),
    ],
)
def test_a_name_says_the_axes_of_kernels_and_tables(name, sizes, inputs, is_table):
    axes = known_by_name(name)
    assert (len(axes.sizes), axes.role.inputs, axes.role.is_table) == (sizes, inputs, is_table)
    assert (axes.source, axes.is_class, axes.are_of_layer) == (name, False, False)


def test_a_vector_is_an_array_of_known_sizes_without_inputs_and_outputs():
    found = known("v", 4), known("io", 4, 3), known("o", 3), known("i", 3), KnownAxes(is_class=True), KnownAxes()
    flags = [(axes.are_of_layer, axes.are_of_vector) for axes in found]
    assert flags == [(True, True), (True, False), (True, False), (True, False), (False, False), (False, False)]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("rows", "rank"), ((6, 4, 2), (0, 1), (2,))),
        (("rank", "columns"), ((2, 3), (0,), (1,))),
        (("columns", "rows"), ((3, 6, 4), (1, 2), (0,))),
        (("rank", "other"), ((2, None), (), ())),
        (("rank",), ((2,), (), ())),
    ],
)
def test_a_factor_has_the_rows_and_the_columns_that_it_declares(axes, expected):
    of = known("wio", 6, 4, 3, names=("a", "b", "c"), why="why").of_factor(axes, {"rank": 2})
    assert (of.sizes, of.role.inputs, of.role.outputs) == expected
    assert (of.source, of.is_class, of.names, of.why) == ("a factor of Layer", True, None, "why")
    assert known_by_name("w").of_factor(axes, {}).source == "w"


def test_a_factor_of_an_unknown_array_is_unknown_and_has_no_names():
    unknown = KnownAxes(why="why", source="Layer", is_class=True, names=("a",))
    assert unknown.of_factor(("rows", "rank"), {"rank": 2}) == KnownAxes(why="why", source="Layer", is_class=True)


@pytest.mark.parametrize(
    ("axes", "shape", "given", "stacks"),
    [
        (known("io", 8, 4), (8, 4), (), [()]),
        (known("io", 8, 4), (3, 8, 4), (), [(0,)]),
        (known("io", 8, 4), (8, 3, 4), (), [(1,)]),
        (known("io", 8, 4), (2, 8, 3, 4), (), [(0, 2)]),
        (known("io", 4, 4), (4, 4, 4), (), [(0,), (1,), (2,)]),
        (known("io", 4, 4), (4, 4, 4), (1,), [(1,)]),
        (known("io", 8, 4), (8, 3, 4), (0,), []),
        (known("io", 8, 4), (4, 8), (), []),
        (known("io", 8, 4), (5, 5), (), []),
        (known("io", 8, 4), (4,), (), []),
        (known("io", 8, None), (8, 7), (), [()]),
        (known("io", None, None, is_class=False), (8, 7), (), [()]),
        (known("io", None, None, is_class=False), (3, 8, 7), (), []),
        (known("io", None, None, is_class=False), (3, 8, 7), (0,), [(0,)]),
        (KnownAxes(is_class=True), (8, 4), (), []),
    ],
)
def test_axes_may_be_stacked_if_the_others_have_the_sizes_of_the_layer(axes, shape, given, stacks):
    assert axes.possible_stacks(shape, given) == stacks


def test_the_role_of_a_stack_is_that_of_one_layer_moved():
    role = known("wio", 3, 8, 4).role_of(array(3, 5, 8, 2, 4))
    assert (role.inputs, role.outputs, role.stacked, role.why) == ((0, 2), (4,), (1, 3), "")
    assert (role.shape, role.dtype, role.uses[0].windows) == ((3, 5, 8, 2, 4), np.float16, (0,))


def test_a_role_that_is_not_known_says_why():
    unknown = known("io", 4, 4).role_of(array(4, 4, 4))
    assert unknown.why == "its shape in Layer is (4, 4), so the stacked axes may be 0 or 1 or 2"
    assert (unknown.shape, unknown.dtype, unknown.inputs) == ((4, 4, 4), np.float16, ())
    assert known("io", 4, 4).role_of(array(4, 5)).why == "its shape in Layer is (4, 4)"
    assert known("io", 4, 4).role_of(array(4, 4, 4), (2,)).stacked == (2,)
    assert KnownAxes(why="why", is_class=True).role_of(array(4, 5)).why == "why"


def tree(**arrays):
    return SimpleNamespace(
        frame=SimpleNamespace(places=[("layer", name) for name in arrays]),
        arrays={("layer", name): x for name, x in arrays.items() if x is not None},
    )


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ({"w": array(5, 8, 4), "b": array(5, 4), "s": array(5, 8)}, ""),
        ({"w": array(5, 8, 4), "b": array(4, 5), "s": array(8, 5)}, ""),
        ({"w": array(5, 8, 4), "b": array(6, 4), "s": array(5, 8)}, "(5,) here, but (6,) at 'b'"),
        ({"w": array(5, 8, 4), "b": array(5, 4), "s": array(6, 8)}, "(5,) here, but (6,) at 's'"),
        ({"w": array(5, 8, 4), "b": array(4), "s": array(5, 8)}, "(5,) here, but () at 'b'"),
        ({"w": array(8, 4), "b": array(5, 4), "s": array(8)}, "() here, but (5,) at 'b'"),
        ({"w": array(5, 8, 4), "b": array(7, 9), "s": array(5, 8)}, "(5,) here, but (7,) at 'b'"),
        ({"w": array(5, 8, 4), "b": None, "s": array(5, 8)}, ""),
        ({"w": array(5, 8, 4), "b": "relu", "s": array(6, 8)}, "(5,) here, but (6,) at 's'"),
        ({"w": array(4, 4, 4), "b": array(4, 4), "s": array(5, 8)}, None),
    ],
)
def test_all_arrays_of_a_layer_are_stacked_alike(of, why):
    axes = known("io", 8, 4, siblings=((1, (4,)), (2, (8,))))
    if why is None:  # the shape itself does not fit
        assert axes.role_of(of["w"], tree=tree(**of)).why == "its shape in Layer is (8, 4)"
        return
    found = axes.role_of(of["w"], tree=tree(**of)).why
    assert found == (f"Layer has stacked axes of sizes {why}" if why else "")
    assert axes.role_of(of["w"]).why == ""


def test_several_stacks_of_a_sibling_are_no_hindrance_if_one_of_them_fits():
    axes, like = known("io", 8, 4, siblings=((1, (4,)),)), {"b": array(4, 5)}
    assert axes.role_of(array(5, 8, 4), tree=tree(w=array(5, 8, 4), **like)).stacked == (0,)
    of_any_size = known("io", 8, 4, siblings=((1, (None,)),))
    for b in (array(5, 6), array(6, 5)):
        assert of_any_size.role_of(array(5, 8, 4), tree=tree(w=array(5, 8, 4), b=b)).stacked == (0,)


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [
        (known("io", 4, 3), known("io", 4, 3), True),
        (known("io", 4, 3), known("io", 7, 3), True),  # of sizes, another check speaks
        (known("io", 4, 4), known("oi", 4, 4), False),
        (known("io", 4, 4), known("ro", 4, 4), False),
        (known("io", 4, 4), known("sio", 2, 4, 4), False),
        (known("v", 4), known("vs", 4, 2), False),
        (known("v", 4), known("s", 4), False),
        (known("v", 4), known("vv", 4, 4), False),
        (known("io", 4, 4), KnownAxes(why="it belongs to Mine", is_class=True), False),
    ],
)
def test_layers_that_share_an_array_must_use_its_axes_alike(first, second, agree):
    other = known("io", 9, 9)
    found = _without_contradictions({0: other, 1: first, 3: second}, [0, 1, 2, 1])
    assert (found[0], found[3]) == (other, second)
    if agree:
        assert found[1] == first
        return
    named = second.source or "a module of another class"
    assert found[1].why == f"Layer and {named} share it, but use its axes differently"
    assert (found[1].is_class, found[1].sizes) == (True, ())
    assert found[1].role.uses == (*first.role.uses, *second.role.uses)


class Own(nnx.Linear):
    """Plain attributes, and a private method."""

    kernel_metadata = 3
    eval = None

    def _setattr(self, name, value):
        super()._setattr(name, value)


class Asked(nnx.Linear):
    """A property in place of a method."""

    eval = property(lambda self: lambda: None)


class Called(Own):
    def __call__(self, x):
        return x


class Fetched(Own):
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class WithMethod(eqx.nn.Linear):
    def tree(self):
        return 1


@pytest.mark.parametrize(
    ("cls", "base", "alike"),
    [
        (nnx.Linear, nnx.Linear, True),
        (Own, nnx.Linear, True),
        (Asked, nnx.Linear, False),
        (Called, nnx.Linear, False),
        (Fetched, nnx.Linear, False),
        (WithMethod, eqx.nn.Linear, True),  # a name that the layer does not have
        (type("Late", (Called,), {}), nnx.Linear, False),
    ],
)
def test_a_layer_computes_like_its_base_unless_it_redefines_what_the_base_computes_with(cls, base, alike):
    assert _computes_like(cls, base) is alike
    found = _layer_of(cls)
    assert (found is not None) is alike
    assert not alike or (found[0], found[1].rpartition(".")[2]) == (base, base.__name__)


def test_classes_are_told_apart_from_containers_and_libraries():
    named = type("Pair", (tuple,), {"_fields": ()})
    flags = [_is_own(cls) for cls in (dict, named, nnx.Linear, eqx.nn.Linear, Own, SimpleNamespace)]
    assert flags == [False, False, False, False, True, True]
    assert _layer_of(dict) is None


class Base:
    def __init__(self, f=min, kernel_init=max, dtype=None, param_type=None, base_module=None):
        pass


class Derived(Base):
    def __init__(self, f=abs, more=None):
        pass


class Silent(Derived):
    pass


def test_defaults_are_those_of_the_class_that_is_derived_last_without_initializers():
    found = _defaults_of(Silent)
    assert found.pop("self")
    assert found == {"f": abs, "dtype": None, "param_type": None, "base_module": None, "more": None}


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({}, ""),
        ({"f": min}, ""),
        ({"f": max}, "f"),
        ({"dtype": np.float32}, ""),
        ({"dtype": len}, "dtype"),
        ({"base_module": len}, ""),
        ({"kernel_init": len}, ""),
        ({"param_type": int, "f": sum}, "f"),
        ({"f": int}, "f"),  # a class is called like a function
        ({"unknown": len}, ""),
        ({"f": 3}, ""),
    ],
)
def test_a_function_of_ones_own_is_any_other_than_the_default(attributes, name):
    assert _custom_function(Base, SimpleNamespace(**attributes)) == name


class Read(nnx.Param):
    def get_value(self, **kwargs):
        return super().get_value(**kwargs).T


class Labelled(nnx.Param):
    """Another name, read as its base."""

    def label(self):
        return "mine"


def test_a_variable_that_is_read_otherwise_is_told_from_one_with_another_name():
    w = np.ones((2, 2), np.float32)
    assert [_overrides_reading(box) for box in (None, nnx.Param(w), Labelled(w), Read(w))] == [
        False,
        False,
        False,
        True,
    ]


def leaves_of(model):
    """What is known of each array, by path."""
    found = flatten(model).frame.axes
    return {"/".join(place): (axes.role.inputs, axes.role.outputs, axes.is_class) for place, axes in found.items()}


@jax.tree_util.register_dataclass
@dataclass
class Node:
    """A container of ones own, which is no module."""

    kernel: jax.Array


class Outer(eqx.Module):
    plain: jax.Array
    layers: list

    def __call__(self, x):
        return x


def test_what_lies_beside_layers_in_a_module_is_unknown_and_outside_of_modules_goes_by_its_name():
    layer = drawn(lambda: eqx.nn.Linear(4, 3, key=KEY))
    w = np.ones((4, 3), np.float32)
    found = leaves_of({"kernel": w, "node": Node(w), "outer": Outer(w, [layer, {"kernel": w}]), "z": [w, layer]})
    assert found == {
        "kernel": ((0,), (1,), False),
        "node/kernel": ((0,), (1,), False),
        "outer/plain": ((), (), True),
        "outer/layers/0/weight": ((1,), (0,), True),
        "outer/layers/0/bias": ((), (), True),
        "outer/layers/1/kernel": ((), (), True),
        "z/0": ((), (), False),
        "z/1/weight": ((1,), (0,), True),
        "z/1/bias": ((), (), True),
    }


def test_what_an_equinox_layer_shares_is_unknown_but_its_bias_is_a_bias_and_later_layers_are_as_ever():
    def layers():
        pair = eqx.nn.Embedding(4, 3, key=KEY), eqx.nn.Linear(3, 4, key=KEY)
        shared = eqx.nn.Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)
        return [eqx.nn.Linear(2, 5, key=KEY), shared, eqx.nn.Linear(2, 5, key=KEY)]

    known_here = flatten(drawn(layers)).frame.axes
    by_shape = {place[0]: [] for place in known_here}
    for place, axes in known_here.items():
        by_shape[place[0]].append((axes.are_of_vector, axes.role.inputs, len(axes.role.uses)))
    plain = [(False, (1,), 1), (True, (), 0)]
    shared = [*[(False, (), 1)] * 2, (True, (), 0), *[(False, (), 0)] * 2]  # its two functions are leaves too
    assert by_shape == {"0": plain, "1": shared, "2": plain}
