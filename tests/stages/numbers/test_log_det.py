"""Volumes: against the determinant of the Jacobian."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import init
from errors import table
from scipy import special, stats

import reparax as rpx


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def lower(w):
    return w[np.tril_indices(w.shape[-1])]


SQUARE = normal(3, 3) @ normal(3, 3).T + np.eye(3, dtype=np.float32)
CASES = {
    "softplus": (rpx.Positive(), np.exp(normal(4)), lambda w: w),
    "exp": (rpx.Positive("exp"), np.exp(normal(4)), lambda w: w),
    "square": (rpx.Positive("square"), np.exp(normal(4)), lambda w: w),
    "bounded": (rpx.numbers.Bounded(-2, 3), np.tanh(normal(4)), lambda w: w),
    "own functions": (rpx.numbers.Elementwise(jnp.sinh, jnp.arcsinh), normal(4), lambda w: w),
    "scale": (rpx.numbers.Scale(-0.5), normal(4), lambda w: w),
    "triangular": (rpx.matrices.Triangular(), np.tril(normal(3, 3)), lower),
    "definite": (rpx.matrices.PositiveDefinite(), SQUARE, lower),
    "scale >> positive": (rpx.numbers.Scale(3.0) >> rpx.Positive("exp"), np.exp(normal(4)), lambda w: w),
    "positive >> scale": (rpx.Positive("exp") >> rpx.numbers.Scale(3.0), np.exp(normal(4)), lambda w: w),
    "positive >> noise": (rpx.Positive("exp") >> rpx.VarNoise(0.1), np.exp(normal(4)), lambda w: w),
    "freeze of another": (rpx.Freeze(where="v") >> rpx.Positive("exp", where="w"), np.exp(normal(4)), lambda w: w),
}


@pytest.mark.parametrize("name", CASES)
def test_a_volume_is_that_of_the_jacobian(name):
    p, w, numbers = CASES[name]
    params = {"w": w, "v": jnp.ones(2)} if "freeze" in name else {"w": w}

    @jax.jit
    def both(params):
        raw = p.init(params)
        (x,), treedef = jax.tree.flatten(raw["w"])

        def effective(flat):
            return numbers(p.fold({**raw, "w": treedef.unflatten([flat.reshape(x.shape)])})["w"]).reshape(-1)

        return p.log_det(raw), jax.jacobian(effective)(x.reshape(-1))

    volume, jacobian = both(params)
    np.testing.assert_allclose(volume, np.linalg.slogdet(np.asarray(jacobian, np.float64))[1], rtol=1e-4, atol=1e-4)


def test_a_factor_scales_both_parts_of_complex_numbers():
    w = normal(4) + 1j * normal(4, seed=1)
    p = rpx.numbers.Scale(-0.5)
    assert p.log_det(p.init({"w": w.astype(np.complex64)})) == pytest.approx(8 * np.log(0.5), rel=1e-6)


def test_the_volume_of_a_simplex_is_that_with_the_logarithm_of_the_sum_and_its_density():
    p = rpx.numbers.Simplex(along=-1)
    x = np.asarray(init(p, {"w": special.softmax(normal(5))})["w"]["@simplex"]["x"]) + np.float32(0.7)

    def both(x):
        return jnp.append(jax.nn.softmax(x)[:-1], jax.nn.logsumexp(x))

    volume, jacobian = jax.jit(lambda x: (p.log_det({"w": {"@simplex": {"x": x}}}), jax.jacobian(both)(x)))(x)
    want = np.linalg.slogdet(np.asarray(jacobian, np.float64))[1] + stats.norm.logpdf(special.logsumexp(x))
    np.testing.assert_allclose(volume, want, rtol=1e-4)


def test_the_volumes_of_the_simplices_along_an_axis_add_up():
    x = normal(3, 4)
    whole, *each = jax.jit(
        lambda x: [
            rpx.numbers.Simplex(along=axis).log_det({"w": {"@simplex": {"x": x}}})
            for axis, x in [(0, x), *((-1, column) for column in x.T)]
        ]
    )(x)
    np.testing.assert_allclose(whole, sum(map(float, each)), rtol=1e-6)


def test_frozen_values_do_not_count():
    params = {name: np.full(n, np.e, np.float32) for name, n in (("a", 2), ("b", 3))}
    p = rpx.Freeze(where="b") >> rpx.Positive("exp")
    np.testing.assert_allclose(jax.jit(p.log_det)(init(p, params)), 2.0, rtol=1e-6)
    q = rpx.Positive("exp") >> rpx.Freeze()
    assert q.log_det(init(q, params)) == 0


def test_small_slopes_have_logarithms():
    x = np.array([-300.0, 300.0], np.float32)
    for p, want in ((rpx.Positive(), -300.0), (rpx.numbers.Bounded(0, 1), -600.0)):
        raw = {"w": {f"@{p.kind}": {"x": x}}}
        np.testing.assert_allclose(jax.jit(p.log_det)(raw), want, rtol=1e-6)


# ---- pairs of stages

ELEMENTWISE = {
    "positive": rpx.Positive("exp"),
    "bounded": rpx.numbers.Bounded(-2, 3),
    "own functions": rpx.numbers.Elementwise(jnp.sinh, jnp.arcsinh),
    "scale": rpx.numbers.Scale(-0.5),
}
WITH_DEPENDENT_ENTRIES = {
    "simplex": rpx.numbers.Simplex(along=-1),
    "definite": rpx.matrices.PositiveDefinite(),
    "symmetric": rpx.matrices.Symmetric(),
    "skew": rpx.matrices.Skew(),
    "triangular": rpx.matrices.Triangular(),
    "diagonal": rpx.matrices.Diagonal(),
    "circulant": rpx.matrices.Circulant(),
    "toeplitz": rpx.matrices.Toeplitz(),
}


def on_w(p, shape=(3, 3)):
    """The stages of a pair on one matrix, and raw values of it."""
    p = rpx.Chain(tuple(dataclasses.replace(stage, where="w") for stage in p))
    types = jax.eval_shape(p.init, {"w": jax.ShapeDtypeStruct(shape, np.dtype(float))})
    return p, jax.tree.map(lambda x: normal(*x.shape).astype(x.dtype), types)


@pytest.mark.parametrize("a", WITH_DEPENDENT_ENTRIES)
def test_no_volume_counts_entries_that_follow_from_others(a):
    first, refused = WITH_DEPENDENT_ENTRIES[a], set()
    for b, second in (ELEMENTWISE | WITH_DEPENDENT_ENTRIES).items():
        try:
            p, raw = on_w(first >> second)
        except ValueError:  # the raw values of the second stage are not what the first one makes
            continue
        with pytest.raises(ValueError, match=r"expected entries that are all independent, but "):
            jax.eval_shape(p.log_det, raw)
        refused.add(b)
    assert refused == {*ELEMENTWISE, *(WITH_DEPENDENT_ENTRIES if a == "simplex" else ["simplex"])}


def test_stacked_matrices_follow_from_fewer_numbers_too_and_matrices_of_one_entry_do_not():
    p, raw = on_w(rpx.matrices.Symmetric(stacked=0) >> rpx.numbers.Scale(2.0), (2, 3, 3))
    with pytest.raises(ValueError, match="all independent"):
        jax.eval_shape(p.log_det, raw)
    p, raw = on_w(rpx.matrices.Symmetric(stacked=0) >> rpx.numbers.Scale(2.0), (2, 1, 1))
    np.testing.assert_allclose(p.log_det(raw), 2 * np.log(2), rtol=1e-6)


class Embedded(rpx.Reparametrization):
    """Complex numbers without imaginary parts."""

    def init_leaf(self, w):
        return {"x": w.real}

    def apply_leaf(self, values):
        return jax.lax.complex(values["x"], jnp.zeros_like(values["x"]))

    def log_det_leaf(self, values):
        return jnp.zeros(())


class Polar(rpx.Reparametrization):
    """Polar coordinates of pairs of numbers."""

    raw_values = {"radius": rpx.stage.main(), "angle": rpx.stage.aux()}

    def init_leaf(self, w):
        return {"radius": jnp.hypot(w[0], w[1]), "angle": jnp.arctan2(w[1], w[0])}

    def apply_leaf(self, values):
        return values["radius"][None] * jnp.stack([jnp.cos(values["angle"]), jnp.sin(values["angle"])])

    def log_det_leaf(self, values):
        return jnp.sum(jnp.log(jnp.abs(values["radius"])))


class Many(Polar):
    """Polar coordinates of an author who forgot to add up."""

    def log_det_leaf(self, values):
        return jnp.log(jnp.abs(values["radius"]))


def test_a_bijection_of_two_values_comes_before_another_stage():
    p = rpx.Positive("exp", where="w") >> Polar(where="w") >> rpx.numbers.Scale(2.0, where="w")
    raw = init(p, {"w": normal(2, 3)})
    node = raw["w"]["@scale"]["x"]["@polar"]
    want = 2 * np.sum(node["radius"]["@positive"]["x"]) + 6 * np.log(2)  # the slope of the exponential, and the radius
    np.testing.assert_allclose(jax.jit(p.log_det)(raw), want, rtol=1e-5)


def traced(p, params):
    """Its volume without a program, as an error needs none."""
    return jax.eval_shape(lambda params: p.log_det(p.init(params)), params)


@table(__file__)
def test_what_has_no_volume_is_refused(case):
    case.check(globals())
