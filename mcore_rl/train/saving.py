"""Checkpoints of a run: saved in the background, complete or not at all, and resumed exactly."""

import gc
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from mcore_rl.config.changes import ConfigChange, config_changes, listing, with_contents
from mcore_rl.config.kinds import kind_of_config
from mcore_rl.errors import CheckpointError, ConfigError, DamagedCheckpointError, TrainingError
from mcore_rl.megatron.agree import on_every_rank, on_rank_zero, refuse_anywhere, world_max
from mcore_rl.metrics.attempts_file import NUMERICS
from mcore_rl.metrics.metrics import Metric
from mcore_rl.model.build import settle_weights
from mcore_rl.storage import checkpoint
from mcore_rl.storage.checkpoints import write
from mcore_rl.storage.checkpoints.read import StoredCheckpoint, inspect
from mcore_rl.storage.files import checkpoint_errors_explained, room_at
from mcore_rl.train.checkpoint_state import full_state, load_full_state
from mcore_rl.train.offload import all_present
from mcore_rl.train.run_folder import Fence
from mcore_rl.train.state import TrainState
from mcore_rl.workers.forked_call import ForkedCall, ForkedCallError
from mcore_rl.workers.imports import checkpoint_of

MIB = 2**20
WAIT_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    step: int
    plan: write.SavePlan
    started: float
    skipped: int
    """Number of consecutive skipped steps when the save was made."""
    writing: ForkedCall[write.WrittenFiles] | None = None
    """Background process that writes this rank's part; None if this process writes it."""
    waited_s: float | None = None
    """Seconds that training waited; None if it waited for the whole save."""

    def is_running(self) -> bool:
        return self.writing is not None and self.writing.is_running()

    def written(self) -> write.WrittenFiles:
        """Write this rank's part, or wait for it. Raises CheckpointError on failure."""
        try:
            return self.writing.result() if self.writing else self.plan.write()
        except ForkedCallError as error:
            raise CheckpointError(f"the writer of {self.plan.path}: {error}. {room_at(self.plan.path)}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """Description of the state that a run starts from."""

    source: Path | None = None
    """Checkpoint that was loaded, if any."""
    changes: tuple[str, ...] = ()
    """Settings in which the run differs from the saved run."""
    warnings: tuple[str, ...] = ()
    """Warnings about damaged checkpoints of the run that were skipped."""


class Checkpoints:
    """Saves and resumes a run; every method except the constructor is collective over the world. After a
    CheckpointError from `save`, `poll` or `finish` training may continue: its state and earlier checkpoints are
    unchanged.
    """

    def __init__(
        self, state: TrainState, folder: Path, fence: Fence, inputs: Mapping[str, dict[str, str]] = MappingProxyType({})
    ) -> None:
        """`inputs` are recorded in checkpoints, and compared on resume (checks/inputs.py)."""
        self._state = state
        self._inputs = inputs
        self._folder = folder
        self._fence = fence
        self.base: dict[str, str] = {}
        """The marker's entry `base`, if checkpoints have only adapters; empty if they have all weights."""
        self._planner = write.ShardPlanner(state.mesh)
        self._pending: _Save | None = None
        self._saved_step: int | None = None
        self._deleting: ForkedCall[None] | None = None
        self._lines: list[str] = []
        self._metrics: list[Metric] = []
        # Megatron collects garbage twice in every save: 80 % of the time that training waits for a small save. Objects
        # that live as long as the run need no collection, and forked writers then share their memory.
        gc.freeze()

    def save(self) -> None:
        """Save the current state, unless it is already saved, after any save in progress. With asynchronous saving,
        `poll` or `finish` completes the checkpoint.
        """
        step = self._state.progress.step
        if self._pending is not None and step == self._pending.step:
            return
        # Rank 0 alone looks: a user may delete the folder between the looks of two ranks.
        if step == self._saved_step and on_rank_zero(checkpoint.path_of_step(self._folder, step).exists):
            return
        self._wait_for_pending()
        # Memory that leaves the device at the end stays in a forked writer's memory.
        with all_present(self._state.residences):
            self._refuse_non_finite()
            started = time.monotonic()
            path = on_rank_zero(self._make_room)
            plan = self._planner.plan(full_state(self._state), path)
            save = _Save(step=step, plan=plan, started=started, skipped=self._state.progress.skipped_in_a_row)
            if self._state.config.checkpoint.asynchronous:
                try:
                    writing = on_every_rank(partial(_in_background, save.plan))
                except CheckpointError as error:
                    raise self._failure(save, error) from error
                waited_s = time.monotonic() - save.started
                self._pending = replace(save, plan=save.plan.without_data(), writing=writing, waited_s=waited_s)
            else:
                self._complete(save)

    def poll(self, *, blocking: bool = False) -> list[str]:
        """Complete a save that all ranks have written and return log lines; called between steps. Costs one all-reduce
        while a save is in progress, and nothing otherwise.
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
        """Wait until the last save is complete and superseded checkpoints are deleted; return log lines."""
        lines = self.poll(blocking=True)
        on_rank_zero(self._wait_for_deletion)
        return lines + self.poll()

    def take_metrics(self) -> list[Metric]:
        """Return the checkpoint/* metrics measured since the last call; metrics of saves exist on rank 0 only."""
        metrics, self._metrics = self._metrics, []
        return metrics

    def resume(self) -> Resumption:
        """Load this run's last checkpoint, or else config.checkpoint.load; return which, and the differences from it.

        Raises CheckpointError if it is incomplete, damaged, foreign, or of another model (with `checkpoint.on_damaged`
        = "previous", the run's own damaged checkpoints are skipped), and ConfigError if changed settings decide the
        data or random numbers and `checkpoint.allow_changes` does not name them.
        """
        config = self._state.config.checkpoint
        self._lines += on_rank_zero(self._clean)
        started = time.monotonic()
        own = on_rank_zero(self._newest_of_run)
        with all_present(self._state.residences):
            if own is not None:
                resumption = self._resume_own(own)
            elif config.load:
                model, run_dir = self._state.config.model, Path(self._state.config.run_dir)
                resumption = self._load_given(on_rank_zero(partial(checkpoint_of, config.load, model, run_dir)))
            else:
                return Resumption()
        self._metrics.append(Metric("checkpoint/load_s", time.monotonic() - started))
        return resumption

    def _resume_own(self, newest: Path) -> Resumption:
        """Load the run's newest checkpoint or, if it is damaged and the config allows it, an earlier checkpoint."""
        path, warnings = newest, []
        while True:
            try:
                on_rank_zero(partial(checkpoint.check, path))
                stored = self._inspect(path)
                changes = self._accepted_changes(stored)
                self._take_base(stored, is_own=True)
                self._load_all(stored)
            except DamagedCheckpointError as error:
                if self._state.config.checkpoint.on_damaged == "stop":
                    raise
                path, warning = self._step_back(path, error)
                warnings.append(warning)
                continue
            self._log_changes(changes)
            self._saved_step = self._state.progress.step
            return Resumption(source=path, changes=tuple(map(str, changes)), warnings=tuple(warnings))

    def _step_back(self, damaged: Path, error: DamagedCheckpointError) -> tuple[Path, str]:
        """Rename a damaged checkpoint and return the previous checkpoint and a warning; raise `error` without any."""

        def rename() -> tuple[Path, Path] | None:
            self._fence.check_here()
            with checkpoint_errors_explained(damaged, "renaming"):
                return checkpoint.step_back(damaged)

        found = on_rank_zero(rename)
        if found is None:
            raise error
        aside, earlier = found
        warning = (
            f"{damaged.name} is damaged: the run resumes from {earlier.name}, and does the steps between again. "
            f"The damaged one is now {aside.name}; delete it when nobody needs it"
        )
        self._lines += [str(error), f"warning: {warning}"]
        return earlier, warning

    def _load_given(self, source: Path) -> Resumption:
        """Load `checkpoint.load`: the whole training state, or only weights if so configured or of another program."""
        config = self._state.config
        stored = self._inspect(source)
        write.refuse_other_adapters(stored, config.lora)
        if config.lora.load is not None and stored.has_adapters:
            raise CheckpointError(
                f"{stored.path} has low-rank adapters, and lora.load={config.lora.load} would take their place: what "
                "they have learned would be lost. Leave lora.load out to go on from them, or start from their base"
            )
        self._take_base(stored, is_own=False)
        program = stored.marker.program if stored.marker else ""
        is_other_stage = program not in ("", kind_of_config(config))
        if not config.checkpoint.load_optimizer or is_other_stage:
            stored = write.load_weights(
                self._state.chunks,
                self._state.mesh,
                config.model,
                stored.path,
                verify_checksums=config.checkpoint.verify_checksums,
                allowed=config.checkpoint.allow_changes,
            )
            self._state.optimizer.reload_model_params()
            stage = f", a checkpoint of {program}" if is_other_stage else ""
            is_new_head = config.model.head == "score" and not stored.has_scores
            head = ", without its output layer: all scores start at 0" if is_new_head else ""
            adapters = ", and new adapters" if config.lora.is_on and not stored.has_adapters else ""
            self._lines.append(
                f"weights of {stored.path}{stage}{head}{adapters}; optimizer, schedule, data and steps start anew"
            )
            return Resumption(source=stored.path)
        if not stored.has_optimizer:
            raise CheckpointError(
                f"{stored.path} has weights, but no optimizer state of this program. Set "
                "checkpoint.load_optimizer=false to start training from its weights"
            )
        if config.lora.is_on and not stored.has_adapters:
            raise CheckpointError(
                f"{stored.path} has no low-rank adapters: its optimizer state is of the weights, which are not trained "
                "here. Set checkpoint.load_optimizer=false to start from its weights with new adapters"
            )
        # Another run's state in a new run: the user asked for other data.
        changes = self._changes(stored)
        self._load_all(stored)
        self._log_changes(changes)
        return Resumption(source=stored.path, changes=tuple(map(str, changes)))

    def _take_base(self, stored: StoredCheckpoint, *, is_own: bool) -> None:
        """Record the checkpoint with the weights that this run's checkpoints leave out: the loaded checkpoint's base
        or, in a new run from a checkpoint with all weights, itself. Raises ConfigError if a checkpoint of this run
        (`is_own`) has all weights.
        """
        if self._state.config.checkpoint.weights == "all":
            return
        if stored.base is not None:
            assert stored.marker is not None
            self.base = stored.marker.base
            return
        if is_own:
            raise ConfigError(
                f'checkpoint.weights="adapters", and {stored.path} of this run has all weights: it is not known which '
                'base they are equal to. Set it to "all", or start another run_dir from this checkpoint.'
            )
        self.base = on_rank_zero(partial(checkpoint.reference_to, stored.path))

    def _inspect(self, path: Path) -> StoredCheckpoint:
        return inspect(path, verify_checksums=self._state.config.checkpoint.verify_checksums)

    def _load_all(self, stored: StoredCheckpoint) -> None:
        self._lines += load_full_state(self._state, stored)
        self._lines.append(f"resumed from {stored.path}, step {self._state.progress.step}")

    def _accepted_changes(self, stored: StoredCheckpoint) -> list[ConfigChange]:
        """Return changes since a checkpoint of this run. Raises ConfigError if it cannot be resumed exactly."""
        config, marker = self._state.config, stored.marker
        assert marker is not None
        kind = kind_of_config(config)
        if marker.program != kind:
            raise CheckpointError(
                f"{stored.path} is of a run of {marker.program or 'no program'}, and this is {kind}. Choose another "
                f"run_dir, and checkpoint.load={stored.path} to start from its weights"
            )
        changes = self._changes(stored)
        refused = [
            change
            for change in changes
            if change.breaks_exactness and not change.is_allowed(config.checkpoint.allow_changes)
        ]
        if refused:
            listed, keys = listing(refused)
            raise ConfigError(
                f"The run cannot go on exactly from {stored.path}: it would read other data, or other random "
                f"numbers, or compute other losses.\n{listed}\nSet them as they were, choose another run_dir, or "
                f"accept it with checkpoint.allow_changes={keys}."
            )
        return changes

    def _changes(self, stored: StoredCheckpoint) -> list[ConfigChange]:
        """Return the fields that differ from the saved run: of another program's run, only the model's fields."""
        config, marker = self._state.config, stored.marker
        assert marker is not None
        if marker.program == kind_of_config(config):
            changes = with_contents(config_changes(marker.settings, config), marker.inputs, self._inputs)
        else:
            changes = config_changes(marker.model, config.model, "model.")
        if marker.numerics != NUMERICS:
            changes.append(ConfigChange(key="numerics", before=marker.numerics, now=NUMERICS))
        return changes

    def _log_changes(self, changes: Sequence[ConfigChange]) -> None:
        self._lines += [f"not as in the checkpoint: {change}" for change in changes]

    def _refuse_non_finite(self) -> None:
        """Raise a TrainingError on all ranks if weights are not finite; such weights are never saved."""
        critic = self._state.critic
        chunks = {"": self._state.chunks} | ({} if critic is None else {checkpoint.CRITIC: critic.chunks})
        for of_model in chunks.values():
            settle_weights(of_model)
        tensors = {
            prefix + name: tensor
            for prefix, of_model in chunks.items()
            for chunk in of_model
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
            if tensor.is_floating_point()
        }
        is_finite = torch.stack([torch.isfinite(tensor.detach()).all() for tensor in tensors.values()])
        if not world_max(int(not is_finite.all())):
            return
        bad = [name for name, fine in zip(tensors, is_finite.tolist(), strict=True) if not fine]
        step = self._state.progress.step
        last = on_rank_zero(self._last_complete)
        refuse_anywhere(
            [
                f"step {step} is not saved: {len(bad)} of {len(tensors)} weights are not finite, such as {bad[0]}. "
                f"{last}. Lower optim.lr, lengthen optim.warmup_steps, or look at the data"
            ]
            if bad
            else [],
            TrainingError,
        )

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

    def _complete(self, save: _Save) -> None:
        """Make a checkpoint from the ranks' files; on failure delete all of them."""
        self._pending = None
        config = self._state.config
        try:
            written = on_every_rank(save.written)
            marker = write.finish(
                save.plan,
                written,
                self._state.mesh,
                config.model,
                save.step,
                program=kind_of_config(config),
                settings=config.model_dump(mode="json"),
                inputs=self._inputs,
                base=self.base,
            )
            line = on_rank_zero(partial(self._publish, save, marker))
        except CheckpointError as error:
            raise self._failure(save, error) from error
        self._saved_step = save.step
        self._lines.append(line)

    def _publish(self, save: _Save, marker: checkpoint.Marker | None) -> str:
        """Give the checkpoint its name, on rank 0; start deleting superseded checkpoints, and return a log line."""
        assert marker is not None
        self._fence.check_here()
        final = checkpoint.path_of_step(self._folder, save.step)
        with checkpoint_errors_explained(final, "naming"):
            checkpoint.publish(save.plan.path, final)
        self._wait_for_deletion()
        with checkpoint_errors_explained(self._folder, "deleting old checkpoints of"):
            # While steps are skipped, the older checkpoints may be the only good ones.
            keep = "all" if save.skipped else self._state.config.checkpoint.keep
            doomed = checkpoint.superseded(self._folder, keep)
        if doomed:
            self._deleting = ForkedCall(partial(checkpoint.delete, doomed))
        took_s = time.monotonic() - save.started
        waited_s = took_s if save.waited_s is None else save.waited_s
        self._metrics += [
            Metric("checkpoint/save_s", took_s),
            Metric("checkpoint/blocking_s", waited_s),
            Metric("checkpoint/bytes", marker.total_bytes),
        ]
        note = "; older ones stay, as the last step was skipped" if save.skipped else ""
        return (
            f"saved {final}: {marker.total_bytes / MIB:.1f} MiB in {took_s:.1f} s, of which training waited "
            f"{waited_s:.1f} s{note}"
        )

    def _wait_for_deletion(self) -> None:
        """Wait, on rank 0, for the deletion of old checkpoints. A folder that cannot be deleted is logged and left."""
        if self._deleting is None:
            return
        call, self._deleting = self._deleting, None
        try:
            call.result()
        except ForkedCallError as error:
            self._lines.append(f"old checkpoints could not be deleted: {error}")

    def _make_room(self) -> Path:
        """Create, on rank 0, an empty folder to write to, with a name that no other attempt uses."""
        self._fence.check_here()
        path = self._folder / f"{checkpoint.WRITING}{self._state.progress.step:07d}_{time.time_ns():x}"
        with checkpoint_errors_explained(path, "making"):
            self._folder.mkdir(exist_ok=True)  # the user may delete the folder between two saves
            path.mkdir()
        return path

    def _failure(self, save: _Save, error: CheckpointError) -> CheckpointError:
        last = on_rank_zero(partial(self._discard, save.plan.path))
        return CheckpointError(
            f"step {save.step} is not saved: {error}. {last}. Mend that, and run the same command again"
        )

    def _discard(self, path: Path) -> str:
        shutil.rmtree(path, ignore_errors=True)
        return self._last_complete()

    def _last_complete(self) -> str:
        complete = checkpoint.complete_in(self._folder)
        return f"The last complete checkpoint is {complete[-1]}" if complete else "There is no complete checkpoint"

    def _clean(self) -> list[str]:
        self._fence.check_here()
        with checkpoint_errors_explained(self._folder, "cleaning"):
            return checkpoint.clean(self._folder)

    def _newest_of_run(self) -> Path | None:
        with checkpoint_errors_explained(self._folder, "reading"):
            found = checkpoint.checkpoints_in(self._folder)
        return found[-1] if found else None


def _in_background(plan: write.SavePlan) -> ForkedCall[write.WrittenFiles]:
    with checkpoint_errors_explained(plan.path, "starting the writer of"):
        return ForkedCall(plan.write)
