"""Table of the figures of a page: which metrics they draw, and in which order."""

from dataclasses import dataclass
from typing import Literal

Style = Literal["solid", "dash", "dots"]


@dataclass(frozen=True, slots=True)
class Line:
    """A metric in a figure; a name with `*` stands for all metrics that match, each a line of its own."""

    metric: str
    label: str = ""
    style: Style = "solid"
    spread: str = ""
    """Metric that is added and subtracted, as a band around the line."""
    share: bool = False
    """Whether it is a share of 1 that is drawn on an axis of its own, at the right."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Lines over steps, for all runs of a stage; the figure is left out when no run has them."""

    title: str
    lines: tuple[Line, ...]
    zero: bool = False
    """Whether the axis reaches down to 0."""
    if_any: bool = False
    """Whether the figure is also left out when all values are 0."""
    smooth: bool = True
    """Whether the reader's choice of smoothing applies; false where every value matters or none is noisy."""
    needs_shares: bool = False
    """Whether a run without both a share and another line has no part in the figure."""
    note: str = ""
    """Text below the title; empty: the text of the first metric in METRICS."""


@dataclass(frozen=True, slots=True)
class Band:
    """A figure of the area between two metrics."""

    title: str
    low: str
    high: str
    note: str


LEARNING: tuple[Figure | Band, ...] = (
    Figure(
        "Accuracy, held-out prompts",
        (Line("eval/accuracy", "one answer"), Line("eval/pass_at_*", "pass@{}", "dash")),
        zero=True,
    ),
    Figure("Reward", (Line("reward/mean", spread="reward/group_std"),)),
    Figure(
        "Accuracy, training prompts",
        (Line("reward/accuracy"),),
        zero=True,
        note="Completions sampled for training, at rl.rollout.temperature, of which the first part of the reward is 1 "
        "or more; not to be compared with held-out prompts.",
    ),
    Figure(
        "Parts of the reward",
        (Line("reward/part/*", "{}"),),
        note="Each part before its weight, mean over completions.",
    ),
    Figure(
        "Rewards from models and accuracy",
        (
            Line("reward/part/model:*", "model {}"),
            Line("reward/part/step_model:*", "steps {}"),
            Line("reward/part/judge:*", "judge {}"),
            Line("reward/part/http*", "http{}"),
            Line("reward/accuracy", "accuracy, right axis", "dash", share=True),
        ),
        needs_shares=True,
        note="What a model or a server thinks of the completions, before its weight, and how many are correct by "
        "rl.reward.correct. A reward that rises while the accuracy falls is being hacked.",
    ),
    Figure(
        "Accuracy on pairs",
        (Line("pairs/accuracy", "training"), Line("eval/pairs/accuracy", "held out", "dots")),
        zero=True,
    ),
    Figure("Loss of a pair", (Line("pairs/loss", "training"), Line("eval/pairs/loss", "held out", "dots"))),
    Figure(
        "Rewards of answers", (Line("pairs/chosen_reward", "chosen"), Line("pairs/rejected_reward", "rejected", "dash"))
    ),
    Figure(
        "Logprobs of answers",
        (Line("pairs/chosen_logprob", "chosen"), Line("pairs/rejected_logprob", "rejected", "dash")),
        note="Logprob of a whole answer. With DPO both may fall while their difference grows; dpo.nll_coeff keeps the "
        "chosen one up.",
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
    Figure("KL coefficient", (Line("kl/coeff"),), zero=True, smooth=False),
    Figure("KL to the teacher", (Line("teacher/kl_nats"),), zero=True),
    Figure("Loss of the texts mixed in", (Line("ptx/loss_nats"),)),
    Figure(
        "Clipped tokens",
        (Line("policy/clip_ratio_high", "high"), Line("policy/clip_ratio_low", "low", "dash")),
        zero=True,
        if_any=True,
        note="Tokens whose ratio was clipped, from above and from below.",
    ),
    Figure(
        "Clipped sequences",
        (Line("policy/clip_ratio_high_sequences", "high"), Line("policy/clip_ratio_low_sequences", "low", "dash")),
        zero=True,
        if_any=True,
        note="Sequences with a token whose ratio was clipped.",
    ),
    Figure("Ratio to the old policy, mean", (Line("policy/ratio_mean"),)),
    Figure("Ratio to the old policy, variance", (Line("policy/ratio_variance"),), zero=True),
    Band(
        "Log ratio, smallest to largest",
        "policy/log_ratio_min",
        "policy/log_ratio_max",
        "Log of policy / old policy for the token that lost most and the one that gained most.",
    ),
    Figure("Policy loss", (Line("policy/loss"),)),
    Figure("Gradient norm", (Line("train/grad_norm"),), zero=True),
    Figure("Learning rate", (Line("train/lr"),), zero=True, smooth=False, note="Learning rate of each step."),
    Figure(
        "Length of completions",
        (Line("rollout/completion_tokens", "mean"), Line("rollout/longest_completion_tokens", "longest", "dash")),
        zero=True,
    ),
    Figure("Truncated completions", (Line("rollout/truncated_fraction"),), zero=True, if_any=True, smooth=False),
    Figure("Groups without signal", (Line("reward/groups_without_signal_fraction"),), zero=True, if_any=True),
    Figure("Rollout-training mismatch (KL)", (Line("rollout/mismatch_kl_nats"),), zero=True, if_any=True, smooth=False),
    Figure(
        "Rollout-training mismatch (largest difference of logprobs)",
        (Line("rollout/mismatch_max"),),
        zero=True,
        if_any=True,
        smooth=False,
    ),
)

EXPERTS: tuple[Figure | Band, ...] = (
    Figure("Busiest expert over the mean", (Line("moe/load_max_over_mean"),)),
    Figure("Entropy of the load (1 is even)", (Line("moe/load_entropy"),)),
    Figure("Balance loss (1 is even)", (Line("moe/aux_loss"),), if_any=True),
    Figure("Router z-loss", (Line("moe/z_loss"),), if_any=True),
    Figure("Dropped choices", (Line("moe/dropped_fraction"),), zero=True, if_any=True, smooth=False),
    Figure(
        "Routes that differ from the replayed ones",
        (Line("routes/changed_fraction", "routes"), Line("routes/changed_tokens_fraction", "tokens", "dash")),
        zero=True,
    ),
    Figure("Gate mass on changed routes", (Line("routes/gate_mass_moved"),), zero=True),
    Figure(
        "Routes that differ from the engine's",
        (
            Line("rollout_routes/changed_fraction", "routes"),
            Line("rollout_routes/changed_tokens_fraction", "tokens", "dash"),
        ),
        zero=True,
    ),
    Figure(
        "Wrong routes of the engine (0 is right)",
        (
            Line("rollout_routes/disjoint_fraction", "no expert in common"),
            Line("rollout_routes/repeated_fraction", "as the token before", "dash"),
        ),
        zero=True,
        if_any=True,
    ),
    Figure(
        "KL of the rollouts to the trainer, by routes",
        (
            Line("rollout/mismatch_kl_live_routes_nats", "live routes"),
            Line("rollout/mismatch_kl_same_routes_nats", "the same routes", "dash"),
            Line("rollout/mismatch_kl_staleness_nats", "staleness", "dots"),
        ),
        zero=True,
        if_any=True,
        note="Of the tokens that the weights in training sampled: with live routes and with the engine's. Staleness: "
        "what the tokens of older weights add to the KL over all tokens.",
    ),
    Figure(
        "KL of the rollouts of older weights to the trainer, by routes",
        (
            Line("rollout/mismatch_kl_live_routes_stale_nats", "live routes"),
            Line("rollout/mismatch_kl_same_routes_stale_nats", "the same routes", "dash"),
        ),
        zero=True,
        if_any=True,
    ),
    Figure(
        "Ratio of the trainer to the rollout policy, variance by routes",
        (
            Line("rollout/ratio_variance_live_routes", "live routes"),
            Line("rollout/ratio_variance_same_routes", "the same routes", "dash"),
        ),
        zero=True,
        if_any=True,
    ),
    Figure(
        "KL to the old policy after a rollout batch, by routes",
        (
            Line("policy/kl_old_live_routes_nats", "live routes"),
            Line("policy/kl_old_same_routes_nats", "the same routes", "dash"),
        ),
        zero=True,
        if_any=True,
    ),
    Figure(
        "Ratio to the old policy after a rollout batch, variance by routes",
        (
            Line("policy/ratio_variance_live_routes", "live routes"),
            Line("policy/ratio_variance_same_routes", "the same routes", "dash"),
        ),
        zero=True,
        if_any=True,
    ),
    Figure("Routes stored for replay", (Line("routes/cached_bytes"),), zero=True, if_any=True, smooth=False),
)

SPEED: tuple[Figure | Band, ...] = (
    Figure("Trained tokens per second and rank", (Line("train/tokens_per_s_per_rank"),), zero=True),
    Figure("Generated tokens per second and replica", (Line("rollout/tokens_per_s_per_replica"),), zero=True),
    Figure("Model FLOP/s of a rank over its peak (MFU)", (Line("train/mfu"),), zero=True),
    Figure("Seconds of a rollout batch", (Line("rl/step_s"),), zero=True),
    Figure("Seconds of an optimizer step", (Line("train/step_s"),), zero=True),
    Figure(
        "Main memory of rank 0",
        (Line("memory/resident_bytes", "now"), Line("memory/peak_resident_bytes", "peak", "dash")),
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
        (Line("checkpoint/save_s", "whole save", "dots"), Line("checkpoint/blocking_s", "training waited", "dots")),
        zero=True,
    ),
)

LAYER_MAPS: dict[str, tuple[str, str]] = {
    "moe/layer_NN/load_max_over_mean": (
        "Busiest expert by layer",
        "Tokens of the layer's busiest expert over its mean expert, at every recorded step.",
    ),
    "routes/layer_NN/changed_fraction": (
        "Routes that differ from the replayed ones, by layer",
        "Fraction of a layer's routes (token, slot) that differ from those of the old policy.",
    ),
    "rollout_routes/layer_NN/changed_fraction": (
        "Routes that differ from the engine's, by layer",
        "Fraction of a layer's routes (token, slot) that differ from those of the rollout engine.",
    ),
    "rollout/layer_NN/mismatch_kl_routing_nats": (
        "KL of the rollouts to the trainer that is due to routing, by layer",
        "What live routes in this layer add to those in the layers before it, in nats a token.",
    ),
    "policy/layer_NN/kl_old_routing_nats": (
        "KL to the old policy that is due to routing, by layer",
        "What live routes in this layer add to those in the layers before it, in nats a token.",
    ),
    "policy/layer_NN/ratio_variance_routing": (
        "Variance of the ratio that is due to routing, by layer",
        "What live routes in this layer add to those in the layers before it.",
    ),
}
"""Metrics of layers that are drawn as a map of layer x step: name -> title and note."""
