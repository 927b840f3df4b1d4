"""One conversion from plan to output: the same steps whatever the formats.

The output grows beside its final name, in `<output>.converting`: plan.json (what is converted), done/ (records of
tasks), out/ (the files) and lock. It gets its name when it is complete.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_rl.convert.copying.conversion import Conversion, CopySettings
from mcore_rl.convert.copying.progress import ByteProgress, readable_bytes
from mcore_rl.convert.copying.workers import CopyJob, run_tasks
from mcore_rl.errors import CheckpointError
from mcore_rl.files import (
    checkpoint_errors_explained,
    flush_to_disk,
    move_into_place,
    sole_writer,
    write_atomically,
)

ORPHANS_S = 10.0
"""Seconds that the workers of a killed run may take to notice, after the chunk at hand."""
MARGIN_BYTES = 64 << 20
"""Free space that metadata and file systems take beside the tensors."""


def convert(conversion: Conversion, settings: CopySettings, progress: ByteProgress) -> Path:
    """Run a conversion, or resume it, and return the path of the output.

    Raises:
        CheckpointError: Before anything is written, when the output exists, something else is being converted to it,
            or memory or disk do not suffice; later, when a worker fails, or the output does not pass its check.
        DataError: Another process is at work on the same output.
    """
    workers = conversion.workers_within(settings)
    for note in conversion.notes:
        progress.message(note)
    if workers < settings.workers and settings.max_ram_bytes is not None:
        progress.message(
            f"{workers} of {settings.workers} workers, as no more fit into --max-ram "
            f"{readable_bytes(settings.max_ram_bytes)}"
        )
    with _work_folder(conversion, settings) as work:
        job = CopyJob(conversion=conversion, settings=settings, out=work / "out", records=work / "done")
        run_tasks(job, workers, progress)
        conversion.finish(job.out, conversion.plan, list(job.recorded_tasks()))
        if conversion.check is not None:
            conversion.check(job.out)
        with checkpoint_errors_explained(conversion.final, "naming"):
            flush_to_disk(job.out)
            conversion.publish(job.out, conversion.final)
            shutil.rmtree(work)
    progress.event(
        "end", output=str(conversion.final), bytes=conversion.num_bytes, seconds=round(progress.seconds, 3)
    )
    size = f"{len(conversion.targets)} tensors, {readable_bytes(conversion.num_bytes)}"
    progress.message(f"{conversion.final}: {size}, {progress.seconds:.1f} s")
    return conversion.final


def replace_folder(written: Path, final: Path) -> None:
    """Give a folder its final name; a folder that has it is deleted, after the new one is in its place."""
    if final.exists():
        # A folder cannot be renamed onto one that has files.
        aside = final.with_name(f"{final.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        move_into_place(final, aside)
        move_into_place(written, final)
        shutil.rmtree(aside)
    else:
        move_into_place(written, final)


@contextmanager
def _work_folder(conversion: Conversion, settings: CopySettings) -> Iterator[Path]:
    """Lock the folder in which the output grows, new or as a killed run of the same conversion left it.

    CheckpointError before anything is written when the output exists, something else is being converted to it, or the
    disk has no room.
    """
    final, attempt = conversion.final, conversion.attempt
    work = final.with_name(f"{final.name}.converting")
    if final.exists() and not settings.overwrite:
        raise CheckpointError(
            f"{final} exists. Name another output, or add --overwrite to replace it when all is done."
        )
    plan_file = work / "plan.json"
    known = json.loads(plan_file.read_text(encoding="utf-8")).get("plan") if plan_file.exists() else None
    is_another = known is not None and known != attempt
    if is_another and not settings.overwrite:
        raise CheckpointError(
            f"{work} is an unfinished conversion of something else, or with other options. Give its command again "
            "to resume it, or add --overwrite to drop it."
        )
    _check_room(work, conversion)
    with checkpoint_errors_explained(work, "making"):
        (work / "out").mkdir(parents=True, exist_ok=True)
    with sole_writer(work / "lock", wait_s=ORPHANS_S, remedy="Wait for it, or end it."):
        if is_another:
            # Under the lock, which workers of a killed run keep to their end: they would write into what is deleted.
            for folder in (work / "out", work / "done"):
                if folder.exists():
                    shutil.rmtree(folder)
            (work / "out").mkdir()
        write_atomically(plan_file, json.dumps({"plan": attempt}) + "\n")
        yield work


def _check_room(work: Path, conversion: Conversion) -> None:
    """Raise a CheckpointError unless the disk has room for what is not written yet."""
    existing = work
    while not existing.exists():
        existing = existing.parent
    # Blocks of 512 bytes, whatever the file system's: that is what has been allocated, not what a file could grow to.
    taken = sum(file.stat().st_blocks * 512 for file in (work / "out").glob("*"))
    free = shutil.disk_usage(existing).free
    if free + taken < conversion.num_bytes + MARGIN_BYTES:
        raise CheckpointError(
            f"{conversion.final} takes {readable_bytes(conversion.num_bytes)}, but only {readable_bytes(free)} are "
            f"free at {existing}. Make room, or name an output on another disk."
        )
