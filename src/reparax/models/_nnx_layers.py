"""Lists the axes of the arrays of nnx layers, by class name; ``core/known_axes.py`` explains the letters and sizes."""

from __future__ import annotations

from typing import Any

NAME = "nnx"


def _einsum(m: Any) -> dict[str, Any]:
    """Returns the axes of an einsum layer's bias, and of its kernel if the layer's equation determines them."""
    data, kernel, out = (m.einsum_str or ",->").replace("->", ",").split(",")
    letter_of = {(True, False): "i", (False, True): "o", (True, True): "s"}
    letters = "".join(letter_of.get((axis in data, axis in out), "") for axis in kernel)
    # If the equation repeats a letter in the kernel, the layer reads a diagonal, so the axes are unknown.
    is_known = len(letters) == len(m.kernel_shape) and len(set(kernel)) == len(kernel)
    known = {"kernel": (letters, *m.kernel_shape)} if is_known else {}
    return known | ({"bias": ("v", m.bias_shape)} if m.bias_shape else {})


def _window(m: Any) -> tuple[int, ...]:
    """Returns the kernel size of a convolution as a tuple."""
    return (m.kernel_size,) if isinstance(m.kernel_size, int) else tuple(m.kernel_size)


def _conv(m: Any) -> dict[str, Any]:
    """Returns the axes of a convolution's kernel and bias, as letters and sizes."""
    inputs = m.in_features // m.feature_group_count
    return {"kernel": ("wio", _window(m), inputs, m.out_features), "bias": ("v", m.out_features)}


def _conv_transpose(m: Any) -> dict[str, Any]:
    """Returns the axes of a transposed convolution's kernel and bias, as letters and sizes."""
    plain, transposed = ("wio", m.in_features, m.out_features), ("woi", m.out_features, m.in_features)
    letters, *channels = transposed if m.transpose_kernel else plain
    return {"kernel": (letters, _window(m), *channels), "bias": ("v", m.out_features)}


def _linear_general(m: Any) -> dict[str, Any]:
    """Returns the axes of a general linear layer: a kernel with batch, input and output axes, and a bias."""
    batch = tuple(m.batch_axis.values())
    return {"kernel": ("sio", batch, m.in_features, m.out_features), "bias": ("sv", batch, m.out_features)}


LAYERS = {
    **dict.fromkeys(
        ("Linear", "LoRALinear"),
        lambda m: {"kernel": ("io", m.in_features, m.out_features), "bias": ("v", m.out_features)},
    ),
    "LinearGeneral": _linear_general,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "LoRA": lambda m: {"lora_a": ("io", m.in_features, None), "lora_b": ("io", None, m.out_features)},
    "Embed": lambda m: {"embedding": ("ro", m.num_embeddings, m.features)},
    **dict.fromkeys(
        ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm"),
        lambda _: {"scale": ("v", None), "bias": ("v", None)},
    ),
}
