"""The config of a reinforcement-learning run."""

from functools import cached_property
from typing import Annotated, ClassVar

from mcore_rl.config.data import TokenizerConfig
from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.replay import ReplayConfig
from mcore_rl.config.rl.agent import AgentConfig
from mcore_rl.config.rl.loss import (
    AnyAdvantage,
    AnyLoss,
    CriticConfig,
    DistillConfig,
    GaeAdvantage,
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
    ServedConfig,
)
from mcore_rl.config.run import RunConfig
from mcore_rl.config.section import ByKind, Section, Store


class RlConfig(Section):
    """One RL step: prompts, rollouts, rewards, advantages, loss."""

    prompts: PromptConfig = PromptConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: Annotated[AnyEngine, ByKind()] = NativeConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    advantage: Annotated[AnyAdvantage, ByKind()] = ZscoreAdvantage()
    loss: Annotated[AnyLoss, ByKind()] = GrpoLoss()
    distill: DistillConfig = DistillConfig()
    ptx: PtxConfig = PtxConfig()
    update: UpdateConfig = UpdateConfig()
    eval: EvalConfig = EvalConfig()
    samples: SamplesConfig = SamplesConfig()
    freeze_router: bool = False
    """Do not train the routers: neither their weights nor the biases on the choice of experts change."""

    @cached_property
    def deciding_parts(self) -> frozenset[str]:
        """Parts of the reward that training depends on, by weight or for sampling; the rest only measure."""
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
            or bool(self.distill.paths and (self.distill.use == "loss" or self.distill.forward_weight))
            or bool(loss.entropy_coeff or self.ptx.coeff)
        )

    @cached_property
    def max_completion_tokens(self) -> int:
        """Maximum number of tokens after a prompt: of a single turn, or of a conversation with an environment, or of a
        session of an agent.
        """
        if self.agent.is_on:
            return self.agent.max_tokens
        return self.rollout.max_new_tokens if self.environment.name is None else self.environment.max_tokens


class RlDataConfig(Section):
    """The chat template and the tokenizer that turn prompts into tokens."""

    chat_template: str = "tokenizer"
    """Template that renders a prompt as text; use that of the fine-tuning. `tokenizer`: the tokenizer's own. `plain`:
    "role:" above each turn. `raw`: the prompt's text as it is. Anything else: a file with a jinja template."""
    tokenizer: TokenizerConfig = TokenizerConfig()


class RlRunConfig(RunConfig):
    """The config of `mcore-rl rl`. Steps are optimizer steps in RL too: a rollout batch takes `updates_per_rollout` of
    them. If rl.engine.kind="native", the policy generates and trains on the same layers, so platform.layers="auto" does
    not choose TransformerEngine; with servers it chooses as in pretraining.
    """

    run_dir: str = "runs/rl"
    data: RlDataConfig = RlDataConfig()
    rl: RlConfig = RlConfig()
    replay: ReplayConfig = ReplayConfig()
    units_between_collections: ClassVar[int] = 1
    """Units of work between two garbage collections: a rollout batch leaves much garbage, and takes long."""
    unfuses_router: ClassVar[bool] = True
    """Whether the routers' choices are read or imposed, which a fused kernel hides; always true in RL."""
    trains_mtp: ClassVar[bool] = False
    """Whether passes go through the multi-token-prediction layers; never in RL, which leaves them unchanged."""

    @cached_property
    def allows_te(self) -> bool:
        """Whether "auto" may choose TransformerEngine: the native engine and adapters need our own attention."""
        return self.rl.engine.is_served and not self.lora.is_on

    @cached_property
    def server_wait_s(self) -> float:
        """Seconds of a completion and of a call of a weight update, and of a teacher's answer with all its repetitions,
        with a minute for the rest of a step; 0 without servers.
        """
        engine, distill = self.served, self.rl.distill
        engine_s = 0.0 if engine is None else engine.request_timeout_s + engine.update_timeout_s + 60.0
        return engine_s + (distill.server.request_timeout_s + distill.server.timeout_s + 60.0 if distill.served else 0)

    @cached_property
    def freezes_router(self) -> bool:
        """Whether the routers are frozen."""
        return self.rl.freeze_router

    @cached_property
    def wants_engine_routes(self) -> bool:
        """Whether the rollout engine has to return the experts of each token and layer."""
        return self.model.is_moe and self.replay.wants_engine_routes

    @cached_property
    def rollout_size(self) -> int:
        """Completions per rollout batch."""
        return self.rl.rollout.prompts_per_step * self.rl.rollout.group_size

    @cached_property
    def updates_per_rollout(self) -> int:
        """Optimizer steps between two rollouts."""
        return self.rl.update.epochs * self.rollout_size // self.train.global_batch

    @cached_property
    def served(self) -> ServedConfig | None:
        """The section of the inference servers; None without servers."""
        return self.rl.engine if isinstance(self.rl.engine, ServedConfig) else None

    @cached_property
    def critic(self) -> CriticConfig | None:
        """The section of the critic that is trained with the policy; None without a critic."""
        return self.rl.advantage.critic if isinstance(self.rl.advantage, GaeAdvantage) else None

    @cached_property
    def critic_optim(self) -> OptimConfig | None:
        """Optimizer of the critic; None without a critic."""
        return None if self.critic is None else self.critic.optim

    @cached_property
    def update_store(self) -> Store:
        """Memory in which the policy's gradients and optimizer state wait between its updates."""
        return self.rl.update.store

    @cached_property
    def critic_store(self) -> Store:
        """Memory in which the critic waits between its passes and updates."""
        return "device" if self.critic is None else self.critic.store

    @cached_property
    def critic_epochs(self) -> int:
        """Number of times that the critic is trained on each completion."""
        epochs = "auto" if self.critic is None else self.critic.epochs
        return self.rl.update.epochs if epochs == "auto" else epochs

    @cached_property
    def critic_steps(self) -> int:
        """Optimizer steps of the critic in the whole run."""
        rollouts = self.train.steps // max(1, self.updates_per_rollout)
        return rollouts * self.critic_epochs * self.rollout_size // self.train.global_batch

    @cached_property
    def longest_sample(self) -> int:
        """Positions of the longest prompt with the longest completion, padded for context parallelism."""
        longest = self.rl.prompts.max_tokens + self.rl.max_completion_tokens
        return -(-longest // self.mesh.zigzag) * self.mesh.zigzag

    @cached_property
    def packed_length(self) -> int:
        """Maximum number of positions of a forward pass."""
        max_tokens = self.rl.update.max_tokens_per_microbatch
        wanted = self.longest_sample if max_tokens == "auto" else max_tokens
        return -(-wanted // self.packed_multiple) * self.packed_multiple
