"""Chains from the JSON stored beside a checkpoint."""

from __future__ import annotations

from reparax.core.chains.algebra import Chain, Parametrization
from reparax.core.chains.config import load_stages


def from_json(text: str) -> Parametrization:
    """The parametrization from which ``to_json`` wrote ``text``.

    Raises:
      ValueError: If the text does not come from ``to_json``, names a stage that is not defined, passes wrong arguments
        to a stage, or names a function that is not a public one of ``jax.numpy``, ``jax.nn``, ``jax.lax`` or
        ``jax.scipy``. Nothing else is imported.

    A text from a stranger runs no code of theirs, but use it like their code: a regular expression with repetitions in
    repetitions can take years to match, and a rank or a count can ask for more memory than there is. Read such a text,
    or try it in a process that you can end.

    Example:
      >>> import reparax as rpx
      >>> rpx.from_json((rpx.WeightNorm(axis=0) >> rpx.VarNoise(0.1)).to_json())
      WeightNorm(axis=0) >> VarNoise(0.1)
    """
    stages = load_stages(text)
    for stage in stages:
        if not isinstance(stage, Parametrization):
            raise ValueError(f"from_json expected a stage, but found {stage!r}. Write it as an argument of a stage.")
    return stages[0] if len(stages) == 1 else Chain(tuple(stages))
