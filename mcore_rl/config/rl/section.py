"""The section `rl`: how completions are sampled, scored, compared, and learned from."""

from functools import cached_property
from typing import Annotated

from mcore_rl.config.rl.loss import (
    AnyAdvantage,
    AnyLoss,
    DistillConfig,
    GrpoLoss,
    PtxConfig,
    UpdateConfig,
    ZscoreAdvantage,
)
from mcore_rl.config.rl.rollout import (
    RULES_OF_ANSWERS,
    AnyEngine,
    EnvironmentConfig,
    EvalConfig,
    NativeConfig,
    PromptConfig,
    RewardConfig,
    RolloutConfig,
    SamplesConfig,
)
from mcore_rl.config.section import ByKind, Section


class RlConfig(Section):
    """One RL step: prompts, rollouts, rewards, advantages, loss."""

    prompts: PromptConfig = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: Annotated[AnyEngine, ByKind()] = NativeConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    advantage: Annotated[AnyAdvantage, ByKind()] = ZscoreAdvantage()
    loss: Annotated[AnyLoss, ByKind()] = GrpoLoss()
    distill: DistillConfig = DistillConfig()
    ptx: PtxConfig = PtxConfig()
    update: UpdateConfig = UpdateConfig()
    eval: EvalConfig = EvalConfig()
    samples: SamplesConfig = SamplesConfig()
    freeze_router: bool = False
    """Do not train the routers: their weights, and the biases on the choice of experts, do not change."""

    @cached_property
    def deciding_parts(self) -> frozenset[str]:
        """Parts of the reward that training depends on: the parts with a weight, and the part by which groups are
        sampled. The rest only measure.
        """
        parts = {part for part, weight in self.reward.weight_of.items() if weight}
        if self.rollout.dynamic_sampling and self.samples_by_accuracy and self.reward.correct_part:
            parts.add(self.reward.correct_part)
        return frozenset(parts)

    @cached_property
    def samples_by_accuracy(self) -> bool:
        """Whether dynamic sampling looks at the correctness of completions instead of their reward."""
        by, part = self.rollout.dynamic_sampling_by, self.reward.correct_part
        if by == "auto":
            return part in RULES_OF_ANSWERS or (part == "code" and not self.reward.code.partial)
        return by == "accuracy"

    @cached_property
    def learns_beside_rewards(self) -> bool:
        """Whether a term of the loss moves the policy even if no token has an advantage."""
        loss = self.loss
        return (
            bool(loss.kl_coeff and loss.kl_in == "loss")
            or bool(self.distill.paths and self.distill.use == "loss")
            or bool(loss.entropy_coeff or self.ptx.coeff)
        )

    @cached_property
    def max_completion_tokens(self) -> int:
        """Maximum number of tokens after a prompt: of a single turn, or, with an environment, of the conversation."""
        return self.rollout.max_new_tokens if self.environment.name is None else self.environment.max_tokens
