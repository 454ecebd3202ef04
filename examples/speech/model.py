"""Two recognizers in flax linen that end in scores for CTC: of bidirectional LSTMs, and a small conformer."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array


class BiLSTM(nn.Module):
    """Two LSTMs, one of which reads from the end."""

    width: int

    @nn.compact
    def __call__(self, x: Array, padding: Array, *, train: bool) -> Array:
        del train
        lengths = jnp.sum(1 - padding, axis=1).astype(jnp.int32)
        forward = nn.RNN(nn.OptimizedLSTMCell(self.width, name="forward"))
        backward = nn.RNN(nn.OptimizedLSTMCell(self.width, name="backward"), reverse=True, keep_order=True)
        both = [layer(x, seq_lengths=lengths) for layer in (forward, backward)]
        return jnp.concatenate(both, axis=-1)


class Conformer(nn.Module):
    """Attention and a convolution between two halves of a feed-forward layer (Gulati et al., 2020)."""

    width: int
    dropout: float
    heads: int = 4
    reach: int = 9

    @nn.compact
    def __call__(self, x: Array, padding: Array, *, train: bool) -> Array:
        drop = nn.Dropout(self.dropout, deterministic=not train)
        real = 1 - padding[..., None]

        def feed_forward(x: Array, name: str) -> Array:
            y = nn.swish(nn.Dense(4 * self.width, name=f"{name}_in")(nn.LayerNorm()(x)))
            return drop(nn.Dense(self.width, name=f"{name}_out")(drop(y)))

        x = x + 0.5 * feed_forward(x, "first")
        mask = padding[:, None, None, :] == 0
        x = x + drop(nn.MultiHeadDotProductAttention(self.heads, name="attention")(nn.LayerNorm()(x), mask=mask))
        y = nn.glu(nn.Dense(2 * self.width, name="gate")(nn.LayerNorm()(x))) * real
        y = nn.Conv(self.width, (self.reach,), feature_group_count=self.width, name="depthwise")(y)
        x = x + drop(nn.Dense(self.width, name="mix")(nn.swish(nn.LayerNorm()(y))))
        x = x + 0.5 * feed_forward(x, "second")
        return nn.LayerNorm()(x)


class Recognizer(nn.Module):
    """Two convolutions, each of which halves the number of frames; layers; and a score of each word and of the blank.

    Attributes:
      words: How many there are.
      body: ``"lstm"`` or ``"conformer"``.
      width: Units of a layer, of an LSTM in each direction.
      layers: How many of them.
      dropout: The probability that an activation is dropped.
    """

    words: int
    body: str = "lstm"
    width: int = 96
    layers: int = 2
    dropout: float = 0.0

    @nn.compact
    def __call__(self, frames: Array, padding: Array, *, train: bool) -> tuple[Array, Array]:
        """Scores of ``(batch, frames / 4, words + 1)``, and what of them is padding."""
        drop, x = nn.Dropout(self.dropout, deterministic=not train), frames * (1 - padding[..., None])
        for i in range(2):
            x = nn.relu(nn.Conv(self.width, (5,), strides=2, name=f"conv_{i}")(x))
            padding = padding[:, ::2]
            x = x * (1 - padding[..., None])
        if self.body == "conformer":
            x = x + positions(*x.shape[1:])
        for i in range(self.layers):
            name = f"{self.body}_{i}"
            layer = (
                BiLSTM(self.width, name=name) if self.body == "lstm" else Conformer(self.width, self.dropout, name=name)
            )
            x = layer(drop(x), padding, train=train)
        return nn.Dense(self.words + 1, name="scores")(drop(x)), padding


def positions(length: int, width: int) -> Array:
    """Sines and cosines of the time, at frequencies from one to a ten-thousandth."""
    angles = jnp.arange(length)[:, None] / 10000 ** jnp.linspace(0, 1, width // 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
