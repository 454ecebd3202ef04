"""``jit`` for a few operations, which stand in the program of the caller by themselves."""

from functools import partial
from typing import Any

import jax

# Since jax 0.12.0, ``True`` leaves a call in the program until it is compiled.
_AT_ONCE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

inlined = partial(jax.jit, inline=_AT_ONCE)
"""A function that is compiled where it is called eagerly, and traced once for equal types where it is not."""
