"""run.json: what each start of a run was, so that a report can say it: command, code, versions, machine, mesh.

    [{"started": "2026-01-31T12:00:00+00:00", "step": 0, "command": ["python", "-m", ...], "commit": "...", ...}]

An attempt is added at its start and never changed. Environment variables are not recorded: they may hold secrets.
"""

import json
import os
import platform as host
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

import mcore_rl
from mcore_rl.backend.platform import Platform
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.errors import DataError

FILE_NAME = "run.json"
PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "numpy")
SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAttempt:
    """One start of a run."""

    started: str
    """ISO 8601, UTC."""
    step: int
    """From which it went on."""
    command: list[str]
    """Of rank 0."""
    commit: str
    """Of the code; "+ changes" when files differ from it; empty: not known."""
    versions: dict[str, str]
    machine: dict[str, str | int]
    """device: its name; ranks, cores, memory_bytes: of the host of rank 0."""
    mesh: dict[str, int]
    """Sizes, and world."""

    @property
    def started_s(self) -> float:
        """Seconds since 1970, as in metrics.jsonl."""
        return datetime.fromisoformat(self.started).timestamp()


def this_run_attempt(platform: Platform, mesh: MeshConfig, step: int) -> RunAttempt:
    """What rank 0 writes down of this process."""
    found = {"python": host.python_version(), "mcore_rl": mcore_rl.__version__}
    return RunAttempt(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        step=step,
        command=["python", *sys.orig_argv[1:]],
        commit=code_commit(Path(mcore_rl.__file__).parents[1]),
        versions=found | {name: installed for name in PACKAGES if (installed := _version(name))},
        machine={
            "device": torch.cuda.get_device_name(platform.device) if platform.is_cuda else _cpu_name(),
            "ranks": platform.world_size,
            "cores": os.cpu_count() or 0,
            "memory_bytes": psutil.virtual_memory().total,
        },
        mesh={**{name: getattr(mesh, name) for name in SIZES}, "world": platform.world_size},
    )


def add_attempt(run_dir: Path, attempt: RunAttempt) -> None:
    """Append it to `run_dir/run.json`, which is replaced in one move."""
    path = run_dir / FILE_NAME
    attempts = [asdict(one) for one in read_attempts(run_dir)]
    new = path.with_suffix(".json.new")
    new.write_text(json.dumps([*attempts, asdict(attempt)], indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def read_attempts(run_dir: Path) -> list[RunAttempt]:
    """All starts of a run, in order; none of a run from before there was a run.json."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    try:
        return [RunAttempt(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError):
        raise DataError(
            f"{path} is damaged: it should hold a list of attempts. Move it away; only the report misses it."
        ) from None


def code_commit(root: Path) -> str:
    """The commit of the code at `root`; of a job's copy of the code what was written beside it."""
    note = root.parent / "commit.txt"
    if root.name == "code" and note.exists():
        return note.read_text(encoding="utf-8").strip()
    if not (root / ".git").exists():
        return ""
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} + changes" if commit and changed else commit


def _git(root: Path, *words: str) -> str:
    """What git says, "" where it does not."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    """As the kernel tells it, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, host.machine())
