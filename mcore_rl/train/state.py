"""State of a training run between steps."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_rl.config.run import RunConfig
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform
from mcore_rl.metrics.performance import Timers
from mcore_rl.train.offload import Residence


def random_states() -> dict[str, Any]:
    """Return copies of the states of all random generators that training may use, as tensors and plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore states that `random_states` returned on the same rank of the same mesh."""
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


@dataclass(kw_only=True, slots=True)
class Progress:
    """Progress of the run; saved with every checkpoint."""

    step: int = 0
    """Number of optimizer steps, taken or skipped."""
    consumed_samples: int = 0
    """Sequences read from the training set: the position in the data."""
    consumed_tokens: int = 0
    """Tokens that counted in the loss."""
    consumed_prompts: int = 0
    """Prompts used by rollouts: the position in the prompts for reinforcement learning."""
    skipped_steps: int = 0
    """Steps skipped because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    """Consecutive skipped steps until now."""
    kl_coeff: float | None = None
    """Coefficient of the KL to the reference, as adapted by rl.loss.kl_target; None: use the config's."""
    reward_moments: dict[str, list[float]] = field(default_factory=dict)
    """Count, mean and sum of squared differences of each reward model's scores."""
    disagreement_limits: list[float] = field(default_factory=list)
    """Limit of each layer, measured by replay.max_disagreement="auto"; empty before the measurement."""


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Model, optimizer and schedule on this rank, and the progress of the run."""

    config: RunConfig
    platform: Platform
    mesh: Mesh
    chunks: list[DistributedDataParallel]
    """Parts of the model on this rank, in pipeline order."""
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    progress: Progress
    timers: Timers
    residence: Residence
    """Which of the model's buffers are on the device."""
    critic: "TrainState | None" = None
    """Critic that is trained together with this model on the same mesh and saved with it, if any. Its `progress` counts
    its own optimizer steps."""

    @property
    def residences(self) -> list[Residence]:
        """Memory of this model and, if any, of the critic."""
        return [self.residence, *([] if self.critic is None else [self.critic.residence])]
