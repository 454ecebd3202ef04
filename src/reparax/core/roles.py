"""The roles of the axes of an array in a network, the words for them, and axes that do not fit them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

INPUTS, OUTPUTS, STACKED = "inputs", "outputs", "stacked"
WORDS = (INPUTS, OUTPUTS, STACKED)
"""Given as axes: what the network does with them. No axis can have such a name."""

PRODUCT, CONVOLUTION, TRANSPOSED, LOOKUP = "product", "convolution", "transposed convolution", "lookup"
"""How a network uses an array."""

CHANNELS = "channels"
"""The one axis along which groups of inputs lie: the last of those that no window moves along, so not of a
convolution's window. In a matrix of flattened inputs, neighbours along it stay neighbours."""

UNCUT = "uncut"
"""All axes of an array but its channels: those with scales of their own where blocks lie along inputs."""

VECTORS = "vectors"
"""The axes along which vectors lie: the inputs of each output, and the rows of a table that is looked up."""

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """One way in which a network multiplies an array with data.

    Attributes:
      inputs: The axes that are contracted with data; of a table, its rows.
      outputs: The axes that the result has.
      stacked: The axes along which independent arrays are stacked.
      line: The equation, and the line that wrote it.
      how: ``"product"`` of matrices, ``"convolution"``, ``"transposed convolution"``, or ``"lookup"`` of rows.
      windows: Those of the inputs along which a convolution moves.
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
      why: What reads the array, if no product does; otherwise empty.
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
        """Whether its rows are looked up, and nothing else reads it together with data."""
        return bool(self.uses) and all(use.how == LOOKUP for use in self.uses)

    @property
    def ambiguous(self) -> str:
        """Which uses make an axis one of the inputs and one of the outputs; empty if none do."""
        words = (self.inputs, self.outputs, self.stacked)
        if sum(map(len, words)) == len({axis for axes in words for axis in axes}):
            return ""
        return "; ".join(f"inputs {use.inputs} and outputs {use.outputs} in {use.line}" for use in self.uses)

    def follow(self, followed: Sequence[int | None], shape: Numbers, dtype: Any, stacked: Numbers = ()) -> Role:
        """The role of an array whose axes follow the axes ``followed`` of this one.

        Axes that follow none are ``stacked``, or such as a rank: between two factors of this array, where they are an
        output of the one with inputs, and an input of the one with outputs.
        """
        place_of = {axis: place for place, axis in enumerate(followed) if axis is not None}

        def followers(axes: Numbers) -> Numbers:
            return tuple(sorted(place_of[axis] for axis in axes if axis in place_of))

        def with_followers(record: Any) -> Any:
            stacks = tuple(sorted((*followers(record.stacked), *stacked)))
            return replace(record, inputs=followers(record.inputs), outputs=followers(record.outputs), stacked=stacks)

        uses = list[Use]()
        for use in self.uses:
            is_product = use.how == LOOKUP and not followers(use.inputs)  # a factor that the rows looked up multiply
            how = PRODUCT if is_product else use.how
            uses.append(replace(with_followers(use), how=how, windows=followers(use.windows)))
        role = replace(with_followers(self), uses=tuple(uses), shape=shape, dtype=dtype)
        between = tuple(place for place, axis in enumerate(followed) if axis is None and place not in stacked)
        if role.inputs and not role.outputs:
            return replace(role, outputs=between)
        return replace(role, inputs=between) if role.outputs and not role.inputs else role

    def unknown(self) -> Numbers:
        """The axes of more than one index whose role is unknown."""
        known_axes = {*self.inputs, *self.outputs, *self.stacked}
        return tuple(i for i, n in enumerate(self.shape) if i not in known_axes and n != 1)


def axes_by_word(role: Role, stacked: Iterable[int]) -> dict[str, Numbers]:
    """For each word the axes of an array without its ``stacked`` axes, counted from the back."""
    unstacked_axes = [axis for axis in range(len(role.shape)) if axis not in set(stacked)]

    def counted(axes: Iterable[int]) -> Numbers:
        return tuple(unstacked_axes.index(axis) - len(unstacked_axes) for axis in axes if axis in unstacked_axes)

    inputs, outputs, stacks = counted(role.inputs), counted(role.outputs), counted(role.stacked)
    windows = counted(axis for use in role.uses for axis in use.windows)
    channels = tuple(axis for axis in inputs if axis not in windows)[-1:] or inputs[-1:]
    uncut = tuple(sorted({*inputs, *outputs} - {*channels}))
    vectors = outputs if role.is_table else inputs
    return {INPUTS: inputs, OUTPUTS: outputs, STACKED: stacks, CHANNELS: channels, UNCUT: uncut, VECTORS: vectors}


@dataclass(frozen=True)
class Misfit:
    """Axes of a stage at an array that do not fit the products of the network.

    Attributes:
      stage: The code of the stage.
      path: The path of the array.
      field: The argument of the stage, such as ``"axis"``.
      got: The axes that it takes there. Those of ``stacked`` are counted from the front; all others from the back,
        without the stacked axes.
      expected: The axes that its formula means in this network.
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
    """The axes that do not fit, one per line of its repr; empty if all fit."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "All axes fit."


def one_or_tuple(axes: Sequence[Any]) -> Any:
    """A single axis as a number, several in a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)
