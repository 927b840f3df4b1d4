"""Megatron is patched before a test imports it."""

import mcore_rl.backend.patches.table  # noqa: F401
