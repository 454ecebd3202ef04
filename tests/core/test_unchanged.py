"""What a formula returns unchanged is the same array: no transform and no arrangement of axes copies it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from one_array import normal

import reparax as rpx
from reparax.core.matrices import RowsAndColumns
from reparax.core.unchanged import mark_same, recompute, restore_same

KEY = jax.random.key(0)


def array(*shape):
    """An array of JAX, which init can give back as it is."""
    return jnp.asarray(normal(*shape), np.float32)


MATRIX = array(8, 4)
STACKED = {"stacked=0": ({"stacked": 0}, array(3, 8, 4)), "stacked=1": ({"stacked": 1}, array(8, 3, 4))}
MATRICES = STACKED | {
    "columns of heads": ({"rows": 0, "columns": (1, 2)}, array(8, 2, 2)),
    "columns first": ({"rows": 1, "columns": 0}, array(4, 8)),
    "heads": ({"rows": 1, "columns": (0, 2)}, array(2, 8, 2)),
    "stacked heads": ({"rows": 1, "columns": (0, 2), "stacked": 1}, array(2, 3, 8, 2)),
}


def unchanged(stage):
    """The names of the raw values of a matrix that are the matrix itself; nothing is computed."""
    drawn = (KEY,) if stage._init_takes_key else ()
    program, start = jax.make_jaxpr(stage.init_leaf, return_shape=True)(MATRIX, *drawn)
    outputs = jax.tree.unflatten(jax.tree.structure(start), program.jaxpr.outvars)
    return {name for name, x in outputs.items() if x is program.jaxpr.invars[0]}


def takes_matrices(stage):
    """Whether it is for matrices, whatever their numbers: nothing is computed."""
    said = []
    jax.eval_shape(lambda w: said.append(stage._why_refused(w)), MATRIX)
    return said == [None]


# One stage of each class that keeps the model's array.
STAGES = {
    type(stage).__name__: replace(stage, where=".*", stacked=())
    for p, _ in CASES.values()
    for stage in p
    if isinstance(stage, rpx.Reparametrization) and not stage._in_place and takes_matrices(stage)
}
KEEPING = {name: stage for name, stage in STAGES.items() if unchanged(stage)}


def arrangements(stage):
    return MATRICES if hasattr(stage, "rows") else STACKED


def raw_value(raw, name):
    (node,) = raw["w"].values()
    return node[name] if name in node else node["@fixed"][name]


def test_most_stages_with_a_base_or_a_mask_keep_it():
    assert {"LoRA", "Delta", "Gain", "Mask", "SpectralNorm", "VeRA"} <= KEEPING.keys()


@pytest.mark.parametrize("name", KEEPING)
def test_a_program_of_init_returns_what_the_formula_does_not_change(name):
    stage = KEEPING[name]
    for arranged, w in [({}, MATRIX), *arrangements(stage).values()]:
        program, raw = jax.make_jaxpr(replace(stage, **arranged).init, return_shape=True)({"w": w}, KEY)
        outputs = jax.tree.unflatten(jax.tree.structure(raw), program.jaxpr.outvars)
        for value in unchanged(stage):
            is_turned = arranged.get("rows") == 1 and stage.raw_values[value].axes == ("rows", "columns")
            assert (raw_value(outputs, value) is program.jaxpr.invars[0]) is not is_turned


@pytest.mark.parametrize("arranged", MATRICES)
def test_without_jit_the_base_of_an_adapter_is_the_models_array(arranged):
    axes, w = MATRICES[arranged]
    for p in (rpx.LoRA(2, **axes), rpx.Freeze() >> rpx.LoRA(2, **axes)):
        (base,) = [x for x in jax.tree.leaves(p.init({"w": w}, KEY)) if x.size == w.size]
        assert base is w


class Kept(RowsAndColumns):
    """An array that no formula changes, beside a value of other axes."""

    raw_values = {"w": rpx.stage.fixed(base=True), "x": rpx.stage.main(axes=("rows", "columns"))}

    def init_leaf(self, w):
        return {"w": w, "x": w}

    def apply_leaf(self, values):
        return values["w"]

    def update_leaf(self, values):
        return {"w": values["w"]}


@pytest.mark.parametrize("arranged", MATRICES)
def test_every_method_passes_on_what_its_formula_does(arranged):
    axes, w = MATRICES[arranged]
    p = Kept(**axes)
    raw = p.init({"w": w})
    values = [raw_value(raw, name) for name in ("w", "x")]
    assert values[0] is w
    assert p.apply(raw)["w"] is w
    for later in (p.update(raw), p.update_base(raw)):
        assert all(raw_value(later, name) is x for name, x in zip(("w", "x"), values, strict=True))


@pytest.mark.parametrize("arranged", MATRICES)
def test_a_program_of_update_passes_on_what_its_formula_does(arranged):
    """Also under a stage that computes the value, to which `update` could not write."""
    axes, w = MATRICES[arranged]
    for p in (Kept(**axes), rpx.Freeze() >> Kept(**axes)):
        program = jax.make_jaxpr(p.update)(p.init({"w": w})).jaxpr
        assert program.outvars == program.invars


def test_the_same_array_with_other_axes_is_not_the_same():
    raw = Kept(rows=1, columns=0).init({"w": MATRIX.T})
    assert raw_value(raw, "x").tolist() == MATRIX.tolist()
    assert raw_value(raw, "w").tolist() == MATRIX.T.tolist()


def test_a_donated_base_is_not_copied():
    params = {name: w for name, (_, w) in MATRICES.items()}
    p = rpx.Chain(tuple(rpx.LoRA(2, **{"columns": -1} | axes, where=name) for name, (axes, _) in MATRICES.items()))
    program = jax.jit(p.init, donate_argnums=0).lower(params, KEY).compile()
    assert program.memory_analysis().alias_size_in_bytes == sum(w.nbytes for w in params.values())


def test_a_chain_keeps_nothing_for_the_backward_pass_but_what_it_got():
    raw = jax.eval_shape(rpx.WeightNorm().init, {"w": MATRIX})
    (equation,) = jax.make_jaxpr(rpx.WeightNorm().apply)(raw).jaxpr.eqns
    assert equation.params["policy"]("sin") is False


def test_what_is_no_array_passes_a_program_and_an_error_comes_out_as_it_is():
    tree = {"a": "relu", "b": MATRIX, "c": None, "d": 3, "e": array(2)}
    seen = []

    def formula(tree, key):
        seen.append((tree["a"], tree["d"], [isinstance(tree[name], jax.core.Tracer) for name in "be"]))
        return {"x": tree["e"], "f": tree["a"], "sum": tree["b"].sum(), "key": key, "twice": [tree["b"], tree["b"]]}

    found = recompute(formula, tree, KEY)
    assert seen == [("relu", 3, [True, True])]
    assert (found["x"] is tree["e"], found["f"], found["key"] is KEY) == (True, "relu", True)
    assert all(x is MATRIX for x in found["twice"])
    np.testing.assert_allclose(found["sum"], np.sum(MATRIX), rtol=1e-5)
    error = RuntimeError("odd")

    def failing(tree, key):
        raise error

    with pytest.raises(RuntimeError) as caught:
        recompute(failing, tree, None)
    assert caught.value is error


def test_marks_stand_for_arguments_by_their_place_among_all():
    w, x = array(2), array(3)
    treedef, *marks = mark_same(lambda w, more: {"a": more["x"], "b": w, "c": 5}, w, {"v": 1.5, "x": x})
    assert [mark.content if isinstance(mark, type(treedef)) else mark for mark in marks] == [2, 0, 5]
    assert restore_same([treedef, *marks], "w", {"v": "v", "x": "x"}) == {"a": "x", "b": "w", "c": 5}
