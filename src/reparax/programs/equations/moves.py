"""Equations that move the entries of an array, repeat them, or take some of them."""

from collections.abc import Iterable, Sequence

from reparax.programs.equations.view import View


class Transpose(View):
    """A ``jax.lax.transpose``."""

    names = ("transpose",)

    @property
    def permutation(self) -> Sequence[int]:
        """For each axis of the output, that of the operand."""
        return self.eqn.params["permutation"]


class Reshape(View):
    """A ``jax.lax.reshape``."""

    names = ("reshape",)

    @property
    def new_sizes(self) -> Sequence[int]:
        """The new shape."""
        return self.eqn.params["new_sizes"]

    @property
    def dimensions(self) -> Sequence[int] | None:
        """The order in which the axes of the operand are read, if it is not their own."""
        return self.eqn.params.get("dimensions")


class Squeeze(View):
    """A ``jax.lax.squeeze``."""

    names = ("squeeze",)

    @property
    def dimensions(self) -> Sequence[int]:
        """The axes, of size 1, that go; none is negative."""
        return [i % self.operands[0].aval.ndim for i in self.eqn.params["dimensions"]]


class Broadcast(View):
    """A ``jax.lax.broadcast_in_dim``."""

    names = ("broadcast_in_dim",)

    @property
    def shape(self) -> Sequence[int]:
        """The new shape."""
        return self.eqn.params["shape"]

    @property
    def broadcast_dimensions(self) -> Sequence[int]:
        """For each axis of the operand, that of the output."""
        return self.eqn.params["broadcast_dimensions"]


class Slice(View):
    """A ``jax.lax.slice``."""

    names = ("slice",)

    @property
    def bounds(self) -> Iterable[tuple[int, int, int]]:
        """For each axis the start, the limit and the stride."""
        params = self.eqn.params
        starts, limits = params["start_indices"], params["limit_indices"]
        return zip(starts, limits, params["strides"] or (1,) * len(starts), strict=True)


class DynamicSlice(View):
    """A ``jax.lax.dynamic_slice``; the operands after the first are the starts."""

    names = ("dynamic_slice",)

    @property
    def slice_sizes(self) -> Sequence[int]:
        """The size along each axis."""
        return self.eqn.params["slice_sizes"]


class SplitAxis(View):
    """A ``jax.lax.split``."""

    names = ("split",)

    @property
    def axis(self) -> int:
        """The axis that is split."""
        return self.eqn.params["axis"]

    @property
    def sizes(self) -> Sequence[int]:
        """The size of each output along it."""
        return [int(n) for n in self.eqn.params["sizes"]]


class Reverse(View):
    """A ``jax.lax.rev``."""

    names = ("rev",)

    @property
    def dimensions(self) -> Sequence[int]:
        """The axes whose entries change their order."""
        return self.eqn.params["dimensions"]


class ReadInStep(View):
    """An array that is read in a step: ``_numerics/tie.py``."""

    names = ("reparax_read",)


class Vary(View):
    """An array marked as varying over the shards of a ``jax.shard_map``."""

    names = ("pvary",)

    @property
    def axes(self) -> Sequence[str]:
        """The mesh axes."""
        return self.eqn.params["axes"]


class Iota(View):
    """A ``jax.lax.broadcasted_iota``."""

    names = ("iota",)

    @property
    def shape(self) -> Sequence[int]:
        """The shape."""
        return self.eqn.params["shape"]

    @property
    def dimension(self) -> int:
        """The axis along which it counts."""
        return self.eqn.params["dimension"]


class Concatenate(View):
    """A ``jax.lax.concatenate``."""

    names = ("concatenate",)

    @property
    def dimension(self) -> int:
        """The axis along which the operands follow each other."""
        return self.eqn.params["dimension"]


class Stack(View):
    """Arrays along a new axis."""

    names = ("stack",)

    @property
    def axis(self) -> int:
        """The new axis."""
        return self.eqn.params["axis"]


class Unstack(View):
    """Arrays of which each is one index along an axis; since jax 0.11.1, loops over an array are this."""

    names = ("unstack",)

    @property
    def axis(self) -> int:
        """The axis that goes."""
        return self.eqn.params["axis"]


class Pad(View):
    """A ``jax.lax.pad``."""

    names = ("pad",)

    @property
    def padding(self) -> Sequence[tuple[int, int, int]]:
        """For each axis how many entries are added before, behind and between."""
        return self.eqn.params["padding_config"]


class DynamicUpdateSlice(View):
    """A ``jax.lax.dynamic_update_slice``: the second operand replaces part of the first."""

    names = ("dynamic_update_slice",)


class Barrier(View):
    """A ``jax.lax.optimization_barrier``: its operands as they are."""

    names = ("optimization_barrier",)


class Named(View):
    """A ``jax.ad_checkpoint.checkpoint_name``."""

    names = ("name",)

    @property
    def name(self) -> str:
        """The name of the value."""
        return self.eqn.params["name"]
