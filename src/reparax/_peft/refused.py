"""What of PEFT is not read, and why."""

MERGE = "Merge the adapter in PEFT with `merge_and_unload`, and read the weights with `from_torch`."

_FORMULAS = {
    "ADAMSS": "groups of outputs have their own factors, which the bias shares",
    "DEFT": "it subtracts a projection of the base",
    "FROD": "it replaces the base by a joint decomposition of all weights",
    "GLORA": "the weight moves the bias",
    "OSF": "the file lacks the singular vectors of the base that it replaces",
    "PEANUT": "the difference is a network of the base",
    "PSOFT": "the file lacks its factors, singular vectors of the base",
    "PVERA": "half of its numbers are for noise in activations",
    "RANDLORA": "its products share their factors",
    "ROAD": "it turns pairs of outputs, and the bias with them",
    "TINYLORA": "its numbers are those of several modules",
    "UNILORA": "all entries of all factors are picked from one vector",
    "VBLORA": "its factors are mixed of vectors of one bank",
    "WAVEFT": "the difference is an inverse wavelet transform",
}
_INPUTS = "ADAPTION_PROMPT CARTRIDGE CPT MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING PROMPT_TUNING SHADOW"
TYPES = {
    **{name: f"no chain of stages has its formula: {why}. {MERGE}" for name, why in _FORMULAS.items()},
    **dict.fromkeys(_INPUTS.split(), "it adds inputs or activations, so it is no function of the weights."),
    **dict.fromkeys(("LILY", "POLY", "XLORA"), "it mixes adapters by the input, so it is no function of the weights."),
}
"""For each ``peft_type`` that is not read the reason."""

ATTENTION = (
    "PEFT adds the update of `out_proj` of nn.MultiheadAttention twice, even when it merges, and that of a Linear once"
)
"""Why adapters of torch's attention are not read or written, as in PEFT 0.21."""

SETTINGS = {"layer_replication": "the model has more layers than its base"}
"""For settings of LoRA that are not read the reason, where it is not the formula."""
