"""The inputs of an array: statistics of data from which stages may start."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax._reports.sizes import readable_size, size_in_bytes

MOMENTS = ("full", "diagonal", "largest")
"""What :func:`inputs` may collect."""
SUMS = ("first", "absolute", "second", "largest", "slopes", "cross")
"""The entries of :class:`Read` that hold sums over the data."""


@dataclass(frozen=True)
class Read:
    """The data that products contracted with an array, over some of its axes.

    A product treats an array as ``batch`` matrices of ``inputs`` rows and ``outputs`` columns, :meth:`matrices`: a row
    for each number of an example, and a batch for stacked layers, experts, heads or the groups of a convolution, if
    these have separate data. All numbers are sums over the data, in float32.

    Attributes:
      shape: The shape of the array, with an axis split if it is several axes in the product.
      of: For each axis of ``shape``, the axis of the array.
      batch: The axes of ``shape`` of the batch.
      axes: The axes of ``shape`` of the inputs; the others are outputs.
      count: The number of examples of each matrix, of shape ``(batch,)``.
      first: The sum of the data, ``(batch, inputs)``, for ``moments="full"``.
      absolute: The sum of their magnitudes, ``(batch, inputs)``.
      second: The sum of their products, ``(batch, inputs, inputs)``; of their squares, ``(batch, inputs)``, for
        ``moments="diagonal"``, and for the rows of a table, of which each example reads one.
      largest: The largest magnitude, ``(batch, inputs)``, for ``moments="largest"``, which has no other entry.
      slopes: The sum of products of the gradient with respect to the outputs, ``(batch, outputs, outputs)``, or of
        squares, ``(batch, outputs)``; for ``gradients=True``.
      cross: The sum of products of the data and their error, ``(batch, inputs, inputs)``: the data of the network
        before its weights were rounded, less these. Only for ``error_propagation`` of :func:`calibrate`.
    """

    shape: tuple[int, ...]
    of: tuple[int, ...]
    batch: tuple[int, ...]
    axes: tuple[int, ...]
    count: Any = None
    first: Any = None
    absolute: Any = None
    second: Any = None
    largest: Any = None
    slopes: Any = None
    cross: Any = None

    @property
    def free(self) -> tuple[int, ...]:
        """The axes of ``shape`` of the outputs."""
        return tuple(i for i in range(len(self.shape)) if i not in (*self.batch, *self.axes))

    @property
    def contracted(self) -> frozenset[int]:
        """The axes of the array that hold inputs."""
        return frozenset(self.of[i] for i in self.axes)

    @property
    def of_shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(
            math.prod(n for n, i in zip(self.shape, self.of, strict=True) if i == axis) for axis in sorted({*self.of})
        )

    @property
    def squares(self) -> Any:
        """The sums of squares of the data, ``(batch, inputs)``."""
        return self.second if self.second.ndim == 2 else jnp.diagonal(self.second, axis1=1, axis2=2)

    @property
    def moments(self) -> Any:
        """The mean of the products of the data, or of their squares, as ``second``.

        A matrix without examples, such as that of an expert that got no row, has those of white noise: the identity, or
        ones. So it is treated as without data.
        """
        unit = jnp.eye(self.second.shape[-1]) if self.second.ndim == 3 else jnp.ones(self.second.shape[-1])
        return self._per_example(self.second, unit.astype(self.second.dtype))

    @property
    def covariance(self) -> Any:
        """The moments of the data without their mean, as ``moments``.

        It is a difference of sums in float32: if the mean is 10 times the standard deviation, three digits of the
        variance are left; at 100 times, one; at 1000 times, none.
        """
        mean = self._per_example(self.first, jnp.zeros((), self.first.dtype))
        return self.moments - mean[:, :, None] * mean[:, None, :]

    @property
    def mean_squares(self) -> Any:
        """The mean squares of the data, ``(batch, inputs)``; ones for a matrix without examples."""
        return self._per_example(self.squares, jnp.ones((), self.second.dtype))

    @property
    def mean_magnitudes(self) -> Any:
        """The mean magnitudes of the data, ``(batch, inputs)``; ones for a matrix without examples."""
        return self._per_example(self.absolute, jnp.ones((), self.absolute.dtype))

    def _per_example(self, total: Any, otherwise: Any) -> Any:
        """A sum over the data divided by the number of examples; ``otherwise`` for a matrix without any."""
        count = self.count.reshape(-1, *(1,) * (total.ndim - 1))
        return jnp.where(count == 0, otherwise, total / jnp.where(count == 0, 1, count))

    def sizes(self) -> tuple[int, int, int]:
        """The numbers of matrices, inputs and outputs."""
        batch, inputs, outputs = (math.prod(self.shape[i] for i in axes) for axes in (self.batch, self.axes, self.free))
        return batch, inputs, outputs

    def matrices(self, w: Array) -> Array:
        """An array as matrices, ``(batch, inputs, outputs)``."""
        return w.reshape(self.shape).transpose(self.batch + self.axes + self.free).reshape(self.sizes())

    def array(self, matrices: Array, like: Any) -> Array:
        """The array of the shape of ``like`` that these matrices are."""
        order = self.batch + self.axes + self.free
        parts = matrices.reshape([self.shape[i] for i in order])
        return parts.transpose([order.index(i) for i in range(len(order))]).reshape(like.shape)

    def each_input(self, numbers: Array, like: Any) -> Array:
        """Numbers for each input, in a shape that broadcasts against the array.

        Args:
          numbers: An array of shape ``(batch, inputs)``, such as ``read.moments`` of ``moments="diagonal"``.
          like: The array, or any of its shape.
        """
        spread = self.array(jnp.broadcast_to(numbers[..., None], self.sizes()), like)
        input_axes = {self.of[i] for i in (*self.batch, *self.axes)}
        return spread[tuple(slice(None) if axis in input_axes else slice(1) for axis in range(spread.ndim))]

    def of_index(self, stacked: Sequence[int]) -> Read | None:
        """The data of one array of a stack, with the stacked axes in front; None if the stacked axes are mixed."""
        places = [i for axis in stacked for i in range(len(self.of)) if self.of[i] == axis]
        if set(places) & set(self.axes):
            return None
        batch_left = [i for i in self.batch if i not in places]
        axes_left = [i for i in range(len(self.shape)) if i not in places]

        def front(x: Any) -> Any:
            stacked_batch = [i for i in self.batch if i in places]
            parts = x.reshape([self.shape[i] for i in self.batch] + list(x.shape[1:]))
            parts = jnp.moveaxis(parts, [self.batch.index(i) for i in stacked_batch], range(len(stacked_batch)))
            sizes = [self.shape[i] if i in stacked_batch else 1 for i in places]
            parts = parts.reshape(*sizes, math.prod(self.shape[i] for i in batch_left), *x.shape[1:])
            wide = jnp.broadcast_to(parts, (*(self.shape[i] for i in places), *parts.shape[len(places) :]))
            counts = [math.prod(self.shape[i] for i in places if self.of[i] == axis) for axis in stacked]
            return wide.reshape(*counts, *wide.shape[len(places) :])

        array_axes = sorted({self.of[i] for i in axes_left})
        return replace(
            jax.tree.map(front, self),
            shape=tuple(self.shape[i] for i in axes_left),
            of=tuple(array_axes.index(self.of[i]) for i in axes_left),
            batch=tuple(axes_left.index(i) for i in batch_left),
            axes=tuple(axes_left.index(i) for i in self.axes),
        )

    def as_matrix(self, rows: Sequence[int], columns: Sequence[int]) -> Read:
        """The data of the matrix whose rows and columns these axes of the array are, in the order of its rows."""
        places = [i for axis in (*rows, *columns) for i in range(len(self.of)) if self.of[i] == axis]
        inputs, outputs = (sorted(axes, key=places.index) for axes in (self.axes, self.free))

        def reorder(x: Any, old_axes: Sequence[int], new_axes: Sequence[int]) -> Any:
            if x is None or list(old_axes) == list(new_axes):
                return x
            axes = x.ndim - 1  # one of a diagonal, two of a matrix
            parts = x.reshape(-1, *[self.shape[i] for i in old_axes] * axes)
            order = [1 + n * len(old_axes) + old_axes.index(i) for n in range(axes) for i in new_axes]
            return parts.transpose(0, *order).reshape(x.shape)

        ways = {name: (self.free, outputs) if name == "slopes" else (self.axes, inputs) for name in SUMS}
        return replace(
            self,
            **{name: reorder(getattr(self, name), *way) for name, way in ways.items()},
            shape=tuple(self.shape[i] for i in places),
            of=tuple(int(self.of[i] in columns) for i in places),
            batch=tuple(places.index(i) for i in self.batch),
            axes=tuple(places.index(i) for i in inputs),
        )


@dataclass(frozen=True, repr=False)
class Seen:
    """The data of one array, as found by :func:`inputs`. Its repr shows inputs and bytes.

    Attributes:
      reads: The data, for each way in which products contract the array; a tied table has two.
      gradient: The gradient of the loss with respect to the array, for ``gradients=True``.
      why: What else reads the array, without data or instead of products, and its line, as text.
      uncounted: What reads the array with data that are not in ``reads``, and its line, as text.
      stands_in: Whether it stands for arbitrary data, if only the types of raw values are needed.
    """

    reads: tuple[Read, ...] = ()
    gradient: Any = None
    why: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    stands_in: bool = False

    def __repr__(self) -> str:
        return f"Seen({', '.join(text for text in self.columns if text)})"

    @property
    def columns(self) -> tuple[str, str]:
        """How many inputs along which axes, and how many bytes; and what else reads the array."""
        ways = [
            f"{_count_text(read)} inputs along axis {_axes_text(read.contracted)}{_missing_text(read)}"
            for read in self.reads
        ]
        size = readable_size(sum(size_in_bytes(x) for x in jax.tree.leaves(self)))
        return f"{' and '.join(ways) or 'no data'}, {size}", "; ".join(self.uncounted + self.why)

    def read(self, moments: str, w: Any, axes: Collection[int] | None = None) -> Read:
        """The data that a stage needs for ``w``.

        Args:
          moments: ``"full"``, ``"diagonal"`` (``"full"`` contains it), ``"largest"``, ``"slopes"`` or ``"cross"``.
          w: The array, or its type.
          axes: The axes of the array that the products contract. Default: any.

        Raises:
          ValueError: If it is not known.
        """
        if self.stands_in:
            return _any_data(w, axes)
        for shape in {read.of_shape for read in self.reads} - {tuple(w.shape)}:
            raise ValueError(
                f"expected data of an array of shape {tuple(w.shape)}, got data of one of shape {shape}. Pass the "
                f"result of `rpx.inputs` for these parameters."
            )
        contracted_axes = None if axes is None else frozenset(i % w.ndim for i in axes)
        fitting = [read for read in self.reads if contracted_axes in (None, read.contracted)]
        what = "data" if contracted_axes is None else f"data contracted with axis {_axes_text(contracted_axes)}"
        if not fitting:
            ways_known = [f"products contract axis {_axes_text(read.contracted)}" for read in self.reads]
            why = "; ".join([*ways_known, *self.uncounted, *self.why]) or "nothing reads it"
            raise ValueError(
                f"expected {what} of this array, but {why}. Leave the array out with `where`, or choose other axes."
            )
        if len(fitting) > 1:
            ways = " and ".join(f"axis {_axes_text(read.contracted)} of {read.shape}" for read in fitting)
            raise ValueError(
                f"expected products to contract this array in one way, but they contract {ways}. Leave the array out "
                f"with `where`."
            )
        self.require_all(what)
        (read,) = fitting
        name = {"full": "second", "diagonal": "second"}.get(moments, moments)
        statistic = getattr(read, name)
        if statistic is None or (moments == "full" and statistic.ndim == 2):
            argument = "gradients=True" if moments == "slopes" else f"moments={moments!r}"
            raise ValueError(
                f"expected {what} with {argument}, but got other moments. Pass {argument} to `rpx.inputs`."
            )
        return read

    def require_all(self, what: str) -> None:
        """Requires that ``reads`` hold the data of all that reads the array with data."""
        if self.uncounted:
            raise ValueError(
                f"expected {what} from every equation that reads it with data, but {'; '.join(self.uncounted)}, which "
                f"`rpx.inputs` cannot count. Leave the array out with `where`, or start from the other products alone: "
                f"`dataclasses.replace(seen, uncounted=())`."
            )

    def slope(self, w: Any) -> Any:
        """The gradient of the loss with respect to ``w``.

        Raises:
          ValueError: If it is not known.
        """
        if self.stands_in:
            return jnp.ones(w.shape)
        if self.gradient is None:
            raise ValueError("expected the gradient of the loss, but got none. Pass gradients=True to `rpx.inputs`.")
        return self.gradient

    def of_index(self, stacked: Sequence[int]) -> Seen:
        """The data of one array of a stack, with the stacked axes of all data in front."""
        reads_of_index = [read.of_index(stacked) for read in self.reads]
        reasons = ("products mix the stacked axes",) if None in reads_of_index else ()
        gradient = None if self.gradient is None else jnp.moveaxis(self.gradient, stacked, range(len(stacked)))
        return replace(
            self,
            reads=tuple(read for read in reads_of_index if read),
            gradient=gradient,
            uncounted=(*self.uncounted, *reasons),
        )

    def as_matrix(self, rows: Sequence[int], columns: Sequence[int]) -> Seen:
        """The data of the array with these axes merged into the rows and columns of a matrix."""
        if self.stands_in or (tuple(rows), tuple(columns)) == ((0,), (1,)):
            return self
        gradient = self.gradient
        if gradient is not None:
            size = math.prod(gradient.shape[axis] for axis in rows)
            gradient = gradient.transpose(*rows, *columns).reshape(size, -1)
        return replace(self, reads=tuple(read.as_matrix(rows, columns) for read in self.reads), gradient=gradient)

    def joined(self, other: Seen) -> Seen:
        """Both: moments of different kinds of the same products."""
        ways = [(read.shape, read.batch, read.axes) for read in self.reads]
        more = {(read.shape, read.batch, read.axes): read for read in other.reads}
        joined_reads = [_fill_missing(read, more.pop(way, None)) for read, way in zip(self.reads, ways, strict=True)]
        gradient = other.gradient if self.gradient is None else self.gradient
        why, uncounted = (
            tuple(dict.fromkeys(ours + theirs))
            for ours, theirs in ((self.why, other.why), (self.uncounted, other.uncounted))
        )
        return Seen((*joined_reads, *more.values()), gradient, why, uncounted, self.stands_in)


for cls, data in {Read: ["count", *SUMS], Seen: ["reads", "gradient"]}.items():
    meta = [each.name for each in fields(cls) if each.name not in data]
    jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)

ANY = Seen(stands_in=True)
"""Stands for any data, where only the types of raw values are wanted."""


def require_seen(seen: Seen | None, moments: str) -> Seen:
    """``seen``, for a stage that cannot start without it."""
    if seen is None:
        argument = "gradients=True" if moments == "gradients" else f"moments={moments!r}"
        raise ValueError(
            f"expected the inputs of this array, got seen=None. Pass `seen=rpx.inputs(loss, "
            f"{argument})(params, batch)` to init."
        )
    return seen


def require_data(seen: Seen) -> None:
    """Requires finite data of at least one example, if their numbers are known."""
    with jax.ensure_compile_time_eval():
        for entry in (*seen.reads, seen.gradient):
            numbers = jax.tree.leaves(entry)
            if any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in numbers):
                continue
            if isinstance(entry, Read) and not jnp.any(entry.count > 0):
                raise ValueError(
                    "expected the inputs of this array, got moments of no examples. Pass `rpx.inputs` a "
                    "batch with data, or leave the array out with `where`."
                )
            if not all(jnp.all(jnp.isfinite(x)) for x in numbers):
                raise ValueError(
                    "expected moments of finite data, got NaN or infinity. Correct the batch that `rpx.inputs` got, or "
                    "leave the array out with `where`."
                )


def _fill_missing(read: Read, source: Read | None) -> Read:
    """``read`` with the entries of ``source`` that it lacks."""
    lacking = [name for name in SUMS if source is not None and getattr(read, name) is None]
    return replace(read, **{name: getattr(source, name) for name in lacking})


def _any_data(w: Any, axes: Collection[int] | None) -> Read:
    """Data of one example that stand for any: their moments are identities, and their mean is zero."""
    contracted_axes = tuple(range(max(w.ndim - 1, 1))) if axes is None else tuple(sorted(i % w.ndim for i in axes))
    bare = Read(tuple(w.shape), tuple(range(w.ndim)), (), contracted_axes)
    _, inputs, outputs = bare.sizes()
    count, row = jnp.ones((1,)), jnp.ones((1, inputs))
    return replace(
        bare,
        count=count,
        first=0 * row,
        absolute=row,
        second=jnp.eye(inputs)[None],
        largest=row,
        slopes=jnp.eye(outputs)[None],
    )


def _count_text(read: Read) -> str:
    """How many inputs there are, as text: ``64``, or ``8 x 64`` for a batch of 8 matrices."""
    batch, inputs, _ = read.sizes()
    return str(inputs) if batch == 1 else f"{batch} x {inputs}"


def _missing_text(read: Read) -> str:
    """How many matrices have no data, where that is known."""
    if read.count is None or isinstance(read.count, Tracer | jax.ShapeDtypeStruct):
        return ""
    n_missing, batch = int(np.sum(np.asarray(read.count) == 0)), read.sizes()[0]
    return f" ({n_missing} of {batch} without data)" if n_missing else ""


def _axes_text(axes: Collection[int]) -> str:
    """Axes in order, as text: ``0, 2``."""
    return ", ".join(map(str, sorted(axes)))
