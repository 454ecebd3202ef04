"""The programs of the libraries' guides, with one line more: a chain in a model, in a loop that owns the loss."""

from typing import Any, NamedTuple

import numpy as np
import programs
import pytest

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
CREATE = "state = TrainState.create(apply_fn=mlp.apply, params=params, batch_stats=batch_stats, tx=optax.adam(1e-2))"
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
    "linen_batch_norm": Guide(
        rpx.Freeze(where="Dense_0/.*") >> rpx.WeightNorm(where="Dense_1/kernel"),
        {
            "mlp = MLP()": "mlp = rpx.linen.parametrized(MLP(), p)",
            CREATE: 'fixed = {"fixed": variables["fixed"]}; '  # as the chain has fixed values
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
    np.testing.assert_allclose(ours["losses"][0], plain["losses"][0], rtol=0.02)  # L2 of other values, at the most
    assert np.abs(np.subtract(ours["losses"][1:], plain["losses"][1:])).max() > 1e-4
    assert len(ours["TRACED"]) == len(plain["TRACED"]) == 1


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_runs_on_eight_devices_with_equal_losses(name: str) -> None:
    guide = GUIDES[name]
    ours = programs.run(name, guide.wrapped | guide.sharded | LOOP, guide.p)
    np.testing.assert_allclose(ours["losses"], wrapped(name)["losses"], rtol=1e-5)


"""What is fixed, as it was before the program."""
