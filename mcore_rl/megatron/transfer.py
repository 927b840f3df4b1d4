"""Copies from main memory to a GPU that only the GPU's own queues wait for."""

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, through page-locked memory if it goes from a CPU to a GPU.

    A copy of more than 64 KiB from other memory waits until the GPU has finished all earlier work. torch does not reuse
    the page-locked memory before the copy is over.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Ahead:
    """Tensors that a GPU prepares on their own stream while it computes on earlier tensors.

    Using a tensor makes the GPU wait for it by an event; the host continues. On a CPU a tensor is made when it is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Begin to make a tensor after all work that the GPU has been given so far; the result returns it for use."""
        if self._stream is None:
            return make
        # The inputs of `make` on the device may not be computed yet.
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
