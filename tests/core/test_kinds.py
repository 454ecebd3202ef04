"""The names of stages in raw trees, made from their class names."""

import pytest
from public import PUBLIC

from reparax.core.config import snake_case

KINDS = {
    "AlmostOrthogonal": "almost_orthogonal",
    "BlockDiagonal": "block_diagonal",
    "Bounded": "bounded",
    "Cast": "cast",
    "Chain": "chain",
    "CayleyNeumann": "cayley_neumann",
    "Circulant": "circulant",
    "Constraint": "constraint",
    "CudnnLSTM": "cudnn_lstm",
    "Delta": "delta",
    "Diagonal": "diagonal",
    "Elementwise": "elementwise",
    "Fibration": "fibration",
    "FixedRank": "fixed_rank",
    "Freeze": "freeze",
    "Gain": "gain",
    "Gaussian": "gaussian",
    "GlobalMagnitudePruning": "global_magnitude_pruning",
    "Grassmann": "grassmann",
    "Hadamard": "hadamard",
    "HardConcrete": "hard_concrete",
    "Invertible": "invertible",
    "Joint": "joint",
    "Kronecker": "kronecker",
    "LoRA": "lora",
    "LowRank": "low_rank",
    "MagnitudePruning": "magnitude_pruning",
    "Mask": "mask",
    "MaxNorm": "max_norm",
    "NByM": "n_by_m",
    "Orthogonal": "orthogonal",
    "Pack": "pack",
    "Perturbation": "perturbation",
    "PoincareBall": "poincare_ball",
    "Positive": "positive",
    "PositiveDefinite": "positive_definite",
    "PositiveSemidefinite": "positive_semidefinite",
    "FakeQuantized": "fake_quantized",
    "RandomPruning": "random_pruning",
    "Reparametrization": "reparametrization",
    "RigL": "rigl",
    "Rotated": "rotated",
    "SET": "set",
    "Scale": "scale",
    "Simplex": "simplex",
    "Skew": "skew",
    "TrainableSlices": "trainable_slices",
    "SpecialLinear": "special_linear",
    "SpecialOrthogonal": "special_orthogonal",
    "SpectralNorm": "spectral_norm",
    "Sphere": "sphere",
    "Split": "split",
    "Stiefel": "stiefel",
    "Quantized": "quantized",
    "Symmetric": "symmetric",
    "Tie": "tie",
    "Toeplitz": "toeplitz",
    "Triangular": "triangular",
    "VarNoise": "var_noise",
    "VariationalDropout": "variational_dropout",
    "VeRA": "vera",
    "WeightDropout": "weight_dropout",
    "WeightNorm": "weight_norm",
    "WeightStandardization": "weight_standardization",
}


def test_the_kinds_of_our_stages_are_what_checkpoints_hold():
    ours = {name: stage.kind for name, stage in PUBLIC.items() if hasattr(stage, "kind")}
    assert {name: ours.get(name) for name in KINDS} == KINDS
    assert ours.keys() == KINDS.keys()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LoRA", "lora"),
        ("DoRA", "dora"),
        ("QLoRA", "qlora"),
        ("MyLoRA", "my_lora"),
        ("LoRANorm", "lora_norm"),
        ("MoE", "moe"),
        ("MyMoE", "my_moe"),
        ("NByM", "n_by_m"),
        ("PReLU", "prelu"),
        ("HTTPNorm", "http_norm"),
        ("MyLSTMNorm", "my_lstm_norm"),
        ("MyLSTM", "my_lstm"),
        ("Int8", "int8"),
        ("IA3", "ia3"),
        ("L2Norm", "l2_norm"),
        ("Conv2D", "conv2_d"),
        ("Low_Rank_B", "low_rank_b"),
    ],
)
def test_words_and_acronyms_of_a_class_name(name, kind):
    assert snake_case(name) == kind
