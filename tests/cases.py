"""The registry of cases: each name stands for a parametrization and the parameters that the laws run on."""

import jax
import jax.numpy as jnp

import reparax as rpx


def model() -> dict[str, dict[str, jax.Array]]:
    """A small network: leaves of equal shape, a convolution kernel and a vector."""
    k = jax.random.split(jax.random.key(7), 4)
    return {
        "dense": {"kernel": jax.random.normal(k[0], (8, 4)), "bias": jax.random.normal(k[1], (4,))},
        "out": {"kernel": jax.random.normal(k[2], (8, 4))},
        "conv": {"kernel": jax.random.normal(k[3], (2, 2, 3, 4))},
    }


def tied() -> dict[str, dict[str, jax.Array]]:
    """The same network with an output layer that equals the transposed first one."""
    params = model()
    return {**params, "out": {"kernel": params["dense"]["kernel"].T}}


def positive() -> dict[str, dict[str, jax.Array]]:
    return jax.tree.map(jnp.exp, model())


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
    k = jax.random.split(jax.random.key(8), len(shapes))
    return {name: jax.random.normal(k[i], shape) for i, (name, shape) in enumerate(shapes.items())}


def definite() -> dict[str, jax.Array]:
    """The same matrices, the square ones with large numbers on their diagonals."""
    params = matrices()
    return {
        **params,
        "square": params["square"] + 4 * jnp.eye(3),
        "also square": params["also square"] - 4 * jnp.eye(3),
    }


TIE = rpx.Tie({"out/kernel": ("dense/kernel", jnp.transpose)})

CASES = {
    "identity": (rpx.Chain(), model),
    "weight norm": (rpx.WeightNorm(), model),
    "weight norm of rows": (rpx.WeightNorm(axis=0), model),
    "weight norm of two axes": (rpx.WeightNorm(axis=(-2, -1), where="conv/kernel"), model),
    "weight norm of the whole": (rpx.WeightNorm(axis=None, where=".*kernel"), model),
    "low rank": (rpx.LowRank(2), model),
    "noise": (rpx.VarNoise(0.1), model),
    "dropout": (rpx.WeightDropout(0.3), model),
    "dropout of rows": (rpx.WeightDropout(0.3, broadcast=-1), model),
    "dropout of blocks": (rpx.WeightDropout(0.3, broadcast=(0, 1), where="conv/kernel"), model),
    "spectral norm": (rpx.SpectralNorm(), model),
    "spectral norm of rows": (rpx.SpectralNorm(n_steps=3, axis=0), model),
    "positive": (rpx.Positive(), positive),
    "cast": (rpx.Cast("bfloat16"), model),
    "freeze": (rpx.Freeze(where="conv/.*"), model),
    "orthogonal": (
        rpx.Orthogonal("expm", where="wide")
        >> rpx.Orthogonal("householder", where="batch")
        >> rpx.SpecialOrthogonal(where="square")
        >> rpx.Stiefel(where="tall")
        >> rpx.Grassmann("householder", where="column"),
        matrices,
    ),
    "singular values": (
        rpx.FixedRank(1, where="tall") >> rpx.SpecialLinear(where="square") >> rpx.AlmostOrthogonal(where="batch"),
        matrices,
    ),
    "linear spaces": (
        rpx.Symmetric(where="square")
        >> rpx.Skew(where="also square")
        >> rpx.Triangular(where="small")
        >> rpx.BlockDiagonal(2, where="wide")
        >> rpx.Kronecker((2, 1), where="tall"),
        matrices,
    ),
    "definite": (
        rpx.PositiveDefinite(where="square")
        >> rpx.PositiveSemidefinite(where="small")
        >> rpx.Hurwitz(0.1, where="also square")
        >> rpx.Fibration(jnp.transpose, jnp.transpose, where="wide"),
        definite,
    ),
    "tie": (TIE, tied),
    "weight norm >> low rank >> noise": (rpx.WeightNorm() >> rpx.LowRank(2) >> rpx.VarNoise(0.1), model),
    "low rank >> weight norm": (rpx.LowRank(2) >> rpx.WeightNorm(), model),
    "weight norm twice": (rpx.WeightNorm(axis=0) >> rpx.WeightNorm(axis=-1), model),
    "noise >> spectral norm": (rpx.VarNoise(0.1) >> rpx.SpectralNorm(), model),
    "noise >> tie": (rpx.VarNoise(0.1) >> TIE, tied),
    "tie >> noise": (TIE >> rpx.VarNoise(0.1), tied),
    "weight norm >> tie": (rpx.WeightNorm() >> TIE, tied),
    "weight norm >> noise": (rpx.WeightNorm() >> rpx.VarNoise(0.075), model),
    "weight norm >> noise >> dropout >> cast": (
        rpx.WeightNorm() >> rpx.VarNoise(0.1) >> rpx.WeightDropout(0.2) >> rpx.Cast("bfloat16"),
        model,
    ),
    "freeze >> weight norm": (rpx.Freeze(where=".*kernel") >> rpx.WeightNorm(), model),
    "weight norm >> freeze": (rpx.WeightNorm() >> rpx.Freeze(where=".*kernel"), model),
    "positive >> freeze of one": (rpx.Positive() >> rpx.Freeze(where="dense/bias"), positive),
    "noise on factors": (rpx.VarNoise(0.1) >> rpx.LowRank(2), model),
    "noise on a length": (rpx.VarNoise(0.1, where="dense/kernel/g") >> rpx.WeightNorm(), model),
    "noise twice apart": (rpx.VarNoise(0.1) >> rpx.WeightNorm() >> rpx.VarNoise(0.1), model),
    "positive >> weight norm >> low rank": (
        rpx.Positive(where=".*/g") >> rpx.WeightNorm() >> rpx.LowRank(2),
        model,
    ),
    "low rank twice": (rpx.LowRank(1) >> rpx.LowRank(2), model),
}
