"""Reinforcement learning: the order of a step."""

from collections.abc import Sequence
from copy import deepcopy

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.errors import StoppedError
from mcore_rl.metrics.verdict import verdict
from mcore_rl.rl.engines.base import rest
from mcore_rl.rl.rollouts.evaluation import evaluate_policy, evaluation_metrics, gather_samples, write_samples
from mcore_rl.rl.rollouts.rollout import Rollouts, rewards_of
from mcore_rl.rl.step.learner import Learner
from mcore_rl.rl.step.policy_routes import RefusedCompletionsError
from mcore_rl.rl.step_log import StepLog
from mcore_rl.rl.types import Prompt, Rollout
from mcore_rl.train.loop import Run, Trainer


class RlTrainer(Trainer):
    """Trains a policy by reinforcement learning; a unit of work is a rollout batch. Only the weights outlive it, so a
    resumed run generates the next batch from the same prompts, seeds and weights.
    """

    def __init__(
        self, run: Run, config: RlRunConfig, rollouts: Rollouts, learner: Learner, held_out: Sequence[Prompt]
    ) -> None:
        super().__init__(run)
        self.config, self.rollouts, self.learner, self.held_out = config, rollouts, learner, held_out
        self.step_log = StepLog(run, config, rollouts, learner, self._report_skip)

    def run(self) -> None:
        """Train as `Trainer.run` does, and also evaluate the policy before its first update."""
        super().run()
        is_done = self.state.progress.step >= self.config.train.steps
        if is_done and self.state.platform.rank == 0 and (found := verdict(self.step_log.records())):
            self.log.message(found.line)

    def _run_steps(self) -> None:
        if self.state.progress.step == 0 and self.config.train.eval_interval:
            self._pause_to_evaluate(is_last=False)
        super()._run_steps()

    def _step(self) -> None:
        """Run a rollout batch: generate and score completions, learn from them, and give the engine the new weights."""
        progress, step_log = self.state.progress, self.step_log
        step_log.begin()

        # Prompts, a group of completions for each prompt, and their rewards. The cursor moves past the prompts.
        moments = deepcopy(progress.reward_moments)
        try:
            rollout = self.rollouts.take(progress.consumed_prompts)
        except StoppedError:
            # Reward models may have counted a part of the batch, which the next start makes again.
            progress.reward_moments.clear()
            progress.reward_moments.update(moments)
            raise
        rest(self.rollouts.engine)
        progress.consumed_prompts += rollout.num_prompts
        step_log.generated(rollout)

        while True:
            try:
                self._learn_from(rollout)
                break
            except RefusedCompletionsError as refused:
                # No update has been made yet: repeat all passes over the batch without the refused completions.
                step_log.refused(refused.reasons)
                rollout = rollout.without(refused.reasons)
        step_log.finished()

    def _learn_from(self, rollout: Rollout) -> None:
        """Run the passes and updates of a rollout batch, and update the engine's weights. Raises
        RefusedCompletionsError on all ranks, before any update.
        """
        learner, step_log = self.learner, self.step_log

        # This rank's packed microbatches, after the passes without gradients; `learner.routes` records and replays the
        # routes of the microbatches. With a KL penalty in the reward, or a critic, advantages depend on these passes.
        minibatches = learner.prepared(rollout)
        advantages = learner.advantages(rollout, minibatches)
        before = learner.before_updates(minibatches, advantages)
        step_log.prepared(rollout, minibatches, [*advantages.metrics, *before])

        with learner.optimizer_state_on_device():
            for minibatch in minibatches * self.config.rl.update.epochs:
                report = learner.update(minibatch, advantages)
                step_log.updated(minibatch, report)
            after = learner.after_updates(minibatches)

        # The next rollout is sampled by the updated policy. Its optimizer state has left: engines may need the memory.
        try:
            self.rollouts.update_weights(self.state.progress.step)
        except StoppedError:
            step_log.pushed(after)  # the updates are made and saved
            raise
        step_log.pushed(after)

    def _save(self) -> None:
        rest(self.rollouts.engine)  # a save brings the optimizer state to the device
        super()._save()

    def _evaluate(self, *, is_last: bool) -> None:
        if not self.held_out:
            return
        with self.state.timers.phase("eval"):
            groups, summaries = evaluate_policy(self.rollouts, self.held_out, self.config.rl.eval)
        if warning := self.rollouts.truncation_warning(groups, summaries):
            self.log.message(f"evaluation: {warning}")
        if self.config.rl.samples.interval:
            samples = gather_samples(groups, rewards_of(summaries), self.state.mesh)
            if self.state.platform.rank == 0:
                write_samples(self.folder.path / "samples", self.state.progress.step, samples, "eval")
        metrics = list(evaluation_metrics(summaries))
        self.log.write_now(self.state.progress.step, metrics)
        self.step_log.watch(metrics)
