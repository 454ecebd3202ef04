"""Products are multiplied to the array of numpy's einsum, by the operations that cost least."""

import jax
import numpy as np
import pytest

from reparax.programs import multiply
from reparax.programs.multiply import ENTRY
from reparax.programs.sums import Circulant, Factor, Label, Product, Segments, Sum, axis_labels


def whole(*shape, seed=0):
    """Small integers, so that products are exact."""
    return np.random.RandomState(seed).randint(-3, 4, shape).astype(np.float32)


def product(subscripts, *arrays, fixed=()):
    """A product from the letters of einsum, with factors at some positions fixed."""
    inputs, output = subscripts.split("->")
    names = inputs.split(",")
    label = {x: Label(n) for name, a in zip(names, arrays, strict=True) for x, n in zip(name, a.shape, strict=True)}
    pairs = enumerate(zip(names, arrays, strict=True))
    factors = tuple(Factor(x, tuple(map(label.get, name)), i in fixed) for i, (name, x) in pairs)
    return Product(factors, tuple(axis_labels(label[x]) for x in output))


X, W, XS, HEADS, V = whole(4, 2), whole(3, 2, 5), whole(2, 4, 2), whole(3, 2, 4, 2), whole(3, 4, seed=1)
ROWS = Segments(np.array([2, 0, 1], np.int32), 4, np.float32)
OF_EACH = Segments(np.array([[2, 0, 1], [1, 3, 0]], np.int32), 4, np.float32)
ROTATED, BOTH, DOT, RAGGED = Circulant(whole(4)), Circulant(whole(2, 4)), {"dot_general"}, {"ragged_dot_general"}
PRODUCTS = [  # in letters, the factors, and which of these operations multiply them
    ("ir,ro->io", (X, whole(2, 5)), DOT),
    ("ir,ro->oi", (X, whole(2, 5)), DOT),
    ("ij,k->ijk", (X, whole(3)), DOT),
    ("bir,bro->bio", (XS, whole(2, 2, 5)), DOT),
    ("bi,b->ib", (X.T, whole(2)), {"mul"}),
    (",io,->io", (whole(), X, whole() - 1), {"mul"}),
    ("irs,ro->io", (XS.T, whole(4, 5)), DOT),
    ("iru,ro->io", (X[..., None], whole(2, 5)), DOT),
    ("ij,jk,kl,lm,m,j->i", (X, whole(2, 5), whole(5, 3), V, whole(4), whole(2)), DOT),
    ("ij,ni->nj", (ROTATED, V), {"fft", "mul"}),
    ("ij,nj->ni", (ROTATED, V), {"fft", "mul"}),
    ("bij,bnj->bin", (BOTH, whole(2, 3, 4)), {"fft", "mul"}),
    ("bij,nj->nbi", (BOTH, V), {"fft", "mul"}),
    ("ij,nj->n", (ROTATED, V), {"dot_general", "gather", "eq"}),
    ("nk,ni,kio->no", (ROWS, X, W), RAGGED),
    ("nk,ni,kir,kro->no", (ROWS, X, W, whole(3, 5, 2)), DOT | RAGGED),
    ("nk,no,k->no", (ROWS, X, whole(3)), {"mul", "gather"}),
    ("nk,ni,no->kio", (ROWS, X, whole(4, 5)), RAGGED),
    ("nk,ni,k->ki", (ROWS, X, whole(3)), {"dot_general", "mul", "eq"}),
    ("nk,ni,o->kio", (ROWS, X, whole(5)), {"dot_general", "eq"}),
    ("nk,n->n", (ROWS, X[:, 0]), {"mul"}),
    ("nk,ni,kio->nko", (ROWS, X, W), {"dot_general", "eq"}),
    ("nk,ni,kio->o", (ROWS, X, W), {"dot_general", "eq"}),
    ("bnk,bni,kio->bno", (OF_EACH, XS, W), RAGGED),
    ("bnk,bn,ko->bno", (OF_EACH, XS[..., 0], W[:, 0]), {"dot_general", "mul", "eq"}),
    ("bnk,hbni,hkio->hbno", (OF_EACH, HEADS, whole(3, 3, 2, 5)), RAGGED),
    ("bnk,bni,bno->bkio", (OF_EACH, XS, whole(2, 4, 5)), {"dot_general", "eq"}),
]
OPERATIONS = {"dot_general", "ragged_dot_general", "mul", "fft", "gather", "eq"}


def dense(x):
    return np.asarray(x.todense() if isinstance(x, Circulant | Segments) else x)


def sum_of(subscripts, arrays, dtype=np.float32):
    shape = np.einsum(subscripts, *map(dense, arrays)).shape
    return Sum((product(subscripts, *arrays),), shape, np.dtype(dtype), None, None)


@pytest.fixture(scope="module")
def found():
    """The arrays of all products, as one program."""
    return jax.jit(lambda xs: list(map(multiply.array_of_sum, xs)))([sum_of(*row[:2]) for row in PRODUCTS])


@pytest.mark.parametrize("i", range(len(PRODUCTS)), ids=lambda i: PRODUCTS[i][0])
def test_a_product_is_multiplied_to_its_array(i, found):
    subscripts, arrays, operations = PRODUCTS[i]
    np.testing.assert_allclose(found[i], np.einsum(subscripts, *map(dense, arrays)), atol=1e-4)
    text = str(jax.make_jaxpr(multiply.array_of_sum)(sum_of(subscripts, arrays)))
    assert {name for name in OPERATIONS if f" {name}" in text} == operations


def test_nothing_is_transposed_or_summed_that_need_not_be():
    for subscripts, arrays, _ in (*PRODUCTS[:4], PRODUCTS[7]):
        text = str(jax.make_jaxpr(multiply.array_of_sum)(sum_of(subscripts, arrays)))
        assert not any(word in text for word in (" transpose", " reduce_sum")), subscripts


def test_a_diagonal_and_repeated_entries_are_laid_out():
    i, o = Label(4), Label(3)
    factors = (Factor(V[0], (i,), fixed=False),)
    for axes, want in ((((i,), (i,)), np.diag(V[0])), (((o,), (i,)), np.tile(V[0], (3, 1)))):
        x = Sum((Product(factors, axes),) * 2, want.shape, np.dtype(np.float32), None, None)
        np.testing.assert_array_equal(multiply.array_of_sum(x), 2 * want)


COSTS = [  # twice the loop for each of the result and gradients, and what is written
    ("ir,ro->io", (whole(6, 2), whole(2, 4)), (), 3 * 2 * 48 + ENTRY * (24 + 12 + 8)),
    ("ir,ro->io", (whole(6, 2), whole(2, 4)), (0,), 2 * 2 * 48 + ENTRY * (24 + 8)),
    ("ir,ro->io", (whole(6, 2), whole(2, 4)), (0, 1), 2 * 48 + ENTRY * 24),
    ("i,i->i", (whole(6), whole(6)), (), ENTRY * 18),
    ("io,o->io", (whole(6, 4), whole(4)), (), 2 * 24 + ENTRY * (24 + 24 + 4)),
    ("ij,nj->ni", (Circulant(whole(8)), whole(5, 8)), (), 3 * (2 * 5 * 60 + ENTRY * 40)),
    ("nk,ni,kio->no", (ROWS, X, W), (0,), 3 * 2 * 40 + ENTRY * (20 + 8 + 30)),
    ("nk,ni,no->kio", (ROWS, X, X), (0,), 3 * 2 * 16 + ENTRY * (12 + 8 + 8)),
    ("ni,ir,ro->no", (whole(8, 6), whole(6, 2), whole(2, 4)), (0,), 4 * 96 + 6 * 64 + ENTRY * (16 + 12 + 32 + 16 + 8)),
    ("ni,ir,ro->no", (whole(500, 6), whole(6, 2), whole(2, 4)), (0,), 6 * 48 + 4 * 12000 + ENTRY * (44 + 2000 + 24)),
]


@pytest.mark.parametrize(("subscripts", "arrays", "fixed", "cost"), COSTS)
def test_the_cost_of_a_product_in_its_cheapest_order(subscripts, arrays, fixed, cost):
    assert multiply.cost(product(subscripts, *arrays, fixed=fixed)) == cost
