"""Equations that reduce along axes."""

from collections.abc import Sequence

from reparax.programs.equations.view import View


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


class ReduceProduct(Reduce):
    """A ``jax.lax.reduce_prod``."""

    names = ("reduce_prod",)


class ReduceIndex(Reduce):
    """The place of the largest or smallest entry along axes."""

    names = ("argmax", "argmin")


class ReduceWindow(View):
    """A reduction of windows, such as pooling."""

    names = ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")

    @property
    def window_dimensions(self) -> Sequence[int]:
        """The size of the window along each axis."""
        return self.eqn.params["window_dimensions"]

    @property
    def keeps(self) -> Sequence[bool]:
        """For each axis whether each entry is a window of its own."""
        params = self.eqn.params
        pads = params["padding"]
        dilations = params.get("base_dilation") or params.get("base_dilations") or (1,) * len(pads)
        settings = zip(self.window_dimensions, params["window_strides"], pads, dilations, strict=True)
        return [size == stride == dilation == 1 and tuple(pad) == (0, 0) for size, stride, pad, dilation in settings]


class Cumulative(View):
    """A reduction of all entries up to each along an axis."""

    names = ("cumprod", "cummax", "cummin", "cumlogsumexp")

    @property
    def axis(self) -> int:
        """The axis along which it goes."""
        return self.eqn.params["axis"]


class CumulativeSum(Cumulative):
    """A ``jax.lax.cumsum``."""

    names = ("cumsum",)


class Sort(View):
    """A ``jax.lax.sort``: all operands in the order of the first ones."""

    names = ("sort",)

    @property
    def axis(self) -> int:
        """The axis along which it sorts."""
        return self.eqn.params["dimension"]


class TopK(View):
    """A ``jax.lax.top_k``: the largest entries along an axis, and their places."""

    names = ("top_k",)

    @property
    def axis(self) -> int:
        """The axis along which it looks."""
        ndim = self.operands[0].aval.ndim
        return self.eqn.params.get("axis", ndim - 1) % ndim
