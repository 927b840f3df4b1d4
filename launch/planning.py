"""From a config, a cluster and the user's wishes to the job script of one program, all of it checked."""

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.job import Component, Container, JobScript
from launch.preflight import Checked, Leave, check_training, folder_violations, image_violations
from launch.records import next_folder
from mcore_rl.checks.programs import PROGRAMS
from mcore_rl.checks.run import refuse
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.describe import describe
from mcore_rl.config.load import dump_config
from mcore_rl.config.pipeline import ConversionStage
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What a user says about the job itself; an empty text leaves it to the cluster's file, or to Slurm."""

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
    servers: int = 0
    """Nodes of servers beside the trainer."""
    server_command: str = ""
    server_field: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A job that may be submitted."""

    program: str
    cluster: str
    folder: Path
    """Where everything about this launch will be kept: a new one under run_dir/launch."""
    job: JobScript
    files: Mapping[str, str] = field(default_factory=dict)
    """Name and text of what is kept beside the script."""
    checked: Checked


def plan_training(
    program: str, config: RunConfig, cluster: ClusterConfig, nodes: int, *, wishes: Wishes, leave: Leave
) -> Plan:
    """The job of one training; ConfigError that lists what is wrong with it."""
    refuse(list(_unknown_fields(config, wishes)))
    run_dir = Path(config.run_dir).absolute()
    config = config.model_copy(update={"run_dir": str(run_dir)})
    checked = check_training(PROGRAMS[program], config, cluster, nodes, leave)
    folder = next_folder(run_dir)
    ranks = cluster.node.ranks_per_node
    gpus = cluster.node.gpus
    job = JobScript(
        name=wishes.name or _name(program, run_dir),
        program=program,
        module=PROGRAMS[program].module,
        words=(str(folder / "config.toml"),),
        run_dir=str(run_dir),
        nodes=nodes,
        ranks_per_node=ranks,
        starter=cluster.survival.starter,
        signal_s=cluster.survival.signal_s,
        array=wishes.array,
        array_field=wishes.array_field,
        components=_servers(cluster, wishes),
        node_check=cluster.checks.node,
        gpus_per_node=gpus,
        # What the check finds free is a little less than what the card is sold with.
        gpu_memory_gib=cluster.node.gpu_memory_gib - cluster.node.reserved_gib if gpus else 0.0,
        min_bandwidth_gbps=cluster.checks.min_bandwidth_gbps or 0.0,
        check_timeout_s=cluster.checks.timeout_s,
        pre_node=cluster.checks.pre_node,
        post_node=cluster.checks.post_node,
        max_attempts=cluster.survival.max_attempts,
        **_place(cluster, wishes, folder, gpus),
    )
    files = {"config.toml": dump_config(config), "cluster.toml": dump_config(cluster)}
    return Plan(program=program, cluster=cluster.name, folder=folder, job=job, files=files, checked=checked)


def plan_conversion(
    stage: ConversionStage, run_dir: Path, cluster: ClusterConfig, *, wishes: Wishes, leave: Leave
) -> Plan:
    """The job of one `mcore-rl convert` on one node."""
    absent = list(image_violations(cluster.container))
    refuse([*(() if leave.absent else absent), *folder_violations(run_dir)])
    run_dir = run_dir.absolute()
    folder = next_folder(run_dir)
    job = JobScript(
        name=wishes.name or _name("convert", run_dir),
        program="convert",
        module="mcore_rl.run.cli",
        words=("convert", *stage.arguments),
        run_dir=str(run_dir),
        is_training=False,
        starter="once",
        node_check=False,
        **_place(cluster, wishes, folder, stage.gpus),
    )
    files = {"cluster.toml": dump_config(cluster)}
    line = f"mcore-rl convert {shlex.join(stage.arguments)}"
    checked = Checked(lines=(line,), warnings=tuple(absent) if leave.absent else ())
    return Plan(program="convert", cluster=cluster.name, folder=folder, job=job, files=files, checked=checked)


def _place(cluster: ClusterConfig, wishes: Wishes, folder: Path, gpus: int) -> dict[str, Any]:
    """What all jobs of a cluster have in common."""
    slurm, container = cluster.slurm, cluster.container
    mounts = container.mounts
    if wishes.array:
        mounts = (*mounts, f"{folder.parent}:{folder.parent}")  # the elements have their folders beside it
    return {
        "time": wishes.time or slurm.time,
        "partition": wishes.partition or slurm.partition or "",
        "account": wishes.account or slurm.account or "",
        "qos": wishes.qos or slurm.qos or "",
        "constraint": slurm.constraint or "",
        "reservation": wishes.reservation,
        "nodelist": wishes.nodelist,
        "exclude": wishes.exclude,
        "dependency": wishes.dependency,
        "cores_per_node": cluster.node.cores or 0,
        "sbatch": sbatch_options(cluster, gpus),
        "work_dir": str(Path.cwd()),
        "code_dir": str(folder / "code"),
        "python": cluster.python.command,
        "setup": cluster.python.setup,
        "environment": cluster.environment,
        "scratch": cluster.paths.scratch or "",
        "cache": cluster.paths.cache or "",
        "container": None
        if container.kind == "none"
        else Container(
            kind=container.kind, image=str(container.image), mounts=mounts, options=container.options
        ),
    }


def sbatch_options(cluster: ClusterConfig, gpus: int) -> tuple[str, ...]:
    """What a node's share of the cluster is asked for with."""
    slurm, memory_gib = cluster.slurm, cluster.node.memory_gib
    options = ["--exclusive"] if slurm.exclusive else []
    typed = f"{slurm.gpu_type}:{gpus}" if slurm.gpu_type else str(gpus)
    if gpus and slurm.gpus_by == "gpus-per-node":
        options.append(f"--gpus-per-node={typed}")
    elif gpus and slurm.gpus_by == "gres":
        options.append(f"--gres=gpu:{typed}")
    options.append("--mem=0" if memory_gib == "all" else f"--mem={memory_gib}G")
    return (*options, *slurm.options)


def _unknown_fields(config: RunConfig, wishes: Wishes) -> Iterator[str]:
    """Fields that the job would set, and that the config does not have."""
    known = [doc.key for doc in describe(type(config))]
    given = {
        "--server-field": wishes.server_field,
        "--array-field": wishes.array_field if wishes.array else "",
    }
    for option, key in given.items():
        if key and key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Name one of `mcore-rl <program> --help`."
            yield f"{option} {key}: the config has no such field. {remedy}"


def _servers(cluster: ClusterConfig, wishes: Wishes) -> tuple[Component, ...]:
    if not wishes.servers:
        if wishes.server_command or wishes.server_field:
            raise ConfigError("--server-command and --server-field without --servers N: on how many nodes?")
        return ()
    if not wishes.server_command:
        raise ConfigError(f"--servers {wishes.servers} without --server-command: say what runs on them.")
    slurm = cluster.slurm
    named = {
        "time": wishes.time or slurm.time,
        "partition": wishes.partition or slurm.partition,
        "account": wishes.account or slurm.account,
        "qos": wishes.qos or slurm.qos,
        "constraint": slurm.constraint,
    }
    options = [f"--{name}={value}" for name, value in named.items() if value]
    return (
        Component(
            name="server",
            nodes=wishes.servers,
            command=wishes.server_command,
            sbatch=(*options, *sbatch_options(cluster, cluster.node.gpus)),
            program_words=(f"{wishes.server_field}={{hosts}}",) if wishes.server_field else (),
        ),
    )


def _name(program: str, run_dir: Path) -> str:
    """A name that squeue can show."""
    return re.sub(r"[^\w.-]+", "_", f"{program}-{run_dir.name}")
