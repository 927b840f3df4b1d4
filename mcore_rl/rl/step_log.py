"""The observer of a step: it logs rollout batches and updates, and changes nothing that is trained."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.megatron.schedule import MAX
from mcore_rl.metrics.jsonl import FILE_NAME, read_records
from mcore_rl.metrics.metrics import Metric, reduced
from mcore_rl.metrics.performance import memory_metrics, peak_flops, speed_metrics
from mcore_rl.metrics.verdict import OverOptimization
from mcore_rl.model.router_load import RouterLoad
from mcore_rl.planning.flops import train_flops_by_length
from mcore_rl.rl.batch import Minibatch
from mcore_rl.rl.rollouts.evaluation import gather_samples, table_lines, write_samples
from mcore_rl.rl.rollouts.rollout import Rollouts
from mcore_rl.rl.rollouts.signal import LearningWarnings, Onset, update_signal
from mcore_rl.rl.step.learner import Learner
from mcore_rl.rl.types import Rollout, WaitingBytes
from mcore_rl.train.loop import Run
from mcore_rl.train.step import StepReport, take_mtp_losses


class ReportsSkip(Protocol):
    """The type of `Trainer._report_skip`."""

    def __call__(self, report: StepReport, *, is_critic: bool = False) -> None:
        """Log a skipped step. Raises TrainingError after too many of them in a row."""


class StepLog:
    """Logs a trainer's rollout batches. Its methods are called in the order below, each collective over the world."""

    def __init__(
        self, run: Run, config: RlRunConfig, rollouts: Rollouts, learner: Learner, report_skip: ReportsSkip
    ) -> None:
        self._run, self._state, self._config = run, run.state, config
        self._rollouts, self._learner, self._report_skip = rollouts, learner, report_skip
        advantage = config.rl.advantage
        self._learning = LearningWarnings(
            compares_groups=advantage.compares_group or not advantage.is_of_tokens,
            num_rollouts=config.train.steps // config.updates_per_rollout,
        )
        earlier = self.records() if run.state.platform.rank == 0 else ()
        self._over_optimization = OverOptimization(config.rl.reward.parts, config.rl.reward.weights, earlier)
        self._alarm = Onset()
        self._compares_rewards = advantage.compares_group and not advantage.uses_steps
        """Whether an advantage compares a completion's reward with the rewards of its group."""
        self._load = RouterLoad(run.state.chunks) if config.model.is_moe else None
        self._flops_per_token = train_flops_by_length(config.model, config.lora)
        self._peak_flops = peak_flops(run.state.platform.device, run.state.platform.precision, config.log.peak_tflops)
        self._was_truncated = False
        """Whether all completions of the previous rollout batch were truncated; the warning is then not repeated."""
        self._samples: tuple[int, Sequence[Mapping[str, Any]]] | None = None
        """Step and samples of this rollout batch, if they are written."""

    def records(self) -> Iterator[Mapping[str, object]]:
        """Yield the run's metrics so far, also those of earlier starts."""
        path = self._run.folder.path / FILE_NAME
        yield from read_records(path) if path.exists() else ()

    def watch(self, metrics: Sequence[Metric]) -> None:
        """Warn when the reward begins to be over-optimised by metrics of a rollout batch or of an evaluation."""
        alarm = self._over_optimization.of_record({"step": self._state.progress.step, **reduced(metrics)})
        if self._alarm.begins(holds=alarm is not None) and alarm is not None:
            self._run.log.message(alarm)

    def begin(self) -> None:
        """Begin a rollout batch, before its completions are generated."""
        self._begin_s = time.perf_counter()

    def generated(self, rollout: Rollout) -> None:
        """Write samples of the scored completions, and warn of what will not be learned from."""
        config, step = self._config.rl.samples, self._state.progress.step
        self._samples, self._learner.routes.trace = None, None
        if config.interval and step // self._config.updates_per_rollout % config.interval == 0:
            from mcore_rl.rl.step.trace import TokenTrace  # only steps whose samples are written

            samples = gather_samples(rollout.groups, rollout.rewards_PG, self._state.mesh)
            if self._state.platform.rank == 0 and samples:
                write_samples(self._run.folder.path / "samples", step, samples)
                self._run.log.samples(samples)
                self._messages(list(table_lines(samples, config.shown)))
            self._samples = step, samples
            self._learner.routes.trace = TokenTrace(rollout.rewards_PG.shape[1])
        if rollout.truncation_warning and not self._was_truncated:
            self._run.log.message(rollout.truncation_warning)
        self._was_truncated = rollout.truncation_warning is not None
        if rollout.signal is not None and self._config.rl.advantage.kind != "zero":
            self._messages(self._learning.of_batch(rollout.signal))

    def prepared(self, rollout: Rollout, minibatches: Sequence[Minibatch], metrics: Sequence[Metric]) -> None:
        """Take the metrics of the passes and of the critic before the policy's updates on `minibatches`."""
        self._rollout, self._metrics = rollout, [*metrics]
        self._num_minibatches, self._num_updates = len(minibatches), 0
        self._update_begin_s = time.perf_counter()

    def updated(self, minibatch: Minibatch, report: StepReport | None) -> None:
        """Log an update. The record of the last one waits for `pushed`: it has the metrics of the rollout batch too."""
        update_s = time.perf_counter() - self._update_begin_s
        if report is not None:
            self._metrics += self._update_metrics(minibatch, report, update_s)
            if self._compares_rewards:
                self._metrics += update_signal(self._rollout.rewards_PG, minibatch.loss_weights_N)
        self._metrics += self._learner.routes.take_metrics()
        self._num_updates += 1
        if self._num_updates < self._num_minibatches * self._config.rl.update.epochs:
            self._write(report)
        else:
            self._last_report = report
        self._update_begin_s = time.perf_counter()

    def pushed(self, metrics: Sequence[Metric]) -> None:
        """Log the end of the rollout batch, when the engine has the new weights, with metrics of `after_updates`."""
        state, engine, step_s = self._state, self._rollouts.engine, time.perf_counter() - self._begin_s
        self._metrics += [
            *metrics,
            *self._rollout.metrics,
            Metric("rl/step_s", step_s),
            Metric("rl/rollouts", state.progress.step // self._config.updates_per_rollout),
            Metric("rl/consumed_prompts", state.progress.consumed_prompts),
            *state.timers.take(),
            *memory_metrics(state.platform.device),
            *self._waiting_metrics(),
            *engine.take_metrics(),
        ]
        for line in engine.take_lines():
            self._run.log.message(line, step=state.progress.step)
        if self._load is not None:
            self._metrics += self._load.gather(state.mesh).metrics()
        if self._config.model.mtp_layers:
            self._metrics += take_mtp_losses(state)
        self._write(self._last_report)
        self.watch(self._rollout.metrics)

    def finished(self) -> None:
        """Report skipped steps of the critic, and add tokens with their ratios to the samples."""
        critic = self._learner.parts.critic
        for report in [] if critic is None else critic.take_reports():
            if report.skipped:
                self._report_skip(report, is_critic=True)
        if self._samples is None:
            return
        (step, samples), trace = self._samples, self._learner.routes.trace
        self._learner.routes.trace = None
        assert trace is not None
        fields = trace.gathered(self._rollout, self._rollouts.engine.decode, self._state.mesh)
        if fields:
            traced = [{**sample, **fields.get(index, {})} for index, sample in enumerate(samples)]
            write_samples(self._run.folder.path / "samples", step, traced)

    def refused(self, reasons: Mapping[int, str]) -> None:
        """Name the completions that are left out, and drop the counters of the update that was abandoned."""
        self._messages([f"warning: left out: {reason}" for reason in reasons.values()])
        if self._load is not None:
            self._load.gather(self._state.mesh)
        if self._config.model.mtp_layers:
            take_mtp_losses(self._state)
        if self._learner.routes.trace is not None:
            self._learner.routes.trace.forget_updates()

    def _messages(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._run.log.message(line)

    def _write(self, report: StepReport | None) -> None:
        step, learner = self._state.progress.step, self._learner
        self._run.log.write(step, self._metrics)
        self._metrics = []
        if report is None:
            reason = learner.held or "nothing to train on in this update"
            self._run.log.message(f"{reason}: weights are as before", step=step)
        elif report.skipped:
            self._report_skip(report)
        else:
            has_loss = self._config.rl.learns_beside_rewards or bool(
                report.sums["advantages_abs"] or report.sums["loss"]
            )
            self._messages(self._learning.of_update(has_loss=has_loss, grad_norm=report.grad_norm))
            # Later epochs would count the staleness of the same tokens again.
            if self._config.rl.rollout.max_staleness and self._num_updates <= self._num_minibatches:
                learner.routes.stale.add_logprobs(report.sums)
                if warning := learner.routes.stale.warning():
                    self._run.log.message(warning)

    def _update_metrics(self, minibatch: Minibatch, report: StepReport, update_s: float) -> Iterator[Metric]:
        state = self._state
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
        if self._config.rl.rollout.max_staleness:
            yield from staleness_metrics(report.sums)

    def _waiting_metrics(self) -> Iterator[Metric]:
        parts, models = self._learner.parts, self._rollouts.models
        waiting: list[WaitingBytes] = []
        if parts.reference is not None:
            waiting += parts.reference.waiting_bytes()
        if parts.teachers is not None:
            waiting += parts.teachers.waiting_bytes()
        if models is not None:
            waiting += models.waiting_bytes
        if waiting:
            yield Metric("memory/waiting_device_bytes", sum(model.device for model in waiting))
            yield Metric("memory/waiting_host_bytes", sum(model.host for model in waiting))
        if not self._config.update_store == self._config.critic_store == "device":
            moves = [residence.take_moves() for residence in self._state.residences]
            yield Metric("memory/moved_bytes", sum(num_bytes for num_bytes, _ in moves))
            yield Metric("time/moves_s", sum(seconds for _, seconds in moves))


TOKEN_MEANS = {
    "loss": "policy/loss",
    "objective": "policy/objective",
    "entropy": "policy/entropy_nats",
    "kl_old": "policy/kl_old_nats",
    "kl_reference": "policy/kl_reference_nats",
    "kl_teacher": "teacher/kl_nats",
    "kl_from_teacher": "teacher/forward_kl_nats",
    "teacher_clamped": "teacher/clamped_fraction",
    "clipped_low": "policy/clip_ratio_low",
    "clipped_high": "policy/clip_ratio_high",
    "clamped": "policy/clamped_fraction",
    "router_shift": "policy/router_shift_ratio",
    "router_shift_floored": "policy/router_shift_floored_fraction",
    "mismatch_kl": "rollout/mismatch_kl_nats",
    "correction_masked": "rollout/importance_sampling_masked_fraction",
}
"""Metric name of each sum that is reported as a mean over trained tokens."""


def update_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> Iterator[Metric]:
    """Yield the metrics of an update from its statistics, reduced over the world and all microbatches."""
    count, sequences = sums["count"], sums["sequences"]
    for name, metric in TOKEN_MEANS.items():
        if name in sums:
            yield Metric(metric, sums[name], count)
    if "ptx_loss" in sums:
        yield Metric("ptx/loss_nats", sums["ptx_loss"], sums["ptx_count"])
    for side in ("low", "high"):
        yield Metric(f"policy/clip_ratio_{side}_sequences", sums[f"clipped_{side}_sequences"], sequences)
    mean = sums["ratio_minus_1"] / count
    yield Metric("policy/ratio_mean", count + sums["ratio_minus_1"], count)
    # Moments about 1, so that rounding does not swamp the small variance of ratios near 1.
    yield Metric("policy/ratio_variance", max(0.0, sums["ratio_minus_1_squared"] - count * mean**2), count)
    yield Metric("policy/log_ratio_max", maxima["log_ratio"])
    yield Metric("policy/log_ratio_min", -maxima["minus_log_ratio"])
    if "mismatch" in maxima:
        yield Metric("rollout/mismatch_max", maxima["mismatch"])


def staleness_metrics(sums: Mapping[str, float]) -> Iterator[Metric]:
    """Yield, from the same statistics, the fraction of stale tokens and the mismatch of current tokens."""
    num_current = sums["count"] - sums["stale"]
    yield Metric("rollout/stale_fraction", sums["stale"], sums["count"])
    if num_current:
        yield Metric("rollout/mismatch_kl_current_nats", sums["mismatch_kl_current"], num_current)
