"""Checks that a config names something to evaluate on."""

from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError


def refuse_nothing_to_evaluate(config: RunConfig) -> None:
    """Raise a ConfigError if the config names no prompts, or no pairs, for `mcore-rl eval`."""
    if isinstance(config, RlRunConfig) and config.rl.prompts.task == "file" and not config.rl.eval.files:
        raise ConfigError("rl.eval.files is empty: there are no prompts to evaluate on. Name files.")
    if isinstance(config, PreferenceRunConfig) and not config.data.valid:
        raise ConfigError("data.valid is empty: there are no pairs to evaluate on. Name files.")
