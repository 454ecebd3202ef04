"""The registry of cases: each name stands for a parametrization and the parameters that the laws run on."""

import jax
import jax.numpy as jnp
import numpy as np
from one_array import normal

import reparax as rpx


def array(*shape: int, seed: int) -> jax.Array:
    """Of numpy's numbers, which need no program."""
    return jnp.asarray(normal(*shape, seed=seed), np.float32)


def model() -> dict[str, dict[str, jax.Array]]:
    """A small network: leaves of equal shape, a convolution kernel and a vector."""
    return {
        "dense": {"kernel": array(8, 4, seed=1), "bias": array(4, seed=2)},
        "out": {"kernel": array(8, 4, seed=3)},
        "conv": {"kernel": array(2, 2, 3, 4, seed=4)},
    }


def flat() -> dict[str, dict[str, jax.Array]]:
    """The same network without its convolution."""
    return {name: layer for name, layer in model().items() if name != "conv"}


def tied() -> dict[str, dict[str, jax.Array]]:
    """The same network with an output layer that equals the transposed first one."""
    params = flat()
    return {**params, "out": {"kernel": params["dense"]["kernel"].T}}


def positive() -> dict[str, dict[str, jax.Array]]:
    return jax.tree.map(jnp.exp, model())


def cell() -> dict[str, dict[str, jax.Array]]:
    """A recurrent cell whose arrays have the rows of inputs and of hidden units, and a fused attention layer."""
    arrays = {"wi": array(3, 4, seed=5), "wh": array(2, 4, seed=6), "b": array(4, seed=7)}
    return {"cell": arrays, "qkv": {"weight": array(3, 12, seed=8)}}


def vector() -> dict[str, jax.Array]:
    return {"weights": array(56, seed=9)}


SPLIT = rpx.shared.Split({"block": rpx.shared.Concat(("wi: 3 4", "wh: 2 4", "b: 4 -> 1 4"))}, where="cell")
PACK = rpx.shared.Pack(
    {"qkv/weight": rpx.shared.Concat(("query: n heads h", "key: n heads h", "value: n heads h"), axis=1, per="heads")},
    sizes={"heads": 2},
)
HALVES = rpx.shared.Pack({"wi": rpx.shared.Concat(("left: n h", "right: n h"), axis=1)}, where="cell")


def matrices() -> dict[str, jax.Array]:
    """Square, tall and wide matrices, and a batch."""
    shapes = {
        "square": (3, 3),
        "also square": (3, 3),
        "tall": (4, 2),
        "wide": (2, 4),
        "batch": (2, 3, 2),
        "small": (2, 2),
        "column": (3, 1),
    }
    return {name: array(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def definite() -> dict[str, jax.Array]:
    """The same matrices, one of them with large numbers on its diagonal."""
    large = normal(3, 3) + 4 * np.eye(3, dtype=np.float32)
    return {**matrices(), "square": jnp.asarray(large, np.float32)}


def patterned() -> dict[str, jax.Array]:
    """Square matrices, one of them definite."""
    names = ("square", "also square", "toeplitz", "circulant")
    small = jnp.asarray(np.eye(2, dtype=np.float32) + 0.5, np.float32)
    return {name: array(3, 3, seed=10 + i) for i, name in enumerate(names)} | {"small": small}


TIE = rpx.Tie({"out/kernel": ("dense/kernel", jnp.transpose)})


class FlippedSigns(rpx.Perturbation):
    """Noise of a third party, whose mean is not the array."""

    rate: float

    def apply_leaf(self, w, key):
        return jnp.where(jax.random.bernoulli(key, self.rate, w.shape), -w, w)

    def mean_leaf(self, w):
        return (1 - 2 * self.rate) * w


class JointNorm(rpx.stage.Joint):
    """Weight norm of the weights of each output together with its bias."""

    raw_values = {"v": rpx.stage.main(), "g": rpx.stage.aux()}

    def init_leaves(self, arrays):
        return {"w": {"g": lengths(arrays["w"], arrays["b"]), "v": arrays["w"]}, "b": {"v": arrays["b"]}}

    def apply_leaves(self, values):
        v, c = values["w"]["v"], values["b"]["v"]
        ratio = values["w"]["g"] / lengths(v, c)
        return {"w": ratio[None] * v, "b": ratio * c}


def lengths(w, b):
    wide = jnp.promote_types(w.dtype, jnp.float32)
    squares = jnp.sum(jnp.square(w.astype(wide)), axis=0) + jnp.square(b.astype(wide))
    return jnp.sqrt(jnp.where(squares == 0, jnp.ones_like(squares), squares)).astype(w.dtype)


NORM = rpx.WeightNorm(axis=-1)
LOW_RANK = rpx.LowRank(2, where=".*(dense|out)/kernel")
CONVOLUTION = rpx.LowRank(2, rows=(0, 1, 2), columns=3, where="conv/kernel")

# Matrices of which each number stands at places of its own.
PATTERNS = [
    rpx.matrices.Symmetric(),
    rpx.matrices.Skew(),
    rpx.matrices.Triangular(),
    rpx.matrices.Diagonal(),
    rpx.matrices.Circulant(),
    rpx.matrices.Toeplitz(),
]

# Stages on an array each: one program runs them all.
SPHERES_AND_BALLS = (
    rpx.norms.Sphere(radius=2.0, along=-1, where="dense/kernel")
    >> rpx.norms.MaxNorm(5.0, axis=-1, where="out/kernel")
    >> rpx.norms.PoincareBall(0.01, along=-1, where="conv/kernel")
)
MAPS = (
    rpx.numbers.Bounded(-1, 3, outside="unchecked", where="dense/bias")
    >> rpx.numbers.Simplex(along=0, outside="unchecked", where="dense/kernel")
    >> rpx.numbers.Elementwise(jnp.sinh, jnp.arcsinh, where="out/kernel")
    >> rpx.numbers.Scale(0.5, where="conv/kernel")
)
MASKS = (
    rpx.Mask(where="dense/kernel")
    >> rpx.sparse.NByM(2, 4, along=0, where="out/kernel")
    >> rpx.sparse.RandomPruning(0.5, where="conv/.*")
)

CASES = {
    "identity": (rpx.Chain(), model),
    "weight norm": (NORM, model),
    "weight norm of other axes": (
        rpx.WeightNorm(axis=0, where="dense/kernel")
        >> rpx.WeightNorm(axis=(-2, -1), where="conv/kernel")
        >> rpx.WeightNorm(axis=None, where="out/kernel"),
        model,
    ),
    "low rank": (LOW_RANK >> CONVOLUTION, model),
    "noise": (rpx.VarNoise(0.1), model),
    "dropout": (rpx.WeightDropout(0.3), model),
    "dropout of rows and of blocks": (
        rpx.WeightDropout(0.3, broadcast_dims=-1, where=".*(dense|out)/kernel")
        >> rpx.WeightDropout(0.3, broadcast_dims=(0, 1), where="conv/kernel"),
        model,
    ),
    "spectral norm": (
        rpx.SpectralNorm(columns=-1, where=".*(out|conv)/kernel")
        >> rpx.SpectralNorm(n_steps=3, columns=0, where="dense/kernel"),
        model,
    ),
    "positive": (rpx.Positive(), positive),
    "spheres and balls": (SPHERES_AND_BALLS, model),
    "standardization with a gain": (rpx.norms.WeightStandardization(axis=-1) >> NORM, model),
    "maps of numbers": (MAPS, model),
    "joint norm": (JointNorm({"w": "(.*)dense/kernel", "b": "(.*)dense/bias"}), model),
    "masks": (MASKS, model),
    "regrown masks": (rpx.sparse.RigL(0.5, where="dense/kernel") >> rpx.sparse.SET(0.5, where="out/kernel"), model),
    "prunings": (
        rpx.MagnitudePruning(0.3, axis=-1, where="dense/kernel") >> rpx.sparse.GlobalMagnitudePruning(0.5),
        model,
    ),
    "cast": (rpx.quantized.Cast("bfloat16"), model),
    "stacked": (
        rpx.WeightNorm(axis=-1, stacked=0, where="conv/.*")
        >> rpx.WeightDropout(0.3, broadcast_dims=-1, stacked=0, where="conv/.*"),
        model,
    ),
    "rows and columns": (rpx.Orthogonal(stacked=1, rows=(1, 2), columns=0, where="conv/.*"), model),
    "freeze": (rpx.Freeze(where="conv/.*"), model),
    "orthogonal": (
        rpx.Orthogonal("expm", where="wide")
        >> rpx.Orthogonal("householder", where="batch", stacked=0)
        >> rpx.matrices.SpecialOrthogonal(where="square")
        >> rpx.matrices.Stiefel(where="tall")
        >> rpx.matrices.Grassmann("householder", where="column"),
        matrices,
    ),
    "singular values": (
        rpx.matrices.FixedRank(1, where="tall")
        >> rpx.matrices.SpecialLinear(where="square")
        >> rpx.matrices.AlmostOrthogonal(where="batch", stacked=0),
        matrices,
    ),
    "linear spaces": (
        rpx.matrices.Symmetric(where="square")
        >> rpx.matrices.Skew(where="also square")
        >> rpx.matrices.Triangular(where="small")
        >> rpx.matrices.BlockDiagonal(2, where="wide")
        >> rpx.matrices.Kronecker((2, 1), where="tall"),
        matrices,
    ),
    "definite": (
        rpx.matrices.PositiveDefinite(where="square")
        >> rpx.matrices.PositiveSemidefinite(where="small")
        >> rpx.matrices.Fibration(jnp.transpose, jnp.transpose, where="wide"),
        definite,
    ),
    "spectra and patterns": (
        rpx.matrices.Invertible(where="square")
        >> rpx.matrices.PositiveDefinite("expm", where="small")
        >> rpx.matrices.Diagonal(where="also square")
        >> rpx.matrices.Circulant(where="circulant")
        >> rpx.matrices.Toeplitz(where="toeplitz"),
        patterned,
    ),
    "adapters": (
        rpx.Freeze()
        >> rpx.LoRA(2, alpha=4.0, columns=-1, where="dense/kernel")
        >> rpx.adapters.VeRA(3, columns=-1, where="out/kernel")
        >> rpx.LoRA(1, rows=(0, 1, 2), columns=3, init_weights="pissa", where="conv/kernel"),
        model,
    ),
    "differences": (
        rpx.LowRank(2)
        >> rpx.adapters.Hadamard(where=".*(dense|out)/kernel")
        >> rpx.adapters.Delta(where=".*(dense|out)/kernel"),
        flat,
    ),
    "rotated": (rpx.Orthogonal(stacked=0) >> rpx.adapters.Rotated(2), flat),
    "rotated alike": (rpx.Orthogonal(stacked=0) >> rpx.adapters.Rotated(2, block_share=True), flat),
    "slices": (rpx.adapters.TrainableSlices((0, 2), axis=-1, where="conv/kernel"), model),
    "gains": (rpx.Freeze() >> rpx.adapters.Gain(axis=-1), model),
    "stored >> lora >> weight norm": (
        rpx.Quantized("nf4", block_size=4) >> rpx.LoRA(2, columns=-1) >> rpx.WeightNorm(axis=-1, detach=True),
        flat,
    ),
    "stored": (
        rpx.Quantized("int8", axis=-1, where="dense/kernel")
        >> rpx.Quantized("int4", block_size=4, double_quant=True, where="out/kernel")
        >> rpx.Quantized("float8_e4m3fn", where="conv/kernel"),
        model,
    ),
    "stored in other formats": (
        rpx.Quantized("uint4", axis=-1, where="dense/kernel")
        >> rpx.Quantized("mxfp4", block_size=4, where="out/kernel")
        >> rpx.Quantized("float8_e5m2", where="conv/kernel"),
        model,
    ),
    "distributions": (
        rpx.Gaussian(0.1, where="dense/.*")
        >> rpx.noise.VariationalDropout(0.1, where="out/kernel")
        >> rpx.noise.HardConcrete(0.2, axis=-1, where="conv/kernel"),
        model,
    ),
    "noise of two kinds": (rpx.VarNoise(0.1) >> rpx.VarNoise(0.1, relative="std", axis=-1, where=".*kernel"), model),
    "quantize": (
        rpx.FakeQuantized("int8", axis=-1, where="dense/kernel")
        >> rpx.FakeQuantized("int4", block_size=4, step="learned", where="out/kernel")
        >> rpx.FakeQuantized("ternary", where="conv/kernel"),
        model,
    ),
    "tie": (TIE, tied),
    "weight norm >> low rank >> noise": (NORM >> LOW_RANK >> rpx.VarNoise(0.1), flat),
    "low rank >> weight norm": (LOW_RANK >> NORM, flat),
    "weight norm twice": (rpx.WeightNorm(axis=0) >> rpx.WeightNorm(axis=-1), flat),
    "noise >> spectral norm": (rpx.VarNoise(0.1) >> rpx.SpectralNorm(columns=-1), flat),
    "noise >> tie": (rpx.VarNoise(0.1) >> TIE, tied),
    "tie >> noise": (TIE >> rpx.VarNoise(0.1), tied),
    "weight norm >> tie": (NORM >> TIE, tied),
    "weight norm >> noise": (NORM >> rpx.VarNoise(0.075), flat),
    "weight norm >> noise >> dropout >> cast": (
        NORM >> rpx.VarNoise(0.1) >> rpx.WeightDropout(0.2) >> rpx.quantized.Cast("bfloat16"),
        flat,
    ),
    "freeze >> weight norm": (rpx.Freeze(where=".*kernel") >> NORM, flat),
    "weight norm >> freeze": (NORM >> rpx.Freeze(where=".*kernel"), flat),
    "positive >> freeze of one": (rpx.Positive() >> rpx.Freeze(where="dense/bias"), positive),
    "noise on factors": (rpx.VarNoise(0.1) >> LOW_RANK, flat),
    "noise on a length": (rpx.VarNoise(0.1, where="dense/kernel/g") >> NORM, flat),
    "noise twice apart": (rpx.VarNoise(0.1) >> NORM >> rpx.VarNoise(0.1), flat),
    "positive >> weight norm >> low rank": (rpx.Positive(where=".*/g") >> NORM >> LOW_RANK, flat),
    "split": (SPLIT, cell),
    "weight norm >> split >> noise": (NORM >> SPLIT >> rpx.VarNoise(0.1), cell),
    "pack": (PACK, cell),
    "dropout >> pack >> pack": (rpx.WeightDropout(0.3, where=".*/(left|key)") >> HALVES >> PACK, cell),
    "cudnn lstm": (rpx.shared.CudnnLSTM(3, 2, biases=1), vector),
    "low rank twice": (rpx.LowRank(1, where=".*(dense|out)/kernel") >> LOW_RANK, flat),
}

OF_OTHER_CASES = {
    "weight norm >> noise",
    "tie >> noise",
    "noise on factors",
    "noise on a length",
    "noise twice apart",
    "noise >> tie",
    "noise >> spectral norm",
    "weight norm >> low rank >> noise",
    "low rank >> weight norm",
    "low rank twice",
    "weight norm twice",
    "dropout >> pack >> pack",
    "weight norm >> noise >> dropout >> cast",
    "weight norm >> split >> noise",
    "weight norm >> tie",
    "freeze >> weight norm",
    "weight norm >> freeze",
    "positive >> freeze of one",
    "positive >> weight norm >> low rank",
}
"""Chains of stages that other cases have: what is said of stages one by one need not be shown of them again."""


def first_of_each_class() -> list[str]:
    """The cases with a stage of a class that no case before has: what no number that a stage is told can change."""
    found, seen = list[str](), set[type]()
    for name, (p, _) in CASES.items():
        classes = set(map(type, rpx.Chain(tuple(p))))
        found += [name] if classes - seen else []
        seen |= classes
    return found


OF_EACH_CLASS = first_of_each_class()
