"""Torch's orthogonal parametrization beside ours: equal where it is right, and each difference named where it is not.

Skipped where torch is missing; `pip install torch==2.13.0` (the extra `peers`) brings it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import pulled, read

import reparax as rpx

torch = pytest.importorskip("torch")
parametrizations = pytest.importorskip("torch.nn.utils.parametrizations")

MAPS = {"cayley": "cayley", "expm": "matrix_exp", "householder": "householder"}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def unitary(*shape):
    left, _, right = np.linalg.svd(normal(*shape) + 1j * normal(*shape, seed=1), full_matrices=False)
    return left @ right


def orthogonal(*shape):
    left, _, right = np.linalg.svd(normal(*shape), full_matrices=False)
    return left @ right


def peer(w, map, **options):
    """A torch module of double precision that has ``w`` as its orthogonal weight, and its parametrization."""
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(torch.tensor(w))
    torch.manual_seed(0)
    parametrizations.orthogonal(holder, orthogonal_map=MAPS[map], **options)
    return holder, holder.parametrizations.weight


def seen(tensor):
    """What torch computed, as a numpy array."""
    return tensor.detach().resolve_conj().numpy().copy()


def tall(w):
    return w if w.shape[-2] >= w.shape[-1] else w.swapaxes(-1, -2)


def like(w, array):
    """``array``, which is tall, in the orientation of ``w``."""
    return array if w.shape[-2] >= w.shape[-1] else array.swapaxes(-1, -2)


def marked(w, base, x):
    """Our raw tree with a tall base and a tall matrix that leads away from it."""
    node = {"x": like(w, x), "@fixed": {"base": like(w, base)}}
    return {"w": {"@orthogonal": node}}


REAL = [orthogonal(5, 2), orthogonal(2, 5), orthogonal(3, 3), np.stack([orthogonal(4, 2), -orthogonal(4, 2)])]
COMPLEX = [unitary(4, 2), unitary(3, 3)]
CASES = [(w, map) for w in REAL for map in MAPS] + [(w, map) for w in COMPLEX for map in ("cayley", "expm")]
GRID = pytest.mark.parametrize(("w", "map"), CASES, ids=[f"{w.dtype}{w.shape}, {map}" for w, map in CASES])


def stage(w, map):
    return rpx.Orthogonal(map, stacked=tuple(range(w.ndim - 2)))


def moved(w, map):
    """Torch's module away from its base, that base, and the same place as our raw tree.

    Torch's base is square, and its raw value has the coordinates in the basis of that, below the diagonal.
    """
    holder, held = peer(w, map)
    with torch.no_grad():
        held.original.add_(torch.tensor(step(w, map)))
    square, x = seen(held[0].base), below(tall(seen(held.original)), map)
    return holder, held, square, marked(w, square[..., : x.shape[-1]], square @ x)


def step(w, map):
    """A random step of the raw value, which for reflections leaves the signs on the diagonal as they are."""
    x = normal(*w.shape, seed=5) + (1j * normal(*w.shape, seed=6) if np.iscomplexobj(w) else 0)
    return x * (1 - np.eye(*w.shape[-2:])) if map == "householder" else x


def below(x, map):
    """The part of a raw value that torch reads."""
    return np.tril(x, -1 if map == "householder" else 0)


@GRID
def test_init_starts_at_the_base_of_torch(w, map):
    _, held = peer(w, map)
    with jax.enable_x64():
        node = stage(w, map).init({"w": jnp.asarray(w)})["w"]["@orthogonal"]
    expected = like(w, seen(held[0].base)[..., : min(w.shape[-2:])])
    np.testing.assert_allclose(node["@fixed"]["base"], expected, rtol=0, atol=1e-14)


@GRID
def test_each_map_leads_where_that_of_torch_does(w, map):
    holder, _, _, raw = moved(w, map)
    with jax.enable_x64():
        got = read(stage(w, map), raw)
    np.testing.assert_allclose(got, seen(holder.weight), rtol=0, atol=1e-13)


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("w", REAL, ids=lambda w: str(w.shape))
def test_each_map_has_the_gradient_of_torch(w, map):
    holder, held, square, raw = moved(w, map)
    dw = normal(*w.shape, seed=7)
    holder.weight.backward(torch.tensor(dw))
    with jax.enable_x64():
        got = pulled(stage(w, map), raw, jnp.asarray(dw))["@orthogonal"]["x"]
    in_basis = square.swapaxes(-1, -2) @ tall(np.asarray(got))
    np.testing.assert_allclose(below(in_basis, map), tall(seen(held.original.grad)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("map", ["cayley", "expm"])
@pytest.mark.parametrize("w", REAL, ids=lambda w: str(w.shape))
def test_without_trivialization_the_base_is_the_identity(w, map):
    holder, held = peer(w, map, use_trivialization=False)
    x = below(tall(seen(held.original)), map)
    base = np.broadcast_to(np.eye(*x.shape[-2:]), x.shape)
    with jax.enable_x64():
        got = read(stage(w, map), marked(w, base, x))
    np.testing.assert_allclose(got, seen(holder.weight), rtol=0, atol=1e-13)


@pytest.mark.parametrize("w", REAL[:3], ids=lambda w: str(w.shape))
def test_without_trivialization_the_base_of_reflections_has_their_signs(w):
    holder, held = peer(w, "householder", use_trivialization=False)
    original = tall(seen(held.original))
    signs = np.diag(original)
    base, x = -np.eye(*original.shape) * signs, -below(original, "householder") * signs
    with jax.enable_x64():
        got = read(rpx.Orthogonal("householder"), marked(w, base, x))
    np.testing.assert_allclose(got, seen(holder.weight), rtol=0, atol=1e-13)
    np.testing.assert_allclose(got, w, rtol=0, atol=1e-13)


# ---- where torch is wrong, or has another convention


def test_weight_decay_turns_reflections_of_torch_into_zero_and_ours_into_the_base():
    w = orthogonal(4, 3)
    holder, held, _, raw = moved(w, "householder")
    with torch.no_grad():
        held.original.mul_(0.999)
    assert not seen(holder.weight).any()
    raw["w"]["@orthogonal"]["x"] *= 0.999
    with jax.enable_x64():
        got = np.asarray(read(rpx.Orthogonal("householder"), raw))
    np.testing.assert_allclose(got.T @ got, np.eye(3), rtol=0, atol=1e-14)


def test_torch_starts_at_a_q_factor_that_depends_on_the_order_of_columns_and_we_at_the_nearest_matrix():
    w = normal(4, 4)
    holder, _ = peer(w, "cayley")
    with jax.enable_x64():
        got = np.asarray(rpx.Orthogonal().project(jnp.asarray(w)))
    theirs = seen(holder.weight)
    q, r = np.linalg.qr(w)
    np.testing.assert_allclose(theirs, q * np.sign(np.diag(r)), rtol=0, atol=1e-13)
    assert np.linalg.norm(got - w) < np.linalg.norm(theirs - w) - 0.1
