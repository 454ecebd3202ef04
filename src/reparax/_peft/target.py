"""An array that PEFT adapts: what it is called there, and which of its axes are inputs and outputs."""

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
      tensor: What torch calls it.
      shape: Its shape.
      layout: Its layout, as torch has the outputs of a weight first.
      table: Whether it is a table of embeddings, of which PEFT adapts the transposed matrix.
    """

    path: str
    tensor: str
    shape: tuple[int, ...]
    layout: str
    table: bool = False

    @property
    def module(self) -> str:
        """What torch calls the module that it belongs to."""
        return self.tensor.rpartition(".")[0]

    def turned(self) -> "Target":
        """The same array, of which torch keeps the transposed weight, while PEFT adapts it as ``(out, in)``."""
        other = {"same": "kernel", "kernel": "same"}
        return replace(self, layout=other[self.layout]) if len(self.shape) == 2 else self

    @property
    def out(self) -> int:
        """Which of our axes is that of the outputs."""
        return len(self.shape) - 1 if self.table else order(self.layout, len(self.shape))[0]

    @property
    def ins(self) -> tuple[int, ...]:
        """Our other axes."""
        return tuple(axis for axis in range(len(self.shape)) if axis != self.out)

    @property
    def ones(self) -> tuple[int, ...]:
        """The axes that PEFT gives vectors of a convolution besides that of channels."""
        return () if self.table else (1,) * (len(self.shape) - 2)

    def rows_and_columns(self) -> dict[str, Any]:
        """The arguments of a stage whose rows are the inputs, without those that a kernel of two axes needs not."""
        ins, out = self.ins, self.out
        return {} if (ins, out) == ((0,), 1) else {"rows": ins[0] if len(ins) == 1 else ins, "columns": out}

    def read_inputs(self, factor: np.ndarray) -> Array:
        """A factor of (rank, in, *kernel) as we have it: inputs in our order, the rank last."""
        if self.table:
            return jnp.asarray(factor).T
        return jnp.moveaxis(read_layout(jnp.asarray(factor), self.layout), self.out, -1)

    def write_inputs(self, factor: Array) -> Array:
        """The factor as PEFT has it."""
        if self.table:
            return factor.T
        return write_layout(jnp.moveaxis(factor, -1, self.out), self.layout)

    def inputs_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of such a factor there."""
        if self.table:
            return (rank, self.shape[0])
        return (rank, *(self.shape[axis] for axis in order(self.layout, len(self.shape))[1:]))

    def flip(self, matrix: Array) -> Array:
        """A matrix of (out, in) as we have it, and back: transposed unless we have the outputs first too."""
        return matrix if self.out == 0 else matrix.T

    def read_whole(self, weight: np.ndarray) -> Array:
        """The parameter itself, as we have it."""
        return read_layout(jnp.asarray(weight), self.layout)

    def write_whole(self, weight: Array) -> Array:
        """The parameter itself, as torch has it."""
        return write_layout(weight, self.layout)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter there."""
        return permute(self.shape, self.layout)
