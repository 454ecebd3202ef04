"""Classes of stages that cannot be meant so."""

import jax
import jax.numpy as jnp
import pytest
from errors import raises, table

import reparax as rpx


def test_the_type_of_the_array_is_that_of_the_first_aligned_value_that_is_declared():
    class Gained(rpx.Reparametrization):
        raw_values = {"v": rpx.stage.main(aligned=True), "g": rpx.stage.main(aligned=True)}

        def init_leaf(self, w):
            return {"v": w, "g": jnp.ones((1, w.shape[1]), w.dtype)}

        def apply_leaf(self, values):
            return values["g"] * values["v"]

    params = {"w": jnp.ones((2, 3))}
    assert Gained().apply(Gained().init(params))["w"].shape == (2, 3)


def test_what_an_update_reads_is_known_by_name():
    def stage(update_leaf, **more):
        class Reads(rpx.Reparametrization):
            raw_values = {"w": rpx.stage.main(), "*": rpx.stage.fixed()}

            def init_leaf(self, w):
                return {"w": w, "seen": jnp.zeros_like(w)}

            def apply_leaf(self, values):
                return values["w"]

        return type("ReadsMore", (Reads,), {"update_leaf": update_leaf, "kind": "reads_more", **more})()

    params, grads = {"w": jnp.ones(2)}, {"w": jnp.full(2, 3.0)}
    ways = [
        lambda self, values, grad: {"seen": grad},
        lambda self, values, grad=None: {"seen": grad},
        lambda self, values, *, grad: {"seen": grad},
        staticmethod(lambda values, grad: {"seen": grad}),
    ]
    for way in ways:
        p = stage(way)
        after = p.update(p.init(params), grads=grads)
        assert after["w"]["@reads_more"]["@fixed"]["seen"].tolist() == [3.0, 3.0]
    both = stage(lambda self, values, key, grad: {"seen": grad + 0 * jax.random.normal(key, grad.shape)})
    after = both.update(both.init(params), jax.random.key(0), grads)
    assert after["w"]["@reads_more"]["@fixed"]["seen"].tolist() == [3.0, 3.0]


def test_values_without_an_entry_are_auxiliary_beside_a_main_one_and_main_otherwise():
    class Three(rpx.Reparametrization):
        kind = "three"

        def init_leaf(self, w):
            return {"a": w, "b": 0 * w, "c": 0 * w}

        def apply_leaf(self, values):
            return values["a"] + values["b"] + values["c"]

    def selected(**raw_values):
        cls = type("Some", (Three,), {"kind": "some_of_three", "raw_values": raw_values})
        raw = cls().init({"w": jnp.ones(2)})
        return jax.tree.leaves(rpx.training.param_labels(raw, main="main", aux="aux", fixed="fixed"))

    assert selected() == ["main", "main", "main"]
    assert selected(a=rpx.stage.main()) == ["main", "aux", "aux"]
    assert selected(a=rpx.stage.fixed()) == ["fixed", "main", "main"]
    assert selected(**{"*": rpx.stage.aux(), "c": rpx.stage.main()}) == ["aux", "aux", "main"]


def test_the_key_of_a_start_is_called_key():
    with raises(
        TypeError,
        "KeyedStart.init_leaf takes self, w, rng, but is called with (self, w), or with (self, w, key) if it takes a "
        "`key`, as a random start does.",
    ):

        class KeyedStart(rpx.Reparametrization):
            def init_leaf(self, w, rng):
                return {"x": w}


def test_a_perturbation_takes_a_key():
    with raises(
        TypeError,
        "Keyless.apply_leaf takes self, w, but is called with (self, w, key). Take a key, even if the stage is not "
        "random.",
    ):

        class Keyless(rpx.Perturbation):
            stochastic = False

            def apply_leaf(self, w):
                return w


def test_a_formula_that_takes_a_key_is_random():
    with raises(
        TypeError,
        "Unsaid.apply_leaf takes key after the values. If the array is random, set `stochastic = True` in the class, "
        "and define mean_leaf(values).",
    ):

        class Unsaid(rpx.Reparametrization):
            def init_leaf(self, w):
                return {"x": w}

            def apply_leaf(self, values, key):
                return values["x"] + jax.random.normal(key)


def test_the_error_names_the_method_that_gave_the_values():
    class Misnamed(rpx.Reparametrization):
        raw_values = {"base": rpx.stage.main()}

        def init_leaf(self, w, key):
            return {"bse": w}

        def apply_leaf(self, values):
            return values["bse"]

    with raises(
        ValueError,
        "Misnamed().init at 'w': init_leaf must return each value that the class declares, ('base',), but returns "
        "('bse',). Rename or add values in init_leaf.",
    ):
        Misnamed().init({"w": jnp.ones(2)}, jax.random.key(0))


class Counted(rpx.Reparametrization):
    """Right as it is; the cases below write one of its methods wrongly."""

    raw_values = {"x": rpx.stage.main(), "n": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"x": w, "n": jnp.zeros(2)}

    def apply_leaf(self, values):
        return values["x"]


LIKE = "must return float32[2] as 'n', like the raw value, but returns"
ONE = "must return one real number, but returns"
DICT = "must return a dict of named arrays, but returns"
OTHER = (
    "must return values that the array has, ['n', 'x'], but returns 'm'. Let the start make that value, or correct the "
    "name."
)


def shorter(values):
    return {"n": values["n"][:1]}


WRONG_RESULTS = {
    "update_leaf, shape": (shorter, f"{LIKE} float32[1]. Cast or reshape in update_leaf."),
    "update_leaf, dtype": (
        lambda values: {"n": values["n"].astype("float16")},
        f"{LIKE} float16[2]. Cast or reshape in update_leaf.",
    ),
    "update_leaf, number": (lambda values: {"n": 0.0}, f"{LIKE} float. Cast or reshape in update_leaf."),
    "update_leaf, name": (lambda values: {"m": values["n"]}, OTHER),
    "update_leaf, nothing": (lambda values: None, f"{DICT} NoneType."),
    "update_base_leaf, shape": (shorter, f"{LIKE} float32[1]. Cast or reshape in update_base_leaf."),
    "update_base_leaf, name": (lambda values: {"m": values["n"]}, OTHER),
    "update_base_leaf, array": (lambda values: values["n"], f"{DICT} float32[2]."),
    "penalty_leaf, shape": (lambda values: values["n"], f"{ONE} float32[2]. Add up its entries."),
    "penalty_leaf, complex": (lambda values: jax.lax.complex(*values["n"]), f"{ONE} complex64[]. Add up its entries."),
    "penalty_leaf, nothing": (lambda values: None, f"{ONE} NoneType. Add up its entries."),
    "log_det_leaf, shape": (lambda values: values["n"], f"{ONE} float32[2]. Add up its entries."),
}


@pytest.mark.parametrize("stacked", [(), 0])
@pytest.mark.parametrize("case", WRONG_RESULTS)
def test_what_a_method_returns_is_checked(case, stacked):
    method, formula, text = case.partition(",")[0], *WRONG_RESULTS[case]
    cls = type("Miscounted", (Counted,), {method: lambda self, values: formula(values)})
    p, verb = cls(stacked=stacked), method.removesuffix("_leaf")
    where = "" if stacked == () else "stacked=0"
    with raises(ValueError, f"Miscounted({where}).{verb} at 'w': {method} {text}"):
        jax.eval_shape(lambda w: getattr(p, verb)(p.init({"w": w})), jnp.ones((3, 3)))


def test_the_mean_is_checked_by_its_name():
    class Jumps(Counted):
        stochastic = True

        def apply_leaf(self, values, key):
            return values["x"]

        def mean_leaf(self, values):
            return values["x"][:1]

    with raises(
        ValueError,
        "Jumps().init at 'w': mean_leaf must return float32[2, 3], like the array that it stands for, but returns "
        "float32[1, 3]. "
        "Cast or reshape in mean_leaf, or set `changes_type = True` in the class.",
    ):
        Jumps().init({"w": jnp.ones((2, 3))})


def test_what_is_flat_is_said_for_each_number():
    class Flat(rpx.stage.Constraint):
        def init_leaf(self, w):
            return {"x": w}

        def apply_leaf(self, values):
            return values["x"]

        def flat_leaf(self, w):
            return jnp.sum(w)

    class FlatRows(Flat):
        def flat_leaf(self, w):
            return w[:, 0] > 0

    text = "flat_leaf must return booleans in a shape that broadcasts to (2, 3), but returns"
    for p, got in ((Flat(), "float32[]"), (FlatRows(), "bool[2]")):
        with raises(ValueError, f"{p}.init at 'w': {text} {got}. Correct flat_leaf."):
            p.init({"w": jnp.ones((2, 3))})


def test_a_formula_of_matrices_on_a_vector():
    class Outer(rpx.Reparametrization):
        def init_leaf(self, w):
            return {"x": w}

        def apply_leaf(self, values):
            return jnp.outer(values["x"], values["x"])

    with raises(
        ValueError,
        "Outer().init at 'b': apply_leaf must return float32[3], like the array that it stands for, but returns "
        "float32[3, 3]. "
        "Cast or reshape in apply_leaf, or set `changes_type = True` in the class, or `min_ndim = 2` to leave vectors "
        "alone.",
    ):
        Outer().init({"b": jnp.ones(3)})


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
