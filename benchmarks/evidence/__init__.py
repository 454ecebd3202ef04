"""Claims of papers, tried on data that every machine has.

Each module named in ``CLAIMS`` is one claim. Its docstring says what is claimed, by whom, and the protocol; ``cells``
gives the runs, and ``table``, ``picture`` and ``sentence`` what was found. Run: make evidence.
"""

CLAIMS = (
    "weight_noise",
    "weight_dropout",
    "noise_memory",
    "weight_norm",
    "orthogonal",
    "spectral_norm",
    "lora",
    "pruning",
    "bayes",
)
"""The modules, in the order of their pages."""
