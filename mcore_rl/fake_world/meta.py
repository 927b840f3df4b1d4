"""`on_meta`: allocate tensors with their shapes but without memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

META = torch.device("meta")


@contextmanager
def on_meta() -> Iterator[None]:
    """Put every new tensor on `meta`, whatever device it is asked for."""
    with _OnMeta():
        yield


class _OnMeta(TorchFunctionMode):
    """Put tensors on `meta` even for factories that are given a device, as Megatron's are: the context of
    `torch.device("meta")` leaves those alone.

    FakeTensorMode would do as well, but cannot exchange the data of a parameter, as the cast to 16 bits does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factories: frozenset[Any] = frozenset(_device_constructors())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with its device replaced."""
        named = dict(kwargs or {})
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return args[0]
        if func in self.factories or "device" in named:
            named["device"] = META
        elif func is torch.Tensor.to:
            args = tuple(META if isinstance(argument, torch.device) else argument for argument in args)
        result = func(*args, **named)
        if isinstance(result, str) and getattr(func, "__name__", "") == "type":
            # The distributed optimizer knows kinds of tensors by these names.
            return result.replace(".meta.", ".")
        return result
