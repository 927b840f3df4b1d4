"""Memory of models that are needed only in some phases of a step, and leave the device between them."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

from mcore_rl.config.section import Store
from mcore_rl.model.build import settle_weights


def store_on(device: torch.device, store: Store) -> Store:
    """Return the store to use: on a CPU, device memory is main memory and "host" moves nothing."""
    return "device" if device.type == "cpu" else store


LEAST_PIECE_BYTES = 2**20
"""Size below which a piece of page-locked memory is not cut further."""


def piece_sizes(num_bytes: int) -> Iterator[int]:
    """Yield sizes that add up to `num_bytes`, powers of two as far as `LEAST_PIECE_BYTES`: torch rounds page-locked
    memory up to one, so that 17 GiB in one piece would take 32.
    """
    while num_bytes > LEAST_PIECE_BYTES:
        piece = 1 << (num_bytes.bit_length() - 1)
        yield piece
        num_bytes -= piece
    if num_bytes:
        yield num_bytes


class StoredBytes:
    """Room for bytes of a device: on it, or in main memory, which is page-locked with CUDA."""

    def __init__(self, num_bytes: int, store: Store, device: torch.device) -> None:
        self.num_bytes = num_bytes
        if store == "device":
            self._pieces = [torch.empty(num_bytes, dtype=torch.uint8, device=device)]
        else:
            pinned, sizes = device.type == "cuda", list(piece_sizes(num_bytes))
            self._pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    def put(self, source: Tensor) -> None:
        """Copy the bytes of a contiguous tensor of the device into it, after the device's earlier work."""
        for piece, part in self._parts(source):
            piece.copy_(part, non_blocking=True)

    def get(self, target: Tensor) -> None:
        """Copy it into a contiguous tensor of the device, after the device's earlier work."""
        for piece, part in self._parts(target):
            part.copy_(piece, non_blocking=True)

    def _parts(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        parts = tensor.view(-1).view(torch.uint8).split([piece.nbytes for piece in self._pieces])
        return zip(self._pieces, parts, strict=True)


class WaitingMemory:
    """Memory of tensors that is on the device only inside `present`. Storages are resized to 0 bytes but kept, so that
    Megatron's views of its flat buffers stay valid.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        store: Store,
        device: torch.device,
        *,
        changes: bool = True,
        is_scratch: bool = False,
    ) -> None:
        """Prepare; nothing moves before `leave`. `tensors` returns the current tensors; those on another device are
        left alone. Unless `changes`, bytes are stored only once; `is_scratch` discards them, as they are written before
        they are read.
        """
        self._tensors, self._store, self._device = tensors, store, device
        self._changes, self._is_scratch = changes, is_scratch
        self._num_users = 0
        self._away: list[tuple[UntypedStorage, int]] | None = None
        """Emptied storages with their sizes; None if they are on the device."""
        self._host: list[StoredBytes] = []
        self.moved_bytes = 0
        """Bytes copied from or to the device since the start."""
        self.moves_s = 0.0
        """Seconds that this took; on CUDA only the host's time to queue copies of page-locked memory."""

    def leave(self) -> None:
        """Store the bytes and free their device memory, unless they are in use or already away."""
        if self._store == "device" or self._away is not None or self._num_users:
            return
        start_s = time.perf_counter()
        by_address: dict[int, UntypedStorage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage.nbytes():
                by_address.setdefault(storage.data_ptr(), storage)
        away = [(storage, storage.nbytes()) for storage in by_address.values()]
        if not self._is_scratch and (self._changes or not self._host):
            sizes = [size for _, size in away]
            self.moved_bytes += sum(sizes)
            if [stored.num_bytes for stored in self._host] != sizes:
                self._host = []  # frees the old bytes first
                self._host = [StoredBytes(size, "host", self._device) for size in sizes]
            for (storage, _), stored in zip(away, self._host, strict=True):
                stored.put(_bytes_of(storage))
        self._away = away
        for storage, _ in away:
            storage.resize_(0)
        self.moves_s += time.perf_counter() - start_s

    @contextmanager
    def present(self) -> Iterator[None]:
        """Context in which the bytes are on the device; it can be nested."""
        if self._away is not None:
            start_s, away = time.perf_counter(), self._away
            for storage, size in away:
                storage.resize_(size)
            self._away = None
            if not self._is_scratch:
                self.moved_bytes += sum(size for _, size in away)
                for (storage, _), stored in zip(away, self._host, strict=True):
                    stored.get(_bytes_of(storage))
            self.moves_s += time.perf_counter() - start_s
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self.leave()


class Residence:
    """Decides which of a trained model's weights, gradients and optimizer state are on the device. Gradients are not
    stored, because each step begins by zeroing them.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        store: Store,
        device: torch.device,
        *,
        weights_stay: bool,
    ) -> None:
        """Move all of it off the device, unless `store` is "device". With `weights_stay` the weights stay, because most
        phases read them.
        """
        store = store_on(device, store)
        self.moves = store != "device"
        """Whether anything leaves the device; otherwise the contexts below do nothing."""
        self._chunks, self._settles = chunks, not weights_stay and self.moves

        def weights() -> Iterator[Tensor]:
            for chunk in chunks:
                yield from chunk.parameters()

        def gradients() -> Iterator[Tensor]:
            for chunk in chunks:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    yield buffer.grad_data

        def state() -> Iterator[Tensor]:
            # In fp32 the optimizer's weights are views of the model's.
            own = {tensor.untyped_storage().data_ptr() for tensor in weights()}
            for part in optimizer.chained_optimizers:
                params = [group["params"] for group in part.optimizer.param_groups]
                entries = [states.values() for states in part.optimizer.state.values()]
                for entry in chain(*params, *entries):
                    if isinstance(entry, Tensor) and entry.untyped_storage().data_ptr() not in own:
                        yield entry

        self._weights = WaitingMemory(weights, "device" if weights_stay else store, device)
        self._state = WaitingMemory(state, store, device)
        self._gradients = WaitingMemory(gradients, store, device, is_scratch=True)
        # The state before the weights, which it compares with to find its own tensors.
        for part in (self._gradients, self._state, self._weights):
            part.leave()

    def for_passes(self) -> AbstractContextManager[None]:
        """Context in which the weights are on the device."""
        return self._weights.present()

    @contextmanager
    def for_saving(self) -> Iterator[None]:
        """Context in which weights and optimizer state are on the device."""
        with self._weights.present(), self._state.present():
            yield

    @contextmanager
    def for_updates(self) -> Iterator[None]:
        """Collective over the data-parallel ranks: context with weights, gradients and optimizer state on device."""
        with self._weights.present(), self._state.present(), self._gradients.present():
            yield
            if self._settles:
                # Weights that Megatron would gather in the next forward pass must be complete before they leave.
                settle_weights(self._chunks)

    def take_moves(self) -> tuple[int, float]:
        """Return the bytes moved since the last call and the seconds that this took."""
        parts = (self._weights, self._state, self._gradients)
        moves = sum(part.moved_bytes for part in parts), sum(part.moves_s for part in parts)
        for part in parts:
            part.moved_bytes, part.moves_s = 0, 0.0
        return moves


@contextmanager
def all_present(residences: Iterable[Residence]) -> Iterator[None]:
    """Context with several models' weights and optimizer state on the device, to save or load them."""
    with ExitStack() as stack:
        for residence in residences:
            stack.enter_context(residence.for_saving())
        yield


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
