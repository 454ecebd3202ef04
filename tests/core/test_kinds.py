"""The names of stages in raw trees, made from their class names."""

import pytest
from public import PUBLIC

from reparax.core.config import snake_case


def test_the_kinds_of_our_stages_are_their_names_as_words():
    """What checkpoints hold: the table below fixes how names become words, and `test_values` the names."""
    ours = {name: stage.kind for name, stage in PUBLIC.items() if hasattr(stage, "kind")}
    assert ours == {name: snake_case(name) for name in ours} | {"RigL": "rigl"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LoRA", "lora"),
        ("MyLoRA", "my_lora"),
        ("LoRANorm", "lora_norm"),
        ("MoE", "moe"),
        ("NByM", "n_by_m"),
        ("HTTPNorm", "http_norm"),
        ("MyLSTMNorm", "my_lstm_norm"),
        ("IA3", "ia3"),
        ("L2Norm", "l2_norm"),
        ("Conv2D", "conv2_d"),
        ("Low_Rank_B", "low_rank_b"),
    ],
)
def test_words_and_acronyms_of_a_class_name(name, kind):
    assert snake_case(name) == kind
