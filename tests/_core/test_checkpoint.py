"""Raw trees through every checkpoint format, configurations through JSON, and ``check`` on what comes back."""

import functools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
from compiled import effective, init, zeros
from flax import serialization
from flax.core import FrozenDict, freeze, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from grids import mostly_thorough
from jax import Array
from jax.tree_util import keystr, tree_flatten_with_path

import reparax as rpx

KERNEL = np.array([[1.0, 2.0, -3.0], [0.5, -1.5, 2.5], [4.0, 0.25, 1.0], [-2.0, 3.0, 0.75]], np.float32)

CHAINS = {
    "weight_norm": rpx.WeightNorm() >> rpx.VarNoise(0.1),
    "spectral_norm": rpx.SpectralNorm(where="enc/kernel"),
    "tie": rpx.Tie({"out/kernel": ("emb/table", jnp.transpose)}),
    "freeze": rpx.Freeze(where="emb/.*"),
    "nested": rpx.WeightNorm() >> rpx.LowRank(2, where="enc/kernel"),
    "everything": rpx.SpectralNorm(where="dec/kernel")
    >> rpx.Freeze(where="emb/.*")
    >> rpx.WeightNorm(where="enc/kernel")
    >> rpx.LowRank(1, where="enc/kernel")
    >> rpx.Tie({"out/kernel": ("emb/table", jnp.transpose)})
    >> rpx.WeightDropout(0.1)
    >> rpx.VarNoise(0.1),
    "half_precision": rpx.WeightNorm() >> rpx.Cast("bfloat16"),
}

WHOLE = CHAINS["everything"], CHAINS["half_precision"]
every_chain = pytest.mark.parametrize("p", mostly_thorough(CHAINS.values(), *WHOLE), ids=CHAINS)


@functools.cache
def _params() -> dict[str, Any]:
    return {
        "enc": {"kernel": jnp.asarray(KERNEL), "bias": jnp.ones(3)},
        "dec": {"kernel": jnp.asarray(KERNEL[:3]), "bias": jnp.zeros(3, jnp.bfloat16)},
        "emb": {"table": jnp.asarray(2 * KERNEL.T)},
        "out": {"kernel": jnp.asarray(2 * KERNEL)},
        "step": jnp.int32(7),
    }


def _assert_identical(got: Any, want: Any) -> None:
    """Same structure, and bit for bit the same arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _assert_restored(p: rpx.Parametrization, got: Any, params: Any) -> None:
    """``got`` is the raw tree of ``p``, passes its check, and has its effective tree, all bit for bit."""
    raw, key = init(p, params), jax.random.key(1)
    p.check(got, like=params)
    _assert_identical(got, raw)
    _assert_identical(effective(p, got, key), effective(p, raw, key))


def _message(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


def _flat(tree: Any) -> dict[str, Array]:
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


# Formats. ---------------------------------------------------------------------------------------------------------


@every_chain
def test_pickle_restores_a_raw_tree_bit_for_bit(p: rpx.Parametrization) -> None:
    _assert_restored(p, pickle.loads(pickle.dumps(init(p, _params()))), _params())


@pytest.mark.thorough
@every_chain
def test_flax_bytes_restore_a_raw_tree_into_a_target(p: rpx.Parametrization) -> None:
    raw = init(p, _params())
    target = jax.tree.map(jnp.zeros_like, raw)
    _assert_restored(p, serialization.from_bytes(target, serialization.to_bytes(raw)), _params())


@every_chain
def test_msgpack_restores_a_raw_tree_without_a_target(p: rpx.Parametrization) -> None:
    _assert_restored(p, serialization.msgpack_restore(serialization.msgpack_serialize(init(p, _params()))), _params())


@pytest.fixture
def orbax() -> Iterator[ocp.StandardCheckpointer]:
    with ocp.StandardCheckpointer() as checkpointer:
        yield checkpointer


@every_chain
def test_orbax_restores_a_raw_tree_into_a_template(
    p: rpx.Parametrization, orbax: ocp.StandardCheckpointer, tmp_path: Path
) -> None:
    raw = init(p, _params())
    orbax.save(tmp_path / "raw", raw)
    orbax.wait_until_finished()
    _assert_restored(p, orbax.restore(tmp_path / "raw", jax.eval_shape(p.init, _params())), _params())


@every_chain
def test_orbax_restores_a_raw_tree_without_a_template(
    p: rpx.Parametrization, orbax: ocp.StandardCheckpointer, tmp_path: Path
) -> None:
    orbax.save(tmp_path / "raw", init(p, _params()))
    orbax.wait_until_finished()
    _assert_restored(p, orbax.restore(tmp_path / "raw"), _params())


def _safe() -> dict[str, Any]:
    """The parameters without bfloat16, which safetensors 0.8 cannot load as arrays of JAX."""
    return {**_params(), "dec": {"kernel": _params()["dec"]["kernel"], "bias": jnp.zeros(3)}}


@pytest.mark.parametrize(
    "name", mostly_thorough(["weight_norm", "spectral_norm", "freeze", "nested"], "spectral_norm", "nested")
)
def test_safetensors_restore_a_raw_tree_from_its_paths(name: str) -> None:
    p = CHAINS[name]
    loaded = safetensors.flax.load(safetensors.flax.save(_flat(init(p, _safe()))))
    _assert_restored(p, unflatten_dict(loaded, sep="/"), _safe())


@pytest.mark.parametrize("name", mostly_thorough(["tie", "everything"], "tie"))
def test_safetensors_restore_a_tied_raw_tree_into_the_structure_that_init_gives(name: str) -> None:
    p = CHAINS[name]
    loaded = safetensors.flax.load(safetensors.flax.save(_flat(init(p, _safe()))))
    template = jax.eval_shape(p.init, _safe())
    _assert_restored(p, jax.tree.structure(template).unflatten([loaded[path] for path in _flat(template)]), _safe())


def _without_empty_nodes(raw: Any) -> Any:
    return unflatten_dict(_flat(raw), sep="/")


def test_a_flat_format_loses_the_empty_node_of_a_tie_and_check_names_it() -> None:
    p = CHAINS["tie"]
    lost = _without_empty_nodes(init(p, _params()))
    assert _message(ValueError, lambda: p.check(lost, like=_params())) == (
        "Tie({'out/kernel': ('emb/table', jnp.transpose)}).check found a raw tree that differs from "
        "`init(like)`:\n  "
        "out/kernel: missing, expected @tie\n"
        "Load it with the chain that made it, or start again with `raw = p.init(params)`."
    )


def test_a_flat_format_loses_the_empty_node_of_a_tie_and_apply_names_it() -> None:
    p = CHAINS["tie"]
    lost = _without_empty_nodes(init(p, _params()))
    assert _message(ValueError, lambda: p.apply(lost)) == (
        "Tie({'out/kernel': ('emb/table', jnp.transpose)}).apply found nothing at 'out/kernel', where `init` "
        "leaves an empty node. Flattened formats lose empty nodes: restore into the structure of "
        "`jax.eval_shape(p.init, params)`."
    )


@every_chain
def test_flatten_dict_restores_a_raw_tree_with_its_empty_nodes(p: rpx.Parametrization) -> None:
    flat = flatten_dict(init(p, _params()), keep_empty_nodes=True, sep="/")
    _assert_restored(p, unflatten_dict(flat, sep="/"), _params())


@every_chain
def test_frozen_dicts_hold_a_raw_tree(p: rpx.Parametrization, key: Array) -> None:
    raw = init(p, _params())
    frozen = freeze(raw)
    p.check(frozen, like=_params())
    _assert_restored(p, unfreeze(frozen), _params())
    got = effective(p, frozen, key)
    assert isinstance(got, FrozenDict)
    _assert_identical(jax.tree.leaves(got), jax.tree.leaves(effective(p, raw, key)))


@pytest.mark.parametrize("name", ["spectral_norm", "everything"])
def test_frozen_dicts_can_be_updated(name: str) -> None:
    p = CHAINS[name]
    raw = init(p, _params())
    update = jax.jit(p.update)
    _assert_identical(jax.tree.leaves(update(freeze(raw))), jax.tree.leaves(update(raw)))


@every_chain
def test_equinox_restores_a_raw_tree_into_a_template(p: rpx.Parametrization, tmp_path: Path) -> None:
    raw = init(p, _params())
    eqx.tree_serialise_leaves(tmp_path / "raw.eqx", raw)
    _assert_restored(p, eqx.tree_deserialise_leaves(tmp_path / "raw.eqx", jax.eval_shape(p.init, _params())), _params())


def test_orbax_refuses_a_checkpoint_of_another_chain_and_names_the_path(
    orbax: ocp.StandardCheckpointer, tmp_path: Path
) -> None:
    params = {"w": np.eye(2, dtype=np.float32)}
    orbax.save(tmp_path / "raw", init(rpx.SpectralNorm(), params))
    orbax.wait_until_finished()
    template = jax.eval_shape(rpx.WeightNorm().init, params)
    with pytest.raises(ValueError, match="@weight_norm"):
        orbax.restore(tmp_path / "raw", template)


def test_a_plain_checkpoint_loads_into_a_chain_of_perturbations(key: Array) -> None:
    p = rpx.WeightDropout(0.1) >> rpx.VarNoise(0.1)
    plain = serialization.msgpack_restore(serialization.msgpack_serialize(_params()))
    p.check(plain, like=_params())
    _assert_identical(init(p, _params()), _params())
    _assert_identical(effective(p, plain, key), effective(p, _params(), key))
    _assert_identical(p.fold(plain), _params())


def test_a_checkpoint_made_before_noise_was_added_loads_after(key: Array) -> None:
    raw = pickle.loads(pickle.dumps(init(rpx.WeightNorm(), _params())))
    noisy = rpx.WeightNorm() >> rpx.VarNoise(0.1)
    noisy.check(raw, like=_params())
    _assert_identical(effective(noisy, raw, key), effective(noisy, init(noisy, _params()), key))


@every_chain
def test_a_parametrization_itself_goes_through_pickle(p: rpx.Parametrization) -> None:
    again = pickle.loads(pickle.dumps(p))
    assert again == p
    assert hash(again) == hash(p)


# Configuration. ---------------------------------------------------------------------------------------------------

CONFIGURATIONS = {
    '{"reparax": 1, "stages": []}': rpx.Chain(),
    '{"reparax": 1, "stages": [{"class": "reparax.WeightNorm"}]}': rpx.WeightNorm(),
    '{"reparax": 1, "stages": [{"class": "reparax.WeightNorm", "axis": 0, "where": "a/.*"}]}': rpx.WeightNorm(
        axis=0, where="a/.*"
    ),
    '{"reparax": 1, "stages": [{"class": "reparax.WeightNorm", "axis": [0, 1]}]}': rpx.WeightNorm(axis=(0, 1)),
    '{"reparax": 1, "stages": [{"class": "reparax.WeightNorm", "axis": null}]}': rpx.WeightNorm(axis=None),
    '{"reparax": 1, "stages": [{"class": "reparax.SpectralNorm", "n_steps": 3, "columns": 0}]}': rpx.SpectralNorm(
        3, columns=0
    ),
    '{"reparax": 1, "stages": [{"class": "reparax.LowRank", "rank": 2}]}': rpx.LowRank(2),
    '{"reparax": 1, "stages": [{"class": "reparax.VarNoise", "std": 0.075}]}': rpx.VarNoise(0.075),
    '{"reparax": 1, "stages": [{"class": "reparax.WeightDropout", "rate": 0.5, "broadcast": -1}]}': rpx.WeightDropout(
        0.5, broadcast=-1
    ),
    '{"reparax": 1, "stages": [{"class": "reparax.Positive", "where": ".*scale"}]}': rpx.Positive(where=".*scale"),
    '{"reparax": 1, "stages": [{"class": "reparax.Freeze"}]}': rpx.Freeze(),
    '{"reparax": 1, "stages": [{"class": "reparax.Cast", "dtype": "bfloat16"}]}': rpx.Cast(jnp.bfloat16),
    '{"reparax": 1, "stages": [{"class": "reparax.Tie", "ties": [["a", "b", null]]}]}': rpx.Tie({"a": "b"}),
    '{"reparax": 1, "stages": [{"class": "reparax.Tie", "ties": [["a", "b", {"function": "jax.numpy.transpose"}]]}]}': (
        rpx.Tie({"a": ("b", jnp.transpose)})
    ),
    '{"reparax": 1, "stages": [{"class": "reparax.WeightNorm"}, {"class": "reparax.VarNoise", "std": 0.1}]}': (
        rpx.WeightNorm() >> rpx.VarNoise(0.1)
    ),
}

every_configuration = pytest.mark.parametrize(
    ("text", "p"), CONFIGURATIONS.items(), ids=map(repr, CONFIGURATIONS.values())
)


@every_configuration
def test_a_configuration_is_written_as_this_text(text: str, p: rpx.Parametrization) -> None:
    assert p.to_json() == text


@every_configuration
def test_a_configuration_is_read_from_this_text(text: str, p: rpx.Parametrization) -> None:
    assert rpx.from_json(text) == p
    assert repr(rpx.from_json(text)) == repr(p)
    assert hash(rpx.from_json(text)) == hash(p)


OTHER_CONFIGURATIONS = {
    **CHAINS,
    "selected": rpx.WeightNorm(where=rpx.selected({"enc": {"kernel": True}, "dec": False})),
    "fused": rpx.VarNoise(0.3) >> rpx.VarNoise(0.4),
    "numpy_numbers": rpx.VarNoise(np.float32(0.5)) >> rpx.WeightDropout(np.float64(0.25)),
}


# The others are parts of these.
QUICK = [p for name, p in OTHER_CONFIGURATIONS.items() if name not in CHAINS or p in WHOLE]


@pytest.mark.parametrize("p", mostly_thorough(OTHER_CONFIGURATIONS.values(), *QUICK), ids=OTHER_CONFIGURATIONS)
def test_a_configuration_lies_beside_a_checkpoint(p: rpx.Parametrization, tmp_path: Path) -> None:
    (tmp_path / "chain.json").write_text(json.dumps({"model": "mlp", "parametrization": p.to_json()}))
    again = rpx.from_json(json.loads((tmp_path / "chain.json").read_text())["parametrization"])
    assert again == p
    _assert_identical(*jax.jit(lambda params: (again.init(params), p.init(params)))(_params()))


def test_the_configuration_tells_maps_apart_whose_raw_trees_are_alike() -> None:
    saved, other = rpx.Orthogonal("cayley"), rpx.Orthogonal("expm")
    params = {"w": np.eye(3, dtype=np.float32)}
    raw = jax.tree.map(lambda x: np.asarray(x) + KERNEL[:3], init(saved, params))
    other.check(raw, like=params)
    assert np.abs(np.asarray(other.fold(raw)["w"]) - np.asarray(saved.fold(raw)["w"])).max() > 0.1
    _assert_identical(rpx.from_json(saved.to_json()).fold(raw), saved.fold(raw))


STAGE = '{"reparax": 1, "stages": [%s]}'

UNREADABLE = {
    "empty": ("", "from_json needs a string from `p.to_json()` in format 1, but got ''."),
    "no_json": (
        "WeightNorm()",
        "from_json needs a string from `p.to_json()` in format 1, but got 'WeightNorm()'.",
    ),
    "list": ("[1, 2]", "from_json needs a string from `p.to_json()` in format 1, but got '[1, 2]'."),
    "null": ("null", "from_json needs a string from `p.to_json()` in format 1, but got 'null'."),
    "other_json": ('{"a": 1}', "from_json needs a string from `p.to_json()` in format 1, but got '{\"a\": 1}'."),
    "long": (
        json.dumps(list(range(100))),
        "from_json needs a string from `p.to_json()` in format 1, but got '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "
        "11, 12, 13, 14, 15, 16, 1'.",
    ),
    "later_format": (
        '{"reparax": 2, "stages": []}',
        'from_json needs a string from `p.to_json()` in format 1, but got \'{"reparax": 2, "stages": []}\'.',
    ),
    "no_stages": (
        '{"reparax": 1}',
        "from_json needs a string from `p.to_json()` in format 1, but got '{\"reparax\": 1}'.",
    ),
    "no_class": (
        STAGE % '{"std": 1.0}',
        "from_json needs a string from `p.to_json()` in format 1, but got "
        '\'{"reparax": 1, "stages": [{"std": 1.0}]}\'.',
    ),
    "unknown_class": (
        STAGE % '{"class": "reparax.Nope"}',
        "from_json found the stage 'reparax.Nope', but no class of that name is defined. This version of reparax has "
        "no such stage: exchange plain parameters, `p.fold(raw)`, with one that has.",
    ),
    "unknown_class_of_others": (
        STAGE % '{"class": "mine.Nope"}',
        "from_json found the stage 'mine.Nope', but no class of that name is defined. Import the module that defines "
        "it.",
    ),
    "unknown_argument": (
        STAGE % '{"class": "reparax.WeightNorm", "axes": 1}',
        "from_json cannot build reparax.WeightNorm from {'axes': 1}: it takes axis, detach, where, stacked, but not "
        "axes.",
    ),
    "missing_argument": (
        STAGE % '{"class": "reparax.VarNoise"}',
        "from_json cannot build reparax.VarNoise from {}: it needs std too.",
    ),
    "bad_type": (
        STAGE % '{"class": "reparax.VarNoise", "std": "much"}',
        "from_json cannot build reparax.VarNoise from {'std': 'much'}: "
        "VarNoise takes a real number or a real scalar array as std, but got 'much'.",
    ),
    "bad_value": (
        STAGE % '{"class": "reparax.VarNoise", "std": {"float": "inf"}}',
        "VarNoise got std=inf, but a standard deviation is a finite number.",
    ),
    "foreign_function": (
        STAGE % '{"class": "reparax.Tie", "ties": [["a", "b", {"function": "os.system"}]]}',
        "from_json takes public functions of jax.numpy, jax.nn, jax.lax and jax.scipy only, but got 'os.system'.",
    ),
    "unknown_function": (
        STAGE % '{"class": "reparax.Tie", "ties": [["a", "b", {"function": "jax.numpy.nope"}]]}',
        "from_json found the function 'jax.numpy.nope', but jax has no such function on arrays.",
    ),
}


@pytest.mark.parametrize(("text", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_text_that_is_no_configuration_is_refused(text: str, message: str) -> None:
    assert _message(ValueError, lambda: rpx.from_json(text)) == message


def everything(path: str, array: Array) -> bool:
    return True


def half(x: Array) -> Array:
    return x / 2


def test_a_predicate_has_no_form_in_json() -> None:
    text = _message(ValueError, (rpx.WeightNorm(where=everything) >> rpx.VarNoise(0.1)).to_json)
    assert text == (
        "WeightNorm(where=everything).to_json cannot write where=everything: only numbers, strings, stages and "
        "functions of jax have a form in JSON. Use a regular expression or `rpx.selected` as `where`, or keep "
        "this stage in code."
    )


def test_a_transform_of_ones_own_has_no_form_in_json() -> None:
    text = _message(ValueError, rpx.Tie({"a": ("b", half)}).to_json)
    assert text == (
        "Tie({'a': ('b', half)}).to_json cannot write ties=half: only numbers, strings, stages and functions "
        "of jax have a form in JSON. Use a regular expression or `rpx.selected` as `where`, or keep this stage "
        "in code."
    )


def test_a_traced_hyperparameter_has_no_form_in_json() -> None:
    text = _message(ValueError, lambda: jax.jit(lambda std: rpx.VarNoise(std).to_json())(0.1))
    assert text == (
        "VarNoise(<traced float32>).to_json cannot write std, which is traced. Write the chain for a known number, "
        "outside of the jitted function; a schedule stays in code."
    )


# What `check` says of a wrong tree. -------------------------------------------------------------------------------

CHECKED = rpx.WeightNorm() >> rpx.Freeze(where="emb/.*")
LIKE = {
    "enc": {"kernel": jnp.asarray(KERNEL), "bias": jnp.ones(3)},
    "emb": {"table": jnp.asarray(KERNEL.T)},
}


def _node(tree: Any) -> dict[str, Any]:
    return tree["enc"]["kernel"]["@weight_norm"]


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "missing_value": (
        lambda raw: _node(raw).pop("g"),
        "  enc/kernel/@weight_norm/g: missing, expected float32[1, 3]\n",
    ),
    "missing_fixed_value": (
        lambda raw: raw["emb"].update(table={"@freeze": {}}),
        "  emb/table/@freeze: unexpected, holds an empty node\n"
        "  emb/table/@freeze/@fixed/w/@weight_norm/g: missing, expected float32[1, 4]\n"
        "  emb/table/@freeze/@fixed/w/@weight_norm/v: missing, expected float32[3, 4]\n",
    ),
    "missing_parameter": (lambda raw: raw["enc"].pop("bias"), "  enc/bias: missing, expected float32[3]\n"),
    "none_for_a_parameter": (
        lambda raw: raw["enc"].update(bias=None),
        "  enc/bias: missing, expected float32[3]\n",
    ),
    "missing_module": (
        lambda raw: raw.pop("enc"),
        "  enc/bias: missing, expected float32[3]\n  enc/kernel: missing, expected @weight_norm\n",
    ),
    "unexpected_value": (
        lambda raw: _node(raw).update(h=jnp.ones(2)),
        "  enc/kernel/@weight_norm/h: unexpected, holds float32[2]\n",
    ),
    "unexpected_parameter": (
        lambda raw: raw["enc"].update(scale=jnp.ones(2)),
        "  enc/scale: unexpected, holds float32[2]\n",
    ),
    "unexpected_parametrized": (
        lambda raw: raw.update(dec={"@low_rank": {"u": jnp.ones(2)}}),
        "  dec: unexpected, holds @low_rank\n",
    ),
    "wrong_shape": (
        lambda raw: _node(raw).update(v=jnp.ones((3, 4))),
        "  enc/kernel/@weight_norm/v: expected float32[4, 3], got float32[3, 4]\n",
    ),
    "wrong_dtype": (
        lambda raw: _node(raw).update(v=jnp.ones((4, 3), jnp.bfloat16)),
        "  enc/kernel/@weight_norm/v: expected float32[4, 3], got bfloat16[4, 3]\n",
    ),
    "wrong_shape_of_a_plain_parameter": (
        lambda raw: raw["enc"].update(bias=jnp.ones(4)),
        "  enc/bias: expected float32[3], got float32[4]\n",
    ),
    "other_stage": (
        lambda raw: raw["enc"].update(kernel={"@spectral_norm": {"w": jnp.ones((4, 3))}}),
        "  enc/kernel: expected @weight_norm, got @spectral_norm\n",
    ),
    "other_stage_inside": (
        lambda raw: raw["emb"].update(table={"@freeze": {"@fixed": {"w": jnp.ones((3, 4))}}}),
        "  emb/table/@freeze/@fixed/w: unexpected, holds float32[3, 4]\n"
        "  emb/table/@freeze/@fixed/w/@weight_norm/g: missing, expected float32[1, 4]\n"
        "  emb/table/@freeze/@fixed/w/@weight_norm/v: missing, expected float32[3, 4]\n",
    ),
    "plain_leaf": (
        lambda raw: raw["enc"].update(kernel=jnp.ones((4, 3))),
        "  enc/kernel: expected @weight_norm, got a plain array\n",
    ),
    "several": (
        lambda raw: (_node(raw).pop("g"), raw["enc"].pop("bias"), raw.update(x=jnp.ones(1))),
        "  enc/bias: missing, expected float32[3]\n"
        "  enc/kernel/@weight_norm/g: missing, expected float32[1, 3]\n"
        "  x: unexpected, holds float32[1]\n",
    ),
    "everything_missing": (
        lambda raw: raw.clear(),
        "  emb/table: missing, expected @freeze\n"
        "  enc/bias: missing, expected float32[3]\n"
        "  enc/kernel: missing, expected @weight_norm\n",
    ),
}


@pytest.mark.parametrize(("change", "lines"), CHANGES.values(), ids=CHANGES)
def test_check_names_what_is_wrong(change: Callable[[Any], object], lines: str) -> None:
    raw = init(CHECKED, LIKE)
    change(raw)
    before = jax.tree.map(lambda x: x, raw)
    assert _message(ValueError, lambda: CHECKED.check(raw, like=LIKE)) == (
        "(WeightNorm() >> Freeze(where='emb/.*')).check found a raw tree that differs from `init(like)`:\n"
        f"{lines}"
        "Load it with the chain that made it, or start again with `raw = p.init(params)`."
    )
    _assert_identical(raw, before)


W = {"w": jnp.asarray(KERNEL)}


OTHERS: dict[str, tuple[rpx.Parametrization, Callable[[], Any], str, str]] = {
    "plain_tree": (rpx.WeightNorm(), lambda: W, "WeightNorm()", "  w: expected @weight_norm, got a plain array\n"),
    "other_chain": (
        rpx.WeightNorm(),
        lambda: zeros(rpx.SpectralNorm().init, W),
        "WeightNorm()",
        "  w: expected @weight_norm, got @spectral_norm\n",
    ),
    "longer_chain": (
        rpx.WeightNorm(),
        lambda: zeros((rpx.WeightNorm() >> rpx.LowRank(1)).init, W),
        "WeightNorm()",
        "  w: expected @weight_norm, got @low_rank\n",
    ),
    "shorter_chain": (
        rpx.WeightNorm() >> rpx.LowRank(1),
        lambda: zeros(rpx.LowRank(1).init, W),
        "(WeightNorm() >> LowRank(1))",
        "  w/@low_rank/u: unexpected, holds float32[4, 1]\n"
        "  w/@low_rank/u/@weight_norm/g: missing, expected float32[1, 1]\n"
        "  w/@low_rank/u/@weight_norm/v: missing, expected float32[4, 1]\n"
        "  w/@low_rank/v: unexpected, holds float32[1, 3]\n"
        "  w/@low_rank/v/@weight_norm/g: missing, expected float32[1, 3]\n"
        "  w/@low_rank/v/@weight_norm/v: missing, expected float32[1, 3]\n",
    ),
    "other_order": (
        rpx.WeightNorm() >> rpx.LowRank(1),
        lambda: zeros((rpx.LowRank(1) >> rpx.WeightNorm()).init, W),
        "(WeightNorm() >> LowRank(1))",
        "  w: expected @low_rank, got @weight_norm\n",
    ),
    "other_axis": (
        rpx.WeightNorm(),
        lambda: zeros(rpx.WeightNorm(axis=0).init, W),
        "WeightNorm()",
        "  w/@weight_norm/g: expected float32[1, 3], got float32[4, 1]\n",
    ),
    "other_rank": (
        rpx.LowRank(1),
        lambda: zeros(rpx.LowRank(2).init, W),
        "LowRank(1)",
        "  w/@low_rank/u: expected float32[4, 1], got float32[4, 2]\n"
        "  w/@low_rank/v: expected float32[1, 3], got float32[2, 3]\n",
    ),
    "raw_for_perturbations": (
        rpx.VarNoise(0.1),
        lambda: zeros(rpx.WeightNorm().init, W),
        "VarNoise(0.1)",
        "  w: expected a plain array, got @weight_norm\n",
    ),
    "unknown_marker": (
        rpx.WeightNorm(),
        lambda: {"w": {"@of_another_library": {"x": jnp.ones(2)}}},
        "WeightNorm()",
        "  w: expected @weight_norm, got @of_another_library\n",
    ),
}


@pytest.mark.parametrize(("p", "make", "who", "lines"), OTHERS.values(), ids=OTHERS)
def test_check_tells_the_raw_tree_of_another_chain(
    p: rpx.Parametrization, make: Callable[[], Any], who: str, lines: str
) -> None:
    assert _message(ValueError, lambda: p.check(make(), like=W)) == (
        f"{who}.check found a raw tree that differs from `init(like)`:\n"
        f"{lines}"
        "Load it with the chain that made it, or start again with `raw = p.init(params)`."
    )


@pytest.mark.parametrize(
    "like",
    [
        lambda params: params,
        lambda params: jax.eval_shape(lambda: params),
        lambda params: jax.tree.map(np.asarray, params),
        lambda params: jax.tree.map(jnp.zeros_like, params),
    ],
    ids=["params", "shapes", "numpy", "zeros"],
)
def test_check_takes_parameters_or_their_shapes(like: Callable[[Any], Any]) -> None:
    p = CHAINS["nested"]
    p.check(init(p, _params()), like=like(_params()))


def test_check_takes_leaves_that_are_no_arrays() -> None:
    params = {**W, "activation": jnp.tanh, "name": "dense", "none": None, "count": 3}
    rpx.WeightNorm().check(rpx.WeightNorm().init(params), like=params)


def test_check_takes_random_keys_of_a_model() -> None:
    params = {**W, "rngs": {"key": jax.random.key(0), "keys": jax.random.split(jax.random.key(0), 3)}}
    rpx.WeightNorm().check(rpx.WeightNorm().init(params), like=params)


def test_check_takes_model_parts_without_parameters() -> None:
    params = {**W, "dropout": {}, "pool": (), "layers": [{}, {}]}
    rpx.WeightNorm().check(rpx.WeightNorm().init(params), like=params)


def test_check_speaks_of_a_missing_empty_part_as_what_it_is() -> None:
    text = _message(ValueError, lambda: rpx.WeightNorm().check(rpx.WeightNorm().init(W), like={**W, "dropout": {}}))
    assert text == (
        "WeightNorm().check found a raw tree that differs from `init(like)`:\n  "
        "dropout: missing, expected an empty node\n"
        "Load it with the chain that made it, or start again with `raw = p.init(params)`."
    )
