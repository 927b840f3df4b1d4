"""One training step, the loop around it, and its checkpoints."""

import mcore_rl.megatron.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
