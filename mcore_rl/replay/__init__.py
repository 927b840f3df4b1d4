"""Routing replay: cache the experts that one pass chose, and impose them on another."""

import mcore_rl.megatron.patches.table  # noqa: F401  (its patches come before any import of Megatron)
