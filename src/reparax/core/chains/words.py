"""Words of torch, PEFT, optax and others for arguments, and the words here."""

import difflib
from collections.abc import Sequence

OF_OTHERS = {
    "amount": ("sparsity",),
    "axes": ("axis", "along"),
    "axis": ("along",),
    "bits": ("format",),
    "dim": ("axis", "along"),
    "dropout": ("rate",),
    "filter": ("where",),
    "lora_alpha": ("alpha",),
    "mask": ("where",),
    "n_power_iterations": ("n_steps",),
    "name": ("where",),
    "orthogonal_map": ("map",),
    "p": ("rate",),
    "prob": ("rate",),
    "r": ("rank",),
    "scale": ("std", "factor"),
    "sigma": ("std",),
    "stddev": ("std",),
    "target_modules": ("where",),
}
"""For a word of another library, the words for it here; a stage has one of them, or none."""
NOTES = {
    "dim": " torch's weights are (out, in), so its dim=0 is axis -1 of a kernel (in, out).",
    "target_modules": " It matches whole paths: `where='.*(query|value)/kernel'`.",
    "lora_alpha": " As in PEFT, the rank divides it.",
}


def instead_of(name: str, argument_names: Sequence[str]) -> str:
    """What to write in place of an argument that a stage with the arguments ``argument_names`` does not have."""
    if not argument_names:
        return "It takes none."
    near = [word for word in OF_OTHERS.get(name, ()) if word in argument_names] or difflib.get_close_matches(
        name, argument_names, n=1
    )
    if near:
        return f"Write `{near[0]}=`.{NOTES.get(name, '')}"
    return f"It takes {', '.join(argument_names)}."
