"""Provides typed views of jaxpr equations: a class for each kind of equation, with its parameters as attributes.

``view_of(eqn)`` returns the view of an equation, such as a ``Dot`` for a ``dot_general``. Rules in other files select
equations by the class of their view.

An equation applies its primitive, which is an operation of JAX, to operands and static parameters. Axes are counted
from 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from jax import lax
from jax.extend.core import JaxprEqn

T = TypeVar("T")

Axes = tuple[Sequence[int], Sequence[int]]
"""Axes of the left operand of a product, and the axes of the right operand that are paired with them."""


KINDS: dict[str, "type[View]"] = {}
"""Maps the names of primitives to their view classes. Primitives that are not listed use ``View``."""


@dataclass(frozen=True, eq=False)
class View:
    """A typed view of a jaxpr equation. Each kind of equation that rules must recognize has a subclass.

    A view is cheap to create, because it holds only its equation and reads parameters on access. Two views are equal if
    their equations apply the same primitive with the same parameters to operands of the same types.
    """

    eqn: JaxprEqn

    names: ClassVar[tuple[str, ...]]
    """The names of the primitives that this class views."""

    def __init_subclass__(cls, names: tuple[str, ...]) -> None:
        """Registers the subclass in ``KINDS`` for the primitives with these names."""
        cls.names = names
        KINDS.update(dict.fromkeys(names, cls))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    @property
    def _compared(self) -> tuple[Any, ...]:
        """The primitive, the parameters and the operand types, which decide whether two views are equal."""
        return self.eqn.primitive, *self.eqn.params.items(), *(v.aval for v in self.operands)

    @property
    def operands(self) -> Sequence[Any]:
        """The variables and literals that the equation reads."""
        return self.eqn.invars

    @property
    def type(self) -> Any:
        """The type of the first output, which has its shape and dtype."""
        return self.eqn.outvars[0].aval

    @property
    def has_sharding(self) -> bool:
        """Whether the equation specifies the sharding of its output. JAX uses two names for this parameter."""
        return any(self.eqn.params.get(name) is not None for name in ("sharding", "out_sharding"))

    def bind(self, *args: Any, **new_params: Any) -> Any:
        """Applies the primitive to other operands, with some parameters changed, and returns the outputs."""
        return self.eqn.primitive.bind(*args, **self.eqn.params | new_params)


class Param(Generic[T]):
    """A descriptor that exposes a parameter of an equation as an attribute of its view class.

    In a view class, ``axis = Param[int]("dimension")`` makes ``view.axis`` the value of the equation's parameter
    ``dimension``. Without an argument, ``Param`` reads the parameter that has the name of the attribute.
    """

    def __init__(self, name: str = "") -> None:
        """Stores the name of the parameter to read. An empty name stands for the name of the attribute."""
        self._name = name

    def __set_name__(self, _: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, view: View, _: type) -> T:
        return view.eqn.params[self._name]


# ---- contractions: products that are summed over axes, and look-ups


class Dot(View, names=("dot_general",)):
    """A ``jax.lax.dot_general``."""

    precision = Param[Any]()
    """The precision of both operands, or a dot algorithm."""

    @property
    def contracting(self) -> Axes:
        """The axes of the left and the right operand that are summed over: ([1], [0]) for ``x @ w``."""
        return self.eqn.params["dimension_numbers"][0]

    @property
    def batch(self) -> Axes:
        """The batch axes of the left and the right operand, which become the first axes of the output."""
        return self.eqn.params["dimension_numbers"][1]


class RaggedDot(View, names=("ragged_dot_general",)):
    """A ``jax.lax.ragged_dot_general``: a matrix product for each group of rows of the left operand.

    The third operand holds the number of rows in each group. The first rows form the first group, the next rows the
    second group, and so on. For any remaining rows, the result is zero. The equation computes one of three results:

    - each row times the matrix of its group;
    - for each group, the product of both operands, summed over the rows of the group;
    - if the rows lie along a batch axis, the batched product of each row.
    """

    precision = Param[Any]()
    """The precision of both operands, or a dot algorithm."""

    @property
    def _numbers(self) -> lax.RaggedDotDimensionNumbers:
        """JAX's dimension numbers: the contracting axes, the batch axes and the axes of rows and groups."""
        return self.eqn.params["ragged_dot_dimension_numbers"]

    @property
    def contracting(self) -> Axes:
        """The axes of the left and the right operand that are summed over. The axis ``group`` is not one of them."""
        return self._numbers.dot_dimension_numbers[0]

    @property
    def batch(self) -> Axes:
        """The batch axes of the left and the right operand, which the output keeps."""
        return self._numbers.dot_dimension_numbers[1]

    @property
    def ragged(self) -> int:
        """The axis of the left operand along which rows are divided into groups."""
        (axis,) = self._numbers.lhs_ragged_dimensions
        return axis

    @property
    def group(self) -> int | None:
        """The axis of the right operand that has an entry for each group; None if the rows of each group are summed."""
        return next(iter(self._numbers.rhs_group_dimensions), None)

    @property
    def is_whole(self) -> bool:
        """Whether all groups are computed, because there is no group offset, and the rows lie along no batch axis."""
        return self.eqn.params["group_offset"] is None and self.ragged not in self.batch[0]

    @property
    def axes_of_sizes(self) -> Sequence[int]:
        """The axes of the left operand along which group sizes may differ, in the order of the third operand.

        The third operand, which holds the group sizes, has these axes before its last axis. If it has only one axis,
        the result is empty. Otherwise, JAX requires all batch axes, followed by the axes that come before the row axis:
        contracting axes if rows are summed over, and otherwise axes that are neither batch nor contracting axes.
        """
        if self.operands[2].aval.ndim == 1:
            return ()
        contracting, batch = self.contracting[0], self.batch[0]
        free = [i for i in range(self.operands[0].aval.ndim) if i not in (*contracting, *batch)]
        row_axes = list(contracting if self.group is None else free)
        return *batch, *row_axes[: row_axes.index(self.ragged)]


class Conv(View, names=("conv_general_dilated",)):
    """A ``jax.lax.conv_general_dilated``."""

    dimension_numbers = Param[lax.ConvDimensionNumbers]()
    """The batch axis, the feature axes and the spatial axes of the data, the kernel and the output."""
    feature_group_count = Param[int]()
    """The number of groups of input features. Each group has its own kernels."""
    batch_group_count = Param[int]()
    """The number of groups of examples in the batch. Each group has its own kernels."""
    precision = Param[Any]()
    """The precision of both operands."""

    @property
    def window(self) -> dict[str, Any]:
        """The strides, padding and dilations of the convolution, by parameter name."""
        return {name: self.eqn.params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")}


class Gather(View, names=("gather",)):
    """A ``jax.lax.gather``: takes slices of the first operand at the indices in the second operand."""

    dimension_numbers = Param[lax.GatherDimensionNumbers]()
    """JAX's dimension numbers, which say how axes of the operands become axes of the output."""
    mode = Param[lax.GatherScatterMode]()
    """How out-of-bounds indices are handled."""
    fill_value = Param[Any]()
    """The result for an out-of-bounds index in the mode ``"fill"``; None in all other modes."""
    slice_sizes = Param[Sequence[int]]()
    """The size of a slice along each axis of the first operand."""

    @property
    def hints(self) -> dict[str, bool]:
        """The parameters in which the caller promises that the indices are sorted or unique, by name."""
        return {name: self.eqn.params[name] for name in ("indices_are_sorted", "unique_indices")}

    @property
    def removed_axes(self) -> tuple[int, ...]:
        """The operand axes that slices lack: batch axes, and collapsed axes, along which each slice has one entry."""
        return (*self.dimension_numbers.collapsed_slice_dims, *self.dimension_numbers.operand_batching_dims)

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """The non-batch axes of the first operand that are collapsed, or that slices take only in part."""
        sizes = zip(self.slice_sizes, self.operands[0].aval.shape, strict=True)
        parts = [i for i, (m, n) in enumerate(sizes) if m != n or i in self.dimension_numbers.collapsed_slice_dims]
        return tuple(i for i in parts if i not in self.dimension_numbers.operand_batching_dims)

    @property
    def axis(self) -> int | None:
        """The axis along which this gather equals a ``jnp.take``; None for any other gather.

        In a ``jnp.take``, the indices have a single column, which points into this axis. The output drops the axis, and
        takes all other axes whole.
        """
        numbers = self.dimension_numbers
        if self.entry_axis_and_column is None or tuple(numbers.start_index_map) != tuple(numbers.collapsed_slice_dims):
            return None
        axis, _ = self.entry_axis_and_column
        return axis if tuple(numbers.start_index_map) == (axis,) else None

    @property
    def entry_axis_and_column(self) -> tuple[int, int] | None:
        """The operand axis along which slices have one entry, and the column of the indices that selects this entry.

        For ``w[experts]``, which looks up a matrix for each token, the result is (0, 0). The result is None if slices
        are not whole along all other axes, if there are batch axes, or if an out-of-bounds index along another axis may
        fill the slice.
        """
        shape = self.operands[0].aval.shape
        axes = tuple(self.dimension_numbers.start_index_map)
        cut_axes = [i for i, n in enumerate(shape) if self.slice_sizes[i] != n]
        cut_axes = cut_axes or [i for i in axes if shape[i] == 1][:1]  # Slices take an axis of size 1 whole.
        if self.dimension_numbers.operand_batching_dims or len(cut_axes) != 1:
            return None
        # Slices are whole along the other axes, so they begin at 0, and indices into these axes can be ignored. In the
        # mode "fill", however, an out-of-bounds index along any axis fills the whole slice.
        if len(axes) > 1 and self.mode == lax.GatherScatterMode.FILL_OR_DROP:
            return None
        (axis,) = cut_axes
        return (axis, axes.index(axis)) if axis in axes and self.slice_sizes[axis] == 1 else None


# ---- reductions along axes


class Reduce(View, names=("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod")):
    """A reduction over axes, such as a maximum. Sums have the subclass ``ReduceSum``."""

    axes = Param[Sequence[int]]()
    """The axes that are reduced, which the output lacks."""


class ReduceSum(Reduce, names=("reduce_sum",)):
    """A ``jax.lax.reduce_sum``."""


class ReduceIndex(Reduce, names=("argmax", "argmin")):
    """An ``argmax`` or ``argmin``: the index of the largest or smallest entry along an axis."""


class ReduceWindow(View, names=("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")):
    """A reduction over sliding windows, such as pooling."""

    @property
    def keeps_axis(self) -> Sequence[bool]:
        """For each axis, whether the reduction leaves the axis unchanged, like the batch and channel axes in pooling.

        An axis is unchanged if windows have size 1 and stride 1 along the axis, without dilation or padding.
        """
        params = self.eqn.params
        numbers = zip(params["window_dimensions"], params["window_strides"], params["base_dilation"], strict=True)
        return [{*ones} == {1} and tuple(pad) == (0, 0) for ones, pad in zip(numbers, params["padding"], strict=True)]


class Cumulative(View, names=("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")):
    """A cumulative reduction along an axis, such as ``cumsum``."""

    axis = Param[int]()
    """The axis along which entries are accumulated."""


class Sort(View, names=("sort",)):
    """A ``jax.lax.sort``, which sorts by its first operands and reorders all other operands in the same way."""

    axis = Param[int]("dimension")
    """The axis along which entries are sorted."""


class TopK(View, names=("top_k",)):
    """A ``jax.lax.top_k``: the largest entries along an axis, and their indices."""

    @property
    def axis(self) -> int:
        """The axis along which the largest entries are found, as a non-negative integer.

        Older versions of JAX lack this parameter, and always use the last axis.
        """
        ndim = self.operands[0].aval.ndim
        return self.eqn.params.get("axis", ndim - 1) % ndim


# ---- operations that rearrange, repeat or select entries


class Transpose(View, names=("transpose",)):
    """A ``jax.lax.transpose``."""

    permutation = Param[Sequence[int]]()
    """For each axis of the output, the axis of the operand that becomes it."""


class Reshape(View, names=("reshape",)):
    """A ``jax.lax.reshape``."""

    new_sizes = Param[Sequence[int]]()
    """The shape of the output."""

    @property
    def dimensions(self) -> Sequence[int] | None:
        """The order in which the axes of the operand are read; None if they are read in their own order."""
        return self.eqn.params.get("dimensions")


class Squeeze(View, names=("squeeze",)):
    """A ``jax.lax.squeeze``."""

    @property
    def dimensions(self) -> Sequence[int]:
        """The removed axes, which have size 1, as non-negative numbers."""
        return [i % self.operands[0].aval.ndim for i in self.eqn.params["dimensions"]]


class Broadcast(View, names=("broadcast_in_dim",)):
    """A ``jax.lax.broadcast_in_dim``."""

    shape = Param[Sequence[int]]()
    """The shape of the output."""
    broadcast_dimensions = Param[Sequence[int]]()
    """For each axis of the operand, the axis of the output that it becomes."""


class Slice(View, names=("slice",)):
    """A ``jax.lax.slice``."""

    @property
    def bounds(self) -> Iterable[tuple[int, int, int]]:
        """The start, the limit and the stride of the slice along each axis.

        If all strides are 1, JAX stores None instead of the strides.
        """
        starts, limits = self.eqn.params["start_indices"], self.eqn.params["limit_indices"]
        return zip(starts, limits, self.eqn.params["strides"] or (1,) * len(starts), strict=True)


class DynamicSlice(View, names=("dynamic_slice",)):
    """A ``jax.lax.dynamic_slice``. The operands after the first are the start indices."""

    slice_sizes = Param[Sequence[int]]()
    """The size of the slice along each axis."""


class SplitAxis(View, names=("split",)):
    """A ``jax.lax.split``."""

    axis = Param[int]()
    """The axis that is split."""

    @property
    def sizes(self) -> Sequence[int]:
        """The size of each output along the split axis, as ints."""
        return [int(n) for n in self.eqn.params["sizes"]]


class Reverse(View, names=("rev",)):
    """A ``jax.lax.rev``."""

    dimensions = Param[Sequence[int]]()
    """The axes along which the entries are reversed."""


class ReadInStep(View, names=("reparax_read",)):
    """A call of ``read_in_step`` in ``numerics/tie.py``, which returns its operand, a weight that a loop step reads."""


class Vary(View, names=("pvary",)):
    """Marks an array as varying over mesh axes inside a ``jax.shard_map``."""

    axes = Param[Sequence[str]]()
    """The names of the mesh axes over which the array is marked as varying."""


class Iota(View, names=("iota",)):
    """A ``jax.lax.broadcasted_iota``."""

    shape = Param[Sequence[int]]()
    """The shape of the output."""
    dimension = Param[int]()
    """The axis along which entries count from 0."""


class Concatenate(View, names=("concatenate",)):
    """A ``jax.lax.concatenate``."""

    dimension = Param[int]()
    """The axis along which the operands are concatenated."""


class Stack(View, names=("stack",)):
    """Arrays stacked along a new axis."""

    axis = Param[int]()
    """The new axis."""


class Unstack(View, names=("unstack",)):
    """Splits an array along an axis into one output per entry. Iterating over an array does so since JAX 0.11.1."""

    axis = Param[int]()
    """The axis that is removed."""


class Pad(View, names=("pad",)):
    """A ``jax.lax.pad``."""

    padding = Param[Sequence[tuple[int, int, int]]]("padding_config")
    """For each axis, the numbers of entries added before, after and between its entries."""


class DynamicUpdateSlice(View, names=("dynamic_update_slice",)):
    """A ``jax.lax.dynamic_update_slice``: the second operand replaces part of the first."""


class Barrier(View, names=("optimization_barrier",)):
    """A ``jax.lax.optimization_barrier``, which returns its operands unchanged."""


class Named(View, names=("name",)):
    """A ``jax.ad_checkpoint.checkpoint_name``, which names a value for policies of ``jax.checkpoint``."""

    name = Param[str]()
    """The name of the value."""


# ---- elementwise operations


class Pointwise(
    View,
    names=(
        *("rem", "pow", "shift_right_arithmetic", "clamp", "nextafter", "real", "imag", "complex", "conj"),
        *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "tanh", "logistic"),
        *("erf", "erfc", "erf_inv", "sin", "cos", "tan", "floor", "ceil", "round", "reduce_precision"),
    ),
):
    """An elementwise operation. Operations that have no subclass are slower than an addition, or rare."""


class Add(Pointwise, names=("add", "add_any")):
    """A sum of two arrays. In derivatives, JAX adds cotangents with a separate primitive, ``add_any``."""


class Subtract(Pointwise, names=("sub",)):
    """A difference of two arrays."""


class Multiply(Pointwise, names=("mul",)):
    """An elementwise product of two arrays."""


class Divide(Pointwise, names=("div",)):
    """An elementwise quotient of two arrays."""


class Negate(Pointwise, names=("neg",)):
    """An array times -1."""


class Arithmetic(
    Pointwise,
    names=(
        *("max", "min", "abs", "sign", "is_finite", "square", "integer_pow", "eq", "ne", "lt", "le", "gt", "ge"),
        *("and", "or", "xor", "not", "shift_left", "shift_right_logical"),
    ),
):
    """Another elementwise operation that takes about as long as an addition, such as a comparison or bit operation."""


class Select(Pointwise, names=("select_n",)):
    """A ``jax.lax.select_n``: for each entry, the first operand selects one of the other operands."""


class ConvertType(Pointwise, names=("convert_element_type",)):
    """A ``jax.lax.convert_element_type``."""

    new_dtype = Param[Any]()
    """The dtype of the output."""


class Bitcast(Pointwise, names=("bitcast_convert_type",)):
    """A ``jax.lax.bitcast_convert_type``."""


class StopGradient(Pointwise, names=("stop_gradient",)):
    """A ``jax.lax.stop_gradient``."""


class Copy(Pointwise, names=("copy",)):
    """A copy of an array."""


# ---- equations that contain jaxprs


class Jit(View, names=("jit",)):
    """A call of ``jax.jit``."""

    name = Param[str]()
    """The name of the jitted function."""


class CustomJvp(View, names=("custom_jvp_call",)):
    """A call of a ``jax.custom_jvp``."""


class Checkpoint(View, names=("remat2",)):
    """A call of ``jax.checkpoint``."""

    policy = Param[Any]()
    """The policy that decides which intermediate values are stored; None if all are recomputed."""
    prevent_cse = Param[Any]()
    """Whether the compiler must recompute values in the backward pass instead of reusing those of the forward pass."""
    differentiated = Param[bool]()
    """Whether the equation is part of a derivative."""


class Scan(View, names=("scan",)):
    """A ``jax.lax.scan``."""

    length = Param[int]()
    """The number of steps."""


class While(View, names=("while",)):
    """A ``jax.lax.while_loop``."""

    @property
    def counts(self) -> tuple[int, int]:
        """The number of constant operands of the condition, and that of the body. All other operands are carried."""
        return self.eqn.params["cond_nconsts"], self.eqn.params["body_nconsts"]


class Cond(View, names=("cond",)):
    """A ``jax.lax.cond`` or ``jax.lax.switch``."""


class ShardMap(View, names=("shard_map",)):
    """A ``jax.shard_map``."""

    in_specs = Param[Sequence[Any]]()
    """The partition spec of each operand."""

    @property
    def mesh_shape(self) -> Mapping[str, int]:
        """The size of each mesh axis, by name."""
        return self.eqn.params["mesh"].shape


# ---- the view of an equation


def view_class_of(eqn: JaxprEqn) -> type[View]:
    """Returns the view class of an equation: ``View`` if no subclass is registered for its primitive."""
    kind = KINDS.get(eqn.primitive.name, View)
    # A bitcast between dtypes of different sizes adds or removes an axis, so it is not elementwise.
    return View if kind is Bitcast and kind(eqn).operands[0].aval.shape != kind(eqn).type.shape else kind


def view_of(eqn: JaxprEqn) -> View:
    """Returns the typed view of an equation, such as a ``Dot`` for a ``dot_general``."""
    return view_class_of(eqn)(eqn)
