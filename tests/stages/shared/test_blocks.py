"""Blocks and layouts against slices written by hand: every number stands where the libraries have it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grids import mostly_thorough
from jax.experimental import rnn

import reparax as rpx
from reparax.stages.shared import _cells
from reparax.stages.shared._cells import LAYOUTS
from reparax.testing import check_laws

INPUTS, HIDDEN, HEADS, KEY, VALUE = 3, 2, 2, 3, 4
SIZES = {"heads": HEADS, "key": KEY}


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@jax.jit
def made_and_read(p, params):
    """The raw tree, and what the model reads straight after."""
    raw = p.init(params)
    return raw, p.apply(raw)


def same(got, want):
    """Whether two trees hold the same bits in the same places."""
    leaves, others = jax.tree.leaves(got), jax.tree.leaves(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


# ---- Concat: each block against numpy.

WI, WH, B = normal(3, 8, seed=1), normal(2, 8, seed=2), normal(8, seed=3)
TABLE = normal(2, 3, 4, seed=4)
TWO = ("wi: 3 8", "wh: 2 8")
BLOCKS = {
    "rows": (rpx.shared.Concat(("wi: 3 8", "wh: 2 8")), {"wi": WI, "wh": WH}, np.concatenate([WI, WH])),
    "bias as a row": (
        rpx.shared.Concat(("wi: 3 8", "wh: 2 8", "b: 8 -> 1 8")),
        {"wi": WI, "wh": WH, "b": B},
        np.concatenate([WI, WH, B[None]]),
    ),
    "columns, turned": (
        rpx.shared.Concat(("wi: 3 8 -> 8 3", "wh: 2 8 -> 8 2"), axis=1),
        {"wi": WI, "wh": WH},
        np.concatenate([WI.T, WH.T], 1),
    ),
    "flat": (
        rpx.shared.Concat(("b: 8", "wi: 3 8 -> (3 8)", "t: 2 3 4 -> (3 2 4)", "s:  -> 1")),
        {"b": B, "wi": WI, "t": TABLE, "s": np.float32(5)},
        np.concatenate([B, WI.ravel(), TABLE.transpose(1, 0, 2).ravel(), [np.float32(5)]]),
    ),
    "nested": (
        rpx.shared.Concat((rpx.shared.Concat(("wi: 3 8", "wh: 2 8")), rpx.shared.Concat(("x: 3 8", "y: 2 8"))), axis=1),
        {"wi": WI, "wh": WH, "x": WI + 1, "y": WH + 1},
        np.block([[WI, WI + 1], [WH, WH + 1]]),
    ),
    "an axis of size 0": (rpx.shared.Concat(("e: 0 8", "wh: 2 8")), {"e": np.zeros((0, 8), np.float32), "wh": WH}, WH),
}


@pytest.mark.parametrize(("block", "parts", "whole"), BLOCKS.values(), ids=BLOCKS)
def test_the_parts_of_a_block_stand_where_numpy_puts_them(block, parts, whole):
    pack, split = rpx.shared.Pack({"w": block}), rpx.shared.Split({"w": block})
    raw, effective = made_and_read(pack, {"w": whole})
    same(raw["w"]["@pack"], parts)
    same(effective, {"w": whole})
    joined, effective = made_and_read(split, parts)
    same(joined[next(iter(parts))]["@split"], {"w": whole})
    same(effective, parts)


def test_a_block_of_a_list_and_of_numbers_of_numpy_is_that_of_a_tuple():
    block, same_block = rpx.shared.Concat(["wi: 3 8", "wh: 2 8"], axis=np.int64(1)), rpx.shared.Concat(TWO, axis=1)
    assert block == same_block
    assert hash(block) == hash(same_block)
    assert rpx.shared.Pack({"w": block}) == rpx.shared.Pack({"w": same_block})
    assert hash(rpx.shared.Pack({"w": block})) == hash(rpx.shared.Pack({"w": same_block}))
    assert repr(block) == "Concat(('wi: 3 8', 'wh: 2 8'), axis=1)"


def test_letters_take_their_sizes_from_the_arrays_so_one_stage_serves_layers_of_all_sizes():
    block = rpx.shared.Concat(tuple(rpx.shared.Concat((f"input_{g}: n h", f"hidden_{g}: h' h")) for g in "ab"), axis=1)
    params = {"layers": [{"w": normal(5, 4)}, {"w": normal(7, 6)}]}
    raw, effective = made_and_read(rpx.shared.Pack({"w": block}, where=r"layers/\d+"), params)
    assert [raw["layers"][i]["w"]["@pack"]["input_b"].shape for i in (0, 1)] == [(3, 2), (4, 3)]
    same(effective, params)


def test_several_layers_stand_in_one_block():
    params = {"layers": [{"w": WI, "b": B}, {"w": WH}]}
    p = rpx.shared.Split(
        {"all": rpx.shared.Concat(("layers/0/w: 3 8 -> (3 8)", "layers/0/b: 8", "layers/1/w: 2 8 -> (2 8)"))}
    )
    raw = p.init(params)
    assert jax.tree.map(jnp.shape, raw) == {
        "layers": [{"b": {"@split": {}}, "w": {"@split": {"all": (48,)}}}, {"w": {"@split": {}}}]
    }
    same(p.apply(raw), params)
    assert p.raw_paths(params) == dict.fromkeys(["layers/0/b", "layers/0/w", "layers/1/w"], "layers/0/w/all")


def test_a_block_in_a_raw_tree_with_other_stages_is_their_parameter():
    p = rpx.VarNoise(0.1, where="cell/wi/w") >> rpx.shared.Split(
        {"w": rpx.shared.Concat(("wi: 3 8", "wh: 2 8"))}, where="cell"
    )
    params = {"cell": {"wi": WI, "wh": WH}, "b": B}
    raw = p.init(params)
    noise = jax.tree.map(np.subtract, p.apply(raw, jax.random.key(0)), params)
    assert (noise["cell"]["wi"] != 0).all()
    assert (noise["cell"]["wh"] != 0).all()
    assert (noise["b"] == 0).all()
    grads = jax.jit(jax.grad(lambda raw: sum(jnp.sum(x) for x in jax.tree.leaves(p.fold(raw)))))(raw)
    same(grads["cell"]["wi"]["@split"], {"w": np.ones((5, 8), np.float32)})


def test_blocks_are_made_in_the_modules_of_equinox_and_the_states_of_nnx():
    cell = eqx.filter_jit(eqx.nn.LSTMCell)(INPUTS, HIDDEN, key=jax.random.key(0))
    p = rpx.shared.Pack("equinox.lstm")
    raw = p.init(cell)
    assert type(raw) is eqx.nn.LSTMCell
    assert sorted(raw.bias["@pack"]) == ["bias_f", "bias_g", "bias_i", "bias_o"]
    same(p.apply(raw), cell)
    types = nnx.state(nnx.eval_shape(lambda: nnx.OptimizedLSTMCell(INPUTS, HIDDEN, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda x: jnp.asarray(normal(*x.shape)), types)
    q = rpx.WeightDropout(0.5, where="dense_h/kernel/hidden_.") >> rpx.shared.Pack("nnx.optimized_lstm")
    raw = q.init(state)
    same(q.fold(raw), state)
    assert (np.asarray(q.apply(raw, jax.random.key(0))["dense_h"]["kernel"][...]) == 0).any()


# ---- Layouts: each from one set of numbers, by numpy alone.

GATES = {
    f"{source}_{gate}": normal(*shape, seed=seed)
    for seed, (source, gate, shape) in enumerate(
        (source, gate, shape)
        for source, shape in {
            "input": (INPUTS, HIDDEN),
            "hidden": (HIDDEN, HIDDEN),
            "bias": (HIDDEN,),
            "hidden_bias": (HIDDEN,),
        }.items()
        for gate in "ifgorzna"
    )
}
ATTENTION = {
    "query": normal(5, HEADS, KEY, seed=1),
    "key": normal(5, HEADS, KEY, seed=2),
    "value": normal(5, HEADS, VALUE, seed=3),
    "out": normal(HEADS, VALUE, 6, seed=4),
    "query_bias": normal(HEADS, KEY, seed=5),
    "key_bias": normal(HEADS, KEY, seed=6),
    "value_bias": normal(HEADS, VALUE, seed=7),
    "out_bias": normal(6, seed=8),
}


def columns(source, order):
    return np.concatenate([GATES[f"{source}_{gate}"] for gate in order], -1)


def rows(source, order):
    return np.concatenate([GATES[f"{source}_{gate}"].T for gate in order])


def each(path, source, order):
    return {path.format(gate): GATES[f"{source}_{gate}"] for gate in order}


def flat(name, *, out_first):
    w = ATTENTION[name].reshape(5, -1)
    return w.T if out_first else w


def torch(order):
    return {
        "weight_ih": rows("input", order),
        "weight_hh": rows("hidden", order),
        "bias_ih": columns("bias", order),
        "bias_hh": columns("hidden_bias", order),
    }


def attention(name):
    """The array of that name, with values of the size of keys, as torch has them."""
    return ATTENTION[name][..., :KEY] if name.startswith("value") else ATTENTION[name]


def cells():
    """What the libraries' own code has at each path: orders and axes as their sources say, written out by hand."""
    lstm = each("i{}/kernel", "input", "ifgo") | each("h{}/kernel", "hidden", "ifgo") | each("h{}/bias", "bias", "ifgo")
    gru = each("i{}/kernel", "input", "rzn") | each("h{}/kernel", "hidden", "rzn") | each("i{}/bias", "bias", "rzn")
    stacked = np.concatenate([ATTENTION[x] for x in ("query", "key", "value")], -1)
    stacked_bias = np.concatenate([ATTENTION[f"{x}_bias"] for x in ("query", "key", "value")], -1)
    return {
        "flax.lstm": lstm,
        "nnx.lstm": {path.replace("if/", "if_/"): x for path, x in lstm.items()},
        "nnx.optimized_lstm": {
            "dense_i/kernel": columns("input", "ifgo"),
            "dense_h/kernel": columns("hidden", "ifgo"),
            "dense_h/bias": columns("bias", "ifgo"),
        },
        "equinox.lstm": {
            "weight_ih": rows("input", "ifgo"),
            "weight_hh": rows("hidden", "ifgo"),
            "bias": columns("bias", "ifgo"),
        },
        "haiku.lstm": {
            "linear/w": np.concatenate([columns("input", "igfo"), columns("hidden", "igfo")]),
            "linear/b": columns("bias", "igfo"),
        },
        "torch.lstm": torch("ifgo"),
        "returnn.lstm": {
            "ff_weight": rows("input", "ifgo"),
            "rec_weight": rows("hidden", "ifgo"),
            "bias": columns("bias", "ifgo"),
        },
        "returnn.native_lstm": {
            "W": columns("input", "gifo"),
            "W_re": columns("hidden", "gifo"),
            "b": columns("bias", "gifo"),
        },
        "flax.gru": gru | {"hn/bias": GATES["hidden_bias_n"]},
        "nnx.gru": {
            "dense_i/kernel": columns("input", "rzn"),
            "dense_h/kernel": columns("hidden", "rzn"),
            "dense_i/bias": columns("bias", "rzn"),
        },
        "equinox.gru": {
            "weight_ih": rows("input", "rzn"),
            "weight_hh": rows("hidden", "rzn"),
            "bias": columns("bias", "rzn"),
            "bias_n": GATES["hidden_bias_n"],
        },
        "haiku.gru": {"w_i": columns("input", "zra"), "w_h": columns("hidden", "zra"), "b": columns("bias", "zra")},
        "torch.gru": torch("rzn"),
        "flax.attention": {
            **{f"{x}/kernel": ATTENTION[x] for x in ("query", "key", "value", "out")},
            **{f"{x}/bias": ATTENTION[f"{x}_bias"] for x in ("query", "key", "value", "out")},
        },
        "equinox.attention": {
            **{f"{x}_proj/weight": flat(x, out_first=True) for x in ("query", "key", "value")},
            **{f"{x}_proj/bias": ATTENTION[f"{x}_bias"].ravel() for x in ("query", "key", "value")},
            "output_proj/weight": ATTENTION["out"].reshape(-1, 6).T,
            "output_proj/bias": ATTENTION["out_bias"],
        },
        "torch.attention": {
            "in_proj_weight": np.concatenate([attention(x).reshape(5, -1).T for x in ("query", "key", "value")]),
            "in_proj_bias": np.concatenate([attention(f"{x}_bias").ravel() for x in ("query", "key", "value")]),
            "out_proj/weight": ATTENTION["out"][:, :KEY].reshape(-1, 6).T,
            "out_proj/bias": ATTENTION["out_bias"],
        },
        "returnn.attention": {
            "qkv/weight": np.concatenate([stacked[:, head] for head in range(HEADS)], -1),
            "qkv/bias": np.concatenate([stacked_bias[head] for head in range(HEADS)], -1),
            "proj/weight": ATTENTION["out"].reshape(-1, 6),
            "proj/bias": ATTENTION["out_bias"],
        },
    }


def nested(arrays):
    """Paths as nested dicts."""
    tree = {}
    for path, x in arrays.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = x
    return tree


def cell(name):
    return nested(cells()[name])


def family(kind):
    return [name for name in LAYOUTS if name.endswith(kind)]


def sizes(name):
    return SIZES if name.endswith("attention") else {}


def params_of(name):
    return {"cell": cell(name), "other": B}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_keeps_the_laws(name):
    p = rpx.shared.Pack(name, where="cell", sizes=sizes(name))
    params = params_of(name)
    same(p.apply(p.init(params)), params)
    check_laws(p, jax.tree.map(jnp.asarray, params), laws=("right_inverse", "types", "plain_trees", "value_semantics"))


def nodes(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, dict) and "@pack" in x)


def torch_out(name):
    return {"out": ATTENTION["out"][:, :KEY]} if name == "torch.attention" else {}


@pytest.fixture
def by_numpy(monkeypatch):
    """Blocks of arrays of numpy, which need no program."""
    monkeypatch.setattr(_cells, "jnp", np)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_values_of_a_layout_stand_where_the_library_has_them(by_numpy, name):
    arrays, held = cells()[name], GATES | ATTENTION
    if name == "torch.attention":
        held = held | {x: attention(x) for x in ("value", "value_bias")} | torch_out(name)
    values = _cells.read_values(LAYOUTS[name], arrays, dict(sizes(name)))
    same(values, {value: held[value] for value in values})
    assert sum(x.size for x in values.values()) == sum(x.size for x in arrays.values())
    same(_cells.write_arrays(LAYOUTS[name], values, {}), arrays)


def test_layouts_of_attention_hold_the_same_values_but_for_the_size_of_those_of_torch(by_numpy):
    names = ["flax.attention", "equinox.attention", "returnn.attention"]
    for a in names:
        for b in names:
            same(rpx.shared.convert(cell(a), a, b, **SIZES), cell(b))
    dotted = {path.replace("/", "."): x for path, x in cells()["torch.attention"].items()}
    there = rpx.shared.convert(dotted, "torch.attention", "equinox.attention", heads=HEADS)
    same(there["output_proj"]["weight"], ATTENTION["out"][:, :KEY].reshape(-1, 6).T)
    same(rpx.shared.convert(there, "equinox.attention", "torch.attention", heads=HEADS), cell("torch.attention"))


HEAD_A, HEAD_B = normal(5, 2, 3, seed=1), normal(5, 2, 4, seed=2)
OF_NUMPY = {
    "parts in each head": (
        rpx.shared.Concat(("a: n heads 3", "b: n heads 4"), axis=1, per="heads"),
        {"heads": 2},
        {"a": HEAD_A, "b": HEAD_B},
        np.concatenate([HEAD_A, HEAD_B], 2).reshape(5, 14),
    ),
    "parts in each head, first": (
        rpx.shared.Concat(("a: heads 3 n", "b: heads 4 n"), per="heads"),
        {"heads": 2},
        {"a": HEAD_A.transpose(1, 2, 0), "b": HEAD_B.transpose(1, 2, 0)},
        np.concatenate([HEAD_A.transpose(1, 2, 0), HEAD_B.transpose(1, 2, 0)], 1).reshape(14, 5),
    ),
    "parts in a number of pieces": (
        rpx.shared.Concat(("a: 2 3", "b: 2 4"), per="2"),
        {},
        {"a": HEAD_A[0], "b": HEAD_B[0]},
        np.concatenate([HEAD_A[0], HEAD_B[0]], 1).reshape(14),
    ),
    "parts in each head of one of two": (
        rpx.shared.Concat((rpx.shared.Concat(("a: heads 3", "b: heads m"), per="heads"), "c: 5")),
        {"heads": 2},
        {"a": HEAD_A[0], "b": HEAD_B[0], "c": HEAD_A[:, 0, 0]},
        np.concatenate([np.concatenate([HEAD_A[0], HEAD_B[0]], 1).ravel(), HEAD_A[:, 0, 0]]),
    ),
    "blocks along the same axis": (
        rpx.shared.Concat((rpx.shared.Concat(("a: 3 4", "b: n 4")), rpx.shared.Concat(("c: 1 4", "d: n 4")))),
        {},
        {
            name: normal(size, 4, seed=size + i)
            for i, (name, size) in enumerate({"a": 3, "b": 2, "c": 1, "d": 2}.items())
        },
        None,
    ),
    "equal sizes stay in order": (
        rpx.shared.Concat(("a: 2 2 -> (2 2)", "b: n n' n -> (n' n n)")),
        {"n": 2},
        {"a": HEAD_A[0, :, :2], "b": normal(2, 2, 2, seed=3)},
        np.concatenate([HEAD_A[0, :, :2].ravel(), normal(2, 2, 2, seed=3).transpose(1, 0, 2).ravel()]),
    ),
    "two unknown sizes of one kind": (
        rpx.shared.Concat(("a: 2 h", "b: h h'", "c: h -> 1 h")),
        {},
        {"a": normal(2, 3), "b": normal(3, 3, seed=1), "c": normal(3, seed=2)},
        np.concatenate([normal(2, 3), normal(3, 3, seed=1), normal(3, seed=2)[None]]),
    ),
}


@pytest.mark.parametrize("name", OF_NUMPY)
def test_values_in_pieces_and_of_equal_sizes_are_cut_and_joined(by_numpy, name):
    block, known, values, array = OF_NUMPY[name]
    array = np.concatenate(list(values.values())) if array is None else array
    same(_cells.cut_values(block, array, dict(known)), values)
    same(_cells.join_values(block, values, {}), array)


def there_and_back(tree, a, b):
    return rpx.shared.convert(rpx.shared.convert(tree, a, b, **sizes(a)), b, a, **sizes(b))


CELLS = [name for name in (*family("lstm"), *family("gru")) if name not in ("haiku.gru", "nnx.gru")]


@pytest.mark.parametrize("a", mostly_thorough(CELLS, "haiku.lstm", "torch.lstm", "torch.gru"))
def test_from_the_second_time_on_there_and_back_between_any_two_gives_the_same_bits(a):
    for b in CELLS:
        if a.endswith("gru") == b.endswith("gru"):
            once = there_and_back(cell(a), a, b)
            same(there_and_back(once, a, b), once)


def test_two_biases_become_their_sum_and_one_becomes_two_of_which_one_is_zero():
    one = rpx.shared.convert(cell("torch.lstm"), "torch.lstm", "equinox.lstm")
    same(one["bias"], columns("bias", "ifgo") + columns("hidden_bias", "ifgo"))
    two = rpx.shared.convert(cell("equinox.lstm"), "equinox.lstm", "torch.lstm")
    same(two["bias_ih"], columns("bias", "ifgo"))
    same(two["bias_hh"], np.zeros(4 * HIDDEN, np.float32))


def test_biases_of_gru_are_added_but_for_the_one_that_the_reset_gate_scales():
    got = rpx.shared.convert(cell("torch.gru"), "torch.gru", "flax.gru")
    same(got["ir"]["bias"], GATES["bias_r"] + GATES["hidden_bias_r"])
    same(got["iz"]["bias"], GATES["bias_z"] + GATES["hidden_bias_z"])
    same(got["in"]["bias"], GATES["bias_n"])
    same(got["hn"]["bias"], GATES["hidden_bias_n"])
    small = rpx.shared.convert(cell("nnx.gru"), "nnx.gru", "flax.gru")
    same(small["hn"]["bias"], np.zeros(HIDDEN, np.float32))
    same(rpx.shared.convert(small, "flax.gru", "nnx.gru"), cell("nnx.gru"))


def test_the_one_that_haiku_adds_to_its_forget_gate_is_in_the_bias_of_the_others():
    got = rpx.shared.convert(cell("haiku.lstm"), "haiku.lstm", "flax.lstm")
    same(got["hf"]["bias"], GATES["bias_f"] + np.float32(1))
    same(got["hi"]["bias"], GATES["bias_i"])
    back = rpx.shared.convert(cell("flax.lstm"), "flax.lstm", "haiku.lstm")
    same(back["linear"]["b"], np.concatenate([GATES["bias_i"], GATES["bias_g"], GATES["bias_f"] - 1, GATES["bias_o"]]))


def test_a_cell_without_biases_is_one_in_every_layout():
    names = [
        name for kind in ("lstm", "gru") for name in family(kind) if name.partition(".")[0] in ("equinox", "torch")
    ]
    for name in names:
        weights = {path: x for path, x in cells()[name].items() if "bias" not in path}
        p = rpx.shared.Pack(name)
        same(p.apply(p.init(weights)), weights)
    weights = {path: x for path, x in cells()["equinox.lstm"].items() if "bias" not in path}
    got = rpx.shared.convert(weights, "equinox.lstm", "torch.lstm")
    assert sorted(got) == ["weight_hh", "weight_ih"]
    same(rpx.shared.convert(got, "torch.lstm", "equinox.lstm"), weights)
    assert sorted(
        rpx.shared.Split("equinox.lstm", model="flax.lstm").init(
            rpx.shared.convert(weights, "equinox.lstm", "flax.lstm")
        )
    ) == [f"{source}{gate}" for source in "hi" for gate in "fgio"]


def test_a_file_that_keeps_no_empty_dicts_is_read():
    p, params = rpx.shared.Split({"w": rpx.shared.Concat(("a: 2", "b: 3"))}), {"a": B[:2], "b": B[:3]}
    raw = p.init(params)
    assert raw["b"] == {"@split": {}}
    same(p.apply({**raw, "b": {"@split": None}}), params)


@pytest.mark.parametrize(("order", "same_as"), [("ifco", "ifgo"), ("cifo", "gifo"), ("icfo", "igfo")])
def test_the_cell_gate_may_be_called_c(order, same_as):
    assert rpx.shared.gates("input", order) == rpx.shared.gates("input", same_as)


def test_a_raw_array_has_the_name_of_its_path_with_underscores_and_stands_at_its_first_value():
    block = rpx.shared.Concat(("b: 2", "c: 3"))
    p = rpx.shared.Split({"x/y.z": "a: 4", "w": block}, model={"p/q": "c: 3", "r": "a: 4", "s": "b: 2"}, where="cell")
    params = {"cell": {"p": {"q": jnp.ones(3)}, "r": jnp.ones(4), "s": jnp.ones(2)}}
    raw = jax.eval_shape(p.init, params)
    assert jax.tree.map(jnp.shape, raw["cell"]) == {
        "p": {"q": {"@split": {}}},
        "r": {"@split": {"x_y_z": (4,)}},
        "s": {"@split": {"w": (5,)}},
    }
    assert jax.tree.map(jnp.shape, jax.eval_shape(p.apply, raw)) == jax.tree.map(jnp.shape, params)
    assert p.raw_paths(params) == {"cell/p/q": "cell/s/w", "cell/r": "cell/r/x_y_z", "cell/s": "cell/s/w"}


def test_sizes_are_the_same_in_any_order():
    p = rpx.shared.Pack("returnn.attention", sizes={"key": 3, "heads": 2})
    assert p == rpx.shared.Pack("returnn.attention", sizes=[("heads", np.int64(2)), ("key", 3)])
    assert repr(p) == "Pack('returnn.attention', sizes={'heads': 2, 'key': 3})"


# ---- The AWD-LSTM case, and the flat vector of cuDNN.


unpack = jax.jit(rnn.unpack_lstm_weights, static_argnums=(1, 2, 3), static_argnames="bidirectional")


@pytest.mark.parametrize(
    ("layers", "bidirectional"),
    [pytest.param(1, False, marks=pytest.mark.thorough), pytest.param(3, False, marks=pytest.mark.thorough), (2, True)],
)
def test_the_flat_vector_of_cudnn_is_cut_as_jax_unpacks_it(layers, bidirectional):
    weights = normal(rnn.get_num_params_in_lstm(INPUTS, HIDDEN, layers, bidirectional))
    p = rpx.shared.CudnnLSTM(INPUTS, HIDDEN, num_layers=layers, bidirectional=bidirectional)
    raw, effective = made_and_read(p, {"weights": weights, "bias": np.ones(3, np.float32)})
    unpacked = unpack(weights, INPUTS, HIDDEN, layers, bidirectional=bidirectional)
    ends = [f"l{i}{end}" for i in range(layers) for end in ("", "_reverse")[: 1 + bidirectional]]
    expected = {
        f"{source}_{gate}_{end}": np.split(np.asarray(held[i]).T, 4, -1)["ifgo".index(gate)]
        for source, held in zip(("input", "hidden", "bias", "hidden_bias"), unpacked, strict=True)
        for i, end in enumerate(ends)
        for gate in "ifgo"
    }
    same(raw["weights"]["@cudnn_lstm"], expected)
    same(effective, {"weights": weights, "bias": np.ones(3, np.float32)})


def test_one_bias_of_cudnn_is_the_sum_of_two_and_none_leaves_zeros():
    weights = normal(rnn.get_num_params_in_lstm(INPUTS, HIDDEN, 1, bidirectional=False))
    unpacked = unpack(weights, INPUTS, HIDDEN, 1, bidirectional=False)
    *kernels, first, second = (np.asarray(x[0]) for x in unpacked)
    stages = [rpx.shared.CudnnLSTM(INPUTS, HIDDEN, biases=n) for n in (1, 0)]
    vectors = [made_and_read(p, {"w": weights})[1]["w"] for p in stages]
    start = np.concatenate([np.ravel(x) for x in kernels])
    zeros = np.zeros(4 * HIDDEN, np.float32)
    same(vectors, [np.concatenate([start, first + second, zeros]), np.concatenate([start, zeros, zeros])])


# ---- Code, and errors.
