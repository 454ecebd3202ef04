"""The role of each axis of an array in a network, the words for these roles, and reports of axes that contradict them.

An array that is multiplied with data has three kinds of axes:

- The inputs are the axes that the product contracts with the data.
- The outputs are the axes that remain in the result.
- The stacked axes are those along which independent arrays are stacked.

A kernel of shape ``(in, out)`` has the inputs ``(0,)`` and the outputs ``(1,)``. A :class:`Role` holds these axes for
an array, and a :class:`Use` holds them for one of its products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

INPUTS, OUTPUTS, STACKED = "inputs", "outputs", "stacked"
WORDS = (INPUTS, OUTPUTS, STACKED)
"""The words that users may write in place of an axis. No axis can have such a word as its name."""

PRODUCT, CONVOLUTION, TRANSPOSED, LOOKUP = "product", "convolution", "transposed convolution", "lookup"
"""The ways in which a network may use an array."""

CHANNELS = "channels"
"""The input axis along which inputs are grouped. This is the last input axis along which no window of a convolution
moves. If an array is flattened to a matrix, neighbors along this axis stay neighbors."""

UNCUT = "uncut"
"""All inputs and outputs of an array except its channels. If blocks lie along the inputs, each index of these axes has
its own scale."""

VECTORS = "vectors"
"""The axes along which vectors lie. There is a vector of inputs for each output, or in a look-up table, a vector of
outputs for each row."""

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """One way in which a network multiplies an array with data.

    Attributes:
      inputs: The axes that are contracted with data, or the rows of a table.
      outputs: The axes that the result has.
      stacked: The axes along which independent arrays are stacked.
      line: The equation, and the line of source code that it comes from.
      how: The kind of use: ``"product"`` (of matrices), ``"convolution"``, ``"transposed convolution"``, or
        ``"lookup"`` (of rows).
      windows: The inputs along which the window of a convolution moves.
    """

    inputs: Numbers
    outputs: Numbers
    stacked: Numbers
    line: str
    how: str = PRODUCT
    windows: Numbers = ()


@dataclass(frozen=True)
class Role:
    """The roles of the axes of an array.

    Attributes:
      inputs: The axes that products contract with data, or the rows of a look-up table.
      outputs: The axes that the results of these products have.
      stacked: The axes along which independent arrays are stacked, such as the layers of a scan.
      why: Why no product of the array with data is known, for example because something else reads the array. If a
        product is known, ``why`` is empty.
      uses: The products that differ in these axes. Each has its ``inputs``, ``outputs`` and ``stacked`` axes, its
        ``line``, and the kind of product as ``how``: ``"product"``, ``"convolution"``, ``"transposed convolution"`` or
        ``"lookup"``. If there are several uses, as for a table that is also the last layer, an axis may be both an
        input and an output.
      shape: The shape of the array.
      dtype: Its dtype.
    """

    inputs: Numbers = ()
    outputs: Numbers = ()
    stacked: Numbers = ()
    why: str = ""
    uses: tuple[Use, ...] = ()
    shape: Numbers = ()
    dtype: Any = None

    @property
    def is_table(self) -> bool:
        """Whether the array is a table whose rows are looked up, and which has no other product with data."""
        return bool(self.uses) and all(use.how == LOOKUP for use in self.uses)

    @property
    def ambiguous(self) -> str:
        """The uses of the array as text if an axis has more than one role, and otherwise an empty string.

        If a network multiplies with both ``w`` and ``w.T``, axis 0 is an input in one product and an output in the
        other.
        """
        groups = (self.inputs, self.outputs, self.stacked)
        if sum(map(len, groups)) == len({axis for axes in groups for axis in axes}):  # No axis is in two groups.
            return ""
        return "; ".join(f"inputs {use.inputs} and outputs {use.outputs} in {use.line}" for use in self.uses)

    def follow(self, followed: Sequence[int | None], shape: Numbers, dtype: Any, stacked: Numbers = ()) -> Role:
        """Returns the role of an array derived from this one, such as its transpose, a stack of it, or a factor.

        Args:
          followed: For each axis of the derived array, the corresponding axis of this array, or None. An axis with None
            is either one of the ``stacked`` axes, or lies between two factors of this array, as a rank does. An axis
            between two factors is an output of the factor that has the inputs, and an input of the factor that has the
            outputs.
          shape: The shape of the derived array.
          dtype: Its dtype.
          stacked: The axes of the derived array along which arrays like this one are stacked.

        The following examples are for a kernel with inputs ``(0,)`` and outputs ``(1,)``:

        - ``followed=[1, 0]`` stands for its transpose, with inputs ``(1,)`` and outputs ``(0,)``.
        - ``followed=[None, 0, 1]`` with ``stacked=(0,)`` stands for a stack of kernels, with inputs ``(1,)``.
        - ``followed=[0, None]`` stands for its first factor, with inputs ``(0,)`` and outputs ``(1,)``.
        """
        new_axis = {axis: new for new, axis in enumerate(followed) if axis is not None}

        def moved(axes: Numbers) -> Numbers:
            """Maps axes of this array to axes of the derived array; axes that the derived array lacks are left out."""
            return tuple(sorted(new_axis[axis] for axis in axes if axis in new_axis))

        def with_moved_axes(record: Any) -> Any:
            """Returns a copy of this role, or of one of its uses, with the axes of the derived array."""
            stacks = tuple(sorted((*moved(record.stacked), *stacked)))
            return replace(record, inputs=moved(record.inputs), outputs=moved(record.outputs), stacked=stacks)

        uses = list[Use]()
        for use in self.uses:
            is_product = use.how == LOOKUP and not moved(use.inputs)  # Looked-up rows are multiplied by this factor.
            how = PRODUCT if is_product else use.how
            uses.append(replace(with_moved_axes(use), how=how, windows=moved(use.windows)))
        role = replace(with_moved_axes(self), uses=tuple(uses), shape=shape, dtype=dtype)
        # If the derived array is a factor, these axes lie between two factors. A factor without inputs and outputs has
        # no role.
        between = tuple(new for new, axis in enumerate(followed) if axis is None and new not in stacked)
        if role.inputs and not role.outputs:
            return replace(role, outputs=between)
        return replace(role, inputs=between) if role.outputs and not role.inputs else role

    def unknown(self) -> Numbers:
        """Returns the axes without a role; axes of size 1 are left out, because their role makes no difference."""
        known_axes = {*self.inputs, *self.outputs, *self.stacked}
        return tuple(i for i, n in enumerate(self.shape) if i not in known_axes and n != 1)


def axes_by_word(role: Role, stacked: Iterable[int]) -> dict[str, Numbers]:
    """Maps each word to the axes that it stands for in an array with this role.

    The axes are counted from the back, without the axes in ``stacked``. A word without axes is mapped to ``()``. For
    the kernel of a convolution, of shape ``(width, in, out)``, the result is::

        {"inputs": (-3, -2), "outputs": (-1,), "stacked": (), "channels": (-2,), "uncut": (-3, -1), "vectors": (-3, -2)}
    """
    unstacked_axes = [axis for axis in range(len(role.shape)) if axis not in set(stacked)]

    def from_back(axes: Iterable[int]) -> Numbers:
        """Counts axes from the back, without the stacked axes; stacked axes in ``axes`` are left out."""
        return tuple(unstacked_axes.index(axis) - len(unstacked_axes) for axis in axes if axis in unstacked_axes)

    inputs, outputs, stacks = from_back(role.inputs), from_back(role.outputs), from_back(role.stacked)
    windows = from_back(axis for use in role.uses for axis in use.windows)
    # The channels are the last input along which no window moves. If windows move along all inputs, take the last
    # input.
    channels = tuple(axis for axis in inputs if axis not in windows)[-1:] or inputs[-1:]
    uncut = tuple(sorted({*inputs, *outputs} - {*channels}))
    vectors = outputs if role.is_table else inputs  # Each row of a table is a vector of outputs.
    return {INPUTS: inputs, OUTPUTS: outputs, STACKED: stacks, CHANNELS: channels, UNCUT: uncut, VECTORS: vectors}


@dataclass(frozen=True)
class Misfit:
    """A report that the axes of a stage at an array contradict the products of the network.

    Attributes:
      stage: The code of the stage.
      path: The path of the array.
      field: The argument of the stage, such as ``"axis"``.
      got: The axes that the stage uses. The axes of ``stacked`` are counted from the front. All other axes are counted
        from the back, without the stacked axes.
      expected: The axes that the stage should use in this network.
      role: The roles of the axes of the array.
    """

    stage: str
    path: str
    field: str
    got: Numbers
    expected: Numbers
    role: Role

    def __str__(self) -> str:
        lines = ", ".join(dict.fromkeys(use.line for use in self.role.uses))
        return (
            f"{self.stage} takes {self.field}={one_or_tuple(self.got)} at {self.path!r} of shape {self.role.shape}, "
            f"which the network multiplies with inputs {self.role.inputs}, outputs {self.role.outputs} and stacked "
            f"axes {self.role.stacked} ({lines}). Write {self.field}={one_or_tuple(self.expected)}, or "
            f"`p.with_axes(rpx.roles(loss, params, batch))`."
        )


class Misfits(tuple[Misfit, ...]):
    """A tuple of misfits, whose repr has a line for each misfit. If all axes fit, the tuple is empty."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "All axes fit."


def one_or_tuple(axes: Sequence[Any]) -> Any:
    """Returns axes as users write them: a single axis as a number, ``(1,) -> 1``, and any others as a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)
