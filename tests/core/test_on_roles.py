"""Chains on the roles of a network: axes by words, and what stages mean where nobody set an axis."""

import functools
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, table
from grids import mostly_thorough
from one_array import normal

import reparax as rpx

X = normal(5, 4, seed=1)
PARAMS = {
    "embed": normal(10, 4, seed=2),
    "layers": {"kernel": normal(3, 4, 4, seed=3), "bias": normal(3, 4, seed=4)},
    "query": normal(4, 2, 3, seed=5),
    "out": normal(2, 3, 4, seed=6),
    "scale": normal(4, seed=7),
}


def network(params, tokens):
    """A table, scanned layers of the shape (out, in), a query (in, heads, dim), and an output (heads, dim, out)."""

    def layer(x, held):
        return jnp.tanh(x @ held["kernel"].T + held["bias"][None]), None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    heads = jnp.einsum("bd,dhk->bhk", x * params["scale"][None], params["query"])
    return jnp.einsum("bhk,hkd->bd", jnp.tanh(heads), params["out"])


ROLES = rpx.roles(network, PARAMS, np.arange(7, dtype=np.int32))


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (
            rpx.WeightNorm(),
            "WeightNorm(axis={'embed|out': -1, 'layers/kernel': -2, 'query': (-2, -1)}, "
            "stacked={'embed|out|query': (), 'layers/kernel': 0})",
        ),
        (rpx.WeightNorm(where="out|query"), "WeightNorm(axis={'out': -1, 'query': (-2, -1)}, where='out|query')"),
        (rpx.WeightNorm(axis=0), "WeightNorm(axis=0)"),
        (rpx.WeightNorm(axis=None), "WeightNorm(axis=None, stacked={'embed|out|query': (), 'layers/kernel': 0})"),
        (rpx.WeightNorm(axis="inputs", where="out"), "WeightNorm(axis=(-3, -2), where='out')"),
        (rpx.WeightNorm(axis=None, where="out"), "WeightNorm(axis=None, where='out')"),
        (rpx.SpectralNorm(where="lay.*nel"), "SpectralNorm(columns=-2, where='lay.*nel', stacked=0)"),
        (
            rpx.WeightNorm(axis=-1, stacked="stacked", where="lay.*nel"),
            "WeightNorm(axis=-1, where='lay.*nel', stacked=0)",
        ),
        (rpx.LoRA(2, where="query"), "LoRA(2, columns=(-2, -1), where='query')"),
        (rpx.LoRA(2, rows=0, where="query"), "LoRA(2, rows=0, where='query')"),
        (rpx.Quantized("int4", block_size=4, where="embed"), "Quantized('int4', axis=-1, block_size=4, where='embed')"),
        (rpx.Quantized("mxfp4", where="lay.*nel"), "Quantized('mxfp4', axis=-2, where='lay.*nel', stacked=0)"),
        (rpx.Quantized("int8", where="out"), "Quantized('int8', where='out')"),
        (
            rpx.Quantized("int8", block_size=3, where="out"),
            "Quantized('int8', axis=(-3, -1), block_size=3, where='out')",
        ),
        (rpx.norms.Sphere(where="query"), "Sphere(along=-3, where='query')"),
        (rpx.norms.Sphere(where="embed"), "Sphere(along=-1, where='embed')"),  # the rows that are looked up
        (rpx.numbers.Simplex(where="embed|query"), "Simplex(along={'embed': -1, 'query': -3}, where='embed|query')"),
        (rpx.Gaussian(), "Gaussian()"),
        (rpx.VarNoise(0.1), "VarNoise(0.1)"),
        (
            rpx.VarNoise(0.1, relative="max", where="lay.*nel"),
            "VarNoise(0.1, relative='max', where='lay.*nel', stacked=0)",
        ),
        (
            rpx.VarNoise(0.1, relative="std", axis="outputs", where="out|query"),
            "VarNoise(0.1, relative='std', axis={'out': -1, 'query': (-2, -1)}, where='out|query')",
        ),
        (
            rpx.WeightDropout(0.5, broadcast_dims="inputs", where="lay.*nel"),
            "WeightDropout(0.5, broadcast_dims=-1, where='lay.*nel', stacked=0)",
        ),
        (
            rpx.Quantized("int8", axis=("stacked", "outputs"), where="lay.*nel"),
            "Quantized('int8', axis=(-3, -2), where='lay.*nel')",
        ),
        (rpx.WeightNorm(axis={"out": "outputs", "embed": 0}), "WeightNorm(axis={'out': -1, 'embed': 0})"),
        (rpx.Freeze() >> rpx.LoRA(1, where="out"), "Freeze() >> LoRA(1, columns=-1, where='out')"),
        (
            rpx.WeightNorm(where="lay.*nel") >> rpx.LowRank(2, where="lay.*nel"),
            "WeightNorm(axis=-1, where='lay.*nel', stacked=0) >> LowRank(2, columns=-2, where='lay.*nel', stacked=0)",
        ),
        (  # a norm for each column of both factors, which have one path
            rpx.WeightNorm(where="out|query") >> rpx.LowRank(2, where="query"),
            "WeightNorm(axis=-1, where='out|query/@low_rank/u') >> "
            "WeightNorm(axis=(-2, -1), where='query/@low_rank/v') >> LowRank(2, columns=(-2, -1), where='query')",
        ),
        (
            rpx.VarNoise({"query": 0.1, "out": 0.2}, relative="std", axis="outputs", where="out|query")
            >> rpx.LowRank(2, where="query"),
            "VarNoise({'query': 0.1, 'out': 0.2}, relative='std', axis=-1, where='out|query/@low_rank/u') >> "
            "VarNoise({'query': 0.1}, relative='std', axis=(-2, -1), where='query/@low_rank/v') >> "
            "LowRank(2, columns=(-2, -1), where='query')",
        ),
        (rpx.Chain(), "Chain()"),
    ],
    ids=repr,
)
def test_axes_that_nobody_set_and_words_become_numbers(p, text):
    q = p.with_axes(ROLES)
    assert repr(q) == text
    assert rpx.from_json(q.to_json()) == q
    assert q.with_axes(ROLES) == q


def test_a_norm_of_factors_is_that_of_each_column_of_both():
    q = (rpx.WeightNorm(where="query") >> rpx.LowRank(2, where="query")).with_axes(ROLES)
    raw = jax.jit(q.init)(PARAMS)
    u, v = (raw["query"]["@low_rank"][name]["@weight_norm"] for name in "uv")
    np.testing.assert_allclose(u["g"], np.linalg.norm(u["v"], axis=0, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(v["g"], np.linalg.norm(v["v"], axis=0, keepdims=True), rtol=1e-5)
    matrix = np.asarray(PARAMS["query"]).reshape(4, 6)
    left, singular, right = np.linalg.svd(matrix)
    nearest = (left[:, :2] * singular[:2]) @ right[:2]
    np.testing.assert_allclose(np.asarray(q.fold(raw)["query"]).reshape(4, 6), nearest, rtol=1e-4, atol=1e-5)


def test_what_multiplies_rows_that_are_looked_up_is_a_product_by_program_and_by_name():
    params = {"embedding": normal(5, 3)}
    found = rpx.roles(lambda params, tokens: params["embedding"][tokens], params, jnp.arange(4))
    p = rpx.norms.Sphere() >> rpx.LowRank(2)
    q = p.with_axes(found)
    of_u, of_v = (f"Sphere(along={axis}, where='embedding/@low_rank/{name}')" for name, axis in (("u", -1), ("v", -2)))
    assert repr(q) == f"{of_u} >> {of_v} >> LowRank(2, columns=-1)"
    by_program, by_name = (jax.jit(each.fold)(jax.jit(each.init)(params))["embedding"] for each in (q, p))
    np.testing.assert_allclose(by_program, by_name, rtol=1e-6)


def test_functions_among_the_leaves_of_a_model_have_no_roles():
    model = eqx.nn.MLP(4, 2, 3, 1, activation=jnp.tanh, key=jax.random.key(0))  # weights of the shape (out, in)
    roles = rpx.roles(lambda model, x: jax.vmap(model)(x), model, X)
    q = (rpx.LoRA(1) >> rpx.WeightNorm()).with_axes(roles)
    assert repr(q) == "LoRA(1, columns=-2) >> WeightNorm(axis=-2)"
    found = rpx.axes.check_axes(rpx.WeightNorm(axis=0), lambda model, x: jax.vmap(model)(x), model, X)
    assert repr(found) == "All axes fit."
    assert (rpx.LoRA(1) >> rpx.WeightNorm()).with_axes(model) == q  # its classes say the same
    with raises(
        TypeError,
        "WeightNorm().with_axes takes the result of `rpx.roles(loss, params, batch)`, or a model of nnx or equinox, "
        "but got a tree with str at 'w'. Pass that result.",
    ):
        rpx.WeightNorm().with_axes({"w": "outputs"})


def test_experts_are_stacked():
    params = {"w": normal(3, 4, 2), "last": normal(2, 2)}
    found = rpx.roles(
        lambda p, x, sizes: jax.lax.ragged_dot(x, p["w"], sizes) @ p["last"], params, normal(5, 4), jnp.array([1, 2, 2])
    )
    p = (rpx.WeightNorm() >> rpx.LoRA(2)).with_axes(found)
    both = "stacked={'last': (), 'w': 0}"
    assert repr(p) == f"WeightNorm(axis=-1, {both}) >> LoRA(2, columns=-1, {both})"


def test_the_raw_tree_is_that_of_axes_by_hand_and_needs_no_roles():
    q = rpx.WeightNorm().with_axes(ROLES)
    raw = jax.jit(q.init)(PARAMS)
    sizes = jax.tree.map(lambda x: x.shape, {name: node for name, node in raw.items() if name != "scale"})
    assert sizes["layers"]["kernel"]["@weight_norm"]["g"] == (3, 4, 1)
    assert sizes["query"]["@weight_norm"]["g"] == (1, 2, 3)
    assert sizes["out"]["@weight_norm"]["g"] == (1, 1, 4)
    np.testing.assert_allclose(
        np.asarray(raw["layers"]["kernel"]["@weight_norm"]["g"])[..., 0],
        np.linalg.norm(PARAMS["layers"]["kernel"], axis=2),
        rtol=1e-6,
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), jax.jit(q.apply)(raw), PARAMS)
    q.check(raw, PARAMS)
    assert q.raw_paths(PARAMS)["embed"] == "embed"


def test_numbers_in_paths_stand_for_layers_where_all_have_one_answer():
    def deep(params, x):
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["up"].T) @ layer["down"]
        return x

    params = {"layers": [{"up": normal(4, 4, seed=i), "down": normal(4, 4, seed=i + 9)} for i in range(3)]}
    assert repr(rpx.WeightNorm().with_axes(rpx.roles(deep, params, X))) == (
        "WeightNorm(axis={'layers/\\\\d+/down': -1, 'layers/\\\\d+/up': -2})"
    )


LAYER = {"layer": eqx.nn.Linear(4, 3, key=jax.random.key(0)), "w": np.ones((4, 3), np.float32)}
SLICED = rpx.roles(lambda params, x: x @ params["w"].sum(1), {"w": np.ones((4, 3, 2), np.float32)}, X)


HEADS = {"w": normal(8, 4, 3), "a": normal(4, 3), "out": normal(12, 5)}


@functools.cache
def roles_of_heads():
    return rpx.roles(graph_attention, HEADS, np.ones((6, 8), np.float32))


def graph_attention(params, x):
    """A vector for each head, which is no matrix."""
    h = jnp.einsum("nd,dhk->nhk", x, params["w"])
    score = jnp.einsum("nhk,hk->nh", h, params["a"])
    alpha = jax.nn.softmax(score[:, None] + score[None, :], 1)
    return jnp.einsum("nmh,mhk->nhk", alpha, h).reshape(x.shape[0], -1) @ params["out"]


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (rpx.WeightNorm(), "WeightNorm(axis={'out': -1, 'w': (-2, -1)})"),
        (rpx.SpectralNorm(), "SpectralNorm(columns={'out': -1, 'w': (-2, -1)})"),
        (rpx.LoRA(1), "LoRA(1, columns={'out': -1, 'w': (-2, -1)})"),
        (rpx.LoRA(1, where="out"), "LoRA(1, columns=-1, where='out')"),
        (rpx.MagnitudePruning(0.5), "MagnitudePruning(sparsity=0.5, stacked={'out|w': ()})"),
        (rpx.Quantized("int8"), "Quantized('int8', stacked={'out|w': ()})"),
        (rpx.MagnitudePruning({"out": 0.5, "w": 0.1}), "MagnitudePruning(sparsity={'out': 0.5, 'w': 0.1})"),
    ],
    ids=repr,
)
def test_axes_are_written_for_the_arrays_that_the_stage_takes(p, text):
    found = roles_of_heads()
    assert (found["a"].inputs, found["a"].stacked) == ((1,), (0,))
    q = p.with_axes(found)
    assert repr(q) == text
    assert q.with_axes(found) == q
    q.check(jax.eval_shape(q.init, HEADS, jax.random.key(0)), HEADS)


def test_stacked_axes_of_what_where_leaves_out_are_not_written():
    def queries(params, x):
        q = (params["latent"] @ params["q"]).reshape(3, 4, 3)
        return jnp.einsum("lhk,bshk->bhls", q, (x @ params["k"]).reshape(-1, 5, 4, 3))

    params = {"latent": jnp.ones((3, 6)), "q": jnp.ones((6, 12)), "k": jnp.ones((8, 12))}
    found = rpx.roles(queries, params, jnp.ones((2, 5, 8)))
    assert found["q"].stacked
    assert found["q"].ambiguous
    for where in ("k", rpx.stage.selected({"k": True}), lambda path, array: path == "k"):
        assert rpx.LoRA(1, where=where).with_axes(found) == rpx.LoRA(1, columns=-1, where=where)


def test_what_the_network_does_not_say_is_asked_for():
    def tied(params, tokens):
        x = params["embed"][tokens] + params["place"]
        return x @ params["embed"].T

    params = {"embed": jnp.ones((10, 4)), "place": jnp.ones((7, 4))}
    found = rpx.roles(tied, params, jnp.arange(7))
    with raises(
        ValueError,
        "WeightNorm(where='place').with_axes at 'place': no product of the array with data is known "
        f"({found['place'].why}). Give its axes as integers, or leave the array out with `where`.",
    ):
        rpx.WeightNorm(where="place").with_axes(found)
    uses = found["embed"].uses
    with raises(
        ValueError,
        f"WeightNorm(where='embed').with_axes at 'embed': the network uses the array in several ways (inputs (0,) and "
        f"outputs (1,) in {uses[0].line}; inputs (1,) and outputs (0,) in {uses[1].line}). Give its axes as integers, "
        f"or leave the array out with `where`.",
    ):
        rpx.WeightNorm(where="embed").with_axes(found)
    assert rpx.WeightNorm(axis=0, where="embed").with_axes(found) == rpx.WeightNorm(axis=0, where="embed")
    with raises(
        ValueError,
        "Simplex(where='out').with_axes at 'out': along must be one axis, but the network has 2 such axes, (-3, -2), "
        "in the array of shape (2, 3, 4). Give one of them as an integer, or leave the array out with `where`.",
    ):
        rpx.numbers.Simplex(where="out").with_axes(ROLES)
    with raises(
        TypeError,
        "WeightNorm().with_axes takes the result of `rpx.roles(loss, params, batch)`, or a model of nnx or equinox, "
        "but got a tree with ndarray at 'embed'. Pass that result.",
    ):
        rpx.WeightNorm().with_axes(PARAMS)


def test_stages_without_axes_stay_and_fit():
    def forward(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"].T

    params = {"a": normal(4, 2), "b": normal(4, 2)}

    class Both(rpx.stage.Joint):
        def init_leaves(self, arrays):
            return {name: {"x": w} for name, w in arrays.items()}

        def apply_leaves(self, values):
            return {name: held["x"] for name, held in values.items()}

    tie, norm = rpx.Tie({"b": "a"}), rpx.WeightNorm(axis=-1, where="a")
    for p in (tie >> norm, Both() >> norm, Both({"w": "a"}, stacked=0) >> norm, rpx.Freeze() >> norm):
        assert p.with_axes(rpx.roles(forward, params, X)) == p
        assert rpx.axes.check_axes(p, forward, params, X) == ()


def test_a_joint_stage_takes_the_word_for_stacked_axes():
    class Product(rpx.stage.Joint):
        def init_leaves(self, arrays):
            return {name: {"x": w} for name, w in arrays.items()}

        def apply_leaves(self, values):
            return {name: held["x"] for name, held in values.items()}

    together, apart = Product({"w": "layers/kernel"}), Product({"w": "layers/kernel"}, stacked="stacked")
    assert (together.takes_stacked_from_role, apart.takes_stacked_from_role) == (False, True)
    assert (together.with_axes(ROLES).stacked, apart.with_axes(ROLES).stacked) == ((), 0)
    assert Product({"w": "out"}, stacked="stacked").with_axes(ROLES).stacked == ()
    for arrays in ({"w": "layers/kernel", "v": "out"}, {"w": "(layers/kernel|out)"}):  # in one group, and in two
        p = Product(arrays, stacked="stacked")
        with raises(
            ValueError,
            f"{p!r}.with_axes: expected the same stacked axes in all arrays, got {{'layers/kernel': (0,), "
            f"'out': ()}}. Stack the arrays "
            f"along the same axes, or narrow the expressions to layers with equal stacked axes.",
        ):
            p.with_axes(ROLES)


# The same function for (in, out) and for (out, in) ------------------------------------------------------------------

SHAPED = [
    rpx.WeightNorm(),
    rpx.SpectralNorm(),
    rpx.norms.WeightStandardization(),
    rpx.norms.MaxNorm(1.0),
    rpx.norms.Sphere(),
    rpx.norms.PoincareBall(outside="unchecked"),
    rpx.sparse.NByM(2, 4),
    rpx.MagnitudePruning(0.5, axis="inputs"),
    rpx.sparse.RandomPruning(0.5, axis="inputs"),
    rpx.sparse.GlobalMagnitudePruning(0.5),
    rpx.adapters.Gain(axis="outputs"),
    rpx.adapters.TrainableSlices((0, 2)),
    rpx.numbers.Simplex(outside="unchecked"),
    rpx.Gaussian(axis="outputs"),
    rpx.noise.HardConcrete(axis="inputs"),
    rpx.FakeQuantized("int8", axis="outputs"),
    rpx.FakeQuantized("int4", block_size=2),
    rpx.Quantized("int4", block_size=2) >> rpx.LoRA(2),
    rpx.LowRank(2),
    rpx.LoRA(2),
    rpx.WeightNorm() >> rpx.LoRA(2),
    rpx.LowRank(2) >> rpx.WeightNorm(),
    rpx.Orthogonal(),
    rpx.matrices.Kronecker((2, 2)),
    rpx.adapters.VeRA(2),
    rpx.adapters.Rotated(2),
]


def stepper(p, network, w):
    """The weights after a step of gradient descent on raw values, for a chain that takes its axes from the network."""
    q = p.with_axes(rpx.roles(network, {"w": w}, X)).deterministic

    def step(w):
        raw = q.update(q.init({"w": w}, jax.random.key(3)))
        free, fixed = rpx.partition(raw)
        grads = jax.grad(lambda free: jnp.sum(network(q.apply(rpx.combine(free, fixed)), X) ** 2))(free)
        return q.apply(rpx.combine(jax.tree.map(lambda x, g: x - 0.01 * g, free, grads), fixed))["w"]

    return step


def in_out(params, x):
    return x @ params["w"]


def out_in(params, x):
    return x @ params["w"].T


def require_equal_steps(p, w):
    of_rows, of_columns = stepper(p, in_out, w), stepper(p, out_in, w.T)
    one, other = jax.jit(lambda w: (of_rows(w), of_columns(w.T)))(w)
    np.testing.assert_allclose(one, other.T, rtol=2e-4, atol=2e-5)
    return one


@pytest.mark.parametrize(
    "p", mostly_thorough(SHAPED, rpx.WeightNorm(), rpx.SpectralNorm(), rpx.norms.Sphere(), rpx.LoRA(2)), ids=repr
)
def test_a_step_changes_both_layouts_of_a_weight_in_the_same_way(p):
    w = normal(4, 6, seed=8)
    assert not np.allclose(require_equal_steps(p, w), w, atol=1e-4)


# What does not fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "path", "field", "got", "expected"),
    [
        (rpx.WeightNorm(axis=-1), "query", "axis", (-1,), (-2, -1)),  # one norm for all heads
        (rpx.SpectralNorm(columns=-1), "query", "columns", (-1,), (-2, -1)),  # across heads
        (rpx.Quantized("int4", axis=0, block_size=2), "embed", "axis", (-2,), (-1,)),  # blocks along outputs
        (rpx.LoRA(2, columns=-1), "layers/kernel", "stacked", (), (0,)),  # layers as one matrix
        (rpx.MagnitudePruning(0.5), "layers/kernel", "stacked", (), (0,)),
        (rpx.WeightNorm(axis=-1, stacked=0), "layers/kernel", "axis", (-1,), (-2,)),  # weights (out, in)
        (rpx.norms.Sphere(along=-1), "out", "along", (-1,), (-3, -2)),
    ],
    ids=repr,
)
def test_axes_that_do_not_fit_the_network_are_named_with_the_line_that_mends_it(p, path, field, got, expected):
    (found,) = rpx.axes.check_axes(replace(p, where=path), network, PARAMS, jnp.arange(7))
    assert (found.path, found.field, found.got, found.expected) == (path, field, got, expected)
    shown = expected[0] if len(expected) == 1 else expected
    assert f"Write {field}={shown}, or `p.with_axes(rpx.roles(loss, params, batch))`." in str(found)
    mended = replace(p, where=path, **{field: expected})
    again = rpx.axes.check_axes(mended, network, PARAMS, jnp.arange(7))
    assert [each for each in again if each.field == field] == []


def test_what_fits_says_so_and_a_misfit_is_one_sentence():
    p = rpx.WeightNorm(axis=-1, where="query|out|embed") >> rpx.VarNoise(0.1)
    (found,) = rpx.axes.check_axes(p, network, PARAMS, jnp.arange(7))
    assert str(found) == (
        "WeightNorm(axis=-1, where='query|out|embed') takes axis=-1 at 'query' of shape (4, 2, 3), which the network "
        f"multiplies with inputs (0,), outputs (1, 2) and stacked axes () "
        f"({ROLES['query'].uses[0].line}). Write axis=(-2, -1), or "
        f"`p.with_axes(rpx.roles(loss, params, batch))`."
    )
    fits = rpx.axes.check_axes(rpx.WeightNorm().with_axes(ROLES) >> rpx.VarNoise(0.1), network, PARAMS, jnp.arange(7))
    assert repr(fits) == "All axes fit."
    written = "Write `rpx.axes.check_axes(p, loss, params, batch)`."
    with raises(TypeError, f"check_axes expected a parametrization, but got a value of type dict. {written}"):
        rpx.axes.check_axes(PARAMS, network)
    needed = "roles(network) needs the arguments of the function, but got none. Pass them after the function: "
    with raises(TypeError, f"{needed}`roles(loss, params, batch)`."):
        rpx.roles(network)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
