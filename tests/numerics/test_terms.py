"""Terms against numpy.einsum and the dense matrices that they stand for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

import reparax as rpx
from reparax.numerics.terms import Spec, record_terms, specs_of

A, B, G, D = (
    np.random.default_rng(i).standard_normal(s).astype("f") for i, s in enumerate([(3, 2), (2, 4), (4,), (3,)])
)
Q = np.array([[1, -2, 3, -128], [4, 5, 6, 127], [0, 0, 1, 2]], np.int8)
ROLLED = np.stack([np.stack([np.roll(a, i) for i in range(2)], 1) for a in A])

TERMS = {
    "an array": (("ij->ij", A), A),
    "low rank": (("ir,rj->ij", A, B), A @ B),
    "a transposed one": (("rj,ir->ij", B, A), A @ B),
    "scaled": (("ir,rj,j->ij", A, B, G), A @ B * G),
    "integers": (("ij,j->ij", Q, G), Q * G),
    "a diagonal": (("i->ii", D), np.diag(D)),
    "a diagonal of three": (("i->iii", D), np.einsum("i,ij,ik->ijk", D, np.eye(3), np.eye(3))),
    "diagonals": (("ai->aii", A), np.stack([np.diag(a) for a in A])),
    "a Kronecker product": (("ac,bd->(ab)(cd)", A, B), np.kron(A, B)),
    "a circulant matrix": (("(i-j)->ij", D), np.stack([np.roll(D, i) for i in range(3)], 1)),
    "circulant matrices": (("a(i-j)->aij", A), ROLLED),
    "products of circulant matrices": (("a(i-j),jk->aik", A, B), ROLLED @ B),
    "a number": ((",ij->ij", 2.0, A), 2 * A),
    "an array and circulant ones": (
        (" ij, (j-k), (k-l) -> il", A, 2 * D[:2], D[1:]),
        A @ np.stack([np.roll(2 * D[:2], i) for i in range(2)], 1) @ np.stack([np.roll(D[1:], i) for i in range(2)], 1),
    ),
    "axes merged in the middle": (("ac,bd->a(bd)c", A, B), np.einsum("ac,bd->abdc", A, B).reshape(3, 8, 2)),
    "a sum": (("ij->i", A), A.sum(1)),
    "integers alone": (("ij->ij", Q), Q),
}


@pytest.mark.parametrize("name", TERMS)
def test_the_array_of_a_term(name):
    (spec, *arrays), expected = TERMS[name]
    with jax.numpy_dtype_promotion("standard"):
        array = jax.jit(lambda *arrays: rpx.stage.Term(spec, *arrays).array())(*arrays)
    np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


def test_a_term_has_the_dtype_of_its_floating_arrays():
    half = jnp.asarray(np.ones(4), jnp.bfloat16)
    for arrays, dtype in (((Q, half), jnp.bfloat16), ((Q, Q[0]), jnp.float32), ((1j * Q, G), jnp.complex64)):
        with jax.numpy_dtype_promotion("standard"):
            term = rpx.stage.Term("ij,j->ij", *arrays)
            assert jax.eval_shape(term.array).dtype == dtype


@pytest.mark.parametrize("name", TERMS)
def test_a_spec_is_read_from_the_name_of_a_call(name):
    spec = Spec(TERMS[name][0][0].replace(" ", ""))
    assert spec.encoded().isidentifier()
    assert Spec.decoded(spec.encoded()) == spec


def test_a_term_is_computed_in_the_full_precision_of_its_dtype():
    found = str(jax.make_jaxpr(lambda a: rpx.stage.Term("ir,rj->ij", a, B).array())(A))
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in " ".join(found.split())


def test_a_formula_tells_its_terms_where_it_is_traced():
    def formula(a, b):
        return jnp.exp(jnp.log(a @ b))

    def terms(a, b):
        return [rpx.stage.Term("ir,rj->ij", a, b), rpx.stage.Term("i->ii", a[:, 0])]

    a, b = jnp.ones((4, 2)), jnp.ones((2, 4))
    for f, x in (
        (lambda a: record_terms(formula, terms, a, b), a),
        (lambda b: record_terms(formula, terms, a, b), b),
        (lambda a: record_terms(lambda by: formula(**by), lambda by: tuple(terms(**by)), {"a": a, "b": b}), a),
    ):
        (eqn,) = jax.make_jaxpr(f)(x).jaxpr.eqns
        assert specs_of(eqn.params["name"]) == [Spec("ir,rj->ij"), Spec("i->ii")]
        assert len(eqn.outvars) == 5
    np.testing.assert_array_equal(record_terms(formula, terms, a, b), formula(a, b))
    assert specs_of("_where") is None


def test_arrays_of_terms_under_vmap_have_the_batch_in_front():
    def record(a):
        return record_terms(lambda a: jnp.outer(a, a).T, lambda a: [rpx.stage.Term("i,j->ij", a, a)], a)

    (eqn,) = jax.make_jaxpr(jax.vmap(record, in_axes=1, out_axes=2))(np.ones((4, 5), np.float32)).jaxpr.eqns[:1]
    assert [v.aval.shape for v in eqn.outvars] == [(5, 4, 4), (5, 4), (5, 4), ()]


WRONG = {
    "is not a valid spec. Write the letters of each array and of the result, as in 'ir,rj->ij'.": ("ir rj", A, B),
    "needs 2 arrays, one for each group of letters, but got 1.": ("ir,rj->ij", A),
    "has the letters 'i' for an array of shape (3, 2). Write one letter for each axis.": ("i,rj->ij", A, B),
    "repeats a letter in 'ii', for a single array. Pass the diagonal of this array instead.": ("ii->i", B[:, :2]),
    "has 'r' for axes of sizes 2 and 4. Write different letters for them.": ("ir,jr->ij", A, B),
    "has 'k' in the result, but for no array. Use only letters of arrays in the result.": ("ir,rj->ik", A, B),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_spec_that_does_not_fit_is_refused(text):
    spec, *arrays = WRONG[text]
    with raises(ValueError, f"Term({spec!r}) {text}"):
        rpx.stage.Term(spec, *arrays)


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        (lambda a: [], "terms_leaf must return a nonempty list, such as [Term(spec, array)], but returned []."),
        (lambda a: 1.0, "terms_leaf must return a nonempty list, such as [Term(spec, array)], but returned float."),
        (
            lambda a: [rpx.stage.Term("ij->ij", a), 1.0],
            "terms_leaf must return a nonempty list, such as [Term(spec, array)], but returned ['Term', 'float'].",
        ),
        (
            lambda a: [rpx.stage.Term("ij->i", a)],
            "terms_leaf returns terms of shape (3,), but apply_leaf returns an array of shape (3, 2). "
            "Return terms whose sum equals this array.",
        ),
    ],
    ids=["none", "a number", "numbers", "another shape"],
)
def test_terms_that_do_not_give_the_array_are_refused(terms, text):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}"):
        jax.make_jaxpr(lambda a: record_terms(jnp.negative, terms, a))(A)
