"""Megatron is patched before a test imports it."""

import mcore_rl.megatron.patches.table  # noqa: F401
