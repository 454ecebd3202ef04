"""Samples of random results, compared with each other, and the normal numbers of random words."""

import numpy as np
from scipy import special

N = 4096
"""How many examples, and how many draws of whole weights."""
ERRORS = 5.0
"""How many standard errors an estimate may be off."""


def assert_alike(got, want):
    """Both have one mean and one variance in each entry, and in ``got`` neighbours do not correlate."""
    spread = np.sqrt((got.var(0) + want.var(0)) / N)
    assert np.all(np.abs(got.mean(0) - want.mean(0)) <= ERRORS * spread + 1e-6)
    fourth = [np.mean((x - x.mean(0)) ** 4, 0) - x.var(0) ** 2 for x in (got, want)]
    assert np.all(np.abs(got.var(0) - want.var(0)) <= ERRORS * np.sqrt(sum(fourth) / N) + 1e-6)
    assert np.all(got.var(0) > 0)
    centred = (got - got.mean(0)) / got.std(0)
    assert np.all(np.abs(np.mean(centred[1:] * centred[:-1], 0)) <= ERRORS / np.sqrt(N))


def quantiles(words):
    """The normal numbers of words of 32 bits, by scipy; small shares are exact on both sides."""
    shares = (words.astype(np.float64) + 0.5) / 2**32
    return np.where(shares < 0.5, special.ndtri(shares), -special.ndtri(1 - shares))
