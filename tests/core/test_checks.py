"""What checks of arguments, results and raw trees ask, one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.core import calls, checks, names
from reparax.core.raw import flatten
from reparax.core.site import Site, read_value, stage_key
from reparax.core.values import Value, check_values, value_of

MAIN, AUX, FIXED = rpx.stage.main, rpx.stage.aux, rpx.stage.fixed
W = np.ones((2, 3), np.float32)


# Declarations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "fields", "text"),
    [
        (MAIN(), {}, "main()"),
        (
            MAIN(aligned=True, decays=False, part=True, fixed=True, axes=("rows",)),
            {"aligned": True, "decays": False, "part": True, "fixed": True, "axes": ("rows",)},
            "main(fixed=True, aligned=True, decays=False, part=True, axes=('rows',))",
        ),
        (AUX(), {"main": False}, "aux()"),
        (FIXED(), {"main": False, "fixed": True}, "fixed()"),
        (
            FIXED(base=True, optional=True, axes=("rank",)),
            {"main": False, "fixed": True, "base": True, "optional": True, "axes": ("rank",)},
            "fixed(base=True, optional=True, axes=('rank',))",
        ),
    ],
    ids=repr,
)
def test_a_declaration_says_what_it_was_called_with(value, fields, text):
    assert value == Value(**fields)
    assert repr(value) == text


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({}, "a", MAIN()),
        ({"b": AUX()}, "a", MAIN()),
        ({"b": AUX(), "c": MAIN()}, "a", AUX()),
        ({"b": MAIN(), "*": FIXED()}, "a", FIXED()),
        ({"a": AUX(), "*": FIXED()}, "a", AUX()),
        ({"*": MAIN(part=True)}, "a", MAIN(part=True)),
    ],
)
def test_a_value_without_an_entry_is_declared_by_the_others(values, name, expected):
    assert value_of(values, name) == expected


@pytest.mark.parametrize(
    "values", [{"a": MAIN(), "b": 1}, {"a": MAIN(), "": AUX()}, {"a@b": AUX()}, {"a.b": AUX()}, []]
)
def test_what_is_no_declaration_is_refused(values):
    with pytest.raises(TypeError, match="P got raw_values="):
        check_values("P", values)


# Results of formulas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"a": W, "b": W}, None),
        ({"a": W}, None),
        ({"a": W, "more": W}, None),
        ({"b": W}, r"must return each value that the class declares, \('a',\)"),
        ({"a": W, "b": 1.0}, "returns float for 'b'"),
        ({}, "at least one value"),
        *(({"a": W, name: W}, "at least one value") for name in ("", "*", "x@y", "x.y", "x/y")),
        ([W], "must return a dict of arrays"),
    ],
)
def test_a_start_returns_arrays_by_all_names_that_are_declared(values, said):
    declared = {"a": MAIN(), "b": FIXED(optional=True), "*": AUX()}
    if said is None:
        checks.require_named_arrays("init_leaf", values, declared)
    else:
        with pytest.raises(ValueError, match=said):
            checks.require_named_arrays("init_leaf", values, declared)


def test_raw_values_have_the_names_and_shapes_of_a_start_in_any_dtype():
    checks.require_fit({"a": W.astype(np.float16)}, {"a": W, "b": W})
    for values, said in (({"a": W, "c": W}, "got 'c'"), ({"a": W.T}, "'a' of shape"), ({"a": W, "b": W[0]}, "'b' of")):
        with pytest.raises(ValueError, match=said):
            checks.require_fit(values, {"a": W, "b": W})


@pytest.mark.parametrize(
    ("number", "is_one"),
    [
        *((x, True) for x in (1, 0.5, True, np.float32(1), np.ones((), int), jnp.float32(2))),
        *((x, False) for x in (np.ones(1), np.complex64(1), 1j, None, "1", W)),
    ],
)
def test_a_penalty_is_one_real_number(number, is_one):
    if is_one:
        checks.require_number("penalty_leaf", number)
    else:
        with pytest.raises(ValueError, match="must return one real number"):
            checks.require_number("penalty_leaf", number)


class Checked(rpx.Reparametrization):
    raw_values = {"w": MAIN(), "n": FIXED(), "*": FIXED()}
    moves_weights = False

    def init_leaf(self, w):
        return {"w": w, "n": w}

    def apply_leaf(self, values):
        return values["w"]


class Wandering(Checked):
    moves_weights = True


@pytest.mark.parametrize(
    ("stage", "new", "error", "said"),
    [
        (Checked(), {}, None, ""),
        (Checked(), {"n": W, "more": W}, None, ""),
        (Checked(), {"n": W, "w": W}, ValueError, "returns the trained value 'w'"),
        (Wandering(), {"n": W, "w": W}, None, ""),
        (Checked(), {"more": W, "n": W.T}, ValueError, "must return float32"),
        (Checked(), {"n": W.astype(int)}, ValueError, "returns int32"),
        (Checked(), {"other": W}, ValueError, "must return only values that the array already has"),
        (Checked(), None, ValueError, "must return a dict of arrays"),
    ],
)
def test_an_update_keeps_names_and_types_and_what_is_trained(stage, new, error, said):
    values = {"w": W, "n": W, "more": W}
    if error is None:
        checks.require_update("update_leaf", stage, values, new)
        return
    with pytest.raises(error, match=said):
        checks.require_update("update_leaf", stage, values, new)


def test_a_declared_value_that_the_raw_tree_lacks_is_said_to_be_missing():
    with pytest.raises(KeyError, match="n"):
        checks.require_update("update_leaf", Checked(), {"w": W}, {"n": W})


def test_errors_of_formulas_say_where_and_keep_their_class():
    def located(error):
        with checks.locate_errors("P() at 'w'"):
            raise error

    with pytest.raises(ValueError, match=r"^P\(\) at 'w': odd$") as caught:
        located(ValueError("odd"))
    assert type(caught.value.__cause__) is ValueError
    with pytest.raises(ValueError, match=r"^P\(\) at 'w': a formula looked up 'g', which does not exist"):
        located(KeyError("g"))
    with pytest.raises(IndexError, match="odd") as caught:
        located(IndexError("odd"))
    assert caught.value.__notes__ == ["This happened in P() at 'w'."]


def test_raw_values_are_described_by_their_parameter():
    tree = {
        "a": {"w": {"@x": {"v": {"@y": {"g": W}}, "@fixed": {"n": W[0]}}}, "b": W[0], "f": "relu"},
        "t": {"@tie": {}},
        "e": {},
    }
    found = {"a/w": {"@x/v/@y/g": (2, 3), "@x/@fixed/n": (3,)}, "a/b": {"": (3,)}}
    described = checks.by_parameter(tree, lambda x: getattr(x, "shape", None), empty=False)
    assert described == found
    described = checks.by_parameter(tree, lambda x: getattr(x, "shape", None), empty=True)
    assert described == found | {"t": {"@tie": None}, "e": {"": None}}
    assert checks.by_parameter({}, str, empty=True) == {}
    assert checks.by_parameter(W, np.shape, empty=True) == {"": {"": (2, 3)}}


# Calls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (lambda: 0, {0}),
        (lambda a, b: 0, {2}),
        (lambda a, b=1: 0, {1, 2}),
        (lambda *a: 0, {0, 1, 2, 3}),
        (lambda a, *, b: 0, set()),
        (lambda a, *, b=1: 0, {1}),
        (lambda a, **b: 0, {1}),
    ],
)
def test_a_function_can_take_as_many_arguments_as_its_signature_says(function, counts):
    for unknown in (True, False):
        assert {n for n in range(4) if calls.can_take(function, n, if_unknown=unknown)} == counts
        assert calls.can_take(type, 2, if_unknown=unknown) is unknown  # a builtin without a signature


def test_updates_are_by_hand_or_by_nobody():
    calls.require_by_hand("f", None)
    calls.require_by_hand("f", "by hand")
    for wrong in ("hand", True, 0):
        with pytest.raises(ValueError, match="f takes None or 'by hand' as `updates`"):
            calls.require_by_hand("f", wrong)


def test_a_call_is_written_as_code_with_all_paths():
    p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
    found = [str(calls.CallName(x, "init").at(*paths)) for x, paths in ((p, ()), (p[0], ("a",)), (p[:1], ("a", "b")))]
    assert found == [
        "(WeightNorm() >> VarNoise(0.1)).init",
        "WeightNorm().init at 'a'",
        "WeightNorm().init at 'a', 'b'",
    ]
    assert str(calls.CallName(rpx.Chain(), "fold")) == "Chain().fold"


def test_stages_are_told_from_classes_and_only_the_wrong_argument_is_named():
    stages = rpx.WeightNorm(), rpx.Chain()
    assert [calls.is_stage(x) for x in (*stages, rpx.WeightNorm, 1)] == [True, True, False, False]
    assert calls.parts_of(stages[0] >> stages[0]) == (stages[0], stages[0])
    calls.require_chains("f(p, q)", *stages)
    with pytest.raises(
        TypeError, match=r"^f expected a parametrization, but got a value of type int. Write `rpx.x.f\(p"
    ):
        calls.require_chains("x.f(p, q)", stages[0], 1)


def test_a_key_is_checked_even_where_nothing_is_drawn():
    key, p = jax.random.key(0), rpx.VarNoise(0.1)
    assert calls.key_for_apply(p, key) is key
    assert calls.key_for_apply(rpx.WeightNorm(), key) is None
    assert calls.checked_key(p, "update", None) is None
    with pytest.raises(ValueError, match=r"needs a key, but got key=None\. Now\."):
        calls.checked_key(p, "init", None, needed="Now.")
    with pytest.raises(TypeError, match="takes a key before the gradients"):
        calls.checked_key(p, "update", {"w": W})
    for method, x in (("apply", {"w": W}), ("update", {"w": 1}), ("update", W)):
        with pytest.raises(TypeError, match="needs a PRNG key"):
            calls.checked_key(p, method, x)


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "advice"),
    [
        ("axes", ("axis", "where"), "Write `axis=`."),
        ("axes", ("along", "where"), "Write `along=`."),
        ("scale", ("factor",), "Write `factor=`."),
        ("axes", ("axess", "along"), "Write `along=`."),  # rather than what is similar
        ("wher", ("axis", "where"), "Write `where=`."),
        ("odd", ("axis", "where"), "It takes axis, where."),
        ("odd", (), "It takes none."),
    ],
)
def test_an_argument_of_another_library_leads_to_ours(name, arguments, advice):
    assert names.instead_of(name, arguments) == advice


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("Sphere", " at the top: it is `rpx.norms.Sphere`."),
        ("Sequential", ". Write `a >> b`."),
        ("fold", ". It is a method of a chain: `p.fold`."),
        ("testing", ". It is a module: `import reparax.testing`."),
        ("low_rank", ". Write `rpx.LowRank`."),
        ("Spheres", ". Write `rpx.norms.Sphere`."),
        ("qqq", ". `dir(reparax)` lists what it has and its families."),
    ],
)
def test_an_unknown_name_leads_to_the_nearest(name, end):
    assert names._suggest(name) == end


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("WeightNorm", ["norms"]),
        ("weight_norm", ["norms"]),
        ("rigl", ["sparse"]),
        ("lora", ["adapters"]),
        ("optimizer", []),
        ("main", []),
        ("unheard_of", []),
    ],
)
def test_a_stage_is_imported_by_its_class_or_its_kind(name, modules, monkeypatch):
    imported = []
    monkeypatch.setattr(names, "_import_module", imported.append)
    names.import_stage(name)
    assert imported == [f"reparax.stages.{module}" for module in modules]


def test_only_what_jax_lacks_is_said_of_jax(monkeypatch):
    def lacking(error):
        def imported(module):
            raise error

        monkeypatch.setattr(names.importlib, "import_module", imported)
        with pytest.raises(ImportError) as caught:
            names._import_module("reparax.x")
        return caught.value

    ours, others = ImportError("no x (y)", name="jax.lax"), ImportError("no flax", name="flax")
    assert lacking(others) is others
    assert lacking(ImportError("no name")).name is None
    assert "(no x). It was tested" in str(lacking(ours))


def test_libraries_and_their_modules_are_known_by_the_first_name():
    found = [
        names.layers_of_library(module) for module in ("flax.nnx.nn.linear", "flax", "equinox.nn", "flaxen", "jax")
    ]
    assert [None if table is None else table.NAME for table in found] == ["nnx", "nnx", "eqx.nn", None, None]
    assert names.load("norms") is rpx.norms
    assert names.load("WeightNorm") is rpx.norms.WeightNorm
    assert names.dir_of("transforms")() == sorted(names.FAMILIES["transforms"].names)
    assert "Parametrized" not in names.family_by_name()


def test_a_library_that_is_missing_is_not_shown(monkeypatch):
    everything = names.shown_names()
    monkeypatch.setattr(names.importlib.util, "find_spec", lambda library: None if library == "flax" else 1)
    assert set(everything) - set(names.shown_names()) == {"nnx", "linen"}


# Sites ----------------------------------------------------------------------------------------------------------------


def test_a_site_reads_what_it_does_not_change_and_stops_gradients_of_what_is_fixed():
    fixed, own, other = ("w", "@checked", "@fixed", "n"), ("w", "@checked", "w"), ("b",)
    values, nodes = {"w": {"w": own, "n": fixed}, "t": {}}, {"w": ("w", "@checked"), "t": ("t", "@checked")}
    site = Site(Checked(), None, {"w": ("w",), "t": ("t",)}, values, nodes, reads={"b": other})
    assert site.places_read == [own, fixed, other]
    assert site.free_values == {"w": own}
    assert site.swaps({"w": 1, "t": 2}) == [([own, fixed], {("w",): 1}), ([("t", "@checked")], {("t",): 2})]

    def stopped(place):
        return "stop_gradient" in str(jax.make_jaxpr(lambda x: read_value({place: x}, place))(W))

    assert [stopped(place) for place in (own, fixed, other)] == [False, True, False]
    read = jax.tree.map(jnp.shape, jax.eval_shape(site.read, {own: W, fixed: W.T, other: W[0]}))
    assert read == {"w": {"w": (2, 3), "n": (3, 2)}, "t": {}, "b": {"": (3,)}}


def test_values_are_placed_with_the_free_ones_first_and_the_fixed_ones_as_declared():
    class Placed(Checked):
        raw_values = {"z": FIXED(), "w": MAIN(), "a": FIXED(), "*": FIXED()}

        def init_leaf(self, w):
            return {"more": w, "a": w, "w": w, "z": w}

    (site,) = Placed().sites("init", flatten({"w": W}))
    values = {"more": W, "a": W, "w": W, "z": W}
    node = ("w", "@placed")
    fixed = [(*node, "@fixed", name) for name in ("z", "a", "more")]
    assert list(site.place_values("w", values)) == [(*node, "w"), *fixed]
    assert site.place_values("w", {}) == {node: {}}


def test_a_stage_with_a_traced_number_is_equal_to_itself_alone():
    assert stage_key(rpx.VarNoise(0.1)) == stage_key(rpx.VarNoise(0.1)) != stage_key(rpx.VarNoise(0.2))
    keys = []

    def trace(std):
        one, other = rpx.VarNoise(std), rpx.VarNoise(std)
        keys.extend([stage_key(one) == stage_key(one), stage_key(one) == stage_key(other)])
        return std

    jax.eval_shape(trace, 0.1)
    assert keys == [True, False]
