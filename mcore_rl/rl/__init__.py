"""Reinforcement learning: rollouts, rewards, advantages and objectives."""

import mcore_rl.megatron.patches.table  # noqa: F401  # first: Megatron is patched before it is imported
