"""Plan of one job, checked, from a config, a cluster and the options of the command line."""

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.checks.run import refuse
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.describe import describe
from mcore_rl.config.load import dump_config
from mcore_rl.config.pipeline import ConversionStage
from mcore_rl.config.rl.rollout import ServedConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import Section
from mcore_rl.errors import ConfigError
from mcore_rl.launch.job import JOB_SH, JobOptions, JobScript, Servers, sbatch_options
from mcore_rl.launch.preflight import (
    Allowances,
    Checked,
    check_training,
    environment_file_violations,
    folder_violations,
    image_violations,
)
from mcore_rl.launch.records import next_folder

CHECK_FOLDER = "check"
"""Folder in a run_dir of the jobs that check its nodes."""
FOUND = "found"
"""Folder within a launch's where its nodes write their findings."""
CHECK_TIME = "00:15:00"
"""Time limit of a check, in sbatch's format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A checked job that can be submitted."""

    program: str
    cluster: str
    folder: Path
    """Folder of this launch, new under run_dir/launch."""
    job: JobScript
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of the files next to the script."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """Name -> permissions of those files and of the script; the umask's where a file is not named."""
    checked: Checked


def plan_training(
    program: str, config: RunConfig, cluster: ClusterConfig, nodes: int, *, options: JobOptions, allowances: Allowances
) -> PlannedJob:
    """Return the job of one training; ConfigError lists everything that is wrong with it."""
    refuse(list(_unknown_fields(type(config), options)))
    run_dir = Path(config.run_dir).absolute()
    checkpoint = config.checkpoint
    if "on_damaged" not in checkpoint.model_fields_set:  # a job passes over a damaged one, unless the user says what
        checkpoint = checkpoint.model_copy(update={"on_damaged": "previous"})
    config = config.model_copy(update={"run_dir": str(run_dir), "checkpoint": checkpoint})
    served = config.served if isinstance(config, RlRunConfig) else None
    checked = check_training(_with_servers(config, options.servers), cluster, nodes, allowances)
    folder = next_folder(run_dir)
    job = JobScript(
        name=options.name or _name(program, run_dir),
        program=program,
        module=PROGRAMS[program].module,
        arguments=(str(folder / "config.toml"),),
        run_dir=str(run_dir),
        nodes=nodes,
        ranks_per_node=cluster.node.ranks_per_node,
        starter=cluster.survival.starter,
        servers=_servers(served, cluster, options, folder),
        **_placement(cluster, options, folder, cluster.node.gpus),
    )
    files = {"config.toml": dump_config(config), "cluster.toml": dump_config(cluster)}
    return PlannedJob(program=program, cluster=cluster.name, folder=folder, job=job, files=files, checked=checked)


def plan_conversion(
    stage: ConversionStage, run_dir: Path, cluster: ClusterConfig, *, options: JobOptions, allowances: Allowances
) -> PlannedJob:
    """Return the job of one `mcore-rl convert` on one node."""
    warnings = _refuse_unready(run_dir, cluster, allowances)
    run_dir = run_dir.absolute()
    folder = next_folder(run_dir)
    job = JobScript(
        name=options.name or _name("convert", run_dir),
        program="convert",
        module="mcore_rl.cli.cli",
        arguments=_conversion(stage),
        run_dir=str(run_dir),
        is_training=False,
        starter="once",
        **_placement(cluster, options, folder, stage.gpus),
    )
    files = {"cluster.toml": dump_config(cluster)}
    checked = Checked(lines=(conversion_text(stage),), warnings=warnings)
    return PlannedJob(program="convert", cluster=cluster.name, folder=folder, job=job, files=files, checked=checked)


def plan_check(
    run_dir: Path, cluster: ClusterConfig, nodes: int, *, options: JobOptions, allowances: Allowances
) -> PlannedJob:
    """Return the job of `mcore-rl doctor` on each of `nodes` nodes, in a folder of its own below `run_dir`."""
    run_dir = run_dir.absolute() / CHECK_FOLDER
    warnings = _refuse_unready(run_dir, cluster, allowances)
    folder = next_folder(run_dir)
    job = JobScript(
        name=options.name or _name("check", run_dir.parent),
        program="doctor",
        module="mcore_rl.cli.cli",
        arguments=("doctor", "--nodes", str(folder / FOUND)),
        run_dir=str(run_dir),
        nodes=nodes,
        is_training=False,
        starter="srun",
        **_placement(cluster, replace(options, time=options.time or CHECK_TIME), folder, cluster.node.gpus),
    )
    files = {"cluster.toml": dump_config(cluster)}
    checked = Checked(lines=(f"mcore-rl doctor on {nodes} nodes",), warnings=warnings)
    return PlannedJob(program="doctor", cluster=cluster.name, folder=folder, job=job, files=files, checked=checked)


def _refuse_unready(run_dir: Path, cluster: ClusterConfig, allowances: Allowances) -> tuple[str, ...]:
    """Raise ConfigError for what no job can run with, or return warnings of it where that is allowed."""
    absent = tuple(image_violations(cluster.container))
    unready = [*folder_violations(run_dir), *environment_file_violations(cluster, run_dir)]
    refuse(unready if allowances.absent else [*absent, *unready])
    return absent


def conversion_text(stage: ConversionStage) -> str:
    """Return the command of a conversion, which its job writes to DONE in the end."""
    return f"mcore-rl {shlex.join(_conversion(stage))}"


def _conversion(stage: ConversionStage) -> tuple[str, ...]:
    return ("convert", *stage.arguments)


def _placement(cluster: ClusterConfig, options: JobOptions, folder: Path, gpus: int) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "options": options,
        "gpus_per_node": gpus,
        "work_dir": str(Path.cwd()),
        "code_dir": str(folder / "code"),
        "job_sh": str(folder / JOB_SH),
    }


def _unknown_fields(kind: type[Section], options: JobOptions) -> Iterator[str]:
    known = [doc.key for doc in describe(kind)]
    given = {"--server-field": options.server_field, "--array-field": options.array_field if options.array else ""}
    for option, key in given.items():
        if key == "run_dir":
            yield f"{option} {key}: the job sets run_dir itself, to <run_dir>/<index> in an array. Name another field."
        elif key and key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Name one of `mcore-rl <program> --help`."
            yield f"{option} {key}: the config has no such field. {remedy}"


def _with_servers(config: RunConfig, count: int) -> RunConfig:
    # Checks need servers' addresses, which are known only when the job starts.
    if not count or not isinstance(config, RlRunConfig) or config.served is None:
        return config
    served = config.served
    if served.urls or served.count:
        raise ConfigError(
            f"--servers {count} with rl.engine.count={served.count} and rl.engine.urls={list(served.urls)}: the job "
            "starts the servers and sets their addresses. Clear both."
        )
    urls = tuple(f"http://server{index}:20000" for index in range(count))
    engine = served.model_copy(update={"urls": urls})
    return config.model_copy(update={"rl": config.rl.model_copy(update={"engine": engine})})


def _servers(served: ServedConfig | None, cluster: ClusterConfig, options: JobOptions, folder: Path) -> Servers | None:
    if not options.servers:
        if options.server_command or options.server_field:
            raise ConfigError("--server-command and --server-field need --servers N, the number of server nodes.")
        return None
    command, ports = options.server_command, 0
    arguments: tuple[str, ...] = (f"{options.server_field}={{hosts}}",) if options.server_field else ()
    if not command and served is not None:
        size = served.tensor_parallel
        if cluster.node.gpus % size:
            raise ConfigError(
                f"rl.engine.tensor_parallel={size} does not divide the {cluster.node.gpus} GPUs of a node of "
                f"{cluster.name}. Set it to a divisor."
            )
        ports = max(1, cluster.node.gpus // size)
        words = shlex.join(["serve", str(folder / "config.toml"), "--count", str(ports)])
        command = f'exec {{python}} -m mcore_rl.cli.cli {words} --port "$SERVER_PORT"'
        arguments += ("rl.engine.urls=[{urls}]",)
        if not served.broadcasts and served.transport_dir is None:
            # Servers on other nodes see the run's folder too; a launch lies in <run_dir>/launch/<n>.
            arguments += (f"rl.engine.transport_dir={folder.parents[1] / 'servers' / 'weights'}",)
    if not command:
        raise ConfigError(
            f"--servers {options.servers} needs --server-command, the command that runs on them, or "
            'rl.engine.kind="vllm" or "sglang", whose servers the job starts.'
        )
    slurm = cluster.slurm
    named = {
        "time": options.time or slurm.time,
        "partition": options.partition or slurm.partition,
        "account": options.account or slurm.account,
        "qos": options.qos or slurm.qos,
        "constraint": slurm.constraint,
    }
    requested = [f"--{name}={value}" for name, value in named.items() if value]
    return Servers(
        nodes=options.servers,
        command=command,
        sbatch=(*requested, *sbatch_options(cluster, cluster.node.gpus)),
        program_arguments=arguments,
        ports=ports,
    )


def _name(program: str, run_dir: Path) -> str:
    return re.sub(r"[^\w.-]+", "_", f"{program}-{run_dir.name}")
