"""The door to Megatron: patches, kernels, mesh, schedule, and whatever knows of more than one process."""

import mcore_rl.megatron.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
