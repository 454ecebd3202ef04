"""What every constrained stage offers: membership, projection and samples, from its two formulas alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table

import reparax as rpx
from reparax.core.constraint import _is_mask_for, is_near


class Centered(rpx.stage.Constraint):
    """Arrays of mean zero, which are a linear space: the nearest point is the array less its mean."""

    def init_leaf(self, w):
        return {"x": w - w.mean()}

    def apply_leaf(self, values):
        return values["x"] - values["x"].mean()


def test_project_gives_the_nearest_point():
    np.testing.assert_allclose(Centered().project(jnp.array([1.0, 2.0, 6.0])), [-2.0, -1.0, 3.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("w", "tolerance", "member"),
    [
        ([1.0, -1.0], None, True),
        ([1e-20, -1e-20], None, True),
        ([1.0, -0.99], None, False),
        ([1.0, -0.99], 0.1, True),
        ([0.0, 0.0], None, True),
        ([3.0, 1.0], 0.7, True),  # of its largest entry, not of that of the projection, which is 1
    ],
)
def test_contains_compares_with_the_projection(w, tolerance, member):
    assert bool(Centered().contains(jnp.array(w), tolerance)) is member


@pytest.mark.parametrize(
    ("stage", "w", "member"),
    [
        (Centered(), np.array([1, -1]), True),
        (Centered(), np.array([1, -2]), False),
        (rpx.Positive(), np.array([1, 2, 3]), True),
        (rpx.MagnitudePruning(0.5), np.array([[True, False]]), True),
        (rpx.Orthogonal(), np.eye(2, dtype=np.int8), True),
        (rpx.Orthogonal(stacked=0), np.ones((2, 2, 2), np.int32), False),
    ],
    ids=str,
)
def test_integers_are_numbers(stage, w, member):
    found, nearest = jax.jit(lambda w: (stage.contains(w), stage.project(w)))(w)
    assert bool(found) is member
    assert jnp.issubdtype(nearest.dtype, jnp.floating)


def test_contains_runs_under_jit():
    assert bool(jax.jit(Centered().contains)(jnp.array([1.0, -1.0])))


def test_samples_lie_in_the_image_and_differ(key):
    a, b = (Centered().sample(k, (64,)) for k in jax.random.split(key))
    assert Centered().contains(a)
    assert not np.array_equal(a, b)
    assert abs(float(a.std()) - 1) < 6 / np.sqrt(2 * 64)


def test_init_projects_or_refuses_what_lies_outside():
    params = {"w": jnp.array([1.0, 3.0])}
    projected = Centered().fold(Centered().init(params))
    np.testing.assert_allclose(projected["w"], [-1.0, 1.0], rtol=1e-6)
    Centered(outside="raise").init(projected)


def test_what_is_traced_is_not_looked_at():
    p = Centered(outside="raise")
    jax.jit(p.init)({"w": jnp.array([1.0, 3.0])})
    p.check(Centered().init({"w": jnp.array([1.0, 3.0])}), like={"w": jax.ShapeDtypeStruct((2,), jnp.float32)})


def test_known_arrays_are_looked_at_inside_of_jit_too():
    outside, p = {"w": jnp.array([1.0, 3.0])}, Centered(outside="raise")
    jax.jit(lambda: p.init({"w": jnp.array([-1.0, 1.0])}))()
    with pytest.raises(ValueError, match="expected an array in the image of the stage"):
        jax.jit(lambda: p.init(outside))()


class Ramp(rpx.stage.Constraint):
    """Numbers that are not negative, as those of a third party: a row is flat where none of it is positive."""

    def init_leaf(self, w):
        return {"x": jnp.maximum(w, 0)}

    def apply_leaf(self, values):
        return jax.nn.relu(values["x"])

    def flat_leaf(self, w):
        return jnp.all(w <= 0, axis=-1, keepdims=True)


DEAD = {"dense": {"w": np.array([[1.0, -1.0, 2.0], [-1.0, 0.0, -1.0]], np.float32)}}


def test_init_refuses_what_it_would_kill_and_nothing_else():
    jax.jit(Ramp().init)(DEAD)  # of traced numbers, nobody knows
    Ramp().init({"w": jnp.array([[1.0, -1.0]])})
    Ramp().init({"w": jnp.zeros((0, 3))})


def test_init_kills_by_word():
    folded = Ramp(outside="unchecked").fold(Ramp(outside="unchecked").init({"w": -jnp.ones((2, 3))}))
    np.testing.assert_array_equal(folded["w"], np.zeros((2, 3)))


@pytest.mark.parametrize("outside", ["nearest", "raise"])
def test_of_a_traced_bound_nobody_knows_what_is_outside(outside):
    def start(low):
        return rpx.numbers.Bounded(low, 1.0, outside=outside).init({"w": np.array([-9.0, 0.5], np.float32)})

    shapes = jax.tree.map(jnp.shape, jax.jit(start)(0.0))
    assert shapes == {"w": {"@bounded": {"x": (2,)}}}


def test_the_tolerance_grows_with_the_longest_axis_and_with_the_largest_entry():
    eps = np.finfo(np.float32).eps
    cases = [
        (shape, sign, of * sizes * 10 * eps)
        for shape, sizes in (((), 1), ((40,), 40), ((2, 40), 40), ((40, 2), 40))
        for sign in (1.0, -1.0)
        for of in (0.9, -0.9, 1.1, -1.1)
    ]

    @jax.jit
    def near():
        arrays = [(jnp.full(shape, 2 * sign), 2 * by) for shape, sign, by in cases]
        return [is_near(w, w.at[(0,) * w.ndim].add(by), None) for w, by in arrays]

    assert [bool(found) for found in near()] == [abs(of) < 1 for _ in range(8) for of in (0.9, -0.9, 1.1, -1.1)]


@pytest.mark.parametrize(
    ("shape", "flat", "is_mask"),
    [
        ((4, 3), np.ones((4, 3), bool), True),
        ((4, 3), np.ones((4, 1), bool), True),
        ((4, 3), np.ones((1, 3), bool), True),
        ((4, 3), np.ones(3, bool), True),
        ((4, 3), np.ones((), bool), True),
        ((4, 3), np.ones(4, bool), False),
        ((4, 3), np.ones((3, 4), bool), False),
        ((4, 3), np.ones((2, 3), bool), False),
        ((4, 3), np.ones((1, 4, 3), bool), False),
        ((4, 3), np.ones((4, 3)), False),
        ((4, 3), True, False),
    ],
)
def test_a_mask_has_booleans_that_broadcast_to_the_array(shape, flat, is_mask):
    assert _is_mask_for(shape, flat) is is_mask


def test_a_stack_lies_in_the_image_if_each_of_its_arrays_does():
    inside, outside = np.array([1, -1], np.float32), np.array([1, -2], np.float32)
    p = Centered(stacked=1)
    stacks = [np.stack(each, 1) for each in ((inside, inside), (inside, outside), (outside, inside))]
    found = jax.jit(lambda: [(p.contains(w), p.contains(w, 0.6), p.project(w)) for w in stacks])()
    assert [[bool(x) for x in each[:2]] for each in found] == [[True, True], [False, True], [False, True]]
    np.testing.assert_allclose(found[1][2], [[1, 1.5], [-1, -1.5]])


def test_a_sample_has_the_shape_and_the_dtype_and_each_of_a_stack_its_own_numbers(key):
    p = Centered(stacked=1)
    drawn = jax.jit(lambda key: p.sample(key, [4, 3, 2], jnp.float16))(key)
    assert (drawn.shape, drawn.dtype) == ((4, 3, 2), jnp.float16)
    assert len({np.asarray(drawn)[:, i].tobytes() for i in range(3)}) == 3


@pytest.mark.parametrize(
    ("p", "said"),
    [
        (Centered(), None),
        (Centered(outside="raise"), "in the image"),
        (Ramp(), "3 of 6 are outside"),
        (Ramp(outside="unchecked"), None),
        (Ramp(outside="raise"), "in the image"),
    ],
    ids=repr,
)
def test_what_a_stage_does_with_an_array_outside_depends_on_its_word(p, said):
    found = p._why_refused(np.array([[1.0, -1.0, 2.0], [-1.0, 0.0, -2.0]], np.float32))
    assert (found is None) if said is None else said in found
    assert "finite" in p._why_refused(np.array([[1.0, np.nan]], np.float32))
    assert p._why_refused(jax.ShapeDtypeStruct((2,), jnp.float32)) is None


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
