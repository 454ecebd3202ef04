"""Defines roles of axes in a network, the words for these roles, and reports of axes that contradict the roles.

An array that is multiplied with data has three kinds of axes:

- The inputs are the axes that the product contracts with the data.
- The outputs are the axes that remain in the result.
- The stacked axes are those along which independent arrays are stacked.

A kernel of shape ``(in, out)`` has the inputs ``(0,)`` and the outputs ``(1,)``. A :class:`Role` holds these axes for
an array, and a :class:`Use` holds them for one of its products with data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

INPUTS, OUTPUTS, STACKED = "inputs", "outputs", "stacked"
WORDS = (INPUTS, OUTPUTS, STACKED)
"""The words that users may write in place of axes. No axis can have one of these words as its name."""

PRODUCT, CONVOLUTION, TRANSPOSED, LOOKUP = "product", "convolution", "transposed convolution", "lookup"
"""The ways in which a network may multiply an array with data."""

CHANNELS = "channels"
"""The word for the input axis along which inputs are grouped: the last input axis that is not a spatial axis of a
convolution. If an array is flattened to a matrix, neighbors along this axis stay neighbors."""

UNCUT = "uncut"
"""The word for all input and output axes of an array except the channel axis. If an array is quantized in blocks along
the channel axis, each index along the other axes has scales of its own."""

VECTORS = "vectors"
"""The word for the axes along which the vectors of an array lie: its input axes, with a vector for each output. In a
look-up table, they are the output axes, with a vector for each row."""

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """One way in which a network multiplies an array with data.

    Attributes:
      inputs: The axes of the array that are contracted with data. For a look-up table, the axis of its rows.
      outputs: The axes of the array that remain in the result.
      stacked: The axes along which independent arrays are stacked.
      line: The jaxpr equation, and the line of source code that it comes from; for a known layer, the layer's name.
      how: The kind of use: ``"product"`` (of matrices), ``"convolution"``, ``"transposed convolution"``, or
        ``"lookup"`` (of rows).
      windows: The input axes along which the window of a convolution moves (its spatial axes).
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
      inputs: The axes that products contract with data. For a look-up table, the axis of its rows.
      outputs: The axes that remain in the results of these products.
      stacked: The axes along which independent arrays are stacked, such as the layers of a scan.
      why: The reason why no product of the array with data is known, for example because another operation reads the
        array. If a product is known, ``why`` is empty.
      uses: The products of the array with data, without repetitions. Each has its ``inputs``, ``outputs`` and
        ``stacked`` axes, its ``line`` of source code, and the kind of product as ``how``: ``"product"``,
        ``"convolution"``, ``"transposed convolution"`` or ``"lookup"``. If there are several uses, as for a table that
        is also the last layer, an axis may be both an input and an output.
      shape: The shape of the array.
      dtype: The dtype of the array.
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
        """Whether the network uses the array only as a look-up table, such as an embedding table."""
        return bool(self.uses) and all(use.how == LOOKUP for use in self.uses)

    @property
    def ambiguous(self) -> str:
        """A text that lists the uses of the array if an axis has more than one role, and otherwise an empty string.

        If a network multiplies data with both ``w`` and ``w.T``, for example, axis 0 is an input in one product and an
        output in the other.
        """
        groups = (self.inputs, self.outputs, self.stacked)
        if sum(map(len, groups)) == len({axis for axes in groups for axis in axes}):  # No axis has two roles.
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
          dtype: The dtype of the derived array.
          stacked: The axes of the derived array along which arrays like this one are stacked.

        The following examples are for a kernel with inputs ``(0,)`` and outputs ``(1,)``:

        - ``followed=[1, 0]`` stands for its transpose, with inputs ``(1,)`` and outputs ``(0,)``.
        - ``followed=[None, 0, 1]`` with ``stacked=(0,)`` stands for a stack of kernels, with inputs ``(1,)``.
        - ``followed=[0, None]`` stands for its first factor, with inputs ``(0,)`` and outputs ``(1,)``.
        """
        new_axis = {axis: new for new, axis in enumerate(followed) if axis is not None}

        def moved(axes: Numbers) -> Numbers:
            """Returns the axes of the derived array that correspond to these axes; axes that it lacks are left out."""
            return tuple(sorted(new_axis[axis] for axis in axes if axis in new_axis))

        def with_moved_axes(record: Any) -> Any:
            """Returns a copy of a role, or of one of its uses, with the corresponding axes of the derived array."""
            stacks = tuple(sorted((*moved(record.stacked), *stacked)))
            return replace(record, inputs=moved(record.inputs), outputs=moved(record.outputs), stacked=stacks)

        uses = list[Use]()
        for use in self.uses:
            is_product = use.how == LOOKUP and not moved(use.inputs)  # Looked-up rows are multiplied by this factor.
            how = PRODUCT if is_product else use.how
            uses.append(replace(with_moved_axes(use), how=how, windows=moved(use.windows)))
        role = replace(with_moved_axes(self), uses=tuple(uses), shape=shape, dtype=dtype)
        # If the derived array is a factor, `between` holds the axes between two factors. A factor with neither inputs
        # nor outputs has no role.
        between = tuple(new for new, axis in enumerate(followed) if axis is None and new not in stacked)
        if role.inputs and not role.outputs:
            return replace(role, outputs=between)
        return replace(role, inputs=between) if role.outputs and not role.inputs else role

    def unknown(self) -> Numbers:
        """Returns the axes that have no role; axes of size 1 are left out, because their role makes no difference."""
        known_axes = {*self.inputs, *self.outputs, *self.stacked}
        return tuple(i for i, n in enumerate(self.shape) if i not in known_axes and n != 1)


def axes_by_word(role: Role, stacked: Collection[int]) -> dict[str, Numbers]:
    """Maps each word for axes, such as ``"outputs"``, to the axes that it stands for in an array with this role.

    Axes are counted from the back, without the axes in ``stacked``. A word without axes is mapped to ``()``. For the
    kernel of a convolution, of shape ``(width, in, out)``, the result is::

        {"inputs": (-3, -2), "outputs": (-1,), "stacked": (), "channels": (-2,), "uncut": (-3, -1), "vectors": (-3, -2)}
    """
    unstacked_axes = [axis for axis in range(len(role.shape)) if axis not in stacked]

    def from_back(axes: Iterable[int]) -> Numbers:
        """Converts axes to negative indices that do not count the stacked axes; stacked axes are left out."""
        return tuple(unstacked_axes.index(axis) - len(unstacked_axes) for axis in axes if axis in unstacked_axes)

    inputs, outputs, stacks = from_back(role.inputs), from_back(role.outputs), from_back(role.stacked)
    windows = from_back(axis for use in role.uses for axis in use.windows)
    # The channel axis is the last input axis along which no window moves. If windows move along all input axes, take
    # the last input axis.
    channels = tuple(axis for axis in inputs if axis not in windows)[-1:] or inputs[-1:]
    uncut = tuple(sorted({*inputs, *outputs} - {*channels}))
    vectors = outputs if role.is_table else inputs  # Each row of a table is a vector of outputs.
    return {INPUTS: inputs, OUTPUTS: outputs, STACKED: stacks, CHANNELS: channels, UNCUT: uncut, VECTORS: vectors}


@dataclass(frozen=True)
class Misfit:
    """A report that a stage uses other axes of an array than the network's products with that array suggest.

    Attributes:
      stage: The stage as code, such as ``"WeightNorm()"``.
      path: The path of the array.
      field: The argument of the stage that holds these axes, such as ``"axis"``.
      got: The axes that the stage uses. If ``field`` is ``"stacked"``, they are counted from the front. All other axes
        are counted from the back, without the stacked axes.
      expected: The axes that the stage should use in this network.
      role: The roles of the axes of the array in the network.
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
    """A tuple of :class:`Misfit` reports, whose repr has a line for each; empty if all axes fit the network."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "All axes fit."


def one_or_tuple(axes: Sequence[Any]) -> Any:
    """Returns axes as users write them: ``1`` for the single axis ``(1,)``, and otherwise a tuple: ``(0, 2)``."""
    return axes[0] if len(axes) == 1 else tuple(axes)
