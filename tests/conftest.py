"""The strict room in which all tests run: eight simulated devices, no silent promotion of dtypes or ranks.

Most of the time goes to compiling small programs once, so the compiler is told not to try hard.
"""

import os

# XLA stops the process where it does not know a flag, and names it: take that one out.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
