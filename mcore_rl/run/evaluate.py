"""One rank of `mcore-rl eval`: how well a checkpoint answers the held-out prompts of an RL config."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from mcore_rl.backend import platform as platforms
from mcore_rl.backend.launcher import world_size_of_launcher
from mcore_rl.backend.processes import rank_guard
from mcore_rl.checkpoint.weights import load_weights
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.model.build import build_model
from mcore_rl.obs.metrics import reduced
from mcore_rl.parallel.mesh import build_mesh, seed_ranks
from mcore_rl.rl.evaluation import evaluate_policy, evaluation_metrics
from mcore_rl.run.policy import prompts_of, rollouts_of


def main(argv: Sequence[str]) -> int:
    """Print one JSON line; `argv` is a config file and overrides."""
    with rank_guard():
        config = load_config(RlRunConfig, Path(argv[0]), argv[1:])
        check_rl(config, world_size_of_launcher())
        prompts = prompts_of(config)
        if not prompts.held_out:
            raise ConfigError("rl.eval.files is empty: there are no prompts to evaluate on. Name files.")
        settings = config.platform.model_copy(update={"layers": "torch", "recompute": "none"})
        platform = platforms.start(settings)
        mesh = build_mesh(config.mesh)
        seed_ranks(config.train.seed)
        chunks = build_model(config.model, mesh, platform, settings)
        stored = load_weights(chunks, mesh, config.model, checkpoint_of(config))
        with ExitStack() as stack:
            rollouts = rollouts_of(config, prompts, chunks, mesh, stack)
            _, facts = evaluate_policy(rollouts, prompts.held_out, config.rl.eval)
        if platform.rank == 0:
            told = {
                "checkpoint": str(stored.path),
                "prompts": len(prompts.held_out),
                **reduced(evaluation_metrics(facts)),
            }
            sys.stdout.write(json.dumps(told) + "\n")
        platforms.stop()
    return 0


def checkpoint_of(config: RlRunConfig) -> Path:
    """The run's own checkpoints where it has some, else checkpoint.load."""
    own = Path(config.run_dir) / "checkpoints"
    if own.is_dir() and any(own.iterdir()):
        return own
    if not config.checkpoint.load:
        raise ConfigError(
            f'run_dir="{config.run_dir}" has no checkpoint, and checkpoint.load is not set: nothing to evaluate. '
            "Set one of them."
        )
    return Path(config.checkpoint.load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
