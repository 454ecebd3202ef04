"""Equations as typed views: what each says, by the names that JAX's functions give it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from jax import lax
from jax.extend.core import JaxprEqn

T = TypeVar("T")

Axes = tuple[Sequence[int], Sequence[int]]
"""Axes of the left and of the right operand, in pairs."""


KINDS: dict[str, "type[View]"] = {}
"""The class of the views of each primitive that has its own."""


@dataclass(frozen=True, eq=False)
class View:
    """An equation of any kind. Its subclasses say what is particular to theirs; this one stands for all others.

    A view holds nothing but its equation, and reads a field when it is asked for, so it costs no more than the look.
    Views are equal if their equations do the same with operands of the same types.
    """

    eqn: JaxprEqn

    names: ClassVar[tuple[str, ...]]
    """The primitives of this kind."""

    def __init_subclass__(cls, names: tuple[str, ...]) -> None:
        """Makes a kind of these primitives known."""
        cls.names = names
        KINDS.update(dict.fromkeys(names, cls))

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


class Setting(Generic[T]):
    """An attribute of a view: the parameter of its equation that has this name, or the name of the attribute."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __set_name__(self, _: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, view: View, _: type) -> T:
        return view.eqn.params[self._name]


# ---- sums over axes of two operands, and parts of one where the other says


class Dot(View, names=("dot_general",)):
    """A ``jax.lax.dot_general``."""

    precision = Setting[Any]()
    """The precision of both operands, or an algorithm."""

    @property
    def contracting(self) -> Axes:
        """The axes that are summed over."""
        return self.eqn.params["dimension_numbers"][0]

    @property
    def batch(self) -> Axes:
        """The axes that stay, as the first of the output."""
        return self.eqn.params["dimension_numbers"][1]


class RaggedDot(View, names=("ragged_dot_general",)):
    """A ``jax.lax.ragged_dot_general``: a product of matrices for each group of entries along an axis of the first.

    The third operand holds how many entries each group has. Entries beyond all groups give zeros.
    """

    precision = Setting[Any]()
    """The precision of both operands, or an algorithm."""

    @property
    def _numbers(self) -> lax.RaggedDotDimensionNumbers:
        """Which axes are summed, stay, and form groups."""
        return self.eqn.params["ragged_dot_dimension_numbers"]

    @property
    def contracting(self) -> Axes:
        """The axes that are summed over; an axis of groups is none of them."""
        return self._numbers.dot_dimension_numbers[0]

    @property
    def batch(self) -> Axes:
        """The axes that stay, as the first of the output."""
        return self._numbers.dot_dimension_numbers[1]

    @property
    def ragged(self) -> int:
        """The axis of the left operand whose entries form groups."""
        (axis,) = self._numbers.lhs_ragged_dimensions
        return axis

    @property
    def group(self) -> int | None:
        """The axis of the right operand that has an index for each group; None if the groups are summed each."""
        return next(iter(self._numbers.rhs_group_dimensions), None)

    @property
    def is_whole(self) -> bool:
        """Whether it computes all groups, and groups are not among the axes of a batch."""
        return self.eqn.params["group_offset"] is None and self.ragged not in self.batch[0]

    @property
    def axes_of_sizes(self) -> Sequence[int]:
        """The axes of the left operand of which each index may have groups of its own."""
        if self.operands[2].aval.ndim == 1:
            return ()
        contracting, batch = self.contracting[0], self.batch[0]
        free = [i for i in range(self.operands[0].aval.ndim) if i not in (*contracting, *batch)]
        row_axes = list(contracting if self.group is None else free)
        return *batch, *row_axes[: row_axes.index(self.ragged)]


class Conv(View, names=("conv_general_dilated",)):
    """A ``jax.lax.conv_general_dilated``."""

    dimension_numbers = Setting[lax.ConvDimensionNumbers]()
    """Where batch, features and places stand in the data, the kernel and the output."""
    feature_group_count = Setting[int]()
    """The number of groups of input features, each with its own kernels."""
    batch_group_count = Setting[int]()
    """The number of groups of examples, each with its own kernels."""
    precision = Setting[Any]()
    """The precision of both operands."""

    @property
    def window(self) -> dict[str, Any]:
        """How the window moves: the arguments of this name."""
        return {name: self.eqn.params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")}


class Gather(View, names=("gather",)):
    """A ``jax.lax.gather``: slices of the first operand, at the places in the second."""

    dimension_numbers = Setting[lax.GatherDimensionNumbers]()
    """Where the axes of the operands stand in the output."""
    mode = Setting[lax.GatherScatterMode]()
    """What happens beyond the operand."""
    fill_value = Setting[Any]()
    """What stands beyond the operand; None for the default of the dtype."""
    slice_sizes = Setting[Sequence[int]]()
    """The size of a slice along each axis of the operand."""

    @property
    def hints(self) -> dict[str, bool]:
        """What is promised of the places: the arguments of these names."""
        return {name: self.eqn.params[name] for name in ("indices_are_sorted", "unique_indices")}

    @property
    def removed_axes(self) -> tuple[int, ...]:
        """The axes of the operand that slices do not have."""
        return (*self.dimension_numbers.collapsed_slice_dims, *self.dimension_numbers.operand_batching_dims)

    @property
    def partial_axes(self) -> tuple[int, ...]:
        """The axes of the operand of which slices have a part, but for those of a batch."""
        sizes = zip(self.slice_sizes, self.operands[0].aval.shape, strict=True)
        parts = [i for i, (m, n) in enumerate(sizes) if m != n or i in self.dimension_numbers.collapsed_slice_dims]
        return tuple(i for i in parts if i not in self.dimension_numbers.operand_batching_dims)

    @property
    def axis(self) -> int | None:
        """The axis of the operand, if each slice is one row along it, and whole along all others; else None."""
        numbers = self.dimension_numbers
        if self.row is None or tuple(numbers.start_index_map) != tuple(numbers.collapsed_slice_dims):
            return None
        axis, _ = self.row
        return axis if tuple(numbers.start_index_map) == (axis,) else None

    @property
    def row(self) -> tuple[int, int] | None:
        """The axis of the operand of which each slice has one index, and which of the numbers of a place says this one.

        None if slices are not whole along all other axes.
        """
        shape = self.operands[0].aval.shape
        axes = tuple(self.dimension_numbers.start_index_map)
        cut_axes = [i for i, n in enumerate(shape) if self.slice_sizes[i] != n]
        cut_axes = cut_axes or [i for i in axes if shape[i] == 1][:1]
        if self.dimension_numbers.operand_batching_dims or len(cut_axes) != 1:
            return None
        # What is whole begins at its first index, where a place beyond is moved inside or promised not to be.
        if len(axes) > 1 and self.mode == lax.GatherScatterMode.FILL_OR_DROP:
            return None
        (axis,) = cut_axes
        return (axis, axes.index(axis)) if axis in axes and self.slice_sizes[axis] == 1 else None


# ---- reductions along axes


class Reduce(View, names=("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod")):
    """A reduction along axes: of one of these kinds if it is no sum."""

    axes = Setting[Sequence[int]]()
    """The axes that go."""


class ReduceSum(Reduce, names=("reduce_sum",)):
    """A ``jax.lax.reduce_sum``."""


class ReduceIndex(Reduce, names=("argmax", "argmin")):
    """The place of the largest or smallest entry along axes."""


class ReduceWindow(View, names=("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window")):
    """A reduction of windows, such as pooling."""

    @property
    def keeps_axis(self) -> Sequence[bool]:
        """For each axis whether each entry is a window of its own."""
        params = self.eqn.params
        pads = params["padding"]
        dilations = params.get("base_dilation") or params.get("base_dilations") or (1,) * len(pads)
        numbers = zip(params["window_dimensions"], params["window_strides"], dilations, strict=True)
        return [{*ones} == {1} and tuple(pad) == (0, 0) for ones, pad in zip(numbers, pads, strict=True)]


class Cumulative(View, names=("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")):
    """A reduction of all entries up to each along an axis."""

    axis = Setting[int]()
    """The axis along which it goes."""


class Sort(View, names=("sort",)):
    """A ``jax.lax.sort``: all operands in the order of the first ones."""

    axis = Setting[int]("dimension")
    """The axis along which it sorts."""


class TopK(View, names=("top_k",)):
    """A ``jax.lax.top_k``: the largest entries along an axis, and their places."""

    @property
    def axis(self) -> int:
        """The axis along which it looks."""
        ndim = self.operands[0].aval.ndim
        return self.eqn.params.get("axis", ndim - 1) % ndim


# ---- moves: entries change their places, are repeated, or some are taken


class Transpose(View, names=("transpose",)):
    """A ``jax.lax.transpose``."""

    permutation = Setting[Sequence[int]]()
    """For each axis of the output, that of the operand."""


class Reshape(View, names=("reshape",)):
    """A ``jax.lax.reshape``."""

    new_sizes = Setting[Sequence[int]]()
    """The new shape."""

    @property
    def dimensions(self) -> Sequence[int] | None:
        """The order in which the axes of the operand are read, if it is not their own."""
        return self.eqn.params.get("dimensions")


class Squeeze(View, names=("squeeze",)):
    """A ``jax.lax.squeeze``."""

    @property
    def dimensions(self) -> Sequence[int]:
        """The axes, of size 1, that go; none is negative."""
        return [i % self.operands[0].aval.ndim for i in self.eqn.params["dimensions"]]


class Broadcast(View, names=("broadcast_in_dim",)):
    """A ``jax.lax.broadcast_in_dim``."""

    shape = Setting[Sequence[int]]()
    """The new shape."""
    broadcast_dimensions = Setting[Sequence[int]]()
    """For each axis of the operand, that of the output."""


class Slice(View, names=("slice",)):
    """A ``jax.lax.slice``."""

    @property
    def bounds(self) -> Iterable[tuple[int, int, int]]:
        """For each axis the start, the limit and the stride."""
        starts, limits = self.eqn.params["start_indices"], self.eqn.params["limit_indices"]
        return zip(starts, limits, self.eqn.params["strides"] or (1,) * len(starts), strict=True)


class DynamicSlice(View, names=("dynamic_slice",)):
    """A ``jax.lax.dynamic_slice``; the operands after the first are the starts."""

    slice_sizes = Setting[Sequence[int]]()
    """The size along each axis."""


class SplitAxis(View, names=("split",)):
    """A ``jax.lax.split``."""

    axis = Setting[int]()
    """The axis that is split."""

    @property
    def sizes(self) -> Sequence[int]:
        """The size of each output along it."""
        return [int(n) for n in self.eqn.params["sizes"]]


class Reverse(View, names=("rev",)):
    """A ``jax.lax.rev``."""

    dimensions = Setting[Sequence[int]]()
    """The axes whose entries change their order."""


class ReadInStep(View, names=("reparax_read",)):
    """An array that is read in a step: ``numerics/tie.py``."""


class Vary(View, names=("pvary",)):
    """An array marked as varying over the shards of a ``jax.shard_map``."""

    axes = Setting[Sequence[str]]()
    """The mesh axes."""


class Iota(View, names=("iota",)):
    """A ``jax.lax.broadcasted_iota``."""

    shape = Setting[Sequence[int]]()
    """The shape."""
    dimension = Setting[int]()
    """The axis along which it counts."""


class Concatenate(View, names=("concatenate",)):
    """A ``jax.lax.concatenate``."""

    dimension = Setting[int]()
    """The axis along which the operands follow each other."""


class Stack(View, names=("stack",)):
    """Arrays along a new axis."""

    axis = Setting[int]()
    """The new axis."""


class Unstack(View, names=("unstack",)):
    """Arrays of which each is one index along an axis; since jax 0.11.1, loops over an array are this."""

    axis = Setting[int]()
    """The axis that goes."""


class Pad(View, names=("pad",)):
    """A ``jax.lax.pad``."""

    padding = Setting[Sequence[tuple[int, int, int]]]("padding_config")
    """For each axis how many entries are added before, behind and between."""


class DynamicUpdateSlice(View, names=("dynamic_update_slice",)):
    """A ``jax.lax.dynamic_update_slice``: the second operand replaces part of the first."""


class Barrier(View, names=("optimization_barrier",)):
    """A ``jax.lax.optimization_barrier``: its operands as they are."""


class Named(View, names=("name",)):
    """A ``jax.ad_checkpoint.checkpoint_name``."""

    name = Setting[str]()
    """The name of the value."""


# ---- each entry from the same entries of the operands


class Pointwise(
    View,
    names=(
        *("rem", "pow", "shift_right_arithmetic", "clamp", "nextafter", "real", "imag", "complex", "conj"),
        *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "tanh", "logistic"),
        *("erf", "erfc", "erf_inv", "sin", "cos", "tan", "floor", "ceil", "round", "reduce_precision"),
    ),
):
    """An equation that computes each entry from the same entries; this one takes longer than a sum, or is rare."""


class Add(Pointwise, names=("add", "add_any")):
    """A sum of two arrays; derivatives have a primitive of their own for it."""


class Subtract(Pointwise, names=("sub",)):
    """A difference of two arrays."""


class Multiply(Pointwise, names=("mul",)):
    """A product, entry by entry."""


class Divide(Pointwise, names=("div",)):
    """A quotient, entry by entry."""


class Negate(Pointwise, names=("neg",)):
    """The numbers with the other sign."""


class Arithmetic(
    Pointwise,
    names=(
        *("max", "min", "abs", "sign", "is_finite", "square", "integer_pow", "eq", "ne", "lt", "le", "gt", "ge"),
        *("and", "or", "xor", "not", "shift_left", "shift_right_logical"),
    ),
):
    """Another operation that takes about as long as a sum, also one on bits, or a comparison."""


class Select(Pointwise, names=("select_n",)):
    """A ``jax.lax.select_n``: entries of the operands after the first, as this says."""


class ConvertType(Pointwise, names=("convert_element_type",)):
    """A ``jax.lax.convert_element_type``."""

    new_dtype = Setting[Any]()
    """The dtype of the output."""


class Bitcast(Pointwise, names=("bitcast_convert_type",)):
    """A ``jax.lax.bitcast_convert_type``."""


class StopGradient(Pointwise, names=("stop_gradient",)):
    """A ``jax.lax.stop_gradient``."""


class Copy(Pointwise, names=("copy",)):
    """A copy of an array."""


# ---- equations that hold programs


class Jit(View, names=("jit",)):
    """A call of ``jax.jit``."""

    name = Setting[str]()
    """The name of the function."""


class CustomJvp(View, names=("custom_jvp_call",)):
    """A call of a ``jax.custom_jvp``."""


class Checkpoint(View, names=("remat2",)):
    """A call of ``jax.checkpoint``."""

    policy = Setting[Any]()
    """What may be stored."""
    prevent_cse = Setting[Any]()
    """Whether the compiler must compute again what was computed before."""
    differentiated = Setting[bool]()
    """Whether it is part of a gradient."""


class Scan(View, names=("scan",)):
    """A ``jax.lax.scan``."""

    length = Setting[int]()
    """The number of steps."""


class While(View, names=("while",)):
    """A ``jax.lax.while_loop``."""

    @property
    def counts(self) -> tuple[int, int]:
        """How many operands are constants of the condition, and how many of the body; the others are carried."""
        return self.eqn.params["cond_nconsts"], self.eqn.params["body_nconsts"]


class Cond(View, names=("cond",)):
    """A ``jax.lax.switch`` or ``cond``."""


class ShardMap(View, names=("shard_map",)):
    """A ``jax.shard_map``."""

    in_specs = Setting[Sequence[Any]]()
    """The partition spec of each operand."""

    @property
    def mesh_shape(self) -> Mapping[str, int]:
        """The size of each mesh axis."""
        return self.eqn.params["mesh"].shape


# ---- the kind of an equation


def view_class_of(eqn: JaxprEqn) -> type[View]:
    """The class of the view of an equation; ``View`` itself if it has no other."""
    kind = KINDS.get(eqn.primitive.name, View)
    # Numbers seen as bytes have one more axis, so entries are not computed from the same entries.
    return View if kind is Bitcast and kind(eqn).operands[0].aval.shape != kind(eqn).type.shape else kind


def view_of(eqn: JaxprEqn) -> View:
    """The view of an equation."""
    return view_class_of(eqn)(eqn)
