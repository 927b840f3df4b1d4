"""The training loop: steps, evaluations, checkpoints, a clean stop; and training on a given data set."""

import gc
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from mcore_rl.config.run import TrainConfig
from mcore_rl.config.speed import run_flags
from mcore_rl.data.batch import BatchSource, Microbatch, SampleDataset
from mcore_rl.errors import StoppedError, TrainingError
from mcore_rl.megatron.agree import world_max
from mcore_rl.megatron.schedule import Head
from mcore_rl.metrics.metrics import Metric
from mcore_rl.metrics.performance import memory_metrics, peak_flops, speed_metrics
from mcore_rl.metrics.sinks import Log
from mcore_rl.model.inputs import LocalMicrobatch, localize
from mcore_rl.model.router_load import RouterLoad
from mcore_rl.model.transformer_config import machine_of
from mcore_rl.planning.flops import train_flops_per_token
from mcore_rl.train.run_folder import Fence, RunFolder
from mcore_rl.train.saving import Checkpoints
from mcore_rl.train.state import TrainState
from mcore_rl.train.step import StepReport, evaluate, refuse_no_gradient, take_mtp_losses, train_step
from mcore_rl.workers.forked_rank import stop_signals
from mcore_rl.workers.launcher import STOPPING, TRAINING, note_stage
from mcore_rl.workers.watchdog import Watchdog

FILE_FOUND = signal.NSIG
"""Value that ranks exchange for the file; 0 means no request, and values between are signal numbers."""

Handler = Callable[[int, FrameType | None], Any] | int | None


class StopRequest:
    """Context in which STOP_SIGNALS are recorded as requests instead of ending the process; a file is a request too.
    SIGINT (Ctrl-C) is recorded only from the first step on: before it nothing can be lost, and the user is waiting.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._request = 0
        self._before: dict[signal.Signals, Handler] = {}
        self._is_training = False

    def __enter__(self) -> "StopRequest":
        for number in stop_signals():
            self._before[number] = signal.getsignal(number)
            if number != signal.SIGINT:
                signal.signal(number, self._record)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def is_urgent(self) -> bool:
        """Whether a signal has come to this rank that ends waits for servers too; Ctrl-C, which a second one makes
        urgent, lets a rollout batch be finished.
        """
        return self._request not in (0, signal.SIGINT, FILE_FOUND)

    def agreed(self) -> str | None:
        """Collective over the world, between steps: return why to stop, or None; the same on all ranks."""
        if not self._request and dist.get_rank() == 0 and self._file.exists():
            self._request = FILE_FOUND
        if not self._is_training:
            signal.signal(signal.SIGINT, self._record)
        request = world_max(self._request)
        if dist.get_rank() == 0 and (request or not self._is_training):
            # After the exchange every rank records signals.
            note_stage(STOPPING if request else TRAINING)
        self._is_training = True
        if request == FILE_FOUND:
            return f"{self._file} was made"
        return f"{signal.Signals(request).name} came" if request else None

    def _record(self, number: int, _: FrameType | None) -> None:
        self._request = number


class TimedGarbage:
    """Context in which garbage is collected only between units of work. Python would collect on each rank at a
    different time, and all ranks would wait for it in the next collective.
    """

    def __init__(self, interval: int | None) -> None:
        """Collect every `interval` units of work; None: leave it to Python."""
        self._interval = interval
        self._units = 0
        self._was_enabled = False

    def __enter__(self) -> "TimedGarbage":
        if self._interval is not None:
            self._was_enabled = gc.isenabled()
            gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_enabled:
            gc.enable()

    def unit_done(self) -> None:
        """Collect if it is time."""
        self._units += 1
        if self._interval is not None and self._units % self._interval == 0:
            gc.collect()

    def collect(self) -> None:
        """Collect now, at a point where all ranks stop anyway."""
        if self._interval is not None:
            gc.collect()


def global_batch_at(train: TrainConfig, consumed_samples: int) -> int:
    """Return the number of sequences in the step that begins after `consumed_samples` sequences. The batch grows from
    ramp_start in equal stages to global_batch over ramp_samples, as with Megatron-LM's --rampup-batch-size.
    """
    if train.ramp_start is None or train.ramp_increment is None or train.ramp_samples is None:
        return train.global_batch  # the checks refuse a ramp with a missing field
    if consumed_samples >= train.ramp_samples:
        return train.global_batch
    increments = (train.global_batch - train.ramp_start) // train.ramp_increment
    stage = consumed_samples * increments // train.ramp_samples
    return min(train.ramp_start + stage * train.ramp_increment, train.global_batch)


def batches(train: TrainConfig) -> Iterator[tuple[int, int]]:
    """Yield, for every step of the run, the samples consumed before it and its global batch size."""
    consumed_samples = 0
    for _ in range(train.steps):
        size = global_batch_at(train, consumed_samples)
        yield consumed_samples, size
        consumed_samples += size


def total_samples(train: TrainConfig) -> int:
    """Return the number of sequences that the whole run reads."""
    return sum(size for _, size in batches(train))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run on this rank, set up at the step where training begins; made by mcore_rl.programs.open_run."""

    state: TrainState
    folder: RunFolder
    checkpoints: Checkpoints
    log: Log
    """Silent on all ranks but 0."""
    fence: Fence
    watchdog: Watchdog
    request: StopRequest

    def stop_reason(self) -> str | None:
        """Collective over the world, between steps: return why the run ends at this step, or None, the same on all
        ranks. Raises CheckpointError if another attempt has become the writer of the folder.
        """
        self.watchdog.begin("step")
        if self.state.platform.rank == 0:
            self.fence.check_here()
        return self.request.agreed()


class Trainer(ABC):
    """Trains on this rank: units of work, evaluations, checkpoints. Every method is collective over the world."""

    def __init__(self, run: Run) -> None:
        self.state = run.state
        self.folder = run.folder
        self.checkpoints = run.checkpoints
        self.watchdog = run.watchdog
        self.log = run.log
        self.stop_reason = run.stop_reason
        self._garbage = TimedGarbage(run_flags(run.state.config, machine_of(run.state.platform)).gc_interval)

    @abstractmethod
    def _step(self) -> None:
        """Do a unit of work, at least one optimizer step, and log it."""

    @abstractmethod
    def _evaluate(self, *, is_last: bool) -> None:
        """Evaluate and log the metrics, every `train.eval_interval` steps and, with `is_last`, after the last step."""

    def run(self) -> None:
        """Train until all steps are done, which the folder then records, or a stop is requested, between steps or in a
        wait for servers; save in both cases.
        """
        with suppress(StoppedError):
            self._run_steps()
            return
        # All ranks are here. What was interrupted is made again by the next start.
        step, reason = self.state.progress.step, self.stop_reason()
        self.log.message(f"stopping after step {step}, in a wait for servers: {reason}")
        self._save_last()  # not while an error is handled: the process that writes would take it for its own

    def _run_steps(self) -> None:
        progress, train = self.state.progress, self.state.config.train
        save_interval = self.state.config.checkpoint.interval
        with self._garbage:
            while progress.step < train.steps:
                if reason := self.stop_reason():
                    self.log.message(f"stopping after step {progress.step}: {reason}")
                    self._save_last()
                    return
                self._step()
                self._garbage.unit_done()
                if progress.step < train.steps:  # the evaluation and checkpoint of the last step come after the loop
                    if train.eval_interval and progress.step % train.eval_interval == 0:
                        self._pause_to_evaluate(is_last=False)
                    if save_interval and progress.step % save_interval == 0:
                        self._save()
                self._log_saving(self.checkpoints.poll())
            self._pause_to_evaluate(is_last=True)
        self._save_last()
        self._refuse_unfinished_skips()
        self.folder.mark_done(progress.step)

    def _pending_metrics(self) -> list[Metric]:
        """Collective over the world: return metrics that are gathered less often than every step."""
        return []

    def _pause_to_evaluate(self, *, is_last: bool) -> None:
        self.watchdog.begin("pause")
        self._garbage.collect()
        self._evaluate(is_last=is_last)

    def _save(self) -> None:
        self.watchdog.begin("pause")
        self._garbage.collect()
        self.log.flush(self.state.progress.step, self._pending_metrics())
        with self.state.timers.phase("checkpoint"):
            self.checkpoints.save()

    def _save_last(self) -> None:
        self._save()
        self._log_saving(self.checkpoints.finish())

    def _log_saving(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.log.message(line)
        self.log.write_now(self.state.progress.step, self.checkpoints.take_metrics())

    def _report_skip(self, report: StepReport, *, is_critic: bool = False) -> None:
        """Log a skipped step. Raises TrainingError after more than `train.max_skipped` consecutive skipped steps."""
        step, allowed = self.state.progress.step, self.state.config.train.max_skipped
        trained = self.state.critic if is_critic else self.state
        assert trained is not None
        section, subject = ("rl.advantage.critic.optim", "the critic: ") if is_critic else ("optim", "")
        self.log.message(
            f"warning: {subject}step skipped: its gradient is not finite; weights are as before",
            step=step,
            loss=report.loss,
        )
        if trained.progress.skipped_in_a_row > allowed:
            raise TrainingError(
                f"{subject}{trained.progress.skipped_in_a_row} steps in a row had a gradient that is not finite (loss "
                f"{report.loss} at step {step}); train.max_skipped={allowed} are allowed. Lower {section}.lr, lengthen "
                f"{section}.warmup_steps, or start again from an earlier checkpoint."
            )

    def _refuse_unfinished_skips(self) -> None:
        """Raise a TrainingError if the run ends with skipped steps: its state may be bad, and it is not done."""
        progress = self.state.progress
        if progress.skipped_in_a_row:
            raise TrainingError(
                f"the last {progress.skipped_in_a_row} of {progress.step} steps were skipped, as their gradients were "
                "not finite: the run is saved, but not done. Start again from an earlier checkpoint with a lower "
                "optim.lr; or, where a single batch is to blame, go on with a larger train.steps."
            )


class GivenDataTrainer(Trainer):
    """Trains on given, not generated, data: a unit of work is an optimizer step."""

    def __init__(self, run: Run, seq_length: float) -> None:
        """Prepare this rank to train. `seq_length` is for attention's FLOPs: with packed sequences, the mean over
        tokens of the length of their sequence.
        """
        super().__init__(run)
        state, config = run.state, run.state.config
        self._load = RouterLoad(state.chunks) if config.model.is_moe else None
        self._gathered_step = state.progress.step
        """Step up to which expert load, router and MTP losses have been gathered."""
        self._flops_per_token = train_flops_per_token(config.model, seq_length, config.lora)
        self._peak_flops = peak_flops(state.platform.device, state.platform.precision, config.log.peak_tflops)

    def _log_step(
        self, report: StepReport, metrics: Sequence[Metric], *, num_samples: int, num_tokens: int, step_s: float
    ) -> None:
        """Log a step on `num_samples` samples and `num_tokens` tokens of the world; `metrics` only if not skipped."""
        state, progress = self.state, self.state.progress
        logged = [
            Metric("train/lr", report.learning_rate),
            Metric("train/global_batch", num_samples),
            Metric("train/consumed_samples", progress.consumed_samples),
            Metric("train/consumed_tokens", progress.consumed_tokens),
            Metric("train/skipped_steps", progress.skipped_steps),
            *speed_metrics(num_tokens, step_s, state.mesh.world.size, self._flops_per_token, self._peak_flops),
            *state.timers.take(),
        ]
        if not report.skipped:
            logged += [*metrics, Metric("train/grad_norm", report.grad_norm)]
        if progress.step % state.config.log.interval == 0:
            logged += self._pending_metrics()
        self.log.write(progress.step, logged)

    def _pending_metrics(self) -> list[Metric]:
        state = self.state
        if self._gathered_step == state.progress.step:
            return []
        self._gathered_step = state.progress.step
        metrics = memory_metrics(state.platform.device)
        if self._load is not None:
            metrics += self._load.gather(state.mesh).metrics()
        if state.config.model.mtp_layers:
            metrics += take_mtp_losses(state)
        return metrics


class SupervisedTrainer(GivenDataTrainer):
    """Trains on given sequences with a loss per token: pretraining, fine-tuning."""

    def __init__(
        self,
        run: Run,
        head: Head[LocalMicrobatch],
        *,
        train: SampleDataset,
        seq_length: float,
        valid: SampleDataset | None = None,
        test: SampleDataset | None = None,
    ) -> None:
        """Prepare this rank to train. Every rank reads its data-parallel share of `train`, which has samples for all
        steps; `valid` is for every evaluation, `test` for the one after the last step. `seq_length` is
        GivenDataTrainer's.
        """
        super().__init__(run, seq_length)
        self._head = head
        self._train = self._source(train)
        self._valid = None if valid is None else self._source(valid)
        self._test = None if test is None else self._source(test)

    def _source(self, dataset: SampleDataset) -> BatchSource:
        dp = self.state.mesh.dp
        micro_batch = self.state.config.train.micro_batch
        return BatchSource(dataset, micro_batch=micro_batch, dp_rank=dp.rank, dp_size=dp.size)

    def _step(self) -> None:
        state, train = self.state, self.state.config.train
        progress = state.progress
        global_batch = global_batch_at(train, progress.consumed_samples)
        start_s = time.perf_counter()
        with state.timers.phase("data"):
            microbatches = self._localized(self._train.microbatches(progress.consumed_samples, global_batch))
            after = progress.consumed_samples + global_batch
            if progress.step + 1 < train.steps:
                self._train.prefetch(after, global_batch_at(train, after))
        report = train_step(state, microbatches, self._head)
        refuse_no_gradient(report, progress.step)
        progress.consumed_samples = after
        progress.consumed_tokens += report.count
        loss = report.sums["loss"]
        self._log_step(
            report,
            [Metric("train/loss_nats", loss, report.count), Metric("train/perplexity", loss, report.count)],
            num_samples=global_batch,
            num_tokens=report.count,
            step_s=time.perf_counter() - start_s,
        )
        if report.skipped:
            self._report_skip(report)

    def _evaluate(self, *, is_last: bool) -> None:
        self._evaluate_on("eval", self._valid)
        if is_last:
            self._evaluate_on("test", self._test)

    def _evaluate_on(self, name: str, source: BatchSource | None) -> None:
        train = self.state.config.train
        if source is None or not train.eval_batches:
            return
        loss = count = 0.0
        with self.state.timers.phase("eval"):
            for batch in source.from_the_start(train.eval_batches, train.global_batch):
                sums = evaluate(self.state, self._localized(batch), self._head)
                loss, count = loss + sums["loss"], count + sums["count"]
        self.log.write_now(
            self.state.progress.step,
            [Metric(f"{name}/loss_nats", loss, count), Metric(f"{name}/perplexity", loss, count)],
        )

    def _localized(self, batch: Sequence[Microbatch]) -> list[LocalMicrobatch]:
        return [localize(microbatch, self.state.mesh.cp, self.state.platform.device) for microbatch in batch]
