"""What each kind of equation does with the axes of its operands, written down by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from reparax.axes._rules import axes_of
from reparax.axes._values import Part, Source, Value, combined, split
from reparax.programs.equations import view_of

F = jnp.float32


def text_of(axis):
    """The parts of an axis: "2a0*3~" has a part of size 2, which axis 0 of operand a gives, and 3 equal entries."""
    return "*".join(
        f"{part.size}{'' if part.varies else '~'}" + "".join(f"{'abcdef'[i]}{k}" for i, k in sorted(part.origins))
        for part in axis
    )


def axes_after(fun, *shapes, data=False):
    """The axes of each output of a function; its last operand holds data if ``data``, and all others are weights."""
    types = [jax.ShapeDtypeStruct(shape, F) if isinstance(shape, tuple) else shape for shape in shapes]
    program = jax.make_jaxpr(fun)(*types)
    assert not program.consts
    program = program.jaxpr

    def of_operand(i, shape):
        source = Source.DATA if data and i == len(types) - 1 else Source.WEIGHT
        return Value(tuple((Part(n, frozenset([(i, k)])),) for k, n in enumerate(shape)), source)

    env = {v: of_operand(i, v.aval.shape) for i, v in enumerate(program.invars)}
    for eqn in program.eqns:
        values = [env[v] if v in env else Value((), Source.CONSTANT) for v in map(unliteral, eqn.invars)]
        source = max((value.source for value in values), default=Source.CONSTANT)
        env |= {v: Value(axes, source) for v, axes in zip(eqn.outvars, axes_of(view_of(eqn), values), strict=True)}
    assert all(type(axis) is tuple for value in env.values() for axis in value.axes)
    return ["  ".join(map(text_of, env[v].axes)) for v in program.outvars]


def unliteral(v):
    return None if isinstance(v, jax.extend.core.Literal) else v


def conv(a, b, layouts=("NHC", "HIO", "NHC"), **settings):
    return lax.conv_general_dilated(a, b, (1,), "VALID", dimension_numbers=layouts, **settings)


def rows(a, i):
    return a.at[i].get(mode="promise_in_bounds")


ONES = np.ones((4, 5), np.float32)
I3, I32 = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((3, 2), jnp.int32)
I1 = jax.ShapeDtypeStruct((), jnp.int32)
WINDOW = {"window_dimensions": (1, 2), "window_strides": (1, 1), "padding": ((0, 0), (0, 0))}

ROWS = {
    # Elementwise: the parts and the origins of all operands, without scalars.
    "a sum": (lambda a, b: a + b, [(3, 4), (3, 4)], ["3a0b0  4a1b1"]),
    "a sum with merged axes": (lambda a, b: a + b.reshape(6), [(6,), (2, 3)], ["2a0b0*3a0b1"]),
    "a sum, broadcast": (lambda a, b: a + b, [(4, 3), (1, 3)], ["4a0b0  3a1b1"]),
    "a sum with a row": (lambda a, b: lax.expand_dims(b, [0]) + a, [(4, 3), (3,)], ["4a0  3a1b0"]),
    "with numbers": (lambda a: lax.clamp(0.0, 2 * a, 1.0), [(3,)], ["3a0"]),
    "reversed": (lambda a: lax.rev(a.reshape(6), [0]), [(2, 3)], ["2a0*3a1"]),
    "named": (lambda a: checkpoint_name(a.reshape(6), "a"), [(2, 3)], ["2a0*3a1"]),
    "behind a barrier": (lambda a, b: lax.optimization_barrier((a, b)), [(3,), (2, 3)], ["3a0", "2b0  3b1"]),
    "unknown": (lambda a: lax.linalg.cholesky(a), [(3, 3)], ["3  3"]),
    # Entries change along one axis, whose parts merge.
    "cumsum": (lambda a: lax.cumsum(a.reshape(6, 4), 0), [(2, 3, 4)], ["6a0a1  4a2"]),
    "cumsum along another": (lambda a: lax.cumsum(a.reshape(6, 4), 1), [(2, 3, 4)], ["2a0*3a1  4a2"]),
    "sort": (lambda a, b: lax.sort((a.reshape(6), b), num_keys=1), [(2, 3), (6,)], ["6a0a1b0"] * 2),
    "top_k": (lambda a: lax.top_k(a.reshape(4, 6), 2)[0], [(4, 2, 3)], ["4a0  2a1a2"]),
    "windows": (
        lambda a: lax.reduce_window(a.reshape(4, 6), -np.inf, lax.max, **WINDOW),
        [(2, 2, 2, 3)],
        ["2a0*2a1  5a2a3"],
    ),
    "padded": (
        lambda a: lax.pad(a.reshape(4, 6, 6, 6), 0.0, [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]),
        [(2, 2, 2, 3, 2, 3, 2, 3)],
        ["2a0*2a1  7a2a3  7a4a5  11a6a7"],
    ),
    # Slices
    "whole": (lambda a: lax.slice(a, (0, 1), (4, 3)), [(4, 3)], ["4a0  2a1"]),
    "one index": (lambda a: lax.slice(a, (1, 0), (2, 3)), [(4, 3)], ["1~  3a1"]),
    "a block": (lambda a: lax.slice(a.reshape(12), (6,), (12,)), [(2, 2, 3)], ["2a0a1a2*3a0a1a2"]),
    "no block: its start": (lambda a: lax.slice(a.reshape(12), (3,), (9,)), [(2, 2, 3)], ["6a0a1a2"]),
    "no block: its size": (lambda a: lax.slice(a.reshape(12), (0,), (8,)), [(2, 2, 3)], ["8a0a1a2"]),
    "no block: a stride": (lambda a: lax.slice(a.reshape(12), (0,), (12,), (2,)), [(4, 3)], ["6a0a1"]),
    "a stride that leaves a rest": (lambda a: lax.slice(a, (0,), (7,), (3,)), [(7,)], ["3a0"]),
    "nothing": (lambda a: lax.slice(a, (0,), (0,)), [(4,)], ["0a0"]),
    "split": (lambda a: lax.split(a.reshape(4, 12), (6, 6), 1), [(4, 2, 2, 3)], ["4a0  2a1a2a3*3a1a2a3"] * 2),
    "split unevenly": (lambda a: lax.split(a, (1, 2, 3)), [(6, 2)], ["1~  2a1", "2a0  2a1", "3a0  2a1"]),
    "split within a block": (
        lambda a: lax.split(a.reshape(12), (3, 6, 3)),
        [(2, 2, 3)],
        ["3a0a1a2", "6a0a1a2", "3a0a1a2"],
    ),
    "from an unknown start": (
        lambda a, i: lax.dynamic_slice(a.reshape(4, 4, 6), (i, i, i), (1, 2, 6)),
        [(4, 4, 2, 3), I1],
        ["1~  2a1  2a2*3a3"],
    ),
    "updated": (
        lambda a, b, i: lax.dynamic_update_slice(a, b.reshape(2, 6), (i, i)),
        [(4, 6), (2, 2, 3), I1],
        ["4a0b0  2a1b1*3a1b2"],
    ),
    "updated in one axis": (
        lambda a, b, i: lax.dynamic_update_slice(a.reshape(6, 2), b, (i, i)),
        [(2, 3, 2), (1, 2), I1],
        ["6a0a1b0  2a2b1"],
    ),
    # Products
    "a product": (lambda a, b: a @ b, [(3, 4), (4, 5)], ["3a0  5b1"]),
    "of batches": (lambda a, b: jnp.einsum("bij,kjb->bik", a, b), [(2, 3, 4), (5, 4, 2)], ["2a0b2  3a1  5b0"]),
    "by a constant": (lambda a: lax.dot(a, jnp.full((4, 5), 2.0)), [(3, 4)], ["3a0  5a1"]),
    "of a constant": (lambda a: lax.dot(jnp.full((5, 3), 2.0), a), [(3, 4)], ["5a0  4a1"]),
    "of data and a constant": (lambda a: lax.dot(a, jnp.full((4, 5), 2.0)), [(3, 4)], ["3a0  5~"], True),
    "of groups": (
        lambda a, b, c: lax.ragged_dot(a, b, c),
        [(3, 4), (2, 4, 5), jax.ShapeDtypeStruct((2,), jnp.int32)],
        ["3a0  5b2"],
    ),
    # Convolutions, whose features begin with their groups
    "a convolution": (conv, [(2, 7, 3), (4, 3, 5)], ["2a0  4a1  1~*5b2"]),
    "of channels first": (lambda a, b: conv(a, b, ("NCH", "OIH", "CNH")), [(2, 3, 7), (5, 3, 4)], ["1~*5b0  2a0  4a2"]),
    "of groups of features": (
        lambda a, b: conv(a, b, feature_group_count=2),
        [(2, 7, 6), (4, 3, 8)],
        ["2a0  4a1  2a2b2*4b2"],
    ),
    "of groups of examples": (lambda a, b: conv(a, b, batch_group_count=2), [(4, 7, 3), (4, 3, 6)], ["2  4  6"]),
    # Look-ups, by indices that are weights or data
    "rows": (rows, [(8, 4), I3], ["3a0  4a1"]),
    "rows that data choose": (rows, [(8, 4), I3], ["3b0  4a1"], True),
    "rows of two numbers": (rows, [(8, 4), I32], ["3a0  2a0  4a1"]),
    "rows of merged axes": (lambda a, i: rows(a, i.reshape(6)), [(8, 4), I32], ["3a0*2a0  4a1"]),
    "one row": (rows, [(8, 4), I1], ["4a1"]),
    "entries": (lambda a, i: a.at[i, i].get(mode="promise_in_bounds"), [(8, 4, 2), I3], ["3  2a2"]),
    "an entry of each row": (lambda a, i: jax.vmap(rows)(a, i), [(3, 4), I3], ["3a0"]),
    "parts of rows": (
        lambda a, i: jax.vmap(lambda i: lax.dynamic_slice(a, (i, i), (1, 2)))(i),
        [(8, 4), I3],
        ["3b0  1~  2a1"],
        True,
    ),
    # Moves
    "a sum over axes": (lambda a: lax.reduce_sum(a, (0, 2)), [(2, 3, 4)], ["3a1"]),
    "the place of the largest": (lambda a: lax.argmax(a, 1, jnp.int32), [(2, 3, 4)], ["2a0  4a2"]),
    "transposed": (lambda a: a.transpose(2, 0, 1), [(2, 3, 4)], ["4a2  2a0  3a1"]),
    "squeezed": (lambda a: lax.squeeze(a, (1,)), [(2, 1, 4)], ["2a0  4a2"]),
    "broadcast": (lambda a: lax.broadcast_in_dim(a, (2, 3, 4), (1, 2)), [(3, 1)], ["2~  3a0  4~a1"]),
    "reshaped in another order": (lambda a: lax.reshape(a, (12,), (2, 0, 1)), [(2, 3, 2)], ["2a2*2a0*3a1"]),
    "a new axis": (lambda a: a.reshape(2, 1, 3), [(2, 3)], ["2a0  1~  3a1"]),
    "joined": (lambda a, b: lax.concatenate((a, b.reshape(4, 2)), 0), [(3, 2), (2, 2, 2)], ["7a0b0b1  2a1b2"]),
    "joined along the last": (lambda a, b: lax.concatenate((a, b), 1), [(3, 2), (3, 5)], ["3a0b0  7a1b1"]),
    "joined alone": (lambda a: lax.concatenate((a.reshape(6),), 0), [(2, 3)], ["2a0*3a1"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_an_equation_moves_divides_and_merges_axes(name):
    fun, shapes, want, *data = ROWS[name]
    with jax.numpy_rank_promotion("allow"):
        assert axes_after(fun, *shapes, data=bool(data)) == want


@pytest.mark.parametrize(
    ("parts", "sizes", "want"),
    [
        ([2, 3, 4], [6, 4], "2a0*3a1  4a2"),
        ([2, 3, 4], [3, 8], "3a0a1  2a0a1*4a2"),
        ([2, 6], [4, 3], "2a0*2a1  3a1"),
        ([6, 4], [8, 3], "8a0a1  3a0a1"),
        ([6, 4, 5], [8, 15], "8a0a1  3a0a1*5a2"),
        ([2, 3], [1, 2, 1, 3, 1], "1~  2a0  1~  3a1  1~"),
        ([1, 3, 1], [3, 1], "1a0*3a1  1a2"),
        ([1, 3], [1, 3], "1a0  3a1"),
        ([5], [4], "4a0"),
        ([0, 3], [3, 0], "3a0a1  0a0a1"),
    ],
)
def test_parts_divide_as_a_reshape_divides_axes(parts, sizes, want):
    parts = [Part(n, frozenset([(0, k)])) for k, n in enumerate(parts)]
    assert "  ".join(map(text_of, split(parts, sizes))) == want


def test_the_axis_of_size_one_is_the_one_that_is_broadcast():
    one, merged, whole = (
        tuple(Part(n, frozenset([(i, k)]), varies=n == 6) for k, n in enumerate(sizes))
        for i, sizes in enumerate([(1,), (2, 3), (6,)])
    )
    assert text_of(combined([one, merged])) == text_of(combined([merged, one])) == "2~a0b0*3~a0b1"
    assert text_of(combined([merged, one, whole])) == "2a0b0c0*3a0b1c0"
