"""Adapters of stacks of experts that are one parameter in torch; tests against PEFT are in ``tests/peers``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, table

import reparax as rpx

EXPERTS, INS, OUTS, RANK = 3, 4, 6, 2
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_parameters": ["experts.up", "experts.down"]}
OUTER, INNER = "base_model.model.experts", "base_model.model.experts.base_layer"
ADVICE = (
    "Pass the `config` of this adapter, and `like`, `names` and `layouts` of its model, or merge the adapter in PEFT "
    "with `merge_and_unload`, and read the weights with `from_torch`."
)
UP, DOWN = {"up": "experts.up"}, {"down": "experts.down"}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def lora(wrapper, ins, outs, seed=0):
    return {
        f"{wrapper}.lora_A.weight": normal(EXPERTS * RANK, ins, seed=seed),
        f"{wrapper}.lora_B.weight": normal(outs, RANK * EXPERTS, seed=seed + 1),
    }


def delta(tensors, wrapper):
    """The update (experts, out, in), as PEFT writes it down."""
    a, b = (tensors[f"{wrapper}.lora_{end}.weight"] for end in "AB")
    a, b = a.reshape(EXPERTS, RANK, -1), b.reshape(len(b), RANK, EXPERTS)
    return 6 / RANK * np.einsum("ore,eri->eoi", b, a)


LAYOUTS = {
    "experts:kernel": ((EXPERTS, INS, OUTS), lambda x: x.swapaxes(1, 2)),
    "experts:conv1d": ((EXPERTS, INS, OUTS), lambda x: x.swapaxes(1, 2)),
    "experts:same": ((EXPERTS, OUTS, INS), lambda x: x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_says_along_which_axis_factors_lie(layout):
    shape, turned = LAYOUTS[layout]
    config, tensors = CONFIG | {"target_parameters": ["experts.up"]}, lora(OUTER, INS, OUTS)
    base, how = {"up": normal(*shape, seed=5)}, {"names": UP, "layouts": {"up": layout}}
    p, raw = rpx.io.from_peft(tensors, config, base, **how)
    np.testing.assert_allclose(p.fold(raw)["up"] - base["up"], turned(delta(tensors, OUTER)), atol=1e-5)
    again, written = rpx.io.to_peft(p, raw, **how)
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())
    assert (written["target_parameters"], written["target_modules"]) == (["experts.up"], [])


def test_square_experts_are_transposed_where_the_layout_is():
    config, tensors = CONFIG | {"target_parameters": ["up"]}, lora(OUTER, 4, 4)
    zeros = {"up": jnp.zeros((EXPERTS, 4, 4))}
    for layout, (_, turned) in LAYOUTS.items():
        p, raw = rpx.io.from_peft(tensors, config, zeros, names=UP, layouts={"up": layout})
        np.testing.assert_allclose(p.fold(raw)["up"], turned(delta(tensors, OUTER)), atol=1e-5)


def test_state_dicts_have_stacks_of_experts_as_one_tensor():
    x = normal(2, EXPERTS, INS, OUTS)
    names = {"up": "layers.{i}.up"}
    for layout, want in {"experts:kernel": x.swapaxes(2, 3), "experts:conv1d": x, "experts:same": x}.items():
        how = {"names": names, "layouts": {"up": layout}}
        state = rpx.io.to_torch(rpx.Chain(), {"up": x}, **how)
        assert state.keys() == {"layers.0.up", "layers.1.up"}
        assert all(np.array_equal(state[f"layers.{i}.up"], want[i]) for i in range(2))
        assert np.array_equal(rpx.io.from_torch(rpx.Chain(), state, {"up": x}, **how)["up"], x)


def test_experts_that_are_modules_of_their_own_are_one_array_here():
    names = {"w1/kernel": "layers.{i}.block_sparse_moe.experts.{j}.w1.weight"}
    base, tensors, want = {"w1": {"kernel": normal(2, EXPERTS, INS, OUTS)}}, {}, np.zeros((2, EXPERTS, INS, OUTS))
    for i, j in np.ndindex(2, EXPERTS):
        a, b = normal(RANK, INS, seed=10 + 3 * i + j), normal(OUTS, RANK, seed=20 + 3 * i + j)
        module = f"base_model.model.layers.{i}.block_sparse_moe.experts.{j}.w1"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        want[i, j] = base["w1"]["kernel"][i, j] + 3 * (b @ a).T
    p, raw = rpx.io.from_peft(tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": 6}, base, names=names)
    assert p == rpx.Freeze() >> rpx.LoRA(RANK, 6.0, where="w1/kernel", stacked=(0, 1))
    np.testing.assert_allclose(p.fold(raw)["w1"]["kernel"], want, atol=1e-5)
    again, config = rpx.io.to_peft(p, raw, names=names)
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())
    modules = [f"layers.{i}.block_sparse_moe.experts.{j}.w1" for i, j in np.ndindex(2, EXPERTS)]
    assert config["target_modules"] == modules
    lines = (
        "\n  w1/kernel: expected tensors for each of the 6 layers, got them for 5. Pass a `like` with a separate array "
        "for each layer\n"
    )
    with raises(ValueError, f"from_peft: the adapter does not fit this model:{lines}{ADVICE}"):
        fewer = {name: x for name, x in tensors.items() if "0.block_sparse_moe.experts.1." not in name}
        rpx.io.from_peft(fewer, {"peft_type": "LORA", "r": RANK, "lora_alpha": 6}, base, names=names)


def two():
    return {"up": jnp.zeros((EXPERTS, INS, OUTS)), "down": jnp.zeros((EXPERTS, OUTS, INS))}


BOTH = {"layouts": {".*": "experts:kernel"}}


def test_rules_are_in_the_order_in_which_the_module_has_its_parameters():
    tensors = lora(INNER, INS, OUTS) | lora(OUTER, OUTS, INS, seed=2)  # up is registered first, so it lies inside
    p, raw = rpx.io.from_peft(tensors, CONFIG, two(), names=UP | DOWN, **BOTH)
    for name, wrapper in (("up", INNER), ("down", OUTER)):
        np.testing.assert_allclose(p.fold(raw)[name], delta(tensors, wrapper).swapaxes(1, 2), atol=1e-5)
    again, written = rpx.io.to_peft(p, raw, names=UP | DOWN, **BOTH)
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())
    assert written["target_parameters"] == ["experts.down", "experts.up"]
    turned, _ = rpx.io.to_peft(p, raw, names=DOWN | UP, **BOTH)
    assert turned[f"{OUTER}.lora_A.weight"].shape == (EXPERTS * RANK, INS)


def of_two(**how):
    return rpx.io.from_peft(lora(INNER, INS, OUTS) | lora(OUTER, OUTS, INS), CONFIG, two(), **how)


def written(chain, **how):
    return rpx.io.to_peft(chain, chain.init(two(), jax.random.key(0)), **how)


@table(__file__)
def test_what_does_not_fit_is_refused(case):
    case.check(globals())
