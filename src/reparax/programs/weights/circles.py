"""Circulant matrices, stored as their first column."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from reparax.numerics.terms import circulant


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Circle:
    """Matrices with the entries ``numbers[..., (i - j) % n]``."""

    numbers: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.numbers.shape, self.numbers.shape[-1])

    @property
    def dtype(self) -> Any:
        return self.numbers.dtype

    @property
    def size(self) -> int:
        """How many numbers are stored."""
        return self.numbers.size

    def astype(self, dtype: Any) -> "Circle":
        return Circle(self.numbers.astype(dtype))

    def todense(self) -> Any:
        """The matrices."""
        return circulant(self.numbers)

    def spectrum(self, *, transposed: bool) -> Any:
        """The Fourier transform of the first column, or of the first row."""
        numbers = _in_fourier_dtype(self.numbers)
        return _fourier(jnp.roll(numbers[..., ::-1], 1, axis=-1) if transposed else numbers)


def _in_fourier_dtype(x: Any) -> Any:
    """``x`` in a precision that Fourier transforms support."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def _fourier(x: Any) -> Any:
    """The Fourier transform along the last axis; for real numbers, its first half, which gives the other."""
    return jnp.fft.fft(x) if jnp.iscomplexobj(x) else jnp.fft.rfft(x)


def fourier_transform(x: Any) -> Any:
    """The Fourier transform along the last axis."""
    return _fourier(_in_fourier_dtype(x))


def inverse_fourier(x: Any, n: int, dtype: Any) -> Any:
    """The ``n`` numbers along the last axis whose Fourier transform is ``x``."""
    numbers = jnp.fft.ifft(x) if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.fft.irfft(x, n)
    return numbers.astype(dtype)


def fourier_cost(n: int) -> float:
    """The number of operations of a Fourier transform of ``n`` numbers."""
    return 2.5 * n * math.log2(max(n, 2))
