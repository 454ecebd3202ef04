"""What the arrays of equinox layers are, by their classes' names: a letter for each size, as in ``core/layers.py``."""

from __future__ import annotations

from typing import Any

NAME = "eqx.nn"


def _size(features: Any) -> int:
    """The size of features."""
    return 1 if features == "scalar" else features


def _linear(m: Any) -> dict[str, Any]:
    """A matrix, and a bias."""
    inputs, outputs = _size(m.in_features), _size(m.out_features)
    return {"weight": ("oi", outputs, inputs), "bias": ("v", outputs)}


def _conv(m: Any) -> dict[str, Any]:
    """A kernel, and a bias."""
    shape = m.out_channels, m.in_channels // m.groups, m.kernel_size
    return {"weight": ("oii", *shape), "bias": ("vv", m.out_channels, (1,) * m.num_spatial_dims)}


def _embedding(m: Any) -> dict[str, Any]:
    """A table."""
    return {"weight": ("ro", m.num_embeddings, m.embedding_size)}


def _cell(gates: int) -> Any:
    """Matrices of all gates, and biases."""

    def arrays_of(m: Any) -> dict[str, Any]:
        """What the cell holds."""
        width = gates * m.hidden_size
        weights = {"weight_ih": ("oi", width, m.input_size), "weight_hh": ("oi", width, m.hidden_size)}
        return {**weights, "bias": ("v", width), "bias_n": ("v", m.hidden_size)}

    return arrays_of


def _norm(m: Any) -> dict[str, Any]:
    """Scales and biases."""
    return {"weight": ("v", m.shape), "bias": ("v", m.shape)}


def _norm_of_channels(m: Any) -> dict[str, Any]:
    """Scales and biases, one for each channel."""
    return {"weight": ("v", None), "bias": ("v", None)}


LAYERS = {
    "Linear": _linear,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Embedding": _embedding,
    "GRUCell": _cell(3),
    "LSTMCell": _cell(4),
    "LayerNorm": _norm,
    "RMSNorm": _norm,
    "GroupNorm": _norm_of_channels,
    "BatchNorm": _norm_of_channels,
}
