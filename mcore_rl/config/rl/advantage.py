"""The section `rl.advantage`: how rewards are compared."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from mcore_rl.config.extension import Extension
from mcore_rl.config.rl.critic import CriticConfig
from mcore_rl.config.section import Section


class AdvantageConfig(Section):
    """How a completion's reward is compared with the rest of its group. A group of equal rewards gets zeros."""

    kind: str
    """Advantage; `zscore`: (r - mean) / (std + eps); `mean`: r - mean; `leave_one_out`: r - mean of the group's
    remaining rewards (RLOO); `leave_one_out_zscore`: the same, divided by their std unless it is 0; `remax`: r - reward
    of the prompt's greedy completion, which is generated in addition to the group (2310.10505); `zero`: none, so that
    only other terms move the policy, as in distillation; `steps`: a token gets the sum of the z-scores, among all steps
    of its prompt's completions, of the steps that end there or later (2402.03300, process supervision); a reward that
    is a plain number is a single step at the end; `gae`: for each token, by the values of a critic (PPO, 1506.02438);
    `reinforce_plus_plus`: the discounted sum of a token's and later rewards, normalised over the world (2501.03262);
    `reinforce_plus_plus_baseline`: the same for r - mean; `module:name`: a function of your own (rewards `[prompts,
    group]`, this section -> advantages of the same shape). `gae`, `reinforce_plus_plus`, `remax` and `zero` compare
    nothing within a group: rl.rollout.group_size may be 1."""

    @cached_property
    def compares_group(self) -> bool:
        """Whether a completion's advantage depends on the rest of its group."""
        return self.kind not in ("gae", "reinforce_plus_plus", "remax", "zero")

    @cached_property
    def is_of_tokens(self) -> bool:
        """Whether each token has its own reward and advantage."""
        return isinstance(self, DiscountedAdvantage)

    @cached_property
    def uses_steps(self) -> bool:
        """Whether the steps of a completion are rewarded instead of the whole."""
        return self.kind == "steps"


class PlainAdvantage(AdvantageConfig):
    """Differences of rewards, without options."""

    kind: Literal["mean", "leave_one_out", "remax", "zero"] = "mean"


class DividedAdvantage(AdvantageConfig):
    """Differences of rewards, divided by a standard deviation."""

    ddof: Literal[0, 1] = 1
    """Degrees of freedom of the standard deviation: 1 divides by group_size - 1 (by tokens - 1 if tokens are
    normalised), 0 by group_size."""
    eps: NonNegativeFloat = 1e-6
    """Number added to the standard deviation."""


class ZscoreAdvantage(DividedAdvantage):
    """Z-scores of rewards, or of the rewards of steps."""

    kind: Literal["zscore", "leave_one_out_zscore", "steps"] = "zscore"


class OwnAdvantage(DividedAdvantage):
    """A user-defined function."""

    kind: Extension


class DiscountedAdvantage(DividedAdvantage):
    """Advantages of tokens, from rewards that come later."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward per token between it and the advantage."""


class BaselineAdvantage(DiscountedAdvantage):
    """Discounted sums of rewards minus the mean of their prompt, which is no baseline for single steps."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class SteppedAdvantage(DiscountedAdvantage):
    """Advantages of tokens, with rewards at a single token or at several tokens of a completion."""

    rewards_at: Literal["end", "steps"] = "end"
    """Tokens that are rewarded; `end`: the last token, by the reward; `steps`: the last token of each step, by the
    step's value, if a part of the reward returns steps."""

    @cached_property
    def uses_steps(self) -> bool:
        """Whether the steps of a completion are rewarded instead of the whole."""
        return self.rewards_at == "steps"


class ReturnAdvantage(SteppedAdvantage):
    """Discounted sums of rewards."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"


class GaeAdvantage(SteppedAdvantage):
    """Generalised advantage estimation, with the values of a critic."""

    kind: Literal["gae"] = "gae"
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["length"] = 0.95
    """Weight of later differences of values: 0 trusts the critic, 1 only the rewards; `length`: 1 - 1 / (length_alpha x
    tokens of the completion), at least 0 (VAPO, 2504.05118)."""
    length_alpha: PositiveFloat = 0.05
    """Factor in gae_lambda="length"."""
    bootstrap_truncated: bool = False
    """Let a truncated completion, which has no end yet, end in the critic's last value instead of 0."""
    whiten: bool = True
    """Normalise the advantages, (A - mean) / (std + eps), over all trained tokens of the rollout batch."""
    critic: CriticConfig = CriticConfig()


AnyAdvantage = (
    ZscoreAdvantage | PlainAdvantage | GaeAdvantage | ReturnAdvantage | BaselineAdvantage | OwnAdvantage
)
