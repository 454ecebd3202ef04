"""Axes that nobody set, in models of nnx and equinox, and in linen modules: what is said, refused, and computed."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axes.networks import KEY, drawn, normal
from errors import raises, table
from flax import nnx
from grids import thorough

import reparax as rpx
from reparax.core.paths import items, path_text
from reparax.core.raw import flatten

# What is refused ------------------------------------------------------------------------------------------------------


class OwnNnx(nnx.Module):
    """An array that no class knows, beside a layer that one does."""

    def __init__(self):
        self.kernel, self.layer = nnx.Param(jnp.ones((4, 6))), nnx.Linear(6, 3, rngs=nnx.Rngs(0))


class OwnEquinox(eqx.Module):
    """As the one of nnx."""

    weight: jax.Array
    layer: eqx.nn.Linear


class TurnedNnx(nnx.Linear):
    """A layer that reads its kernel otherwise than the class from which it comes."""

    def __call__(self, x):
        return x @ self.kernel.T


class TurnedEquinox(eqx.nn.Linear):
    """As the one of nnx."""

    def __call__(self, x):
        return x @ self.weight


class Elsewhere(eqx.nn.Linear):
    """A layer whose call is that of its class, but which reads another array."""

    def __getattribute__(self, name):
        x = object.__getattribute__(self, name)
        return x.T if name == "weight" and isinstance(x, jax.Array) else x


class Transposed(eqx.Module):
    """What JAX reads as an array, from one that lies otherwise."""

    w: jax.Array

    def __jax_array__(self):
        return self.w.T


class TransposedParam(nnx.Param):
    """As the module of equinox."""

    def get_value(self, **kwargs):
        return super().get_value(**kwargs).T


def in_place(weight):
    """A layer of equinox with something else in the place of its weight."""
    return eqx.tree_at(lambda m: m.weight, drawn(lambda: eqx.nn.Linear(4, 4, key=KEY)), weight)


def with_attribute(name, value, **kwargs):
    """A layer of nnx with an attribute that was set later."""
    layer = drawn(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0), **kwargs))
    setattr(layer, name, value)
    return layer


def by_a_hook():
    """A layer of nnx whose kernel is turned when it is read."""
    layer = drawn(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    layer.kernel.set_metadata(on_get_value=lambda variable, x: x.T)
    return layer


def turned_product(x, w, dimensions, **kwargs):
    """A product with the transposed kernel."""
    return jax.lax.dot_general(x, w.T, dimensions)


def turned_arrays(arrays, **kwargs):
    """The arrays of a layer in other dtypes, and transposed too."""
    return jax.tree.map(jnp.transpose, arrays)


class ByModule(nnx.Module):
    """A product with the transposed kernel, as a module."""

    def __call__(self, x, kernel, *args, **kwargs):
        return x @ kernel.T


def stack_of_nnx(count, inputs, outputs, axis):
    """Layers that are stacked along an axis."""
    make = nnx.vmap(lambda rngs: nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs), out_axes=axis)
    return drawn(lambda: make(nnx.Rngs(0).split(count)))


def linear(*stack, bias=(), weight=(3, 4)):
    """A layer of equinox with stacked axes in front of its weight, and others in front of its bias."""
    arrays = normal(*stack, *weight), normal(*bias, 3)
    return eqx.tree_at(lambda m: (m.weight, m.bias), drawn(lambda: eqx.nn.Linear(4, 3, key=KEY)), arrays)


def linear_of_nnx(stack):
    """A layer of nnx with a stacked axis in front of its kernel alone."""
    layer = drawn(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    layer.kernel = nnx.Param(normal(stack, 4, 3))
    return layer


NAMES = {
    "rpx": rpx,
    "nnx": nnx,
    "KEY": KEY,
    "own_nnx": drawn(OwnNnx),
    "own_equinox": drawn(lambda: OwnEquinox(jnp.ones((6, 4)), eqx.nn.Linear(6, 3, key=KEY))),
    "turned_nnx": drawn(lambda: TurnedNnx(4, 3, rngs=nnx.Rngs(0))),
    "turned_equinox": drawn(lambda: TurnedEquinox(4, 3, key=KEY)),
    "elsewhere": drawn(lambda: Elsewhere(4, 4, key=KEY)),
    "in_a_module": in_place(Transposed(normal(4, 4))),
    "in_a_list": in_place([normal(4, 4)]),
    "in_a_variable": with_attribute("kernel", TransposedParam(normal(4, 4))),
    "by_a_hook": by_a_hook,
    "one_more": with_attribute("more", nnx.Param(normal(4, 4))),
    "of_product": drawn(lambda: nnx.Linear(4, 4, dot_general=turned_product, rngs=nnx.Rngs(0))),
    "of_module": drawn(lambda: nnx.Linear(4, 4, dot_general=ByModule(), rngs=nnx.Rngs(0))),
    "of_product_later": with_attribute("dot_general", turned_product),
    "of_arrays": drawn(lambda: nnx.Conv(3, 3, (3,), promote_dtype=turned_arrays, rngs=nnx.Rngs(0))),
    "of_class": drawn(lambda: nnx.LinearGeneral(4, (4, 4), dot_general_cls=TurnedNnx, rngs=nnx.Rngs(0))),
    "own_scale": drawn(lambda: eqx.nn.WeightNorm(eqx.nn.Linear(4, 3, key=KEY))),
    "of_diagonal": drawn(lambda: nnx.Einsum("bi,ii->b", (4, 4), None, rngs=nnx.Rngs(0))),
    "stack_of_nnx": stack_of_nnx,
    "linear": linear,
    "linear_of_nnx": linear_of_nnx,
    "QUERY": {"query": normal(6, 2, 3)},
    "PLAIN": {"kernel": normal(6, 4)},
}


@table(__file__)
def test_what_no_class_knows_and_what_does_not_fit_is_refused_with_both_ways_out(case):
    case.check(NAMES)


# Both layouts ---------------------------------------------------------------------------------------------------------

X = normal(5, 4)
CHAINS = (
    rpx.SpectralNorm(60),  # from vectors that are drawn by path, so to the end
    rpx.norms.WeightStandardization(),
    rpx.WeightNorm() >> rpx.LoRA(2, init_weights="pissa"),  # draws nothing
    rpx.WeightNorm(),
    rpx.norms.MaxNorm(0.5),
    rpx.norms.Sphere(),
    rpx.LoRA(2, init_weights="pissa"),
    rpx.sparse.NByM(1, 2),
)


def after_a_step(p, layer, name, turn):
    """The weight of a layer, turned to (in, out), after a step of gradient descent on its raw values."""

    def weight(raw):
        layer = p.apply(raw)
        return turn(layer[name] if isinstance(layer, dict) else jnp.asarray(getattr(layer, name)))

    free, fixed = rpx.partition(p.update(p.init(layer, KEY)))
    grads = jax.grad(lambda free: jnp.sum(jnp.tanh(X @ weight(rpx.combine(free, fixed))) ** 2))(free)
    return weight(rpx.combine(jax.tree.map(lambda x, g: x - 0.05 * g, free, grads), fixed))


# One stage of columns, one of an axis, and two that follow each other; then all others.
@pytest.mark.parametrize("chains", [CHAINS[:3], thorough(CHAINS[3:])], ids=["three", "others"])
def test_a_step_changes_the_layers_of_linen_nnx_and_equinox_in_the_same_way(chains):
    w = normal(4, 6)
    of_nnx = drawn(lambda: nnx.Linear(4, 6, rngs=nnx.Rngs(0)))
    of_nnx.kernel = nnx.Param(w)
    of_equinox = eqx.tree_at(lambda m: m.weight, drawn(lambda: eqx.nn.Linear(4, 6, key=KEY)), w.T)

    @jax.jit
    def steps():
        return [
            (
                after_a_step(p, {"kernel": w}, "kernel", jnp.asarray),
                after_a_step(p, of_nnx, "kernel", jnp.asarray),
                after_a_step(p, of_equinox, "weight", jnp.transpose),
            )
            for p in chains
        ]

    for p, (linen, *others) in zip(chains, steps(), strict=True):
        assert not np.allclose(linen, w, atol=1e-4), p
        for other in others:
            np.testing.assert_allclose(other, linen, rtol=2e-4, atol=2e-5, err_msg=repr(p))


# Several inputs -------------------------------------------------------------------------------------------------------

# A layer, and the axis along which its channels lie.
CHANNELS = {
    "last": (drawn(lambda: nnx.Conv(4, 6, (3, 3), use_bias=False, rngs=nnx.Rngs(0))), -2),
    "turned": (
        drawn(lambda: nnx.ConvTranspose(8, 6, (4, 4), transpose_kernel=True, use_bias=False, rngs=nnx.Rngs(0))),
        -1,
    ),
    "first": (drawn(lambda: eqx.nn.Conv2d(4, 6, 4, use_bias=False, key=KEY)), 1),
    "of heads": (drawn(lambda: nnx.LinearGeneral((4, 8), 6, axis=(-2, -1), use_bias=False, rngs=nnx.Rngs(0))), -2),
    "stacked": (
        drawn(lambda: nnx.vmap(lambda r: nnx.Conv(4, 6, (3,), use_bias=False, rngs=r))(nnx.Rngs(0).split(5))),
        -2,
    ),
}


def two_largest_of_four(w, axis):
    """Without the two smallest of each four neighbours along an axis."""
    rows = np.moveaxis(w, axis, -1)
    groups = rows.reshape(-1, 4).copy()
    np.put_along_axis(groups, np.argsort(np.abs(groups), -1)[:, :2], 0, -1)
    return np.moveaxis(groups.reshape(rows.shape), -1, axis)


def test_groups_of_n_and_m_lie_along_the_channels_of_a_convolution_and_within_a_head():
    p, layers = rpx.sparse.NByM(2, 4), {name: layer for name, (layer, _) in CHANNELS.items()}
    found = {name: jax.tree.leaves(x)[0] for name, x in jax.jit(lambda: p.fold(p.init(layers)))().items()}
    for name, (layer, axis) in CHANNELS.items():
        (w,) = jax.tree.leaves(layer)
        np.testing.assert_array_equal(found[name], two_largest_of_four(np.asarray(w), axis), err_msg=name)


def test_a_program_says_the_channels_too_and_blocks_lie_along_them():
    def network(params, x):
        return jax.lax.conv(x, params["w"], (1, 1), "SAME")

    roles = rpx.roles(network, {"w": normal(6, 4, 3, 3)}, normal(2, 4, 8, 8))
    assert rpx.sparse.NByM(2, 4).with_axes(roles) == rpx.sparse.NByM(2, 4, along=-3)
    blocks = rpx.Quantized("int4", block_size=4)
    assert blocks.with_axes(roles) == rpx.Quantized("int4", axis=(-4, -2, -1), block_size=4)
    of_class = blocks.with_axes({"conv": CHANNELS["first"][0]})
    assert of_class == rpx.Quantized("int4", axis=(-4, -2, -1), block_size=4)


# Stacked layers -------------------------------------------------------------------------------------------------------


class Layer(nnx.Module):
    """A matrix, heads, a kernel and a scale."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 4, rngs=rngs)
        self.heads = nnx.LinearGeneral(6, (2, 3), rngs=rngs)
        self.conv = nnx.Conv(7, 5, (4,), rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)


def stacked_nnx():
    """Layers under one vmap, and under two."""
    rngs = nnx.Rngs(0)
    return {"one": nnx.vmap(Layer)(rngs.split(3)), "two": nnx.vmap(nnx.vmap(Layer))(rngs.split((2, 3)))}


def stacked_equinox():
    """Layers under one vmap, under two, and those of a scan."""

    def layer(key):
        return {"linear": eqx.nn.Linear(6, 4, key=key), "conv": eqx.nn.Conv1d(3, 5, 2, key=key)}

    keys = jax.random.split(KEY, (2, 3))
    return {
        "one": eqx.filter_vmap(layer)(keys[0]),
        "two": eqx.filter_vmap(eqx.filter_vmap(layer))(keys),
        "scan": eqx.filter(eqx.nn.MLP(4, 3, 7, 4, scan=True, key=KEY), eqx.is_array),
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (
            stacked_nnx,
            {
                "one/linear/kernel": (1,),
                "one/heads/kernel": (1,),
                "one/conv/kernel": (1, 2),
                "two/linear/kernel": (2,),
                "two/heads/kernel": (2,),
                "two/conv/kernel": (2, 3),
            },
        ),
        (
            stacked_equinox,
            {
                "one/linear/weight": (2,),
                "one/conv/weight": (2, 3),
                "two/linear/weight": (3,),
                "two/conv/weight": (3, 4),
                "scan/layers/0/weight": (1,),
                "scan/layers/1/weight": (2,),
                "scan/layers/2/weight": (1,),
            },
        ),
    ],
    ids=["nnx", "equinox"],
)
def test_layers_in_front_are_stacked_by_class(make, inputs):
    model = drawn(make)
    arrays = {path_text(path): x for path, x in items(model)}
    raw = {path_text(path): x for path, x in items(jax.jit(rpx.WeightNorm().init)(model))}
    found = {path.removesuffix("/@weight_norm/g"): x for path, x in raw.items() if path.endswith("/g")}
    assert found.keys() == inputs.keys()
    for path, g in found.items():
        want = np.sqrt(np.sum(np.square(arrays[path]), inputs[path], keepdims=True))
        np.testing.assert_allclose(g, want, rtol=1e-6, atol=1e-6, err_msg=path)


def test_stacked_axes_do_not_count_where_a_default_asks_how_many_axes_an_array_has():
    layers = nnx.vmap(lambda rngs: nnx.Conv(3, 5, (2,), rngs=rngs))(nnx.Rngs(0).split(3))
    rows = rpx.summary(rpx.SpectralNorm(input_shape=(8,)), jax.eval_shape(lambda: layers)).rows
    assert {row.path: row.axes for row in rows if row.axes} == {"kernel": ("columns=-1, stacked=0 (nnx.Conv)",)}


def test_factors_of_layers_that_are_stacked_anywhere_have_norms_of_their_own():
    p, w = rpx.WeightNorm() >> rpx.LowRank(2), normal(5, 4, 6)
    layers = [stack_of_nnx(5, 4, 6, axis) for axis in range(3)]
    for axis, layer in enumerate(layers):
        layer.kernel = nnx.Param(jnp.moveaxis(w, 0, axis))
    raw = [jax.eval_shape(p.init, layer, KEY).kernel["@low_rank"] for layer in layers]
    lengths = [{name: x["@weight_norm"]["g"].shape for name, x in factors.items()} for factors in raw]
    assert lengths == [
        {"u": (5, 1, 2), "v": (5, 1, 6)},
        {"u": (1, 5, 2), "v": (1, 5, 6)},
        {"u": (1, 2, 5), "v": (1, 6, 5)},
    ]
    u, s, v = np.linalg.svd(np.asarray(w), full_matrices=False)
    nearest = (u[..., :2] * s[:, None, :2]) @ v[:, :2]
    folded = jax.jit(lambda: [p.fold(p.init(layer, KEY)).kernel[...] for layer in layers])()
    for axis, x in enumerate(folded):
        np.testing.assert_allclose(np.moveaxis(x, axis, 0), nearest, atol=1e-5)


def test_what_is_no_array_in_a_layer_does_not_count_and_biases_of_shared_layers_are_known():
    weight = eqx.tree_at(lambda m: m.bias, linear(5, bias=(5,)), 1.0)
    assert rpx.WeightNorm().with_axes(weight) == rpx.WeightNorm(axis=-2, stacked=0)
    pair = eqx.nn.Embedding(4, 4, key=KEY), eqx.nn.Linear(4, 4, key=KEY)
    shared = drawn(lambda: eqx.nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight))
    axes = {path_text(place): known for place, known in flatten(shared).frame.axes.items()}
    other = "it belongs to eqx.nn.{} in eqx.nn.Shared, so another layer may read it too"
    assert axes["pytree/0/weight"].why == other.format("Embedding")
    assert axes["pytree/1/weight"].why == other.format("Linear")
    assert (axes["pytree/1/bias"].why, axes["pytree/1/bias"].are_of_vector) == ("", True)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [stacked_nnx, stacked_equinox], ids=["nnx", "equinox"])
def test_in_the_body_of_a_scan_each_layer_has_the_axes_that_it_has_in_the_stack(make):
    layers, p = drawn(make)["one"], rpx.LowRank(2) >> rpx.WeightNorm()
    raw = jax.jit(p.init)(layers, KEY)
    moved = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1) * normal(*x.shape), raw)

    @jax.jit
    def both(raw):
        return p.apply(raw), jax.lax.scan(lambda _, raw: (None, p.apply(raw)), None, raw)[1]

    for (path, whole), one_by_one in zip(items(both(moved)[0]), jax.tree.leaves(both(moved)[1]), strict=True):
        np.testing.assert_allclose(one_by_one, whole, rtol=1e-5, atol=1e-5, err_msg=path_text(path))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            stacked_nnx,
            "WeightNorm(axis={'one/conv/kernel|one/linear/kernel|two/conv/kernel|two/linear/kernel': -1, "
            "'one/heads/kernel|two/heads/kernel': (-2, -1)}, stacked={'one/conv/kernel|one/heads/kernel|"
            "one/linear/kernel': 0, 'two/conv/kernel|two/heads/kernel|two/linear/kernel': (0, 1)})",
        ),
        (
            stacked_equinox,
            "WeightNorm(axis={'one/conv/weight|two/conv/weight': -3, 'one/linear/weight|scan/layers/\\\\d+/weight|"
            "two/linear/weight': -2}, stacked={'one/conv/weight|one/linear/weight|scan/layers/1/weight': 0, "
            "'scan/layers/0/weight|scan/layers/2/weight': (), 'two/conv/weight|two/linear/weight': (0, 1)})",
        ),
    ],
    ids=["nnx", "equinox"],
)
def test_the_explicit_chain_of_stacked_layers(make, text):
    model = make()
    p = rpx.WeightNorm().with_axes(model)
    assert repr(p) == text
    explicit, bare = (jax.eval_shape(q.init, model) for q in (p, rpx.WeightNorm()))
    assert [(path, x.shape) for path, x in items(explicit)] == [(path, x.shape) for path, x in items(bare)]


# Linen ----------------------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """The body of a scan."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(6, name="dense")(x)), None


class Network(nn.Module):
    """A table, a convolution of three steps, heads, a scanned stack, and layers that differ in training."""

    @nn.compact
    def __call__(self, tokens, *, train):
        x = nn.Embed(11, 5, name="words")(tokens)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Conv(6, (3,), name="conv")(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = x + nn.MultiHeadDotProductAttention(2, name="heads")(x)
        stack = nn.scan(Dense, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(4, name="last")(stack(name="layers")(x, None)[0])


@pytest.mark.parametrize("train", [False, True])
def test_the_roles_of_a_linen_module_are_those_of_its_loss(train):
    module, tokens = Network(), jnp.ones((2, 7), int)
    with jax.numpy_rank_promotion("allow"):  # attention of linen adds biases so
        variables = jax.eval_shape(lambda: module.init(KEY, tokens, train=False))
        roles = rpx.linen.roles(module, tokens, train=train)

        def loss(params, stats, tokens):
            return jnp.sum(module.apply({"params": params, "batch_stats": stats}, tokens, train=False))

        of_loss = rpx.roles(loss, variables["params"], variables["batch_stats"], tokens)
    for p in (rpx.WeightNorm(), rpx.LoRA(2) >> rpx.SpectralNorm()):
        assert p.with_axes(roles) == p.with_axes(of_loss)
    assert repr(rpx.WeightNorm().with_axes(roles)) == (
        "WeightNorm(axis={'conv/kernel|heads/out/kernel|last/kernel|layers/dense/kernel': -1, "
        "'heads/key/kernel|heads/query/kernel|heads/value/kernel': (-2, -1)}, "
        "stacked={'conv/kernel|heads/key/kernel|heads/out/kernel|heads/query/kernel|heads/value/kernel|last/kernel': "
        "(), 'layers/dense/kernel': 0})"
    )


def test_what_is_no_linen_module_is_refused():
    text = (
        "rpx.linen.roles takes a linen module, and then its inputs, but got {}. Write `rpx.linen.roles(module, x)`; "
        "for a function, `rpx.roles(loss, params, batch)`."
    )
    for model, got in ((1, "int"), ({"params": {"w": X}}, "dict"), (nn.Dense, "the class Dense")):
        with raises(TypeError, text.format(got)):
            rpx.linen.roles(model, X)


@pytest.mark.parametrize("stage", [rpx.LowRank(4), rpx.WeightNorm(), rpx.matrices.FixedRank(4)], ids=repr)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_layers_come_back_as_they_were_stacked(stage, axis):
    model = stack_of_nnx(2, 4, 6, axis)
    kernel = stage.fold(stage.init(model, KEY)).kernel
    np.testing.assert_allclose(kernel[...], model.kernel[...], atol=1e-5)
