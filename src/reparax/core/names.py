"""The public names, by static tables: nothing is imported until it is named; and what to write instead of other names.

A public name belongs to one family, a module of ``rpx``; some are at the top too. The tables stand for what the
families define, which a test compares with them; they also find the class of a kind in a raw tree or in JSON.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

OLDEST, NEWEST = "0.8.0", "0.12.0.1"
"""The versions of JAX with which this package was tested."""


class Family(NamedTuple):
    """A public module: where it is defined, and its names."""

    module: str
    names: tuple[str, ...]


_NAMES = {
    "stages.norms": "WeightNorm SpectralNorm WeightStandardization MaxNorm Sphere PoincareBall",
    "stages.noise": "VarNoise WeightDropout Gaussian VariationalDropout HardConcrete",
    "stages.numbers": "Positive Bounded Simplex Scale Elementwise",
    "stages.matrices": (
        "LowRank FixedRank AlmostOrthogonal Orthogonal SpecialOrthogonal Stiefel Grassmann Invertible "
        "SpecialLinear Symmetric Skew Triangular Diagonal Circulant Toeplitz BlockDiagonal Kronecker "
        "PositiveDefinite PositiveSemidefinite Fibration"
    ),
    "stages.sparse": "Freeze Mask MagnitudePruning GlobalMagnitudePruning RandomPruning NByM RigL SET",
    "stages.shared": "Tie Pack Split Concat gates CudnnLSTM convert",
    "stages.adapters": "LoRA VeRA Delta Hadamard Gain TrainableSlices Rotated",
    "stages.quantized": "Quantized FakeQuantized Cast",
    "training": (
        "optimizer partition combine is_parametrized param_labels decay_mask transfer summary reset_moments projected "
        "state_shardings"
    ),
    "transforms": "remat factored local_reparametrization explain saved_residuals",
    "axes": "roles Role check_axes",
    "io": "from_torch to_torch from_peft to_peft",
    "core.stage": (
        "Parametrization Chain from_json selected all_but Reparametrization Perturbation Constraint Joint main aux "
        "fixed field number_field axes_field other_axes Term Where Axes Number"
    ),
    "models.nnx": "Parametrized Fixed",
    "models.linen": "parametrized roles",
    "models.equinox": "Parametrized",
    "models.haiku": "parametrized",
}
FAMILIES = {path.rpartition(".")[2]: Family(f"reparax.{path}", tuple(names.split())) for path, names in _NAMES.items()}
"""For each family its module and its names."""
_TOP = (
    "Parametrization Chain Reparametrization Perturbation from_json all_but WeightNorm SpectralNorm VarNoise "
    "WeightDropout Gaussian Positive Orthogonal LowRank Freeze Mask MagnitudePruning Tie LoRA Quantized FakeQuantized "
    "optimizer partition combine is_parametrized decay_mask transfer summary remat factored explain roles"
)
TOP = tuple(_TOP.split())
"""The names that are at the top too."""
LIBRARIES = {"nnx": "flax", "linen": "flax", "equinox": "equinox", "haiku": "haiku"}
"""The families that need a library: one that is not installed is not shown."""
LAYERS = {"flax": "reparax.models._nnx_layers", "equinox": "reparax.models._equinox_layers"}
"""For a library whose models are trees of modules, what its layers say of their arrays."""
ALONE = ("testing", "demo")
"""The modules that one imports by themselves."""

VERBS = ("init", "apply", "update", "update_base", "penalty", "log_det")
"""The methods of a chain, to which each stage adds its formulas."""
METHODS = (
    *(*VERBS, "fold", "original", "set", "with_axes"),
    *("deterministic", "stochastic", "check", "raw_paths", "shardings", "to_json"),
)
"""What users call of a chain; all other names are for authors of stages."""
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


def family_of() -> dict[str, str]:
    """The family of each public name; those of libraries, which share names, are left out."""
    return {name: family for family, (_, names) in FAMILIES.items() if family not in LIBRARIES for name in names}


def load(name: str) -> Any:
    """What ``rpx.name`` is, a family or an object at the top; its module is imported now."""
    if name in FAMILIES:
        return _import_module(FAMILIES[name].module)
    if name in TOP:
        return getattr(load(family_of()[name]), name)
    raise AttributeError(f"reparax has no {name!r}{'.' if name.startswith('_') else _suggest(name)}", name=name)


def shown() -> list[str]:
    """What ``dir(rpx)`` shows: the names at the top and the families, if their libraries are installed."""
    missing = {family for family, library in LIBRARIES.items() if importlib.util.find_spec(library) is None}
    return sorted({*TOP, *FAMILIES} - missing)


def dir_of(family: str) -> Callable[[], list[str]]:
    """The ``__dir__`` of a family, which shows its public names alone."""
    return lambda: sorted(FAMILIES[family].names)


def import_stage(name: str) -> None:
    """Imports the family that defines the stage of a name or kind, if there is one; nothing of others is imported."""
    for module, names in FAMILIES.values():
        if module.startswith("reparax.stages.") and _squash(name) in map(_squash, names):
            _import_module(module)


def _import_module(module: str) -> Any:
    """A module of this package; an error that names the tested versions of JAX, if this one lacks what it imports."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if not str(error.name).startswith("jax."):
            raise
        version, lack = importlib.metadata.version("jax"), str(error).partition(" (")[0]
        raise ImportError(
            f"reparax cannot read JAX {version} ({lack}): it was tested with JAX {OLDEST} to {NEWEST}. Install one of "
            f"these versions, or a newer reparax.",
            name=error.name,
        ) from error


def layers_of_library(module: str) -> Any:
    """What the layers of a library say of their arrays, by the name of one of its modules; None if nothing is known."""
    table = LAYERS.get(module.partition(".")[0])
    return None if table is None else importlib.import_module(table)


def how_to_write() -> dict[str, str]:
    """How to write each public name: at the top, or else in its family."""
    return {name: f"rpx.{name}" if name in TOP else f"rpx.{family}.{name}" for name, family in family_of().items()}


def _suggest(name: str) -> str:
    """What to write in place of an unknown name: how an error about it ends."""
    ways = how_to_write()
    if name in ways:
        return f" at the top: it is `{ways[name]}`."
    if name in NAMES_OF_OTHERS:
        return f". Write {NAMES_OF_OTHERS[name]}."
    if name in METHODS:
        return f". It is a method of a chain: `p.{name}`."
    if name in ALONE:
        return f". It is a module: `import reparax.{name}`."
    squashed_names = {_squash(public): public for public in ways}
    similar_names = difflib.get_close_matches(name, ways, n=1, cutoff=0.7)
    if nearest := squashed_names.get(_squash(name)) or next(iter(similar_names), None):
        return f". Write `{ways[nearest]}`."
    return ". `dir(reparax)` lists what it has and its families."


def _squash(name: str) -> str:
    """A name without what tells ``weight_norm`` from ``WeightNorm``."""
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
    known_words = [word for word in WORDS_OF_OTHERS.get(name, ()) if word in argument_names]
    if words := known_words or difflib.get_close_matches(name, argument_names, n=1):
        return f"Write `{words[0]}=`.{NOTES.get(name, '')}"
    return f"It takes {', '.join(argument_names)}."
