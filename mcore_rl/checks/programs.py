"""The trainings that run on ranks, by name: the module of a rank, its config, and the check of that config."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.checks.inputs import absent_inputs
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.checks.run import check
from mcore_rl.checks.tuning import check_dpo, check_rm, check_sft
from mcore_rl.config import TRAININGS
from mcore_rl.config.preferences import DPOConfig, RewardModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig, RunConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.errors import ConfigError
from mcore_rl.storage.run_config import load_run_config


@dataclass(frozen=True, slots=True)
class Program:
    """A training that runs on ranks."""

    module: str
    """Module that `python -m module CONFIG.toml key=value ...` runs as a single rank."""
    config: type[RunConfig]
    check: Callable[[Any, int], None]
    """Check of such a config for a number of ranks; raises a ConfigError."""

    def checked_config(self, path: Path, overrides: Sequence[str], ranks: int | None) -> tuple[RunConfig, int]:
        """Return the config and the number of ranks it was checked for, by default the minimum for the mesh.

        Raises:
            McoreRlError: Everything wrong: what `load_run_config` raises, what the checks say of all other settings,
                and the files that are not there.
        """

        def check(config: RunConfig, is_wrong: bool) -> None:
            lines: list[str] = []
            try:
                self.checked_ranks(config, ranks)
            except ConfigError as error:
                lines = str(error).splitlines()
            if is_wrong or lines:
                raise ConfigError("\n".join([*lines, *absent_inputs(config)]))

        config = load_run_config(self.config, path, overrides, check=check)
        return config, ranks or config.mesh.smallest_world

    def checked_ranks(self, config: RunConfig, ranks: int | None) -> int:
        """Return the number of ranks that a config was checked for; ConfigError if it cannot run on them."""
        ranks = ranks or config.mesh.smallest_world
        self.check(config, ranks)
        return ranks


PROGRAMS: dict[str, Program] = {
    "pretrain": Program(TRAININGS["pretrain"], PretrainConfig, check),
    "sft": Program(TRAININGS["sft"], SFTConfig, check_sft),
    "rm": Program(TRAININGS["rm"], RewardModelConfig, check_rm),
    "dpo": Program(TRAININGS["dpo"], DPOConfig, check_dpo),
    "rl": Program(TRAININGS["rl"], RlRunConfig, check_rl),
}


def program_of(config: RunConfig) -> Program:
    """Return the training that a config is of."""
    return next(program for program in PROGRAMS.values() if program.config is type(config))
