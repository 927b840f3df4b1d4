"""A second, frozen model: between passes its weights are stored in main memory or on the device."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from mcore_rl.checks.model import layer_violations
from mcore_rl.checks.run import refuse
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.config.section import Store
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.megatron.platform import Platform
from mcore_rl.model.adapters import add_adapters
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.rl.types import WaitingBytes
from mcore_rl.storage.checkpoint import check
from mcore_rl.storage.checkpoints.write import load_weights
from mcore_rl.storage.folders import stored_lora
from mcore_rl.train.offload import WaitingMemory, store_on
from mcore_rl.train.state import random_states, restore_random_states


def model_to_freeze(path: Path, policy: ModelConfig) -> ModelConfig:
    """Return the model config of a checkpoint, with the policy's token dispatcher, because it runs on the policy's
    mesh. Raises CheckpointError if the checkpoint is not complete.
    """
    stored = ModelConfig.model_validate_json(json.dumps(check(path).model))
    moe = stored.moe.model_copy(update={"dispatcher": policy.moe.dispatcher})
    return stored.model_copy(update={"moe": moe})


class FrozenModel:
    """A checkpoint's model, sharded over the policy's mesh: no gradients, no optimizer, live routing. Low-rank adapters
    of the checkpoint stay beside its weights, so that nothing of them is rounded away.
    """

    def __init__(
        self,
        model: ModelConfig,
        path: Path,
        mesh: Mesh,
        platform: Platform,
        settings: PlatformConfig,
        *,
        store: Store,
        verify_checksums: bool,
    ) -> None:
        """Collective over the world: build the checkpoint's `model` and load its weights, which are in `store` between
        passes; unless "device", only `installed` brings them to the device. Recomputation in `settings` is ignored.
        Raises ConfigError on all ranks if the checkpoint has low-rank adapters that the run's layers cannot have.
        """
        self._store = store
        settings = settings.model_copy(update={"recompute": "none"})
        lora = stored_lora(path)
        if lora.is_on:
            chosen = settings.model_copy(update={"layers": platform.layers})  # "auto" no more
            refuse(
                [
                    f"{path} has low-rank adapters, and {violation} Or name its weights with the adapters added: "
                    "`mcore-rl convert export --merge`, and import the result."
                    for violation in layer_violations(lora, mesh.config, model, chosen)
                ]
            )
        # Building the model draws random weights; restoring the states keeps them as a resumed run expects them.
        states = random_states()
        self.chunks: list[nn.Module] = build_model(model, mesh, platform, settings)
        if lora.is_on:
            add_adapters(self.chunks, lora, model, seed=0)  # their values are read below
        restore_random_states(states)
        load_weights(self.chunks, mesh, model, path, verify_checksums=verify_checksums)
        device = platform.device
        # The weights never change: they are stored once, and later only the copy on the device is freed.
        self._memory = WaitingMemory(self._tensors, store_on(device, store), device, changes=False)
        self._memory.leave()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the weights are on the device."""
        with self._memory.present():
            yield

    @property
    def waiting_bytes(self) -> WaitingBytes:
        """Bytes of the weights on this rank between passes, by where they are stored."""
        size = sum(tensor.nbytes for tensor in self._tensors())
        return WaitingBytes(**{self._store: size})

    def _tensors(self) -> Iterator[Tensor]:
        for chunk in map(unwrap, self.chunks):
            yield from chunk.parameters()
            yield from chunk.buffers()
