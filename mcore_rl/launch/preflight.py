"""Checks of a job before it is submitted."""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.checks.cluster import NAME, placement, why_reserved
from mcore_rl.checks.inputs import absent, has_checkpoints, inputs_of
from mcore_rl.checks.programs import program_of
from mcore_rl.checks.run import refuse
from mcore_rl.config.cluster import ClusterConfig, ContainerConfig, NoContainer
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.launch import records, slurm
from mcore_rl.launch.job import environment_file
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
    """Whether tensor-parallel groups across nodes are allowed."""
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
        *_missing_inputs(inputs_of(config), run_dir, cluster.container, allowances),
        *_not_imported(config.checkpoint.load, config.model, run_dir.absolute()),
        *image_violations(cluster.container),
    ]
    too_large = [] if plan.fits else [_too_large(plan, cluster, nearest_text(search(config, world, plan.place)))]
    refuse(
        [
            *(() if allowances.tp_across_nodes else placed.refused),
            *(() if allowances.force else too_large),
            *(() if allowances.absent else missing),
            *folder_violations(run_dir),
            *_done_violations(run_dir),
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


def _done_violations(run_dir: Path) -> Iterator[str]:
    if done_text := records.done(run_dir):
        yield f'run_dir="{run_dir}": {done_text}. Delete its DONE and raise train.steps to train on, or choose another.'


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
    inputs: Iterable[tuple[str, Path, str]],
    run_dir: Path,
    container: NoContainer | ContainerConfig,
    allowances: Allowances,
) -> Iterator[str]:
    for name, path, what in inputs:
        whole = path.absolute()
        if path.exists() or not allowances.promised.isdisjoint((whole, *whole.parents)):
            if isinstance(container, ContainerConfig) and not _is_mounted(whole, container.mounts, run_dir):
                yield (
                    f"{name}: {whole} is outside the mounts of the container. Add it to container.mounts, as "
                    f'"{whole.parent}:{whole.parent}".'
                )
        else:
            yield absent(name, path, what)


def _is_mounted(path: Path, mounts: Sequence[str], run_dir: Path) -> bool:
    # The container has a path under the same name, and the working and the run's folder.
    seen = [Path.cwd(), run_dir.absolute()]
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
