"""Random states of a rank, for an exact resume."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_rl.megatron.mesh import seed_ranks

SEED_DISTANCE = 1_000_003
"""Distance between the seeds of two steps; larger than the seeds' range over ranks, so that no seeds coincide."""


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


def reseed(seed: int, step: int) -> None:
    """Seed a mesh from the seed and the step only, if the checkpoint of `step` has no states for it."""
    seed_ranks(seed + SEED_DISTANCE * (step + 1))
