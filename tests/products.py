"""The arrays of sums of products, by numpy's einsum, and small products to try operations on."""

import numpy as np

from reparax.programs.sums import Circulant, Factor, Label, Product, Segments, Sum


def shape_of(product):
    return tuple(int(np.prod([x.size for x in group])) for group in product.axes)


def array_of(product):
    """The array of a product, with each merged axis as one: a label on a second axis is tied to the first by an eye."""
    number = {}
    terms = [(np.asarray(f.dense), [number.setdefault(x, len(number)) for x in f.labels]) for f in product.factors]
    output = []
    for label in product.labels_of_axes:
        i = number.setdefault(label, len(number))
        output.append(i if i not in output else 40 + len(output))
        terms.append((np.ones(label.size), [i]) if output[-1] == i else (np.eye(label.size), [i, output[-1]]))
    return np.einsum(*(part for term in terms for part in term), output).reshape(shape_of(product))


def array_of_sum(x):
    arrays = [array_of(product) for product in x.products]
    assert {array.shape for array in arrays} <= {tuple(x.shape)}
    return sum(arrays, np.zeros(x.shape))


def whole(*shape, seed=0):
    """An array of small integers, so that products of several are exact."""
    return np.random.RandomState(seed).randint(-3, 4, shape).astype(np.float32)


def product(axes, *factors, fixed=()):
    """A product from letters: ``product("i o", ("ir", a), ("ro", b))``, with factors at these positions fixed."""
    label = {letter: Label(n) for letters, x in factors for letter, n in zip(letters, x.shape, strict=True)}
    parts = [Factor(x, tuple(map(label.get, letters)), i in fixed) for i, (letters, x) in enumerate(factors)]
    groups = [tuple(label.setdefault(x, Label(5)) for x in group) for group in axes.split()]
    return Product(tuple(parts), tuple(tuple(x for x in group if x.size != 1) for group in groups))


def sum_of(*products, dtype=np.float32):
    return Sum(tuple(products), shape_of(products[0]), np.dtype(dtype), None, "made here")


PRODUCTS = {
    "low-rank": product("i o", ("ir", whole(6, 2)), ("ro", whole(2, 4, seed=1))),
    "diagonal": product("i i", ("i", whole(4)), ("i", whole(4, seed=1))),
    "repeated": product("i o", ("i", whole(6))),  # along an axis of 5 that no factor has
    "merged": product("ij o", ("ir", whole(2, 2)), ("jr", whole(3, 2, seed=1)), ("ro", whole(2, 4, seed=2))),
    "row": product("u o", ("uo", whole(1, 4))),
    "number": product("u", ("u", whole(1) + 2)),
    "rotated": product("i j", ("ij", Circulant(whole(4))), ("j", whole(4, seed=1))),
    "grouped": product("n o", ("nk", Segments(np.array([2, 0, 1]), 4, np.float32)), ("ko", whole(3, 4))),
}
