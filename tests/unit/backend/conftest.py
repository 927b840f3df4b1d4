"""Megatron is patched before a test imports it."""

import mcore_rl.backend.mcore_compat  # noqa: F401
