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
    """An expression, what Python says of the error that it raises, and what that advises, to be run."""

    code: str
    said: str
    advised: tuple[str, ...] = ()

    def check(self, names: dict[str, Any], **more: Any) -> None:
        """The error is this one, word for word, and the arrays that ``names`` holds are bit for bit as before."""
        before = _bits(names)
        try:
            found = f"nothing: {eval(self.code, {**names, **more})}"
        except Exception as error:
            found = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        assert found == self.said, found
        for line in self.advised:
            _follow(line, self.said, {**names, **more})
        assert _bits(names) == before


def _follow(line: str, said: str, names: dict[str, Any]) -> None:
    """Runs what a text advises word for word: ``code ;; the names in it ;; where it stands``, with ``@`` for it."""
    code, bound, around = (*line.split(" ;; "), "", "")[:3]
    assert code in said, code
    exec(around.replace("@", code) or code, {**names, **eval(f"dict({bound})", {**names})})


def table(file: str) -> pytest.MarkDecorator:
    """The cases of the text beside a test file, as ``case``: each is an expression and, indented, its error.

    A line after it that begins with ``=>`` is code that the error advises. Lines that begin with ``#`` are titles.
    """
    blocks = re.split(r"\n+(?=\S)", Path(file).with_suffix(".txt").read_text().strip())
    cases = [_read_case(block.replace("\n    ", "\n")) for block in blocks if block[0] != "#"]
    return pytest.mark.parametrize("case", cases, ids=[case.code for case in cases])


def _read_case(block: str) -> Case:
    """One case of a table."""
    code, *lines = block.split("\n")
    said = [line for line in lines if not line.startswith("=> ")]
    return Case(code, "\n".join(said), tuple(line[3:] for line in lines if line.startswith("=> ")))


def _bits(names: dict[str, Any]) -> list[Any]:
    """The structure of each tree that a constant holds, and its numbers."""
    trees = {name: x for name, x in names.items() if name.isupper() and isinstance(x, dict | np.ndarray | jax.Array)}
    leaves, treedef = jax.tree.flatten(trees)
    arrays = [x for x in leaves if isinstance(x, np.ndarray | jax.Array)]
    plain = [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in arrays]
    return [treedef, *((x.dtype, x.shape, x.tobytes()) for x in plain)]
