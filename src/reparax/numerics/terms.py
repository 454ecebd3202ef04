"""Defines terms, which are einsum-like products of arrays, and records in a jaxpr that an array is a sum of terms.

:func:`record_terms` computes an array in a ``jit``. The name of this call holds the specs of the terms, and its other
outputs are the arrays of the terms. ``factored`` reads the specs with :func:`specs_of`, and multiplies data by the
terms instead of their sum.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

_INPUT = r"[a-z]*(?:\([a-z]-[a-z]\))?"
_SPEC = re.compile(rf"{_INPUT}(?:,{_INPUT})*->(?:[a-z]|\([a-z]+\))*")
_CODES = {"->": "T", "-": "M", ",": "A", "(": "B", ")": "E"}  # Names allow only letters, digits and "_".
_MARK = "sum_of_terms"


@dataclass(frozen=True)
class Spec:
    """The spec of a term, in the notation of :func:`jax.numpy.einsum` with two additions that :class:`Term` describes.

    Attributes:
      text: The text of the spec, such as ``"ir,rj->ij"``.
    """

    text: str

    @property
    def letters(self) -> list[str]:
        """The letters of each array's axes; the last axis of an array for a circulant matrix has two letters."""
        return [re.sub("[()-]", "", operand) for operand in self.text.split("->")[0].split(",")]

    @property
    def circulant_flags(self) -> list[bool]:
        """For each array, whether it is the first column of a circulant matrix."""
        return ["-" in operand for operand in self.text.split("->")[0].split(",")]

    @property
    def axes(self) -> list[str]:
        """The letters of each axis of the result; an axis in parentheses, which merges several, has several letters."""
        return [axis.strip("()") for axis in re.findall(r"[a-z]|\([a-z]+\)", self.text.split("->")[1])]

    def encoded(self) -> str:
        """Encodes the spec as text with only those characters that a function name allows."""
        return functools.reduce(lambda text, pair: text.replace(pair[0], pair[1]), _CODES.items(), self.text)

    @classmethod
    def decoded(cls, text: str) -> Spec:
        """Decodes a spec from the text returned by :meth:`encoded`."""
        return cls(functools.reduce(lambda text, pair: text.replace(pair[1], pair[0]), _CODES.items(), text))


class Term:
    r"""A product of arrays, summed over the letters that are not in the result, as in :func:`jax.numpy.einsum`.

    The method ``terms_leaf`` of a stage returns a list of terms, so that :func:`factored` never forms their sum:

    ===========================  ===============================================
    a plain array                ``Term("ij->ij", w)``
    of low rank                  ``Term("ir,rj->ij", a, b)``
    scaled along an axis         ``Term("ij,j->ij", w, g)``
    small integers times scales  ``Term("ij,j->ij", q, scale)``, ``q`` of int8
    diagonal                     ``Term("i->ii", d)``
    a Kronecker product          ``Term("ac,bd->(ab)(cd)", a, b)``
    circulant                    ``Term("(i-j)->ij", c)``
    times a number               ``Term(",ir,rj->ij", c, a, b)``
    ===========================  ===============================================

    Args:
      spec: Lowercase letters for the axes of each array and of the result. Letters in parentheses are merged into one
        axis. A letter that occurs twice in the result stands for a diagonal. A last axis ``(i-j)`` of an array is
        indexed by the difference of two letters, modulo its size.
      arrays: The arrays.

    Raises:
      ValueError: If the spec does not fit the arrays.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.stage.Term("i->ii", jnp.ones(2)).array()
      Array([[1., 0.],
             [0., 1.]], dtype=float32)
    """

    def __init__(self, spec: str, *arrays: ArrayLike) -> None:
        self.spec = Spec(spec.replace(" ", ""))
        self.arrays = tuple(map(jnp.asarray, arrays))
        if reason := _spec_error(self.spec, self.arrays):
            raise ValueError(f"Term({spec!r}) {reason}")

    def array(self) -> Array:
        """Computes the array that this term represents."""
        spec, letters = self.spec, "".join(self.spec.axes)
        dtype = jnp.result_type(*[x for x in self.arrays if jnp.issubdtype(x.dtype, jnp.inexact)] or [jnp.float32])
        pairs = zip(self.arrays, spec.circulant_flags, strict=True)
        factors = [circulant(x) if is_circulant else x for x, is_circulant in pairs]
        factors = [x.astype(dtype) for x in factors]
        subscripts = f"{','.join(spec.letters)}->{''.join(dict.fromkeys(letters))}"
        unmerged = with_diagonals(jnp.einsum(subscripts, *factors, precision="highest"), letters)
        sizes = iter(unmerged.shape)
        return unmerged.reshape([math.prod(itertools.islice(sizes, len(axis))) for axis in spec.axes])


def _spec_error(spec: Spec, arrays: Sequence[Array]) -> str | None:
    """Returns the end of an error message if a spec does not fit the given arrays, or None if it does."""
    if not _SPEC.fullmatch(spec.text):
        return "is not a valid spec. Write the letters of each array and of the result, as in 'ir,rj->ij'."
    if len(spec.letters) != len(arrays):
        return f"needs {len(spec.letters)} arrays, one for each group of letters, but got {len(arrays)}."
    sizes: dict[str, int] = {}
    for letters, is_circulant, x in zip(spec.letters, spec.circulant_flags, arrays, strict=True):
        shape = (*x.shape, *x.shape[-1:]) if is_circulant else x.shape
        if len(letters) != len(shape):
            return f"has the letters {letters!r} for an array of shape {shape}. Write one letter for each axis."
        if len(set(letters)) != len(letters):
            return f"repeats a letter in {letters!r}, for a single array. Pass the diagonal of this array instead."
        for letter, n in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, n) != n:
                return f"has {letter!r} for axes of sizes {sizes[letter]} and {n}. Write different letters for them."
    if missing := sorted(set("".join(spec.axes)) - set(sizes)):
        return f"has {missing[0]!r} in the result, but for no array. Use only letters of arrays in the result."
    return None


def circulant(x: Array) -> Array:
    """Returns the circulant matrix with the first column ``x``, or a batch of such matrices for a batch of columns."""
    i = jnp.arange(x.shape[-1])
    return jnp.take(x, (i[:, None] - i[None]) % len(i), axis=-1, mode="wrap")


def with_diagonals(x: Any, axes: Sequence[Any]) -> Any:
    """Expands ``x`` from one axis for each distinct name in ``axes`` to one axis for each entry of ``axes``.

    If a name occurs several times, the entries of ``x`` along its axis lie on the diagonal of these axes, and all other
    entries are zero.
    """
    for i, name in enumerate(axes):
        first_axis = axes.index(name)
        if first_axis != i:
            x = jnp.expand_dims(x, i)
            n = x.shape[first_axis]
            x = x * jnp.eye(n, dtype=x.dtype).reshape([n if k in (first_axis, i) else 1 for k in range(x.ndim)])
    return x


def sum_terms(terms: Any) -> Array:
    """Computes the sum of a list of terms as an array; raises an error if ``terms`` is not such a list."""
    return functools.reduce(jnp.add, [term.array() for term in _require_terms(terms)])


def _require_terms(terms: Any) -> Sequence[Term]:
    """Checks that ``terms`` is a nonempty list or tuple of :class:`Term`, and returns it."""
    if not isinstance(terms, list | tuple) or not terms or not all(isinstance(term, Term) for term in terms):
        kinds = [type(term).__name__ for term in terms] if isinstance(terms, list | tuple) else type(terms).__name__
        raise TypeError(f"terms_leaf must return a nonempty list, such as [Term(spec, array)], but returned {kinds}.")
    return terms


def record_terms(formula: Callable[..., Array], terms: Callable[..., Sequence[Term]], *args: Any) -> Array:
    """Computes ``formula(*args)``; under tracing, in a ``jit`` whose name and further outputs hold the terms.

    The specs of the terms are part of the name because every JAX transformation keeps the name of a ``jit``.
    """
    if not any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        return formula(*args)
    specs: list[Spec] = []

    def array_and_terms(*args: Any) -> tuple[Array, list[Array], Array]:
        arrays = [array for term in terms(*args) for array in term.arrays]
        # The integer output distinguishes this call from its derivative, which has no integer output.
        return formula(*args), arrays, jnp.int32(0)

    def sum_of_terms(*args: Any) -> Array:
        checked_terms = _require_terms(terms(*args))
        specs.extend(term.spec for term in checked_terms)
        return sum_terms(checked_terms)

    shape = jax.eval_shape(sum_of_terms, *args).shape
    # Under `vmap`, `jax.checkpoint` moves the batch axis of each output to the front.
    formula_under_vmap = jax.checkpoint(array_and_terms, prevent_cse=False)

    def call(*args: Any) -> Any:
        return formula_under_vmap(*args)

    call.__name__ = "_".join([_MARK, *(spec.encoded() for spec in specs)])
    effective = jax.jit(call)(*args)[0]
    if effective.shape != shape:
        raise ValueError(
            f"terms_leaf returns terms of shape {shape}, but apply_leaf returns an array of shape {effective.shape}. "
            f"Return terms whose sum equals this array."
        )
    return effective


def specs_of(name: str) -> list[Spec] | None:
    """Decodes the specs of terms from the name of a ``jit``; returns None if the name holds no specs."""
    if not name.startswith(_MARK):
        return None
    return [Spec.decoded(text) for text in name[len(_MARK) + 1 :].split("_")]
