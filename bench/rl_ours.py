"""mcore_rl's side of `bench.rl`: the program `mcore-rl rl`, whose steps wait for their turn.

python -m bench.rl_ours rl.toml [a.b=c ...]       in the folder that bench.rl_folder made
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; a thread each on a shared machine

import psutil
import torch

from bench.turns import Turns
from mcore_rl.backend import platform as platforms
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.load import load_config
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.rl.learner import Advantages, Minibatch
from mcore_rl.rl.rollout import Rollout
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.run.policy import prompts_of
from mcore_rl.run.rl import data_of
from mcore_rl.run.training import Data, train
from mcore_rl.train.loop import Loop, Run


def cpu_s() -> float:
    """Of this process and of those that judge for it."""
    judges = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return time.process_time() + float(sum(times.user + times.system for times in judges))


class InTurns(Loop):
    """The trainer, whose steps wait for their turn; ends without a checkpoint."""

    def __init__(self, run: Run, trainer: RlTrainer, turns: Turns) -> None:
        super().__init__(run)
        self._trainer, self._turns = trainer, turns
        engine, learner = trainer.rollouts.engine, trainer.learner
        self._minibatches, self._advantages = learner.minibatches, learner.advantages
        engine.generate = turns.timed("rollout_s", engine.generate)  # type: ignore[method-assign]
        learner.minibatches = self._counted  # type: ignore[method-assign]
        learner.advantages = self._scored  # type: ignore[method-assign]

    def run(self) -> bool:
        """See Loop."""
        while self._turns.next_step():
            self._step()
        return False

    def _step(self) -> None:
        self._start_s = cpu_s()
        self._trainer._step()

    def _evaluate(self, *, is_last: bool) -> None:
        raise AssertionError("rl.toml asks for no evaluation")

    def _counted(self, rollout: Rollout) -> list[Minibatch]:
        shapes = rollout.shapes.values()
        self._turns.add("completions", len(shapes))
        self._turns.add("completion_tokens", sum(shape.num_completion for shape in shapes))
        self._turns.add("tokens", sum(shape.num_prompt + shape.num_completion for shape in shapes))
        self._turns.add("solved", int((rollout.rewards_PG >= 1).sum()))
        return self._minibatches(rollout)

    def _scored(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> Advantages:
        """The last thing before the updates."""
        advantages = self._advantages(rollout, minibatches)
        self._turns.add("rollout_and_scoring_s", cpu_s() - self._start_s)
        return advantages


def main() -> None:
    """Train in turns."""
    torch.set_num_threads(1)
    turns = Turns(cpu_s)
    config = load_config(RlRunConfig, Path(sys.argv[1]), sys.argv[2:])
    check_rl(config, 1)
    prompts = prompts_of(config)
    data = data_of(config, prompts)

    @contextmanager
    def begin(run: Run) -> Iterator[Loop]:
        with data.begin(run) as trainer:
            assert isinstance(trainer, RlTrainer)
            yield InTurns(run, trainer, turns)

    platform = platforms.start(config.platform.model_copy(update={"layers": "torch"}))
    train(config, Data(begin=begin, facts=data.facts, lines=data.lines), platform)
    platforms.stop()


if __name__ == "__main__":
    main()
