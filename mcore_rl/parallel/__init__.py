"""Ranks, groups, schedules: everything that knows of more than one process."""

import mcore_rl.backend.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
