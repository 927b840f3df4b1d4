"""Routing replay: whose choice of experts the policy is trained under."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from mcore_rl.config.section import Probability, Section

ReplayKind = Literal["none", "r2", "r3"]


class ReplayConfig(Section):
    """Routing replay of an MoE policy (R2, R3: arXiv 2507.18071, 2510.11370). Only the selection of experts is
    imposed: their gates are the live router's scores, which keep learning.

    Padding is routed live; so are multi-token-prediction layers. (The last token of a rollout, which its engine never
    routes, is only a label in training.) A balance loss (`model.moe.balance`) is of the live choices, not of the
    imposed ones; the expert bias counts the tokens that experts worked on, so the imposed.
    """

    kind: ReplayKind = "none"
    """Routes that are imposed; `r2`: those of the trainer's pass for old logprobs; `r3`: those of the rollout engine,
    in that pass too; `none`: every pass routes for itself."""
    reference: Literal["live", "replay"] = "live"
    """Routes of the reference policy: its router's own choice (`live`), or those imposed on the policy (`replay`)."""
    missing: Literal["error", "live", "refuse"] = "error"
    """For r3, where the engine left out the routes of a token (a preempted request, a turn of a conversation, tokens
    from a server's cache), or a server computed them again with newer weights than sampled the token
    (rl.rollout.max_staleness). `error`: a server generates the completion again, and with the native engine the run
    ends. `live`: the token is routed live in every pass, and counted (`routes/live_fraction`); the routes of all other
    tokens are imposed. `refuse`: the completion takes no part in its rollout batch (`max_refused_fraction`)."""
    store: Literal["device", "pinned"] = "device"
    """Memory in which routes wait for their pass: the device's, or page-locked main memory."""
    observe_rollout: bool = False
    """Ask the engine for its routes although they are not imposed, and report how many the trainer would have chosen
    otherwise (`rollout_routes/...`); r3 always does so."""
    max_disagreement: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] | None = "auto"
    """Largest share of the tokens of a layer for which the engine's experts and the trainer's, chosen with the same
    weights, have none in common: rounding moves single experts, wrong or stale routes all of them. Above it the run
    ends; a completion that is far above it by itself is left out (`max_refused_fraction`). `auto`: three times the
    share of the first pass in which each layer has 1,000 tokens, at least 0.01 and at most 0.06, and 0.03 until then
    (0.2 and 0.1 with one expert a token); `none`: no limit."""
    max_refused_fraction: Probability = 0.1
    """Largest share of the completions of a rollout batch that may be left out of it because of their routes
    (`max_disagreement`, `missing`); above it the run ends. They have no part in advantages, losses and counts, and are
    counted (`rollout_routes/refused_completions`). 0: the first one ends the run."""
    split_interval: PositiveInt | None = None
    """Rollout batches between two that measure how much of a mismatch is due to routing, by two more passes over a
    minibatch for each mismatch: of the engine with the trainer, where the engine's routes are here, and of the old
    policy with the new one; `none`: none does."""
    split_layers: PositiveInt | None = None
    """With `split_interval`, groups of neighbouring layers for which the part that is due to routing is measured apart,
    by one more pass for each group but the last; as many as there are layers: each of them; `none`: no part of a layer
    is measured."""
