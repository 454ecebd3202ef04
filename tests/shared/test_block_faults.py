"""Every error of blocks, layouts, packing, splitting and cuDNN's vector, by its whole text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

import reparax as rpx
from reparax.shared import Concat, CudnnLSTM, Pack, Split, convert, gates

W = np.ones((5, 8), np.float32)
TWO = Concat(("a: 3 8", "b: 2 8"))
SPLIT = "Split({'w': Concat(('a: 3 8', 'b: 2 8'))})"
OTHER = (
    "another chain made this raw tree. Apply the chain that made it; `p.check(raw, like=params)` lists every "
    "difference."
)
NAMES = (
    "flax.lstm, nnx.lstm, nnx.optimized_lstm, equinox.lstm, haiku.lstm, torch.lstm, returnn.lstm, returnn.native_lstm, "
    "flax.gru, nnx.gru, equinox.gru, haiku.gru, torch.gru, flax.attention, equinox.attention, torch.attention, "
    "returnn.attention"
)
ATTENTION = {"qkv": {"weight": W}, "proj": {"weight": W}}
GRU = {"w_i": np.ones((3, 6)), "w_h": np.ones((2, 6)), "b": np.ones(6)}
LSTM = {"weight_ih": np.ones((8, 3)), "weight_hh": np.ones((8, 2))}


def packed(block, **fields):
    """``init`` of one array that is that block."""
    return Pack({"w": block}, **fields).init({"w": W})


def text(block):
    return f"Pack({{'w': {block!r}}}).init: 'w': "


TYPES = {
    "no parts": (lambda: Concat(()), "Concat takes a tuple of strings such as 'bias: 4' and of blocks, but got ()."),
    "a text": (
        lambda: Concat("a: 3"),
        "Concat takes a tuple of strings such as 'bias: 4' and of blocks, but got 'a: 3'.",
    ),
    "a number": (
        lambda: Concat((3,)),
        "Concat takes a tuple of strings such as 'bias: 4' and of blocks, but got (3,).",
    ),
    "an axis": (lambda: Concat(("a: 3",), axis="0"), "Concat takes an integer as axis, but got '0'."),
    "layout": (lambda: Pack(3), "A layout is a name or a dict of paths and blocks, but got 3."),
    "layout of numbers": (
        lambda: Pack({"w": 3}),
        "A layout is a name or a dict of paths and blocks, but got {'w': 3}.",
    ),
    "empty layout": (lambda: Split({}), "A layout is a name or a dict of paths and blocks, but got {}."),
    "sizes": (
        lambda: Pack("flax.lstm", sizes=3),
        "Pack takes a dict of names and integers as sizes, but got 3.",
    ),
    "a size": (lambda: Pack("flax.lstm", sizes={"h": 2.5}), "Pack takes an integer as h, but got 2.5."),
    "at": (lambda: Pack("flax.lstm", 3), "Pack takes a path or a regular expression as `at`, but got 3."),
    "hidden size": (lambda: CudnnLSTM(3, 2.5), "CudnnLSTM takes an integer as hidden_size, but got 2.5."),
}
VALUES = {
    "a name twice": (
        lambda: Concat(("a: 3", "a: 4")),
        "Concat got 'a' twice. Give each value and each array its own name.",
    ),
    "a name in two arrays": (
        lambda: Pack({"w": "a: 3", "v": "a: 3"}),
        "Pack got 'a' twice. Give each value and each array its own name.",
    ),
    "one raw name of two": (
        lambda: Split({"w/x": "a: 3", "w.x": "b: 3"}),
        "Split got 'w_x' twice. Give each value and each array its own name.",
    ),
    "an axis from behind": (
        lambda: Concat(("a: 3", "b: 4"), axis=-1),
        "Concat got axis=-1, but takes an axis counted from the front, at least 0.",
    ),
    "no colon": (
        lambda: Concat(("a 3",)),
        "A block got 'a 3', but a value is 'name: shape' or 'name: shape -> shape in the array'.",
    ),
    "other axes": (
        lambda: Concat(("a: 3 4 -> 4 2",)),
        "A block got 'a: 3 4 -> 4 2', whose two shapes have different axes. Write the same axes in both.",
    ),
    "two unknown sizes": (
        lambda: packed(Concat(("a: n 8", "b: m 8"))),
        text(Concat(("a: n 8", "b: m 8"))) + "its shape does not determine m, n. Give some of them in `sizes`.",
    ),
    "too large": (
        lambda: packed(Concat(("a: 3 8", "b: 3 8"))),
        text(Concat(("a: 3 8", "b: 3 8"))) + "expected an axis of size 3 + 3, got 5. Correct the block or the array.",
    ),
    "no whole number": (
        lambda: packed(Concat(("a: n 8", "b: n 8"))),
        text(Concat(("a: n 8", "b: n 8"))) + "expected an axis of size n + n, got 5. Correct the block or the array.",
    ),
    "a size that was known": (
        lambda: packed(Concat(("a: n n'", "b: 2 8"))),
        text(Concat(("a: n n'", "b: 2 8")))
        + "expected an axis of size n' with n = 3, got 8. Correct the block or the array.",
    ),
    "another rank": (
        lambda: packed(Concat(("a: 3", "b: 2"))),
        text(Concat(("a: 3", "b: 2"))) + "expected 1 axes for 'a', got float32[3, 8]. Correct the block.",
    ),
    "no such axis": (
        lambda: packed(Concat(("a: 3", "b: 2"), axis=2)),
        text(Concat(("a: 3", "b: 2"), axis=2)) + "expected an axis 2 to cut ['a', 'b'] from, got float32[5, 8].",
    ),
    "heads unknown": (
        lambda: Pack("returnn.attention").init(ATTENTION),
        "Pack('returnn.attention').init: 'qkv/weight': its shape does not determine heads. Give it in `sizes`.",
    ),
    "heads that do not divide": (
        lambda: Pack("returnn.attention", sizes={"heads": 3}).init(ATTENTION),
        "Pack('returnn.attention', sizes={'heads': 3}).init: 'qkv/weight': expected an axis that heads = 3 divides, "
        "got 8. Correct `sizes`.",
    ),
    "two dtypes": (
        lambda: Split({"w": TWO}).init({"a": W[:3], "b": W[:2].astype(np.float16)}),
        f"{SPLIT}.init: 'w': a block needs one dtype, but 'a' is float32, 'b' is float16. Cast them to one first.",
    ),
    "another shape": (
        lambda: Split({"w": TWO}).init({"a": W[:2], "b": W[:2]}),
        f"{SPLIT}.init: 'a': expected an axis of size 3, got 2. Correct the block or the array.",
    ),
    "source": (
        lambda: gates("x", "ifgo"),
        "gates takes one of input, hidden, bias, hidden_bias and an order such as 'ifgo', but got 'x' and 'ifgo'.",
    ),
    "order": (
        lambda: gates("input", "1"),
        "gates takes one of input, hidden, bias, hidden_bias and an order such as 'ifgo', but got 'input' and '1'.",
    ),
    "unknown layout": (
        lambda: Pack("flax.lstmm"),
        f"Got 'flax.lstmm' as a layout, but the known ones are {NAMES}. Or pass a dict.",
    ),
    "half a cell": (
        lambda: Pack("equinox.lstm", "a").init({"a": {"weight_ih": W}}),
        "Pack('equinox.lstm', at='a').init at 'a': expected an array 'weight_hh', got 'weight_ih'. Correct the layout.",
    ),
    "no cell": (
        lambda: Split({"w": TWO}, "cell").init({"call": {"a": W[:3], "b": W[:2]}}),
        "Split({'w': Concat(('a: 3 8', 'b: 2 8'))}, at='cell').init found no array 'cell/a'; the nearest paths are "
        "'call/a', 'call/b'. Correct `at` or the layout.",
    ),
    "no expression": (
        lambda: Split({"w": TWO}, "(").init({"a": W[:3], "b": W[:2]}),
        "Split({'w': Concat(('a: 3 8', 'b: 2 8'))}, at='(').init found no array '(/a'; the nearest paths are 'a', 'b'. "
        "Correct `at` or the layout.",
    ),
    "layouts of other values": (
        lambda: Split("torch.lstm", model="flax.lstm"),
        "Split got two layouts, but only one of them holds 'hidden_bias_f'. Choose two that hold the same "
        "values, or change the model's parameters with `convert` first.",
    ),
    "half a block": (
        lambda: Split({"w": Concat(("a: 3 8", "bias: 8 -> 1 8"))}).init({"a": W[:3]}),
        "Split({'w': Concat(('a: 3 8', 'bias: 8 -> 1 8'))}).init: 'w' needs 'bias', which is missing. Leave it "
        "out of the block, or add it.",
    ),
    "several values": (
        lambda: jax.eval_shape((Split({"w": TWO}) >> rpx.LowRank(1)).init, {"a": W[:3], "b": W[:2]}),
        f"{SPLIT}.init: 'a' holds several values, so it cannot be part of a block. Put the stage that replaces it "
        f"earlier in the chain.",
    ),
    "a plain tree": (
        lambda: Split({"w": TWO}).apply({"a": W[:3], "b": W[:2]}),
        f"{SPLIT}.apply got a tree that never went through init: it holds no '@split'. Call `raw = p.init(params)` "
        f"once, with the whole chain, and pass `raw`.",
    ),
    "a raw tree of another chain": (
        lambda: Split({"w": TWO}).apply({"a": {"@pack": {"w": W}}, "b": W[:2]}),
        f"{SPLIT}.apply found no '@split' in a raw tree that holds '@pack' at 'a': {OTHER}",
    ),
    "another name": (
        lambda: Split({"w": TWO}).apply({"a": {"@split": {"v": W}}, "b": {"@split": {}}}),
        f"{SPLIT}.apply: 'v' holds float32[5, 8]: {OTHER}",
    ),
    "no array": (
        lambda: Split({"w": TWO}).apply({"a": {"@split": {"w": None}}, "b": {"@split": {}}}),
        f"{SPLIT}.apply: expected an array as 'w', got NoneType: this is one half of `rpx.partition`. Join both halves "
        f"with `rpx.combine` first.",
    ),
    "no block": (
        lambda: Split({"w": TWO}).apply({"a": {"@split": {}}, "b": {"@split": {}}}),
        f"{SPLIT}.apply: 'w' is missing: {OTHER}",
    ),
    "no values": (
        lambda: Split({"w": TWO}).apply({"a": {"@split": W}, "b": {"@split": {}}}),
        f"{SPLIT}.apply: expected a dict of values under '@split', got float32[5, 8]: {OTHER}",
    ),
    "an empty node that was lost": (
        lambda: Split({"w": TWO}).apply({"a": {"@split": {"w": W}}}),
        f"{SPLIT}.apply: found nothing at 'b', where `init` leaves an empty node. Flattened formats lose empty "
        f"nodes: restore into the structure of `jax.eval_shape(p.init, params)`.",
    ),
    "convert of more than a cell": (
        lambda: convert({**LSTM, "x": W}, "equinox.lstm", "flax.lstm"),
        "convert from 'equinox.lstm' to 'flax.lstm': 'x' is not an array of that layout. Pass the parameters "
        "of one cell.",
    ),
    "convert to another cell": (
        lambda: convert(GRU, "haiku.gru", "flax.gru"),
        "convert from 'haiku.gru' to 'flax.gru': the other layout has no 'input_a', so its cell cannot compute the "
        "same function.",
    ),
    "convert to haiku without biases": (
        lambda: convert(LSTM, "equinox.lstm", "haiku.lstm"),
        "convert from 'equinox.lstm' to 'haiku.lstm': one cell adds a number to 'bias_f', which the other does "
        "not have. Add that bias, with zeros.",
    ),
    "vector": (
        lambda: CudnnLSTM(3, 2, where="w").init({"w": W}),
        "CudnnLSTM(3, 2, where='w').init at 'w': expected a vector of 56 weights, got shape (5, 8). Correct the sizes, "
        "or narrow `where`.",
    ),
    "no size": (lambda: CudnnLSTM(3, 0), "CudnnLSTM(3, 0) needs sizes of at least 1, and 0, 1 or 2 biases."),
    "three biases": (
        lambda: CudnnLSTM(3, 2, biases=3),
        "CudnnLSTM(3, 2, biases=3) needs sizes of at least 1, and 0, 1 or 2 biases.",
    ),
}


@pytest.mark.parametrize(("call", "message"), TYPES.values(), ids=TYPES)
def test_what_is_of_the_wrong_type_is_refused(call, message):
    with raises(TypeError, message):
        call()


@pytest.mark.parametrize(("call", "message"), VALUES.values(), ids=VALUES)
def test_what_does_not_fit_is_refused(call, message):
    with raises(ValueError, message):
        call()


def test_a_second_bias_of_gru_that_is_not_known_to_be_zero_is_refused_where_there_is_no_place_for_it():
    cell = {f"{source}{gate}": {"kernel": jnp.ones((2, 2))} for source in "ih" for gate in "rzn"}
    cell = cell | {f"i{gate}": {**cell[f"i{gate}"], "bias": jnp.ones(2)} for gate in "rzn"}
    zero, one = ({**cell, "hn": {**cell["hn"], "bias": bias}} for bias in (jnp.zeros(2), jnp.ones(2)))
    assert sorted(convert(zero, "flax.gru", "nnx.gru")) == ["dense_h", "dense_i"]
    refused = "the other layout has no 'hidden_bias_n', so its cell cannot compute the same function."
    with raises(ValueError, f"convert from 'flax.gru' to 'nnx.gru': {refused}"):
        convert(one, "flax.gru", "nnx.gru")
    with pytest.raises(ValueError, match=refused):
        jax.jit(lambda cell: convert(cell, "flax.gru", "nnx.gru"))(zero)
