"""The programs of the libraries' guides, with one line more: a chain in a model, in a loop that owns the loss."""

from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import numpy as np
import orbax.checkpoint as ocp
import programs
import pytest
from flax import nnx, serialization

import reparax as rpx

pytestmark = pytest.mark.thorough  # quick tests of each wrapper train a network of numpy


class Guide(NamedTuple):
    """A chain, and lines that change: for the wrapped road, for that of functions, and to place it on devices."""

    p: rpx.Parametrization
    wrapped: dict[str, str]
    functions: dict[str, str]
    sharded: dict[str, str]


LOOP = {"for batch in batches:": "for batch in placed(batches):"}
NNX = "model = CNN(rngs=nnx.Rngs(0))"
ADAMW = "optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)"
LORA = "model = nnx.recursive_map(add_rank2_lora, base_model)"
BY_LORA = "optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)"
STATE = "state = create_train_state(cnn, jax.random.key(0), 0.1, 0.9)"
CREATE = "state = TrainState.create(apply_fn=mlp.apply, params=params, batch_stats=batch_stats, tx=optax.adam(1e-2))"
HAIKU = "network = hk.without_apply_rng(hk.transform(net_fn))"
FORWARD = "forward = hk.transform_with_state(_forward)"
STEPPED = "logits, state = forward.apply(params, state, None, batch, is_training=True)"
EVALUATED = "logits, _ = forward.apply(params, state, None, batch, is_training=False)"
MOMENTUM = (
    "return optax.chain(optax.trace(decay=0.9, nesterov=True), optax.scale_by_schedule(lambda _: 0.05), "
    "optax.scale(-1))"
)
L2 = 'l2_params = [p for path, p in jax.tree.leaves_with_path(params) if "batch_norm" not in path[0].key]'
BERT = "classifier = Classifier(model_key)"
CLIP = "tx = optax.chain(optax.clip_by_global_norm(1.0), tx)"
VMAP = "logits = jax.vmap(classifier, in_axes=(0, None, 0))(inputs, True, batched_keys)"

GUIDES = {
    "nnx_mnist": Guide(
        rpx.Freeze(where="conv1/.*") >> rpx.WeightNorm(where="linear./kernel"),
        {NNX: "model = rpx.nnx.Parametrized(CNN(rngs=nnx.Rngs(0)), p)"},
        {
            NNX: "model = p.init(CNN(rngs=nnx.Rngs(0)))",
            ADAMW: ADAMW.replace("optax.adamw(0.005, 0.9)", "rpx.optimizer(optax.adamw(0.005, 0.9))"),
            'logits = model(batch["image"], rngs)': "effective = p.apply(model); "
            'logits = effective(batch["image"], rngs); '
            "nnx.update(model, nnx.state(effective, nnx.Not(nnx.Param)))",
        },
        {ADAMW: f"model = placed(model); {ADAMW}"},
    ),
    "nnx_lora": Guide(
        rpx.Freeze() >> rpx.LoRA(2, where=".*/kernel"),
        {LORA: "model = rpx.nnx.Parametrized(base_model, p, rngs=nnx.Rngs(1), variable=nnx.LoRAParam)"},
        {
            LORA: "model = p.init(base_model, nnx.Rngs(1).params())",
            BY_LORA: "optimizer = nnx.Optimizer(model, rpx.optimizer(optax.adam(1e-3)), wrt=nnx.Param)",
            "return jnp.mean((model(x) - y) ** 2)": "return jnp.mean((p.apply(model)(x) - y) ** 2)",
        },
        {BY_LORA: f"model = placed(model); {BY_LORA}"},
    ),
    "linen_mnist": Guide(
        rpx.WeightNorm(where=".*kernel"),
        {"cnn = CNN()": "cnn = rpx.linen.parametrized(CNN(), p)"},
        {
            'params = module.init(rng, jnp.ones([1, 8, 8, 1]))["params"]': "params = "
            'p.init(module.init(rng, jnp.ones([1, 8, 8, 1]))["params"])',
            'logits = state.apply_fn({"params": params}, batch["image"])': "logits = "
            'state.apply_fn({"params": p.apply(params)}, batch["image"])',
            'logits = state.apply_fn({"params": state.params}, batch["image"])': "logits = "
            'state.apply_fn({"params": p.apply(state.params)}, batch["image"])',
        },
        {STATE: STATE.replace("create_train_state", "placed(create_train_state") + ")"},
    ),
    "linen_batch_norm": Guide(
        rpx.Freeze(where="Dense_0/.*") >> rpx.WeightNorm(where="Dense_1/kernel"),
        {
            "mlp = MLP()": "mlp = rpx.linen.parametrized(MLP(), p)",
            CREATE: 'fixed = {"fixed": variables["fixed"]}; '  # as the chain has values that do not train
            + CREATE.replace("mlp.apply", "lambda some, **kwargs: mlp.apply({**fixed, **some}, **kwargs)"),
        },
        {
            'params = variables["params"]': 'params = p.init(variables["params"])',
            CREATE: CREATE.replace("optax.adam(1e-2)", "rpx.optimizer(optax.adam(1e-2))"),
            'variables = {"params": params, "batch_stats": state.batch_stats}': "variables = "
            '{"params": p.apply(params), "batch_stats": state.batch_stats}',
            'variables = {"params": state.params, "batch_stats": state.batch_stats}': "variables = "
            '{"params": p.apply(state.params), "batch_stats": state.batch_stats}',
        },
        {
            "variables = mlp.init(jax.random.key(0), images[:1], train=False)": "variables = "
            "placed(mlp.init(jax.random.key(0), images[:1], train=False))"
        },
    ),
    "haiku_mnist": Guide(
        rpx.WeightNorm(where=".*/w"),
        {HAIKU: "network = rpx.haiku.parametrized(hk.without_apply_rng(hk.transform(net_fn)), p)"},
        {
            'initial_params = network.init(jax.random.key(0), batches[0]["image"])': "initial_params = "
            'p.init(network.init(jax.random.key(0), batches[0]["image"]))',
            'batch_size, *_ = batch["image"].shape': "raw, params = params, p.apply(params); "
            'batch_size, *_ = batch["image"].shape',
            "l2_regulariser = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))": "l2_regulariser = "
            "0.5 * sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(raw))",
            "losses.append(float(evaluate(state.avg_params, batches[0])))": "losses.append("
            "float(evaluate(p.apply(state.avg_params), batches[0])))",
        },
        {
            "initial_opt_state = optimiser.init(initial_params)": "initial_params = placed(initial_params); "
            "initial_opt_state = optimiser.init(initial_params)"
        },
    ),
    "haiku_imagenet": Guide(
        rpx.Freeze(where="linear/.*") >> rpx.WeightNorm(where="logits/w"),
        {FORWARD: "forward = rpx.haiku.parametrized(hk.transform_with_state(_forward), p)"},
        {
            "return TrainState(params, state, make_optimizer().init(params))": "params = p.init(params); "
            "return TrainState(params, state, make_optimizer().init(params))",
            STEPPED: STEPPED.replace("params", "p.apply(params)"),
            EVALUATED: EVALUATED.replace("params", "p.apply(params)"),
            MOMENTUM: MOMENTUM.replace("return ", "return rpx.optimizer(") + ")",
            L2: L2.replace("leaves_with_path(params)", "leaves_with_path(rpx.partition(params)[0])"),
        },
        {
            "train_state = initial_state(jax.random.key(42), batches[0])": "train_state = "
            "placed(initial_state(jax.random.key(42), batches[0]))"
        },
    ),
    "equinox_mnist": Guide(
        rpx.WeightNorm(where=".*weight", axis=0),
        {"model = CNN(subkey)": "model = rpx.equinox.Parametrized(CNN(subkey), p)"},
        {
            "model = CNN(subkey)": "model = p.init(CNN(subkey))",
            "pred_y = jax.vmap(model)(x)": "pred_y = jax.vmap(p.apply(model))(x)",
        },
        {"model = train(model, batches, optim)": "model = train(placed(model), batches, optim)"},
    ),
    "equinox_bert": Guide(
        rpx.Freeze(where="embedding/.*") >> rpx.WeightNorm(where="attention/.*weight", axis=0),
        {BERT: "classifier = rpx.equinox.Parametrized(Classifier(model_key), p)"},
        {
            BERT: "classifier = p.init(Classifier(model_key))",
            CLIP: CLIP.replace("tx = ", "tx = rpx.optimizer(") + ")",
            VMAP: VMAP.replace("classifier", "p.apply(classifier)"),
            "outputs = eqx.filter_jit(make_eval_step)(model, batches[0])": "outputs = "
            "eqx.filter_jit(make_eval_step)(p.apply(model), batches[0])",
        },
        {"model = classifier": "model = placed(classifier); opt_state = placed(opt_state)"},
    ),
}
WRAPPED: dict[str, Any] = {}


def wrapped(name: str) -> Any:
    """The program of the wrapped road, run once for all tests."""
    if name not in WRAPPED:
        WRAPPED[name] = programs.run(name, GUIDES[name].wrapped, GUIDES[name].p)
    return WRAPPED[name]


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_with_one_line_changed_trains_as_the_road_of_functions_and_compiles_once(name: str) -> None:
    guide = GUIDES[name]
    assert len(guide.wrapped) == (2 if name == "linen_batch_norm" else 1)
    plain, ours = programs.run(name, {}, guide.p), wrapped(name)
    by_hand = programs.run(name, guide.functions, guide.p)
    assert len(guide.functions) > len(guide.wrapped)
    np.testing.assert_allclose(ours["losses"], by_hand["losses"], rtol=1e-5)
    if name != "nnx_lora":  # flax's own layer has other factors
        np.testing.assert_allclose(ours["losses"][0], plain["losses"][0], rtol=0.02)  # L2 of other values, at the most
    assert np.abs(np.subtract(ours["losses"][1:], plain["losses"][1:])).max() > 1e-4
    assert len(ours["TRACED"]) == len(plain["TRACED"]) == 1


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_runs_on_eight_devices_with_equal_losses(name: str) -> None:
    guide = GUIDES[name]
    ours = programs.run(name, guide.wrapped | guide.sharded | LOOP, guide.p)
    np.testing.assert_allclose(ours["losses"], wrapped(name)["losses"], rtol=1e-5)


def fixed(name: str, ours: Any) -> list[Any]:
    """The values that do not train, after the program."""
    where = {
        "nnx_mnist": lambda: nnx.state(ours["model"], rpx.nnx.Fixed),
        "nnx_lora": lambda: nnx.state(ours["model"], rpx.nnx.Fixed),
        "linen_batch_norm": lambda: ours["mlp"].raw({**ours["fixed"], "params": ours["state"].params}),
        "haiku_imagenet": lambda: ours["forward"].raw(ours["train_state"].params, ours["train_state"].state),
        "equinox_bert": lambda: ours["model"].raw,
    }
    raw = where[name]()
    return jax.tree.leaves(eqx.filter(rpx.partition(raw)[1], eqx.is_array))


START = {
    "nnx_mnist": lambda made: nnx.state(made["CNN"](rngs=nnx.Rngs(0)).conv1),
    "nnx_lora": lambda made: nnx.state(made["make_model"](nnx.Rngs(0))),
    "linen_batch_norm": lambda made: made["MLP"]().init(jax.random.key(0), made["images"][:1], train=False)["params"][
        "Dense_0"
    ],
    "haiku_imagenet": lambda made: hk.transform_with_state(made["_forward"]).init(
        jax.random.key(42), made["batches"][0], is_training=True
    )[0]["linear"],
    "equinox_bert": lambda made: made["Classifier"](made["model_key"]).embedding.weight,
}
"""What is fixed, as it was before the program."""


@pytest.mark.parametrize("name", START)
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
    if "eval_model" in ours:
        model, other = (nnx.view(x, deterministic=True, use_running_average=True) for x in (model, other))
    batch = ours["batches"][0]
    x = batch.get("image", batch.get("x"))
    return model(x), other(x)


def stored_by_msgpack(ours: Any, _: Path) -> tuple[Any, Any]:
    state, batch = ours["state"], ours["batches"][0]
    empty = jax.tree.map(lambda x: 0 * x, state)
    other = serialization.from_bytes(empty, serialization.to_bytes(state))
    if "cnn" in ours:
        outs = [x.apply_fn({"params": x.params}, batch["image"]) for x in (state, other)]
    else:
        both = [{"params": x.params, "batch_stats": x.batch_stats} for x in (state, other)]
        outs = [state.apply_fn(variables, x=batch["image"], train=False) for variables in both]
    return outs[0], outs[1]


def stored_by_numpy(ours: Any, folder: Path) -> tuple[Any, Any]:
    """As haiku's documentation stores parameters: leaves and structure."""
    state = ours.get("state", ours.get("train_state"))
    leaves, treedef = jax.tree.flatten(state)
    np.savez(folder / "state.npz", *map(np.array, leaves))
    with np.load(folder / "state.npz") as file:
        other = jax.tree.unflatten(treedef, list(file.values()))
    batch = ours["batches"][0]
    if "network" in ours:
        return ours["evaluate"](state.params, batch), ours["evaluate"](other.params, batch)
    return tuple(ours["eval_batch"](x.params, x.state, batch) for x in (state, other))


def stored_by_equinox(ours: Any, folder: Path) -> tuple[Any, Any]:
    model = ours["model"]
    empty = jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, model)
    eqx.tree_serialise_leaves(folder / "model.eqx", model)
    other = eqx.tree_deserialise_leaves(folder / "model.eqx", empty)
    batch = ours["batches"][0]
    if "make_eval_step" in ours:
        return ours["make_eval_step"](model, batch), ours["make_eval_step"](other, batch)
    return jax.vmap(model)(batch["image"]), jax.vmap(other)(batch["image"])


STORED = {
    "nnx_mnist": stored_by_orbax,
    "nnx_lora": stored_by_orbax,
    "linen_mnist": stored_by_msgpack,
    "linen_batch_norm": stored_by_msgpack,
    "haiku_mnist": stored_by_numpy,
    "haiku_imagenet": stored_by_numpy,
    "equinox_mnist": stored_by_equinox,
    "equinox_bert": stored_by_equinox,
}


@pytest.mark.parametrize("name", GUIDES)
def test_a_checkpoint_in_the_way_of_the_library_is_read_again(name: str, tmp_path: Path) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        got, want = STORED[name](wrapped(name), tmp_path)
    assert np.abs(np.asarray(want)).max() > 0.01
    np.testing.assert_array_equal(got, want)
