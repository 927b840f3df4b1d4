"""Megatron distributed checkpoints: folders that are complete or do not count, written and read by all ranks."""

import mcore_rl.megatron.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
