"""Equations that reduce along axes, of an array or of a mesh."""

from collections.abc import Sequence

from reparax._programs.equations.view import View


class Reduce(View):
    """A reduction along axes: of one of these kinds if it is no sum."""

    names = ("reduce_max", "reduce_min", "reduce_and", "reduce_or")

    @property
    def axes(self) -> Sequence[int]:
        """The axes that go."""
        return self.eqn.params["axes"]


class ReduceSum(Reduce):
    """A ``jax.lax.reduce_sum``."""

    names = ("reduce_sum",)


class CumulativeSum(View):
    """A ``jax.lax.cumsum``."""

    names = ("cumsum",)


class Collective(View):
    """A sum over shards, or the arrays of all shards."""

    names = ("psum", "psum2", "psum_invariant", "all_gather")
