"""Nothing that parameters and key can make again is kept, in every context; all else is as without ``remat``."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective
from errors import raises, table
from grids import mostly_thorough
from jax.experimental import checkify
from jax.experimental.jet import jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec
from residuals import contractions, draws, kept

import reparax as rpx

ROOT = jax.random.key(0)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.float32)


def trees_close(a, b, rtol=1e-5):
    largest = max(float(np.max(np.abs(y))) for y in jax.tree.leaves(b))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * largest)


def gradients(fs, *args, **settings):
    """Those of several functions, by one program."""
    return jax.jit(lambda *args: [jax.grad(f, **settings)(*args) for f in fs])(*args)


# ---- Networks: each is a function of effective weights and data, with the weights that it starts from.


def mlp(w, x):
    x = jnp.atleast_2d(x)
    for layer in sorted(w):
        x = jax.nn.relu(x @ w[layer]["kernel"] + w[layer]["bias"])
    return jnp.mean(x**2)


def mlp_weights(n=2):
    return {f"layer{i}": {"kernel": normal(8, 8, seed=i), "bias": np.ones((1, 8), np.float32)} for i in range(n)}


def convolutions(w, x):
    for name in sorted(w):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.gelu(jax.lax.conv_general_dilated(x, w[name], (1, 1), "SAME", dimension_numbers=numbers))
    return jnp.mean(x**2)


class Half(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(8, dtype=jnp.bfloat16)(x))
        return x.astype(jnp.float32)


def tied(w, ids):
    h = jnp.tanh(w["embed"][ids] @ w["hidden"])
    return jnp.mean(jax.nn.logsumexp(h @ w["embed"].T, -1))


def lstm(w, xs):
    def step(carry, x):
        h, c = carry
        gates = jnp.concatenate([x, h], -1).astype(jnp.bfloat16) @ w["kernel"].astype(jnp.bfloat16)
        i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((2, 4))
    return jnp.mean(jax.lax.scan(step, (zeros, zeros), xs)[1] ** 2)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.GRUCell(4))(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(y, y)
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(10, 8)
        return embed.attend(self.block(name="block")(embed(ids)))


def stacked(w, x):
    def layer(h, w):
        return jnp.tanh(h @ w["kernel"]), None

    return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)


def branching(w, x):
    h = x @ w["a"]
    h = jax.lax.cond(jnp.sum(h) > 0, lambda h: jnp.tanh(h @ w["b"]), lambda h: h @ w["c"], h)
    return jnp.mean(h**2)


def flax(module, x):
    return lambda w, x: jnp.mean(module.apply({"params": w}, x) ** 2), jax.jit(module.init)(ROOT, x)["params"], x


IDS = np.arange(6, dtype=np.int32).reshape(2, 3)
NETWORKS = {  # made when they are asked for
    "mlp": lambda: (mlp, mlp_weights(), normal(4, 8)),
    "mlp under jit": lambda: (jax.jit(mlp), mlp_weights(), normal(4, 8)),
    "convolutions": lambda: (convolutions, {"a": normal(3, 3, 2, 4), "b": normal(3, 3, 4, 4)}, normal(1, 4, 4, 2)),
    "flax in bfloat16": lambda: flax(Half(), normal(4, 8)),
    "tied embedding": lambda: (tied, {"embed": normal(10, 4), "hidden": normal(4, 4)}, jnp.arange(6)),
    "lstm under scan": lambda: (lstm, {"kernel": normal(8, 16)}, normal(5, 2, 4)),
    "flax gru under scan": lambda: flax(Recurrent(), normal(2, 5, 4)),
    "transformer": lambda: flax(Transformer(), IDS),
    "transformer with nn.remat": lambda: flax(Transformer(nn.remat(Block)), IDS),
    "scan over layers": lambda: (stacked, {"kernel": normal(3, 8, 8)}, normal(4, 8)),
    "cond": lambda: (branching, {name: normal(8, 8, seed=i) for i, name in enumerate("abc")}, normal(4, 8)),
    "vmap over the batch": lambda: (lambda w, x: jnp.mean(jax.vmap(mlp, (None, 0))(w, x)), mlp_weights(), normal(4, 8)),
    "the user's own checkpoint": lambda: (jax.checkpoint(mlp), mlp_weights(), normal(4, 8)),
    "the user's own policy": lambda: (
        jax.checkpoint(mlp, policy=jax.checkpoint_policies.dots_saveable),
        mlp_weights(),
        normal(4, 8),
    ),
}

# Their gradients are compared in `test_contexts`.
KEPT_ALONE = ("convolutions", "tied embedding", "flax gru under scan", "transformer", "scan over layers")


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_is_kept_that_parameters_and_key_can_make_again(name, key):
    network, weights, x = NETWORKS[name]()
    p = rpx.VarNoise(0.1) if "transformer" in name else rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1)
    raw = jax.jit(p.init)(weights)

    def loss(raw, key, x):
        return network(p.apply(raw, key), x)

    plain = kept(lambda w, _, x: network(w, x), weights, key, x)
    before, after = kept(loss, raw, key, x), kept(rpx.remat(loss), raw, key, x)
    assert sum(before.values()) > sum(after.values())
    assert after["weights"] == 0
    # Until jax 0.11.0 the branches of a cond gave their weights out to be kept, which so came from the predicate too.
    assert after["others"] <= plain["others"] if name == "cond" else after["others"] == plain["others"]
    n = contractions(jax.grad(network), weights, x)
    assert contractions(jax.grad(rpx.remat(loss)), raw, key, x) == n
    if name not in KEPT_ALONE:
        trees_close(*reversed(gradients((loss, rpx.remat(loss)), raw, key, x)))


# ---- Noise


@pytest.mark.parametrize(
    "name", mostly_thorough(["mlp", "lstm under scan", "flax gru under scan"], "mlp", "lstm under scan")
)
def test_noise_is_drawn_at_most_once_in_each_pass_and_never_in_each_step(name, key):
    network, weights, x = NETWORKS[name]()
    p = rpx.VarNoise(0.1) >> rpx.WeightDropout(0.1, where=".*kernel")

    def loss(weights, key, x):
        return network(p.apply(weights, key), x)

    forward, _ = draws(loss, weights, key, x)
    both, in_steps = draws(jax.grad(rpx.remat(loss)), weights, key, x)
    assert forward < both <= 2 * forward  # what is added to a bias, no gradient needs
    assert in_steps == 0


def test_the_noise_of_the_backward_pass_is_that_of_the_forward_pass(key):
    raw = {"w": normal(64)}
    p = rpx.VarNoise(0.5)
    gradient = jax.jit(jax.grad(rpx.remat(lambda raw, key: jnp.sum(p.apply(raw, key)["w"] ** 2))))(raw, key)
    np.testing.assert_allclose(gradient["w"], 2 * np.asarray(effective(p, raw, key)["w"]), rtol=1e-5, atol=1e-6)


def test_a_dropped_weight_gets_no_gradient(key):
    raw = {"w": normal(16, 16)}
    p = rpx.WeightDropout(0.5)
    x = normal(4, 16, seed=1)
    noisy = rpx.remat(lambda raw, key, x: jnp.sum(jnp.sin(x @ p.apply(raw, key)["w"])))
    gradient = jax.jit(jax.grad(noisy))(raw, key, x)
    np.testing.assert_array_equal(np.asarray(gradient["w"]) == 0, np.asarray(effective(p, raw, key)["w"]) == 0)


# ---- What is named


P = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1)
WEIGHTS = mlp_weights()
RAW = jax.jit(P.init)(WEIGHTS)
X = normal(4, 8, seed=9)
OTHERS = kept(lambda w, _, x: mlp(w, x), WEIGHTS, ROOT, X)["others"]


def loss(raw, key, x):
    return mlp(P.apply(raw, key), x)


def test_parameters_and_keys_are_named_by_default_wherever_they_stand():
    def first_the_data(x, key, raw):
        return loss(raw, key, x)

    bare = rpx.remat(lambda raw, x, key: mlp(jax.tree.map(lambda w: w + jax.random.normal(key, w.shape), raw), x))
    assert kept(lambda raw, key, x: bare(raw, x, key), WEIGHTS, ROOT, X) == {"weights": 0, "others": OTHERS}
    named = rpx.remat(first_the_data, argnums=(2, 1))
    assert kept(lambda raw, key, x: named(x, key, raw), RAW, ROOT, X) == {"weights": 0, "others": OTHERS}


def test_legacy_keys_are_named_by_default():
    legacy = jax.random.PRNGKey(0)
    noisy = rpx.remat(lambda raw, key, x: mlp(jax.tree.map(lambda w: w + jax.random.normal(key, w.shape), raw), x))
    assert kept(noisy, WEIGHTS, legacy, X) == {"weights": 0, "others": OTHERS}


def test_data_that_is_closed_over_is_data():
    def closing(raw, key, x):
        return rpx.remat(lambda raw: loss(raw, key, x))(raw)

    assert kept(closing, RAW, ROOT, X) == {"weights": 0, "others": OTHERS}
    concrete = jax.vjp(rpx.remat(lambda raw: loss(raw, ROOT, X)), RAW)[1]
    sizes = [x.nbytes for x in jax.tree.leaves(concrete) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert sum(sizes) >= OTHERS


def test_what_a_parametrization_reads_is_named_wherever_it_comes_from():
    def scheduled(raw, key, x, step):
        def inside(x, raw):
            p = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1 / (1 + step))
            return mlp(p.apply(raw, jax.random.fold_in(key, step)), x)

        return rpx.remat(inside)(x, raw)

    def count(raw, key, x):
        return scheduled(raw, key, x, jnp.float32(3))

    report = kept(lambda raw, key, x, step: scheduled(raw, key, x, step), RAW, ROOT, X, jnp.float32(3))
    assert report["others"] <= OTHERS + 8  # and the step
    assert kept(count, RAW, ROOT, X)["weights"] == 0


@pytest.mark.thorough
def test_what_a_parametrization_reads_inside_of_jit_and_of_scan_is_named_too():
    @jax.jit
    def step(h, raw_and_key):
        raw, key = raw_and_key
        return jnp.tanh(jnp.tanh(h @ P.apply(raw, key)["kernel"])), None

    def inside(x, raw, keys):
        return jnp.mean(jax.lax.scan(step, x, (raw, keys))[0] ** 2)

    f = rpx.remat(inside, argnums=())
    raw, keys = jax.jit(jax.vmap(P.init))({"kernel": normal(3, 8, 8)}), jax.random.split(ROOT, 3)
    assert kept(lambda raw, keys, x: f(x, raw, keys), raw, keys, X)["weights"] == 0
    trees_close(*gradients((f, inside), X, raw, keys, argnums=1))


def test_few_data_from_which_weights_are_made_stay_data():
    def hyper(w, key, x):
        raw = {"kernel": jnp.tanh(x @ w)}
        return jnp.mean(jnp.tanh(rpx.VarNoise(0.1).apply(raw, key)["kernel"]))

    args = normal(4, 4), ROOT, normal(1, 4)
    assert contractions(jax.grad(rpx.remat(hyper)), *args) == contractions(jax.grad(hyper), *args)


def test_arguments_by_keyword_are_data():
    f = rpx.remat(lambda raw, key, *, x: loss(raw, key, x))
    assert kept(lambda raw, key, x: f(raw, key, x=x), RAW, ROOT, X) == {"weights": 0, "others": OTHERS}


def test_numbers_and_flags_of_python_are_constants():
    def repeated(raw, key, x, n, *, train=False):
        for _ in range(n):
            x = jnp.tanh(x)
        return loss(raw, key, x) if train else jnp.sum(x)

    fs = [lambda *args, f=f: f(*args, 2, train=True) for f in (rpx.remat(repeated), repeated)]
    trees_close(*gradients(fs, RAW, ROOT, X))


@pytest.mark.thorough
def test_leaves_that_are_no_arrays_are_constants():
    def with_functions(tree, key, x):
        return loss(tree["raw"], key, tree["activation"](x))

    tree = {"raw": RAW, "activation": jnp.tanh}
    gradient = jax.grad(lambda raw: rpx.remat(with_functions)({**tree, "raw": raw}, ROOT, X))(RAW)
    trees_close(gradient, jax.grad(loss)(RAW, ROOT, np.tanh(X)))


def through_a_mutable_array(w, x):
    ref = jax.new_ref(w)
    ref[...] = jnp.sin(ref[...])
    return x @ ref[...]


HOLDING_A_MUTABLE_ARRAY = {
    "plain": through_a_mutable_array,
    "jit": jax.jit(through_a_mutable_array),
    "scan": lambda w, x: jax.lax.scan(lambda x, _: (through_a_mutable_array(w, x), None), x, None, length=2)[0],
    "cond": lambda w, x: jax.lax.cond(x[0, 0] > 0, through_a_mutable_array, lambda w, x: x @ w, w, x),
    "checkpoint": jax.checkpoint(through_a_mutable_array),
}


@pytest.mark.parametrize("name", HOLDING_A_MUTABLE_ARRAY)
def test_mutable_arrays_inside_of_a_body_are_refused(name):
    def total(w, x):
        return jnp.sum(HOLDING_A_MUTABLE_ARRAY[name](w, x))

    with raises(
        TypeError,
        "remat(total) found a mutable array (jax.new_ref) in the function, but cannot recompute its content. Return "
        "the new content together with the loss, and write it to the array outside of the function.",
    ):
        rpx.remat(total)(normal(3, 3), normal(2, 3))


def test_what_is_no_function_is_refused():
    with raises(TypeError, "remat takes a function, but got 3 of type int. Pass a function, such as the loss."):
        rpx.remat(3)
    text = "of type dict. Pass a function, such as the loss."
    with raises(TypeError, f"remat takes a function, but got {{'w': 'float32[2]'}} {text}"):
        rpx.remat({"w": normal(2)})


def test_errors_name_a_function_without_the_arrays_that_it_holds():
    class Model:
        def __init__(self):
            self.deleted = normal(2)
            self.deleted.delete()

        def __repr__(self):
            return repr(self.deleted)

        def loss(self, raw):
            return raw

        __call__ = loss

    text = "expects argnums to be the position of an argument or a tuple of positions, but got ['float32[2]']. Pass"
    model = Model()
    for fun, name in ((model.loss, "loss"), (model, "Model"), (functools.partial(loss, RAW), "loss")):
        rpx.remat(fun)
        with pytest.raises(TypeError, match=f"^{re.escape(f'remat({name}) {text}')}"):
            rpx.remat(fun, argnums=[normal(2)])


# ---- Derivatives of every kind


def test_what_is_no_array_in_aux_stays_as_it_is():
    def with_aux(raw):
        return raw.sum(), {"n": 3, "name": "x"}

    _, aux = jax.value_and_grad(rpx.remat(with_aux), has_aux=True)(jnp.ones(2))[0]
    assert aux == {"n": 3, "name": "x"}
    assert type(aux["n"]) is int


def test_values_and_gradients_with_aux():
    def with_aux(raw, key, x):
        effective = P.apply(raw, key)
        return mlp(effective, x), {"norm": jnp.exp(x @ effective["layer0"]["kernel"]), "count": 3, "n": jnp.int32(2)}

    expected = jax.value_and_grad(with_aux, has_aux=True)(RAW, ROOT, X)
    trees_close(jax.value_and_grad(rpx.remat(with_aux), has_aux=True)(RAW, ROOT, X), expected)

    def residuals(raw, key, x):
        return jax.tree.leaves(jax.vjp(lambda raw: rpx.remat(with_aux)(raw, key, x), raw, has_aux=True)[1])

    sizes = [v.aval.size * v.aval.dtype.itemsize for v in jax.make_jaxpr(residuals)(RAW, ROOT, X).jaxpr.outvars[:-1]]
    assert max(sizes) <= X.nbytes * 2


@pytest.mark.thorough
def test_what_follows_from_a_value_of_weights_alone_that_is_made_among_the_data():
    @jax.jit
    def transposed_too(w, x):
        return w.T, x @ w

    def network(w, x):
        transposed, h = transposed_too(w["kernel"], x)
        chosen = jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, w["kernel"])

        def step(carry, _):
            u, h = carry
            u = w["kernel"] @ u
            return (u / jnp.linalg.norm(u), jnp.tanh(h @ w["kernel"])), None

        (u, h), _ = jax.lax.scan(step, (jnp.ones(8), h), None, length=3)
        return jnp.mean(jnp.tanh(h * jnp.sin(u)[None, :] @ jnp.exp(transposed + chosen)) ** 2)

    def of_raw(raw, key, x):
        return network(P.apply(raw, key), x)

    weights = WEIGHTS["layer0"]
    raw = P.init(weights)
    trees_close(jax.grad(rpx.remat(of_raw))(raw, ROOT, X), jax.grad(of_raw)(raw, ROOT, X))
    assert kept(rpx.remat(of_raw), raw, ROOT, X)["weights"] == 0


def test_what_is_no_array_in_the_result_comes_out_as_it_is():
    marker = object()
    constants = {"flag": True, "rate": 0.5, "step": 3, "name": "x", "half": np.float16(2), "any": marker, "no": None}

    def with_constants(raw, key, x):
        return loss(raw, key, x), {**constants, "weights": P.apply(raw, key)}

    def assert_equal(got, want):
        assert all(got[name] is value for name, value in constants.items())
        trees_close(got["weights"], want["weights"])

    (value, got), slopes = jax.value_and_grad(rpx.remat(with_constants), has_aux=True)(RAW, ROOT, X)
    wanted, wanted_slopes = loss(RAW, ROOT, X), jax.grad(loss)(RAW, ROOT, X)
    want = {"weights": P.apply(RAW, ROOT)}
    assert_equal(got, want)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    trees_close(slopes, wanted_slopes)
    assert_equal(rpx.remat(with_constants)(RAW, ROOT, X)[1], want)


@pytest.mark.parametrize(
    "stopped", [jax.lax.stop_gradient, lambda w: (w > 0).astype(w.dtype)], ids=["stop_gradient", "comparison"]
)
def test_weights_behind_which_there_is_no_gradient(stopped):
    def network(w, x):
        frozen = stopped(w["layer0"]["kernel"].T)
        # This loop has no backward pass, and needs none.
        n = jax.lax.while_loop(lambda c: jnp.sum(c**2) > 0.1, lambda c: 0.01 * c @ frozen, jax.lax.stop_gradient(x))
        return jnp.mean((jnp.tanh(x @ frozen) @ w["layer1"]["kernel"] * n) ** 2)

    def of_raw(raw, key, x):
        return network(P.apply(raw, key), x)

    trees_close(jax.grad(rpx.remat(of_raw))(RAW, ROOT, X), jax.grad(of_raw)(RAW, ROOT, X))
    plain = kept(lambda w, _, x: network(w, x), WEIGHTS, ROOT, X)
    assert kept(rpx.remat(of_raw), RAW, ROOT, X) == {"weights": 0, "others": plain["others"]}
    assert contractions(jax.grad(rpx.remat(of_raw)), RAW, ROOT, X) == contractions(jax.grad(network), WEIGHTS, X)


def test_gradients_in_the_data_and_in_the_key_free_case():
    for argnums in (2, (0, 2)):
        expected = jax.grad(loss, argnums)(RAW, ROOT, X)
        trees_close(jax.grad(rpx.remat(loss), argnums)(RAW, ROOT, X), expected)


def smooth(raw, key, x):
    kernel = P.apply(raw, key)["kernel"]
    return jnp.sum(jnp.tanh(jnp.tanh(x @ kernel) @ kernel))


SMOOTH = {"kernel": RAW["layer0"]["kernel"]}


def test_derivatives_of_derivatives_and_of_whole_numbers(key):
    """Of the sine of a weight, by hand: once more, in both orders, beside the numbers of a largest entry."""

    def loss(w, key, x):
        return jnp.sum(x @ jnp.sin(w)), jnp.argmax(w)

    def largest(w, key, x):
        return jnp.argmax(x @ jnp.sin(w)), jnp.argmax(w)

    @jax.jit
    def derivatives(w, dot, x):
        gradient = jax.grad(rpx.remat(loss), has_aux=True)

        def along(w):
            return jax.jvp(lambda w: rpx.remat(loss)(w, key, x)[0], (w,), (dot,))[1]

        return (
            jax.jvp(along, (w,), (dot,)),
            jax.jvp(jax.linearize(lambda w: rpx.remat(loss)(w, key, x)[0], w)[1], (dot,), (2 * dot,)),
            jax.jvp(lambda w: gradient(w, key, x)[0], (w,), (dot,)),
            jax.grad(lambda w: jnp.sum(gradient(w, key, x)[0] * dot))(w),
            gradient(w, key, x)[1],
            jax.jvp(lambda w: rpx.remat(largest)(w, key, x), (w,), (dot,)),
        )

    w, dot, x = normal(4, 3), normal(4, 3, seed=1), normal(2, 4, seed=2)
    second, first, (slope, curvature), again, place, (places, slopes) = derivatives(w, dot, x)
    along, bent = (np.sum(np.sum(x, 0)[:, None] * each) for each in (np.cos(w) * dot, -np.sin(w) * dot**2))
    np.testing.assert_allclose(second, [along, bent], rtol=1e-4)
    np.testing.assert_allclose(first, [along, 2 * along], rtol=1e-4)
    np.testing.assert_allclose(slope, np.sum(x, 0)[:, None] * np.cos(w), rtol=1e-5, atol=1e-6)
    for each in (curvature, again):
        np.testing.assert_allclose(each, -np.sum(x, 0)[:, None] * np.sin(w) * dot, rtol=1e-5, atol=1e-6)
    assert place == places[1] == np.argmax(w)
    assert places[0] == np.argmax(np.asarray(x) @ np.sin(w))
    assert [each.dtype for each in slopes] == [jax.dtypes.float0] * 2


@pytest.mark.thorough
def test_forward_mode_second_derivatives_and_hessians():
    direction = jax.tree.map(jnp.ones_like, SMOOTH)

    @jax.jit
    def derivatives(raw):
        def all_of(f):
            gradient = jax.grad(f)
            return {
                "jvp": jax.jvp(lambda raw: f(raw, ROOT, X), (raw,), (direction,)),
                "forward over reverse": jax.jvp(lambda raw: gradient(raw, ROOT, X), (raw,), (direction,))[1],
                "reverse over reverse": jax.grad(
                    lambda raw: sum(map(jnp.sum, jax.tree.leaves(gradient(raw, ROOT, X))))
                )(raw),
                "hessian": jax.hessian(lambda g: f(with_g(raw, g), ROOT, X))(raw["kernel"]["@weight_norm"]["g"]),
                "linearize": jax.linearize(lambda raw: f(raw, ROOT, X), raw)[1](direction),
            }

        return all_of(smooth), all_of(rpx.remat(smooth))

    def with_g(raw, g):
        return {"kernel": {"@weight_norm": {**raw["kernel"]["@weight_norm"], "g": g}}}

    expected, got = derivatives(SMOOTH)
    trees_close(got, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "inside", [lambda f: f, pytest.param(jax.jit, marks=pytest.mark.thorough)], ids=["here", "in jit"]
)
def test_forward_mode_of_what_has_no_backward_pass(inside, key):
    def pooled(x):
        return jax.lax.reduce_window(x, -jnp.inf, lambda a, b: jnp.maximum(a, b), (1, 2), (1, 1), "VALID")

    def loss(w, key, x):
        return jnp.sum(inside(pooled)(x @ jnp.sin(w))), jnp.argmax(x)

    w, dot, x = normal(4, 4), normal(4, 4, seed=1), normal(2, 4, seed=2)
    (value, _), (slope, _) = jax.jit(lambda w: jax.jvp(lambda w: rpx.remat(loss)(w, key, x), (w,), (dot,)))(w)
    h, dh = np.asarray(x) @ np.sin(w), np.asarray(x) @ (np.cos(w) * np.asarray(dot))
    left = h[:, :-1] > h[:, 1:]
    np.testing.assert_allclose(value, np.sum(np.where(left, h[:, :-1], h[:, 1:])), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slope, np.sum(np.where(left, dh[:, :-1], dh[:, 1:])), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="does not support reverse-mode autodiff"):
        jax.grad(rpx.remat(loss), has_aux=True)(w, key, x)


def test_what_is_linear_in_the_data_can_be_transposed(key):
    def product(w, key, x):
        return x @ (jnp.sin(w) + jax.random.normal(key, w.shape))

    def data_first(x, w, key):
        return product(w, key, x)

    w, x, y = normal(4, 3), normal(2, 4, seed=1), normal(2, 3, seed=2)
    transposes = (
        jax.linear_transpose(lambda x: rpx.remat(product)(w, key, x), x),
        jax.linear_transpose(lambda x: rpx.remat(data_first, argnums=(1, 2))(x, w, key), x),
    )
    for (got,) in jax.jit(lambda y: [each(y) for each in transposes])(y):
        np.testing.assert_allclose(
            got, np.asarray(y) @ (np.sin(w) + jax.random.normal(key, w.shape)).T, rtol=1e-5, atol=1e-6
        )


def test_what_is_linear_in_the_weights_can_be_transposed(key):
    def product(w, key, x):
        return jnp.sum(jnp.tanh(x) @ w.T, 0)

    def pulled(w, x, y):
        return jax.vjp(lambda x: rpx.remat(product)(w, key, x), x)[1](y)[0]

    w, x, y = normal(3, 4), normal(2, 4, seed=1), normal(3, seed=2)
    (got,) = jax.jit(jax.linear_transpose(lambda w: pulled(w, x, y), w))(x)
    np.testing.assert_allclose(got, np.outer(y, np.sum(np.asarray(x) / np.cosh(x) ** 2, 0)), rtol=1e-4)


def test_a_network_with_its_own_backward_pass():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

    def clipping(raw, key, x):
        return loss(raw, key, clipped(x @ P.apply(raw, key)["layer0"]["kernel"]))

    trees_close(jax.grad(rpx.remat(clipping))(RAW, ROOT, X), jax.grad(clipping)(RAW, ROOT, X))
    with pytest.raises(TypeError, match="custom_vjp function"):
        jax.jvp(lambda raw: rpx.remat(clipping)(raw, ROOT, X), (RAW,), (RAW,))


def test_effects_run_once():
    seen = []

    def printing(raw, key, x):
        jax.debug.callback(lambda v: seen.append(float(v)), jnp.sum(x))
        return loss(raw, key, x)

    jax.block_until_ready(jax.jit(jax.grad(rpx.remat(printing)))(RAW, ROOT, X))
    jax.effects_barrier()
    assert len(seen) == 1


# ---- Checks


def of_a_negative_number(w, x):
    return jnp.sum(jnp.log(-jnp.abs(x @ jnp.sin(w))))


def of_negative_weights(w, x):
    return jnp.sum(x @ jnp.log(-jnp.abs(w)))


def out_of_bounds(w, x):
    return jnp.sum(jnp.sin(w)[jnp.argmax(x) + 17])


def by_a_check(w, x):
    y = jnp.sum(x @ jnp.sin(w))
    checkify.check(y > 1e9, "too small: {y}", y=y)
    return y


def in_a_loop(w, x):
    return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sqrt(x @ jnp.sin(w) - 1), None), x, None, length=3)[0])


def after_a_stage(w, x):
    effective = rpx.WeightNorm(axis=-1).apply({"w": {"@weight_norm": {"v": w, "g": jnp.ones((1, 3))}}})["w"]
    return jnp.sum(jnp.sqrt(-jnp.abs(x @ effective)))


def in_its_derivative(w, x):
    return jnp.sum(x @ jnp.sqrt(w - w))


CHECKED = (of_a_negative_number, of_negative_weights, out_of_bounds, by_a_check, in_a_loop, after_a_stage)
WAYS = {"value": lambda f: f, "gradient": jax.grad, "jit of the gradient": lambda f: jax.jit(jax.grad(f))}
CHECKS = checkify.float_checks | checkify.index_checks | checkify.user_checks


def checked(f, *args):
    return str(jax.jit(checkify.checkify(f, errors=CHECKS))(*args)[0].get())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "f"),
    [*(("gradient", f) for f in CHECKED), *(("value", f) for f in CHECKED[3:]), ("jit of the gradient", in_a_loop)],
)
def test_checkify_finds_what_it_finds_in_the_plain_function(way, f):
    args = normal(3, 3), normal(2, 3, seed=1)
    report = checked(WAYS[way](f), *args)
    assert report != "None"
    assert checked(WAYS[way](rpx.remat(f)), *args) == report


def nothing_wrong(w, key, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ jnp.sin(w)) @ jnp.cos(w)))


def test_checkify_finds_an_error_of_the_derivative():
    args = normal(3, 3), normal(2, 3, seed=1)
    dot = jnp.ones((3, 3))
    for derivative in (jax.grad, lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (dot,))):
        assert checked(rpx.remat(in_its_derivative), *args) == "None"
        report = checked(derivative(in_its_derivative), *args)
        assert report != "None"
        assert checked(derivative(rpx.remat(in_its_derivative)), *args) == report


def of_checked(f):
    return lambda *args: checkify.checkify(f, errors=CHECKS)(*args)[1]


def test_the_derivative_of_a_checked_function_keeps_nothing_more(key):
    args = normal(3, 3), key, normal(2, 3)
    assert kept(of_checked(nothing_wrong), *args)["weights"] > 0
    assert kept(of_checked(rpx.remat(nothing_wrong)), *args)["weights"] == 0


@pytest.mark.thorough
def test_the_derivative_of_a_checked_function_is_that_of_the_function(key):
    args = normal(3, 3), key, normal(2, 3)
    trees_close(*gradients((of_checked(rpx.remat(nothing_wrong)), nothing_wrong), *args))


# ---- Transformations around it


@pytest.mark.thorough
@pytest.mark.parametrize("number", [0, 1])
def test_taylor_series_are_those_of_the_plain_function(number):
    """Of a tanh along one direction, by its derivatives, and of the gradient; the chain runs in ``jax.checkpoint``."""
    noise = rpx.VarNoise(0.5)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ noise.apply({"w": w}, jax.random.key(0))["w"]))

    w, x, change = (
        np.random.default_rng(i).normal(size=n).astype(np.float32)
        for i, n in enumerate([(3, 4), (5, 3), [(3, 4), (5, 3)][number]])
    )
    again = rpx.remat(loss, argnums=(0,))

    def along(f):
        return jet(lambda a: f(*(w, a) if number else (a, x)), ((x if number else w),), ((change, 0 * change),))

    value, (first, second) = jax.jit(lambda: along(again))()
    (_, slopes), noisy = jax.jit(lambda: (along(jax.grad(again)), noise.apply({"w": w}, jax.random.key(0))))()
    noisy, x, change = (np.asarray(each, np.float64) for each in (noisy["w"], x, change))
    t, u = np.tanh(x @ noisy), change @ noisy if number else x @ change
    np.testing.assert_allclose(
        [value, first, second], [t.sum(), np.sum((1 - t**2) * u), np.sum(-2 * t * (1 - t**2) * u**2)], rtol=1e-4
    )
    moved = x.T @ (-2 * t * (1 - t**2) * u) + (change.T @ (1 - t**2) if number else 0)
    np.testing.assert_allclose(slopes[0], moved, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_vmap_inside_and_outside():
    keys = jax.random.split(ROOT, 3)

    @jax.jit
    def both(raw, keys, x):
        def all_of(f):
            over_keys = jax.vmap(f, (None, 0, None))
            return {
                "of the gradient": jax.vmap(jax.grad(f), (None, 0, None))(raw, keys, x),
                "inside": jax.grad(lambda raw: jnp.mean(over_keys(raw, keys, x)))(raw),
            }

        return all_of(smooth), all_of(rpx.remat(smooth))

    expected, got = both(SMOOTH, keys, X)
    trees_close(got, expected)
    over_keys = jax.vmap(rpx.remat(smooth), (None, 0, None))
    assert kept(lambda raw, keys, x: jnp.mean(over_keys(raw, keys, x)), SMOOTH, keys, X)["weights"] == 0


def test_the_users_checkpoint_outside():
    around = jax.checkpoint(rpx.remat(loss), policy=jax.checkpoint_policies.dots_saveable)
    trees_close(jax.grad(around)(RAW, ROOT, X), jax.grad(loss)(RAW, ROOT, X))
    assert kept(jax.checkpoint(rpx.remat(loss)), RAW, ROOT, X)["weights"] == 0


def layers(body):
    """A network of stacked layers whose parametrization is applied in the body of the scan."""
    return lambda raw, keys, x: jnp.mean(jax.lax.scan(body, x, (raw, keys))[0] ** 2)


def layer(h, raw_and_key):
    raw, key = raw_and_key
    return jnp.tanh(h @ P.apply(raw, key)["kernel"]), None


LAYERS = {"kernel": np.asarray(normal(8, 64, 64)) / 8}
BY_HAND = layers(layer)


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(layers(rpx.remat(layer, argnums=1)), id="remat of the body", marks=pytest.mark.thorough),
        pytest.param(rpx.remat(layers(layer)), id="remat of the loss", marks=pytest.mark.thorough),
    ],
)
def test_stages_in_the_body_of_a_scan(f):
    def by_hand(h, raw_and_key):
        raw, key = raw_and_key
        w = raw["kernel"]["@weight_norm"]
        effective = w["g"] * w["v"] / jnp.linalg.norm(w["v"], axis=0, keepdims=True)
        return jnp.tanh(h @ (effective + 0.1 * jax.random.normal(key, effective.shape))), None

    raw, keys, x = jax.jit(jax.vmap(P.init))(LAYERS), jax.random.split(ROOT, 8), normal(4, 64)
    assert kept(f, raw, keys, x)["weights"] == 0
    expected, got = jax.jit(jax.grad(BY_HAND))(raw, keys, x), jax.jit(jax.grad(f)).lower(raw, keys, x).compile()
    trees_close(got(raw, keys, x), expected)
    theirs = jax.jit(jax.grad(layers(by_hand))).lower(raw, keys, x).compile()
    ours, theirs = (c.memory_analysis().temp_size_in_bytes for c in (got, theirs))
    assert ours <= theirs / 2


# ---- Many devices


@pytest.mark.thorough
def test_sharded_under_jit():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def placed(tree, spec):
        return jax.tree.map(
            lambda w: jax.device_put(w, NamedSharding(mesh, spec if w.shape[-1] == 8 else Spec())), tree
        )

    raw, x = placed(SMOOTH, Spec(None, "data")), jax.device_put(normal(8, 8), NamedSharding(mesh, Spec("data")))
    expected, got = jax.jit(jax.grad(smooth))(raw, ROOT, x), jax.jit(jax.grad(rpx.remat(smooth)))(raw, ROOT, x)
    trees_close(got, expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_shard_map(inside):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def mapped(f):
        def shards(raw, key, x):
            return jax.lax.pmean(f(raw, key, x), "data")

        return jax.shard_map(shards, mesh=mesh, in_specs=(Spec(), Spec(), Spec("data")), out_specs=Spec())

    f = mapped(rpx.remat(loss)) if inside else rpx.remat(mapped(loss))
    plain = kept(mapped(lambda w, _, x: mlp(w, x)), WEIGHTS, ROOT, X)
    after = kept(f, RAW, ROOT, X)
    assert after["weights"] <= 4  # the number of entries in the mean, which is no weight
    assert after["others"] == plain["others"]
    trees_close(jax.jit(jax.grad(f))(RAW, ROOT, X), jax.grad(loss)(RAW, ROOT, X))


# ---- Networks from other libraries


# ---- Without remat


def test_apply_keeps_no_more_than_effective_weights():
    p = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1) >> rpx.WeightDropout(0.2)
    raw = jax.eval_shape(p.init, WEIGHTS)
    plain = kept(lambda w, _, x: mlp(w, x), WEIGHTS, ROOT, X)
    before = kept(lambda raw, key, x: mlp(p.apply(raw, key), x), raw, ROOT, X)
    effective = sum(w.nbytes for w in jax.tree.leaves(WEIGHTS))
    assert 0 < before["weights"] <= plain["weights"] + effective
    assert before["others"] == plain["others"]


def test_apply_passes_on_what_it_does_not_change():
    class Odd:
        pass

    tree = {"w": normal(2, 2), "n": np.arange(3), "odd": Odd(), "flag": True, "none": None, "k": ROOT, "f": jnp.tanh}
    effective = rpx.VarNoise(0.1, where="w").apply(tree, ROOT)
    assert effective["w"] is not tree["w"]
    assert all(effective[name] is tree[name] for name in tree if name != "w")


# ---- What an attack found


def test_under_vmap_what_does_not_depend_on_the_batch_has_none(key):
    v = jnp.arange(1.0, 4.0)

    def gains(w, key):
        return jnp.sum(jnp.sin(w), axis=0)  # of weights alone

    def total(f, w, x):
        return jnp.sum(jax.vmap(lambda x: jnp.sum(x @ w) * jnp.vdot(f(w, key), v))(x))

    args = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 2), np.float32)
    expected, got = jax.jit(
        lambda *args: [jax.value_and_grad(functools.partial(total, f))(*args) for f in (gains, rpx.remat(gains))]
    )(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)


def test_the_name_of_a_batch_may_be_any_object(key):
    name = type("Axis", (), {})()

    def loss(w, key, x):
        return jax.lax.pmean(jnp.sum(jnp.tanh(x @ w)), name)

    def total(f, w, x):
        return jnp.sum(jax.vmap(f, (None, None, 0), axis_name=name)(w, key, x))

    args = np.ones((2, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 1, 2) / 3
    grads = gradients([functools.partial(total, f) for f in (loss, rpx.remat(loss))], *args)
    np.testing.assert_allclose(*grads, rtol=1e-6, atol=1e-6)


def test_no_tracer_leaks(key):
    def loss(w, key, x):
        return jnp.sum(jnp.tanh(x @ (w + jax.random.normal(key, w.shape))))

    with jax.checking_leaks():
        slope = jax.grad(rpx.remat(loss))(np.ones((2, 2), np.float32), key, np.ones((1, 2), np.float32))
    assert np.all(np.isfinite(slope))


def test_nothing_is_kept_for_an_output_that_nobody_differentiates(key):
    def loss(w, key, x):
        return jnp.sum(x @ jnp.sin(w)), jnp.tanh(jnp.exp(x @ w))

    args = normal(8, 8), key, normal(8, 8, seed=1)
    plain, remat = (rpx.transforms.saved_residuals(f, *args, has_aux=True) for f in (loss, rpx.remat(loss)))
    assert remat.bytes("activations") == plain.bytes("activations") == 256
    assert remat.bytes("weights") == 0


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, slope: (jnp.clip(slope, -0.5, 0.5),))


def with_a_backward_pass_by_hand(w, key, x):
    return jnp.sum(clipped(jnp.tanh(x @ jnp.sin(w + 0.1 * jax.random.normal(key, w.shape)))) ** 2)


def with_a_choice_by_data(w, key, x):
    w = jnp.sin(w)
    return jnp.sum(jax.lax.cond(jnp.sum(x) > 0, lambda: jax.lax.stop_gradient(x) @ w, lambda: jnp.tanh(x @ w)))


@pytest.mark.thorough
@pytest.mark.parametrize("f", [with_a_backward_pass_by_hand, with_a_choice_by_data])
def test_a_batch_of_what_cannot_be_batched_after_its_derivative(f, key):
    def total(f):
        return lambda w, x: jnp.sum(jax.vmap(f, (None, None, 0))(w, key, x))

    args = normal(4, 4), normal(3, 2, 4, seed=1)
    expected, got = (jax.jit(jax.value_and_grad(total(f)))(*args) for f in (f, rpx.remat(f)))
    trees_close(got, expected)


def test_the_forward_pass_is_not_split_for_tangents_that_come_later():
    # JAX looks in loops and calls for what depends on a tangent, and leaves an empty call where it finds nothing.
    p = rpx.WeightNorm(axis=-1)
    raw, product = p.init({"w": normal(8, 8)}), jax.jit(lambda x, w: jnp.tanh(x @ w))

    def loss(raw, x):
        w = p.apply(raw)["w"]
        return jnp.sum(jax.lax.scan(lambda x, _: (product(x, w), None), x, length=3)[0])

    assert all(eqn.outvars for eqn in jax.make_jaxpr(jax.grad(rpx.remat(loss)))(raw, normal(4, 8)).eqns)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
