"""Replacements for the functions of `torch.cuda` and of gloo that Megatron calls, for machines without CUDA."""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


class Stream:
    """A CUDA stream or event on a CPU, where program order is already total: every wait is over at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait_stream(self, _: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, _: Any) -> None:
        """Nothing to wait for."""

    def wait(self, _: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record(self, _: Any = None) -> None:
        """Nothing to record."""

    def record_event(self, _: Any = None) -> "Stream":
        """An event that has happened."""
        return Stream()

    def query(self) -> bool:
        """Whether all work is done."""
        return True


def as_cpu(device: Any) -> Any:
    """`device`, with any spelling of CUDA turned into the CPU."""
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


def nothing(_: Any) -> Callable[..., None]:
    """A replacement that does nothing."""
    return lambda *args, **kwargs: None


def constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """A replacement that always answers `value`."""
    return lambda _: lambda *args, **kwargs: value


def same_tensor(_: Any) -> Callable[..., Any]:
    """A replacement for `.cuda()`: the object itself."""
    return lambda self, *args, **kwargs: self


def null_stream_context(_: Any) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """A replacement for `torch.cuda.stream`."""
    return lambda stream=None: contextlib.nullcontext()


def current_stream(_: Any) -> Callable[..., Stream]:
    """A replacement that always answers the one stream."""
    stream = Stream()
    return lambda *args, **kwargs: stream


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.empty` and similar functions, with `device="cuda"` read as the CPU and no pinned memory."""

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = as_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return build


def moved_to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to`, with a CUDA device read as the CPU."""

    @functools.wraps(to)
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (as_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = as_cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    return move


def cuda_type_names(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type` that returns the name that Megatron's optimizer compares with `torch.cuda.FloatTensor` and similar
    types.
    """

    @functools.wraps(type_of)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = type_of(self, *args, **kwargs)
        if isinstance(name, str) and name.startswith("torch.") and not name.startswith("torch.cuda."):
            return "torch.cuda." + name.removeprefix("torch.")
        return name

    return type_


def listed_splits(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """`all_to_all_single` that takes splits as tensors too; Megatron turns them into lists only on CUDA."""

    def listed(splits: Any) -> Any:
        return splits.tolist() if isinstance(splits, torch.Tensor) else splits

    @functools.wraps(all_to_all_single)
    def exchange(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return all_to_all_single(output, input, listed(output_split_sizes), listed(input_split_sizes), **kwargs)

    return exchange


def on_one_device(gloo: Any) -> Any:
    """`ProcessGroupGloo` that lets all groups share the process's sockets and the thread that listens to them."""

    @functools.cache
    def devices() -> list[Any]:
        names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        before = _threads()
        found = [gloo.create_device(interface=name) if name else gloo.create_default_device() for name in names]
        for thread in _threads() - before:
            _let_others_finish(thread)
        return found

    class OnOneDevice(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout = devices(), timeout
            options._threads = 2 * len(options._devices)
            super().__init__(store, rank, size, options)

    return OnOneDevice


def _threads() -> set[int]:
    """Return the threads of this process by the kernel's numbers; none if the system is not Linux."""
    return {int(path.name) for path in Path("/proc/self/task").glob("*")}


def _let_others_finish(thread: int) -> None:
    """When a message wakes gloo's listener, let the thread on its core wait or use up its turn first.

    The listener asks again and again for a message while another thread has the lock of its connection. With fewer
    cores than working threads, it took the core of that very thread, in the middle of a write.
    """
    # A sandbox that forbids it has slower ranks, with the same results.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def uneven_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather` of tensors that may differ in their first size, which gloo refuses; expert TP x EP needs it."""

    @functools.wraps(all_gather)
    def gather(
        tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = [part.shape[0] if part.dim() else 1 for part in tensor_list]
        if len(set(rows)) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "an uneven all_gather on gloo is synchronous"
        copies = tensor.repeat(len(rows), *[1] * (tensor.dim() - 1))
        gathered = tensor.new_empty(sum(rows), *tensor.shape[1:])
        dist.all_to_all_single(gathered, copies, rows, [tensor.shape[0]] * len(rows), group=group)
        for part, received in zip(tensor_list, gathered.split(rows), strict=True):
            part.copy_(received)
        return None

    return gather


def plain_barrier(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """`barrier` without `device_ids`, which gloo refuses."""

    @functools.wraps(barrier)
    def wait(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    return wait
