"""mcore_rl's side of `bench.rl`: the program `mcore-rl rl`, whose steps wait for their turn.

python -m bench.rl_ours rl.toml [a.b=c ...]       in the folder that bench.rl_folder made
"""

import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; a thread each on a shared machine

import psutil
import torch

from bench.turns import Turns
from mcore_rl.checks.rl_run import check_rl
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron import platform as platforms
from mcore_rl.programs.open_run import open_run
from mcore_rl.programs.rollouts import load_prompts, open_rollouts
from mcore_rl.rl.batch import Minibatch
from mcore_rl.rl.models.reference import load_reference
from mcore_rl.rl.rewards.score import FailureReport
from mcore_rl.rl.step.learner import Learner, OptionalParts, policy_logprobs
from mcore_rl.rl.step.objective import Advantages
from mcore_rl.rl.step.policy_routes import PolicyRoutes
from mcore_rl.rl.trainer import RlTrainer
from mcore_rl.rl.types import Rollout
from mcore_rl.storage.run_config import load_run_config


@cache
def workers() -> list[psutil.Process]:
    """Return the reward workers, which are there when this is first called: to look for them takes milliseconds."""
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def cpu_s() -> float:
    """CPU seconds of this process and of its reward workers."""
    times = [worker.cpu_times() for worker in workers()]
    return time.process_time() + float(sum(one.user + one.system for one in times))


class InTurns(RlTrainer):
    """The trainer, whose steps wait for their turn; ends without a checkpoint."""

    turns: Turns

    def run(self) -> None:
        """Train while there are turns."""
        self._minibatches, self._advantages = self.learner.minibatches, self.learner.advantages
        engine = self.rollouts.engine
        engine.generate = self.turns.timed("rollout_s", engine.generate)  # type: ignore[method-assign]
        self.learner.minibatches = self._counted  # type: ignore[method-assign]
        self.learner.advantages = self._scored  # type: ignore[method-assign]
        while self.turns.next_step():
            self._start_s = cpu_s()
            self._step()

    def _counted(self, rollout: Rollout) -> list[Minibatch]:
        shapes = rollout.shapes.values()
        self.turns.add("completions", len(shapes))
        self.turns.add("completion_tokens", sum(shape.num_completion_tokens for shape in shapes))
        self.turns.add("tokens", sum(shape.num_tokens for shape in shapes))
        self.turns.add("solved", int((rollout.rewards_PG >= 1).sum()))
        return self._minibatches(rollout)

    def _scored(self, rollout: Rollout, minibatches: Sequence[Minibatch]) -> Advantages:
        """Return the advantages, which are the last thing before the updates."""
        advantages = self._advantages(rollout, minibatches)
        self.turns.add("rollout_and_scoring_s", cpu_s() - self._start_s)
        return advantages


def main() -> None:
    """Train in turns."""
    torch.set_num_threads(1)
    turns = Turns(cpu_s)
    config = load_run_config(RlRunConfig, Path(sys.argv[1]), sys.argv[2:])
    check_rl(config, 1)
    prompts = load_prompts(config)
    platform = platforms.start(config.platform, allows_te=False)
    with (
        open_run(config, platform) as run,
        open_rollouts(
            config, prompts, run.state.chunks, run.state.mesh, platform, FailureReport(run.log.message, run.folder.path)
        ) as rollouts,
    ):
        rollouts.engine.update_weights(0)
        routes = PolicyRoutes(run.state, config.rl, config.replay)
        vocab_size = prompts.tokenizer.vocab_size
        logprobs = policy_logprobs(run.state, config.rl, vocab_size)
        reference = load_reference(config.rl.loss, config.replay, run, logprobs, routes, config.updates_per_rollout)
        learner = Learner(run.state, config, routes, logprobs, OptionalParts(reference=reference))
        trainer = InTurns(run, config, rollouts, learner, prompts.held_out)
        trainer.turns = turns
        trainer.run()
    platforms.stop()


if __name__ == "__main__":
    main()
