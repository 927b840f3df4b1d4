"""A model beside the policy that is not trained: between passes its weights wait in main memory, in a file, or on the
device.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from mcore_rl.backend.platform import Platform
from mcore_rl.checkpoint.weights import load_weights
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig
from mcore_rl.config.section import Store
from mcore_rl.folders.checkpoint import check
from mcore_rl.model.build import build_model, unwrap
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.types import WaitingBytes
from mcore_rl.train.offload import WaitingMemory, store_on
from mcore_rl.train.random_states import random_states, restore_random_states


def model_to_freeze(path: Path, policy: ModelConfig) -> ModelConfig:
    """Return the model of a complete checkpoint for use beside the policy.

    Its tokens travel to experts as the policy's do, for the mesh and lengths of sequences are the policy's, not those
    that it was trained on.

    Raises:
        CheckpointError: where the checkpoint is not complete.
    """
    stored = ModelConfig.model_validate_json(json.dumps(check(path).model))
    moe = stored.moe.model_copy(update={"dispatcher": policy.moe.dispatcher})
    return stored.model_copy(update={"moe": moe})


class FrozenModel:
    """A model of a checkpoint, cut over the policy's mesh: no gradients, no optimizer, live routing."""

    def __init__(
        self,
        model: ModelConfig,
        path: Path,
        mesh: Mesh,
        platform: Platform,
        settings: PlatformConfig,
        *,
        folder: Path,
        store: Store,
        verify_checksums: bool,
    ) -> None:
        """Collective over the world: build the model and load its weights.

        Args:
            model: the model of the checkpoint.
            path: the checkpoint.
            mesh: the policy's mesh.
            platform: the platform of this rank.
            settings: the section `platform`, of whose recomputation a model without gradients has none.
            folder: a folder for the store "file".
            store: where the weights wait: what is not "device" is on the device in `installed` only.
            verify_checksums: whether the checkpoint's files are compared with their recorded checksums first.
        """
        self._store = store
        settings = settings.model_copy(update={"recompute": "none"})
        # Its weights are drawn before they are loaded, from the states that a resumed run would find otherwise.
        states = random_states()
        self.chunks: list[nn.Module] = build_model(model, mesh, platform, settings)
        restore_random_states(states)
        load_weights(self.chunks, mesh, model, path, verify_checksums=verify_checksums)
        device = platform.device
        # The weights never change: they are stored once, and what is on the device is then forgotten.
        self._memory = WaitingMemory(self._tensors, store_on(device, store), folder, device, changes=False)
        self._memory.leave()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the weights on the device inside, wherever they wait."""
        with self._memory.present():
            yield

    @property
    def waiting_bytes(self) -> WaitingBytes:
        """Bytes of the weights on this rank while they wait for a pass."""
        size = sum(tensor.nbytes for tensor in self._tensors())
        return WaitingBytes(**{self._store: size})

    def _tensors(self) -> Iterator[Tensor]:
        for chunk in map(unwrap, self.chunks):
            yield from chunk.parameters()
            yield from chunk.buffers()
