"""Orthogonal, Stiefel and Grassmann matrices against dense formulas in numpy and scipy, in double precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from compiled import contained, projected, read
from errors import table
from grids import mostly_thorough
from jax.extend.core import jaxprs_in_params

import reparax as rpx


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def unitary(*shape):
    return scipy.linalg.polar(normal(*shape) + 1j * normal(*shape, seed=1))[0]


def orthogonal(*shape, seed=0):
    return scipy.linalg.polar(normal(*shape, seed=seed))[0]


def marked(base, x, mark="@orthogonal"):
    """A raw tree at a place of one's own choice."""
    return {"w": {mark: {"x": jnp.asarray(x), "@fixed": {"base": jnp.asarray(base)}}}}


# ---- the maps


def skew(base, x):
    return x @ base.conj().T - base @ x.conj().T


def by_cayley(base, x):
    one = np.eye(len(base))
    return np.linalg.solve(one - skew(base, x) / 2, (one + skew(base, x) / 2) @ base)


def by_expm(base, x):
    return scipy.linalg.expm(skew(base, x)) @ base


def by_householder(base, x):
    product = base
    for j in reversed(range(base.shape[1])):
        before = base[:, : j + 1]
        v = base[:, j] + x[:, j] - before @ (before.T @ x[:, j])
        product = product - 2 * np.outer(v, v @ product) / (v @ v)
    return -product


DENSE = {"cayley": by_cayley, "expm": by_expm, "householder": by_householder}


@pytest.mark.parametrize("map", DENSE)
@pytest.mark.parametrize("shape", mostly_thorough([(5, 2), (3, 3), (4, 1)], (5, 2)), ids=str)
def test_each_map_is_its_dense_formula(map, shape):
    base, x = orthogonal(*shape), normal(*shape, seed=1)
    with jax.enable_x64():
        got = read(rpx.Orthogonal(map), marked(base, x))
    np.testing.assert_allclose(got, DENSE[map](base, x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("map", mostly_thorough(["cayley", "expm"], "expm"))
def test_each_map_of_complex_matrices_is_its_dense_formula(map):
    base, x = unitary(5, 2), normal(5, 2, seed=2) + 1j * normal(5, 2, seed=3)
    with jax.enable_x64():
        got = read(rpx.Orthogonal(map), marked(base, x))
    np.testing.assert_allclose(got, DENSE[map](base, x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("map", mostly_thorough(DENSE, "expm"))
def test_wide_matrices_and_batches_are_the_transposed_ones_one_by_one(map):
    base, x = np.stack([orthogonal(4, 2, seed=s) for s in range(3)]), normal(3, 4, 2)
    with jax.enable_x64():
        got = read(rpx.Orthogonal(map, stacked=0), marked(base.swapaxes(1, 2), x.swapaxes(1, 2)))
    expected = [DENSE[map](*pair).T for pair in zip(base, x, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("map", mostly_thorough(DENSE, "cayley"))
def test_grassmann_counts_what_lies_across_the_base_alone(map):
    base, x = orthogonal(5, 2), normal(5, 2, seed=1)
    with jax.enable_x64():
        got = read(rpx.matrices.Grassmann(map), marked(base, x, "@grassmann"))
    np.testing.assert_allclose(got, DENSE[map](base, x - base @ base.T @ x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("map", mostly_thorough(DENSE, "householder"))
def test_far_from_the_base_the_columns_are_still_orthonormal(map):
    base, x = orthogonal(6, 3).astype(np.float32), 10 * normal(6, 3, dtype=np.float32)
    q = np.asarray(read(rpx.Orthogonal(map), marked(base, x)), np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(3), rtol=0, atol=1e-5)


# Of each stage a base and a step, complex ones too.
SHAPES = {
    "cayley, square": (rpx.Orthogonal(), orthogonal(3, 3), normal(3, 3, seed=1)),
    "cayley, one column": (rpx.Orthogonal(), orthogonal(4, 1), normal(4, 1, seed=1)),
    "cayley, wide": (rpx.Orthogonal(), orthogonal(2, 5), normal(2, 5, seed=1)),
    "cayley, complex": (rpx.Orthogonal(), unitary(5, 2), normal(5, 2, seed=2) + 1j * normal(5, 2, seed=3)),
    "cayley, complex, wide": (rpx.Orthogonal(), unitary(2, 3), normal(2, 3, seed=2) + 1j * normal(2, 3, seed=3)),
    "cayley, complex, square": (rpx.Orthogonal(), unitary(3, 3), normal(3, 3, seed=2) + 1j * normal(3, 3, seed=3)),
    "householder, square": (rpx.Orthogonal("householder"), orthogonal(3, 3), normal(3, 3, seed=1)),
    "householder, rotation": (rpx.matrices.SpecialOrthogonal("householder"), orthogonal(3, 3), normal(3, 3, seed=4)),
    "grassmann": (rpx.matrices.Grassmann("householder"), orthogonal(5, 2), normal(5, 2, seed=1)),
    "grassmann, complex": (rpx.matrices.Grassmann(), unitary(5, 2), normal(5, 2, seed=2) + 1j * normal(5, 2, seed=3)),
}


@functools.cache
def moved():
    """The effective matrices of all, and the bases after an update, by one program."""
    raws = {name: marked(base, x, f"@{p.kind}") for name, (p, base, x) in SHAPES.items()}

    @jax.jit
    def each(raws):
        found = {name: (p.apply(raws[name]), p.update_base(raws[name])) for name, (p, *_) in SHAPES.items()}
        return {name: (w["w"], raw["w"][f"@{SHAPES[name][0].kind}"]) for name, (w, raw) in found.items()}

    return jax.tree.map(np.asarray, each(raws))


@pytest.mark.parametrize("name", SHAPES)
def test_matrices_of_every_shape_move_by_the_dense_formula_and_their_base_with_them(name):
    with jax.enable_x64():
        w, values = moved()[name]
    p, base, x = SHAPES[name]
    if p.kind == "grassmann":
        x = x - base @ base.conj().T @ x
    wide = base.shape[0] < base.shape[1]
    want = DENSE[p.map](base.T, x.T).T if wide else DENSE[p.map](base, x)
    np.testing.assert_allclose(w, want, rtol=0, atol=1e-13)
    np.testing.assert_allclose(values["@fixed"]["base"], want, rtol=0, atol=1e-13)
    assert not values["x"].any()


def test_a_square_matrix_has_orthonormal_columns_too():
    w, p = jax.ShapeDtypeStruct((3, 3), jnp.float32), rpx.matrices.Stiefel()
    assert jax.eval_shape(lambda w: p.fold(p.init({"w": w}))["w"], w) == w


# ---- init


ON_THE_IMAGE = {
    "tall": orthogonal(5, 2),
    "wide": orthogonal(2, 5),
    "rotation": orthogonal(3, 3) * np.sign(np.linalg.det(orthogonal(3, 3))),
    "reflection": -orthogonal(3, 3) * np.sign(np.linalg.det(orthogonal(3, 3))),
    "identity": np.eye(4),
    "rotation by a half turn": np.diag([-1.0, -1.0, 1.0]),
    "batch": np.stack([orthogonal(3, 2, seed=s) for s in range(4)]),
    "unitary": unitary(4, 2),
}


def test_init_is_exact_on_the_image_with_the_matrix_as_base_and_nothing_to_go():
    p = rpx.Orthogonal(where="(?!batch).*") >> rpx.Orthogonal(stacked=0, where="batch")
    with jax.enable_x64():
        raw = jax.jit(p.init)({name: jnp.asarray(w) for name, w in ON_THE_IMAGE.items()})
        effective = jax.jit(p.fold)(raw)
    for name, w in ON_THE_IMAGE.items():
        np.testing.assert_allclose(effective[name], w, rtol=0, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(raw[name]["@orthogonal"]["@fixed"]["base"], w, rtol=0, atol=1e-14, err_msg=name)
        np.testing.assert_array_equal(raw[name]["@orthogonal"]["x"], np.zeros_like(w))


@pytest.mark.parametrize("shape", [(5, 2), (2, 5), (3, 3)], ids=str)
def test_init_starts_at_the_polar_factor(shape):
    w = normal(*shape)
    with jax.enable_x64():
        got = projected(rpx.Orthogonal(), jnp.asarray(w))
    tall = w if shape[0] >= shape[1] else w.T
    expected = scipy.linalg.polar(tall)[0]
    np.testing.assert_allclose(got, expected if tall is w else expected.T, rtol=0, atol=1e-14)


def test_the_nearest_rotation_is_that_of_kabsch():
    w = normal(3, 3)
    w = -w * np.sign(np.linalg.det(w))
    left, _, right = np.linalg.svd(w)
    expected = left @ np.diag([1, 1, np.linalg.det(left @ right)]) @ right
    with jax.enable_x64():
        got = projected(rpx.matrices.SpecialOrthogonal(), jnp.asarray(w))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)
    assert np.linalg.det(got) == pytest.approx(1)


# ---- weight decay, large matrices


@pytest.mark.parametrize("map", mostly_thorough(DENSE, "householder"))
def test_weight_decay_pulls_to_the_base_and_never_to_zero(map):
    base, x = orthogonal(4, 2), normal(4, 2, seed=1)
    for decay in (0.999, 0.1, 1e-30, 0.0):
        q = np.asarray(read(rpx.Orthogonal(map), marked(base.astype(np.float32), (decay * x).astype(np.float32))))
        np.testing.assert_allclose(q.T @ q, np.eye(2), rtol=0, atol=1e-6)
    np.testing.assert_allclose(q, base, rtol=0, atol=1e-6)


def sizes(jaxpr):
    """The sizes of all arrays that a program makes, those of the programs in it too."""
    for equation in jaxpr.eqns:
        yield from (out.aval.size for out in equation.outvars if hasattr(out.aval, "size"))
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


@pytest.mark.parametrize("map", DENSE)
def test_a_tall_matrix_needs_no_square_array(map):
    p, w = rpx.matrices.Stiefel(map), jax.ShapeDtypeStruct((30000, 50), jnp.float32)
    raw = jax.eval_shape(p.init, {"w": w})
    programs = [
        jax.make_jaxpr(p.init)({"w": w}),
        jax.make_jaxpr(lambda raw: jax.vjp(p.apply, raw)[1]({"w": jnp.ones(w.shape)}))(raw),
    ]
    assert max(size for program in programs for size in sizes(program.jaxpr)) <= 2 * w.size


# ---- rebase


@pytest.mark.parametrize("map", mostly_thorough(DENSE, "cayley"))
def test_rebase_moves_the_base_to_the_current_point_and_keeps_it(map):
    p, raw = rpx.Orthogonal(map), marked(orthogonal(2, 4).astype(np.float32), normal(2, 4, dtype=np.float32))
    moved = jax.jit(p.update_base)(raw)
    values = moved["w"]["@orthogonal"]
    np.testing.assert_allclose(values["@fixed"]["base"], read(p, raw), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(values["x"], np.zeros((2, 4)))
    np.testing.assert_allclose(read(p, moved), read(p, raw), rtol=0, atol=1e-6)


# ---- membership, samples


@pytest.mark.parametrize(
    ("stage", "w", "member"),
    [
        pytest.param(rpx.Orthogonal(), orthogonal(4, 2), True, id="orthonormal columns"),
        pytest.param(rpx.Orthogonal(), orthogonal(2, 4), True, id="orthonormal rows"),
        pytest.param(rpx.Orthogonal(), 1.01 * orthogonal(4, 2), False, id="another length"),
        pytest.param(rpx.Orthogonal(), np.zeros((2, 2)), False, id="zero"),
        pytest.param(rpx.matrices.SpecialOrthogonal(), np.eye(3), True, id="rotation"),
        pytest.param(rpx.matrices.SpecialOrthogonal(), -np.eye(3), False, id="reflection"),
        pytest.param(rpx.matrices.AlmostOrthogonal(0.1), np.diag([1.1, 0.9]), True, id="almost orthogonal"),
        pytest.param(rpx.matrices.AlmostOrthogonal(0.1), np.diag([1.11, 0.9]), False, id="not so"),
    ],
)
def test_contains_tells_the_image_from_other_matrices(stage, w, member):
    assert bool(contained(stage, jnp.asarray(w, jnp.float32))) is member


def test_samples_of_rotations_are_uniform(key):
    stage, count = rpx.matrices.SpecialOrthogonal(), 2000
    q = np.asarray(jax.jit(jax.vmap(lambda k: stage.sample(k, (3, 3))))(jax.random.split(key, count)), np.float64)
    np.testing.assert_allclose(np.linalg.det(q), 1, rtol=1e-5)
    # Each entry has mean 0 and variance 1/3; the trace has mean 0 and variance 1; all are bounded by 3.
    assert (np.abs(q.mean(0)) < 5 * np.sqrt(1 / 3 / count)).all()
    assert (np.abs((q**2).mean(0) - 1 / 3) < 5 * np.sqrt(4 / 45 / count)).all()
    assert abs(np.trace(q, axis1=1, axis2=2).mean()) < 5 / np.sqrt(count)


# ---- bad input


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
