"""Recording of a run's starts in run.json (see metrics/attempts_file.py).

Environment variables are not recorded, because they may hold secrets.
"""

import json
import os
import platform as host
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

import mcore_rl
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.speed import SpeedFlags
from mcore_rl.megatron.platform import Platform
from mcore_rl.metrics.attempts_file import FILE_NAME, NUMERICS, Machine, RunAttempt, read_attempts
from mcore_rl.storage.files import write_atomically

PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "numpy")
MESH_SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")


def this_run_attempt(
    platform: Platform,
    mesh: MeshConfig,
    step: int,
    extensions: Mapping[str, str] | None = None,
    *,
    speed: SpeedFlags | None = None,
    changes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> RunAttempt:
    """Describe this process, on rank 0, as a start of a run at `step`; `extensions` as `load_extensions` returns.

    `speed` are the flags of the run; `changes` and `warnings` come from the resume.
    """
    installed = {"python": host.python_version(), "mcore_rl": mcore_rl.__version__}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return RunAttempt(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        step=step,
        command=["python", *sys.orig_argv[1:]],
        commit=code_commit(Path(mcore_rl.__file__).parents[1]),
        versions=installed,
        machine=Machine(
            device=torch.cuda.get_device_name(platform.device) if platform.is_cuda else cpu_name(),
            ranks=platform.world_size,
            cores=os.cpu_count() or 0,
            memory_bytes=psutil.virtual_memory().total,
        ),
        numerics=NUMERICS,
        mesh={**{name: getattr(mesh, name) for name in MESH_SIZES}, "world": platform.world_size},
        layers=platform.layers_id,
        extensions=dict(extensions or {}),
        speed={} if speed is None else asdict(speed),
        changes=list(changes),
        warnings=list(warnings),
    )


def add_attempt(run_dir: Path, attempt: RunAttempt) -> None:
    """Append an attempt to `run_dir/run.json`; a reader sees the file before or after, never a part."""
    attempts = [asdict(recorded) for recorded in (*read_attempts(run_dir), attempt)]
    write_atomically(run_dir / FILE_NAME, json.dumps(attempts, indent=1) + "\n")


def code_commit(root: Path) -> str:
    """Return the commit of the code at `root`, "" if unknown.

    A job runs a copy of the code without .git; commit.txt next to it names the commit.
    """
    note = root.parent / "commit.txt"
    if root.name == "code" and note.exists():
        return note.read_text(encoding="utf-8").strip()
    if not (root / ".git").exists():
        return ""
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} + changes" if commit and changes else commit


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_name() -> str:
    """Return the name of the processor as the kernel reports it, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, host.machine())
