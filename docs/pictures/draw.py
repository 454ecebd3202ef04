"""Draws the pictures of the home page, the README, Concepts and the axes of a network, for light and for dark pages.

Run: python docs/pictures/draw.py. It trains a layer for some seconds, and needs what the demo needs.
"""

import base64
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
from matplotlib.colors import LinearSegmentedColormap

import reparax as rpx
from reparax.demo import load

FOLDER = Path(__file__).parent
P = rpx.Freeze() >> rpx.LoRA(2)

LIGHT = {"ink": "#16202b", "dim": "#4c5b6b", "low": "#b34700", "zero": "#ffffff", "high": "#005a91", "line": "#8492a1"}
DARK = {"ink": "#e6edf3", "dim": "#adbac7", "low": "#ff9a52", "zero": "#161b22", "high": "#58a6ff", "line": "#768390"}
THEMES: Mapping[str, Mapping[str, str]] = {"light": LIGHT, "dark": DARK}

FILLS = {"light": ("#dbe9f9", "#fde9cf", "#d9f2df"), "dark": ("#1c3350", "#4a3517", "#1d4029")}
GROUPS = {
    "light": ("#b9d6f5", "#f9d39b", "#b4e3bf", "#e3c6f0", "#f6bcbc", "#d5dbe1"),
    "dark": ("#1f4a7a", "#6b4a14", "#1f5a2e", "#53306b", "#6e2b2b", "#3b444d"),
}
SANS, MONO = "system-ui, sans-serif", "ui-monospace, Menlo, Consolas, monospace"


def tuned() -> tuple[Any, Any]:
    """The raw and the effective tree of one layer that read digits, and was tuned by an adapter to their negatives."""
    (images, labels), _ = load(1000)
    tx = rpx.optimizer(optax.adam(1e-2))

    def fit(p: rpx.Parametrization, raw: Any, x: jax.Array) -> Any:
        def step(carry: Any, _: None) -> tuple[Any, None]:
            def loss(raw: Any) -> jax.Array:
                w = p.apply(raw)
                logits = x @ w["kernel"] + w["bias"]
                return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

            updates, state = tx.update(jax.grad(loss)(carry[0]), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.jit(lambda raw: jax.lax.scan(step, (raw, tx.init(raw)), length=300)[0][0])(raw)

    base = fit(rpx.Chain(), {"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros(10)}, images)
    raw = fit(P, P.init(base, jax.random.key(0)), 1 - images)
    return raw, P.apply(raw)


def picture(values: np.ndarray, theme: Mapping[str, str]) -> str:
    """An array as colours, from its largest magnitude below zero to that above."""
    colours = LinearSegmentedColormap.from_list("weights", [theme["low"], theme["zero"], theme["high"]])
    file, most = io.BytesIO(), np.abs(values).max()
    matplotlib.image.imsave(
        file, values, cmap=colours, vmin=-most, vmax=most, format="png", metadata={"Software": None}
    )
    return base64.b64encode(file.getvalue()).decode()


def tiles(columns: np.ndarray) -> Iterator[np.ndarray]:
    """What each unit reads, as an image."""
    return (column.reshape(8, 8) for column in columns.T)


class Canvas:
    """Parts of a picture, in the colours of a theme."""

    def __init__(self, name: str, width: int, height: int, title: str) -> None:
        """An empty picture."""
        self.theme, self.fills, self.size = THEMES[name], FILLS[name], (width, height)
        tip = f'<path d="M0 0 L10 5 L0 10 z" fill="{self.theme["line"]}"/>'
        self.parts = [
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse">{tip}</marker></defs>',
        ]

    def text(self, x: float, y: float, words: str, *, mono: bool = False, bold: bool = False, anchor: str = "middle",
             size: int = 15, dim: bool = False) -> None:  # fmt: skip
        """Words at a place."""
        font, weight = (MONO if mono else SANS), (' font-weight="600"' if bold else "")
        colour = self.theme["dim" if dim else "ink"]
        self.parts.append(
            f'<text x="{x}" y="{y}" font-family="{font}" font-size="{size}"{weight} text-anchor="{anchor}" '
            f'fill="{colour}">{words}</text>'
        )

    def image(self, x: float, y: float, width: float, height: float, values: np.ndarray) -> None:
        """An array, with a frame."""
        place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        data = picture(values, self.theme)
        self.parts.append(
            f'<image {place} preserveAspectRatio="none" style="image-rendering:pixelated" '
            f'href="data:image/png;base64,{data}"/>'
            f'<rect {place} fill="none" stroke="{self.theme["line"]}" stroke-width="1"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: int) -> None:
        """A rectangle with round corners."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{self.fills[fill]}" '
            f'stroke="{self.theme["line"]}"/>'
        )

    def cell(self, x: float, y: float, width: float, words: str, group: int | None) -> None:
        """An axis, or a part of one, in the colour of its group."""
        fill = "none" if group is None else GROUPS["dark" if self.theme is DARK else "light"][group]
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="28" rx="4" fill="{fill}" stroke="{self.theme["line"]}"/>'
        )
        self.text(x + width / 2, y + 19, words, size=13)

    def arrow(self, path: str, *, dashed: bool = False) -> None:
        """A line that ends in a tip."""
        dashes = ' stroke-dasharray="6 4"' if dashed else ""
        line = self.theme["line"]
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{line}" stroke-width="2"{dashes} marker-end="url(#tip)"/>'
        )

    def write(self, name: str) -> None:
        """Writes the file."""
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        (FOLDER / name).write_text("\n".join([head, *self.parts, "</svg>"]) + "\n")


def raw_and_effective(name: str, raw: Any, effective: Any) -> None:
    """One layer under an adapter: what is stored and trained, and what the model reads."""
    canvas = Canvas(name, 480, 500, "The raw and the effective kernel of one layer under Freeze() and LoRA(2)")
    values = raw["kernel"]["@lora"]
    frozen = np.asarray(values["@fixed"]["w"]["@freeze"]["@fixed"]["w"])
    canvas.text(240, 24, "raw tree: what is stored and trained", bold=True, size=17)
    canvas.text(20, 56, "w, 64 x 10, frozen", mono=True, anchor="start")
    for i, tile in enumerate(tiles(frozen)):
        canvas.image(20 + 44 * i, 66, 40, 40, tile)
    canvas.text(20, 138, "a, 64 x 2, trains", mono=True, anchor="start")
    for i, tile in enumerate(tiles(np.asarray(values["a"]))):
        canvas.image(20 + 44 * i, 148, 40, 40, tile)
    canvas.text(240, 138, "b, 2 x 10, trains", mono=True, anchor="start")
    canvas.image(240, 148, 216, 40, np.asarray(values["b"]))
    canvas.arrow("M240 204 V262")
    canvas.text(256, 230, "p.apply(raw)", mono=True, anchor="start")
    canvas.text(256, 251, "w + a b", mono=True, anchor="start", dim=True)
    canvas.text(240, 290, "effective tree: what the model reads", bold=True, size=17)
    canvas.text(20, 322, "kernel, 64 x 10", mono=True, anchor="start")
    for i, tile in enumerate(tiles(np.asarray(effective["kernel"]))):
        canvas.image(20 + 44 * i, 332, 40, 40, tile)
    for i in range(10):
        canvas.text(40 + 44 * i, 392, f"{i}", dim=True)
    canvas.text(240, 426, "One layer that read digits, tuned to their negatives", dim=True)
    canvas.text(240, 448, "by p = Freeze() &gt;&gt; LoRA(2). Each tile shows", dim=True)
    canvas.text(240, 470, "the weights of one unit: blue above zero, orange below.", dim=True)
    canvas.write(f"raw_and_effective-{name}.svg")


def chain(name: str) -> None:
    """The way from the model's parameters through a chain to the loss."""
    canvas = Canvas(name, 420, 560, "A chain from the raw tree to the effective tree")
    canvas.text(140, 24, "model's parameters")
    canvas.arrow("M140 34 V76")
    canvas.text(152, 60, "p.init", mono=True, anchor="start")
    for y, height, fill in ((80, 76, 0), (196, 44, 1), (276, 44, 1), (356, 62, 2)):
        canvas.box(50, y, 180, height, fill)
    for y in (156, 240, 320):
        canvas.arrow(f"M140 {y} v34")
    canvas.arrow("M140 418 V462")
    canvas.text(140, 104, "raw tree", bold=True)
    canvas.text(140, 126, "g, v, bias", mono=True)
    canvas.text(140, 146, "optimizer, checkpoint", size=14)
    canvas.text(140, 224, "WeightNorm()", mono=True)
    canvas.text(152, 264, "&gt;&gt;", mono=True, anchor="start", bold=True)
    canvas.text(140, 304, "VarNoise(0.1)", mono=True)
    canvas.text(140, 380, "effective tree", bold=True)
    canvas.text(140, 403, "kernel, bias", mono=True)
    canvas.text(140, 484, "model, loss")
    canvas.arrow("M200 480 C 300 480, 300 120, 236 120", dashed=True)
    canvas.text(284, 446, "gradients", anchor="start", dim=True)
    canvas.text(284, 180, "p.apply(raw,", mono=True, anchor="start")
    canvas.text(284, 200, "        key)", mono=True, anchor="start")
    canvas.text(284, 100, "tx.update,", mono=True, anchor="start")
    canvas.text(284, 120, "p.update", mono=True, anchor="start")
    canvas.arrow("M50 387 C 10 387, 10 530, 96 530")
    canvas.text(104, 535, "p.fold(raw): plain weights, to export", mono=False, anchor="start")
    canvas.write(f"chain-{name}.svg")


WIDTH, HEADS, KEYS, SIZE, INNER, WORDS = 64, 8, 2, 8, 192, 1000
NAMES = {
    (WIDTH, "embed"): "stream",
    (INNER, "gate"): "units",
    (KEYS, "q"): "key heads",
    (HEADS // KEYS, "q"): "queries of each",
    (SIZE, "q"): "sizes of q",
    (SIZE, "v"): "sizes of v",
}
SHAPES = {
    "embed": (WORDS, WIDTH),
    "norm1": (WIDTH,),
    "q": (WIDTH, HEADS * SIZE),
    "k": (WIDTH, KEYS * SIZE),
    "v": (WIDTH, KEYS * SIZE),
    "o": (HEADS * SIZE, WIDTH),
    "norm2": (WIDTH,),
    "gate": (WIDTH, INNER),
    "up": (WIDTH, INNER),
    "down": (INNER, WIDTH),
    "last": (WORDS, WIDTH),
}


def transformer(w: Any, tokens: jax.Array) -> jax.Array:
    """One block with grouped heads and a gated unit, as in Llama, without positions."""

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)) * scale

    x = w["embed"][tokens]
    h = normed(x, w["norm1"])
    q, k, v = ((h @ w[name]).reshape(*h.shape[:2], -1, SIZE) for name in "qkv")
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["o"]
    h = normed(x, w["norm2"])
    return (x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]) @ w["last"].T


def axes(name: str) -> None:
    """Each weight of a transformer with its axes, in the colours of their groups."""
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()}
    groups = rpx.axes.axis_groups(transformer, params, jax.ShapeDtypeStruct((1, 4), jnp.int32))
    below = 30 + 34 * len(SHAPES)
    canvas = Canvas(name, 400, below + 140, "The groups of axes of a transformer")
    parts: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for number, group in enumerate(groups):
        words = next(text for (size, path), text in NAMES.items()
                     if size == group.size and path in {member.path for member in group.members})  # fmt: skip
        across, down = divmod(number, 3)
        canvas.cell(24 + 190 * across, below + 34 * down, 44, str(group.size), number)
        canvas.text(78 + 190 * across, below + 34 * down + 19, words, size=14, anchor="start")
        for member in group.members:
            parts.setdefault((member.path, member.axis), []).append((member.outer, number, group.size))
    for row, (path, shape) in enumerate(SHAPES.items()):
        y = 8 + 34 * row
        canvas.text(64, y + 19, path, mono=True, anchor="end", size=14)
        for axis, size in enumerate(shape):
            found = sorted(parts.get((path, axis), []))
            if not found:
                canvas.cell(78 + 160 * axis, y, 152, f"{size} words", None)
            for i, (_, number, part) in enumerate(found):
                wide = 152 / len(found)
                canvas.cell(78 + 160 * axis + wide * i, y, wide, str(part), number)
    canvas.text(200, below + 122, "Axes of one colour are one axis of the network.", dim=True, size=14)
    canvas.write(f"axes-{name}.svg")


if __name__ == "__main__":
    trees = tuned()
    for theme in THEMES:
        raw_and_effective(theme, *trees)
        chain(theme)
        axes(theme)
