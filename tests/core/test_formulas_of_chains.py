"""Updates, penalties and log-determinants of chains, from stages whose formulas are written by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

import reparax as rpx

W = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
ONES = np.ones((2, 3), np.float32)
KEY = jax.random.key(0)


class Multiplied(rpx.Reparametrization):
    """A bijection, whose penalty is the sum of its raw values."""

    by: float = 2.0
    raw_values = {"x": rpx.stage.main(aligned=True)}

    def init_leaf(self, w):
        return {"x": w / self.by}

    def apply_leaf(self, values):
        return values["x"] * self.by

    def log_det_leaf(self, values):
        return values["x"].size * jnp.log(jnp.float32(self.by))

    def penalty_leaf(self, values):
        return jnp.sum(values["x"])


class Latest(rpx.Reparametrization):
    """Numbers without their last, which is minus the sum of the others."""

    raw_values = {"x": rpx.stage.main()}

    def init_leaf(self, w):
        return {"x": w[..., :-1]}

    def apply_leaf(self, values):
        x = values["x"]
        return jnp.concatenate([x, -x.sum(-1, keepdims=True)], -1)

    def log_det_leaf(self, values):
        return jnp.float32(100)


class Twofold(Latest):
    """As many raw values as entries, of which some depend on others."""

    overcomplete = True

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values):
        return values["x"] - values["x"].mean(-1, keepdims=True)


class Plain(rpx.Reparametrization):
    """A stage without a penalty."""

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values):
        return values["x"]


class Seen(rpx.Reparametrization):
    """Keeps the gradient of an update, or a number that is drawn from its key."""

    raw_values = {"w": rpx.stage.main(aligned=True), "seen": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"w": w, "seen": jnp.zeros_like(w)}

    def apply_leaf(self, values):
        return values["w"]

    def update_leaf(self, values, grad):
        return {"seen": jnp.broadcast_to(grad, values["w"].shape).astype(values["w"].dtype)}


class RandomStart(Seen):
    def update_leaf(self, values, key):
        return {"seen": jax.random.uniform(key, values["w"].shape)}


class Both(Seen):
    def update_leaf(self, values, grad, key):
        return {"seen": grad + 1}


class Moved(Seen):
    """An update that moves what is trained too."""

    moves_weights = True

    def update_leaf(self, values):
        return {"w": values["w"] + 1, "seen": values["w"]}


class Unmoved(Seen):
    def update_leaf(self, values):
        return {"seen": values["w"]}


class Rebased(Seen):
    """A base that takes up what is trained."""

    def init_leaf(self, w):
        return {"w": 0 * w, "seen": w}

    def apply_leaf(self, values):
        return values["w"] + values["seen"]

    def update_base_leaf(self, values):
        return {"w": 0 * values["w"], "seen": values["w"] + values["seen"]}

    def update_leaf(self, values):
        return {}


def seen(tree, kind="seen"):
    """The fixed value of a stage, or, without its kind, that of a node."""
    return (tree[f"@{kind}"] if kind else tree)["@fixed"]["seen"]


# Updates --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "given", "changes"),
    [
        (Seen(), {}, False),
        (Seen(), {"key": KEY}, False),
        (Seen(), {"grads": {"w": W}}, True),
        (RandomStart(), {}, False),
        (RandomStart(), {"grads": {"w": W}}, False),
        (RandomStart(), {"key": KEY}, True),
        (Both(), {"key": KEY}, False),
        (Both(), {"grads": {"w": W}}, False),
        (Both(), {"key": KEY, "grads": {"w": W}}, True),
    ],
    ids=repr,
)
def test_an_update_without_what_it_reads_does_nothing(stage, given, changes):
    def changed(raw):
        after = jax.tree.leaves(stage.update(raw, **given))
        return [x is not y for x, y in zip(after, jax.tree.leaves(raw), strict=True)]

    raw, found = stage.init({"w": W}), []
    jax.eval_shape(lambda raw: found.append(changed(raw)), raw)
    assert found == [[changes, False]]


def test_an_output_without_a_gradient_has_the_gradient_zero():
    class OfAny(Seen):
        dtypes = np.number

        def update_leaf(self, values, grad):
            return {"seen": values["w"] + jnp.asarray(grad, values["w"].dtype)}

    p, params = OfAny(where=".*"), {"a": W, "n": np.array([3, 4])}
    after = p.update(p.init(params), grads={"a": W})
    np.testing.assert_array_equal(seen(after["a"], p.kind), 2 * W)
    np.testing.assert_array_equal(seen(after["n"], p.kind), [3, 4])


def test_later_stages_are_updated_from_what_earlier_updates_have_changed():
    p = Moved() >> Unmoved() >> Unmoved()
    outer = jax.jit(lambda w: p.update(p.init({"w": w})))(W)["w"]["@unmoved"]
    middle = outer["w"]["@unmoved@2"]
    inner = middle["w"]["@moved"]
    for found, expected in (
        (inner["w"], W + 1),
        (seen(inner, ""), W),
        (seen(middle, ""), W + 1),
        (seen(outer, ""), W + 1),
    ):
        np.testing.assert_array_equal(found, expected)


def test_a_base_takes_up_what_is_trained_and_the_effective_tree_stays():
    p = Rebased(where="a") >> Multiplied()
    raw = p.init({"a": W, "b": W})
    moved = jax.tree.map(lambda x: x, raw)
    moved["a"]["@multiplied"]["x"]["@rebased"]["w"] = jnp.asarray(ONES)
    after = p.update_base(moved)
    held = after["a"]["@multiplied"]["x"]["@rebased"]
    np.testing.assert_array_equal(held["w"], np.zeros((2, 3)))
    np.testing.assert_array_equal(held["@fixed"]["seen"], W / 2 + 1)
    np.testing.assert_array_equal(p.apply(after)["a"], p.apply(moved)["a"])
    np.testing.assert_array_equal(after["b"]["@multiplied"]["x"], raw["b"]["@multiplied"]["x"])


class Recast(rpx.Perturbation):
    stochastic = False

    def apply_leaf(self, w, key):
        return w + 1


@pytest.mark.parametrize("verb", ["update", "update_base"])
def test_what_an_earlier_stage_computes_cannot_be_written(verb):
    stage = {"update": Moved(), "update_base": Rebased()}[verb]
    for first in (Multiplied(), Recast()):
        p = first >> stage
        text = f"{verb} changed 'w/@{stage.kind}/w', but cannot write it to the raw tree: an earlier stage computes "
        text += "that value. Put the earlier stage after this one."
        with raises(ValueError, text):
            getattr(p, verb)(p.init({"w": jnp.asarray(W)}))
    p = Multiplied() >> Seen()  # changes nothing that is trained
    np.testing.assert_array_equal(seen(p.update(p.init({"w": W}), grads={"w": W})["w"]), W)


PARAMS = {"a": {"w": W}, "n": np.arange(3)}
WHOLE = "Pass the whole tree of `jax.grad(loss)(p.fold(raw))`."


@pytest.mark.parametrize(
    ("grads", "text"),
    [
        ({"n": ONES}, f"expected a gradient of shape (2, 3) at 'a/w', but got none. {WHOLE}"),
        ({"a": {"w": None}}, f"expected a gradient of shape (2, 3) at 'a/w', but got none. {WHOLE}"),
        ({"a": {"w": W.T}}, f"expected a gradient of shape (2, 3) at 'a/w', but got one of shape (3, 2). {WHOLE}"),
        ({"a": {"w": 1.5}}, f"expected a gradient of shape (2, 3) at 'a/w', but got 1.5. {WHOLE}"),
        ({"a": {"w": W * 1j}}, "expected a real gradient at 'a/w', but got dtype complex64. Take its real part."),
        (
            {"a": {"w": {"@seen": {"w": W, "@fixed": {"seen": W}}}}},
            "takes gradients of the effective tree, but got those of a raw tree: they hold '@seen' at 'a/w'. Pass "
            "`jax.grad(loss)(p.fold(raw))`, where `loss` takes the model's own parameters.",
        ),
    ],
)
def test_gradients_are_those_of_the_effective_tree(grads, text):
    p = Seen(where="a/w")
    with raises(ValueError, f"Seen(where='a/w').update {text}"):
        p.update(p.init(PARAMS), grads=grads)


@pytest.mark.parametrize(
    ("dtype", "of"), [("float16", "float32"), ("complex64", "complex64"), ("complex64", "float32")]
)
def test_gradients_get_the_dtype_of_the_array(dtype, of):
    def update(w, grad):
        return seen(Seen().update(Seen().init({"w": w}), grads={"w": grad, "more": grad})["w"])

    arrays = jax.ShapeDtypeStruct((2, 3), dtype), jax.ShapeDtypeStruct((2, 3), of)
    assert jax.eval_shape(update, *arrays) == arrays[0]


# Penalties and log-determinants ---------------------------------------------------------------------------------------


PENALTIES = [
    (Multiplied(), 27 / 2),
    (Multiplied(stacked=0), 27 / 2),
    (Multiplied(where="b"), 3),
    (Multiplied(3.0, where="a") >> Multiplied(2.0), 27 / 2 + 21 / 6),
    (Plain(), 0),
    (Plain() >> Multiplied(where="b") >> Plain(), 3),
    (rpx.Chain(), 0),
    (rpx.VarNoise(0.1), 0),
]
LOG_DETS = [
    (Multiplied(), "ab", 9 * np.log(2)),
    (Multiplied(where="b"), "ab", 3 * np.log(2)),
    (Multiplied(stacked=1), "a", 6 * np.log(2)),
    (Multiplied(3.0, where="a") >> Multiplied(), "ab", 6 * np.log(3) + 9 * np.log(2)),
    (rpx.Freeze(where="a") >> Multiplied(), "ab", 3 * np.log(2)),  # nothing is trained at the other
    (rpx.Freeze() >> Multiplied(), "a", 0),
    (rpx.Positive("exp") >> Multiplied(), "a", np.log(W / 2).sum() + 6 * np.log(2)),
    (Multiplied() >> Latest(), "a", 4 * np.log(2) + 100),
    (Multiplied() >> Twofold(), "a", 6 * np.log(2) + 100),
    (Latest(where="a") >> Multiplied(where="b"), "ab", 3 * np.log(2) + 100),
    (rpx.Chain(), "a", 0),
]


def test_penalties_of_all_stages_and_arrays_are_added_up():
    params = {"a": W, "b": ONES}  # 21 and 6
    found = jax.jit(lambda params: [p.penalty(p.init(params)) for p, _ in PENALTIES])(params)
    np.testing.assert_allclose(found, [expected for _, expected in PENALTIES], rtol=1e-6)


def test_log_determinants_of_all_bijections_are_added_up():
    def log_dets(params):
        trees = [(p, {name: params[name] for name in names}) for p, names, _ in LOG_DETS]
        return [p.log_det(p.init(tree)) for p, tree in trees]

    found = jax.jit(log_dets)({"a": W, "b": W[0]})
    np.testing.assert_allclose(found, [expected for *_, expected in LOG_DETS], rtol=1e-5)


@pytest.mark.parametrize(
    ("p", "said"),
    [
        (Latest() >> Multiplied(), "at 'a': expected entries that are all independent, but Latest() computes some"),
        (Twofold() >> Multiplied(), "at 'a': expected entries that are all independent, but Twofold() computes some"),
        (
            Latest() >> rpx.Positive("exp"),
            "at 'a': expected entries that are all independent, but Latest() computes some",
        ),
        (Plain() >> Multiplied(), "Plain().log_det: the stage is not a bijection"),
        (Multiplied() >> rpx.quantized.Cast("float16"), "Cast('float16').log_det: the stage is not a bijection"),
    ],
    ids=repr,
)
def test_what_has_no_determinant_is_refused(p, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        jax.eval_shape(lambda: p.log_det(p.init({"a": W})))


class Two(rpx.Reparametrization):
    """Two trained values, one of which another stage may freeze."""

    raw_values = {"x": rpx.stage.main(aligned=True), "log": rpx.stage.aux()}

    def init_leaf(self, w):
        return {"x": w, "log": jnp.zeros((), w.dtype)}

    def apply_leaf(self, values):
        return values["x"] * jnp.exp(values["log"])

    def log_det_leaf(self, values):
        return values["log"]


def test_all_values_of_an_array_are_trained_or_none():
    p = rpx.Freeze(where="w/log") >> Two()
    text = (
        "Two().log_det at 'w': expected all values of an array to be trained, or none, but 'log' is frozen, and the "
        "log-determinant counts all of them. Freeze the others too, or train 'log'."
    )
    with raises(ValueError, text):
        p.log_det(p.init({"w": W}))
    both = rpx.Freeze(where="w(/log)?") >> Two()
    assert both.log_det(both.init({"w": W})) == 0


def test_a_complex_entry_counts_as_two_numbers():
    class Real(rpx.Reparametrization):
        """Half of the numbers of a complex array."""

        changes_type = True
        starts_elsewhere = True

        def init_leaf(self, w):
            return {"x": jnp.real(w)}

        def apply_leaf(self, values):
            return jax.lax.complex(values["x"], values["x"])

        def log_det_leaf(self, values):
            return 0.0

    class OfParts(Multiplied):
        def log_det_leaf(self, values):
            return 1.0

    w = {"w": W.astype(np.complex64)}
    with pytest.raises(ValueError, match="expected entries that are all independent"):
        (Real() >> OfParts()).log_det((Real() >> OfParts()).init(w))
    assert (OfParts() >> OfParts()).log_det((OfParts() >> OfParts()).init(w)) == 2
