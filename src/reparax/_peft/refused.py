"""What of PEFT is not read, and why."""

MERGE = "Merge the adapter in PEFT with `merge_and_unload`, and read the weights with `from_torch`."

_FORMULAS = (
    "ADAMSS BEFT DEFT DELORA FROD GLORA OSF PEANUT PSOFT PVERA RANDLORA ROAD SUPERTUNING TINYLORA UNILORA VBLORA WAVEFT"
)
_INPUTS = "ADAPTION_PROMPT CARTRIDGE CPT MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING PROMPT_TUNING SHADOW"
TYPES = {
    **dict.fromkeys(_FORMULAS.split(), f"no chain of stages has its formula. {MERGE}"),
    **dict.fromkeys(_INPUTS.split(), "it adds inputs or activations, so it is no function of the weights."),
    **dict.fromkeys(("LILY", "POLY", "XLORA"), "it mixes adapters by the input, so it is no function of the weights."),
}
"""For each ``peft_type`` that is not read the reason."""

ATTENTION = (
    "PEFT adds the update of `out_proj` of nn.MultiheadAttention twice, also where it merges, and that of a Linear once"
)
"""Why adapters of torch's attention are not read or written, as in PEFT 0.21."""

SETTINGS = {"layer_replication": "the model has more layers than its base"}
"""For settings of LoRA that are not read the reason, where it is not the formula."""
