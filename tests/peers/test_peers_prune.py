"""Pruning in torch beside us: equal masks, and each difference named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx

torch = pytest.importorskip("torch")
prune = pytest.importorskip("torch.nn.utils.prune")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def module(*weights):
    """A torch module that has the arrays as weights ``w0``, ``w1`` and so on."""
    holder = torch.nn.Module()
    for i, w in enumerate(weights):
        holder.register_parameter(f"w{i}", torch.nn.Parameter(torch.tensor(w)))
    return holder


def seen(tensor):
    return tensor.detach().numpy()


def pruned(p, w):
    return np.asarray(p.fold(p.init({"w": jnp.asarray(w)}, jax.random.key(0)))["w"])


def by(stage, amount, **arguments):
    """The stage for an amount of torch, where an integer is a number of weights."""
    return stage(**arguments, **({"count": amount} if isinstance(amount, int) else {"sparsity": amount}))


# Of 35 weights, half is 17.5 and 0.7 is 24.5: torch and we round half to even.
@pytest.mark.parametrize("amount", [0, 0.3, 0.5, 0.7, 0.99, 1.0, 1, 4, 35])
def test_magnitude_pruning_is_l1_unstructured(amount):
    w = normal(5, 7)
    peer = prune.l1_unstructured(module(w), "w0", amount)
    np.testing.assert_array_equal(pruned(by(rpx.MagnitudePruning, amount), w), seen(peer.w0))


@pytest.mark.parametrize(("n", "order"), [(1, 1), (2, 2), (float("inf"), np.inf)])
@pytest.mark.parametrize(("shape", "dim"), [((6, 5), 0), ((6, 5), -1), ((4, 3, 2, 2), 1)])
def test_pruning_of_slices_is_ln_structured(shape, dim, n, order):
    w = normal(*shape)
    peer = prune.ln_structured(module(w), "w0", 0.5, n=n, dim=dim)
    np.testing.assert_array_equal(pruned(rpx.MagnitudePruning(0.5, axis=dim, ord=order), w), seen(peer.w0))


@pytest.mark.parametrize("amounts", [(0.5, 0.5), (0.3, 0.3, 0.3), (0.2, 0.6)])
def test_a_second_pruning_counts_among_what_the_first_leaves(amounts):
    w, peer = normal(5, 7), module(normal(5, 7))
    for amount in amounts:
        prune.l1_unstructured(peer, "w0", amount)
    np.testing.assert_array_equal(pruned(rpx.MagnitudePruning(amounts), w), seen(peer.w0))


@pytest.mark.parametrize("amounts", [(0.5,), (0.2, 0.6), (9,)])
def test_global_pruning_is_global_unstructured(amounts):
    weights = {"w0": normal(5, 7), "w1": normal(3, 4, seed=1), "w2": 5 * normal(2, 2, seed=2)}
    peer = module(*weights.values())
    p = (
        by(rpx.sparse.GlobalMagnitudePruning, *amounts)
        if len(amounts) == 1
        else rpx.sparse.GlobalMagnitudePruning(amounts)
    )
    for amount in amounts:
        prune.global_unstructured([(peer, name) for name in weights], prune.L1Unstructured, amount=amount)
    got = p.fold(p.init({name: jnp.asarray(w) for name, w in weights.items()}))
    for name, w in got.items():
        np.testing.assert_array_equal(w, seen(getattr(peer, name)))


@pytest.mark.parametrize("amounts", [(0.3,), (0.5, 0.5), (4,)])
def test_random_pruning_takes_as_many_weights_as_random_unstructured(amounts):
    w, peer = normal(5, 7), module(normal(5, 7))
    for amount in amounts:
        prune.random_unstructured(peer, "w0", amount)
    got = pruned(by(rpx.sparse.RandomPruning, *amounts) if len(amounts) == 1 else rpx.sparse.RandomPruning(amounts), w)
    assert np.sum(got == 0) == np.sum(seen(peer.w0) == 0)


@pytest.mark.parametrize("amount", [0.5, 2])
def test_random_pruning_takes_as_many_slices_as_random_structured(amount):
    w = normal(5, 7)
    peer = seen(prune.random_structured(module(w), "w0", amount, dim=1).w0)
    got = pruned(by(rpx.sparse.RandomPruning, amount, axis=1), w)
    assert np.sum((got == 0).all(0)) == np.sum((peer == 0).all(0))
    assert np.sum(got == 0) == np.sum(peer == 0)


def test_a_mask_of_ones_own_is_custom_from_mask():
    w, mask = normal(5, 7), (normal(5, 7, seed=1) > 0).astype(np.float32)
    peer = prune.custom_from_mask(module(w), "w0", torch.tensor(mask))
    np.testing.assert_array_equal(pruned(rpx.Mask(), w * mask), seen(peer.w0))


def test_torch_keeps_some_of_equal_weights_and_we_keep_the_first():
    w = np.ones((4, 8), np.float32)
    peer = seen(prune.l1_unstructured(module(w), "w0", 0.5).w0)
    assert np.sum(peer) == 16
    np.testing.assert_array_equal(pruned(rpx.MagnitudePruning(0.5), w), np.repeat([[1], [0]], [2, 2], 0) * w)
