"""Finite numbers of any magnitude give finite numbers in each format and fit, and what is not finite is not hidden."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective, init
from errors import table
from grids import mostly_thorough

import reparax as rpx

FORMATS = tuple(rpx.quantized._formats.FORMATS)
DTYPES = ("float32", "float16", "bfloat16")


@functools.cache
def extremes(dtype):
    """Columns of blocks of 16 numbers: one kind in each column."""
    info, rng = jnp.finfo(dtype), np.random.default_rng(0)
    most, least, tiny = float(info.max), float(info.smallest_subnormal), float(info.tiny)
    normal, signs = rng.standard_normal(32), np.sign(rng.standard_normal(32))
    columns = {
        "normal": normal,
        "zeros": 0 * normal,
        "ones": np.ones(32),
        "constant": np.full(32, -0.3),
        "largest": most * signs,
        "largest of one sign": np.full(32, -most),
        "up to the largest": most * np.clip(normal / 2, -1, 1),
        "uneven": most * np.where(signs > 0, 0.55, -1),
        "beside zeros": most * (np.arange(32) == 5),
        "subnormal": least * rng.integers(-9, 9, 32),
        "least": np.full(32, least),
        "near the least normal": tiny * normal,
        "a last bit apart": 1 + float(info.eps) * (signs > 0),
        "large and a last bit apart": most / 4 * (1 + float(info.eps) * (signs > 0)),
        "far from zero": 1000 + normal,
        "of all magnitudes": signs * np.exp(np.linspace(np.log(least), np.log(most), 32)),
        "one number": np.where(np.arange(32) == 3, 1e-3, 0),
    }
    return np.clip(np.stack(list(columns.values()), axis=1), -most, most).astype(jnp.dtype(dtype))


FITS = {
    "absmax": {},
    "rms": {"calibration_method": "rms", "calibration_scale": 2.5},
    "fixed": {"calibration_method": "fixed", "calibration_scale": 1e30},
    "scaled": {"calibration_scale": 3.0},
    "twice": {"double_quant": True},
}


def stages(name, fits, stage=rpx.Quantized):
    """The format with those of the fits that it has."""
    row = rpx.quantized._formats.FORMATS[name]
    block = {} if row.block else {"block_size": 16}
    for fit, fields in ((fit, FITS[fit]) for fit in fits):
        if fit != "twice" or not (row.numbers.bits == 8 or row.scales):
            yield fit, stage(name, **block, **fields)


def pairs():
    """A dtype for each format, with the usual fit and two of the others, and a few more."""
    for i, name in enumerate(FORMATS):
        fits = ("absmax", *(list(FITS)[1 + (i + j) % 4] for j in range(2)))
        yield name, ("float32", "float16")[i % 2], fits
        if i % 4 == 0:
            yield name, "bfloat16", fits


CASES = {f"{name} {dtype}": (name, dtype, fits) for name, dtype, fits in pairs()}


@pytest.mark.parametrize("case", mostly_thorough(CASES, "uint4 float32", "gguf:q4_0 float16"))
def test_finite_numbers_stay_finite(case):
    name, dtype, fits = CASES[case]

    @jax.jit
    def both(w):
        raws = {fit: p.init({"w": w}) for fit, p in stages(name, fits)}
        found = {fit: (raws[fit], p.apply(raws[fit])["w"]) for fit, p in stages(name, fits)}
        return found, {fit: p.apply({"w": w})["w"] for fit, p in stages(name, fits, rpx.FakeQuantized)}

    stored, rounded = both(extremes(dtype))
    for fit, found in [*stored.items(), *rounded.items()]:
        for x in jax.tree.leaves(found):
            assert np.all(np.isfinite(np.asarray(x).astype(np.float32))), fit


@pytest.mark.parametrize("dtype", mostly_thorough(DTYPES, "float32"))
def test_what_is_rounded_is_near(dtype):
    w = extremes(dtype)
    wide = w.astype(np.float64)
    largest = np.repeat(np.max(np.abs(wide.reshape(2, 16, -1)), axis=1), 16, axis=0)
    least = 4 * float(np.finfo(np.float32).tiny)  # XLA takes numbers below for zeros
    bounds = {"int4": 1 / 14, "int8": 1 / 254, "uint4": 2 / 15, "nf4": 0.16, "float8_e4m3fn": 2**-4, "mxfp4": 0.26}
    got = jax.jit(lambda w: {name: rpx.FakeQuantized(name, block_size=16).apply({"w": w})["w"] for name in bounds})(w)
    for name, bound in bounds.items():
        off = np.abs(np.asarray(got[name]).astype(np.float64) - wide)
        slack = 2 * float(jnp.finfo(dtype).eps) * largest + 8 * float(jnp.finfo(dtype).smallest_subnormal)
        assert np.all(off <= bound * largest + slack + least), name


@pytest.mark.parametrize("step", ["absmax", "learned"])
def test_ternary_numbers_and_learned_steps_are_finite(step):
    p = rpx.FakeQuantized("ternary" if step == "absmax" else "int4", block_size=16, step=step)
    for dtype, got in effective(p, init(p, {dtype: extremes(dtype) for dtype in DTYPES})).items():
        assert np.all(np.isfinite(np.asarray(got).astype(np.float32))), dtype


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(value):
    w = np.ones((32, 2), np.float32)
    w[3, 1] = value
    names = ("int4", "uint4", "nf4", "mxfp4", "nvfp4", "gguf:q4_0", "gguf:q4_1", "gguf:q4_k")
    fits = {"int8": "fixed", "int3": "rms"}

    @jax.jit
    def each(w):
        ways = {name: rpx.FakeQuantized(name) for name in names} | {
            name: rpx.FakeQuantized(name, calibration_method=fit) for name, fit in fits.items()
        }
        found = {name: p.apply({"w": w})["w"] for name, p in ways.items()}
        return found | {
            "negated": ways["uint4"].apply({"w": -w})["w"],
            "least": ways["gguf:q4_1"].apply({"w": -w})["w"],
        }

    for name, got in each(w).items():
        assert np.isnan(got[3, 1]), name


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
