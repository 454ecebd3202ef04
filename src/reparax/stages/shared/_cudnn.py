"""The weights of cuDNN's LSTM: one flat vector that holds all gates."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.fields import argument
from reparax.core.leaf import Reparametrization
from reparax.core.values import OTHERS, Values, main
from reparax.numerics.arguments import check_whole
from reparax.stages.shared._block import Concat, Sizes, cut_values, join_values, value_names


class CudnnLSTM(Reparametrization):
    r"""The flat weight vector of :func:`jax.experimental.rnn.lstm`, assembled from separate gates.

    Raw values (main, each under its own path), for each gate ``i``, ``f``, ``g``, ``o``, each layer and direction: the
    kernels ``input_i_l0`` of shape ``(inputs, hidden_size)`` and ``hidden_i_l0`` of shape ``(hidden_size,
    hidden_size)``, the biases ``bias_i_l0`` and ``hidden_bias_i_l0`` of shape ``(hidden_size,)``. Names of the backward
    direction end in ``_reverse``. ``init`` splits the vector. It is exact with ``biases=2``. With 1, the two biases are
    summed, so that the function stays the same; with 0, they are dropped.

    Args:
      input_size: The number of inputs of the first layer.
      hidden_size: The number of hidden units in each direction.
      num_layers: The number of layers.
      bidirectional: Whether each layer runs in both directions.
      biases: How many biases of a gate train: 2, as in cuDNN, which adds them; 1, as in flax and equinox; or 0. The
        vector holds zeros for the others.
      where: Which arrays to act on. Default: floating vectors of the right size.
      stacked: As for :class:`Reparametrization`.

    Raises:
      TypeError: If ``input_size``, ``hidden_size``, ``num_layers`` or ``biases`` is not an integer.
      ValueError: If a size is less than 1, or if there are other than 0, 1 or 2 biases.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> from jax.experimental import rnn
      >>> p = rpx.shared.CudnnLSTM(3, 2)
      >>> weights = rnn.init_lstm_weight(jax.random.key(0), 3, 2, 1, False)
      >>> raw = p.init({"weights": weights})["weights"]["@cudnn_lstm"]
      >>> raw["input_f_l0"].shape, raw["hidden_f_l0"].shape, raw["bias_f_l0"].shape
      ((3, 2), (2, 2), (2,))

    References:
      Appleyard, Kociský and Blunsom, *Optimizing Performance of Recurrent Neural Networks on GPUs*, 2016.
    """

    input_size: int = argument(check_whole)
    hidden_size: int = argument(check_whole)
    num_layers: int = argument(check_whole, default=1)
    bidirectional: bool = False
    biases: int = argument(check_whole, default=2)

    raw_values: ClassVar[Values] = {OTHERS: main(part=True)}
    dtypes: ClassVar[Any] = jnp.floating

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.input_size, self.hidden_size, self.num_layers) < 1 or self.biases not in (0, 1, 2):
            raise ValueError(f"{self!r} needs sizes of at least 1, and 0, 1 or 2 biases.")

    def default(self, w: Array) -> bool:
        return super().default(w) and w.shape == (self._size,)

    def refuse_leaf(self, w: Array) -> str | None:
        if w.shape == (self._size,):
            return None
        return f"expected a vector of {self._size} weights, got shape {w.shape}. Correct the sizes, or narrow `where`."

    def init_leaf(self, w: Array) -> dict[str, Array]:
        values = cut_values(self._block, w, self._sizes)
        bias = {name: value for name, value in values.items() if name.startswith("bias")}
        kernels = {name: value for name, value in values.items() if "bias" not in name}
        if self.biases == 1:
            return kernels | {name: value + values[f"hidden_{name}"] for name, value in bias.items()}
        return values if self.biases else kernels

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        dtype = next(iter(values.values())).dtype
        zeros = {name: jnp.zeros(self.hidden_size, dtype) for name in value_names(self._block) if "bias" in name}
        return join_values(self._block, zeros | values, self._sizes)

    @property
    def _sizes(self) -> Sizes:
        """The sizes for the letters of the blocks."""
        return {"n": self.input_size, "h": self.hidden_size, "m": self.hidden_size * (1 + self.bidirectional)}

    @property
    def _size(self) -> int:
        """The number of weights of all gates, layers and directions."""
        n, h, m = (self._sizes[name] for name in "nhm")
        return 4 * h * (m // h) * (n + (self.num_layers - 1) * m + self.num_layers * (h + 2))

    @property
    def _block(self) -> Concat:
        """All kernels, layer by layer, followed by all biases."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        ends = [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

        def gates(source: str, end: str, axes: str) -> list[str]:
            return [f"{source}_{gate}_{end}: {axes}" for gate in "ifgo"]

        parts: list[str] = []
        for end in ends:
            n = "n" if end.startswith("l0") else "m"
            parts += gates("input", end, f"{n} h -> (h {n})") + gates("hidden", end, "h' h -> (h h')")
        for end in ends:
            parts += gates("bias", end, "h") + gates("hidden_bias", end, "h")
        return Concat(tuple(parts))
