"""The names and the law of checkpoint folders: which count, which is the newest, and how one comes and goes.

`<folder>/iter_0000100` is a checkpoint as Megatron-LM names it. It is written as `writing_*`, gets its marker last and
is then renamed, so that every `iter_*` was complete once; what a killed run leaves under other names is cleaned away.
"""

import json
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mcore_rl.errors import CheckpointError
from mcore_rl.files import move_into_place, write_atomically

MARKER = "checkpoint.json"
METADATA, COMMON = ".metadata", "common.pt"
"""What is where, as torch writes it; what is the same on all ranks."""
LATEST = "latest_checkpointed_iteration.txt"
WRITING, DELETING = "writing_", "deleting_"
NAME = re.compile(r"iter_(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """What `checkpoint.json` says; a folder that has none is not complete."""

    step: int
    time: str
    """When it was complete, ISO 8601."""
    world_size: int
    mesh: dict[str, int]
    """The mesh that wrote it: sizes by axis."""
    model: dict[str, Any]
    """The model's config."""
    megatron: str
    """Version of Megatron-Core."""
    files: dict[str, int]
    """Bytes of every other file."""
    metadata_crc32: str = ""
    """Of METADATA, in hexadecimal; "": not known. All other files have checksums inside."""

    @property
    def total_bytes(self) -> int:
        """Of the whole checkpoint."""
        return sum(self.files.values())


def path_of_step(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or would be."""
    return folder / f"iter_{step:07d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for other names."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Every `iter_*` folder, complete or not, the oldest step first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0)


def complete_in(folder: Path) -> list[Path]:
    """The checkpoints that `check` accepts, the oldest step first."""
    return [path for path in checkpoints_in(folder) if _fault(path) is None]


def check(path: Path) -> Marker:
    """The marker of a complete checkpoint; CheckpointError saying what is wrong and which other one is complete."""
    fault = _fault(path)
    if fault is not None:
        raise CheckpointError(f"{path} {fault}. {others(path)}")
    return _read_marker(path)


def others(path: Path) -> str:
    """A sentence on the last complete checkpoint beside `path`, for the messages of errors."""
    complete = [other for other in complete_in(path.parent) if other != path]
    if not complete:
        return f"There is no other complete checkpoint in {path.parent}"
    return (
        f"The last complete one is {complete[-1]}: to go on from it, move {path.name} away, or name it in "
        "checkpoint.load of a new run"
    )


def write_marker(path: Path, marker: Marker) -> None:
    """The last file of a checkpoint, and with it on the disk everything before."""
    write_atomically(path / MARKER, json.dumps(asdict(marker), indent=1) + "\n")


def publish(written: Path, final: Path) -> None:
    """Give a complete checkpoint its name, and make it the one that `latest` points to."""
    if final.exists():
        # The same step once more, after a restart from an older checkpoint.
        move_into_place(final, set_aside(final))
    move_into_place(written, final)
    write_atomically(final.parent / LATEST, f"{step_of(final)}\n")


def superseded(folder: Path, keep: int | Literal["all"]) -> list[Path]:
    """Rename all complete checkpoints but the newest `keep`, and return the renamed folders, which may be deleted."""
    complete = [path for path in checkpoints_in(folder) if (path / MARKER).exists()]
    renamed = []
    for path in [] if keep == "all" else complete[:-keep]:
        aside = set_aside(path)
        move_into_place(path, aside)
        renamed.append(aside)
    return renamed + [
        path for path in folder.iterdir() if path.name.startswith(DELETING) and path not in renamed
    ]


def delete(paths: Sequence[Path]) -> None:
    """Delete folders that no name leads to any more."""
    for path in paths:
        shutil.rmtree(path)


def clean(folder: Path) -> list[str]:
    """What killed runs left is put right, for the one writer of the folder; what was done, for the log."""
    done = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(WRITING) and (path / MARKER).exists():
            # Killed between the marker and the new name: complete, so it counts.
            final = path_of_step(folder, _read_marker(path).step)
            publish(path, final)
            done.append(f"finished the interrupted save {final.name}")
        elif path.name.startswith((WRITING, DELETING)):
            shutil.rmtree(path)
            done.append(f"removed {path.name}, left by a run that was killed")
    return done


def set_aside(path: Path) -> Path:
    """A free name that says that `path` may be deleted."""
    number = 0
    while (aside := path.with_name(f"{DELETING}{path.name}_{number}")).exists():
        number += 1
    return aside


def crc32_of(file: Path) -> str:
    """The CRC-32 of a small file, in hexadecimal."""
    return f"{zlib.crc32(file.read_bytes()):08x}"


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint of ours, as the end of a sentence; None: complete."""
    if not path.is_dir():
        return "is not there"
    if not (path / MARKER).is_file():
        return f"has no {MARKER}: it is not complete, or not of this program"
    try:
        marker = _read_marker(path)
    except (ValueError, TypeError, OSError) as error:
        return f"has a damaged {MARKER} ({error})"
    for name, size in marker.files.items():
        try:
            actual = (path / name).stat().st_size
        except FileNotFoundError:
            return f"is damaged: its file {name} is missing"
        if actual != size:
            return f"is damaged: its file {name} has {actual} bytes, {size} were written"
    return None


def _read_marker(path: Path) -> Marker:
    return Marker(**json.loads((path / MARKER).read_text(encoding="utf-8")))
