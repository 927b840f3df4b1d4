"""Checks that the settings of a reward model's training agree with each other."""

from mcore_rl.checks.preferences import preference_violations
from mcore_rl.checks.run import refuse
from mcore_rl.config.rm import RewardModelConfig


def check_rm(config: RewardModelConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    refuse(list(preference_violations(config, world_size)))
