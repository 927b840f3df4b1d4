"""The trainings that run on ranks: by name, what starts a rank, what its config is, and how that is checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.checks.rl_run import check_rl
from mcore_rl.checks.run import check
from mcore_rl.checks.sft import check_sft
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import PretrainConfig, RunConfig
from mcore_rl.config.sft import SFTConfig


@dataclass(frozen=True, slots=True)
class Program:
    """A training that runs on ranks."""

    module: str
    """`python -m module CONFIG.toml key=value ...` is one rank."""
    config: type[RunConfig]
    check: Callable[[Any, int], None]
    """Of such a config and a number of ranks."""
    seq_length: Callable[[Any], int]
    """Of such a config: positions of a row of tokens, as memory is needed for."""

    def checked_config(
        self, path: Path, overrides: Sequence[str], ranks: int | None
    ) -> tuple[RunConfig, int]:
        """The config and the number of ranks it was checked for; None: the fewest that the mesh needs."""
        config = load_config(self.config, path, overrides)
        ranks = ranks or config.mesh.smallest_world
        self.check(config, ranks)
        return config, ranks


PROGRAMS: dict[str, Program] = {
    "pretrain": Program(
        "mcore_rl.run.pretrain", PretrainConfig, check, lambda config: config.data.seq_length
    ),
    "sft": Program("mcore_rl.run.sft", SFTConfig, check_sft, lambda config: config.data.seq_length),
    "rl": Program("mcore_rl.run.rl", RlRunConfig, check_rl, lambda config: config.packed_length),
}
