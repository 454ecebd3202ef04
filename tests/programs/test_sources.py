"""Lines of source and paths of weights, as reports name them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.source_info_util import new_source_info

from reparax.numerics.tie import read_in_step
from reparax.programs import jaxprs, sources
from reparax.programs.call import Arguments

FILE, X = Path(__file__).name, np.ones((1, 4, 4), np.float32)


def sine(x):
    return jnp.sin(x)


def program(function, *args):
    return jax.make_jaxpr(function)(*args).jaxpr


def named(line, name):
    """Whether a line is one of this file, in the function of this name."""
    return FILE in line and line.endswith(f"{name})")


def test_the_line_of_an_equation_is_the_innermost_of_the_user():
    assert named(sources.line_of(program(sine, X).eqns[0]), "sine")
    (eqn,) = program(lambda x: read_in_step(x), X).eqns  # which reparax writes
    assert named(sources.line_of(eqn), "<lambda>")


def line_in(file):
    """The line of a sine in a file of this name."""
    names = {}
    exec(compile("import jax.numpy as jnp\ndef f(x):\n    return jnp.sin(x)", file, "exec"), names)
    return sources.line_of(program(names["f"], X).eqns[0])


def test_a_notebook_cell_has_no_file():
    assert line_in("/tmp/ipykernel_12/3456.py").startswith("<cell>:3")


def test_packages_beside_this_one_are_the_users():
    beside = str(Path(sources.__file__).parents[1]) + "_models/model.py"
    assert line_in(beside).startswith(f"{beside}:3")


def without_lines(jaxpr):
    """The program as if JAX had cut off all its tracebacks, at its outermost level."""
    return jaxpr.replace(eqns=[eqn.replace(source_info=new_source_info()) for eqn in jaxpr.eqns])


def test_an_equation_without_a_line_has_that_of_the_equation_around_it():
    call = program(lambda x: jax.jit(sine)(x), X)
    (inside,) = jaxprs.inner_programs(call.eqns[0])
    lines = sources.lines_by_origin(call, "outside")
    assert named(lines[jaxprs.origin(call.eqns[0])], "<lambda>")
    assert named(lines[jaxprs.origin(inside.eqns[0])], "sine")
    assert set(sources.lines_by_origin(without_lines(program(sine, X)), "outside").values()) == {"outside"}
    cut = without_lines(inside)
    eqn = call.eqns[0].replace(params=call.eqns[0].params | {"jaxpr": call.eqns[0].params["jaxpr"].replace(jaxpr=cut)})
    assert named(sources.lines_by_origin(call.replace(eqns=[eqn]))[jaxprs.origin(cut.eqns[0])], "<lambda>")


def test_the_line_of_an_output_is_inside_its_call():
    def two(x):
        return jax.jit(lambda x: (sine(x), x, jnp.cos(x)))(x)

    (eqn,) = program(two, X).eqns
    lines = [sources.line_of_output(eqn, i, {}) for i in range(3)]
    assert [named(line, name) for line, name in zip(lines, ("sine", "two", "<lambda>"), strict=True)] == [True] * 3
    assert named(sources.describe_read(eqn, "reads it", {}), "sine")
    (nested,) = program(lambda x: jax.jit(two)(x), X).eqns
    assert named(sources.line_of_output(nested, 2, {}), "<lambda>")
    (cut,) = without_lines(program(sine, X)).eqns
    assert sources.line_of_output(cut, 0, {jaxprs.origin(cut): "around"}) == "around"
    assert sources.line_of_output(cut, 0, {}) == ""


def test_a_read_is_described():
    (eqn,) = program(sine, X).eqns
    text = sources.describe_read(eqn, "needs the array", {})
    assert text.startswith("sin needs the array: ")
    assert named(text, "sine")
    (cut,) = without_lines(program(sine, X)).eqns
    assert sources.describe_read(cut, "needs the array", {}) == "sin needs the array"
    assert sources.describe_read(None, "needs the array", {}) == "it is returned, or carried"
    for groups, prefix in ((1, "conv"), (2, "a grouped conv")):
        kernel, settings = np.ones((4, 4 // groups, 3), np.float32), {"feature_group_count": groups}
        (eqn,) = program(lambda x, w, s=settings: lax.conv_general_dilated(x, w, (1,), "SAME", **s), X, kernel).eqns
        assert sources.describe_read(eqn, "reads it", {}).startswith(prefix + "_general_dilated reads it: ")


PATHS = {0: "raw/layer/w/@lora/a", 1: "raw/layer/w/@lora/b", 2: "raw/layer/v", 3: "ema/layer/w/a", 4: "raw/layer/w/@x"}


@pytest.mark.parametrize(
    ("origins", "path"),
    [
        ([0, 1], "raw/layer/w"),
        ([0, 1, 2], "raw/layer"),
        ([2], "raw/layer/v"),
        ([0, 3], "layer/w"),
        ([0, 4], "raw/layer/w"),
        ([4, 7], "raw/layer/w"),
        ([7], "closed over"),
        ([], "closed over"),
    ],
)
def test_the_path_of_a_weight_is_what_its_parameters_have_in_common(origins, path):
    assert sources.common_path(origins, PATHS) == path


def test_parameters_without_a_common_path():
    assert sources.common_path([0, 1], {0: "raw/a", 1: "other/b"}) == "of several parameters"


def test_inputs_have_the_paths_of_arguments_but_for_constants_and_typed_keys():
    constant, key = jnp.ones(2), jax.random.key(0)
    arguments = Arguments.of(
        "who", lambda raw, key, x: raw["w"] * constant * x, None, ({"w": X[0, 0, :2]}, key, np.float32(2)), {}
    )
    assert sources.paths_of(arguments, arguments.trace()) == {1: "raw/w", 3: "x"}
