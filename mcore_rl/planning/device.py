"""The devices of a plan: peaks, memory and links from data sheets, and the part of the peaks that training reaches.

The values of `Rates` are fitted to the 18 published runs of `python -m bench.plan`.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from mcore_rl.config.cluster import ClusterConfig, NodeConfig, RatesConfig
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
    source: str = "NVIDIA's data sheet"
    """Document that the numbers are from."""


_ROWS = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
DEVICES: dict[str, Device] = {
    name: Device(name=name, **row | ({"links": Links(*row["links"])} if "links" in row else {}))
    for name, row in _ROWS.items()
}
"""Every device by its name (the SXM module if there is one). Peaks are without sparsity."""


def known_device(cuda_name: str) -> Device | None:
    """Return the device with the longest name whose words are all in CUDA's name; None if unknown, or a MIG slice."""
    words = set(re.split(r"[\s-]+", cuda_name))
    fits = [name for name in DEVICES if set(name.split()) <= words]
    if not fits or "MIG" in words:
        return None
    # "H100 NVL" has the words of "H100" too.
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
    """Return the device of a cluster with its own domain and network; None if the cluster names none. Raises
    ConfigError if the name is unknown, or the node claims more memory than the device has.
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


GPUS = re.compile(r"(\d+)[x*](.+)")


@dataclass(frozen=True, slots=True)
class Gpus:
    """A number of GPUs of one kind, in nodes of eight, or in a single smaller node."""

    count: int
    device: str

    def __str__(self) -> str:
        """Return the text as users write it."""
        return f"{self.count} x {self.device}"

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.count // LARGEST_NODE)

    def cluster(self) -> ClusterConfig:
        """Return the cluster that has these GPUs, with all memory of the device and its usual network."""
        device = device_named(self.device, "--gpus")
        if device.memory_gib is None:
            raise ConfigError(
                f"--gpus {self.count}x{device.name}: the memory of this device is not known. Write a cluster's file "
                "with node.gpu_memory_gib, and give it to --cluster."
            )
        node = NodeConfig(gpus=min(self.count, LARGEST_NODE), device=device.name, gpu_memory_gib=device.memory_gib)
        return ClusterConfig(name=f"{self.count}x{device.name}", node=node)


def parse_gpus(text: str) -> Gpus:
    """Return the GPUs that `8xH100` names; raises ConfigError if it names none, or does not fill nodes of eight."""
    match = GPUS.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"--gpus {text}: wanted a number and a kind of GPU, as 8xH100.")
    count = int(match[1])
    if count > LARGEST_NODE and count % LARGEST_NODE:
        raise ConfigError(
            f"--gpus {text}: more than {LARGEST_NODE} GPUs are nodes of {LARGEST_NODE}. Give a multiple of "
            f"{LARGEST_NODE}, or a cluster's file (--cluster)."
        )
    return Gpus(count, device_named(match[2], "--gpus").name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Fractions of a peak, without unit, and seconds of the host."""

    products: float = 0.64
    """Fraction of the 16-bit peak that large matrix products reach."""
    products_fp8: float = 0.65
    """Fraction of the 8-bit peak that large matrix products reach, without the casts."""
    attention: float = 0.50
    """Fraction of the 16-bit peak that attention reaches forwards (FlashAttention 2 and 3)."""
    attention_backward: float = 0.42
    """Fraction of the 16-bit peak that attention reaches backwards."""
    latent: float = 0.85
    """Factor on both with latent attention, which has keys wider than its values."""
    hbm: float = 0.60
    """Fraction of the memory's bandwidth that kernels reach which only read and write."""
    link: float = 0.75
    """Fraction of the bandwidth inside a domain (NVLink) that collectives reach."""
    nic: float = 0.80
    """Fraction of the network's bandwidth that collectives reach."""
    host_layer_s: float = 4e-3
    """Seconds that the host takes to launch an MoE layer's forward pass; a dense layer takes half."""
    host_expert_s: float = 12e-6
    """Additional seconds for each expert of the rank."""
    host_fp8_s: float = 10e-6
    """Additional seconds for each expert with inputs cast to 8 bits."""
    host_memory_gbytes_per_s: float = 40.0
    """Each rank's share of the main memory's bandwidth in Adam, 10^9 bytes per second: a guess, an eighth of 320."""
    host_link_gbytes_per_s: float = 25.0
    """Bandwidth between a device and main memory, in 10^9 bytes per second: a guess (PCIe 4 x16 at 80 %)."""
    hidden: float = 0.50
    """Fraction of the experts' exchange that is hidden if it overlaps with another microbatch's computation."""
    fixed_s: float = 30e-3
    """Seconds of a step for norms of gradients, the loader, the log."""
    nic_latency_s: float = 12e-6
    """Seconds until a message arrives in another domain."""
    link_latency_s: float = 6e-6
    """Seconds until a message arrives inside a domain."""
    decode_step_s: float = 3e-3
    """Seconds of a step of decoding for the scheduler and for sampling."""
    decode_layer_s: float = 25e-6
    """Seconds of a server's layer in a step of decoding that no bandwidth explains (CUDA graphs)."""
    decode_layer_native_s: float = 5e-4
    """The same for the native engine, which launches some fifty kernels a layer from Python: a guess."""
    decode_message_s: float = 12e-6
    """Seconds of a small all-reduce inside a node."""
    imbalance: float | None = None
    """Tokens sent to the experts of the fullest rank, as a multiple of the mean; None if unknown."""
    imbalance_source: str = ""
    """Option or run that it is from."""
    source: str = ""
    """Run that they were calibrated with; empty: published runs."""
    rl_factors: dict[str, float] = field(default_factory=dict)
    """Measured / planned seconds of the parts of an RL step, if a run has been measured; empty: a lower bound."""


SENSITIVITIES: dict[str, dict[str, Any]] = {
    "free matrix products": {"products": inf, "products_fp8": inf},
    "free HBM": {"hbm": inf},
    "free NVLink": {"link": inf, "link_latency_s": 0.0},
    "a free network": {"nic": inf, "nic_latency_s": 0.0},
    "a free host": {"host_layer_s": 0.0, "host_expert_s": 0.0, "host_fp8_s": 0.0},
    "a free main memory": {"host_memory_gbytes_per_s": inf, "host_link_gbytes_per_s": inf},
    "free attention": {"attention": inf, "attention_backward": inf},
}
"""Terms that are removed from a step in turn, to find its limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A number with its uncertainty."""

    low: float
    likely: float
    high: float
    reason: str
    """Reason for its width."""


CALIBRATED = 1.2
"""Ratio: half of the error, as a logarithm, on published runs of a fitted family; a guess."""
KNOWN_FAMILIES = {"mixtral", "qwen3_moe", "deepseek_v3", "llama"}
"""Families of the published runs."""
KNOWN_DEVICES = {"H100", "H800", "B200", "GB200"}
"""Devices of the published runs."""


def rates_of(config: RatesConfig) -> Rates:
    """Return the rates of a cluster: its file's, else the rates of published runs."""
    rates = Rates()
    if config.host_layer_s is not None:
        rates = replace(rates, host_layer_s=config.host_layer_s)
    if config.speed != 1.0:
        scaled = ("products", "products_fp8", "attention", "attention_backward", "hbm", "link", "nic")
        rates = replace(rates, **{name: getattr(rates, name) * config.speed for name in scaled})
    if config.imbalance is not None:
        rates = replace(rates, imbalance=config.imbalance, imbalance_source=config.source or "[rates]")
    factors = {"rollout": config.rollout, "logprobs and values": config.logprobs, "updates": config.updates}
    known = {name: factor for name, factor in factors.items() if factor is not None}
    return replace(rates, rl_factors=known, source=config.source or "")


def span_of_step(
    seconds: float, family: str, device: str, rates: Rates | None = None, *, has_adapters: bool = False
) -> Span:
    """Return the range of a predicted step, by the error on published runs (bench/plan.py), which had no adapters."""
    lower, higher = 1.3, 1.3
    if rates is not None and rates.source:
        lower, higher = CALIBRATED, CALIBRATED
        reason = f"calibrated with {rates.source}: its own step is met, other meshes and lengths less exactly"
    elif family in KNOWN_FAMILIES and device in KNOWN_DEVICES and not has_adapters:
        reason = (
            "runs published with this family and kind of device lie within 1.3 times of such a prediction; "
            "users report up to 1.7 times more"
        )
    else:
        lower, higher = 1.65, 1.7
        of = f"adapters of {family}" if has_adapters else family
        reason = (
            f"no published run of {of} on {device} is in bench/plan.py; without its own family the prediction of a "
            "published run was up to 1.62 times off, and users report up to 1.7 times more"
        )
    return Span(low=seconds / lower, likely=seconds, high=higher * seconds, reason=reason)
