"""Folders of runs for the tests of the report, written by the code that writes those of real runs."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.load import dump_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import LogConfig, PretrainConfig, RunConfig, TrainConfig
from mcore_rl.config.sft import SFTConfig
from mcore_rl.megatron.platform import Platform
from mcore_rl.metrics.attempts import add_attempt, this_run_attempt
from mcore_rl.metrics.metrics import Metric
from mcore_rl.metrics.sinks import open_log
from mcore_rl.rl.rollouts.evaluation import write_samples

LAYERS, EXPERTS = 3, 6
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
PLATFORM = Platform(
    device=torch.device("cpu"),
    dtype=torch.float32,
    layers="torch",
    rank=0,
    local_rank=0,
    world_size=2,
    deterministic=False,
)


def load_table(step: int) -> list[list[int]]:
    """Tokens of each expert of each layer; the first layer is dense."""
    rows = [[40 + 10 * ((step // 5 + layer * expert) % 5) for expert in range(EXPERTS)] for layer in range(LAYERS)]
    return [[0] * EXPERTS, *rows[1:]]


def loss_at(step: int) -> float:
    return 5 * math.exp(-step / 30) + 0.1 * math.sin(step)


def training_metrics(step: int) -> list[Metric]:
    return [
        Metric("train/loss_nats", loss_at(step)),
        Metric("train/grad_norm", 1 + 0.2 * math.cos(step)),
        Metric("train/lr", 1e-3 * min(1, step / 5)),
        Metric("train/step_s", 0.5),
        Metric("time/data_s", 0.1),
        Metric("time/forward_backward_s", 0.25),
        *_shared_metrics(step),
    ]


def policy_metrics(step: int) -> list[Metric]:
    around = 0.3 + 0.1 * math.sin(step)
    return [
        Metric("reward/mean", step / 100),
        Metric("reward/group_std", around),
        Metric("reward/accuracy", step / 200),
        Metric("reward/part/positions", step / 100),
        Metric("reward/part/format", 0.5),
        Metric("reward/errors", 1 if step == 4 else 0),
        Metric("policy/entropy_nats", 2 / (1 + step)),
        Metric("policy/kl_old_nats", 1e-4 * step),
        Metric("policy/clip_ratio_high", 0.01 * (step % 3)),
        Metric("policy/clip_ratio_low", 0.005),
        Metric("policy/ratio_mean", 1 + 1e-3 * math.sin(step)),
        Metric("policy/ratio_variance", 1e-3),
        Metric("policy/log_ratio_max", around),
        Metric("policy/log_ratio_min", -2 * around),
        Metric("routes/changed_fraction", 0.01),
        Metric("routes/changed_tokens_fraction", 0.08),
        *(Metric(f"routes/layer_{layer:02}/changed_fraction", 0.01 * layer) for layer in range(LAYERS)),
        Metric("rl/step_s", 2.0),
        Metric("rl/rollouts", step),
        Metric("time/rollout_s", 1.25),
        Metric("time/forward_backward_s", 0.5),
        *_shared_metrics(step),
    ]


def _shared_metrics(step: int) -> list[Metric]:
    return [
        Metric("train/tokens_per_s_per_rank", 1000 + step),
        Metric("train/consumed_tokens", 100 * step),
        Metric("memory/resident_bytes", 2**20 * (100 + step)),
        Metric("memory/peak_resident_bytes", 2**20 * (100 + step)),
        Metric("moe/load_max_over_mean", 1.5),
        *(Metric(f"moe/layer_{layer:02}/load_max_over_mean", 1 + 0.1 * layer) for layer in range(LAYERS)),
        Metric("moe/expert_load", torch.tensor(load_table(step))),
    ]


def write_run(folder: Path, config: RunConfig, steps: int, samples: Sequence[int] = ()) -> Path:
    """A run of so many steps of `config`'s kind; of RL with samples of those steps."""
    run_dir = folder / config.run_dir
    run_dir.mkdir(parents=True)
    settled = config.model_copy(
        update={"train": TrainConfig(steps=steps), "log": LogConfig(matrix_interval=5), "run_dir": str(run_dir)}
    )
    (run_dir / "config.toml").write_text(dump_config(settled), encoding="utf-8")
    add_attempt(run_dir, this_run_attempt(PLATFORM, config.mesh, 0))
    log = open_log(run_dir, settled.log, 0, steps)
    log.message("a fact about the start")
    is_rl = isinstance(config, RlRunConfig)
    for step in range(1, steps + 1):
        if is_rl and step in (1, steps):
            log.write_now(
                0 if step == 1 else step, [Metric("eval/accuracy", 0.1 + step / 100), Metric("eval/prompts", 64)]
            )
        log.write(step, (policy_metrics if is_rl else training_metrics)(step))
    log.message(f"warning: a warning with {HOSTILE}")
    log.write_now(steps, [Metric("eval/loss_nats", loss_at(steps))] if not is_rl else [])
    log.close()
    for step in samples:
        write_samples(run_dir / "samples", step, [sample(step, problem, n) for problem in "ab" for n in range(3)])
    (run_dir / "DONE").write_text(f"all {steps} steps are done since today\n")
    return run_dir


def sample(step: int, problem: str, number: int) -> dict[str, Any]:
    """A sample as a run writes it after the updates; its words are its tokens."""
    text = HOSTILE if number == 1 else f"completion {number} of step {step}\nof two lines"
    pieces = re.findall(r"\s*\S+", text)
    return {
        "problem": problem,
        "prompt": f"prompt {problem} of step {step}: {HOSTILE}",
        "advantage": number - 1.0,
        "pieces": pieces,
        "log_ratios": [None, *(0.3 * math.sin(3 * at + step) ** 3 for at in range(1, len(pieces)))],
        "changed_routes": {"routes": [2], "rollout_routes": [0] if number == 2 else []},
        "answer": "42",
        "completion": text,
        "reward": number / 2,
        "tokens": 7,
        "finish": "length" if number == 0 else "stop",
        "policy_version": step,
    }


def write_all(folder: Path) -> list[Path]:
    """A pipeline: pretraining, fine-tuning, two arms of reinforcement learning."""
    grpo = RlRunConfig(run_dir="grpo")
    loss = grpo.rl.loss.model_copy(update={"kind": "gspo"})
    gspo = RlRunConfig(run_dir="gspo", rl=grpo.rl.model_copy(update={"loss": loss}))
    return [
        write_run(folder, PretrainConfig(run_dir="pretrain"), 60),
        write_run(folder, SFTConfig(run_dir="sft"), 40),
        write_run(folder, grpo, 40, samples=(0, 20, 39)),
        write_run(folder, gspo, 40, samples=(0, 39)),
    ]
