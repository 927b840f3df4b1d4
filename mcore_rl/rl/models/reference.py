"""The reference policy: other weights for the policy's own modules, in main memory or on the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mcore_rl.checkpoint.weights import load_weights, save_weights
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.section import Store
from mcore_rl.errors import CheckpointError
from mcore_rl.files import checkpoint_errors_explained
from mcore_rl.folders.checkpoint import delete, saved_steps
from mcore_rl.model.build import settle_weights, unwrap
from mcore_rl.parallel.agree import on_rank_zero
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.rl.models.frozen_model import WaitingBytes


class Reference:
    """Weights that the policy had, swapped into its modules for a pass: a second model would double the memory of the
    device, and its routers would be in the way of replay. Every method is collective over the mesh.

    Where the policy is a frozen base with low-rank adapters, these are copied and swapped alone: both have the base.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        model: ModelConfig,
        folder: Path,
        checkpoints: Path,
        *,
        needed_by: str = "rl.loss.kl_coeff",
        store: Store = "host",
        allowed: tuple[str, ...] = (),
        shares_base: bool = False,
    ) -> None:
        """Copy the policy's weights as they are now.

        Args:
            chunks: The policy's modules on this rank.
            mesh: The mesh.
            model: The model's config.
            folder: Folder of saved references, from which a run that resumes reads them.
            checkpoints: Folder of the run's checkpoints: what each of them needs stays.
            needed_by: The field that asks for it.
            store: Where the copy waits: "host", page-locked where the device is CUDA's, or "device".
            allowed: The config's `checkpoint.allow_changes`, for references that an earlier start has saved.
            shares_base: Whether all that is not trained is the same in the reference, so that it is not copied.
        """
        self.chunks = list(chunks)
        self._needed_by = needed_by
        self._allowed = allowed
        self._mesh, self._model, self._folder, self._checkpoints = mesh, model, folder, checkpoints
        settle_weights(self.chunks)
        self._store, self._shares_base = store, shares_base
        self._weights = [self._copy(tensor) for tensor in self._tensors()]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give the modules the reference's weights inside; they must not be trained there."""
        settle_weights(self.chunks)
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def set(self, step: int) -> None:
        """Make the policy as it is now the reference from `step` on, and save it for a run that resumes."""
        settle_weights(self.chunks)
        for stored, tensor in zip(self._weights, self._tensors(), strict=True):
            stored.copy_(tensor.detach())
        # A run that was killed after this, and resumes from before it, comes here again.
        on_rank_zero(partial(_delete_from, self._folder, step))
        save_weights(self.chunks, self._mesh, self._model, self._folder / _name(step))
        on_rank_zero(partial(forget_references, self._folder, self._checkpoints, step))

    def resume(self, step: int) -> Path:
        """Load the reference that a run at `step` had and return its path; CheckpointError when it is gone."""
        path = on_rank_zero(partial(_newest, self._folder, step, self._needed_by))
        with self.installed():
            load_weights(self.chunks, self._mesh, self._model, path, allowed=self._allowed)
        return path

    @property
    def waiting_bytes(self) -> WaitingBytes:
        """Bytes of the reference's weights on this rank."""
        return WaitingBytes(**{self._store: sum(tensor.nbytes for tensor in self._weights)})

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._store == "device":
            return tensor.detach().clone()
        copy = tensor.detach().to("cpu", copy=True)
        return copy.pin_memory() if tensor.is_cuda else copy

    @torch.no_grad()
    def _swap(self) -> None:
        # One tensor at a time, so that no second set of weights is on the device.
        for stored, tensor in zip(self._weights, self._tensors(), strict=True):
            other = tensor.detach().clone()
            tensor.copy_(stored)
            stored.copy_(other)

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the weights, and the buffers that decide the output too: the routers' expert biases."""
        for chunk in self.chunks:
            model = unwrap(chunk)
            if self._shares_base:
                yield from (param for param in model.parameters() if param.requires_grad)
                continue
            yield from model.parameters()
            yield from (buffer for buffer in model.buffers() if buffer.is_floating_point())


def _name(step: int) -> str:
    return f"step_{step:07d}"


def _steps(folder: Path) -> list[int]:
    with checkpoint_errors_explained(folder, "reading"):
        return sorted(int(entry.name[5:]) for entry in folder.glob("step_*") if entry.name[5:].isdecimal())


def _newest(folder: Path, step: int, needed_by: str) -> Path:
    steps = [saved for saved in _steps(folder) if saved <= step]
    if not steps:
        raise CheckpointError(
            f"{folder} holds no reference policy of step {step} or before, which {needed_by} needs. Start the run "
            "anew in another run_dir, from the weights that were the reference (checkpoint.load)"
        )
    return folder / _name(steps[-1])


def _delete_from(folder: Path, step: int) -> None:
    delete([folder / _name(later) for later in _steps(folder) if later >= step])


def forget_references(folder: Path, checkpoints: Path, step: int) -> None:
    """Delete the references before that of `step` but for those that a run needs which resumes from a checkpoint."""
    with checkpoint_errors_explained(checkpoints, "reading"):
        resumable = saved_steps(checkpoints)
    saved = _steps(folder)
    # A checkpoint needs the newest reference that is not after it.
    needed = {max((old for old in saved if old <= at), default=step) for at in resumable}
    delete([folder / _name(old) for old in saved if old < step and old not in needed])
