"""The dtypes of raw values, as the docstrings have them, and effective arrays in the dtype of the weights."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from one_array import normal

import reparax as rpx
from reparax.core import roles

# Of each stage the raw values in the dtype of the weights, those in float32 or its complex numbers, those in float32,
# and those in the real dtype of the weights. A stage without complex weights has a ``*``.
STAGES = [
    (rpx.adapters.Delta(), "x w", "", "", ""),
    (rpx.adapters.Hadamard(), "x y", "", "", ""),
    (rpx.adapters.Gain(axis=-1), "w", "", "g", ""),
    (rpx.adapters.TrainableSlices((0, 2)), "x w", "", "", ""),
    (rpx.adapters.Rotated(2), "r w", "", "", ""),
    (rpx.LoRA(2), "a b w", "", "", ""),
    (rpx.LoRA(2, 4.0, init_weights="gaussian"), "a b w", "", "", ""),
    (rpx.LoRA(2, 4.0, init_weights="pissa"), "a b w", "", "", ""),
    (rpx.LoRA(2, 4.0, init_weights="olora"), "a b w", "", "", ""),
    (rpx.adapters.VeRA(3), "d b w", "", "", ""),
    (rpx.WeightNorm(), "v", "", "g", ""),
    (rpx.WeightNorm(detach=True), "v", "", "g", ""),
    (rpx.norms.WeightStandardization(), "v", "", "", ""),
    (rpx.norms.Sphere(), "v", "", "", ""),
    (rpx.norms.MaxNorm(1.0), "v", "", "", ""),
    (rpx.norms.PoincareBall(), "v", "", "", "*"),
    (rpx.SpectralNorm(), "w", "u v", "", ""),
    (rpx.Orthogonal(), "x", "base", "", ""),
    (rpx.Orthogonal("householder"), "x", "base", "", "*"),
    (rpx.matrices.SpecialOrthogonal(), "x", "base", "", "*"),
    (rpx.matrices.Grassmann("expm"), "x", "base", "", ""),
    (rpx.LowRank(2), "u v", "", "", ""),
    (rpx.matrices.Kronecker((2, 1)), "a b", "", "", ""),
    (rpx.matrices.FixedRank(2), "u v", "base_u base_v", "", "s"),
    (rpx.matrices.Invertible(), "u v", "base_u base_v", "", "s"),
    (rpx.matrices.SpecialLinear(), "u v s", "base_u base_v", "", "*"),
    (rpx.matrices.AlmostOrthogonal(), "u v", "base_u base_v", "", "s"),
    (rpx.matrices.Symmetric(), "x", "", "", ""),
    (rpx.matrices.Skew(), "x", "", "", ""),
    (rpx.matrices.Triangular(unit_diagonal=True), "x", "", "", ""),
    (rpx.matrices.Diagonal(), "x", "", "", ""),
    (rpx.matrices.BlockDiagonal(2), "x", "", "", ""),
    (rpx.matrices.PositiveDefinite(), "x", "", "", "*"),
    (rpx.matrices.PositiveDefinite("expm"), "x", "", "", "*"),
    (rpx.matrices.PositiveSemidefinite(2), "x", "", "", ""),
    (rpx.VarNoise(0.1, relative="max"), "w", "", "", ""),
    (rpx.VarNoise(0.1, relative="std", axis=0), "w", "", "", ""),
    (rpx.VarNoise(0.1, relative="norm"), "w", "", "", ""),
    (rpx.WeightDropout(0.1), "w", "", "", ""),
    (rpx.Gaussian(), "mean", "", "rho", ""),
    (rpx.Gaussian(axis=-1, noise="factorized"), "mean", "", "rho", ""),
    (rpx.noise.VariationalDropout(), "theta mask", "", "log_var", "*"),
    (rpx.noise.HardConcrete(), "w", "", "log_alpha mask", ""),
    (rpx.Positive(), "x", "", "", "*"),
    (rpx.Positive("square"), "x", "", "", "*"),
    (rpx.numbers.Bounded(0, 1), "x", "", "", "*"),
    (rpx.numbers.Scale(2.0), "x", "", "", ""),
    (rpx.numbers.Simplex(along=0), "x", "", "", "*"),
    (rpx.numbers.Elementwise(jnp.tanh, jnp.arctanh), "x", "", "", ""),
    (rpx.Freeze(), "w", "", "", ""),
    (rpx.Mask(), "w", "", "", "mask"),
    (rpx.sparse.NByM(1, 2), "w", "", "", "mask"),
    (rpx.MagnitudePruning(0.5), "w", "", "", "mask"),
    (rpx.MagnitudePruning(0.5, axis=-1, ord=3), "w", "", "", "mask"),
    (rpx.sparse.RandomPruning(0.5, axis=0), "w", "", "", "mask"),
    (rpx.sparse.RigL(0.5), "w", "", "", "mask"),
    (rpx.sparse.SET(0.5), "w", "", "", "mask"),
    (rpx.sparse.GlobalMagnitudePruning(0.5), "w", "", "", "mask"),
    (rpx.FakeQuantized("int4", step="learned"), "w", "", "step", "*"),
    (rpx.FakeQuantized("ternary"), "w", "", "", "*"),
    (rpx.FakeQuantized("nvfp4"), "w", "", "", "*"),
]
KEY = jax.random.key(0)


def dtypes(raw):
    """The dtype of each raw value by its name."""
    leaves = jax.tree_util.tree_leaves_with_path(raw)
    return {jax.tree_util.keystr(path[-1:], simple=True): x.dtype.name for path, x in leaves}


ARITHMETIC = {
    "add",
    "sub",
    "mul",
    "div",
    "exp",
    "log",
    "sqrt",
    "tanh",
    "dot_general",
    "reduce_sum",
    "cumsum",
    "scatter-add",
}
ROUNDED_ONCE = ("Hadamard", "WeightNorm", "WeightStandardization", "Skew", "Triangular")
"""Stages with one product or sum that is exact or rounded at once, or with numbers that may be any."""


def computed(jaxpr):
    """The operations of a program, those of the programs in it too, that compute in half precision."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ARITHMETIC and any(x.aval.dtype == jnp.bfloat16 for x in equation.outvars):
            yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from computed(inner)


def shape(p):
    return (4, 2) if type(p) is rpx.matrices.Grassmann else (4, 4)


@pytest.mark.parametrize(("p", "same", "wide", "single", "real"), STAGES, ids=[repr(row[0]) for row in STAGES])
def test_raw_values_have_their_dtypes_and_half_precision_is_computed_in_single(p, same, wide, single, real):
    def stepped(w):
        raw = p.init({"w": w}, KEY)
        return raw, p.update(raw, KEY, {"w": w}), p.apply(raw, KEY), p.fold(raw)

    for dtype, wider, part in (("bfloat16", "float32", "bfloat16"), ("complex64", "complex64", "float32")):
        if dtype == "complex64" and real == "*":
            continue
        groups = {same: dtype, wide: wider, single: "float32", real.replace("*", ""): part}
        w = jax.ShapeDtypeStruct(shape(p), dtype)
        program, (raw, updated, *effective) = jax.make_jaxpr(stepped, return_shape=True)(w)
        assert dtypes(raw) == {name: held for names, held in groups.items() for name in names.split()}
        assert updated == raw
        assert effective == [{"w": w}] * 2
        assert type(p).__name__ in ROUNDED_ONCE or not list(computed(program.jaxpr))


@pytest.mark.parametrize("p", [row[0] for row in STAGES], ids=repr)
def test_trained_values_may_have_less_precision_than_the_others(p):
    chain = rpx.quantized.Cast("bfloat16") >> p
    jax.eval_shape(lambda w: chain.apply(chain.init({"w": w}, KEY), KEY), normal(*shape(p)))


SELECTED = {
    "kernel": [
        rpx.LoRA(2),
        rpx.adapters.VeRA(2),
        rpx.WeightNorm(),
        rpx.norms.WeightStandardization(),
        rpx.norms.MaxNorm(1.0),
        rpx.SpectralNorm(),
        rpx.sparse.NByM(1, 2),
        rpx.Quantized("int8"),
    ],
    "embedding kernel": [
        rpx.adapters.Delta(),
        rpx.adapters.Hadamard(),
        rpx.adapters.Gain(),
        rpx.adapters.TrainableSlices((0,)),
        rpx.adapters.Rotated(2),
        rpx.WeightNorm(axis=-1),
        rpx.norms.MaxNorm(1.0, axis=0),
        rpx.norms.WeightStandardization(axis=None),
        rpx.norms.Sphere(),
        rpx.norms.PoincareBall(),
        rpx.SpectralNorm(columns=-1),
        rpx.SpectralNorm(rows=0),
        rpx.Orthogonal(),
        rpx.LowRank(1),
        rpx.matrices.Symmetric(),
        rpx.matrices.PositiveDefinite(),
        rpx.noise.VariationalDropout(),
        rpx.noise.HardConcrete(),
        rpx.Mask(),
        rpx.sparse.NByM(1, 2, along=0),
        rpx.MagnitudePruning(0.5),
        rpx.sparse.SET(0.5),
        rpx.sparse.GlobalMagnitudePruning(0.5),
        rpx.FakeQuantized("int4", step="learned"),
    ],
    "bias embedding kernel": [rpx.numbers.Simplex(along=-1), rpx.Gaussian(noise="factorized", where=".*[^r]")],
    "bias embedding kernel scalar": [
        rpx.Gaussian(),
        rpx.Positive(),
        rpx.numbers.Bounded(0, 1),
        rpx.numbers.Scale(2.0),
        rpx.numbers.Elementwise(jnp.tanh, jnp.arctanh),
        rpx.Freeze(),
    ],
}


@pytest.mark.parametrize(("selected", "p"), [(row, p) for row, stages in SELECTED.items() for p in stages], ids=repr)
def test_by_default_a_stage_selects_these_arrays(selected, p):
    shapes = {"bias": (4,), "embedding": (4, 4), "kernel": (4, 4), "scalar": ()}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    raw = jax.eval_shape(p.init, params, KEY)
    assert [name for name, node in raw.items() if isinstance(node, dict)] == selected.split()


def test_dropout_leaves_vectors_and_tables_of_whole_numbers_alone():
    params = {"bias": jnp.zeros(2), "kernel": jnp.zeros((2, 2)), "whole": jnp.zeros((2, 2), int)}
    program = jax.make_jaxpr(rpx.WeightDropout(0.5).apply)(params, KEY).jaxpr
    assert [out in program.invars for out in program.outvars] == [True, False, True]


@pytest.mark.parametrize(
    ("p", "ndim", "axes"),
    [
        (rpx.WeightNorm(axis=(0, -1)), 3, {"axis": ((0, 2), roles.OUTPUTS)}),
        (rpx.WeightNorm(axis=None), 3, {}),
        (rpx.norms.Sphere(along=-2), 3, {"along": ((1,), roles.VECTORS)}),
        (rpx.norms.PoincareBall(along=1), 2, {"along": ((1,), roles.OUTPUTS)}),
        (rpx.numbers.Simplex(along=0), 2, {"along": ((0,), roles.VECTORS)}),
        (rpx.sparse.NByM(1, 2, along=0), 2, {"along": ((0,), roles.CHANNELS)}),
        (rpx.adapters.TrainableSlices((0,), axis=1), 2, {"axis": ((1,), roles.INPUTS)}),
        (rpx.SpectralNorm(columns=(2, 1)), 3, {"columns": ((1, 2), roles.OUTPUTS)}),
        (rpx.SpectralNorm(columns=-1, input_shape=8), 3, {}),
        (rpx.Quantized("int8", axis=-1), 2, {}),
        (rpx.Quantized("int8", block_size=(2, 2)), 2, {}),
        (rpx.Quantized("int8", block_size=4), 2, {"axis": ((1,), roles.UNCUT)}),
        (rpx.Quantized("mxfp4"), 2, {"axis": ((1,), roles.UNCUT)}),
        (rpx.Quantized("int8", axis=(3, 0, 1), block_size=4), 4, {"axis": ((0, 1, 3), roles.UNCUT)}),
    ],
    ids=repr,
)
def test_the_axes_in_use_have_a_meaning_in_a_network(p, ndim, axes):
    assert p.axes_in_use(jax.ShapeDtypeStruct((4,) * ndim, jnp.float32)) == axes


BY_STACKS = [
    rpx.adapters.Gain(),
    rpx.LoRA(2),
    rpx.WeightNorm(),
    rpx.norms.Sphere(along=None),
    rpx.SpectralNorm(),
    rpx.Orthogonal(),
    rpx.LowRank(2),
    rpx.matrices.Symmetric(),
    rpx.VarNoise(0.1, relative="max"),
    rpx.MagnitudePruning(0.5),
    rpx.sparse.RigL(0.5),
    rpx.sparse.NByM(1, 2),
    rpx.Quantized("int8"),
    rpx.FakeQuantized("ternary"),
]
BY_NUMBERS = [
    rpx.adapters.Delta(),
    rpx.adapters.Hadamard(),
    rpx.VarNoise(0.1),
    rpx.WeightDropout(0.5),
    rpx.Gaussian(),
    rpx.noise.VariationalDropout(),
    rpx.noise.HardConcrete(),
    rpx.Positive(),
    rpx.numbers.Scale(2.0),
    rpx.Freeze(),
    rpx.Mask(),
    rpx.quantized.Cast("bfloat16"),
]


@pytest.mark.parametrize("p", [*BY_STACKS, *BY_NUMBERS], ids=repr)
def test_a_stage_on_single_numbers_needs_no_stacked_axes_of_the_network(p):
    assert p.takes_stacked_from_role is (p in BY_STACKS)


@pytest.mark.parametrize(
    ("p", "elementwise"),
    [
        (rpx.VarNoise(0.1, relative="std"), False),
        (rpx.WeightDropout(0.1, broadcast_dims=0), False),
        (rpx.Gaussian(axis=0), False),
        (rpx.noise.HardConcrete(axis=0), False),
        (rpx.VarNoise(0.1), True),
        (rpx.WeightDropout(0.1), True),
        (rpx.Gaussian(), True),
        (rpx.noise.HardConcrete(), True),
    ],
    ids=repr,
)
def test_a_stage_with_axes_acts_on_more_than_single_numbers(p, elementwise):
    assert p.elementwise is elementwise
