"""The blocks of the page "In real repositories" run on small trees of the same structure, and give the same numbers."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_array import normal

PAGE = Path(__file__).parents[2] / "docs" / "real_repositories.md"


def blocks(heading: str) -> list[str]:
    _, *sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (section,) = (section for section in sections if section.startswith(heading))
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


def run(heading: str, **names):
    """The names that a section's lines leave behind, after the imports of the page."""
    first = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[0]
    for block in (first, *blocks(heading)):
        exec(compile(block, f"{PAGE.name}, {heading}", "exec"), names)
    return names


@pytest.mark.thorough
def test_weights_of_a_torch_model_with_weight_norm_are_loaded():
    v, up = (
        np.asarray(normal(6, 2, 7)),
        np.asarray(normal(6, 4, 3)),
    )  # (out, in, width); of the transposed, (in, out, ...)
    g, gain = np.asarray(normal(6, 1, 1)), np.asarray(normal(6, 1, 1)) + 2
    alpha = np.asarray(normal(1, 6, 1))
    state = {"encoder.block.0.weight_g": g, "encoder.block.0.weight_v": v, "encoder.block.0.bias": np.ones(6, "f")}
    state |= {"encoder.block.1.alpha": alpha, "decoder.model.0.bias": np.zeros(4, "f")}
    state |= {"decoder.model.0.weight_g": gain, "decoder.model.0.weight_v": up}
    params = {
        "encoder": {
            "WNConv1d_0": {"Conv_0": {"kernel": jnp.ones((7, 2, 6)), "bias": jnp.zeros(6)}},
            "Snake1d_0": {"alpha": jnp.ones((1, 1, 6))},
        },
        "decoder": {"WNConvTranspose1d_0": {"ConvTranspose_0": {"kernel": jnp.ones((3, 4, 6)), "bias": jnp.ones(4)}}},
    }
    convs = {
        "encoder/WNConv1d_0/Conv_0": "encoder.block.0",
        "decoder/WNConvTranspose1d_0/ConvTranspose_0": "decoder.model.0",
    }
    snakes = {"encoder/Snake1d_0": "encoder.block.1"}
    names = run("DAC-JAX", params=params, torch_params=state, convs=convs, snakes=snakes)
    plain = names["plain"]
    for kernel, (norm, direction) in (
        (plain["encoder"]["WNConv1d_0"]["Conv_0"]["kernel"], (g, v)),
        (plain["decoder"]["WNConvTranspose1d_0"]["ConvTranspose_0"]["kernel"], (gain, up)),
    ):
        weight = norm * direction / np.linalg.norm(direction, axis=(1, 2), keepdims=True)
        np.testing.assert_allclose(kernel, weight.T, rtol=1e-5)
    np.testing.assert_array_equal(plain["encoder"]["Snake1d_0"]["alpha"], alpha.transpose(0, 2, 1))


@pytest.mark.thorough
def test_a_step_is_that_of_adam_and_then_normalized():
    single, double = np.asarray(normal(6, 4)), np.asarray(normal(2, 6, 4))
    params = {
        "actor": {"w": {"hyper_dense": {"kernel": jnp.asarray(single)}, "scaler": {"scaler": jnp.ones(4)}}},
        "critic": {"w": {"hyper_dense": {"kernel": jnp.asarray(double)}}},
    }
    names = run("SimbaV2", params=params)
    start = names["params"]
    tx = names["tx"]
    grads = jax.tree.map(lambda x: jnp.sin(3 * x + 1), start)
    adam = optax.adam(1e-4)
    with jax.numpy_dtype_promotion("standard"):  # for optax
        updates, _ = tx.update(grads, tx.init(start), start)
        plain, _ = adam.update(grads, adam.init(start), start)
    after, moved = optax.apply_updates(start, updates), optax.apply_updates(start, plain)
    for who, w in (("actor", single), ("critic", double)):
        ours, was, theirs = (tree[who]["w"]["hyper_dense"]["kernel"] for tree in (after, start, moved))
        np.testing.assert_allclose(was, w / np.linalg.norm(w, axis=-2, keepdims=True), rtol=1e-5)
        theirs = np.asarray(theirs)
        expected = theirs / np.linalg.norm(theirs, axis=-2, keepdims=True)
        np.testing.assert_allclose(ours, expected, atol=2e-7)
        assert np.abs(expected - theirs).max() > 1e-5
    np.testing.assert_array_equal(after["actor"]["w"]["scaler"]["scaler"], moved["actor"]["w"]["scaler"]["scaler"])


@pytest.mark.thorough
def test_noise_is_on_every_parameter_of_the_prediction_network_alone():
    params = {
        "decoder": {
            "prediction_network": {"embedding": {"weight": jnp.ones((200, 8))}, "rnn": {"bias": jnp.zeros((4, 256))}},
            "joint_network": {"weight": jnp.ones((8, 8))},
        }
    }
    noisy = run("axlearn", params=params)["noisy"]["decoder"]
    weight, bias = noisy["prediction_network"]["embedding"]["weight"], noisy["prediction_network"]["rnn"]["bias"]
    assert [float(jnp.std(x)) for x in (weight, bias)] == pytest.approx([0.075, 0.075], rel=0.1)
    np.testing.assert_array_equal(noisy["joint_network"]["weight"], params["decoder"]["joint_network"]["weight"])


@pytest.mark.thorough
def test_adapters_on_stacked_kernels_are_those_of_the_einsums():
    layers, heads, width, dim, hidden = 2, 4, 24, 20, 32
    block = {
        "attn": {
            "q_einsum": {"w": normal(layers, heads, width, dim)},
            "kv_einsum": {"w": normal(layers, 2, 1, width, dim)},
            "attn_vec_einsum": {"w": normal(layers, heads, dim, width)},
            "q_einsum_1": {"w": normal(layers, heads, width, dim)},
        },
        "mlp": {"gating_einsum": normal(layers, 2, width, hidden), "linear": normal(layers, hidden, width)},
    }
    params = {"PaliGemma": {"llm": {"layers": block, "embedder": {"input_embedding": normal(9, width)}}}}
    names = run("openpi", params=params)
    train = names["free"]["PaliGemma"]["llm"]["layers"]
    assert jax.tree.leaves(names["free"]["PaliGemma"]["llm"]["embedder"]) == []
    np.testing.assert_array_equal(train["attn"]["q_einsum_1"]["w"], block["attn"]["q_einsum_1"]["w"])
    free = jax.tree.map(lambda x: x + 0.1 * normal(*x.shape), names["free"])
    train = free["PaliGemma"]["llm"]["layers"]
    got = names["p"].apply(names["rpx"].combine(free, names["fixed"]))["PaliGemma"]["llm"]["layers"]
    for at, name, w in (
        ("attn", "q_einsum", "w"),
        ("attn", "kv_einsum", "w"),
        ("attn", "attn_vec_einsum", "w"),
        ("mlp", "gating_einsum", None),
        ("mlp", "linear", None),
    ):
        was, factors, weight = (tree[at][name][w] if w else tree[at][name] for tree in (block, train, got))
        a, b = np.asarray(factors["@lora"]["a"]), np.asarray(factors["@lora"]["b"])
        assert a.shape == (*was.shape[:-1], 16)
        assert b.shape == (*was.shape[:-2], 16, was.shape[-1])
        np.testing.assert_allclose(weight, np.asarray(was) + a @ b, atol=2e-5)
