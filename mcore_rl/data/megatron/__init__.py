"""Encoded documents in Megatron's files: written in shards, and read as samples of a fixed length."""

import mcore_rl.megatron.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
