"""Data that needs no network: handwritten digits, and two texts in Python's own library."""

import argparse
import inspect
import tarfile
import typing
from pydoc_data.topics import topics
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from sklearn.datasets import load_digits


class Split(NamedTuple):
    """Rows to train on, to choose settings by, and to report."""

    train: tuple[Array, Array]
    valid: tuple[Array, Array]
    test: tuple[Array, Array]


def digits(train: int = 1000) -> Split:
    """Scikit-learn's images, 64 numbers from 0 to 1 each: 1000 to train on, 297 to choose by, 500 to report."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x, y = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])
    return Split((x[:train], y[:train]), (x[1000:1297], y[1000:1297]), (x[1297:], y[1297:]))


class Text(NamedTuple):
    """A text as numbers below ``size``.

    Attributes:
      ids: One for each character.
      size: How many characters there are.
    """

    ids: np.ndarray
    size: int


def text() -> Text:
    """The documentation of Python's language, in lower case; rare characters are one."""
    return _numbered(" ".join(topics[name] for name in sorted(topics)))


def source() -> Text:
    """Some modules of Python's library, in the same numbers."""
    return _numbered("\n".join(inspect.getsource(module) for module in (argparse, inspect, tarfile, typing)))


def _numbered(whole: str) -> Text:
    letters = "\n abcdefghijklmnopqrstuvwxyz0123456789.,:;\"'()[]{}*_=+-/<>`#"
    place = {letter: number for number, letter in enumerate(letters)}
    return Text(np.array([place.get(letter, len(letters)) for letter in whole.lower()], np.int32), len(letters) + 1)
