"""Every patch of torch and Megatron-Core that this code needs, with its symbol, versions, reason and end.

Importing this module applies them, once, and must come before any `import megatron`: the packages that use
Megatron import it first in their `__init__`. With CUDA present only the patches marked `CUDA_TOO` are applied.
"""

import functools
import importlib
import logging
import queue
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.backend.adam import FusedAdam
from mcore_rl.backend.cpu import torch_standins as cpu
from mcore_rl.backend.cpu.megatron_speed import REPLACEMENTS
from mcore_rl.backend.patches import replacements
from mcore_rl.backend.patches.mtp_loss import mtp_losses_as_sums
from mcore_rl.backend.patches.optimizer_state import state_by_parameter
from mcore_rl.backend.patches.shard_checks import find_overlap_on_grid, validate_plan_on_grid
from mcore_rl.errors import ConfigError

SUPPORTED = ("0.16", "0.19")
CPU_ONLY, CUDA_TOO = "cpu", "cpu and cuda"
STANDS_IN = "Megatron asks torch.cuda whatever the device"
DEVICE_AGNOSTIC = "Megatron asks its config for the device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """`replace(original)` takes the place of `module:attribute`."""

    symbol: str
    replace: Callable[[Any], Any]
    reason: str = STANDS_IN
    until: str = DEVICE_AGNOSTIC
    versions: tuple[str, ...] = SUPPORTED
    where: str = CPU_ONLY

    def apply(self) -> None:
        """Put the replacement in place; a symbol that is not there means that the patch outlived its cause."""
        module_name, _, path = self.symbol.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, self.replace(getattr(owner, name, None)))


FACTORIES = (
    "tensor empty zeros ones full arange rand randn randint as_tensor "
    "empty_like zeros_like ones_like full_like rand_like"
).split()

TORCH_PATCHES: tuple[Patch, ...] = (
    Patch(symbol="torch.cuda:current_device", replace=cpu.constant(cpu.CPU)),
    Patch(symbol="torch.cuda:device_count", replace=cpu.constant(1)),
    Patch(symbol="torch.cuda:set_device", replace=cpu.nothing),
    Patch(symbol="torch.cuda:synchronize", replace=cpu.nothing),
    Patch(symbol="torch.cuda:empty_cache", replace=cpu.nothing),
    Patch(symbol="torch.cuda:memory_allocated", replace=cpu.constant(0)),
    Patch(symbol="torch.cuda:stream", replace=cpu.null_stream_context),
    Patch(symbol="torch.cuda:Stream", replace=lambda _: cpu.Stream),
    Patch(symbol="torch.cuda:Event", replace=lambda _: cpu.Stream),
    Patch(symbol="torch.cuda:current_stream", replace=cpu.current_stream),
    Patch(symbol="torch.cuda:default_stream", replace=cpu.current_stream),
    Patch(symbol="torch.cuda.nvtx:range_push", replace=cpu.nothing),
    Patch(symbol="torch.cuda.nvtx:range_pop", replace=cpu.nothing),
    Patch(
        symbol="torch.cuda:manual_seed",
        replace=lambda _: torch.manual_seed,
        reason="without CUDA it is queued and never runs: expert-parallel ranks then start with equal experts",
    ),
    Patch(symbol="torch.cuda:get_rng_state", replace=lambda _: lambda *args, **kwargs: torch.get_rng_state()),
    Patch(
        symbol="torch.cuda.random:get_rng_state",
        replace=lambda _: lambda *args, **kwargs: torch.get_rng_state(),
    ),
    Patch(
        symbol="torch.cuda:set_rng_state",
        replace=lambda _: lambda state, *args, **kwargs: torch.set_rng_state(state),
    ),
    Patch(symbol="torch:Tensor.cuda", replace=cpu.same_tensor),
    Patch(symbol="torch.nn:Module.cuda", replace=cpu.same_tensor),
    Patch(symbol="torch:Tensor.record_stream", replace=cpu.nothing),
    Patch(symbol="torch:Tensor.to", replace=cpu.moved_to_cpu),
    Patch(symbol="torch:Tensor.type", replace=cpu.cuda_type_names),
    Patch(symbol="torch.distributed:all_to_all_single", replace=cpu.listed_splits),
    Patch(symbol="torch.distributed:all_gather", replace=cpu.uneven_all_gather),
    Patch(symbol="torch.distributed:barrier", replace=cpu.plain_barrier),
    Patch(
        symbol="torch.distributed.distributed_c10d:ProcessGroupGloo",
        replace=cpu.on_one_device,
        reason="each of a mesh's twenty groups has a thread that wakes a hundred times a second",
        until="the groups of a process share a device",
    ),
    *(Patch(symbol=f"torch:{name}", replace=cpu.on_cpu) for name in FACTORIES),
)


MEGATRON_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        replace=lambda _: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    ),
    Patch(
        symbol="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        replace=lambda _: lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
        reason="without CUDA it is queued and never runs: the tracker of random states never switches",
    ),
    Patch(
        symbol="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.__init__",
        replace=replacements.without_fp8,
        reason="it reads the default fp8=False as `fp8 is not None` and then needs TransformerEngine",
        until="it tests the value of fp8",
    ),
    Patch(
        symbol="megatron.core.tensor_parallel.random:_get_share_storage",
        replace=replacements.copied_storage,
        versions=("0.19",),
        reason="recomputation compiles a C++ extension at run time, on every rank",
        until="torch can share a storage without one",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.moe_utils:te_general_gemm",
        replace=lambda _: None,
        reason="the name is undefined without TransformerEngine and read with moe_router_dtype",
        until="it is defined as None",
    ),
    Patch(
        symbol="megatron.core.transformer.multi_latent_attention:HAVE_TE",
        replace=lambda _: False,
        versions=("0.16",),
        reason="importing Megatron's own stand-ins counts as having TransformerEngine; isinstance() then fails",
        until="0.19, which asks TransformerEngine itself",
    ),
)


ROUTER_LOSS_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale",
        replace=replacements.summed_over_shards,
        versions=("0.16",),
        where=CUDA_TOO,
        reason="with a per-token loss each rank scales its share of the balance and z losses by its own tokens only, "
        "so that they weigh tp * cp times less than on one rank",
        until="0.19, which multiplies by the size of the tensor and context parallel group",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale",
        replace=replacements.scale_as_scalar,
        versions=("0.19",),
        where=CUDA_TOO,
        reason="the schedule's scale has one element, and cannot be copied into the scalar that a backward pass "
        "outside of a schedule leaves behind",
        until="both have one shape",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        replace=replacements.padding_counts_no_tokens,
        where=CUDA_TOO,
        reason="a mask of padding [tokens] does not broadcast over the experts: an error, or with as many tokens as "
        "experts the wrong ones",
        until="it makes a column of the mask",
    ),
    Patch(
        symbol="megatron.core.transformer.moe.router:get_tokens_per_expert_and_token_count",
        replace=replacements.counted_over_shards,
        where=CUDA_TOO,
        reason="with padding each rank weighs the balance loss by its own share of the tokens, of which a row's end "
        "has fewer, and a row of padding alone divides by zero",
        until="the loss is weighed by the tokens of all ranks",
    ),
    Patch(
        symbol="megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
        replace=replacements.padding_cut_on_every_stage,
        where=CUDA_TOO,
        reason="only the first pipeline stage cuts the mask of padding for sequence parallelism; on later ones it is "
        "longer than the tokens",
        until="the mask is cut on every stage",
    ),
)


MODEL_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver._mla_fused_linear_or_default",
        replace=replacements.direct_queries_unnormed,
        versions=("0.19",),
        where=CUDA_TOO,
        reason="without a latent for the queries it puts a norm before their projection when the keys' latent has one; "
        "0.16 and the published models (Moonlight) have none there",
        until="the two norms have a switch each",
    ),
    Patch(
        symbol="megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
        replace=mtp_losses_as_sums,
        where=CUDA_TOO,
        reason="0.19 weighs the loss of multi-token prediction by each microbatch's and rank's own tokens, so that its "
        "gradient depends on microbatches, packing and context parallelism; both record its mean per microbatch and "
        "rank, which for a mask of zeros is 0/0 in 0.16. Without labels 0.16 fails, and 0.19 makes up labels from the "
        "input and adds the gradient of that loss to whatever is made of the logits",
        until="its loss is a sum and a count like the main loss, computed only where labels are given",
    ),
)

CHECKPOINT_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue",
        replace=lambda _: queue.SimpleQueue(),
        where=CUDA_TOO,
        reason="planning a save starts a manager process for this queue, by spawn: seconds at the first save, a hang "
        "in a script without a main guard, an orphan after a kill. Our writers report through a ForkedCall instead",
        until="the queue is made by whoever uses it",
    ),
    Patch(
        symbol="torch.distributed._shard.sharding_spec._internals:_find_nd_overlapping_shards",
        replace=find_overlap_on_grid,
        where=CUDA_TOO,
        reason="its time grows with the square of layers x experts: minutes at every save and load of 48 x 128",
        until="it sweeps along the axis that has most shards",
    ),
    Patch(
        symbol="torch.distributed.checkpoint.default_planner:_validate_global_plan",
        replace=validate_plan_on_grid,
        where=CUDA_TOO,
        reason="the same on rank 0 at every save",
        until="it sweeps along the axis that has most shards",
    ),
    Patch(
        symbol="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
        replace=lambda _: state_by_parameter,
        where=CUDA_TOO,
        reason="with padding between buckets (overlapped reduction, tied embeddings) it saves values of neighbours, "
        "silently; and it copies the state four times, even where no other rank has a part of it",
        until="offsets are counted as the gathered buffer is laid out",
    ),
)

SPEED_PATCHES: tuple[Patch, ...] = tuple(
    Patch(
        symbol=f"megatron.core.{symbol}", replace=replace, reason=reason, until="Megatron is tuned for CPUs"
    )
    for symbol, (replace, reason) in REPLACEMENTS.items()
)

NO_FUSED_ADAM = "Megatron cannot load DistributedOptimizer state into torch's Adam (a step per parameter)"
ADAM_PATCHES: tuple[Patch, ...] = tuple(
    Patch(symbol=f"megatron.core.optimizer{name}", replace=replace, reason=NO_FUSED_ADAM, where=CUDA_TOO,
          until="DistributedOptimizer takes a torch Adam without state")
    for name, replace in (
        (":Adam", lambda _: FusedAdam),
        (":USING_PYTORCH_OPTIMIZER", lambda _: False),
        (".distrib_optimizer:Adam", lambda _: FusedAdam),
        (".distrib_optimizer:HAVE_APEX_OR_TE", lambda _: True),
        (".distrib_optimizer:USING_APEX_OPTIMIZER", lambda _: True),
    )
)  # fmt: skip


HARMLESS_WARNINGS = (
    # Message (the beginning, as a regular expression): what Megatron does with torch, or cannot have on a CPU.
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"full scope is deprecated",
    r"When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX",
    r"Apex is not installed",
    r"Transformer Engine and Apex are not installed",
)


def megatron_version() -> str:
    """The installed Megatron-Core's "major.minor"."""
    from importlib.metadata import version

    return ".".join(version("megatron-core").split(".")[:2])


def has_module(name: str) -> bool:
    """Whether `name` can be imported here, without importing it."""
    return importlib.util.find_spec(name) is not None


def as_experts_entry(experts: type) -> Any:
    """`experts` in the form in which a spec provider's `grouped_mlp_modules` answers: a pair, a builder since 0.19."""
    return (experts, None) if megatron_version() == "0.16" else experts


def with_moe_layer(mlp: Any, moe_layer: type) -> Any:
    """The spec of a Mixture-of-Experts layer with another class for it; the spec is a partial since 0.19."""
    if megatron_version() == "0.16":
        mlp.module = moe_layer
        return mlp
    return functools.partial(moe_layer, *mlp.args, **mlp.keywords)


def router_loss_report() -> Any:
    """Megatron's function that reduces what the routers recorded of their losses, and forgets it."""
    if megatron_version() == "0.16":
        from megatron.core.transformer.moe.moe_utils import track_moe_metrics

        return track_moe_metrics
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return get_moe_metrics_tracker().report


def writer_choice() -> dict[str, str]:
    """Arguments that make a checkpoint strategy plan for Megatron's own writer: since 0.19 NVIDIA's is the default."""
    return {} if megatron_version() == "0.16" else {"async_strategy": "mcore"}


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """In the place of `torch.compile`, as a function and as a decorator with arguments."""
    return model if model is not None else lambda inner: inner


def _install() -> None:
    version = megatron_version()
    if version not in SUPPORTED:
        raise ConfigError(
            f"megatron-core {version} is installed; this code knows {' and '.join(SUPPORTED)}, whose inner "
            "parts differ. Install one of these."
        )
    on_cuda = torch.cuda.is_available()
    compile_ = torch.compile
    if not on_cuda:
        # `with torch.device(...)` knows the factories by identity, from the first time it is asked: torch's own.
        importlib.import_module("torch.utils._device")._device_constructors()
        for patch in TORCH_PATCHES:
            patch.apply()
        # Megatron's jit_fuser is whatever torch.compile is at this moment; on a CPU compiling costs more than it saves.
        torch.compile = _uncompiled
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    importlib.import_module("megatron.core")
    importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    torch.compile = compile_
    wanted = [*ROUTER_LOSS_PATCHES, *MODEL_PATCHES, *CHECKPOINT_PATCHES]
    if not on_cuda:
        wanted += [*MEGATRON_PATCHES, *SPEED_PATCHES]
    if not (has_module("transformer_engine") or has_module("apex")):
        wanted += ADAM_PATCHES
    for patch in wanted:
        if version in patch.versions:
            patch.apply()
    # On a CPU the generator of the CPU is also that of the "device": the warning would come at every fork.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # 0.16 asks for the class of an MoE layer by name, and says so of ours, which it then builds like its own.
    logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)
    # 0.19 calls its own way to write, and the common.pt that 0.16 can read too, deprecated at every save and load.
    for name in ("torch", "common"):
        logging.getLogger(f"megatron.core.dist_checkpointing.strategies.{name}").setLevel(logging.ERROR)


_install()
