"""Helpers for files of other libraries: convert tensors to NumPy, check settings, and shorten reprs for errors."""

import reprlib
from collections.abc import Mapping
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from reparax.numerics.arithmetic import is_array

LARGEST = float(np.finfo(np.float32).max)
"""The largest magnitude allowed for a number in an adapter's configuration, because weights are computed in float32."""


def is_number(x: object) -> bool:
    """Returns whether a value is an int or a float, but not a bool, and is finite in float32."""
    return isinstance(x, int | float) and not isinstance(x, bool) and -LARGEST <= x <= LARGEST


def is_positive_integer(x: Any) -> TypeGuard[int]:
    """Returns whether a value from a file is an integer of at least 1."""
    return type(x) is int and x >= 1


def is_finite(x: np.ndarray) -> bool:
    """Returns whether all entries of an array are finite in float32."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(x.astype(np.float32)).all())


def read_tensors(who: str, tensors: Any, what: str, advice: str) -> dict[str, np.ndarray]:
    """Converts a dict of torch tensors or arrays to a dict of NumPy arrays under the same names.

    Args:
      who: The name of the public function that was called, for errors.
      tensors: A dict from names to tensors.
      what: The kind of input that the public function takes, such as "state dict", for errors.
      advice: A sentence that says how to obtain this input, for errors.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{who} takes a {what}, but got a value of type {type(tensors).__name__}. {advice}")
    return {name: _read_tensor(who, what, name, x) for name, x in tensors.items()}


def _read_tensor(who: str, what: str, name: Any, x: Any) -> np.ndarray:
    """Converts a tensor or array to NumPy. Raises an error for quantized, sparse and meta tensors."""
    if not isinstance(name, str):
        raise TypeError(f"{who} takes a {what} with strings as keys, but got the key {name!r}. Convert it to a string.")
    if not is_array(x):
        raise TypeError(
            f"{who} takes a {what} of tensors, but the value of {name!r} has type {type(x).__name__}. If the tensors "
            f"are nested in a checkpoint, pass only them, such as `checkpoint['model']`."
        )
    if not hasattr(x, "detach"):
        return np.asarray(x)
    for kind, applies, advice in (
        ("on the meta device, without values", x.is_meta, "Load its values first."),
        ("quantized", x.is_quantized, "Pass `x.dequantize()`."),
        ("sparse", str(x.layout) != "torch.strided", "Pass `x.to_dense()`."),
    ):
        if applies:
            raise ValueError(f"{who} takes dense tensors with plain values, but {name!r} is {kind}. {advice}")
    return _to_numpy(x)


def _to_numpy(x: Any) -> np.ndarray:
    """Converts a torch tensor to a NumPy array."""
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype == "bfloat16" or dtype.startswith("float8"):  # NumPy lacks these dtypes, so convert through float32.
        return x.float().numpy(force=True).astype(getattr(jnp, dtype))
    return x.numpy(force=True)


class _ShortRepr(reprlib.Repr):
    """Writes the ``repr`` of a value with a limited length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = 80
        self.maxlong = 80
        self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to convert very long integers to text.
        return super().repr_int(x, level) if x.bit_length() < 256 else f"a number of {x.bit_length()} bits"


def short_repr(value: object) -> str:
    """Returns a shortened ``repr`` of a value. The built-in ``repr`` may be very long or fail for nested lists."""
    return _ShortRepr().repr(value)
