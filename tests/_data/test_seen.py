"""What an array was multiplied with: what stages ask of it, and what one array of a stack sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from sights import correlated, seen

import reparax as rpx

W = np.ones((3, 2), np.float32)
DATA = correlated(7, 3)


def test_its_repr_tells_inputs_bytes_and_reasons():
    assert repr(seen(DATA, shape=(3, 2))) == "Seen(3 inputs along axis 0, 64 B)"
    layers = seen(DATA, DATA, shape=(2, 3, 2), batch=(0,), axes=(1,), full=False)
    assert repr(layers) == "Seen(2 x 3 inputs along axis 1, 56 B)"
    assert repr(rpx.seen.Seen(why=("add reads it: net.py:3",))) == "Seen(no data, 0 B, add reads it: net.py:3)"


@pytest.mark.parametrize(
    ("found", "moments", "axes", "text"),
    [
        (
            rpx.seen.Seen(why=("add reads it: net.py:3",)),
            "full",
            None,
            "expected data of this array, but add reads it: net.py:3. Leave the array out with `where`, or choose "
            "other axes.",
        ),
        (
            seen(DATA, shape=(3, 2)),
            "full",
            {1},
            "expected data contracted with axis 1 of this array, but products contract axis 0. Leave the array out "
            "with `where`, or choose other axes.",
        ),
        (
            rpx.seen.Seen(seen(DATA, shape=(3, 2)).reads + seen(DATA[:, :2], shape=(3, 2), axes=(1,)).reads),
            "full",
            None,
            "expected products to contract this array in one way, but they contract axis 0 of (3, 2) and axis 1 of "
            "(3, 2). Leave the array out with `where`.",
        ),
        (
            seen(DATA, shape=(3, 2), full=False),
            "full",
            {0},
            "expected data contracted with axis 0 with moments='full', but got other moments. Pass moments='full' to "
            "`rpx.inputs`.",
        ),
        (
            seen(DATA, shape=(3, 2)),
            "slopes",
            None,
            "expected data with gradients=True, but got other moments. Pass gradients=True to `rpx.inputs`.",
        ),
        (
            seen(DATA, shape=(3, 4)),
            "full",
            None,
            "expected data of an array of shape (3, 2), got data of one of shape (3, 4). Pass the result of "
            "`rpx.inputs` for these parameters.",
        ),
    ],
)
def test_data_that_are_not_known_are_an_error(found, moments, axes, text):
    with raises(ValueError, text):
        found.read(moments, W, axes)


def test_the_gradient_must_be_known():
    with raises(ValueError, "expected the gradient of the loss, but got none. Pass gradients=True to `rpx.inputs`."):
        seen(DATA, shape=(3, 2)).slope(W)


@pytest.mark.parametrize("stacked", [0, 2])
def test_one_array_of_a_stack_sees_its_own_data(stacked):
    data, own = [correlated(7, 3, seed=i) for i in range(4)], [0, 1, 2]
    own.remove(stacked)
    shape = tuple(4 if axis == stacked else (3, 2)[own.index(axis)] for axis in range(3))
    layers = seen(*data, shape=shape, batch=(stacked,), axes=(own[0],))
    (read,) = layers.of_index([stacked]).reads
    assert (read.shape, read.of, read.batch, read.axes) == ((3, 2), (0, 1), (), (0,))
    for i, x in enumerate(data):
        np.testing.assert_allclose(np.asarray(read.second)[i, 0], x.T @ x, rtol=1e-5)


def test_arrays_that_share_their_data_see_all_of_them():
    heads = seen(DATA, shape=(3, 4, 2))  # the same data for each of four heads
    (read,) = heads.of_index([1]).reads
    assert jax.tree.map(jnp.shape, (read.count, read.second)) == ((4, 1), (4, 1, 3, 3))
    np.testing.assert_allclose(np.asarray(read.second)[2, 0], DATA.T @ DATA, rtol=1e-5)


def test_a_stack_along_which_products_contract_has_no_data_for_one_array():
    found = seen(DATA, shape=(3, 2)).of_index([0])
    assert (found.reads, found.uncounted) == ((), ("products mix the stacked axes",))
