"""The programs of the libraries' guides, with one line more: a chain in a model, in a loop that owns the loss."""

from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
import programs
import pytest
from flax import nnx, serialization
from grids import mostly_thorough

import reparax as rpx


class Guide(NamedTuple):
    """A chain, and lines that change: for the wrapped road, for that of functions, and to place it on devices."""

    p: rpx.Parametrization
    wrapped: dict[str, str]
    functions: dict[str, str]
    sharded: dict[str, str]


LOOP = {"for batch in batches:": "for batch in placed(batches):"}
ADAMW = "optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)"
LORA = "model.linear1 = nnx.LoRA(8, 2, 16, base_module=model.linear1, rngs=nnx.Rngs(1))"
BY_LORA = "optimizer = nnx.Optimizer(model, optax.adamw(0.01, weight_decay=0.1), wrt=nnx.LoRAParam)"
BY_EQX = "updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))"
BY_TX = "updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))"
CREATE = 'state = TrainState.create(apply_fn=cnn.apply, params=variables["params"], tx=optax.adamw(0.005, 0.9))'
APPLY = 'logits = state.apply_fn({"params": params}, batch["image"])'
PARAMS = "params = avg_params = net.init(jax.random.key(42), batches[0])"
MLP = "model = eqx.nn.MLP(64, 10, 16, 1, key=jax.random.key(0))"
TX = "tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.005, weight_decay=0.1))"

GUIDES = {
    "nnx_mnist": Guide(
        rpx.Freeze(where="conv/.*") >> rpx.WeightNorm(where="linear./kernel"),
        {"model = CNN(rngs=nnx.Rngs(0))": "model = rpx.nnx.Parametrized(CNN(rngs=nnx.Rngs(0)), p)"},
        {
            "model = CNN(rngs=nnx.Rngs(0))": "model = p.init(CNN(rngs=nnx.Rngs(0)))",
            ADAMW: ADAMW.replace("optax.adamw(0.005, 0.9)", "rpx.optimizer(optax.adamw(0.005, 0.9))"),
            'logits = model(batch["image"])': 'logits = p.apply(model)(batch["image"])',
        },
        {ADAMW: f"model = placed(model); {ADAMW}"},
    ),
    "nnx_lora": Guide(
        rpx.Freeze() >> rpx.LoRA(2, where="linear1/kernel"),
        {LORA: "model = rpx.nnx.Parametrized(model, p, rngs=nnx.Rngs(1), variable=nnx.LoRAParam)"},
        {
            LORA: "model = p.init(model, nnx.Rngs(1).params())",
            BY_LORA: "optimizer = nnx.Optimizer(model, rpx.optimizer(optax.adamw(0.01, weight_decay=0.1)), "
            "wrt=nnx.Param)",
            'return optax.l2_loss(model(batch["x"]), batch["y"]).mean()': "return optax.l2_loss(p.apply(model)"
            '(batch["x"]), batch["y"]).mean()',
            "loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)": "loss, "
            "grads = nnx.value_and_grad(loss_fn)(model, batch)",
        },
        {BY_LORA: f"model = placed(model); {BY_LORA}"},
    ),
    "linen_mnist": Guide(
        rpx.Freeze(where="Conv.*") >> rpx.WeightNorm(where="Dense.*/kernel"),
        {
            "cnn = CNN()": "cnn = rpx.linen.parametrized(CNN(), p)",
            APPLY: APPLY.replace('{"params"', '{**variables, "params"'),  # as the chain has values that do not train
        },
        {
            CREATE: CREATE.replace('variables["params"]', 'p.init(variables["params"])').replace(
                "optax.adamw(0.005, 0.9)", "rpx.optimizer(optax.adamw(0.005, 0.9))"
            ),
            APPLY: APPLY.replace("params}", "p.apply(params)}"),
        },
        {CREATE: f"variables = placed(variables); {CREATE}"},
    ),
    "haiku_mnist": Guide(
        rpx.WeightNorm(where=".*/w"),
        {
            "net = hk.without_apply_rng(hk.transform(net_fn))": "net = rpx.haiku.parametrized("
            "hk.without_apply_rng(hk.transform(net_fn)), p)"
        },
        {
            PARAMS: "params = avg_params = p.init(net.init(jax.random.key(42), batches[0]))",
            "logits = net.apply(params, batch)": "logits = net.apply(p.apply(params), batch)",
        },
        {"opt_state = opt.init(params)": "params = avg_params = placed(params); opt_state = opt.init(params)"},
    ),
    "equinox_mnist": Guide(
        rpx.Freeze(where=".*bias") >> rpx.WeightNorm(where=".*weight", axis=0),
        {MLP: "model = rpx.equinox.Parametrized(eqx.nn.MLP(64, 10, 16, 1, key=jax.random.key(0)), p)"},
        {
            MLP: "model = p.init(eqx.nn.MLP(64, 10, 16, 1, key=jax.random.key(0)))",
            "optim = optax.adamw(0.005, weight_decay=0.1)": "optim = "
            "rpx.optimizer(optax.adamw(0.005, weight_decay=0.1))",
            'logits = jax.vmap(model)(batch["image"])': 'logits = jax.vmap(p.apply(model))(batch["image"])',
        },
        {
            "opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))": "model = placed(model); opt_state = "
            "optim.init(eqx.filter(model, eqx.is_inexact_array))"
        },
    ),
    "equinox_bert": Guide(
        rpx.Freeze(where="embedding/.*") >> rpx.WeightNorm(where="attention/.*weight", axis=0),
        {
            "classifier = Classifier(jax.random.key(0))": "classifier = rpx.equinox.Parametrized("
            "Classifier(jax.random.key(0)), p)"
        },
        {
            "classifier = Classifier(jax.random.key(0))": "classifier = p.init(Classifier(jax.random.key(0)))",
            TX: TX.replace("tx = ", "tx = rpx.optimizer(") + ")",
            "batch_keys = jax.random.split(key, num=16)": "batch_keys = jax.random.split(key, num=16); "
            "classifier = p.apply(classifier)",
        },
        {
            "opt_state, key = tx.init(eqx.filter(classifier, eqx.is_inexact_array)), jax.random.key(1)": "classifier = "
            "placed(classifier); opt_state, key = tx.init(eqx.filter(classifier, eqx.is_inexact_array)), "
            "jax.random.key(1)"
        },
    ),
}
MOSTLY = mostly_thorough(GUIDES, "nnx_mnist")
WRAPPED: dict[str, Any] = {}


def wrapped(name: str) -> Any:
    """The program of the wrapped road, run once for all tests."""
    if name not in WRAPPED:
        WRAPPED[name] = programs.run(name, GUIDES[name].wrapped, GUIDES[name].p)
    return WRAPPED[name]


@pytest.mark.parametrize("name", MOSTLY)
def test_a_guide_with_one_line_changed_trains_as_the_road_of_functions_and_compiles_once(name: str) -> None:
    guide = GUIDES[name]
    assert len(guide.wrapped) == (2 if name == "linen_mnist" else 1)
    plain, ours = programs.run(name, {}, guide.p), wrapped(name)
    by_hand = programs.run(name, guide.functions, guide.p)
    assert len(guide.functions) > len(guide.wrapped) or name == "linen_mnist"
    np.testing.assert_allclose(ours["losses"], by_hand["losses"], rtol=1e-5)
    if name != "nnx_lora":  # flax's own layer has other factors
        np.testing.assert_allclose(ours["losses"][0], plain["losses"][0], rtol=0.02)  # L2 of other values, at the most
    assert np.abs(np.subtract(ours["losses"][1:], plain["losses"][1:])).min() > 1e-5
    assert len(ours["TRACED"]) == len(plain["TRACED"]) == 1


@pytest.mark.parametrize("name", MOSTLY)
def test_a_guide_runs_on_eight_devices_with_equal_losses(name: str) -> None:
    guide = GUIDES[name]
    ours = programs.run(name, guide.wrapped | guide.sharded | LOOP, guide.p)
    np.testing.assert_allclose(ours["losses"], wrapped(name)["losses"], rtol=1e-5)
    trained = ours.get("model", ours.get("classifier", ours.get("params", ours.get("state"))))
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(trained) if isinstance(x, jax.Array))


def fixed(name: str, ours: Any) -> list[Any]:
    """The values that do not train, after the program."""
    where = {
        "nnx_mnist": lambda: nnx.state(ours["model"].raw),
        "nnx_lora": lambda: nnx.state(ours["model"].raw),
        "linen_mnist": lambda: ours["cnn"].raw({**ours["variables"], "params": ours["state"].params}),
        "equinox_mnist": lambda: ours["model"].raw,
        "equinox_bert": lambda: ours["classifier"].raw,
    }
    raw = where[name]()
    return jax.tree.leaves(eqx.filter(rpx.partition(raw)[1], eqx.is_array))


START = {
    "nnx_mnist": lambda made: nnx.state(made["CNN"](rngs=nnx.Rngs(0)).conv),
    "nnx_lora": lambda made: nnx.state(made["MLP"](nnx.Rngs(0))),
    "linen_mnist": lambda made: made["CNN"]().init(jax.random.key(0), made["images"][:1])["params"]["Conv_0"],
    "equinox_mnist": lambda _: [layer.bias for layer in eqx.nn.MLP(64, 10, 16, 1, key=jax.random.key(0)).layers],
    "equinox_bert": lambda made: made["Classifier"](jax.random.key(0)).embedding.weight,
}
"""What is fixed, as it was before the program."""


@pytest.mark.parametrize("name", mostly_thorough(START, "nnx_mnist"))
def test_the_optimizer_of_a_guide_keeps_every_bit_of_fixed_values(name: str) -> None:
    ours = wrapped(name)
    with jax.numpy_dtype_promotion("standard"):
        before = [np.array(x) for x in jax.tree.leaves(START[name](ours))]
    after = [np.array(x) for x in fixed(name, ours)]
    assert len(after) == len(before) > 0
    for x in before:
        assert any(np.array_equal(x, y) for y in after)


def stored_by_orbax(ours: Any, folder: Path) -> tuple[Any, Any]:
    """The outputs of the model, and of another one that reads its file."""
    model, other = ours["model"], nnx.clone(ours["model"])
    nnx.update(other, jax.tree.map(lambda x: 0 * x, nnx.state(other)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", nnx.state(model))
        checkpointer.wait_until_finished()
        nnx.update(other, checkpointer.restore(folder / "state", nnx.state(other)))
    batch = ours["batches"][0]
    x = batch.get("image", batch.get("x"))
    return model(x), other(x)


def stored_by_msgpack(ours: Any, _: Path) -> tuple[Any, Any]:
    state, batch, cnn = ours["state"], ours["batches"][0], ours["cnn"]
    empty = jax.tree.map(lambda x: 0 * x, state)
    other = serialization.from_bytes(empty, serialization.to_bytes(state))
    outs = [cnn.apply({**ours["variables"], "params": x.params}, batch["image"]) for x in (state, other)]
    return outs[0], outs[1]


def stored_by_numpy(ours: Any, folder: Path) -> tuple[Any, Any]:
    """As haiku's documentation stores parameters: leaves and structure."""
    leaves, treedef = jax.tree.flatten(ours["params"])
    np.savez(folder / "params.npz", *map(np.array, leaves))
    with np.load(folder / "params.npz") as file:
        params = jax.tree.unflatten(treedef, list(file.values()))
    net, batch = ours["net"], ours["batches"][0]
    return net.apply(ours["params"], batch), net.apply(params, batch)


def stored_by_equinox(ours: Any, folder: Path) -> tuple[Any, Any]:
    model = ours.get("model", ours.get("classifier"))
    empty = jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, model)
    eqx.tree_serialise_leaves(folder / "model.eqx", model)
    other = eqx.tree_deserialise_leaves(folder / "model.eqx", empty)
    batch = ours["batches"][0]
    x = batch.get("image", batch.get("token_ids"))
    return jax.vmap(eqx.nn.inference_mode(model))(x), jax.vmap(eqx.nn.inference_mode(other))(x)


STORED = {
    "nnx_mnist": stored_by_orbax,
    "nnx_lora": stored_by_orbax,
    "linen_mnist": stored_by_msgpack,
    "haiku_mnist": stored_by_numpy,
    "equinox_mnist": stored_by_equinox,
    "equinox_bert": stored_by_equinox,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", GUIDES)
def test_a_checkpoint_in_the_way_of_the_library_is_read_again(name: str, tmp_path: Path) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        got, want = STORED[name](wrapped(name), tmp_path)
    assert np.abs(np.asarray(want)).max() > 0.01
    np.testing.assert_array_equal(got, want)
