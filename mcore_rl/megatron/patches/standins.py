"""Replacements for `torch.cuda`'s and gloo's functions without CUDA, and for TransformerEngine's or apex's Adam and
norm.
"""

import contextlib
import functools
import inspect
import mmap
import os
import resource
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")


class Stream:
    """A CUDA stream or event on a CPU, where program order is already total: every wait is over at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, _: Any = None) -> None:
        """Nothing to wait for, or to record."""

    wait_stream = wait_event = synchronize = record = wait

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


# torch's compiler looks functions up by identity: each symbol gets a function of its own.
def nothing(_: Any) -> Callable[..., None]:
    """A replacement that does nothing."""
    return lambda *args, **kwargs: None


def current_device(_: Any) -> Callable[..., torch.device]:
    """A replacement that always answers the CPU."""
    return lambda *args, **kwargs: CPU


def get_rng_state(_: Any) -> Callable[..., Tensor]:
    """A replacement that answers the state of the CPU's generator, the only one."""
    return lambda *args, **kwargs: torch.get_rng_state()


def set_rng_state(_: Any) -> Callable[..., None]:
    """A replacement that sets the state of the CPU's generator, the only one."""
    return lambda state, *args, **kwargs: torch.set_rng_state(state)


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
    """`Tensor.type` with the names that Megatron's optimizer compares with `torch.cuda.FloatTensor` and others."""

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
            # When a message wakes the listener, the thread on its core comes first, for its turn: the listener polls
            # while that thread has its connection's lock, and with few cores it took the thread's core. A sandbox that
            # forbids it has slower ranks, with the same results.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        return found

    class OnOneDevice(gloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._devices, options._timeout = devices(), timeout
            options._threads = 2 * len(options._devices)
            _try_threads(options._threads)
            super().__init__(store, rank, size, options)

    return OnOneDevice


def _try_threads(number: int) -> None:
    # OSError or RuntimeError where this process gets no more threads: gloo's constructor would hang there for ever, and
    # so would Python's start of a thread that gets its stack and nothing beyond it.
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    room = number * (stack if stack != resource.RLIM_INFINITY else 8 << 20) + (16 << 20)
    mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(number)]
    try:
        for thread in threads:
            thread.start()
    finally:
        ended.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _threads() -> set[int]:
    # The kernel's numbers; none if the system is not Linux.
    return {int(path.name) for path in Path("/proc/self/task").glob("*")}


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


MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "master_param"
"""Name of a weight's fp32 copy among its states, if the optimizer rather than Megatron has it."""


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101, or Adam with L2 if not `adam_w_mode`) by torch's fused kernel.

    The step count is in the parameter group, as with TransformerEngine's and apex's FusedAdam, so that checkpoints are
    the same; Megatron's DistributedOptimizer cannot load torch.optim.AdamW's step per parameter. With `master_weights`
    a 16-bit parameter has an fp32 copy, moments wait in the given dtypes, and gradients are read from `decoupled_grad`.
    """

    # The functions below the decorator that keeps them out of compiled code: its first call imports torch._dynamo, a
    # fifth of a rank's work before its first step, and no step is compiled.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    _load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        assert not capturable, "for CUDA graphs, which need TransformerEngine's or apex's"
        assert master_weight_dtype == torch.float32 and not store_param_remainders, "fp32 copies are whole"
        assert master_weights == use_decoupled_grad, "Megatron sets both or none"
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, MAIN: master_weight_dtype}

    def initialize_state(self, param: Tensor, *_: Any) -> None:
        """Set the moments of `param` to zero, and make its fp32 copy if this optimizer has them."""
        for name in MOMENTS:
            self.state[param][name] = torch.zeros_like(param, dtype=self._dtypes[name])
        if self.master_weights:
            self.state[param][MAIN] = param.detach().clone().float()

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """Return a state of `param` in fp32: the tensor itself if it is in fp32."""
        state: Tensor = self.state[param][name]
        return state.float()

    def set_scaled_state(self, param: Tensor, name: str, values: Tensor) -> None:
        """Set a state of `param` to fp32 `values`, rounded to its dtype."""
        state = self.state[param]
        if name not in state or state[name].dtype != self._dtypes[name]:
            state[name] = torch.empty_like(param, dtype=self._dtypes[name])
        state[name].copy_(values)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of an optimizer with any of the dtypes."""
        self._load_state_dict(state_dict)
        if not self.master_weights:
            return
        # torch gives each state the dtype of its parameter, in which the fp32 copy would be the parameter again.
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for param, key in zip(params, keys, strict=True):
            for name, values in state_dict["state"].get(key, {}).items():
                self.set_scaled_state(param, name, values)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, once."""
        assert closure is None
        fused = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            # Also for a group that is empty on this rank: the count is saved and must agree between ranks.
            group["step"] = int(group.get("step", 0)) + 1
            name = "decoupled_grad" if self.master_weights else "grad"
            params = [param for param in group["params"] if getattr(param, name, None) is not None]
            if not params:
                continue
            for param in params:
                if "exp_avg" not in self.state[param]:
                    self.initialize_state(param)
            settings = {
                "amsgrad": False,
                "lr": float(group["lr"]),
                "beta1": group["betas"][0],
                "beta2": group["betas"][1],
                "weight_decay": group["weight_decay"],
                "eps": group["eps"],
                "maximize": False,
            }
            # The fused kernel reads the count from a tensor and does not change it, so that all parameters can share
            # it.
            step = torch.full((), float(group["step"]), device=params[0].device)
            if self.master_weights:
                for param in params:
                    self._step_in_fp32(fused, param, step, settings)
                continue
            fused(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [step] * len(params),
                **settings,
            )

    def _step_in_fp32(self, fused: Callable[..., None], param: Any, step: Tensor, settings: dict[str, Any]) -> None:
        # The fp32 copy comes first, then the parameter: only a single parameter has moments in fp32 at a time.
        state = self.state[param]
        moments = [self.get_unscaled_state(param, name) for name in MOMENTS]
        mean, squares = moments
        fused([state[MAIN]], [param.decoupled_grad.float()], [mean], [squares], [], [step], **settings)
        for name, moment in zip(MOMENTS, moments, strict=True):
            self.set_scaled_state(param, name, moment)
        param.copy_(state[MAIN])


def norm_of_tensors(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Replacement for `multi_tensor_l2norm`: norm of all tensors of the only list together, float32 `[1]`."""
    (tensors,) = tensor_lists
    assert not per_tensor, "Megatron asks for the norm of all"
    # A norm in the gradients' bf16 would have two digits.
    dtype = None if tensors[0].dtype == torch.float32 else torch.float32
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
    return torch.linalg.vector_norm(norms, dtype=torch.float32).view(1), None
