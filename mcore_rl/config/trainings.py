"""The trainings by name, apart from their configs, which take a while to import."""

TRAININGS = {
    "pretrain": "mcore_rl.run.programs.pretrain",
    "sft": "mcore_rl.run.programs.sft",
    "rm": "mcore_rl.run.programs.rm",
    "dpo": "mcore_rl.run.programs.dpo",
    "rl": "mcore_rl.run.programs.rl",
}
"""Module of each training whose `main(argv)` is one rank of it."""
