"""Checks that the settings of a reward model's training are compatible."""

from collections.abc import Iterator

from mcore_rl.checks.preferences import preference_violations
from mcore_rl.checks.run import refuse
from mcore_rl.config.rm import RewardModelConfig


def check_rm(config: RewardModelConfig, world_size: int) -> None:
    """Raise a ConfigError that lists everything wrong with running `config` on `world_size` ranks, if anything is."""
    refuse([*preference_violations(config, world_size), *_steps(config)])


def _steps(config: RewardModelConfig) -> Iterator[str]:
    """Check that a process reward model has no settings for pairs."""
    if not config.data.has_steps:
        return
    if config.rm.shift == "chosen":
        yield (
            'rm.shift="chosen" with data.format="steps": scores of steps are logits of probabilities, and no answer is '
            'chosen. Set it to "auto".'
        )
    if config.rm.centering_coeff:
        yield (
            f'rm.centering_coeff={config.rm.centering_coeff:g} with data.format="steps": labels fix the mean of the '
            "scores. Set it to 0."
        )
