"""Classes of stages that cannot be meant so."""

import jax
import jax.numpy as jnp
from errors import table

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
        lambda self, values, /, grad, more=None, *rest, **others: {"seen": grad},
        staticmethod(lambda values, grad: {"seen": grad}),
        classmethod(lambda cls, values, grad: {"seen": grad}),
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


class Counted(rpx.Reparametrization):
    """Right as it is; the cases below write one of its methods wrongly."""

    raw_values = {"x": rpx.stage.main(), "n": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"x": w, "n": jnp.zeros(2)}

    def apply_leaf(self, values):
        return values["x"]


class Passed(rpx.Reparametrization):
    """Right as it is: a value that is the array."""

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values):
        return values["x"]


def test_what_a_class_of_ones_own_is_unless_it_says_so():
    false = "stochastic changes_type straight_through moves_weights needs_update starts_elsewhere draws_by_type"
    false += " overcomplete elementwise any_matrix transposes random_init has_update _in_place _takes_base _is_layout"
    stage = Passed()
    assert {name: getattr(stage, name) for name in false.split()} == dict.fromkeys(false.split(), False)
    assert (stage.needs_axes, stage.acts_on_embeddings, stage.min_ndim, stage.dtypes) == (True, True, 0, jnp.inexact)
    assert (stage.update_reads, stage._converts, stage.by_roles, stage._axis_fields) == ((), (), {}, ())
    assert (stage._convert(stage, {"x": 1}, {"x": 2}), stage._grown_values(stage)) == ({"x": 1}, ())
    assert (stage.deterministic, stage._unwrapped, stage._parts) == (stage, stage, (stage,))


def wrong(base=Passed, **members):
    """The class with some of its members written wrongly."""
    return type("Wrong", (base,), members)


def test_a_formula_may_have_arguments_that_it_does_not_need():
    for init_leaf in (
        lambda self, w, key: {"x": w},
        lambda self, w, *, key: {"x": w},
        lambda self, w, key=None, more=None, *rest: {"x": w},
        staticmethod(lambda w, key: {"x": w}),
        classmethod(lambda cls, w, key: {"x": w}),
    ):
        assert wrong(init_leaf=init_leaf).random_init is not None
    for apply_leaf in (lambda self, *args: args[0], lambda self, w, key=None, more=None: w, max):
        wrong(rpx.Perturbation, apply_leaf=apply_leaf)


def started(cls, *shape):
    return cls().init({"w": jnp.ones(shape or (2, 3))}, jax.random.key(0))


def shorter(self, values):
    return {"n": values["n"][:1]}


def returned(method, formula, stacked=(), **members):
    """What is said of the result of a method, which is called under ``jit`` and computes nothing."""
    p, verb = wrong(Counted, **{method: formula}, **members)(stacked=stacked), method.removesuffix("_leaf")
    jax.eval_shape(lambda w: getattr(p, verb)(p.init({"w": w})), jnp.ones((3, 3)))


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
