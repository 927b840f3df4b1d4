"""One rank of a reward model's training: `mcore-rl rm`, or `torchrun ... -m mcore_rl.programs.rm CONFIG.toml`."""

import sys
from collections.abc import Sequence

from mcore_rl.checks.tuning import check_rm
from mcore_rl.config.preferences import RewardModelConfig
from mcore_rl.families import allows_te
from mcore_rl.megatron import platform as platforms
from mcore_rl.programs.open_run import is_done, open_run, run_rank
from mcore_rl.programs.preferences import data_metrics, describe_preferences, load_preferences
from mcore_rl.train.reward_model import RewardModelTrainer, reward_head
from mcore_rl.workers.launcher import world_size_of_launcher


def main(argv: Sequence[str]) -> int:
    """Train a reward model on this rank; `argv` is a config file and overrides. Returns 0 when done or stopped."""
    return run_rank(train, RewardModelConfig, argv)


def train(config: RewardModelConfig) -> None:
    """Collective over the ranks that a launcher started: train to the last step, or until a stop is asked for."""
    # Everything that a user can get wrong comes first, before a model costs time.
    config = platforms.decided(config)
    check_rm(config, world_size_of_launcher())
    data = load_preferences(config)
    platform = platforms.start(config.platform, allows_te=allows_te(config))
    if not is_done(config, platform):
        with open_run(config, platform) as run:
            for line in describe_preferences(data):
                run.log.message(line)
            run.log.write_now(run.state.progress.step, data_metrics(data))
            head = reward_head(run.state.mesh, config)
            RewardModelTrainer(run, config, head, train=data.train, valid=data.valid).run()
    platforms.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
