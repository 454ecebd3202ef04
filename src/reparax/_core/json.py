"""Chains from the configuration that lies beside a checkpoint."""

from reparax._core.algebra import Chain, Parametrization
from reparax._core.config import load_stages


def from_json(text: str) -> Parametrization:
    """The parametrization whose ``to_json`` wrote ``text``.

    Raises:
      ValueError: If the text is not of that form, names a stage that is not defined, gives it arguments that it does
        not take, or names a function other than the public ones of ``jax.numpy``, ``jax.nn``, ``jax.lax`` and
        ``jax.scipy``. Nothing else is imported.

    Example:
      >>> import reparax as rpx
      >>> rpx.from_json((rpx.WeightNorm(axis=0) >> rpx.VarNoise(0.1)).to_json())
      WeightNorm(axis=0) >> VarNoise(0.1)
    """
    stages = load_stages(text)
    for stage in stages:
        if not isinstance(stage, Parametrization):
            raise ValueError(
                f"from_json found {stage!r} in the place of a stage, but it is none. Write it as an argument of one."
            )
    return stages[0] if len(stages) == 1 else Chain(tuple(stages))
