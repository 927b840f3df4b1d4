"""The section `rl.advantage`: how rewards are compared."""

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from mcore_rl.config.extension import Extension
from mcore_rl.config.section import Section


class AdvantageConfig(Section):
    """Comparison of a completion's reward with the others of its prompt. A group of equal rewards gets zeros."""

    kind: (
        Literal[
            "zscore",
            "mean",
            "leave_one_out",
            "leave_one_out_zscore",
            "remax",
            "zero",
            "steps",
            "gae",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        ]
        | Extension
    ) = "zscore"
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
    ddof: Literal[0, 1] = 1
    """Degrees of freedom of the standard deviation: 1 divides by group_size - 1 (by tokens - 1 where tokens are
    normalised), 0 by group_size."""
    eps: NonNegativeFloat = 1e-6
    """Number added to the standard deviation."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token that it comes later, with `gae` and `reinforce_plus_plus...`."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["length"] = 0.95
    """Weight of later differences of values in `gae`: 0 trusts the critic, 1 the rewards alone; `length`:
    1 - 1 / (length_alpha x tokens of the completion), at least 0 (VAPO, 2504.05118)."""
    length_alpha: PositiveFloat = 0.05
    """Factor of gae_lambda="length"."""
    rewards_at: Literal["end", "steps"] = "end"
    """Tokens that are rewarded, with `gae` and `reinforce_plus_plus`: the last one by the reward, or the last one of
    each step by the step's value, where a part of the reward returns steps."""
    bootstrap_truncated: bool = False
    """In `gae`, a truncated completion ends in the critic's last value of it, not in 0: it has no end yet."""
    whiten: bool = True
    """Normalise the advantages of `gae`, (A - mean) / (std + eps), over all trained tokens of the rollout batch."""

    @cached_property
    def is_of_tokens(self) -> bool:
        """Whether each token has its own reward and advantage."""
        return self.kind in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

    @cached_property
    def compares_group(self) -> bool:
        """Whether a completion's advantage depends on the others of its prompt."""
        return self.kind not in ("gae", "reinforce_plus_plus", "remax", "zero")

    @cached_property
    def uses_steps(self) -> bool:
        """Whether the steps of a completion are rewarded, and not the whole."""
        return self.kind == "steps" or (self.is_of_tokens and self.rewards_at == "steps")
