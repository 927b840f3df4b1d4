"""The section `rl.advantage.critic`: the value model that PPO trains with the policy."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_rl.config.optim import OptimConfig
from mcore_rl.config.section import Section, Store, Text


class CriticConfig(Section):
    """Critic of rl.advantage.kind="gae": a second model, with a single number per token, on the policy's mesh."""

    load: Text | None = None
    """Checkpoint, folder of checkpoints or run that the critic starts from: a reward model with its head, or a language
    model, which gets a new head; `none`: the policy's weights at the start, with a new head."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule, in the critic's own steps: rollout batches x their minibatches x `epochs`."""
    epochs: PositiveInt | Literal["auto"] = "auto"
    """Number of times that the critic is trained on each completion of a rollout batch; `auto`: rl.update.epochs."""
    warmup_rollouts: NonNegativeInt = 0
    """Number of first rollout batches in which only the critic is trained, on returns of the unchanged policy (VC-PPO,
    2503.01491). Their optimizer steps count in train.steps."""
    replay: Literal["none", "r2"] = "none"
    """Routes of the critic's updates; `r2`: recorded in its pass for values; `none`: its routers choose again."""
    store: Store = "device"
    """Memory in which the critic's weights and optimizer state wait between its passes and updates; `host`: main memory
    (on CPUs nothing moves). With `host`, its gradients take memory only during updates."""
    clip_value: PositiveFloat | None = 0.2
    """Distance from the value at the rollout beyond which a new value gains nothing (1707.06347); `none`: no limit."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """Lambda of the returns that the critic learns; `auto`: rl.advantage.gae_lambda, or 1 if that depends on the length
    (VAPO, 2504.05118)."""
