"""Equations that hold programs."""

from collections.abc import Mapping, Sequence
from typing import Any

from reparax.programs.equations.view import View


class Jit(View):
    """A call of ``jax.jit``."""

    names = ("jit",)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.eqn.params["name"]


class CustomJvp(View):
    """A call of a ``jax.custom_jvp``."""

    names = ("custom_jvp_call",)


class Checkpoint(View):
    """A call of ``jax.checkpoint``."""

    names = ("remat2",)

    @property
    def policy(self) -> Any:
        """What may be stored."""
        return self.eqn.params["policy"]

    @property
    def prevent_cse(self) -> Any:
        """Whether the compiler must compute again what was computed before."""
        return self.eqn.params["prevent_cse"]


class Scan(View):
    """A ``jax.lax.scan``."""

    names = ("scan",)

    @property
    def length(self) -> int:
        """The number of steps."""
        return self.eqn.params["length"]

    @property
    def reverse(self) -> bool:
        """Whether the last slices are taken first."""
        return self.eqn.params["reverse"]


class While(View):
    """A ``jax.lax.while_loop``."""

    names = ("while",)

    @property
    def counts(self) -> tuple[int, int]:
        """How many operands are constants of the condition, and how many of the body; the others are carried."""
        return self.eqn.params["cond_nconsts"], self.eqn.params["body_nconsts"]


class Cond(View):
    """A ``jax.lax.switch`` or ``cond``."""

    names = ("cond",)


class ShardMap(View):
    """A ``jax.shard_map``."""

    names = ("shard_map",)

    @property
    def in_specs(self) -> Sequence[Any]:
        """The partition spec of each operand."""
        return self.eqn.params["in_specs"]

    @property
    def mesh_shape(self) -> Mapping[str, int]:
        """The size of each mesh axis."""
        return self.eqn.params["mesh"].shape
