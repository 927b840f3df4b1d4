"""Where a conversion grows: beside the output, which gets its name when it is complete."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.convert.copying.progress import shown
from mcore_rl.errors import CheckpointError
from mcore_rl.files import (
    checkpoint_errors_explained,
    flush_to_disk,
    move_into_place,
    sole_writer,
    write_atomically,
)

ORPHANS_S = 10.0
"""How long the workers of a killed run may take to notice, after the chunk at hand."""
MARGIN_BYTES = 64 << 20
"""Free space that metadata and file systems take beside the tensors."""


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """`<output>.converting`: plan.json (what is converted), done/ (records) and out/ (the output so far)."""

    path: Path
    final: Path

    @property
    def out(self) -> Path:
        """The output so far."""
        return self.path / "out"

    @property
    def records(self) -> Path:
        """Which tasks are done."""
        return self.path / "done"


@contextmanager
def working(final: Path, plan: str, num_bytes: int, *, overwrite: bool) -> Iterator[WorkFolder]:
    """The folder to write `num_bytes` to, new or as a killed run of the same `plan` left it; for one process.

    CheckpointError before anything is written when the output exists, something else is being converted to it, or
    the disk has no room.
    """
    work = WorkFolder(final.with_name(f"{final.name}.converting"), final)
    if final.exists() and not overwrite:
        raise CheckpointError(
            f"{final} exists. Name another output, or add --overwrite to replace it when all is done."
        )
    before = work.path / "plan.json"
    known = json.loads(before.read_text(encoding="utf-8")).get("plan") if before.exists() else None
    if known is not None and known != plan:
        if not overwrite:
            raise CheckpointError(
                f"{work.path} is an unfinished conversion of something else, or with other options. Give its command "
                "again to go on with it, or add --overwrite to drop it."
            )
        shutil.rmtree(work.path)
    _check_room(work, num_bytes)
    with checkpoint_errors_explained(work.path, "making"):
        work.out.mkdir(parents=True, exist_ok=True)
    remedy = "Wait for it, or end it."
    with sole_writer(work.path / "lock", wait_s=ORPHANS_S, remedy=remedy):
        write_atomically(before, json.dumps({"plan": plan}) + "\n")
        yield work


def complete(work: WorkFolder, publish: Callable[[Path, Path], None]) -> None:
    """Give the output its name, by `publish(from, to)`, and remove the rest."""
    with checkpoint_errors_explained(work.final, "naming"):
        flush_to_disk(work.out)
        publish(work.out, work.final)
        shutil.rmtree(work.path)


def replace(written: Path, final: Path) -> None:
    """Give a folder its name; one that has it goes."""
    if final.exists():
        aside = final.with_name(f"{final.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        move_into_place(final, aside)
        move_into_place(written, final)
        shutil.rmtree(aside)
    else:
        move_into_place(written, final)


def _check_room(work: WorkFolder, num_bytes: int) -> None:
    existing = work.path
    while not existing.exists():
        existing = existing.parent
    taken = sum(file.stat().st_blocks * 512 for file in work.out.glob("*")) if work.out.exists() else 0
    free = shutil.disk_usage(existing).free
    if free + taken < num_bytes + MARGIN_BYTES:
        raise CheckpointError(
            f"{work.final} takes {shown(num_bytes)}, but only {shown(free)} are free at {existing}. Make room, or name "
            "an output on another disk."
        )
