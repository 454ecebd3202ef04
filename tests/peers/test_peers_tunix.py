"""tunix's trainer, as its users call it, with a chain in the model: one line of the program changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import reparax as rpx

peft_trainer = pytest.importorskip("tunix.sft.peft_trainer")
common = pytest.importorskip("tunix.tests.test_common")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tunix reads old names of JAX

P = rpx.Freeze() >> rpx.LoRA(4, columns=(1, 2), where=".*(query|key|value)/kernel")
TX = optax.adamw(1e-2, weight_decay=0.1)
STEPS = 6


@pytest.fixture(autouse=True)
def _as_tunix_computes() -> Any:
    """Without the strict rules of our own tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def batches() -> list[Any]:
    tokens = np.random.default_rng(0).integers(0, 256, (STEPS, 4, 8))
    return [peft_trainer.TrainingInput(input_tokens=x, input_mask=np.ones((4, 8), np.float32)) for x in tokens]


def inputs(batch: Any) -> dict[str, Any]:
    positions, mask = jnp.tile(jnp.arange(8), (4, 1)), jnp.ones((4, 8, 8))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": positions,
        "attention_mask": mask,
    }


def plain() -> Any:
    return common.ToyTransformer(common.ModelConfig(num_layers=1), rngs=nnx.Rngs(0))


TRACED: list[None] = []


def counted(batch: Any) -> dict[str, Any]:
    TRACED.append(None)
    return inputs(batch)


def trained(model: Any, folder: Any = None) -> Any:
    """tunix's loop, which knows of no chain."""
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=100, max_steps=STEPS, checkpoint_root_directory=folder and str(folder)
    )
    trainer = peft_trainer.PeftTrainer(model, TX, config).with_gen_model_input_fn(counted)
    trainer.train(batches(), None)
    return trainer


def losses_of(trainer: Any) -> list[float]:
    return [float(x) for x in trainer.metrics_logger.get_metric_history("", "loss", "train")]


def test_the_trainer_trains_an_adapter_by_lora_params_as_the_functional_road_does(tmp_path: Any) -> None:
    model = rpx.nnx.Parametrized(plain(), P, rngs=nnx.Rngs(1), variable=nnx.LoRAParam)  # the line that changes
    base = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, rpx.nnx.Fixed)))
    before = len(TRACED)
    losses = losses_of(trained(model, tmp_path))
    assert len(TRACED) == before + 1  # compiled once

    graph, params, rest = nnx.split(plain(), nnx.Param, ...)
    raw = P.init(params, nnx.Rngs(1).params())
    tx = rpx.optimizer(TX)

    @jax.jit
    def step(raw: Any, state: Any, batch: dict[str, Any]) -> Any:
        def loss(raw: Any) -> Any:
            logits, _ = nnx.merge(graph, P.apply(raw), rest)(batch["input_tokens"], batch["positions"])
            return (
                optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["input_tokens"][:, 1:]).sum()
                / batch["input_mask"][:, 1:].sum()
            )

        value, grads = jax.value_and_grad(loss)(raw)
        updates, state = tx.update(grads, state, raw)
        return optax.apply_updates(raw, updates), state, value

    state, want = tx.init(raw), []
    for batch in batches():
        raw, state, value = step(raw, state, inputs(batch))
        want.append(float(value))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert losses[-1] != losses[0]
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(model, rpx.nnx.Fixed)), base)

    other = rpx.nnx.Parametrized(plain(), P, rngs=nnx.Rngs(2), variable=nnx.LoRAParam)
    trainer = trained(other, tmp_path)  # finds the files, and has no step left to do
    assert trainer.train_steps == STEPS
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(model)))


def test_the_trainer_trains_a_whole_model_under_weight_norm_with_noise() -> None:
    p = rpx.WeightNorm(where="lm_head/kernel")
    model = rpx.nnx.Parametrized(plain(), p >> rpx.VarNoise(0.01), rngs=nnx.Rngs(1))
    losses = losses_of(trained(model))
    assert np.isfinite(losses).all()
    assert int(model.rngs.count[...]) == STEPS
