"""Numbers that differ from array to array."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises, table
from public import PUBLIC

import reparax as rpx

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model():
    dense = {"kernel": normal(8, 6), "bias": normal(6, seed=1)}
    return {"encoder": dense, "decoder": {"kernel": normal(8, 6, seed=2), "bias": normal(6, seed=3)}}


def shift(p, params, key=KEY):
    return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), jax.jit(p.apply)(params, key), params)


TWO = {"decoder/.*": 0.5, "encoder/kernel": 0.25}
NESTED = {"decoder/kernel": 0.5, "decoder/.*": 0.125, ".*": 0.25}  # the first that matches decides


def test_each_array_has_the_number_of_the_expression_that_matches_it():
    params = jax.tree.map(np.zeros_like, model())
    got, one = shift(rpx.VarNoise(TWO), params), shift(rpx.VarNoise(1.0), params)
    for path, number in ((("decoder", "kernel"), 0.5), (("decoder", "bias"), 0.5), (("encoder", "kernel"), 0.25)):
        np.testing.assert_allclose(got[path[0]][path[1]], number * one[path[0]][path[1]], rtol=1e-6)
    assert not got["encoder"]["bias"].any()  # which none matches


def test_the_first_expression_that_matches_decides():
    params = jax.tree.map(np.zeros_like, model())
    p, one = rpx.VarNoise(NESTED), shift(rpx.VarNoise(1.0), params)
    numbers = {"decoder": {"kernel": 0.5, "bias": 0.125}, "encoder": {"kernel": 0.25, "bias": 0.25}}
    for chain in (p, rpx.from_json(p.to_json()), pickle.loads(pickle.dumps(p))):
        assert chain == p
        assert repr(chain) == "VarNoise({'decoder/kernel': 0.5, 'decoder/.*': 0.125, '.*': 0.25})"
        got = shift(chain, params)
        jax.tree.map(lambda x, y, n: np.testing.assert_allclose(x, n * y, rtol=1e-6), got, one, numbers)
    assert p != rpx.VarNoise(dict(reversed(NESTED.items())))


def test_the_first_expression_decides_which_axes():
    p = rpx.WeightNorm(axis={"decoder/.*": 0, ".*kernel": 1})
    raw = p.init(model())
    for layer, axis in (("decoder", 0), ("encoder", 1)):
        norms = np.linalg.norm(model()[layer]["kernel"], axis=1 - axis, keepdims=True)
        np.testing.assert_allclose(raw[layer]["kernel"]["@weight_norm"]["g"], norms, rtol=1e-5)
    stacked = rpx.WeightNorm(axis=-1, stacked={"decoder/.*": 0, ".*": ()}, where=".*kernel")
    assert stacked.init({"decoder": {"kernel": normal(2, 3, 4)}, "encoder": {"kernel": normal(3, 4)}})["decoder"][
        "kernel"
    ]["@weight_norm"]["g"].shape == (2, 1, 4)


def test_a_function_of_path_and_array_gives_the_number():
    def width(path, w):
        return w.shape[0] ** -0.5 if path.endswith("kernel") else 1.0

    p = rpx.numbers.Scale(width, where=".*")
    raw = p.init(model())
    np.testing.assert_allclose(
        raw["encoder"]["kernel"]["@scale"]["x"], model()["encoder"]["kernel"] * 8**0.5, rtol=1e-6
    )
    np.testing.assert_array_equal(raw["encoder"]["bias"]["@scale"]["x"], model()["encoder"]["bias"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), p.apply(raw), model())
    assert p == rpx.numbers.Scale(width, where=".*")
    assert p != rpx.numbers.Scale(lambda path, w: 1.0, where=".*")


STAGES = [
    rpx.WeightDropout({"decoder/.*": 0.5, "encoder/.*": 0.25}),
    rpx.numbers.Scale({"decoder/.*": 2.0}),
    rpx.MagnitudePruning({"decoder/.*": 0.5, "encoder/.*": 0.25}),
    rpx.sparse.RandomPruning({"decoder/kernel": 0.5}),
    rpx.Gaussian({"decoder/kernel": 0.5, "encoder/.*": 0.1}, prior={".*": 2.0}),
    rpx.LoRA(2, {"decoder/.*": 2.0, "encoder/.*": 4.0}),
    rpx.norms.MaxNorm({"decoder/.*": 2.0}),
    rpx.WeightNorm() >> rpx.VarNoise(TWO),
    rpx.VarNoise({"decoder/kernel": 0.1}) >> rpx.VarNoise({".*kernel": 0.2}),
]


@pytest.mark.parametrize("p", STAGES, ids=repr)
def test_numbers_are_in_repr_json_equality_and_hash(p):
    again = eval(repr(p), {**PUBLIC})
    assert (again, hash(again)) == (p, hash(p))
    assert rpx.from_json(p.to_json()) == p
    assert repr(rpx.VarNoise(TWO)) == f"VarNoise({TWO!r})"
    assert rpx.VarNoise(TWO) != rpx.VarNoise({**TWO, "encoder/kernel": 0.3})


def penalty(p, params):
    return float(jax.jit(lambda params: p.penalty(p.init(params)))(params))


def test_sparsity_and_penalty_are_those_of_each_array():
    p = rpx.MagnitudePruning({"decoder/.*": 0.5, "encoder/.*": 0.25})
    folded = jax.tree.map(np.asarray, p.fold(p.init(model())))
    assert [int((folded[name]["kernel"] == 0).sum()) for name in ("decoder", "encoder")] == [24, 12]
    q = rpx.Gaussian(1.0, prior={"decoder/bias": 1.0, "encoder/bias": 2.0})
    want = sum(
        penalty(rpx.Gaussian(1.0, prior=s), {"b": model()[name]["bias"]})
        for name, s in (("decoder", 1.0), ("encoder", 2.0))
    )
    np.testing.assert_allclose(penalty(q, model()), want, rtol=1e-6)


def test_traced_numbers_compile_once_over_a_schedule():
    schedule = optax.linear_schedule(0.0, 0.5, 10)

    @jax.jit
    def noisy(step):
        return rpx.VarNoise({"decoder/.*": schedule(step), "encoder/.*": 0.1}).apply(model(), KEY)

    with jax.numpy_dtype_promotion("standard"):
        late, early = noisy(10), noisy(0)
    assert noisy._cache_size() == 1
    assert np.array_equal(early["decoder"]["kernel"], model()["decoder"]["kernel"])
    np.testing.assert_allclose(
        late["decoder"]["kernel"], rpx.VarNoise(0.5).apply(model(), KEY)["decoder"]["kernel"], rtol=1e-5
    )
    grads = jax.grad(lambda s: jnp.sum(rpx.VarNoise({"decoder/kernel": s}).apply(model(), KEY)["decoder"]["kernel"]))(
        0.5
    )
    np.testing.assert_allclose(grads, np.sum(shift(rpx.VarNoise(1.0), model())["decoder"]["kernel"]), rtol=1e-3)


def test_a_where_and_numbers_select_together():
    p = rpx.VarNoise(TWO, where=".*kernel")
    got = shift(p, model())
    assert [bool(got[a][b].any()) for a in ("decoder", "encoder") for b in ("kernel", "bias")] == [True, False] * 2


def test_a_function_gets_types_alone_and_is_told_so():
    p = rpx.norms.MaxNorm(lambda path, w: jnp.max(jnp.abs(w)))
    with pytest.raises(
        TypeError, match=r"^MaxNorm got a function as max_norm that fails for 'w': .* The function must take the "
    ):
        p.init({"w": normal(2, 2)})


def test_shardings_and_checks_know_them():
    p = rpx.LoRA(2, {"decoder/.*": 2.0})
    raw = p.init(model(), jax.random.key(0))
    p.check(raw, like=model())
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    specs = jax.tree.map(lambda w: jax.P("x") if w.ndim > 1 else jax.P(), model())
    assert p.shardings(specs, mesh, like=model())["decoder"]["kernel"]["@lora"]["a"].spec[0] == "x"


def two(path, w):
    return 2.0


@pytest.mark.parametrize(
    "ask", [lambda p, w: p.contains(w), lambda p, w: p.project(w), lambda p, w: p.sample(jax.random.key(0), w.shape)]
)
@pytest.mark.parametrize(
    "p", [rpx.norms.Sphere(radius={"w": 2.0}, along=-1), rpx.norms.Sphere(along={"w": 0})], ids=repr
)
def test_a_stage_that_differs_between_arrays_does_not_speak_of_one(p, ask):
    w = jnp.ones((4, 2)) * 0.5
    with raises(
        ValueError,
        f"{p!r} differs from array to array, so it has no single image. Use the stage of one array: "
        f"`stage.for_array(path, w)`.",
    ):
        ask(p, w)
    one = p.for_array("w", w)
    assert one.contains(one.project(w))


class Declared(rpx.Perturbation):
    """A field for each option of what declares it."""

    stochastic = False
    any: rpx.stage.Number = rpx.stage.number_field()
    axes: Any = rpx.stage.axes_field(default=(1,))
    one: rpx.stage.Number = rpx.stage.number_field(
        positive=True, per_array=False, default=np.float32(0.1), kw_only=True
    )
    last: Any = rpx.stage.axes_field(default=None, kw_only=True)
    free: Any = rpx.stage.field(default=1, kw_only=True)

    def apply_leaf(self, w, key):
        return w


def test_what_declares_a_field_says_what_it_takes_and_where():
    p = Declared(-1, 0)
    assert (p.any, p.axes, p.one, p.last, p.free) == (-1.0, 0, 0.1, None, 1)
    assert Declared({"w": -1}).axes == 1
    assert Declared({"w": -1}).for_array("w", None).any == -1.0
    for kind, given in (
        (TypeError, {}),
        (TypeError, {"any": 1, "axes": 0.5}),
        (TypeError, {"any": 1, "one": {"w": 1.0}}),
        (ValueError, {"any": 1, "one": 0}),
        (ValueError, {"any": 1, "last": (0, 0)}),
    ):
        with pytest.raises(kind):
            Declared(**given)
    with pytest.raises(TypeError):
        Declared(1, 0, 1.0)


@table(__file__)
def test_numbers_that_vary_and_make_no_sense_are_refused(case):
    case.check(globals())
