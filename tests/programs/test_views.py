"""Views of equations say what was given to the functions of JAX that wrote them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from reparax.numerics.tie import read_in_step
from reparax.programs import jaxprs
from reparax.programs.equations import (
    KINDS,
    Add,
    Arithmetic,
    Barrier,
    Bitcast,
    Broadcast,
    Checkpoint,
    Concatenate,
    Cond,
    Conv,
    ConvertType,
    Copy,
    Cumulative,
    CustomJvp,
    Divide,
    Dot,
    DynamicSlice,
    DynamicUpdateSlice,
    Gather,
    Iota,
    Jit,
    Multiply,
    Named,
    Negate,
    Pad,
    Pointwise,
    RaggedDot,
    ReadInStep,
    Reduce,
    ReduceIndex,
    ReduceSum,
    ReduceWindow,
    Reshape,
    Reverse,
    Scan,
    Select,
    ShardMap,
    Slice,
    Sort,
    SplitAxis,
    Squeeze,
    Stack,
    StopGradient,
    Subtract,
    TopK,
    Transpose,
    Vary,
    View,
    While,
    view_class_of,
    view_of,
)

X, N = np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.int32)


def views(function, *args):
    """The views of all equations of a function, those of its bodies too."""
    return _views(jax.make_jaxpr(function)(*args).jaxpr)


def _views(jaxpr):
    own = [view_of(eqn) for eqn in jaxpr.eqns]
    return own + [view for each in own for body in jaxprs.inner_programs(each.eqn) for view in _views(body)]


def the(kind, function, *args):
    """The one view of this kind."""
    (found,) = [view for view in views(function, *args) if type(view) is kind]
    return found


KINDS_OF = {
    Add: lambda x, n: lax.add(x, x),
    Subtract: lambda x, n: lax.sub(x, x),
    Multiply: lambda x, n: lax.mul(x, x),
    Divide: lambda x, n: lax.div(x, x),
    Negate: lambda x, n: lax.neg(x),
    ConvertType: lambda x, n: lax.convert_element_type(x, jnp.bfloat16),
    Bitcast: lambda x, n: lax.bitcast_convert_type(x, jnp.int32),
    StopGradient: lambda x, n: lax.stop_gradient(x),
    Select: lambda x, n: lax.select_n(x > 0, x, x),
    Copy: lambda x, n: jnp.array(x, copy=True),
    ReadInStep: lambda x, n: read_in_step(x),
    Pointwise: lambda x, n: lax.reduce_precision(x, 5, 2),
    ReduceSum: lambda x, n: jnp.sum(x),
    Cumulative: lambda x, n: lax.cumsum(x),
    Pad: lambda x, n: jnp.pad(n, 1),
    CustomJvp: lambda x, n: jax.nn.relu(x),
}


@pytest.mark.parametrize("kind", KINDS_OF, ids=lambda kind: kind.__name__)
def test_a_function_writes_an_equation_of_its_kind(kind):
    assert the(kind, KINDS_OF[kind], X, N)


def test_the_sum_of_two_cotangents_is_a_sum():
    function = jax.vjp(lambda x: (jnp.sin(x), jnp.cos(x)), 1.0)[1]
    assert the(Add, function, (1.0, 1.0)).eqn.primitive.name == "add_any"


@pytest.mark.parametrize(
    ("kind", "functions"),
    [
        (Arithmetic, (jnp.abs, jnp.sign, lax.is_finite, lambda x: lax.max(x, x), lambda x: lax.min(x, x))),
        (Arithmetic, (jnp.square, lambda x: x**3)),
        (Arithmetic, [lambda x, f=f: f(x, x) for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)]),
        (
            Arithmetic,
            [
                lambda x, f=f: f(x.astype(int), x.astype(int))
                for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.shift_left, lax.shift_right_logical)
            ],
        ),
        (Arithmetic, [lambda x: lax.bitwise_not(x.astype(int))]),
    ],
)
def test_kinds_of_several_primitives(kind, functions):
    found = views(lambda x: [function(x) for function in functions], X)
    assert sum(type(view) is kind for view in found) == len(functions)


def test_what_is_not_known_is_a_view_of_any_kind():
    (view,) = views(lax.lgamma, X)
    assert type(view) is View
    assert view.type.shape == X.shape
    assert len(view.operands) == 1


def test_a_view_is_bound_again_with_other_operands_and_settings():
    (view,) = views(lambda x: lax.broadcast_in_dim(x, (4, 3), (1,)), np.ones(3))
    assert view.bind(np.arange(3)).tolist() == [[0, 1, 2]] * 4
    assert view.bind(np.ones(3), shape=(5, 3)).shape == (5, 3)


def test_each_primitive_is_of_one_kind():
    kinds = set(KINDS.values())
    assert sum(len(kind.names) for kind in kinds) == len(KINDS)


def test_a_product_says_which_axes_are_contracted_and_which_stay():
    y, axes = np.ones((2, 4, 5), np.float32), (((2,), (1,)), ((0,), (0,)))
    view = the(Dot, lambda x, y: lax.dot_general(x, y, axes, precision=lax.Precision.HIGHEST), X, y)
    assert (view.contracting, view.batch) == axes
    assert view.precision == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def test_a_ragged_product_says_which_axes_have_groups():
    x, w, sizes = np.ones((2, 5, 3)), np.ones((4, 3, 6)), np.ones((2, 4), np.int32)
    numbers = lax.RaggedDotDimensionNumbers((([2], [1]), ([], [])), [1], [0])
    view = the(RaggedDot, lambda *args: lax.ragged_dot_general(*args, numbers, lax.Precision.HIGHEST), x, w, sizes)
    assert (view.contracting, view.batch, view.ragged, view.group) == (((2,), (1,)), ((), ()), 1, 0)
    assert (tuple(view.axes_of_sizes), view.is_whole) == ((0,), True)
    assert set(view.precision) == {lax.Precision.HIGHEST}
    assert not RaggedDot(view.eqn.replace(params=view.eqn.params | {"group_offset": 1})).is_whole
    numbers = lax.RaggedDotDimensionNumbers((([3], [2]), ([1], [0])), [2], [1])
    args = np.ones((6, 2, 5, 3)), np.ones((2, 4, 3, 7)), np.ones((2, 6, 4), np.int32)
    view = the(RaggedDot, lambda *args: lax.ragged_dot_general(*args, numbers), *args)
    assert view.axes_of_sizes == (1, 0)
    numbers = lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [1], [1])
    view = the(RaggedDot, lambda *args: lax.ragged_dot_general(*args, numbers), x, np.ones((2, 4, 3, 6)), sizes)
    assert view.axes_of_sizes == (0,)
    numbers = lax.RaggedDotDimensionNumbers((([0, 2], [0, 2]), ([1], [1])), [2], [])
    args = np.ones((6, 2, 5, 3)), np.ones((6, 2, 5, 7)), np.ones((2, 6, 4), np.int32)
    view = the(RaggedDot, lambda *args: lax.ragged_dot_general(*args, numbers), *args)
    assert view.axes_of_sizes == (1, 0)
    numbers = lax.RaggedDotDimensionNumbers((([1], [0]), ([], [])), [1], [])
    view = the(RaggedDot, lambda *args: lax.ragged_dot_general(*args, numbers), x, np.ones((5, 6)), sizes[0])
    assert (view.ragged, view.group, tuple(view.axes_of_sizes), view.is_whole) == (1, None, (), True)
    numbers = lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [0], [])
    assert not the(RaggedDot, lambda *args: lax.ragged_dot_general(*args, numbers), x, x, sizes[0]).is_whole


def test_a_convolution_says_how_its_window_moves():
    x, kernel = np.ones((1, 4, 9, 9), np.float32), np.ones((6, 2, 3, 3), np.float32)
    window = {"window_strides": (2, 1), "padding": ((1, 0), (2, 2)), "lhs_dilation": (1, 2), "rhs_dilation": (2, 1)}
    layouts = ("NCHW", "OIHW", "NHWC")
    view = the(
        Conv,
        lambda x, w: lax.conv_general_dilated(x, w, **window, dimension_numbers=layouts, feature_group_count=2),
        x,
        kernel,
    )
    assert view.window == window
    assert view.dimension_numbers == lax.conv_dimension_numbers(x.shape, kernel.shape, layouts)
    assert (view.feature_group_count, view.batch_group_count, view.precision) == (2, 1, None)


def test_a_gather_of_rows_says_their_axis():
    rows = np.array([0, 2])
    for axis in range(X.ndim):
        view = the(Gather, lambda x, axis=axis: jnp.take(x, rows, axis, mode="clip"), X)
        assert view.axis == axis
        assert view.mode == lax.GatherScatterMode.CLIP
    view = the(
        Gather, lambda x: x.at[rows].get(mode="fill", fill_value=7, indices_are_sorted=True, unique_indices=True), X
    )
    assert (view.mode, view.fill_value) == (lax.GatherScatterMode.FILL_OR_DROP, 7)
    assert the(Gather, lambda x: x.at[rows].get(mode="clip", fill_value=7), X).fill_value is None
    assert np.isnan(the(Gather, lambda x: x.at[rows].get(mode="fill"), X).fill_value)
    assert view.hints == {"indices_are_sorted": True, "unique_indices": True}
    assert view.dimension_numbers.offset_dims == (1, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x[n, n],
        lambda x, n: jax.vmap(lambda row, i: row[i])(x, n[:, 0]),
        lambda x, n: lax.gather(x, n[:, :1], lax.GatherDimensionNumbers((1, 2), (0,), (0,)), (1, 2, 4)),
        lambda x, n: lax.gather(x, n[:, :1], lax.GatherDimensionNumbers((1, 2, 3), (), (0,)), (1, 3, 4)),
        lambda x, n: lax.gather(
            x[:1], n[:, :2], lax.GatherDimensionNumbers((1,), (0, 1), (0, 1)), (1, 1, 4), mode="clip"
        ),
    ],
    ids=["two axes", "a row of each", "parts of rows", "an axis of size one", "two axes, one of size one"],
)
def test_another_gather_has_no_axis(function):
    assert the(Gather, function, X, N).axis is None


def test_a_gather_says_which_axis_has_one_index_and_which_number_says_it():
    assert the(Gather, lambda x, n: jnp.take(x, n[:, 0], 1), X, N).entry_axis_and_column == (1, 0)
    view = the(Gather, lambda x, n: jax.vmap(lambda i: x[i])(n[:, 0]), X, N)
    assert (view.entry_axis_and_column, view.removed_axes) == ((0, 0), ())
    view = the(Gather, lambda x, n: jax.vmap(lambda i: lax.dynamic_index_in_dim(x, i, 1))(n[:, 0]), X, N)
    assert view.entry_axis_and_column == (1, 1)
    numbers = lax.GatherDimensionNumbers((1, 2, 3), (), (0,))
    assert the(Gather, lambda x, n: lax.gather(x, n[:, :1], numbers, (1, 3, 4)), X, N).entry_axis_and_column == (0, 0)
    numbers = lax.GatherDimensionNumbers((1,), (0, 1), (0, 1))
    view = the(Gather, lambda x, n: lax.gather(x[:1, :1], n[:, :2], numbers, (1, 1, 4), mode="clip"), X, N)
    assert view.entry_axis_and_column == (0, 0)
    numbers = lax.GatherDimensionNumbers((1, 2), (1,), (0, 1))
    view = the(Gather, lambda x, n: lax.gather(x[:, :1], n[:, :2], numbers, (2, 1, 4), mode="clip"), X, N)
    assert view.entry_axis_and_column == (1, 1)
    for other in (
        lambda x, n: x[n, n],
        lambda x, n: jax.vmap(lambda row, i: row[i])(x, n[:, 0]),
        lambda x, n: jax.vmap(lambda row, i: row[i])(x[:1], n[:1, 0]),
        lambda x, n: lax.gather(x, n[:, :1], lax.GatherDimensionNumbers((1, 2), (0,), (0,)), (1, 2, 4)),
        lambda x, n: lax.gather(x, n[:, :1], lax.GatherDimensionNumbers((1, 2, 3), (), (0,)), (2, 1, 4)),
        lambda x, n: lax.gather(x, n[:, :1], lax.GatherDimensionNumbers((1, 2, 3), (), (1,)), (2, 2, 4)),
    ):
        assert the(Gather, other, X, N).entry_axis_and_column is None


def test_moves_say_where_axes_go():
    assert the(Transpose, lambda x: lax.transpose(x, (2, 0, 1)), X).permutation == (2, 0, 1)
    view = the(Reshape, lambda x: lax.reshape(x, (4, 6), dimensions=(2, 0, 1)), X)
    assert view.new_sizes == (4, 6)
    assert the(Reshape, lambda x: lax.reshape(x, (6, 4)), X).dimensions is None
    assert the(Squeeze, lambda x: lax.squeeze(x, (-1, 0)), X[:1, :, :1]).dimensions in ([0, 2], [2, 0])
    view = the(Broadcast, lambda x: lax.broadcast_in_dim(x, (3, 5, 2), (2, 0)), N)
    assert (view.shape, view.broadcast_dimensions) == ((3, 5, 2), (2, 0))
    assert the(Reverse, lambda x: lax.rev(x, (0, 2)), X).dimensions == (0, 2)


def test_what_counts_joins_or_reduces_says_its_axis():
    view = the(Iota, lambda: lax.broadcasted_iota(jnp.int32, (3, 2), 1))
    assert (view.shape, view.dimension) == ((3, 2), 1)
    assert the(Concatenate, lambda x: lax.concatenate([x, x], 2), X).dimension == 2
    assert the(Reduce, lambda x: jnp.max(x, (0, 2)), X).axes == (0, 2)
    assert the(ReduceSum, lambda x: jnp.sum(x, (0, 2)), X).axes == (0, 2)


def test_a_name_of_a_value():
    assert the(Named, lambda x: checkpoint_name(x, "mine"), X).name == "mine"


def test_arrays_along_a_new_axis():
    (view,) = [view for view in views(lambda x: jnp.stack([x, x], 1), X) if type(view) in (Stack, Concatenate)]
    # An older JAX concatenates.
    assert (view.axis if isinstance(view, Stack) else view.dimension) == 1


def test_cuts_say_where_they_are():
    assert [*the(Slice, lambda x: x[:1, 1:, ::2], X).bounds] == [(0, 1, 1), (1, 3, 1), (0, 4, 2)]
    assert [*the(Slice, lambda x: x[1:], X).bounds] == [(1, 2, 1), (0, 3, 1), (0, 4, 1)]
    view = the(DynamicSlice, lambda x, i: lax.dynamic_slice(x, (i, i, i), (1, 2, 4)), X, 1)
    assert view.slice_sizes == (1, 2, 4)
    view = the(SplitAxis, lambda x: lax.split(x, (1, 3), axis=2), X)
    assert (view.axis, view.sizes) == (2, [1, 3])


def test_a_cast_says_its_dtype():
    assert the(ConvertType, lambda x: x.astype(jnp.float16), X).new_dtype == jnp.float16


def test_equations_with_programs_say_how_these_run():
    def named(x):
        return x

    assert the(Jit, jax.jit(named), X).name == "named"
    policy = jax.checkpoint_policies.dots_saveable
    view = the(Checkpoint, jax.checkpoint(jnp.sin, policy=policy, prevent_cse=False), X)
    assert (view.policy, view.prevent_cse) == (policy, False)
    assert the(Scan, lambda x: lax.scan(lambda c, x: (c, x), 0, x), X).length == 2
    assert the(Cond, lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x), X)


@pytest.mark.parametrize("check", [True, False])
def test_shards_say_their_mesh(check):
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    specs = (PartitionSpec("a"), PartitionSpec())
    view = the(
        ShardMap,
        jax.shard_map(lambda x, y: x + y, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check),
        X,
        X,
    )
    assert (view.in_specs, dict(view.mesh_shape)) == (specs, {"a": 1})
    if check:
        (body,) = jaxprs.inner_programs(view.eqn)
        (varied,) = [each for each in _views(body) if type(each) is Vary]
        assert [*varied.axes] == ["a"]


def test_an_output_that_is_laid_over_devices_is_placed():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        place = jax.sharding.NamedSharding(mesh, PartitionSpec("a", None))
        x = np.ones((2, 2), np.float32)
        assert the(Dot, lambda x: jnp.einsum("ij,jk->ik", x, x, out_sharding=place), x).has_sharding
    assert not the(Dot, lambda x: x @ x, x).has_sharding


def test_the_kind_is_the_class_of_the_view():
    eqn = jax.make_jaxpr(jnp.negative)(X).jaxpr.eqns[0]
    assert view_class_of(eqn) is Negate
    assert view_of(eqn) == Negate(eqn)


def test_elementwise_operations_have_an_entry_for_each():
    functions = [lax.rem, lax.pow, lax.nextafter, lax.complex, lambda x, y: lax.clamp(x, x, y)]
    functions += [lambda x, y, f=f: f(lax.complex(x, y)) for f in (lax.real, lax.imag, lax.conj)]
    one = (lax.exp, lax.exp2, lax.expm1, lax.log, lax.log1p, lax.sqrt, lax.rsqrt, lax.cbrt, lax.tanh, lax.logistic)
    one += (lax.erf, lax.erfc, lax.erf_inv, lax.sin, lax.cos, lax.tan, lax.floor, lax.ceil, lax.round)
    functions += [lambda x, y, f=f: f(x) for f in one]
    functions += [lambda x, y: lax.shift_right_arithmetic(x.astype(int), x.astype(int))]
    for function in functions:
        assert type(views(function, X, X)[-1]) is Pointwise, function


@pytest.mark.parametrize(
    ("kind", "functions"),
    [
        (
            Reduce,
            (jnp.max, jnp.min, jnp.prod, lambda x, axis: jnp.all(x > 0, axis), lambda x, axis: jnp.any(x > 0, axis)),
        ),
        (ReduceIndex, (lambda x, axis: lax.argmax(x, axis, np.int32), lambda x, axis: lax.argmin(x, axis, np.int32))),
        (Cumulative, (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)),
        (Sort, (lax.sort,)),
    ],
)
def test_operations_along_an_axis(kind, functions):
    for function in functions:
        view = views(lambda x, f=function: f(x, 1), X)[-1]
        axes = [view.axis] if kind in (Cumulative, Sort) else [*view.eqn.params["axes"]]
        assert (type(view), axes) == (kind, [1])


def test_the_largest_entries_are_along_the_last_axis():
    view = the(TopK, lambda x: lax.top_k(x, 2), X)
    assert view.axis == 2
    assert TopK(view.eqn.replace(params=view.eqn.params | {"axis": -2})).axis == 1


def test_windows_keep_axes_along_which_they_have_one_entry():
    def kept(size=1, stride=1, pad=(0, 0), dilation=1):
        """Of an axis with these settings, and of two others."""
        settings = ((2, size, 1), (1, stride, 1), ((0, 0), pad, (0, 0)), (1, dilation, 1))
        return [*the(ReduceWindow, lambda x: lax.reduce_window(x, -np.inf, lax.max, *settings), X).keeps_axis]

    cases = [kept(), kept(size=2), kept(stride=2), kept(pad=(0, 1)), kept(dilation=2)]
    assert cases == [[False, True, True], *[[False, False, True]] * 4]
    assert the(ReduceWindow, lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "VALID"), X)
    assert the(ReduceWindow, lambda x: lax.reduce_window(x, np.inf, lax.min, (1, 2, 1), (1, 1, 1), "VALID"), X)


def test_other_kinds():
    def loop(limit, step, factor):
        return lax.while_loop(lambda c: c < limit, lambda c: c * factor + step, 0)

    assert the(While, loop, 1, 2, 3).counts == (1, 2)
    padding = ((1, 2, 0), (0, 0, 1), (0, 0, 0))
    assert the(Pad, lambda x: lax.pad(x, 0.0, padding), X).padding == padding
    assert the(DynamicUpdateSlice, lambda x: lax.dynamic_update_slice(x, x[:1], (1, 0, 0)), X)
    assert the(Barrier, lax.optimization_barrier, X)
    assert type(views(lambda x: lax.bitcast_convert_type(x, np.int16), X)[0]) is View  # which adds an axis
    differentiated = views(jax.grad(lambda x: jnp.sum(jax.checkpoint(jnp.sin)(x))), X)
    assert [view.differentiated for view in differentiated if type(view) is Checkpoint] == [True]
    assert not the(Checkpoint, jax.checkpoint(jnp.sin), X).differentiated


def test_equations_of_one_function_and_equal_types_are_equal():
    def view(function, x=X):
        return views(function, x)[0]

    assert len({view(jnp.sin), view(jnp.sin)}) == 1
    others = [view(jnp.cos), view(jnp.sin, X[0]), view(lambda x: jnp.sum(x, 0)), view(lambda x: jnp.sum(x, 1)), 1]
    assert not any(view(jnp.sin) == other for other in others)
    assert others[2] != others[3]


def test_a_gather_takes_whole_or_partial_axes():
    numbers = lax.GatherDimensionNumbers((1, 2), (0,), (0, 2))
    settings = {
        mode: (lambda x, n, m=mode: lax.gather(x, n[:, :2], numbers, (1, 2, 4), mode=m)) for mode in ("fill", "clip")
    }
    assert {mode: the(Gather, f, X, N).partial_axes for mode, f in settings.items()} == {"fill": (0, 1), "clip": (0, 1)}
    assert the(Gather, lambda x, n: lax.gather(x[:1], n, numbers, (1, 3, 4)), X, N[:, :2]).partial_axes == (0,)
    whole = {m: (lambda x, n, m=m: lax.gather(x, n[:, :2], numbers, (1, 3, 4), mode=m)) for m in ("fill", "clip")}
    # In the mode that fills, an index along the other axis may be out of bounds.
    assert {m: the(Gather, f, X, N).entry_axis_and_column for m, f in whole.items()} == {"fill": None, "clip": (0, 0)}
    batched = the(Gather, lambda x, n: jax.vmap(lambda row, i: lax.dynamic_slice_in_dim(row, i, 2))(x, n[:, 0]), X, N)
    assert (batched.removed_axes, batched.partial_axes, batched.entry_axis_and_column) == ((0,), (1,), None)
