"""Which arrays each stage takes where no ``where`` is given, in models of linen, equinox and haiku."""

import inspect
from dataclasses import replace
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PATTERNS
from errors import raises
from flax import nnx
from grids import mostly_thorough
from jax import Array
from one_array import normal
from public import PUBLIC

import reparax as rpx
from reparax.core.matrices import RowsAndColumns
from reparax.core.paths import flatten_with_names, path_text

X = np.ones((1, 3, 6), np.float32)

# Stages -----------------------------------------------------------------------------------------------------------

OF_ALL = [
    rpx.VarNoise(0.1),
    rpx.quantized.Cast("bfloat16"),
    rpx.Freeze(),
    rpx.numbers.Scale(2.0),
    rpx.Positive(outside="unchecked"),
    rpx.numbers.Bounded(-9.0, 9.0),
    rpx.numbers.Elementwise(jnp.sinh, jnp.arcsinh),
    rpx.numbers.Simplex(along=-1, outside="unchecked"),
    rpx.Gaussian(),
]

OF_KERNELS = [
    rpx.WeightNorm(axis=-1),
    rpx.SpectralNorm(columns=-1),
    rpx.norms.WeightStandardization(axis=-1),
    rpx.norms.MaxNorm(1.0, axis=-1),
    rpx.norms.Sphere(along=-1),
    rpx.norms.PoincareBall(along=-1),
    rpx.WeightDropout(0.5),
    rpx.Mask(),
    rpx.sparse.NByM(1, 3, along=-1),
    rpx.MagnitudePruning(0.5),
    rpx.sparse.RandomPruning(0.5),
    rpx.sparse.RigL(0.5),
    rpx.sparse.SET(0.5),
    rpx.sparse.GlobalMagnitudePruning(0.5),
    rpx.noise.VariationalDropout(),
    rpx.noise.HardConcrete(),
    rpx.adapters.Delta(),
    rpx.adapters.TrainableSlices((0,)),
    rpx.adapters.Hadamard(),
    rpx.adapters.Gain(),
    rpx.Quantized("int8"),
    rpx.FakeQuantized("int8"),
]

OF_MATRICES_OF_SEVERAL_ROWS_AND_COLUMNS = [
    rpx.LoRA(2),
    rpx.adapters.VeRA(2),
    rpx.adapters.Rotated(2),
    rpx.LowRank(2),
    rpx.matrices.FixedRank(2),
    rpx.Orthogonal(),
    rpx.matrices.Stiefel(),
    rpx.matrices.SpecialOrthogonal(),
    rpx.matrices.AlmostOrthogonal(),
    rpx.matrices.Invertible(),
    rpx.matrices.SpecialLinear(),
]

OF_ONE_ROW_AND_COLUMN = [
    rpx.matrices.Kronecker((2, 2)),
    rpx.matrices.BlockDiagonal(2),
    *PATTERNS,
    rpx.matrices.PositiveDefinite(),
]

OF_MATRICES = [
    *OF_MATRICES_OF_SEVERAL_ROWS_AND_COLUMNS,
    *OF_ONE_ROW_AND_COLUMN,
    rpx.matrices.PositiveSemidefinite(),  # of as many rows as columns, however many
]

OF_TALL_MATRICES = [rpx.matrices.Grassmann()]

OF_OTHERS = {rpx.shared.CudnnLSTM, rpx.matrices.Fibration}  # of one size, of functions
NO_STAGES = {rpx.stage.Constraint, rpx.stage.Joint, rpx.Perturbation, rpx.Reparametrization}


def test_each_public_stage_with_a_default_is_tested_here() -> None:
    stages = {x for x in PUBLIC.values() if inspect.isclass(x) and "where" in getattr(x, "__match_args__", ())}
    stages |= {x for x in PUBLIC.values() if inspect.isclass(x) and hasattr(x, "min_ndim")}
    tested = [type(stage) for stage in (*OF_ALL, *OF_KERNELS, *OF_MATRICES, *OF_TALL_MATRICES)]
    assert len(tested) == len(set(tested))
    assert stages - NO_STAGES == {*tested, *OF_OTHERS}
    of_matrices = {x for x in stages if issubclass(x, RowsAndColumns)}
    assert of_matrices == set(map(type, OF_MATRICES + OF_TALL_MATRICES))


NAMES = "a name determines the axes only of an array of two axes called 'kernel' or 'w'"
OTHERWISE = (
    "Or let reparax find them in your loss, `p = p.with_axes(rpx.roles(loss, params, batch))`, or leave the array out "
    "with `where`."
)

# Models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer, as the body of a scan."""

    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(6, name="mlp")(nn.LayerNorm(name="mlp_norm")(x)), None


def linen_attention() -> Any:
    return nn.MultiHeadDotProductAttention(2, normalize_qk=True).init(jax.random.key(0), X)["params"]


def linen_blocks() -> Any:
    layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return layers().init(jax.random.key(0), X, None)["params"]


def equinox_blocks() -> Any:
    def block(key: Array) -> Any:
        return {"norm": eqx.nn.LayerNorm(6), "linear": eqx.nn.Linear(6, 6, key=key)}

    return eqx.filter_vmap(block)(jax.random.split(jax.random.key(0), 3))


def haiku_layers() -> Any:
    layers = hk.transform(lambda x: hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Linear(6)(x)))
    return layers.init(jax.random.key(0), X)


FLAX_ATTENTION = {
    "key/bias": (2, 3),
    "key/kernel": (6, 2, 3),
    "key_ln/scale": (3,),
    "out/bias": (6,),
    "out/kernel": (2, 3, 6),
    "query/bias": (2, 3),
    "query/kernel": (6, 2, 3),
    "query_ln/scale": (3,),
    "value/bias": (2, 3),
    "value/kernel": (6, 2, 3),
}

MODELS = {
    "linen attention": linen_attention,
    "scanned linen blocks": linen_blocks,
    "scanned equinox blocks": equinox_blocks,
    "haiku layers": haiku_layers,
}

ARRAYS = {
    "linen attention": FLAX_ATTENTION,
    "scanned linen blocks": {
        "attention/key/bias": (3, 2, 3),
        "attention/key/kernel": (3, 6, 2, 3),
        "attention/out/bias": (3, 6),
        "attention/out/kernel": (3, 2, 3, 6),
        "attention/query/bias": (3, 2, 3),
        "attention/query/kernel": (3, 6, 2, 3),
        "attention/value/bias": (3, 2, 3),
        "attention/value/kernel": (3, 6, 2, 3),
        "mlp/bias": (3, 6),
        "mlp/kernel": (3, 6, 6),
        "mlp_norm/bias": (3, 6),
        "mlp_norm/scale": (3, 6),
        "norm/bias": (3, 6),
        "norm/scale": (3, 6),
    },
    "scanned equinox blocks": {
        "linear/bias": (3, 6),
        "linear/weight": (3, 6, 6),
        "norm/bias": (3, 6),
        "norm/weight": (3, 6),
    },
    "haiku layers": {"layer_norm/offset": (6,), "layer_norm/scale": (6,), "linear/b": (6,), "linear/w": (6, 6)},
}

FLAX_KERNELS = ["key/kernel", "out/kernel", "query/kernel", "value/kernel"]

KERNELS = {
    "linen attention": FLAX_KERNELS,
    "scanned linen blocks": [*[f"attention/{path}" for path in FLAX_KERNELS], "mlp/kernel"],
    "scanned equinox blocks": ["linear/weight"],
    "haiku layers": ["linear/w"],
}


class Made(dict[str, Any]):
    """Models of random numbers, each traced when it is asked for: paths and types say which arrays a stage takes."""

    def __missing__(self, name: str) -> Any:
        return self.setdefault(name, jax.tree.map(drawn, eqx.filter_eval_shape(MODELS[name])))


def drawn(x: Any) -> Any:
    """Numbers for a type; what is none stays."""
    return jnp.asarray(normal(*x.shape, dtype=x.dtype)) if isinstance(x, jax.ShapeDtypeStruct) else x


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return Made()


def taken(stage: rpx.Parametrization, params: Any) -> list[str]:
    """The paths on which a stage acts."""
    types = eqx.filter_eval_shape(lambda: params)  # so that nothing is computed
    return sorted({row.path for row in rpx.summary(stage, types).rows if row.stages})


def of_layers(stage: Any, name: str) -> Any:
    """The stage for the layers of a model, which may be stacked; what ranks arrays together is not."""
    return (
        replace(stage, stacked=0)
        if name.startswith("scanned") and type(stage) is not rpx.sparse.GlobalMagnitudePruning
        else stage
    )


# Tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_the_arrays_of_the_models(models: dict[str, Any], name: str) -> None:
    paths, leaves, _ = flatten_with_names(models[name])
    assert {path_text(path): x.shape for path, x in zip(paths, leaves, strict=True) if eqx.is_array(x)} == ARRAYS[name]


@pytest.mark.parametrize("stage", OF_ALL, ids=repr)
@pytest.mark.parametrize("name", mostly_thorough(MODELS, "scanned equinox blocks", "haiku layers"))
def test_noise_casts_and_maps_of_numbers_take_all_arrays(models: dict[str, Any], name: str, stage: Any) -> None:
    assert taken(stage, models[name]) == list(ARRAYS[name])
    assert taken(of_layers(stage, name), models[name]) == list(ARRAYS[name])


@pytest.mark.parametrize("stage", OF_KERNELS, ids=repr)
@pytest.mark.parametrize(
    "name", mostly_thorough([name for name in MODELS if name != "scanned equinox blocks"], "haiku layers")
)
def test_norms_dropout_masks_and_prunings_take_kernels(models: dict[str, Any], name: str, stage: Any) -> None:
    assert taken(of_layers(stage, name), models[name]) == KERNELS[name]


@pytest.mark.parametrize(
    "stage",
    mostly_thorough(
        OF_KERNELS,
        rpx.WeightNorm(axis=-1),
        rpx.WeightDropout(0.5),
        rpx.MagnitudePruning(0.5),
        rpx.sparse.GlobalMagnitudePruning(0.5),
    ),
    ids=repr,
)
def test_biases_and_scales_of_scanned_layers_are_left_alone_without_stacked_too(
    models: dict[str, Any], stage: Any
) -> None:
    assert taken(stage, models["scanned linen blocks"]) == KERNELS["scanned linen blocks"]


@pytest.mark.parametrize("stage", OF_KERNELS, ids=repr)
def test_a_scale_that_is_called_weight_is_known_by_its_class_and_else_by_its_dimensions(
    models: dict[str, Any], stage: Any
) -> None:
    model = models["scanned equinox blocks"]
    assert taken(stage, model) == ["linear/weight"]
    params = {name: {"weight": layer.weight, "bias": layer.bias} for name, layer in model.items()}
    assert taken(stage, params) == ["linear/weight", "norm/weight"]
    if type(stage) is not rpx.sparse.GlobalMagnitudePruning:
        assert taken(replace(stage, stacked=0), params) == ["linear/weight"]


@pytest.mark.parametrize("stage", OF_MATRICES, ids=repr)
@pytest.mark.parametrize("name", mostly_thorough(["scanned equinox blocks", "haiku layers"], "haiku layers"))
def test_stages_of_matrices_take_matrices(models: dict[str, Any], name: str, stage: Any) -> None:
    assert taken(of_layers(stage, name), models[name]) == KERNELS[name]


@pytest.mark.parametrize("stage", OF_TALL_MATRICES, ids=repr)
def test_stages_of_tall_matrices_take_kernels_too(stage: Any) -> None:
    params = jax.tree.map(jnp.zeros, {"out": {"kernel": (6, 4), "bias": (4,)}}, is_leaf=lambda x: isinstance(x, tuple))
    assert taken(stage, params) == ["out/kernel"]


@pytest.mark.parametrize("stage", OF_MATRICES + OF_TALL_MATRICES, ids=repr)
def test_stages_of_matrices_ask_for_rows_and_columns_of_attention(models: dict[str, Any], stage: Any):
    last, middle, heads, first, stack = (replace(stage, columns=columns) for columns in (-1, -2, (-2, -1), -3, -1))
    error = (
        f"{stage!r}.init at 'key/kernel': cannot determine which axes of an array of shape (6, 2, 3) are inputs and "
        f"which are outputs: {NAMES}. Write {last!r} for "
        f"(width, in, out) of a convolution or (heads, dim, out) of attention; or {middle!r} for (width, out, in) of a "
        f"transposed convolution; or {heads!r} for (in, heads, dim) of attention; or {first!r} for (out, in, width), "
        f"as in torch and equinox; or {replace(stack, stacked=0)!r} for a stack of (in, out). {OTHERWISE}"
    )
    with raises(ValueError, error):
        stage.init(models["linen attention"], jax.random.key(0))


@pytest.mark.parametrize(
    "stage",
    mostly_thorough(OF_MATRICES_OF_SEVERAL_ROWS_AND_COLUMNS, rpx.LoRA(2), rpx.LowRank(2), rpx.Orthogonal()),
    ids=repr,
)
def test_stages_of_matrices_take_attention_with_rows_and_columns(models: dict[str, Any], stage: Any) -> None:
    inner = replace(stage, rows=0, columns=(1, 2), where=rpx.all_but("out/.*"))
    outer = replace(stage, rows=(0, 1), columns=2, where=rpx.all_but("(query|key|value)/.*"))
    assert taken(inner, models["linen attention"]) == ["key/kernel", "query/kernel", "value/kernel"]
    assert taken(outer, models["linen attention"]) == ["out/kernel"]
    stacked = replace(stage, stacked=0, rows=0, columns=(1, 2), where=rpx.all_but(".*/out/.*", "mlp/.*"))
    assert taken(stacked, models["scanned linen blocks"]) == [
        f"attention/{x}/kernel" for x in ("key", "query", "value")
    ]
    mlp = replace(stage, stacked=0, where=rpx.all_but("attention/.*"))
    assert taken(mlp, models["scanned linen blocks"]) == ["mlp/kernel"]


@pytest.mark.parametrize("stage", OF_ONE_ROW_AND_COLUMN, ids=repr)
def test_other_stages_of_matrices_take_matrices_alone(models: dict[str, Any], stage: Any) -> None:
    heads = replace(stage, rows=0, columns=(1, 2))
    error = (
        f"{heads!r}.init at 'key/kernel': expected one axis as rows and one as columns, got rows=0 and columns=(1, 2) "
        "of shape (6, 2, 3). Leave the array out with `where`, or reshape it."
    )
    with raises(ValueError, error):
        heads.init(models["linen attention"])


def assert_same_but(paths: list[str], got: Any, want: Any) -> None:
    """That the arrays of two trees are the same, but at some paths, where none of them are."""
    for path, x, y in zip(*flatten_with_names(want)[:2], flatten_with_names(got)[1], strict=True):
        assert np.array_equal(x, y) == (path_text(path) not in paths), path_text(path)


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (rpx.norms.MaxNorm(1.0), "axis"),
        (rpx.norms.WeightStandardization(), "axis"),
        (rpx.norms.Sphere(), "along"),
        (rpx.norms.PoincareBall(), "along"),
        (rpx.sparse.NByM(1, 3), "along"),
    ],
    ids=repr,
)
def test_an_axis_that_nobody_named_is_that_of_vectors_alone(stage: Any, name: str) -> None:
    w = np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)
    first, last = (replace(stage, **{name: axis}) for axis in (-2, -1))
    of_inputs, of_outputs = (
        (first, last) if name == "along" and type(stage) is not rpx.norms.PoincareBall else (last, first)
    )
    text = (
        f"{stage!r}.init at 'key/table of mine': cannot determine which axes of an array of shape (6, 6) are inputs "
        f"and which are outputs: {NAMES}. Write {of_inputs!r} "
        f"for (in, out); or {of_outputs!r} for (out, in), as in torch and equinox. {OTHERWISE}"
    )
    with raises(ValueError, text):
        stage.init({"key": {"table of mine": w}})
    assert_that_a_vector_has_one_axis(stage, name)


def test_a_name_does_not_say_along_which_axis_distributions_lie() -> None:
    stage = rpx.numbers.Simplex(outside="unchecked")
    first, last = (replace(stage, along=along) for along in (-2, -1))
    w = np.linspace(0.1, 1, 12, dtype=np.float32).reshape(3, 4)
    w /= w.sum(-1, keepdims=True)
    for name in ("w", "kernel", "embedding", "table of mine"):
        text = (
            f"{stage!r}.init at {name!r}: cannot determine which axes of an array of shape (3, 4) are inputs and which "
            f"are outputs: its name does not show whether it is a weight of a network or holds distributions along its "
            f"last axis. Write {last!r} for distributions along its last axis or (out, in), as in torch and equinox; "
            f"or {first!r} for (in, out). {OTHERWISE}"
        )
        with raises(ValueError, text):
            stage.init({name: w})
    layer, table = nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(0)), nnx.Embed(3, 4, rngs=nnx.Rngs(0))
    layer.kernel, table.embedding = nnx.Param(w.T), nnx.Param(w)
    vectors = {"inputs of each output": layer, "rows": table, "alone": w[0]}
    folded = jax.jit(lambda vectors: stage.fold(stage.init(vectors)))(vectors)
    for x, y in zip(jax.tree.leaves(folded), jax.tree.leaves(vectors), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)  # exact where sums are one
    roles = rpx.roles(lambda params, x: x @ params["w"], {"w": w.T}, np.ones((1, 4), np.float32))
    assert stage.with_axes(roles) == first
    assert_that_a_vector_has_one_axis(stage, "along")


def assert_that_a_vector_has_one_axis(stage: Any, name: str) -> None:
    """That methods on arrays refuse a matrix where no axis is given, and take a vector."""
    last = replace(stage, **{name: -1})
    w = np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)
    text = (
        f"expected a vector, because {name} is not given, but got an array of shape (6, 6). Give {name}, for example "
        f"{name}=-1 for the last axis."
    )
    for method in (stage.project, stage.contains):
        with raises(ValueError, f"{stage!r}.{method.__name__}: {text}"):
            method(w)
    with raises(ValueError, f"{stage!r}.sample: {text}"):
        stage.sample(jax.random.key(0), (6, 6))
    drawn, wanted = jax.jit(lambda key: [each.sample(key, (6,)) for each in (stage, last)])(jax.random.key(0))
    assert drawn.tolist() == wanted.tolist()


def test_what_is_taken_is_changed_and_the_rest_is_not(models: dict[str, Any]) -> None:
    params, key = models["haiku layers"], jax.random.key(0)
    assert_same_but(KERNELS["haiku layers"], jax.jit(rpx.WeightDropout(0.5).apply)(params, key), params)
    assert_same_but(list(ARRAYS["haiku layers"]), jax.jit(rpx.VarNoise(0.1).apply)(params, key), params)
    raw = jax.eval_shape(rpx.SpectralNorm(columns=-1).init, models["linen attention"], key)
    markers = {
        path_text(path).partition("/@")[0]
        for path in flatten_with_names(raw)[0]
        if any(name[0] == "@" for name in path)
    }
    assert markers == set(FLAX_KERNELS)


def test_biases_of_attention_are_no_matrices(models: dict[str, Any]) -> None:
    params, heads = models["linen attention"], {"rows": 0, "columns": (1, 2), "where": rpx.all_but("out/.*")}
    params = {**params, "query": {**params["query"], "bias": jnp.asarray(np.zeros((2, 3), np.float32))}}
    for p in (rpx.norms.Sphere(along=-1), rpx.Orthogonal(**heads), rpx.SpectralNorm(columns=-1)):

        @jax.jit
        def bias(by: float, p: rpx.Parametrization = p) -> Array:
            moved = p.init(params)
            moved["query"]["bias"] += by
            return p.fold(p.update(moved))["query"]["bias"]

        for by in (0.0, 1e-6):
            np.testing.assert_array_equal(bias(by), np.full((2, 3), by, np.float32))


class FirstRow(rpx.Reparametrization):
    """The effective array has another shape than the raw value, and than the model's array."""

    min_ndim, changes_type = 2, True

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values):
        return values["x"][0]


@pytest.mark.parametrize("where", [None, "w", rpx.all_but("b"), rpx.stage.selected({"w": True})], ids=repr)
def test_a_stage_that_changes_the_shape_takes_its_own_arrays_again(where):
    p, w = FirstRow(where=where), np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = p.init({"w": w, "b": w[0]})
    np.testing.assert_array_equal(p.apply(raw)["w"], w[0])
    noisy = p >> rpx.VarNoise(0.1, where="w")
    assert noisy.apply(noisy.init({"w": w, "b": w[0]}), jax.random.key(0))["w"].shape == (3,)


class Tied(nnx.Module):
    """A table that is the kernel of another layer too, whose path comes first."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.out, self.table = nnx.Linear(4, 4, use_bias=False, rngs=rngs), nnx.Embed(4, 4, rngs=rngs)
        self.out.kernel = self.table.embedding


def tied() -> eqx.nn.Shared:
    """The same in equinox."""
    key = jax.random.key(0)
    pair = eqx.nn.Embedding(4, 4, key=key), eqx.nn.Linear(4, 4, use_bias=False, key=key)
    return eqx.nn.Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)


@pytest.mark.parametrize("stage", [rpx.Quantized("int8"), rpx.WeightNorm(), rpx.LoRA(2)], ids=repr)
def test_a_table_is_left_out_if_another_layer_reads_it_too(stage: Any) -> None:
    for init in (
        lambda: stage.init(tied(), jax.random.key(0)),
        lambda: rpx.nnx.Parametrized(Tied(), stage, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ValueError, match="selects nothing: its default selects none of the 1 arrays"):
            init()


def test_beside_the_params_of_linen_are_parameters_and_in_other_collections_is_state():
    def frozen(variables):
        return {name for name, x in rpx.Freeze().init(variables).items() if rpx.is_parametrized(x)}

    variables = {"params": {"w": X}, "temperature": X, "cache": {"key": X}, "deep": {"batch_stats": {"mean": X}}}
    assert frozen(variables) == {"params", "temperature"}
    del variables["params"]
    assert frozen(variables) == {"temperature", "cache"}
