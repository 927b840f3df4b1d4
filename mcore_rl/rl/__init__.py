"""Reinforcement learning: rollouts, rewards, advantages and objectives."""

import mcore_rl.backend.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
