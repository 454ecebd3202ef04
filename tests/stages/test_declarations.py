"""What stages declare: their arguments, what their raw values are, and on which arrays they act.

The text beside this file has a line for each stage, without the arguments ``where=None`` and ``stacked=()`` of all; and
below it, indented, its raw values as its docstring describes them.
"""

import inspect
import re
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

import reparax as rpx

TEXT = Path(__file__).with_suffix(".txt").read_text()
STAGES = {name: rest for name, *rest in re.findall(r"^([\w.]+)\((.*)\)(?:\n    (.*))?$", TEXT, flags=re.MULTILINE)}
CLASSES = {name: attrgetter(name)(rpx) for name in STAGES}

# What a class declares, unless it is the default, and the classes that declare it.
FLAGS = {
    ("elementwise", True): "Delta Hadamard VariationalDropout Bounded Elementwise Positive Scale Cast Freeze Mask "
    "GlobalMagnitudePruning",
    ("needs_update", True): "SpectralNorm",
    ("moves_weights", True): "RigL SET",
    ("stochastic", True): "Gaussian HardConcrete VarNoise VariationalDropout WeightDropout",
    ("overcomplete", True): "Simplex",
    ("straight_through", True): "FakeQuantized",
    ("changes_type", True): "Cast",
    ("acts_on_embeddings", False): "LoRA VeRA Quantized",
    ("needs_axes", False): "TrainableSlices FakeQuantized Quantized",
    ("any_matrix", True): "AlmostOrthogonal BlockDiagonal Circulant Diagonal FixedRank Grassmann Invertible Kronecker "
    "LowRank Orthogonal PositiveDefinite PositiveSemidefinite Skew SpecialLinear SpecialOrthogonal Stiefel Symmetric "
    "Toeplitz Triangular SpectralNorm",
    ("min_ndim", 0): "Fibration Gaussian VarNoise Bounded Elementwise Positive Scale Cast CudnnLSTM Freeze",
    ("min_ndim", 1): "Simplex",
    ("dtypes", np.floating): "PositiveDefinite SpecialLinear SpecialOrthogonal VariationalDropout PoincareBall Bounded "
    "Positive Simplex Cast FakeQuantized Quantized CudnnLSTM",
}


@pytest.mark.parametrize("name", STAGES)
def test_arguments_have_these_names_and_defaults(name):
    parameters = [x.replace(annotation=x.empty) for x in inspect.signature(CLASSES[name]).parameters.values()]
    plain = [x for x in parameters if str(x) not in ("where=None", "stacked=()")]
    named = [str(x) for x in plain if x.kind is x.KEYWORD_ONLY]
    given = [str(x) for x in plain if x.kind is not x.KEYWORD_ONLY]
    assert ", ".join([*given, *(["*", *named] if named else [])]) == STAGES[name][0]


@pytest.mark.parametrize("name", [name for name, (_, values) in STAGES.items() if values])
def test_raw_values_are_these(name):
    assert ", ".join(f"{value}={kind!r}" for value, kind in CLASSES[name].raw_values.items()) == STAGES[name][1]


@pytest.mark.parametrize(("flag", "value"), FLAGS)
def test_classes_declare_this(flag, value):
    declaring = {cls.__name__ for cls in CLASSES.values() if inspect.getattr_static(cls, flag, None) == value}
    assert declaring == set(FLAGS[flag, value].split())


def test_every_stage_is_here():
    folders = [rpx.adapters, rpx.matrices, rpx.noise, rpx.norms, rpx.numbers, rpx.quantized, rpx.shared, rpx.sparse]
    found = [x for folder in folders for x in vars(folder).values() if isinstance(x, type)]
    assert {x for x in found if issubclass(x, rpx.Parametrization)} == set(CLASSES.values())
