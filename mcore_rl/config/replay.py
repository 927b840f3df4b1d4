"""Routing replay: which choice of experts the policy is trained with."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from mcore_rl.config.section import Probability, Section

ReplayKind = Literal["none", "r2", "r3"]


class ReplayConfig(Section):
    """Routing replay of an MoE policy (R2, R3: arXiv 2507.18071, 2510.11370). Only the selection of experts is imposed;
    the gates are the live router's scores, so the router keeps learning. Padding and multi-token-prediction layers are
    routed live. The last token of a rollout, which its engine never routes, is only a label in training. A balance loss
    (`model.moe.balance`) uses the live choices; the expert bias counts the tokens that experts worked on, that is the
    imposed choices.
    """

    kind: ReplayKind = "none"
    """Routes that are replayed. `r2`: those of the trainer's pass for old logprobs. `r3`: the rollout engine's, also in
    that pass. `none`: no replay, every pass routes for itself."""
    reference: Literal["live", "replay"] = "live"
    """Routes of the reference. `live`: its own router chooses. `replay`: the policy's imposed routes."""
    missing: Literal["error", "live", "refuse"] = "error"
    """Treatment, with r3, of tokens without usable routes: the engine returned none (a preempted request, a turn of a
    conversation, tokens from a server's cache), or a server recomputed them with newer weights than sampled the token
    (rl.rollout.max_staleness). `error`: a server generates the completion again; with the native engine the run ends.
    `live`: these tokens are routed live in every pass and counted (`routes/live_fraction`); all other routes are
    imposed. `refuse`: the completion is left out of its rollout batch (`max_refused_fraction`)."""
    store: Literal["device", "pinned"] = "device"
    """Memory in which routes wait for their pass. `device`: the device's. `pinned`: page-locked main memory."""
    observe_rollout: bool = False
    """Request the engine's routes even if they are not imposed, and report how many the trainer would have chosen
    differently (`rollout_routes/...`). r3 always does this."""
    max_disagreement: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] | None = "auto"
    """Maximum share of a layer's tokens for which engine and trainer, with the same weights, have no expert in common.
    Rounding changes single experts; wrong or stale routes change all of them. Above it the run ends; a single
    completion far above it is left out (`max_refused_fraction`). `auto`: three times the share of the first pass in
    which each layer has 1,000 tokens, at least 0.01 and at most 0.06, and 0.03 until then (with one expert per token,
    at most 0.2, and 0.1 until then). `none`: no limit."""
    max_refused_fraction: Probability = 0.1
    """Maximum share of the completions of a rollout batch that may be left out because of their routes
    (`max_disagreement`, `missing`); above it the run ends. Such completions have no part in advantages and losses, and
    `rollout_routes/refused_completions` counts them. 0: the first such completion ends the run."""
    split_interval: PositiveInt | None = None
    """Interval, in rollout batches, at which the run measures how much of each mismatch is due to routing: between
    engine and trainer, if the engine's routes are available, and between old and new policy. Each takes two more passes
    over a minibatch. `none`: never."""
    split_layers: PositiveInt | None = None
    """With `split_interval`, number of groups of neighbouring layers that are measured separately; each except the last
    takes a further pass. The number of layers: each layer on its own. `none`: no measurement by layers."""

    @cached_property
    def wants_engine_routes(self) -> bool:
        """Whether the rollout engine has to return the experts of each token and layer, if the model has experts."""
        return self.kind == "r3" or self.observe_rollout
