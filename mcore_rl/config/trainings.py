"""The trainings by name, separate from their configs, which are slow to import."""

TRAININGS = {
    "pretrain": "mcore_rl.run.programs.pretrain",
    "sft": "mcore_rl.run.programs.sft",
    "rm": "mcore_rl.run.programs.rm",
    "dpo": "mcore_rl.run.programs.dpo",
    "rl": "mcore_rl.run.programs.rl",
}
"""Module of each training, in which `main(argv)` runs a single rank."""
