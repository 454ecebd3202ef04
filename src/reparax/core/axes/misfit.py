"""An axis of a stage that is not the one that its formula means in a network."""

from __future__ import annotations

from dataclasses import dataclass

from reparax.core.axes.roles import Numbers, Role


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
            f"{self.stage} takes {self.field}={_show_axes(self.got)} at {self.path!r} of shape {self.role.shape}, "
            f"which the network multiplies with inputs {self.role.inputs}, outputs {self.role.outputs} and stacked "
            f"axes {self.role.stacked} ({lines}). Write {self.field}={_show_axes(self.expected)}, or "
            f"`p.on(rpx.roles(loss, params, batch))`."
        )


class Misfits(tuple[Misfit, ...]):
    """The axes that do not fit, one per line of its repr; empty if all fit."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "All axes fit."


def _show_axes(axes: Numbers) -> str:
    """A single axis as a number, several in a tuple."""
    return repr(axes[0] if len(axes) == 1 else axes)
