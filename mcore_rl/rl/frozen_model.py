"""A model beside the policy that is not trained: its weights wait in main memory, or on the device, between passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from mcore_rl.backend.platform import Platform
from mcore_rl.checkpoint.weights import load_weights
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rl_run import RlRunConfig
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.train.random_states import random_states, restore_random_states


class WaitingBytes(NamedTuple):
    """Bytes of models that are not trained, while they wait for their passes."""

    device: int
    host: int


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
        settings = config.platform.model_copy(update={"recompute": "none"})
        # Its weights are drawn before they are loaded, from the states that a resumed run would find otherwise.
        states = random_states()
        self.chunks: list[nn.Module] = build_model(model, mesh, platform, settings)
        restore_random_states(states)
        load_weights(self.chunks, mesh, model, path, verify_checksums=config.checkpoint.verify_checksums)
        self._on_host: list[Tensor] = []
        """Copies in main memory, pinned where the device is CUDA's; empty: the weights stay on the device."""
        if waits_on_host:
            copies = [tensor.data.to("cpu") for tensor in self._tensors()]
            is_cuda = self._device.type == "cuda"
            self._on_host = [copy.pin_memory() if is_cuda else copy for copy in copies]
            self._leave()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the weights on the device inside, wherever they wait."""
        if self._on_host:
            for tensor, copy in zip(self._tensors(), self._on_host, strict=True):
                tensor.data = copy.to(self._device, non_blocking=True)
        try:
            yield
        finally:
            if self._on_host:
                self._leave()

    @property
    def waiting_bytes(self) -> WaitingBytes:
        """Bytes of the weights on this rank while they wait for a pass."""
        size = sum(tensor.nbytes for tensor in self._tensors())
        return WaitingBytes(device=0, host=size) if self._on_host else WaitingBytes(device=size, host=0)

    def _leave(self) -> None:
        # The weights never change: what is on the device is forgotten, not copied back.
        for tensor, copy in zip(self._tensors(), self._on_host, strict=True):
            tensor.data = copy

    def _tensors(self) -> Iterator[Tensor]:
        for chunk in map(unwrap, self.chunks):
            yield from chunk.parameters()
            yield from chunk.buffers()
