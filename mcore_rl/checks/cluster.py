"""Checks that a cluster's settings are compatible, and that a mesh fits well on its nodes."""

import json
import re
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mcore_rl.checks.run import refuse
from mcore_rl.config.cluster import ClusterConfig, ContainerConfig, SlurmConfig
from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.storage.files import write_atomically

REPORT = "report.txt"
SOUND, FAULTY = "nothing is broken", "faulty"
"""Last lines of a report."""
ANSWER_S = 300.0
"""Seconds within which every node must have answered."""
POLL_S = 0.5
MEMORY_PART = 0.02
"""Relative difference in memory size that is ignored: firmware reserves more on some nodes."""

Findings = Mapping[str, Any]
"""Findings of a node, as `mcore_rl.cli.doctor.examine` returns them."""


def answer(folder: Path, host: str, found: Findings) -> None:
    """Write the findings of a node for the first node to read."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{host}.json", json.dumps(found))


def answers(folder: Path, num_nodes: int, wait_s: float = ANSWER_S) -> dict[str, Findings]:
    """Return the findings by host, in order, once all nodes have answered or the time is over."""
    until = time.monotonic() + wait_s
    while len(files := sorted(folder.glob("*.json"))) < num_nodes and time.monotonic() < until:
        time.sleep(POLL_S)
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def report(found: Mapping[str, Findings], lines: Mapping[str, Sequence[str]], num_nodes: int) -> list[str]:
    """Return the report on `num_nodes` nodes: findings, and lines of `mcore-rl doctor`, by host."""
    text: list[str] = []
    first_of: dict[str, list[str]] = {}
    for host, findings in found.items():
        first_of.setdefault(json.dumps(dict(comparable(findings))), []).append(host)
    for hosts in first_of.values():
        text += [f"{', '.join(hosts)}:", *(f"  {line}" for line in lines[hosts[0]][:-1])]
    faults = [f"{host}: {fault}" for host, findings in found.items() for fault in findings["faults"]]
    if len(found) < num_nodes:
        faults.append(
            f"{len(found)} of {num_nodes} nodes have answered: {', '.join(found) or 'none'}; the job's log says why"
        )
    different = list(differences(found))
    text += [f"DIFFERS    {line}" for line in different] + [f"FAULT      {line}" for line in faults]
    return [*text, FAULTY if faults or different else SOUND]


def differences(found: Mapping[str, Findings]) -> Iterator[str]:
    """Yield a line for each finding that differs: its values, the most frequent first, with hosts."""
    values = {host: dict(comparable(findings)) for host, findings in found.items()}
    for name in dict.fromkeys(name for of_host in values.values() for name in of_host):
        hosts_of: dict[str, list[str]] = {}
        for host, of_host in values.items():
            hosts_of.setdefault(str(of_host.get(name, "not there")), []).append(host)
        sizes = [*map(float, hosts_of)] if name.endswith("memory_gib") and "not there" not in hosts_of else []
        if len(hosts_of) == 1 or (sizes and max(sizes) - min(sizes) <= MEMORY_PART * max(sizes)):
            continue
        ordered = sorted(hosts_of.items(), key=lambda entry: -len(entry[1]))
        yield f"{name}: " + "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in ordered)


def comparable(findings: Findings) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each finding that should be the same on all nodes, unlike free memory."""
    yield "number of GPUs", len(findings["devices"])
    for index, device in enumerate(findings["devices"]):
        for name in ("name", "capability", "memory_gib"):
            yield f"GPU {index} {name}", device[name]
    for topic in ("versions", "kernels", "communication", "limits"):
        for name, value in findings[topic].items():
            if isinstance(value, Mapping):
                yield from ((f"{topic} {name} {key}", entry) for key, entry in value.items())
            else:
                yield f"{topic} {name}", value
    for name in ("layers", "adam"):
        yield name, findings[name]
    if findings["cpu"]:
        yield "compiled layers of the CPU", findings["cpu"]["build"] or "none"


TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TABLE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("cluster.toml").read_text(encoding="utf-8"))
RESERVED = _TABLE["reserved"]
"""Patterns of names of environment variables, and why a cluster may not set them; the first that matches counts."""
OPTION = re.compile(r"(--[a-z][\w-]*|-\w)[= ]*(.*)")
"""An option of sbatch: its long or short name, and its value."""
SET_BY_LAUNCH = _TABLE["set_by_launch"]
"""Options of sbatch, some by the name of their SBATCH_ variable, and what sets them in a launch."""


def check_cluster(cluster: ClusterConfig) -> None:
    """Raise a ConfigError that lists everything wrong with a cluster file, if anything is."""
    refuse(list(_violations(cluster)))


def seconds_of(time: str) -> int | None:
    """Return the seconds of a time limit of Slurm, M[:S], H:M:S or D-H[:M[:S]]; None if it is none."""
    match = TIME.fullmatch(time)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    # Without days one number is minutes, and two are minutes and seconds; with days the first is hours.
    if days is None and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _violations(cluster: ClusterConfig) -> Iterator[str]:
    node, container, slurm, ahead_s = cluster.node, cluster.container, cluster.slurm, cluster.survival.signal_s
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
    for mount in container.mounts if isinstance(container, ContainerConfig) else ():
        if not all(part.startswith("/") for part in mount.split(":")[:2]):
            yield f'container.mounts names "{mount}". Write /from:/to, or /both.'
    if isinstance(container, ContainerConfig) and container.kind == "apptainer" and "--cleanenv" in container.options:
        yield (
            'container.options names "--cleanenv": ranks would not hear of Slurm, of the first host, of their '
            "environment. Take it out."
        )
    limit_s = seconds_of(slurm.time)
    if not limit_s:
        yield f'slurm.time="{slurm.time}" is no duration. Write 12:00:00 (hours) or 2-00:00:00 (days).'
    elif ahead_s >= limit_s:
        yield (
            f"survival.signal_s={ahead_s} is not ahead of a limit of {limit_s} s (slurm.time={slurm.time}): the run "
            "would be asked to save before it began. Lower it."
        )
    for option in slurm.options:
        match = OPTION.fullmatch(option)
        if match is None:
            yield f'slurm.options names "{option}". Write an option of sbatch, as "--comment=moe".'
        elif by := set_by_launch(match[1], match[2], slurm):
            yield f'slurm.options names "{option}", which `mcore-rl launch` sets itself, by {by}. Take it out.'
    for name, value in cluster.environment.items():
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


def set_by_launch(name: str, value: str, slurm: SlurmConfig) -> str:
    """Return what sets an option of sbatch in a launch; empty for one that contradicts nothing that a launch writes."""
    # sbatch takes a long name by any beginning that no other option has.
    rows = ((names.split(), by) for names, by in SET_BY_LAUNCH.items())
    names, by = next((row for row in rows if any(one.startswith(name) for one in row[0])), ([""], ""))
    is_in_addition = {
        "--export": value.startswith("ALL"),
        "--distribution": value.startswith(("block", "*")),
        "--exclusive": not slurm.exclusive and (value or name != "--exclusive"),
        "--gpus": slurm.gpus_by == "none" or (name == "--gres" and slurm.gpus_by != "gres" and "gpu" not in value),
    }
    return "" if is_in_addition.get(names[0]) else by


@dataclass(frozen=True, slots=True)
class Placement:
    """Faults of a mesh on nodes: those that refuse it, and those that cost speed."""

    refused: tuple[str, ...]
    warnings: tuple[str, ...]


def placement(model: ModelConfig, mesh: MeshConfig, ranks_per_node: int, world_size: int) -> Placement:
    """Find groups of neighbouring ranks that cross nodes, in Megatron's order tp, cp, dp, pp (etp, ep)."""
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
    return world_size > ranks_per_node and ranks_per_node % group != 0
