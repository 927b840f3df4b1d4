"""Copies from main memory to a GPU for which nobody waits but the GPU's own queues."""

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, by way of page-locked memory where it goes from a CPU to a GPU.

    From other memory a copy of more than 64 KiB waits until the GPU has done all that it was asked for before. torch
    does not use the page-locked memory again before the copy is over.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Ahead:
    """Tensors that a GPU prepares on a stream of their own while it computes on earlier tensors.

    Whoever uses one makes the GPU wait for it by an event; the host goes on. On a CPU a tensor is made when it is
    used.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Begin to make a tensor after all work that the GPU has been asked for; the result returns it for use."""
        if self._stream is None:
            return make
        # What `make` reads on the device may not be computed yet.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            made = make()
            is_made = self._stream.record_event()

        def use() -> Tensor:
            using = torch.cuda.current_stream()
            using.wait_event(is_made)
            # Its memory belongs to the other stream, which must not use it again before this one is done with it.
            made.record_stream(using)
            return made

        return use
