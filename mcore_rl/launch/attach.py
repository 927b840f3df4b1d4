"""`mcore-rl attach`: a shell, or a command, on a node of a running job, inside its allocation and its container."""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.load import load_config
from mcore_rl.errors import ConfigError
from mcore_rl.launch import slurm
from mcore_rl.launch.job import inside_apptainer
from mcore_rl.launch.records import FOLDER, submissions


def main(args: argparse.Namespace) -> int:
    """Run the command during the job's own steps and return its exit status."""
    job, folder = _job_of(args.job)
    found = slurm.in_queue([job]).get(job)
    if found is None or found.state != "RUNNING":
        state = found.describe() if found else "not in the queue"
        raise ConfigError(f"job {job} is {state}: a shell needs a job that runs. See `mcore-rl jobs`.")
    cluster = load_config(ClusterConfig, folder / "cluster.toml")
    return subprocess.call(step_of(job, cluster, Path.cwd(), args.node, args.command), env=slurm.environment())


def step_of(job: str, cluster: ClusterConfig, work_dir: Path, node: str, command: list[str]) -> list[str]:
    """Return the srun command of a step on a node of a running job (empty: the first), without taking its resources.

    It runs `command`, or an interactive shell, in `work_dir` and the container of `cluster`.
    """
    container = cluster.container
    is_shell = not command
    words = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none"]
    words += [f"--nodelist={node}"] if node else []
    words += ["--pty"] if is_shell and sys.stdin.isatty() else []
    if container.kind == "pyxis":
        words += [f"--container-name=mcore_rl_{job}", f"--container-workdir={work_dir}"]
    inside = inside_apptainer(container, [str(work_dir)], has_gpus=cluster.node.gpus > 0)
    start = "\n".join([*cluster.python.setup, f"exec {shlex.join([*inside, *(command or ['bash'])])}"])
    return [*words, "bash", "-c", start]


def _job_of(text: str) -> tuple[str, Path]:
    run = Path(text)
    submitted = submissions(run)
    if submitted:
        launches = sorted((run / FOLDER).glob("*/submission.json"), key=lambda path: int(path.parent.name))
        return submitted[-1].job, launches[-1].parent
    if not text.replace("_", "").isdecimal():
        raise ConfigError(f"{text} is neither the id of a job nor a run that was launched. See `mcore-rl jobs`.")
    script = slurm.script_of(text)
    if script is None or not (script.parent / "cluster.toml").exists():
        raise ConfigError(
            f"job {text} is not one of `mcore-rl launch`, or Slurm has forgotten it. See `mcore-rl jobs`."
        )
    return text, script.parent
