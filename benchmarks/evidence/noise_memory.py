"""Noise on weights costs no memory with `rpx.remat`, and changes no value and no gradient.

This library's own claim. Memory for time is the trade of Chen, Xu, Zhang and Guestrin, *Training Deep Nets with
Sublinear Memory Cost*, 2016 (arXiv 1604.06174); here only what parameters and key can make again is made again.

Protocol:
A transformer of 8 layers of 128 units, 4 sequences of 32; weight norm with noise of 0.075, and weight dropout of 0.5.
Without noise; by apply; under `jax.checkpoint`, of apply or of whole layers; under `rpx.remat`. Nothing is tuned.
Measure: bytes kept between the passes, layers unrolled and under `lax.scan`; XLA's temporary bytes of the gradient,
under `lax.scan` alone, as XLA on CPUs joins both passes of unrolled layers; the gradient against that of apply.
Bytes depend on no key: the standard error over five keys is 0.
"""

import concurrent.futures
import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure

import reparax as rpx
from benchmarks.evidence.record import Cell, Found, Size
from benchmarks.evidence.summary import markdown

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else one process would hold most of a GPU

PyTree = Any
Layer = Callable[[Array, PyTree, Array], Array]
"""From activations, the raw values of a layer and a key to activations."""

KIB, MIB = 2**10, 2**20
HEADS = 4
PLAIN, APPLY, REMAT, LAYERS = "no noise", "apply", "rpx.remat", "jax.checkpoint of layers"
CHAINS = {
    "weight norm and noise": rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.075),
    "weight dropout": rpx.WeightDropout(0.5),
}


def normed(x: Array, gain: Array) -> Array:
    """Vectors of equal length, times a gain."""
    return gain[None, None] * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def network_layer(x: Array, w: PyTree) -> Array:
    """Self-attention and two dense layers, each added to what it reads."""
    q, k, v = jnp.moveaxis((normed(x, w["gain"]) @ w["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1), 2, 0)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(normed(x, w["gain_dense"]) @ w["up"]) @ w["down"]


def noisy(apply: Callable[[PyTree, Array], PyTree]) -> Layer:
    """A layer whose weights are made where it reads them."""
    return lambda x, raw, key: network_layer(x, apply(raw, key))


WAYS: dict[str, Callable[[rpx.Parametrization], Layer]] = {
    APPLY: lambda p: noisy(p.apply),
    "jax.checkpoint of apply": lambda p: noisy(jax.checkpoint(p.apply)),
    LAYERS: lambda p: jax.checkpoint(noisy(p.apply)),
    REMAT: lambda p: noisy(p.apply),
}


class Sizes(NamedTuple):
    """Of the network and its data."""

    layers: int
    width: int
    batch: int
    length: int

    def weights(self) -> PyTree:
        """All layers, stacked."""
        n = self.width
        shapes = {"qkv": (n, 3 * n), "out": (n, n), "up": (n, 4 * n), "down": (4 * n, n)}
        keys = jax.random.split(jax.random.key(0), len(shapes))
        kernels = {
            name: jax.random.normal(key, (self.layers, *shape)) / shape[0] ** 0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return kernels | {name: jnp.ones((self.layers, n)) for name in ("gain", "gain_dense")}

    def data(self) -> Array:
        """What the first layer reads."""
        return jax.random.normal(jax.random.key(1), (self.batch, self.length, self.width))


def loss_of(chain: str | None, way: str, *, scanned: bool) -> Callable[[PyTree, Array, Array], Array]:
    """The loss of raw values, stacked or in a list, of a key for each layer, and of data."""
    layer: Layer = WAYS[way](CHAINS[chain]) if chain else lambda x, raw, key: network_layer(x, raw)

    def loss(raw: PyTree, keys: Array, x: Array) -> Array:
        if scanned:
            x, _ = jax.lax.scan(lambda x, given: (layer(x, *given), None), x, (raw, keys))
        else:
            for i, one in enumerate(raw):
                x = layer(x, one, keys[i])
        return jnp.mean(jnp.square(x))

    return rpx.remat(loss) if way == REMAT else loss


def start(chain: str | None, sizes: Sizes, key: Array) -> tuple[PyTree, Array, Array]:
    """The raw values of all layers, stacked, a key for each layer, and data."""
    raw = jax.vmap(CHAINS[chain].init)(sizes.weights()) if chain else sizes.weights()
    return raw, jax.random.split(key, sizes.layers), sizes.data()


def types(chain: str | None, sizes: Sizes) -> tuple[PyTree, Any, Any]:
    """Their types, as nothing need be computed to know bytes."""
    return jax.eval_shape(lambda: start(chain, sizes, jax.random.key(0)))


def kept(chain: str | None, way: str, sizes: Sizes, *, scanned: bool) -> dict[str, float]:
    """KiB that are kept for the backward pass, by what they are made of."""
    raw, keys, x = types(chain, sizes)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), raw)
    report = rpx.transforms.saved_residuals(
        loss_of(chain, way, scanned=scanned), raw if scanned else [one] * sizes.layers, keys, x
    )
    form = "scanned" if scanned else "unrolled"
    return {f"{kind}, {form}": report.bytes(kind) / KIB for kind in ("weights", "activations")}


def lowered(chain: str | None, way: str, sizes: Sizes) -> Any:
    """The program of the loss and the gradient of layers under scan, before it is compiled."""
    return jax.jit(jax.value_and_grad(loss_of(chain, way, scanned=True))).lower(*types(chain, sizes))


@functools.cache
def gradient(chain: str | None, way: str, sizes: Sizes) -> Any:
    """The compiled program."""
    return lowered(chain, way, sizes).compile()


@jax.jit
def gap(one: PyTree, other: PyTree) -> Array:
    """The largest difference of two trees, as a share of the largest number."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    largest = jnp.stack([jnp.max(jnp.abs(b)) for _, b in pairs]).max()
    return jnp.stack([jnp.max(jnp.abs(a - b)) for a, b in pairs]).max() / largest


def peak(chain: str | None, way: str, sizes: Sizes) -> float:
    """MiB that a process has held at most when it has run one gradient."""
    jax.block_until_ready(gradient(chain, way, sizes)(*start(chain, sizes, jax.random.key(0))))
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"] / MIB


def cell(chain: str | None, way: str, sizes: Sizes) -> Cell:
    """All numbers of one way; the keys of the seeds are those of the noise."""

    def of_keys(keys: Array) -> dict[str, Array]:
        program, reference = (gradient(chain, each, sizes) for each in (way, APPLY))
        exact = kept(chain, way, sizes, scanned=False) | kept(chain, way, sizes, scanned=True)
        exact["products"] = lowered(chain, way, sizes).as_text().count("stablehlo.dot_general")
        exact["temporaries"] = program.memory_analysis().temp_size_in_bytes / MIB
        if jax.default_backend() == "gpu":
            spawned = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as pool:
                exact["peak"] = pool.submit(peak, chain, way, sizes).result()
        given = map(jax.jit(functools.partial(start, chain, sizes)), keys)
        pairs = [(program(*each), reference(*each)) for each in given]
        values = {name: jnp.full(len(keys), float(number)) for name, number in exact.items()}
        for place, name in enumerate(("loss gap", "gradient gap")):
            values[name] = jnp.stack([gap(one[place], other[place]) for one, other in pairs])
        return values

    return of_keys


def cells(size: Size) -> dict[str, Cell]:
    """Without noise, and each chain in each way; at tiny size one chain and two ways."""
    sizes = Sizes(2, 8, 2, 4) if size.tiny else Sizes(8, 128, 4, 32)
    chains = [*CHAINS][: size(len(CHAINS), 1)]
    ways = [APPLY, REMAT] if size.tiny else [*WAYS]
    others = {f"{chain}, {way}": cell(chain, way, sizes) for chain in chains for way in ways}
    return {PLAIN: cell(None, APPLY, sizes)} | others


COLUMNS = {
    "weights, unrolled": "kept of weights, unrolled, KiB",
    "weights, scanned": "the same, scanned",
    "activations, unrolled": "kept of activations, unrolled, KiB",
    "temporaries": "XLA's temporaries, scanned, MiB",
    "peak": "peak on the device, MiB",
    "products": "products of matrices in both passes of a layer",
    "gradient gap": "gradient against apply",
}


def table(found: Found) -> str:
    """Bytes of each way, the same for all keys, and the largest difference of gradients."""
    columns = {name: title for name, title in COLUMNS.items() if name in found[PLAIN]}
    rows = [[way, *(_shown(name, values[name]) for name in columns)] for way, values in found.items()]
    return markdown(["way", *columns.values()], rows)


def _shown(name: str, values: np.ndarray) -> str:
    if name == "gradient gap":
        return f"differs by {values.max():.0e}" if values.any() else "the same"
    return f"{values[0]:.0f}" if name == "products" else f"{values[0]:,.1f}"


COLOURS = {PLAIN: "#000000", "weight norm and noise": "#B84F00", "weight dropout": "#0072B2"}


def picture(found: Found) -> Figure:
    """Bars of what is kept, and of the compiler's temporaries."""
    figure = Figure(figsize=(7.8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = [COLOURS[name.split(", ")[0]] for name in found]
    for axes, what in ((left, "weights, unrolled"), (right, "temporaries")):
        bars = axes.barh(list(found), [values[what][0] for values in found.values()], color=colours)
        axes.bar_label(bars, fmt="{:,.1f}", padding=3, fontsize=8)
        axes.margins(x=0.4)
        axes.grid(alpha=0.3, axis="x")
    left.set(xlabel="kept of weights,\nunrolled layers, KiB")
    right.set(xlabel="XLA's temporaries,\nscanned layers, MiB")
    left.invert_yaxis()
    return figure


def verdict(found: Found) -> str:
    """The compiled gradient with noise, by apply and under remat, beside that of the network alone."""
    chain = next(iter(CHAINS))
    apply, remat, plain = (found[name]["temporaries"][0] for name in (f"{chain}, {APPLY}", f"{chain}, {REMAT}", PLAIN))
    return (
        f"Under `rpx.remat`, {chain} add {remat - plain:,.1f} MiB to the {plain:,.1f} MiB of the network alone; by "
        f"`p.apply`, {apply - plain:,.1f} MiB. Time is not measured here: the noise is drawn twice."
    )


def sentence(found: Found) -> str:
    """What noise adds, in which way."""
    chains = dict.fromkeys(name.rpartition(", ")[0] for name in found if name != PLAIN)
    return " ".join(_of_chain(chain, found) for chain in chains)


def _of_chain(chain: str, found: Found) -> str:
    names = {f"{chain}, {APPLY}": APPLY, f"{chain}, {REMAT}": REMAT, PLAIN: "a network without noise"}
    kept = _joined(found, names, "weights, unrolled", "KiB")
    temporaries = _joined(found, names, "temporaries", "MiB")
    under = found[f"{chain}, {REMAT}"]
    largest = max(under["gradient gap"].max(), under["loss gap"].max())
    same = "are the same" if largest == 0 else f"differ by at most {largest:.0e} of the largest number"
    return (
        f"With {chain}, what is kept of weights between the passes is {kept}, and the compiled gradient takes "
        f"{temporaries}; losses and gradients of {APPLY} and {REMAT} {same}."
        f"{_of_layers(f'{chain}, {LAYERS}', found)}"
    )


def _joined(found: Found, names: dict[str, str], what: str, unit: str) -> str:
    """The numbers of some ways."""
    return ", ".join(f"{found[name][what][0]:,.1f} {unit} ({told})" for name, told in names.items())


def _of_layers(name: str, found: Found) -> str:
    """What is paid for less than that, where it was measured."""
    if name not in found:
        return ""
    products, usual = found[name]["products"][0], found[PLAIN]["products"][0]
    return (
        f" {LAYERS} takes {found[name]['temporaries'][0]:,.1f} MiB, as it makes activations again too, with "
        f"{products:.0f} products of matrices in both passes of a layer; without noise there are {usual:.0f}."
    )
