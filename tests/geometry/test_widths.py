import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from geometry.networks import KEY, gemma

import reparax as rpx
from reparax.geometry import Width, widths


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Transformer(nn.Module):
    """The form of mup's example: positions that are not learned, layers with norms behind, and a last layer."""

    width: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, self.width, name="encoder")(tokens) + jnp.sin(jnp.arange(tokens.shape[1]))[:, None]
        for i in range(2):
            y = nn.MultiHeadDotProductAttention(num_heads=2, name=f"attn{i}")(x)
            x = nn.LayerNorm(name=f"norm{i}1")(x + y)
            y = nn.Dense(2 * self.width, name=f"linear{i}1")(x)
            x = nn.LayerNorm(name=f"norm{i}2")(x + nn.Dense(self.width, name=f"linear{i}2")(nn.relu(y)))
        return nn.Dense(11, name="decoder")(x)


def factors(path):
    """By mup's table: the factor of Adam's learning rate, times that of the output, per doubling of the width."""
    hidden = any(name in path for name in ("query/kernel", "key/kernel", "value/kernel", "out/kernel"))
    hidden |= "linear" in path and path.endswith("kernel")
    return 0.5 if hidden or path == "decoder/kernel" else 1.0


def found(width):
    module, tokens = Transformer(width), jax.ShapeDtypeStruct((2, 5), jnp.int32)
    params = jax.eval_shape(module.init, KEY, tokens)["params"]
    return widths(lambda params, tokens: module.apply({"params": params}, tokens))(params, tokens)


def test_the_factors_are_those_of_mups_table():
    small, large = found(8), found(16)

    def scales(each):
        return {path: 1 / w.inputs if w.kind in ("hidden", "output") else 1.0 for path, w in each.items()}

    ratios = {path: large / scales(small)[path] for path, large in scales(large).items()}
    assert ratios == {path: factors(path) for path in small}
    assert small["encoder/embedding"] == Width("input", 11)
    assert small["decoder/kernel"] == Width("output", 8)
    assert small["linear02/kernel"] == Width("hidden", 16)
    assert small["attn0/query/bias"] == small["norm01/scale"] == Width("vector", 1)


def test_a_tied_table_is_both_and_what_lies_between_data_and_results_is_finite():
    fun, params, args, _ = gemma()
    assert widths(fun)(params, *args)["embed"].kind == "tied"
    assert widths(lambda w, x: x @ w["w"])({"w": np.ones((3, 2), np.float32)}, np.ones((5, 3), np.float32)) == {
        "w": Width("finite", 3)
    }


def test_a_scale_of_them_is_a_stage():
    each = found(16)
    p = rpx.Scale({path: 8 / w.inputs for path, w in each.items() if w.kind in ("hidden", "output")})
    assert rpx.from_json(p.to_json()) == p
