"""One Slurm job as a value, and the job script that it is.

`render(JobScript(...))` is a plain bash script; launch/templates/job.sbatch.j2 is where to read what it does. What it
leaves in the run's folder:

logs/<job>.<attempt>/       node-<host>.log, check-<host>.log, failure.json: one folder an attempt
logs/<job>.tries            how often in a row it started without a new checkpoint
logs/holder                 the job that has the run, while it runs
attempts.jsonl              a line at the start and at the end of every attempt: see ATTEMPT_FIELDS
STOP, DONE, writer.json     see mcore_rl/train/run_folder.py
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import jinja2

from mcore_rl.checks.cluster import seconds_of
from mcore_rl.errors import HUNG_STATUS, ConfigError

TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE = "job.sbatch.j2"

STATUS: Mapping[str, int] = MappingProxyType(
    {
        "finished": 0,
        "refused": 2,
        "stopped": 10,
        "crash_loop": 11,
        "hang_loop": 12,
        "unfit_nodes": 13,
        "not_requeued": 14,
        "in_use": 15,
        "stalled": 16,
        "cancelled": 143,
    }
)
"""Exit statuses of a job script; those of a program that is no training are the program's."""
MEANING: Mapping[int, str] = MappingProxyType(
    {
        0: "all is done",
        2: "config, data or checkpoint are not as they should be: mend them, and submit again",
        10: "somebody made the STOP file: saved, to be gone on with by the same sbatch",
        11: "gave up: attempts without a new checkpoint, the last of which crashed",
        12: "gave up: attempts without a new checkpoint, the last of which hung",
        13: "gave up: no node is fit, or a fit one was not found in all attempts",
        14: "Slurm did not take the job back into the queue",
        15: "another job that runs is the writer of this run",
        16: "gave up: attempts without a new checkpoint, the last of which was ended by the time limit, by "
        "preemption or with its node",
        143: "cancelled, or ended by Slurm, which requeues after the loss of a node",
    }
)
"""What each status tells a person."""
ATTEMPT_FIELDS = (
    "event",  # "start" or "end"
    "time",  # seconds since 1970
    "job",
    "attempt",  # restarts before
    "nodes",  # as Slurm writes them: n[1-4]
    "step",  # of the last complete checkpoint
    "status",  # at the end: of srun; null where the program did not start
    "why",  # at the end: finished, limit, term, stop, crash, hang, refused, unfit, ended, lost, in_use
    "then",  # at the end: "requeue", "orphan" (Slurm had ended the attempt) or the script's exit status
)
"""Keys of a line of attempts.jsonl. Of several ends of an attempt (TERM, and what came of it) the last counts."""

WORD = re.compile(r"[^\s\"'`$\\;&|<>]*")
PLACE = re.compile(r"[\w./\-]*(\$\{?\w+\}?[\w./\-]*)*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """Where the program runs inside of."""

    kind: Literal["pyxis", "apptainer"]
    image: str
    mounts: tuple[str, ...] = ()
    """from:to[:flags]."""
    options: tuple[str, ...] = ()
    """Further words of srun (pyxis) or `apptainer exec`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Another part of a heterogeneous job, such as rollout servers: it starts first and ends with the program."""

    name: str
    """Lower-case letters and `_`; its hosts are in the environment of the program as <NAME>_HOSTS, with commas."""
    nodes: int
    command: str
    """One line of bash, run once on each of its nodes."""
    sbatch: tuple[str, ...] = ()
    """Its #SBATCH options: `--gpus-per-node=8`, `--partition=...`."""
    program_words: tuple[str, ...] = ()
    """Arguments that the program gets because of it; {hosts} stands for its hosts, with commas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobScript:
    """Everything that the template needs. Empty texts and zeros leave a thing to Slurm or to the program."""

    name: str
    program: str
    """Of config.programs.PROGRAMS, or any other name for a program that is no training (convert)."""
    module: str
    """What `python -m` starts: PROGRAMS[program].module, or mcore_rl.run.cli."""
    words: tuple[str, ...]
    """Its arguments: CONFIG.toml and fields. Those of a training get `run_dir=` and `train.hang_s=` from the script."""
    run_dir: str
    """Absolute; an array's elements run in <run_dir>/<index>. Its logs/ must exist before sbatch."""
    is_training: bool = True
    """Knows STOP and DONE, has checkpoints and is requeued until DONE; else the program's status is the job's."""

    nodes: int = 1
    ranks_per_node: int = 1
    starter: Literal["torchrun", "srun", "once"] = "torchrun"
    """`torchrun`: one task a node; `srun`: one task a rank; `once`: one task on the first node, no ranks."""
    cores_per_node: int = 0
    time: str = "1-00:00:00"
    """Limit of one attempt, as sbatch takes it."""
    signal_s: int = 600
    """Ahead of the limit, when the run is asked to save."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    dependency: str = ""
    """As sbatch takes it, `afterok:12:13`; a job whose dependency can never be fulfilled is cancelled by Slurm."""
    array: str = ""
    """Indices as sbatch takes them, `0-3%2`; empty: no array."""
    array_field: str = "train.seed"
    """The field that gets an element's index."""
    sbatch: tuple[str, ...] = ()
    """Further options: `--exclusive`, `--gpus-per-node=h100:8`, `--mem=0`."""
    components: tuple[Component, ...] = ()

    work_dir: str
    """Absolute; where the program runs, and where relative paths of its config begin."""
    code_dir: str = ""
    """Absolute; a copy of the code that is imported instead of what is installed."""
    python: str = "python"
    """Words that start Python."""
    setup: tuple[str, ...] = ()
    """Lines of bash before Python, on every node, outside of apptainer and inside of a pyxis container."""
    container: Container | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """NCCL's, UCX's, CUDA_DEVICE_MAX_CONNECTIONS ...; OMP_NUM_THREADS is 1 unless it is here."""
    scratch: str = ""
    """A folder made on every node and given as TMPDIR; may hold $SLURM_JOB_ID."""
    cache: str = ""
    """TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR are in it; may hold variables as well."""

    node_check: bool = True
    """Run mcore_rl.run.node_check on all nodes first."""
    gpus_per_node: int = 0
    """Of the check: how many it must find, 0: none are looked for."""
    gpu_memory_gib: float = 0.0
    """Of the check: how much memory each GPU must have free."""
    min_bandwidth_gbps: float = 0.0
    """Of the check: the slowest bus bandwidth of an all-reduce, in Gbit/s; 0: it is only told."""
    check_timeout_s: int = 300
    pre_node: tuple[str, ...] = ()
    """Lines of bash on every node before the program; a node where they fail is unfit."""
    post_node: tuple[str, ...] = ()
    """Lines of bash on every node after each attempt; their status is told."""

    max_attempts: int = 3
    """Starts in a row without a new checkpoint before the job gives up."""
    hang_s: int = 0
    """train.hang_s of a training; 0: as its config says."""

    def __post_init__(self) -> None:
        if violations := list(_violations(self)):
            raise ConfigError("\n".join(f"- {violation}" for violation in violations))

    @property
    def tasks_per_node(self) -> int:
        """What srun starts on each node."""
        return self.ranks_per_node if self.starter == "srun" else 1

    @property
    def cores_per_task(self) -> int:
        """0: as Slurm gives them."""
        return self.cores_per_node // self.tasks_per_node

    @property
    def srun_options(self) -> tuple[str, ...]:
        """Of every step: pyxis takes the container from them."""
        if self.container is None or self.container.kind != "pyxis":
            return ()
        return (
            f"--container-image={self.container.image}",
            f"--container-mounts={','.join(self._mounts)}",
            f"--container-workdir={self.work_dir}",
            *self.container.options,
        )

    @property
    def inside(self) -> tuple[str, ...]:
        """What stands before Python: the words that go into an apptainer container."""
        if self.container is None or self.container.kind != "apptainer":
            return ()
        gpus = ("--nv",) if self.gpus_per_node else ()
        binds = ("--bind", ",".join(self._mounts), "--pwd", self.work_dir)
        return ("apptainer", "exec", *gpus, *binds, *self.container.options, self.container.image)

    @property
    def _mounts(self) -> tuple[str, ...]:
        assert self.container is not None
        own = dict.fromkeys(path for path in (self.work_dir, self.run_dir, self.code_dir) if path)
        return (*(f"{path}:{path}" for path in own), *self.container.mounts)

    @property
    def log_file(self) -> str:
        """Of the script itself, as sbatch writes its name."""
        return f"{self.run_dir}/logs/{'%A_%a' if self.array else '%j'}.log"

    @property
    def sbatch_options(self) -> tuple[str, ...]:
        """The options that are asked for, in order, without those that every job has."""
        named = (
            "partition",
            "account",
            "qos",
            "reservation",
            "constraint",
            "nodelist",
            "exclude",
            "array",
            "dependency",
        )
        options = [f"--{name}={value}" for name in named if (value := getattr(self, name))]
        if self.dependency:
            options.append("--kill-on-invalid-dep=yes")
        if self.cores_per_task:
            options.append(f"--cpus-per-task={self.cores_per_task}")
        return (*options, *self.sbatch)


def render(job: JobScript) -> str:
    """The text of the job script."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # bash has ${#array[@]}
        comment_end_string="#>",
        autoescape=False,  # bash, not HTML: what comes from the job is quoted by `q`
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment.get_template(TEMPLATE).render(job=job, status={**STATUS, "hung_rank": HUNG_STATUS})


def _violations(job: JobScript) -> Iterator[str]:
    """What would make a script that does not run, as sentences."""
    for what in ("run_dir", "work_dir", "code_dir"):
        path = getattr(job, what)
        if not path.startswith("/") and (path or what != "code_dir"):
            yield f'{what}="{path}" is not absolute. Give the whole path: nodes start elsewhere.'
    for text in (job.name, job.run_dir, job.work_dir, *job.sbatch_options):
        if not WORD.fullmatch(text):
            yield f'"{text}" cannot stand in an #SBATCH line. Leave out blanks and quotes.'
    for what in ("scratch", "cache"):
        if not PLACE.fullmatch(getattr(job, what)):
            yield f'{what}="{getattr(job, what)}" is no path with variables such as $SLURM_JOB_ID.'
    yield from _unfit_parts(job)


def _unfit_parts(job: JobScript) -> Iterator[str]:
    """The same, of things that do not go together."""
    for component in job.components:
        if not re.fullmatch(r"[a-z_]+", component.name):
            yield f'"{component.name}" cannot name a component. Use lower-case letters and _.'
    if job.components and job.array:
        yield "Slurm has no arrays of heterogeneous jobs. Leave out one of the two."
    limit_s = seconds_of(job.time)
    if job.is_training and limit_s is not None and job.signal_s >= limit_s:
        yield (
            f"signal_s={job.signal_s} is not less than the time limit {job.time} ({limit_s} s). Lengthen the limit, "
            "or ask for the save later."
        )
