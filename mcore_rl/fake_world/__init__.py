"""One rank of any world, without the others and without GPUs: its groups, its bytes, its part of the schedule.

Groups and shapes are right, and values are garbage, because collectives do nothing. GPUs must be hidden
(CUDA_VISIBLE_DEVICES=), as run/exact.py does, and one process is one rank at a time.
"""

import mcore_rl.backend.patches.table  # noqa: F401  # first: torch and Megatron are patched
