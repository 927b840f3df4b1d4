"""Checks that a cluster's settings are compatible, and that a mesh fits well on its nodes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mcore_rl.checks.run import refuse
from mcore_rl.config.cluster import ClusterConfig, ContainerConfig, NoContainer, NodeConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig

TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = {
    "*_proxy MCORE_RL_CACHE": "",
    "[a-z]*": "begins with a small letter, as the job script's own variables do. Take it out",
    "PYTHONPATH": "would hide the job's copy of the code. Add to it in python.setup: "
    '"export PYTHONPATH=$PYTHONPATH:/shared/rewards"',
    "PYTHONHOME PYTHONSAFEPATH PYTHONUSERBASE PYTHONPLATLIBDIR": "would change what Python imports. Take it out",
    "PATH LD_PRELOAD LD_AUDIT": "would change srun and the job's other commands. Export it in python.setup",
    "BASH* ENV SHELLOPTS IFS SECONDS RANDOM UID EUID PPID": "is the job script's shell's. Take it out",
    "SLURM* SRUN_* SBATCH_*": "is Slurm's. Take it out, and set a field of [slurm], as slurm.options",
    "TMPDIR": "is set by the job. Set paths.scratch",
    "TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR": "is set by the job. Set paths.cache",
    "MASTER_* NUM_NODES RANK *_RANK WORLD_SIZE *_WORLD_SIZE TORCHELASTIC_* MCORE_RL_* SERVER_HOSTS SERVER_PORT "
    "SERVER_URLS": "is set by the job. Take it out",
}
"""Patterns of names of environment variables, and why a cluster may not set them; the first that matches counts."""


def check_cluster(cluster: ClusterConfig) -> None:
    """Raise a ConfigError that lists everything wrong with a cluster file, if anything is."""
    refuse(
        [
            *_node(cluster.node),
            *_container(cluster.container),
            *_slurm(cluster),
            *_environment(cluster.environment),
        ]
    )


def seconds_of(time: str) -> int | None:
    """Return the seconds of a time limit as Slurm reads it, None if it is not a time limit.

    The forms are minutes[:seconds], hours:minutes:seconds and days-hours[:minutes[:seconds]].
    """
    match = TIME.fullmatch(time)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _node(node: NodeConfig) -> Iterator[str]:
    if node.gpus and node.ranks:
        yield (
            f"node.gpus={node.gpus} and node.ranks={node.ranks}: with GPUs there is one rank on each. Set node.ranks "
            'to "none".'
        )
    if not node.ranks_per_node:
        yield 'node.gpus=0 and node.ranks="none": no rank would be started. Set one of them.'
    if node.gpus and node.reserved_gib >= node.gpu_memory_gib:
        yield (
            f"node.reserved_gib={node.reserved_gib} leaves nothing of node.gpu_memory_gib={node.gpu_memory_gib}. "
            "Lower it."
        )


def _container(container: NoContainer | ContainerConfig) -> Iterator[str]:
    if isinstance(container, NoContainer):
        return
    for mount in container.mounts:
        if not all(part.startswith("/") for part in mount.split(":")[:2]):
            yield f'container.mounts names "{mount}". Write /from:/to, or /both.'
    if container.kind == "apptainer" and "--cleanenv" in container.options:
        yield (
            'container.options names "--cleanenv": ranks would not hear of Slurm, of the first host, of their '
            "environment. Take it out."
        )


def _slurm(cluster: ClusterConfig) -> Iterator[str]:
    slurm, ahead_s = cluster.slurm, cluster.survival.signal_s
    limit_s = seconds_of(slurm.time)
    if not limit_s:
        yield f'slurm.time="{slurm.time}" is no duration. Write 12:00:00 (hours) or 2-00:00:00 (days).'
    elif ahead_s >= limit_s:
        yield (
            f"survival.signal_s={ahead_s} is not ahead of a limit of {limit_s} s (slurm.time={slurm.time}): the run "
            "would be asked to save before it began. Lower it."
        )
    for option in slurm.options:
        if not option.startswith("-") or "\n" in option:
            yield f'slurm.options names "{option}". Write an option of sbatch, as "--comment=moe".'


def _environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if not NAME.fullmatch(name):
            yield f'environment names "{name}", which is no name of a variable. Use letters, digits and _.'
        if "\n" in value:
            yield f"environment.{name} has several lines. Use one."
        if reason := why_reserved(name):
            yield f"environment.{name} {reason}."


def why_reserved(name: str) -> str:
    """Return why a cluster may not set the environment variable `name`, with the remedy; empty if it may."""
    whys = (why for names, why in RESERVED.items() if any(fnmatchcase(name, one) for one in names.split()))
    return next(whys, "")


@dataclass(frozen=True, slots=True)
class Placement:
    """Faults of a mesh on nodes: those that refuse it, and those that cost speed."""

    refused: tuple[str, ...]
    warnings: tuple[str, ...]


def placement(model: ModelConfig, mesh: MeshConfig, ranks_per_node: int, world_size: int) -> Placement:
    """Find groups of neighbouring ranks that cross nodes: tensor parallelism must not, other kinds should not.

    Megatron numbers ranks tp first, then cp, dp, pp; for experts etp first, then ep.
    """
    refused, warnings = [], []
    for name, size in (("mesh.tp", mesh.tp), ("mesh.etp", mesh.etp if model.is_moe else 1)):
        if _crosses(size, ranks_per_node, world_size):
            refused.append(
                f"{name}={size} does not lie inside a node of {ranks_per_node} ranks: its all-reduces, several a "
                f"layer, would go over the network. Set {name} to a divisor of {ranks_per_node}, or allow it "
                "(--allow-tp-across-nodes)."
            )
    if model.is_moe and not refused and _crosses(mesh.etp * mesh.ep, ranks_per_node, world_size):
        advice = "" if model.moe.is_flex else '; model.moe.dispatcher="deepep" is made for that'
        warnings.append(
            f"mesh.ep={mesh.ep} (x etp={mesh.etp}) goes over nodes of {ranks_per_node} ranks: tokens travel over the "
            f"network in every MoE layer{advice}."
        )
    if not refused and _crosses(mesh.tp * mesh.cp, ranks_per_node, world_size) and mesh.cp > 1:
        warnings.append(
            f"mesh.cp={mesh.cp} (x tp={mesh.tp}) goes over nodes of {ranks_per_node} ranks: keys and values travel "
            "over the network in every layer."
        )
    return Placement(tuple(refused), tuple(warnings))


def _crosses(group: int, ranks_per_node: int, world_size: int) -> bool:
    """Return whether any group of this many neighbouring ranks has ranks on two nodes."""
    return world_size > ranks_per_node and ranks_per_node % group != 0
