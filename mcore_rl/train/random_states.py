"""The random states of a rank, for an exact resume."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_rl.parallel.mesh import seed_ranks

APART = 1_000_003
"""More than the seeds of one start lie apart from each other, so that a re-seed meets none of them."""


def random_states() -> dict[str, Any]:
    """Copies of every generator's state that training may draw from, as tensors and plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on from what `random_states` returned on the same place of the same mesh."""
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def reseed(seed: int, step: int) -> None:
    """States for a mesh that the checkpoint of `step` has none for: they follow from the seed and the step alone."""
    seed_ranks(seed + APART * (step + 1))
