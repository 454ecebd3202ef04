"""The stages of the page on stages of your own: what a stranger tries on them next."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table

import reparax as rpx
from reparax.testing import check_laws

PAGE = Path(__file__).parents[2] / "docs" / "own_stage.md"


def classes():
    """The classes that the page defines, with kinds that no other test has."""
    text = "\n".join(re.findall(r"```python\n(?!>>>)(.*?)```", PAGE.read_text(), flags=re.DOTALL))
    body = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    for node in body:
        node.body[:0] = ast.parse(f"kind = 'page_{node.name}'").body
    found = {"__name__": "own_stage", "jax": jax, "jnp": jnp, "rpx": rpx}
    exec(compile(ast.Module(body, []), PAGE.name, "exec"), found)
    return {node.name: found[node.name] for node in body}


CLASSES = classes()
Scaled, RoundingNoise, LaplaceWeights = (CLASSES[name] for name in ("Scaled", "RoundingNoise", "LaplaceWeights"))
PARAMS = {"a": {"kernel": np.ones((3, 2), np.float32)}, "b": {"kernel": np.full((3, 2), 2, np.float32)}}


def test_the_checked_number_may_be_traced():
    def raw(start):
        return Scaled(start).init(PARAMS)["a"]["kernel"]["@page_Scaled"]["s"]

    np.testing.assert_allclose(jax.jit(raw)(2.0), np.full((1, 2), np.log(np.expm1(2.0))), rtol=1e-5)


def test_the_checked_number_may_differ_from_array_to_array():
    raw = Scaled({"a/.*": 0.5, "b/.*": 2.0}).init(PARAMS)
    for name, start in {"a": 0.5, "b": 2.0}.items():
        s = raw[name]["kernel"]["@page_Scaled"]["s"]
        np.testing.assert_allclose(s, np.full((1, 2), np.log(np.expm1(start))), rtol=1e-5)


@pytest.mark.parametrize("stage", [RoundingNoise(0.25), LaplaceWeights(0.1)], ids=repr)
def test_real_noise_leaves_complex_arrays_alone_and_refuses_them_if_selected(stage):
    wave = jnp.ones((3, 2), jnp.complex64)
    params = {**PARAMS, "wave": wave}
    assert stage.apply(stage.init(params), jax.random.key(0))["wave"] is wave
    name = type(stage).__name__
    text = re.escape(f"{name}(") + ".*'wave': expected a floating array, got complex64. Exclude it with `where`."
    chosen = type(stage)(0.1, where="wave")
    with pytest.raises(ValueError, match=text):
        chosen.init(params)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Anchored", "Scaled", "LaplaceWeights", "RoundingNoise"])
def test_the_page_computes_in_float32_where_float16_overflows(name, key):
    arguments = {"LaplaceWeights": (0.1,), "RoundingNoise": (0.25,)}
    stage = CLASSES[name](*arguments.get(name, ()))
    check_laws(stage, {"w": jax.random.normal(key, (8, 4))}, key, laws=("half_precision",))


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
