"""Raw trees through every checkpoint format, configurations through JSON, and ``check`` on what comes back.

`test_checkpoint.txt` has what is said of a text or a tree that does not fit.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
from compiled import init, zeros
from errors import raises, table
from flax import serialization
from flax.core import FrozenDict, freeze, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

import reparax as rpx

KERNEL = np.array([[1.0, 2.0, -3.0], [0.5, -1.5, 2.5], [4.0, 0.25, 1.0], [-2.0, 3.0, 0.75]], np.float32)
HALF = np.array([1.5, 2.5, 0.0], jnp.bfloat16)
PARAMS = {
    "enc": {"kernel": KERNEL, "bias": np.ones(3, np.float32)},
    "dec": {"kernel": KERNEL[:3], "bias": HALF},
    "emb": {"table": 2 * KERNEL.T},
    "out": {"kernel": 2 * KERNEL},
    "step": np.int32(7),
}
TIE = rpx.Tie({"out/kernel": ("emb/table", jnp.transpose)})
P = (
    rpx.SpectralNorm(where="dec/kernel")
    >> rpx.Freeze(where="emb/.*")
    >> rpx.WeightNorm(where="enc/kernel")
    >> rpx.LowRank(1, where="enc/kernel")
    >> TIE
    >> rpx.WeightDropout(0.1)
    >> rpx.VarNoise(0.1)
)
# Parts whose raw trees have no empty node, which flat formats lose.
Q, W = rpx.WeightNorm() >> rpx.VarNoise(0.1), {"kernel": KERNEL, "bias": HALF}


def identical(got, want):
    """Same structure, and bit for bit the same arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# ---- formats


def write_safetensors(path, raw, chain):
    arrays = {name: np.asarray(x) for name, x in flatten_dict(raw, sep="/").items()}
    safetensors.numpy.save_file(arrays, path, metadata={"chain": chain})


def with_orbax(path, raw, template):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, raw)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, template)


def with_equinox(path, raw, template):
    eqx.tree_serialise_leaves(path, raw)
    return eqx.tree_deserialise_leaves(path, template)


def with_flax(path, raw, template):
    return serialization.from_bytes(
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template), serialization.to_bytes(raw)
    )


def with_safetensors(path, raw, template):
    write_safetensors(path, raw, "")
    loaded = safetensors.numpy.load_file(path)
    return jax.tree.structure(template).unflatten([loaded[name] for name in flatten_dict(template, sep="/")])


@pytest.mark.parametrize("restored", [with_orbax, with_equinox, with_flax, with_safetensors])
def test_a_raw_tree_comes_back_into_the_structure_that_init_gives(restored, tmp_path):
    raw = init(P, PARAMS)
    got = restored(tmp_path / "raw", raw, jax.eval_shape(P.init, PARAMS))
    P.check(got, like=PARAMS)
    identical(got, raw)


def test_flat_and_frozen_dicts_hold_a_raw_tree(key):
    raw = init(P, PARAMS)
    flat = flatten_dict(raw, keep_empty_nodes=True, sep="/")
    identical(unflatten_dict(flat, sep="/"), raw)
    frozen = freeze(raw)
    P.check(frozen, like=PARAMS)
    identical(unfreeze(frozen), raw)
    step = jax.jit(lambda raw: (P.apply(raw, key), P.update(raw, key)))
    got = step(frozen)
    assert all(isinstance(tree, FrozenDict) for tree in got)
    identical(jax.tree.leaves(got), jax.tree.leaves(step(raw)))


def test_orbax_refuses_a_checkpoint_of_another_chain_and_names_the_path(tmp_path):
    params = {"w": np.eye(2, dtype=np.float32)}
    with pytest.raises(ValueError, match="@weight_norm"):
        with_orbax(tmp_path / "raw", init(rpx.SpectralNorm(), params), jax.eval_shape(rpx.WeightNorm().init, params))


# ---- what a template hides, and who tells


def refusal(p, *lines):
    who = f"({p!r})" if isinstance(p, rpx.Chain) and len(p.stages) > 1 else repr(p)
    listed = "".join(f"  {line}\n" for line in lines)
    remedy = "Load it with the chain that made it, or start again with `raw = p.init(params)`."
    return raises(ValueError, f"{who}.check found a raw tree that differs from `init(like)`:\n{listed}{remedy}")


def test_the_configuration_tells_maps_apart_whose_raw_trees_are_alike():
    saved, other = rpx.Orthogonal("cayley"), rpx.Orthogonal("expm")
    params = {"w": np.eye(3, dtype=np.float32)}
    raw = jax.tree.map(lambda x: np.asarray(x) + KERNEL[:3], init(saved, params))
    other.check(raw, like=params)
    assert np.abs(np.asarray(other.fold(raw)["w"]) - np.asarray(saved.fold(raw)["w"])).max() > 0.1
    identical(rpx.from_json(saved.to_json()).fold(raw), saved.fold(raw))


def test_keys_of_a_model_come_back_as_keys_or_check_says_so(tmp_path):
    params = W | {"rng": jax.random.key(3)}
    raw = Q.init(params)
    got = with_orbax(tmp_path / "raw", raw, None)
    Q.check(got, like=params)
    identical(jax.random.key_data(got["rng"]), jax.random.key_data(params["rng"]))
    with pytest.raises(TypeError):
        serialization.msgpack_serialize(raw)
    with refusal(Q, "rng: expected key<fry>[], got uint32[2]"):
        Q.check(raw | {"rng": np.array([0, 3], np.uint32)}, like=params)


# ---- going on with another chain


def test_a_chain_with_other_perturbations_goes_on_from_the_same_checkpoint(key):
    noise, norm = rpx.VarNoise(0.2), rpx.WeightNorm()
    raw = init(Q, W)
    for p in (norm >> noise, norm, rpx.WeightDropout(0.1) >> norm >> noise, norm >> rpx.quantized.Cast("bfloat16")):
        p.check(raw, like=W)
        identical(init(p, W), raw)
    perturbations = rpx.WeightDropout(0.1) >> noise
    perturbations.check(W, like=W)
    identical(perturbations.init(W), W)
    identical(perturbations.fold(W), W)


# ---- configurations

CONFIGURATIONS = {
    "[]": rpx.Chain(),
    '[{"class": "reparax.WeightNorm"}]': rpx.WeightNorm(),
    '[{"class": "reparax.WeightNorm", "axis": [0, 1]}]': rpx.WeightNorm(axis=(0, 1)),
    '[{"class": "reparax.WeightNorm", "axis": null}]': rpx.WeightNorm(axis=None),
    '[{"class": "reparax.WeightDropout", "rate": 0.5, "broadcast_dims": -1}]': rpx.WeightDropout(
        0.5, broadcast_dims=-1
    ),
    '[{"class": "reparax.Cast", "dtype": "bfloat16"}]': rpx.quantized.Cast(jnp.bfloat16),
    '[{"class": "reparax.Tie", "ties": [["a", "b", null]]}]': rpx.Tie({"a": "b"}),
    '[{"class": "reparax.Tie", "ties": [["out/kernel", "emb/table", {"function": "jax.numpy.transpose"}]]}]': TIE,
    '[{"class": "reparax.WeightNorm"}, {"class": "reparax.VarNoise", "std": 0.1}]': Q,
}


@pytest.mark.parametrize(("stages", "p"), CONFIGURATIONS.items(), ids=map(repr, CONFIGURATIONS.values()))
def test_a_configuration_is_written_as_this_text_and_read_from_it(stages, p):
    text = f'{{"reparax": 1, "stages": {stages}}}'
    assert p.to_json() == text
    assert rpx.from_json(text) == p
    assert repr(rpx.from_json(text)) == repr(p)
    assert hash(rpx.from_json(text)) == hash(p)


# ---- what is said of a text that is no configuration, and of a wrong tree

STAGE = '{"reparax": 1, "stages": [%s]}'
CHECKED = rpx.WeightNorm(axis=-1) >> rpx.Freeze(where="emb/.*")
LIKE = {"enc": {"kernel": KERNEL, "bias": np.ones(3, np.float32)}, "emb": {"table": KERNEL.T}}
ONE = {"w": KERNEL}


def everything(path, array):
    return True


def half(x):
    return x / 2


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def norm(raw):
    return raw["enc"]["kernel"]["@weight_norm"]


def check(change):
    """What is said of a raw tree that is changed so."""
    raw = zeros(CHECKED.init, LIKE)
    change(raw)
    CHECKED.check(raw, like=LIKE)


def lost(p):
    """The raw tree of ``PARAMS`` without its empty nodes, as a flat format gives it back."""
    return unflatten_dict(flatten_dict(zeros(p.init, PARAMS)))


def check_of(made, p, like=ONE):
    """What ``p`` says of the raw tree that another chain has made."""
    p.check(zeros(made.init, ONE), like=like)


@table(__file__)
def test_what_does_not_fit_is_told(case):
    case.check(globals())


PARTS = {
    "parameters that are no arrays": {"activation": jnp.tanh, "name": "dense", "none": None, "count": 3},
    "keys": {"rngs": {"key": jax.random.key(0), "keys": jax.random.wrap_key_data(np.zeros((3, 2), np.uint32))}},
    "empty parts": {"dropout": {}, "pool": (), "layers": [{}, {}]},
}


@pytest.mark.parametrize("part", PARTS)
def test_check_takes_whatever_a_model_holds_and_shapes_for_parameters(part):
    params = ONE | PARTS[part]
    raw = rpx.WeightNorm().init(params)
    rpx.WeightNorm().check(raw, like=params)
    rpx.WeightNorm().check(raw, like=params | jax.eval_shape(lambda: ONE))
