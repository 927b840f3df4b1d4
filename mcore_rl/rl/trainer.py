"""Reinforcement learning: generate and score completions, update the policy, and update the engine's weights."""

from collections.abc import Sequence

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.metrics.metrics import reduced
from mcore_rl.rl.rollouts.evaluation import evaluate_policy, evaluation_interval, evaluation_metrics
from mcore_rl.rl.rollouts.rollout import Rollout, Rollouts
from mcore_rl.rl.rollouts.signal import evaluation_warnings
from mcore_rl.rl.step.learner import Learner
from mcore_rl.rl.step.policy_routes import RefusedCompletionsError
from mcore_rl.rl.step_log import StepLog
from mcore_rl.rl.types import Prompt
from mcore_rl.train.loop import Run, Trainer


class RlTrainer(Trainer):
    """Trains a policy by reinforcement learning.

    A unit of work is a rollout batch. Only the weights outlive it, so a resumed run generates the next batch from the
    same prompts, seeds and weights.
    """

    def __init__(
        self, run: Run, config: RlRunConfig, rollouts: Rollouts, learner: Learner, held_out: Sequence[Prompt]
    ) -> None:
        super().__init__(run)
        self.config = config
        self.rollouts = rollouts
        self.learner = learner
        self.held_out = held_out
        self.step_log = StepLog(run, config, rollouts, learner, self._report_skip)

    def run(self) -> None:
        """Train as `Trainer.run` does, and also evaluate the policy before its first update."""
        if self.state.progress.step == 0 and self.config.train.eval_interval:
            self._pause_to_evaluate(is_last=False)
        super().run()

    def _step(self) -> None:
        """Run a rollout batch: generate and score completions, learn from them, and give the engine the new weights."""
        progress, step_log = self.state.progress, self.step_log
        step_log.begin()

        # Prompts, a group of completions for each prompt, and their rewards. The cursor moves past the prompts.
        rollout = self.rollouts.take(progress.consumed_prompts)
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
        """Run the passes and updates of a rollout batch, and update the engine's weights.

        Raises:
            RefusedCompletionsError: on all ranks, before any update.
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

            # The next rollout is sampled by the updated policy.
            self.rollouts.update_weights(self.state.progress.step)
            step_log.pushed(learner.after_updates(minibatches))

    def _evaluate(self, *, is_last: bool) -> None:
        """Evaluate the policy on the held-out prompts and log the metrics."""
        if not self.held_out:
            return
        with self.state.timers.phase("eval"):
            groups, summaries = evaluate_policy(self.rollouts, self.held_out, self.config.rl.eval)
        if warning := self.rollouts.truncation_warning(groups, summaries):
            self.log.message(f"evaluation: {warning}")
        metrics = list(evaluation_metrics(summaries))
        self.log.write_now(self.state.progress.step, metrics)
        measured = evaluation_interval(summaries)
        if is_last and measured is not None and self.state.platform.rank == 0:
            name, interval = measured
            start, end = self._first_evaluation(name), reduced(metrics)[name]
            if start is not None and isinstance(end, int | float):
                for line in evaluation_warnings(name, start, end, interval):
                    self.log.message(line)

    def _first_evaluation(self, name: str) -> float | None:
        """Return the metric's value before the first step, on rank 0; None if it was not measured.

        It is read from the log, because an earlier process of the run may have made that evaluation.
        """
        records = read_records(self.folder.path / FILE_NAME)
        first = next((record[name] for record in records if record["step"] == 0 and name in record), None)
        return float(first) if isinstance(first, int | float) else None
