"""A training as plans see it: everything that its memory, time and disk depend on, whichever program it is of."""

from dataclasses import dataclass, replace
from typing import Literal

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.optim import LoraConfig, OptimConfig
from mcore_rl.config.preferences import PreferenceRunConfig
from mcore_rl.config.rl.loss import SELF
from mcore_rl.config.rl.rollout import AnyEngine
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.config.run import CheckpointConfig, PlatformConfig, RunConfig
from mcore_rl.config.section import Store
from mcore_rl.families import allows_te
from mcore_rl.planning.activations import Layers, layers_of

NO_ADAPTERS = LoraConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOnRanks:
    """A model that a run has on its ranks, cut over them by the run's mesh."""

    name: str
    model: ModelConfig
    optim: OptimConfig | None
    """Its optimizer; None if it is not trained, and has neither gradients nor optimizer state."""
    store: Store = "device"
    """Memory in which its weights wait, and in training its optimizer state."""
    weights_stay: bool = False
    """Whether the weights are on the device regardless of the store."""
    is_swapped: bool = False
    """Whether its weights replace the policy's during a pass, tensor by tensor, and take no room of their own."""
    lora: LoraConfig = NO_ADAPTERS
    """Its low-rank adapters: only these are trained, and if the model is swapped, only these are kept."""

    @property
    def trains(self) -> bool:
        """Whether it has gradients and optimizer state."""
        return self.optim is not None

    @property
    def on_host(self) -> bool:
        """Whether any of it waits in main memory."""
        return self.store == "host"

    @property
    def has_weights(self) -> bool:
        """Whether its weights are on the device all the time."""
        return self.weights_stay or self.store == "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """The work of reinforcement learning around its updates."""

    num_completions: int
    prompt_tokens: int
    """Maximum length of a prompt."""
    completion_tokens: int
    """Maximum length of a completion."""
    engine: AnyEngine
    updates: int
    """Optimizer steps of a rollout batch."""
    epochs: int
    """Number of times that the policy is trained on each completion."""
    critic_epochs: int
    """Number of times that the critic is; 0 without a critic."""
    scoring_passes: int
    """Passes without gradients over a rollout batch, for old logprobs, reference and values."""
    routes_per_token: int
    """Routes that replay keeps of each token and layer: the trainer's, the engine's, or both."""
    keeps_router_scores: bool
    """Whether the scores of the chosen experts are kept too."""
    route_store: Literal["device", "pinned"]
    """Memory in which they wait."""
    samples_interval: int | None
    """Interval between rollout batches whose samples are logged; None: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training on a number of ranks."""

    world_size: int
    mesh: MeshConfig
    platform: PlatformConfig
    layers: Layers
    models: tuple[ModelOnRanks, ...]
    """Every model on the ranks; the first is the trained model, or the policy."""
    freezes_router: bool
    seq_length: int
    """Positions of a sequence, packed or not."""
    answer_tokens: int | None
    """Maximum length of a compared answer with its prompt; None if no answers are compared."""
    micro_batch: int
    global_batch: int
    steps: int
    checkpoint: CheckpointConfig
    rollouts: Rollouts | None
    """None without reinforcement learning."""

    @property
    def model(self) -> ModelConfig:
        """The trained model, or the policy."""
        return self.models[0].model

    @property
    def lora(self) -> LoraConfig:
        """Its low-rank adapters."""
        return self.models[0].lora

    @property
    def optim(self) -> OptimConfig:
        """Its optimizer."""
        assert self.models[0].optim is not None
        return self.models[0].optim

    @property
    def critic(self) -> ModelOnRanks | None:
        """The critic; None without a critic."""
        return next((model for model in self.models[1:] if model.trains), None)

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks."""
        return self.world_size // self.mesh.model_parallel

    @property
    def num_samples(self) -> int:
        """Samples of an optimizer step; a pair of compared answers has two."""
        return self.global_batch * (1 if self.answer_tokens is None else 2)

    @property
    def sample_length(self) -> int:
        """Maximum length of a sample; in reinforcement learning it is padded for context parallelism."""
        if self.rollouts is not None:
            longest = self.rollouts.prompt_tokens + self.rollouts.completion_tokens
            return -(-longest // self.mesh.zigzag) * self.mesh.zigzag
        return self.seq_length if self.answer_tokens is None else self.answer_tokens

    @property
    def num_rollouts(self) -> int:
        """Rollout batches of the whole run."""
        return 0 if self.rollouts is None else -(-self.steps // max(1, self.rollouts.updates))

    @property
    def step_name(self) -> str:
        """Name of an optimizer step, which in reinforcement learning is only a part of a step."""
        return "step" if self.rollouts is None else "update"


def training_of(config: RunConfig, world_size: int) -> Training:
    """Return the training of a checked config on this many ranks: on GPUs unless the config says CPU."""
    trained = ModelOnRanks(name="model", model=config.model, optim=config.optim, lora=config.lora)
    return Training(
        world_size=world_size,
        mesh=config.mesh,
        platform=config.platform.decided(is_cuda=config.platform.device != "cpu"),
        layers=layers_of(config.platform, allows_te=allows_te(config)),
        models=_models_of_rl(config, trained) if isinstance(config, RlRunConfig) else (trained,),
        freezes_router=config.freezes_router,
        seq_length=config.packed_length,
        answer_tokens=config.data.seq_length if isinstance(config, PreferenceRunConfig) else None,
        micro_batch=config.train.micro_batch,
        global_batch=config.train.global_batch,
        steps=config.train.steps,
        checkpoint=config.checkpoint,
        rollouts=_rollouts(config) if isinstance(config, RlRunConfig) else None,
    )


def _models_of_rl(config: RlRunConfig, trained: ModelOnRanks) -> tuple[ModelOnRanks, ...]:
    # The model with the largest activations comes first.
    rl = config.rl
    policy = replace(trained, name="policy", store=rl.update.store, weights_stay=True)
    # Swapped models are the policy's size, with adapters where the policy has them.
    frozen = replace(trained, optim=None, is_swapped=True)
    models = [policy]
    if rl.loss.has_reference:
        models.append(replace(frozen, name="reference", store=rl.loss.reference_store))
    scored = config.model.scored
    if config.critic is not None:
        critic = ModelOnRanks(name="critic", model=scored, optim=config.critic.optim, store=config.critic.store)
        models.append(critic)
    # Assumed to be of the policy's size: their own size is only known when their checkpoints are read.
    models += [
        ModelOnRanks(name=part, model=scored, optim=None, store=rl.reward.model_store) for part in rl.reward.model_parts
    ]
    for path in (path for index, path in enumerate(rl.distill.paths) if index not in rl.distill.served):
        teacher = replace(frozen, name=f"teacher {path}", store=rl.distill.store)
        models.append(teacher if path == SELF else replace(teacher, is_swapped=False, lora=NO_ADAPTERS))
    return tuple(models)


def _rollouts(config: RlRunConfig) -> Rollouts:
    rl, replay = config.rl, config.replay
    has_old_logprobs = rl.update.old_logprobs == "trainer"
    return Rollouts(
        num_completions=config.rollout_size,
        prompt_tokens=rl.prompts.max_tokens,
        completion_tokens=rl.max_completion_tokens,
        engine=rl.engine,
        updates=config.updates_per_rollout,
        epochs=rl.update.epochs,
        critic_epochs=0 if config.critic is None else config.critic_epochs,
        scoring_passes=has_old_logprobs + rl.loss.has_reference + (config.critic is not None),
        routes_per_token=(has_old_logprobs and replay.kind != "r3") + config.wants_engine_routes,
        keeps_router_scores=rl.loss.uses_router_shift,
        route_store=replay.store,
        samples_interval=rl.samples.interval,
    )
