"""Lists the axes of the arrays of equinox layers, by class name; ``core/known_axes.py`` explains letters and sizes."""

from __future__ import annotations

from typing import Any

NAME = "eqx.nn"


def _size(features: Any) -> int:
    """Returns the number of features, where equinox's ``"scalar"`` counts as one."""
    return 1 if features == "scalar" else features


def _linear(m: Any) -> dict[str, Any]:
    """Returns the axes of a linear layer's matrix and bias, as letters and sizes."""
    inputs, outputs = _size(m.in_features), _size(m.out_features)
    return {"weight": ("oi", outputs, inputs), "bias": ("v", outputs)}


def _conv(m: Any) -> dict[str, Any]:
    """Returns the axes of a convolution's kernel and bias, as letters and sizes."""
    shape = m.out_channels, m.in_channels // m.groups, m.kernel_size
    return {"weight": ("oiw", *shape), "bias": ("vv", m.out_channels, (1,) * m.num_spatial_dims)}


def _cell(m: Any, gates: int) -> dict[str, Any]:
    """Returns the axes of a recurrent cell's matrices and biases, whose gates are concatenated along one axis."""
    width = gates * m.hidden_size
    weights = {"weight_ih": ("oi", width, m.input_size), "weight_hh": ("oi", width, m.hidden_size)}
    return {**weights, "bias": ("v", width), "bias_n": ("v", m.hidden_size)}


LAYERS = {
    "Linear": _linear,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Embedding": lambda m: {"weight": ("ro", m.num_embeddings, m.embedding_size)},
    "GRUCell": lambda m: _cell(m, 3),
    "LSTMCell": lambda m: _cell(m, 4),
    **dict.fromkeys(("LayerNorm", "RMSNorm"), lambda m: {"weight": ("v", m.shape), "bias": ("v", m.shape)}),
    **dict.fromkeys(("GroupNorm", "BatchNorm"), lambda _: {"weight": ("v", None), "bias": ("v", None)}),
}
