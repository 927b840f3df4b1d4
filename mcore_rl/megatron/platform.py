"""The platform of this rank, CPU with gloo or CUDA with NCCL, chosen once and named in the log, and copies to it."""

import datetime
import os
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.run import PlatformConfig, RunConfig
from mcore_rl.errors import ConfigError
from mcore_rl.megatron import batch_invariant
from mcore_rl.megatron.agree import from_every_rank, patience_of
from mcore_rl.megatron.compiled import BuildError, build_id, library
from mcore_rl.megatron.kernels import KERNEL, has_kernel
from mcore_rl.megatron.patches.table import FOUND  # first: torch and Megatron are patched
from mcore_rl.storage.checkpoint import megatron_version, saved_steps
from mcore_rl.workers import flight_recorder
from mcore_rl.workers.launcher import rank_of_launcher, world_size_of_launcher

R = TypeVar("R", bound=RunConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """The device, numeric type and kind of layers of this process, and its place in the world."""

    device: torch.device
    dtype: torch.dtype
    layers: Literal["torch", "te", "cpu"]
    rank: int
    local_rank: int
    world_size: int
    deterministic: bool
    build: str = ""
    """Identity of the build of the compiled layers, equal on all ranks; empty with other layers."""
    reason: str = ""
    """Why a CPU uses the layers of torch; empty if it does not, or was asked to."""
    rounds_products: bool = False
    """`platform.bf16_products`."""

    @property
    def layers_id(self) -> str:
        """Return the layers, and the build of compiled layers: with the same build, sums have the same order."""
        return f"cpu {self.build}" if self.layers == "cpu" else self.layers

    def with_torch_layers(self, reason: str) -> "Platform":
        """Return the platform with the layers of torch instead of compiled layers."""
        return replace(self, layers="torch", build="", reason=reason)

    @property
    def precision(self) -> Literal["bf16", "fp32"]:
        """The numeric type by its name in a config."""
        return "bf16" if self.dtype == torch.bfloat16 else "fp32"

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.device.type == "cuda"

    @property
    def device_bytes(self) -> int | None:
        """Memory of the device; None on a CPU, where all processes share the memory."""
        return int(torch.cuda.get_device_properties(self.device).total_memory) if self.is_cuda else None

    def describe(self) -> str:
        """One line for the log."""
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else "CPU"
        layers = {"te": "TransformerEngine", "torch": "torch", "cpu": f"compiled ({self.build})"}[self.layers]
        rounded = ", products of bf16" if self.rounds_products else ""
        adam = f"{adam_package()}'s fused Adam"
        packs = self.is_cuda and self.layers == "torch" and has_kernel()
        return (
            f"{self.world_size} x {name}, {'NCCL' if self.is_cuda else 'gloo'}, {self.precision}, "
            f"{layers} layers{rounded}, {adam}, torch {torch.__version__}, megatron-core {megatron_version()}"
            + (f", no compiled layers ({self.reason})" if self.reason else "")
            + (f", packed sequences by {KERNEL}" if packs else "")
        )


def decided(config: R) -> R:
    """Return a rank's config with `platform.precision` decided: as the run began that has saved, else by the device."""
    run_dir = Path(config.run_dir)
    if config.platform.precision == "auto" and saved_steps(run_dir / "checkpoints"):
        with suppress(OSError, ValueError, KeyError):  # absent, damaged, or of a version without the field
            began = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))["platform"]["precision"]
            return config.decided(is_cuda=began == "bf16")
    return config.decided(is_cuda=config.platform.device != "cpu" and torch.cuda.is_available())


def start(config: PlatformConfig, *, allows_te: bool = True) -> Platform:
    """Collective over the world: the process group is up, the device and the layers chosen.

    `layers = "auto"` is TransformerEngine's only if `allows_te`. Raises ConfigError if this machine lacks what the
    config asks for.
    """
    device_type = _device_type(config)
    layers = _layers(config, allows_te=allows_te)
    rank, world_size = rank_of_launcher(), world_size_of_launcher()
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    flight_recorder.arm()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        if device_type == "cpu":
            # The same where nothing is compiled, without the import of torch's compiler, seconds of a rank's start.
            torch.set_deterministic_debug_mode("error")
        else:
            torch.use_deterministic_algorithms(True)
    if config.batch_invariant:
        batch_invariant.switch_on(is_cuda=device_type == "cuda", is_deterministic=config.deterministic)
    if not dist.is_initialized():
        _join(device, rank, world_size, config.timeout_s)
        if world_size > 1:
            assert dist.group.WORLD is not None
            patience_of(dist.group.WORLD)
    build, reason = compiled_layers(config, world_size) if device_type == "cpu" else ("", "")
    return Platform(
        device=device,
        dtype=torch.bfloat16 if config.decided(is_cuda=device_type == "cuda").precision == "bf16" else torch.float32,
        layers="cpu" if build else layers,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        deterministic=config.deterministic,
        build=build,
        reason=reason,
        rounds_products=config.bf16_products,
    )


def compiled_layers(config: PlatformConfig, world_size: int = 1) -> tuple[str, str]:
    """Collective over the world: return the build of compiled layers that all ranks have, or "" and the reason.

    The file is built if needed. Raises ConfigError if the config asks for it, and a rank cannot have it.
    """
    is_asked = config.layers == "cpu" or config.bf16_products
    if not is_asked and config.layers != "auto":
        return "", ""
    here = _build(config)
    builds = from_every_rank(here) if world_size > 1 else [here]
    build, reason = builds[0]
    for rank, (rank_build, why) in enumerate(builds):
        if not rank_build:
            build, reason = "", why if world_size == 1 else f"rank {rank}: {why}"
            break
        if rank_build != build:
            build, reason = "", f"rank {rank} has another processor, compiler or version than rank 0"
            break
    if is_asked and not build:
        asked = 'platform.layers="cpu"' if config.layers == "cpu" else "platform.bf16_products=true"
        raise ConfigError(
            f'{asked}, and there are no compiled layers: {reason}. Mend it, or set platform.layers="torch" and '
            "platform.bf16_products=false."
        )
    return build, reason


def _build(config: PlatformConfig) -> tuple[str, str]:
    if config.precision == "bf16":
        return "", "they compute in fp32"
    if config.batch_invariant:
        return "", "platform.batch_invariant=true needs products in tiles"
    if torch.get_num_threads() > 1:
        return ("", f"they compute with one thread, and this rank has {torch.get_num_threads()}; OMP_NUM_THREADS=1")
    try:
        library()
        return build_id(), ""
    except BuildError as error:
        return "", str(error)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device_type(config: PlatformConfig) -> Literal["cpu", "cuda"]:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            'platform.device="cuda", but torch sees no GPU here. Use "auto" or "cpu", or mend the driver.'
        )
    if torch.cuda.is_available() and (config.layers == "cpu" or config.bf16_products):
        asked = 'platform.layers="cpu"' if config.layers == "cpu" else "platform.bf16_products=true"
        raise ConfigError(
            f'{asked} asks for layers that are compiled for CPUs, and this rank computes on a GPU. Use "auto" and '
            "false."
        )
    if config.device == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            'platform.device="cpu" on a machine with GPUs: Megatron is patched for CPU only where torch sees none. '
            "Start with CUDA_VISIBLE_DEVICES= (empty) to hide them."
        )
    return "cuda" if torch.cuda.is_available() else "cpu"


def adam_package() -> str:
    """Return the package with the Adam that Megatron's optimizer uses on this machine."""
    return "TransformerEngine" if FOUND.has_te else "apex" if FOUND.has_apex else "torch"


def variables_of_device() -> dict[str, str]:
    """Return the environment variables that are set among those that decide on threads, queues and allocators."""
    names = ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return {name: os.environ[name] for name in names if name in os.environ}


def _layers(config: PlatformConfig, *, allows_te: bool) -> Literal["torch", "te"]:
    reason = FOUND.unusable.get("transformer_engine")
    wants_te = config.layers == "te" or (config.layers == "auto" and allows_te)
    if wants_te and FOUND.has_cuda and reason:
        raise ConfigError(
            f"TransformerEngine is installed, but cannot be used: {reason}. Install the build for torch "
            f'{torch.__version__}, or set platform.layers="torch" to train with this package\'s own layers.'
        )
    if config.layers == "te" and not FOUND.has_te:
        raise ConfigError(
            'platform.layers="te" needs CUDA and the transformer_engine package. Run pip install --no-build-isolation '
            '"mcore_rl[gpu]", or use "torch" or "auto".'
        )
    if config.fp8 != "none" and not (FOUND.has_te and wants_te):
        raise ConfigError(
            f'platform.fp8="{config.fp8}" needs TransformerEngine layers on CUDA. Set platform.fp8="none".'
        )
    return "te" if FOUND.has_te and wants_te else "torch"


def _join(device: torch.device, rank: int, world_size: int, timeout_s: float) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if world_size == 1:
        os.environ.setdefault("MASTER_PORT", "0")
    elif "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"{world_size} ranks were started without MASTER_PORT: start them with `mcore-rl`, torchrun, or a "
            "job script that exports MASTER_ADDR and MASTER_PORT."
        )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        # Without a device_id: with one, torch makes each later group by a split of the whole world's communicator, a
        # collective that ranks outside of the group take part in too (thousands on a thousand ranks).
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`; from a CPU to a GPU by page-locked memory, so that the host does not wait.

    A copy of more than 64 KiB from other memory waits until the GPU has finished all earlier work.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Ahead:
    """Tensors that a GPU prepares on their own stream while it computes; a CPU makes each when it is used."""

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
