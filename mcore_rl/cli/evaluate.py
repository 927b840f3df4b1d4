"""One rank of `mcore-rl eval`: a checkpoint's accuracy on held-out prompts, or a reward model's on held-out pairs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from torch import nn

from mcore_rl.checks.model import lora_violations
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.checks.run import refuse, refuse_nothing_to_evaluate
from mcore_rl.checks.tuning import check_rm
from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.load import kind_of
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.preferences import RewardModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import evaluation_conditions
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.families import allows_te
from mcore_rl.megatron import platform as platforms
from mcore_rl.megatron.mesh import Mesh, build_mesh, seed_ranks
from mcore_rl.megatron.platform import Platform
from mcore_rl.metrics.metrics import reduced
from mcore_rl.programs.inputs import load_model, refuse_other_tokenizer
from mcore_rl.programs.preferences import load_preferences
from mcore_rl.programs.rollouts import load_prompts, open_rollouts
from mcore_rl.rl.rewards.score import FailureReport
from mcore_rl.rl.rollouts.evaluation import evaluate_policy, evaluation_metrics
from mcore_rl.storage.checkpoints.read import StoredCheckpoint
from mcore_rl.storage.folders import stored_lora
from mcore_rl.storage.run_config import load_run_config
from mcore_rl.train.preferences import pair_sums
from mcore_rl.train.reward_model import calibration_table, reward_head
from mcore_rl.workers.imports import checkpoint_of
from mcore_rl.workers.launcher import world_size_of_launcher
from mcore_rl.workers.rank_guard import rank_guard

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def main(argv: Sequence[str]) -> int:
    """Evaluate on this rank and print one JSON line on rank 0; `argv` is a config file and overrides. Returns 0."""
    path, overrides = Path(argv[0]), argv[1:]
    with rank_guard():
        if kind_of(path, overrides, ("rl", "rm")) == "rm":
            evaluate_reward_model(load_run_config(RewardModelConfig, path, overrides))
        else:
            evaluate(load_run_config(RlRunConfig, path, overrides))
    return 0


def evaluate(config: RlRunConfig) -> None:
    """Collective over the ranks that a launcher started: answer the held-out prompts; rank 0 prints one JSON line."""
    config = platforms.decided(config)
    check_rl(config, world_size_of_launcher())
    refuse_nothing_to_evaluate(config)
    prompts = load_prompts(config)
    config, platform, mesh, chunks, stored = _loaded(config, config.data.tokenizer)
    failures = FailureReport(_complain, folder=None)
    # An owner of its own: servers that belong to the run, which may be training, refuse it by the run's name.
    own = config.model_copy(update={"run_dir": str(Path(config.run_dir) / "evaluation")})
    with open_rollouts(own, prompts, chunks, mesh, platform, failures) as rollouts:
        rollouts.engine.update_weights(0)
        groups, statistics = evaluate_policy(rollouts, prompts.held_out, config.rl.eval)
        warning = rollouts.truncation_warning(groups, statistics)
    if platform.rank == 0:
        if warning:
            sys.stderr.write(warning + "\n")
        result = {
            "checkpoint": str(stored.path),
            "prompts": len(prompts.held_out),
            "conditions": evaluation_conditions(config.model_dump()),
        }
        sys.stdout.write(json.dumps(result | reduced(evaluation_metrics(statistics))) + "\n")
    platforms.stop()


def evaluate_reward_model(config: RewardModelConfig) -> None:
    """Collective over the ranks that a launcher started: score all pairs of data.valid; rank 0 prints one JSON line."""
    config = platforms.decided(config)
    check_rm(config, world_size_of_launcher())
    refuse_nothing_to_evaluate(config)
    valid = load_preferences(config).valid
    if valid is None:
        raise ConfigError('train.eval_batches="none": nothing is evaluated. Set a number.')
    config, platform, mesh, chunks, stored = _loaded(config, config.data.tokenizer)
    if not stored.has_scores:
        raise CheckpointError(
            f"{stored.path} is of a language model, which has no scores. Name a checkpoint that `mcore-rl rm` made"
        )
    num_pairs, global_batch = valid.preferences.num_pairs, config.train.global_batch
    head = reward_head(mesh, config)
    sums = pair_sums(
        chunks, valid, head, mesh, platform.device, num_batches=-(-num_pairs // global_batch), global_batch=global_batch
    )
    if platform.rank == 0:
        has_steps = config.data.has_steps
        result = {"checkpoint": str(stored.path), "steps" if has_steps else "pairs": int(sums["count"])}
        result |= reduced(head.metrics(sums))
        if not has_steps:
            result["calibration"] = calibration_table(sums)
        sys.stdout.write(json.dumps(result) + "\n")
    platforms.stop()


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _loaded(
    config: AnyConfig, tokenizer: TokenizerConfig
) -> tuple[AnyConfig, Platform, Mesh, list[nn.Module], StoredCheckpoint]:
    """Collective over the world: load the checkpoint to evaluate; the config returned has its adapters."""
    source = checkpoint_to_evaluate(config.checkpoint.load, config.run_dir, tokenizer, config.model)
    config = with_stored_adapters(config, source)
    settings = config.platform.model_copy(update={"recompute": "none"})
    platform = platforms.start(settings, allows_te=allows_te(config))
    mesh = build_mesh(config.mesh, config.platform.timeout_s)
    seed_ranks(config.train.seed)
    allowed = config.checkpoint.allow_changes
    chunks, stored = load_model(config.model, config.lora, mesh, platform, settings, source, allowed=allowed)
    return config, platform, mesh, chunks, stored


def with_stored_adapters(config: AnyConfig, source: Path) -> AnyConfig:
    """Return the config with a checkpoint's adapters if it has none; ConfigError if it allows none."""
    lora = stored_lora(source)
    if config.lora.is_on or not lora.is_on:
        return config
    refuse([*lora_violations(lora, config)])
    return config.model_copy(update={"lora": lora})


def checkpoint_to_evaluate(load: str | None, run_dir: str, tokenizer: TokenizerConfig, model: ModelConfig) -> Path:
    """Return the folder of the run's own checkpoints, or else checkpoint.load; ConfigError without either."""
    own = Path(run_dir) / "checkpoints"
    if own.is_dir() and any(own.iterdir()):
        refuse_other_tokenizer(load_tokenizer(tokenizer), str(own), "run_dir")
        return own
    if not load:
        raise ConfigError(
            f'run_dir="{run_dir}" has no checkpoint, and checkpoint.load is not set: nothing to evaluate. '
            "Set one of them."
        )
    return checkpoint_of(load, model, Path(run_dir))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
