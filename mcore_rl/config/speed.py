"""The flags that change a run's speed but not its results: the resolution of "auto" on a machine."""

from dataclasses import dataclass, replace
from typing import Literal

from mcore_rl.config.mesh import MeshConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.run import PlatformConfig, RunConfig

Kernel = Literal["permute", "router", "weight gradient"]
"""A fused kernel that may be installed or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Properties of the machine that flags set to "auto" depend on."""

    is_cuda: bool
    has_te_layers: bool
    world_size: int
    kernels: frozenset[Kernel] = frozenset()
    capability: int | None = None
    """Major compute capability of the GPU: 9 is Hopper, 10 and 12 are Blackwell; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedFlags:
    """The flags of a run with "auto" resolved, named as the fields of the config."""

    overlap_grad_reduce: bool
    overlap_param_gather: bool
    overlap_shared_experts: bool
    permute_fusion: bool
    router_fusion: bool
    cross_entropy_fusion: Literal["none", "native", "te"]
    weight_gradient_fusion: bool
    fp8_recipe: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"]
    gc_interval: int | None = None

    def describe(self) -> str:
        """Return a line for the log: the flags that are on, then the flags that are off."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        on = [
            name if value is True else f"{name}={value}"
            for name, value in values.items()
            if value not in (False, "none", None)
        ]
        off = [name for name, value in values.items() if value in (False, "none", None)]
        return f"speed: on: {', '.join(on) or 'nothing'}; off: {', '.join(off) or 'nothing'}"


def speed_flags(
    platform: PlatformConfig,
    mesh: MeshConfig,
    model: ModelConfig,
    machine: Machine,
    *,
    unfuses_router: bool = False,
    trains_mtp: bool = True,
) -> SpeedFlags:
    """Return the flags of a model on a machine. `unfuses_router`: the program reads or imposes the routers' choices,
    which a fused router hides; `trains_mtp`: passes go through the MTP layers.
    """
    te, kernels = machine.has_te_layers, machine.kernels
    gather, reduce = mesh.overlap_param_gather, mesh.overlap_grad_reduce
    if reduce == "auto":
        # Megatron's overlap waits for a gradient of every weight. With several stages, the last has a copy of the
        # embedding for the multi-token-prediction layers, which gets no gradient without a pass through them.
        never_ends = mesh.pp > 1 and model.mtp_layers > 0 and not trains_mtp
        # Without weights that other ranks have too, no gradients are summed.
        fewest = min(mesh.tp, mesh.etp * mesh.ep) if model.is_moe else mesh.tp
        has_copies = machine.world_size > fewest * mesh.pp
        reduce = gather is True or (machine.is_cuda and has_copies and not never_ends)
    if gather == "auto":
        gather = machine.is_cuda and reduce
    fusion = platform.cross_entropy_fusion
    if fusion == "auto":
        # Megatron's kernel computes in fp32 and gives the logits a bf16 gradient, whatever their type.
        fusion = "native" if te and platform.precision == "bf16" else "none"
    recipe = platform.fp8_recipe
    if recipe == "auto":
        capability = machine.capability or 0
        recipe = "mxfp8" if capability >= 10 else "blockwise" if capability == 9 else "tensorwise"

    def has(kernel: Kernel, setting: bool | Literal["auto"]) -> bool:
        return te and kernel in kernels if setting == "auto" else setting

    return SpeedFlags(
        overlap_grad_reduce=reduce,
        overlap_param_gather=gather,
        overlap_shared_experts=mesh.overlap_shared_experts,
        permute_fusion=model.is_moe and has("permute", platform.permute_fusion),
        router_fusion=model.is_moe and not unfuses_router and has("router", platform.router_fusion),
        cross_entropy_fusion=fusion,
        weight_gradient_fusion=has("weight gradient", platform.weight_gradient_fusion),
        fp8_recipe="none" if platform.fp8 == "none" else recipe,
    )


def planned_flags(
    platform: PlatformConfig, mesh: MeshConfig, model: ModelConfig, world_size: int, *, trains_mtp: bool
) -> SpeedFlags:
    """Return the flags that a plan assumes: GPUs without optional packages, unless the run wants CPUs."""
    machine = Machine(is_cuda=platform.device != "cpu", has_te_layers=platform.layers == "te", world_size=world_size)
    return speed_flags(platform, mesh, model, machine, trains_mtp=trains_mtp)


def run_flags(config: RunConfig, machine: Machine) -> SpeedFlags:
    """Return the flags of a run on a machine."""
    flags = speed_flags(
        config.platform,
        config.mesh,
        config.model,
        machine,
        unfuses_router=config.unfuses_router,
        trains_mtp=config.trains_mtp,
    )
    interval = config.train.gc_interval
    if interval == "auto":
        interval = config.units_between_collections if machine.is_cuda and machine.world_size > 1 else None
    gathers = flags.overlap_param_gather and config.optim.is_sharded  # otherwise each rank updates all its weights
    return replace(flags, gc_interval=interval, overlap_param_gather=gathers)
