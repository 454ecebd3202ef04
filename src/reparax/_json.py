"""Chains from the configuration that lies beside a checkpoint."""

from reparax import _manifest
from reparax._core import Chain, Parametrization


def from_json(text: str) -> Parametrization:
    """The parametrization whose ``to_json`` wrote ``text``.

    Raises:
      ValueError: If the text is not of that form, or names a stage that is not defined.

    Example:
      >>> import reparax as rpx
      >>> rpx.from_json((rpx.WeightNorm(axis=0) >> rpx.VarNoise(0.1)).to_json())
      WeightNorm(axis=0) >> VarNoise(0.1)
    """
    stages = tuple(_manifest.loads(text))
    return stages[0] if len(stages) == 1 else Chain(stages)
