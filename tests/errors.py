"""Errors by their whole text: one in a test, or all of a site in a text beside its test file."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def raises(error, text):
    """As ``pytest.raises``, where the message is ``text`` and nothing else."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")


class Case(NamedTuple):
    """An expression, and what Python says of the error that it raises."""

    code: str
    said: str

    def check(self, names: dict[str, Any], **more: Any) -> None:
        """The error is this one, word for word, and the arrays that ``names`` holds are bit for bit as before."""
        before = _bits(names)
        try:
            found = f"nothing: {eval(self.code, {**names, **more})}"
        except Exception as error:
            found = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        assert found == self.said, found
        assert _bits(names) == before


def table(file: str) -> pytest.MarkDecorator:
    """The cases of the text beside a test file, as ``case``: each is an expression and, indented, its error.

    Lines that begin with ``#`` are titles.
    """
    blocks = re.split(r"\n+(?=\S)", Path(file).with_suffix(".txt").read_text().strip())
    cases = [Case(*block.replace("\n    ", "\n").partition("\n")[::2]) for block in blocks if block[0] != "#"]
    return pytest.mark.parametrize("case", cases, ids=[case.code for case in cases])


def _bits(names: dict[str, Any]) -> list[Any]:
    """The structure of each tree that a constant holds, and its numbers."""
    trees = {name: x for name, x in names.items() if name.isupper() and isinstance(x, dict | np.ndarray | jax.Array)}
    leaves, treedef = jax.tree.flatten(trees)
    arrays = [x for x in leaves if isinstance(x, np.ndarray | jax.Array)]
    plain = [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in arrays]
    return [treedef, *((x.dtype, x.shape, x.tobytes()) for x in plain)]
