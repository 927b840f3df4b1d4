"""Plan of one job, checked, from a config, a cluster and the options of the command line."""

import difflib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_rl.checks.cluster import NAME, placement, why_reserved
from mcore_rl.checks.inputs import absent, absent_template, has_checkpoints, inputs_of
from mcore_rl.checks.programs import PROGRAMS, program_of
from mcore_rl.checks.run import refuse
from mcore_rl.config.cluster import ClusterConfig, ContainerConfig, NoContainer
from mcore_rl.config.describe import describe
from mcore_rl.config.load import dump_config
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.pipeline import ConversionStage
from mcore_rl.config.rl.rollout import ServedConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import Section
from mcore_rl.errors import ConfigError
from mcore_rl.launch import records, slurm
from mcore_rl.launch.job import JOB_SH, JobOptions, JobScript, Servers, environment_file, sbatch_options
from mcore_rl.launch.records import next_folder
from mcore_rl.planning.estimate import Estimate, estimate, place_of
from mcore_rl.planning.memory import GIB, disk_of, disk_warning
from mcore_rl.planning.search import search
from mcore_rl.planning.text import mesh_text, nearest_text, span_text
from mcore_rl.planning.training import Training, training_of
from mcore_rl.storage.folders import import_of, imports_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowances:
    """Problems that the user allows."""

    force: bool = False
    """Whether a memory estimate above the memory of a GPU is allowed."""
    tp_across_nodes: bool = False
    promised: frozenset[Path] = frozenset()
    """Paths that do not exist yet, because earlier jobs write them."""
    absent: bool = False
    """Whether missing inputs are warnings, not errors: another job writes them, or nothing will be submitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Result of the checks when nothing is wrong: lines and warnings for the user."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def check_training(config: RunConfig, cluster: ClusterConfig, nodes: int, allowances: Allowances) -> Checked:
    """Check a training on `nodes` nodes of `cluster`; ConfigError lists everything that is wrong."""
    config = config.decided(is_cuda=cluster.node.gpus > 0)
    per_node, run_dir = cluster.node.ranks_per_node, Path(config.run_dir)
    world = nodes * per_node
    try:
        program_of(config).check(config, world)
    except ConfigError as error:
        raise ConfigError(f"on {nodes} nodes of {per_node} ranks:\n{error}") from None
    placed = placement(config.model, config.mesh, per_node, world)
    plan = estimate(training_of(config, world), place_of(cluster))
    missing = [
        *_missing_inputs(config, cluster.container, allowances.promised),
        *absent_template(config),
        *_not_imported(config.checkpoint.load, config.model, run_dir.absolute()),
        *image_violations(cluster.container),
    ]
    too_large = [] if plan.fits else [_too_large(plan, cluster, nearest_text(search(config, world, plan.place)))]
    done_text = records.done(run_dir)
    redo = f'run_dir="{run_dir}": {done_text}. Delete its DONE and raise train.steps to train on, or choose another.'
    refuse(
        [
            *(() if allowances.tp_across_nodes else placed.refused),
            *(() if allowances.force else too_large),
            *(() if allowances.absent else missing),
            *folder_violations(run_dir),
            *([redo] if done_text else ()),
            *environment_file_violations(cluster, run_dir),
        ]
    )
    disk = disk_of(plan.training)
    of_a_gpu = f" of {cluster.node.gpu_memory_gib:g}" if cluster.node.gpus else ""
    warnings = [*placed.warnings, *(missing if allowances.absent else ())]
    if warning := disk_warning(run_dir, disk):
        warnings.append(warning)
    if allowances.tp_across_nodes:
        warnings += placed.refused
    if allowances.force:
        warnings += too_large
    return Checked(
        lines=(
            _layout(plan.training, nodes, per_node),
            f"memory, estimated: {plan.fullest.describe()}{of_a_gpu}",
            *([] if plan.step is None else [f"{plan.training.step_name}, estimated: {span_text(plan)}"]),
            f"disk, estimated: {disk.describe()}",
        ),
        warnings=tuple(warnings),
    )


def _not_imported(load: str | None, model: ModelConfig, run_dir: Path) -> Iterator[str]:
    # Ranks do not import a Hugging Face folder.
    if load is None or not Path(load).is_dir() or has_checkpoints(run_dir):
        return
    found = import_of(load, model, imports_folder(os.environ, run_dir))
    if found is not None and not found.is_complete:
        yield (
            f"checkpoint.load={load} is a Hugging Face folder, which is imported once, before jobs load it: "
            f"mcore-rl {shlex.join(found.command)}"
        )


def image_violations(container: NoContainer | ContainerConfig) -> Iterator[str]:
    """Yield a sentence when the container's image is a file that does not exist."""
    if isinstance(container, NoContainer):
        return
    image = container.image
    is_file = image.startswith(("/", "./", "../")) if container.kind == "pyxis" else "://" not in image
    if is_file and not Path(image).exists():
        yield f'container.image="{image}" does not exist. Make it (enroot import, apptainer build) or correct the path.'


def environment_file_violations(cluster: ClusterConfig, run_dir: Path) -> Iterator[str]:
    """Yield a sentence for each reason for which the file of keys is not safe, or cannot be read."""
    path = environment_file(cluster)
    if path is None:
        return
    name = f'environment_file="{path}"'
    try:
        mode = path.stat().st_mode
        if not path.is_file():
            raise OSError("it is a folder, pipe or device")  # which would wait for a writer forever
        # As the job's shell reads it: it takes the carriage return of a Windows line as part of the value.
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        yield f"{name} cannot be read: {error}. Make it, with one NAME=value in each line."
        return
    if mode & 0o077:
        yield f"{name} can be read by others (mode {mode & 0o777:o}). Take that away: chmod 600 {path}"
    if path.resolve().is_relative_to(run_dir.absolute().resolve()):
        yield f"{name} lies in the run's folder, which people copy and share. Move it, to your home for example."
    for number, line in enumerate(lines, start=1):
        variable, equals, _ = line.partition("=")
        if line and not line.startswith("#") and not (equals and NAME.fullmatch(variable)):
            # The line is not shown: it may hold a key.
            yield f"{name}: line {number} is not NAME=value. Correct it; a comment begins with #."
        elif {"\r", "\0"} & set(line):
            yield f"{name}: line {number} has a carriage return of Windows or a NUL. Take it out: tr -d '\\r\\000'."
        elif reason := why_reserved(variable):
            yield f"{name}: line {number} sets {variable}, which {reason}."


def folder_violations(run_dir: Path) -> Iterator[str]:
    """Yield a sentence for each reason for which a new job may not write to the folder of a run."""
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        yield f'run_dir="{run_dir}" cannot be written: {existing} is no folder that you may write to. Choose another.'
    yield from in_use_violations(run_dir)


def in_use_violations(run_dir: Path) -> Iterator[str]:
    """Yield a sentence for each job that waits or runs for the same folder: submitted for it, or named by its fence."""
    jobs = dict.fromkeys([entry.job for entry in records.submissions(run_dir)])
    if writer := records.writing_job(run_dir):
        jobs[writer] = None
    if not jobs or not slurm.has("squeue"):
        return
    try:
        alive = slurm.in_queue(list(jobs))
    except slurm.SlurmUnreachableError:
        return  # a job cannot be submitted either, and a dry run warns of it
    for job in jobs:
        if job in alive:
            yield (
                f'run_dir="{run_dir}" is in use by job {job}, which is {alive[job].describe()}. Wait for it, end it '
                f"(scancel {job}), or choose another run_dir."
            )


def _missing_inputs(
    config: RunConfig, container: NoContainer | ContainerConfig, promised: frozenset[Path]
) -> Iterator[str]:
    for name, path, what in inputs_of(config):
        whole = path.absolute()
        if path.exists() or not promised.isdisjoint((whole, *whole.parents)):
            if isinstance(container, ContainerConfig) and not _is_mounted(whole, container.mounts, config.run_dir):
                yield (
                    f"{name}: {whole} is outside the mounts of the container. Add it to container.mounts, as "
                    f'"{whole.parent}:{whole.parent}".'
                )
        else:
            yield absent(name, path, what)


def _is_mounted(path: Path, mounts: Sequence[str], run_dir: str) -> bool:
    # The container has a path under the same name, and the working and the run's folder.
    seen = [Path.cwd(), Path(run_dir).absolute()]
    for mount in mounts:
        source, _, rest = mount.partition(":")
        if rest.partition(":")[0] in ("", source):
            seen.append(Path(source))
    return any(path.is_relative_to(folder) for folder in seen)


def _too_large(plan: Estimate, cluster: ClusterConfig, near: str) -> str:
    node = cluster.node
    if not plan.fits_main_memory:
        return (
            f"{plan.fullest_node_bytes / GIB:,.0f} GiB would wait in a node's main memory, but {cluster.name} has "
            f"{plan.place.host_bytes / GIB:,.0f} (node.memory_gib). Use more nodes, offload less (optim."
            f"offload_fraction, replay.store), or submit it nevertheless (--force). {near}"
        )
    return (
        f"the estimate is {plan.fullest.describe()}, but a GPU of {cluster.name} has {plan.place.room_bytes / GIB:.0f} "
        f"GiB for it (node.gpu_memory_gib={node.gpu_memory_gib:g} - reserved_gib={node.reserved_gib:g}). Use more "
        "nodes (the optimizer is cut over data-parallel ranks), change the mesh or what is recomputed, or submit it "
        f"nevertheless (--force). {near}"
    )


def _layout(training: Training, nodes: int, per_node: int) -> str:
    dp, batch = training.replicas, training.global_batch
    if training.rollouts is not None:
        text = f"{training.rollouts.num_completions} completions per rollout, {batch} per update, dp {dp}"
    else:
        text = f"batch of {batch} = {dp} data-parallel ranks x micro-batch {training.micro_batch} x "
        text += str(batch // (training.micro_batch * dp))
    return f"{nodes} x {per_node} = {training.world_size} ranks: {mesh_text(training)}; {text}"


CHECK_FOLDER = "check"
FOUND = "found"
"""Folder within a launch's where its nodes write their findings."""
CHECK_TIME = "00:15:00"
"""Time limit of a check, in sbatch's format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A checked job that can be submitted."""

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
    return PlannedJob(folder=folder, job=job, files=files, checked=checked)


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
        arguments=("convert", *stage.arguments),
        run_dir=str(run_dir),
        is_training=False,
        starter="once",
        **_placement(cluster, options, folder, stage.gpus),
    )
    checked = Checked(lines=(conversion_text(stage),), warnings=warnings)
    return PlannedJob(folder=folder, job=job, files={"cluster.toml": dump_config(cluster)}, checked=checked)


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
    checked = Checked(lines=(f"mcore-rl doctor on {nodes} nodes",), warnings=warnings)
    return PlannedJob(folder=folder, job=job, files={"cluster.toml": dump_config(cluster)}, checked=checked)


def _refuse_unready(run_dir: Path, cluster: ClusterConfig, allowances: Allowances) -> tuple[str, ...]:
    """Raise ConfigError for what no job can run with, or return warnings of it where that is allowed."""
    absent = tuple(image_violations(cluster.container))
    unready = [*folder_violations(run_dir), *environment_file_violations(cluster, run_dir)]
    refuse(unready if allowances.absent else [*absent, *unready])
    return absent


def conversion_text(stage: ConversionStage) -> str:
    """Return the command of a conversion, which its job writes to DONE in the end."""
    return f"mcore-rl {shlex.join(('convert', *stage.arguments))}"


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
        if served.way == "files" and served.transport_dir is None:
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
