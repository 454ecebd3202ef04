"""Without ``jax.jit``: what JAX has compiled for one call serves all later ones, also of a chain made anew."""

import copy
import resource

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, OF_EACH_CLASS

import reparax as rpx
from reparax.transforms import local_reparametrization

KEY = jax.random.key(1)
COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: COMPILED.append(event) if event.endswith("/backend_compile_duration") else None
)


def squares(tree):
    return sum(jnp.sum(jnp.abs(x).astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree) if not is_integer(x))


def is_integer(x):
    return jnp.issubdtype(x.dtype, jnp.integer)


def programs_of_a_third_call(f):
    """How many programs JAX compiles for a call that it has run twice."""
    for _ in range(2):
        jax.block_until_ready(jax.tree.leaves(f()))
    before = len(COMPILED)
    f()
    return len(COMPILED) - before


def ways_of(p, raw):
    """What runs the formulas of each stage, and other gradients, of a loss in which the chain is made anew."""
    free, fixed = rpx.partition(raw)

    def loss(free):
        effective = copy.deepcopy(p).apply(rpx.combine(free, fixed), KEY)
        real = [x for x in jax.tree.leaves(effective) if jnp.issubdtype(x.dtype, jnp.floating)]
        return squares(effective) + sum(jnp.sum(jax.nn.silu(x)).astype(jnp.float32) for x in real)  # a custom_jvp

    of_each_stage = {
        "grad": lambda: jax.grad(loss)(free),
        "update": lambda: p.update(raw, KEY),
        "penalty": lambda: p.penalty(raw),
    }
    return of_each_stage, {
        "product with the hessian": lambda: jax.jvp(jax.grad(loss), (free,), (free,)),
        "vjp": lambda: jax.vjp(loss, free)[1](jnp.float32(1)),
        "linearize": lambda: jax.linearize(loss, free)[1](free),
        "local": lambda: jax.grad(local_reparametrization(loss))(free),
        "remat": lambda: jax.grad(rpx.remat(loss))(free),
    }


def assert_nothing_again(ways):
    assert {way: programs_of_a_third_call(f) for way, f in ways.items()} == dict.fromkeys(ways, 0)


# Stages with derivatives that are written by hand, for which JAX might make a function anew.
BY_HAND = ("orthogonal", "quantize", "spectral norm")


@pytest.mark.thorough
@pytest.mark.parametrize("case", OF_EACH_CLASS)
def test_the_formulas_of_no_stage_compile_again(case):
    p, params = CASES[case]
    of_each_stage, others = ways_of(p, p.init(params(), KEY))
    hessian = "product with the hessian"
    assert_nothing_again(of_each_stage | ({hessian: others[hessian]} if case in BY_HAND else {}))


@pytest.mark.thorough
def test_eager_gradients_compile_nothing_again():
    p, params = CASES["weight norm >> noise"]
    of_each_stage, others = ways_of(p, p.init(params(), KEY))
    assert_nothing_again(of_each_stage | others)


def test_an_eager_gradient_compiles_nothing_again():
    p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
    raw = jax.jit(p.init)({"w": np.ones((3, 2), np.float32)})
    assert programs_of_a_third_call(lambda: jax.grad(lambda raw: squares(copy.deepcopy(p).apply(raw, KEY)))(raw)) == 0


@pytest.mark.thorough
def test_a_hessian_compiles_nothing_again():
    p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
    raw = p.init({"w": jnp.ones((3, 2))})
    assert programs_of_a_third_call(lambda: jax.hessian(lambda raw: squares(p.apply(raw, KEY)))(raw)) == 0


@pytest.mark.thorough
def test_eager_gradients_take_no_memory_with_them():
    p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
    raw = p.init({"w": jnp.ones((8, 4))})

    def most_memory_after(calls):
        for _ in range(calls):
            jax.grad(lambda raw: squares(p.apply(raw, KEY)))(raw)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = most_memory_after(20)
    assert most_memory_after(200) - before < 20_000  # KiB; a program that stays takes about 7000 in each call


def test_a_formula_of_stacked_arrays_is_not_traced_again(monkeypatch):
    traced, apply_leaf = [], rpx.WeightNorm.apply_leaf
    monkeypatch.setattr(rpx.WeightNorm, "apply_leaf", lambda self, values: traced.append(1) or apply_leaf(self, values))
    p = rpx.WeightNorm(axis=-1, stacked=0) >> rpx.Gaussian(0.1, prior=1.0)
    raw = p.init({"w": np.ones((2, 3, 5), np.float32)})
    p.penalty(raw)
    traced.clear()
    p.penalty(raw)
    assert traced == []


def programs_of(f):
    """How many programs JAX compiles for a call."""
    before = len(COMPILED)
    jax.block_until_ready(jax.tree.leaves(f()))
    return len(COMPILED) - before


def test_a_start_is_one_program_for_all_arrays_of_a_type():
    params = {name: jnp.full((7, 3), value) for name, value in {"u": 1.0, "w": 2.0}.items()}
    raw = []
    assert programs_of(lambda: raw.append(rpx.WeightNorm(axis=-1).init(params))) == 1
    np.testing.assert_allclose(raw[0]["w"]["@weight_norm"]["g"], np.full((1, 3), 2 * 7**0.5), rtol=1e-6)


def test_large_arrays_of_one_type_draw_by_no_program_for_each():
    p, noise = rpx.WeightDropout(0.5, where=".*"), []
    params = {f"w{i}": jnp.ones((2**14 + 1,)) for i in range(24)}
    assert programs_of(lambda: noise.append(p.apply(params, KEY))) < len(params)
    jax.tree.map(np.testing.assert_array_equal, noise[0], jax.jit(p.apply)(params, KEY))


class AboveLow(rpx.Reparametrization):
    """A start that numpy computes and that refuses numbers, which it can only where there are numbers."""

    def init_leaf(self, w):
        if not isinstance(w, jax.core.Tracer) and (w < 0).any():
            raise ValueError("negative")
        low = np.asarray(w).min()
        return {"low": jnp.asarray(low), "x": w - low}

    def apply_leaf(self, values):
        return values["x"] + values["low"]


def test_a_start_of_ones_own_may_look_at_numbers_outside_of_programs():
    first, second = (AboveLow().init({"w": np.array([low, 3.0], np.float32)}) for low in (2, 1))
    assert (first["w"]["@above_low"]["low"], second["w"]["@above_low"]["low"]) == (2, 1)
    np.testing.assert_array_equal(AboveLow().apply(first)["w"], [2, 3])
    with pytest.raises(ValueError, match=r"AboveLow\(\).init at 'w': negative"):
        AboveLow().init({"w": np.array([-1.0, 3.0], np.float32)})
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(AboveLow().init)({"w": np.array([2.0, 3.0], np.float32)})


def test_without_jit_no_program_splits_a_draw_into_all_its_arrays(monkeypatch):
    """It would have a kernel for each, and take seconds to compile."""
    splits, split = [], jax.lax.split
    monkeypatch.setattr(jax.lax, "split", lambda x, sizes: splits.append(len(sizes)) or split(x, sizes))
    p, params = rpx.VarNoise(0.1), {name: jnp.ones((3, 5)) for name in "abc"}
    eager = p.apply(params, KEY)
    assert splits == []
    jitted = jax.jit(p.apply)(params, KEY)
    assert splits == [3]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), eager, jitted)
