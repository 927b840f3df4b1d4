"""torch's answer that there is a GPU, for as long as TransformerEngine asks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def seeming_gpu() -> Iterator[None]:
    """Let torch answer that there is a GPU, a Hopper, inside the context."""
    cuda: Any = torch.cuda
    before = cuda.is_available, cuda.get_device_capability
    cuda.is_available, cuda.get_device_capability = lambda: True, lambda *_: (9, 0)
    try:
        yield
    finally:
        cuda.is_available, cuda.get_device_capability = before
