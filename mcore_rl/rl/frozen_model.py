"""A model beside the policy that is not trained: its weights wait in main memory, or on the device, between passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from mcore_rl.backend.platform import Platform
from mcore_rl.checkpoint.weights import load_weights
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.train.random_states import random_states, restore_random_states


class FrozenModel:
    """A model of a checkpoint, cut over the policy's mesh: no gradients, no optimizer, live routing."""

    def __init__(
        self,
        model: ModelConfig,
        path: Path,
        config: RlRunConfig,
        mesh: Mesh,
        platform: Platform,
        *,
        waits_on_host: bool,
    ) -> None:
        """Collective over the world: build the model and load its weights.

        Args:
            model: the model of the checkpoint.
            path: the checkpoint.
            config: the run's config.
            mesh: the policy's mesh.
            platform: the platform of this rank.
            waits_on_host: whether the weights are on the device in `installed` only.
        """
        self._device = platform.device
        self._waits_on_host = waits_on_host
        settings = config.platform.model_copy(update={"recompute": "none"})
        # Its weights are drawn before they are loaded, from the states that a resumed run would find otherwise.
        states = random_states()
        self.chunks: list[nn.Module] = build_model(model, mesh, platform, settings)
        restore_random_states(states)
        load_weights(self.chunks, mesh, model, path, verify_checksums=config.checkpoint.verify_checksums)
        if waits_on_host:
            self._move(torch.device("cpu"))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the weights on the device inside, wherever they wait."""
        if self._waits_on_host:
            self._move(self._device)
        try:
            yield
        finally:
            if self._waits_on_host:
                self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for chunk in map(unwrap, self.chunks):
            for tensor in (*chunk.parameters(), *chunk.buffers()):
                tensor.data = tensor.data.to(device)
