"""The platform of this rank: CPU with gloo or CUDA with NCCL, chosen once and named in the log."""

import datetime
import os
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from mcore_rl.backend import batch_invariant, flight_recorder
from mcore_rl.backend.cpu import kernels as cpu_kernels
from mcore_rl.backend.cpu.choice import choose
from mcore_rl.backend.cpu.kernels import CpuKernels
from mcore_rl.backend.launcher import rank_of_launcher, world_size_of_launcher
from mcore_rl.backend.patches.table import FOUND  # first: torch and Megatron are patched
from mcore_rl.backend.patches.versions import megatron_version
from mcore_rl.backend.varlen import kernel_found
from mcore_rl.config.run import PlatformConfig
from mcore_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """The device, numeric type and kind of layers of this process, and its place in the world."""

    device: torch.device
    dtype: torch.dtype
    layers: Literal["torch", "te"]
    rank: int
    local_rank: int
    world_size: int
    deterministic: bool
    kernels: CpuKernels | None = None
    """Libraries of products and attention on a CPU, equal on all ranks; None on a GPU."""
    kernels_chosen: str = ""
    """Sentence on how they were chosen, for the log; empty on a GPU."""

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.device.type == "cuda"

    @property
    def device_bytes(self) -> int | None:
        """Memory of the device; None on a CPU, whose memory all processes share."""
        return int(torch.cuda.get_device_properties(self.device).total_memory) if self.is_cuda else None

    def describe(self) -> str:
        """One line for the log."""
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else "CPU"
        layers = "TransformerEngine" if self.layers == "te" else "torch"
        adam = f"{adam_package()}'s fused Adam"
        kernel = kernel_found() if self.is_cuda and self.layers == "torch" else None
        return (
            f"{self.world_size} x {name}, {'NCCL' if self.is_cuda else 'gloo'}, {self.dtype}, {layers} layers, "
            f"{adam}, torch {torch.__version__}, megatron-core {megatron_version()}"
            + (f", {self.kernels_chosen}" if self.kernels_chosen else "")
            + (f", packed sequences by {kernel.name}" if kernel else "")
        )


def start(config: PlatformConfig) -> Platform:
    """Collective over the world: the process group is up and the device chosen; ConfigError before that."""
    device_type = _device_type(config)
    layers = _layers(config)
    rank, world_size = rank_of_launcher(), world_size_of_launcher()
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    flight_recorder.arm()
    if config.deterministic:
        _be_deterministic(device_type)
    if config.batch_invariant:
        batch_invariant.switch_on(is_cuda=device_type == "cuda", is_deterministic=config.deterministic)
    if not dist.is_initialized():
        _join(device, rank, world_size, config.timeout_s)
    kernels, chosen = (None, "") if device_type == "cuda" else choose(config, world_size)
    if kernels is not None:
        cpu_kernels.use(kernels)
    return Platform(
        device=device,
        dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        layers=layers,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        deterministic=config.deterministic,
        kernels=kernels,
        kernels_chosen=chosen,
    )


def with_kernels(platform: Platform, kernels: CpuKernels, reason: str) -> Platform:
    """Return the platform with other kernels of a CPU, which this process uses from now on."""
    cpu_kernels.use(kernels)
    return replace(platform, kernels=kernels, kernels_chosen=f"{kernels.describe()} ({reason})")


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device_type(config: PlatformConfig) -> Literal["cpu", "cuda"]:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            'platform.device="cuda", but torch sees no GPU here. Use "auto" or "cpu", or mend the driver.'
        )
    if torch.cuda.is_available() and {config.products, config.attention, config.compiled} != {"auto"}:
        raise ConfigError(
            "platform.products, attention and compiled choose among ways to compute on a CPU, and this rank computes "
            'on a GPU. Use "auto" for all three.'
        )
    if config.device == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            'platform.device="cpu" on a machine with GPUs: Megatron is patched for CPU only where torch sees none. '
            "Start with CUDA_VISIBLE_DEVICES= (empty) to hide them."
        )
    return "cuda" if torch.cuda.is_available() else "cpu"


def adam_package() -> str:
    """Return whose Adam Megatron's optimizer uses here."""
    return "TransformerEngine" if FOUND.has_te else "apex" if FOUND.has_apex else "torch"


def variables_of_device() -> dict[str, str]:
    """Return the environment variables that are set among those that decide on threads, queues and allocators."""
    names = (
        "OMP_NUM_THREADS",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    )
    return {name: os.environ[name] for name in names if name in os.environ}


def _layers(config: PlatformConfig) -> Literal["torch", "te"]:
    usable = FOUND.has_te
    reason = FOUND.unusable.get("transformer_engine")
    if config.layers != "torch" and FOUND.has_cuda and reason:
        raise ConfigError(
            f"TransformerEngine is installed, but cannot be used: {reason}. Install the build for torch "
            f'{torch.__version__}, or set platform.layers="torch" to train with this package\'s own layers.'
        )
    if config.layers == "te" and not usable:
        raise ConfigError(
            'platform.layers="te" needs CUDA and the transformer_engine package (pip install "mcore_rl[gpu]"). '
            'Use "torch" or "auto".'
        )
    if config.fp8 != "none" and not (usable and config.layers != "torch"):
        raise ConfigError(
            f'platform.fp8="{config.fp8}" needs TransformerEngine layers on CUDA. Set platform.fp8="none".'
        )
    return "te" if usable and config.layers != "torch" else "torch"


def _be_deterministic(device_type: str) -> None:
    """Ask torch, cuBLAS, NCCL and TransformerEngine for results that do not depend on timing."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if device_type == "cpu":
        # The same where nothing is compiled, without the import of torch's compiler, seconds of a rank's start.
        torch.set_deterministic_debug_mode("error")
    else:
        torch.use_deterministic_algorithms(True)


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
        device_id=device if device.type == "cuda" else None,
    )
