"""Routing replay: the experts that one pass chose, cached, and imposed on another."""

import mcore_rl.backend.patches.table  # noqa: F401  (its patches come before any import of Megatron)
