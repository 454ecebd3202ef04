"""Recognizers in flax linen: LSTMs or a small conformer with scores for CTC, and LSTMs that a decoder attends to."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array

GATES = "ifgo"


@jax.custom_vjp
def recurrence(kernel: Array, inputs: Array) -> Array:
    """The outputs ``(time, batch, width)`` of an LSTM, of what its gates get from below and of its recurrent kernel.

    The gradient of the kernel is one product over all times, where that of a scan adds one product for each of them:
    with two layers of linen's cells on a CPU, a gradient of the recognizer takes a third less time.
    """
    return recur(kernel, inputs)[0]


def recur(kernel: Array, inputs: Array) -> tuple[Array, Array]:
    """Outputs and cells of all times."""

    def step(before: tuple[Array, Array], inputs: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        now = gated(inputs + before[0] @ kernel, before[1])
        return now, now

    zeros = jnp.zeros((inputs.shape[1], kernel.shape[0]), inputs.dtype)
    return jax.lax.scan(step, (zeros, zeros), inputs)[1]


def gated(gates: Array, cell: Array) -> tuple[Array, Array]:
    """The output and the cell of one time, of the sums at its gates and of the cell before."""
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(g)
    return nn.sigmoid(o) * jnp.tanh(cell), cell


def recur_forward(kernel: Array, inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    """Outputs, and what the backward pass needs."""
    outputs, cells = recur(kernel, inputs)
    return outputs, (kernel, inputs, outputs, cells)


def recur_backward(kept: tuple[Array, ...], of_outputs: Array) -> tuple[Array, Array]:
    """From gradients of outputs to those of the kernel and of the inputs."""
    kernel, inputs, *now = kept
    outputs, cells = (jnp.concatenate([jnp.zeros_like(each[:1]), each[:-1]]) for each in now)

    def step(after: tuple[Array, Array], at: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        gates, cell, of_output = at
        of_gates, of_cell = jax.vjp(gated, gates, cell)[1]((of_output + after[0], after[1]))
        return (of_gates @ kernel.T, of_cell), of_gates

    zeros = jnp.zeros_like(outputs[0])
    given = inputs + outputs @ kernel, cells, of_outputs
    of_gates = jax.lax.scan(step, (zeros, zeros), given, reverse=True)[1]
    return jnp.einsum("tbh,tbg->hg", outputs, of_gates), of_gates


recurrence.defvjp(recur_forward, recur_backward)


class BiLSTM(nn.Module):
    """Two LSTMs, one of which reads from the end: ``nn.RNN`` over linen's cells, whose parameters it has."""

    width: int

    @nn.compact
    def __call__(self, x: Array, padding: Array) -> Array:
        lengths = jnp.sum(1 - padding, axis=1).astype(jnp.int32)[:, None]
        time = jnp.arange(x.shape[1])[None]
        turned = jnp.where(time < lengths, lengths - 1 - time, time)[..., None]
        both = list[Array]()
        for name in ("forward", "backward"):
            order = time[..., None] if name == "forward" else turned
            cell = nn.OptimizedLSTMCell(self.width, name=name)
            if self.is_initializing():
                cell(cell.initialize_carry(jax.random.key(0), x[:, 0].shape), x[:, 0])
            of = cell.variables["params"]
            kernel, recurrent = (
                jnp.concatenate([of[part + gate]["kernel"] for gate in GATES], axis=-1) for part in "ih"
            )
            bias = jnp.concatenate([of[f"h{gate}"]["bias"] for gate in GATES])
            inputs = jnp.swapaxes(jnp.take_along_axis(x, order, axis=1), 0, 1) @ kernel + bias[None, None]
            outputs = jnp.swapaxes(recurrence(recurrent, inputs), 0, 1)
            both.append(jnp.take_along_axis(outputs, order, axis=1))
        return jnp.concatenate(both, axis=-1)


class Conformer(nn.Module):
    """Attention and a convolution between two halves of a feed-forward layer (Gulati et al., 2020)."""

    width: int
    heads: int = 4
    reach: int = 9

    @nn.compact
    def __call__(self, x: Array, padding: Array) -> Array:
        real = 1 - padding[..., None]

        def feed_forward(x: Array, name: str) -> Array:
            y = nn.swish(nn.Dense(4 * self.width, name=f"{name}_in")(nn.LayerNorm()(x)))
            return nn.Dense(self.width, name=f"{name}_out")(y)

        x = x + 0.5 * feed_forward(x, "first")
        mask = padding[:, None, None, :] == 0
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attention")(nn.LayerNorm()(x), mask=mask)
        y = nn.glu(nn.Dense(2 * self.width, name="gate")(nn.LayerNorm()(x))) * real
        y = nn.Conv(self.width, (self.reach,), feature_group_count=self.width, name="depthwise")(y)
        x = x + nn.Dense(self.width, name="mix")(nn.swish(nn.LayerNorm()(y)))
        x = x + 0.5 * feed_forward(x, "second")
        return nn.LayerNorm()(x)


class Encoder(nn.Module):
    """Two convolutions, each of which halves the number of frames, and layers; and what of the result is padding."""

    body: str
    width: int
    layers: int

    @nn.compact
    def __call__(self, frames: Array, padding: Array) -> tuple[Array, Array]:
        x = frames * (1 - padding[..., None])
        for i in range(2):
            x = nn.relu(nn.Conv(self.width, (5,), strides=2, name=f"conv_{i}")(x))
            padding = padding[:, ::2]
            x = x * (1 - padding[..., None])
        if self.body == "conformer":
            x = x + positions(*x.shape[1:])
        for i in range(self.layers):
            make = Conformer if self.body == "conformer" else BiLSTM
            x = make(self.width, name=f"{self.body}_{i}")(x, padding)
        return x, padding


class Recognizer(nn.Module):
    """An encoder and a score of each word and of the blank, for CTC.

    Attributes:
      words: How many there are.
      body: ``"lstm"`` or ``"conformer"``.
      width: Units of a layer, of an LSTM in each direction.
      layers: How many of them.
    """

    words: int
    body: str = "lstm"
    width: int = 96
    layers: int = 2

    @nn.compact
    def __call__(self, frames: Array, padding: Array) -> tuple[Array, Array]:
        """Scores of ``(batch, frames / 4, words + 1)``, and what of them is padding."""
        x, padding = Encoder(self.body, self.width, self.layers, name="encoder")(frames, padding)
        return nn.Dense(self.words + 1, name="scores")(x), padding

    def losses(self, frames: Array, padding: Array, labels: Array) -> Array:
        """CTC's of each utterance."""
        scores, padding = self(frames, padding)
        return optax.ctc_loss(scores, padding, labels, (labels == 0).astype(scores.dtype))

    def recognize(self, frames: Array, padding: Array) -> Array:
        """The best label of each frame, or zero where it is padding or repeats the one before."""
        scores, padding = self(frames, padding)
        best = jnp.argmax(scores, axis=-1)
        before = jnp.pad(best, ((0, 0), (1, 0)))[:, :-1]
        return jnp.where((padding == 0) & (best != before), best, 0)


class Decoder(nn.Module):
    """One word: an LSTM of the word before and of what it attended to, which attends again, and scores (Chan, 2016)."""

    words: int
    width: int

    @nn.compact
    def __call__(self, state: tuple[Any, Array], word: Array, keys: Array, values: Array, real: Array) -> Any:
        carry, context = state
        read = jnp.concatenate([nn.Embed(self.words + 1, self.width, name="embed")(word), context], axis=-1)
        carry, output = nn.OptimizedLSTMCell(self.width, name="cell")(carry, read)
        alike = jnp.einsum("bd,btd->bt", nn.Dense(self.width, name="query")(output), keys) / self.width**0.5
        weights = nn.softmax(jnp.where(real, alike, -1e9), axis=-1)
        context = jnp.einsum("bt,btd->bd", weights, values)
        return (carry, context), nn.Dense(self.words + 1, name="scores")(jnp.concatenate([output, context], axis=-1))


class Attender(nn.Module):
    """An encoder of LSTMs and a decoder that attends to it; label zero is the start and the end.

    Attributes:
      words: How many there are.
      width: Units of a layer.
      layers: How many of them in the encoder.
    """

    words: int
    width: int = 96
    layers: int = 2
    body: ClassVar[str] = "attention"

    def setup(self) -> None:
        self.encoder = Encoder("lstm", self.width, self.layers)
        self.keys = nn.Dense(self.width)
        self.decoder = Decoder(self.words, self.width)

    def encoded(self, frames: Array, padding: Array) -> tuple[Any, tuple[Array, Array, Array]]:
        """The state before the first word, and what is attended to."""
        values, padding = self.encoder(frames, padding)
        zeros = jnp.zeros((len(frames), self.width), values.dtype)
        return ((zeros, zeros), jnp.zeros_like(values[:, 0])), (self.keys(values), values, padding == 0)

    def __call__(self, frames: Array, padding: Array, labels: Array) -> Array:
        """Scores ``(batch, labels + 1, words + 1)`` of each word and of the end, of the words before."""
        state, read = self.encoded(frames, padding)
        before = jnp.pad(labels, ((0, 0), (1, 0)))
        loop = nn.scan(lambda decoder, state, word: decoder(state, word, *read), in_axes=1, out_axes=1, **SHARED)
        return loop(self.decoder, state, before)[1]

    def losses(self, frames: Array, padding: Array, labels: Array) -> Array:
        """The cross entropy of each utterance, summed over its words and its end."""
        scores, after = self(frames, padding, labels), jnp.pad(labels, ((0, 0), (0, 1)))
        real = jnp.pad(labels, ((0, 0), (1, 0)), constant_values=1) != 0
        each = optax.softmax_cross_entropy_with_integer_labels(scores, after)
        return jnp.sum(each, axis=1, where=real)

    def recognize(self, frames: Array, padding: Array) -> Array:
        """The best word after those before, as many as there are frames at most; zeros from the end on."""
        state, read = self.encoded(frames, padding)

        def next_word(decoder: Decoder, given: Any, _: None) -> Any:
            state, word, going = given
            state, scores = decoder(state, word, *read)
            word = jnp.where(going, jnp.argmax(scores, axis=-1), 0)
            return (state, word, going & (word != 0)), word

        start = jnp.zeros(len(frames), int), jnp.ones(len(frames), bool)
        loop = nn.scan(next_word, out_axes=1, length=read[0].shape[1], **SHARED)
        return loop(self.decoder, (state, *start), None)[1]


SHARED = {"variable_broadcast": "params", "split_rngs": {"params": False}}
"""Of a loop whose steps have the same parameters."""
BODIES: dict[str, Callable[..., Recognizer | Attender]] = {
    "lstm": functools.partial(Recognizer, body="lstm"),
    "conformer": functools.partial(Recognizer, body="conformer", width=64),
    "attention": Attender,
}
"""From the number of words to each recognizer at its size."""


def positions(length: int, width: int) -> Array:
    """Sines and cosines of the time, at frequencies from one to a ten-thousandth."""
    angles = jnp.arange(length)[:, None] / 10000 ** jnp.linspace(0, 1, width // 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
