"""Life cycle of checkpoint folders: which are complete, which is the newest, how they are published and deleted.

`<folder>/iter_0000100` is a checkpoint, named as in Megatron-LM. It is written as `writing_*`, gets its marker last and
is then renamed, so every `iter_*` was complete at some time. A killed run leaves only other names (see `clean`).
"""

import json
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.storage.checksums import as_hex, crc32
from mcore_rl.storage.files import move_into_place, unfinished_download, write_atomically

MARKER = "checkpoint.json"
MANIFEST = "manifest.json"
"""Record of a conversion in its output: its kind, its source, a checksum of every tensor."""
METADATA, COMMON, FORMAT_FILE = ".metadata", "common.pt", "metadata.json"
"""Torch's index of tensors and files; Megatron's files of the state that is the same on all ranks, and of the format.
"""
OWN_ENTRY = "mcore_rl"
"""Entry of the common state that only checkpoints of this program have."""
EXTRA_STATE = "_extra_state"
"""Part of the keys of the states that TransformerEngine's layers save with weights (fp8 scales), empty for other
layers.
"""
OPTIMIZER = "optimizer."
ADAPTER = ".adapter."
"""Part of the keys of low-rank adapters, which no other tensor has."""
CRITIC = "critic."
"""Beginning of the keys of the critic's weights and optimizer state, which a run of PPO saves with the policy's."""
HYBRID_NORM = "decoder.final_norm.weight"
"""Key of the last norm of Megatron's HybridModel, which GPTModel has as decoder.final_layernorm.weight."""
LOGIT_PARTS = ("output_layer.", "mtp.")
"""Beginnings of the keys of weights that only logits need."""
SCORE_WEIGHT, SCORE_SHIFT = "score.weight", "score.shift"
"""Keys of a scalar head's tensors; a checkpoint without SCORE_WEIGHT has another head."""
OWN_CRC32 = "marker_crc32"
"""Field of the marker with the CRC-32 of its other fields; an earlier version had none."""
LATEST = "latest_checkpointed_iteration.txt"
WRITING, DELETING, DAMAGED = "writing_", "deleting_", "damaged_"
MAX_DIGITS = 18
RELEASE = "release"
"""Megatron-LM's name for a checkpoint without a step, also in LATEST."""
NAME = re.compile(r"iter_(\d+)")
SAVED_NAME = re.compile(r"(?:iter_)?(\d+)(?:_|$)")
"""Name of a checkpoint, also while it is being written, then without WRITING."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """Content of `checkpoint.json`; a folder without this file is not complete."""

    step: int
    time: str
    """Time at which it was complete, ISO 8601."""
    world_size: int
    mesh: dict[str, int]
    """Sizes, by axis, of the mesh that wrote it."""
    model: dict[str, Any]
    megatron: str
    files: dict[str, int]
    """Number of bytes of every other file, by name."""
    crc32: dict[str, str] = field(default_factory=dict)
    """CRC-32 of every other file in hexadecimal, by name; an earlier version recorded only METADATA's, or none."""
    program: str = ""
    """Name of the program that trained it, such as "sft"; empty: an import, a reference policy, or an earlier version
    wrote it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Config of that training; empty as `program` is."""
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Size and checksum of the files that it read (checks/inputs.py); empty as `program` is, or where an earlier
    version wrote it."""
    base: dict[str, str] = field(default_factory=dict)
    """Path and identity of the base checkpoint, with the weights that this checkpoint of low-rank adapters leaves out;
    empty if it has all weights."""
    numerics: int = 1
    """NUMERICS (metrics/attempts_file.py) of the code that wrote it; 1 where an earlier version did, too."""

    @property
    def total_bytes(self) -> int:
        """Number of bytes of the whole checkpoint."""
        return sum(self.files.values())


def megatron_version() -> str:
    """Return "major.minor" of the installed Megatron-Core."""
    return ".".join(version("megatron-core").split(".")[:2])


def path_of_step(folder: Path, step: int) -> Path:
    """Return the path that the checkpoint of `step` has, or would have."""
    return folder / f"iter_{step:07d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for other names."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Return every `iter_*` folder, complete or not, in the order of their steps."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder in their order, those that are still being written too."""
    if not folder.is_dir():
        return []
    names = (path.name.removeprefix(WRITING) for path in folder.iterdir() if path.is_dir())
    found = (SAVED_NAME.match(name) for name in names)
    return sorted({int(match[1]) for match in found if match})


def complete_in(folder: Path) -> list[Path]:
    """Return the checkpoints that `check` accepts, in the order of their steps."""
    return [path for path in checkpoints_in(folder) if _fault(path) is None]


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, the newest inside, or the newest of the run of that folder."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not there. {others(path)}")
    if any((path / name).exists() for name in (MARKER, METADATA, FORMAT_FILE)) or step_of(path) is not None:
        return path
    marked = [inside for inside in checkpoints_in(path) if (inside / MARKER).exists()]
    if marked:
        return marked[-1]
    if (path / LATEST).is_file():
        return _tracked(path)
    if (path / "checkpoints").is_dir():
        return find_checkpoint(path / "checkpoints")
    raise CheckpointError(f"{path} holds no checkpoint: {_foreign(path)}")


def check(path: Path) -> Marker:
    """Return the marker of a complete checkpoint; else CheckpointError, with the fault and a complete one."""
    fault = _fault(path)
    if fault is not None:
        raise DamagedCheckpointError(f"{path} {fault}. {others(path)}")
    return _read_marker(path)


def read_marker(path: Path) -> Marker:
    """Return the marker of a checkpoint; its files may be missing. Raises DamagedCheckpointError if it is damaged."""
    try:
        return _read_marker(path)
    except (ValueError, TypeError, OSError) as error:
        raise DamagedCheckpointError(f"{path} has a damaged {MARKER} ({error}). {others(path)}") from error


def reference_to(base: Path) -> dict[str, str]:
    """Return a marker's entry `base`: path and identity of a checkpoint; CheckpointError without checksums."""
    marker = check(base) if (base / MARKER).is_file() else None
    if marker is None or not marker.crc32:
        raise CheckpointError(
            f"{base} has no checksums of its files, by which checkpoints of adapters could know it. Write it anew with "
            '`mcore-rl convert relayout`, or set checkpoint.weights="all"'
        )
    return {"path": str(base.absolute()), "identity": _identity(marker)}


def base_of(path: Path, marker: Marker) -> Path | None:
    """Return the checkpoint with the weights that adapters leave out; CheckpointError if missing or replaced."""
    if not marker.base:
        return None
    base = Path(marker.base["path"])
    wanted = f"{path} has low-rank adapters alone, whose base is {base}"
    if not base.is_dir():
        raise CheckpointError(f"{wanted}, which is not there. Put it, or a link to it, back in its place")
    if _identity(check(base)) != marker.base["identity"]:
        raise CheckpointError(
            f"{wanted}; that is another checkpoint now, of other files than they were trained on. Put the base back in "
            "its place"
        )
    return base


def held_by_base(base: Iterable[str], own: Collection[str]) -> list[str]:
    """Return the keys of `base` with weights that a checkpoint with the keys `own` leaves out."""
    left_out = (OPTIMIZER, CRITIC, *(LOGIT_PARTS if SCORE_WEIGHT in own else ()))
    return [key for key in base if not key.startswith(left_out) and ADAPTER not in key and key not in own]


def others(path: Path) -> str:
    """Return a sentence on the last complete checkpoint next to `path`, for the messages of errors."""
    complete = [other for other in complete_in(path.parent) if other != path]
    if not complete:
        return f"There is no other complete checkpoint in {path.parent}"
    return (
        f"The last complete one is {complete[-1]}: to resume from it, move {path.name} away, or name it in "
        "checkpoint.load of a new run"
    )


def write_marker(path: Path, marker: Marker) -> None:
    """Write the last file of a checkpoint, which makes it complete, once all its other files are on the disk."""
    fields = asdict(marker)
    write_atomically(path / MARKER, json.dumps(fields | {OWN_CRC32: _crc32_of_fields(fields)}, indent=1) + "\n")


def publish(written: Path, final: Path) -> None:
    """Give a complete checkpoint its name, and let LATEST name it."""
    if final.exists():
        # A restart from an older checkpoint has come to the same step once more.
        set_aside(final)
    move_into_place(written, final)
    write_atomically(final.parent / LATEST, f"{step_of(final)}\n")


def name_latest(final: Path) -> None:
    """Make LATEST name the newest checkpoint in the folder of a converted checkpoint, which may be older."""
    latest = final.parent / LATEST
    named = latest.read_bytes().strip() if latest.is_file() else b"0"
    if named.isdigit():  # else another program's word, such as Megatron-LM's `release`
        newest = step_of(checkpoints_in(final.parent)[-1]) or 0
        write_atomically(latest, f"{max(newest, int(named))}\n")


def superseded(folder: Path, keep: int | Literal["all"]) -> list[Path]:
    """Rename all complete checkpoints of trainings but the newest `keep`, and return them for deletion."""
    complete = [path for path in checkpoints_in(folder) if (path / MARKER).exists() and not (path / MANIFEST).exists()]
    renamed = [set_aside(path) for path in ([] if keep == "all" else complete[:-keep])]
    return renamed + [path for path in folder.iterdir() if path.name.startswith(DELETING) and path not in renamed]


def delete(paths: Sequence[Path]) -> None:
    """Delete folders that were renamed for it (see set_aside)."""
    for path in paths:
        shutil.rmtree(path)


def clean(folder: Path) -> list[str]:
    """Finish or remove the remains of killed runs, as the one writer of the folder; return lines for the log."""
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
    marked = [path for path in checkpoints_in(folder) if (path / MARKER).exists()]
    latest = folder / LATEST
    if marked and not (latest.is_file() and latest.read_bytes().strip() == str(step_of(marked[-1])).encode()):
        # Killed between the new name and this file, or checkpoints were moved away; job scripts read it.
        write_atomically(latest, f"{step_of(marked[-1])}\n")
        done.append(f"{LATEST} did not name {marked[-1].name}, and does now")
    return done


def set_aside(path: Path, prefix: str = DELETING) -> Path:
    """Rename a folder before its deletion (or as DAMAGED) and return its path: a kill leaves no half."""
    index = 0
    while (aside := path.with_name(f"{prefix}{path.name}_{index}")).exists():
        index += 1
    move_into_place(path, aside)
    return aside


def step_back(damaged: Path) -> tuple[Path, Path] | None:
    """Rename a damaged checkpoint, let LATEST name the one before, and return both; None if there is none."""
    earlier = [path for path in complete_in(damaged.parent) if (step_of(path) or 0) < (step_of(damaged) or 0)]
    if not earlier:
        return None
    aside = set_aside(damaged, DAMAGED)
    write_atomically(damaged.parent / LATEST, f"{step_of(earlier[-1])}\n")
    return aside, earlier[-1]


def _tracked(path: Path) -> Path:
    """Return the checkpoint that LATEST names, as Megatron-LM writes it; CheckpointError when it names none."""
    text = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    is_step = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    found = path / (f"iter_{int(text):07d}" if is_step else text)
    if (is_step or text == RELEASE) and found.is_dir():
        return found
    there = [entry.name for entry in (*checkpoints_in(path), path / RELEASE) if entry.is_dir()]
    holds = f"names {found.name}, which is not there" if is_step or text == RELEASE else f"holds {text[:40]!r}"
    raise CheckpointError(
        f"{path / LATEST} {holds}; wanted the step of a checkpoint, or {RELEASE!r}. "
        + (
            f"Name one of {', '.join(there)} itself, or write its step into the file"
            if there
            else f"There is no checkpoint in {path}"
        )
    )


def _foreign(path: Path) -> str:
    names = {entry.name for entry in path.iterdir()}
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return "it is a Hugging Face model. Convert it to a Megatron checkpoint first"
    if "config.json" in names:
        return (
            "it has a Hugging Face model's config.json and no weights (*.safetensors). Download or copy them too, or "
            f"name the folder that has them.{unfinished_download(path)}"
        )
    if "snapshots" in names:
        return "it is a folder of the Hugging Face cache. Name the folder in its snapshots that has the files"
    if any(name.startswith("mp_rank_") for name in names):
        return "it is in Megatron-LM's old format `torch`. Convert it to `torch_dist` with Megatron-LM first"
    if any(name.startswith("iter_") for name in names):
        return f"its {', '.join(sorted(n for n in names if n.startswith('iter_')))} are not complete"
    return "expected iter_* folders, or the files of one checkpoint (.metadata, metadata.json, *.distcp)"


def _fault(path: Path) -> str | None:
    """Return the fault of a checkpoint that this program wrote, as the end of a sentence; None if it is complete."""
    if not path.is_dir():
        return "is not there"
    if not (path / MARKER).is_file():
        return f"has no {MARKER}: it is not complete, or not of this program"
    try:
        marker = _read_marker(path)
    except (ValueError, TypeError, OSError) as error:
        return f"has a damaged {MARKER} ({error})"
    faults = (length_fault(path, name, size) for name, size in marker.files.items())
    return next((f"is damaged: its file {fault}" for fault in faults if fault is not None), None)


def length_fault(path: Path, name: str, size: int) -> str | None:
    """Return the fault in the length of a checkpoint's file, beginning with its name; None if the length is right."""
    try:
        actual = (path / name).stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    return None if actual == size else f"{name} has {actual} bytes, {size} were written"


def _identity(marker: Marker) -> str:
    parts = [marker.model, marker.files, marker.crc32]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _crc32_of_fields(fields: dict[str, Any]) -> str:
    return as_hex(crc32(json.dumps(fields, sort_keys=True).encode()))


def _read_marker(path: Path) -> Marker:
    fields = json.loads((path / MARKER).read_text(encoding="utf-8"))
    own_crc32 = fields.pop(OWN_CRC32, None)
    if own_crc32 not in (None, _crc32_of_fields(fields)):
        raise ValueError("its fields are not those that were written")
    if metadata_crc32 := fields.pop("metadata_crc32", ""):
        fields["crc32"] = {METADATA: metadata_crc32}
    return Marker(**fields)
