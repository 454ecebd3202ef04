"""An array that PEFT adapts: its name there, and its axes of inputs and outputs."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax._torch.axis_order import order, permute, read_layout, write_layout


@dataclass(frozen=True)
class Target:
    """One array of the model.

    Attributes:
      path: Its path.
      tensor: Its name in torch.
      shape: Its shape.
      layout: Its layout, which relates its axes to torch's, with outputs first.
      table: Whether it is an embedding table; PEFT adapts the transposed matrix.
    """

    path: str
    tensor: str
    shape: tuple[int, ...]
    layout: str
    table: bool = False

    @property
    def module(self) -> str:
        """The torch name of its module."""
        return self.tensor.rpartition(".")[0]

    def turned(self) -> "Target":
        """The same array for a transposed weight in torch, which PEFT adapts as ``(out, in)``."""
        other = {"same": "kernel", "kernel": "same"}
        return replace(self, layout=other[self.layout]) if len(self.shape) == 2 else self

    @property
    def out(self) -> int:
        """The axis of the outputs, in our array."""
        return len(self.shape) - 1 if self.table else order(self.layout, len(self.shape))[0]

    @property
    def ins(self) -> tuple[int, ...]:
        """All other axes of our array."""
        return tuple(axis for axis in range(len(self.shape)) if axis != self.out)

    @property
    def ones(self) -> tuple[int, ...]:
        """The axes of size 1 that PEFT adds to vectors of a convolution."""
        return () if self.table else (1,) * (len(self.shape) - 2)

    def rows_and_columns(self) -> dict[str, Any]:
        """The arguments for a stage whose rows are the inputs; none for a plain kernel ``(in, out)``."""
        ins, out = self.ins, self.out
        return {} if (ins, out) == ((0,), 1) else {"rows": ins[0] if len(ins) == 1 else ins, "columns": out}

    def read_inputs(self, factor: np.ndarray) -> Array:
        """Converts PEFT's factor (rank, in, *kernel) to ours: input axes in our order, the rank last."""
        if self.table:
            return jnp.asarray(factor).T
        return jnp.moveaxis(read_layout(jnp.asarray(factor), self.layout), self.out, -1)

    def write_inputs(self, factor: Array) -> Array:
        """Converts our factor to PEFT's."""
        if self.table:
            return factor.T
        return write_layout(jnp.moveaxis(factor, -1, self.out), self.layout)

    def inputs_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of PEFT's factor."""
        if self.table:
            return (rank, self.shape[0])
        return (rank, *(self.shape[axis] for axis in order(self.layout, len(self.shape))[1:]))

    def flip(self, matrix: Array) -> Array:
        """Converts a matrix (out, in) to ours, or back: transposed unless our outputs are first too."""
        return matrix if self.out == 0 else matrix.T

    def read_whole(self, weight: np.ndarray) -> Array:
        """Converts torch's parameter to ours."""
        return read_layout(jnp.asarray(weight), self.layout)

    def write_whole(self, weight: Array) -> Array:
        """Converts our parameter to torch's."""
        return write_layout(weight, self.layout)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter in torch."""
        return permute(self.shape, self.layout)
