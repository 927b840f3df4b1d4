"""Reinforcement learning: rollouts, rewards, advantages, objectives."""

import mcore_rl.backend.mcore_compat  # noqa: F401  # first: Megatron is patched before it is imported
