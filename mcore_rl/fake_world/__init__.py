"""A rank of any world, without the rest of the world and without GPUs: its groups, its bytes, its part of the schedule.

Groups and shapes are right, and values are garbage, because collectives do nothing. GPUs must be hidden
(CUDA_VISIBLE_DEVICES=), as cli/exact.py does, and a process is a single rank at a time.
"""

import mcore_rl.megatron.patches.table  # noqa: F401  # first: torch and Megatron are patched
