"""One training step, the loop around it, and its checkpoints."""

import mcore_rl.backend.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
