"""The indices of contractions say what numpy's einsum computes, and where parts of operands go."""

import jax
import numpy as np
import pytest
from jax import lax

from reparax.programs.contractions import contraction_of
from reparax.programs.equations import view_of

X, Y = np.arange(24.0).reshape(2, 3, 4), np.arange(60.0).reshape(4, 3, 5)


def the(function, *args):
    """The contraction of a function of one equation, which can be a key of a cache."""
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    found = contraction_of(view_of(eqn))
    assert hash(found) is not None
    return found


def roles(contraction, operand):
    return contraction.contracted(operand), contraction.kept(operand), contraction.batch(operand)


def sources(contraction):
    return [contraction.sources(i) for i in range(len(contraction.output))]


@pytest.mark.parametrize(
    "numbers", [(((2,), (0,)), ((), ())), (((2,), (0,)), ((1,), (1,))), (((), ()), ((1, 2), (1, 0)))]
)
def test_a_product_is_the_einsum_of_its_indices(numbers):
    found = the(lambda x, y: lax.dot_general(x, y, numbers), X, Y)
    (a, b), out = found.operands, found.output
    np.testing.assert_allclose(lax.dot_general(X, Y, numbers), np.einsum(X, a, Y, b, out), rtol=1e-6)
    assert (found.contracted(0), found.batch(1)) == ([*numbers[0][0]], sorted(numbers[1][1]))


def test_rows_in_groups_meet_the_matrix_of_their_group():
    x, w, sizes = np.ones((2, 5, 3)), np.ones((4, 3, 6)), np.ones((2, 4), np.int32)
    numbers = lax.RaggedDotDimensionNumbers((([2], [1]), ([], [])), [1], [0])
    found = the(lambda *args: lax.ragged_dot_general(*args, numbers), x, w, sizes)
    assert (roles(found, 0), roles(found, 1)) == (([2], [0, 1], []), ([1], [2], [0]))
    assert [of_axis[:2] for of_axis in sources(found)] == [[0, None], [1, None], [None, 2]]
    numbers = lax.RaggedDotDimensionNumbers((([2], [0]), ([], [])), [1], [1])
    found = the(lambda *args: lax.ragged_dot_general(*args, numbers), x, np.ones((3, 4, 6)), sizes)
    assert (roles(found, 0), roles(found, 1)) == (([2], [0, 1], []), ([0], [2], [1]))
    numbers = lax.RaggedDotDimensionNumbers((([1], [0]), ([], [])), [1], [])
    found = the(lambda *args: lax.ragged_dot_general(*args, numbers), x, np.ones((5, 6)), sizes[0])
    assert sources(found) == [[None, None, 0], [0, None, None], [2, None, None], [None, 1, None]]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_kernel_has_inputs_and_a_window_that_go_and_outputs_that_stay(groups):
    x, kernel, layouts = np.ones((9, 2, 4)), np.ones((3, 4 // groups, 6)), ("WNC", "WIO", "CNW")
    settings = {"dimension_numbers": layouts, "feature_group_count": groups}
    found = the(lambda x, w: lax.conv_general_dilated(x, w, (2,), "SAME", **settings), x, kernel)
    assert roles(found, 1) == ([0, 1], [2], [])
    assert sources(found) == [[None, 2], [1, None], [None, None]]
    assert (found.operands[0][2] == found.operands[1][1]) == (groups == 1)


def test_places_choose_along_axes_that_go():
    n = np.ones((2, 1), np.int32)
    numbers = lax.GatherDimensionNumbers((1, 2), (1,), (1,))
    found = the(lambda x, n: lax.gather(x, n, numbers, (2, 1, 4)), X, n)
    assert (roles(found, 0), sources(found)) == (
        ([1], [0, 2], []),
        [[None, 0], [0, None], [2, None]],
    )
    numbers = lax.GatherDimensionNumbers((2,), (0,), (0,))
    found = the(lambda x, n: lax.gather(x, n, numbers, (1, 3)), X[:, :, 0], np.ones((4, 5, 1), np.int32))
    assert sources(found) == [[None, 0], [None, 1], [1, None]]
    numbers = lax.GatherDimensionNumbers((1, 2), (), (2,), (0,), (0,))
    found = the(lambda x, n: lax.gather(x, n, numbers, (1, 3, 2)), X, n)
    assert (roles(found, 0), sources(found)) == (
        ([2], [1], [0]),
        [[0, 0], [1, None], [None, None]],
    )
    assert found.output[2] == -3  # for axis 2 of the table
    numbers = lax.GatherDimensionNumbers((1, 2), (), (2,), (1,), (0,))
    found = the(lambda x, n: lax.gather(x, n, numbers, (2, 1, 2)), X, np.ones((3, 1), np.int32))
    assert (roles(found, 0), sources(found)) == (([2], [0], [1]), [[1, 0], [0, None], [None, None]])
    found = the(lambda x, i: lax.dynamic_slice(x, (i, i, i), (1, 3, 4), allow_negative_indices=False), X, np.int32(1))
    assert (roles(found, 0), found.output[0]) == (([0], [1, 2], []), -1)
    found = the(lambda x, i: lax.dynamic_slice(x, (i, i, i), (1, 3, 2), allow_negative_indices=False), X, np.int32(1))
    assert (roles(found, 0), found.output) == (([0, 2], [1], []), (-1, 1, -3))


def test_other_equations_are_no_contractions():
    assert the(lax.neg, X) is None
