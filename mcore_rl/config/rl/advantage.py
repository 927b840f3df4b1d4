"""The section `rl.advantage`: how rewards are compared."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from mcore_rl.config.extension import Extension
from mcore_rl.config.rl.critic import CriticConfig
from mcore_rl.config.section import Section


class AdvantageConfig(Section):
    """Comparison of a completion's reward with the others of its prompt. A group of equal rewards gets zeros."""

    kind: str
    """Advantage; `zscore`: (r - mean) / (std + eps); `mean`: r - mean; `leave_one_out`: r - mean of the others (RLOO);
    `leave_one_out_zscore`: that, over the others' std where it is not 0; `remax`: r - reward of the prompt's greedy
    completion, which is generated beside the group (2310.10505); `zero`: none, so that other terms alone move the
    policy, as in distillation; `steps`: a token gets the sum of the z-scores,
    among all steps of its prompt's completions, of the steps that end there or later (2402.03300, process supervision);
    a reward that is a plain number is one step at the end; `gae`: of each token, by the values of a critic (PPO,
    1506.02438); `reinforce_plus_plus`: the discounted sum of a token's and later rewards, normalised over the world
    (2501.03262); `reinforce_plus_plus_baseline`: that of r - mean; `module:name`: a function of your own (rewards
    `[prompts, group]`, this section -> advantages of the same shape). `gae`, `reinforce_plus_plus`, `remax` and `zero`
    compare nothing within a group: rl.rollout.group_size may be 1."""

    @cached_property
    def compares_group(self) -> bool:
        """Whether a completion's advantage depends on the others of its prompt."""
        return self.kind not in ("gae", "reinforce_plus_plus", "remax", "zero")

    @cached_property
    def is_of_tokens(self) -> bool:
        """Whether each token has its own reward and advantage."""
        return isinstance(self, DiscountedAdvantage)

    @cached_property
    def uses_steps(self) -> bool:
        """Whether the steps of a completion are rewarded, and not the whole."""
        return self.kind == "steps"


class PlainAdvantage(AdvantageConfig):
    """Differences of rewards, with nothing to choose."""

    kind: Literal["mean", "leave_one_out", "remax", "zero"] = "mean"


class DividedAdvantage(AdvantageConfig):
    """Differences of rewards over a standard deviation."""

    ddof: Literal[0, 1] = 1
    """Degrees of freedom of the standard deviation: 1 divides by group_size - 1 (by tokens - 1 where tokens are
    normalised), 0 by group_size."""
    eps: NonNegativeFloat = 1e-6
    """Number added to the standard deviation."""


class ZscoreAdvantage(DividedAdvantage):
    """Z-scores of rewards, or of the rewards of steps."""

    kind: Literal["zscore", "leave_one_out_zscore", "steps"] = "zscore"


class OwnAdvantage(DividedAdvantage):
    """A function of the user's own."""

    kind: Extension


class DiscountedAdvantage(DividedAdvantage):
    """Advantages of tokens, from rewards that come later."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token that it comes later."""


class BaselineAdvantage(DiscountedAdvantage):
    """Discounted sums of rewards over the mean of their prompt, which is no baseline of single steps."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class SteppedAdvantage(DiscountedAdvantage):
    """Advantages of tokens, of which several in a completion may be rewarded."""

    rewards_at: Literal["end", "steps"] = "end"
    """Tokens that are rewarded: the last one by the reward, or the last one of each step by the step's value, where a
    part of the reward returns steps."""

    @cached_property
    def uses_steps(self) -> bool:
        """Whether the steps of a completion are rewarded, and not the whole."""
        return self.rewards_at == "steps"


class ReturnAdvantage(SteppedAdvantage):
    """Discounted sums of rewards."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"


class GaeAdvantage(SteppedAdvantage):
    """Generalised advantages, by the values of a critic."""

    kind: Literal["gae"] = "gae"
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["length"] = 0.95
    """Weight of later differences of values: 0 trusts the critic, 1 the rewards alone; `length`:
    1 - 1 / (length_alpha x tokens of the completion), at least 0 (VAPO, 2504.05118)."""
    length_alpha: PositiveFloat = 0.05
    """Factor of gae_lambda="length"."""
    bootstrap_truncated: bool = False
    """A truncated completion ends in the critic's last value of it, not in 0: it has no end yet."""
    whiten: bool = True
    """Normalise the advantages, (A - mean) / (std + eps), over all trained tokens of the rollout batch."""
    critic: CriticConfig = CriticConfig()


AnyAdvantage = (
    ZscoreAdvantage | PlainAdvantage | GaeAdvantage | ReturnAdvantage | BaselineAdvantage | OwnAdvantage
)
