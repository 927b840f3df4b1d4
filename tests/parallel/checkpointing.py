"""A run with checkpoints on a rank: begin or resume, train, save, be killed."""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.run import CheckpointConfig, PlatformConfig, PretrainConfig, TrainConfig
from mcore_rl.errors import CheckpointError, ConfigError
from mcore_rl.megatron.mesh import destroy_mesh
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.saving import Checkpoints
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import NextTokenHead, train_step
from tests.parallel.parity import LENGTH, SEQUENCES, WIDE_ROWS, batch, set_up_plain
from tests.ranks import run_ranks
from tests.tiny_models import TINY

QWEN = TINY["qwen3_moe"]
DEEPSEEK = TINY["deepseek_v3"]
SMALL = QWEN.model_copy(update={"num_layers": 2})
SMALL_DEEPSEEK = DEEPSEEK.model_copy(update={"num_layers": 2})
"""A dense layer, and one with an expert bias."""


def config_of(
    run_dir: Path, model: ModelConfig, mesh: MeshConfig, precision: Literal["fp32", "bf16"] = "fp32", **checkpoint: Any
) -> PretrainConfig:
    """Return a deterministic config whose learning rate changes at every step."""
    return PretrainConfig(
        run_dir=str(run_dir),
        platform=PlatformConfig(
            layers="torch",
            deterministic=True,
            precision=precision,
            logits_chunk_tokens=12 if precision == "bf16" else "auto",
        ),
        model=model,
        mesh=mesh,
        optim=OptimConfig(lr=1e-2, warmup_steps=2, clip_grad=0.3),
        train=TrainConfig(steps=20),
        checkpoint=CheckpointConfig(**checkpoint),
    )


@dataclass(kw_only=True)
class Run:
    state: TrainState
    checkpoints: Checkpoints
    folder: RunFolder
    source: Path | None
    lines: list[str]
    losses: dict[int, float] = field(default_factory=dict)
    """Loss by step."""

    def train(self, until: int, save_at: Collection[int] = ()) -> "Run":
        """Train up to step `until`, each step on its own batch, and save after some."""
        progress = self.state.progress
        while progress.step < until:
            microbatches = batch(self.state, progress.step, LENGTH, WIDE_ROWS)
            report = train_step(self.state, microbatches, NextTokenHead())
            progress.consumed_samples += SEQUENCES
            progress.consumed_tokens += report.count
            self.losses[progress.step] = report.loss
            if progress.step in save_at:
                self.checkpoints.save()
            self.lines += self.checkpoints.poll()
        return self


@contextmanager
def opened(config: PretrainConfig) -> Iterator[Run]:
    """Begin or resume the run of `config`; its saves are complete at the end."""
    state = set_up_plain(config)
    folder = RunFolder(Path(config.run_dir))
    fence = folder.claim()
    checkpoints = Checkpoints(state, folder.checkpoints, fence)
    source = checkpoints.resume().source
    run = Run(state=state, checkpoints=checkpoints, folder=folder, source=source, lines=checkpoints.poll())
    yield run
    run.lines += checkpoints.finish()
    fence.release()
    destroy_mesh()


def trained(config: PretrainConfig, until: int, save_at: Collection[int] = ()) -> Run:
    """On a rank: return the losses, lines and source of a run up to `until`."""
    with opened(config) as run:
        run.train(until, save_at)
    return without_state(run)


def without_state(run: Run) -> Any:
    """Return the fields of a run that can be sent to another process."""
    return Run(
        state=None,  # type: ignore[arg-type]
        checkpoints=None,  # type: ignore[arg-type]
        folder=run.folder,
        source=run.source,
        lines=run.lines,
        losses=run.losses,
    )


def run(config: PretrainConfig, until: int, save_at: Collection[int] = ()) -> Run:
    """Run `trained` on as many ranks as the mesh needs and return the answer of rank 0."""
    result: Run = run_ranks(trained, config.mesh.smallest_world, config, until, save_at)[0]
    return result


def assert_killed(function: Callable[..., Any], num_ranks: int, *args: Any) -> None:
    """Run `function` on ranks of which one kills itself with SIGKILL; another one may say first that it lost it."""
    with pytest.raises(AssertionError, match=r"died without an answer|[Cc]onnection (closed|reset)|[Bb]roken pipe"):
        run_ranks(function, num_ranks, *args)


def refusal(config: Any) -> str:
    """On a rank: the message of a run that does not begin."""
    with pytest.raises((CheckpointError, ConfigError)) as error, opened(config):
        pass
    return str(error.value)


def kill_this_rank() -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_writers() -> None:
    """Stop every writer of this rank before it writes, as on a disk that does not answer, until it is resumed."""

    def stop(_: int) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    torch.set_num_threads = stop  # the last thing that a forked process does before its work


def stopped_writers() -> list[psutil.Process]:
    """Return the child processes of this rank, once all of them have stopped."""
    children = psutil.Process().children()
    deadline = time.monotonic() + 300
    while not all(child.status() == psutil.STATUS_STOPPED for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.01)
    return children
