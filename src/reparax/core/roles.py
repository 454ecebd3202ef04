"""The role of each axis of an array in a network, the words for these roles, and reports of axes that contradict them.

An array that is multiplied with data has inputs, the axes that the product contracts with the data; outputs, the axes
that the result has; and stacked axes, along which independent arrays lie. A kernel of shape ``(in, out)`` has the
inputs ``(0,)`` and the outputs ``(1,)``. A :class:`Role` has these axes for an array, and a :class:`Use` for one of its
products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

INPUTS, OUTPUTS, STACKED = "inputs", "outputs", "stacked"
WORDS = (INPUTS, OUTPUTS, STACKED)
"""The words that users may write in place of an axis. No axis can have such a name."""

PRODUCT, CONVOLUTION, TRANSPOSED, LOOKUP = "product", "convolution", "transposed convolution", "lookup"
"""How a network uses an array."""

CHANNELS = "channels"
"""The input axis along which groups of inputs are formed: the last input along which no window of a convolution moves.
In a matrix of flattened inputs, neighbors along it stay neighbors."""

UNCUT = "uncut"
"""All axes of an array except its channels. If blocks lie along the inputs, each index of these has its own scale."""

VECTORS = "vectors"
"""The axes along which vectors lie: one vector of inputs for each output, or each row of a table that is looked up."""

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """One way in which a network multiplies an array with data.

    Attributes:
      inputs: The axes that are contracted with data; of a table, its rows.
      outputs: The axes that the result has.
      stacked: The axes along which independent arrays are stacked.
      line: The equation, and the line of source code that it comes from.
      how: ``"product"`` of matrices, ``"convolution"``, ``"transposed convolution"``, or ``"lookup"`` of rows.
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
      inputs: The axes that products contract with data; of a table that is looked up, its rows.
      outputs: The axes that the results of these products have.
      stacked: The axes along which independent arrays are stacked, such as the layers of a scan.
      why: Why no product of the array with data is known, such as what else reads it. Empty if one is known.
      uses: The products that differ in these axes, each with its ``inputs``, ``outputs`` and ``stacked`` axes, its
        ``line`` and ``how`` it multiplies: ``"product"``, ``"convolution"``, ``"transposed convolution"`` or
        ``"lookup"``. If there are several, as for a table that is also the last layer, an axis may be one of the inputs
        and one of the outputs.
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
        """Whether the array is a table whose rows are looked up, and is not used in any other product with data."""
        return bool(self.uses) and all(use.how == LOOKUP for use in self.uses)

    @property
    def ambiguous(self) -> str:
        """The uses of the array as text, if they give an axis more than one role. Empty if the roles are clear.

        In a network that multiplies with ``w`` and with ``w.T``, axis 0 is an input and an output.
        """
        groups = (self.inputs, self.outputs, self.stacked)
        if sum(map(len, groups)) == len({axis for axes in groups for axis in axes}):  # no axis is in two groups
            return ""
        return "; ".join(f"inputs {use.inputs} and outputs {use.outputs} in {use.line}" for use in self.uses)

    def follow(self, followed: Sequence[int | None], shape: Numbers, dtype: Any, stacked: Numbers = ()) -> Role:
        """The role of an array that was derived from this one, such as a transposed or stacked one, or a factor of it.

        Args:
          followed: For each axis of the derived array, the axis of this array that it corresponds to, or None. An axis
            with None is one of the ``stacked`` axes, or lies between two factors of this array, as a rank does: then it
            is an output of the factor that has the inputs, and an input of the factor that has the outputs.
          shape: The shape of the derived array.
          dtype: Its dtype.
          stacked: Its axes that stack arrays like this one.

        For a kernel with inputs ``(0,)`` and outputs ``(1,)``, ``followed=[1, 0]`` is its transpose, with inputs
        ``(1,)`` and outputs ``(0,)``; ``[None, 0, 1]`` with ``stacked=(0,)`` are several kernels, with inputs ``(1,)``;
        and ``[0, None]`` is its first factor, with inputs ``(0,)`` and outputs ``(1,)``.
        """
        new_axis = {axis: new for new, axis in enumerate(followed) if axis is not None}

        def moved(axes: Numbers) -> Numbers:
            """These axes of this array in the derived one. Those that it does not have are left out."""
            return tuple(sorted(new_axis[axis] for axis in axes if axis in new_axis))

        def with_moved_axes(record: Any) -> Any:
            """A copy of this role or one of its uses, with the axes of the derived array."""
            stacks = tuple(sorted((*moved(record.stacked), *stacked)))
            return replace(record, inputs=moved(record.inputs), outputs=moved(record.outputs), stacked=stacks)

        uses = list[Use]()
        for use in self.uses:
            is_product = use.how == LOOKUP and not moved(use.inputs)  # a factor that looked-up rows are multiplied by
            how = PRODUCT if is_product else use.how
            uses.append(replace(with_moved_axes(use), how=how, windows=moved(use.windows)))
        role = replace(with_moved_axes(self), uses=tuple(uses), shape=shape, dtype=dtype)
        # The axes between two factors, if this is one. A factor without inputs and outputs has no role.
        between = tuple(new for new, axis in enumerate(followed) if axis is None and new not in stacked)
        if role.inputs and not role.outputs:
            return replace(role, outputs=between)
        return replace(role, inputs=between) if role.outputs and not role.inputs else role

    def unknown(self) -> Numbers:
        """The axes without a role. Axes of size 1 do not count, because it makes no difference what they are."""
        known_axes = {*self.inputs, *self.outputs, *self.stacked}
        return tuple(i for i, n in enumerate(self.shape) if i not in known_axes and n != 1)


def axes_by_word(role: Role, stacked: Iterable[int]) -> dict[str, Numbers]:
    """For each word, the axes that it stands for in an array with this role.

    They are counted from the back, without the axes in ``stacked``. A word without axes has ``()``. For the kernel of a
    convolution, of shape ``(width, in, out)``::

        {"inputs": (-3, -2), "outputs": (-1,), "stacked": (), "channels": (-2,), "uncut": (-3, -1), "vectors": (-3, -2)}
    """
    unstacked_axes = [axis for axis in range(len(role.shape)) if axis not in set(stacked)]

    def from_back(axes: Iterable[int]) -> Numbers:
        """These axes, counted from the back without the stacked ones, which are left out."""
        return tuple(unstacked_axes.index(axis) - len(unstacked_axes) for axis in axes if axis in unstacked_axes)

    inputs, outputs, stacks = from_back(role.inputs), from_back(role.outputs), from_back(role.stacked)
    windows = from_back(axis for use in role.uses for axis in use.windows)
    # The last input along which no window moves, in a tuple; if windows move along all of them, the last one.
    channels = tuple(axis for axis in inputs if axis not in windows)[-1:] or inputs[-1:]
    uncut = tuple(sorted({*inputs, *outputs} - {*channels}))
    vectors = outputs if role.is_table else inputs  # each row of a table is a vector of outputs
    return {INPUTS: inputs, OUTPUTS: outputs, STACKED: stacks, CHANNELS: channels, UNCUT: uncut, VECTORS: vectors}


@dataclass(frozen=True)
class Misfit:
    """Axes of a stage at an array that contradict the products of the network.

    Attributes:
      stage: The code of the stage.
      path: The path of the array.
      field: The argument of the stage, such as ``"axis"``.
      got: The axes that the stage uses. Those of ``stacked`` are counted from the front, all others from the back and
        without the stacked axes.
      expected: The axes that it should use in this network.
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
    """A tuple of all misfits, whose repr has a line for each. Empty if all axes fit."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "All axes fit."


def one_or_tuple(axes: Sequence[Any]) -> Any:
    """A single axis as a number, no or several axes as a tuple, as users write them: ``(1,) -> 1``."""
    return axes[0] if len(axes) == 1 else tuple(axes)
