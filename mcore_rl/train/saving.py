"""Checkpoints of a run: saved while training continues, complete or not at all, resumed exactly."""

import gc
import shutil
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mcore_rl.backend.forked import ForkedCall, ForkedCallError
from mcore_rl.checkpoint.folder import (
    WRITING,
    Marker,
    check,
    checkpoints_in,
    clean,
    complete_in,
    delete,
    path_of_step,
    publish,
    superseded,
)
from mcore_rl.checkpoint.read import inspect, setting_differences
from mcore_rl.checkpoint.weights import load_weights
from mcore_rl.checkpoint.write import SavePlan, ShardPlanner, WrittenFiles, finish
from mcore_rl.errors import CheckpointError
from mcore_rl.files import checkpoint_errors_explained, room_at
from mcore_rl.obs.metrics import Metric
from mcore_rl.parallel.agree import on_every_rank, on_rank_zero, world_max
from mcore_rl.train.checkpoint_state import full_state, load_full_state
from mcore_rl.train.run_folder import Fence
from mcore_rl.train.state import TrainState

MIB = 2**20
WAIT_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    """Save that is being written."""

    step: int
    plan: SavePlan
    started: float
    writing: ForkedCall[WrittenFiles] | None = None
    """Background process that writes this rank's part; None: it is written here."""
    waited_s: float | None = None
    """Time for which training waited; None: for the whole save."""

    def is_running(self) -> bool:
        """Return whether this rank's part is still being written."""
        return self.writing is not None and self.writing.is_running()

    def written(self) -> WrittenFiles:
        """Write this rank's part, or wait for it; CheckpointError when that failed."""
        try:
            return self.writing.result() if self.writing else self.plan.write()
        except ForkedCallError as error:
            raise CheckpointError(
                f"the writer of {self.plan.path}: {error}. {room_at(self.plan.path)}"
            ) from error


class Checkpoints:
    """Saving and resuming of one run. Every method but the constructor is a collective over the world.

    A CheckpointError of `save`, `poll` and `finish` leaves the training state, this object and earlier checkpoints as
    they were: training may continue, and a later save succeed.
    """

    def __init__(self, state: TrainState, folder: Path, fence: Fence) -> None:
        self._state = state
        self._folder = folder
        self._fence = fence
        self._planner = ShardPlanner(state.mesh)
        self._pending: _Save | None = None
        self._saved_step: int | None = None
        self._deleting: ForkedCall[None] | None = None
        self._lines: list[str] = []
        self._metrics: list[Metric] = []
        # Megatron collects garbage twice in every save: 80 % of the time that training waits for a small one. What
        # lives as long as the run need not be looked at, and forked writers then share its memory.
        gc.freeze()

    def save(self) -> None:
        """Save the state as it is now; when asynchronous, `poll` and `finish` make the checkpoint complete.

        A state that is saved already is not saved again; a save that is still being written is waited for.
        """
        step = self._state.progress.step
        if step == self._saved_step or (self._pending is not None and step == self._pending.step):
            return
        self._wait_for_pending()
        started = time.monotonic()
        path = on_rank_zero(self._make_room)
        plan = self._planner.plan(full_state(self._state), path)
        save = _Save(step=step, plan=plan, started=started)
        if self._state.config.checkpoint.asynchronous:
            self._pending = self._hand_over(save)
        else:
            self._complete(save)

    def poll(self, *, blocking: bool = False) -> list[str]:
        """Complete, between steps, a save that all ranks have written; return lines for the log.

        Costs one all-reduce while a save is being written, nothing otherwise.
        """
        pending = self._pending
        if pending is not None:
            while blocking and world_max(int(pending.is_running())):
                time.sleep(WAIT_S)
            if blocking or not world_max(int(pending.is_running())):
                self._complete(pending)
        lines, self._lines = self._lines, []
        return lines

    def finish(self) -> list[str]:
        """Wait until the last save is complete and what it superseded is deleted; return lines for the log."""
        lines = self.poll(blocking=True)
        on_rank_zero(self._wait_for_deletion)
        return lines + self.poll()

    def take_metrics(self) -> list[Metric]:
        """Return the checkpoint/* metrics measured since the last call; those of saves exist on rank 0 only."""
        metrics, self._metrics = self._metrics, []
        return metrics

    def resume(self) -> Path | None:
        """Load this run's last checkpoint, else config.checkpoint.load; return the one loaded, None: there is none.

        CheckpointError when what should be loaded is not complete, damaged, foreign, or of another model.
        """
        config = self._state.config
        self._lines += on_rank_zero(self._clean)
        own = on_rank_zero(self._newest_of_run)
        source = own or (Path(config.checkpoint.load) if config.checkpoint.load else None)
        if source is None:
            return None
        started = time.monotonic()
        stored_path = self._load(source, own)
        self._metrics.append(Metric("checkpoint/load_s", time.monotonic() - started))
        return stored_path

    def _load(self, source: Path, own: Path | None) -> Path:
        """Load weights, or the whole training state, of `source` and return the checkpoint's path."""
        config = self._state.config
        if own is None and not config.checkpoint.load_optimizer:
            stored = load_weights(
                self._state.chunks,
                self._state.mesh,
                config.model,
                source,
                verify_checksums=config.checkpoint.verify_checksums,
            )
            self._state.optimizer.reload_model_params()
            self._lines.append(f"weights of {stored.path}; optimizer, schedule and data start anew")
            return stored.path
        stored = inspect(source, verify_checksums=config.checkpoint.verify_checksums)
        if not stored.has_optimizer:
            raise CheckpointError(
                f"{stored.path} has weights, but no optimizer state of this program. Set "
                "checkpoint.load_optimizer=false to start training from its weights"
            )
        assert stored.marker is not None
        self._lines += load_full_state(self._state, stored)
        self._lines += [
            f"not as in the checkpoint: {line}"
            for line in setting_differences(stored.marker.model, config.model.model_dump(mode="json"))
        ]
        self._saved_step = self._state.progress.step if own else None
        self._lines.append(f"resumed from {stored.path}, step {self._state.progress.step}")
        return stored.path

    def _wait_for_pending(self) -> None:
        pending = self._pending
        if pending is None:
            return
        since = time.monotonic()
        lines = self.poll(blocking=True)
        self._lines += [
            *lines,
            f"training waited {time.monotonic() - since:.1f} s for the save of step {pending.step}: saves take longer "
            "than checkpoint.interval lasts",
        ]

    def _hand_over(self, save: _Save) -> _Save:
        """Start the background processes that write `save`; return it without the data."""
        try:
            writing = on_every_rank(partial(_in_background, save.plan))
        except CheckpointError as error:
            raise self._failure(save, error) from error
        waited_s = time.monotonic() - save.started
        return replace(save, plan=save.plan.without_data(), writing=writing, waited_s=waited_s)

    def _complete(self, save: _Save) -> None:
        """Make a checkpoint of what the ranks have written; on failure delete all of it."""
        self._pending = None
        config = self._state.config
        try:
            written = on_every_rank(save.written)
            marker = finish(save.plan, written, self._state.mesh, config.model, save.step)
            line = on_rank_zero(partial(self._publish, save, marker))
        except CheckpointError as error:
            raise self._failure(save, error) from error
        self._saved_step = save.step
        self._lines.append(line)

    def _publish(self, save: _Save, marker: Marker | None) -> str:
        """Give the checkpoint its name, on rank 0, and start to delete superseded ones; return a line for the log."""
        assert marker is not None
        self._fence.check_here()
        final = path_of_step(self._folder, save.step)
        with checkpoint_errors_explained(final, "naming"):
            publish(save.plan.path, final)
        self._wait_for_deletion()
        with checkpoint_errors_explained(self._folder, "deleting old checkpoints of"):
            doomed = superseded(self._folder, self._state.config.checkpoint.keep)
        if doomed:
            self._deleting = ForkedCall(partial(delete, doomed))
        took_s = time.monotonic() - save.started
        waited_s = took_s if save.waited_s is None else save.waited_s
        self._metrics += [
            Metric("checkpoint/save_s", took_s),
            Metric("checkpoint/blocking_s", waited_s),
            Metric("checkpoint/bytes", marker.total_bytes),
        ]
        return (
            f"saved {final}: {marker.total_bytes / MIB:.1f} MiB in {took_s:.1f} s, of which training waited "
            f"{waited_s:.1f} s"
        )

    def _wait_for_deletion(self) -> None:
        """Wait, on rank 0, for the deletion of old checkpoints; what could not be deleted is logged and left."""
        if self._deleting is None:
            return
        call, self._deleting = self._deleting, None
        try:
            call.result()
        except ForkedCallError as error:
            self._lines.append(f"old checkpoints could not be deleted: {error}")

    def _make_room(self) -> Path:
        """Make, on rank 0, an empty folder to write to, under a name that no other attempt uses."""
        self._fence.check_here()
        path = self._folder / f"{WRITING}{self._state.progress.step:07d}_{time.time_ns():x}"
        with checkpoint_errors_explained(path, "making"):
            path.mkdir()
        return path

    def _failure(self, save: _Save, error: CheckpointError) -> CheckpointError:
        """Delete what a failed save has written; return the error to raise."""
        last = on_rank_zero(partial(self._discard, save.plan.path))
        return CheckpointError(f"step {save.step} is not saved: {error}. {last}")

    def _discard(self, path: Path) -> str:
        """Delete a failed save, on rank 0; return a sentence on the last complete checkpoint."""
        shutil.rmtree(path, ignore_errors=True)
        complete = complete_in(self._folder)
        return (
            f"The last complete checkpoint is {complete[-1]}"
            if complete
            else "There is no complete checkpoint"
        )

    def _clean(self) -> list[str]:
        self._fence.check_here()
        with checkpoint_errors_explained(self._folder, "cleaning"):
            return clean(self._folder)

    def _newest_of_run(self) -> Path | None:
        with checkpoint_errors_explained(self._folder, "reading"):
            found = checkpoints_in(self._folder)
        if not found:
            return None
        check(found[-1])
        return found[-1]


def _in_background(plan: SavePlan) -> ForkedCall[WrittenFiles]:
    with checkpoint_errors_explained(plan.path, "starting the writer of"):
        return ForkedCall(plan.write)
