"""The loop that all trainings share: batches in, steps, evaluations, checkpoints, a clean stop."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcore_rl.data.batch import Microbatch
from mcore_rl.data.loader import BatchSource
from mcore_rl.errors import TrainingError
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.model.router_load import RouterLoad
from mcore_rl.obs.memory import memory_metrics
from mcore_rl.obs.metrics import Metric
from mcore_rl.obs.peak import peak_flops
from mcore_rl.obs.sinks import Log
from mcore_rl.obs.speed import speed_metrics
from mcore_rl.parallel.schedule import Head
from mcore_rl.plan.flops import train_flops_per_token
from mcore_rl.train.auxiliary import take_auxiliary_losses
from mcore_rl.train.batch_size import global_batch_at
from mcore_rl.train.run_folder import RunFolder
from mcore_rl.train.saving import Checkpoints
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport, evaluate, train_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where sequences come from; a split without data or without evaluations is None."""

    train: BatchSource
    seq_length: float
    """Positions of a sequence, on which attention's FLOPs depend; of packed ones the mean that a token sees."""
    valid: BatchSource | None = None
    test: BatchSource | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that is set up, and at the step from which it goes on."""

    state: TrainState
    folder: RunFolder
    checkpoints: Checkpoints
    log: Log
    stop: Callable[[], str | None]
    """Collective over the world: why to end after this step; None: go on."""


class Loop(ABC):
    """Training on this rank: units of work, evaluations, checkpoints. Every method is collective over the world."""

    def __init__(self, run: Run) -> None:
        self.state = run.state
        self.checkpoints = run.checkpoints
        self.log = run.log
        self.stop = run.stop
        self._skipped_in_a_row = 0

    @abstractmethod
    def _step(self) -> None:
        """One unit of work: one optimizer step or more."""

    @abstractmethod
    def _evaluate(self, *, is_last: bool) -> None:
        """What is measured now and then, and after all steps."""

    def run(self) -> bool:
        """Train until all steps are done (True) or a stop is asked for (False); a checkpoint is saved in both cases."""
        progress, train = self.state.progress, self.state.config.train
        while progress.step < train.steps:
            if reason := self.stop():
                self.log.message(f"stopping after step {progress.step}: {reason}")
                self._save_last()
                return False
            self._step()
            self._when_due()
        self._evaluate(is_last=True)
        self._save_last()
        return True

    def _when_due(self) -> None:
        """Evaluation, checkpoint, and what a background save has to say."""
        config, step = self.state.config, self.state.progress.step
        if (
            config.train.eval_interval
            and step % config.train.eval_interval == 0
            and step < config.train.steps
        ):
            self._evaluate(is_last=False)
        if (
            config.checkpoint.interval
            and step % config.checkpoint.interval == 0
            and step < config.train.steps
        ):
            self._save()
        self._say(self.checkpoints.poll())

    def _save(self) -> None:
        with self.state.timers.phase("checkpoint"):
            self.checkpoints.save()

    def _save_last(self) -> None:
        self._save()
        self._say(self.checkpoints.finish())

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.log.message(line)
        self.log.write_now(self.state.progress.step, self.checkpoints.take_metrics())

    def _give_up_when_hopeless(self, report: StepReport) -> None:
        progress, allowed = self.state.progress, self.state.config.train.max_skipped
        if not report.skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        self.log.message(
            "warning: step skipped: its gradient is not finite; weights are as before",
            step=progress.step,
            loss=report.loss,
        )
        if self._skipped_in_a_row > allowed:
            raise TrainingError(
                f"{self._skipped_in_a_row} steps in a row had a gradient that is not finite (loss {report.loss} at "
                f"step {progress.step}); train.max_skipped={allowed} are allowed. Lower optim.lr, lengthen "
                "optim.warmup_steps, or start again from an earlier checkpoint."
            )


class Fit(Loop):
    """Training on sequences that are there beforehand: a unit of work is an optimizer step."""

    def __init__(self, run: Run, head: Head[LocalMicrobatch], sources: Sources) -> None:
        super().__init__(run)
        self.head = head
        self.sources = sources
        state, config = run.state, run.state.config
        self._load = RouterLoad(state.chunks) if config.model.is_moe else None
        self._flops_per_token = train_flops_per_token(config.model, sources.seq_length)
        self._peak_flops = peak_flops(
            state.platform.device, config.platform.precision, config.log.peak_tflops
        )
        self._microbatches_since_told = 0

    def _step(self) -> None:
        state, train = self.state, self.state.config.train
        progress = state.progress
        size = global_batch_at(train, progress.consumed_samples)
        start_s = time.perf_counter()
        with state.timers.phase("data"):
            batch = self.sources.train.microbatches(progress.consumed_samples, size)
            microbatches = self._localized(batch)
            after = progress.consumed_samples + size
            if progress.step + 1 < train.steps:
                self.sources.train.prefetch(after, global_batch_at(train, after))
        report = train_step(state, microbatches, self.head)
        progress.consumed_samples = after
        progress.consumed_tokens += report.count
        self._microbatches_since_told += len(microbatches)
        self._tell(report, size, time.perf_counter() - start_s)
        self._give_up_when_hopeless(report)

    def _evaluate(self, *, is_last: bool) -> None:
        self._tell_evaluation("eval", self.sources.valid)
        if is_last:
            self._tell_evaluation("test", self.sources.test)

    def _tell_evaluation(self, name: str, source: BatchSource | None) -> None:
        """The mean loss over the first `eval_batches` batches of `source`, the same ones each time."""
        train = self.state.config.train
        if source is None or not train.eval_batches:
            return
        loss = count = 0.0
        with self.state.timers.phase("eval"):
            for batch in source.from_the_start(train.eval_batches, train.global_batch):
                sums = evaluate(self.state, self._localized(batch), self.head)
                loss, count = loss + sums["loss"], count + sums["count"]
        self.log.write_now(
            self.state.progress.step,
            [Metric(f"{name}/loss_nats", loss, count), Metric(f"{name}/perplexity", loss, count)],
        )

    def _localized(self, batch: Sequence[Microbatch]) -> list[LocalMicrobatch]:
        return [localize(microbatch, self.state.mesh.cp, self.state.platform.device) for microbatch in batch]

    def _tell(self, report: StepReport, global_batch: int, step_s: float) -> None:
        state, progress = self.state, self.state.progress
        metrics = [
            Metric("train/lr", report.learning_rate),
            Metric("train/global_batch", global_batch),
            Metric("train/consumed_samples", progress.consumed_samples),
            Metric("train/consumed_tokens", progress.consumed_tokens),
            Metric("train/skipped_steps", progress.skipped_steps),
            *speed_metrics(
                report.count, step_s, state.mesh.world.size, self._flops_per_token, self._peak_flops
            ),
            *state.timers.take(),
        ]
        if not report.skipped:
            loss = report.sums["loss"]
            metrics += [
                Metric("train/loss_nats", loss, report.count),
                Metric("train/perplexity", loss, report.count),
                Metric("train/grad_norm", report.grad_norm),
            ]
        if progress.step % state.config.log.interval == 0:
            metrics += take_auxiliary_losses(state, self._microbatches_since_told)
            self._microbatches_since_told = 0
            metrics += memory_metrics(state.platform.device)
            if self._load is not None:
                metrics += self._load.gather(state.mesh).metrics()
        self.log.write(progress.step, metrics)
