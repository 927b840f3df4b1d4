"""One rank of a reward model's training: `mcore-rl rm`, or `torchrun ... -m mcore_rl.programs.rm CONFIG.toml`."""

import sys
from collections.abc import Sequence
from functools import partial

from mcore_rl.checks.tuning import check_rm
from mcore_rl.config.preferences import RewardModelConfig
from mcore_rl.programs.open_run import run_rank
from mcore_rl.programs.preferences import PreferenceData, train_on_preferences
from mcore_rl.train.loop import Run
from mcore_rl.train.reward_model import RewardModelTrainer, reward_head


def main(argv: Sequence[str]) -> int:
    """Train a reward model on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped."""
    return run_rank(train, RewardModelConfig, argv)


def trainer_of(config: RewardModelConfig, run: Run, data: PreferenceData) -> RewardModelTrainer:
    """Return the trainer of a reward model, or of a process reward model where answers have labelled steps."""
    return RewardModelTrainer(run, config, reward_head(run.state.mesh, config), train=data.train, valid=data.valid)


train = partial(train_on_preferences, check=check_rm, trainer=trainer_of)
"""Collective over the ranks that a launcher started: train to a config's last step, or until a stop is asked for."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
