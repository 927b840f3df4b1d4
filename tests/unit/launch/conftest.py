"""A login node: a folder to work in, and on the PATH stand-ins for Slurm's commands, which are a foreign program.

The real ones are in tests/slurm.
"""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.cluster import (
    ChecksConfig,
    ClusterConfig,
    NodeConfig,
    PathsConfig,
    PythonConfig,
    SlurmConfig,
    SurvivalConfig,
)
from mcore_rl.launch.job import JobOptions, JobScript

ROOT = Path(__file__).parents[3]
SBATCH = """#!/bin/sh
case "$*" in
  *--test-only*) /bin/cat >"{folder}/tested"; echo "sbatch: Job 7 to start at 2030-01-01T00:00:00" >&2; exit 0 ;;
esac
if [ -e "{folder}/refuses" ] && /bin/grep -q -f "{folder}/refuses" "$2"; then
  echo "sbatch: error: Batch job submission failed: Invalid partition name specified" >&2
  exit 1
fi
echo "$*" >>"{folder}/submitted"
echo "$((100 + $(/usr/bin/wc -l <"{folder}/submitted")));cluster"
"""
ANSWERS = """#!/bin/sh
echo "$*" >>"{folder}/asked_{name}"
/bin/cat "{folder}/{name}" 2>/dev/null && exit 0
/bin/cat "{folder}/{name}.error" >&2 2>/dev/null && exit 1
exit 0
"""


def job_script(**fields: Any) -> JobScript:
    """A job of which also settings of the cluster's file, and options of a launch, are given by their names alone."""

    def taken(names: Iterable[str]) -> dict[str, Any]:
        given = {name: fields.pop(name) for name in names if name in fields}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

    renamed = {"node_check": "node", "check_timeout_s": "timeout_s", "python": "command"}
    fields = {renamed.get(name, name): value for name, value in fields.items()}
    sections = {
        "survival": SurvivalConfig(**taken(set(SurvivalConfig.model_fields) - {"starter"})),
        "checks": ChecksConfig(**taken(ChecksConfig.model_fields)),
        "python": PythonConfig(**taken(PythonConfig.model_fields)),
        "paths": PathsConfig(**taken(PathsConfig.model_fields)),
        **taken(["environment", "environment_file", "container"]),
    }
    options = JobOptions(**taken({option.name for option in dataclasses.fields(JobOptions)} - {"name", "servers"}))
    cluster = ClusterConfig(slurm=SlurmConfig(exclusive=False), node=NodeConfig(gpus=0, bind=False), **sections)
    return JobScript(cluster=cluster, options=options, **fields)


class LoginNode:
    """Answers of Slurm's commands are files: `says("squeue", text)`, `fails("sacct", text)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("git", "bash"):
            (self.bin / name).symlink_to(str(shutil.which(name)))
        self.install("sbatch", SBATCH)
        for name in ("squeue", "sacct", "scontrol", "scancel", "srun"):
            self.install(name, ANSWERS)

    def install(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text.format(folder=self.folder, name=name))
        path.chmod(0o755)

    def says(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def fails(self, name: str, text: str) -> None:
        (self.folder / f"{name}.error").write_text(text)

    def hangs(self, name: str) -> None:
        (self.bin / name).write_text("#!/bin/sh\nexec /bin/sleep 60\n")

    def lacks(self, *names: str) -> None:
        for name in names:
            (self.bin / name).unlink()

    def asked(self, name: str) -> str:
        path = self.folder / f"asked_{name}"
        return path.read_text() if path.exists() else ""

    @property
    def submitted(self) -> list[Path]:
        path = self.folder / "submitted"
        return [Path(line.split()[-1]) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    node = LoginNode(tmp_path / "slurm")
    monkeypatch.setenv("PATH", str(node.bin))
    return node


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    for name in ("train", "valid"):
        for ending in (".bin", ".idx", ".jsonl"):
            path = folder / "data" / (name + ending)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    monkeypatch.chdir(folder)
    return folder
