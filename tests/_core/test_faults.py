"""The table of faults: whatever is wrong, it works as documented or says so in one clear sentence.

Each message names who and where, what was expected and what came, and what to do; no message prints whole arrays;
and after each error the inputs are bit for bit what they were.
"""

import functools
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import zeros
from grids import mostly_thorough
from jax import Array

import reparax as rpx

KERNEL = np.array([[1.0, -2.0], [3.0, 0.5], [-1.5, 2.0]], np.float32)


@functools.cache
def _params() -> dict[str, Any]:
    return {"dense": {"kernel": jnp.asarray(KERNEL), "bias": jnp.ones(2)}, "step": jnp.ones((2, 2), jnp.int32)}


@functools.cache
def _key() -> Array:
    return jax.random.key(0)


# How a fault is stated. -------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A call on some inputs, the error that it must raise, and the whole text of it."""

    call: Callable[..., object]
    inputs: Callable[[], tuple[Any, ...]]
    error: type[Exception]
    message: str


def _leaf_state(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(x.dtype), x.shape, np.asarray(jax.random.key_data(x)).tobytes()
    if isinstance(x, Array | np.ndarray):
        return str(x.dtype), x.shape, np.asarray(x).tobytes()
    return type(x).__name__, repr(x)


def _state(tree: Any) -> Any:
    """Everything that could have changed about ``tree``."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [_leaf_state(leaf) for leaf in leaves]


def _assert_raises(fault: Fault) -> None:
    inputs = fault.inputs()
    before = [_state(x) for x in inputs]
    with pytest.raises(fault.error) as caught:
        fault.call(*inputs)
    assert type(caught.value) is fault.error
    assert str(caught.value) == fault.message
    assert [_state(x) for x in inputs] == before


def table(faults: dict[str, Fault]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults.values(), ids=faults.keys())


# Leaves that a stage cannot take. ---------------------------------------------------------------------------------

STAGES = {
    "WeightNorm(where='x')": rpx.WeightNorm(where="x"),
    "SpectralNorm(where='x')": rpx.SpectralNorm(where="x"),
    "LowRank(1, where='x')": rpx.LowRank(1, where="x"),
    "Freeze(where='x')": rpx.Freeze(where="x"),
    "VarNoise(0.1, where='x')": rpx.VarNoise(0.1, where="x"),
    "WeightDropout(0.5, where='x')": rpx.WeightDropout(0.5, where="x"),
}

NO_NUMBERS: dict[str, tuple[Callable[[], Any], str]] = {
    "int": (lambda: jnp.ones((3, 2), jnp.int32), "int32"),
    "bool": (lambda: jnp.ones((3, 2), bool), "bool"),
    "uint8": (lambda: np.ones((3, 2), np.uint8), "uint8"),
    "key": (lambda: jax.random.key(1), "key<fry>"),
    "keys": (lambda: jax.random.split(jax.random.key(1), 6).reshape(3, 2), "key<fry>"),
}


@pytest.mark.parametrize(("make", "dtype"), NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize(("who", "p"), STAGES.items(), ids=STAGES)
def test_a_selected_leaf_that_is_no_floating_array_is_refused(
    who: str, p: rpx.Parametrization, make: Callable[[], Any], dtype: str
) -> None:
    message = f"{who}.init at 'x': expected a floating or complex array, got {dtype}. Leave it out with `where`."
    _assert_raises(Fault(p.init, lambda: ({"x": make(), "w": KERNEL},), ValueError, message))


@pytest.mark.parametrize(
    ("who", "p"),
    [
        ("Positive(where='x')", rpx.Positive(where="x")),
        ("Cast('bfloat16', where='x')", rpx.Cast("bfloat16", where="x")),
    ],
    ids=["positive", "cast"],
)
def test_a_complex_array_is_refused_by_stages_of_real_numbers(who: str, p: rpx.Parametrization) -> None:
    message = f"{who}.init at 'x': expected a floating array, got complex64. Leave it out with `where`."
    _assert_raises(Fault(p.init, lambda: ({"x": jnp.ones(2, jnp.complex64)},), ValueError, message))


def test_types_are_no_arrays():
    message = (
        "WeightNorm().init at 'w': expected an array, got its type. For types, call `jax.eval_shape(p.init, params)`."
    )
    _assert_raises(
        Fault(rpx.WeightNorm().init, lambda: ({"w": jax.ShapeDtypeStruct((3, 2), "f4")},), TypeError, message)
    )


NO_ARRAYS: dict[str, Any] = {"none": None, "number": 1.5, "int": 3, "flag": True, "text": "relu", "function": jnp.tanh}


@pytest.mark.parametrize("leaf", NO_ARRAYS.values(), ids=NO_ARRAYS)
@pytest.mark.parametrize(("who", "p"), STAGES.items(), ids=STAGES)
def test_a_selected_leaf_that_is_no_array_is_not_found(who: str, p: rpx.Parametrization, leaf: Any) -> None:
    message = (
        f"{who}.init selects nothing: no path matches 'x' as a whole. The nearest of 1 paths are 'w'. "
        "Correct the expression; `.*` matches any text."
    )
    _assert_raises(Fault(p.init, lambda: ({"x": leaf, "w": KERNEL},), ValueError, message))


OF_MANY_DIMENSIONS = {
    "weight_norm": Fault(
        rpx.WeightNorm(where=".*").init,
        lambda: ({"x": jnp.float32(1)},),
        ValueError,
        "WeightNorm(where='.*').init at 'x': axis=-1 is out of bounds for an array of shape (). Leave it out "
        "with `where`, or use a separate stage for it.",
    ),
    "weight_norm_axis": Fault(
        rpx.WeightNorm(axis=2).init,
        lambda: ({"x": KERNEL},),
        ValueError,
        "WeightNorm(axis=2).init at 'x': axis=2 is out of bounds for an array of shape (3, 2). Leave it out "
        "with `where`, or use a separate stage for it.",
    ),
    "weight_norm_axes": Fault(
        rpx.WeightNorm(axis=(0, -3)).init,
        lambda: ({"x": KERNEL},),
        ValueError,
        "WeightNorm(axis=(0, -3)).init at 'x': axis=(0, -3) is out of bounds for an array of shape (3, 2). "
        "Leave it out with `where`, or use a separate stage for it.",
    ),
    "spectral_norm": Fault(
        rpx.SpectralNorm(where=".*").init,
        lambda: ({"x": jnp.float32(1)},),
        ValueError,
        "SpectralNorm(where='.*').init at 'x': expected an array of two or more dimensions, got shape (). Leave it out "
        "with `where`.",
    ),
    "weight_dropout": Fault(
        lambda w: rpx.WeightDropout(0.5, broadcast=(1, 2)).apply(w, _key()),
        lambda: ({"x": KERNEL},),
        ValueError,
        "WeightDropout(0.5, broadcast=(1, 2)).apply at 'x': broadcast=(1, 2) is out of bounds for an array of "
        "shape (3, 2). Leave it out with `where`, or use a separate stage for it.",
    ),
    "low_rank_scalar": Fault(
        rpx.LowRank(1, where=".*").init,
        lambda: ({"x": jnp.float32(1)},),
        ValueError,
        "LowRank(1, where='.*').init at 'x': expected an array of two or more dimensions, got shape (). "
        "Leave it out with `where`.",
    ),
    "low_rank_vector": Fault(
        rpx.LowRank(1, where=".*").init,
        lambda: ({"x": jnp.ones(3)},),
        ValueError,
        "LowRank(1, where='.*').init at 'x': expected an array of two or more dimensions, got shape (3,). "
        "Leave it out with `where`.",
    ),
    "low_rank_empty": Fault(
        rpx.LowRank(1).init,
        lambda: ({"x": jnp.ones((0, 2))},),
        ValueError,
        "LowRank(1).init at 'x': expected 1 <= rank <= min(0, 2) = 0, got rank 1. "
        "Narrow the stage with `where`, or change `rank`.",
    ),
}


@table(OF_MANY_DIMENSIONS)
def test_an_array_of_too_few_dimensions_is_refused(fault: Fault) -> None:
    _assert_raises(fault)


@functools.partial(jax.jit, static_argnums=0)
def _reproduced(p: rpx.Parametrization, params: Any, key: Array | None = None) -> Any:
    """The effective tree of the start: of what is not traced, a constraint refuses bad numbers."""
    return p.apply(p.init(params), key)


@pytest.mark.parametrize("p", [rpx.VarNoise(0.0), rpx.Freeze(), rpx.Cast("float32"), rpx.Positive()], ids=repr)
def test_stages_of_single_numbers_take_scalars(p: rpx.Parametrization, key: Array) -> None:
    params = {"x": np.float32(1.5)}
    p.init(params)  # takes a number that it knows
    np.testing.assert_allclose(_reproduced(p, params, key)["x"], np.float32(1.5), rtol=1e-6)


EMPTY_CHAINS = [
    rpx.WeightNorm(),
    rpx.WeightNorm(axis=None),
    rpx.SpectralNorm(),
    rpx.Freeze(),
    rpx.Positive(),
    rpx.VarNoise(0.1),
    rpx.WeightDropout(0.5),
    rpx.WeightDropout(0.5, broadcast=-1),
    rpx.Cast("float32"),
]


@pytest.mark.parametrize("shape", mostly_thorough([(0, 2), (2, 0)], (0, 2)), ids=str)
@pytest.mark.parametrize("p", EMPTY_CHAINS, ids=repr)
def test_empty_arrays_go_through_with_their_gradients(
    p: rpx.Parametrization, shape: tuple[int, ...], key: Array
) -> None:
    def total(raw: Any) -> tuple[Array, Array]:
        w = p.apply(raw, key)["w"]
        return jnp.sum(w), w

    @jax.jit
    def steps(params: Any) -> tuple[Any, Array, Any]:
        raw = p.init(params)
        return *jax.grad(total, has_aux=True)(raw), p.update(raw)

    params = {"w": np.zeros(shape, np.float32)}
    p.init(params)  # takes an array that it knows
    gradient, w, updated = steps(params)
    assert w.shape == shape
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))
    assert updated.keys() == {"w"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    "p", [rpx.VarNoise(0.0), rpx.WeightDropout(0.0), rpx.Freeze(), rpx.Positive(), rpx.Cast("float32")], ids=repr
)
def test_one_bad_number_stays_alone_in_stages_of_single_numbers(p: rpx.Parametrization, bad: float, key: Array) -> None:
    kernel = np.abs(KERNEL)
    kernel[0, 0] = bad
    got = np.array(_reproduced(p, {"w": kernel, "v": np.abs(KERNEL)}, key)["w"])
    kernel[0, 0] = got[0, 0] = 0
    np.testing.assert_allclose(got, kernel, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_one_bad_number_stays_in_its_slice_of_weight_norm(bad: float) -> None:
    kernel = KERNEL.copy()
    kernel[0, 0] = bad
    got = np.asarray(_reproduced(rpx.WeightNorm(), {"w": kernel})["w"])
    assert not np.isfinite(got[:, 0]).any()
    np.testing.assert_allclose(got[:, 1], KERNEL[:, 1], rtol=1e-6)


@pytest.mark.parametrize("bad", mostly_thorough([np.nan, np.inf], np.nan), ids=str)
@pytest.mark.parametrize("p", [rpx.SpectralNorm(), rpx.LowRank(2)], ids=repr)
def test_one_bad_number_stays_in_its_matrix(p: rpx.Parametrization, bad: float) -> None:
    kernel = KERNEL.copy()
    kernel[0, 0] = bad
    good = KERNEL / np.linalg.norm(KERNEL, 2)
    got = jax.tree.map(np.asarray, _reproduced(p, {"bad": kernel, "good": good}))
    assert not np.isfinite(got["bad"]).any()
    np.testing.assert_allclose(got["good"], good, atol=1e-4)


OF_ANY_DTYPE = {
    "weight_norm": rpx.WeightNorm(),
    "spectral_norm": rpx.SpectralNorm(),
    "low_rank": rpx.LowRank(2),
    "freeze": rpx.Freeze(),
    "var_noise": rpx.VarNoise(0.0),
    "weight_dropout": rpx.WeightDropout(0.0),
}


@pytest.mark.parametrize("p", OF_ANY_DTYPE.values(), ids=OF_ANY_DTYPE)
def test_complex_arrays_are_reproduced(p: rpx.Parametrization, key: Array) -> None:
    kernel = (KERNEL + 1j * KERNEL[::-1]).astype(np.complex64)
    kernel /= np.linalg.norm(kernel, 2)
    got = _reproduced(p, {"w": kernel}, key)["w"]
    assert got.dtype == jnp.complex64
    np.testing.assert_allclose(got, kernel, atol=1e-4)


@pytest.mark.parametrize("p", [rpx.WeightNorm(), rpx.Freeze(), rpx.VarNoise(0.0), rpx.WeightDropout(0.0)], ids=repr)
def test_eight_bit_floats_are_reproduced(p: rpx.Parametrization, key: Array) -> None:
    got = np.asarray(_reproduced(p, {"w": KERNEL.astype(jnp.float8_e4m3fn)}, key)["w"])
    assert got.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(got.astype(np.float32), KERNEL)


# Trees that are not what the call takes. --------------------------------------------------------------------------

UNCALLED = "Call `raw = p.init(params)` once, with the whole chain, and pass `raw`."
OTHER_CHAIN = "Apply the chain that made it; `p.check(raw, like=params)` lists every difference."
ONCE = "Call `init` once, with the whole chain, and pass its result to `apply`."


def _raw() -> dict[str, Any]:
    return jax.jit(rpx.WeightNorm().init)(_params())


def _node(**values: Any) -> tuple[Any]:
    """A raw tree of weight norm with one parameter ``k``."""
    return ({"k": {"@weight_norm": {"g": jnp.ones((1, 2)), "v": jnp.asarray(KERNEL), **values}}},)


WRONG_TREES = {
    "double_init": Fault(
        rpx.WeightNorm().init,
        lambda: (_raw(),),
        ValueError,
        "WeightNorm().init takes the model's own parameters, but got a raw tree: it holds '@weight_norm' at "
        f"'dense/kernel'. {ONCE}",
    ),
    "double_init_of_a_chain": Fault(
        (rpx.WeightNorm() >> rpx.VarNoise(0.1)).init,
        lambda: (_raw(),),
        ValueError,
        "(WeightNorm() >> VarNoise(0.1)).init takes the model's own parameters, but got a raw tree: it holds "
        f"'@weight_norm' at 'dense/kernel'. {ONCE}",
    ),
    "raw_tree_into_init_of_noise": Fault(
        rpx.VarNoise(0.1).init,
        lambda: (_raw(),),
        ValueError,
        "VarNoise(0.1).init takes the model's own parameters, but got a raw tree: it holds '@weight_norm' at "
        f"'dense/kernel'. {ONCE}",
    ),
    "raw_tree_of_a_tie_into_init": Fault(
        rpx.Chain().init,
        lambda: ({"a": jnp.ones(2), "b": {"@tie": {}}},),
        ValueError,
        f"Chain().init takes the model's own parameters, but got a raw tree: it holds '@tie' at 'b'. {ONCE}",
    ),
    "plain_tree_into_apply": Fault(
        rpx.WeightNorm().apply,
        lambda: (_params(),),
        ValueError,
        f"WeightNorm().apply got a tree that never went through init: it holds no '@weight_norm'. {UNCALLED}",
    ),
    "plain_tree_into_apply_of_a_chain": Fault(
        (rpx.WeightNorm() >> rpx.VarNoise(0.1)).apply,
        lambda: (_params(), _key()),
        ValueError,
        f"WeightNorm().apply got a tree that never went through init: it holds no '@weight_norm'. {UNCALLED}",
    ),
    "plain_tree_into_update": Fault(
        rpx.SpectralNorm().update,
        lambda: (_params(),),
        ValueError,
        f"SpectralNorm().update got a tree that never went through init: it holds no '@spectral_norm'. {UNCALLED}",
    ),
    "plain_tree_into_apply_of_a_tie": Fault(
        rpx.Tie({"b": "a"}).apply,
        lambda: ({"a": KERNEL, "b": KERNEL},),
        ValueError,
        f"Tie({{'b': 'a'}}).apply got a tree that never went through init: 'b' holds a value of its own. {UNCALLED}",
    ),
    "raw_tree_into_apply_of_noise": Fault(
        rpx.VarNoise(0.1).apply,
        lambda: (_raw(), _key()),
        ValueError,
        "VarNoise(0.1).apply does not know '@weight_norm' at 'dense/kernel': another chain made this raw tree. "
        f"{OTHER_CHAIN}",
    ),
    "raw_tree_into_apply_of_the_identity": Fault(
        rpx.Chain().apply,
        lambda: (_raw(),),
        ValueError,
        "Chain().apply does not know '@weight_norm' at 'dense/kernel': another chain made this raw tree. "
        f"{OTHER_CHAIN}",
    ),
    "raw_tree_of_another_stage": Fault(
        rpx.SpectralNorm().apply,
        lambda: (_raw(),),
        ValueError,
        "SpectralNorm().apply found no '@spectral_norm' in a raw tree that holds '@weight_norm' at 'dense/kernel': "
        f"another chain made this raw tree. {OTHER_CHAIN}",
    ),
    "raw_tree_of_a_longer_chain": Fault(
        rpx.WeightNorm().apply,
        lambda: (zeros((rpx.WeightNorm() >> rpx.LowRank(1)).init, _params()),),
        ValueError,
        "WeightNorm().apply does not know '@low_rank' at 'dense/kernel': another chain made this raw tree. "
        f"{OTHER_CHAIN}",
    ),
    "raw_tree_of_a_shorter_chain": Fault(
        (rpx.WeightNorm() >> rpx.WeightNorm()).apply,
        lambda: (_raw(),),
        ValueError,
        f"WeightNorm().apply got a tree that never went through init: it holds no '@weight_norm'. {UNCALLED}",
    ),
    "raw_tree_of_another_order": Fault(
        (rpx.WeightNorm() >> rpx.LowRank(1)).apply,
        lambda: (zeros((rpx.LowRank(1) >> rpx.WeightNorm()).init, _params()),),
        ValueError,
        "WeightNorm().apply does not know the values under '@weight_norm' at 'dense/kernel': another chain made this "
        "raw tree. "
        f"{OTHER_CHAIN}",
    ),
    "g_of_shape_1_1": Fault(
        rpx.WeightNorm().apply,
        lambda: _node(g=jnp.ones((1, 1))),
        ValueError,
        "WeightNorm().apply at 'k': expected g of shape (1, 2), got (1, 1): another chain made this raw tree. "
        f"{OTHER_CHAIN}",
    ),
    "g_of_another_axis": Fault(
        rpx.WeightNorm().apply,
        lambda: (zeros(rpx.WeightNorm(axis=0).init, {"k": np.ones((2, 2), np.float32)}),),
        ValueError,
        "WeightNorm().apply at 'k': expected g of shape (1, 2), got (2, 1): another chain made this raw tree. "
        f"{OTHER_CHAIN}",
    ),
    "number_in_a_marker": Fault(
        rpx.WeightNorm().apply,
        lambda: _node(v=1.0),
        ValueError,
        f"WeightNorm().apply at 'k': expected an array as 'v', got float: another chain made this raw tree. "
        f"{OTHER_CHAIN}",
    ),
    "none_in_a_marker": Fault(
        rpx.WeightNorm().apply,
        lambda: _node(v=None),
        ValueError,
        "WeightNorm().apply at 'k': expected an array as 'v', got NoneType: this is one half of `rpx.partition`. Join "
        "both halves with `rpx.combine` first.",
    ),
    "missing_value": Fault(
        rpx.WeightNorm().apply,
        lambda: ({"k": {"@weight_norm": {"g": jnp.ones((1, 2))}}},),
        ValueError,
        "WeightNorm().apply at 'k': no value 'v' under the marker. Restore the whole raw tree.",
    ),
    "no_value_at_all": Fault(
        rpx.WeightNorm().apply,
        lambda: ({"k": {"@weight_norm": {}}},),
        ValueError,
        "WeightNorm().apply at 'k': no value 'g' under the marker. Restore the whole raw tree.",
    ),
    "missing_fixed_value": Fault(
        rpx.SpectralNorm().apply,
        lambda: ({"k": {"@spectral_norm": {"w": KERNEL}}},),
        ValueError,
        "SpectralNorm().apply at 'k': no value 'u' under the marker. Restore the whole raw tree.",
    ),
    "array_for_a_marker": Fault(
        rpx.WeightNorm().apply,
        lambda: ({"k": {"@weight_norm": jnp.asarray(KERNEL)}},),
        ValueError,
        f"WeightNorm().apply at 'k': expected a dict of values under '@weight_norm', got float32[3, 2]: another "
        f"chain made this raw "
        f"tree. {OTHER_CHAIN}",
    ),
    "array_for_the_fixed_values": Fault(
        rpx.SpectralNorm().apply,
        lambda: ({"k": {"@spectral_norm": {"w": KERNEL, "@fixed": jnp.ones(3)}}},),
        ValueError,
        f"SpectralNorm().apply at 'k': expected a dict of values under '@fixed', got float32[3]: another chain "
        f"made this raw tree. "
        f"{OTHER_CHAIN}",
    ),
    "unknown_marker": Fault(
        rpx.VarNoise(0.1).apply,
        lambda: ({"k": {"@of_another_library": {"x": KERNEL}}}, _key()),
        ValueError,
        "The raw tree holds '@of_another_library' at 'k', but no stage of that kind is defined. "
        "Import the module that defines it.",
    ),
    "unknown_marker_in_labels": Fault(
        rpx.labels,
        lambda: ({"k": {"@of_another_library": {"x": KERNEL}}},),
        ValueError,
        "The raw tree holds '@of_another_library' at 'k', but no stage of that kind is defined. "
        "Import the module that defines it.",
    ),
    "unknown_marker_beside_a_known_one": Fault(
        rpx.WeightNorm().apply,
        lambda: ({**_node()[0], "l": {"@of_another_library": {"x": KERNEL}}},),
        ValueError,
        "The raw tree holds '@of_another_library' at 'l', but no stage of that kind is defined. "
        "Import the module that defines it.",
    ),
}


@table(WRONG_TREES)
def test_a_tree_that_the_call_does_not_take_is_refused(fault: Fault) -> None:
    _assert_raises(fault)


# Selections. ------------------------------------------------------------------------------------------------------


def nothing(path: str, array: Array) -> bool:
    return False


SELECTIONS = {
    "misspelt": Fault(
        rpx.WeightNorm(where="dense/kernl").init,
        lambda: (_params(),),
        ValueError,
        "WeightNorm(where='dense/kernl').init selects nothing: no path matches 'dense/kernl' as a whole. The "
        "nearest of 3 paths are 'dense/kernel', 'dense/bias', 'step'. Correct the expression; `.*` matches any "
        "text.",
    ),
    "part_of_a_path": Fault(
        rpx.WeightNorm(where="kernel").init,
        lambda: (_params(),),
        ValueError,
        "WeightNorm(where='kernel').init selects nothing: no path matches 'kernel' as a whole, but the end of 1 does, "
        "such as 'dense/kernel'. Write '.*/kernel' for these.",
    ),
    "start_of_a_path": Fault(
        rpx.VarNoise(0.1, where="dense").apply,
        lambda: (_params(), _key()),
        ValueError,
        "VarNoise(0.1, where='dense').apply selects nothing: 'dense' is no array, but 2 paths begin with it. Write "
        "'dense/.*' for these.",
    ),
    "predicate": Fault(
        rpx.WeightNorm(where=nothing).init,
        lambda: (_params(),),
        ValueError,
        "WeightNorm(where=nothing).init selects nothing: the predicate is false for all 3 paths ('dense/bias', "
        "'dense/kernel', 'step'). Print the paths that it gets.",
    ),
    "selected": Fault(
        rpx.WeightNorm(where=rpx.selected({"dense": {"kernl": True}})).init,
        lambda: (_params(),),
        ValueError,
        "WeightNorm(where=selected({'dense/kernl': True})).init got True at 'dense/kernl' in a tree of booleans, but "
        "the tree has no such path. The nearest are 'dense/kernel', 'dense/bias', 'step'. Make the booleans from the "
        "same parameters.",
    ),
    "selected_in_part": Fault(
        rpx.VarNoise(0.1, where=rpx.selected({"dense": {"kernel": True}, "norm": True})).apply,
        lambda: (_params(), _key()),
        ValueError,
        "VarNoise(0.1, where=selected({'dense/kernel': True, 'norm': True})).apply got True at 'norm' in a tree of "
        "booleans, but the tree has no such path. The nearest are 'dense/kernel', 'dense/bias', 'step'. Make the "
        "booleans from the same parameters.",
    ),
    "all_but_a_misspelt_path": Fault(
        rpx.VarNoise(0.1, where=rpx.all_but("dense/bias", "dense/kernl")).apply,
        lambda: (_params(), _key()),
        ValueError,
        "VarNoise(0.1, where=all_but('dense/bias', 'dense/kernl')).apply leaves nothing out by 'dense/kernl': no path "
        "matches 'dense/kernl' as a whole. The nearest of 3 paths are 'dense/kernel', 'dense/bias', 'step'. Correct "
        "the expression; `.*` matches any text.",
    ),
    "all_but_a_folder": Fault(
        rpx.WeightNorm(where=rpx.all_but("dense")).init,
        lambda: (_params(),),
        ValueError,
        "WeightNorm(where=all_but('dense')).init leaves nothing out by 'dense': 'dense' is no array, but 2 paths begin "
        "with it. Write 'dense/.*' for these.",
    ),
    "default": Fault(
        rpx.WeightNorm().init,
        lambda: ({"bias": jnp.ones(2)},),
        ValueError,
        "WeightNorm().init selects nothing: its default takes none of the 1 arrays ('bias'). Select some with `where`.",
    ),
    "default_of_many": Fault(
        rpx.LowRank(1).init,
        lambda: ({name: jnp.ones(2) for name in "abcde"},),
        ValueError,
        "LowRank(1).init selects nothing: its default takes none of the 5 arrays ('a', 'b', 'c', ...). Select "
        "some with `where`.",
    ),
    "no_arrays": Fault(
        rpx.VarNoise(0.1).init,
        lambda: ({"activation": "relu", "none": None},),
        ValueError,
        "VarNoise(0.1).init selects nothing: the tree holds no array. Pass the model's parameters.",
    ),
    "empty_tree": Fault(
        rpx.VarNoise(0.1).init,
        lambda: ({},),
        ValueError,
        "VarNoise(0.1).init selects nothing: the tree holds no array. Pass the model's parameters.",
    ),
    "none_for_a_tree": Fault(
        rpx.WeightNorm(where=".*").init,
        lambda: (None,),
        ValueError,
        "WeightNorm(where='.*').init selects nothing: the tree holds no array. Pass the model's parameters.",
    ),
    "int_leaf": Fault(
        rpx.WeightNorm(where=".*").init,
        lambda: ({"step": jnp.ones((2, 2), jnp.int32), "w": KERNEL},),
        ValueError,
        "WeightNorm(where='.*').init at 'step': expected a floating or complex array, got int32. "
        "Leave it out with `where`.",
    ),
}


@table(SELECTIONS)
def test_a_selection_that_matches_nothing_or_too_much_is_refused(fault: Fault) -> None:
    _assert_raises(fault)


def test_a_boolean_tree_that_names_a_parameter_leaves_its_auxiliary_values_alone(key: Array) -> None:
    kernel_alone = rpx.selected({"dense": {"kernel": True, "bias": False}})
    raw = rpx.WeightNorm().init(_params())["dense"]["kernel"]["@weight_norm"]
    frozen = (rpx.Freeze(where=kernel_alone) >> rpx.WeightNorm()).init(_params())
    assert rpx.labels(frozen)["dense"]["kernel"] == {
        "@weight_norm": {"g": "free", "v": {"@freeze": {"@fixed": {"w": "fixed"}}}}
    }
    np.testing.assert_array_equal(frozen["dense"]["kernel"]["@weight_norm"]["g"], raw["g"])


AS_WHERE = "takes a regular expression for the whole path or a predicate (path, array) -> bool."
TREE_AS_WHERE = f"{AS_WHERE} Wrap a tree of booleans in `rpx.selected`."

CONSTRUCTORS = {
    "bool_tree_as_where": Fault(
        lambda where: rpx.VarNoise(0.1, where=where),
        lambda: ({"dense": True},),
        TypeError,
        f"VarNoise got where={{'dense': True}} of type dict, but {TREE_AS_WHERE}",
    ),
    "bool_as_where": Fault(
        lambda where: rpx.WeightNorm(where=where),
        lambda: (True,),
        TypeError,
        f"WeightNorm got where=True of type bool, but {TREE_AS_WHERE}",
    ),
    "list_as_where": Fault(
        lambda where: rpx.Freeze(where=where),
        lambda: (["a", "b"],),
        TypeError,
        f"Freeze got where=['a', 'b'] of type list, but {AS_WHERE} Join several by `|`: 'a|b'.",
    ),
    "pattern_as_where": Fault(
        lambda where: rpx.Freeze(where=where),
        lambda: (re.compile("a"),),
        TypeError,
        f"Freeze got where=re.compile('a') of type Pattern, but {AS_WHERE} Pass its text, 'a'.",
    ),
    "masks_as_where": Fault(
        lambda where: rpx.VarNoise(0.1, where=where),
        lambda: ({"dense": jnp.ones((20, 30), bool)},),
        TypeError,
        f"VarNoise got where of type dict, but {TREE_AS_WHERE}",
    ),
    "array_as_where": Fault(
        lambda where: rpx.VarNoise(0.1, where=where),
        lambda: (np.ones((20, 30), bool),),
        TypeError,
        f"VarNoise got where of type ndarray, but {TREE_AS_WHERE}",
    ),
    "invalid_regex": Fault(
        lambda where: rpx.WeightNorm(where=where),
        lambda: ("dense/[",),
        ValueError,
        "WeightNorm got where='dense/[', which is not a regular expression: unterminated character set at position 6.",
    ),
    "glob": Fault(
        lambda where: rpx.WeightNorm(where=where),
        lambda: ("*/kernel",),
        ValueError,
        "WeightNorm got where='*/kernel', which is not a regular expression: nothing to repeat at position 0. Any text "
        "is `.*`, so write '.*/kernel'.",
    ),
    "selected_of_ints": Fault(
        rpx.selected,
        lambda: ({"a": {"b": 1, "c": True}},),
        TypeError,
        "selected takes a tree of booleans, but got 1 at 'a/b'. Write True or False.",
    ),
    "selected_of_text": Fault(
        rpx.selected,
        lambda: ("kernel",),
        TypeError,
        "selected takes a tree of booleans, but got 'kernel' at ''. Write True or False.",
    ),
    "selected_of_masks": Fault(
        rpx.selected,
        lambda: ({"a": jnp.ones((20, 30), bool)},),
        TypeError,
        "selected takes a tree of booleans, but got bool[20, 30] at 'a'. Write True or False.",
    ),
    "std_nan": Fault(
        rpx.VarNoise,
        lambda: (float("nan"),),
        ValueError,
        "VarNoise got std=nan, but a standard deviation is a finite number.",
    ),
    "std_inf": Fault(
        rpx.VarNoise,
        lambda: (np.float32("inf"),),
        ValueError,
        "VarNoise got std=inf, but a standard deviation is a finite number.",
    ),
    "std_array": Fault(
        rpx.VarNoise,
        lambda: (jnp.ones(2),),
        TypeError,
        "VarNoise takes a real number or a real scalar array as std, but got an array of dtype float32 and shape (2,).",
    ),
    "std_text": Fault(
        rpx.VarNoise,
        lambda: ("0.1",),
        TypeError,
        "VarNoise takes a real number or a real scalar array as std, but got '0.1'.",
    ),
    "std_none": Fault(
        rpx.VarNoise,
        lambda: (None,),
        TypeError,
        "VarNoise takes a real number or a real scalar array as std, but got None.",
    ),
    "std_complex": Fault(
        rpx.VarNoise,
        lambda: (1j,),
        TypeError,
        "VarNoise takes a real number or a real scalar array as std, but got 1j.",
    ),
    **{
        f"rate_{value}": Fault(
            rpx.WeightDropout,
            functools.partial(tuple, [value]),
            ValueError,
            f"WeightDropout got rate={value}, but a rate is at least 0 and less than 1. "
            "It is the share of weights to drop, not to keep.",
        )
        for value in [1.5, -0.1, 1.0, float("nan")]
    },
    "rate_array": Fault(
        rpx.WeightDropout,
        lambda: (np.ones((1, 1)),),
        TypeError,
        "WeightDropout takes a real number or a real scalar array as rate, but got an array of dtype float64 and shape "
        "(1, 1).",
    ),
    "broadcast_none": Fault(
        lambda broadcast: rpx.WeightDropout(0.5, broadcast=broadcast),
        lambda: (None,),
        TypeError,
        "WeightDropout takes an axis or a tuple of axes as broadcast, but got None.",
    ),
    "axis_bool": Fault(
        lambda axis: rpx.WeightNorm(axis=axis),
        lambda: (True,),
        TypeError,
        "WeightNorm takes an axis or a tuple of axes as axis, but got True.",
    ),
    "no_steps": Fault(
        rpx.SpectralNorm,
        lambda: (0,),
        ValueError,
        "SpectralNorm got n_steps=0, but takes at least 1.",
    ),
    "half_a_step": Fault(
        rpx.SpectralNorm,
        lambda: (0.5,),
        TypeError,
        "SpectralNorm takes an integer as n_steps, but got 0.5.",
    ),
    "dtype_unknown": Fault(
        rpx.Cast,
        lambda: ("bflot16",),
        TypeError,
        "Cast takes a floating dtype or its name, but got 'bflot16'.",
    ),
    "dtype_of_ints": Fault(
        rpx.Cast,
        lambda: (jnp.int8,),
        TypeError,
        "Cast takes a floating dtype or its name, but got 'int8'.",
    ),
    "dtype_none": Fault(
        rpx.Cast,
        lambda: (None,),
        TypeError,
        "Cast takes a floating dtype or its name, but got None.",
    ),
    **{
        f"rank_{rank!r}": Fault(
            rpx.LowRank,
            functools.partial(tuple, [rank]),
            TypeError,
            f"LowRank takes an integer as rank, but got {rank!r}.",
        )
        for rank in [1.0, "2", None, True]
    },
    **{
        f"rank_{rank}": Fault(
            rpx.LowRank, lambda rank=rank: (rank,), ValueError, f"LowRank got rank={rank}, but takes at least 1."
        )
        for rank in [0, -1]
    },
    "rank_too_big": Fault(
        rpx.matrices.FixedRank(3).init,
        lambda: (_params(),),
        ValueError,
        "FixedRank(3).init at 'dense/kernel': expected 1 <= rank <= min(3, 2) = 2, got rank 3. "
        "Narrow the stage with `where`, or change `rank`.",
    ),
    "rank_too_big_for_a_stack": Fault(
        rpx.matrices.FixedRank(3, stacked=0).init,
        lambda: ({"w": jnp.ones((5, 3, 2))},),
        ValueError,
        "FixedRank(3, stacked=0).init at 'w': expected 1 <= rank <= min(3, 2) = 2, got rank 3. "
        "Narrow the stage with `where`, or change `rank`. The array is one of those along stacked=0.",
    ),
    "shift_by_a_number": Fault(
        lambda p: p >> 3,
        lambda: (rpx.WeightNorm(),),
        TypeError,
        "WeightNorm() >> 3: expected a stage, but got 3 of type int. Join stages alone: "
        "`rpx.WeightNorm() >> rpx.VarNoise(0.1)`.",
    ),
    "number_shifted": Fault(
        lambda p: 3 >> p,
        lambda: (rpx.WeightNorm(),),
        TypeError,
        "3 >> WeightNorm(): expected a stage, but got 3 of type int. Join stages alone: "
        "`rpx.WeightNorm() >> rpx.VarNoise(0.1)`.",
    ),
    "shift_by_a_class": Fault(
        lambda p: p >> rpx.Freeze,
        lambda: (rpx.WeightNorm(),),
        TypeError,
        "WeightNorm() >> Freeze: expected a stage, but got the class Freeze. Write `Freeze()`.",
    ),
    "chain_of_numbers": Fault(
        rpx.Chain,
        lambda: ((rpx.WeightNorm(), 3),),
        TypeError,
        "Chain takes parametrizations, but got 3 of type int. Join stages alone: "
        "`rpx.WeightNorm() >> rpx.VarNoise(0.1)`.",
    ),
    "chain_of_one_without_a_tuple": Fault(
        rpx.Chain,
        lambda: (rpx.WeightNorm(),),
        TypeError,
        "Chain takes a tuple of parametrizations, but got WeightNorm() of type WeightNorm. Write `a >> b`, or "
        "`rpx.Chain((a, b))`.",
    ),
}


@table(CONSTRUCTORS)
def test_an_argument_that_makes_no_sense_is_refused(fault: Fault) -> None:
    _assert_raises(fault)


@pytest.mark.parametrize("value", [jnp.int32(0), jnp.float32(0.5), jnp.bfloat16(0.5)], ids=["int", "float", "half"])
def test_traced_hyperparameters_of_any_real_dtype_are_taken(value: Array, key: Array) -> None:
    def effective(x: Any) -> list[Array]:
        return [stage(x).apply({"w": jnp.asarray(KERNEL)}, key)["w"] for stage in (rpx.VarNoise, rpx.WeightDropout)]

    for got, want in zip(jax.jit(effective)(value), effective(float(value)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


# Keys. ------------------------------------------------------------------------------------------------------------

NOISE = rpx.VarNoise(0.1)
MAKE_ONE = "Make one with `jax.random.key(seed)`."

KEYS = {
    "none": Fault(
        NOISE.apply,
        lambda: (_params(), None),
        ValueError,
        "VarNoise(0.1).apply draws random numbers, so it needs a key, but got key=None. "
        "Pass a key, or evaluate with `p.deterministic`.",
    ),
    "none_for_a_chain": Fault(
        (rpx.WeightNorm() >> NOISE).apply,
        lambda: (_raw(), None),
        ValueError,
        "(WeightNorm() >> VarNoise(0.1)).apply draws random numbers, so it needs a key, but got key=None. "
        "Pass a key, or evaluate with `p.deterministic`.",
    ),
    "int": Fault(
        NOISE.apply,
        lambda: (_params(), 0),
        TypeError,
        f"VarNoise(0.1).apply needs a PRNG key, but got 0 of type int. {MAKE_ONE}",
    ),
    "numpy_int": Fault(
        NOISE.apply,
        lambda: (_params(), np.int32(3)),
        TypeError,
        f"VarNoise(0.1).apply needs a PRNG key, but got np.int32(3) of type int32. {MAKE_ONE}",
    ),
    "raw_tree": Fault(
        lambda raw, key: NOISE.apply(key, raw),
        lambda: (_params(), _key()),
        TypeError,
        f"VarNoise(0.1).apply needs a PRNG key, but got a value of type dict. {MAKE_ONE}",
    ),
    "batch": Fault(
        NOISE.apply,
        lambda: (_params(), jax.random.split(_key(), 4)),
        ValueError,
        "VarNoise(0.1).apply takes one key, but got a batch of keys of shape (4,). "
        "Map over them: `jax.vmap(p.apply, in_axes=(None, 0))(raw, keys)`.",
    ),
    "legacy_batch": Fault(
        NOISE.apply,
        lambda: (_params(), jnp.zeros((3, 2), jnp.uint32)),
        ValueError,
        "VarNoise(0.1).apply takes one key, but got a batch of keys of shape (3,). "
        "Map over them: `jax.vmap(p.apply, in_axes=(None, 0))(raw, keys)`.",
    ),
    "batch_for_init": Fault(
        rpx.SpectralNorm().init,
        lambda: (_params(), jax.random.split(_key(), 4)),
        ValueError,
        "SpectralNorm().init takes one key, but got a batch of keys of shape (4,). "
        "Map over them: `jax.vmap(p.init, in_axes=(None, 0))(params, keys)`.",
    ),
    "batch_for_update": Fault(
        rpx.SpectralNorm().update,
        lambda: (rpx.SpectralNorm().init(_params()), jax.random.split(_key(), 4)),
        ValueError,
        "SpectralNorm().update takes one key, but got a batch of keys of shape (4,). "
        "Map over them: `jax.vmap(p.update, in_axes=(None, 0))(raw, keys)`.",
    ),
    "float_array": Fault(
        NOISE.apply,
        lambda: (_params(), jnp.ones(2)),
        TypeError,
        f"VarNoise(0.1).apply needs a PRNG key, but got an array of dtype float32 and shape (2,). {MAKE_ONE}",
    ),
    "int32_array": Fault(
        NOISE.apply,
        lambda: (_params(), jnp.zeros(2, jnp.int32)),
        TypeError,
        f"VarNoise(0.1).apply needs a PRNG key, but got an array of dtype int32 and shape (2,). {MAKE_ONE}",
    ),
    "uint32_scalar": Fault(
        NOISE.apply,
        lambda: (_params(), jnp.uint32(2)),
        TypeError,
        f"VarNoise(0.1).apply needs a PRNG key, but got an array of dtype uint32 and shape (). {MAKE_ONE}",
    ),
    "uint32_of_three": Fault(
        NOISE.apply,
        lambda: (_params(), jnp.zeros(3, jnp.uint32)),
        TypeError,
        f"VarNoise(0.1).apply needs a PRNG key, but got an array of dtype uint32 and shape (3,). {MAKE_ONE}",
    ),
    "int_for_init": Fault(
        rpx.WeightNorm().init,
        lambda: (_params(), 0),
        TypeError,
        f"WeightNorm().init needs a PRNG key, but got 0 of type int. {MAKE_ONE}",
    ),
}


@table(KEYS)
def test_what_is_no_single_key_is_refused(fault: Fault) -> None:
    _assert_raises(fault)


@pytest.mark.parametrize("key", [lambda: jax.random.PRNGKey(0), lambda: np.zeros(2, np.uint32)], ids=["jax", "numpy"])
def test_legacy_keys_draw_what_typed_keys_draw(key: Callable[[], Any]) -> None:
    np.testing.assert_array_equal(
        NOISE.apply(_params(), key())["dense"]["kernel"], NOISE.apply(_params(), jax.random.key(0))["dense"]["kernel"]
    )


# Paths. -----------------------------------------------------------------------------------------------------------

TWO_LEAVES = "Rename one of them; the usual cause is a key with '/' in it, or a number and the same number as text."

PATHS = {
    "slash": Fault(
        rpx.WeightNorm().init,
        lambda: ({"a/b": KERNEL, "a": {"b": KERNEL}},),
        ValueError,
        f"Two leaves of the tree have the path 'a/b'. {TWO_LEAVES}",
    ),
    "slash_in_apply": Fault(
        NOISE.apply,
        lambda: ({"a/b": KERNEL, "a": {"b": KERNEL}}, _key()),
        ValueError,
        f"Two leaves of the tree have the path 'a/b'. {TWO_LEAVES}",
    ),
    "slash_in_labels": Fault(
        rpx.labels,
        lambda: ({"a/b": KERNEL, "a": {"b": KERNEL}},),
        ValueError,
        f"Two leaves of the tree have the path 'a/b'. {TWO_LEAVES}",
    ),
    "number_beside_its_text": Fault(
        rpx.Freeze().init,
        lambda: ({"layers": OrderedDict([(0, KERNEL), ("0", KERNEL)])},),
        ValueError,
        f"Two leaves of the tree have the path 'layers/0'. {TWO_LEAVES}",
    ),
    "key_that_looks_like_a_marker": Fault(
        rpx.WeightNorm().init,
        lambda: ({"scope": {"@kernel": KERNEL}},),
        ValueError,
        "WeightNorm().init takes the model's own parameters, but got a raw tree: it holds '@kernel' at 'scope'. "
        f"{ONCE}",
    ),
}


@table(PATHS)
def test_paths_that_cannot_be_told_apart_are_refused(fault: Fault) -> None:
    _assert_raises(fault)


def test_a_slash_or_a_dot_or_an_at_sign_inside_a_key_works_where_it_is_unique(key: Array) -> None:
    params = {"mlp/~/linear": jnp.asarray(KERNEL), "a.b": {"c": jnp.asarray(KERNEL)}, "a@b": jnp.asarray(KERNEL)}
    p = rpx.WeightNorm(where=r"mlp/~/linear|a\.b/c|a@b") >> rpx.VarNoise(0.0)
    for got in jax.tree.leaves(p.apply(p.init(params), key)):
        np.testing.assert_allclose(got, KERNEL, rtol=1e-6)


# Ties. ------------------------------------------------------------------------------------------------------------

TIE = rpx.Tie({"b": "a"})


def _pair(a: Any = KERNEL, b: Any = KERNEL) -> tuple[Any]:
    return ({"a": a, "b": b},)


TIES = {
    "loop": Fault(
        rpx.Tie,
        lambda: ({"a": "b", "b": "a"},),
        ValueError,
        "Tie got a loop: a -> b -> a. Leave one of them untied, as the owner.",
    ),
    "loop_behind_a_tie": Fault(
        rpx.Tie,
        lambda: ({"a": "b", "b": "c", "c": ("b", jnp.transpose)},),
        ValueError,
        "Tie got a loop: b -> c -> b. Leave one of them untied, as the owner.",
    ),
    "itself": Fault(
        rpx.Tie,
        lambda: ({"a": "a"},),
        ValueError,
        "Tie got a loop: a -> a. Leave one of them untied, as the owner.",
    ),
    "no_ties": Fault(rpx.Tie, lambda: ({},), ValueError, "Tie got no ties. Name at least one target and its source."),
    "two_sources": Fault(
        rpx.Tie,
        lambda: ([("b", "a"), ("b", "c")],),
        ValueError,
        "Tie got two sources for 'b': 'a' and 'c'. Leave one of them out.",
    ),
    "number_for_a_source": Fault(
        rpx.Tie,
        lambda: ({"b": 3},),
        TypeError,
        "Tie takes a path, or a pair of path and function, for each target path, but got 'b': 3.",
    ),
    "none_for_a_source": Fault(
        rpx.Tie,
        lambda: ({"b": None},),
        TypeError,
        "Tie takes a path, or a pair of path and function, for each target path, but got 'b': None.",
    ),
    "number_for_a_function": Fault(
        rpx.Tie,
        lambda: ({"b": ("a", 3)},),
        TypeError,
        "Tie takes a path, or a pair of path and function, for each target path, but got 'b': ('a', 3).",
    ),
    "number_for_a_target": Fault(
        rpx.Tie,
        lambda: ({3: "a"},),
        TypeError,
        "Tie takes a path, or a pair of path and function, for each target path, but got 3: 'a'.",
    ),
    "text_for_ties": Fault(
        rpx.Tie,
        lambda: ("b",),
        TypeError,
        "Tie takes a dict of target paths and their sources, but got 'b' of type str. Write "
        "`rpx.Tie({target: source})`.",
    ),
    "number_for_ties": Fault(
        rpx.Tie,
        lambda: (3,),
        TypeError,
        "Tie takes a dict of target paths and their sources, but got 3 of type int. Write `rpx.Tie({target: source})`.",
    ),
    "missing_source": Fault(
        rpx.Tie({"b": "aa"}).init,
        _pair,
        ValueError,
        "Tie({'b': 'aa'}).init found no array at 'aa'; the nearest paths are 'a', 'b'.",
    ),
    "missing_target": Fault(
        rpx.Tie({"out/kernel": "emb/table"}).init,
        lambda: ({"emb": {"table": KERNEL}, "out": {"kernl": KERNEL}},),
        ValueError,
        "Tie({'out/kernel': 'emb/table'}).init found no array at 'out/kernel'; the nearest paths are 'out/kernl', "
        "'emb/table'.",
    ),
    "subtree": Fault(
        TIE.init,
        lambda: ({"a": {"x": KERNEL}, "b": {"x": KERNEL}},),
        ValueError,
        "Tie({'b': 'a'}).init found no array at 'b'; the nearest paths are 'b/x', 'a/x'.",
    ),
    "none_for_a_target": Fault(
        TIE.init,
        lambda: _pair(b=None),
        ValueError,
        "Tie({'b': 'a'}).init found no array at 'b'; the nearest paths are 'a'.",
    ),
    "number_for_an_array": Fault(
        TIE.init,
        lambda: _pair(b=1.0),
        ValueError,
        "Tie({'b': 'a'}).init found no array at 'b'; the nearest paths are 'a'.",
    ),
    "functions_for_arrays": Fault(
        TIE.init,
        lambda: ({"a": jnp.tanh, "b": jnp.tanh, "c": KERNEL},),
        ValueError,
        "Tie({'b': 'a'}).init found no array at 'b'; the nearest paths are 'c'.",
    ),
    "other_shape": Fault(
        TIE.init,
        lambda: _pair(b=KERNEL.T),
        ValueError,
        "Tie({'b': 'a'}).init: 'b' is float32[2, 3], but its source 'a' gives float32[3, 2]. Add a transform "
        "from the source to the target.",
    ),
    "other_shape_after_transform": Fault(
        rpx.Tie({"b": ("a", jnp.transpose)}).init,
        _pair,
        ValueError,
        "Tie({'b': ('a', jnp.transpose)}).init: 'b' is float32[3, 2], but its source 'a' gives float32[2, 3]. "
        "Add a transform from the source to the target.",
    ),
    "other_dtype": Fault(
        TIE.init,
        lambda: _pair(b=jnp.asarray(KERNEL, jnp.bfloat16)),
        ValueError,
        "Tie({'b': 'a'}).init: 'b' is bfloat16[3, 2], but its source 'a' gives float32[3, 2]. Add a transform "
        "from the source to the target.",
    ),
    "other_values": Fault(
        TIE.init,
        lambda: _pair(b=KERNEL + 1),
        ValueError,
        "Tie({'b': 'a'}).init: 'b' does not equal what its source 'a' gives, so tying would change the model. "
        "Set the target to that first, drop the tie, or pass `unequal='overwrite'`.",
    ),
    "one_reparametrized_alone": Fault(
        (TIE >> rpx.LowRank(1, where="b")).init,
        _pair,
        ValueError,
        "Tie({'b': 'a'}).init: 'b' and 'a' hold different raw values; 'b/u' has no counterpart 'a/u'. To share "
        "effective arrays, put the tie last in the chain.",
    ),
    "tied_by_a_later_one": Fault(
        (rpx.Tie({"[bc]": "a"}) >> rpx.Tie({"c": "a"})).init,
        lambda: ({"a": KERNEL, "b": KERNEL, "c": KERNEL},),
        ValueError,
        "Tie({'[bc]': 'a'}).init names 'c', which a later Tie of the chain has tied already. Use each path as "
        "a target once, and the owner of a tied array as the source.",
    ),
    "source_tied_by_a_later_one": Fault(
        (rpx.Tie({"b": "c"}) >> rpx.Tie({"c": "a"})).init,
        lambda: ({"a": KERNEL, "b": KERNEL, "c": KERNEL},),
        ValueError,
        "Tie({'b': 'c'}).init names 'c', which a later Tie of the chain has tied already. Use each path as a "
        "target once, and the owner of a tied array as the source.",
    ),
    "half_restored": Fault(
        rpx.Tie({"b": "a", "c": "a"}).apply,
        lambda: ({"a": KERNEL, "b": {"@tie": {}}, "c": KERNEL},),
        ValueError,
        "Tie({'b': 'a', 'c': 'a'}).apply got a tree that never went through init: 'c' holds a value of its own. "
        f"{UNCALLED}",
    ),
}


@table(TIES)
def test_a_tie_that_cannot_hold_is_refused(fault: Fault) -> None:
    _assert_raises(fault)


def test_a_tie_of_equal_not_a_numbers_holds() -> None:
    kernel = KERNEL.copy()
    kernel[0, 0] = np.nan
    np.testing.assert_array_equal(TIE.apply(TIE.init({"a": kernel, "b": kernel}))["b"], kernel)


def test_a_tie_of_random_keys_holds() -> None:
    raw = TIE.init({"a": jax.random.key(3), "b": jax.random.key(3)})
    assert TIE.apply(raw)["b"] == jax.random.key(3)


# Stages of a third party. -----------------------------------------------------------------------------------------


class Shortens(rpx.Perturbation):
    stochastic = False

    def apply_leaf(self, w: Array, key: Array | None) -> Array:
        return w[:1]


class Halves(rpx.Perturbation):
    def apply_leaf(self, w: Array, key: Array | None) -> Array:
        return w.astype(jnp.bfloat16)


class ReturnsNothing(rpx.Perturbation):
    stochastic = False

    def apply_leaf(self, w: Array, key: Array | None) -> Array:
        return None


class Keeps(rpx.Reparametrization):
    """What the stages below do, each with one fault."""

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]


class GivesShorter(Keeps):
    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"][:1]


class GivesHalves(Keeps):
    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"].astype(jnp.bfloat16)


class GivesATuple(Keeps):
    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return (values["w"],)


class ReadsAnother(Keeps):
    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["x"]


class ForgetsAFixedValue(Keeps):
    raw_values = {"mask": rpx.stage.fixed()}


class MisnamesItsMain(Keeps):
    raw_values = {"weight": rpx.stage.main()}


class HasNoInit(rpx.Reparametrization):
    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]


class InitGivesAnArray(Keeps):
    def init_leaf(self, w: Array) -> dict[str, Array]:
        return w


class InitGivesANumber(Keeps):
    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w, "scale": 1.0}


class InitNests(Keeps):
    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": {"inner": w}}


class InitGivesNothing(Keeps):
    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {}


class Taken(Keeps):
    kind = "taken_by_the_tests"


class Named(Keeps):
    name: str

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {self.name: w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values[self.name]


MODEL_HAS_IT = "Cast or reshape in apply_leaf, or set `changes_type = True` in the class."


def _one() -> tuple[Any]:
    return ({"k": jnp.asarray(KERNEL)},)


THIRD_PARTIES = {
    "perturbation_of_another_shape": Fault(
        Shortens().apply,
        _one,
        ValueError,
        "Shortens().apply at 'k': apply_leaf must return float32[3, 2], like the model's array, but returns "
        "float32[1, 2]. "
        f"{MODEL_HAS_IT}",
    ),
    "perturbation_of_another_dtype": Fault(
        Halves().apply,
        lambda: (*_one(), _key()),
        ValueError,
        "Halves().apply at 'k': apply_leaf must return float32[3, 2], like the model's array, but returns "
        "bfloat16[3, 2]. "
        f"{MODEL_HAS_IT}",
    ),
    "perturbation_that_gives_nothing": Fault(
        ReturnsNothing().apply,
        _one,
        ValueError,
        "ReturnsNothing().apply at 'k': apply_leaf must return float32[3, 2], like the model's array, but returns "
        "NoneType. "
        f"{MODEL_HAS_IT}",
    ),
    "shape": Fault(
        GivesShorter().init,
        _one,
        ValueError,
        "GivesShorter().init at 'k': apply_leaf must return float32[3, 2], like the model's array, but returns "
        "float32[1, 2]. "
        f"{MODEL_HAS_IT}",
    ),
    "dtype": Fault(
        GivesHalves().init,
        _one,
        ValueError,
        "GivesHalves().init at 'k': apply_leaf must return float32[3, 2], like the model's array, but returns "
        "bfloat16[3, 2]. "
        f"{MODEL_HAS_IT}",
    ),
    "tuple": Fault(
        GivesATuple().init,
        _one,
        ValueError,
        "GivesATuple().init at 'k': apply_leaf must return float32[3, 2], like the model's array, but returns tuple. "
        f"{MODEL_HAS_IT}",
    ),
    "value_that_init_does_not_give": Fault(
        ReadsAnother().init,
        _one,
        ValueError,
        "ReadsAnother().init at 'k': apply_leaf reads a value 'x', but init_leaf returns only 'w'.",
    ),
    "missing_fixed_value": Fault(
        ForgetsAFixedValue().init,
        _one,
        ValueError,
        "ForgetsAFixedValue().init at 'k': init_leaf must return each value that the class declares, ('mask',), "
        "but returns ('w',). Rename or add values in init_leaf.",
    ),
    "missing_main_value": Fault(
        MisnamesItsMain().init,
        _one,
        ValueError,
        "MisnamesItsMain().init at 'k': init_leaf must return each value that the class declares, ('weight',), "
        "but returns ('w',). Rename or add values in init_leaf.",
    ),
    "no_init": Fault(
        HasNoInit().init,
        _one,
        TypeError,
        "HasNoInit defines neither init_leaf(w) nor draw_leaf(w, key). Define one.",
    ),
    "array_for_values": Fault(
        InitGivesAnArray().init,
        _one,
        ValueError,
        "InitGivesAnArray().init at 'k': init_leaf must return a dict of named arrays, but returns float32[3, 2].",
    ),
    "number_for_a_value": Fault(
        InitGivesANumber().init,
        _one,
        ValueError,
        "InitGivesANumber().init at 'k': init_leaf must return a dict of named arrays, but returns float for 'scale'.",
    ),
    "dict_for_a_value": Fault(
        InitNests().init,
        _one,
        ValueError,
        "InitNests().init at 'k': init_leaf must return a dict of named arrays, but returns dict for 'w'.",
    ),
    **{
        f"name_{name}": Fault(
            Named(name).init,
            _one,
            ValueError,
            f"Named({name!r}).init at 'k': init_leaf must return at least one value, and names without "
            f"'@', '.' and '/', other than '*', but returns ({name!r},). Rename or add values in init_leaf.",
        )
        for name in ["a/b", "a.b", "@a", "@fixed", ""]
    },
    "no_values": Fault(
        InitGivesNothing().init,
        _one,
        ValueError,
        "InitGivesNothing().init at 'k': init_leaf must return at least one value, and names without "
        "'@', '.' and '/', other than '*', but returns (). Rename or add values in init_leaf.",
    ),
    **{
        f"kind_{kind}": Fault(
            lambda kind: type("Bad", (Keeps,), {"kind": kind}),
            functools.partial(tuple, [kind]),
            ValueError,
            f"Bad got kind={kind!r}, but a kind is a name without '@', '.' and '/', and not 'fixed'.",
        )
        for kind in ["a/b", "a.b", "a@b", "", "fixed"]
    },
}


THIRD_PARTIES["kind_taken"] = Fault(
    lambda kind: type("Bad", (Keeps,), {"kind": kind}),
    lambda: ("taken_by_the_tests",),
    ValueError,
    "Bad got kind='taken_by_the_tests', which is the kind of test_faults.Taken. Give it another `kind`.",
)


@table(THIRD_PARTIES)
def test_a_third_partys_stage_with_a_fault_is_named(fault: Fault) -> None:
    _assert_raises(fault)
