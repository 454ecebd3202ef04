"""Words of version 0.1 that are another word now. Each is an error that says the new one, for one version."""

from collections.abc import Collection

OLD_ARGUMENTS = {
    "reparax.HardConcrete": {"keep": "`rate`, the probability that a gate is closed, which is 1 - keep"},
    "reparax.Hurwitz": {"rate": "`margin`"},
    "reparax.LoRA": {"scaling": "`divisor`"},
    "reparax.NofM": {"axis": "`along`"},
    "reparax.PoincareBall": {"axis": "`along`"},
    "reparax.Quantize": {"scale": "`step`"},
    "reparax.Simplex": {"axis": "`along`"},
    "reparax.Sphere": {"axis": "`along`"},
    "reparax.VeRA": {"scale": "`start`"},
}
"""For each class, as JSON names it, its old arguments and what to write instead."""


def renamed(cls: str, given: Collection[str]) -> str | None:
    """What is wrong with the names of the arguments given to a class; None if none of them is an old one."""
    old = [name for name in OLD_ARGUMENTS.get(cls, {}) if name in given]
    return f"the argument {old[0]!r} is now {OLD_ARGUMENTS[cls][old[0]]}" if old else None
