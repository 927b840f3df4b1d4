"""The part of a data sheet's peak that training reaches, and the host's cost: fitted to published runs.

The values are the best predictions of the 18 published runs of `python -m bench.plan`. They belong to the software of
those runs. The speed of a new run depends most on `host_layer_s`.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from mcore_rl.config.cluster import RatesConfig


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
    """Seconds that the host takes to launch the forward pass of an MoE layer; a faster device waits for it. A dense
    layer takes half. CUDA graphs and fused kernels lower it."""
    host_expert_s: float = 12e-6
    """Additional seconds for each expert of the rank."""
    host_fp8_s: float = 10e-6
    """Additional seconds for each expert with inputs cast to 8 bits."""
    host_memory_gbytes_per_s: float = 40.0
    """Share of the main memory's bandwidth that each rank's Adam reaches on the CPU, in 10^9 bytes per second: a guess
    (an eighth of 320 on a node with two CPUs), found in no published run."""
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
"""Width of the range of calibrated predictions, as a ratio: half of the error, as a logarithm, on published runs of a
family that the rates were fitted to; a guess."""
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
    """Return the range of a predicted step. Its width is the error on published runs (bench/plan.py), by ratio; no
    published run trains low-rank adapters.
    """
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
