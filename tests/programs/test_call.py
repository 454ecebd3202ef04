"""The arguments of a function and its program, and the lines and paths that reports name."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.source_info_util import new_source_info

from reparax.programs import jaxprs, sources
from reparax.programs.call import Arguments, is_keys

KEY, RAW_KEY = jax.random.key(0), np.zeros(2, np.uint32)
RAW, X = {"w": np.ones(2, np.float32), "b": [np.float32(3)]}, np.arange(2, dtype=np.float32)
CONSTANT = jnp.ones(2)


def loss(raw, key, *more, flag="a", scale=X):
    return {"loss": raw["w"] * CONSTANT * scale, "more": more, "flag": flag, "one": np.ones(1)}


def test_arguments_have_paths_and_a_program():
    arguments = Arguments.of("who", loss, None, (RAW, KEY, X, "text"), {"flag": "c", "scale": 2 * X})
    assert arguments.paths == ["raw/b/0", "raw/w", "key", "more", "argument scale"]
    call = arguments.trace()
    assert call.is_chosen == [False, True, True, True, False, False]  # a constant comes first
    assert sources.paths_of(arguments, call) == {1: "raw/b/0", 2: "raw/w", 4: "more", 5: "argument scale"}
    found = call.restore(jaxprs.evaluate(call.program, call.inputs))
    np.testing.assert_array_equal(found["loss"], 2 * X)
    assert (found["more"][1], found["flag"], found["one"].shape) == ("text", "c", (1,))
    changed = arguments.call([*arguments.arrays[:4], 5 * X])
    np.testing.assert_array_equal(changed["loss"], 5 * X)
    assert arguments.call(arguments.arrays, lambda raw, *args, **kwargs: raw["b"][0]) is RAW["b"][0]


def test_arguments_are_chosen_by_position_and_keys_by_their_type():
    cases = [(None, [1, 1, 0]), (1, [0, 1, 0]), ((0, 2), [1, 0, 1]), ([], [0, 0, 0])]
    for argnums, chosen in cases:
        assert Arguments.of("who", max, argnums, (X, RAW_KEY, X), {}).is_chosen == [*map(bool, chosen)]
    keys = [KEY, jax.random.split(KEY, 3), RAW_KEY, np.zeros((3, 4), np.uint32), [KEY, RAW_KEY]]
    others = [[KEY, X], [], np.zeros(3, np.uint32), np.uint32(2), np.zeros(2, np.int32), "text"]
    assert ([is_keys(x) for x in keys], [is_keys(x) for x in others]) == ([True] * 5, [False] * 6)


def sine(x):
    return jnp.sin(x)


def test_lines_are_those_of_the_user_or_of_the_equation_around():
    call = jax.make_jaxpr(lambda x: jax.jit(lambda x: (sine(x), x))(x))(X).jaxpr
    (eqn,) = call.eqns
    (inside,) = jaxprs.inner_programs(eqn)
    (cut,) = (each.replace(source_info=new_source_info()) for each in inside.eqns)
    assert "sine)" in sources.line_of_output(eqn, 0, {})
    assert "lambda>)" in sources.line_of_output(eqn, 1, {})
    assert [sources.line_of_output(cut, 0, lines) for lines in ({}, {jaxprs.origin(cut): "around"})] == ["", "around"]
    around = eqn.replace(params=eqn.params | jaxprs._call_of(inside.replace(eqns=[cut])))
    lines = sources.lines_by_origin(call.replace(eqns=[around]))
    assert "lambda>)" in lines[jaxprs.origin(cut)]
    assert sources.lines_by_origin(inside.replace(eqns=[cut]), "outside") == {jaxprs.origin(cut): "outside"}
    assert sources.describe_read(cut, "needs the array", {}) == "sin needs the array"
    assert sources.describe_read(inside.eqns[0], "reads it", {}).startswith("sin reads it: ")
    assert sources.describe_read(None, "needs the array", {}) == "it is returned, or carried"


def test_the_path_of_a_weight_is_what_its_parameters_have_in_common():
    paths = {0: "raw/layer/w/@a", 1: "raw/layer/w/@b", 2: "raw/layer/v", 3: "ema/layer/w/a", 4: "raw/x", 5: "ema/y"}
    cases = {(0, 1): "raw/layer/w", (0, 2): "raw/layer", (2,): "raw/layer/v", (0, 3): "layer/w", (0, 7): "raw/layer/w"}
    cases |= {(7,): "closed over", (): "closed over", (4, 5): "of several parameters"}
    assert {origins: sources.common_path(origins, paths) for origins in cases} == cases
