"""Random chains, bit for bit: what a change of the core must leave as it is.

``PYTHONPATH=src python benchmarks/chains.py FILE`` draws chains of one to four stages and writes a digest of each raw
tree, draw, mean, update and rebased tree to the file, and the JSON. If the file exists, it compares with it instead,
and names each chain that differs. Some formulas are rounded otherwise than in commit 7cdfc56: normal numbers have more
digits, and a spectral norm takes fewer steps. Of chains with these the file holds the effective arrays, which need only
be near. Two numbers after FILE are the first seed and the one after the last, for a part of the chains: 0 2000 takes
about a quarter of an hour. The numbers of one machine and one JAX are no promise for another, so the file says which it
was.
"""

import base64
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

FIRST, LAST = 0, 30
ROUNDED = (rpx.VarNoise, rpx.Gaussian, rpx.noise.VariationalDropout, rpx.SpectralNorm)
NEAR = 1e-3
"""How far an entry may be from the one on file, in units of the largest entry of its array."""
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
            lambda: rpx.VarNoise(number, relative="max", axis=axis, **matrices),
            lambda: rpx.VarNoise({"enc/.*": number, "dec/kernel": 0.5}),
            lambda: rpx.WeightDropout(number, **some),
            lambda: rpx.WeightDropout(number, **some),
            lambda: rpx.WeightDropout(number, broadcast=axis, **matrices),
            lambda: rpx.WeightNorm(axis=axis, **some),
            lambda: rpx.WeightNorm(axis=None, detach=True, **some),
            lambda: rpx.norms.WeightStandardization(axis=axis, **some),
            lambda: rpx.SpectralNorm(**matrices),
            lambda: rpx.norms.Sphere(along=axis, **some),
            lambda: rpx.norms.MaxNorm(1.0, axis=axis, **some),
            lambda: rpx.norms.PoincareBall(along=axis, curvature=0.01, **some),
            lambda: rpx.Positive(where="dec/bias"),
            lambda: rpx.Bounded(-9, 9, **inside, **some),
            lambda: rpx.Scale(number, **some),
            lambda: rpx.matrices.Symmetric(**inside, **quadratic),
            lambda: rpx.matrices.Triangular(**inside, **quadratic),
            lambda: rpx.matrices.Circulant(**inside, **quadratic),
            lambda: rpx.Orthogonal(pick.choice(["cayley", "expm"]), **inside, **quadratic),
            lambda: rpx.LowRank(2, **matrices),
            lambda: rpx.matrices.Kronecker((2, 2), **quadratic),
            lambda: rpx.LoRA(2, **matrices),
            lambda: rpx.LoRA(1, alpha=2.0, **matrices),
            lambda: rpx.adapters.VeRA(3, **square),
            lambda: rpx.adapters.Hadamard(**matrices),
            lambda: rpx.Delta(**some),
            lambda: rpx.Gain(axis=-1, **some),
            lambda: rpx.Freeze(**some),
            lambda: rpx.Freeze(where=".*bias"),
            lambda: rpx.MagnitudePrune(number, **some),
            lambda: rpx.sparse.GlobalPrune(number, **square),
            lambda: rpx.sparse.RandomPrune(number, **some),
            lambda: rpx.sparse.SET(number, **square),
            lambda: rpx.Mask(**some),
            lambda: rpx.Gaussian(number, **some),
            lambda: rpx.noise.VariationalDropout(number / 2, **some),
            lambda: rpx.noise.HardConcrete(axis=-1, **some),
            lambda: rpx.Cast("bfloat16", **some),
            lambda: rpx.Quantize("int8", axis=-1, **matrices),
            lambda: rpx.Stored("int8", axis=-1, **matrices),
            lambda: rpx.Tie({"dec/bias": ("enc/bias", jnp.flip)}, unequal="overwrite"),
            lambda: rpx.shared.Split(
                {"all": rpx.shared.Concat(("kernel: 4 4", "bias: 4 -> 1 4"))}, at=pick.choice(["enc", "dec"])
            ),
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


def numbers(tree: Any) -> dict[str, str]:
    """The bytes of each array, in float32."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): base64.b64encode(np.float32(x).tobytes()).decode() for path, x in leaves}


def tried(show: Callable[[Any], Any], call: Callable[[], Any]) -> Any:
    """What is shown of a result, or the kind of the error."""
    try:
        return show(call())
    except (ValueError, TypeError) as error:
        return type(error).__name__


def chain(seed: int) -> rpx.Chain:
    """The chain of a seed."""
    pick = random.Random(seed)
    return rpx.Chain(tuple(stages(pick) for _ in range(pick.choice([1, 2, 2, 3, 3, 4]))))


def of_chain(seed: int) -> dict[str, Any]:
    """What is kept of a chain; only the kind of the error if it does not take the model."""
    p, params, key = chain(seed), model(), jax.random.key(seed)
    try:
        raw = p.init(params, key)
    except (ValueError, TypeError) as error:
        return {"init": type(error).__name__}
    show = numbers if any(isinstance(stage, ROUNDED) for stage in p) else digest
    return {
        "init": digest(raw),
        "apply": tried(show, lambda: p.apply(raw, key)),
        "fold": tried(show, lambda: p.fold(raw)),
        "update": tried(digest, lambda: p.update(raw, key)),
        "rebase": tried(digest, lambda: p.rebase(raw)),
        "json": tried(str, p.to_json),
    }


def distance(new: dict[str, str], old: dict[str, str]) -> float:
    """The largest difference of two trees, in units of the largest entry of the array."""
    if new.keys() != old.keys():
        return float("inf")
    found = [0.0]
    for path in new:
        a, b = (np.frombuffer(base64.b64decode(text[path]), np.float32) for text in (new, old))
        if a.tobytes() != b.tobytes():  # zeros and NaN may be equal too
            found.append(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) if a.shape == b.shape else float("inf"))
    return max(found)


def settings(text: str) -> Any:
    """What the JSON of a chain says, in any order; or the error."""
    return json.loads(text) if text.startswith("{") else text


def differing(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """For each method what is not as on file."""
    new, old = ({**each, "json": settings(each.get("json", ""))} for each in (new, old))
    pairs = {method: (new.get(method), old.get(method)) for method in {**new, **old}}
    found: dict[str, Any] = {method: pair for method, pair in pairs.items() if pair[0] != pair[1]}
    for method in ("apply", "fold"):
        if all(isinstance(each, dict) for each in pairs.get(method, ())) and method in found:
            found[method] = distance(*pairs[method])
    return {method: what for method, what in found.items() if not (isinstance(what, float) and what <= NEAR)}


def main(file: Path, first: int = FIRST, last: int = LAST) -> None:
    """Writes what is kept, or compares with what is on file."""
    machine = f"jax {jax.__version__}, {platform.machine()}"
    found = {str(seed): of_chain(seed) for seed in range(first, last)}
    whole = sum(len(each) > 1 for each in found.values())
    if not file.exists():
        file.write_text(json.dumps({"machine": machine, "chains": found}, indent=0))
        print(f"Wrote {len(found)} chains, of which {whole} have a raw tree, to {file}.")
        return
    old = json.loads(file.read_text())
    differ = {seed: differing(each, old["chains"][seed]) for seed, each in found.items()}
    differ = {seed: what for seed, what in differ.items() if what}
    for seed, what in differ.items():
        print(seed, chain(int(seed)), what)
    print(f"{len(differ)} of {len(found)} chains differ, {whole} have a raw tree; {machine}, on file {old['machine']}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
