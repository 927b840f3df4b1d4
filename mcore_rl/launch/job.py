"""One Slurm job as a value, and the job script of it.

`render(JobScript(...))` returns a short bash script: the options of sbatch and the job's settings as variables. It
sources the copy of launch/job.sh that the launch has made beside it, which does everything else: that file is the place
to read. The job writes to the run's folder:

logs/<job>.<attempt>/       node-<host>.log, check-<host>.log, failures/ of ranks, failure.json (the first cause),
                            srun.log (its stderr): one folder per attempt
logs/<job>.tries            number of starts in a row without a new checkpoint
logs/<job>.restarts         number of starts within an allocation, on spare nodes
logs/holder                 id of the job that runs
attempts.jsonl              a line at the start and at the end of every attempt, as below
STOP, DONE, writer.json     see mcore_rl/train/run_folder.py

A line of attempts.jsonl has these keys; when an attempt has several ends (TERM, then the end itself) the last counts:

event    "start" or "end"
time     seconds since 1970
job, attempt, host   job's id; number of restarts before; host of the rank that failed first, at the end
nodes    as Slurm writes them: n[1-4]
step     of the last complete checkpoint
status   at the end: of srun; null where the program did not start
why      at the end: finished, limit, preempted, term, stop, crash, hang, disk, refused, unfit, ended, lost, in_use
then     at the end: "requeue", "restart" (within the allocation, on spare nodes), "orphan" (Slurm had ended the
         attempt) or the script's exit status
cause    at the end: one line on what was wrong, of a failed program the headline of failure.json; else empty
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from mcore_rl.checks.cluster import seconds_of
from mcore_rl.config.cluster import ChecksConfig, ClusterConfig, ContainerConfig, NoContainer, SurvivalConfig
from mcore_rl.errors import HUNG_STATUS, ConfigError
from mcore_rl.launch.slurm import STATES
from mcore_rl.storage.files import NOT_WRITER, RESERVE_BYTES, RESERVE_FILE, UNWRITTEN, shipped

JOB_SH = "job.sh"
"""Name of the static part of a job script, in launch/ and in the folder of a launch."""
STATUS: Mapping[str, int] = MappingProxyType({name: row["number"] for name, row in STATES["status"].items()})
"""Exit statuses of a job script; a program that is no training has its own."""
WRITABLE_S = 900
"""Seconds that a job waits for the run's folder to be writable again: Slurm could not start it there."""
MEANING: Mapping[int, str] = MappingProxyType({row["number"]: row["meaning"] for row in STATES["status"].values()})
"""Exit status -> its meaning for a user."""
UNREADABLE = """
job_sh={job_sh}
if [ ! -r "$job_sh" ]; then
  cause="$job_sh cannot be read on $(hostname): it was deleted, moved, or is not mounted there"
  echo "$cause. Restore it and submit again, or launch again (exit status {refused})"
  run=$run_dir${{array_field:+/$SLURM_ARRAY_TASK_ID}}
  {{
    printf '{{"event": "end", "time": %s, "job": "%s", ' "$(date +%s)" "$SLURM_JOB_ID"
    printf '"attempt": %s, "why": "refused", ' "${{SLURM_RESTART_COUNT:-0}}"
    printf '"then": "{refused}", "cause": "%s"}}\\n' "$cause"
  }} >>"$run/attempts.jsonl"
  exit {refused}
fi
# shellcheck source=launch/job.sh
source "$job_sh"
"""
"""End of a job script; a job without its folder ends with a record, as where its copy of the code is gone."""
MAX_COLUMNS = 120
"""Width of the lines that hold the elements of an array."""
WORD = re.compile(r"[^\s\"'`$\\;&|<>#]*")
PLACE = re.compile(r"[\w./\-]*(\$\{?\w+\}?[\w./\-]*)*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """Second component of a heterogeneous job, rollout servers: it starts first and ends with the program.

    The program finds its hosts, separated by commas, in SERVER_HOSTS.
    """

    nodes: int
    command: str
    """Line of bash that runs once on each of its nodes; {python} stands for the Python of the job."""
    sbatch: tuple[str, ...] = ()
    """#SBATCH options of the component: `--gpus-per-node=8`, `--partition=...`."""
    program_arguments: tuple[str, ...] = ()
    """Arguments added to the program's; {hosts} are its hosts, {urls} the quoted addresses of all ports."""
    ports: int = 0
    """Ports that each of its nodes listens on, from SERVER_PORT on, which depends on the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of the job on the command line; an empty text leaves one to the cluster's file or to Slurm."""

    name: str = ""
    time: str = ""
    array: str = ""
    array_field: str = "train.seed"
    dependency: str = ""
    exclude: str = ""
    nodelist: str = ""
    reservation: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    mail_user: str = ""
    mail_type: str = ""
    servers: int = 0
    """Number of server nodes in addition to the trainer's."""
    server_command: str = ""
    server_field: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScript:
    """All settings of a job. Empty texts and zeros leave a setting to Slurm or to the program."""

    name: str
    program: str
    """Name in PROGRAMS of checks/programs.py, or another name for a program that is not a training (convert)."""
    module: str
    """Module for `python -m`: PROGRAMS[program].module, or mcore_rl.cli.cli."""
    arguments: tuple[str, ...]
    """Arguments of the program: a config and fields. The script adds `run_dir=` for a training."""
    run_dir: str
    """Absolute path; elements of an array run in <run_dir>/<index>. Its logs/ must exist before sbatch."""
    is_training: bool = True
    """Whether the program knows STOP and DONE and is requeued until DONE; else its exit status is the job's."""
    cluster: ClusterConfig
    options: JobOptions = JobOptions()
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    starter: Literal["torchrun", "srun", "once"] = "torchrun"
    """`torchrun`: one task per node; `srun`: one task per rank; `once`: one task on the first node, no ranks."""
    servers: Servers | None = None
    work_dir: str
    """Absolute path of the program's working folder, to which relative paths of its config refer."""
    code_dir: str = ""
    """Absolute path of a copy of the code that is imported instead of the installed package."""
    job_sh: str = str(shipped(JOB_SH))
    """Absolute path of the copy of launch/job.sh that the job runs, also after later upgrades of the package."""

    def __post_init__(self) -> None:
        if violations := list(_violations(self)):
            raise ConfigError("\n".join(f"- {violation}" for violation in violations))

    @property
    def checks(self) -> ChecksConfig:
        """Checks of its nodes; a program that is no training has none."""
        return self.cluster.checks if self.is_training else ChecksConfig(node=False)

    @property
    def survival(self) -> SurvivalConfig:
        """Its restarts; a program that is no training has no spare nodes."""
        return self.cluster.survival if self.is_training else SurvivalConfig()

    @property
    def time(self) -> str:
        """Time limit of one attempt, in sbatch's format."""
        return self.options.time or self.cluster.slurm.time

    @property
    def container(self) -> NoContainer | ContainerConfig:
        """Container that it runs in."""
        container = self.cluster.container
        if not isinstance(container, ContainerConfig) or not self.options.array:
            return container
        # Elements of an array have their folders next to the launches.
        launches = Path(self.code_dir).parents[1]
        return container.model_copy(update={"mounts": (*container.mounts, f"{launches}:{launches}")})

    @property
    def tasks_per_node(self) -> int:
        """Number of tasks that srun starts on each node."""
        return self.ranks_per_node if self.starter == "srun" else 1

    @property
    def cores_per_task(self) -> int:
        """Cores of a task; 0 leaves them to Slurm."""
        return (self.cluster.node.cores or 0) // self.tasks_per_node

    @property
    def srun_options(self) -> tuple[str, ...]:
        """Options of every srun, from which pyxis takes the container."""
        container = self.container
        if not isinstance(container, ContainerConfig) or container.kind != "pyxis":
            return ()
        return (
            f"--container-image={container.image}",
            f"--container-mounts={','.join(_mounts(container, self._folders))}",
            f"--container-workdir={self.work_dir}",
            *container.options,
        )

    @property
    def is_checked(self) -> bool:
        """Whether lines run on every node before the program, which show that a node is unfit."""
        prepares = self.is_training and (self.cluster.python.setup or self.cluster.paths.scratch)
        return bool(self.checks.node or self.checks.pre_node or prepares)

    @property
    def inside(self) -> tuple[str, ...]:
        """Command before Python that enters an apptainer container."""
        return inside_apptainer(self.container, self._folders, has_gpus=self.gpus_per_node > 0)

    @property
    def _folders(self) -> tuple[str, ...]:
        # The working folder comes first.
        return tuple(dict.fromkeys(path for path in (self.work_dir, self.run_dir, self.code_dir) if path))

    @property
    def sbatch_options(self) -> tuple[str, ...]:
        """Options of sbatch in order, without those that every job has."""
        slurm, options = self.cluster.slurm, self.options
        mail_user = options.mail_user or slurm.mail_user
        named = {
            "partition": options.partition or slurm.partition,
            "account": options.account or slurm.account,
            "qos": options.qos or slurm.qos,
            "reservation": options.reservation,
            "constraint": slurm.constraint,
            "nodelist": options.nodelist,
            "exclude": options.exclude,
            "mail-user": mail_user,
            "mail-type": mail_user and (options.mail_type or slurm.mail_type),
            "array": options.array,
            "dependency": options.dependency,
        }
        found = [f"--{name}={value}" for name, value in named.items() if value]
        if options.dependency:
            found.append("--kill-on-invalid-dep=yes")
        if self.cores_per_task:
            found.append(f"--cpus-per-task={self.cores_per_task}")
        return (*found, *sbatch_options(self.cluster, self.gpus_per_node))


def sbatch_options(cluster: ClusterConfig, gpus: int) -> tuple[str, ...]:
    """Return the options of sbatch that request GPUs and memory of a node."""
    slurm, memory_gib = cluster.slurm, cluster.node.memory_gib
    options = ["--exclusive"] if slurm.exclusive else []
    typed = f"{slurm.gpu_type}:{gpus}" if slurm.gpu_type else str(gpus)
    if gpus and slurm.gpus_by == "gpus-per-node":
        options.append(f"--gpus-per-node={typed}")
    elif gpus and slurm.gpus_by == "gres":
        options.append(f"--gres=gpu:{typed}")
    options.append("--mem=0" if memory_gib == "all" else f"--mem={memory_gib}G")
    return (*options, *slurm.options)


def environment_file(cluster: ClusterConfig) -> Path | None:
    """Return the absolute path of the cluster's file of keys; None when it has none."""
    return Path(cluster.environment_file).expanduser().absolute() if cluster.environment_file else None


def inside_apptainer(
    container: NoContainer | ContainerConfig, folders: Sequence[str], *, has_gpus: bool
) -> tuple[str, ...]:
    """Return the command that enters an apptainer container with `folders`, the working folder first, or nothing."""
    if not isinstance(container, ContainerConfig) or container.kind != "apptainer":
        return ()
    binds = ("--bind", ",".join(_mounts(container, folders)), "--pwd", folders[0])
    return ("apptainer", "exec", *(("--nv",) if has_gpus else ()), *binds, *container.options, container.image)


def _mounts(container: ContainerConfig, folders: Sequence[str]) -> tuple[str, ...]:
    return (*(f"{path}:{path}" for path in folders), *container.mounts)


def render(job: JobScript) -> str:
    """Return the text of job.sbatch."""
    return "\n".join((*_directives(job), *_settings(job), ""))


def _directives(job: JobScript) -> Iterator[str]:
    folder = f"{job.run_dir}/<index>" if job.options.array else job.run_dir
    yield "#!/bin/bash -p"
    yield f"# {job.name}: {job.program}, {job.nodes} x {job.ranks_per_node} ranks."
    yield "# One attempt of the job; it can be edited and submitted with sbatch."
    yield f"# {folder} holds attempts.jsonl (starts and ends of attempts)"
    yield "# and logs/<job>.<attempt>/ (output of the nodes)."
    if job.is_training:
        yield "# The program exits with 0 after a save, and creates DONE after its last step. Without DONE the job is"
        yield "# requeued, unless it was cancelled, STOP was created, or max_attempts brought no new checkpoint."
    if job.survival.spares:
        yield "# Where a node fails, this script begins anew on the others of its allocation, some of which are spares"
        yield "# (logs/<job>.restarts counts that), and is requeued only when too few of them are left."
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes + job.survival.spares}",
        *(["--no-kill"] if job.survival.spares else []),
        f"--ntasks-per-node={job.tasks_per_node}",
        f"--time={job.time}",
        # B: the script alone gets the signal, and asks the run by the file STOP to save after its step.
        *([f"--signal=B:USR1@{job.survival.signal_s}"] if job.is_training else []),
        "--requeue",
        "--open-mode=append",  # a requeued attempt has the same id and log
        f"--output={job.run_dir}/logs/{'%A_%a' if job.options.array else '%j'}.log",
        f"--chdir={job.work_dir}",
        *job.sbatch_options,
    ]
    if job.servers:
        options += ["hetjob", f"--nodes={job.servers.nodes}", "--ntasks-per-node=1", "--requeue", *job.servers.sbatch]
    yield from (f"#SBATCH {option}" for option in options)


def _settings(job: JobScript) -> Iterator[str]:
    servers, cluster, node = job.servers or Servers(nodes=0, command=""), job.cluster, job.cluster.node
    inside = shlex.join(job.inside)
    check = (
        f"--ranks={job.ranks_per_node}",
        f"--gpus={job.gpus_per_node}",
        # The free memory that the check finds is a little less than the card's nominal memory.
        f"--gpu-memory-gib={node.gpu_memory_gib - node.reserved_gib if job.gpus_per_node else 0.0}",
        f"--min-bandwidth-gbps={job.checks.min_bandwidth_gbps or 0.0}",
    )
    container = cluster.container
    image_timeout_s = container.timeout_s if job.is_training and isinstance(container, ContainerConfig) else 0
    groups: Mapping[str, Mapping[str, object]] = {
        "the program": {
            "is_training": job.is_training,
            "run_dir": job.run_dir,
            "array_field": job.options.array_field if job.options.array else "",
            "starter": job.starter,
            "module": job.module,
            "arguments": job.arguments,
            # The content of DONE of a program that does not write it itself: the step that has succeeded.
            **({} if job.is_training else {"done_text": f"mcore-rl {shlex.join(job.arguments)}"}),
        },
        "its nodes": {
            "num_nodes": job.nodes,
            "spares": job.survival.spares,
            "ranks_per_node": job.ranks_per_node,
            "tasks_per_node": job.tasks_per_node,
            "cores_per_task": job.cores_per_task,
            "is_bound": job.is_training and node.bind and cluster.slurm.exclusive,
            "work_dir": job.work_dir,
            "code_dir": job.code_dir,
            "python": cluster.python.command,
            "setup": cluster.python.setup,
            "inside": inside,
            "srun_options": job.srun_options,
            "environment": tuple(f"{name}={value}" for name, value in cluster.environment.items()),
            "environment_file": environment_file(cluster) or "",
            "scratch": cluster.paths.scratch or "",
            "cache": cluster.paths.cache or "",
        },
        "inference servers": {
            "server_command": servers.command.replace("{python}", f"{inside} {cluster.python.command}".strip()),
            "server_ports": servers.ports,
            "server_arguments": servers.program_arguments,
        },
        "checks of the nodes": {
            "is_checked": job.is_checked,
            "check_arguments": check if job.checks.node else (),
            "check_timeout_s": job.checks.timeout_s,
            "image_timeout_s": image_timeout_s,
            "pre_node": job.checks.pre_node,
            "post_node": job.checks.post_node,
        },
        "survival": {
            "signal_s": job.survival.signal_s,
            "max_attempts": job.survival.max_attempts,
            "max_crashes": job.survival.max_crashes,
            "bad_node_crashes": job.survival.bad_node_crashes,
            "bad_node_attempts": job.survival.bad_node_attempts,
        },
        "constants of the package": {
            "reserve_file": RESERVE_FILE,
            "reserve_bytes": RESERVE_BYTES,
            "not_writer": NOT_WRITER,
            "unwritten": UNWRITTEN,
            "writable_s": WRITABLE_S,
            "hung_status": HUNG_STATUS,
        },
    }
    yield "# shellcheck disable=SC2016,SC2034 # job.sh uses the variables, and expands some of them on the nodes"
    yield ""
    yield "# Traps first: an untrapped signal ends a script."
    yield "why= # limit: the time limit is near (USR1). term: cancelled, or a node is lost (TERM)"
    if job.is_training:
        yield "trap 'why=${why:-limit}' USR1"
    yield "trap 'why=term' TERM"
    yield "set -uo pipefail # bash -p: BASH_ENV and SHELLOPTS of the submitting shell neither end nor change it"
    for title, settings in groups.items():
        yield ""
        yield f"# {title}"
        for name, value in settings.items():
            yield _assignment(name, value)
    yield f"declare -A status=({' '.join(f'[{name}]={number}' for name, number in STATUS.items())}) # of the job"
    yield from UNREADABLE.format(job_sh=shlex.quote(job.job_sh), refused=STATUS["refused"]).splitlines()


def _assignment(name: str, value: object) -> str:
    """Return the lines that assign a setting: "yes" or nothing for a bool, an array for a sequence."""
    if isinstance(value, bool):
        return f"{name}={'yes' if value else ''}"
    if not isinstance(value, tuple | list):
        return f"{name}={_quoted(value)}"
    lines = [f"{name}=("]
    for word in map(_quoted, value):
        if len(lines[-1]) + len(word) >= MAX_COLUMNS:
            lines.append(" ")
        lines[-1] += word if lines[-1].endswith("(") else f" {word}"
    return "\n".join(lines) + ")"


def _quoted(value: object) -> str:
    # A comma too needs quotes: it would look like a separator in an array.
    text = str(value)
    return "" if text == "" else f"'{text}'" if shlex.quote(text) == text and "," in text else shlex.quote(text)


def _violations(job: JobScript) -> Iterator[str]:
    for what in ("run_dir", "work_dir", "code_dir"):
        path = getattr(job, what)
        if not path.startswith("/") and (path or what != "code_dir"):
            yield f'{what}="{path}" is not absolute. Give the whole path: nodes start in another folder.'
    if "%" in job.run_dir:
        yield f'run_dir="{job.run_dir}" has a %, which sbatch replaces in the name of a log. Choose one without.'
    of_servers = job.servers.sbatch if job.servers else ()
    for text in (job.name, job.run_dir, job.work_dir, *job.sbatch_options, *of_servers):
        if not WORD.fullmatch(text):
            yield f"{text!r} cannot stand in an #SBATCH line. Leave out blanks, quotes and #."
    if not seconds_of(job.time):
        yield f"the time limit {job.time!r} is no duration. Write 12:00:00 (hours) or 2-00:00:00 (days)."
    for what in ("scratch", "cache"):
        place = getattr(job.cluster.paths, what) or ""
        if not PLACE.fullmatch(place):
            yield f'{what}="{place}" is not a path, in which variables such as $SLURM_JOB_ID are allowed.'
    if job.servers and job.survival.spares:
        yield (
            f"survival.spares={job.survival.spares} with servers: the components of a heterogeneous job cannot begin "
            "anew on spare nodes. Set survival.spares=0, or leave out the servers."
        )
    if job.servers and job.options.array:
        yield "Slurm has no arrays of heterogeneous jobs. Leave out one of the two."
    limit_s = seconds_of(job.time)
    if job.is_training and limit_s is not None and job.survival.signal_s >= limit_s:
        yield (
            f"signal_s={job.survival.signal_s} is not less than the time limit {job.time} ({limit_s} s). Lengthen the "
            "limit, or ask for the save later."
        )
