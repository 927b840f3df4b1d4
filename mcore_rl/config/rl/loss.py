"""The section `rl.loss`: the policy's loss and the terms added to it."""

from functools import cached_property
from math import exp
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Section

LossKind = Literal["grpo", "ppo", "gspo", "gspo_token", "rspo", "kimi_k2", "cispo"]


Aggregation = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


class Clip(NamedTuple):
    """Importance ratios are clipped to 1 - low ... 1 + high."""

    low: float
    high: float


PAPER_CLIPS: dict[str, Clip] = {
    "grpo": Clip(0.2, 0.2),
    "ppo": Clip(0.2, 0.2),
    "gspo": Clip(3e-4, 4e-4),
    "gspo_token": Clip(3e-4, 4e-4),
    "rspo": Clip(1 - exp(-0.4), exp(0.4) - 1),  # of GMPO (2507.20673), which it rescales
    "kimi_k2": Clip(0.0, 0.0),  # clips nothing
    "cispo": Clip(1.0, 0.28),  # no lower bound, as in the paper; for the upper it gives no number
}


PAPER_AGGREGATIONS: dict[str, Aggregation] = {"cispo": "token_mean", "ppo": "token_mean"}


PAPER_TAU = 0.01


class LossConfig(Section):
    """The policy's loss, and the terms added to it."""

    kind: LossKind | Extension = "grpo"
    """Loss; grpo (arXiv 2402.03300), ppo (1707.06347: the same for a token, and a mean over all tokens), gspo and
    gspo_token (2507.18071), rspo (2510.23027), kimi_k2 (2501.12599, 2507.20534), cispo (2506.13585); `module:name`: a
    function of yours (rl.objectives.policy_tokens.PolicyTokens, this section, context-parallel axis -> TokenLoss)."""
    clip_low: PositiveFloat | Literal["auto"] = "auto"
    """Ratios are clipped from below at 1 - clip_low; `auto`: the paper's (grpo and ppo 0.2, gspo 3e-4, rspo
    1 - e^-0.4, cispo 1)."""
    clip_high: PositiveFloat | Literal["auto"] = "auto"
    """Ratios are clipped from above at 1 + clip_high; `auto`: the paper's (grpo and ppo 0.2, gspo 4e-4, rspo
    e^0.4 - 1, cispo 0.28)."""
    dual_clip: PositiveFloat | None = None
    """Largest ratio of completions with a negative advantage (1912.09729: 3); `none`: no limit."""
    router_shift: bool | Literal["auto"] = "auto"
    """Multiply the ratio of each token, before any clip or mean, by how little the routers' scores of the old policy's
    experts have changed since its pass for old logprobs (RSPO); `auto`: with kind="rspo" alone."""
    router_shift_floor: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Least factor of `router_shift`."""
    tau: PositiveFloat | Literal["auto"] = "auto"
    """Weight with which kimi_k2 regularises the policy towards the old one; `auto`: 0.01."""
    aggregation: Literal["auto", "seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"] = "auto"
    """Mean over tokens: mean over sequences of their tokens' means; mean over all tokens; mean over sequences of their
    tokens' sums over `aggregation_norm_tokens`; `auto`: as in the paper of `kind`."""
    aggregation_norm_tokens: PositiveInt | Literal["auto"] = "auto"
    """Divisor of `seq_mean_token_sum_norm` (Dr. GRPO); `auto`: rollout.max_new_tokens, with an environment
    environment.max_tokens."""
    mask_truncated: bool = False
    """Do not train on truncated completions; their rewards still count in their group."""
    kl_coeff: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence to the reference policy (2402.03300: 0.04); at 0 there is no reference."""
    kl_target: PositiveFloat | None = None
    """KL of a completion to the reference, in nats summed over its tokens, towards which `kl_coeff` is changed after
    each rollout batch: times e^(clip(KL / kl_target - 1, -0.2, 0.2) x completions / kl_horizon), for small steps as in
    1909.08593, which has 6; `none`: it stays as it is."""
    kl_horizon: PositiveInt = 10000
    """Completions over which a KL that is 20 % or more off `kl_target` changes `kl_coeff` by a fifth; at least those of
    a rollout batch."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL: with d = log(reference / policy) of a sampled token, -d, d^2 / 2, or e^d - d - 1."""
    kl_gradient: Literal["estimator", "k2"] = "estimator"
    """Gradient of the KL in the loss: the estimator's derivative, or that of k2, which is the KL's in expectation."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL: added to the loss, or its sum over a completion, under the old policy, taken from the reward. In
    the reward a completion that `mask_truncated` masks pays too, and a group of equal rewards still gets zeros. With
    `gae` and `reinforce_plus_plus...` it is taken from the reward of each token, as in PPO (2203.02155)."""
    reference_refresh_rollouts: PositiveInt | None = None
    """Rollout batches after which the reference becomes the policy (iterative GRPO); `none`: never."""
    reference_store: Literal["device", "host"] = "host"
    """Memory in which the reference's weights wait for their pass: beside the policy, or main memory."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the mean entropy of the next token over the whole vocabulary, which is raised."""
    importance_sampling: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"] = "none"
    """Importance-sampling correction of the rollout-training mismatch, by w = old / engine's probability of a token, or
    its geometric mean over the completion: weigh by min(w, high), or by w inside low ... high and by 0 outside. Masked
    tokens still count in the mean."""
    importance_sampling_low: NonNegativeFloat = 0.5
    """Lower end of the masks of `importance_sampling`."""
    importance_sampling_high: PositiveFloat = 2.0
    """Cap of truncated importance sampling (TIS), or the upper end of the masks of `importance_sampling`."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in fp32 at a time; of deferred logits `platform.logits_chunk_tokens`."""

    @cached_property
    def clip(self) -> Clip:
        """Bounds in use; a loss of the user's own has those of grpo."""
        paper = PAPER_CLIPS.get(self.kind, PAPER_CLIPS["grpo"])
        return Clip(
            paper.low if self.clip_low == "auto" else self.clip_low,
            paper.high if self.clip_high == "auto" else self.clip_high,
        )

    @cached_property
    def uses_router_shift(self) -> bool:
        """Whether ratios are multiplied by the router-shift ratio."""
        return self.kind == "rspo" if self.router_shift == "auto" else self.router_shift

    @cached_property
    def tau_in_use(self) -> float:
        """Number that `tau` stands for."""
        return PAPER_TAU if self.tau == "auto" else self.tau

    @cached_property
    def aggregation_in_use(self) -> Aggregation:
        """Aggregation that `aggregation` stands for."""
        if self.aggregation == "auto":
            return PAPER_AGGREGATIONS.get(self.kind, "seq_mean_token_mean")
        return self.aggregation
