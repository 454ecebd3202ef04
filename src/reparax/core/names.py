"""Holds static tables of the public names, so that modules are imported only when used, and advises on wrong names.

Each public name belongs to a family, a public module such as ``rpx.norms``. Some names are also available at the top
level, such as ``rpx.WeightNorm``. A test compares these tables with what the families define. The tables also lead from
a kind in a raw tree or in JSON, such as ``weight_norm``, to its stage class.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

OLDEST, NEWEST = "0.8.0", "0.12.0.1"
"""The oldest and the newest version of JAX with which this package was tested."""


class Family(NamedTuple):
    """A public module, given by its full name, and the public names in it."""

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
"""Maps the name of each family (a public module) to its full module name and its public names."""
_TOP = (
    "Parametrization Chain Reparametrization Perturbation from_json all_but WeightNorm SpectralNorm VarNoise "
    "WeightDropout Gaussian Positive Orthogonal LowRank Freeze Mask MagnitudePruning Tie LoRA Quantized FakeQuantized "
    "optimizer partition combine is_parametrized decay_mask transfer summary remat factored explain roles"
)
TOP = tuple(_TOP.split())
"""The names that are also available at the top level."""
LIBRARIES = {"nnx": "flax", "linen": "flax", "equinox": "equinox", "haiku": "haiku"}
"""Maps each public module that needs a library to that library. ``dir(rpx)`` omits modules whose library is missing."""
LAYERS = {"flax": "reparax.models._nnx_layers", "equinox": "reparax.models._equinox_layers"}
"""Maps each library whose models are trees of modules to our module with a table of the axes in its layers."""
NOT_FAMILIES = ("testing", "demo")
"""The public modules that are not families: ``rpx.testing`` exists only after ``import reparax.testing``."""

FORMULA_METHODS = ("init", "apply", "update", "update_base", "penalty", "log_det")
"""The methods of a chain for which a stage defines formulas, such as ``init_leaf`` for ``"init"``."""
METHODS = (
    *(*FORMULA_METHODS, "fold", "original", "set", "with_axes"),
    *("deterministic", "stochastic", "check", "raw_paths", "shardings", "to_json"),
)
"""The methods and properties of a chain that are meant for users. All others are meant for authors of stages."""
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
"""Maps names in torch, optax, flax, paramax and PEFT to what users should write in reparax instead."""


def family_by_name() -> dict[str, str]:
    """Returns a dict from each public name to its family, a public module: ``{"Sphere": "norms", ...}``.

    Families that need a library are left out, because several of these families define the same name, such as
    ``Parametrized``.
    """
    return {name: family for family, (_, names) in FAMILIES.items() if family not in LIBRARIES for name in names}


def load(name: str) -> Any:
    """Returns ``rpx.name``, a public module or an object at the top level, and imports its module if necessary.

    This function is the ``__getattr__`` of the package.

    Raises:
      AttributeError: If the name does not exist. The error says what to write instead.
    """
    if name in FAMILIES:
        return _import_module(FAMILIES[name].module)
    if name in TOP:
        return getattr(load(family_by_name()[name]), name)
    raise AttributeError(f"reparax has no {name!r}{'.' if name.startswith('_') else _suggest(name)}", name=name)


def shown_names() -> list[str]:
    """Returns ``dir(rpx)``: the names at the top level, and the public modules whose libraries are installed."""
    missing = {family for family, library in LIBRARIES.items() if importlib.util.find_spec(library) is None}
    return sorted({*TOP, *FAMILIES} - missing)


def dir_of(family: str) -> Callable[[], list[str]]:
    """Returns the ``__dir__`` function of a module such as ``"norms"``, which lists only its public names."""
    return lambda: sorted(FAMILIES[family].names)


def import_stage(name: str) -> None:
    """Imports the module that defines a stage, given its class name or its kind: ``WeightNorm`` or ``weight_norm``.

    Importing the module registers the class. If the name is not a stage of this package, nothing happens.
    """
    for module, names in FAMILIES.values():
        if module.startswith("reparax.stages.") and _squash(name) in map(_squash, names):
            _import_module(module)


def _import_module(module: str) -> Any:
    """Imports a module of this package, given its full name, and returns it.

    If the installed JAX lacks something that the module needs, the error names the versions of JAX that were tested.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if not str(error.name).startswith("jax."):  # Another package is missing, and the error already names it.
            raise
        version, lack = importlib.metadata.version("jax"), str(error).partition(" (")[0]
        raise ImportError(
            f"reparax does not work with JAX {version} ({lack}). It was tested with JAX {OLDEST} to {NEWEST}: install "
            f"one of these versions, or a newer reparax.",
            name=error.name,
        ) from error


def layers_of_library(module: str) -> Any:
    """Returns the module with the table of layers of a library, given the name of any module in the library.

    For ``"flax.nnx.nn.linear"``, the result is the module ``models/_nnx_layers.py``. For a library without a table, the
    result is None.
    """
    table = LAYERS.get(module.partition(".")[0])
    return None if table is None else importlib.import_module(table)


def how_to_write() -> dict[str, str]:
    """Returns a dict from each public name to the shortest code for it: ``rpx.WeightNorm``, ``rpx.norms.Sphere``."""
    return {name: f"rpx.{name}" if name in TOP else f"rpx.{family}.{name}" for name, family in family_by_name().items()}


def _suggest(name: str) -> str:
    """Returns the end of the error text for an unknown name, such as ". Write `rpx.WeightNorm`.".

    An exact match in a family, in another library or among the methods takes precedence over a similar name.
    """
    codes = how_to_write()
    if name in codes:  # The name is in a public module. Names at the top level never get here.
        return f" at the top: it is `{codes[name]}`."
    if name in NAMES_OF_OTHERS:
        return f". Write {NAMES_OF_OTHERS[name]}."
    if name in METHODS:
        return f". It is a method of a chain: `p.{name}`."
    if name in NOT_FAMILIES:
        return f". It is a module: `import reparax.{name}`."
    squashed_names = {_squash(public): public for public in codes}  # With these, `weight_norm` leads to `WeightNorm`.
    similar_names = difflib.get_close_matches(name, codes, n=1, cutoff=0.7)
    if nearest := squashed_names.get(_squash(name)) or next(iter(similar_names), None):
        return f". Write `{codes[nearest]}`."
    return ". `dir(reparax)` lists what it has and its families."


def _squash(name: str) -> str:
    """Returns a name in lower case without underscores, so that ``weight_norm`` and ``WeightNorm`` agree."""
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
"""Maps argument names of other libraries to the possible names in reparax. A stage has at most one of the latter."""
NOTES = {
    "dim": " torch's weights are (out, in), so its dim=0 is axis -1 of a kernel (in, out).",
    "target_modules": " It matches whole paths: `where='.*(query|value)/kernel'`.",
    "lora_alpha": " As in PEFT, the rank divides it.",
}


def instead_of(name: str, argument_names: Sequence[str]) -> str:
    """Returns the advice for an argument ``name`` that a stage with the arguments ``argument_names`` does not take.

    For ``WeightNorm(dim=0)``, the advice is "Write `axis=`.", followed by a note on how torch counts axes. A known
    argument name of another library takes precedence over a similar name.
    """
    if not argument_names:
        return "It takes none."
    known_words = [word for word in WORDS_OF_OTHERS.get(name, ()) if word in argument_names]  # at most one word
    if words := known_words or difflib.get_close_matches(name, argument_names, n=1):
        return f"Write `{words[0]}=`.{NOTES.get(name, '')}"
    return f"It takes {', '.join(argument_names)}."
