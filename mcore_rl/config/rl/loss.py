"""The section `rl.loss`: the policy's loss and the terms added to it."""

from functools import cached_property
from math import exp
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Section, Store

Aggregation = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


class Clip(NamedTuple):
    """Importance ratios are clipped to 1 - low ... 1 + high."""

    low: float
    high: float


class Correction(NamedTuple):
    """Importance-sampling correction of the rollout-training mismatch."""

    kind: Literal["truncate", "mask", "sequence_truncate", "sequence_mask"]
    low: float
    high: float


class LossConfig(Section):
    """The policy's loss and the terms added to it: the fields of every kind."""

    kind: str
    """Loss; grpo (arXiv 2402.03300), ppo (1707.06347: the same per token, with a mean over all tokens), gspo and
    gspo_token (2507.18071), rspo (2510.23027), kimi_k2 (2501.12599, 2507.20534), cispo (2506.13585); `module:name`: a
    function of your own (rl.objectives.policy_tokens.PolicyTokens, this section, context-parallel axis ->
    TokenLoss)."""
    mask_truncated: bool = False
    """Do not train on truncated completions; their rewards still count in their group."""
    kl_coeff: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence to the reference policy (2402.03300: 0.04); at 0 there is no reference."""
    kl_target: PositiveFloat | None = None
    """Target for the KL of a completion to the reference, in nats summed over its tokens. After each rollout batch
    `kl_coeff` is multiplied by e^(clip(KL / kl_target - 1, -0.2, 0.2) x completions / kl_horizon), which for small
    steps is the rule of 1909.08593, where the target is 6; `none`: `kl_coeff` does not change."""
    kl_horizon: PositiveInt = 10000
    """Number of completions over which a KL that is 20 % or more off `kl_target` changes `kl_coeff` by a fifth; at
    least the completions of a rollout batch."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL, with d = log(reference / policy) of a sampled token; `k1`: -d; `k2`: d^2 / 2; `k3`: e^d - d
    - 1."""
    kl_gradient: Literal["estimator", "k2"] = "estimator"
    """Gradient of the KL in the loss; `estimator`: the estimator's derivative; `k2`: the derivative of k2, which in
    expectation is the gradient of the KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty goes; `loss`: a term of the loss; `reward`: the completion's summed KL, under the old
    policy, is subtracted from its reward. A completion that `mask_truncated` masks is penalised too, and a group of
    equal rewards still gets zeros. With `gae` and `reinforce_plus_plus...` it is subtracted from the reward of each
    token, as in PPO (2203.02155)."""
    reference_refresh_rollouts: PositiveInt | None = None
    """Rollout batches after which the reference becomes the current policy (iterative GRPO); `none`: never."""
    reference_store: Store = "host"
    """Memory in which the reference's weights wait for their pass; `device`: the policy's; `host`: main memory."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus, the mean entropy of the next token over the whole vocabulary."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Number of tokens with fp32 logits at a time; for deferred logits, `platform.logits_chunk_tokens` applies."""

    @cached_property
    def has_kl_in_reward(self) -> bool:
        """Whether a KL penalty is subtracted from rewards."""
        return bool(self.kl_coeff) and self.kl_in == "reward"

    @cached_property
    def aggregation_in_use(self) -> Aggregation:
        """Mean over tokens; for ratios of whole sequences always a mean over sequences, where a long sequence has no
        more weight.
        """
        return "seq_mean_token_mean"

    @cached_property
    def norm_tokens(self) -> int | None:
        """Divisor of sums over tokens; None for the maximum number of tokens of a completion."""
        return None

    @cached_property
    def correction(self) -> Correction | None:
        """Correction of the rollout-training mismatch; None without a correction."""
        return None

    @cached_property
    def shift_floor(self) -> float | None:
        """Minimum router-shift ratio with which ratios are multiplied; None if they are not."""
        return None

    @property
    def uses_router_shift(self) -> bool:
        """Whether ratios are multiplied by the router-shift ratio."""
        return self.shift_floor is not None


class Aggregated(LossConfig):
    """A loss of tokens, with a choice of means over them."""

    aggregation: Aggregation = "seq_mean_token_mean"
    """Mean over tokens; `seq_mean_token_mean`: mean over sequences of the mean over their tokens; `token_mean`: mean
    over all tokens; `seq_mean_token_sum_norm`: mean over sequences of the sum over their tokens, divided by
    `aggregation_norm_tokens`."""
    aggregation_norm_tokens: PositiveInt | Literal["auto"] = "auto"
    """Divisor of `seq_mean_token_sum_norm` (Dr. GRPO); `auto`: rollout.max_new_tokens, or environment.max_tokens with
    an environment."""

    @cached_property
    def aggregation_in_use(self) -> Aggregation:
        """Mean over tokens."""
        return self.aggregation

    @cached_property
    def norm_tokens(self) -> int | None:
        """Divisor of sums over tokens; None for the maximum number of tokens of a completion."""
        return None if self.aggregation_norm_tokens == "auto" else self.aggregation_norm_tokens


class Clipped(LossConfig):
    """A loss with clipped ratios."""

    clip_low: PositiveFloat = 0.2
    """Ratios are clipped from below at 1 - clip_low; the default is the paper's."""
    clip_high: PositiveFloat = 0.2
    """Ratios are clipped from above at 1 + clip_high; the default is the paper's."""

    @cached_property
    def clip(self) -> Clip:
        """Both bounds."""
        return Clip(self.clip_low, self.clip_high)


class DualClipped(Clipped):
    """A loss that takes the minimum of a clipped and an unclipped term."""

    dual_clip: PositiveFloat | None = None
    """Maximum ratio of completions with a negative advantage (1912.09729: 3); `none`: no limit."""


class Corrected(LossConfig):
    """A loss that can have importance-sampling weights."""

    importance_sampling: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask"] = "none"
    """Importance-sampling correction of the rollout-training mismatch, with w = a token's probability under the old
    policy / under the engine; `truncate`: the weight is min(w, high); `mask`: the weight is w inside low ... high, and
    0 outside; `sequence_truncate`, `sequence_mask`: the same with the geometric mean of w over the completion. Masked
    tokens still count in the mean."""
    importance_sampling_low: NonNegativeFloat = 0.5
    """Lower end of the masks of `importance_sampling`."""
    importance_sampling_high: PositiveFloat = 2.0
    """Cap of truncated importance sampling (TIS), or the upper end of the masks of `importance_sampling`."""

    @cached_property
    def correction(self) -> Correction | None:
        """Correction of the rollout-training mismatch; None without a correction."""
        if self.importance_sampling == "none":
            return None
        return Correction(
            self.importance_sampling, self.importance_sampling_low, self.importance_sampling_high
        )


class Shifted(LossConfig):
    """A loss in which ratios can be multiplied by the router-shift ratio."""

    router_shift: bool = False
    """Multiply the ratio of each token, before any clip or mean, by how little the routers' scores of the old policy's
    experts have changed since its pass for old logprobs (RSPO)."""
    router_shift_floor: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Minimum factor of `router_shift`."""

    @cached_property
    def shift_floor(self) -> float | None:
        """Minimum router-shift ratio with which ratios are multiplied; None if they are not."""
        return self.router_shift_floor if self.router_shift else None


class GrpoLoss(Shifted, Corrected, Aggregated, DualClipped):
    """Clipped ratios of tokens."""

    kind: Literal["grpo"] = "grpo"


class PpoLoss(Shifted, Corrected, Aggregated, DualClipped):
    """Clipped ratios of tokens, with a mean over all tokens."""

    kind: Literal["ppo"] = "ppo"
    aggregation: Aggregation = "token_mean"


class GspoTokenLoss(Shifted, Corrected, DualClipped):
    """Clipped ratios of sequences, with an advantage for each token."""

    kind: Literal["gspo_token"] = "gspo_token"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4


class GspoLoss(Shifted, Corrected, DualClipped):
    """Clipped ratios of sequences."""

    kind: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    clip_high: PositiveFloat = 4e-4
    importance_sampling: Literal["none", "sequence_truncate", "sequence_mask"] = "none"


class RspoLoss(Shifted, Corrected, Clipped):
    """Geometric means of clipped ratios, as in GMPO (2507.20673), times the router-shift ratio."""

    kind: Literal["rspo"] = "rspo"
    clip_low: PositiveFloat = 1 - exp(-0.4)
    clip_high: PositiveFloat = exp(0.4) - 1
    importance_sampling: Literal["none", "sequence_truncate", "sequence_mask"] = "none"
    router_shift: bool = True


class KimiK2Loss(LossConfig):
    """A regression that is valid under any sampler, so that nothing is clipped or weighted."""

    kind: Literal["kimi_k2"] = "kimi_k2"
    tau: PositiveFloat = 0.01
    """Weight of the regularisation towards the old policy, in units of the reward."""


class CispoLoss(Corrected, Aggregated, Clipped):
    """Weighted logprobs, with a mean over all tokens."""

    kind: Literal["cispo"] = "cispo"
    clip_low: PositiveFloat = 1.0  # no lower bound, as in the paper, which gives no number for the upper
    clip_high: PositiveFloat = 0.28
    aggregation: Aggregation = "token_mean"


class OwnLoss(Shifted, Corrected, Aggregated, DualClipped):
    """A user-defined function, which may read any field except `tau`."""

    kind: Extension


AnyLoss = GrpoLoss | PpoLoss | GspoLoss | GspoTokenLoss | RspoLoss | KimiK2Loss | CispoLoss | OwnLoss
