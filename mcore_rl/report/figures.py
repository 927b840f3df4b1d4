"""What is drawn of which metrics, and in which order: a page's figures as a table."""

from dataclasses import dataclass
from typing import Literal

Style = Literal["solid", "dash", "dots"]


@dataclass(frozen=True, slots=True)
class Line:
    """A metric in a figure. A name with `*` stands for all that fit, each a line of its own."""

    metric: str
    label: str = ""
    style: Style = "solid"
    spread: str = ""
    """Metric that is added and subtracted: a band around the line."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Lines over steps, of all runs of a stage; left out where no run has them."""

    title: str
    lines: tuple[Line, ...]
    zero: bool = False
    """The axis reaches down to 0."""
    if_any: bool = False
    """Left out, too, where everything is 0."""
    smooth: bool = True
    """Drawn as a mean over neighbours, where the reader likes that; false: every value counts, or none is noisy."""
    note: str = ""
    """Below the title; empty: what METRICS says of the first metric."""


@dataclass(frozen=True, slots=True)
class Band:
    """The space between two metrics."""

    title: str
    low: str
    high: str
    note: str


LEARNING: tuple[Figure | Band, ...] = (
    Figure(
        "Right answers, held-out prompts",
        (Line("eval/accuracy", "one answer"), Line("eval/pass_at_*", "pass@{}", "dash")),
        zero=True,
    ),
    Figure("Reward", (Line("reward/mean", spread="reward/group_std"),)),
    Figure("Right answers, training prompts", (Line("reward/accuracy"),), zero=True),
    Figure(
        "Parts of the reward",
        (Line("reward/part/*", "{}"),),
        note="Each part before its weight, mean over completions.",
    ),
    Figure(
        "Loss",
        (
            Line("train/loss_nats", "training"),
            Line("eval/loss_nats", "held out", "dots"),
            Line("test/loss_nats", "test", "dots"),
        ),
    ),
    Figure("Loss of multi-token prediction", (Line("mtp/loss_nats"),)),
    Figure("Entropy of the policy", (Line("policy/entropy_nats"),), zero=True),
    Figure("KL to the old policy", (Line("policy/kl_old_nats"),), zero=True),
    Figure("KL to the reference", (Line("policy/kl_reference_nats"),), zero=True),
    Figure(
        "Clipped tokens",
        (Line("policy/clip_ratio_high", "high"), Line("policy/clip_ratio_low", "low", "dash")),
        zero=True,
        if_any=True,
        note="Tokens whose ratio was clipped, from above and from below.",
    ),
    Figure(
        "Clipped sequences",
        (
            Line("policy/clip_ratio_high_sequences", "high"),
            Line("policy/clip_ratio_low_sequences", "low", "dash"),
        ),
        zero=True,
        if_any=True,
        note="Sequences with such a token.",
    ),
    Figure("Ratio to the old policy, mean", (Line("policy/ratio_mean"),)),
    Figure("Ratio to the old policy, variance", (Line("policy/ratio_variance"),), zero=True),
    Band(
        "Log ratio, least to largest",
        "policy/log_ratio_min",
        "policy/log_ratio_max",
        "Of policy to old policy: the token that lost most, and the one that gained most.",
    ),
    Figure("Policy loss", (Line("policy/loss"),)),
    Figure("Gradient norm", (Line("train/grad_norm"),), zero=True),
    Figure("Learning rate", (Line("train/lr"),), zero=True, smooth=False, note="Of each step."),
    Figure(
        "Length of completions",
        (
            Line("rollout/completion_tokens", "mean"),
            Line("rollout/longest_completion_tokens", "longest", "dash"),
        ),
        zero=True,
    ),
    Figure(
        "Truncated completions", (Line("rollout/truncated_fraction"),), zero=True, if_any=True, smooth=False
    ),
    Figure("Groups without signal", (Line("reward/groups_without_signal_fraction"),), zero=True, if_any=True),
    Figure(
        "KL from engine to trainer", (Line("rollout/mismatch_kl_nats"),), zero=True, if_any=True, smooth=False
    ),
    Figure(
        "Largest difference of engine's logprobs",
        (Line("rollout/mismatch_max"),),
        zero=True,
        if_any=True,
        smooth=False,
    ),
)

EXPERTS: tuple[Figure | Band, ...] = (
    Figure("Busiest expert over the mean", (Line("moe/load_max_over_mean"),)),
    Figure("Evenness of the load (entropy, 1 is even)", (Line("moe/load_entropy"),)),
    Figure("Balance loss (1 is even)", (Line("moe/aux_loss"),), if_any=True),
    Figure("Router z-loss", (Line("moe/z_loss"),), if_any=True),
    Figure("Dropped choices", (Line("moe/dropped_fraction"),), zero=True, if_any=True, smooth=False),
    Figure(
        "Routes that changed since the rollout",
        (
            Line("routes/changed_fraction", "routes"),
            Line("routes/changed_tokens_fraction", "tokens", "dash"),
        ),
        zero=True,
    ),
    Figure("Gate mass on changed routes", (Line("routes/gate_mass_moved"),), zero=True),
    Figure(
        "Routes unlike the engine's",
        (
            Line("rollout_routes/changed_fraction", "routes"),
            Line("rollout_routes/changed_tokens_fraction", "tokens", "dash"),
        ),
        zero=True,
    ),
    Figure("Routes held for replay", (Line("routes/cached_bytes"),), zero=True, if_any=True, smooth=False),
)

SPEED: tuple[Figure | Band, ...] = (
    Figure("Trained tokens per second and rank", (Line("train/tokens_per_s_per_rank"),), zero=True),
    Figure("Generated tokens per second and replica", (Line("rollout/tokens_per_s_per_replica"),), zero=True),
    Figure("Model FLOP/s of a rank over its peak (MFU)", (Line("train/mfu"),), zero=True),
    Figure("Seconds of a rollout batch", (Line("rl/step_s"),), zero=True),
    Figure("Seconds of an optimizer step", (Line("train/step_s"),), zero=True),
    Figure(
        "Main memory of rank 0",
        (
            Line("memory/resident_bytes", "now"),
            Line("memory/peak_resident_bytes", "peak", "dash"),
        ),
        zero=True,
        smooth=False,
    ),
    Figure(
        "Device memory of rank 0",
        (
            Line("memory/device_bytes", "in tensors"),
            Line("memory/peak_device_bytes", "peak", "dash"),
            Line("memory/device_reserved_bytes", "reserved", "dots"),
        ),
        zero=True,
        if_any=True,
        smooth=False,
    ),
    Figure(
        "Saving checkpoints",
        (
            Line("checkpoint/save_s", "whole save", "dots"),
            Line("checkpoint/blocking_s", "training waited", "dots"),
        ),
        zero=True,
    ),
)

LAYER_MAPS: dict[str, tuple[str, str]] = {
    "moe/layer_NN/load_max_over_mean": (
        "Busiest expert by layer",
        "Tokens of the layer's busiest expert over its mean expert, at every step that was told.",
    ),
    "routes/layer_NN/changed_fraction": (
        "Routes changed, by layer",
        "Share of a layer's routes (token, slot) that are not those of the rollout's policy.",
    ),
    "rollout_routes/layer_NN/changed_fraction": (
        "Routes unlike the engine's, by layer",
        "Share of a layer's routes (token, slot) that are not those of the rollout engine.",
    ),
}
"""Metrics of layers that are drawn as a map of layer x step: name -> title, note."""
