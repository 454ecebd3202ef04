"""MaxText's own LoRA, which qwix puts into its model, and a chain in the place of it: the same losses."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import partitioning

import reparax as rpx

lora_utils = pytest.importorskip("maxtext.utils.lora_utils")
maxtext = pytest.importorskip("maxtext")
pyconfig = pytest.importorskip("maxtext.configs.pyconfig")
creation = pytest.importorskip("maxtext.utils.model_creation_utils")
maxtext_utils = pytest.importorskip("maxtext.utils.maxtext_utils")

PATH = "decoder/layers/self_attention/(query|value)"
P = rpx.Freeze() >> rpx.LoRA(4, alpha=8.0, columns=(-2, -1), stacked="layers", where=f"{PATH}/kernel")
SETTINGS = {
    "run_name": "peers",
    "base_output_directory": "peers",
    "enable_checkpointing": False,
    "dataset_type": "synthetic",
    "skip_jax_distributed_system": True,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 1,
    "attention": "dot_product",
    "dtype": "float32",
    "lora": f'{{enable_lora: true, lora_rank: 4, lora_alpha: 8.0, lora_module_path: "{PATH}"}}',
}
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16))
POSITIONS = np.tile(np.arange(16), (8, 1))
TRACED: list[None] = []


@pytest.fixture(autouse=True)
def _as_maxtext_computes() -> Any:
    """Without the strict rules of our own tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def losses(model: Any) -> list[float]:
    """A loop that knows of no chain, and trains what is of MaxText's type for factors."""
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        TRACED.append(None)

        def loss(model: Any) -> Any:
            logits = model(TOKENS, POSITIONS, enable_dropout=False)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer)) for _ in range(5)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of MaxText's own calls
def test_a_chain_trains_as_the_adapter_that_maxtext_applies() -> None:
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    config = pyconfig.initialize(["", base, *(f"{name}={value}" for name, value in SETTINGS.items())])
    mesh = maxtext_utils.get_mesh_from_config(config)

    def plain() -> Any:
        return creation.from_config(config, mesh=mesh, rngs=nnx.Rngs(params=0, dropout=1))

    with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
        by_qwix = lora_utils.apply_lora_to_model(plain(), mesh, config)
        wrapped = rpx.nnx.Parametrized(
            plain(), P, rngs=nnx.Rngs(2), variable=nnx.LoRAParam
        )  # the line that replaces it
        for name in ("query", "value"):
            factors = getattr(wrapped.raw.decoder.layers.self_attention, name).kernel["@lora"]
            factors["a"][...] = jnp.array(getattr(by_qwix.decoder.layers.self_attention, name).kernel_lora_a[...])
            assert factors["a"].get_metadata()["out_sharding"][-1] is None
        fixed = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(wrapped, rpx.nnx.Fixed)))
        got, want = losses(wrapped), losses(by_qwix)
        assert len(TRACED) == 2  # one program each
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert want[4] < want[0]
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(wrapped, rpx.nnx.Fixed)), fixed)
