"""Random chains against another commit, bit for bit: what a change must leave as it is.

``git worktree add ../base 13fb1872 && PYTHONPATH=src python benchmarks/chains.py --against ../base/src`` draws 300
chains of one to four stages from ``STAGES`` and asks both commits, each in a process of its own, for what they make of
one tree, in compiled programs: raw trees, draws, means, updates, rebased trees, penalties, JSON and what it reads back,
and the bytes of a checkpoint. It prints how many chains are equal to the bit, differ, were changed on purpose
(``is_meant``), or are refused by both with the same text, and names for each one that differs the method, the array and
the largest difference, or both texts. It takes 9 minutes of a processor. Numbers are those of one machine and one JAX.

``--seeds 300 600`` draws other chains. If you compare often, write the answers of the other commit once, ``PYTHONPATH=
../base/src python benchmarks/chains.py --write answers``, and pass the file: ``--against answers``.
"""

import argparse
import collections
import functools
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx


class SignFlip(rpx.Perturbation):
    """Noise of a third party, whose mean is not the array."""

    rate: float

    def apply_leaf(self, w: jax.Array, key: jax.Array) -> jax.Array:
        """The array with random signs."""
        return jnp.where(jax.random.bernoulli(key, self.rate, w.shape), -w, w)

    def mean_leaf(self, w: jax.Array) -> jax.Array:
        """The mean over all keys."""
        return ((1 - 2 * self.rate) * w).astype(w.dtype)


class OutputGain(rpx.stage.Joint):
    """A stage on several arrays: one gain for the weights of an output and its bias."""

    raw_values: ClassVar[Any] = {"v": rpx.stage.main(), "log_gain": rpx.stage.aux()}

    def init_leaves(self, arrays: dict[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
        """A gain of one."""
        return {"w": {"v": arrays["w"], "log_gain": jnp.zeros_like(arrays["b"])}, "b": {"v": arrays["b"]}}

    def apply_leaves(self, values: dict[str, dict[str, jax.Array]]) -> dict[str, jax.Array]:
        """Both arrays times the gain."""
        gain = jnp.exp(values["w"]["log_gain"])
        return {"w": gain[None] * values["w"]["v"], "b": gain * values["b"]["v"]}


def model() -> dict[str, dict[str, jax.Array]]:
    """Two dense layers of one shape, three stacked ones, a convolution, an output, half precision, and an LSTM."""
    shapes = {"enc": (4, 4), "dec": (4, 4), "layers": (3, 4, 4), "conv": (2, 2, 3, 4), "out": (4, 2), "half": (4, 4)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    tree = {name: {"kernel": jax.random.normal(keys[name], shape)} for name, shape in shapes.items()}
    tree["half"]["kernel"] = tree["half"]["kernel"].astype(jnp.bfloat16)
    biases = {"enc": jnp.arange(1.0, 5.0), "dec": jnp.ones(4), "layers": jnp.ones((3, 4))}
    return {name: {**layer, "bias": biases[name]} if name in biases else layer for name, layer in tree.items()} | {
        "lstm": {"weights": jnp.linspace(-1, 1, 56)}
    }


SELECTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "one": {"where": "enc/kernel"},
    "two": {"where": ".*(enc|dec)/kernel"},
    "out": {"where": "out/kernel"},
    "conv": {"where": "conv/kernel"},
    "conv as matrix": {"where": "conv/kernel", "rows": (0, 1, 2), "columns": 3},
    "stacked": {"where": "layers/kernel", "stacked": 0},
    "stacked biases": {"where": "layers/.*", "stacked": 0},
    "biases": {"where": ".*bias"},
    "bias": {"where": "dec/bias"},
    "half": {"where": "half/kernel"},
    "but": {"where": rpx.all_but("out/.*|lstm/.*")},
    "by rank": {"where": lambda path, w: w.ndim > 1},
}
ANY = ("", "", "two", "out", "conv", "stacked", "stacked biases", "biases", "half", "but", "by rank")
AXES = ("", "two", "out", "conv", "stacked", "half", "by rank")
MATRICES = ("one", "two", "out", "conv as matrix", "stacked", "half")
WITHOUT_ROWS = ("one", "two", "out", "stacked", "half")
SQUARE = ("one", "two", "stacked", "half")
ONE = ("one", "two")
AS_IT_IS = ("",)

Seeds = tuple[int, int]
Stage = tuple[str, tuple[Any, ...], dict[str, Any]]


def stage(name: str, *args: Any, **fields: Any) -> Stage:
    """A row of the table: a stage by its name, so that commits with fewer classes can read the table."""
    return name, args, fields


INSIDE = {"outside": "unchecked"}
GATES = rpx.shared.Concat(("left: n h", "right: n h"), axis=1)
BLOCK = rpx.shared.Concat(("kernel: 4 4", "bias: 4 -> 1 4"))
STAGES: list[tuple[tuple[str, ...], list[Stage | tuple[Stage, ...]]]] = [
    (ANY, [stage("VarNoise", 0.1), stage("VarNoise", 0.5), stage("WeightDropout", 0.3), stage("WeightDropout", 0.6)]),
    (ANY, [stage("Gaussian", 0.1), stage("VariationalDropout", 0.3), stage("SignFlip", 0.2)]),
    (AXES, [stage("VarNoise", 0.2, relative=of, axis=axis) for of, axis in (("max", 0), ("std", -1), ("norm", 0))]),
    (AXES, [stage("WeightDropout", 0.4, broadcast_dims=axis) for axis in (0, -1)]),
    (AXES, [stage("HardConcrete", 0.2, axis=-1), stage("Gaussian", 0.2, prior=2.0, axis=-1)]),
    (WITHOUT_ROWS, [stage("Gaussian", 0.05, noise="factorized")]),
    (AS_IT_IS, [stage("VarNoise", {"enc/.*": 0.3, "dec/kernel": 0.5}), stage("Scale", {".*kernel": 2.0})]),
    (AXES, [(stage("VarNoise", 0.1, where=".*/g"), stage("WeightNorm"))]),
    (AXES, [(stage("Positive", where=".*/rho", **INSIDE), stage("Gaussian", 0.2))]),
    (ANY, [stage("Cast", "bfloat16"), stage("Cast", "float16"), stage("Freeze"), stage("Mask"), stage("Delta")]),
    (
        ANY,
        [stage("Scale", 0.5), stage("Bounded", -9, 9, **INSIDE), stage("Elementwise", jnp.sinh, jnp.arcsinh)],
    ),
    (ANY, [stage("Simplex", along=-1, **INSIDE)]),
    (("biases", "bias"), [stage("Positive", map, **INSIDE) for map in ("softplus", "exp", "square")]),
    (AXES, [stage("WeightNorm"), stage("WeightNorm", axis=0), stage("WeightNorm", axis=None, detach=True)]),
    (AXES, [stage("WeightStandardization", axis=axis) for axis in (0, -1)]),
    (AXES, [stage("Sphere", along=0), stage("Sphere", 2.0, along=-1)]),
    (AXES, [stage("MaxNorm", 1.0, axis=-1), stage("PoincareBall", 0.01, along=-1)]),
    (MATRICES, [stage("SpectralNorm"), stage("SpectralNorm", 3)]),
    (("conv",), [stage("SpectralNorm", input_shape=(4, 4), columns=-1)]),
    (SQUARE, [stage(f"{name}", **INSIDE) for name in ("Symmetric", "Skew", "Triangular", "Diagonal")]),
    (
        SQUARE,
        [stage(f"{name}", **INSIDE) for name in ("Circulant", "Toeplitz", "SpecialLinear", "Invertible")],
    ),
    (SQUARE, [stage("PositiveDefinite", map, **INSIDE) for map in ("cholesky", "expm")]),
    (SQUARE, [stage("PositiveSemidefinite", 2, **INSIDE), stage("SpecialOrthogonal", **INSIDE)]),
    (MATRICES, [stage("Orthogonal", map, **INSIDE) for map in ("cayley", "expm", "householder")]),
    (MATRICES, [stage("Stiefel", **INSIDE)]),
    (("out", "conv as matrix"), [stage("Grassmann", "householder", **INSIDE)]),
    (MATRICES, [stage("FixedRank", 1, **INSIDE), stage("AlmostOrthogonal", 0.2, **INSIDE)]),
    (MATRICES, [stage("LowRank", 2), stage("LowRank", 1)]),
    (WITHOUT_ROWS, [stage("BlockDiagonal", 2, **INSIDE), stage("Kronecker", (2, 2))]),
    (WITHOUT_ROWS, [stage("Fibration", jnp.transpose, jnp.transpose)]),
    (
        AXES,
        [stage("MagnitudePruning", 0.5), stage("MagnitudePruning", 0.3, axis=-1), stage("RandomPruning", 0.4)],
    ),
    (AXES, [stage("SET", 0.5), stage("RigL", 0.5)]),
    (("", "two", "but"), [stage("GlobalMagnitudePruning", 0.5)]),
    (ONE, [stage("NByM", 2, 4, along=along) for along in (0, 1)]),
    (MATRICES, [stage("LoRA", 2), stage("LoRA", 1, alpha=2.0, use_rslora=True)]),
    (
        MATRICES,
        [stage("LoRA", 2, init_weights="pissa"), stage("LoRA", 2, init_weights="olora"), stage("VeRA", 3)],
    ),
    (WITHOUT_ROWS, [stage("Hadamard"), (stage("LowRank", 1), stage("Hadamard"), stage("Delta"))]),
    (ONE, [(stage("Orthogonal", stacked=0), stage("Rotated", 2, block_share=True))]),
    (AXES, [stage("Gain", axis=-1), stage("Gain", axis=0), stage("TrainableSlices", (0, 1), axis=-1)]),
    (WITHOUT_ROWS, [stage("Quantized", format, block_size=4) for format in ("nf4", "uint4", "mxfp4")]),
    (WITHOUT_ROWS, [stage("Quantized", "int8", axis=-1), stage("Quantized", "int4", block_size=4, double_quant=True)]),
    (WITHOUT_ROWS, [(stage("Freeze"), stage("Quantized", "nf4", block_size=4), stage("LoRA", 1))]),
    (WITHOUT_ROWS, [stage("FakeQuantized", "int4", block_size=4, step="learned"), stage("FakeQuantized", "ternary")]),
    (AXES, [stage("FakeQuantized", "int8", axis=-1)]),
    (AS_IT_IS, [stage("Tie", {"dec/bias": ("enc/bias", jnp.flip)}, unequal="overwrite")]),
    (AS_IT_IS, [stage("Tie", {"dec/kernel": ("enc/kernel", jnp.transpose)}, unequal="overwrite")]),
    (
        AS_IT_IS,
        [stage("Split", {"all": BLOCK}, where="enc"), stage("Pack", {"kernel": GATES}, where="dec")],
    ),
    (AS_IT_IS, [stage("CudnnLSTM", 3, 2, biases=1)]),
    (AS_IT_IS, [stage("OutputGain", {"w": "(enc|dec)/kernel", "b": "(enc|dec)/bias"})]),
]
ROWS = [(selections, row) for selections, rows in STAGES for row in rows]


RENAMED = {
    "FakeQuantized": "Quantize",
    "GlobalMagnitudePruning": "GlobalPrune",
    "MagnitudePruning": "MagnitudePrune",
    "NByM": "NofM",
    "Quantized": "Stored",
    "RandomPruning": "RandomPrune",
    "TrainableSlices": "Slices",
}
"""The names of stages, and those that they had in 13fb1872."""
ARGUMENTS = {
    "BlockDiagonal": {"num_blocks": "blocks"},
    "FakeQuantized": {"block_size": "block"},
    "FixedRank": {"eps": "least"},
    "LoRA": {"init_weights": "start"},
    "MaxNorm": {"max_norm": "max"},
    "Pack": {"where": "at"},
    "Quantized": {"block_size": "block"},
    "RigL": {"drop_fraction": "drop"},
    "Rotated": {"num_blocks": "blocks", "block_share": "shared"},
    "SET": {"drop_fraction": "drop"},
    "SpectralNorm": {"input_shape": "window", "feature_group_count": "groups"},
    "Split": {"where": "at"},
    "TrainableSlices": {"indices": "index"},
    "VeRA": {"d_initial": "start"},
    "WeightDropout": {"broadcast_dims": "broadcast"},
}
"""The names of arguments, likewise."""


FAMILIES = ("norms", "noise", "numbers", "matrices", "sparse", "shared", "adapters", "quantized")


@functools.cache
def class_of(name: str) -> type[rpx.Parametrization]:
    """The stage of that name. Where it has its old name, a class of its own gives it the new one, and its marker."""
    own = [vars(getattr(rpx, family)) for family in FAMILIES]
    if found := [names[name] for names in (globals(), *own) if name in names]:
        return found[0]
    (base,) = [names[RENAMED[name]] for names in own if RENAMED[name] in names]
    kind = {"kind": "n_by_m"} if name == "NByM" else {}
    return type(base)(name, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **kind})


def build(row: Stage, selection: dict[str, Any]) -> rpx.Parametrization:
    """The stage of a row; what the row says of axes stands above the selection."""
    name, args, fields = row
    make = class_of(name)
    fields = {**selection, **fields}
    if IS_OLD:
        old_names = ARGUMENTS.get(make.__name__, {})
        fields = {old_names.get(argument, argument): x for argument, x in fields.items()}
        if fields.pop("use_rslora", False):
            fields["divisor"] = "sqrt"
        if fields.get("outside") == "unchecked":
            fields["outside"] = "project"
    return make(*args, **fields)


IS_OLD = hasattr(rpx, "Stored")


def with_new_names(text: str) -> str:
    """A text of 13fb1872, a repr or JSON, with the names of arguments that stages have now."""
    for new, old in (names for of_class in ARGUMENTS.values() for names in of_class.items()):
        text = re.sub(rf'(?<=\b){old}(?==)|(?<="){old}(?=":)', new, text)
    text = text.replace("`rpx.selected`", "`rpx.stage.selected`").replace("divisor='sqrt'", "use_rslora=True")
    text = text.replace("outside='project'", "outside='unchecked'").replace(
        '"outside": "project"', '"outside": "unchecked"'
    )
    return text.replace('"divisor": "sqrt"', '"use_rslora": true')


def drawn(seed: int) -> tuple[list[int], rpx.Parametrization]:
    """The rows and the chain of a seed."""
    pick = random.Random(seed)
    numbers = [pick.randrange(len(ROWS)) for _ in range(pick.choice([1, 2, 2, 3, 3, 4]))]
    stages = list[rpx.Parametrization]()
    for selections, row in (ROWS[i] for i in numbers):
        selection = SELECTIONS[pick.choice(selections)]
        stages += [build(each, selection) for each in (row if isinstance(row[0], tuple) else (row,))]
    return numbers, rpx.Chain(tuple(stages))


def tried(call: Callable[[], Any]) -> Any:
    """The arrays of a result by their paths, or its text, or the type and the text of the error."""
    try:
        result = call()
    except Exception as error:
        return type(error).__name__, str(error)
    if isinstance(result, str | bytes):
        return result
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(result))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def answers_of(seed: int) -> dict[str, Any]:
    """What a commit makes of the chain of a seed; the error alone if it does not take the model."""
    p, params, key = drawn(seed)[1], model(), jax.random.key(seed)
    try:
        raw = jax.jit(p.init)(params, key)
    except Exception as error:
        return {"init": (type(error).__name__, str(error))}
    grads = jax.tree.map(jnp.sin, params)
    saved = flax.serialization.msgpack_serialize(jax.device_get(raw))
    restored = flax.serialization.msgpack_restore(saved)
    return {
        "init": tried(lambda: raw),
        "apply": tried(lambda: jax.jit(p.apply)(raw, key)),
        "fold": tried(lambda: jax.jit(p.fold)(raw)),
        "update": tried(lambda: jax.jit(p.update)(raw, jax.random.fold_in(key, 1), grads)),
        "update_base": tried(lambda: jax.jit(getattr(p, "update_base", None) or p.rebase)(raw)),
        "penalty": tried(lambda: jax.jit(p.penalty)(raw)),
        "JSON": tried(p.to_json),
        "JSON and back": tried(lambda: rpx.from_json(p.to_json()).to_json()),
        "checkpoint": saved,
        "checkpoint and back": tried(lambda: p.check(restored, params) or restored),
    }


def answers(seeds: Seeds, step: int = 1) -> dict[int, Any]:
    """What is made of the chains of these seeds."""
    return {seed: answers_of(seed) for seed in range(*seeds)[::step]}


def difference(new: Any, old: Any) -> str:
    """In words how two answers differ; empty if they do not."""
    if not isinstance(new, dict) or not isinstance(old, dict):
        was, now = ("arrays" if isinstance(x, dict) else repr(x) for x in (old, new))
        was = with_new_names(was)
        return "" if sorted(was) == sorted(now) else f"{was:.400} -> {now:.400}"
    if new.keys() != old.keys():
        return f"without {sorted(old.keys() - new.keys())}, with {sorted(new.keys() - old.keys())}"
    found: list[str] = []
    for path, x in new.items():
        y = old[path]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            found.append(f"{path} {y.dtype}{y.shape} -> {x.dtype}{x.shape}")
        elif x.tobytes() != y.tobytes():
            gap, size = np.abs(x.astype(np.float64) - y.astype(np.float64)), np.abs(y.astype(np.float64))
            found.append(f"{path} by {np.max(gap):.1e} of {np.max(size):.1e}")
    return "; ".join(found)


def is_meant(p: rpx.Parametrization, method: str, text: str) -> bool:
    """Whether an answer was changed on purpose since 13fb1872.

    ``update`` of ``SET`` draws other numbers than ``init`` for the same key, masks keep their dtype behind a cast, and
    values that a stage changed in place are not written to the raw tree.
    """
    redrawn = method == "update" and any(isinstance(stage, rpx.sparse.SET) for stage in p)
    cast = all(re.search(r"'mask'\] b?float16.* -> float32", part) for part in text.split("; "))
    return redrawn or cast or "cannot write it to the raw tree" in text


def from_other(source: Path, seeds: Seeds) -> tuple[dict[int, Any], dict[int, Any]]:
    """The answers of another commit, from its sources or its file, and those of this one."""
    if source.is_file():
        return pickle.loads(source.read_bytes()), answers(seeds)
    if not (source / "reparax").is_dir():
        raise SystemExit(f"{source} is neither a file of answers nor a folder with reparax.")
    with tempfile.TemporaryDirectory() as folder:
        # The other process begins with the last seed, so each compiles one half of the programs that are the same.
        file, programs = Path(folder) / "answers", str(Path(folder) / "programs")
        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        shared = {"JAX_COMPILATION_CACHE_DIR": programs, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        command = [sys.executable, __file__, "--write", str(file), "--seeds", *map(str, seeds)]
        with subprocess.Popen(command, env={**os.environ, **shared, "PYTHONPATH": str(source.resolve())}) as other:
            here = answers(seeds)
        if other.returncode:
            raise SystemExit(f"{source} made no answers.")
        return pickle.loads(file.read_bytes()), here


def compare(source: Path, seeds: Seeds) -> bool:
    """Prints how the answers differ; whether none does."""
    (old, new), equal, answered = from_other(source, seeds), set[int](), collections.Counter[bool]()
    differing = refused = meant = 0
    for seed, answer in new.items():
        numbers, p = drawn(seed)
        texts = {method: difference(answer.get(method), old[seed].get(method)) for method in {**old[seed], **answer}}
        if lines := [f"\n  {method}: {x}" for method, x in texts.items() if x and not is_meant(p, method, x)]:
            differing += 1
            print(seed, p, *lines)
        elif any(texts.values()):
            meant += 1
        elif len(answer) == 1:
            refused += 1
        else:
            equal.update(numbers)
            answered.update(isinstance(x, tuple) for x in answer.values())
    whole = len(new) - differing - meant - refused
    print(f"{len(new)} chains: {whole} equal, {differing} differing, {meant} changed on purpose, {refused} refused.")
    print(f"The equal ones gave {answered[False]} equal answers, and {answered[True]} errors of the same text.")
    print(f"They hold {len(equal)} of the {len(ROWS)} rows of the table.")
    return not differing


def main() -> None:
    """Compares with another commit, or writes what it is to be compared with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="the other commit's sources, or its answers in a file")
    parser.add_argument("--write", type=Path, help="the file for the answers of the reparax that is imported")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 300), metavar=("FIRST", "END"))
    given = parser.parse_args()
    if given.write:
        given.write.write_bytes(pickle.dumps(answers(given.seeds, -1)))
    elif given.against:
        sys.exit(not compare(given.against, tuple(given.seeds)))
    else:
        parser.error("pass --against or --write")


if __name__ == "__main__":
    main()
