"""What all equations have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jax.extend.core import JaxprEqn


@dataclass(frozen=True, eq=False)
class View:
    """An equation of any kind. Its subclasses say what is particular to theirs; this one stands for all others.

    A view holds nothing but its equation, and reads a field when it is asked for, so it costs no more than the look.
    Views are equal if their equations do the same with operands of the same types.
    """

    eqn: JaxprEqn

    names: ClassVar[tuple[str, ...]] = ()
    """The primitives of this kind."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    @property
    def _compared(self) -> tuple[Any, ...]:
        """What is equal in equal views."""
        return self.eqn.primitive, *self.eqn.params.items(), *(v.aval for v in self.operands)

    @property
    def operands(self) -> Sequence[Any]:
        """The variables and literals that it reads."""
        return self.eqn.invars

    @property
    def type(self) -> Any:
        """The type of its first output."""
        return self.eqn.outvars[0].aval

    @property
    def has_sharding(self) -> bool:
        """Whether it says how its output is laid over devices."""
        return any(self.eqn.params.get(name) is not None for name in ("sharding", "out_sharding"))

    def bind(self, *args: Any, **new_params: Any) -> Any:
        """The outputs for other operands, and with some settings changed."""
        return self.eqn.primitive.bind(*args, **self.eqn.params | new_params)
