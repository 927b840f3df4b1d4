"""Findings of `mcore-rl doctor` on the nodes of a job: equal nodes are reported once, and differences by name."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.storage.files import write_atomically

REPORT = "report.txt"
"""File of the first node's report on all nodes."""
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
    """Return the report on all nodes.

    Args:
        found: Findings by host.
        lines: Lines of `mcore-rl doctor` about each host.
        num_nodes: Number of nodes that were asked.
    """
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
    """Yield a line for each finding that differs between nodes: its values, the most frequent first, with their
    hosts.
    """
    values = {host: dict(comparable(findings)) for host, findings in found.items()}
    for name in dict.fromkeys(name for of_host in values.values() for name in of_host):
        hosts_of: dict[str, list[str]] = {}
        for host, of_host in values.items():
            hosts_of.setdefault(str(of_host.get(name, "not there")), []).append(host)
        if len(hosts_of) == 1 or (name.endswith("memory_gib") and _is_alike(list(hosts_of))):
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


def _is_alike(values: Sequence[str]) -> bool:
    """Return whether all values are sizes that differ by no more than MEMORY_PART."""
    if "not there" in values:
        return False
    sizes = [float(value) for value in values]
    return max(sizes) - min(sizes) <= MEMORY_PART * max(sizes)
