"""Random chains, bit for bit: what a change of the core must leave as it is.

``PYTHONPATH=src python benchmarks/chains.py FILE`` draws 2000 chains of one to four stages and writes a digest of each
raw tree, draw, mean, update and JSON to the file. If the file exists, it compares with it instead, and names each chain
that differs. The numbers of one machine and one JAX are no promise for another, so the file says which it was.
"""

import hashlib
import json
import platform
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx

CHAINS = 30
STACK, ROWS = ".*layers/.*", ".*(enc|dec)/kernel"


def model() -> dict[str, Any]:
    """Two layers of one shape, three stacked ones, and an output."""
    k = jax.random.split(jax.random.key(0), 4)
    return {
        "enc": {"kernel": jax.random.normal(k[0], (4, 4)), "bias": jnp.arange(1.0, 5.0)},
        "dec": {"kernel": jax.random.normal(k[1], (4, 4)), "bias": jnp.ones(4)},
        "layers": {"kernel": jax.random.normal(k[2], (3, 4, 4)), "bias": jnp.ones((3, 4))},
        "out": {"kernel": jax.random.normal(k[3], (4, 2))},
    }


def along(stage: Callable[..., Any], axis: int, **others: Any) -> Any:
    """The stage with the word for its axes that this version has."""
    try:
        return stage(along=axis, **others)
    except TypeError:
        return stage(axis=axis, **others)


def stages(pick: random.Random) -> Any:
    """One random stage, with one of the selections that it takes."""
    number = round(pick.uniform(0.05, 0.9), 3)
    axis = pick.choice([0, -1])
    square = {"where": pick.choice(["enc/kernel", "dec/kernel", ROWS])}
    stacked = {"where": STACK.replace("/.*", "/kernel"), "stacked": 0}
    some = pick.choice([{}, square, stacked, {"where": rpx.all_but("out/.*")}, {"where": lambda path, w: w.ndim > 1}])
    matrices = pick.choice([square, stacked, {"where": "out/kernel"}])
    quadratic = pick.choice([square, stacked])
    noise = pick.choice([{}, square, stacked, {"where": ".*bias"}])
    inside = {"outside": "project"}
    return pick.choice(
        [
            lambda: rpx.VarNoise(number, **noise),
            lambda: rpx.VarNoise(number, **noise),
            lambda: rpx.VarNoise(number, rank=1, **matrices),
            lambda: rpx.VarNoise(number, relative="max", axis=axis, **matrices),
            lambda: rpx.VarNoise({"enc/.*": number, "dec/kernel": 0.5}),
            lambda: rpx.WeightDropout(number, **some),
            lambda: rpx.WeightDropout(number, **some),
            lambda: rpx.WeightDropout(number, broadcast=axis, **matrices),
            lambda: rpx.WeightNorm(axis=axis, **some),
            lambda: rpx.WeightNorm(axis=None, detach=True, **some),
            lambda: rpx.WeightStandardization(axis=axis, **some),
            lambda: rpx.SpectralNorm(**matrices),
            lambda: along(rpx.Sphere, axis, **some),
            lambda: rpx.MaxNorm(1.0, axis=axis, **some),
            lambda: along(rpx.PoincareBall, axis, curvature=0.01, **some),
            lambda: rpx.Positive(where="dec/bias"),
            lambda: rpx.Bounded(-9, 9, **inside, **some),
            lambda: rpx.Scale(number, **some),
            lambda: rpx.Symmetric(**inside, **quadratic),
            lambda: rpx.Triangular(**inside, **quadratic),
            lambda: rpx.Circulant(**inside, **quadratic),
            lambda: rpx.Orthogonal(pick.choice(["cayley", "expm"]), **inside, **quadratic),
            lambda: rpx.LowRank(2, **matrices),
            lambda: rpx.Kronecker((2, 2), **quadratic),
            lambda: rpx.LoRA(2, **matrices),
            lambda: rpx.LoRA(1, alpha=2.0, **matrices),
            lambda: rpx.VeRA(3, **square),
            lambda: rpx.Hadamard(**matrices),
            lambda: rpx.Delta(**some),
            lambda: rpx.Gain(axis=-1, **some),
            lambda: rpx.Freeze(**some),
            lambda: rpx.Freeze(where=".*bias"),
            lambda: rpx.MagnitudePrune(number, **some),
            lambda: rpx.GlobalPrune(number, **square),
            lambda: rpx.RandomPrune(number, **some),
            lambda: rpx.SET(number, **square),
            lambda: rpx.Mask(**some),
            lambda: rpx.Gaussian(number, **some),
            lambda: rpx.VariationalDropout(number / 2, **some),
            lambda: rpx.HardConcrete(axis=-1, **some),
            lambda: rpx.Cast("bfloat16", **some),
            lambda: rpx.Quantize("int8", axis=-1, **matrices),
            lambda: rpx.Stored("int8", axis=-1, **matrices),
            lambda: rpx.Tie({"dec/bias": ("enc/bias", jnp.flip)}, unequal="overwrite"),
            lambda: rpx.Split({"all": rpx.Concat(("kernel: 4 4", "bias: 4 -> 1 4"))}, at=pick.choice(["enc", "dec"])),
            lambda: rpx.VarNoise(number, where=".*/(g|a|log_std)"),
        ]
    )()


def digest(tree: Any) -> str:
    """Eight bytes of a hash of all paths, types and numbers of a tree."""
    found = hashlib.blake2b(digest_size=8)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(x)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def tried(call: Callable[[], Any]) -> str:
    """The digest of a result, or the kind of the error."""
    try:
        return digest(call())
    except (ValueError, TypeError) as error:
        return type(error).__name__


def of_chain(seed: int) -> list[str]:
    """The digests of a chain: raw tree, draw, mean, update, rebase; or the kind of the error."""
    pick = random.Random(seed)
    p = rpx.Chain(tuple(stages(pick) for _ in range(pick.choice([1, 2, 2, 3, 3, 4]))))
    params, key = model(), jax.random.key(seed)
    try:
        raw = p.init(params, key)
    except (ValueError, TypeError) as error:
        return [type(error).__name__]
    calls = [lambda: p.apply(raw, key), lambda: p.fold(raw), lambda: p.update(raw, key), lambda: p.rebase(raw)]
    return [digest(raw), *map(tried, calls)]


def main(file: Path, chains: int) -> None:
    """Writes the digests, or compares with those on file."""
    machine = f"jax {jax.__version__}, {platform.machine()}"
    found = {str(seed): of_chain(seed) for seed in range(chains)}
    whole = sum(len(each) > 1 for each in found.values())
    if not file.exists():
        file.write_text(json.dumps({"machine": machine, "chains": found}, indent=0))
        print(f"Wrote {len(found)} chains, of which {whole} have a raw tree, to {file}.")
        return
    old = json.loads(file.read_text())
    differ = [seed for seed, each in found.items() if old["chains"][seed] != each]
    for seed in differ:
        print(seed, old["chains"][seed], found[seed])
    print(f"{len(differ)} of {len(found)} chains differ, {whole} have a raw tree; {machine}, on file {old['machine']}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else CHAINS)
