"""Stages as values: what every public stage has in common as a Python object, whatever it is built of."""

import copy
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import math
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CASES
from errors import raises, table
from public import PUBLIC

import reparax as rpx
from reparax.core.chain import Mean
from reparax.numerics.arguments import check_number

MODULE = {"rpx": rpx, "jnp": jnp, "jax": jax, **PUBLIC}


class Jump(rpx.Perturbation):
    by: float

    def apply_leaf(self, w, key):
        return w + self.by * jax.random.uniform(key, w.shape)

    def mean_leaf(self, w):
        return w + self.by / 2


MODULE |= {"Jump": Jump, "Mean": Mean}

STAGES = {type(p).__name__: p for chain, _ in CASES.values() for p in chain if type(p).__name__ in PUBLIC}
# Fields of other types, and text that JSON and Python write in another way.
UNUSUAL = [
    rpx.Chain(),
    rpx.WeightNorm() >> rpx.Tie({"a": "b"}) >> rpx.VarNoise(0.1),
    rpx.WeightNorm(axis=(0, "heads"), detach=True),
    rpx.Freeze(where="'\"\\\\d"),
    rpx.matrices.BlockDiagonal(3, where=rpx.stage.selected({"a": {"b": True, "c": False}})),
    rpx.numbers.Bounded(-1e-30, 1e30),
    rpx.quantized.Cast(jnp.float8_e4m3fn),
    rpx.MagnitudePruning(0.5, axis=0, ord=math.inf),
    rpx.sparse.SET({".*kernel": 0.5}, drop_fraction=0.2),
    rpx.SpectralNorm(input_shape=(8, 8), padding=((1, 0), (2, 3))),
    Mean(Jump(0.5, where="w")),
]

each_stage = pytest.mark.parametrize("p", [*STAGES.values(), *UNUSUAL], ids=repr)


def test_the_cases_have_all_public_stages():
    public = {name: x for name, x in PUBLIC.items() if isinstance(x, type) and issubclass(x, rpx.Parametrization)}
    bases = {name for name, x in public.items() if inspect.isabstract(x)} | {"Parametrization", "Chain"}
    assert set(STAGES) == set(public) - bases


@each_stage
def test_copies_of_a_stage_are_equal_and_write_the_same(p):
    loads = json.JSONDecoder(parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    loads.decode(p.to_json())
    copies = {
        "replace": dataclasses.replace(p),
        "copy": copy.copy(p),
        "deepcopy": copy.deepcopy(p),
        "pickle": pickle.loads(pickle.dumps(p)),
        "repr": eval(repr(p), MODULE),
        "json": rpx.from_json(p.to_json()),
    }
    for way, twin in copies.items():
        assert (way, type(twin)) == (way, type(p))
        assert (way, twin) == (way, p)
        assert (way, hash(twin)) == (way, hash(p))
        assert (way, repr(twin)) == (way, repr(p))
        assert (way, twin.to_json()) == (way, p.to_json())


# ---- Known scalars of numpy and JAX are numbers, flags and text of Python. ------------------------------------------


class Anything(rpx.Perturbation):
    """A third party's stage, which converts nothing."""

    value: object = np.float32(0.5)
    computed: object = 0

    def __post_init__(self):
        super().__post_init__()
        self.__dict__["seen"] = type(self.value)
        object.__setattr__(self, "computed", np.int64(7))

    def apply_leaf(self, w, key):
        return w


SCALARS = [
    (np.float64(0.25), 0.25),
    (np.float16(0.25), 0.25),
    (np.longdouble(0.25), 0.25),
    (np.array(0.25), 0.25),
    (jnp.float32(0.25), 0.25),
    (jnp.bfloat16(0.25), 0.25),
    (jnp.bfloat16.dtype.type(0.25), 0.25),
    (np.float32(0.0025), 0.0025),  # as a float of Python 0.0024999999441206455
    (jnp.float32(-1e-3), -1e-3),
    (np.array(16777216.0, np.float32), 16777216.0),
    (np.finfo(np.float32).max, 3.4028235e38),
    (np.float32(1e-45), 1e-45),
    (jnp.bfloat16(0.1), 0.100097656),  # in float32, where it is read, as before
    (np.float64(0.1) + 1e-16, 0.1 + 1e-16),
    (np.complex64(0.1 - 0.2j), 0.1 - 0.2j),
    (np.int8(3), 3),
    (jnp.uint8(3), 3),
    (np.bool_(1), True),
    (jnp.array(0, bool), False),
    (np.complex64(1 + 2j), 1 + 2j),
    (np.str_("a"), "a"),
    ((np.int64(1), (np.str_("a"), None)), (1, ("a", None))),
]


def types(value):
    return tuple(map(types, value)) if isinstance(value, tuple) else type(value)


@pytest.mark.parametrize(("given", "plain"), SCALARS, ids=[f"{type(x).__name__}-{y}" for x, y in SCALARS])
def test_known_scalars_in_fields_are_values_of_python(given, plain):
    p = Anything(given)
    assert (p.value, types(p.value)) == (plain, types(plain))
    assert p.seen is type(plain)  # before `__post_init__`
    assert p == Anything(value=plain) == dataclasses.replace(Anything(), value=given)
    assert hash(p) == hash(Anything(plain))
    assert eval(repr(p), {"Anything": Anything}) == p


def test_numbers_of_float32_print_and_store_as_they_were_written():
    p = rpx.VarNoise(jnp.float32(0.0025)) >> rpx.MagnitudePruning({"w": np.float32(0.1)})
    assert repr(p) == "VarNoise(0.0025) >> MagnitudePruning(sparsity={'w': 0.1})"
    assert rpx.from_json(p.to_json()) == p == rpx.VarNoise(0.0025) >> rpx.MagnitudePruning({"w": 0.1})
    drawn = rpx.VarNoise(lambda path, w: jnp.float32(0.0025)).for_array("w", jnp.zeros(2))
    assert drawn.std == 0.0025


def test_a_float32_reads_back_to_itself():
    words = np.random.default_rng(0).integers(0, 2**32, 2000, np.uint32).view(np.float32)
    found = [check_number(x, "", "") for x in words]
    np.testing.assert_array_equal(np.array(found).astype(np.float32), words)
    known = [x for x in words if np.isfinite(x)]
    assert [repr(x) for x in found if np.isfinite(x)] == [repr(float(str(x))) for x in known]  # as numpy prints them


def test_defaults_and_what_post_init_computes_are_values_of_python():
    assert (type(Anything().value), type(Anything().computed)) == (float, int)
    assert repr(Anything()) == "Anything(computed=7)"
    assert "float64" not in repr(Anything(np.float64(0.25)))


def test_a_traced_scalar_stays_traced():
    def build(value):
        assert Anything(value).value is value
        assert Anything((value, np.int64(1))).value == (value, 1)
        return rpx.VarNoise(value).std

    assert jax.jit(build)(0.5) == 0.5


def test_known_arrays_stay_arrays():
    w = np.ones(2)
    assert Anything(w).value is w
    key = jax.random.key(0)
    assert Anything(key).value is key


def test_dir_shows_what_users_call_and_what_a_class_of_ones_own_adds():
    class Counting(rpx.VarNoise):
        count: int = 0
        more = 1

        def draw(self, w, key):
            return w

    names = {"std", "where", "stacked", "relative", "axis", "init", "apply", "fold", "update", "to_json", "original"}
    shown = {name for name in dir(rpx.VarNoise(0.1)) if not name.startswith("_")}
    assert names <= shown
    assert shown.isdisjoint({"draw", "perturb", "apply_leaf", "sites", "kind", "default"})
    assert {name for name in dir(Counting(0.1)) if not name.startswith("_")} == shown | {"count", "more"}
    assert "_unwrapped" in dir(rpx.VarNoise(0.1))


# ---- Infinity and NaN. ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, (math.inf, (math.nan,)), np.float32("nan")], ids=str)
def test_numbers_that_are_not_finite_are_read_back_equal(value):
    p = Anything(value)
    assert eval(repr(p), {"Anything": Anything}) == p
    assert "Infinity" not in p.to_json()
    assert "NaN" not in p.to_json()
    for twin in (rpx.from_json(p.to_json()), pickle.loads(pickle.dumps(p)), copy.deepcopy(p), Anything(value)):
        assert twin == p
        assert hash(twin) == hash(p)


# ---- Functions of JAX. ----------------------------------------------------------------------------------------------

FUNCTIONS = {
    "jnp.diagonal": jnp.diagonal,
    "jnp.add": jnp.add,
    "jnp.linalg.inv": jnp.linalg.inv,
    "jnp.float32": jnp.float32,
    "jax.nn.relu": jax.nn.relu,
    "jax.lax.exp": jax.lax.exp,
    "jax.scipy.special.logit": jax.scipy.special.logit,
    "jax.scipy.stats.norm.ppf": jax.scipy.stats.norm.ppf,
}


@pytest.mark.parametrize(("text", "function"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_functions_of_jax_go_by_their_public_names(text, function):
    p = Anything((function, 1))
    assert repr(p) == f"Anything(value=({text}, 1), computed=7)"
    for twin in (rpx.from_json(p.to_json()), pickle.loads(pickle.dumps(p)), copy.copy(p), copy.deepcopy(p)):
        assert twin.value[0] is function
        assert twin == p


# ---- Whatever the text, `from_json` raises ValueError. --------------------------------------------------------------


def text_of(*entries):
    return json.dumps({"reparax": 1, "stages": entries})


def elementwise(name):
    return text_of({"class": "reparax.Elementwise", "forward": {"function": name}, "inverse": {"function": name}})


ODD = [
    None,
    True,
    -3,
    0.5,
    1e999,
    10**400,
    "",
    "0.1",
    "(",
    "\ud800\0",
    [],
    [[]],
    [1, "a"],
    {},
    {"a": 1},
    {"float": "1"},
    {"float": "nan"},
    {"class": 3},
    {"class": "reparax.Mask"},
    {"class": "reparax.Selected", "paths": [3]},
    {"class": "reparax.AllBut", "patterns": [3]},
    {"class": "reparax.AllBut", "patterns": None},
    {"class": "reparax.ByPath", "patterns": ["a", "b"], "numbers": [1]},
    {"class": "reparax.ByPath", "patterns": 3, "numbers": "x"},
    {"class": "reparax.Concat", "parts": ["a"]},
    {"function": 3},
    {"function": "jax.numpy.tanh"},
    {"function": "jax.numpy.a\0.b"},
    {"function": "jax.scipy." + "x" * 5000 + ".y"},
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", STAGES)
def test_odd_values_are_taken_or_refused_by_a_value_error(name):
    entry = json.loads(STAGES[name].to_json())["stages"][0]
    for field in [field.name for field in dataclasses.fields(PUBLIC[name])]:
        for value in ODD:
            try:
                found = rpx.from_json(text_of({**entry, field: value}))
            except ValueError:
                continue
            assert isinstance(found, rpx.Parametrization)
            assert repr(found)


# ---- Kinds. ---------------------------------------------------------------------------------------------------------


def define(name, module, base=rpx.Reparametrization, **members):
    """A class of that name in that module."""

    def init_leaf(self, w):
        return {"x": w / 2}

    def apply_leaf(self, values):
        return values["x"] * 2

    formulas = {"init_leaf": init_leaf, "apply_leaf": apply_leaf}
    return type(base)(name, (base,), {"__module__": module, "__qualname__": name, **formulas, **members})


def no_kind(name, kind, why):
    return raises(
        ValueError,
        f"{name} would have the marker '@{kind}' in raw trees, but '{kind}' {why}. Set another kind in the class, "
        f'`kind = "..."`.',
    )


def test_two_classes_of_one_name_in_a_package_are_told_apart():
    first = define("Sorted", "kinds_a.one")
    with no_kind("kinds_a.two.Sorted", "sorted", "is the kind of kinds_a.one.Sorted"):
        define("Sorted", "kinds_a.two")
    second = define("Sorted", "kinds_a.two", kind="other_sorted")
    assert (first.kind, second.kind) == ("sorted", "other_sorted")
    for cls in (first, second):  # the class that wrote it, by its module
        assert type(rpx.from_json(cls(where="a").to_json())) is cls
        assert json.loads(cls().to_json())["stages"] == [{"class": f"{cls.__module__}.Sorted"}]


def test_two_names_of_one_kind_are_told_apart():
    define("HttpSorted", "kinds_b.one")
    with no_kind("kinds_b.one.Http_Sorted", "http_sorted", "is the kind of kinds_b.one.HttpSorted"):
        define("Http_Sorted", "kinds_b.one")


@pytest.mark.parametrize(("name", "kind"), [("Fixed", "fixed"), ("_", ""), ("__", ""), ("a.b", "a.b")])
def test_a_name_that_is_no_kind_is_refused(name, kind):
    why = "is not a valid name: it must be text other than 'fixed', without '@', '.' and '/'"
    with no_kind(f"kinds_c.{name}", kind, why):
        define(name, "kinds_c")
    assert define(name, "kinds_c", kind=f"kinds_c_{name.replace('.', '_')}")


def test_the_name_of_another_package_is_kept_apart_by_the_package():
    assert define("TurnedAround", "kinds_e.x").kind == "turned_around"
    assert define("TurnedAround", "kinds_f.y").kind == "kinds_f_turned_around"
    assert define("WeightNorm", "kinds_f").kind == "kinds_f_weight_norm"
    assert rpx.WeightNorm.kind == "weight_norm"
    define("Other", "kinds_g", kind="kinds_h_turned_around")
    with no_kind("kinds_h.TurnedAround", "kinds_h_turned_around", "is the kind of kinds_g.Other"):
        define("TurnedAround", "kinds_h")


def test_a_class_that_is_defined_anew_is_the_same_one():
    kinds = [define("Cell", "kinds_j.x", doc=i).kind for i in range(2)]
    assert kinds == ["cell", "cell"]
    assert rpx.from_json(define("Cell", "kinds_j.x", doc=2)().to_json()).doc == 2
    slotted = [dataclasses.dataclass(frozen=True, slots=True)(define("Slots", "kinds_j.x")) for _ in range(2)]
    assert {cls.kind for cls in slotted} == {"slots"}
    given = [define("Given", "kinds_j.x", kind="given_twice") for _ in range(2)]
    assert {cls.kind for cls in given} == {"given_twice"}


SOURCE = """
import reparax as rpx
class FromAFile(rpx.Perturbation):
    def apply_leaf(self, w, key):
        return w
"""


def test_a_module_that_is_reloaded_or_is_a_script_too_has_the_same_classes(tmp_path, monkeypatch):
    (tmp_path / "kinds_of_a_file.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("kinds_of_a_file")
    importlib.reload(module)
    spec = importlib.util.spec_from_file_location("kinds_of_a_script", tmp_path / "kinds_of_a_file.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    assert module.FromAFile.kind == script.FromAFile.kind == "from_a_file"


# ---- What cannot be compared, and what a class must not be. ---------------------------------------------------------


def array_error(p, name):
    return (
        f"{p} holds an array as {name}, so it can be neither compared nor hashed. Pass a known number, or build "
        f"the stage inside the jitted function that uses it."
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.ones(2, np.float32), "<float32[2]>"),
        (jnp.asarray(np.ones((2, 3), np.float32), np.float32), "<float32[2, 3]>"),
        ((1, [np.ones(1, np.float32)]), "(1, [<float32[1]>])"),
    ],
    ids=["numpy", "jax", "inside"],
)
def test_a_stage_that_holds_an_array_is_neither_compared_nor_hashed(value, shown):
    p, text = Anything(value), array_error(f"Anything(value={shown}, computed=7)", "value")
    for compared in (p, Anything(value), Anything(3)):
        with raises(TypeError, text):
            assert p == compared
    with raises(TypeError, text):
        assert Anything(3) == p
    with raises(TypeError, text):
        hash(p)
    with raises(TypeError, text):
        hash(p >> rpx.WeightNorm())
    assert p != rpx.Mask()


def test_a_stage_of_a_traced_number_is_neither_compared_nor_hashed():
    def build(std):
        with raises(TypeError, array_error("VarNoise(<traced float32>)", "std")):
            assert rpx.VarNoise(std) == rpx.VarNoise(0.1)
        with raises(TypeError, array_error("VarNoise(<traced float32>)", "std")):
            hash(rpx.VarNoise(std))
        return std

    jax.jit(build)(0.5)


def test_an_init_of_ones_own_is_refused():
    text = (
        "Low defines __init__, but a stage is a dataclass, which generates it. Declare its arguments in the class "
        "instead, such as `rank: int`, and check values in `__post_init__`."
    )
    with raises(TypeError, text):

        class Low(rpx.Perturbation):
            def __init__(self, rank):
                self.rank = rank


# ---- A schedule where a number is expected. -------------------------------------------------------------------------


def schedule(step):
    return step / 2


P, RAW = rpx.WeightNorm(), {"w": np.ones((2, 2), np.float32)}


def test_a_subclass_with_another_default_keeps_the_checks_of_its_base():
    class Louder(rpx.VarNoise):
        std: Any = 0.5

    class Rows(rpx.WeightNorm):
        axis: Any = 0

    assert Louder().std == 0.5
    with raises(ValueError, "Louder got std=inf, but a standard deviation is a finite number."):
        Louder(float("inf"))
    assert hash(Rows([0, 1])) == hash(Rows((0, 1)))


@table(__file__)
def test_a_wrong_text_is_refused(case):
    case.check(globals(), functools=functools, optax=optax)
