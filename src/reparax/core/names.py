"""Names and arguments that the package does not have: what to write instead."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

_METHODS = ("init", "apply", "update", "rebase", "fold", "deterministic", "penalty", "log_det", "to_json", "check")
LIBRARIES = ("nnx", "linen", "equinox", "haiku")
"""The modules that are imported when they are named, as each needs its library."""

_MODULES = ("testing", "demo", *LIBRARIES)
NAMES_OF_OTHERS = {
    "Adapter": "`rpx.LoRA(rank)`",
    "DropConnect": "`rpx.WeightDropout(rate)`",
    "Dropout": "`rpx.WeightDropout(rate)`",
    "GaussianNoise": "`rpx.VarNoise(std)`",
    "NonTrainable": "`rpx.Freeze(where=...)`",
    "Sequential": "`a >> b`",
    "WeightNormalization": "`rpx.WeightNorm()`",
    "WeightNoise": "`rpx.VarNoise(std)`",
    "chain": "`a >> b`",
    "get_peft_model": "`rpx.Freeze() >> rpx.LoRA(rank)`",
    "non_trainable": "`rpx.Freeze(where=...)`",
    "prune": "`rpx.MagnitudePruning(sparsity)`",
    "random_unstructured": "`rpx.sparse.RandomPruning(sparsity)`",
    "register_parametrization": "a chain, `p = rpx.WeightNorm()`, and `raw = p.init(params)`",
    "remove_parametrizations": "`p.fold(raw)`",
    "to_quantized": "`p.fold(raw)`, and give these weights to llm-compressor, GPTQModel or llama.cpp",
    "sequential": "`a >> b`",
    "unwrap": "`p.apply(raw)`",
}
"""For a name of torch, optax, flax, paramax or PEFT, what to write here."""


def how_to_write(namespace: Mapping[str, Any]) -> dict[str, str]:
    """How to write each public name of the package, which holds these: at the top, or else in its family."""
    families = {
        name: vars(x) for name, x in _public_names(namespace).items() if inspect.ismodule(x) and name not in _MODULES
    }
    below = {
        name: f"rpx.{family}.{name}"
        for family, names in families.items()
        for name, x in _public_names(names).items()
        if not inspect.ismodule(x)
    }
    return below | {name: f"rpx.{name}" for name, x in _public_names(namespace).items() if not inspect.ismodule(x)}


def unknown_name_error(name: str, namespace: Mapping[str, Any]) -> AttributeError:
    """The error for a name that the package, which holds these, does not have."""
    text = f"reparax has no {name!r}"
    return AttributeError(
        f"{text}." if name.startswith("_") else f"{text}{_suggest(name, how_to_write(namespace))}", name=name
    )


def _suggest(name: str, ways: Mapping[str, str]) -> str:
    """What to write in place of an unknown name: how an error about it ends."""
    if name in ways:
        return f" at the top: it is `{ways[name]}`."
    if name in NAMES_OF_OTHERS:
        return f". Write {NAMES_OF_OTHERS[name]}."
    if name in _METHODS:
        return f". It is a method of a chain: `p.{name}`."
    if name in _MODULES:
        return f". It is a module: `import reparax.{name}`."
    plain = {_squash(public): public for public in ways}
    if near := plain.get(_squash(name)) or next(iter(difflib.get_close_matches(name, ways, n=1, cutoff=0.7)), None):
        return f". Write `{ways[near]}`."
    return ". `dir(reparax)` lists what it has and its families."


def _public_names(names: Mapping[str, Any]) -> dict[str, Any]:
    """All of these without a leading underscore."""
    return {name: x for name, x in names.items() if not name.startswith("_")}


def _squash(name: str) -> str:
    """A name without what tells `weight_norm` from `WeightNorm`."""
    return name.replace("_", "").lower()


WORDS_OF_OTHERS = {
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
    near = [word for word in WORDS_OF_OTHERS.get(name, ()) if word in argument_names] or difflib.get_close_matches(
        name, argument_names, n=1
    )
    if near:
        return f"Write `{near[0]}=`.{NOTES.get(name, '')}"
    return f"It takes {', '.join(argument_names)}."
