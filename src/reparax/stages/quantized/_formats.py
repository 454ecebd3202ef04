"""The table of formats. A format is a row: the numbers of its codes, and where its scales and zeros lie."""

from dataclasses import dataclass

import numpy as np

from reparax.stages.quantized._numbers import Numbers, floating_numbers, half_out, half_up, table_numbers, whole_numbers


@dataclass(frozen=True)
class Scales:
    """What the scales of blocks are stored as: codes, in units of a number that some of them share.

    Attributes:
      dtype: The dtype of the codes; ``"exponent"`` is a byte, the exponent of a power of two. ``"float16"`` is no code:
        the unit is 1.
      least: The smallest code of a block that is not zero.
      top: The code of the largest scale.
      shared: How many blocks share a unit, along the axis that is cut into blocks. None for all along that axis, 0 for
        all of the array.
      divided: Whether a float32 number divides scales; the unit is then 1, and only records the dtype of the weights.
    """

    dtype: str
    least: float = 0.0
    top: float = 1.0
    shared: int | None = 0
    divided: bool = False


@dataclass(frozen=True)
class Format:
    """A row: an array is ``scale * (number - zero) - offset``, with a scale for each block.

    Attributes:
      numbers: What codes stand for.
      block: The block if the user gives none, or None for the whole array.
      scales: What scales (and offsets) are stored as, or None for the dtype of the weights.
      zero: ``"zero"``, in units of the scale; ``"offset"``, in units of the weights; or ``""``.
      early: Whether codes are found with scales that are not rounded yet, as in gguf.
    """

    numbers: Numbers
    block: int | None = None
    scales: Scales | None = None
    zero: str = ""
    early: bool = False


NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
"""The sixteen numbers of NF4, quantiles of the normal distribution, as the paper on QLoRA prints them."""
E2M1 = table_numbers([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], mirrored=True, even=True)
"""The sixteen numbers of float4_e2m1fn."""


def _dynamic() -> Numbers:
    """Decades with ever fewer numbers, down to 1e-7: the dynamic map of bitsandbytes."""
    numbers = [0.0, 1.0]
    start, end = np.float64(np.float32(0.1)), 1.0
    for decade in range(7):
        parts = 2**decade
        # As torch.linspace counts: from both ends, by a step of single precision.
        step, i = np.float64((np.float32(end) - np.float32(start)) / np.float32(parts)), np.arange(parts + 1)
        edges = np.where(i < (parts + 1) // 2, start + step * i, end - step * (parts - i)).astype(np.float32)
        middles = np.float32(10.0 ** (decade - 6)) * ((edges[1:] + edges[:-1]) / np.float32(2))
        numbers += [*middles, *-middles]
    return table_numbers(sorted(numbers))


POWERS = Scales("exponent")
HALF = Scales("float16")
ROUNDED = Scales("int8", least=8, top=127, shared=None)
"""``double_quant``. The rounding error of a scale is below a sixteenth, so the largest number stays the largest."""

FORMATS = {
    **{f"int{bits}": Format(whole_numbers(bits, signed=True)) for bits in range(8, 1, -1)},
    "int1": Format(table_numbers([-1.0, 1.0])),
    **{f"uint{bits}": Format(whole_numbers(bits, signed=False), zero="zero") for bits in range(8, 0, -1)},
    "nf4": Format(table_numbers(NF4)),
    "float4_e2m1fn": Format(E2M1),
    "float8_e4m3fn": Format(floating_numbers("float8_e4m3fn")),
    "float8_e5m2": Format(floating_numbers("float8_e5m2")),
    "mxfp8": Format(floating_numbers("float8_e4m3fn"), 32, POWERS),
    "mxfp4": Format(E2M1, 32, POWERS),
    "nvfp4": Format(E2M1, 16, Scales("float8_e4m3fn", least=2**-6, top=448.0)),
    "nvfp4-pack": Format(E2M1, 16, Scales("float8_e4m3fn", least=2**-6, top=448.0, divided=True)),
    "dynamic8": Format(_dynamic()),
    "gguf:q4_0": Format(whole_numbers(4, signed=True, top=-8, nearest=half_up), 32, HALF, early=True),
    "gguf:q4_1": Format(whole_numbers(4, signed=False, nearest=half_up), 32, HALF, zero="offset", early=True),
    "gguf:q5_0": Format(whole_numbers(5, signed=True, top=-16, nearest=half_up), 32, HALF, early=True),
    "gguf:q5_1": Format(whole_numbers(5, signed=False, nearest=half_up), 32, HALF, zero="offset", early=True),
    "gguf:q8_0": Format(whole_numbers(8, signed=True, nearest=half_out), 32, HALF, early=True),
    "gguf:q4_k": Format(whole_numbers(4, signed=False), 32, Scales("uint8", top=63, shared=8), zero="offset"),
    "gguf:q6_k": Format(whole_numbers(6, signed=True), 16, Scales("int8", top=127, shared=16)),
}
