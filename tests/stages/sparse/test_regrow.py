"""RigL and SET against masks worked by hand, and by the sorted lists of the papers' algorithm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective, fold, init, update
from errors import raises, table

import reparax as rpx


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mask_of(raw, kind="rigl"):
    return np.asarray(raw["w"][f"@{kind}"]["@fixed"]["mask"])


def with_values(raw, values, kind="rigl"):
    """``raw`` as an optimizer left it."""
    return {"w": {f"@{kind}": {**raw["w"][f"@{kind}"], "w": jnp.asarray(values)}}}


# Six weights, of which four are active. The two smallest active ones go; what grows are the two of largest gradient
# among the other four places, of which one may have been dropped just now.
@pytest.mark.parametrize(
    ("grads", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0, 9.0, -8.0], [1, 1, 0, 0, 1, 1]),
        ([9.0, 9.0, 0.0, -3.0, 0.0, 1.0], [1, 1, 0, 1, 0, 1]),
        ([0.0, 0.0, 7.0, 6.0, 5.0, 4.0], [1, 1, 1, 1, 0, 0]),
    ],
)
def test_masks_worked_by_hand(grads, expected):
    p = rpx.sparse.RigL(count=2, drop_fraction=0.5)
    raw = init(p, {"w": np.float32([[4.0, -3.0, 1.0, 2.0, 0.0, 0.0]])}, jax.random.key(0))
    np.testing.assert_array_equal(mask_of(raw), [[1, 1, 1, 1, 0, 0]])
    raw = update(p, raw, grads={"w": np.float32([grads])})
    np.testing.assert_array_equal(mask_of(raw), [expected])
    # What was dropped and has grown at once goes on, and what is new begins at zero.
    weights = np.array([4.0, -3.0, 1.0, 2.0, 0.0, 0.0]) * expected
    np.testing.assert_array_equal(effective(p, raw)["w"], [weights])


def test_set_drops_the_smallest_and_grows_at_random():
    p = rpx.sparse.SET(0.75, drop_fraction=0.5)
    w = normal(16, 16)
    raw = init(p, {"w": w}, jax.random.key(0))
    first = mask_of(raw, "set") != 0
    assert first.sum() == 64
    smallest = np.sort(np.abs(w[first]))[:32]
    keys = jax.random.split(jax.random.key(1), 500)
    masks = np.asarray(jax.jit(jax.vmap(lambda key: p.update(raw, key)["w"]["@set"]["@fixed"]["mask"]))(keys))
    np.testing.assert_array_equal(masks.sum((1, 2)), 64)
    kept = first & (np.abs(w) > smallest[-1])
    assert masks[:, kept].all()
    # Each of the 224 other places is grown in one of seven draws: 500 draws, 4.5 standard errors.
    counts = masks[:, ~kept].mean(0)
    np.testing.assert_allclose(counts, 32 / 224, atol=4.5 * np.sqrt(32 / 224 * (1 - 32 / 224) / 500))


@pytest.mark.thorough
def test_without_what_an_update_reads_the_mask_stays():
    for p, given in (
        (rpx.sparse.RigL(0.5), {"key": jax.random.key(1)}),
        (rpx.sparse.SET(0.5), {"grads": {"w": normal(4, 4)}}),
    ):
        raw = init(p, {"w": normal(4, 4)}, jax.random.key(0))
        for got in (update(p, raw), update(p, raw, **given)):
            jax.tree.map(np.testing.assert_array_equal, got, raw)
        moved = update(p, raw, jax.random.key(1), {"w": normal(4, 4)})
        assert (mask_of(moved, p.kind) != mask_of(raw, p.kind)).any()


def test_a_weight_that_is_grown_again_begins_at_zero_and_trains_as_any_other():
    p = rpx.sparse.RigL(count=1, drop_fraction=1.0)
    raw = init(p, {"w": np.float32([[5.0, 0.0]])}, jax.random.key(0))
    raw = update(p, raw, grads={"w": np.float32([[0.0, 1.0]])})  # the first goes
    np.testing.assert_array_equal(fold(p, raw)["w"], [[0.0, 0.0]])
    raw = update(p, with_values(raw, [[5.0, 2.0]]), grads={"w": np.float32([[1.0, 0.0]])})  # and comes back
    np.testing.assert_array_equal(mask_of(raw), [[1.0, 0.0]])
    np.testing.assert_array_equal(raw["w"]["@rigl"]["w"], [[0.0, 2.0]])  # so that weight decay pulls it to zero
    np.testing.assert_array_equal(fold(p, raw)["w"], [[0.0, 0.0]])


def test_init_hides_no_numbers():
    raw = rpx.sparse.RigL(0.5).init({"w": normal(4, 4)}, jax.random.key(0))
    np.testing.assert_array_equal(raw["w"]["@rigl"]["w"] != 0, mask_of(raw) != 0)


@pytest.mark.thorough
def test_numbers_that_are_none_do_not_change_the_density():
    p = rpx.sparse.RigL(0.5, drop_fraction=0.5)
    raw = init(p, {"w": normal(4, 4)}, jax.random.key(0))
    for grads in (jnp.full((4, 4), jnp.nan), jnp.where(normal(4, 4) > 0, jnp.nan, 1.0), jnp.full((4, 4), jnp.inf)):
        assert mask_of(p.update(raw, grads={"w": grads})).sum() == 8
    broken = with_values(raw, jnp.where(mask_of(raw) != 0, jnp.nan, 7.0))
    after = p.update(broken, grads={"w": normal(4, 4)})
    assert mask_of(after).sum() == 8
    assert not (np.asarray(p.fold(after)["w"]) == 7.0).any()


NONE = float("nan")
# Weights, of which the last two of six are masked, the scores of where to grow two of four, and the next mask.
REGROWN = {
    "no weight": ([4, NONE, 1, 2, 9, 9], [0, 0, 0.1, 0.2, 0, 1], [1, 1, 0, 1, 0, 1]),
    "no score": ([4, 3, 1, 2, 9, 9], [NONE, 0, 0.1, 0.2, NONE, 1], [1, 1, 0, 1, 0, 1]),
    "no score at all": ([4, 3, 1, 2, 9, 9], [NONE] * 6, [1, 1, 1, 1, 0, 0]),
    "scores of zero": ([4, 3, 1, 2, 9, 9], [0] * 6, [1, 1, 1, 1, 0, 0]),
    "the same weights": ([0, 0, 0, 0, 9, 9], [0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1]),
}


@functools.cache
def all_regrown():
    p = rpx.sparse.RigL(count=2, drop_fraction=0.7)  # of four, that is two
    mask = jnp.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    rows = {name: (np.float32(w), np.float32(scores)) for name, (w, scores, _) in REGROWN.items()}
    each = jax.jit(lambda rows: {name: p._regrow({"w": w, "mask": mask}, s) for name, (w, s) in rows.items()})
    return jax.tree.map(np.asarray, each(rows))


@pytest.mark.parametrize("name", REGROWN)
def test_what_is_no_number_changes_no_count_and_what_has_grown_is_zero(name):
    w, _, mask = REGROWN[name]
    got = all_regrown()[name]
    np.testing.assert_array_equal(got["mask"], mask)
    np.testing.assert_array_equal(got["w"], [*w[:4], *(0 if grown else 9 for grown in mask[4:])])


@pytest.mark.parametrize("drop", [-0.5, 1.5, 2.0])
def test_a_traced_share_is_kept_within_zero_and_one(drop):
    raw = rpx.sparse.RigL(0.5).init({"w": normal(4, 4)}, jax.random.key(0))
    update = jax.jit(lambda drop: rpx.sparse.RigL(0.5, drop_fraction=drop).update(raw, grads={"w": normal(4, 4)}))
    np.testing.assert_array_equal(mask_of(update(drop)), mask_of(update(float(np.clip(drop, 0, 1)))))


@pytest.mark.thorough
def test_gradients_reach_a_stage_through_those_behind_it():
    """By the chain rule: ``b = 10 a``, so a gradient by ``b`` counts tenfold at ``a``."""
    p = rpx.sparse.RigL(0.5, drop_fraction=0.5, where="a") >> rpx.Tie({"b": ("a", lambda a: 10.0 * a)})
    a = np.float32([[3.0, 1.0, 0.0, 0.0]])
    raw = init(p, {"a": a, "b": 10 * a}, jax.random.key(0))
    # By itself the third place of `a` has the larger gradient, with that through `b` the fourth.
    grads = {"a": np.float32([[0.0, 0.0, 1.0, 0.5]]), "b": np.float32([[0.0, 0.0, 0.0, 0.1]])}
    got = update(p, raw, grads=grads)["a"]["@rigl"]["@fixed"]["mask"]
    np.testing.assert_array_equal(got, [[1.0, 0.0, 0.0, 1.0]])


def test_gradients_behind_noise_are_those_by_its_mean():
    p = rpx.sparse.RigL(0.5, drop_fraction=0.5) >> rpx.VarNoise(0.1)
    raw = init(p, {"w": np.float32([[3.0, 1.0, 0.0, 0.0]])}, jax.random.key(0))
    raw = update(p, raw, grads={"w": np.float32([[0.0, 0.0, 0.0, 1.0]])})
    np.testing.assert_array_equal(mask_of(raw), [[1.0, 0.0, 0.0, 1.0]])


class Remembers(rpx.Reparametrization):
    raw_values = {"x": rpx.stage.main(), "seen": rpx.stage.fixed(), "drawn": rpx.stage.fixed()}
    starts_elsewhere = True

    def init_leaf(self, w):
        return {"x": w, "seen": jnp.zeros_like(w), "drawn": jnp.zeros_like(w)}

    def apply_leaf(self, values):
        return 2 * values["x"]

    def update_leaf(self, values, grad, key):
        return {"seen": grad, "drawn": jax.random.normal(key, grad.shape)}


def test_a_stage_of_a_third_party_reads_the_gradient_and_a_key():
    p = Remembers(where="w") >> rpx.numbers.Scale(3.0, where="w")
    raw = p.init({"w": jnp.ones(2), "f": jnp.tanh, "n": jnp.ones(2, int)})
    got = p.update(raw, jax.random.key(0), {"w": jnp.array([1.0, 2.0]), "f": None, "n": None})
    values = got["w"]["@scale"]["x"]["@remembers"]["@fixed"]
    np.testing.assert_allclose(values["seen"], [3.0, 6.0])  # by 2 x, of which the effective weight is three times
    assert (values["drawn"] != 0).all()
    jax.tree.map(np.testing.assert_array_equal, *(p.update(raw, key) for key in (None, jax.random.key(0))))


# ---- errors


RIGL, ONES = rpx.sparse.RigL(0.5, drop_fraction=0.5), {"w": np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)}
RAW = jax.eval_shape(RIGL.init, ONES, jax.random.key(0))


def updated(grads, p=RIGL, raw=RAW):
    """What is said of gradients, without computing an update."""
    jax.eval_shape(lambda raw: p.update(raw, grads=grads), raw)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())


class Halved(rpx.Perturbation):
    """In place, and not by its mean the array."""

    def apply_leaf(self, w, key):
        return w * jax.random.bernoulli(key, 0.5, w.shape).astype(w.dtype)

    def mean_leaf(self, w):
        return w / 2


@pytest.mark.parametrize("last", [rpx.Chain(), rpx.Freeze()], ids=["", "frozen"])
@pytest.mark.parametrize(
    "first", [rpx.quantized.Cast("bfloat16"), Halved(), rpx.norms.MaxNorm(1.0)], ids=lambda p: p.kind
)
@pytest.mark.parametrize(
    ("later", "name"),
    [(rpx.sparse.SET(0.5), "set/w"), (rpx.sparse.RigL(0.5), "rigl/w"), (rpx.Orthogonal(), "orthogonal/x")],
    ids=["set", "rigl", "orthogonal"],
)
def test_no_weight_that_an_earlier_stage_changed_in_place_is_written_to_the_raw_tree(first, later, name, last):
    """It would be cast, halved or shortened once more in each update."""
    p, key = first >> later >> last, jax.random.key(0)
    verb = "update_base" if name == "orthogonal/x" else "update"
    place = f"@freeze/@fixed/w/@{name}" if len(last) else f"@{name}"

    def advance(params):
        raw = p.init(params, key)
        return p.update_base(raw) if verb == "update_base" else p.update(raw, key, params)

    with raises(
        ValueError,
        f"{verb} changed 'w/{place}', but cannot write it to the raw tree: an earlier stage computes that value. Put "
        f"the earlier stage after this one.",
    ):
        jax.eval_shape(advance, {"w": np.ones((4, 4), np.float32)})


@pytest.mark.parametrize(
    "p",
    [
        rpx.MagnitudePruning(0.5),
        rpx.MagnitudePruning(0.5, axis=-1),
        rpx.sparse.NByM(2, 4),
        rpx.sparse.GlobalMagnitudePruning(0.5),
    ],
    ids=lambda p: repr(p),
)
def test_a_mask_keeps_its_dtype_where_the_weights_are_cast(p):
    p = rpx.quantized.Cast("bfloat16") >> p
    before, after = jax.eval_shape(lambda params: (p.init(params), p.update(p.init(params))), {"w": normal(4, 4)})
    assert before == after


@pytest.mark.parametrize(
    "p", [rpx.sparse.RigL(0.5), rpx.sparse.SET(0.5), rpx.sparse.RandomPruning(0.5)], ids=lambda p: p.kind
)
def test_the_first_mask_is_drawn_where_all_weights_are_zero_too(p):
    masks = [mask_of(init(p, {"w": np.zeros((8, 8), np.float32)}, jax.random.key(i)), p.kind) for i in range(20)]
    counts = np.sum(masks, axis=0)
    assert all(mask.sum() == 32 for mask in masks)
    assert counts.min() > 0  # 64 places, each missed by all or by none with 2^-19
    assert counts.max() < 20
