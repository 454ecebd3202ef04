"""Faults of checkpoints, in every format: each is an error before training starts.

A format that restores into a template may cast, drop or rename to make a file fit, which nobody can see afterwards. So
each file is read here as it lies, by the names and types that it holds itself, and `check` compares.
"""

import functools
import json
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
from errors import raises
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

import reparax as rpx

W = {"kernel": jnp.arange(1.0, 7.0).reshape(3, 2), "bias": jnp.array([1.5, 2.5], jnp.bfloat16)}
P = rpx.WeightNorm() >> rpx.VarNoise(0.1)
ARGS = ocp.args


# ---- formats: how to write a raw tree with its chain beside it, and how to read both as they lie


def write_orbax(path, raw, chain):
    composite = ARGS.Composite(raw=ARGS.StandardSave(raw), chain=ARGS.JsonSave(json.loads(chain)))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, composite)


def read_orbax(path):
    wanted = ARGS.Composite(raw=ARGS.StandardRestore(), chain=ARGS.JsonRestore())
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(path, wanted)
    return found.raw, json.dumps(found.chain)


def write_msgpack(path, raw, chain):
    path.write_bytes(serialization.msgpack_serialize({"raw": raw, "chain": chain}))


def read_msgpack(path):
    found = serialization.msgpack_restore(path.read_bytes())
    return found["raw"], found["chain"]


def write_equinox(path, raw, chain):
    """Its files hold leaves alone, so their names and types stand in the first line."""
    types = {name: (str(x.dtype), x.shape) for name, x in flatten_dict(raw, sep="/").items()}
    with path.open("wb") as file:
        file.write(json.dumps([chain, types]).encode() + b"\n")
        eqx.tree_serialise_leaves(file, raw)


def read_equinox(path):
    with path.open("rb") as file:
        chain, types = json.loads(file.readline())
        template = {name: jax.ShapeDtypeStruct(tuple(shape), dtype) for name, (dtype, shape) in types.items()}
        return eqx.tree_deserialise_leaves(file, unflatten_dict(template, sep="/")), chain


def write_safetensors(path, raw, chain):
    arrays = {name: np.asarray(x) for name, x in flatten_dict(raw, sep="/").items()}
    safetensors.numpy.save_file(arrays, path, metadata={"chain": chain})


def read_safetensors(path):
    with safetensors.safe_open(path, "np") as file:
        chain = file.metadata()["chain"]
    return unflatten_dict(safetensors.numpy.load_file(path), sep="/"), chain


def write_pickle(path, raw, chain):
    path.write_bytes(pickle.dumps((raw, chain)))


def read_pickle(path):
    return pickle.loads(path.read_bytes())


FORMATS: dict[str, tuple[Any, Any]] = {
    "orbax": (write_orbax, read_orbax),
    "msgpack": (write_msgpack, read_msgpack),
    "equinox": (write_equinox, read_equinox),
    "safetensors": (write_safetensors, read_safetensors),
    "pickle": (write_pickle, read_pickle),
}
every_format = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What each format gives back of one raw tree."""

    @functools.cache
    def in_format(name):
        write, read = FORMATS[name]
        path = tmp_path_factory.mktemp(name) / "raw"
        write(path, P.init(W), P.to_json())
        return read(path)

    return in_format


def identical(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@every_format
def test_a_raw_tree_and_its_chain_come_back_as_they_were(name, stored):
    raw, chain = stored(name)
    p = rpx.from_json(chain)
    assert p == P
    p.check(raw, like=W)
    identical(raw, P.init(W))
    identical(p.fold(raw), P.fold(P.init(W)))


def refusal(p, lines):
    who = f"({p!r})" if isinstance(p, rpx.Chain) and len(p.stages) > 1 else repr(p)
    return (
        f"{who}.check found a raw tree that differs from `init(like)`:\n"
        + "".join(f"  {line}\n" for line in lines)
        + "Load it with the chain that made it, or start again with `raw = p.init(params)`."
    )


# What is wrong with the one file, where this chain and these parameters were to be restored.
FAULTS: dict[str, tuple[rpx.Parametrization, Any, list[str]]] = {
    "shape": (
        P,
        W | {"kernel": jnp.ones((4, 2))},
        ["kernel/@weight_norm/v: expected float32[4, 2], got float32[3, 2]"],
    ),
    "dtype": (
        P,
        W | {"bias": jnp.ones(2), "kernel": W["kernel"].astype(jnp.bfloat16)},
        [
            "bias: expected float32[2], got bfloat16[2]",
            "kernel/@weight_norm/v: expected bfloat16[3, 2], got float32[3, 2]",
        ],
    ),
    "missing": (P, W | {"scale": jnp.ones(2)}, ["scale: missing, expected float32[2]"]),
    "unexpected": (P, {"kernel": W["kernel"]}, ["bias: unexpected, holds bfloat16[2]"]),
    "renamed": (
        P,
        {"kernel": W["kernel"], "offset": W["bias"]},
        ["bias: unexpected, holds bfloat16[2]", "offset: missing, expected bfloat16[2]"],
    ),
    "another chain": (rpx.SpectralNorm(), W, ["kernel: expected @spectral_norm, got @weight_norm"]),
    "another axis": (
        rpx.WeightNorm(axis=0),
        W,
        ["kernel/@weight_norm/g: expected float32[3, 1], got float32[1, 2]"],
    ),
    "a longer chain": (
        rpx.WeightNorm() >> rpx.Freeze(),
        W,
        ["bias: expected @freeze, got a plain array", "kernel: expected @freeze, got @weight_norm"],
    ),
    "a plain model": (rpx.VarNoise(0.1), W, ["kernel: expected a plain array, got @weight_norm"]),
}


@every_format
@pytest.mark.parametrize(("p", "like", "lines"), FAULTS.values(), ids=FAULTS)
def test_every_fault_is_an_error_before_training(name, p, like, lines, stored):
    with raises(ValueError, refusal(p, lines)):
        p.check(stored(name)[0], like=like)


@every_format
def test_a_plain_checkpoint_is_no_raw_tree(name, tmp_path):
    write, read = FORMATS[name]
    write(tmp_path / "plain", W, rpx.Chain().to_json())
    plain, chain = read(tmp_path / "plain")
    with raises(ValueError, refusal(P, ["kernel: expected @weight_norm, got a plain array"])):
        P.check(plain, like=W)
    rpx.from_json(chain).check(plain, like=W)
    identical(P.init(plain), P.init(W))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("msgpack", ValueError),
        ("equinox", RuntimeError),
        ("safetensors", safetensors.SafetensorError),
        ("pickle", pickle.UnpicklingError),
    ],
)
def test_a_truncated_file_is_an_error(name, error, tmp_path):
    write, read = FORMATS[name]
    write(tmp_path / "raw", P.init(W), P.to_json())
    (tmp_path / "raw").write_bytes((tmp_path / "raw").read_bytes()[:-3])
    with pytest.raises(error):
        read(tmp_path / "raw")


def test_a_truncated_checkpoint_of_orbax_is_an_error(tmp_path):
    write_orbax(tmp_path / "raw", {"kernel": W["kernel"]}, rpx.Chain().to_json())  # orbax leaves reads of others open
    for file in [file for file in (tmp_path / "raw" / "raw").rglob("d/*") if file.is_file()]:
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="Error opening"):
        read_orbax(tmp_path / "raw")


# ---- what a template hides, and who tells


def test_orbax_casts_to_its_template_and_check_of_what_lies_there_says_so(tmp_path):
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), W)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "raw", P.init(W))
        checkpointer.wait_until_finished()
        cast = checkpointer.restore(tmp_path / "raw", jax.eval_shape(P.init, half))
        stored = checkpointer.restore(tmp_path / "raw")
    P.check(cast, like=half)
    P.check(stored, like=W)
    with raises(ValueError, refusal(P, ["kernel/@weight_norm/v: expected bfloat16[3, 2], got float32[3, 2]"])):
        P.check(stored, like=half)


def from_bytes(target, tree=None):
    return serialization.from_bytes(target, serialization.to_bytes(P.init(W) if tree is None else tree))


def test_flax_fills_a_target_with_other_shapes_and_types_and_check_says_so():
    tall = W | {"kernel": jnp.ones((4, 2), jnp.bfloat16)}
    with raises(ValueError, refusal(P, ["kernel/@weight_norm/v: expected bfloat16[4, 2], got float32[3, 2]"])):
        P.check(from_bytes(P.init(tall)), like=tall)


def test_flax_puts_a_node_in_the_place_of_a_leaf_and_check_says_so():
    with raises(ValueError, refusal(rpx.Chain(), ["kernel: expected a plain array, got @weight_norm"])):
        rpx.Chain().check(from_bytes(W), like=W)


def test_flax_drops_what_its_target_has_no_place_for_and_check_of_the_whole_says_so():
    target = {"kernel": P.init(W)["kernel"]}
    P.check(from_bytes(target), like={"kernel": W["kernel"]})
    whole = serialization.msgpack_restore(serialization.to_bytes(P.init(W)))
    with raises(ValueError, refusal(P, ["bias: unexpected, holds bfloat16[2]"])):
        P.check(whole, like={"kernel": W["kernel"]})


def test_equinox_takes_leaves_by_their_order_and_the_chain_beside_them_says_so(tmp_path):
    mask, prune = rpx.Mask(), rpx.MagnitudePrune(0.5)
    eqx.tree_serialise_leaves(tmp_path / "leaves", mask.init(W))
    got = eqx.tree_deserialise_leaves(tmp_path / "leaves", jax.eval_shape(prune.init, W))
    prune.check(got, like=W)
    write_equinox(tmp_path / "raw", mask.init(W), mask.to_json())
    raw, chain = read_equinox(tmp_path / "raw")
    assert rpx.from_json(chain) == mask
    with raises(ValueError, refusal(prune, ["kernel: expected @magnitude_prune, got @mask"])):
        prune.check(raw, like=W)


def test_settings_that_leave_no_shape_are_told_by_the_chain_beside():
    like = {"w": jnp.eye(3)}
    p, other = rpx.Orthogonal("cayley"), rpx.Orthogonal("expm")
    raw, chain = p.init(like), p.to_json()
    raw["w"]["@orthogonal"]["x"] = jnp.arange(9.0).reshape(3, 3)
    other.check(raw, like=like)
    wrong = np.abs(other.fold(raw)["w"] - p.fold(raw)["w"]).max()
    assert wrong > 0.1
    identical(rpx.from_json(chain).fold(raw), p.fold(raw))


def test_check_tells_float64_from_the_float32_that_jax_would_read_it_as():
    raw = {"kernel": np.ones((3, 2)), "bias": W["bias"]}
    with raises(ValueError, refusal(rpx.Chain(), ["kernel: expected float32[3, 2], got float64[3, 2]"])):
        rpx.Chain().check(raw, like=W)
    rpx.Chain().check(raw, like=raw)


def test_a_leaf_under_a_marker_is_named():
    raw = P.init(W) | {"kernel": {"@weight_norm": W["kernel"]}}
    lines = [
        "kernel/@weight_norm: unexpected, holds float32[3, 2]",
        "kernel/@weight_norm/g: missing, expected float32[1, 2]",
        "kernel/@weight_norm/v: missing, expected float32[3, 2]",
    ]
    with raises(ValueError, refusal(P, lines)):
        P.check(raw, like=W)


def test_keys_of_a_model_come_back_as_keys_or_check_says_so(tmp_path):
    params = W | {"rng": jax.random.key(3)}
    raw = P.init(params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "raw", raw)
        checkpointer.wait_until_finished()
        got = checkpointer.restore(tmp_path / "raw")
    P.check(got, like=params)
    identical(jax.random.key_data(got["rng"]), jax.random.key_data(params["rng"]))
    with pytest.raises(TypeError):
        serialization.msgpack_serialize(raw)
    words = serialization.msgpack_restore(serialization.msgpack_serialize(raw | {"rng": np.array([0, 3], np.uint32)}))
    with raises(ValueError, refusal(P, ["rng: expected key<fry>[], got uint32[2]"])):
        P.check(words, like=params)


# ---- going on with another chain

NEIGHBOURS = {
    "another std": rpx.WeightNorm() >> rpx.VarNoise(0.2),
    "no noise": rpx.WeightNorm(),
    "dropout too": rpx.WeightDropout(0.1) >> rpx.WeightNorm() >> rpx.VarNoise(0.1),
    "in half precision": rpx.WeightNorm() >> rpx.Cast("bfloat16"),
}


@pytest.mark.parametrize("p", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_a_chain_with_other_perturbations_goes_on_from_the_same_checkpoint(p, stored):
    raw, _ = stored("msgpack")
    p.check(raw, like=W)
    identical(p.init(W), P.init(W))


def test_a_chain_with_other_raw_values_starts_from_the_weights_of_the_old_one(stored):
    raw, chain = stored("msgpack")
    p = rpx.WeightNorm() >> rpx.LowRank(2, where="kernel") >> rpx.VarNoise(0.1)
    weights = rpx.from_json(chain).fold(raw)
    np.testing.assert_allclose(weights["kernel"], W["kernel"], rtol=1e-6)
    new = p.init(weights)
    p.check(new, like=W)
    np.testing.assert_allclose(p.fold(new)["kernel"], W["kernel"], rtol=1e-5)
