"""The trainings by name, apart from their configs, which take a while to import."""

TRAININGS = {
    "pretrain": "mcore_rl.run.pretrain",
    "sft": "mcore_rl.run.sft",
    "rm": "mcore_rl.run.rm",
    "dpo": "mcore_rl.run.dpo",
    "rl": "mcore_rl.run.rl",
}
"""Module of each training whose `main(argv)` is one rank of it."""
