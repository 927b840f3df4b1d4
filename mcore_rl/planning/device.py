"""The table of devices: peaks, memory and links, from data sheets, for estimates of time and for `train/mfu`."""

import difflib
import re
from dataclasses import dataclass, replace

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.errors import ConfigError

LARGEST_NODE = 8
"""Largest number of GPUs in a node: a larger domain of links, as of an NVL72, joins nodes."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidths of a device and between devices, all in one direction."""

    hbm_gbytes_per_s: float
    """Bandwidth of the device's own memory, in 10^9 bytes per second."""
    link_gbytes_per_s: float
    """Bandwidth of a device within its domain (NVLink, Infinity Fabric), in 10^9 bytes per second."""
    domain: int
    """Number of devices that these links connect."""
    nic_gbit_per_s: float
    """Bandwidth of the network adapter that systems of this kind have for each device, in 10^9 bits per second."""
    num_multiprocessors: int
    """Number of units that take a tile of a matrix product each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A kind of GPU by its data sheet."""

    name: str
    peak_tflops: dict[str, float]
    """TFLOP/s of dense matrix products by number format: bf16, fp8, fp32 (without TF32)."""
    memory_gib: float | None = None
    """Memory in GiB: the data sheets' "GB" of HBM are GiB, of which a driver keeps about half a GiB."""
    links: Links | None = None
    """Bandwidths; None if only the peaks are in the table: memory and schedule are then planned, but not time."""
    source: str = ""
    """Document that the numbers are from."""


def _peaks(bf16: float | None, fp8: float | None, fp32: float) -> dict[str, float]:
    peaks = {"bf16": bf16, "fp8": fp8, "fp32": fp32}
    return {name: peak for name, peak in peaks.items() if peak is not None}


_ROWS = (
    # name, peaks, memory, (HBM, link, domain, NIC, multiprocessors), source
    ("A100", (312.0, None, 19.5), 80.0, (2039, 300, 8, 200, 108), "NVIDIA A100 80GB data sheet; DGX A100"),
    ("A800", (312.0, None, 19.5), 80.0, (2039, 200, 8, 200, 108), "NVIDIA A800 80GB data sheet"),
    ("H100", (989.4, 1978.9, 66.9), 80.0, (3350, 450, 8, 400, 132), "NVIDIA H100 data sheet; DGX H100"),
    ("H800", (989.4, 1978.9, 66.9), 80.0, (3350, 200, 8, 400, 132), "as H100, NVLink of arXiv 2412.19437"),
    ("H200", (989.4, 1978.9, 66.9), 141.0, (4800, 450, 8, 400, 132), "NVIDIA H200 data sheet; DGX H200"),
    ("B200", (2250.0, 4500.0, 75.0), 180.0, (7700, 900, 8, 400, 148), "NVIDIA DGX B200 data sheet"),
    ("GB200", (2500.0, 5000.0, 80.0), 186.0, (8000, 900, 72, 400, 152), "NVIDIA GB200 NVL72 data sheet"),
    ("GB300", (2500.0, 5000.0, 80.0), 279.0, (8000, 900, 72, 800, 152), "NVIDIA GB300 NVL72 data sheet"),
    ("MI300X", (1307.4, 2614.9, 163.4), 192.0, (5300, 448, 8, 400, 304), "AMD Instinct MI300X data sheet"),
)
_PEAKS_ONLY = (
    ("V100", (None, None, 15.7)),
    ("A10", (125.0, None, 31.2)),
    ("A10G", (70.0, None, 35.0)),
    ("A40", (149.7, None, 37.4)),
    ("RTX A6000", (154.8, None, 38.7)),
    ("L4", (121.0, 242.5, 30.3)),
    ("L40", (181.0, 362.0, 90.5)),
    ("L40S", (362.0, 733.0, 91.6)),
    ("RTX 3090", (71.0, None, 35.6)),
    ("RTX 4090", (165.2, 330.3, 82.6)),
    ("RTX 5090", (209.5, 419.0, 104.8)),
    ("H20", (148.0, 296.0, 44.0)),
    ("H100 PCIe", (756.5, 1513.0, 51.2)),
    ("H100 NVL", (835.5, 1671.0, 60.0)),
    ("H200 NVL", (835.5, 1671.0, 60.0)),
    ("GH200", (989.4, 1978.9, 66.9)),
    ("B300", (2250.0, 4500.0, 75.0)),
)

DEVICES: dict[str, Device] = {
    name: Device(name=name, peak_tflops=_peaks(*peaks), memory_gib=memory, links=Links(*links), source=source)
    for name, peaks, memory, links, source in _ROWS
} | {
    name: Device(name=name, peak_tflops=_peaks(*peaks), source="NVIDIA's data sheet")
    for name, peaks in _PEAKS_ONLY
}
"""Every device by its name, for which the SXM module is listed if any. Peaks are half of the data sheets' numbers "with
sparsity"."""


def known_device(cuda_name: str) -> Device | None:
    """Return the device that CUDA calls `name`: the longest entry with all of its words in the name.

    None if there is none, and for a MIG slice, which has only a part of the device.
    """
    words = set(re.split(r"[\s-]+", cuda_name))
    fits = [name for name in DEVICES if set(name.split()) <= words]
    if not fits or "MIG" in words:
        return None
    return DEVICES[max(fits, key=lambda name: len(name.split()))]


def device_named(name: str, field: str = "node.device") -> Device:
    """Return a device by its name in the table; ConfigError with the most similar names if there is none."""
    by_name = {known.casefold(): device for known, device in DEVICES.items()}
    if device := by_name.get(name.casefold()):
        return device
    near = difflib.get_close_matches(name.casefold(), by_name, n=2, cutoff=0.4)
    meant = f"Did you mean {' or '.join(by_name[name].name for name in near)}? " if near else ""
    raise ConfigError(
        f'{field}="{name}" is no known device. {meant}Known: {", ".join(DEVICES)}. Leave it out to plan memory and '
        "schedule without times."
    )


def device_of(cluster: ClusterConfig) -> Device | None:
    """Return the device of a cluster with its own domain and network; None if the cluster names none.

    Raises:
        ConfigError: If the name is unknown, or the node claims more memory than the device has.
    """
    node = cluster.node
    if node.device is None:
        return None
    device = device_named(node.device)
    if device.memory_gib is not None and node.gpu_memory_gib > device.memory_gib:
        raise ConfigError(
            f'node.gpu_memory_gib={node.gpu_memory_gib:g} is more than node.device="{device.name}" has '
            f"({device.memory_gib:g} GiB, {device.source}). Correct one of them."
        )
    links = device.links
    if links is None:
        return device
    # The links of an NVL72 join nodes; those of other devices end at the node.
    in_node = links.domain if links.domain > LARGEST_NODE else min(links.domain, node.gpus)
    return replace(
        device,
        links=replace(
            links,
            domain=in_node if node.link_domain == "auto" else node.link_domain,
            nic_gbit_per_s=links.nic_gbit_per_s if node.nic_gbit_per_s == "auto" else node.nic_gbit_per_s,
        ),
    )
