"""Reinforcement learning: generate and score completions, update the policy, and update the engine's weights."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron.schedule import MAX
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.metrics.metrics import Metric, reduced
from mcore_rl.metrics.peak import peak_flops
from mcore_rl.metrics.performance import memory_metrics, speed_metrics
from mcore_rl.model.router_load import RouterLoad
from mcore_rl.planning.flops import train_flops_by_length
from mcore_rl.rl.objectives.diagnostics import staleness_metrics, update_metrics
from mcore_rl.rl.passes.batch import Minibatch
from mcore_rl.rl.passes.policy_routes import RefusedCompletionsError
from mcore_rl.rl.passes.trace import TokenTrace
from mcore_rl.rl.rollouts.evaluation import evaluate_policy, evaluation_interval, evaluation_metrics
from mcore_rl.rl.rollouts.rollout import Rollout, Rollouts
from mcore_rl.rl.rollouts.samples import gather_samples, table_lines, write_samples
from mcore_rl.rl.rollouts.signal import LearningWarnings, evaluation_warnings, update_signal
from mcore_rl.rl.types import Prompt
from mcore_rl.rl.update.learner import Learner
from mcore_rl.train.loop import Run, Trainer
from mcore_rl.train.mtp_metrics import take_mtp_losses
from mcore_rl.train.step import StepReport


class RlTrainer(Trainer):
    """Trains a policy by reinforcement learning.

    A unit of work is a rollout batch. Only the weights outlive it, so a resumed run generates the next batch from the
    same prompts, seeds and weights.
    """

    def __init__(
        self,
        run: Run,
        config: RlRunConfig,
        rollouts: Rollouts,
        learner: Learner,
        held_out: Sequence[Prompt],
    ) -> None:
        super().__init__(run)
        self.config = config
        self.rollouts = rollouts
        self.learner = learner
        self.held_out = held_out
        self._was_truncated = False
        """Whether all completions of the previous rollout batch were truncated; the warning is then not repeated."""
        advantage = config.rl.advantage
        self._learning = LearningWarnings(
            compares_groups=advantage.compares_group or not advantage.is_of_tokens
        )
        self._compares_rewards = advantage.compares_group and not advantage.uses_steps
        """Whether an advantage compares a completion's reward with the rewards of its group."""
        self._load = RouterLoad(run.state.chunks) if config.model.is_moe else None
        self._flops_per_token = train_flops_by_length(config.model, config.lora)
        self._peak_flops = peak_flops(
            run.state.platform.device, config.platform.precision, config.log.peak_tflops
        )

    def run(self) -> None:
        """Train as `Trainer.run` does, and also evaluate the policy before its first update."""
        if self.state.progress.step == 0 and self.config.train.eval_interval:
            self._pause_to_evaluate(is_last=False)
        super().run()

    def _step(self) -> None:
        """Run a rollout batch, with an optimizer step for each minibatch of each epoch."""
        progress, start_s = self.state.progress, time.perf_counter()

        # Prompts, a group of completions for each prompt, and their rewards. The cursor moves past the prompts.
        rollout = self.rollouts.take(progress.consumed_prompts)
        progress.consumed_prompts += rollout.num_prompts
        step, samples = progress.step, self._log_samples(rollout)
        self.learner.routes.trace = None if samples is None else TokenTrace(rollout.rewards_PG.shape[1])
        if rollout.truncation_warning and not self._was_truncated:
            self.log.message(rollout.truncation_warning)
        self._was_truncated = rollout.truncation_warning is not None
        if rollout.signal is not None and self.config.rl.advantage.kind != "zero":
            self._log_lines(self._learning.of_batch(rollout.signal))
        while True:
            try:
                self._learn_from(rollout, start_s)
                break
            except RefusedCompletionsError as refused:
                # No update has been made yet: repeat all passes over the batch without the refused completions.
                self._log_lines([f"warning: left out: {reason}" for reason in refused.reasons.values()])
                rollout = rollout.without(refused.reasons)
                self._forget_update()
        if samples is not None:
            self._add_trace(rollout, step, samples)

    def _learn_from(self, rollout: Rollout, start_s: float) -> None:
        """Run the passes and updates of a rollout batch that began at `start_s`, and update the engine's weights.

        Raises:
            RefusedCompletionsError: on all ranks, before any update.
        """
        progress, learner = self.state.progress, self.learner

        # This rank's packed microbatches, after the passes without gradients; `learner.routes` records and replays the
        # routes of the microbatches. With a KL penalty in the reward, or a critic, advantages depend on these passes.
        minibatches = learner.prepared(rollout)
        advantages = learner.advantages(rollout, minibatches)
        metrics = [*advantages.metrics]
        for before_updates in learner.before_updates:
            metrics += before_updates(minibatches, advantages)

        updates = minibatches * self.config.rl.update.epochs
        held = learner.holds_policy
        with learner.optimizer_state_on_device():
            for index, minibatch in enumerate(updates):
                update_start_s = time.perf_counter()
                report = None
                if held:
                    learner.skip_step()
                else:
                    report = learner.update(minibatch, advantages)
                update_s = time.perf_counter() - update_start_s
                if report is not None:
                    metrics += self._update_metrics(minibatch, report, update_s)
                    if self._compares_rewards:
                        metrics += update_signal(rollout.rewards_PG, minibatch.loss_weights_N)
                metrics += learner.routes.take_metrics()
                if index == len(updates) - 1:
                    # The next rollout is sampled by the updated policy.
                    self.rollouts.update_weights(progress.step)
                    for after_updates in learner.after_updates:
                        metrics += after_updates(minibatches, policy_has_learned=not held)
                    metrics += rollout.metrics
                    metrics += self._rollout_metrics(time.perf_counter() - start_s)
                self.log.write(progress.step, metrics)
                metrics = []
                if report is None:
                    reason = held or "nothing to train on in this update"
                    self.log.message(f"{reason}: weights are as before", step=progress.step)
                elif report.skipped:
                    self._report_skip(report)
                else:
                    has_loss = self.config.rl.learns_beside_rewards or bool(
                        report.sums["advantages_abs"] or report.sums["loss"]
                    )
                    self._log_lines(self._learning.of_update(has_loss=has_loss, grad_norm=report.grad_norm))
                    if self.config.rl.rollout.max_staleness and index < len(minibatches):
                        learner.routes.stale.add_logprobs(report.sums)
                        if warning := learner.routes.stale.warning():
                            self.log.message(warning)
        for report in (report for take in learner.take_reports for report in take()):
            if report.skipped:
                self._report_skip(report, is_critic=True)

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
        found = evaluation_interval(summaries)
        if is_last and found is not None and self.state.platform.rank == 0:
            name, interval = found
            start, end = self._first_evaluation(name), reduced(metrics)[name]
            if start is not None and isinstance(end, int | float):
                self._log_lines(evaluation_warnings(name, start, end, interval))

    def _first_evaluation(self, name: str) -> float | None:
        """Return the metric's value before the first step, on rank 0; None if it was not measured.

        It is read from the log, because an earlier process of the run may have made that evaluation.
        """
        records = read_records(self.folder.path / FILE_NAME)
        first = next((record[name] for record in records if record["step"] == 0 and name in record), None)
        return float(first) if isinstance(first, int | float) else None

    def _log_lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.log.message(line)

    def _log_samples(self, rollout: Rollout) -> Sequence[Mapping[str, Any]] | None:
        """Write the samples of every `rl.samples.interval`-th rollout batch to a file, and some of them to the log.

        Returns:
            The samples, on rank 0; None if this is another rollout batch.
        """
        config, step = self.config.rl.samples, self.state.progress.step
        if not config.interval or step // self.config.updates_per_rollout % config.interval:
            return None
        samples = gather_samples(rollout, self.state.mesh)
        if self.state.platform.rank == 0 and samples:
            write_samples(self.folder.path / "samples", step, samples)
            self.log.samples(samples)
            for line in table_lines(samples, config.shown):
                self.log.message(line)
        return samples

    def _add_trace(self, rollout: Rollout, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Collective over the world: add tokens with their ratios to the samples written before the updates."""
        trace, self.learner.routes.trace = self.learner.routes.trace, None
        assert trace is not None
        fields = trace.gathered(rollout, self.rollouts.engine.decode, self.state.mesh)
        if fields:
            traced = [{**sample, **fields.get(index, {})} for index, sample in enumerate(samples)]
            write_samples(self.folder.path / "samples", step, traced)

    def _forget_update(self) -> None:
        """Collective over the world: drop what the passes of an update counted that is not made."""
        if self._load is not None:
            self._load.gather(self.state.mesh)
        if self.config.model.mtp_layers:
            take_mtp_losses(self.state)
        if self.learner.routes.trace is not None:
            self.learner.routes.trace.forget_updates()

    def _update_metrics(self, minibatch: Minibatch, report: StepReport, update_s: float) -> Iterator[Metric]:
        """Yield the metrics of an optimizer step."""
        state = self.state
        yield Metric("train/lr", report.learning_rate)
        yield Metric("train/skipped_steps", state.progress.skipped_steps)
        yield Metric("train/consumed_samples", state.progress.consumed_samples)
        yield Metric("train/consumed_tokens", state.progress.consumed_tokens)
        yield from speed_metrics(
            minibatch.num_positions,
            update_s,
            state.mesh.world.size,
            self._flops_per_token(minibatch.mean_length),
            self._peak_flops,
        )
        if report.skipped:
            return
        yield Metric("train/grad_norm", report.grad_norm)
        maxima = {name.removeprefix(MAX): x for name, x in report.sums.items() if name.startswith(MAX)}
        yield from update_metrics(report.sums, maxima)
        if self.config.rl.rollout.max_staleness:
            yield from staleness_metrics(report.sums)

    def _waiting_metrics(self) -> Iterator[Metric]:
        """Yield the bytes of frozen models between their passes, if there are any, and the bytes and time of moving the
        trained models between stores.
        """
        learner, models = self.learner, self.rollouts.models
        waiting = [
            *(waiting for waiting_bytes in learner.waiting_bytes for waiting in waiting_bytes()),
            *([] if models is None else models.waiting_bytes),
        ]
        if waiting:
            yield Metric("memory/waiting_device_bytes", sum(model.device for model in waiting))
            yield Metric("memory/waiting_host_bytes", sum(model.host for model in waiting))
        if not self.config.update_store == self.config.critic_store == "device":
            moves = [residence.take_moves() for residence in self.state.residences]
            yield Metric("memory/moved_bytes", sum(num_bytes for num_bytes, _ in moves))
            yield Metric("time/moves_s", sum(seconds for _, seconds in moves))

    def _rollout_metrics(self, step_s: float) -> list[Metric]:
        """Collective over the world: return the metrics of a rollout batch."""
        state = self.state
        metrics = [
            Metric("rl/step_s", step_s),
            Metric("rl/rollouts", state.progress.step // self.config.updates_per_rollout),
            Metric("rl/consumed_prompts", state.progress.consumed_prompts),
            *state.timers.take(),
            *memory_metrics(state.platform.device),
            *self._waiting_metrics(),
        ]
        metrics += self.rollouts.engine.take_metrics()
        for line in self.rollouts.engine.take_lines():
            self.log.message(line, step=state.progress.step)
        if self._load is not None:
            metrics += self._load.gather(state.mesh).metrics()
        if self.config.model.mtp_layers:
            metrics += take_mtp_losses(state)
        return metrics
