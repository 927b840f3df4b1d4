"""Folder of a run, which has a single writer at a time.

config.toml, metrics.jsonl ...      files of the training
run.json                            every start: see metrics/attempts_file.py
checkpoints/                        complete checkpoints: see storage/checkpoint.py
writer.json                         the attempt that may write to the folder (the fence)
STOP                                request, by anybody, to finish the step, save and end
DONE                                record that all steps are done
"""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.agree import on_rank_zero
from mcore_rl.storage.files import checkpoint_errors_explained, create_atomically, is_run, rename_all, write_atomically
from mcore_rl.workers.attempt import Attempt, this_attempt
from mcore_rl.workers.failures import note_writer

REPLACED = ("config.toml", "metrics.jsonl", "run.json")
"""Files that a run replaces from its start."""


class RunFolder:
    """Paths in the folder of a run, its fence, and its record of being done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.stop_file = path / "STOP"
        self._done = path / "DONE"
        self._writer = path / "writer.json"
        self._fence: Fence | None = None

    def done(self) -> str | None:
        """Collective over the world: return a message if all steps are done; None if the run is not done."""

        def read() -> str | None:
            with checkpoint_errors_explained(self._done, "reading"):
                if not self._done.exists():
                    return None
                text = self._done.read_text(encoding="utf-8").strip() or "all steps are done"  # empty: by `touch`
            return f"{text} ({self._done}). Delete it to go on, with a larger train.steps"

        return on_rank_zero(read)

    def mark_done(self, step: int) -> None:
        """Collective over the world, for the writer: record that all steps are done and saved."""

        def write() -> None:
            assert self._fence is not None, "claim the folder first"
            self._fence.check_here()
            with checkpoint_errors_explained(self._done, "writing"):
                now = datetime.now(UTC).isoformat(timespec="seconds")
                write_atomically(self._done, f"all {step} steps are done since {now}\n")

        on_rank_zero(write)

    def set_aside(self, name: str) -> Path:
        """Rename a damaged file of this folder to `damaged_NAME`, on the writer's rank 0, and return its new path."""
        path = self.path / name
        aside = self.path / f"damaged_{name}"
        while os.path.lexists(aside):
            aside = aside.with_name(f"damaged_{aside.name}")
        with checkpoint_errors_explained(path, "renaming"):
            rename_all([(path, aside)])
        return aside

    def claim(self) -> "Fence":
        """Collective over the world: make this run the only writer of the folder, and delete an earlier STOP. An
        earlier attempt of the same Slurm job is taken over wherever it runs, and so is a process on another host. A
        writer that was taken over notices after its current step.

        Raises CheckpointError if the writer is a live process on this host or a later attempt of the same Slurm job, or
        if the folder belongs to no run and has files that a run would replace.
        """
        self._fence = Fence(self._writer, on_rank_zero(self._claim))
        return self._fence

    def _claim(self) -> Attempt:
        me = this_attempt()
        there = [name for name in REPLACED if os.path.lexists(self.path / name)]
        if there and not is_run(self.path):
            raise CheckpointError(
                f"run_dir {self.path} has {' and '.join(there)}, which no run wrote and this one would replace. Move "
                "it away, or choose another run_dir"
            )
        with checkpoint_errors_explained(self.path, "claiming"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            while not create_atomically(self._writer, _text(me)):
                before = read_writer(self._writer)
                if before is not None and before != me:
                    self._refuse(me, before)
                if before is not None:
                    write_atomically(self._writer, _text(me))
                    break
            self.stop_file.unlink(missing_ok=True)
            note_writer()
        return me

    def _refuse(self, me: Attempt, writer: Attempt) -> None:
        if writer.supersedes(me):
            raise CheckpointError(
                f"{self.path} is written by {writer.describe()}, and this is {me.describe()}: an orphan of an earlier "
                "attempt, which ends here"
            )
        if writer.is_alive_here() and not me.supersedes(writer):
            raise CheckpointError(
                f"{self.path} is being written by {writer.describe()}, which is running. Wait for it, end it "
                f"(kill {writer.pid}), or choose another run_dir"
            )


class Fence:
    """Right to write to a run's folder; lost when another attempt claims the folder."""

    def __init__(self, path: Path, me: Attempt) -> None:
        self._path = path
        self._me = me

    def check(self) -> None:
        """Collective over the world: raise CheckpointError on all ranks if this run is no longer the writer."""
        on_rank_zero(self.check_here)

    def check_here(self) -> None:
        """Raise CheckpointError on this rank if this run is not the writer; for rank 0, when it acts for all ranks."""
        with checkpoint_errors_explained(self._path, "reading"):
            writer = read_writer(self._path)
        folder = self._path.parent
        if writer is None:
            raise CheckpointError(
                f"{self._path if folder.is_dir() else folder} was renamed, moved or deleted while this run "
                f"({self._me.describe()}) wrote to its folder: it stops without saving. Give the folder back its name, "
                "and start again: the run resumes from its last checkpoint"
            )
        if writer != self._me:
            raise CheckpointError(
                f"{folder} now belongs to {writer.describe()}: this run ({self._me.describe()}) stops without saving. "
                "Let only one of them run"
            )

    def release(self) -> None:
        """Collective over the world: leave the folder without a writer."""

        def remove() -> None:
            with checkpoint_errors_explained(self._path, "removing"):
                if read_writer(self._path) == self._me:
                    self._path.unlink()

        on_rank_zero(remove)


def read_writer(path: Path) -> Attempt | None:
    """Read the attempt in a fence's file; None if there is no file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise CheckpointError(f"{path} is damaged: it should be written by one run only. Delete it") from None
    fields.pop("since", None)
    return Attempt(**fields)


def _text(me: Attempt) -> str:
    return json.dumps(asdict(me) | {"since": datetime.now(UTC).isoformat(timespec="seconds")}, indent=1) + "\n"
