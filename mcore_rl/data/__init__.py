"""Text to tokens, tokens to batches."""

import mcore_rl.megatron.patches.table  # noqa: F401  (its patches come before any import of Megatron)
