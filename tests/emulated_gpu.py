"""A GPU whose memory is this machine's: tensors that are "on" it call themselves CUDA's and are computed by the CPU.

Emulated are torch's answers about devices, and its rules: the device of every storage is recorded, an operator whose
operands are on two devices fails as it does on a GPU, and the calls for which a host must wait for its GPU are
counted, or fail inside a CUDA graph's capture. A graph's replay runs the captured operators again, on the tensors of
the capture. Real are the numbers, which come from the branches for CUDA of everything above torch's kernels. Not shown
are CUDA's own kernels, their rounding, streams (all is in order here, but a use that did not wait fails), compiled
functions (they run as they are written) and NCCL (gloo takes its place).
"""

import contextlib
import functools
import importlib.machinery
import math
import os
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _device as torch_device
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
GIB = 2**30
PROPERTIES = SimpleNamespace(name="emulated GPU", total_memory=140 * GIB, major=9, minor=0, multi_processor_count=132)
FACTORIES = (
    "tensor empty zeros ones full arange rand randn randint randperm as_tensor linspace "
    "empty_like zeros_like ones_like full_like rand_like randn_like empty_strided"
).split()
METHOD_FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,  # item(), float(), bool(), and torch.tensor of a list of tensors
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.equal.default,
}
"""Operators whose result, or its size, the host must know."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Operators that take indices from the host too, and wait for the number of true values of a mask."""
ANY_DEVICE = {aten.copy_.default, *INDEXING}
# By its file: to import its package is to patch Megatron, for the machine that is not emulated yet.
_STANDINS = Path(__file__).parents[1] / "mcore_rl/megatron/patches/standins.py"
cpu = importlib.machinery.SourceFileLoader("tests.emulated_standins", str(_STANDINS)).load_module()
OURS = ("/mcore_rl/", "/megatron/")


class EmulatedGpu(TorchDispatchMode):
    """Keeps the record of devices, and refuses operators that mix them."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: Counter[str] = Counter()
        """Calls for which a host would wait, by "file:function" of the innermost frame of mcore_rl or Megatron."""
        self.first_call: dict[str, Any] | None = None
        """The first call with which CUDA would start, and the variable that it would read then."""
        self.is_asked_for_a_tensor = False
        """Inside a factory that the program called, with or without a device."""
        self.capturing: EmulatedGraph | None = None
        """The graph that is being captured."""
        self.locked_bytes = 0
        """Page-locked bytes of tensors that the program asked for and still has, each rounded up to a power of two."""
        self.pageable: Counter[str] = Counter()
        """Copies to the GPU from memory that is not page-locked, for which a host waits if they are large, by place."""
        self.streams = [StreamOfGpu(self)]
        """The stream that the host queues on, last; before it those to which it comes back."""
        self.packed_calls = 0
        """Calls of the kernel for packed sequences."""
        self.graphs: list[EmulatedGraph] = []
        """All graphs that were captured."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        operands = list(tensors_of((args, named)))
        known = [tensor for tensor in operands if not hasattr(tensor.untyped_storage(), "anywhere")]
        places = {is_on_gpu(tensor) for tensor in known if tensor.dim() or len(operands) == 1}
        if len(places) == 2 and function not in ANY_DEVICE and "c10d" not in str(function):
            raise RuntimeError(f"{function}: tensors on two devices, {GPU} and {HOST}")
        # A host's scalar joins any tensor; scalars alone are where the first of them is.
        on_gpu = any(places) if places else any(map(is_on_gpu, known))
        if function in (aten.copy_.default, *INDEXING):
            on_gpu = is_on_gpu(operands[0])
        reads = function in READS or by_mask(function, args) or unsized(function, args, named)
        if on_gpu and (reads or expert_by_expert(function, args)):
            self.wait()
        if self.capturing and function is aten.copy_.default and on_gpu and not is_on_gpu(operands[-1]):
            self.refuse_in_capture("a copy from memory that is not page-locked", operands[-1])
        is_asynchronous = function is aten.copy_.default and len(args) > 2 and args[2]
        self.refuse_races(function, operands)
        is_sum = function is aten.cumsum.default and args[0].is_floating_point()
        if on_gpu and is_sum and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        if self.capturing and operands and function._schema.is_mutable:
            self.capturing.save(operands[0])
        result = function(*args, **named)
        if self.capturing and (on_gpu or not operands):
            self.capturing.add(function, args, named, operands, result)
        if not known and not self.is_asked_for_a_tensor:
            # torch itself makes this one, or what it is made of, where it knows all to be: in this machine's memory.
            for tensor in tensors_of(result):
                tensor.untyped_storage().anywhere = True  # type: ignore[attr-defined]
        if on_gpu:
            before = {tensor.untyped_storage()._cdata for tensor in operands}
            for tensor in tensors_of(result):
                if tensor.untyped_storage()._cdata not in before:
                    put_on_gpu(tensor)
                    self.streams[-1].made(tensor)
            # Without `non_blocking` the host waits until the copy is over.
            if is_asynchronous and not is_on_gpu(operands[-1]):
                self.streams[-1].reads(operands[-1])
        elif is_asynchronous and is_on_gpu(operands[-1]):
            self.streams[-1].writes(operands[0])
        return result

    def answer(self, name: str, value: Any, *_: Any, **__: Any) -> Any:
        """Return a fixed answer of torch.cuda; the first that needs CUDA to have started records the environment."""
        if self.first_call is None and name not in ("is_available", "device_count"):
            self.first_call = {"name": name, "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")}
        return value

    def lock(self, tensor: Tensor) -> None:
        """Count page-locked memory until the tensor is gone; torch keeps it then, for the next one."""
        size = 1 << max(0, tensor.nbytes - 1).bit_length()
        self.locked_bytes += size
        weakref.finalize(tensor, self._unlock, size)

    def _unlock(self, size: int) -> None:
        self.locked_bytes -= size

    def wait(self) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {site()} waits for the GPU")
        self.syncs[site()] += 1
        for stream in self.streams:
            stream.is_over()

    def refuse_races(self, function: Any, operands: Sequence[Tensor]) -> None:
        """RuntimeError where a tensor that another stream makes is used before a wait for it, or page-locked memory is
        written that a copy may still read, or read that a copy may still write.
        """
        is_queued = function is aten.copy_.default and any(map(is_on_gpu, operands))
        if not is_queued and any(hasattr(tensor.untyped_storage(), "writer") for tensor in operands):
            raise RuntimeError(f"{function}: {site()} uses what a copy from the GPU may not have written yet")
        for tensor in operands:
            maker = getattr(tensor.untyped_storage(), "maker", None)
            if maker is not None and maker is not self.streams[-1]:
                raise RuntimeError(f"{function}: {site()} uses what another stream may not have made yet")
        reader = getattr(operands[0].untyped_storage(), "reader", None) if operands else None
        if reader and function._schema.is_mutable and not (is_queued and reader is self.streams[-1]):
            raise RuntimeError(f"{function}: {site()} overwrites what a copy to the GPU may not have read yet")

    def refuse_in_capture(self, what: str, source: Tensor | None = None) -> None:
        """RuntimeError while a graph is captured, unless the host's memory `source` is page-locked."""
        if self.capturing is not None and (source is None or not hasattr(source.untyped_storage(), "pinned")):
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}, {site()}")

    @contextmanager
    def capture(self, graph: "EmulatedGraph", **_: Any) -> Iterator[None]:
        """Stand in for `torch.cuda.graph`. What was captured has not been computed: its numbers are made NaN."""
        self.wait()  # torch synchronizes before it captures
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None
        self.graphs.append(graph)
        graph.forget()


class EmulatedGraph:
    """Stand-in for `torch.cuda.CUDAGraph`: the operators that were captured, with their tensors."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Storages that the graph changes and did not make itself, with their bytes before the capture."""
        self.read: set[int] = set()
        """Addresses of the storages that the graph uses and did not make itself."""
        self.replays = 0

    def add(self, function: Any, args: Any, named: Any, operands: Sequence[Tensor], result: Any) -> None:
        """Record an operator that was run, and which of its results are neither views of operands nor these."""
        before = {storage_of(tensor) for tensor in operands}
        self.read |= before - self._made
        outputs = [pair for pair in enumerate(tensors_of(result)) if storage_of(pair[1]) not in before]
        self._made |= {storage_of(tensor) for _, tensor in outputs}
        self._calls.append((function, args, named, outputs))

    def save(self, target: Tensor) -> None:
        """Keep the bytes of a tensor that the next operator changes, as a delta net's state: a capture changes none."""
        storage = target.untyped_storage()
        if storage._cdata not in self._made:
            self._before.setdefault(storage._cdata, (storage, storage.clone()))

    def forget(self) -> None:
        """Overwrite the results that are not whole numbers, and give changed memory its bytes back."""
        with _disable_current_modes(), torch.no_grad():
            for storage, before in self._before.values():
                storage.copy_(before)
            self._before.clear()
            for *_, outputs in self._calls:
                for _, tensor in outputs:
                    if tensor.is_floating_point():
                        tensor.fill_(math.nan)

    def replay(self) -> None:
        """Run the operators again, and store the results where the first ones are."""
        self.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for function, args, named, outputs in self._calls:
                results = list(tensors_of(function(*args, **named)))
                for index, tensor in outputs:
                    tensor.copy_(results[index])


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def active() -> EmulatedGpu | None:
    """Return the GPU that is emulated in this process, if any."""
    modes = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, EmulatedGpu))
    return next(modes, None)


@contextmanager
def counted_syncs() -> Iterator[Counter[str]]:
    """Count the calls inside the context for which the host waits, by the place that `EmulatedGpu.syncs` names.

    Without an emulated GPU nothing is counted.
    """
    syncs: Counter[str] = Counter()
    if gpu := active():
        gpu.syncs = syncs
    yield syncs


def by_mask(function: Any, args: Sequence[Any]) -> bool:
    """Whether `function` indexes by a mask, whose true values are counted first."""
    if function not in INDEXING or not any(i is not None and i.dtype == torch.bool for i in args[1]):
        return False
    # torch turns the assignment of one number of the host into a fill, which needs no count.
    fills = function is not aten.index.Tensor and args[2].numel() == 1 and not is_on_gpu(args[2])
    return not fills


def expert_by_expert(function: Any, args: Sequence[Any]) -> bool:
    """Whether `function` is a product of groups of rows for which torch has no kernel on a GPU."""
    return function is aten._grouped_mm.default and args[0].dtype != torch.bfloat16


def unsized(function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether `function` repeats by a tensor of counts without being given their sum."""
    return function is aten.repeat_interleave.Tensor and named.get("output_size") is None


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor's memory is recorded as the GPU's."""
    if hasattr(tensor, "local_shards"):  # torch's record of the parts of a tensor, which has no memory itself
        return any(is_on_gpu(shard.tensor) for shard in tensor.local_shards())
    return hasattr(tensor.untyped_storage(), "on_gpu")


def put_on_gpu(tensor: Tensor) -> Tensor:
    """Record the tensor's memory as the GPU's."""
    tensor.untyped_storage().on_gpu = True  # type: ignore[attr-defined]
    return tensor


def pinned(tensor: Tensor) -> Tensor:
    """Record the tensor's memory, the host's, as page-locked."""
    tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return tensor


def site() -> str:
    """Return the innermost frame of this package or Megatron, as "file:function"."""
    for frame in reversed(traceback.extract_stack()):
        if any(part in frame.filename for part in OURS) and "/tests/" not in frame.filename:
            return f"{frame.filename.rpartition('/')[2]}:{frame.name}"
    return "elsewhere"


def names_gpu(device: Any) -> bool:
    """Whether a `device` argument is CUDA's; whole numbers are indices of GPUs."""
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


class _OfDevices(type):
    """Lets `isinstance(x, torch.device)` hold for devices."""

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, type(GPU))


class _Device(metaclass=_OfDevices):
    """Stand-in for `torch.device`, which takes a whole number for the index of a GPU only where there is one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        is_index = bool(args) and isinstance(args[0], int)
        return type(GPU)("cuda", *args) if is_index else type(GPU)(*args, **kwargs)


class _Context(torch_device.DeviceContext):
    """Stand-in for what `with torch.device(...)` enters."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type != "cuda":
            return super().__torch_function__(function, types, args, kwargs)
        made = function(*args, **(kwargs or {}))
        is_made_here = function in torch_device._device_constructors() and (kwargs or {}).get("device") is None
        return put_on_gpu(made) if is_made_here else made


def install() -> EmulatedGpu:
    """Emulate a GPU for the rest of this process, before mcore_rl and Megatron are imported."""
    gpu = EmulatedGpu()
    torch_device._device_constructors()  # once, before the constructors have stand-ins
    anything: Any = torch
    torch_device.DeviceContext, anything.device = _Context, _Device  # type: ignore[misc]
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "empty_cache": None,
        "get_device_name": PROPERTIES.name,
        "get_device_capability": (9, 0),
        "get_device_properties": PROPERTIES,
        "mem_get_info": (139 * GIB, 140 * GIB),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "reset_peak_memory_stats": None,
    }
    cuda: Any = torch.cuda
    for name, answer in answers.items():
        setattr(cuda, name, functools.partial(gpu.answer, name, answer))
    cuda.host_memory_stats = lambda: {"allocated_bytes.current": gpu.locked_bytes}
    cuda.is_current_stream_capturing = lambda: gpu.capturing is not None
    cuda.graph, cuda.CUDAGraph, cuda.graph_pool_handle = gpu.capture, EmulatedGraph, _answer
    version: Any = torch.version
    version.cuda = "13.0"
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.default_generators = (torch.default_generator,)
    cuda._lazy_call = lambda function, **_: function()
    cuda._lazy_init = _answer
    default = gpu.streams[0]
    cuda.synchronize = default.synchronize
    cuda.Stream = cuda.Event = type("Stream", (StreamOfGpu,), {"__init__": _stream_of(gpu)})
    cuda.stream = lambda stream: stream or contextlib.nullcontext()
    cuda.current_stream = lambda *_, **__: gpu.streams[-1]
    cuda.default_stream = lambda *_, **__: default
    cuda.nvtx.range_push = cuda.nvtx.range_pop = functools.partial(_answer, None)
    _install_tensors(gpu)
    distributed: Any = dist
    distributed.is_nccl_available = functools.partial(_answer, True)
    cuda.nccl.version = functools.partial(_answer, (2, 28, 9))
    distributed.init_process_group = _gloo_for_nccl(dist.init_process_group)
    distributed.new_group = _gloo_group(dist.new_group)
    distributed.barrier = cpu.plain_barrier(dist.barrier)
    # Compiled functions run as they are written: Megatron's jit_fuser asks for them at its import.
    anything.compile = lambda model=None, **_: model if model is not None else (lambda inner: inner)
    gpu.__enter__()
    return gpu


def _stream_of(gpu: EmulatedGpu) -> Callable[..., None]:
    return lambda self, *_, **__: StreamOfGpu.__init__(self, gpu)


class StreamOfGpu(cpu.Stream):
    """A stream, or an event: what it stands for is computed at once, but nobody may use it before a wait.

    Work of the stream that the host begins with is seen by the others: who queues on them waits for it first.
    """

    def __init__(self, gpu: EmulatedGpu, *_: Any, **__: Any) -> None:
        self._gpu = gpu
        self._made: list[Any] = []
        self._read: list[Any] = []
        self._written: list[Any] = []

    def made(self, tensor: Tensor) -> None:
        """Record memory that is filled on this stream."""
        if self is not self._gpu.streams[0]:
            storage: Any = tensor.untyped_storage()
            storage.maker = self
            self._made.append(storage)

    def reads(self, source: Tensor) -> None:
        """Record memory of the host that a copy on this stream reads; pageable memory has been read by then."""
        storage: Any = source.untyped_storage()
        if hasattr(storage, "pinned"):
            storage.reader = self
            self._read.append(storage)

    def writes(self, target: Tensor) -> None:
        """Record memory of the host that a copy on this stream writes; the host waits for pageable memory."""
        storage: Any = target.untyped_storage()
        if hasattr(storage, "pinned"):
            storage.writer = self
            self._written.append(storage)

    def is_over(self) -> None:
        """The host knows that everything so far is done."""
        self.is_seen()
        for storages, name in ((self._read, "reader"), (self._written, "writer")):
            for storage in storages:
                if hasattr(storage, name):
                    delattr(storage, name)
            storages.clear()

    def query(self) -> bool:
        """Whether the host knows that the copies so far are done."""
        return not any(hasattr(one, "reader") or hasattr(one, "writer") for one in self._read + self._written)

    def is_seen(self) -> None:
        """The stream that the host queues on waits for everything so far."""
        for storage in self._made:
            if hasattr(storage, "maker"):
                del storage.maker
        self._made.clear()

    def __enter__(self) -> cpu.Stream:
        self._gpu.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.streams.pop()

    def wait_stream(self, other: Any) -> None:
        other.is_seen()

    wait_event = wait_stream

    def wait(self, _: Any = None) -> None:
        self.is_seen()

    def record(self, stream: Any = None) -> None:
        """Be an event of a stream's work so far."""
        other = stream or self._gpu.streams[-1]
        self._made, self._read, self._written = (
            list(storages) for storages in (other._made, other._read, other._written)
        )

    def record_event(self, _: Any = None) -> cpu.Stream:
        event = StreamOfGpu(self._gpu)
        event.record(self)
        return event

    def synchronize(self, *_: Any) -> None:
        self._gpu.wait()
        self.is_over()


def _install_tensors(gpu: EmulatedGpu) -> None:
    for name in FACTORIES:
        setattr(torch, name, _placed(getattr(torch, name), gpu))
    tensor: Any = Tensor
    for name in METHOD_FACTORIES:
        setattr(tensor, name, _placed(getattr(tensor, name), gpu))
    move, type_of = tensor.to, cpu.cuda_type_names(tensor.type)
    tensor.to = _moved(move, gpu)
    tensor.cuda = lambda self, *_, **__: self.to(GPU)
    tensor.cpu = lambda self, *_, **__: self.to(HOST)
    plain_type = tensor.type
    tensor.type = lambda self, *args, **kwargs: (type_of if is_on_gpu(self) else plain_type)(self, *args, **kwargs)
    tensor.record_stream = functools.partial(_answer, None)
    tensor.pin_memory = lambda self, *_, **__: pinned(self.clone())
    tensor.is_cuda = property(is_on_gpu)
    tensor.device = property(lambda self: GPU if is_on_gpu(self) else HOST)
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_, **__: self._apply(lambda held: held.to(GPU))
    to_list = tensor.tolist

    def listed(self: Tensor) -> Any:
        if is_on_gpu(self):
            gpu.wait()
        return to_list(self)

    tensor.tolist = listed


def _answer(value: Any = None, *_: Any, **__: Any) -> Any:
    return value


def _placed(factory: Callable[..., Any], gpu: EmulatedGpu) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        device, is_pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if gpu.capturing and names_gpu(device) and factory.__name__ in ("tensor", "as_tensor", "new_tensor"):
            gpu.refuse_in_capture("a copy of the host's numbers")
        if args and isinstance(args[0], (list, tuple)):
            # A tensor made of a list reads each tensor in it.
            for part in tensors_of(args[0]):
                if is_on_gpu(part):
                    gpu.wait()
        outer, gpu.is_asked_for_a_tensor = gpu.is_asked_for_a_tensor, True
        try:
            made = factory(*args, **kwargs)
        finally:
            gpu.is_asked_for_a_tensor = outer
        if is_pinned:
            gpu.lock(pinned(made))
        if device is None or str(device) == "meta":
            return made if device is None else made.to(device)
        if names_gpu(device):
            return put_on_gpu(made)
        # `empty_like` and its kind follow their argument unless they are given a device.
        return made.to(HOST) if is_on_gpu(made) else made

    return build


def _moved(move: Callable[..., Any], gpu: EmulatedGpu) -> Callable[..., Any]:
    @functools.wraps(move)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", None)
        if args and isinstance(args[0], Tensor):
            device, args = args[0].device, (args[0].dtype, *args[1:])
        elif args and isinstance(args[0], (str, int, torch.device)):
            device, args = args[0], args[1:]
        if device is None or str(device) == "meta":
            return move(self, *args, **kwargs) if device is None else move(self, device, *args, **kwargs)
        target, waits = names_gpu(device), not (kwargs.get("non_blocking") or True in args)
        if args and args[0] is None:
            args = args[1:]
        converted = move(self, *args, **kwargs)
        if target == is_on_gpu(self):
            return converted
        if not target and waits:
            gpu.wait()
        if target and self.dim() and not hasattr(self.untyped_storage(), "pinned"):
            gpu.pageable[site()] += 1
        return _Moved.apply(converted, target, not waits)  # type: ignore[no-untyped-call]

    return to


class _Moved(torch.autograd.Function):
    """A copy on the other device, whose gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, to_gpu: bool, non_blocking: bool) -> Tensor:
        ctx.to_gpu = to_gpu
        return _copied(tensor, to_gpu, non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _copied(gradient, not ctx.to_gpu, True), None, None


def _copied(tensor: Tensor, to_gpu: bool, non_blocking: bool) -> Tensor:
    copy = torch.empty_like(tensor)
    storage = copy.untyped_storage()
    if to_gpu:
        put_on_gpu(copy)
        if gpu := active():
            gpu.streams[-1].made(copy)
    else:
        for name in ("on_gpu", "maker"):
            if hasattr(storage, name):
                delattr(storage, name)
    copy.copy_(tensor, non_blocking)
    return copy


def _gloo_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return new_group(*args, backend="gloo" if backend == "nccl" else backend, **options)

    return create


def _gloo_for_nccl(init: Callable[..., Any]) -> Callable[..., Any]:
    def join(backend: str, **options: Any) -> Any:
        return init("gloo", **{name: value for name, value in options.items() if name != "device_id"})

    return join
