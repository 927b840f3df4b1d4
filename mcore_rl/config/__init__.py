"""The description of a run, as frozen typed objects read from TOML. Imports neither torch nor Megatron."""

TRAININGS = {
    "pretrain": "mcore_rl.programs.pretrain",
    "sft": "mcore_rl.programs.sft",
    "rm": "mcore_rl.programs.rm",
    "dpo": "mcore_rl.programs.dpo",
    "rl": "mcore_rl.programs.rl",
}
"""Module of each training, in which `main(argv)` runs a single rank."""
