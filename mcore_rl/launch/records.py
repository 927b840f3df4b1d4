"""Files that a launch leaves in a run's folder, and files of a run that its job reads.

launch/<n>/     job.sbatch, job.sh, config.toml, cluster.toml, commit.txt, code/ (code.patch), and submission.json: see
                `Submission`
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mcore_rl.storage.files import write_atomically

FOLDER = "launch"
RECORD = "submission.json"
SCRIPT = "job.sbatch"
SHOWN_WARNINGS = 3
"""Warnings of a run's log that a line about it has room for."""
LOCK = ".lock"
"""File in the folder of launches that a launch locks while it submits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One job that was submitted for a run."""

    job: str
    program: str
    name: str
    cluster: str
    nodes: int
    ranks_per_node: int
    time: str
    """Time of the submission, ISO 8601."""
    code: str
    """Commit of the code, or version of the installed package."""
    array: str = ""
    dependency: str = ""
    after: str = ""
    """Folder of the run of the pipeline's stage before (`dependency` names its job); empty for none."""


_SUBMISSION = TypeAdapter(Submission)


def next_folder(run_dir: Path) -> Path:
    """Return the folder of the next launch of a run, which is not created."""
    folder = run_dir / FOLDER
    numbers = [int(path.name) for path in _listed(folder) if path.name.isdecimal()]
    return folder / str(max(numbers, default=-1) + 1)


def record(folder: Path, submission: Submission) -> None:
    """Write the submission to the folder of its launch."""
    text = json.dumps(asdict(submission), indent=1) + "\n"
    write_atomically(folder / RECORD, text)


def submissions(run_dir: Path) -> list[Submission]:
    """Return the submissions of a run, the oldest first; unreadable files are left out."""
    folders = [path for path in _listed(run_dir / FOLDER) if path.name.isdecimal()]
    found = []
    for folder in sorted(folders, key=lambda path: int(path.name)):
        with suppress(OSError, ValidationError):
            found.append(_SUBMISSION.validate_json((folder / RECORD).read_bytes()))
    return found


def writing_job(run_dir: Path) -> str:
    """Return the job that the fence names as the writer of the run; empty for none, and for no job of Slurm."""
    try:
        fence = json.loads((run_dir / "writer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(fence.get("job", "")) if isinstance(fence, dict) else ""


def last_step(run_dir: Path) -> int | None:
    """Return the step of the newest complete checkpoint."""
    steps = [
        int(path.name.removeprefix("iter_"))
        for path in _listed(run_dir / "checkpoints")
        if path.name.startswith("iter_") and (path / "checkpoint.json").exists()
    ]
    return max(steps, default=None)


def done(run_dir: Path) -> str:
    """Return the text of DONE; empty while the run is not done."""
    try:
        return (run_dir / "DONE").read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ""


def resume_warnings(run_dir: Path) -> list[str]:
    """Return the faults that the last start of a run met and went round, as run.json has them."""
    try:
        starts = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        return [str(warning) for warning in starts[-1].get("warnings", [])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def logged_warnings(records: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """Yield the last SHOWN_WARNINGS different warnings (first lines, with step) of records that come newest first."""
    shown: set[str] = set()
    for record in records:
        warning = str(record.get("event", "")).partition("\n")[0]
        if warning.startswith("warning: ") and warning not in shown and len(shown) < SHOWN_WARNINGS:
            shown.add(warning)
            yield f"{warning} (step {record.get('step')})"


def tail(path: Path, num_bytes: int) -> Iterator[dict[str, object]]:
    """Yield the records in the last `num_bytes` of a file of JSON lines, the newest first."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - num_bytes)
            file.seek(start)
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return
    # The first line is cut off, unless it is the file's first.
    for line in reversed(lines[1:] if start else lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # torn: the run is writing it
        if isinstance(found, dict):
            yield found


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
